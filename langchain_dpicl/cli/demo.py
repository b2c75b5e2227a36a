"""Route an invented clinic's messages to its desks, learning the desks from private examples alone."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from typing import Any

TUNED_ON = 30
"""The first held-out questions chose the desks' names and the prompt: the demonstration asks others."""
NEW_QUESTIONS = 4


def add_options(parser: Any) -> None:
    """Declare the options."""
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--releases", type=int, default=100, help="how many answers the budget is for (default 100)")
    parser.add_argument("--held-out", type=int, default=20, help="how many held-out questions to score (default 20)")
    parser.add_argument("--ledger", help="a database URL to count on (default: a temporary one)")


def run(options: argparse.Namespace) -> int:
    """Ask new questions beside answers that are not private, then score held-out ones."""
    from langchain_dpicl import (
        DPAggregate,
        ExemplarStore,
        LabelScorer,
        NoisyVote,
        PoissonExampleSelector,
        PrivacyBudget,
        PrivateEnsemble,
    )
    from langchain_dpicl.cli.session import label_session
    from langchain_dpicl.demo import inbox
    from langchain_dpicl.local import local_embeddings, local_llm

    labels = list(inbox.DEMO_LABELS)
    private, held_out = inbox.demo_inbox()
    keys: Any = {"input_key": inbox.INPUT_KEY, "output_key": inbox.OUTPUT_KEY, "owner_key": inbox.OWNER_KEY}
    with contextlib.ExitStack() as temporary:
        ledger = options.ledger
        if ledger is None:
            folder = temporary.enter_context(tempfile.TemporaryDirectory(prefix="dpicl-demo-"))
            ledger = f"sqlite:///{folder}/budget.db"
        store = ExemplarStore.from_records(private, local_embeddings(), **keys, progress=not options.json)
        budget = PrivacyBudget(options.epsilon, options.delta, options.releases, ledger=ledger, name="demo")
        selector = PoissonExampleSelector(store, inbox.DEMO_MEMBERS, shots=inbox.DEMO_SHOTS)
        member = LabelScorer(
            local_llm(),
            labels,
            query_key=inbox.INPUT_KEY,
            instruction=inbox.DEMO_INSTRUCTION,
            content_free=inbox.DEMO_CONTENT_FREE,
            top_logprobs=100,
        )
        chain = PrivateEnsemble(selector, member) | DPAggregate(NoisyVote(labels), budget, return_receipt=True)
        session = label_session(chain, inbox.INPUT_KEY, options)
        line = chain.line()
        session.say(
            f"A clinic's inbox: {len(store):,} messages of {store.owner_count} patients, all private.\n"
            f"Its desks are called {', '.join(labels)}; only the messages show which desk does what.\n\n"
            f"The promise: {options.releases} answers together are ({options.epsilon:g}, {options.delta:g})-"
            f"differentially private for every patient.\nEach answer: {inbox.DEMO_MEMBERS} members, a patient takes "
            f"part with probability {line.rate:.3f}, noise of sigma {line.parameter:.2f} on every desk's count."
        )
        questions = [(row[inbox.INPUT_KEY], row[inbox.OUTPUT_KEY]) for row in held_out[TUNED_ON:]]
        scored = min(options.held_out, len(questions) - NEW_QUESTIONS)
        session.ask([text for text, _ in questions[:NEW_QUESTIONS]], compared=True)
        session.say(f"\nAccuracy on {scored} messages of patients who are not in the inbox:")
        session.test(questions[NEW_QUESTIONS : NEW_QUESTIONS + scored])
        return session.finish(epsilon=options.epsilon, delta=options.delta, rate=line.rate, sigma=line.parameter)
