"""`rehearse`: the member on public stand-ins, at no cost, and all that goes wrong in it."""

from __future__ import annotations

import contextvars
import json
import socket
import threading
import time
import warnings
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from chat_server import chat_server
from ears import Ears
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.output_parsers import PydanticOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, FewShotPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tracers.context import collect_runs
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import BaseModel

from langchain_dpicl import (
    DPAggregate,
    EmbeddingMean,
    InvalidParameter,
    Keywords,
    LabelScorer,
    LabelVote,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyWarning,
    PrivateEnsemble,
    local,
    wrap_rag,
)
from langchain_dpicl.cli import main

PUBLIC = [{"input": "a public joy", "output": "Positive"}, {"input": "a public bore", "output": "Negative"}]
QUESTION = {"input": "a witty, seductive movie"}
MARKED = "with braces, quotes and line breaks"
PROMPT = ChatPromptTemplate.from_messages([("system", "Examples: {examples}"), ("human", "{input}")])


class Verdict(BaseModel):
    label: str


def says(*texts: str) -> FakeListChatModel:
    return FakeListChatModel(responses=list(texts))


def at(url: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0)  # type: ignore[arg-type]


def down() -> Any:
    """A model whose server is down."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return at(f"http://127.0.0.1:{port}/v1")


# -- what a report shows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_a_report_shows_prompts_outputs_and_labels_and_nothing_is_charged(
    sealed_of: Any, canary: str, way: str
) -> None:
    release = sealed_of(PROMPT | says("negative.") | StrOutputParser())
    with collect_runs() as heard:
        report = (
            release.rehearse(PUBLIC, QUESTION) if way == "sync" else await release.arehearse(PUBLIC, QUESTION["input"])
        )
    assert heard.traced_runs == [], "the report alone tells"
    assert report.passed
    assert report.question == QUESTION
    full, marked, empty = report.calls
    assert (full.name, empty.name) == ("with 2 examples", "without examples")
    assert "a public joy {" in marked.prompts[0]
    assert "a public joy" in full.prompts[0]
    assert QUESTION["input"] in full.prompts[0]
    assert "a public joy" not in empty.prompts[0]
    assert (full.output, full.parsed, full.error) == ("negative.", "Negative", "")
    assert full.seconds > 0
    for shown in (str(report), repr(report), json.dumps(report.facts)):
        assert canary not in shown
    assert "read as: Negative" in str(report)
    assert json.loads(json.dumps(report.facts))["calls"][0]["parsed"] == "Negative"
    assert release.budget.spent() == 0
    assert not release.budget.is_frozen
    assert release.invoke(QUESTION) == "Negative"


@pytest.mark.parametrize(
    ("member", "said"),
    [
        (RunnablePassthrough.assign(q=itemgetter("quest")) | PROMPT | says("Positive"), "KeyError: 'quest'"),
        (lambda: PROMPT | down(), "Connection error"),
        (PROMPT | says("splendid"), "names none of the labels (Positive, Negative), or several"),
        (PROMPT | says('{"label": "Positive"}') | PydanticOutputParser(pydantic_object=Verdict), "a Verdict (fields"),
        (PROMPT | says("Positive") | (lambda found: {"answer": found.text}), "a mapping (keys: 'answer')"),
    ],
    ids=["a missing key", "a model that is down", "another label", "a pydantic object", "a mapping"],
)
def test_each_fault_that_would_be_a_charged_abstention_is_told_from_the_others(
    sealed_of: Any, member: Any, said: str
) -> None:
    release = sealed_of(member() if callable(member) and not hasattr(member, "invoke") else member)
    report = release.rehearse(PUBLIC, QUESTION)
    assert not report.passed
    assert said in report.calls[0].error
    assert said in str(report)
    assert report.facts["calls"][0]["abstains"]
    assert bool(report.calls[0].traceback) == ("rror" in said)
    assert release.budget.spent() == 0


def test_a_number_that_json_does_not_have_is_a_text(sealed_of: Any) -> None:
    facts = sealed_of(lambda values: float("nan") * len(values["examples"])).rehearse(PUBLIC, QUESTION).facts
    assert json.loads(json.dumps(facts, allow_nan=False))["calls"][0]["output"] == "nan"


def test_a_server_that_refuses_for_long_is_told_at_once(sealed_of: Any) -> None:
    """A quota that is used up is no reason to wait for ten minutes, as a release does."""
    with chat_server(lambda prompt: (429, {"Retry-After": "60"}, "no quota")) as server:
        report = sealed_of(PROMPT | at(server.url)).rehearse(PUBLIC, QUESTION)
    assert "429" in report.calls[0].error


def test_what_takes_too_long_is_told(sealed_of: Any) -> None:
    release = sealed_of(lambda values: time.sleep(0.3) or str(len(values["examples"])), timeout=0.05)
    report = release.rehearse(PUBLIC, QUESTION)
    assert [call.error for call in report.calls] == ["TimeoutError: no answer within 0.05 seconds"] * 2


def test_examples_fill_buckets_of_a_members_size(store_of: Any, records: Any) -> None:
    selector = PoissonExampleSelector(store_of(records(20)), calls=5)
    report = PrivateEnsemble(selector, PROMPT | says("Positive")).rehearse(PUBLIC, QUESTION)
    assert [call.name for call in report.calls] == ["with 1 example"] * 2 + [MARKED, "without examples"]
    assert report.calls[0].parsed is None, "without an aggregator nothing is read"
    assert report.passed


@pytest.mark.parametrize(
    ("aggregator", "parsed"),
    [
        (
            EmbeddingMean(DeterministicFakeEmbedding(size=8), PROMPT | says("one", "two", "three"), 3),
            "an embedding of 8",
        ),
        (Keywords.ptr((1, 2)), "joyful"),
        (Keywords.joint_em("query", 1), "[2]"),
    ],
    ids=["embedding", "ptr", "joint"],
)
def test_every_aggregator_reads_in_a_rehearsal(store_of: Any, records: Any, aggregator: Any, parsed: str) -> None:
    llm = says("joyful movie")
    ensemble = PrivateEnsemble(PoissonExampleSelector(store_of(records(20)), 4, shots=1), PROMPT | llm)
    report = ensemble.rehearse(PUBLIC, QUESTION, aggregator)
    assert report.passed, str(report)
    assert parsed in str(report.calls[-3].parsed)
    mapping = PrivateEnsemble(ensemble.selector, PROMPT | says("joyful") | (lambda found: {"a": found.text}))
    assert "mapping" in mapping.rehearse(PUBLIC, QUESTION, aggregator).calls[-2].error


# -- nothing private ---------------------------------------------------------------------------------------------------


def test_a_prompt_with_the_selector_shows_the_public_examples(store_of: Any, records: Any, canary: str) -> None:
    selector = PoissonExampleSelector(store_of(records(20, secret=canary)), 4, rate=1.0, max_exemplars=9)
    shown = PromptTemplate.from_template("{input} -> {output}")
    prompt = FewShotPromptTemplate(
        example_selector=selector, example_prompt=shown, suffix="{input} ->", input_variables=["input"]
    )
    report = PrivateEnsemble(selector, prompt | says("Positive")).rehearse(PUBLIC, QUESTION)
    assert report.passed
    assert "a public joy -> Positive" in report.calls[0].prompts[0]
    assert canary not in str(report)


@pytest.mark.filterwarnings("ignore::langchain_dpicl.errors.PrivacyWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("way", ["a fresh context", "a thread", "the sample", "the store", "a class"])
def test_a_member_that_asks_the_selector_outside_of_its_call_gets_no_private_record(
    store_of: Any, records: Any, canary: str, way: str
) -> None:
    # A bucket drawn in the open is empty with a probability of (3/4)^80, 1e-10.
    selector = PoissonExampleSelector(store_of(records(80, secret=canary)), 4, rate=1.0, max_exemplars=80)

    def reached() -> Any:
        if way == "the sample":
            return selector.sample()
        if way == "the store":
            with selector.store.reading() as view:
                return view.read(view.rows_of(view.numbers)[0])
        return (Holder.held if way == "a class" else selector).select_examples({})

    class Holder:
        held = selector

    def member(values: dict[str, Any]) -> str:
        found: list[Any] = [list(values["examples"])]
        if way == "a thread":
            asked = threading.Thread(target=lambda: contextvars.Context().run(lambda: found.append(reached())))
            asked.start()
            asked.join()
        else:
            found.append(contextvars.Context().run(reached))
        return str([list(each) for each in found[1]] if way == "the sample" else found[1])

    assert canary in member({"examples": []}), "it could show them"
    report = PrivateEnsemble(selector, member).rehearse(PUBLIC, QUESTION)
    assert report.passed == (way not in ("the sample", "the store")), "a selector gives the call's own bucket anywhere"
    assert canary not in str(report) + json.dumps(report.facts)
    assert report.passed or "ShutWithinCall" in report.calls[0].error


# -- a member that reads nothing ---------------------------------------------------------------------------------------


@pytest.mark.asks_first
def test_a_member_that_reads_no_example_is_refused_and_warned_of_once(sealed_of: Any) -> None:
    prompt = ChatPromptTemplate.from_template("{input}")
    release = sealed_of(prompt | says("Positive"), replay=False)
    with pytest.raises(InvalidParameter, match="reads its examples") as caught:
        release.rehearse(PUBLIC, QUESTION)
    assert QUESTION["input"] in caught.value.__notes__[0], "the report hangs on it"
    assert release.budget.spent() == 0
    with pytest.warns(PrivacyWarning, match="the member reads no example"):
        release.invoke(QUESTION)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        release.invoke(QUESTION)


@pytest.mark.asks_first
@pytest.mark.parametrize(
    "member",
    [
        ChatPromptTemplate.from_template("{input} Give examples of it.") | says("Positive"),
        lambda values: [examples := "fixed", "Positive"][len(examples) > 0],
    ],
    ids=["the word alone", "a variable of this name"],
)
def test_a_chain_that_merely_says_examples_reads_none(sealed_of: Any, member: Any) -> None:
    release = sealed_of(member)
    with pytest.raises(InvalidParameter, match="reads its examples") as caught:
        release.rehearse(PUBLIC, QUESTION)
    assert "FAILED" in caught.value.__notes__[0]
    with pytest.warns(PrivacyWarning, match="the member reads no example"):
        release.invoke(QUESTION)


class Asked(BaseModel):
    examples: list[dict[str, str]]


@pytest.mark.parametrize(
    "member",
    [
        lambda values: "Positive" if values["examples"].copy() else "",
        lambda values: "Positive" if [*QUESTION] + values["examples"] else "",
        lambda values: values["examples"].sort(key=str) or "Positive",
        lambda values: "Positive" if values["examples"] != [] else "",
        (lambda values: Asked(**values).model_dump_json()) | says("Positive"),
    ],
    ids=["copy", "sum", "sort", "comparison", "pydantic"],
)
def test_every_way_to_read_examples_is_noticed(sealed_of: Any, member: Any) -> None:
    assert sealed_of(member).rehearse(PUBLIC, QUESTION).calls[0].read_examples


@pytest.mark.asks_first
@pytest.mark.parametrize("kind", ["key", "f-string", "template", "passed on", "by no name", "pydantic", "JSON"])
def test_a_member_that_reads_them_is_not_warned_of(sealed_of: Any, kind: str) -> None:
    words = "{examples} {input}"
    members: dict[str, Any] = {
        "key": PROMPT | says("Positive"),
        "f-string": lambda values: f"Positive{len(values['examples']) * ''}",
        "template": lambda values: "Positive" if words.format(**values) else "",
        "passed on": RunnablePassthrough.assign(x=lambda _: 1) | PROMPT | says("Positive"),
        "by no name": lambda values: ["Positive"][len([list(value) for value in values.values()]) * 0],
        "pydantic": (lambda values: Asked(**values).model_dump_json()) | says("Positive"),
        "JSON": (lambda values: json.dumps(values["examples"])) | says("Positive"),
    }
    release = sealed_of(members[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        release.invoke(QUESTION)


def test_a_name_that_the_template_gets_wrong_is_the_templates_mistake(sealed_of: Any) -> None:
    words = "the prompt names 'exampels', which nobody fills; did you mean 'examples'?"
    wrong = ChatPromptTemplate.from_template("{exampels} {input}")
    release = sealed_of(wrong | says("Positive"))
    for ask in (release.invoke, lambda question: release.rehearse(PUBLIC, question)):
        with pytest.raises(InvalidParameter) as caught:
            ask(QUESTION)
        assert words in str(caught.value)
        assert caught.value.parameter == "member"
    report = sealed_of(RunnablePassthrough.assign(x=lambda _: 1) | wrong | says("Positive")).rehearse(PUBLIC, QUESTION)
    assert report.findings == (words,), "of a later step, too"
    with pytest.raises(InvalidParameter) as caught:  # a caller's own slip stays the caller's
        sealed_of(PROMPT | says("Positive")).invoke({"inptu": "a question"})
    assert caught.value.parameter == "input"


# -- the public calls of a first release -------------------------------------------------------------------------------


@pytest.mark.asks_first
def test_after_a_rehearsal_the_first_release_asks_nothing_in_public(sealed_of: Any) -> None:
    made = Ears()

    def member(values: dict[str, Any]) -> str:
        made.append(len(values["examples"]))
        return "Positive"

    fresh = sealed_of(member, members=3)
    assert fresh.ensemble.untried
    assert fresh.rehearse(PUBLIC, QUESTION).passed
    assert not fresh.ensemble.untried
    made.clear()
    fresh.invoke(QUESTION)
    assert len(made) == 3


def test_no_call_of_a_rehearsal_reads_what_another_one_wrote(sealed_of: Any) -> None:
    kept: list[str] = []

    def member(values: dict[str, Any]) -> str:
        kept.append(str(len(values["examples"])))
        return "Positive" if len(kept) == 1 else "a text of another call"

    assert sealed_of(member).rehearse(PUBLIC, QUESTION).passed
    assert kept == []


@pytest.mark.asks_first
def test_a_rehearsal_that_failed_proves_nothing(sealed_of: Any) -> None:
    release = sealed_of(lambda values: f"splendid {len(values['examples'])}")
    assert not release.rehearse(PUBLIC, QUESTION).passed
    assert release.ensemble.untried
    assert release.ensemble.doubts.of("").never_answered


def test_a_rehearsal_that_passed_answers_for_the_models_health(sealed_of: Any) -> None:
    release = sealed_of(PROMPT | says("Positive"))
    assert release.ensemble.doubts.of("").never_answered
    assert release.rehearse(PUBLIC, QUESTION).passed
    assert not release.ensemble.doubts.of("").never_answered


# -- other shapes ------------------------------------------------------------------------------------------------------


def test_a_wrapped_retrieval_chain_gets_public_documents(budget_of: Any, embeddings: Any, canary: str) -> None:
    documents = [Document(f"{canary} {i}", metadata={"who": i}) for i in range(30)]
    retriever = InMemoryVectorStore.from_documents(documents, embeddings).as_retriever()
    joined = retriever | (lambda found: "\n".join(each.page_content for each in found))
    prompt = ChatPromptTemplate.from_template("{context} {question}")
    chain = {"context": joined, "question": RunnablePassthrough()} | prompt | says("Positive") | StrOutputParser()
    source = retriever.vectorstore
    rag = wrap_rag(chain, source, NoisyVote(["Positive", "Negative"]), budget_of(), owner_key="who", threshold=-1.0)
    report = rag.rehearse([Document("an open leaflet"), "an open page"], "what is open?")
    assert report.passed, str(report)
    prompt = report.calls[0].prompts[0]
    assert prompt.endswith("what is open?")
    assert all(text in prompt for text in ("an open leaflet", "an open page")), "nearest first, as a search gives them"
    assert canary not in str(report)
    assert rag.budget.spent() == 0


def test_a_label_scorer_shows_its_prompts_and_that_a_model_gives_no_probabilities(sealed_of: Any) -> None:
    report = sealed_of(LabelScorer(says("Positive"), ["Positive", "Negative"])).rehearse(PUBLIC, QUESTION)
    assert len(report.calls[0].prompts) == 2, "the question, and N/A"
    assert "a public joy" in report.calls[0].prompts[0]
    assert "log-probabilities" in report.calls[0].error


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("examples", "question", "parameter"),
    [
        ([], QUESTION, "public_examples"),
        ("a text", QUESTION, "public_examples"),
        ([{"input": "no label"}], QUESTION, "public_examples[0]"),
        ([*PUBLIC, 3], QUESTION, "public_examples[2]"),
        (PUBLIC, {"language": "en"}, "input"),
        (PUBLIC, 3, "input"),
    ],
)
def test_bad_stand_ins_and_questions_are_refused(sealed_of: Any, examples: Any, question: Any, parameter: str) -> None:
    release = sealed_of(PROMPT | says("Positive"))
    with pytest.raises(InvalidParameter) as caught:
        release.rehearse(examples, question)
    assert caught.value.parameter == parameter
    assert release.budget.spent() == 0


def test_what_has_no_member_is_not_rehearsed(sealed_of: Any, store_of: Any, records: Any, budget_of: Any) -> None:
    selector = PoissonExampleSelector(store_of(records(20)), 4, shots=1)
    alone = PrivateEnsemble(selector) | DPAggregate(LabelVote(["Positive", "Negative"]), budget_of())
    with pytest.raises(InvalidParameter, match="nothing to rehearse"):
        alone.rehearse(PUBLIC, QUESTION)
    with pytest.raises(InvalidParameter, match="aggregator"):
        sealed_of(PROMPT | says("Positive")).ensemble.rehearse(PUBLIC, QUESTION, "a vote")


# -- the command -------------------------------------------------------------------------------------------------------

CHAIN = """
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_dpicl import *

def make():
    records = [{"text": f"SECRET {i}", "label": "ab"[i % 2]} for i in range(40)]
    store = ExemplarStore.from_records(records, DeterministicFakeEmbedding(size=8), progress=False,
                                       input_key="text", output_key="label")
    member = ChatPromptTemplate.from_template("{examples} {text}") | FakeListChatModel(responses=["SAID"])
    budget = PrivacyBudget(epsilon=100, delta=1e-5, releases=3, ledger="sqlite:///LEDGER")
    return PrivateEnsemble(PoissonExampleSelector(store, 4, shots=2), member) | DPAggregate(
        NoisyVote(["a", "b"]), budget)
"""


@pytest.mark.parametrize(("said", "status"), [("a", 0), ("c", 1)])
def test_the_command_rehearses_a_configured_chain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str, status: int
) -> None:
    module = f"rehearsed_{said}"
    (tmp_path / f"{module}.py").write_text(CHAIN.replace("SAID", said).replace("LEDGER", str(tmp_path / "ledger.db")))
    config = tmp_path / "server.yaml"
    config.write_text(f"chain: {module}:make\n")
    (tmp_path / "public.jsonl").write_text('{"text": "an open one", "label": "a"}\n')
    asked = ["rehearse", "--config", str(config), "--question", "which?"]
    assert main([*asked, "--examples", str(tmp_path / "public.jsonl"), "--json"]) == status
    facts = json.loads(capsys.readouterr().out)
    assert facts["passed"] is (status == 0)
    assert "an open one" in facts["rehearsals"][0]["calls"][0]["prompts"][0]
    assert "SECRET" not in json.dumps(facts)
    assert main([*asked, "--example", '{"text": "another", "label": "b"}']) == status
    assert "another" in capsys.readouterr().out
    for wrong in ([], ["--example", "no JSON"]):
        assert main([*asked, *wrong]) == 1
        assert "--example" in capsys.readouterr().err


def test_the_command_refuses_the_stores_file_as_public_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "local_embeddings", lambda: DeterministicFakeEmbedding(size=8))
    data = tmp_path / "tickets.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"SECRET {i}", "label": "ab"[i % 2]}) for i in range(40)))
    config = tmp_path / "server.yaml"
    budget = "{epsilon: 3, delta: 1.0e-5, releases: 3}"
    config.write_text(f"store: {{data: tickets.jsonl}}\nrelease: {{kind: vote, labels: [a, b]}}\nbudget: {budget}\n")
    assert main(["rehearse", "--config", str(config), "--question", "q", "--examples", str(data)]) == 1
    shown = capsys.readouterr()
    assert "is private" in shown.err
    assert "SECRET" not in shown.out + shown.err
