"""Answers from documents behind a real server, owners paying with tickets: pieces, receipts, and clients that leave."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_server import Served, asked, dpicl_serve, hang_up, read_until, until
from langserve import RemoteRunnable
from ticket_worlds import Degrees
from tickets_on_disk import burnt

from langchain_dpicl import ExemplarStore

WORD = "abcde"
TOKENS = len(WORD) + 1
"""The end token is sampled too."""
MOST, TICKETS = 12, 60
RECORDS = [  # a text ends with the direction in which it lies, in degrees; a question finds what lies within 60 of it
    {"text": "CANARY ann 10", "owner": "ann"},
    {"text": "CANARY bob 30", "owner": "bob"},
    {"text": "CANARY cec 170", "owner": "cec"},
]

CHAIN = f"""
import time
from pathlib import Path

from table_model import TableModel
from ticket_worlds import Degrees

from langchain_dpicl import DPSampler, ExemplarStore, PoissonExampleSelector, PrivacyBudget

WORD, HERE = "{WORD}.", Path(__file__).parent


class Slow(TableModel):
    '''Writes down how many documents every token was shown, and takes its time where a question says "slow".'''

    def session(self, shared, demonstrations, *, steps):
        session = super().session(shared, demonstrations, steps=steps)
        logits = session.logits

        def slowly(rows, released):
            if steps > 1:  # at 1 it is a public question about the model
                with (HERE / "drawn").open("a") as drawn:
                    print(len(rows), shared.replace(chr(10), " "), file=drawn)
                time.sleep(0.15 if "slow" in shared else 0)
            return logits(rows, released)

        session.logits = slowly
        return session


def table(document, released):
    return [100.0 if letter == WORD[len(released)] else 0.0 for letter in WORD]


def chain():
    store = ExemplarStore.from_records(
        {RECORDS!r}, Degrees(), input_key="text", output_key=None, owner_key="owner", progress=False
    )
    ledger = f"sqlite:///{{HERE / 'budget.db'}}"
    budget = PrivacyBudget(100, 1e-3, {TICKETS}, ledger, "notes", scope="per_principal", tickets=True)
    selector = PoissonExampleSelector(store, calls=2, threshold=0.5, eligible=2)  # everybody who is near takes part
    model = Slow(table, list(WORD), frozenset({{{len(WORD)}}}))
    return DPSampler.over_documents(
        model, selector, budget, max_tokens={MOST}, top_k={TOKENS}, pad=False, return_receipt=True
    )
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ("alice", "bob", "carol", "dave")
    with dpicl_serve(tmp_path_factory.mktemp("documents"), names=names, chain=CHAIN) as server:
        yield server


def used(served: Served, name: str) -> dict[str, int]:
    """The tickets that the ledger's file has of every owner, for one caller."""
    store = ExemplarStore.from_records(
        RECORDS, Degrees(), input_key="text", output_key=None, owner_key="owner", progress=False
    )
    return burnt(served.ledger, store, "tokens", name, plan="notes")


def shown(served: Served, question: str) -> list[int]:
    """How many documents each token of an answer was shown."""
    lines = (served.folder / "drawn").read_text().splitlines()
    return [int(line.split()[0]) for line in lines if f"Question: {question} " in line]


def remote_of(served: Served, name: str) -> Any:
    return RemoteRunnable(served.url, headers=served.headers(name), timeout=30)


def test_pieces_arrive_as_they_are_drawn_and_owners_who_are_near_pay(served: Served) -> None:
    pieces = remote_of(served, "alice").stream("slow one 0")
    assert next(pieces) == {"answer": "a"}
    assert len(shown(served, "slow one 0")) < TOKENS, "the rest is not drawn yet"
    *rest, last = pieces
    assert "".join(piece["answer"] for piece in rest) == WORD[1:]
    receipt = last["receipt"]
    assert (receipt["outcome"], receipt["tokens"], receipt["remaining"]) == ("released", TOKENS, None)
    assert shown(served, "slow one 0") == [2] * TOKENS
    assert used(served, "alice") == {"ann": TOKENS, "bob": TOKENS, "cec": 0}, "what was not drawn came back"
    assert remote_of(served, "alice").invoke("slow one 0")["receipt"]["replayed"]
    for number in range(2, 5):
        remote_of(served, "alice").invoke(f"of those alone who are near {number} 0")
        paid = number * TOKENS
        assert used(served, "alice") == {"ann": paid, "bob": paid, "cec": 0}, "each give-back once"
    state = httpx.get(f"{served.url}/budget", headers=served.headers("alice")).json()
    assert state["lines"]["tokens"]["tickets"] == TICKETS
    assert state["lines"]["tokens"]["remaining"] is None
    assert "ticket" not in json.dumps(receipt)


@pytest.mark.parametrize(
    ("name", "rudely"),
    [pytest.param("bob", False, marks=pytest.mark.slow), ("carol", True)],
    ids=["orderly", "by a reset"],
)
def test_who_hangs_up_leaves_spent_what_every_near_owner_paid(name: str, rudely: bool, served: Served) -> None:
    """12 for the answer that was left, and never fewer; 6 for each that ended. Who has fewer than 12 sits out, and the
    answers go on without a document of theirs."""
    connection = asked(served, name, f"slow and left {name} 0")
    assert b"200 OK" in read_until(connection, b'"b"')
    assert used(served, name) == {"ann": MOST, "bob": MOST, "cec": 0}
    hang_up(connection, rudely=rudely)
    time.sleep(0.5)
    stopped = len(shown(served, f"slow and left {name} 0"))
    assert stopped < TOKENS
    time.sleep(0.4)
    assert len(shown(served, f"slow and left {name} 0")) == stopped
    again = remote_of(served, name).invoke(f"slow and left {name} 0")
    assert (again["answer"], again["receipt"]["replayed"]) == (WORD, False), "an answer that was left is none"
    assert again["receipt"]["tokens"] == TOKENS
    assert used(served, name) == {"ann": MOST + TOKENS, "bob": MOST + TOKENS, "cec": 0}
    for number in range(1, 8):
        assert remote_of(served, name).invoke(f"more {number} {name} 0")["answer"] == WORD
        sit_out = number == 7  # 54 of 60 are used
        assert shown(served, f"more {number} {name} 0") == [0 if sit_out else 2] * TOKENS
        paid = MOST + TOKENS * min(number + 1, 7)
        assert used(served, name) == {"ann": paid, "bob": paid, "cec": 0}, (
            "nothing of the answer that was left comes back"
        )
    assert remote_of(served, name).invoke(f"of another {name} 170")["answer"] == WORD
    assert shown(served, f"of another {name} 170") == [1] * TOKENS
    assert used(served, name) == {"ann": 54, "bob": 54, "cec": TOKENS}


def test_who_hangs_up_before_the_first_piece_has_paid_too(served: Served) -> None:
    connection = asked(served, "dave", "slow and left at once 0")
    drawn = served.folder / "drawn"
    until(lambda: drawn.exists() and "left at once" in drawn.read_text())
    hang_up(connection, rudely=True)
    time.sleep(1.0)
    assert len(shown(served, "slow and left at once 0")) < TOKENS
    remote_of(served, "dave").invoke("the next 0")
    assert used(served, "dave") == {"ann": MOST + TOKENS, "bob": MOST + TOKENS, "cec": 0}
    log = (served.folder / "log").read_text()
    assert "CANARY" not in log
    assert "Traceback" not in log
