"""The files of 2644f89, and stores of 825a692 (see `data/make_2644f89.py`), for tests that upgrade them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

from langchain_dpicl import InvalidParameter, PrivacyPlan
from langchain_dpicl.budget.upgrade import with_lists

FOLDER = Path(__file__).parent / "data" / "2644f89"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
STORES = {
    release: json.loads((FOLDER.parent / release / "expected.json").read_text())["stores"]
    for release in ("2644f89", "825a692")
}
"""The facts of each release's stores."""

_found = importlib.util.spec_from_file_location("make_2644f89", FOLDER.parent / "make_2644f89.py")
assert _found is not None
assert _found.loader is not None
made = importlib.util.module_from_spec(_found)
_found.loader.exec_module(made)


def copied(folder: Path, name: str = "ledger") -> Path:
    """A copy of this ledger with its witness, of which nobody can tell that it is one."""
    folder.mkdir(parents=True, exist_ok=True)
    for ending in (".sqlite", ".sqlite.witness"):
        shutil.copy(FOLDER / f"{name}{ending}", folder)
    return folder / f"{name}.sqlite"


def copied_store(folder: Path, release: str = "2644f89", name: str = "named", **header: Any) -> Path:
    """A copy of this store, with another header."""
    path = folder / f"{name}.npz"
    shutil.copy(FOLDER.parent / release / path.name, path)
    if header:
        with np.load(path) as archive:
            arrays = dict(archive)
        about = json.loads(arrays["header"].tobytes()) | header
        del about["sha256"]
        about["sha256"] = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        arrays["header"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        np.savez(path, **arrays)
    return path


def content(path: Path) -> list[Any]:
    """All tables of a SQLite file, with all their rows."""
    connection = sqlite3.connect(path)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        tables = connection.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
        names = [name for name, sql in tables if sql and sql.startswith("CREATE TABLE")]
        return [tables, *(sorted(connection.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in names)]
    finally:
        connection.close()


def ask(path: Path, statement: str) -> list[Any]:
    """The rows of a statement."""
    connection = sqlite3.connect(path)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def _reads_lists() -> bool:
    for (text,) in ask(FOLDER / "ledger.sqlite", "SELECT content FROM dpicl_plans WHERE name IN ('visits', 'calls')"):
        try:
            PrivacyPlan.from_json(with_lists(text))
        except InvalidParameter:
            return False
    return True


READS_LISTS = _reads_lists()
"""Whether plans keep the shares of structured answers as lists."""
