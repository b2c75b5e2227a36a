"""Attacks on the product's own mechanisms: what an adversary can prove about epsilon, and about who is in the store."""
