"""Profiles against brute force: two-atom pairs, small mechanisms enumerated fully, the real noise sampled.

`hockey_stick(P, Q, eps)` = sum max(0, P - e^eps Q) is the definition of delta(eps); everything here is held against it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray
from profiles import ApproximateDP, PureDP, repeated_delta
from scipy.integrate import quad
from scipy.stats import norm
from ways import shown

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import (
    MECHANISMS,
    BoundedRange,
    DiscreteGaussian,
    Gaussian,
    Line,
    PLDAccountant,
    Profile,
    ProposeTestRelease,
    SecureRandomness,
    lattice_multiplier,
)
from langchain_dpicl.privacy.mechanisms import OWN_CALLS
from langchain_dpicl.privacy.profile import DIRECTIONS, RATE_ERROR, Direction

Floats = NDArray[np.float64]
EPSILONS = np.linspace(-3.0, 5.0, 41)
BASES: list[Profile] = [
    Gaussian(0.3),
    Gaussian(1.0),
    Gaussian(20.0),
    DiscreteGaussian(0.5),
    DiscreteGaussian(1.37),
    DiscreteGaussian(30.0, (3, -2)),
    BoundedRange(0.2),
    BoundedRange(4.0),
    ProposeTestRelease(1.0, 1e-3),
    ProposeTestRelease(0.4, 0.2),
    ProposeTestRelease(50.0, 0.1),
    ApproximateDP(1.0, 0.01),
    PureDP(0.7),
    DiscreteGaussian(2.0).compose(BoundedRange(0.5)),
]


def hockey_stick(p: ArrayLike, q: ArrayLike, eps: float) -> float:
    return float(np.maximum(0.0, np.asarray(p) - math.exp(eps) * np.asarray(q)).sum())


def discrete_gaussian(sigma: float, half: int) -> Floats:
    weights = np.exp(-0.5 * (np.arange(-half, half + 1) / sigma) ** 2)
    return np.asarray(weights / weights.sum())


# Formulas against their definition ------------------------------------------------------------------------------------


@pytest.mark.parametrize("z", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("eps", [-2.0, 0.0, 0.5, 3.0])
def test_gaussian_is_the_hockey_stick_of_two_normals(z: float, eps: float) -> None:
    crossing = 0.5 - eps * z * z  # the densities of N(0, z^2) and N(1, z^2) have the ratio e^eps here
    exact, _ = quad(lambda x: norm.pdf(x, 0, z) - math.exp(eps) * norm.pdf(x, 1, z), crossing - 30 * z, crossing)
    assert float(Gaussian(z).delta(eps)) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("sigma", [0.4, 1.0, 1.7])
@pytest.mark.parametrize("moves", [(1,), (1, -1), (2, 1), (1, 1, 1)])
def test_discrete_gaussian_is_the_hockey_stick_of_the_noisy_counts(sigma: float, moves: tuple[int, ...]) -> None:
    half = math.ceil(9 * sigma) + 3
    noise = np.pad(discrete_gaussian(sigma, half), 3)
    moved = [np.roll(noise, m) for m in moves]
    p = math.prod(np.ix_(*([noise] * len(moves))))
    q = math.prod(np.ix_(*moved))
    for eps in (-1.0, 0.0, 0.3, 2.0, 5.0):
        assert float(DiscreteGaussian(sigma, moves).delta(eps)) == pytest.approx(hockey_stick(p, q, eps), abs=1e-13)


def test_a_vote_is_the_two_fold_composition_of_one_count() -> None:
    one = DiscreteGaussian(1.3, (1,))
    both = np.asarray([float(DiscreteGaussian(1.3).delta(e)) for e in EPSILONS])
    assert np.allclose(one.compose(one).delta(EPSILONS), both, atol=2e-6)
    assert np.all(one.compose(one).delta(EPSILONS) >= both - 1e-15)
    assert np.all(DiscreteGaussian(1.3, (1, -1)).delta(EPSILONS) == DiscreteGaussian(1.3, (1, 1)).delta(EPSILONS))


def test_large_discrete_gaussians_are_covered_by_a_continuous_one() -> None:
    """Above sigma 200 the bound comes from the smoothing argument: at least the lattice's own delta, hardly more."""
    for sigma in (201.0, 500.0):
        half = math.ceil(10 * sigma)
        noise = discrete_gaussian(sigma, half)
        for eps in (0.0, 0.002, 0.01):
            exact = hockey_stick(noise[:-40], noise[40:], eps)
            bound = float(DiscreteGaussian(sigma, (40,)).delta(eps))
            assert exact - 1e-14 <= bound <= exact * (1 + 1e-3)


@pytest.mark.parametrize(("sigma", "move"), [(4.0, 1), (4.0, 7), (12.0, 30)])
def test_lattice_noise_is_a_post_processing_of_continuous_noise(sigma: float, move: int) -> None:
    """One coordinate, and two coordinates that move together, against `lattice_multiplier`'s Gaussian."""
    half = math.ceil(12 * sigma) + move
    noise = discrete_gaussian(sigma, half)
    p, q = noise[:-move], noise[move:]
    for eps in np.linspace(0.0, 4.0, 9):
        assert hockey_stick(p, q, eps) <= float(Gaussian(lattice_multiplier(sigma, move)).delta(eps)) + 1e-14
        if sigma < 5.0:
            two = hockey_stick(np.outer(p, p), np.outer(q, q), eps)
            assert two <= float(Gaussian(lattice_multiplier(sigma, move * math.sqrt(2))).delta(eps)) + 1e-14


@given(eps0=st.floats(0.01, 12.0), share=st.floats(0.0, 1.0), eps=st.floats(-12.0, 12.0))
@settings(max_examples=200, deadline=None)
def test_no_two_point_pair_of_that_range_exceeds_bounded_range(eps0: float, share: float, eps: float) -> None:
    top = share * eps0  # losses top and top - eps0; P and Q must both add up to one
    spread = math.exp(eps0 - top) - math.exp(-top)
    p, rest = math.expm1(eps0 - top) / spread, -math.expm1(-top) / spread
    pair = np.array([p, rest]), np.array([p * math.exp(-top), rest * math.exp(eps0 - top)])
    assert hockey_stick(*pair, eps) <= float(BoundedRange(eps0).delta(eps)) + 1e-12


@pytest.mark.parametrize("eps0", [0.3, 2.0, 8.0])
def test_bounded_range_is_reached_by_a_two_point_pair(eps0: float) -> None:
    for eps in np.linspace(-eps0, eps0, 9):
        top = (eps + eps0) / 2
        p = math.expm1(eps0 - top) / (math.exp(eps0 - top) - math.exp(-top))
        pair = np.array([p, 1 - p]), np.array([p * math.exp(-top), (1 - p) * math.exp(eps0 - top)])
        assert hockey_stick(*pair, eps) == pytest.approx(float(BoundedRange(eps0).delta(eps)), abs=1e-12)


@given(
    utilities=st.lists(st.tuples(st.floats(-5, 5), st.floats(-2, 2)), min_size=2, max_size=6),
    eps0=st.floats(0.1, 6.0),
    eps=st.floats(-3.0, 6.0),
)
@settings(max_examples=150, deadline=None)
def test_exponential_mechanism_stays_within_bounded_range(
    utilities: list[tuple[float, float]], eps0: float, eps: float
) -> None:
    """Weights exp(eps0 u / 4), and u moves by at most 2 either way."""
    u = np.array([a for a, _ in utilities])
    moved = u + np.array([b for _, b in utilities])
    p, q = (np.exp(eps0 * x / 4) / np.exp(eps0 * x / 4).sum() for x in (u, moved))
    assert hockey_stick(p, q, eps) <= float(BoundedRange(eps0).delta(eps)) + 1e-12


def test_propose_test_release_covers_both_kinds_of_neighbours() -> None:
    """Every pair of gaps that differ by at most 2 with the same set; any two gaps up to 2 with different sets."""
    for sigma, delta0 in ((1.0, 1e-3), (0.5, 0.05), (3.0, 0.2)):
        profile = ProposeTestRelease(sigma, delta0)
        offset = norm.ppf(1 - delta0, 0, 2 * sigma)

        def passes(gap: float, offset: float = offset, sigma: float = sigma) -> float:
            return float(norm.sf(2.0 - max(2.0, gap) + offset, 0, 2 * sigma))

        for eps in np.linspace(-2.0, 4.0, 13):
            bound = float(profile.delta(eps)) + 1e-12
            for gap in (0.0, 1.0, 2.0, 3.0, 4.0, 7.0):
                for change in (-2, -1, 1, 2):
                    a, b = passes(gap), passes(gap + change)
                    assert hockey_stick([a, 1 - a], [b, 1 - b], eps) <= bound
            a, b = passes(1.0), passes(2.0)
            assert a == b == pytest.approx(delta0)
            assert hockey_stick([a, 0.0, 1 - a], [0.0, b, 1 - b], eps) <= bound


# Symmetry, atoms, subsampling: every profile --------------------------------------------------------------------------


@pytest.mark.parametrize("profile", BASES, ids=shown)
def test_swapping_the_pair_gives_negative_epsilons(profile: Profile) -> None:
    eps = np.linspace(0.0, 6.0, 25)
    mirrored = 1.0 - np.exp(-eps) * (1.0 - profile.delta(eps))
    assert np.allclose(profile.delta(-eps), mirrored, atol=1e-5 if "Composed" in repr(profile) else 1e-13)


@pytest.mark.parametrize("profile", BASES, ids=shown)
@pytest.mark.parametrize("rate", [1e-4, 0.03, 0.6, 1.0])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_atoms_dominate_their_profile_and_hardly_exceed_it(profile: Profile, rate: float, direction: Direction) -> None:
    sampled = profile.subsample(rate)
    atoms = sampled.losses(direction)
    eps = np.linspace(math.log1p(-rate) if rate < 1 else -3.0, 4.0, 60)
    exact = sampled.direction_delta(eps, direction)
    assert np.all(atoms.delta(eps) >= exact - 2e-15)
    assert np.all(atoms.delta(eps) <= exact + 1e-4 * rate + 1e-14)
    assert atoms.masses.sum() + atoms.infinity == pytest.approx(1.0, abs=1e-14)
    assert np.all(atoms.masses >= 0.0)


def pair_of(eps0: float, delta0: float) -> tuple[Floats, Floats]:
    """Randomised response with a secret shown with probability delta0."""
    high = (1 - delta0) / (1 + math.exp(-eps0))
    p = np.array([delta0, high, 1 - delta0 - high, 0.0])
    return p, p[::-1].copy()


@given(
    eps0=st.floats(0.0, 6.0),
    delta0=st.floats(0.0, 0.3),
    rate=st.floats(1e-4, 1.0),
    eps=st.floats(-2.0, 6.0),
)
@settings(max_examples=200, deadline=None)
def test_subsampling_is_the_hockey_stick_of_the_mixture_in_both_directions(
    eps0: float, delta0: float, rate: float, eps: float
) -> None:
    present, absent = pair_of(eps0, delta0)
    q = min(1.0, rate * (1 + RATE_ERROR))
    mixed = (1 - q) * absent + q * present
    sampled = ApproximateDP(eps0, delta0).subsample(rate)
    assert float(sampled.direction_delta(eps, "remove")) == pytest.approx(hockey_stick(mixed, absent, eps), abs=1e-12)
    assert float(sampled.direction_delta(eps, "add")) == pytest.approx(hockey_stick(absent, mixed, eps), abs=1e-12)
    assert sampled.delta(eps) == max(sampled.direction_delta(eps, d) for d in DIRECTIONS)


def test_the_rate_is_rounded_up() -> None:
    sampled = PureDP(2.0).subsample(0.1)
    assert sampled.covered_rate > 0.1  # type: ignore[attr-defined]
    assert PureDP(2.0).subsample(1.0).covered_rate == 1.0  # type: ignore[attr-defined]


def test_at_a_rate_of_one_a_line_costs_what_its_profile_says() -> None:
    profile = BoundedRange(1.5)
    whole = profile.subsample(1.0)
    for direction in DIRECTIONS:
        found = whole.direction_delta(EPSILONS, direction)
        assert np.array_equal(found, profile.direction_delta(EPSILONS, direction))
    true = float(profile.delta(0.7))
    assert true <= PLDAccountant().delta([Line(profile, 1.0, 1)], 0.7) <= true * 1.001


def vote_output(owners: dict[str, int], rate: float, members: int, sigma: float) -> dict[tuple[int, ...], float]:
    """The whole release, enumerated: coins, members, prompts, counts, noise, winner.

    A member answers label 1 if any of its owners says 1, label 0 if it has others only, and abstains when empty.
    """
    names = sorted(owners)
    half = math.ceil(7 * sigma)
    noise = discrete_gaussian(sigma, half)
    cumulated = np.cumsum(noise)
    outcomes: dict[tuple[int, ...], float] = {}
    for places in itertools.product(range(-1, members), repeat=len(names)):
        chance = math.prod((1 - rate) if place < 0 else rate / members for place in places)
        answers = [[owners[n] for n, place in zip(names, places, strict=True) if place == m] for m in range(members)]
        counts = tuple(sum(1 for a in answers if a and max(a) == label) for label in (0, 1))
        outcomes[counts] = outcomes.get(counts, 0.0) + chance
    released: dict[tuple[int, ...], float] = {(0,): 0.0, (1,): 0.0}
    for (zero, one), chance in outcomes.items():
        below = np.clip(np.arange(-half, half + 1) + one - zero - 1 + half, -1, 2 * half)
        wins = float((noise * np.where(below < 0, 0.0, cumulated[np.maximum(below, 0)])).sum())
        released[(1,)] += chance * wins
        released[(0,)] += chance * (1 - wins)
    return released


@pytest.mark.parametrize("who", ["a", "b", "c"])
@pytest.mark.parametrize("sigma", [0.4, 1.0])
def test_the_whole_vote_enumerated_stays_within_its_subsampled_profile(who: str, sigma: float) -> None:
    """Poisson coins, an own member each, counts, noise, argmax: with and without an owner, in both directions."""
    owners, rate, members = {"a": 1, "b": 0, "c": 0}, 0.4, 2
    full = vote_output(owners, rate, members, sigma)
    less = vote_output({n: x for n, x in owners.items() if n != who}, rate, members, sigma)
    p, q = (np.array([x[(0,)], x[(1,)]]) for x in (full, less))
    sampled = DiscreteGaussian(sigma).subsample(rate)
    for eps in np.linspace(0.0, 1.5, 16):
        assert hockey_stick(p, q, eps) <= float(sampled.direction_delta(eps, "remove")) + 1e-10
        assert hockey_stick(q, p, eps) <= float(sampled.direction_delta(eps, "add")) + 1e-10


def test_the_real_noise_does_not_exceed_the_profile() -> None:
    """Noisy counts (5, 5) against (4, 6), drawn by the production sampler; the event is the best one at each eps.

    Hoeffding: an estimated probability from 40 000 draws is off by more than .0144 with probability below 1e-7.
    """
    runs, sigma = 40_000, 1.2
    draws = SecureRandomness().discrete_gaussian(sigma, 4 * runs).reshape(4, runs)
    error = math.sqrt(math.log(2e7) / (2 * runs))
    for eps in (0.0, 0.5, 1.0):
        # the likelihood ratio of (x, y) is decided by x - y
        for threshold in range(-4, 5):
            with_owner = (draws[0] - draws[1] >= threshold).mean()
            without = (draws[2] - draws[3] - 2 >= threshold).mean()
            bound = float(DiscreteGaussian(sigma).delta(eps))
            assert with_owner - math.exp(eps) * without <= bound + error * (1 + math.exp(eps))
    best = max((draws[0] - draws[1] >= t).mean() - (draws[2] - draws[3] - 2 >= t).mean() for t in range(-4, 5))
    assert best >= float(DiscreteGaussian(sigma).delta(0.0)) - 2 * error  # and it is no more than needed


# Composition inside one sample ----------------------------------------------------------------------------------------


def test_gaussians_compose_to_a_gaussian() -> None:
    both = Gaussian(1.0).compose(Gaussian(2.0))
    exact = Gaussian(1 / math.sqrt(1 + 0.25)).delta(EPSILONS)
    assert np.all(both.delta(EPSILONS) >= exact - 1e-15)
    assert np.allclose(both.delta(EPSILONS), exact, rtol=1e-3)


@given(
    first=st.tuples(st.floats(0.05, 2.0), st.floats(0.0, 0.2)),
    second=st.tuples(st.floats(0.05, 2.0), st.floats(0.0, 0.2)),
    rate=st.floats(0.01, 1.0),
    eps=st.floats(-1.0, 3.0),
)
@settings(max_examples=80, deadline=None)
def test_parts_of_one_sample_compose_before_they_are_amplified(
    first: tuple[float, float], second: tuple[float, float], rate: float, eps: float
) -> None:
    (p1, q1), (p2, q2) = pair_of(*first), pair_of(*second)
    present, absent = np.outer(p1, p2), np.outer(q1, q2)
    mixed = (1 - rate) * absent + rate * present
    release = ApproximateDP(*first).compose(ApproximateDP(*second)).subsample(rate)
    slack = 2e-3 * rate  # the grid on which losses are added
    for direction, pair in (("remove", (mixed, absent)), ("add", (absent, mixed))):
        exact = hockey_stick(*pair, eps)
        assert exact - 1e-9 <= float(release.direction_delta(eps, direction)) <= exact + slack  # type: ignore[arg-type]


def test_amplifying_each_part_of_a_release_would_promise_too_much() -> None:
    """MISTAKE 13. Two answers from ONE sample at rate 1/2, counted as two samples: the true delta is larger."""
    part, rate, eps = PureDP(1.0), 0.5, 1.0
    present, absent = (np.outer(x, x) for x in pair_of(1.0, 0.0))
    true = hockey_stick((1 - rate) * absent + rate * present, absent, eps)
    wrong = part.subsample(rate).losses("remove").compose(part.subsample(rate).losses("remove"))
    assert float(wrong.delta(eps)) < 0.8 * true
    assert float(part.compose(part).subsample(rate).direction_delta(eps, "remove")) >= true - 1e-12
    # a PTR plan that also chooses k composes both on one sample
    ptr = MECHANISMS["ptr"].of({"delta0": 1e-6, "select": 2.0}).profile(1.0)
    assert np.all(ptr.delta(EPSILONS) >= BoundedRange(2.0).delta(EPSILONS) - 1e-15)
    assert np.all(ptr.delta(EPSILONS) >= ProposeTestRelease(1.0, 1e-6).delta(EPSILONS) - 1e-15)


@pytest.mark.parametrize("profile", [*BASES[:3], *BASES[6:12]], ids=shown)
def test_three_releases_are_the_same_as_composing_three_samples(profile: Profile) -> None:
    """MISTAKE 12, for profiles: three releases are three samples, and not one."""
    sampled = profile.subsample(0.3)
    eps = np.linspace(0.0, 3.0, 7)
    thrice = {direction: repeated_delta(sampled, 3, eps, direction) for direction in DIRECTIONS}
    atoms = sampled.losses("remove")
    by_hand = atoms.compose(atoms).compose(atoms)
    assert np.allclose(thrice["remove"], by_hand.delta(eps), rtol=2e-2, atol=2e-6)
    assert np.all(np.maximum(*thrice.values()) >= sampled.delta(eps) - 1e-12)
    assert np.allclose(repeated_delta(sampled, 1, eps, "add"), sampled.losses("add").delta(eps))


# The mechanisms of a plan ---------------------------------------------------------------------------------------------


def test_embedding_sums_move_by_two() -> None:
    """MISTAKE 1. Replacing a unit vector by its opposite moves the sum by 2: sensitivity 1 promises too much."""
    sigma = 3.0
    profile = MECHANISMS["embedding"]().profile(sigma)
    edge, _ = quad(lambda x: max(0.0, norm.pdf(x, 1, sigma) - math.e**0.5 * norm.pdf(x, -1, sigma)), -40, 40, limit=200)
    assert float(profile.delta(0.5)) == pytest.approx(edge, rel=1e-4)
    assert float(profile.delta(0.5)) >= edge * (1 - 1e-9)
    assert float(Gaussian(sigma).delta(0.5)) < 0.5 * edge


def test_joint_em_utilities_move_by_two() -> None:
    """MISTAKE 4. Replacing a member's keyword set lowers some counts and raises others, so gaps move by 2 either way.

    Sequences of k = 2 of four tokens, utility -max_i(c_(i) - c_{s_i}), enumerated. With weights exp(eps0 u / 2), as if
    u moved by 1, an output is more than e^eps0 times likelier; with exp(eps0 u / 4) the promise holds.
    """
    eps0, before, after = 2.0, np.array([5.0, 3.0, 2.0, 1.0]), np.array([6.0, 2.0, 1.0, 2.0])

    def law(counts: Floats, divisor: float) -> Floats:
        top = np.sort(counts)[::-1]
        pairs = itertools.permutations(range(4), 2)
        utility = np.array([-max(top[i] - counts[token] for i, token in enumerate(pair)) for pair in pairs])
        return np.asarray(np.exp(eps0 * utility / divisor) / np.exp(eps0 * utility / divisor).sum())

    profile = MECHANISMS["joint-em"]().profile(eps0)
    for p, q in ((before, after), (after, before)):
        for eps in np.linspace(-1.0, 2.5, 15):
            assert hockey_stick(law(p, 4.0), law(q, 4.0), eps) <= float(profile.delta(eps)) + 1e-12
    assert hockey_stick(law(before, 2.0), law(after, 2.0), eps0) > 1e-3 > float(profile.delta(eps0))


def test_a_sample_of_fixed_size_leaks_more_than_a_poisson_sample() -> None:
    """MISTAKE 5. Two owners, one of them sampled; each adds a term of range B to public logits.

    With a fixed size the other owner steps in when one leaves: two terms change, and the Poisson profile is exceeded.
    """
    bound, rate = 2.0, 0.5
    profile = MECHANISMS["tokens"]().profile(bound).subsample(rate)

    def softmax(logits: Floats) -> Floats:
        return np.asarray(np.exp(logits) / np.exp(logits).sum())

    a, b, nothing = softmax(np.array([bound, 0.0])), softmax(np.array([0.0, bound])), softmax(np.zeros(2))
    fixed_with, fixed_without = (a + b) / 2, b
    assert hockey_stick(fixed_with, fixed_without, 0.0) > 1.5 * float(profile.delta(0.0))
    both = softmax(np.array([bound, bound]))
    poisson_with, poisson_without = (a + b + both + nothing) / 4, (b + nothing) / 2
    for eps in np.linspace(0.0, 1.0, 6):
        assert hockey_stick(poisson_with, poisson_without, eps) <= float(profile.direction_delta(eps, "remove"))
        assert hockey_stick(poisson_without, poisson_with, eps) <= float(profile.direction_delta(eps, "add"))


@pytest.mark.parametrize("name", sorted(MECHANISMS))
def test_families_round_towards_more_noise_and_say_what_they_do(name: str) -> None:
    needed: dict[str, dict[str, object]] = {"ptr": {"delta0": 1e-6}, "terms": {"delta0": 1e-6}}
    fixed = {**needed, "structured": {"shares": (0.5, 0.5)}}.get(name, {})
    family = MECHANISMS[name].of(fixed)
    own = {OWN_CALLS: 1.0} if OWN_CALLS in family.fixed() else {}
    for value in (max(0.123456789, 1.0123456 * family.low), max(1.0, family.low), 7.77777777):
        rounded = family.at_coordinate(family.coordinate(value))
        assert (rounded - value) * family.noisier >= -1e-15 * value
        assert rounded == pytest.approx(value, rel=2e-5)
        assert isinstance(family.profile(rounded), Profile)
        assert f"{rounded:g}" in MECHANISMS[name].of({**fixed, **own}).describe(rounded)
    for end in (family.low, family.high):
        again = family.at_coordinate(family.coordinate(end))
        assert family.low <= again <= family.high
        assert again == pytest.approx(end, rel=2e-5)
    noisy, quiet = (family.profile(v) for v in ((8.0, 2.0) if family.noisier > 0 else (2.0, 8.0)))
    assert np.all(noisy.delta(EPSILONS) <= quiet.delta(EPSILONS) + 1e-15)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "parameter"),
    [
        (lambda: Gaussian(0.0), "multiplier"),
        (lambda: Gaussian(float("nan")), "multiplier"),
        (lambda: Gaussian("1"), "multiplier"),  # type: ignore[arg-type]
        (lambda: Gaussian(True), "multiplier"),
        (lambda: DiscreteGaussian(float("inf")), "sigma"),
        (lambda: DiscreteGaussian(1.0, ()), "moves"),
        (lambda: DiscreteGaussian(1.0, (0,)), "moves"),
        (lambda: DiscreteGaussian(1.0, (1.5,)), "moves"),  # type: ignore[arg-type]
        (lambda: BoundedRange(0.0), "eps0"),
        (lambda: BoundedRange(-1.0), "eps0"),
        (lambda: ProposeTestRelease(1.0, 0.0), "delta0"),
        (lambda: ProposeTestRelease(1.0, 1.0), "delta0"),
        (lambda: Gaussian(1.0).subsample(0.0), "rate"),
        (lambda: Gaussian(1.0).subsample(1.1), "rate"),
        (lambda: lattice_multiplier(1.0, 1.0), "sigma"),
        (lambda: MECHANISMS["vote"]().profile(0.0), "sigma"),
        (lambda: MECHANISMS["joint-em"]().profile(1e9), "eps0"),
        (lambda: MECHANISMS["ptr"].of({}), "options['delta0']"),
        (lambda: MECHANISMS["ptr"].of({"delta0": 0.9}).profile(1.0), "delta0"),
        (lambda: MECHANISMS["vote"].of({"delta0": 0.1}).profile(1.0), "options['delta0']"),
    ],
)
def test_bad_parameters_are_named(make: Callable[[], object], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        make()
    assert caught.value.parameter == parameter


def test_profiles_are_values() -> None:
    assert Gaussian(1.0) == Gaussian(1.0)
    assert hash(Gaussian(1.0)) == hash(Gaussian(1.0))
    assert DiscreteGaussian(1.0).subsample(0.5) == DiscreteGaussian(1.0).subsample(0.5)
    with pytest.raises(AttributeError):
        Gaussian(1.0).multiplier = 2.0  # type: ignore[misc]
