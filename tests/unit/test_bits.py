"""`privacy/bits.py`: the law that is drawn, and that no adversary of one-bit votes learns more than is claimed."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from scipy.stats import binomtest

from langchain_dpicl.aggregators import NoisyVote
from langchain_dpicl.privacy import Line, PLDAccountant, adaptive
from langchain_dpicl.privacy.bits import BitPairs, tails
from langchain_dpicl.privacy.choice import Crowd, compared
from langchain_dpicl.privacy.composition import Composition
from langchain_dpicl.privacy.lines import LineRequest
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.privacy.profile import DIRECTIONS, BoundedRange, Gaussian, OneBit
from langchain_dpicl.privacy.solving import about, solve
from langchain_dpicl.privacy.votes import BIT, EXPONENTIAL, VoteNoise

PLD = PLDAccountant()
EPSILONS = (0.1, 0.2, 0.4, 0.8, 1.2)
Law = Callable[[int], float]


def half_integers(sigma: float) -> Law:
    """f(d) = P(X < d), by 60 digits."""
    with localcontext(prec=60):
        weights = {k: (-(Decimal(2 * k + 1) ** 2) / (8 * Decimal(sigma) ** 2)).exp() for k in range(-80, 80)}
        total = sum(weights.values())
        below = [float(sum(w for k, w in weights.items() if k < d) / total) for d in range(-40, 41)]
    return lambda d: below[max(-40, min(40, d)) + 40]


def test_the_law_is_that_of_gaussian_noise_on_the_half_integers() -> None:
    for sigma in (0.5, 0.943, 3.0):
        exact = half_integers(sigma)
        for lead, found in enumerate(tails(sigma)):
            assert found == pytest.approx(exact(-lead), rel=1e-12)
            assert VoteNoise(BIT, sigma).overturned(lead) == found
    noise = VoteNoise(BIT, 3.0)
    assert noise.overturned(10**6) == noise.overturned(noise.tails.size) == tails(3.0)[-1]


@pytest.mark.parametrize("moves", [1, 2])
@pytest.mark.parametrize(("sigma", "rate"), [(0.7, 1.0), (1.3, 0.3)])
def test_one_release_is_the_worst_of_its_pairs(sigma: float, rate: float, moves: int) -> None:
    law = half_integers(sigma)
    profile = OneBit(BitPairs(sigma, moves))
    for epsilon in (-0.5, 0.0, 0.2, 1.0, 2.5):
        a = math.exp(epsilon)
        worst = {"remove": 0.0, "add": 0.0}
        for d in range(-12, 12):
            absent = law(d)
            present = (1 - rate) * absent + rate * law(d + moves)
            for p, q in ((present, absent), (1 - present, 1 - absent)):
                worst["remove"] = max(worst["remove"], max(0.0, p - a * q) + max(0.0, (1 - p) - a * (1 - q)))
                worst["add"] = max(worst["add"], max(0.0, q - a * p) + max(0.0, (1 - q) - a * (1 - p)))
        for direction in DIRECTIONS:
            found = float(profile.subsample(rate).direction_delta(epsilon, direction))
            assert worst[direction] <= found * (1 + 1e-12) <= worst[direction] * (1 + 1e-8) + 1e-15
            losses = adaptive.one_release(profile.family, rate, direction)
            assert worst[direction] <= losses.delta(epsilon) * (1 + 1e-12) + 1e-15
            assert float(losses.delta(epsilon)) <= worst[direction] * 1.02 + 1e-4


def tree(law: Law, rate: float, moves: int, count: int, a: float, most: int = 9) -> float:
    """The largest delta of so many votes if an adversary chooses, after each bit, the lead of the others and whom the
    owner votes for: by exhaustion, without any grid. Of both directions the worse."""

    @cache
    def worth(n: int, ratio: float, way: str) -> float:
        """max E[(dP - a dQ)+] of n further votes, times 1 / Q so far: with (remove) or without the owner on top."""
        if n == 0:
            return max(0.0, ratio - a) if way == "remove" else max(0.0, 1.0 - a * ratio)
        best = 0.0
        for d, side in itertools.product(range(-most, most + 1), (moves, -moves)):
            q = law(d)
            p = (1 - rate) * q + rate * law(d + side)
            value = 0.0
            for with_owner, without in ((p, q), (1 - p, 1 - q)):
                if without > 0.0:
                    value += without * worth(n - 1, ratio * with_owner / without, way)
            best = max(best, value)
        return best

    return max(worth(count, 1.0, "remove"), worth(count, 1.0, "add"))


@pytest.mark.parametrize("moves", [1, 2])
@pytest.mark.parametrize(("sigma", "rate", "count", "most"), [(0.9, 0.4, 2, 6), (1.5, 1.0, 2, 6), (0.8, 0.2, 3, 2)])
def test_no_adversary_who_chooses_lead_and_label_gets_above(
    sigma: float, rate: float, count: int, most: int, moves: int
) -> None:
    line = Line(OneBit(BitPairs(sigma, moves)), rate, count)
    for epsilon in (0.1, 0.5, 1.0, 2.0):
        true = tree(half_integers(sigma), rate, moves, count, math.exp(epsilon), most)
        assert true <= PLD.delta([line], epsilon) <= 1.1 * true + 1e-3


def test_an_owner_who_replaces_a_vote_moves_the_lead_by_two() -> None:
    """The mistake of shared buckets, and of calls with a cap: a claim for 1 would be off by far, at two releases."""
    sigma, rate, epsilon = 0.9, 0.4, 1.0
    true = tree(half_integers(sigma), rate, 2, 2, math.exp(epsilon), 6)
    claimed = PLD.delta([Line(OneBit(BitPairs(sigma, 1)), rate, 2)], epsilon)
    assert true > 2.0 * claimed
    noise = solve(1.0, 1e-5, {"one": LineRequest(BIT, 0.1, 50, options={"own_calls": 0.0})})[0]
    alone = solve(1.0, 1e-5, {"one": LineRequest(BIT, 0.1, 50, options={"own_calls": 1.0})})[0]
    assert noise > 1.6 * alone


@pytest.mark.parametrize(
    ("counts", "prior"), [((4, 4, 0), None), ((5, 3, 9), None), ((1, 3, 0), {"no": 0.01, "yes": 0.99})]
)
def test_what_is_drawn_is_the_law(counts: tuple[int, int, int], prior: dict[str, float] | None) -> None:
    """4,000 draws of the bit; a false alarm has a probability below 1e-7. Abstentions count nothing."""
    sigma, crowd = 1.2, Crowd(30, 20.0, True)
    vote = NoisyVote(["yes", "no"], prior=prior, mechanism=BIT).under(BIT, crowd)
    noise = VoteNoise(BIT, sigma, True)
    lead = counts[0] - counts[1]
    if prior is not None:
        lead += round(math.log(prior["yes"] / prior["no"]) / noise.nats(20.0, 2))
        assert lead not in (counts[0] - counts[1], 0)
    chance = half_integers(sigma)(lead)
    draws = Counter(vote.draw(np.array(counts), crowd, sigma, SecureRandomness()) for _ in range(4000))
    assert set(draws) <= {"yes", "no"}
    assert binomtest(draws["yes"], 4000, chance).pvalue > 1e-7
    assert not vote.tells(30, sigma)


def test_a_draw_is_exact() -> None:
    """Every float is a fraction of a power of two, and the draw takes as many random bits as it needs."""
    chance = tails(1.0)[6]
    numerator, denominator = float(chance).as_integer_ratio()
    assert Fraction(numerator, denominator) == Fraction(float(chance))
    assert denominator > 2**60


@pytest.mark.parametrize("moves", [1, 2])
@pytest.mark.parametrize("sigma", [6.0, 25.0, 150.0])
def test_few_pairs_cover_all_of_a_wide_law(sigma: float, moves: int) -> None:
    """At any a, at any rate, the kept pairs reach as high as every pair of the law, and hardly higher."""
    levels = np.concatenate([tails(sigma)[::-1], 1.0 - tails(sigma)[1:]])
    kept = BitPairs(sigma, moves).trials(1.0)
    assert kept.of_u.size < 80 < levels.size
    for epsilon in np.linspace(-6.0, 6.0, 61) / sigma:
        a = math.exp(epsilon)
        p, q = levels[moves:], levels[:-moves]
        low_p, low_q = levels[::-1][moves:], levels[::-1][:-moves]
        exact = (np.maximum(p - a * q, 0.0) + np.maximum(low_p - a * low_q, 0.0)).max()
        u, v = np.exp(kept.log_u), np.exp(kept.log_v)
        found = (kept.of_u * np.maximum(u - a, 0.0) + kept.of_v * np.maximum(v - a, 0.0)).max()
        assert exact * (1 - 1e-9) <= found <= 1.03 * exact + 1e-3 / sigma


@pytest.mark.parametrize(
    ("count", "sigma", "flip"),
    [(20, 0.9437, 2.1e-11), (100, 1.0470, 1.63e-9), (1000, 2.0222, 1.36e-3)],
)
def test_the_noise_and_the_flips_are_those_of_an_independent_recursion(count: int, sigma: float, flip: float) -> None:
    """Epsilon 1, delta 1e-5, rate .02, a lead of 6: figures of a program of its own, which has no blocks."""
    found = solve(1.0, 1e-5, {"one": LineRequest(BIT, 0.02, count, options={"own_calls": 1.0})})[0]
    assert sigma * (1 - 1e-3) <= found <= 1.01 * sigma
    assert VoteNoise(BIT, found, True).flip(6, 2) == pytest.approx(flip, rel=0.1)
    exponential = solve(1.0, 1e-5, {"one": LineRequest(EXPONENTIAL, 0.02, count, options={"own_calls": 1.0})})[0]
    assert VoteNoise(EXPONENTIAL, exponential, True).flip(6, 2) > 4.0 * flip


def test_a_plan_takes_the_mechanism_that_is_overturned_least_at_its_public_lead() -> None:
    crowd = Crowd(40, 20.0, True)
    wide = compared(1.0, 1e-5, 1000, 0.02, crowd, 2, 0.3)
    assert min(wide, key=lambda name: wide[name][1]) == BIT
    narrow = compared(1.0, 1e-5, 20, 0.02, crowd, 2, 0.1)
    assert min(narrow, key=lambda name: narrow[name][1]) == EXPONENTIAL
    assert BIT not in compared(1.0, 1e-5, 20, 0.02, crowd, 3, 0.3)


@pytest.mark.parametrize("count", [1, 20, 1000, 50_000])
@pytest.mark.parametrize("name", [EXPONENTIAL, BIT])
def test_comparisons_know_the_noise_within_some_per_cent(name: str, count: int) -> None:
    asked = LineRequest(name, 0.02, count, options={"own_calls": 1.0})
    assert about(1.0, 1e-5, asked) == pytest.approx(solve(1.0, 1e-5, {"one": asked})[0], rel=0.05)


def test_lines_of_all_kinds_compose_in_any_order() -> None:
    """Two votes of one bit, one of a range, and a Gaussian: the best adversary, who chooses the line as well."""
    law, a = half_integers(0.9), math.exp(1.0)
    pairs = {"bit": [], "range": []}
    for d in range(-6, 7):
        pairs["bit"].append((law(d + 1), law(d)))
    for tau in np.linspace(0.01, 0.99, 40):
        q = -math.expm1(-tau) / (math.exp(1.0 - tau) - math.exp(-tau))
        pairs["range"].append((q * math.exp(1.0 - tau), q))

    def worth(left: tuple[int, int], ratio: float) -> float:
        if left == (0, 0):
            return max(0.0, ratio - a)
        best = 0.0
        for kind, place in (("bit", 0), ("range", 1)):
            if not left[place]:
                continue
            rest = (left[0] - (place == 0), left[1] - (place == 1))
            for p, q in pairs[kind]:
                value = q * worth(rest, ratio * p / q) + (1 - q) * worth(rest, ratio * (1 - p) / (1 - q))
                best = max(best, value)
        return best

    lines = [Line(OneBit(BitPairs(0.9)), 1.0, 2), Line(BoundedRange(1.0), 1.0, 1)]
    claimed = Composition([part for line in lines for part in line.parts("remove")]).delta(1.0)
    assert worth((2, 1), 1.0) <= claimed <= 1.2 * worth((2, 1), 1.0)
    more = [*lines, Line(Gaussian(3.0), 1.0, 1)]
    assert PLD.delta(more, 1.0) > PLD.delta(lines, 1.0)
