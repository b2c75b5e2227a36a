"""The winner of a Gaussian vote as one bit: its draw has one threshold, and nobody learns more than is claimed."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from scipy.stats import binomtest

from langchain_dpicl.aggregators import NoisyVote
from langchain_dpicl.privacy import Line, PLDAccountant, Randomness
from langchain_dpicl.privacy.bits import ThresholdPairs
from langchain_dpicl.privacy.choice import Crowd, compared
from langchain_dpicl.privacy.lines import LineRequest
from langchain_dpicl.privacy.mechanisms import MECHANISMS
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.privacy.profile import DiscreteGaussian, GaussianWinner
from langchain_dpicl.privacy.votes import BIT, EXPONENTIAL, GAUSSIAN, WINNER, VoteNoise, discrete_gaussian

PLD = PLDAccountant()
OWN = {"own_calls": 1.0}

Law = dict[str | None, float]
Pairs = list[tuple[list[float], list[float]]]
"""Probabilities of all outcomes, with the owner and without."""


class Told(Randomness):
    """Noise and lots that are told."""

    def __init__(self, noise: Sequence[int], lot: int = 0) -> None:
        self.noise = noise
        self.lot = lot
        self.tied = 1

    def discrete_gaussian(self, sigma: float, size: int) -> np.ndarray:
        return np.array(self.noise, np.int64)

    def integers(self, high: int, size: int) -> np.ndarray:
        self.tied = high
        return np.array([self.lot])

    def uniforms(self, size: int) -> np.ndarray:
        raise AssertionError("no vote draws these")


def outcomes(vote: NoisyVote, counts: Sequence[int], noise: Sequence[int]) -> Law:
    """The releases that this noise leaves to lots, each with its share."""
    assert vote.crowd is not None
    told = Told(noise)
    first = vote.draw(np.array(counts), vote.crowd, 1.0, told)
    found = [first]
    for lot in range(1, told.tied):
        found.append(vote.draw(np.array(counts), vote.crowd, 1.0, Told(noise, lot)))
    return {each: number / len(found) for each, number in Counter(found).items()}


def bound(
    labels: Sequence[str], prior: dict[str, float] | None, mechanism: str = WINNER, members: int = 2
) -> NoisyVote:
    return NoisyVote(labels, prior=prior, mechanism=mechanism).under(mechanism, Crowd(members, 3.0, True))


LABELS = {2: ["yes", "no"], 3: ["red", "green", "blue"]}
PRIORS = {2: {"yes": 0.9, "no": 0.1}, 3: {"red": 0.1, "green": 0.6, "blue": 0.3}}


@pytest.mark.parametrize("has_prior", [False, True])
@pytest.mark.parametrize("labels", [2, 3])
def test_a_larger_count_wins_from_one_threshold_on_and_changes_nothing_else(labels: int, has_prior: bool) -> None:
    """For all noisy counts of a small domain, with all lots. Lots are compared as shares: a rival that ties with the
    owner's label keeps its order among the others."""
    vote = bound(LABELS[labels], PRIORS[labels] if has_prior else None)
    names = [*LABELS[labels], None]
    none = (0,) * (labels + 1)
    reach = range(8) if labels == 2 else range(6)
    for others in itertools.product(reach, repeat=labels):
        for i in range(labels + 1):
            before: Law = {}
            for own in reach:
                counts = (*others[:i], own, *others[i:])
                now = outcomes(vote, counts, none)
                assert now.get(names[i], 0.0) >= before.get(names[i], 0.0)
                if before:
                    left = 1.0 - now.get(names[i], 0.0)
                    for rival in set(names) - {names[i]}:
                        rest = 1.0 - before.get(names[i], 0.0)
                        assert now.get(rival, 0.0) == pytest.approx(before.get(rival, 0.0) * left / (rest or 1.0))
                before = now


def test_without_the_prior_there_are_two_thresholds() -> None:
    """The rule of "vote", which keeps it: what a larger count of one label does first is the gain of another."""
    prior = {"yes": 0.999, "no": 0.001}
    seen = {}
    for mechanism in (GAUSSIAN, WINNER):
        vote = bound(LABELS[2], prior, mechanism)
        seen[mechanism] = [next(iter(outcomes(vote, (3, own, 7), (0, 0, 0)))) for own in range(30)]
    assert [each for each, _ in itertools.groupby(seen[GAUSSIAN])] == [None, "yes", "no"]
    assert [each for each, _ in itertools.groupby(seen[WINNER])] == [None, "no"]


def law(vote: NoisyVote, sigma: float, counts: Sequence[int], reach: int) -> list[float]:
    """The exact law of a release, but for the noise beyond ``reach``."""
    support, weights = discrete_gaussian(sigma)
    chance = dict(zip(support.tolist(), weights.tolist(), strict=True))
    found = Counter()
    for noise in itertools.product(range(-reach, reach + 1), repeat=len(counts)):
        weight = math.prod(chance[x] for x in noise)
        for outcome, share in _decided(vote, tuple(c + x for c, x in zip(counts, noise, strict=True))):
            found[outcome] += weight * share
    return [found[name] for name in (*vote.labels, None)]


@cache
def _decided(vote: NoisyVote, noisy: tuple[int, ...]) -> tuple[tuple[str | None, float], ...]:
    return tuple(outcomes(vote, noisy, (0,) * len(noisy)).items())


def best(pairs: Pairs, count: int, a: float) -> float:
    """The largest delta of so many releases if an adversary chooses each pair after the outcome before: by exhaustion,
    without any grid. Of both directions the worse."""

    def worth(left: int, ratio: float, end: Callable[[float], float]) -> float:
        if not left:
            return end(ratio)
        values = []
        for present, absent in pairs:
            both = [(p, q) for p, q in zip(present, absent, strict=True) if q > 0.0]
            values.append(sum(q * worth(left - 1, ratio * p / q, end) for p, q in both))
        return max(values)

    return max(
        worth(count, 1.0, lambda ratio: max(0.0, ratio - a)), worth(count, 1.0, lambda ratio: max(0.0, 1.0 - a * ratio))
    )


def mixed(present: list[float], absent: list[float], rate: float) -> tuple[list[float], list[float]]:
    return [(1.0 - rate) * q + rate * p for p, q in zip(present, absent, strict=True)], absent


@pytest.mark.parametrize(
    ("labels", "has_prior", "sigma", "reach", "rate", "bases"),
    [
        (2, True, 0.5, 5, 1.0, [(1, 1, 0), (2, 1, 4), (0, 3, 2), (0, 1, 5)]),
        (2, False, 0.7, 6, 0.2, [(1, 1, 0), (1, 2, 4), (0, 3, 0)]),
        (3, True, 0.4, 4, 0.4, [(1, 1, 1, 0), (2, 0, 1, 3), (0, 2, 2, 0)]),
    ],
)
def test_exact_laws_stay_below_the_claim(
    labels: int, has_prior: bool, sigma: float, reach: int, rate: float, bases: list[tuple[int, ...]]
) -> None:
    """Every label and the abstention as the owner's, ties, and a prior; two releases, the second chosen after the
    first. The noise that is left out, below 1e-13 of the laws, is taken off."""
    vote = bound(LABELS[labels], PRIORS[labels] if has_prior else None)
    pairs: Pairs = []
    for base in bases:
        absent = law(vote, sigma, base, reach)
        for i in range(labels + 1):
            more = tuple(c + (j == i) for j, c in enumerate(base))
            pairs.append(mixed(law(vote, sigma, more, reach), absent, rate))
    missing = 1.0 - min(sum(each) for both in pairs for each in both) + 1e-12
    shares = []
    for count, epsilon in itertools.product((1, 2), (0.2, 1.0, 2.0)):
        true = best(pairs, count, math.exp(epsilon))
        line = Line(GaussianWinner(sigma), rate, count)
        claimed = PLD.delta([line], epsilon)
        assert true <= claimed + 20.0 * missing
        shares.append(true / claimed)
    assert max(shares) > 0.85


def coins(sigma: float, thresholds: Sequence[int]) -> Pairs:
    """S(t - 1) and S(t) by fractions of large sums."""
    weights = {k: Fraction(math.exp(-0.5 * (k / sigma) ** 2)) for k in range(-60, 61)}
    total = sum(weights.values())
    found: Pairs = []
    for t in thresholds:
        present, absent = (sum(w for k, w in weights.items() if k >= at) / total for at in (t - 1, t))
        found.append(([float(present), float(1 - present)], [float(absent), float(1 - absent)]))
    return found


@pytest.mark.parametrize(
    ("sigma", "rate", "count", "thresholds"),
    [(0.6, 0.3, 4, range(-1, 4)), (1.2, 0.1, 3, range(-4, 7)), (2.0, 1.0, 2, range(-14, 17)), (0.3, 0.02, 4, range(4))],
)
def test_no_adversary_who_chooses_the_lead_gets_above(sigma: float, rate: float, count: int, thresholds: range) -> None:
    pairs = [mixed(*each, rate) for each in coins(sigma, thresholds)]
    for epsilon in (0.05, 0.5, 1.0, 2.0):
        true = best(pairs, count, math.exp(epsilon))
        claimed = PLD.delta([Line(GaussianWinner(sigma), rate, count)], epsilon)
        assert true <= claimed * (1 + 1e-12)
        assert claimed <= 1.05 * true + 1e-6


def test_the_pairs_are_those_of_all_thresholds() -> None:
    for sigma in (0.3, 1.0):
        family = ThresholdPairs(sigma)
        absent, absent_low, gap, present_low = family.coins()
        last = (absent.size + 1) // 2
        for i, t in enumerate(range(last, 1 - last, -1)):
            ((present, low), (without, without_low)) = coins(sigma, [t])[0]
            for found, exact in ((absent, without), (absent_low, without_low), (gap, present - without)):
                assert found[i] == pytest.approx(exact, rel=1e-9, abs=1e-15)
            assert present_low[i] == pytest.approx(low, rel=1e-9, abs=1e-15)
        ((present, _), (without, _)) = coins(sigma, [last + 1])[0]
        assert present - without <= family.beyond * (1 + 1e-6) + 1e-30


@pytest.mark.parametrize("sigma", [4.0, 25.0, 200.0])
def test_few_pairs_cover_all(sigma: float) -> None:
    """At any a the kept pairs reach as high as every pair, also in the tails, and hardly higher in the middle."""
    family = ThresholdPairs(sigma)
    kept = family.trials(1.0)
    absent, absent_low, gap, present_low = family.coins()
    assert kept.of_u.size < 80 < absent.size
    u, v = np.exp(kept.log_u), np.exp(kept.log_v)
    for epsilon in np.linspace(-10.0, 10.0, 81) / sigma:
        a = math.exp(epsilon)
        exact = (np.maximum(absent + gap - a * absent, 0.0) + np.maximum(present_low - a * absent_low, 0.0)).max()
        found = (kept.of_u * np.maximum(u - a, 0.0) + kept.of_v * np.maximum(v - a, 0.0)).max()
        assert exact * (1 - 1e-9) <= found <= 1.1 * exact + 1e-3 / sigma


@pytest.mark.parametrize(("rate", "sigma"), [(1.0, 2.0), (0.02, 0.8)])
def test_no_tail_is_cut_off_and_none_makes_epsilon_infinite(rate: float, sigma: float) -> None:
    """Many releases show no less than one, whose exact delta is that of the noisy count. The better bound counts."""
    for delta in (1e-5, 1e-12, 1e-20, 1e-30, 1e-40):
        one = PLD.epsilon([Line(DiscreteGaussian(sigma, (1,)), rate, 1)], delta)
        for count in (2, 30):
            both = [PLD.epsilon([Line(kind, rate, count)], delta) for kind in _kinds(sigma)]
            assert one <= both[0] * (1 + 1e-9) + 1e-9
            assert both[0] <= both[1] < math.inf


def _kinds(sigma: float) -> tuple[DiscreteGaussian, DiscreteGaussian]:
    return GaussianWinner(sigma), DiscreteGaussian(sigma, (1,))


def test_one_release_costs_what_the_count_itself_does() -> None:
    for sigma, rate in ((0.3, 0.5), (3.0, 1.0), (250.0, 0.1)):
        for epsilon in (0.0, 0.3, 2.0):
            found, exact = (PLD.delta([Line(each, rate, 1)], epsilon) for each in _kinds(sigma))
            assert found == exact
    with_others, alone = (PLD.epsilon([Line(each, 0.1, 50)], 1e-5) for each in _kinds(250.0))
    assert with_others == alone  # no pairs are listed there


def test_where_two_counts_move_the_winner_costs_what_both_do() -> None:
    """Buckets that owners share, and calls with a cap: one output replaced."""
    for name in (WINNER, GAUSSIAN):
        assert MECHANISMS[name].of({"own_calls": 0.0}).profile(3.0) == DiscreteGaussian(3.0, (1, 1))


@pytest.mark.parametrize(("own", "epsilon"), [(1.0, 0.9990450814675889), (0.0, 1.5527772420910502)])
def test_a_vote_of_an_earlier_plan_keeps_its_cost(own: float, epsilon: float) -> None:
    line = LineRequest(GAUSSIAN, 0.02, 1000, options={"own_calls": own}).line(2.5142)
    assert PLD.epsilon([line], 1e-5) == pytest.approx(epsilon, rel=1e-12)  # machines differ in the last digits


@pytest.mark.parametrize(
    ("count", "sigma", "share"), [(20, 0.9547, 0.95), (100, 1.0373, 0.78), (1000, 2.047, 0.78), (10_000, 6.046, 0.79)]
)
def test_a_winner_alone_costs_less_than_all_counts(count: int, sigma: float, share: float) -> None:
    """At the least noise that keeps epsilon 1 at delta 1e-5 and a rate of .02."""
    costs = [
        PLD.epsilon([LineRequest(name, 0.02, count, options=OWN).line(sigma)], 1e-5) for name in (WINNER, GAUSSIAN)
    ]
    assert costs[0] <= 1.0
    assert share - 0.02 < costs[0] / costs[1] < share


def test_a_plan_takes_it_where_it_is_overturned_least() -> None:
    crowd = Crowd(60, 40.0, True)
    many = compared(1.0, 1e-5, 1000, 0.02, crowd, 4, 0.3)
    assert set(many) == {EXPONENTIAL, WINNER}
    assert min(many, key=lambda name: many[name][1]) == WINNER
    few = compared(1.0, 1e-5, 10, 0.02, crowd, 4, 0.05)
    assert min(few, key=lambda name: few[name][1]) == EXPONENTIAL
    assert set(compared(1.0, 1e-5, 10, 0.02, crowd, 2, 0.05)) == {EXPONENTIAL, WINNER, BIT}
    assert NoisyVote(LABELS[3]).choices == (GAUSSIAN, EXPONENTIAL, WINNER)
    assert NoisyVote(LABELS[2], details=True).choices == NoisyVote(LABELS[2], scores=True).choices == ("scores",)


@pytest.mark.parametrize("counts", [(4, 4, 2, 0), (3, 1, 1, 13)])
def test_what_is_drawn_is_the_law(counts: tuple[int, ...]) -> None:
    """4,000 draws, each outcome by itself; a false alarm has a probability below 1e-7."""
    sigma = 1.0
    vote = bound(LABELS[3], PRIORS[3], members=12)
    offsets = (vote._logs - vote._logs.max()) / VoteNoise(WINNER, sigma, True).nats(3.0, 3)
    reached = VoteNoise(WINNER, sigma, True).abstention_count(12, 3)
    support, weights = (each[np.abs(discrete_gaussian(sigma)[0]) <= 7] for each in discrete_gaussian(sigma))
    noisy = np.stack(np.meshgrid(*(count + support for count in counts), indexing="ij")).reshape(4, -1)
    chance = np.stack(np.meshgrid(*[weights] * 4, indexing="ij")).reshape(4, -1).prod(axis=0)
    evidence = noisy[:-1] + offsets[:, None]
    none = (noisy[-1] >= reached) & (noisy[-1] > evidence.max(axis=0))
    ties = evidence == evidence.max(axis=0)
    exact = [float((chance * ~none * tie / ties.sum(axis=0)).sum()) for tie in ties] + [float(chance[none].sum())]
    assert vote.crowd is not None
    draws = Counter(vote.draw(np.array(counts), vote.crowd, sigma, SecureRandomness()) for _ in range(4000))
    for outcome, share in zip((*LABELS[3], None), exact, strict=True):
        assert binomtest(draws[outcome], 4000, min(share, 1.0)).pvalue > 2e-8
