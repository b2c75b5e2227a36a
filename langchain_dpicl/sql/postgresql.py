"""Sessions with PostgreSQL, by psycopg: none waits without end, and one that cannot keep its promise is refused."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Generator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, Engine

from langchain_dpicl.extras import require

# A server that is gone is noticed within about 25 s while nothing is sent, and within 15 s while something is. An
# address may say otherwise (psycopg's and libpq's names).
_NETWORK = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,  # milliseconds
}
_SESSION = {"autocommit": True, "client_encoding": "utf8"}


@functools.cache
def _connection_type(psycopg: Any) -> Any:
    class Listening(psycopg.Connection):  # type: ignore[misc]
        """A connection that is given up when the server is silent for too long, though the network may be well."""

        silence = math.inf

        def wait(self, answer: Any, *args: Any, **kwargs: Any) -> Any:
            return super().wait(self._limited(answer), *args, **kwargs)

        def _limited(self, answer: Any) -> Generator[Any, Any, Any]:
            """Pass on what ``answer`` waits for, and that it came. psycopg says every .1 s that nothing did."""
            ready = None
            heard = time.monotonic()
            try:
                while time.monotonic() <= heard + self.silence:
                    ready = yield answer.send(ready)
                    if ready:
                        heard = time.monotonic()
            except StopIteration as done:
                return done.value
            self.close()
            raise psycopg.OperationalError(f"the server has not answered for {self.silence:g} s")

    return Listening


def postgresql_engine(
    url: URL,
    refusal: Callable[[str], Exception],
    silence: float = math.inf,
    **options: Any,
) -> Engine:
    """An engine whose connections begin no transaction by themselves. `MissingExtra` without psycopg.

    Parameters
    ----------
    refusal
        Makes the error for a session that cannot be used.
    silence
        The seconds without a word in answer after which a connection is given up.
    """
    connection_type = _connection_type(require("psycopg", "postgres"))

    def connect(_: Any, __: Any, arguments: Any, named: Any) -> Any:
        connection = connection_type.connect(*arguments, **{**_NETWORK, **named, **_SESSION})
        connection.silence = silence
        (number,) = connection.execute("SELECT pg_backend_pid()").fetchone()
        if number != connection.info.backend_pid:  # a pooler answers the start of a session, with a number of its own
            connection.prepare_threshold = None  # each transaction may be on another of its connections
        encoding = connection.info.parameter_status("server_encoding")
        if encoding != "UTF8":
            connection.close()
            raise refusal(
                f"its encoding is {encoding}, which does not hold every text: make a database WITH ENCODING 'UTF8'"
            )
        return connection

    engine = sa.create_engine(url, use_native_hstore=False, **options)
    sa.event.listen(engine, "do_connect", connect)
    return engine
