"""`dpicl upgrade`: what the release of 2644f89 wrote, read by today's code, with every charge in it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from earlier_release import EXPECTED, FOLDER, READS_LISTS, ask, content, copied, made

from langchain_dpicl import InvalidParameter, LedgerError, PlanMismatch, PrivacyBudget, PrivacyWarning
from langchain_dpicl.budget import upgrade as ledgers
from langchain_dpicl.budget.upkeep import recover
from langchain_dpicl.cli import main
from langchain_dpicl.spec.conflicts import renamed
from langchain_dpicl.spec.releases import RENAMED, of_today

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


@pytest.mark.parametrize("name", ["ledger", "free", "killed"])
def test_an_earlier_ledger_is_refused_with_the_command_that_upgrades_it(name: str, tmp_path: Path) -> None:
    path = copied(tmp_path, name)
    before = content(path)
    for opened in (lambda: PrivacyBudget(3.0, 1e-5, 5, f"sqlite:///{path}"), lambda: recover(f"sqlite:///{path}")):
        with pytest.raises(LedgerError, match=r"schema version 6; .* version 7 alone; `dpicl upgrade PATH`"):
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
    assert np.all(np.array(_numbers(made.state(budget))) >= np.array(_numbers(expected)) * (1 - 1e-12))
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
    used = ask(path, "SELECT tickets, digest FROM dpicl_usage")
    found = ledgers.upgrade(f"sqlite:///{path}")
    assert found is not None
    file = Path(str(found["key_file"]))
    assert file == path.with_name("ledger.sqlite.key")
    assert file.read_text().strip() == key
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not any(key.encode() in each.read_bytes() for each in tmp_path.glob("ledger.sqlite*") if each != file)
    assert bytes.fromhex(key) not in path.read_bytes()
    assert ask(path, "SELECT tickets, digest FROM dpicl_usage") == used
    budget, chain = made.chains(f"sqlite:///{path}")["tickets"]()
    made.asked(chain, {"input": "a third question"})
    budget.close()
    assert ask(path, "SELECT size FROM dpicl_owner_index") == [(60,)], "no owner came a second time"
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
    with pytest.warns(PrivacyWarning, match="not closed by every process"):
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


def test_shares_of_a_ledger_of_todays_version_are_written_anew_too(tmp_path: Path) -> None:
    path = copied(tmp_path)
    ledgers.upgrade(f"sqlite:///{path}")
    ((old,),) = ask(FOLDER / "ledger.sqlite", "SELECT content FROM dpicl_plans WHERE name = 'visits'")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE dpicl_plans SET content = ? WHERE name = 'visits'", (old,))
    connection.close()
    found = ledgers.upgrade(f"sqlite:///{path}")
    assert found is not None
    assert (found["version"], found["rewritten"]) == (7, ["visits"])
    assert "shares" in ask(path, "SELECT content FROM dpicl_plans WHERE name = 'visits'")[0][0]


def test_tables_are_those_of_a_new_ledger_and_no_id_comes_again(tmp_path: Path) -> None:
    PrivacyBudget(3.0, 1e-5, 5, f"sqlite:///{tmp_path / 'new.db'}").close()
    path = copied(tmp_path)
    ledgers.upgrade(f"sqlite:///{path}")

    def columns(file: Path) -> dict[str, list[Any]]:
        names = [name for (name,) in ask(file, "SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: ask(file, f"SELECT * FROM pragma_table_info('{name}')") for name in names}

    assert columns(path) == columns(tmp_path / "new.db")
    assert sorted(ask(path, "SELECT * FROM sqlite_sequence")) == [("dpicl_counters", 8), ("dpicl_plans", 6)]
    assert ask(path, "PRAGMA foreign_key_check") == []


def test_a_dry_run_changes_nothing_and_a_second_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(tmp_path)
    before = content(path)
    witness = content(path.with_name("ledger.sqlite.witness"))
    code, out, _ = run(capsys, path, "--dry-run", "--json")
    told = json.loads(out)
    assert (code, told["version"], told["changed"]) == (0, 6, False)
    assert content(path) == before
    assert not path.with_name("ledger.sqlite.key").exists()
    code, out, _ = run(capsys, f"sqlite:///{path}", "--json")
    assert json.loads(out) == {**told, "changed": True}
    after = content(path)
    code, out, _ = run(capsys, path)
    assert code == 0
    assert "in today's form already; nothing was changed" in out
    assert content(path) == after
    assert content(path.with_name("ledger.sqlite.witness")) == witness


def test_a_ledger_without_its_own_witness_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(tmp_path)
    witness = path.with_name("ledger.sqlite.witness")
    shutil.copy(FOLDER / "free.sqlite.witness", witness)
    before = content(path)
    code, _, err = run(capsys, path)
    assert (code, "belongs to another ledger" in err) == (1, True)
    code, _, err = run(capsys, path, "--without-witness")
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
    code, _, err = run(capsys, path)
    assert (code, "key_file=" in err, "another key" in err) == (1, True, True)
    assert content(path) == before
    assert run(capsys, path, "--key-file", tmp_path / "own.key")[0] == 0
    assert path.with_name("ledger.sqlite.key").read_text() == "00" * 32


@pytest.mark.parametrize("version", ["5", "8", "two"])
def test_another_version_is_refused(version: str, tmp_path: Path) -> None:
    path = copied(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE dpicl_meta SET value = ? WHERE key = 'schema_version'", (version,))
    connection.close()
    with pytest.raises(LedgerError, match=f"schema version {version}; this release upgrades version 6 alone"):
        ledgers.upgrade(f"sqlite:///{path}")


@pytest.mark.parametrize("table", ["dpicl_filters", "dpicl_charges", "dpicl_meta"])
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

    def careless(connection: Any) -> None:
        honest(connection)
        connection.exec_driver_sql("UPDATE dpicl_counters SET spent = spent - 1 WHERE id = 1")

    monkeypatch.setattr(ledgers, "_change_tables", careless)
    with pytest.raises(LedgerError, match="do not add up"):
        ledgers.upgrade(f"sqlite:///{path}")
    assert content(path) == before


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
    path.write_text(text)
    code, out, err = run(capsys, path, "--json")
    assert (code, path.read_text(), list(tmp_path.iterdir())) == (1, text, [path])
    assert json.loads(out)["error"] == "InvalidConfiguration"
    assert "server.yaml has 2 mistakes:" in err
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


def test_a_dry_run_refuses_a_folder_in_which_the_user_may_not_write(
    everybodys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = everybodys / "server.yaml"
    path.write_text("release: {kind: label_vote}\n")
    path.chmod(0o644)
    everybodys.chmod(0o755)
    assert run(capsys, path, "--dry-run")[0] == 0
    try:
        os.seteuid(12345)
        dry = run(capsys, path, "--dry-run")
        real = run(capsys, path)
    finally:
        os.seteuid(0)
    assert dry == real
    assert (dry[0], "can be written (Permission denied)" in dry[2]) == (1, True)
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


# -- other files -------------------------------------------------------------------------------------------------------


def test_other_files_are_refused_by_what_they_are(
    tmp_path: Path, store_of: Any, records: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store.npz"
    store_of(records(3)).save(store)
    head, old = tmp_path / "head.npz", tmp_path / "old.npz"
    np.savez(head, about=np.array("{}"), weights=np.zeros(2))
    np.savez(old, header=np.array('{"format": "langchain-dpicl store", "version": 2}'))
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
        "store.npz": "it is a saved store: this release reads it as it is",
        "head.npz": "it is a head: this release reads it as it is",
        "old.npz": "build it anew from the records",
        "notes.dpicl": "the notes of a data file: this release reads it as it is",
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
