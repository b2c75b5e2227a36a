"""How right a head is, by epsilon, by public texts and by number of owners.

    python examples/studies/head_study.py --task trec=train.jsonl:test.jsonl --task sst2=train.jsonl:test.jsonl \\
        --other trec=sst2 --other sst2=trec --output results/head

Each task is a file of private records and one of test questions; each record is its own owner. Five hundred records,
drawn by a fixed seed, give up their labels and serve as public texts of the same source; the others are private.
`--other A=B` takes the public texts of task B for task A. Every setting is a default.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from tqdm import tqdm

from langchain_dpicl import ExemplarStore, PrivacyBudget, PrivacyWarning, PrivateHead
from langchain_dpicl.local import local_embeddings
from langchain_dpicl.plots import COLORS, Chart, Curve, figure_of, save_figure
from langchain_dpicl.store.records import read_records

EPSILONS = (0.3, 1.0, 3.0, 8.0)
DELTA = 1e-5
PUBLIC, FITS = 500, 5
SIZES = (250, 500, 1000, 2000)


class Known(Embeddings):
    """Vectors that were made before, by text."""

    model = "all-MiniLM-L6-v2"

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._vectors = folder, {}  # type: ignore[var-annotated]

    def embed(self, name: str, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The vectors of a file's texts, kept in a folder if there is one."""
        path = None if self._folder is None else self._folder / f"{name}.npy"
        if path is not None and path.exists():
            found = np.load(path)
        else:
            parts = range(0, len(texts), 256)
            rows = [local_embeddings().embed_documents(list(texts[i : i + 256])) for i in tqdm(parts, desc=name)]
            found = np.concatenate([np.asarray(part, np.float32) for part in rows])
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                np.save(path, found)
        self._vectors.update(zip(texts, found, strict=True))
        return np.asarray(found, np.float32)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self._vectors[text].tolist() for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return [float(number) for number in self._vectors[text]]


def accuracy(
    known: Known,
    private: tuple[list[str], list[str], Any],
    tests: tuple[list[str], list[str], Any],
    labels: list[str],
    epsilon: float,
    public: list[str] | None,
) -> list[float]:
    """The share of right answers of each of `FITS` heads, with noise of their own."""
    texts, outputs, vectors = private
    shares = []
    for _ in range(FITS):
        store = ExemplarStore.from_texts(texts, known, outputs=outputs, vectors=vectors, progress=False)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)
            budget = PrivacyBudget(epsilon, DELTA, {"head": 1}, ledger=f"sqlite:///{folder}/b.db", replay=False)
            head = PrivateHead.fit(store, labels, budget, public=public, progress=False)
            budget.close()
        answers = head.answers(tests[2])
        shares.append(sum(a["label"] == right for a, right in zip(answers, tests[1], strict=True)) / len(answers))
    return shares


def row_of(shares: list[float], questions: int, **about: Any) -> dict[str, Any]:
    """A mean with its standard error: of the test questions, and of the noise among the fits."""
    mean = float(np.mean(shares))
    noise = float(np.std(shares, ddof=1)) / math.sqrt(len(shares))
    error = math.sqrt(mean * (1 - mean) / questions + noise**2)
    return {**about, "accuracy": mean, "standard_error": error, "least": min(shares), "most": max(shares)}


def study(options: argparse.Namespace) -> dict[str, Any]:
    """Every row of the tables."""
    known = Known(options.vectors)
    tasks = {name: files.split(":") for name, files in (each.split("=", 1) for each in options.task)}
    others = dict(each.split("=", 1) for each in options.other)
    data: dict[str, Any] = {}
    for name, (train, test) in tasks.items():
        loaded = []
        for part, path in (("train", train), ("test", test)):
            rows = read_records(path)
            texts = [str(row.get("text", row.get("input"))) for row in rows]
            if rows[0].get("title"):
                texts = [f"{row['title']}. {text}" for row, text in zip(rows, texts, strict=True)]
            loaded.append((texts, [str(row["label"]) for row in rows], known.embed(f"{name}-{part}", texts)))
        chosen = np.random.default_rng(0).permutation(len(loaded[0][0]))
        aside, kept = chosen[: min(PUBLIC, len(chosen) // 10)], np.sort(chosen[min(PUBLIC, len(chosen) // 10) :])
        (texts, outputs, vectors), tests = loaded
        data[name] = {
            "public": [texts[i] for i in aside],
            "private": ([texts[i] for i in kept], [outputs[i] for i in kept], vectors[kept]),
            "tests": tests,
            "labels": sorted(set(outputs)),
        }
    rows, sizes = [], []
    for name, task in data.items():
        publics: dict[str, Any] = {"none": None, "same source": task["public"]}
        if name in others:
            publics["another source"] = data[others[name]]["public"]
        asked = len(task["tests"][0])
        common = max(task["tests"][1].count(label) for label in task["labels"]) / asked
        for (kind, public), epsilon in tqdm([*itertools.product(publics.items(), EPSILONS)], desc=name):
            found = accuracy(known, task["private"], task["tests"], task["labels"], epsilon, public)
            owners = len(task["private"][0])
            about = {"task": name, "public": kind, "epsilon": epsilon, "owners": owners, "most_common": common}
            rows.append(row_of(found, asked, **about))
        for size in [size for size in SIZES if size < len(task["private"][0])]:
            some: Any = tuple(column[:: len(task["private"][0]) // size][:size] for column in task["private"])
            for epsilon in (1.0, 3.0):
                found = accuracy(known, some, task["tests"], task["labels"], epsilon, task["public"])
                sizes.append(row_of(found, asked, task=name, public="same source", epsilon=epsilon, owners=size))
    return {"delta": DELTA, "fits": FITS, "by_epsilon": rows, "by_owners": sizes}


def table(found: dict[str, Any]) -> str:
    """Both tables as Markdown."""
    lines = [
        f"Accuracy in % (standard error): the mean of {found['fits']} fits at delta {found['delta']:g}.",
        "",
        "| task | owners | public texts | " + " | ".join(f"epsilon {e:g}" for e in EPSILONS) + " | most common label |",
        "|" + "---|" * (len(EPSILONS) + 4),
    ]
    for (task, public), group in itertools.groupby(found["by_epsilon"], key=lambda row: (row["task"], row["public"])):
        rows = list(group)
        cells = " | ".join(f"{100 * row['accuracy']:.1f} ({100 * row['standard_error']:.1f})" for row in rows)
        lines.append(f"| {task} | {rows[0]['owners']:,} | {public} | {cells} | {100 * rows[0]['most_common']:.1f} |")
    lines += ["", "By number of owners, with public texts of the same source:", ""]
    lines += ["| task | epsilon | " + " | ".join(f"{size:,}" for size in SIZES) + " |", "|" + "---|" * (len(SIZES) + 2)]
    ordered = sorted(found["by_owners"], key=lambda row: (row["task"], row["epsilon"], row["owners"]))
    for (task, epsilon), group in itertools.groupby(ordered, key=lambda row: (row["task"], row["epsilon"])):
        by_size = {row["owners"]: f"{100 * row['accuracy']:.1f} ({100 * row['standard_error']:.1f})" for row in group}
        lines.append(f"| {task} | {epsilon:g} | " + " | ".join(by_size.get(size, "") for size in SIZES) + " |")
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Any], folder: Path) -> None:
    """Accuracy by the number of owners: when a head pays."""
    curves: list[Curve] = []
    whole = [row for row in found["by_epsilon"] if row["public"] == "same source" and row["epsilon"] == 1.0]
    for task in dict.fromkeys(row["task"] for row in found["by_epsilon"]):
        rows = [row for row in [*found["by_owners"], *whole] if row["task"] == task and row["epsilon"] == 1.0]
        rows.sort(key=lambda row: row["owners"])
        points = [(float(row["owners"]), 100 * row["accuracy"]) for row in rows]
        spreads = [100 * row["standard_error"] for row in rows]
        curves.append(Curve(points, task, COLORS[len(curves)], spreads=spreads))
    chart = Chart("A head by the number of owners", "owners", "accuracy in % at epsilon 1", curves, is_log=True)
    save_figure(figure_of([chart], folder / "owners.png"), folder / "owners.png")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", action="append", required=True, metavar="NAME=TRAIN:TEST")
    parser.add_argument(
        "--other", action="append", default=[], metavar="NAME=NAME", help="public texts of another task"
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--vectors", type=Path, help="a folder to keep embeddings in, which are private")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    options = parser.parse_args(argv)
    started = time.monotonic()
    found = {**study(options), "seconds": 0}
    found["seconds"] = round(time.monotonic() - started)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.output / "table.md").write_text(table(found))
    draw(found, options.output)
    print(json.dumps(found) if options.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
