"""An evaluation's numbers in words: tables in Markdown, and sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from langchain_dpicl.evaluation.scores import Score, Value
from langchain_dpicl.evaluation.tasks import Task

MEASURES: Mapping[str, str] = {
    "accuracy": "accuracy",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "bleu": "BLEU",
    "levenshtein": "Levenshtein",
    "meaning": "meaning",
}
"""Measures in the order of the tables, with their names there."""

_PAPERS_NAMES = {"ESA": "embedding", "DPS-MOZO": "online"}
_AGAINST_FEW_SHOT = " minus non-private few-shot"


def main_measure(scores: Sequence[Score]) -> str:
    """Accuracy, or ROUGE-L."""
    return "accuracy" if "accuracy" in scores[0].values else "rougeL"


def words_of(score: Score, private: Collection[str]) -> str:
    """A score's epsilon in words. Without one, only a prompt that holds no private example is public."""
    if score.epsilon is not None:
        return f"epsilon {score.epsilon:g}"
    is_public = score.method.startswith(("zero-shot", "public ")) and score.method not in private
    return "public" if is_public else "not private"


def ordered(scores: Sequence[Score]) -> list[Score]:
    """Methods that are never private first; then each other method, first without noise, then by epsilon."""
    private = {score.method for score in scores if score.epsilon is not None}
    first = list(dict.fromkeys(score.method for score in scores))
    return sorted(
        scores, key=lambda s: (s.method in private, first.index(s.method), -1.0 if s.epsilon is None else s.epsilon)
    )


def findings(main: Sequence[Score], measure: str) -> list[str]:
    """The best private method at the least epsilon, then everything that speaks against it: sentences.

    That is: methods to which examples bring nothing, or nothing certain, or less than the noise takes.
    """
    private = [(s.epsilon, s) for s in main if s.epsilon is not None]
    least = min(epsilon for epsilon, _ in private)
    best = max((s for epsilon, s in private if epsilon == least), key=lambda s: s.mean(measure))
    zeros = [_find(main, name, None) for name in ("zero-shot", "zero-shot calibrated")]
    zero = max((each for each in zeros if each), key=lambda s: s.mean(measure), default=None)
    level, apart = best.mean(measure), []
    for other in (_find(main, best.method, None), zero):
        if other:
            words = other.method if other is zero else "its aggregate without noise"
            points = level - other.mean(measure)
            side = f"{abs(points):.1f} points {'below' if points < 0 else 'above'}"
            apart.append(f"{side if abs(points) >= 0.05 else 'level with'} {words} ({other.mean(measure):.1f})")
    compared = f", {' and '.join(apart)}" if apart else ""
    first = f"At epsilon {least:g} the best private method, {best.method}, has {MEASURES[measure]} {level:.1f}"
    said = [f"{first}{compared}."]
    if zero is None:
        return said
    floor = zero.mean(measure)
    plain = [found for m in dict.fromkeys(s.method for _, s in private) if (found := _find(main, m, None))]
    failed = [s for s in plain if s.mean(measure) <= floor]
    gains = [s for s in plain if s not in failed]
    if failed:
        prompts = [s for s in main if re.fullmatch(r"\d+-shot", s.method) and s.mean(measure) > floor]
        place = "Here" if not gains else f"With {_list([s.method for s in failed])},"
        means = _list([f"{s.method} has {s.mean(measure):.1f}" for s in failed])
        more = "".join(f", though one {s.method} prompt has {s.mean(measure):.1f}" for s in prompts[:1])
        said.append(
            f"{place} {'the ensemble' if prompts else 'the model'} learns nothing from the examples: without noise "
            f"{means}, {zero.method} {floor:.1f}{more}."
        )
    unsure, lost = [], []
    for score in gains:
        gain, error = score.mean(measure) - floor, math.hypot(score.values[measure].error, zero.values[measure].error)
        unsure += [f"{score.method} {gain:.1f} ({error:.1f})"] if gain < 2 * error else []
        epsilons = [f"{e:g}" for e, s in private if s.method == score.method and s.mean(measure) <= floor]
        lost += [f"{score.method} at epsilon {_list(epsilons)}"] if epsilons else []
    if unsure:
        said.append(
            f"By how many points the examples help without noise may be chance: {_list(unsure)}; in brackets the "
            f"standard error over queries, were the two methods independent."
        )
    if lost:
        said.append(f"Noise takes all that the examples bring, and {zero.method} is as good: {'; '.join(lost)}.")
    return said


def main_table(main: Sequence[Score], measure: str, said: Mapping[str, Any]) -> str:
    """A row for each method and epsilon. The numbers in `said`, which stand elsewhere, are not repeated."""
    measures = [name for name in MEASURES if name in main[0].values]
    private = {score.method for score in main if score.epsilon is not None}
    rows = []
    for score in main:
        base = _find(main, score.method, None) if score.epsilon is not None else None
        facts = {k: v for k, v in score.facts.items() if k not in ("flipped", "epsilon") and said.get(k) != v}
        cells = [words_of(score, private).removeprefix("epsilon "), *(_cell(score.values[name]) for name in measures)]
        flipped = f"{score.facts['flipped']:.1f} %" if "flipped" in score.facts else ""
        numbers = ", ".join(f"{name} {number(value)}" for name, value in facts.items())
        rows.append([score.method, *cells, _difference(score, base, measure), flipped, numbers])
    head = ["method", "epsilon", *(MEASURES[name] for name in measures)]
    head += ["against no noise", "changed by noise", "public numbers"]
    errors = [s.values[measure].error for s in main]
    note = "In per cent; ± is the standard deviation over runs (samples of owners, draws of noise)."
    if known := [error for error in errors if math.isfinite(error)]:
        note += f" The standard error of {MEASURES[measure]} over queries is at most {max(known):.1f}."
    return f"{_table(head, rows)}\n\n{note}"


def study_table(study: str, scores: Sequence[Score], measure: str) -> str:
    """An ablation: a row for each varied value, a column for each method and epsilon."""
    held = ordered([score for score in scores if score.study == study])
    kinds = {(score.method, score.epsilon): f"{score.method}, {words_of(score, ())}" for score in held}
    cells = {(s.method, s.epsilon, s.facts[study]): _cell(s.values[measure]) for s in held}
    varied = sorted({score.facts[study] for score in held})
    rows = [[number(value), *(cells.get((*kind, value), "") for kind in kinds)] for value in varied]
    words = study.replace("_", " ")
    return f"## {MEASURES[measure]} against {words}\n\n{_table([words, *kinds.values()], rows)}"


def papers_table(task: Task, main: Sequence[Score]) -> str:
    """The loss against answers that are not private, theirs and ours, if both are known at the same epsilon."""
    rows: list[list[str]] = []
    sources: dict[str, None] = {}
    measure_of = {word: measure for measure, word in MEASURES.items()}
    few_shot = next((s for s in main if re.fullmatch(r"\d+-shot", s.method)), None)
    plain = {(f.source, f.metric, f.method): f.value for f in task.paper if f.epsilon is None}
    for figure in (figure for figure in task.paper if figure.epsilon is not None):
        is_loss = figure.metric.endswith(_AGAINST_FEW_SHOT)
        word = figure.metric.removesuffix(_AGAINST_FEW_SHOT)
        measure, method = measure_of[word], _PAPERS_NAMES.get(figure.method, figure.method)
        ours = _find(main, method, figure.epsilon)
        base = few_shot if is_loss else _find(main, method, None)
        theirs = plain.get((figure.source, figure.metric, f"{figure.method} without noise"))
        if not ours or not base or (theirs is None and not is_loss):
            continue
        loss = f"{figure.value:+.1f}" if is_loss else f"{figure.value - (theirs or 0.0):+.1f} ({figure.value:.1f})"
        against = f"{base.method} prompt" if is_loss else "no noise"
        mine = f"{_difference(ours, base, measure)} ({ours.mean(measure):.1f})"
        rows.append([f"{figure.method} ({method})", f"{figure.epsilon:g}", word, against, loss, mine])
        sources[f"- {figure.method}: {figure.model}. {figure.source}."] = None
    if not rows:
        return "No method here ran at an epsilon for which a paper's loss is known." if task.paper else ""
    head = ["method", "epsilon", "measure", "against", "paper: points apart (level)", "here: points apart (level)"]
    parts = ["Beside the papers, whose models are others: compare the points lost, not the level.", _table(head, rows)]
    return "\n\n".join([*parts, "\n".join(sources)])


def _find(scores: Sequence[Score], method: str, epsilon: float | None) -> Score | None:
    return next((score for score in scores if (score.method, score.epsilon) == (method, epsilon)), None)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Without the empty columns."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [[head[i] for i in kept], ["---"] * len(kept), *([row[i] for i in kept] for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _cell(value: Value) -> str:
    return f"{value.mean:.1f} ± {value.deviation:.1f}" if math.isfinite(value.deviation) else f"{value.mean:.1f}"


def _difference(score: Score, base: Score | None, measure: str) -> str:
    return f"{score.mean(measure) - base.mean(measure):+.1f}" if base else ""


def _list(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def number(value: Any) -> str:
    """A number to three digits or whole, a list of them, or a text."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.3g}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:g}"
    return ", ".join(map(number, value)) if isinstance(value, (list, tuple)) else str(value)
