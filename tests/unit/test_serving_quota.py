"""A quota: the most that one caller gets of a budget that all callers share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from by_hand import charge
from fastapi.testclient import TestClient
from serving_files import VOTE, file_of, merged
from serving_files import models as models

from langchain_dpicl import InvalidParameter, PrivacyBudget, QuotaExceeded
from langchain_dpicl.budget.upkeep import LedgerReport, recover
from langchain_dpicl.errors import InvalidConfiguration, PrivacyBudgetExceeded
from langchain_dpicl.serving.app import create_app
from langchain_dpicl.serving.config import read
from langchain_dpicl.serving.guards import hash_of, new_key

Make = Callable[..., PrivacyBudget]
KEYS = {name: new_key() for name in ("alice", "bob", "carol")}
SHARED: dict[str, Any] = {**VOTE, "keys": {name: hash_of(key) for name, key in KEYS.items()}}


def line_of(budget: PrivacyBudget, mechanism: str = "vote") -> Any:
    return budget.line(mechanism, 0.1)


def test_who_has_had_its_part_is_told_whose_it_was_and_others_go_on(tmp_path: Path) -> None:
    settings = read(file_of(tmp_path, merged(SHARED, {"budget.quota": {"alice": 2, "bob": 20}})))
    with TestClient(create_app(settings)) as client:

        def post(name: str, what: str, body: Any) -> Any:
            return client.post(f"/answer/{what}", json=body, headers={"authorization": f"Bearer {KEYS[name]}"})

        def ask(name: str, question: str) -> int:
            return int(post(name, "invoke", {"input": {"text": question}}).status_code)

        def line(name: str) -> dict[str, Any]:
            found = client.get("/answer/budget", headers={"authorization": f"Bearer {KEYS[name]}"}).json()
            (only,) = found["lines"].values()
            return {key: only.get(key) for key in ("spent", "quota", "quota_left")}

        assert line("alice") == {"spent": 0, "quota": 2, "quota_left": 2}
        assert [ask("alice", "a 1"), ask("alice", "a 1"), ask("alice", "a 2")] == [200, 200, 200], "a replay is free"
        refused = post("alice", "invoke", {"input": {"text": "a 3"}})
        assert (refused.status_code, refused.json()["error"]) == (429, "QuotaExceeded")
        assert "the quota of 'alice' on the budget 'tickets' is 2 answers" in refused.json()["message"]
        assert post("alice", "stream", {"input": {"text": "a 3"}}).status_code == 429
        assert line("alice") == {"spent": 2, "quota": 2, "quota_left": 0}, "refusals cost nothing"
        assert ask("alice", "a 2") == 200, "and what it has is answered again"
        many = {"inputs": [{"text": f"b {i}"} for i in range(15)]}
        assert [post("bob", "batch", many).status_code, ask("bob", "b 20")] == [200, 200]
        assert post("bob", "batch", {"inputs": [{"text": f"c {i}"} for i in range(5)]}).status_code == 429, (
            "all or none"
        )
        assert line("bob") == {"spent": 18, "quota": 20, "quota_left": 4}
        assert line("carol") == {"spent": 18, "quota": None, "quota_left": None}
        assert [ask("carol", f"a d {i}") for i in range(13)] == [200] * 12 + [429], "the budget is what all are held by"


def test_it_counts_for_every_process_and_outlives_them(budget_of: Make, tmp_path: Path) -> None:
    about: dict[str, Any] = {"ledger": f"sqlite:///{tmp_path / 'shared.db'}", "name": "shared", "quota": 5}
    lines = [line_of(budget_of(releases=40, **about)) for _ in range(2)]

    def one(number: int) -> bool:
        try:
            charge(lines[number % 2], principal="alice")
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(one, range(24))) == 5
    later = budget_of(releases=40, **{**about, "quota": 6})
    charge(line_of(later), principal="alice")
    with pytest.raises(QuotaExceeded, match="6 answers, of which 0 are left, and 1 are needed"):
        charge(line_of(later), principal="alice")
    charge(line_of(later), principal="bob")
    assert (later.spent(), later.principals()) == (7, {"alice": {"vote": 6}, "bob": {"vote": 1}})
    lower = budget_of(releases=40, **{**about, "quota": 3})
    with pytest.raises(QuotaExceeded, match="3 answers, of which 0 are left"):
        charge(line_of(lower), principal="alice")
    free = budget_of(releases=40, **{**about, "quota": None})
    charge(line_of(free), principal="alice")
    assert (free.spent(), free.epsilon_spent()) == (8, later.epsilon_spent()), "the budget counts all of them once"
    assert LedgerReport(about["ledger"]).show()["budgets"][0]["lines"]["vote"]["spent"] == 8


def test_a_ledger_that_is_brought_back_has_its_quotas(budget_of: Make, tmp_path: Path) -> None:
    about: dict[str, Any] = {"ledger": f"sqlite:///{tmp_path / 'shared.db'}", "name": "shared", "quota": 5}
    budget = budget_of(releases=40, **about)
    charge(line_of(budget), 3, principal="alice")
    budget.close()
    recover(about["ledger"])
    again = budget_of(releases=40, **about)
    charge(line_of(again), 2, principal="alice")
    with pytest.raises(QuotaExceeded):
        charge(line_of(again), principal="alice")
    again.close()
    (tmp_path / "shared.db.witness").unlink()
    recover(about["ledger"])
    with pytest.raises(PrivacyBudgetExceeded, match="0 of 40"):
        charge(line_of(budget_of(releases=40, **about)), principal="bob")


def test_answers_of_tokens_count_one_each(budget_of: Make) -> None:
    budget = budget_of(releases=100, quota=2)
    line = line_of(budget, "tokens")
    for _ in range(2):
        charge(line, principal="alice", units=20)
    with pytest.raises(QuotaExceeded):
        charge(line, principal="alice", units=20)
    assert budget.spent() == 40


@pytest.mark.parametrize(
    ("quota", "more", "parameter"),
    [
        (0, {}, "quota"),
        (True, {}, "quota"),
        ({"alice": 0}, {}, "quota['alice']"),
        (3, {"scope": "per_principal"}, "quota"),
    ],
)
def test_what_is_no_quota_is_refused(quota: Any, more: dict[str, Any], parameter: str, budget_of: Make) -> None:
    with pytest.raises(InvalidParameter) as caught:
        budget_of(quota=quota, **more)
    assert caught.value.parameter == parameter


def test_a_caller_must_be_known(budget_of: Make) -> None:
    budget = budget_of(quota=3)
    with pytest.raises(InvalidParameter, match="limits what each one takes"):
        charge(line_of(budget))
    assert budget.spent() == 0


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"budget.quota": 0}, "budget.quota"),
        ({"budget.quota": {"nobody": 3}}, "budget.quota.nobody"),
        ({"budget.quota": 3, "budget.scope": "per_principal"}, "budget.quota"),
    ],
)
def test_a_file_tells_its_mistakes(changes: dict[str, Any], place: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        read(file_of(tmp_path, merged(SHARED, changes)))
    assert place in dict(caught.value.mistakes)
