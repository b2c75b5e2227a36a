"""The reading of texts for a table: which public values a text says, and under which public topics.

**A text by itself.** What a text says is a function of this text and of public values: of topics, of values, of its
vector and a threshold, or of a chain that is asked about this text alone. Similarities are products of whole
numbers, so a text's nearest topic is the same whatever texts are read beside it.

**An owner's pairs.** An owner gives the pairs of topic and value that its texts say, each once, and at most so many:
those that most of its texts say, ties by its own coins. No other owner has a part in this.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from langchain_core.runnables import Runnable, RunnableConfig
from numpy.typing import NDArray
from pydantic import BaseModel

from langchain_dpicl.aggregators.reading import plain
from langchain_dpicl.calls.flow import Flow
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.once.probing import Alive, Probes, TextRow
from langchain_dpicl.once.sums import first_of_each
from langchain_dpicl.privacy.noise import Randomness
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.records import Vectors

Said = Iterable[tuple[int, int]]
"""A text's pairs: a topic's place and a value's."""

_MARKS = re.compile("[\u0300-\u036f]")
_WORD = re.compile(r"\w+")
_MOST = 1 << 12  # pairs of one text: more are a list of names, and take memory
_UNIT = 1 << 20  # of a vector's numbers: products of vectors of norm 1 are whole numbers of about 2^40


def folded(text: str) -> tuple[str, ...]:
    """The words of a text, without case and accents."""
    if text.isascii():
        return tuple(_WORD.findall(text.lower()))
    bare = _MARKS.sub("", unicodedata.normalize("NFKD", plain(text)))
    return tuple(_WORD.findall(unicodedata.normalize("NFC", bare.casefold())))


@dataclass(frozen=True)
class Domain:
    """The cells of a table: topics by values, which stand in columns. Public.

    Raises `InvalidParameter` for names that are no texts with words, or that are equal without case and accents: among
    the topics, or among a column's values.
    """

    topics: tuple[str, ...]
    columns: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        check_distinct("topics", self.topics)
        check_distinct("values", tuple(self.columns))
        for column, values in self.columns.items():
            check_distinct("values" if column == ONLY else f"values[{column!r}]", values)

    @cached_property
    def values(self) -> list[tuple[str, str]]:
        """All columns' values, each with its column, in the order of a table's columns."""
        return [(column, value) for column, values in self.columns.items() for value in values]

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of topics and values."""
        return len(self.topics), len(self.values)

    @cached_property
    def _places(self) -> dict[tuple[str, ...], tuple[list[int], list[int]]]:
        """For a name's words the places of the topic and of the values that have it."""
        found: dict[tuple[str, ...], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for place, topic in enumerate(self.topics):
            found[folded(topic)][0].append(place)
        for place, (_, value) in enumerate(self.values):
            found[folded(value)][1].append(place)
        return dict(found)

    @cached_property
    def _lengths(self) -> dict[str, list[int]]:
        """For a first word the numbers of words of the names that begin with it, the longest first."""
        found: dict[str, set[int]] = defaultdict(set)
        for words in self._places:
            found[words[0]].add(len(words))
        return {first: sorted(lengths, reverse=True) for first, lengths in found.items()}

    def named(self, text: str) -> tuple[set[int], set[int]]:
        """The places of the topics and of the values that a text names by whole words.

        Names are found from left to right, the longest first, and do not overlap: "Burger King" names no "King".
        """
        words = folded(text)
        topics = set[int]()
        values = set[int]()
        begins = self._lengths
        end = 0
        for at in [at for at, word in enumerate(words) if word in begins]:
            for length in begins[words[at]] if at >= end else ():
                places = self._places.get(words[at : at + length])
                if places is not None:
                    topics.update(places[0])
                    values.update(places[1])
                    end = at + length
                    break
        return topics, values

    @cached_property
    def _same(self) -> set[tuple[int, int]]:
        """The pairs of a topic and a value with one name."""
        return {(topic, value) for topics, values in self._places.values() for topic in topics for value in values}

    def pairs(self, topics: Iterable[int], values: Iterable[int]) -> list[tuple[int, int]]:
        """Each topic with each value, but none with a value of its own name. Nothing if these are more than `_MOST`."""
        topics, values = list(topics), list(values)
        if len(topics) * len(values) > _MOST:
            return []
        return [(topic, value) for topic in topics for value in values if (topic, value) not in self._same]


ONLY = "value"
"""The column of a table whose values were given as a list."""


def check_distinct(name: str, texts: Sequence[str]) -> None:
    """Raise `InvalidParameter` for names as `Domain` does."""
    if not texts:
        raise InvalidParameter(name, "nothing", "at least one text")
    known: dict[tuple[str, ...], int] = {}
    for place, text in enumerate(texts):
        words = folded(text) if isinstance(text, str) else ()
        if not words:
            raise InvalidParameter(f"{name}[{place}]", text, "a text with a word")
        if (other := known.setdefault(words, place)) != place:
            raise InvalidParameter(f"{name}[{place}]", text, f"another than {texts[other]!r}, without case and accents")


class PairReader(Protocol):
    """A reader of the pairs of texts."""

    facts: Any
    """The public settings that decide what a text says."""


# -- readers -----------------------------------------------------------------------------------------------------------


class ByName:
    """The values that a text names, under the topics that it names.

    ``near``: the topics' vectors. A text that names no topic is under the nearest one then, of equals the first.
    """

    def __init__(self, domain: Domain, near: Vectors | None) -> None:
        self.domain = domain
        self.near = None if near is None else whole_vectors(near)
        self.facts = "named" if near is None else "nearest"

    def said(self, texts: Sequence[str], vectors: Callable[[Numbers], Vectors]) -> list[Said]:
        """Each text's pairs. ``vectors`` gives the store's vectors of the texts at these places. Private."""
        found = [self.domain.named(text) for text in texts]
        if self.near is not None:
            places = np.array([i for i, (topics, values) in enumerate(found) if values and not topics], np.int64)
            nearest = (whole_vectors(vectors(places)) @ self.near.T).argmax(axis=1)
            for place, topic in zip(places.tolist(), nearest.tolist(), strict=True):
                found[place][0].add(topic)
        return [self.domain.pairs(*each) for each in found]


class BySimilarity:
    """The values, and the topics, whose embeddings' similarity to a text's vector in the store reaches a threshold."""

    def __init__(self, domain: Domain, topics: Vectors, values: Vectors, threshold: float) -> None:
        self.domain = domain
        self._topics = whole_vectors(topics)
        self._values = whole_vectors(values)
        self._least = threshold * _UNIT * _UNIT
        self.facts = ["similar", threshold]

    def said(self, texts: Sequence[str], vectors: Callable[[Numbers], Vectors]) -> list[Said]:
        """The same."""
        rows = whole_vectors(vectors(np.arange(len(texts))))
        topics, values = (rows @ each.T >= self._least for each in (self._topics, self._values))
        return [
            self.domain.pairs(np.flatnonzero(under).tolist(), np.flatnonzero(told).tolist())
            for under, told in zip(topics, values, strict=True)
        ]


def whole_vectors(vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    """Vectors of norm at most 1 as whole numbers, whose products are exact."""
    return np.trunc(np.asarray(vectors, np.float64) * _UNIT)


class ByChain:
    """The answers of a chain to single texts: a mapping, or a model, of "topic" and columns, or a list of those.

    Each text is a private call of its own, on a copy of the chain, one after the other. What is no topic or no value of
    the lists adds nothing, nor does a text on which the chain fails while it answers public ones (`Alive`).
    ``name``: the chain's public name.
    """

    def __init__(self, domain: Domain, chain: Runnable[Any, Any], name: str | None) -> None:
        self.domain = domain
        self.facts = ["chain", name]
        self._topics = {folded(topic): place for place, topic in enumerate(domain.topics)}
        self._values = {(column, folded(value)): place for place, (column, value) in enumerate(domain.values)}

        def row(text: str, config: RunnableConfig | None) -> TextRow:
            return self.told(chain.invoke(text, config))

        self._calls = Alive(row, "answers", "reading", chain)
        shortest = min(domain.topics, key=len)
        longest = max(domain.topics, key=len)
        self._probes = Probes((shortest, []), (longest, []))

    def check(self) -> None:
        """Ask about public texts. Raises `ModelUnavailable` if the chain fails on one."""
        self._calls.answers([text for text, _ in self._probes])

    def asked(self, texts: Sequence[str]) -> Flow[list[Said]]:
        """Each text's pairs. Raises `ModelLost`."""
        found = yield from self._calls.rows(texts, False, self._probes)
        return [each if isinstance(each, list) else [] for each in found]

    def told(self, output: object) -> list[tuple[int, int]]:
        """The pairs of an answer, read within its call; none of what cannot be read."""
        many = output if isinstance(output, (list, tuple)) else [output]
        found = []
        for each in many:
            fields: Any = each.model_dump(mode="json") if isinstance(each, BaseModel) else each
            topic = self._topics.get(folded(str(fields.get("topic")))) if isinstance(fields, Mapping) else None
            if topic is None:
                continue
            for column in self.domain.columns:
                value = fields.get(column)
                for told in value if isinstance(value, (list, tuple)) else [value]:
                    place = self._values.get((column, folded(str(told))))
                    if place is not None:
                        found.append((topic, place))
        return found


# -- owners ------------------------------------------------------------------------------------------------------------


def given_pairs(owners: Numbers, cells: Numbers, size: int, at_most: int, randomness: Randomness) -> Any:
    """The owners and cells of the pairs that are given: each owner's distinct cells, ``at_most`` of them. Private.

    Entry i says that a text of ``owners[i]`` says the cell ``cells[i]`` of ``size``. An owner of more cells gives those
    that most of its texts say, of equals those that its own coins choose.
    """
    keys, texts = np.unique(owners * size + cells, return_counts=True)
    whose = keys // size
    coins = randomness.uniforms(len(keys))
    order = np.lexsort((coins, -texts, whose))
    kept = first_of_each(whose, order, at_most)
    return whose[kept], keys[kept] % size
