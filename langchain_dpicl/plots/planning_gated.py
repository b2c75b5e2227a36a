"""Two pictures of a gated plan: noise against tickets, and signal over noise against members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_dpicl.cli.planning import new_figure, save_figure
from langchain_dpicl.cli.planning_gated import Gate
from langchain_dpicl.privacy.accountant import MAX_COUNT

_SHADES = ("#9ecae1", "#4292c6", "#08306b")


def draw_gated(gate: Gate, path: str) -> None:
    """Two pictures side by side: noise against tickets at several rates, and signal over noise against members."""
    figure = new_figure(path)
    noise, signal = figure.subplots(1, 2)
    _draw_noise(noise, gate)
    _draw_signal(signal, gate)
    save_figure(figure, path)


def _draw_noise(axes: Any, gate: Gate) -> None:
    counts = _steps(gate.tickets / 8, gate.tickets * 32, MAX_COUNT)
    rates = sorted({min(1.0, gate.rate * factor) for factor in (0.25, 1.0, 4.0)})
    for rate, shade in zip(rates, _SHADES, strict=False):
        _curve(axes, counts, [gate.noise(rate, n) for n in counts], shade, f"gated, q = {rate:.3g}")
    _curve(
        axes,
        counts,
        [gate.noise(gate.blind_rate, n) for n in counts],
        "#7f7f7f",
        f"blind, q = {gate.blind_rate:.3g}: queries in all",
        "--",
    )
    plan = gate.noise(gate.rate, gate.tickets)
    if plan is not None:
        axes.plot([gate.tickets], [plan], marker="o", color="#b03a2e", linestyle="none", label="the plan", zorder=4)
    axes.set(xscale="log", yscale="log", xlabel="tickets of an owner", ylabel=gate.family.parameter)
    axes.set_title(f"The {gate.family.parameter} that epsilon {gate.epsilon:g} allows")
    _legend(axes)


def _draw_signal(axes: Any, gate: Gate) -> None:
    most = max(gate.members, round(gate.members / gate.rate))
    crowds = _steps(max(1.0, gate.members / 4), min(most, gate.members * 16), most)
    tickets = [gate.tickets * factor for factor in (0.25, 1.0, 4.0)]
    for count, shade in zip(tickets, _SHADES, strict=True):
        number = max(1, round(count))
        values = [gate.signal(n, gate.noise(gate.rate_of(n), number)) for n in crowds]
        _curve(axes, crowds, values, shade, f"gated, {number:,} tickets")
    share = gate.eligible / gate.owners
    for queries, style in ((gate.tickets, ":"), (gate.lasting, "--")):
        values = [gate.signal(n, gate.noise(gate.rate_of(n) * share, queries)) for n in crowds]
        _curve(axes, crowds, values, "#7f7f7f", f"blind, {queries:,} queries in all", style)
    plan = gate.signal(gate.members, gate.noise(gate.rate, gate.tickets))
    if plan is not None:
        axes.plot([gate.members], [plan], marker="o", color="#b03a2e", linestyle="none", label="the plan", zorder=4)
    axes.set(xscale="log", yscale="log", ylabel=gate.signal_name, xlabel="members (as many exemplars each)")
    axes.set_title(f"Signal over noise at epsilon {gate.epsilon:g}")
    _legend(axes)


def _legend(axes: Any) -> None:
    """Above the curves, in room made for it."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.75)
    axes.legend(frameon=False, loc="upper left")


def _curve(axes: Any, x: Sequence[int], y: Sequence[float | None], color: str, label: str, style: str = "-") -> None:
    known = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
    axes.plot(
        [a for a, _ in known],
        [b for _, b in known],
        marker="o",
        markersize=3,
        color=color,
        linestyle=style,
        label=label,
    )


def _steps(low: float, high: float, most: int, points: int = 6) -> list[int]:
    """Whole numbers from low to high, evenly on a logarithmic scale."""
    low, high = max(1.0, low), max(1.0, high)
    return sorted({min(most, max(1, round(low * (high / low) ** (i / (points - 1))))) for i in range(points)})
