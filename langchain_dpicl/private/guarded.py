"""The private side of a flow: the one place where its exceptions end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from langchain_dpicl.calls.flow import Flow
from langchain_dpicl.errors import DPICLError, ReleaseFailed
from langchain_dpicl.private.boundary import in_private

T = TypeVar("T")


@dataclass(frozen=True)
class Released(Generic[T]):
    """What a private flow returned."""

    value: T = field(repr=False)


@dataclass(frozen=True)
class Failed:
    """A private flow raised. Holds an interrupt's type, or an error that shows nothing private, or nothing."""

    interrupt: type[BaseException] | None = None
    known: DPICLError | None = None

    def error(self, otherwise: Callable[[], DPICLError] = ReleaseFailed) -> BaseException:
        """A constant error, to be raised outside of every ``except`` block."""
        if self.known is not None:
            return self.known
        return otherwise() if self.interrupt is None else self.interrupt()


def guarded(work: Flow[T], shown: tuple[type[DPICLError], ...] = ()) -> Flow[Released[T] | Failed]:
    """Run a flow on the private side. Every exception ends here, so that no traceback refers to what is private.

    The flow's functions run in a clean context (`boundary.in_private`). ``shown`` are the package's own errors that may
    surface, because their messages hold nothing private: they lose traceback, cause and context.
    """
    held: list[Any] = [None]
    resume: Callable[[Any], Any] = work.send
    try:
        while True:
            held.append(resume(held.pop()))
            resume = work.send
            try:
                effect = held.pop()
                held.append((yield partial(in_private, effect) if callable(effect) else effect))
            except BaseException as error:
                held[:] = [error]
                resume = work.throw
    except StopIteration as end:
        return Released(end.value)
    except shown as error:
        error.__cause__ = error.__context__ = None
        return Failed(known=error.with_traceback(None))
    except Exception:
        return Failed()
    except BaseException as interrupt:
        return Failed(type(interrupt))
