"""The commands that measure: ``evaluate`` the answers, ``audit`` the mechanisms."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from langchain_dpicl.cli import (
    add_columns,
    add_ensemble,
    add_model,
    add_prices,
    add_reading,
    add_run,
    check_apart,
    chosen,
    column,
    given,
    model_of,
    show,
)
from langchain_dpicl.errors import InvalidParameter


def evaluate_options(parser: Any) -> None:
    """Accuracy or ROUGE of private answers against epsilon, beside answers that are not private. The model is asked
    once; every epsilon, ablation and picture is computed from its answers. For labels it also lets the near owners'
    own labels vote, without a model, fits a classifier once (a head) at each epsilon, and says when to prefer it.

    examples:
      dpicl evaluate --task trec --data trec/train.jsonl --test trec/test.jsonl --members 20 --shots 1 --output trec
      dpicl evaluate --labels billing,technical --data tickets.csv --test solved.csv --method head \\
        --test-columns text=body,label=desk --output results/tickets
      dpicl evaluate --task sst2 --data hub --vary members=5,10,20 --vary releases=100,1000,10000 --output results/sst2

    The folder keeps the model's answers and embeddings: run the same command again to resume; other epsilons cost no
    call. Neither is protected there: use public data, or keep the folder as private as the data.
    """
    from langchain_dpicl.local import DEFAULT_MODEL

    add_run(
        parser,
        evaluate,
        columns="column",
        epsilons="epsilon",
        folder="output",
        methods="method",
        neutral="calibrate_on",
        source="data",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--task", help="sst2, amazon, agnews, trec, samsum, e2e, wikilarge, docqa, ...")
    what.add_argument("--labels", help="or your own labels, separated by commas; each record is its own owner")
    data = parser.add_argument_group("data")
    data.add_argument("--data", required=True, help="examples: a file or folder, hub (the task's own), or hf:NAME")
    data.add_argument("--test", help="queries with their answers (default: the test split of --data)")
    data.add_argument("--public", help="public examples, for public prompts, a head's features, ...")
    data.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="KEY=NAME",
        help="a column of another name",
    )
    data.add_argument("--input-key", type=column, metavar="NAME", help="the column of the texts, as in other commands")
    data.add_argument("--output-key", metavar="NAME", help="the column of the labels or answers")
    add_columns(data, "test", "public")
    add_reading(parser)
    data.add_argument("--queries", type=int, default=100, help="how many test rows (default 100)")
    plan = parser.add_argument_group("the plan")
    plan.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    plan.add_argument("--delta", type=float, help="default: a tenth of 1 / number of examples")
    plan.add_argument(
        "--releases",
        type=int,
        default=10_000,
        help="answers that epsilon is for (default 10000)",
    )
    add_ensemble(plan, members=20, shots=1)
    plan.add_argument(
        "--calls",
        type=int,
        help="one owner in each call, so many on average, instead of --members and --shots (label tasks)",
    )
    study = parser.add_argument_group("the study")
    study.add_argument(
        "--method",
        action="append",
        default=[],
        help="vote, label-vote, head, or another kind among labels, as KIND:name=value; embedding, candidate-vote, "
        "joint-em, ptr; online, offline (default: not these)",
    )
    study.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=N,N",
        help="members, releases, shots; fits (heads in one plan); candidates; of tokens: top_k, shots, and releases "
        "(how many answers a plan is for)",
    )
    study.add_argument(
        "--shown",
        type=int,
        default=0,
        help="text tasks: show each method's texts for the first N queries (public data)",
    )
    study.add_argument(
        "--samples",
        type=int,
        default=1,
        help="samples of owners for each query, or runs of private decoding (default 1)",
    )
    study.add_argument(
        "--draws",
        type=int,
        default=20,
        help="draws of noise for each sample (default 20)",
    )
    study.add_argument(
        "--heads",
        type=int,
        default=5,
        help="label tasks: heads fitted at each epsilon (default 5)",
    )
    study.add_argument(
        "--few-shots",
        type=int,
        default=4,
        help="examples of prompts that are not private (default 4)",
    )
    study.add_argument(
        "--calibrate-on",
        type=int,
        default=0,
        help="label tasks: take inputs of N further test rows",
    )
    study.add_argument(
        "--candidates",
        type=int,
        default=20,
        help="public sentences per query (default 20)",
    )
    study.add_argument("--instruction", help="first lines of every prompt (default: the task's)")
    study.add_argument("--query", help=r"a query in a prompt, such as 'Question: {input}\nType:' (default: the task's)")
    model = parser.add_argument_group("the model")
    add_model(model, DEFAULT_MODEL)
    add_prices(model)
    model.add_argument(
        "--in-batches",
        action="store_true",
        help="read the members' prompts in batches in this process, many times faster",
    )
    _add_reading(model)
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        help="a folder for the model's answers and the results",
    )
    parser.add_argument("--index", action="store_true", help="also write README.md over all results beside that folder")


def evaluate(options: argparse.Namespace) -> int:
    """Read the data, choose the model, measure, and write the results."""
    from langchain_dpicl.cli.data import reading_of, tell
    from langchain_dpicl.lab.evaluation.evaluate import Evaluation, Model, some
    from langchain_dpicl.lab.evaluation.passes import EvaluationPlan
    from langchain_dpicl.lab.evaluation.report import write_index, write_report
    from langchain_dpicl.lab.evaluation.rows import load_rows
    from langchain_dpicl.lab.evaluation.tasks import ClassificationTask, own, task
    from langchain_dpicl.local import DEFAULT_MODEL, local_llm
    from langchain_dpicl.privacy.checks import whole
    from langchain_dpicl.privacy.choice import usual_most

    is_file = Path(options.data).is_file()
    check_apart(options, *(("public", "test") if is_file else ("public",)))
    about = own(options.labels.split(",")) if options.labels else task(options.task)
    wording = {name: text.replace("\\n", "\n") for name, text in given(options, "instruction", "query").items()}
    about = replace(about, shape=replace(about.shape, **wording))
    keys = ("text", "label") if isinstance(about, ClassificationTask) else ("input", "output")
    named = {key: getattr(options, name) for key, name in zip(keys, ("input_key", "output_key"), strict=True)}
    columns = {key: name for key, name in named.items() if name} | dict(_pairs("--column", options.column))
    how: dict[str, Any] = {"columns": columns, "reading": reading_of(options), "say": partial(tell, options)}
    rows = load_rows(about, options.data, **how)
    if options.test is None and is_file:
        raise InvalidParameter("--test", None, "a file with the queries and their answers")
    of_test, of_public = (how | {"columns": columns | each} for each in (options.test_columns, options.public_columns))
    queries = load_rows(about, options.test or options.data, split="test", **of_test)
    public = load_rows(about, options.public, **of_public) if options.public else []
    size = chosen(options, "members", "shots")
    if options.calls is not None:
        calls = whole("calls", options.calls)
        size = {"calls": calls, "members": usual_most(calls), "shots": 1}
    plan = EvaluationPlan(
        owners=len(rows),
        delta=0.1 / len(rows) if options.delta is None else options.delta,
        epsilons=tuple(sorted(set(options.epsilon))),
        **chosen(options, "releases", "few_shots"),
        **size,
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
    choice = model_of(options)
    name = choice.name or (DEFAULT_MODEL if choice.is_embedded else "default")
    load, embedded = choice.load, name if choice.is_embedded else None
    if choice.url is None and name.endswith(".gguf"):
        load, embedded = partial(local_llm, name), name
        name = Path(name).name
    evaluation = Evaluation(
        task=about,
        rows=rows,
        queries=asked[:asks],
        public=public,
        model=Model(name, load, embedded, options.threads, options.dtype),
        plan=plan,
        folder=options.output,
        methods=tuple(options.method),
        vary=vary,
        neutral=[row.input for row in asked[asks:]],
        **chosen(
            options,
            "samples",
            "draws",
            "heads",
            "candidates",
            "in_batches",
            "shown",
            "price_in",
            "price_out",
        ),
    )
    scores = evaluation.run()
    command = sys.argv[1:]
    paths = {str(path) for path in chosen(options, "data", "test", "public", "output").values() if path}
    paths |= {embedded} if embedded and embedded != name else set()
    for path in sorted(paths, key=len, reverse=True):  # the command shows files by their names alone
        command = [each.replace(path, "/".join(Path(path).parts[-2:])) for each in command]
    settings: dict[str, Any] = {}
    if evaluation.asks_model:
        settings = {"model": name, **chosen(options, "samples", "draws", "calibrate_on", "in_batches")}
    if evaluation.has_members:
        sizes = ("calls",) if plan.calls else ("members", "shots")
        settings |= chosen(plan, *sizes, "rate", "releases")
    settings |= {
        "data": Path(options.data).name,
        "queries": asks,
        **chosen(options, "heads"),
        **chosen(plan, "owners", "delta"),
        "command": shlex.join(["dpicl", *command]),
    }
    results = write_report(options.output, about, scores, settings, evaluation.costs(), asked[: options.shown])
    if options.index:
        write_index(options.output.absolute().parent)
    return show(options, results, (options.output / "table.md").read_text("utf-8"))


def _pairs(option: str, given: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for each in given:
        name, _, value = each.partition("=")
        if not name or not value:
            raise InvalidParameter(option, each, "of the form NAME=VALUE")
        found.append((name, value))
    return found


def audit_options(parser: Any) -> None:
    """Run a mechanism on neighbouring data sets with a worst-case canary, and report the epsilon that an adversary can
    prove. A bound above the claim means that the claim is false.

    examples:
      dpicl audit
      dpicl audit --mechanism vote --canary owner --epsilon 1 --trials 100000
      dpicl audit --mechanism all --rate 0.1 --releases 20 --plot audit.png
    """
    add_run(parser, audit, shots="owners_per_token", trial="trials")
    parser.add_argument(
        "--mechanism",
        default="vote",
        help="a kind or a mechanism, such as vote, joint-em, or embedding-own-calls (one owner per call); plan: six "
        "in one plan; head; all; membership. A name that does not exist lists them (default: vote)",
    )
    parser.add_argument(
        "--canary",
        default="outputs",
        help="outputs: worst-case member outputs; owner: an inserted owner, real store, selector and member chain "
        "(default: outputs)",
    )
    parser.add_argument(
        "--epsilon",
        type=float,
        nargs="+",
        default=[3.0],
        help="what plans claim (default: 3)",
    )
    parser.add_argument("--delta", type=float, default=1e-4, help="at which delta (default: 1e-4)")
    parser.add_argument(
        "--rate",
        type=float,
        default=1.0,
        help="an owner's chance to take part (default: 1)",
    )
    parser.add_argument(
        "--releases",
        type=int,
        default=1,
        help="of each line, all seen by the adversary (default: 1)",
    )
    parser.add_argument("--members", type=int, help="default: as many as make the attack strongest")
    parser.add_argument("--trials", type=int, help="of each data set (default: 30000; head: 10000; membership: 20)")
    parser.add_argument("--confidence", type=float, default=0.95, help="of each bound (default: 0.95)")
    parser.add_argument("--model", help="an embedded model: membership's, or with --canary owner a vote's members")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the bounds beside the claims")
    attack = parser.add_argument_group("membership: on a real model that shows its logits, with public data")
    attack.add_argument("--data", help="public records with the texts 'input' and 'output'")
    attack.add_argument(
        "--against",
        type=int,
        default=50,
        help="non-members for each member (default 50)",
    )
    attack.add_argument(
        "--owners",
        type=int,
        default=1000,
        help="owners of the data set under attack (default 1000)",
    )
    attack.add_argument(
        "--owners-per-token",
        type=float,
        default=4.0,
        help="expected, so the rate is this / owners",
    )
    attack.add_argument(
        "--template",
        nargs=2,
        metavar=("DEMONSTRATION", "QUERY"),
        default=[r"Data: {input}\nDescription: {output}\n\n", r"Data: {input}\nDescription:"],
    )
    attack.add_argument(
        "--task",
        help="trec, agnews, ...: the attack of Flemings et al. 2025 on labels, with records as dpicl evaluate reads "
        "them (--trials: default all, in each set)",
    )
    attack.add_argument("--sets", type=int, default=5, help="with --task: sets of fresh records (default 5)")
    _add_reading(attack)


def _add_reading(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--threads", type=int, help="for reading in this process")
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of numbers when reading in this process (default float32)",
    )


def audit(options: argparse.Namespace) -> int:
    """Attack, print and draw. Returns 1 if a bound lies above its claim."""
    from langchain_dpicl.lab.audit import attack

    known = (*attack.ATTACKED, "all", "membership")
    if options.mechanism not in known:
        raise InvalidParameter("mechanism", options.mechanism, f"one of {', '.join(known)}")
    if options.plot and not Path(options.plot).absolute().parent.is_dir():
        raise InvalidParameter("plot", options.plot, "a file in a folder that exists")
    if options.mechanism == "membership":
        return _membership(options)
    settings = chosen(options, "canary", "delta", "rate", "releases", "members", "trials", "confidence")
    if options.model:
        from langchain_dpicl import local
        from langchain_dpicl.lab.audit.cases import LABELS
        from langchain_dpicl.members.chains import ModelChoice, label_member

        if options.mechanism != "vote" or options.canary != "owner":
            raise InvalidParameter("model", options.model, "given with --mechanism vote --canary owner, and only there")
        if options.model not in local.KNOWN_MODELS:
            raise InvalidParameter("model", options.model, f"one of {', '.join(local.KNOWN_MODELS)}")
        settings["member"] = label_member(ModelChoice(options.model), list(LABELS), "input")
    names: Sequence[str] = (options.mechanism,)
    if options.mechanism == "all":  # a head has no other rate than 1
        names = [name for name in attack.ATTACKED if name not in attack.ONCE or options.rate == 1.0]
    results = [attack.audit(name, epsilon=epsilon, **settings) for name in names for epsilon in options.epsilon]
    if options.plot:
        attack.draw(results, options.plot)
    broken = [result.mechanism for result in results if result.lower_bound > result.epsilon]
    text = f"{attack.headline(results)}\n\n{attack.table(results)}"
    if broken:
        text += f"\n\nABOVE THE CLAIM: {', '.join(broken)}"
    show(options, {"audits": [asdict(result) for result in results], "above the claim": broken}, text)
    return int(bool(broken))


def _membership(options: argparse.Namespace) -> int:
    """Can an attacker tell whose demonstration a model was shown?"""
    from langchain_dpicl.decoding import DemonstrationTemplate, TransformersLogits
    from langchain_dpicl.lab.audit.label_membership import run_label_membership
    from langchain_dpicl.lab.audit.membership import draw, run_membership
    from langchain_dpicl.lab.evaluation.rows import load_rows
    from langchain_dpicl.lab.evaluation.tasks import task
    from langchain_dpicl.store.datafile import read_records

    if not options.data:
        raise InvalidParameter("--data", None, "a file of public records, for --mechanism membership")
    name = options.model or "smollm2-135m-instruct"
    model = TransformersLogits(name, threads=options.threads, dtype=options.dtype)
    game = {"epsilons": options.epsilon, "shots": options.owners_per_token}
    game |= chosen(options, "delta", "against", "owners")
    if options.task:
        about = task(options.task)
        sizes = chosen(options, "sets", "trials")
        results = run_label_membership(model, about, load_rows(about, options.data), **sizes, **game)
    else:
        layout = DemonstrationTemplate(*(text.replace("\\n", "\n") for text in options.template))
        trials = 20 if options.trials is None else options.trials
        results = run_membership(model, read_records(options.data), layout, trials=trials, **game)
    if options.plot:
        draw(results, options.plot)
    rows = ["| answers | attacker | AUC ± standard error | 95 % | proved |", "|---|---|---|---|---|"]
    for each in results:
        proved = "" if each.bound is None else f"{100 * each.bound:.1f}"
        interval = f"{100 * each.low:.1f} to {100 * each.high:.1f}"
        auc = f"{100 * each.auc:.1f} ± {100 * each.error:.1f}"
        rows.append(f"| {each.name} | {each.attack} | {auc} | {interval} | {proved} |")
    return show(options, {"membership": [asdict(result) for result in results]}, "\n".join(rows))
