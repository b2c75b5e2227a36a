"""Ask a sealed release from the command line, beside answers that are not private; open the budget of a file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tqdm import tqdm

from langchain_dpicl.budget import PrivacyBudget, Receipt
from langchain_dpicl.budget.ledger import UNWATCHED
from langchain_dpicl.cli.compare import compare
from langchain_dpicl.errors import DPICLError, InvalidParameter, LedgerError
from langchain_dpicl.privacy import PrivacyPlan
from langchain_dpicl.release.sealed import SealedRelease
from langchain_dpicl.store.base import PrivateStore


def open_budget(
    options: argparse.Namespace, store: PrivateStore, releases_of: Callable[[PrivacyPlan | None], int]
) -> PrivacyBudget:
    """Open the budget that `options.add_private_data` declares; ``releases_of`` gets its frozen plan, if any."""
    name = options.name or os.path.basename(options.data).partition(".")[0]
    plan = frozen_plan(name, options.ledger)
    delta = delta_of(options.delta, plan, store)
    return PrivacyBudget(
        options.epsilon, delta, releases_of(plan), ledger=options.ledger, name=name, witness=options.witness
    )


def frozen_plan(name: str, ledger: str) -> PrivacyPlan | None:
    """Return the plan that a ledger holds under this name, or None. Makes no ledger."""
    with contextlib.suppress(InvalidParameter, LedgerError):  # no ledger, or no such budget in it
        budget = PrivacyBudget.open(name, ledger, witness=UNWATCHED)
        try:
            return budget.plan
        finally:
            budget.close()
    return None


def delta_of(given: float | None, plan: PrivacyPlan | None, store: PrivateStore) -> float:
    """Return the given delta, or the frozen plan's. Before there is a plan: a tenth of 1 / number of owners."""
    if given is not None:
        return given
    return 0.1 / max(1, store.owner_count) if plan is None else plan.delta


@dataclass(frozen=True)
class Question:
    """A text to answer, and its right answer if it is known."""

    text: str
    expected: str = ""


@dataclass
class Session(ABC):
    """Asks, prints and keeps the score. With ``as_json`` it prints nothing until `finish`."""

    chain: SealedRelease
    input_key: str
    as_json: bool
    asked: list[dict[str, Any]] = field(default_factory=list)
    tested: list[tuple[str | None, ...]] = field(default_factory=list)
    """For each test question its answers, as `try_answers` returns them, and last the right answer."""
    started: float = field(default_factory=time.monotonic)

    @abstractmethod
    def answer(self, text: str, compared: bool) -> dict[str, Any]:
        """Answer one question: ``private`` and ``receipt``; with ``compared`` also answers that are not private."""

    @abstractmethod
    def try_answers(self, text: str) -> tuple[str | None, ...]:
        """Answer one test question in every way that is compared. The first answer is private."""

    @abstractmethod
    def scores(self) -> dict[str, Any]:
        """Return the scores of the test, for the JSON object; nothing without a test."""

    @abstractmethod
    def score_lines(self) -> list[str]:
        """Return the scores of the test, for people."""

    def say(self, text: str = "") -> None:
        """Print a text for people."""
        if not self.as_json:
            print(text, flush=True)

    def ask(self, questions: Sequence[Question], *, compared: bool) -> None:
        """Answer each question; with ``compared`` show the cost of privacy."""
        with self._keep_answers():
            for question in questions:
                entry = {"question": question.text, **self.answer(question.text, compared)}
                self.asked.append(entry)
                self._show(entry)

    def test(self, questions: Sequence[Question]) -> None:
        """Answer questions with known answers under a progress bar, and print the scores."""
        if not questions:
            return
        with self._keep_answers():
            for question in tqdm(questions, desc="held-out", unit="question", disable=None, file=sys.stderr):
                self.tested.append((*self.try_answers(question.text), question.expected))
        self.say("\n" + "\n".join(f"    {line}" for line in self.score_lines()))

    def finish(self, **facts: Any) -> int:
        """Print the last line, or the one JSON object."""
        seconds = time.monotonic() - self.started
        if self.as_json:
            print(json.dumps({**facts, **self._answered(), "seconds": round(seconds, 1)}, indent=2))
        self.say(f"\n{seconds:.0f} seconds.")
        return 0

    def _answered(self) -> dict[str, Any]:
        tested = {**self.scores(), "held_out": len(self.tested)} if self.tested else {}
        return {"answers": self.asked, **tested}

    @contextlib.contextmanager
    def _keep_answers(self) -> Iterator[None]:
        """Attach to an error the answers that were charged before it."""
        try:
            yield
        except DPICLError as error:
            error.__dict__["answered"] = self._answered()
            raise

    def _show(self, entry: dict[str, Any]) -> None:
        receipt = entry["receipt"]
        nothing = "-" if "keywords" in entry else "(the members abstain)"
        lines = [("private answer", entry["private"] or nothing)]
        if entry.get("keywords"):
            lines.append(("released keywords", ", ".join(entry["keywords"])))
        if "ensemble_not_private" in entry:
            lines.append(("NOT private", f"ensemble {entry['ensemble_not_private']}, zero-shot {entry['zero_shot']}"))
        elif "zero_shot" in entry:
            lines.append(("zero-shot", entry["zero_shot"]))
        if receipt is not None:
            if receipt["outcome"] != "released":
                lines.append(("released", f"nothing: {receipt['outcome']}"))
            lines.append(("receipt", receipt_words(receipt)))
        self.say(f"\n  {shortened(entry['question'])}")
        for name, words in lines:
            self.say(f"    {name:20s} {words}")


class LabelSession(Session):
    """Asks for labels."""

    def answer(self, text: str, compared: bool) -> dict[str, Any]:
        """Answer with a label."""
        if compared:
            return asdict(compare(self.chain, {self.input_key: text}))
        found = self.chain.invoke({self.input_key: text})
        return {"private": found["answer"], "receipt": found["receipt"]}

    def try_answers(self, text: str) -> tuple[str | None, ...]:
        """Return the private label, the plain majority and the zero-shot label."""
        found = compare(self.chain, {self.input_key: text})
        return found.private, found.ensemble_not_private, found.zero_shot

    def scores(self) -> dict[str, Any]:
        """Return the share of right labels."""
        names = ("private", "ensemble, NOT private", "zero-shot")
        right = zip(*([label == expected for label in labels] for *labels, expected in self.tested), strict=True)
        return {"accuracy": {name: sum(each) / len(each) for name, each in zip(names, right, strict=True)}}

    def score_lines(self) -> list[str]:
        """One line for each way to answer."""
        return [f"{name:45s} {value:6.1%}" for name, value in self.scores()["accuracy"].items()]


def receipt_words(receipt: Receipt) -> str:
    """Return a receipt in one line."""
    left = "no last answer" if receipt["remaining"] is None else f"{receipt['remaining']} answers left"
    return (
        f"{receipt['id']}: epsilon {receipt['epsilon_spent']:.3g} of {receipt['epsilon']:g} spent at delta "
        f"{receipt['delta']:.2g}, {left}"
    )


def shortened(text: str, width: int = 110) -> str:
    """Return the text as one line of at most ``width`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
