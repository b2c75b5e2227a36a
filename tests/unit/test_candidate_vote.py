"""`CandidateVote`: its exact law, ties, and every bad candidate."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from exact import Law, check_profile, law
from langchain_core.embeddings import Embeddings

from langchain_dpicl import CandidateVote, InvalidParameter, ModelUnavailable, NoisyVote
from langchain_dpicl.privacy import MECHANISMS
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.private.boundary import ABSTAIN

EPS0 = 1.4
AXES: dict[str, Any] = {
    "east": [1.0, 0.0], "north": [0.0, 3.0], "west": [-0.01, 0.0], "far north east": [1e300, 1e300],
    "nearly north": [0.7, 0.7 + 1e-3], "tiny east": [1e-300, 0.0], "nil": [0.0, 0.0], "wild": [math.nan, 1.0],
    "flat": [1.0], "copy of east": [2.0, 0.0],
}  # fmt: skip
CANDIDATES = ["east", "north", "west"]


class Table(Embeddings):
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [AXES[text] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return AXES[text]


def prepared(candidates: Sequence[str] = CANDIDATES) -> CandidateVote:
    return CandidateVote(Table(), candidates).prepare({"input": "a question"}, {})


def test_a_text_votes_for_its_nearest_candidate_and_the_first_wins_a_tie() -> None:
    vote = prepared()
    said = ["east", "far north east", "nearly north", "tiny east", " west ", "copy of east"]
    assert [vote.encode(text) for text in said] == [0, 0, 1, 0, 2, 0]
    assert [asyncio.run(vote.aencode(text)) for text in said] == [vote.encode(text) for text in said]
    assert prepared(["copy of east", "east"]).encode("east") == 0
    for bad in ("nil", "wild", "flat", "", "  ", None, 3, "not in the table"):
        with pytest.raises((ValueError, KeyError)):
            vote.encode(bad)


@cache
def test_an_answer_that_is_near_to_no_candidate_abstains() -> None:
    vote = CandidateVote(Table(), ["east", "west"], least_similarity=0.75).prepare({}, {})
    assert vote.encode("copy of east") == 0
    for far in ("nearly north", "far north east", "north"):  # cosines .706, .707, 0
        with pytest.raises(ValueError, match=r"^$"):
            vote.encode(far)
    assert CandidateVote(Table(), ["east", "west"], least_similarity=0.7).prepare({}, {}).encode("nearly north") == 0
    assert "least_similarity=0.75" in vote.variant, "another one is another question to the ledger"
    with pytest.raises(InvalidParameter, match="least_similarity"):
        CandidateVote(Table(), CANDIDATES, least_similarity=1.5)


def vote_law(outputs: tuple[object, ...], own_calls: bool) -> Law:
    vote = prepared().under("vote-em", Crowd(5, 3.0, own_calls))
    return law(lambda randomness: str(vote.aggregate(outputs, EPS0, randomness)))


@pytest.mark.parametrize("own_calls", [False, True], ids=["replaced", "added"])
def test_its_law_is_that_of_an_exponential_vote_and_keeps_its_profile(own_calls: bool) -> None:
    said: list[object] = [0, 1, 2, ABSTAIN]
    pairs: list[tuple[Law, Law]] = []
    for number in range(3):
        for others in itertools.combinations_with_replacement(said, number):
            laws = {one: vote_law((one, *others), own_calls) for one in said}
            without = vote_law(others, own_calls)
            pairs += [(p, without) for p in laws.values()]
            pairs += [] if own_calls else list(itertools.permutations(laws.values(), 2))
    ratios = [[math.log(p[outcome] / q[outcome]) for outcome in p] for p, q in pairs]
    assert max(max(each) - min(each) for each in ratios) == pytest.approx(EPS0, rel=1e-9)
    check_profile(
        [*pairs, *((q, p) for p, q in pairs)], MECHANISMS["vote-em"].of({"own_calls": float(own_calls)}).profile(EPS0)
    )
    named = NoisyVote(CANDIDATES).under("vote-em", Crowd(5, 3.0, own_calls))
    outputs = (0, 1, 1, ABSTAIN)
    assert vote_law(outputs, own_calls) == pytest.approx(law(lambda draws: str(named.aggregate(outputs, EPS0, draws))))


def test_what_a_plan_expects_of_it_is_what_it_expects_of_a_vote_of_labels() -> None:
    crowd = Crowd(30, 20.0, own_calls=True)
    vote, named = (each.under("vote-em", crowd) for each in (CandidateVote(Table(), CANDIDATES), NoisyVote(CANDIDATES)))
    for eps0 in (0.1, 1.0):
        assert vote.overturned(eps0) == named.overturned(eps0)
        assert vote.tells(30, eps0) == named.tells(30, eps0)


@pytest.mark.parametrize(
    "candidates", [[], "east", None, ["east"], ["east", " east "], ["east", ""], ["east", 3], {"east": 1}]
)
def test_candidates_that_are_empty_or_equal_are_refused(candidates: Any) -> None:
    with pytest.raises(InvalidParameter, match="candidates"):
        CandidateVote(Table(), candidates)


def test_a_candidate_without_a_direction_is_named() -> None:
    with pytest.raises(InvalidParameter, match=r"candidates\[1\]"):
        prepared(["east", "nil"])


@pytest.mark.filterwarnings("ignore:all zero-shot candidates are equal")
def test_zero_shot_candidates_that_are_all_equal_cost_nothing() -> None:
    vote = CandidateVote(Table(), lambda values: "east", n_candidates=3)
    assert vote.public_calls() == (vote._chain, 3)
    for answers in (["east"] * 3, ["east", None, ""], [], ["nil", "wild"]):
        with pytest.raises(ModelUnavailable, match="nothing was charged"):
            vote.prepare({}, {}, answers)
    bound = vote.prepare({}, {}, ["east", "north", "east"])
    assert (bound.texts, vote.texts) == (("east", "north"), ())
    with pytest.raises(InvalidParameter, match="n_candidates"):
        CandidateVote(Table(), lambda values: "east", n_candidates=1)


def test_nearest_is_decided_in_whole_numbers() -> None:
    """A matrix product of floats may round another way on another machine, or beside other rows."""
    vote = prepared()
    assert vote._places.dtype == np.int64
    assert vote._places.tolist() == [[65536, 0], [0, 65536], [-65536, 0]]
