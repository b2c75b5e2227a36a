"""`budget/witness.py`: whatever happens to the ledger's files and processes, all copies together give away one plan."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import thief
from by_hand import charged
from moments import numbers_of

from langchain_dpicl import InvalidParameter, LedgerError, PrivacyBudget, PrivacyBudgetExceeded
from langchain_dpicl.budget.ledger import UNWATCHED, Ledger
from langchain_dpicl.budget.upkeep import recover
from langchain_dpicl.budget.witness import Witness
from langchain_dpicl.errors import PrivacyWarning
from langchain_dpicl.sql import shown

TestThief = thief.Thief.TestCase
TestPrincipalThief = thief.PrincipalThief.TestCase
TestTicketThief = thief.TicketThief.TestCase


def test_a_charge_moves_the_mark_by_its_units_and_an_end_leaves_it(ledger_url: str) -> None:
    """Whatever the size of the plan: a process holds nothing back, so nothing is lost with it."""
    ledger = Ledger(ledger_url)
    plan = ledger.store_plan("n", "{}", "0" * 64, {"vote": 100_000}).id
    witness = Witness(f"{ledger_url}.witness")
    marks = []
    for units in (1, 5, 2):
        charged(ledger, plan, units=units)
        marks += witness.marks()
    assert [(mark.low, mark.reserved) for mark in marks] == [(0, 1), (1, 6), (6, 8)]
    ledger.close()
    assert witness.marks() == marks[-1:]
    witness.close()


def test_readers_write_nothing(ledger_url: str) -> None:
    budget = PrivacyBudget(1000.0, 1e-5, 10, ledger_url)
    budget.line("vote", 0.5).charge(2)
    budget.close()
    path = Path(ledger_url.removeprefix("sqlite:///"))
    before = [Path(f"{path}{end}").read_bytes() for end in ("", ".witness")]
    Path(f"{path}.witness").unlink()  # not even needed
    reader = PrivacyBudget.open("default", ledger_url, witness=UNWATCHED)
    assert (reader.spent(), reader.remaining()) == (2, 8)
    with pytest.raises(LedgerError, match="opened to be read"):
        reader.line("vote", 0.5).charge()
    reader.close()
    assert path.read_bytes() == before[0]
    assert not Path(f"{path}.witness").exists()


def test_a_ledger_in_memory_has_no_witness() -> None:
    with pytest.warns(PrivacyWarning, match="memory"), pytest.raises(InvalidParameter, match="witness"):
        PrivacyBudget(1.0, 1e-5, 10, "sqlite://", witness="w")
    with pytest.raises(InvalidParameter, match="witness"):
        PrivacyBudget(1.0, 1e-5, 10, "sqlite:///x.db", witness=3)  # type: ignore[arg-type]


def payers(line: Any, store: Any, **options: Any) -> int:
    """How many owners take part in an answer for which all are eligible."""
    (entry,) = line.charge(owners=[line.ask(store, numbers_of(store))], **options)
    return int(entry.participants.take().size)


# -- recover -----------------------------------------------------------------------------------------------------------


def test_without_a_witness_the_whole_plan_counts_for_every_principal(
    ledger_url: str, store_of: Any, records: Any
) -> None:
    """Also for a principal whom the copy does not know: it may have spent all of it elsewhere."""
    callers = PrivacyBudget(1000.0, 1e-5, 4, ledger_url, "callers", scope="per_principal")
    callers.line("vote", 0.5).charge(principal="ann")
    callers.close()
    owners = PrivacyBudget(1000.0, 1e-5, 2, ledger_url, "owners", tickets=True)
    owners.line("vote", 0.5)
    owners.close()
    both = PrivacyBudget(1000.0, 1e-5, 2, ledger_url, "both", tickets=True, scope="per_principal")
    both.line("vote", 0.5)
    both.close()
    Path(f"{ledger_url.removeprefix('sqlite:///')}.witness").unlink()
    with pytest.raises(LedgerError, match="no witness"):
        PrivacyBudget.open("callers", ledger_url)
    found = recover(ledger_url)
    assert not found["had_witness"]
    line = PrivacyBudget.open("callers", ledger_url).line("vote", 0.5)
    assert [line.remaining(who) for who in ("ann", "bob")] == [0, 0]
    for who in ("ann", "bob"):
        with pytest.raises(PrivacyBudgetExceeded):
            line.charge(principal=who)
    paying = PrivacyBudget.open("owners", ledger_url).line("vote", 0.5)
    assert payers(paying, store_of(records(3))) == 0, "nobody has a ticket left"
    of_each = PrivacyBudget.open("both", ledger_url).line("vote", 0.5)
    assert payers(of_each, store_of(records(3)), principal="bob") == 0, "nor in the counter of somebody new"


def test_a_charge_whose_process_was_killed_costs_every_owner_a_ticket(
    ledger_url: str, store_of: Any, records: Any
) -> None:
    """Between the witness's commit and the ledger's: nobody can tell whether it was answered."""
    store = store_of(records(3))
    line = PrivacyBudget(1000.0, 1e-5, 3, ledger_url, tickets=True).line("vote", 0.5)
    assert payers(line, store) == 3
    witness = line._ledger._witness
    assert witness is not None
    (mark,) = witness.marks()
    assert witness.follow(mark.key, 1, 1) is None  # and then it was killed
    with pytest.warns(PrivacyWarning, match="counts as spent"):
        assert payers(line, store) == 3  # no restart is needed, and no error comes of it
    assert payers(line, store) == 0, "two of three"
    with contextlib.closing(sqlite3.connect(ledger_url.removeprefix("sqlite:///"))) as connection:
        assert connection.execute("SELECT spent, lost FROM dpicl_counters").fetchall() == [(4, 1)]


def test_recover_keeps_the_count_of_an_older_release_if_it_is_told_to(ledger_url: str) -> None:
    budget = PrivacyBudget(1000.0, 1e-5, 10, ledger_url)
    budget.line("vote", 0.5).charge(2)
    budget.close()
    with pytest.raises(InvalidParameter, match="keep_count"):
        recover(ledger_url, keep_count=True)
    Path(f"{ledger_url.removeprefix('sqlite:///')}.witness").unlink()
    recover(ledger_url, keep_count=True)
    assert PrivacyBudget.open("default", ledger_url).remaining() == 8


# -- what is shown -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:hunter2@host/db",
        "postgresql://user@host/db?password=hunter2",
        "postgresql+psycopg://host/db?user=u&sslpassword=hunter2&sslmode=require",
        "postgresql://host/db?options=hunter2",
        "sqlite:///x.db?key=hunter2",
        "nosuch://h:hunter2",
    ],
)
def test_no_address_shows_a_password(url: str, tmp_path: Path) -> None:
    assert "hunter2" not in shown(url)
    if url.startswith("sqlite"):
        return
    address = url.replace("host", "127.0.0.1:9")
    for given, witness in ((address, None), (f"sqlite:///{tmp_path}/y.db", address)):
        with pytest.raises((LedgerError, InvalidParameter)) as caught:
            Ledger(given, witness=witness)
        assert "hunter2" not in f"{caught.value!r} {caught.value}"


def test_an_address_keeps_what_is_no_secret() -> None:
    assert shown("sqlite:///file:b.db?mode=ro&uri=true").endswith("?mode=ro&uri=true")
    assert shown("postgresql://user:x@host:5433/db?password=y") == "postgresql://user:***@host:5433/db"
