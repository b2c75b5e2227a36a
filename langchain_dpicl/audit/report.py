"""Results of audits: a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from langchain_dpicl.audit.attack import AuditResult
from langchain_dpicl.errors import InvalidParameter

_HEAD = ("mechanism", "noise", "claimed", "at least", "share", "neighbours", "true/false positives", "trials")


def table(results: Sequence[AuditResult]) -> str:
    """One line a mechanism, and below it what was attacked and which event was counted."""
    rows = [_HEAD, *map(_row, results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += ["", *map(_notes, results)]
    return "\n".join(lines)


def _row(result: AuditResult) -> tuple[str, ...]:
    noise = [f"{name} {value:.4g}" for name, value in result.parameters.items()]
    return (
        result.mechanism,
        noise[0] if len(noise) == 1 else f"{len(noise)} lines",
        f"{result.epsilon:.4g}",
        f"{result.lower_bound:.3f}",
        f"{result.share:.0%}",
        f"owner {'removed' if result.direction == 'remove' else 'added'}",
        f"{result.true_positives}/{result.false_positives}",
        str(result.trials),
    )


def _notes(result: AuditResult) -> str:
    return f"{result.mechanism}: {result.case}. Event: {result.event}."


def headline(results: Sequence[AuditResult]) -> str:
    """What all of them have in common, in one line."""
    first = results[0]
    what = "worst-case member outputs" if first.canary == "outputs" else "an inserted owner among real members"
    many = "one release" if first.releases == 1 else f"{first.releases} releases"
    return (
        f"lower bounds on epsilon ({first.confidence:.4g} confidence each) beside the claim, at delta {first.delta:g}, "
        f"rate {first.rate:g}, {many}; canary: {what}"
    )


def violated(results: Sequence[AuditResult]) -> list[str]:
    """The mechanisms whose lower bound lies above the claim."""
    return [result.mechanism for result in results if result.lower_bound > result.epsilon]


def draw(results: Sequence[AuditResult], path: str | Path) -> None:
    """Two bars a mechanism: what is claimed, and what the attack proves. `InvalidParameter` if it cannot be drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidParameter(
            "plot", str(path), "drawing needs matplotlib: pip install 'langchain-dpicl[eval]'"
        ) from None

    figure = Figure(figsize=(max(5.5, 1.15 * len(results) + 1.5), 4.0), layout="constrained")
    axes = figure.subplots()
    places = range(len(results))
    claims = axes.bar([x - 0.2 for x in places], [r.epsilon for r in results], 0.38, color="#c9d3de", label="claimed")
    bounds = axes.bar(
        [x + 0.2 for x in places],
        [r.lower_bound for r in results],
        0.38,
        color=["#a23b53" if r.lower_bound > r.epsilon else "#1f4e79" for r in results],
        label=f"proved by the attack ({results[0].confidence:.4g} confidence)",
    )
    axes.bar_label(claims, [f"{r.epsilon:.3g}" for r in results], fontsize=8, color="#5b6b7a", padding=2)
    axes.bar_label(bounds, [f"{r.lower_bound:.2f}" for r in results], fontsize=8, padding=2)
    several = len({r.epsilon for r in results}) > 1
    names = [f"{r.mechanism}\nepsilon {r.epsilon:g}" if several else r.mechanism for r in results]
    axes.set_xticks(list(places), names)
    axes.set_ylabel("epsilon")
    axes.set_ylim(0, 1.15 * max(max(r.epsilon, r.lower_bound) for r in results))
    first = results[0]
    many = "1 release" if first.releases == 1 else f"{first.releases} releases"
    axes.set_title(
        f"Audit at delta {first.delta:g}, rate {first.rate:g}, {many}, canary: {first.canary}", loc="left", fontsize=10
    )
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as failure:
        raise InvalidParameter("plot", str(path), f"a picture file that can be written ({failure})") from None
