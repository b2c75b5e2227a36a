"""``dpicl synthesize``: public demonstrations from private examples, made once and used for ever."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from typing import Any

from tqdm import tqdm

from langchain_dpicl import local
from langchain_dpicl.cli.session import add_common, delta_of, frozen_plan, shortened
from langchain_dpicl.errors import DPICLError, InvalidParameter, PrivacyWarning
from langchain_dpicl.members.models import read_lines
from langchain_dpicl.privacy import PrivacyPlan
from langchain_dpicl.store.records import read_records

_EPILOG = """examples:
  dpicl synthesize --data notes.jsonl --inputs topics.txt --epsilon 3 --output demonstrations.jsonl
  dpicl synthesize --data reviews.csv --input-key text --output-key reply --inputs public.csv --epsilon 1 \\
    --max-tokens 60 --owner-key customer --output demonstrations.jsonl

The same command goes on with a job that was interrupted, and pays for nothing twice.
"""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "synthesize",
        help="write public demonstrations from your own examples",
        description="Write an output for each public input, token by token, as the private examples' outputs are "
        "written. The pairs are public: show them to any model, as often as you like, at no further cost.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", required=True, help="private examples: JSON lines or CSV, plain or .gz")
    parser.add_argument("--inputs", required=True, help="public inputs: such a file, or a text with one a line")
    parser.add_argument("--output", required=True, help="where the demonstrations go, as JSON lines")
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--delta", type=float, help="default: the budget's; for a new one .1 / number of owners")
    parser.add_argument("--tokens", type=int, help="how many the budget is for (default: inputs times --max-tokens)")
    parser.add_argument("--max-tokens", type=int, default=25, help="the longest output (default 25)")
    parser.add_argument("--min-tokens", type=int, help="the shortest output (default: the sampler's)")
    parser.add_argument("--shots", type=int, default=4, help="expected owners per token, 2 or more (default 4)")
    parser.add_argument("--top-k", type=int, help="candidates per token (default: the sampler's)")
    parser.add_argument(
        "--stop", action="append", help="a text that ends an output; may be repeated (default: an empty line)"
    )
    parser.add_argument("--input-key", default="input")
    parser.add_argument("--output-key", default="output")
    parser.add_argument("--input-name", help="what the model reads before an input, such as Data (default: its key)")
    parser.add_argument("--output-name", help="and before an output, such as Description (default: its key)")
    parser.add_argument("--owner-key", help="whose record it is; default: each record is its own owner")
    parser.add_argument("--limit", type=int, help="use only the first so many inputs")
    parser.add_argument("--ledger", default="sqlite:///dpicl-budget.db", help="where tokens are counted")
    parser.add_argument("--witness", help="its witness: a path or a URL (default: beside the ledger)")
    parser.add_argument("--name", help="the budget's name in the ledger (default: the file's name)")
    parser.add_argument("--model", default=local.DEFAULT_MODEL, help="an embedded model, a GGUF file or a folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add_common(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry it out."""
    from langchain_dpicl import synthesize_demonstrations
    from langchain_dpicl.decoding import Made

    started, made = time.monotonic(), []
    inputs = _inputs(options)
    sampler = _sampler(options, len(inputs))
    line = sampler.line()
    if not options.json:
        print(f"{sampler.selector.store!r}; {sampler.budget!r}")
        print(f"each output: at most {options.max_tokens} tokens, rate {line.rate:.4g}; {line.plan_line.describe()}\n")
    with tqdm(total=len(inputs), desc="demonstrations", disable=None, file=sys.stderr) as bar:

        def show(one: Made) -> None:
            made.append({**one.pair, "receipt": one.receipt})
            if not options.json:
                bar.write(_words(one.pair, options.output_key), file=sys.stdout)
            bar.total, bar.n = one.total, one.done
            bar.refresh()

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PrivacyWarning)  # what stays unanswered is said below
                found = synthesize_demonstrations(sampler, inputs, output=options.output, progress=show)
        except DPICLError as error:
            error.__dict__["answered"] = {"demonstrations": made}
            raise
        except KeyboardInterrupt:
            print("\ndpicl synthesize: interrupted; the same command goes on from here", file=sys.stderr)
            raise
    pairs = [{**pair, "receipt": receipt} for pair, receipt in zip(found, found.receipts, strict=True)]
    facts = {
        "epsilon": sampler.budget.epsilon,
        "delta": sampler.budget.delta,
        "epsilon_spent": sampler.budget.epsilon_spent(),
        "tokens": sum(receipt["tokens"] or 0 for receipt in found.receipts),
        "remaining": line.remaining(),
        "output": options.output,
        "unanswered": found.unanswered,
        "demonstrations": pairs,
        "seconds": round(time.monotonic() - started, 1),
    }
    _report(facts, len(made), options.json)
    return 1 if found.unanswered else 0


def _report(facts: dict[str, Any], new: int, as_json: bool) -> None:
    """The one JSON object, or the last lines."""
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print(
            f"\n{len(facts['demonstrations'])} demonstrations ({new} of them new) of {facts['tokens']} tokens in "
            f"{facts['output']}\nepsilon {facts['epsilon_spent']:.3g} of {facts['epsilon']:g} spent at delta "
            f"{facts['delta']:.2g}, {facts['remaining']} tokens left; {facts['seconds']:.0f} seconds."
        )
    if facts["unanswered"]:
        left = len(facts["unanswered"])
        total = left + len(facts["demonstrations"])
        print(
            f"dpicl synthesize: {left} of {total} inputs stay unanswered: the budget's tokens are spent",
            file=sys.stderr,
        )


def _words(pair: dict[str, Any], output_key: str) -> str:
    """A demonstration for people, on two lines."""
    asked = ", ".join(str(value) for key, value in pair.items() if key != output_key)
    return f"  {shortened(asked)}\n    {shortened(pair[output_key]) or '-'}"


def _inputs(options: argparse.Namespace) -> list[Any]:
    """The public inputs: records, or lines of text."""
    if options.limit is not None and options.limit < 1:
        raise InvalidParameter("--limit", options.limit, "at least 1")
    kinds = (".jsonl", ".json", ".csv")
    is_records = options.inputs.removesuffix(".gz").endswith(kinds)
    found = read_records(options.inputs) if is_records else read_lines("--inputs", options.inputs)
    if not found:
        raise InvalidParameter("--inputs", options.inputs, "a file with at least one input")
    return found[: options.limit]


def _sampler(options: argparse.Namespace, inputs: int) -> Any:
    import numpy as np

    from langchain_dpicl import DemonstrationTemplate, DPSampler, ExemplarStore, PoissonExampleSelector, PrivacyBudget
    from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits

    if options.shots < 2:
        raise InvalidParameter("--shots", options.shots, "at least 2")
    records = read_records(options.data)
    store = ExemplarStore.from_records(
        records,
        local.local_embeddings(),
        input_key=options.input_key,
        output_key=options.output_key,
        owner_key=options.owner_key,
        vectors=np.zeros((len(records), 1), np.float32),  # nothing is looked for by similarity
    )
    name = options.name or os.path.basename(options.data).partition(".")[0]
    plan = frozen_plan(name, options.ledger)
    delta = delta_of(options.delta, plan, store)
    tokens = _tokens(options, plan, inputs)
    stops = options.stop and [text.replace("\\n", "\n") for text in options.stop]
    chosen = {"min_tokens": options.min_tokens, "top_k": options.top_k, "stop": stops}
    return DPSampler(
        TransformersLogits(options.model, dtype=options.dtype),
        PoissonExampleSelector(store, options.shots, shots=1),
        PrivacyBudget(options.epsilon, delta, tokens, ledger=options.ledger, name=name, witness=options.witness),
        template=DemonstrationTemplate.of(store, input_name=options.input_name, output_name=options.output_name),
        max_tokens=options.max_tokens,
        **{name: value for name, value in chosen.items() if value is not None},
    )


def _tokens(options: argparse.Namespace, plan: PrivacyPlan | None, inputs: int) -> int:
    """How many tokens the budget has: as asked, as it was frozen, or enough for every input."""
    if options.tokens is not None:
        return int(options.tokens)
    if plan is not None and "tokens" in plan.lines:
        return plan.lines["tokens"].count
    return int(max(options.max_tokens, 1)) * inputs
