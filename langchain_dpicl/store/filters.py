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
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.store.records import plain

MOST_TERMS = 1000
"""Values that a filter compares with, at most."""

MOST_KEYS = 16
"""Keys of a record that a filter looks at, at most."""

DEEPEST = 8
"""Levels of ``$and`` and ``$or``, at most."""

LONGEST = 1000
"""Characters of a key or a text, at most."""

_COMPARISONS = {
    "$eq": (False, True, False),
    "$ne": (True, False, True),
    "$in": (False, True, False),
    "$gt": (False, False, True),
    "$gte": (False, True, True),
    "$lt": (True, False, False),
    "$lte": (True, True, False),
}
"""Each comparison, and if values below, equal to and above the one that it names pass."""

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

    ``ranks`` has each record's place among the distinct values, -1 if no filter can pass it. ``ascending`` has these
    values, kind by kind (see `_comparable`).
    """

    ranks: NDArray[np.int32]
    ascending: list[tuple[int, Any]]

    @classmethod
    def of(cls, values: Iterable[object]) -> Column:
        """The column of these values."""
        found = list(map(_comparable, values))
        ascending = sorted({each for each in found if each is not None})
        rank = {each: i for i, each in enumerate(ascending)}
        return cls(np.array([-1 if each is None else rank[each] for each in found], np.int32), ascending)

    def holding(self, name: str, values: Iterable[Any]) -> NDArray[np.bool_]:
        """Return a mask of the records for which this comparison holds with one of the values."""
        holds = np.zeros(1 + len(self.ascending), np.bool_)  # the last: -1
        for asked in filter(None, map(_comparable, values)):
            kind, _ = asked
            edges = [
                bisect_left(self.ascending, (kind,)),
                bisect_left(self.ascending, asked),
                bisect_right(self.ascending, asked),
                bisect_left(self.ascending, (kind + 1,)),
            ]
            for (begin, end), passes in zip(pairwise(edges), _COMPARISONS[name], strict=True):
                if passes:
                    holds[begin:end] = True
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
        own = [self.key] if self.key else []
        return frozenset(own).union(*(part.keys for part in self.parts))

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


def _comparable(value: object) -> tuple[int, Any] | None:
    """A value behind the number of its kind, and True is no number. None if nothing compares with it, as with NaN."""
    if isinstance(value, (bool, str)):
        return int(isinstance(value, str)), value
    return (2, value) if isinstance(value, (int, float)) and value == value else None


def _combined(name: str, parts: list[MetadataFilter]) -> MetadataFilter:
    """In an order of its own, so that the order of a mapping's keys makes no other filter."""
    return parts[0] if len(parts) == 1 else MetadataFilter(name, parts=tuple(sorted(parts, key=str)))


def operator_in(request: object) -> str | None:
    """The first operator that is a key in a request, at any depth, in objects too; None if there is none."""
    waiting: list[Any] = [request]
    seen: dict[int, object] = {}  # keeps them alive, so that no id is used twice
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (str, bytes, type)):
            continue
        seen[id(item)] = item
        if isinstance(item, Mapping):
            if found := [key for key in map(plain, item) if key in (*_COMPARISONS, *_OF_FILTERS)]:
                return str(found[0])
            waiting.extend(item.values())
        elif isinstance(item, np.ndarray):
            waiting.extend(item.flat if item.dtype.hasobject else ())
        elif isinstance(item, Collection):
            waiting.extend(item)
        else:
            waiting.append(object.__getstate__(item))  # its attributes, in slots too
    return None


@dataclass
class _Reader:
    """Reads one filter, and counts its values. ``by_function``: operators stand in a `Condition`."""

    name: str
    by_function: bool
    terms: int = 0

    def mapping(self, given: Any, levels: int) -> MetadataFilter:
        may_combine = isinstance(given, Condition) or not self.by_function
        asked = _said(given)
        self.need(
            isinstance(asked, Mapping), type(asked).__name__, "a mapping of metadata keys to values or conditions"
        )
        self.need(asked, "nothing", "at least one condition (None for no filter)")
        self.need(levels >= 0, "deeper levels", f"at most {DEEPEST} levels")
        return _combined(
            "$and",
            [self.condition(key, value, levels, may_combine) for key, value in asked.items()],
        )

    def condition(self, key: Any, asked: Any, levels: int, may_combine: bool) -> MetadataFilter:
        if key in _OF_FILTERS and may_combine:
            self.need(isinstance(asked, (list, tuple)) and asked, key, "a list of filters, at least one")
            is_written = not self.by_function or all(isinstance(each, Condition) for each in asked)
            self.need(is_written, key, f"a list of conditions, {_WRITTEN}")
            return _combined(key, [self.mapping(each, levels - 1) for each in asked])
        is_key = isinstance(key, str) and 0 < len(key) <= LONGEST and not key.startswith("$") and "." not in key
        bound = f"{', '.join(_OF_FILTERS)}, a metadata key (no dots: what is nested cannot be filtered)"
        self.need(is_key, key, bound if may_combine else f"a metadata key; operators {_WRITTEN}")
        is_chosen = self.by_function and isinstance(asked, Mapping)
        self.need(not is_chosen, key, f"a text, a number, True or False; comparisons {_WRITTEN}")
        said = _said(asked)
        conditions = said if isinstance(said, Mapping) else {"$eq": said}
        self.need(conditions, key, "a value, or at least one condition")
        return _combined("$and", [self.comparison(key, name, value) for name, value in conditions.items()])

    def comparison(self, key: str, name: Any, asked: Any) -> MetadataFilter:
        self.need(name in _COMPARISONS, name, f"one of {', '.join(_COMPARISONS)}")
        listed = asked if name == "$in" else [asked]
        self.need(isinstance(listed, (list, tuple, set, frozenset)), name, "a list of values")
        self.terms += max(1, len(listed))
        self.need(self.terms <= MOST_TERMS, "more values", f"at most {MOST_TERMS} values to compare with")
        values = [self.value(name, each) for each in listed]
        distinct = sorted({(type(each).__name__, each) for each in values})  # True is no 1
        return MetadataFilter(name, key, tuple(each for _, each in distinct))

    def value(self, name: str, given: Any) -> Any:
        value = plain(given.item() if isinstance(given, np.generic) else given)
        is_equality = name in ("$eq", "$ne", "$in")
        self.need(
            (isinstance(value, str) and len(value) <= LONGEST)
            or (isinstance(value, float) and math.isfinite(value))
            or (isinstance(value, int) and abs(value) <= 2**63 and (is_equality or not isinstance(value, bool))),
            f"{name} {type(given).__name__}",
            f"a finite number or a text of at most {LONGEST} characters",
        )
        return value

    def need(self, is_so: object, what: object, bound: str) -> None:
        """Raise `InvalidParameter` unless it is so, with what there is in its place, and what may be there."""
        if not is_so:
            shown = what[:60] if isinstance(what, str) else type(what).__name__
            raise InvalidParameter(self.name, shown, bound)


def _said(given: Any) -> Any:
    return given.said if isinstance(given, Condition) else given
