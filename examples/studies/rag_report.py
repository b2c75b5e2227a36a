"""Results of the study of RAG: JSON, a table and a picture."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_WORDS = {
    "no documents": "(e) no documents",
    "all documents": "(d) all documents, not private",
    "single calls": "one call of wrap_rag, not private",
    "CandidateVote": "(a) wrap_rag, vote for candidates",
    "EmbeddingMean": "(a) wrap_rag, embedding mean",
    "over_documents": "(b) over_documents",
    "release_collection": "(c) released collection, then RAG",
}
_COLORS = {"CandidateVote": "#1f4e79", "EmbeddingMean": "#b8692a", "over_documents": "#a23b53"}


def report(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the files; return what ``results.json`` has. A row is a question, its right value and its scores."""
    methods = [_method(name, rows, settings) for name in sorted(rows[0]["scores"], key=_order)]
    kinds = {kind: sum(row["kind"] == kind for row in rows) for kind in sorted({row["kind"] for row in rows})}
    guess = {kind: 100 / values for kind, values in zip(("near", "kind"), settings["values"], strict=True)}
    commonest = {kind: 100 * _commonest([row["right"] for row in rows if row["kind"] == kind]) for kind in kinds}
    facts = len({(row["name"], row["kind"]) for row in rows})
    asked = " and ".join(f"{count} of {kind}" for kind, count in kinds.items())
    chance = ", ".join(f"{guess[kind]:.0f} and {commonest[kind]:.0f} for {kind}" for kind in kinds)
    measured = (
        f"{len(rows)} questions ({asked}) on {facts} facts; {settings['owners']:,} owners, epsilon "
        f"{settings['epsilon']:g}, delta {settings['delta']:g}. Right answers in %, ± the standard error over facts. "
        f"A random value and always the commonest one: {chance}."
    )
    results: dict[str, Any] = {"measured": measured, "table": _table(methods, kinds), "pictures": ["rag.png"]}
    results |= {"settings": dict(settings), "methods": methods, "guess": guess, "commonest": commonest}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(f"{measured}\n\n{results['table']}\n", encoding="utf-8")
    _draw(methods, folder / "rag.png")
    return results


def _order(name: str) -> tuple[int, float]:
    start, _, number = name.partition(", ")
    return list(_WORDS).index(start), float(number) if number.isdigit() else 0.0


def _commonest(values: Sequence[str]) -> float:
    return Counter(values).most_common(1)[0][1] / len(values)


def _method(name: str, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    start, _, number = name.partition(", ")
    by_fact, by_kind = defaultdict[Any, list[float]](list), defaultdict[str, list[float]](list)
    for row in rows:
        by_fact[row["name"], row["kind"]].append(row["scores"][name])
        by_kind[row["kind"]].append(row["scores"][name])
    means = [float(np.mean(scores)) for scores in by_fact.values()]
    found: dict[str, Any] = {"method": start, "number": number}
    found["right"] = 100 * float(np.mean([row["scores"][name] for row in rows]))
    found["error"] = 100 * float(np.std(means, ddof=1)) / len(means) ** 0.5 if len(means) > 1 else None
    found |= {kind: 100 * float(np.mean(scores)) for kind, scores in by_kind.items()}
    noises = settings["noise"].get("tokens" if start in ("over_documents", "release_collection") else start)
    if noises is not None and (start == "release_collection" or number.isdigit()):
        found["noise"] = noises[-1] if start == "release_collection" else noises[settings["plans"].index(int(number))]
    return found


def _table(methods: Sequence[Mapping[str, Any]], kinds: Sequence[str] | Mapping[str, int]) -> str:
    lines = [f"| method | plan, or k | right | {' | '.join(kinds)} | noise |", "|" + " --- |" * (4 + len(kinds))]
    names = {"CandidateVote": "eps0", "EmbeddingMean": "sigma"}
    for row in methods:
        error = "" if row["error"] is None else f" ± {row['error']:.1f}"
        noise = f"{names.get(row['method'], 'B')} {row['noise']:.3g}" if "noise" in row else ""
        number = f"{int(row['number']):,}" if row["number"].isdigit() else row["number"]
        number = f"k = {number}" if row["method"] == "all documents" else number
        cells = [
            _WORDS[row["method"]],
            number,
            f"{row['right']:.1f}{error}",
            *(f"{row[kind]:.1f}" for kind in kinds),
            noise,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _draw(methods: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for start, color in _COLORS.items():
        points = [row for row in methods if row["method"] == start and row["number"].isdigit()]
        plans = [int(row["number"]) for row in points]
        errors, heights = [row["error"] or 0.0 for row in points], [row["right"] for row in points]
        if points:
            axes.errorbar(plans, heights, errors, fmt="o-", color=color, capsize=3, label=_WORDS[start])
    lines = [row for row in methods if row["method"] in ("no documents", "all documents", "release_collection")]
    for row, style in zip(lines, [":", *["--"] * (len(lines) - 2), "-"], strict=True):
        name = _WORDS[row["method"]] + (f", k = {row['number']}" if row["number"] else "")
        color = "#3b7d4f" if row["method"] == "release_collection" else "#444444"
        axes.axhline(row["right"], color=color, linestyle=style, linewidth=1.2, label=name)
    axes.set(
        xscale="log",
        xlabel="questions, or tickets of each owner, in the plan",
        ylabel="right answers, %",
        ylim=(0, None),
    )
    axes.set_xticks([20, 200, 1000], ["20", "200", "1,000"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
