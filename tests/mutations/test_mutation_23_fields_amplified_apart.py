"""Mistake 23: the fields of one structured answer amplified separately, though they share a sample."""

from __future__ import annotations

from functools import cache

import pytest
from exact import Branching, Law, law
from pydantic import BaseModel, Field
from test_mutation_13_amplified_apart import AmplifiedApart, check

from langchain_dpicl import Structured
from langchain_dpicl.privacy import MECHANISMS, BoundedRange, Profile, mechanisms
from langchain_dpicl.privacy.choice import Crowd


class Answer(BaseModel):
    sick: bool
    calls: bool
    level: int = Field(ge=0, le=2)


EPS0 = 6.0


@cache
def answer_law(rows: tuple[tuple[int, ...], ...], own_calls: bool) -> Law:
    """The exact law of an answer's three fields, which are drawn from the same outputs."""
    bound = Structured(Answer).under("structured", Crowd(2, 2.0, own_calls))

    def run(randomness: Branching) -> tuple[object, ...]:
        released = bound.aggregate(rows, EPS0, randomness)
        return released.sick, released.calls, released.level

    return law(run)


class FieldsApart(mechanisms.FieldDraws):
    """The mutant: as if each field had owners of its own."""

    def build(self, parameter: float) -> Profile:
        return AmplifiedApart(tuple(BoundedRange(parameter * share) for share in self.shares))


@pytest.mark.parametrize("own_calls", [False, True], ids=["replaced", "added"])
def test_23_fields_of_an_answer_amplified_apart_are_caught(own_calls: bool) -> None:
    """The owner says of all three fields what the others do not say."""
    others, owner, stand_in = ((0, 0, 0),) * 2, (1, 1, 2), (0, 0, 0)
    absent = others if own_calls else (stand_in, *others)
    present = (owner, *others)
    pairs = [(answer_law(present, own_calls), answer_law(absent, own_calls))]
    options = {**Structured(Answer).options, "own_calls": float(own_calls)}
    check(pairs, MECHANISMS["structured"].of(options).profile(EPS0))
    with pytest.raises(AssertionError, match="is claimed"):
        check(pairs, FieldsApart.of(options).profile(EPS0))
