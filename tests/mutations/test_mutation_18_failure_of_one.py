"""Mistake 18: one member's or row's failure, or slowness, changes other outputs or fails the release. One owner then
decides what all others add, and a failed release says that it took part. Here: failures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from ears import Same
from exact import Branching, Law, law
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from table_model import TableModel

from langchain_dpicl import DPSampler, NoisyVote, PoissonExampleSelector, ReleaseFailed
from langchain_dpicl.decoding.answer import PrivateAnswer, Settings
from langchain_dpicl.decoding.exemplars import Draw
from langchain_dpicl.decoding.model import Demonstration, Rows, attempt
from langchain_dpicl.privacy import Randomness
from langchain_dpicl.private import boundary
from langchain_dpicl.private.boundary import ABSTAIN

Patch = pytest.MonkeyPatch
FAILED = "one owner's failure fails the release"
MOVED = "one owner's failure moves what others add"


def same(found: Law, expected: Law) -> None:
    """The very same law, of the same floats in the same order."""
    assert "failed" not in found, FAILED
    assert found == expected, MOVED


# -- tokens: a row -----------------------------------------------------------------------------------------------------

SETTINGS = Settings(max_tokens=1, min_tokens=0, top_k=3, shots=1.0, temperature=1.0, cap=1.5, stop=())
BAD = "breaks the model"


def table(demonstration: str, released: str) -> list[float]:
    if demonstration == BAD:
        raise ValueError(demonstration)
    return {"": [0.6, 0.5, 0.4], "a": [3.0, 0.0, 0.0], "b": [0.0, 0.5, 2.0]}[demonstration]


def token_law(sample: Sequence[str]) -> Law:
    """The law of the product's next token, where these demonstrations take part in it."""

    def run(randomness: Branching) -> Hashable:
        private = PrivateAnswer(
            TableModel(table, "abc"),
            SETTINGS,
            bound=1.0,
            randomness=randomness,
            slots=None,
            padding=Demonstration("padding", ""),
        )
        shown = [Demonstration(i, text) for i, text in enumerate(sample)]
        try:
            private.open("?", lambda: Draw(shown, [range(len(shown))]))
            return private.token([])
        except ValueError:
            return "failed"

    return law(run)


def check_token() -> None:
    """Exact enumeration: every sample of owners of two kinds, with an owner whose row fails at every place among them.
    The token's law is that of the sample without that owner."""
    for others in itertools.chain.from_iterable(itertools.product("ab", repeat=size) for size in range(3)):
        for place in range(len(others) + 1):
            same(token_law([*others[:place], BAD, *others[place:]]), token_law(others))


def rows_in_one_call(self: Rows, rows: Sequence[int], released: Sequence[int]) -> Any:
    """The mutant: all rows of a token in one call, whose error is the answer's."""
    assert self._whole is not None
    return self._read(self._whole, rows, released)


def all_rows_of_a_failed_call(self: Rows, rows: Sequence[int], released: Sequence[int]) -> Any:
    """The mutant: where the call fails, none of its rows adds anything."""
    assert self._whole is not None
    zero_shot = self._read(self._whole, [], released)
    found = attempt(self._read, self._whole, rows, released)
    return np.concatenate([zero_shot, np.full((len(rows), 3), np.nan)]) if found is None else found


@pytest.mark.parametrize(("mutant", "says"), [(rows_in_one_call, FAILED), (all_rows_of_a_failed_call, MOVED)])
def test_18_a_row_whose_failure_is_anothers_is_caught(
    mutant: Callable[..., Any], says: str, monkeypatch: Patch
) -> None:
    check_token()
    monkeypatch.setattr(Rows, "logits", mutant)
    with pytest.raises(AssertionError, match=says):
        check_token()


def failures(sampler: DPSampler) -> int:
    """How many of sixty answers fail."""
    failed = 0
    for i in range(60):
        try:
            assert sampler.invoke(f"question {i}") == "abcabca"
        except ReleaseFailed:
            failed += 1
    return failed


def test_18_an_owner_who_fails_a_third_of_all_answers_is_caught(
    budget_of: Any, store_of: Any, records: Any, monkeypatch: Patch
) -> None:
    """Eight tokens an answer at a rate of 1/20: one owner takes part in 34 % of them. That none of the mutant's sixty
    fails has a probability of 1e-11; the product's do not fail."""

    def spelling(demonstration: str, released: str) -> list[float]:
        if "text 3." in demonstration:
            raise ValueError(demonstration)
        wanted = len(released) % 3 if len(released) < 7 else 3
        return [100.0 if token == wanted else 0.0 for token in range(4)]  # no draw differs (below 1e-30)

    selector = PoissonExampleSelector(store_of(records(20)), 2, rate=0.05, max_exemplars=8)
    model = TableModel(spelling, "abc.", frozenset({3}))
    sampler = DPSampler(model, selector, budget_of(releases=2000), shots=1, top_k=4, max_tokens=8, slots=3)
    assert failures(sampler) == 0
    monkeypatch.setattr(Rows, "logits", rows_in_one_call)
    assert failures(sampler) > 0, FAILED


# -- votes: a member ---------------------------------------------------------------------------------------------------


class Text(str):
    """A string that cannot be read."""

    __slots__ = ()

    def strip(self, *_: Any) -> Any:
        raise RuntimeError


def raises() -> Any:
    raise RuntimeError


ODD: list[Callable[[], Any]] = [raises, lambda: AIMessage.model_construct(content=[3]), lambda: Text("neither")]
"""What a member may do whose owner's record is odd; that of an owner whose answer counts for nothing comes first."""


def vote_law(vote: NoisyVote, said: Sequence[str | Callable[[], Any]]) -> Law:
    """The law of the winner, where the members say this."""

    def member(values: Mapping[str, Any]) -> Any:
        answer = said[values["member"]]
        return answer() if callable(answer) else answer

    requests: list[boundary.MemberRequest] = [({"member": i}, []) for i in range(len(said))]
    outputs = boundary.run_private(Same(RunnableLambda(member)), requests, max_concurrency=1, reader=vote)

    def run(randomness: Branching) -> Hashable:
        try:
            return str(vote.aggregate(outputs, 0.5, randomness))
        except Exception:
            return "failed"

    return law(run)


def check_vote(vote: NoisyVote) -> None:
    """Exact enumeration: every answer of two members, and an odd third one at every place. The release's law is the one
    where that member abstains."""
    for others, odd, place in itertools.product(itertools.product(["yes", "no"], repeat=2), ODD, range(3)):
        expected = law(lambda draws: str(plain(vote, others, draws)))  # noqa: B023
        same(vote_law(vote, [*others[:place], odd, *others[place:]]), expected)


def plain(vote: NoisyVote, others: Sequence[str], randomness: Randomness) -> Any:
    """The release of these answers and one abstention."""
    return NoisyVote.aggregate(vote, [*map(vote.labels.index, others), ABSTAIN], 0.5, randomness)


class ReadAtTheEnd(NoisyVote):
    """The mutant: outputs are read where they are counted."""

    def encode(self, output: object) -> Any:
        return output

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> Any:
        texts = [str(output.text) if isinstance(output, AIMessage) else output for output in outputs]
        votes = [self.labels.index(text.strip()) if isinstance(text, str) else ABSTAIN for text in texts]
        return super().aggregate(votes, parameter, randomness)


def calls_in_a_batch(
    member: Any, requests: Sequence[boundary.MemberRequest], *, max_concurrency: int, reader: Any
) -> Any:
    """The mutant: members called as a batch, which has an error where one of them has."""
    try:
        return [reader.encode(output) for output in member.batch([{**values} for values, _ in requests])]
    except Exception:
        return [ABSTAIN] * len(requests)


def test_18_outputs_that_are_read_where_they_are_counted_are_caught() -> None:
    check_vote(NoisyVote(["yes", "no"]))
    with pytest.raises(AssertionError, match=FAILED):
        check_vote(ReadAtTheEnd(["yes", "no"]))


def test_18_members_whose_failures_are_shared_are_caught(monkeypatch: Patch) -> None:
    monkeypatch.setattr(boundary, "run_private", calls_in_a_batch)
    with pytest.raises(AssertionError, match=MOVED):
        check_vote(NoisyVote(["yes", "no"]))
