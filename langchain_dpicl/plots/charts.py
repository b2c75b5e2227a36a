"""Curves side by side: the figures of ``dpicl evaluate`` (charts) and of ``dpicl plan`` (panels)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_dpicl.plots.style import COLORS, LIMIT, new_figure, plain, save_figure


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
class Level:
    """A height that does not depend on x, drawn across the chart in a style of matplotlib."""

    y: float
    label: str
    color: str
    style: Any


@dataclass(frozen=True)
class Chart:
    """Curves over the values where they have points.

    The x axis has ticks at these values, as far as they have room. It is logarithmic if they span more than tenfold.

    - ``title``, ``x``, ``y``: the words above the chart and along its axes.
    - ``is_log``: whether the x axis is logarithmic in any case.
    - ``amount``: whether heights are amounts: the y axis starts at 0, or is logarithmic if they span more than tenfold.
    - ``below``: words below a tick.
    """

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    levels: Sequence[Level] = ()
    is_log: bool = False
    amount: bool = False
    below: Mapping[float, str] = field(default_factory=dict)


def figure_of(charts: Sequence[Chart], path: str | Path, title: str = "") -> Any:
    """Return one chart with its legend at the right, or several side by side below a title, with legends below them.

    Raises `InvalidParameter`, which names the path, without matplotlib.
    """
    figure = new_figure(path, 1.2 + 5.0 * len(charts), 4.8) if title else new_figure(path, 9.0, 5.0)
    style = {"fontsize": 8, "frameon": False, "handlelength": 3.0}
    for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        move = _value_axis(axes, chart)
        last = len(chart.curves) - 1
        for place, curve in enumerate(chart.curves):
            # By some steps, at most two, so that bars of several curves do not cover each other.
            aside = (place - last / 2) * min(1.0, 4 / max(1, last))
            points = [(move(x, aside), y) for x, y in curve.points]
            look = {"color": curve.color, "marker": curve.marker, "markersize": 5, "label": curve.label}
            fill = "white" if curve.style == "--" else curve.color
            axes.plot(*zip(*points, strict=True), linestyle=curve.style, markerfacecolor=fill, **look)
            bars = [(*point, s) for point, s in zip(points, curve.spreads, strict=False) if math.isfinite(s)]
            if bars:
                axes.errorbar(*zip(*bars, strict=True), fmt="none", ecolor=curve.color, elinewidth=1, capsize=3)
        for level in chart.levels:
            axes.axhline(level.y, color=level.color, linestyle=level.style, linewidth=1.2, label=level.label)
        if chart.amount:
            heights = [y for curve in chart.curves for _, y in curve.points if y is not None]
            if max(heights) > 10 * min(heights) > 0:
                axes.set_yscale("log")
            else:
                axes.set_ylim(0, 1.08 * max(heights) or 1.0)
                axes.yaxis.set_major_formatter(lambda value, _: plain(value))
        axes.set(xlabel=chart.x, ylabel=chart.y)
        axes.set_title(chart.title)
        if title:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, **style)
    if title:
        figure.suptitle(title)
    else:
        figure.legend(loc="outside right upper", **style)
    return figure


def _value_axis(axes: Any, chart: Chart) -> Callable[[float, float], float]:
    """Make the x axis; return a function that moves a value aside by so many steps."""
    known = sorted({x for curve in chart.curves for x, _ in curve.points})
    low, high = known[0], known[-1]
    is_log = low > 0 and (chart.is_log or high > 10 * low)
    place: Callable[[float], float] = math.log if is_log else float
    width = place(high) - place(low)
    pad = 0.06 * width or (math.log(2) if is_log else max(abs(low), 1.0) / 2)
    ticks: list[float] = []
    for value in known:
        if not ticks or place(value) - place(ticks[-1]) >= 0.1 * width:
            ticks.append(value)
    axes.set_xscale("log" if is_log else "linear")
    axes.minorticks_off()
    axes.set_xticks(ticks, [f"{plain(tick)}{chart.below.get(tick, '')}" for tick in ticks])
    ends = place(low) - pad, place(high) + pad
    axes.set_xlim(*(map(math.exp, ends) if is_log else ends))
    step = 0.008 * (ends[1] - ends[0])
    return lambda value, steps: value * math.exp(step * steps) if is_log else value + step * steps


@dataclass(frozen=True)
class Panel:
    """Curves over a logarithmic x axis.

    - ``title``, ``x``, ``y``: the words above the panel and along its axes.
    - ``curves``: the curves, drawn in this order.
    - ``is_log``: whether the y axis is logarithmic. A linear one starts at 0 and ends at ``top``.
    - ``plan``: the place of the plan: a point (x, y); an upright line (x, None); a level (None, y), which ``note``
      names.
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
            known = [point for point in curve.points if point[1] is not None]
            look = {"color": curve.color, "marker": curve.marker, "markersize": 3, "label": curve.label}
            axes.plot(*(zip(*known, strict=True) if known else ((), ())), linestyle=curve.style, **look)
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
