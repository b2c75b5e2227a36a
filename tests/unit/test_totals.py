"""`PrivacyBudget.total`, and what a store remembers: several budgets on one data set add up."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from moments import marks_of, numbers_of
from sqlalchemy.engine import make_url
from tickets_on_disk import key_in, marks_in
from tickets_on_disk import run as run_sql

from langchain_dpicl import (
    ExemplarStore,
    InvalidParameter,
    LedgerError,
    PlanMismatch,
    PrivacyBudget,
    PrivacyWarning,
)
from langchain_dpicl.budget.ledger import UNWATCHED
from langchain_dpicl.budget.owner_keys import OwnerKeyFile
from langchain_dpicl.cli import main
from langchain_dpicl.privacy import PLDAccountant

StoreOf = Callable[..., Any]
Records = Callable[..., list[dict[str, str]]]


def store_with(store_of: StoreOf, owners: range, per_owner: int = 1, **options: Any) -> Any:
    rows = [
        {"input": f"text {i}.{j}", "output": "Positive", "owner": f"owner-{i}"}
        for i in owners
        for j in range(per_owner)
    ]
    return store_of(rows, **options)


# -- a second budget on the same data ----------------------------------------------------------------------------------


def use(budget: PrivacyBudget, store: Any) -> None:
    """As a chain does when it is built, and at its releases."""
    budget.watch(store)
    for _ in range(2):
        budget.line("vote", 0.2).charge()


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


def test_a_budget_in_another_ledger_warns_in_any_process_that_has_the_file(
    tmp_path: Path, store_of: StoreOf, embeddings: Any
) -> None:
    one, other = (f"sqlite:///{tmp_path / name}.db" for name in ("one", "other"))
    store_with(store_of, range(6)).save(tmp_path / "store.db")
    early = ExemplarStore.load(tmp_path / "store.db", embeddings)
    use(budget_on(one, "answers"), ExemplarStore.load(tmp_path / "store.db", embeddings))
    use(budget_on(one, "answers"), ExemplarStore.load(tmp_path / "store.db", embeddings))
    late = ExemplarStore.load(tmp_path / "store.db", embeddings)
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


def test_a_ledger_in_memory_is_not_remembered(ledger_url: str, store_of: StoreOf) -> None:
    store = store_with(store_of, range(6))
    with pytest.warns(PrivacyWarning, match="lives in memory"):
        throwaway = budget_on("sqlite://", "three")
    use(throwaway, store)
    use(budget_on(ledger_url, "one"), store)
    assert [each.name for each in store.budgets] == ["one"]


def test_a_store_that_remembers_nothing_may_hold_the_data_of_any_budget_of_the_ledger(
    ledger_url: str, store_of: StoreOf
) -> None:
    use(budget_on(ledger_url, "one"), store_with(store_of, range(6)))
    with pytest.warns(PrivacyWarning, match="'one' in this ledger"):
        use(budget_on(ledger_url, "two"), store_with(store_of, range(20, 25)))


def test_a_store_remembers_its_budgets_when_all_its_records_are_exchanged(
    tmp_path: Path, store_of: StoreOf, embeddings: Any
) -> None:
    """The total of two budgets of epsilon 3 was 3 when the records had changed in between."""
    one, other = (f"sqlite:///{tmp_path / name}.db" for name in ("one", "other"))
    store, path = store_with(store_of, range(3)), tmp_path / "store.db"
    store.save(path)
    use(budget_on(one, "first", epsilon=3.0), store)
    again = ExemplarStore.load(path, embeddings)
    again.add([{"input": f"new {i}", "output": "x", "owner": f"new-{i}"} for i in range(3)])
    for i in range(3):
        again.forget(f"owner-{i}")
    second = budget_on(other, "second", epsilon=3.0)
    with pytest.warns(PrivacyWarning, match=f"'first' in {one}"):
        use(second, again)
    total = second.total()
    assert [(share["name"], share["ledger"], share["spent"]) for share in total["plans"]] == [
        ("second", None, {"vote": 2}),
        ("first", one, {"vote": 2}),
    ]
    assert 6.0 <= total["promised_epsilon"] < 6.0 + 1e-12
    assert total["epsilon"] > second.epsilon_spent()


def test_a_budget_with_nothing_spent_does_not_warn_and_can_be_removed(tmp_path: Path, store_of: StoreOf) -> None:
    store = store_with(store_of, range(3))
    trial = budget_on(f"sqlite:///{tmp_path}/one.db", "trial")
    trial.watch(store)
    trial.line("vote", 0.2)
    second = budget_on(f"sqlite:///{tmp_path}/other.db", "second")
    use(second, store)
    assert [share["name"] for share in second.total()["plans"]] == ["second", "trial"], "it may still be spent"
    trial.remove()
    assert [share["name"] for share in second.total()["plans"]] == ["second"]
    with pytest.raises(PlanMismatch, match="something was charged to the budget 'second'"):
        second.remove()
    assert second.spent() == 2
    again = budget_on(f"sqlite:///{tmp_path}/one.db", "trial", epsilon=1.0)
    with pytest.warns(PrivacyWarning, match="'second' in"):
        use(again, store)
    assert [share["epsilon"] for share in second.total()["plans"]] == [2.0, 1.0]


@pytest.mark.parametrize("loss", ["an older copy", "the plan", "the file"])
def test_a_ledger_that_was_set_back_or_is_gone_counts_with_its_promise(
    loss: str, tmp_path: Path, store_of: StoreOf
) -> None:
    """The witness beside it knows more."""
    store, path = store_with(store_of, range(3)), tmp_path / "one.db"
    other = budget_on(f"sqlite:///{path}", "other")
    other.line("vote", 0.2)
    other.close()
    copy = path.read_bytes()
    first = budget_on(f"sqlite:///{path}", "first")
    first.watch(store)
    line = first.line("vote", 0.2)
    first._ledger.write_through()
    copy = path.read_bytes() if loss == "an older copy" else copy
    line.charge(5)
    first.close()
    for left in (path.with_name("one.db-wal"), path.with_name("one.db-shm")):
        left.unlink(missing_ok=True)
    path.unlink() if loss == "the file" else path.write_bytes(copy)
    second = budget_on(f"sqlite:///{tmp_path}/two.db", "second")
    with pytest.warns(PrivacyWarning, match="'first' in"):
        use(second, store)
    assert second.total()["epsilon"] == pytest.approx(second.epsilon_spent() + 2.0, rel=0.02)
    assert 4.0 <= second.total()["promised_epsilon"] < 4.0 + 1e-12


def test_an_idle_worker_cannot_charge_the_plan_that_takes_a_removed_ones_place(ledger_url: str) -> None:
    idle = budget_on(ledger_url, "trial", epsilon=100.0).line("vote", 0.2)
    budget_on(ledger_url, "trial", epsilon=100.0).remove()
    new = budget_on(ledger_url, "new", epsilon=0.5)
    new.line("vote", 0.2)
    with pytest.raises(LedgerError):
        idle.charge()
    assert new.spent() == 0
    with pytest.raises(LedgerError, match="to be read"):
        PrivacyBudget.open("new", ledger_url, witness=UNWATCHED).remove()


def test_a_name_that_is_given_again_promises_the_most_of_both(tmp_path: Path, store_of: StoreOf) -> None:
    store, url = store_with(store_of, range(3)), f"sqlite:///{tmp_path}/one.db"
    small = budget_on(url, "trial", epsilon=0.1)
    small.watch(store)
    small.line("vote", 0.2)
    small.remove()
    small.close()
    large = budget_on(url, "trial", epsilon=9.0)
    use(large, store)
    large.close()
    (tmp_path / "one.db").rename(tmp_path / "gone.db")
    second = budget_on(f"sqlite:///{tmp_path}/two.db", "second")
    with pytest.warns(PrivacyWarning, match="'trial' in"):
        use(second, store)
    assert second.total()["promised_epsilon"] >= 11.0


def test_forgetting_says_if_the_key_of_a_plan_is_not_at_hand(tmp_path: Path, store_of: StoreOf, capsys: Any) -> None:
    """The mark then stays in the ledger; the same command ends it when the key is there."""
    store, url, key = store_with(store_of, range(4)), f"sqlite:///{tmp_path}/l.db", tmp_path / "elsewhere.key"
    budget = budget_on(url, "one", tickets=True, key_file=key)
    budget.watch(store)
    line = budget.line("vote", 0.2)
    line.charge(owners=[line.ask(store, numbers_of(store))])
    store.save(tmp_path / "s.db")
    marks = set(marks_in(url, "one"))
    key.rename(tmp_path / "hidden")
    with pytest.raises(LedgerError, match="the owner's mark stays"):
        store.forget("owner-1")
    assert set(marks_in(url, "one")) == marks
    command = ["forget", "--store", str(tmp_path / "s.db"), "--owner"]
    assert main([*command, "owner-2"]) == 1
    assert "the owner's mark stays" in capsys.readouterr().err
    for owner in ("owner-1", "owner-2"):
        assert main([*command, owner, "--key-file", str(tmp_path / "hidden")]) == 1, "the store has it no more"
    assert len(marks & set(marks_in(url, "one"))) == 2


def test_what_cannot_be_written_down_is_said(tmp_path: Path, store_of: StoreOf, ledger_url: str) -> None:
    store = store_with(store_of, range(3))
    store.save(tmp_path / "store.db")
    refuse = "CREATE TRIGGER full BEFORE INSERT ON dpicl_opened_budgets BEGIN SELECT RAISE(ABORT, 'full'); END"
    run_sql(f"sqlite:///{tmp_path}/store.db", refuse)
    with pytest.warns(PrivacyWarning, match="cannot write down that the budget 'one' is used"):
        use(budget_on(ledger_url, "one"), store)


# -- the key of owners' marks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["memory", "a file"])
def test_no_ledger_holds_a_digest_of_owners_beside_its_key(
    place: str, tmp_path: Path, store_of: StoreOf, ledger_url: str
) -> None:
    """Mutation 32 shows what a reader of both can prove."""
    store, budget = store_with(store_of, range(4)), budget_on(ledger_url, "one", tickets=True)
    if place == "a file":
        store.save(tmp_path / "store.db")
    budget.watch(store)
    line = budget.line("vote", 0.2)
    line.charge(owners=[line.ask(store, numbers_of(store))])
    key = key_in(ledger_url, store)
    assert set(marks_in(ledger_url, "one")) == set(marks_of(store, key).values())
    held = b"".join(path.read_bytes() for path in tmp_path.glob("ledger.db*") if path.suffix != ".key")
    assert key not in held
    assert key.hex().encode() not in held
    assert (tmp_path / "ledger.db.key").exists() == (place == "memory")
    if place == "memory":
        assert stat.S_IMODE((tmp_path / "ledger.db.key").stat().st_mode) == 0o600


def test_without_its_key_a_plan_with_tickets_refuses(tmp_path: Path, store_of: StoreOf, ledger_url: str) -> None:
    """Under another key every owner would have all its tickets again."""
    store = store_with(store_of, range(4))

    def taking_part(store: Any) -> int:
        budget = budget_on(ledger_url, "one", tickets=True)
        budget.watch(store)
        line = budget.line("vote", 0.2)
        (entry,) = line.charge(owners=[line.ask(store, numbers_of(store))])
        return len(entry.participants.take())  # type: ignore[union-attr]

    assert [taking_part(store) for _ in range(9)] == [4] * 9
    key = tmp_path / "ledger.db.key"
    content = key.read_bytes()
    key.unlink()
    for damage in (lambda: None, lambda: key.write_bytes(b"00" * 32), lambda: key.write_bytes(b"no key")):
        damage()
        with pytest.raises(LedgerError, match="nothing was charged"):
            taking_part(store_with(store_of, range(4)))
    key.unlink()
    other = store_with(store_of, range(4))
    other.save(tmp_path / "store.db")
    with pytest.raises(LedgerError, match="known by another key"):
        taking_part(other)
    key.write_bytes(content)
    assert taking_part(other) == 4, "the key file holds the key, whatever the store has"
    assert taking_part(store) == 0


def test_a_store_in_memory_needs_a_place_for_the_key_of_a_ledger_on_a_server() -> None:
    file = OwnerKeyFile(None, None)
    assert file.read() is None
    with pytest.raises(InvalidParameter, match="key_file"):
        file.make()


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


# -- opening -----------------------------------------------------------------------------------------------------------


def test_a_budget_is_found_again_with_nothing_else_known(ledger_url: str) -> None:
    budget = budget_on(ledger_url, "one", scope="per_principal")
    budget.line("vote", 0.2).charge(3, principal="alice")
    several = PrivacyBudget(3.0, 1e-6, {"a": 5, "b": 6}, ledger_url, "several")
    several.declare("b", "joint-em", 0.1)
    several.line("vote", 0.2, name="a")
    again = PrivacyBudget.open("one", ledger_url, soft_limit=0.9)
    assert (again.plan, again.scope, again.releases) == (budget.plan, "per_principal", 10)
    assert again.spent(principal="alice") == 3
    assert PrivacyBudget.open("several", ledger_url).plan == several.plan
    assert PrivacyBudget.open("several", ledger_url).remaining("b") == 6


def test_opening_makes_nothing(ledger_url: str, tmp_path: Any) -> None:
    with pytest.raises(LedgerError, match="there is no ledger"):
        PrivacyBudget.open("one", ledger_url)
    assert list(tmp_path.iterdir()) == []
    budget_on(ledger_url, "one").line("vote", 0.2)
    with pytest.raises(InvalidParameter, match="'one'"):
        PrivacyBudget.open("two", ledger_url)
