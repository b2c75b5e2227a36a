"""What of the words, names and labels of a data set is released as terms, and what a head of such labels is worth.

    python examples/studies/terms_study.py --words AGNEWS_TRAIN --names E2E_TRAIN --labels TREC_TRAIN TREC_TEST \\
        --settings results/terms/settings.json --output results/terms

Each record is its own owner. Three parts:

- **words** of texts: of the words that so many owners use, the share that is released;
- **names**: the same for the restaurant's name that a record was written from, one whole term an owner;
- **labels** that nobody lists: the terms over the outputs (TREC's fine labels), and then a head of these labels, both
  by one plan, beside a head of the same plan for which somebody lists all labels.

Numbers alone are written: no term. ``--cache`` keeps vectors. ``--develop`` takes test questions from the training
file, to choose settings on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gated_study import command_of
from head_study import Data, Known, Rows, load
from langchain_core.embeddings import DeterministicFakeEmbedding
from numpy.typing import NDArray
from rag_questions import field_of
from tqdm import tqdm

from langchain_dpicl import ExemplarStore, LineRequest, PrivacyBudget, PrivateHead, PrivateTerms, Words, release_terms
from langchain_dpicl.errors import DPICLError, PrivacyWarning
from langchain_dpicl.once.steps import FeatureMap
from langchain_dpicl.once.terms_reading import WordsAndPhrases, term_of
from langchain_dpicl.store.datafile import read_records

MEASURED = (
    "The share of the words, and of the names, of so many owners that is released, in %, and heads of labels that "
    "nobody lists. ± the standard error over releases."
)
Settings = Mapping[str, Any]
Found = dict[str, Any]


def mean_and_error(values: Sequence[float]) -> list[float]:
    """The mean, and its standard error."""
    return [float(np.mean(values)), float(np.std(values, ddof=1)) / len(values) ** 0.5]


# -- recall ------------------------------------------------------------------------------------------------------------


def recall(released: Sequence[PrivateTerms], owners: Counter[str], edges: Sequence[int]) -> list[Found]:
    """For each range of numbers of owners its terms, and the share that is released."""
    found = []
    for low, high in zip(edges, [*edges[1:], None], strict=True):
        among = {term for term, count in owners.items() if low <= count and (high is None or count < high)}
        if among:
            shares = [len(among & set(terms)) / len(among) for terms in released]
            found.append({"from": low, "to": high, "terms": len(among), "recall": mean_and_error(shares)})
    return found


def texts_store(texts: Sequence[str]) -> ExemplarStore:
    """Each text its own owner, with vectors that nothing reads."""
    vectors = np.ones((len(texts), 2), np.float32)
    rows = [{"text": text} for text in texts]
    how: dict[str, Any] = {"input_key": "text", "output_key": None, "vectors": vectors, "progress": False}
    return ExemplarStore.from_records(rows, DeterministicFakeEmbedding(size=2), **how)


def recalls(texts: Sequence[str], read: Any, caps: Sequence[int], settings: Settings, name: str) -> list[Found]:
    """The recall of all settings' releases, each on a budget of its own."""
    store = texts_store(texts)
    words = WordsAndPhrases(Words(), 1)
    owners: Counter[str] = Counter()
    for text in texts:
        owners.update({term_of(text)} if read == "whole" else words.terms(text, {}))
    found = []
    for epsilon in settings["epsilons"]:
        for at_most in caps:
            released = []
            for _ in tqdm(range(settings["releases"]), desc=f"{name} {epsilon:g} {at_most}", disable=None):
                budget = PrivacyBudget(epsilon, settings["delta"], {"terms": 1}, ledger="sqlite://")
                released.append(release_terms(store, budget, at_most=at_most, read=read))
                budget.close()
            found.append(
                {
                    "epsilon": epsilon,
                    "at_most": at_most,
                    "sigma": released[0].sigma,
                    "threshold": released[0].threshold,
                    "released": mean_and_error([len(terms) for terms in released]),
                    "recall": recall(released, owners, settings["edges"]),
                }
            )
    return found


# -- labels ------------------------------------------------------------------------------------------------------------


def accuracy(head: PrivateHead, tests: Rows) -> float:
    """The share of questions that get their own label."""
    answers = head.answers(tests.vectors)
    return float(
        np.mean([term_of(a["label"]) == term_of(label) for a, label in zip(answers, tests.labels, strict=True)])
    )


def budget_of(epsilon: float, settings: Settings, owners: int, share: float) -> PrivacyBudget:
    """A budget for terms and a head, of which the terms have this share of the loss; for a head alone at 0."""
    head = {"steps": float(settings["steps"]), "even": 1.0}
    lines = {"head": LineRequest("head", 1.0, 1, options=head, owners=owners)}
    if share:
        options = {"delta0": settings["delta0"], "at_most": 1.0}
        weight = share / (1.0 - share)
        lines["terms"] = LineRequest("terms", 1.0, 1, weight=weight, options=options)
    return PrivacyBudget(epsilon, settings["delta"], lines, ledger="sqlite://")


def labels_part(data: Data, known: Known, settings: Settings) -> list[Found]:
    """Terms over the outputs and a head of them, and a head of listed labels, by epsilon."""
    rows = [{"text": text, "label": label} for text, label in zip(data.private.texts, data.private.labels, strict=True)]
    how: dict[str, Any] = {"input_key": "text", "output_key": "label", "vectors": data.private.vectors}
    store = ExemplarStore.from_records(rows, known, progress=False, **how)
    public = FeatureMap.of(data.public.vectors.astype(np.float64))
    often = Counter(map(term_of, data.tests.labels))
    fits = settings["head"]
    found = []
    for epsilon in fits["epsilons"]:
        for share in (0.0, *fits["shares"]):
            right, terms_found, covered = [], [], []
            for _ in tqdm(range(fits["fits"]), desc=f"labels {epsilon:g} {share:g}", disable=None):
                budget = budget_of(epsilon, {**settings, **fits}, len(store), share)
                labels: Sequence[str] = data.labels
                if share:
                    labels = release_terms(store, budget, source="output", read="whole", at_most=1, line="terms")
                line = "head" if share else None
                head = PrivateHead.fit(store, labels, budget, public=public, line=line)
                right.append(100 * accuracy(head, data.tests))
                terms_found.append(len(labels))
                covered.append(100 * sum(often[term_of(label)] for label in labels) / often.total())
                budget.close()
            found.append(
                {
                    "epsilon": epsilon,
                    "share": share,
                    "labels": mean_and_error(terms_found),
                    "covered": mean_and_error(covered),
                    "right": mean_and_error(right),
                }
            )
    return found


def held_out(data: Data) -> Data:
    """The same with a tenth of the private records as test questions, which are then not private."""
    order = np.random.default_rng(1).permutation(len(data.private))
    count = len(order) // 10
    kept: NDArray[np.int64] = np.sort(order[count:])
    return Data(data.private.at(kept), data.private.at(np.sort(order[:count])), data.public, data.labels)


# -- the report --------------------------------------------------------------------------------------------------------


def recall_table(rows: Sequence[Found], edges: Sequence[int]) -> str:
    """A row for each epsilon and cap, a column for each range of owners."""
    names = [f"{low} to {high - 1}" for low, high in zip(edges, edges[1:], strict=False)] + [f"{edges[-1]} and more"]
    lines = ["| epsilon | at most | sigma | threshold | released | " + " | ".join(names) + " |"]
    lines.append("|" + " --- |" * (5 + len(names)))
    for row in rows:
        cells = {each["from"]: "{:.0f} ± {:.1f}".format(*(100 * x for x in each["recall"])) for each in row["recall"]}
        shown = [cells.get(low, "") for low in edges]
        lines.append(
            f"| {row['epsilon']:g} | {row['at_most']} | {row['sigma']:.3g} | {row['threshold']:.3g} | "
            f"{row['released'][0]:.1f} | " + " | ".join(shown) + " |"
        )
    numbers = {each["from"]: each["terms"] for row in rows for each in row["recall"]}
    lines.append("| | | | | terms there are | " + " | ".join(str(numbers.get(low, 0)) for low in edges) + " |")
    return "\n".join(lines)


def labels_table(rows: Sequence[Found]) -> str:
    """A row for each epsilon and share."""
    lines = ["| epsilon | labels | number | of the questions' labels | right |", "|" + " --- |" * 5]
    for row in rows:
        what = f"terms, {row['share']:.0%} of the loss" if row["share"] else "listed"
        numbers = ["{:.1f} ± {:.1f}".format(*row[name]) for name in ("labels", "covered", "right")]
        lines.append(f"| {row['epsilon']:g} | {what} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Release, fit, and report."""
    parser = argparse.ArgumentParser(prog="python examples/studies/terms_study.py", description=__doc__)
    parser.add_argument("--words", help="records of AG News: title, text")
    parser.add_argument("--names", help="records of E2E: input, output")
    parser.add_argument("--labels", nargs=2, help="records of TREC, and test questions: text, fine_label")
    parser.add_argument("--settings", required=True, type=Path, help="a JSON file")
    parser.add_argument("--output", required=True, type=Path, help="a folder for the report")
    parser.add_argument("--cache", type=Path, help="a folder for vectors")
    parser.add_argument("--develop", action="store_true", help="test questions of the training file")
    options = parser.parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    warnings.simplefilter("ignore", PrivacyWarning)  # each release is measured by itself
    try:
        settings = json.loads(options.settings.read_text("utf-8"))
        command = shlex.join(command_of("terms_study.py", given))
        results: Found = {"measured": MEASURED, "settings": {**settings, "command": command}}
        tables = []
        if options.words:
            texts = [f"{row['title']}. {row['text']}" for row in read_records(options.words)]
            results["words"] = recalls(texts, "words", settings["words"]["at_most"], settings, "words")
            tables += [f"{len(texts):,} owners, words:", recall_table(results["words"], settings["edges"])]
        if options.names:
            names = [field_of(row, "name") for row in read_records(options.names)[: settings["names"]["owners"]]]
            results["names"] = recalls(names, "whole", [1], settings, "names")
            tables += [f"{len(names):,} owners, names:", recall_table(results["names"], settings["edges"])]
        if options.labels:
            known = Known(options.cache)
            data = load("trec", options.labels, [], known, "fine_label")
            data = held_out(data) if options.develop else data
            results["labels"] = labels_part(data, known, settings)
            about = f"{len(data.private):,} owners, {len(data.tests)} questions, {len(data.labels)} labels:"
            tables += [about, labels_table(results["labels"])]
    except DPICLError as error:
        print(f"terms_study: {error}", file=sys.stderr)
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.output / "table.md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
