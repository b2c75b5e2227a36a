"""Tickets on a store that changes between questions, with a gate and filters, beside a model in plain dictionaries."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from by_hand import charge
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import InMemoryVectorStore
from ticket_worlds import Degrees

from langchain_dpicl import Condition, ExemplarStore, PoissonExampleSelector, PrivacyBudget
from langchain_dpicl.store.records import unpack

TICKETS, THRESHOLD = 2, 0.5
OWNERS, TEAMS, PLACES = "abc", "xy", (0, 90, 180)
FILTERS: list[tuple[Any, str]] = [
    ({"team": "x"}, "x"),
    ({"team": {"$in": ["x", "y"]}}, "xy"),
    ({"$or": [{"team": "y"}, {"team": {"$gt": "z"}}]}, "y"),
    ({"team": {"$ne": "x"}}, "y"),
]
VISIBLE: dict[str, Any] = {"all": "everything", "late": {"team": Condition({"$gte": "y"})}}


class Model(Degrees):
    """An empty store has it embed one public word."""

    def embed_query(self, text: str) -> list[float]:
        return super().embed_query("0" if text == "word" else text)


Record = tuple[int, str, str]
"""Where it lies in degrees, its owner and its team."""


class Walk:
    """A store and a ledger under random questions and changes; who has a record and how often each owner paid."""

    def __init__(self, seed: int, named: bool, folder: Path) -> None:
        self.chance, self.named, self.file = random.Random(seed), named, folder / "store.db"
        self.store = ExemplarStore.empty(Model(), owner_key="owner" if named else None)
        self.store.save(self.file)
        self.budget = PrivacyBudget(1000.0, 1e-5, TICKETS, f"sqlite:///{folder}/ledger.db", tickets=True, replay=False)
        self.line = self.budget.line("vote", 0.5)
        self.budget.watch(self.store)
        self.held: dict[str, Record] = {}
        self.paid: dict[Any, int] = {}
        self.turned_away = 0

    def owner(self, record: Record) -> Any:
        """A record without a named owner is its own, and known by its content."""
        return record[1] if self.named else record

    def document(self, id: str, record: Record) -> Document:
        metadata = list({"owner": record[1], "team": record[2]}.items())
        self.chance.shuffle(metadata)  # some sources have no order
        return Document(f"at {record[0]}", id=id, metadata=dict(metadata))

    def some(self) -> dict[str, Record]:
        chosen = self.chance.choice
        return {f"d{chosen(range(6))}": (chosen(PLACES), chosen(OWNERS), chosen(TEAMS)) for _ in range(2)}

    def ask(self) -> None:
        """Everyone who should pay does, and nobody else."""
        at, (wanted, teams) = self.chance.choice((*PLACES, 45)), self.chance.choice(FILTERS)
        who, visible = self.chance.choice([("all", "xy"), ("late", "y")])
        selector = PoissonExampleSelector(
            self.store,
            2,
            rate=0.5,
            max_exemplars=9,
            threshold=THRESHOLD,
            eligible=3,
            filter=wanted,
            visible_to=VISIBLE.__getitem__,
        )
        eligible = selector.eligible(selector.embed_query({"input": f"? {at}"}, who))
        (entry,) = charge(self.line, owners=[self.line.ask(self.store, eligible)])
        with self.store.reading() as view:
            rows, _ = view.rows_of(entry.participants.take())
            found = {held.owner if self.named else self.record(held.content) for held in view.records(rows)}
        expected = {
            self.owner(record)
            for record in self.held.values()
            if abs(record[0] - at) <= 60 and record[2] in teams and record[2] in visible
        }
        paying = {owner for owner in expected if self.paid.get(owner, 0) < TICKETS}
        assert found == paying
        self.turned_away += len(expected - paying)
        for owner in paying:
            self.paid[owner] = self.paid.get(owner, 0) + 1

    @staticmethod
    def record(content: bytes) -> Record:
        fields = unpack(content)
        return int(fields["text"].split()[1]), fields["owner"], fields["team"]

    def add(self) -> None:
        new = self.some()
        self.store.maintenance().add_documents([self.document(*each) for each in new.items()])
        self.held |= new

    def index(self) -> None:
        new = self.some()
        documents = [self.document(*each) for each in new.items()]
        manager = InMemoryRecordManager("notes")
        index(documents, manager, self.store.maintenance(), cleanup=None, key_encoder=lambda each: str(each.id))
        self.held |= new

    def sync(self) -> None:
        collection = InMemoryVectorStore(Model())
        self.held = self.some()
        collection.add_documents([self.document(*each) for each in self.held.items()])
        self.store.sync_from(collection)

    def delete(self) -> None:
        gone = self.some()
        self.store.maintenance().delete(list(gone))
        self.held = {id: record for id, record in self.held.items() if id not in gone}

    def load(self) -> None:
        self.store = ExemplarStore.load(self.file, Model())
        self.budget.watch(self.store)

    def forget(self) -> None:
        """The end of a life: whoever comes again has all tickets."""
        with self.store.reading() as view:
            rows, _ = view.rows_of(view.numbers)
            everyone = view.records(rows)
        if everyone:
            one = self.chance.choice(everyone)
            gone = self.owner(self.held[one.document])
            self.store.forget(one.owner)
            left = [id for id, record in self.held.items() if self.owner(record) != gone]
            if not self.named:
                left = [id for id in self.held if id != one.document]
            self.held = {id: self.held[id] for id in left}
            if gone not in map(self.owner, self.held.values()):
                self.paid.pop(gone, None)

    def step(self) -> None:
        changes = (self.add, self.add, self.index, self.sync, self.delete, self.load, self.forget)
        self.chance.choice([self.ask] * len(changes) + [*changes])()
        assert len(self.store) == len(self.held)


@pytest.mark.parametrize("named", [True, False], ids=["owners", "records"])
def test_nobody_takes_part_more_often_than_it_has_tickets_whatever_a_store_goes_through(
    named: bool, tmp_path: Path
) -> None:
    """Who pays is a matter between an owner's own records and the question, so every other owner is as in a store
    without it: the model knows nothing else."""
    turned_away = 0
    for seed in range(2):
        (folder := tmp_path / str(seed)).mkdir()
        walk = Walk(seed, named, folder)
        for _ in range(70):
            walk.step()
        walk.budget.close()
        turned_away += walk.turned_away
    assert turned_away >= 5
