"""Interrupts and faults between two steps: of a flow, of a file that is put in place, of watchers that are told."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import ExemplarStore
from langchain_dpicl.calls import flow
from langchain_dpicl.durable import replacing
from langchain_dpicl.private.boundary import Failed, guarded

SECRET = "CANARY votes"


class Alarm(Exception):
    """A time limit that a signal raises, as some servers do for a request."""


@pytest.fixture
def alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def private_values(error: BaseException) -> list[object]:
    """What the drivers of flows hold in the frames of a traceback."""
    found, trace = [], error.__traceback__
    while trace is not None:
        for value in list(trace.tb_frame.f_locals.values()):
            if isinstance(value, flow._Driver):
                found += [held for held in value.held if held is not None]
        trace = trace.tb_next
    return found


@pytest.mark.parametrize("way", ["run", "stream"])
def test_an_interrupt_between_two_steps_reaches_the_flow(way: str, alarm: None) -> None:
    """A flow of private steps of a microsecond each, interrupted at any point: its guard ends it, and no frame that
    the error passes holds an effect or a result. Never a false alarm; about one try in eight found it before."""
    given_up: list[bool] = []
    leaks: list[object] = []

    def work() -> flow.Flow[None]:
        while True:
            yield lambda: SECRET

    def release() -> flow.Flow[None]:
        found = yield from guarded(work())
        assert isinstance(found, Failed)
        given_up.append(True)
        raise found.error()

    for _ in range(150):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.002))
            flow.run(release()) if way == "run" else list(flow.stream(release()))
        except Exception as error:
            leaks += private_values(error)
    assert leaks == []
    assert len(given_up) > 50


@pytest.mark.parametrize("failures", [1, 9])
def test_a_new_file_has_one_name_or_an_error(failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temporary name is removed at the second try, or said to be left: it would keep what is forgotten later."""
    real, left = os.unlink, [failures]

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if left[0]:
            left[0] -= 1
            raise PermissionError(1, "not now")
        try:
            real(self)
        except FileNotFoundError:
            if not missing_ok:
                raise

    monkeypatch.setattr(Path, "unlink", unlink)

    def write() -> None:
        with replacing(tmp_path / "new", is_new=True) as file:
            file.write(b"content")

    if failures == 1:
        write()
        assert [path.name for path in tmp_path.iterdir()] == ["new"]
    else:
        with pytest.raises(PermissionError):
            write()


@pytest.mark.parametrize("first", [KeyboardInterrupt, ValueError])
def test_all_ledgers_hear_of_an_owner_that_went_and_an_interrupt_comes_first(first: type[BaseException]) -> None:
    heard: list[str] = []

    def watcher(name: str, error: type[BaseException] | None) -> Any:
        def hear(*_: object) -> None:
            heard.append(name)
            if error is not None:
                raise error(name)

        return hear

    embeddings = DeterministicFakeEmbedding(size=4)
    rows = [{"input": f"text {i}", "output": "x", "owner": f"o{i}"} for i in range(3)]
    store = ExemplarStore.from_records(rows, embeddings, owner_key="owner", progress=False)
    store.on_forget(watcher("mine", TypeError if first is KeyboardInterrupt else None))
    one, two = watcher("one", first), watcher("two", RuntimeError)
    store.on_owner_forgotten(lambda keys, mark_of: one)
    store.on_owner_forgotten(lambda keys, mark_of: two)
    with pytest.raises(first, match="one"):
        store.forget("o1")
    assert heard == ["mine", "one", "two"]
