"""Write an output for each public input, token by token, in the style of the private examples' outputs. The pairs are
public: show them to any model, as often as you like, at no further cost.

examples:
  dpicl synthesize --data notes.jsonl --inputs topics.txt --epsilon 3 --output demonstrations.jsonl
  dpicl synthesize --data reviews.csv --input-key text --output-key reply --inputs public.csv --epsilon 1 \\
    --max-tokens 60 --owner-key customer --output demonstrations.jsonl

Run the same command again to resume an interrupted job; no token is charged twice.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from langchain_dpicl import local
from langchain_dpicl.cli.options import add_private_data, chosen, show
from langchain_dpicl.errors import DPICLError, InvalidParameter, PrivacyWarning

if TYPE_CHECKING:
    from langchain_dpicl.privacy import PrivacyPlan


def add_options(parser: Any) -> None:
    """Declare the options."""
    add_private_data(parser, "input", "output")
    parser.add_argument("--inputs", required=True, help="public inputs: such a file, or a text with one a line")
    parser.add_argument("--output", required=True, help="the file for the demonstrations, as JSON lines")
    parser.add_argument("--tokens", type=int, help="how many the budget is for (default: inputs times --max-tokens)")
    parser.add_argument("--max-tokens", type=int, default=25, help="the longest output (default 25)")
    parser.add_argument("--min-tokens", type=int, help="the shortest output (default: the sampler's)")
    parser.add_argument("--shots", type=int, default=4, help="expected owners per token, 2 or more (default 4)")
    parser.add_argument("--top-k", type=int, help="candidates per token (default: the sampler's)")
    stop = "a text that ends an output; may be repeated (default: an empty line)"
    parser.add_argument("--stop", action="append", help=stop)
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

        def progress(one: Made) -> None:
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
                found = synthesize_demonstrations(sampler, inputs, output=options.output, progress=progress)
        except DPICLError as error:
            error.__dict__["answered"] = {"demonstrations": made}
            raise
        except KeyboardInterrupt:
            print("\ndpicl synthesize: interrupted; the same command resumes here", file=sys.stderr)
            raise
    budget, unanswered = sampler.budget, found.unanswered
    facts = {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "epsilon_spent": budget.epsilon_spent(),
        "tokens": sum(receipt["tokens"] or 0 for receipt in found.receipts),
        "remaining": line.remaining(),
        "output": options.output,
        "unanswered": unanswered,
        "demonstrations": [{**pair, "receipt": each} for pair, each in zip(found, found.receipts, strict=True)],
        "seconds": round(time.monotonic() - started, 1),
    }
    text = (
        f"\n{len(found)} demonstrations ({len(made)} of them new) of {facts['tokens']} tokens in {options.output}\n"
        f"epsilon {facts['epsilon_spent']:.3g} of {budget.epsilon:g} spent at delta {budget.delta:.2g}, "
        f"{facts['remaining']} tokens left; {facts['seconds']:.0f} seconds."
    )
    show(options, facts, text)
    if unanswered:
        left = f"{len(unanswered)} of {len(unanswered) + len(found)} inputs"
        print(f"dpicl synthesize: {left} stay unanswered: the budget's tokens are spent", file=sys.stderr)
    return 1 if unanswered else 0


def _inputs(options: argparse.Namespace) -> list[Any]:
    """Read the public inputs: records, or lines of text."""
    from langchain_dpicl.members.chains import read_lines
    from langchain_dpicl.store.records import read_records

    if options.limit is not None and options.limit < 1:
        raise InvalidParameter("--limit", options.limit, "at least 1")
    has_records = options.inputs.removesuffix(".gz").endswith((".jsonl", ".json", ".csv"))
    found = read_records(options.inputs) if has_records else read_lines("--inputs", options.inputs)
    if not found:
        raise InvalidParameter("--inputs", options.inputs, "a file with at least one input")
    return found[: options.limit]


def _sampler(options: argparse.Namespace, inputs: int) -> Any:
    """Open the store, the budget and the model."""
    import numpy as np

    from langchain_dpicl import DemonstrationTemplate, DPSampler, ExemplarStore, PoissonExampleSelector
    from langchain_dpicl.cli.session import open_budget
    from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
    from langchain_dpicl.store.records import read_records

    def tokens(plan: PrivacyPlan | None) -> int:
        """As given, as frozen, or enough for every input."""
        frozen = plan.lines.get("tokens") if plan is not None and options.tokens is None else None
        if frozen is not None:
            return frozen.count
        return max(options.max_tokens, 1) * inputs if options.tokens is None else int(options.tokens)

    if options.shots < 2:
        raise InvalidParameter("--shots", options.shots, "at least 2")
    records = read_records(options.data)
    no_search = np.zeros((len(records), 1), np.float32)
    keys = chosen(options, "input_key", "output_key", "owner_key")
    store = ExemplarStore.from_records(records, local.local_embeddings(), **keys, vectors=no_search)
    budget = open_budget(options, store, tokens)
    given = chosen(options, "min_tokens", "top_k")
    given["stop"] = options.stop and [text.replace("\\n", "\n") for text in options.stop]
    return DPSampler(
        TransformersLogits(options.model, dtype=options.dtype),
        PoissonExampleSelector(store, options.shots, shots=1),
        budget,
        template=DemonstrationTemplate.of(store, **chosen(options, "input_name", "output_name")),
        max_tokens=options.max_tokens,
        **{name: value for name, value in given.items() if value is not None},
    )
