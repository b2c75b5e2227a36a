"""`dpicl plan --gated`: what tickets for every owner allow, where relevant owners alone take part.

A gated plan is sized by the owners that a query finds eligible, E of them, a public estimate: the rate is
q = min(1, members * shots / E). Its count T is not a number of queries. It is each owner's number of tickets, of which
every query that finds the owner eligible burns one; so the number of queries has no limit, and an owner that is
eligible for a share s of them lasts T / s queries.

With E much below the number of owners, q is larger than without a gate, and amplifies less. That is the price of
relevance, and these numbers show it: noise against rate, members and tickets, beside the blind plan of the same
epsilon, for T queries in all and for as many as an average owner's tickets last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.cli.planning import calls_of, delta_warning, fixed_options
from langchain_dpicl.errors import InfeasiblePlan, InvalidParameter
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.accountant import MAX_COUNT
from langchain_dpicl.privacy.checks import probability, whole
from langchain_dpicl.privacy.mechanisms import MECHANISMS, FrozenMapping, Mechanism

_MEMBERS = (0.5, 1.0, 2.0, 4.0)
_TICKETS = (0.25, 1.0, 4.0, 16.0)
_SHARES = (1.0, 0.5, 0.1, 0.01)


@dataclass(frozen=True)
class Gate:
    """What is public about a gated selection.

    Parameters
    ----------
    epsilon, delta
        What everything together gives away of one owner, at most.
    mechanism, options
        The family of the releases and its fixed numbers.
    eligible, owners
        How many owners a query finds eligible, an estimate, and how many there are.
    members, rate, tickets
        N, q and T.
    """

    epsilon: float
    delta: float
    mechanism: str
    options: FrozenMapping[float]
    eligible: int
    owners: int
    members: int
    rate: float
    tickets: int

    @property
    def family(self) -> Mechanism:
        """The mechanism's family."""
        return MECHANISMS[self.mechanism]

    @property
    def lasting(self) -> int:
        """How many queries an average owner's tickets last."""
        return self.tickets * self.owners // self.eligible

    @property
    def blind_rate(self) -> float:
        """The rate at which as many owners are sampled of all as the gate samples of the eligible ones."""
        return min(1.0, self.rate * self.eligible / self.owners)

    def rate_of(self, members: int) -> float:
        """The rate with other members and as many exemplars for each."""
        return min(1.0, self.rate * members / self.members)

    def solve(self, rate: float, count: int) -> PrivacyPlan:
        """The plan of one line, at this rate for so many tickets, or queries."""
        request = LineRequest(self.mechanism, rate, count, options=self.options)
        return PrivacyPlan.solve(epsilon=self.epsilon, delta=self.delta, lines={self.mechanism: request})

    def noise(self, rate: float, count: int) -> float | None:
        """The noise parameter at this rate for so many; None where no noise is enough, or so many are not accounted."""
        if count > MAX_COUNT:
            return None
        try:
            return self.solve(rate, count).lines[self.mechanism].parameter
        except InfeasiblePlan:
            return None

    @property
    def signal_name(self) -> str:
        """What `signal` is, in words."""
        if self.mechanism == "tokens":
            return "exemplars * range_bound"
        return f"members / {self.family.parameter}" if self.family.noisier > 0 else "members * eps0 / 4"

    def signal(self, members: int, parameter: float | None) -> float | None:
        """What all members together can say, over the noise: more is better.

        For a sigma, N / sigma. For joint-em, N eps0 / 4: the logarithm of the odds of a word that all name against one
        that nobody names. For tokens, expected exemplars times range_bound: the furthest that they move two logits.
        """
        if parameter is None:
            return None
        if self.mechanism == "tokens":
            return self.rate_of(members) * self.eligible * parameter
        return members / parameter if self.family.noisier > 0 else members * parameter / 4.0


def run_gated(args: argparse.Namespace) -> int:
    """Print the plan. Errors of the package surface as they are: the command line prints them."""
    gate = _gate(args)
    numbers = _numbers(gate, args)
    if args.plot:
        from langchain_dpicl.plots.planning_gated import draw_gated

        draw_gated(gate, args.plot)
        numbers["plot"] = args.plot
    if args.json:
        print(json.dumps(numbers, indent=2, sort_keys=True))
    else:
        print(_words(gate, numbers))
        for warning in numbers["warnings"]:
            print(f"\nwarning: {warning}", file=sys.stderr)
    return 0


def _gate(args: argparse.Namespace) -> Gate:
    if args.mechanism == "threshold":
        raise InvalidParameter("mechanism", args.mechanism, "a mechanism of answers: the threshold comes before a gate")
    if args.owners is None:
        raise InvalidParameter("owners", None, "given with --gated: people whose exemplars are in the store")
    owners = whole("owners", args.owners)
    if args.eligible is None:
        raise InvalidParameter("eligible", None, "given with --gated: owners that a query finds eligible, an estimate")
    eligible = whole("eligible", args.eligible, at_most=owners)
    members, shots = whole("members", args.members), whole("shots", args.shots)
    rate = min(1.0, members * shots / eligible) if args.rate is None else probability("rate", args.rate)
    tickets = whole("releases", args.releases, at_most=MAX_COUNT)
    options = FrozenMapping(fixed_options(args))
    return Gate(args.epsilon, args.delta, args.mechanism, options, eligible, owners, members, rate, tickets)


def _numbers(gate: Gate, args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is said, ready for JSON."""
    plan = gate.solve(gate.rate, gate.tickets)
    numbers = plan.numbers(members=gate.members, margins=args.margin, labels=args.labels)
    line = numbers["lines"][gate.mechanism]
    line["tickets"] = line.pop("releases")
    for point in line["curve"]:
        point["tickets"] = point.pop("releases")
    calls = calls_of(args)
    if calls is not None:
        line["cost_per_answer"] = calls.cost(gate.members)
    average = gate.eligible / gate.owners
    value = plan.lines[gate.mechanism].parameter
    numbers["plan"] = json.loads(plan.to_json())
    numbers["gated"] = {
        "eligible": gate.eligible,
        "owners": gate.owners,
        "members": gate.members,
        "rate": gate.rate,
        "tickets": gate.tickets,
        "exemplars": gate.rate * gate.eligible,
        "parameter": gate.family.parameter,
        "noise": value,
        "signal": gate.signal(gate.members, value),
        "signal_is": gate.signal_name,
    }
    numbers["lasts"] = [
        {"share": share, "queries": int(gate.tickets / share + 1e-9)}
        for share in sorted({*_SHARES, average}, reverse=True)
    ]
    numbers["trade_off"] = _trade_off(gate)
    numbers["blind"] = [
        _point(gate, gate.members, gate.blind_rate, queries=queries) for queries in sorted({gate.tickets, gate.lasting})
    ]
    numbers["warnings"] = [warning] if (warning := delta_warning(args)) else []
    if gate.rate == 1.0:
        numbers["warnings"].append("every eligible owner takes part, so nothing is amplified: fewer members or shots?")
    return numbers


def _trade_off(gate: Gate) -> list[dict[str, Any]]:
    """Other numbers of members, with as many exemplars each, and of tickets."""
    crowds = sorted({max(1, round(gate.members * factor)) for factor in _MEMBERS})
    full = [members for members in crowds if gate.rate_of(members) == 1.0]
    shown = [members for members in crowds if members <= max(gate.members, min(full, default=crowds[-1]))]
    counts = sorted({max(1, round(gate.tickets * factor)) for factor in _TICKETS})
    return [
        _point(gate, members, gate.rate_of(members), tickets=count)
        for members in shown
        for count in counts
        if count <= MAX_COUNT
    ]


def _point(gate: Gate, members: int, rate: float, **count: int) -> dict[str, Any]:
    (number,) = count.values()
    noise = gate.noise(rate, number)
    return {"members": members, "rate": rate, **count, "noise": noise, "signal": gate.signal(members, noise)}


# -- in words ----------------------------------------------------------------------------------------------------------


def _words(gate: Gate, numbers: dict[str, Any]) -> str:
    """The same for people."""
    line, parameter = numbers["lines"][gate.mechanism], gate.family.parameter
    text = [
        f"All releases together are (epsilon, delta)-differentially private with epsilon {gate.epsilon:g} and delta "
        f"{gate.delta:.3g} when all exemplars of one owner are added or removed (certified: "
        f"{numbers['certified_epsilon']:.4g}), however many queries are asked: an owner is "
        f"eligible for {gate.tickets:,} of them at most, and is left out of all others.",
        "",
        f"{gate.mechanism}: each answer gives out {line['what']}.",
        f"  A query finds {gate.eligible:,} of {gate.owners:,} owners eligible, by a public estimate. Each of them "
        f"burns one of its {gate.tickets:,} tickets, sampled or not.",
        f"  An eligible owner takes part with probability {gate.rate:.4g}: {gate.rate * gate.eligible:.4g} exemplars "
        f"for {gate.members:,} members, on average.",
        f"  Signal over noise: {gate.signal_name} = {numbers['gated']['signal']:.3g}.",
    ]
    text += [
        f"  A winner ahead by {row['margin']} of {gate.members} votes is overturned with probability "
        f"{row['flip_probability']:.3g}."
        for row in line.get("flips", ())
    ]
    if "cost_per_answer" in line:
        text.append(f"  An answer costs {line['cost_per_answer']:.4g}.")
    text += ["", "How long an owner's tickets last:"]
    text += [
        f"  eligible for {100 * row['share']:.3g}% of the queries{_average(gate, row['share'])}: "
        f"{row['queries']:,} queries"
        for row in numbers["lasts"]
    ]
    text += [
        "  Where popular owners have none left, queries find fewer than estimated.",
        "",
        f"{parameter} at this epsilon, and ({gate.signal_name}), with as many exemplars for each member:",
        *_table(numbers["trade_off"]),
        "",
        f"Without the gate, {gate.members:,} members sample all {gate.owners:,} owners at a rate of "
        f"{gate.blind_rate:.4g}:",
    ]
    for point in numbers["blind"]:
        why = ", as long as an average owner's tickets last" if point["queries"] == gate.lasting else ""
        text.append(f"  {point['queries']:,} queries in all{why}: {parameter} {_cell(point)}")
    text.append("That the exemplars of gated members are relevant is not in these figures: it is what they pay for.")
    return "\n".join(text)


def _average(gate: Gate, share: float) -> str:
    return " (the average owner)" if share == gate.eligible / gate.owners else ""


def _cell(point: dict[str, Any]) -> str:
    return "no plan" if point["noise"] is None else f"{point['noise']:.3g} ({point['signal']:.3g})"


def _table(points: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each number of members, a column for each number of tickets."""
    counts = sorted({point["tickets"] for point in points})
    rows = [f"  {'members':>7}  {'rate':>7}" + "".join(f"  {f'{count:,} tickets':>18}" for count in counts)]
    for members in sorted({point["members"] for point in points}):
        row = [point for point in points if point["members"] == members]
        rows.append(f"  {members:>7,}  {row[0]['rate']:>7.4g}" + "".join(f"  {_cell(point):>18}" for point in row))
    return rows
