"""`boundary.py`: how members are called: alone, in a clean context, always as many, and with every failure abstaining.

What could be seen of it from outside is looked for in ``test_channels_*.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from channels import QUESTION, Recorder
from ears import Ears, Same
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.globals import set_debug, set_llm_cache, set_verbose
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import (
    Runnable,
    RunnableConfig,
    RunnableLambda,
)
from langchain_core.tracers import context as tracer_context
from langchain_core.tracers.context import register_configure_hook
from ways import WAYS, ask

from langchain_dpicl import (
    EmbeddingMean,
    InvalidParameter,
    ModelUnavailable,
    PoissonExampleSelector,
    UnsafeConfigurationError,
)
from langchain_dpicl.private import boundary
from langchain_dpicl.private.boundary import ABSTAIN
from langchain_dpicl.private.copy import Pristine
from langchain_dpicl.selection import BucketSelector, Examples


def prompt() -> Runnable[Any, Any]:
    return ChatPromptTemplate.from_messages([("human", "{examples}\nInput: {input}\nOutput:")])


def model(canary: str, **options: Any) -> GenericFakeChatModel:
    """Answers with a label, and with the canary: outputs are private too."""
    return GenericFakeChatModel(messages=itertools.repeat(AIMessage(f"Positive {canary}")), **options)


# -- globals: refused, and nothing is charged --------------------------------------------------------------------------


class EnvironmentHandler(BaseCallbackHandler):
    """A handler that an environment variable switches on."""


@pytest.fixture
def hook() -> Iterator[str]:
    hooks = list(tracer_context._configure_hooks)
    register_configure_hook(
        contextvars.ContextVar("some_handler", default=None), True, EnvironmentHandler, "DPICL_TEST_HANDLER"
    )
    yield "DPICL_TEST_HANDLER"
    tracer_context._configure_hooks[:] = hooks


@pytest.fixture
def unsafe(hook: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def make(kind: str) -> None:
        match kind:
            case "cache":
                set_llm_cache(InMemoryCache())
            case "debug":
                set_debug(True)
            case "verbose":
                set_verbose(True)
            case "hook":
                monkeypatch.setenv(hook, "1")
            case "handler for every context":
                handler = Recorder()
                register_configure_hook(contextvars.ContextVar("for_all", default=handler), True)

    yield make
    set_llm_cache(None)
    set_debug(False)
    set_verbose(False)


@pytest.mark.parametrize("kind", ["cache", "debug", "verbose", "hook", "handler for every context"])
async def test_unsafe_globals_are_refused_before_anything_is_charged(
    kind: str, unsafe: Callable[[str], None], sealed_of: Any
) -> None:
    calls: list[int] = Ears()
    sealed = sealed_of(lambda _: calls.append(1) or "Positive")
    sealed.invoke(QUESTION)
    calls.clear()
    unsafe(kind)
    with pytest.raises(UnsafeConfigurationError):
        sealed.invoke(QUESTION)
    with pytest.raises(UnsafeConfigurationError):
        await sealed.ainvoke(QUESTION)
    with pytest.raises(UnsafeConfigurationError):
        sealed.batch([QUESTION, QUESTION])
    with pytest.raises(UnsafeConfigurationError):
        await sealed.abatch([QUESTION, QUESTION])
    with pytest.raises(UnsafeConfigurationError):
        list(sealed.stream(QUESTION))
    assert calls == []
    assert sealed.budget.spent() == 1


def test_a_hook_whose_variable_is_off_is_no_reason_to_refuse(hook: str, monkeypatch: Any, sealed_of: Any) -> None:
    for value in ("", "0", "false", "False"):
        monkeypatch.setenv(hook, value)
        assert sealed_of(lambda _: "Positive").invoke(QUESTION) == "Positive"


# -- failures ----------------------------------------------------------------------------------------------------------


def request(text: str) -> boundary.MemberRequest:
    return {"input": text}, Examples([{"input": text, "output": "x"}])


FAILURES: list[type[BaseException]] = [
    ValueError,
    RuntimeError,
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    MemoryError,
    RecursionError,
    SystemExit,
    KeyboardInterrupt,
    asyncio.CancelledError,
    TimeoutError,
    BaseException,
    type("Odd", (Exception,), {"__str__": lambda self: 1 / 0}),
    BaseExceptionGroup,
]


def raising(kind: type[BaseException], where: str) -> Callable[[dict[str, Any]], str]:
    def member(values: dict[str, Any]) -> str:
        if values["input"] == where:
            raise kind("m", [SystemExit()]) if kind is BaseExceptionGroup else kind(values["examples"])
        return str(values["input"])

    return member


@pytest.mark.parametrize("kind", FAILURES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("concurrency", [1, 2, 8])
def test_one_members_failure_is_an_abstention_and_no_one_elses(kind: type[BaseException], concurrency: int) -> None:
    member = boundary.seal(RunnableLambda(raising(kind, "b")))
    requests = [request(text) for text in "abc"]
    assert boundary.run_private(Same(member), requests, max_concurrency=concurrency) == ["a", ABSTAIN, "c"]


@pytest.mark.parametrize("kind", FAILURES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("native", [True, False], ids=["async function", "function in a thread"])
async def test_an_async_members_failure_is_an_abstention_and_no_one_elses(
    kind: type[BaseException], native: bool
) -> None:
    inner = raising(kind, "b")

    async def member(values: dict[str, Any]) -> str:
        await asyncio.sleep(0)
        return inner(values)

    sealed = boundary.seal(RunnableLambda(member) if native else RunnableLambda(inner))
    requests = [request(text) for text in "abc"]
    assert await boundary.arun_private(Same(sealed), requests, max_concurrency=8) == ["a", ABSTAIN, "c"]


async def test_a_member_that_cancels_its_own_task_abstains() -> None:
    class CancelsItself(Runnable[Any, Any]):
        def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
            raise NotImplementedError

        async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
            if input["input"] == "b":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(1)
            return input["input"]

    member = boundary.seal(CancelsItself())
    requests = [request(text) for text in "abc"]
    assert await boundary.arun_private(Same(member), requests, max_concurrency=8) == ["a", ABSTAIN, "c"]


def test_an_abstention_is_one_object_that_says_nothing() -> None:
    assert repr(ABSTAIN) == str(ABSTAIN) == "ABSTAIN"
    assert boundary.Abstention() is ABSTAIN
    assert not getattr(ABSTAIN, "__dict__", {})


@pytest.mark.parametrize("members", [2, 5, 70])
@pytest.mark.parametrize("rate", [1e-7, 1.0])
async def test_there_are_always_as_many_calls_as_members(members: int, rate: float, sealed_of: Any) -> None:
    """Also where the sample is empty, and also where some fail: the number of calls says nothing."""
    calls: list[int] = Ears()
    lock = threading.Lock()

    def member(values: dict[str, Any]) -> str:
        with lock:
            calls.append(len(values["examples"]))
            if len(calls) % 3 == 0:
                raise ValueError
        return "Positive"

    sealed = sealed_of(member, members=members, rate=rate, owners=8, share=[lock])
    sealed.invoke(QUESTION)
    assert len(calls) == members
    assert sum(calls) == (8 if rate == 1.0 else 0)
    await sealed.ainvoke(QUESTION)
    assert len(calls) == 2 * members


@pytest.mark.parametrize("fails", [0, 1, 3], ids=["none fails", "one fails", "all fail"])
@pytest.mark.parametrize("rate", [1e-7, 0.4, 1.0])
async def test_a_batch_makes_as_many_calls_as_members_for_each_question(
    fails: int, rate: float, sealed_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n times N, however many owners are in and however they fare; public questions after a failure come on top."""
    private: list[int] = Ears()
    lock = threading.Lock()

    def member(values: dict[str, Any]) -> str:
        if "public" not in values:
            with lock:
                private.append(len(values["examples"]))
                if len(private) % 3 < fails:
                    raise ValueError
        return "Positive"

    sealed = sealed_of(member, members=3, rate=rate, owners=8, share=[lock])
    ensemble = sealed.ensemble
    monkeypatch.setattr(ensemble, "public_request", lambda values: ({**values, "public": True}, Examples()))
    questions = [{"input": "one"}, {"input": "two"}]
    with contextlib.suppress(ModelUnavailable):
        sealed.batch(questions)
    assert len(private) == 6
    with contextlib.suppress(ModelUnavailable):
        await sealed.abatch(questions)
    assert len(private) == 12
    assert sum(private) == {1e-7: 0, 1.0: 32}.get(rate, sum(private)), "the examples of eight owners, four times"


@pytest.mark.parametrize("limit", [1, 3])
async def test_concurrency_is_limited_as_asked(limit: int) -> None:
    running = peak = 0
    lock = threading.Lock()

    def member(_: Any) -> str:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        time.sleep(0.002)
        with lock:
            running -= 1
        return "x"

    async def async_member(_: Any) -> str:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.002)
        running -= 1
        return "x"

    requests = [request("a")] * 12
    boundary.run_private(Same(RunnableLambda(member)), requests, max_concurrency=limit)
    assert peak == limit
    peak = 0
    await boundary.arun_private(Same(RunnableLambda(async_member)), requests, max_concurrency=limit)
    assert peak == limit


async def test_outputs_keep_the_order_of_the_members() -> None:
    def member(values: dict[str, Any]) -> str:
        time.sleep(0.01 if values["input"] in "ace" else 0)
        return str(values["input"])

    requests = [request(text) for text in "abcdef"]
    assert boundary.run_private(Same(RunnableLambda(member)), requests, max_concurrency=6) == list("abcdef")
    assert await boundary.arun_private(Same(RunnableLambda(member)), requests, max_concurrency=6) == list("abcdef")


# -- contexts ----------------------------------------------------------------------------------------------------------

callers_variable: contextvars.ContextVar[str] = contextvars.ContextVar("callers_variable", default="nothing")


async def test_members_and_caller_do_not_see_each_others_context(sealed_of: Any) -> None:
    seen: list[str] = Ears()

    def member(values: dict[str, Any]) -> str:
        seen.append(callers_variable.get())
        callers_variable.set("a member was here")
        return "Positive"

    async def async_member(values: dict[str, Any]) -> str:
        return member(values)

    callers_variable.set("the caller's")
    for each in (member, async_member):
        sealed = sealed_of(RunnableLambda(member, afunc=async_member) if each is async_member else each)
        if each is member:
            sealed.invoke(QUESTION)
        await sealed.ainvoke(QUESTION)
    assert set(seen) == {"nothing"}
    assert callers_variable.get() == "the caller's"


async def test_a_copys_stand_in_gives_its_own_calls_bucket_whoever_asks_it() -> None:
    """One that finds the bucket by the context gives that of another call, or of a finalizer's chance place."""
    kept = Ears()
    selector = BucketSelector()

    def member(values: dict[str, Any]) -> list[str]:
        kept.append(selector)
        return [contextvars.Context().run(each.select_examples, {})[0]["text"] for each in kept]

    async def async_member(values: dict[str, Any]) -> list[str]:
        return member(values)

    requests = [({"input": ""}, Examples([{"text": text}])) for text in "abcdef"]
    expected = [list("abcdef"[: i + 1]) for i in range(6)]
    shared = Pristine(RunnableLambda(member), share=[kept])
    assert boundary.run_private(shared, requests, max_concurrency=1) == expected
    kept.clear()
    shared = Pristine(RunnableLambda(async_member), share=[kept])
    assert await boundary.arun_private(shared, requests, max_concurrency=1) == expected


def test_a_members_config_is_bare(sealed_of: Any) -> None:
    configs: list[RunnableConfig] = Ears()

    def member(values: dict[str, Any], config: RunnableConfig) -> str:
        configs.append(config)
        return "Positive"

    sealed_of(member).invoke(
        QUESTION, {"tags": ["t"], "metadata": {"user": "u"}, "run_name": "n", "configurable": {"thread_id": "7"}}
    )
    for config in configs:
        assert not config["tags"]
        assert not config["metadata"]
        assert not config.get("configurable")
        assert "run_name" not in config or config["run_name"] is None
        assert not getattr(config["callbacks"], "handlers", config["callbacks"])


# -- what surfaces -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_of_the_caller_passes_without_private_baggage(
    kind: type[BaseException],
    sealed_of: Any,
    canary: str,
    canary_free: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sealed = sealed_of(lambda _: "Positive")

    def interrupted(*drawn: Any) -> Any:
        private = canary  # noqa: F841 (a local that a traceback would show)
        raise kind(canary)

    monkeypatch.setattr(sealed.ensemble.selector, "sample", interrupted)
    with pytest.raises(kind) as caught:
        sealed.invoke(QUESTION)
    canary_free(caught.value, frames=True)
    assert caught.value.args == ()
    assert sealed.budget.spent() == 1


async def test_cancelling_the_caller_cancels_every_member_and_keeps_the_charge(
    sealed_of: Any, canary: str, canary_free: Callable[..., None]
) -> None:
    heard: list[str] = Ears()

    async def slow(values: dict[str, Any]) -> str:
        heard.append("started")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise
        return "Positive"

    sealed = sealed_of(RunnableLambda(slow), members=5, max_concurrency=3)
    before = asyncio.all_tasks()
    call = asyncio.create_task(sealed.ainvoke(QUESTION))
    async with asyncio.timeout(5):
        while not heard:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await call
    canary_free(caught.value, frames=True)
    assert heard.count("cancelled") == 3
    assert asyncio.all_tasks() == before
    assert sealed.budget.spent() == 1


async def test_a_member_that_swallows_its_cancellation_does_not_make_an_answer(sealed_of: Any) -> None:
    async def stubborn(values: dict[str, Any]) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(2)
        return "Positive"

    sealed = sealed_of(RunnableLambda(stubborn))
    sealed.line()
    call = asyncio.create_task(sealed.ainvoke(QUESTION))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def buckets() -> list[Any]:
    """Every bucket in memory that is not empty."""
    return [item for item in gc.get_objects() if type(item) is Examples and len(item)]


async def test_after_a_release_nothing_private_is_held(sealed_of: Any) -> None:
    """Threads that are used again, tasks, futures and exceptions let go of the buckets."""

    def member(values: dict[str, Any]) -> str:
        if len(values["examples"]) % 2:
            raise ValueError(values)
        return "Positive"

    sealed = sealed_of(member, members=6)
    gc.collect()
    before = buckets()  # of other tests in this process
    for _ in range(3):
        with contextlib.suppress(ModelUnavailable):  # when most of the six happened to fail
            sealed.invoke(QUESTION)
        with contextlib.suppress(ModelUnavailable):
            await sealed.ainvoke(QUESTION)
    left = 1
    deadline = time.monotonic() + 5
    while left and time.monotonic() < deadline:  # a thread lets go of its last work a moment after it is done
        await asyncio.sleep(0.01)
        gc.collect()
        left = sum(all(bucket is not old for old in before) for bucket in buckets())
    assert left == 0


async def test_a_chain_that_streams_to_the_member_only_gives_its_whole(sealed_of: Any, canary: str) -> None:
    async def chunks(values: AsyncIterator[Any]) -> AsyncIterator[str]:
        async for _ in values:
            for piece in ("Posi", "tive ", canary):
                yield piece

    from langchain_core.runnables import RunnableGenerator

    sealed = sealed_of(RunnableGenerator(chunks))
    assert [chunk async for chunk in sealed.astream(QUESTION)] == ["Positive"]


def test_a_release_works_in_a_forked_child_that_opens_its_budget(sealed_of: Any, ledger_url: str) -> None:
    """The threads that are kept for members do not survive a fork: a child starts its own."""
    sealed = sealed_of(lambda _: "Positive", ledger=ledger_url)
    sealed.invoke(QUESTION)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            own = sealed_of(lambda _: "Positive", ledger=ledger_url)
            code = 0 if own.invoke(QUESTION) == "Positive" else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert sealed.budget.spent() == 2
    assert sealed.invoke(QUESTION) == "Positive"


@pytest.mark.parametrize("way", WAYS)
async def test_what_a_member_writes_into_its_input_is_seen_by_nobody(way: str, sealed_of: Any, canary: str) -> None:
    """Not by another member, whose prompt would then hold two owners' records, and not by the caller or a tracer."""
    read: list[Any] = Ears()

    def member(values: dict[str, Any]) -> str:
        read.append(list(values["history"]))
        values["history"].append(canary)
        values["more"]["seen"] = canary
        return "Positive"

    sealed = sealed_of(member, max_concurrency=1)
    question = {"input": "a film", "history": ["hello"], "more": {}}
    for _ in range(2):
        await ask(way, sealed, question)
    assert read == [["hello"]] * 8
    assert question == {"input": "a film", "history": ["hello"], "more": {}}


@pytest.mark.parametrize("way", WAYS)
async def test_an_input_that_cannot_be_copied_is_refused_and_costs_nothing(way: str, sealed_of: Any) -> None:
    sealed = sealed_of(lambda _: "Positive")
    with pytest.raises(InvalidParameter, match="copied"):
        await ask(way, sealed, {"input": "a film", "lock": threading.Lock()})
    assert sealed.budget.spent() == 0


SECRET = "an owner said this"


class Late(Exception):
    """An SDK's error that reads its body when somebody asks for its code, and is interrupted."""

    @property
    def code(self) -> int:
        raise KeyboardInterrupt(SECRET)


@pytest.mark.parametrize("timeout", [None, 5.0])
async def test_an_error_whose_attributes_raise_ends_one_call_and_is_not_logged(
    timeout: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    def member(values: dict[str, Any]) -> int:
        if values["i"] == 1:
            raise Late(SECRET)
        return int(values["i"])

    requests: Any = [({"i": i}, []) for i in range(3)]
    chain = RunnableLambda(member)
    here = await asyncio.to_thread(boundary.run_private, Same(chain), requests, max_concurrency=1, timeout=timeout)
    awaited = await boundary.arun_private(Same(chain), requests, max_concurrency=1, timeout=timeout)
    assert here == awaited == [0, ABSTAIN, 2]
    gc.collect()
    assert SECRET not in caplog.text


@pytest.mark.parametrize("at_once", [1, 3])
async def test_what_a_call_writes_on_its_thread_no_other_call_reads(at_once: int) -> None:
    """Threads are used again, by calls of the same release and of later ones, as if they were new."""

    def member(values: dict[str, Any]) -> Any:
        thread: Any = threading.current_thread()
        before = getattr(thread, "kept", None), getattr(thread._started, "kept", None), thread.name
        thread.kept = thread._started.kept = thread.name = values["input"]
        return before

    requests: list[boundary.MemberRequest] = [({"input": text}, Examples(())) for text in "abcdef"]
    chain = Same(RunnableLambda(member))
    for _ in range(2):
        assert boundary.run_private(chain, requests, max_concurrency=at_once) == [(None, None, "dpicl-member")] * 6
        assert (
            await boundary.arun_private(chain, requests, max_concurrency=at_once) == [(None, None, "dpicl-member")] * 6
        )


async def test_a_call_cannot_write_into_anothers_vectors(store_of: Any, records: Any) -> None:
    """A row of one matrix would lead to all rows."""
    selector = PoissonExampleSelector(store_of(records(20)), 5, rate=1.0, max_exemplars=20)
    buckets = selector.sample(with_vectors=True)
    vectors = [bucket.vector_of(each) for bucket in buckets for each in bucket]
    assert len(vectors) == 20
    assert all(vector is not None and vector.base is None for vector in vectors)


def test_candidates_do_not_read_what_one_of_them_wrote_into_its_examples(sealed_of: Any) -> None:
    found = Ears()

    def candidate(values: dict[str, Any]) -> str:
        found.append(len(values["examples"]))
        values["examples"].append({"input": "kept"})
        return f"a text {len(found)}"

    mean = EmbeddingMean(DeterministicFakeEmbedding(size=8), RunnableLambda(candidate), 5)
    sealed_of(lambda values: "a text", vote=mean).invoke({"input": "how many?"})
    assert list(found) == [0] * 5
