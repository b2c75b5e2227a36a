"""The attack on a table: as strong as the guarantee allows, and it finds what is broken.

`CERTAIN` and `FEW` are as in `test_audit_head`.
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
from langchain_dpicl.lab.audit.tables import SUM, table_cases, table_world
from langchain_dpicl.once import tables_release
from langchain_dpicl.once.sums import owner_sum, packed

CERTAIN = 1.0 - 1e-8
CLAIM: dict[str, Any] = {"epsilon": 1.0, "delta": 0.05, "confidence": CERTAIN}
Patch = pytest.MonkeyPatch


class Silent:
    """No noise."""

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        return np.zeros(size, np.int64)

    def uniforms(self, size: int) -> NDArray[np.float64]:
        return np.full(size, 0.5)


def test_the_canary_moves_the_sum_by_1_where_nobody_else_does() -> None:
    numbers: dict[str, Any] = {"parameter": 5.0, "rate": 1.0, "releases": 1, "epsilon": 3.0, "delta": 1e-3}
    (case,) = table_cases(Setting(SUM, **numbers, trials=1, confidence=0.95, unanimous=False))
    for has_owner in (True, False):
        counts = table_world(case, has_owner, 1.0, Silent())()  # type: ignore[arg-type]
        assert float(np.linalg.norm(counts[1])) == pytest.approx(float(has_owner))
        assert case.statistic(counts) == pytest.approx(1 / (2 * 5.0**2) if has_owner else -SURE)
    assert case.statistic(np.full((2, 4), 0.25)) == pytest.approx(0.0)


def test_whole_tables_with_their_ledgers_are_attacked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "--mechanism", "sum", "--canary", "owner", "--trials", "1", "--delta", "0.05"]) == 0
    assert "pairs that nobody else's say" in capsys.readouterr().out
    with pytest.raises(InvalidParameter, match="every owner takes part"):
        audit("sum", rate=0.5)


def test_a_right_table_stays_below_its_claim_and_is_attacked_to_more_than_half_of_it() -> None:
    """At a delta of .2 to 78 % of the claim are expected: counts 3.7 standard deviations off on both sides still give
    half, so it misses with a probability below 1e-6."""
    assert audit("sum", trials=400, **CLAIM).lower_bound <= 1.0
    result = audit("sum", trials=1600, epsilon=3.0, delta=0.2)
    assert 0.5 * result.epsilon < result.lower_bound <= 1.02 * result.epsilon


def clipped_per_record(patch: Patch) -> None:
    """Each record's pair counts as an owner's."""

    def summed(owners: Any, cells: Any, amounts: Any, size: int) -> Any:
        return 4 * owner_sum(np.arange(len(cells)), cells, amounts, size)  # sixteen records on four pairs

    patch.setattr(tables_release, "owner_sum", summed)


def noise_where_something_occurs(patch: Patch) -> None:
    """An empty cell stays 0."""
    real = tables_release.TableRelease._noisy

    def noisy(self: Any, line: Any, charge: Any, number: int, total: NDArray[np.int64]) -> str:
        found = self._unpacked(real(self, line, charge, number, total))
        return packed(np.where(total == 0, 0, found))

    patch.setattr(tables_release.TableRelease, "_noisy", noisy)


@pytest.mark.parametrize("broken", [clipped_per_record, noise_where_something_occurs])
def test_a_broken_table_is_found(broken: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """Both worlds are told apart always, in 50 trials: an epsilon of 2.5."""
    broken(monkeypatch)
    assert audit("sum", trials=50, **{**CLAIM, "confidence": 0.95}).lower_bound > 1.0
