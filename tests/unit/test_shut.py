"""The store, budgets and releases are shut while a chain's call runs, however its code comes by them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ears import Ears, Spy
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda
from table_model import TableModel

from langchain_dpicl import (
    DPAggregate,
    DPRetriever,
    DPSampler,
    EmbeddingMean,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyWarning,
    PrivateEnsemble,
    ShutWithinCall,
    UnsafeConfigurationError,
)
from langchain_dpicl.budget.line import IN_TRANSACTION
from langchain_dpicl.calls import shut
from langchain_dpicl.calls.flow import run
from langchain_dpicl.selection import BucketSelector
from langchain_dpicl.store.maintenance import StoreMaintenance

QUESTION = {"input": "a question"}
LABELS = ["Positive", "Negative"]

HELD: dict[str, Any] = {}
"""What a test's module has, and finds by `sys.modules`, which no copy exchanges."""

NAMED: Any = None
"""What a function names as a global, or by an import of this module."""


@pytest.fixture
def world(sealed_of: Any, tmp_path: Path) -> Iterator[dict[str, Any]]:
    release = sealed_of(lambda values: "Positive")
    file = tmp_path / "store.db"
    release.store.save(file)
    held = {
        "store": release.store,
        "maintenance": release.store.maintenance(),
        "selector": release.selector,
        "ensemble": release.ensemble,
        "budget": release.budget,
        "line": release.line(),
        "ledger": release.budget._ledger,
        "release": release,
        "retriever": DPRetriever(release),
        "file": file,
        "load": ExemplarStore.load,
        "keep": StoreMaintenance,
    }
    HELD.update(held)
    yield held
    HELD.clear()


# -- what is refused when the copy is made -----------------------------------------------------------------------------


def by_closure(held: Any) -> Callable[[Any], Any]:
    return lambda values: repr(held)


def by_global(held: Any) -> Callable[[Any], Any]:
    global NAMED
    NAMED = held
    return lambda values: repr(NAMED)


def by_import(held: Any) -> Callable[[Any], Any]:
    global NAMED
    NAMED = held

    def member(values: Any) -> str:
        from test_shut import NAMED as found

        return repr(found)

    return member


def by_default(held: Any) -> Callable[[Any], Any]:
    def member(values: Any, held: Any = {"a": [held]}) -> str:  # noqa: B006
        return repr(held)

    return member


def by_method(held: Any) -> Any:
    """An object of the user's own, three objects deep."""

    class Desk:
        def __init__(self, rooms: Any) -> None:
            self.rooms = rooms

        def answer(self, values: Any) -> str:
            return repr(self.rooms)

    return Desk([{"archive": Desk(held)}]).answer


def by_module(held: Any) -> Callable[[Any], Any]:
    global NAMED
    NAMED = held

    def member(values: Any) -> str:
        import test_shut

        return repr(test_shut.NAMED)

    return member


def by_class(held: Any) -> Callable[[Any], Any]:
    class Desk:
        archive = held

    return lambda values: repr(Desk.archive)


def by_cache(held: Any) -> Callable[[Any], Any]:
    get = functools.cache(lambda: held)
    return lambda values: repr(get())


def by_bound_method(held: Any) -> Any:
    return functools.partial(lambda method, values: repr(method.__self__), held.__repr__)


WAYS_TO = [by_closure, by_global, by_import, by_default, by_method, by_module, by_class, by_cache, by_bound_method]

REFUSED = {
    "store": "ExemplarStore: every member would read the same owners' exemplars",
    "maintenance": "StoreMaintenance: every member would read the same owners' exemplars",
    "ensemble": "PrivateEnsemble: it calls members of its own",
    "budget": "PrivacyBudget: only a release charges it",
    "line": "BudgetLine: only a release charges it",
    "ledger": "Ledger: only a release charges it",
    "release": "SealedRelease: it makes releases, .* RunnablePassthrough.assign",
    "retriever": "DPRetriever: it makes releases, .* RunnablePassthrough.assign",
}


@pytest.fixture(autouse=True)
def forget_what_was_named() -> Iterator[None]:
    global NAMED
    yield
    NAMED = None


@pytest.mark.parametrize("way", WAYS_TO)
@pytest.mark.parametrize("what", REFUSED)
def test_a_member_that_names_it_is_refused(what: str, way: Any, world: dict[str, Any]) -> None:
    assert sys.modules["test_shut"] is sys.modules[__name__], "else no import finds this module"
    with pytest.raises(UnsafeConfigurationError, match=REFUSED[what]):
        PrivateEnsemble(world["selector"], way(world[what]))


@pytest.mark.parametrize("what", REFUSED)
def test_so_it_is_beside_share_and_in_public_chains(what: str, world: dict[str, Any], budget_of: Any) -> None:
    held = world[what]
    with pytest.raises(UnsafeConfigurationError, match=REFUSED[what]):
        PrivateEnsemble(world["selector"], by_closure(held), share=[held])
    mean = EmbeddingMean(DeterministicFakeEmbedding(size=2), candidates=RunnableLambda(by_closure(held)))
    with pytest.raises(UnsafeConfigurationError, match=REFUSED[what]):
        world["ensemble"] | DPAggregate(mean, budget_of())
    searching = PoissonExampleSelector(
        world["store"], 4, rate=1.0, max_exemplars=8, nearest_to="input", search_query=by_closure(held)
    )
    with pytest.raises(UnsafeConfigurationError, match=REFUSED[what]):
        PrivateEnsemble(searching, lambda values: "Positive")


def test_so_it_is_in_a_samplers_search_query(world: dict[str, Any], budget_of: Any) -> None:
    heard = Ears()
    model, budget = TableModel(lambda *_: [0.0, 0.0], "ab"), budget_of()
    options: dict[str, Any] = {"rate": 0.5, "max_exemplars": 8, "nearest_to": "input"}
    for held, why in (("release", "it makes releases"), ("store", "same owners' exemplars")):
        selector = PoissonExampleSelector(world["store"], 4, search_query=by_closure(world[held]), **options)
        with pytest.raises(UnsafeConfigurationError, match=why):
            DPSampler(model, selector, budget, shots=4, top_k=2, max_tokens=1)
    tries = guarded(ATTACKS["reading"], PLACES["here"])
    selector = PoissonExampleSelector(
        world["store"], 4, search_query=lambda values: heard.append(tries()) or "a text", **options
    )
    DPSampler(model, selector, budget, shots=4, top_k=2, max_tokens=1).invoke(QUESTION)
    assert heard == ["ShutWithinCall"]


def test_a_step_of_the_chain_is_no_exception(world: dict[str, Any]) -> None:
    for step in (world["release"], world["retriever"], world["release"].as_tool("ask", "Asks.")):
        with pytest.raises(UnsafeConfigurationError, match="it makes releases"):
            PrivateEnsemble(world["selector"], RunnableLambda(lambda values: "q") | step)


def test_the_class_of_a_store_is_refused_but_for_an_annotation(world: dict[str, Any]) -> None:
    with pytest.raises(UnsafeConfigurationError, match="the class ExemplarStore"):
        PrivateEnsemble(world["selector"], lambda values: str(ExemplarStore))

    def annotated(values: Any, store: ExemplarStore | None = None) -> str:
        return "Positive"

    PrivateEnsemble(world["selector"], annotated)


# -- a selector in a copy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS_TO)
def test_a_selector_is_exchanged_however_it_is_reached(way: Any, world: dict[str, Any]) -> None:
    copies = PrivateEnsemble(world["selector"], way(world["selector"])).copies
    assert copies.copy().chain.invoke(QUESTION).count("BucketSelector()") == 1 or way is by_method
    assert not any(isinstance(each, PoissonExampleSelector) for each in copies.items)


def test_a_few_shot_prompt_shows_the_calls_own_bucket(world: dict[str, Any], budget_of: Any) -> None:
    prompt = FewShotPromptTemplate(
        example_selector=world["selector"],
        example_prompt=PromptTemplate.from_template("{output}"),
        suffix="{input}",
        input_variables=["input"],
    )
    heard = Ears()
    member = prompt | RunnableLambda(lambda text: heard.append(text.text) or "Positive")
    vote = DPAggregate(NoisyVote(LABELS, mechanism="vote"), budget_of())
    assert (PrivateEnsemble(world["selector"], member) | vote).invoke(QUESTION) == "Positive"
    assert sum(text.count("itive") + text.count("ative") for text in heard) == 80, "every owner's once"


SELECTOR = {
    ".store": lambda selector: selector.store,
    ".sample": lambda selector: selector.sample(rate=1),
    ".eligible": lambda selector: selector.eligible(None),
    ".add_example": lambda selector: selector.add_example({"input": "mine", "output": "Positive", "owner": "me"}),
    ".embed_query": lambda selector: selector.embed_query(QUESTION),
}


@pytest.mark.parametrize("attack", SELECTOR)
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_it_gives_nothing_but_the_bucket(attack: str, way: str, world: dict[str, Any], budget_of: Any) -> None:
    heard, selector, reach = Ears(), world["selector"], SELECTOR[attack]

    def member(values: Any) -> str:
        try:
            heard.append(reach(selector))
        except Exception as error:
            heard.append(type(error).__name__)
        return "Positive"

    ensemble = PrivateEnsemble(selector, member)
    release = ensemble | DPAggregate(NoisyVote(LABELS, mechanism="vote"), budget_of())
    before = len(world["store"])
    _ = release.invoke(QUESTION) if way == "invoke" else await release.ainvoke(QUESTION)
    assert heard[-4:] == ["ShutWithinCall"] * 4
    assert len(world["store"]) == before


def test_each_copy_has_stand_ins_of_its_own(world: dict[str, Any]) -> None:
    vectors = world["store"].as_vectorstore()

    def search(values: Any) -> Any:
        before = vars(vectors).get("kept")
        vectors.kept = values
        return before

    copies = PrivateEnsemble(world["selector"], search).copies
    assert [copies.copy().chain.invoke(text) for text in ("a", "b")] == [None, None]
    assert copies.searches


def test_no_code_that_runs_when_the_chain_is_pickled_reads_a_record(world: dict[str, Any], canary: str) -> None:
    """Cached functions without arguments and reducers run then, on the selector itself, for all calls."""
    selector, store = world["selector"], world["store"]

    class Holder:
        def __getstate__(self) -> Any:
            return {"found": selector.select_examples(QUESTION)}

        def __call__(self, values: Any) -> str:
            return str(vars(self))

    @functools.cache
    def sampled() -> Any:
        return selector.select_examples(QUESTION)

    @functools.cache
    def read() -> Any:
        return read_all(store)

    with pytest.warns(PrivacyWarning, match="no budget counts it"):
        assert canary in str(sampled()), "also if the cache holds records before"
    for held in (Holder(), sampled, read):
        with pytest.raises(UnsafeConfigurationError) if held is not sampled else contextlib.nullcontext():
            copies = PrivateEnsemble(selector, lambda values, held=held: str(held())).copies
            assert canary.encode() not in copies._data
            assert copies.copy([{"input": "own"}]).chain.invoke(QUESTION) == "[{'input': 'own'}]"


def test_each_copy_has_a_selector_of_its_own(world: dict[str, Any]) -> None:
    def member(values: Any, selector: Any = world["selector"]) -> Any:
        before = vars(selector).get("kept")
        selector.kept = values
        return before

    copies = PrivateEnsemble(world["selector"], member).copies
    assert [copies.copy().chain.invoke(text) for text in ("a", "b")] == [None, None]


# -- what is refused when it runs --------------------------------------------------------------------------------------


def found() -> dict[str, Any]:
    """By a way that no copy exchanges."""
    held: dict[str, Any] = getattr(sys.modules["test_shut"], "".join(["H", "ELD"]))
    return held


def read_all(store: Any) -> Any:
    with store.reading() as view:
        return view.read(view.rows_of(view.numbers)[0])


ATTACKS: dict[str, Callable[[], Any]] = {
    "reading": lambda: read_all(found()["store"]),
    "vectors": lambda: found()["store"]._memory,
    "owners": lambda: found()["store"].owners,
    "number of records": lambda: len(found()["store"]),
    "adding": lambda: found()["store"].add([{"input": "mine", "output": "Positive", "owner": "me"}]),
    "forgetting": lambda: found()["store"].forget("owner-7"),
    "saving": lambda: found()["store"].save(found()["file"]),
    "loading": lambda: found()["load"](found()["file"], DeterministicFakeEmbedding(size=8)),
    "maintenance's search": lambda: found()["maintenance"].similarity_search("text", k=80),
    "maintenance's delete": lambda: found()["maintenance"].delete(["#0"]),
    "a new maintenance": lambda: found()["keep"](found()["store"]).get_by_ids(["#0"]),
    "sample": lambda: found()["selector"].sample(rate=1),
    "add_example": lambda: found()["selector"].add_example({"input": "mine", "output": "Positive", "owner": "me"}),
    "a release's store": lambda: read_all(found()["release"].store),
    "everybody": lambda: found()["release"].everybody(),
    "ensemble.run": lambda: found()["ensemble"].run(QUESTION, 1.0),
    "a charge": lambda: run(found()["line"].charging(IN_TRANSACTION, [None])),
    "a budget's counter": lambda: found()["budget"].spent(),
    "a release": lambda: found()["release"].invoke(QUESTION),
    "a release in a loop of its own": lambda: asyncio.run(found()["release"].ainvoke(QUESTION)),
    "a retriever": lambda: found()["retriever"].invoke("a question"),
    "a release that is made there": lambda: (
        found()["ensemble"] | DPAggregate(NoisyVote(LABELS, mechanism="vote"), found()["budget"])
    ).invoke(QUESTION),
}


def in_thread(ask: Callable[[], Any]) -> Any:
    gave: list[Any] = []
    thread = threading.Thread(target=lambda: gave.append(ask()))
    thread.start()
    thread.join()
    return gave[0]


def in_fresh_thread(ask: Callable[[], Any]) -> Any:
    return contextvars.Context().run(in_thread, ask)


def in_pool(ask: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.Context().run, ask).result()


def in_fresh_pool(ask: Callable[[], Any]) -> Any:
    return contextvars.Context().run(in_pool, ask)


PUBLIC_POOL = ThreadPoolExecutor(1)


class PoolOfOthers(Spy):
    def __call__(self, ask: Callable[[], Any]) -> Any:
        return contextvars.Context().run(PUBLIC_POOL.submit, ask).result()


class CallbackOfOthers(Spy):
    """A future that a thread of public code ends."""

    def __call__(self, ask: Callable[[], Any]) -> Any:
        gave: list[Any] = []
        ready, done = threading.Event(), threading.Event()

        def call_back(future: Any) -> None:
            gave.append(ask())
            done.set()

        future = PUBLIC_POOL.submit(ready.wait, 10)
        contextvars.Context().run(future.add_done_callback, call_back)
        ready.set()
        assert done.wait(10)
        return gave[0]


async def _task(ask: Callable[[], Any]) -> Any:
    async def inner() -> Any:
        return ask()

    return await asyncio.create_task(inner(), context=contextvars.Context())


async def _other_thread(ask: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, contextvars.Context().run, ask)


PLACES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "here": lambda ask: ask(),
    "a fresh context": lambda ask: contextvars.Context().run(ask),
    "a thread": in_thread,
    "a fresh context's thread": in_fresh_thread,
    "a timer within a thread": lambda ask: in_thread(lambda: in_thread(ask)),
    "an executor": in_pool,
    "a fresh context's executor": in_fresh_pool,
    "another's executor": PoolOfOthers(),
    "another's future": CallbackOfOthers(),
    "a task of its own loop": lambda ask: asyncio.run(_task(ask)),
    "a thread of its own loop": lambda ask: asyncio.run(_other_thread(ask)),
}


def guarded(attack: Callable[[], Any], place: Callable[[Callable[[], Any]], Any]) -> Callable[[], str]:
    def ask() -> str:
        try:
            return f"got {attack()!r}"
        except BaseException as error:
            return type(error).__name__

    return lambda: str(place(ask))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("native", [False, True], ids=["a function", "a coroutine"])
async def test_a_member_that_finds_it_all_the_same_is_refused(
    attack: str, native: bool, world: dict[str, Any], sealed_of: Any
) -> None:
    heard, tries = Ears(), guarded(ATTACKS[attack], PLACES["here"])
    before, spent = len(world["store"]), world["budget"].spent()

    def member(values: Any) -> str:
        heard.append(tries())
        return "Positive"

    async def amember(values: Any) -> str:
        return member(values)

    if native:
        await sealed_of(RunnableLambda(member, amember)).ainvoke(QUESTION)
    else:
        sealed_of(member).invoke(QUESTION)
    if attack == "a release in a loop of its own" and native:
        assert set(heard) == {"RuntimeError"}, "a loop runs there already"
    else:
        assert set(heard) == {"ShutWithinCall"}
    assert (len(world["store"]), world["budget"].spent()) == (before, spent)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("attack", ["reading", "sample", "a charge", "a release", "ensemble.run"])
async def test_so_it_is_wherever_the_member_asks_from(
    attack: str, way: str, place: str, world: dict[str, Any], sealed_of: Any
) -> None:
    heard, tries = Ears(), guarded(ATTACKS[attack], PLACES[place])

    def member(values: Any) -> str:
        heard.append(tries())
        return "Positive"

    release = sealed_of(member, members=2)
    _ = release.invoke(QUESTION) if way == "invoke" else await release.ainvoke(QUESTION)
    assert set(heard) == {"ShutWithinCall"}
    assert world["budget"].spent() == 0
    assert PUBLIC_POOL.submit(lambda: len(world["store"])).result() == 80, "others' threads have no mark"


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("place", ["a fresh context", "a fresh context's thread", "another's executor"])
async def test_a_coroutine_is_refused_there_too(place: str, way: str, world: dict[str, Any], sealed_of: Any) -> None:
    heard, tries = Ears(), guarded(ATTACKS["reading"], PLACES[place])

    async def member(values: Any) -> str:
        heard.append(tries())
        heard.append(await asyncio.to_thread(tries))
        heard.append(await _other_thread(tries))
        heard.append(await _task(tries))
        return "Positive"

    await sealed_of(RunnableLambda(lambda _: "Positive", member)).ainvoke(QUESTION)
    assert set(heard) == {"ShutWithinCall"}


def test_a_public_chain_is_refused_as_a_member_is(world: dict[str, Any], budget_of: Any) -> None:
    heard, tries = Ears(), guarded(ATTACKS["reading"], PLACES["a fresh context"])

    def candidate(values: Any) -> str:
        heard.append(tries())
        return f"a candidate {len(heard)}"

    mean = EmbeddingMean(DeterministicFakeEmbedding(size=2), candidates=RunnableLambda(candidate), n_candidates=3)
    (world["ensemble"] | DPAggregate(mean, budget_of())).invoke(QUESTION)
    assert set(heard) == {"ShutWithinCall"}


class Holder:
    """What a user shares by mistake."""

    def __init__(self, held: Any) -> None:
        self.held = held


def test_what_share_hides_is_refused_when_it_runs(world: dict[str, Any], sealed_of: Any, canary: str) -> None:
    holder, heard = Holder(world["store"]), Ears()

    def member(values: Any) -> str:
        try:
            heard.append(repr(read_all(holder.held)))
        except ShutWithinCall as error:
            heard.append(str(error))
        return "Positive"

    sealed_of(member, share=[holder]).invoke(QUESTION)
    assert set(heard) == {str(ShutWithinCall())}
    assert canary not in "".join(heard)


def test_outside_of_calls_all_is_open(world: dict[str, Any], sealed_of: Any) -> None:
    sealed_of(lambda values: "Positive").invoke(QUESTION)
    assert not shut.in_call()
    assert len(read_all(world["store"])) == 80
    assert world["release"].invoke(QUESTION) == "Positive"
    assert world["retriever"].invoke("a question")[0].page_content == "Positive"


def test_the_stores_model_may_keep_vectors_of_records(
    records: Any, embeddings: Any, tmp_path: Path, budget_of: Any
) -> None:
    from langchain_classic.embeddings import CacheBackedEmbeddings
    from langchain_classic.storage import LocalFileStore

    kept = CacheBackedEmbeddings.from_bytes_store(embeddings, LocalFileStore(tmp_path), key_encoder="sha256")
    store = ExemplarStore.from_records(records(40), kept, owner_key="owner")
    selector = PoissonExampleSelector(store, 2, rate=1.0, max_exemplars=40)
    vectors = store.as_vectorstore()
    member = PrivateEnsemble(selector, lambda values: vectors.similarity_search(values["input"])[0].metadata["output"])
    vote = DPAggregate(NoisyVote(LABELS, mechanism="vote"), budget_of())
    assert (member | vote).invoke(QUESTION) in LABELS
    with pytest.raises(UnsafeConfigurationError, match="CacheBackedEmbeddings"):
        PrivateEnsemble(selector, lambda values: str(kept.embed_query(values["input"])))


def test_the_stand_in_is_pickled_by_value() -> None:
    assert isinstance(pickle.loads(pickle.dumps(BucketSelector())), BucketSelector)  # noqa: S301
