"""The private boundary: what keeps private input inside, and the one place where exceptions end."""
