"""The command ``demo``: two private ways to sort an invented clinic's messages, side by side at the same epsilon."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
import warnings
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli import add_run
from langchain_dpicl.errors import PrivacyWarning

if TYPE_CHECKING:
    from langchain_dpicl.store import ExemplarStore

TUNED_ON = 30
"""The first held-out questions chose the desks' names and the prompt: the ensemble is asked others."""
NEW_QUESTIONS = 3


def demo_options(parser: Any) -> None:
    """Route an invented clinic's messages to its desks, learning the desks from private examples alone: with an
    ensemble of model calls for each answer, and with a head, a classifier that is released once.
    """
    add_run(parser, demo)
    parser.add_argument("--epsilon", type=float, default=3.0, help="of the ensemble, and of the head (default 3)")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--releases", type=int, default=100, help="answers of the ensemble's budget (default 100)")
    parser.add_argument("--held-out", type=int, default=5, help="how many held-out questions to score (default 5)")
    parser.add_argument("--ledger", help="counts the ensemble's answers (default: a temporary one, as for the head)")


def demo(options: argparse.Namespace) -> int:
    """Ask new questions beside answers that are not private, then score held-out ones."""
    from langchain_dpicl import (
        DPAggregate,
        ExemplarStore,
        LabelScorer,
        NoisyVote,
        PoissonExampleSelector,
        PrivacyBudget,
        PrivateEnsemble,
        local,
    )
    from langchain_dpicl.cli.session import Session
    from langchain_dpicl.demo import inbox
    from langchain_dpicl.privacy.checks import whole

    whole("--held-out", options.held_out, at_least=0)
    labels = list(inbox.DEMO_LABELS)
    private, held_out = inbox.demo_inbox()
    keys: Any = {"input_key": inbox.INPUT_KEY, "output_key": inbox.OUTPUT_KEY, "owner_key": inbox.OWNER_KEY}
    questions = [(row[inbox.INPUT_KEY], row[inbox.OUTPUT_KEY]) for row in held_out]
    with contextlib.ExitStack() as temporary:
        folder = temporary.enter_context(tempfile.TemporaryDirectory(prefix="dpicl-demo-"))
        store = ExemplarStore.from_records(private, local.local_embeddings(), **keys, progress=not options.json)

        guesses, head = _sorted_by_head(store, labels, questions, options, folder)
        # Two budgets on one inbox add up, of which the last line tells.
        temporary.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "the budget .* is used with data on which other budgets", PrivacyWarning)
        ledger = options.ledger or f"sqlite:///{folder}/budget.db"
        budget = PrivacyBudget(options.epsilon, options.delta, options.releases, ledger=ledger, name="demo")
        near: Any = {"threshold": inbox.DEMO_THRESHOLD, "eligible": inbox.DEMO_ELIGIBLE, "nearest_to": inbox.INPUT_KEY}
        each: Any = {"max_exemplars": inbox.DEMO_EXEMPLARS, "exemplars_per_owner": inbox.DEMO_EXEMPLARS}
        selector = PoissonExampleSelector(store, calls=inbox.DEMO_CALLS, **each, **near)
        member = LabelScorer(
            local.local_llm(),
            labels,
            query_key=inbox.INPUT_KEY,
            instruction=inbox.DEMO_INSTRUCTION,
            content_free=inbox.DEMO_CONTENT_FREE,
            top_logprobs=100,
        )
        release = PrivateEnsemble(selector, member) | DPAggregate(NoisyVote(labels), budget, return_receipt=True)
        session = Session(release, options, beside=lambda text: {"head": guesses[text]})
        line = release.line()
        session.say(
            f"A clinic's inbox: {len(store):,} messages of {store.owner_count} patients, all private.\n"
            f"Its desks are called {', '.join(labels)}; only the messages show which desk does what.\n\n"
            f"Two ways to sort new messages, each ({options.epsilon:g}, {options.delta:g})-differentially private for "
            "every patient:\n"
            f"  ensemble  {options.releases} answers together, each of about {inbox.DEMO_CALLS} calls of the model. "
            f"A call sees up to {inbox.DEMO_EXEMPLARS} messages\n            of one patient; those with one near to "
            f"the question take part with probability {line.rate:.3f}.\n"
            f"            Released is {line.plan_line.describe()}.\n"
            "  head      Any number of answers, without a call of the model: a classifier, fitted once on all messages,"
            f"\n            with noise, in {head['seconds_to_fit']:.1f} seconds."
        )
        new = questions[TUNED_ON:]
        scored = min(options.held_out, len(new) - NEW_QUESTIONS)
        began = time.monotonic()
        session.ask([text for text, _ in new[:NEW_QUESTIONS]], compared=True)
        session.say(f"\nAccuracy on {scored} messages of patients who are not in the inbox:")
        session.test(new[NEW_QUESTIONS : NEW_QUESTIONS + scored])
        count = len(session.asked) + len(session.tested)
        ensemble = {
            "answers": count,
            "epsilon_spent": budget.epsilon_spent(),
            "seconds_an_answer": (time.monotonic() - began) / max(1, count),
            "remaining": budget.remaining(),
        }
        session.say(_table(options.epsilon, ensemble, head))
        return session.finish(
            epsilon=options.epsilon,
            delta=options.delta,
            rate=line.rate,
            mechanism=line.mechanism,
            **{line.plan_line.family.parameter: line.parameter},
            ensemble=ensemble,
            head=head,
        )


def _sorted_by_head(
    store: ExemplarStore, labels: list[str], questions: list[tuple[str, str]], options: argparse.Namespace, folder: str
) -> tuple[dict[str, str], dict[str, Any]]:
    """Fit a head on a budget of its own. Its label for each question, and what it cost."""
    from langchain_dpicl import PrivacyBudget, PrivateHead

    started = time.monotonic()
    budget = PrivacyBudget(options.epsilon, options.delta, {"head": 1}, f"sqlite:///{folder}/head.db", "demo-head")
    head = PrivateHead.fit(store, labels, budget, progress=False)
    assert budget.plan is not None
    fitted = time.monotonic()
    answers = head.batch([text for text, _ in questions])
    answered = time.monotonic()
    right = [found["label"] == label for found, (_, label) in zip(answers, questions, strict=True)]
    facts = {
        "answers": len(questions),
        "accuracy": sum(right) / len(right),
        "epsilon_spent": head.receipt["epsilon_spent"],
        "sigma": budget.plan.lines["head"].parameter,
        "receipt": head.receipt,
        "seconds_to_fit": fitted - started,
        "seconds_an_answer": (answered - fitted) / len(questions),
        "remaining": None,
    }
    return {text: found["label"] for (text, _), found in zip(questions, answers, strict=True)}, facts


def _table(epsilon: float, ensemble: dict[str, Any], head: dict[str, Any]) -> str:
    """The cost of each, the answers that it can still give, and which to choose."""
    ways = (ensemble, head)
    rows = [
        ("", "ensemble", "head"),
        ("epsilon spent", *(f"{way['epsilon_spent']:.3g} of {epsilon:g}" for way in ways)),
        ("seconds an answer", *(f"{way['seconds_an_answer']:.3f}" for way in ways)),
        ("answers left", f"{ensemble['remaining']:,}", "no limit"),
    ]
    table = "\n".join(f"    {name:40s} {first:>12s} {second:>12s}".rstrip() for name, first, second in rows)
    return (
        f"\n{table}\n\nThe head has also sorted all {head['answers']} new messages, {head['accuracy']:.1%} of them "
        "right. It gives labels alone, and knows the inbox\nas it was at its fit. An ensemble follows every new "
        f"message, and can write texts. Choose one: both together count epsilon {2 * epsilon:g}."
    )
