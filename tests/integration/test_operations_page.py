"""What the operations page shows: its commands do what it says, and its figures for planning are those of today."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    LabelVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    acting_for,
)
from langchain_dpicl.local import local_embeddings
from langchain_dpicl.serving.config import read
from langchain_dpicl.serving.guards import hash_of, new_key

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
TEXT = "a ticket of ordinary length, about a hundred characters long, as people write them in a hurry"


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def texts(owners: int, embeddings: Any) -> ExemplarStore:
    """One exemplar an owner, random vectors."""
    vectors = np.random.default_rng(0).normal(size=(owners, 384)).astype(np.float32)
    how: dict[str, Any] = {"outputs": ["a", "b"] * (owners // 2), "owners": [f"{i:08}" for i in range(owners)]}
    return ExemplarStore.from_texts([TEXT] * owners, embeddings, vectors=vectors, progress=False, **how)


# -- backup and restore ------------------------------------------------------------------------------------------------


def bash(block: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    how: dict[str, Any] = {"env": {**os.environ, "PATH": path}, "capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(["bash", "-ec", block], cwd=folder, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="the sqlite3 program")
def test_a_ledger_that_is_lost_comes_back_from_a_backup_with_all_that_was_spent(tmp_path: Path) -> None:
    backup, restore = re.findall(r"^```sh\n(.*?)^```", section("Backup, restore, upgrade"), re.MULTILINE | re.DOTALL)
    texts(400, local_embeddings()).save(tmp_path / "notes.db")
    (tmp_path / "keys.yaml").write_text(json.dumps({"alice": hash_of(new_key())}))
    settings = {
        "store": {"file": "notes.db"},
        "release": {"kind": "label-vote", "labels": ["a", "b"]},
        "selector": {"calls": 20},
        "budget": {"epsilon": 8, "delta": 1e-6, "releases": 100, "ledger": "sqlite:///budget.db"},
        "keys": "keys.yaml",
    }
    (tmp_path / "server.yaml").write_text(json.dumps(settings))

    def opened() -> Any:
        return read(tmp_path / "server.yaml").build()

    def ask(i: int) -> Any:
        with acting_for("alice"):
            return chain.invoke({"text": f"question {i}"})["receipt"]

    chain = opened()
    for i in range(3):
        ask(i)
    bash(backup, tmp_path)  # while it runs
    for i in range(3, 5):
        ask(i)
    chain.budget.close()
    for file in tmp_path.glob("budget.db*"):
        if "witness" not in file.name:
            file.unlink()
    assert "95 left" in bash(restore, tmp_path), "all five are spent, of which the backup knows three"
    chain = opened()
    assert chain.budget.spent() == 5
    assert ask(0)["replayed"]
    assert ask(4)["number"] == 6, "its answer is lost"
    chain.budget.close()
    assert sorted(file.name for file in (tmp_path / "backup").iterdir()) == [
        "budget.db",
        "keys.yaml",
        "notes.db",
        "server.yaml",
    ], "and no witness"


# -- figures -----------------------------------------------------------------------------------------------------------


def said(what: str) -> int:
    """The bold number in a row of the table."""
    (row,) = re.findall(rf"^\| {what}[^|]*\|(.*)$", section("Capacity"), re.MULTILINE)
    found = re.search(r"\*\*([\d,]+)\*\*", row)
    assert found is not None
    return int(found[1].replace(",", ""))


def test_a_record_takes_as_much_as_the_page_says(tmp_path: Path) -> None:
    sizes = []
    for owners in (2000, 4000):
        file = tmp_path / f"{owners}.db"
        texts(owners, DeterministicFakeEmbedding(size=384)).save(file)
        sizes.append(file.stat().st_size)
    beside = (sizes[1] - sizes[0]) / 2000 - 384 * 4 - len(TEXT) - len("a") - len("00000000")
    assert beside == pytest.approx(said(r"a record(?= \|)"), abs=10)


@pytest.fixture
def grows(tmp_path: Path) -> Callable[..., tuple[float, float]]:
    """grows(first, then, **gate): the bytes of the ledger for the first questions, and for each one after them."""
    store = texts(2000, DeterministicFakeEmbedding(size=384))

    def measure(first: int, then: int, tickets: bool = False, **gate: Any) -> tuple[float, float]:
        sizes, asked = [], 0
        for count in (0, first, then):
            budget = PrivacyBudget(
                30.0, 1e-7, 5000, f"sqlite:///{tmp_path}/ledger.db", tickets=tickets, accept_noise=True
            )
            chain = PrivateEnsemble(PoissonExampleSelector(store, calls=20, **gate), None) | DPAggregate(
                LabelVote(["a", "b"]), budget
            )
            for _ in range(count):
                chain.invoke({"input": f"{TEXT}, {asked}"})
                asked += 1
            budget.close()
            sizes.append((tmp_path / "ledger.db").stat().st_size)
        return sizes[1] - sizes[0], (sizes[2] - sizes[1]) / then

    return measure


def test_a_question_takes_as_much_of_the_ledger_as_the_page_says(grows: Callable[..., tuple[float, float]]) -> None:
    assert grows(100, 300)[1] == pytest.approx(said("a question"), rel=0.1)


@pytest.mark.filterwarnings("ignore:delta")
def test_a_payer_takes_as_much_of_the_ledger_as_the_page_says(grows: Callable[..., tuple[float, float]]) -> None:
    """Once, however many questions it pays for."""
    gate: dict[str, Any] = {"threshold": -1.0, "eligible": 2000, "nearest_to": "input"}
    once, for_questions = grows(1, 200, tickets=True, **gate)
    assert once / 2000 == pytest.approx(said("an owner who has paid"), rel=0.1)
    assert for_questions == pytest.approx(said("a question"), rel=0.15)
