"""Python that ordinary chains are written in works in a copy, and what it keeps is the copy's own."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import functools
import threading
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import pydantic.dataclasses
import pytest
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import tool
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    TypeAdapter,
    computed_field,
    create_model,
    model_validator,
    validate_call,
)
from typing_extensions import TypedDict

from langchain_dpicl.errors import UnsafeConfigurationError
from langchain_dpicl.private.copy import Pristine

KEPT: list[Any] = []
STEPS: dict[str, Any] = {}
Held = TypeVar("Held")


def step(made: Any) -> Any:
    STEPS[getattr(made, "__name__", None) or made.name] = made
    return made


def kept(text: Any) -> list[Any]:
    """Keep it, and return all that is kept."""
    KEPT.append(text)
    return list(KEPT)


def raised(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return type(error).__name__
    return ""


# -- functions ---------------------------------------------------------------------------------------------------------


@validate_call
def checked(text: str, number: int = 3) -> Any:
    return kept(f"{text}{number}")


@step
def a_function_that_checks_its_arguments(text: str) -> Any:
    wrong: Any = "no number"
    return checked(text), raised(lambda: checked(text, number=wrong))


@step
@tool
@validate_call
def a_tool_that_checks_its_arguments(text: str) -> str:
    """Search."""
    return str(kept(text))


def in_a_function() -> Callable[[str], Any]:
    lock = threading.Lock()  # in no function's closure, but among the variables that pydantic keeps

    class Local(BaseModel):
        text: str

    @validate_call(validate_return=True)
    def of_local(local: Local) -> str:
        return local.text

    @validate_call(config=ConfigDict(strict=True))
    async def of_text(text: str) -> str:
        return text

    del lock
    lock = threading.Lock()  # noqa: F841
    given: Any = {"text": "held"}
    return lambda text: (of_local(given), asyncio.run(of_text(text)))


STEPS["checks that are made in a function"] = in_a_function()


@contextlib.contextmanager
def managed(text: str) -> Iterator[Any]:
    yield kept(text)


@contextlib.asynccontextmanager
async def managed_later(text: str) -> AsyncIterator[Any]:
    yield kept(text)


@managed("a decorator")
def in_a_context(text: str) -> Any:
    return kept(text)


READY = managed("made before")


@step
def context_managers(text: str) -> Any:
    async def later() -> Any:
        async with managed_later(text) as found:
            return found

    with managed(text) as found, READY as ready:
        return found, ready, in_a_context(text), asyncio.run(later())


def wrapped(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def outer(*arguments: Any, **named: Any) -> Any:
        return inner(*arguments, **named)

    return outer


@step
@wrapped
def a_decorated_function(text: str) -> Any:
    return kept(text)


@functools.singledispatch
def dispatched(item: Any) -> Any:
    return "anything"


@dispatched.register
def _(item: str) -> Any:
    return kept(item)


class Partial:
    def pair(self, first: str, second: str) -> Any:
        return first, kept(second)

    of_one = functools.partialmethod(pair, "first")

    @functools.singledispatchmethod
    def dispatched(self, item: Any) -> Any:
        return "anything"

    @dispatched.register
    def _(self, item: str) -> Any:
        return kept(item)


@step
def functions_by_their_arguments(text: str) -> Any:
    return dispatched(text), dispatched(1), Partial().of_one(text), Partial().dispatched(text), Partial().dispatched(1)


# -- classes -----------------------------------------------------------------------------------------------------------


@functools.total_ordering
class Ordered:
    def __init__(self, size: int) -> None:
        self.size = size

    def __lt__(self, other: Ordered) -> bool:
        return self.size < other.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ordered) and self.size == other.size

    def __hash__(self) -> int:
        return hash(self.size)


class Slots:
    __slots__ = ("__hidden", "__weakref__", "shown")

    def __init__(self) -> None:
        self.__hidden, self.shown = "of slots", 2

    def hidden(self) -> str:
        return self.__hidden


class MoreSlots(Slots):
    __slots__ = ("__hidden",)

    def __init__(self) -> None:
        super().__init__()
        self.__hidden = "of more"

    def both(self) -> Any:
        return self.__hidden, self.hidden()


SLOTS = MoreSlots()


class Titled(property):
    title = "a property"


class WithTitled:
    @Titled
    def shown(self) -> Any:
        return KEPT

    @shown.setter
    def shown(self, text: str) -> None:
        KEPT.append(text)


@step
def classes_with_slots_properties_and_an_order(text: str) -> Any:
    other: Any = WithTitled()
    other.shown = text
    found = vars(WithTitled)["shown"].title, Ordered(1) <= Ordered(2)
    return list(other.shown), found, SLOTS.both(), MoreSlots().both(), raised(lambda: setattr(SLOTS, "unknown", 1))


@dataclasses.dataclass(slots=True, frozen=True)
class Frozen:
    number: int
    several: tuple[str, ...] = ()


@dataclasses.dataclass(slots=True)
class Slotted:
    several: list[str] = dataclasses.field(default_factory=list)


FROZEN = Frozen(1, ("held",))
BY_FROZEN = {FROZEN: "found"}


@step
def data_classes_with_slots(text: str) -> Any:
    item = Slotted()
    item.several.append(text)
    changed = raised(lambda: setattr(FROZEN, "number", 2))
    return item.several, dataclasses.replace(FROZEN, number=3).several, BY_FROZEN[Frozen(1, ("held",))], changed


class Abstract(abc.ABC):
    @abc.abstractmethod
    def found(self) -> Any: ...


@Abstract.register
class Registered:
    size = 1

    def found(self) -> Any:
        return 1


@runtime_checkable
class Sized(Protocol):
    size: int

    def found(self) -> Any: ...


class Pair(NamedTuple):
    first: int
    second: str = "second"

    def both(self) -> Any:
        return self.first, self.second


class Box(Generic[Held]):
    def __init__(self, held: Held) -> None:
        self.held = held


class TextBox(Box[str]):
    pass


class Behind:
    """A wrapper that asks what it wraps."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


BEHIND = Behind([])


@step
def abstract_classes_protocols_generics_and_wrappers(text: str) -> Any:
    BEHIND.append(text)
    kinds = isinstance(Registered(), Abstract), isinstance(Registered(), Sized), isinstance(text, Sized)
    pair = Pair(1)._replace(second=text).both(), Pair._fields
    return kinds, pair, Box[int](3).held, TextBox(text).held, list(BEHIND.inner), raised(Abstract)


# -- pydantic ----------------------------------------------------------------------------------------------------------


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    name: str = "Tom"


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str = "Rex"


class Leaf(TypedDict):
    dog: Dog


class Zoo(BaseModel):
    model_config = ConfigDict(frozen=True)
    seen: ClassVar[list[Any]] = []
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    leaf: Leaf | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def title(self) -> str:
        return self.pet.name.upper()

    @model_validator(mode="after")
    def noticed(self) -> Zoo:
        self.seen.append(self.pet.name)
        return self


class Left(BaseModel):
    right: Right | None = None


class Right(BaseModel):
    left: Left | None = None


class State(TypedDict):
    cat: Cat


class Plain(typing.TypedDict):
    cat: Cat


class Cats(RootModel[list[Cat]]):
    pass


@pydantic.dataclasses.dataclass
class Checked:
    number: int
    cat: Cat | None = None


class Answer(BaseModel, Generic[Held]):
    held: Held


Made = create_model("Made", number=(int, 3), text=(str, ...))
ZOOS = TypeAdapter(list[Zoo])
LEAVES = TypeAdapter(list[Leaf])


@step
def a_model_of_which_nothing_else_is_named(text: str) -> Any:
    zoo = Zoo.model_validate({"pet": {"kind": "dog", "name": text}, "leaf": {"dog": {}}})
    return zoo.model_dump(), list(Zoo.seen)


@step
def models_that_hold_each_other(text: str) -> Any:
    return Left.model_validate({"right": {"left": {"right": {}}}}).model_dump(), text


@step
def models_made_otherwise(text: str) -> Any:
    made = Made(text=text)
    checked: Any = Checked(number="3", cat={"name": text})  # type: ignore[arg-type]
    answer = Answer[Cat].model_validate({"held": {"name": text}})
    return made.model_dump(), Cats([Cat()]).model_dump(), checked.number, checked.cat.name, type(answer.held) is Cat


@step
def adapters(text: str) -> Any:
    zoos = ZOOS.validate_python([{"pet": {"kind": "cat", "name": text}}])
    typed = State(cat=Cat())["cat"].kind, Plain(cat=Cat())["cat"].name, sorted(Plain.__annotations__)
    return typed, zoos[0].title, LEAVES.validate_python([{"dog": {}}])[0]["dog"].name


@pytest.mark.parametrize("name", STEPS)
def test_it_works_and_keeps_nothing(name: str) -> None:
    made = STEPS[name]
    chain = made if isinstance(made, Runnable) else RunnableLambda(made)
    copies = Pristine(chain)
    found = [copies.copy().chain.invoke(text) for text in ("Ada", "Bob")]
    assert KEPT == Zoo.seen == [], "a call wrote into the caller's own"
    nothing_kept = chain.invoke("Ada")
    KEPT.clear()
    Zoo.seen.clear()
    BEHIND.inner.clear()
    assert found[0] == nothing_kept
    assert repr(found[1]) == repr(nothing_kept).replace("Ada", "Bob").replace("ADA", "BOB")


def test_a_context_manager_that_was_entered_is_refused() -> None:
    entered = managed("entered")
    entered.__enter__()
    KEPT.clear()
    with pytest.raises(UnsafeConfigurationError, match="generator"):
        Pristine(RunnableLambda(lambda text: entered))


CHAIN = "@dataclass({2})\nclass Kind{0}:\n    like: Kind{1}\n    def first(self) -> Kind{1}: return self.like\n"


def test_classes_may_name_each_other_in_long_chains() -> None:
    """150 would be too many if a class were pickled within what names it. All but the last have few methods, of which
    each takes its time."""
    around: dict[str, Any] = {"__name__": "long", "dataclass": dataclasses.dataclass, "Kind0": int}
    few = "eq=False, repr=False"
    text = "".join(CHAIN.format(number, number - 1, few if number < 200 else "frozen=True") for number in range(1, 201))
    exec(compile(text, "long", "exec", dont_inherit=True), around)
    last = around["Kind200"]
    found = {last(3): "found"}
    copy = Pristine(RunnableLambda(lambda text: (last, found[last(3)], dataclasses.fields(last)[0].type))).copy()
    kind, text, named = copy.chain.invoke("")
    assert (text, kind.__annotations__["like"], kind.first.__annotations__["return"]) == ("found", named, named)
    assert named is not around["Kind199"]


def test_more_than_that_is_refused_with_its_name() -> None:
    held: list[Any] = []
    for _ in range(100_000):
        held = [held]
    with pytest.raises(UnsafeConfigurationError, match="recursion"):
        Pristine(RunnableLambda(lambda text: held))
