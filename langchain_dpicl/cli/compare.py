"""One question, three answers: private, the same ensemble without privacy, and zero-shot.

For whoever owns the data and wants to see what privacy costs. The ensemble's plain majority is NOT private: it never
leaves this module in a release, and a service must not show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from langchain_dpicl.aggregators import NoisyVote
from langchain_dpicl.budget import Receipt
from langchain_dpicl.budget.line import RELEASED
from langchain_dpicl.calls.flow import Flow, run
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.private.boundary import run_private
from langchain_dpicl.release.sealed import SealedRelease
from langchain_dpicl.release.transaction import Charged, Request, transact


@dataclass(frozen=True)
class Comparison:
    """The private answer with its receipt, and two that are not private (None where nobody gave a label)."""

    private: str | None
    receipt: Receipt
    ensemble_not_private: str | None
    zero_shot: str | None


def compare(sealed: SealedRelease, values: Mapping[str, Any]) -> Comparison:
    """Answer one question in three ways, from ONE sample and one charge.

    The private answer is a release like any other, with the same checks, charge, sampling, noise and receipt as
    ``sealed.invoke``. Beside it stand the plain majority of the very same members, and the member's answer without
    examples. Raises what ``sealed.invoke`` raises, except that abstention is an answer of None.
    """
    vote = sealed.aggregator
    if not isinstance(vote, NoisyVote) or vote.scores:
        raise InvalidParameter("sealed", vote, "a release by NoisyVote(labels) without scores")
    compared = object.__new__(_Compared)
    vars(compared).update(vars(sealed))
    (release, majority), receipt = run(transact(compared, values))
    return Comparison(
        private=release if isinstance(release, str) else None,
        receipt=receipt,
        ensemble_not_private=majority,
        zero_shot=zero_shot(sealed, sealed.ensemble.check_request(values)),
    )


class _Compared(SealedRelease):
    """The same release, never replayed, with the plain majority of its members beside it."""

    def check(self, values: Any) -> Request:
        """A question that is charged each time."""
        return replace(super().check(values), id=None)

    def work(self, charged: Charged) -> Flow[Any]:
        """The vote, and the majority of the same members."""
        (vote, vector), line = charged.ready, charged.request.line
        values, who = charged.request.asked, charged.participants
        outputs = yield from self.ensemble.outputs(values, line.rate, vote, vector, who)
        counts = vote.counts(outputs)[:-1]
        release = yield partial(vote.aggregate, outputs, line.parameter, self._randomness)
        return release, vote.labels[int(counts.argmax())] if counts.max() > 0 else None

    def kept(self, charged: Charged, release: Any) -> tuple[str, str | None, int]:
        """Abstention is an answer here."""
        return RELEASED, None, 0

    def answer(self, charged: Charged, release: Any, receipt: Receipt) -> Flow[Any]:
        """Both."""
        yield from ()
        return release


def zero_shot(sealed: SealedRelease, values: Mapping[str, Any]) -> str | None:
    """The member's answer without examples: touches nothing private."""
    vote = sealed.aggregator
    assert isinstance(vote, NoisyVote)
    (output,) = run_private(sealed.ensemble.public_member, [sealed.ensemble.public_request(values)], max_concurrency=1)
    index = vote.parse(output)
    return None if index is None else vote.labels[index]
