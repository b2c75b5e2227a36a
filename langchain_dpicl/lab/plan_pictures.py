"""Pictures of ``dpicl plan --plot``."""

from __future__ import annotations

from langchain_dpicl.lab.plots import GREY, SHADES, Curve, Panel, draw_panels
from langchain_dpicl.privacy import LineRequest, PLDAccountant, PrivacyPlan
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.gate import Gate
from langchain_dpicl.privacy.profile import MAX_COUNT
from langchain_dpicl.privacy.votes import VOTES, VoteNoise


def draw_plan(path: str, plan: PrivacyPlan, crowd: Crowd, labels: int, margins: list[int]) -> None:
    """Draw epsilon against releases, and the effect of other epsilons on the answers."""
    draw_panels(_panels(plan, crowd, labels, margins), path)


def draw_gate(path: str, gate: Gate) -> None:
    """Draw noise against tickets at several rates, and signal over noise against members."""
    draw_panels(_gated_panels(gate), path)


def epsilon_curve(plan: PrivacyPlan, points: int = 24) -> list[tuple[float, float | None]]:
    """Return the certified epsilon after n releases of a plan with one line, from 1 to all of them."""
    (line,) = plan.lines.values()
    accountant = PLDAccountant()
    return [
        (n, min(plan.epsilon, accountant.epsilon([line.line(line.parameter, n)], plan.delta)))
        for n in _steps(1, line.count, line.count, points)
    ]


def noise_curve(plan: PrivacyPlan, epsilons: tuple[float, ...]) -> list[tuple[float, float]]:
    """Return the noise parameter that each epsilon allows, with everything else as in the plan."""
    (line,) = plan.lines.values()
    request = LineRequest(line.mechanism, line.rate, line.count, line.weight, line.options)
    return [(each, PrivacyPlan.alone(request, epsilon=each, delta=plan.delta).parameter) for each in epsilons]


def _panels(plan: PrivacyPlan, crowd: Crowd, labels: int, margins: list[int]) -> list[Panel]:
    """Return epsilon against releases, and the effect of other epsilons on the answers."""
    (line,) = plan.lines.values()
    noise = noise_curve(plan, tuple(plan.epsilon * x for x in (0.1, 0.18, 0.32, 0.56, 1.0, 1.8, 3.2, 5.6, 10.0)))
    spent = Panel(
        f"What {line.count:,} releases spend",
        "releases",
        f"epsilon (delta {plan.delta:.2g})",
        [Curve(epsilon_curve(plan))],
        plan=(None, plan.epsilon),
        note=f"the plan: epsilon {plan.epsilon:g}",
    )
    x = f"epsilon of all {line.count:,} releases"
    if line.mechanism not in VOTES:
        parameter = line.family.parameter
        values = [value for _, value in noise]
        allowed = Panel(
            f"The {parameter} that an epsilon allows",
            x,
            parameter,
            [Curve(noise)],
            is_log=max(values) > 30.0 * min(values),
            plan=(plan.epsilon, None),
        )
        return [spent, allowed]
    votes = f"{crowd.expected:.3g}"
    margins = margins or sorted({crowd.ahead_by(share) for share in (0.1, 0.3, 0.5, 1.0)})
    flips = []
    for i, margin in enumerate(margins):
        chances = [(e, VoteNoise(line.mechanism, at, line.own_calls).flip(margin, labels)) for e, at in noise]
        flips.append(Curve(chances, f"ahead by {margin} of {votes}", SHADES[min(i, 3)]))
    flipped = Panel(
        f"What noise does to {votes} expected votes",
        x,
        "chance that noise flips the vote",
        flips,
        top=1.05 - 1.0 / labels,
        plan=(plan.epsilon, None),
    )
    return [spent, flipped]


def _gated_panels(gate: Gate) -> list[Panel]:
    """Return noise against tickets at several rates, and signal over noise against members."""

    def noise(rate: float, label: str, color: str, style: str = "-") -> Curve:
        return Curve([(count, gate.noise(rate, count)) for count in counts], label, color, style)

    def signal(tickets: float, share: float, label: str, color: str, style: str = "-") -> Curve:
        count = max(1, round(tickets))
        found = [(n, gate.signal(n, gate.noise(gate.rate_of(n) * share, count))) for n in crowds]
        return Curve(found, label.format(count), color, style)

    shades = (SHADES[0], SHADES[2], SHADES[3])
    counts = _steps(gate.tickets / 8, gate.tickets * 32, MAX_COUNT)
    rates = sorted({min(1.0, gate.rate * factor) for factor in (0.25, 1.0, 4.0)})
    noises = [noise(rate, f"gated, q = {rate:.3g}", shade) for rate, shade in zip(rates, shades, strict=False)]
    noises.append(
        noise(
            gate.blind_rate,
            f"blind, q = {gate.blind_rate:.3g}: queries in all",
            GREY,
            "--",
        )
    )

    most = max(gate.members, round(gate.members / gate.rate))
    crowds = _steps(gate.members / 4, min(most, gate.members * 16), most)
    signals = [
        signal(gate.tickets * factor, 1.0, "gated, {:,} tickets", shade)
        for factor, shade in zip((0.25, 1.0, 4.0), shades, strict=True)
    ]
    share = gate.eligible / gate.owners
    for count, style in ((gate.tickets, ":"), (gate.lasting, "--")):
        signals.append(signal(count, share, "blind, {:,} queries in all", GREY, style))

    parameter = gate.family.parameter
    least = gate.noise(gate.rate, gate.tickets)
    left = Panel(
        f"The {parameter} that epsilon {gate.epsilon:g} allows",
        "tickets of an owner",
        parameter,
        noises,
        is_log=True,
        plan=(gate.tickets, least),
    )
    right = Panel(
        f"Signal over noise at epsilon {gate.epsilon:g}",
        f"{gate.unit}s (as many exemplars each)",
        gate.signal_name,
        signals,
        is_log=True,
        plan=(gate.members, gate.signal(gate.members, least)),
    )
    return [left, right]


def _steps(low: float, high: float, most: int, points: int = 6) -> list[int]:
    """Return whole numbers from ``low`` to ``high``, evenly on a logarithmic scale."""
    low = max(1.0, low)
    growth = max(1.0, high) / low
    steps = {round(low * growth ** (i / (points - 1))) for i in range(points)}
    return sorted({min(most, max(1, step)) for step in steps})
