"""Sums of what the members said plus exact discrete Gaussian noise: the noisy vote, and the embedding mean."""

from __future__ import annotations

import asyncio
import copy
import re
import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable, RunnableLambda
from numpy.typing import NDArray

from langchain_dpicl.aggregators.base import Aggregator, text_of
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, UnsafeConfigurationError
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.noise import Randomness, abstention_threshold, tells_abstention

STEPS = 1 << 16
"""Lattice points of an embedding between 0 and 1."""
_LONG = 1 << 14  # characters: a millisecond or so
_EDGES = " \t\r\n.,;:!?\"'`*()[]{}<>"


def normal(text: str) -> str:
    """As labels are compared: no case, no punctuation or space around, single spaces within."""
    return " ".join(text.strip(_EDGES).casefold().split())


def check_labels(name: str, value: object) -> tuple[str, ...]:
    """At least two strings that differ in more than case, spaces and the punctuation around them."""
    bound = "a list of at least two strings, each with a letter or digit"
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) < 2:
        raise InvalidParameter(name, value, bound)
    if not all(isinstance(label, str) and normal(label) for label in value):
        raise InvalidParameter(name, value, bound)
    if len({normal(label) for label in value}) != len(value):
        raise InvalidParameter(name, value, "labels that differ in more than case, spaces and punctuation around them")
    return tuple(value)


class NoisyVote(Aggregator[str | dict[str, int]]):
    """Report the label with the largest noisy count, or all noisy counts.

    Mechanism. One count per label of the public list, and one for abstentions; independent discrete Gaussian noise of
    scale sigma is added to EVERY count, also to those that are zero. The release is a function of these noisy counts:
    their argmax (ties broken at random), or the labels' counts themselves with ``scores=True``; both cost the same.

    Neighbours and sensitivity. One member's output replaced by any other or by an abstention: one count falls by 1 and
    another rises by 1 (or nothing moves), so the L2 sensitivity is sqrt(2) and the loss is exactly that of the 2-fold
    composition of a sensitivity-1 discrete Gaussian. Counting abstentions as one more coordinate does not change this.

    The answer "the members abstain" is released (as None) if the noisy count of abstentions beats every label and
    reaches a threshold that depends on N and sigma alone: a function of the noisy counts, so at no further cost. If
    fewer than half of the members abstain, noise brings it about with a probability of at most 1e-6 a release
    (`abstention_threshold` has the proof). So few members under much noise do not tell (`tells`; `PrivacyPlan.explain`
    says so): then the ensemble finds a model that is down by public questions instead.

    An output is read as a label if it is one, up to case, surrounding spaces and punctuation; else as the longest label
    that it begins with, as a whole word; else as the only label that occurs in it as a whole word. Everything else
    abstains.

    Source: report noisy max with Gaussian noise, Wu et al. 2024, section 4.1; discrete Gaussian, Canonne, Kamath and
    Steinke 2020.
    """

    mechanism = "vote"

    def __init__(self, labels: Sequence[str], *, scores: bool = False) -> None:
        self.labels = check_labels("labels", labels)
        self.scores = bool(scores)
        self.mechanism = "scores" if self.scores else "vote"
        self._exact = {normal(label): i for i, label in enumerate(self.labels)}
        self._words = [re.compile(rf"(?<!\w){re.escape(normal(label))}(?!\w)") for label in self.labels]

    def parse(self, output: object) -> int | None:
        """The index of the label that one output names, or None. Raises for no output."""
        text = text_of(output)
        if text is None:
            return None
        text = normal(text)
        if text in self._exact:
            return self._exact[text]
        if starts := [i for i, word in enumerate(self._words) if word.match(text)]:
            return max(starts, key=lambda i: len(self.labels[i]))
        found = [i for i, word in enumerate(self._words) if word.search(text)]
        return found[0] if len(found) == 1 else None

    def encode(self, output: object) -> int:
        """The label's index. Raises `ValueError` for an output that names none."""
        if (index := self.parse(output)) is None:
            raise ValueError("no label")
        return index

    async def aencode(self, output: object) -> int:
        """`encode`; a long text is read aside, so that it delays no other member."""
        text = text_of(output)
        return await asyncio.to_thread(self.encode, text) if text and len(text) > _LONG else self.encode(text)

    def counts(self, outputs: Sequence[object]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """PRIVATE: of encoded outputs, votes per label, and abstentions last."""
        known = range(len(self.labels))
        indices = [vote if type(vote) is int and vote in known else len(known) for vote in outputs]
        return np.bincount(indices, minlength=len(known) + 1).astype(np.int64)

    def aggregate(
        self, outputs: Sequence[object], parameter: float, randomness: Randomness
    ) -> str | dict[str, int] | None:
        counts = self.counts(outputs)
        noisy = counts + randomness.discrete_gaussian(parameter, len(counts))
        # From here on everything is a function of the noisy counts.
        best = int(noisy[:-1].max())
        if noisy[-1] > best and noisy[-1] >= abstention_threshold(len(outputs), parameter):
            return None
        if self.scores:
            return {label: int(count) for label, count in zip(self.labels, noisy, strict=False)}
        winners = np.flatnonzero(noisy[:-1] == best)
        return self.labels[int(winners[int(randomness.integers(len(winners), 1)[0])])]

    def tells(self, members: int, parameter: float) -> bool:
        return tells_abstention(members, parameter, len(self.labels))

    def zero_shot(self, output: object, values: Mapping[str, Any]) -> str | dict[str, int] | None:
        index = self.parse(output)
        if index is None:
            return None
        return {label: int(label == self.labels[index]) for label in self.labels} if self.scores else self.labels[index]

    @property
    def release_type(self) -> Any:
        return dict[str, int] if self.scores else str

    def __repr__(self) -> str:
        return f"NoisyVote({list(self.labels)!r}, scores={self.scores})"


class EmbeddingMean(Aggregator[str | list[float]]):
    """Embed every answer, and release the public candidate nearest to the noisy mean (ESA).

    Mechanism. Each answer's embedding is clipped to Euclidean norm 1 and rounded TOWARDS 0 to multiples of 2^-16, which
    keeps the norm at most 1; an abstention is the zero vector there, and 1 on one further coordinate that counts
    abstentions. The vectors are summed as integers, discrete Gaussian noise of standard deviation sigma is added to
    every coordinate of the sum, and the sum is divided by N, the constant number of members. The release is the
    candidate with the largest cosine to this mean, or the mean itself with ``release="vector"``.

    Neighbours and sensitivity. One member's output replaced by any other or by an abstention: two vectors of norm at
    most 1 are exchanged, so the sum moves by at most 2 (not 1: they may point in opposite directions). The profile is
    that of discrete Gaussian noise at L2 sensitivity 2.

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

    @property
    def options(self) -> Mapping[str, float]:
        return {"step": 1.0 / STEPS}

    def public_calls(self) -> tuple[Runnable[Any, Any], int] | None:
        return None if self._chain is None else (self._chain, self.n_candidates)

    def prepare(self, values: Mapping[str, Any], options: Mapping[str, float], answers: Sequence[object] = ()) -> Self:
        """With the candidates embedded. Raises `ModelUnavailable` if there are none."""
        if self._chain is None:
            with self._lock:  # the first request embeds the list
                if self._dimension == 0 and self.release == "vector":
                    self._dimension = self._embed_public(["a text of no meaning, for its dimension"])[0].size
                elif self._dimension == 0:
                    texts, units = self._usable(self._texts)
                    if lost := next((text for text in self._texts if text not in texts), None):
                        name = f"candidates[{self._texts.index(lost)}]"
                        raise InvalidParameter(name, lost, "a text with a finite, non-zero embedding")
                    self._units, self._dimension = units, units.shape[1]
            return self
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

    def aggregate(
        self, outputs: Sequence[object], parameter: float, randomness: Randomness
    ) -> str | list[float] | None:
        total = np.zeros(self._dimension + 1, np.int64)
        for output in outputs:
            if isinstance(output, np.ndarray):
                total[:-1] += output
            else:
                total[-1] += STEPS
        noisy = total + randomness.discrete_gaussian(parameter * STEPS, len(total))
        # From here on everything is a function of the noisy sum.
        if noisy[-1] >= abstention_threshold(len(outputs), parameter, STEPS):
            return None
        mean = noisy[:-1] / (STEPS * len(outputs))
        if self._units is None:
            return [float(number) for number in mean]
        return self._texts[int(np.argmax(self._units @ mean))]

    def tells(self, members: int, parameter: float) -> bool:
        return tells_abstention(members, parameter, 0, STEPS)

    @property
    def variant(self) -> str:
        return f"{self!r} {self._texts!r}"

    def zero_shot(self, output: object, values: Mapping[str, Any]) -> str | list[float] | None:
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
