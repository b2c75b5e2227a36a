"""The picture of a stream: accuracy over time on both sides, and who still holds tickets."""

from __future__ import annotations

from typing import Any

from langchain_dpicl.plots import COLORS, new_figure


def draw_stream(name: str, stream: dict[str, Any]) -> Any:
    """Two pictures, one above the other, with the same time. A blind curve ends where its plan is spent."""
    figure = new_figure("stream.png", 9.0, 6.4)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    ends = stream["queries"]
    middles = [(low + high) / 2 for low, high in zip([0, *ends[:-1]], ends, strict=True)]
    for color, (side, curves) in zip(COLORS, stream["sides"].items(), strict=False):
        known = [(x, y) for x, y in zip(middles, curves["accuracy"], strict=True) if y is not None]
        above.plot(*zip(*known, strict=True), color=color, marker="o", markersize=3, label=side)
        spent = curves["plan"]["T"]
        if side.startswith("blind") and spent < ends[-1]:
            above.axvline(spent, color=color, linestyle=":", linewidth=1.2, label=f"its {spent:,} queries are spent")
    above.plot(middles, stream["public"], color="#777777", linestyle="--", linewidth=1.2, label="public prompt alone")
    gated = stream["sides"]["gated"]
    below.plot(ends, gated["holding"], color=COLORS[0], label="of all owners")
    below.plot(middles, gated["taking part"], color=COLORS[0], linestyle="--", label="of a query's eligible owners")
    above.set(ylabel="accuracy, %")
    above.set_title(f"{name}: {ends[-1]:,} queries at epsilon {stream['epsilon']:g}, {stream['repeats']} streams")
    below.set(xlabel="queries so far", ylabel="hold a ticket, %", ylim=(0, 104))
    below.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for axes in (above, below):
        axes.set_xlim(0, ends[-1])
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False, handlelength=3.0)
    return figure
