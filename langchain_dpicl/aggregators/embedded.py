"""Outputs and public candidates as embeddings: what an embedding mean and a candidate vote share."""

from __future__ import annotations

import copy
import threading
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable, RunnableLambda
from numpy.typing import NDArray

from langchain_dpicl.aggregators.base import Aggregator, T
from langchain_dpicl.aggregators.reading import answer_of
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, UnsafeConfigurationError
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.mechanism import Options

STEPS = 1 << 16
"""Lattice points of an embedding between 0 and 1."""


class Embedded(Aggregator[T]):
    """Embeds outputs and public candidates: a fixed list, or zero-shot answers to the query."""

    takes_own_calls = True

    def __init__(
        self,
        embeddings: Embeddings,
        candidates: Runnable[Any, Any] | Sequence[str] | None,
        n_candidates: int | None,
        usual: int,
    ) -> None:
        if not isinstance(embeddings, Embeddings):
            raise InvalidParameter("embeddings", type(embeddings).__name__, "LangChain Embeddings")
        if hasattr(embeddings, "document_embedding_store"):
            raise UnsafeConfigurationError("embeddings with a cache would keep private answers: use the model itself")
        self.embeddings = embeddings
        self.n_candidates = checks.whole("n_candidates", usual if n_candidates is None else n_candidates)
        self._chain: Runnable[Any, Any] | None = None
        self.texts: tuple[str, ...] = ()
        if isinstance(candidates, Runnable):
            self._chain = candidates
        elif callable(candidates):
            self._chain = RunnableLambda(candidates)
        elif candidates is not None:
            bound = "a chain, or a list of at least one non-empty text"
            if isinstance(candidates, str) or not isinstance(candidates, Sequence) or not candidates:
                raise InvalidParameter("candidates", candidates, bound)
            for i, text in enumerate(candidates):
                if not isinstance(text, str) or not text.strip():
                    raise InvalidParameter(f"candidates[{i}]", text, "a non-empty text")
            self.texts = tuple(dict.fromkeys(text.strip() for text in candidates))
        if self._chain is None and n_candidates is not None:
            raise InvalidParameter("n_candidates", n_candidates, "left out without a chain that writes candidates")
        self._lock = threading.Lock()
        self._units: NDArray[np.float64] | None = None  # the candidates' directions, one row each
        self._dimension = 0
        self._listed: list[tuple[NDArray[np.float64] | None, int]] = []  # both, of the list: every copy's, made once

    @property
    def rivals(self) -> int:
        """The number of candidates, of which there are two or more."""
        return max(2, len(self.texts) or self.n_candidates)

    def public_calls(self) -> tuple[Runnable[Any, Any] | None, int] | None:
        return None if self._chain is None else (self._chain, self.n_candidates)

    def prepare(self, values: Mapping[str, Any], options: Options, answers: Sequence[object] = ()) -> Self:
        """With the candidates embedded. Raises `ModelUnavailable` if there are none."""
        if self._chain is None:
            bound = copy.copy(self)
            with self._lock:  # the first request embeds the list
                if not self._listed:
                    self._listed.append(self._embed_list())
            bound._units, bound._dimension = self._listed[0]
            return bound
        written = [text for answer in answers if (text := (answer_of(answer) or "").strip())]
        different = tuple(dict.fromkeys(written))
        if len(different) == 1 < len(written):
            warnings.warn(
                "all zero-shot candidates are equal, so the release says nothing: let their model sample "
                "(a temperature above 0)",
                stacklevel=2,
            )
        bound = copy.copy(self)
        bound.texts, bound._units = bound._usable(different)
        if not bound.texts:
            raise ModelUnavailable(
                "no zero-shot candidate could be written and embedded; nothing was charged. "
                "Invoke the candidates chain alone with examples=[] to see why"
            )
        bound._dimension = bound._units.shape[1]
        return bound

    def _embed_list(self) -> tuple[NDArray[np.float64] | None, int]:
        """The directions of the fixed list, and their dimension."""
        if not self.texts:
            return None, self._embed_public(["a text of no meaning, for its dimension"])[0].size
        texts, units = self._usable(self.texts)
        if lost := next((text for text in self.texts if text not in texts), None):
            name = f"candidates[{self.texts.index(lost)}]"
            raise InvalidParameter(name, lost, "a text with a finite, non-zero embedding")
        return units, units.shape[1]

    def _usable(self, texts: tuple[str, ...]) -> tuple[tuple[str, ...], NDArray[np.float64]]:
        """The texts with a finite embedding other than zero, and the embeddings' directions."""
        rows = self._embed_public(list(texts)) if texts else []
        dimension = Counter(row.size for row in rows).most_common(1)[0][0] if rows else 0
        kept = []
        for text, vector in zip(texts, rows, strict=True):
            if (unit := direction(vector, dimension)) is not None:
                kept.append((text, unit))
        units = np.asarray([unit for _, unit in kept], np.float64).reshape(len(kept), dimension)
        return tuple(text for text, _ in kept), units

    def _embed_public(self, texts: list[str]) -> list[NDArray[np.float64]]:
        try:
            rows = [np.asarray(row, np.float64) for row in self.embeddings.embed_documents(texts)]
            if len(rows) == len(texts) and all(row.size and row.ndim == 1 for row in rows):
                return rows
            reason = "it gives no vector for a text"
        except Exception as error:
            reason = type(error).__name__
        raise ModelUnavailable(f"the embedding model fails on public text ({reason}); nothing was charged")

    def encode(self, output: object) -> Any:
        return self.read(self.embeddings.embed_documents([_text_of_answer(output)]))

    async def aencode(self, output: object) -> Any:
        return self.read(await self.embeddings.aembed_documents([_text_of_answer(output)]))

    @abstractmethod
    def read(self, rows: Sequence[Sequence[float]]) -> Any:
        """Return what an output adds to a release, from its embedding, the only row. Raises for what is no vector."""

    def check_kind(self, output: object) -> None:
        """Embed a text, too: a model that fails on it would fail on all."""
        super().check_kind(output)
        if text := (answer_of(output) or "").strip():
            self.encode(text)

    @property
    def samples(self) -> Sequence[str]:
        return self.texts or super().samples

    @property
    def _shown_candidates(self) -> str:
        return f"{len(self.texts)} candidates" if self._chain is None else f"n_candidates={self.n_candidates}"

    @property
    def variant(self) -> str:
        return f"{self!r} {self.texts!r}"


def direction(vector: NDArray[np.float64], dimension: int) -> NDArray[np.float64] | None:
    """The unit vector of a finite vector other than zero; None for any other."""
    scale = float(np.abs(vector).max(initial=0.0))
    if vector.shape != (dimension,) or not np.isfinite(vector).all() or scale <= 0.0:
        return None
    vector = vector / scale
    return np.asarray(vector / np.linalg.norm(vector), np.float64)


def _text_of_answer(output: object) -> str:
    text = (answer_of(output) or "").strip()
    if not text:
        raise ValueError("it holds no answer")
    return text
