"""What surrounds a release: logs, warnings, tasks, globals, instrumentations, debug modes.

Logs and warnings of private calls are dropped; what lives in globals and would carry private text is refused before
anything is charged.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from channels import (
    LABELS,
    OUTPUT,
    QUESTION,
    Clinic,
    Recorder,
    Tally,
    a_member,
    found_in,
    hear,
    langsmith_from_the_environment,
    naive,
    sealed_release,
    secret_store,
    surroundings,
)
from ears import Ears, Same, Spy
from langchain_core.callbacks import BaseCallbackManager
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda
from langsmith import traceable

from langchain_dpicl import PrivacyBudget, UnsafeConfigurationError
from langchain_dpicl.private import boundary, silence

MEMBERS = 3


@pytest.fixture(scope="module")
def budget(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivacyBudget]:
    path = tmp_path_factory.mktemp("surroundings") / "budget.db"
    made = PrivacyBudget(1000, 1e-5, 250, replay=False, ledger=f"sqlite:///{path}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def store() -> Any:
    return secret_store()


@pytest.fixture
def sealed_of(budget: PrivacyBudget, store: Any) -> Callable[[Any], Any]:
    return lambda member: sealed_release(store, member, Tally(LABELS, mechanism="vote"), budget, MEMBERS)


async def invoked(runnable: Any, told: list[str]) -> None:
    told.append(repr(runnable.invoke(QUESTION)))


async def awaited(runnable: Any, told: list[str]) -> None:
    told.append(repr(await runnable.ainvoke(QUESTION)))


WAYS = pytest.mark.parametrize("way", [invoked, awaited], ids=lambda way: way.__name__)


# -- logs, warnings, standard output -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fares", ["success", "one fails", "all fail"])
@WAYS
async def test_members_leave_nothing_in_logs_and_warnings(way: Any, fares: str, sealed_of: Any) -> None:
    heard = await hear(way, naive(a_member(Clinic())))
    logged = [line for line in heard.around if line.startswith("request")]
    warned = [line for line in heard.around if "a model's warning" in line]
    assert found_in("".join(logged))
    assert found_in("".join(warned))
    model = Clinic(fares=fares)
    heard = await hear(way, sealed_of(a_member(model)))
    assert len(model.calls) == MEMBERS
    assert not [line for line in heard.around if "request" in line or "warning" in line], "not even emptied lines"
    assert found_in(heard.all()) == []


async def test_public_logs_and_warnings_go_on_during_a_release(sealed_of: Any) -> None:
    """Another thread, and the caller itself after the release, are heard as before."""

    class Signal(threading.Event, Spy):
        pass

    inside, told = Signal(), Signal()

    def member(values: Any) -> str:
        logging.getLogger("member").error(OUTPUT)
        inside.set()
        assert told.wait(5)
        return "Positive"

    heard: list[str] = []
    with surroundings(heard):
        release = threading.Thread(target=lambda: sealed_of(member).invoke(QUESTION))
        release.start()
        assert inside.wait(5)
        logging.getLogger("elsewhere").debug("public during %s", 1)
        warnings.warn("public warning", stacklevel=1)
        told.set()
        release.join()
        logging.getLogger("elsewhere").warning("public after")
    text = "\n".join(heard)
    assert all(line in text for line in ("public during 1", "public warning", "public after"))
    assert found_in(text) == []


@WAYS
async def test_a_real_clients_log_lines_are_dropped(way: Any, sealed_of: Any) -> None:
    """They tell every call's status and retries, which depend on private prompts; some clients log whole requests."""
    from langchain_openai import ChatOpenAI

    def answer(request: httpx.Request) -> httpx.Response:
        content = f"Positive {OUTPUT}"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return httpx.Response(200, content=json.dumps(body), headers={"content-type": "application/json"})

    transport = httpx.MockTransport(answer)
    llm = ChatOpenAI(
        model="m",
        api_key="k",  # type: ignore[arg-type]
        http_client=httpx.Client(transport=transport),
        http_async_client=httpx.AsyncClient(transport=transport),
    )
    member = RunnableLambda(lambda values: f"{[*values['examples']]} {values['input']}") | llm | StrOutputParser()
    assert "200 OK" in "".join((await hear(way, naive(member))).around)
    heard = await hear(way, sealed_of(member))
    assert heard.error is None
    assert "200" not in "".join(heard.around)
    assert found_in(heard.all()) == []


def test_a_warning_stays_silent_when_its_callers_catch_warnings_has_ended_before_it(canary: str) -> None:
    """A call that was given up is still running when its caller leaves the block in which the silence was laid."""
    with warnings.catch_warnings(record=True) as around:
        warnings.simplefilter("always")
        with warnings.catch_warnings():
            silence.keep_silent()
        boundary.in_private(warnings.warn, canary)
        assert around == []
        warnings.warn("public", stacklevel=1)
        assert len(around) == 1


# -- tasks -------------------------------------------------------------------------------------------------------------


async def test_tasks_hold_no_private_result() -> None:
    """A debugger's or a monitor's list of tasks shows results with the tasks' reprs."""
    tasks: list[Any] = []
    shown: list[str] = []

    class Member(Runnable[Any, Any]):
        def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
            raise NotImplementedError

        async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
            tasks.append(asyncio.current_task())
            if input["input"] == "last":
                await asyncio.sleep(0.01)
                shown.extend(map(repr, tasks))
            return "secret"

    requests: list[Any] = [({"input": name}, []) for name in ("first", "last")]
    outputs = await boundary.arun_private(Same(Member()), requests, max_concurrency=2)
    assert outputs == ["secret", "secret"]
    assert "finished" in shown[0]
    assert not [line for line in shown if "secret" in line]


# -- globals and debug modes -------------------------------------------------------------------------------------------


async def test_asyncios_debug_mode_is_refused_before_anything_is_charged(sealed_of: Any) -> None:
    """It logs every slow task with its result or its exception."""
    calls: list[int] = Ears()
    release = sealed_of(lambda _: calls.append(1) or "Positive")
    loop = asyncio.get_running_loop()
    spent = release.budget.spent()
    loop.set_debug(True)
    try:
        for ask in (release.ainvoke(QUESTION), release.abatch([QUESTION, QUESTION])):
            with pytest.raises(UnsafeConfigurationError, match="asyncio"):
                await ask
    finally:
        loop.set_debug(False)
    assert calls == []
    assert release.budget.spent() == spent
    assert await release.ainvoke(QUESTION) == "Positive"


@WAYS
async def test_an_instrumentation_of_langchain_is_refused(
    way: Any, sealed_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenInference, OpenLLMetry and MLflow patch the callback manager so that every one gets a handler of theirs."""
    plain = BaseCallbackManager.__init__
    recorder = Recorder()

    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.add_handler(recorder, True)

    release = sealed_of(a_member(Clinic()))
    spent = release.budget.spent()
    monkeypatch.setattr(BaseCallbackManager, "__init__", patched)
    assert (await hear(way, naive(a_member(Clinic())))).error is None
    assert found_in(recorder.text())
    recorder.told.clear()
    heard = await hear(way, release)
    assert isinstance(heard.error, UnsafeConfigurationError)
    assert "Recorder" in str(heard.error)
    assert found_in(recorder.text()) == []
    assert release.budget.spent() == spent


@WAYS
async def test_an_environment_in_which_langchain_refuses_every_call_costs_nothing(
    way: Any, sealed_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LANGCHAIN_TRACING asks for a tracer that is no more: calls without LangSmith fail, and all members would."""
    release = sealed_of(lambda _: "Positive")
    spent = release.budget.spent()
    monkeypatch.setenv("LANGCHAIN_TRACING", "true")
    heard = await hear(way, release)
    assert heard.error is not None
    assert release.budget.spent() == spent


@WAYS
async def test_a_traceable_function_within_a_member_is_not_traced(way: Any, sealed_of: Any) -> None:
    @traceable
    def look_up(text: str) -> str:
        return f"Positive {text}"

    def member(values: Any) -> str:
        return look_up(str([*values["examples"]]))

    with langsmith_from_the_environment(pytest.MonkeyPatch) as client:
        assert (await hear(way, naive(RunnableLambda(member)))).error is None
        assert found_in("".join(client.sent))
        client.sent.clear()
        assert (await hear(way, sealed_of(member))).error is None
        assert found_in("".join(client.sent)) == []


# -- what stays behind -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fares", ["success", "one fails"])
async def test_contexts_threads_and_tasks_are_as_before(fares: str, sealed_of: Any) -> None:
    before = contextvars.copy_context()
    tasks = asyncio.all_tasks()
    release = sealed_of(a_member(Clinic(fares=fares)))
    await release.ainvoke(QUESTION)
    release.invoke(QUESTION)
    after = contextvars.copy_context()
    changed = [variable.name for variable, value in after.items() if before.get(variable) is not value]
    assert changed == []
    assert asyncio.all_tasks() == tasks
    assert found_in(repr([*threading.enumerate()])) == []
    assert not silence.private.get()


def test_what_a_log_record_carries_beside_its_text_reaches_no_filter(canary: str) -> None:
    """``extra=`` is laid into the record after it was made, and a logger's own filters look at it."""
    seen: list[Any] = []

    def look(record: logging.LogRecord) -> bool:
        seen.append({name: getattr(record, name, None) for name in (*vars(record), "prompt", "msg", "args")})
        return True

    logger = logging.getLogger("a member's client")
    logger.addFilter(look)
    silence.keep_silent()
    try:
        boundary.in_private(lambda: logger.warning("asked %s", canary, extra={"prompt": canary}))
        assert canary not in repr(seen)
        logger.warning("asked %s", canary, extra={"prompt": canary})
        assert canary in repr(seen), "public records pass whole"
    finally:
        logger.removeFilter(look)
