"""``dpicl budget``: what a ledger has spent, its history, its receipts; for the deployer alone, its tickets; and what
brings a ledger back that was lost or rolled back."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from itertools import islice
from typing import Any

from langchain_dpicl.cli.session import add_common
from langchain_dpicl.errors import InvalidParameter

_EPILOG = """examples:
  dpicl budget show --ledger sqlite:///dpicl-budget.db --plot spent.png
  dpicl budget history --name reviews --last 20
  dpicl budget receipt reviews:vote:17
  dpicl budget export --format csv > releases.csv
  dpicl budget tickets --name reviews --plot private.png
  dpicl budget recover --ledger sqlite:///dpicl-budget.db
"""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "budget",
        help="what was spent: budgets, history, receipts, exports",
        description="Read a ledger: what every budget promised and spent, every release, every receipt.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = _action(actions, "show", "every budget: promised, spent, left", _show)
    show.add_argument("--plot", metavar="FILE.png", help="draw spent against time, by line and principal")
    history = _action(actions, "history", "every release, the latest last", _history)
    history.add_argument("--last", type=int, metavar="N", help="only the latest N")
    receipt = _action(actions, "receipt", "one release's receipt, by its id", _receipt)
    receipt.add_argument("id", metavar="ID", help="as in the receipt: budget:line:number")
    export = _action(actions, "export", "every release, for other programs", _export)
    export.add_argument("--format", choices=("csv", "json"), default="csv")
    tickets = _action(
        actions, "tickets", "PRIVATE, for the deployer alone: how many tickets owners have burnt", _tickets
    )
    tickets.add_argument("--plot", metavar="FILE.png", help="draw owners against tickets burnt; as private")
    recover = _parser(actions, "recover", "after a ledger was lost or rolled back: count what it may lack", _recover)
    recover.description = _RECOVER
    recover.add_argument("--witness", metavar="PATH", help="the ledger's witness: a path or a URL (default: beside it)")
    recover.add_argument(
        "--keep-count",
        action="store_true",
        help="believe a ledger whose witness is lost, if you KNOW that it is no copy",
    )


_RECOVER = """Stop every process that uses the ledger first, and put a whole copy in its place if it is damaged or gone.
Whatever that copy may lack then counts as spent: everything up to the witness's marks, or without a witness every plan
of the ledger as a whole."""


def _parser(actions: Any, name: str, words: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=words, description=words.capitalize() + ".")
    parser.add_argument("--ledger", default="sqlite:///dpicl-budget.db", help="the ledger's address")
    add_common(parser)
    parser.set_defaults(run=run)
    return parser


def _action(actions: Any, name: str, words: str, run: Any) -> argparse.ArgumentParser:
    parser = _parser(actions, name, words, run)
    whole = name != "tickets"
    which = "one budget of the ledger (default: all)" if whole else "the budget, one whose owners pay with tickets"
    parser.add_argument("--name", help=which, required=not whole)
    return parser


def _open(options: argparse.Namespace) -> Any:
    from langchain_dpicl.budget.report import LedgerReport

    return LedgerReport(options.ledger)


def _show(options: argparse.Namespace) -> int:
    report = _open(options)
    try:
        found = report.show(options.name)
        if options.plot:
            from langchain_dpicl.plots.budget import draw

            draw(report, options.name, options.plot)
            found["plot"] = options.plot
    finally:
        report.close()
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_words(found)))
    return 0


def _words(found: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for budget in found["budgets"]:
        most = " by whoever spent most" if budget["scope"] == "per_principal" else ""
        lines += [
            f"{budget['name']}: epsilon {budget['epsilon_spent']:.3g} of {budget['epsilon']:g} spent{most}, "
            f"at delta {budget['delta']:.2g} ({budget['kind']} {budget['plan']})",
            f"  {budget['assumption']}",
        ]
        if budget["scope"] == "shared":
            lines += [f"  {_line(name, state, budget['kind'])}" for name, state in budget["lines"].items()]
        else:
            for who, state in budget["principals"].items():
                lines.append(f"  {who}: epsilon {state['epsilon_spent']:.3g}")
                lines += [f"    {_line(name, line, budget['kind'])}" for name, line in state["lines"].items()]
            if not budget["principals"]:
                lines.append("  nobody has spent anything")
        lines.append("")
    for total in found["totals"]:
        names = ", ".join(plan["name"] for plan in total["plans"])
        lines += [
            f"on the same data (generation {total['generation']}): {names}",
            f"  released so far: epsilon {total['epsilon']:.3g} at delta {total['delta']:.2g}, if no plan was chosen "
            "after seeing another's answers",
            f"  promised in all: epsilon {total['promised_epsilon']:.4g} at delta {total['promised_delta']:.2g}, "
            "however they were chosen",
        ]
    for act in found["acts"]:
        when = f"carried out {act['carried_out'][:19]}" if act["carried_out"] else "not carried out"
        lines.append(f"fresh start of {act['budget']}, announced {act['announced'][:19]}, {when}: {act['reason']}")
    if not found["budgets"]:
        lines.append("the ledger holds no budget")
    return lines


def _line(name: str, state: dict[str, Any], kind: str) -> str:
    if kind == "filter":
        return f"{name:20s} {state['spent']:>9,} releases"
    if state["remaining"] is None:  # owners pay with tickets
        return f"{name:20s} {_queries(state)} so far; each owner takes part in at most {state['count']:,}"
    share = state["spent"] / state["count"]
    return f"{name:20s} {state['spent']:>9,} of {state['count']:,} releases ({share:.1%}), {state['remaining']:,} left"


def _queries(state: dict[str, Any]) -> str:
    unit = "tokens" if state["mechanism"] == "tokens" else "query" if state["spent"] == 1 else "queries"
    return f"{state['spent']:>9,} {unit}"


def _tickets(options: argparse.Namespace) -> int:
    report = _open(options)
    try:
        found = report.tickets(options.name)
    finally:
        report.close()
    if options.plot:
        from langchain_dpicl.plots.budget import draw_tickets

        draw_tickets(found, options.plot)
        found["plot"] = options.plot
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_private_words(found)))
    return 0


def _private_words(found: dict[str, Any]) -> list[str]:
    from langchain_dpicl.budget.report import ticket_bins

    lines = [found["private"]]
    for line, by_principal in found["lines"].items():
        if not by_principal:
            lines.append(f"{found['budget']}, {line}: no query so far, every owner has all its tickets")
        for who, of in by_principal.items():
            whose = f", {who}" if who else ""
            lines.append(f"{found['budget']}, {line}{whose}: {of['tickets']:,} tickets for every owner")
            if not of["owners"]:
                lines.append("  nobody was ever eligible: every owner has all its tickets")
                continue
            holding = f"{of['owners'] - of['without']:,} ({of['share_with_tickets']:.1%})"
            lines.append(f"  owners ever eligible: {of['owners']:,}, of whom {holding} still hold tickets")
            lines.append("  owners never eligible have all their tickets")
            bins = ticket_bins(of["burnt"], of["tickets"], 10)
            highest = max(owners for *_, owners in bins)
            lines.append(f"  {'burnt':>21s} {'owners':>9s}")
            for low, high, owners in bins:
                burnt = f"{low:,}" if low == high else f"{low:,} to {high:,}"
                burnt = f"all {low:,}" if low == of["tickets"] else burnt
                lines.append(f"  {burnt:>21s} {owners:>9,}  {'#' * -(-40 * owners // highest)}".rstrip())
    return lines


def _recover(options: argparse.Namespace) -> int:
    from langchain_dpicl.budget.recovery import recover

    found = recover(options.ledger, options.witness, keep_count=options.keep_count)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    how = "the ledger is believed" if options.keep_count else "there was none: every plan counts as spent"
    counts = "stands where it is" if options.keep_count else "counts as spent"
    print(f"ledger:  {found['ledger']}\nwitness: {found['witness']}{'' if found['had_witness'] else f' ({how})'}")
    for counter in found["counters"]:
        who = f", {counter['principal']}" if counter["principal"] else ""
        if counter["spent"] is None:
            stands = "stands where its witness knows that it was" if found["had_witness"] else counts
            print(f"{counter['budget']}: the filter {stands}")
        else:
            counted = f"{counter['spent']:,} count, {counter['added']:,} of them new"
            print(f"{counter['budget']}, {counter['line']}{who}: {counted}")
    for name in found["missing"]:
        print(f"{name}: not in the ledger, counts as spent")
    return 0


def _history(options: argparse.Namespace) -> int:
    if options.last is not None and options.last < 1:
        raise InvalidParameter("--last", options.last, "a number >= 1")
    rows = _rows(options)
    rows = rows[-options.last :] if options.last else rows
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        who = f"  {row['principal']}" if row["principal"] else ""
        cost = "" if row["epsilon_spent"] is None else f"  epsilon {row['epsilon_spent']:.3g} of {row['epsilon']:g}"
        print(f"{row['time'][:19]}  {row['id']:30s}{who}  {row['outcome']}{cost}")
    if not rows:
        print("nothing was released")
    return 0


def _rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    report = _open(options)
    try:
        return sorted(report.history(options.name), key=lambda row: (row["time"], row["budget"], row["number"]))
    finally:
        report.close()


def _receipt(options: argparse.Namespace) -> int:
    report = _open(options)
    try:
        receipt = report.receipt(options.id)
    finally:
        report.close()
    if receipt is None or (options.name is not None and receipt["budget"] != options.name):
        raise InvalidParameter("id", options.id, "the id of a release of this ledger whose receipt was recorded")
    if options.json:
        print(json.dumps(receipt, indent=2))
    else:
        width = max(map(len, receipt))
        for name, value in receipt.items():
            print(f"{name:{width}s}  {'' if value is None else value}")
    return 0


def _export(options: argparse.Namespace) -> int:
    from langchain_dpicl.budget.report import FIELDS

    report = _open(options)
    try:
        rows = report.history(options.name)
        if options.format == "json" or options.json:
            print("[", end="")
            for i, row in enumerate(rows):
                print(f"{',' if i else ''}\n  {json.dumps(row)}", end="")
            print("\n]")
        else:
            writer = csv.DictWriter(sys.stdout, FIELDS)
            writer.writeheader()
            while piece := list(islice(rows, 1000)):
                writer.writerows({key: _cell(value) for key, value in row.items()} for row in piece)
    finally:
        report.close()
    return 0


def _cell(value: object) -> object:
    """A text that a spreadsheet would take for a formula is kept a text."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
