"""Thresholds of a relevance gate, suggested by public texts. Nothing here sees anything private."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.store.matrix import inner_products, reaches
from langchain_dpicl.store.records import Vectors, embed, embed_query

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

_DIGITS = 4


@dataclass(frozen=True, repr=False)
class SuggestedThreshold:
    """A threshold found with public texts alone, and what to expect of it.

    Attributes
    ----------
    threshold, eligible
        For the selector: the gate, and how many owners it lets through for a query, on
        average. ``eligible`` is also what ``dpicl plan --gated`` asks for.
    share, owners
        The share of owners that is eligible on average, and of how many ``eligible`` was taken.
    low, high
        A tenth of the queries found fewer than ``low`` owners (scaled to ``owners``), a tenth more than ``high``.
    queries, texts
        The numbers of public queries and texts.
    """

    threshold: float
    eligible: int
    share: float
    owners: int
    low: int
    high: int
    queries: int
    texts: int

    def __repr__(self) -> str:
        return (
            f"SuggestedThreshold(threshold={self.threshold}, eligible={self.eligible}: {self.share:.3g} of "
            f"{self.owners} owners on average, {self.low} to {self.high} for 8 of 10 queries; from {self.queries} "
            f"public queries and {self.texts} public texts)"
        )


def suggest_threshold(
    embeddings: Embeddings,
    queries: Sequence[str],
    texts: Sequence[str],
    *,
    share: float | None = None,
    eligible: int | None = None,
    owners: int | None = None,
    owner_of: Sequence[str | int] | None = None,
) -> SuggestedThreshold:
    """The threshold at which on average a query finds the wanted share of owners eligible.

    Nothing private goes in and nothing is charged: queries and texts are public, or
    synthetic, and should resemble what will be asked and what the store holds. The answer
    is as good as this resemblance. Give the records of the store here and the threshold is
    private, and its use breaks the guarantee.

    Parameters
    ----------
    embeddings
        The model that embeds the store's records and queries.
    queries, texts
        Public queries, and public texts in the place of the records.
    share, eligible
        Give one: the share of all owners that a query should find, or their number, which needs ``owners``.
    owners
        The number of owners that the store has, as a public number. Default: as many as the texts have.
    owner_of
        The owner of each text, if owners have several: an owner counts once, by its best
        text. Default: each text has its own.

    The threshold is rounded down to four digits, and ``share`` and ``eligible`` of the
    answer are counted at what is answered, so they are at least what was wanted, and more
    if many texts are equally near. Raises `InvalidParameter`, `ModelUnavailable` if the
    model fails on a query, and what a store raises on texts that cannot be embedded.
    """
    asked = public_texts("queries", queries)
    shown = public_texts("texts", texts)
    slots = _slots(owner_of, len(shown))
    held = int(slots.max()) + 1
    crowd = held if owners is None else checks.whole("owners", owners)
    if (share is None) == (eligible is None):
        raise InvalidParameter("share", share, "exactly one of share and eligible")
    if share is not None:
        wanted = checks.probability("share", share)
    elif owners is None:
        raise InvalidParameter("owners", None, "given with eligible: of how many owners that is")
    else:
        wanted = checks.whole("eligible", eligible, at_most=crowd) / crowd
    pairs = wanted * len(asked) * held
    if pairs < 1.0:
        raise InvalidParameter(
            "share",
            wanted,
            f"at least 1 in {len(asked) * held}, the pairs of a query and an owner seen: give more",
        )
    matrix = embed(embeddings, shown, progress=False)
    best = np.full((len(asked), held), -np.inf, np.float32)  # the similarity of each owner's best text to each query
    for row, text in zip(best, asked, strict=True):
        query = embed_query(embeddings, text, matrix.shape[1])
        np.maximum.at(row, slots, inner_products(matrix, np.arange(len(matrix)), query))
    last = best.size - min(best.size, math.ceil(pairs - 1e-9))
    nearest = float(np.partition(best.ravel(), last)[last])
    threshold = max(-1.0, math.floor(min(1.0, nearest) * 10**_DIGITS) / 10**_DIGITS)
    shares = reaches(best, threshold).mean(axis=1)
    found = float(shares.mean())
    return SuggestedThreshold(
        threshold,
        eligible=max(1, round(found * crowd)),
        share=found,
        owners=crowd,
        low=round(float(np.quantile(shares, 0.1)) * crowd),
        high=round(float(np.quantile(shares, 0.9)) * crowd),
        queries=len(asked),
        texts=len(shown),
    )


def _slots(owner_of: object, texts: int) -> NDArray[np.int64]:
    """For each text the position of its owner."""
    slots = np.arange(texts, dtype=np.int64)
    if owner_of is None:
        return slots
    if isinstance(owner_of, str) or not isinstance(owner_of, Sequence) or len(owner_of) != texts:
        raise InvalidParameter(
            "owner_of",
            type(owner_of).__name__,
            f"a list with one owner for each of {texts} texts",
        )
    places: dict[str, int] = {}
    for i, owner in enumerate(owner_of):
        if isinstance(owner, bool) or not isinstance(owner, (str, int)):
            raise InvalidParameter(f"owner_of[{i}]", type(owner).__name__, "a text or a whole number")
        slots[i] = places.setdefault(str(owner), len(places))
    return slots


def public_texts(name: str, texts: object) -> list[str]:
    """The texts, checked. Raises `InvalidParameter`, which shows a position and no text."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
        raise InvalidParameter(name, type(texts).__name__, "a list of at least one text")
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise InvalidParameter(f"{name}[{i}]", type(text).__name__, "a text that is not empty")
    return list(texts)


class ShareThreshold:
    """For each query, the similarity to it that a share of public texts reaches: a selector's ``threshold``.

    One number for all queries lets in crowds for an ordinary query and nobody for a rare
    one. This lets in about the same share of owners for every query, as far as the public
    texts resemble the private ones. It is a function of the query and of public texts
    alone, so whether an owner is eligible is still a matter between its own data and the
    query.

    Parameters
    ----------
    embeddings
        The model that embeds the store's records and queries.
    texts
        Public or synthetic texts in the place of the records; never the records themselves.
    share
        The share of them, and about of all owners, that a query should find: above 0, at most 1.
    """

    def __init__(self, embeddings: Embeddings, texts: Sequence[str], share: float) -> None:
        shown = public_texts("texts", texts)
        self.share = checks.probability("share", share)
        self._vectors = embed(embeddings, shown, progress=False)
        self._rank = max(1, math.ceil(self.share * len(shown) - 1e-9))
        self._name = hashlib.sha256("\0".join(shown).encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def __call__(self, query: Vectors) -> float:
        """The threshold for a query's vector of norm 1."""
        near = inner_products(self._vectors, np.arange(len(self._vectors)), query)
        last = len(near) - self._rank
        return float(np.clip(np.partition(near, last)[last], -1.0, 1.0))

    def __repr__(self) -> str:
        return f"ShareThreshold(share={self.share:g} of {len(self._vectors)} public texts, {self._name})"
