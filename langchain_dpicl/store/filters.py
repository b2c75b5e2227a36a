"""Filters on records' metadata: a small language, read once into a checked object that never drops a condition.

::

    {"team": "a"}                                    equal
    {"year": {"$gte": 2020, "$lt": 2024}}            all of a key's conditions
    {"team": {"$in": ["a", "b"]}, "year": 2020}      all of a mapping's keys
    {"$or": [{"team": "a"}, {"public": True}]}       any of a list; ``$and`` for all

Operators: ``$eq``, ``$ne``, ``$in``, ``$gt``, ``$gte``, ``$lt``, ``$lte``, ``$and``, ``$or``. Values are texts, numbers
and, for ``$eq``, ``$ne`` and ``$in``, True and False. Numbers compare with numbers, texts with texts by code points, so
dates work as ISO texts. A record without the key, or with a value of another type under it, does not pass, whatever the
operator: ``$ne`` too. Whether a record passes depends on this record and the filter alone.

A filter that a function gives may hold what a request chose. There operators count in a `Condition` alone, at any
depth, and a mapping or a list that stands for a value is refused.
"""

from __future__ import annotations

import json
import math
import numbers
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidParameter

MOST_TERMS = 1000
"""Values that a filter compares with, at most."""

MOST_KEYS = 16
"""Keys of a record that a filter looks at, at most."""

DEEPEST = 8
"""Levels of ``$and`` and ``$or``, at most."""

LONGEST = 1000
"""Characters of a key or a text, at most."""

_ORDER = ("$gt", "$gte", "$lt", "$lte")
_OF_VALUES = ("$eq", "$ne", "$in", *_ORDER)
_OF_FILTERS = ("$and", "$or")
_WRITTEN = "written by you as Condition({...}), since a request can hold a mapping; nothing was charged"


@dataclass(frozen=True)
class Condition:
    """Comparisons or filters that you write in a function for ``filter`` or ``visible_to``.

    ::

        {"year": Condition({"$gte": request["since"], "$lt": 2030})}
        Condition({"$or": [Condition({"team": request["team"]}), Condition({"public": True})]})

    What such a function gives often comes from a request, which can hold ``{"$ne": ""}`` where you mean a text. So its
    values compare for equality, and other operators count only in this class, which no JSON makes. What you put in has
    the same rule: values, a list of them for ``$in``, conditions for ``$and`` and ``$or``. Write the keys yourself: a
    key that a request chose cannot be told from yours.

    Raises `InvalidParameter` for anything but a mapping.
    """

    said: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.said, Mapping):
            raise InvalidParameter("condition", type(self.said).__name__, 'a mapping such as {"$gte": 2020}')


@dataclass(frozen=True, repr=False)
class Column:
    """One key's values in many records, by rank, so that a comparison is a range of ranks. Private.

    ``ranks`` has each record's value among the distinct ones, -1 if no filter can pass it. Ranks go kind by kind, and
    ascend within a kind: ``kinds`` has each kind's first rank and its values.
    """

    ranks: NDArray[np.int32]
    kinds: dict[object, tuple[int, list[Any]]]

    @classmethod
    def of(cls, values: Sequence[object]) -> Column:
        """The column of these values."""
        held: dict[object, set[Any]] = {}
        for value in values:
            if (kind := _kind(value)) is not object:
                held.setdefault(kind, set()).add(value)
        kinds: dict[object, tuple[int, list[Any]]] = {}
        rank: dict[object, dict[Any, int]] = {object: {}}
        for kind, distinct in held.items():
            first = sum(len(ascending) for _, ascending in kinds.values())
            kinds[kind] = first, sorted(distinct)
            rank[kind] = {value: first + i for i, value in enumerate(kinds[kind][1])}
        found = (-1 if (kind := _kind(value)) is object else rank[kind][value] for value in values)
        return cls(np.fromiter(found, np.int32, len(values)), kinds)

    def holding(self, name: str, values: Iterable[Any]) -> NDArray[np.bool_]:
        """Return a mask of the records for which this comparison holds with one of the values."""
        holds = np.zeros(1 + sum(len(ascending) for _, ascending in self.kinds.values()), np.bool_)  # the last: -1
        for value in values:
            first, ascending = self.kinds.get(_kind(value), (0, []))
            low = first + bisect_left(ascending, value)
            high = first + bisect_right(ascending, value)
            end = first + len(ascending)
            ranks = {
                "$eq": [(low, high)],
                "$in": [(low, high)],
                "$ne": [(first, low), (high, end)],
                "$lt": [(first, low)],
                "$lte": [(first, high)],
                "$gt": [(high, end)],
                "$gte": [(low, end)],
            }
            for begin, stop in ranks.get(name, ()):
                holds[begin:stop] = True
        return holds[self.ranks]


@dataclass(frozen=True)
class MetadataFilter:
    """A checked filter. Public: make one with `parse`.

    ``operator`` compares the value under ``key`` with ``values``; ``$and`` and ``$or`` combine ``parts``.
    """

    operator: str
    key: str = ""
    values: tuple[str | int | float | bool, ...] = ()
    parts: tuple[MetadataFilter, ...] = ()

    @classmethod
    def parse(cls, given: object, name: str = "filter", *, by_function: bool = False) -> MetadataFilter:
        """Read a filter from a mapping. Raises `InvalidParameter` for the parameter ``name``, showing what is wrong in
        it: an unknown operator, a value that cannot be compared, nothing at all, or too much.

        ``by_function``: a function made it, so its operators have to stand in a `Condition`.
        """
        if isinstance(given, cls) and not by_function:
            return given
        made = _Reader(name, by_function).mapping(given, DEEPEST)
        if len(made.keys) > MOST_KEYS:
            raise InvalidParameter(name, f"{len(made.keys)} keys", f"a filter on at most {MOST_KEYS} keys")
        return made

    def __and__(self, other: MetadataFilter | None) -> MetadataFilter:
        """Both filters on the same record."""
        return self if other is None else _combined("$and", [self, other])

    def __str__(self) -> str:
        """The same text for the same filter: for comparing questions."""
        if self.parts:
            return f"{{{json.dumps(self.operator)}: [{', '.join(map(str, self.parts))}]}}"
        key, values = (json.dumps(each, ensure_ascii=False) for each in (self.key, self.values))  # halves stay halves
        return f"{{{key}: {{{json.dumps(self.operator)}: {values}}}}}"

    @property
    def keys(self) -> frozenset[str]:
        """The keys of a record that it looks at."""
        if not self.parts:
            return frozenset({self.key})
        return frozenset().union(*(part.keys for part in self.parts))

    def passes(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record passes."""
        return bool(self.passing(columns_of([record], self.keys))[0])

    def passing(self, columns: Mapping[str, Column]) -> NDArray[np.bool_]:
        """Return a mask of the records that pass. ``columns`` are theirs, of its ``keys``."""
        if not self.parts:
            return columns[self.key].holding(self.operator, self.values)
        combine = np.logical_and if self.operator == "$and" else np.logical_or
        found: NDArray[np.bool_] = combine.reduce([part.passing(columns) for part in self.parts])
        return found


def columns_of(records: Iterable[Mapping[str, Any]], keys: Iterable[str]) -> dict[str, Column]:
    """The columns of some keys of these records. Private."""
    values: dict[str, list[Any]] = {key: [] for key in keys}
    for record in records:
        for key, held in values.items():
            held.append(record.get(key))
    return {key: Column.of(held) for key, held in values.items()}


def _kind(value: object) -> object:
    """Values of one kind compare. None, lists, mappings and a number that is none (NaN) have a kind of their own."""
    if isinstance(value, (bool, str)):
        return type(value)
    return numbers.Real if isinstance(value, (int, float)) and value == value else object


def _combined(name: str, parts: list[MetadataFilter]) -> MetadataFilter:
    """In an order of its own, so that the order of a mapping's keys makes no other filter."""
    return parts[0] if len(parts) == 1 else MetadataFilter(name, parts=tuple(sorted(parts, key=str)))


def operator_in(request: object) -> str | None:
    """The first operator that is a key in a request, at any depth, in objects too; None if there is none."""
    waiting: list[object] = [request]
    seen: dict[int, object] = {}  # keeps them alive, so that no id is used twice
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (str, bytes, type)):
            continue
        seen[id(item)] = item
        if isinstance(item, Mapping):
            keys = [str.__str__(key) for key in item if isinstance(key, str)]
            if found := [key for key in keys if key in _OF_VALUES or key in _OF_FILTERS]:
                return found[0]
            waiting += item.values()
        elif isinstance(item, np.ndarray):
            if item.dtype == object:
                waiting += item.tolist()
        elif isinstance(item, Collection):
            waiting += item
        else:
            slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
            waiting += [getattr(item, name, None) for name in slots if isinstance(name, str)]
            waiting += getattr(item, "__dict__", {}).values()
            waiting.append(getattr(item, "__pydantic_extra__", None))
    return None


class _Reader:
    """Reads one filter, and counts its values. ``by_function``: operators stand in a `Condition`."""

    def __init__(self, name: str, by_function: bool) -> None:
        self._name = name
        self._by_function = by_function
        self._terms = 0

    def mapping(self, given: object, levels: int) -> MetadataFilter:
        may_combine = isinstance(given, Condition) or not self._by_function
        asked = given.said if isinstance(given, Condition) else given
        if not isinstance(asked, Mapping):
            raise self._refused(type(asked).__name__, "a mapping of metadata keys to values or conditions")
        if not asked or levels < 0:
            raise self._refused(
                "deeper levels" if asked else "nothing",
                f"at least one condition (None for no filter), in at most {DEEPEST} levels",
            )
        return _combined(
            "$and",
            [self._condition(key, value, levels, may_combine) for key, value in asked.items()],
        )

    def _condition(self, key: object, asked: object, levels: int, may_combine: bool) -> MetadataFilter:
        if key in _OF_FILTERS and may_combine:
            if not isinstance(asked, (list, tuple)) or not asked:
                raise self._refused(key, "a list of filters, at least one")
            if self._by_function and not all(isinstance(each, Condition) for each in asked):
                raise self._refused(key, f"a list of conditions, {_WRITTEN}")
            return _combined(str(key), [self.mapping(each, levels - 1) for each in asked])
        if not isinstance(key, str) or not key or len(key) > LONGEST or key.startswith("$") or "." in key:
            allowed = f"{', '.join(_OF_FILTERS)}, a metadata key (no dots: what is nested cannot be filtered)"
            raise self._refused(key, allowed if may_combine else f"a metadata key; operators {_WRITTEN}")
        if self._by_function and isinstance(asked, Mapping):
            raise self._refused(key, f"a text, a number, True or False; comparisons {_WRITTEN}")
        asked = asked.said if isinstance(asked, Condition) else asked
        conditions = asked if isinstance(asked, Mapping) else {"$eq": asked}
        if not conditions:
            raise self._refused(key, "a value, or at least one condition")
        return _combined(
            "$and",
            [self._comparison(key, name, value) for name, value in conditions.items()],
        )

    def _comparison(self, key: str, name: object, value: object) -> MetadataFilter:
        if name not in _OF_VALUES:
            raise self._refused(name, f"one of {', '.join(_OF_VALUES)}")
        if name == "$in" and not isinstance(value, (list, tuple, set, frozenset)):
            raise self._refused(name, "a list of values")
        listed = tuple(value) if name == "$in" else (value,)  # type: ignore[arg-type]
        self._terms += max(1, len(listed))
        if self._terms > MOST_TERMS:
            raise self._refused("more values", f"at most {MOST_TERMS} values to compare with")
        values = tuple(self._value(str(name), each) for each in listed)
        if name == "$in":
            distinct = {(type(each).__name__, each): each for each in values}  # True is no 1
            values = tuple(distinct[each] for each in sorted(distinct))
        return MetadataFilter(str(name), key, values)

    def _value(self, name: str, value: object) -> str | int | float | bool:
        if isinstance(value, str) and len(value) <= LONGEST:
            return str.__str__(value)  # an enumeration's own text would be its name
        if isinstance(value, (bool, np.bool_)) and name not in _ORDER:
            return bool(value)
        if isinstance(value, numbers.Integral) and not isinstance(value, bool) and abs(int(value)) <= 2**63:
            return int(value)
        if isinstance(value, (float, np.floating)) and math.isfinite(value):
            return float(value)
        raise self._refused(
            f"{name} {type(value).__name__}",
            f"a finite number or a text of at most {LONGEST} characters",
        )

    def _refused(self, what: object, bound: str) -> InvalidParameter:
        return InvalidParameter(
            self._name,
            what[:60] if isinstance(what, str) else type(what).__name__,
            bound,
        )
