"""`budget/renewal.py` and `ExemplarStore.fingerprint`: several plans on one data set add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from langchain_dpicl import (
    ExemplarStore,
    InvalidParameter,
    LedgerError,
    PlanMismatch,
    PrivacyBudget,
    PrivacyWarning,
    release_threshold,
)
from langchain_dpicl.privacy import PLDAccountant
from langchain_dpicl.store.base import sketch_hash

KEY = b"k" * 32
StoreOf = Callable[..., Any]
Records = Callable[..., list[dict[str, str]]]


def store_with(store_of: StoreOf, owners: range, per_owner: int = 1, **options: Any) -> Any:
    rows = [
        {"input": f"text {i}.{j}", "output": "Positive", "owner": f"owner-{i}"}
        for i in owners
        for j in range(per_owner)
    ]
    return store_of(rows, **options)


# -- sketches ----------------------------------------------------------------------------------------------------------


def test_a_fingerprint_depends_on_the_owners_and_the_key_alone(store_of: StoreOf) -> None:
    one = store_with(store_of, range(10))
    marks = one.fingerprint(KEY)
    assert len(marks) == 10
    assert marks == tuple(sorted(marks))
    assert all(len(mark) == 32 for mark in marks)
    assert store_with(store_of, range(9, -1, -1), 3).fingerprint(KEY) == marks
    assert not set(one.fingerprint(b"other" * 8)) & set(marks)
    assert "owner" not in str(marks)


def test_without_owners_the_exemplars_are_recognised(store_of: StoreOf) -> None:
    one = store_with(store_of, range(5), owner_key=None)
    two = store_with(store_of, range(3, 9), owner_key=None)
    assert len(set(one.fingerprint(KEY)) & set(two.fingerprint(KEY))) == 2


def test_a_large_store_has_a_sketch_of_128_and_shows_what_it_shares(store_of: StoreOf) -> None:
    """A tenth of all owners in both: missed with probability .9^128 < 2e-6, over the choice of the key."""
    one, two = store_with(store_of, range(0, 1100)), store_with(store_of, range(900, 2000))
    for key in (KEY, b"another key"):
        assert len(one.fingerprint(key)) == len(two.fingerprint(key)) == 128
        assert set(one.fingerprint(key)) & set(two.fingerprint(key))
    assert not set(one.fingerprint(KEY)) & set(store_with(store_of, range(1100, 1300)).fingerprint(KEY))


def test_a_forgotten_owner_leaves_the_sketch(store_of: StoreOf) -> None:
    store = store_with(store_of, range(6))
    before = set(store.fingerprint(KEY))
    store.forget("owner-3")
    assert len(before - set(store.fingerprint(KEY))) == 1


def hashes_in(budget: PrivacyBudget) -> list[set[str]]:
    return [set(json.loads(plan.fingerprint or "[]")) for plan in budget._ledger.plans()]


def test_a_forgotten_owner_leaves_every_sketch_of_the_ledger(ledger_url: str, store_of: StoreOf) -> None:
    """Of its plans, and of fresh starts; and others are untouched."""
    store, other = store_with(store_of, range(6)), store_with(store_of, range(10, 14))
    budget = budget_on(ledger_url, "one")
    budget.watch(store)
    budget.line("vote", 0.2, fingerprint=store.fingerprint)
    fresh = budget_on(ledger_url, "two")
    fresh.start_afresh("new data")
    fresh.line("vote", 0.2, fingerprint=other.fingerprint)
    key = budget._ledger.key("fingerprint_key")
    gone = set(store.fingerprint(key))
    store.forget("owner-3")
    gone -= set(store.fingerprint(key))
    assert len(gone) == 1
    assert hashes_in(budget) == [set(store.fingerprint(key)), set(other.fingerprint(key))]
    (act,) = fresh.acts()
    assert not gone & set(json.loads(act.before or "") + json.loads(act.after or ""))
    assert len(json.loads(act.before or "")) == 5


def test_a_content_that_another_has_stays_in_the_sketch_until_the_last_goes(ledger_url: str, store_of: StoreOf) -> None:
    rows = [{"input": text, "output": "x"} for text in ("same", "other", "same")]
    store = store_of(rows, owner_key=None)
    budget = budget_on(ledger_url, "one")
    budget.watch(store)
    budget.line("vote", 0.2, fingerprint=store.fingerprint)
    before = hashes_in(budget)
    store.forget("#0")
    assert hashes_in(budget) == before
    store.forget("#2")
    assert len(hashes_in(budget)[0]) == 1


def test_a_sketch_finds_those_who_are_left_after_many_were_forgotten(ledger_url: str, store_of: StoreOf) -> None:
    """200 owners, of whom 128 are in the sketch: when these are forgotten, the others have taken their places."""
    store = store_with(store_of, range(200))
    budget = budget_on(ledger_url, "one")
    budget.watch(store)
    budget.line("vote", 0.2, fingerprint=store.fingerprint)
    key = budget._ledger.key("fingerprint_key")
    sketched = set(store.fingerprint(key))
    owners = [name for name in store.owners if sketch_hash(key, name.encode()) in sketched]
    assert len(owners) == 128
    for owner in owners:
        store.forget(owner)
    assert hashes_in(budget) == [set(store.fingerprint(key))]
    fresh = budget_on(ledger_url, "two")
    fresh.start_afresh("other data, it is said")
    with pytest.raises(PlanMismatch, match="shares owners"):
        fresh.line("vote", 0.2, fingerprint=store.fingerprint)


# -- a second budget on the same data ----------------------------------------------------------------------------------


def use(budget: PrivacyBudget, store: Any) -> None:
    """As a chain does when it is built, and at its releases."""
    budget.watch(store)
    for _ in range(2):
        budget.line("vote", 0.2, fingerprint=store.fingerprint).charge()


def test_a_second_name_on_the_same_data_warns_once(ledger_url: str, store_of: StoreOf) -> None:
    """Two receipts say 2 each, and the total is more."""
    store = store_with(store_of, range(6))
    use(budget_on(ledger_url, "one"), store)
    use(budget_on(ledger_url, "one"), store)
    two = budget_on(ledger_url, "two")
    with pytest.warns(PrivacyWarning, match="'one' in this ledger. Their losses add up") as caught:
        use(two, store)
    assert len(caught) == 1
    assert two.total()["epsilon"] > two.epsilon_spent()


def test_a_store_that_was_built_again_is_known_by_its_owners(ledger_url: str, store_of: StoreOf) -> None:
    use(budget_on(ledger_url, "one"), store_with(store_of, range(6)))
    with pytest.warns(PrivacyWarning, match="'one' in this ledger"):
        use(budget_on(ledger_url, "two"), store_with(store_of, range(5, 9)))
    use(budget_on(ledger_url, "three"), store_with(store_of, range(20, 25)))


def test_a_budget_in_another_ledger_warns_in_any_process_that_has_the_file(
    tmp_path: Path, store_of: StoreOf, embeddings: Any
) -> None:
    one, other = (f"sqlite:///{tmp_path / name}.db" for name in ("one", "other"))
    store_with(store_of, range(6)).save(tmp_path / "store.npz")
    early = ExemplarStore.load(tmp_path / "store.npz", embeddings)
    use(budget_on(one, "answers"), ExemplarStore.load(tmp_path / "store.npz", embeddings))
    use(budget_on(one, "answers"), ExemplarStore.load(tmp_path / "store.npz", embeddings))
    late = ExemplarStore.load(tmp_path / "store.npz", embeddings)
    assert [(each.url, each.name) for each in late.budgets] == [(one, "answers")]
    for store in (early, late):
        with pytest.warns(PrivacyWarning, match=f"'answers' in {one}. Their losses add up"):
            use(budget_on(other, "answers"), store)


def test_a_place_names_no_user_and_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = budget_on("sqlite:///here.db", "one")._ledger
    assert ledger.place == f"sqlite:///{tmp_path}/here.db"
    monkeypatch.setattr(ledger, "is_sqlite", False)
    ledger.url = make_url("postgresql+psycopg://alice:secret@host:1/budgets?password=secret&sslmode=require")
    assert ledger.place == "postgresql+psycopg://host:1/budgets"


def test_filters_and_thresholds_are_remembered_too(ledger_url: str, store_of: StoreOf) -> None:
    store = store_with(store_of, range(6))
    release_threshold(store, ["a question"], budget_on(ledger_url, "one", epsilon=100.0), eligible=2)
    free = PrivacyBudget.filtered(1.5, 1e-6, ledger_url, "free")
    free.watch(store)
    with pytest.warns(PrivacyWarning, match="'one' in this ledger"):
        free.line("vote", 0.2, parameter=30.0, fingerprint=store.fingerprint)


def test_a_fresh_start_and_a_ledger_in_memory_warn_of_nothing(ledger_url: str, store_of: StoreOf) -> None:
    store = store_with(store_of, range(6))
    use(budget_on(ledger_url, "one"), store)
    for i in range(6):
        store.forget(f"owner-{i}")
    store.add([{"input": f"new {i}", "output": "x", "owner": f"new-{i}"} for i in range(6)])
    fresh = budget_on(ledger_url, "two")
    fresh.start_afresh("all records were replaced")
    use(fresh, store)
    with pytest.warns(PrivacyWarning, match="lives in memory"):
        throwaway = budget_on("sqlite://", "three")
    use(throwaway, store)
    assert len(store.budgets) == 2


# -- totals ------------------------------------------------------------------------------------------------------------


def budget_on(url: str, name: str, **options: Any) -> PrivacyBudget:
    return PrivacyBudget(options.pop("epsilon", 2.0), options.pop("delta", 1e-5), 10, url, name, **options)


def test_plans_of_one_ledger_add_up(ledger_url: str) -> None:
    one, two = budget_on(ledger_url, "one"), budget_on(ledger_url, "two", epsilon=1.0, delta=1e-6)
    assert one.total()["plans"] == []
    a, b = one.line("vote", 0.2), two.line("joint-em", 0.1)
    assert one.total()["epsilon"] == 0.0
    a.charge(4)
    assert one.total()["epsilon"] == pytest.approx(a.plan.spent({"vote": 4}), rel=0.02)  # type: ignore[attr-defined]
    b.charge(10)
    total = one.total()
    assert total == two.total()
    lines = [
        plan.lines[name].line(plan.lines[name].parameter, n)
        for plan, name, n in ((one.plan, "vote", 4), (two.plan, "joint-em", 10))
        if plan is not None
    ]
    assert total["epsilon"] == PLDAccountant().epsilon(lines, 1e-5)
    assert total["delta"] == 1e-5
    assert max(one.epsilon_spent(), two.epsilon_spent()) < total["epsilon"] < 3.0
    assert 3.0 <= total["promised_epsilon"] < 3.0 + 1e-12
    assert 1.1e-5 <= total["promised_delta"] < 1.1e-5 + 1e-16
    assert [share["name"] for share in total["plans"]] == ["one", "two"]
    assert total["plans"][0]["spent"] == {"vote": 4}


def test_a_total_stays_finite_where_failures_pass_the_largest_delta(ledger_url: str) -> None:
    """Two PTR plans use half of their delta each on failed tests; a third passes the largest delta."""
    for name in ("one", "two", "three"):
        budget_on(ledger_url, name).line("ptr", 1.0).charge(10)
    total = budget_on(ledger_url, "one").total()
    assert 3e-5 <= total["delta"] < 3.0001e-5
    assert 2.0 < total["epsilon"] < 6.0


def test_a_total_of_principals_is_that_of_whoever_spent_most(ledger_url: str) -> None:
    budget = budget_on(ledger_url, "one", scope="per_principal")
    line = budget.line("vote", 0.2)
    line.charge(2, principal="alice")
    line.charge(7, principal="bob")
    total = budget.total()
    assert total["plans"][0]["spent"] == {"vote": 7}
    assert "do not collude" in total["assumption"]
    assert total["epsilon"] == pytest.approx(budget.epsilon_spent("bob"), rel=0.02)


def test_a_filter_adds_what_it_promises(ledger_url: str) -> None:
    budget_on(ledger_url, "one").line("vote", 0.2).charge(4)
    alone = budget_on(ledger_url, "one").total()["epsilon"]
    filtered = PrivacyBudget.filtered(1.5, 1e-6, ledger_url, "free")
    line = filtered.line("vote", 0.2, parameter=30.0)
    assert filtered.total()["epsilon"] == alone
    line.charge()
    assert filtered.total()["epsilon"] == pytest.approx(alone + 1.5)
    assert filtered.total()["delta"] == pytest.approx(1.1e-5)


# -- fresh starts ------------------------------------------------------------------------------------------------------


def test_a_fresh_start_on_new_data_is_recorded_and_counts_alone(ledger_url: str, store_of: StoreOf) -> None:
    old, new = store_with(store_of, range(20)), store_with(store_of, range(20, 50))
    budget_on(ledger_url, "one").line("vote", 0.2, fingerprint=old.fingerprint)
    budget_on(ledger_url, "one").line("vote", 0.2).charge(4)
    fresh = budget_on(ledger_url, "two")
    fresh.start_afresh("all records of 2025 were deleted", new.fingerprint)
    (act,) = fresh.acts()
    assert (act.name, act.reason, act.carried_out, act.generation) == (
        "two",
        "all records of 2025 were deleted",
        None,
        None,
    )
    line = fresh.line("vote", 0.2, fingerprint=new.fingerprint)
    (act,) = fresh.acts()
    assert act.generation == 2
    assert act.carried_out is not None
    key = fresh._ledger.key("fingerprint_key")
    assert json.loads(act.before or "") == list(old.fingerprint(key))
    assert json.loads(act.after or "") == list(new.fingerprint(key))
    line.charge(1)
    assert [share["name"] for share in fresh.total()["plans"]] == ["two"]
    assert [share["name"] for share in budget_on(ledger_url, "one").total()["plans"]] == ["one"]
    budget_on(ledger_url, "three").line("vote", 0.2)
    assert [share["name"] for share in fresh.total()["plans"]] == ["two", "three"], "the next plan is on the new data"


def test_a_fresh_start_on_data_that_share_an_owner_is_refused(ledger_url: str, store_of: StoreOf) -> None:
    old, mixed = store_with(store_of, range(20)), store_with(store_of, range(19, 50))
    budget_on(ledger_url, "one").line("vote", 0.2, fingerprint=old.fingerprint)
    fresh = budget_on(ledger_url, "two")
    with pytest.raises(PlanMismatch, match="shares owners"):
        fresh.start_afresh("new data", mixed.fingerprint)
    assert fresh.acts() == []
    fresh.start_afresh("new data")
    with pytest.raises(PlanMismatch, match="shares owners"):
        fresh.line("vote", 0.2, fingerprint=mixed.fingerprint)
    with pytest.raises(PlanMismatch, match="fingerprint is needed"):
        fresh.line("vote", 0.2)
    assert fresh.plan is None
    assert [share["name"] for share in fresh.total()["plans"]] == ["one"]


def test_a_plan_on_old_data_after_a_fresh_start_counts_with_both(ledger_url: str, store_of: StoreOf) -> None:
    old, new = store_with(store_of, range(20)), store_with(store_of, range(20, 50))
    budget_on(ledger_url, "one").line("vote", 0.2, fingerprint=old.fingerprint)
    fresh = budget_on(ledger_url, "two")
    fresh.start_afresh("new data")
    fresh.line("vote", 0.2, fingerprint=new.fingerprint)
    sly = budget_on(ledger_url, "three")
    sly.line("vote", 0.2, fingerprint=old.fingerprint)
    assert [share["name"] for share in sly.total()["plans"]] == ["one", "two", "three"]
    assert [share["name"] for share in budget_on(ledger_url, "one").total()["plans"]] == ["one", "three"]


def test_a_fresh_start_needs_a_reason_and_comes_first(ledger_url: str) -> None:
    budget = budget_on(ledger_url, "one")
    for reason in ("", "  ", None, 3):
        with pytest.raises(InvalidParameter, match="reason"):
            budget.start_afresh(reason)  # type: ignore[arg-type]
    budget.line("vote", 0.2)
    with pytest.raises(PlanMismatch, match="frozen already"):
        budget.start_afresh("too late")
    assert budget.acts() == []


def test_a_fingerprint_is_asked_for_once(ledger_url: str) -> None:
    asked: list[bytes] = []

    def fingerprint(key: bytes) -> tuple[str, ...]:
        asked.append(key)
        return ("a" * 32,)

    budget = budget_on(ledger_url, "one")
    for _ in range(3):
        budget.line("vote", 0.2, fingerprint=fingerprint)
    budget_on(ledger_url, "one").line("vote", 0.2, fingerprint=fingerprint)
    assert asked == [budget._ledger.key("fingerprint_key")]


# -- opening -----------------------------------------------------------------------------------------------------------


def test_a_budget_is_found_again_with_nothing_else_known(ledger_url: str) -> None:
    budget = budget_on(ledger_url, "one", scope="per_principal")
    budget.line("vote", 0.2).charge(3, principal="alice")
    several = PrivacyBudget(3.0, 1e-6, {"a": 5, "b": 6}, ledger_url, "several")
    several.declare("b", "joint-em", 0.1)
    several.line("vote", 0.2, name="a")
    PrivacyBudget.filtered(2.0, 1e-5, ledger_url, "free").line("vote", 0.2, parameter=20.0).charge(2)
    again = PrivacyBudget.open("one", ledger_url, soft_limit=0.9)
    assert (again.plan, again.scope, again.releases) == (budget.plan, "per_principal", 10)
    assert again.spent(principal="alice") == 3
    assert PrivacyBudget.open("several", ledger_url).plan == several.plan
    assert PrivacyBudget.open("several", ledger_url).remaining("b") == 6
    assert PrivacyBudget.open("free", ledger_url).spent() == 2


def test_opening_makes_nothing(ledger_url: str, tmp_path: Any) -> None:
    with pytest.raises(LedgerError, match="there is no ledger"):
        PrivacyBudget.open("one", ledger_url)
    assert list(tmp_path.iterdir()) == []
    budget_on(ledger_url, "one").line("vote", 0.2)
    with pytest.raises(InvalidParameter, match="'one'"):
        PrivacyBudget.open("two", ledger_url)
