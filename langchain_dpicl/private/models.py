"""The models that all calls share: how long a call of them may take, and what of them would be a queue.

A call's time runs from its own start, so nothing that calls share may make one wait for another: no rate limiter, and
no pool of connections that is smaller than the number of calls. A model that computes in this process takes one call
after another. So its calls have no time limit at all.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

from langchain_core.language_models import LLM, BaseChatModel, BaseLanguageModel, BaseLLM

from langchain_dpicl.errors import InvalidParameter, UnsafeConfigurationError
from langchain_dpicl.privacy import checks
from langchain_dpicl.private.copy import Pristine
from langchain_dpicl.private.reach import is_named, is_one

DEFAULT_TIMEOUT = 120.0

Timeout = float | Literal["auto"] | None

_OPENAI = ("openai._base_client.BaseClient",)
_HTTP = ("httpx._client.BaseClient", "httpx2._client.BaseClient")
_RESOURCES = ("client", "async_client", "root_client", "root_async_client")
"""The fields in which LangChain's OpenAI models have their clients, or parts of these."""


def limit(copies: Pristine, timeout: Timeout, at_once: int) -> float | None:
    """Set the time limit of a chain's calls, ``at_once`` at the same time, in the clients of its models. Return it.

    Parameters
    ----------
    timeout
        Seconds, None for no limit, or "auto": `DEFAULT_TIMEOUT`, or None for a model that computes in this process.

    Raises `InvalidParameter` if ``timeout`` is given for such a model, or ``at_once`` is more than the connections of a
    model's client, and `UnsafeConfigurationError` for a model with a rate limiter.
    """
    embedded = ""
    for item in copies.items:
        if not is_one(item, BaseLanguageModel):
            continue
        if getattr(item, "rate_limiter", None) is not None:
            raise UnsafeConfigurationError(
                f"the chain reaches a {type(item).__name__} with a rate_limiter, for which one call would wait until "
                "another one is served: leave it out, and give max_concurrency=. A server that refuses a call (HTTP "
                "status 429) is asked again"
            )
        if _computes_here(item):
            embedded = type(item).__name__
    seconds = None
    if timeout == "auto":
        seconds = None if embedded else DEFAULT_TIMEOUT
    elif timeout is not None:
        seconds = checks.positive("timeout", timeout)
        if embedded:
            bound = f"None: a {embedded} computes in this process, one call after another, and no clock can end a call"
            raise InvalidParameter("timeout", timeout, bound)
    for place, item in enumerate(copies.items):
        copies.items[place] = _limited(item, seconds, at_once)
    return seconds


def _computes_here(model: Any) -> bool:
    """Whether a model computes in this process: by its mark, or because it has no asynchronous call of its own."""
    if getattr(getattr(model, "http_client", None), "is_embedded", False):
        return True
    if is_one(model, LLM) and type(model)._agenerate is LLM._agenerate:
        return type(model)._acall is LLM._acall
    defaults: tuple[Any, ...] = (None, BaseChatModel._agenerate, BaseLLM._agenerate)
    return getattr(type(model), "_agenerate", None) in defaults


def _limited(item: Any, seconds: float | None, at_once: int) -> Any:
    """A model, or a client, whose requests take no longer. Everything else stays as it is."""
    if is_named(item, _HTTP):
        _check_pool(item, at_once)
    if is_named(item, _OPENAI):
        return _limited_client(item, seconds, at_once)
    if not is_one(item, BaseLanguageModel):
        return item
    fields = {name: vars(item).get(name) for name in _RESOURCES}
    made: dict[str, Any] = {}
    for name, held in fields.items():
        inner = getattr(held, "_client", None)
        if is_named(held, _OPENAI):
            made[name] = _limited_client(held, seconds, at_once)
        elif is_named(inner, _OPENAI):
            made[name] = type(held)(_limited_client(inner, seconds, at_once))
    if not made:
        return item
    copied = copy.copy(item)
    vars(copied).update(made)
    return copied


def _limited_client(client: Any, seconds: float | None, at_once: int) -> Any:
    _check_pool(client._client, at_once)
    if seconds is None:
        return client
    own = client.timeout
    return client.with_options(timeout=min(own, seconds) if isinstance(own, (int, float)) else seconds)


def _check_pool(client: Any, at_once: int) -> None:
    transports = [getattr(client, "_transport", None), *(getattr(client, "_mounts", None) or {}).values()]
    for transport in transports:
        connections = getattr(getattr(transport, "_pool", None), "_max_connections", None)
        if connections is not None and connections < at_once:
            bound = f"at most {connections}, the connections of the model's client, for which calls would wait"
            raise InvalidParameter("max_concurrency", at_once, bound)
