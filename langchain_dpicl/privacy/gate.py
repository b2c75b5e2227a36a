"""The public numbers of a plan with a relevance gate: noise against rate, calls and tickets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from langchain_dpicl.errors import InfeasiblePlan
from langchain_dpicl.privacy.checks import FrozenMapping
from langchain_dpicl.privacy.choice import filled
from langchain_dpicl.privacy.lines import LineRequest
from langchain_dpicl.privacy.mechanism import Mechanism
from langchain_dpicl.privacy.mechanisms import MECHANISMS
from langchain_dpicl.privacy.plan import PrivacyPlan
from langchain_dpicl.privacy.profile import MAX_COUNT


@dataclass(frozen=True)
class Gate:
    """The public numbers of a plan with tickets: how much noise it needs if only relevant owners take part.

    Size such a plan by the owners that a query finds eligible, E of them, a public
    estimate: the rate is q = min(1, members * shots / E), or min(1, calls / E) with one
    owner per call. Its count T is not a number of queries but of each owner's tickets:
    every query that finds the owner eligible uses one. So the number of queries has no
    limit, and an owner that is eligible for a share s of them lasts T / s queries.

    If E is much below the number of owners, q is larger than without a gate, and amplifies
    less. That is the price of relevance. These numbers show it: noise against rate, members
    and tickets, beside the blind plan of the same epsilon, for T queries in all and for as
    many as an average owner's tickets last.

    ``epsilon`` and ``delta`` bound what all releases together reveal of an owner.
    ``mechanism`` and ``options`` are the family of the releases and its fixed numbers. Of
    ``owners`` a query finds ``eligible``, an estimate. ``members``, ``rate`` and
    ``tickets`` are N, q and T; with ``calls`` (one owner each) ``members`` is their
    expected number.
    """

    epsilon: float
    delta: float
    mechanism: str
    options: FrozenMapping[Any]
    eligible: int
    owners: int
    members: int
    rate: float
    tickets: int
    calls: bool = False

    @property
    def family(self) -> Mechanism:
        """The mechanism with its fixed numbers."""
        return MECHANISMS[self.mechanism].of(self.options)

    @property
    def unit(self) -> str:
        """The unit of ``members``, in words."""
        return "call" if self.calls else "member"

    @property
    def lasting(self) -> int:
        """The number of queries that an average owner's tickets last."""
        return self.tickets * self.owners // self.eligible

    @property
    def blind_rate(self) -> float:
        """The rate that samples as many of all owners as the gate samples of the eligible ones."""
        return min(1.0, self.rate * self.eligible / self.owners)

    def rate_of(self, members: int) -> float:
        """The rate for another number of members, with as many exemplars for each."""
        return min(1.0, self.rate * members / self.members)

    def solve(self, rate: float, count: int) -> PrivacyPlan:
        """The plan of one line at this rate, for ``count`` tickets or queries."""
        return PrivacyPlan.solve(
            epsilon=self.epsilon,
            delta=self.delta,
            lines={self.mechanism: LineRequest(self.mechanism, rate, count, options=self.options)},
        )

    def noise(self, rate: float, count: int) -> float | None:
        """The noise of `solve`. None if no noise is enough, or if ``count`` is beyond the accountant."""
        try:
            return None if count > MAX_COUNT else self.solve(rate, count).lines[self.mechanism].parameter
        except InfeasiblePlan:
            return None

    def outputs(self, members: int) -> float:
        """The expected number of outputs that count with another number of members: those of empty buckets do not."""
        rate = self.rate_of(members)
        return rate * self.eligible if self.calls else filled(members, rate, self.eligible)

    @property
    def _weight(self) -> int:
        """The number by which the odds of two outcomes divide eps0, for each output between them."""
        return self.family.weight // 2 if self.family.own_calls else self.family.weight

    @property
    def signal_name(self) -> str:
        """The formula of `signal`, in words."""
        if self.family.unit == "tokens":
            return "exemplars * range_bound"
        if self.family.noisier > 0:
            return f"outputs / {self.family.parameter}"
        return f"outputs * eps0 / {self._weight}" if self._weight > 1 else "outputs * eps0"

    def signal(self, members: int, parameter: float | None) -> float | None:
        """The signal of all outputs together over the noise: more is better. None without a parameter.

        M outputs are expected: those of empty buckets count nothing. For a sigma,
        M / sigma. For vote-em, M eps0 / 2: the logarithm of the odds of a label that all
        outputs name against one that none names. For joint-em the same of a word, and for
        the median of the points on one side of all outputs, M eps0 / 4. A field of a
        structured answer has its share of M eps0 / 2. With one owner per call, twice these.
        For tokens, expected exemplars times range_bound: the furthest that they move two
        logits.
        """
        if parameter is None:
            return None
        if self.family.unit == "tokens":
            return self.rate_of(members) * self.eligible * parameter
        outputs = self.outputs(members)
        return outputs / parameter if self.family.noisier > 0 else outputs * parameter / self._weight

    def point(self, members: int, rate: float, **count: int) -> dict[str, Any]:
        """Noise and signal for these members at this rate; ``count`` is ``tickets=`` or ``queries=``."""
        (number,) = count.values()
        noise = self.noise(rate, number)
        return {
            "members": members,
            "rate": rate,
            **count,
            "noise": noise,
            "signal": self.signal(members, noise),
        }

    def trade_off(self) -> list[dict[str, Any]]:
        """A `point` for each of several numbers of members, with as many exemplars each, and of tickets."""
        crowds = sorted({max(1, round(self.members * factor)) for factor in (0.5, 1.0, 2.0, 4.0)})
        full = [members for members in crowds if self.rate_of(members) == 1.0]
        most = max(self.members, min(full, default=crowds[-1]))
        counts = sorted({max(1, round(self.tickets * factor)) for factor in (0.25, 1.0, 4.0, 16.0)})
        return [
            self.point(members, self.rate_of(members), tickets=count)
            for members in crowds
            if members <= most
            for count in counts
            if count <= MAX_COUNT
        ]
