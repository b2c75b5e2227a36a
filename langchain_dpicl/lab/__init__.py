"""The lab: evaluation, attacks, advice and pictures. The rest of the package does not import it."""
