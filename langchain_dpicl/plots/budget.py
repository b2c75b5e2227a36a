"""The figures of ``dpicl budget``: what was spent against time; privately, owners by the tickets they have used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from langchain_dpicl.plots.style import COLORS, LIMIT, new_figure, save_figure, whole_numbers

_POINTS = 400


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
            step = max(1, len(curve) // _POINTS)  # a million points show no more
            thin = [*curve[:-1:step], curve[-1]]
            axes.step([moment for moment, _ in thin], [n for _, n in thin], where="post", color=color, label=label)
            axes.plot(*thin[-1], marker="o", markersize=4, color=color)
        for number, (level, words) in enumerate(budget.levels):
            axes.axhline(level, color=LIMIT, linestyle="--", linewidth=1)
            where: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            axes.annotate(words, (number % 2 / 2, level), (4, 3), **where, color=LIMIT, fontsize="small")
        ends = [curve[-1][1] for _, curve in shown]
        axes.set_ylim(0, 1.15 * max([*ends, *(level for level, _ in budget.levels)], default=1))
        if len(budget.curves) > len(shown):
            axes.plot([], [], " ", label=f"and {len(budget.curves) - len(shown)} more with less")
        if shown:
            locator = AutoDateLocator(minticks=3, maxticks=9)
            axes.xaxis.set_major_locator(locator)
            axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
            axes.set_xlabel("time of the charge (UTC, by the machine's clock)")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
            aside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "alignment": "left"}
            axes.legend(frameon=False, title=budget.legend, **aside)
    save_figure(figure, path)


def draw_usage(lines: Sequence[TicketBars], empty: str, path: str) -> None:
    """Draw one panel for each line, or the title ``empty``. PRIVATE. Raises as `save_figure`."""
    shown = sorted(lines, key=lambda line: -sum(owners for *_, owners in line[2]))[: len(COLORS)]
    figure, panels = _stacked(len(shown), path)
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
        whole_numbers(axes.xaxis)
        whole_numbers(axes.yaxis)
    if len(lines) > len(shown):
        figure.supxlabel(f"and {len(lines) - len(shown)} more with fewer owners", fontsize="small")
    save_figure(figure, path)


def _stacked(panels: int, path: str) -> tuple[Any, Any]:
    """Return a figure and its panels, one above the other; one empty panel for none."""
    figure = new_figure(path, 9.0, max(1, panels) * 3.4 + 0.3)
    return figure, figure.subplots(max(1, panels), 1, squeeze=False)[:, 0]
