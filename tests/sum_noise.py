"""Noise of private sums in tests: from a seed, of any scale, and with an end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.privacy.noise import SecureRandomness


class Noise(SecureRandomness):
    """Noise from a seed; ``asked`` keeps each sigma and size. Stops before draw ``stop``."""

    def __init__(self, seed: int = 0, stop: int | None = None, scale: float = 1.0) -> None:
        self.generator = np.random.default_rng(seed)
        self.asked: list[tuple[float, int]] = []
        self.stop = stop
        self.scale = scale

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        if len(self.asked) == self.stop:
            raise KeyboardInterrupt
        self.asked.append((sigma, size))
        return np.rint(self.scale * self.generator.normal(0.0, sigma, size)).astype(np.int64)
