"""The facts of the study of RAG from a released table: a question in, the retriever's passage out, and no model.

``python examples/studies/rag_table.py --data TRAIN --settings FILE --output FOLDER``

The documents, the facts and the questions are those of ``rag_study.py``. A table of all names by all places and kinds
is released, as often as the settings say (each with a budget of its own), and each question asked of its retriever. An
answer is the passage: it is right as every answer of the study is, with the right value and no other. It writes
``once.json`` and ``once.md``.
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
from langchain_core.embeddings import DeterministicFakeEmbedding
from rag_questions import DEVELOP, KINDS, TEST, Fact, facts_of, field_of
from tqdm import tqdm

from langchain_dpicl import ExemplarStore, PrivacyBudget, PrivateTable, release_table
from langchain_dpicl.errors import DPICLError, PrivacyWarning
from langchain_dpicl.store.datafile import read_records


class TableStudy:
    """The documents and the questions. ``develop``: other documents and wordings."""

    def __init__(
        self, records: Sequence[Mapping[str, str]], settings: Mapping[str, Any], develop: bool = False
    ) -> None:
        self.settings = settings
        owners = settings["owners"]
        private = records[owners : -settings["public"]] if develop else records[:owners]
        near = sorted({field_of(record, "near") for record in records} - {""})
        self.topics = sorted({field_of(record, "name") for record in records})
        self.values = {"near": near, "kind": list(KINDS)}
        facts = facts_of(private, near, settings["least"])
        wordings = DEVELOP if develop else TEST
        self.questions = [(fact, each.format(fact.name)) for fact in facts for each in wordings[fact.kind]]
        rows = [{"text": record["output"], "owner": str(i)} for i, record in enumerate(private)]
        vectors = np.ones((len(rows), 2), np.float32)  # which nothing reads
        self.store = ExemplarStore.from_records(
            rows,
            DeterministicFakeEmbedding(size=2),
            input_key="text",
            output_key=None,
            owner_key="owner",
            vectors=vectors,
            progress=False,
        )

    def table(self, epsilon: float) -> PrivateTable:
        """A table on a budget of its own."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # each table is measured by itself
            budget = PrivacyBudget(epsilon, self.settings["delta"], {"sum": 1}, ledger="sqlite://")
            try:
                return release_table(self.store, self.topics, self.values, budget, read="named")
            finally:
                budget.close()

    def rows(self, epsilon: float) -> tuple[float, list[dict[str, Any]]]:
        """The noise, and for each question its scores over all tables."""
        tables = self.settings["table"]["tables"]
        found: dict[tuple[Fact, str], list[tuple[float, bool]]] = defaultdict(list)
        sigma = 0.0
        for _ in tqdm(range(tables), desc=f"epsilon {epsilon:g}", unit="table", disable=None, file=sys.stderr):
            table = self.table(epsilon)
            sigma = table.sigma
            retriever = table.as_retriever()
            for fact, question in self.questions:
                (passage,) = retriever.invoke(question)
                is_known = fact.kind in passage.metadata["known"]
                found[fact, question].append((fact.score(passage.page_content), is_known))
        rows = [{"fact": fact, "right": right, "known": known} for (fact, _), each in found.items()
                for right, known in [np.array(each, np.float64).T]]  # fmt: skip
        return sigma, rows


def scored(sigma: float, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The share of right answers with its standard error over facts, by kind, and of those that are known."""
    by_fact = defaultdict[Any, list[float]](list)
    for row in rows:
        by_fact[row["fact"]].append(float(row["right"].mean()))
    means = [float(np.mean(each)) for each in by_fact.values()]
    right = np.array([row["right"] for row in rows])
    known = np.array([row["known"] for row in rows])
    of = np.array([row["fact"].kind for row in rows])
    found = {"sigma": sigma, "right": 100 * float(right.mean())}
    found["error"] = 100 * float(np.std(means, ddof=1)) / len(means) ** 0.5
    found |= {kind: 100 * float(right[of == kind].mean()) for kind in ("kind", "near")}
    found["known"] = 100 * float(known.mean())
    found["wrong and known"] = 100 * float((known * (1 - right)).mean())
    return found


def report(study: TableStudy, command: str, folder: Path) -> dict[str, Any]:
    """Write the files; return what ``once.json`` has."""
    settings = study.settings
    methods = [{"epsilon": each, **scored(*study.rows(each))} for each in settings["table"]["epsilons"]]
    lines = ["| epsilon | right | kind | near | known | known and wrong | noise |", "|" + " --- |" * 7]
    lines += [
        f"| {row['epsilon']:g} | {row['right']:.1f} ± {row['error']:.1f} | {row['kind']:.1f} | {row['near']:.1f} | "
        f"{row['known']:.1f} | {row['wrong and known']:.2f} | sigma {row['sigma']:.3g} |"
        for row in methods
    ]
    measured = (
        f"{len(study.questions)} questions, {settings['owners']:,} owners, delta {settings['delta']:g}; "
        f"{len(study.topics)} topics by {sum(map(len, study.values.values()))} values, "
        f"{settings['table']['tables']} tables each. In %, ± the standard error over facts."
    )
    results = {"measured": measured, "table": "\n".join(lines), "methods": methods, "command": command}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "once.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "once.md").write_text(f"{measured}\n\n{results['table']}\n", encoding="utf-8")
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Release the tables, ask them, and report."""
    parser = argparse.ArgumentParser(prog="python examples/studies/rag_table.py", description=__doc__)
    parser.add_argument("--data", required=True, help="records of E2E: input, output")
    parser.add_argument("--settings", required=True, type=Path, help="a JSON file")
    parser.add_argument("--output", required=True, type=Path, help="a folder for the report")
    parser.add_argument("--develop", action="store_true", help="other documents and wordings, to choose settings on")
    options = parser.parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    try:
        settings = json.loads(options.settings.read_text("utf-8"))
        study = TableStudy(read_records(options.data), settings, options.develop)
        results = report(study, shlex.join(command_of("rag_table.py", given)), options.output)
    except DPICLError as error:
        print(f"rag_table: {error}", file=sys.stderr)
        return 1
    print(results["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
