"""What ``demo`` and ``answer`` share: questions put to a sealed release, shown beside answers that are not private."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tqdm import tqdm

from langchain_dpicl.budget import PrivacyBudget, Receipt
from langchain_dpicl.budget.ledger import UNWATCHED
from langchain_dpicl.cli.compare import Comparison, compare
from langchain_dpicl.errors import DPICLError, InvalidParameter, LedgerError
from langchain_dpicl.privacy import PrivacyPlan
from langchain_dpicl.release.aggregate import SealedRelease
from langchain_dpicl.store.base import PrivateStore


def frozen_plan(name: str, ledger: str) -> PrivacyPlan | None:
    """The plan that a ledger holds under this name; None without one. Makes no ledger."""
    with contextlib.suppress(InvalidParameter, LedgerError):  # no ledger, or no such budget in it
        budget = PrivacyBudget.open(name, ledger, witness=UNWATCHED)
        try:
            return budget.plan
        finally:
            budget.close()
    return None


def delta_of(given: float | None, plan: PrivacyPlan | None, store: PrivateStore) -> float:
    """The delta that was given, or the frozen plan's. Before there is a plan: a tenth of 1 / number of owners."""
    if given is not None:
        return given
    return 0.1 / max(1, store.owner_count) if plan is None else plan.delta


@dataclass(frozen=True)
class Question:
    """A query, and the right label where it is known."""

    text: str
    expected: str | None = None


@dataclass
class Session:
    """Asks, prints and keeps the score. With ``as_json`` it prints nothing until `finish`."""

    chain: SealedRelease
    input_key: str
    as_json: bool
    asked: list[dict[str, Any]] = field(default_factory=list)
    tested: list[tuple[Question, Comparison]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str = "") -> None:
        """A line for people."""
        if not self.as_json:
            print(text, flush=True)

    def ask(self, questions: Sequence[Question], *, compared: bool) -> None:
        """Answer each question; with ``compared`` show what privacy costs."""
        with self._keeping():
            self._ask(questions, compared)

    def test(self, questions: Sequence[Question]) -> None:
        """Answer questions whose answer is known, with a progress bar, and print the scores."""
        if questions:
            with self._keeping():
                self._test(questions)

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        """An error in the middle carries what was answered, and charged, before it."""
        try:
            yield
        except DPICLError as error:
            error.__dict__["answered"] = {"answers": self.asked, **self.scores()}
            raise

    def _ask(self, questions: Sequence[Question], compared: bool) -> None:
        for question in questions:
            if compared:
                found = compare(self.chain, {self.input_key: question.text})
                entry: dict[str, Any] = {"question": question.text, **asdict(found)}
            else:
                answered = self.chain.invoke({self.input_key: question.text})
                entry = {"question": question.text, "private": answered["answer"], "receipt": answered["receipt"]}
            self.asked.append(entry)
            self.say(f"\n  {shortened(question.text)}")
            self.say(f"    private answer       {entry['private'] or '(the members abstain)'}")
            if compared:
                self.say(f"    NOT private          ensemble {found.ensemble_not_private}, zero-shot {found.zero_shot}")
            self.say_receipt(entry["receipt"])

    def say_receipt(self, receipt: Receipt) -> None:
        """The receipt in one line."""
        left = "no last answer" if receipt["remaining"] is None else f"{receipt['remaining']} answers left"
        self.say(
            f"    receipt              {receipt['id']}: epsilon {receipt['epsilon_spent']:.3g} of "
            f"{receipt['epsilon']:g} spent at delta {receipt['delta']:.2g}, {left}"
        )

    def _test(self, questions: Sequence[Question]) -> None:
        self.say()
        for question in tqdm(questions, desc="held-out", unit="question", disable=None, file=sys.stderr):
            self.tested.append((question, compare(self.chain, {self.input_key: question.text})))
        for name, value in self.accuracy().items():
            self.say(f"    {name:45s} {value:6.1%}")

    def accuracy(self) -> dict[str, float]:
        """Right answers over all, for the three kinds."""
        total = max(len(self.tested), 1)

        def share(kind: str) -> float:
            right = [getattr(found, kind) == question.expected for question, found in self.tested]
            return right.count(True) / total

        return {
            "private": share("private"),
            "ensemble, NOT private": share("ensemble_not_private"),
            "zero-shot": share("zero_shot"),
        }

    def scores(self) -> dict[str, Any]:
        """What the test showed, for the JSON object."""
        return {"accuracy": self.accuracy(), "held_out": len(self.tested)} if self.tested else {}

    def finish(self, **facts: Any) -> int:
        """The last lines, or the one JSON object."""
        seconds = time.monotonic() - self.started
        if self.as_json:
            answers = {"answers": self.asked, **self.scores(), "seconds": round(seconds, 1)}
            print(json.dumps({**facts, **answers}, indent=2))
        else:
            self.say(f"\n{seconds:.0f} seconds.")
        return 0


def add_common(parser: argparse.ArgumentParser) -> None:
    """The option that every command has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def shortened(text: str, width: int = 110) -> str:
    """One line of so many characters at most."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
