"""Gated selection with tickets beside blind selection, at equal privacy for every owner and equal calls of the model.

``python examples/studies/gated_study.py --task trec --data TRAIN --test TEST --public FILE --output FOLDER``

For data that are public in truth: what single examples make the model say is kept in FOLDER, so that a study that was
stopped goes on where it was. It writes ``results.json``, ``table.md`` and pictures: accuracy against epsilon for a
workload in which every test question is asked equally often, and a stream of queries by Zipf's law, over time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gated_report import Comparison, Plans, Workload, report
from gated_votes import BatchedReader, Reader, Table, Vectors

from langchain_dpicl.errors import DPICLError, InvalidParameter
from langchain_dpicl.evaluation.passes import PassFile, Row, key_of, load_rows
from langchain_dpicl.evaluation.tasks import SEPARATOR, ClassificationTask, Shape, task
from langchain_dpicl.privacy.noise import SecureRandomness

_SECTIONS = {
    "GENHX": "Illness",
    "FAM/SOCHX": "Family",
    "PASTMEDICALHX": "History",
    "CC": "Complaint",
    "PASTSURGICAL": "Surgery",
    "ALLERGY": "Allergies",
    "ROS": "Symptoms",
    "MEDICATIONS": "Medications",
    "ASSESSMENT": "Assessment",
    "EXAM": "Exam",
}
"""The ten commonest sections of MTS-Dialog's notes, as words for a model to say."""

TASKS = {
    "mts_section": ClassificationTask(
        "mts_section",
        tuple(_SECTIONS.values()),
        Shape("", "Dialogue: {input}\nSection:"),
        aliases=_SECTIONS,
        inputs=("{input}",),
    ),
}
"""Tasks of this study alone: the section of a note that a piece of dialogue belongs to."""


def main(argv: Sequence[str] | None = None) -> int:
    """Read what is missing, simulate both sides, and report."""
    parser = argparse.ArgumentParser(prog="python examples/studies/gated_study.py", description=__doc__)
    parser.add_argument("--task", required=True, help=f"a classification task; also {', '.join(TASKS)}")
    parser.add_argument("--data", required=True, help="examples that play the private ones, each its own owner")
    parser.add_argument("--test", required=True, help="queries first; the last ones play public texts")
    parser.add_argument("--public", required=True, help="labelled public examples, one for each label")
    parser.add_argument("--output", required=True, type=Path, help="a folder")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="an embedded model or a GGUF file")
    parser.add_argument("--query", help=r"how a prompt asks, with {input} (default: the task's)")
    parser.add_argument("--words", type=int, help="cut every text to so many words")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument(
        "--skip", type=int, default=0, help="of these, the first so many, on which settings were chosen"
    )
    words = "how many of the last test texts are public, without their labels (default 300)"
    parser.add_argument("--public-texts", type=int, default=300, help=words)
    parser.add_argument("--threads", type=int)
    reading = parser.add_argument_group("what the model reads")
    reading.add_argument("--pool", type=int, default=600, help="owners that stand for all (default 600)")
    reading.add_argument("--nearest", type=int, default=12, help="nearest owners read for each query (default 12)")
    reading.add_argument("--reach", type=int, default=1200, help="near owners kept for each query (default 1200)")
    reading.add_argument("--blind-read", type=int, default=24, help="random owners read for each query (default 24)")
    words = "report on the queries that were read, and read no more"
    reading.add_argument("--as-read", action="store_true", help=words)
    reading.add_argument("--neutral", type=int, default=8, help="public texts to calibrate on (default 8)")
    gate = parser.add_argument_group("the gate")
    gate.add_argument("--opening", type=int, default=0, help="compare also the first so many words (default 0: none)")
    gate.add_argument("--share", type=float, nargs="+", default=[0.04, 0.06, 0.08, 0.1], help="that gates may have")
    plans = parser.add_argument_group("the plans")
    plans.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    plans.add_argument("--delta", type=float, help="default: a tenth of 1 / number of owners")
    plans.add_argument("--members", type=int, default=20)
    words = "QUERIES:SHARE:FILL:TICKETS; the first is the main one (default 1000:0.06:2:2)"
    plans.add_argument("--workload", nargs="+", default=["1000:0.06:2:2"], help=words)
    plans.add_argument("--samples", type=int, default=4, help="runs of coins and buckets (default 4)")
    plans.add_argument("--draws", type=int, default=5, help="of noise for each of these (default 5)")
    stream = parser.add_argument_group("the stream")
    stream.add_argument("--stream", default="20000:0.1:1:1.5", help="like a workload (default 20000:0.1:1:1.5)")
    stream.add_argument("--stream-epsilon", type=float, default=3.0)
    stream.add_argument("--zipf", type=float, default=1.0, help="exponent of popularity (default 1)")
    stream.add_argument("--streams", type=int, default=5, help="how many, with their own order of popularity")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    options = parser.parse_args(argv)
    try:
        results = _run(options, _words(sys.argv[1:] if argv is None else argv))
    except DPICLError as error:
        print(f"gated_study: {error}", file=sys.stderr)
        return 1
    print(json.dumps(results, indent=2) if options.json else f"{results['finding']}\n\n{results['table']}")
    return 0


def _words(argv: Sequence[str]) -> list[str]:
    """The command; of a file's path its folder and name, which say enough."""
    shown = ["/".join(Path(word).parts[-2:]) if Path(word).is_absolute() else word for word in argv]
    return ["python", "examples/studies/gated_study.py", *shown]


def _run(options: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    chosen = TASKS.get(options.task) or task(options.task)
    if not isinstance(chosen, ClassificationTask):
        raise InvalidParameter("task", options.task, "a task whose answer is a label")
    shape = chosen.shape if options.query is None else Shape("", options.query.replace(r"\n", "\n"))
    rows = _known(load_rows, chosen, options.data, options.words, "train")
    test = _known(load_rows, chosen, options.test, options.words, "test")
    public = [(row.input, row.output) for row in _known(load_rows, chosen, options.public, options.words, "train")]
    queries, others = test[: options.queries], [row.input for row in test[-options.public_texts :]]
    if options.skip < 0:
        raise InvalidParameter("skip", options.skip, "a number >= 0")
    if options.public_texts < 20:
        raise InvalidParameter("public_texts", options.public_texts, "at least 20, for a share of them")
    if options.queries + options.public_texts > len(test):
        raise InvalidParameter("queries", options.queries, f"at most {len(test)} with the public texts")
    if not {label for _, label in public} == set(chosen.labels):
        raise InvalidParameter(
            "public", Path(options.public).name, f"examples of every label: {', '.join(chosen.labels)}"
        )
    shares = sorted(set(options.share))
    for text in (*options.workload, options.stream):
        if Workload.of(text).share not in shares:
            raise InvalidParameter("share", options.share, f"with the share of every workload, {text!r} too")
    randomness = SecureRandomness()
    names = ("task", "model", "query", "words", "pool", "nearest", "reach", "blind_read", "opening")
    settings = {name: getattr(options, name) for name in names} | {"owners": len(rows), "shares": shares}
    settings |= {"public_texts": key_of(json.dumps(others)), "public_examples": key_of(json.dumps(public))}
    file = PassFile(options.output / "votes.jsonl", settings)
    try:
        table = Table(
            file,
            rows,
            public,
            cache(lambda: _readers(options, chosen, shape, public)),
            cache(lambda: _vectors(options.opening, rows, queries, others)),
            randomness,
            pool=options.pool,
            nearest=options.nearest,
            reach=options.reach,
            blind=options.blind_read,
            shares=shares,
        )
        leanings = table.leanings(others[: options.neutral])
        readings = []
        asked = [(i, row) for i, row in enumerate(queries) if not options.as_read or row.input in table]
        asked = asked[options.skip :]
        if not asked:
            raise InvalidParameter("as_read", options.as_read, "a folder in which queries were read, beyond --skip")
        for number, row in asked:
            readings.append(table.reading(number, row.input))
            print(f"\r{number + 1} of {len(queries)} queries read", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    finally:
        file.close()
    place = {label: i for i, label in enumerate(chosen.labels)}
    label_of = np.array([place[row.output] for row in rows], np.int64)
    right = [place[row.output] for _, row in asked]
    plans = Plans(len(rows), options.members, options.delta or 0.1 / len(rows))

    def comparison(share: float) -> Comparison:
        questions = [
            reading.question(share, label_of, leanings, answer) for reading, answer in zip(readings, right, strict=True)
        ]
        return Comparison(questions, len(place), plans, randomness, options.samples, options.draws)

    empty = np.array([reading.empty for reading in readings])
    alone = [empty.argmax(axis=1) == right, (empty / leanings.public).argmax(axis=1) == right]
    settings |= {"queries": len(asked), "samples": options.samples, "draws": options.draws, "command": command}
    for name in ("data", "test", "public"):
        settings[name] = Path(getattr(options, name)).name
    return report(chosen, comparison, alone, options, settings)


def _known(load: Any, chosen: ClassificationTask, source: str, words: int | None, split: str) -> list[Row]:
    """Rows, cut to so many words; of MTS-Dialog those of the sections that the task knows."""
    from langchain_dpicl.store.records import read_records

    if chosen.name in TASKS:
        records = [record for record in read_records(source) if chosen.label_of(str(record.get("label"))) is not None]
        rows = [Row(str(r["input"]), str(chosen.label_of(r["label"])), ()) for r in records]
    else:
        rows = load(chosen, source, split=split)
    cut = [Row(" ".join(row.input.split()[:words]), row.output, (row.output,)) for row in rows]
    return cut if words is not None else rows


def _readers(
    options: argparse.Namespace, chosen: ClassificationTask, shape: Shape, public: list[tuple[str, str]]
) -> tuple[Reader, Reader]:
    from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits

    model = TransformersLogits(options.model, threads=options.threads)
    shown = Shape(shape.prefix(public).removesuffix(SEPARATOR), shape.query)
    return BatchedReader(model, chosen.labels, shape), BatchedReader(model, chosen.labels, shown)


def _vectors(opening: int, rows: list[Row], queries: list[Row], others: list[str]) -> tuple[Vectors, Vectors, Vectors]:
    """Unit vectors of owners, queries and public texts; with ``opening``, half of each is that of its first words."""
    from langchain_dpicl.local import local_embeddings

    def unit(texts: list[str]) -> Vectors:
        whole = _embedded(local_embeddings(), texts)
        if not opening:
            return whole
        first = _embedded(local_embeddings(), [" ".join(text.split()[:opening]) for text in texts])
        both: Vectors = np.concatenate([whole, first], axis=1) * np.float32(0.5**0.5)
        return both

    return unit([row.input for row in rows]), unit([row.input for row in queries]), unit(others)


def _embedded(embeddings: Any, texts: list[str]) -> Vectors:
    """Each text once."""
    known = list(dict.fromkeys(texts))
    vectors = dict(zip(known, np.array(embeddings.embed_documents(known), np.float32), strict=True))
    return np.array([vectors[text] for text in texts])


if __name__ == "__main__":
    sys.exit(main())
