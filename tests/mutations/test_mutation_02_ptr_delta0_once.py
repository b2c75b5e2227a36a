"""Mistake 2: PTR's delta0 paid once for all releases, although each of them may show a wrong set with delta0."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from exact import hockey_stick
from keyword_laws import EACH, prepared, ptr_law
from profiles import ApproximateDP

from langchain_dpicl import Keywords
from langchain_dpicl.privacy import (
    MECHANISMS,
    Gaussian,
    Line,
    PLDAccountant,
    ProposeTestRelease,
)

SIGMA, DELTA0, BEYOND = 4.0, 1e-4, 60.0
"""At an epsilon of 60 nothing of the Gaussian is left: what can still be seen are sets that one side never shows."""


class PaysDelta0Once:
    """The mutant: n tests cost n Gaussians, and one delta0."""

    def _schedule(self, schedule: Sequence[Line]) -> list[Line]:
        lines = []
        for line in schedule:
            assert isinstance(line.profile, ProposeTestRelease)
            lines.append(Line(Gaussian(line.profile.sigma), line.rate, line.count))
            lines.append(Line(ApproximateDP(0.0, line.profile.delta0), line.rate, 1))
        return lines

    def epsilon(self, schedule: Sequence[Line], delta: float) -> float:
        return PLDAccountant().epsilon(self._schedule(schedule), delta)

    def delta(self, schedule: Sequence[Line], epsilon: float) -> float:
        return PLDAccountant().delta(self._schedule(schedule), epsilon)


def check(accountant: PLDAccountant | PaysDelta0Once) -> None:
    """Exact enumeration: two words with counts 6 and 5, and a neighbour's with 5 and 6. The code's own two laws have
    nothing in common but silence, so n releases show the difference outright with probability 1 - (1 - delta0)^n."""
    aggregator = prepared(Keywords.ptr(1, words=EACH), {"delta0": DELTA0})
    one, other = (ptr_law(aggregator, dict(zip("ab", counts, strict=True)), 6, SIGMA) for counts in ((6, 5), (5, 6)))
    seen = hockey_stick(one, other, BEYOND)
    assert seen == pytest.approx(DELTA0, rel=1e-9)
    for count in (1, 2, 10, 400):
        true = 1 - (1 - seen) ** count
        claimed = accountant.delta([Line(MECHANISMS["ptr"].of({"delta0": DELTA0}).profile(SIGMA), 1.0, count)], BEYOND)
        assert true * (1 - 1e-9) <= claimed, f"{count} releases show {true:.6g}, and {claimed:.6g} is claimed"


def test_2_ptr_delta0_paid_once_is_caught() -> None:
    check(PLDAccountant())
    with pytest.raises(AssertionError, match=r"^2 releases show"):
        check(PaysDelta0Once())
