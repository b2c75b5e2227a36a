"""Was this record among the private ones? A membership attack on private decoding, after those of the papers.

For public data alone: it shows answers that are not private.

The game: one record is a member, so it takes part in the answers; others are not. The attacker holds all of them, asks
each one's query, and scores how well what it sees fits each record's own output. The AUC is the probability that the
member's score is above a non-member's, ties counting half: 0.5 for an attacker without knowledge.

The papers play it on labels (Duan et al. 2023, *Flocks of stochastic parrots*; Flemings et al. 2025, DPS-MOZO, section
5.5 and appendix D.1, on AG News and TREC): the score is the probability of the record's label. Here answers are texts,
so the attacks are others.

What the attacker sees, and its score:

- ``likelihood``, the counterpart of the papers' score: the exact probability of every token of the record's output
  after those before it. The score is the mean of their logarithms.
- ``likelihood ratio``: the same probabilities, and the score is the sum of the logarithms of their ratios to the public
  law in which nobody takes part. It forgives a record for being likely or unlikely by itself.
- ``tokens``: at each of these places one token drawn from the law, as a release draws it. The score is the
  log-likelihood ratio of the tokens, for that record taking part with its probability against nobody taking part.

In a mixture the first two look at the places whose token is possible there; at the others the law says 0 whoever takes
part.

**The guarantee speaks of the last alone.** A probability is no release: whoever sees the law sees an owner's term
without any noise. The first two attackers are stronger than any caller, and no epsilon bounds them. The third is still
stronger than a caller, since it chooses what a token follows; all its tokens are in the plan.

**What the guarantee implies** for ``tokens``. Let all tokens of a trial together be (epsilon, delta)-DP for one owner
added or removed; x is the member, y a non-member, z the other owners. A score looks at the tokens and its own record
alone, and x and y are exchangeable. Let phi be 1 if x scores above y, 1/2 if they tie, else 0. The AUC is E[phi]
on z with x, and on z alone E[phi] = 1/2 by symmetry. So 1/2 <= e^epsilon * (1 - AUC) + delta, that is

    AUC <= 1 - e^-epsilon * (1/2 - delta) = 1 - f(1/2)

for the trade-off curve f of (epsilon, delta) (Kairouz, Oh, Viswanath 2015; Dong, Roth, Su 2022), which can be attained.
Every point of the plan's privacy profile gives such a bound. At epsilon 0 it is 1/2 + delta(0), the total variation
distance of the neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax, logsumexp

from langchain_dpicl.decoding.answer import STEP, Settings, base_scores, clipped_terms
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.exemplars import IntArray
from langchain_dpicl.decoding.model import DemonstrationTemplate
from langchain_dpicl.errors import InvalidParameter, InvalidRecords
from langchain_dpicl.lab.audit.reading import Known, Readings, read
from langchain_dpicl.lab.plots import draw_auc
from langchain_dpicl.privacy import LineRequest, PlanLine, PLDAccountant, PrivacyPlan, Randomness, SecureRandomness
from langchain_dpicl.privacy.checks import open_unit, positive, real, whole
from langchain_dpicl.privacy.losses import FloatArray

LIKELIHOOD, RATIO, TOKENS = ATTACKS = ("likelihood", "likelihood ratio", "tokens")

AttackScores = dict[str, FloatArray]
"""For each attack one score a record, the higher the more like a member."""

_RESAMPLES = 2000
_NO_BOUND = 1e6  # nats: no term is ever cut


@dataclass(frozen=True)
class MembershipResult:
    """The reach of one attack against one way to answer.

    ``name`` says how the answers are made, ``attack`` what the attacker sees and computes (one of ``ATTACKS``).
    ``epsilon`` and ``range_bound`` are the plan's, None without privacy; ``bound`` is its bound on the expected AUC, if
    it has one. The member takes part in a token with probability ``participation``. ``auc`` is the mean of the trials,
    ``error`` its standard error, ``low`` and ``high`` its 95 % interval (`interval`). So many records (``trials``) took
    the member's place, each ``against`` so many non-members, in so many ``plays``.
    """

    name: str
    attack: str
    epsilon: float | None
    range_bound: float | None
    participation: float
    auc: float
    error: float
    low: float
    high: float
    bound: float | None
    trials: int
    against: int
    plays: int


@dataclass(frozen=True)
class Bystanders:
    """The data set of a trial: the member, and ``owners - 1`` others. Each other takes part in a token with ``rate``.

    The others show the demonstrations from number ``first`` on, in turn: owners may show the same text.
    """

    owners: int
    rate: float
    first: int


def run_membership(
    model: TransformersLogits,
    rows: Sequence[Mapping[str, Any]],
    template: DemonstrationTemplate,
    *,
    epsilons: Sequence[float] = (1.0, 2.0, 4.0),
    delta: float = 1e-5,
    trials: int = 20,
    against: int = 50,
    shots: float = 4.0,
    owners: int = 1000,
    others: int = 8,
    max_tokens: int = 25,
    top_k: int = 100,
    cap: float = 1.5,
    plays: int = 10,
) -> list[MembershipResult]:
    """Attack a one-shot prompt, a mixture without clipping, and the mixture of a plan for each epsilon.

    Each of the public ``rows`` is an owner's. ``against + 1`` of them are drawn, and ``trials`` of these take the
    member's place in turn. A data set has ``owners`` owners: the member, and others who each show one of ``others``
    further rows. The rate is ``shots / owners``, and kappa is ``shots``. A plan counts all that the attacker sees in a
    trial: ``max_tokens`` tokens for each of the ``against + 1`` queries. Against each plan the member takes part at the
    rate, as promised, and then in every token, for which the plan promises nothing: the difference is the sample's.

    Reading ``trials + others`` demonstrations before ``against + 1`` outputs each takes the time. Every trial is played
    ``plays`` times with fresh coins and tokens; each play has all of the plan's tokens to itself.

    Raises `InvalidParameter` for a parameter outside its bounds, for demonstrations and queries that do not fit the
    model's context, and for a template whose demonstration does not begin with its query; `InvalidRecords` for too few
    rows, or one without an output or that the template cannot render; `InfeasiblePlan` if no range reaches an epsilon.
    """
    against = whole("against", against)
    trials = whole("trials", trials, at_most=against + 1)
    owners = whole("owners", owners, at_least=2)
    others = whole("others", others, at_most=owners - 1)
    rate = real("shots", shots, above=0.0, at_most=float(owners)) / owners
    max_tokens, cap, delta = whole("max_tokens", max_tokens), positive("cap", cap), open_unit("delta", delta)
    plays = whole("plays", plays)
    epsilons = [positive("epsilons", epsilon) for epsilon in epsilons]
    if not isinstance(model, TransformersLogits):
        raise InvalidParameter("model", type(model).__name__, "a TransformersLogits")
    if not isinstance(template, DemonstrationTemplate):
        raise InvalidParameter("template", type(template).__name__, "a DemonstrationTemplate")
    needed = against + 1 + others
    if len(rows) < needed:
        raise InvalidRecords(f"{len(rows)} records; against + 1 + others = {needed} are needed")
    request = LineRequest("tokens", rate, (against + 1) * max_tokens)
    plans = [(epsilon, PrivacyPlan.alone(request, epsilon=epsilon, delta=delta)) for epsilon in epsilons]

    randomness = SecureRandomness()
    drawn = np.argsort(randomness.uniforms(len(rows)))[:needed].tolist()
    known = [known_record(model, template, rows[i], i, max_tokens) for i in drawn]
    pool, crowd = known[: against + 1], known[against + 1 :]
    if not all(model.fits(each.shown, other.asked, max_tokens) for each in known for other in pool):
        raise InvalidParameter("max_tokens", max_tokens, "with a demonstration and a query within the model's context")
    top_k = whole("top_k", top_k, at_most=model.vocabulary)
    settings = Settings(max_tokens, min_tokens=0, top_k=top_k, shots=shots, temperature=1.0, cap=cap, stop=())
    shown = [each.shown for each in (*pool[:trials], *crowd)]
    readings = read(model, pool, shown, settings)
    return attack(readings, plans, Bystanders(owners, rate, first=trials), delta, shots, cap, plays, randomness)


def known_record(
    model: TransformersLogits, template: DemonstrationTemplate, row: Mapping[str, Any], place: int, max_tokens: int
) -> Known:
    """A row as query, output (its first ``max_tokens`` tokens) and demonstration; ``place`` names it in an error."""
    try:
        asked, shown = template.ask(row), template.show(row)
    except Exception:
        raise InvalidRecords(f"record {place} lacks what the template names") from None
    if not asked or not shown.startswith(asked):
        raise InvalidParameter("template", template.demonstration, f"a layout that begins with {template.query!r}")
    output = model._loaded.tokens(shown.removeprefix(asked).removesuffix(template.ending))[:max_tokens]
    if not output:
        raise InvalidRecords(f"record {place} has no output")
    return Known(asked, output, shown)


def attack(
    readings: Readings,
    plans: Sequence[tuple[float, PlanLine]],
    crowd: Bystanders,
    delta: float,
    kappa: float,
    cap: float,
    plays: int,
    randomness: Randomness,
) -> list[MembershipResult]:
    """Every attack on every way to answer; the first ``crowd.first`` records take the member's place in turn."""

    def ways() -> Iterator[tuple[str, Mixture | None, dict[str, Any]]]:
        facts: dict[str, Any] = {"epsilon": None, "range_bound": None, "participation": 1.0, "bound": None}
        yield "one-shot prompt, not private", None, facts
        yield "mixture without clipping, not private", Mixture(readings, _NO_BOUND, 1.0, kappa), facts
        for epsilon, line in plans:
            bound = line.parameter
            distance = PLDAccountant().delta([line.line(bound)], 0.0)
            proved = min(auc_bound(epsilon, delta), auc_bound(0.0, min(1.0, distance)))
            facts, mixture = {**facts, "epsilon": epsilon, "range_bound": bound}, Mixture(readings, bound, cap, kappa)
            yield f"epsilon {epsilon:g}", mixture, {**facts, "participation": crowd.rate, "bound": proved}
            yield f"B of epsilon {epsilon:g}, member in every sample", mixture, facts

    results: list[MembershipResult] = []
    for name, mixture, facts in ways():
        if mixture is None:
            trials = [[prompt_scores(readings, member)] for member in range(crowd.first)]
        else:
            given = facts["participation"], crowd, randomness
            trials = [[mixture.scores(member, *given) for _ in range(plays)] for member in range(crowd.first)]
        for kind in trials[0][0]:
            won = np.stack([np.mean([wins(s[kind], i) for s in played], axis=0) for i, played in enumerate(trials)])
            auc, error, low, high = interval(won, randomness)
            about = {**facts, "auc": auc, "error": error, "low": low, "high": high}
            if kind != TOKENS:
                about["bound"] = None
            counts = {"trials": crowd.first, "against": readings.records - 1, "plays": len(trials[0])}
            results.append(MembershipResult(name, kind, **about, **counts))
    return results


# -- the scores --------------------------------------------------------------------------------------------------------


def prompt_scores(readings: Readings, member: int) -> AttackScores:
    """The scores of answers after the member's demonstration and its query, without any protection."""
    found = readings.one_shot_log_prob[member]
    ratios = found - readings.zero_shot_log_prob
    return {LIKELIHOOD: _sums(readings, found) / np.bincount(readings.record), RATIO: _sums(readings, ratios)}


class Mixture:
    """The law of a token: proportional to exp(kappa * l0 + the sum of the terms of the owners who take part).

    A term is cut to the range ``range_bound`` with a weight of at most ``cap``. The temperature is 1. ``base``,
    ``shown`` and ``own`` are what the public law, each demonstration and the record's own one add to the scores of the
    possible tokens at every place, in whole steps.
    """

    def __init__(self, readings: Readings, range_bound: float, cap: float, kappa: float) -> None:
        rows = np.concatenate([readings.one_shot, readings.own[None]])
        limits = {"bound": range_bound, "temperature": 1.0, "cap": cap}
        places = range(len(readings.record))
        terms = [clipped_terms(rows[:, place], readings.zero_shot[place], **limits) for place in places]
        self._readings = readings
        self.shown, self.own = np.stack(terms, axis=1)[:-1], np.stack([each[-1] for each in terms])
        self.base = np.stack([base_scores(row, kappa, 1.0) for row in readings.zero_shot])

    def scores(self, member: int, participation: float, crowd: Bystanders, randomness: Randomness) -> AttackScores:
        """The scores of tokens that are drawn, at every place, from a mixture over a fresh sample of the owners.

        The member takes part in each token with probability ``participation``.
        """
        scores, readings, places = self.base.copy(), self._readings, len(self.base)
        coins = randomness.coin_positions(places * (crowd.owners - 1), crowd.rate)
        place, owner = np.divmod(coins, crowd.owners - 1)
        show = crowd.first + owner % (len(self.shown) - crowd.first)
        np.add.at(scores, place, self.shown[show, place])
        present = randomness.coin_positions(places, participation)
        scores[present] += self.shown[member, present]

        law, public = log_law(scores), log_law(self.base)
        known = readings.target >= 0
        found, plain = (np.where(known, each[np.arange(places), readings.target], 0.0) for each in (law, public))
        drawn = (np.exp(law).cumsum(axis=1)[:, :-1] < randomness.uniforms(places)[:, None]).sum(axis=1)
        counts = _sums(readings, known)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = np.where(counts > 0, _sums(readings, found) / counts, -np.inf)
        gains = token_gains(self.own, public, drawn, participation)
        return {LIKELIHOOD: means, RATIO: _sums(readings, found - plain), TOKENS: _sums(readings, gains)}


def log_law(scores: IntArray) -> FloatArray:
    """Row by row the logarithm of the law from which `langchain_dpicl.decoding.answer.draw` draws."""
    return np.asarray(log_softmax(STEP * (scores - scores.max(axis=1, keepdims=True)), axis=1), np.float64)


def token_gains(own: IntArray, public: FloatArray, drawn: NDArray[np.intp], participation: float) -> FloatArray:
    """log((1 - p) + p * P'(u) / P(u)) for each drawn token u: P the public law, P' the law tilted by the own term."""
    tilt = STEP * own
    ratio = (tilt - logsumexp(public + tilt, axis=1, keepdims=True))[np.arange(len(drawn)), drawn]
    absent = math.log1p(-participation) if participation < 1.0 else -math.inf
    return np.asarray(np.logaddexp(absent, math.log(participation) + ratio), np.float64)


def _sums(readings: Readings, values: ArrayLike) -> FloatArray:
    """For each record the sum over its places."""
    return np.bincount(readings.record, weights=values, minlength=readings.records).astype(np.float64)


# -- the AUC -----------------------------------------------------------------------------------------------------------


def wins(scores: FloatArray, member: int) -> FloatArray:
    """For each record 1 if the member's score is above its own, 1/2 if they are equal, else 0; NaN for itself."""
    found = np.where(scores[member] == scores, 0.5, (scores[member] > scores).astype(np.float64))
    found[member] = np.nan
    return found


def interval(won: FloatArray, randomness: Randomness) -> tuple[float, float, float, float]:
    """The mean of ``won`` (trials, records), its standard error and a 95 % interval.

    Both are by Owen's pigeonhole bootstrap (2007).

    The trials share their non-members, so members and records are resampled both, independently. It speaks of other
    records like these with the same crowd. If every comparison has the same result it has no width: then n trials
    leave, at 95 %, a chance of up to 1 - 0.05^(1/n) for a trial with another one.
    """
    is_pair = ~np.isnan(won)
    value = np.where(is_pair, won, 0.0)

    def resampled(size: int) -> FloatArray:
        taken = randomness.integers(size, _RESAMPLES * size).reshape(_RESAMPLES, size)
        flat = taken + size * np.arange(_RESAMPLES)[:, None]
        return np.bincount(flat.ravel(), minlength=_RESAMPLES * size).reshape(_RESAMPLES, size).astype(np.float64)

    members, records = (resampled(size) for size in won.shape)
    weight = ((members @ is_pair) * records).sum(axis=1)
    mean = ((members @ value) * records).sum(axis=1)[weight > 0] / weight[weight > 0]
    low, high = np.quantile(mean, (0.025, 0.975))
    return float(value.sum() / is_pair.sum()), float(mean.std()), float(low), float(high)


def auc_bound(epsilon: float, delta: float) -> float:
    """The largest AUC of a member against a non-member under (epsilon, delta)-DP: 1 - e^-epsilon * (1/2 - delta)."""
    epsilon, delta = real("epsilon", epsilon, at_least=0.0), real("delta", delta, at_least=0.0, at_most=1.0)
    return min(1.0, 1.0 - math.exp(-epsilon) * (0.5 - delta))


def draw(results: Sequence[MembershipResult], path: str | Path) -> None:
    """Draw every AUC with its interval, what the plan proves, and the line of an attacker who knows nothing."""
    points = [
        (each.name, each.attack, 100 * each.auc, 100 * each.low, 100 * each.high, each.bound and 100 * each.bound)
        for each in results
    ]
    draw_auc(points, f"1 member against {results[0].against}, {results[0].trials} trials", path)
