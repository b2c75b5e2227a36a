"""Whole releases on both databases: killed or cut off at any step, nothing is forgotten and nothing over-spent."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ears import Ears

from langchain_dpicl import PrivacyBudget, PrivacyBudgetExceeded

RELEASES = 3

SCRIPT = """
import os, signal, sys
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from langchain_dpicl import DPAggregate, ExemplarStore, NoisyVote
from langchain_dpicl import PoissonExampleSelector, PrivacyBudget, PrivateEnsemble

url, step, question = sys.argv[1:4]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

records = [{"input": f"text {i}", "output": "Positive"} for i in range(8)]
store = ExemplarStore.from_records(records, DeterministicFakeEmbedding(size=4))
selector = PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=8)
budget = PrivacyBudget(1000.0, 1e-5, 3, url, replay_patience=0.5)
def answer(values):
    if step == "call" and any(each["input"].startswith("text ") for each in values["examples"]):
        die()
    return "Positive"

member = RunnableLambda(answer)
release = PrivateEnsemble(selector, member) | DPAggregate(NoisyVote(["Positive", "Negative"]), budget)
release.line()
if step == "charge":
    budget._ledger.charge = die
elif step == "sample":
    selector.sample = die
elif step == "aggregate":
    release.aggregator.aggregate = die
elif step == "record":
    budget._ledger.record = die
print(release.invoke({"input": question}), flush=True)
if step == "answered":
    die()
"""


def release(url: str, step: str, question: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, url, step, question]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("any_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize(
    ("step", "spent"),
    [
        pytest.param("charge", 0, marks=pytest.mark.slow),
        pytest.param("sample", 1, marks=pytest.mark.slow),
        ("call", 1),
        pytest.param("aggregate", 1, marks=pytest.mark.slow),
        pytest.param("record", 1, marks=pytest.mark.slow),
        pytest.param("answered", 1, marks=pytest.mark.slow),
    ],
)
def test_kill_9_at_any_step_keeps_the_charge_and_the_limit(step: str, spent: int, any_url: str) -> None:
    killed = release(any_url, step, "q")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert killed.stdout == ("Positive\n" if step == "answered" else "")
    budget = PrivacyBudget.open("default", any_url)
    assert budget.spent() == spent
    again = release(any_url, "none", "q")
    assert again.stdout == "Positive\n", again.stderr
    spent += step != "answered"  # what was answered before the kill is replayed: its receipt and answer were kept
    assert budget.spent() == spent
    line = budget.line("vote-winner", 1.0)
    for _ in range(RELEASES - spent):
        line.charge()
    with pytest.raises(PrivacyBudgetExceeded):
        line.charge()
    budget.close()


async def test_connections_cut_in_the_middle_of_a_release_cost_no_answer(
    postgres_url: str, terminate: Any, sealed_of: Any
) -> None:
    """The members run while the database goes away and comes back: the release is recorded on a new connection."""
    cut = Ears()

    def member(_: Any) -> str:
        cut.append(terminate(postgres_url))
        return "Positive"

    budget = PrivacyBudget(1000.0, 1e-5, RELEASES, postgres_url)
    sealed = sealed_of(member, budget=budget, return_receipt=True)
    sealed.line()
    answer = sealed.invoke({"input": "q"})
    assert sum(cut) > 0
    assert answer["answer"] == "Positive"
    assert budget.spent() == 1
    assert budget.receipt(answer["receipt"]["id"]) == answer["receipt"]
    assert (await sealed.ainvoke({"input": "r"}))["receipt"]["number"] == 2
    budget.close()


def test_a_disk_that_fills_up_during_a_release_keeps_the_charge(tmp_path: Path, sealed_of: Any) -> None:
    """The receipt is the first write that does not fit."""
    from langchain_dpicl import LedgerError

    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    budget = PrivacyBudget(1000.0, 1e-5, RELEASES, url)

    def member(_: Any) -> str:
        return "Positive"

    sealed = sealed_of(member, budget=budget, return_receipt=True)
    line = sealed.line()
    record = line._ledger.record

    def on_a_full_disk(charge: Any, receipt: str, outcome: str, answer: Any, *more: Any) -> None:
        record(charge, receipt, outcome, "x" * 100_000_000, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line._ledger, "record", on_a_full_disk)
        with budget._ledger._engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages + 20}")
        with pytest.raises(LedgerError):
            sealed.invoke({"input": "q"})
    assert budget.spent() == 1
    budget.close()
