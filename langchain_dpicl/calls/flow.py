"""One body of code for threads and for event loops.

`immediate` runs a coroutine that never suspends: such a coroutine blocks in a thread and awaits in an event loop.

A flow is a generator that yields effects and gets each one's result, or its error, back. It always runs in a thread and
may block, but it never awaits:

* a function without arguments is called in the flow's thread. The flow may be cancelled there. `arun` stays in one
  thread until the flow yields something else: consecutive functions take one change of thread.
* an `Either` can be done in two ways: `run` calls the one, `arun` awaits the other.
* a `Chunk` is a part of the answer. `stream` and `astream` hand it out, `run` and `arun` pass over it.

Cancellation reaches a flow when it waits for an effect, never in place of a function's result: a flow always knows what
a function has done (a charge, above all). If the flow's thread is at work when its task is cancelled, the task ends at
once, and the thread ends the flow with a ``CancelledError`` before its next effect.

Results and errors may be private. `run` and `_Driver` keep both in a list that is empty whenever the flow runs, so no
frame that an error passes refers to them.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from concurrent.futures import wait
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from langchain_core.runnables.config import get_executor_for_config

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Either:
    """An effect with a way for threads and a way for event loops."""

    here: Callable[[], Any]
    awaited: Callable[[], Awaitable[Any]]


@dataclass(frozen=True, repr=False)
class Chunk:
    """A part of the answer, for a reader of the answer in the making. Public."""

    value: Any


class FlowClosed(BaseException):
    """A ``GeneratorExit`` within a flow: ``yield from`` would not let the inner generator answer that one."""


Effect = Callable[[], Any] | Either | Chunk
Flow = Generator[Effect, Any, T]

_awaits: ContextVar[bool] = ContextVar("dpicl_flow_awaits", default=False)
in_event_loop: Callable[[], bool] = _awaits.get
"""Within a flow: True if an event loop runs it and awaits its effects."""


def awaitable(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """The function as one that is awaited, for `immediate`."""

    async def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


def immediate(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the coroutine has suspended")


def pause(seconds: float) -> Either:
    """Wait so long. In an event loop this holds no thread."""
    return Either(partial(time.sleep, seconds), partial(asyncio.sleep, seconds))


def together(flows: Sequence[Flow[Any]], at_once: int | None = None) -> Either:
    """Run several flows, so many at once (None: the default of LangChain's threads; all of them, in an event loop).

    Gives every result, or, once all have ended, the first error in their order.
    """

    def here() -> list[Any]:
        with get_executor_for_config({"max_concurrency": at_once}) as executor:
            futures = [executor.submit(run, flow) for flow in flows]
            wait(futures)  # an error ends none of the others
            return [future.result() for future in futures]

    async def awaited() -> list[Any]:
        gate = asyncio.Semaphore(at_once or max(1, len(flows)))

        async def one(flow: Flow[Any]) -> Any:
            async with gate:
                return await arun(flow)

        results = await asyncio.gather(*map(one, flows), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    return Either(here, awaited)


def run(flow: Flow[T]) -> T:
    """Run a flow in this thread and return its result."""
    held: list[Any] = [None]  # as in `_Driver`
    resume: Callable[[Any], Any] = flow.send
    end: BaseException | None = None
    while end is None:
        try:
            while True:
                held.append(resume(held.pop()))
                resume = flow.send
                effect_type = type(held[0])
                if effect_type is Chunk:
                    held[0] = None
                    continue
                held.append(held[0].here() if effect_type is Either else held[0]())
                del held[0]
        except BaseException as error:  # of the flow, of its effect, or an interrupt between the two
            if inspect.getgeneratorstate(flow) == inspect.GEN_SUSPENDED:
                held[:] = [_for_flow(error)]
                resume = flow.throw
            else:
                end = error
    try:
        found: T = _ended(end)
        return found
    finally:
        del end


def _for_flow(error: BaseException) -> BaseException:
    """An error of an effect, as the flow gets it."""
    return FlowClosed() if isinstance(error, GeneratorExit) else error


def _ended(error: BaseException) -> Any:
    """The result of a flow that ended so. Raises its error."""
    if isinstance(error, StopIteration):
        return error.value
    if isinstance(error, FlowClosed):
        error = GeneratorExit()
    try:
        raise error
    finally:
        del error


def stream(flow: Flow[Any]) -> Generator[Any, None, None]:
    """Run a flow in this thread and yield its chunks. Closing this ends it with a `FlowClosed`."""
    driver = _Driver(flow)
    while not driver.ended:
        try:
            while driver.go_on():
                if type(driver.held[0]) is Chunk:
                    yield driver.take()
                else:
                    driver.do()
        except BaseException as error:
            driver.throw(error)
    driver.result()


async def arun(flow: Flow[T]) -> T:
    """Run a flow from an event loop and return its result."""
    driver = _Driver(flow)
    while await driver.advance():
        driver.take()
    return driver.result()


async def astream(flow: Flow[Any]) -> AsyncGenerator[Any, None]:
    """Run a flow from an event loop and yield its chunks. It ends as in `stream`."""
    driver = _Driver(flow)
    while await driver.advance():
        try:
            yield driver.take()
        except BaseException as error:
            driver.throw(error)
    driver.result()


class _Driver(Generic[T]):
    """A flow under way: in one thread, or between an event loop and the threads that run the flow's functions."""

    def __init__(self, flow: Flow[T]) -> None:
        self._flow = flow
        self.held: list[Any] = [None]  # the flow's effect, or what the flow gets for its last one
        self._resume: Callable[[Any], Any] = flow.send
        self.ended = False
        self._end: BaseException | None = None
        self._lock = threading.Lock()
        self._away = False  # a thread has the flow
        self._cancelled = False  # that thread must end the flow: nobody waits for it any more
        self._told = False

    def go_on(self) -> bool:
        """Run the flow to its next effect. Returns False at the flow's end."""
        resume, self._resume = self._resume, self._flow.send
        try:
            self.held.append(resume(self.held.pop()))
        except BaseException as error:
            self._end = error
            self.ended = True
        return not self.ended

    def do(self) -> None:
        """Do the flow's effect in this thread."""
        try:
            self.held.append(self.held[0].here() if type(self.held[0]) is Either else self.held[0]())
            del self.held[0]
        except BaseException as error:
            self.throw(error)

    def take(self) -> Any:
        """The chunk that the flow handed out."""
        chunk = self.held.pop().value
        self.held.append(None)
        return chunk

    def throw(self, error: BaseException) -> None:
        """Let the flow go on with an error in the place of its effect's result."""
        self.held[:] = [_for_flow(error)]
        self._resume = self._flow.throw

    def result(self) -> T:
        """The result of the flow. Raises its error."""
        end, self._end = self._end, None
        assert end is not None
        try:
            found: T = _ended(end)
            return found
        finally:
            del end

    async def advance(self) -> bool:
        """Go on to the next chunk. Returns False at the flow's end."""
        while True:
            self._away = True
            context = copy_context()
            context.run(_awaits.set, True)
            moved = asyncio.get_running_loop().run_in_executor(None, context.run, self._work)
            try:
                await asyncio.shield(moved)
            except asyncio.CancelledError as error:  # of this task: `_work` raises nothing
                with self._lock:
                    self._cancelled = self._away
                if self._cancelled or self.ended:
                    raise
                self.throw(error)
                continue
            if self.ended or type(self.held[0]) is Chunk:
                return not self.ended
            try:
                self.held.append(await self.held[0].awaited())
                del self.held[0]
            except BaseException as error:
                self.throw(error)

    def _work(self) -> None:
        """Run the flow in this thread until it asks for something that only the event loop can do."""
        while True:
            self.go_on()
            with self._lock:
                self._away = not self.ended and (self._cancelled or callable(self.held[0]))
            if not self._away:
                return
            if self._cancelled and not (self._told and callable(self.held[0])):
                self._told = True
                self.throw(asyncio.CancelledError())
            else:
                self.do()
