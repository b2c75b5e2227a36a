"""The words of ``dpicl advise``: one recommendation, a table, and the reasons."""

from __future__ import annotations

import argparse
import math
import os
import textwrap
from collections.abc import Sequence
from typing import Any

from langchain_dpicl.lab.advice import BLIND, GATED, LABEL_VOTE, MOST, TOKENS, WORTH, Verdict, Workload, remedies
from langchain_dpicl.privacy.advice import DIRECTIONS, HEAD, head_left

_WHAT = {
    HEAD: "One classifier, fitted once on all records. It then answers any number of questions: no call of a model, no "
    "noise, nothing to count. It gives labels alone, and learns nothing new until you fit another.",
    LABEL_VOTE: "The owners with a record near to the question vote with their own labels. No model is called. Every "
    "answer sees the records of the moment.",
    GATED: "Owners with a record near to the question are drawn, each has a call of the model with this record, and "
    "the calls vote. Use it if the model knows more than the labels of near records tell.",
    BLIND: "Owners are drawn from all, near to the question or not; each has a call of the model, and the calls vote.",
    TOKENS: "A model writes a text in the style of the records, one token at a time.",
}

_WHY = {
    HEAD: "on three data sets of four a head was right more often than votes of labels, and it has no last answer.",
    LABEL_VOTE: "noise spares it, and it needs no model. A head would lose more to noise.",
    GATED: "noise spares it most among the methods that look at records near to the question.",
    BLIND: "noise spares no other method enough.",
}
_UNIT = {TOKENS: " a text"}
_RIGHT = "no other method is expected to be right clearly more often."


def words(
    options: argparse.Namespace,
    task: Workload,
    choices: Sequence[Verdict],
    best: Verdict | None,
    facts: dict[str, Any],
) -> str:
    """Return the recommendation, a table, and the reasons."""
    rows = {row["method"]: row for row in facts["methods"]}
    text = []
    head = next(each for each in choices if each.method == HEAD)
    first = ""
    if options.public is None and not head.worth:
        first = f"First give --public FILE: {_bought(task, head)}"
    if best is None:
        text += _nothing(task, choices)
    else:
        text += [*_folded(first, ""), ""] if first else []
        asked = "Asked for" if options.method else "Take"
        text += [f"{asked}: the {best.method}, at epsilon {facts['epsilon']:g} and delta {task.delta:.3g}.", ""]
        text += _folded(_WHAT[best.method], "  ")
        sure = "" if best.worth else " That is much: see below."
        text += _folded(f"Noise takes about {1.0 - best.left:.0%} of what the records bring.{sure}", "  ")
        if "expected_accuracy" in (row := rows[best.method]):
            text.append(
                f"  Expect about {row['expected_accuracy']:.0%} right answers "
                f"(standard error {row['standard_error']:.0%}, from public records)."
            )
        text += ["", f"  {facts['command']}"]
    text += ["", *_table(options, task, choices, best, rows), ""]
    text += _reasons(options, task, choices, best, facts)
    if "written" in facts:
        text += ["", f"Written: {options.write}. Try it: dpicl serve --config {options.write} --check"]
    return "\n".join(text)


def _bought(task: Workload, head: Verdict) -> str:
    """The words for what public texts buy."""
    spared = head_left(task.owners, head.line.parameter, head.line.options["steps"], DIRECTIONS)
    return (
        "some hundred public texts like your questions, one a line or with labels. With them noise would take about "
        f"{1 - spared:.0%} of a head instead of {1 - head.left:.0%}."
    )


def _nothing(task: Workload, choices: Sequence[Verdict]) -> list[str]:
    """Say that nothing fits, and what would."""
    epsilon = choices[0].epsilon
    text = f"Nothing fits at epsilon {epsilon:g}: noise would decide too many answers."
    if epsilon > MOST:
        text = f"Nothing is recommended at epsilon {epsilon:g}: it hardly bounds what is told about a person."
    lines = [text, f"What would fit at epsilon {MOST:g} (noise takes at most {1 - WORTH:.0%}), or come nearer:"]
    for change, method, left in remedies(task):
        lines += _folded(f"{change}: noise takes about {1 - left:.0%} of a {method}", "    ", "  - ")
    return lines


def _table(
    options: argparse.Namespace,
    task: Workload,
    choices: Sequence[Verdict],
    best: Verdict | None,
    rows: dict[str, Any],
) -> list[str]:
    """Return a line about the task, and the table: a row for each method, with a mark at the best."""
    columns = {("", ""): [each.method for each in choices]}
    if any("expected_accuracy" in row for row in rows.values()):
        right = [rows[each.method].get("expected_accuracy") for each in choices]
        columns["right", "answers"] = [_cell(share, ".0%", "?") for share in right]
    columns |= {
        ("noise", "takes"): [f"{1.0 - each.left:.0%}" if each.feasible else "too much" for each in choices],
        ("close vote", "overturned"): [_cell(each.flip, ".2g", "-") for each in choices],
        ("calls of", "a model"): [f"{each.way.calls:,}{_UNIT.get(each.method, '')}" for each in choices],
    }
    if options.price_in or options.price_out:
        prices = [rows[each.method]["cost_per_answer"] for each in choices]
        columns["price of", "an answer"] = [_cell(price, ".3g", "-") for price in prices]
    columns |= {
        ("worth it", "from epsilon"): [_cell(each.least_epsilon, "g", f"over {10:g}") for each in choices],
        ("feasible", "from owners"): [_cell(each.least_owners, ",", "?") for each in choices],
    }
    padded: list[list[str]] = []
    for (above, below), cells in columns.items():
        column = [above, below, *cells]
        wide = max(map(len, column))
        padded.append([cell.rjust(wide) if padded else cell.ljust(wide) for cell in column])
    marks = ["", "", *("  <-" if each is best else "" for each in choices)]
    lines = ["  " + "  ".join(row) + mark for *row, mark in zip(*padded, marks, strict=True)]
    head = (
        f"{task.owners:,} owners, {task.labels} labels, {task.questions:,} questions, "
        f"epsilon {choices[0].epsilon:g}, delta {task.delta:.3g}:"
    )
    return [head, "", *(line.rstrip() for line in lines)]


def _cell(value: float | None, form: str, missing: str) -> str:
    """Return a number in this form, or the word for a missing one."""
    return missing if value is None else format(value, form)


def _reasons(
    options: argparse.Namespace,
    task: Workload,
    choices: Sequence[Verdict],
    best: Verdict | None,
    facts: dict[str, Any],
) -> list[str]:
    """Return the reasons for the recommendation, and how sure each number is."""
    said = []
    is_known = any("expected_accuracy" in row for row in facts["methods"])
    if best is not None and options.method is None:
        reason = _RIGHT if is_known else _WHY[best.method]
        said.append(f"{best.method}: {reason}")
    for each in choices:
        if not each.feasible:
            owners = _cell(each.least_owners, ",", "")
            end = f"below about {owners} owners" if owners else "for no number of owners"
            said.append(f"{each.method}: not feasible {end} at this epsilon.")
    for each in choices:
        if each.way.eligible is not None and each.method in (LABEL_VOTE, GATED):
            said.append(
                f"{each.method}: a question is taken to find {each.way.eligible:,} of {task.owners:,} owners near. "
                f"Each owner takes part in at most {each.way.count:,} answers; there is no last answer."
            )
    said.append(
        "blind ensemble: noise takes little of it, but records that are not near teach a model little: on three public "
        "data sets it was 1 point above, level with and 7 points below a prompt of public examples."
    )
    said.append(
        f"worth it: noise takes at most {1 - WORTH:.0%}. close vote: a winner ahead by 30 % of the votes. What noise "
        "takes is a rule that was fitted to measured results; it errs by 9 points at most for votes, 14 for heads."
    )
    if options.data is not None:
        by = "records, each its own owner"
        if options.owner_key:
            by = f"distinct values of {options.owner_key!r}"
        said.append(
            f"Of {os.path.basename(options.data)} only the columns' names ({', '.join(facts['columns'])}) and the "
            f"number of {by} were used. If you use this number, you make it public."
        )
    if not is_known:
        said.append("How often answers are right depends on your records and model: --public with labels estimates it.")
    else:
        said.append(
            "right answers: each public record is asked against the others. A call is taken to repeat its record's "
            "label in 90 % of cases; a good model does better. With 400 public records of three data sets this was .02 "
            "to .14 below what heads measured, .05 to .15 below label votes, level with to .20 below gated "
            "ensembles. What a blind ensemble gets right depends on the model alone: `dpicl evaluate` measures it."
        )
    said.append(
        f"epsilon {choices[0].epsilon:g} means that answers make a guess about one person at most "
        f"{_factor(choices[0].epsilon)} times likelier. How to choose it: docs/choosing.md of the source archive."
    )
    return ["Reasons:", *(line for each in said for line in _folded(each, "    ", "  - "))]


def _factor(epsilon: float) -> str:
    factor = math.exp(min(epsilon, 700.0))
    return f"{factor:,.1f}" if epsilon < 3 else f"{factor:,.0f}"


def _folded(text: str, indent: str, first: str = "") -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=first or indent, subsequent_indent=indent)
