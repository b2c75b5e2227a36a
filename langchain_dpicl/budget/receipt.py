"""What a release cost and what is left: public, and kept in the ledger."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import cast

from typing_extensions import TypedDict


class Receipt(TypedDict):
    """One release's receipt. Holds nothing private, neither the answer nor (unless the deployer asks) the query."""

    id: str
    """``budget:line:number``, or ``budget:line:counter.number`` for one principal's; unique in its ledger."""
    budget: str
    plan: str
    """The first 16 hex digits of the SHA-256 of the plan's content."""
    line: str
    number: int
    """Which release of its line this is, from 1; on a line that counts tokens the last of the numbers it charged."""
    principal: str | None
    """Whose releases are counted; None where all callers share one counter."""
    assumption: str
    """What the guarantee assumes of the callers, in words."""
    mechanism: str
    """Mechanism and noise, in words."""
    epsilon_spent: float
    """Upper bound for everything released on this budget so far, on all its lines, at the plan's delta."""
    epsilon: float
    delta: float
    remaining: int | None
    """Releases (tokens) left on this line just after this one was charged, without the tokens that it never sampled.
    None where owners pay with tickets: such a line has no end."""
    tokens: int | None
    """How many tokens it counts for, on a line that counts them."""
    outcome: str
    """What came of it: "released", or in words what was answered instead."""
    replayed: bool
    """Whether this is an earlier release's receipt, whose answer was given once more at no cost."""
    query: str | None
    """A keyed hash of the query (its text if the deployer keeps queries), where one was given."""
    time: str
    """When it was charged: UTC, ISO 8601, from the machine's clock. Nothing is computed from it."""


@dataclass(frozen=True)
class Replayed:
    """An answer that was released before: given again, byte for byte, at no cost."""

    answer: str
    receipt: Receipt


def release_id(budget: str, line: str, principal: str, counter_id: int, number: int) -> str:
    """What a release is called: a principal's counter stands in for its name."""
    return f"{budget}:{line}:{counter_id}.{number}" if principal else f"{budget}:{line}:{number}"


def read_receipt(text: str, *, replayed: bool = False) -> Receipt:
    """A receipt as the ledger holds it."""
    return cast("Receipt", {**json.loads(text), "replayed": replayed})
