"""Ways in which a chain's own code keeps something between calls: each gives what it kept before, and keeps a text.

A form is a function that makes a step of a chain, a function of a text. `FORMS` has them by name.
"""

from __future__ import annotations

import abc
import array
import contextvars
import dataclasses
import enum
import functools
import io
import itertools
import json
import logging
import os
import queue
import sqlite3
import sys
import tempfile
import threading
import types
import weakref
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, TypedDict, TypeVar

import httpx
import numpy as np
from langchain_core.documents import Document
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import StructuredTool
from pydantic import BaseModel, Field, PrivateAttr

Step = Callable[[str], Any]
Form = Callable[[], Any]
FORMS: dict[str, Form] = {}

_here = sys.modules[__name__]
LAST: Any = None
KEPT: list[Any] = []
NAMED: dict[str, Any] = {}


def form(make: Form) -> Form:
    FORMS[make.__name__.strip("_").replace("_", " ")] = make
    return make


def attribute_form(name: str, holder: Callable[[], Any]) -> None:
    """A form that keeps the text as a new attribute of something."""

    def make() -> Step:
        held = holder()

        def step(text: str) -> Any:
            before = getattr(held, "kept", None)
            held.kept = text
            return before

        return step

    FORMS[f"an attribute of {name}"] = make


def container_form(name: str, holder: Callable[[], Any], put: Callable[[Any, str], Any]) -> None:
    """A form that writes into a container. Whether it holds anything is what it gives."""

    def make() -> Step:
        held = holder()

        def step(text: str) -> Any:
            before = bytes(held) if isinstance(held, (bytearray, array.array, np.ndarray)) else list(held)
            put(held, text)
            return before if any(before) else None

        return step

    FORMS[f"a {name}"] = make


class Meta(type):
    """A class of classes."""


class Plain(metaclass=Meta):
    """A class without an attribute to write."""

    def method(self) -> None: ...

    @staticmethod
    def static() -> None: ...

    @classmethod
    def of_class(cls) -> None: ...


class Slots:
    __slots__ = ("kept",)


class Abstract(abc.ABC):  # noqa: B024
    """A class with a registry."""


class Color(enum.Enum):
    RED = 1


class Flagged(enum.IntFlag):
    ONE = 1


@dataclasses.dataclass
class Data:
    kept: Any = None
    several: list[Any] = dataclasses.field(default_factory=list)


class Model(BaseModel):
    kept: Any = None
    shared: ClassVar[list[Any]] = []
    _hidden: Any = PrivateAttr(None)


class Pair(NamedTuple):
    first: list[Any]


class Described:
    """A descriptor keeps what is written through it."""

    def __init__(self) -> None:
        self.value: Any = None

    def __get__(self, item: Any, kind: Any = None) -> Any:
        return self.value

    def __set__(self, item: Any, value: Any) -> None:
        self.value = value


class WithDescriptor:
    kept = Described()


class WithProperty:
    _value: Any = None

    @property
    def kept(self) -> Any:
        return type(self)._value

    @kept.setter
    def kept(self, value: Any) -> None:
        type(self)._value = value


class Registry:
    names: ClassVar[list[str]] = []

    def __init_subclass__(cls, **named: Any) -> None:
        Registry.names.append(cls.__name__)


class Dying:
    last: ClassVar[Any] = None

    def __init__(self, text: str) -> None:
        self.text = text

    def __del__(self) -> None:
        Dying.last = self.text


class Lazy:
    @functools.cached_property
    def found(self) -> list[Any]:
        return []


class Counting(Runnable[Any, Any]):
    last: Any = None

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        before, self.last = self.last, input
        return before


def function() -> None: ...


def wrapped(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def outer(*arguments: Any) -> Any:
        return inner(*arguments)

    return outer


@wrapped
def decorated() -> None: ...


@functools.cache
def nothing_asked() -> list[Any]:
    return []


@functools.lru_cache(maxsize=8)
def asked(text: str) -> str:
    return text


@functools.singledispatch
def dispatched(item: Any) -> Any:
    return None


attribute_form("a class", lambda: Plain)
attribute_form("a metaclass", lambda: Meta)
attribute_form("a class made by type", lambda: type("Made", (), {}))
attribute_form("an abstract class", lambda: Abstract)
attribute_form("a function", lambda: function)
attribute_form("a decorated function", lambda: decorated)
attribute_form("a wrapped function", lambda: decorated.__wrapped__)  # type: ignore[attr-defined]
attribute_form("a lambda", lambda: lambda: None)
attribute_form("a method's function", lambda: Plain.method)
attribute_form("a static method", lambda: Plain.static)
attribute_form("a class method's function", lambda: Plain.of_class.__func__)  # type: ignore[attr-defined]
attribute_form("a partial", lambda: functools.partial(function))
attribute_form("a cached function", lambda: nothing_asked)
attribute_form("a module", lambda: _here)
attribute_form("an object", Plain)
attribute_form("an object with slots", Slots_made := lambda: _with(Slots(), None))
attribute_form("a data class", lambda: Data)
attribute_form("a data object", Data)
attribute_form("a pydantic model", Model)
attribute_form("an enumeration", lambda: Color)
attribute_form("an enumeration's member", lambda: Color.RED)
attribute_form("a named tuple's class", lambda: Pair)
attribute_form("a simple namespace", types.SimpleNamespace)
attribute_form("a descriptor", WithDescriptor)
attribute_form("a property", WithProperty)
attribute_form("a thread-local", threading.local)
attribute_form("a module made by hand", lambda: types.ModuleType("handmade"))
container_form("list", list, lambda held, text: held.append(text))
container_form("list of a class", lambda: Model.shared, lambda held, text: held.append(text))
container_form("list of a data object", lambda: Data().several, lambda held, text: held.append(text))
container_form("list in a tuple", lambda: Pair([]).first, lambda held, text: held.append(text))
container_form("dictionary", dict, lambda held, text: held.update({text: 1}))
container_form("set", set, lambda held, text: held.add(text))
container_form("deque", deque, lambda held, text: held.append(text))
container_form("counter", Counter, lambda held, text: held.update([text]))
container_form("ordered dictionary", OrderedDict, lambda held, text: held.update({text: 1}))
container_form("dictionary with a default", lambda: defaultdict(list), lambda held, text: held[text].append(1))
container_form("chain of dictionaries", lambda: ChainMap({}), lambda held, text: held.update({text: 1}))
container_form("bytearray", bytearray, lambda held, text: held.extend(text.encode()))
container_form("array", lambda: array.array("b"), lambda held, text: held.frombytes(text.encode()))
container_form("numpy array", lambda: np.zeros(4), lambda held, text: held.__setitem__(0, len(text)))
container_form("list that is made when it is asked for", lambda: Lazy().found, lambda held, text: held.append(text))
container_form("list of cached function", nothing_asked, lambda held, text: held.append(text))
container_form("list of default", lambda: (lambda kept=[]: kept)(), lambda held, text: held.append(text))


def _with(item: Any, value: Any) -> Any:
    item.kept = value
    return item


@form
def a_global() -> Step:
    def step(text: str) -> Any:
        global LAST
        before, LAST = LAST, text
        return before

    return step


@form
def a_list_of_the_module() -> Step:
    def step(text: str) -> Any:
        before = list(KEPT)
        KEPT.append(text)
        return before or None

    return step


@form
def globals_by_name() -> Step:
    def step(text: str) -> Any:
        before = globals().get("unheard_of")
        globals()["unheard_of"] = text
        return before

    return step


@form
def an_import_of_ones_own_module() -> Step:
    def step(text: str) -> Any:
        import forms

        before = getattr(forms, "imported", None)
        forms.imported = text  # type: ignore[attr-defined]
        return before

    return step


@form
def builtins_imported() -> Step:
    def step(text: str) -> Any:
        import builtins

        before = getattr(builtins, "kept", None)
        builtins.kept = text  # type: ignore[attr-defined]
        return before

    return step


@form
def builtins_by_name() -> Step:
    def step(text: str) -> Any:
        held = __builtins__ if isinstance(__builtins__, dict) else vars(__builtins__)
        before = held.get("kept_there")
        held["kept_there"] = text
        return before

    return step


@form
def a_variable_around() -> Step:
    last: Any = None

    def step(text: str) -> Any:
        nonlocal last
        before, last = last, text
        return before

    return step


@form
def a_default() -> Step:
    def step(text: str, kept: list[Any] = []) -> Any:  # noqa: B006
        before = list(kept)
        kept.append(text)
        return before or None

    return step


@form
def a_default_by_name() -> Step:
    def step(text: str, *, kept: dict[str, Any] = NAMED) -> Any:
        before = dict(kept)
        kept["text"] = text
        return before or None

    return step


@form
def defaults_exchanged() -> Step:
    def step(text: str, before: Any = None) -> Any:
        step.__defaults__ = (text,)
        return before

    return step


@form
def code_exchanged() -> Step:
    def step(text: str) -> Any:
        before = helper()
        helper.__code__ = eval(f"lambda: {text!r}").__code__
        return before

    def helper() -> Any:
        return None

    return step


@form
def annotations() -> Step:
    def step(text: str) -> Any:
        before = step.__annotations__.get("kept")
        step.__annotations__["kept"] = text
        return before

    return step


@form
def annotations_of_a_class() -> Step:
    def step(text: str) -> Any:
        before = Data.__annotations__.get("text")
        Data.__annotations__["text"] = text
        return before

    return step


@form
def a_documentation() -> Step:
    def step(text: str) -> Any:
        before, function.__doc__ = function.__doc__, text
        return before

    return step


@form
def the_globals_of_another_function() -> Step:
    def step(text: str) -> Any:
        before = function.__globals__.get("elsewhere")
        function.__globals__["elsewhere"] = text
        return before

    return step


@form
def a_cache_of_answers() -> Step:
    def step(text: str) -> Any:
        before = asked.cache_info().currsize
        asked(text)
        return before or None

    return step


@form
def a_dispatch() -> Step:
    def step(text: str) -> Any:
        before = dispatched(text)
        dispatched.register(str, lambda item: text)
        return before

    return step


@form
def a_registry_of_subclasses() -> Step:
    def step(text: str) -> Any:
        before = list(Registry.names)
        type(text, (Registry,), {})
        return before or None

    return step


@form
def subclasses_by_the_class() -> Step:
    def step(text: str) -> Any:
        before = [kind.__name__ for kind in Plain.__subclasses__()]
        NAMED["alive"] = Meta(text, (Plain,), {})
        return before or None

    return step


@form
def registered_with_an_abstract_class() -> Step:
    def step(text: str) -> Any:
        before = issubclass(dict, Abstract)
        Abstract.register(dict)
        return before or None

    return step


@form
def what_dies() -> Step:
    def step(text: str) -> Any:
        before = Dying.last
        Dying(text)
        return before

    return step


@form
def a_hidden_attribute() -> Step:
    held = Model()

    def step(text: str) -> Any:
        before, held._hidden = held._hidden, text
        return before

    return step


@form
def a_field_s_default() -> Step:
    def step(text: str) -> Any:
        before = Model.model_fields["kept"].default
        Model.model_fields["kept"].default = text
        return before

    return step


@form
def a_flag() -> Step:
    def step(text: str) -> Any:
        before = list(Flagged._value2member_map_)
        Flagged(len(text) * 2)
        return before if len(before) > 1 else None

    return step


@form
def a_method_put_on_a_class() -> Step:
    def step(text: str) -> Any:
        before = Plain().method()
        Plain.method = lambda self: text  # type: ignore[method-assign, assignment, return-value]
        return before

    return step


@form
def another_class_for_an_object() -> Step:
    held = Plain()

    def step(text: str) -> Any:
        before = type(held).__name__
        held.__class__ = type(text, (Plain,), {})
        return None if before == "Plain" else before

    return step


@form
def a_context_variable() -> Step:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("kept", default=None)

    def step(text: str) -> Any:
        before = variable.get()
        variable.set(text)
        return before

    return step


@form
def a_context_variable_s_default() -> Step:
    variable: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("kept", default=[])  # noqa: B039

    def step(text: str) -> Any:
        before = list(variable.get())
        variable.get().append(text)
        return before or None

    return step


@form
def a_weak_dictionary() -> Step:
    key = Plain()
    held: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary({key: None})

    def step(text: str) -> Any:
        before = held[key]
        held[key] = text
        return before

    return step


@form
def a_weak_reference() -> Step:
    key = Plain()
    reference = weakref.ref(key)

    def step(text: str) -> Any:
        held: Any = reference()
        before = getattr(held, "text", None) if held is key else "lost"
        key.text = text  # type: ignore[attr-defined]
        return before

    return step


@form
def a_text_stream() -> Step:
    held = io.StringIO()

    def step(text: str) -> Any:
        before = held.getvalue()
        held.write(text)
        return before or None

    return step


@form
def a_stream_of_bytes() -> Step:
    held = io.BytesIO()

    def step(text: str) -> Any:
        before = held.getvalue()
        held.write(text.encode())
        return before or None

    return step


@form
def a_count() -> Step:
    held = itertools.count()

    def step(text: str) -> Any:
        return next(held) or None

    return step


@form
def an_iterator() -> Step:
    held = iter([None, "second", "third"])

    def step(text: str) -> Any:
        return next(held)

    return step


@form
def a_generator() -> Step:
    def numbers() -> Iterator[Any]:
        before: Any = None
        while True:
            before = yield before

    held = numbers()
    next(held)
    return held.send  # type: ignore[attr-defined, no-any-return]


@form
def a_table_in_memory() -> Step:
    held = sqlite3.connect(":memory:", check_same_thread=False)

    def step(text: str) -> Any:
        held.execute("CREATE TABLE IF NOT EXISTS kept (text)")
        held.execute("INSERT INTO kept VALUES (?)", [text])
        return held.execute("SELECT count(*) FROM kept").fetchone()

    return step


@form
def a_queue() -> Step:
    held: queue.SimpleQueue[str] = queue.SimpleQueue()

    def step(text: str) -> Any:
        before = None if held.empty() else held.get()
        held.put(text)
        return before

    return step


@form
def a_lock() -> Step:
    held = threading.Lock()

    def step(text: str) -> Any:
        return None if held.acquire(blocking=False) else "locked"

    return step


@form
def an_event() -> Step:
    held = threading.Event()

    def step(text: str) -> Any:
        before = held.is_set()
        held.set()
        return before or None

    return step


@form
def an_open_file() -> Step:
    held = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def step(text: str) -> Any:
        held.seek(0)
        before = held.read()
        held.write(text)
        return before or None

    return step


@form
def code_that_is_executed() -> Step:
    around: dict[str, Any] = {}
    exec("last = None\ndef step(text):\n    global last\n    before, last = last, text\n    return before", around)
    return around["step"]  # type: ignore[no-any-return]


@form
def code_executed_in_the_call() -> Step:
    def step(text: str) -> Any:
        found: dict[str, Any] = {"text": text}
        exec("before = globals().get('executed'); globals()['executed'] = text", globals(), found)
        return found["before"]

    return step


@form
def a_callable_object() -> Any:
    return RunnableLambda(Member().answer)


class Member:
    def __init__(self) -> None:
        self.last: Any = None

    def answer(self, text: str) -> Any:
        before, self.last = self.last, text
        return before


@form
def a_runnable_of_ones_own() -> Any:
    return Counting()


class Named:
    """An object that is taken by its name."""

    kept: Any = None

    def __reduce__(self) -> str:
        return "NAMED_OBJECT"


NAMED_OBJECT = Named()


@form
def an_object_that_is_pickled_by_its_name() -> Step:
    def step(text: str) -> Any:
        before, NAMED_OBJECT.kept = NAMED_OBJECT.kept, text
        return before

    return step


@form
def a_tool() -> Any:
    kept: list[Any] = []

    def search(text: str) -> str:
        """Search."""
        kept.append(text)
        return str(kept[:-1] or "")

    tool = StructuredTool.from_function(search)
    return RunnableLambda(lambda text: {"text": text}) | tool | (lambda found: found or None)


@form
def a_prompt_s_variables() -> Any:
    prompt = PromptTemplate.from_template("{kept}{text}").partial(kept="")

    def step(text: str) -> Any:
        before = prompt.partial_variables["kept"]
        prompt.partial_variables["kept"] = text
        return before or None

    return step


@form
def the_metadata_of_a_step() -> Any:
    inner = RunnablePassthrough().with_config(metadata={})

    def step(text: str) -> Any:
        before = dict(inner.config["metadata"])
        inner.config["metadata"]["kept"] = text
        return before or None

    return step


@form
def a_graph_s_node() -> Any:
    from langgraph.graph import START, StateGraph

    kept: list[Any] = []

    def node(state: dict[str, Any]) -> dict[str, Any]:
        before = list(kept)
        kept.append(state["text"])
        return {"found": before or None}

    graph = StateGraph(State).add_node("node", node).add_edge(START, "node").compile()
    return RunnableLambda(lambda text: {"text": text}) | graph | (lambda state: state.get("found"))


class State(TypedDict, total=False):
    text: str
    found: Any


# What the threat model lists: it stays shared.


@form
def listed_a_library_s_class() -> Step:
    def step(text: str) -> Any:
        before = getattr(Document, "kept", None)
        Document.kept = text  # type: ignore[attr-defined]
        return before

    return step


@form
def listed_a_library_s_module() -> Step:
    def step(text: str) -> Any:
        before = getattr(logging, "kept", None)
        logging.kept = text  # type: ignore[attr-defined]
        return before

    return step


@form
def listed_a_logger() -> Step:
    log = logging.getLogger("kept")

    def step(text: str) -> Any:
        before = log.name if log.name != "kept" else None
        log.name = text
        return before

    return step


@form
def listed_the_environment() -> Step:
    def step(text: str) -> Any:
        before = os.environ.get("DPICL_KEPT")
        os.environ["DPICL_KEPT"] = text
        return before

    return step


@form
def listed_loaded_modules() -> Step:
    def step(text: str) -> Any:
        held = sys.modules["forms"]
        before = getattr(held, "by_sys", None)
        held.by_sys = text  # type: ignore[attr-defined]
        return before

    return step


# -- what a reader found who looked for more ---------------------------------------------------------------------------

Tall = TypeVar("Tall", bound=Plain)
attribute_form("a type variable", lambda: Tall)
attribute_form("a type variable's bound", lambda: Tall.__bound__)
attribute_form("a cache around a library's function", lambda: functools.lru_cache(json.loads))


@form
def a_view_of_a_large_array() -> Step:
    held = np.zeros((400, 400))[:, ::2]

    def step(text: str) -> Any:
        before, held[0, 0] = float(held[0, 0]), len(text)
        return before or None

    return step


@form
def a_read_only_array_that_is_opened() -> Step:
    held = np.zeros(20_000)
    held.flags.writeable = False

    def step(text: str) -> Any:
        held.setflags(write=True)
        before, held[0] = float(held[0]), len(text)
        return before or None

    return step


@form
def what_a_cache_around_a_library_s_function_keeps() -> Step:
    load = functools.lru_cache(json.loads)

    def step(text: str) -> Any:
        found = load("[]")
        before = list(found)
        found.append(text)
        return before or None

    return step


@form
def a_function_whose_module_claims_to_be_a_library() -> Step:
    around: dict[str, Any] = {"__name__": "json"}
    exec("last = None\ndef step(text):\n    global last\n    before, last = last, text\n    return before", around)
    return around["step"]  # type: ignore[no-any-return]


@form
def a_module_made_by_hand_with_a_library_s_name() -> Step:
    held = types.ModuleType("json")

    def step(text: str) -> Any:
        before = getattr(held, "kept", None)
        held.kept = text  # type: ignore[attr-defined]
        return before

    return step


class Mangled(FakeListLLM):
    """A model of the user's own that says that it is a library's."""

    kept: list[Any] = Field(default_factory=list)


Mangled.__module__ = "langchain_core.language_models.fake"


@form
def a_model_that_says_it_is_a_library_s() -> Step:
    held = Mangled(responses=["a"])

    def step(text: str) -> Any:
        before = list(held.kept)
        held.kept.append(text)
        return before or None

    return step


@form
def a_function_in_a_field_of_a_library_s_object() -> Any:
    kept: list[Any] = []

    def counted(text: str) -> list[int]:
        kept.append(text)
        return [len(kept)]

    llm = FakeListLLM(responses=["a"], custom_get_token_ids=counted)
    return RunnableLambda(lambda text: llm.get_token_ids(text)) | (lambda found: found if found != [1] else None)


@form
def constants_of_a_code() -> Step:
    def step(text: str) -> Any:
        held = "here"
        before = getattr(held, "kept", None)
        held.kept = text  # type: ignore[attr-defined]
        return before

    constants = tuple(Plain() if each == "here" else each for each in step.__code__.co_consts)
    step.__code__ = step.__code__.replace(co_consts=constants)
    return step


def counted(kept: list[Any], text: str) -> list[int]:
    kept.append(text)
    return [len(kept)]


class CountingCall:
    """A callable object that counts."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, text: str) -> list[int]:
        return counted(self.kept, text)

    def __hash__(self) -> int:
        return 1


def model_form(name: str, holder: Callable[[], Any]) -> None:
    """A form that keeps the text in what a library's model calls."""

    def make() -> Any:
        llm = FakeListLLM(responses=["a"], custom_get_token_ids=holder())
        return RunnableLambda(lambda text: llm.get_token_ids(text)) | (lambda found: found if found != [1] else None)

    FORMS[f"{name} in a field of a library's model"] = make


model_form("a partial", lambda: functools.partial(counted, []))
model_form("a partial of a method", lambda: functools.partial(CountingCall().__call__))
model_form("a callable object", CountingCall)


@form
def an_object_deep_in_a_model() -> Step:
    llm = FakeListLLM(responses=["a"], metadata={"held": [[{"it": Plain()}]]})

    def step(text: str) -> Any:
        held = (llm.metadata or {})["held"][0][0]["it"]
        before = getattr(held, "kept", None)
        held.kept = text
        return before

    return step


@form
def a_hook_of_a_client() -> Step:
    kept: list[Any] = []

    def hook(request: httpx.Request) -> None:
        request.headers["before"] = kept[-1] if kept else ""
        kept.append(request.headers["text"])

    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=request.headers["before"]))
    client = httpx.Client(event_hooks={"request": [hook]}, transport=transport)
    return lambda text: client.get("http://nowhere", headers={"text": text}).text or None


@form
def listed_the_module_of_a_builtin_function() -> Step:
    def step(text: str) -> Any:
        held: Any = len.__self__  # type: ignore[attr-defined]
        before = getattr(held, "kept_by_len", None)
        held.kept_by_len = text
        return before

    return step


@form
def listed_a_filter_of_a_logger() -> Step:
    class Filter(logging.Filter):
        last: Any = None

        def filter(self, record: Any) -> bool:
            record.before, self.last = self.last, record.msg
            return True

    log = logging.Logger("a logger with a filter")
    log.addFilter(Filter())

    def step(text: str) -> Any:
        record: Any = logging.LogRecord("", 20, "", 1, text, (), None)
        log.filter(record)
        return record.before

    return step
