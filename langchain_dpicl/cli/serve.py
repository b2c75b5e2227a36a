"""The command ``serve``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli import add_run, given, show
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.extras import require

if TYPE_CHECKING:
    from langchain_dpicl.serving.config import Configuration


def serve_options(parser: Any) -> None:
    """Serve a release or a head over HTTP: LangServe's invoke, batch and stream, the budget, and a page.

    examples:
      dpicl serve --new-key mobile-app
      dpicl serve --config server.yaml --check
      dpicl serve --config server.yaml --workers 4

    a configuration:
      store:    {data: tickets.csv}    # its embeddings are kept beside it, in tickets.csv.store; or file: tickets.db
      model:    {name: gpt-4.1-mini, url: https://api.openai.com/v1, api_key_env: OPENAI_API_KEY}
      release:  {kind: vote, labels: [billing, technical]}
      selector: {members: 20, shots: 2}    # or calls: 20, with one owner each
      budget:   {epsilon: 3, delta: 1.0e-6, releases: 1000, ledger: sqlite:///budget.db, name: tickets}
      keys:     {mobile-app: 64 hex digits, as --new-key prints them}    # or keys.yaml, which is followed
      server:   {host: 0.0.0.0, port: 8000, workers: 2, path: /route}
      metrics:  {key: the hash of a key for Prometheus}

    store and ledger on PostgreSQL, for many workers and hosts (docs/postgres.md of the source archive):
      store:    {url: "${STORE_URL}", name: tickets}
      budget:   {epsilon: 3, delta: 1.0e-6, releases: 1000, ledger: "${LEDGER_URL}", name: tickets}

    answers without end, each from the examples that are near to its question (each owner takes part in at most 100):
      selector: {calls: 20, threshold: 0.35, eligible: 400}
      budget:   {epsilon: 3, delta: 1.0e-6, releases: 100, tickets: true, name: near}

    the same by the owners' own labels, without a model:
      release:  {kind: label-vote, labels: [billing, technical], details: true}

    a number, a date, a sentence of yours, several fields at once (all: docs/tasks/server.md of the source archive):
      release:  {kind: median, low: 0, high: 30}
      release:  {kind: candidate-vote, candidates: sentences.txt}
      release:  {kind: structured, fields: {desk: {choices: [billing, technical]}, days: {low: 0, high: 30}}}

    texts from the documents near to a question, streamed; releases are tokens:
      release:  {kind: documents, max_tokens: 40}
      selector: {calls: 4, threshold: 0.35, eligible: 400, filter: {year: {$gte: 2020}}}

    a head that `dpicl fit` has written, instead of store, release, selector and budget:
      head:     head.npz
    """
    add_run(parser, serve)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="FILE", help="YAML or TOML: a release or a head, keys, server")
    what.add_argument("--new-key", metavar="NAME", help="print a fresh API key and its line for the configuration")
    parser.add_argument("--check", action="store_true", help="open everything, print the plan, and do not listen")
    parser.add_argument("--host", help="instead of the file's")
    parser.add_argument("--port", type=int, help="instead of the file's")
    parser.add_argument("--workers", type=int, help="instead of the file's")
    parser.add_argument("--log-format", choices=("text", "json"), help="instead of the file's")


def serve(options: argparse.Namespace) -> int:
    """Print the plan, freeze it, and listen; or make a key."""
    from langchain_dpicl.serving.guards import check_name, hash_of, new_key

    if options.new_key is not None:
        name, key = check_name(options.new_key), new_key()
        if options.check:
            raise InvalidParameter("--check", True, "left out with --new-key")
        text = f"{key}\n\nThis key is shown once. In the configuration, under keys:\n  {name}: {hash_of(key)}"
        text += f"\nor, for who reads /metrics:\n  metrics: {{key: {hash_of(key)}}}"
        return show(options, {"name": name, "key": key, "sha256": hash_of(key)}, text)
    require("fastapi", "serve")
    uvicorn = require("uvicorn", "serve")
    from langchain_dpicl.serving import logs
    from langchain_dpicl.serving.config import read

    replaced = given(options, "host", "port", "workers", "log_format")
    settings = read(options.config, **replaced)
    with logs.telling_steps(settings.server.log_format == "json"):
        return listen(options, settings, replaced, uvicorn)


def listen(options: argparse.Namespace, settings: Configuration, replaced: dict[str, Any], uvicorn: Any) -> int:
    """Open everything, print the plan, freeze it, and listen."""
    from langchain_dpicl.cli.report import promised_together
    from langchain_dpicl.serving import logs
    from langchain_dpicl.serving.app import ENVIRONMENT, TimedProtocol, ask_heads, create_app, freeze, plans
    from langchain_dpicl.serving.metrics import FOLDER
    from langchain_dpicl.serving.routes import heads_in

    is_json = settings.server.log_format == "json"
    if not options.check:  # the tracker of semaphores is another process, whose warning at its end no logger takes
        quiet = "ignore:resource_tracker:UserWarning"
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), quiet)))
    if is_json and not options.check:  # one form for all that is written
        options.json = True
        logs.begin_json()
    app: Any = create_app(settings)
    if options.check:
        ask_heads(app.state.chain)
    else:
        freeze(app.state.chain)
    server, budgets = settings.server, plans(app.state.chain)
    heads = [
        {"labels": list(head.labels), "embedder": head.embedder, "input_key": head.input_key, "receipt": head.receipt}
        for head in heads_in(app.state.chain)
    ]
    origin = f"http://{server.host}:{server.port}"
    paths = {each.path: each.callers for each in settings.served}
    keys = settings.api_keys()
    callers = f"keys: {', '.join(keys.names)}" if keys else "no keys, this machine only"
    words = []
    for budget in budgets:
        state = "" if budget["frozen"] else ", not frozen yet"
        words.append(f"{budget['budget']}: epsilon {budget['epsilon']:g} at delta {budget['delta']:.2g}{state}")
        for line in budget["lines"]:
            if budget["tickets"]:  # there is no end
                so_far = " for each caller" if line["spent"] is None else f", {line['spent']:,} so far"
                count = f"no last answer{so_far}; each owner takes part in at most {line['releases']:,}"
            else:
                left = "for each caller" if line["left"] is None else f"{line['left']:,} left"
                count = f"{line['releases']:,} {line['unit']}, {left}"
            words.append(f"  {line['line']}: {count}; rate {line['rate']:.4g}\n  each: {line['mechanism']}")
            words += [f"  warning: {line['warning']}"] if line["warning"] else []
    for head in heads:
        cost: Any = head["receipt"]
        spent = f"epsilon {cost['epsilon_spent']:.3g} of {cost['epsilon']:g} spent at delta {cost['delta']:.2g}"
        words.append(f"head {cost['id']}: {', '.join(head['labels'])}\n  released once: {cost['mechanism']}; {spent}")
        words.append(f"  no last answer, and none costs anything; embeddings: {head['embedder']}")
    for sentence in promised_together(budgets, _apart(app.state.chain)):
        words.append(f"{sentence} One budget beside releases is one promise for all of them")
    for path, some in paths.items():
        who = callers if some is None else f"keys: {', '.join(some)}"
        words.append(f"{origin}{path} (workers: {server.workers}; {who})")
    if server.mcp is not None:
        words.append(f"{origin}{server.mcp} (all of them as tools of the Model Context Protocol)")
    urls = [f"{origin}{path}" for path in paths]
    facts = {
        "url": urls[0],
        "urls": urls,
        "workers": server.workers,
        "keys": len(keys.names) if keys else 0,
        "budgets": budgets,
    }
    facts |= {"heads": heads} if heads else {}
    facts |= {"mcp": f"{origin}{server.mcp}"} if server.mcp is not None else {}
    warned = settings.unknown_names()
    words += [f"warning: {each}" for each in warned]
    facts |= {"warnings": warned} if warned else {}
    if is_json and not options.check:
        facts = {**logs.stamp("the plan"), **facts}
    show(options, facts, "\n".join(words), indent=None)  # one line: the server's log follows
    if options.check:
        return 0
    how: dict[str, Any] = {
        "host": server.host,
        "port": server.port,
        "server_header": False,
        "log_config": logs.log_config(is_json),
        "access_log": False,  # it has addresses with their queries; `logs.Around` writes a line without
        "http": partial(TimedProtocol, header_seconds=server.header_seconds),
        "ws": "none",
        "h11_max_incomplete_event_size": 16 * 1024,
        "limit_concurrency": server.max_connections,
        "timeout_keep_alive": 10,
        "timeout_graceful_shutdown": server.grace_seconds,
        "timeout_worker_healthcheck": 60,  # a worker that loads a model on a busy machine gives no sign for seconds
    }
    if server.workers == 1:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # "read again": keys are followed; with workers, each starts anew
        uvicorn.run(app, **how)
        return 0
    del app  # each worker opens its own chain
    os.environ[ENVIRONMENT] = json.dumps({"config": os.path.abspath(options.config), "server": replaced})
    with contextlib.ExitStack() as until_the_end:
        if settings.metrics is not None:  # each worker answers for all
            os.environ[FOLDER] = until_the_end.enter_context(tempfile.TemporaryDirectory(prefix="dpicl-metrics-"))
        uvicorn.run("langchain_dpicl.serving.app:from_environment", factory=True, workers=server.workers, **how)
    return 0


def _apart(chain: Any) -> list[Any]:
    """Return the receipts of a chain's heads that stand on none of the budgets of its releases."""
    from langchain_dpicl.release.base import releases_in
    from langchain_dpicl.serving.routes import heads_in

    budgets = [each.budget for each in releases_in(chain) if each.budget.plan is not None]
    receipts = [head.receipt for head in heads_in(chain)]
    return [each for each in receipts if all(budget.receipt(each["id"]) != each for budget in budgets)]
