"""What gated selection brings: both sides' answers to workloads and to a stream, as scores, tables and pictures."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gated_pictures import draw_stream
from gated_stream import (
    Ints,
    Question,
    Side,
    Walk,
    released,
    walk_blind,
    walk_gated,
    zipf_stream,
)
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.evaluation.report import write_report
from langchain_dpicl.evaluation.scores import Score, Value
from langchain_dpicl.evaluation.tasks import ClassificationTask
from langchain_dpicl.plots import save_figure
from langchain_dpicl.privacy import PrivacyPlan
from langchain_dpicl.privacy.mechanisms import LineRequest
from langchain_dpicl.privacy.noise import Randomness

_WINDOWS = 20  # pieces of a stream's time


@dataclass(frozen=True)
class Plans:
    """What both sides promise and spend alike: owners, calls of the model for each query, and delta."""

    owners: int
    members: int
    delta: float

    def blind(self, queries: int, epsilon: float) -> Side:
        """A plan for so many queries, with one owner expected in each member."""
        return self._side(min(1.0, self.members / self.owners), queries, epsilon)

    def gated(self, load: Workload, epsilon: float) -> Side:
        """A plan with tickets: each for one query for which its owner is eligible."""
        rate = min(1.0, load.fill * self.members / (load.share * self.owners))
        return self._side(rate, max(1, math.ceil(load.tickets * load.queries * load.share)), epsilon)

    def _side(self, rate: float, releases: int, epsilon: float) -> Side:
        request = LineRequest("vote", rate, releases)
        plan = PrivacyPlan.solve(epsilon=epsilon, delta=self.delta, lines={"vote": request})
        return Side(self.members, rate, plan.lines["vote"].parameter, releases)


@dataclass(frozen=True)
class Workload:
    """So many queries that both plans are made for, and how the gated one is.

    Parameters
    ----------
    queries
        How many.
    share
        Of public texts that a query's gate admits, so of owners that are eligible: the estimate is public.
    fill
        How many owners are expected in each member.
    tickets
        How many times as many tickets an owner holds as it takes part in on average.
    """

    queries: int
    share: float
    fill: float = 2.0
    tickets: float = 2.0

    @classmethod
    def of(cls, text: str) -> Workload:
        """From QUERIES:SHARE:FILL:TICKETS. Raises `InvalidParameter` for anything else."""
        parts = text.split(":")
        try:
            found = cls(int(parts[0]), *map(float, parts[1:]))
        except (TypeError, ValueError):
            found = None
        if found is None or not (found.queries > 0 and 0 < found.share <= 1 and found.fill > 0 and found.tickets > 0):
            raise InvalidParameter("workload", text, "QUERIES:SHARE:FILL:TICKETS, all above 0, a share of at most 1")
        return found


@dataclass(frozen=True)
class Comparison:
    """Both sides on the same queries.

    Parameters
    ----------
    questions
        What members say, by what there is.
    labels
        How many labels.
    samples, draws
        Runs of coins and buckets, and draws of noise for each.
    """

    questions: Sequence[Question]
    labels: int
    plans: Plans
    randomness: Randomness
    samples: int
    draws: int

    def workload(self, load: Workload, epsilons: Sequence[float], study: str = "") -> list[Score]:
        """Every question as often as every other, in any order; both plans are made for so many queries."""
        queries = load.queries
        right = np.array([question.right for question in self.questions])
        streams = [self._even(queries) for _ in range(self.samples)]
        found = []
        known: dict[tuple[str, float | None], NDArray[np.float64]] = {}  # of each question, over runs
        for method in ("blind", "gated"):

            def side(epsilon: float, method: str = method) -> Side:
                if method == "blind":
                    return self.plans.blind(queries, epsilon)
                return self.plans.gated(load, epsilon)

            first = side(epsilons[0])
            walks = [self._walk(method, stream, first) for stream in streams]
            about = {"q": first.rate, "tickets" if method == "gated" else "T": first.releases}
            about |= {"queries": queries, "eligible": float(np.mean([walk.eligible.mean() for walk in walks]))}
            about["with example"] = float(np.mean([walk.examples.mean() for walk in walks]))
            plain = [_plain(walk.counts, right[stream]) for walk, stream in zip(walks, streams, strict=True)]
            rows = [self._by_question(row, stream) for row, stream in zip(plain, streams, strict=True)]
            runs: dict[float | None, list[NDArray[np.float64]]] = {None: rows}
            facts: dict[float | None, dict[str, float]] = {None: about}
            for epsilon in epsilons:
                sigma, flips, runs[epsilon] = side(epsilon).sigma, [], []
                for walk, stream in zip(walks, streams, strict=True):
                    for _ in range(self.draws):
                        answers = released(walk.counts, self.plans.members, sigma, self.randomness)
                        runs[epsilon].append(self._by_question(answers == right[stream], stream))
                        flips.append((answers != walk.counts[:, :-1].argmax(axis=1)).mean())
                facts[epsilon] = about | {"sigma": sigma, "flipped": 100 * float(np.mean(flips))}
            for key, each in runs.items():
                known[method, key] = np.mean(each, axis=0)
                lead = _lead(known[method, key] - known["blind", key]) if method == "gated" else {}
                found.append(_score(method, key, each, facts[key] | lead, study))
        return found

    def stream(
        self, length: int, exponent: float, epsilon: float, sides: dict[str, Side], repeats: int
    ) -> dict[str, Any]:
        """Accuracy and tickets along streams by Zipf's law, each with its own order of popularity."""
        right = np.array([question.right for question in self.questions])
        empty = np.array([question.empty for question in self.questions])
        edges = np.linspace(0, length, _WINDOWS + 1).astype(int)
        held: dict[str, list[NDArray[np.float64]]] = {f"{name} {what}": [] for name in sides for what in _WHAT}
        public = []
        for _ in range(repeats):
            order = np.argsort(self.randomness.uniforms(len(self.questions)))
            asked = order[zipf_stream(len(order), length, exponent, self.randomness)]
            public.append(_windows((empty == right)[asked].astype(float), edges))
            for name, side in sides.items():
                walk = self._walk("blind" if name.startswith("blind") else "gated", asked, side)
                answers = released(walk.counts, side.members, side.sigma, self.randomness)
                is_right = (answers == right[asked]).astype(float)
                is_right[walk.answered :] = np.nan
                share = walk.taking_part / np.maximum(walk.eligible, 1)
                measures = (is_right, walk.holding / self.plans.owners, np.where(walk.eligible > 0, share, np.nan))
                for what, values in zip(_WHAT, measures, strict=True):
                    held[f"{name} {what}"].append(_windows(values, edges))
        curves = {
            name: {what: [_mean(column) for column in np.array(held[f"{name} {what}"]).T] for what in _WHAT}
            | {"plan": {"q": side.rate, "T": side.releases, "sigma": side.sigma}}
            for name, side in sides.items()
        }
        runs = {name: [_mean(row) for row in held[f"{name} accuracy"]] for name in sides}
        ends = {"queries": edges[1:].tolist(), "epsilon": epsilon, "exponent": exponent, "repeats": repeats}
        return {**ends, "public": [_mean(column) for column in np.array(public).T], "sides": curves, "runs": runs}

    def _walk(self, method: str, stream: Ints, side: Side) -> Walk:
        walk = walk_blind if method == "blind" else walk_gated
        return walk(self.questions, stream, side, self.plans.owners, self.labels, self.randomness)

    def _even(self, queries: int) -> Ints:
        stream = np.arange(queries) % len(self.questions)
        return stream[np.argsort(self.randomness.uniforms(queries))]

    def _by_question(self, values: NDArray[Any], stream: Ints) -> NDArray[np.float64]:
        """The mean over each question's queries."""
        count = np.bincount(stream, minlength=len(self.questions))
        found: NDArray[np.float64] = np.bincount(stream, values, len(self.questions)) / np.maximum(count, 1)
        return found[count > 0]


_WHAT = ("accuracy", "holding", "taking part")


def report(
    chosen: ClassificationTask,
    comparisons: Callable[[float], Comparison],
    alone: Sequence[NDArray[np.bool_]],
    options: argparse.Namespace,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Run both sides and write everything into the folder; ``comparisons`` is one for each share of the gate.

    ``alone`` says for which queries the prompt without a private example is right, plain and calibrated.
    """
    loads = [Workload.of(text) for text in options.workload]
    names = ("zero-shot", "zero-shot calibrated")
    scores = [_score(name, None, [right], {}) for name, right in zip(names, alone, strict=True)]
    scores += comparisons(loads[0].share).workload(loads[0], options.epsilon)
    for load in sorted(loads, key=lambda load: load.queries):
        scores += comparisons(load.share).workload(load, [options.stream_epsilon], "queries")
    load = Workload.of(options.stream)
    chosen_one = comparisons(load.share)
    plans = chosen_one.plans
    settings = {**settings, "members": plans.members, "delta": plans.delta, "workloads": options.workload}
    results = write_report(options.output, chosen, scores, settings)
    results["finding"] = " ".join([*_against(scores, options.stream_epsilon), results["finding"]])
    epsilon, length = options.stream_epsilon, load.queries
    gated = plans.gated(load, epsilon)
    sides = {"gated": gated}
    sides |= {f"blind, T {n:,}": plans.blind(n, epsilon) for n in sorted({gated.releases, length}) if n <= length}
    stream = chosen_one.stream(length, options.zipf, epsilon, sides, options.streams)
    results["stream"] = stream | {"share": load.share}
    results["finding"] += " " + _said_of(stream)
    save_figure(draw_stream(chosen.name, stream), options.output / "stream.png")
    results["pictures"] = ["accuracy.png", "stream.png", "queries.png"]
    text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
    (options.output / "results.json").write_text(text + "\n", encoding="utf-8")
    path: Path = options.output / "table.md"
    path.write_text(f"{path.read_text('utf-8')}\n{stream_table(stream)}\n", encoding="utf-8")
    return results


def stream_table(stream: dict[str, Any]) -> str:
    """The stream in Markdown: a row for each piece of time."""
    sides = stream["sides"]
    head = ["queries so far", "public alone", *(f"{name}, accuracy" for name in sides)]
    head += ["owners with tickets", "eligible ones with tickets"]
    rows = []
    for i, end in enumerate(stream["queries"]):
        cells = [f"{end:,}", _cell(stream["public"][i]), *(_cell(side["accuracy"][i]) for side in sides.values())]
        rows.append([*cells, _cell(sides["gated"]["holding"][i]), _cell(sides["gated"]["taking part"][i])])
    plans = "; ".join(
        f"{name}: q {side['plan']['q']:.3g}, T {side['plan']['T']:,}, sigma {side['plan']['sigma']:.3g}"
        for name, side in sides.items()
    )
    lines = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]
    note = f"In per cent, at epsilon {stream['epsilon']:g}, means of {stream['repeats']} streams. {plans}."
    return "\n".join(["## The stream", "", *lines, "", note])


def _lead(apart: NDArray[np.float64]) -> dict[str, float]:
    """By how many points gated answers are better, and the standard error of that over queries, as pairs."""
    error = 100 * float(apart.std(ddof=1)) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
    return {"lead": 100 * float(apart.mean()), "error of lead": error}


def _against(scores: Sequence[Score], epsilon: float) -> list[str]:
    """How far apart the two sides are."""
    facts = [s.facts for s in scores if (s.method, s.epsilon, s.study) == ("gated", epsilon, "")]
    return [
        f"At epsilon {epsilon:g}, for {each['queries']:,.0f} queries, gated selection is {abs(each['lead']):.1f} "
        f"points {'above' if each['lead'] >= 0 else 'below'} blind selection (standard error over queries "
        f"{each['error of lead']:.1f})."
        for each in facts
    ]


def _said_of(stream: dict[str, Any]) -> str:
    gated, length = stream["sides"]["gated"], stream["queries"][-1]
    means = {name: _mean(np.array(runs, float)) for name, runs in stream["runs"].items()}
    others = ", ".join(f"{name}, {means[name]:.1f}" for name in means if name != "gated")
    return (
        f"In a stream of {length:,} queries (Zipf, exponent {stream['exponent']:g}) gated selection with "
        f"{gated['plan']['T']:,} tickets has {means['gated']:.1f} in all, {gated['accuracy'][0]:.1f} in the first "
        f"twentieth and {gated['accuracy'][-1]:.1f} in the last, where {gated['holding'][-1]:.0f} % of owners hold "
        f"tickets and {gated['taking part'][-1]:.0f} % of a query's eligible ones; while it answers: {others}; "
        f"the public prompt alone {_mean(np.array(stream['public'], float)):.1f}."
    )


def _plain(counts: Ints, right: Ints) -> NDArray[np.float64]:
    """Without noise. A tie of t labels that has the right one counts 1/t: a release draws among them."""
    labels = counts[:, :-1]
    wins = labels == labels.max(axis=1, keepdims=True)
    share: NDArray[np.float64] = wins[np.arange(len(right)), right] / wins.sum(axis=1)
    return share


def _score(
    method: str, epsilon: float | None, rows: Sequence[NDArray[Any]], facts: dict[str, float], study: str = ""
) -> Score:
    return Score(
        method, epsilon, {"accuracy": Value.of([row.tolist() for row in rows])}, len(rows), len(rows[0]), facts, study
    )


def _windows(values: NDArray[np.float64], edges: NDArray[Any]) -> NDArray[np.float64]:
    """Means in per cent of what is known in each piece of time; NaN where nothing is."""
    pieces = [values[low:high] for low, high in zip(edges[:-1], edges[1:], strict=True)]
    return np.array([100 * np.nanmean(p) if np.isfinite(p).any() else math.nan for p in pieces])


def _mean(values: NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return round(float(known.mean()), 3) if len(known) else None


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
