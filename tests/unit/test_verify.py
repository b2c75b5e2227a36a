"""`privacy/accountant.py`: three accountants side by side, against closed forms, and what each cannot do."""

from __future__ import annotations

import json
import math

import pytest
from scipy.optimize import brentq

from langchain_dpicl.errors import AccountingError
from langchain_dpicl.privacy import (
    BoundedRange,
    DiscreteGaussian,
    Gaussian,
    Line,
    LineRequest,
    PlanLine,
    PLDAccountant,
    PrivacyPlan,
    Profile,
    ProposeTestRelease,
)
from langchain_dpicl.privacy.accountant import GOOGLE, OURS, PRV, Opinion, compositions, verify


def opinions(profile: Profile, rate: float, count: int, delta: float) -> dict[str, Opinion]:
    return {each.accountant: each for each in verify({"line": Line(profile, rate, count)}, delta).plan}


def test_all_three_know_what_many_gaussians_cost() -> None:
    """Without sampling 100 Gaussians of multiplier 20 are one of multiplier 2, whose epsilon has a closed form."""
    exact = float(brentq(lambda eps: float(Gaussian(2.0).delta(eps)) - 1e-5, 0.0, 10.0, xtol=1e-13))
    found = opinions(Gaussian(20.0), 1.0, 100, 1e-5)
    assert set(found) == {OURS, PRV, GOOGLE}
    for each in found.values():
        assert each.epsilon is not None
        assert exact <= each.epsilon <= exact * 1.02
    assert found[GOOGLE].note == "its own subsampled Gaussian"


def test_all_three_know_what_one_exponential_mechanism_costs() -> None:
    """Its delta is ((1 - e^((eps - eps0)/2))^2 / (1 - e^-eps0)), which gives epsilon at once."""
    eps0, delta = 2.0, 1e-3
    exact = eps0 + 2.0 * math.log(1.0 - math.sqrt(delta * -math.expm1(-eps0)))
    for each in opinions(BoundedRange(eps0), 1.0, 1, delta).values():
        assert each.epsilon is not None, each.note
        assert exact - 1e-9 <= each.epsilon <= exact * 1.02


@pytest.mark.parametrize(
    ("profile", "rate", "count"),
    [
        (DiscreteGaussian(1.5), 0.01, 500),
        (Gaussian(1.2), 0.02, 300),
        (ProposeTestRelease(3.0, 1e-7), 0.05, 90),
    ],
)
def test_the_opinions_on_a_sampled_line_agree(profile: Profile, rate: float, count: int) -> None:
    ours, prv, google = (each.epsilon for each in opinions(profile, rate, count, 1e-5).values())
    assert ours is not None
    assert prv == pytest.approx(ours, rel=0.02)
    assert google == pytest.approx(ours, rel=0.01)


def test_the_others_do_not_compose_bounded_ranges_adaptively_and_say_so() -> None:
    found = opinions(BoundedRange(1.0), 0.05, 60, 1e-5)
    line = Line(BoundedRange(1.0), 0.05, 60)
    plain = max(each.epsilon(1e-5) for each in compositions([line]))
    assert found[OURS].epsilon == PLDAccountant().epsilon([line], 1e-5) < 0.9 * plain
    for name in (PRV, GOOGLE):
        assert found[name].epsilon == pytest.approx(plain, rel=0.02)
        assert "adaptively" in found[name].note
    assert "adaptively" not in opinions(BoundedRange(1.0), 0.05, 1, 1e-5)[PRV].note, "one release needs no composition"


def test_failed_tests_count_as_infinite_losses_everywhere() -> None:
    """PTR whose delta0 takes 99 % of delta: an accountant that forgot it would find a much smaller epsilon."""
    rate, count, delta0 = 0.5, 20, 1e-6
    lost = -math.expm1(count * math.log1p(-rate * delta0))
    found = opinions(ProposeTestRelease(4.0, delta0), rate, count, lost / 0.99)
    easy = opinions(ProposeTestRelease(4.0, 1e-12), rate, count, lost / 0.99)
    for name, each in found.items():
        assert each.epsilon == pytest.approx(found[OURS].epsilon, rel=0.03), name
        assert (each.epsilon or 0.0) > 1.15 * (easy[name].epsilon or 0.0)


def test_lines_are_verified_each_and_together() -> None:
    lines = {"vote": Line(DiscreteGaussian(4.0), 0.02, 200), "mean": Line(Gaussian(5.0), 0.02, 100)}
    found = verify(lines, 1e-5)
    assert set(found.lines) == {"vote", "mean"}
    for alone, together in zip(zip(*found.lines.values(), strict=True), found.plan, strict=True):
        assert together.epsilon is not None
        assert max(each.epsilon or math.inf for each in alone) < together.epsilon
        assert together.epsilon == pytest.approx(found.plan[0].epsilon, rel=0.02)
    assert found.plan[2].note == "its own Gaussian, and our other profiles"
    shown = str(found)
    assert all(name in shown for name in ("vote:", "mean:", "all lines together:", OURS, PRV, GOOGLE))
    assert json.loads(json.dumps(found.to_dict()))["plan"][0] == {
        "accountant": OURS,
        "epsilon": found.plan[0].epsilon,
        "note": "",
    }


def test_prv_and_dp_accounting_say_that_a_delta_is_too_small_for_them() -> None:
    found = opinions(Gaussian(4.0), 1.0, 10, 1e-18)
    exact = float(brentq(lambda e: math.log(float(Gaussian(4.0 / math.sqrt(10)).delta(e)) / 1e-18), 1.0, 30.0))
    assert found[OURS].epsilon == pytest.approx(exact, rel=1e-3)
    assert found[PRV].epsilon is None
    assert "prv-accountant cannot do this" in found[PRV].note
    assert found[GOOGLE].epsilon is None
    assert "cuts tails" in found[GOOGLE].note
    assert "does not apply (" in str(verify({"line": Line(Gaussian(4.0), 1.0, 10)}, 1e-18))


def test_prv_says_that_its_mesh_would_be_too_large() -> None:
    found = opinions(Gaussian(10_000.0), 1.0, 100_000, 1e-9)
    assert found[PRV].epsilon is None
    assert "mesh" in found[PRV].note
    assert found[OURS].epsilon is not None


def test_nothing_costs_nothing_to_anyone() -> None:
    for each in opinions(Gaussian(1.0), 0.1, 0, 1e-5).values():
        assert each.epsilon == 0.0


def test_a_plan_verifies_itself() -> None:
    plan = PrivacyPlan.solve(epsilon=2.0, delta=1e-5, lines={"votes": LineRequest("vote", 0.02, 100)})
    found = plan.verify()
    assert found.delta == plan.delta
    assert found.plan == found.lines["votes"]
    assert [each.accountant for each in found.plan] == [OURS, PRV, GOOGLE]
    assert found.plan[0].epsilon == plan.certified_epsilon
    assert all(each.epsilon == pytest.approx(2.0, rel=0.02) for each in found.plan)


def test_a_plan_that_breaks_its_promise_is_not_verified() -> None:
    with pytest.raises(AccountingError, match="promises epsilon 1"):
        PrivacyPlan(1.0, 1e-5, {"votes": PlanLine("vote", 0.5, 100, parameter=1.0)}).verify()
