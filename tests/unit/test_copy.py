"""What a copy of a chain is beside its isolation: answers in the caller's classes, what is shared, what is refused."""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import json
import logging
import os
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from random import random
from typing import Any, ClassVar, Generic, Literal, NamedTuple, NewType, TypeVar

import jinja2
import numpy as np
import pytest
import tenacity
from ears import Ears
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import PydanticOutputParser, StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel, Field, PrivateAttr, RootModel, field_validator

import langchain_dpicl as dp
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, UnsafeConfigurationError
from langchain_dpicl.private import origins
from langchain_dpicl.private.copy import Pristine

QUESTION = {"input": "how tall is it?"}
SEEN: list[str] = []


class Kind(enum.Enum):
    OAK = "oak"
    ELM = "elm"


class Tree(BaseModel):
    kind: Literal["oak", "elm"]
    height: int = Field(ge=0, le=60)
    like: Tree | None = None


class Flat(BaseModel):
    kind: Literal["oak", "elm"]
    height: int = Field(ge=0, le=60)


class Checked(BaseModel):
    """Its validator writes where it is: on a copy's own list."""

    text: str

    @field_validator("text")
    @classmethod
    def kept(cls, text: str) -> str:
        SEEN.append(text)
        return text


@dataclasses.dataclass(frozen=True)
class Found:
    kind: Kind
    trees: list[Tree]


def returned(chain: Runnable[Any, Any], given: Any = "") -> Any:
    copy = Pristine(chain).copy()
    return copy.returned(copy.chain.invoke(given))


def test_what_a_call_gives_is_of_the_callers_own_classes() -> None:
    tree = Tree(kind="oak", height=3, like=Tree(kind="elm", height=2))
    given = {"found": Found(Kind.ELM, [tree]), "pair": (Kind.OAK, {1})}
    found = returned(
        RunnableLambda(
            lambda _: {
                "found": Found(Kind.ELM, [Tree(kind="oak", height=3, like=Tree(kind="elm", height=2))]),
                "pair": (Kind.OAK, {1}),
            }
        )
    )
    assert found == given
    assert type(found["found"]) is Found
    assert type(found["found"].trees[0].like) is Tree
    assert found["pair"][0] is Kind.OAK


def test_none_of_the_callers_code_runs_for_that() -> None:
    found = returned(RunnableLambda(lambda _: Checked(text="a secret")))
    assert (type(found), found.text) == (Checked, "a secret")
    assert SEEN == []


def test_an_object_of_another_class_of_the_chains_own_is_no_answer() -> None:
    class Own:
        pass

    with pytest.raises(TypeError):
        returned(RunnableLambda(lambda _: [Own()]))


class Calling(GenericFakeChatModel):
    """A chat model that calls the tool of a schema."""

    messages: Any = None

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        call = {"name": "Flat", "args": {"kind": "oak", "height": 9}, "id": "1"}
        return ChatResult(generations=[ChatGeneration(message=AIMessage("", tool_calls=[call]))])


PROMPT = PromptTemplate.from_template("{input} {examples}")


@pytest.mark.parametrize(
    ("member", "aggregator"),
    [
        (RunnableLambda(lambda values: Flat(kind="oak", height=len(values["examples"]) and 9)), dp.Structured(Flat)),
        (RunnableLambda(lambda _: '{"kind": "oak", "height": 9}') | PydanticOutputParser(pydantic_object=Flat), None),
        (RunnableLambda(lambda _: Kind.OAK.value), dp.NoisyVote(["oak", "elm"], mechanism="vote")),
        (PROMPT | Calling().with_structured_output(Flat), None),
        (PROMPT | Calling().with_structured_output(Flat, include_raw=True), None),
        (
            PROMPT | Calling().with_structured_output(Flat) | (lambda flat: flat.kind),
            dp.NoisyVote(["oak", "elm"], mechanism="vote"),
        ),
    ],
    ids=["an instance", "a parser", "an enumeration", "structured output", "with the raw message", "a field of it"],
)
def test_typed_answers_are_released(member: Any, aggregator: Any, sealed_of: Any) -> None:
    released = sealed_of(member, vote=aggregator or dp.Structured(Flat), members=20).invoke(QUESTION)
    assert released == "oak" or (type(released) is Flat and released.kind == "oak")


def answered(_: Any) -> Any:
    tree = Tree(kind="oak", height=3)
    called = {"name": "plant", "args": {"tree": tree}, "id": "1"}
    return [
        Document("an oak", metadata={"kind": Kind.OAK}),
        AIMessage("an oak", additional_kwargs={"parsed": tree}, tool_calls=[called]),
        ToolMessage("an oak", artifact=[(tree,)], tool_call_id="1"),
        HumanMessage("an oak"),
    ]


def test_what_libraries_objects_hold_is_of_the_callers_own_classes_too() -> None:
    copy = Pristine(RunnableLambda(answered)).copy()
    made = copy.chain.invoke("")
    document, said, called, human = copy.returned(made)
    assert document.metadata["kind"] is Kind.OAK
    held = [said.additional_kwargs["parsed"], said.tool_calls[0]["args"]["tree"], called.artifact[0][0]]
    assert [type(each) for each in held] == [Tree] * 3
    assert [document, said, called, human] == answered("")
    assert human is made[3], "nothing in it is of a class of the copy's"


class Metre(enum.Enum):
    TALL = "tall"


class Leaf(BaseModel):
    metre: Metre = Metre.TALL
    kept: ClassVar[list[str]] = []


def test_classes_of_what_is_given_are_a_copys_own_though_the_chain_does_not_name_them() -> None:
    def answer(given: Any) -> Any:
        kind = type(given["leaf"])
        kind.kept.append(given["text"])
        return list(kind.kept), given["leaf"].metre is type(given["metre"]).TALL, given["leaf"]

    copies = Pristine(RunnableLambda(answer))
    for text in ("one", "two"):
        copy, leaf = copies.copy(), Leaf()
        given = copy.given({"leaf": leaf, "text": text, "metre": Metre.TALL})
        kept, is_same, found = copy.returned(copy.chain.invoke(given))
        assert (kept, is_same, found, type(found)) == ([text], True, leaf, Leaf)
    assert Leaf.kept == []
    for held in (defaultdict(None, {1: leaf}), Leaf, boxed, sys.modules[__name__], functools.partial(boxed)):
        with pytest.raises(TypeError, match="caller's own"):
            copies.copy().given(held)
    for plain in (str, len, json.dumps, json, functools.partial(json.dumps), Path("a"), Document("a")):
        assert copies.copy().given(plain) is plain


def test_a_graph_s_messages_hold_the_callers_own_classes() -> None:
    def node(state: MessagesState) -> Any:
        given: Any = state["messages"][0]
        return {"messages": [ToolMessage("", artifact=given.artifact.like, tool_call_id="2")]}

    copy = Pristine(StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()).copy()
    tree = Tree(kind="oak", height=3, like=Tree(kind="elm", height=2))
    given = {"messages": [ToolMessage("", artifact=tree, tool_call_id="1")]}
    found = copy.returned(copy.chain.invoke(copy.given(given)))["messages"]
    assert [type(each.artifact) for each in found] == [Tree, Tree]
    assert found[1].artifact == tree.like


class Failing(Exception):
    """An error of the user's own, which holds what it failed on."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(f"a tree of {tree.height} metres")
        self.tree = tree


def test_an_error_of_the_users_own_is_text_outside_of_a_call(sealed_of: Any) -> None:
    def failing(values: Any) -> Any:
        raise Failing(Tree(kind="oak", height=3))

    def of_python(shown: Any) -> bool:
        held = [*shown.items()] if isinstance(shown, dict) else shown if isinstance(shown, (list, tuple)) else []
        return vars(builtins).get(type(shown).__name__, type(None)) is type(shown) and all(map(of_python, held))

    ensemble = sealed_of(failing).ensemble
    rehearsal = ensemble.rehearse([{"input": "text", "output": "oak"}], QUESTION)
    assert rehearsal.calls[0].error == "Failing: a tree of 3 metres"
    assert all(of_python(dataclasses.asdict(call)) for call in rehearsal.calls)


@pytest.mark.asks_first
def test_an_error_of_the_users_own_is_text_in_the_error_of_a_public_question(sealed_of: Any) -> None:
    def failing(values: Any) -> Any:
        raise Failing(Tree(kind="oak", height=3))

    with pytest.raises(ModelUnavailable, match="Failing") as caught:
        sealed_of(failing).invoke(QUESTION)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert all(type(each) is str for each in [*caught.value.args, *vars(caught.value).values()])


SCALE = "a name that no code says"


@pytest.mark.asks_first
@pytest.mark.parametrize(
    ("found", "error"),
    [
        (lambda: globals()["elacs"[::-1].upper()], "KeyError"),
        (lambda: getattr(this_module(), "elacs"[::-1].upper()), "AttributeError"),
    ],
    ids=["a global by its name", "a module's attribute by its name"],
)
def test_names_that_no_code_says_are_not_there_and_the_public_question_says_so(
    found: Any, error: str, sealed_of: Any
) -> None:
    assert found() == SCALE
    with pytest.raises(ModelUnavailable, match=error):
        sealed_of(RunnableLambda(lambda values: [found(), "Positive"][-1])).invoke(QUESTION)


def this_module() -> Any:
    import test_copy

    return test_copy


def test_objects_and_packages_are_shared_by_name_and_models_as_they_are() -> None:
    lock, llm = threading.Lock(), FakeListLLM(responses=["Positive"])
    chain = RunnableLambda(lambda _: (lock, llm))
    with pytest.raises(UnsafeConfigurationError, match=r"_thread\.lock of .*share="):
        Pristine(chain)
    copies = Pristine(chain, share=[lock])
    assert copies.copy().chain.invoke("") == (lock, llm)
    assert copies.copy().chain.invoke("")[1] is llm
    shown = copies.shared()
    assert shown.copied == (__name__,)
    assert set(shown.objects) >= {"_thread.lock", "langchain_core.language_models.fake.FakeListLLM"}
    assert "langchain_core" in shown.packages
    assert f"every call has its own: {__name__}" in str(shown)


def test_what_makes_copies_slow_is_said() -> None:
    table = {number: str(number) for number in range(500_000)}
    with pytest.warns(UserWarning, match=r"MB that it holds.*share="):
        Pristine(RunnableLambda(lambda _: table[0]))
    assert Pristine(RunnableLambda(lambda _: table[0]), share=[table]).copy().chain.invoke("") == "0"


def test_code_of_a_package_that_langchain_does_not_need_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import xdist

    monkeypatch.setattr(origins, "_closure", lambda: frozenset({"langchain-core", "pydantic", "cloudpickle"}))
    chain = RunnableLambda(lambda _: xdist.__name__)
    with pytest.raises(UnsafeConfigurationError, match=r'share=\["xdist"\], .* isolate=\["xdist"\]'):
        Pristine(chain)
    assert Pristine(chain, share=["xdist"]).copy().chain.invoke("") == "xdist"
    assert Pristine(chain, isolate=["xdist"]).copy().chain.invoke("") == "xdist"


@pytest.mark.parametrize(
    ("name", "given"), [("share", "x"), ("isolate", {"x"}), ("isolate", [1]), ("allow_state", [1])]
)
def test_bad_arguments_are_named(name: str, given: Any, store_of: Any, records: Any) -> None:
    selector = dp.PoissonExampleSelector(store_of(records(8)), 2, rate=1.0, max_exemplars=8)
    with pytest.raises(InvalidParameter) as caught:
        dp.PrivateEnsemble(selector, lambda _: "Positive", **{name: given})
    assert caught.value.parameter == name


LAMBDA = "from langchain_core.runnables import RunnableLambda"
APP = f"""
import json
{LAMBDA}
{{imported}}

def member(text):
    before = kept.setdefault("text", text)
    helper.last = getattr(helper, "last", "") + text
    return [before, helper.last]
"""
HELPER = "kept = {}\n\nclass helper:\n    pass\n"
RUN = """
from langchain_dpicl.private.copy import Pristine
copies = Pristine(RunnableLambda(member))
print(json.dumps([copies.copy().chain.invoke(text) for text in ("one", "two")]))
"""


@pytest.mark.parametrize("kind", ["__main__", "a notebook", "a file beside it", "a package", "an installed package"])
def test_the_same_app_has_the_same_copies_wherever_it_stands(kind: str, tmp_path: Path) -> None:
    run, is_package = tmp_path / "run.py", "package" in kind
    site = tmp_path / "site"
    package = (site if kind == "an installed package" else tmp_path) / "myapp"
    if is_package:
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "helpers.py").write_text(HELPER)
        (package / "app.py").write_text(APP.format(imported="from .helpers import helper, kept"))
        run.write_text(f"import json\n{LAMBDA}\nfrom myapp.app import member\n{RUN}")
    elif kind == "a file beside it":
        (tmp_path / "helpers.py").write_text(HELPER)
        run.write_text(APP.format(imported="from helpers import helper, kept") + RUN)
    elif kind == "a notebook":  # its cells are executed one after another as parts of __main__
        cells = [HELPER, APP.format(imported=""), RUN]
        run.write_text(f"for cell in {cells!r}:\n    exec(compile(cell, '<cell>', 'exec'), globals())\n")
    else:
        run.write_text(APP.format(imported=HELPER) + RUN)
    if kind == "an installed package":
        about = site / "myapp-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: myapp\nVersion: 1.0\n")
        (about / "top_level.txt").write_text("myapp\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "run.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [["one", "one"], ["two", "two"]]


Content = TypeVar("Content")


class Planet(enum.Enum):
    """Members with attributes, and an alias."""

    EARTH = ("earth", 1.0)
    TERRA = ("earth", 1.0)
    MARS = ("mars", 0.4)

    def __init__(self, title: str, size: float) -> None:
        self.title, self.size = title, size


class Lazy:
    @functools.cached_property
    def made(self) -> list[str]:
        return ["made"]


Number = NewType("Number", int)


class Trees(RootModel[list[Tree]]):
    pass


def test_ordinary_code_works_in_a_copy() -> None:
    def answer(_: Any) -> Any:
        drawn = random()
        return Planet.MARS.size, Planet["TERRA"] is Planet.EARTH, Lazy().made, Number(3), Planet.EARTH.title, drawn

    copies = Pristine(RunnableLambda(answer))
    (*first, one), (*second, two) = (copies.copy().chain.invoke("") for _ in range(2))
    assert first == second == [0.4, True, ["made"], 3, "earth"]
    assert one != two, "Python's own generator is shared: copies of one would draw the same"


class Registered:
    """A class whose subclasses have to say a key, and are counted."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, key: str, **named: Any) -> None:
        if key in Registered.known:
            raise ValueError(key)
        Registered.known.append(key)


class Strict(type):
    """Its classes have a title."""

    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any], **named: Any) -> Any:
        if "title" not in space:
            raise TypeError(name)
        return super().__new__(cls, name, bases, space)


class First(Registered, key="first"):
    pass


class Titled(metaclass=Strict):
    title = "a title"


def test_no_hook_of_a_class_runs_when_it_is_copied() -> None:
    def answer(_: Any) -> Any:
        class Second(Registered, key="second"):
            pass

        return First.__name__, Titled.title, list(Registered.known)

    copies = Pristine(RunnableLambda(answer))
    for _ in range(2):
        assert copies.copy().chain.invoke("") == ("First", "a title", ["first", "second"])
    assert Registered.known == ["first"]


def test_what_a_call_is_given_is_of_the_copys_classes() -> None:
    chain = RunnableLambda(
        lambda given: (given["kind"] is Kind.OAK, isinstance(given["tree"], Tree), given["pair"].first)
    )
    copy = Pristine(chain).copy()
    given = {"kind": Kind.OAK, "tree": Tree(kind="oak", height=1), "pair": Pair(Kind.ELM, 2)}
    assert copy.chain.invoke(given)[:2] == (False, False)
    found = copy.returned(copy.chain.invoke(copy.given(given)))
    assert found == (True, True, Kind.ELM)
    assert found[2] is Kind.ELM


class Pair(NamedTuple):
    first: Kind
    second: int


class Box(BaseModel, Generic[Content]):
    held: Content
    _hidden: int = PrivateAttr(7)


def test_generic_models_and_private_attributes_come_back_whole() -> None:
    found = returned(RunnableLambda(lambda _: (Box[int](held=1), Pair(Kind.OAK, 1))))
    assert type(found[0]) is Box[int]
    assert (found[0].held, found[0]._hidden) == (1, 7)
    assert found[1] == Pair(Kind.OAK, 1)
    assert type(found[1]) is Pair


def boxed(_: Any) -> Any:
    tree = Tree(kind="oak", height=3)
    return (
        Box[list[Tree]](held=[tree]),
        Box[Tree | None](held=tree),
        Box[dict[str, tuple[Tree, ...]]](held={"one": (tree,)}),
        Box[Literal["oak"]](held="oak"),
        Trees([tree]),
        RootModel[list[Tree]]([tree]),
    )


def test_generic_models_of_containers_come_back_as_the_callers_own() -> None:
    found = returned(RunnableLambda(boxed))
    assert found == boxed("")
    assert [type(each) for each in found] == [type(each) for each in boxed("")]


def test_a_tuple_of_a_class_that_was_made_in_the_call_is_no_answer() -> None:
    def answer(_: Any) -> Any:
        class Late(NamedTuple):
            first: int

        return Late(1)

    with pytest.raises(TypeError, match="within the call"):
        returned(RunnableLambda(answer))


def test_code_may_be_long() -> None:
    """Thousands of functions that name each other, each the next one."""
    around: dict[str, Any] = {"__name__": "long"}
    exec(
        "def f0(n): return n\n" + "\n".join(f"def f{i}(n): return f{i - 1}(n) if n else {i}" for i in range(1, 3000)),
        around,
    )
    assert Pristine(RunnableLambda(lambda n: around["f2999"](n))).copy().chain.invoke(0) == 2999


def test_a_tool_s_annotations_are_found_though_they_are_texts() -> None:
    @tool
    def search(text: str, config: RunnableConfig) -> str:
        """Search."""
        return f"{text} {'callbacks' in config}"

    assert Pristine(search).copy().chain.invoke({"text": "a"}) == "a True"


MODULE = "kept = []\n\ndef step(text):\n    import late\n    late.kept.append(text)\n    return [*kept, *late.kept]\n"
NAMES = """
import sys
from langchain_core.runnables import RunnableLambda
import code, tree
from langchain_dpicl.private.copy import Pristine

def member(text):
    code.kept.append(text)
    tree.kept.append(text)
    return [*code.step(text), *tree.kept]

copies = Pristine(RunnableLambda(member))
print([copies.copy().chain.invoke(text) for text in ("one", "two")])
"""


def test_files_with_the_names_of_libraries_and_late_imports_are_a_copys_own(tmp_path: Path) -> None:
    for name, text in {"code": MODULE, "tree": "kept = []\n", "late": "kept = []\n", "run": NAMES}.items():
        (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "[['one', 'one', 'one'], ['two', 'two', 'two']]\n"


# -- ordinary members --------------------------------------------------------------------------------------------------


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


def test_a_member_with_state_pays_no_call_for_it(sealed_of: Any) -> None:
    heard, names = Ears(), ["Positive"]
    sealed = sealed_of(lambda values: heard.append(names) or names[0], members=3)
    sealed.invoke(QUESTION)
    sealed.invoke(QUESTION)
    assert len(heard) == 6


# -- what calls must share, and what they must not ---------------------------------------------------------------------


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


def test_a_tokenizer_is_copied_with_its_settings() -> None:
    """Truncation that one call sets is no other's."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()

    def count(text: str) -> int:
        found = len(made.encode(text).ids)
        made.enable_truncation(found - 1)
        return found

    pristine = Pristine(RunnableLambda(count))
    assert [pristine.copy().chain.invoke("a b a b") for _ in range(3)] == [4, 4, 4]
    assert len(made.encode("a b a b").ids) == 4


class Count(BaseModel):
    number: int = 0
    seen: ClassVar[list[str]] = []


@pytest.mark.own_models
@pytest.mark.parametrize("where", ["a class", "a default", "an attribute"])
def test_a_library_s_model_that_holds_a_class_of_the_users_is_copied(where: str) -> None:
    def stop(text: str, *, kind: type = Count) -> str:
        return text

    def marked(text: str) -> str:
        return text

    marked.kind = Count  # type: ignore[attr-defined]
    held: Any = {"a class": Count, "a default": stop, "an attribute": marked}[where]
    model = FakeListLLM(responses=["x"], metadata={"format": held})

    def member(text: str) -> list[str]:
        found = (model.metadata or {})["format"]
        kind = found if where == "a class" else getattr(found, "kind", None) or found.__kwdefaults__["kind"]
        kind.seen.append(text)
        return list(kind.seen)

    pristine = Pristine(RunnableLambda(member))
    assert [pristine.copy().chain.invoke(text) for text in "ab"] == [["a"], ["b"]]
    assert Count.seen == []


def test_classes_without_a_name_in_their_module_and_objects_in_arrays_are_no_exception() -> None:
    """A class that names a library's module as its own, and objects that numpy holds."""
    made = dataclasses.make_dataclass("Made", [("number", int)])
    made.__module__ = "types"
    pristine = Pristine(RunnableLambda(lambda values: type(values["it"])))
    first, second = (pristine.copy() for _ in range(2))
    kinds = [each.chain.invoke(each.given({"it": made(1)})) for each in (first, second)]
    assert kinds[0] is not kinds[1] is not made
    with pytest.raises(TypeError, match="caller's own"):
        pristine.copy().given({"it": np.array([Leaf()], dtype=object)})


class Shoot(Leaf):
    pass


def test_an_object_of_a_class_made_from_one_of_the_chain_s_is_refused() -> None:
    """A copy of the class alone would have another base: ``isinstance`` would be False without a word."""
    pristine = Pristine(RunnableLambda(lambda values: isinstance(values["it"], Leaf)))
    with pytest.raises(TypeError, match="name its class in the chain"):
        pristine.copy().given({"it": Shoot()})
    both = Pristine(RunnableLambda(lambda values: (isinstance(values["it"], Leaf), Shoot)[0]))
    copy = both.copy()
    assert copy.chain.invoke(copy.given({"it": Shoot()})) is True


def test_answers_in_deques_and_ordered_mappings_are_of_the_callers_own_classes() -> None:
    pristine = Pristine(RunnableLambda(lambda values: (values["it"], deque([Leaf()], 3), OrderedDict(a=Leaf()))))
    copy = pristine.copy()
    given, row, mapping = copy.returned(copy.chain.invoke(copy.given({"it": deque([Leaf()])})))
    assert [type(each) for each in (given[0], row[0], mapping["a"])] == [Leaf] * 3
    assert (row.maxlen, type(mapping)) == (3, OrderedDict)


class Board:
    """An object of the user's own, which all calls share if its name is given."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_a_shared_object_is_an_instance_of_its_class() -> None:
    board = Board()
    pristine = Pristine(RunnableLambda(lambda values: (isinstance(board, Board), board is values)), share=[board])
    assert pristine.copy().chain.invoke(board) == (True, True)
