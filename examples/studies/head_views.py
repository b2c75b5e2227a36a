"""Heads that look at further views of a text, beside heads on the embedding of the whole text.

    python examples/studies/head_views.py --task trec=train.jsonl:test.jsonl --output results/head-views

Tasks, public texts and fits are as in `head_study.py`. The store gets the joined vectors, which are those that a fit
with ``views`` computes record by record, but for roundings: so each text is embedded once for all fits.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from head_study import DELTA, FITS, SAME, SIZES, Data, Known, Rows, Study, loaded, task_options
from tqdm import tqdm

from langchain_dpicl import View
from langchain_dpicl.once.views import JoinedViews, views_named
from langchain_dpicl.store.records import as_matrix

EPSILONS = (0.3, 1.0, 3.0)
VIEWS = "whole,opening:2"


def joined(name: str, data: Data, views: Sequence[View], known: Known) -> Data:
    """A task whose vectors are those of the views together."""

    def of_view(part: str, rows: Rows, view: View) -> Any:
        return known.embed(f"{name}-{part}-{view.name}", [view.said_of(text) for text in rows.texts])

    def of(part: str, rows: Rows) -> Rows:
        parts: list[Any] = [rows.vectors if view.is_whole else of_view(part, rows, view) for view in views]
        parts = [as_matrix(vectors, len(rows)) for vectors in parts]
        vectors = JoinedViews(tuple(views), tuple(each.shape[1] for each in parts)).joined(parts, None)
        return Rows(rows.texts, rows.labels, vectors.astype(np.float32))

    return Data(of("private", data.private), of("test", data.tests), of("public", data.public), data.labels)


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each task, views and number of owners."""
    lines = [
        f"| task | views | owners | {' | '.join(f'epsilon {epsilon:g}' for epsilon in EPSILONS)} | no noise |",
        "|" + "---|" * (4 + len(EPSILONS)),
    ]
    for first in range(0, len(rows), len(EPSILONS) + 1):
        some = rows[first : first + len(EPSILONS) + 1]
        cells = " | ".join(f"{100 * row['accuracy']:.1f} ({100 * row['standard_error']:.1f})" for row in some)
        lines.append(f"| {some[0]['task']} | {some[0]['views']} | {some[0]['owners']:,} | {cells} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Fit every head, and write results.json and table.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    task_options(parser)
    parser.add_argument("--views", default=VIEWS, help=f"names of views (default {VIEWS})")
    parser.add_argument("--owners", type=int, nargs="*", default=SIZES, help="numbers of owners beside all")
    options = parser.parse_args(argv)
    known = Known(options.vectors)
    tasks = loaded(options, known)
    data = {(name, "whole"): each for name, each in tasks.items()}
    data |= {
        (name, options.views): joined(name, each, views_named(options.views), known) for name, each in tasks.items()
    }
    options.output.mkdir(parents=True, exist_ok=True)
    study = Study(
        {f"{name}, {views}": each for (name, views), each in data.items()}, {}, known, options.output / "fits.jsonl"
    )
    asked = [
        (name, views, epsilon, owners)
        for name, each in tasks.items()
        for owners in (*(size for size in options.owners if size <= 0.9 * len(each.private)), len(each.private))
        for views in ("whole", options.views)
        for epsilon in (*EPSILONS, None)
    ]
    rows = []
    for name, views, epsilon, owners in tqdm(asked, desc="heads"):
        fits = 1 if epsilon is None and owners == len(tasks[name].private) else FITS
        row = study.row(f"{name}, {views}", SAME, epsilon, owners, fits)
        rows.append({**row, "task": name, "views": views})
    words = ", ".join(f"{name} {len(each.tests):,} ({len(each.public)})" for name, each in tasks.items())
    measured = (
        f"Heads on joined views by MiniLM: the accuracy of {FITS} fits at delta {DELTA:g} in %, its standard error in "
        "brackets. Every setting is a default, each record is its own owner. Test questions (public texts of the same "
        f"source): {words}."
    )
    line = shlex.join(["python", "examples/studies/head_views.py", *(sys.argv[1:] if argv is None else argv)])
    found: dict[str, Any] = {"measured": measured, "table": table(rows), "pictures": []}
    found |= {"settings": {"delta": DELTA, "fits": FITS, "views": options.views, "command": line}, "rows": rows}
    (options.output / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.output / "table.md").write_text(f"{measured}\n\n{found['table']}\n")
    print(found["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
