"""`boundary.py`: nothing but return values crosses from private to public.

Every channel is tried twice: on a sealed release, where the canary must not show, and on a naive chain with the same
member, where it must, so that a check that sees nothing cannot pass.
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
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, StdOutCallbackHandler
from langchain_core.globals import set_debug, set_llm_cache, set_verbose
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import (
    Runnable,
    RunnableBranch,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    chain,
)
from langchain_core.runnables.router import RouterRunnable
from langchain_core.tools import tool
from langchain_core.tracers import context as tracer_context
from langchain_core.tracers.context import collect_runs, register_configure_hook
from langsmith import Client, run_trees, utils
from langsmith.run_helpers import tracing_context

from langchain_dpicl import ModelUnavailable, ReleaseFailed, UnsafeConfigurationError, boundary
from langchain_dpicl.boundary import ABSTAIN
from langchain_dpicl.selection import Examples

QUESTION = {"input": "a witty, seductive movie"}


class Recorder(BaseCallbackHandler):
    """Keeps everything that any callback is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return object.__getattribute__(self, name)

        def keep(*args: Any, **kwargs: Any) -> None:
            self.told.append(f"{name} {args!r} {kwargs!r}")

        return keep

    def text(self) -> str:
        return "\n".join(self.told)


def prompt() -> Runnable[Any, Any]:
    return ChatPromptTemplate.from_messages([("human", "{examples}\nInput: {input}\nOutput:")])


def model(canary: str, **options: Any) -> GenericFakeChatModel:
    """Answers with a label, and with the canary: outputs are private too."""
    return GenericFakeChatModel(messages=itertools.repeat(AIMessage(f"Positive {canary}")), **options)


def naive(member: Any, canary: str) -> Runnable[Any, Any]:
    """What one would write without the boundary: the same member, three times, in LCEL's open."""
    bucket = [{"input": canary, "output": "Positive"}]
    steps = RunnableParallel({f"member_{i}": member for i in range(3)})
    return (lambda values: {**values, "examples": bucket}) | steps | (lambda votes: "Positive")  # type: ignore


# -- channels that the caller opens ------------------------------------------------------------------------------------


async def callbacks_in_the_config(runnable: Any) -> str:
    recorder = Recorder()
    runnable.invoke(QUESTION, {"callbacks": [recorder]})
    return recorder.text()


async def callbacks_in_the_config_async(runnable: Any) -> str:
    recorder = Recorder()
    await runnable.ainvoke(QUESTION, {"callbacks": [recorder]})
    return recorder.text()


async def callbacks_of_a_batch(runnable: Any) -> str:
    recorder = Recorder()
    runnable.batch([QUESTION, QUESTION], {"callbacks": [recorder]})
    await runnable.abatch([QUESTION], {"callbacks": [recorder]})
    return recorder.text()


async def callbacks_of_a_stream(runnable: Any) -> str:
    recorder = Recorder()
    chunks = [*runnable.stream(QUESTION, {"callbacks": [recorder]})]
    chunks += [chunk async for chunk in runnable.astream(QUESTION, {"callbacks": [recorder]})]
    return recorder.text() + repr(chunks)


async def a_traced_parent_chain(runnable: Any) -> str:
    recorder = Recorder()
    parent = RunnablePassthrough() | runnable | (lambda answer: {"answer": answer}) | RunnablePassthrough()
    parent.with_config(tags=["parent"]).invoke(QUESTION, {"callbacks": [recorder]})
    await parent.ainvoke(QUESTION, {"callbacks": [recorder]})
    return recorder.text()


async def a_function_of_a_traced_parent(runnable: Any) -> str:
    """Called without a configuration, within a traced function: LCEL hands the parent's over in a context variable."""
    recorder = Recorder()

    @chain
    def parent(values: Any) -> Any:
        return runnable.invoke(values)

    @chain
    async def async_parent(values: Any) -> Any:
        return await runnable.ainvoke(values)

    parent.invoke(QUESTION, {"callbacks": [recorder]})
    await async_parent.ainvoke(QUESTION, {"callbacks": [recorder]})
    return recorder.text()


def every_run(run: Any) -> str:
    return f"{run.name} {run.inputs!r} {run.outputs!r} {run.events!r} {run.error!r}" + "".join(
        every_run(child) for child in run.child_runs
    )


async def collected_runs(runnable: Any) -> str:
    with collect_runs() as collector:
        runnable.invoke(QUESTION)
        await runnable.ainvoke(QUESTION)
    assert collector.traced_runs
    return "".join(map(every_run, collector.traced_runs))


async def events_v1(runnable: Any) -> str:
    return repr([event async for event in runnable.astream_events(QUESTION, version="v1")])


async def events_v2(runnable: Any) -> str:
    return repr([event async for event in runnable.astream_events(QUESTION, version="v2")])


async def a_stream_log(runnable: Any) -> str:
    return repr([patch async for patch in runnable.astream_log(QUESTION)])


class RecordingClient(Client):
    """A LangSmith client that keeps what it would send."""

    def __init__(self) -> None:
        super().__init__(api_url="http://localhost:1", api_key="none", auto_batch_tracing=False, info={})
        self.sent: list[str] = []

    def create_run(self, *args: Any, **kwargs: Any) -> None:
        self.sent.append(repr((args, kwargs)))

    def update_run(self, *args: Any, **kwargs: Any) -> None:
        self.sent.append(repr((args, kwargs)))


@contextlib.contextmanager
def langsmith_from_the_environment() -> Iterator[RecordingClient]:
    client = RecordingClient()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGSMITH_TRACING", "true")
        patch.setenv("LANGCHAIN_TRACING_V2", "true")
        patch.setattr(run_trees, "_CLIENT", client)
        utils.get_env_var.cache_clear()
        try:
            yield client
        finally:
            utils.get_env_var.cache_clear()


async def langsmith_by_environment(runnable: Any) -> str:
    with langsmith_from_the_environment() as client:
        runnable.invoke(QUESTION)
        await runnable.ainvoke(QUESTION)
        await asyncio.sleep(0.01)
    assert client.sent
    return "".join(client.sent)


async def langsmith_by_context(runnable: Any) -> str:
    client = RecordingClient()
    with tracing_context(enabled=True, client=client):
        runnable.invoke(QUESTION)
        await runnable.ainvoke(QUESTION)
    assert client.sent
    return "".join(client.sent)


CHANNELS: list[Callable[[Any], Any]] = [
    callbacks_in_the_config,
    callbacks_in_the_config_async,
    callbacks_of_a_batch,
    callbacks_of_a_stream,
    a_traced_parent_chain,
    a_function_of_a_traced_parent,
    collected_runs,
    events_v1,
    events_v2,
    a_stream_log,
    langsmith_by_environment,
    langsmith_by_context,
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.__name__)
async def test_a_callers_channel_carries_the_release_and_nothing_private(
    channel: Callable[[Any], Any], sealed_of: Any, canary: str
) -> None:
    member = prompt() | model(canary) | StrOutputParser()
    assert canary in await channel(naive(member, canary)), "the naive chain shows it, so the check can fail"
    seen = await channel(sealed_of(member))
    assert "Positive" in seen, "the release itself is seen"
    assert canary not in seen


@pytest.mark.filterwarnings("ignore")
async def test_a_failing_member_shows_nothing_either(sealed_of: Any, canary: str) -> None:
    def fail(values: dict[str, Any]) -> str:
        raise ValueError(f"cannot parse {values['examples']} {canary}")

    for channel in CHANNELS:
        broken = naive(RunnableLambda(fail), canary)
        with pytest.raises(ValueError, match="cannot parse"):
            await channel(broken)
        answers = itertools.chain(["fail"], itertools.repeat("Positive"))
        sealed = sealed_of(lambda values, a=answers: fail(values) if next(a) == "fail" else "Positive", members=6)
        assert canary not in await channel(sealed)


# -- channels inside the member ----------------------------------------------------------------------------------------

MemberChannel = Callable[[str], tuple[Any, Callable[[], str]]]


def callbacks_on_the_model(canary: str) -> tuple[Any, Callable[[], str]]:
    recorder = Recorder()
    return prompt() | model(canary, callbacks=[recorder]) | StrOutputParser(), recorder.text


def callbacks_bound_by_with_config(canary: str) -> tuple[Any, Callable[[], str]]:
    recorder = Recorder()
    return prompt() | model(canary).with_config(callbacks=[recorder]) | StrOutputParser(), recorder.text


def callbacks_bound_on_the_whole_member(canary: str) -> tuple[Any, Callable[[], str]]:
    recorder = Recorder()
    return (prompt() | model(canary) | StrOutputParser()).with_config({"callbacks": [recorder]}), recorder.text


def listeners(canary: str) -> tuple[Any, Callable[[], str]]:
    heard: list[str] = []
    listening = model(canary).with_listeners(
        on_start=lambda run: heard.append(repr(run.inputs)), on_end=lambda run: heard.append(repr(run.outputs))
    )
    return prompt() | listening | StrOutputParser(), lambda: "".join(heard)


def a_cache_of_the_models_own(canary: str) -> tuple[Any, Callable[[], str]]:
    cache = InMemoryCache()
    return prompt() | model(canary, cache=cache) | StrOutputParser(), lambda: repr(cache._cache)


def a_callback_within_a_branch(canary: str) -> tuple[Any, Callable[[], str]]:
    recorder = Recorder()
    inner = prompt() | model(canary, callbacks=[recorder])
    return RunnableBranch((lambda v: False, inner), inner) | StrOutputParser(), recorder.text


def a_callback_within_a_parallel(canary: str) -> tuple[Any, Callable[[], str]]:
    recorder = Recorder()
    inner = prompt() | model(canary, callbacks=[recorder]) | StrOutputParser()
    return RunnableParallel(answer=inner) | (lambda v: v["answer"]), recorder.text


def a_callback_within_an_assign(canary: str) -> tuple[Any, Callable[[], str]]:
    recorder = Recorder()
    inner = prompt() | model(canary, callbacks=[recorder]) | StrOutputParser()
    return RunnablePassthrough.assign(answer=inner) | (lambda v: v["answer"]), recorder.text


def a_callback_within_a_fallback(canary: str) -> tuple[Any, Callable[[], str]]:
    recorder = Recorder()

    def down(_: Any) -> Any:
        raise ConnectionError

    member = (prompt() | RunnableLambda(down)).with_fallbacks([prompt() | model(canary, callbacks=[recorder])])
    return member | StrOutputParser(), recorder.text


def a_callback_within_a_router(canary: str) -> tuple[Any, Callable[[], str]]:
    recorder = Recorder()
    router = RouterRunnable({"one": prompt() | model(canary, callbacks=[recorder])})
    return (lambda v: {"key": "one", "input": v}) | router | StrOutputParser(), recorder.text


def a_callback_behind_retry_and_bind(canary: str) -> tuple[Any, Callable[[], str]]:
    recorder = Recorder()
    inner = model(canary, callbacks=[recorder]).bind(stop=["\n"]).with_retry(stop_after_attempt=2)
    return prompt() | inner | StrOutputParser(), recorder.text


def a_callback_of_an_alternative(canary: str) -> tuple[Any, Callable[[], str]]:
    from langchain_core.runnables import ConfigurableField

    recorder = Recorder()
    inner = model(canary, callbacks=[recorder]).configurable_alternatives(
        ConfigurableField(id="which"), other=model(canary)
    )
    return prompt() | inner | StrOutputParser(), recorder.text


def callbacks_on_a_tool(canary: str) -> tuple[Any, Callable[[], str]]:
    recorder = Recorder()

    @tool
    def look_up(query: str) -> str:
        """Look something up."""
        return "Positive"

    look_up.callbacks = [recorder]
    return (lambda v: {"query": str([*v["examples"]])}) | look_up, recorder.text


MEMBER_CHANNELS: list[MemberChannel] = [
    callbacks_on_the_model,
    callbacks_bound_by_with_config,
    callbacks_bound_on_the_whole_member,
    listeners,
    a_cache_of_the_models_own,
    a_callback_within_a_branch,
    a_callback_within_a_parallel,
    a_callback_within_an_assign,
    a_callback_within_a_fallback,
    a_callback_within_a_router,
    a_callback_behind_retry_and_bind,
    a_callback_of_an_alternative,
    callbacks_on_a_tool,
]


@pytest.mark.parametrize("make", MEMBER_CHANNELS, ids=lambda make: make.__name__)
async def test_a_channel_within_the_member_is_sealed(make: MemberChannel, sealed_of: Any, canary: str) -> None:
    member, seen = make(canary)
    member = RunnableLambda(lambda v: v) | member
    naive(member, canary).invoke(QUESTION)
    assert canary in seen(), "in the open it shows, so the check can fail"
    member, seen = make(canary)
    sealed = sealed_of(member)
    assert sealed.invoke(QUESTION) == "Positive"
    assert await sealed.ainvoke(QUESTION) == "Positive"
    assert canary not in seen()


def test_sealing_copies_and_leaves_the_callers_chain_as_it_was(canary: str, sealed_of: Any) -> None:
    recorder, cache = Recorder(), InMemoryCache()
    inner = model(canary, callbacks=[recorder], cache=cache, verbose=True)
    member = prompt() | inner
    sealed_of(member | StrOutputParser()).invoke(QUESTION)
    assert inner.cache is cache
    assert inner.callbacks == [recorder]
    assert inner.verbose is True
    assert member.last is inner


def test_a_verbose_model_prints_nothing(canary: str, sealed_of: Any, capfd: pytest.CaptureFixture[str]) -> None:
    member = PromptTemplate.from_template("{examples} {input}") | FakeListLLM(
        responses=[f"Positive {canary}"], verbose=True, callbacks=[StdOutCallbackHandler()]
    )
    sealed_of(member).invoke(QUESTION, {"callbacks": [StdOutCallbackHandler()]})
    out, err = capfd.readouterr()
    assert canary not in out + err


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
    calls: list[int] = []
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


def request(text: str) -> boundary.Request:
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


def in_a_loop_of_its_own(make: Callable[[], Any]) -> Any:
    """asyncio raises a task's SystemExit and KeyboardInterrupt out of its loop: they must not end the test run."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(asyncio.run(make()))
        except BaseException as error:
            results.append(f"surfaced: {type(error).__name__}")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("kind", FAILURES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("concurrency", [1, 2, 8])
def test_one_members_failure_is_an_abstention_and_no_one_elses(kind: type[BaseException], concurrency: int) -> None:
    member = boundary.seal(RunnableLambda(raising(kind, "b")))
    requests = [request(text) for text in "abc"]
    assert boundary.run_private(member, requests, max_concurrency=concurrency) == ["a", ABSTAIN, "c"]


@pytest.mark.parametrize(
    "kind", [kind for kind in FAILURES if kind not in (SystemExit, KeyboardInterrupt)], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("native", [True, False], ids=["async function", "function in a thread"])
@pytest.mark.filterwarnings("ignore")
def test_an_async_members_failure_is_an_abstention_and_no_one_elses(kind: type[BaseException], native: bool) -> None:
    inner = raising(kind, "b")

    async def member(values: dict[str, Any]) -> str:
        await asyncio.sleep(0)
        return inner(values)

    sealed = boundary.seal(RunnableLambda(member) if native else RunnableLambda(inner))
    requests = [request(text) for text in "abc"]
    outputs = in_a_loop_of_its_own(lambda: boundary.arun_private(sealed, requests, max_concurrency=8))
    assert outputs == ["a", ABSTAIN, "c"]


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
    assert await boundary.arun_private(member, requests, max_concurrency=8) == ["a", ABSTAIN, "c"]


def test_a_chain_that_refers_to_itself_can_be_sealed() -> None:
    class Circle(Runnable[Any, Any]):
        def __init__(self) -> None:
            self.me, self.steps = self, [self]
            self.model = model("x", callbacks=[Recorder()])

        def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
            return self.me.steps[0].model.callbacks

    boundary.seal(Circle())


def test_an_abstention_is_one_object_that_says_nothing() -> None:
    assert repr(ABSTAIN) == str(ABSTAIN) == "ABSTAIN"
    assert boundary.Abstention() is ABSTAIN
    assert not getattr(ABSTAIN, "__dict__", {})


@pytest.mark.parametrize("members", [2, 5, 70])
@pytest.mark.parametrize("rate", [1e-7, 1.0])
async def test_there_are_always_as_many_calls_as_members(members: int, rate: float, sealed_of: Any) -> None:
    """Also where the sample is empty, and also where some fail: the number of calls says nothing."""
    calls: list[int] = []
    lock = threading.Lock()

    def member(values: dict[str, Any]) -> str:
        with lock:
            calls.append(len(values["examples"]))
            if len(calls) % 3 == 0:
                raise ValueError
        return "Positive"

    sealed = sealed_of(member, members=members, rate=rate)
    sealed.invoke(QUESTION)
    assert len(calls) == members
    assert sum(calls) == (8 if rate == 1.0 else 0)
    await sealed.ainvoke(QUESTION)
    assert len(calls) == 2 * members


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
    boundary.run_private(RunnableLambda(member), requests, max_concurrency=limit)
    assert peak == limit
    peak = 0
    await boundary.arun_private(RunnableLambda(async_member), requests, max_concurrency=limit)
    assert peak == limit


async def test_outputs_keep_the_order_of_the_members() -> None:
    def member(values: dict[str, Any]) -> str:
        time.sleep(0.01 if values["input"] in "ace" else 0)
        return str(values["input"])

    requests = [request(text) for text in "abcdef"]
    assert boundary.run_private(RunnableLambda(member), requests, max_concurrency=6) == list("abcdef")
    assert await boundary.arun_private(RunnableLambda(member), requests, max_concurrency=6) == list("abcdef")


# -- contexts ----------------------------------------------------------------------------------------------------------

callers_variable: contextvars.ContextVar[str] = contextvars.ContextVar("callers_variable", default="nothing")


async def test_members_and_caller_do_not_see_each_others_context(sealed_of: Any) -> None:
    seen: list[str] = []

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
    assert boundary.current_bucket() is None


async def test_every_member_has_its_own_bucket_in_its_own_context() -> None:
    def member(values: dict[str, Any]) -> bool:
        time.sleep(0.002)
        return boundary.current_bucket() is values["examples"]

    async def async_member(values: dict[str, Any]) -> bool:
        await asyncio.sleep(0.002)
        return boundary.current_bucket() is values["examples"]

    requests = [request(text) for text in "abcdef"]
    assert boundary.run_private(RunnableLambda(member), requests, max_concurrency=3) == [True] * 6
    assert await boundary.arun_private(RunnableLambda(async_member), requests, max_concurrency=3) == [True] * 6


def test_a_members_config_is_bare(sealed_of: Any) -> None:
    configs: list[RunnableConfig] = []

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


async def test_a_fault_on_the_private_side_is_one_constant_error(
    sealed_of: Any, canary: str, canary_free: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = sealed_of(lambda _: "Positive")
    sample = sealed.ensemble.selector.sample

    def broken(rate: float | None = None) -> Any:
        buckets = sample(rate)
        raise RuntimeError(f"{buckets[0]:s} {canary}")

    monkeypatch.setattr(sealed.ensemble.selector, "sample", broken)
    for attempt in range(2):
        with pytest.raises(ReleaseFailed) as caught:
            sealed.invoke(QUESTION) if attempt == 0 else await sealed.ainvoke(QUESTION)
        canary_free(caught.value, frames=True)
        assert str(caught.value) == str(ReleaseFailed())
    assert sealed.budget.spent() == 2, "the charge stands"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_of_the_caller_passes_without_private_baggage(
    kind: type[BaseException],
    sealed_of: Any,
    canary: str,
    canary_free: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sealed = sealed_of(lambda _: "Positive")

    def interrupted(rate: float | None = None) -> Any:
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
    started, cancelled = asyncio.Event(), 0

    async def slow(values: dict[str, Any]) -> str:
        nonlocal cancelled
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return "Positive"

    sealed = sealed_of(RunnableLambda(slow), members=5, max_concurrency=3)
    before = asyncio.all_tasks()
    call = asyncio.create_task(sealed.ainvoke(QUESTION))
    await asyncio.wait_for(started.wait(), 5)
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await call
    canary_free(caught.value, frames=True)
    assert cancelled == 3
    assert asyncio.all_tasks() == before
    assert sealed.budget.spent() == 1


async def test_a_time_limit_cancels_every_member(sealed_of: Any) -> None:
    async def slow(values: dict[str, Any]) -> str:
        await asyncio.sleep(60)
        return "Positive"

    sealed = sealed_of(RunnableLambda(slow))
    sealed.line()
    before = asyncio.all_tasks()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await sealed.ainvoke(QUESTION)
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


async def test_after_a_release_nothing_private_is_held(sealed_of: Any) -> None:
    """Threads that are used again, tasks, futures and exceptions let go of the buckets."""

    def member(values: dict[str, Any]) -> str:
        if len(values["examples"]) % 2:
            raise ValueError(values)
        return "Positive"

    sealed = sealed_of(member, members=6)
    for _ in range(3):
        with contextlib.suppress(ModelUnavailable):  # when most of the six happened to fail
            sealed.invoke(QUESTION)
        with contextlib.suppress(ModelUnavailable):
            await sealed.ainvoke(QUESTION)
    await asyncio.sleep(0)
    gc.collect()
    assert not [item for item in gc.get_objects() if type(item) is Examples and len(item)]


async def test_a_chain_that_streams_to_the_member_only_gives_its_whole(sealed_of: Any, canary: str) -> None:
    async def chunks(values: AsyncIterator[Any]) -> AsyncIterator[str]:
        async for _ in values:
            for piece in ("Posi", "tive ", canary):
                yield piece

    from langchain_core.runnables import RunnableGenerator

    sealed = sealed_of(RunnableGenerator(chunks))
    assert [chunk async for chunk in sealed.astream(QUESTION)] == ["Positive"]


def test_a_release_works_in_a_forked_child(sealed_of: Any) -> None:
    """The threads that are kept for members do not survive a fork: a child starts its own."""
    sealed = sealed_of(lambda _: "Positive")
    sealed.invoke(QUESTION)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if sealed.invoke(QUESTION) == "Positive" else 2
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


def test_releases_within_members_do_not_wait_for_each_other_for_ever(sealed_of: Any) -> None:
    """A member may ask another sealed chain (a tool that does): threads must not run out while they wait."""
    inner = sealed_of(lambda _: "Positive", members=30, releases=1000, epsilon=900)
    outer = sealed_of(lambda values: inner.invoke({"input": values["input"]}), members=40)
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(outer.invoke(QUESTION)), daemon=True)
    thread.start()
    thread.join(30)
    assert done == ["Positive"]
