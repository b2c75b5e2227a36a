"""Mistake 29: terms whose cap looks at other owners, noise on terms that nobody gave, delta0 paid once or too small.

Each mutant stands in the product's place, and the exact law of the product's own release says what an owner costs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from exact import gaussian_masses
from profiles import ApproximateDP
from terms_laws import STEP, coordinate_law

from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.terms_reading import given_terms
from langchain_dpicl.privacy import Gaussian, Line, LineRequest, PLDAccountant, PrivacyPlan, SecureRandomness
from langchain_dpicl.privacy.mechanisms import Terms
from langchain_dpicl.privacy.profile import lattice_multiplier, lattice_quantile, lattice_tail

EPSILON, DELTA = 1.0, 1e-5
BEYOND = 200.0
"""An epsilon at which nothing of the Gaussian is left."""
Texts = Sequence[set[str]]
Chooser = Callable[[Sequence[Texts], int], list[list[str]]]


def planned() -> tuple[Terms, float]:
    """The mechanism of a plan, and its sigma."""
    options = {"delta0": DELTA / 2, "at_most": 1.0}
    line = PrivacyPlan.solve(
        epsilon=EPSILON, delta=DELTA, lines={"terms": LineRequest("terms", 1.0, 1, options=options)}
    ).lines["terms"]
    family = line.family
    assert isinstance(family, Terms)
    return family, line.parameter


# -- the cap looks at other owners -------------------------------------------------------------------------------------


def own_choice(owners: Sequence[Texts], at_most: int) -> list[list[str]]:
    """The product's."""
    return [given_terms(texts, at_most, SecureRandomness()) for texts in owners]


def rarest_first(owners: Sequence[Texts], at_most: int) -> list[list[str]]:
    """The mutant: an owner's terms by their inverse document frequency in the store."""
    often = Counter(term for texts in owners for term in set[str]().union(*texts))
    return [sorted(set[str]().union(*texts), key=lambda term: (often[term], term))[:at_most] for texts in owners]


def cost_of_a_move(choose: Chooser) -> float:
    """The delta at the claimed epsilon of an owner of "a" beside twenty who have "b" in two records, and "a" in one.

    It is that of the Gaussian on the counts of both, which others give with the owner and without.
    """
    family, sigma = planned()
    others: list[Texts] = [[{"a", "b"}, {"b"}]] * 20 + [[{"a"}]] * 10 + [[{"b"}]] * 10
    owner: Texts = [{"a"}]
    counts = [Counter(term for given in choose(all_, 1) for term in given) for all_ in (others, [*others, owner])]
    move = math.dist(*([each[term] for term in "ab"] for each in counts))
    return float(Gaussian(lattice_multiplier(sigma * LATTICE, move * family.largest_weight(1))).delta(EPSILON))


def test_29_a_cap_that_looks_at_other_owners_is_caught() -> None:
    """Without the owner both are as common, and twenty give the first; with it "b" is rarer, and they give that."""
    assert cost_of_a_move(own_choice) <= DELTA
    assert cost_of_a_move(rarest_first) > 1000 * DELTA


# -- noise on terms that nobody gave -----------------------------------------------------------------------------------


def test_29_noise_on_terms_that_nobody_gave_is_caught() -> None:
    """An owner of one record of so many words, of which it gives one: each other word has a count of 0, and noise.

    It passes less often than the one that is given, but nothing bounds the number of words: at least so likely the
    release shows a word that no other text has, which the neighbour never shows.
    """
    family, sigma = planned()
    words = {f"word {i}" for i in range(2000)}
    (given,) = own_choice([[words]], 1)
    tau, scale = family.threshold(sigma), sigma * LATTICE
    at_least = family.threshold(sigma) + 1  # lattice_tail is above by less than what a step of 2^-36 moves
    each = lattice_tail(at_least, scale)
    seen = {
        "given": lattice_tail(tau - family.largest_weight(1), scale),
        "occurs": -math.expm1((len(words) - len(given)) * math.log1p(-each)),
    }
    assert len(given) == 1
    assert seen["given"] <= family.delta0
    assert seen["occurs"] > 100 * DELTA


# -- delta0 paid once --------------------------------------------------------------------------------------------------


def product_cost(family: Terms, sigma: float, count: int) -> float:
    return PLDAccountant().delta([Line(family.profile(sigma), 1.0, count)], BEYOND)


def delta0_once(family: Terms, sigma: float, count: int) -> float:
    """The mutant: so many Gaussians, and one delta0."""
    once = Line(ApproximateDP(0.0, family.delta0), 1.0, 1)
    return PLDAccountant().delta([Line(Gaussian(sigma), 1.0, count), once], BEYOND)


def check_composed(cost: Callable[[Terms, float, int], float]) -> None:
    """An owner's own term is seen in one of the releases."""
    family, sigma = Terms(delta0=1e-3, at_most=1, step=STEP), 1.0
    seen = 1.0 - coordinate_law(family.threshold(sigma), sigma / STEP, family.largest_weight(1))[None]
    assert 0.95 * family.delta0 < seen <= family.delta0
    for count in (1, 2, 10):
        true, claimed = 1.0 - (1.0 - seen) ** count, cost(family, sigma, count)
        assert true <= claimed, f"{count} releases show {true:.6g}, and {claimed:.6g} is claimed"


def test_29_delta0_paid_once_is_caught() -> None:
    check_composed(product_cost)
    with pytest.raises(AssertionError, match=r"^2 releases show"):
        check_composed(delta0_once)


# -- delta0 too small --------------------------------------------------------------------------------------------------


def one_atom_short(family: Terms, sigma: float) -> int:
    """The mutant: 1 - P(noise <= tau - w)^m in place of "<", by the exact law."""
    masses = np.array(gaussian_masses(sigma / STEP))
    above = np.cumsum(masses[::-1])[::-1]  # P(X >= k) from the lowest k on
    lowest = -(len(masses) // 2)
    found = 0
    for m in range(1, family.at_most + 1):
        each = -math.expm1(math.log1p(-family.delta0) / m)
        least = lowest + int(np.argmax(above <= each)) - 1  # P(X > k) = P(X >= k + 1)
        found = max(found, family.largest_weight(m) + least)
    return found


def without_the_maximum(family: Terms, sigma: float) -> int:
    """The mutant: the threshold of an owner who gives all at_most terms, with the weights of who gives fewer."""
    each = -math.expm1(math.log1p(-family.delta0) / family.at_most)
    return family.largest_weight(family.at_most) + lattice_quantile(each, sigma / STEP)


def least_cost(threshold: Callable[[Terms, float], int], sigma: float, at_most: int, delta0: float) -> float:
    """The largest true delta of an owner of terms of its own over the claim, where nothing is left of the Gaussian."""
    family = Terms(delta0=delta0, at_most=at_most, step=STEP)
    tau = threshold(family, sigma)
    hid = (coordinate_law(tau, sigma / STEP, family.largest_weight(m))[None] ** m for m in range(1, at_most + 1))
    return (1.0 - min(hid)) / float(family.profile(sigma).delta(BEYOND))


@pytest.mark.parametrize(
    ("mutant", "sigma", "at_most", "delta0", "at_least"),
    [
        (one_atom_short, 0.11, 1, 1.001 * lattice_tail(26, 0.11 / STEP), 1.6),  # noise of seven steps
        (without_the_maximum, 0.3, 2, 1e-4, 10.0),
    ],
)
def test_29_a_threshold_that_is_too_low_is_caught(
    mutant: Callable[[Terms, float], int], sigma: float, at_most: int, delta0: float, at_least: float
) -> None:
    assert 0.8 < least_cost(Terms.threshold, sigma, at_most, delta0) <= 1.0
    assert least_cost(mutant, sigma, at_most, delta0) > at_least
