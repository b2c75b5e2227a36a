"""The pictures of ``dpicl budget``: spent against time, by line and principal; privately, owners by tickets burnt."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from langchain_dpicl.errors import InvalidParameter

if TYPE_CHECKING:
    from langchain_dpicl.budget.renewal import StoredPlan
    from langchain_dpicl.budget.report import LedgerReport

_COLORS = ("#1f4e79", "#b8692a", "#3b7d4f", "#7a4b8c", "#8a8a2e", "#2a8a94", "#a23b53", "#5b6b7a")
_END = "#b03a2e"
_POINTS = 400
_BINS = 50

Curve = list[tuple[datetime, int]]
Losses = list[tuple[datetime, float]]


def draw(report: LedgerReport, name: str | None, path: str) -> None:
    """One panel per budget, one curve per line (and principal): releases charged so far, and where the line ends.

    Where owners pay with tickets no line ends: the curve is what an owner has lost at most.
    """
    plans = report.chosen(name)
    states = {budget["name"]: budget for budget in report.show(name)["budgets"]}
    figure, panels = _figure(max(1, len(plans)), path)
    if not plans:
        panels[0].set_title("The ledger holds no budget")
    for axes, plan in zip(panels, plans, strict=False):
        if plan.tickets:
            _ticket_panel(axes, states[plan.name], _losses(report, plan))
            continue
        curves: dict[tuple[str, str], Curve] = {}
        for row in report.history(plan.name):
            moment = datetime.fromisoformat(row["time"])
            curves.setdefault((row["line"], row["principal"] or ""), []).append((moment, row["spent"]))
        _panel(axes, states[plan.name], curves)
    _save(figure, path)


def draw_tickets(found: dict[str, Any], path: str) -> None:
    """What `LedgerReport.tickets` found: one panel per line (and principal), owners by tickets burnt. PRIVATE."""
    entries = [(line, who, of) for line, each in found["lines"].items() for who, of in each.items() if of["owners"]]
    shown = sorted(entries, key=lambda entry: -entry[2]["owners"])[: len(_COLORS)]
    figure, panels = _figure(max(1, len(shown)), path)
    figure.suptitle("PRIVATE: for the deployer alone", color=_END, fontweight="bold")
    if not shown:
        panels[0].set_title(f"{found['budget']}: nobody was eligible so far")
    for axes, (line, who, of) in zip(panels, shown, strict=False):
        _bars(axes, ", ".join(filter(None, (found["budget"], line, who))), of)
    if len(entries) > len(shown):
        panels[-1].annotate(
            f"and {len(entries) - len(shown)} more with fewer owners",
            (1.0, 0.0),
            (0, -36),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            fontsize="small",
        )
    _save(figure, path)


def _figure(panels: int, path: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidParameter("plot", path, "drawing needs matplotlib: pip install 'langchain-dpicl[eval]'") from None

    figure = Figure(figsize=(9.0, panels * 3.4 + 0.3), layout="constrained")
    return figure, figure.subplots(panels, 1, squeeze=False)[:, 0]


def _save(figure: Any, path: str) -> None:
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
        axes.axhline(count, color=_END, linestyle="--", linewidth=1)
        words = f"{name}: {count:,} planned" if len(limits) > 1 else f"the plan: {count:,}"
        axes.annotate(
            words,
            (0.0 if number % 2 == 0 else 0.5, count),
            (4, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=_END,
            fontsize="small",
        )
    axes.set_ylim(0, 1.15 * max([top, *near.values()]))
    axes.set_ylabel("releases charged")
    if chosen:
        _time_axis(axes)
        _counts(axes.yaxis)
    _title(axes, state)
    if len(shown) > len(chosen):
        axes.plot([], [], " ", label=f"and {len(shown) - len(chosen)} more with less")
    if chosen:
        _legend(axes, state)
    _frame(axes)


def _losses(report: LedgerReport, plan: StoredPlan) -> dict[str, tuple[Losses, dict[str, int]]]:
    """By principal: when what an owner has lost at most changed (and the latest charge), and the queries by line."""
    from langchain_dpicl.budget.planned import at_most
    from langchain_dpicl.privacy import PrivacyPlan

    known = PrivacyPlan.from_json(plan.content)
    charges: dict[str, list[tuple[datetime, str, int]]] = {}
    for row in report.history(plan.name):
        moment = datetime.fromisoformat(row["time"])
        charges.setdefault(row["principal"] or "", []).append((moment, row["line"], row["units"]))
    found: dict[str, tuple[Losses, dict[str, int]]] = {}
    for who, made in charges.items():
        counts: dict[str, int] = dict.fromkeys(known.lines, 0)
        losses: Losses = []
        paid = None
        for moment, line, units in sorted(made):
            counts[line] += units
            if (now := at_most(known, counts)) != paid:
                paid, loss = now, known.spent(now)
                losses += [(moment, loss)] if not losses or losses[-1][1] != loss else []
        losses += [(moment, losses[-1][1])]
        found[who] = losses, counts
    return found


def _ticket_panel(axes: Any, state: dict[str, Any], found: dict[str, tuple[Losses, dict[str, int]]]) -> None:
    shown = sorted(found.items(), key=lambda item: -sum(item[1][1].values()))
    chosen = sorted(shown[: len(_COLORS)])
    several = len(state["lines"]) > 1
    for color, (who, (losses, counts)) in zip(_COLORS, chosen, strict=False):
        if who:
            label = f"{who}: {sum(counts.values()):,} queries"
        else:
            label = "\n".join(
                f"{line}: {count:,} queries" if several else f"{count:,} queries" for line, count in counts.items()
            )
        first, *_ = losses
        curve = [(first[0], 0.0), *losses]
        axes.step([moment for moment, _ in curve], [loss for _, loss in curve], where="post", color=color, label=label)
        axes.plot(*losses[-1], marker="o", markersize=4, color=color)
    axes.axhline(state["epsilon"], color=_END, linestyle="--", linewidth=1)
    ends = ", ".join(f"{name + ': ' if several else ''}{line['count']:,}" for name, line in state["lines"].items())
    axes.annotate(
        f"the plan: epsilon {state['epsilon']:g}, after the tickets of an owner ({ends}); there is no last answer",
        (0.0, state["epsilon"]),
        (4, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=_END,
        fontsize="small",
    )
    axes.set_ylim(0, 1.15 * state["epsilon"])
    axes.set_ylabel("epsilon, for an owner\neligible for every query")
    _title(axes, state)
    if len(shown) > len(chosen):
        axes.plot([], [], " ", label=f"and {len(shown) - len(chosen)} more with fewer")
    if chosen:
        _time_axis(axes)
        _legend(axes, state)
    _frame(axes)


def _bars(axes: Any, name: str, of: dict[str, Any]) -> None:
    from langchain_dpicl.budget.report import ticket_bins

    bins = ticket_bins(of["burnt"], of["tickets"], _BINS)
    width = bins[0][1] - bins[0][0] + 1
    for low, high, owners in bins[:-1]:
        axes.bar(low - 0.5, owners, width=0.92 * (high - low + 1), align="edge", color=_COLORS[0])
    axes.bar(of["tickets"] - 0.5, bins[-1][2], width=0.92 * width, align="edge", color=_END)
    holding = f"{of['owners'] - of['without']:,} ({of['share_with_tickets']:.1%})"
    axes.set_title(f"{name}: {of['owners']:,} owners ever eligible, {holding} still hold tickets", loc="left")
    axes.set_xlim(-0.5, of["tickets"] + width - 0.5)
    axes.set_xlabel(f"tickets burnt, of {of['tickets']:,} (red: none left)")
    axes.set_ylabel("owners")
    _counts(axes.xaxis)
    _counts(axes.yaxis)
    _frame(axes)
    axes.set_axisbelow(True)


def _title(axes: Any, state: dict[str, Any]) -> None:
    spent = f"epsilon {state['epsilon_spent']:.2g} of {state['epsilon']:g} spent"
    whose = ", by whoever spent most" if state["scope"] == "per_principal" else ""
    axes.set_title(f"{state['name']}: {spent}{whose} (delta {state['delta']:.2g})", loc="left")


def _legend(axes: Any, state: dict[str, Any]) -> None:
    alone = "one counter each, if\ncallers do not collude" if state["scope"] == "per_principal" else None
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), title=alone, alignment="left")


def _frame(axes: Any) -> None:
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _counts(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(6, integer=True))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _time_axis(axes: Any) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(minticks=3, maxticks=9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.set_xlabel("time of the charge (UTC, by the machine's clock)")


def _thinned(curve: Curve) -> Curve:
    """At most so many points, the first and the last among them: a million do not show more."""
    step = max(1, len(curve) // _POINTS)
    thin = curve[::step]
    return thin if thin[-1] == curve[-1] else [*thin, curve[-1]]
