"""Embedding means and keywords with a call for every owner: what one output more or less moves, by brute force."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
from exact import Law, added, check_profile, law, log_range, replaced
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from langchain_dpicl import EmbeddingMean, Keywords, Words
from langchain_dpicl.aggregators.means import STEPS
from langchain_dpicl.privacy import MECHANISMS, Gaussian, lattice_multiplier
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.private.boundary import ABSTAIN

# -- embeddings --------------------------------------------------------------------------------------------------------

ANSWERS = {"east": [1.0, 0.0], "west": [-1.0, 0.0], "north": [0.0, 0.7], "far": [-30.0, 40.0], "nil": [0.0, 0.0]}
SIGMA, EXPECTED = 0.8, 2.5


class Table(Embeddings):
    """Two dimensions, written down."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [ANSWERS.get(text, [1.0, 0.0]) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


class NoNoise:
    """Adds nothing but to the count of abstentions, which stays below any threshold."""

    def __init__(self) -> None:
        self.sigmas: set[float] = set()

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        self.sigmas.add(sigma)
        return np.array([*[0] * (size - 1), -1000 * STEPS], np.int64)


def test_one_output_more_moves_the_sum_of_embeddings_by_one_at_most() -> None:
    """All sums of up to three answers, abstentions among them, each with one more, and with one replaced. What divides
    the sum is public: the number of outputs, which is not, would move every mean."""
    mean = EmbeddingMean(Table(), release="vector").prepare({}, {})
    own = mean.under("embedding", Crowd(9, EXPECTED, own_calls=True))
    said = [*(mean.encode(text) for text in ANSWERS), ABSTAIN]

    def total(outputs: tuple[object, ...]) -> NDArray[np.float64]:
        randomness: Any = NoNoise()
        released = own.aggregate(outputs, SIGMA, randomness)
        assert isinstance(released, list)
        assert randomness.sigmas == {SIGMA * STEPS}
        return np.append(np.array(released) * EXPECTED, sum(output is ABSTAIN for output in outputs))

    added, replaced = [], []
    for number in range(4):
        for others in itertools.combinations_with_replacement(said, number):
            sums = [total((*others, one)) for one in said]
            added += [float(np.linalg.norm(each - total(others))) for each in sums]
            replaced += [float(np.linalg.norm(one - other)) for one, other in itertools.combinations(sums, 2)]
    assert max(added) == pytest.approx(1.0, abs=1e-9)
    assert max(replaced) == pytest.approx(2.0, abs=1e-9)


def test_a_mean_of_own_calls_is_accounted_with_sensitivity_one() -> None:
    family, epsilons = MECHANISMS["embedding"], np.array([0.0, 0.5, 1.0, 3.0])
    for own_calls, move in ((0.0, 2.0), (1.0, 1.0)):
        right = Gaussian(lattice_multiplier(SIGMA * STEPS, move * STEPS)).delta(epsilons)
        assert family.of({"own_calls": own_calls}).profile(SIGMA).delta(epsilons) == pytest.approx(right, rel=1e-12)
        assert right == pytest.approx(Gaussian(SIGMA / move).delta(epsilons), rel=1e-3), (
            "the lattice costs next to nothing"
        )


# -- keywords ----------------------------------------------------------------------------------------------------------

EPS0, WORDS = 1.3, "abc"
TEXTS = [" ".join(chosen) for k in range(4) for chosen in itertools.combinations(WORDS, k)]

Said = tuple[str, ...]


@cache
def keyword_law(said: Said, k: int, own_calls: bool) -> Law:
    """The exact law of the ranked words of these outputs, by the code itself."""
    aggregator = Keywords.joint_em(list(WORDS), k=k, words=Words(stop_words=None, pattern=r"\w+"))
    bound = aggregator.prepare({"input": ""}, {}).under("joint-em", Crowd(4, 2.0, own_calls))
    outputs = [bound.encode(text) for text in said]
    return law(lambda randomness: tuple(bound.aggregate(outputs, EPS0, randomness)))


@pytest.mark.parametrize("k", [1, 2])
def test_one_output_more_moves_keywords_by_their_range(k: int) -> None:
    """Every set of three words for every output: the range of the log ratio is eps0, and reached; and the profile holds
    both ways. With an output replaced the same weights would have twice the range: that is no plan of own calls."""
    pairs = [(keyword_law(one, k, True), keyword_law(other, k, True)) for one, other in added(TEXTS, 3)]
    assert max(log_range(p, q) for p, q in pairs) == pytest.approx(EPS0, rel=1e-9)
    check_profile([*pairs, *((q, p) for p, q in pairs)], MECHANISMS["joint-em"].of({"own_calls": 1.0}).profile(EPS0))
    wrong = max(log_range(keyword_law(one, k, True), keyword_law(other, k, True)) for one, other in replaced(TEXTS, 3))
    assert wrong > 1.9 * EPS0
    right = max(
        log_range(keyword_law(one, k, False), keyword_law(other, k, False)) for one, other in replaced(TEXTS, 3)
    )
    assert right <= EPS0 * (1 + 1e-9)
