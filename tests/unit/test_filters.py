"""The language of metadata filters: what passes, and what is refused instead of dropped."""

from __future__ import annotations

import operator
import random
from enum import Enum
from typing import Any

import pytest

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.store.filters import DEEPEST, LONGEST, MOST_TERMS, Condition, MetadataFilter, columns_of

RECORD = {"team": "a", "year": 2020, "rate": 0.5, "open": True, "day": "2024-03-01", "tags": ["a"], "none": None}


@pytest.mark.parametrize(
    "given",
    [
        {"team": "a"},
        {"team": {"$eq": "a"}},
        {"team": {"$ne": "b"}},
        {"team": {"$in": ["b", "a"]}},
        {"year": 2020.0},
        {"year": {"$gt": 2019, "$lt": 2021}},
        {"year": {"$gte": 2020, "$lte": 2020}},
        {"rate": {"$lt": 1}},
        {"open": True},
        {"day": {"$gte": "2024-01-01", "$lt": "2025"}},
        {"team": "a", "year": 2020},
        {"$and": [{"team": "a"}, {"open": {"$ne": False}}]},
        {"$or": [{"team": "b"}, {"$and": [{"year": 2020}, {"rate": 0.5}]}]},
        {"year": {"$in": [True, 2020]}},
    ],
)
def test_what_passes(given: Any) -> None:
    assert MetadataFilter.parse(given).passes(RECORD)


@pytest.mark.parametrize(
    "given",
    [
        {"team": "b"},
        {"team": {"$in": []}},
        {"year": {"$gt": 2020}},
        {"year": {"$gt": 2019, "$lt": 2020}},
        {"team": "a", "year": 2021},
        {"$and": [{"team": "a"}, {"team": "b"}]},
        {"$or": [{"team": "b"}, {"year": 1}]},
        # a key that it does not have
        *({"missing": {name: "a"}} for name in ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte")),
        {"missing": {"$in": ["a"]}},
        # values of another type: a number is no text, True no number, and nothing compares with a list or None
        {"year": "2020"},
        {"year": {"$ne": "2020"}},
        {"year": {"$lt": "3"}},
        {"open": 1},
        {"open": {"$gte": 1}},
        {"open": {"$in": [1]}},
        {"year": {"$in": [True]}},
        {"tags": "a"},
        {"tags": {"$ne": "b"}},
        {"none": {"$ne": "b"}},
    ],
)
def test_what_does_not_pass(given: Any) -> None:
    assert not MetadataFilter.parse(given).passes(RECORD)


def nested(levels: int) -> Any:
    given: Any = {"team": "a"}
    for _ in range(levels):
        given = {"$or": [given, {"team": "b"}]}
    return given


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"team": {"$regex": "a"}}, "$regex"),
        ({"team": {"$like": "a", "$eq": "a"}}, "$like"),
        ({"$not": {"team": "a"}}, "$not"),
        ({"$nor": [{"team": "a"}]}, "$nor"),
        ({"team": {"inner": "a"}}, "inner"),
        ({"team.inner": "a"}, "team.inner"),
        ({"team": ["a"]}, "$eq list"),
        ({"team": None}, "$eq NoneType"),
        ({"team": {"$gt": True}}, "$gt bool"),
        ({"team": float("nan")}, "$eq float"),
        ({"team": float("inf")}, "$eq float"),
        ({"team": 2**64}, "$eq int"),
        ({"team": "a" * (LONGEST + 1)}, "$eq str"),
        ({"team": {"$in": "abc"}}, "$in"),
        ({"team": {"$in": [["a"]]}}, "$in list"),
        ({"team": {}}, "team"),
        ({"$and": []}, "$and"),
        ({"$or": {"team": "a"}}, "$or"),
        ({"$or": [{}]}, "nothing"),
        ({"": 1}, ""),
        ({1: 1}, "int"),
        ({}, "nothing"),
        ("team = 'a'", "str"),
        (lambda record: True, "function"),
        (nested(DEEPEST + 1), "deeper levels"),
        ({"team": {"$in": list(range(MOST_TERMS + 1))}}, "more values"),
        ({f"key {i}": i for i in range(17)}, "17 keys"),
        ({"$or": [{"team": i} for i in range(MOST_TERMS + 1)]}, "more values"),
    ],
)
def test_anything_else_is_refused_by_name(given: Any, shown: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        MetadataFilter.parse(given, "visible_to")
    assert (caught.value.parameter, caught.value.value) == ("visible_to", shown)


def test_limits_are_reached() -> None:
    assert MetadataFilter.parse(nested(DEEPEST)).passes(RECORD)
    assert MetadataFilter.parse({"year": {"$in": list(range(1500, 1500 + MOST_TERMS))}}).passes(RECORD)


TEAM, LATE = Condition({"team": "a"}), Condition({"$gte": 2020, "$lt": 2024})


def test_a_function_writes_operators_in_conditions() -> None:
    given = Condition({"$or": [TEAM, Condition({"team": Condition({"$in": ["b"]}), "year": LATE})]})
    written = {"$or": [{"team": "a"}, {"team": {"$in": ["b"]}, "year": {"$gte": 2020, "$lt": 2024}}]}
    made = MetadataFilter.parse(given, by_function=True)
    assert str(made) == str(MetadataFilter.parse(given)) == str(MetadataFilter.parse(written))


CHOSEN = {"$ne": "x"}  # by a request, in the place of a value


@pytest.mark.parametrize(
    "given",
    [
        CHOSEN,
        {"team": CHOSEN},
        {"$or": [{"team": "a"}]},
        {"$or": [TEAM]},
        {"team": Condition({"$gte": CHOSEN})},
        {"team": Condition({"$in": [CHOSEN]})},
        {"team": Condition({"$gte": Condition(CHOSEN)})},
        Condition({"team": CHOSEN}),
        Condition({"$or": [TEAM, {"team": "a"}]}),
        Condition(CHOSEN),
        MetadataFilter.parse({"team": CHOSEN}),
    ],
)
def test_a_mapping_in_what_a_function_gives_is_no_condition(given: Any) -> None:
    with pytest.raises(InvalidParameter, match="filter="):
        MetadataFilter.parse(given, by_function=True)


def test_a_filter_that_holds_itself_is_refused() -> None:
    given: dict[str, Any] = {}
    given["$or"] = [given]
    with pytest.raises(InvalidParameter, match="deeper levels"):
        MetadataFilter.parse(given)


def test_equal_filters_have_one_text_and_others_another() -> None:
    same = [{"a": 1, "b": "x"}, {"b": {"$eq": "x"}, "a": 1}, {"$and": [{"b": "x"}, {"a": 1}]}]
    assert len({str(MetadataFilter.parse(each)) for each in same}) == 1
    other = [
        {"a": 1},
        {"a": "1"},
        {"a": True},
        {"a": {"$in": [1]}},
        {"a": {"$in": [True]}},
        {"b": 1},
        {"a": {"$ne": 1}},
    ]
    assert len({str(MetadataFilter.parse(each)) for each in other}) == len(other)
    tricky = [{"$or": [{"a": "x"}, {"b": "y"}]}, {"$and": [{"a": "x"}, {"b": "y"}]}, {'a": {"$eq': "x"}, {"a": '"'}]
    assert len({str(MetadataFilter.parse(each)) for each in tricky}) == len(tricky)
    halves = [{"a": "\U0001f600"}, {"a": "\ud83d\ude00"}, {"\U0001f600": "a"}, {"\ud83d\ude00": "a"}]
    assert len({str(MetadataFilter.parse(each)) for each in halves}) == len(halves)


def test_two_filters_are_one_of_both() -> None:
    both = MetadataFilter.parse({"team": "a"}) & MetadataFilter.parse({"year": {"$gt": 2000}})
    assert both.passes(RECORD)
    assert not both.passes({"team": "a"})
    assert both.keys == {"team", "year"}
    assert both & None == both


VALUES = ["a", "b", "", 0, 1, 2.5, -1, True, False, "é", "\ud800"]
IN_RECORDS = [*VALUES, None, float("nan"), ["a"], {"a": 1}, 10**30]


def some_filter(chance: random.Random, levels: int = 2) -> Any:
    if levels and chance.random() < 0.4:
        return {chance.choice(["$and", "$or"]): [some_filter(chance, levels - 1) for _ in range(chance.randint(1, 3))]}
    name = chance.choice(["$eq", "$ne", "$in", "$gt", "$gte", "$lt", "$lte"])
    values = VALUES if name in ("$eq", "$ne", "$in") else [each for each in VALUES if not isinstance(each, bool)]
    return {chance.choice("xy"): {name: chance.choices(values, k=2) if name == "$in" else chance.choice(values)}}


def plainly(wanted: Any, record: dict[str, Any]) -> bool:
    """The language from scratch, for filters of one comparison a level."""
    ((key, asked),) = wanted.items()
    if key.startswith("$"):
        return (all if key == "$and" else any)(plainly(each, record) for each in asked)
    ((name, value),) = asked.items()
    held = record.get(key)

    def alike(one: Any, other: Any) -> bool:
        kinds = [float if type(each) in (int, float) else type(each) for each in (one, other)]
        return kinds[0] is kinds[1] and kinds[0] in (bool, float, str) and one == one

    compare = {"$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}
    if name == "$in":
        return any(alike(held, each) and held == each for each in value)
    if not alike(held, value):
        return False
    return {"$eq": held == value, "$ne": held != value}[name] if name in ("$eq", "$ne") else compare[name](held, value)


def test_records_pass_as_the_language_says_alone_and_many_at_once() -> None:
    chance = random.Random(5)
    records = [{key: chance.choice(IN_RECORDS) for key in "xy" if chance.random() < 0.8} for _ in range(60)]
    columns = columns_of(records, "xy")
    passed = 0
    for _ in range(400):
        given = some_filter(chance)
        wanted = MetadataFilter.parse(given)
        expected = [plainly(given, record) for record in records]
        assert wanted.passing(columns).tolist() == expected, given
        assert [wanted.passes(record) for record in records[:5]] == expected[:5]
        passed += sum(expected)
    assert passed > 1000


def test_a_text_of_an_enumeration_is_its_value() -> None:
    """Its own text is its name: "not this one" then let everything through."""
    ward = Enum("Ward", {"A": "a"}, type=str)
    assert not MetadataFilter.parse({"ward": {"$ne": ward["A"]}}).passes({"ward": "a"})
