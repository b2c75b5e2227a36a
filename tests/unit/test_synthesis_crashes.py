"""Jobs that are killed, at every step and again and again: no text is kept without its charge, none that is kept is
charged again, and one that was interrupted is charged anew.

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
from letters import INPUTS, letters, no_more

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


def again(sampler: DPSampler) -> DPSampler:
    """The same sampler on a budget that this process, a fork, opens for itself."""
    url, keep = str(sampler.budget._ledger.url), sampler.budget.keep_queries
    return letters(sampler.store, PrivacyBudget(1000.0, 1e-5, RELEASES, url, keep_queries=keep))


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
        for name in ("charge", "record"):
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
        own = again(sampler)
        own.line()
        Countdown(n).install()
        synthesize_demonstrations(own, INPUTS, output=output)

    status = in_child(job)
    assert status in (0, -signal.SIGKILL)
    return status != 0


def written(output: Path) -> list[bytes]:
    """The whole lines of the file."""
    return output.read_bytes().split(b"\n")[:-1] if output.exists() else []


def lost(sampler: DPSampler, output: Path) -> list[str | None]:
    """What became of the charges whose texts are not in the file."""
    kept = {json.loads(line)["receipt"]["number"] for line in written(output)}
    return [release.outcome for release in sampler.budget.latest()[0] if release.number not in kept]


def check_finished(made: Demonstrations, sampler: DPSampler, output: Path, lost: int = 0) -> None:
    """Every text is in the file once, with a charge of its own for its tokens; so many other charges stand beside."""
    assert [pair["input"] for pair in made] == INPUTS
    assert Demonstrations.load(output) == made
    assert list(output.parent.glob("out*")) == [output]
    drawn = [len(pair["output"]) + (len(pair["output"]) < 6) for pair in made]  # the end is a token too
    assert [receipt["tokens"] for receipt in made.receipts] == drawn
    releases, total = sampler.budget.latest()
    assert total == len(INPUTS) + lost
    assert sampler.budget.spent() == sum(release.units for release in releases)
    charges = {release.number: release for release in releases}
    own = [charges[receipt["number"]] for receipt in made.receipts]
    assert len({charge.number for charge in own}) == len(INPUTS), "one charge for each text"
    assert [charge.outcome for charge in own] == ["released"] * 3
    assert [charge.units for charge in own] == drawn


@pytest.mark.slow
def test_killed_at_any_moment_a_job_keeps_its_texts_and_charges_the_interrupted_one_anew(
    sampler_at: Any, tmp_path: Path
) -> None:
    moments, outcomes, torn = 0, list[Any](), 0
    for n in itertools.count():
        output = tmp_path / str(n) / "out.jsonl"
        sampler = sampler_at(output.parent)
        if not killed_at(n, sampler, output):
            break
        before, interrupted, spent = written(output), lost(sampler, output), sampler.budget.spent()
        assert len(interrupted) <= 1
        outcomes.extend(interrupted)
        torn += output.exists() and not output.read_bytes().endswith(b"\n") and output.stat().st_size > 0
        made = synthesize_demonstrations(sampler, INPUTS, output=output)
        check_finished(made, sampler, output, len(interrupted))
        assert written(output)[: len(before)] == before, "no pair is made again"
        assert sampler.budget.spent() == spent + sum(receipt["tokens"] for receipt in made.receipts[len(before) :])
        moments = n + 1
    assert moments == 3 * (2 + 2 + 3), "charge, record and line of three answers"
    assert [outcomes.count(None), outcomes.count("released")] == [3 * 2, 3 * 3], "before and after the record"
    assert torn == 3


@pytest.mark.slow
def test_killed_at_every_moment_one_after_the_other_a_job_still_ends(sampler_at: Any, tmp_path: Path) -> None:
    """Each process gets so many moments further than nothing, which are enough for one answer."""
    for patience in range(9, 16):
        output = tmp_path / str(patience) / "out.jsonl"
        sampler = sampler_at(output.parent)
        seen: list[bytes] = []
        for _ in range(100):
            if not killed_at(patience, sampler, output):
                break
            now = written(output)
            assert now[: len(seen)] == seen
            seen = now
        interrupted = len(lost(sampler, output))
        made = synthesize_demonstrations(sampler, INPUTS, output=output)
        check_finished(made, sampler, output, interrupted)
        assert written(output)[: len(seen)] == seen


@pytest.mark.parametrize("moment", [2, 3])
def test_a_text_that_is_not_in_the_file_is_drawn_and_charged_anew(moment: int, sampler_at: Any, tmp_path: Path) -> None:
    """The process dies before or after the record: the first charge stands, and nothing is taken from it."""
    output = tmp_path / "job" / "out.jsonl"
    sampler = sampler_at(output.parent)
    assert killed_at(moment, sampler, output)
    assert written(output) == []
    (first,), _ = sampler.budget.latest()
    assert first.outcome == (None if moment == 2 else "released")
    sampler.model.calls.clear()
    made = synthesize_demonstrations(sampler, INPUTS, output=output)
    assert len(sampler.model.calls) == 1 + sum(receipt["tokens"] for receipt in made.receipts), (
        "and the public question"
    )
    assert not any(receipt["replayed"] for receipt in made.receipts)
    check_finished(made, sampler, output, 1)
    assert sampler.budget.latest()[0][0] == first


def test_a_text_in_the_file_is_kept_if_a_power_failure_undid_its_record(sampler_at: Any, tmp_path: Path) -> None:
    """Notes in the ledger are durable with the next charge; the charge and the file's line are at once."""
    output = tmp_path / "job" / "out.jsonl"
    sampler = sampler_at(output.parent)

    def job() -> None:
        synthesize_demonstrations(again(sampler), ["one"], output=output, progress=die)

    assert in_child(job) == -signal.SIGKILL
    with sqlite3.connect(output.parent / "ledger.db") as ledger:
        ledger.execute("UPDATE dpicl_charges SET outcome = NULL, receipt = NULL, answer = NULL, units = 6")
        ledger.execute("UPDATE dpicl_counters SET returned = 0")
    ledger.close()
    assert sampler.budget.spent() == 6
    sampler.model.table = no_more
    before = output.read_bytes()
    made = synthesize_demonstrations(sampler, ["one"], output=output)
    assert output.read_bytes() == before
    assert sampler.budget.spent() == 6 >= made.receipts[0]["tokens"], "what was given back counts again"
    assert sampler.budget.latest()[1] == 1


def test_a_file_belongs_to_one_process_at_a_time(sampler_at: Any, tmp_path: Path) -> None:
    output = tmp_path / "job" / "out.jsonl"
    sampler = sampler_at(output.parent)
    ready, go = os.pipe()

    def job() -> None:
        def wait(_: object) -> None:
            os.write(go, b"x")
            time.sleep(60)

        synthesize_demonstrations(again(sampler), INPUTS, output=output, progress=wait)

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
        own, refusal = again(sampler), "no other job"
        while "no other job" in refusal:
            refusal = ""
            try:
                synthesize_demonstrations(own, INPUTS, output=output)
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
    """An open charge stays open while others use the budget, who wait for nothing, and later receipts count it."""
    output = tmp_path / "job" / "out.jsonl"
    sampler = sampler_at(output.parent)
    assert killed_at(2, sampler, output)
    assert sampler.budget.spent() == 6
    answered = sampler.with_receipt().invoke("one")["receipt"]
    assert answered["number"] == 12
    made = synthesize_demonstrations(sampler, INPUTS, output=output)
    tokens = sum(receipt["tokens"] for receipt in made.receipts)
    assert sampler.budget.spent() == 6 + tokens + answered["tokens"]
    line = sampler.line()
    for receipt in made.receipts:
        assert receipt["epsilon_spent"] == pytest.approx(line.plan.spent({"tokens": RELEASES - receipt["remaining"]}))  # type: ignore[attr-defined]


def test_queries_that_are_kept_are_in_the_receipts_of_answers_that_were_begun_anew(
    sampler_at: Any, tmp_path: Path
) -> None:
    output = tmp_path / "job" / "out.jsonl"
    sampler = sampler_at(output.parent, keep_queries=True)
    assert killed_at(2, sampler, output)
    made = synthesize_demonstrations(sampler, INPUTS, output=output)
    assert [json.loads(receipt["query"] or "")["input"] for receipt in made.receipts] == INPUTS
    check_finished(made, sampler, output, 1)


def test_a_lock_on_a_file_that_was_just_taken_away_is_worth_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the file and locking it, the job that had it ended without an answer and another began."""
    output, lock, calls = tmp_path / "out.jsonl", durable.lock, []

    def late(descriptor: int) -> bool:
        if not calls:
            output.unlink()
            output.touch()
        calls.append(descriptor)
        return lock(descriptor)

    monkeypatch.setattr(durable, "lock", late)
    held = synthesis.JobFile(output, "settings", "input")
    with pytest.raises(InvalidParameter, match="no other job"):
        synthesis.JobFile(output, "settings", "input")
    held.close()
    assert len(calls) == 3
