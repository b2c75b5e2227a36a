"""One flow of work for threads and for event loops: a generator that yields what is to be done.

A flow yields its effects and gets each one's result, or its error, back, so the same code serves ``invoke`` and
``ainvoke``. It always runs in a thread and may block, but it never awaits:

* a function without arguments is called where the flow runs. It is a point at which the flow may be cancelled. `arun`
  goes on in one thread until the flow yields something else: consecutive functions take one change of thread.
* an `Either` can be done in two ways: `run` calls the one, `arun` awaits the other.
* a `Chunk` is a part of the answer. `stream` and `astream` hand it out, `run` and `arun` pass over it.

Cancellation reaches a flow where it waits for an effect, never in place of a function's result: what a function has
done (a charge, above all) is always known to the flow. If the flow's thread is at work when its task is cancelled, the
task ends at once, and the thread ends the flow with a ``CancelledError`` before its next effect.

Results and errors may be private. The drivers keep both in a list that is empty whenever the flow runs, so no frame
that an error passes refers to them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from concurrent.futures import wait
from contextvars import copy_context
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
    """A part of the answer, for whoever reads it as it is made. Public."""

    value: Any


class FlowClosed(BaseException):
    """A ``GeneratorExit`` within a flow: ``yield from`` would not let the inner generator answer that one."""


Effect = Callable[[], Any] | Either | Chunk
Flow = Generator[Effect, Any, T]


def pause(seconds: float) -> Either:
    """Wait so long, holding no thread of an event loop's."""
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

        return await every(map(one, flows))

    return Either(here, awaited)


async def every(work: Iterable[Awaitable[T]]) -> list[T]:
    """Every result, or, once all have ended, the first exception in order."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def run(flow: Flow[T]) -> T:
    """Run a flow here and return its result."""
    steps = stream(flow)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def stream(flow: Flow[T]) -> Generator[Any, None, T]:
    """Run a flow here, yield its chunks and return its result. Closing this ends the flow with a `FlowClosed`."""
    held: list[Any] = [None]
    resume: Callable[[Any], Any] = flow.send
    while True:
        closed = False
        try:
            held.append(resume(held.pop()))
        except StopIteration as end:
            result: T = end.value
            return result
        except FlowClosed:
            closed = True
        if closed:
            raise GeneratorExit
        resume = flow.send
        try:
            if type(held[0]) is Chunk:
                yield held.pop().value
                held.append(None)
            else:
                held.append(held[0].here() if type(held[0]) is Either else held[0]())
                del held[0]
        except BaseException as error:
            held[:] = [FlowClosed() if isinstance(error, GeneratorExit) else error]
            resume = flow.throw


async def arun(flow: Flow[T]) -> T:
    """Run a flow from an event loop and return its result."""
    driver: _Driver[T] = _Driver(flow)
    while not await driver.advance():
        driver.take()
    return driver.result()


async def astream(flow: Flow[Any]) -> AsyncGenerator[Any, None]:
    """Run a flow from an event loop and yield its chunks. Closing this ends the flow with a `FlowClosed`."""
    driver = _Driver(flow)
    while not await driver.advance():
        try:
            yield driver.take()
        except BaseException as error:
            driver.throw(error)
    driver.result()


class _Driver(Generic[T]):
    """A flow on its way between an event loop and the threads that run its functions."""

    def __init__(self, flow: Flow[T]) -> None:
        self._flow = flow
        self._held: list[Any] = [None]
        self._resume: Callable[[Any], Any] = flow.send
        self._lock = threading.Lock()
        self._away = False
        """Whether a thread has the flow."""
        self._cancelled = False
        """Whether that thread is to end it: nobody waits for it any more."""
        self._told = False
        self._ended = False
        self._result: T
        self._error: BaseException | None = None

    async def advance(self) -> bool:
        """Go on to the next chunk. Returns True at the flow's end."""
        while True:
            self._away = True
            moved = asyncio.get_running_loop().run_in_executor(None, copy_context().run, self._work)
            try:
                await asyncio.shield(moved)
            except asyncio.CancelledError as error:  # of this task: `_work` raises nothing
                with self._lock:
                    self._cancelled = self._away
                if self._cancelled or self._ended:
                    raise
                self.throw(error)
                continue
            if self._ended or type(self._held[0]) is Chunk:
                return self._ended
            try:
                self._held.append(await self._held[0].awaited())
                del self._held[0]
            except BaseException as error:
                self.throw(error)

    def take(self) -> Any:
        """The chunk that the flow handed out."""
        chunk = self._held.pop().value
        self._held.append(None)
        return chunk

    def throw(self, error: BaseException) -> None:
        """Let the flow go on with an error in the place of its effect's result."""
        self._held[:] = [FlowClosed() if isinstance(error, GeneratorExit) else error]
        self._resume = self._flow.throw

    def result(self) -> T:
        """What the flow returned. Raises what it raised."""
        error, self._error = self._error, None
        if error is None:
            return self._result
        if isinstance(error, FlowClosed):
            error = GeneratorExit()
        try:
            raise error
        finally:
            del error

    def _work(self) -> None:
        """In a thread: run the flow until it asks for something that only the event loop can do."""
        while self._go_on():
            try:
                if self._cancelled and not (self._told and callable(self._held[0])):
                    self._told = True
                    raise asyncio.CancelledError
                self._held.append(self._held[0]())
                del self._held[0]
            except BaseException as error:
                self.throw(error)

    def _go_on(self) -> bool:
        """Run the flow to its next effect. Returns whether this thread is to do it."""
        resume, self._resume = self._resume, self._flow.send
        try:
            self._held.append(resume(self._held.pop()))
        except StopIteration as end:
            self._result = end.value
            self._ended = True
        except BaseException as error:
            self._error = error
            self._ended = True
        with self._lock:
            self._away = not self._ended and (self._cancelled or callable(self._held[0]))
            return self._away
