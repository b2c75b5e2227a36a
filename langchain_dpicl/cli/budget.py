"""The commands that read and mend ledgers: ``budget``, and ``forget`` for an owner of a store."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli import add_ledger, add_run, add_witness, lab, show
from langchain_dpicl.errors import InvalidParameter, PrivacyWarning, StoreError

if TYPE_CHECKING:
    from langchain_dpicl.budget.upkeep import LedgerReport


def budget_options(parser: Any) -> None:
    """Read a ledger: what every budget promised and spent, every release, every receipt; and recover a damaged one.

    examples:
      dpicl budget show --ledger sqlite:///dpicl-budget.db --plot spent.png
      dpicl budget history --name reviews --last 20
      dpicl budget receipt reviews:vote:17
      dpicl budget export --format csv > releases.csv
      dpicl budget tickets --name reviews --plot private.png
      dpicl budget remove --name trial
      dpicl budget recover --ledger sqlite:///dpicl-budget.db
    """
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, run: Callable[[argparse.Namespace], int], summary: str, of: str = "") -> Any:
        added = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        add_run(added, run)
        add_ledger(added)
        if of:
            added.add_argument("--name", help=of, required=name in ("tickets", "remove"))
        return added

    one = "one budget of the ledger (default: all)"
    shown = action("show", _show, "every budget: promised, spent, left", one)
    shown.add_argument("--plot", metavar="FILE.png", help="draw spent against time, by line and principal")
    history = action("history", _history, "every release, the latest last", one)
    history.add_argument("--last", type=int, metavar="N", help="only the latest N")
    receipt = action("receipt", _receipt, "one release's receipt, by its id", one)
    receipt.add_argument("id", metavar="ID", help="as in the receipt: budget:line:number")
    export = action("export", _export, "every release, for other programs", one)
    export.add_argument("--format", choices=("csv", "json"), default="csv")
    private = "PRIVATE, for the deployer alone: how many tickets owners have used"
    tickets = action("tickets", _tickets, private, "a budget whose owners pay with tickets")
    tickets.add_argument("--plot", metavar="FILE.png", help="draw owners against tickets used; as private")
    unused = "a budget to which nothing was ever charged: its name is free again, and nothing counts it"
    add_witness(action("remove", _remove, unused, "the budget"))
    recover = action("recover", _recover, "after a ledger was lost or rolled back: count what it may lack")
    recover.description = _recover.__doc__
    add_witness(recover)
    keep = "believe a ledger whose witness is lost, if you KNOW that it is no copy"
    recover.add_argument("--keep-count", action="store_true", help=keep)


def _open(options: argparse.Namespace) -> closing[LedgerReport]:
    from langchain_dpicl.budget.upkeep import LedgerReport

    return closing(LedgerReport(options.ledger))


def _show(options: argparse.Namespace) -> int:
    with _open(options) as report:
        found = report.show(options.name)
        if options.plot:
            states = {budget["name"]: budget for budget in found["budgets"]}
            lab("ledger_pictures").draw_budgets(options.plot, report, report.chosen(options.name), states)
            found["plot"] = options.plot
    lines: list[str] = []
    for budget in found["budgets"]:
        each = budget["scope"] == "per_principal"
        lines += [
            f"{budget['name']}: epsilon {budget['epsilon_spent']:.3g} of {budget['epsilon']:g} spent"
            f"{' by the principal who spent most' if each else ''}, "
            f"at delta {budget['delta']:.2g} (plan {budget['plan']})",
            f"  {budget['assumption']}",
        ]
        for who, state in (budget["principals"] if each else {"": budget}).items():
            lines += [f"  {who}: epsilon {state['epsilon_spent']:.3g}"] if each else []
            lines += [f"{'    ' if each else '  '}{_line(name, line)}" for name, line in state["lines"].items()]
        lines += ["  no principal has spent anything", ""] if each and not budget["principals"] else [""]
    if total := found["total"]:
        lines += [
            f"all together: {', '.join(plan['name'] for plan in total['plans'])}",
            f"  released so far: epsilon {total['epsilon']:.3g} at delta {total['delta']:.2g}, if no plan was chosen "
            "after seeing another's answers",
            f"  promised in all: epsilon {total['promised_epsilon']:.4g} at delta {total['promised_delta']:.2g}, "
            "however they were chosen",
        ]
    if not found["budgets"]:
        lines.append("the ledger holds no budget")
    return show(options, found, "\n".join(lines))


def _line(name: str, state: dict[str, Any]) -> str:
    spent = f"{name:20s} {state['spent']:>9,}"
    if state["remaining"] is None:  # owners pay with tickets
        unit = "tokens" if state["mechanism"] == "tokens" else "query" if state["spent"] == 1 else "queries"
        return f"{spent} {unit} so far; each owner takes part in at most {state['count']:,}"
    share = state["spent"] / state["count"]
    return f"{spent} of {state['count']:,} releases ({share:.1%}), {state['remaining']:,} left"


def _history(options: argparse.Namespace) -> int:
    if options.last is not None and options.last < 1:
        raise InvalidParameter("--last", options.last, "a number >= 1")
    with _open(options) as report:
        rows = sorted(report.history(options.name), key=lambda row: (row["time"], row["budget"], row["number"]))
    rows = rows[-(options.last or 0) :]
    lines = []
    for row in rows:
        who = f"  {row['principal']}" if row["principal"] else ""
        cost = "" if row["epsilon_spent"] is None else f"  epsilon {row['epsilon_spent']:.3g} of {row['epsilon']:g}"
        lines.append(f"{row['time'][:19]}  {row['id']:30s}{who}  {row['outcome']}{cost}")
    return show(options, rows, "\n".join(lines) or "nothing was released")


def _receipt(options: argparse.Namespace) -> int:
    with _open(options) as report:
        receipt = report.receipt(options.id)
    if receipt is None or options.name not in (None, receipt["budget"]):
        raise InvalidParameter("id", options.id, "the id of a release of this ledger whose receipt was recorded")
    width = max(map(len, receipt))
    lines = [f"{name:{width}s}  {'' if value is None else value}" for name, value in receipt.items()]
    return show(options, receipt, "\n".join(lines))


def _export(options: argparse.Namespace) -> int:
    """Write the rows as they are read: a ledger may hold millions."""
    from langchain_dpicl.budget.upkeep import FIELDS

    with _open(options) as report:
        rows = report.history(options.name)
        if options.format == "json" or options.json:
            print("[", end="")
            for i, row in enumerate(rows):
                print(f"{',' if i else ''}\n  {json.dumps(row)}", end="")
            print("\n]")
        else:
            writer = csv.DictWriter(sys.stdout, FIELDS)
            writer.writeheader()
            writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return 0


def _cell(value: object) -> object:
    """Keep a text a text if a spreadsheet would take it for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _tickets(options: argparse.Namespace) -> int:
    from langchain_dpicl.budget.terms import ticket_bins

    with _open(options) as report:
        found = report.tickets(options.name)
    lines, panels = [found["private"]], []
    for line, by_principal in found["lines"].items():
        if not by_principal:
            lines.append(f"{options.name}, {line}: no query so far, every owner has all its tickets")
        for who, of in by_principal.items():
            name = ", ".join(filter(None, (options.name, line, who)))
            lines.append(f"{name}: {of['tickets']:,} tickets for every owner")
            if not of["owners"]:
                lines.append("  no owner was ever eligible: every owner has all its tickets")
                continue
            holding = f"{of['owners'] - of['without']:,} ({of['share_with_tickets']:.1%})"
            lines.append(f"  owners ever eligible: {of['owners']:,}, of whom {holding} still hold tickets")
            lines.append("  owners never eligible have all their tickets")
            bins = ticket_bins(of["burnt"], of["tickets"], 10)
            highest = max(owners for *_, owners in bins)
            lines.append(f"  {'used':>21s} {'owners':>9s}")
            for low, high, owners in bins:
                used = f"all {low:,}" if low == of["tickets"] else f"{low:,}" if low == high else f"{low:,} to {high:,}"
                lines.append(f"  {used:>21s} {owners:>9,}  {'#' * -(-40 * owners // highest)}".rstrip())
            title = f"{name}: {of['owners']:,} owners ever eligible, {holding} still hold tickets"
            panels.append((title, of["tickets"], ticket_bins(of["burnt"], of["tickets"], 50)))
    if options.plot:
        lab("plots").draw_usage(panels, f"{options.name}: no owner was eligible so far", options.plot)
        found["plot"] = options.plot
    return show(options, found, "\n".join(lines))


def _remove(options: argparse.Namespace) -> int:
    from langchain_dpicl.budget import PrivacyBudget

    with closing(PrivacyBudget.open(options.name, options.ledger, witness=options.witness)) as budget:
        budget.remove()
        facts = {"ledger": budget._ledger.shown, "removed": options.name}
    return show(options, facts, f"{options.name}: removed; nothing was ever charged to it")


def _recover(options: argparse.Namespace) -> int:
    """Stop every process that uses the ledger first. If the ledger is damaged or gone, put a whole copy in its place.
    Everything that the copy may lack then counts as spent: up to the witness's marks, or without a witness every plan
    of the ledger as a whole."""
    from langchain_dpicl.budget.upkeep import recover

    found = recover(options.ledger, options.witness, keep_count=options.keep_count)
    how = " (the ledger is believed)" if options.keep_count else " (there was none: every plan counts as spent)"
    if found["had_witness"]:
        how = ""
    lines = [f"ledger:  {found['ledger']}", f"witness: {found['witness']}{how}"]
    for counter in found["counters"]:
        name = ", ".join(filter(None, (counter["budget"], counter["line"], counter["principal"])))
        lines.append(f"{name}: {counter['spent']:,} count, {counter['added']:,} of them new")
    lines += [f"{name}: not in the ledger, counts as spent" for name in found["missing"]]
    return show(options, found, "\n".join(lines))


def forget_options(parser: Any) -> None:
    """Remove an owner from a store and from its ledgers, while workers go on.

    examples:
      dpicl forget --store patients.db --owner patient-17
      dpicl forget --store patients.csv.store --owner patient-17    # of --data patients.csv, or {data: patients.csv}
      dpicl forget --store patients.db --owner - --ledger postgresql://desk@host/budgets < owner.txt
      dpicl forget --store postgresql://desk@host/records --collection patients --owner patient-17

    Workers that have opened the store follow before their next release, without a restart. The ledgers are those that
    the store remembers and those that you name. The exit status is 1 if a remembered ledger could not be opened.
    """
    add_run(parser, forget, name="collection")
    parser.add_argument("--store", required=True, metavar="FILE", help="a store's file, or postgresql://...")
    parser.add_argument("--collection", default="exemplars", help="of the database (default exemplars)")
    parser.add_argument("--owner", required=True, metavar="ID", help="the owner's key; - reads it from standard input")
    key = "the key of owners who pay, if it stands neither with the store nor beside the ledger"
    parser.add_argument("--key-file", metavar="PATH", help=key)
    further = "a further ledger; may be repeated"
    parser.add_argument("--ledger", action="append", default=[], metavar="URL", help=further)


def forget(options: argparse.Namespace) -> int:
    """Forget the owner. Returns 1 if a ledger could not be reached."""
    from langchain_dpicl.budget import upkeep
    from langchain_dpicl.store.notes import notes_beside
    from langchain_dpicl.store.store import ExemplarStore, address

    owner = sys.stdin.readline().rstrip("\r\n") if options.owner == "-" else options.owner
    if not owner:
        raise InvalidParameter("--owner", "", "the owner's key, as the records had it")
    model: Any = None  # forgetting embeds nothing
    try:
        store = ExemplarStore.open(address(options.store), model, name=options.collection)
    except StoreError:
        if not Path(kept := f"{options.store}.store").is_file():
            raise
        raise InvalidParameter("--store", options.store, f"a store: did you mean {kept}?") from None
    if options.store.endswith(".store"):  # perhaps not used since an earlier release wrote down what it knew
        store._take_notes(notes_beside(Path(options.store.removesuffix(".store"))))
    ledgers, lost = upkeep.open_ledgers(store, options.ledger, options.key_file)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "released once", PrivacyWarning)  # it is named below
            went = upkeep.forget(store, owner, ledgers)
        places = [ledger.place for ledger in ledgers]
    finally:
        for ledger in ledgers:
            ledger.close()
    left, where, once = store.owner_count, ", ".join(map(str, places)) or "none", list(store.released_once)
    facts = {"exemplars": went, "owners_left": left, "ledgers": places, "not_reached": lost, "released_once": once}
    lines = [f"{went} exemplars went, {left} owners are left; ledgers: {where}"]
    lines += [f"released once, and not changed: {each}" for each in once]
    lines += ["if the owner is to leave these too, make each anew, on a new share of budget"] * bool(once)
    show(options, facts, "\n".join(lines))
    for place in lost:
        print(f"dpicl forget: the ledger {place} could not be opened: name it with --ledger", file=sys.stderr)
    return 1 if lost else 0
