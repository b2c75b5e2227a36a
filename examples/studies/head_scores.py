"""How right a head is with a language model's label scores beside the embedding, and without.

    python examples/studies/head_scores.py --task sst2=train.jsonl:test.jsonl --vectors vectors --cache scores \\
        --output results/head

Private records, public texts and questions are those of `head_study.py`. The model, its prompt and the share of the
scores were chosen on training records alone. Every text is scored once, which takes hours on few cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from head_study import DELTA, EPSILONS, FITS, Data, Known, loaded, task_options
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import RunnableConfig
from tqdm import tqdm

from langchain_dpicl import LabelScores
from langchain_dpicl.lab.evaluation.heads import fit_head
from langchain_dpicl.lab.evaluation.scores import share_error
from langchain_dpicl.local import local_llm

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
    """Label scores that were asked for before, by text, and are kept in a file."""

    def __init__(self, llm: BaseLanguageModel[Any], task: str, path: Path) -> None:
        super().__init__(llm, *ASKED[task])
        self._path = path
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        self._known: dict[str, list[float]] = dict(map(json.loads, lines))

    def ask(self, texts: Sequence[str]) -> None:
        """Score the texts that are not in the file. Each goes there at once, so that a study may be stopped."""
        with self._path.open("a", encoding="utf-8") as file:
            for text in tqdm([text for text in dict.fromkeys(texts) if text not in self._known], desc="scoring"):
                self._known[text] = super().row(text)
                print(json.dumps([text, self._known[text]]), file=file, flush=True)

    def row(self, text: str, config: RunnableConfig | None = None) -> list[float]:
        """From the file."""
        return self._known[text]


def share_of(data: Data, epsilon: float, scores: LabelScores | None, known: Known) -> float:
    """The share of right answers of one head, made by the product's own release."""
    private, tests = data.private, data.tests
    held = private.texts, private.labels, private.vectors
    head, _ = fit_head(held, known, data.labels, epsilon, DELTA, data.public.texts, scores=scores)
    answers = head.batch(tests.texts)
    return float(np.mean([answer["label"] == right for answer, right in zip(answers, tests.labels, strict=True)]))


def study(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every row of the table. A standard error is that of the test questions and of the fits together."""
    known, rows = Known(options.vectors), []
    for name, data in loaded(options, known).items():
        scores = Kept(local_llm(MODEL), name, options.cache / f"{name}.jsonl")
        scores.ask([*data.public.texts, *data.tests.texts, *data.private.texts])
        for epsilon in tqdm(EPSILONS, desc=name):
            for used in (None, scores):
                shares = [share_of(data, epsilon, used, known) for _ in range(FITS)]
                mean, error = float(np.mean(shares)), share_error(shares, len(data.tests))
                about = {"task": name, "scores": used is not None, "epsilon": epsilon, "owners": len(data.private)}
                rows.append({**about, "accuracy": mean, "standard_error": error, "shares": shares})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        f"Accuracy in % (standard error): the mean of {FITS} fits at delta {DELTA:g}, with public texts of the same "
        f"source. Label scores are those of {MODEL}.",
        "",
        "| task | owners | features | " + " | ".join(f"epsilon {epsilon:g}" for epsilon in EPSILONS) + " |",
        "|" + "---|" * (len(EPSILONS) + 3),
    ]
    for name, owners in dict.fromkeys((row["task"], row["owners"]) for row in rows):
        for used, features in ((False, "embedding"), (True, "embedding and label scores")):
            found = [row for row in rows if (row["task"], row["scores"]) == (name, used)]
            cells = [f"{100 * row['accuracy']:.1f} ({100 * row['standard_error']:.1f})" for row in found]
            lines.append(f"| {name} | {owners:,} | {features} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Score every text once, fit every head, and write scores.json and scores.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    task_options(parser)
    parser.add_argument("--cache", type=Path, required=True, help="a folder to keep label scores in, which are private")
    options = parser.parse_args(argv)
    for folder in (options.output, options.cache):
        folder.mkdir(parents=True, exist_ok=True)
    rows = study(options)
    (options.output / "scores.json").write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    (options.output / "scores.md").write_text(table(rows), "utf-8")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
