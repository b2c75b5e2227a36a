"""`timeout=`: a member that hangs, or is slow, costs its own output alone; one that is refused (429) is asked again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from channels import QUESTION
from chat_server import ChatServer, Reply, chat_server
from ears import Ears, Same, Spy
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import tool
from ways import ask

from langchain_dpicl import (
    InvalidParameter,
    MembersAbstained,
    ModelUnavailable,
    NoisyVote,
    PoissonExampleSelector,
    PrivateEnsemble,
    UnsafeConfigurationError,
)
from langchain_dpicl.calls import flow, running
from langchain_dpicl.private import boundary, notes
from langchain_dpicl.private.boundary import ABSTAIN
from langchain_dpicl.private.copy import Pristine
from langchain_dpicl.private.models import DEFAULT_TIMEOUT, limit
from langchain_dpicl.selection import Examples

BOTH = ["sync", "async"]


def request(text: str) -> boundary.MemberRequest:
    return {"input": text}, Examples([{"input": text, "output": "x"}])


def outputs(way: str, member: Any, texts: str, *, timeout: float | None, at_once: int = 8) -> list[Any]:
    """What a function's calls give, all on the same one; a chain's calls have copies."""
    if callable(member):
        copies: Pristine = Same(boundary.seal(RunnableLambda(member)))
    else:
        copies = Pristine(boundary.seal(member))
        limit(copies, timeout, at_once)
    requests = [request(text) for text in texts]
    if way == "sync":
        return boundary.run_private(copies, requests, max_concurrency=at_once, timeout=timeout)
    return asyncio.run(boundary.arun_private(copies, requests, max_concurrency=at_once, timeout=timeout))


# -- functions ---------------------------------------------------------------------------------------------------------


class Hanging(threading.Event, Spy):
    pass


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """An event on which a member hangs, until the test is over."""
    event = Hanging()
    yield event
    event.set()


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.slow), 2, 8])
def test_members_that_hang_abstain_and_no_other(way: str, at_once: int, hang: threading.Event) -> None:
    """Also one at a time, where the others come after; twice as many as the event loop has threads hang."""

    def member(values: dict[str, Any]) -> str:
        if values["input"] == "x":
            hang.wait(30)
        return str(values["input"])

    texts = "x" * 3 + "abcd" + "x" * 2 + "e"
    start = time.monotonic()
    found = outputs(way, member, texts, timeout=0.4, at_once=at_once)
    assert found == [ABSTAIN if text == "x" else text for text in texts]
    assert time.monotonic() - start < 5


def test_a_coroutine_that_hangs_abstains() -> None:
    ended: list[str] = []

    async def member(values: dict[str, Any]) -> str:
        if values["input"] == "x":
            try:
                await asyncio.sleep(30)
            finally:
                ended.append("x")
        return str(values["input"])

    assert outputs("async", member, "axb", timeout=0.5) == ["a", ABSTAIN, "b"]
    assert ended == ["x"]


def test_a_coroutine_that_does_not_let_itself_be_cancelled_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "_GRACE", 0.1)
    reports: list[Any] = []

    async def member(values: dict[str, Any]) -> str:
        until = time.monotonic() + (2.5 if values["input"] == "x" else 0)
        while time.monotonic() < until:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)
        return str(values["input"])

    async def run() -> tuple[list[Any], float]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        start = time.monotonic()
        requests = [request(text) for text in "axb"]
        chain = RunnableLambda(member)
        found = await boundary.arun_private(Same(chain), requests, max_concurrency=1, timeout=0.5)
        took = time.monotonic() - start
        copied = list(found)
        await asyncio.sleep(2.2)
        assert found == copied, "what comes late changes nothing"
        return found, took

    found, took = asyncio.run(run())
    assert found == ["a", ABSTAIN, "b"]
    assert took < 2
    gc.collect()
    assert reports == []


@pytest.mark.parametrize("way", BOTH)
def test_an_answer_that_comes_late_is_an_abstention(way: str) -> None:
    """Also one that comes before anybody looks at the clock, or that a handler of the deadline makes."""

    def member(values: dict[str, Any]) -> str:
        if values["input"] == "x":
            time.sleep(0.55)
        return str(values["input"])

    for _ in range(2):
        assert outputs(way, member, "xa", timeout=0.5) == [ABSTAIN, "a"]


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_an_answer_whose_reading_hangs_is_an_abstention(
    way: str, sealed_of: Any, hang: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read on a clock of its own, which begins when the member has answered."""
    monkeypatch.setattr(running, "READING", 1.0)
    read: list[object] = []
    kept: list[object] = []

    class Slow(NoisyVote):
        def encode(self, output: object) -> int:
            time.sleep(0.4)  # longer than what is left of the member's time
            read.append(output)
            if len(read) == 1:
                hang.wait(30)
            return super().encode(output)

        async def aencode(self, output: object) -> int:
            return await asyncio.to_thread(self.encode, output)

        def aggregate(self, outputs: Any, *others: Any) -> Any:
            kept.extend(outputs)
            return super().aggregate(outputs, *others)

    sealed = sealed_of(lambda _: "Positive", vote=Slow(["Positive", "Negative"]), timeout=0.3)
    sealed_of(lambda _: "Positive").invoke(QUESTION)  # loads what a first release needs
    start = time.monotonic()
    with contextlib.suppress(MembersAbstained):
        await ask(way, sealed, QUESTION)
    assert time.monotonic() - start < 8
    assert [output is ABSTAIN for output in kept].count(True) == 1


@pytest.mark.slow
def test_hanging_members_do_not_use_the_threads_up(sealed_of: Any, hang: threading.Event) -> None:
    """Fifteen releases, one of whose members hangs for ever: the last answers like the first."""
    first: list[int] = Ears()

    def member(values: dict[str, Any]) -> str:
        first.append(1)
        if len(first) % 4 == 1:
            hang.wait(60)
        return "Positive"

    sealed = sealed_of(member, releases=15, timeout=0.2)
    assert [sealed.invoke(QUESTION) for _ in range(15)] == ["Positive"] * 15
    assert sum("dpicl-member" in thread.name for thread in threading.enumerate()) >= 15


def test_what_ends_late_tells_nobody(hang: threading.Event, canary: str, caplog: Any, monkeypatch: Any) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    monkeypatch.setattr(sys, "unraisablehook", shown.append)

    class Held:
        def __init__(self, text: str) -> None:
            self.text = text

        def __del__(self) -> None:
            pass

    def member(values: dict[str, Any]) -> str:
        hang.wait(30)
        logging.getLogger("somebody").error(canary)
        raise RuntimeError(canary, Held(canary))

    with caplog.at_level(logging.DEBUG):
        boundary.check_surroundings()
        assert outputs("sync", member, "aa", timeout=0.05) == [ABSTAIN, ABSTAIN]
        assert outputs("async", member, "aa", timeout=0.05) == [ABSTAIN, ABSTAIN]
        hang.set()
        time.sleep(0.2)
    gc.collect()
    assert shown == []
    assert canary not in caplog.text


def test_the_clock_starts_with_the_call_and_not_before(hang: threading.Event) -> None:
    """Five calls, one at a time, each of half the limit: all answer, two and a half limits after the release began."""

    def member(values: dict[str, Any]) -> str:
        time.sleep(0.4)
        return str(values["input"])

    for way in BOTH:
        assert outputs(way, member, "abcde", timeout=0.8, at_once=1) == list("abcde")


def test_the_event_loops_threads_are_not_needed(hang: threading.Event) -> None:
    """They are few and everybody's: a member would wait for them on its clock."""

    async def run() -> list[Any]:
        loop = asyncio.get_running_loop()
        blocked = [loop.run_in_executor(None, hang.wait, 30) for _ in range(64)]
        member = RunnableLambda(lambda values: values["input"]) | RunnableLambda(str.upper)
        found = await boundary.arun_private(Same(member), [request("a")] * 3, max_concurrency=3, timeout=1.0)
        hang.set()
        await asyncio.gather(*blocked)
        return found

    assert asyncio.run(run()) == ["A"] * 3


async def test_what_hangs_in_langchains_executor_takes_no_thread_from_others(hang: threading.Event) -> None:
    """Tools, parsers and embeddings run there; more of them hang than the event loop has threads."""

    @tool
    def look_up(text: str) -> str:
        """Look a text up."""
        if text == "x":
            hang.wait(30)
        return text

    async def member(values: dict[str, Any]) -> str:
        return str(await (look_up | StrOutputParser()).ainvoke({"text": values["input"]}))

    texts = "x" * 64 + "ab"
    found = await boundary.arun_private(
        Same(RunnableLambda(member)), [request(text) for text in texts], max_concurrency=66, timeout=1.5
    )
    assert found == [ABSTAIN] * 64 + ["a", "b"]
    assert await asyncio.wait_for(asyncio.to_thread(str, 1), 1) == "1"


def test_a_loop_ends_although_a_private_call_hangs_and_keeps_its_own_executor(hang: threading.Event) -> None:
    class Counted(ThreadPoolExecutor):
        count = 0

        def submit(self, *arguments: Any, **named: Any) -> Any:
            self.count += 1
            return super().submit(*arguments, **named)

    executor = Counted(1)

    async def member(values: dict[str, Any]) -> None:
        await asyncio.to_thread(hang.wait, 30)

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(executor)
        for _ in range(2):
            found = await boundary.arun_private(
                Same(RunnableLambda(member)), [request("a")], max_concurrency=1, timeout=0.2
            )
            assert found == [ABSTAIN]
        await asyncio.to_thread(str, 1)

    start = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - start < 5
    assert executor.count == 1


async def test_a_public_question_that_hangs_holds_no_other(sealed_of: Any, hang: threading.Event) -> None:
    """Each asks its own: nobody waits on their clock for another's."""
    asked: list[int] = Ears()

    def member(values: dict[str, Any]) -> str:
        asked.append(1)
        if len(asked) == 1:
            hang.wait(30)
        return "Positive"

    sealed = sealed_of(member, timeout=20)
    sealed.line()
    sealed.ensemble.doubts.asked("")
    sealed.ensemble.doubts.of("").suspected = True
    vote = NoisyVote(["Positive", "Negative"])

    def ask() -> None:
        flow.run(sealed.ensemble.check_health(QUESTION, vote))

    first = threading.Thread(target=ask, daemon=True)
    first.start()
    while not asked:
        await asyncio.sleep(0.01)
    await asyncio.wait_for(asyncio.to_thread(ask), 5)
    hang.set()
    first.join(5)


@pytest.mark.parametrize("first", [0, 2, 4])
def test_a_process_that_can_start_no_thread_goes_on_with_fewer(
    first: int, hang: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if none is left for whom a call that hangs has taken."""
    started: list[threading.Thread] = []
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "dpicl-member":
            if sum(each.is_alive() for each in started) >= first:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        begin(thread)

    def member(values: dict[str, Any]) -> str:
        if values["input"] == "x":
            hang.wait(30)
        return str(values["input"])

    monkeypatch.setattr(running, "_idle", deque())
    monkeypatch.setattr(running, "STARVED", 0.5)
    monkeypatch.setattr(threading.Thread, "start", start)
    found = boundary.run_private(
        Same(RunnableLambda(member)), [request(text) for text in "axbcd"], max_concurrency=5, timeout=0.4
    )
    assert found == (["a", ABSTAIN, "b", "c", "d"] if first else [ABSTAIN] * 5)


async def test_a_caller_that_is_cancelled_waits_for_no_clock(sealed_of: Any) -> None:
    async def slow(values: dict[str, Any]) -> str:
        await asyncio.sleep(60)
        return "Positive"

    sealed = sealed_of(RunnableLambda(slow), timeout=30)
    sealed.line()
    before = asyncio.all_tasks()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await sealed.ainvoke(QUESTION)
    assert time.monotonic() - start < 5
    assert asyncio.all_tasks() == before
    assert sealed.budget.spent() == 1


# -- public calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_a_public_call_that_hangs_is_a_model_that_is_down(way: str, sealed_of: Any, hang: Any) -> None:
    sealed = sealed_of(lambda _: (hang.wait(30), "Positive")[1], timeout=0.5)
    with pytest.raises(MembersAbstained):
        await ask(way, sealed, QUESTION)
    with pytest.raises(ModelUnavailable, match="TimeoutError"):
        await ask(way, sealed, QUESTION)
    assert sealed.budget.spent() == 1
    hang.set()
    assert await ask(way, sealed, QUESTION) == "Positive"


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_a_zero_shot_answer_that_hangs_is_a_model_that_is_down(way: str, sealed_of: Any, hang: Any) -> None:
    sealed = sealed_of(
        lambda _: (hang.wait(30), "Positive")[1], timeout=0.5, releases=1, on_exhausted="zero_shot", return_receipt=True
    )
    with contextlib.suppress(ModelUnavailable):
        await ask(way, sealed, QUESTION)
    with pytest.raises(ModelUnavailable, match="zero-shot"):
        await ask(way, sealed, {"input": "another"})


# -- what timeout= is --------------------------------------------------------------------------------------------------


@pytest.fixture
def selector(store_of: Any, records: Any) -> PoissonExampleSelector:
    return PoissonExampleSelector(store_of(records(8)), 4, rate=1.0, max_exemplars=8)


@pytest.mark.parametrize("bad", [0, -1, math.inf, math.nan, True, "1", [1]])
def test_a_time_limit_is_a_positive_number_or_none(bad: Any, selector: Any) -> None:
    with pytest.raises(InvalidParameter, match="timeout") as caught:
        PrivateEnsemble(selector, lambda _: "x", timeout=bad)
    assert caught.value.parameter == "timeout"


def test_the_default_is_finite_unless_a_model_computes_here(selector: Any) -> None:
    fake = GenericFakeChatModel(messages=itertools.repeat(AIMessage("x")))
    assert PrivateEnsemble(selector, lambda _: "x").timeout == DEFAULT_TIMEOUT
    assert PrivateEnsemble(selector, lambda _: "x", timeout=None).timeout is None
    assert PrivateEnsemble(selector, lambda _: "x", timeout=3).timeout == 3.0
    assert PrivateEnsemble(selector, fake).timeout is None


@pytest.mark.parametrize("where", ["step", "function"])
def test_a_model_that_computes_here_has_no_clock(where: str, selector: Any) -> None:
    """One call waits for another there, and its clock would count that."""
    fake = GenericFakeChatModel(messages=itertools.repeat(AIMessage("x")))
    member: Any = RunnableLambda(lambda values: values["input"]) | fake
    if where == "function":
        member = lambda values: fake.invoke(values["input"])  # noqa: E731
    with pytest.raises(InvalidParameter, match=r"None: a GenericFakeChatModel computes in this process"):
        PrivateEnsemble(selector, member, timeout=5)


@pytest.mark.parametrize("where", ["step", "function"])
def test_a_model_with_a_rate_limiter_is_refused(where: str, selector: Any) -> None:
    """A call would wait there for others, on its own clock."""
    with chat_server(lambda prompt: (200, {}, prompt)) as server:
        model = chat(server, rate_limiter=InMemoryRateLimiter(requests_per_second=1))
        with pytest.raises(UnsafeConfigurationError, match="rate_limiter"):
            PrivateEnsemble(selector, chain_of(model, where))


@pytest.mark.parametrize("way", BOTH)
def test_a_pool_of_connections_is_no_queue(way: str, selector: Any) -> None:
    """One call that holds the only connection would make the others late."""
    httpx_limits = httpx.Limits(max_connections=3)
    with chat_server(lambda prompt: (200, {}, prompt)) as server:
        client = httpx.Client(limits=httpx_limits)
        awaited = httpx.AsyncClient(limits=httpx_limits)
        given: Any = {"http_client": client} if way == "sync" else {"http_async_client": awaited}
        member = chain_of(chat(server, **given))
        with pytest.raises(InvalidParameter, match=r"a model with 3.*4 connections at least"):
            PrivateEnsemble(selector, member, max_concurrency=1)
        client.close()


# -- models behind a server --------------------------------------------------------------------------------------------


def chat(server: ChatServer, **options: Any) -> Runnable[Any, Any]:
    openai = pytest.importorskip("langchain_openai")
    return openai.ChatOpenAI(base_url=server.url, api_key="k", model="m", http_socket_options=(), **options)


def chain_of(model: Any, form: str = "step") -> Runnable[Any, Any]:
    prompt = ChatPromptTemplate.from_template("{input}")
    if form == "function":
        return RunnableLambda(lambda values: model.invoke(prompt.invoke(values)).content)
    return prompt | model | StrOutputParser()


def test_the_clients_own_limit_is_the_calls() -> None:
    """Of the client that calls have, not of the user's; a shorter one stays."""
    with chat_server(lambda prompt: (200, {}, prompt)) as server:
        steps = httpx.Timeout(900, connect=2)
        for own, expected in ((None, 7.0), (900, 7.0), (2, 2), (steps, httpx.Timeout(7, connect=2))):
            model = chat(server, timeout=own)
            copies = Pristine(chain_of(model))
            assert limit(copies, 7, 8) == 7.0
            (copied,) = (item for item in copies.items if isinstance(item, type(model)))
            for name in ("client", "async_client"):
                assert getattr(copied, name)._client.timeout == expected
                assert getattr(copied, name)._client.max_retries == 0
                assert getattr(model, name)._client.timeout == model.root_client.timeout != 7.0
            assert copied.root_async_client.timeout == expected


@pytest.mark.parametrize("way", BOTH)
def test_a_call_whose_server_is_late_abstains_alone(way: str) -> None:
    """Also if white space before the answer, a byte at a time, resets the client's own time limit."""

    def reply(prompt: str) -> Reply:
        if prompt == "y":
            time.sleep(1.6)
        return 200, {"drip": " " * 60} if prompt == "x" else {}, prompt

    with chat_server(reply) as server:
        start = time.monotonic()
        member = chain_of(chat(server, max_retries=0))
        assert outputs(way, member, "xayb", timeout=0.8, at_once=2) == [ABSTAIN, "a", ABSTAIN, "b"]
        assert time.monotonic() - start < 6


@pytest.mark.parametrize("way", BOTH)
def test_no_call_sends_a_cookie_that_another_was_given(way: str) -> None:
    """Public code keeps its cookies as before."""
    with chat_server(lambda prompt: (200, {"Set-Cookie": f"kept={prompt}"}, prompt)) as server:
        model = chat(server)
        name = "client" if way == "sync" else "async_client"
        cookies = getattr(model, name)._client._client.cookies  # type: ignore[attr-defined]
        assert outputs(way, chain_of(model), "ab", timeout=5) == ["a", "b"]
        assert not cookies
        _ = model.invoke("c") if way == "sync" else asyncio.run(model.ainvoke("c"))
        assert dict(cookies) == {"kept": "c"}
        cookies.clear()


# -- refusals (429) ----------------------------------------------------------------------------------------------------


def refuses(first: int, headers: dict[str, str], whom: str = "") -> Callable[[str], Reply]:
    """Refuses a prompt so many times; those of others never, where one is named."""
    counts: dict[str, int] = {}
    lock = threading.Lock()

    def reply(prompt: str) -> Reply:
        with lock:
            counts[prompt] = counts.get(prompt, 0) + 1
            refused = counts[prompt] <= first and prompt in (whom or prompt)
        return (429, headers, "slow down") if refused else (200, {}, prompt)

    return reply


@pytest.mark.parametrize("way", BOTH)
def test_a_refusal_is_waited_for_off_the_clock_and_asked_again(way: str) -> None:
    """Three waits, together longer than the limit: no abstention, and no request more than were refused."""
    with chat_server(refuses(3, {"Retry-After": "0.5"})) as server:
        member = chain_of(chat(server, max_retries=0))
        assert outputs(way, member, "abcdef", timeout=1) == list("abcdef")
        assert sorted(server.asked) == sorted("abcdef" * 4)


@pytest.mark.parametrize("way", BOTH)
def test_who_is_refused_for_ever_abstains_alone_and_an_operator_who_asks_is_told(
    way: str, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(running, "PATIENCE", 0.35)
    if way == "sync":
        caplog.set_level(logging.WARNING, notes.NAME)
    with chat_server(refuses(10**6, {"Retry-After": "0.1"}, whom="x")) as server, caplog.at_level(logging.INFO):
        member = chain_of(chat(server, max_retries=0))
        assert outputs(way, member, "axb", timeout=5) == ["a", ABSTAIN, "b"]
        assert server.asked.count("x") == 4, "three waits fit into the patience"
    said = [record.getMessage() for record in caplog.records if record.name.startswith("langchain_dpicl")]
    assert said == ([boundary.REFUSED] if way == "sync" else []), "at every level of the other loggers"


class Refused(Exception):
    """As other SDKs raise it."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__("slow down")
        self.response = httpx.Response(status, headers=headers)


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_refusal_that_a_client_raises_is_waited_for_too(way: str, wrapped: bool) -> None:
    calls: list[str] = []

    def member(values: dict[str, Any]) -> str:
        calls.append(values["input"])
        if calls.count(values["input"]) < 3:
            error = Refused(429, {"Retry-After": "0.6"})
            if wrapped:
                raise ValueError("an integration's own") from error
            raise error
        return str(values["input"])

    assert outputs(way, member, "ab", timeout=1) == ["a", "b"]
    assert sorted(calls) == list("aaabbb")


@pytest.mark.parametrize("error", [Refused(400), Refused(500), SystemExit(429), ValueError(429)], ids=repr)
def test_no_other_failure_is_repeated(error: BaseException) -> None:
    calls: list[str] = []

    def member(values: dict[str, Any]) -> str:
        calls.append("x")
        raise error

    assert outputs("sync", member, "a", timeout=5) == [ABSTAIN]
    assert calls == ["x"]


def test_a_public_call_that_is_refused_for_ever_is_a_model_that_is_down(sealed_of: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(running, "PATIENCE", 0.1)

    def member(values: dict[str, Any]) -> str:
        raise Refused(429, {"Retry-After": "0.06"})

    sealed = sealed_of(member)
    with pytest.raises(MembersAbstained):
        sealed.invoke(QUESTION)
    with pytest.raises(ModelUnavailable, match="Refused"):
        sealed.invoke(QUESTION)
    assert sealed.budget.spent() == 1


def test_an_interrupt_ends_the_waiting(monkeypatch: Any) -> None:
    """The caller of a release that waits for a server is not held until the patience is over."""

    def member(values: dict[str, Any]) -> str:
        raise Refused(429, {"Retry-After": "20"})

    class Interrupted(SimpleQueueOnce):
        pass

    monkeypatch.setattr(boundary, "SimpleQueue", Interrupted)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        boundary.run_private(Same(RunnableLambda(member)), [request("a")] * 3, max_concurrency=2)
    assert time.monotonic() - start < 5


class SimpleQueueOnce:
    """A queue whose first ``get`` is interrupted, as Ctrl-C does it."""

    def __init__(self) -> None:
        import queue

        self.queue: Any = queue.SimpleQueue()
        self.interrupted = False

    def put(self, item: Any) -> None:
        self.queue.put(item)

    def get(self, timeout: float | None = None) -> Any:
        if not self.interrupted:
            self.interrupted = True
            time.sleep(0.1)
            raise KeyboardInterrupt
        return self.queue.get(timeout=timeout)
