"""What ``dpicl advise`` says: one recommendation, a table, and the reasons."""

from __future__ import annotations

import argparse
import math
import os
import textwrap
from collections.abc import Sequence
from typing import Any

from langchain_dpicl.lab.advice import BLIND, GATED, LABEL_VOTE, TOKENS, WORTH, Verdict, Workload
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
_RIGHT = "no other method is expected to be right clearly more often."


def words(
    options: argparse.Namespace, task: Workload, choices: Sequence[Verdict], best: Verdict | None, facts: dict[str, Any]
) -> str:
    """Return the recommendation, a table, and the reasons."""
    rows = {row["method"]: row for row in facts["methods"]}
    text = []
    if best is None:
        least = [(each.least_owners, each.method) for each in choices if each.least_owners and each.method != TOKENS]
        enough = f" With {min(least)[0]:,} owners the {min(least)[1]} would be feasible." if least else ""
        text.append(f"Nothing is feasible at epsilon {facts['epsilon']:g}: noise would decide the answers.{enough}")
        text.append("What helps: fewer questions, more owners, or a larger epsilon, which promises less.")
    else:
        asked = "Asked for" if options.method else "Take"
        text += [f"{asked}: the {best.method}, at epsilon {facts['epsilon']:g} and delta {task.delta:.3g}.", ""]
        text += _folded(_WHAT[best.method], "  ")
        sure = "" if best.worth else " That is much: see below."
        text += _folded(f"Noise takes about {1.0 - best.left:.0%} of what the records bring.{sure}", "  ")
        if "expected_accuracy" in (row := rows[best.method]):
            right, error = row["expected_accuracy"], row["standard_error"]
            text.append(f"  Expect about {right:.0%} right answers (standard error {error:.0%}, from public records).")
        text += ["", f"  {facts['command']}"]
    text += ["", *_table(options, task, choices, best, rows), ""]
    text += _reasons(options, task, choices, best, facts.get("columns", ()))
    if "written" in facts:
        text += ["", f"Written: {options.write}. Try it: dpicl serve --config {options.write} --check"]
    return "\n".join(text)


def _table(
    options: argparse.Namespace, task: Workload, choices: Sequence[Verdict], best: Verdict | None, rows: dict[str, Any]
) -> list[str]:
    priced, known = options.price_in or options.price_out, any("expected_accuracy" in row for row in rows.values())
    columns = ["", *(["right"] if known else []), "noise", "close vote", "calls of", *(["price of"] if priced else [])]
    below = ["", *(["answers"] if known else []), "takes", "overturned", "a model", *(["an answer"] if priced else [])]
    table = [[*columns, "worth it", "feasible"], [*below, "from epsilon", "from owners"]]
    for each in choices:
        row, mark = rows[each.method], " <-" if each is best else ""
        cells = [each.method]
        if known:
            cells.append(f"{row['expected_accuracy']:.0%}" if "expected_accuracy" in row else "?")
        cells.append(f"{row['noise_takes']:.0%}" if each.feasible else "too much")
        cells.append("-" if each.flip is None else f"{each.flip:.2g}")
        cells.append(f"{row['calls']:,}" + (" a text" if each.method == TOKENS else ""))
        if priced:
            cells.append("-" if row["cost_per_answer"] is None else f"{row['cost_per_answer']:.3g}")
        cells.append(f"over {10:g}" if each.least_epsilon is None else f"{each.least_epsilon:g}")
        cells.append(("?" if each.least_owners is None else f"{each.least_owners:,}") + mark)
        table.append(cells)
    wide = [max(len(row[i].removesuffix(" <-")) for row in table) for i in range(len(table[0]))]
    head = (
        f"{task.owners:,} owners, {task.labels} labels, {task.questions:,} questions, "
        f"epsilon {choices[0].epsilon:g}, delta {task.delta:.3g}:"
    )
    lines = []
    for row in table:
        cells = [row[0].ljust(wide[0])]
        cells += [cell.removesuffix(" <-").rjust(wide[i]) for i, cell in enumerate(row[1:], start=1)]
        lines.append("  " + "  ".join(cells) + ("  <-" if row[-1].endswith("<-") else ""))
    return [head, "", *(line.rstrip() for line in lines)]


def _reasons(
    options: argparse.Namespace,
    task: Workload,
    choices: Sequence[Verdict],
    best: Verdict | None,
    columns: Sequence[str],
) -> list[str]:
    """Why, and how sure."""
    said = []
    if best is not None and options.method is None:
        said.append(f"{best.method}: {_WHY[best.method] if options.public is None else _RIGHT}")
    for each in choices:
        if not each.feasible:
            least = each.least_owners
            end = "for no number of owners" if least is None else f"below about {least:,} owners"
            said.append(f"{each.method}: not feasible {end} at this epsilon.")
    head = next(each for each in choices if each.method == HEAD)
    if options.public is None and not head.worth:
        steps, sigma = head.line.options["steps"], head.line.parameter
        spared = head_left(task.owners, sigma, steps, DIRECTIONS)
        said.append(
            f"head: with some hundred public texts like your questions (--public), noise would take {1 - spared:.0%} "
            f"instead of {1 - head.left:.0%}."
        )
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
        "takes is a rule that was fitted to measured results; it errs by 9 points at most for votes, 11 for heads."
    )
    if options.data is not None:
        by = f"distinct values of {options.owner_key!r}" if options.owner_key else "records, each its own owner"
        said.append(
            f"Of {os.path.basename(options.data)} only the columns' names ({', '.join(columns)}) and the number of "
            f"{by} were used. If you use this number, you make it public."
        )
    if options.public is None:
        said.append("How often answers are right depends on your records and model: --public FILE gives an estimate.")
    elif any(each.method == GATED for each in choices):
        said.append(
            "right answers: each public record is asked against the others. A call is taken to repeat its record's "
            "label in 90 % of cases; a good model does better. With 400 public records of three data sets this was .02 "
            "above to .15 below what heads measured, .05 to .15 below label votes, level with to .20 below gated "
            "ensembles. What a blind ensemble gets right depends on the model alone: `dpicl evaluate` measures it."
        )
    said.append(
        f"epsilon {choices[0].epsilon:g} means that answers make a guess about one person at most "
        f"{_factor(choices[0].epsilon)} times likelier. docs/choosing.md says how to choose it."
    )
    return ["Reasons:", *(line for each in said for line in _folded(each, "    ", "  - "))]


def _factor(epsilon: float) -> str:
    return f"{math.exp(min(epsilon, 700.0)):,.{1 if epsilon < 3 else 0}f}"


def _folded(text: str, indent: str, first: str | None = None) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=indent if first is None else first, subsequent_indent=indent)
