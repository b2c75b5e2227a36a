"""Every figure of the package, in one style. matplotlib loads when a figure is made, not before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.extras import require

COLORS = ("#1f4e79", "#b8692a", "#3b7d4f", "#7a4b8c", "#8a8a2e", "#2a8a94", "#a23b53", "#5b6b7a")
SHADES = ("#9ecae1", "#6baed6", "#2171b5", "#08306b")
"""One hue from light to dark, for curves in an order."""
LIMIT = "#b03a2e"
"""A plan and its end; a bound above its claim."""
GREY = "#7f7f7f"


def new_figure(path: str | Path, width: float, height: float) -> Any:
    """Return an empty figure of this size in inches. Raises `MissingExtra` without matplotlib."""
    return require("matplotlib.figure", "eval").Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: str | Path) -> None:
    """Give all axes but those of images a light grid, and plain numbers, and write the file.

    Logarithmic axes are labelled 0.5, 1, 2, 5, 10 instead of by powers of ten; over three decades and more, by powers
    alone. Ticks at given values stay. Raises `InvalidParameter` if the file cannot be written.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log" and not isinstance(axis.get_major_locator(), FixedLocator):
                low, high = axis.get_view_interval()
                marks = (1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,)
                axis.set_major_locator(LogLocator(subs=marks, numticks=20))
                axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
                axis.set_minor_locator(NullLocator())
        if not axes.images:
            axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as failure:
        raise InvalidParameter("plot", str(path), f"a picture file that can be written ({failure})") from None


def plain(value: float) -> str:
    """Return a number to three digits, or whole with thousands separated."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# -- curves side by side: `dpicl evaluate` (charts) and `dpicl plan` (panels) ------------------------------------------


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

    Raises `MissingExtra` without matplotlib.
    """
    width, height = (1.2 + 5.0 * len(charts), 4.8) if title else (9.0, 5.0)
    figure = new_figure(path, width, height)
    style = {"fontsize": 8, "frameon": False, "handlelength": 3.0}
    for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        move = _value_axis(axes, chart)
        last = len(chart.curves) - 1
        for place, curve in enumerate(chart.curves):
            # By some steps, at most two, so that bars of several curves do not cover each other.
            aside = (place - last / 2) * min(1.0, 4 / max(1, last))
            points = [(move(x, aside), y) for x, y in curve.points]
            axes.plot(
                *zip(*points, strict=True),
                color=curve.color,
                linestyle=curve.style,
                marker=curve.marker,
                markersize=5,
                markerfacecolor="white" if curve.style == "--" else curve.color,
                label=curve.label,
            )
            bars = [(*point, s) for point, s in zip(points, curve.spreads, strict=False) if math.isfinite(s)]
            if bars:
                axes.errorbar(
                    *zip(*bars, strict=True),
                    fmt="none",
                    ecolor=curve.color,
                    elinewidth=1,
                    capsize=3,
                )
        for level in chart.levels:
            axes.axhline(
                level.y,
                color=level.color,
                linestyle=level.style,
                linewidth=1.2,
                label=level.label,
            )
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
    axes.set_xscale("log" if is_log else "linear")
    place: Callable[[float], float] = math.log if is_log else float
    value_at: Callable[[float], float] = math.exp if is_log else float
    width = place(high) - place(low)
    pad = 0.06 * width or (math.log(2) if is_log else max(abs(low), 1.0) / 2)
    ticks: list[float] = []
    for value in known:
        if not ticks or place(value) - place(ticks[-1]) >= 0.1 * width:
            ticks.append(value)
    axes.minorticks_off()
    axes.set_xticks(ticks, [f"{plain(tick)}{chart.below.get(tick, '')}" for tick in ticks])
    left = place(low) - pad
    right = place(high) + pad
    axes.set_xlim(value_at(left), value_at(right))
    step = 0.008 * (right - left)
    if is_log:
        return lambda value, steps: value * math.exp(step * steps)
    return lambda value, steps: value + step * steps


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
    """Draw the panels side by side. Raises `InvalidParameter` if the file cannot be written."""
    figure = new_figure(path, 5.5 * len(panels), 4.6)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.set(
            xscale="log",
            yscale="log" if panel.is_log else "linear",
            xlabel=panel.x,
            ylabel=panel.y,
        )
        axes.set_title(panel.title)
        for curve in panel.curves:
            known = [point for point in curve.points if point[1] is not None]
            axes.plot(
                [x for x, _ in known],
                [y for _, y in known],
                color=curve.color,
                linestyle=curve.style,
                marker=curve.marker,
                markersize=3,
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


# -- `dpicl budget`: what was spent against time; privately, owners by the tickets they have used ----------------------


@dataclass(frozen=True)
class Spending:
    """One budget over time: a panel's title, the words along its y axis, and what it shows."""

    title: str
    y: str
    curves: Sequence[tuple[str, Sequence[tuple[datetime, float]]]] = ()
    """A label and steps (moment, total so far) for each counter, the largest first. One is drawn for each colour."""
    levels: Sequence[tuple[float, str]] = ()
    """Totals to mark, with their words."""
    legend: str = ""


# Ticks of years, months, days, hours, minutes and seconds: each is read by itself.
_TICKS = ["%Y", "%b %Y", "%d %b", "%d %b\n%H:%M", "%H:%M", "%H:%M:%S"]

TicketBars = tuple[str, int, Sequence[tuple[int, int, int]]]
"""A line: its title, every owner's tickets, and (from, to, owners) by used tickets; the last has no ticket. PRIVATE."""


def draw_spending(budgets: Sequence[Spending], path: str) -> None:
    """Draw one panel for each budget and one curve for each counter. Raises as `save_figure`."""
    figure, panels = _stacked(len(budgets), path)
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter  # after the check that it is there

    if not budgets:
        panels[0].set_title("The ledger holds no budget")
    for axes, budget in zip(panels, budgets, strict=False):
        axes.set_title(budget.title, loc="left")
        axes.set_ylabel(budget.y)
        shown = sorted(budget.curves[: len(COLORS)])
        for color, (label, curve) in zip(COLORS, shown, strict=False):
            step = max(1, len(curve) // 400)  # a million points show no more
            thin = [*curve[:-1:step], curve[-1]]
            axes.step(
                [moment for moment, _ in thin],
                [n for _, n in thin],
                where="post",
                color=color,
                label=label,
            )
            axes.plot(*thin[-1], marker="o", markersize=4, color=color)
        for number, (level, words) in enumerate(budget.levels):
            axes.axhline(level, color=LIMIT, linestyle="--", linewidth=1)
            axes.annotate(
                words,
                (number % 2 / 2, level),
                (4, 3),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                color=LIMIT,
                fontsize="small",
            )
        ends = [curve[-1][1] for _, curve in shown]
        axes.set_ylim(0, 1.15 * max([*ends, *(level for level, _ in budget.levels)], default=1))
        if len(budget.curves) > len(shown):
            axes.plot([], [], " ", label=f"and {len(budget.curves) - len(shown)} more with less")
        if shown:
            moments = [moment for _, curve in shown for moment, _ in curve]
            begin, end = min(moments), max(moments)
            pad = max(0.04 * (end - begin), timedelta(seconds=5))  # one charge spans no time
            axes.set_xlim(begin - pad, end + pad)
            locator = AutoDateLocator(minticks=3, maxticks=7)
            axes.xaxis.set_major_locator(locator)
            axes.xaxis.set_major_formatter(
                ConciseDateFormatter(locator, formats=_TICKS, zero_formats=_TICKS, show_offset=False)
            )
            days = " to ".join(dict.fromkeys(f"{day:%d %b %Y}" for day in (begin, end)))
            axes.set_xlabel(f"time of the charge (UTC, by the machine's clock): {days}")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
            axes.legend(
                frameon=False,
                title=budget.legend,
                loc="center left",
                bbox_to_anchor=(1.0, 0.5),
                alignment="left",
            )
    save_figure(figure, path)


def draw_usage(lines: Sequence[TicketBars], empty: str, path: str) -> None:
    """Draw one panel for each line, or the title ``empty``. PRIVATE. Raises as `save_figure`."""
    shown = sorted(lines, key=lambda line: -sum(owners for *_, owners in line[2]))[: len(COLORS)]
    figure, panels = _stacked(len(shown), path)
    from matplotlib.ticker import MaxNLocator  # after the check that it is there

    figure.suptitle("PRIVATE: for the deployer alone", color=LIMIT, fontweight="bold")
    if not shown:
        panels[0].set_title(empty)
    for axes, (title, tickets, bins) in zip(panels, shown, strict=False):
        width = bins[0][1] - bins[0][0] + 1
        for low, high, owners in bins[:-1]:
            axes.bar(low - 0.5, owners, width=0.92 * (high - low + 1), align="edge", color=COLORS[0])
        axes.bar(tickets - 0.5, bins[-1][2], width=0.92 * width, align="edge", color=LIMIT)
        axes.set_title(title, loc="left")
        axes.set(xlim=(-0.5, tickets + width - 0.5), ylabel="owners")
        axes.set_xlabel(f"tickets used, of {tickets:,} (red: none left)")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
            axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if len(lines) > len(shown):
        figure.supxlabel(f"and {len(lines) - len(shown)} more with fewer owners", fontsize="small")
    save_figure(figure, path)


def _stacked(panels: int, path: str) -> tuple[Any, Any]:
    """Return a figure and its panels, one above the other; one empty panel for none."""
    figure = new_figure(path, 9.0, max(1, panels) * 3.4 + 0.3)
    return figure, figure.subplots(max(1, panels), 1, squeeze=False)[:, 0]


# -- `dpicl audit`: claims beside what an attack proves, and how well attackers tell members ---------------------------


def draw_bounds(
    bars: Sequence[tuple[str, float, float]],
    title: str,
    proved: str,
    path: str | Path,
) -> None:
    """Draw two bars for each (name, claim, proved bound). ``proved`` names the second bar. Raises as `save_figure`."""
    names, claims, bounds = zip(*bars, strict=True)
    figure = new_figure(path, 8.0, 1.4 + 0.42 * len(bars))
    axes = figure.subplots()
    above = axes.barh(
        [y - 0.2 for y in range(len(bars))],
        claims,
        0.38,
        color="#c9d3de",
        label="claimed",
    )
    colors = [LIMIT if bound > claim else COLORS[0] for _, claim, bound in bars]
    below = axes.barh([y + 0.2 for y in range(len(bars))], bounds, 0.38, color=colors, label=proved)
    axes.bar_label(above, [f"{claim:.3g}" for claim in claims], fontsize=8, color=GREY, padding=2)
    axes.bar_label(below, [f"{bound:.2f}" for bound in bounds], fontsize=8, padding=2)
    axes.set_yticks(range(len(bars)), names)
    axes.set(xlabel="epsilon", xlim=(0, 1.1 * max(*claims, *bounds)), ylim=(len(bars) - 0.4, -0.6))
    axes.set_title(title, loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    save_figure(figure, path)


def draw_auc(
    points: Sequence[tuple[str, str, float, float, float, float | None]], title: str, path: str | Path
) -> None:
    """Draw the AUC of each attack, and the AUC of an attacker who knows nothing. Raises as `save_figure`.

    A point is (answers, attack, AUC, lower end, upper end, proved bound or None); the numbers are in percent.
    """
    names, attacks = (list(dict.fromkeys(point[i] for point in points)) for i in (0, 1))
    figure = new_figure(path, 8.5, 1.6 + 0.55 * len(names))
    axes = figure.subplots()
    axes.axvline(50.0, color=GREY, linestyle=":", linewidth=1, label="knows nothing")
    for place, (attack, color) in enumerate(zip(attacks, (COLORS[1], COLORS[6], COLORS[0]), strict=False)):
        mine = [point for point in points if point[1] == attack]
        heights = [names.index(point[0]) + 0.2 * (place - 1) for point in mine]
        reach = [[auc - low for _, _, auc, low, _, _ in mine], [high - auc for _, _, auc, _, high, _ in mine]]
        axes.errorbar(
            [point[2] for point in mine],
            heights,
            xerr=reach,
            fmt="o",
            markersize=5,
            capsize=3,
            color=color,
            label=attack,
        )
        proved = [(point[5], height) for point, height in zip(mine, heights, strict=True) if point[5]]
        if proved:
            axes.plot(
                *zip(*proved, strict=True),
                "|",
                markersize=14,
                color=color,
                label=f"{attack}: proved bound",
            )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="AUC of the membership attack, in %", xlim=(None, 101))
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save_figure(figure, path)


def draw_table(table: Any, path: str | Path) -> None:
    """Draw a `PrivateTable` as a heat map of its noisy counts: topics by values. Raises as `save_figure`.

    Counts below the bar of a cell, which the noise alone may be, are grey.
    """
    topics, values = table.counts.shape
    names = [value for each in table.columns.values() for value in each]
    bar = table.bars().cell
    figure = new_figure(path, 2.5 + 0.3 * values, 1.8 + 0.25 * topics)
    axes = figure.subplots()
    axes.imshow(table.counts > bar, cmap="Greys_r", vmin=-6, vmax=1.2, aspect="auto")
    shown = table.counts.copy()
    shown[shown <= bar] = math.nan
    figure.colorbar(axes.imshow(shown, cmap="Blues", vmin=0, aspect="auto"), label="noisy count")
    axes.set_xticks(range(values), names, rotation=90, fontsize=8)
    axes.set_yticks(range(topics), table.topics, fontsize=8)
    axes.set_xlabel(f"grey: below {bar:.3g},\nwhich noise alone may be", fontsize=9)
    save_figure(figure, path)
