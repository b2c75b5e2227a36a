"""The llama.cpp servers of this process: one per (weights, context, threads), stopped at exit."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import secrets
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_dpicl.calls.gate import Gate
from langchain_dpicl.errors import InvalidParameter, LocalModelError
from langchain_dpicl.local.weights import KNOWN_MODELS, model_path, require

# A prompt before each group with a shared prefix, so that the cache holds nothing else.
RESET_PROMPT = "."
_LONGEST = 600.0  # seconds that a request may take
_PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass(frozen=True, repr=False)
class _Server:
    native: Any
    url: str
    key: str
    gate: Gate
    """Its one slot. A request that finds it taken would wait in the server, on its call's clock."""


_servers: dict[tuple[str, int, int], _Server] = {}
_lock = threading.Lock()
_forked = False


def running(model: str | Path, context: int, threads: int | None) -> _Server:
    """The running server for these parameters: started now if this process has none."""
    if threads is None:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for name, value in (("context", context), ("threads", threads)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidParameter(name, value, "a whole number, at least 1")
    with _lock:
        key = (str(model) if str(model) in KNOWN_MODELS else str(Path(model).resolve()), context, threads)
        if key not in _servers:
            _servers[key] = _start(model, context, threads)
        return _servers[key]


def _start(model: str | Path, context: int, threads: int) -> _Server:
    if _forked:
        raise LocalModelError(
            "this process was forked from one that ran a local model, and llama.cpp does not survive a fork: "
            "start workers by 'spawn', or start the model after the fork"
        )
    path = model_path(model)
    with _short_spins():
        native = require("xllamacpp", "pip install xllamacpp")
    key = secrets.token_urlsafe(32)
    params = native.CommonParams()
    params.model.path = str(path)
    params.model_alias = {path.stem}
    params.hostnames, params.port, params.api_keys = ["127.0.0.1"], 0, [key]
    # One request at a time, from an empty cache, in a context of its own: see the package's docstring.
    params.n_parallel, params.n_ctx, params.kv_unified, params.ctx_shift = 1, context, False, False
    params.cache_prompt, params.cache_ram_mib, params.cache_idle_slots = False, 0, False
    params.n_cache_reuse, params.n_ctx_checkpoints, params.slot_prompt_similarity = 0, 0, 0.0
    params.swa_full = True  # sliding-window models keep the whole prefix, so that a call can reuse its own
    # Nothing about prompts leaves: no logs, no endpoints that show them, no page.
    params.verbosity, params.no_perf, params.ui = -1, True, False
    params.endpoint_slots = params.endpoint_props = params.endpoint_metrics = False
    params.cors_origins, params.cors_credentials = "", False
    params.offline, params.fit_params = True, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_threads_http = 8
    known = KNOWN_MODELS.get(str(model))
    if known is not None and known.plain_chat:
        params.chat_template = _PLAIN_CHAT_TEMPLATE
    try:
        server = native.Server(params)
        url = server.listening_address
        return _Server(server, url, key, Gate(functools.partial(_answers, url, key, _LONGEST)))
    except Exception:
        server = None
    raise LocalModelError(f"llama.cpp cannot load {str(path)!r} with context={context}, threads={threads}")


@contextlib.contextmanager
def _short_spins() -> Iterator[None]:
    """Let idle OpenMP threads sleep soon, unless the user has set it. The library reads it when it is loaded.

    Threads that spin at barriers slow each other down tenfold if anything else needs the cores (measured: two models
    on two cores, 50 tokens a second each instead of 250); alone they gain nothing.
    """
    if "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = "1000"
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def _stop_servers() -> None:
    """Stop at exit. llama.cpp waits for ever if a request is running: then the process ends without it."""
    with _lock:
        if any(not _answers(server.url, server.key, 1) for server in _servers.values()):
            _abandon()
        _servers.clear()  # the last reference: llama.cpp stops its threads


def _answers(url: str, key: str, seconds: float) -> bool:
    """Whether a request is answered within so many seconds. Requests wait in one queue, abandoned ones too.

    llama.cpp checks once a second whether a client is still connected, and not while it reads a prompt.
    """
    body = json.dumps({"prompt": RESET_PROMPT, "max_tokens": 1}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=seconds) as reply:
            return bool(reply.read())
    except OSError:
        return False


def _abandon() -> None:
    """Never finalise the servers' objects, nor llama.cpp's static ones: both would wait for threads for ever."""
    for server in _servers.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server.native))
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)


def _after_fork_in_child() -> None:
    """The child has the server objects but not their threads: it must neither stop them nor start others."""
    global _lock, _forked
    _lock = threading.Lock()
    if _servers:
        _forked = True
        _abandon()
        _servers.clear()


atexit.register(_stop_servers)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
