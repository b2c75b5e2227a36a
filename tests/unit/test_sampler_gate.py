"""DPSampler over documents near to a question: gates, filters, tickets and what is given back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from branching import Tree
from langchain.agents import create_agent
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from ledger_files import copy_ledger
from table_model import Table, TableModel
from ticket_worlds import Degrees, Draws
from tickets_on_disk import burnt, run
from ways import WAYS, ask

from langchain_dpicl import (
    DemonstrationTemplate,
    DPRetriever,
    DPSampler,
    ExemplarStore,
    InvalidParameter,
    LedgerError,
    ModelUnavailable,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivacyBudgetExceeded,
    PrivacyWarning,
    ReleaseFailed,
    acting_for,
    release_collection,
)
from langchain_dpicl.budget.tickets import TicketLine
from langchain_dpicl.decoding import answer
from langchain_dpicl.decoding.documents import DocumentReport
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.private import notes
from langchain_dpicl.private.models import DEFAULT_TIMEOUT

ALPHABET, END = ["a", "b", "."], 2
RECORDS = [  # a text ends with the direction in which it lies, in degrees; a query finds what lies within 60 of it
    {"text": "ann far 50", "owner": "ann", "ward": 1},
    {"text": "ann near 10", "owner": "ann", "ward": 2},
    {"text": "bob 30", "owner": "bob", "ward": 1},
    {"text": "cec 170", "owner": "cec", "ward": 1},
]


def ends_after(letters: int) -> Table:
    """Says so many a, surely, whatever it is shown."""
    return lambda shown, released: [0.0, 0.0, 100.0] if len(released) >= letters else [100.0, 0.0, 0.0]


@pytest.fixture
def sampler_of(ledger_url: str) -> Callable[..., DPSampler]:
    def make(letters: int = 2, tickets: int | None = 9, rate: float = 1.0, **how: Any) -> DPSampler:
        store = how.pop("store", None) or ExemplarStore.from_records(
            RECORDS, Degrees(), input_key="text", output_key=None, owner_key="owner", progress=False
        )
        chosen = {"members": 2, "rate": rate, "max_exemplars": 4, "threshold": 0.5, "eligible": 3}
        chosen |= how.pop("chosen", {})
        selector = PoissonExampleSelector(store, **chosen)
        budget = how.pop("budget", None) or PrivacyBudget(
            50.0, 1e-3, tickets or 60, ledger_url, tickets=tickets is not None, replay=how.pop("replay", False)
        )
        model = how.pop("model", None) or TableModel(ends_after(letters), ALPHABET, frozenset({END}))
        settings = {"shots": 2, "top_k": 3, "max_tokens": 4, "pad": False, **how}
        return DPSampler(model, selector, budget, template=DemonstrationTemplate("{text}|", "{input}"), **settings)

    return make


def used(sampler: DPSampler, ledger_url: str) -> dict[str, int]:
    assert isinstance(sampler.store, ExemplarStore)
    return burnt(ledger_url, sampler.store, "tokens")


# -- who takes part ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tickets", [None, 40])
@pytest.mark.parametrize("way", WAYS)
async def test_owners_behind_the_gate_show_their_document_nearest_to_the_question(
    way: str, tickets: int | None, sampler_of: Any
) -> None:
    sampler = sampler_of(tickets=tickets)
    assert await ask(way, sampler, "? 0") == "aa"
    assert sorted(sampler.model.opened[-1]) == ["ann near 10|", "bob 30|"]


def test_a_filter_and_the_gate_must_pass_on_the_same_document(sampler_of: Any) -> None:
    """At 0 degrees ward 1 leaves ann's far document; at 345 that one is beyond the gate, and ann takes no part."""
    sampler = sampler_of(tickets=None, chosen={"filter": lambda values: {"ward": values["ward"]}})
    for question, shown in (("? 0", ["ann far 50|", "bob 30|"]), ("? 345", ["bob 30|"])):
        assert sampler.invoke({"input": question, "ward": 1}) == "aa"
        assert sorted(sampler.model.opened[-1]) == shown


def test_a_token_reads_documents_behind_the_gate_alone(sampler_of: Any) -> None:
    """Of those who paid, cec has none of them left."""
    sampler = sampler_of(tickets=None)
    query = sampler.selector.embed_query({"input": "? 0"})
    drawn = sampler.exemplars.draw(SecureRandomness(), 1.0, "? 0", 3, query, among=np.arange(3))
    assert sorted(each.text for each in drawn.demonstrations) == ["ann near 10|", "bob 30|"]
    assert [len(step) for step in drawn.steps] == [2, 2, 2]


def test_what_search_query_makes_of_the_question_is_looked_for(sampler_of: Any) -> None:
    def rewritten(values: Any) -> str:
        if values["input"] == "broken":
            raise ValueError("CANARY")
        return "? 170"

    sampler = sampler_of(tickets=None, chosen={"search_query": RunnableLambda(rewritten)})
    sampler.invoke("? 0")
    assert sampler.model.opened[-1] == ["cec 170|"]
    with pytest.raises(ModelUnavailable, match="nothing was charged"):
        sampler.invoke("broken")
    assert sampler.budget.spent() == 3


def test_a_search_query_has_the_clock_of_every_public_chain(sampler_of: Any) -> None:
    sampler = sampler_of(tickets=None, chosen={"search_query": RunnableLambda(str)})
    assert sampler.search.timeout == DEFAULT_TIMEOUT


def test_calls_give_the_rate_and_the_weight_of_the_public_answer(sampler_of: Any) -> None:
    sampler = sampler_of(
        tickets=None, shots=None, pad=True, chosen={"members": None, "rate": None, "calls": 2, "eligible": 4}
    )
    assert (sampler.settings.shots, sampler.selector.rate) == (2, 0.5)
    assert sampler.slots_of(sampler.line()) == 4


def test_equal_questions_under_other_gates_are_other_questions(sampler_of: Any) -> None:
    sampler = sampler_of(tickets=None, replay=True)
    sampler.invoke("? 0")
    spent = sampler.budget.spent()
    sampler.invoke("? 0")
    assert sampler.budget.spent() == spent
    wider = sampler_of(budget=sampler.budget, store=sampler.store, tickets=None, chosen={"threshold": -1.0})
    wider.invoke("? 0")
    assert sampler.budget.spent() == 2 * spent


# -- tickets -----------------------------------------------------------------------------------------------------------


def test_an_owner_with_too_few_tickets_sits_out_and_unused_ones_come_back(sampler_of: Any, ledger_url: str) -> None:
    """9 tickets, 4 charged an answer, 3 drawn (two letters and the end): 3, 6, and 3 are too few."""
    sampler = sampler_of(letters=2, tickets=9)
    asked = []
    for _ in range(4):
        sampler.invoke("? 0")
        asked.append((len(sampler.model.opened[-1]), used(sampler, ledger_url)))
    assert asked[0] == (2, {"ann": 3, "bob": 3, "cec": 0}), "one token of the first answer never ran"
    assert asked[1:] == [(2, {"ann": 6, "bob": 6, "cec": 0}), *[(0, {"ann": 6, "bob": 6, "cec": 0})] * 2]
    sampler.invoke("? 170")
    assert used(sampler, ledger_url) == {"ann": 6, "bob": 6, "cec": 3}


def test_what_comes_back_is_the_same_whatever_the_coins_said(
    sampler_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 16 outcomes of the coins of two owners for two tokens, of which the first is the end."""
    found, tree = set(), Tree()
    while True:
        url = f"sqlite:///{tmp_path}/{len(found)}.db"
        budget = PrivacyBudget(50.0, 1e-3, 9, url, tickets=True, replay=False)
        sampler = sampler_of(letters=0, rate=0.5, max_tokens=2, min_tokens=0, budget=budget)
        sampler._randomness = Draws(tree)
        with monkeypatch.context() as patch:
            patch.setattr(answer, "draw", lambda scores, _: int(scores.argmax()))
            sampler.invoke("? 0")
        coins = tuple(tree._path)
        found.add((coins, *used(sampler, url).values()))
        if not tree.next():
            break
    assert len(found) == 16
    assert {each[1:] for each in found} == {(1, 1, 0)}


def test_failed_answers_and_the_same_charge_give_nothing_back(sampler_of: Any, ledger_url: str) -> None:
    sampler = sampler_of(letters=2, tickets=60)
    line = sampler.line()
    owners = np.arange(2)

    def charge() -> Any:
        (made,) = line.charge(units=4, owners=[line.ask(sampler.store, owners)])
        return made

    first = charge()
    line.give_up(first)
    with pytest.raises(LedgerError, match="given up"):
        line.record(first, unused=1)
    second = charge()
    for _ in range(2):
        line.record(second, unused=1)
    third = charge()
    with pytest.raises(InvalidParameter, match="unused"):
        line.record(third, unused=4)
    assert used(sampler, ledger_url) == dict.fromkeys(("ann", "bob"), 4 + 4 - 1 + 4) | {"cec": 0}
    line.record(third, unused=3)
    assert used(sampler, ledger_url) == dict.fromkeys(("ann", "bob"), 4 + 4 - 1 + 4 - 3) | {"cec": 0}


def test_a_record_that_fails_gives_nothing_back_and_once_when_it_is_made_again(
    sampler_of: Any, ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(tickets=60)
    line, real = sampler.line(), TicketLine.give_back
    (made,) = line.charge(units=4, owners=[line.ask(sampler.store, np.arange(2))])

    def fails(*given: Any) -> None:
        real(*given)
        raise LedgerError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(TicketLine, "give_back", fails)
        with pytest.raises(LedgerError, match="full"):
            line.record(made, unused=3)
    assert used(sampler, ledger_url) == {"ann": 4, "bob": 4, "cec": 0}
    for _ in range(2):
        line.record(made, unused=3)
        assert used(sampler, ledger_url) == {"ann": 1, "bob": 1, "cec": 0}


def test_what_came_back_is_there_for_other_processes(sampler_of: Any, ledger_url: str) -> None:
    sampler = sampler_of(tickets=19)
    for i in range(1, 5):
        sampler.invoke("? 0")
        sampler_of(tickets=19, store=sampler.store).invoke("? 0")
        assert used(sampler, ledger_url) == dict.fromkeys(("ann", "bob"), min(18, 6 * i)) | {"cec": 0}


def test_a_copy_without_a_charge_gives_nothing_back_for_it(sampler_of: Any, tmp_path: Path) -> None:
    """The ledger is put back while an answer is under way. The copy counts its charge as lost, for every owner."""
    file, copy = tmp_path / "ledger.db", tmp_path / "copy.db"
    sampler = sampler_of(tickets=60)
    sampler.invoke("? 0")
    sampler.budget.close()
    copy_ledger(file, copy)
    line = sampler.line()
    (made,) = line.charge(units=4, owners=[line.ask(sampler.store, np.arange(2))])
    sampler.budget.close()
    copy.replace(file)
    with pytest.warns(PrivacyWarning, match="an older copy"):
        other = sampler_of(tickets=60, store=sampler.store)
    other.invoke("? 0")
    with pytest.raises(LedgerError, match="it stands"):
        line.record(made, unused=3)
    url = f"sqlite:///{file}"
    assert used(other, url) == {"ann": 6, "bob": 6, "cec": 0}
    assert run(url, "SELECT lost FROM dpicl_counters") == [(4,)]


# -- questions over documents ------------------------------------------------------------------------------------------


@pytest.fixture
def over(ledger_url: str) -> Callable[..., DPSampler]:
    def make(context: int = 100, **how: Any) -> DPSampler:
        store = how.pop("store", None) or ExemplarStore.from_records(
            RECORDS, Degrees(), input_key="text", output_key=None, owner_key="owner", progress=False
        )
        selector = PoissonExampleSelector(store, calls=2, threshold=0.5, eligible=2)
        budget = how.pop("budget", None) or PrivacyBudget(50.0, 1e-3, 60, ledger_url, replay=False)
        model = TableModel(ends_after(2), ALPHABET, frozenset({END}), context=context)
        options = {"max_tokens": 4, "top_k": 3, "question_tokens": 10, **how}
        return DPSampler.over_documents(model, selector, budget, **options)

    return make


def test_a_row_is_one_document_and_the_question(over: Any) -> None:
    sampler = over(instruction="Answer in {braces}.")
    assert sampler.invoke("who? 0") == "aa"
    assert {"Document: ann near 10\n\n", "Document: bob 30\n\n"} >= set(sampler.model.opened[-1]) - {
        sampler.template.padding
    }
    assert sampler.template.ask({"input": "who? 0"}) == "Answer in {braces}.\nQuestion: who? 0\nAnswer:"


def test_documents_that_are_too_long_are_left_out_and_counted_for_the_operator_alone(
    over: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A character is a token here: with 12 + 18 of the layout, 20 of the question and 4 of the answer, 9 are left.

    A worker that starts with such documents is a worker that was there before they came.
    """
    with caplog.at_level(logging.DEBUG):
        sampler = over(context=63, question_tokens=10)
        assert sampler.invoke("x" * 16 + " ? 0") == "aa"
        assert not {"Document: ann near 10\n\n", "Document: ann far 50\n\n"} & set(sampler.model.opened[-1])
        assert sampler.document_report() == DocumentReport(len(sampler.store), 2, 4)
    assert not caplog.records
    assert "left_out" not in repr(sampler.document_report())
    caplog.set_level(logging.WARNING, notes.NAME)
    over(context=63, question_tokens=10)
    (said,) = caplog.records
    assert said.name == notes.NAME
    assert "2 of 4 documents" in said.getMessage()


def test_no_question_passes_beside_which_the_longest_document_has_no_room(over: Any) -> None:
    with pytest.raises(InvalidParameter, match="question_tokens"):
        over(context=50, question_tokens=64)
    sampler = over(context=65, question_tokens=10)
    assert sampler.invoke("x" * 15 + " ? 0") == "aa"
    with pytest.raises(InvalidParameter, match="input"):
        sampler.invoke("x" * 17 + " ? 0")  # a letter more, and the longest document would have no part
    assert sampler.budget.spent() == 3


def test_half_a_character_is_refused_in_a_question_and_counted_among_documents(over: Any) -> None:
    """No tokeniser reads one: each would raise an error of its own, which refers to the text."""
    sampler = over()
    with pytest.raises(InvalidParameter, match="Unicode"):
        sampler.invoke("who \ud83d? 0")
    sampler.store.add([{"text": "CANARY \ud83d 20", "owner": "dan"}])
    for each in (sampler, over(store=sampler.store, budget=sampler.budget)):
        assert each.invoke("who? 0") == "aa"
        assert not any("CANARY" in shown for shown in each.model.opened[-1])
        assert each.document_report().left_out == 1


def test_a_sampler_over_documents_stands_behind_a_retriever_and_a_tool(over: Any) -> None:
    sampler = over()
    (document,) = DPRetriever(sampler).invoke("who? 0")
    assert document.page_content == "aa"
    assert document.metadata["receipt"]["tokens"] == 3
    tool = sampler.as_tool("notes", "Answers from patients' notes.")
    assert tool.invoke({"query": "who? 0"}) == "aa"
    assert list(sampler.stream("who? 0")) == ["a", "a"]


class Script(FakeMessagesListChatModel):
    """A model that asks for what the test says."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


@pytest.mark.parametrize("through", ["a tool", "a retriever's tool"])
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_an_agents_questions_are_paid_by_owners_near_to_each(
    way: str, through: str, over: Any, ledger_url: str
) -> None:
    """9 tickets, 4 charged a question and 3 drawn: the third finds 3 left, and is answered without a document."""
    budget = PrivacyBudget(50.0, 1e-3, 9, ledger_url, tickets=True, scope="per_principal", replay=False)
    sampler = over(budget=budget, pad=False)
    retriever = create_retriever_tool(DPRetriever(sampler), "notes", "Finds notes.")
    tool = sampler.as_tool("notes", "Answers from patients' notes.") if through == "a tool" else retriever
    questions = [
        AIMessage("", tool_calls=[{"name": "notes", "args": {"query": f"{i}? 0"}, "id": f"{i}"}]) for i in "abc"
    ]
    agent = create_agent(Script(responses=[*questions, AIMessage("done")]), [tool])
    with acting_for("alice"):
        state = {"messages": [("user", "go")]}
        state = agent.invoke(state) if way == "invoke" else await agent.ainvoke(state)
    answers = [message for message in state["messages"] if isinstance(message, ToolMessage)]
    assert [(each.content, each.status) for each in answers] == [("aa", "success")] * 3
    if through == "a tool":
        assert [(each.artifact["tokens"], each.artifact["remaining"]) for each in answers] == [(3, None)] * 3
    assert not any(word in str(state) for word in ("near 10", "bob 30", "ticket"))
    asked = [sorted(shown) for shown in sampler.model.opened if len(shown) != 0]
    assert asked == [["Document: ann near 10\n\n", "Document: bob 30\n\n"]] * 2
    assert burnt(ledger_url, sampler.store, "tokens", "alice") == {"ann": 6, "bob": 6, "cec": 0}


def test_a_chain_around_a_retriever_of_answers_streams_and_pays_once(over: Any, ledger_url: str) -> None:
    sampler = over(budget=PrivacyBudget(50.0, 1e-3, 9, ledger_url, tickets=True), pad=False)
    found = RunnablePassthrough.assign(context=itemgetter("question") | DPRetriever(sampler))
    chain = found | (lambda values: f"{values['question']} {values['context'][0].page_content}")
    for _ in range(2):  # an equal question is replayed
        assert "".join(chain.stream({"question": "who? 0"})) == "who? 0 aa"
        assert burnt(ledger_url, sampler.store, "tokens") == {"ann": 3, "bob": 3, "cec": 0}


# -- a released collection ---------------------------------------------------------------------------------------------


def test_a_released_collection_is_searched_for_ever_and_costs_nothing_more(over: Any, tmp_path: Path) -> None:
    sampler, fake = over(), DeterministicFakeEmbedding(size=8)
    file = tmp_path / "passages.jsonl"
    collection = release_collection(sampler, ["fever? 0", "cough? 170"], embeddings=fake, output=file)
    spent = sampler.budget.spent()
    assert spent == 6
    for _ in range(3):
        found = collection.as_retriever(search_kwargs={"k": 1}).invoke("fever? 0")
        assert [(each.page_content, each.metadata["topic"]) for each in found] == [("fever? 0\naa", "fever? 0")]
    assert found[0].metadata["receipt"]["tokens"] == 3
    again = release_collection(sampler, ["fever? 0", "cough? 170"], embeddings=fake, output=file)
    assert len(again.store) == 2
    assert sampler.budget.spent() == spent
    collection.dump(str(tmp_path / "notes.json"))
    loaded = InMemoryVectorStore.load(str(tmp_path / "notes.json"), fake)
    assert loaded.similarity_search("cough? 170", k=1)[0].metadata["topic"] == "cough? 170"


def test_topics_without_a_passage_are_counted_and_bad_topics_cost_nothing(over: Any) -> None:
    sampler = over(min_tokens=0)
    for topics in ([], "one", ["a 0", ""], ["a 0", "a 0"], [3]):
        with pytest.raises(InvalidParameter, match="topics"):
            release_collection(sampler, topics)
    embeddings: Any = "MiniLM"
    with pytest.raises(InvalidParameter, match="embeddings"):
        release_collection(sampler, ["a 0"], embeddings=embeddings)
    with pytest.raises(ModelUnavailable, match="nothing was charged"):
        release_collection(sampler, ["no degrees"], embeddings=Degrees())
    assert sampler.budget.spent() == 0
    sampler.model.table = ends_after(0)
    with pytest.warns(PrivacyWarning, match="on 1 of 1 topics"):
        assert not release_collection(sampler, ["a 0"]).store
    assert sampler.budget.spent() == 1


def test_a_job_whose_owners_pay_begins_a_failed_answer_again_at_once(
    sampler_of: Any, ledger_url: str, tmp_path: Path
) -> None:
    """Nobody can go on with its charge, so nobody waits for it: here a wait would end in an hour."""
    budget = PrivacyBudget(50.0, 1e-3, 60, ledger_url, tickets=True, replay_patience=3600.0)
    sampler, fake, file = sampler_of(budget=budget), DeterministicFakeEmbedding(size=8), tmp_path / "passages.jsonl"
    whole, sampler.model.table = sampler.model.table, None  # fails every row
    sampler._doubts.of("").judge(answered=True)
    sampler._doubts.asked("").judge(answered=True)
    with pytest.raises(ReleaseFailed):
        release_collection(sampler, ["fever? 0"], embeddings=fake, output=file)
    sampler.model.table = whole
    assert len(release_collection(sampler, ["fever? 0"], embeddings=fake, output=file).store) == 1
    assert used(sampler, ledger_url) == {"ann": 4 + 3, "bob": 4 + 3, "cec": 0}


def test_a_sample_weighs_against_as_many_owners_as_are_eligible(sampler_of: Any) -> None:
    """Public logits of twenty shots would drown three owners."""
    few = {"members": None, "calls": 20, "rate": None, "filter": {"ward": 1}}
    with pytest.warns(PrivacyWarning, match="3 eligible owners are fewer than 20 calls"):
        sampler = sampler_of(tickets=None, chosen=few, shots=None)
    assert (sampler.settings.shots, sampler.selector.rate) == (3, 1.0)


def test_a_file_of_passages_is_of_one_callers_rights_and_one_filter(sampler_of: Any, tmp_path: Path) -> None:
    fake, file = DeterministicFakeEmbedding(size=8), tmp_path / "passages.jsonl"
    sampler = sampler_of(
        tickets=None, chosen={"visible_to": lambda who: {"ward": 1} if who == "nurse" else "everything"}
    )
    with acting_for("doctor"):
        release_collection(sampler, ["fever? 0"], embeddings=fake, output=file)
    filtered = [
        sampler_of(tickets=None, budget=sampler.budget, store=sampler.store, chosen={"filter": {"ward": ward}})
        for ward in (1, 2)
    ]
    for who, other in (("nurse", sampler), ("doctor", filtered[0])):
        with acting_for(who), pytest.raises(InvalidParameter, match="output"):
            release_collection(other, ["fever? 0"], embeddings=fake, output=file)
    release_collection(filtered[0], ["fever? 0"], embeddings=fake, output=tmp_path / "one.jsonl")
    with pytest.raises(InvalidParameter, match="output"):
        release_collection(filtered[1], ["fever? 0"], embeddings=fake, output=tmp_path / "one.jsonl")


def test_answers_longer_than_every_owners_tickets_are_refused(sampler_of: Any) -> None:
    """Else all would sit out, and each answer be the public one."""
    sampler = sampler_of(tickets=3)
    with pytest.raises(InvalidParameter, match="max_tokens"):
        sampler.invoke("? 0")
    assert sampler.budget.spent() == 0


def test_what_cannot_be_is_refused(sampler_of: Any, over: Any) -> None:
    with pytest.raises(InvalidParameter, match="threshold"):
        sampler_of(chosen={"threshold": None})
    sampler = sampler_of(tickets=None)
    with pytest.raises(InvalidParameter, match="nearest_to"):
        DPSampler.over_documents(sampler.model, PoissonExampleSelector(sampler.store, 2, shots=1), sampler.budget)
    for given in ("", {"text": "no question"}, {"input": 3}):
        with pytest.raises(InvalidParameter, match="input"):
            sampler.invoke(given)
    assert sampler.budget.spent() == 0


def test_a_spent_plan_says_no(sampler_of: Any) -> None:
    sampler = sampler_of(tickets=None)
    for _ in range(20):
        sampler.invoke("? 0")
    with pytest.raises(PrivacyBudgetExceeded):
        sampler.invoke("? 0")
