"""Ask a sealed release from the command line, for labels or texts, beside answers that are not private.

The comparison is for the owner of the data, who wants to see what privacy costs. The ensemble's plain majority is NOT
private: no release contains it, and a service must not show it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from tqdm import tqdm

from langchain_dpicl import local
from langchain_dpicl.aggregators import Aggregator, EmbeddingMean, Keywords, NoisyVote, ReleasedKeywords
from langchain_dpicl.aggregators.votes import reader_of
from langchain_dpicl.budget import PrivacyBudget, Receipt
from langchain_dpicl.budget.ledger import UNWATCHED
from langchain_dpicl.budget.line import RELEASED
from langchain_dpicl.calls.flow import Flow, run
from langchain_dpicl.cli import lab, show
from langchain_dpicl.errors import InvalidParameter, LedgerError, MembersAbstained
from langchain_dpicl.members.chains import ModelChoice, Wording, keywords_to_answer, read_lines
from langchain_dpicl.privacy import PrivacyPlan
from langchain_dpicl.private.boundary import run_private
from langchain_dpicl.release.ensemble import PrivateEnsemble
from langchain_dpicl.release.sealed import DPAggregate, SealedRelease
from langchain_dpicl.release.transaction import Charged, Request, transact
from langchain_dpicl.selection import PoissonExampleSelector
from langchain_dpicl.store.base import PrivateStore

_WAYS = {
    "private": "private",
    "head": "private, by a head",
    "ensemble_not_private": "ensemble, NOT private",
    "zero_shot": "zero-shot",
}
"""The ways to answer a test question: the key in an answer, and the name in the scores."""


def open_budget(
    options: argparse.Namespace,
    store: PrivateStore,
    releases_of: Callable[[PrivacyPlan | None], int],
    suffix: str = "",
    **more: Any,
) -> PrivacyBudget:
    """Open the budget that `cli.add_private_data` declares. ``releases_of`` gets its frozen plan, or None.

    Its default name is the file's, with this ``suffix``. ``more``: further parameters of the budget.
    Without ``--delta`` it is the frozen plan's; before there is a plan, a tenth of 1 / number of owners.
    """
    name = options.name or os.path.basename(options.data).partition(".")[0] + suffix
    try:
        with contextlib.closing(PrivacyBudget.open(name, options.ledger, witness=UNWATCHED)) as frozen:
            plan = frozen.plan
    except (InvalidParameter, LedgerError):  # no ledger, or no such budget in it; looking makes none
        plan = None
    delta = options.delta
    if delta is None:
        delta = 0.1 / max(1, store.owner_count) if plan is None else plan.delta
    place = options.ledger, name
    return PrivacyBudget(options.epsilon, delta, releases_of(plan), *place, witness=options.witness, **more)


def known_answers(
    tests: Sequence[Mapping[str, Any]], options: argparse.Namespace, labels: list[str] | None
) -> list[tuple[str, str]]:
    """The text and the right answer of each test record, which `cli.data.read_file` has checked."""
    label_of = reader_of(labels) or str
    return [(record[options.input_key], label_of(record[options.output_key]) or "") for record in tests]


@dataclass
class Session:
    """Asks, prints and keeps the score. With ``--json`` it prints nothing until `finish`."""

    chain: SealedRelease
    options: argparse.Namespace
    answer: Callable[[str, bool], dict[str, Any]]
    """Answers a question: ``private`` and ``receipt``; if it is to be compared, also answers that are not private."""
    score: Callable[[list[Any], list[str]], Any]
    """Compares answers with the right ones: an accuracy, or measures by name."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    tested: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """The answers to each test question, and the right answer."""
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str = "") -> None:
        """Print a text for people."""
        if not self.options.json:
            print(text, flush=True)

    def ask(self, questions: Sequence[str], *, compared: bool) -> None:
        """Answer each question; with ``compared`` show the cost of privacy."""
        self.options.answered = self._answered
        for question in questions:
            entry = {"question": question, **self.answer(question, compared)}
            self.asked.append(entry)
            receipt = entry["receipt"]
            nothing = "-" if "keywords" in entry else "(the members abstain)"
            lines = {"private answer": entry["private"] or nothing}
            if "details" in entry:
                counts = ", ".join(f"{label} {count}" for label, count in entry["details"]["counts"].items())
                lines["confidence"] = f"{entry['details']['confidence']:.0%}; noisy counts: {counts}"
            if "head" in entry:
                lines["private, by a head"] = entry["head"]
            if entry.get("keywords"):
                lines["released keywords"] = ", ".join(entry["keywords"])
            if "ensemble_not_private" in entry:
                zero = f", zero-shot {entry['zero_shot']}" if "zero_shot" in entry else ""
                lines["NOT private"] = f"ensemble {entry['ensemble_not_private']}{zero}"
            elif "zero_shot" in entry:
                lines["zero-shot"] = entry["zero_shot"]
            if receipt is not None:
                if receipt["outcome"] != RELEASED:
                    lines["released"] = f"nothing: {receipt['outcome']}"
                lines["receipt"] = receipt_words(receipt)
            self.say(f"\n  {shortened(question)}")
            for name, words in lines.items():
                self.say(f"    {name:20s} {words}")

    def test(self, questions: Sequence[tuple[str, str]]) -> None:
        """Answer questions whose right answers are known, under a progress bar, and print the scores."""
        if not questions:
            return
        self.options.answered = self._answered
        for text, expected in tqdm(questions, desc="held-out", unit="question", disable=None, file=sys.stderr):
            self.tested.append((self.answer(text, True), expected))
        self.say()
        for way, score in self._scores().items():
            if isinstance(score, float):
                self.say(f"    {way:45s} {score:6.1%}")
            else:
                self.say(f"    {way:20s} " + "  ".join(f"{name} {value:.3f}" for name, value in score.items()))

    def finish(self, **facts: Any) -> int:
        """Print the last line, or the one JSON object."""
        seconds = time.monotonic() - self.started
        found = {**facts, **self._answered(), "seconds": round(seconds, 1)}
        return show(self.options, found, f"\n{seconds:.0f} seconds.")

    def _scores(self) -> dict[str, Any]:
        answers, right = zip(*self.tested, strict=True)
        ways = [(key, way) for key, way in _WAYS.items() if key in answers[0]]
        return {way: self.score([answer[key] for answer in answers], list(right)) for key, way in ways}

    def _answered(self) -> dict[str, Any]:
        found: dict[str, Any] = {"answers": self.asked}
        if self.tested:
            scores = self._scores()
            found["accuracy" if isinstance(scores["private"], float) else "scores"] = scores
            found["held_out"] = len(self.tested)
        return found


def label_session(
    options: argparse.Namespace, budget: PrivacyBudget, selector: PoissonExampleSelector, member: Any, vote: NoisyVote
) -> Session:
    """Ask for labels, and score the share of right ones. ``member``: None for a `LabelVote`."""
    release = PrivateEnsemble(selector, member) | DPAggregate(vote, budget, return_receipt=True)

    def answer(text: str, compared: bool) -> dict[str, Any]:
        asked = {selector.store.input_key: text}
        if compared:
            return compare(release, asked)
        found = release.invoke(asked)
        return {**_released(found["answer"]), "receipt": found["receipt"]}

    def score(given: list[Any], right: list[str]) -> float:
        return sum(1 for a, b in zip(given, right, strict=True) if a == b) / len(right)

    return Session(release, options, answer, score)


def text_session(
    options: argparse.Namespace, budget: PrivacyBudget, selector: PoissonExampleSelector, choice: ModelChoice
) -> Session:
    """Ask for sentences, or for keywords from which a model writes a text.

    Raises `InvalidParameter` for an option of another mode.
    """
    for name, mode in (("domain", "keywords-joint"), ("candidates", "embedding")):
        if getattr(options, name) is not None and options.mode != mode:
            raise InvalidParameter(f"--{name}", getattr(options, name), f"left out, or --mode {mode}")
    if options.k is not None and options.mode == "embedding":
        raise InvalidParameter("--k", options.k, "left out unless keywords are released")
    form = r"\d{1,9}" if options.mode == "keywords-joint" else r"\d{1,9}(-\d{1,9})?"
    if options.k is not None and not re.fullmatch(form, options.k, re.ASCII):
        raise InvalidParameter("--k", options.k, "a whole number, or for keywords-ptr also a range such as 5-10")
    least, _, most = (options.k or "").partition("-")

    def model(temperature: float) -> Any:
        return choice.load(max_tokens=options.max_tokens, temperature=temperature)

    wording = Wording(options.input_key, options.output_key, options.instruction)
    member, writer = wording.member(model(0.0)), None
    if options.mode == "embedding":
        public = read_lines("--candidates", options.candidates) if options.candidates else wording.member(model(0.9))
        aggregator: Aggregator[Any] = EmbeddingMean(local.local_embeddings(), public, options.n_candidates)
    else:
        if options.mode == "keywords-joint":
            domain = read_lines("--domain", options.domain) if options.domain else "query"
            aggregator = Keywords.joint_em(domain, int(least or 10))
        else:
            aggregator = Keywords.ptr((int(least), int(most or least)) if least else (15, 30))
        chain = model(0.0) | StrOutputParser() | wording.first_answer()
        writer = keywords_to_answer(chain, PromptTemplate.from_template("{asked}{suggestions}.\n\n{field}"))
    release = PrivateEnsemble(selector, member) | DPAggregate(aggregator, budget, return_receipt=True)

    def answer(text: str, compared: bool) -> dict[str, Any]:
        """If the members abstain there is no text, and no receipt."""
        asked = {options.input_key: text}
        more: dict[str, Any] = {"zero_shot": str(member.invoke({**asked, "examples": ""}))} if compared else {}
        try:
            found = release.invoke(asked)
        except MembersAbstained:
            return {"private": None, "receipt": None, **more}
        words = written = found["answer"]
        if writer is not None:
            more["keywords"] = list(words)
            query = {"asked": wording.asked, "field": wording.field(text)}
            try:
                given = ReleasedKeywords(words, ranked=words.ranked, fallback=words.fallback, query=query)
                written = str(writer.invoke(given))
            except Exception as error:  # the keywords are charged: a model that fails now must not lose them
                session.say(f"    no text was written: {type(error).__name__}")
                written = None
        return {"private": written, "receipt": found["receipt"], **more}

    def score(given: list[Any], right: list[str]) -> dict[str, float]:
        return dict(lab("evaluation.scores").text_scores([text or "" for text in given], right))

    session = Session(release, options, answer, score)
    return session


def compare(sealed: SealedRelease, values: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one question in three ways, from ONE sample and one charge.

    ``private`` is a release like any other, with the same checks, charge, sampling, noise and ``receipt`` as
    ``sealed.invoke``. Beside it stand the plain majority of the very same members, ``ensemble_not_private``, and, if
    there is a member, its answer without examples, ``zero_shot``. Each is None if nobody gave a label. Raises what
    ``sealed.invoke`` raises, except that abstention is an answer of None.
    """
    vote, ensemble = sealed.aggregator, sealed.ensemble
    if not isinstance(vote, NoisyVote) or vote.scores:
        raise InvalidParameter("sealed", vote, "a release by NoisyVote(labels) without scores")
    compared = object.__new__(_Compared)
    vars(compared).update(vars(sealed))
    (release, majority), receipt = run(transact(compared, values))
    answers = {**_released(release), "receipt": receipt, "ensemble_not_private": majority}
    if ensemble.has_member:
        question = ensemble.public_request(ensemble.check_request(values))
        (output,) = run_private(ensemble.copies, [question], max_concurrency=1)
        index = vote.parse(output)
        answers["zero_shot"] = None if index is None else vote.labels[index]
    return answers


def _released(release: Any) -> dict[str, Any]:
    """The label of a release, and its details if it has some."""
    if isinstance(release, dict):
        return {"private": release["label"], "details": {key: release[key] for key in ("confidence", "counts")}}
    return {"private": release if isinstance(release, str) else None}


class _Compared(SealedRelease):
    """The same release, never replayed, with the plain majority of its members beside it."""

    def check(self, values: Any) -> Request:
        """A question that is charged each time."""
        return replace(super().check(values), id=None)

    def work(self, charged: Charged) -> Flow[Any]:
        """The vote, and the majority of the same members."""
        (vote, vector), line = charged.ready, charged.request.line
        values, who = charged.request.asked, charged.participants
        outputs = yield from self.ensemble.outputs(values, line.rate, vote, vector, who)
        counts = vote.counts(outputs)[:-1]
        release = yield partial(vote.aggregate, outputs, line.parameter, self._randomness)
        return release, vote.labels[int(counts.argmax())] if counts.max() > 0 else None

    def kept(self, charged: Charged, release: Any) -> tuple[str, str | None, int]:
        """Abstention is an answer here."""
        return RELEASED, None, 0

    def answer(self, charged: Charged, release: Any, receipt: Receipt) -> Flow[Any]:
        """Both."""
        yield from ()
        return release


def receipt_words(receipt: Receipt, counted: str = "answers") -> str:
    """Return a receipt in one line. ``counted``: what its line counts."""
    left = "no last answer" if receipt["remaining"] is None else f"{receipt['remaining']} {counted} left"
    return (
        f"{receipt['id']}: epsilon {receipt['epsilon_spent']:.3g} of {receipt['epsilon']:g} spent at delta "
        f"{receipt['delta']:.2g}, {left}"
    )


def shortened(text: str, width: int = 110) -> str:
    """Return the text as one line of at most ``width`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
