"""The private steps of a head's fit: features of embeddings, and the sum of the owners' clipped gradients.

**The model.** A question's embedding e gives features x of norm at most 1 (`FeatureMap`), a matrix W of one row for
each label gives scores W x, and these give the labels' probabilities p.

**A step.** A record with features x and label y has the gradient (p - y) x', a matrix. An owner's gradient is the sum
over its records, scaled to Euclidean norm at most 1. Released is the sum over the owners plus discrete Gaussian noise
on every number. Adding or removing one owner moves the sum by at most 1: every owner takes part (the rate is 1), and
an owner's gradient is a function of its own records and of W, which depends on released sums and public numbers alone.

**What arithmetic gives away.** That last claim must hold for the numbers that a processor computes. A matrix product
in floating point does not keep it: the last bits of one row may depend on how many other rows there are, and a rounding
makes a lattice step of them. So every product here is one of whole numbers, in float64, whose sums stay below 2^53:
each is exact, in whatever order a library adds. Features are whole numbers of norm at most 2^16, weights whole numbers
in units of 2^-20 with rows of norm at most 2^36, residuals whole numbers of at most 2^20. The probabilities come from
additions, products and quotients of single numbers, which IEEE 754 rounds in one way. An owner's gradient is scaled and
rounded towards 0: the residuals of a single record, or the sum of several records' gradients. So gradients lie on the
lattice of 2^-36 and their sum is exact too: the sum for two sets of owners together is the sum for the one plus the sum
for the other, to the last bit.

**Where this begins.** It begins at the store's vectors. Neighbouring stores hold the same vector of every record that
they share. `forget` and later additions keep it so. A store that is built anew without an owner keeps it only if its
embedding model gives a text the same bits whatever texts are embedded beside it, as `local_embeddings` does: it
encodes each text alone. Models that encode texts in batches do not: with batches of 64 one more long text changed 9 of
1,000 other vectors by 1e-7, and the sum of these owners' gradients by 1.5e-5, beside the sensitivity of 1. With such a
model embed each text by a call of its own, and give the store these ``vectors``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.checks import real, whole

Floats = NDArray[np.float64]
Whole = NDArray[np.float64]
"""Whole numbers in float64, all below 2^53."""

LATTICE = 1 << 36
"""Lattice points between 0 and 1 in a sum of gradients."""

UNIT = 1 << 20
"""Whole numbers between 0 and 1 before a row is bounded."""

_X, _R, _W = 1 << 16, 1 << 20, 1 << 20  # the units of features, residuals, weights
_E, _P = 1 << 20, 1 << 20  # of embeddings and projections
_LARGEST_WEIGHT = 1 << 9
MOST_FEATURES = 1 << 14
_LONGEST_ROW = 1 << 8  # of a projection
_BLOCK = 1 << 14  # rows at a time: the sum of a block's products stays below 2^53
_SQUARINGS = 10
SAFE = 1.0 - 2.0**-40
"""The norm of an owner's vector before it is rounded towards 0: roundings of at most 2^-50 do not bring it above 1."""


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """From embeddings of norm at most 1 to features of norm at most 1. Public: made of public texts, or of nothing.

    An embedding loses ``mean``, is projected on the rows of ``projection`` (None: stays as it is), is multiplied by
    ``scale`` and gets the constant ``bias`` as one more number. What is longer than 1 is scaled to norm 1.

    Raises `InvalidParameter` beyond the bounds within which all products are exact: at most 16,383 features, a mean of
    norm at most 2, rows of a projection of norm at most 256, a scale of at most 1,024, a bias of at most 1.
    """

    dimension: int
    mean: Floats | None = None
    projection: Floats | None = None
    scale: float = 2.0
    bias: float = 0.5

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "dimension": whole("dimension", self.dimension, at_most=MOST_FEATURES - 1),
            "scale": real("scale", self.scale, at_least=2.0**-20, at_most=2.0**10),
            "bias": real("bias", self.bias, at_least=0.0, at_most=1.0),
        }
        for name, array in self.arrays.items():
            try:
                found = np.array(array, np.float64, ndmin=1)
            except (ValueError, TypeError):
                found = np.zeros(0)
            shape = (self.dimension,) if name == "mean" else (len(found), self.dimension)
            if found.shape != shape or not 0 < len(found) < MOST_FEATURES or not np.isfinite(found).all():
                raise InvalidParameter(name, f"shape {found.shape}", f"finite numbers of the shape {shape}")
            longest = float(np.linalg.norm(found, axis=-1).max())
            bound = 2.0 if name == "mean" else _LONGEST_ROW
            if longest > bound:
                raise InvalidParameter(name, f"norm {longest:g}", f"norms of at most {bound:g}")
            checked[name] = found
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, vectors: Floats, dimensions: int = 64) -> FeatureMap:
        """The principal directions of public texts' embeddings."""
        mean = vectors.mean(axis=0)
        directions = np.linalg.svd(vectors - mean, full_matrices=False)[2][:dimensions]
        return cls(vectors.shape[1], mean, directions)

    unit: ClassVar[int] = _X
    """The value of a feature of 1 in `features`."""

    @property
    def numbers(self) -> dict[str, float]:
        """The fields that are numbers, and `arrays` the others: together they make an equal map."""
        return {"dimension": self.dimension, "scale": self.scale, "bias": self.bias}

    @property
    def arrays(self) -> dict[str, Floats]:
        """The fields that are arrays."""
        found = {"mean": self.mean, "projection": self.projection}
        return {name: array for name, array in found.items() if array is not None}

    @property
    def size(self) -> int:
        """The number of features."""
        return 1 + (self.dimension if self.projection is None else len(self.projection))

    def features(self, vectors: NDArray[np.floating]) -> Whole:
        """Features of norm at most 1 in units of 2^-16, one row for each embedding. A row depends on its own alone.

        An embedding e gives scale P (e - mean), with P the projection, and ``bias`` as the last number.

        An embedding that is longer than 1, or not finite, counts as zero. (A store has none.)
        """
        short = np.asarray(vectors, np.float64)
        short = np.where(((short * short).sum(axis=1) <= 1.5)[:, None], short, 0.0)
        moved = np.trunc(short * _E)
        if self.mean is not None:
            moved -= np.trunc(self.mean * _E)
        if self.projection is None:
            moved *= _P
        else:
            moved = moved @ np.trunc(self.projection * _P).T
        found = np.trunc(moved * (self.scale * UNIT / (_E * _P)))
        found = np.concatenate([found, np.full((len(found), 1), np.trunc(self.bias * UNIT))], axis=1)
        return bounded(found, self._longest)

    @property
    def _longest(self) -> float:
        """At least the norm of any features before they are clipped, in units of 2^-20."""
        stretch = 1.0 if self.projection is None else float(np.linalg.norm(self.projection))
        return (4.0 * stretch * self.scale + self.bias) * UNIT


def bounded(rows: Whole, longest: float) -> Whole:
    """Rows in units of 1 / `UNIT`, none longer than ``longest``, as features: in units of 2^-16, of norm at most 1."""
    # Roundings can bring the square of a row's norm to 2^32 (1 + 2^-50), but the square of the result's is a whole
    # number: at most 2^32.
    return np.trunc(rows * (_X / np.maximum(_norms(rows, longest), UNIT))[:, None])


def _norms(rows: Whole, longest: float) -> Floats:
    """At least the Euclidean norm of each row of whole numbers, none longer than ``longest``.

    The sums of squares are exact, in whatever order: longer rows are measured in larger units, and rounded up.
    """
    unit = 2.0 ** max(0, math.frexp(longest)[1] - 26)
    coarse = np.trunc(rows / unit)
    rounding = 0.0 if unit == 1.0 else math.sqrt(rows.shape[1])
    found: Floats = (np.sqrt((coarse * coarse).sum(axis=1)) + rounding) * unit
    return found


def probabilities(scores: Floats) -> Floats:
    """Probabilities that grow with the scores, much like softmax: each row of the result sums to 1, about.

    e^z is (1 + z / 1024)^1024, by ten squarings. Only operations that IEEE 754 rounds in one way take part, and each
    looks at numbers of one row.
    """
    top = scores[:, 0]
    for column in scores.T[1:]:
        top = np.maximum(top, column)
    powers = np.maximum(1.0 + (scores - top[:, None]) / (1 << _SQUARINGS), 0.0)
    for _ in range(_SQUARINGS):
        powers = powers * powers
    total = powers[:, 0]
    for column in powers.T[1:]:
        total = total + column
    return powers / total[:, None]


@dataclass(frozen=True, eq=False, repr=False)
class OwnedRecords:
    """The records of all owners: features, the labels' positions (ascending owners, each with all its records)."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    owners: NDArray[np.int64]

    @property
    def firsts(self) -> NDArray[np.int64]:
        """The first record of each owner."""
        return np.flatnonzero(np.diff(self.owners, prepend=-1))


def clipped_sum(records: OwnedRecords, weights: Floats) -> NDArray[np.int64]:
    """The sum over owners of their clipped gradients, in units of 1 / `LATTICE`. Private, and exact."""
    total = np.zeros(weights.shape, np.int64)
    whole_weights = np.rint(np.clip(weights, -_LARGEST_WEIGHT, _LARGEST_WEIGHT) * _W)
    starts = records.firsts
    ends = np.append(starts[1:], len(records.owners))
    first = 0
    while first < len(starts):  # blocks of whole owners
        last = max(first + 1, int(np.searchsorted(ends, starts[first] + _BLOCK, "right")))
        rows = slice(starts[first], ends[last - 1])
        total += _block(
            records.features[rows].astype(np.float64),
            records.labels[rows],
            starts[first:last] - starts[first],
            whole_weights,
        )
        first = last
    return total


def _block(features: Whole, labels: NDArray[np.int64], starts: NDArray[np.int64], weights: Whole) -> NDArray[np.int64]:
    """`clipped_sum` of whole owners, whose records begin at ``starts``.

    A record's gradient is r x', with its residuals r = p - y. It has the norm |r| |x|.
    An owner of one record adds trunc(s r) x', where s = min(1, 1 / (|r| |x|)).
    An owner of several adds trunc(s G), where G is the sum of their r x', and s = min(1, 1 / |G|).
    """
    found = probabilities((features @ weights.T) / (_X * _W))
    found[np.arange(len(found)), labels] -= 1.0
    residuals = np.trunc(found * _R)
    if not np.isfinite(residuals).all():
        raise ArithmeticError("weights are finite")
    counts = np.diff(np.append(starts, len(features)))
    alone = counts == 1
    norms = np.sqrt((residuals * residuals).sum(axis=1) * (features * features).sum(axis=1))[starts]
    scales = np.repeat(np.where(alone, _scales(norms), 0.0), counts)
    total = _product(np.trunc(residuals * scales[:, None]), features)
    for first, count in zip(starts[~alone].tolist(), counts[~alone].tolist(), strict=True):
        rows = slice(first, first + count)
        gradient = _product(residuals[rows], features[rows])
        total += np.trunc(gradient * _scales(_norm(gradient, count))).astype(np.int64)
    return total


def _scales(norms: Floats) -> Floats:
    """By what gradients of at most these norms, in lattice steps, are multiplied so that their norm is at most 1."""
    return np.minimum(1.0, SAFE * LATTICE / np.maximum(norms, 1.0))


def _product(residuals: Whole, features: Whole) -> NDArray[np.int64]:
    """The sum of the rows' outer products, exactly."""
    total = np.zeros((residuals.shape[1], features.shape[1]), np.int64)
    for first in range(0, len(residuals), _BLOCK):
        rows = slice(first, first + _BLOCK)
        total += (residuals[rows].T @ features[rows]).astype(np.int64)
    return total


def _norm(gradient: NDArray[np.int64], records: int) -> Floats:
    """At least the Euclidean norm of a sum of so many gradients."""
    return _norms(np.asarray(gradient, np.float64).reshape(1, -1), 2.0 * records * LATTICE)
