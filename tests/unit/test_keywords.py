"""`aggregators/keywords.py`: which words may be released, and that releases have exactly the law accounted for."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from langchain_core.load import dumps
from langchain_core.messages import AIMessage
from scipy import stats
from ways import shown

from langchain_dpicl import InvalidParameter, Keywords, ReleasedKeywords, Words
from langchain_dpicl.aggregators import keywords as module
from langchain_dpicl.privacy import MECHANISMS, Line, LineRequest, PLDAccountant, PrivacyPlan, SecureRandomness
from langchain_dpicl.privacy.profile import BoundedRange, Gaussian
from langchain_dpicl.private.boundary import ABSTAIN

FALSE_ALARM = 1e-8  # of every statistical test below; there are fewer than ten
EACH = Words(stop_words=None, pattern=r"\w+")

Law = dict[frozenset[str] | None, float]
"""The probability of every release of PTR; None is the fallback."""


def prepared(aggregator: Keywords, options: Mapping[str, float] | None = None, **query: Any) -> Keywords:
    return aggregator.prepare(query or {"input": "a question"}, options or {})


def read(aggregator: Keywords, *texts: object) -> list[object]:
    """Every member's output as the aggregator reads it; None abstains."""
    return [ABSTAIN if text is None else aggregator.encode(text) for text in texts]


# -- joint EM: what may be released ------------------------------------------------------------------------------------

DOMAIN = ["cough", "fever", "rash", "ache"]


def releases(aggregator: Keywords, outputs: Sequence[object], eps0: float, randomness: Any, runs: int) -> Counter[Any]:
    return Counter(tuple(aggregator.aggregate(outputs, eps0, randomness)) for _ in range(runs))


@pytest.mark.parametrize(
    "outputs", [["gout gout"] * 9, ["gout cough"] * 9, [None] * 9, ["gout"] * 8 + ["rash"]], ids=str
)
def test_what_may_be_released_does_not_depend_on_the_answers(outputs: list[Any], seeded: Callable[[int], Any]) -> None:
    """Mistake 8 of the design, a domain from the answers; and mistake 10, a release cut down to words that were said.
    At almost no eps0 each of the 12 releases has a chance of 1/12 in each of 600 draws: one of them stays away with a
    probability below 1e-20."""
    aggregator = prepared(Keywords.joint_em(DOMAIN, 2))
    seen = releases(aggregator, read(aggregator, *outputs), 1e-6, seeded(1), 600)
    assert set(seen) == set(itertools.permutations(DOMAIN, 2))


def test_a_word_that_all_answers_share_stays_private_where_the_query_lacks_it(seeded: Callable[[int], Any]) -> None:
    aggregator = prepared(Keywords.joint_em("query", 5), input="Cough and a rash", more="since monday", other=["gout"])
    outputs = read(aggregator, *["gout gout rash"] * 20)
    seen = releases(aggregator, outputs, 50.0, seeded(2), 50)
    assert {word for words in seen for word in words} == {"cough", "rash", "monday"}
    assert all(words[0] == "rash" and len(words) == 3 for words in seen), "all the query's words, ranked"


def test_a_listed_entry_of_several_words_counts_as_these_words() -> None:
    aggregator = Keywords.joint_em(["Cough syrup", "fever", "cough"], 3)
    assert aggregator._spelling == ("cough", "syrup", "fever")
    with pytest.raises(InvalidParameter, match="3"):
        Keywords.joint_em(["Cough syrup", "fever", "cough"], 4)


def test_a_listed_word_is_released_in_its_own_spelling(seeded: Callable[[int], Any]) -> None:
    aggregator = prepared(Keywords.joint_em(["coughing", "fevers"], 2, words=Words(stem="english")))
    outputs = read(aggregator, "fever", "a fever", "feverish", "cough")
    assert list(aggregator.aggregate(outputs, 100.0, seeded(3))) == ["fevers", "coughing"]


@pytest.mark.parametrize("repeats", [1, 7])
def test_a_word_counts_once_per_member(repeats: int) -> None:
    listed, open_ended = prepared(Keywords.joint_em(DOMAIN, 1)), prepared(Keywords.ptr(1), {"delta0": 1e-6})
    text = "Cough, cough! fever " * repeats
    assert np.asarray(listed.encode(text)).tolist() in ([0, 1], [1, 0])
    assert open_ended.encode(text) == {"cough", "fever"}


@pytest.mark.parametrize(
    "output", ["", "the of", None, 5, b"cough", ["cough"], {"a": "cough"}, AIMessage("")], ids=shown
)
async def test_an_answer_without_words_adds_nothing(output: object) -> None:
    for aggregator in (prepared(Keywords.joint_em(DOMAIN, 1)), prepared(Keywords.ptr(1), {"delta0": 1e-6})):
        assert not len(aggregator.encode(output))  # type: ignore[arg-type]
        assert not len(await aggregator.aencode(output))  # type: ignore[arg-type]
    assert len(aggregator.encode(AIMessage([{"type": "text", "text": "cough"}]))) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "query", [{"input": "the of a"}, {"input": ""}, {"input": 5}, {"input": ["cough"]}, {"x": None}]
)
def test_a_query_without_words_is_refused_and_not_shown(query: dict[str, Any], canary_free: Any) -> None:
    with pytest.raises(InvalidParameter, match="stop word") as caught:
        prepared(Keywords.joint_em("query", 3), **query)
    assert (caught.value.parameter, caught.value.value) == ("input", sorted(query))
    canary_free(caught.value, secret="cough")


def test_requests_do_not_share_their_domain() -> None:
    shared = Keywords.joint_em("query", 2)
    one, other = prepared(shared, input="cough"), prepared(shared, input="fever rash ache")
    assert (one._spelling, one.k, other._spelling, other.k) == (("cough",), 1, ("fever", "rash", "ache"), 2)
    assert (shared._spelling, shared.k) == ((), 2)


# -- joint EM: sensitivity 2, mistake 4 --------------------------------------------------------------------------------


def test_the_plans_eps0_reaches_the_sampler_as_it_is(monkeypatch: pytest.MonkeyPatch, seeded: Any) -> None:
    asked: list[tuple[list[int], int, float]] = []

    def sampler(counts: np.ndarray, k: int, eps0: float, randomness: Any) -> np.ndarray:
        asked.append((counts.tolist(), k, eps0))
        return np.array([2, 0])

    monkeypatch.setattr(module, "sample_sequence", sampler)
    aggregator = prepared(Keywords.joint_em(DOMAIN, 2))
    outputs = read(aggregator, "cough rash", "rash", None, "rash gout", "")
    released = aggregator.aggregate(outputs, 1.25, seeded(1))
    assert asked == [([1, 0, 3, 0], 2, 1.25)], "one count for every word of the domain, those that nobody said too"
    assert list(released) == ["rash", "cough"], "what the sampler drew, in its order: nothing is cut or sorted after"


@pytest.mark.parametrize(("k", "divisor"), [(2, 4), (1, 2)])
def test_a_ranking_has_the_law_of_sensitivity_two(k: int, divisor: int, seeded: Callable[[int], Any]) -> None:
    """Binomial, false-alarm probability 1e-8. With half of the divisor the p-value is below 1e-40. A single word has
    twice the weight, as differences of its utility do not move twice."""
    words = DOMAIN[:2]
    aggregator = prepared(Keywords.joint_em(words, k))
    eps0, runs = 1.2, 4000
    outputs = read(aggregator, words[0], words[0], "", "")
    wins = releases(aggregator, outputs, eps0, seeded(4), runs)[tuple(words[:k])]
    assert stats.binomtest(wins, runs, 1 / (1 + math.exp(-eps0 * 2 / divisor))).pvalue > FALSE_ALARM
    assert stats.binomtest(wins, runs, 1 / (1 + math.exp(-eps0 * 4 / divisor))).pvalue < 1e-40


# -- PTR: its whole law ------------------------------------------------------------------------------------------------


class OneUniform:
    """Hands out one chosen uniform number, once; any other draw is a draw that the law does not know."""

    def __init__(self, value: float) -> None:
        self.left = [value]

    def uniforms(self, size: int) -> np.ndarray:
        assert size == 1
        return np.array([self.left.pop()])


def pass_probability(release: Callable[[float], ReleasedKeywords]) -> tuple[float, ReleasedKeywords | None]:
    """The measure of the uniform numbers that pass the test, from its one threshold, found to the last bit."""
    low, high = 5e-324, 1 - 2**-53
    passed_low, passed_high = (not release(u).fallback for u in (low, high))
    if passed_low == passed_high:
        return (1.0, release(high)) if passed_low else (0.0, None)
    a, b = (int(np.float64(u).view(np.int64)) for u in (low, high))
    while b - a > 1:
        middle = (a + b) // 2
        if release(float(np.int64(middle).view(np.float64))).fallback != passed_low:
            a = middle
        else:
            b = middle
    edge = float(np.int64(b).view(np.float64))
    return (edge, release(low)) if passed_low else (1.0 - edge, release(high))


def exact_law(aggregator: Keywords, outputs: Sequence[object], sigma: float) -> tuple[Law, list[tuple[float, float]]]:
    """The law of the code itself, by walking both choices that it makes; and for every k its chance, and its test's.

    `test_sampling.py` shows that `choose_exponential` has the law of its docstring.
    """
    law: dict[frozenset[str] | None, float] = defaultdict(float)
    steps: list[tuple[float, float]] = []
    weights = [1.0]

    def forced(multiplicities: Sequence[int], losses: Sequence[int], rate: float, randomness: object) -> int:
        found = np.array(multiplicities) * np.exp(-rate * np.array(losses, float))
        weights[:] = (found / found.sum()).tolist()
        return branch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "choose_exponential", forced)
        branch = 0
        while branch < len(weights):
            released, words = pass_probability(lambda u: aggregator.aggregate(outputs, sigma, OneUniform(u)))
            steps.append((weights[branch], released))
            law[None] += weights[branch] * (1 - released)
            if words is not None:
                law[frozenset(words)] += weights[branch] * released
            branch += 1
    return dict(law), steps


def passes_with(gap: float, sigma: float, delta0: float) -> float:
    """The docstring's: P(max(2, d_k) + N(0, 4 sigma^2) - Phi^-1(1 - delta0; 0, 2 sigma) > 2)."""
    return float(stats.norm.sf(2 - max(2, gap) + stats.norm.isf(delta0, scale=2 * sigma), scale=2 * sigma))


def outputs_of(heights: Mapping[str, int], members: int) -> list[object]:
    """Members' words with these counts."""
    return [frozenset(word for word, height in heights.items() if i < height) for i in range(members)]


def ptr(k: int | tuple[int, int], delta0: float, select: float | None = None) -> Keywords:
    return prepared(Keywords.ptr(k, select=select, words=EACH), {"delta0": delta0})


@pytest.mark.parametrize("sigma", [0.05, 0.4, 1.7, 40.0])
@pytest.mark.parametrize("delta0", [1e-300, 1e-9, 0.01, 0.5])
@pytest.mark.parametrize("heights", [[20, 19, 15, 4, 1], [9, 9, 9, 9, 9], [20], [], [20, 20, 20], [3, 1], [7, 5, 2]])
def test_the_whole_law_of_ptr_is_the_docstrings(heights: list[int], delta0: float, sigma: float) -> None:
    """The choice of k and the test's outcome. A gap tested at k + 1 while k is released (mistake 3) differs."""
    select, least, most = 0.8, 1, 3
    counts = dict(zip("abcde", heights, strict=False))
    _, steps = exact_law(ptr((least, most), delta0, select), outputs_of(counts, 20), sigma)
    ranked = [*heights, *[0] * 6]
    gaps = [ranked[k - 1] - ranked[k] for k in range(least, most + 1)]
    chances = np.exp(select / sigma * (np.array(gaps) - max(gaps)) / 4)
    for (chance, released), gap, expected in zip(steps, gaps, chances / chances.sum(), strict=True):
        assert chance == pytest.approx(expected, rel=1e-9, abs=1e-300)
        assert released == pytest.approx(passes_with(gap, sigma, delta0), rel=1e-9)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_gap_is_tested_at_the_k_that_is_released(k: int) -> None:
    """Mistake 3 of the design. One gap is wide, all others are 0: the set passes at that k, and nowhere else."""
    for wide in (1, 2, 3, 4):
        heights = {word: 30 if i < wide else 0 for i, word in enumerate("abcde")}
        law, ((_, released),) = exact_law(ptr(k, 1e-6), outputs_of(heights, 30), 0.5)
        assert released == pytest.approx(1.0 if k == wide else 1e-6, rel=1e-9)
        assert k != wide or set(law) == {frozenset("abcd"[:k]), None}


def test_a_failing_test_releases_with_delta0_and_never_with_more() -> None:
    """Wherever a neighbour's set may be another: gaps of 0, 1 and 2."""
    for gap, delta0, sigma in itertools.product((0, 1, 2), (1e-12, 1e-3, 0.5), (0.05, 3.0)):
        law, _ = exact_law(ptr(1, delta0), outputs_of({"a": 9, "b": 9 - gap}, 9), sigma)
        released = 1 - law[None] if delta0 > 0.1 else law.get(frozenset("a"), 0.0) + law.get(frozenset("b"), 0.0)
        assert delta0 * (1 - 1e-9) <= released <= delta0 * (1 + 1e-12)


def hockey_stick(p: Law, q: Law, epsilon: float) -> float:
    return sum(max(0.0, chance - math.exp(epsilon) * q.get(kind, 0.0)) for kind, chance in p.items())


def formula_law(heights: Mapping[str, int], sigma: float, delta0: float, select: float, shift: int = 0) -> Law:
    """The docstring's law for k in (1, 2); with ``shift`` another k's gap is tested."""
    ranked = sorted(heights, key=lambda word: -heights[word])
    sizes = [heights[word] for word in ranked] + [0] * 4
    gaps = [sizes[k - 1] - sizes[k] for k in (1, 2)]
    chances = np.exp(select / sigma * (np.array(gaps) - max(gaps)) / 4)
    law: dict[frozenset[str] | None, float] = defaultdict(float)
    for k, chance in zip((1, 2), chances / chances.sum(), strict=True):
        released = passes_with(sizes[k - 1 + shift] - sizes[k + shift], sigma, delta0)
        law[frozenset(word for word in ranked[:k] if heights[word])] += float(chance) * released
        law[None] += float(chance) * (1 - released)
    return dict(law)


EPSILONS = (0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 9.0, 12.0)


def worst_deltas(laws: Mapping[tuple[int, ...], Law]) -> dict[float, float]:
    """The largest delta(eps) over all ordered pairs of count vectors that one member's output apart."""
    worst = dict.fromkeys(EPSILONS, 0.0)
    for counts, law in laws.items():
        for move in itertools.product((-1, 0, 1), repeat=len(counts)):
            other = laws.get(tuple(count + step for count, step in zip(counts, move, strict=True)))
            for epsilon in EPSILONS if other is not None else ():
                worst[epsilon] = max(worst[epsilon], hockey_stick(law, other or {}, epsilon))
    return worst


MEMBERS, WORDS = 5, "abc"
SMALL = list(itertools.product(range(MEMBERS + 1), repeat=len(WORDS)))
PARAMETERS = [(0.4, 0.01, 0.4), (1.0, 0.03, 2.0)]


def formula_laws(sigma: float, delta0: float, select: float, shift: int) -> dict[tuple[int, ...], Law]:
    return {c: formula_law(dict(zip(WORDS, c, strict=True)), sigma, delta0, select, shift) for c in SMALL}


@pytest.mark.parametrize(("sigma", "delta0", "select"), PARAMETERS)
def test_the_exact_law_keeps_the_profile_for_all_small_neighbours(sigma: float, delta0: float, select: float) -> None:
    """Brute force over every count of three words by five members and every neighbour, both directions; the code's own
    law, with the choice between k = 1 and 2. Tried without delta0, and with the gap at k + 1: far above."""
    aggregator = ptr((1, 2), delta0, select)
    laws = {
        counts: exact_law(aggregator, outputs_of(dict(zip(WORDS, counts, strict=True)), MEMBERS), sigma)[0]
        for counts in SMALL
    }
    profile = MECHANISMS["ptr"].of({"delta0": delta0, "select": select}).profile(sigma)
    for epsilon, delta in worst_deltas(laws).items():
        assert delta <= float(profile.delta(epsilon)) + 1e-9, f"at {epsilon}"


@pytest.mark.parametrize(("sigma", "delta0", "select"), PARAMETERS)
def test_the_brute_force_sees_a_gap_tested_at_another_k(sigma: float, delta0: float, select: float) -> None:
    """Mistake 3: with the gap at k + 1 the same check fails; with the right gap the formula passes it."""
    profile = MECHANISMS["ptr"].of({"delta0": delta0, "select": select}).profile(sigma)
    right = worst_deltas(formula_laws(sigma, delta0, select, 0))
    wrong = worst_deltas(formula_laws(sigma, delta0, select, 1))
    assert all(right[epsilon] <= float(profile.delta(epsilon)) + 1e-9 for epsilon in EPSILONS)
    assert wrong[9.0] > 5 * float(profile.delta(9.0))


@pytest.mark.parametrize(("sigma", "delta0", "select"), PARAMETERS)
def test_the_brute_force_sees_a_profile_without_delta0(sigma: float, delta0: float, select: float) -> None:
    """Mistake 2: a release whose delta0 somebody else is believed to have paid."""
    unpaid = Gaussian(sigma).compose(BoundedRange(select / sigma))
    right = worst_deltas(formula_laws(sigma, delta0, select, 0))
    assert right[12.0] > 2 * float(unpaid.delta(12.0))


@pytest.mark.parametrize("count", [1, 2, 10, 400])
def test_delta0_is_paid_at_every_release(count: int) -> None:
    """Mistake 2 of the design. Two equal counts and a neighbour that prefers the other word: each of n releases
    shows the difference outright with probability delta0, so at any epsilon delta is at least 1 - (1 - delta0)^n."""
    sigma, delta0 = 4.0, 1e-4
    one, _ = exact_law(ptr(1, delta0), outputs_of({"a": 6, "b": 5}, 6), sigma)
    other, _ = exact_law(ptr(1, delta0), outputs_of({"a": 5, "b": 6}, 6), sigma)
    seen = hockey_stick(one, other, 60.0)
    assert seen == pytest.approx(delta0, rel=1e-9), "the two releases have nothing in common but silence"
    profile = MECHANISMS["ptr"].of({"delta0": delta0}).profile(sigma)
    accounted = PLDAccountant().delta([Line(profile, 1.0, count)], 60.0)
    exact = 1 - (1 - seen) ** count
    assert exact * (1 - 1e-9) <= accounted <= exact * 1.01
    assert count == 1 or accounted > 1.9 * delta0


def test_a_delta0_that_all_releases_together_cannot_afford_is_refused() -> None:
    """Ten releases at a third of delta each; one alone would be fine."""
    for count, fine in ((1, True), (10, False)):
        lines = {"ptr": LineRequest("ptr", 1.0, count, options={"delta0": 1e-5 / 3})}
        if fine:
            PrivacyPlan.solve(epsilon=8.0, delta=1e-5, lines=lines)
        else:
            with pytest.raises(Exception, match="ptr"):
                PrivacyPlan.solve(epsilon=8.0, delta=1e-5, lines=lines)


def test_releases_come_with_their_exact_probabilities(seeded: Callable[[int], Any]) -> None:
    """Chi-square of whole releases against the law, real choices included, false-alarm probability 1e-8."""
    heights, sigma, delta0, runs = {"a": 9, "b": 6, "c": 1}, 0.9, 0.05, 6000
    aggregator, outputs = ptr((1, 2), delta0, 1.5), outputs_of(heights, 9)
    law, _ = exact_law(aggregator, outputs, sigma)
    for randomness, rounds in ((seeded(5), runs), (SecureRandomness(), runs // 4)):
        seen: Counter[Any] = Counter()
        for _ in range(rounds):
            released = aggregator.aggregate(outputs, sigma, randomness)
            seen[None if released.fallback else frozenset(released)] += 1
        assert set(seen) <= set(law)
        assert stats.chisquare([seen[kind] for kind in law], [law[kind] * rounds for kind in law]).pvalue > FALSE_ALARM


def test_every_answer_failing_falls_back_but_for_delta0(seeded: Callable[[int], Any]) -> None:
    law, _ = exact_law(ptr((2, 4), 1e-6), [ABSTAIN, frozenset(), ABSTAIN], 0.5)
    assert law == {None: pytest.approx(1 - 1e-6), frozenset(): pytest.approx(1e-6)}
    aggregator = ptr((2, 4), 1e-6)
    released = aggregator.aggregate([ABSTAIN] * 3, 0.5, seeded(1))
    assert (list(released), released.fallback) == ([], True)
    assert aggregator.outcome(released) == "zero-shot fallback"


def test_a_set_is_released_in_alphabetical_order_whatever_was_said_first() -> None:
    aggregator = ptr(3, 1e-6)
    for order in itertools.permutations("zma"):
        outputs = [frozenset(order)] * 30 + [frozenset(order[:1])] * 9
        released = aggregator.aggregate(outputs, 0.3, OneUniform(1 - 2**-53))  # type: ignore[arg-type]
        assert (list(released), released.ranked, released.fallback) == (["a", "m", "z"], False, False)
        assert aggregator.outcome(released) == "released"


def test_words_of_no_fixed_list_are_released_where_many_share_them() -> None:
    aggregator = prepared(Keywords.ptr(1, words=Words(stem="english")), {"delta0": 1e-6})
    outputs = read(aggregator, *["Nobody listed bronchitis", "bronchitis, surely", "It is BRONCHITIS"] * 10)
    released = aggregator.aggregate(outputs, 0.3, OneUniform(1 - 2**-53))  # type: ignore[arg-type]
    assert list(released) == [Words(stem="english").key("bronchitis")]


def test_ptr_without_the_plans_delta0_does_not_run(seeded: Callable[[int], Any]) -> None:
    with pytest.raises(InvalidParameter, match="delta0"):
        Keywords.ptr(1).aggregate([], 1.0, seeded(1))


# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "parameter", "says"),
    [
        (lambda: Keywords.joint_em(DOMAIN, 5), "k", "at most the number of words in the domain, 4"),
        (lambda: Keywords.joint_em([], 1), "k", "0"),
        (lambda: Keywords.joint_em(["fever", "of"], 1, words=Words()), "domain[1]", "a word"),
        (lambda: Keywords.joint_em(DOMAIN, 0), "k", ">= 1"),
        (lambda: Keywords.joint_em(DOMAIN, 2.0), "k", "whole"),  # type: ignore[arg-type]
        (lambda: Keywords.joint_em(DOMAIN, True), "k", "whole"),
        (lambda: Keywords.joint_em("cough"), "domain", "query"),
        (lambda: Keywords.joint_em(None), "domain", "query"),  # type: ignore[arg-type]
        (lambda: Keywords.joint_em(set(DOMAIN)), "domain", "query"),  # type: ignore[arg-type]
        (lambda: Keywords.joint_em(["cough", 5]), "domain", "strings"),  # type: ignore[list-item]
        (lambda: Keywords.joint_em(DOMAIN, 2, words="english"), "words", "Words"),  # type: ignore[arg-type]
        (lambda: Keywords.ptr(0), "k", ">= 1"),
        (lambda: Keywords.ptr((0, 2)), "k", ">= 1"),
        (lambda: Keywords.ptr((3, 2)), "k", ">= 3"),
        (lambda: Keywords.ptr((1, 2, 3)), "k", "range"),  # type: ignore[arg-type]
        (lambda: Keywords.ptr("15"), "k", "whole"),  # type: ignore[arg-type]
        (lambda: Keywords.ptr((1.0, 2)), "k", "whole"),  # type: ignore[arg-type]
        (lambda: Keywords.ptr(3, delta0=0.0), "delta0", "1e-300"),
        (lambda: Keywords.ptr(3, delta0=0.6), "delta0", "0.5"),
        (lambda: Keywords.ptr(3, delta0=math.nan), "delta0", "finite"),
        (lambda: Keywords.ptr((1, 2), select=0.0), "select", "> 0"),
        (lambda: Keywords.ptr((1, 2), select=-1.0), "select", ">= 0"),
        (lambda: Keywords.ptr((1, 2), select=11.0), "select", "<= 10"),
        (lambda: Keywords.ptr((1, 2), words=str.split), "words", "Words"),  # type: ignore[arg-type]
    ],
)
def test_bad_parameters_are_named_with_their_bounds(make: Callable[[], Any], parameter: str, says: str) -> None:
    with pytest.raises(InvalidParameter, match=says) as caught:
        make()
    assert caught.value.parameter == parameter


def test_what_keywords_show_of_themselves() -> None:
    listed, query = Keywords.joint_em(DOMAIN, 2), Keywords.joint_em()
    one, between = Keywords.ptr(4, delta0=1e-6), Keywords.ptr((4, 9))
    assert [repr(k) for k in (listed, query, one, between)] == [
        "Keywords.joint_em(<4 words>, k=2)",
        "Keywords.joint_em('query', k=10)",
        "Keywords.ptr(k=4, select=0, delta0=1e-06)",
        "Keywords.ptr(k=(4, 9), select=1)",
    ]
    assert [dict(k.options) for k in (query, one, between)] == [{}, {"select": 0.0, "delta0": 1e-6}, {"select": 1.0}]
    assert {k.mechanism for k in (listed, one)} == {"joint-em", "ptr"} <= set(MECHANISMS)
    assert listed.release_type == between.release_type == list[str]
    assert [k.tells_abstention for k in (listed, one)] == [False, True]
    assert listed.public_calls() is None


# -- the release itself ------------------------------------------------------------------------------------------------


def copies(released: ReleasedKeywords) -> Iterable[ReleasedKeywords]:
    yield copy.copy(released)
    yield copy.deepcopy(released)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.loads(pickle.dumps(released, protocol))  # noqa: S301 - our own bytes


def test_released_keywords_are_a_list_that_survives_copying_and_json() -> None:
    released = ReleasedKeywords(["rash", "cough"], ranked=True, query={"input": "a question"})
    assert released == ["rash", "cough"]
    assert isinstance(released, list)
    for other in copies(released):
        assert type(other) is ReleasedKeywords
        assert (list(other), other.ranked, other.fallback, other.query) == (
            ["rash", "cough"],
            True,
            False,
            {"input": "a question"},
        )
    assert json.loads(json.dumps(released)) == ["rash", "cough"]
    assert json.loads(dumps(released)) == ["rash", "cough"]
    assert f"{released}" == "['rash', 'cough']"
    empty = ReleasedKeywords(fallback=True)
    assert (list(empty), empty.ranked, empty.query) == ([], False, {})


def test_a_release_keeps_the_request_as_it_was_given(seeded: Callable[[int], Any]) -> None:
    request = {"input": "cough fever", "n": 3}
    aggregator = Keywords.joint_em("query", 1).prepare(request, {})
    released = aggregator.aggregate(read(aggregator, "cough"), 50.0, seeded(1))
    request["input"] = "something else"
    released.append("more")
    assert released.query == {"input": "cough fever", "n": 3}
    assert aggregator.aggregate(read(aggregator, "cough"), 50.0, seeded(1)) == ["cough"]


def test_what_is_left_of_the_private_side_is_nothing(seeded: Callable[[int], Any], canary: str) -> None:
    for aggregator in (prepared(Keywords.joint_em(DOMAIN, 2)), ptr((1, 2), 1e-6)):
        before = dict(vars(aggregator))
        aggregator.aggregate(read(aggregator, canary, f"{canary} cough", None), 1.0, seeded(1))
        assert vars(aggregator) == before
