"""The command ``fit``, and ``answer --mode head``: a classifier that is released once, and answers for ever."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli import (
    READING,
    add_columns,
    add_model,
    add_parameters,
    add_private_data,
    add_run,
    check_apart,
    check_only,
    given,
    holds_records,
    keys_in,
    model_of,
    show,
)
from langchain_dpicl.cli.data import keys_of, private_store, read_file
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.parameters import parameters_of

if TYPE_CHECKING:
    from langchain_dpicl import PrivateHead, View

_FIT = parameters_of("once/head.py", "PrivateHead", "fit")


def fit_options(parser: Any) -> None:
    """Fit a classifier on private examples once. It then labels any number of texts: no model calls, no noise and no
    charge for an answer.

    examples:
      dpicl fit --data tickets.jsonl --labels billing,technical --epsilon 1 --output head.npz
      dpicl fit --data reviews.csv --labels negative,positive --epsilon 1 --delta 1e-6 --owner-key user --output h.npz
      dpicl answer --mode head --head head.npz --question "My card was charged twice"
      dpicl fit --data reviews.csv --labels negative,positive --epsilon 1 --output h.npz --public texts.txt \\
        --model smollm2-135m-instruct --score-prompt 'Review: {input}\\nSentiment:'

      dpicl fit --data questions.csv --labels person,place,number --epsilon 1 --output h.npz --public texts.txt \\
        --views whole,opening:2

      dpicl fit --data tickets-03.csv --labels billing,technical --epsilon 1 --fits 12 --name tickets --output 03.npz

    --fits 12 --name NAME: a plan of 12 fits, one a month, frozen with the first; each has an --output of its own.
    Run the same command again to resume an interrupted fit; it is charged once. If --output is a head of these labels
    whose fit the ledger has under --name, and neither --data nor --public is newer than it, the command is done: it
    fits and charges nothing. A fit that is refused makes no ledger, freezes no plan and writes no file but --store's.
    """
    add_run(parser, fit, releases="fits")
    add_private_data(parser, "text", "label")
    add_parameters(
        parser,
        {name: each for name, each in _FIT.items() if name not in ("input_key", "line", "progress", "views")},
        required=["output"],
        labels=" (separated by commas)",
        public=" (a file: one a line, or records)",
        owners=" (default: as the budget, else as the file)",
        output=" (.npz)",
    )
    add_columns(parser, "public")
    parser.add_argument(
        "--views",
        metavar="NAMES",
        help="views of a text whose vectors are joined, such as whole,opening:2 (its first two words; default: whole)",
    )
    parser.add_argument("--fits", type=int, default=1, help="how many fits the budget is for (default 1)")
    parser.add_argument("--report", metavar="FILE", help="private: how many records were left out, for the operator")
    parser.add_argument(
        "--score-prompt",
        metavar="TEMPLATE",
        help="a prompt with {input}, such as 'Review: {input}\\nSentiment:': the model's scores of the labels after it "
        "are features, too (needs --public and --model; slow: one call for each record)",
    )
    add_model(parser, "none")


def _model(options: argparse.Namespace) -> Any:
    """The model of the label scores; None if no option names one."""
    return model_of(options).load() if options.model or options.model_url else None


def fit(options: argparse.Namespace) -> int:
    """Fit the head and write its file."""
    from langchain_dpicl import LabelScores, PrivateHead, whole
    from langchain_dpicl.cli.once import BudgetOpening, check_name, write_report
    from langchain_dpicl.cli.session import receipt_words
    from langchain_dpicl.members.chains import read_lines
    from langchain_dpicl.once.views import views_named

    check_apart(options, "public")
    labels = [label.strip() for label in options.labels.split(",")]
    check_name(options, "fits")
    views = None if options.views is None else views_named(options.views)
    if (head := _done(options, labels, views or [whole])) is not None:
        text = f"{options.output} is done: nothing was fitted or charged.\n{receipt_words(head.receipt, 'fits')}"
        return show(options, {"output": options.output, "done": True, "receipt": head.receipt}, text)
    public = None
    if options.public and holds_records(options.public):
        keys = keys_in(options, "public", keys_of(options))._replace(output_key=None)
        public = [row[keys.input_key] for row in read_file(options, options.public, keys)]
    elif options.public:
        public = read_lines("--public", options.public)
    if (llm := _model(options)) is None and options.score_prompt is not None:
        raise InvalidParameter("--model", None, "the model of the scores with --score-prompt")
    if llm is not None and options.score_prompt is None:
        raise InvalidParameter("--model", options.model, "left out without --score-prompt: a head asks no model")
    scores = None if llm is None else LabelScores(llm, labels, options.score_prompt.replace("\\n", "\n"))
    store = private_store(options, read_file(options, options.data, keys_of(options), labels, is_private=True))
    opening = BudgetOpening(options, store, "head", "fits", options.fits)
    made = {"store": store, "labels": labels, "budget": opening, "public": public, "scores": scores, "views": views}
    asked = given(options, *_FIT.keys() & vars(options).keys())
    head = PrivateHead.fit(**asked | made, progress=options.private_notes)
    report = head.fit_report
    write_report(options.report, None if report is None else asdict(report), "head")
    (line,) = opening.lines
    return opening.told(head.receipt, {"labels": labels, "features": head.features.size, "sigma": line.parameter})


def _done(options: argparse.Namespace, labels: Sequence[str], views: Sequence[View]) -> PrivateHead | None:
    """The head of ``--output`` if this very command has fitted it."""
    from langchain_dpicl import PrivateHead, local
    from langchain_dpicl.cli.once import done

    def load(path: Path) -> PrivateHead:
        return PrivateHead.load(path, local.local_embeddings(), llm=_model(options))

    def is_same(head: PrivateHead) -> bool:
        return [*head.labels, *head.views.views] == [*labels, *views]

    return done(options, "head", load, is_same, options.public)


def answer_by_head(options: argparse.Namespace, head: PrivateHead | None = None) -> int:
    """Answer the questions, then the test. ``head``: that of a server's file, instead of the options'."""
    from langchain_dpicl import PrivateHead, local
    from langchain_dpicl.aggregators.votes import reader_of
    from langchain_dpicl.cli.session import known_answers, receipt_words, shortened

    started = time.monotonic()
    if head is None:
        used = {"mode", "head", "question", "test", "test_columns", "limit", "input_key", "output_key"}
        used |= {"model", "model_url", *READING}
        check_only(options, used, "--mode head")
        if not options.head:
            raise InvalidParameter("--head", None, "the file that `dpicl fit` has written")
        if not options.question and not options.test:
            raise InvalidParameter("--question", None, "at least one --question, or --test FILE")
        head = PrivateHead.load(options.head, local.local_embeddings(), llm=_model(options))
    outputs: dict[str, Any] = {"label_of": reader_of(list(head.labels))}
    keys = keys_in(options, "test", keys_of(options))
    tests = read_file(options, options.test, keys, **outputs)[: options.limit] if options.test else []
    known = known_answers(tests, keys, outputs)
    answers = head.batch([*options.question, *(text for text, _ in known)])
    asked = [
        {"question": text, "private": found["label"], "confidence": found["confidence"]}
        for text, found in zip(options.question, answers, strict=False)
    ]
    facts: dict[str, Any] = {"answers": asked, "receipt": head.receipt}
    lines = [f"  {shortened(entry['question'])}\n    {entry['private']} ({entry['confidence']:.0%})" for entry in asked]
    if known:
        right = [found["label"] == label for found, (_, label) in zip(answers[len(asked) :], known, strict=True)]
        share = sum(right) / len(right)
        error = math.sqrt(share * (1.0 - share) / len(right))
        facts |= {"accuracy": share, "standard_error": error, "held_out": len(right)}
        lines.append(f"    {len(right)} test questions: {share:.1%} right (standard error {error:.1%})")
    facts["seconds"] = round(time.monotonic() - started, 1)
    lines.append(f"{receipt_words(head.receipt, 'fits')}: answers cost nothing; {facts['seconds']:.1f} seconds.")
    return show(options, facts, "\n".join(lines))
