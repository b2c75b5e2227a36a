"""`serving.secrets`: variables of the environment in a configuration, and a file of keys that changes."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from langchain_dpicl import InvalidParameter
from langchain_dpicl.cli import main
from langchain_dpicl.errors import InvalidConfiguration
from langchain_dpicl.serving import secrets
from langchain_dpicl.serving.app import create_app
from langchain_dpicl.serving.config import read
from langchain_dpicl.serving.guards import ApiKeys, hash_of, new_key

SECRET = "CANARY-secret-4711"
BUDGET: dict[str, Any] = {"epsilon": 300, "delta": 1e-5, "releases": 30, "name": "tickets"}
VOTE: dict[str, Any] = {
    "store": {"data": "tickets.jsonl", "owner_key": "who"},
    "release": {"kind": "vote", "labels": ["a", "b"]},
    "selector": {"members": 10, "shots": 2},
    "keys": {"mobile": "0" * 64},
}


@pytest.fixture
def folder(unthinking: None, tmp_path: Path) -> Path:
    """With a file of 60 records."""
    rows = [{"text": f"text {i}", "label": "ab"[i % 2], "who": f"p{i}"} for i in range(60)]
    (tmp_path / "tickets.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def file_of(folder: Path, **sections: Any) -> Path:
    path = folder / "server.yaml"
    path.write_text(json.dumps({**VOTE, "budget": BUDGET, **sections}))
    return path


def opened(path: Path) -> Any:
    return create_app(read(path))


def asks(keys: ApiKeys, key: str) -> str | None:
    """Whose key it is; None: nobody's."""
    headers = [(b"authorization", f"Bearer {key}".encode())]
    try:
        return keys.principal(Request({"type": "http", "method": "POST", "path": "/", "headers": headers}))
    except HTTPException:
        return None


# -- variables of the environment --------------------------------------------------------------------------------------


def test_variables_stand_for_keys_and_addresses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = new_key()
    for name, value in {"PASSWORD": SECRET, "URL": "http://model:8080/v1", "HASH": hash_of(key), "FILE": "b"}.items():
        monkeypatch.setenv(name, value)
    settings = read(
        file_of(
            folder,
            budget={**BUDGET, "ledger": "postgresql://dpicl:${PASSWORD}@db/${FILE}", "witness": "sqlite:///w-${FILE}"},
            model={"url": {"env": "URL"}},
            metrics={"key": {"env": "HASH"}},
            keys={"mobile": "${HASH}", "desk": ["1" * 64, {"env": "HASH"}]},
            store={"url": "postgresql://dpicl:${PASSWORD}@db/records", "name": "notes"},
            release={"kind": "vote", "labels": ["a", "b"], "instruction": "Say ${PASSWORD}"},
        )
    )
    assert settings.budget is not None
    assert settings.metrics is not None
    assert settings.budget.ledger == f"postgresql://dpicl:{SECRET}@db/b"
    assert settings.budget.witness == "sqlite:///w-b"
    assert settings.store is not None
    assert settings.store.url == f"postgresql://dpicl:{SECRET}@db/records"
    assert settings.model.url == "http://model:8080/v1"
    assert settings.metrics.key == hash_of(key)
    assert settings.keys == {"mobile": hash_of(key), "desk": ["1" * 64, hash_of(key)]}
    assert settings.release.instruction == "Say ${PASSWORD}", "a prompt's text stays as it is"  # type: ignore[union-attr]
    for shown in map(repr, (settings, str(settings), settings.budget, settings.metrics, settings.store)):
        assert SECRET not in shown
        assert hash_of(key) not in shown


@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_variable_is_named_with_its_field(
    value: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    if value is not None:
        monkeypatch.setenv("NOWHERE", value)
    path = file_of(
        folder, budget={**BUDGET, "ledger": "sqlite:///${NOWHERE}"}, keys={"mobile": {"env": "NOWHERE"}, "x": "${A B}"}
    )
    with pytest.raises(InvalidConfiguration) as caught:
        read(path)
    said = str(caught.value)
    for field in ("budget.ledger", "keys.mobile"):
        assert f"{field}: the environment has no NOWHERE" in said
    assert "keys.x: ${NAME} names a variable" in said


@pytest.mark.parametrize(
    "ledger",
    [
        f"postgresql://dpicl:{SECRET}@127.0.0.1:1/budgets",
        f"postgresql://127.0.0.1:1/budgets?password={SECRET}",
        f"mysql://dpicl:{SECRET}@db/budgets",
        f"postgresql://dpicl:a@{SECRET}@127.0.0.1:1/budgets",
        f"nothing://{SECRET}",
        f"postgresql://dpicl:{SECRET}@db:port/budgets",
        f"sqlite:////nowhere/at-all/b.db?key={SECRET}",
    ],
)
@pytest.mark.parametrize("place", ["ledger", "store"])
def test_no_error_shows_a_secret(
    place: str,
    ledger: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ADDRESS", ledger)
    sections = {
        "ledger": {"budget": {**BUDGET, "ledger": "${ADDRESS}"}},
        "store": {"store": {"url": {"env": "ADDRESS"}}},
    }
    path = file_of(folder, **sections[place])
    assert main(["serve", "--config", str(path), "--check"]) != 0
    said = "".join(capsys.readouterr()) + caplog.text
    assert place in said or "connect" in said
    assert SECRET not in said


def test_a_check_shows_no_secret(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("LEDGER", f"sqlite:///{folder}/{SECRET}.db")
    path = file_of(folder, budget={**BUDGET, "ledger": {"env": "LEDGER"}})
    for more in ([], ["--json"]):
        assert main(["serve", "--config", str(path), "--check", *more]) == 0
        assert SECRET not in "".join(capsys.readouterr())
    assert (folder / f"{SECRET}.db").exists()


@pytest.mark.parametrize("field", ["keys.mobile", "metrics.key", "server.port"])
def test_a_secret_in_a_wrong_place_is_not_shown(field: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", SECRET)
    section, name = field.split(".")
    path = file_of(folder, **{section: {name: "${KEY}"}})
    with pytest.raises((InvalidConfiguration, InvalidParameter)) as caught:
        opened(path)
    assert SECRET not in str(caught.value)


# -- a file of keys ----------------------------------------------------------------------------------------------------


def test_a_file_of_keys_is_followed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new, other = new_key(), new_key(), new_key()
    file = folder / "keys.yaml"
    file.write_text(json.dumps({"desk": hash_of(old)}))
    keys = read(file_of(folder, keys="keys.yaml")).api_keys()
    assert keys is not None
    assert (asks(keys, old), asks(keys, new)) == ("desk", None)
    file.write_text(json.dumps({"desk": [hash_of(old), hash_of(new)], "night": hash_of(other)}))
    assert (asks(keys, old), asks(keys, new), asks(keys, other)) == ("desk", "desk", "night")
    file.write_text(json.dumps({"desk": hash_of(new)}))
    assert (asks(keys, old), asks(keys, new), asks(keys, other)) == (None, "desk", None)
    said = [record.getMessage() for record in caplog.records if "keys" in record.getMessage()]
    assert said == ["the keys were read again: desk, night", "the keys were read again: desk"]


def test_a_change_within_one_tick_of_the_clock_is_seen(folder: Path) -> None:
    """Equal size and equal times: another key in the place of one, quickly."""
    old, new = new_key(), new_key()
    file = folder / "keys.yaml"
    file.write_text(json.dumps({"desk": hash_of(old)}))
    keys = ApiKeys(news=secrets.KeyFile(file).news)
    times = file.stat().st_mtime_ns
    assert asks(keys, old) == "desk"
    file.write_text(json.dumps({"desk": hash_of(new)}))
    os.utime(file, ns=(times, times))
    assert (asks(keys, old), asks(keys, new)) == (None, "desk")


@pytest.mark.parametrize(
    "bad", [None, "", "{}", "[1]", "desk: [", "desk: CANARY", '{"": "x"}', '{"desk": {"env": "NO"}}']
)
def test_a_file_that_cannot_be_used_changes_nothing(
    bad: str | None, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, file = new_key(), folder / "keys.yaml"
    file.write_text(json.dumps({"desk": hash_of(key)}))
    keys = ApiKeys(news=secrets.KeyFile(file).news)
    monkeypatch.setattr(secrets, "_RACY_SECONDS", -1.0)
    file.unlink()
    if bad is not None:
        file.write_text(bad)
    with caplog.at_level(logging.ERROR):
        assert (asks(keys, key), asks(keys, key)) == ("desk", "desk")
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "the keys cannot be read again, and those before stay"
    ], "once for a change"
    assert "CANARY" not in caplog.text
    with pytest.raises(InvalidParameter, match=r"keys|name"):
        ApiKeys(news=secrets.KeyFile(file).news)
