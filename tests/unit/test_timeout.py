"""`timeout=`: a member that hangs, or is slow, costs its own output alone; one that is refused (429) is asked again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import subprocess
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
from ears import Ears, Spy
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import tool
from ways import ask

from langchain_dpicl import (
    InvalidParameter,
    MembersAbstained,
    ModelUnavailable,
    NoisyVote,
    PoissonExampleSelector,
    PrivateEnsemble,
)
from langchain_dpicl.calls import flow, running, servers, transport
from langchain_dpicl.private import boundary, notes
from langchain_dpicl.private.boundary import ABSTAIN
from langchain_dpicl.private.copies import DEFAULT_TIMEOUT, TimeLimit
from langchain_dpicl.private.copy import Same
from langchain_dpicl.selection import Examples

BOTH = ["sync", "async"]


def request(text: str) -> boundary.MemberRequest:
    return {"input": text}, Examples([{"input": text, "output": "x"}])


def outputs(way: str, member: Any, texts: str, *, timeout: float | None, at_once: int = 8) -> list[Any]:
    chain = TimeLimit(boundary.seal(RunnableLambda(member) if callable(member) else member), timeout).prepared
    requests = [request(text) for text in texts]
    if way == "sync":
        return boundary.run_private(Same(chain), requests, max_concurrency=at_once, timeout=timeout)
    return asyncio.run(boundary.arun_private(Same(chain), requests, max_concurrency=at_once, timeout=timeout))


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
            return await running.in_thread(self.encode, output)

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
    assert sum("dpicl-member" in thread.name for thread in threading.enumerate()) > 15
    hang.set()
    deadline = time.monotonic() + 5
    while len(running._idle) <= 15 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(running._idle) > 15, "threads that come back are used again"


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
        member = TimeLimit(RunnableLambda(lambda values: values["input"]) | RunnableLambda(str.upper), 1.0).prepared
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
    left = [first]
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "dpicl-member":
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
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


@pytest.mark.parametrize("closed", ["the call", "the call around it"])
def test_no_request_begins_after_its_calls_time(closed: str) -> None:
    """It leaves the slot that it has got, and neither call counts it as under way."""
    left: list[tuple[Any, bool]] = []
    outer = running.Call(running.Calls(None, None))
    call = running.Call(running.Calls(None, outer))
    (call if closed == "the call" else outer).close()
    with pytest.raises(running.Overdue):
        running.Flight(call, lambda whose, *, clean: left.append((whose, clean)))
    assert left == [(call, True)]
    assert not call.flights
    assert not outer.flights


async def test_a_slot_is_passed_on_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[int] = []
    slot = servers.SlotGate(lambda: settled.append(1))
    monkeypatch.setattr(running, "start", lambda work: False)
    first, second = (running.Call(running.Calls(None, None)) for _ in range(2))
    await asyncio.wait_for(slot.enter(first, in_loop=True), 5)
    waiting = asyncio.create_task(slot.enter(second, in_loop=True))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    slot.leave(first, clean=False)
    assert settled == [1]
    await asyncio.wait_for(waiting, 5)


def test_a_mapping_that_hangs_does_not_keep_the_interpreter() -> None:
    code = """
import threading
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_dpicl.private import boundary
from langchain_dpicl.private.copies import TimeLimit
from langchain_dpicl.private.copy import Same
member = RunnableParallel(a=lambda v: threading.Event().wait() if v["input"] == "x" else 1, b=lambda v: v["input"])
chain = TimeLimit(member, .3).prepared
print(boundary.run_private(Same(chain), [({"input": "x"}, []), ({"input": "y"}, [])], max_concurrency=2, timeout=.3))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=25, check=True)
    assert done.stdout == "[ABSTAIN, {'a': 1, 'b': 'y'}]\n"


def test_a_function_of_a_passthrough_does_not_stop_the_event_loop(hang: threading.Event) -> None:
    member = RunnablePassthrough(lambda values: hang.wait(10) if values["input"] == "x" else None)
    assert outputs("async", member, "xa", timeout=0.5)[0] is ABSTAIN
    assert outputs("async", member, "xa", timeout=0.5)[1]["input"] == "a"


@pytest.mark.parametrize("way", BOTH)
def test_a_release_within_a_member_is_work_of_that_member(way: str, sealed_of: Any) -> None:
    slow = sealed_of(lambda _: (time.sleep(2.5), "Positive")[1], members=2, timeout=None)
    fast = sealed_of(lambda _: "Positive", members=2)
    slow.line()
    fast.invoke(QUESTION)  # loading what the first release needs is work, too

    def member(values: dict[str, Any]) -> str:
        return str((slow if values["input"] == "x" else fast).invoke({"input": "a"}))

    chain = RunnableLambda(member)
    requests = [request(text) for text in "axb"]
    if way == "sync":
        found = boundary.run_private(Same(chain), requests, max_concurrency=3, timeout=1.5)
    else:
        found = asyncio.run(boundary.arun_private(Same(chain), requests, max_concurrency=3, timeout=1.5))
    assert found == ["Positive", ABSTAIN, "Positive"]


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


def test_the_default_is_finite_where_it_can_be_kept(selector: Any) -> None:
    fake = GenericFakeChatModel(messages=itertools.repeat(AIMessage("x")))
    assert PrivateEnsemble(selector, lambda _: "x").timeout == DEFAULT_TIMEOUT
    assert PrivateEnsemble(selector, lambda _: "x", timeout=None).timeout is None
    assert PrivateEnsemble(selector, lambda _: "x", timeout=3).timeout == 3.0
    assert PrivateEnsemble(selector, fake).timeout is None


@pytest.mark.parametrize("where", ["step", "function"])
def test_a_model_that_cannot_be_ended_takes_no_limit(where: str, selector: Any) -> None:
    """What it computes goes on in its thread, and the next member's call would wait behind it."""
    fake = GenericFakeChatModel(messages=itertools.repeat(AIMessage("x")))
    member: Any = RunnableLambda(lambda values: values["input"]) | fake
    if where == "function":
        member = lambda values: fake.invoke(values["input"])  # noqa: E731
    with pytest.raises(InvalidParameter, match=r"GenericFakeChatModel.*timeout=None"):
        PrivateEnsemble(selector, member, timeout=5)


def test_a_model_with_a_rate_limiter_takes_no_limit() -> None:
    """A call would wait there for others, on its own clock."""
    with chat_server(lambda prompt: (200, {}, prompt)) as server:
        model = chat(server, rate_limiter=InMemoryRateLimiter(requests_per_second=1))
        with pytest.raises(InvalidParameter, match="rate_limiter"):
            TimeLimit(chain_of(model), 5)
        assert TimeLimit(chain_of(model), "auto").seconds is None


def test_a_client_whose_connections_carry_several_requests_is_limited_in_an_event_loop_alone() -> None:
    """HTTP/2: a thread ends a request by closing its connection, which fails the others that it carries."""
    client = httpx.Client()
    client._transport._pool._http2 = True  # type: ignore[attr-defined]  # what http2=True sets, if h2 is installed
    with chat_server(lambda prompt: (200, {}, prompt)) as server:
        TimeLimit(chain_of(chat(server)), 5).check_sync()
        limit = TimeLimit(chain_of(chat(server, http_client=client)), 5)
        with pytest.raises(InvalidParameter, match="ainvoke"):
            limit.check_sync()
    client.close()


class Asynchronous(GenericFakeChatModel):
    """As integrations are that know aiohttp alone."""

    async def _agenerate(self, *arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(0)
        return self._generate(*arguments, **named)


async def test_a_model_that_can_be_ended_in_an_event_loop_alone_is_called_there_alone(sealed_of: Any) -> None:
    model = Asynchronous(messages=itertools.repeat(AIMessage("Positive")))
    member = RunnableLambda(lambda values: values["input"]) | model
    sealed = sealed_of(member, timeout=5)
    assert await sealed.ainvoke(QUESTION) == "Positive"
    for call in (lambda: sealed.invoke(QUESTION), lambda: sealed.batch([QUESTION])):
        with pytest.raises(InvalidParameter, match="ainvoke"):
            call()
    assert sealed.budget.spent() == 1
    free = sealed_of(member)
    assert free.ensemble.timeout is None
    assert free.invoke(QUESTION) == "Positive"


# -- models behind a server --------------------------------------------------------------------------------------------


def chat(server: ChatServer, **options: Any) -> Runnable[Any, Any]:
    openai = pytest.importorskip("langchain_openai")
    return openai.ChatOpenAI(base_url=server.url, api_key="k", model="m", http_socket_options=(), **options)


def chain_of(model: Any, form: str = "step") -> Runnable[Any, Any]:
    prompt = ChatPromptTemplate.from_template("{input}")
    if form == "function":
        return RunnableLambda(lambda values: model.invoke(prompt.invoke(values)).content)
    return prompt | model | StrOutputParser()


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("form", [pytest.param("step", marks=pytest.mark.slow), "function"])
def test_a_request_is_ended_with_its_call(way: str, form: str) -> None:
    """The server sees the connection closed, and the next call begins after that."""

    def reply(prompt: str) -> Reply:
        if prompt == "x":
            time.sleep(2.5)
        return 200, {}, prompt * 100_000  # more than the socket's buffers hold, so that writing notices

    with chat_server(reply) as server:
        member = chain_of(chat(server), form)
        start = time.monotonic()
        found = outputs(way, member, "xab", timeout=1, at_once=1)
        assert time.monotonic() - start < 2.4
        assert [text is ABSTAIN or text[0] for text in found] == [True, "a", "b"]
        time.sleep(1.8)
        assert server.hung_up == ["x"]
        assert server.asked == ["x", "a", "b"], "and the client did not ask again"


@pytest.mark.parametrize("way", BOTH)
def test_a_server_that_keeps_the_connection_busy_does_not_stop_the_clock(way: str) -> None:
    """White space before the answer, a byte at a time, resets a client's own time limit; the call's it does not."""

    def reply(prompt: str) -> Reply:
        return 200, {"drip": " " * 60} if prompt == "x" else {}, prompt

    with chat_server(reply) as server:
        start = time.monotonic()
        assert outputs(way, chain_of(chat(server)), "xa", timeout=0.8) == [ABSTAIN, "a"]
        assert time.monotonic() - start < 2.5


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize(
    "before", ["HTTP/1.1 100 Continue\n\n" * 60, "HTTP/1.1 200 OK\n" + "x: y\n" * 120], ids=["100", "drip"]
)
def test_a_server_that_never_ends_its_head_does_not_stop_the_clock(way: str, before: str) -> None:
    """On a connection that is new, and on one that an earlier request has left open."""

    def reply(prompt: str) -> Reply:
        return 200, {"before": before} if prompt == "x" else {}, prompt

    for texts in ("axb", "xa"):
        start = time.monotonic()
        with chat_server(reply) as server:
            found = outputs(way, chain_of(chat(server)), texts, timeout=0.8, at_once=1)
            assert found == [ABSTAIN if text == "x" else text for text in texts]
            assert time.monotonic() - start < 4.5, "the head takes six seconds"
            while not server.hung_up and time.monotonic() - start < 6:
                time.sleep(0.01)
            assert server.hung_up == ["x"], "the server sees that nobody listens any more"


@pytest.mark.parametrize("way", BOTH)
def test_retries_and_fallbacks_of_a_member_do_not_go_on_after_its_time(way: str) -> None:
    def reply(prompt: str) -> Reply:
        time.sleep(1.2 if prompt == "x" else 0)
        return 200, {}, prompt

    with chat_server(reply) as server:
        model = chat(server)
        member = chain_of(model.with_retry().with_fallbacks([model, RunnableLambda(lambda _: AIMessage("late"))]))
        assert outputs(way, member, "xa", timeout=0.7) == [ABSTAIN, "a"]
        time.sleep(0.8)
        assert server.asked.count("x") == 1


@pytest.mark.parametrize("way", BOTH)
def test_who_hangs_over_an_open_stream_holds_nothing(way: str, hang: threading.Event) -> None:
    """Nobody reads that answer any more: the closing side ends it, and a late reader gets nothing."""
    late: list[BaseException | str] = []

    with chat_server(lambda prompt: (200, {}, prompt)) as server, httpx.Client() as client:
        transport.install(client)

        def member(values: dict[str, Any]) -> str:
            body = {"messages": [{"content": values["input"]}]}
            with client.stream("POST", f"{server.url}/chat/completions", json=body) as answer:
                if values["input"] == "x":
                    hang.wait(30)
                    try:
                        late.append(answer.read().decode())
                    except BaseException as error:
                        late.append(error)
                answer.read()
                return str(values["input"])

        start = time.monotonic()
        assert outputs(way, member, "xab", timeout=0.5, at_once=1) == [ABSTAIN, "a", "b"]
        assert time.monotonic() - start < 5
        hang.set()
        deadline = time.monotonic() + 5
        while not late and time.monotonic() < deadline:
            time.sleep(0.01)
        assert isinstance(late[0], running.Overdue)


def test_calls_outside_of_a_release_are_as_before() -> None:
    with chat_server(lambda prompt: (200, {}, prompt)) as server:
        model = chat(server)
        TimeLimit(chain_of(model), 0.01)
        TimeLimit(chain_of(model), 0.01)
        assert model.invoke("a").content == "a"
        assert asyncio.run(model.ainvoke("b")).content == "b"


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
        assert outputs(way, chain_of(chat(server)), "abcdef", timeout=1) == list("abcdef")
        assert sorted(server.asked) == sorted("abcdef" * 4)


@pytest.mark.parametrize("way", BOTH)
def test_who_is_refused_for_ever_abstains_alone_and_an_operator_who_asks_is_told(
    way: str, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(running, "PATIENCE", 0.35)
    if way == "sync":
        caplog.set_level(logging.WARNING, notes.NAME)
    with chat_server(refuses(10**6, {"Retry-After": "0.1"}, whom="x")) as server, caplog.at_level(logging.INFO):
        member = chain_of(chat(server))
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
