"""The picture of ``dpicl budget show --plot``: spent against time, by line and principal."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from langchain_dpicl.errors import InvalidParameter

if TYPE_CHECKING:
    from langchain_dpicl.budget.report import LedgerReport

_COLORS = ("#1f4e79", "#b8692a", "#3b7d4f", "#7a4b8c", "#8a8a2e", "#2a8a94", "#a23b53", "#5b6b7a")
_POINTS = 400

Curve = list[tuple[datetime, int]]


def draw(report: LedgerReport, name: str | None, path: str) -> None:
    """One panel per budget, one curve per line (and principal): releases charged so far, and where the line ends."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidParameter("plot", path, "drawing needs matplotlib: pip install 'langchain-dpicl[eval]'") from None

    plans = report.chosen(name)
    states = {budget["name"]: budget for budget in report.show(name)["budgets"]}
    figure = Figure(figsize=(9.0, max(1, len(plans)) * 3.4 + 0.3), layout="constrained")
    panels = figure.subplots(max(1, len(plans)), 1, squeeze=False)[:, 0]
    if not plans:
        panels[0].set_title("The ledger holds no budget")
    for axes, plan in zip(panels, plans, strict=False):
        curves: dict[tuple[str, str], Curve] = {}
        for row in report.history(plan.name):
            moment = datetime.fromisoformat(row["time"])
            curves.setdefault((row["line"], row["principal"] or ""), []).append((moment, row["spent"]))
        _panel(axes, states[plan.name], curves)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as failure:
        raise InvalidParameter("plot", path, f"a picture file that can be written ({failure})") from None


def _panel(axes: Any, state: dict[str, Any], curves: dict[tuple[str, str], Curve]) -> None:
    shown = sorted(curves.items(), key=lambda item: -item[1][-1][1])
    chosen = sorted(shown[: len(_COLORS)])
    limits = {} if state["kind"] == "filter" else {name: line["count"] for name, line in state["lines"].items()}
    top = max((curve[-1][1] for _, curve in chosen), default=1)
    several = len({line for line, _ in curves}) > 1
    for color, ((line, principal), curve) in zip(_COLORS, chosen, strict=False):
        thin = _thinned(curve)
        label = f"{line}, {principal}" if principal and several else principal or line
        count = limits.get(line)
        label += f": {curve[-1][1]:,}" + (f" of {count:,}" if count else "")
        axes.step([moment for moment, _ in thin], [n for _, n in thin], where="post", color=color, label=label)
        axes.plot(*thin[-1], marker="o", markersize=4, color=color)
    near = {name: count for name, count in limits.items() if count <= 2.5 * top}
    for number, (name, count) in enumerate(sorted(near.items(), key=lambda item: item[1])):
        axes.axhline(count, color="#b03a2e", linestyle="--", linewidth=1)
        words = f"{name}: {count:,} planned" if len(limits) > 1 else f"the plan: {count:,}"
        axes.annotate(
            words,
            (0.0 if number % 2 == 0 else 0.5, count),
            (4, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color="#b03a2e",
            fontsize="small",
        )
    axes.set_ylim(0, 1.15 * max([top, *near.values()]))
    axes.set_ylabel("releases charged")
    if chosen:
        _time_axis(axes)
    spent = f"epsilon {state['epsilon_spent']:.2g} of {state['epsilon']:g} spent"
    whose = ", by whoever spent most" if state["scope"] == "per_principal" else ""
    axes.set_title(f"{state['name']}: {spent}{whose} (delta {state['delta']:.2g})", loc="left")
    if len(shown) > len(chosen):
        axes.plot([], [], " ", label=f"and {len(shown) - len(chosen)} more with less")
    if chosen:
        alone = "one counter each, if\ncallers do not collude" if state["scope"] == "per_principal" else None
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), title=alone, alignment="left")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _time_axis(axes: Any) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.ticker import MaxNLocator

    locator = AutoDateLocator(minticks=3, maxticks=9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("time of the charge (UTC, by the machine's clock)")


def _thinned(curve: Curve) -> Curve:
    """At most so many points, the first and the last among them: a million do not show more."""
    step = max(1, len(curve) // _POINTS)
    thin = curve[::step]
    return thin if thin[-1] == curve[-1] else [*thin, curve[-1]]
