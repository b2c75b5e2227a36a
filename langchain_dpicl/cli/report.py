"""The command ``report``: what a ledger promised and spent, in plain words, for a data protection officer."""

from __future__ import annotations

import argparse
import html
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from langchain_dpicl import __version__
from langchain_dpicl.cli import add_ledger, add_run, check_only, show
from langchain_dpicl.durable import replacing, writing
from langchain_dpicl.errors import InvalidParameter

if TYPE_CHECKING:
    from langchain_dpicl.budget.upkeep import LedgerReport

_READERS = (
    "For the operator of the system, its data protection officer and its auditors. It holds no record, no question, no "
    "answer and no name of a person in the records. It shows when the system was used{callers}. Do not publish it."
)
_FORGOTTEN = (
    "This report gives no number of people who were forgotten, and no number of people who are in the records today. "
    "Both follow the private records, so nobody may learn them without a charge. The number of people above is public: "
    "it was declared when the plan was frozen, and does not change when people come or leave. Whoever was forgotten "
    "takes part in no later answer. Answers that were given before stay, and the promise covers them. What was "
    "released once, such as a classifier, does not change until it is fitted anew."
)
_REFUSED = (
    "A request that was refused before it was charged (the budget is spent, the caller unknown, the text not allowed) "
    "used no record and is not in the ledger; the server's log and metrics count those."
)
_MOST_DAYS = 31
_STYLE = (
    "body{font:15px/1.5 Georgia,serif;max-width:50em;margin:2em auto;padding:0 1em;color:#222}"
    "h1,h2,h3{font-family:Helvetica,Arial,sans-serif;line-height:1.2}h2{border-top:1px solid #bbb;padding-top:.8em}"
    "table{border-collapse:collapse;margin:.8em 0;width:100%}th,td{text-align:left;padding:.3em .7em .3em 0;"
    "border-bottom:1px solid #ddd;vertical-align:top;overflow-wrap:break-word}p{overflow-wrap:anywhere}"
    "@media print{body{margin:0;max-width:none;font-size:11pt}h2,h3,tr{break-inside:avoid}h2,h3{break-after:avoid}}"
)


class ReportPart(NamedTuple):
    """A heading of a level, paragraphs, and perhaps a table, whose first row is its head."""

    level: int
    title: str
    paragraphs: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()


def report_options(parser: Any) -> None:
    """Write what a ledger promised and spent, for a data protection officer: the promise in plain words, people,
    purpose, spending by line, by time and by caller, outcomes, versions and digests.

    examples:
      dpicl report --ledger sqlite:///budget.db --purpose "route tickets to a desk" --format html --output report.html
      dpicl report --config server.yaml --audit audit.json --format md

    Callers are told only if the budget counts each one's releases (scope: per_principal) or records them
    (record_principals: true). --config reports every budget and head that a server's file names, in all its
    ledgers, and takes the purposes from it.
    """
    add_run(parser, report)
    add_ledger(parser)
    parser.add_argument(
        "--config", metavar="FILE", help="a server's file, instead of --ledger and --name: all its budgets and heads"
    )
    parser.add_argument("--name", help="one budget of the ledger (default: all)")
    parser.add_argument("--purpose", metavar="TEXT", help="what the answers are for (default: the server's file's)")
    parser.add_argument("--audit", metavar="FILE", help="what `dpicl audit --json` has printed")
    parser.add_argument("--format", choices=("md", "html"), default="md", help="default: md, Markdown")
    parser.add_argument("--output", metavar="FILE", help="default: print it")


def report(options: argparse.Namespace) -> int:
    """Gather the facts, and write or print them."""
    if options.config is None:
        facts = facts_of({options.ledger: [options.name]}) | {"purpose": options.purpose}
    else:
        facts = _of_file(options)
    facts |= {"audits": _audits(options.audit)}
    written = _html if options.format == "html" else _markdown
    text = written(parts_of(facts))
    if options.output is None:
        return show(options, facts, text)
    with writing("--output", options.output), replacing(Path(options.output)) as file:
        file.write(text.encode() + b"\n")
    return show(options, facts, f"{options.output} is written. {facts['readers']}")


def _of_file(options: argparse.Namespace) -> dict[str, Any]:
    """Return the facts of a server's file: of each budget that it names, in all its ledgers, and of its heads."""
    from langchain_dpicl.once.head import PrivateHead
    from langchain_dpicl.serving.config import read
    from langchain_dpicl.spec.description import place_in

    check_only(options, {"config", "purpose", "audit", "format", "output"}, "--config")
    settings = read(options.config)
    paths: dict[tuple[str, str], list[str]] = {}
    heads, unknown = [], []
    for each in settings.served:
        about: Any = each.budget or settings.budget
        if each.head is not None:
            heads.append({"path": each.path, "receipt": PrivateHead.receipt_in(settings.folder / each.head.file)})
        elif each.chain is not None:
            unknown.append(each.path)
        else:
            paths.setdefault((str(place_in(settings.folder, about.ledger)), about.name), []).append(each.path)
    if not heads and not paths:
        raise InvalidParameter("--config", options.config, "a file with a budget; name another ledger with --ledger")
    ledgers: dict[str, list[str | None]] = {}
    for ledger, name in paths:
        ledgers.setdefault(ledger, []).append(name)
    try:
        facts = facts_of(ledgers)
    except InvalidParameter as error:
        bound = f"the file of a server that was started: its ledger has no budget {error.value!r} yet"
        raise InvalidParameter("--config", options.config, bound) from None
    if settings.releases:
        purposes = {each.path: each.purpose for each in settings.served}
        in_order = [paths[ledger, str(name)] for ledger, names in ledgers.items() for name in names]
        for budget, found in zip(facts["budgets"], in_order, strict=True):
            budget["paths"] = {path: purposes[path] for path in found}
    return facts | {"purpose": options.purpose or settings.purpose, "heads": heads, "unknown": unknown}


def _audits(path: str | None) -> list[dict[str, Any]]:
    """The figures of an audit's file."""
    if path is None:
        return []
    wanted = ("mechanism", "epsilon", "delta", "lower_bound", "confidence", "trials")
    try:
        found = json.loads(Path(path).read_text("utf-8"))
        return [{name: each[name] for name in wanted} for each in found["audits"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise InvalidParameter("--audit", path, "a file that `dpicl audit --json` has printed") from None


# -- facts -------------------------------------------------------------------------------------------------------------


def facts_of(chosen: Mapping[str, Sequence[str | None]]) -> dict[str, Any]:
    """Return what ledgers say about the budgets of these names; None: all of a ledger."""
    from langchain_dpicl.budget.schema import utc_now
    from langchain_dpicl.budget.upkeep import LedgerReport

    budgets: list[dict[str, Any]] = []
    ledgers = []
    for ledger, names in chosen.items():
        with closing(LedgerReport(ledger)) as source:
            for name in names:
                shown = source.show(name)
                budgets += [{**found, **_detailed(source, found)} for found in shown["budgets"]]
            ledgers.append({"ledger": shown["ledger"], "total": shown["total"]})
    callers = ", and who asked: callers are people, too" if any(each["by_principal"] for each in budgets) else ""
    return {
        "written": utc_now()[:19],
        "software": f"langchain-dpicl {__version__}",
        "ledgers": ledgers,
        "readers": _READERS.format(callers=callers),
        "budgets": budgets,
        "heads": [],
        "unknown": [],
        "forgotten": _FORGOTTEN,
    }


def _detailed(source: LedgerReport, found: dict[str, Any]) -> dict[str, Any]:
    """Return what stands in a ledger's plan and history of the budget that was found."""
    from langchain_dpicl.budget.terms import plan_of

    (stored,) = source.chosen(found["name"])
    plan, spent = plan_of(stored), _spent(source.history(found["name"]))
    lines = {
        line: {
            **found["lines"][line],
            "count": item.count,
            "rate": item.rate,
            "noise": item.describe(),
            "spent": spent["by_line"].get(line, 0),
        }
        for line, item in plan.lines.items()
    }
    owners = max((item.owners or 0 for item in plan.lines.values()), default=0)
    return {"digest": plan.digest, "owners": owners or None, "lines": lines, **spent}


def _spent(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """All that was spent, by line, day or month, caller and outcome. Of callers, nothing unless some are known."""
    lines: Counter[str] = Counter()
    days: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    principals: Counter[str] = Counter()
    for row in rows:
        lines[row["line"]] += row["units"]
        days[row["time"][:10]] += row["units"]
        outcomes[row["outcome"]] += 1
        principals[row["principal"] or ""] += row["units"]
    if len(days) > _MOST_DAYS:
        months: Counter[str] = Counter()
        for day, units in days.items():
            months[day[:7]] += units
        days = months
    known = {who or "not recorded": units for who, units in principals.most_common()}
    return {
        "by_line": dict(lines),
        "by_time": dict(sorted(days.items())),
        "outcomes": dict(outcomes.most_common()),
        "by_principal": known if set(principals) - {""} else None,
    }


# -- words -------------------------------------------------------------------------------------------------------------


def parts_of(facts: dict[str, Any]) -> list[ReportPart]:
    """Return the report in its order."""
    about = [
        f"Written {facts['written']} UTC by {facts['software']}, from {_sources(facts)}.",
        f"Who may read this: {facts['readers']}",
        f"Purpose: {facts['purpose'] or 'not given. Give it with --purpose, or as purpose in a file.'}",
    ]
    parts = [ReportPart(1, "Differential privacy: what was promised, and what was spent", about)]
    for budget in facts["budgets"]:
        parts += _budget(budget)
    parts += [_head(head) for head in facts["heads"]]
    if not facts["budgets"] and not facts["heads"]:
        parts.append(ReportPart(2, "Budgets", ["The ledger holds no budget."]))
    together = []
    for total in (each["total"] for each in facts["ledgers"]):
        if total and len(total["plans"]) > 1:
            names = ", ".join(plan["name"] for plan in total["plans"])
            together.append(
                f"The records of one person may stand behind several budgets ({names}). Their losses add up: epsilon "
                f"{total['epsilon']:.3g} at delta {total['delta']:.2g} was spent so far, and "
                f"{total['promised_epsilon']:.4g} at {total['promised_delta']:.2g} is promised in all."
            )
    if facts["heads"] or len(facts["ledgers"]) > 1:
        together += promised_together(facts["budgets"], [head["receipt"] for head in facts["heads"]])
    if together:
        parts.append(ReportPart(2, "All budgets together", together))
    if facts["unknown"]:
        reason = "a chain of the deployer's own, whose budgets the file does not name. Report its ledger with --ledger."
        parts.append(ReportPart(2, "Not in this report", [f"{path}: {reason}" for path in facts["unknown"]]))
    parts.append(ReportPart(2, "People who were forgotten", [facts["forgotten"]]))
    if facts["audits"]:
        words = ["An audit attacks the mechanism. A proved epsilon above the claim would mean that the claim is false."]
        head = ("mechanism", "claimed epsilon", "delta", "proved, at least", "confidence", "trials")
        rows = [[_number(value) for value in each.values()] for each in facts["audits"]]
        parts.append(ReportPart(2, "Audit", words, [head, *rows]))
    return parts


def promised_together(budgets: Sequence[Mapping[str, Any]], receipts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sum of several promises, those of heads by their ``receipts``: nothing for a single one."""
    distinct = [each for place, each in enumerate(receipts) if each not in receipts[:place]]
    if len(budgets) + len(distinct) < 2:
        return []
    epsilon, delta = (sum(each[name] for each in (*budgets, *distinct)) for name in ("epsilon", "delta"))
    counts = ((len(budgets), "budget"), (len(distinct), "head"))
    named = " and ".join(f"{count} {word}{'s' * (count > 1)}" for count, word in counts if count)
    return [
        f"{named} are {len(budgets) + len(distinct)} promises. They add up for whoever is in the data of all: epsilon "
        f"{epsilon:g} at delta {delta:.2g}."
    ]


def _sources(facts: dict[str, Any]) -> str:
    ledgers = [each["ledger"] for each in facts["ledgers"]]
    named = [f"the ledger{'s' * (len(ledgers) > 1)} {', '.join(ledgers)}"] if ledgers else []
    return " and ".join([*named, *["the files of heads"] * bool(facts["heads"])])


def _promised(epsilon: float, delta: float, what: str) -> list[str]:
    factor = math.exp(min(epsilon, 700.0))
    return [
        "The unit is one person (one owner) with everything they ever wrote. Take any one of them out of the records: "
        f"whatever anyone computes from all answers of this {what} comes out almost the same.",
        f"Almost: the answers make any conclusion about that person at most {factor:,.3g} times likelier (epsilon "
        f"{epsilon:g}), except with a probability of {delta:.3g} (delta). So a guess that was even, 50 %, becomes at "
        f"most {100 / (1 + 1 / factor):.3g} %.",
    ]


def _head(head: dict[str, Any]) -> ReportPart:
    receipt = head["receipt"]
    words = [
        *_promised(receipt["epsilon"], receipt["delta"], "head"),
        f"Released once, {receipt['time'][:19]} UTC: {receipt['mechanism']}. Its answers cost nothing.",
        f"The condition: {receipt['assumption']}.",
        f"The receipt: {receipt['id']}, plan {receipt['plan']}. Epsilon {receipt['epsilon_spent']:.3g} of "
        f"{receipt['epsilon']:g} was spent on the budget {receipt['budget']} when it was released.",
    ]
    return ReportPart(2, f"Head {head['path']}", words)


def _budget(budget: dict[str, Any]) -> list[ReportPart]:
    epsilon, delta = budget["epsilon"], budget["delta"]
    spent = budget["epsilon_spent"]
    most = " by the caller who spent most" if budget["scope"] == "per_principal" else ""
    people = "No number of people was declared."
    if budget["owners"]:
        people = f"The plan was made for {budget['owners']:,} people, a number that was declared and is public."
    promise = [
        *_promised(epsilon, delta, "budget"),
        f"The condition: {budget['assumption']}.",
        people,
        f"Spent so far{most}: epsilon {spent:.3g} of {epsilon:g}. Nothing is ever refunded, and when all is spent the "
        "system refuses.",
        f"Frozen {budget['created'][:19]} UTC. Digest of the plan: {budget['digest']}.",
    ]
    served = [
        f"Answers at {path}" + (f", for this purpose: {purpose}" if purpose else "")
        for path, purpose in budget.get("paths", {}).items()
    ]
    lines = [("line", "spent", "planned", "a person's chance to take part", "mechanism and noise")]
    for name, line in budget["lines"].items():
        planned = f"{line['count']:,}"
        if budget["tickets"]:
            planned = f"no last answer; a person takes part in at most {planned}"
        lines.append((name, f"{line['spent']:,}", planned, f"{line['rate']:.3g}", line["noise"]))
    outcomes = [("outcome", "number"), *((name, f"{count:,}") for name, count in budget["outcomes"].items())]
    times = [("time (UTC)", "spent"), *((name, f"{count:,}") for name, count in budget["by_time"].items())]
    parts = [
        ReportPart(2, f"Budget {budget['name']}", served),
        ReportPart(3, "The promise", promise),
        ReportPart(3, "Spent by line", (), lines),
        ReportPart(3, "Spent by time", [] if budget["by_time"] else ["Nothing was spent."], times),
        ReportPart(3, "Outcomes and refusals", [_REFUSED], outcomes),
    ]
    if budget["by_principal"] is None:
        words = "Callers are not recorded (record_principals is off, and all share one counter)."
        return [*parts, ReportPart(3, "Spent by caller", [words])]
    callers = [("caller", "spent"), *((name, f"{count:,}") for name, count in budget["by_principal"].items())]
    return [*parts, ReportPart(3, "Spent by caller", (), callers)]


def _number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


# -- forms -------------------------------------------------------------------------------------------------------------


def _markdown(parts: Sequence[ReportPart]) -> str:
    lines: list[str] = []
    for part in parts:
        lines += [f"{'#' * part.level} {_plain(part.title)}", ""]
        for paragraph in part.paragraphs:
            lines += [_plain(paragraph), ""]
        table = part.table if part.table[1:] else ()
        for number, row in enumerate(table):
            lines.append(f"| {' | '.join(map(_plain, row))} |")
            if number == 0:
                lines.append("|---" * len(row) + "|")
        lines += [""] if table else []
    return "\n".join(lines).rstrip()


def _plain(text: str) -> str:
    """A text that is no Markdown and no HTML, on one line."""
    escaped = html.escape(" ".join(text.split()), quote=False)
    for sign in "\\|`*_[]":
        escaped = escaped.replace(sign, f"\\{sign}")
    return escaped


def _html(parts: Sequence[ReportPart]) -> str:
    body: list[str] = []
    for part in parts:
        body.append(f"<h{part.level}>{html.escape(part.title)}</h{part.level}>")
        body += [f"<p>{html.escape(paragraph)}</p>" for paragraph in part.paragraphs]
        if part.table[1:]:
            head, *rows = part.table
            cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
            lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
            body.append("<table>" + "\n".join(f"<tr>{line}</tr>" for line in [cells, *lines]) + "</table>")
    title = html.escape(parts[0].title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>"
    )
