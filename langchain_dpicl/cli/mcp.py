"""The command ``mcp``."""

from __future__ import annotations

import argparse
import asyncio
import logging.config
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, TextIO

from langchain_dpicl.cli import add_run, given
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.extras import require

if TYPE_CHECKING:
    from collections.abc import Sized

    from langchain_core.runnables import Runnable

    from langchain_dpicl.serving.config import Configuration
    from langchain_dpicl.serving.guards import Slots


def mcp_options(parser: Any) -> None:
    """Offer what a server's file describes as tools to agents, by the Model Context Protocol: over standard input and
    output to the program that starts this, or with --http at the path /mcp of a server.

    examples:
      dpicl mcp --config server.yaml --caller laptop
      dpicl mcp --config server.yaml --http 8000

    Over standard input and output one caller asks, whom the file (server: {caller: laptop}) or --caller names. With
    --http each connection has the caller of its key, and the rest of `dpicl serve` answers, too.
    """
    add_run(parser, mcp)
    parser.add_argument("--config", metavar="FILE", required=True, help="as for `dpicl serve`")
    parser.add_argument(
        "--caller", metavar="NAME", help="who asks over standard input and output (default: the file's)"
    )
    listening = "listen there, by default on this machine alone (127.0.0.1)"
    parser.add_argument("--http", metavar="[HOST:]PORT", type=_address, help=listening)
    parser.add_argument("--log-format", choices=("text", "json"), help="instead of the file's")


def mcp(options: argparse.Namespace) -> int:
    """Answer until the client or the operator ends it."""
    require("mcp", "mcp")
    require("fastapi", "serve")
    uvicorn = require("uvicorn", "serve")
    from langchain_dpicl.cli.serve import listen
    from langchain_dpicl.serving import logs
    from langchain_dpicl.serving.app import freeze
    from langchain_dpicl.serving.config import joined, read

    replaced = given(options, "caller", "log_format")
    if options.http is not None:
        if options.caller is not None:
            raise InvalidParameter("--caller", options.caller, "left out with --http: a key names its caller")
        host, port = options.http
        replaced |= {"host": host, "port": port, "mcp": "/mcp"}
    client = None if options.http is not None else _client_alone()  # before modules that the file names are imported
    settings = read(options.config, **replaced)
    is_json = settings.server.log_format == "json"
    if client is None:
        options.check = False
        with logs.telling_steps(is_json):
            return listen(options, settings, replaced, uvicorn)
    logging.config.dictConfig(logs.log_config(is_json))
    logging.captureWarnings(is_json)
    chains = settings.chains()
    freeze(joined(chains))
    asyncio.run(_over_stdio(settings, chains, *client))
    return 0


def _address(text: str) -> tuple[str, int]:
    """Read HOST:PORT, or a port of this machine."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form HOST:PORT or PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def _client_alone() -> tuple[TextIO, TextIO]:
    """Return standard input and output for the protocol alone.

    From now on what else reads finds an end, and what else writes is in standard error. No subprocess has the two.
    """
    sys.stdout.flush()
    reading, writing = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return open(reading, encoding="utf-8", errors="replace"), open(writing, "w", encoding="utf-8", newline="\n")


async def _over_stdio(
    settings: Configuration, chains: dict[str, Runnable[Any, Any]], messages: TextIO, replies: TextIO
) -> None:
    """Serve the client at standard input and output until it leaves; then let the releases under way end."""
    import anyio
    from mcp.server.stdio import stdio_server

    from langchain_dpicl.serving.app import life
    from langchain_dpicl.serving.config import joined
    from langchain_dpicl.serving.guards import Slots
    from langchain_dpicl.serving.tools import tool_server, tools_of

    slots = Slots(settings.server.max_concurrency)
    server = tool_server(tools_of(settings, chains), slots, settings.server.caller)
    ends: set[asyncio.Task[None]] = set()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: ends.add(asyncio.create_task(_end(slots, ends))))
    async with life(joined(chains)):
        try:
            async with stdio_server(anyio.wrap_file(messages), anyio.wrap_file(replies)) as (reading, writing):
                await server.run(reading, writing, server.create_initialization_options())
        except* (OSError, anyio.BrokenResourceError):  # the client left while an answer was written
            pass
        finally:
            await slots.finished()


async def _end(slots: Slots, ends: Sized) -> None:
    """End the process when the releases under way have ended; at once if it is told so again.

    The thread that reads standard input would outlive any other end.
    """
    if len(ends) == 1:
        await slots.finished()
    os._exit(128 + signal.SIGTERM)
