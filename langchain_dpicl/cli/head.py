"""The command ``fit``, and ``answer --mode head``: a classifier that is released once, and answers for ever."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli import (
    READING,
    add_model,
    add_parameters,
    add_private_data,
    add_run,
    check_apart,
    check_only,
    given,
    holds_records,
    model_of,
    show,
)
from langchain_dpicl.cli.data import keys_of, private_store, read_file
from langchain_dpicl.durable import replacing
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.parameters import parameters_of

if TYPE_CHECKING:
    from langchain_dpicl import PrivateHead
    from langchain_dpicl.once.fitting import FitReport

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

    Run the same command again to resume an interrupted fit; it is charged once.
    """
    add_run(parser, fit)
    add_private_data(parser, "text", "label")
    add_parameters(
        parser,
        {name: each for name, each in _FIT.items() if name not in ("input_key", "line", "progress")},
        required=["output"],
        labels=" (separated by commas)",
        public=" (a file: one a line, or records)",
        owners=" (default: as the budget, else as the file)",
        output=" (.npz)",
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
    from langchain_dpicl import LabelScores, PrivateHead
    from langchain_dpicl.cli.session import open_budget, receipt_words
    from langchain_dpicl.members.chains import read_lines

    started = time.monotonic()
    check_apart(options, "public")
    labels = [label.strip() for label in options.labels.split(",")]
    public = None
    if options.public and holds_records(options.public):
        keys = keys_of(options)._replace(output_key=None, owner_key=None)
        public = [row[options.input_key] for row in read_file(options, options.public, keys)]
    elif options.public:
        public = read_lines("--public", options.public)
    if (llm := _model(options)) is None and options.score_prompt is not None:
        raise InvalidParameter("--model", None, "the model of the scores with --score-prompt")
    if llm is not None and options.score_prompt is None:
        raise InvalidParameter("--model", options.model, "left out without --score-prompt: a head asks no model")
    scores = None if llm is None else LabelScores(llm, labels, options.score_prompt.replace("\\n", "\n"))
    store = private_store(options, read_file(options, options.data, keys_of(options), labels, is_private=True))
    budget = open_budget(options, store, lambda _: options.fits, "-head")
    made = {"store": store, "labels": labels, "budget": budget, "public": public, "scores": scores}
    asked = given(options, *_FIT.keys() & vars(options).keys())
    head = PrivateHead.fit(**asked | made, progress=options.private_notes)
    if options.report is not None:
        _write_report(options.report, head.fit_report)
    line = budget.line("head", 1.0)
    facts = {
        "output": options.output,
        "labels": labels,
        "features": head.features.size,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "sigma": line.parameter,
        "receipt": head.receipt,
        "seconds": round(time.monotonic() - started, 1),
    }
    text = (
        f"{store!r}; {budget!r}\nreleased: {line.plan_line.describe()}\n{receipt_words(head.receipt, 'fits')}\n"
        f"{options.output} answers from now on, at no further cost; {facts['seconds']:.0f} seconds."
    )
    return show(options, facts, text)


def _write_report(path: str, report: FitReport | None) -> None:
    """Write the operator's report, which its owner alone may read."""
    try:
        with replacing(Path(path)) as file:
            file.write(json.dumps(report and asdict(report)).encode() + b"\n")
        return
    except OSError as error:
        reason = error.strerror or type(error).__name__
    raise InvalidParameter("--report", path, f"a file that can be written ({reason}); the head is")


def answer_by_head(options: argparse.Namespace, head: PrivateHead | None = None) -> int:
    """Answer the questions, then the test. ``head``: that of a server's file, instead of the options'."""
    from langchain_dpicl import PrivateHead, local
    from langchain_dpicl.aggregators.votes import reader_of
    from langchain_dpicl.cli.session import known_answers, receipt_words, shortened

    started = time.monotonic()
    if head is None:
        used = {"mode", "head", "question", "test", "limit", "input_key", "output_key", "model", "model_url", *READING}
        check_only(options, used, "--mode head")
        if not options.head:
            raise InvalidParameter("--head", None, "the file that `dpicl fit` has written")
        if not options.question and not options.test:
            raise InvalidParameter("--question", None, "at least one --question, or --test FILE")
        head = PrivateHead.load(options.head, local.local_embeddings(), llm=_model(options))
    outputs: dict[str, Any] = {"label_of": reader_of(list(head.labels))}
    keys = keys_of(options)
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
