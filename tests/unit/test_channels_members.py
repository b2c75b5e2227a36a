"""What a member brings along: callbacks, listeners, caches, verbosity, anywhere in its chain, are off or refused.

Each is tried in the open first, where it must tell a secret.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from channels import QUESTION, Recorder
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import StdOutCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatResult
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import (
    ConfigurableField,
    Runnable,
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)
from langchain_core.runnables.router import RouterRunnable
from langchain_core.tools import tool
from pydantic import PrivateAttr

from langchain_dpicl import UnsafeConfigurationError
from langchain_dpicl.private import boundary
from langchain_dpicl.private.copy import Pristine


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


class Wrapper(BaseChatModel):
    """A model around another, as routers and guards are."""

    inner: BaseChatModel

    @property
    def _llm_type(self) -> str:
        return "wrapper"

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=self.inner.generate([messages]).generations[0])  # type: ignore[arg-type]


def callbacks_on_a_model_within_a_model(canary: str) -> tuple[Any, Callable[[], str]]:
    recorder = Recorder()
    return prompt() | Wrapper(inner=model(canary, callbacks=[recorder])) | StrOutputParser(), recorder.text


def async_listeners(canary: str) -> tuple[Any, Callable[[], str]]:
    heard: list[str] = []

    async def hear(run: Any) -> None:
        heard.append(repr((run.inputs, run.outputs)))

    listening = RunnableLambda(lambda values: values, afunc=_same).with_alisteners(on_start=hear, on_end=hear)
    return listening | prompt() | model(canary) | StrOutputParser(), lambda: "".join(heard)


async def _same(values: Any) -> Any:
    return values


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
    callbacks_on_a_model_within_a_model,
    async_listeners,
]


@pytest.mark.parametrize("make", MEMBER_CHANNELS, ids=lambda make: make.__name__)
async def test_a_channel_within_the_member_is_sealed(make: MemberChannel, sealed_of: Any, canary: str) -> None:
    member, seen = make(canary)
    member = RunnableLambda(lambda v: v) | member
    await naive(member, canary).ainvoke(QUESTION)
    assert canary in seen(), "in the open it shows, so the check can fail"
    member, seen = make(canary)
    sealed = sealed_of(member)
    assert sealed.invoke(QUESTION) == "Positive"
    assert await sealed.ainvoke(QUESTION) == "Positive"
    assert canary not in seen()


# -- what sealing cannot reach -----------------------------------------------------------------------------------------


class App:
    """A user's own object that holds a model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def answer(self, values: Any) -> Any:
        return self.model.invoke(str([*values["examples"]]))

    def answering(self) -> Any:
        return lambda values: self.model.invoke(str([*values["examples"]]))

    def __call__(self, values: Any) -> Any:
        return self.answer(values)


class Holder(FakeListLLM):
    """A model that keeps another where pydantic does not show it."""

    _inner: Any = PrivateAttr(default=None)

    def holding(self, inner: Any) -> Any:
        self._inner = inner
        return self

    def _call(self, *args: Any, **kwargs: Any) -> str:
        return str(self._inner.invoke(args[0]).text)

    async def _acall(self, *args: Any, **kwargs: Any) -> str:
        return str((await self._inner.ainvoke(args[0])).text)


HIDINGS: dict[str, Callable[[Any], Any]] = {
    "a closure": lambda m: lambda values: m.invoke(str([*values["examples"]])),
    "a bound method": lambda m: App(m).answer,
    "a closure over its object": lambda m: App(m).answering(),
    "an object that is called": lambda m: App(m),
    "a partial function": lambda m: functools.partial(lambda held, values: held.invoke(str([*values["examples"]])), m),
    "a function that gives a chain": lambda m: lambda values: RunnableLambda(lambda v: str([*v["examples"]])) | m,
    "a private attribute": lambda m: prompt() | Holder(responses=["x"]).holding(m),
}


@pytest.mark.parametrize("hiding", HIDINGS.values(), ids=HIDINGS)
async def test_a_model_that_sealing_cannot_reach_must_be_set_up_silent(
    hiding: Any, sealed_of: Any, canary: str
) -> None:
    recorder = Recorder()
    opened = RunnableLambda(lambda v: v) | hiding(model(canary, callbacks=[recorder])) | StrOutputParser()
    naive(opened, canary).invoke(QUESTION)
    assert canary in recorder.text(), "in the open it shows"
    for options, name in (
        ({"callbacks": [Recorder()]}, "callbacks"),
        ({"cache": InMemoryCache()}, "cache"),
        ({"verbose": True}, "verbose"),
    ):
        with pytest.raises(UnsafeConfigurationError, match=f"GenericFakeChatModel .* by its {name}"):
            sealed_of(RunnableLambda(lambda v: v) | hiding(model(canary, **options)) | StrOutputParser())
    silent = RunnableLambda(lambda v: v) | hiding(model(canary)) | StrOutputParser()
    sealed = sealed_of(silent)
    assert sealed.invoke(QUESTION) == await sealed.ainvoke(QUESTION) == "Positive"


@pytest.mark.parametrize("bind", ["with_config", "with_listeners"])
def test_callbacks_bound_where_sealing_cannot_reach_are_refused(bind: str, sealed_of: Any, canary: str) -> None:
    inner: Any = model(canary)
    bound = (
        inner.with_config(callbacks=[Recorder()]) if bind == "with_config" else inner.with_listeners(on_end=lambda r: r)
    )
    with pytest.raises(UnsafeConfigurationError, match="RunnableBinding"):
        sealed_of(lambda values: bound.invoke(str(values)))


def test_a_chain_that_refers_to_itself_can_be_sealed_where_it_is_silent() -> None:
    class Circle(Runnable[Any, Any]):
        def __init__(self, **options: Any) -> None:
            self.me, self.steps = self, [self]
            self.model = model("x", **options)

        def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
            return self.me.steps[0].model.callbacks

    Pristine(boundary.seal(Circle()))
    with pytest.raises(UnsafeConfigurationError):  # a copy would still refer to the original
        Pristine(boundary.seal(Circle(callbacks=[Recorder()])))


def test_a_refusal_shows_nothing_of_the_chain(canary: str) -> None:
    loud = model(canary, callbacks=[Recorder()], metadata={"key": canary})
    with pytest.raises(UnsafeConfigurationError) as caught:
        Pristine(boundary.seal(RunnableLambda(lambda values: loud.invoke(values))))
    assert canary not in str(caught.value)


# -- sealing itself ----------------------------------------------------------------------------------------------------


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
