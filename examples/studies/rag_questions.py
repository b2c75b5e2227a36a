"""The questions of the study of RAG: facts on which most documents agree, and when an answer is right."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEVELOP = {"near": ["{} is near which place?"], "kind": ["What kind of place is {}?"]}
TEST = {
    "near": ["{} is close to which place?", "{} is next to which place?"],
    "kind": ["What type of venue is {}?", "What sort of place is {}?"],
}
KINDS = ("coffee shop", "pub", "restaurant")
Texts = Sequence[str]


@dataclass(frozen=True)
class Fact:
    """What most documents about a name say of it. ``values``: all that could be said, one of which is ``right``."""

    name: str
    kind: str
    right: str
    values: tuple[str, ...]

    def score(self, answer: str) -> float:
        """1 if the answer has the right value as a word, and no other value beside the name itself."""
        return float(said(answer, self.values, self.name) == [self.right])


def said(text: str, values: Texts, name: str) -> list[str]:
    """The values that a text has as words, without the name that it is about."""
    found = [each for each in values if each != name and each.casefold() in text.casefold()]
    return [each for each in found if re.search(rf"\b{re.escape(each)}\b", text, re.IGNORECASE)]


def facts_of(records: Sequence[Mapping[str, str]], near: Texts, least: int) -> list[Fact]:
    """For each name the value that more than half of the documents with one have, at least so many; by name."""
    domains = {"near": tuple(near), "kind": KINDS}
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for record in records:
        name = field_of(record, "name")
        for kind, values in domains.items():
            if len(found := said(record["output"], values, name)) == 1:
                counts[name, kind][found[0]] += 1
    facts = []
    for (name, kind), counted in sorted(counts.items()):
        ((value, times),) = counted.most_common(1)
        if times >= least and 2 * times > counted.total():
            facts.append(Fact(name, kind, value, domains[kind]))
    return facts


def field_of(record: Mapping[str, str], name: str) -> str:
    """A field of the data that a document was written from."""
    found = re.search(rf"\b{name}\[([^\]]*)\]", record["input"])
    return found[1] if found else ""
