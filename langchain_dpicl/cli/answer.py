"""Label new texts by a noisy vote of model calls that see private examples from your file, or write texts in the style
of the examples' outputs.

examples:
  dpicl answer --data tickets.jsonl --labels billing,technical --epsilon 3 --question "My card was charged twice"
  dpicl answer --data reviews.csv --labels negative,positive --epsilon 1 --test held-out.csv
  dpicl answer --data notes.jsonl --mode embedding --epsilon 3 --output-key note --question "Patient: I cough at night"
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from langchain_dpicl.cli.options import add_ensemble, add_model, add_private_data, chosen
from langchain_dpicl.errors import InvalidParameter, InvalidRecords


def add_options(parser: Any) -> None:
    """Declare the options."""
    add_private_data(parser, "text", "label")
    modes = ("label", "embedding", "keywords-joint", "keywords-ptr")
    parser.add_argument("--mode", choices=modes, default="label", help="the kind of answer (default label)")
    parser.add_argument("--labels", help="the public list of labels, separated by commas (mode label)")
    parser.add_argument("--releases", type=int, default=1000, help="how many answers the budget is for (default 1000)")
    parser.add_argument("--question", action="append", default=[], help="a text to answer; may be repeated")
    parser.add_argument("--test", help="a file with the right answers: prints scores, beside what is NOT private")
    parser.add_argument("--held-out", type=int, default=0, help="keep this many owners of --data out, as the test")
    parser.add_argument("--limit", type=int, help="use only the first N test records")
    parser.add_argument("--compare", action="store_true", help="show answers that are NOT private beside --question's")
    add_ensemble(parser, members=20, shots=2)
    add_model(parser, "the usual one")
    texts = parser.add_argument_group("texts instead of labels")
    texts.add_argument("--instruction", help="the model's task, without a full stop")
    texts.add_argument("--k", help="how many keywords; for keywords-ptr also a range such as 5-10")
    texts.add_argument("--domain", help="a file with the words that keywords-joint may release (default: the question)")
    texts.add_argument("--candidates", help="a file with public sentences for embedding, one a line (default: written)")
    texts.add_argument("--n-candidates", type=int, default=20, help="zero-shot sentences to write (default 20)")
    texts.add_argument("--max-tokens", type=int, default=60, help="length of an answer (default 60)")


def run(options: argparse.Namespace) -> int:
    """Answer the questions, then the test."""
    from langchain_dpicl import DPAggregate, ExemplarStore, NoisyVote, PoissonExampleSelector, PrivateEnsemble, local
    from langchain_dpicl.cli.session import label_session, open_budget
    from langchain_dpicl.cli.texts import text_session
    from langchain_dpicl.members.models import ModelChoice, label_member
    from langchain_dpicl.store.records import read_records

    if options.mode == "label" and not options.labels:
        raise InvalidParameter("--labels", None, "the labels, separated by commas, or another --mode")
    labels = [label.strip() for label in options.labels.split(",")] if options.mode == "label" else None
    records, tests = read_records(options.data), []
    if options.held_out > 0:  # the last owners of the file: the same ones in every run
        owner_of = [i if options.owner_key is None else row.get(options.owner_key) for i, row in enumerate(records)]
        last = set(list(dict.fromkeys(reversed(owner_of)))[: options.held_out])
        tests = [row for owner, row in zip(owner_of, records, strict=True) if owner in last]
        records = [row for owner, row in zip(owner_of, records, strict=True) if owner not in last]
    if options.test:
        tests = read_records(options.test)
    if not options.question and not tests:
        raise InvalidParameter("--question", None, "at least one --question, or --test FILE, or --held-out N")
    keys = chosen(options, "input_key", "output_key", "owner_key")
    store = ExemplarStore.from_records(records, local.local_embeddings(), **keys, progress=not options.json)
    budget = open_budget(options, store, lambda _: options.releases)
    selector = PoissonExampleSelector(store, options.members, shots=options.shots)
    known = _known(tests, labels, options)[: options.limit]
    choice = ModelChoice(options.model, options.model_url)
    try:
        if labels is None:
            session = text_session(options, budget, selector, choice)
        else:
            ensemble = PrivateEnsemble(selector, label_member(choice, labels, options.input_key))
            chain = ensemble | DPAggregate(NoisyVote(labels), budget, return_receipt=True)
            session = label_session(chain, options.input_key, options)
    except ImportError:
        sys.exit("dpicl answer: --model needs langchain-openai: pip install 'langchain-dpicl[openai]'")
    line = session.chain.line()
    session.say(f"{store!r}; {budget!r}")
    session.say(f"each answer: {options.members} calls, rate {line.rate:.4g}; released: {line.plan_line.describe()}")
    session.ask(options.question, compared=options.compare)
    session.test(known)
    noise = {"parameter" if labels is None else "sigma": line.parameter}
    return session.finish(epsilon=budget.epsilon, delta=budget.delta, rate=line.rate, **noise)


def _known(
    records: list[dict[str, Any]], labels: list[str] | None, options: argparse.Namespace
) -> list[tuple[str, str]]:
    """Return the texts of test records with their right answers; labels in the spelling of ``labels``."""
    spelling = {label.casefold(): label for label in labels or ()}
    found = []
    for i, record in enumerate(records):
        text, answer = record.get(options.input_key), record.get(options.output_key)
        if isinstance(answer, str) and labels is not None:
            answer = spelling.get(answer.strip().casefold())
        if not isinstance(text, str) or not isinstance(answer, str):
            needed = "a text" if labels is None else "one of the labels"
            raise InvalidRecords(
                f"test record {i} needs a text under {options.input_key!r} and {needed} under {options.output_key!r}"
            )
        found.append((text, answer))
    return found
