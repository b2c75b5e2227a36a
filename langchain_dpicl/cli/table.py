"""The command ``table``: what texts say about public topics, counted once."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli import add_parameters, add_private_data, add_run, given, lab, show
from langchain_dpicl.cli.data import keys_of, private_store, read_file
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.parameters import parameters_of

if TYPE_CHECKING:
    from langchain_dpicl import PrivateTable

_TABLE = parameters_of("once/tables_release.py", "release_table")
_SHOWN = 20


def table_options(parser: Any) -> None:
    """Count once what texts say about public topics, among public values. The table then answers for ever, at no
    further cost.

    examples:
      dpicl table --data reviews.csv --topics "The Vaults,Old Mill" --values cheap,dear --epsilon 1 --output t.json
      dpicl table --data reviews.csv --topics @venues.txt --values @values.json --epsilon 1 --owner-key user \\
        --output t.json --picture t.png
      dpicl table --data q1.csv --topics @venues.txt --values @values.json --epsilon 3 --tables 4 --name venues \\
        --output q1.json

    A file after @ has one name a line. For --values it may be JSON: a list, or a mapping of columns to lists, such as
    {"price": ["cheap", "dear"], "kind": ["pub", "restaurant"]}. Topics and values are public: take them from no record.

    --tables 4 --name NAME: a plan of four tables, one a quarter, frozen with the first; each has an --output of its
    own. Run the same command again to resume an interrupted release; it is charged once. If --output is a table of
    these topics and values which the ledger has under --name, and --data is not newer, the command is done: it
    charges nothing. A table that is refused makes no ledger and no file but --store's.
    """
    add_run(parser, table, releases="tables", plot="picture")
    add_private_data(parser, "text", "")
    add_parameters(
        parser,
        {name: each for name, each in _TABLE.items() if name not in ("line", "read", "read_name")},
        required=["output"],
        topics=" (separated by commas, or @FILE)",
        values=" (separated by commas, or @FILE)",
        threshold=" (with --read similar)",
        output=" (.json)",
    )
    ways = "nearest (a text that names no topic is under the nearest one; the default), named, or similar"
    parser.add_argument("--read", choices=("nearest", "named", "similar"), default="nearest", help=ways)
    parser.add_argument("--tables", type=int, default=1, help="how many tables the budget is for (default 1)")
    parser.add_argument("--picture", metavar="FILE", help="draw the table as a heat map, too (.png, .svg or .pdf)")
    parser.add_argument("--report", metavar="FILE", help="private: how many records were silent, for the operator")


def table(options: argparse.Namespace) -> int:
    """Release the table and write its file."""
    from langchain_dpicl import local, release_table
    from langchain_dpicl.cli.once import BudgetOpening, check_name, listed, write_report
    from langchain_dpicl.cli.session import receipt_words

    check_name(options, "tables")
    topics = listed("--topics", options.topics)
    values = _values(options.values)
    if (found := _done(options, topics, values)) is not None:
        _draw(options, found)
        words = [f"{options.output} is done: nothing was charged.", *_words(found)]
        facts = {"output": options.output, "done": True, **_facts(found), "receipt": found.receipt}
        return show(options, facts, "\n".join([*words, receipt_words(found.receipt, "tables")]))
    store = private_store(options, read_file(options, options.data, keys_of(options), is_private=True))
    opening = BudgetOpening(options, store, "table", "tables", {"sum": options.tables})
    made = {"topics": topics, "values": values}
    if options.read == "similar":
        made["read"] = local.local_embeddings()
    asked = given(options, *_TABLE.keys() & vars(options).keys())
    found = release_table(**{**asked, **made, "store": store, "budget": opening})
    write_report(options.report, found.reading, "table")
    _draw(options, found)
    return opening.told(found.receipt, {**_facts(found), "sigma": found.sigma}, _words(found))


def _values(given: str) -> Any:
    """The values: a list, or a mapping of columns to lists."""
    from langchain_dpicl.cli.once import listed

    if not given.startswith("@") or not given.endswith(".json"):
        return listed("--values", given)
    try:
        return json.loads(Path(given[1:]).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = type(error).__name__
    raise InvalidParameter("--values", given, f"a readable JSON file in UTF-8 ({reason})")


def _done(options: argparse.Namespace, topics: list[str], values: Any) -> PrivateTable | None:
    """The table of ``--output`` if this very command has released it."""
    from langchain_dpicl import PrivateTable
    from langchain_dpicl.cli.once import done
    from langchain_dpicl.once.tables_release import columns_of

    def is_same(table: PrivateTable) -> bool:
        return [list(table.topics), {**table.columns}] == [topics, columns_of(values)]

    files = [text[1:] for text in (options.topics, options.values) if text.startswith("@")]
    return done(options, "table", PrivateTable.load, is_same, *files)


def _draw(options: argparse.Namespace, table: PrivateTable) -> None:
    if options.picture:
        lab("plots").draw_table(table, options.picture)


def _facts(table: PrivateTable) -> dict[str, Any]:
    """The answers of every topic in every column."""
    answers = table.answers()
    found = [
        {
            "topic": each.topic,
            "column": each.column,
            "value": each.value if each.is_known else None,
            "margin": round(each.margin, 3),
        }
        for each in answers
    ]
    known = sum(each.is_known for each in answers)
    return {"answers": found, "known": known, "not_known": len(answers) - known, "bars": table.bars()._asdict()}


def _words(table: PrivateTable) -> list[str]:
    """The known answers, some of them, and how many are not known."""
    answers = table.answers()
    known = [each.sentence() for each in answers if each.is_known]
    left = [f"  and {len(known) - _SHOWN} more"] if len(known) > _SHOWN else []
    said = f"{len(known)} of {len(answers)} answers are known; for the others noise may have decided."
    return [*(f"  {sentence}" for sentence in known[:_SHOWN]), *left, said]
