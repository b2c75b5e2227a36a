"""Jobs that are killed, at every step and again and again: nothing is paid twice, no pair is lost, no token is changed.

The child processes are forks that kill themselves with signal 9 at a chosen step: before or after one of the job's
writes to its files (or in the middle of it) or one of its transactions.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger_files import copy_ledger
from letters import INPUTS, letters, no_more, part_of

from langchain_dpicl import (
    Demonstrations,
    DPSampler,
    InvalidParameter,
    PrivacyBudget,
    durable,
    synthesize_demonstrations,
)
from langchain_dpicl.budget.ledger import Ledger
from langchain_dpicl.decoding import synthesis

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

RELEASES = 100


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory, store_of: Any, records: Any) -> tuple[Any, Path]:
    """A store, and a ledger that has its plan."""
    path = tmp_path_factory.mktemp("frozen") / "ledger.db"
    store, budget = store_of(records(8)), PrivacyBudget(1000.0, 1e-5, RELEASES, f"sqlite:///{path}")
    letters(store, budget).line()
    budget.close()
    return store, path


@pytest.fixture
def sampler_at(frozen: tuple[Any, Path], tmp_path: Path) -> Iterator[Callable[[Path], DPSampler]]:
    """sampler_at(folder): a sampler that writes letters at random, on a new ledger in this folder, which it makes."""
    store, original = frozen
    budgets: list[PrivacyBudget] = []

    def make(folder: Path, **options: Any) -> DPSampler:
        folder.mkdir()
        copy_ledger(original, folder / "ledger.db")
        budgets.append(PrivacyBudget(1000.0, 1e-5, RELEASES, f"sqlite:///{folder / 'ledger.db'}", **options))
        sampler = letters(store, budgets[-1])
        sampler.line()
        return sampler

    yield make
    for budget in budgets:
        budget.close()


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Kills the process at the n-th of the moments that it is told of."""

    def __init__(self, n: int) -> None:
        self.left = n

    def tick(self) -> None:
        self.left -= 1
        if self.left < 0:
            die()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.tick()
            result = function(*arguments, **named)
            self.tick()
            return result

        return counted

    def halving(self, write: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
        """A write of which, at one more moment, only the first half arrives."""

        def counted(descriptor: int, content: bytes) -> int:
            self.tick()
            if self.left == 0:
                write(descriptor, content[: len(content) // 2])
            self.tick()
            write(descriptor, content)
            self.tick()
            return len(content)

        return counted

    def install(self) -> None:
        synthesis.os.write = self.halving(os.write)  # type: ignore[assignment]
        synthesis.os.ftruncate = self.around(os.ftruncate)  # type: ignore[assignment]
        for name in ("charge", "record", "open_charge"):
            setattr(Ledger, name, self.around(getattr(Ledger, name)))


def in_child(action: Callable[[], Any]) -> int:
    """Run in a fork; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(n: int, sampler: DPSampler, output: Path) -> bool:
    """Run the job in a process that is killed at the n-th moment; whether it came to that."""

    def job() -> None:
        Countdown(n).install()
        synthesize_demonstrations(sampler, INPUTS, output=output)

    status = in_child(job)
    assert status in (0, -signal.SIGKILL)
    return status != 0


def handed_out(output: Path) -> dict[str, str]:
    """The text of the tokens in the journal, by the mark of their answer."""
    found, mark = {}, ""
    lines = part_of(output).read_bytes().split(b"\n")[:-1] if part_of(output).exists() else []
    for entry in map(json.loads, lines[1:]):
        mark = entry.get("answer", mark)
        found[mark] = found.get(mark, "") + ("" if "answer" in entry else "abé."[entry["token"]])
    return found


def marked(made: Demonstrations) -> dict[str, str]:
    """The outputs, by the mark of their input."""
    return {synthesis.mark_of(f"Input: {pair['input']}\nOutput:"): pair["output"] for pair in made}


def check_finished(made: Demonstrations, sampler: DPSampler, output: Path) -> None:
    """The file and the ledger are those of a job that nobody interrupted."""
    assert [pair["input"] for pair in made] == INPUTS
    assert Demonstrations.load(output) == made
    assert not part_of(output).exists()
    drawn = [len(pair["output"]) + (len(pair["output"]) < 6) for pair in made]  # the end is a token too
    tokens = [receipt["tokens"] for receipt in made.receipts]
    assert all(charged in (own, 6) for charged, own in zip(tokens, drawn, strict=True)), "reopened: the whole charge"
    assert sampler.budget.spent() == sum(tokens)
    releases, total = sampler.budget.latest()
    assert total == len(INPUTS), "one charge for each input"
    assert [release.outcome for release in releases] == ["released"] * 3
    assert [release.units for release in releases] == tokens


@pytest.mark.slow
def test_killed_at_any_moment_a_job_pays_once_and_keeps_every_token(sampler_at: Any, tmp_path: Path) -> None:
    moments = 0
    for n in itertools.count():
        output = tmp_path / str(n) / "out.jsonl"
        sampler = sampler_at(output.parent)
        if not killed_at(n, sampler, output):
            break
        before = handed_out(output)
        written = output.read_bytes().split(b"\n")[:-1] if output.exists() else []
        made = synthesize_demonstrations(sampler, INPUTS, output=output)
        check_finished(made, sampler, output)
        assert output.read_bytes().split(b"\n")[: len(written)] == written, "no pair is made again"
        final = marked(made)
        assert all((final[mark] + ".").startswith(text) for mark, text in before.items()), "no token is drawn again"
        moments = n + 1
    assert moments > 3 * (2 * 3 + 3 + 2 * 3), "charges, tokens, records and lines of three answers"


@pytest.mark.slow
def test_killed_at_every_moment_one_after_the_other_a_job_still_pays_once(sampler_at: Any, tmp_path: Path) -> None:
    """Each process gets so many moments further than nothing, and there are moments in a job that need some."""
    for patience in range(9, 16):
        output = tmp_path / str(patience) / "out.jsonl"
        sampler = sampler_at(output.parent)
        seen: dict[str, str] = {}
        for _ in range(100):
            if not killed_at(patience, sampler, output):
                break
            now = handed_out(output)
            assert all(now.get(mark, text).startswith(text) for mark, text in seen.items())
            seen |= now
        made = synthesize_demonstrations(sampler, INPUTS, output=output)
        check_finished(made, sampler, output)
        assert all((marked(made)[mark] + ".").startswith(text) for mark, text in seen.items())


def test_an_answer_that_the_ledger_has_is_not_asked_of_the_model_again(sampler_at: Any, tmp_path: Path) -> None:
    output = tmp_path / "job" / "out.jsonl"
    sampler = sampler_at(output.parent)

    def job() -> None:
        synthesis.Journal.add = die  # type: ignore[method-assign]
        synthesize_demonstrations(sampler, ["one"], output=output)

    assert in_child(job) == -signal.SIGKILL
    spent = sampler.budget.spent()
    sampler.model.table = no_more
    (receipt,) = synthesize_demonstrations(sampler, ["one"], output=output).receipts
    assert receipt["replayed"]
    assert receipt["tokens"] == spent == sampler.budget.spent()


def test_a_record_that_a_power_failure_undid_is_made_again_from_the_journal(sampler_at: Any, tmp_path: Path) -> None:
    """Notes in the ledger are durable with the next charge; the journal's tokens and the file's lines are at once."""
    output = tmp_path / "job" / "out.jsonl"
    sampler = sampler_at(output.parent)

    def job() -> None:
        synthesize_demonstrations(sampler, ["one"], output=output, progress=die)

    assert in_child(job) == -signal.SIGKILL
    with sqlite3.connect(output.parent / "ledger.db") as ledger:
        ledger.execute("UPDATE dpicl_charges SET outcome = NULL, receipt = NULL, answer = NULL, units = 6")
        ledger.execute("UPDATE dpicl_counters SET returned = 0")
    ledger.close()
    assert sampler.budget.spent() == 6
    sampler.model.table = no_more
    sampler._doubts.asked("").judge(answered=True)
    written = output.read_bytes()
    made = synthesize_demonstrations(sampler, ["one"], output=output)
    assert output.read_bytes() == written
    assert sampler.budget.spent() == 6 >= made.receipts[0]["tokens"], "what is reopened gives nothing back"


def test_a_file_belongs_to_one_process_at_a_time(sampler_at: Any, tmp_path: Path) -> None:
    output = tmp_path / "job" / "out.jsonl"
    sampler = sampler_at(output.parent)
    ready, go = os.pipe()

    def job() -> None:
        def wait(_: object) -> None:
            os.write(go, b"x")
            time.sleep(60)

        synthesize_demonstrations(sampler, INPUTS, output=output, progress=wait)

    child = os.fork()
    if child == 0:
        try:
            job()
        finally:
            os._exit(1)
    try:
        os.read(ready, 1)
        before, spent = {path: path.read_bytes() for path in output.parent.glob("out*")}, sampler.budget.spent()
        with pytest.raises(InvalidParameter, match="no other job"):
            synthesize_demonstrations(sampler, INPUTS, output=output)
        assert {path: path.read_bytes() for path in output.parent.glob("out*")} == before
        assert sampler.budget.spent() == spent
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    check_finished(synthesize_demonstrations(sampler, INPUTS, output=output), sampler, output)


def test_many_processes_that_start_one_job_do_it_once(sampler_at: Any, tmp_path: Path) -> None:
    """Whoever comes while another works is refused; whoever comes after it finds everything done."""
    output = tmp_path / "job" / "out.jsonl"
    sampler = sampler_at(output.parent)

    def job() -> None:
        refusal = "no other job"
        while "no other job" in refusal:
            refusal = ""
            try:
                synthesize_demonstrations(sampler, INPUTS, output=output)
            except InvalidParameter as error:
                refusal = str(error)
        os._exit(len(refusal))

    children = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            try:
                job()
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    check_finished(Demonstrations.load(output), sampler, output)


def test_others_who_charge_in_between_get_what_is_theirs(sampler_at: Any, tmp_path: Path) -> None:
    """An open charge stays open while others use the budget, and its receipt then counts them."""
    output = tmp_path / "job" / "out.jsonl"
    sampler = sampler_at(output.parent)
    assert killed_at(20, sampler, output)
    assert 0 < sampler.budget.spent() <= 18
    answered = sampler.with_receipt().invoke("one")["receipt"]
    assert answered["number"] > 6
    made = synthesize_demonstrations(sampler, INPUTS, output=output)
    tokens = sum(receipt["tokens"] for receipt in made.receipts)
    assert sampler.budget.spent() == tokens + answered["tokens"]
    line = sampler.line()
    for receipt in made.receipts:
        assert receipt["epsilon_spent"] == pytest.approx(line.plan.spent({"tokens": RELEASES - receipt["remaining"]}))  # type: ignore[attr-defined]


def test_queries_that_are_kept_are_in_the_receipts_of_answers_gone_on_with(sampler_at: Any, tmp_path: Path) -> None:
    output = tmp_path / "job" / "out.jsonl"
    sampler = sampler_at(output.parent, keep_queries=True)
    assert killed_at(12, sampler, output)
    made = synthesize_demonstrations(sampler, INPUTS, output=output)
    assert [json.loads(receipt["query"] or "")["input"] for receipt in made.receipts] == INPUTS
    check_finished(made, sampler, output)


def test_a_lock_on_a_journal_that_was_just_taken_away_is_worth_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the journal and locking it, the job that had it finished and another began."""
    output, lock, calls = tmp_path / "out.jsonl", durable.lock, []

    def late(descriptor: int) -> bool:
        if not calls:
            part_of(output).unlink()
            part_of(output).touch()
        calls.append(descriptor)
        return lock(descriptor)

    monkeypatch.setattr(durable, "lock", late)
    held = synthesis.Journal(output, "settings")
    with pytest.raises(InvalidParameter, match="no other job"):
        synthesis.Journal(output, "settings")
    held.close()
    assert len(calls) == 3
