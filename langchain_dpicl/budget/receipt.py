"""The receipt of a release: its cost and the releases left. Public, and kept in the ledger."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple, cast

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
    """The principal whose releases are counted; None if all callers share one counter."""
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
    None if owners pay with tickets: such a line has no end."""
    tokens: int | None
    """How many tokens it counts for, on a line that counts them."""
    outcome: str
    """"released", or in words the answer that was given instead."""
    replayed: bool
    """Whether this is an earlier release's receipt, whose answer was given once more at no cost."""
    query: str | None
    """A keyed hash of the query (its text if the deployer keeps queries), if there was one."""
    time: str
    """When it was charged: UTC, ISO 8601, from the machine's clock. Nothing is computed from it."""


@dataclass(frozen=True)
class Replayed:
    """An answer that was released before: given again, byte for byte, at no cost."""

    answer: str
    receipt: Receipt


def release_id(budget: str, line: str, principal: str, counter_id: int, number: int) -> str:
    """The id of a release. It shows a principal's counter instead of its name."""
    return f"{budget}:{line}:{counter_id}.{number}" if principal else f"{budget}:{line}:{number}"


class ReleaseId(NamedTuple):
    """The parts of a release's id."""

    budget: str
    line: str
    counter: int | None
    number: int


def parse_release_id(text: str) -> ReleaseId | None:
    """The parts of an id that `release_id` made; None for any other text."""
    pattern = r"(.*):([^:]*):(?:([0-9]{1,18})\.)?([0-9]{1,18})"
    found = re.fullmatch(pattern, str(text), re.DOTALL)
    if found is None:
        return None
    budget, line, counter, number = found.groups()
    return ReleaseId(budget, line, None if counter is None else int(counter), int(number))


def read_receipt(text: str, *, replayed: bool = False) -> Receipt:
    """A receipt as the ledger holds it."""
    return cast("Receipt", {**json.loads(text), "replayed": replayed})
