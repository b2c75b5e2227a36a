"""The command ``advise``: which mechanism, and which numbers; and the configuration that it writes."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli import (
    READING,
    add_columns,
    add_prices,
    add_reading,
    add_run,
    carried,
    check_apart,
    column,
    given,
    holds_records,
    keys_in,
    show,
    written_out,
)
from langchain_dpicl.cli.data import read_file
from langchain_dpicl.errors import InvalidParameter, InvalidRecords
from langchain_dpicl.lab.advice import (
    BLIND,
    GATED,
    LABEL_VOTE,
    TOKENS,
    Verdict,
    Workload,
    compare,
    proposed,
    recommended,
)
from langchain_dpicl.lab.advice_words import words
from langchain_dpicl.lab.advise_once import advise_once
from langchain_dpicl.privacy.advice import DIRECTIONS, EMBEDDED, HEAD
from langchain_dpicl.privacy.checks import real, whole
from langchain_dpicl.privacy.choice import CALLS, ELIGIBLE
from langchain_dpicl.privacy.plan import CallCosts

if TYPE_CHECKING:
    from langchain_dpicl.lab.evaluation.forecast import Nearness

_MOST_PUBLIC = 400
_WRITTEN = (HEAD, LABEL_VOTE, GATED, BLIND)


def advise_options(parser: Any) -> None:
    """Say which mechanism suits your numbers, which epsilon and delta to choose, and what you may expect.

    It looks at public numbers alone. Of --data it reads the names of the columns and the number of owners, nothing
    else; whoever uses this number makes it public. Give --public first: some hundred texts like yours that anyone may
    see, of which a head learns what to look at. With their labels it also says how often answers are right. It
    recommends nothing above epsilon 3. The command that it prints has all options that you gave.

    examples:
      dpicl advise --owners 800 --labels 3 --questions 500
      dpicl advise --owners 4000 --topics 34 --values 19,3 --questions 1000
      dpicl advise --data tickets.csv --owner-key customer --labels billing,technical,account --questions 500 \\
        --public examples.csv --write server.yaml
    """
    add_run(parser, advise, tokens="max_tokens")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--owners", type=int, help="how many people the records are of: a number that may be public")
    who.add_argument("--data", help="or the file with the records, whose owners are counted")
    parser.add_argument(
        "--owner-key", type=column, help="the column that names the owner (default: each record is its own owner)"
    )
    parser.add_argument("--input-key", type=column, default="text", help="the column of the texts (default text)")
    parser.add_argument("--output-key", default="label", help="the column of the labels (default label)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--labels", help="how many labels, or their names, separated by commas")
    what.add_argument("--topics", type=int, help="or, for questions about documents: how many topics they are about")
    parser.add_argument(
        "--values", metavar="NUMBERS", help="with --topics: how many values an answer may have (of each column: 19,3)"
    )
    parser.add_argument(
        "--questions",
        type=int,
        required=True,
        help="how many answers are to be given in all",
    )
    parser.add_argument("--epsilon", type=float, help="default: the least usual one that is enough")
    parser.add_argument("--delta", type=float, help="default: a tenth of 1 / number of owners")
    parser.add_argument("--public", metavar="FILE", help="texts like yours that anyone may see, best with labels")
    add_columns(parser, "public")
    parser.add_argument(
        "--calls",
        type=int,
        default=CALLS,
        help=f"calls of an ensemble (default {CALLS})",
    )
    parser.add_argument(
        "--near",
        type=float,
        metavar="SHARE",
        help="the share of owners near to a question, an estimate "
        f"(default {ELIGIBLE:g}, or found with --public; of topics 1 / their number)",
    )
    parser.add_argument(
        "--fits",
        type=int,
        default=1,
        help="how often a head is to be fitted, say 12 in a year (1)",
    )
    parser.add_argument("--max-tokens", type=int, default=25, help="length of a text (default 25)")
    bill = parser.add_argument_group("the bill")
    bill.add_argument(
        "--prompt-tokens",
        type=float,
        default=300.0,
        help="tokens of one call's prompt (default 300)",
    )
    bill.add_argument(
        "--answer-tokens",
        type=float,
        default=5.0,
        help="tokens of one call's answer (default 5)",
    )
    add_prices(bill)
    add_reading(parser)
    parser.add_argument("--write", metavar="FILE", help="write the plan as a configuration of `dpicl serve` (YAML)")
    parser.add_argument("--method", choices=[each.replace(" ", "-") for each in _WRITTEN], help="instead of the best")


def advise(options: argparse.Namespace) -> int:
    """Compare, forecast, write and print."""
    if options.topics is not None:
        return advise_once(options, _counted(options)[1])
    if options.values is not None:
        raise InvalidParameter("--values", options.values, "given with --topics alone")
    names = [name.strip() for name in options.labels.split(",")]
    labels = len(names)
    if options.labels.strip().isdecimal():
        labels = int(options.labels)
        names = []
    columns, owners = _counted(options)
    if options.write is not None:
        _check_writable(options, names)
    share = ELIGIBLE if options.near is None else real("near", options.near, above=0.0, below=1.0)
    task = Workload(
        owners,
        labels,
        options.questions,
        0.1 / owners if options.delta is None else options.delta,
        calls=options.calls,
        gate=share,
        near=share,
        fits=options.fits,
        features=EMBEDDED if options.public is None else DIRECTIONS,
        tokens=options.max_tokens,
    )
    epsilon = proposed(task) if options.epsilon is None else options.epsilon
    right: dict[str, tuple[float, float]] = {}
    gates: dict[str, Nearness] = {}
    public = None
    if options.public is not None:
        public = _public(options, names, labels)
    if public is not None:
        gates = public.gates(task, epsilon)
        task = replace(task, gate=float(gates[GATED].eligible), near=float(gates[LABEL_VOTE].eligible))
    choices = compare(task, epsilon)
    if public is not None:
        forecasts = {each.method: public.right_answers(each, task, gates) for each in choices}
        right = {method: forecast for method, forecast in forecasts.items() if forecast is not None}
    best = recommended(choices, {method: share for method, (share, _) in right.items()})
    if options.method is not None:
        best = next(each for each in choices if each.method.replace(" ", "-") == options.method)
    prices = CallCosts(
        options.prompt_tokens,
        options.answer_tokens,
        options.price_in,
        options.price_out,
    )
    facts: dict[str, Any] = {
        "owners": owners,
        "labels": labels,
        "questions": task.questions,
        "epsilon": epsilon,
        "delta": task.delta,
        "recommended": None if best is None else best.method,
        "methods": [_facts(each, task, prices, right, gates) for each in choices],
    }
    if columns is not None:
        facts["columns"] = columns
    if best is not None:
        facts |= {
            "plan": json.loads(best.plan.to_json()),
            "digest": best.plan.digest,
            "command": _command(best, options, gates),
        }
    if options.write is not None and best is not None:
        _write(best, options, names, gates)
        facts["written"] = options.write
    return show(options, facts, words(options, task, choices, best, facts))


# -- what it reads -----------------------------------------------------------------------------------------------------


def _counted(options: argparse.Namespace) -> tuple[list[str] | None, int]:
    """The columns' names of ``--data`` (None without it), and the number of owners. Nothing else of it is used."""
    if options.data is None:
        if options.owner_key is not None:
            raise InvalidParameter("--owner-key", options.owner_key, "given with --data")
        return None, whole("owners", options.owners)
    from langchain_dpicl.store.records import RecordKeys

    key = options.owner_key
    rows = read_file(options, options.data, RecordKeys("", None, key))
    return list(rows[0]), len(rows if key is None else {str(row[key]) for row in rows})


def _public(options: argparse.Namespace, names: list[str], labels: int) -> Any:
    """The labelled public records, embedded: at most so many, evenly from the whole file. None of texts alone."""
    from langchain_dpicl.aggregators.reading import normal
    from langchain_dpicl.lab.evaluation.forecast import PublicRecords
    from langchain_dpicl.local import local_embeddings
    from langchain_dpicl.members.chains import read_lines
    from langchain_dpicl.store.records import RecordKeys, embed

    if options.data is not None:
        check_apart(options, "public")
    if not holds_records(options.public):
        read_lines("--public", options.public)
        return None
    keys = keys_in(options, "public", RecordKeys(options.input_key, options.output_key, None))
    rows = read_file(options, options.public, keys, names or None)
    rows = rows[:: -(-len(rows) // _MOST_PUBLIC)]
    texts: list[Any] = [row.get(keys.input_key) for row in rows]
    outputs = [row.get(str(keys.output_key)) for row in rows]
    named = list(names) or sorted({str(output).strip() for output in outputs})
    if len(named) != labels:
        raise InvalidParameter("--labels", labels, f"as many as --public has, {len(named)}, or their names")
    places = {normal(name): place for place, name in enumerate(named)}
    right = [places.get(normal(str(output)), -1) for output in outputs]
    for number, (text, place) in enumerate(zip(texts, right, strict=True), start=1):
        if not isinstance(text, str) or not text.strip() or place < 0:
            needed = f"a text under {keys.input_key!r} and one of the labels under {keys.output_key!r}"
            raise InvalidRecords(f"public record {number} needs {needed}")
    return PublicRecords(embed(local_embeddings(), texts, not options.json), right, labels)


# -- what it says ------------------------------------------------------------------------------------------------------


def _facts(
    choice: Verdict,
    task: Workload,
    prices: CallCosts,
    right: dict[str, tuple[float, float]],
    gates: dict[str, Nearness],
) -> dict[str, Any]:
    way = choice.way
    found: dict[str, Any] = {
        "method": choice.method,
        "feasible": choice.feasible,
        "worth_it": choice.worth,
        "noise_takes": 1.0 - choice.left,
        "flip_probability": choice.flip,
        "calls": way.calls,
        "cost_per_answer": None if choice.method == TOKENS else prices.cost(way.calls),
        "least_epsilon": choice.least_epsilon,
        "least_owners": choice.least_owners,
        "mechanism": choice.line.mechanism,
        choice.line.family.parameter: choice.line.parameter,
        "rate": choice.line.rate,
        "releases": choice.line.count,
        "tickets": way.eligible is not None,
        "eligible": way.eligible,
    }
    if choice.method in gates:
        found["threshold"] = gates[choice.method].threshold
    if choice.method in right:
        found["expected_accuracy"], found["standard_error"] = right[choice.method]
    return found


# -- what it writes ----------------------------------------------------------------------------------------------------


def _threshold(choice: Verdict, gates: dict[str, Nearness]) -> float:
    from langchain_dpicl.retrieval.rag import RELEVANT

    return gates[choice.method].threshold if choice.method in gates else RELEVANT


def _command(choice: Verdict, options: argparse.Namespace, gates: dict[str, Nearness]) -> str:
    """The command that uses the plan, for a shell. It has every option of this one that it knows."""
    command = "fit" if choice.method == HEAD else "answer"
    told = {"data": "FILE", **carried(options, command)}
    for name in ("json", "calls", "max_tokens"):
        told.pop(name, None)
    if options.labels.strip().isdecimal():
        told["labels"] = "LABEL,LABEL,..."
    told |= {"epsilon": f"{choice.epsilon:g}", "delta": repr(choice.delta)}
    if choice.method == HEAD:
        told |= {"output": "head.npz"} | ({"name": _name(options)} if options.fits > 1 else {})
        return written_out(command, told)
    told["releases"] = choice.line.count
    told |= {"mode": "label-vote"} if choice.method == LABEL_VOTE else {"calls": options.calls}
    if choice.way.eligible is not None:
        told |= {"threshold": f"{_threshold(choice, gates):g}", "eligible": choice.way.eligible, "tickets": True}
    return written_out(command, told | {"question": "..."})


def _name(options: argparse.Namespace) -> str:
    """A name for a plan of several fits, which outlives the file's name."""
    return "heads" if options.data is None else os.path.basename(options.data).partition(".")[0] + "-heads"


def _reading(options: argparse.Namespace) -> dict[str, Any]:
    """The options of reading that were given, as a server's file has them."""
    return {name: value for name, value in carried(options, "answer").items() if name in READING}


def _check_writable(options: argparse.Namespace, names: Sequence[str]) -> None:
    if os.path.exists(options.write):
        raise InvalidParameter("--write", options.write, "a new file: this one is there")
    for name, value in (("--data", options.data), ("--labels", names)):
        if not value:
            raise InvalidParameter(name, None, "given with --write: the file, and the labels by their names")


def _write(
    choice: Verdict,
    options: argparse.Namespace,
    names: Sequence[str],
    gates: dict[str, Nearness],
) -> None:
    """The plan as a configuration, which `serving.config.read` reads. Paths in it are relative to it."""
    import yaml  # type: ignore[import-untyped]

    from langchain_dpicl.durable import replacing

    sections: dict[str, Any] = {}
    if choice.method == HEAD:
        sections["head"] = {"file": "head.npz"}
    else:
        data = os.path.relpath(options.data, Path(options.write).absolute().parent)
        kind = "label-vote" if choice.method == LABEL_VOTE else "vote"
        sections["store"] = {
            "data": data,
            **given(options, "input_key", "output_key", "owner_key"),
            **_reading(options),
        }
        sections["release"] = {"kind": kind, "labels": list(names)}
        sections["selector"] = {"calls": choice.way.eligible if kind == "label-vote" else options.calls}
        sections["budget"] = {"epsilon": choice.epsilon, "delta": choice.delta, "releases": choice.line.count}
        if choice.way.eligible is not None:
            sections["selector"] |= {"threshold": _threshold(choice, gates), "eligible": choice.way.eligible}
            sections["budget"]["tickets"] = True
        sections["budget"]["name"] = os.path.basename(options.data).partition(".")[0]
    sections["server"] = {"anonymous": True}
    text = (
        f"# Written by `dpicl advise`: the {choice.method}, epsilon {choice.epsilon:g}, delta {choice.delta:g}.\n"
        "# This machine alone may ask. For others, give keys instead of anonymous: dpicl serve --new-key NAME\n"
    )
    if choice.method == HEAD:
        text += f"# First make the head: {_command(choice, options, gates)}\n"
    with replacing(Path(options.write), mode=0o644) as file:
        file.write((text + yaml.safe_dump(sections, sort_keys=False, default_flow_style=None)).encode())
