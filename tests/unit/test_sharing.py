"""State that members share is found by public calls, and public calls never read what a private call wrote."""

from __future__ import annotations

import array
import collections
import enum
import functools
import io
import itertools
import logging
import sys
import threading
import types
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jinja2
import numpy as np
import pytest
import tenacity
from ears import Ears
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import tool
from pydantic import AfterValidator, BaseModel, Field, PrivateAttr

from langchain_dpicl import ModelUnavailable, UnsafeConfigurationError
from langchain_dpicl.private.copies import copied
from langchain_dpicl.private.sharing import Snapshot, refuse_changes

QUESTION = {"input": "a witty, seductive movie"}


def text(values: dict[str, Any]) -> str:
    return values["input"] + "".join(example["input"] for example in values["examples"])


class Counter:
    """An object of the user's own."""

    shared: ClassVar[dict[str, str]] = {}
    last = ""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[str] = []

    def count(self, values: dict[str, Any]) -> str:
        self.calls += 1
        return "Positive"

    def keep(self, values: dict[str, Any]) -> str:
        self.seen.append(text(values))
        return "Positive"

    def of_the_class(self, values: dict[str, Any]) -> str:
        self.shared[text(values)] = "Positive"
        return "Positive"

    @classmethod
    def rebind(cls, values: dict[str, Any]) -> str:
        cls.last = text(values)
        return "Positive"


class Step(Runnable[Any, Any]):
    """A Runnable of the user's own."""

    def __init__(self) -> None:
        self.memory = {}

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> str:
        return self.memory.setdefault(text(input), "Positive")


class Settings(BaseModel):
    names: list[str] = []
    _seen: list[str] = PrivateAttr(default_factory=list)


GLOBAL: dict[str, str] = {}
LAST = ""


def by_question(values: dict[str, Any]) -> str:
    return GLOBAL.setdefault(text(values), "Positive")


def rebinds(values: dict[str, Any]) -> str:
    global LAST
    LAST = text(values)
    return "Positive"


def nonlocal_name() -> Callable[[Any], str]:
    last = ""

    def keep(values: dict[str, Any]) -> str:
        nonlocal last
        last = text(values)
        return "Positive"

    return keep


def default(values: dict[str, Any], seen: list[str] = []) -> str:  # noqa: B006
    seen.append(text(values))
    return "Positive"


def attribute(values: dict[str, Any]) -> str:
    attribute.last = text(values)  # type: ignore[attr-defined]
    return "Positive"


attribute.last = ""  # type: ignore[attr-defined]


def writing(kept: Any, write: Callable[[Any, str], Any]) -> Callable[[Any], str]:
    def member(values: dict[str, Any]) -> str:
        write(kept, text(values))
        return "Positive"

    return member


def itself() -> list[Any]:
    circle: list[Any] = []
    circle.append(circle)
    return circle


def module() -> Any:
    made = types.ModuleType("theirs")
    made.last = ""  # type: ignore[attr-defined]
    space = {"__name__": "app", "theirs": made}
    exec("def member(values):\n theirs.last = values['input']\n return 'Positive'", space)
    return space["member"]


def module_around() -> Any:
    made: Any = types.ModuleType("theirs")
    made.last = ""

    def member(values: dict[str, Any]) -> str:
        made.last = text(values)
        return "Positive"

    return member


PROMPT: Any = None


def built_once(build: Callable[[str], Any]) -> Callable[[Any], str]:
    def once(values: dict[str, Any]) -> str:
        global PROMPT
        if PROMPT is None:
            PROMPT = build(text(values))
        return "Positive"

    return once


class Prefix:
    """Builds its prompt once."""

    prefix: Any = None

    def answer(self, values: dict[str, Any]) -> str:
        if self.prefix is None:
            self.prefix = "Examples: " + text(values)
        return "Positive"


class Derived(Counter):
    """Its containers are its base's."""


class Derives(Derived):
    def answer(self, values: dict[str, Any]) -> str:
        return self.of_the_class(values)


class Slotted:
    __slots__ = ("last",)


class Unslotted(Slotted):
    def answer(self, values: dict[str, Any]) -> str:
        self.last = text(values)
        return "Positive"


KNOWN: dict[str, str] = {}


def canonical(label: str) -> str:
    return KNOWN.setdefault(label, label)


def numbered() -> int:
    KNOWN[str(len(KNOWN))] = ""
    return len(KNOWN)


class Validated(BaseModel):
    label: Annotated[str, AfterValidator(canonical)] = ""


class Within(BaseModel):
    labels: list[Annotated[str, AfterValidator(canonical)]] = []


class Numbered(BaseModel):
    number: int = Field(default_factory=numbered)


def importing(source: str) -> Any:
    """A function of a package of the user's own, beside a module that holds a dictionary."""
    package, state = types.ModuleType("theirs"), types.ModuleType("theirs.state")
    state.KEPT = {}  # type: ignore[attr-defined]
    package.state, package.__path__ = state, []  # type: ignore[attr-defined]
    sys.modules |= {"theirs": package, "theirs.state": state}
    space: dict[str, Any] = {"__name__": "theirs.member", "__package__": "theirs"}
    exec(f"def member(values):\n {source}\n return KEPT.setdefault(values['input'], 'Positive')", space)
    return space["member"]


SHARING: dict[str, tuple[Callable[[], Any], str]] = {
    "a global dictionary by the question": (lambda: by_question, "by_question changes GLOBAL"),
    "a global variable": (lambda: rebinds, "rebinds changes LAST"),
    "a variable around it": (nonlocal_name, "keep changes last"),
    "a default": (lambda: default, "changes seen"),
    "a function's attribute": (lambda: attribute, "attribute changes"),
    "a module's variable": (module, r"member changes theirs\.last"),
    "a variable of a module around it": (module_around, r"member changes theirs\.last"),
    "a list": (lambda: writing([], list.append), r"member changes kept \(a list\)"),
    "a list within": (lambda: writing([{"a": []}], lambda k, t: k[0]["a"].append(t)), "changes kept"),
    "a set": (lambda: writing(set(), set.add), "changes kept"),
    "a deque": (lambda: writing(collections.deque(maxlen=3), lambda k, t: k.append(t)), "changes kept"),
    "a defaultdict": (lambda: writing(collections.defaultdict(list), lambda k, t: k[t].append(1)), "changes kept"),
    "a counter": (lambda: writing(collections.Counter(), lambda k, t: k.update([t])), "changes kept"),
    "an ordered one": (lambda: writing(collections.OrderedDict(), lambda k, t: k.update({t: 1})), "changes kept"),
    "a bytearray": (lambda: writing(bytearray(), lambda k, t: k.extend(t.encode())), "changes kept"),
    "bytes in place": (lambda: writing(bytearray(64), lambda k, t: k.__setitem__(len(t) % 64, 1)), "changes kept"),
    "a namespace": (lambda: writing(types.SimpleNamespace(a=1), lambda k, t: setattr(k, "a", t)), "changes"),
    "an iterator": (lambda: writing(iter(range(9)), lambda k, t: next(k)), "changes kept"),
    "a list's iterator": (lambda: writing(iter(["a", "b", "c", "d"]), lambda k, t: next(k)), "changes kept"),
    "itertools.count": (lambda: writing(itertools.count(), lambda k, t: next(k)), "changes kept"),
    "a container in itself": (lambda: writing(itself(), list.append), "changes kept"),
    "an object's number": (lambda: Counter().count, r"changes Counter\.\*"),
    "an object's list": (lambda: Counter().keep, r"changes Counter\.seen"),
    "a class's dictionary": (lambda: Counter().of_the_class, r"changes Counter\.shared"),
    "a class's variable": (lambda: Counter.rebind, "changes Counter"),
    "a step of the user's own": (Step, r"Step changes Step\.memory"),
    "a partial": (
        lambda: functools.partial(lambda kept, values: kept.append(text(values)) or "Positive", []), "changes"
    ),
    "a bound argument": (
        lambda: RunnableLambda(lambda values, kept: kept.append(text(values)) or "Positive").bind(kept=[]),
        "changes kept",
    ),
    "a bound method of a container": (
        lambda: RunnablePassthrough.assign(kept=RunnableLambda([].append)) | (lambda values: "Positive"), "changes"
    ),
    "a model's private list": (lambda: writing(Settings(), lambda k, t: k._seen.append(t)), "changes"),
    "a prompt built once": (lambda: built_once(str), "once changes PROMPT"),
    "a tuple built once": (lambda: built_once(lambda t: (1, (t,))), "once changes PROMPT"),
    "a library's object built once": (
        lambda: built_once(lambda t: PromptTemplate(template=t, input_variables=[])), "once changes PROMPT"
    ),
    "an attribute built once": (lambda: Prefix().answer, r"changes Prefix\.\*"),
    "a bytes object built once": (lambda: built_once(str.encode), "once changes PROMPT"),
    "a base's dictionary": (lambda: Derives().answer, r"changes Counter\.shared"),
    "a numpy array": (lambda: writing(np.zeros(3), lambda k, t: k.__iadd__(len(t))), "changes kept"),
    "an array of objects": (lambda: writing(np.array([None, 1]), lambda k, t: k.put(0, t)), "changes kept"),
    "an array": (lambda: writing(array.array("d"), lambda k, t: k.append(len(t))), "changes kept"),
    "a text stream": (lambda: writing(io.StringIO(), lambda k, t: k.write(t)), "changes kept"),
    "a stream of bytes": (lambda: writing(io.BytesIO(), lambda k, t: k.write(t.encode())), "changes kept"),
    "slots beside a dictionary": (lambda: Unslotted().answer, "changes Unslotted"),
    "a field's validator": (lambda: lambda v: Validated(label=text(v)) and "Positive", "canonical changes KNOWN"),
    "a validator within": (lambda: lambda v: Within(labels=[text(v)]) and "Positive", "canonical changes KNOWN"),
    "a field's default": (lambda: lambda v: Numbered() and "Positive", "numbered changes KNOWN"),
    "a relative import": (lambda: importing("from .state import KEPT"), "member changes"),
    "a module imported relatively": (lambda: importing("from . import state; KEPT = state.KEPT"), "member changes"),
    "a function's helper": (lambda: lambda values: by_question(values), "by_question changes GLOBAL"),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARING)
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_what_a_call_leaves_behind_is_refused_before_anything_is_charged(
    case: str, mode: str, sealed_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "GLOBAL", {})
    monkeypatch.setattr(Counter, "shared", {})
    monkeypatch.setitem(globals(), "PROMPT", None)
    KNOWN.clear()
    make, shown = SHARING[case]
    sealed = sealed_of(make())
    for _ in range(2):
        with pytest.raises(UnsafeConfigurationError, match=shown) as caught:
            sealed.invoke(QUESTION) if mode == "sync" else await sealed.ainvoke(QUESTION)
        assert "share=[" in str(caught.value)
        assert QUESTION["input"] not in str(caught.value)
    assert sealed.budget.spent() == 0


class Answer(BaseModel):
    label: str = "Positive"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


CONSTANT = {"labels": ["Positive", "Negative"]}
LLM = FakeListLLM(responses=["Positive"])
lazy: Any = None


def lazily(values: dict[str, Any]) -> str:
    global lazy
    if lazy is None:
        lazy = FakeListLLM(responses=["Positive"])
    return lazy.invoke("q")


@tenacity.retry(stop=tenacity.stop_after_attempt(2))
def asked_again(values: dict[str, Any]) -> str:
    return CONSTANT["labels"][0]


TEMPLATE = jinja2.Environment().from_string("{{input}}")
LOG = logging.getLogger(__name__)


def logs(values: dict[str, Any]) -> str:
    logging.getLogger(f"made.{id(values)}").info("asked")
    LOG.info("asked")
    return CONSTANT["labels"][0]


def agent() -> Any:
    from langchain.agents import create_agent
    from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
    from langchain_core.messages import AIMessage

    class Fake(FakeMessagesListChatModel):
        def bind_tools(self, *args: Any, **kwargs: Any) -> Any:
            return self

    made = create_agent(Fake(responses=[AIMessage("Positive")]), [add])
    return (lambda values: {"messages": [("user", values["input"])]}) | made | (lambda s: s["messages"][-1].content)


ORDINARY: dict[str, Callable[[], Any]] = {
    "a prompt, a model and a parser": lambda: PromptTemplate.from_template("{input}") | LLM | StrOutputParser(),
    "an agent": agent,
    "a function over a model": lambda: lambda values: LLM.invoke("q"),
    "a constant": lambda: lambda values: CONSTANT["labels"][0],
    "a pydantic object": lambda: (lambda answer: lambda values: answer.label)(Answer()),
    "what is made when it is needed": lambda: lazily,
    "a helper that is tried again": lambda: lambda values: asked_again(values),
    "a template": lambda: lambda values: TEMPLATE.render(**values) and CONSTANT["labels"][0],
    "a logger, while others are made": lambda: logs,
    "what is its own": lambda: lambda values: next(iter({"Positive": 1})),
}


@pytest.mark.parametrize("case", ORDINARY)
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_ordinary_members_are_accepted(
    case: str, mode: str, sealed_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "lazy", None)
    sealed = sealed_of(ORDINARY[case](), releases=3)
    for _ in range(2):
        assert (sealed.invoke(QUESTION) if mode == "sync" else await sealed.ainvoke(QUESTION)) == "Positive"


def test_members_without_state_pay_no_call_and_others_two_once(sealed_of: Any) -> None:
    heard = Ears()
    plain = sealed_of(lambda values: heard.append(values["input"]) or "Positive", members=3)
    plain.invoke(QUESTION)
    plain.invoke(QUESTION)
    assert len(heard) == 6
    heard.clear()
    names = ["Positive"]
    stateful = sealed_of(lambda values: heard.append(list(values["examples"])) or names[0], members=3)
    stateful.invoke(QUESTION)
    stateful.invoke(QUESTION)
    assert len(heard) == 2 + 6
    assert [len(examples) for examples in heard[:2]] == [1, 2], "made-up examples come first"
    assert "in other words" in str(heard[:2])


def test_a_module_that_the_first_call_loads_is_looked_into(
    sealed_of: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_package").mkdir()
    (tmp_path / "late_package" / "__init__.py").write_text("")
    (tmp_path / "late_package" / "kept.py").write_text("KEPT = {}")
    monkeypatch.syspath_prepend(tmp_path)
    space: dict[str, Any] = {"__name__": "app"}
    source = "from late_package import kept\n return kept.KEPT.setdefault(values['input'], 'Positive')"
    exec(f"def member(values):\n {source}", space)
    sealed = sealed_of(space["member"])
    with pytest.raises(UnsafeConfigurationError, match="member changes"):
        sealed.invoke(QUESTION)
    assert sealed.budget.spent() == 0


def test_a_handler_that_the_first_call_sets_up_is_found(sealed_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_core.caches import InMemoryCache

    made: dict[str, Any] = {}

    def member(values: dict[str, Any]) -> str:
        made.setdefault("llm", FakeListLLM(responses=["Positive"], **{"ca" + "che": [InMemoryCache][0]()}))
        return made["llm"].invoke("q")

    with pytest.raises(UnsafeConfigurationError, match="InMemoryCache"):
        sealed_of(member)  # the class that it names
    source = "def member(values):\n made.setdefault('llm', make())\n return made['llm'].invoke('q')"
    space: dict[str, Any] = {"__name__": "app", "made": {}, "make": functools.partial(eval, "llm()", {"llm": cached})}
    exec(source, space)
    sealed = sealed_of(space["member"])
    with pytest.raises(UnsafeConfigurationError, match="cache"):
        sealed.invoke(QUESTION)
    assert sealed.budget.spent() == 0


def cached() -> Any:
    return __import__("langchain_core.language_models.fake", fromlist=["x"]).FakeListLLM(
        responses=["Positive"], cache=__import__("langchain_core.caches", fromlist=["x"]).InMemoryCache()
    )


# -- what is allowed ---------------------------------------------------------------------------------------------------


class Limiter:
    """A rate limiter, which has to count calls."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0

    def wait(self) -> None:
        with self.lock:
            self.calls += 1


def test_a_rate_limiter_is_shared_where_it_is_named(sealed_of: Any) -> None:
    limiter = Limiter()

    def member(values: dict[str, Any]) -> str:
        limiter.wait()
        return "Positive"

    with pytest.raises(UnsafeConfigurationError, match=r"lock of .*Limiter"):
        sealed_of(member)
    assert sealed_of(member, share=[limiter]).invoke(QUESTION) == "Positive"
    assert limiter.calls == 4, "one for each member"


class Breaker:
    """A circuit breaker: after two failures it lets no call through."""

    def __init__(self) -> None:
        self.failures = 0

    def call(self, function: Callable[[Any], str], values: Any) -> str:
        if self.failures >= 2:
            raise ConnectionError
        try:
            return function(values)
        except ValueError:
            self.failures += 1
            raise


def test_known_breakers_are_refused_and_each_call_has_one_of_its_own(sealed_of: Any, canary: str) -> None:
    named = type("CircuitBreaker", (Breaker,), {"__module__": "pybreaker"})()
    with pytest.raises(UnsafeConfigurationError, match="open it for all members"):
        sealed_of(lambda values: named.call(str, values))
    own = Breaker()

    def ask(values: dict[str, Any]) -> str:
        if canary in str(list(values["examples"])):
            raise ValueError
        return "Positive"

    options: dict[str, Any] = {"on_exhausted": "zero_shot", "releases": 1, "return_receipt": True}
    sealed = sealed_of(lambda values: own.call(ask, values), **options)
    with pytest.raises(ModelUnavailable):
        sealed.invoke(QUESTION)
    assert own.failures == 0
    assert sealed.invoke(QUESTION)["answer"] == "Positive", "the public copy's is closed"


# -- public calls ------------------------------------------------------------------------------------------------------


def test_a_copy_shares_models_alone_and_works_alike() -> None:
    llm, kept, space = FakeListLLM(responses=["Positive"]), [1], {"n": 0}
    helper = writing(kept, list.append)

    def recursive(n: int) -> int:
        space["n"] += 1
        return 0 if n == 0 else 1 + recursive(n - 1)

    made = copied({"f": recursive, "g": helper, "llm": llm, "again": kept, "lock": threading.RLock()})
    assert made["f"](3) == 3
    assert space == {"n": 0}
    made["g"]({"input": "q", "examples": []})
    assert (kept, made["again"]) == ([1], [1, "q"])
    assert made["llm"] is llm
    copy = copied(by_question)
    assert copy({"input": "q", "examples": []}) == "Positive"
    assert "q" not in GLOBAL
    assert copied(rebinds)({"input": "q", "examples": []}) == "Positive"
    assert LAST == ""
    assert copied(len) is len
    assert copied(json := sys.modules["json"].dumps) is json


def test_an_object_that_holds_nothing_yet_is_copied() -> None:
    prefix, nothing = Prefix(), object()
    made = copied((prefix.answer, nothing))
    made[0]({"input": "q", "examples": []})
    assert prefix.prefix is None
    assert made[1] is nothing


def test_a_snapshot_keeps_no_text() -> None:
    kept = ["a text"]
    before = Snapshot(RunnableLambda(writing(kept, list.append)))
    assert "a text" not in repr(list(before.places.values()))
    refuse_changes(before, Snapshot(RunnableLambda(writing(kept, list.append))))


# -- what a class says of its own copies, and where state hides --------------------------------------------------------


class Registered(BaseModel):
    """A user's object that is pickled by its name."""

    notes: list[str] = []

    def __reduce__(self) -> Any:
        return (lambda: REGISTERED), ()


class SaysItsName(BaseModel):
    notes: list[str] = []

    def __reduce_ex__(self, protocol: Any) -> Any:
        return "SaysItsName"


REGISTERED = Registered()


@pytest.mark.parametrize("held", [REGISTERED, SaysItsName()])
def test_a_pydantic_objects_own_reduction_does_not_decide_what_a_public_copy_shares(held: Any) -> None:
    made = copied(RunnableLambda(lambda _: list(held.notes)))
    held.notes.append("a secret")
    assert made.invoke("a public question") == []
    held.notes.clear()


class Mode(enum.Enum):
    FAST: ClassVar[Any] = ["a list"]

    def note(self, text: str) -> str:
        self.seen = getattr(self, "seen", "") + text
        return self.seen


@pytest.mark.parametrize("step", [lambda text: Mode.FAST.note(text), lambda text: Mode.FAST.value.append(text)])
def test_state_in_a_member_of_an_enumeration_is_found(step: Any) -> None:
    chain = RunnableLambda(step)
    before = Snapshot(chain)
    chain.invoke("one")
    with pytest.raises(UnsafeConfigurationError, match="Mode"):
        refuse_changes(before, Snapshot(chain))
