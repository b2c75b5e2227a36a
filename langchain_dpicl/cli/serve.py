"""``dpicl serve``: a release over HTTP, as a configuration file describes it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli.options import new_parser
from langchain_dpicl.errors import InvalidParameter

if TYPE_CHECKING:
    from langchain_dpicl.serving.config import Configuration

_EPILOG = """examples:
  dpicl serve --new-key mobile-app
  dpicl serve --config server.yaml --check
  dpicl serve --config server.yaml --workers 4

a configuration:
  store:    {file: tickets.npz}
  model:    {name: gpt-4.1-mini, url: https://api.openai.com/v1, api_key_env: OPENAI_API_KEY}
  release:  {kind: vote, labels: [billing, technical]}
  selector: {members: 20, shots: 2}
  budget:   {epsilon: 3, delta: 1.0e-6, releases: 10000, ledger: sqlite:///budget.db, name: tickets}
  keys:     {mobile-app: 64 hex digits, as --new-key prints them}
  server:   {host: 0.0.0.0, port: 8000, workers: 2, path: /route}

answers without end, each from the examples that are near to its question (each owner takes part in at most 100):
  selector: {members: 20, shots: 2, threshold: 0.35, eligible: 400}
  budget:   {epsilon: 3, delta: 1.0e-6, releases: 100, tickets: true, name: near}
"""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    parser = new_parser(
        commands,
        "serve",
        run,
        "answer over HTTP, with keys, limits and several workers on one budget",
        "Serve a release over HTTP: LangServe's invoke, batch and stream, the budget, and a page.",
        _EPILOG,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="FILE", help="YAML or TOML: store, model, release, budget, keys, server")
    what.add_argument("--new-key", metavar="NAME", help="print a fresh API key and its line for the configuration")
    parser.add_argument("--check", action="store_true", help="open everything, print the plan, and do not listen")
    parser.add_argument("--host", help="instead of the file's")
    parser.add_argument("--port", type=int, help="instead of the file's")
    parser.add_argument("--workers", type=int, help="instead of the file's")


def run(options: argparse.Namespace) -> int:
    """Print the plan, freeze it, and listen; or make a key."""
    if options.new_key is not None:
        return _new_key(options)
    try:
        import fastapi  # noqa: F401
        import langserve.validation  # noqa: F401
        import uvicorn
    except ImportError:
        sys.exit("dpicl serve needs pip install 'langchain-dpicl[serve]'")
    from langchain_dpicl.serving.app import ENVIRONMENT, create_app, freeze, plans
    from langchain_dpicl.serving.config import read
    from langchain_dpicl.serving.protocol import TimedProtocol

    replaced = {name: value for name in ("host", "port", "workers") if (value := getattr(options, name)) is not None}
    settings = read(options.config, **replaced)
    settings.check_access()
    chain = settings.build()
    if not options.check:
        freeze(chain)
    _show(settings, plans(chain), options.json)
    if options.check:
        create_app(settings, chain)
        return 0
    server = settings.server
    how: dict[str, Any] = {
        "host": server.host,
        "port": server.port,
        "server_header": False,
        "http": partial(TimedProtocol, header_seconds=server.header_seconds),
        "ws": "none",
        "h11_max_incomplete_event_size": 16 * 1024,
        "limit_concurrency": server.max_connections,
        "timeout_keep_alive": 10,
        "timeout_graceful_shutdown": server.grace_seconds,
    }
    if server.workers == 1:
        uvicorn.run(create_app(settings, chain), **how)
        return 0
    del chain  # each worker opens its own
    os.environ[ENVIRONMENT] = json.dumps({"config": os.path.abspath(options.config), "server": replaced})
    uvicorn.run("langchain_dpicl.serving.app:from_environment", factory=True, workers=server.workers, **how)
    return 0


def _new_key(options: argparse.Namespace) -> int:
    from langchain_dpicl.serving.keys import check_name, hash_of, new_key

    name, key = check_name(options.new_key), new_key()
    if options.check:
        raise InvalidParameter("--check", True, "left out with --new-key")
    if options.json:
        print(json.dumps({"name": name, "key": key, "sha256": hash_of(key)}))
        return 0
    print(f"{key}\n\nThis key is shown once. In the configuration, under keys:\n  {name}: {hash_of(key)}")
    return 0


def _show(settings: Configuration, budgets: list[dict[str, Any]], as_json: bool) -> None:
    server = settings.server
    where = f"http://{server.host}:{server.port}{server.path}"
    if as_json:
        print(json.dumps({"url": where, "workers": server.workers, "keys": len(settings.keys), "budgets": budgets}))
        sys.stdout.flush()
        return
    for budget in budgets:
        state = "" if budget["frozen"] else ", not frozen yet"
        print(f"{budget['budget']}: epsilon {budget['epsilon']:g} at delta {budget['delta']:.2g}{state}")
        for line in budget["lines"]:
            print(f"  {line['line']}: {_counted(line, budget['tickets'])}; rate {line['rate']:.4g}")
            print(f"  each: {line['mechanism']}")
    callers = f"keys: {', '.join(settings.keys)}" if settings.keys else "no keys, this machine only"
    print(f"{where} (workers: {server.workers}; {callers})", flush=True)


def _counted(line: dict[str, Any], tickets: bool) -> str:
    """How many there are and how many are left. With tickets there is no end."""
    if tickets:
        so_far = " for each caller" if line["spent"] is None else f", {line['spent']:,} so far"
        return f"no last answer{so_far}; each owner takes part in at most {line['releases']:,}"
    left = "for each caller" if line["left"] is None else f"{line['left']:,} left"
    return f"{line['releases']:,} {line['unit']}, {left}"
