"""The noisy mean of what the members said, as embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable
from numpy.typing import NDArray

from langchain_dpicl.aggregators.base import T
from langchain_dpicl.aggregators.embedded import STEPS, Embedded
from langchain_dpicl.aggregators.reading import answer_of
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.mechanism import Options
from langchain_dpicl.privacy.noise import Randomness
from langchain_dpicl.privacy.votes import abstention_threshold, tells_abstention


class EmbeddingMean(Embedded[T]):
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
        How many answers to ask the chain for, 100 unless given (20 in a file and on the command line).
    release
        "text" for a candidate, "vector" for the noisy mean as a list of numbers (then there are no candidates).

    An answer that is empty or whose embedding is not a finite vector of the candidates' dimension abstains; a zero
    embedding counts as an answer that adds nothing.

    Source: embedding space aggregation (ESA), Wu et al. 2024, section 3.2.1, with the sensitivity corrected.
    """

    kind = "embedding"
    gives_text = True
    mechanism = "embedding"

    @overload
    def __init__(
        self: EmbeddingMean[str],
        embeddings: Embeddings,
        candidates: Runnable[Any, Any] | Sequence[str] | None = ...,
        n_candidates: int | None = ...,
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
        n_candidates: int | None = ...,
        *,
        release: Literal["text", "vector"] = ...,
    ) -> None: ...

    def __init__(
        self,
        embeddings: Embeddings,
        candidates: Runnable[Any, Any] | Sequence[str] | None = None,
        n_candidates: int | None = None,
        *,
        release: Literal["text", "vector"] = "text",
    ) -> None:
        if release not in ("text", "vector"):
            raise InvalidParameter("release", release, '"text" or "vector"')
        if (release == "vector") != (candidates is None):
            bound = 'a chain, or a list of texts; None with release="vector", and only there'
            raise InvalidParameter("candidates", candidates and type(candidates).__name__, bound)
        self.release = release
        super().__init__(embeddings, candidates, n_candidates, usual=100)

    @property
    def options(self) -> Options:
        return {"step": 1.0 / STEPS}

    def shown(self, encoded: object) -> object:
        return f"an embedding of {self._dimension} dimensions"

    def read(self, rows: Sequence[Sequence[float]]) -> NDArray[np.int64]:
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
        return self.texts[int(np.argmax(self._units @ mean))]

    def tells(self, members: int, parameter: float) -> bool:
        return tells_abstention(members, parameter, 0, STEPS, self._counted)

    @property
    def outcomes(self) -> int | None:
        """The candidates, as if they were at right angles to each other."""
        return None if self.release == "vector" else self.rivals

    def zero_shot(self, output: object, values: Mapping[str, Any]) -> Any:
        text = (answer_of(output) or "").strip()
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
        return f"EmbeddingMean({type(self.embeddings).__name__}, {self._shown_candidates})"
