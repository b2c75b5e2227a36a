"""Mistake 7: an owner's exemplars flip coins of their own, so that one owner sits in two members."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from moments import exemplars_of
from owner_laws import Owners, check_selector

from langchain_dpicl import ExemplarStore, PoissonExampleSelector

OWNERS: Owners = (("ann", 2), ("bob", 1))
RATE = 0.5


class CoinsByExemplar(PoissonExampleSelector):
    """The mutant: samples from a store in which each exemplar is its own owner."""

    def __init__(self, store: ExemplarStore, members: int, **options: Any) -> None:
        rows = [{"input": exemplar["input"]} for exemplar in exemplars_of(store)]
        apart = ExemplarStore.from_records(rows, DeterministicFakeEmbedding(size=2), output_key=None)
        super().__init__(apart, members, **options)


def of_ann(bucket: frozenset[str]) -> str:
    """Yes where ann sits, no elsewhere."""
    return "yes" if "ann" in bucket else "no"


def check(kind: type[PoissonExampleSelector]) -> None:
    """Exact enumeration of whole releases: every coin, member and order of the selector, every noise of the vote; with
    and without all exemplars of one owner, both directions, against the profile where ONE member's output moves."""
    check_selector(kind, OWNERS, of_ann, RATE)


def test_7_one_owner_in_two_members_is_caught() -> None:
    check(PoissonExampleSelector)
    with pytest.raises(AssertionError, match="is claimed"):
        check(CoinsByExemplar)
