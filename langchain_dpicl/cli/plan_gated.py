"""``dpicl plan --gated``: the numbers of a plan with tickets, in words and curves; `privacy.gate` explains them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_dpicl.plots.curves import Curve, Panel
from langchain_dpicl.plots.style import GREY, SHADES

if TYPE_CHECKING:
    from langchain_dpicl.privacy.explain import Calls
    from langchain_dpicl.privacy.gate import Gate


def numbers(gate: Gate, margins: Sequence[int], labels: int, calls: Calls | None) -> dict[str, Any]:
    """Return everything that is said of a gated plan, ready for JSON."""
    plan = gate.solve(gate.rate, gate.tickets)
    found = plan.numbers(members=gate.members, margins=margins, labels=labels)
    line = found["lines"][gate.mechanism]
    for entry in (line, *line["curve"]):
        entry["tickets"] = entry.pop("releases")
    if calls is not None:
        line["cost_per_answer"] = calls.cost(gate.members)
    noise = plan.lines[gate.mechanism].parameter
    found["plan"] = json.loads(plan.to_json())
    found["gated"] = {
        "eligible": gate.eligible,
        "owners": gate.owners,
        "members": gate.members,
        "rate": gate.rate,
        "tickets": gate.tickets,
        "exemplars": gate.rate * gate.eligible,
        "parameter": gate.family.parameter,
        "noise": noise,
        "signal": gate.signal(gate.members, noise),
        "signal_is": gate.signal_name,
    }
    shares = {1.0, 0.5, 0.1, 0.01, gate.eligible / gate.owners}
    found["lasts"] = [
        {"share": share, "queries": int(gate.tickets / share + 1e-9)} for share in sorted(shares, reverse=True)
    ]
    found["trade_off"] = gate.trade_off()
    counts = sorted({gate.tickets, gate.lasting})
    found["blind"] = [gate.point(gate.members, gate.blind_rate, queries=count) for count in counts]
    full = "every eligible owner takes part, so nothing is amplified: fewer members or shots?"
    found["warnings"] = [full] if gate.rate == 1.0 else []
    return found


def words(gate: Gate, found: dict[str, Any]) -> str:
    """Return what `numbers` found as a text."""
    line, parameter = found["lines"][gate.mechanism], gate.family.parameter
    text = [
        f"All releases together are (epsilon, delta)-differentially private with epsilon {gate.epsilon:g} and delta "
        f"{gate.delta:.3g} when all exemplars of one owner are added or removed (certified: "
        f"{found['certified_epsilon']:.4g}), however many queries are asked: an owner is "
        f"eligible for {gate.tickets:,} of them at most, and is left out of all others.",
        "",
        f"{gate.mechanism}: each answer gives out {line['what']}.",
        f"  A query finds {gate.eligible:,} of {gate.owners:,} owners eligible, by a public estimate. Each of them "
        f"uses one of its {gate.tickets:,} tickets, sampled or not.",
        f"  An eligible owner takes part with probability {gate.rate:.4g}: {gate.rate * gate.eligible:.4g} exemplars "
        f"for {gate.members:,} members, on average.",
        f"  Signal over noise: {gate.signal_name} = {found['gated']['signal']:.3g}.",
    ]
    text += [
        f"  A winner ahead by {row['margin']} of {gate.members} votes is overturned with probability "
        f"{row['flip_probability']:.3g}."
        for row in line.get("flips", ())
    ]
    if "cost_per_answer" in line:
        text.append(f"  An answer costs {line['cost_per_answer']:.4g}.")
    text += ["", "How long an owner's tickets last:"]
    for row in found["lasts"]:
        average = " (the average owner)" if row["share"] == gate.eligible / gate.owners else ""
        text.append(f"  eligible for {100 * row['share']:.3g}% of the queries{average}: {row['queries']:,} queries")
    text += [
        "  When popular owners have no ticket left, queries find fewer than estimated.",
        "",
        f"{parameter} at this epsilon, and ({gate.signal_name}), with as many exemplars for each member:",
    ]
    points = found["trade_off"]
    counts = sorted({point["tickets"] for point in points})
    text.append(f"  {'members':>7}  {'rate':>7}" + "".join(f"  {f'{count:,} tickets':>18}" for count in counts))
    for members in sorted({point["members"] for point in points}):
        row = [point for point in points if point["members"] == members]
        text.append(f"  {members:>7,}  {row[0]['rate']:>7.4g}" + "".join(f"  {_cell(point):>18}" for point in row))
    text += [
        "",
        f"Without the gate, {gate.members:,} members sample all {gate.owners:,} owners at a rate of "
        f"{gate.blind_rate:.4g}:",
    ]
    for point in found["blind"]:
        why = ", as long as an average owner's tickets last" if point["queries"] == gate.lasting else ""
        text.append(f"  {point['queries']:,} queries in all{why}: {parameter} {_cell(point)}")
    text.append("These figures ignore relevance, which is the benefit you pay for.")
    return "\n".join(text)


def _cell(point: dict[str, Any]) -> str:
    return "no plan" if point["noise"] is None else f"{point['noise']:.3g} ({point['signal']:.3g})"


def panels(gate: Gate) -> list[Panel]:
    """Return noise against tickets at several rates, and signal over noise against members."""
    from langchain_dpicl.privacy.accountant import MAX_COUNT

    def noise(rate: float, label: str, color: str, style: str = "-") -> Curve:
        return Curve([(count, gate.noise(rate, count)) for count in counts], label, color, style)

    def signal(tickets: float, share: float, label: str, color: str, style: str = "-") -> Curve:
        count = max(1, round(tickets))
        found = [(n, gate.signal(n, gate.noise(gate.rate_of(n) * share, count))) for n in crowds]
        return Curve(found, f"{label.format(count)}", color, style)

    shades = (SHADES[0], SHADES[2], SHADES[3])
    counts = _steps(gate.tickets / 8, gate.tickets * 32, MAX_COUNT)
    rates = sorted({min(1.0, gate.rate * factor) for factor in (0.25, 1.0, 4.0)})
    noises = [noise(rate, f"gated, q = {rate:.3g}", shade) for rate, shade in zip(rates, shades, strict=False)]
    noises.append(noise(gate.blind_rate, f"blind, q = {gate.blind_rate:.3g}: queries in all", GREY, "--"))

    most = max(gate.members, round(gate.members / gate.rate))
    crowds = _steps(gate.members / 4, min(most, gate.members * 16), most)
    tickets = [(gate.tickets * factor, shade) for factor, shade in zip((0.25, 1.0, 4.0), shades, strict=True)]
    signals = [signal(count, 1.0, "gated, {:,} tickets", shade) for count, shade in tickets]
    share, blind = gate.eligible / gate.owners, "blind, {:,} queries in all"
    signals += [signal(gate.tickets, share, blind, GREY, ":"), signal(gate.lasting, share, blind, GREY, "--")]

    least, parameter = gate.noise(gate.rate, gate.tickets), gate.family.parameter
    title, signal_title = f"The {parameter} that epsilon {gate.epsilon:g} allows", "Signal over noise at epsilon"
    return [
        Panel(title, "tickets of an owner", parameter, noises, is_log=True, plan=(gate.tickets, least)),
        Panel(
            f"{signal_title} {gate.epsilon:g}",
            "members (as many exemplars each)",
            gate.signal_name,
            signals,
            is_log=True,
            plan=(gate.members, gate.signal(gate.members, least)),
        ),
    ]


def _steps(low: float, high: float, most: int, points: int = 6) -> list[int]:
    """Return whole numbers from ``low`` to ``high``, evenly on a logarithmic scale."""
    low, high = max(1.0, low), max(1.0, high)
    return sorted({min(most, max(1, round(low * (high / low) ** (i / (points - 1))))) for i in range(points)})
