"""Every vote that the package has, on the same members' votes: gated calls of a model, one owner in each.

``python examples/studies/gated_study.py --task trec --data TRAIN --test TEST --public FILE --output FOLDER``

For data that are public in truth: what single examples make the model say is kept in FOLDER, so that a study that was
stopped goes on where it was, and another mechanism costs no call. Settings are chosen on owners' own questions
(``--on train``, each without its own example), and then used for the test questions. It writes ``results.json``,
``table.md`` and pictures.
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
from gated_report import Question, Study, Workload, write
from gated_votes import BatchedReader, Ints, Reader, Table, Vectors

from langchain_dpicl.errors import DPICLError, InvalidParameter
from langchain_dpicl.lab.evaluation.passes import PassFile, key_of
from langchain_dpicl.lab.evaluation.rows import Row, load_rows
from langchain_dpicl.lab.evaluation.tasks import SEPARATOR, ClassificationTask, Shape, task
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
    """Read what is missing, draw every vote, and report."""
    parser = argparse.ArgumentParser(prog="python examples/studies/gated_study.py", description=__doc__)
    parser.add_argument("--task", required=True, help=f"a classification task; also {', '.join(TASKS)}")
    parser.add_argument("--data", required=True, help="owners' examples; the last ones play public texts")
    parser.add_argument("--test", required=True, help="queries")
    parser.add_argument("--public", required=True, help="labelled public examples, one for each label")
    parser.add_argument("--output", required=True, type=Path, help="a folder")
    parser.add_argument("--votes", type=Path, help="the folder of the model's answers (default: the output)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="an embedded model or a GGUF file")
    parser.add_argument("--dtype", default="bfloat16", help="of the model's arithmetic (default bfloat16)")
    parser.add_argument("--query", help=r"how a prompt asks, with {input} (default: the task's)")
    parser.add_argument("--words", type=int, help="cut every text to so many words")
    parser.add_argument("--on", choices=("train", "test"), default="test", help="whose questions: the owners' or new")
    parser.add_argument("--queries", type=int, default=100)
    words = "how many of the last owners are none: their texts alone are public (default 400)"
    parser.add_argument("--public-texts", type=int, default=400, help=words)
    parser.add_argument("--neutral", type=int, default=16, help="public texts to calibrate on (default 16)")
    parser.add_argument("--opening", type=int, default=0, help="the gate compares also the first so many words")
    words = "SHARE:COUNT, for each gate how many owners behind it are read (default .04:32 .1:24)"
    parser.add_argument("--reads", nargs="+", default=[".04:32", ".1:24"], help=words)
    words = "draw the examples that are read from so many owners, themselves drawn once (default: from all)"
    parser.add_argument("--pool", type=int, help=words)
    parser.add_argument("--shown", action="store_true", help="calls show the public examples before the owner's")
    parser.add_argument("--threads", type=int)
    plans = parser.add_argument_group("the plans")
    plans.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0])
    plans.add_argument("--delta", type=float, help="default: a tenth of 1 / number of owners")
    plans.add_argument("--calls", type=int, default=20, help="owners expected in calls (default 20)")
    words = "QUERIES:SHARE:TICKETS; the first is the main one"
    plans.add_argument("--workload", nargs="+", default=["1000:0.04:80"], help=words)
    plans.add_argument("--first", type=int, help="report on the first so many questions by themselves, too")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    options = parser.parse_args(argv)
    try:
        results = _run(options, command_of("gated_study.py", sys.argv[1:] if argv is None else argv))
    except DPICLError as error:
        print(f"gated_study: {error}", file=sys.stderr)
        return 1
    print(json.dumps(results, indent=2) if options.json else f"{results['finding']}\n\n{results['table']}")
    return 0


def command_of(script: str, argv: Sequence[str]) -> list[str]:
    """The command; of a file's path its folder and name, which say enough."""
    shown = ["/".join(Path(word).parts[-2:]) if Path(word).is_absolute() else word for word in argv]
    return ["python", f"examples/studies/{script}", *shown]


def reads_of(texts: Sequence[str]) -> dict[float, int]:
    """From SHARE:COUNT. Raises `InvalidParameter` for anything else."""
    found = {}
    for text in texts:
        share, _, count = text.partition(":")
        try:
            found[float(share)] = int(count)
        except ValueError:
            raise InvalidParameter("reads", text, "SHARE:COUNT") from None
        if not (0 < float(share) <= 1 and int(count) > 0):
            raise InvalidParameter("reads", text, "SHARE:COUNT, a share of at most 1 and a count, both above 0")
    return found


def _run(options: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    chosen = TASKS.get(options.task) or task(options.task)
    if not isinstance(chosen, ClassificationTask):
        raise InvalidParameter("task", options.task, "a task whose answer is a label")
    shape = chosen.shape if options.query is None else Shape("", options.query.replace(r"\n", "\n"))
    data = _known(load_rows, chosen, options.data, options.words, "train")
    public = [(row.input, row.output) for row in _known(load_rows, chosen, options.public, options.words, "train")]
    if not 20 <= options.public_texts < len(data):
        bound = f"between 20, for a share of them, and {len(data) - 1}"
        raise InvalidParameter("public_texts", options.public_texts, bound)
    rows, others = data[: -options.public_texts], [row.input for row in data[-options.public_texts :]]
    if {label for _, label in public} != set(chosen.labels):
        bound = f"examples of every label: {', '.join(chosen.labels)}"
        raise InvalidParameter("public", Path(options.public).name, bound)
    own = options.on == "train"
    asked = rows if own else _known(load_rows, chosen, options.test, options.words, "test")
    if not 2 <= options.queries <= len(asked):
        raise InvalidParameter("queries", options.queries, f"between 2 and {len(asked)}")
    places = range(0, len(asked), len(asked) // options.queries if own else 1)[: options.queries]
    queries = [asked[i] for i in places]
    reads, loads = reads_of(options.reads), [Workload.of(text) for text in options.workload]
    for load in loads:
        if load.share not in reads:
            raise InvalidParameter("reads", options.reads, f"with the share of every workload, {load.share:g} too")
    names = ("task", "model", "dtype", "query", "words", "opening", "neutral", "pool", "shown")
    settings = {name: getattr(options, name) for name in names} | {
        "reads": options.reads,
        "owners": len(rows),
    }
    settings |= {"public_texts": key_of(json.dumps(others)), "public_examples": key_of(json.dumps(public))}
    randomness = SecureRandomness()
    owners = [row.input for row in rows]
    file = PassFile((options.votes or options.output) / "votes.jsonl", settings)
    try:
        table = Table(
            file,
            rows,
            public,
            lambda: _readers(options, chosen, shape, public),
            lambda: (_unit(options.opening, owners), _unit(options.opening, others)),
            randomness,
            reads,
            options.pool,
        )
        leanings = table.leanings(others[: options.neutral])
        vectors = cache(lambda: _unit(options.opening, [row.input for row in queries]))
        readings = []
        for number, (place, row) in enumerate(zip(places, queries, strict=True)):
            readings.append(table.reading(row.input, lambda i=number: vectors()[i], place if own else None))  # type: ignore[misc]
            print(f"\r{number + 1} of {len(queries)} queries read", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    finally:
        file.close()
    place_of = {label: i for i, label in enumerate(chosen.labels)}
    label_of: Ints = np.array([place_of[row.output] for row in rows], np.int64)
    delta = options.delta or 0.1 / len(rows)
    study = Study(chosen.labels, label_of, options.calls, delta, randomness)

    def questions(load: Workload) -> list[Question]:
        found = []
        for reading, row in zip(readings, queries, strict=True):
            answer = reading.empty / leanings.public
            drawn, votes = reading.votes(load.share, leanings.single)
            right = place_of[row.output]
            found.append(Question(reading.eligible(load.share), drawn, votes, answer / answer.sum(), right))
        return found

    groups = [study.scores(questions(load), load, options.epsilon) for load in loads]
    if options.first:
        some, among = questions(loads[0])[: options.first], f"; the first {options.first}"
        groups.append(study.scores(some, loads[0], options.epsilon, among))
    read = [(r.near[r.read], (r.scores / leanings.single).argmax(axis=1)) for r in readings]
    settings |= {
        "on": options.on,
        "calls": options.calls,
        "delta": delta,
        "workloads": options.workload,
        "public_prompt_uncalibrated": 100
        * float(np.mean([r.empty.argmax() == place_of[q.output] for r, q in zip(readings, queries, strict=True)])),
        "says_its_own_label": 100 * float(np.mean([(said == label_of[owner]).mean() for owner, said in read])),
        "chosen": [study.chosen(load, options.epsilon) for load in loads],
        "command": command,
    }
    return write(options.output, chosen.name, groups, settings)


def _known(load: Any, chosen: ClassificationTask, source: str, words: int | None, split: str) -> list[Row]:
    """Rows, cut to so many words; of MTS-Dialog those of the sections that the task knows."""
    from langchain_dpicl.store.datafile import read_records

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

    model = TransformersLogits(options.model, threads=options.threads, dtype=options.dtype)
    shown = Shape(shape.prefix(public).removesuffix(SEPARATOR), shape.query)
    public_one = BatchedReader(model, chosen.labels, shown)
    return public_one if options.shown else BatchedReader(model, chosen.labels, shape), public_one


def _unit(opening: int, texts: Sequence[str]) -> Vectors:
    """Unit vectors of texts; with ``opening``, half of each is that of its first words."""
    from langchain_dpicl.local import local_embeddings

    whole = _embedded(local_embeddings(), texts)
    if not opening:
        return whole
    first = _embedded(local_embeddings(), [" ".join(text.split()[:opening]) for text in texts])
    both: Vectors = np.concatenate([whole, first], axis=1) * np.float32(0.5**0.5)
    return both


def _embedded(embeddings: Any, texts: Sequence[str]) -> Vectors:
    """Each text once."""
    known = list(dict.fromkeys(texts))
    vectors = dict(zip(known, np.array(embeddings.embed_documents(known), np.float32), strict=True))
    return np.array([vectors[text] for text in texts])


if __name__ == "__main__":
    sys.exit(main())
