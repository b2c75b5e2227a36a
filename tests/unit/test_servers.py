"""`ModelServers`: a server that dies, or is gone, changes no output; and no call decides where another one goes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from channels import QUESTION
from chat_server import ChatServer, Reply, chat_server
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from ways import ask

from langchain_dpicl import InvalidConfiguration, InvalidParameter, MembersAbstained, ModelServers, ModelUnavailable
from langchain_dpicl.calls import running
from langchain_dpicl.calls import servers as servers_of_calls
from langchain_dpicl.calls.servers import Servers, SlotGate
from langchain_dpicl.cli import main
from langchain_dpicl.private import boundary
from langchain_dpicl.private.boundary import ABSTAIN
from langchain_dpicl.private.copies import TimeLimit
from langchain_dpicl.private.copy import Same
from langchain_dpicl.selection import Examples
from langchain_dpicl.serving.config import read

pytest.importorskip("langchain_openai")
BOTH = ["sync", "async"]


def echo(prompt: str) -> Reply:
    return 200, {}, prompt.upper()


def after(seconds: float) -> Callable[[str], Reply]:
    def reply(prompt: str) -> Reply:
        time.sleep(seconds)
        return echo(prompt)

    return reply


slowly = after(0.2)


@contextlib.contextmanager
def running_servers(*replies: Callable[[str], Reply]) -> Iterator[list[ChatServer]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(chat_server(reply)) for reply in replies]


def place(server: ChatServer) -> str:
    return server.url.removeprefix("http://").removesuffix("/v1")


def model_on(found: list[ChatServer], **how: Any) -> ModelServers:
    return ModelServers([each.url for each in found], "m", **how)


def chain_of(model: Any) -> Any:
    return ChatPromptTemplate.from_template("{input}") | model | StrOutputParser()


def outputs(way: str, model: Any, texts: str, timeout: float | None = 5.0) -> list[Any]:
    chain = TimeLimit(boundary.seal(chain_of(model)), timeout).prepared
    requests: list[boundary.MemberRequest] = [({"input": text}, Examples([{"input": text}])) for text in texts]
    how: dict[str, Any] = {"max_concurrency": 16, "timeout": timeout}
    if way == "sync":
        return boundary.run_private(Same(chain), requests, **how)
    return asyncio.run(boundary.arun_private(Same(chain), requests, **how))


def draws(monkeypatch: pytest.MonkeyPatch, value: Callable[[int], float]) -> None:
    counted = itertools.count()

    class Drawn:
        def uniforms(self, size: int) -> Any:
            """Waits so far apart that no number of slots changes their order."""
            order = np.argsort([value(next(counted)) for _ in range(size)], kind="stable")
            return np.exp(-1e-6 * 100.0 ** np.argsort(order))

    monkeypatch.setattr(servers_of_calls, "SecureRandomness", Drawn)


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call draws the servers in the order in which they were given."""
    draws(monkeypatch, lambda i: i)


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two servers one call draws the first, the next one the second."""
    draws(monkeypatch, lambda i: (i + i // 2) % 2)


# -- servers that die --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", BOTH)
def test_a_server_that_dies_in_the_middle_of_a_release_changes_no_output(way: str, in_turn: None) -> None:
    """The calls under way there are repeated, the others are not; those that come later go to the one that lives."""
    texts = "abcdefghijkl"

    def first(prompt: str) -> Reply:
        if len(found[0].asked) == 2:
            found[0].kill()
        return slowly(prompt)

    with running_servers(first, echo) as found:
        model = model_on(found, concurrency=2).chat_model()
        assert outputs(way, model, texts) == list(texts.upper())
        assert len(found[0].asked) == 2
        assert sorted(found[1].asked) == list(texts)
        assert outputs(way, model, texts) == list(texts.upper())
        assert len(found[0].asked) == 2


@pytest.mark.parametrize("way", BOTH)
def test_a_repeated_call_is_alone_at_its_server(way: str, in_order: None) -> None:
    at_once: list[int] = []
    under_way: list[int] = []

    def first(prompt: str) -> Reply:
        if len(found[0].asked) == 4:
            found[0].kill()
        time.sleep(0.3)
        return echo(prompt)

    def second(prompt: str) -> Reply:
        under_way.append(1)
        at_once.append(len(under_way))
        time.sleep(0.03)
        under_way.pop()
        return echo(prompt)

    with running_servers(first, second) as found:
        assert outputs(way, model_on(found, concurrency=8).chat_model(), "abcd") == list("ABCD")
    assert at_once == [1, 1, 1, 1]


@pytest.mark.parametrize("way", BOTH)
def test_a_prompt_that_kills_every_server_changes_no_other_output(way: str, in_order: None) -> None:
    """It reads two of three servers, the second one alone, and abstains."""

    def reply(prompt: str) -> Reply:
        if prompt == "x":
            time.sleep(0.1)
            next(each for each in reversed(found) if "x" in each.asked).kill()
        return slowly(prompt)

    with running_servers(reply, reply, reply) as found:
        texts = "axbcde"
        given = outputs(way, model_on(found, concurrency=8).chat_model(), texts)
        assert given == [ABSTAIN if text == "x" else text.upper() for text in texts]
        assert sum(each.asked.count("x") for each in found) == 2


def test_without_its_being_alone_that_prompt_would_change_them(in_order: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation that the test above must notice."""
    enter = SlotGate.enter
    monkeypatch.setattr(SlotGate, "enter", lambda self, call, in_loop, alone=False: enter(self, call, in_loop))
    with pytest.raises(AssertionError):
        test_a_prompt_that_kills_every_server_changes_no_other_output("sync", in_order)


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_if_all_servers_die_members_abstain_and_nothing_private_is_told(
    way: str, sealed_of: Any, canary: str, caplog: Any, canary_free: Any
) -> None:
    def reply(prompt: str) -> Reply:
        if len(found[0].asked) + len(found[1].asked) > 2:
            for each in found:
                each.kill()
        return slowly("Positive")

    with running_servers(reply, reply) as found, caplog.at_level(logging.DEBUG):
        template = ChatPromptTemplate.from_template("{input} {examples}")
        sealed = sealed_of(template | model_on(found).chat_model() | StrOutputParser())
        with pytest.raises(MembersAbstained) as caught:
            await ask(way, sealed, QUESTION)
        assert sealed.budget.spent() == 1
        assert any(canary in prompt for each in found for prompt in each.asked)
        canary_free(caught.value)
        assert canary not in caplog.text
        with pytest.raises(ModelUnavailable, match="ConnectionError"):
            await ask(way, sealed, QUESTION)
        assert sealed.budget.spent() == 1, "a question of the model's health costs nothing"


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize(
    ("statuses", "answer", "asked"),
    [
        ((503, 503, 200), "A", 3),  # both are starting
        ((500, 200, 200), "A", 2),
        ((500, 503, 200), "A", 3),
        ((500, 500, 200), ABSTAIN, 2),  # two deaths
        ((400, 200, 200), ABSTAIN, 1),  # the request's own fault
        ((503, 503, 503), ABSTAIN, 3),
    ],
)
def test_statuses(way: str, statuses: tuple[int, ...], answer: Any, asked: int, in_order: None) -> None:
    def replies(status: int) -> Callable[[str], Reply]:
        return lambda prompt: (status, {}, prompt.upper())

    with running_servers(*map(replies, statuses)) as found:
        assert outputs(way, model_on(found).chat_model(), "a") == [answer]
        assert sum(len(each.asked) for each in found) == asked


@pytest.mark.parametrize("way", BOTH)
def test_an_answer_that_breaks_off_is_asked_for_elsewhere(way: str, in_order: None) -> None:
    """Its head has come, with the status 200."""

    def reply(prompt: str) -> Reply:
        threading.Timer(0.2, found[0].kill).start()
        return 200, {"drip": " " * 40}, prompt

    with running_servers(reply, echo) as found:
        assert outputs(way, model_on(found).chat_model(), "a") == ["A"]
        assert found[0].asked == found[1].asked == ["a"]


# -- clocks and slots --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", BOTH)
def test_a_repeated_call_has_all_of_its_time(way: str, in_order: None) -> None:
    def reply(prompt: str) -> Reply:
        time.sleep(0.5)
        found[0].kill()
        return echo(prompt)

    with running_servers(reply, after(0.5)) as found:
        assert outputs(way, model_on(found).chat_model(), "a", timeout=0.8) == ["A"]


def test_a_call_that_takes_too_long_is_repeated_nowhere(in_order: None) -> None:
    with running_servers(after(0.9), echo) as found:
        assert outputs("sync", model_on(found).chat_model(), "a", timeout=0.4) == [ABSTAIN]
        assert found[1].asked == []


@pytest.mark.parametrize("way", BOTH)
def test_a_server_has_no_more_calls_at_once_than_it_may_and_waiting_takes_no_time(way: str) -> None:
    under_way: list[int] = []
    at_once: list[int] = []

    def reply(prompt: str) -> Reply:
        under_way.append(1)
        at_once.append(len(under_way))
        time.sleep(0.3)
        under_way.pop()
        return echo(prompt)

    with running_servers(reply) as found:
        assert outputs(way, model_on(found, concurrency=2).chat_model(), "abcdef", timeout=0.6) == list("ABCDEF")
    assert max(at_once) == 2


async def test_slots_go_in_turn_and_a_call_that_is_alone_has_all_of_them() -> None:
    gate = SlotGate(slots=2)
    calls = [running.Call(running.Calls(None, None)) for _ in range(6)]
    entered: list[int] = []

    async def enter(i: int, alone: bool = False) -> None:
        await gate.enter(calls[i], True, alone)
        entered.append(i)

    async def leave(i: int) -> list[int]:
        gate.leave(calls[i], clean=False)
        await asyncio.sleep(0.01)
        return entered

    tasks = [asyncio.create_task(enter(i, alone=i in (2, 3))) for i in range(6)]
    await asyncio.sleep(0.01)
    assert entered == [0, 1]
    await enter(0)
    assert await leave(0) == [0, 1, 0], "the call's other request goes on"
    assert await leave(0) == [0, 1, 0], "one slot is free, and the next in turn needs both"
    tasks[3].cancel()
    assert await leave(1) == [0, 1, 0, 2]
    assert await leave(2) == [0, 1, 0, 2, 4, 5], "who was cancelled stops nobody"


def test_a_call_draws_its_servers_by_their_slots_alone() -> None:
    """Also while one has calls that wait. 4,000 draws, false alarm below 1e-8: six standard deviations are 164."""
    gates = {"a": SlotGate(slots=1), "b": SlotGate(slots=3)}
    some = Servers(gates)
    busy = running.Call(running.Calls(None, None))
    asyncio.run(gates["a"].enter(busy, True))
    drawn = [some.route(running.Call(running.Calls(None, None))).address for _ in range(4000)]
    assert abs(drawn.count("a") - 1000) < 164
    assert some.route(busy) is some.route(busy), "one draw for all requests of a call"


# -- outside of releases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_calls_of_no_release_go_to_the_first_server_that_answers(way: str, in_order: None) -> None:
    import openai

    with running_servers(echo, lambda prompt: (500, {}, ""), echo) as found:
        model = model_on(found).chat_model()
        found[0].kill()
        assert (await ask(way, model, "hello")).content == "HELLO"
        assert [each.asked for each in found] == [[], ["hello"], ["hello"]]
        for each in found:
            each.kill()
        with pytest.raises(openai.APIConnectionError):
            await ask(way, model, "hello")


def test_health_names_what_is_wrong() -> None:
    with running_servers(echo, echo, echo) as found:
        model = model_on(found)
        assert model.health() == dict.fromkeys(model.addresses, "")
        found[0].kill()
        found[1].models = ("other",)
        health = model.health()
    assert health == {
        found[0].url: "no answer: ConnectError",
        found[1].url: "this one serves 'other'",
        found[2].url: "",
    }


def test_an_addresss_path_is_in_no_message_and_in_no_log(caplog: Any) -> None:
    """It may be a gateway's key."""
    with running_servers(echo, echo) as found:
        addresses = [each.url.replace("/v1", "/CANARY/v1") for each in found]
        found[1].kill()
        model = ModelServers(addresses, "m")
        assert model.addresses == tuple(addresses)
        said = [repr(model)]
        for models in (("other",), ()):
            found[0].models = models
            with pytest.raises(InvalidParameter) as caught:
                ModelServers(addresses, "m")
            said.append(str(caught.value))
        found[0].kill()
        with pytest.raises(ModelUnavailable) as down:
            ModelServers(addresses, "m")
        said.append(str(down.value))
    assert all(place(found[0]) in each for each in said)
    assert "CANARY" not in " ".join([*said, caplog.text])


# -- bad input ---------------------------------------------------------------------------------------------------------

URL = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("parameter", "addresses", "how"),
    [
        ("addresses", [], {}),
        ("addresses", URL, {}),
        ("addresses", [URL, "HTTP://127.0.0.1:9/v1/"], {}),
        ("addresses", ["ftp://127.0.0.1"], {}),
        ("addresses", ["127.0.0.1:9"], {}),
        ("addresses", [None], {}),
        ("addresses", ["http://me:secret@127.0.0.1:9/v1"], {}),
        ("concurrency", [URL], {"concurrency": 0}),
        ("concurrency", [URL], {"concurrency": [1, 2]}),
        ("concurrency", [URL], {"concurrency": True}),
        ("model", [URL], {"model": ""}),
    ],
)
def test_bad_input_is_named(parameter: str, addresses: Any, how: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        ModelServers(addresses, **{"model": "m", **how})
    assert caught.value.parameter == parameter
    assert "secret" not in str(caught.value)


def test_a_server_of_another_model_is_refused_and_one_that_is_down_is_logged(caplog: Any) -> None:
    with running_servers(echo, echo) as found:
        found[1].models = ("other",)
        with pytest.raises(InvalidParameter, match="this one serves 'other'") as caught:
            model_on(found)
        assert caught.value.value == place(found[1])
        found[1].kill()
        model = model_on(found, api_key="hush")
        assert f"does not answer: {place(found[1])}" in caplog.text
        assert "hush" not in repr(model) + repr(model.chat_model()) + repr(model.llm())
        found[0].kill()
        with pytest.raises(ModelUnavailable, match=place(found[0])):
            model_on(found)


# -- in a server's file ------------------------------------------------------------------------------------------------


def file_with(folder: Path, model: dict[str, Any], **release: Any) -> Path:
    (folder / "tickets.jsonl").write_text('{"text": "a", "label": "b"}\n')
    release = release or {"kind": "vote", "labels": ["b", "c"]}
    given = {"store": {"data": "tickets.jsonl"}, "release": release, "model": model}
    (path := folder / "server.yaml").write_text(
        json.dumps({**given, "budget": {"epsilon": 1, "delta": 1e-5, "releases": 10}})
    )
    return path


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"url": [URL]}, "model.name: the model's name"),
        ({"name": "m", "url": []}, "model.url: .* at least one address"),
        ({"name": "m", "url": [URL, URL]}, "model.url: .* number 2 is there before"),
        ({"name": "m", "url": [URL], "concurrency": 0}, "model.concurrency: .* >= 1"),
        ({"name": "m", "url": URL, "concurrency": 2}, "model: leave out concurrency"),
    ],
)
def test_a_file_names_its_mistake(model: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match=words):
        read(file_with(tmp_path, model))


def test_documents_take_one_server(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="documents take one server"):
        read(file_with(tmp_path, {"name": "m", "url": [URL]}, kind="documents", end=["</s>"]))


def test_the_models_of_a_file_share_their_servers(tmp_path: Path) -> None:
    with running_servers(echo, echo) as found:
        about = {"name": "m", "url": [each.url for each in found], "concurrency": [2, 3]}
        choice = read(file_with(tmp_path, about)).model.choice
        greedy, sampling = choice.load(temperature=0), choice.load(temperature=0.9)
        assert greedy.invoke("a").content == sampling.invoke("a").content == "A"
        of = [each.root_client._client._transport._servers for each in (greedy, sampling)]  # type: ignore[attr-defined]
        assert of[0] is of[1]


# -- on the command line -----------------------------------------------------------------------------------------------

ANSWER = "answer --data tickets.jsonl --epsilon 300 --releases 30 --members 10 --shots 2 --mode keywords-joint --k 1"


@pytest.fixture
def tickets(unthinking: None, tmp_path: Path) -> None:
    rows = [{"text": f"text {i}", "label": "ab"[i % 2]} for i in range(60)]
    (tmp_path / "tickets.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_a_command_takes_several_servers(tickets: None, capsys: Any) -> None:
    """One of them is gone at the second answer."""
    asked = [0]
    with running_servers(*[lambda prompt: (200, {}, "spray")] * 2) as found:
        where = [option for each in found for option in ("--model-url", each.url)]
        for question in ("a spray or an inhaler", "an inhaler or a spray"):
            command = [*ANSWER.split(), *where, "--model", "m", "--question", question, "--json"]
            assert main(command) == 0
            (answered,) = json.loads(capsys.readouterr().out)["answers"]
            assert answered["keywords"] == ["spray"]
            asked.append(sum(len(each.asked) for each in found))
            found[1].kill()
    assert asked[2] == 2 * asked[1] > 2 * 10


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--model-url", URL], "--model=None is not allowed: the model's name"),
        (["--model", "m", "--model-url", URL], "--model-url='http://127.0.0.1:9/v1' is not allowed: addresses that"),
        (["--model", "m", "--model-url", "127.0.0.1"], "--model-url='127.0.0.1' is not allowed: http or https"),
        (["--model", "m", "--model-url", "http://127.0.0.1:8/v1"], "no server of 'm' answers: 127.0.0.1:9 (no answer"),
    ],
)
def test_a_command_names_its_mistake(more: list[str], words: str, tickets: None, capsys: Any) -> None:
    assert main([*ANSWER.split(), "--model-url", URL, *more, "--question", "a"]) == 1
    assert words in capsys.readouterr().err
