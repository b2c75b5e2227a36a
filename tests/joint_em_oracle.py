"""Two other roads to the joint exponential mechanism, for tests and benches.

`enumerate_distribution` writes down every sequence, and is right by inspection. `Algorithm5` is the sampler of the
papers (Gillenwater et al. 2022, section 3; Wu et al. 2024, algorithm 5) in floating point: a k x d matrix of utilities
made distinct by a tie breaker, all k d of them sorted, the logarithm of the number of sequences for each by a running
product over the rows, one chosen by a race of exponential clocks, and a sequence of that utility drawn row by row.
Both divide eps0 by 4: the utility moves by 2 either way when one member's output is replaced. Of a single word the
differences of utilities move by 2 in all, and `enumerate_distribution` divides eps0 by 2.
"""

from __future__ import annotations

import itertools
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

DIGITS = Context(60)


def sequence_loss(counts: list[int], sequence: tuple[int, ...]) -> int:
    """max_i (c_(i) - c_{s_i})."""
    ranked = sorted(counts, reverse=True)
    return max(top - counts[token] for top, token in zip(ranked, sequence, strict=False))


def enumerate_distribution(counts: list[int], k: int, eps0: float) -> dict[tuple[int, ...], Decimal]:
    """The probability of every sequence to 50 digits."""
    rate = Fraction(eps0) / (2 if k == 1 else 4)
    negative = DIGITS.divide(Decimal(-rate.numerator), Decimal(rate.denominator))
    weights = {
        sequence: DIGITS.exp(DIGITS.multiply(negative, sequence_loss(counts, sequence)))
        for sequence in itertools.permutations(range(len(counts)), k)
    }
    total = Decimal(0)
    for weight in weights.values():
        total = DIGITS.add(total, weight)
    return {sequence: DIGITS.divide(weight, total) for sequence, weight in weights.items()}


class Algorithm5:
    """The papers' sampler.

    ``looped=True`` keeps the running product as the published code has it, a Python loop over all k d utilities;
    otherwise cumulative sums do the same in NumPy.
    """

    def __init__(self, counts: NDArray[np.int64], k: int, eps0: float, *, looped: bool = False) -> None:
        self.d, self.k, self.eps0 = counts.size, k, eps0
        self.order = np.argsort(counts)[::-1]
        ranked = counts[self.order]
        rows, columns = np.arange(1, k + 1), np.arange(1, self.d + 1)
        breaker = np.add.outer(self.d * (k - rows), columns) / (2 * self.d * k)
        self.losses = np.subtract.outer(ranked[:k], ranked) + breaker
        places = np.argsort(self.losses, axis=None)
        self.rows, self.columns = np.divmod(places, self.d)
        self.sorted_losses = self.losses.ravel()[places]
        self.log_counts = self._running_product_loop() if looped else self._running_product()

    def _running_product(self) -> NDArray[np.float64]:
        """log of prod over the other rows of (entries of that row so far - rows above it), where every row has some."""
        room = self.columns + 1 - self.rows
        enters = room >= 1
        sizes = np.where(enters, np.log(np.maximum(room, 1)), 0.0)
        earlier = np.where(enters, np.log(np.maximum(room - 1, 1)), 0.0)
        others = np.cumsum(sizes - earlier) - sizes
        started = np.cumsum(room == 1)
        others[~enters | (started < self.k)] = -np.inf
        return others

    def _running_product_loop(self) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            updates = np.log(self.columns + 1 - self.rows)
        counts = np.full(updates.size, -np.inf)
        sizes = np.zeros(self.k)
        started: set[int] = set()
        total = 0.0
        for place, (row, update) in enumerate(zip(self.rows, updates, strict=True)):
            if not np.isfinite(update):
                continue
            started.add(row)
            total -= sizes[row]
            if len(started) == self.k:
                counts[place] = total
            sizes[row] = update
            total += update
        return counts

    def loss_law(self) -> dict[int, float]:
        """P(loss = l), the tie breaker removed."""
        whole = np.floor(self.sorted_losses)
        logs = self.log_counts - self.eps0 * whole / 4
        weights = np.exp(logs - logs.max())
        return {
            int(loss): float(weights[whole == loss].sum() / weights.sum()) for loss in np.unique(whole[weights > 0])
        }

    def sample(self, generator: np.random.Generator) -> NDArray[np.int64]:
        clocks = np.log(-np.log(generator.random(self.sorted_losses.size)))
        chosen = int(np.argmin(clocks - (self.log_counts - self.eps0 * np.floor(self.sorted_losses) / 4)))
        loss, row, column = self.sorted_losses[chosen], int(self.rows[chosen]), int(self.columns[chosen])
        free = np.ones(self.d, bool)
        free[column] = False
        sequence = np.full(self.k, column)
        for i in range(self.k):
            if i != row:
                allowed = int(np.searchsorted(self.losses[i], loss, side="right"))
                sequence[i] = generator.choice(np.flatnonzero(free[:allowed]))
                free[sequence[i]] = False
        return np.asarray(self.order[sequence], np.int64)


def algorithm5(
    counts: NDArray[np.int64], k: int, eps0: float, generator: np.random.Generator, *, looped: bool = False
) -> NDArray[np.int64]:
    """One release, from counts to sequence."""
    return Algorithm5(counts, k, eps0, looped=looped).sample(generator)
