"""What a second attacker of the ledger found: addresses, forks and numbers that were taken for something else."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import by_hand  # noqa: F401
import numpy as np
import pytest
import sqlalchemy as sa

from langchain_dpicl import InvalidParameter, LedgerError, PrivacyBudget
from langchain_dpicl.budget.witness import CounterKey, Mark, Witness
from langchain_dpicl.sql import Database


@pytest.fixture
def opened() -> Iterator[Any]:
    """opened(url, ...): a budget of 5 releases."""
    with contextlib.ExitStack() as stack:

        def make(url: str, **options: Any) -> PrivacyBudget:
            budget = PrivacyBudget(1000.0, 1e-5, options.pop("releases", 5), url, **options)
            return stack.enter_context(contextlib.closing(budget))

        yield make


class Bytes:
    """A path that is no text."""

    def __fspath__(self) -> bytes:
        return b"witness"


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Query string argument")  # SQLAlchemy's word that SQLite will not see it
@pytest.mark.parametrize("name", ["a:memory:b/l.db", "mode=memory/l.db", "l.db?mode=memory"])
def test_a_file_whose_address_speaks_of_memory_is_a_file(name: str, opened: Any, tmp_path: Path) -> None:
    """It has a witness, and is missed when it is gone."""
    path = tmp_path / name.partition("?")[0]
    path.parent.mkdir(exist_ok=True)
    url = f"sqlite:///{tmp_path}/{name}"
    opened(url).line("vote", 0.5).charge()
    path.unlink()
    with pytest.raises(LedgerError, match="is gone, and its witness"):
        opened(url)


@pytest.mark.parametrize(
    "witness",
    [":memory:", "sqlite://", "sqlite:///:memory:", "sqlite:///file:w?mode=memory&cache=shared&uri=true"],
)
def test_a_witness_in_memory_is_none(witness: str, opened: Any, ledger_url: str) -> None:
    """The ledger could be deleted, and its next process would start again."""
    with pytest.raises(InvalidParameter, match="one that is kept"):
        opened(ledger_url, witness=witness)


def test_a_witness_stands_where_its_path_says(opened: Any, ledger_url: str, tmp_path: Path) -> None:
    """Not beside a folder whose name ends at the "?"."""
    for place in (tmp_path / "why?" / "w", tmp_path / "50%25" / "w"):
        place.parent.mkdir()
        opened(f"{ledger_url}.{place.parent.name[:2]}", witness=place).line("vote", 0.5).charge()
        assert place.exists()


@pytest.mark.parametrize("witness", ["w\0", "w\udc80", Bytes(), b"w"])
def test_a_witness_that_no_path_can_name_is_refused(witness: Any, opened: Any, ledger_url: str) -> None:
    with pytest.raises(InvalidParameter, match="witness="):
        opened(ledger_url, witness=witness)


@pytest.mark.parametrize("end", ["\0", "\udc80", "?timeout=soon", "?check_same_thread=maybe"])
def test_an_address_that_cannot_be_read_is_a_typed_error(end: str, opened: Any, ledger_url: str) -> None:
    with pytest.raises((InvalidParameter, LedgerError)):
        opened(f"{ledger_url}{end}")


@pytest.mark.parametrize(
    "url",
    ["sqlite://user:s3cret@host/db", "postgresql://user:s3cret@host/db?host=a,b&port=1,two"],
)
def test_an_address_that_no_driver_reads_shows_no_password(url: str, opened: Any) -> None:
    with pytest.raises(LedgerError, match="cannot be read") as caught:
        opened(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("option", ["nolock=1", "vfs=unix-none", "immutable=1"])
@pytest.mark.parametrize("what", ["ledger", "witness"])
def test_an_address_that_turns_locks_off_is_refused(what: str, option: str, opened: Any, tmp_path: Path) -> None:
    """Two processes would count at the same time."""
    urls = {each: f"sqlite:///file:{tmp_path}/{each}?uri=true" for each in ("ledger", "witness")}
    urls[what] += f"&{option}"
    with pytest.raises(LedgerError, match="does not let processes share it"):
        opened(urls["ledger"], witness=urls["witness"])


# -- forks -------------------------------------------------------------------------------------------------------------


def test_a_ledger_that_is_opened_during_a_fork_waits_for_it(
    opened: Any, ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No child inherits a connection, though another thread opens a ledger while the fork looks for them."""
    budget = opened(ledger_url)
    budget.line("vote", 0.5).charge()
    threads: list[threading.Thread] = []
    inherited = Database.inherited.fget  # type: ignore[attr-defined]

    def look(database: Database) -> bool:
        if not threads:
            threads.append(threading.Thread(target=Database, args=(f"{ledger_url}.other",)))
            threads[0].start()
            threads[0].join(0.2)
        return bool(inherited(database))

    pool = budget._ledger._engine.pool
    assert pool.checkedin()
    monkeypatch.setattr(Database, "inherited", property(look))
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    threads[0].join(10)
    assert not threads[0].is_alive()
    assert not pool.checkedin(), "the child has the parent's connections"


# -- interrupts --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::langchain_dpicl.errors.PrivacyWarning")
def test_a_charge_that_was_interrupted_after_its_commit_keeps_its_interval(
    opened: Any, ledger_url: str, tmp_path: Path
) -> None:
    """It may be reopened, so no older copy gives its release to somebody else."""
    budget = opened(ledger_url, witness=tmp_path / "w")
    line = budget.line("vote", 0.5)
    path = Path(ledger_url.removeprefix("sqlite:///"))
    budget.close()
    shutil.copy(path, tmp_path / "old.db")
    interrupts = [RuntimeError("by a handler of a signal")]

    @sa.event.listens_for(budget._ledger._engine.pool, "checkin")
    def interrupt(*_: Any) -> None:
        if interrupts and budget._ledger._busy and "job" in read(path, "SELECT query FROM dpicl_queries"):
            raise interrupts.pop()

    with pytest.raises(LedgerError, match="if so, it counts"):
        line.charge(queries=["job"])
    assert not interrupts
    budget.close()
    assert line.reopen("job") is not None, "a release that begins"
    budget.close()
    shutil.copy(tmp_path / "old.db", path)
    again = opened(ledger_url, witness=tmp_path / "w").line("vote", 0.5)
    assert again.remaining() == 4


def test_an_interval_is_withdrawn_only_as_it_was_moved(tmp_path: Path) -> None:
    """A recovery by an older reading may write an earlier beginning beside a later end."""
    key = CounterKey("p", "vote", "", "0")
    with contextlib.closing(Witness(f"sqlite:///{tmp_path}/w")) as witness:
        witness.begin()
        assert witness.follow(key, 2, 3) is None
        witness.write([Mark(key, 2, 9)])
        witness.withdraw(key, 2, 5)
        assert witness.marks() == [Mark(key, 2, 9)]


def read(path: Path, query: str) -> list[str]:
    """A column of a database in a file."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [value for (value,) in connection.execute(query)]


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_numbers_of_numpy_count_as_what_they_are(opened: Any, ledger_url: str) -> None:
    """SQLite would store their bytes, which add up to 0."""
    line = opened(ledger_url, releases={"tokens": 9}).line("tokens", 0.5)
    (charge,) = line.charge(units=np.int64(5))
    assert (charge.number, line.spent()) == (5, 5)
    line.record(charge, unused=np.int64(4))
    assert line.spent() == 1
