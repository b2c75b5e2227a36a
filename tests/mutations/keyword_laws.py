"""Exact laws of the keyword mechanisms on tiny data: a few members, each naming some of a few words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from exact import Branching, BranchingThresholds, Law, law

from langchain_dpicl.aggregators import Keywords, Words

EACH = Words(stop_words=None, pattern=r"\w+")
"""Every letter is a word."""

Said = tuple[str, ...]
"""One text of words for each member."""


def prepared(aggregator: Keywords, options: Mapping[str, float] | None = None) -> Keywords:
    """The aggregator for a query, with the plan's options."""
    return aggregator.prepare({"input": ""}, options or {})


def texts(words: str) -> list[str]:
    """Everything that one member may say: each set of the words."""
    return [" ".join(chosen) for k in range(len(words) + 1) for chosen in itertools.combinations(words, k)]


def keyword_law(aggregator: Keywords, said: Sequence[str], parameter: float, *, kind: type[Branching]) -> Law:
    """The law of the code: the words in order where they are ranked, their set where they are not, None for none."""

    def run(randomness: Branching) -> tuple[str, ...] | None:
        released = aggregator.aggregate([aggregator.encode(text) for text in said], parameter, randomness)
        return None if released.fallback else tuple(released)

    return law(run, kind)


def neighbouring_laws(
    aggregator: Keywords, words: str, members: int, parameter: float, *, kind: type[Branching] = Branching
) -> Iterator[tuple[Law, Law]]:
    """The laws of every pair of member outputs that differ in one member's, both ways round."""
    found: dict[tuple[int, ...], Law] = {}

    def by_counts(said: Said) -> Law:
        counts = tuple(sum(word in text for text in said) for word in words)
        if counts not in found:
            found[counts] = keyword_law(aggregator, said, parameter, kind=kind)
        return found[counts]

    possible = texts(words)
    for others in itertools.combinations_with_replacement(possible, members - 1):
        for one, other in itertools.permutations(possible, 2):
            yield by_counts((one, *others)), by_counts((other, *others))


def ptr_law(aggregator: Keywords, heights: Mapping[str, int], members: int, sigma: float) -> Law:
    """The law of propose-test-release where the words have these counts."""
    said = [" ".join(word for word, height in heights.items() if i < height) for i in range(members)]
    return keyword_law(aggregator, said, sigma, kind=BranchingThresholds)
