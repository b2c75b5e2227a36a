"""`Structured`: the exact law of a release, what is read, and every model that is refused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from datetime import date
from enum import Enum, IntEnum
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import ways
from exact import Law, check_profile, law, mixture
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable
from pydantic import AfterValidator, BaseModel, Field, RootModel, field_validator, model_validator
from test_candidate_vote import Table

from langchain_dpicl import (
    DPAggregate,
    InfeasiblePlan,
    InvalidParameter,
    NoisyMean,
    NoisyMedian,
    PlanMismatch,
    Structured,
)
from langchain_dpicl.aggregators.numbers import STEPS
from langchain_dpicl.privacy import MECHANISMS, LineRequest, PrivacyPlan, SecureRandomness
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.mechanisms import mean_sigma
from langchain_dpicl.privacy.profile import BoundedRange, BoundedRanges, Composed, Gaussian
from langchain_dpicl.private.boundary import ABSTAIN


class Colour(Enum):
    RED = "red"
    BLUE = "dark blue"


class Grade(IntEnum):
    LOW = 1
    HIGH = 2


class Visit(BaseModel):
    urgent: bool
    colour: Colour
    grade: Grade | None
    kind: Literal["call", 3, None]
    age: int = Field(ge=0, le=120)
    fever: float | None = Field(None, ge=35, le=42)
    day: Annotated[date, Field(ge=date(2026, 1, 1), le=date(2026, 12, 31))] | None = None
    drug: str = Field(alias="medication")


def visit() -> Structured[Visit]:
    return Structured(Visit, candidates={"drug": ["aspirin", "insulin"]}, means=["age"], weights={"age": 3})


READ = {
    "urgent": True, "colour": Colour.BLUE, "grade": Grade.HIGH, "kind": 3, "age": 55, "fever": None,
    "day": date(2026, 5, 6), "drug": "insulin",
}  # fmt: skip
GIVEN = {
    "urgent": "yes", "colour": "Dark Blue", "grade": 2, "kind": "3", "age": "55 years", "fever": None,
    "day": "2026-05-06", "medication": "Insulin, twice a day",
}  # fmt: skip
JSON = (
    '{"urgent": true, "colour": "dark blue", "grade": "2", "kind": 3, "age": 55.0, "fever": null, '
    '"day": "2026-05-06", "medication": "insulin"}'
)


@pytest.mark.parametrize(
    "output",
    [
        GIVEN,
        Visit.model_construct(**READ),
        JSON,
        f"Here it is:\n```json\n{JSON}\n```\nAnything {{else}}?",
        AIMessage(JSON),
        AIMessage("", tool_calls=[{"name": "Visit", "args": GIVEN, "id": "1"}]),
        {"raw": AIMessage("no"), "parsed": GIVEN, "parsing_error": None},
        {**GIVEN, "more": object()},
    ],
    ids=["mapping", "instance", "json", "fenced", "message", "tool call", "raw", "more keys"],
)
def test_every_form_of_an_output_is_read(output: object) -> None:
    reader = visit()
    codes = reader.encode(output)
    assert reader.shown(codes) == READ
    assert asyncio.run(reader.aencode(output)) == codes
    assert all(type(code) is int for code in codes)


def test_a_field_that_cannot_be_read_abstains_alone() -> None:
    reader = visit()
    given = {**GIVEN, "urgent": "perhaps", "colour": "green", "age": True, "fever": "high", "day": [1], "medication": 5}
    assert reader.shown(reader.encode(given)) == {"grade": Grade.HIGH, "kind": 3}
    assert reader.encode({"fever": 50})[5] == 100, "clipped to its bound"
    assert reader.encode({"urgent": False}) == (1, None, None, None, None, -1, -1, None), "an optional one is not there"


@pytest.mark.parametrize(
    "output", [None, "", "no json", "{", "[]", 5, {}, {"age": None}, [GIVEN], "{" * 100_000, '{"age": NaN}', ABSTAIN]
)
def test_what_has_no_field_abstains(output: object) -> None:
    class Aged(BaseModel):
        age: int = Field(ge=0, le=120)

    with pytest.raises((ValueError, RecursionError)):
        Structured(Aged).encode(output)


def test_a_release_is_an_instance_and_loads_as_itself() -> None:
    bound = visit().under("structured", Crowd(20, 20.0, own_calls=True)).prepare({}, {})
    released = bound.aggregate([bound.encode(GIVEN)] * 20, 90.0, SecureRandomness())
    assert isinstance(released, Visit)
    assert {**dict(released), "age": 55} == READ
    assert bound.load(bound.dump(released), {}) == released
    empty = bound.aggregate([], 90.0, SecureRandomness())
    assert isinstance(empty, Visit), "nobody answers: drawn from the prior, and no error says so"
    told = bound.zero_shot(JSON, {})
    assert told is not None
    assert dict(told) == READ
    assert bound.zero_shot("none", {}) is None


def test_shares_add_up_and_weights_divide_them() -> None:
    shares, means = visit().options["shares"], visit().options["mean_shares"]
    assert sum(shares) + sum(means) == pytest.approx(1.0)
    assert means == (pytest.approx(0.3),)
    assert list(shares[4:8]) == pytest.approx([0.05] * 4), "presence and value"
    assert len(shares) == 9


# -- whole releases ----------------------------------------------------------------------------------------------------

QUESTION = {"input": "how is he?"}


class Seen(BaseModel):
    sick: bool
    level: int | None = Field(None, ge=0, le=10)


class Scripted(GenericFakeChatModel):
    """A chat model that calls the tool of a schema."""

    messages: Any = None

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        call = {"name": "Seen", "args": {"sick": True, "level": 4}, "id": "1"}
        return ChatResult(generations=[ChatGeneration(message=AIMessage("", tool_calls=[call]))])


MEMBERS: dict[str, Any] = {
    "json": lambda values: '{"sick": true, "level": 4}',
    "mapping": lambda values: {"sick": True, "level": 4},
    "structured output": Scripted().with_structured_output(Seen),
    "with the raw message": Scripted().with_structured_output(Seen, include_raw=True),
}


@pytest.mark.parametrize("way", ["invoke", "astream"])
@pytest.mark.parametrize("kind", MEMBERS)
async def test_a_release_is_one_charge_and_is_replayed_as_it_was(kind: str, way: str, sealed_of: Any) -> None:
    member = MEMBERS[kind]
    if isinstance(member, Runnable):
        member = PromptTemplate.from_template("{input} {examples}") | member
    sealed = sealed_of(member, vote=Structured(Seen), members=6, owners=200, return_receipt=True, replay=True)
    answered = await ways.ask(way, sealed, QUESTION)
    assert answered["answer"] == Seen(sick=True, level=4)
    assert type(answered["answer"]) is Seen
    again = await ways.ask(way, sealed, QUESTION)
    assert (again["answer"], again["receipt"]["replayed"]) == (answered["answer"], True)
    assert sealed.budget.spent() == 1
    assert sealed.budget.plan.lines["structured"].options["shares"][1] == 0.25
    assert sealed.with_receipt().get_output_jsonschema()["$defs"]["Seen"]["required"] == ["sick"]


def test_members_that_say_nothing_of_the_model_are_no_error(sealed_of: Any) -> None:
    sealed = sealed_of(lambda values: "I do not know", vote=Structured(Seen), members=6, owners=200)
    assert isinstance(sealed.invoke(QUESTION), Seen)


def test_another_model_on_the_line_and_a_plan_that_is_all_noise_are_refused(sealed_of: Any) -> None:
    first = sealed_of(MEMBERS["json"], vote=Structured(Seen), members=6, owners=200)
    first.invoke(QUESTION)
    other = first.ensemble | DPAggregate(Structured(Seen, weights={"sick": 2}), first.budget)
    with pytest.raises(PlanMismatch):
        other.invoke(QUESTION)
    with pytest.raises(InfeasiblePlan, match="overturned"):
        sealed_of(MEMBERS["json"], vote=Structured(Seen), members=6, owners=200, epsilon=0.1).invoke(QUESTION)
    assert first.budget.spent() == 1


@pytest.mark.parametrize("aggregator", [NoisyMedian(0, 10), NoisyMean(0, 10)], ids=repr)
def test_a_number_is_released_and_replayed_alone(aggregator: Any, sealed_of: Any) -> None:
    sealed = sealed_of(lambda values: "about 7 mg", vote=aggregator, members=6, owners=200, replay=True)
    assert [sealed.invoke(QUESTION), sealed.invoke(QUESTION)] == [7, 7]
    assert type(sealed.invoke(QUESTION)) is int
    assert sealed.budget.spent() == 1
    assert sealed.get_output_jsonschema()["type"] == "integer"


# -- the law of a release ----------------------------------------------------------------------------------------------

EPS0, RATE = 2.0, 0.3


class Small(BaseModel):
    sick: bool
    level: int | None = Field(None, ge=0, le=2)


CODES: tuple[Any, ...] = (*itertools.product((0, 1), (-1, 0, 2)), (None, 1), (1, None), ABSTAIN)
Rows = tuple[Any, ...]


@cache
def small_law(rows: Rows, own_calls: bool) -> Law:
    """The exact law of the released instance of these outputs, by the code itself."""
    bound = Structured(Small, weights={"level": 2}).under("structured", Crowd(3, 2.0, own_calls))

    def run(randomness: Any) -> tuple[Any, ...]:
        released = bound.aggregate(rows, EPS0, randomness)
        return released.sick, released.level

    return law(run)


def pairs(own_calls: bool) -> list[tuple[Law, Law]]:
    """Every pair of neighbours: an output added, or replaced by any other."""
    found = []
    for number in range(3):
        for others in itertools.combinations_with_replacement(range(len(CODES)), number):
            rest = tuple(CODES[i] for i in others)
            laws = [small_law((one, *rest), own_calls) for one in CODES]
            found += [(p, small_law(rest, own_calls)) for p in laws]
            found += [] if own_calls or number == 2 else list(itertools.permutations(laws, 2))
    return found


def small_profile(own_calls: bool) -> Any:
    options = {**Structured(Small, weights={"level": 2}).options, "own_calls": float(own_calls)}
    return MECHANISMS["structured"].of(options).profile(EPS0)


@pytest.mark.parametrize("own_calls", [False, True], ids=["replaced", "added"])
def test_a_release_keeps_its_profile_before_and_after_amplification(own_calls: bool) -> None:
    """Brute force over a model of a truth value and an optional number; the amplified pair is the exact mixture."""
    laws, profile = pairs(own_calls), small_profile(own_calls)
    check_profile([*laws, *((q, p) for p, q in laws)], profile)
    mixed = [(mixture([(1 - RATE, absent), (RATE, present)]), absent) for present, absent in laws]
    check_profile(mixed, profile.subsample(RATE), "remove")
    check_profile([(q, p) for p, q in mixed], profile.subsample(RATE), "add")


def test_the_rate_of_added_outputs_breaks_the_profile_if_outputs_are_replaced() -> None:
    laws = [(small_law((a, b), True), small_law((c, b), True)) for a, b, c in itertools.product(CODES, repeat=3)]
    with pytest.raises(AssertionError, match="is claimed"):
        check_profile(laws, small_profile(False))


def test_the_profile_of_a_structured_answer_has_a_part_for_each_mechanism() -> None:
    assert 1.0 / STEPS == 2.0**-16, "the lattice that the family accounts for"
    one = MECHANISMS["structured"].of({"shares": [0.5]}).profile(2.0)
    assert one == BoundedRange(1.0)
    options = {"shares": [0.25, 0.5], "mean_shares": [0.25], "own_calls": 1.0}
    many = MECHANISMS["structured"].of(options).profile(2.0)
    assert isinstance(many, Composed)
    ranges, mean = many.parts
    assert ranges == BoundedRanges((0.5, 1.0))
    assert isinstance(mean, Gaussian)
    assert mean.multiplier == pytest.approx(mean_sigma(0.5, True), rel=1e-6)
    with pytest.raises(InvalidParameter, match="share"):
        MECHANISMS["structured"]()
    for wrong in ({"shares": [0.6, 0.6]}, {"shares": [0.0, 0.5]}, {"shares": [1 / 33] * 33}, {"share_1": 0.5}):
        with pytest.raises(InvalidParameter, match="share"):
            MECHANISMS["structured"].of(wrong)


def test_all_fields_draw_with_their_share_of_the_plans_range() -> None:
    """A mean's noise and a vote's rate are those that the family accounts for, of the same numbers."""

    class Two(BaseModel):
        a: int = Field(ge=0, le=9)
        b: bool

    asked: list[float] = []

    class Told(SecureRandomness):
        def discrete_gaussian(self, sigma: float, size: int) -> Any:
            asked.append(sigma)
            return np.zeros(size, np.int64)

    bound = Structured(Two, means=["a"], weights={"a": 3}).under("structured", Crowd(4, 4.0, own_calls=False))
    bound.aggregate([(STEPS, 0)], 1.6, Told())
    assert asked == [mean_sigma(1.6 * 0.75, False) * STEPS]


def test_a_plan_of_a_structured_answer_is_solved_certified_and_tighter_than_its_parts_alone() -> None:
    def solved(*shares: float) -> float:
        request = LineRequest("structured", 0.1, 20, options={"shares": shares})
        plan = PrivacyPlan.solve(epsilon=1.0, delta=1e-5, lines={"visit": request})
        assert 0.99 < plan.certified_epsilon <= 1.0
        assert PrivacyPlan.from_json(plan.to_json()) == plan
        return plan.lines["visit"].parameter

    one, three = solved(1.0), solved(1 / 3, 1 / 3, 1 / 3)
    assert one < three < 3 * one


# -- models ------------------------------------------------------------------------------------------------------------


class One(Enum):
    ONLY = "only"


class Pair(Enum):
    A = (1, 2)
    B = (3, 4)


def model(annotation: Any, default: Any = ...) -> type[BaseModel]:
    return type("Model", (BaseModel,), {"__annotations__": {"ok": bool, "x": annotation}, "x": default})


BOUNDED = Field(ge=0, le=1)


@pytest.mark.parametrize(
    ("annotation", "default"),
    [
        (list[str], ...), (dict[str, int], ...), (bytes, ...), (Small, ...), (Any, ...), (int | str, ...),
        (One, ...), (Literal["a"], ...), (Literal["a", "A"], ...), (Pair, ...), (Literal[b"a", b"b"], ...),
        (int, ...), (int, Field(ge=0)), (int, Field(gt=0, lt=5)), (int, Field(ge=0, le=9, multiple_of=3)),
        (float, Field(ge=0, le=float("inf"))), (float, Field(ge=float("-inf"), le=1)),
        (float, Field(ge=float("nan"), le=1)),
        (int, Field(ge=3, le=3)), (int, Field(ge=5, le=1)), (str, ...), (date, ...), (date | None, None),
        (Annotated[int, Field(ge=0, le=9), AfterValidator(abs)], ...), (list[int] | None, None),
    ],
)  # fmt: skip
def test_a_field_without_a_mechanism_is_refused_by_its_name(annotation: Any, default: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        Structured(model(annotation, default))
    assert caught.value.parameter == "model.x"


def test_models_with_validators_and_what_is_no_model_are_refused() -> None:
    class Checked(BaseModel):
        x: bool

        @model_validator(mode="after")
        def never(self) -> Any:
            raise ValueError

    class Field1(BaseModel):
        x: bool

        @field_validator("x")
        @classmethod
        def same(cls, value: bool) -> bool:
            return value

    class Empty(BaseModel):
        pass

    for refused in (Checked, Field1, Empty, RootModel[bool], dict, BaseModel, "Visit", Visit.model_construct()):
        with pytest.raises(InvalidParameter, match="model"):
            Structured(refused)  # type: ignore[type-var]
    many = type("Many", (BaseModel,), {"__annotations__": {f"x{i}": bool for i in range(33)}})
    with pytest.raises(InvalidParameter, match="32"):
        Structured(many)


def test_models_that_may_change_or_reject_what_was_drawn_are_refused() -> None:
    """A value that is refused, or becomes another one, after the charge would be lost, or replayed as another."""

    class After(BaseModel):
        x: bool
        y: bool

        def model_post_init(self, _: Any) -> None:
            if not (self.x or self.y):
                raise ValueError

    class Begun(BaseModel):
        x: bool

        def __init__(self, **values: Any) -> None:
            super().__init__(**values)

    class Unset(BaseModel, validate_by_alias=False, validate_by_name=True):
        x: bool = Field(default=False, alias="X")

    raw = type("Raw", (BaseModel,), {"__annotations__": {"x": Colour}, "model_config": {"use_enum_values": True}})
    lower = type("Lower", (BaseModel,), {"__annotations__": {"x": str}, "model_config": {"str_to_lower": True}})
    whole = model(Annotated[int, Field(ge=1.0, le=10.0)])
    turned = model(Annotated[bool, AfterValidator(lambda value: value)])
    for refused, given in (
        (After, {}), (Begun, {}), (Unset, {}), (raw, {}), (whole, {}), (turned, {}),
        (lower, {"candidates": {"x": ["Flu", "Cold"]}}),
    ):  # fmt: skip
        with pytest.raises(InvalidParameter, match="model"):
            Structured(refused, **given)  # type: ignore[type-var]

    class Kept(BaseModel):
        x: bool
        _more: int = 3

    assert Structured(Kept).parts


@pytest.mark.parametrize(
    "given",
    [
        {"candidates": {"drug": []}}, {"candidates": {"drug": ["a"]}}, {"candidates": {"drug": ["a", "A"]}},
        {"candidates": {"drug": ["east", "east"]}, "embeddings": Table()}, {"candidates": {"age": ["a", "b"]}},
        {"candidates": {"none": ["a", "b"]}}, {"means": ["none"]}, {"means": ["urgent"]}, {"weights": {"age": 0}},
        {"weights": {"age": float("inf")}}, {"weights": {"none": 1}}, {},
    ],
)  # fmt: skip
def test_bad_settings_are_named(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match=r"candidates|means|weights|model"):
        Structured(Visit, **{"candidates": {"drug": ["a", "b"]}, **given} if given else {})


def test_candidates_of_a_field_may_be_the_nearest_by_an_embedding() -> None:
    class Walk(BaseModel):
        direction: str | None

    reader = Structured(Walk, candidates={"direction": ["east", "north"]}, embeddings=Table()).prepare({}, {})
    said: Sequence[Any] = ("far north east", "nearly north", None, "nil")
    assert [reader.encode({"direction": each}) for each in said[:3]] == [(0,), (1,), (2,)]
    assert asyncio.run(reader.aencode({"direction": said[1]})) == (1,)
    with pytest.raises(ValueError, match="no field"):
        reader.encode({"direction": said[3]})
    with pytest.raises(ValueError, match="no JSON object"):
        reader.encode("I would walk north")


def test_numbers_of_a_model_have_the_mechanisms_that_stand_alone() -> None:
    readers = {part.name: part.reader for part in visit().parts}
    assert repr(readers["age"]) == repr(NoisyMean(0, 120))
    assert repr(readers["fever"]) == repr(NoisyMedian(35.0, 42.0))
