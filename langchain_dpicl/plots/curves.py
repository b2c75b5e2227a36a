"""Panels of curves side by side, such as the figures of ``dpicl plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from langchain_dpicl.plots.style import COLORS, LIMIT, new_figure, save_figure


@dataclass(frozen=True)
class Curve:
    """Points (x, y) in the order of x. A point whose y is None is left out.

    `spreads` are the half lengths of bars, one for each point; NaN for none.
    """

    points: Sequence[tuple[float, float | None]]
    label: str | None = None
    color: str | tuple[float, ...] = COLORS[0]
    style: str = "-"
    marker: str = "o"
    spreads: Sequence[float] = ()


@dataclass(frozen=True)
class Panel:
    """Curves over a logarithmic x axis.

    Parameters
    ----------
    title, x, y
        The words above the panel and along its axes.
    curves
        The curves, drawn in this order.
    is_log
        Whether the y axis is logarithmic. A linear one starts at 0 and ends at ``top``.
    plan
        The place of the plan: a point (x, y); an upright line (x, None); a level (None, y), which ``note`` names.
    """

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    is_log: bool = False
    top: float | None = None
    plan: tuple[float | None, float | None] = (None, None)
    note: str = ""


def draw_panels(panels: Sequence[Panel], path: str) -> None:
    """Draw the panels side by side. Raises `InvalidParameter` without matplotlib, and if the file cannot be written."""
    figure = new_figure(path, 5.5 * len(panels), 4.6)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.set(xscale="log", yscale="log" if panel.is_log else "linear", xlabel=panel.x, ylabel=panel.y)
        axes.set_title(panel.title)
        for curve in panel.curves:
            known = [(x, y) for x, y in curve.points if y is not None]
            axes.plot(
                [x for x, _ in known],
                [y for _, y in known],
                marker=curve.marker,
                markersize=3,
                color=curve.color,
                linestyle=curve.style,
                label=curve.label,
            )
        x, y = panel.plan
        if x is not None and y is not None:
            axes.plot([x], [y], marker="o", color=LIMIT, linestyle="none", label="the plan", zorder=4)
        elif x is not None:
            axes.axvline(x, color=LIMIT, linestyle="--", linewidth=1)
        elif y is not None:
            axes.axhline(y, color=LIMIT, linestyle="--", linewidth=1)
            axes.annotate(panel.note, (1, y), (4, -12), textcoords="offset points", color=LIMIT)
        low, high = axes.get_ylim()
        if not panel.is_log:
            axes.set_ylim(0.0, panel.top)
        if any(curve.label for curve in panel.curves):
            if panel.is_log:
                axes.set_ylim(low, high * (high / low) ** 0.75)  # room for the legend above the curves
            axes.legend(frameon=False, loc="upper left" if panel.is_log else "best")
    save_figure(figure, path)
