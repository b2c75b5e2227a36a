"""Votes on what members said: streams of queries with coins and tickets, every mechanism's noise, tables, a picture.

The noise is `PrivacyPlan.solve`'s and the releases are the aggregators' own. Drawn here are the coins, afresh for every
query, equal ones too: nothing is replayed. An owner is eligible if it is behind the query's gate and has a ticket left;
it burns one, sampled or not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gated_votes import Ints
from numpy.typing import NDArray

from langchain_dpicl.aggregators.votes import NoisyVote
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.evaluation.scores import Score, Value
from langchain_dpicl.lab.plots import COLORS, GREY, new_figure, save_figure
from langchain_dpicl.privacy import PrivacyPlan
from langchain_dpicl.privacy.choice import Crowd, best_vote, options_of
from langchain_dpicl.privacy.lines import LineRequest
from langchain_dpicl.privacy.noise import Randomness
from langchain_dpicl.privacy.votes import EXPONENTIAL, GAUSSIAN

_ASKED = 20
"""How often each question is asked at least, over all streams."""

PUBLIC, NO_NOISE = "public prompt", "no noise"


@dataclass(frozen=True)
class Question:
    """What there is of one query; labels by their positions.

    Attributes
    ----------
    eligible
        The owners behind the gate.
    drawn, votes
        Some of these, drawn uniformly, in the order in which they were drawn; what a call with each one's example says.
    public
        The labels' probabilities after the public prompt.
    right
        The right label.
    """

    eligible: Ints
    drawn: Ints
    votes: Ints
    public: NDArray[np.float64]
    right: int


class Workload(NamedTuple):
    """So many queries, the share of public texts that their gate admits, and the tickets of an owner."""

    queries: int
    share: float
    tickets: int

    @classmethod
    def of(cls, text: str) -> Workload:
        """From QUERIES:SHARE:TICKETS. Raises `InvalidParameter` for anything else."""
        try:
            queries, share, tickets = text.split(":")
            found = cls(int(queries), float(share), int(tickets))
        except ValueError:
            found = cls(0, 0.0, 0)
        if not (found.queries > 0 and 0 < found.share <= 1 and found.tickets > 0):
            raise InvalidParameter("workload", text, "QUERIES:SHARE:TICKETS, all above 0, a share of at most 1")
        return found


class Method(NamedTuple):
    """A vote: whose outputs count (`CALLS`, `BUCKETS` or `OWN`), its mechanism, and whether it has a prior."""

    name: str
    source: str
    mechanism: str
    prior: bool = False


CALLS, BUCKETS, OWN = "calls", "buckets", "labels"
METHODS = (
    Method("shared buckets, Gaussian", BUCKETS, GAUSSIAN),
    Method("Gaussian", CALLS, GAUSSIAN),
    Method("Gaussian, prior", CALLS, GAUSSIAN, True),
    Method("exponential", CALLS, EXPONENTIAL),
    Method("exponential, prior", CALLS, EXPONENTIAL, True),
    Method("label vote", OWN, EXPONENTIAL),
    Method("label vote, prior", OWN, EXPONENTIAL, True),
)
"""Buckets are the older way: empty ones give the public answer, and an owner replaces one output. A label vote calls no
model; its prior is the public prompt's answer, which is a call."""


class Blocks:
    """A `Randomness` whose Gaussian noise is drawn in blocks, which takes a fortieth of the time."""

    def __init__(self, randomness: Randomness) -> None:
        self.coin_positions, self.integers, self.uniforms = (
            randomness.coin_positions,
            randomness.integers,
            randomness.uniforms,
        )
        self._gaussians, self._left = randomness.discrete_gaussian, dict[float, Ints]()

    def discrete_gaussian(self, sigma: float, size: int) -> Ints:
        """`size` numbers that no other call gets."""
        left = self._left.get(sigma, np.empty(0, np.int64))
        if len(left) < size:
            left = np.concatenate([left, self._gaussians(sigma, max(size, 4096))])
        found, self._left[sigma] = left[:size], left[size:]
        return found


@dataclass(frozen=True)
class Study:
    """The questions, and what all plans share.

    Attributes
    ----------
    labels
        The list of labels.
    label_of
        The label of every owner's own example.
    calls
        How many owners are expected in calls, and how many shared buckets there are. Twice as many owners are expected
        in the buckets.
    """

    labels: Sequence[str]
    label_of: Ints
    calls: int
    delta: float
    randomness: Randomness

    def crowd(self, source: str, load: Workload) -> tuple[float, Crowd]:
        """The rate, and the public numbers of a release's outputs."""
        eligible = load.share * len(self.label_of)
        if source == OWN:
            return 1.0, Crowd(math.ceil(eligible), eligible, own_calls=True)
        if source == BUCKETS:
            return min(1.0, 2 * self.calls / eligible), Crowd(self.calls, self.calls)
        rate = min(1.0, self.calls / eligible)
        return rate, Crowd(2 * self.calls, rate * eligible, own_calls=True)

    def streams(self, questions: Sequence[Question], load: Workload) -> list[tuple[Ints, dict[str, Ints]]]:
        """So many streams that each question is asked `_ASKED` times: what is asked, and the counts by source.

        In a stream every question is asked, in any order, before one is asked again. Counts are (queries, labels + 1),
        abstentions last. Of longer streams every so many rounds are kept, for as many answers.
        """
        found, rounds = [], math.ceil(load.queries / len(questions))
        for _ in range(math.ceil(_ASKED * len(questions) / load.queries)):
            orders = [np.argsort(self.randomness.uniforms(len(questions))) for _ in range(rounds)]
            asked = np.concatenate(orders)[: load.queries]
            tickets = np.full(len(self.label_of), load.tickets)
            counts = {source: np.zeros((load.queries, len(self.labels) + 1), np.int64) for source in _SOURCES}
            for time, number in enumerate(asked.tolist()):
                question = questions[number]
                taking = question.eligible[tickets[question.eligible] > 0]
                known = question.votes[tickets[question.drawn] > 0]
                tickets[taking] -= 1
                for source, rows in counts.items():
                    rate, crowd = self.crowd(source, load)
                    if source == OWN:
                        said = self.label_of[taking]
                    else:
                        said = self._sample(known, len(self.randomness.coin_positions(len(taking), rate)))
                    if source == BUCKETS:
                        filled = len(set(self.randomness.integers(crowd.members, len(said)).tolist()))
                        empty = np.full(crowd.members - filled, question.public.argmax())
                        said = np.concatenate([said[:filled], empty])
                    rows[time] = np.bincount(said, minlength=len(self.labels) + 1)
            kept = np.arange(load.queries) // len(questions) % max(1, rounds // _ASKED) == 0
            found.append((asked[kept], {source: rows[kept] for source, rows in counts.items()}))
        return found

    def _sample(self, known: Ints, size: int) -> Ints:
        """So many of the votes that were read, without replacement as far as they go. Order means nothing in them."""
        order = np.argsort(self.randomness.uniforms(len(known)))
        more = self.randomness.integers(len(known), max(0, size - len(known))) if len(known) else order
        found: Ints = known[np.concatenate([order, more])[:size]]
        return found

    def scores(
        self, questions: Sequence[Question], load: Workload, epsilons: Sequence[float], among: str = ""
    ) -> list[Score]:
        """Every method's accuracy, with its standard error over questions; first the public prompt's.

        ``among`` says which questions they are, if they are not all.
        """
        right = np.array([question.right for question in questions])
        study = f"{load.queries:,} questions, {load.tickets:,} tickets{among}"
        streams = self.streams(questions, load)
        public = np.array([question.public.argmax() for question in questions]) == right
        held = [Score(PUBLIC, None, {"accuracy": Value.of([public])}, 1, len(public), {}, study)]
        for source in _SOURCES:
            shares = _by_question(
                [(asked, _won(counts[source], right[asked])) for asked, counts in streams], len(right)
            )
            mean = {"votes": float(np.mean([counts[source].sum(axis=1).mean() for _, counts in streams]))}
            held.append(_score(f"{source}, {NO_NOISE}", None, shares, public, mean, study, len(streams)))
        blocks = Blocks(self.randomness)
        best = next(score for score in held if score.method == f"{CALLS}, {NO_NOISE}").mean("accuracy")
        for method in METHODS:
            rate, crowd = self.crowd(method.source, load)
            votes = [self._vote(method, crowd, question) for question in questions]
            for epsilon in epsilons:
                request = LineRequest(method.mechanism, rate, load.tickets, options=options_of(crowd))
                line = PrivacyPlan.alone(request, epsilon=epsilon, delta=self.delta)
                rows = []
                for asked, counts in streams:
                    answers = [
                        votes[number].draw(row, crowd, line.parameter, blocks)
                        for number, row in zip(asked.tolist(), counts[method.source], strict=True)
                    ]
                    truth = [self.labels[number] for number in right[asked].tolist()]
                    rows.append((asked, np.array(answers, object) == np.array(truth, object)))
                facts: dict[str, float] = {"q": rate, line.family.parameter: line.parameter}
                score = _score(method.name, epsilon, _by_question(rows, len(right)), public, facts, study, len(rows))
                gain = best - held[0].mean("accuracy")
                kept = (score.mean("accuracy") - held[0].mean("accuracy")) / gain if gain > 0 else math.nan
                held.append(Score(**{**vars(score), "facts": {**score.facts, "kept": kept}}))
        return held

    def chosen(self, load: Workload, epsilons: Sequence[float]) -> dict[float, str]:
        """The mechanism that a plan takes for calls, by epsilon."""
        rate, crowd = self.crowd(CALLS, load)
        return {e: best_vote(e, self.delta, load.tickets, rate, crowd, len(self.labels)) for e in epsilons}

    def _vote(self, method: Method, crowd: Crowd, question: Question) -> NoisyVote:
        prior = dict(zip(self.labels, question.public.tolist(), strict=True)) if method.prior else None
        return NoisyVote(self.labels, prior=prior).under(method.mechanism, crowd)


_SOURCES = (CALLS, OWN, BUCKETS)


def _won(counts: Ints, right: Ints) -> NDArray[np.float64]:
    """Without noise. A tie of t labels that has the right one counts 1/t: a release draws among them."""
    labels = counts[:, :-1]
    wins = labels == labels.max(axis=1, keepdims=True)
    share: NDArray[np.float64] = wins[np.arange(len(right)), right] / wins.sum(axis=1)
    return share


def _by_question(rows: Sequence[tuple[Ints, NDArray[Any]]], questions: int) -> NDArray[np.float64]:
    """Each question's mean over all streams; every question is in one of them."""
    asked, values = (np.concatenate(each) for each in zip(*rows, strict=True))
    found: NDArray[np.float64] = np.bincount(asked, values, questions) / np.bincount(asked, minlength=questions)
    return found


def _score(
    method: str,
    epsilon: float | None,
    shares: NDArray[np.float64],
    public: NDArray[np.bool_],
    facts: dict[str, float],
    study: str,
    runs: int,
) -> Score:
    """With the lead over the public prompt, and its standard error over questions, as pairs."""
    apart = Value.of([shares - public])
    facts = {**facts, "lead": apart.mean, "error of lead": apart.error}
    return Score(method, epsilon, {"accuracy": Value.of([shares])}, runs, len(shares), facts, study)


# -- what is written ---------------------------------------------------------------------------------------------------


def write(folder: Path, task: str, groups: Sequence[Sequence[Score]], settings: dict[str, Any]) -> dict[str, Any]:
    """``results.json``, ``table.md`` and the picture; one group of scores for each table. Return the results."""
    titles = [group[0].study for group in groups]
    first = groups[0]
    parts = []
    for title, group in zip(titles, groups, strict=True):
        parts += [f"**{title}**", table(group)]
    parts.append(_NOTE)
    results: dict[str, Any] = {
        "task": task,
        "measured": f"{task} with {settings['model']}: {first[0].queries:,} questions, delta {settings['delta']:.3g}.",
        "finding": finding(first),
        "table": "\n\n".join(parts),
        "pictures": ["votes.png"],
        "settings": settings,
        "scores": [asdict(score) for group in groups for score in group],
    }
    text = json.dumps(results, default=str)
    results = json.loads(text, parse_constant=lambda _: None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(f"# {task}\n\n{results['finding']}\n\n{results['table']}\n", encoding="utf-8")
    _draw(groups, folder / "votes.png")
    return results


_NOTE = (
    "In per cent, ± the standard error over questions. Kept: the share of the gain of calls without noise over the "
    "public prompt. Above public: by how many points, with the standard error of the pairs."
)


def finding(group: Sequence[Score]) -> str:
    """How much of the votes' gain over the public prompt the best vote of calls keeps, in words."""
    public, plain = group[0], next(score for score in group if score.method == f"{CALLS}, {NO_NOISE}")
    parts = [
        f"Public prompt {_cell(public)}, calls without noise {_cell(plain)} (± standard error over questions; "
        f"{public.study})."
    ]
    names = [method.name for method in METHODS if method.source == CALLS]
    for epsilon in sorted({score.epsilon for score in group if score.epsilon is not None}):
        best = max(
            (s for s in group if s.epsilon == epsilon and s.method in names), key=lambda score: score.mean("accuracy")
        )
        kept = f", {best.facts['kept']:.2f} of the gain" if math.isfinite(best.facts["kept"]) else ""
        parts.append(f"At epsilon {epsilon:g} the best vote of calls, {best.method}, has {_cell(best)}{kept}.")
    return " ".join(parts)


def table(group: Sequence[Score]) -> str:
    """A row for each method: accuracy, the share of the gain that is kept, the lead over the public prompt, noise."""
    epsilons = sorted({score.epsilon for score in group if score.epsilon is not None})
    known = {(score.method, score.epsilon): score for score in group}
    head = ["method", NO_NOISE, *(f"epsilon {e:g}" for e in epsilons)]
    head += [*(f"kept at {e:g}" for e in epsilons), *(f"above public at {e:g}" for e in epsilons), "q; noise"]
    empty = [""] * (3 * len(epsilons) + 1)
    plain = {method.source: known[f"{method.source}, {NO_NOISE}", None] for method in METHODS}
    rows = [[PUBLIC, _cell(known[PUBLIC, None]), *empty]]
    for method in METHODS:
        scores = [known[method.name, epsilon] for epsilon in epsilons]
        kept = [f"{s.facts['kept']:.2f}" if math.isfinite(s.facts["kept"]) else "" for s in scores]
        leads = [f"{s.facts['lead']:+.1f} ± {s.facts['error of lead']:.1f}" for s in scores]
        word = "eps0" if method.mechanism == EXPONENTIAL else "sigma"
        noise = f"{scores[0].facts['q']:.3g}; {word} {', '.join(f'{s.facts[word]:.3g}' for s in scores)}"
        rows.append([method.name, _cell(plain[method.source]), *map(_cell, scores), *kept, *leads, noise])
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _cell(score: Score) -> str:
    value = score.values["accuracy"]
    return f"{value.mean:.1f} ± {value.error:.1f}"


def _draw(groups: Sequence[Sequence[Score]], path: Path) -> None:
    """A panel for each workload: every method's accuracy by epsilon, with two standard errors to either side."""
    columns, rows = min(2, len(groups)), math.ceil(len(groups) / 2)
    figure = new_figure(path, 4.6 * columns + 1.5, 3.6 * rows + 0.6)
    names = [method.name for method in METHODS][::-1]
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    for axes, group in zip(panels, groups, strict=False):
        epsilons = sorted({score.epsilon for score in group if score.epsilon is not None})
        for i, (epsilon, color) in enumerate(zip(epsilons, COLORS, strict=False)):
            scores = {score.method: score.values["accuracy"] for score in group if score.epsilon == epsilon}
            places = [place + 0.16 * (len(epsilons) / 2 - 0.5 - i) for place in range(len(names))]
            means, errors = [scores[n].mean for n in names], [2 * scores[n].error for n in names]
            axes.errorbar(
                means, places, xerr=errors, fmt="o", color=color, capsize=3, markersize=4, label=f"epsilon {epsilon:g}"
            )
        for score, style in zip(group[:2], ("--", "-"), strict=True):
            axes.axvline(score.mean("accuracy"), color=GREY, linestyle=style, linewidth=1.2, label=score.method)
        axes.set(xlabel="accuracy, %", title=group[0].study)
        axes.set_yticks(range(len(names)), names)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    save_figure(figure, path)
