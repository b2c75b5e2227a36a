"""Remove an owner from a saved store and from its ledgers, while workers go on.

examples:
  dpicl forget --store patients.npz --owner patient-17
  dpicl forget --store patients.npz --owner - --ledger postgresql://desk@host/budgets < owner.txt
  dpicl forget --store postgresql://desk@host/records --collection patients --owner patient-17

Workers that have loaded the file follow before their next release, without a restart. The ledgers are those that the
store remembers and those that you name. The exit status is 1 if a remembered ledger could not be opened.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from langchain_dpicl.cli.options import show
from langchain_dpicl.errors import InvalidParameter


def add_options(parser: Any) -> None:
    """Declare the options."""
    parser.add_argument("--store", required=True, metavar="FILE", help="a saved store, or postgresql://...")
    parser.add_argument("--collection", default="exemplars", help="which collection of a PostgreSQL store")
    parser.add_argument("--owner", required=True, metavar="ID", help="the owner's key; - reads it from standard input")
    further = "a further ledger; may be repeated"
    parser.add_argument("--ledger", action="append", default=[], metavar="URL", help=further)


def run(options: argparse.Namespace) -> int:
    """Forget the owner. Returns 1 if a ledger could not be reached."""
    from langchain_dpicl.budget.upkeep import forget, open_ledgers

    owner = sys.stdin.readline().rstrip("\r\n") if options.owner == "-" else options.owner
    if not owner:
        raise InvalidParameter("--owner", "", "the owner's key, as the records had it")
    model: Any = None  # forgetting embeds nothing
    if options.store.startswith(("postgresql://", "postgres://", "postgresql+psycopg://")):
        from langchain_dpicl.store.postgres import PostgresExemplarStore

        store: Any = PostgresExemplarStore.open(options.store, model, name=options.collection)
    else:
        from langchain_dpicl.store import ExemplarStore

        store = ExemplarStore.load(options.store, model)
    ledgers, lost = open_ledgers(store, options.ledger)
    try:
        went = forget(store, owner, ledgers)
        places = [ledger.place for ledger in ledgers]
    finally:
        for ledger in ledgers:
            ledger.close()
    left, where = store.owner_count, ", ".join(map(str, places)) or "none"
    facts = {"exemplars": went, "owners_left": left, "ledgers": places, "not_reached": lost}
    show(options, facts, f"{went} exemplars went, {left} owners are left; ledgers: {where}")
    for place in lost:
        print(f"dpicl forget: the ledger {place} could not be opened: name it with --ledger", file=sys.stderr)
    return 1 if lost else 0
