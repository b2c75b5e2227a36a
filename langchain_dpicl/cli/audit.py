"""``dpicl audit``: attack the mechanisms, and compare what that proves about epsilon with what they claim."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli import membership
from langchain_dpicl.errors import InvalidParameter

if TYPE_CHECKING:
    from langchain_core.runnables import Runnable

_EPILOG = """examples:
  dpicl audit
  dpicl audit --mechanism vote --canary owner --epsilon 1 --trials 100000
  dpicl audit --mechanism all --rate 0.1 --releases 20 --plot audit.png
"""

ALL = "all"


def add_parser(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "audit",
        help="attack the mechanisms: a lower bound on epsilon beside the claimed one",
        description="Run a mechanism on neighbouring data sets with a worst-case canary, and report the epsilon that "
        "an adversary can prove. A bound above the claim means that the claim is false.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--mechanism",
        default="vote",
        help="vote, scores, embedding, joint-em, ptr, tokens; plan: a line of each in one plan; all of these; "
        "membership (default: vote)",
    )
    parser.add_argument(
        "--canary",
        default="outputs",
        help="outputs: worst-case member outputs; owner: an inserted owner, real store, selector and member chain "
        "(default: outputs)",
    )
    parser.add_argument("--epsilon", type=float, nargs="+", default=[3.0], help="what plans claim (default: 3)")
    parser.add_argument("--delta", type=float, default=1e-4, help="at which delta (default: 1e-4)")
    parser.add_argument("--rate", type=float, default=1.0, help="an owner's chance to take part (default: 1)")
    parser.add_argument("--releases", type=int, default=1, help="of each line, all seen by the adversary (default: 1)")
    parser.add_argument("--members", type=int, help="default: as many as make the attack strongest")
    parser.add_argument("--trials", type=int, help="of each data set (default: 30000; membership: 20 members)")
    parser.add_argument("--confidence", type=float, default=0.95, help="of each bound (default: 0.95)")
    parser.add_argument("--model", help="an embedded model: membership's, or with --canary owner a vote's members")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the bounds beside the claims")
    membership.add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit 0 where no bound lies above its claim, 1 where one does."""
    from langchain_dpicl.audit.attack import ATTACKED, audit
    from langchain_dpicl.audit.report import draw, headline, table, violated

    known = (*ATTACKED, ALL, membership.NAME)
    if options.mechanism not in known:
        raise InvalidParameter("mechanism", options.mechanism, f"one of {', '.join(known)}")
    if options.plot and not Path(options.plot).absolute().parent.is_dir():
        raise InvalidParameter("plot", options.plot, "a file in a folder that exists")
    if options.mechanism == membership.NAME:
        return membership.run(options)
    names = ATTACKED if options.mechanism == ALL else (options.mechanism,)
    member = _model_member(options) if options.model else None
    results = [
        audit(
            name,
            canary=options.canary,
            epsilon=epsilon,
            delta=options.delta,
            rate=options.rate,
            releases=options.releases,
            members=options.members,
            trials=30_000 if options.trials is None else options.trials,
            confidence=options.confidence,
            member=member,
        )
        for name in names
        for epsilon in options.epsilon
    ]
    if options.plot:
        draw(results, options.plot)
    broken = violated(results)
    if options.json:
        print(json.dumps({"audits": [result.to_dict() for result in results], "above the claim": broken}, indent=2))
    else:
        print(headline(results), table(results), sep="\n\n")
        if broken:
            print(f"\nABOVE THE CLAIM: {', '.join(broken)}")
    return int(bool(broken))


def _model_member(options: argparse.Namespace) -> Runnable[Any, Any]:
    """A scorer of the case's labels on an embedded model."""
    if options.mechanism != "vote" or options.canary != "owner":
        raise InvalidParameter("model", options.model, "given with --mechanism vote --canary owner, and only there")
    from langchain_dpicl import local
    from langchain_dpicl.audit.designs import LABELS
    from langchain_dpicl.members.models import ModelChoice, label_member

    if options.model not in local.KNOWN_MODELS:
        raise InvalidParameter("model", options.model, f"one of {', '.join(local.KNOWN_MODELS)}")
    return label_member(ModelChoice(options.model), list(LABELS), "input")
