"""Results of audits: a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from langchain_dpicl.audit.attack import AuditResult
from langchain_dpicl.plots.audit import draw_bounds

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
    """Draw two bars for each mechanism: the claim, and what the attack proves. Raises as `save_figure`."""
    several = len({result.epsilon for result in results}) > 1
    bars = [
        (f"{r.mechanism}\nepsilon {r.epsilon:g}" if several else r.mechanism, r.epsilon, r.lower_bound) for r in results
    ]
    first = results[0]
    many = "1 release" if first.releases == 1 else f"{first.releases} releases"
    title = f"Audit at delta {first.delta:g}, rate {first.rate:g}, {many}, canary: {first.canary}"
    draw_bounds(bars, title, f"proved by the attack ({first.confidence:.4g} confidence)", path)
