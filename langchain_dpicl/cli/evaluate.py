"""Accuracy or ROUGE of private answers against epsilon, beside answers that are not private. The model is asked once;
every epsilon, ablation and picture is computed from its answers.

examples:
  dpicl evaluate --task trec --data trec/train.jsonl --test trec/test.jsonl --members 20 --shots 1 --output results/trec
  dpicl evaluate --task sst2 --data hub --vary members=5,10,20 --vary releases=100,1000,10000 --output results/sst2

The folder keeps the model's answers: run the same command again to resume; other epsilons cost no call. The answers of
members are not protected there: use public data, or keep the folder as private as the data.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli.options import add_ensemble, add_model, add_prices, chosen, show
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.local import DEFAULT_MODEL
from langchain_dpicl.privacy.checks import whole

if TYPE_CHECKING:
    from langchain_dpicl.evaluation.evaluate import Evaluation


def add_options(parser: Any) -> None:
    """Declare the options."""
    parser.add_argument("--task", required=True, help="sst2, amazon, agnews, trec, samsum, e2e, wikilarge, docqa, ...")
    data = parser.add_argument_group("data")
    data.add_argument("--data", required=True, help="examples: a file or folder, hub (the task's own), or hf:NAME")
    data.add_argument("--test", help="queries with their answers (default: the test split of --data)")
    data.add_argument("--public", help="public examples, for public few-shot prompts and offline demonstrations")
    data.add_argument("--column", action="append", default=[], metavar="KEY=NAME", help="a column of another name")
    data.add_argument("--queries", type=int, default=100, help="how many test rows (default 100)")
    plan = parser.add_argument_group("the plan")
    plan.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    plan.add_argument("--delta", type=float, help="default: a tenth of 1 / number of examples")
    plan.add_argument("--releases", type=int, default=10_000, help="answers that epsilon is for (default 10000)")
    add_ensemble(plan, members=20, shots=1)
    study = parser.add_argument_group("the study")
    study.add_argument("--method", action="append", default=[], help="vote; embedding, joint-em, ptr, online, offline")
    study.add_argument("--vary", action="append", default=[], metavar="NAME=N,N", help="members, releases, shots, ...")
    study.add_argument("--samples", type=int, default=1, help="samples of owners for each query (default 1)")
    study.add_argument("--draws", type=int, default=20, help="draws of noise for each sample (default 20)")
    study.add_argument("--few-shots", type=int, default=4, help="examples of prompts that are not private (default 4)")
    study.add_argument("--calibrate-on", type=int, default=0, help="label tasks: take inputs of N further test rows")
    study.add_argument("--candidates", type=int, default=20, help="public sentences per query (default 20)")
    study.add_argument("--instruction", help="first lines of every prompt (default: the task's)")
    study.add_argument("--query", help=r"a query in a prompt, such as 'Question: {input}\nType:' (default: the task's)")
    model = parser.add_argument_group("the model")
    add_model(model, DEFAULT_MODEL)
    add_prices(model)
    batches = "read label prompts in batches in this process, many times faster"
    model.add_argument("--in-batches", action="store_true", help=batches)
    model.add_argument("--threads", type=int, help="for reading in batches")
    parser.add_argument("--output", required=True, type=Path, help="a folder for the model's answers and the results")
    parser.add_argument("--index", action="store_true", help="also write README.md over all results beside that folder")


def run(options: argparse.Namespace) -> int:
    """Measure, and write the results."""
    from langchain_dpicl.evaluation.report import write_index, write_report

    evaluation = _evaluation(options)
    scores = evaluation.run()
    plan, command = evaluation.plan, sys.argv[1:]
    paths = {str(path) for path in chosen(options, "data", "test", "public", "output").values() if path}
    for path in sorted(paths, key=len, reverse=True):  # the command shows files by their names alone
        command = [each.replace(path, "/".join(Path(path).parts[-2:])) for each in command]
    settings = {
        "model": evaluation.model.name,
        "data": Path(options.data).name,
        "queries": len(evaluation.queries),
        **chosen(options, "samples", "draws"),
        **{name: getattr(plan, name) for name in ("owners", "members", "shots", "rate", "releases", "delta")},
        **chosen(options, "calibrate_on", "in_batches"),
        "command": shlex.join(["dpicl", *command]),
    }
    results = write_report(options.output, evaluation.task, scores, settings, evaluation.costs())
    if options.index:
        write_index(options.output.absolute().parent)
    return show(options, results, (options.output / "table.md").read_text("utf-8"))


def _evaluation(options: argparse.Namespace) -> Evaluation:
    """Read the data and choose the model."""
    from langchain_dpicl.evaluation.evaluate import Evaluation, Model, some
    from langchain_dpicl.evaluation.passes import EvaluationPlan, load_rows
    from langchain_dpicl.evaluation.tasks import task
    from langchain_dpicl.members.chains import ModelChoice

    about = task(options.task)
    wording = {k: v.replace("\\n", "\n") for k, v in chosen(options, "instruction", "query").items() if v is not None}
    about = replace(about, shape=replace(about.shape, **wording))
    columns = dict(_pairs("--column", options.column))
    rows = load_rows(about, options.data, columns=columns)
    if options.test is None and Path(options.data).is_file():
        raise InvalidParameter("--test", None, "a file with the queries and their answers")
    queries = load_rows(about, options.test or options.data, split="test", columns=columns)
    public = load_rows(about, options.public, columns=columns) if options.public else []
    plan = EvaluationPlan(
        owners=len(rows),
        delta=0.1 / len(rows) if options.delta is None else options.delta,
        epsilons=tuple(sorted(set(options.epsilon))),
        **chosen(options, "members", "shots", "releases", "few_shots"),
    )
    whole("queries", options.queries)
    whole("calibrate_on", options.calibrate_on, at_least=0)
    asked = some(queries, options.queries + options.calibrate_on)
    asks = len(asked) - whole("calibrate_on", options.calibrate_on, at_least=0, at_most=len(asked) - 1)
    vary = {}
    for name, values in _pairs("--vary", options.vary):
        try:
            vary[name] = tuple(sorted({int(value) for value in values.split(",")}))
        except ValueError:
            raise InvalidParameter("--vary", f"{name}={values}", "whole numbers, separated by commas") from None
    choice = ModelChoice(options.model, options.model_url)
    name = choice.name or (DEFAULT_MODEL if choice.is_embedded else "default")
    return Evaluation(
        task=about,
        rows=rows,
        queries=asked[:asks],
        public=public,
        model=Model(name, choice.load, name if choice.is_embedded else None, options.threads),
        plan=plan,
        folder=options.output,
        methods=tuple(options.method),
        vary=vary,
        neutral=[row.input for row in asked[asks:]],
        **chosen(options, "samples", "draws", "candidates", "in_batches", "price_in", "price_out"),
    )


def _pairs(option: str, given: Sequence[str]) -> list[tuple[str, str]]:
    found = [each.partition("=") for each in given]
    for each, (name, _, value) in zip(given, found, strict=True):
        if not name or not value:
            raise InvalidParameter(option, each, "of the form NAME=VALUE")
    return [(name, value) for name, _, value in found]
