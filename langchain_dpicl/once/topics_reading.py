"""The topics of terms, and the topics of a text.

**Topics are public.** Terms that were released are divided by their embeddings alone: no private vector, no order in
the store and no count of terms that stand together has a part in it.

**A text by itself.** Its topics are a function of this text, of its record's group, and of released terms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage

from langchain_dpicl.once.tables_reading import Domain, Said, folded
from langchain_dpicl.once.terms import PrivateTerms
from langchain_dpicl.once.terms_reading import TermReader, TokenKeys
from langchain_dpicl.store.records import Vectors

ONE_GROUP = "owners"
"""The group of all texts, if they are not split."""


def clusters_of(terms: Sequence[str], vectors: Vectors, at_most: int) -> list[tuple[str, ...]]:
    """The terms in at most so many clusters, by Ward's criterion. Public.

    Clusters and their terms are in the order of ``terms``.
    """
    if len(terms) < 2:
        return [(term,) for term in terms]
    numbers = fcluster(linkage(vectors, "ward"), at_most, "maxclust").tolist()
    found: dict[int, list[str]] = {}
    for term, number in zip(terms, numbers, strict=True):
        found.setdefault(number, []).append(term)
    return [tuple(each) for each in found.values()]


def weights_of(terms: PrivateTerms) -> dict[str, int]:
    """A whole number for each term, larger for rarer ones: its weight in a text. Public, since the noisy counts are.

    That of a term of count c is log2(1 + m / c) thousandths, where m is the largest count: so "hello", which stands in
    every question, decides nothing.
    """
    counts = np.maximum(terms.counts, terms.threshold)
    scaled = np.log2(1.0 + counts.max(initial=0.0) / counts)
    return dict(zip(terms, np.rint(1000.0 * scaled).astype(np.int64).tolist(), strict=True))


class ByTerms:
    """The topics whose terms a text has, under the group of its record.

    A text is of the topic whose terms in it weigh most; of equal ones it is of each. ``weights``: of the terms, which
    make up the ``clusters``. ``split`` is the key of a record that has its group, one of the domain's values; a record
    of no group says nothing. None: there is one group.
    """

    def __init__(
        self,
        domain: Domain,
        reader: TermReader,
        clusters: Sequence[Sequence[str]],
        weights: Mapping[str, int],
        split: str | None,
    ) -> None:
        self._reader = reader
        self._split = split
        self._topics = {term: place for place, terms in enumerate(clusters) for term in terms}
        self._weights = weights
        self._groups = {folded(group): place for place, (_, group) in enumerate(domain.values)}
        self.facts = [reader.facts, [[(term, weights[term]) for term in terms] for terms in clusters], split]

    def said(self, text: str, record: Mapping[str, Any], known: TokenKeys) -> Said:
        """A text's pairs of topic and group. ``known``: as of `TermReader`. Private."""
        group: int | None = 0
        if self._split is not None:
            value = record.get(self._split)
            group = self._groups.get(folded(str(value))) if isinstance(value, str | int | float) else None
        if group is None:
            return []
        found = Counter[int]()
        for term in self._reader.terms(text, known) & self._topics.keys():
            found[self._topics[term]] += self._weights[term]
        most = max(found.values(), default=0)
        return [(topic, group) for topic, weight in found.items() if weight == most]
