"""``dpicl synthesize``: write public demonstrations from private examples, once; use them for ever."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from langchain_dpicl import local
from langchain_dpicl.cli.options import add_private_data, new_parser
from langchain_dpicl.errors import DPICLError, InvalidParameter, PrivacyWarning

if TYPE_CHECKING:
    from langchain_dpicl.privacy import PrivacyPlan

_EPILOG = """examples:
  dpicl synthesize --data notes.jsonl --inputs topics.txt --epsilon 3 --output demonstrations.jsonl
  dpicl synthesize --data reviews.csv --input-key text --output-key reply --inputs public.csv --epsilon 1 \\
    --max-tokens 60 --owner-key customer --output demonstrations.jsonl

Run the same command again to resume an interrupted job; no token is charged twice.
"""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    parser = new_parser(
        commands,
        "synthesize",
        run,
        "write public demonstrations from your own examples",
        "Write an output for each public input, token by token, in the style of the private examples' outputs. The "
        "pairs are\npublic: show them to any model, as often as you like, at no further cost.",
        _EPILOG,
    )
    add_private_data(parser, "input", "output")
    parser.add_argument("--inputs", required=True, help="public inputs: such a file, or a text with one a line")
    parser.add_argument("--output", required=True, help="the file for the demonstrations, as JSON lines")
    parser.add_argument("--tokens", type=int, help="how many the budget is for (default: inputs times --max-tokens)")
    parser.add_argument("--max-tokens", type=int, default=25, help="the longest output (default 25)")
    parser.add_argument("--min-tokens", type=int, help="the shortest output (default: the sampler's)")
    parser.add_argument("--shots", type=int, default=4, help="expected owners per token, 2 or more (default 4)")
    parser.add_argument("--top-k", type=int, help="candidates per token (default: the sampler's)")
    parser.add_argument(
        "--stop", action="append", help="a text that ends an output; may be repeated (default: an empty line)"
    )
    parser.add_argument("--input-name", help="the word before an input in a prompt, such as Data (default: its key)")
    parser.add_argument("--output-name", help="the word before an output, such as Description (default: its key)")
    parser.add_argument("--limit", type=int, help="use only the first N inputs")
    parser.add_argument("--model", default=local.DEFAULT_MODEL, help="an embedded model, a GGUF file or a folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")


def run(options: argparse.Namespace) -> int:
    """Write the demonstrations. Returns 1 if inputs stay unanswered."""
    from tqdm import tqdm

    from langchain_dpicl import synthesize_demonstrations
    from langchain_dpicl.cli.session import shortened
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
                asked = ", ".join(str(value) for key, value in one.pair.items() if key != options.output_key)
                answer = shortened(one.pair[options.output_key]) or "-"
                bar.write(f"  {shortened(asked)}\n    {answer}", file=sys.stdout)
            bar.total, bar.n = one.total, one.done
            bar.refresh()

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PrivacyWarning)  # unanswered inputs are reported below
                found = synthesize_demonstrations(sampler, inputs, output=options.output, progress=show)
        except DPICLError as error:
            error.__dict__["answered"] = {"demonstrations": made}
            raise
        except KeyboardInterrupt:
            print("\ndpicl synthesize: interrupted; the same command resumes here", file=sys.stderr)
            raise
    facts = {
        "epsilon": sampler.budget.epsilon,
        "delta": sampler.budget.delta,
        "epsilon_spent": sampler.budget.epsilon_spent(),
        "tokens": sum(receipt["tokens"] or 0 for receipt in found.receipts),
        "remaining": line.remaining(),
        "output": options.output,
        "unanswered": found.unanswered,
        "demonstrations": [{**pair, "receipt": each} for pair, each in zip(found, found.receipts, strict=True)],
        "seconds": round(time.monotonic() - started, 1),
    }
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        print(
            f"\n{len(found)} demonstrations ({len(made)} of them new) of {facts['tokens']} tokens in {options.output}\n"
            f"epsilon {facts['epsilon_spent']:.3g} of {facts['epsilon']:g} spent at delta {facts['delta']:.2g}, "
            f"{facts['remaining']} tokens left; {facts['seconds']:.0f} seconds."
        )
    if found.unanswered:
        left = f"{len(found.unanswered)} of {len(found.unanswered) + len(found)} inputs"
        print(f"dpicl synthesize: {left} stay unanswered: the budget's tokens are spent", file=sys.stderr)
    return 1 if found.unanswered else 0


def _inputs(options: argparse.Namespace) -> list[Any]:
    """Read the public inputs: records, or lines of text."""
    from langchain_dpicl.members.models import read_lines
    from langchain_dpicl.store.records import read_records

    if options.limit is not None and options.limit < 1:
        raise InvalidParameter("--limit", options.limit, "at least 1")
    has_records = options.inputs.removesuffix(".gz").endswith((".jsonl", ".json", ".csv"))
    found = read_records(options.inputs) if has_records else read_lines("--inputs", options.inputs)
    if not found:
        raise InvalidParameter("--inputs", options.inputs, "a file with at least one input")
    return found[: options.limit]


def _sampler(options: argparse.Namespace, inputs: int) -> Any:
    import numpy as np

    from langchain_dpicl import DemonstrationTemplate, DPSampler, ExemplarStore, PoissonExampleSelector
    from langchain_dpicl.cli.session import open_budget
    from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
    from langchain_dpicl.store.records import read_records

    def tokens(plan: PrivacyPlan | None) -> int:
        """As given, as frozen, or enough for every input."""
        if options.tokens is not None:
            return int(options.tokens)
        if plan is not None and "tokens" in plan.lines:
            return plan.lines["tokens"].count
        return int(max(options.max_tokens, 1)) * inputs

    if options.shots < 2:
        raise InvalidParameter("--shots", options.shots, "at least 2")
    records = read_records(options.data)
    store = ExemplarStore.from_records(
        records,
        local.local_embeddings(),
        input_key=options.input_key,
        output_key=options.output_key,
        owner_key=options.owner_key,
        vectors=np.zeros((len(records), 1), np.float32),  # no search by similarity
    )
    budget = open_budget(options, store, tokens)
    stops = options.stop and [text.replace("\\n", "\n") for text in options.stop]
    chosen = {"min_tokens": options.min_tokens, "top_k": options.top_k, "stop": stops}
    return DPSampler(
        TransformersLogits(options.model, dtype=options.dtype),
        PoissonExampleSelector(store, options.shots, shots=1),
        budget,
        template=DemonstrationTemplate.of(store, input_name=options.input_name, output_name=options.output_name),
        max_tokens=options.max_tokens,
        **{name: value for name, value in chosen.items() if value is not None},
    )
