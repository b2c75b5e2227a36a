"""The common part of commands that release something once, into a file: ``fit``, ``table`` and ``topics``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from langchain_dpicl.cli import show
from langchain_dpicl.cli.session import budget_name, open_budget, receipt_words
from langchain_dpicl.durable import replacing, writing
from langchain_dpicl.errors import DPICLError, InvalidParameter

if TYPE_CHECKING:
    from langchain_dpicl.budget import PrivacyBudget, Receipt
    from langchain_dpicl.privacy import PlanLine
    from langchain_dpicl.store import ExemplarStore


class WithReceipt(Protocol):
    """The product of a release."""

    @property
    def receipt(self) -> Receipt:
        """Its price."""


P = TypeVar("P", bound=WithReceipt)


def done(
    options: argparse.Namespace,
    made: str,
    load: Callable[[Path], P],
    is_same: Callable[[P], bool],
    *public: str | None,
) -> P | None:
    """The product of ``--output`` if this very command has made it; None if it is not there, or not complete.

    ``made`` is its word, with which its budget is named, too. ``public``: the public files that the command reads.
    Raises `InvalidParameter` for any other file.
    """
    from langchain_dpicl.budget.upkeep import LedgerReport
    from langchain_dpicl.once.sums import part_of

    output = Path(options.output)
    read = [path for path in (options.data, *public) if path]
    if not all(map(os.path.exists, [output, *read])) or part_of(output).exists():
        return None
    bound = "a new file: this one is there"
    with contextlib.suppress(DPICLError):
        found = load(output)
        receipt = found.receipt
        with contextlib.closing(LedgerReport(options.ledger)) as ledger:
            known = ledger.receipt(receipt["id"])
        promise = receipt["budget"], receipt["epsilon"]
        work = "fit" if made == "head" else "release"
        thing = made if made.endswith("s") else f"a {made}"
        if known != {**receipt, "replayed": False} or not is_same(found):
            bound += f", {thing} of another {work}"
        elif promise != (budget_name(options, f"-{made}"), options.epsilon):
            bound += f", {thing} of another promise"
        elif any(os.path.getmtime(path) > output.stat().st_mtime for path in read):
            bound += f", {thing} older than the data; the next {work} has an --output of its own"
        else:
            return found
    raise InvalidParameter("--output", options.output, bound)


class BudgetOpening:
    """The opening of a command's budget, when all that needs none is checked, and what it says of a release after it.

    ``made`` is the product's word, ``counted`` what the budget counts, ``releases`` as of `PrivacyBudget`.
    """

    budget: PrivacyBudget

    def __init__(
        self, options: argparse.Namespace, store: ExemplarStore, made: str, counted: str, releases: Any
    ) -> None:
        self._options = options
        self._store = store
        self._made = made
        self._counted = counted
        self._releases = releases
        self._started = time.monotonic()

    def __call__(self, check: Callable[[PrivacyBudget], None]) -> PrivacyBudget:
        """Open it. Raises what ``check`` raises, before a ledger is made."""
        suffix = f"-{self._made}"
        self.budget = open_budget(self._options, self._store, lambda _: self._releases, suffix, check)
        return self.budget

    @property
    def lines(self) -> list[PlanLine]:
        """The lines of the frozen budget."""
        assert self.budget.plan is not None
        return list(self.budget.plan.lines.values())

    def told(self, receipt: Receipt, facts: Mapping[str, Any], words: Sequence[str] = ()) -> int:
        """Print the ``facts``, or the ``words``, with the promise and the receipt. Returns the exit status 0."""
        seconds = time.monotonic() - self._started
        output = self._options.output
        promise = {"epsilon": self.budget.epsilon, "delta": self.budget.delta, "receipt": receipt}
        text = [
            f"{self._store!r}; {self.budget!r}",
            *(f"released: {line.describe()}" for line in self.lines),
            *words,
            receipt_words(receipt, self._counted),
            f"{output} answers from now on, at no further cost; {seconds:.0f} seconds.",
        ]
        found = {"output": output, **facts, **promise, "seconds": round(seconds, 1)}
        return show(self._options, found, "\n".join(text))


def check_name(options: argparse.Namespace, counted: str) -> None:
    """Refuse several releases of one budget without ``--name``. ``counted``: the option that counts them."""
    if getattr(options, counted) > 1 and options.name is None:
        bound = f"given with --{counted} above 1: the file's name, which it would have, is another one for the next"
        raise InvalidParameter("--name", None, bound)


def write_report(path: str | None, report: Mapping[str, Any] | None, made: str) -> None:
    """Write the operator's report, if there is a path for it. Its owner alone may read it."""
    if path is not None:
        with writing("--report", path, f"; the {made} is"), replacing(Path(path)) as file:
            file.write(json.dumps(report).encode() + b"\n")


def listed(option: str, given: str) -> list[str]:
    """The public texts of an option: separated by commas, or after an "@" a file with one a line."""
    from langchain_dpicl.members.chains import read_lines

    if given.startswith("@"):
        return read_lines(option, given[1:])
    if given.lstrip().startswith(("[", "{")) or Path(given).is_file():
        raise InvalidParameter(option, given, "texts separated by commas, or @ and the name of a file")
    return [text.strip() for text in given.split(",")]
