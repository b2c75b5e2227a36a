"""Synthetic demonstrations: released once, used for ever."""
