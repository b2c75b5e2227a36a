"""Upgrading stores: files that are killed at any point on their way, and collections on PostgreSQL."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import by_hand  # noqa: F401
import numpy as np
import pytest
import sqlalchemy as sa
from earlier_release import EXPECTED, FOLDER, content, copied, made
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from pgvector_server import ask, database

from langchain_dpicl import ExemplarStore, PrivacyWarning, StoreError
from langchain_dpicl.budget import upkeep
from langchain_dpicl.budget.upgrade import upgrade
from langchain_dpicl.cli import main
from langchain_dpicl.store.base import owner_mark
from langchain_dpicl.store.notes import OpenedBudget
from langchain_dpicl.store.upgrade import upgrade_file

MODEL = DeterministicFakeEmbedding(size=16)
STORES = EXPECTED["stores"]

KILLED = """
import json, os, signal, sys
from pathlib import Path
import sqlalchemy as sa
from langchain_dpicl.store import upgrade

paths = json.loads(sys.argv[1])
passed = 0
end = None

def point(*_, **__):
    global passed
    passed += 1
    if passed == end:
        os.kill(os.getpid(), signal.SIGKILL)

def around(name):
    honest = getattr(os, name)
    def call(*given, **named):
        point()
        answer = honest(*given, **named)
        point()
        return answer
    setattr(os, name, call)

sa.event.listen(sa.engine.Engine, "begin", point)
for name in ("open", "replace", "fsync", "write", "unlink"):
    around(name)
if len(paths) == 1:
    upgrade.upgrade_file(Path(paths[0]))
    print(passed)
for end, path in enumerate(paths[1:], 1):
    child = os.fork()
    if not child:
        upgrade.upgrade_file(Path(path))
        os._exit(0)
    print(os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
"""
"""Upgrades a file and counts the points on its way, or further files in processes that are killed, each one point
later."""


def killed(*paths: Path) -> list[int]:
    command = [sys.executable, "-c", KILLED, json.dumps([str(path) for path in paths])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return [int(line) for line in done.stdout.split()]


def test_killed_at_any_point_the_file_is_old_or_new_and_the_next_call_leaves_nothing_beside_it(tmp_path: Path) -> None:
    def fixture(number: int) -> Path:
        (tmp_path / str(number)).mkdir()
        return Path(shutil.copy(FOLDER / "named.npz", tmp_path / str(number)))

    old = (FOLDER / "named.npz").read_bytes()
    first = fixture(0)
    (points,) = killed(first)
    new = content(first)
    paths = [fixture(number) for number in range(1, points + 1)]
    assert set(killed(first, *paths)) == {signal.SIGKILL}
    was_old = [path.read_bytes() == old for path in paths]
    assert was_old == sorted(was_old, reverse=True), "old until one moment, and new from then on"
    assert {True, False} == set(was_old)
    assert any(len(list(path.parent.iterdir())) > 1 for path in paths), "a killed process leaves a part"
    for path, is_old in zip(paths, was_old, strict=True):
        if is_old:
            upgrade_file(path)
        assert content(path)[0] == new[0]
        store = ExemplarStore.load(path, MODEL)
        assert list(store.owners) == STORES["named"]["owners"]
        store.close()
        assert [each.name for each in path.parent.iterdir()] == ["named.npz"]


# -- PostgreSQL --------------------------------------------------------------------------------------------------------

OLD_COLLECTIONS = """
    CREATE TABLE dpicl_collections (name text PRIMARY KEY, dimension integer NOT NULL,
        keys text NOT NULL, next_id bigint NOT NULL DEFAULT 0, next_number bigint NOT NULL DEFAULT 0,
        forgets bigint NOT NULL DEFAULT 0);
    CREATE TABLE dpicl_budgets (collection text NOT NULL REFERENCES dpicl_collections, ledger text NOT NULL,
        url text NOT NULL, name text NOT NULL, PRIMARY KEY (collection, ledger, name));
    CREATE TABLE dpicl_released_once (collection text NOT NULL REFERENCES dpicl_collections,
        release text NOT NULL, PRIMARY KEY (collection, release));
    CREATE TABLE dpicl_forgotten_owners (collection text NOT NULL REFERENCES dpicl_collections, key bytea NOT NULL,
        mark bytea NOT NULL, PRIMARY KEY (collection, mark));
"""
OLD_COLLECTION = """
    CREATE TABLE {owners} (number bigint PRIMARY KEY, name bytea NOT NULL, digest bytea);
    CREATE UNIQUE INDEX {owners}_name ON {owners} (sha256(name));
    CREATE INDEX {owners}_digest ON {owners} (digest) WHERE digest IS NOT NULL;
    CREATE TABLE {exemplars} (id bigint PRIMARY KEY, owner bigint NOT NULL REFERENCES {owners},
        content bytea NOT NULL, embedding vector(16) NOT NULL);
    CREATE INDEX {exemplars}_owner ON {exemplars} (owner, id);
    CREATE TABLE {forgotten} (entry bigint PRIMARY KEY, ids bigint[] NOT NULL);
    ALTER TABLE {owners} ALTER COLUMN name SET STATISTICS 0, ALTER COLUMN digest SET STATISTICS 0;
    ALTER TABLE {exemplars} ALTER COLUMN content SET STATISTICS 0, ALTER COLUMN embedding SET STATISTICS 0;
    ALTER INDEX {owners}_name ALTER COLUMN 1 SET STATISTICS 0;
    ALTER TABLE {exemplars} ALTER COLUMN embedding SET STORAGE PLAIN;
"""
OLD_DOCUMENTS = """
    ALTER TABLE {exemplars} ADD COLUMN IF NOT EXISTS document bytea;
    ALTER TABLE {exemplars} ALTER COLUMN document SET STATISTICS 0;
    CREATE UNIQUE INDEX IF NOT EXISTS {exemplars}_document ON {exemplars} (sha256(document))
        WHERE document IS NOT NULL;
    ALTER INDEX {exemplars}_document ALTER COLUMN 1 SET STATISTICS 0;
"""
"""Collections that were made before a release had documents' ids lack these."""
LATER = """
    CREATE TABLE dpicl_opened_budgets (collection text NOT NULL REFERENCES dpicl_collections, ledger text NOT NULL,
        url text NOT NULL, name text NOT NULL, epsilon double precision, delta double precision,
        PRIMARY KEY (collection, ledger, name));
    INSERT INTO dpicl_opened_budgets VALUES ('named', 'L', 'sqlite:///moved.db', 'votes', 3, 1e-5);
    CREATE TABLE dpicl_owner_keys (collection text NOT NULL REFERENCES dpicl_collections, key bytea NOT NULL,
        PRIMARY KEY (collection));
"""
"""The tables that 825a692 has and 2644f89 has not."""
FORGOTTEN_KEY = b"f" * 32
OWNER_KEY = b"o" * 32


def fill(url: str, *, later: bool) -> None:
    """Make the collections ``named``, with two owners of whom one is named and one left, and ``unnamed``."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        run = connection.exec_driver_sql
        run("CREATE EXTENSION IF NOT EXISTS vector")
        run(OLD_COLLECTIONS)
        for name in ("named", "unnamed"):
            tables = {kind: f"dpicl_{name}_{kind}" for kind in ("owners", "exemplars", "forgotten")}
            keys = json.dumps(["text", None, "who" if name == "named" else None])
            run("INSERT INTO dpicl_collections VALUES (%s, 16, %s, 9, 4, 2)", (name, keys))
            run(OLD_COLLECTION.format(**tables))
            if name == "named":
                run(OLD_DOCUMENTS.format(**tables))
            for number, text in ((1, "one"), (3, "three")):
                record = f'{{"text":"{text}"}}'.encode()
                owner = f"owner {text}" if name == "named" else f"#{2 * number}"
                digest = None if name == "named" else hashlib.sha256(record).digest()
                run(f"INSERT INTO {tables['owners']} VALUES (%s, %s, %s)", (number, owner.encode(), digest))
                vector = str(list(map(float, vector_of(text))))
                run(f"INSERT INTO {tables['exemplars']} VALUES (%s, %s, %s, %s)", (2 * number, number, record, vector))
            run(f"INSERT INTO {tables['forgotten']} VALUES (1, '{{0}}'), (2, '{{4}}')")
        run("UPDATE dpicl_named_exemplars SET document = %s WHERE id = 6", (b"doc 3",))
        run("INSERT INTO dpicl_budgets VALUES ('named', 'L', 'sqlite:///old.db', 'votes'), ('named', 'M', 'm', 'x')")
        run("INSERT INTO dpicl_released_once VALUES ('named', 'a head')")
        mark = owner_mark(FORGOTTEN_KEY, b"owner two", named=True)
        run("INSERT INTO dpicl_forgotten_owners VALUES ('named', %s, %s)", (FORGOTTEN_KEY, mark))
        if later:
            run(LATER)
            run("INSERT INTO dpicl_owner_keys VALUES ('named', %s)", (OWNER_KEY,))
    engine.dispose()


def vector_of(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """An embedding of norm 1."""
    vector = np.array(MODEL.embed_query(text), np.float32)
    return vector / np.float32(np.linalg.norm(vector))


COLUMNS = (
    "SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns "
    "WHERE table_schema = 'public' ORDER BY 1, 2"
)
INDEXES = "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1"
UNSEEN = (
    "SELECT attrelid::regclass::text, attname, attstorage FROM pg_attribute JOIN pg_class ON attrelid = pg_class.oid "
    "WHERE relkind = 'r' AND attstattarget = 0 AND attnum > 0 AND starts_with(relname, 'dpicl') ORDER BY 1, 2"
)


@pytest.mark.parametrize("later", [False, True], ids=["2644f89", "825a692"])
def test_collections_on_postgresql_are_upgraded(
    later: bool, pgvector: str, pgvector_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = pgvector_url
    fill(url, later=later)
    before = ask(url, COLUMNS)
    kept = {
        name: ask(url, f"SELECT id, owner, content, embedding::text FROM dpicl_{name}_exemplars ORDER BY id")
        for name in ("named", "unnamed")
    }
    places = ask(url, "SELECT ctid FROM dpicl_unnamed_exemplars ORDER BY id")
    with pytest.raises(StoreError, match="dpicl upgrade URL"):
        ExemplarStore.open(url, MODEL, name="named")
    assert main(["upgrade", url, "--dry-run"]) == 0
    assert "collections (named, unnamed): would be in today's form" in capsys.readouterr().out
    assert ask(url, COLUMNS) == before
    assert main(["upgrade", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"changed": True, "collections": ["named", "unnamed"]}
    for name, rows in kept.items():
        query = f"SELECT id, owner, content, embedding::text FROM dpicl_{name}_exemplars ORDER BY id"
        assert ask(url, query) == rows
    assert ask(url, "SELECT ctid FROM dpicl_unnamed_exemplars ORDER BY id") == places, "no row is written anew"
    with database(pgvector) as other:
        for name in ("named", "unnamed"):
            ExemplarStore.empty(MODEL, other, name=name).close()
        for query in (COLUMNS, INDEXES, UNSEEN):
            assert ask(url, query) == ask(other, query), "the tables are those of new collections"
    store = ExemplarStore.open(url, MODEL, name="named")
    assert list(store.owners) == ["owner one", "owner three"]
    assert list(store.budgets) == [
        OpenedBudget("L", "sqlite:///moved.db", "votes", 3, 1e-5)
        if later
        else OpenedBudget("L", "sqlite:///old.db", "votes"),
        OpenedBudget("M", "m", "x"),
    ]
    assert store.released_once == ("a head",)
    assert (store.mark_keys() == (OWNER_KEY,)) == later
    was_forgotten = store._forgotten()
    assert [was_forgotten(f"owner {text}".encode(), True) for text in ("one", "two")] == [False, True]
    with store.reading() as view:
        assert view.numbers.tolist() == [0, 1, 2, 3]
        rows, position = view.rows_of(view.numbers)
        assert (rows.tolist(), position.tolist()) == ([2, 6], [1, 3])
        assert [each.document for each in view.records(rows)] == ["#2", "doc 3"]
        assert (view.vectors(rows) == [vector_of("one"), vector_of("three")]).all()
        assert view.eligible(vector_of("three"), 0.99).tolist() == [3]
        assert view.rows_with(["doc 3", "#2"]).tolist() == [2, 6]
        three = owner_mark(made.KEY, b"owner three", named=True)
        assert view.marks(view.numbers, made.KEY)[3] == three
    store.maintenance().add_documents([Document("new", metadata={"who": "owner one"})], ids=["doc 3"])
    assert list(store.owners) == ["owner one"], "a document replaces the one of its id"
    assert store.add([{"text": "next", "who": "owner five"}]) == [10]
    with pytest.warns(PrivacyWarning, match="a head"):
        assert store.forget("owner one") == 2
    store.close()
    unnamed = ExemplarStore.open(url, MODEL, name="unnamed")
    with unnamed.reading() as view:
        marks = view.marks(view.numbers, made.KEY)
    assert marks[1] == owner_mark(made.KEY, b'{"text":"one"}', named=False)
    assert unnamed.forget("#2") == 1
    unnamed.close()
    assert main(["upgrade", url]) == 0
    assert "collections: in today's form already" in capsys.readouterr().out


def test_a_ledger_beside_collections_is_upgraded_with_them_and_each_alone(
    pgvector_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from test_upgrade_ledger import put

    engine = sa.create_engine(pgvector_url)
    for ending in ("", ".witness"):
        put(FOLDER / f"ledger.sqlite{ending}", engine)
    engine.dispose()
    fill(pgvector_url, later=True)
    with pytest.raises(StoreError, match="dpicl upgrade URL"):
        ExemplarStore.open(pgvector_url, MODEL, name="named")
    command = ["upgrade", pgvector_url, "--key-file", str(tmp_path / "key"), "--json"]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["version"], told["changed"], told["collections"]) == (6, True, ["named", "unnamed"])
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["changed"], told["collections"]) == (False, [])
    ExemplarStore.open(pgvector_url, MODEL, name="unnamed").close()


def test_an_upgrade_that_fails_leaves_all_collections_as_they_were(
    pgvector_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(pgvector_url, later=True)
    ask(pgvector_url, "CREATE TABLE dpicl_unnamed_gone ()")
    before = ask(pgvector_url, COLUMNS)
    assert main(["upgrade", pgvector_url]) == 1
    assert "DuplicateTable (42P07)" in capsys.readouterr().err
    assert ask(pgvector_url, COLUMNS) == before
    assert main(["upgrade", pgvector_url, "--key-file", "k"]) == 1
    assert "--key-file='k' is not allowed" in capsys.readouterr().err


def test_an_upgraded_ledger_knows_the_budgets_that_stores_remember_of_it(tmp_path: Path) -> None:
    """They name the ledger by its identity, which stays."""
    path = copied(tmp_path)
    query = "SELECT value FROM dpicl_meta WHERE key = 'identity'"
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        identity = connection.exec_driver_sql(query).scalar()
    engine.dispose()
    upgrade(f"sqlite:///{path}")
    store = ExemplarStore.from_records(
        [{"input": "text", "output": "a", "owner": "owner-1"}],
        MODEL,
        f"sqlite:///{tmp_path / 'store.db'}",
        owner_key="owner",
    )
    store.remember_budget(OpenedBudget(str(identity), f"sqlite:///{path}", "tickets"))
    ledgers, lost = upkeep.open_ledgers(store, [], None)
    assert ([ledger.identity for ledger in ledgers], lost) == ([identity], [])
    assert upkeep.forget(store, "owner-1", ledgers) == 1
    for ledger in ledgers:
        ledger.close()
    store.close()
