"""A real server under clients that are many, slow, rude or gone: what is charged, and that none of it is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import Served, dpicl_serve
from langserve import RemoteRunnable
from ways import WAYS, ask

from langchain_dpicl import PrivacyBudget
from langchain_dpicl.budget.opening import LOST

LEFT = 40


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ("alice", "bob", "carol", "dave")
    with dpicl_serve(tmp_path_factory.mktemp("two"), names=names, releases=LEFT, workers=2) as served:
        yield served


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    limits = {"max_concurrency": 2, "max_batch": 2, "body_seconds": 1.0, "max_body_bytes": 2000}
    with dpicl_serve(tmp_path_factory.mktemp("one"), names=("alice",), scope="shared", **limits) as served:
        yield served


def budget(served: Served) -> PrivacyBudget:
    return PrivacyBudget.open("served", served.ledger)


def spent(served: Served) -> int:
    return budget(served).spent()


def charges(served: Served, principal: str = "") -> list[tuple[int, str | None]]:
    """Number and outcome of every row."""
    with contextlib.closing(sqlite3.connect(served.folder / "budget.db")) as ledger:
        rows = ledger.execute(
            "SELECT number, outcome FROM dpicl_charges JOIN dpicl_counters ON dpicl_counters.id = counter_id "
            "WHERE principal = ? ORDER BY number",
            (principal,),
        )
        return list(rows)


def reserved(served: Served, principal: str) -> int:
    """How far the witness is."""
    with contextlib.closing(sqlite3.connect(served.folder / "budget.db.witness")) as witness:
        (row,) = witness.execute("SELECT reserved FROM dpicl_marks WHERE principal = ?", (principal,))
        return int(row[0])


def post(served: Served, name: str, question: str, **options: Any) -> httpx.Response:
    body = {"input": {"input": question}}
    return httpx.post(f"{served.url}/invoke", json=body, headers=served.headers(name), timeout=30, **options)


# -- two workers, one ledger -------------------------------------------------------------------------------------------


async def test_langserves_client_works_in_all_its_ways(two_workers: Served) -> None:
    remote: Any = RemoteRunnable(two_workers.url, headers=two_workers.headers("alice"), timeout=30)
    for number, way in enumerate(WAYS, start=1):
        answered = await ask(way, remote, {"input": f"question {number}"})
        assert answered["answer"] == "Positive"
        assert answered["receipt"]["principal"] == "alice"
        assert answered["receipt"]["number"] == number
    again = remote.invoke({"input": "question 1"}, {"configurable": {"principal": "bob"}, "tags": ["a"]})
    assert again["receipt"]["replayed"]
    many = remote.batch([{"input": f"of a batch {i}"} for i in range(4)])
    assert [answer["receipt"]["number"] for answer in many] == [7, 8, 9, 10]
    with pytest.raises(httpx.HTTPStatusError, match="InvalidParameter") as caught:
        remote.invoke({"examples": []})
    assert caught.value.response.status_code == 422
    with pytest.raises(httpx.HTTPStatusError) as caught:
        list(RemoteRunnable(two_workers.url, timeout=30).stream({"input": "x"}))
    assert caught.value.response.status_code == 401
    assert budget(two_workers).spent(principal="alice") == 10


def test_many_clients_spend_exactly_the_budget_of_their_key(two_workers: Served) -> None:
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda i: post(two_workers, "bob", f"bob asks {i}"), range(LEFT + 20)))
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) == LEFT
    assert statuses.count(429) == 20
    numbers = [answer.json()["output"]["receipt"]["number"] for answer in answers if answer.status_code == 200]
    assert sorted(numbers) == list(range(1, LEFT + 1))
    assert charges(two_workers, "bob") == [(number, "released") for number in range(1, LEFT + 1)]
    assert charges(two_workers, "dave") == [], "another key's counter stays as it was"
    remote: Any = RemoteRunnable(two_workers.url, headers=two_workers.headers("bob"), timeout=30)
    for refused in (lambda: remote.invoke({"input": "x"}), lambda: list(remote.stream({"input": "x"}))):
        with pytest.raises(httpx.HTTPStatusError, match="429") as caught:
            refused()
        assert caught.value.response.status_code == 429
    assert remote.invoke({"input": "bob asks 0"})["receipt"]["replayed"], "known answers go on"


def test_a_worker_that_is_killed_loses_no_charge_and_overspends_nothing(two_workers: Served) -> None:
    answered: list[Any] = []
    failed = 0
    lock, stopped = threading.Lock(), threading.Event()

    def client(which: int) -> None:
        nonlocal failed
        for i in range(200):
            if stopped.is_set():
                return
            try:
                answer = post(two_workers, "carol", f"carol {which} asks {i}" if i else f"slow {which}")
            except httpx.TransportError:
                with lock:
                    failed += 1
                time.sleep(0.1)
                continue
            if answer.status_code == 429:
                return
            assert answer.status_code == 200
            with lock:
                answered.append(answer.json()["output"]["receipt"])

    before = two_workers.workers()
    assert len(before) == 2
    threads = [threading.Thread(target=client, args=(which,)) for which in range(6)]
    for thread in threads:
        thread.start()
    while len(charges(two_workers, "carol")) < 3:
        time.sleep(0.01)
    os.kill(before[0], signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    stopped.set()
    assert reserved(two_workers, "carol") == LEFT, "exactly the budget"
    rows = charges(two_workers, "carol")
    assert [number for number, _ in rows] == list(range(1, len(rows) + 1)), "each number once"
    numbers = [receipt["number"] for receipt in answered]
    assert len(set(numbers)) == len(numbers)
    lost = {number for number, outcome in rows if outcome in (None, LOST)}
    assert set(numbers) | lost == set(range(1, len(rows) + 1)), "a charge was answered, or died with its worker"
    assert len(rows) == LEFT
    assert len(lost) <= failed
    deadline = time.monotonic() + 60
    while len(two_workers.workers()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(two_workers.workers()) == 2, "the supervisor replaces it"


# -- clients that are slow, rude or gone -------------------------------------------------------------------------------


def opened(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=10)


def request(served: Served, body: bytes, *, length: int | None = None) -> bytes:
    key = served.keys["alice"]
    return (
        f"POST /ask/invoke HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    ).encode() + body


def received(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            found += piece
    return found


def test_a_body_that_comes_byte_by_byte_is_cut_off_and_free(one_worker: Served) -> None:
    before = spent(one_worker)
    body = json.dumps({"input": {"input": "x" * 100}}).encode()
    with opened(one_worker) as connection:
        started = time.monotonic()
        connection.sendall(request(one_worker, b"", length=len(body)))
        with contextlib.suppress(ConnectionError):
            for i in range(len(body) - 1):
                connection.sendall(body[i : i + 1])
                time.sleep(0.02)
        answer = received(connection)
        assert time.monotonic() - started < 6
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"error":"SlowRequest"' in answer
    assert spent(one_worker) == before


def test_a_body_that_stops_in_the_middle_is_free(one_worker: Served) -> None:
    before = spent(one_worker)
    body = json.dumps({"input": {"input": "half"}}).encode()
    with opened(one_worker) as connection:
        connection.sendall(request(one_worker, body[:10], length=len(body)))
    with opened(one_worker) as connection:
        connection.sendall(request(one_worker, body[:10], length=len(body)))
        assert received(connection).startswith(b"HTTP/1.1 408")
    assert spent(one_worker) == before


def test_a_body_without_an_end_is_cut_off_at_the_limit(one_worker: Served) -> None:
    before = spent(one_worker)
    chunk = b"3e8\r\n" + b"x" * 1000 + b"\r\n"
    head = request(one_worker, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with opened(one_worker) as connection:
        connection.sendall(head)
        with contextlib.suppress(ConnectionError):
            for _ in range(3):
                connection.sendall(chunk)
        assert received(connection).startswith(b"HTTP/1.1 413")
    assert spent(one_worker) == before


def test_who_hangs_up_after_asking_has_paid_and_finds_the_answer_later(one_worker: Served) -> None:
    before = spent(one_worker)
    for path in ("invoke", "stream"):
        question = f"slow question of one who hangs up on {path}"
        body = json.dumps({"input": {"input": question}}).encode()
        with opened(one_worker) as connection:
            connection.sendall(request(one_worker, body).replace(b"/ask/invoke", f"/ask/{path}".encode()))
            deadline = time.monotonic() + 10
            while spent(one_worker) == before:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        before += 1
        deadline = time.monotonic() + 10
        while charges(one_worker)[-1] != (before, "released"):
            assert time.monotonic() < deadline, "the release goes on without its client"
            time.sleep(0.02)
        again = post(one_worker, "alice", question).json()["output"]["receipt"]
        assert again["replayed"]
        assert again["number"] == before
    assert spent(one_worker) == before


def test_a_flood_is_told_to_come_again_and_charged_for_its_answers_alone(one_worker: Served) -> None:
    before = spent(one_worker)
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda i: post(one_worker, "alice", f"slow flood {i}"), range(24)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 503}
    assert 2 <= statuses.count(200) <= 10, "two at once, of .4 seconds each, and a second of patience"
    assert {answer.json()["error"] for answer in answers if answer.status_code == 503} == {"Busy"}
    assert spent(one_worker) == before + statuses.count(200)
    assert post(one_worker, "alice", "after the flood").status_code == 200


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_server_that_is_told_to_stop_answers_first(one_worker: Served) -> None:
    """The last test of this server."""
    before = spent(one_worker)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(post(one_worker, "alice", "slow and last")))
    asking.start()
    deadline = time.monotonic() + 10
    while spent(one_worker) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    one_worker.process.send_signal(signal.SIGTERM)
    asking.join(20)
    assert answers[0].status_code == 200
    assert one_worker.process.wait(20) in (0, -signal.SIGTERM)
    assert charges(one_worker)[-1] == (before + 1, "released")
    log = (Path(one_worker.folder) / "log").read_text()
    assert not re.search("Traceback|exception", log)
    assert one_worker.keys["alice"] not in log
