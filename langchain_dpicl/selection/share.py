"""A threshold of its own for each query, from public texts: as near as a share of them comes to it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from langchain_dpicl.privacy import checks
from langchain_dpicl.selection.suggest import public_texts
from langchain_dpicl.store import intake, nearness
from langchain_dpicl.store.intake import Vectors

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings


class ShareThreshold:
    """For each query, the similarity to it that a share of public texts reaches: a selector's ``threshold``.

    One number for all queries lets in crowds for an ordinary query and nobody for a rare one. This lets in about the
    same share of owners for every query, as far as the public texts resemble the private ones. It is a function of the
    query and of public texts alone, so whether an owner is eligible is still a matter between its own data and the
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
        self._vectors = intake.embed(embeddings, shown, progress=False)
        self._rank = max(1, math.ceil(self.share * len(shown) - 1e-9))
        self._name = hashlib.sha256("\0".join(shown).encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def __call__(self, query: Vectors) -> float:
        """The threshold for a query's vector of norm 1."""
        near = nearness.inner_products(self._vectors, np.arange(len(self._vectors)), query)
        return float(np.clip(np.partition(near, len(near) - self._rank)[len(near) - self._rank], -1.0, 1.0))

    def __repr__(self) -> str:
        return f"ShareThreshold(share={self.share:g} of {len(self._vectors)} public texts, {self._name})"
