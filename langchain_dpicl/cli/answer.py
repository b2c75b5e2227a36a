"""``dpicl answer``: private answers from the user's own file."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from typing import Any

from langchain_core.language_models import BaseLanguageModel

from langchain_dpicl import local
from langchain_dpicl.cli import texts
from langchain_dpicl.cli.session import Question, Session, add_common, delta_of, frozen_plan
from langchain_dpicl.errors import InvalidParameter, InvalidRecords
from langchain_dpicl.members.models import ModelChoice, label_member
from langchain_dpicl.store.records import read_records

_EPILOG = """examples:
  dpicl answer --data tickets.jsonl --labels billing,technical --epsilon 3 --question "My card was charged twice"
  dpicl answer --data reviews.csv --labels negative,positive --epsilon 1 --test held-out.csv
  dpicl answer --data notes.jsonl --mode embedding --epsilon 3 --output-key note --question "Patient: I cough at night"
"""
_NO_CLIENT = "dpicl answer: --model needs langchain-openai: pip install 'langchain-dpicl[openai]'"


def add_parser(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "answer",
        help="answer questions from your own examples",
        description="Label new texts by a noisy vote of model calls that see private examples from your file, or write "
        "texts as the examples' outputs are written.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", required=True, help="private examples: JSON lines or CSV, plain or .gz")
    parser.add_argument("--mode", choices=("label", *texts.MODES), default="label", help="what is released")
    parser.add_argument("--labels", help="the public list of labels, separated by commas (mode label)")
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--delta", type=float, help="default: the budget's; for a new one .1 / number of owners")
    parser.add_argument("--releases", type=int, default=1000, help="how many answers the budget is for (default 1000)")
    parser.add_argument("--question", action="append", default=[], help="a text to label; may be repeated")
    parser.add_argument("--test", help="a file with the right answers: prints scores, beside what is NOT private")
    parser.add_argument("--held-out", type=int, default=0, help="keep this many owners of --data out, as the test")
    parser.add_argument("--limit", type=int, help="use only the first so many test records")
    parser.add_argument("--members", type=int, default=20, help="parallel calls per answer (default 20)")
    parser.add_argument("--shots", type=int, default=2, help="expected examples per call (default 2)")
    parser.add_argument("--input-key", default="text")
    parser.add_argument("--output-key", default="label")
    parser.add_argument("--owner-key", help="whose record it is; default: each record is its own owner")
    parser.add_argument("--ledger", default="sqlite:///dpicl-budget.db", help="where releases are counted")
    parser.add_argument("--witness", help="its witness: a path or a URL (default: beside the ledger)")
    parser.add_argument("--name", help="the budget's name in the ledger (default: the file's name)")
    parser.add_argument("--compare", action="store_true", help="show answers that are NOT private beside --question's")
    parser.add_argument("--model-url", help="an OpenAI-compatible server (default: the embedded model)")
    parser.add_argument("--model", help="its model's name, with the key in OPENAI_API_KEY; or an embedded model's")
    texts.add_options(parser)
    add_common(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry it out."""
    from langchain_dpicl import (
        DPAggregate,
        ExemplarStore,
        NoisyVote,
        PoissonExampleSelector,
        PrivacyBudget,
        PrivateEnsemble,
    )

    if options.mode == "label" and not options.labels:
        raise InvalidParameter("--labels", None, "the labels, separated by commas, or another --mode")
    records, held_out = _hold_out(read_records(options.data), options.held_out, options.owner_key)
    tests = read_records(options.test) if options.test else held_out
    questions = [Question(text) for text in options.question]
    if not questions and not tests:
        raise InvalidParameter("--question", None, "at least one --question, or --test FILE, or --held-out N")
    store = ExemplarStore.from_records(
        records,
        local.local_embeddings(),
        input_key=options.input_key,
        output_key=options.output_key,
        owner_key=options.owner_key,
        progress=not options.json,
    )
    name = options.name or os.path.basename(options.data).partition(".")[0]
    delta = delta_of(options.delta, frozen_plan(name, options.ledger), store)
    where = {"ledger": options.ledger, "name": name, "witness": options.witness}
    budget = PrivacyBudget(options.epsilon, delta, options.releases, **where)
    selector = PoissonExampleSelector(store, options.members, shots=options.shots)
    choice = ModelChoice(options.model, options.model_url)
    if options.mode != "label":
        model = functools.partial(_model, choice, max_tokens=options.max_tokens)
        return texts.run(options, budget, selector, model, questions, tests)
    labels = [label.strip() for label in options.labels.split(",")]
    known = _known(tests, labels, options)[: options.limit]
    try:
        member = label_member(choice, labels, options.input_key)
    except ImportError:
        sys.exit(_NO_CLIENT)
    chain = PrivateEnsemble(selector, member) | DPAggregate(NoisyVote(labels), budget, return_receipt=True)
    session = Session(chain, options.input_key, options.json)
    line = chain.line()
    session.say(f"{store!r}; {budget!r}")
    session.say(f"each answer: {options.members} calls, rate {line.rate:.4g}, sigma {line.parameter:.3g} per label")
    session.ask(questions, compared=options.compare)
    session.test(known)
    return session.finish(epsilon=budget.epsilon, delta=budget.delta, rate=line.rate, sigma=line.parameter)


def _hold_out(
    records: list[dict[str, Any]], owners: int, owner_key: str | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The last ``owners`` owners' records apart; the same ones in every run."""
    if owners <= 0:
        return records, []
    keys = [i if owner_key is None else record.get(owner_key) for i, record in enumerate(records)]
    last = set(list(dict.fromkeys(reversed(keys)))[:owners])
    kept = [record for key, record in zip(keys, records, strict=True) if key not in last]
    apart = [record for key, record in zip(keys, records, strict=True) if key in last]
    return kept, apart


def _known(records: list[dict[str, Any]], labels: list[str], options: argparse.Namespace) -> list[Question]:
    known = {label.casefold(): label for label in labels}
    questions = []
    for i, record in enumerate(records):
        text, label = record.get(options.input_key), record.get(options.output_key)
        if not isinstance(text, str) or not isinstance(label, str) or label.strip().casefold() not in known:
            raise InvalidRecords(
                f"test record {i} needs a text under {options.input_key!r} and one of the labels under "
                f"{options.output_key!r}"
            )
        questions.append(Question(text, known[label.strip().casefold()]))
    return questions


def _model(choice: ModelChoice, **settings: Any) -> BaseLanguageModel[Any]:
    try:
        return choice.load(**settings)
    except ImportError:
        sys.exit(_NO_CLIENT)
