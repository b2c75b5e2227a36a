"""Answers that were released once: a table's passages before a model, and a FAQ. The facts of the study of RAG.

``python examples/studies/rag_faq.py --data TRAIN --settings FILE --kept FOLDER --output FOLDER``

Documents, facts, questions and the rule are those of ``rag_study.py``, and so are the model, its prompt and what is
kept. **A table and a model:** the passage that the retriever of ``rag_table.py`` finds is the prompt's only document.
**A FAQ:** `wrap_rag`'s vote answers one public topic for each name and kind of fact, in the words of the development.
Each owner pays with tickets. The calls of one sample are read once, and noise is drawn often; a question is answered by
the nearest passage, a topic with its answer, or by that of the nearest topic, and no model is asked. It writes
``faq.json`` and ``faq.md``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from batched_logits import BatchedLogits
from gated_study import command_of
from numpy.typing import NDArray
from rag_questions import DEVELOP, Fact
from rag_study import AHEAD, Quick, Study, ask, solved
from rag_table import TableStudy
from tqdm import tqdm

from langchain_dpicl import CandidateVote
from langchain_dpicl.aggregators import Aggregator
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.model import attempt
from langchain_dpicl.errors import DPICLError
from langchain_dpicl.local import local_embeddings
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.selection import PoissonExampleSelector
from langchain_dpicl.store.datafile import read_records

TABLE = "table, then the model"
FAQ = "FAQ of wrap_rag's votes, nearest passage"
BY_TOPIC = "FAQ of wrap_rag's votes, nearest topic"
NO_NOISE = 1e3
Scores = dict[tuple[Fact, str], list[float]]


def topics_of(names: Sequence[str]) -> list[str]:
    """The public topics of the FAQ."""
    return [each.format(name) for name in names for kind in DEVELOP for each in DEVELOP[kind]]


class Faq:
    """The calls for each topic, and the passages that their votes make."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.settings: Mapping[str, Any] = study.settings["faq"]
        self.topics = topics_of(study.names)
        self.rate = min(1.0, self.settings["rows"] / self.settings["eligible"])
        crowd = Crowd.of(1, self.rate, self.settings["eligible"], self.settings["rows"])
        vote: Aggregator[str] = CandidateVote(study.embeddings, study.candidates).prepare({}, {})
        self.vote = vote.under(vote.mechanism, crowd)

    def noise(self, epsilon: float) -> float:
        """The parameter of a plan of so many tickets for each owner."""
        options = {**self.vote.options, "own_calls": 1.0}
        count, delta = self.settings["tickets"], self.study.settings["delta"]
        return solved(epsilon, delta, self.vote.mechanism, self.rate, count, tuple(options.items()))

    def samples(self) -> list[list[int]]:
        """The documents that have a call for each topic: drawn once, and kept.

        An owner whose document passes the gate burns a ticket, sampled or not. Without one it is left out.
        """
        key = ("faq", self.settings["rows"], self.settings["eligible"], self.settings["tickets"])
        if key not in self.study.file:
            self.study.file.add(key, self._drawn())
        found: list[list[int]] = self.study.file[key]
        return found

    def _drawn(self) -> list[list[int]]:
        study = self.study
        selector = PoissonExampleSelector(
            study.store,
            calls=self.settings["rows"],
            pad_to=1,
            threshold=study.gates["calls"],
            eligible=self.settings["eligible"],
            nearest_to="question",
        )
        place = {text: i for i, text in enumerate(study.documents)}
        left = defaultdict[int, int](lambda: self.settings["tickets"])
        found = []
        for topic in self.topics:
            query = selector.embed_query({"question": topic})
            among = np.array([owner for owner in selector.eligible(query).tolist() if left[owner] > 0], np.int64)
            for owner in among.tolist():
                left[owner] -= 1
            buckets = selector.sample(rate=self.rate, query=query, among=among)
            found.append([place[bucket[0][study.store.input_key]] for bucket in buckets])
        return found

    def answers(self) -> list[list[str]]:
        """The model's answers in the calls for each topic. It writes many at once."""
        asked = [
            [f"Document: {self.study.documents[i]}\n\n{ask(topic)}" for i in sample]
            for topic, sample in zip(self.topics, self.samples(), strict=True)
        ]
        for first in tqdm(range(0, len(asked), AHEAD), desc="topics", unit="batch", disable=None, file=sys.stderr):
            self.study.written([prompt for sample in asked[first : first + AHEAD] for prompt in sample])
        return [self.study.written(sample) for sample in asked]

    def scores(self, answers: Sequence[Sequence[str]], noise: float, by_topic: bool = False) -> tuple[Scores, float]:
        """For each question its scores over all draws, and the share of answers that are of the question's topic.

        ``by_topic``: passages are found by their topics alone.
        """
        encoded = cache(partial(attempt, self.vote.encode))
        outputs = [[encoded(answer) for answer in sample] for sample in answers]
        vector = cache(self.study.embeddings.embed_query)
        asked = np.array([vector(question) for _, question in self.study.questions])
        found: Scores = defaultdict(list)
        own = 0
        for _ in range(self.settings["draws"]):
            released = [self.vote.aggregate(sample, noise, Quick()) for sample in outputs]
            passages = [
                (topic, f"{topic}\n{answer}")
                for topic, answer in zip(self.topics, released, strict=True)
                if answer is not None
            ]
            sought = [pair[0] if by_topic else pair[1] for pair in passages]
            nearest = self._nearest(asked, np.array([vector(text) for text in sought]))
            for (fact, question), place in zip(self.study.questions, nearest, strict=True):
                topic, passage = passages[place]
                found[fact, question].append(fact.score(passage))
                own += topic in [each.format(fact.name) for each in DEVELOP[fact.kind]]
        return found, own / len(self.study.questions) / self.settings["draws"]

    def _nearest(self, asked: NDArray[np.float64], passages: NDArray[np.float64]) -> list[int]:
        nearest: list[int] = (asked @ passages.T).argmax(axis=1).tolist()
        return nearest


def read_tables(study: Study, tables: TableStudy, epsilon: float) -> tuple[Scores, float]:
    """For each question the scores of the model's answers from the passages of some tables, and the noise."""
    found: Scores = defaultdict(list)
    sigma = 0.0
    for number in range(study.settings["faq"]["tables"]):
        key = ("table", str(epsilon), number)
        if key not in study.file:
            table = tables.table(epsilon)
            retriever = table.as_retriever()
            study.file.add(key, [table.sigma, [retriever.invoke(each)[0].page_content for _, each in tables.questions]])
        sigma, passages = study.file[key]
        prompts = [
            f"Document: {passage}\n\n{ask(question)}"
            for passage, (_, question) in zip(passages, tables.questions, strict=True)
        ]
        for (fact, question), answer in zip(tables.questions, study.written(prompts), strict=True):
            found[fact, question].append(fact.score(answer))
    return found, sigma


def scored(scores: Scores) -> dict[str, float]:
    """The share of right answers in %, its standard error over facts, and the share by kind."""
    by_fact = defaultdict[Fact, list[float]](list)
    by_kind = defaultdict[str, list[float]](list)
    for (fact, _), each in scores.items():
        by_fact[fact].append(float(np.mean(each)))
        by_kind[fact.kind].append(float(np.mean(each)))
    means = [float(np.mean(each)) for each in by_fact.values()]
    found = {"right": 100 * float(np.mean([x for each in by_kind.values() for x in each]))}
    found["error"] = 100 * float(np.std(means, ddof=1)) / len(means) ** 0.5
    return found | {kind: 100 * float(np.mean(each)) for kind, each in by_kind.items()}


def rows_of(study: Study, tables: TableStudy) -> list[dict[str, Any]]:
    """All methods at every epsilon."""
    settings = study.settings["faq"]
    faq = Faq(study)
    answers = faq.answers()
    rows: list[dict[str, Any]] = []
    for epsilon in settings["epsilons"]:
        scores, sigma = read_tables(study, tables, epsilon)
        rows.append({"method": TABLE, "epsilon": epsilon, **scored(scores), "noise": f"sigma {sigma:.3g}"})
    noises = {epsilon: (faq.noise(epsilon), True) for epsilon in settings["epsilons"]} | {"no noise": (NO_NOISE, False)}
    for name in (FAQ, BY_TOPIC):
        for epsilon, (noise, is_shown) in noises.items():
            scores, own = faq.scores(answers, noise, name == BY_TOPIC)
            shown = f"eps0 {noise:.3g}" if is_shown else ""
            rows.append({"method": name, "epsilon": epsilon, **scored(scores), "found": 100 * own, "noise": shown})
    return rows


def report(study: Study, rows: Sequence[Mapping[str, Any]], command: str, folder: Path) -> dict[str, Any]:
    """Write the files; return what ``faq.json`` has."""
    settings = study.settings["faq"]
    lines = ["| method | epsilon | right | kind | near | topic found | noise |", "|" + " --- |" * 7]
    for row in rows:
        found = f"{row['found']:.1f}" if "found" in row else ""
        lines.append(
            f"| {row['method']} | {row['epsilon']} | {row['right']:.1f} ± {row['error']:.1f} | {row['kind']:.1f} | "
            f"{row['near']:.1f} | {found} | {row['noise']} |"
        )
    topics = len(topics_of(study.names))
    measured = (
        f"{len(study.questions)} questions, {study.settings['owners']:,} owners, delta {study.settings['delta']:g}; "
        f"a FAQ of {topics} topics with {settings['tickets']} tickets for each owner, {settings['draws']} draws; "
        f"tables drawn: {settings['tables']}. In %, ± the standard error over facts."
    )
    results = {"measured": measured, "table": "\n".join(lines), "methods": list(rows), "command": command}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "faq.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "faq.md").write_text(f"{measured}\n\n{results['table']}\n", encoding="utf-8")
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Read what is missing, draw, and report."""
    parser = argparse.ArgumentParser(prog="python examples/studies/rag_faq.py", description=__doc__)
    parser.add_argument("--data", required=True, help="records of E2E: input, output")
    parser.add_argument("--settings", required=True, type=Path, help="a JSON file")
    parser.add_argument(
        "--kept", required=True, type=Path, help="a folder for answers and vectors, NOT to be published"
    )
    parser.add_argument("--output", required=True, type=Path, help="a folder for the report")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="an embedded model or a GGUF file")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    try:
        settings, records = json.loads(options.settings.read_text("utf-8")), read_records(options.data)
        model = TransformersLogits(options.model, threads=options.threads)
        study = Study(records, settings, options.kept, local_embeddings(), partial(BatchedLogits, model))
        rows = rows_of(study, TableStudy(records, settings))
        results = report(study, rows, shlex.join(command_of("rag_faq.py", given)), options.output)
    except DPICLError as error:
        print(f"rag_faq: {error}", file=sys.stderr)
        return 1
    print(results["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
