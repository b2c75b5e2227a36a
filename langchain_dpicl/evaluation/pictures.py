"""The pictures of an evaluation: a measure against epsilon and in each ablation, answers that noise changes, cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from langchain_dpicl.evaluation.plan import CostPoint
from langchain_dpicl.evaluation.scores import Score
from langchain_dpicl.evaluation.tables import MEASURES, main_measure, words_of
from langchain_dpicl.plots.charts import Chart, Curve, Level
from langchain_dpicl.plots.style import COLORS

_METHODS = ("vote", "embedding", "joint-em", "ptr", "online", "offline")
_MARKERS = "os^DvP<>"
_DOTS = ((0, (1, 1)), (0, (1, 3)), (0, (3, 2, 1, 2)), (0, (6, 2, 1, 2, 1, 2)), (0, (2, 4)))
_GREYS = ("#222222", "#555555", "#777777", "#555555", "#222222")
_EPSILON = "epsilon of all releases together"


def pictures(name: str, scores: Sequence[Score], costs: Sequence[CostPoint]) -> dict[str, tuple[list[Chart], str]]:
    """Return the pictures of the task called `name`: file names, each with its charts and the title above them."""
    measure = main_measure(scores)
    word = MEASURES[measure]
    has_bars = any(math.isfinite(score.values[measure].deviation) for score in scores)
    y = f"{word}, %{' (bars: deviation over runs)' if has_bars else ''}"
    main = [score for score in scores if not score.study]
    private = list(dict.fromkeys(score.method for score in main if score.epsilon is not None))
    found: dict[str, tuple[list[Chart], str]] = {}
    if private:
        curves, levels = [], []
        for index, method in enumerate(private):
            held = [score for score in main if score.method == method]
            noisy = [(s.epsilon, s) for s in held if s.epsilon is not None]
            curves.append(_curve(noisy, measure, method, private))
            for score in held:
                if score.epsilon is None:
                    words = f"{method}, not private: {score.mean(measure):.1f}"
                    levels.append(Level(score.mean(measure), words, _look(method, private)[0], (3 * index, (5, 4))))
        others = sorted((s for s in main if s.method not in private), key=lambda score: -score.mean(measure))
        for index, score in enumerate(others):
            words = f"{score.method}, {words_of(score, private)}: {score.mean(measure):.1f}".replace(", public:", ":")
            levels.append(Level(score.mean(measure), words, _GREYS[index % 5], _DOTS[index % 5]))
        chart = Chart(f"{name}: what privacy costs in {word}", _EPSILON, y, curves, levels, is_log=True)
        found[f"{measure}.png"] = [chart], ""
    for study in dict.fromkeys(score.study for score in scores if score.study):
        varied, words = [s for s in scores if s.study == study], study.replace("_", " ")
        curves = _curves([(score.facts[study], score) for score in varied], measure)
        found[f"{study}.png"] = [Chart(f"{name}: {word} against {words}", words, y, curves)], ""
    flipped = [s for s in scores if not s.study and s.epsilon is not None and "flipped" in s.facts]
    if flipped:
        methods = list(dict.fromkeys(score.method for score in flipped))
        curves = [_curve([(s.epsilon, s) for s in flipped if s.method == m], "flipped", m, methods) for m in methods]
        words = "releases that noise changes, %"
        chart = Chart(f"{name}: how often noise changes the answer", _EPSILON, words, curves, is_log=True, amount=True)
        found["flips.png"] = [chart], ""
    if costs:
        charts = _costs(costs, [score for score in scores if score.study == "members"], measure, y)
        found["cost.png"] = charts, f"{name}: what 100 queries cost"
    return found


def _costs(costs: Sequence[CostPoint], scores: Sequence[Score], measure: str, y: str) -> list[Chart]:
    """Tokens, and the price if there is one, against the rate; the measure against the last of them."""

    def tokens(point: CostPoint) -> float:
        return point.prompt_tokens + point.answer_tokens

    kinds: dict[str, Callable[[CostPoint], float]] = {"tokens": tokens}
    if any(point.price > 0 for point in costs):
        kinds["price"] = lambda point: point.price
    charts = []
    for kind, amount in kinds.items():
        curves = []
        for place, grows in enumerate(("members", "shots")):
            held = [point for point in costs if point.grows == grows]
            if held:
                middle = held[len(held) // 2]
                fixed = f"{middle.shots:.0f} shots each" if grows == "members" else f"{middle.members} members"
                points = sorted((point.rate, amount(point)) for point in held)
                curves.append(Curve(points, f"more {grows}, {fixed}", COLORS[place], marker=_MARKERS[place]))
        title = "tokens, read and written" if kind == "tokens" else kind
        charts.append(Chart(title, "sampling rate of an owner", f"{kind} per 100 queries", curves, amount=True))
    if scores:
        # A cost is linear in the members and the owners of a sample: the points determine it.
        table = np.array([[point.members, point.owners, 1.0] for point in costs])
        weights = np.linalg.lstsq(table, np.array([amount(point) for point in costs]), rcond=None)[0]
        owners = costs[0].owners / costs[0].rate
        priced = [(float(weights @ [s.facts["members"], s.facts["rate"] * owners, 1.0]), s) for s in scores]
        below = {cost: f"\n({score.facts['members']:.0f})" for cost, score in priced}
        title, x = f"{MEASURES[measure]} against cost, as members grow", f"{kind} per 100 queries (members)"
        charts.append(Chart(title, x, y, _curves(priced, measure), below=below))
    return charts


def _curves(pairs: Sequence[tuple[float, Score]], measure: str) -> list[Curve]:
    """One curve for each (method, epsilon): a colour for a method, paler for larger epsilons, dashed without one."""
    methods = list(dict.fromkeys(score.method for _, score in pairs))
    found = []
    for method in methods:
        kinds = {score.epsilon for _, score in pairs if score.method == method}
        shades = sorted(epsilon for epsilon in kinds if epsilon is not None)
        for epsilon in [*([None] if None in kinds else []), *shades]:
            share = 0.7 * shades.index(epsilon) / max(2, len(shades) - 1) if epsilon is not None else 0.0
            held = [(x, score) for x, score in pairs if (score.method, score.epsilon) == (method, epsilon)]
            label = f"{method}, {words_of(held[0][1], ())}"
            found.append(_curve(held, measure, method, methods, label, share))
    return found


def _curve(
    pairs: Sequence[tuple[float | None, Score]],
    measure: str,
    method: str,
    methods: Sequence[str],
    label: str = "",
    paler: float = 0.0,
) -> Curve:
    """A measure, or a public number, of these scores."""
    held = sorted(((x, score) for x, score in pairs if x is not None), key=lambda pair: pair[0])
    color, marker = _look(method, methods)
    shade = tuple((1 - paler) * int(color[i : i + 2], 16) / 255 + paler for i in (1, 3, 5)) if paler else color
    spreads = [score.values[measure].deviation for _, score in held if measure in score.values]
    points = [(x, score.mean(measure) if measure in score.values else score.facts[measure]) for x, score in held]
    style = "-" if held[0][1].epsilon is not None else "--"
    return Curve(points, label or method, shade, style, marker, spreads)


def _look(method: str, methods: Sequence[str]) -> tuple[str, str]:
    """Colour and marker: the same for a known method in every picture."""
    place = [*_METHODS, *(each for each in methods if each not in _METHODS)].index(method) % len(COLORS)
    return COLORS[place], _MARKERS[place]
