"""What cannot be copied is refused with its name, as docs/errors.md lists it."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy
from langchain_core.runnables import RunnableLambda
from sqlalchemy.orm import Session

from langchain_dpicl.errors import UnsafeConfigurationError
from langchain_dpicl.private.copy import Pristine

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
PARTS: dict[str, Callable[[], Any]] = {
    "a lock": threading.Lock,
    "an event": threading.Event,
    "a semaphore": threading.Semaphore,
    "a handler": logging.StreamHandler,
    "an engine": lambda: sqlalchemy.create_engine("sqlite://"),
    "a session": lambda: Session(sqlalchemy.create_engine("sqlite://")),
    "a file": lambda: open(__file__, encoding="utf-8"),  # noqa: SIM115
    "a binary file": lambda: open(__file__, "rb"),  # noqa: SIM115
    "a client with a hook": lambda: httpx.Client(event_hooks={"request": [lambda request: None]}),
    "a thread pool": lambda: ThreadPoolExecutor(1),
    "a process pool": lambda: ProcessPoolExecutor(1),
    "a generator": lambda: (number for number in range(3)),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_page_of_errors_has_the_text_of_the_refusal(name: str) -> None:
    held = PARTS[name]()

    def answer(text: str) -> Any:
        return held and text

    with pytest.raises(UnsafeConfigurationError) as caught:
        Pristine(RunnableLambda(answer))
    found = re.search(r"the chain reaches (a \S+ of) (\S+), of which .*share=", str(caught.value))
    assert found is not None
    part, holder = found.groups()
    assert f"`{part} {holder}`" in PAGE or (holder.endswith("answer") and f"`{part}` the function" in PAGE)
    assert Pristine(RunnableLambda(answer), share=[held]).copy().chain.invoke("a") == "a"
    if hasattr(held, "close"):
        held.close()


@pytest.mark.parametrize(
    "make",
    [lambda: logging.getLogger("kept"), httpx.AsyncClient, httpx.Client],
    ids=["a logger", "an asynchronous client", "a client"],
)
def test_what_the_page_of_errors_recommends_is_shared(make: Callable[[], Any]) -> None:
    held = make()
    assert Pristine(RunnableLambda(lambda text: held)).copy().chain.invoke("a") is held
