"""Privacy losses of a dominating pair, as atoms: what all accounting here is made of.

A pair (P, Q) of output distributions has the privacy loss L = log(P/Q), drawn under P. It determines

    delta(eps) = E[max(0, 1 - e^(eps - L))] = P(L > eps) - e^eps Q(L > eps).

Here a pair is a finite list of atoms (loss, mass under P), plus `infinity`, P's mass where Q has none. A pair
with a density becomes atoms by connecting the dots (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022): the
mass of a cell goes to the cell's two ends so that both the P-mass and the Q-mass of the cell are kept. Both
ends together are then at least as easy to tell apart as the cell was (merging the two ends gives the cell
back), so delta never shrinks: every discretisation here rounds towards more leakage accounted for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Losses:
    """A dominating pair as atoms.

    Attributes
    ----------
    losses, masses
        Finite losses and their masses under P. Under Q they weigh `masses * exp(-losses)`.
    infinity
        P's mass where Q has none.
    """

    losses: FloatArray
    masses: FloatArray
    infinity: float = 0.0

    def delta(self, epsilon: ArrayLike) -> FloatArray:
        """delta(eps) of these atoms, for every eps (negative ones too)."""
        eps = np.asarray(epsilon, np.float64)
        finite = [float((-np.expm1(np.minimum(e - self.losses, 0.0)) * self.masses).sum()) for e in eps.ravel()]
        return self.infinity + np.asarray(finite, np.float64).reshape(eps.shape)

    def removed(self, rate: float) -> Losses:
        """Amplified by a Poisson sample, direction REMOVE: the pair ((1-q) Q + q P, Q).

        The loss l becomes log(1 - q + q e^l); the mass becomes (1-q) Q + q P. Q's mass where P has none has the loss
        log(1 - q). Zhu, Dong, Wang 2022, theorem 11.
        """
        if rate == 1.0:
            return self
        keep = math.log1p(-rate)
        with np.errstate(over="ignore"):
            losses = np.where(
                self.losses < 1.0,
                np.log1p(rate * np.expm1(np.minimum(self.losses, 1.0))),
                np.logaddexp(keep, math.log(rate) + self.losses),
            )
        under_q = np.exp(np.log(np.maximum(self.masses, 1e-320)) - self.losses)
        missing = max(0.0, 1.0 - float(under_q.sum()))
        masses = np.append((1.0 - rate) * missing, rate * self.masses + (1.0 - rate) * under_q)
        return Losses(np.append(keep, losses), masses, rate * self.infinity)

    def added(self, rate: float) -> Losses:
        """Amplified by a Poisson sample, direction ADD: the pair (P, (1-q) P + q Q), P being without the owner.

        The loss l becomes -log(1 - q + q e^-l) and keeps its mass; infinity becomes -log(1 - q).
        """
        if rate == 1.0:
            return self
        losses = -np.where(
            self.losses > -1.0,
            np.log1p(rate * np.expm1(-np.maximum(self.losses, -1.0))),
            np.logaddexp(math.log1p(-rate), math.log(rate) - self.losses),
        )
        return Losses(np.append(losses, -math.log1p(-rate)), np.append(self.masses, self.infinity), 0.0)

    def spread(self, step: float) -> GridLosses:
        """Onto the multiples of `step`, keeping each atom's mass under P and under Q (so never below the truth)."""
        cells = np.floor(self.losses / step)
        inside = np.clip(self.losses - cells * step + 1e-15 * np.abs(self.losses), 0.0, step)  # rounded up
        right = np.expm1(-inside) / math.expm1(-step)
        index = cells.astype(np.int64)
        places = np.concatenate([index, index + 1])
        masses = np.concatenate([self.masses * (1.0 - right), self.masses * right])
        held = masses > 0.0
        return GridLosses(step, places[held], masses[held], self.infinity)

    def compose(self, other: Losses, points: int = 4096) -> Losses:
        """Both on the same sample, one after the other: losses add up. Exact for few atoms, else on a common grid.

        The grid's masses are convolved directly, so there is no Fourier noise.
        """
        infinity = self.infinity + other.infinity - self.infinity * other.infinity
        if self.losses.size * other.losses.size <= 8 * points:
            losses = np.add.outer(self.losses, other.losses).ravel()
            return Losses(losses, np.multiply.outer(self.masses, other.masses).ravel(), infinity)
        width = float(np.ptp(self.losses) + np.ptp(other.losses))
        step = max(width / points, 1e-9)
        (first_a, a), (first_b, b) = self.spread(step).dense(), other.spread(step).dense()
        masses = np.convolve(a, b)
        losses = np.asarray((first_a + first_b + np.arange(masses.size)) * step, np.float64)
        held = masses > 0.0
        return Losses(losses[held], masses[held], infinity)

    def log_moment(self, order: float) -> float:
        """log E[exp(order * L); L finite]: the Rényi divergence of order 1 + `order` is this over `order`."""
        held = self.masses > 0.0
        exponents = order * self.losses[held] + np.log(self.masses[held])
        top = float(exponents.max())
        return top + math.log(float(np.exp(exponents - top).sum()))


@dataclass(frozen=True, eq=False)
class GridLosses:
    """Atoms on the multiples of one step: `masses[i]` sits at `places[i] * step` (places may repeat)."""

    step: float
    places: NDArray[np.int64]
    masses: FloatArray
    infinity: float

    @property
    def losses(self) -> FloatArray:
        """Where the atoms sit."""
        return np.asarray(self.places * self.step, np.float64)

    def dense(self) -> tuple[int, FloatArray]:
        """The first place, and the masses from there on without gaps."""
        first = int(self.places.min())
        return first, np.asarray(np.bincount(self.places - first, self.masses), np.float64)


def from_tails(edges: FloatArray, above: FloatArray, below: FloatArray, infinity: float = 0.0) -> Losses:
    """Connect the dots for a pair that is its own mirror image (P and Q may swap), on edges symmetric about 0.

    `above[i]` = P(edges[i] < L < infinity) and `below[i]` = P(L <= edges[i]), each accurate where it is
    small. The mirror gives Q: Q(a < L <= b) = P(-b <= L < -a). What lies outside the edges goes to infinity
    above (more leakage accounted for) and to the lowest edge below (its Q-mass becomes `missing`).
    """
    from_above = edges[:-1] > 0.0
    p_cell = np.where(from_above, above[:-1] - above[1:], below[1:] - below[:-1])
    p_cell = np.maximum(p_cell, 0.0)
    q_cell = p_cell[::-1]
    widths = np.diff(edges)
    with np.errstate(over="ignore", invalid="ignore"):
        right = (p_cell - np.exp(edges[:-1]) * q_cell) / -np.expm1(-widths)
    right = np.clip(np.nan_to_num(right, nan=np.inf), 0.0, p_cell)
    masses = np.append(p_cell - right, 0.0)
    masses[1:] += right
    masses[0] += below[0]
    return Losses(edges, masses, infinity + float(above[-1]))
