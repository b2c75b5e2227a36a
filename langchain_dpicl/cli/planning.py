"""`dpicl plan`: from a target to rate, noise, costs, and a picture of both trade-offs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.accountant import PLDAccountant
from langchain_dpicl.privacy.checks import whole
from langchain_dpicl.privacy.explain import VOTES, Calls, flip_probability, words
from langchain_dpicl.privacy.mechanisms import MECHANISMS

_FIXED = ("delta0", "select", "step")

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_plan_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Add the `plan` command; its function is `run_plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="what a privacy target allows: rate, noise, cost, chance that noise flips a vote",
        description="Solve for the least noise that keeps a privacy promise, and say what it means.",
    )
    target = parser.add_argument_group("the promise")
    target.add_argument("--epsilon", type=float, required=True, help="all releases together stay below this epsilon")
    target.add_argument("--delta", type=float, required=True, help="at this delta; choose it below 1/owners")
    target.add_argument("--releases", type=int, required=True, help="how many answers (for tokens: how many tokens)")
    target.add_argument("--mechanism", choices=sorted(MECHANISMS), default="vote")
    shape = parser.add_argument_group("the ensemble")
    shape.add_argument("--owners", type=int, help="people whose exemplars are in the store")
    shape.add_argument("--members", type=int, default=10, help="parallel calls of one answer (default: 10)")
    shape.add_argument("--shots", type=int, default=4, help="exemplars in a member's prompt, on average (default: 4)")
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
    bill.add_argument("--price-in", type=float, default=0.0, help="price of a million prompt tokens")
    bill.add_argument("--price-out", type=float, default=0.0, help="price of a million answer tokens")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE.png", help="draw epsilon against releases, and noise against epsilon")
    parser.set_defaults(run=run_plan)
    return parser


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan. Errors of the package surface as they are: the command line prints them."""
    if args.gated:
        from langchain_dpicl.cli.planning_gated import run_gated

        return run_gated(args)
    if args.eligible is not None:
        raise InvalidParameter("eligible", args.eligible, "given with --gated: without a gate all owners are eligible")
    rate = _rate(args)
    owners = None if args.mechanism == "threshold" or args.rate is not None else args.owners
    request = LineRequest(args.mechanism, rate, args.releases, options=fixed_options(args), owners=owners)
    plan = PrivacyPlan.solve(epsilon=args.epsilon, delta=args.delta, lines={args.mechanism: request})
    numbers = plan.numbers(
        members=args.members, shots=args.shots, margins=args.margin, labels=args.labels, calls=calls_of(args)
    )
    if warning := delta_warning(args):
        numbers["warning"] = warning
    if args.plot:
        draw(plan, args.plot, members=args.members, labels=args.labels, margins=args.margin)
        numbers["plot"] = args.plot
    if args.json:
        numbers["plan"] = json.loads(plan.to_json())
        print(json.dumps(numbers, indent=2, sort_keys=True))
    else:
        print(words(numbers))
        if "warning" in numbers:
            print(f"\nwarning: {numbers['warning']}", file=sys.stderr)
    return 0


def fixed_options(args: argparse.Namespace) -> dict[str, float]:
    """The mechanism's fixed numbers that were given."""
    options = {name: getattr(args, name) for name in _FIXED if getattr(args, name) is not None}
    for name, value in options.items():
        if name not in MECHANISMS[args.mechanism].options:
            raise InvalidParameter(name, value, f"{args.mechanism} has no such number")
    return options


def calls_of(args: argparse.Namespace) -> Calls | None:
    """What one member's call costs, where that was given."""
    if args.prompt_tokens is None:
        return None
    return Calls(args.prompt_tokens, args.answer_tokens, args.price_in, args.price_out)


def delta_warning(args: argparse.Namespace) -> str | None:
    """What to say where delta is large enough to give one owner's exemplars away whole."""
    if args.owners is None or args.delta < 1.0 / args.owners:
        return None
    return f"delta {args.delta:g} is not below 1/owners = {1.0 / args.owners:.3g}"


def _rate(args: argparse.Namespace) -> float:
    if args.mechanism == "threshold":
        if args.rate not in (None, 1.0):
            raise InvalidParameter("rate", args.rate, "1: all owners take part in the release of a threshold")
        return 1.0
    if args.rate is not None:
        return float(args.rate)
    if args.owners is None:
        raise InvalidParameter("owners", None, "give --owners (with --members and --shots) or --rate")
    owners = whole("owners", args.owners)
    members = whole("members", args.members)
    shots = whole("shots", args.shots)
    return min(1.0, members * shots / owners)


def epsilon_curve(plan: PrivacyPlan, points: int = 24) -> list[tuple[int, float]]:
    """Certified epsilon after so many releases of a plan with one line, from 1 to all of them."""
    (line,) = plan.lines.values()
    counts = sorted({max(1, round(line.count ** (index / (points - 1)))) for index in range(points)})
    accountant = PLDAccountant()
    return [(n, min(plan.epsilon, accountant.epsilon([line.line(line.parameter, n)], plan.delta))) for n in counts]


def noise_curve(plan: PrivacyPlan, epsilons: tuple[float, ...]) -> list[tuple[float, float]]:
    """The noise parameter that each epsilon would allow, everything else as in the plan."""
    ((name, line),) = plan.lines.items()
    request = LineRequest(line.mechanism, line.rate, line.count, line.weight, line.options)
    return [
        (epsilon, PrivacyPlan.solve(epsilon=epsilon, delta=plan.delta, lines={name: request}).lines[name].parameter)
        for epsilon in epsilons
    ]


def draw(plan: PrivacyPlan, path: str, *, members: int, labels: int = 2, margins: list[int] | None = None) -> None:
    """Two pictures side by side: epsilon against releases, and what other epsilons would do to the answers."""
    figure = new_figure(path)
    (line,) = plan.lines.values()
    epsilons = tuple(plan.epsilon * factor for factor in (0.1, 0.18, 0.32, 0.56, 1.0, 1.8, 3.2, 5.6, 10.0))
    curve = epsilon_curve(plan)
    noise = noise_curve(plan, epsilons)
    spent, effect = figure.subplots(1, 2)
    spent.plot([n for n, _ in curve], [e for _, e in curve], marker="o", markersize=3, color="#1f4e79")
    spent.axhline(plan.epsilon, color="#b03a2e", linestyle="--", linewidth=1)
    spent.annotate(
        f"the plan: epsilon {plan.epsilon:g}", (1, plan.epsilon), (4, -12), textcoords="offset points", color="#b03a2e"
    )
    spent.set(xscale="log", xlabel="releases", ylabel=f"epsilon (delta {plan.delta:.2g})", ylim=(0, None))
    spent.set_title(f"What {line.count:,} releases spend")
    _draw_effect(effect, plan, line, noise, members, labels, margins or [])
    save_figure(figure, path)


def new_figure(path: str) -> Any:
    """Room for two pictures side by side. `InvalidParameter` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidParameter("plot", path, "drawing needs matplotlib: pip install 'langchain-dpicl[eval]'") from None
    return Figure(figsize=(11.0, 4.6), layout="constrained")


def save_figure(figure: Any, path: str) -> None:
    """Give the pictures plain axes and write the file. `InvalidParameter` where it cannot be written."""
    for axes in figure.axes:
        _plain_ticks(axes)
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as failure:
        raise InvalidParameter("plot", path, f"a picture file that can be written ({failure})") from None


def _plain_ticks(axes: Any) -> None:
    """0.5, 1, 2, 5, 10 instead of powers of ten, where an axis spans little more than two of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() != "log":
            continue
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,), numticks=20))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axis.set_minor_locator(NullLocator())


def _draw_effect(
    axes: Any,
    plan: PrivacyPlan,
    line: Any,
    noise: list[tuple[float, float]],
    members: int,
    labels: int,
    margins: list[int],
) -> None:
    epsilons = [epsilon for epsilon, _ in noise]
    axes.set(xscale="log", xlabel=f"epsilon of all {line.count:,} releases")
    axes.axvline(plan.epsilon, color="#b03a2e", linestyle="--", linewidth=1)
    if line.mechanism in VOTES:
        chosen = margins or sorted({max(1, round(members * share)) for share in (0.1, 0.3, 0.5, 1.0)})
        shades = ("#9ecae1", "#6baed6", "#2171b5", "#08306b")
        for index, margin in enumerate(chosen):
            chances = [flip_probability(sigma, margin, labels) for _, sigma in noise]
            shade = shades[min(index, 3)]
            axes.plot(epsilons, chances, marker="o", markersize=3, color=shade, label=f"ahead by {margin} of {members}")
        axes.set(ylabel="chance that noise flips the vote", ylim=(0.0, 1.05 - 1.0 / labels))
        axes.set_title(f"What noise does to a vote of {members} members")
        axes.legend(frameon=False)
        return
    axes.plot(epsilons, [parameter for _, parameter in noise], marker="o", markersize=3, color="#1f4e79")
    values = [parameter for _, parameter in noise]
    axes.set(ylabel=line.family.parameter, yscale="log" if max(values) > 30.0 * min(values) else "linear")
    if axes.get_yscale() == "linear":
        axes.set_ylim(0.0, None)
    axes.set_title(f"The {line.family.parameter} that an epsilon allows")
