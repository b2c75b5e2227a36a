"""The membership attack: its law is the sampler's, its scores are what they say, and its bound is what the proof says.

Every test draws from a fixed generator: there are no false alarms.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.special import log_softmax
from sklearn.metrics import roc_auc_score
from table_model import TableModel

from langchain_dpicl.decoding import Demonstration, DemonstrationTemplate, TransformersLogits, answer
from langchain_dpicl.decoding.answer import Settings, choose, clipped_terms, possible
from langchain_dpicl.errors import DPICLError, InvalidParameter, InvalidRecords
from langchain_dpicl.lab.audit.membership import (
    ATTACKS,
    LIKELIHOOD,
    RATIO,
    TOKENS,
    Bystanders,
    MembershipResult,
    Mixture,
    attack,
    auc_bound,
    draw,
    interval,
    known_record,
    log_law,
    prompt_scores,
    run_membership,
    token_gains,
    wins,
)
from langchain_dpicl.lab.audit.reading import Readings
from langchain_dpicl.privacy import LineRequest, PrivacyPlan

ALPHABET = "abcdef"
TEMPLATE = DemonstrationTemplate("In: {input}\nOut: {output}\n\n", "In: {input}\nOut:")


class Coins:
    """Positions of heads that a test writes down, one list for each call; every uniform number is the same."""

    def __init__(self, *heads: list[int], uniform: float = 0.5) -> None:
        self.heads, self.uniform = list(heads), uniform

    def coin_positions(self, n: int, probability: float) -> np.ndarray[Any, Any]:
        return np.array(self.heads.pop(0), np.int64)

    def uniforms(self, size: int) -> np.ndarray[Any, Any]:
        return np.full(size, self.uniform)


def table(shown: str, so_far: str) -> np.ndarray[Any, Any]:
    """Logits that differ for every demonstration and prefix, without a pattern."""
    seed = sum(map(ord, shown)) + 31 * sum(map(ord, so_far)) + len(so_far)
    return np.random.default_rng(seed).normal(0.0, 2.0, len(ALPHABET)).astype(np.float32)


OUTPUTS = ["abc", "fed", "cafe"]
SHOWN = ["one", "two", "three", "four"]  # the first three are the records' own
SETTINGS = Settings(max_tokens=9, min_tokens=0, top_k=4, shots=3.0, temperature=1.0, cap=1.5, stop=())


@pytest.fixture(scope="module")
def readings() -> Readings:
    """What the table says of three records, place by place."""
    rows: dict[str, list[Any]] = {"record": [], "target": [], "zero": [], "one": [], "own": [], "z": [], "o": []}
    for i, output in enumerate(OUTPUTS):
        tokens = [ALPHABET.index(letter) for letter in output]
        for place, token in enumerate(tokens):
            zero, *one = (table(shown, output[:place]).astype(np.float64) for shown in ("", *SHOWN))
            ids = possible(TableModel(table, ALPHABET), SETTINGS, tokens[:place], zero.astype(np.float32)).tolist()
            rows["record"].append(i)
            rows["target"].append(ids.index(token) if token in ids else -1)
            rows["zero"].append(zero[ids])
            rows["one"].append([row[ids] for row in one])
            rows["own"].append(one[i][ids])
            rows["z"].append(log_softmax(zero)[token])
            rows["o"].append([log_softmax(row)[token] for row in one])
    found = {name: np.array(values) for name, values in rows.items()}
    one, o = found["one"].transpose(1, 0, 2), found["o"].T
    return Readings(found["record"], found["target"], found["zero"], one, found["own"], found["z"], o)


BOUND, CAP = 1.25, 1.5


def mixture_of(readings: Readings, bound: float = BOUND, cap: float = CAP) -> Mixture:
    return Mixture(readings, bound, cap, kappa=3.0)


def by_hand(readings: Readings, present: list[list[int]], bound: float = 1.25) -> np.ndarray[Any, Any]:
    """The law at each place with these demonstrations in it, in plain floats."""
    laws = []
    for place, rows in enumerate(present):
        scores = 3.0 * readings.zero_shot[place]
        for row in rows:
            difference = readings.one_shot[row, place] - readings.zero_shot[place]
            scores = scores + min(1.5, bound / np.ptp(difference)) * difference
        laws.append(log_softmax(scores))
    return np.array(laws)


# -- the law -----------------------------------------------------------------------------------------------------------


def test_the_scores_are_those_that_the_sampler_draws_from(readings: Readings, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last step, at every place; the sampler reads whole rows and finds the possible tokens by itself."""
    seen: list[Any] = []
    monkeypatch.setattr(answer, "draw", lambda scores, randomness: seen.append(scores) or 0)
    model, terms = TableModel(table, ALPHABET), mixture_of(readings)
    limits = partial(clipped_terms, bound=BOUND, temperature=1.0, cap=CAP)
    for output in OUTPUTS:
        tokens = [ALPHABET.index(letter) for letter in output]
        session = model.session("", [Demonstration(text, text) for text in SHOWN], steps=9)
        for place in range(len(tokens)):
            logits = session.logits([0, 3], tokens[:place])
            choose(model, SETTINGS, tokens[:place], logits[0], logits[1:], limits, Coins())  # type: ignore[arg-type]
    ours = terms.base + terms.shown[0] + terms.shown[3]
    assert np.array_equal(np.array(seen), ours)


def test_the_log_probabilities_are_those_of_brute_force(readings: Readings) -> None:
    terms, places = mixture_of(readings), len(readings.record)
    law = log_law(terms.base + terms.shown.sum(axis=0))
    assert np.allclose(law, by_hand(readings, [[0, 1, 2, 3]] * places), atol=1e-4)
    assert np.allclose(np.exp(law).sum(axis=1), 1.0)
    assert np.allclose(log_law(terms.base), by_hand(readings, [[]] * places), atol=1e-4)


def test_an_unbounded_mixture_adds_the_whole_differences(readings: Readings) -> None:
    terms = mixture_of(readings, 1e6, 1.0)
    expected = log_softmax(3.0 * readings.zero_shot + (readings.one_shot - readings.zero_shot).sum(axis=0), axis=1)
    assert np.allclose(log_law(terms.base + terms.shown.sum(axis=0)), expected, atol=1e-4)


# -- the scores --------------------------------------------------------------------------------------------------------


def test_a_mixture_scores_who_was_present_and_nobody_else(readings: Readings) -> None:
    """Two of three coins of other owners at places 0 and 4 come up, the member's at places 4 and 9."""
    terms, places = mixture_of(readings), len(readings.record)
    crowd = Bystanders(owners=4, rate=0.1, first=1)  # the others show the demonstrations 1, 2, 3
    others = [0 * 3 + 0, 0 * 3 + 2, 4 * 3 + 1]
    coins = Coins(others, [4, 9], uniform=0.3)
    found = terms.scores(0, 0.25, crowd, coins)  # type: ignore[arg-type]
    present: list[list[int]] = [[] for _ in range(places)]
    present[0], present[4], present[9] = [1, 3], [2, 0], [0]
    law, public = by_hand(readings, present), by_hand(readings, [[]] * places)
    for record in range(len(OUTPUTS)):
        at = [p for p in range(places) if readings.record[p] == record and readings.target[p] >= 0]
        assert at, "every record has a possible token"
        chosen = [law[p, readings.target[p]] for p in at]
        plain = [public[p, readings.target[p]] for p in at]
        assert found[LIKELIHOOD][record] == pytest.approx(np.mean(chosen), abs=1e-4)
        assert found[RATIO][record] == pytest.approx(sum(chosen) - sum(plain), abs=1e-4)
        gains = 0.0
        for p in np.flatnonzero(readings.record == record):
            drawn = int(np.flatnonzero(np.exp(law[p]).cumsum() >= 0.3)[0])
            difference = readings.own[p] - readings.zero_shot[p]
            term = min(1.5, 1.25 / np.ptp(difference)) * difference
            with_it = log_softmax(public[p] + term)
            gains += math.log(0.75 + 0.25 * math.exp(with_it[drawn] - public[p, drawn]))
        assert found[TOKENS][record] == pytest.approx(gains, abs=1e-4)


def test_a_token_outside_the_possible_ones_counts_for_nobody(readings: Readings) -> None:
    hidden = replace(readings, target=np.where(readings.record == 1, -1, readings.target))
    coins = Coins([], [])
    found = mixture_of(hidden).scores(0, 1.0, Bystanders(2, 0.5, 3), coins)  # type: ignore[arg-type]
    assert found[LIKELIHOOD][1] == -math.inf
    assert found[RATIO][1] == 0.0


@pytest.mark.parametrize("participation", [1.0, 0.3, 1e-12])
def test_a_gain_is_a_likelihood_ratio(readings: Readings, participation: float) -> None:
    """Under the public law its exponential has mean 1, at every place."""
    terms = mixture_of(readings)
    public = log_law(terms.base)
    total = np.zeros(len(public))
    for token in range(public.shape[1]):
        drawn = np.full(len(public), token)
        total += np.exp(public[:, token] + token_gains(terms.own, public, drawn, participation))
    assert np.allclose(total, 1.0)


def test_a_prompts_scores_are_over_the_whole_vocabulary(readings: Readings) -> None:
    found = prompt_scores(readings, 2)
    logs = [[log_softmax(table(shown, "fed"[:i]).astype(float))[ALPHABET.index("fed"[i])]
             for i in range(3)] for shown in ("three", "")]  # fmt: skip
    assert found[LIKELIHOOD][1] == pytest.approx(np.mean(logs[0]))
    assert found[RATIO][1] == pytest.approx(sum(logs[0]) - sum(logs[1]))
    assert TOKENS not in found


# -- the AUC -----------------------------------------------------------------------------------------------------------


def test_the_mean_of_the_wins_is_the_auc_of_scikit_learn() -> None:
    generator = np.random.default_rng(4)
    for _ in range(50):
        scores, member = generator.integers(0, 6, 12).astype(np.float64), int(generator.integers(12))
        expected = roc_auc_score(np.arange(12) == member, scores)
        assert np.nanmean(wins(scores, member)) == pytest.approx(expected)


def test_the_interval_covers_the_truth_although_trials_share_their_records(seeded: Any) -> None:
    """Effects of members, of records and of pairs; the true AUC is 1/2. Over 500 such sets it covers 94 %; with members
    alone resampled it would be 87 %, and with all comparisons taken as independent 31 %."""
    generator, randomness = np.random.default_rng(7), seeded(8)
    covered = 0
    for _ in range(100):
        effect = generator.normal(size=(20, 1)) - generator.normal(size=(1, 51)) + generator.normal(size=(20, 51))
        won = (effect > 0).astype(np.float64)
        won[np.arange(20), np.arange(20)] = np.nan
        mean, _, low, high = interval(won, randomness)
        assert mean == pytest.approx(np.nanmean(won))
        covered += low <= 0.5 <= high
    assert covered >= 91


def test_an_interval_without_any_difference_has_no_width(seeded: Any) -> None:
    assert interval(np.array([[np.nan, 1.0, 1.0]]), seeded(1)) == (1.0, 0.0, 1.0, 1.0)


# -- what a plan proves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.0, 0.0), (0.0, 0.2), (1.0, 0.0), (1.0, 0.1), (2.0, 1e-5), (4.0, 0.3)]
)
def test_the_bound_is_what_the_best_mechanism_reaches(epsilon: float, delta: float) -> None:
    """A linear program over all laws of (member above, tie, below) with the member, and symmetric ones without it."""
    e = math.exp(epsilon)
    sets = [np.array(chosen, float) for chosen in itertools.product([0, 1], repeat=3)]
    rows = [np.concatenate([s, -e * s]) for s in sets] + [np.concatenate([-e * s, s]) for s in sets]
    best = linprog(
        [-1.0, -0.5, 0.0, 0.0, 0.0, 0.0],
        A_ub=np.array(rows),
        b_ub=np.full(len(rows), delta),
        A_eq=[[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 0, -1]],
        b_eq=[1, 1, 0],
        bounds=(0, 1),
    )
    assert auc_bound(epsilon, delta) == pytest.approx(-best.fun, abs=1e-9)


def test_the_bound_is_a_probability_for_every_promise() -> None:
    assert auc_bound(0.0, 0.0) == 0.5
    assert auc_bound(50.0, 0.0) <= 1.0
    assert auc_bound(0.0, 1.0) == 1.0
    for epsilon, delta in ((-1.0, 0.1), (math.inf, 0.1), (1.0, -0.1), (1.0, 1.5), (math.nan, 0.0)):
        with pytest.raises(InvalidParameter, match=r"epsilon|delta"):
            auc_bound(epsilon, delta)


def telling() -> Readings:
    """40 records of ten places: after its own demonstration a record's token is sure, else every token is as likely."""
    records, length, vocabulary = 40, 10, 8
    record = np.repeat(np.arange(records), length)
    target = np.random.default_rng(3).integers(vocabulary, size=records * length)
    zero = np.zeros((records * length, vocabulary))
    own = zero.copy()
    own[np.arange(len(own)), target] = 12.0
    one = np.stack([np.where((record == d)[:, None], own, zero) for d in range(31)])
    sure = np.log(1 / 8)
    return Readings(record, target, zero, one, own, np.full(len(record), sure), np.full((31, len(record)), sure))


def test_an_attack_stays_below_what_the_plan_proves_and_goes_above_where_nothing_is_clipped(seeded: Any) -> None:
    """Rate 1/5, epsilon 1, 30 trials against 39, each played four times. The broken sampler forgets to clip."""
    readings, rate = telling(), 0.2
    request = LineRequest("tokens", rate, len(readings.record))
    line = PrivacyPlan.solve(epsilon=1.0, delta=1e-5, lines={"tokens": request}).lines["tokens"]
    crowd = Bystanders(owners=20, rate=rate, first=30)
    results = attack(readings, [(1.0, line)], crowd, 1e-5, 4.0, 1.5, 4, seeded(11))
    found = {(each.name, each.attack): each for each in results}
    assert len(found) == 2 + 3 * 3
    private = found["epsilon 1", TOKENS]
    assert private.bound is not None
    assert 0.5 < private.bound < auc_bound(1.0, 1e-5) < 0.82
    assert private.low <= private.bound
    assert abs(private.auc - 0.5) < 0.15
    assert [name for (name, kind), each in found.items() if each.bound] == ["epsilon 1"]
    assert found["mixture without clipping, not private", TOKENS].low > 0.95
    assert found["B of epsilon 1, member in every sample", RATIO].low > 0.9, "the law itself hides nobody"

    broken, randomness = Mixture(readings, 1e6, 1.0, 4.0), seeded(12)
    won = [wins(broken.scores(m, rate, crowd, randomness)[TOKENS], m) for m in range(30)]
    assert interval(np.stack(won), randomness)[2] > private.bound


def test_results_are_plain_and_can_be_drawn(tmp_path: Path) -> None:
    def result(name: str, kind: str, bound: float | None) -> MembershipResult:
        return MembershipResult(name, kind, 1.0, 2.0, 0.1, 0.5, 0.05, 0.4, 0.6, bound, 20, 50, 10)

    results = [result(name, kind, 0.6 if kind == TOKENS else None) for name in ("a", "b") for kind in ATTACKS]
    assert [MembershipResult(**each) for each in json.loads(json.dumps([asdict(e) for e in results]))] == results
    draw(results, tmp_path / "auc.png")
    assert (tmp_path / "auc.png").stat().st_size > 10_000


# -- bad input ---------------------------------------------------------------------------------------------------------

ROWS = [{"input": f"a{i}", "output": f"b{i}"} for i in range(80)]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"trials": 0}, "trials"),
        ({"trials": 52}, "trials"),
        ({"against": 0}, "against"),
        ({"against": 2.5}, "against"),
        ({"owners": 1}, "owners"),
        ({"others": 0}, "others"),
        ({"others": 1000}, "others"),
        ({"shots": 0.0}, "shots"),
        ({"shots": 1001.0}, "shots"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"cap": 0.0}, "cap"),
        ({"plays": 0}, "plays"),
        ({"delta": 0.0}, "delta"),
        ({"epsilons": [1.0, -1.0]}, "epsilons"),
        ({"model": "smollm2"}, "model"),
        ({"template": "In: {input}"}, "template"),
    ],
)
def test_a_parameter_outside_its_bounds_is_named(options: dict[str, Any], name: str) -> None:
    """Before anything is loaded."""
    given: dict[str, Any] = {"model": TransformersLogits("nothing-of-that-name"), "template": TEMPLATE, **options}
    with pytest.raises(InvalidParameter, match=f"^{name}="):
        run_membership(given.pop("model"), ROWS, given.pop("template"), **given)


def test_records_that_cannot_be_used_are_refused() -> None:
    model = TransformersLogits("nothing-of-that-name")
    with pytest.raises(InvalidRecords, match="58 records; against \\+ 1 \\+ others = 59 are needed"):
        run_membership(model, ROWS[:58], TEMPLATE)
    with pytest.raises(InvalidRecords, match="lacks what the template names"):
        run_membership(model, [{"input": "a"}] * 59, TEMPLATE)
    with pytest.raises(InvalidParameter, match="a layout that begins with"):
        run_membership(model, ROWS, DemonstrationTemplate("{output}\n", "In: {input}"))
    empty: Any = SimpleNamespace(_loaded=SimpleNamespace(tokens=list))
    with pytest.raises(InvalidRecords, match="record 7 has no output"):
        known_record(empty, DemonstrationTemplate("In: {input}\n", "In: {input}"), {"input": "a"}, 7, 5)
    assert issubclass(InvalidRecords, DPICLError)


def test_an_output_is_what_follows_the_query_and_no_longer_than_asked() -> None:
    letters: Any = SimpleNamespace(_loaded=SimpleNamespace(tokens=lambda text: [ord(letter) for letter in text]))
    found = known_record(letters, TEMPLATE, {"input": "x", "output": "word"}, 0, 4)
    assert (found.asked, found.shown) == ("In: x\nOut:", "In: x\nOut: word\n\n")
    assert "".join(map(chr, found.output)) == " wor"
