"""What an evaluation's numbers say: tables in Markdown, and sentences."""

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
"""Measures in the order of the tables, with the words that stand for them."""

_ZERO_SHOT = ("zero-shot", "zero-shot calibrated")
_PAPERS_NAMES = {"ESA": "embedding", "DPS-MOZO": "online"}
_AGAINST_FEW_SHOT = " minus non-private few-shot"


def measures_of(scores: Sequence[Score]) -> list[str]:
    """What was measured: known measures in order, then others as they come."""
    found = dict.fromkeys(name for score in scores for name in score.values)
    return [name for name in MEASURES if name in found] + [name for name in found if name not in MEASURES]


def main_measure(scores: Sequence[Score]) -> str:
    """Accuracy, else ROUGE-L, else the first measure that there is."""
    found = measures_of(scores)
    return next((name for name in ("accuracy", "rougeL") if name in found), found[0])


def mean_of(score: Score, measure: str) -> float:
    """The measure's mean; NaN where the score lacks it."""
    return score.values[measure].mean if measure in score.values else math.nan


def words_of(score: Score, private: Collection[str]) -> str:
    """A score's epsilon in words. Without one, only a prompt that holds no private example is public."""
    if score.epsilon is not None:
        return f"epsilon {score.epsilon:g}"
    is_public = score.method.startswith(("zero-shot", "public ")) and score.method not in private
    return "public" if is_public else "not private"


def ordered(scores: Sequence[Score]) -> list[Score]:
    """What has no private counterpart first; then each method, first without noise, then by epsilon."""
    private = {score.method for score in scores if score.is_private}
    first = list(dict.fromkeys(score.method for score in scores))
    return sorted(
        scores, key=lambda s: (s.method in private, first.index(s.method), -1.0 if s.epsilon is None else s.epsilon)
    )


def findings(main: Sequence[Score], measure: str) -> list[str]:
    """What the numbers say: the best private method at the least epsilon, then all that speaks against it."""
    private = [s for s in main if s.epsilon is not None and math.isfinite(mean_of(s, measure))]
    if not private:
        return ["No private method was measured."] if main else []
    zeros = [zero for name in _ZERO_SHOT if (zero := _find(main, name, None, measure))]
    zero = max(zeros, key=lambda s: mean_of(s, measure), default=None)
    least = min(s.epsilon for s in private if s.epsilon is not None)
    best = max((s for s in private if s.epsilon == least), key=lambda s: mean_of(s, measure))
    name, reference = MEASURES.get(measure, measure), _find(main, best.method, None, measure)
    apart = []
    if reference:
        apart.append(f"{_apart(best, reference, measure)} its aggregate without noise ({_mean(reference, measure)})")
    if zero:
        apart.append(f"{_apart(best, zero, measure)} {zero.method} ({_mean(zero, measure)})")
    first = f"At epsilon {least:g} the best private method, {best.method}, has {name} {_mean(best, measure)}"
    found = [f"{', '.join([first, ' and '.join(apart)] if apart else [first])}."]
    return found + (_doubts(main, private, zero, measure) if zero else [])


def _doubts(main: Sequence[Score], private: Sequence[Score], zero: Score, measure: str) -> list[str]:
    """Where examples bring nothing, or not surely something, and where noise takes more than they bring."""
    methods = dict.fromkeys(score.method for score in private)
    known = [reference for method in methods if (reference := _find(main, method, None, measure))]
    floor, said = mean_of(zero, measure), []
    failed = [s for s in known if mean_of(s, measure) <= floor]
    if failed:
        prompts = [s for s in main if re.fullmatch(r"\d+-shot", s.method) and mean_of(s, measure) > floor]
        where = "Here" if len(failed) == len(known) else f"With {_list([s.method for s in failed])},"
        learner = "the ensemble" if prompts else "the model"
        means = _list([f"{s.method} has {_mean(s, measure)}" for s in failed])
        more = "".join(f", though one {s.method} prompt has {_mean(s, measure)}" for s in prompts[:1])
        said.append(
            f"{where} {learner} learns nothing from the examples: without noise {means}, {zero.method} "
            f"{_mean(zero, measure)}{more}."
        )
    gains = [(s, mean_of(s, measure) - floor) for s in known if s not in failed]
    errors = [math.hypot(s.values[measure].error, zero.values[measure].error) for s, _ in gains]
    unsure = [f"{s.method} {gain:.1f} ({e:.1f})" for (s, gain), e in zip(gains, errors, strict=True) if gain < 2 * e]
    if unsure:
        said.append(
            f"By how many points the examples help without noise may be chance: {_list(unsure)}; in brackets the "
            f"standard error over queries, were the two methods independent."
        )
    names = []
    for score, _ in gains:
        lost = [f"{s.epsilon:g}" for s in private if s.method == score.method and mean_of(s, measure) <= floor]
        names += [f"{score.method} at epsilon {_list(lost)}"] if lost else []
    if names:
        said.append(f"Noise takes all that the examples bring, and {zero.method} is as good: {'; '.join(names)}.")
    return said


def main_table(main: Sequence[Score], measure: str, said: Mapping[str, Any]) -> str:
    """A row for each method and epsilon; the numbers in `said`, which stand elsewhere, are not repeated."""
    if not main:
        return ""
    measures = measures_of(main)
    private = {score.method for score in main if score.is_private}
    rows = []
    for score in main:
        epsilon = words_of(score, private).removeprefix("epsilon ")
        base = _find(main, score.method, None, measure) if score.is_private else None
        facts = {k: v for k, v in score.facts.items() if k not in ("flipped", "epsilon") and said.get(k) != v}
        rows.append(
            [score.method, epsilon]
            + [_cell(score.values.get(name)) for name in measures]
            + [_difference(score, base, measure)]
            + [f"{score.facts['flipped']:.1f} %" if "flipped" in score.facts else ""]
            + [", ".join(f"{name} {number(value)}" for name, value in facts.items())]
        )
    head = ["method", "epsilon", *(MEASURES.get(name, name) for name in measures)]
    table = _table([*head, "against no noise", "changed by noise", "public numbers"], rows)
    errors = [s.values[measure].error for s in main if measure in s.values]
    known = [error for error in errors if math.isfinite(error)]
    note = "In per cent; ± is the standard deviation over runs (samples of owners, draws of noise)."
    if known:
        word = MEASURES.get(measure, measure)
        note += f" The standard error of {word} over queries is at most {max(known):.1f}."
    return f"{table}\n\n{note}"


def study_table(study: str, scores: Sequence[Score], measure: str) -> str:
    """An ablation: a row for each value of what varies, a column for each method and epsilon."""
    held = ordered([score for score in scores if score.study == study])
    kinds = {(score.method, score.epsilon): f"{score.method}, {words_of(score, ())}" for score in held}
    cells = {(s.method, s.epsilon, s.facts[study]): _cell(s.values.get(measure)) for s in held}
    words = study.replace("_", " ")
    varied = sorted({score.facts[study] for score in held})
    rows = [[number(value), *(cells.get((*kind, value), "") for kind in kinds)] for value in varied]
    return f"## {MEASURES.get(measure, measure)} against {words}\n\n{_table([words, *kinds.values()], rows)}"


def papers_table(task: Task, main: Sequence[Score]) -> str:
    """Loss against what is not private, theirs and ours, where both are known at the same epsilon."""
    rows: list[list[str]] = []
    sources: dict[str, None] = {}
    measure_of = {word: measure for measure, word in MEASURES.items()}
    few_shot = next((s for s in main if re.fullmatch(r"\d+-shot", s.method)), None)
    for figure in (figure for figure in task.paper if figure.epsilon is not None):
        is_loss = figure.metric.endswith(_AGAINST_FEW_SHOT)
        word = figure.metric.removesuffix(_AGAINST_FEW_SHOT)
        measure = measure_of.get(word, word)
        method = _PAPERS_NAMES.get(figure.method, figure.method)
        ours = _find(main, method, figure.epsilon, measure)
        base = few_shot if is_loss else _find(main, method, None, measure)
        same = [f.value for f in task.paper if (f.source, f.metric) == (figure.source, figure.metric)
                and (f.method, f.epsilon) == (f"{figure.method} without noise", None)]  # fmt: skip
        if not ours or not base or not (is_loss or same):
            continue
        loss = f"{figure.value:+.1f}" if is_loss else f"{figure.value - same[0]:+.1f} ({figure.value:.1f})"
        against = f"{base.method} prompt" if is_loss else "no noise"
        mine = f"{_difference(ours, base, measure)} ({_mean(ours, measure)})"
        rows.append([f"{figure.method} ({method})", f"{figure.epsilon:g}", word, against, loss, mine])
        sources[f"- {figure.method}: {figure.model}. {figure.source}."] = None
    if not rows:
        return "No method here ran at an epsilon for which a paper's loss is known." if task.paper else ""
    head = ["method", "epsilon", "measure", "against", "paper: points apart (level)", "here: points apart (level)"]
    parts = ["Beside the papers, whose models are others: compare the points lost, not the level.", _table(head, rows)]
    return "\n\n".join([*parts, "\n".join(sources)])


def _find(scores: Sequence[Score], method: str, epsilon: float | None, measure: str) -> Score | None:
    known = (score for score in scores if score.method == method and score.epsilon == epsilon)
    return next((score for score in known if math.isfinite(mean_of(score, measure))), None)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Without the columns that hold nothing."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [[head[i] for i in kept], ["---"] * len(kept), *([row[i] for i in kept] for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _cell(value: Value | None) -> str:
    if value is None or not math.isfinite(value.mean):
        return ""
    return f"{value.mean:.1f} ± {value.deviation:.1f}" if math.isfinite(value.deviation) else f"{value.mean:.1f}"


def _mean(score: Score, measure: str) -> str:
    return f"{mean_of(score, measure):.1f}"


def _difference(score: Score, base: Score | None, measure: str) -> str:
    apart = mean_of(score, measure) - mean_of(base, measure) if base else math.nan
    return f"{apart:+.1f}" if math.isfinite(apart) else ""


def _apart(score: Score, other: Score, measure: str) -> str:
    apart = mean_of(score, measure) - mean_of(other, measure)
    return f"{abs(apart):.1f} points {'below' if apart < 0 else 'above'}" if abs(apart) >= 0.05 else "level with"


def _list(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def number(value: Any) -> str:
    """A number to three digits or whole, a list of them, or a text."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.3g}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:g}"
    return ", ".join(map(number, value)) if isinstance(value, (list, tuple)) else str(value)
