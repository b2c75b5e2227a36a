"""Mistake 12: n releases, accounted or charged as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from exact import EPSILONS, Law, hockey_stick, mixture, together
from owner_laws import SIGMA, vote_law

from langchain_dpicl.budget import BudgetLine
from langchain_dpicl.privacy import MECHANISMS, Line, PLDAccountant, accountant
from langchain_dpicl.privacy.composition import Composition
from langchain_dpicl.privacy.losses import Losses

RATE = 0.5


def as_one(parts: Sequence[tuple[Losses, int]], places: int | None = None) -> Composition:
    """The mutant: counts are not looked at, as one event of dp-accounting 0.6.0 does."""
    return Composition([(losses, min(count, 1)) for losses, count in parts])


def check_accountant() -> None:
    """Exact enumeration: n votes on fresh samples, the winners' joint law with one owner and without, both ways, are no
    easier to tell apart than the accountant says of n releases."""
    absent: Law = vote_law(("no", "no"))
    present: Law = mixture([(1 - RATE, absent), (RATE, vote_law(("no", "yes")))])
    for count in (1, 2, 6):
        schedule = [Line(MECHANISMS["vote"]().profile(SIGMA), RATE, count)]
        p, q = together(*[present] * count), together(*[absent] * count)
        for epsilon in EPSILONS:
            true = max(hockey_stick(p, q, epsilon), hockey_stick(q, p, epsilon))
            claimed = PLDAccountant().delta(schedule, epsilon) if epsilon >= 0 else 1.0
            assert true <= claimed + 1e-12, f"{count} releases: delta({epsilon}) {true:.6g}; {claimed:.6g} is claimed"


def test_12_compositions_accounted_as_one_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    check_accountant()
    monkeypatch.setattr(accountant, "Composition", as_one)
    with pytest.raises(AssertionError, match=r"^[26] releases"):
        check_accountant()


def check_batch(sealed: Any) -> None:
    """Counting: a batch of three questions, each answered from a draw of its own, is three releases in the ledger."""
    before = sealed.budget.spent()
    answers = sealed.batch([{"input": text} for text in ("one", "two", "three")])
    spent = sealed.budget.spent() - before
    assert spent == len(answers), f"{len(answers)} answers, and {spent} release is charged"


def test_12_a_batch_charged_as_one_is_caught(sealed_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = sealed_of(lambda _: "Positive")
    check_batch(sealed)
    charging: Any = BudgetLine.charging

    def once(self: BudgetLine, transaction: Any, queries: Any, principal: Any, **options: Any) -> Any:
        entries = yield from charging(self, transaction, queries[:1], principal, **options)
        return list(entries) * len(queries)

    monkeypatch.setattr(BudgetLine, "charging", once)
    with pytest.raises(AssertionError, match="is charged"):
        check_batch(sealed)
