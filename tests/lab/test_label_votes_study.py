"""The study of label votes: who votes, for how many tickets, and how likely the right label is."""

from __future__ import annotations

import label_votes
import numpy as np
import pytest
from head_study import Data, Rows
from label_votes import TEXTS, Asked, chances, chosen, counts, let_in, measured, table

from langchain_dpicl.privacy.votes import VoteNoise

UP, SIDE = (1.0, 0.0), (0.0, 1.0)


def rows(*vectors: tuple[float, float], labels: str) -> Rows:
    """Records at these places."""
    return Rows([f"text {i}" for i in range(len(vectors))], list(labels), np.array(vectors, np.float32))


def test_owners_behind_the_gate_vote_with_their_own_labels_while_they_have_tickets() -> None:
    owners, public = rows(UP, UP, SIDE, (0.6, 0.8), labels="aaba"), rows(UP, SIDE, SIDE, SIDE, labels="bbbb")
    asked = Asked.of(rows(UP, labels="a"), np.arange(1), 3, seed=0)
    voting = dict(let_in(owners, asked, public, [0.25, 0.01]))
    assert counts(voting[0.25], owners, ["a", "b"], None).tolist() == [[3.0, 0.0]] * 3
    assert counts(voting[0.01], owners, ["a", "b"], 2).tolist() == [[2.0, 0.0], [2.0, 0.0], [0.0, 0.0]]


def test_an_owners_question_is_asked_without_its_record() -> None:
    owners, public = rows(UP, UP, SIDE, labels="aab"), rows(UP, SIDE, labels="bb")
    asked = Asked.of(owners, np.arange(3), 3, seed=0, own=True)
    ((_, voting),) = let_in(owners, asked, public, [0.5])
    found = dict(zip(asked.which.tolist(), counts(voting, owners, ["a", "b"], None).tolist(), strict=True))
    assert found == {0: [1.0, 0.0], 1: [1.0, 0.0], 2: [0.0, 0.0]}


def test_a_chance_is_the_exponential_votes_own() -> None:
    votes, noise = np.array([[3.0, 1.0]]), VoteNoise("vote-em", 0.7, own_calls=True)
    silent = np.exp(-0.7 * noise.abstention_count(4, 2))
    weights = np.exp([2.1, 0.7])
    assert chances(votes, noise, 4, ["a"], ["a", "b"]) == pytest.approx(weights[0] / (weights.sum() + silent))
    assert chances(np.array([[2.0, 2.0]]), None, 4, ["b"], ["a", "b"]).tolist() == [0.5]


def test_settings_are_chosen_without_test_questions_and_measured_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_votes, "TICKETS", (15, 30))
    crowd = rows(*[UP] * 60, *[SIDE] * 60, labels="a" * 60 + "b" * 60)
    asked, public = rows(UP, SIDE, labels="ab"), rows(*[UP, SIDE] * 20, labels="ab" * 20)
    settings = chosen({TEXTS: Data(crowd, rows(labels=""), public, ["a", "b"])}, 50)
    assert [row["epsilon"] for row in settings] == [None, 1.0, 1.0, 3.0, 3.0, 8.0, 8.0]
    assert all(row["tickets"] == 50 for row in settings[2::2])
    assert all(
        best["development"] >= other["development"] for best, other in zip(settings[1::2], settings[2::2], strict=True)
    )
    found = [measured({TEXTS: Data(crowd, asked, public, ["a", "b"])}, setting, 50) for setting in settings]
    assert found[0]["accuracy"] == 1.0
    assert 0.9 < found[2]["accuracy"] < found[4]["accuracy"] <= 1.0
    assert all(row["questions"] == 2 and row["owners"] == 120 for row in found)
    assert table([{"task": "two", **row} for row in found], 50).count("\n") == 5
