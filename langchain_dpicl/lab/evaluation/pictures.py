"""An evaluation's pictures: a measure against epsilon and in ablations, what noise changes, what queries cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from langchain_dpicl.lab.evaluation.evaluate import CostPoint
from langchain_dpicl.lab.evaluation.scores import MEASURES, Score, main_measure, words_of
from langchain_dpicl.lab.plots import COLORS, Chart, Curve, Level

_METHODS = ("vote", "embedding", "joint-em", "ptr", "online", "offline")
_ALIKE = {"vote, prior": "embedding", "label vote": "joint-em", "candidate-vote": "vote"}  # of other tasks
_MARKERS = "os^DvP<>"
_DOTS = ((0, (1, 1)), (0, (1, 3)), (0, (3, 2, 1, 2)), (0, (6, 2, 1, 2, 1, 2)), (0, (2, 4)))
_GREYS = ("#222222", "#555555", "#777777", "#555555", "#222222")
_EPSILON = "epsilon of all releases together"


def pictures(name: str, scores: Sequence[Score], costs: Sequence[CostPoint]) -> dict[str, tuple[list[Chart], str]]:
    """Return the pictures of the task called `name`: file names, each with its charts and the title above them."""
    measure = main_measure(scores)
    word = MEASURES[measure]
    y = f"{word}, %"
    if any(math.isfinite(score.values[measure].deviation) for score in scores):
        y += " (bars: deviation over runs)"
    main = [score for score in scores if not score.study]
    noisy = [(score.epsilon, score) for score in main if score.epsilon is not None]
    private = list(dict.fromkeys(score.method for _, score in noisy))
    found: dict[str, tuple[list[Chart], str]] = {}
    if noisy:
        levels = []
        for score in main:
            if score.epsilon is None and score.method in private:
                words = f"{score.method}, not private: {score.mean(measure):.1f}"
                color, _ = _look(score.method, private)
                levels.append(
                    Level(
                        score.mean(measure),
                        words,
                        color,
                        (3 * private.index(score.method), (5, 4)),
                    )
                )
        others = sorted((s for s in main if s.method not in private), key=lambda score: -score.mean(measure))
        for index, score in enumerate(others):
            words = f"{score.method}, {words_of(score)}: {score.mean(measure):.1f}".replace(", public:", ":")
            levels.append(Level(score.mean(measure), words, _GREYS[index % 5], _DOTS[index % 5]))
        chart = Chart(
            f"{name}: what privacy costs in {word}",
            _EPSILON,
            y,
            _curves(noisy, measure, is_apart=False),
            levels,
            is_log=True,
        )
        found[f"{measure}.png"] = [chart], ""
    for study in dict.fromkeys(score.study for score in scores if score.study):
        words = study.replace("_", " ")
        varied = [(score.facts[study], score) for score in scores if score.study == study]
        found[f"{study}.png"] = [Chart(f"{name}: {word} against {words}", words, y, _curves(varied, measure))], ""
    if mixing := [score for score in noisy if score[1].least_weights]:
        found["least_weights.png"] = [_least_weights(name, [score for _, score in mixing])], ""
    if flipped := [pair for pair in noisy if "flipped" in pair[1].facts]:
        chart = Chart(
            f"{name}: how often noise changes the answer",
            _EPSILON,
            "answers that noise changes, %",
            _curves(flipped, "flipped", is_apart=False),
            is_log=True,
            amount=True,
        )
        found["flips.png"] = [chart], ""
    if costs:
        charts = _costs(costs, [score for score in scores if score.study == "members"], measure, y)
        found["cost.png"] = charts, f"{name}: what 100 queries cost"
    return found


def _least_weights(name: str, scores: Sequence[Score]) -> Chart:
    """The mean of the least weight of a sampled owner at each token of an answer, a curve for each epsilon."""
    curves = [
        Curve(
            list(enumerate(score.least_weights, start=1)),
            f"{score.method}, {words_of(score)}",
            COLORS[place % len(COLORS)],
            marker=_MARKERS[place % len(_MARKERS)],
        )
        for place, score in enumerate(scores)
    ]
    return Chart(f"{name}: how much the owner heard least counts", "token of the answer", "least lambda, mean", curves)


def _costs(costs: Sequence[CostPoint], scores: Sequence[Score], measure: str, y: str) -> list[Chart]:
    """Tokens, and the price if there is one, against the rate; the measure against the last of them."""
    titles = {"tokens": "tokens, read and written"}
    if any(point.price > 0 for point in costs):
        titles["price"] = "price"
    charts = []
    for kind, title in titles.items():
        curves = []
        for place, grows in enumerate(("members", "shots")):
            held = [point for point in costs if point.grows == grows]
            middle = held[len(held) // 2]
            fixed = f"{middle.shots:.0f} shots each" if grows == "members" else f"{middle.members} members"
            points = sorted((point.rate, getattr(point, kind)) for point in held)
            curves.append(
                Curve(
                    points,
                    f"more {grows}, {fixed}",
                    COLORS[place],
                    marker=_MARKERS[place],
                )
            )
        charts.append(
            Chart(
                title,
                "sampling rate of an owner",
                f"{kind} per 100 queries",
                curves,
                amount=True,
            )
        )
    if scores:
        # A cost is linear in the members and the owners of a sample: the points determine it.
        table = np.array([[point.members, point.owners, 1.0] for point in costs])
        weights = np.linalg.lstsq(table, np.array([getattr(point, kind) for point in costs]), rcond=None)[0]
        owners = costs[0].owners / costs[0].rate
        priced = [(float(weights @ [s.facts["members"], s.facts["rate"] * owners, 1.0]), s) for s in scores]
        below = {cost: f"\n({score.facts['members']:.0f})" for cost, score in priced}
        charts.append(
            Chart(
                f"{MEASURES[measure]} against cost, as members grow",
                f"{kind} per 100 queries (members)",
                y,
                _curves(priced, measure),
                below=below,
            )
        )
    return charts


def _curves(pairs: Sequence[tuple[float, Score]], measure: str, *, is_apart: bool = True) -> list[Curve]:
    """Curves of a measure, or of a public number, from pairs of x and a score: a colour for each method.

    ``is_apart``: a curve for each epsilon of a method, paler for larger ones, dashed without one; else x is epsilon.
    """
    methods = list(dict.fromkeys(score.method for _, score in pairs))
    found = []
    for method in methods:
        color, marker = _look(method, methods)
        own = sorted((pair for pair in pairs if pair[1].method == method), key=lambda pair: pair[0])
        shades = sorted({score.epsilon for _, score in own if score.epsilon is not None}) if is_apart else []
        for epsilon in [None, *shades]:
            held = [(x, score) for x, score in own if not is_apart or score.epsilon == epsilon]
            if held:
                first = held[0][1]
                paler = 0.7 * shades.index(epsilon) / max(2, len(shades) - 1) if epsilon is not None else 0.0
                mixed = tuple((1 - paler) * int(color[i : i + 2], 16) / 255 + paler for i in (1, 3, 5))
                if measure in first.values:
                    points = [(x, score.mean(measure)) for x, score in held]
                    spreads = [score.values[measure].deviation for _, score in held]
                else:
                    points = [(x, score.facts[measure]) for x, score in held]
                    spreads = []
                label = f"{method}, {words_of(first)}" if is_apart else method
                style = "--" if first.epsilon is None else "-"
                found.append(Curve(points, label, mixed if paler else color, style, marker, spreads))
    return found


def _look(method: str, methods: Sequence[str]) -> tuple[str, str]:
    """Colour and marker: the same for a known method in every picture."""
    known = [*_METHODS, *(each for each in methods if each not in (*_METHODS, *_ALIKE))]
    place = known.index(_ALIKE.get(method, method)) % len(COLORS)
    return COLORS[place], _MARKERS[place]
