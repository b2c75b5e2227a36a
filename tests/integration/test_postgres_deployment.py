"""Store and ledger on PostgreSQL in a configuration: the page's deployment, and all parts of a server on it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from http_server import Served, configured, free_port, until
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from pgvector_server import ask, database
from table_model import TableModel

from langchain_dpicl import (
    DPSampler,
    InvalidParameter,
    PoissonExampleSelector,
    PostgresExemplarStore,
    PrivacyBudget,
    PrivateHead,
)
from langchain_dpicl.cli import main
from langchain_dpicl.release.transaction import acting_for
from langchain_dpicl.serving.config import read
from langchain_dpicl.serving.guards import hash_of, new_key
from langchain_dpicl.store import tables
from langchain_dpicl.store.kept import Followed, kept_store
from langchain_dpicl.store.records import RecordKeys

PAGE = Path(__file__).parents[2] / "docs" / "postgres.md"
RELEASES, OWNERS = 20, 60
KEYS = RecordKeys("text", "label", "patient")


def kept(url: str, records: list[dict[str, str]], model: Any, keys: RecordKeys) -> tuple[Any, Followed]:
    return kept_store(url, records, model, name="notes", **keys._asdict())


def page_yaml() -> str:
    return re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]


def rows_of(owners: int) -> list[dict[str, str]]:
    """Notes; one owner of each ten has a Porch."""
    return [
        {"text": f"a note about box {i}", "label": "Flask" if i % 10 else "Porch", "patient": f"p{i}"}
        for i in range(owners)
    ]


# -- the page's deployment ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deployed(pgvector: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str, str]]:
    """Two workers as the page has it, but for the numbers of the budget: at a rate of 1, 20 releases and epsilon 1000
    noise moves a count with a probability below 1e-16."""
    folder, key = tmp_path_factory.mktemp("deployed"), new_key()
    (folder / "notes.jsonl").write_text("\n".join(map(json.dumps, rows_of(OWNERS))))
    (folder / "keys.yaml").write_text(json.dumps({"desk": hash_of(key)}))
    (folder / "server.yaml").write_text(page_yaml())
    with database(pgvector) as records, database(pgvector) as budgets:
        around = {"STORE_URL": records, "LEDGER_URL": budgets}
        check = [sys.executable, "-m", "langchain_dpicl", "serve", "--config", str(folder / "server.yaml"), "--check"]
        said = subprocess.run(check, env=os.environ | around, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr
        assert "epsilon 3 at delta 1e-06, not frozen yet" in said.stdout
        assert not re.search(r"\b60\b", said.stdout + said.stderr)  # the number of owners, and no part of a time
        settings = yaml.safe_load(page_yaml())
        settings["budget"] |= {"epsilon": 1000, "releases": RELEASES}
        settings["selector"] |= {"calls": OWNERS, "eligible": OWNERS}
        (folder / "server.yaml").write_text(json.dumps(settings))
        with configured(folder, free_port(), "/route", {"desk": key}, **around) as served:
            until(lambda: len(served.workers()) == 2, 60)
            yield served, records, budgets


def post(served: Served, question: str) -> httpx.Response:
    body = {"input": {"text": question}}
    return httpx.post(f"{served.url}/invoke", json=body, headers=served.headers("desk"), timeout=60)


@pytest.mark.slow
@pytest.mark.model
def test_two_workers_on_postgresql_forget_together_and_spend_one_budget(
    deployed: tuple[Served, str, str], capsys: Any
) -> None:
    served, records, budgets = deployed
    workers = served.workers()
    asked = 0

    def porches() -> list[int]:
        """What each of the workers counts while the other one stands still."""
        nonlocal asked
        found = []
        for other in workers:
            os.kill(other, signal.SIGSTOP)
            try:
                asked += 1
                answered = post(served, f"which box, for the {asked}. time?")
                assert answered.status_code == 200, answered.text
                found.append(answered.json()["output"]["answer"]["counts"]["Porch"])
            finally:
                os.kill(other, signal.SIGCONT)
        return found

    ready = httpx.get(served.url.replace("/route", "/ready"), timeout=60)
    assert ready.json() == {"ready": True, "store": True, "ledger": True, "model": True}
    assert porches() == [6, 6]
    forget = ["forget", "--store", records, "--collection", "notes", "--owner", "p10", "--ledger", budgets, "--json"]
    assert main(forget) == 0
    assert json.loads(capsys.readouterr().out)["owners_left"] == OWNERS - 1
    assert porches() == [5, 5], "both have forgotten before their next release"

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: post(served, f"box number {i}?"), range(RELEASES + 10)))
    numbers = [each.json()["output"]["receipt"]["number"] for each in answers if each.status_code == 200]
    assert sorted(numbers) == list(range(asked + 1, RELEASES + 1))
    assert [each.status_code for each in answers].count(429) == 10 + asked
    budget = PrivacyBudget.open("notes", budgets)
    assert (budget.spent(), budget.remaining()) == (RELEASES, 0)
    budget.close()
    assert "forgotten" not in (served.folder / "log").read_text(), "the data file is not read again before a restart"


# -- a collection that follows a data file -----------------------------------------------------------------------------


@pytest.mark.parametrize("owner_key", ["patient", None])
def test_a_collection_follows_its_data_and_brings_nobody_back(
    owner_key: str | None, pgvector_url: str, embeddings: Any
) -> None:
    rows = rows_of(20)
    rows += [{**rows[3], "text": "another"}]
    keys = KEYS._replace(owner_key=owner_key)

    def follow(records: list[dict[str, str]]) -> tuple[int, int, int, int]:
        store, followed = kept(pgvector_url, records, embeddings, keys)
        store.close()
        return tuple(followed)

    assert follow(rows) == (21, 0, 21, 0)
    assert follow(rows) == (0, 0, 0, 0)
    changed = [{**rows[0], "label": "Flask"}, *rows[1:19], rows[20], {**rows[1], "text": "new"}]
    assert follow(changed) == (2, 2, 1, 0)
    store = PostgresExemplarStore.open(pgvector_url, embeddings, name="notes")
    assert store.forget("p3" if owner_key else "#3") == (2 if owner_key else 1)
    assert follow(changed) == (0, 0, 0, 2 if owner_key else 1)
    assert "p3" not in store.owners
    assert len(store) == (19 if owner_key else 20)
    seen = ask(pgvector_url, "SELECT mark FROM dpicl_forgotten_marks")
    assert len(seen) == 1
    store.close()


def test_two_processes_that_fill_a_collection_at_a_time_fill_it_once(pgvector_url: str, embeddings: Any) -> None:
    """Both find it empty. Each takes back what the other has brought twice, and the same of the two."""
    rows = rows_of(30)

    def fill(_: int) -> int:
        store, _ = kept(pgvector_url, rows, embeddings, KEYS)
        store.close()
        return 0

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, range(4)))
    store = PostgresExemplarStore.open(pgvector_url, embeddings, name="notes")
    assert (len(store), store.owner_count) == (30, 30)
    store.close()


def test_a_collection_that_is_made_and_filled_between_an_openers_look_and_its_making_is_taken_over(
    pgvector_url: str, embeddings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tables.make

    def late(*given: Any, **more: Any) -> Any:
        monkeypatch.setattr(tables, "make", make)
        kept(pgvector_url, rows_of(30), embeddings, KEYS)[0].close()
        return make(*given, **more)

    monkeypatch.setattr(tables, "make", late)
    store, followed = kept(pgvector_url, rows_of(30), embeddings, KEYS)
    assert (len(store), followed) == (30, (0, 0, 0, 0))
    store.close()


def test_another_model_other_keys_and_other_data_are_refused_and_change_nothing(
    pgvector_url: str, embeddings: Any
) -> None:
    rows = rows_of(9)
    store, _ = kept(pgvector_url, rows, embeddings, KEYS)

    class Other(DeterministicFakeEmbedding):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return super().embed_documents([f"{text}!" for text in texts])

    others = [{**row, "text": f"other {i}"} for i, row in enumerate(rows)]
    for given, model, keys, says in (
        (rows, Other(size=8), KEYS, "this embedding model"),
        (rows, embeddings, KEYS._replace(owner_key=None), "owner_key='patient'"),
        (others, embeddings, KEYS, "more than half"),
        (rows, DeterministicFakeEmbedding(size=4), KEYS, "this embedding model"),
    ):
        with pytest.raises(InvalidParameter, match=says):
            kept(pgvector_url, given, model, keys)
    assert (len(store), store.owner_count) == (9, 9)
    store.close()


# -- every part of a server on it --------------------------------------------------------------------------------------


def configuration(url: str, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "store": {"url": url, "name": "notes"},
        "release": {"kind": "vote", "labels": ["Flask", "Porch"]},
        "selector": {"calls": 20, "threshold": -1.0, "eligible": 40},
        "budget": {"epsilon": 300, "delta": 1e-5, "releases": 30, "ledger": url, "name": "notes"},
        "keys": {"desk": "0" * 64},
    }
    return base | changes


@pytest.fixture
def filled(unthinking: None, pgvector_url: str, embeddings: Any, tmp_path: Path) -> str:
    rows = [{**row, "ward": i % 2} for i, row in enumerate(rows_of(40))]
    kept(pgvector_url, rows, embeddings, KEYS)[0].close()
    return pgvector_url


def file_of(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "server.yaml"
    path.write_text(json.dumps(settings))
    return str(path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"selector": {"members": 10, "shots": 2}},
        {"selector": {"calls": 20, "filter": {"ward": 1}, "eligible": 20}},
        {"release": {"kind": "label-vote", "labels": ["Flask", "Porch"], "details": True}},
        {"budget": {"epsilon": 300, "delta": 1e-5, "releases": 3, "tickets": True, "name": "near"}},
        {"store": {"name": "notes", "input_key": "text", "owner_key": "patient"}},
    ],
    ids=["gate", "shared buckets", "filter", "label vote", "tickets", "keys"],
)
def test_every_kind_of_selection_answers_from_it(changes: dict[str, Any], filled: str, tmp_path: Path) -> None:
    for section, given in (("store", {"url": filled}), ("budget", {"ledger": filled})):
        if section in changes:
            changes = changes | {section: changes[section] | given}
    path = file_of(tmp_path, configuration(filled, **changes))
    assert main(["serve", "--config", path, "--check"]) == 0
    chain = read(path).build()
    with acting_for("desk"):
        for i in range(2):
            answer = chain.invoke({"text": f"Flask or what, {i}?"})["answer"]
            assert "Flask" in str(answer)


@pytest.mark.filterwarnings("ignore::langchain_dpicl.errors.PrivacyWarning")  # so few owners
def test_a_head_and_documents_are_released_from_it(filled: str, embeddings: Any) -> None:
    """Each with its budget in the same database. Of two rows of logits the first word's is larger by 5 for anybody."""
    store = PostgresExemplarStore.open(filled, embeddings, name="notes")
    budgets = [PrivacyBudget(8, 1e-5, {"head": 1}, filled, "heads")]
    head = PrivateHead.fit(store, ["Flask", "Porch"], budgets[0], input_key="text", progress=False)
    assert set(head.invoke("a note")["scores"]) == {"Flask", "Porch"}
    assert len(store.released_once) == 1
    rows = [{"text": f"document {i}", "patient": f"p{i}"} for i in range(60)]
    options: dict[str, Any] = {"input_key": "text", "output_key": None, "owner_key": "patient", "progress": False}
    documents = PostgresExemplarStore.from_records(rows, embeddings, filled, name="documents", **options)
    model = TableModel(lambda shown, released: [5.0, 0.0], "ab")
    selector = PoissonExampleSelector(documents, calls=4, threshold=0.0, eligible=20)
    budgets.append(PrivacyBudget(8, 1e-5, 30, filled, "documents", tickets=True))
    sampler = DPSampler.over_documents(model, selector, budgets[1], max_tokens=3, top_k=2, pad=False)
    assert set(sampler.invoke("a question")) <= {"a", "b"}
    assert [budget.spent() for budget in budgets] == [1, 3]
    for each in (store, documents, *budgets):
        each.close()


def test_a_chain_on_it_is_rehearsed_without_a_private_record(
    filled: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunnableLambda(lambda values: "".join(each["label"] for each in values["examples"]) or "Flask")
    monkeypatch.setattr("langchain_dpicl.members.chains.LabelScorer", lambda *_, **__: first)
    path = file_of(tmp_path, configuration(filled))
    example = json.dumps({"text": "invented", "label": "Flask"})
    assert main(["rehearse", "--config", path, "--example", example, "--question", "Flask?", "--json"]) == 0
    assert "a note about" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("store", "says"),
    [
        ({"name": "others"}, "no collection 'others'"),
        ({"name": "notes", "owner_key": "who"}, "made with owner_key='patient'"),
    ],
)
def test_a_collection_that_is_not_there_or_has_other_keys_is_refused(
    store: dict[str, Any], says: str, filled: str, tmp_path: Path, capsys: Any
) -> None:
    path = file_of(tmp_path, configuration(filled, store={"url": filled, **store}))
    assert main(["serve", "--config", path, "--check"]) == 1
    assert says in capsys.readouterr().err
