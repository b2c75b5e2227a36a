"""A table by the number of owners who say something of a fact: the study of RAG with fewer documents.

``python examples/studies/rag_owners.py --data TRAIN --settings FILE --output FOLDER``

Of the documents of ``rag_study.py``, in their order, one is left out if it would be the n-th and one more of a fact:
more than n owners then say a value of none. The facts that n owners say a value of are asked, in a table of all names
by all places and kinds. The documents are read once, and noise is drawn often. It writes ``owners.json``, ``owners.md``
and a picture.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gated_study import command_of
from numpy.typing import NDArray
from rag_questions import KINDS, Fact, facts_of, field_of, said
from rag_study import Quick, solved

from langchain_dpicl import PrivateTable
from langchain_dpicl.errors import DPICLError
from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.sums import owner_sum
from langchain_dpicl.once.tables_reading import ByName, Domain
from langchain_dpicl.store.datafile import read_records

_COLORS = {0.3: "#a23b53", 1: "#b8692a", 3: "#1f4e79"}
Records = Sequence[Mapping[str, str]]


def fewer(records: Records, near: Sequence[str], most: int) -> tuple[list[str], set[tuple[str, str]]]:
    """Documents of which ``most`` say one value of a fact, and the names and kinds of facts that so many do."""
    domains = {"near": near, "kind": KINDS}
    counts = Counter[tuple[str, str]]()
    kept = []
    for record in records:
        name = field_of(record, "name")
        told = [
            (name, kind) for kind, values in domains.items() if len(said(record["output"], list(values), name)) == 1
        ]
        if all(counts[each] < most for each in told):
            counts.update(told)
            kept.append(record["output"])
    return kept, {each for each, count in counts.items() if count == most}


def exact_sum(domain: Domain, texts: Sequence[str]) -> NDArray[np.int64]:
    """The sum over texts, each of an owner of its own, as `release_table` with ``read="named"`` has it before noise."""
    said = ByName(domain, None).said(texts, lambda places: np.zeros((len(places), 1), np.float32))
    pairs = [sorted(set(each)) for each in said]
    owners = np.repeat(np.arange(len(texts)), [len(each) for each in pairs])
    cells = np.array([topic * domain.shape[1] + value for each in pairs for topic, value in each], np.int64)
    total = owner_sum(owners, cells, np.ones(len(cells), np.int64), domain.shape[0] * domain.shape[1])
    return total.reshape(domain.shape)


def sigma_of(epsilon: float, delta: float) -> float:
    """The noise of one table."""
    return solved(epsilon, delta, "sum", 1.0, 1, (("step", 1.0 / LATTICE),))


def scored(facts: Sequence[Fact], domain: Domain, total: NDArray[np.int64], sigma: float, tables: int) -> Any:
    """In %, over tables and facts: right first, known, known and wrong; the first two with errors over facts."""
    found = np.zeros((len(facts), tables, 3))
    receipt: Any = {"id": "simulated"}
    for number in range(tables):
        noise = Quick().discrete_gaussian(sigma * LATTICE, total.size).reshape(total.shape)
        table = PrivateTable((total + noise) / LATTICE, domain.topics, domain.columns, sigma, receipt)
        for row, fact in enumerate(facts):
            answer = table.top(fact.name, fact.kind)
            is_right = answer.value == fact.right
            found[row, number] = (is_right, answer.is_known, answer.is_known and not is_right)
    means = found.mean(axis=1)
    errors = means.std(axis=0, ddof=1) / len(facts) ** 0.5
    names = ("right", "known", "wrong and known")
    return {name: 100 * float(mean) for name, mean in zip(names, means.mean(axis=0), strict=True)} | {
        f"{name} error": 100 * float(error) for name, error in zip(names[:2], errors[:2], strict=True)
    }


def rows_of(records: Records, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The scores by the number of owners and epsilon."""
    chosen = settings["by_owners"]
    private = records[: settings["owners"]]
    near = sorted({field_of(record, "near") for record in records} - {""})
    names = sorted({field_of(record, "name") for record in records})
    domain = Domain(tuple(names), {"near": tuple(near), "kind": KINDS})
    agreed = facts_of(private, near, settings["least"])
    rows = []
    for most in chosen["owners"]:
        texts, full = fewer(private, near, most)
        facts = [fact for fact in agreed if (fact.name, fact.kind) in full]
        total = exact_sum(domain, texts)
        for epsilon in chosen["epsilons"]:
            sigma = sigma_of(epsilon, settings["delta"])
            row = {"owners": most, "facts": len(facts), "documents": len(texts), "epsilon": epsilon, "sigma": sigma}
            rows.append(row | scored(facts, domain, total, sigma, chosen["tables"]))
    return rows


def report(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], command: str, folder: Path) -> str:
    """Write the files; return the table."""
    lines = [
        "| owners a fact | facts | documents | epsilon | right first | known | known and wrong | noise |",
        "|" + " --- |" * 8,
    ]
    lines += [
        f"| {row['owners']} | {row['facts']} | {row['documents']:,} | {row['epsilon']:g} | "
        f"{row['right']:.1f} ± {row['right error']:.1f} | {row['known']:.1f} ± {row['known error']:.1f} | "
        f"{row['wrong and known']:.2f} | sigma {row['sigma']:.3g} |"
        for row in rows
    ]
    measured = (
        f"Owners a fact: so many documents say one value of it. Delta {settings['delta']:g}; "
        f"{settings['by_owners']['tables']} tables each. In %, ± the standard error over facts."
    )
    results = {"measured": measured, "table": "\n".join(lines), "rows": list(rows), "command": command}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "owners.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "owners.md").write_text(f"{measured}\n\n{results['table']}\n", encoding="utf-8")
    draw(rows, folder / "owners.png")
    return "\n".join(lines)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw both shares by owners, a line for each epsilon."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3.8), layout="constrained")
    owners = sorted({row["owners"] for row in rows})
    titles = {"right": "right value first, %", "known": "known, %"}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for epsilon in sorted({row["epsilon"] for row in rows}):
            points = [row for row in rows if row["epsilon"] == epsilon]
            axes.errorbar(
                [row["owners"] for row in points],
                [row[name] for row in points],
                [row[f"{name} error"] for row in points],
                fmt="o-",
                color=_COLORS.get(epsilon),
                capsize=3,
                label=f"epsilon {epsilon:g}",
            )
        axes.set(xlabel="owners who say one value of a fact", title=title, ylim=(-4, 106))
        axes.set_xticks(owners)
        axes.grid(alpha=0.3)
    panels[0].legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=130)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the documents, draw, and report."""
    parser = argparse.ArgumentParser(prog="python examples/studies/rag_owners.py", description=__doc__)
    parser.add_argument("--data", required=True, help="records of E2E: input, output")
    parser.add_argument("--settings", required=True, type=Path, help="a JSON file")
    parser.add_argument("--output", required=True, type=Path, help="a folder for the report")
    options = parser.parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    try:
        settings = json.loads(options.settings.read_text("utf-8"))
        rows = rows_of(read_records(options.data), settings)
        command = shlex.join(command_of("rag_owners.py", given))
        print(report(rows, settings, command, options.output))
    except DPICLError as error:
        print(f"rag_owners: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
