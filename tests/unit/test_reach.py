"""`reach.py`: whatever a chain can get at is found, and what it cannot is not looked at."""

from __future__ import annotations

import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_dpicl import (
    DPAggregate,
    DPRetriever,
    NoisyVote,
    PoissonExampleSelector,
    PrivateEnsemble,
    UnsafeConfigurationError,
)
from langchain_dpicl.reach import is_one, reachable
from langchain_dpicl.sealing import seal_public


class Treasure:
    """What is looked for."""


@pytest.fixture
def treasure() -> Treasure:
    return Treasure()


@pytest.fixture
def module(treasure: Treasure, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package ``theirs`` whose module ``theirs.services`` holds the treasure."""
    package, services = types.ModuleType("theirs"), types.ModuleType("theirs.services")
    services.treasure, package.services = treasure, services  # type: ignore[attr-defined]
    exec("def search(question): return treasure", vars(services))
    monkeypatch.setitem(sys.modules, "theirs", package)
    monkeypatch.setitem(sys.modules, "theirs.services", services)
    return package


def written(source: str, name: str = "chain", **around: Any) -> Any:
    """The function ``f`` that this source defines in a module of this name."""
    space = {"__name__": name, "__package__": "", **around}
    exec(source, space)
    return space["f"]


class Inheriting(type):
    def search(cls) -> Any:
        return GLOBAL[0]


class Base:
    held: Any = None


class Child(Base):
    pass


class Mangled:
    __slots__ = ("__held",)

    def __init__(self, held: Any) -> None:
        self.__held = held

    def __call__(self) -> Any:
        return self.__held


class Box(dict[str, Any]):
    def __init__(self, held: Any) -> None:
        self.held = held


class Pair(tuple[int, ...]):
    def __call__(self) -> Any:
        return GLOBAL[0]


GLOBAL: list[Any] = []


def cached(held: Any) -> Callable[[], Any]:
    make = functools.lru_cache(maxsize=None)(operator.itemgetter(0))
    make((held,))
    return make  # type: ignore[return-value]


def generator(held: Any) -> Iterator[Any]:
    yield 1
    yield held


def started(held: Any) -> Iterator[Any]:
    items = generator(held)
    next(items)
    return items


PLACES: dict[str, Callable[[Any], Any]] = {
    "a dictionary's key": lambda held: {held: 1},
    "a dictionary with attributes": Box,
    "a mangled slot": Mangled,
    "a view of a mapping": lambda held: types.MappingProxyType({"a": held}),
    "a built-in method": lambda held: {"a": held}.get,
    "an iterator": lambda held: iter([held, held]),
    "a generator": started,
    "a cached result": cached,
    "a weak reference": weakref.ref,
    "a partial function": lambda held: functools.partial(print, a=[held]),
    "a property's setter": lambda held: property(None, lambda self, value: held),
    "a metaclass": lambda held: (GLOBAL.append(held), Inheriting("Made", (), {}))[1],
    "a class of a tuple": lambda held: (GLOBAL.append(held), Pair((1, 2)))[1],
    "an inherited attribute": lambda held: (setattr(Base, "held", held), Child)[1],
}


@pytest.mark.parametrize("place", PLACES)
def test_it_is_found_in(place: str, treasure: Treasure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "GLOBAL", [])
    monkeypatch.setattr(Base, "held", None)
    held = PLACES[place](treasure)
    assert any(found is treasure for found in reachable(RunnableLambda(lambda question: held)))


@pytest.mark.parametrize(
    "source",
    [
        "import theirs.services\ndef f(q): return theirs.services.treasure",
        "import theirs.services\ndef f(q): return [theirs.services.search(x) for x in q]",
        "def f(q):\n from theirs.services import treasure\n return treasure",
        "def f(q):\n import theirs.services as s\n return s.search(q)",
    ],
)
def test_it_is_found_through_the_modules_that_a_function_names(
    source: str, treasure: Treasure, module: types.ModuleType
) -> None:
    for name in ("chain", "__main__", "acme_rag.app", "langchain_dpicl_app", "openai_helpers"):
        assert any(found is treasure for found in reachable(written(source, name)))


def test_what_a_function_does_not_name_is_not_looked_at(treasure: Treasure, module: types.ModuleType) -> None:
    for source, name in (
        ("import theirs.services\ndef f(q): return theirs.other", "chain"),
        ("def f(q): return q.treasure", "chain"),  # an attribute, and no global of that name
        ("def f(q): return treasure", "langchain_core.runnables"),
        ("def f(q): return treasure", "json.decoder"),
    ):
        assert not any(found is treasure for found in reachable(written(source, name, treasure=treasure)))


def test_models_stores_and_releases_are_closed(sealed_of: Any, store_of: Any, records: Any) -> None:
    model = DeterministicFakeEmbedding(size=2)
    store = store_of(records(4))
    release = sealed_of(lambda values: "Positive")
    found = list(reachable([model, store, release]))
    assert len(found) == 4, "the list and what is in it"


def test_a_proxy_without_its_object_is_passed_by(treasure: Treasure) -> None:
    class Unbound:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("outside of a request")

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("outside of a request")

    proxy = Unbound()
    assert not is_one(proxy, str)
    found = list(reachable([proxy, treasure]))
    assert any(each is treasure for each in found)


# -- what sealing refuses with it --------------------------------------------------------------------------------------


def history(kind: str) -> Any:
    if kind == "memory":
        from langchain_classic.memory import ConversationBufferMemory

        return ConversationBufferMemory()
    if kind == "graph's store":
        from langgraph.store.memory import InMemoryStore

        return InMemoryStore()
    from langchain_core.chat_history import InMemoryChatMessageHistory

    return InMemoryChatMessageHistory()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["memory", "graph's store", "history"])
def test_a_member_with_a_memory_is_refused(kind: str, sealed_of: Any) -> None:
    held = history(kind)
    with pytest.raises(UnsafeConfigurationError, match="what other members wrote"):
        sealed_of(lambda values: str(held))


@pytest.mark.filterwarnings("ignore")
def test_a_member_with_message_history_is_refused(sealed_of: Any) -> None:
    from langchain_core.runnables.history import RunnableWithMessageHistory

    kept: dict[str, Any] = {}
    chain = RunnableWithMessageHistory(
        RunnableLambda(lambda values: "Positive"),
        lambda session_id: kept.setdefault(session_id, history("history")),
        input_messages_key="input",
    )
    with pytest.raises(UnsafeConfigurationError, match="RunnableWithMessageHistory"):
        sealed_of(chain)


def test_a_graph_with_a_store_is_refused(sealed_of: Any) -> None:
    from langgraph.graph import END, START, StateGraph
    from langgraph.store.memory import InMemoryStore

    def graph(**options: Any) -> Any:
        made = StateGraph(dict)
        made.add_node("answer", lambda state: {"answer": "Positive"})
        made.add_edge(START, "answer")
        made.add_edge("answer", END)
        return made.compile(**options)

    sealed_of(graph())
    with pytest.raises(UnsafeConfigurationError, match="InMemoryStore"):
        sealed_of(graph(store=InMemoryStore()))


def test_a_member_with_the_store_is_refused_and_one_with_a_selector_is_not(
    store_of: Any, records: Any, budget_of: Any
) -> None:
    store = store_of(records(8))
    selector = PoissonExampleSelector(store, 4, rate=1.0)
    with pytest.raises(UnsafeConfigurationError, match="ExemplarStore"):
        PrivateEnsemble(selector, lambda values: str(store.read([0])))
    shown: list[int] = []
    member = PrivateEnsemble(selector, lambda values: shown.append(len(selector.select_examples(values))) or "Positive")
    vote = DPAggregate(NoisyVote(["Positive", "Negative"]), budget_of(epsilon=30.0))
    assert (member | vote).invoke({"input": "q"}) in ("Positive", "Negative"), "whichever the noise made of four votes"
    assert len(shown) == 4, "every member ran, with its own bucket"


def test_a_public_retriever_may_be_in_a_member(sealed_of: Any) -> None:
    handbook = InMemoryVectorStore.from_texts(["Positive"], DeterministicFakeEmbedding(size=2)).as_retriever()
    assert sealed_of(lambda values: handbook.invoke("q")[0].page_content).invoke({"input": "q"}) == "Positive"


def test_public_calls_reach_no_collection(store_of: Any, records: Any, sealed_of: Any) -> None:
    store = store_of(records(8))
    selector = PoissonExampleSelector(store, 4, rate=1.0)
    collection = InMemoryVectorStore(DeterministicFakeEmbedding(size=2))
    for held in (collection, collection.as_retriever(), store, selector):
        with pytest.raises(UnsafeConfigurationError, match="public text alone"):
            seal_public(RunnableLambda(lambda values, held=held: str(held)))
    released = DPRetriever(sealed_of(lambda values: "Positive"))
    chain = RunnableLambda(lambda values: "q") | released | (lambda found: found[0].page_content)
    assert seal_public(chain).invoke({}) == "Positive", "its documents are releases"
