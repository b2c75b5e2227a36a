"""Randomness of the private side: the operating system's generator and exact samplers, no seed anywhere.

How exact each draw is belongs to the guarantee:

- A coin of `coin_positions` shows heads with its probability within a relative 1e-10, conditionally on all the coins
  before it. A plan accounts for a rate of q * (1 + 1e-9), so it covers this.
- `integers` is exactly uniform (rejection, no modulo).
- `uniforms` and the exponentials below have relative precision 2^-52 down to 2^-1074: their exponent comes from random
  bits, not from a grid of 2^-53.
- `discrete_gaussian` is exact: OpenDP's sampler (Canonne, Kamath, Steinke 2020) works in rational arithmetic, and takes
  a float sigma as the rational number that it is.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import UnsafeConfigurationError
from langchain_dpicl.privacy.checks import positive, real, whole

_BLOCK = 1 << 14
"""Longest gap that one exponential may measure. A gap of k owners costs k * 2^-50 of relative precision in the last
coin's probability; starting afresh every 2^14 owners (the exponential has no memory) keeps that below 2e-11."""

_LN2 = float(np.log(2.0))


class Randomness(Protocol):
    """The draws of selection and aggregators. A test may hand in another implementation; production uses one."""

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        """Sorted positions of the heads among n independent coins; the cost grows with the heads, not with n."""

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        """`size` independent numbers, exactly uniform on 0, ..., high - 1."""

    def uniforms(self, size: int) -> NDArray[np.float64]:
        """`size` independent numbers in (0, 1) with full floating precision near 0."""

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        """`size` independent integers x with probability proportional to exp(-x^2 / (2 sigma^2))."""


class SecureRandomness:
    """Draws from `os.urandom`, and for Gaussians from OpenDP (OpenSSL's generator, seeded by the operating system).

    It has no state and no seed: threads and forked processes may share one.
    """

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        """Skip from head to head: the gap before the next head is floor(E / -log(1 - p)) for an exponential E.

        P(gap >= k) = P(E >= -k log(1 - p)) = (1 - p)^k, so gaps are geometric and the coins independent.
        Expected cost: O(n * probability + n / 16384).
        """
        n = whole("n", n, at_least=0)
        probability = real("probability", probability, at_least=0.0, at_most=1.0)
        if n == 0 or probability == 0.0:
            return np.empty(0, np.int64)
        if probability == 1.0:
            return np.arange(n, dtype=np.int64)
        hazard = -np.log1p(-probability)
        found: list[NDArray[np.int64]] = []
        start = 0
        while start < n:
            left = (n - start) * (probability + 1.0 / _BLOCK)
            batch = min(1 << 16, int(left + 4.0 * left**0.5) + 8)
            with np.errstate(over="ignore"):
                gaps = np.minimum(self._exponentials(batch) / hazard, float(_BLOCK)).astype(np.int64)
            is_head = gaps < _BLOCK
            ends = start + np.cumsum(gaps + is_head)  # a head is a step of gap + 1, a block without one a step of it
            heads = ends[is_head] - 1
            found.append(heads[heads < n])
            start = int(ends[-1])
        return np.concatenate(found)

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        """Random bits of just enough length; those at or above `high` are thrown away, so nothing is biased."""
        high = whole("high", high, at_most=1 << 63)
        size = whole("size", size, at_least=0)
        bits = (high - 1).bit_length()
        if bits == 0:
            return np.zeros(size, np.int64)
        kept = np.empty(0, np.uint64)
        while kept.size < size:
            need = size - kept.size
            drawn = _words(2 * need + 8) >> np.uint64(64 - bits)
            kept = np.concatenate([kept, drawn[drawn < np.uint64(high)]])
        return kept[:size].astype(np.int64)

    def uniforms(self, size: int) -> NDArray[np.float64]:
        """52 random bits behind a leading one, times 2^-(1 + a geometric exponent)."""
        size = whole("size", size, at_least=0)
        mantissas = (_words(size) >> np.uint64(12)) | np.uint64(1 << 52)
        exponents = np.minimum(_geometric_halves(size), 1021)  # 2^-1022 of bias, to stay above the denormals
        return np.asarray(np.ldexp(mantissas.astype(np.float64), -53 - exponents), np.float64)

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        """One vector release of OpenDP's integer Gaussian mechanism on a vector of zeros."""
        sigma = positive("sigma", sigma)
        size = whole("size", size, at_least=0)
        if size == 0:
            return np.empty(0, np.int64)
        return np.asarray(_gaussian_measurement(sigma)([0] * size), dtype=np.int64)

    def _exponentials(self, size: int) -> NDArray[np.float64]:
        """Exponential numbers with relative precision 2^-51 at every size, the tiny ones included.

        E = K ln 2 + E' with K geometric (so P(E >= k ln 2) = 2^-k) and E' in [0, ln 2) from the truncated
        law, P(E' <= x) = 2 (1 - e^-x), that is E' = -log(1 - V/2): no grid near 0 and none in the tail.
        """
        return np.asarray(_geometric_halves(size) * _LN2 - np.log1p(-0.5 * self.uniforms(size)), np.float64)


def _words(size: int) -> NDArray[np.uint64]:
    """64 random bits each, from the operating system."""
    return np.frombuffer(os.urandom(8 * size), dtype=np.uint64)


def _geometric_halves(size: int) -> NDArray[np.int64]:
    """Failures before the first success of fair coins: trailing zeros of random words (more words if all are zero)."""
    zeros = np.zeros(size, np.int64)
    waiting = np.arange(size)
    while waiting.size:
        words = _words(waiting.size)
        lowest = words & (~words + np.uint64(1))  # the lowest set bit: a power of two, exact as a float
        zeros[waiting] += np.where(words == 0, 64, np.frexp(lowest.astype(np.float64))[1] - 1)
        waiting = waiting[words == 0]
    return zeros


@lru_cache(maxsize=256)
def _gaussian_measurement(sigma: float) -> Any:
    """OpenDP's Gaussian mechanism on vectors of integers, built once per sigma."""
    from importlib.metadata import version

    found = version("opendp")
    if tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) < (0, 14, 2):
        raise UnsafeConfigurationError(f"OpenDP {found} draws biased Gaussian noise: install 0.14.2 or later")
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T="f64")
    return space >> dp.m.then_gaussian(sigma)
