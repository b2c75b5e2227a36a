"""``dpicl audit --mechanism membership``: can an attacker tell whose demonstration a model was shown?"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.store.records import read_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_dpicl.audit.membership import MembershipResult

NAME = "membership"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this attack alone."""
    attack = parser.add_argument_group("membership: on a real model that shows its logits, with public data")
    attack.add_argument("--data", help="public records with the texts 'input' and 'output'")
    attack.add_argument("--against", type=int, default=50, help="non-members for each member (default 50)")
    attack.add_argument("--owners", type=int, default=1000, help="owners of the data set that is attacked")
    attack.add_argument("--owners-per-token", type=float, default=4.0, help="expected, so the rate is this / owners")
    attack.add_argument(
        "--template",
        nargs=2,
        metavar=("DEMONSTRATION", "QUERY"),
        default=[r"Data: {input}\nDescription: {output}\n\n", r"Data: {input}\nDescription:"],
    )
    attack.add_argument("--threads", type=int)


def run(options: argparse.Namespace) -> int:
    """Attack, print, draw."""
    from langchain_dpicl.audit.membership import draw, run_membership
    from langchain_dpicl.decoding import DemonstrationTemplate, TransformersLogits

    if not options.data:
        raise InvalidParameter("--data", None, "a file of public records, for --mechanism membership")
    results = run_membership(
        TransformersLogits(options.model or "smollm2-135m-instruct", threads=options.threads),
        read_records(options.data),
        DemonstrationTemplate(*(text.replace("\\n", "\n") for text in options.template)),
        epsilons=options.epsilon,
        delta=options.delta,
        trials=20 if options.trials is None else options.trials,
        against=options.against,
        owners=options.owners,
        shots=options.owners_per_token,
    )
    if options.plot:
        draw(results, options.plot)
    if options.json:
        print(json.dumps({"membership": [asdict(result) for result in results]}, indent=2))
    else:
        print(table(results))
    return 0


def table(results: Sequence[MembershipResult]) -> str:
    """Markdown: a row for each way to answer and each attacker."""
    lines = ["| answers | attacker | AUC | 95 % | proved |", "|---|---|---|---|---|"]
    for each in results:
        proved = "" if each.bound is None else f"{100 * each.bound:.1f}"
        interval = f"{100 * each.low:.1f} to {100 * each.high:.1f}"
        lines.append(f"| {each.name} | {each.attack} | {100 * each.auc:.1f} | {interval} | {proved} |")
    return "\n".join(lines)
