"""The joint exponential mechanism: the top k of d counts in one draw, from exact integers.

Mechanism. Counts c_j of d public tokens, sorted c_(1) >= c_(2) >= ...; a sequence s of k distinct tokens has the
loss l(s) = max_i (c_(i) - c_{s_i}) and is released with probability proportional to exp(-eps0 l(s) / 4).

Neighbours and sensitivity. One member's output replaced by any other: every count moves by at most 1. The i-th largest
count and the count of s_i may move in opposite directions, so l(s) moves by at most 2 EITHER WAY, log-probabilities
before normalisation by at most eps0 / 2 either way, and their differences between sequences by at most eps0:
eps0-bounded range.

Source: Gillenwater, Joseph, Munoz Medina and Ribero 2022, "A joint exponential mechanism for differentially private
top-k"; its use for keywords, Wu et al. 2024. The law is theirs; the sampler is not: counts are small integers, so
tokens are grouped by count, in time about d + k * (attainable losses), and no float decides anything.

The sampler, and why its law is that one. Let n_i(l) = #{j : c_j >= c_(i) - l}: position i may hold any of the n_i(l)
top tokens if the loss is to stay within l. It does not fall with i or l, and n_i(l) >= i.

1. Filling positions in order, A(l) = prod_i (n_i(l) - (i-1)) sequences have a loss <= l: the i-1 tokens used so far are
   among the n_i(l). So B(l) = A(l) - A(l-1) have a loss of exactly l, and the loss is drawn with weight
   B(l) exp(-eps0 l / 4).
2. Given l, let i be the first position whose own loss is exactly l. Positions r < i have n_r(l-1) - (r-1) choices
   each. Position i has e_i(l) = n_i(l) - n_i(l-1), the tokens of count c_(i) - l; none is used yet, since the positions
   before it hold counts > c_(r) - l >= c_(i) - l. Positions r > i have n_r(l) - (r-1), since all used tokens are among
   the n_i(l) <= n_r(l). The product of these is the weight of i; the weights add up to B(l).
3. Given l and i, each position draws uniformly among its choices, so every sequence is drawn once with equal chances.
   Tokens sit in slots by falling count, and each drawn token trades places with the slot of its rank. Used tokens then
   fill the first slots, and trades stay inside prefixes that later positions contain: position r draws among the slots
   r, ..., n_r, and position i among n_i(l-1) + 1, ..., n_i(l), which no trade has touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.checks import positive, whole
from langchain_dpicl.privacy.noise import Randomness, choose_exponential, choose_weighted, random_below


class Levels(NamedTuple):
    """PRIVATE: what the counts say about losses.

    ``order`` holds the tokens by falling count, ``losses`` every attainable loss, rising from 0, and ``reach[a, i]``
    the number of tokens that position i (from 0) may hold if the loss is to stay within ``losses[a]``.
    """

    order: NDArray[np.int64]
    losses: NDArray[np.int64]
    reach: NDArray[np.int64]


def sample_sequence(counts: NDArray[np.int64], k: int, eps0: float, randomness: Randomness) -> NDArray[np.int64]:
    """Release k distinct indices of ``counts``, ranked: eps0-bounded range when one member's output is replaced.

    ``counts[j]`` says how many members named token j, over a PUBLIC list of tokens, those that nobody named included.
    The probability of a sequence is exactly proportional to exp(-eps0 * loss / 4); the module's docstring proves it.
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or not counts.size or counts.min() < 0:
        raise InvalidParameter("counts", "(not shown)", "a vector of whole numbers >= 0, at least one")
    k = whole("k", k, at_most=counts.size)
    rate = positive("eps0", eps0) / 4.0

    levels = loss_levels(counts, k)
    level = choose_exponential(sequence_counts(levels.reach), levels.losses.tolist(), rate, randomness)
    before, within = neighbouring_reach(levels.reach, level)
    first = choose_weighted(first_position_weights(before, within), randomness)

    lows = [*range(first), before[first], *range(first + 1, k)]
    highs = before[:first] + within[first:]
    moved: dict[int, int] = {}  # the slots that do not hold their own token any more
    drawn = []
    for rank, (low, high) in enumerate(zip(lows, highs, strict=True)):
        slot = low + random_below(high - low, randomness)
        drawn.append(moved.get(slot, slot))
        moved[slot] = moved.get(rank, rank)
    return levels.order[drawn]


def loss_levels(counts: NDArray[np.int64], k: int) -> Levels:
    """PRIVATE: the attainable losses of k positions, and what each position may hold within them."""
    deficits = (counts.max() - counts).astype(np.int64)
    span = int(deficits.max())
    # NumPy sorts up to 16 bits by radix.
    narrow = deficits.astype(np.uint8 if span < 1 << 8 else np.uint16 if span < 1 << 16 else np.int64)
    order = np.argsort(narrow, kind="stable")
    ranked = deficits[order]
    sizes = np.append(np.flatnonzero(np.diff(ranked)) + 1, ranked.size)
    values = ranked[sizes - 1]
    tops = ranked[:k]
    differences = np.subtract.outer(values, np.unique(tops)).ravel()
    losses = np.unique(differences[differences >= 0])
    groups = np.searchsorted(values, np.add.outer(losses, tops), side="right") - 1
    return Levels(order, losses, sizes[groups])


def sequence_counts(reach: NDArray[np.int64]) -> list[int]:
    """B(l) for every attainable loss: the exact number of sequences with exactly this loss."""
    choices = reach - np.arange(reach.shape[1])
    at_once = 62 // int(choices.max()).bit_length()  # factors whose product fits into 62 bits
    blocks = np.multiply.reduceat(choices, np.arange(0, reach.shape[1], at_once), axis=1)
    within = [math.prod(row) for row in blocks.tolist()]
    return [here - before for before, here in zip([0, *within], within, strict=False)]


def neighbouring_reach(reach: NDArray[np.int64], level: int) -> tuple[list[int], list[int]]:
    """n_i(l-1) and n_i(l) of every position, for the loss of this level. Below a loss of 0 there is nothing."""
    before = reach[level - 1].tolist() if level else [0] * reach.shape[1]
    return before, reach[level].tolist()


def first_position_weights(before: Sequence[int], within: Sequence[int]) -> list[int]:
    """For every position i, the number of sequences of loss exactly l in which i is the first with a loss of l.

    At l = 0 that is position 1 always, and the factor n_1(-1) = 0 says so.
    """
    k = len(within)
    left = list(accumulate((before[r] - r for r in range(k - 1)), mul, initial=1))
    right = list(accumulate((within[r] - r for r in range(k - 1, 0, -1)), mul, initial=1))[::-1]
    return [left[i] * (within[i] - before[i]) * right[i] for i in range(k)]
