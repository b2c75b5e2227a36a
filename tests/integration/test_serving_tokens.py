"""A sampler behind a real server: pieces that arrive as they are drawn, and clients that leave in the middle."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from http_server import Served, asked, dpicl_serve, hang_up, read_until, until
from langserve import RemoteRunnable
from ways import WAYS, ask

from langchain_dpicl import PrivacyBudget

WORD = "abcdefghijklmnopqrst"
TOKENS = len(WORD) + 1
"""The end token is sampled too."""
MOST = 40
LEFT = 600

CHAIN = """
import time
from pathlib import Path

from langchain_core.embeddings import DeterministicFakeEmbedding
from table_model import TableModel

from langchain_dpicl import DPSampler, ExemplarStore, PoissonExampleSelector, PrivacyBudget

WORD = "abcdefghijklmnopqrst."
HERE = Path(__file__).parent


class Slow(TableModel):
    '''Writes down every token that is drawn, and takes its time where a question says "slow".'''

    def session(self, shared, demonstrations, *, steps):
        session = super().session(shared, demonstrations, steps=steps)
        logits = session.logits

        def slowly(rows, released):
            with (HERE / "drawn").open("a") as drawn:
                print(len(released), shared.replace("\\n", " "), file=drawn)
            time.sleep(0.1 if "slow" in shared and steps > 1 else 0)
            return logits(rows, released)

        session.logits = slowly
        return session


def table(demonstration, released):
    return [100.0 if letter == WORD[len(released)] else 0.0 for letter in WORD]


def chain():
    records = [{"input": f"text {i} CANARY", "output": "x", "owner": f"p{i}"} for i in range(8)]
    store = ExemplarStore.from_records(
        records, DeterministicFakeEmbedding(size=8), owner_key="owner", progress=False
    )
    budget = PrivacyBudget(1000, 1e-5, 600, f"sqlite:///{HERE / 'budget.db'}", "served", scope="per_principal")
    model = Slow(table, list(WORD), frozenset({20}))
    selector = PoissonExampleSelector(store, 2, rate=0.5, max_exemplars=8)
    return DPSampler(model, selector, budget, shots=4, top_k=21, max_tokens=40, return_receipt=True)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, names = tmp_path_factory.mktemp("tokens"), ("alice", "bob", "carol", "dave")
    with dpicl_serve(folder, names=names, chain=CHAIN, max_concurrency=2, max_batch=2) as server:
        yield server


def remote_of(served: Served, name: str) -> Any:
    return RemoteRunnable(served.url, headers=served.headers(name), timeout=30)


def spent(served: Served, name: str) -> int:
    return PrivacyBudget.open("served", served.ledger).spent(principal=name)


def drawn(served: Served, question: str) -> int:
    """How many tokens the model was asked for; a public question about it, at steps=1, is no token."""
    lines = (served.folder / "drawn").read_text().splitlines()
    return sum(f"{question} " in line for line in lines)


# -- pieces ------------------------------------------------------------------------------------------------------------


async def test_langserves_client_works_in_all_its_ways(served: Served) -> None:
    remote = remote_of(served, "alice")
    for number, way in enumerate(WAYS, start=1):
        answered = await ask(way, remote, {"input": f"question {number}"})
        assert answered["answer"] == WORD
        assert (answered["receipt"]["principal"], answered["receipt"]["tokens"]) == ("alice", TOKENS)
    assert remote.invoke("question 1")["receipt"]["replayed"]
    assert [each["answer"] for each in remote.batch(["of a batch", "another"])] == [WORD] * 2
    assert spent(served, "alice") == 8 * TOKENS


def test_a_piece_arrives_when_it_is_drawn(served: Served) -> None:
    pieces = remote_of(served, "alice").stream("slow pieces")
    assert next(pieces) == {"answer": "a"}
    assert drawn(served, "slow pieces") < 10, "the rest is not drawn yet"
    *rest, last = pieces
    assert "".join(piece["answer"] for piece in rest) == WORD[1:]
    assert last["receipt"]["outcome"] == "released"
    asked = drawn(served, "slow pieces") - TOKENS
    assert asked in (0, 1), "a server that is asked for the first time asks a public question, of one token"


def test_errors_have_their_status_in_a_stream_too(served: Served) -> None:
    remote = remote_of(served, "bob")
    asks: list[Callable[[Any], Any]] = [remote.invoke, lambda value: list(remote.stream(value))]
    for do in asks:
        with pytest.raises(httpx.HTTPStatusError) as caught:
            do({"no": "such key"})
        assert caught.value.response.status_code == 422
    assert spent(served, "bob") == 0
    with pytest.raises(httpx.HTTPStatusError) as caught:
        list(RemoteRunnable(served.url, timeout=30).stream("x"))
    assert caught.value.response.status_code == 401
    i = 0
    while spent(served, "bob") < LEFT:
        remote.invoke(f"bob asks {i}")
        i += 1
    for do in asks:
        with pytest.raises(httpx.HTTPStatusError) as caught:
            do("one more")
        assert caught.value.response.status_code == 429
    assert remote.invoke("bob asks 0")["receipt"]["replayed"], "known answers go on"
    assert spent(served, "bob") == LEFT


# -- clients that leave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rudely", [pytest.param(False, marks=pytest.mark.slow), True], ids=["orderly", "by a reset"])
def test_who_hangs_up_in_the_middle_has_paid_and_the_model_stops(served: Served, rudely: bool) -> None:
    question = f"slow one of who leaves {'rudely' if rudely else 'politely'}"
    before = spent(served, "carol")
    connection = asked(served, "carol", question)
    assert b"200 OK" in read_until(connection, b'"b"')
    assert spent(served, "carol") == before + MOST
    hang_up(connection, rudely=rudely)
    time.sleep(0.5)
    stopped = drawn(served, question)
    assert stopped < 12, "of 21 tokens"
    time.sleep(0.5)
    assert drawn(served, question) == stopped
    assert spent(served, "carol") == before + MOST, "nothing is given back"
    again = remote_of(served, "carol").invoke(question)
    assert again["answer"] == WORD
    assert not again["receipt"]["replayed"], "nobody waits for the answer that was given up"
    assert spent(served, "carol") == before + MOST + TOKENS


def test_who_hangs_up_before_the_first_piece_has_paid_too(served: Served) -> None:
    question = "slow one of who leaves at once"
    before = spent(served, "carol")
    connection = asked(served, "carol", question)
    until(lambda: spent(served, "carol") > before)
    hang_up(connection, rudely=True)
    time.sleep(1.0)
    assert drawn(served, question) < 12
    assert spent(served, "carol") == before + MOST


@pytest.mark.slow
def test_who_hangs_up_on_an_invoke_finds_the_answer_later(served: Served) -> None:
    question = "slow whole one"
    before = spent(served, "carol")
    connection = asked(served, "carol", question, "invoke")
    until(lambda: spent(served, "carol") > before)
    hang_up(connection, rudely=True)
    again = remote_of(served, "carol").invoke(question)
    assert again["receipt"]["replayed"]
    assert spent(served, "carol") == before + TOKENS


def test_many_who_leave_keep_nobody_from_asking(served: Served) -> None:
    """Two may run at once; each of six leaves at its second piece and frees its place."""
    for i in range(6):
        connection = asked(served, "dave", f"slow flood {i}")
        read_until(connection, b'"b"')
        hang_up(connection, rudely=bool(i % 2))
    assert remote_of(served, "dave").invoke("after the flood")["answer"] == WORD
    assert spent(served, "dave") == 6 * MOST + TOKENS


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_is_told_to_stop_ends_its_streams_first(served: Served) -> None:
    """The last test of this server."""
    left, stays = asked(served, "dave", "slow and gone"), asked(served, "alice", "slow and last")
    read_until(left, b'"b"')
    read_until(stays, b'"b"')
    hang_up(left, rudely=False)
    served.process.send_signal(signal.SIGTERM)
    assert b"event: end" in read_until(stays, b"event: end")
    stays.close()
    assert served.process.wait(20) in (0, -signal.SIGTERM)
    log = (served.folder / "log").read_text()
    assert "Traceback" not in log
    assert "exception" not in log
    assert "CANARY" not in log
    assert served.keys["alice"] not in log
