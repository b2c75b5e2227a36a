"""A store in a file of SQLite's: where it may lie, what becomes of it, and what forgetting leaves there."""

from __future__ import annotations

import os
import random
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from sqlalchemy.engine import URL
from stores.places import (
    EMBEDDINGS,
    Place,
    everything,
    file_url,
    place_at,
    row,
    rows,
    texts,
    told_by,
    unit_vectors,
)

from langchain_dpicl import (
    ExemplarStore,
    InvalidParameter,
    StoreError,
    StoreFileChanged,
    StoreFileError,
)
from langchain_dpicl.errors import PrivacyWarning


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_at(file_url(tmp_path)) as made:
        yield made


@pytest.fixture
def memory() -> Iterator[Place]:
    with place_at(None) as made:
        yield made


def content_of(path: Path) -> bytes:
    """The bytes of a store's file and of all files beside it that SQLite makes."""
    return b"".join(each.read_bytes() for each in sorted(path.parent.glob(f"{path.name}*")))


# -- a store in memory moves into a file -------------------------------------------------------------------------------


def test_a_store_in_memory_is_saved_and_lives_in_its_file(memory: Place, path: Path) -> None:
    store = memory([row(f"o{i % 4}", f"text {i}") for i in range(12)], ids=range(10, 22), vectors=unit_vectors(12, 1))
    store.load_vectors()
    store.forget("o2")
    before, key = everything(store), store.lineage
    store.save(path)
    store.save(path)
    assert everything(store) == before
    loaded = ExemplarStore.load(path, EMBEDDINGS)
    assert everything(loaded) == before
    assert key is None
    assert store.lineage == loaded.lineage is not None
    assert loaded.add(rows("o9")) == [22]
    assert "text of o9" in texts(store)
    store.forget("o9")
    assert everything(loaded) == everything(store)
    with pytest.raises(StoreFileError, match="lives in a database already"):
        store.save(path.with_name("copy.db"))
    assert [each.name for each in path.parent.glob("*") if each.name[:8] != "store.db"] == []
    for each in (store, loaded):
        each.close()


def test_saving_changes_no_file_that_exists(memory: Place, path: Path) -> None:
    store = memory(rows("a"))
    for content in (b"mine", b""):
        path.write_bytes(content)
        with pytest.raises(StoreFileChanged, match=r"a file 'store\.db' already"):
            store.save(path)
        assert path.read_bytes() == content
    assert [each.name for each in path.parent.iterdir()] == ["store.db"], "nothing is left behind"
    assert texts(store) == ["text of a"]


@pytest.mark.parametrize("where", ["no/such/folder/store.db", "file/store.db", "/proc/store.db"])
def test_a_path_that_cannot_be_written_is_a_typed_error(
    where: str, memory: Place, tmp_path: Path, canary: str, canary_free: Callable[..., None]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = memory(rows(canary))
    with pytest.raises(StoreFileError, match="could not be written") as caught:
        store.save(tmp_path / where)
    canary_free(caught.value, frames=True)
    with pytest.raises(StoreFileError, match="cannot be made") as made:
        ExemplarStore.from_records(rows(canary), EMBEDDINGS, URL.create("sqlite", database=str(tmp_path / where)))
    canary_free(made.value)
    assert texts(store) == [f"text of {canary}"]
    with pytest.raises(InvalidParameter, match="path"):
        store.save(5)  # type: ignore[arg-type]


def test_a_fault_while_saving_leaves_nothing(memory: Place, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory(rows("a"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreFileError, match="No space left"):
            store.save(path)
    assert list(path.parent.iterdir()) == []
    store.save(path)
    assert texts(store) == ["text of a"]
    store.close()


# -- paths and rights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["store", "ström ☃.bin", ".hidden", "with space", "a?b=c#d", "100%25 %", "a;b&c"])
def test_a_file_may_have_any_name(name: str, memory: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    memory(rows("a")).save(name)
    store = ExemplarStore.load(tmp_path / name, EMBEDDINGS)
    store.add(rows("b"))
    again = ExemplarStore.open(URL.create("sqlite", database=str(tmp_path / name)), EMBEDDINGS)
    assert texts(again) == ["text of a", "text of b"]
    assert {each.name.removesuffix("-wal").removesuffix("-shm") for each in tmp_path.iterdir()} == {name}
    for each in (store, again):
        each.close()


def test_its_owner_alone_may_read_it(place: Place, memory: Place, path: Path) -> None:
    mask = os.umask(0)
    try:
        place(rows("a"))
        memory(rows("b")).save(path.with_name("saved.db"))
    finally:
        os.umask(mask)
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()} == {0o600}


# -- files that are no stores ------------------------------------------------------------------------------------------


FOREIGN: dict[str, bytes] = {
    "text": b"CANARY-7f3a" * 50,
    "an earlier version's": b"PK\x03\x04CANARY-7f3a",
    "half a database": b"SQLite format 3\x00CANARY-7f3a",
    "zeros": bytes(5000),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_refused_and_left_as_they_are(kind: str, path: Path, canary_free: Any) -> None:
    path.write_bytes(FOREIGN[kind])
    for make in (
        lambda: ExemplarStore.load(path, EMBEDDINGS),
        lambda: ExemplarStore(f"sqlite:///{path}", EMBEDDINGS),
    ):
        with pytest.raises(StoreError) as caught:
            make()
        canary_free(caught.value, secret="CANARY-7f3a")
        assert ("dpicl upgrade" in str(caught.value)) is (kind == "an earlier version's")
    assert path.read_bytes() == FOREIGN[kind]


def test_another_programs_database_is_refused_and_left_as_it_is(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    content = path.read_bytes()
    for make in (
        lambda: ExemplarStore.load(path, EMBEDDINGS),
        lambda: ExemplarStore(f"sqlite:///{path}", EMBEDDINGS),
        lambda: ExemplarStore.from_records(rows("a"), EMBEDDINGS, f"sqlite:///{path}"),
    ):
        with pytest.raises(StoreError, match="a database, but not a"):
            make()
    assert path.read_bytes() == content


def test_what_is_not_there_is_said_to_be_missing_and_is_not_made(path: Path) -> None:
    for load in (
        lambda: ExemplarStore.load(path, EMBEDDINGS),
        lambda: ExemplarStore.open(f"sqlite:///{path}", EMBEDDINGS),
    ):
        with pytest.raises(StoreFileError, match="no such file"):
            load()
    with pytest.raises(StoreFileError, match="cannot be read"):
        ExemplarStore.load(path.parent, EMBEDDINGS)
    path.touch()
    with pytest.raises(StoreError, match="no collection 'exemplars'"):
        ExemplarStore.load(path, EMBEDDINGS)


def test_a_damaged_file_is_a_typed_error_without_private_text(
    place: Place, path: Path, canary: str, canary_free: Callable[..., None]
) -> None:
    """Cut anywhere, or with a page of it overwritten: an error of the store, or all as it was."""
    store = place([row(f"{canary} {i}", canary * (i + 1)) for i in range(30)])
    whole = everything(store)
    store.close()
    content = path.read_bytes()
    broken = [content[:size] for size in range(1024, len(content), len(content) // 20)]
    for start in range(0, len(content), len(content) // 40):
        broken.append(content[:start] + random.Random(start).randbytes(600) + content[start + 600 :])
    refused = 0
    for each in broken:
        path.write_bytes(each)
        loaded = None
        try:
            loaded = ExemplarStore.load(path, EMBEDDINGS)
            told = everything(loaded)
        except StoreError as error:
            canary_free(error)
            refused += 1
        else:
            assert told.keys() == whole.keys()
        finally:
            if loaded is not None:
                loaded.close()
            for beside in ("-wal", "-shm"):
                Path(f"{path}{beside}").unlink(missing_ok=True)
    assert refused > len(broken) / 2


# -- a file that is no longer the one that was opened ------------------------------------------------------------------


@pytest.mark.parametrize("what", ["deleted", "another store", "an older copy"])
def test_a_file_that_was_replaced_is_refused_from_then_on(what: str, place: Place, path: Path, tmp_path: Path) -> None:
    """In an older copy owners may be that were forgotten since."""
    store = place(rows("a", "b", "c"))
    store.forget("c")
    shutil.copy(path, tmp_path / "older")
    store.forget("a")
    match what:
        case "deleted":
            path.unlink()
        case "another store":
            with place_at(file_url(tmp_path, "another")) as another:
                another(rows("a")).close()
            os.replace(tmp_path / "another", path)
        case _:
            os.replace(tmp_path / "older", path)
    uses: list[Callable[[], Any]] = [lambda: texts(store), lambda: store.add(rows("x")), lambda: store.forget("b")]
    for use in uses:
        for _ in range(2):
            with pytest.raises(StoreFileChanged):
                use()


def test_an_older_copy_that_is_put_in_place_while_nobody_has_the_file_is_known_by_its_log(
    place: Place, path: Path, tmp_path: Path
) -> None:
    """The process that has read more refuses it; a new one cannot know."""
    store = place(rows("a", "b"))
    shutil.copy(path, tmp_path / "older")
    store.forget("a")
    store._database._engine.dispose()
    path.write_bytes((tmp_path / "older").read_bytes())
    with pytest.raises(StoreFileChanged, match="older, than this process has read"):
        texts(store)
    assert texts(ExemplarStore.load(path, EMBEDDINGS)) == ["text of a", "text of b"]


# -- what forgetting leaves --------------------------------------------------------------------------------------------


class Written:
    """A store in a file, with documents of words that occur once. Half of a word is enough to find it, as a page may
    end within it."""

    SIZES = (1, 2, 3, 4, 6, 10, 20, 30, 60, 150)  # in words of 32 bytes: many on a page, and several pages long

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.draw = random.Random(seed)
        self.store = ExemplarStore.empty(EMBEDDINGS, f"sqlite:///{path}", owner_key="owner")
        self.words: dict[str, list[str]] = {}
        self.owner: dict[str, str] = {}
        self.gone: set[str] = set()

    def word(self) -> str:
        return f"{self.draw.getrandbits(128):032x}"

    def put(self, owner: str, document: str | None = None) -> None:
        """Add a document of an owner's, or replace one; some come by number, anywhere in the table."""
        words = [self.word() for _ in range(self.draw.choice(self.SIZES))]
        if document is None and self.draw.random() < 0.3:
            number = self.draw.getrandbits(50)
            self.store.add([{"text": " ".join(words), "owner": owner}], ids=[number])
            document = f"#{number}"
        else:
            document = document or self.word()
            self.gone.update(self.words.get(document, ()))
            about = {"owner": owner}
            given = Document(id=document, page_content=" ".join(words), metadata=about)
            self.store.maintenance().add_documents([given])
        self.words[document] = words
        self.owner[document] = owner

    def put_many(self, count: int) -> None:
        """Add short documents of as many owners, anywhere in the table."""
        numbers = [self.draw.getrandbits(50) for _ in range(count)]
        words = [[self.word() for _ in range(self.draw.choice(self.SIZES[:6]))] for _ in numbers]
        owners = [self.word() for _ in numbers]
        records = [{"text": " ".join(each), "owner": owner} for each, owner in zip(words, owners, strict=True)]
        self.store.add(records, ids=numbers)
        documents = [f"#{number}" for number in numbers]
        self.words |= zip(documents, words, strict=True)
        self.owner |= zip(documents, owners, strict=True)

    def leave(self, document: str) -> None:
        self.gone |= {document, *self.words.pop(document)}
        del self.owner[document]

    def forget(self, owner: str) -> None:
        self.store.forget(owner)
        self.gone.add(owner)
        for document in [each for each, own in self.owner.items() if own == owner]:
            self.leave(document)

    def change(self) -> None:
        owner = self.draw.choice(sorted(set(self.owner.values())))
        match self.draw.randrange(5):
            case 0 | 1:
                self.forget(owner)
            case 2:
                self.put(owner, self.draw.choice([each for each in self.owner if self.owner[each] == owner]))
            case 3:
                document = self.draw.choice(sorted(self.owner))
                self.store.maintenance().delete([document])
                self.leave(document)
            case _:
                self.put(self.draw.choice([owner, self.word()]))

    def found(self, words: Iterable[str]) -> set[str]:
        """Those of these words that are in the file or beside it, in whole or in half."""
        there = {each.decode() for each in re.findall(rb"(?=([0-9a-f]{16}))", content_of(self.path))}
        return {word for word in words if word[:16] in there or word[16:] in there}


@pytest.mark.parametrize("seed", range(3))
def test_no_word_of_what_went_is_in_the_file(seed: int, path: Path) -> None:
    """Hundreds of owners, texts from a word to pages, forgotten and changed in any order. Without the page of zeros
    before what is private in each row, seed 1 fails: SQLite leaves copies on pages where it moved rows."""
    written = Written(path, seed)
    for _ in range(10):
        written.put_many(40)
        for _ in range(30):
            written.change()
    present = {word for words in written.words.values() for word in words}
    assert written.found(present) == present, "the search can find them"
    assert len(written.gone) > 1000
    assert written.found(written.gone) == set()
    written.store.close()


def test_forgetting_overwrites_vectors_too(place: Place, path: Path) -> None:
    vectors = unit_vectors(300, 5)
    store = place([row(f"o{i % 60}", f"t{i}") for i in range(300)], vectors=vectors)
    with store.reading() as view:
        held = view.vectors(view.rows_of(view.numbers)[0][:50])
    pieces = [each.tobytes()[:16] for each in held]
    assert all(piece in content_of(path) for piece in pieces)
    for i in range(10):
        store.forget(f"o{i}")
    assert not [piece for piece in pieces if piece in content_of(path)]


READER = """
import sys
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_dpicl import ExemplarStore

store = ExemplarStore.load(sys.argv[1], DeterministicFakeEmbedding(size=8))
with store.reading() as view:
    print(len(view.rows_of(view.numbers)[0]), flush=True)
    sys.stdin.readline()
    print(len(view.rows_of(view.numbers)[0]), flush=True)
sys.stdin.readline()
"""


def test_while_another_process_reads_forgetting_warns_and_maintenance_empties_the_log(
    place: Place, path: Path, canary: str
) -> None:
    store = place([*rows("a", "b"), row(canary, canary)])
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    reader: Any = subprocess.Popen([sys.executable, "-c", READER, str(path)], **pipes)
    try:
        assert reader.stdout.readline() == "3\n"
        with pytest.warns(PrivacyWarning, match="until the next maintenance"):
            store.forget(canary)
        assert texts(store) == ["text of a", "text of b"]
        assert canary.encode() in content_of(path)
        with pytest.warns(PrivacyWarning, match="until the next maintenance"):
            store.maintenance()
        reader.stdin.write("end\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "3\n", "its reading stays at its moment"
        store.maintenance()
        assert canary.encode() not in content_of(path)
    finally:
        reader.communicate("end\n", 30)


def test_a_process_that_was_killed_while_it_changed_a_store_leaves_it_as_it_was(place: Place, path: Path) -> None:
    store = place(rows("a", "b"))
    before = everything(store)
    code = f"""
import os, sys
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_dpicl import ExemplarStore
from langchain_dpicl.store import tables

store = ExemplarStore.load({str(path)!r}, DeterministicFakeEmbedding(size=8))
tables._end = lambda *_: os.kill(os.getpid(), 9)
store.forget("a")
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert everything(store) == before
    store.forget("a")
    with store.reading() as view:
        assert told_by(view)["numbers"] == [0, 1]
    assert b"text of a" not in content_of(path)
