"""The store beside a data file takes over what an earlier release wrote down there, in ``FILE.dpicl``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from earlier_release import FOLDER
from langchain_core.embeddings import DeterministicFakeEmbedding
from moments import numbers_of

from langchain_dpicl import (
    ExemplarStore,
    LedgerError,
    PrivacyBudget,
    PrivacyWarning,
    StoreFileError,
)
from langchain_dpicl.cli import main
from langchain_dpicl.store.kept import store_of
from langchain_dpicl.store.notes import read_notes
from langchain_dpicl.store.records import RecordKeys

EARLIER = FOLDER.with_name("cba1951") / "desk.jsonl.dpicl"
KEYS = RecordKeys("text", "label", "who")
ROWS = [{"text": f"text {i}", "label": "a", "who": f"p{i}"} for i in range(4)]
MODEL = DeterministicFakeEmbedding(size=8)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data file, of which only the place counts here, with the notes of an earlier release."""
    shutil.copy(EARLIER, tmp_path)
    return tmp_path / "desk.jsonl"


def kept(data: Path, url: Any = None) -> ExemplarStore:
    """As a command and a server open it."""
    return store_of(data, ROWS, MODEL, KEYS, url, lambda text: None, parameter="store.file")


def taking_part(store: ExemplarStore, ledger: Path, key_file: Path | None = None) -> int:
    """The owners who take part in one more answer; each has one ticket."""
    budget = PrivacyBudget(2.0, 1e-5, 1, f"sqlite:///{ledger}", "near", tickets=True, key_file=key_file)
    budget.watch(store)
    line = budget.line("vote", 1.0)
    (entry,) = line.charge(owners=[line.ask(store, numbers_of(store))])
    budget.close()
    return len(entry.participants.take())  # type: ignore[union-attr]


@pytest.mark.parametrize("place", ["beside", "elsewhere", "a link"])
@pytest.mark.filterwarnings("ignore:.*other budgets")
def test_owners_have_no_fresh_tickets_and_budgets_are_known(place: str, data: Path) -> None:
    ledger, key_file = data.with_name("ledger.db"), data.with_name("earlier.key")
    ((key,), _) = read_notes([EARLIER])
    key_file.write_text(key.hex())
    before = ExemplarStore.from_records(ROWS, MODEL, **KEYS._asdict())
    assert taking_part(before, ledger, key_file) == 4, "as the earlier release counted them, under the key of its notes"
    url = None
    if place == "elsewhere":
        url = data.with_name("else.db")
    if place == "a link":
        data.touch()
        data = data.with_name("now.jsonl")
        data.symlink_to("desk.jsonl")
    store = kept(data, url)
    assert {each.name for each in store.budgets} == {"one", "two"}
    assert taking_part(store, ledger) == 0
    store.close()
    data.with_name("desk.jsonl.dpicl").unlink()
    again = kept(data, url)
    assert {each.name for each in again.budgets} == {"one", "two", "near"}
    assert taking_part(again, ledger) == 0, "the store has the key"
    again.close()


def test_a_second_budget_is_noticed_and_counted(data: Path) -> None:
    second = PrivacyBudget(3.0, 1e-5, 4, f"sqlite:///{data.with_name('l.db')}", "second")
    second.watch(kept(data))
    with pytest.warns(PrivacyWarning, match="'one' in .*gone/one.db, 'two' in"):
        second.line("vote", 0.2).charge()
    assert second.total()["promised_epsilon"] >= 6.0


@pytest.mark.filterwarnings("ignore:.*other budgets")
def test_a_store_with_records_keeps_its_key_and_knows_owners_by_that_of_the_notes(data: Path) -> None:
    """A server had opened it before a command wrote the notes."""
    notes, ledger = data.with_name("desk.jsonl.dpicl"), data.with_name("ledger.db")
    ((key,), _) = read_notes([notes])
    notes.rename(data.with_name("later"))
    store = kept(data)
    (own,) = store.mark_keys()
    store.close()
    data.with_name("later").rename(notes)
    again = kept(data)
    assert again.mark_keys() == (own, key)
    key_file = data.with_name("earlier.key")
    key_file.write_text(key.hex())
    before = ExemplarStore.from_records(ROWS, MODEL, **KEYS._asdict())
    assert taking_part(before, ledger, key_file) == 4
    assert taking_part(again, ledger) == 0
    notes.unlink()
    with pytest.raises(LedgerError, match="known by another key than this store's"):
        taking_part(kept(data), ledger)


def test_who_is_forgotten_before_the_store_is_used_again_leaves_the_noted_ledgers_too(data: Path, capsys: Any) -> None:
    notes = data.with_name("desk.jsonl.dpicl")
    notes.rename(data.with_name("later"))
    kept(data).close()
    data.with_name("later").rename(notes)
    assert main(["forget", "--store", f"{data}.store", "--owner", "p1"]) == 1
    assert "the ledger sqlite:////gone/one.db could not be opened" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["text,label\n", '{"format": "dpicl-notes-1", "key": "00"}\n'])
def test_notes_that_cannot_be_read_are_refused_and_torn_ones_read_to_the_last_whole_line(
    content: str, data: Path
) -> None:
    notes = data.with_name("desk.jsonl.dpicl")
    whole = notes.read_bytes()
    found = read_notes([notes])
    with open(notes, "ab") as file:
        file.write(b'{"ledger": "torn')
    assert read_notes([notes]) == found
    for end in (0, 5, 40):  # killed while it wrote the first line
        notes.write_bytes(whole[:end])
        assert read_notes([notes]) == ((), ())
    notes.write_text(content)
    with pytest.raises(StoreFileError, match="holds no notes of a data file: move it away"):
        kept(data)
    assert notes.read_text() == content
