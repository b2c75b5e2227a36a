"""What a chain calls, as far as a call of it can be ended: the models, and releases within the chain."""

from __future__ import annotations

import copy
import functools
import inspect
from concurrent.futures import wait
from typing import Any, Literal

from langchain_core.language_models import LLM, BaseChatModel, BaseLanguageModel, BaseLLM
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough

from langchain_dpicl.calls import threads
from langchain_dpicl.calls.transport import install, is_client
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.private.markers import Released
from langchain_dpicl.private.reach import is_named, is_one, reachable
from langchain_dpicl.private.sealing import rebuilt

DEFAULT_TIMEOUT = 120.0

Timeout = float | Literal["auto"] | None

_OPENAI = ("langchain_openai.chat_models.base.BaseChatOpenAI", "langchain_openai.llms.base.BaseOpenAI")


class TimeLimit:
    """How long one call of a chain may take, and whether that can be kept.

    Puts the clients of models whose calls can be ended under the clock.

    Parameters
    ----------
    chain
        A sealed chain. Call `prepared` in its place.
    timeout
        Seconds, None for no limit, or "auto": `DEFAULT_TIMEOUT` if it can be kept everywhere, else None.

    Raises `InvalidParameter` if ``timeout`` is given and cannot be kept at all.
    """

    def __init__(self, chain: Runnable[Any, Any], timeout: Timeout) -> None:
        never: list[str] = []  # models whose calls cannot be ended
        in_loop: list[str] = []  # those whose calls can be ended in an event loop alone
        for item in reachable(chain):
            name, is_model = type(item).__name__, is_one(item, BaseLanguageModel)
            if is_model and getattr(item, "rate_limiter", None) is not None:
                never.append(f"a {name} with a rate_limiter (whose waiting is on its clock)")
            elif is_named(item, _OPENAI) and (clients := _clients_of(item)):
                for client in clients:
                    install(client)
            elif is_model and not inspect.isclass(item):
                (in_loop if _is_async(item) else never).append(name)
            elif is_one(item, Released) and not inspect.isclass(item):
                ensemble = getattr(getattr(item, "release", item), "ensemble", None)
                if getattr(ensemble, "timeout", None) is None:
                    never.append(f"a {name} without a timeout")
        self._in_sync = sorted({*never, *in_loop})
        self.seconds: float | None = None
        if timeout == "auto":
            self.seconds = None if self._in_sync else DEFAULT_TIMEOUT
        elif timeout is not None:
            self.seconds = checks.positive("timeout", timeout)
            if never:
                raise _cannot_end(timeout, never[0], "timeout=None, or a model behind a server")
        self.prepared: Runnable[Any, Any] = rebuilt(chain, _in_own_threads)

    def check_sync(self) -> None:
        """Raise `InvalidParameter` if a call can be ended in an event loop alone."""
        if self.seconds is not None and self._in_sync:
            raise _cannot_end(self.seconds, self._in_sync[0], "timeout=None, or ainvoke and abatch")


def _cannot_end(timeout: object, model: str, instead: str) -> InvalidParameter:
    bound = (
        f"a call of {model} cannot be ended at the model, so that the next member's call would wait behind it: "
        f"use {instead}"
    )
    return InvalidParameter("timeout", timeout, bound)


def _clients_of(model: Any) -> list[Any]:
    """The HTTP clients of an OpenAI model; empty if they cannot all be reached."""
    found = [
        getattr(getattr(resource, "_client", None), "_client", None)
        for name in ("client", "async_client")
        if (resource := getattr(model, name, None)) is not None
    ]
    return found if all(map(is_client, found)) else []


def _is_async(model: Any) -> bool:
    """Whether the model has an asynchronous call of its own, and not its synchronous one in a thread."""
    if is_one(model, LLM) and type(model)._agenerate is LLM._agenerate:
        return type(model)._acall is not LLM._acall
    defaults: tuple[Any, ...] = (None, BaseChatModel._agenerate, BaseLLM._agenerate)
    return getattr(type(model), "_agenerate", None) not in defaults


def _in_own_threads(part: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """A part that has no asynchronous call of its own makes it in a thread of `threads`, not in the event loop's."""
    if type(part) is RunnablePassthrough:
        if part.func is None or part.afunc is not None:
            return part
    elif type(part) is RunnableLambda:
        function = getattr(part, "func", None)
        if function is None or hasattr(part, "afunc") or inspect.isgeneratorfunction(function):
            return part
        try:
            if "run_manager" in inspect.signature(function).parameters:
                return part
        except (TypeError, ValueError):  # it has no signature
            pass
    elif type(part) is not RunnableParallel and type(part).ainvoke is not Runnable.ainvoke:
        return part
    copied = copy.copy(part)
    copied.__class__ = _threaded(type(part))  # what a further copy runs is its own, and not this one's
    return copied


@functools.cache
def _threaded(kind: type[Any]) -> Any:
    """The same class, but for its asynchronous call."""

    async def ainvoke(self: Any, input: Any, config: Any = None, **named: Any) -> Any:
        return await threads.in_thread(self.invoke, input, config, **named)

    def afunc(part: Any) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            return await threads.in_thread(part.func, *arguments, **named)

        return functools.update_wrapper(call, part.func)

    def invoke_all(self: Any, input: Any, config: Any = None, **named: Any) -> dict[str, Any]:
        """`RunnableParallel.invoke` without callbacks. Python waits at exit for a pool's threads, and not for these."""
        steps = self.steps__.items()
        futures = {key: threads.submit(step.invoke, input, dict(config or {})) for key, step in steps}
        wait(futures.values())
        return {key: future.result() for key, future in futures.items()}

    own: dict[type, dict[str, Any]] = {
        RunnableLambda: {"afunc": property(afunc)},
        RunnableParallel: {"invoke": invoke_all},
    }
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    make: Any = type(kind)
    return make(kind.__name__, (kind,), names | own.get(kind, {"ainvoke": ainvoke}))
