"""The study of label votes: who votes, and how likely the right label is."""

from __future__ import annotations

import numpy as np
import pytest
from head_study import Data, Rows
from label_votes import chances, counts, study

from langchain_dpicl.privacy.votes import VoteNoise

UP, SIDE = (1.0, 0.0), (0.0, 1.0)


def rows(*vectors: tuple[float, float], labels: str) -> Rows:
    """Records at these places."""
    return Rows([f"text {i}" for i in range(len(vectors))], list(labels), np.array(vectors, np.float32))


def test_owners_behind_the_gate_vote_with_their_own_labels() -> None:
    owners, public = rows(UP, UP, SIDE, (0.6, 0.8), labels="aaba"), rows(UP, SIDE, SIDE, SIDE, labels="bbbb")
    assert counts(owners, rows(UP, labels="a"), public, 0.25, ["a", "b"]).tolist() == [[3.0, 0.0]]
    assert counts(owners, rows(UP, labels="a"), public, 0.01, ["a", "b"]).tolist() == [[2.0, 0.0]]


def test_a_chance_is_the_exponential_votes_own() -> None:
    votes, noise = np.array([[3.0, 1.0]]), VoteNoise("vote-em", 0.7, own_calls=True)
    silent = np.exp(-0.7 * noise.abstention_count(4, 2))
    weights = np.exp([2.1, 0.7])
    assert chances(votes, noise, ["a"], ["a", "b"]) == pytest.approx(weights[0] / (weights.sum() + silent))
    assert chances(np.array([[2.0, 2.0]]), None, ["b"], ["a", "b"]).tolist() == [0.5]


def test_a_task_has_a_row_for_every_epsilon() -> None:
    crowd = rows(*[UP] * 60, *[SIDE] * 60, labels="a" * 60 + "b" * 60)
    asked, public = rows(UP, SIDE, labels="ab"), rows(*[UP, SIDE] * 20, labels="ab" * 20)
    found = study("two", Data(crowd, asked, public, ["a", "b"]), 10)
    assert [row["epsilon"] for row in found] == [None, 1.0, 3.0, 8.0]
    assert all(row["questions"] == 2 and row["owners"] == 96 for row in found)
    assert found[0]["accuracy"] == 1.0
    assert 0.99 < found[1]["accuracy"] < found[3]["accuracy"] <= 1.0
