"""The demonstration: an invented clinic's inbox, sorted by examples that stay private."""
