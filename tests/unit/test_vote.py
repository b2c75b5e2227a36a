"""`NoisyVote`: what counts as a vote, and that the release is exactly the mechanism that is accounted for."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from scipy import stats
from ways import shown

from langchain_dpicl import InvalidParameter, NoisyVote
from langchain_dpicl.privacy import MECHANISMS
from langchain_dpicl.privacy.votes import abstention_threshold
from langchain_dpicl.private.boundary import ABSTAIN

FALSE_ALARM = 1e-7  # of every statistical test below; there are fewer than ten


# -- parsing -----------------------------------------------------------------------------------------------------------

PARSED: list[tuple[object, str | None]] = [
    ("Positive", "Positive"),
    ("positive", "Positive"),
    ("POSITIVE", "Positive"),
    ("  Positive \n", "Positive"),
    ("Positive.", "Positive"),
    ('"Positive"', "Positive"),
    ("**Positive**", "Positive"),
    ("(positive)!", "Positive"),
    ("Positive, because the film is not negative at all", "Positive"),
    ("Positive\nInput: another\nOutput: Negative", "Positive"),
    ("The answer is negative.", "Negative"),
    ("It is neither positive nor negative", None),
    ("Positively", None),
    ("nonpositive", None),
    ("positive_thing", None),
    ("The answer is positively", None),
    ("", None),
    (" \n", None),
    ("...", None),
    ("no label", None),
    (AIMessage("Positive"), "Positive"),
    (HumanMessage(" negative "), "Negative"),
    (AIMessage([{"type": "text", "text": "Positive"}]), "Positive"),
    (None, None),
    (1, None),
    (b"Positive", None),
    (["Positive"], None),
    ({"label": "Positive"}, None),
    (ABSTAIN, None),
    (ValueError("Positive"), None),
    (type("Odd", (), {"__str__": lambda self: "Positive"})(), None),
    ("positive" * 100_000, None),
    ("Positive \ud83d", "Positive"),
    ("\x00Positive", "Positive"),
]


@pytest.mark.parametrize(("output", "label"), PARSED, ids=shown)
def test_an_output_is_read_as_a_label_or_not_at_all(output: object, label: str | None) -> None:
    vote = NoisyVote(["Positive", "Negative"])
    index = vote.parse(output)
    assert (None if index is None else vote.labels[index]) == label


@pytest.mark.parametrize(
    ("labels", "output", "label"),
    [
        (["New York", "New York City"], "New York City, of course", "New York City"),
        (["New York City", "New York"], "new  york\n is it", "New York"),
        (["a", "b"], "b", "b"),
        (["a", "b"], "I think a", "a"),
        (["C", "C++"], "c++", "C++"),
        (["C", "C++"], "C++ it is", "C++"),
        (["1", "2", "10"], "10", "10"),
        (["1", "2", "10"], "10 points", "10"),
        (["1", "2", "10"], "I give 2", "2"),
        (["Straße", "Weg"], "STRASSE", "Straße"),
        (["İstanbul", "Ankara"], "İstanbul", "İstanbul"),
        (["积极", "消极"], "积极", "积极"),
        (["a.b", "axb"], "axb", "axb"),
        (["(other)", "that"], "other", "(other)"),
        (["billing / refunds", "tech"], "Billing / Refunds", "billing / refunds"),
    ],
)
def test_labels_of_many_kinds_are_read(labels: list[str], output: str, label: str) -> None:
    vote = NoisyVote(labels)
    index = vote.parse(output)
    assert index is not None
    assert vote.labels[index] == label


@pytest.mark.parametrize(
    "labels",
    [
        [],
        ["one"],
        "ab",
        None,
        5,
        ["a", ""],
        ["a", " "],
        ["a", 1],
        ["a", "a"],
        ["a", "A"],
        ["a", " a "],
        ["Straße", "STRASSE"],
        {"a", "b"},
        ["*", "**"],
        [":)", ":("],
        ["yes", "Yes!"],
        ["(other)", "other"],
        ["new york", "new  york"],
    ],
    ids=shown,
)
def test_labels_that_cannot_be_told_apart_are_refused(labels: Any) -> None:
    """Also those that differ by nothing that reading an answer can see: one of the two could never win."""
    with pytest.raises(InvalidParameter) as caught:
        NoisyVote(labels)
    assert caught.value.parameter == "labels"


def test_every_label_reads_as_itself() -> None:
    for labels in (["Positive", "Negative"], ["Entity", "Human being", "Location"], ["+", "-", "0"], ["<a>", "[b]"]):
        vote = NoisyVote(labels)
        assert [vote.parse(label) for label in labels] == list(range(len(labels)))


def test_a_vote_shows_its_public_labels_and_its_type() -> None:
    vote = NoisyVote(["a", "b"])
    assert repr(vote) == "NoisyVote(['a', 'b'], scores=False)"
    assert vote.release_type is str
    assert NoisyVote(["a", "b"], scores=True).release_type == dict[str, int]
    assert vote.labels == ("a", "b")


# -- counting ----------------------------------------------------------------------------------------------------------


class FixedNoise:
    """Hands out this noise, and remembers what was asked for."""

    def __init__(self, noise: Sequence[int], tie: int = 0) -> None:
        self.noise, self.tie = noise, tie
        self.asked: list[tuple[float, int]] = []

    def discrete_gaussian(self, sigma: float, size: int) -> np.ndarray:
        self.asked.append((sigma, size))
        assert size == len(self.noise)
        return np.array(self.noise, np.int64)

    def integers(self, high: int, size: int) -> np.ndarray:
        return np.array([self.tie % high] * size, np.int64)


def outputs_with(counts: Sequence[int], labels: Sequence[str]) -> list[object]:
    """Members' encoded outputs with these votes, abstentions last."""
    kinds: list[object] = [*range(len(labels)), ABSTAIN]
    return [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]


LABELS = ["a", "b", "c"]


@pytest.mark.parametrize("counts", [(3, 0, 0, 0), (0, 0, 0, 4), (1, 1, 1, 1)])
def test_noise_lands_on_every_label_also_on_those_without_votes(counts: tuple[int, ...]) -> None:
    """Mistake 9 of the design: noise only where there are votes shows who got none."""
    noise = FixedNoise([0, 9, 5, 0])
    assert NoisyVote(LABELS).aggregate(outputs_with(counts, LABELS), 1.5, noise) == "b"  # type: ignore[arg-type]
    assert noise.asked == [(1.5, 4)], "one number per label and one for abstentions, at the plan's sigma"


def test_scores_are_the_noisy_counts_of_every_label() -> None:
    noise = FixedNoise([-2, 1, -1, 0])
    vote = NoisyVote(LABELS, scores=True)
    assert vote.aggregate(outputs_with((3, 1, 0, 0), LABELS), 1.0, noise) == {"a": 1, "b": 2, "c": -1}  # type: ignore


@pytest.mark.parametrize("tie", [0, 1, 2])
def test_a_tie_is_broken_at_random_among_the_tied_alone(tie: int) -> None:
    noise = FixedNoise([0, 0, -5, 0], tie)
    assert NoisyVote(LABELS).aggregate(outputs_with((2, 2, 2, 0), LABELS), 1.0, noise) == LABELS[tie % 2]  # type: ignore


def test_a_tie_between_labels_is_even(seeded: Callable[[int], Any]) -> None:
    """Binomial test, false-alarm probability 1e-7. Tried with the first of the tied: p = 0."""
    vote, randomness = NoisyVote(["a", "b"]), seeded(11)
    wins = sum(vote.aggregate([0, 1], 0.05, randomness) == "a" for _ in range(2000))
    assert stats.binomtest(wins, 2000, 0.5).pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    ("counts", "noise", "released"),
    [
        ((0, 0, 0, 10), (0, 0, 0, 0), None),
        ((4, 0, 0, 6), (0, 0, 0, 4), None),  # 10, which is more than half of the members by 6
        ((4, 0, 0, 6), (0, 0, 0, 3), "a"),  # 9
        ((4, 0, 0, 6), (6, 0, 0, 4), "a"),  # abstentions must win
        ((0, 0, 0, 10), (0, 0, 0, -1), "a"),
    ],
)
def test_abstention_is_released_only_where_its_noisy_count_wins(
    counts: tuple[int, ...], noise: tuple[int, ...], released: str | None
) -> None:
    outputs = outputs_with(counts, LABELS)
    assert NoisyVote(LABELS).aggregate(outputs, 1.0, FixedNoise(noise)) == released  # type: ignore[arg-type]


@pytest.mark.parametrize("sigma", [0.1, 1.0, 9.6])
def test_abstention_is_reported_from_the_threshold_on(sigma: float) -> None:
    """`test_abstaining.py` has the rate at which noise alone reaches it."""
    vote, outputs = NoisyVote(LABELS), outputs_with((0, 0, 0, 10), LABELS)
    reach = abstention_threshold(10, sigma) - 10
    assert vote.aggregate(outputs, sigma, FixedNoise((-99, -99, -99, reach))) is None  # type: ignore[arg-type]
    assert vote.aggregate(outputs, sigma, FixedNoise((-99, -99, -99, reach - 1))) is not None  # type: ignore[arg-type]
    assert vote.tells(10, sigma) is (sigma < 1)


def test_what_is_no_label_of_the_list_counts_as_an_abstention() -> None:
    vote = NoisyVote(LABELS)
    others: list[object] = [ABSTAIN, 3, -1, True, 1.0, "a", np.int64(1), b"a", None, ["a"]]
    assert vote.counts([0, 2, 2, *others]).tolist() == [1, 0, 2, len(others)]


def test_what_is_left_of_the_private_side_is_nothing(seeded: Callable[[int], Any], canary: str) -> None:
    vote = NoisyVote(LABELS)
    before = dict(vars(vote))
    vote.aggregate([vote.encode(f"a {canary}"), ABSTAIN], 1.0, seeded(1))
    assert vars(vote) == before


# -- the distribution of a release -------------------------------------------------------------------------------------


def gaussian_weights(sigma: float, reach: int) -> np.ndarray:
    """Discrete Gaussian probabilities on -reach..reach."""
    x = np.arange(-reach, reach + 1)
    weights = np.exp(-(x**2) / (2 * sigma**2))
    return weights / weights.sum()


@functools.cache
def release_law(counts: tuple[int, ...], sigma: float, members: int, reach: int) -> dict[str | None, float]:
    """The exact law of the winner (truncated at `reach` sigmas' worth of noise), by enumeration of noise vectors."""
    weights = gaussian_weights(sigma, reach)
    noise = np.arange(-reach, reach + 1)
    law: dict[str | None, float] = Counter()
    *label_counts, abstentions = counts
    for draw in itertools.product(range(len(noise)), repeat=len(label_counts)):
        noisy = [count + int(noise[i]) for count, i in zip(label_counts, draw, strict=True)]
        probability = math.prod(weights[i] for i in draw)
        best = max(noisy)
        silent = (abstentions + noise > best) & (abstentions + noise >= abstention_threshold(members, sigma))
        none = float(weights[silent].sum())
        law[None] += probability * none
        winners = [i for i, count in enumerate(noisy) if count == best]
        for i in winners:
            law[LABELS[i]] += probability * (1 - none) / len(winners)
    return law


@pytest.mark.parametrize("counts", [(2, 1, 0, 0), (0, 0, 0, 13), (1, 1, 1, 0), (2, 0, 0, 2)])
@pytest.mark.parametrize("source", ["injected", "secure"])
def test_the_release_has_the_mechanisms_exact_distribution(
    counts: tuple[int, ...], source: str, seeded: Callable[[int], Any]
) -> None:
    """Chi-square against enumerated probabilities at sigma 1, false-alarm probability 1e-7. Truncation at 6 sigma
    moves them by less than 1e-7. Tried with noise of sigma 1.15, and without noise where there are no votes: fails."""
    from langchain_dpicl.privacy import SecureRandomness

    randomness = seeded(12) if source == "injected" else SecureRandomness()
    rounds = 40_000 if source == "injected" else 4000
    vote, outputs = NoisyVote(LABELS), outputs_with(counts, LABELS)
    law = release_law(counts, 1.0, len(outputs), 6)
    assert abs(sum(law.values()) - 1) < 1e-9
    seen = Counter(vote.aggregate(outputs, 1.0, randomness) for _ in range(rounds))
    kinds = [kind for kind, probability in law.items() if probability * rounds > 5]
    expected = np.array([law[kind] * rounds for kind in kinds])
    observed = np.array([seen[kind] for kind in kinds], float)
    rest_expected, rest_observed = rounds - expected.sum(), rounds - observed.sum()
    if rest_expected > 5:
        expected, observed = np.append(expected, rest_expected), np.append(observed, rest_observed)
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(statistic, max(len(expected) - 1, 1)) > FALSE_ALARM


def test_scores_have_the_noises_distribution_around_the_counts(seeded: Callable[[int], Any]) -> None:
    """Chi-square of one label's noise at sigma 2, false-alarm probability 1e-7. Tried with sigma 2.1: p < 1e-12."""
    vote, randomness = NoisyVote(LABELS, scores=True), seeded(13)
    outputs = outputs_with((40, 0, 0, 0), LABELS)  # so many that abstention wins with a probability below 1e-12
    draws = [vote.aggregate(outputs, 2.0, randomness) for _ in range(20_000)]
    for label, count in zip(LABELS, (40, 0, 0), strict=True):
        noise = np.array([draw[label] - count for draw in draws])  # type: ignore[index, call-overload]
        expected = gaussian_weights(2.0, 24)[24 - 6 : 24 + 7] * len(draws)
        seen = np.bincount(np.clip(noise, -6, 6) + 6, minlength=13)
        expected[0] = expected[-1] = (len(draws) - expected[1:-1].sum()) / 2
        assert stats.chisquare(seen, expected).pvalue > FALSE_ALARM / 3


# -- privacy: the profile that accounts for it -------------------------------------------------------------------------

DOMAIN: list[object] = [0, 1, 2, ABSTAIN, "unreadable"]


def neighbours(members: int) -> list[tuple[tuple[object, ...], tuple[object, ...]]]:
    """Every pair of output vectors that differ in one member's output."""
    pairs = []
    for outputs in itertools.product(DOMAIN, repeat=members):
        for i in range(members):
            pairs += [(outputs, (*outputs[:i], other, *outputs[i + 1 :])) for other in DOMAIN if other != outputs[i]]
    return pairs


def test_replacing_one_output_moves_the_counts_by_at_most_sqrt_two() -> None:
    vote = NoisyVote(LABELS)
    moves = {tuple(sorted((vote.counts(one) - vote.counts(other)).tolist())) for one, other in neighbours(3)}
    assert moves == {(0, 0, 0, 0), (-1, 0, 0, 1)}
    assert max(math.dist(move, (0, 0, 0, 0)) for move in moves) <= math.sqrt(2)


def worst_deltas(sigma: float, epsilons: Sequence[float], members: int, reach: int) -> dict[float, float]:
    """The largest delta over every neighbouring pair of count vectors of the noisy counts, all coordinates seen."""
    vote = NoisyVote(["a", "b"])
    domain: list[object] = [0, 1, ABSTAIN]
    noise = np.arange(-reach, reach + 1)
    law = gaussian_weights(sigma, reach)
    positions = np.arange(-reach, members + reach + 1)

    def joint(counts: Sequence[int]) -> np.ndarray:
        tables = []
        for count in counts:
            table = np.zeros(len(positions))
            table[noise + count + reach] = law
            tables.append(table)
        return np.einsum("i,j,k->ijk", *tables)

    seen = {}
    worst = dict.fromkeys(epsilons, 0.0)
    for outputs in itertools.product(domain, repeat=members):
        for i, other in itertools.product(range(members), domain):
            pair = tuple(vote.counts(v).tolist() for v in (outputs, (*outputs[:i], other, *outputs[i + 1 :])))
            if str(pair) in seen or pair[0] == pair[1]:
                continue
            seen[str(pair)] = True
            p, q = joint(pair[0]), joint(pair[1])
            for epsilon in epsilons:
                worst[epsilon] = max(worst[epsilon], float(np.maximum(p - math.exp(epsilon) * q, 0).sum()))
    return worst


def winner_deltas(sigma: float, epsilons: Sequence[float], members: int, reach: int) -> dict[float, float]:
    """The largest delta of the winner (or abstention), over every pair of neighbouring counts of three labels."""
    vote = NoisyVote(LABELS)
    laws: dict[tuple[int, ...], dict[str | None, float]] = {}
    worst = dict.fromkeys(epsilons, 0.0)
    for one, other in neighbours(members):
        pair = []
        for outputs in (one, other):
            counts = tuple(vote.counts(outputs).tolist())
            if counts not in laws:
                laws[counts] = release_law(counts, sigma, members, reach)
            pair.append(laws[counts])
        p, q = pair
        for epsilon in epsilons:
            kinds = {*p, *q}
            delta = sum(max(0.0, p.get(kind, 0.0) - math.exp(epsilon) * q.get(kind, 0.0)) for kind in kinds)
            worst[epsilon] = max(worst[epsilon], delta)
    return worst


EPSILONS = [0.0, 0.25, 0.5, 1.0, 2.0]


def test_the_exact_noisy_counts_keep_the_profile_and_reach_it() -> None:
    """Brute force over every neighbouring pair: delta(eps) never above the profile of `MECHANISMS["vote"]`, and equal
    to it, so the profile is neither wrong nor wasteful. Truncation at 12 sigma moves a delta by less than 1e-12."""
    sigma = 1.3
    profile = MECHANISMS["vote"]().profile(sigma)
    worst = worst_deltas(sigma, EPSILONS, members=2, reach=16)
    for epsilon in EPSILONS:
        allowed = float(profile.delta(epsilon))
        assert worst[epsilon] <= allowed + 1e-9
        assert worst[epsilon] >= 0.999 * allowed


def test_the_exact_winner_keeps_the_profile() -> None:
    sigma = 1.1
    profile = MECHANISMS["vote"]().profile(sigma)
    worst = winner_deltas(sigma, EPSILONS, members=2, reach=7)
    for epsilon in EPSILONS:
        assert worst[epsilon] <= float(profile.delta(epsilon)) + 1e-6


def test_noise_for_sensitivity_one_would_break_the_profile() -> None:
    """The mutant: a sigma calibrated for one count that moves by 1, where two counts move. The check must see it."""
    sigma = 1.3
    profile = MECHANISMS["vote"]().profile(sigma)
    worst = worst_deltas(sigma / math.sqrt(2), EPSILONS, members=2, reach=12)
    assert all(worst[epsilon] > 1.1 * float(profile.delta(epsilon)) for epsilon in EPSILONS)


def test_noise_on_voted_labels_only_would_break_any_profile() -> None:
    """The mutant of mistake 9: a label without votes stays at exactly 0, so a count of 1 is told from 0 for certain."""
    sigma, reach = 1.3, 12
    law = gaussian_weights(sigma, reach)
    with_vote = dict(zip(range(1 - reach, 2 + reach), law, strict=True))
    without = {0: 1.0}
    delta = sum(max(0.0, p - math.exp(2.0) * without.get(x, 0.0)) for x, p in with_vote.items())
    assert delta > 10 * float(MECHANISMS["vote"]().profile(sigma).delta(2.0))


def test_a_vote_is_accounted_as_the_mechanism_that_it_is() -> None:
    assert NoisyVote.mechanism in MECHANISMS
    assert "every label" in MECHANISMS[NoisyVote(LABELS).mechanism].words
