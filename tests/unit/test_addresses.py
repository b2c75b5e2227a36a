"""Addresses of databases: which ones are used, and that none shows a password or a part of one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import InvalidParameter, LedgerError, PostgresExemplarStore
from langchain_dpicl.budget.ledger import Ledger
from langchain_dpicl.cli import main
from langchain_dpicl.sql import parse, shown

AMBIGUOUS = [
    "postgresql://app:Sup3r@S3cretTail@127.0.0.1:9/db",
    "postgresql+psycopg://app:Sup3r@S3cretTail@127.0.0.1:9/db",
    "postgres://app:Sup3r@S3cretTail/more@127.0.0.1:9",
    "postgresql://app:Sup3r@S3cretTail?more@127.0.0.1:9/db",
    "postgresql://app:Sup3r@S3cretTail:5@127.0.0.1:9/db",
    "postgresql://127.0.0.1:9/db?password=Sup3r@S3cretTail",
    "postgresql://app@corp:S3cretTail@127.0.0.1:9/db",
    "mysql://app:Sup3r@S3cretTail@127.0.0.1/db",
]
PARTS = ("Sup3r", "S3cret", "Tail")


def is_silent(said: str) -> bool:
    return not any(part in said for part in PARTS)


@pytest.mark.parametrize("url", AMBIGUOUS)
def test_an_address_whose_password_is_not_escaped_is_refused_and_not_shown(
    url: str, tmp_path: Path, embeddings: Any, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    uses = {
        "ledger": lambda: Ledger(url),
        "witness": lambda: Ledger(f"sqlite:///{tmp_path}/l.db", witness=url),
        "url": lambda: PostgresExemplarStore.open(url, embeddings),
    }
    for parameter, use in uses.items():
        with pytest.raises(InvalidParameter, match=rf"^{parameter}='str' .* with %40 for an \"@\"") as caught:
            use()
        assert is_silent(f"{caught.value!r} {caught.value} {vars(caught.value)}")
        assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    assert main(["budget", "show", "--ledger", url]) == 1
    assert is_silent("".join(capsys.readouterr()) + caplog.text)
    assert shown(url) == "an address that cannot be read"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "password"),
    [
        ("postgresql://app:Sup3r%40S3cretTail@127.0.0.1:9/db", "Sup3r@S3cretTail"),
        ("postgresql://app:Sup3r/S3cret#Tail:@127.0.0.1:9/db", "Sup3r/S3cret#Tail:"),
        ("postgresql://app:Sup3r%3FS3cretTail@127.0.0.1:9/db", "Sup3r?S3cretTail"),
        ("postgresql://127.0.0.1:9/db?user=app&password=Sup3r%40S3cretTail", None),
    ],
)
def test_an_address_whose_password_is_escaped_is_used_and_its_password_not_shown(
    url: str, password: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert parse(url, "ledger", "").password == password
    with pytest.raises(LedgerError, match="refused") as caught:
        Ledger(url)
    assert is_silent(f"{caught.value!r} {caught.value} {shown(url)} {caplog.text}")


def test_a_path_is_no_password() -> None:
    url = "sqlite:////home/me@corp/budget@1.db"
    assert parse(url, "ledger", "").database == "/home/me@corp/budget@1.db"


@pytest.mark.parametrize(
    "driver",
    [
        *("postgresql+asyncpg", "postgresql+psycopg2", "postgresql+psycopg_async", "postgresql+pg8000"),
        *("sqlite+aiosqlite", "sqlite+pysqlcipher", "mysql", "mssql+pyodbc"),
    ],
)
def test_no_other_driver_is_used(driver: str, tmp_path: Path) -> None:
    url = f"{driver}://app:S3cret@127.0.0.1:9/{tmp_path}/db"
    given: tuple[dict[str, str], ...] = ({"url": url}, {"url": f"sqlite:///{tmp_path}/l.db", "witness": url})
    for each in given:
        with pytest.raises(LedgerError, match=r"is on sqlite:///FILE or postgresql\+psycopg://") as caught:
            Ledger(**each)
        assert is_silent(str(caught.value))
    assert list(tmp_path.iterdir()) == []
