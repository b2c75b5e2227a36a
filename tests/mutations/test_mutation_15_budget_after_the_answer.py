"""Mistake 15: answer first, and look at the budget after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ears import Ears, outside

from langchain_dpicl import PrivacyBudgetExceeded
from langchain_dpicl.budget import Charge
from langchain_dpicl.calls.flow import run
from langchain_dpicl.release.sealed import SealedRelease
from langchain_dpicl.release.transaction import Charged, charge, checked

MEMBERS, RELEASES = 4, 2


def check(sealed_of: Callable[..., Any]) -> None:
    """Counting: what the ledger says when each member is called. All of a release's members find it charged, and beyond
    the budget none is called."""
    found, budgets = Ears(), Ears()

    def member(_: dict[str, Any]) -> str:
        with outside():
            found.append(budgets[0].spent())
        return "Positive"

    sealed = sealed_of(member, members=MEMBERS, releases=RELEASES)
    budgets.append(sealed.budget)
    for asked in range(1, RELEASES + 1):
        sealed.invoke({"input": "how is it?"})
        assert found[-MEMBERS:] == [asked] * MEMBERS, f"release {asked} began with {found[-MEMBERS:]} charged"
    with pytest.raises(PrivacyBudgetExceeded):
        sealed.invoke({"input": "how is it?"})
    assert len(found) == RELEASES * MEMBERS, "members were called beyond the budget"


def charged_at_the_end(self: SealedRelease, values: Any) -> Any:
    """The mutant: the release is made, then charged; over budget the answer is withheld."""
    request, unpaid = checked(self, values), Any
    found = run(self.work(Charged(request, run(self.prepare(request)), unpaid)))
    (charged,) = run(charge(self, [request]))
    assert isinstance(charged.entry, Charge)
    outcome, answer, _ = self.kept(charged, found)
    return self._told(found, request.line.record(charged.entry, outcome, answer))


def looked_at_first_and_charged_at_the_end(self: SealedRelease, values: Any) -> Any:
    """The mutant: refuses where nothing is left, and still lets whatever happens in between go unpaid."""
    self.line().check(1)
    return charged_at_the_end(self, values)


@pytest.mark.parametrize("mutant", [charged_at_the_end, looked_at_first_and_charged_at_the_end])
def test_15_a_budget_that_is_checked_after_the_answer_is_caught(
    mutant: Callable[[SealedRelease, Any], Any], sealed_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(sealed_of)
    monkeypatch.setattr(SealedRelease, "_release", mutant)
    with pytest.raises(AssertionError, match="release 1 began"):
        check(sealed_of)
