"""Mistake 22: a head whose clipping, projection, rounding or scale lets an owner move more than its share.

An owner's part in the first steps is known exactly: the records are given, the weights are zero or released. So the
sum's move between two neighbouring stores, the true one and the mutants', is computed, and with it the delta that the
releases really have at the claimed epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from evaluation_fakes import FakeLLM
from numpy.typing import NDArray

from langchain_dpicl.once.fitting import Rate, descend
from langchain_dpicl.once.scores import CalibratedScores, LabelScores
from langchain_dpicl.once.steps import LATTICE, FeatureMap, OwnedRecords, clipped_sum, probabilities
from langchain_dpicl.once.views import JoinedViews, opening, whole
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.profile import Gaussian

EPSILON, DELTA, STEPS, SIZE, LABELS = 1.0, 1e-5, 20, 16, 3

Floats = NDArray[np.float64]
Mutant = Callable[[Floats, NDArray[np.int64], NDArray[np.int64], Floats], Floats]
"""From embeddings, labels, owners and weights to the sum before the noise."""


def product(vectors: Floats, labels: NDArray[np.int64], owners: NDArray[np.int64], weights: Floats) -> Floats:
    features = FeatureMap(SIZE).features(vectors).astype(np.float32)
    return np.asarray(clipped_sum(OwnedRecords(features, labels, owners), weights), np.float64) / LATTICE


def gradients(features: Floats, labels: NDArray[np.int64], weights: Floats) -> Floats:
    gaps = probabilities(features @ weights.T) - np.eye(LABELS)[labels]
    return np.einsum("nk,nd->nkd", gaps, features)


def clipped_per_record(
    vectors: Floats, labels: NDArray[np.int64], owners: NDArray[np.int64], weights: Floats
) -> Floats:
    """Each record's gradient is clipped, not each owner's sum: an owner of 30 records counts 30 times."""
    found = gradients(FeatureMap(SIZE).features(vectors) / FeatureMap.unit, labels, weights)
    norms = np.linalg.norm(found, axis=(1, 2))
    total: Floats = (found / np.maximum(norms, 1.0)[:, None, None]).sum(axis=0)
    return total


def private_projection(
    vectors: Floats, labels: NDArray[np.int64], owners: NDArray[np.int64], weights: Floats
) -> Floats:
    """Mean and directions are the private records': one owner more turns everybody's features."""
    features = FeatureMap.of(vectors, SIZE - 1).features(vectors).astype(np.float32)
    widened = np.concatenate([features, np.zeros((len(features), 1), np.float32)], axis=1)
    return np.asarray(clipped_sum(OwnedRecords(widened, labels, owners), weights), np.float64) / LATTICE


def private_calibration(
    vectors: Floats, labels: NDArray[np.int64], owners: NDArray[np.int64], weights: Floats
) -> Floats:
    """Label scores lose their mean over the private records, and are measured in their spread: not over public texts.

    Two of the numbers stand for a model's scores of each record.
    """
    rows = vectors[:, [5, 6]]
    spread = float(np.sqrt(((rows - rows.mean(axis=0)) ** 2).sum(axis=1).mean()))
    calibrated = CalibratedScores(
        LabelScores(FakeLLM(), ["bad", "good"], share=0.99), rows.mean(axis=0).tolist(), spread
    )
    embedded = FeatureMap(SIZE - 2).features(vectors[:, : SIZE - 2])
    features = calibrated.joined(embedded, rows.tolist()).astype(np.float32)
    return np.asarray(clipped_sum(OwnedRecords(features, labels, owners), weights), np.float64) / LATTICE


def private_part_of_a_failed_view(
    vectors: Floats, labels: NDArray[np.int64], owners: NDArray[np.int64], weights: Floats
) -> Floats:
    """A view that fails on a record gets the mean of the private records' vectors, not that of public texts.

    It sees the last numbers of the vectors, and fails on every record but those of the owner of thirty.
    """
    views = JoinedViews((whole, opening(2)), (4, SIZE - 4))
    view = vectors[:, 4:].astype(np.float32)
    rows = [[row.tobytes()] if owner == 200 else ValueError for row, owner in zip(view, owners, strict=True)]
    mean = np.concatenate([np.zeros(4), view.mean(axis=0)])
    joined = views.joined([vectors[:, :4].astype(np.float32), rows], mean)
    return product(joined, labels, owners, weights)


def private_norm_bound(
    vectors: Floats, labels: NDArray[np.int64], owners: NDArray[np.int64], weights: Floats
) -> Floats:
    """Features are scaled by the longest that the records have: who has it decides on all the others."""
    raw = np.concatenate([vectors, np.full((len(vectors), 1), 0.5)], axis=1)
    return clipped_and_summed(raw / np.linalg.norm(raw, axis=1).max(), labels, weights)


def clipped_and_summed(features: Floats, labels: NDArray[np.int64], weights: Floats) -> Floats:
    found = gradients(features, labels, weights)
    total: Floats = (found / np.maximum(np.linalg.norm(found, axis=(1, 2)), 1.0)[:, None, None]).sum(axis=0)
    return total


def neighbours() -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Two hundred owners of one record each, and owner 200 with thirty, of a direction and a length of their own."""
    draw = np.random.default_rng(0)
    others = draw.normal(size=(200, SIZE)) * 0.05 + np.eye(SIZE)[0] * 0.3
    vectors = np.concatenate([others, np.repeat(np.eye(SIZE)[5:6], 30, axis=0)])
    labels = np.concatenate([draw.integers(0, LABELS, 200), np.zeros(30, np.int64)])
    return vectors, labels, np.concatenate([np.arange(200), np.full(30, 200)])


def true_delta(mutant: Mutant) -> float:
    """The delta that STEPS releases have at the claimed epsilon, if each moves as the first one does."""
    request = LineRequest("head", 1.0, 1, options={"steps": STEPS})
    plan = PrivacyPlan.solve(epsilon=EPSILON, delta=DELTA, lines={"head": request})
    vectors, labels, owners = neighbours()
    weights, kept = np.zeros((LABELS, SIZE + 1)), owners < 200
    with_owner = mutant(vectors, labels, owners, weights)
    without = mutant(vectors[kept], labels[kept], owners[kept], weights)
    move = float(np.linalg.norm(with_owner - without))
    return Gaussian(plan.lines["head"].parameter / (move * math.sqrt(STEPS))).delta(EPSILON)


@pytest.mark.parametrize(
    "mutant",
    [
        clipped_per_record,
        private_projection,
        private_calibration,
        private_part_of_a_failed_view,
        private_norm_bound,
    ],
)
def test_22_a_head_that_an_owner_moves_too_far_is_caught(mutant: Mutant) -> None:
    """The product's move keeps delta; each mutant's is a hundred times above it, or more."""
    assert true_delta(product) <= DELTA
    assert true_delta(mutant) > 100 * DELTA


def test_22_a_scale_that_follows_the_store_is_caught() -> None:
    """Weights of sums on a lattice, divided by the live number of owners, show that number: delta is 1.

    With the declared number the weights are the same function of the sums in both stores.
    """
    rate = Rate.of(200, 0.1, STEPS, LABELS).step
    sums = [np.random.default_rng(1).integers(-(2**40), 2**40, (LABELS, SIZE + 1))]

    def fits(weights: Floats, owners: int) -> bool:
        """Whether the weights are those of sums of whole numbers, divided by so many owners."""
        whole = weights * owners * LATTICE / rate
        return bool(np.abs(whole - np.rint(whole)).max() < 1e-3)

    for live in (201, 200):
        weights, _ = descend(sums, live, 0.1, STEPS, (LABELS, SIZE + 1))
        assert [fits(weights, owners) for owners in (200, 201)] == [live == 200, live == 201]
    declared = [descend(sums, 200, 0.1, STEPS, (LABELS, SIZE + 1))[0] for _ in (201, 200)]
    assert (declared[0] == declared[1]).all()


def test_22_products_in_floating_point_are_caught() -> None:
    """A product of matrices in floating point, rounded to the lattice: a row differs when it stands alone."""
    draw = np.random.default_rng(2)
    vectors = draw.normal(size=(300, SIZE))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    directions = draw.normal(size=(SIZE, SIZE))
    product = FeatureMap(SIZE, projection=directions).features
    rounded = np.trunc(vectors @ directions.T * 2.0**52)
    assert any(
        (np.trunc(row[None] @ directions.T * 2.0**52) != whole).any()
        for row, whole in zip(vectors, rounded, strict=False)
    )
    assert all((product(row[None]) == whole).all() for row, whole in zip(vectors, product(vectors), strict=False))
