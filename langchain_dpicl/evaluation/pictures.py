"""Pictures of an evaluation: a measure against epsilon and in each ablation, answers that noise changes, and cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.evaluation.cost import CostPoint
from langchain_dpicl.evaluation.scores import Score
from langchain_dpicl.evaluation.tables import MEASURES, main_measure, words_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Move = Callable[[float, float], float]

_METHODS = ("vote", "scores", "embedding", "joint-em", "ptr", "online", "offline")
_COLORS = ("#1f4e79", "#b8692a", "#3b7d4f", "#a23b53", "#6b4c9a", "#2a8c8c", "#a8891c", "#c04fa0", "#5a7d1a", "#111111")
_MARKERS = "os^DvP<>pX"
_DOTS = ((0, (1, 1)), (0, (1, 3)), (0, (3, 2, 1, 2)), (0, (6, 2, 1, 2, 1, 2)), (0, (2, 4)))
_GREYS = ("#222222", "#555555", "#777777", "#555555", "#222222")
_EPSILON = "epsilon of all releases together"


def pictures(name: str, scores: Sequence[Score], costs: Sequence[CostPoint]) -> dict[str, Callable[[], Figure]]:
    """Return the pictures of the task called `name`: file names, each with the function that draws it."""
    measure = main_measure(scores)
    seen = [score for score in scores if math.isfinite(score.mean(measure))]
    main = [score for score in seen if not score.study]
    found: dict[str, Callable[[], Figure]] = {}
    if any(score.is_private for score in main):
        found[f"{measure}.png"] = partial(_draw_epsilon, name, main, measure)
    for study in dict.fromkeys(score.study for score in seen if score.study):
        held = [score for score in seen if score.study == study]
        found[f"{study}.png"] = partial(_draw_study, name, held, measure, study)
    flipped = [score for score in scores if not score.study and score.is_private and "flipped" in score.facts]
    if flipped:
        found["flips.png"] = partial(_draw_flips, name, flipped)
    if costs:
        held = [score for score in seen if score.study == "members"]
        found["cost.png"] = partial(_draw_cost, name, costs, held, measure)
    return found


def save(drawers: Mapping[str, Callable[[], Figure]], folder: Path) -> None:
    """Draw each picture into the folder. Raises `InvalidParameter` without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        bound = "drawing needs matplotlib: pip install 'langchain-dpicl[eval]'"
        raise InvalidParameter("plot", str(folder), bound) from None
    for file, draw in drawers.items():
        draw().savefig(folder / file, dpi=130)


def _draw_epsilon(name: str, scores: Sequence[Score], measure: str) -> Figure:
    figure, axes = _canvas()
    private = list(dict.fromkeys(score.method for score in scores if score.is_private))
    move = _number_axis(axes, [score.epsilon for score in scores if score.epsilon is not None], log=True)
    for index, method in enumerate(private):
        color, marker = _style(method, private)
        held = sorted((s.epsilon, s) for s in scores if s.method == method and s.epsilon is not None)
        places = [move(e, _aside(index, len(private))) for e, _ in held]
        _curve(axes, places, [s for _, s in held], measure, color, marker, label=method)
        for score in scores:
            if score.method == method and not score.is_private:
                words = f"{method}, not private: {score.mean(measure):.1f}"
                axes.axhline(
                    score.mean(measure), color=color, linestyle=(3 * index, (5, 4)), linewidth=1.2, label=words
                )
    others = [score for score in scores if score.method not in private]
    others.sort(key=lambda score: -score.mean(measure))
    for index, score in enumerate(others):
        height = score.mean(measure)
        color, dots = _GREYS[index % len(_GREYS)], _DOTS[index % len(_DOTS)]
        words = f"{score.method}, {words_of(score, private)}: {height:.1f}".replace(", public:", ":")
        axes.axhline(height, color=color, linestyle=dots, linewidth=1.2, label=words)
    axes.set(xlabel=_EPSILON, ylabel=_label(scores, measure))
    axes.set_title(f"{name}: what privacy costs in {_word(measure)}")
    return _finish(figure)


def _draw_study(name: str, scores: Sequence[Score], measure: str, study: str) -> Figure:
    figure, axes = _canvas()
    values = [score.facts[study] for score in scores]
    _curves(axes, scores, measure, values)
    words = study.replace("_", " ")
    axes.set(xlabel=words, ylabel=_label(scores, measure))
    axes.set_title(f"{name}: {_word(measure)} against {words}")
    return _finish(figure)


def _draw_flips(name: str, scores: Sequence[Score]) -> Figure:
    figure, axes = _canvas()
    methods = list(dict.fromkeys(score.method for score in scores))
    _number_axis(axes, [score.epsilon for score in scores if score.epsilon is not None], log=True)
    for method in methods:
        color, marker = _style(method, methods)
        held = sorted((s.epsilon, s.facts["flipped"]) for s in scores if s.method == method and s.epsilon)
        axes.plot(*zip(*held, strict=True), color=color, marker=marker, markersize=5, label=method)
    axes.set(xlabel=_EPSILON, ylabel="releases that noise changes, %")
    axes.set_ylim(0, 1.08 * max(1.0, *(score.facts["flipped"] for score in scores)))
    axes.set_title(f"{name}: how often noise changes the answer")
    return _finish(figure)


def _draw_cost(name: str, costs: Sequence[CostPoint], scores: Sequence[Score], measure: str) -> Figure:
    from matplotlib.figure import Figure

    kinds = ["tokens", "price"] if any(point.price > 0 for point in costs) else ["tokens"]
    priced = [(score, _cost_of(score, costs, kinds[-1])) for score in scores]
    known = [(score, cost) for score, cost in priced if cost is not None and cost > 0]
    panels = len(kinds) + bool(known)
    figure = Figure(figsize=(1.2 + 5.0 * panels, 4.8), layout="constrained")
    panel = list(np.atleast_1d(figure.subplots(1, panels)))
    for axes, what in zip(panel, kinds, strict=False):
        _number_axis(axes, [point.rate for point in costs])
        for grows, color, marker in (("members", _COLORS[0], "o"), ("shots", _COLORS[1], "s")):
            held = sorted((point for point in costs if point.grows == grows), key=lambda point: point.rate)
            if held:
                middle = held[len(held) // 2]
                fixed = f"{middle.shots:.0f} shots each" if grows == "members" else f"{middle.members} members"
                heights, rates = [_amount(point, what) for point in held], [point.rate for point in held]
                axes.plot(rates, heights, color=color, marker=marker, markersize=4, label=f"more {grows}, {fixed}")
        axes.set(xlabel="sampling rate of an owner", ylabel=f"{what} per 100 queries")
        _amount_axis(axes, [_amount(point, what) for point in costs])
        axes.set_title("price" if what == "price" else "tokens, read and written")
    if known:
        last = panel[-1]
        _curves(last, [score for score, _ in known], measure, [cost for _, cost in known])
        members = {cost: score.facts["members"] for score, cost in known}
        ticks = [tick for tick in last.get_xticks() if tick in members]
        last.set_xticks(ticks, [f"{_plain(tick)}\n({members[tick]:.0f})" for tick in ticks])
        last.set(xlabel=f"{kinds[-1]} per 100 queries (members)", ylabel=_label(scores, measure))
        last.set_title(f"{_word(measure)} against cost, as members grow")
    figure.suptitle(f"{name}: what 100 queries cost")
    return _finish(figure, below=True)


def _amount(point: CostPoint, what: str) -> float:
    return point.price if what == "price" else point.prompt_tokens + point.answer_tokens


def _cost_of(score: Score, costs: Sequence[CostPoint], what: str) -> float | None:
    """The cost of 100 queries with a score's members and rate.

    A cost is linear in the members and the owners of a sample, so the points determine it, unless all of them lie on
    one line; then None.
    """
    if not {"members", "rate"} <= set(score.facts):
        return None
    table = np.array([[point.members, point.owners, 1.0] for point in costs])
    if np.linalg.matrix_rank(table) < 3:
        return None
    weights = np.linalg.lstsq(table, np.array([_amount(point, what) for point in costs]), rcond=None)[0]
    owners = score.facts["rate"] * costs[0].owners / costs[0].rate
    return float(weights @ [score.facts["members"], owners, 1.0])


def _curves(axes: Axes, scores: Sequence[Score], measure: str, values: Sequence[float]) -> None:
    """One curve for each (method, epsilon): a colour for a method, paler for larger epsilons, dashed without one."""
    move = _number_axis(axes, values)
    methods = list(dict.fromkeys(score.method for score in scores))
    kinds = sorted({(methods.index(s.method), s.epsilon or 0.0, s.epsilon) for s in scores}, key=lambda k: k[:2])
    for place, (index, _, epsilon) in enumerate(kinds):
        method = methods[index]
        color, marker = _style(method, methods)
        shades = sorted({s.epsilon for s in scores if s.method == method and s.epsilon is not None})
        share = 0.7 * shades.index(epsilon) / max(2, len(shades) - 1) if epsilon is not None else 0.0
        paler = tuple((1 - share) * int(color[i : i + 2], 16) / 255 + share for i in (1, 3, 5))
        pairs = [(x, s) for x, s in zip(values, scores, strict=True) if (s.method, s.epsilon) == (method, epsilon)]
        pairs.sort(key=lambda pair: pair[0])
        held = [score for _, score in pairs]
        places = [move(x, _aside(place, len(kinds))) for x, _ in pairs]
        line = "-" if held[0].is_private else "--"
        _curve(axes, places, held, measure, paler, marker, f"{method}, {words_of(held[0], ())}", line)


def _curve(
    axes: Axes,
    places: Sequence[float],
    scores: Sequence[Score],
    measure: str,
    color: Any,
    marker: str,
    label: str,
    line: str = "-",
) -> None:
    heights = [score.mean(measure) for score in scores]
    fill = "white" if line == "--" else color
    axes.plot(places, heights, line, color=color, marker=marker, markersize=5, markerfacecolor=fill, label=label)
    deviations = [(x, y, s.values[measure].deviation) for x, y, s in zip(places, heights, scores, strict=True)]
    known = [each for each in deviations if math.isfinite(each[2])]
    if known:
        x, y, spread = zip(*known, strict=True)
        axes.errorbar(x, y, spread, fmt="none", ecolor=color, elinewidth=1, capsize=3)


def _style(method: str, methods: Sequence[str]) -> tuple[str, str]:
    """Colour and marker: the same for a known method in every picture."""
    index = [*_METHODS, *(each for each in methods if each not in _METHODS)].index(method) % len(_COLORS)
    return _COLORS[index], _MARKERS[index]


def _number_axis(axes: Axes, values: Sequence[float], *, log: bool = False) -> Move:
    """Ticks at the values as plain numbers, as far as they have room; logarithmic if they span more than tenfold.

    Returns a function that moves a value aside by so many steps, so that bars of several curves do not cover each
    other.
    """
    from matplotlib.ticker import NullLocator

    known = sorted(set(values))
    low, high = known[0], known[-1]
    is_log = low > 0 and (log or high > 10 * low)
    place: Callable[[float], float] = math.log if is_log else float
    width = place(high) - place(low)
    pad = 0.06 * width or (math.log(2) if is_log else max(abs(low), 1.0) / 2)
    ticks: list[float] = []
    for value in known:
        if not ticks or place(value) - place(ticks[-1]) >= 0.1 * width:
            ticks.append(value)
    axes.set_xscale("log" if is_log else "linear")
    axes.set_xticks(ticks, [_plain(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    ends = place(low) - pad, place(high) + pad
    axes.set_xlim(*(map(math.exp, ends) if is_log else ends))
    step = 0.008 * (ends[1] - ends[0])
    return lambda value, steps: value * math.exp(step * steps) if is_log else value + step * steps


def _aside(index: int, count: int) -> float:
    """By how many steps a curve moves aside: at most two, however many curves there are."""
    return (index - (count - 1) / 2) * min(1.0, 4 / max(1, count - 1))


def _amount_axis(axes: Axes, values: Sequence[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
        subs = (1.0, 2.0, 5.0) if max(values) < 1000 * min(values) else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, 1.08 * max(values) or 1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))


def _plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _label(scores: Sequence[Score], measure: str) -> str:
    known = any(math.isfinite(s.values[measure].deviation) for s in scores if measure in s.values)
    return f"{_word(measure)}, %{' (bars: deviation over runs)' if known else ''}"


def _word(measure: str) -> str:
    return MEASURES.get(measure, measure.replace("_", " "))


def _canvas() -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    return figure, figure.subplots()


def _finish(figure: Figure, *, below: bool = False) -> Figure:
    style = {"fontsize": 8, "frameon": False, "handlelength": 3.0}
    if not below:
        figure.legend(loc="outside right upper", **style)
    for axes in figure.axes:
        if below:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, **style)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
