"""Attacks on the product's own mechanisms: lower bounds on epsilon, and membership of a record."""
