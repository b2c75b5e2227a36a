"""The mechanism of terms: its threshold and its price, against exact laws of the noise and of whole releases."""

from __future__ import annotations

import math
from functools import lru_cache

import mpmath
import numpy as np
import pytest
from exact import EPSILONS
from scipy.special import log_ndtr
from scipy.stats import norm
from terms_laws import STEP, coordinate_law, hidden, neighbours, pair_of

from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.sums import owner_sum
from langchain_dpicl.privacy import LineRequest, PLDAccountant, PrivacyPlan
from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.mechanisms import MECHANISMS, Terms
from langchain_dpicl.privacy.profile import (
    DIRECTIONS,
    Gaussian,
    GaussianOrAll,
    ProposeTestRelease,
    lattice_quantile,
    lattice_tail,
)


@lru_cache(maxsize=16)
def exact_tails(sigma: float) -> list[mpmath.mpf]:
    """P(X >= k) for k = 0, 1, ... with forty digits."""
    with mpmath.workdps(40):
        scale = 2 * mpmath.mpf(sigma) ** 2
        reach = math.ceil(16 * sigma)
        masses = [mpmath.exp(-mpmath.mpf(k * k) / scale) for k in range(reach)]
        total = 2 * mpmath.fsum(masses) - masses[0]
        tails = [mpmath.mpf(0)]
        for mass in reversed(masses):
            tails.append(tails[-1] + mass / total)
        return tails[::-1]


@pytest.mark.parametrize("sigma", [4.0, 7.3, 32.0, 200.0])
def test_a_tail_is_bounded_above_and_closely(sigma: float) -> None:
    tails = exact_tails(sigma)
    for at in range(1 - 2 * math.ceil(sigma), math.ceil(12 * sigma)):
        true = tails[at] if at >= 0 else 1 - tails[1 - at]
        bound = lattice_tail(at, sigma)
        assert true * (1 - mpmath.mpf(10) ** -12) <= bound
        if at >= sigma + 0.5:  # within a fraction of an atom: the next tail is below the true one
            assert lattice_tail(at + 1, sigma) < true


@pytest.mark.parametrize("sigma", [0.11, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("delta0", [0.3, 0.1, 1e-3, 1e-5, 1e-12, 1e-30])
def test_the_threshold_is_the_least_by_exact_sums_or_one_step_above(sigma: float, delta0: float) -> None:
    """Brute force over m: the least tau with 1 - P(X < tau - w_m)^m <= delta0, in forty digits.

    A delta0 above .1 for one term is beyond the bound by convexity: there it may be higher.
    """
    tails = exact_tails(sigma / STEP)
    with mpmath.workdps(40):
        for at_most in (1, 2, 3, 8):
            least = 0
            for m in range(1, at_most + 1):
                weight = math.floor(1 / (STEP * math.sqrt(m)))
                share = 1 - (1 - mpmath.mpf(delta0)) ** (mpmath.mpf(1) / m)
                least = max(least, weight + next(k for k, tail in enumerate(tails) if tail <= share))
            found = Terms(delta0=delta0, at_most=at_most, step=STEP).threshold(sigma)
            assert least <= found
            assert found <= least + 1 or delta0 > 0.2


def test_the_threshold_of_the_products_lattice_keeps_delta0_and_wastes_nothing() -> None:
    for sigma in (0.2, 1.5, 4.0, 100.0):
        for at_most in (1, 8, 64):
            family = Terms(delta0=5e-6, at_most=at_most)
            tau, scale = family.threshold(sigma), sigma * LATTICE
            failing = [
                -math.expm1(m * math.log1p(-lattice_tail(tau - family.largest_weight(m), scale)))
                for m in range(1, at_most + 1)
            ]
            assert 0.999 * 5e-6 < max(failing) <= 5e-6
            assert family.sharing_bound(sigma, 1) <= 5e-6
            assert family.sharing_bound(sigma, 10_000) > 0.999


def test_lighter_weights_cost_nothing_from_sigma_2_on_and_more_terms_decide_there() -> None:
    """Below, one heavy term decides: the threshold for at_most terms alone would be too low."""
    family = Terms(delta0=5e-6, at_most=8)
    for sigma in (0.5, 1.0, 2.0, 4.0):
        each = -math.expm1(math.log1p(-family.delta0) / 8)
        for_all = family.largest_weight(8) + lattice_quantile(each, sigma * LATTICE)
        assert (family.threshold(sigma) == for_all) == (sigma >= 2.0)


def test_no_owner_has_larger_weights_than_the_mechanisms_nor_a_norm_above_1() -> None:
    """The weights of the product's sum, in whole numbers."""
    family = Terms(delta0=1e-6, at_most=1000)
    for m in range(1, 1001):
        (weight,) = set(owner_sum(np.zeros(m, np.int64), np.arange(m), np.ones(m, np.int64), m).tolist())
        assert family.largest_weight(m) - 1 <= weight <= family.largest_weight(m)
        assert m * weight**2 <= LATTICE**2
        assert m * family.largest_weight(m) ** 2 <= LATTICE**2


@pytest.mark.parametrize(("sigma", "delta0"), [(0.125, 0.01), (0.25, 0.05), (0.5, 1e-4)])
def test_no_owner_of_a_tiny_data_set_costs_more_than_is_claimed_and_one_costs_nearly_that(
    sigma: float, delta0: float
) -> None:
    """Brute force by the product's own code: every owner of up to two of three terms, beside every two others, or a
    crowd, both directions. What is true comes to the larger of delta0 and the Gaussian's delta, as is claimed."""
    family = Terms(delta0=delta0, at_most=2, step=STEP)
    scale = sigma / STEP
    tau = family.threshold(sigma)
    profile = family.profile(sigma)
    cases = neighbours(family, "abc", 2, math.ceil(4 + 20 * sigma))
    worst = np.zeros(len(EPSILONS))
    for case in cases:
        p, q = pair_of(tau, scale, case)
        for direction, (present, absent) in zip(DIRECTIONS, ((p, q), (q, p)), strict=True):
            true = np.array([hidden(present, absent, epsilon) for epsilon in EPSILONS])
            assert (true <= profile.direction_delta(EPSILONS, direction) + 1e-9).all()
            worst = np.maximum(worst, true)
    assert len(cases) > 20
    reached = np.maximum(seen_alone(tau, scale, family), Gaussian(sigma).delta(EPSILONS))
    assert (worst >= 0.97 * reached)[2:].all()


def seen_alone(tau: int, scale: float, family: Terms) -> float:
    """The probability that a term which an owner of one or two alone gives is seen."""
    hid = (coordinate_law(tau, scale, family.largest_weight(m))[None] ** m for m in (1, 2))
    return 1.0 - min(hid)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_profile_is_a_gaussian_and_delta0_and_its_losses_dominate_it(direction: str) -> None:
    profile = GaussianOrAll(1.5, 1e-3)
    epsilons = np.array([-2.0, -0.5, 0.0, 0.5, 1.0, 3.0, 8.0])
    claimed: FloatArray = profile.direction_delta(epsilons, direction)  # type: ignore[arg-type]
    closed = 1e-3 + 0.999 * Gaussian(1.5).direction_delta(epsilons, "remove")
    assert claimed == pytest.approx(closed, rel=1e-12)
    losses = profile.losses(direction)  # type: ignore[arg-type]
    assert (losses.delta(epsilons) >= claimed * (1 - 1e-12)).all()
    assert losses.delta(epsilons) == pytest.approx(claimed, rel=1e-4)
    assert float(losses.masses.sum()) + losses.infinity == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("z", [0.05, 0.11, 0.3, 0.6, 1.4, 3.7, 12.0, 300.0])
def test_an_owner_of_some_own_terms_never_costs_more_than_one_of_none_or_all(z: float) -> None:
    """The lemma of the proof at the edge of its condition and below: for each share of own terms, at every eps."""
    density = norm.pdf(max(1.0, 0.5 / z))
    for own in (density / (2 * z), 1e-3 * density / (2 * z)):
        own = min(own, 0.69)
        for epsilon in np.linspace(0.0, 0.5 / z**2 + 9.0 / z, 300):
            whole = float(Gaussian(z).delta(epsilon))
            share = np.linspace(0.01, 0.99, 33)
            part = np.exp(log_ndtr(_edge(z, share, epsilon, 1))) - np.exp(
                epsilon + log_ndtr(_edge(z, share, epsilon, -1))
            )
            assert (-np.expm1(-own * share) + np.exp(-own * share) * part <= max(own, whole) * (1 + 1e-9)).all()


def _edge(z: float, share: FloatArray, epsilon: float, sign: int) -> FloatArray:
    """The argument of a Gaussian's delta whose squared norm is the rest of a share."""
    norms = np.sqrt(1.0 - share) / z
    return np.asarray(sign * norms / 2 - epsilon / norms)


def test_beyond_the_condition_delta0_and_the_gaussian_add_up() -> None:
    """There it is not proved that an owner of some terms of its own costs the larger of both at most."""
    assert isinstance(Terms(delta0=1e-3).profile(3.0), ProposeTestRelease)
    assert isinstance(Terms(delta0=0.05).profile(12.0), GaussianOrAll)


@pytest.mark.parametrize("count", [1, 3])
def test_a_plan_pays_delta0_at_every_release(count: int) -> None:
    """Beyond the Gaussian's reach; and the noise of one release is that of a Gaussian alone."""
    request = LineRequest("terms", 1.0, count, options={"delta0": 4e-6 / count})
    plan = PrivacyPlan.solve(epsilon=1.0, delta=1e-5, lines={"terms": request})
    line = plan.lines["terms"]
    paid = PLDAccountant().delta([line.line(line.parameter)], 40.0)
    assert paid == pytest.approx(4e-6, rel=1e-4)
    if count == 1:
        assert float(Gaussian(line.parameter).delta(1.0)) == pytest.approx(1e-5, rel=0.05)


def test_half_of_delta_is_for_delta0_unless_a_plan_says_otherwise() -> None:
    assert MECHANISMS["terms"].chosen(1e-5, 1.0, 2, 1) == {"delta0": 2.5e-6}
    assert Terms(delta0=1e-6).release_delta == 1e-6
    assert "at most 8 each" in Terms(delta0=1e-6).describe(3.0)
