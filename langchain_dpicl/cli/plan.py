"""``dpicl plan``: from a target to rate, noise and cost, with a picture of the trade-offs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli import plan_gated
from langchain_dpicl.cli.options import add_ensemble, add_prices, new_parser
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.plots.curves import Curve, Panel, draw_panels
from langchain_dpicl.plots.style import SHADES
from langchain_dpicl.privacy.checks import probability, whole
from langchain_dpicl.privacy.mechanisms import MECHANISMS, FrozenMapping

if TYPE_CHECKING:
    from langchain_dpicl.privacy import PrivacyPlan
    from langchain_dpicl.privacy.explain import Calls
    from langchain_dpicl.privacy.gate import Gate

_TICKETS = (
    "The others verify this number of releases. That a ticket is one release, whichever queries an owner is eligible "
    "for, is a theorem of this library: tickets apply to neither of them."
)


def add_parser(commands: Any) -> None:
    """Declare the command."""
    parser = new_parser(
        commands,
        "plan",
        run,
        "what a privacy target allows: rate, noise, cost, chance that noise flips a vote",
        "Solve for the least noise that keeps a privacy promise, and say what it means.",
    )
    target = parser.add_argument_group("the promise")
    target.add_argument("--epsilon", type=float, required=True, help="all releases together stay below this epsilon")
    target.add_argument("--delta", type=float, required=True, help="at this delta; choose it below 1/owners")
    target.add_argument("--releases", type=int, required=True, help="how many answers (for tokens: how many tokens)")
    target.add_argument("--mechanism", choices=sorted(MECHANISMS), default="vote")
    shape = parser.add_argument_group("the ensemble")
    shape.add_argument("--owners", type=int, help="people whose exemplars are in the store")
    add_ensemble(shape, members=10, shots=4)
    shape.add_argument("--rate", type=float, help="sampling rate, instead of members * shots / owners")
    shape.add_argument("--labels", type=int, default=2, help="labels of a vote (default: 2)")
    shape.add_argument("--margin", type=int, action="append", default=[], help="votes by which a winner leads (repeat)")
    gate = parser.add_argument_group("the relevance gate")
    gate.add_argument("--gated", action="store_true", help="plan for tickets: --releases counts them, for each owner")
    gate.add_argument("--eligible", type=int, help="owners that a query finds eligible: a public estimate")
    fixed = parser.add_argument_group("fixed numbers of a mechanism")
    fixed.add_argument("--delta0", type=float, help="ptr: chance of a release after a failed test, paid every time")
    fixed.add_argument("--select", type=float, help="ptr: choose k with eps0 = select / sigma (default: k is public)")
    fixed.add_argument("--step", type=float, help="embedding: the lattice of the noise")
    bill = parser.add_argument_group("the bill")
    bill.add_argument("--prompt-tokens", type=float, help="tokens of one member's prompt")
    bill.add_argument("--answer-tokens", type=float, default=0.0, help="tokens of one member's answer")
    add_prices(bill)
    parser.add_argument("--verify", action="store_true", help="ask prv-accountant and dp-accounting too (minutes)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the trade-offs between epsilon, releases and noise")


def run(options: argparse.Namespace) -> int:
    """Print the plan. Raises the package's errors, which the command line prints."""
    from langchain_dpicl.privacy.explain import words

    if options.gated:
        gate, calls = gate_of(options), _calls(options)
        numbers = plan_gated.numbers(gate, options.margin, options.labels, calls)
        warnings = numbers["warnings"] = [*_delta_warning(options), *numbers["warnings"]]
        text = plan_gated.words(gate, numbers)
    else:
        plan = _plan(options)
        shape = {"members": options.members, "shots": options.shots, "margins": options.margin}
        numbers = plan.numbers(**shape, labels=options.labels, calls=_calls(options))
        numbers["plan"] = json.loads(plan.to_json())
        if warnings := _delta_warning(options):
            (numbers["warning"],) = warnings
        text = words(numbers)
    if options.verify:
        verified = (gate.solve(gate.rate, gate.tickets) if options.gated else plan).verify()
        numbers["verification"] = verified.to_dict()
        text += f"\n\n{verified}"
        if options.gated:
            numbers["verification"]["note"] = _TICKETS
            text += f"\n{_TICKETS}"
    if options.plot:
        panels = plan_gated.panels(gate) if options.gated else panels_of(plan, options)
        draw_panels(panels, options.plot)
        numbers["plot"] = options.plot
    if options.json:
        print(json.dumps(numbers, indent=2, sort_keys=True))
        return 0
    print(text)
    for warning in warnings:
        print(f"\nwarning: {warning}", file=sys.stderr)
    return 0


def gate_of(options: argparse.Namespace) -> Gate:
    """Check the options of a gated plan."""
    from langchain_dpicl.privacy.accountant import MAX_COUNT
    from langchain_dpicl.privacy.gate import Gate

    if options.mechanism == "threshold":
        bound = "a mechanism of answers: the threshold comes before a gate"
        raise InvalidParameter("mechanism", options.mechanism, bound)
    for name in ("owners", "eligible"):
        if getattr(options, name) is None:
            raise InvalidParameter(name, None, "required with --gated")
    owners = whole("owners", options.owners)
    eligible = whole("eligible", options.eligible, at_most=owners)
    members, shots = whole("members", options.members), whole("shots", options.shots)
    return Gate(
        options.epsilon,
        options.delta,
        options.mechanism,
        FrozenMapping(_fixed(options)),
        eligible,
        owners,
        members,
        rate=min(1.0, members * shots / eligible) if options.rate is None else probability("rate", options.rate),
        tickets=whole("releases", options.releases, at_most=MAX_COUNT),
    )


def _plan(options: argparse.Namespace) -> PrivacyPlan:
    from langchain_dpicl.privacy import LineRequest, PrivacyPlan

    if options.eligible is not None:
        bound = "given with --gated: without a gate all owners are eligible"
        raise InvalidParameter("eligible", options.eligible, bound)
    owners = None
    if options.mechanism == "threshold":
        if options.rate not in (None, 1.0):
            raise InvalidParameter("rate", options.rate, "1: all owners take part in the release of a threshold")
        rate = 1.0
    elif options.rate is not None:
        rate = options.rate
    elif options.owners is None:
        raise InvalidParameter("owners", None, "give --owners (with --members and --shots) or --rate")
    else:
        owners = whole("owners", options.owners)
        rate = min(1.0, whole("members", options.members) * whole("shots", options.shots) / owners)
    request = LineRequest(options.mechanism, rate, options.releases, options=_fixed(options), owners=owners)
    return PrivacyPlan.solve(epsilon=options.epsilon, delta=options.delta, lines={options.mechanism: request})


def _fixed(options: argparse.Namespace) -> dict[str, float]:
    """Return the fixed numbers of the mechanism that were given."""
    given = {name: value for name in ("delta0", "select", "step") if (value := getattr(options, name)) is not None}
    for name, value in given.items():
        if name not in MECHANISMS[options.mechanism].options:
            raise InvalidParameter(name, value, f"{options.mechanism} has no such number")
    return given


def _calls(options: argparse.Namespace) -> Calls | None:
    """Return the cost of one member's call, if it was given."""
    from langchain_dpicl.privacy.explain import Calls

    if options.prompt_tokens is None:
        return None
    return Calls(options.prompt_tokens, options.answer_tokens, options.price_in, options.price_out)


def _delta_warning(options: argparse.Namespace) -> list[str]:
    """Warn of a delta that allows one owner's exemplars to be revealed whole."""
    if options.owners is None or options.delta < 1.0 / options.owners:
        return []
    return [f"delta {options.delta:g} is not below 1/owners = {1.0 / options.owners:.3g}"]


# -- the picture -------------------------------------------------------------------------------------------------------


def epsilon_curve(plan: PrivacyPlan, points: int = 24) -> list[tuple[float, float | None]]:
    """Return the certified epsilon after n releases of a plan with one line, from 1 to all of them."""
    from langchain_dpicl.privacy.accountant import PLDAccountant

    (line,) = plan.lines.values()
    counts = sorted({max(1, round(line.count ** (index / (points - 1)))) for index in range(points)})
    accountant = PLDAccountant()
    return [(n, min(plan.epsilon, accountant.epsilon([line.line(line.parameter, n)], plan.delta))) for n in counts]


def noise_curve(plan: PrivacyPlan, epsilons: tuple[float, ...]) -> list[tuple[float, float]]:
    """Return the noise parameter that each epsilon allows, with everything else as in the plan."""
    from langchain_dpicl.privacy import LineRequest, PrivacyPlan

    ((name, line),) = plan.lines.items()
    request = LineRequest(line.mechanism, line.rate, line.count, line.weight, line.options)
    solved = [PrivacyPlan.solve(epsilon=each, delta=plan.delta, lines={name: request}) for each in epsilons]
    return [(epsilon, other.lines[name].parameter) for epsilon, other in zip(epsilons, solved, strict=True)]


def panels_of(plan: PrivacyPlan, options: argparse.Namespace) -> list[Panel]:
    """Return epsilon against releases, and the effect of other epsilons on the answers."""
    from langchain_dpicl.privacy.explain import VOTES, flip_probability

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
        parameter, values = line.family.parameter, [value for _, value in noise]
        title, wide = f"The {parameter} that an epsilon allows", max(values) > 30.0 * min(values)
        return [spent, Panel(title, x, parameter, [Curve(noise)], is_log=wide, plan=(plan.epsilon, None))]
    members, labels = options.members, options.labels
    margins = options.margin or sorted({max(1, round(members * share)) for share in (0.1, 0.3, 0.5, 1.0)})
    flips = [
        Curve(
            [(epsilon, flip_probability(sigma, margin, labels)) for epsilon, sigma in noise],
            f"ahead by {margin} of {members}",
            SHADES[min(index, 3)],
        )
        for index, margin in enumerate(margins)
    ]
    title, y = f"What noise does to a vote of {members} members", "chance that noise flips the vote"
    return [spent, Panel(title, x, y, flips, top=1.05 - 1.0 / labels, plan=(plan.epsilon, None))]
