"""One question, three answers: private, the same ensemble without privacy, and zero-shot.

For whoever owns the data and wants to see what privacy costs. The ensemble's plain majority is NOT private: it never
leaves this module in a release, and a service must not show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.aggregators import NoisyVote
from langchain_dpicl.budget import Charge, Receipt
from langchain_dpicl.budget.line import IN_TRANSACTION
from langchain_dpicl.calls.flow import run
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.private.boundary import check_surroundings, run_private
from langchain_dpicl.release.aggregate import SealedRelease


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
    request = sealed.ensemble.check_request(values)
    check_surroundings()
    line = sealed.line()
    query = sealed.ensemble.selector.embed_query(request)
    (charge,) = run(line.charging(IN_TRANSACTION))
    assert isinstance(charge, Charge)
    outputs = sealed.ensemble.run(request, line.rate, vote, query)
    release = vote.aggregate(outputs, line.parameter, sealed._randomness)
    receipt = line.record(charge)
    counts = vote.counts(outputs)[:-1]
    majority = vote.labels[int(counts.argmax())] if counts.max() > 0 else None
    return Comparison(
        private=release if isinstance(release, str) else None,
        receipt=receipt,
        ensemble_not_private=majority,
        zero_shot=zero_shot(sealed, request),
    )


def zero_shot(sealed: SealedRelease, values: Mapping[str, Any]) -> str | None:
    """The member's answer without examples: touches nothing private."""
    vote = sealed.aggregator
    assert isinstance(vote, NoisyVote)
    (output,) = run_private(sealed.ensemble.public_member, [sealed.ensemble.public_request(values)], max_concurrency=1)
    index = vote.parse(output)
    return None if index is None else vote.labels[index]
