"""Run the membership attack on a real model: on a prompt, on a mixture, and on a private mixture.

For public data alone: it shows answers that are not private. See :mod:`langchain_dpicl.audit.membership_attack` for the
game, the attackers, and what a plan proves about them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from langchain_dpicl.audit.membership_attack import (
    ATTACKS,
    Crowd,
    Mixture,
    Scores,
    Terms,
    auc_bound,
    interval,
    mixture_scores,
    prompt_scores,
    wins,
)
from langchain_dpicl.audit.membership_reading import Known, Readings, read
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.mixing import Settings
from langchain_dpicl.decoding.template import DemonstrationTemplate
from langchain_dpicl.errors import InvalidParameter, InvalidRecords
from langchain_dpicl.plots.audit import draw_auc
from langchain_dpicl.privacy import LineRequest, PlanLine, PrivacyPlan
from langchain_dpicl.privacy.accountant import PLDAccountant
from langchain_dpicl.privacy.checks import open_unit, positive, real, whole
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness

_NO_BOUND = 1e6  # nats: no term is ever cut


@dataclass(frozen=True)
class MembershipResult:
    """What one attack reached against one way to answer.

    Parameters
    ----------
    name, attack
        How the answers are made; what the attacker sees and computes, one of ``ATTACKS``.
    epsilon, range_bound
        Of the plan, and its B; None without privacy.
    participation
        The probability with which the member takes part in a token.
    auc, low, high
        The mean AUC of the trials and its 95 % interval (`membership_attack.interval`).
    bound
        The plan's bound on the expected AUC; None if it has none.
    trials, against, plays
        How many records took the member's place, how many non-members stood against each, and how often.
    """

    name: str
    attack: str
    epsilon: float | None
    range_bound: float | None
    participation: float
    auc: float
    low: float
    high: float
    bound: float | None
    trials: int
    against: int
    plays: int


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

    Of the public ``rows``, each an owner's, ``against + 1`` are drawn. ``trials`` of them take the member's place one
    after the other, the rest being non-members. A data set has ``owners`` owners: the member, and others who each show
    one of ``others`` further rows. The rate is ``shots / owners``, kappa is ``shots``, and a plan counts ``max_tokens``
    tokens for each of the ``against + 1`` queries: all that the attacker sees in a trial. Against each plan the member
    takes part at the rate, as promised, and once more in every token, for which the plan promises nothing: that tells
    the effect of the sample from that of the bound on the range.

    The time goes into reading ``trials + others`` demonstrations before ``against + 1`` outputs each. Every trial is
    then played ``plays`` times with fresh coins and tokens; each play has all of the plan's tokens to itself.

    Raises
    ------
    InvalidParameter
        A parameter outside its bounds, or demonstrations and queries that do not fit the model's context; a template
        whose demonstration does not begin with its query.
    InvalidRecords
        Too few rows, one that the template cannot render, or one without an output.
    InfeasiblePlan
        No range reaches an epsilon.
    """
    against = whole("against", against)
    trials = whole("trials", trials, at_most=against + 1)
    owners = whole("owners", owners, at_least=2)
    others = whole("others", others, at_most=owners - 1)
    rate = real("shots", shots, above=0.0, at_most=float(owners)) / owners
    max_tokens, cap, delta = whole("max_tokens", max_tokens), positive("cap", cap), open_unit("delta", delta)
    plays = whole("plays", plays)
    targets = [positive("epsilons", epsilon) for epsilon in epsilons]
    if not isinstance(model, TransformersLogits):
        raise InvalidParameter("model", type(model).__name__, "a TransformersLogits")
    if not isinstance(template, DemonstrationTemplate):
        raise InvalidParameter("template", type(template).__name__, "a DemonstrationTemplate")
    if len(rows) < against + 1 + others:
        raise InvalidRecords(f"{len(rows)} records; against + 1 + others = {against + 1 + others} are needed")
    request = LineRequest("tokens", rate, (against + 1) * max_tokens)
    lines = [PrivacyPlan.solve(epsilon=e, delta=delta, lines={"tokens": request}).lines["tokens"] for e in targets]

    randomness = SecureRandomness()
    drawn = np.argsort(randomness.uniforms(len(rows)))[: against + 1 + others].tolist()
    known = [known_record(model, template, rows[i], i, max_tokens) for i in drawn]
    pool, crowd = known[: against + 1], known[against + 1 :]
    if not all(model.fits(each.shown, other.asked, max_tokens) for each in known for other in pool):
        raise InvalidParameter("max_tokens", max_tokens, "with a demonstration and a query within the model's context")
    settings = Settings(
        max_tokens=max_tokens,
        min_tokens=0,
        top_k=whole("top_k", top_k, at_most=model.vocabulary),
        shots=shots,
        temperature=1.0,
        cap=cap,
        stop=(),
    )
    shown = [each.shown for each in (*pool[:trials], *crowd)]
    with tqdm(total=len(shown), desc="membership", unit="demonstration", disable=None, file=sys.stderr) as bar:
        readings = read(model, pool, shown, settings, bar.update)
    plans = list(zip(targets, lines, strict=True))
    return attack(readings, plans, Crowd(owners, rate, first=trials), delta, shots, cap, plays, randomness)


def attack(
    readings: Readings,
    plans: Sequence[tuple[float, PlanLine]],
    crowd: Crowd,
    delta: float,
    kappa: float,
    cap: float,
    plays: int,
    randomness: Randomness,
) -> list[MembershipResult]:
    """Every attack on every way to answer; the first ``crowd.first`` records take the member's place in turn."""
    results: list[MembershipResult] = []

    def add(name: str, scores: Callable[[int], Scores], times: int = 1, **facts: Any) -> None:
        trials = [[scores(member) for _ in range(times)] for member in range(crowd.first)]
        for kind in trials[0][0]:
            won = np.stack([np.mean([wins(s[kind], i) for s in played], axis=0) for i, played in enumerate(trials)])
            auc, low, high = interval(won, randomness)
            about = {"epsilon": None, "range_bound": None, "participation": 1.0, **facts}
            about["bound"] = about.get("bound") if kind == ATTACKS[-1] else None
            counts = {"trials": crowd.first, "against": readings.records - 1, "plays": times}
            results.append(MembershipResult(name, kind, auc=auc, low=low, high=high, **about, **counts))

    def mix(name: str, mixture: Mixture, **facts: Any) -> None:
        terms = Terms(readings, mixture)
        add(name, lambda member: mixture_scores(readings, terms, mixture, crowd, member, randomness), plays, **facts)

    add("one-shot prompt, not private", lambda member: prompt_scores(readings, member))
    mix("mixture without clipping, not private", Mixture(_NO_BOUND, 1.0, kappa, 1.0))
    for epsilon, line in plans:
        bound = line.parameter
        distance = PLDAccountant().delta([line.line(bound)], 0.0)
        facts = {"epsilon": epsilon, "range_bound": bound}
        proved = min(auc_bound(epsilon, delta), auc_bound(0.0, min(1.0, distance)))
        sampled = Mixture(bound, cap, kappa, crowd.rate)
        mix(f"epsilon {epsilon:g}", sampled, participation=crowd.rate, bound=proved, **facts)
        mix(f"B of epsilon {epsilon:g}, member in every sample", Mixture(bound, cap, kappa, 1.0), **facts)
    return results


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


def draw(results: Sequence[MembershipResult], path: str | Path) -> None:
    """Draw every AUC with its interval, what the plan proves, and the line of an attacker who knows nothing."""
    points = [
        (each.name, each.attack, 100 * each.auc, 100 * each.low, 100 * each.high, each.bound and 100 * each.bound)
        for each in results
    ]
    draw_auc(points, f"1 member against {results[0].against}, {results[0].trials} trials", path)
