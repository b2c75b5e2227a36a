"""The registry of kinds of release, and what each says about itself."""

from __future__ import annotations

import inspect
from datetime import date
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel, Field

import langchain_dpicl
from langchain_dpicl import (
    CandidateVote,
    EmbeddingMean,
    Keywords,
    LabelVote,
    NoisyMean,
    NoisyMedian,
    NoisyVote,
    Structured,
)
from langchain_dpicl.aggregators import KINDS, Aggregator
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.private.boundary import ABSTAIN

EMBEDDINGS = DeterministicFakeEmbedding(size=8)


class Visit(BaseModel):
    urgent: bool
    days: int = Field(ge=0, le=30)


def test_worst_cases_of_a_kind_have_one_plan_and_one_where_all_others_agree() -> None:
    stated = [cases for kind in KINDS.values() if (cases := kind.worst_cases())]
    assert stated
    for cases in stated:
        assert len({repr(case.aggregator.options) for case in cases}) == 1
        assert any(set(case.others) <= {case.base} for case in cases)


def test_every_kind_that_the_face_exports_has_one_name() -> None:
    assert set(KINDS) >= {
        "vote", "label-vote", "candidate-vote", "embedding", "joint-em", "ptr", "mean", "median", "structured",
    }  # fmt: skip
    exported = [getattr(langchain_dpicl, name) for name in langchain_dpicl.__all__]
    made = [each for each in exported if inspect.isclass(each) and issubclass(each, Aggregator)]
    for kind, each in KINDS.items():
        assert each.kind == kind
        assert not inspect.isabstract(each)
        assert any(issubclass(each, known) for known in made)
    assert {each.kind for each in made if not inspect.isabstract(each)} <= KINDS.keys()


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("vote", {"labels": ["a", "b"]}),
        ("label-vote", {"labels": ["a", "b"]}),
        ("candidate-vote", {"embeddings": EMBEDDINGS, "candidates": ["a", "b"]}),
        ("embedding", {"embeddings": EMBEDDINGS, "candidates": ["a", "b"]}),
        ("joint-em", {"k": 3}),
        ("ptr", {"k": (2, 4)}),
        ("mean", {"low": 0, "high": 1}),
        ("median", {"low": 0, "high": 1}),
        ("structured", {"model": Visit}),
    ],
)
def test_a_kind_is_made_of_its_constructors_parameters(kind: str, arguments: dict[str, Any]) -> None:
    assert type(KINDS[kind].constructor()(**arguments)) is KINDS[kind]


@pytest.mark.parametrize(
    ("aggregator", "release", "right", "share"),
    [
        (NoisyVote(["Porch", "Flask"]), "Flask", " flask.", 1.0),
        (NoisyVote(["Porch", "Flask"]), None, "Flask", 0.0),
        (NoisyVote(["Porch", "Flask"], scores=True), {"Porch": 3, "Flask": 2}, "Flask", 0.0),
        (
            LabelVote(["Porch", "Flask"], details=True),
            {"label": "Flask", "confidence": 1.0, "counts": {}},
            "Flask",
            1.0,
        ),
        (NoisyMedian(0, 10), 7, "in 7 days", 1.0),
        (NoisyMean(0.0, 10.0), 7.0, "2", 0.5),
        (NoisyMedian(date(2026, 1, 1), date(2026, 1, 11)), date(2026, 1, 6), "2026-01-06", 1.0),
        (Structured(Visit), Visit(urgent=True, days=3), '{"urgent": "yes", "days": 4}', 0.5),
        (Structured(Visit), Visit(urgent=True, days=3), {"days": 3}, 1.0),
    ],
)
def test_a_release_is_compared_with_the_output_of_an_example(
    aggregator: Aggregator[Any], release: Any, right: object, share: float
) -> None:
    assert aggregator.hit(release, right) == pytest.approx(share, abs=1e-4)


def test_what_most_members_say_is_known_of_votes_alone() -> None:
    vote = NoisyVote(["Porch", "Flask"])
    assert vote.majority([1, 1, 0, ABSTAIN]) == "Flask"
    assert vote.majority([ABSTAIN]) is None
    assert Keywords.ptr(2).majority([frozenset({"a"})]) is None


def test_members_are_asked_for_what_a_kind_reads() -> None:
    usual = "Write the note for the text"
    assert Keywords.joint_em().asked(usual) == usual
    assert Structured(Visit).asked(usual) == f'{usual} as JSON: {{"urgent": true or false, "days": 0 to 30}}'


# -- parameters without any use ----------------------------------------------------------------------------------------


class Choice(BaseModel):
    urgent: bool
    day: date = Field(ge=date(2026, 1, 1), le=date(2026, 12, 31))


@pytest.mark.parametrize(
    ("make", "parameter"),
    [
        (lambda: Structured(Choice, decimal=","), "decimal"),
        (lambda: Structured(Choice, decimal="x"), "decimal"),
        (lambda: NoisyMedian(date(2026, 1, 1), date(2026, 1, 2), decimal=","), "decimal"),
        (lambda: NoisyMean(date(2026, 1, 1), date(2026, 1, 2), decimal=","), "decimal"),
        (lambda: CandidateVote(EMBEDDINGS, ["x", "y"], 20), "n_candidates"),
        (lambda: EmbeddingMean(EMBEDDINGS, ["x", "y"], 100), "n_candidates"),
        (lambda: EmbeddingMean(EMBEDDINGS, None, 100, release="vector"), "n_candidates"),  # type: ignore[call-overload]
        (lambda: Keywords.ptr(3, select=1.0), "select"),
        (lambda: Keywords.ptr((3, 3), select=1.0), "select"),
        (lambda: NoisyVote(["a", "b"], scores=True, lead=0.3), "lead"),
        (lambda: NoisyVote(["a", "b"], mechanism="vote", lead=0.3), "lead"),
    ],
)
def test_a_parameter_without_any_use_is_refused_in_python(make: Any, parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        make()
    assert caught.value.parameter == parameter


def test_a_parameter_that_is_left_out_has_its_default() -> None:
    chain = RunnableLambda(str)
    assert CandidateVote(EMBEDDINGS, chain).n_candidates == CandidateVote(EMBEDDINGS, chain, None).n_candidates == 20
    assert EmbeddingMean(EMBEDDINGS, chain).n_candidates == 100
    assert Keywords.ptr((3, 5)).options == {"select": 1.0}
    assert Keywords.ptr(3).options == {"select": 0.0}
    assert NoisyVote(["a", "b"], lead=None).lead == 0.3
    for used in ({"details": True}, {"prior": {"a": 1.0}, "mechanism": "vote-em"}, {}):
        vote: Any = NoisyVote(["a", "b"], lead=0.5, **used)  # type: ignore[call-overload]
        assert vote.lead == 0.5
