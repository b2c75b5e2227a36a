"""What a release cost and what is left: public, and kept in the ledger."""

from __future__ import annotations

from typing_extensions import TypedDict


class Receipt(TypedDict):
    """One release's receipt. Holds neither the query nor the answer nor anything private."""

    id: str
    """``budget:line:number``, unique in its ledger."""
    budget: str
    plan: str
    """The first 16 hex digits of the SHA-256 of the plan's content."""
    line: str
    number: int
    """Which release of its line this is, from 1."""
    mechanism: str
    """Mechanism and noise, in words."""
    epsilon_spent: float
    """Upper bound for everything released on this budget so far, on all its lines, at the plan's delta."""
    epsilon: float
    delta: float
    remaining: int
    """Releases left on this line just after this one was charged."""
    outcome: str
    """What came of it: "released", or in words what was answered instead."""
    time: str
    """When it was charged: UTC, ISO 8601, from the machine's clock. Nothing is computed from it."""
