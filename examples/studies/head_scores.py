"""How right a head is with a language model's label scores beside the embedding, and without.

    python examples/studies/head_scores.py --task sst2=train.jsonl:test.jsonl --vectors vectors --cache scores \\
        --output results/head

Private records, public texts and questions are those of `head_study.py`: each record of the first file is its own
owner; five hundred records, drawn by a fixed seed, give up their labels and serve as public texts. The model, its
prompt and the share of the scores were chosen on training records alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from head_study import DELTA, EPSILONS, FITS, PUBLIC, Known, row_of
from langchain_core.runnables import RunnableConfig
from tqdm import tqdm

from langchain_dpicl import ExemplarStore, LabelScores, PrivacyBudget, PrivacyWarning, PrivateHead
from langchain_dpicl.local import local_llm
from langchain_dpicl.store.records import read_records

MODEL = "smollm2-135m-instruct"
ASKED = {
    "sst2": (
        ["negative", "positive"],
        "Review: A moving and funny film.\nSentiment: positive\n\n"
        "Review: Dull and badly acted.\nSentiment: negative\n\n"
        "Review: {input}\nSentiment:",
    ),
}
"""By task: the words that are scored, and the prompt before them, with two invented examples."""


class Kept(LabelScores):
    """Label scores that were asked for before are read from a file."""

    def __init__(self, task: str, path: Path) -> None:
        super().__init__(local_llm(MODEL), *ASKED[task])
        self._path = path
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        self._known: dict[str, list[float]] = dict(map(json.loads, lines))

    def ask(self, texts: Sequence[str]) -> None:
        """Score the texts that are not in the file, and write each at once. The study's texts are nobody's secret."""
        with self._path.open("a", encoding="utf-8") as file:
            for text in tqdm([text for text in dict.fromkeys(texts) if text not in self._known], desc="scoring"):
                self._known[text] = super().row(text)
                print(json.dumps([text, self._known[text]]), file=file, flush=True)

    def row(self, text: str, config: RunnableConfig | None = None) -> list[float]:
        """From the file."""
        return self._known[text]


def study(options: argparse.Namespace) -> dict[str, Any]:
    """Every row of the table."""
    known, rows = Known(options.vectors), []
    for name, files in (each.split("=", 1) for each in options.task):
        parts = []
        for part, path in zip(("train", "test"), files.split(":"), strict=True):
            read = read_records(path)
            texts = [str(row["text"]) for row in read]
            parts.append((texts, [str(row["label"]) for row in read], known.embed(f"{name}-{part}", texts)))
        (texts, outputs, vectors), (questions, right, _) = parts
        order = np.random.default_rng(0).permutation(len(texts))
        aside, kept = order[:PUBLIC], np.sort(order[PUBLIC:])
        public, labels = [texts[i] for i in aside], sorted(set(outputs))
        scores = Kept(name, options.cache / f"{name}.jsonl")
        scores.ask([*public, *questions, *(texts[i] for i in kept)])
        private = [texts[i] for i in kept], [outputs[i] for i in kept], vectors[kept]
        for epsilon in EPSILONS:
            for used in (None, scores):
                shares = [
                    share_of(known, private, labels, epsilon, public, used, questions, right) for _ in range(FITS)
                ]
                about = {"task": name, "scores": used is not None, "epsilon": epsilon, "owners": len(kept)}
                rows.append(row_of(shares, len(questions), **about))
                print(json.dumps(rows[-1]), file=sys.stderr)
    return {"delta": DELTA, "fits": FITS, "public": PUBLIC, "model": MODEL, "rows": rows}


def share_of(
    known: Known,
    private: tuple[list[str], list[str], Any],
    labels: list[str],
    epsilon: float,
    public: list[str],
    scores: LabelScores | None,
    questions: list[str],
    right: list[str],
) -> float:
    """The share of right answers of one head."""
    texts, outputs, vectors = private
    store = ExemplarStore.from_texts(texts, known, outputs=outputs, vectors=vectors, progress=False)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        budget = PrivacyBudget(epsilon, DELTA, {"head": 1}, ledger=f"sqlite:///{folder}/b.db", replay=False)
        head = PrivateHead.fit(store, labels, budget, public=public, scores=scores, progress=False)
        budget.close()
    answers = head.batch(questions)
    return sum(answer["label"] == label for answer, label in zip(answers, right, strict=True)) / len(right)


def table(found: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = [
        f"Accuracy in % (standard error): the mean of {found['fits']} fits at delta {found['delta']:g}, with "
        f"{found['public']} public texts of the same source.",
        "",
        "| task | owners | features | " + " | ".join(f"epsilon {epsilon:g}" for epsilon in EPSILONS) + " |",
        "|" + "---|" * (len(EPSILONS) + 3),
    ]
    for name, owners in dict.fromkeys((row["task"], row["owners"]) for row in found["rows"]):
        for used, features in ((False, "embedding"), (True, f"embedding and label scores of {found['model']}")):
            rows = {row["epsilon"]: row for row in found["rows"] if row["task"] == name and row["scores"] == used}
            cells = [f"{100 * rows[e]['accuracy']:.1f} ({100 * rows[e]['standard_error']:.1f})" for e in EPSILONS]
            lines.append(f"| {name} | {owners:,} | {features} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", action="append", required=True, metavar="NAME=TRAIN:TEST")
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--vectors", type=Path, help="a folder to keep embeddings in, which are private")
    parser.add_argument("--cache", type=Path, required=True, help="a folder to keep label scores in, which are private")
    options = parser.parse_args(argv)
    for folder in (options.output, options.cache):
        folder.mkdir(parents=True, exist_ok=True)
    found = study(options)
    (options.output / "scores.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    (options.output / "scores.md").write_text(table(found), "utf-8")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
