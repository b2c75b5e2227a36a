"""The facts of the study of RAG from released terms alone: no list of names, places or kinds is given.

``python examples/studies/rag_terms.py --data TRAIN --settings FILE --output FOLDER``

Words and phrases that enough owners use are released, and then a table of all of them by all of them, each on half of
epsilon and delta. A question's topics are the terms that it names. The answer names, for each of them, the terms that
stand beside it more often than its row and their columns let expect, by more noise than chance gives any cell. It is
right by the rule of all answers of the study. It writes ``terms.json`` and ``terms.md``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gated_study import command_of
from rag_questions import Fact
from rag_table import TableStudy
from tqdm import tqdm

from langchain_dpicl import PrivacyBudget, PrivateTable, release_table, release_terms
from langchain_dpicl.errors import DPICLError, PrivacyWarning
from langchain_dpicl.once.tables_reading import ONLY, Domain
from langchain_dpicl.store.datafile import read_records


def table_of(study: TableStudy, epsilon: float) -> PrivateTable | None:
    """A table of released terms by released terms, on budgets of its own; None if fewer than two were released."""
    settings = study.settings["terms"]
    delta = study.settings["delta"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # each table is measured by itself
        budget = PrivacyBudget(epsilon / 2, delta / 2, {"terms": 1}, ledger="sqlite://", name="terms")
        terms = list(release_terms(study.store, budget, at_most=settings["terms"], phrases=settings["phrases"]))
        budget.close()
        if len(terms) < 2:
            return None
        budget = PrivacyBudget(epsilon / 2, delta / 2, {"sum": 1}, ledger="sqlite://", name="pairs")
        table = release_table(study.store, terms, terms, budget, read="named", at_most=settings["pairs"])
        budget.close()
        return table


class Beside:
    """For each term the terms that stand beside it more often than expected, most so first. Public."""

    def __init__(self, table: PrivateTable) -> None:
        self._domain = Domain(table.topics, {ONLY: table.topics})
        counts = np.maximum(table.counts, 0.0)
        expected = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / max(float(counts.sum()), 1.0)
        above = table.counts - expected
        np.fill_diagonal(above, 0.0)
        bar = table.bars().cell
        self._found = [[table.topics[place] for place in np.argsort(-row) if row[place] > bar] for row in above]

    def passage(self, question: str) -> str:
        """The terms beside those that a question names."""
        topics = sorted(self._domain.named(question)[0])
        return " ".join(f"{self._domain.topics[each]}: {', '.join(self._found[each])}." for each in topics)


def row_of(study: TableStudy, epsilon: float) -> dict[str, Any]:
    """The share of right answers in %, with its standard error over facts, and by kind."""
    settings = study.settings["terms"]
    found: dict[Fact, list[float]] = defaultdict(list)
    numbers = []
    for _ in tqdm(range(settings["tables"]), desc=f"epsilon {epsilon:g}", disable=None, file=sys.stderr):
        table = table_of(study, epsilon)
        numbers.append(0 if table is None else len(table.topics))
        beside = None if table is None else Beside(table)
        for fact, question in study.questions:
            found[fact].append(fact.score(beside.passage(question)) if beside else 0.0)
    means = {fact: float(np.mean(each)) for fact, each in found.items()}
    row = {"epsilon": epsilon, "terms": float(np.mean(numbers))}
    row["right"] = 100 * float(np.mean([x for each in found.values() for x in each]))
    row["error"] = 100 * float(np.std(list(means.values()), ddof=1)) / len(means) ** 0.5
    for kind in ("kind", "near"):
        row[kind] = 100 * float(np.mean([x for fact, each in found.items() if fact.kind == kind for x in each]))
    return row


def report(study: TableStudy, command: str, folder: Path) -> dict[str, Any]:
    """Write the files; return what ``terms.json`` has."""
    settings = study.settings["terms"]
    rows = [row_of(study, epsilon) for epsilon in settings["epsilons"]]
    lines = ["| method | epsilon | terms | right | kind | near |", "|" + " --- |" * 6]
    lines += [
        f"| pairs of released terms, no list | {row['epsilon']:g} | {row['terms']:.0f} | {row['right']:.1f} ± "
        f"{row['error']:.1f} | {row['kind']:.1f} | {row['near']:.1f} |"
        for row in rows
    ]
    measured = (
        f"{len(study.questions)} questions, {study.settings['owners']:,} owners, delta {study.settings['delta']:g}; "
        f"{settings['tables']} tables each. In %, ± the standard error over facts."
    )
    results = {"measured": measured, "table": "\n".join(lines), "methods": rows, "command": command}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "terms.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "terms.md").write_text(f"{measured}\n\n{results['table']}\n", encoding="utf-8")
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Release the terms and tables, ask them, and report."""
    parser = argparse.ArgumentParser(prog="python examples/studies/rag_terms.py", description=__doc__)
    parser.add_argument("--data", required=True, help="records of E2E: input, output")
    parser.add_argument("--settings", required=True, type=Path, help="a JSON file")
    parser.add_argument("--output", required=True, type=Path, help="a folder for the report")
    parser.add_argument("--develop", action="store_true", help="other documents and wordings, to choose settings on")
    options = parser.parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    try:
        settings: Mapping[str, Any] = json.loads(options.settings.read_text("utf-8"))
        study = TableStudy(read_records(options.data), settings, options.develop)
        results = report(study, shlex.join(command_of("rag_terms.py", given)), options.output)
    except DPICLError as error:
        print(f"rag_terms: {error}", file=sys.stderr)
        return 1
    print(results["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
