"""`reach.py`: whatever a chain can get at is found, and what it cannot is not looked at."""

from __future__ import annotations

import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import pytest
from ears import Ears
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.example_selectors import SemanticSimilarityExampleSelector
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import Field

from langchain_dpicl import (
    DPAggregate,
    DPRetriever,
    EmbeddingMean,
    InvalidParameter,
    MembersAbstained,
    NoisyVote,
    PoissonExampleSelector,
    PrivateEnsemble,
    UnsafeConfigurationError,
)
from langchain_dpicl.private.boundary import run_private
from langchain_dpicl.private.reach import is_one, reachable


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
    held = [model, store, release, release.budget, release.ensemble, release.ensemble.selector]
    assert len(list(reachable(held))) == 7, "the list and what is in it"


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
    selector = PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=8)
    with pytest.raises(UnsafeConfigurationError, match="ExemplarStore"):
        PrivateEnsemble(selector, lambda values: str(len(store)))
    shown: list[int] = Ears()
    member = PrivateEnsemble(selector, lambda values: shown.append(len(selector.select_examples(values))) or "Positive")
    vote = DPAggregate(NoisyVote(["Positive", "Negative"]), budget_of(epsilon=30.0))
    assert (member | vote).invoke({"input": "q"}) in ("Positive", "Negative"), "whichever the noise made of four votes"
    assert sum(shown) == 8, "every member ran, with its own bucket"


# -- collections -------------------------------------------------------------------------------------------------------


@pytest.fixture
def clinic() -> InMemoryVectorStore:
    """A whole private collection."""
    texts = [f"patient {i}: Positive" for i in range(12)]
    return InMemoryVectorStore.from_texts(texts, DeterministicFakeEmbedding(size=4))


def search(found: list[Document]) -> str:
    return "; ".join(document.page_content for document in found)


class Desk:
    """An app's object with a method that searches."""

    def __init__(self, collection: Any) -> None:
        self.rooms = [{"archive": collection}]

    def answer(self, values: dict[str, Any]) -> str:
        return search(self.rooms[0]["archive"].similarity_search(values["input"]))


def few_shot(clinic: InMemoryVectorStore) -> Any:
    selector = SemanticSimilarityExampleSelector(vectorstore=clinic, k=4)
    template = PromptTemplate.from_template("{text}")
    return FewShotPromptTemplate(
        example_selector=selector, example_prompt=template, suffix="{input}", input_variables=["input"]
    )


def whole_rag(clinic: InMemoryVectorStore) -> Any:
    return {"context": itemgetter("input") | clinic.as_retriever() | search} | PromptTemplate.from_template("{context}")


COLLECTIONS: dict[str, Callable[[InMemoryVectorStore], Any]] = {
    "a retrieval chain over it": whole_rag,
    "a closure over its search": lambda clinic: lambda values: search(clinic.similarity_search(values["input"])),
    "its bound method": lambda clinic: itemgetter("input") | RunnableLambda(clinic.similarity_search) | search,
    "an object that has it": lambda clinic: Desk(clinic).answer,
    "a retriever with a fallback": lambda clinic: (
        itemgetter("input") | clinic.as_retriever().with_fallbacks([RunnableLambda(lambda q: [])]) | search
    ),
    "an old example selector": few_shot,
    "its class": lambda clinic: lambda values: search(InMemoryVectorStore.load("clinic", None).similarity_search("")),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("make", COLLECTIONS.values(), ids=COLLECTIONS)
def test_a_member_over_a_whole_collection_is_refused_unless_it_is_public(
    make: Callable[[Any], Any], clinic: InMemoryVectorStore, store_of: Any, records: Any
) -> None:
    selector = PoissonExampleSelector(store_of(records(8)), 4, rate=1.0, max_exemplars=8)
    with pytest.raises(UnsafeConfigurationError, match=r"name it: public=\[\.\.\.\]"):
        PrivateEnsemble(selector, make(clinic))
    if make is COLLECTIONS["its class"]:
        return
    other = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    with pytest.raises(UnsafeConfigurationError, match="would search the same documents"):
        PrivateEnsemble(selector, make(clinic), public=[other])
    PrivateEnsemble(selector, make(clinic), public=[clinic])


def test_a_public_collection_is_searched(sealed_of: Any, budget_of: Any) -> None:
    embeddings = DeterministicFakeEmbedding(size=2)
    handbook = InMemoryVectorStore.from_texts(["Positive"], embeddings).as_retriever(callbacks=[Heard()])
    chain = RunnableLambda(lambda values: values["input"]) | handbook | (lambda found: found[0].page_content)
    assert sealed_of(chain, public=[handbook]).invoke({"input": "q"}) == "Positive"
    assert sealed_of(chain, public=[handbook.vectorstore]).invoke({"input": "q"}) == "Positive"
    candidates = EmbeddingMean(embeddings, candidates=chain, n_candidates=2)
    with pytest.warns(UserWarning, match="all zero-shot candidates are equal"):
        assert sealed_of(chain, public=[handbook], vote=candidates).invoke({"input": "q"}) == "Positive"


@pytest.mark.parametrize("wrong", ["a text", RunnableLambda(str), InMemoryVectorStore, Treasure])
def test_only_collections_can_be_public(wrong: Any, sealed_of: Any, store_of: Any, records: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"public\[1\]"):
        sealed_of(str, public=[InMemoryVectorStore(DeterministicFakeEmbedding(size=2)), wrong])
    store = store_of(records(4))
    for private in (store, PoissonExampleSelector(store, 2, rate=1.0, max_exemplars=8)):
        with pytest.raises(InvalidParameter, match=r"public\[0\]"):
            sealed_of(str, public=[private])
    with pytest.raises(InvalidParameter, match="public"):
        sealed_of(str, public=InMemoryVectorStore(DeterministicFakeEmbedding(size=2)))


def test_candidates_reach_no_collection_and_a_selector_gives_them_nothing(
    store_of: Any, records: Any, sealed_of: Any
) -> None:
    store = store_of(records(8))
    ensemble = sealed_of(lambda values: "Positive").ensemble
    selector = PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=8)
    collection = InMemoryVectorStore(DeterministicFakeEmbedding(size=2))
    for held, why in (
        (collection, "search the same"),
        (collection.as_retriever(), "search the same"),
        (store, "same owners"),
        (DPRetriever(sealed_of(lambda values: "Positive")), "makes releases"),
    ):
        with pytest.raises(UnsafeConfigurationError, match=why):
            ensemble.public_chain(RunnableLambda(lambda values, held=held: str(held)), 1)
    chain, *_ = ensemble.public_chain(RunnableLambda(lambda values: str(selector.select_examples(values))), 1)
    assert run_private(chain, [ensemble.public_request({})], max_concurrency=1) == ["[]"], "a public call has no bucket"


# -- what shows or keeps text, one plain object away -------------------------------------------------------------------


class Heard(BaseCallbackHandler):
    """A callback handler that keeps prompts."""


def model(**options: Any) -> FakeListLLM:
    return FakeListLLM(responses=["Positive"], **options)


class Settings:
    def __init__(self, held: Any) -> None:
        self.llm = held
        self.models = [held]


WAYS_TO: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "a global dictionary": lambda held: (GLOBAL.append({"main": held}), lambda values: GLOBAL[0]["main"])[1],
    "an object's list": lambda held: (lambda app: lambda values: app.models[0])(Settings(held)),
    "an object's attribute": lambda held: (lambda app: lambda values: app.llm)(Settings(held)),
    "a cached function": lambda held: (lambda get: lambda values: get())(functools.lru_cache(lambda: held)),
    "a cached function, called before": lambda held: (
        lambda get: (get(), lambda values: get())[1]
    )(functools.cache(lambda: held)),
}  # fmt: skip


def graph_with_checkpoints() -> Any:
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import START, StateGraph

    made = StateGraph(dict)
    made.add_node("answer", lambda state: {})
    made.add_edge(START, "answer")
    return made.compile(checkpointer=InMemorySaver())


def graph_cache() -> Any:
    from langgraph.cache.memory import InMemoryCache as GraphCache

    return GraphCache()


HELD: dict[str, Callable[[], Any]] = {
    "callbacks": lambda: model(callbacks=[Heard()]),
    "cache": lambda: model(cache=InMemoryCache()),
    "verbose": lambda: model(verbose=True),
    "callbacks ": lambda: model().with_config(callbacks=[Heard()]).bound.model_copy(update={"callbacks": [Heard()]}),
    "checkpointer": graph_with_checkpoints,
    "reaches a Heard": Heard,
    "reaches a CallbackManager": lambda: CallbackManager([]),
    "reaches a InMemoryCache": InMemoryCache,
    "reaches a InMemoryCache ": graph_cache,
}


@pytest.mark.parametrize("way", WAYS_TO)
@pytest.mark.parametrize("what", HELD)
def test_what_shows_or_keeps_text_is_refused_however_it_is_reached(
    what: str, way: str, sealed_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "GLOBAL", [])
    with pytest.raises(UnsafeConfigurationError, match=what.strip()):
        sealed_of(WAYS_TO[way](HELD[what]()))


@pytest.mark.parametrize("way", WAYS_TO)
def test_a_model_without_these_may_be_anywhere(way: str, sealed_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "GLOBAL", [])
    llm, find = model(), None
    find = WAYS_TO[way](llm)
    assert sealed_of(lambda values: find(values).invoke("q")).invoke({"input": "q"}) == "Positive"


HANDLER = Heard()


def test_a_handler_within_a_function_is_refused(sealed_of: Any) -> None:
    llm, own = model(), Heard()
    for member in (
        lambda values: llm.invoke(values["input"], config={"callbacks": [own]}),
        lambda values: llm.invoke(values["input"], config={"callbacks": [HANDLER]}),
        lambda values: llm.invoke(values["input"], config={"callbacks": [Heard()]}),
    ):
        with pytest.raises(UnsafeConfigurationError, match="Heard"):
            sealed_of(member)


def test_a_model_behind_another_is_looked_at(sealed_of: Any) -> None:
    class Outer(FakeListLLM):
        inner: Any = None
        others: dict[str, Any] = Field(default_factory=dict)

    for outer in (
        Outer(responses=["x"], inner=model(callbacks=[Heard()])),
        Outer(responses=["x"], others={"a": model(callbacks=[Heard()])}),
    ):
        with pytest.raises(UnsafeConfigurationError, match="callbacks"):
            sealed_of(lambda values, outer=outer: outer.invoke("q"))


def test_each_call_has_a_cache_of_its_own(sealed_of: Any) -> None:
    heard = Ears()

    @functools.lru_cache
    def asked(question: str) -> str:
        heard.append(question)
        return "Positive"

    sealed = sealed_of(lambda values: asked(values["input"]))
    assert sealed.invoke({"input": "q"}) == "Positive"
    assert len(heard) >= 4, "every member asked by itself"
    with pytest.raises(InvalidParameter, match=r"share=\[\.\.\.\]"):
        PrivateEnsemble(sealed.ensemble.selector, asked, allow_state=[asked])


def test_a_cached_function_is_called_once_and_one_that_raises_again_in_each_call(sealed_of: Any) -> None:
    made = Ears()

    @functools.cache
    def get_llm() -> Any:
        made.append(1)
        return model()

    @functools.cache
    def broken() -> Any:
        raise ValueError

    sealed_of(lambda values: get_llm().invoke("q")).invoke({"input": "q"})
    assert made == [1]
    with pytest.raises(MembersAbstained):
        sealed_of(lambda values: broken().invoke("q")).invoke({"input": "q"})


def test_libraries_own_caches_are_not_followed(sealed_of: Any) -> None:
    import re

    pattern = re._compile  # type: ignore[attr-defined]
    cached = functools.lru_cache(re.escape)
    assert any(part is cached for part in reachable(lambda: cached))
    sealed_of(lambda values: pattern(cached("q"), 0) and "Positive")


def test_a_class_does_not_reach_what_it_was_compared_with(sealed_of: Any, clinic: InMemoryVectorStore) -> None:
    """`abc` keeps the classes for which ``isinstance`` was asked, until the process ends."""

    class Own(Runnable[Any, Any]):
        def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> str:
            return "Positive"

    class Elsewhere:
        index = clinic

    assert not isinstance(Elsewhere(), Own)
    assert sealed_of(Own()).invoke({"input": "q"}) == "Positive"
