"""The noisy mean of what the members said, as embeddings."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, overload

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable, RunnableLambda
from numpy.typing import NDArray

from langchain_dpicl.aggregators.base import Aggregator, T, text_of
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, UnsafeConfigurationError
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.noise import Randomness
from langchain_dpicl.privacy.votes import abstention_threshold, flip_probability, tells_abstention

STEPS = 1 << 16
"""Lattice points of an embedding between 0 and 1."""


class EmbeddingMean(Aggregator[T]):
    """Embed every answer, and release the public candidate nearest to the noisy mean (ESA).

    Mechanism. Each answer's embedding is clipped to Euclidean norm 1 and rounded TOWARDS 0 to multiples of 2^-16, which
    keeps the norm at most 1; an abstention is the zero vector there, and 1 on one further coordinate that counts
    abstentions. The vectors are summed as integers, discrete Gaussian noise of standard deviation sigma is added to
    every coordinate of the sum, and the sum is divided by a public constant: N, or the expected number of calls if
    every owner has its own. The release is the candidate with the largest cosine to this mean, or the mean itself with
    ``release="vector"``.

    Neighbours and sensitivity. One member's output replaced by any other or by an abstention: two vectors of norm at
    most 1 are exchanged, so the sum moves by at most 2 (not 1: they may point in opposite directions). The profile is
    that of discrete Gaussian noise at L2 sensitivity 2. With a call for every owner one vector is added or removed: 1.

    "The members abstain" is released (as None) if the noisy number of abstentions reaches a threshold, as in
    `NoisyVote`: at no further cost, and by noise alone with a probability of at most 1e-6 a release.

    Parameters
    ----------
    embeddings
        Any LangChain ``Embeddings``. It sees private answers, each in a call of its own, and public candidates. Its
        vectors need not be normalised. One that caches what it embeds is refused.
    candidates
        A fixed public list of sentences, or a chain that writes zero-shot answers to the query: it is asked
        ``n_candidates`` times with ``examples=[]``, before anything is charged, and should sample (a temperature above
        0), since equal answers count once. If it gives fewer, the release is the nearest of those.
    n_candidates
        How many answers to ask the chain for.
    release
        "text" for a candidate, "vector" for the noisy mean as a list of numbers (then there are no candidates).

    An answer that is empty or whose embedding is not a finite vector of the candidates' dimension abstains; a zero
    embedding counts as an answer that adds nothing.

    Source: embedding space aggregation, Wu et al. 2024, section 4.2, with the sensitivity corrected.
    """

    mechanism = "embedding"
    takes_own_calls = True

    @overload
    def __init__(
        self: EmbeddingMean[str],
        embeddings: Embeddings,
        candidates: Runnable[Any, Any] | Sequence[str] | None = ...,
        n_candidates: int = ...,
        *,
        release: Literal["text"] = ...,
    ) -> None: ...

    @overload
    def __init__(self: EmbeddingMean[list[float]], embeddings: Embeddings, *, release: Literal["vector"]) -> None: ...

    @overload
    def __init__(
        self,
        embeddings: Embeddings,
        candidates: Runnable[Any, Any] | Sequence[str] | None = ...,
        n_candidates: int = ...,
        *,
        release: Literal["text", "vector"] = ...,
    ) -> None: ...

    def __init__(
        self,
        embeddings: Embeddings,
        candidates: Runnable[Any, Any] | Sequence[str] | None = None,
        n_candidates: int = 100,
        *,
        release: Literal["text", "vector"] = "text",
    ) -> None:
        if not isinstance(embeddings, Embeddings):
            raise InvalidParameter("embeddings", type(embeddings).__name__, "LangChain Embeddings")
        if hasattr(embeddings, "document_embedding_store"):
            raise UnsafeConfigurationError("embeddings with a cache would keep private answers: use the model itself")
        if release not in ("text", "vector"):
            raise InvalidParameter("release", release, '"text" or "vector"')
        self.embeddings = embeddings
        self.n_candidates = checks.whole("n_candidates", n_candidates)
        self.release = release
        self._chain: Runnable[Any, Any] | None = None
        self._texts: tuple[str, ...] = ()
        if release == "vector":
            if candidates is not None:
                raise InvalidParameter("candidates", type(candidates).__name__, 'None with release="vector"')
        elif isinstance(candidates, Runnable):
            self._chain = candidates
        elif callable(candidates):
            self._chain = RunnableLambda(candidates)
        else:
            bound = "a chain, or a list of at least one non-empty text"
            if isinstance(candidates, str) or not isinstance(candidates, Sequence) or not candidates:
                raise InvalidParameter("candidates", candidates, bound)
            for i, text in enumerate(candidates):
                if not isinstance(text, str) or not text.strip():
                    raise InvalidParameter(f"candidates[{i}]", text, "a non-empty text")
            self._texts = tuple(dict.fromkeys(text.strip() for text in candidates))
        self._lock = threading.Lock()
        self._units: NDArray[np.float64] | None = None  # the candidates' directions, one row each
        self._dimension = 0
        self._listed: list[tuple[NDArray[np.float64] | None, int]] = []  # both, of the list: every copy's, made once

    @property
    def options(self) -> Mapping[str, float]:
        return {"step": 1.0 / STEPS}

    def public_calls(self) -> tuple[Runnable[Any, Any] | None, int] | None:
        return None if self._chain is None else (self._chain, self.n_candidates)

    def prepare(self, values: Mapping[str, Any], options: Mapping[str, float], answers: Sequence[object] = ()) -> Self:
        """With the candidates embedded. Raises `ModelUnavailable` if there are none."""
        if self._chain is None:
            bound = copy.copy(self)
            with self._lock:  # the first request embeds the list
                if not self._listed:
                    self._listed.append(self._embed_list())
            bound._units, bound._dimension = self._listed[0]
            return bound
        written = [text for answer in answers if (text := (text_of(answer) or "").strip())]
        different = tuple(dict.fromkeys(written))
        if len(different) == 1 < len(written):
            warnings.warn(
                "all zero-shot candidates are equal, so the release says nothing: let their model sample "
                "(a temperature above 0)",
                stacklevel=2,
            )
        bound = copy.copy(self)
        bound._texts, bound._units = bound._usable(different)
        if not bound._texts:
            raise ModelUnavailable(
                "no zero-shot candidate could be written and embedded; nothing was charged. "
                "Invoke the candidates chain alone with examples=[] to see why"
            )
        bound._dimension = bound._units.shape[1]
        return bound

    def _embed_list(self) -> tuple[NDArray[np.float64] | None, int]:
        """The directions of the fixed list, and their dimension."""
        if self.release == "vector":
            return None, self._embed_public(["a text of no meaning, for its dimension"])[0].size
        texts, units = self._usable(self._texts)
        if lost := next((text for text in self._texts if text not in texts), None):
            name = f"candidates[{self._texts.index(lost)}]"
            raise InvalidParameter(name, lost, "a text with a finite, non-zero embedding")
        return units, units.shape[1]

    def _usable(self, texts: tuple[str, ...]) -> tuple[tuple[str, ...], NDArray[np.float64]]:
        """The texts with a finite embedding other than zero, and the embeddings' directions."""
        rows = self._embed_public(list(texts)) if texts else []
        dimension = Counter(row.size for row in rows).most_common(1)[0][0] if rows else 0
        kept = []
        for text, vector in zip(texts, rows, strict=True):
            scale = float(np.abs(vector).max(initial=0.0))
            if vector.shape == (dimension,) and np.isfinite(vector).all() and scale > 0.0:
                vector = vector / scale
                kept.append((text, vector / np.linalg.norm(vector)))
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

    def check_public(self, output: object) -> None:
        text = text_of(output)
        if text is None:
            raise TypeError
        if text.strip():
            self.encode(text)

    def encode(self, output: object) -> object:
        return self._lattice(self.embeddings.embed_documents([_answer(output)]))

    async def aencode(self, output: object) -> object:
        return self._lattice(await self.embeddings.aembed_documents([_answer(output)]))

    def shown(self, encoded: object) -> object:
        return f"an embedding of {self._dimension} dimensions"

    def _lattice(self, rows: list[list[float]]) -> NDArray[np.int64]:
        """The clipped vector in lattice steps, of norm at most `STEPS` exactly. Raises for what is not a vector."""
        vector = np.asarray(rows[0], np.float64)
        if vector.shape != (self._dimension,) or not np.isfinite(vector).all():
            raise ValueError
        vector = vector / max(1.0, float(np.abs(vector).max()))  # so that the norm does not overflow
        vector = vector / max(1.0, float(np.linalg.norm(vector)))
        for _ in range(4):
            steps = np.trunc(vector * STEPS).astype(np.int64)
            if int(steps @ steps) <= STEPS * STEPS:
                return steps
            vector = vector * (1.0 - 2.0**-40)  # the norm was rounded down
        raise ArithmeticError

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> Any:
        total = np.zeros(self._dimension + 1, np.int64)
        for output in outputs:
            if isinstance(output, np.ndarray):
                total[:-1] += output
            else:
                total[-1] += STEPS
        noisy = total + randomness.discrete_gaussian(parameter * STEPS, len(total))
        # From here on everything is a function of the noisy sum.
        crowd = self._crowd(outputs)
        if noisy[-1] >= abstention_threshold(crowd.members, parameter, STEPS):
            return None
        mean = noisy[:-1] / (STEPS * (crowd.expected if crowd.own_calls else crowd.members))
        if self._units is None:
            return [float(number) for number in mean]
        return self._texts[int(np.argmax(self._units @ mean))]

    def tells(self, members: int, parameter: float) -> bool:
        counted = None if self.crowd is None else math.floor(self.crowd.expected)
        return tells_abstention(members, parameter, 0, STEPS, counted)

    def overturned(self, parameter: float) -> float | None:
        """As for a vote between candidates at right angles to each other."""
        if self.crowd is None or self.release == "vector":
            return None
        rivals = max(2, len(self._texts) or self.n_candidates)
        return flip_probability(parameter, math.floor(self.crowd.expected), rivals)

    @property
    def variant(self) -> str:
        return f"{self!r} {self._texts!r}"

    def zero_shot(self, output: object, values: Mapping[str, Any]) -> Any:
        text = (text_of(output) or "").strip()
        if not text or self.release == "text":
            return text or None
        (vector,) = self._embed_public([text])
        if not np.isfinite(vector).all():
            return None
        return [float(number) for number in vector / max(1.0, float(np.linalg.norm(vector)))]

    @property
    def release_type(self) -> Any:
        return list[float] if self.release == "vector" else str

    def __repr__(self) -> str:
        if self.release == "vector":
            return f"EmbeddingMean({type(self.embeddings).__name__}, release='vector')"
        candidates = f"{len(self._texts)} candidates" if self._chain is None else f"n_candidates={self.n_candidates}"
        return f"EmbeddingMean({type(self.embeddings).__name__}, {candidates})"


def _answer(output: object) -> str:
    text = text_of(output)
    if text is None or not text.strip():
        raise ValueError
    return text.strip()
