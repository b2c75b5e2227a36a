"""What stands between a ledger and its server: a pooler, and a network that swallows what it is given."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

POOLER = """[databases]
* = host={url.host} port={url.port} user={url.username} {password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
auth_file = users.txt
pool_mode = {mode}
default_pool_size = 3
logfile = log
"""


def _at_port(url: str, port: int) -> str:
    return sa.make_url(url).set(host="127.0.0.1", port=port).render_as_string(hide_password=False)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextlib.contextmanager
def pooled(url: str, mode: str) -> Iterator[str]:
    """The address of the same database through PgBouncer."""
    program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
    if not os.path.exists(program):
        pytest.skip("want of PgBouncer (apt-get install pgbouncer)")
    given = sa.make_url(url)
    password = f"password={given.password}" if given.password else ""
    port = _free_port()
    account = "nobody" if os.geteuid() == 0 else None  # PgBouncer refuses to run as root
    with tempfile.TemporaryDirectory(prefix="dpicl_pooler_") as folder:
        Path(folder, "users.txt").touch()
        Path(folder, "ini").write_text(POOLER.format(url=given, password=password, port=port, mode=mode))
        if account:
            shutil.chown(folder, account)
        running = subprocess.Popen([program, "-q", "ini"], cwd=folder, user=account, stderr=subprocess.DEVNULL)
        try:
            through = _at_port(url, port)
            deadline = time.monotonic() + 20
            while True:
                try:
                    psycopg.connect(through.replace("+psycopg", "")).close()
                    break
                except psycopg.OperationalError:
                    assert running.poll() is None, "the pooler does not start"
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield through
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(20)


class Network:
    """A way to a server, whose connections can fall silent: it takes all bytes from then on, and passes none on."""

    def __init__(self, url: str) -> None:
        self._server = (sa.make_url(url).host or "127.0.0.1", sa.make_url(url).port or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = _at_port(url, self._listener.getsockname()[1])
        self._open: list[tuple[socket.socket, socket.socket]] = []
        self._silent: set[socket.socket] = set()
        self.stays_silent = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._server)
                self._open.append((client, server))
                if self.stays_silent:
                    self._silent |= {client, server}
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(65536):
                if here not in self._silent:
                    there.sendall(data)
            if here not in self._silent:
                there.shutdown(socket.SHUT_WR)

    def fall_silent(self, *, answers_alone: bool = False) -> None:
        """Pass on nothing on the connections that there are; ``answers_alone``: or only what comes from the client."""
        for client, server in self._open:
            self._silent |= {server} if answers_alone else {client, server}

    def close(self) -> None:
        self._listener.close()
        for ends in self._open:
            for end in ends:
                end.close()
