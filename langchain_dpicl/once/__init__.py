"""Releases that are made once: each is charged when it is made, and everything computed from it later costs nothing."""
