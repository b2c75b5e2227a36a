"""The accuracy of a vote without a model: each owner near to a query votes with its own record's label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.aggregators import LabelVote
from langchain_dpicl.lab.evaluation.passes import EvaluationPlan
from langchain_dpicl.lab.evaluation.scores import Score, Value
from langchain_dpicl.privacy.choice import Crowd, best_vote, usual_most
from langchain_dpicl.privacy.mechanisms import MECHANISMS
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.store.records import Vectors

SHARE = 0.1
"""What share of the owners a query finds eligible."""


def label_votes(
    labels: Sequence[str],
    private: tuple[Vectors, Sequence[str]],
    queries: tuple[Vectors, Sequence[str]],
    public: Vectors,
    plan: EvaluationPlan,
    draws: int,
) -> list[Score]:
    """The vote of all eligible owners without noise, and the product's own vote at each epsilon, with fresh noise.

    An owner is eligible if its record is nearer to the query than all but `SHARE` of the ``public`` texts. The rate is
    1, and the plan's releases are tickets: an owner takes part in so many answers at most. ``private`` and ``queries``
    are embeddings and labels; each record is its own owner.
    """
    place = {label: i for i, label in enumerate(labels)}
    held, asked, known = (_unit(vectors) for vectors in (private[0], queries[0], public))
    owned = np.array([place[label] for label in private[1]])
    right = np.array([place[label] for label in queries[1]])
    gates = np.quantile(asked @ known.T, 1.0 - SHARE, axis=1)
    near = held @ asked.T >= gates
    counts = np.array([np.bincount(owned[taking], minlength=len(labels) + 1) for taking in near.T])
    eligible = max(1, math.ceil(SHARE * plan.owners))
    crowd = Crowd(usual_most(eligible), eligible, True)
    randomness = SecureRandomness()
    facts = {
        "eligible": float(eligible),
        "rate": 1.0,
        "tickets": float(plan.releases),
        "delta": plan.delta,
    }
    best = counts[:, :-1] == counts[:, :-1].max(axis=1, keepdims=True)
    plain = best[np.arange(len(right)), right] / best.sum(axis=1)  # a release draws among equals
    found = [_score(None, plain[None], {"eligible": float(eligible)})]
    for epsilon in plan.epsilons:
        mechanism = best_vote(epsilon, plan.delta, plan.releases, 1.0, crowd, len(labels))
        parameter = plan.parameter(epsilon, mechanism, {"own_calls": 1.0}, rate=1.0)
        vote = LabelVote(labels).under(mechanism, crowd)
        said = [
            [
                place.get(
                    vote.draw(
                        row,
                        crowd,
                        parameter,
                        randomness,
                    ),
                    -1,
                )
                for row in counts
            ]
            for _ in range(draws)
        ]
        flipped = 100 * float((np.array(said) != counts[:, :-1].argmax(axis=1)).mean())
        found.append(
            _score(
                epsilon,
                np.array(said) == right,
                {**facts, MECHANISMS[mechanism].parameter: parameter, "flipped": flipped},
            )
        )
    return found


def _unit(vectors: Vectors) -> NDArray[np.float64]:
    found: NDArray[np.float64] = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return found


def _score(epsilon: float | None, right: NDArray[Any], facts: dict[str, float]) -> Score:
    runs, queries = right.shape
    return Score("label vote", epsilon, {"accuracy": Value.of(right)}, runs, queries, facts)
