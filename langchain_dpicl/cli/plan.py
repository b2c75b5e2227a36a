"""The command ``plan``: its numbers, their words and their drawings."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

from langchain_dpicl.cli import add_parameters, add_prices, add_run, chosen, given, lab, show
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.parameters import Parameter, parameters_of
from langchain_dpicl.privacy import MECHANISMS, CallCosts, LineRequest, PrivacyPlan
from langchain_dpicl.privacy.checks import FrozenMapping, probability, whole
from langchain_dpicl.privacy.choice import Crowd, best_rate, best_vote, calls_made, options_of, refuse_noise
from langchain_dpicl.privacy.gate import Gate
from langchain_dpicl.privacy.lines import PlanLine
from langchain_dpicl.privacy.mechanisms import OWN_CALLS, PARTS
from langchain_dpicl.privacy.profile import MAX_COUNT
from langchain_dpicl.privacy.votes import EXPONENTIAL, GAUSSIAN, WINNER
from langchain_dpicl.privacy.words import choice_words, flip_words, one_per_call, replaced_words, words

_TICKETS = (
    "The others verify this number of releases. That a ticket is one release, whichever queries an owner is eligible "
    "for, is a theorem of this library: tickets apply to neither of them."
)

_NOISE = {"exponential": EXPONENTIAL, "gaussian": WINNER}


def plan_options(parser: Any) -> None:
    """Solve for the least noise that keeps a privacy promise, and say what it means.

    With --calls every sampled owner has a call of its own. Without it owners share the buckets of --members calls;
    without --shots and --rate the plan then chooses the rate. It also chooses a vote's mechanism.

    With --gated the plan is for tickets: --releases counts them, for each owner, and the number of queries has no
    limit.
    """
    add_run(parser, plan)
    selector = parameters_of("selection/__init__.py", "PoissonExampleSelector")
    target = parser.add_argument_group("the promise")
    target.add_argument("--epsilon", type=float, required=True, help="all releases together stay below this epsilon")
    target.add_argument("--delta", type=float, required=True, help="at this delta; choose it below 1/owners")
    target.add_argument("--releases", type=int, required=True, help="how many answers (for tokens: how many tokens)")
    target.add_argument("--mechanism", choices=sorted(MECHANISMS), default=GAUSSIAN)
    target.add_argument("--noise", choices=sorted(_NOISE), help="of a vote (default: the plan chooses)")
    shape = parser.add_argument_group("the ensemble")
    shape.add_argument("--owners", type=int, help="people whose exemplars are in the store")
    shared = {name: selector[name] for name in ("members", "calls", "pad_to", "max_calls", "shots", "rate")}
    add_parameters(shape, shared, members=f" (default {_MEMBERS})")
    shape.add_argument("--accept-noise", action="store_true", help="go on even if the plan is all noise")
    shape.add_argument("--labels", type=int, help="labels (default 2), candidates (100), or points of a median (101)")
    shape.add_argument("--margin", type=int, action="append", default=[], help="votes by which a winner leads (repeat)")
    gate = parser.add_argument_group("the relevance gate")
    gate.add_argument("--gated", action="store_true", help="plan for tickets: --releases counts them, for each owner")
    add_parameters(gate, {"eligible": selector["eligible"]})
    fixed = parser.add_argument_group("fixed numbers of a mechanism")
    add_parameters(fixed, _fixed())
    fixed.add_argument("--fields", type=int, help="structured: fields of equal shares (an optional number is two)")
    fixed.add_argument("--means", type=int, help="structured: how many of the fields are clipped means (default 0)")
    bill = parser.add_argument_group("the bill")
    bill.add_argument("--prompt-tokens", type=float, help="tokens of one member's prompt")
    bill.add_argument("--answer-tokens", type=float, default=0.0, help="tokens of one member's answer")
    add_prices(bill)
    parser.add_argument("--verify", action="store_true", help="ask prv-accountant and dp-accounting too (minutes)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the trade-offs between epsilon, releases and noise")


def _fixed() -> dict[str, Parameter]:
    """The fixed numbers that a mechanism may have, but for own calls; the words begin with those that have it."""
    fields = [(family.name, field) for family in MECHANISMS.values() for field in family.fixed().values()]
    found = {}
    for _, field in fields:
        families = ", ".join(family for family, each in fields if each.name == field.name)
        found[field.name] = Parameter(str(field.type), "None", f"{families}: {field.metadata['words']}")
    del found[OWN_CALLS]
    return found


_SHARES = ("shares", "mean_shares")
"""The fixed numbers of a mechanism whose draws divide eps0."""

_MEMBERS = 10

_PATIENCE = 5.0
"""Seconds after which a plan says that it still works."""


@contextmanager
def _told_if_slow() -> Iterator[None]:
    """Say on stderr that the work goes on, if it takes long."""
    words = "dpicl plan: still computing; low rates with many releases, --gated, --plot and --verify take longest"
    timer = Timer(_PATIENCE, print, (words,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@_told_if_slow()
def plan(options: argparse.Namespace) -> int:
    """Solve, print and draw. Raises the package's errors, which the command line prints."""
    solved, gate, crowd = _solved(options)
    calls = None
    if options.prompt_tokens is not None:
        calls = CallCosts(options.prompt_tokens, options.answer_tokens, options.price_in, options.price_out)
    numbers = solved.numbers(
        members=crowd.members,
        expected=crowd.expected,
        labels=_labels(options),
        shots=options.shots if gate is None else None,
        margins=options.margin,
        calls=calls,
    )
    numbers["plan"] = json.loads(solved.to_json())
    warnings = []
    if options.owners is not None and options.delta >= 1.0 / options.owners:  # one owner may be revealed whole
        warnings.append(f"delta {options.delta:g} is not below 1/owners = {1.0 / options.owners:.3g}")
    if gate is None:
        text = words(numbers)
        if warnings:
            numbers["warning"] = warnings[0]
    else:
        _add_gate(gate, numbers, solved.lines[gate.mechanism], _labels(options))
        text = _gated_words(gate, numbers)
        if gate.rate == 1.0:
            warnings.append("every eligible owner takes part, so nothing is amplified: fewer members or shots?")
        numbers["warnings"] = warnings
    if options.verify:
        verified = solved.verify()
        numbers["verification"] = verified.to_dict()
        text += f"\n\n{verified}"
        if gate is not None:
            numbers["verification"]["note"] = _TICKETS
            text += f"\n{_TICKETS}"
    if options.plot:
        pictures = lab("plan_pictures")
        if gate is None:
            pictures.draw_plan(options.plot, solved, crowd, _labels(options), options.margin)
        else:
            pictures.draw_gate(options.plot, gate)
        numbers["plot"] = options.plot
    show(options, numbers, text)
    for warning in [] if options.json else warnings:
        print(f"\nwarning: {warning}", file=sys.stderr)
    return 0


def _labels(options: argparse.Namespace) -> int:
    usual = MECHANISMS[options.mechanism].outcomes
    return whole("labels", usual if options.labels is None else options.labels, at_least=2)


def _solved(options: argparse.Namespace) -> tuple[PrivacyPlan, Gate | None, Crowd]:
    """Check the options and solve the plan, as a budget would. Its gate is None unless ``--gated``."""
    mechanism, rate = options.mechanism, options.rate
    owners: Any = None if options.owners is None else whole("owners", options.owners)
    fixed, known = given(options, *_fixed()), MECHANISMS[mechanism].fixed()
    if known.keys() >= set(_SHARES) and not given(options, *_SHARES):
        fields = whole("fields", options.fields, at_most=PARTS)
        means = whole("means", options.means or 0, at_least=0, at_most=fields)
        fixed |= {"shares": (1.0 / fields,) * (fields - means), "mean_shares": (1.0 / fields,) * means}
    elif stray := given(options, "fields", "means"):
        raise InvalidParameter(*next(iter(stray.items())), "given for --mechanism structured, without --shares")
    for name, value in fixed.items():
        if name not in known:
            raise InvalidParameter(name, value, f"{mechanism} has no such number")
    if options.noise is not None and mechanism != GAUSSIAN:
        raise InvalidParameter("noise", options.noise, f"given for --mechanism {GAUSSIAN}")
    if options.calls is not None and options.shots is not None:
        raise InvalidParameter("shots", options.shots, "left out with --calls: a call has one owner")
    members = options.members if given(options, "members", "calls") else _MEMBERS
    members = calls_made(members, options.calls, options.pad_to, options.max_calls)
    if options.calls is not None and OWN_CALLS not in known:
        raise InvalidParameter("calls", options.calls, f"left out: {mechanism} has no proof for one owner per call")
    if MECHANISMS[mechanism].all_take_part:
        if options.gated:
            raise InvalidParameter("mechanism", mechanism, "a mechanism of answers, not of what is released once")
        if rate not in (None, 1.0):
            raise InvalidParameter("rate", rate, f"1: all owners take part in the release of a {mechanism}")
        rate, owners = 1.0, None
    elif options.gated and owners is None:
        raise InvalidParameter("owners", None, "required with --gated")
    elif rate is None and owners is None:
        raise InvalidParameter("owners", None, "give --owners (with --calls, or --members and --shots) or --rate")
    if options.gated == (options.eligible is None):
        bound = "required with --gated" if options.gated else "given with --gated: without a gate all are eligible"
        raise InvalidParameter("eligible", options.eligible, bound)
    eligible = whole("eligible", options.eligible, at_most=owners) if options.gated else owners
    promise = options.epsilon, options.delta, whole("releases", options.releases, at_most=MAX_COUNT)
    if rate is None and options.calls is None and options.shots is None:
        rate = best_rate(*promise, members, eligible)
    elif rate is None:
        rate = min(1.0, (options.calls or members * whole("shots", options.shots)) / eligible)
    rate, labels = probability("rate", rate), _labels(options)
    crowd = Crowd.of(members, rate, eligible, options.calls, options.max_calls is not None)
    if mechanism == GAUSSIAN:
        mechanism = _NOISE[options.noise] if options.noise else best_vote(*promise, rate, crowd, labels)
    numbers, gate = FrozenMapping({**fixed, **options_of(crowd)}), None
    if options.gated:
        gate = Gate(
            *promise[:2],
            mechanism,
            numbers,
            eligible=eligible,
            owners=owners,
            members=options.calls or members,
            rate=rate,
            tickets=promise[2],
            calls=options.calls is not None,
        )
        solved = gate.solve(rate, gate.tickets)
    else:
        request = LineRequest(mechanism, rate, promise[2], options=numbers, owners=None if options.rate else owners)
        solved = PrivacyPlan.solve(epsilon=options.epsilon, delta=options.delta, lines={mechanism: request})
    line = solved.lines[mechanism]
    if not options.accept_noise:
        refuse_noise(line, line.flip(int(crowd.expected), labels), crowd, options.gated)
    return solved, gate, crowd


def _add_gate(gate: Gate, found: dict[str, Any], planned: PlanLine, labels: int) -> None:
    """Add the numbers of a gate to those of its plan, and count its line in tickets. `Gate` explains them."""
    line = found["lines"][gate.mechanism]
    if "choice" in line:
        line["choice"] |= one_per_call(planned, (gate.epsilon, gate.delta), gate.members, gate.eligible, labels)
    line.pop("cost_of_all", None)  # the number of queries has no limit
    for entry in (line, *line["curve"]):
        entry["tickets"] = entry.pop("releases")
        entry.pop("cost", None)
    noise = line[gate.family.parameter]
    found["gated"] = {
        **chosen(gate, "eligible", "owners", "members", "rate", "tickets"),
        "outputs": gate.outputs(gate.members),
        "exemplars": gate.rate * gate.eligible,
        "parameter": gate.family.parameter,
        "noise": noise,
        "signal": gate.signal(gate.members, noise),
        "signal_is": gate.signal_name,
    }
    shares = sorted({1.0, 0.5, 0.1, 0.01, gate.eligible / gate.owners}, reverse=True)
    found["lasts"] = [{"share": share, "queries": int(gate.tickets / share + 1e-9)} for share in shares]
    found["trade_off"] = gate.trade_off()
    found["blind"] = [
        gate.point(gate.members, gate.blind_rate, queries=count) for count in sorted({gate.tickets, gate.lasting})
    ]


def _gated_words(gate: Gate, found: dict[str, Any]) -> str:
    """Return the numbers of a gated plan as a text."""
    line, parameter = found["lines"][gate.mechanism], gate.family.parameter
    text = [
        f"All releases together are (epsilon, delta)-differentially private with epsilon {gate.epsilon:g} and delta "
        f"{gate.delta:.3g} when all exemplars of one owner are added or removed (certified: "
        f"{found['certified_epsilon']:.4g}), however many queries are asked: an owner is "
        f"eligible for {gate.tickets:,} of them at most, and is left out of all others.",
        replaced_words(found),
        "",
        f"{gate.mechanism}: each answer gives out {line['what']}.",
        f"  A query finds {gate.eligible:,} of {gate.owners:,} owners eligible, by a public estimate. Each of them "
        f"uses one of its {gate.tickets:,} tickets, sampled or not.",
        f"  An eligible owner takes part with probability {gate.rate:.4g}: {gate.rate * gate.eligible:.4g} "
        + ("calls of one owner each, " if gate.calls else f"exemplars for {gate.members:,} members, ")
        + f"on average; {found['gated']['outputs']:.4g} outputs count.",
        f"  Signal over noise: {gate.signal_name} = {found['gated']['signal']:.3g}.",
    ]
    text += [f"  {each}" for each in (*map(flip_words, line.get("flips", ())), *choice_words(line))]
    if "cost_per_answer" in line:
        text.append(f"  An answer costs {line['cost_per_answer']:.4g}.")
    text += ["", "How long an owner's tickets last:"]
    for row in found["lasts"]:
        average = " (the average owner)" if row["share"] == gate.eligible / gate.owners else ""
        text.append(f"  eligible for {100 * row['share']:.3g}% of the queries{average}: {row['queries']:,} queries")
    text += [
        "  When popular owners have no ticket left, queries find fewer than estimated.",
        "",
        f"{parameter} at this epsilon, and ({gate.signal_name}), with as many exemplars for each {gate.unit}:",
    ]
    points = found["trade_off"]
    counts = sorted({point["tickets"] for point in points})
    text.append(f"  {gate.unit + 's':>7}  {'rate':>7}" + "".join(f"  {f'{count:,} tickets':>18}" for count in counts))
    for members in sorted({point["members"] for point in points}):
        row = [point for point in points if point["members"] == members]
        text.append(f"  {members:>7,}  {row[0]['rate']:>7.4g}" + "".join(f"  {_cell(point):>18}" for point in row))
    text += [
        "",
        f"Without the gate, {gate.members:,} {gate.unit}s sample all {gate.owners:,} owners at a rate of "
        f"{gate.blind_rate:.4g}:",
    ]
    for point in found["blind"]:
        why = ", as long as an average owner's tickets last" if point["queries"] == gate.lasting else ""
        text.append(f"  {point['queries']:,} queries in all{why}: {parameter} {_cell(point)}")
    return "\n".join([*text, "These figures ignore relevance, which is the benefit you pay for."])


def _cell(point: dict[str, Any]) -> str:
    return "no plan" if point["noise"] is None else f"{point['noise']:.3g} ({point['signal']:.3g})"
