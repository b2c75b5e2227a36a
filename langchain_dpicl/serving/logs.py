"""The server's log: a line for each request, as text or as JSON, without questions unless they are asked for.

A line has the request's id, method, route, status and caller, and the kind of error. It has no address with its query,
no body, no header and no duration. A traceback becomes the class and the place of its error: its message may quote what
failed. Private work writes nothing into any log (`private.sealing`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import json
import logging
import logging.config
import os
import re
import traceback
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from langchain_dpicl.calls.observing import observing

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from langchain_dpicl.serving.metrics import Metrics

ACCESS = "langchain_dpicl.access"
STEPS = "langchain_dpicl.serving.steps"
"""The steps of a start, by paths and their numbers alone: nothing of them follows the private records."""
PROBES = {"/health", "/ready", "/metrics"}
"""Requests without a line: something asks them every few seconds."""

_HEADER = "X-Request-ID"
_WELL_FORMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")

logger = logging.getLogger(ACCESS)
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("dpicl_request_id", default="")


@functools.cache
def _quoting() -> str:
    """Return the folder of the MCP SDK, whose messages quote requests; a name of no folder if it is absent."""
    found = importlib.util.find_spec("mcp")
    return "\0" if found is None or found.origin is None else os.path.dirname(found.origin) + os.sep


class LogLines(logging.Formatter):
    """One line for each record, with the id of the request in which it was written."""

    def __init__(self, as_json: bool = False) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.pathname.startswith(_quoting()):
            message = f"{record.module}, line {record.lineno}, of the MCP SDK"
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
        }
        said |= {"request_id": request_id.get()} if request_id.get() else {}
        if record.exc_info and record.exc_info[1] is not None:
            last = traceback.extract_tb(record.exc_info[2], limit=-1)
            place = f"{last[0].filename}:{last[0].lineno}" if last else "an unknown place"
            said["exception"] = f"{type(record.exc_info[1]).__qualname__} at {place}"
        said |= getattr(record, "request", {})
        if self._as_json:
            return json.dumps(said, ensure_ascii=False, default=str)
        head = " ".join(str(said.pop(name)) for name in ("time", "level", "logger", "message"))
        head = head.replace("\n", " ")
        rest = (item for item in said.items() if item[0] not in ("method", "route", "status"))  # the message has them
        return " ".join([head, *(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in rest)])


@contextlib.contextmanager
def telling_steps(as_json: bool) -> Iterator[None]:
    """Write the steps of a start to standard error meanwhile, also before the server listens."""
    steps, handler = logging.getLogger(STEPS), logging.StreamHandler()
    handler.setFormatter(LogLines(as_json))
    steps.handlers, steps.propagate = [handler], False
    steps.setLevel(logging.INFO)
    try:
        yield
    finally:
        steps.removeHandler(handler)
        steps.propagate = True


def stamp(message: str) -> dict[str, str]:
    """Return the first fields of a line of JSON."""
    record = logging.LogRecord(STEPS, logging.INFO, "", 0, message, None, None)
    found: dict[str, str] = json.loads(LogLines(as_json=True).format(record))
    return found


def begin_json() -> None:
    """Write JSON from now on, before the server listens, and of Python's warnings too."""
    logging.config.dictConfig(log_config(as_json=True))
    logging.captureWarnings(True)


def log_config(as_json: bool) -> dict[str, Any]:
    """The configuration of a server's process: everything to standard error, in lines of one form."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": f"{__name__}.LogLines", "as_json": as_json}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
        "loggers": {
            ACCESS: {"level": "INFO"},
            STEPS: {"level": "INFO", "handlers": [], "propagate": True},
            "uvicorn": {"level": "INFO"},
            # Its lines have addresses with their queries. A child that is not named writes to its parent's handlers.
            "uvicorn.access": {"handlers": [], "propagate": False},
        },
        "root": {"handlers": ["stderr"], "level": "WARNING"},
    }


class Around:
    """The outermost layer of the application: gives a request its id and its observer, and writes its line.

    Parameters
    ----------
    metrics
        Counts what is released for the request; None: nothing is counted.
    questions
        Whether the line holds the request's input.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics | None = None, questions: bool = False) -> None:
        self.app, self._metrics, self._questions = app, metrics, questions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        known, status = given if _WELL_FORMED.fullmatch(given) else uuid.uuid4().hex, 500
        token = request_id.set(known)

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (_HEADER.lower().encode(), known.encode())]
            await send(message)

        try:
            with contextlib.nullcontext() if self._metrics is None else observing(self._metrics):
                await self.app(scope, receive, reply)
        finally:
            self._write(scope, status)
            request_id.reset(token)

    def _write(self, scope: Scope, status: int) -> None:
        """Count an error, and write the line. A path that is no route of ours may be anything, and is not shown."""
        is_ours = "endpoint" in scope and not scope.get("path_params")
        route, state = scope["path"] if is_ours else "-", scope.get("state", {})
        if self._metrics is not None and "dpicl_error" in state:
            self._metrics.refused(state["dpicl_error"])
        if route in PROBES:
            return
        said: dict[str, Any] = {"method": scope["method"], "route": route, "status": status}
        said |= {name: state[f"dpicl_{name}"] for name in ("principal", "error") if f"dpicl_{name}" in state}
        if self._questions and isinstance(asked := state.get("dpicl_asked"), dict):
            said |= {name: asked[name] for name in ("input", "inputs") if name in asked}
        logger.info("%s %s %d", scope["method"], route, status, extra={"request": said})
