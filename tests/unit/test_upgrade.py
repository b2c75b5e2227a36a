"""`dpicl upgrade`: what the release of 2644f89 wrote, read by today's code, with every charge in it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import stat
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import by_hand  # noqa: F401
import numpy as np
import pytest
import yaml
from earlier_release import EXPECTED, FOLDER, READS_LISTS, STORES, ask, content, copied, copied_store, made
from langchain_core.embeddings import DeterministicFakeEmbedding
from ledger_files import AFTER_A_KILL

from langchain_dpicl import (
    ExemplarStore,
    InvalidParameter,
    LedgerError,
    PlanMismatch,
    PrivacyBudget,
    PrivacyWarning,
    StoreFileError,
)
from langchain_dpicl.budget import upgrade as ledgers
from langchain_dpicl.budget.upkeep import recover
from langchain_dpicl.cli import main
from langchain_dpicl.durable import lock
from langchain_dpicl.spec.conflicts import renamed
from langchain_dpicl.spec.releases import RENAMED, of_today
from langchain_dpicl.store.upgrade import upgrade_file

OTHERS = "ignore:.*other budgets were opened:langchain_dpicl.PrivacyWarning"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["upgrade", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans stay as today's code reads them, until it reads shares as lists."""
    if not READS_LISTS:
        monkeypatch.setattr(ledgers, "with_lists", lambda text: text)


# -- a ledger ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ledger", "free", "killed", "tickets"])
def test_an_earlier_ledger_is_refused_with_the_command_that_upgrades_it(name: str, tmp_path: Path) -> None:
    path = copied(tmp_path, name)
    before = content(path)
    for opened in (lambda: PrivacyBudget(3.0, 1e-5, 5, f"sqlite:///{path}"), lambda: recover(f"sqlite:///{path}")):
        with pytest.raises(LedgerError, match=r"schema version 6; .* version 8 alone; `dpicl upgrade PATH`"):
            opened()
    assert content(path) == before


@pytest.mark.parametrize("name", list(EXPECTED["ledger"]["budgets"]))
@pytest.mark.filterwarnings(OTHERS)
def test_today_a_budget_counts_and_answers_as_before(name: str, tmp_path: Path, readable: None) -> None:
    """The counts, the epsilon, the replayed answer; and a further charge takes the next number."""
    path = copied(tmp_path)
    ledgers.upgrade(f"sqlite:///{path}")
    expected = EXPECTED["ledger"]["budgets"][name]
    budget, chain = made.chains(f"sqlite:///{path}")[name]()
    assert made.state(budget)["spent"] == expected["spent"]
    assert np.all(np.array(_numbers(made.state(budget))) >= np.array(_numbers(expected)) * (1 - 1e-3))
    again = made.asked(chain, made.QUESTION, expected["caller"])
    assert again == {**expected["first"], "replayed": True}
    assert made.state(budget)["spent"] == expected["spent"]
    if expected["caller"] is None:
        number = made.asked(chain, {"input": "a new question"})["number"]
        assert number == sum(expected["spent"].values()) + 1 == budget.spent()
        assert budget.receipt(expected["first"]["id"])["number"] == 1
    else:
        assert made.asked(chain, {"input": "a new question"}, expected["caller"])["number"] == 2
        assert budget.principals() == {"ann": {"vote": 2}, "bob": {"vote": 1}}
    budget.close()


def _numbers(state: dict[str, Any]) -> list[float]:
    found = state["epsilon"]
    return list(found.values()) if isinstance(found, dict) else [found]


def test_all_plans_of_a_ledger_add_up_also_after_a_fresh_start(
    tmp_path: Path, readable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(tmp_path)
    code, out, _ = run(capsys, path)
    assert code == 0
    assert "afresh: a fresh start of 2026" in out
    assert "(the desk moved to another town)" in out
    budget = PrivacyBudget.open("votes", f"sqlite:///{path}")
    total = budget.total()
    assert len(total["plans"]) == 6
    assert total["promised_epsilon"] >= 6 * 3.0 > EXPECTED["ledger"]["totals"]["tickets"]["promised_epsilon"]
    assert total["epsilon"] > EXPECTED["ledger"]["totals"]["tickets"]["epsilon"]
    budget.close()


@pytest.mark.filterwarnings(OTHERS)
def test_owners_who_pay_are_known_again_by_the_key_that_left_the_ledger(tmp_path: Path, readable: None) -> None:
    path = copied(tmp_path)
    ((key,),) = ask(path, "SELECT value FROM dpicl_meta WHERE key = 'fingerprint_key'")
    found = ledgers.upgrade(f"sqlite:///{path}")
    assert found is not None
    file = Path(str(found["key_file"]))
    assert file == path.with_name("ledger.sqlite.key")
    assert file.read_text().strip() == key
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not any(key.encode() in each.read_bytes() for each in tmp_path.glob("ledger.sqlite*") if each != file)
    assert bytes.fromhex(key) not in path.read_bytes()
    assert ask(path, "SELECT name FROM dpicl_plans WHERE key_id <> ''") == [("tickets",)]
    used = "SELECT counter_id, count(*), sum(used) FROM dpicl_tickets GROUP BY counter_id"
    assert ask(path, used) == [(7, 60, 120)]
    budget, chain = made.chains(f"sqlite:///{path}")["tickets"]()
    made.asked(chain, {"input": "a third question"})
    budget.close()
    assert ask(path, used) == [(7, 60, 180)], "no owner came a second time"
    file.unlink()
    budget, chain = made.chains(f"sqlite:///{path}")["tickets"]()
    with pytest.raises(LedgerError, match="known by another key"):
        made.asked(chain, {"input": "a fourth question"})
    assert budget.spent() == 3
    budget.close()


def test_permits_of_a_process_that_was_killed_count_as_spent(tmp_path: Path) -> None:
    path = copied(tmp_path, "killed")
    ((reserved,),) = ask(path.with_name("killed.sqlite.witness"), "SELECT reserved FROM dpicl_marks")
    spent = EXPECTED["killed"]["large"]["spent"]["vote"]
    assert reserved > spent
    ledgers.upgrade(f"sqlite:///{path}")
    assert ask(path, "SELECT spent FROM dpicl_counters") == [(spent,)]
    with pytest.warns(PrivacyWarning, match="a process was killed"):
        budget = PrivacyBudget.open("large", f"sqlite:///{path}")
    assert budget.spent() == reserved
    budget.close()


@pytest.mark.filterwarnings(OTHERS)
def test_a_budget_without_a_plan_stays_and_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(tmp_path, "free")
    before = [ask(path, f"SELECT * FROM {name}") for name in ("dpicl_counters", "dpicl_charges", "dpicl_queries")]
    code, out, _ = run(capsys, path)
    assert code == 0
    assert "free: a budget without a plan, with 2 releases. It stays, and nothing can be charged" in out
    assert "count all of its epsilon 2 and delta 1e-05 beside" in out
    after = [ask(path, f"SELECT * FROM {name}") for name in ("dpicl_counters", "dpicl_charges", "dpicl_queries")]
    assert after == before
    with pytest.raises(PlanMismatch, match="'free' has no plan"):
        PrivacyBudget(2.0, 1e-5, 5, f"sqlite:///{path}", "free")
    budget, chain = made.chains(f"sqlite:///{path}")["votes"]()
    assert made.asked(chain, made.QUESTION) == {**EXPECTED["free"]["votes"]["first"], "replayed": True}
    assert made.asked(chain, made.OTHER)["number"] == 2
    with pytest.raises(PlanMismatch, match="'free'"):
        budget.total()
    budget.close()


def test_a_plan_keeps_its_digest_and_gets_its_shares_as_lists(tmp_path: Path) -> None:
    path = copied(tmp_path)
    then = dict(ask(path, "SELECT name, digest FROM dpicl_plans"))
    old = {name: json.loads(text) for name, text in ask(path, "SELECT name, content FROM dpicl_plans")}
    found = ledgers.upgrade(f"sqlite:///{path}")
    assert found is not None
    assert found["rewritten"] == ["visits", "calls"]
    assert dict(ask(path, "SELECT name, digest FROM dpicl_plans")) == then
    now = {name: json.loads(text) for name, text in ask(path, "SELECT name, content FROM dpicl_plans")}
    visits, calls = (now[name]["lines"]["structured"]["options"] for name in ("visits", "calls"))
    assert visits == {"shares": [0.2, 0.4, 0.1, 0.1], "mean_shares": [0.2]}
    assert calls == {"shares": [0.25, 0.25, 0.25, 0.125, 0.125], "own_calls": 1.0}
    for name in ("visits", "calls"):
        now[name]["lines"]["structured"]["options"] = old[name]["lines"]["structured"]["options"]
    assert now == old


def test_shares_stand_in_the_order_of_their_numbers_whatever_lies_between() -> None:
    line: dict[str, Any] = {"count": 4, "mechanism": "structured", "parameter": 0.1, "rate": 0.5, "weight": 1.0}
    numbers = {f"share_{n}": n / 1000 for n in (1, 2, 10, 11, 32)} | {"mean_share_9": 0.3, "mean_share_12": 0.2}
    other = {**line, "mechanism": "vote", "options": {"share_1": 1.0}}
    plan = {"format": 1, "epsilon": 1.0, "delta": 0.1, "lines": {"b": {**line, "options": numbers}, "a": other}}
    text = json.dumps(plan, sort_keys=True)
    found = json.loads(ledgers.with_lists(text))
    assert found["lines"]["b"]["options"] == {
        "shares": [0.001, 0.002, 0.01, 0.011, 0.032],
        "mean_shares": [0.3, 0.2],
    }
    assert found["lines"]["a"] == other
    assert ledgers.with_lists(ledgers.with_lists(text)) == ledgers.with_lists(text)
    plan["lines"] = {"a": other}
    assert ledgers.with_lists(json.dumps(plan)) == json.dumps(plan), "nothing to do, nothing touched"


def test_tables_are_those_of_a_new_ledger(tmp_path: Path) -> None:
    PrivacyBudget(3.0, 1e-5, 5, f"sqlite:///{tmp_path / 'new.db'}").close()
    path = copied(tmp_path)
    ledgers.upgrade(f"sqlite:///{path}")

    def columns(file: Path) -> dict[str, list[Any]]:
        names = [name for (name,) in ask(file, "SELECT name FROM sqlite_master WHERE type = 'table'")]
        kind = "CASE WHEN type = 'INTEGER' THEN 'BIGINT' ELSE type END"  # SQLite's are the same
        return {
            name: ask(file, f"SELECT name, {kind}, \"notnull\", dflt_value, pk FROM pragma_table_info('{name}')")
            for name in names
        }

    for ending in ("", ".witness"):
        assert columns(Path(f"{path}{ending}")) == columns(tmp_path / f"new.db{ending}")
    assert ask(path, "PRAGMA foreign_key_check") == []
    made_now = "SELECT sql FROM sqlite_master WHERE name = 'dpicl_counters'"
    assert ask(path, made_now) == ask(tmp_path / "new.db", made_now), "with its constraints"


def test_a_dry_run_changes_nothing_and_a_second_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(tmp_path)
    before = content(path)
    code, out, _ = run(capsys, path, "--dry-run", "--json")
    told = json.loads(out)
    assert (code, told["version"], told["changed"]) == (0, 6, False)
    assert content(path) == before
    assert content(path.with_name("ledger.sqlite.witness")) == content(FOLDER / "ledger.sqlite.witness")
    for beside in ("key", "witness.lock"):
        assert not path.with_name(f"ledger.sqlite.{beside}").exists()
    code, out, _ = run(capsys, f"sqlite:///{path}", "--json")
    assert json.loads(out) == {**told, "changed": True}
    after = [content(path), content(path.with_name("ledger.sqlite.witness"))]
    code, out, _ = run(capsys, path)
    assert code == 0
    assert "in today's form already; nothing was changed" in out
    assert [content(path), content(path.with_name("ledger.sqlite.witness"))] == after


def test_a_ledger_without_its_own_witness_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(tmp_path)
    witness = path.with_name("ledger.sqlite.witness")
    shutil.copy(FOLDER / "free.sqlite.witness", witness)
    before = content(path)
    for option in ([], ["--dry-run"], ["--without-witness"]):
        code, _, err = run(capsys, path, *option)
        assert (code, "belongs to another ledger" in err) == (1, True)
    witness.unlink()
    code, _, err = run(capsys, path)
    assert (code, "is not there" in err, "--without-witness" in err) == (1, True, True)
    assert content(path) == before
    elsewhere = tmp_path / "elsewhere"
    shutil.copy(FOLDER / "ledger.sqlite.witness", elsewhere)
    assert run(capsys, path, "--witness", elsewhere)[0] == 0


def test_a_ledger_whose_witness_is_lost_is_upgraded_and_then_recovered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(tmp_path, "free")
    path.with_name("free.sqlite.witness").unlink()
    assert run(capsys, path, "--without-witness")[0] == 0
    with pytest.raises(LedgerError, match="has no witness"):
        PrivacyBudget.open("votes", f"sqlite:///{path}")
    assert main(["budget", "recover", "--ledger", f"sqlite:///{path}"]) == 0
    budget = PrivacyBudget.open("votes", f"sqlite:///{path}")
    assert budget.remaining() == 0
    budget.close()


def test_another_key_in_the_place_of_the_key_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(tmp_path)
    before = content(path)
    path.with_name("ledger.sqlite.key").write_text("00" * 32)
    for option in (["--dry-run"], []):
        code, _, err = run(capsys, path, *option)
        assert (code, "--key-file=" in err, "another key" in err) == (1, True, True)
    assert content(path) == before
    assert run(capsys, path, "--key-file", tmp_path / "own.key")[0] == 0
    assert path.with_name("ledger.sqlite.key").read_text() == "00" * 32


@pytest.mark.parametrize("version", ["5", "7", "two"])
def test_another_version_is_refused(version: str, tmp_path: Path) -> None:
    path = copied(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE dpicl_meta SET value = ? WHERE key = 'schema_version'", (version,))
    connection.close()
    with pytest.raises(LedgerError, match=f"schema version {version}; this release upgrades version 6 alone"):
        ledgers.upgrade(f"sqlite:///{path}")


@pytest.mark.parametrize("table", ["dpicl_filters", "dpicl_usage_counts", "dpicl_charges", "dpicl_meta"])
def test_a_ledger_that_lost_a_table_is_refused(table: str, tmp_path: Path) -> None:
    path = copied(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute(f"DROP TABLE {table}")
    connection.close()
    with pytest.raises(LedgerError, match="lost tables" if table != "dpicl_meta" else "no ledger here"):
        ledgers.upgrade(f"sqlite:///{path}")


def test_rows_that_do_not_add_up_afterwards_leave_the_ledger_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that loses a charge on its way."""
    path = copied(tmp_path)
    before = content(path)
    honest = ledgers._change_tables

    def careless(connection: Any, *rest: Any) -> None:
        honest(connection, *rest)
        connection.exec_driver_sql("UPDATE dpicl_counters SET spent = spent - 1 WHERE id = 1")

    monkeypatch.setattr(ledgers, "_change_tables", careless)
    with pytest.raises(LedgerError, match="do not add up"):
        ledgers.upgrade(f"sqlite:///{path}")
    assert content(path) == before


# -- tickets -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(AFTER_A_KILL)
@pytest.mark.filterwarnings(OTHERS)
def test_the_owners_pay_whom_the_earlier_release_would_have_charged(tmp_path: Path) -> None:
    """In every budget, question by question, until nobody has a ticket; also after a kill and a forgetting."""
    path = copied(tmp_path, "tickets")
    ledgers.upgrade(f"sqlite:///{path}")
    paid = [*made.probes(f"sqlite:///{path}")]
    assert paid == EXPECTED["tickets"]["probes"]
    everyone = {name for names in paid for name in names}
    assert made.FORGOTTEN in everyone, "it came again: a new life"
    assert made.HELD not in everyone, "it gets no tickets until it is forgotten once more"


@pytest.mark.filterwarnings(AFTER_A_KILL)
@pytest.mark.filterwarnings(OTHERS)
def test_a_forgetting_that_was_interrupted_is_ended_after_the_upgrade(tmp_path: Path) -> None:
    path = copied(tmp_path, "tickets")
    ledgers.upgrade(f"sqlite:///{path}")
    budget, line = made.paying(f"sqlite:///{path}", "few")
    number = int(made.HELD.removeprefix("owner-"))
    store = made.store_of(owners=made.OWNERS)
    budget.watch(store)
    assert made.charged(line, store, [number])[1] == []
    store.forget(made.HELD)
    assert ask(path, "SELECT plan_id FROM dpicl_leaving ORDER BY plan_id") == [(2,), (3,)]
    fresh = made.store_of(owners=made.OWNERS)
    left = [made.charged(line, fresh, [number])[1] for _ in range(5)]
    assert left == [[made.HELD]] * 4 + [[]], "all its five tickets, less the one that the counter has lost"
    budget.close()


def test_an_entry_by_itself_without_a_used_ticket_may_be_a_hold_and_no_other_may(tmp_path: Path) -> None:
    """Nor does a forgotten owner have a row."""
    path = copied(tmp_path, "tickets")
    marks = [bytes([n]) * 16 for n in (1, 2, 3)]
    with sqlite3.connect(path) as connection:
        for start, piece in ((14, marks[0]), (15, marks[1] + marks[2])):
            connection.execute("INSERT INTO dpicl_owner_marks VALUES (1, ?, ?)", (start, piece))
        connection.execute("UPDATE dpicl_owner_index SET size = 17 WHERE plan_id = 1")
    connection.close()
    ledgers.upgrade(f"sqlite:///{path}")
    leaving = {mark for (mark,) in ask(path, "SELECT mark FROM dpicl_leaving WHERE plan_id = 1")}
    assert "fe" * 16 in leaving
    assert len(leaving) == 2, "and the hold of the fixture"
    assert not leaving & {mark for (mark,) in ask(path, "SELECT mark FROM dpicl_tickets")}
    assert ask(path, f"SELECT count(*) FROM dpicl_tickets WHERE used <= 0 OR mark = '{'00' * 16}'") == [(0,)]


DAMAGE = {
    "the index": "DELETE FROM dpicl_owner_index WHERE plan_id = 1",
    "an index that counts fewer owners": "UPDATE dpicl_owner_index SET size = size - 1",
    "an index that counts more owners": "UPDATE dpicl_owner_index SET size = size + 1",
    "the marks": "DELETE FROM dpicl_owner_marks WHERE plan_id = 2",
    "marks cut short": "UPDATE dpicl_owner_marks SET marks = substr(marks, 1, 32) WHERE plan_id = 1 AND start = 0",
    "another mark": "UPDATE dpicl_owner_marks SET marks = zeroblob(length(marks)) WHERE plan_id = 1 AND start = 0",
    "marks that are text": "UPDATE dpicl_owner_marks SET marks = hex(marks)",
    "a summary": "DELETE FROM dpicl_usage WHERE counter_id = 1",
    "a summary of fewer tickets": "UPDATE dpicl_usage SET tickets = tickets - 1, digest = 'x' WHERE counter_id = 2",
    "a summary that forgets the sums": "UPDATE dpicl_usage SET summed = 0 WHERE counter_id = 2",
    "the first row": "DELETE FROM dpicl_usage_rows WHERE counter_id = 1 AND number = 5",
    "the last row": "DELETE FROM dpicl_usage_rows WHERE counter_id = 1 AND number = 7",
    "a row of fewer owners": "UPDATE dpicl_usage_rows SET positions = substr(positions, 1, 4) WHERE counter_id = 4",
    "a row of half an owner": "UPDATE dpicl_usage_rows SET positions = substr(positions, 1, 2) WHERE counter_id = 4",
    "a row of more owners": "UPDATE dpicl_usage_rows SET positions = x'ffffffff' WHERE counter_id = 4",
    "the sums": "DELETE FROM dpicl_usage_counts WHERE counter_id = 2",
    "smaller sums": "UPDATE dpicl_usage_counts SET counts = zeroblob(length(counts))",
    "a counter of another copy": "UPDATE dpicl_counters SET spent = spent + 1 WHERE id = 4",
    "a counter that lost more": "UPDATE dpicl_counters SET spent = spent + 1, lost = lost + 1 WHERE id = 4",
}


@pytest.mark.parametrize("statement", list(DAMAGE.values()), ids=list(DAMAGE))
def test_tickets_that_are_not_whole_are_refused_and_nothing_is_changed(
    statement: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(tmp_path, "tickets")
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()
    before = content(path)
    for options in (["--dry-run"], []):
        code, _, err = run(capsys, path, *options)
        assert code == 1
        assert "have lost rows: nothing was changed; run `dpicl budget recover` with the release that wrote it" in err
    assert content(path) == before
    assert content(path.with_name("tickets.sqlite.witness")) == content(FOLDER / "tickets.sqlite.witness")
    assert not path.with_name("tickets.sqlite.key").exists()


# -- the witness -------------------------------------------------------------------------------------------------------

MARKS = "SELECT low, reserved FROM dpicl_marks WHERE plan = 'votes'"
COUNTER = "SELECT spent, returned, lost FROM dpicl_counters WHERE id = 1"


def changed(path: Path, *statements: str) -> None:
    for statement in statements:
        file = path if "dpicl_marks" not in statement else Path(f"{path}.witness")
        with sqlite3.connect(file) as connection:
            connection.execute(statement)
        connection.close()


@pytest.mark.parametrize(
    ("spent", "returned", "reserved", "excess"), [(30, 12, 20, 2), (30, 12, 18, 0), (30, 0, 30, 0), (300, 290, 40, 30)]
)
def test_what_was_reserved_beyond_the_units_in_use_is_lost_once(
    spent: int, returned: int, reserved: int, excess: int, tmp_path: Path
) -> None:
    path = copied(tmp_path)
    changed(
        path,
        f"UPDATE dpicl_counters SET spent = {spent}, returned = {returned} WHERE id = 1",
        f"UPDATE dpicl_marks SET low = {spent - 1}, reserved = {reserved} WHERE plan = 'votes'",
    )
    ledgers.upgrade(f"sqlite:///{path}")
    assert ask(Path(f"{path}.witness"), MARKS) == [(spent, spent + excess)]
    assert ask(path, COUNTER) == [(spent, returned, 0)]
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            budget = PrivacyBudget.open("votes", f"sqlite:///{path}")
        assert budget.spent() == reserved
        budget.close()
        assert ask(path, COUNTER) == [(spent + excess, returned, excess)]


@pytest.mark.filterwarnings(AFTER_A_KILL)
@pytest.mark.parametrize(("which", "in_use"), [("the same", 11), ("an older", 15), ("another", 11)])
def test_a_copy_of_the_earlier_form_that_is_put_back_counts_what_was_charged_since(
    which: str, in_use: int, tmp_path: Path
) -> None:
    """Upgraded by the same command: at least the units of all answers, 8 and 3, are in use, whatever its numbers are.

    An older copy does not know that 4 were given back. The other copy has counted further than the one that was
    upgraded, which lacked its charges and had lost them.
    """
    path = copied(tmp_path)
    counts = ["UPDATE dpicl_counters SET spent = 12, returned = 4 WHERE id = 1", "UPDATE dpicl_marks SET reserved = 8"]
    before = copied(tmp_path / "before")
    if which == "another":
        changed(before, *counts)
        changed(path, counts[1])
    else:
        changed(path, *counts)
        if which == "the same":
            changed(before, *counts)
    ledgers.upgrade(f"sqlite:///{path}")
    budget = PrivacyBudget.open("votes", f"sqlite:///{path}")
    budget.line("vote", 0.5).charge(3)  # type: ignore[attr-defined]
    assert budget.spent() == 11
    budget.close()
    put_back(before, path)
    ledgers.upgrade(f"sqlite:///{path}")
    if which == "an older":
        with pytest.raises(LedgerError, match="was rolled back"):
            PrivacyBudget.open("votes", f"sqlite:///{path}")
        assert recover(f"sqlite:///{path}")["counters"][0]["spent"] == in_use
    budget = PrivacyBudget.open("votes", f"sqlite:///{path}")
    assert budget.spent() == in_use
    budget.close()


def test_a_kill_before_the_ledgers_commit_loses_nothing(tmp_path: Path) -> None:
    """The witness has today's form, the ledger the earlier one: the same call goes on."""
    path = copied(tmp_path)
    changed(
        path,
        "UPDATE dpicl_counters SET spent = 12, returned = 4 WHERE id = 1",
        "UPDATE dpicl_marks SET reserved = 9 WHERE plan = 'votes'",
    )
    before = tmp_path / "before"
    shutil.copy(path, before)
    ledgers.upgrade(f"sqlite:///{path}")
    after = content(Path(f"{path}.witness"))
    for _ in range(2):
        put_back(before, path)
        ledgers.upgrade(f"sqlite:///{path}")
        assert content(Path(f"{path}.witness")) == after
    with pytest.warns(PrivacyWarning, match=r"'votes' vote: 1\)"):
        budget = PrivacyBudget.open("votes", f"sqlite:///{path}")
    assert budget.spent() == 9
    budget.close()


def put_back(source: Path, path: Path) -> None:
    shutil.copy(source, path)
    for beside in ("-wal", "-shm"):
        Path(f"{path}{beside}").unlink(missing_ok=True)


def test_steps_of_a_charge_that_is_open_are_counted(tmp_path: Path) -> None:
    """So a copy that lacks one of them is not taken up again."""
    path = copied(tmp_path)
    changed(
        path,
        "UPDATE dpicl_charges SET outcome = NULL, receipt = NULL, answer = NULL WHERE counter_id = 1 AND number = 2",
        "INSERT INTO dpicl_steps VALUES (1, 2, 0, 'a'), (1, 2, 1, 'b'), (1, 1, 0, 'of one that was answered')",
    )
    ledgers.upgrade(f"sqlite:///{path}")
    hashes = [hashlib.sha256(content.encode()).hexdigest() for content in "ab"]
    kept = ask(Path(f"{path}.witness"), "SELECT * FROM dpicl_kept_steps")
    assert kept == [("1.2", 0, hashes[0]), ("1.2", 1, hashes[1])]


@pytest.mark.filterwarnings(AFTER_A_KILL)
@pytest.mark.filterwarnings(OTHERS)
def test_no_owner_takes_part_more_often_if_the_earlier_copy_is_put_back(tmp_path: Path) -> None:
    """It takes part at most T times in all: before the upgrade, after it, and on the copy that was upgraded again."""
    path = copied(tmp_path, "tickets")
    before = Counter(f"owner-{i}" for question in range(7) for i in made.near(question))
    taken = Counter({name: min(5, count) for name, count in before.items()})
    for turns in (1, 6):
        ledgers.upgrade(f"sqlite:///{path}")
        recover(f"sqlite:///{path}")
        budget, line = made.paying(f"sqlite:///{path}", "few")
        store = made.store_of(owners=made.OWNERS)
        for _ in range(turns):
            taken.update(made.charged(line, store, [*range(made.OWNERS)])[1])
        budget.close()
        put_back(FOLDER / "tickets.sqlite", path)
    del taken[made.FORGOTTEN]  # two lives
    assert max(taken.values()) == 5


def test_a_plan_that_was_given_up_stays_given_up(tmp_path: Path) -> None:
    path = copied(tmp_path)
    gone = "UPDATE dpicl_marks SET plan = 'gone', ahead = -1, low = 0, reserved = allowed WHERE plan = 'afresh'"
    changed(path, gone)
    ledgers.upgrade(f"sqlite:///{path}")
    found = ask(Path(f"{path}.witness"), "SELECT low, reserved FROM dpicl_marks WHERE plan = 'gone'")
    assert found == [(-1, 40)]
    PrivacyBudget.open("votes", f"sqlite:///{path}").close()


def test_a_plan_that_the_ledger_lost_is_missed_after_the_upgrade(tmp_path: Path) -> None:
    path = copied(tmp_path)
    changed(path, "UPDATE dpicl_marks SET plan = 'gone' WHERE plan = 'afresh'")
    ledgers.upgrade(f"sqlite:///{path}")
    with pytest.raises(LedgerError, match="was rolled back \\('gone'"):
        PrivacyBudget.open("votes", f"sqlite:///{path}")


def test_the_earlier_release_cannot_read_the_witness_any_more(tmp_path: Path) -> None:
    path = copied(tmp_path)
    reads = "SELECT plan, line, principal, digest, allowed, low, reserved, ahead, before, state FROM dpicl_marks"
    assert len(ask(Path(f"{path}.witness"), reads)) == 7
    ledgers.upgrade(f"sqlite:///{path}")
    with pytest.raises(sqlite3.OperationalError, match="no such column: allowed"):
        ask(Path(f"{path}.witness"), reads)


# -- a configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["yaml", "toml"])
@pytest.mark.parametrize("kind", sorted({each.stem for each in FOLDER.glob("*.toml")} & RENAMED.keys()))
def test_a_renamed_kind_gets_its_name_and_nothing_else_changes(
    kind: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"server.{ending}"
    shutil.copy(FOLDER / f"{kind}.{ending}", path)
    path.chmod(0o640)
    old = path.read_text()
    code, out, _ = run(capsys, path, "--dry-run")
    assert (code, path.read_text(), list(tmp_path.iterdir())) == (0, old, [path])
    assert f"{kind} -> {RENAMED[kind]}" in out
    code, out, _ = run(capsys, path, "--json")
    told = json.loads(out)
    assert (code, told["changed"]) == (0, True)
    assert Path(told["kept"]).read_text() == old
    new = path.read_text()
    added = {"yaml": "  scores: true\n", "toml": "scores = true\n"}[ending]
    assert new.replace(added, "").replace(RENAMED[kind], kind) == old
    assert (added in new) == (kind == "scores")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, f"{path.name}.bak"]
    code, out, _ = run(capsys, path)
    assert (code, path.read_text()) == (0, new)
    assert "nothing was changed" in out


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "release: {kind: scores, labels: [a]}  # scores",
            "release: {kind: vote, scores: true, labels: [a]}  # scores",
        ),
        ("release: {\n  kind: scores,\n  labels: [a]}\n", "release: {\n  kind: vote, scores: true,\n  labels: [a]}\n"),
        ("release:\r\n    'kind': scores\r\n", "release:\r\n    'kind': vote\r\n    scores: true\r\n"),
        ("release:\n  kind: scores", "release:\n  kind: vote\n  scores: true"),
        ('release: {"kind":"scores"}\n', 'release: {"kind":"vote", scores: true}\n'),
        ("# kind: scores\nrelease: {kind: scores}\n", "# kind: scores\nrelease: {kind: vote, scores: true}\n"),
        (
            "release: {fields: {a: {kind: scores}}, kind: scores}\n",
            "release: {fields: {a: {kind: scores}}, kind: vote, scores: true}\n",
        ),
        ("\ufeffrelease: {kind: scores}\n", "\ufeffrelease: {kind: vote, scores: true}\n"),
    ],
)
def test_yaml_may_be_written_in_many_ways(
    before: str, after: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.yml"
    path.write_bytes(before.encode())
    assert run(capsys, path)[0] == 0
    assert path.read_bytes() == after.encode()
    assert yaml.safe_load(after)["release"]["scores"] is True


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('release.kind = "scores"\n', 'release.kind = "vote"\nrelease.scores = true\n'),
        ("release = {kind='scores', k=1}\n", "release = {kind='vote', scores = true, k=1}\n"),
        (
            '[head]\nkind = "scores"\n[release]\n  kind = "scores"',
            '[head]\nkind = "scores"\n[release]\n  kind = "vote"\n  scores = true',
        ),
        (
            '[server]\ntitle = """\nkind = "scores"\n"""\n[release]\nkind = "scores"\n',
            '[server]\ntitle = """\nkind = "scores"\n"""\n[release]\nkind = "vote"\nscores = true\n',
        ),
    ],
)
def test_toml_may_be_written_in_many_ways(
    before: str, after: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.toml"
    path.write_text(before)
    assert run(capsys, path)[0] == 0
    assert path.read_text() == after


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_every_name_that_is_refused_is_rewritten(old: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"release: {{kind: {old}, labels: [a, b]}}\n")
    assert run(capsys, path)[0] == 0
    assert yaml.safe_load(path.read_text())["release"] == {**of_today(old), "labels": ["a", "b"]}
    assert "dpicl upgrade FILE rewrites it" in renamed(old)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deep.yaml", b"release: " + b"[" * 3000),
        ("deep.toml", b"release = " + b"[" * 3000),
        ("damaged.npz", b"PK\x03\x04" + b"\0" * 60 + b"PK\x05\x06" + b"\0" * 8 + b"\x01\0" * 2 + b"\xff" * 8 + b"\0\0"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    code, _, err = run(capsys, path)
    assert (code, path.read_bytes(), list(tmp_path.iterdir())) == (1, content, [path])
    assert err.startswith(f"dpicl upgrade: PATH_OR_URL={str(path)!r} is not allowed: cannot be read")


@pytest.mark.parametrize("text", ["release: &it {kind: scores}\nhead: *it\n", "release:\n  ? kind\n  : scores\n"])
def test_a_kind_in_an_unusual_place_is_left_to_a_person(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    code, _, err = run(capsys, path)
    assert (code, path.read_text(), list(tmp_path.iterdir())) == (1, text, [path])
    assert "release.kind='scores' is not allowed: changed by hand here (kind: \"vote\", scores: true)" in err


def test_settings_that_are_gone_are_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.yaml"
    text = "release: {kind: label_vote}\nmodel: {url: ['http://secret-a', 'http://b'], concurrency: [2, 3]}\n"
    text += "store: {data: secret.csv, notes: secret.dpicl}\n"
    path.write_text(text)
    code, out, err = run(capsys, path, "--json")
    assert (code, path.read_text(), list(tmp_path.iterdir())) == (1, text, [path])
    assert json.loads(out)["error"] == "InvalidConfiguration"
    assert "server.yaml has 3 mistakes:" in err
    assert "  store.notes: leave it out" in err
    assert "  model.concurrency: leave it out" in err
    assert "  model.url: one address" in err
    assert "secret" not in err + out


def test_an_old_copy_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("release: {kind: label_vote}\n")
    kept = tmp_path / "server.yaml.bak"
    kept.write_text("another\n")
    code, _, err = run(capsys, path)
    assert (code, kept.read_text(), path.read_text()) == (1, "another\n", "release: {kind: label_vote}\n")
    assert "beside which no server.yaml.bak is" in err
    kept.write_text("release: {kind: label_vote}\n")  # of a call that was interrupted
    assert run(capsys, path)[0] == 0
    assert path.read_text() == "release: {kind: label-vote}\n"


@pytest.mark.parametrize("kept", ["another\n", ""])
def test_a_dry_run_refuses_an_old_copy_as_the_upgrade_does(
    kept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty one, too: an upgrade that was killed may have left it on a file system without links."""
    path = tmp_path / "server.yaml"
    path.write_text("release: {kind: label_vote}\n")
    (tmp_path / "server.yaml.bak").write_text(kept)
    code, _, said = run(capsys, path, "--dry-run")
    assert (code, said) == (1, run(capsys, path)[2])
    assert "beside which no server.yaml.bak is" in said
    (tmp_path / "server.yaml.bak").write_text(path.read_text())  # of a call that was interrupted
    assert run(capsys, path, "--dry-run")[0] == 0


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_old_copy_is_not_overwritten_where_there_are_no_links(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, kept = tmp_path / "server.yaml", tmp_path / "server.yaml.bak"
    path.write_text("release: {kind: label_vote}\n")

    def refuse(*_: object) -> None:
        kept.write_text("another\n")
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    if when == "before":
        kept.write_text("another\n")
    code, _, err = run(capsys, path)
    assert (code, kept.read_text(), path.read_text()) == (1, "another\n", "release: {kind: label_vote}\n")
    assert "beside which no server.yaml.bak is" in err


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A folder in which any user may write."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("needs the rights of root")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def test_root_gives_both_files_to_the_owner_and_the_group_of_the_old_one(
    everybodys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = everybodys / "server.yaml"
    path.write_text("release: {kind: label_vote}\n")
    os.chown(path, 12345, 23456)
    path.chmod(0o640)
    code, out, _ = run(capsys, path, "--json")
    assert (code, "warning" in json.loads(out)) == (0, False)
    for each in (path, path.with_name("server.yaml.bak")):
        found = each.stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12345, 23456, 0o640)


@pytest.mark.parametrize(("group", "mode", "left"), [(0, 0o640, 0o640), (23456, 0o664, 0o644)])
def test_another_user_is_told_which_files_are_not_the_owners(
    group: int, mode: int, left: int, everybodys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The group stays if the user is in it. Otherwise members of the user's own group may do what everybody may."""
    path = everybodys / "server.yaml"
    path.write_text("release: {kind: label_vote}\n")
    os.chown(path, 0, group)
    path.chmod(mode)
    assert run(capsys, path, "--dry-run")[0] == 0  # what the command imports is loaded
    groups = os.getgroups(), os.getegid()
    try:
        os.setgroups([0])
        os.setegid(34567)
        os.seteuid(12345)
        code, out, _ = run(capsys, path)
    finally:
        os.seteuid(0)
        os.setegid(groups[1])
        os.setgroups(groups[0])
    assert code == 0
    assert out.splitlines()[-1] == (
        f"warning: not of user 0 and group {group} as before, which you may not set: server.yaml, server.yaml.bak"
    )
    assert path.read_text() == "release: {kind: label-vote}\n"
    for each in (path, path.with_name("server.yaml.bak")):
        found = each.stat()
        assert (found.st_uid, found.st_gid) == (12345, 0 if group == 0 else 34567)
        assert stat.S_IMODE(found.st_mode) == left


def check_that_both_are_refused(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    """A dry run and a real one say the same to a user who may not write in the folder."""
    try:
        os.seteuid(12345)
        dry = run(capsys, path, "--dry-run")
        real = run(capsys, path)
    finally:
        os.seteuid(0)
    assert dry == real
    assert (dry[0], "can be written (Permission denied)" in dry[2]) == (1, True)


def test_a_dry_run_refuses_a_folder_in_which_the_user_may_not_write(
    everybodys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = everybodys / "server.yaml"
    path.write_text("release: {kind: label_vote}\n")
    path.chmod(0o644)
    everybodys.chmod(0o755)
    assert run(capsys, path, "--dry-run")[0] == 0
    check_that_both_are_refused(capsys, path)
    assert [each.name for each in everybodys.iterdir()] == ["server.yaml"]


def test_a_link_stays_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "server.yaml"
    real.write_text("release: {kind: label_vote}\n")
    link = tmp_path / "link.yaml"
    link.symlink_to(real)
    assert run(capsys, link)[0] == 0
    assert link.is_symlink()
    assert real.read_text() == "release: {kind: label-vote}\n"


# -- a store -----------------------------------------------------------------------------------------------------------

MODEL = DeterministicFakeEmbedding(size=16)
EVERY_STORE = [(release, name) for release, stores in STORES.items() for name in stores]


@pytest.mark.parametrize(("release", "name"), EVERY_STORE)
def test_a_store_answers_as_it_did_and_knows_its_owners_and_who_left(release: str, name: str, tmp_path: Path) -> None:
    path = copied_store(tmp_path, release, name)
    with np.load(path) as archive:
        header = json.loads(archive["header"].tobytes())
    with pytest.raises(StoreFileError, match=f"dpicl upgrade {name}.npz"):
        ExemplarStore.load(path, MODEL)
    assert main(["upgrade", str(path)]) == 0
    store = ExemplarStore.load(path, MODEL)
    told = json.loads(json.dumps(made.told(store)))
    expected = STORES[release][name]
    for fact in ("budgets", "releases"):
        assert sorted(told.pop(fact)) == sorted(expected[fact])
    assert told == {fact: value for fact, value in expected.items() if fact in told}
    assert told["forgotten"], "a mark is known again"
    with store.reading() as view:
        assert view.numbers.tolist() == [*range(len(expected["owners"]))]
    if "key" in header:
        assert store.mark_keys() == (bytes.fromhex(header["key"]),)
    assert store.add([{"input": "new", "output": "Positive", "owner": "owner-0"}]) == [header["next_id"]]
    with pytest.warns(PrivacyWarning, match="made up"):
        store.forget(expected["owners"][0])
    store.close()


def test_the_old_file_is_overwritten_and_its_mode_stays(tmp_path: Path) -> None:
    path = copied_store(tmp_path)
    path.chmod(0o640)
    other = tmp_path / "another name of it"
    os.link(path, other)
    left = tmp_path / f".named.npz.{'0' * 16}.tmp"
    shutil.copy(path, left)
    kept = tmp_path / ".named.npz.tmp"
    kept.write_text("another file")
    upgrade_file(path)
    assert set(other.read_bytes()) == {0}
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert {each.name for each in tmp_path.iterdir()} == {path.name, other.name, kept.name}


def test_a_store_behind_a_link_is_upgraded_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path = copied_store(tmp_path / "real")
    link = tmp_path / "link.npz"
    link.symlink_to(path)
    assert main(["upgrade", str(link)]) == 0
    assert link.is_symlink()
    ExemplarStore.load(path, MODEL).close()


def test_budgets_in_the_notes_that_a_store_names_come_along(tmp_path: Path) -> None:
    places = [str(FOLDER.with_name("cba1951") / "desk.jsonl.dpicl"), str(tmp_path / "absent.dpicl")]
    path = copied_store(tmp_path, "825a692", notes=places)
    damaged = copied_store(tmp_path, "825a692", "unnamed", notes=[str(tmp_path / "damaged.dpicl")])
    (tmp_path / "damaged.dpicl").write_text("no notes\n")
    before = damaged.read_bytes()
    with pytest.raises(StoreFileError, match="holds no notes"):
        upgrade_file(damaged)
    assert damaged.read_bytes() == before
    upgrade_file(path)
    store = ExemplarStore.load(path, MODEL)
    assert {each.name for each in store.budgets} > {"one", "two"}
    assert len(store.budgets) == 4
    store.close()


def test_a_dry_run_leaves_a_store_as_it_is_and_a_second_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied_store(tmp_path)
    before = path.read_bytes()
    code, out, _ = run(capsys, path, "--dry-run", "--json")
    told = {"store": str(path), "version": 2, "exemplars": 11, "owners": 6, "changed": False}
    assert (code, json.loads(out)) == (0, told)
    assert path.read_bytes() == before
    code, out, _ = run(capsys, path)
    assert (code, out) == (0, "named.npz: format 2 is now a SQLite database, with 11 exemplars of 6 owners\n")
    code, out, _ = run(capsys, path)
    assert (code, out) == (0, "named.npz: in today's form already; nothing was changed\n")
    assert [each.name for each in tmp_path.iterdir()] == ["named.npz"]
    assert run(capsys, path, "--witness", "w")[0] == 1


@pytest.mark.parametrize("fault", ["byte", "header", "version", "cut", "archive"])
def test_a_damaged_store_is_refused_and_left_alone(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied_store(tmp_path, **({"version": 4} if fault == "version" else {}))
    data = bytearray(path.read_bytes())
    if fault == "byte":
        data[data.index(b"text 4")] ^= 1
    elif fault == "header":
        data[data.index(b'"next_id"') + 11] ^= 1
    elif fault == "cut":
        del data[-30:]
    path.write_bytes(data)
    if fault == "archive":
        np.savez(path, header=np.array("{}"))
    before = path.read_bytes()
    for options in (["--dry-run"], []):
        code, out, err = run(capsys, path, *options)
        assert (code, out, path.read_bytes()) == (1, "", before)
        assert "text 4" not in err
        assert "build it anew from the records" in err or fault == "cut"
    assert [each.name for each in tmp_path.iterdir()] == ["named.npz"]


def test_a_store_that_is_written_just_now_is_left_alone(tmp_path: Path) -> None:
    """A process of the earlier release holds the file's lock while it writes."""
    path = copied_store(tmp_path)
    with open(path, "rb") as other:
        assert lock(other.fileno())
        with pytest.raises(StoreFileError, match="stop those that use it first"):
            upgrade_file(path)
    upgrade_file(path)


def test_a_dry_run_refuses_a_store_in_a_folder_in_which_the_user_may_not_write(
    everybodys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied_store(everybodys)
    path.chmod(0o666)
    assert run(capsys, path, "--dry-run")[0] == 0
    everybodys.chmod(0o755)
    before = path.read_bytes()
    check_that_both_are_refused(capsys, path)
    assert path.read_bytes() == before
    everybodys.chmod(0o777)
    os.chown(path, 12345, 23456)
    code, out, _ = run(capsys, path)
    assert (code, "warning" in out) == (0, False)
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 23456)


# -- other files -------------------------------------------------------------------------------------------------------


def test_other_files_are_refused_by_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = tmp_path / "head.npz"
    np.savez(head, about=np.array("{}"), weights=np.zeros(2))
    files = {
        "notes.dpicl": '{"format": "dpicl-notes-1", "key": "00"}\n',
        "head.npz.part": '{"format": "dpicl-fit-1"}\n',
        "job.part": '{"format": "dpicl-job-1"}\n',
        "data.jsonl": '{"text": "CANARY"}\n',
        "data.csv": "text,label\nCANARY,b\n",
        "list.yaml": "- CANARY\n",
        "keys.yaml": "CANARY: 00\n",
        "empty.yaml": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "other.db").write_bytes((FOLDER / "ledger.sqlite.witness").read_bytes())
    for name, words in {
        "head.npz": "it is a head: this release reads it as it is",
        "notes.dpicl": "notes of a data file: leave it beside that",
        "head.npz.part": "an unfinished fit: this release",
        "job.part": "run the job again",
        "data.jsonl": "a server's configuration",
        "data.csv": "PATH_OR_URL=",
        "list.yaml": "not a mapping",
        "keys.yaml": "a server's configuration",
        "empty.yaml": "not a mapping",
        "other.db": "is a database, but not a ledger",
        "absent.db": "a server's configuration",
    }.items():
        code, out, err = run(capsys, tmp_path / name)
        assert (code, out) == (1, ""), name
        assert words in err, name
        assert "CANARY" not in err, name


@pytest.mark.parametrize("url", ["sqlite:///absent.db", "mysql://desk@host/budgets"])
def test_addresses_that_hold_no_ledger_are_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, url)
    assert (code, err.startswith("dpicl upgrade: ")) == (1, True)
    assert list(tmp_path.iterdir()) == []


def test_a_ledgers_options_are_refused_beside_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("release: {kind: label_vote}\n")
    code, _, err = run(capsys, path, "--key-file", "k")
    assert (code, "--key-file='k'" in err) == (1, True)
    with pytest.raises(InvalidParameter, match="kept"), pytest.warns(PrivacyWarning, match="in memory"):
        ledgers.upgrade("sqlite://")


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["upgrade", "--help"])
    out = capsys.readouterr().out
    assert "dpicl upgrade server.yaml --dry-run" in out
    assert "--without-witness" in out
