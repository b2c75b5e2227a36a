"""The models that all calls share: how long a call of them may take, and what of them would be a queue.

A call's time runs from its own start, so nothing that calls share may make one wait for another: no rate limiter, and
no pool with fewer connections than a release has calls. A model that computes in this process takes one call after
another. So its calls have no time limit at all.
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

_NEVER = 1e6
"""Seconds: a socket takes no time limit of any length."""

_OPENAI = ("openai._base_client.BaseClient",)
_HTTP = ("httpx._client.BaseClient", "httpx2._client.BaseClient")
_RESOURCES = ("client", "async_client", "root_client", "root_async_client")
"""The fields in which LangChain's OpenAI models have their clients, or parts of these."""


def limit(copies: Pristine, timeout: Timeout, calls: int, *, is_public: bool = False) -> float | None:
    """Set the time limit of a chain's calls, so many in a release, in the clients of its models. Return it.

    Parameters
    ----------
    timeout
        Seconds, None for no limit, or "auto": `DEFAULT_TIMEOUT`, or None for a model that computes in this process.
    is_public
        The chain has the limit of another one's calls, and none if a model of its own computes in this process.

    The clients of OpenAI models repeat nothing by themselves then: a request that is made again after its call's time
    is over takes the place of another call's, and the prompt that killed one server may kill the next.

    Raises `InvalidParameter` if ``timeout`` is given for such a model, or a model's client has fewer connections than
    there are calls, and `UnsafeConfigurationError` for a model with a rate limiter.
    """
    embedded = ""
    for model in copies.models:
        if getattr(model, "rate_limiter", None) is not None:
            raise UnsafeConfigurationError(
                f"the chain reaches a {type(model).__name__} with a rate_limiter, for which one call would wait until "
                "another one is served: leave it out, and give max_concurrency=. A server that refuses a call (HTTP "
                "status 429) is asked again"
            )
        if _computes_here(model):
            embedded = type(model).__name__
    seconds = None
    if timeout == "auto":
        seconds = None if embedded else DEFAULT_TIMEOUT
    elif timeout is not None and not (is_public and embedded):
        seconds = checks.positive("timeout", timeout)
        if embedded:
            raise InvalidParameter(
                "timeout",
                timeout,
                f"None: a {embedded} computes in this process, one call after another, and no clock can end a call",
            )
    for place, item in enumerate(copies.items):
        copies.items[place] = _limited(item, seconds, calls)
    return seconds


def _computes_here(model: Any) -> bool:
    """Return whether a model computes in this process: by its mark, or as it has no asynchronous call of its own."""
    if getattr(getattr(model, "http_client", None), "is_embedded", False):
        return True
    if is_one(model, LLM) and type(model)._agenerate is LLM._agenerate:
        return type(model)._acall is LLM._acall
    defaults: tuple[Any, ...] = (None, BaseChatModel._agenerate, BaseLLM._agenerate)
    return getattr(type(model), "_agenerate", None) in defaults


def _limited(item: Any, seconds: float | None, calls: int) -> Any:
    """A model, or a client, whose requests take no longer. Everything else stays as it is."""
    if is_named(item, _HTTP):
        _check_pool(item, calls)
    if is_named(item, _OPENAI):
        return _limited_client(item, seconds, calls)
    if not is_one(item, BaseLanguageModel):
        return item
    fields = {name: vars(item).get(name) for name in _RESOURCES}
    made: dict[str, Any] = {}
    for name, held in fields.items():
        inner = getattr(held, "_client", None)
        if is_named(held, _OPENAI):
            made[name] = _limited_client(held, seconds, calls)
        elif is_named(inner, _OPENAI):
            made[name] = type(held)(_limited_client(inner, seconds, calls))
    if not made:
        return item
    copied = copy.copy(item)
    vars(copied).update(made)
    return copied


def _limited_client(client: Any, seconds: float | None, calls: int) -> Any:
    _check_pool(client._client, calls)
    if seconds is None:
        return client.with_options(max_retries=0)
    seconds = min(seconds, _NEVER)
    own: Any = client.timeout
    if hasattr(own, "as_dict"):  # of httpx: one for each step
        steps = {step: seconds if each is None else min(each, seconds) for step, each in own.as_dict().items()}
        own = type(own)(**steps)
    else:
        own = min(own, seconds) if isinstance(own, (int, float)) else seconds
    return client.with_options(timeout=own, max_retries=0)


def _check_pool(client: Any, calls: int) -> None:
    """Raise `InvalidParameter` for too few connections: a call whose time is over may keep its own for a while."""
    transports = [getattr(client, "_transport", None), *(getattr(client, "_mounts", None) or {}).values()]
    for transport in transports:
        connections = getattr(getattr(transport, "_pool", None), "_max_connections", None)
        if connections is not None and connections < calls:
            raise InvalidParameter(
                "member",
                f"a model with {connections}",
                f"one whose client has {calls} connections at least, as many as a release has calls",
            )
