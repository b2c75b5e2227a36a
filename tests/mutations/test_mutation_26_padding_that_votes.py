"""Mistake 26: padding calls that vote. An owner who comes takes a vote away from the padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from owner_laws import Owners, check_calls, counts_law, store_of

from langchain_dpicl import PoissonExampleSelector, PrivateEnsemble

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


def fills_an_empty_bucket(given: Mapping[str, Any]) -> str:
    """Writes a public example into the list that it was given, if there is none, and answers by what stands there."""
    examples = given["examples"]
    if not examples:
        examples.append({"input": "public"})
    return "no" if examples[0]["input"] == "public" else "yes"


@pytest.mark.parametrize("how", [PADDED, {"calls": 2, "max_calls": 4}, {"members": 4, "max_exemplars": 9}])
def test_padding_and_empty_buckets_have_no_vote_though_the_member_fills_them(how: dict[str, Any]) -> None:
    """Whoever counts a call because its list holds something afterwards lets padding vote."""
    laws = counts_law(
        PrivateEnsemble(PoissonExampleSelector(store_of(OWNERS[::2]), rate=0.5, **how), fills_an_empty_bucket), 0.5
    )
    assert all(no == 0 for _, no, _ in laws), "an answer to an empty list"


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
