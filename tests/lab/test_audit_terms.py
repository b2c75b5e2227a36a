"""The attack on terms: as strong as the guarantee allows, and it finds what is broken.

`CERTAIN` is as in `test_audit_head`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from langchain_dpicl import cli
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.audit.attack import audit
from langchain_dpicl.lab.audit.cases import SURE, Setting
from langchain_dpicl.lab.audit.terms import TERMS, terms_cases, terms_world
from langchain_dpicl.once import terms_release
from langchain_dpicl.once.sums import owner_sum
from langchain_dpicl.privacy.mechanisms import Terms

CERTAIN = 1.0 - 1e-8
CLAIM: dict[str, Any] = {"epsilon": 1.0, "delta": 0.05, "confidence": CERTAIN}
Patch = pytest.MonkeyPatch


class Silent:
    """No noise."""

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        return np.zeros(size, np.int64)

    def uniforms(self, size: int) -> NDArray[np.float64]:
        return np.full(size, 0.5)


def test_the_canary_moves_a_shared_count_by_1_and_its_own_terms_are_not_seen() -> None:
    numbers: dict[str, Any] = {"parameter": 5.0, "rate": 1.0, "releases": 1, "epsilon": 3.0, "delta": 1e-3}
    numbers |= {"options": {"delta0": 1e-4}, "trials": 1, "confidence": 0.95, "unanimous": False}
    shared, own = terms_cases(Setting(TERMS, **numbers))
    for has_owner in (True, False):
        counts = terms_world(shared, has_owner, 1.0, Silent())()  # type: ignore[arg-type]
        assert counts["alder"] - shared.others == pytest.approx(float(has_owner), abs=1e-8)
        assert shared.statistic(counts) == pytest.approx((0.5 if has_owner else -0.5) / 25)
        counts = terms_world(own, has_owner, 1.0, Silent())()  # type: ignore[arg-type]
        assert set(counts) == {"alder"}
        assert own.statistic(counts) == 0.0
    assert own.statistic({"bircha": 9.0}) == SURE


def test_whole_releases_with_their_ledgers_are_attacked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "--mechanism", "terms", "--canary", "owner", "--trials", "1", "--delta", "0.05"]) == 0
    assert "an owner of 16 records" in capsys.readouterr().out
    with pytest.raises(InvalidParameter, match="every owner takes part"):
        audit("terms", rate=0.5)


def test_right_terms_stay_below_their_claim_and_are_attacked_to_more_than_half_of_it() -> None:
    """At a delta of .2 to 78 % of the claim are expected: counts 3.7 standard deviations off on both sides still give
    half, so it misses with a probability below 1e-6."""
    assert audit("terms", trials=400, **CLAIM).lower_bound <= 1.0
    result = audit("terms", trials=1600, epsilon=3.0, delta=0.2)
    assert 0.5 * result.epsilon < result.lower_bound <= 1.02 * result.epsilon


def without_a_clip(patch: Patch) -> None:
    """An owner of ten records weighs ten times as much."""

    def summed(owners: Any, cells: Any, amounts: Any, size: int) -> Any:
        return 10 * owner_sum(owners, cells, amounts, size)

    patch.setattr(terms_release, "owner_sum", summed)


def no_threshold(patch: Patch) -> None:
    """A threshold that one owner's terms pass."""
    patch.setattr(Terms, "threshold", lambda *_: 0)


@pytest.mark.parametrize("broken", [without_a_clip, no_threshold])
def test_broken_terms_are_found(broken: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """Both worlds are told apart nearly always."""
    broken(monkeypatch)
    assert audit("terms", trials=60, **{**CLAIM, "confidence": 0.95}).lower_bound > 1.0
