"""DPSampler where releases are expected: in batches, as an agent's tool, as a retriever's release, inside chains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough
from langgraph.graph import END, START, StateGraph
from table_model import TableModel
from typing_extensions import TypedDict

from langchain_dpicl import (
    DPAggregate,
    DPRetriever,
    DPSampler,
    InvalidParameter,
    ModelUnavailable,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivacyBudgetExceeded,
    PrivateEnsemble,
    ReleaseFailed,
    UnsafeConfigurationError,
    acting_for,
    wrap_rag,
)
from langchain_dpicl.decoding.steps import CUT
from langchain_dpicl.release.base import SPENT, UNAVAILABLE, as_tool, releases_in

WORD = "hello"
ALPHABET = ["h", "e", "l", "o", "."]
TOKENS = len(WORD) + 1
"""The end token is sampled too."""

Make = Callable[..., DPSampler]


class Speller(TableModel):
    """So sure of the word that no draw differs (below 1e-30 a token). Fails where a question says "fail"."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__(self._logits, ALPHABET, frozenset({4}))
        self.pause = pause
        self.down = False
        self.at_once = 0
        self._lock = threading.Lock()

    def _logits(self, demonstration: str, released: str) -> list[float]:
        if self.down:
            raise ConnectionError("no model")
        wanted = ALPHABET.index((WORD + ".")[len(released)])
        return [100.0 if token == wanted else 0.0 for token in range(5)]

    def session(self, shared: str, demonstrations: Any, *, steps: int) -> Any:
        with self._lock:
            session = super().session(shared, demonstrations, steps=steps)
            self.at_once = max(self.at_once, len(self.opened) - self.closed)
        time.sleep(self.pause)  # open meanwhile, so that the next one is seen beside it
        if "fail" in shared and steps > 1:
            self.down = "down" in shared
            raise ValueError("no logits")
        return session


@pytest.fixture
def sampler_of(budget_of: Callable[..., PrivacyBudget], store_of: Any, records: Any, canary: str) -> Make:
    """sampler_of(): a sampler over a store whose every text holds the canary."""

    def make(model: Speller | None = None, *, return_receipt: bool = False, **budget_options: Any) -> DPSampler:
        selector = PoissonExampleSelector(store_of(records(8, secret=canary)), 2, rate=0.5, max_exemplars=8)
        budget = budget_of(**{"releases": 200, **budget_options})
        return DPSampler(
            model or Speller(), selector, budget, shots=4, top_k=5, max_tokens=10, return_receipt=return_receipt
        )

    return make


@pytest.fixture(params=["batch", "abatch"])
def batch(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """batch(runnable, inputs, ...): synchronously or not."""

    async def go(runnable: Any, inputs: Any, config: Any = None, **options: Any) -> Any:
        if request.param == "batch":
            return runnable.batch(inputs, config, **options)
        return await runnable.abatch(inputs, config, **options)

    return go


# -- batches -----------------------------------------------------------------------------------------------------------

IN_ORDER = {"max_concurrency": 1}


async def test_each_answer_of_a_batch_is_charged_on_its_own(batch: Any, sampler_of: Make) -> None:
    sampler = sampler_of(return_receipt=True)
    answers = await batch(sampler, ["a", {"input": "b"}, "c"])
    assert [answer["answer"] for answer in answers] == [WORD] * 3
    assert [answer["receipt"]["tokens"] for answer in answers] == [TOKENS] * 3
    assert len({answer["receipt"]["number"] for answer in answers}) == 3
    assert sampler.budget.spent() == 3 * TOKENS


async def test_an_empty_batch_is_empty_and_free(batch: Any, sampler_of: Make) -> None:
    sampler = sampler_of()
    assert await batch(sampler, []) == []
    assert sampler.budget.spent() == 0


@pytest.mark.parametrize("bad", [{"no": "such key"}, 7, None, "q" * 20_000], ids=["key", "number", "none", "too long"])
async def test_one_bad_request_of_a_batch_costs_nothing_at_all(bad: Any, batch: Any, sampler_of: Make) -> None:
    sampler = sampler_of()
    with pytest.raises(InvalidParameter, match="input"):
        await batch(sampler, ["a", "b", bad])
    assert sampler.budget.spent() == 0
    with pytest.raises(ValueError, match="configs"):
        await batch(sampler, ["a", "b"], [{}])
    assert sampler.budget.spent() == 0


async def test_a_bad_request_has_its_error_in_its_place_where_errors_are_asked_for(
    batch: Any, sampler_of: Make
) -> None:
    sampler = sampler_of()
    first, bad, last = await batch(sampler, ["a", {"no": 1}, "c"], return_exceptions=True)
    assert (first, last) == (WORD, WORD)
    assert isinstance(bad, InvalidParameter)
    assert sampler.budget.spent() == 2 * TOKENS


async def test_where_the_budget_ends_the_others_have_its_error_in_their_places(batch: Any, sampler_of: Make) -> None:
    """15 tokens: two whole answers of 6, one that is cut after 3, and nothing for the last two."""
    sampler = sampler_of(releases=15, return_receipt=True)
    *answers, fourth, fifth = await batch(sampler, list("abcde"), IN_ORDER, return_exceptions=True)
    assert [answer["answer"] for answer in answers] == [WORD, WORD, WORD[:3]]
    assert answers[2]["receipt"]["outcome"] == CUT
    assert isinstance(fourth, PrivacyBudgetExceeded)
    assert isinstance(fifth, PrivacyBudgetExceeded)
    assert sampler.budget.spent() == 15


async def test_where_the_budget_ends_the_error_says_how_far_it_got_and_answers_are_replayed(
    batch: Any, sampler_of: Make, canary_free: Callable[..., None]
) -> None:
    sampler = sampler_of(releases=12, replay=True)
    with pytest.raises(PrivacyBudgetExceeded, match=r"for this one of a batch of 4; 2 were answered") as caught:
        await batch(sampler, list("abcd"), IN_ORDER)
    canary_free(caught.value, frames=True)
    assert sampler.budget.spent() == 12
    assert await batch(sampler, ["a", "b"]) == [WORD, WORD]
    with pytest.raises(PrivacyBudgetExceeded, match=r"nothing charged$"):
        await batch(sampler, ["c"])


async def test_equal_questions_of_a_batch_are_one_answer(batch: Any, sampler_of: Make) -> None:
    sampler = sampler_of(replay=True, return_receipt=True)
    answers = await batch(sampler, ["a", "a", {"input": "a"}])
    assert [answer["answer"] for answer in answers] == [WORD] * 3
    assert sorted(answer["receipt"]["replayed"] for answer in answers) == [False, True, True]
    assert sampler.budget.spent() == TOKENS


@pytest.mark.parametrize("most", [1, 2])
async def test_so_many_answers_are_under_way_at_once(most: int, batch: Any, sampler_of: Make) -> None:
    model = Speller(pause=0.05)
    assert await batch(sampler_of(model), list("abcdef"), {"max_concurrency": most}) == [WORD] * 6
    assert model.at_once == most
    await batch(sampler_of(model), list("abcdef"), [{"max_concurrency": most}] * 6)
    assert model.at_once == most


async def test_every_answer_has_its_own_config(batch: Any, sampler_of: Make) -> None:
    seen: list[tuple[str, Any]] = []

    class Names(BaseCallbackHandler):
        def on_chain_start(self, *args: Any, **told: Any) -> None:
            seen.append((told["name"], told["tags"]))

    configs = [{"run_name": f"run {i}", "tags": [f"tag {i}"], "callbacks": [Names()]} for i in range(3)]
    await batch(sampler_of(), list("abc"), configs)
    assert sorted(seen) == [(f"run {i}", [f"tag {i}"]) for i in range(3)]


async def test_no_answer_begins_after_an_error(batch: Any, sampler_of: Make) -> None:
    sampler = sampler_of()
    with pytest.raises(ReleaseFailed):
        await batch(sampler, ["a", "fail", "c", "d"], IN_ORDER)
    assert sampler.budget.spent() == TOKENS + 10, "an answer, and the charge of the one that failed"


async def test_an_error_is_raised_when_the_answers_under_way_have_ended(batch: Any, sampler_of: Make) -> None:
    sampler = sampler_of(Speller(pause=0.05))
    with pytest.raises(ReleaseFailed):
        await batch(sampler, ["fail", "b"], {"max_concurrency": 2})
    assert sampler.budget.spent() == 10 + TOKENS, "the other one has given back what it did not sample"


async def test_a_model_that_goes_down_fails_one_answer_and_the_rest_cost_nothing(batch: Any, sampler_of: Make) -> None:
    sampler = sampler_of()
    first, failed, *rest = await batch(sampler, ["a", "fail: down", "c", "d"], IN_ORDER, return_exceptions=True)
    assert first == WORD
    assert isinstance(failed, ReleaseFailed)
    assert [type(error) for error in rest] == [ModelUnavailable] * 2
    assert sampler.budget.spent() == TOKENS + 10


async def test_a_batch_counts_for_whom_it_acts(batch: Any, sampler_of: Make) -> None:
    sampler = sampler_of(scope="per_principal")
    with acting_for("alice"):
        await batch(sampler, ["a", "b"])
    assert sampler.budget.principals() == {"alice": {"tokens": 2 * TOKENS}}
    with pytest.raises(InvalidParameter, match="principal"):
        await batch(sampler, ["a", "b"])


async def test_a_chain_batches_its_sampler(batch: Any, sampler_of: Make) -> None:
    sampler = sampler_of()
    chain = RunnableLambda(lambda text: {"input": text}) | sampler | str.upper
    assert await batch(chain, ["a", "b"]) == [WORD.upper()] * 2
    with pytest.raises(InvalidParameter, match="input"):
        await batch(RunnablePassthrough() | sampler, ["a", 7])
    assert sampler.budget.spent() == 2 * TOKENS


# -- tools -------------------------------------------------------------------------------------------------------------


class Script(FakeMessagesListChatModel):
    """A model that asks for what the test says."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def agent_of(tool: Any, questions: list[str]) -> Any:
    asked = [
        AIMessage("", tool_calls=[{"name": "write", "args": {"query": question}, "id": f"call-{i}"}])
        for i, question in enumerate(questions)
    ]
    return create_agent(Script(responses=[*asked, AIMessage("done")]), [tool])


def told(state: Any) -> list[tuple[str, str]]:
    return [(m.content, m.status) for m in state["messages"] if isinstance(m, ToolMessage)]


@pytest.fixture(params=["invoke", "ainvoke"])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """run(runnable, input): synchronously or not."""

    async def go(runnable: Any, value: Any) -> Any:
        return runnable.invoke(value) if request.param == "invoke" else await runnable.ainvoke(value)

    return go


GO = {"messages": [("user", "go")]}


async def test_an_agent_reads_the_answer_and_its_artifact_is_the_receipt(sampler_of: Make, run: Any) -> None:
    sampler = sampler_of()
    state = await run(agent_of(sampler.as_tool("write", "writes"), ["a"]), GO)
    (message,) = [m for m in state["messages"] if isinstance(m, ToolMessage)]
    assert (message.content, message.status) == (WORD, "success")
    assert (message.artifact["outcome"], message.artifact["tokens"]) == ("released", TOKENS)


async def test_a_spent_budget_and_a_model_that_is_down_reach_the_agent_as_messages(sampler_of: Make, run: Any) -> None:
    sampler = sampler_of(releases=TOKENS)
    state = await run(agent_of(as_tool(sampler, "write", "writes"), ["a", "b"]), GO)
    assert told(state) == [(WORD, "success"), (SPENT, "error")]
    broken = sampler_of()
    broken.model.down = True  # type: ignore[attr-defined]
    assert told(await run(agent_of(as_tool(broken, "write", "writes"), ["a"]), GO)) == [(UNAVAILABLE, "error")]
    assert broken.budget.spent() == 0


async def test_an_agents_answers_count_for_whom_it_acts(sampler_of: Make, run: Any) -> None:
    sampler = sampler_of(scope="per_principal")
    with acting_for("alice"):
        await run(agent_of(sampler.as_tool("write", "writes"), ["a", "b"]), GO)
    assert sampler.budget.principals() == {"alice": {"tokens": 2 * TOKENS}}


def test_a_tool_is_asked_under_the_stores_key_or_those_that_are_named(store_of: Any, budget_of: Any) -> None:
    rows = [{"text": f"t{i}", "label": "x"} for i in range(4)]
    store = store_of(rows, input_key="text", output_key="label", owner_key=None)
    selector = PoissonExampleSelector(store, 2, rate=0.5, max_exemplars=8)
    sampler = DPSampler(Speller(), selector, budget_of(), shots=2, top_k=5)
    assert list(sampler.as_tool("write", "writes").args) == ["query"]
    assert sampler.as_tool("write", "writes").invoke({"query": "a"}) == WORD
    assert list(sampler.as_tool("write", "writes", inputs={"topic": "of what"}).args) == ["topic"]


BAD_TOOLS = {
    "name": {"name": ""},
    "description": {"description": None},
    "inputs": {"inputs": {}},
    "an input": {"inputs": {"a b": "x"}},
}


@pytest.mark.parametrize("case", BAD_TOOLS)
def test_a_tool_is_refused_as_of_any_release(case: str, sampler_of: Make) -> None:
    given: dict[str, Any] = {"name": "write", "description": "writes", **BAD_TOOLS[case]}
    with pytest.raises(InvalidParameter) as caught:
        sampler_of().as_tool(given.pop("name"), given.pop("description"), **given)
    assert caught.value.parameter == ("inputs" if case == "an input" else case)


# -- chains ------------------------------------------------------------------------------------------------------------


class Film(TypedDict, total=False):
    input: str


def in_a_graph(sampler: DPSampler) -> Any:
    graph = StateGraph(Film)
    graph.add_node("write", sampler | RunnableLambda(lambda text: {"input": text}))
    graph.add_edge(START, "write")
    graph.add_edge("write", END)
    return graph.compile()


CHAINS: dict[str, Callable[[DPSampler], Any]] = {
    "alone": lambda sampler: sampler,
    "a step": lambda sampler: RunnablePassthrough() | sampler | str.upper,
    "typed": lambda sampler: sampler.with_types(input_type=str),
    "configured": lambda sampler: sampler.with_config(tags=["x"]).bind(),
    "retried": lambda sampler: sampler.with_retry(),
    "with fallbacks": lambda sampler: sampler.with_fallbacks([RunnableLambda(str)]),
    "a fallback": lambda sampler: RunnableLambda(str).with_fallbacks([sampler]),
    "parallel": lambda sampler: RunnableParallel(one=sampler, other=RunnablePassthrough()),
    "in a function": lambda sampler: RunnableLambda(lambda text: sampler.invoke(text)),
    "a tool": lambda sampler: sampler.as_tool("write", "writes"),
    "a retriever": lambda sampler: DPRetriever(release=sampler),
    "a graph": in_a_graph,
}


@pytest.mark.parametrize("where", CHAINS)
def test_a_sampler_is_found_wherever_it_is_in_a_chain(where: str, sampler_of: Make) -> None:
    sampler = sampler_of()
    (found,) = releases_in(CHAINS[where](sampler))
    assert found.budget is sampler.budget
    assert (found.mechanism, found.query_key, found.comes_in_pieces) == ("tokens", "input", True)


def test_a_bound_sampler_counts_once(sampler_of: Make) -> None:
    """A Runnable that wraps one has its attributes, and is none."""
    sampler = sampler_of()
    assert releases_in(sampler.with_config(tags=["x"])) == [sampler]


# -- retrieval, and where it makes no sense ----------------------------------------------------------------------------


async def test_a_retriever_gives_the_text_as_a_document_with_its_receipt(sampler_of: Make, run: Any) -> None:
    sampler = sampler_of()
    (document,) = await run(DPRetriever(release=sampler), "a question")
    assert document.page_content == WORD
    assert document.metadata["receipt"]["tokens"] == TOKENS


@pytest.fixture
def ensemble(sampler_of: Make) -> PrivateEnsemble:
    selector = sampler_of().selector
    return PrivateEnsemble(selector, lambda values: "Positive")


MISPLACED: dict[str, Callable[[DPSampler], tuple[str, Callable[[], Any]]]] = {
    "the chain of wrap_rag": lambda s: (
        "chain",
        lambda: wrap_rag(s, s.selector.store, NoisyVote(["a", "b"]), s.budget),
    ),
    "the source of wrap_rag": lambda s: ("source", lambda: wrap_rag(str, s, NoisyVote(["a", "b"]), s.budget)),
    "an aggregator": lambda s: ("aggregator", lambda: DPAggregate(s, s.budget)),  # type: ignore[arg-type]
    "a budget": lambda s: ("budget", lambda: DPAggregate(NoisyVote(["a", "b"]), s)),  # type: ignore[arg-type]
    "a store": lambda s: ("store", lambda: PoissonExampleSelector(s, 2, rate=0.5, max_exemplars=8)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("where", MISPLACED)
def test_a_sampler_in_the_wrong_place_is_refused_by_name(where: str, sampler_of: Make) -> None:
    sampler = sampler_of()
    parameter, build = MISPLACED[where](sampler)
    with pytest.raises(InvalidParameter) as caught:
        build()
    assert (caught.value.parameter, caught.value.value) == (parameter, "DPSampler")
    assert sampler.budget.spent() == 0


def test_an_ensemble_does_not_fuse_with_a_sampler(ensemble: PrivateEnsemble, sampler_of: Make) -> None:
    with pytest.raises(UnsafeConfigurationError, match="DPAggregate"):
        ensemble | sampler_of()
