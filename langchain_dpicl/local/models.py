"""LangChain's OpenAI classes on the embedded server."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.calls.transport import install
from langchain_dpicl.local.server import RESET_PROMPT, running
from langchain_dpicl.local.weights import DEFAULT_MODEL, KNOWN_MODELS, require

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI, OpenAI


def local_llm(
    model: str | Path = DEFAULT_MODEL, *, context: int = 4096, threads: int | None = None, **settings: Any
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
    openai: Any = require("langchain_openai", "pip install langchain-openai")
    given = {"temperature": 0, **settings, "openai_proxy": "", "http_socket_options": ()}
    chat: ChatOpenAI = openai.ChatOpenAI(**_client_settings(model, context, threads), **given)
    return chat


def _client_settings(model: str | Path, context: int, threads: int | None) -> dict[str, Any]:
    """The settings of both clients. They ignore proxy variables and keep no idle connection, which would be tied to
    one event loop."""
    httpx = require("httpx", "pip install httpx")
    require("langchain_openai", "pip install langchain-openai")
    server = running(model, context, threads)
    timeout = httpx.Timeout(600, connect=10)
    given = {"trust_env": False, "limits": httpx.Limits(max_keepalive_connections=0), "timeout": timeout}
    clients = httpx.Client(**given), httpx.AsyncClient(**given)
    for client in clients:
        install(client, server.gate)
    return {
        "model": str(model) if str(model) in KNOWN_MODELS else Path(model).stem,
        "base_url": f"{server.url}/v1",
        "api_key": server.key,
        "max_retries": 0,
        "timeout": timeout,
        "http_client": clients[0],
        "http_async_client": clients[1],
    }


@functools.cache
def _completion_class() -> type[OpenAI]:
    from langchain_core.outputs import LLMResult
    from langchain_openai import OpenAI

    class LocalOpenAI(OpenAI):
        """``OpenAI`` whose calls may share a prefix, independently of the server's earlier requests."""

        accepts_shared_prefix: bool = True
        batch_size: int = 1 << 20  # the prompts of one call are one request

        def _generate(self, prompts: list[str], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> LLMResult:
            if not kwargs.pop("shared_prefix", False):
                return super()._generate(prompts, stop, run_manager, **kwargs)
            return _without_reset(
                super()._generate([RESET_PROMPT, *prompts], stop, run_manager, **self._cached(kwargs))
            )

        async def _agenerate(
            self, prompts: list[str], stop: Any = None, run_manager: Any = None, **kwargs: Any
        ) -> LLMResult:
            if not kwargs.pop("shared_prefix", False):
                return await super()._agenerate(prompts, stop, run_manager, **kwargs)
            asked = [RESET_PROMPT, *prompts]
            return _without_reset(await super()._agenerate(asked, stop, run_manager, **self._cached(kwargs)))

        def _cached(self, kwargs: dict[str, Any]) -> dict[str, Any]:
            body = {**(self.extra_body or {}), **kwargs.get("extra_body", {}), "cache_prompt": True}
            return {**kwargs, "extra_body": body}

    def _without_reset(result: LLMResult) -> LLMResult:
        return LLMResult(generations=result.generations[1:], llm_output=result.llm_output)

    return LocalOpenAI
