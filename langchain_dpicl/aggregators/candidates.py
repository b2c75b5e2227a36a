"""A vote of the members' texts for their nearest public candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable
from numpy.typing import NDArray

from langchain_dpicl.aggregators.embedded import STEPS, Embedded, direction
from langchain_dpicl.aggregators.reading import answer_of, plain
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.mechanism import Options
from langchain_dpicl.privacy.noise import Randomness, choose_exponential
from langchain_dpicl.privacy.votes import EXPONENTIAL, TOLD, VoteNoise


class CandidateVote(Embedded[str]):
    """Each answer votes for its nearest public candidate, and the exponential mechanism picks one.

    Mechanism. An answer's vote is the candidate with the largest cosine to it: both directions are rounded to multiples
    of 2^-16 and multiplied in whole numbers, and the first candidate wins a tie, so equal answers vote alike on every
    machine. A candidate is released with probability proportional to exp(r c) for its count c, drawn exactly.

    Neighbours and range. An answer's vote is a function of this answer and public candidates. One output replaced by
    any other, by an abstention or by nothing moves two counts by 1 at most, and r = eps0 / 2 is eps0-bounded range;
    with a call for every owner one output is added or removed, one count moves, and r = eps0. "The members abstain" is
    one more outcome with a public penalty, as in `NoisyVote` ("vote-em"), whose plan and proofs these are.

    Parameters
    ----------
    embeddings
        Any LangChain ``Embeddings`` that keeps nothing, as for `EmbeddingMean`.
    candidates
        A public list of at least two different texts, or a chain that writes zero-shot answers to the query, as for
        `EmbeddingMean`. If all that it writes is equal, the query is refused and costs nothing.
    n_candidates
        How many answers to ask the chain for, 20 unless given. Few that differ are better than many that are alike,
        among which votes are divided.

    least_similarity
        An answer whose cosine to its nearest candidate is below this abstains, between -1 and 1: else every answer,
        also "I do not know.", counts for some candidate. Public; the number depends on the embedding model.

    An answer that is empty, or without a direction of the candidates' dimension, abstains.
    """

    kind = "candidate-vote"
    gives_text = True
    mechanism = EXPONENTIAL

    def __init__(
        self,
        embeddings: Embeddings,
        candidates: Runnable[Any, Any] | Sequence[str],
        n_candidates: int | None = None,
        least_similarity: float | None = None,
    ) -> None:
        if candidates is None:
            raise InvalidParameter("candidates", None, "a chain, or a list of texts")
        super().__init__(embeddings, candidates, n_candidates, usual=20)
        if self._chain is None and len(set(map(plain, self.texts))) < max(2, len(candidates)):  # type: ignore[arg-type]
            raise InvalidParameter("candidates", candidates, "at least two texts, all different")
        if self._chain is not None:
            checks.whole("n_candidates", self.n_candidates, at_least=2)
        self.least_similarity = least_similarity
        if least_similarity is not None:
            self.least_similarity = checks.real("least_similarity", least_similarity, at_least=-1.0, at_most=1.0)
        self._places: NDArray[np.int64] = np.zeros((0, 0), np.int64)

    def prepare(self, values: Mapping[str, Any], options: Options, answers: Sequence[object] = ()) -> Self:
        bound = super().prepare(values, options, answers)
        if len(bound.texts) < 2:
            raise ModelUnavailable(
                "fewer than two different zero-shot candidates could be written and embedded; nothing was charged. "
                "Let their model sample (a temperature above 0)"
            )
        assert bound._units is not None
        bound._places = np.rint(bound._units * STEPS).astype(np.int64)
        return bound

    def shown(self, encoded: object) -> object:
        return self.texts[encoded] if isinstance(encoded, int) else encoded

    def read(self, rows: Sequence[Sequence[float]]) -> int:
        """The index of the candidate nearest to the only row. Raises for what has no direction, or is near to none."""
        unit = direction(np.asarray(rows[0], np.float64), self._dimension)
        if unit is None:
            raise ValueError
        cosines = self._places @ np.rint(unit * STEPS).astype(np.int64)
        nearest = int(np.argmax(cosines))
        if self.least_similarity is not None and cosines[nearest] < self.least_similarity * STEPS**2:
            raise ValueError
        return nearest

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> str | None:
        crowd = self._crowd(outputs)
        number = len(self.texts)
        noise = VoteNoise(EXPONENTIAL, parameter, crowd.own_calls)
        votes = [vote if type(vote) is int and 0 <= vote < number else number for vote in outputs]
        counts = np.bincount(np.array(votes, np.int64), minlength=number + 1).tolist()
        losses = [*(-count for count in counts[:-1]), noise.abstention_count(crowd.members, number) - counts[-1]]
        chosen = choose_exponential([1] * (number + 1), losses, noise.rate, randomness)
        return None if chosen == number else self.texts[chosen]

    @property
    def outcomes(self) -> int:
        return self.rivals

    def tells(self, members: int, parameter: float) -> bool:
        noise = VoteNoise(EXPONENTIAL, parameter, self._own_calls)
        return noise.told(members, self.rivals, self._counted) >= TOLD

    def zero_shot(self, output: object, values: Mapping[str, Any]) -> str | None:
        return (answer_of(output) or "").strip() or None

    @property
    def release_type(self) -> Any:
        return str

    def __repr__(self) -> str:
        least = "" if self.least_similarity is None else f", least_similarity={self.least_similarity:g}"
        return f"CandidateVote({type(self.embeddings).__name__}, {self._shown_candidates}{least})"
