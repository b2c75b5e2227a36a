"""Mistake 26: padding calls that vote. An owner who comes takes a vote away from the padding."""

from __future__ import annotations

from typing import Any

import pytest
from owner_laws import Owners, check_calls

from langchain_dpicl import PrivateEnsemble

OWNERS: Owners = (("ann", 1), ("bob", 2), ("cec", 1))
PADDED = {"calls": 2, "pad_to": 4}


class CountsPadding(PrivateEnsemble):
    """The mutant: what padding says counts, as a public vote in an empty bucket may."""

    def __init__(self, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        self.count_empty = True


def owners_say_yes(owners: frozenset[str]) -> str | None:
    return "yes" if owners else "no"


def owners_abstain(owners: frozenset[str]) -> str | None:
    return None if owners else "no"


def check(kind: type[PrivateEnsemble]) -> None:
    """Exact enumeration of whole releases: every coin and priority of the selector, all calls, every draw of both
    votes; with and without each owner, both directions, against the profile of one output more or less."""
    for rule in (owners_say_yes, owners_abstain):
        for rate in (0.5, 1.0):
            check_calls(rule, OWNERS, rate, PADDED, ensemble_kind=kind)


def test_26_padding_that_votes_is_caught() -> None:
    check(PrivateEnsemble)
    with pytest.raises(AssertionError, match="is claimed"):
        check(CountsPadding)
