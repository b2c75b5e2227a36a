"""Every branch of a program that draws from a generator, with its probability."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Tree:
    """Every branch of a program that asks for finite choices: the first run takes the first branch of each."""

    def __init__(self) -> None:
        self._path: list[int] = []
        self._widths: list[int] = []
        self._at = 0
        self.weight = 1.0

    def choose(self, probabilities: Sequence[float]) -> int:
        """The option that this run takes; the run's weight is multiplied by its probability. None of probability 0."""
        possible = [i for i, probability in enumerate(probabilities) if probability]
        if self._at == len(self._path):
            self._path.append(0)
            self._widths.append(len(possible))
        choice = possible[self._path[self._at]]
        self._at += 1
        self.weight *= probabilities[choice]
        return choice

    def next(self) -> bool:
        """Go on to the next branch; False after the last."""
        while self._path and self._path[-1] + 1 == self._widths[-1]:
            self._path.pop()
            self._widths.pop()
        if not self._path:
            return False
        self._path[-1] += 1
        self.weight, self._at = 1.0, 0
        return True


class Coins:
    """Coins and orders that take every value with its probability. Uniform numbers are taken for their order."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        return np.array([i for i in range(n) if self.tree.choose([1 - probability, probability])], np.int64)

    def uniforms(self, size: int) -> NDArray[Any]:
        orders = _orders(size)
        return orders[self.tree.choose([1 / len(orders)] * len(orders))]


@lru_cache(maxsize=64)
def _orders(size: int) -> list[NDArray[np.float64]]:
    places = np.arange(size)
    return [(places[list(order)] + 0.5) / max(1, size) for order in itertools.permutations(range(size))]
