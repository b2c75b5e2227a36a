"""`add_dp_routes` and `dpicl serve` for a sampler, in process: text in pieces, charges, errors, the budget."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from langchain_core.runnables import RunnableLambda
from table_model import TableModel

from langchain_dpicl import DPSampler, PoissonExampleSelector, PrivacyBudget
from langchain_dpicl.cli import main
from langchain_dpicl.decoding.steps import CUT
from langchain_dpicl.privacy import plan as plan_module
from langchain_dpicl.release.base import releases_in
from langchain_dpicl.serving.app import create_app, plans, warm
from langchain_dpicl.serving.config import read
from langchain_dpicl.serving.guards import hash_of, new_key
from langchain_dpicl.serving.state import budget_state, release_history

WORD = "hello"
ALPHABET = ["h", "e", "l", "o", "."]
TOKENS = len(WORD) + 1
"""The end token is sampled too."""
QUESTION = {"input": "what?"}
ALICE, BOB = {"x-user": "alice"}, {"x-user": "bob"}

Make = Callable[..., DPSampler]
Serve = Callable[..., TestClient]


def spelling(demonstration: str, released: str) -> list[float]:
    """So sure of the word that no draw differs (below 1e-30 a token)."""
    wanted = ALPHABET.index((WORD + ".")[len(released)])
    return [100.0 if token == wanted else 0.0 for token in range(5)]


@pytest.fixture
def sampler_of(budget_of: Callable[..., PrivacyBudget], store_of: Any, records: Any, canary: str) -> Make:
    """sampler_of(): a sampler over a store whose every text holds the canary."""

    def make(table: Any = spelling, *, return_receipt: bool = False, **budget_options: Any) -> DPSampler:
        selector = PoissonExampleSelector(store_of(records(8, secret=canary)), 2, rate=1.0, max_exemplars=8)
        model = TableModel(table, ALPHABET, frozenset({4}))
        budget = budget_of(**{"releases": 200, **budget_options})
        return DPSampler(model, selector, budget, shots=4, top_k=5, max_tokens=10, return_receipt=return_receipt)

    return make


def events(text: str) -> list[tuple[str, Any]]:
    """A stream's events, as LangServe's client reads them."""
    found = []
    for block in text.replace("\r\n", "\n").strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields["event"], json.loads(fields["data"]) if "data" in fields else None))
    return found


def data(text: str) -> list[Any]:
    return [content for name, content in events(text) if name == "data"]


def post(client: TestClient, name: str, content: Any, who: dict[str, str] = ALICE) -> Any:
    return client.post(f"/ask/{name}", json={"inputs" if name == "batch" else "input": content}, headers=who)


# -- answers -----------------------------------------------------------------------------------------------------------


def test_invoke_and_batch_give_the_text(sampler_of: Make, serve: Serve) -> None:
    sampler = sampler_of()
    client = serve(sampler)
    assert post(client, "invoke", QUESTION).json()["output"] == WORD
    assert post(client, "invoke", "what?").json()["output"] == WORD
    assert post(client, "batch", ["a", {"input": "b"}]).json()["output"] == [WORD] * 2
    assert sampler.budget.spent() == 4 * TOKENS


def test_a_stream_gives_each_piece_as_an_event(sampler_of: Make, serve: Serve) -> None:
    streamed = post(serve(sampler_of()), "stream", QUESTION)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert [name for name, _ in events(streamed.text)] == ["metadata", *["data"] * len(WORD), "end"]
    assert data(streamed.text) == list(WORD)


def test_with_a_receipt_it_comes_last(sampler_of: Make, serve: Serve) -> None:
    client = serve(sampler_of(return_receipt=True))
    one = post(client, "invoke", QUESTION).json()["output"]
    assert (one["answer"], one["receipt"]["tokens"]) == (WORD, TOKENS)
    *pieces, last = data(post(client, "stream", QUESTION).text)
    assert pieces == [{"answer": letter} for letter in WORD]
    assert last["receipt"]["outcome"] == "released"


def test_a_chain_with_a_sampler_inside_streams_through_its_steps(sampler_of: Make, serve: Serve) -> None:
    sampler = sampler_of()
    chain = RunnableLambda(lambda text: {"input": text}) | sampler
    client = serve(chain.with_types(input_type=str))
    assert data(post(client, "stream", "what?").text) == list(WORD)
    assert post(client, "invoke", "what?").json()["output"] == WORD
    assert post(client, "invoke", 7).status_code == 422
    assert post(serve(chain | str.upper), "invoke", "what?").json()["output"] == WORD.upper()
    assert sampler.budget.spent() == 3 * TOKENS


def test_a_known_question_is_replayed_in_one_piece(sampler_of: Make, serve: Serve) -> None:
    client = serve(sampler_of(replay=True))
    post(client, "stream", QUESTION)
    assert data(post(client, "stream", QUESTION).text) == [WORD]
    assert client.get("/ask/budget", headers=ALICE).json()["lines"]["tokens"]["spent"] == TOKENS


# -- who asks ----------------------------------------------------------------------------------------------------------


def test_tokens_count_for_the_caller_of_every_endpoint(sampler_of: Make, serve: Serve) -> None:
    sampler = sampler_of(scope="per_principal")
    client = serve(sampler)
    post(client, "invoke", QUESTION)
    post(client, "stream", QUESTION, BOB)
    post(client, "batch", ["a", "b"], BOB)
    assert sampler.budget.principals() == {"alice": {"tokens": TOKENS}, "bob": {"tokens": 3 * TOKENS}}
    assert client.get("/ask/budget", headers=ALICE).json()["lines"]["tokens"]["spent"] == TOKENS
    assert client.get("/ask/history", headers=BOB).json()["total"] == 3


@pytest.mark.parametrize("name", ["invoke", "batch", "stream"])
def test_without_a_caller_nothing_is_drawn(name: str, sampler_of: Make, serve: Serve) -> None:
    sampler = sampler_of()
    assert post(serve(sampler), name, ["a"] if name == "batch" else "a", {}).status_code == 401
    assert sampler.model.calls == []  # type: ignore[attr-defined]


# -- errors ------------------------------------------------------------------------------------------------------------

BAD = {"a key that is missing": {"no": 1}, "a number": 7, "nothing": None, "too long": "q" * 20_000}


@pytest.mark.parametrize("name", ["invoke", "batch", "stream"])
@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_422_and_free(bad: str, name: str, sampler_of: Make, serve: Serve) -> None:
    sampler = sampler_of()
    client = serve(sampler)
    assert post(client, name, ["a", BAD[bad]] if name == "batch" else BAD[bad]).status_code == 422
    assert sampler.budget.spent() == 0


def test_a_spent_budget_is_429_before_the_first_piece(sampler_of: Make, serve: Serve) -> None:
    client = serve(sampler_of(releases=TOKENS))
    assert post(client, "stream", QUESTION).status_code == 200
    for name, content in (("invoke", "a"), ("batch", ["a"]), ("stream", "a")):
        refused = post(client, name, content)
        assert (refused.status_code, refused.json()["error"]) == (429, "PrivacyBudgetExceeded")


def test_a_batch_that_the_budget_cannot_pay_says_how_far_it_got(sampler_of: Make, serve: Serve) -> None:
    """12 tokens are two answers, and the first is known: whoever is charged next, nobody gets more."""
    sampler = sampler_of(releases=12, replay=True)
    client = serve(sampler)
    post(client, "batch", ["a"])
    refused = post(client, "batch", ["a", "b", "c", "d"])
    assert refused.status_code == 429
    assert "for this one of a batch of 4" in refused.json()["message"]
    assert sampler.budget.spent() == 12


def test_an_answer_that_the_budget_cuts_says_so_on_its_receipt(sampler_of: Make, serve: Serve) -> None:
    client = serve(sampler_of(releases=3, return_receipt=True))
    cut = post(client, "invoke", QUESTION).json()["output"]
    assert (cut["answer"], cut["receipt"]["outcome"]) == (WORD[:3], CUT)


def test_a_model_that_is_down_is_503_and_free(sampler_of: Make, serve: Serve) -> None:
    def broken(demonstration: str, released: str) -> Any:
        raise ConnectionError("CANARY of a model")

    sampler = sampler_of(broken)
    client = serve(sampler)
    for name, content in (("invoke", "a"), ("batch", ["a"]), ("stream", "a")):
        refused = post(client, name, content)
        assert (refused.status_code, refused.json()["error"]) == (503, "ModelUnavailable")
        assert "CANARY" not in refused.text
    assert sampler.budget.spent() == 0


def test_a_failure_after_the_first_piece_is_an_event_that_tells_nothing(
    sampler_of: Make, serve: Serve, canary: str, caplog: pytest.LogCaptureFixture
) -> None:
    def table(demonstration: str, released: str) -> list[float]:
        if len(released) == 2:  # the zero-shot row too, which alone may fail an answer
            raise ValueError(f"{canary} {demonstration}")
        return spelling(demonstration, released)

    sampler = sampler_of(table)
    streamed = post(serve(sampler), "stream", QUESTION)
    *pieces, (name, told) = events(streamed.text)
    assert [content for kind, content in pieces if kind == "data"] == ["h", "e"]
    assert (name, told["status_code"]) == ("error", 500)
    assert canary not in streamed.text + caplog.text
    assert sampler.budget.spent() == 10, "the charge stands"


# -- its budget --------------------------------------------------------------------------------------------------------


def test_the_budget_counts_tokens_and_the_history_answers(sampler_of: Make, serve: Serve) -> None:
    sampler = sampler_of()
    client = serve(sampler)
    before = client.get("/ask/budget", headers=ALICE).json()
    assert before["lines"]["tokens"] == {
        "unit": "tokens", "count": 200, "spent": 0, "remaining": 200, "mechanism": None,
    }  # fmt: skip
    assert sampler.budget.plan is None, "reading freezes nothing"
    post(client, "stream", QUESTION)
    after = client.get("/ask/budget", headers=ALICE).json()
    assert (after["owner"], after["lines"]["tokens"]["remaining"]) == ("owner", 200 - TOKENS)
    assert 0.0 < after["share_spent"] < 1.0
    (past,) = client.get("/ask/history", headers=ALICE).json()["releases"]
    assert (past["line"], past["outcome"]) == ("tokens", "released")
    assert budget_state(releases_in(sampler), None) == after
    assert release_history(releases_in(sampler), None)["total"] == 1


def test_the_plan_is_shown_before_it_is_frozen_and_frozen_before_it_is_served(sampler_of: Make) -> None:
    sampler = sampler_of()
    (before,) = plans(sampler)
    assert not before["frozen"]
    assert sampler.budget.plan is None
    warm(sampler)
    (after,) = plans(sampler)
    assert after["frozen"]
    assert before["lines"] == after["lines"], "the plan that was shown is the one that holds"
    (line,) = after["lines"]
    assert (line["line"], line["unit"], line["releases"]) == ("tokens", "tokens", 200)


def test_a_warm_server_has_the_epsilons_of_all_receipts(sampler_of: Make) -> None:
    sampler = sampler_of()
    plan_module._spent.cache_clear()
    plan_module._step.cache_clear()
    warm(sampler, seconds=60)
    computed, budget_plan = plan_module._spent.cache_info().misses, sampler.budget.plan
    assert budget_plan is not None
    for count in range(1, 201):
        budget_plan.spent({"tokens": count})
    assert plan_module._spent.cache_info().misses == computed


# -- dpicl serve -------------------------------------------------------------------------------------------------------

MODULE = """
from pathlib import Path

from langchain_core.embeddings import DeterministicFakeEmbedding
from table_model import TableModel

from langchain_dpicl import DPSampler, ExemplarStore, PoissonExampleSelector, PrivacyBudget

WORD = "hello."


def table(demonstration, released):
    return [100.0 if letter == WORD[len(released)] else 0.0 for letter in "helo."]


def sampler():
    rows = [{"topic": f"text {i}", "poem": "x"} for i in range(8)]
    store = ExemplarStore.from_records(
        rows, DeterministicFakeEmbedding(size=8), input_key="topic", output_key="poem", progress=False
    )
    budget = PrivacyBudget(1000, 1e-5, 200, f"sqlite:///{Path(__file__).with_name('budget.db')}", "poems")
    selector = PoissonExampleSelector(store, 2, rate=0.5, max_exemplars=8)
    model = TableModel(table, list("helo."), frozenset({4}))
    return DPSampler(model, selector, budget, shots=4, top_k=5, max_tokens=10, return_receipt=True)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, dict[str, str]]]:
    """A configuration whose chain is a function that returns a sampler, and the headers of a key."""
    name = f"served_sampler_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    key = new_key()
    settings = {"chain": f"{name}:sampler", "keys": {"web": hash_of(key)}}
    (tmp_path / "server.yaml").write_text(json.dumps(settings))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "server.yaml", {"authorization": f"Bearer {key}"}
    sys.modules.pop(name, None)


def test_a_function_that_returns_a_sampler_is_served_with_its_page(config: tuple[Path, dict[str, str]]) -> None:
    path, headers = config
    with TestClient(create_app(read(path))) as client:
        streamed = client.post("/answer/stream", json={"input": {"topic": "spring"}}, headers=headers)
        assert [piece["answer"] for piece in data(streamed.text) if "answer" in piece] == list(WORD)
        page = client.get("/").text
        assert '"inputKey": "topic"' in page
        assert client.get("/answer/budget", headers=headers).json()["lines"]["tokens"]["unit"] == "tokens"


def test_the_check_of_a_configuration_shows_a_samplers_plan(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(config[0]), "--check", "--json"]) == 0
    (budget,) = json.loads(capsys.readouterr().out)["budgets"]
    assert budget["lines"][0]["unit"] == "tokens"
    assert budget["lines"][0]["parameter"] > 0
