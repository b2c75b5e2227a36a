"""A real server with two workers under operation: each of them answers for both, also after one was killed, and a key
is changed while they run.

Who answers is settled by stopping the other worker: it accepts no connection until it goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import Served, dpicl_serve, until
from prometheus_client.parser import text_string_to_metric_families

from langchain_dpicl.serving.guards import hash_of, new_key

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

SCRAPER = new_key()
KEYS = {name: new_key() for name in ("alice", "bob", "bob's new", "carol")}
LONG = 120.0
"""Seconds that a busy machine may take for anything."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("operated")
    write_keys(folder, bob=["bob"])
    more = {"metrics": {"key": hash_of(SCRAPER)}, "keys": "keys.yaml"}
    with dpicl_serve(folder, names=(), workers=2, releases=100, log_format="json", more=more) as found:
        found.keys.update(KEYS)
        until(lambda: value(scraped(found), "dpicl_workers") == 2, LONG)
        yield found


def write_keys(folder: Path, bob: list[str]) -> None:
    """As the docs say: a new file in the place of the old one."""
    names = {"alice": ["alice"], "bob": bob, "carol": ["carol"]}
    temporary = folder / "keys.new"
    temporary.write_text(json.dumps({name: [hash_of(KEYS[key]) for key in keys] for name, keys in names.items()}))
    temporary.rename(folder / "keys.yaml")


@contextlib.contextmanager
def alone(served: Served, worker: int) -> Iterator[None]:
    """Only this worker answers."""
    others = [each for each in served.workers() if each != worker]
    for each in others:
        os.kill(each, signal.SIGSTOP)
    try:
        for each in others:
            until(lambda each=each: Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        yield
    finally:
        for each in others:
            os.kill(each, signal.SIGCONT)


def get(served: Served, path: str, **headers: str) -> httpx.Response:
    origin = served.url.removesuffix("/ask")
    return httpx.get(f"{origin}{path}", headers={"connection": "close", **headers}, timeout=LONG)


def post(served: Served, name: str, question: str, **headers: str) -> httpx.Response:
    """On a connection of its own, which any worker may take."""
    sent = {**served.headers(name), "connection": "close", **headers}
    return httpx.post(f"{served.url}/invoke", json={"input": {"input": question}}, headers=sent, timeout=LONG)


def receipt(served: Served, name: str, question: str) -> dict[str, Any]:
    found: dict[str, Any] = post(served, name, question).raise_for_status().json()["output"]["receipt"]
    return found


def scraped(served: Served) -> Samples:
    text = get(served, "/metrics", authorization=f"Bearer {SCRAPER}").raise_for_status().text
    families = text_string_to_metric_families(text)
    return {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}


def value(samples: Samples, name: str, *labels: tuple[str, str]) -> float:
    """The sum over all samples with these labels."""
    return sum(found for (of, with_labels), found in samples.items() if of == name and with_labels.issuperset(labels))


def counts(samples: Samples) -> Samples:
    """What only grows."""
    return {key: found for key, found in samples.items() if key[0].endswith(("_total", "_count", "_sum", "_bucket"))}


def logged(served: Served) -> list[dict[str, Any]]:
    lines = (served.folder / "log").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


# -- both answer for both ----------------------------------------------------------------------------------------------


def test_each_worker_is_alive_ready_and_logs_its_requests(served: Served) -> None:
    workers = served.workers()
    assert len(workers) == 2
    for worker in workers:
        with alone(served, worker):
            assert get(served, "/health?question=CANARY-in-an-address").json() == {"alive": True}
            until(lambda: get(served, "/ready").status_code == 200, LONG)  # a look may take longer than its patience
            answered = post(served, "alice", f"CANARY of {worker}", **{"x-request-id": f"from-a-proxy-{worker}"})
            assert (answered.status_code, answered.headers["x-request-id"]) == (200, f"from-a-proxy-{worker}")

    def lines_of_requests() -> dict[str, Any]:
        return {line["request_id"]: line for line in logged(served) if "status" in line}

    until(lambda: all(f"from-a-proxy-{worker}" in lines_of_requests() for worker in workers), LONG)
    lines = lines_of_requests()
    for worker in workers:
        line = lines[f"from-a-proxy-{worker}"]
        assert (line["message"], line["principal"]) == ("POST /ask/invoke 200", "alice")
    assert "CANARY" not in (served.folder / "log").read_text(), "no question, also in an address"
    assert served.workers() == workers


def test_any_worker_counts_what_both_have_done(served: Served) -> None:
    before = scraped(served)
    first, second = served.workers()
    for worker, some in ((first, range(3)), (second, range(3, 5))):
        with alone(served, worker):
            for i in some:
                receipt(served, "alice", f"counted {i}")
            assert receipt(served, "alice", "counted 0")["replayed"]
            assert post(served, "bob's new", "counted").status_code == 401
    seen = []
    for worker in (first, second):
        with alone(served, worker):
            seen.append(scraped(served))
    assert seen[0] == seen[1]
    grown = {
        name: value(seen[0], name, *labels) - value(before, name, *labels)
        for name, *labels in (
            ("dpicl_charges_total",),
            ("dpicl_replays_total",),
            ("dpicl_refusals_total", ("error", "Unauthorized")),
            ("dpicl_check_seconds_count",),
            ("dpicl_receipt_seconds_count",),
            ("dpicl_line_spent",),
        )
    }
    assert list(grown.values()) == [5, 2, 2, 7, 5, 5], grown
    assert value(seen[0], "dpicl_workers") == 2
    assert value(seen[0], "dpicl_queue_running") == value(seen[0], "dpicl_queue_waiting") == 0


def test_a_worker_that_is_killed_takes_no_count_with_it(served: Served) -> None:
    """While both answer, and nobody takes its place for a while."""
    before, answers, failed = scraped(served), list[int](), list[int]()
    killed, survivor = served.workers()

    def ask(which: int) -> None:
        for i in range(30):
            try:
                answers.append(post(served, "carol", f"client {which} asks {i}").status_code)
            except httpx.TransportError:
                failed.append(i)

    def charged() -> float:
        seen.append(scraped(served))
        return value(seen[-1], "dpicl_charges_total") - value(before, "dpicl_charges_total")

    seen = [before]
    clients = [threading.Thread(target=ask, args=(which,)) for which in range(3)]
    os.kill(served.process.pid, signal.SIGSTOP)
    try:
        for client in clients:
            client.start()
        until(lambda: len(answers) >= 6, LONG)
        os.kill(killed, signal.SIGKILL)
        for _ in range(5):
            charged()
        for client in clients:
            client.join(LONG)
        assert receipt(served, "carol", "after the kill")["principal"] == "carol"
        counted = charged()
    finally:
        os.kill(served.process.pid, signal.SIGCONT)
    answered, spent = answers.count(200) + 1, value(seen[-1], "dpicl_line_spent")
    assert set(answers) == {200}
    assert len(failed) <= 3, "each client had one request at the worker that was killed, at most"
    assert answered <= counted <= spent - value(before, "dpicl_line_spent") <= answered + len(failed)

    def replaced() -> bool:
        with contextlib.suppress(httpx.TransportError):
            charged()
        return value(seen[-1], "dpicl_workers") == 2 and len(set(served.workers()) - {killed}) == 2

    until(replaced, LONG)
    (new,) = set(served.workers()) - {killed, survivor}
    with alone(served, new):
        assert charged() == counted, "what the other one had counted stays"
    assert value(seen[-1], "dpicl_queue_running") == value(seen[-1], "dpicl_queue_waiting") == 0
    for earlier, later in itertools.pairwise(map(counts, seen)):
        assert not {key: (count, later.get(key)) for key, count in earlier.items() if later.get(key, 0) < count}


# -- a key that changes ------------------------------------------------------------------------------------------------


def test_a_new_key_takes_the_place_of_an_old_one_without_a_restart(served: Served) -> None:
    """Each worker accepts the new one, and refuses the old one, from its first request after the change on."""
    number = receipt(served, "bob", "before")["number"]
    workers = served.workers()

    def known(name: str) -> None:
        again = receipt(served, name, "before")
        assert (again["principal"], again["number"], again["replayed"]) == ("bob", 1, True)

    def refused(name: str) -> None:
        answer = post(served, name, "before")
        assert (answer.status_code, answer.json()["error"]) == (401, "Unauthorized")

    for worker in workers:
        with alone(served, worker):
            known("bob")
            refused("bob's new")
    write_keys(served.folder, bob=["bob", "bob's new"])
    for worker in workers:
        with alone(served, worker):
            known("bob's new")
            known("bob")
            for name in ("bob", "bob's new"):
                number += 1
                assert receipt(served, name, f"{worker} {name}")["number"] == number
    write_keys(served.folder, bob=["bob's new"])
    for worker in workers:
        with alone(served, worker):
            refused("bob")
            known("bob's new")
            assert receipt(served, "bob's new", f"{worker} bob")["replayed"], "what the old key had asked"
            number += 1
            assert receipt(served, "bob's new", f"{worker} at last")["number"] == number
    assert not receipt(served, "alice", "before")["replayed"], "another caller's question"
    assert served.workers() == workers
    said = [line.get("message") for line in logged(served)]
    assert said.count("the keys were read again: alice, bob, carol") == 4, "twice by each worker"
    log = (served.folder / "log").read_text()
    assert not [name for name, key in KEYS.items() if key in log or hash_of(key) in log]
