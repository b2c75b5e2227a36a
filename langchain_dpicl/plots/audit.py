"""The figures of ``dpicl audit``: claims beside what an attack proves, and how well attackers tell members."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from langchain_dpicl.plots.style import COLORS, GREY, LIMIT, new_figure, save_figure


def draw_bounds(bars: Sequence[tuple[str, float, float]], title: str, proved: str, path: str | Path) -> None:
    """Draw two bars for each (name, claim, proved bound). ``proved`` names the second bar. Raises as `save_figure`."""
    names, claims, bounds = zip(*bars, strict=True)
    figure = new_figure(path, max(5.5, 1.15 * len(bars) + 1.5), 4.0)
    axes = figure.subplots()
    left = axes.bar([x - 0.2 for x in range(len(bars))], claims, 0.38, color="#c9d3de", label="claimed")
    colors = [LIMIT if bound > claim else COLORS[0] for _, claim, bound in bars]
    right = axes.bar([x + 0.2 for x in range(len(bars))], bounds, 0.38, color=colors, label=proved)
    axes.bar_label(left, [f"{claim:.3g}" for claim in claims], fontsize=8, color=GREY, padding=2)
    axes.bar_label(right, [f"{bound:.2f}" for bound in bounds], fontsize=8, padding=2)
    axes.set_xticks(range(len(bars)), names)
    axes.set(ylabel="epsilon", ylim=(0, 1.15 * max(*claims, *bounds)))
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
        style = {"fmt": "o", "markersize": 5, "capsize": 3, "color": color, "label": attack}
        axes.errorbar([point[2] for point in mine], heights, xerr=reach, **style)
        proved = [(point[5], height) for point, height in zip(mine, heights, strict=True) if point[5]]
        if proved:
            axes.plot(*zip(*proved, strict=True), "|", markersize=14, color=color, label=f"{attack}: proved bound")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="AUC of the membership attack, in %", xlim=(None, 101))
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save_figure(figure, path)
