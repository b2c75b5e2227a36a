"""What a caller can open: callbacks, tracers, streams and collectors see the request and the release, nothing else.

Each channel is tried on a naive chain first, where it must show a secret, so that a channel that hears nothing cannot
pass; then on sealed releases, however the members fare.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from channels import (
    EXEMPLAR,
    LABELS,
    QUESTION,
    SECRETS,
    VOTE,
    Babbling,
    Channel,
    Clinic,
    Recorder,
    RecordingClient,
    Tally,
    Telling,
    a_member,
    a_sampler,
    every_run,
    found_in,
    hear,
    langsmith_from_the_environment,
    naive,
    sealed_release,
    secret_store,
)
from langchain_core.callbacks import UsageMetadataCallbackHandler, get_usage_metadata_callback
from langchain_core.runnables import (
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    chain,
)
from langchain_core.tracers.context import collect_runs, tracing_v2_enabled
from langchain_core.tracers.langchain import LangChainTracer
from langsmith.run_helpers import traceable, tracing_context
from ways import WAYS, ask

from langchain_dpicl import (
    EmbeddingMean,
    Keywords,
    PrivacyBudget,
)
from langchain_dpicl.errors import MembersAbstained, ReleaseFailed

MEMBERS = 4
AGGREGATORS: dict[str, Callable[[], Any]] = {
    "vote": lambda: Tally(LABELS, mechanism="vote"),
    "embedding": lambda: EmbeddingMean(Telling(), ["a good answer", "a bad answer"]),
    "keywords": lambda: Keywords.joint_em(["positive", "negative", "neutral"], 2),
}


@pytest.fixture(scope="module")
def budgets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, PrivacyBudget]]:
    """One budget for each kind of release, whose plan is solved once."""
    folder = tmp_path_factory.mktemp("budgets")
    made = {
        kind: PrivacyBudget(1000, 1e-5, 250, replay=False, ledger=f"sqlite:///{folder / kind}.db", name=kind)
        for kind in AGGREGATORS
    }
    yield made
    for budget in made.values():
        budget.close()


@pytest.fixture(scope="module")
def store() -> Any:
    return secret_store()


@pytest.fixture
def sealed_as(budgets: dict[str, PrivacyBudget], store: Any) -> Callable[..., Any]:
    def make(member: Any, kind: str = "vote") -> Any:
        return sealed_release(store, member, AGGREGATORS[kind](), budgets[kind], MEMBERS)

    return make


# -- the channels ------------------------------------------------------------------------------------------------------


def callbacks_of(way: str) -> Channel:
    async def channel(runnable: Any, told: list[str]) -> None:
        recorder = Recorder()
        try:
            told.append(repr(await ask(way, _Configured(runnable, {"callbacks": [recorder]}), QUESTION)))
        finally:
            told.append(recorder.text())

    channel.__name__ = f"callbacks_of_{way}"
    return channel


class _Configured:
    """Passes a configuration with every call (`with_config` would bind it, which is another channel)."""

    def __init__(self, runnable: Any, config: Any) -> None:
        self.runnable, self.config = runnable, config

    def __getattr__(self, way: str) -> Any:
        return lambda given: getattr(self.runnable, way)(given, self.config)


def around(wrap: Callable[[Any], Any], name: str, *, given: bool = True) -> Channel:
    """Ask what a function makes of the Runnable, under a recording callback (`given`, or one that ``wrap`` binds)."""

    async def channel(runnable: Any, told: list[str]) -> None:
        recorder = Recorder()
        wrapped = wrap(runnable) if given else wrap(runnable, recorder)  # type: ignore[call-arg]
        try:
            told.append(repr(await wrapped.ainvoke(QUESTION, {"callbacks": [recorder]} if given else None)))
        finally:
            told.append(recorder.text())

    channel.__name__ = name
    return channel


def a_function_around(runnable: Any) -> Any:
    """Called without a configuration: LCEL hands the parent's over in a context variable."""

    @chain
    async def parent(values: Any) -> Any:
        return await runnable.ainvoke(values)

    return parent


def a_blocking_function_around(runnable: Any) -> Any:
    return RunnableLambda(lambda values: runnable.invoke(values))


WRAPPED = [
    around(a_function_around, "a_function_of_a_traced_parent"),
    around(a_blocking_function_around, "a_blocking_function_of_a_traced_parent"),
    around(lambda r: RunnablePassthrough() | r | (lambda a: {"answer": a}), "a_step_of_a_traced_parent"),
    around(lambda r: RunnableParallel(one=r, other=RunnablePassthrough()), "within_a_parallel"),
    around(lambda r: RunnableBranch((lambda _: True, r), r), "within_a_branch"),
    around(lambda r: RunnablePassthrough.assign(answer=r), "within_an_assign"),
    around(lambda r: r.with_retry(stop_after_attempt=2, wait_exponential_jitter=False), "behind_a_retry"),
    around(lambda r: r.bind(), "behind_a_bind"),
    around(lambda r: r.with_fallbacks([RunnableLambda(lambda _: "Positive")]), "behind_a_fallback"),
    around(lambda r, heard: r.with_config(callbacks=[heard], tags=["mine"]), "callbacks_bound", given=False),
]


async def listeners_bound(runnable: Any, told: list[str]) -> None:
    bound = runnable.with_listeners(
        on_start=lambda run: told.append(every_run(run)),
        on_end=lambda run: told.append(every_run(run)),
        on_error=lambda run: told.append(every_run(run)),
    )
    told.append(repr(bound.invoke(QUESTION)))


async def async_listeners_bound(runnable: Any, told: list[str]) -> None:
    async def hear_run(run: Any) -> None:
        told.append(every_run(run))

    bound = runnable.with_alisteners(on_start=hear_run, on_end=hear_run, on_error=hear_run)
    told.append(repr(await bound.ainvoke(QUESTION)))


async def collected_runs(runnable: Any, told: list[str]) -> None:
    with collect_runs() as collector:
        try:
            await runnable.ainvoke(QUESTION)
        finally:
            told += map(every_run, collector.traced_runs)


async def events_v1(runnable: Any, told: list[str]) -> None:
    async for event in runnable.astream_events(QUESTION, version="v1"):
        told.append(repr(event))


async def events_v2(runnable: Any, told: list[str]) -> None:
    async for event in runnable.astream_events(QUESTION, version="v2"):
        told.append(repr(event))


async def a_stream_log(runnable: Any, told: list[str]) -> None:
    async for patch in runnable.astream_log(QUESTION):
        told.append(repr(patch))


async def langsmith_by_environment(runnable: Any, told: list[str]) -> None:
    with langsmith_from_the_environment(pytest.MonkeyPatch) as client:
        try:
            await runnable.ainvoke(QUESTION)
        finally:
            await asyncio.sleep(0.01)
            told += client.sent


async def langsmith_by_environment_with_opentelemetry(runnable: Any, told: list[str]) -> None:
    with langsmith_from_the_environment(pytest.MonkeyPatch, LANGSMITH_OTEL_ENABLED="true") as client:
        try:
            runnable.invoke(QUESTION)
        finally:
            told += client.sent


async def langsmith_by_context(runnable: Any, told: list[str]) -> None:
    client = RecordingClient()
    with tracing_context(enabled=True, client=client):
        try:
            await runnable.ainvoke(QUESTION)
        finally:
            told += client.sent


async def langsmith_by_a_traceable_function(runnable: Any, told: list[str]) -> None:
    client = RecordingClient()

    @traceable(client=client)
    async def parent(values: Any) -> Any:
        return await runnable.ainvoke(values)

    with tracing_context(enabled=True, client=client):
        try:
            await parent(QUESTION)
        finally:
            told += client.sent


async def langsmith_by_tracing_v2_enabled(runnable: Any, told: list[str]) -> None:
    client = RecordingClient()
    with tracing_v2_enabled(client=client):
        try:
            await runnable.ainvoke(QUESTION)
        finally:
            await asyncio.sleep(0.01)
            told += client.sent


async def langsmith_by_a_tracer(runnable: Any, told: list[str]) -> None:
    client = RecordingClient()
    try:
        await runnable.ainvoke(QUESTION, {"callbacks": [LangChainTracer(client=client)]})
    finally:
        await asyncio.sleep(0.01)
        told += client.sent


async def usage_by_context(runnable: Any, told: list[str]) -> None:
    with get_usage_metadata_callback() as usage:
        try:
            told.append(repr(await runnable.ainvoke(QUESTION)))
        finally:
            told.append(repr(usage.usage_metadata))


async def usage_by_handler(runnable: Any, told: list[str]) -> None:
    usage = UsageMetadataCallbackHandler()
    try:
        told.append(repr(await runnable.ainvoke(QUESTION, {"callbacks": [usage]})))
    finally:
        told.append(repr(usage.usage_metadata))


CHANNELS: list[Channel] = [
    *map(callbacks_of, WAYS),
    *WRAPPED,
    listeners_bound,
    async_listeners_bound,
    collected_runs,
    events_v1,
    events_v2,
    a_stream_log,
    langsmith_by_environment,
    langsmith_by_environment_with_opentelemetry,
    langsmith_by_context,
    langsmith_by_a_traceable_function,
    langsmith_by_tracing_v2_enabled,
    langsmith_by_a_tracer,
    usage_by_context,
    usage_by_handler,
]
BLOCKING = {"callbacks_of_invoke", "callbacks_of_batch", "callbacks_of_stream", "listeners_bound"} | {
    "a_blocking_function_of_a_traced_parent",
    "langsmith_by_environment_with_opentelemetry",
}
CANCELLABLE = [channel for channel in CHANNELS if channel.__name__ not in BLOCKING]  # type: ignore[attr-defined]
BOUND_TO_THE_WHOLE = {"listeners_bound", "async_listeners_bound"}  # on a naive chain they hear of the whole alone, too


def name_of(channel: Any) -> str:
    return str(channel.__name__)


def clinic(fares: str, kind: str = "vote") -> Clinic:
    return Clinic(fares=fares)


@pytest.mark.parametrize("channel", CHANNELS, ids=name_of)
async def test_on_a_naive_chain_the_channel_shows_secrets(channel: Channel) -> None:
    open_chain = naive(a_member(clinic("success")))
    if name_of(channel) in BOUND_TO_THE_WHOLE:
        open_chain = RunnableLambda(lambda values: {"answer": "Positive", "vote": VOTE})
    heard = await hear(channel, open_chain)
    assert heard.error is None
    assert found_in("\n".join(heard.told)), "the channel hears what it should, so the other tests can fail"


@pytest.mark.parametrize("kind", AGGREGATORS)
@pytest.mark.parametrize("channel", CHANNELS, ids=name_of)
async def test_a_release_shows_itself_and_no_secret(channel: Channel, kind: str, sealed_as: Any) -> None:
    model = clinic("success")
    heard = await hear(channel, sealed_as(a_member(model), kind))
    assert heard.error is None
    assert len(model.calls) == MEMBERS, "the members did see the examples"
    told = "\n".join(heard.told)
    if not name_of(channel).startswith("usage"):
        assert any(word in told for word in ("Positive", "a good answer", "a bad answer", "neutral", "negative"))
    assert found_in(heard.all()) == []


@pytest.mark.parametrize("channel", CHANNELS, ids=name_of)
async def test_a_failing_member_shows_in_no_channel(channel: Channel, sealed_as: Any) -> None:
    heard = await hear(channel, naive(a_member(clinic("one fails"))))
    if name_of(channel) not in ("behind_a_fallback", "behind_a_retry"):
        assert heard.error is not None
        assert found_in(heard.all()), "on the naive chain the failure shows"
    model = clinic("one fails")
    heard = await hear(channel, sealed_as(a_member(model)))
    assert heard.error is None
    assert len(model.calls) == MEMBERS
    assert found_in(heard.all()) == []


@pytest.mark.parametrize("channel", CHANNELS, ids=name_of)
async def test_members_that_all_fail_show_one_constant_error(channel: Channel, sealed_as: Any) -> None:
    heard = await hear(channel, sealed_as(a_member(clinic("all fail"))))
    if name_of(channel) != "behind_a_fallback":
        assert isinstance(heard.error, MembersAbstained)
        assert str(heard.error) == str(MembersAbstained())
    assert found_in(heard.all()) == []


@pytest.mark.parametrize("channel", CANCELLABLE, ids=name_of)
async def test_a_cancelled_call_shows_nothing(channel: Channel, sealed_as: Any) -> None:
    model = clinic("hangs")
    heard = await hear(channel, sealed_as(a_member(model)), cancel_when=lambda: len(model.calls) == MEMBERS)
    assert isinstance(heard.error, asyncio.CancelledError)
    assert len(model.calls) == MEMBERS
    assert found_in(heard.all()) == []


@pytest.mark.parametrize("channel", CANCELLABLE, ids=name_of)
async def test_a_call_that_takes_too_long_shows_nothing(channel: Channel, sealed_as: Any) -> None:
    model = clinic("hangs")

    async def limited(runnable: Any, told: list[str]) -> None:
        async def end(limit: asyncio.Timeout) -> None:
            while len(model.calls) < MEMBERS:
                await asyncio.sleep(0.002)
            limit.reschedule(asyncio.get_running_loop().time())

        async with asyncio.timeout(None) as limit:
            ending = asyncio.create_task(end(limit))
            await channel(runnable, told)
            await ending

    heard = await hear(limited, sealed_as(a_member(model)))
    assert isinstance(heard.error, TimeoutError)
    assert len(model.calls) == MEMBERS
    assert found_in(heard.all()) == []


@pytest.mark.parametrize("kind", ["embedding", "keywords"])
@pytest.mark.parametrize("fares", ["one fails", "all fail"])
@pytest.mark.parametrize("channel", [callbacks_of("invoke"), events_v2, collected_runs], ids=name_of)
async def test_failures_show_in_no_other_kind_of_release(
    channel: Channel, fares: str, kind: str, sealed_as: Any
) -> None:
    model = clinic(fares)
    heard = await hear(channel, sealed_as(a_member(model), kind))
    assert isinstance(heard.error, MembersAbstained | None)
    assert len(model.calls) == MEMBERS
    assert found_in(heard.all()) == []


# -- a sampler ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivacyBudget]:
    """One budget for all samplers, whose plan is solved once."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.db"
    budget = PrivacyBudget(1000, 1e-5, 1000, replay=False, ledger=f"sqlite:///{path}", name="tokens")
    yield budget
    budget.close()


async def test_a_model_of_logits_in_the_open_shows_secrets() -> None:
    """Its own words and failures reach callbacks and logs: the tests below can fail."""
    heard = await hear(callbacks_of("invoke"), Babbling().in_the_open())
    assert EXEMPLAR in found_in("\n".join(heard.told))
    assert EXEMPLAR in found_in("\n".join(heard.around))
    heard = await hear(callbacks_of("stream"), Babbling("rows fail").in_the_open())
    assert EXEMPLAR in found_in("\n".join(heard.told))


@pytest.mark.parametrize("fares", ["success", "rows fail"])
@pytest.mark.parametrize("channel", CHANNELS, ids=name_of)
async def test_a_sampler_shows_released_text_and_no_secret(
    channel: Channel, fares: str, tokens: PrivacyBudget, store: Any
) -> None:
    model = Babbling(fares)
    heard = await hear(channel, a_sampler(store, model, tokens))
    assert heard.error is None
    assert model.private_calls > 0, "the model did see the examples"
    if not name_of(channel).startswith("usage"):
        assert "Positive" in "\n".join(heard.told)
    assert found_in(heard.all()) == []


@pytest.mark.parametrize("channel", CHANNELS, ids=name_of)
async def test_a_sampler_that_fails_shows_one_constant_error(
    channel: Channel, tokens: PrivacyBudget, store: Any
) -> None:
    model = Babbling("all fail")
    heard = await hear(channel, a_sampler(store, model, tokens))
    assert model.private_calls > 0
    if name_of(channel) != "behind_a_retry":  # which then finds the model down on a public question, or up
        assert isinstance(heard.error, ReleaseFailed)
    assert heard.error is not None
    assert found_in(heard.all()) == []


@pytest.mark.parametrize("channel", CANCELLABLE, ids=name_of)
async def test_a_sampler_that_is_cancelled_shows_nothing(channel: Channel, tokens: PrivacyBudget, store: Any) -> None:
    """Nor does the token under way, which its thread ends when the caller has left."""
    model = Babbling("hangs", patience=0.01)

    async def to_its_end(runnable: Any, told: list[str]) -> None:
        try:
            await channel(runnable, told)
        finally:
            while model.closed < len(model.opened):
                await asyncio.sleep(0.002)

    heard = await hear(to_its_end, a_sampler(store, model, tokens), cancel_when=lambda: model.private_calls > 0)
    assert isinstance(heard.error, asyncio.CancelledError)
    assert model.private_calls > 0
    assert found_in(heard.all()) == []


async def test_no_callback_can_count_the_members_tokens(sealed_as: Any) -> None:
    """Neither in sum nor by their number: the lengths of private prompts are private."""
    with get_usage_metadata_callback() as usage:
        sealed_as(a_member(clinic("success"))).invoke(QUESTION)
        assert usage.usage_metadata == {}
        naive(a_member(clinic("success"))).invoke(QUESTION)
        assert usage.usage_metadata != {}


def test_every_secret_is_one_of_its_own() -> None:
    assert not [(a, b) for a in SECRETS for b in SECRETS if a != b and a in b]
    assert all(SECRETS)
