"""Random draws by the block, for many releases."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.privacy import Randomness, SecureRandomness

_BLOCK = 4096


class BlockRandomness:
    """The secure generator, read in blocks: each of its independent draws is handed out once, in order.

    A block of a thousand costs a tenth of a thousand calls, and the law of the draws is the same.
    """

    def __init__(self, source: Randomness | None = None) -> None:
        self._source: Randomness = SecureRandomness() if source is None else source
        self._left: dict[Hashable, NDArray[Any]] = {}

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        """Straight from the source."""
        return self._source.coin_positions(n, probability)

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        """As the source's."""
        return self._take(("integers", high), size, partial(self._source.integers, high))

    def uniforms(self, size: int) -> NDArray[np.float64]:
        """As the source's."""
        return self._take("uniforms", size, self._source.uniforms)

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        """As the source's."""
        return self._take(("gaussian", sigma), size, partial(self._source.discrete_gaussian, sigma))

    def _take(self, kind: Hashable, size: int, draw: Callable[[int], NDArray[Any]]) -> NDArray[Any]:
        left = self._left.get(kind)
        if left is None or len(left) < size:
            left = draw(max(_BLOCK, size))
        self._left[kind] = left[size:]
        return left[:size]
