"""Ask a sealed release from the command line, for labels or texts, beside answers that are not private.

The comparison is for the owner of the data, who wants to see what privacy costs. The ensemble's plain majority is NOT
private: no release contains it, and a service must not show it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable
from pydantic_core import to_jsonable_python
from tqdm import tqdm

from langchain_dpicl.aggregators import Aggregator, ReleasedKeywords
from langchain_dpicl.aggregators.votes import VoteDetails
from langchain_dpicl.budget import PrivacyBudget, Receipt
from langchain_dpicl.budget.ledger import UNWATCHED
from langchain_dpicl.budget.line import RELEASED
from langchain_dpicl.calls.flow import Flow, run
from langchain_dpicl.cli import lab, show
from langchain_dpicl.errors import InvalidParameter, LedgerError, MembersAbstained, PrivacyWarning
from langchain_dpicl.members.chains import Wording, keywords_to_answer
from langchain_dpicl.privacy import PrivacyPlan
from langchain_dpicl.private.boundary import ABSTAIN, run_private
from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.release.sealed import DPAggregate, SealedRelease
from langchain_dpicl.release.transaction import Charged, Request, transact
from langchain_dpicl.spec import Spec
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.records import RecordKeys

_WAYS = {
    "private": "private",
    "head": "private, by a head",
    "ensemble_not_private": "ensemble, NOT private",
    "zero_shot": "zero-shot",
}
"""The ways to answer a test question: the key in an answer, and the name in the scores."""


def budget_name(options: argparse.Namespace, suffix: str = "") -> str:
    """The budget's name in the ledger: as given, or the data file's with this suffix."""
    return str(options.name or os.path.basename(options.data).partition(".")[0] + suffix)


def open_budget(
    options: argparse.Namespace,
    store: ExemplarStore,
    releases_of: Callable[[PrivacyPlan | None], int],
    suffix: str = "",
    check: Callable[[PrivacyBudget], None] | None = None,
    **more: Any,
) -> PrivacyBudget:
    """Open the budget that `cli.add_private_data` declares. ``releases_of`` gets its frozen plan, or None.

    Its default name is the file's, with this ``suffix``. ``more``: further parameters of the budget. Before a plan is
    frozen, ``check`` looks at the same budget in memory: if it raises, no ledger is made.
    Without ``--delta`` it is the frozen plan's; before there is a plan, a tenth of 1 / number of owners.
    """
    name = budget_name(options, suffix)
    try:
        with contextlib.closing(PrivacyBudget.open(name, options.ledger, witness=UNWATCHED)) as frozen:
            plan = frozen.plan
    except (InvalidParameter, LedgerError):  # no ledger, or no such budget in it; looking makes none
        plan = None
    delta = options.delta
    if delta is None:
        delta = 0.1 / max(1, store.owner_count) if plan is None else plan.delta
    promise = options.epsilon, delta, releases_of(plan)
    if plan is None and check is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "this ledger lives in memory", PrivacyWarning)
            trial = PrivacyBudget(*promise, "sqlite://", name, **more)
        with contextlib.closing(trial):
            check(trial)
    return PrivacyBudget(*promise, options.ledger, name, witness=options.witness, **more)


def known_answers(
    tests: Sequence[Mapping[str, Any]], keys: RecordKeys, outputs: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """The text and the right answer of each test record, which `cli.data.read_file` has checked."""
    label_of = outputs.get("label_of") or str
    return [(record[keys.input_key], label_of(record[str(keys.output_key)]) or "") for record in tests]


@dataclass
class Session:
    """Asks, prints and keeps the score. With ``--json`` it prints nothing until `finish`."""

    release: AnyRelease[Any]
    """Answers come with their receipts."""
    options: argparse.Namespace
    write: Callable[[ReleasedKeywords, str], str] | None = None
    """Writes a text from the keywords that are released for a question."""
    beside: Callable[[str], dict[str, Any]] = lambda question: {}
    """Further answers to a question, by their ways."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    tested: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """The answers to each test question, and the right answer."""
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str = "") -> None:
        """Print a text for people."""
        if not self.options.json:
            print(text, flush=True)

    def answer(self, question: str, compared: bool) -> dict[str, Any]:
        """Answer a question: ``private`` and ``receipt``; if it is to be compared, also answers that are not private.

        If the members abstain there is no answer, and no receipt.
        """
        release, asked = self.release, {self.release.store.input_key: question}
        sealed = release if compared and isinstance(release, SealedRelease) else None
        if sealed is not None and type(sealed.aggregator).majority is not Aggregator.majority:
            found = compare(sealed, asked)
        else:
            found = {"private": None, "receipt": None}
            with contextlib.suppress(MembersAbstained):
                released = release.invoke(asked)
                found = {"private": released["answer"], "receipt": released["receipt"]}
        if sealed is not None and sealed.ensemble.has_member:
            found["zero_shot"] = zero_shot(sealed, asked)
        for way in _WAYS.keys() & found.keys():
            if isinstance(words := found[way], ReleasedKeywords):
                found |= {"keywords": list(words)} if way == "private" else {}
                found[way] = self._written(words, question)
        return {**found, **self.beside(question)}

    def _written(self, words: ReleasedKeywords, question: str) -> str | None:
        """A text of the keywords."""
        if self.write is None:
            return " ".join(words)
        try:
            return self.write(words, question)
        except Exception as error:  # the keywords are charged: a model that fails now must not lose them
            self.say(f"    no text was written: {type(error).__name__}")
            return None

    def ask(self, questions: Sequence[str], *, compared: bool) -> None:
        """Answer each question; with ``compared`` show the cost of privacy."""
        self.options.answered = self._answered
        for question in questions:
            entry = {"question": question, **_plain(self.answer(question, compared))}
            self.asked.append(entry)
            receipt, nothing = entry["receipt"], "-" if "keywords" in entry else "(the members abstain)"
            lines = {"private answer": entry["private"] if entry["private"] not in (None, "") else nothing}
            if "details" in entry:
                lines["confidence"] = f"{entry['details']['confidence']:.0%}; noisy counts: " + ", ".join(
                    f"{label} {count}" for label, count in entry["details"]["counts"].items()
                )
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
        """Of each way: how right its answers are on average, or how like the right texts."""
        answers, right = zip(*self.tested, strict=True)
        found: dict[str, Any] = {}
        for key, way in _WAYS.items():
            if key not in answers[0]:
                continue
            given = [answer[key] for answer in answers]
            if isinstance(self.release, SealedRelease) and not self.release.aggregator.gives_text:
                found[way] = sum(map(self._hit, given, right)) / len(right)
            else:
                found[way] = dict(lab("evaluation.scores").text_scores([text or "" for text in given], list(right)))
        return found

    def _hit(self, answer: Any, right: str) -> float:
        try:
            return 0.0 if answer is None else self.release.aggregator.hit(answer, right)  # type: ignore[attr-defined]
        except Exception:  # a right answer that cannot be read
            return 0.0

    def _answered(self) -> dict[str, Any]:
        found: dict[str, Any] = {"answers": self.asked}
        if self.tested:
            scores = self._scores()
            found["accuracy" if isinstance(scores["private"], float) else "scores"] = scores
            found["held_out"] = len(self.tested)
        return found


def _plain(answers: dict[str, Any]) -> dict[str, Any]:
    """Answers for JSON; of a label with its details the details apart."""
    found: dict[str, Any] = to_jsonable_python(answers)
    for way in _WAYS.keys() & found.keys():
        if isinstance(given := found[way], dict) and given.keys() == VoteDetails.__annotations__.keys():
            found[way] = given["label"]
            if way == "private":
                found["details"] = {name: given[name] for name in ("confidence", "counts")}
    return found


def writer(settings: Spec, store: ExemplarStore) -> Callable[[ReleasedKeywords, str], str]:
    """Return what writes a text from released keywords, with the model and the words of a description."""
    release: Any = settings.release
    wording = Wording(store.input_key, store.output_key or "output", getattr(release, "instruction", None))
    template = PromptTemplate.from_template("{asked}{suggestions}.\n\n{field}")

    @cache
    def chain() -> Runnable[Any, Any]:
        model = settings.model.choice.load(max_tokens=release.max_tokens, temperature=0.0)
        return keywords_to_answer(model | StrOutputParser() | wording.first_answer(), template)

    def write(words: ReleasedKeywords, question: str) -> str:
        query = {"asked": wording.asked, "field": wording.field(question)}
        return str(chain().invoke(ReleasedKeywords(words, ranked=words.ranked, fallback=words.fallback, query=query)))

    return write


def zero_shot(sealed: SealedRelease[Any], values: Mapping[str, Any]) -> Any:
    """Return the member's answer without examples; None if it gives none."""
    question = sealed.ensemble.public_request(sealed.ensemble.check_request(values))
    (output,) = run_private(sealed.ensemble.copies, [question], max_concurrency=1)
    return None if output is ABSTAIN else sealed.aggregator.zero_shot(output, values)


def compare(sealed: SealedRelease[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one question in two ways, from ONE sample and one charge.

    ``private`` is a release like any other, with the same checks, charge, sampling, noise and ``receipt`` as
    ``sealed.invoke``. Beside it stands what most of the very same members say, ``ensemble_not_private``. Each is None
    if nobody gave an answer. Raises what ``sealed.invoke`` raises, except that abstention is an answer of None.
    """
    compared = Compared(sealed.ensemble, DPAggregate(sealed.aggregator, sealed.budget, line=sealed.line_name))
    (release, majority), receipt = run(transact(compared, values))
    return {"private": release, "receipt": receipt, "ensemble_not_private": majority}


class Compared(SealedRelease[Any]):
    """A release that is never replayed, with what most of its members say beside it. NOT private."""

    def check(self, values: Any) -> Request:
        """A question that is charged each time."""
        return replace(super().check(values), id=None)

    def work(self, charged: Charged) -> Flow[Any]:
        """The release, and the majority of the same members."""
        (aggregator, query), line, values = charged.ready, charged.request.line, charged.request.asked
        outputs = yield from self.ensemble.outputs(values, line.rate, aggregator, query, charged.participants)
        release = yield partial(aggregator.aggregate, outputs, line.parameter, self._randomness)
        return release, aggregator.majority(outputs)

    def kept(self, charged: Charged, release: Any) -> tuple[str, str | None, int]:
        """Nothing to be replayed."""
        return self.aggregator.outcome(release[0]), None, 0

    def answer(self, charged: Charged, release: Any, receipt: Receipt) -> Flow[Any]:
        """Both. Abstention is an answer here."""
        with contextlib.suppress(MembersAbstained):
            yield from super().answer(charged, release[0], receipt)
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
