"""The choices of a plan before it is frozen: a vote's mechanism, a rate; and the plans that are refused as all noise.

All of it looks at public numbers alone: the promise, the number of releases, of calls, and
of owners who may take part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import pdtrc

from langchain_dpicl.errors import InfeasiblePlan, InvalidParameter
from langchain_dpicl.privacy.checks import real, whole
from langchain_dpicl.privacy.lines import LineRequest, PlanLine
from langchain_dpicl.privacy.mechanisms import OWN_CALLS
from langchain_dpicl.privacy.solving import about, solve
from langchain_dpicl.privacy.votes import GAUSSIAN, LEAD, WINNER, VoteNoise, vote_mechanisms

OVERTURNED = 0.1
"""Above this chance that noise overturns a unanimous vote, a plan is refused unless its user accepts the noise."""

FULLEST = 4.0
"""The most owners that a bucket is expected to hold, if the plan chooses the rate."""

CALLS = 20
"""Calls of one owner each on average, unless told otherwise."""

ELIGIBLE = 0.2
"""The share of the owners that a question is taken to find near enough, unless told otherwise."""

_RATES = 9

_PASSED = 1e-3
"""The probability that a release makes more calls than it is padded to."""


@dataclass(frozen=True)
class Crowd:
    """The public numbers of one release's outputs.

    Attributes
    ----------
    members
        N; with own calls a number that they rarely pass, and are padded to by default.
    expected
        The number of outputs that are expected to count: empty buckets count nothing.
    own_calls
        True if an owner adds or removes one output. Otherwise it replaces one.
    """

    members: int
    expected: float
    own_calls: bool = False

    @classmethod
    def of(
        cls, members: int, rate: float, owners: int | None, calls: float | None = None, capped: bool = False
    ) -> Crowd:
        """The outputs at this rate, if so many owners may take part (None: unknown).

        ``calls``: the expected number of calls of one owner each; None for shared buckets.
        ``capped``: calls have a cap.
        """
        if calls is not None:
            expected = calls if owners is None else rate * owners
            if not capped:
                return cls(max(members, usual_most(expected)), expected, True)
            return cls(members, min(expected, members))
        return cls(members, members if owners is None else filled(members, rate, owners))

    def ahead_by(self, share: float) -> int:
        """The lead of a winner who is ahead by this share of the expected outputs: at least 1."""
        return max(1, math.floor(share * self.expected + 1e-9))


def calls_made(members: int | None, calls: float | None, pad_to: int | None, max_calls: int | None) -> int:
    """The public number of calls of a release: N, or what calls of one owner each are padded to; checked."""
    if (members is None) == (calls is None):
        raise InvalidParameter("members", members, "given for shared buckets, or calls for one owner per call")
    if calls is None:
        for name, value in (("pad_to", pad_to), ("max_calls", max_calls)):
            if value is not None:
                raise InvalidParameter(name, value, "None without calls: members is their number")
        return whole("members", members, at_least=2)
    calls = real("calls", calls, at_least=1.0, at_most=1e6)
    if max_calls is not None:
        if pad_to is not None:
            raise InvalidParameter("pad_to", pad_to, "None with max_calls, which is the number of all calls")
        return whole("max_calls", max_calls, at_least=max(2, math.ceil(calls)))
    return usual_most(calls) if pad_to is None else whole("pad_to", pad_to)


def usual_most(calls: float) -> int:
    """The number that a Poisson number of this mean exceeds with probability `_PASSED` at most."""
    most = max(2, math.floor(calls))
    while pdtrc(most, calls) > _PASSED:
        most += 1
    return most


def filled(members: int, rate: float, owners: int) -> float:
    """The expected number of N shared buckets that hold an owner: N (1 - (1 - rate / N)^owners)."""
    return members * -math.expm1(owners * math.log1p(-min(rate / members, 1.0 - 1e-12)))


def best_rate(epsilon: float, delta: float, count: int, members: int, owners: int) -> float:
    """The rate for N shared buckets with the largest expected margin over noise.

    The margin grows with the number of buckets that are not empty, and the noise with the
    rate. The yardstick for all mechanisms is the Gaussian vote. Rates at which a bucket
    holds 1/4 to `FULLEST` owners on average are compared.
    """
    best, chosen = -1.0, 1.0
    for owners_each in np.geomspace(FULLEST / 16.0, FULLEST, _RATES).tolist():
        rate = min(1.0, members * owners_each / owners)
        sigma = _noise(epsilon, delta, LineRequest(GAUSSIAN, rate, count)) or math.inf
        signal = filled(members, rate, owners) / sigma
        if signal > best * (1.0 + 1e-9):
            best, chosen = signal, rate
    return float(f"{chosen:.6g}")


def best_vote(
    epsilon: float, delta: float, count: int, rate: float, crowd: Crowd, labels: int, lead: float = LEAD
) -> str:
    """The mechanism of a vote whose winner, ahead by ``lead`` of the expected votes, is overturned less often."""
    return best_of(compared(epsilon, delta, count, rate, crowd, labels, lead))


def best_of(found: dict[str, tuple[float, float]]) -> str:
    """The mechanism of `compared` that is overturned less often."""
    return min(found, key=lambda name: found[name][1], default=WINNER)


def compared(
    epsilon: float, delta: float, count: int, rate: float, crowd: Crowd, labels: int, lead: float = LEAD
) -> dict[str, tuple[float, float]]:
    """The mechanisms of a vote: about their noise, and how likely it overturns a winner ahead by ``lead`` of the votes.

    A mechanism that no noise makes private enough is left out.
    """
    found = {}
    for name in vote_mechanisms(labels):
        noise_of = about if crowd.own_calls or name != WINNER else _noise  # which takes as little time
        parameter = noise_of(epsilon, delta, LineRequest(name, rate, count, options=options_of(crowd)))
        if parameter is not None:
            noise = VoteNoise(name, parameter, crowd.own_calls)
            found[name] = parameter, noise.flip(crowd.ahead_by(lead), labels)
    return found


def crowd_of(line: PlanLine, members: int | None, expected: float | None) -> Crowd | None:
    """The outputs of a line's releases, from N or from the number that counts. None if neither is known."""
    own = line.own_calls
    if expected is None and own and line.owners is not None:
        expected = line.rate * line.owners
    if expected is not None:
        most = usual_most(expected) if own else math.ceil(expected)
        return Crowd(max(members or 0, most), expected, own)
    if members is None:
        return None
    return Crowd.of(members, line.rate, line.owners, members if own else None)


def options_of(crowd: Crowd) -> dict[str, Any]:
    """The options of a mechanism on such outputs."""
    return {OWN_CALLS: 1.0} if crowd.own_calls else {}


def _noise(epsilon: float, delta: float, request: LineRequest) -> float | None:
    try:
        return solve(epsilon, delta, {"one": request})[0]
    except InfeasiblePlan:
        return None


def refuse_noise(line: PlanLine, overturned: float, crowd: Crowd, tickets: bool) -> None:
    """Raise `InfeasiblePlan` if noise overturns even a unanimous vote too often, with what would help."""
    if overturned <= OVERTURNED:
        return
    helps = [f"fewer {'tickets' if tickets else 'releases'} than {line.count:,}"]
    if not tickets:
        helps.append("tickets=True with a threshold (then the count is each owner's, not the questions')")
    if not line.own_calls:
        helps.append("one owner per call (calls= without max_calls=, which takes less noise)")
    raise InfeasiblePlan(
        f"with this plan's noise ({line.family.parameter} {line.parameter:.4g}) an answer on which all "
        f"{crowd.expected:.3g} expected outputs agree is overturned with probability {overturned:.2g} "
        f"(at most {OVERTURNED:g}): nothing was frozen or charged. What helps: {', '.join(helps)}, more owners or "
        "calls, a larger epsilon, or a PrivateHead, which is released once and answers without end. To use it all the "
        "same: PrivacyBudget(..., accept_noise=True), or --accept-noise"
    )
