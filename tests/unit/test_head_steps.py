"""The arithmetic of a head's steps at its bounds: every product exact, no owner above 1, in whole numbers of Python.

Each test fails if one rounding, margin or bound of `langchain_dpicl.once.steps` is left out.
"""

from __future__ import annotations

import math
from copy import deepcopy
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from langchain_dpicl.once import steps
from langchain_dpicl.once.steps import LATTICE, FeatureMap, OwnedRecords, clipped_sum, probabilities

X, UNIT = FeatureMap.unit, 1 << 20
"""What 1 is in features, and in weights, residuals, embeddings and projections."""


def one_owner(features: list[list[int]], labels: list[int]) -> OwnedRecords:
    """The records of one owner: features in units of 2^-16."""
    return OwnedRecords(np.array(features, np.float32), np.array(labels), np.zeros(len(labels), np.int64))


def square(part: NDArray[np.int64]) -> int:
    """The square of a sum's norm, in lattice steps, with no rounding."""
    return sum(int(number) ** 2 for number in part.ravel())


def residuals_of(record: list[int], label: int, weights: list[list[int]]) -> list[int]:
    """The residuals of a record in units of 2^-20, from scores that Python computes. Weights in units of 2^-20."""
    scores = [sum(w * x for w, x in zip(row, record, strict=True)) for row in weights]
    found = probabilities(np.array([scores]) / (X * UNIT))[0]
    return [int((p - (place == label)) * UNIT) for place, p in enumerate(found)]


# -- the norm of a gradient --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "others"),
    [
        ([1197073, -7775492, 7792705], [35538, 234, 24, 15]),
        ([-4334925, -2191258, -154707], [46507, 357, 14, 7]),
        ([1048778, 4424920, -3709045], [45364, 255, 25, 14]),
    ],
)
def test_a_record_that_is_too_long_by_less_than_a_rounding_is_clipped(weights: list[int], others: list[int]) -> None:
    """The norm is above 1 by less than 2^-53, and float64 says that it is 1."""
    record, rows = [1 << 15, *others], [[w, 0, 0, 0, 0] for w in weights]
    residuals = residuals_of(record, 0, rows)
    exact = sum(r * r for r in residuals) * sum(x * x for x in record)
    assert LATTICE**2 < exact < LATTICE**2 + (1 << 19)
    assert math.sqrt(float(exact)) == LATTICE
    part = clipped_sum(one_owner([record], [0]), np.array(rows) / UNIT)
    assert 0.99 * LATTICE**2 < square(part) <= LATTICE**2


@pytest.mark.parametrize(("agreeing", "longer"), [(3_000, 1.002), (50_000, 1.03)])
@pytest.mark.parametrize("labels", [2, 5])
def test_records_whose_roundings_add_up_do_not_move_a_sum_by_more_than_1(
    agreeing: int, longer: float, labels: int
) -> None:
    """One record is mislabelled, and many contradict it by a few steps of their residuals each.

    If each record's residuals were scaled and rounded, most of these would vanish, and the one would be left alone.
    """
    score = round(13.37 * UNIT)
    weights = [[score], *[[0]] * (labels - 1)]
    right, wrong = (residuals_of([X], label, weights) for label in (0, 1))
    assert right[1:] == [1] * (labels - 1)
    scale = UNIT / math.hypot(*(one + agreeing * each for one, each in zip(wrong, right, strict=True)))
    apart = [int(one * scale) + agreeing * int(each * scale) for one, each in zip(wrong, right, strict=True)]
    assert scale < 1.0
    assert math.hypot(*apart) > longer * UNIT
    part = clipped_sum(one_owner([[X]] * (agreeing + 1), [1] + [0] * agreeing), np.array(weights) / UNIT)
    assert 0.99 * LATTICE**2 < square(part) <= LATTICE**2


@pytest.mark.parametrize("records", [2, 3, 40])
def test_a_sum_of_gradients_is_measured_upwards(records: int) -> None:
    """Its last digits are beyond what is squared. Whatever they are, the norm is at most 1, and nearly that."""
    for first in range(X - 64, X - 1):
        record = [first, 37]
        part = clipped_sum(one_owner([record] * records, [0] * records), np.array([[0.7, 0.0], [1.9, 0.0]]))
        assert 0.999 * LATTICE**2 < square(part) <= LATTICE**2
        residuals = residuals_of(record, 0, [[round(0.7 * UNIT), 0], [round(1.9 * UNIT), 0]])
        whole = np.array([[records * r * x for x in record] for r in residuals])
        norm = Fraction(*steps._norm(whole, records).tolist())
        for ours, exact in zip(part.ravel().tolist(), whole.ravel().tolist(), strict=True):
            assert abs(ours) * norm <= abs(exact) * LATTICE, "rounded towards 0"


@pytest.mark.parametrize("longest", [2.0**24, 2.0**30, 2.0**40, 2.0**52])
def test_norms_are_never_too_small(longest: float) -> None:
    """But for a rounding of the root, which the margin of a gradient covers."""
    rows = np.random.default_rng(0).integers(-(2**18), 2**18, (50, 9)) * 2.0 ** (math.log2(longest) - 22)
    rows = np.concatenate([np.trunc(rows), np.trunc(rows) + np.sign(rows) * (2.0 ** (math.log2(longest) - 22) - 1)])
    for row, found in zip(rows, steps._norms(rows, longest).tolist(), strict=True):
        exact = sum(int(number) ** 2 for number in row)
        assert exact < longest**2
        assert Fraction(found) ** 2 * (1 + Fraction(1, 2**50)) >= exact
        assert found <= math.sqrt(exact) + 2 * 3 * longest / 2**25
    (single,) = steps._norms(np.array([[longest / 3]]), longest).tolist()
    assert single % (longest / 2**26) == 0.0, "what is squared is in so large units that sums stay below 2^53"


# -- what is exact -----------------------------------------------------------------------------------------------------


def test_the_largest_numbers_stay_below_2_to_the_53() -> None:
    """So every sum of products is exact, whatever its order, by the Cauchy-Schwarz inequality."""
    exact = 2.0**53
    assert steps._LARGEST_WEIGHT * steps._W * math.sqrt(steps.MOST_FEATURES) * steps._X <= exact  # scores
    assert (math.sqrt(1.5) + 2.0) * steps._E * steps._LONGEST_ROW * steps._P <= exact  # a projected embedding
    assert exact >= steps._BLOCK * steps._R * steps._X  # a block's gradients
    assert steps._X * steps._R == LATTICE


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What the functions of `steps` are called with."""
    seen: dict[str, list[Any]] = {"probabilities": [], "_norms": [], "_product": []}

    def spied(name: str, real: Any, *given: Any) -> Any:
        seen[name].append(deepcopy(given))
        return real(*given)

    for name in seen:
        monkeypatch.setattr(steps, name, partial(spied, name, getattr(steps, name)))
    return seen


@pytest.mark.parametrize("spread", [1e-3, 1.0, 300.0, 1e7, 1e300])
def test_every_score_is_exact(spread: float, calls: dict[str, list[Any]]) -> None:
    """Of the widest features and the largest weights: the product of whole numbers, to its last digit."""
    draw = np.random.default_rng(3)
    weights = draw.normal(size=(3, (1 << 14) - 1)) * spread
    weights[2] = np.abs(weights[2])
    record = draw.integers(509, 512, weights.shape[1]).tolist()
    assert sum(x * x for x in record) <= X**2
    clipped_sum(one_owner([record], [0]), weights)
    wholes = [[round(min(max(w, -512.0), 512.0) * UNIT) for w in row] for row in weights.tolist()]
    exact = [sum(w * x for w, x in zip(row, record, strict=True)) for row in wholes]
    assert [Fraction(found) * X * UNIT for found in calls["probabilities"][0][0][0].tolist()] == exact


def test_what_is_multiplied_and_squared_is_whole_and_no_longer_than_is_said(calls: dict[str, list[Any]]) -> None:
    """Embeddings and means of the greatest norms, opposite to each other; and an owner whose records agree."""
    for features in (
        FeatureMap(1, np.array([-2.0]), np.array([[256.0]]), scale=1023.3, bias=0.3),
        FeatureMap(1, np.array([-2.0]), scale=1.7, bias=0.3),
    ):
        found = features.features(np.array([[1.2247], [0.1234567]]))
        records = OwnedRecords(found.astype(np.float32), np.array([1, 1]), np.zeros(2, np.int64))
        clipped_sum(records, np.array([[300.0, 1.0], [0.1, 0.0]]))
    for rows, longest in calls["_norms"]:
        assert (rows == np.trunc(rows)).all()
        assert 0.4 * longest < math.sqrt(max(sum(int(x) ** 2 for x in row) for row in rows)) <= longest
    for residuals, factors in calls["_product"]:
        assert (residuals == np.trunc(residuals)).all()
        assert (factors == np.trunc(factors)).all()
        assert np.abs(residuals).max() <= UNIT


def test_a_gradient_is_a_product_of_whole_numbers() -> None:
    """Short ones as they are. Of longer ones the residuals are scaled and rounded: columns are in proportion."""
    weights = [[5 * 1000003, 0, 0], [0, 299 * 1001, 0], [1, 2, 3 << 19]]
    records = [([20011, 30011, 41], 0), ([20011, 30011, 41], 1), ([41, 30011, 20011], 2), ([65521, 7, 0], 1)]
    for features, label in records:
        part = clipped_sum(one_owner([features], [label]), np.array(weights) / UNIT)
        residuals = residuals_of(features, label, weights)
        long = sum(r * r for r in residuals) * sum(x * x for x in features) > LATTICE**2
        assert long == (features[0] == 65521)
        rows = [int(column) // features[0] for column in part[:, 0]]
        assert part.tolist() == [[row * x for x in features] for row in rows]
        assert rows == residuals or long
        assert all(abs(row) <= abs(residual) for row, residual in zip(rows, residuals, strict=True))


def test_features_are_those_of_whole_numbers() -> None:
    """Embeddings, mean and projection are rounded to steps of 2^-20 before they are multiplied, and features after it.

    The embeddings are short and the scale is large, so that every step is seen.
    """
    draw = np.random.default_rng(4)
    mean, projection = draw.normal(size=3) * 1e-4, draw.normal(size=(2, 3)) * 0.1
    vectors = mean + draw.normal(size=(200, 3)) * 1e-4
    found = FeatureMap(3, mean, projection, scale=1024.0, bias=0.3).features(vectors)
    plain = FeatureMap(3, mean, scale=1024.0, bias=0.3).features(vectors)

    def whole(numbers: Any) -> list[int]:
        return [int(number * UNIT) for number in numbers]

    def clipped(raw: list[Fraction]) -> list[int]:
        """Raw features in units of 2^-20 to those of 2^-16."""
        row = [int(x) for x in raw] + [int(0.3 * UNIT)]
        norm = max(math.sqrt(sum(x * x for x in row)), UNIT)
        return [int(x * X / norm) for x in row]

    for vector, row, unprojected in zip(vectors, found.tolist(), plain.tolist(), strict=True):
        moved = [e - m for e, m in zip(whole(vector), whole(mean), strict=True)]
        projected = [sum(e * p for e, p in zip(moved, whole(line), strict=True)) for line in projection]
        for ours, exact in (
            (row, clipped([Fraction(1024 * x, UNIT) for x in projected])),
            (unprojected, clipped([Fraction(1024 * x) for x in moved])),
        ):
            assert all(x == int(x) for x in ours)
            assert ours == exact


def test_features_that_are_measured_coarsely_have_norm_at_most_1() -> None:
    """A long projection and a large scale: norms are taken in units of 2^14, and an embedding may have fewer."""
    features = FeatureMap(1, projection=np.array([[256.0]]), scale=1023.0, bias=0.0)
    found = features.features(np.arange(1, 4000)[:, None] / UNIT)[:, 0]
    assert found.max() <= X
    assert found.max() > 0.999 * X
