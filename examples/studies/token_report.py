"""Results of a study of private decoding: JSON, a table and two pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from token_methods import Outcome

_REFERENCE = "ensemble, not private"
_PAIRED = {"ensemble": _REFERENCE, "unclipped": "ours unclipped, not private", "zero-shot": "zero-shot"}
_CURVES = {
    "online": ("DPSampler", "#1f4e79", "o-"),
    "offline": ("synthetic demonstrations in a prompt", "#3b7d4f", "s-"),
    "embedding mean": ("embedding mean (ESA)", "#b8692a", "^-"),
    "paper's ball (unproved)": ("paper's ball: epsilon claimed, NOT proved", "#a23b53", "x:"),
}
_LINES = {
    _REFERENCE: ("ensemble, not private", "#444444", "--"),
    "ours unclipped, not private": ("DPSampler unclipped, not private", "#1f4e79", "--"),
    "4-shot prompt, not private": ("4-shot prompt, not private", "#3b7d4f", "--"),
    "zero-shot": ("zero-shot decoding", "#444444", ":"),
    "zero-shot prompt": ("zero-shot prompt", "#3b7d4f", ":"),
}


def report(outcomes: Sequence[Outcome], settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write the files; return what ``results.json`` has, with the table."""
    rows = [_row(outcome, outcomes) for outcome in outcomes]
    results: dict[str, Any] = {"settings": settings, "methods": rows, "table": _table(rows)}
    (folder / "results.json").write_text(json.dumps(results, indent=1, default=str) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(results["table"] + "\n", encoding="utf-8")
    _draw_scores(outcomes, folder / "rouge.png")
    _draw_weights(outcomes, folder / "weights.png")
    return results


def _row(outcome: Outcome, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    count = len(outcome.rouge_l)
    row: dict[str, Any] = {
        "method": outcome.method,
        "queries": count,
        "rouge_l": 100 * float(np.mean(outcome.rouge_l)),
        "standard_error": _error(outcome.rouge_l),
        "meaning": 100 * float(np.mean(outcome.meaning)),
    }
    named = {each.method: each for each in outcomes}
    for word, method in _PAIRED.items():
        if method in named and method != outcome.method:
            other = named[method].rouge_l[:count]
            apart = np.array(outcome.rouge_l[: len(other)]) - np.array(other)
            row |= {f"against_{word}": 100 * float(apart.mean()), f"against_{word}_error": _error(apart.tolist())}
    numbers = {name: value for name, value in outcome.facts.items() if isinstance(value, (int, float))}
    weights = [None if math.isnan(weight) else round(weight, 4) for weight in outcome.weights]
    return {**row, "seconds": outcome.seconds, **numbers, "weights": weights}


def _error(values: Sequence[float]) -> float:
    """The standard error of a mean, in hundredths."""
    return 100 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _table(rows: Sequence[dict[str, Any]]) -> str:
    paired = [word for word in _PAIRED if any(f"against_{word}" in row for row in rows)]
    heads = ["method", "ROUGE-L", "meaning", *(f"against {word}" for word in paired), "public numbers"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        apart = [
            f"{row[f'against_{word}']:+.1f} ± {row[f'against_{word}_error']:.1f}" if f"against_{word}" in row else ""
            for word in paired
        ]
        numbers = ", ".join(f"{name} {row[name]:.3g}" for name in ("B", "sigma", "beta", "order") if name in row)
        score = f"{row['rouge_l']:.1f} ± {row['standard_error']:.1f}"
        cells = [row["method"], score, f"{row['meaning']:.1f}", *apart, numbers]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _epsilon(outcome: Outcome) -> float:
    return float(outcome.facts.get("epsilon", outcome.facts.get("claimed epsilon", math.nan)))


def _draw_scores(outcomes: Sequence[Outcome], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.0), layout="constrained")
    axes = figure.subplots()
    for start, (words, color, style) in _CURVES.items():
        points = sorted((_epsilon(each), each) for each in outcomes if each.method.startswith(f"{start}, "))
        if points:
            heights = [100 * float(np.mean(each.rouge_l)) for _, each in points]
            errors = [_error(each.rouge_l) for _, each in points]
            axes.errorbar([e for e, _ in points], heights, errors, fmt=style, color=color, capsize=3, label=words)
    for name, (words, color, style) in _LINES.items():
        for each in outcomes:
            if each.method == name:
                axes.axhline(100 * float(np.mean(each.rouge_l)), color=color, linestyle=style, linewidth=1, label=words)
    axes.set(xscale="log", xlabel="epsilon for all queries together", ylabel="ROUGE-L")
    ticks = sorted({_epsilon(each) for each in outcomes if not math.isnan(_epsilon(each))})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def _draw_weights(outcomes: Sequence[Outcome], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    axes = figure.subplots()
    shown = [each for each in outcomes if each.weights and not each.method.endswith("not private")]
    for number, each in enumerate(shown):
        is_paper = each.method.startswith("paper")
        shade = 0.35 + 0.65 * number / max(1, len(shown) - 1)
        color = (0.64 * shade + 0.3, 0.23, 0.33) if is_paper else (0.12, 0.3 * shade + 0.15, 0.85 * shade)
        axes.plot(
            range(1, len(each.weights) + 1), each.weights, ":" if is_paper else "-", color=color, label=each.method
        )
    axes.set(xlabel="token of the answer", ylabel="mean weight of a demonstration (lambda)", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
