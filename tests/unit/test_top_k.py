"""`NoisyTopK`: its law, its range, its profile for both relations, its abstentions, and what it refuses, enumerated."""

from __future__ import annotations

import asyncio
import itertools
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from exact import EPSILONS, SLACK, Law, added, check_profile, hockey_stick, law, log_range, mixture, replaced
from langchain_core.runnables import RunnableLambda
from numpy.typing import NDArray

from langchain_dpicl import (
    DPAggregate,
    InvalidParameter,
    NoisyTopK,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)
from langchain_dpicl.aggregators import votes
from langchain_dpicl.privacy import MECHANISMS, LineRequest, PrivacyPlan, Profile, SecureRandomness
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.profile import DIRECTIONS, BoundedRange, BoundedRanges
from langchain_dpicl.privacy.votes import FALSE_RATE, VoteNoise
from langchain_dpicl.private.boundary import ABSTAIN

LABELS = ("a", "b", "c", "d")
EPS0 = 3.0
NOTHING = None
"""An output that is not there."""

Outputs = tuple[Any, ...]
RELATIONS = pytest.mark.parametrize("own_calls", [False, True], ids=["replaced", "added"])
SIZES = pytest.mark.parametrize(
    ("number", "k"), [(2, 1), (3, 1), (2, 2), (3, 2), (3, 3), (4, 3)], ids=lambda size: str(size)
)


def shown(release: list[str] | None) -> str:
    return "-" if release is None else "".join(release)


def law_of(aggregator: NoisyTopK, outputs: Outputs, own_calls: bool, eps0: float = EPS0) -> Law:
    """The exact law of the release of these outputs, by the code itself."""
    bound = aggregator.under("structured", Crowd(5, 3.0, own_calls))
    counted = [output for output in outputs if output is not NOTHING]
    return law(lambda randomness: shown(bound.aggregate(counted, eps0, randomness)))


@cache
def _kept(number: int, k: int, outputs: Outputs, own_calls: bool, eps0: float, kind: type[NoisyTopK]) -> Law:
    return law_of(kind(LABELS[:number], k), outputs, own_calls, eps0)


def pairs_of(
    number: int, k: int, own_calls: bool, eps0: float = EPS0, kind: type[NoisyTopK] = NoisyTopK
) -> list[tuple[Law, Law]]:
    """The laws of all neighbours of up to four outputs, in both directions; an output may name a label or none."""
    domain = (*range(number), ABSTAIN)
    found = list(added(domain, 4) if own_calls else replaced((*domain, NOTHING), 4 if number < 4 else 3))
    found += [(other, one) for one, other in found]

    def of(outputs: Outputs) -> Law:
        return _kept(number, k, tuple(sorted(outputs, key=repr)), own_calls, eps0, kind)

    return [(of(one), of(other)) for one, other in found]


def profile_of(number: int, k: int, own_calls: bool, eps0: float = EPS0) -> Profile:
    options = {**NoisyTopK(LABELS[:number], k).options, "own_calls": float(own_calls)}
    return MECHANISMS["structured"].of(options).profile(eps0)


# -- the law -----------------------------------------------------------------------------------------------------------


@RELATIONS
@pytest.mark.parametrize(("number", "k"), [(3, 1), (3, 2), (3, 3), (4, 2), (4, 3), (4, 4)])
@pytest.mark.parametrize("counts", [(0, 0, 0, 0, 0), (3, 1, 0, 2, 0), (0, 2, 2, 1, 9), (0, 0, 0, 0, 40)])
def test_the_release_has_the_law_in_closed_form(counts: tuple[int, ...], number: int, k: int, own_calls: bool) -> None:
    """Each label among those that are left, by exp(r c) for r = eps0 / (2 k), or eps0 / k if outputs are added."""
    draws = min(k, number - 1)
    r = EPS0 / draws / (1 if own_calls else 2)
    outputs = [i for i in range(number) for _ in range(counts[i])] + [ABSTAIN] * counts[4]
    found = law_of(NoisyTopK(LABELS[:number], k), tuple(outputs), own_calls)
    reached = 2 + math.ceil(math.log(1 / (number * FALSE_RATE)) / r)
    told = math.exp(r * (counts[4] - reached))
    weights = [math.exp(r * count) for count in counts[:number]]
    total = sum(weights) + told
    expected = {"-": told / total}
    for order in itertools.permutations(range(number), k):
        mass = weights[order[0]] / total
        for place in range(1, k):
            mass *= weights[order[place]] / sum(weights[i] for i in range(number) if i not in order[:place])
        expected["".join(LABELS[i] for i in order)] = mass
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("number", "k"), [(2, 1), (4, 2), (4, 3), (4, 4)])
def test_a_release_is_of_k_different_labels(number: int, k: int) -> None:
    """Also under so much noise that counts say nothing: a draw with replacement would repeat a label."""
    aggregator = NoisyTopK(LABELS[:number], k)
    for _ in range(50):
        release = aggregator.aggregate([0, 0, 0], 1e-3, SecureRandomness())
        assert release is not None
        assert len(set(release)) == len(release) == k
        assert set(release) <= set(LABELS[:number])


def test_counts_decide_under_little_noise() -> None:
    """A label that is ahead by 4 is overtaken with a probability below e^-100."""
    outputs = [1] * 12 + [0] * 8 + [3] * 4
    for k in (1, 2, 3, 4):
        release = NoisyTopK(LABELS, k).aggregate(outputs, 100.0 * min(k, 3), SecureRandomness())
        assert release == ["b", "a", "d", "c"][:k]


def test_the_last_label_of_all_takes_no_draw() -> None:
    """So all labels in order have the law of all but one, and spend no more."""
    assert NoisyTopK(LABELS, 4).options == NoisyTopK(LABELS, 3).options == {"shares": (1 / 3,) * 3}
    assert NoisyTopK(LABELS, 1).options == {"shares": (1.0,)}
    outputs = (0, 0, 1, 2, ABSTAIN)
    three, four = (law_of(NoisyTopK(LABELS, k), outputs, False) for k in (3, 4))
    assert {order[:3]: mass for order, mass in four.items()} == pytest.approx(three)  # type: ignore[index]


# -- the profile -------------------------------------------------------------------------------------------------------


@RELATIONS
@SIZES
def test_the_profile_covers_every_pair_of_neighbours(number: int, k: int, own_calls: bool) -> None:
    """Both directions of a pair, and both directions of the profile."""
    profile = profile_of(number, k, own_calls)
    for direction in DIRECTIONS:
        check_profile(pairs_of(number, k, own_calls), profile, direction)


@RELATIONS
@pytest.mark.parametrize(("number", "k"), [(3, 2), (3, 3), (4, 3)])
def test_the_range_of_one_draw_for_all_k_is_caught(number: int, k: int, own_calls: bool) -> None:
    """The mutants: a claim of one draw's range for the whole release, and draws of which each has all of eps0."""
    draws = min(k, number - 1)
    with pytest.raises(AssertionError, match="is claimed"):
        check_profile(pairs_of(number, k, own_calls), BoundedRange(EPS0 / draws))

    with pytest.raises(AssertionError, match="is claimed"):
        check_profile(pairs_of(number, k, own_calls, kind=Undivided), profile_of(number, k, own_calls))


class Undivided(NoisyTopK):
    """The mutant: every draw has all of eps0."""

    def _noise(self, parameter: float, own_calls: bool) -> VoteNoise:
        return VoteNoise("vote-em", parameter, own_calls)


def test_the_rate_for_an_output_more_is_caught_if_outputs_are_replaced() -> None:
    """The mutant: r = eps0 / k with shared buckets, where two counts move."""
    with pytest.raises(AssertionError, match="is claimed"):
        check_profile(pairs_of(3, 2, False, kind=Doubled), profile_of(3, 2, False))


class Doubled(NoisyTopK):
    """The mutant: as if every output were of one owner."""

    def _noise(self, parameter: float, own_calls: bool) -> VoteNoise:
        return super()._noise(parameter, True)


@RELATIONS
def test_given_the_labels_before_a_draw_has_its_share_as_its_range(own_calls: bool) -> None:
    """Brute force over all neighbours: the first label, and the second given each first one. Both are reached."""
    reached = [0.0, 0.0]
    for p, q in pairs_of(4, 2, own_calls):
        firsts = [{"-": each["-"]} for each in (p, q)]
        for label in LABELS[:4]:
            for each, first in zip((p, q), firsts, strict=True):
                first[label] = sum(mass for order, mass in each.items() if str(order).startswith(label))
            given = [
                {order: mass / first[label] for order, mass in each.items() if str(order).startswith(label)}
                for each, first in zip((p, q), firsts, strict=True)
            ]
            reached[1] = max(reached[1], log_range(*given))
        reached[0] = max(reached[0], log_range(*firsts))
    assert reached == pytest.approx([EPS0 / 2] * 2, rel=1e-9)


def pairs_of_two_points(eps0: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The losses of every extreme pair of this range (two rows), and their masses."""
    tau = np.linspace(0.0, eps0, 151)
    losses = np.stack([tau, tau - eps0])
    absent = np.stack([-np.expm1(tau - eps0), np.expm1(tau)]) / (np.exp(tau) - np.exp(tau - eps0))
    return losses, absent * np.exp(losses)


def two_draws(first: float, second: float, epsilon: float) -> tuple[float, float]:
    """The largest delta of two draws of these ranges: of independent ones, and if the second follows the first."""
    (before, weights), (losses, masses) = pairs_of_two_points(first), pairs_of_two_points(second)
    after = [  # for each first pair (rows) and each second one (columns), by the first one's outcome
        weight[:, None]
        * (masses[:, None] * np.maximum(0.0, -np.expm1(epsilon - loss[:, None] - losses[:, None]))).sum(0)
        for loss, weight in zip(before, weights, strict=True)
    ]
    return float((after[0] + after[1]).max()), float((after[0].max(1) + after[1].max(1)).max())


def test_the_profile_is_that_of_draws_that_are_chosen_after_the_ones_before() -> None:
    """It is the largest delta of two draws of which the second may depend on the first one's outcome. That of
    independent draws is up to 5 % smaller, and would be no proof here."""
    claimed, gaps = BoundedRanges((1.5, 1.5)), []
    for epsilon in np.linspace(-1.5, 2.5, 21).tolist():
        independent, adaptive = two_draws(1.5, 1.5, epsilon)
        gaps.append(adaptive / independent - 1.0)
        for direction in DIRECTIONS:
            allowed = claimed.direction_delta(epsilon, direction)
            assert adaptive <= allowed + SLACK
            assert allowed == pytest.approx(adaptive, rel=5e-3)
    assert 0.04 < max(gaps) < 0.06


def test_draws_need_equal_shares_or_the_last_share_first() -> None:
    """The mistake: unequal shares in the order of the draws. The recursion of `BoundedRanges` starts at the last."""
    epsilons = np.linspace(-1.5, 2.0, 15).tolist()
    true = np.array([two_draws(0.5, 2.0, epsilon)[1] for epsilon in epsilons])
    last_first, as_drawn = (
        BoundedRanges(each).direction_delta(epsilons, "remove") for each in ((2.0, 0.5), (0.5, 2.0))
    )
    assert (true <= last_first + SLACK).all()
    assert (true > 1.05 * as_drawn).any()


def test_a_release_is_amplified_once() -> None:
    """The owner takes part with probability 1/2: the mixture of both laws against the law without."""
    profile = profile_of(3, 2, True).subsample(0.5)
    for one, other in added((0, 1, 2), 3):
        absent, present = law_of(NoisyTopK(LABELS[:3], 2), other, True), law_of(NoisyTopK(LABELS[:3], 2), one, True)
        mixed = mixture([(0.5, absent), (0.5, present)])
        check_profile([(mixed, absent)], profile, "remove")
        check_profile([(absent, mixed)], profile, "add")


@RELATIONS
def test_the_default_plan_keeps_its_promise(own_calls: bool) -> None:
    """The noise that a plan solves for one release: no pair of neighbours has a larger delta at its epsilon."""
    options = {**NoisyTopK(LABELS[:3], 2).options, **({"own_calls": 1.0} if own_calls else {})}
    request = LineRequest("structured", 1.0, 1, options=options)
    line = PrivacyPlan.solve(epsilon=2.0, delta=1e-3, lines={"top": request}).lines["top"]
    pairs = pairs_of(3, 2, own_calls, line.parameter)
    assert max(hockey_stick(p, q, 2.0) for p, q in pairs) <= 1e-3 + SLACK
    assert max(hockey_stick(p, q, 1.0) for p, q in pairs) > 1e-3, "the noise is not far more than it has to be"


def test_one_label_is_the_exponential_vote() -> None:
    votes_alone = votes.NoisyVote(LABELS[:3], mechanism="vote-em").under("vote-em", Crowd(5, 3.0))
    outputs = [0, 1, 1, ABSTAIN]
    one = law(lambda randomness: votes_alone.aggregate(outputs, EPS0, randomness) or "-")
    assert law_of(NoisyTopK(LABELS[:3], 1), tuple(outputs), False) == pytest.approx(one)
    claimed = MECHANISMS["vote-em"]().profile(EPS0).delta(np.array(EPSILONS))
    assert profile_of(3, 1, False).delta(np.array(EPSILONS)) == pytest.approx(claimed)


# -- abstentions and flips ---------------------------------------------------------------------------------------------


@RELATIONS
@pytest.mark.parametrize("k", [1, 2, 3])
def test_fewer_than_half_do_not_abstain_for_all(k: int, own_calls: bool) -> None:
    aggregator = NoisyTopK(LABELS[:3], k)
    for outputs in ((0, 1, 2, ABSTAIN, ABSTAIN), (ABSTAIN, ABSTAIN), (0, 0, 0, ABSTAIN, ABSTAIN)):
        assert law_of(aggregator, outputs, own_calls)["-"] <= FALSE_RATE
    assert law_of(aggregator, (ABSTAIN,) * 90, own_calls)["-"] > 0.9, "far more than half do"


def test_a_release_tells_that_members_abstain_if_its_noise_lets_it() -> None:
    """`tells` is about the exact chance that all abstentions are told, at the range of one draw."""
    for parameter, members, k in ((2.0, 20, 2), (6.0, 20, 2), (6.0, 20, 3), (6.0, 60, 3)):
        crowd = Crowd(members, members)
        bound = NoisyTopK(LABELS, k).under("structured", crowd)
        outputs = [ABSTAIN] * members
        told = law(lambda draw, bound=bound, p=parameter, o=outputs: shown(bound.aggregate(o, p, draw)))["-"]  # type: ignore[misc]
        assert bound.tells(members, parameter) == (told >= 0.9)
    assert bound.tells(members, parameter)
    assert not NoisyTopK(LABELS, 2).tells(20, 2.0)
    assert bound.outcome(None) == "members abstained"


@RELATIONS
def test_the_chance_that_noise_overturns_the_first_label_is_exact(own_calls: bool) -> None:
    """Of members that agree, but for "the members abstain"."""
    bound = NoisyTopK(LABELS, 2).under("structured", Crowd(5, 5.0, own_calls))
    found = law(lambda randomness: shown(bound.aggregate([1] * 5, EPS0, randomness)))
    first = sum(mass for order, mass in found.items() if str(order).startswith("b"))
    assert bound.overturned(EPS0) == pytest.approx(1.0 - first, abs=FALSE_RATE)


# -- what it reads, releases and refuses -------------------------------------------------------------------------------


def test_outputs_are_read_as_a_vote_reads_them() -> None:
    aggregator, vote = NoisyTopK(["Flask", "Porch", "Shed"], 2), votes.NoisyVote[str](["Flask", "Porch", "Shed"])
    for said in ("Porch", " porch.", "Shed: the usual", "<think>Flask</think> it is Porch"):
        assert aggregator.encode(said) == vote.encode(said) == asyncio.run(aggregator.aencode(said))
    for said in ("either Flask or Porch", "neither", "", None, 3):
        with pytest.raises(ValueError, match="names none"):
            aggregator.encode(said)
    assert aggregator.shown(1) == "Porch"
    assert aggregator.outputs["label_of"](" PORCH ") == "Porch"
    release = aggregator.aggregate([object(), True, 7, -1, "Shed", 2, 2], 90.0, SecureRandomness())
    assert release is not None
    assert release[0] == "Shed", "what is no label's index abstains"


def test_a_release_is_right_if_the_label_is_among_the_k() -> None:
    aggregator = NoisyTopK(["Flask", "Porch", "Shed"], 2)
    assert aggregator.hit(["Porch", "Shed"], " shed.") == 1.0
    assert aggregator.hit(["Porch", "Shed"], "Flask") == 0.0
    assert aggregator.hit(["Porch", "Shed"], "no label") == 0.0


def test_a_public_answer_is_its_label_and_then_the_lists_order() -> None:
    aggregator = NoisyTopK(["Flask", "Porch", "Shed"], 2)
    assert aggregator.zero_shot("Shed", {}) == ["Shed", "Flask"]
    assert aggregator.zero_shot("Flask", {}) == ["Flask", "Porch"]
    assert aggregator.zero_shot("either", {}) is None


def test_what_most_members_say_is_known_without_noise() -> None:
    aggregator = NoisyTopK(["Flask", "Porch", "Shed"], 2)
    assert aggregator.majority([2, 2, 1, ABSTAIN]) == ["Shed", "Porch"]
    assert aggregator.majority([2]) == ["Shed", "Flask"]
    assert aggregator.majority([ABSTAIN]) is None


@pytest.mark.parametrize(
    ("labels", "k", "parameter", "bound"),
    [
        (["a", "b"], 0, "k", "a whole number >= 1 and <= 2"),
        (["a", "b"], 3, "k", "a whole number >= 1 and <= 2"),
        (["a", "b"], True, "k", "a whole number >= 1 and <= 2, not bool"),
        (["a", "b"], 1.0, "k", "a whole number >= 1 and <= 2, not float"),
        (["a", "b"], None, "k", "a whole number >= 1 and <= 2, not NoneType"),
        ([f"label {i}" for i in range(40)], 33, "k", "a whole number >= 1 and <= 32"),
        (["a"], 1, "labels", "a list of at least two strings, each with a letter or digit"),
        ("ab", 1, "labels", "a list of at least two strings, each with a letter or digit"),
        (["a", "A."], 1, "labels", "labels that differ in more than case, spaces, invisible characters and "),
        (["a", 5], 1, "labels", "a list of at least two strings, each with a letter or digit"),
    ],
)
def test_bad_settings_are_refused_with_their_name_value_and_bound(
    labels: Any, k: Any, parameter: str, bound: str
) -> None:
    with pytest.raises(InvalidParameter) as caught:
        NoisyTopK(labels, k)
    assert caught.value.parameter == parameter
    assert caught.value.value == (k if parameter == "k" else labels)
    assert caught.value.bound.startswith(bound)


def test_all_of_33_labels_take_32_draws() -> None:
    assert NoisyTopK([f"label {i}" for i in range(33)], 33).draws == 32


def test_the_audits_cases_have_several_sizes_and_one_mechanism() -> None:
    cases = NoisyTopK.worst_cases()
    assert len({len(case.others) for case in cases}) >= 3
    assert {repr(case.aggregator) for case in cases} == {"NoisyTopK(['Alder', 'Birch', 'Cedar'], k=2)"}, "one plan"
    assert any(set(case.others) <= {case.base} for case in cases)


@pytest.mark.parametrize("shape", [{"calls": 20}, {"members": 20}], ids=["calls", "members"])
def test_a_release_of_an_ensemble_and_its_replay(shape: dict[str, Any], store_of: Any, ledger_url: str) -> None:
    """At this noise 20 equal answers come first but with a probability below 1e-9."""
    records = [{"input": f"note {i}", "output": "Shed", "owner": f"p{i}"} for i in range(200)]
    selector = PoissonExampleSelector(store_of(records), **shape)
    budget = PrivacyBudget(epsilon=60, delta=1e-5, releases=3, ledger=ledger_url, name="top")
    aggregator = NoisyTopK(["Flask", "Porch", "Shed"], 2)
    release = PrivateEnsemble(selector, RunnableLambda(lambda _: "Shed")) | DPAggregate(aggregator, budget)
    answer = release.invoke({"input": "where is it?"})
    assert answer[0] == "Shed"
    assert answer[1] in ("Flask", "Porch")
    assert release.invoke({"input": "where is it?"}) == answer, "replayed"
    assert release.OutputType == list[str]
    line = budget.plan.lines["structured"]
    assert line.options["shares"] == (0.5, 0.5)
    assert bool(line.options.get("own_calls")) == ("calls" in shape)
