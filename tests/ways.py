"""Every way to ask a Runnable one question."""

from __future__ import annotations

import re
from typing import Any

WAYS = ["invoke", "ainvoke", "batch", "abatch", "stream", "astream"]


async def ask(way: str, runnable: Any, question: Any) -> Any:
    """The answer; chunks of a stream are added up."""
    match way:
        case "invoke":
            return runnable.invoke(question)
        case "ainvoke":
            return await runnable.ainvoke(question)
        case "batch":
            return runnable.batch([question])[0]
        case "abatch":
            return (await runnable.abatch([question]))[0]
        case "stream":
            chunks = list(runnable.stream(question))
        case "astream":
            chunks = [chunk async for chunk in runnable.astream(question)]
        case "batch_as_completed":
            ((_, answer),) = list(runnable.batch_as_completed([question]))
            return answer
        case _:
            raise AssertionError(way)
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    return total


def shown(value: object) -> str:
    """A test's name for a value: its ``repr`` without addresses or a set's order, so that every run has the same."""
    value = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    return re.sub(r" at 0x[0-9a-f]+", "", ascii(value))[:60]
