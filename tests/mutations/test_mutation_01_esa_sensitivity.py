"""Mistake 1: noise for sensitivity 1 on a sum of unit vectors, which one member moves by 2."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from exact import SLACK
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from langchain_dpicl import EmbeddingMean
from langchain_dpicl.aggregators import means
from langchain_dpicl.privacy import Gaussian, Mechanism, Profile, Randomness, lattice_multiplier
from langchain_dpicl.privacy.mechanisms import Embedding
from langchain_dpicl.private.boundary import ABSTAIN

STEPS = 64
"""A lattice coarse enough to sum over all of it."""
EPSILONS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0)
ANSWERS = {"east": [1.0, 0.0], "west": [-1.0, 0.0], "north": [0.0, 1.0], "south": [0.0, -1.0], "far": [9.0, 0.0]}


class Table(Embeddings):
    """Two dimensions, written down."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [ANSWERS.get(text, [1.0, 0.0]) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


class NoNoise:
    """Adds nothing, and remembers which noise was asked for: it is independent of the sum, so both give the law."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, int]] = []

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        self.asked.append((sigma, size))
        return np.zeros(size, np.int64)


class ForSensitivityOne(EmbeddingMean):
    """The mutant: half of the noise."""

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> Any:
        return super().aggregate(outputs, parameter / 2, randomness)


class AccountedForSensitivityOne(Embedding):
    """The mutant: the plan's noise, and a profile that says that the sum moves by 1."""

    def build(self, parameter: float) -> Profile:
        return Gaussian(lattice_multiplier(parameter / self.step, 1.0 / self.step))


def centre(mean: EmbeddingMean, outputs: Sequence[object], parameter: float) -> tuple[NDArray[np.int64], float]:
    """The sum that is released but for its noise, in steps, and the sigma of the noise, from the code itself."""
    randomness: Any = NoNoise()
    released = mean.aggregate(outputs, parameter, randomness)
    assert isinstance(released, list)
    ((sigma, size),) = randomness.asked
    assert size == len(released) + 1, "noise on every coordinate, and on the number of abstentions"
    return np.round(np.array(released) * STEPS * len(outputs)).astype(np.int64), sigma


def shifted_delta(move: NDArray[np.int64], sigma: float, epsilon: float) -> float:
    """delta(eps) of discrete Gaussian noise around 0 and around ``move``: the exact sum over the plane's lattice."""
    reach = math.ceil(8.6 * sigma) + int(np.abs(move).max())
    places = np.arange(-reach, reach + 1)
    one = [np.exp(-0.5 * (places / sigma) ** 2), np.exp(-0.5 * (places / sigma) ** 2)]
    other = [np.exp(-0.5 * ((places - int(step)) / sigma) ** 2) for step in move]
    p, q = (np.outer(*(axis / axis.sum() for axis in pair)) for pair in (one, other))
    return float(np.maximum(0.0, p - math.exp(epsilon) * q).sum())


def check(mean: EmbeddingMean, mechanism: Mechanism, parameter: float = 0.5) -> None:
    """Exact enumeration: for every pair of answers that one member may give in turn, the two noisy sums' true delta is
    at most what the mechanism's profile says."""
    mean = mean.prepare({}, {})
    said = {text: mean.encode(text) for text in ANSWERS}
    others = [said["north"], said["east"], ABSTAIN]
    profile = mechanism.of(mean.options).profile(parameter)
    found = {text: centre(mean, [output, *others], parameter) for text, output in said.items()}
    moves = {tuple(np.abs(a - b).tolist()): s for (a, s), (b, _) in itertools.combinations(found.values(), 2)}
    for move, sigma in moves.items():
        true = np.array([shifted_delta(np.array(move), sigma, epsilon) for epsilon in EPSILONS])
        claimed = profile.delta(EPSILONS)
        worst = int(np.argmax(true - claimed))
        found_out = f"delta({EPSILONS[worst]}) is {true[worst]:.6g}, and {claimed[worst]:.6g} is claimed"
        assert true[worst] <= claimed[worst] + SLACK, found_out


def product() -> tuple[EmbeddingMean, Mechanism]:
    return EmbeddingMean(Table(), release="vector"), Embedding()


def half_the_noise() -> tuple[EmbeddingMean, Mechanism]:
    return ForSensitivityOne(Table(), release="vector"), Embedding()


def half_the_sensitivity() -> tuple[EmbeddingMean, Mechanism]:
    return EmbeddingMean(Table(), release="vector"), AccountedForSensitivityOne()


@pytest.mark.parametrize("mutant", [half_the_noise, half_the_sensitivity])
def test_1_esa_noise_for_sensitivity_1_is_caught(
    mutant: Callable[[], tuple[EmbeddingMean, Mechanism]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(means, "STEPS", STEPS)
    check(*product())
    with pytest.raises(AssertionError, match="is claimed"):
        check(*mutant())
