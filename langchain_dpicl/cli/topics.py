"""The command ``topics``: what users ask, and what could not be answered, as a report that is released once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli import add_model, add_parameters, add_private_data, add_run, given, model_of, show
from langchain_dpicl.cli.data import keys_of, private_store, read_file
from langchain_dpicl.durable import replacing, writing
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.parameters import parameters_of

if TYPE_CHECKING:
    from langchain_dpicl import PrivateTopics

_TOPICS = parameters_of("once/topics_release.py", "release_topics")
_OTHERWISE = ("split", "terms", "words", "llm", "terms_line", "line")


def topics_options(parser: Any) -> None:
    """Report what users ask: topics, how many owners ask about each, and, with --split, how many of their questions
    could not be answered. The report is public, and costs nothing from then on.

    examples:
      dpicl topics --data questions.csv --epsilon 1 --owner-key user
      dpicl topics --data questions.csv --epsilon 1 --owner-key user --split status=answered,unanswered \\
        --output topics.json --markdown topics.md --model smollm2-135m-instruct
      dpicl topics --data march.csv --epsilon 3 --owner-key user --reports 12 --name questions --output march.json

    Half of the work is to find the words that enough owners use, half to count owners by topic: both are charged to one
    budget. A --model names the topics; it sees released words alone.

    --reports 12 --name NAME: a plan of twelve reports, one a month, frozen with the first; each has an --output of its
    own. Run the same command again to resume an interrupted release; nothing is charged twice. If --output is a report
    that the ledger has under --name, and --data is not newer, the command is done: it charges nothing.
    """
    add_run(parser, topics, releases="reports")
    add_private_data(parser, "text", "")
    add_parameters(
        parser,
        {name: each for name, each in _TOPICS.items() if name not in _OTHERWISE},
        output=" (.json; default: the data file's name with .topics.json)",
    )
    split = "a column and its public values, the groups: such as status=answered,unanswered"
    parser.add_argument("--split", metavar="COLUMN=VALUES", help=split)
    parser.add_argument("--reports", type=int, default=1, help="how many reports the budget is for (default 1)")
    parser.add_argument("--markdown", metavar="FILE", help="write the report, too")
    parser.add_argument("--report", metavar="FILE", help="private: how many records were silent, for the operator")
    add_model(parser, "none: topics are named by their first words")


def topics(options: argparse.Namespace) -> int:
    """Release the topics and write their file."""
    from langchain_dpicl import PrivateTopics, release_topics
    from langchain_dpicl.cli.once import BudgetOpening, check_name, done, write_report
    from langchain_dpicl.cli.session import receipt_words
    from langchain_dpicl.once.tables_release import columns_of
    from langchain_dpicl.once.topics_reading import ONE_GROUP

    check_name(options, "reports")
    options.output = options.output or f"{Path(options.data).name.partition('.')[0]}.topics.json"
    split = _split(options.split)

    def is_same(found: PrivateTopics) -> bool:
        return found.table is None or dict(found.table.columns) == columns_of(split or {ONE_GROUP: [ONE_GROUP]})

    if (found := done(options, "topics", PrivateTopics.load, is_same)) is not None:
        _write(options, found)
        words = [f"{options.output} is done: nothing was charged.", "", found.report()]
        facts = {"output": options.output, "done": True, **_facts(found), "receipt": found.receipt}
        return show(options, facts, "\n".join([*words, receipt_words(found.receipt, "reports")]))
    llm = model_of(options).load() if options.model or options.model_url else None
    rows = read_file(options, options.data, keys_of(options), is_private=True)
    if split and not any(column in row for column in split for row in rows):
        raise InvalidParameter("--split", options.split, "a column of the data")
    store = private_store(options, rows)
    opening = BudgetOpening(options, store, "topics", "reports", dict.fromkeys(("terms", "sum"), options.reports))
    asked = given(options, *(_TOPICS.keys() - {*_OTHERWISE}) & vars(options).keys())
    found = release_topics(**{**asked, "store": store, "budget": opening, "split": split, "llm": llm})
    write_report(options.report, found.reading, "report")
    _write(options, found)
    return opening.told(found.receipt, _facts(found), ["", found.report()])


def _split(text: str | None) -> dict[str, list[str]] | None:
    """The column of the groups, with its values."""
    if text is None:
        return None
    column, separator, values = text.partition("=")
    if not separator:
        raise InvalidParameter("--split", text, "COLUMN=VALUES, such as status=answered,unanswered")
    return {column.strip(): [value.strip() for value in values.split(",")]}


def _facts(topics: PrivateTopics) -> dict[str, Any]:
    """Every topic with its noisy counts, and which of them are known."""
    found = [
        {
            "title": topic.title,
            "terms": topic.terms,
            "counts": {group: round(count, 1) for group, count in topic.counts.items()},
            "error": round(topic.error, 1),
            "known": [group for group in topic.counts if topic.is_known(group)],
        }
        for topic in topics.topics()
    ]
    return {"topics": found, "terms": len(topics.terms), "receipts": topics.receipts}


def _write(options: argparse.Namespace, topics: PrivateTopics) -> None:
    """Write the report as Markdown, if there is a file for it. It is public."""
    if options.markdown:
        path = Path(options.markdown)
        with writing("--markdown", path, "; the report is in --output"), replacing(path, mode=0o644) as file:
            file.write(topics.report().encode())
