"""Run a mechanism on neighbouring data sets with a worst-case canary, and report the epsilon that an adversary can
prove. A bound above the claim means that the claim is false.

examples:
  dpicl audit
  dpicl audit --mechanism vote --canary owner --epsilon 1 --trials 100000
  dpicl audit --mechanism all --rate 0.1 --releases 20 --plot audit.png
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from langchain_dpicl.cli.options import chosen, show
from langchain_dpicl.errors import InvalidParameter


def add_options(parser: Any) -> None:
    """Declare the options."""
    names = "vote, scores, embedding, joint-em, ptr, tokens; plan: a line of each in one plan; all of these; membership"
    parser.add_argument("--mechanism", default="vote", help=f"{names} (default: vote)")
    canary = "outputs: worst-case member outputs; owner: an inserted owner, real store, selector and member chain"
    parser.add_argument("--canary", default="outputs", help=f"{canary} (default: outputs)")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[3.0], help="what plans claim (default: 3)")
    parser.add_argument("--delta", type=float, default=1e-4, help="at which delta (default: 1e-4)")
    parser.add_argument("--rate", type=float, default=1.0, help="an owner's chance to take part (default: 1)")
    parser.add_argument("--releases", type=int, default=1, help="of each line, all seen by the adversary (default: 1)")
    parser.add_argument("--members", type=int, help="default: as many as make the attack strongest")
    parser.add_argument("--trials", type=int, help="of each data set (default: 30000; membership: 20 members)")
    parser.add_argument("--confidence", type=float, default=0.95, help="of each bound (default: 0.95)")
    parser.add_argument("--model", help="an embedded model: membership's, or with --canary owner a vote's members")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the bounds beside the claims")
    attack = parser.add_argument_group("membership: on a real model that shows its logits, with public data")
    attack.add_argument("--data", help="public records with the texts 'input' and 'output'")
    attack.add_argument("--against", type=int, default=50, help="non-members for each member (default 50)")
    attack.add_argument("--owners", type=int, default=1000, help="owners of the data set under attack (default 1000)")
    attack.add_argument("--owners-per-token", type=float, default=4.0, help="expected, so the rate is this / owners")
    prompt = [r"Data: {input}\nDescription: {output}\n\n", r"Data: {input}\nDescription:"]
    attack.add_argument("--template", nargs=2, metavar=("DEMONSTRATION", "QUERY"), default=prompt)
    attack.add_argument("--threads", type=int)


def run(options: argparse.Namespace) -> int:
    """Attack, print and draw. Returns 1 if a bound lies above its claim."""
    from langchain_dpicl.audit.attack import ATTACKED, audit, draw, headline, table

    known = (*ATTACKED, "all", "membership")
    if options.mechanism not in known:
        raise InvalidParameter("mechanism", options.mechanism, f"one of {', '.join(known)}")
    if options.plot and not Path(options.plot).absolute().parent.is_dir():
        raise InvalidParameter("plot", options.plot, "a file in a folder that exists")
    if options.mechanism == "membership":
        return _membership(options)
    given = chosen(options, "canary", "delta", "rate", "releases", "members", "confidence")
    given["trials"] = 30_000 if options.trials is None else options.trials
    if options.model:
        from langchain_dpicl import local
        from langchain_dpicl.audit.cases import LABELS
        from langchain_dpicl.members.chains import ModelChoice, label_member

        if options.mechanism != "vote" or options.canary != "owner":
            raise InvalidParameter("model", options.model, "given with --mechanism vote --canary owner, and only there")
        if options.model not in local.KNOWN_MODELS:
            raise InvalidParameter("model", options.model, f"one of {', '.join(local.KNOWN_MODELS)}")
        given["member"] = label_member(ModelChoice(options.model), list(LABELS), "input")
    names = ATTACKED if options.mechanism == "all" else (options.mechanism,)
    results = [audit(name, epsilon=epsilon, **given) for name in names for epsilon in options.epsilon]
    if options.plot:
        draw(results, options.plot)
    broken = [result.mechanism for result in results if result.lower_bound > result.epsilon]
    text = f"{headline(results)}\n\n{table(results)}"
    if broken:
        text += f"\n\nABOVE THE CLAIM: {', '.join(broken)}"
    show(options, {"audits": [asdict(result) for result in results], "above the claim": broken}, text)
    return int(bool(broken))


def _membership(options: argparse.Namespace) -> int:
    """Can an attacker tell whose demonstration a model was shown?"""
    from langchain_dpicl.audit.membership import draw, run_membership
    from langchain_dpicl.decoding import DemonstrationTemplate, TransformersLogits
    from langchain_dpicl.store.records import read_records

    if not options.data:
        raise InvalidParameter("--data", None, "a file of public records, for --mechanism membership")
    results = run_membership(
        TransformersLogits(options.model or "smollm2-135m-instruct", threads=options.threads),
        read_records(options.data),
        DemonstrationTemplate(*(text.replace("\\n", "\n") for text in options.template)),
        epsilons=options.epsilon,
        trials=20 if options.trials is None else options.trials,
        shots=options.owners_per_token,
        **chosen(options, "delta", "against", "owners"),
    )
    if options.plot:
        draw(results, options.plot)
    rows = ["| answers | attacker | AUC | 95 % | proved |", "|---|---|---|---|---|"]
    for each in results:
        proved = "" if each.bound is None else f"{100 * each.bound:.1f}"
        interval = f"{100 * each.low:.1f} to {100 * each.high:.1f}"
        rows.append(f"| {each.name} | {each.attack} | {100 * each.auc:.1f} | {interval} | {proved} |")
    return show(options, {"membership": [asdict(result) for result in results]}, "\n".join(rows))
