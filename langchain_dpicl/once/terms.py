"""PrivateTerms: the words and phrases that enough owners use, of no listed domain, released once with privacy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.budget import Receipt
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.extras import require
from langchain_dpicl.once.files import RECEIPT, read_public, write_public
from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.profile import lattice_tail

_FORMAT = "dpicl-terms-1"


class PrivateTerms(Sequence[str]):
    """Terms that enough owners give, the most frequent first: `release_terms` makes them once, use them for ever.

    A read-only sequence of texts without case and accents. It may stand wherever a public list may: as the domain of
    `Keywords`, as topics or values of `release_table`, as the labels of `PrivateHead.fit`.

    Mechanism. An owner who gives m terms adds 1/sqrt(m) to each of them, rounded towards 0 on a lattice. Each term that
    somebody gave gets discrete Gaussian noise of standard deviation sigma, and is released if its noisy count reaches
    the ``threshold``. The terms that one owner alone gives are held back, all of them, but with a probability of delta0
    (`privacy.mechanisms.Terms` has the proof).

    Neighbours and sensitivity. One owner added or removed, with all its records, at a rate of 1: the counts move by at
    most 1 together. Whatever is made of the terms and their noisy counts is post-processing. The order is that of the
    noisy counts, of equal ones that of the terms' bytes.

    Attributes
    ----------
    counts
        The noisy counts, which cannot be changed.
    sigma
        The noise's standard deviation of every count.
    threshold
        The noisy count from which a term is released.
    receipt
        What they cost.
    reading
        PRIVATE, for the operator: how many records were read, and how many have no term. The object that
        `release_terms` returns has it alone; neither a file, nor a pickle, nor a copy has it.
    """

    reading: Mapping[str, int] | None = None

    def __init__(
        self, terms: Sequence[str], counts: NDArray[np.float64], sigma: float, threshold: float, receipt: Receipt
    ) -> None:
        if len(set(terms)) != len(terms) or not all(isinstance(term, str) for term in terms):
            raise InvalidParameter("terms", f"{len(terms)} terms", "different texts")
        self._terms = tuple(terms)
        self.counts = np.array(counts, np.float64)
        self.counts.flags.writeable = False
        if self.counts.shape != (len(self._terms),) or not np.isfinite(self.counts).all():
            raise InvalidParameter("counts", f"shape {self.counts.shape}", f"{len(self._terms)} finite numbers")
        self.sigma = checks.positive("sigma", sigma)
        self.threshold = checks.positive("threshold", threshold)
        self.receipt = receipt

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[str, ...]: ...

    def __getitem__(self, at: int | slice) -> str | tuple[str, ...]:
        return self._terms[at]

    def __len__(self) -> int:
        return len(self._terms)

    def sharing_bound(self, owners: int, terms: int = 1) -> float:
        """At least the probability that a term is released which exactly so many owners give, each with so many terms.

        P(noise >= threshold - owners / sqrt(terms)), by the exact law of the noise. It grows with the owners: the
        promise hides an owner, however many records it has, and no crowd.
        """
        owners = checks.whole("owners", owners, at_least=0)
        weight = math.floor(LATTICE / math.sqrt(checks.whole("terms", terms)))
        return lattice_tail(round(self.threshold * LATTICE) - owners * weight, self.sigma * LATTICE)

    def to_pandas(self) -> Any:
        """The terms and their noisy counts as a data frame. Raises `MissingExtra` without pandas."""
        pandas = require("pandas", "hub")
        return pandas.DataFrame({"term": self._terms, "count": self.counts})

    # -- files ---------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "reading"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.counts.flags.writeable = False  # a pickle forgets it

    def save(self, path: str | Path) -> None:
        """Write the terms to one JSON file, which replaces an older one as a whole. It is public."""
        content = {
            "terms": self._terms,
            "counts": self.counts.tolist(),
            "sigma": self.sigma,
            "threshold": self.threshold,
            "receipt": self.receipt,
        }
        write_public(path, _FORMAT, content)

    @classmethod
    def load(cls, path: str | Path) -> PrivateTerms:
        """Read a file of `save`. Raises `InvalidParameter` for another file."""
        return read_public(path, _FORMAT, "a file of terms", cls._of)

    @classmethod
    def _of(cls, content: dict[str, Any]) -> PrivateTerms:
        receipt = RECEIPT.validate_python(content["receipt"])
        return cls(content["terms"], content["counts"], content["sigma"], content["threshold"], receipt)

    def __repr__(self) -> str:
        about = f"sigma={self.sigma:.4g}, threshold={self.threshold:.4g}, {self.receipt['id']!r}"
        return f"PrivateTerms({len(self)} terms, {about})"
