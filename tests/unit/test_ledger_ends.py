"""How processes that have a ledger open begin and end: forks, workers, signals; and the names of the ledger's file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import by_hand
import pytest
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import (
    DPAggregate,
    LedgerError,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivacyWarning,
    PrivateEnsemble,
)
from langchain_dpicl.budget.ledger import Ledger
from langchain_dpicl.budget.witness import Mark, Witness

KEPT: list[Ledger] = []
"""Whoever leaves a worker by its normal end has its ledger still open."""


def opened(url: str, releases: int = 2000) -> tuple[Ledger, int]:
    ledger = Ledger(url)
    return ledger, ledger.store_plan("n", "{}", "0" * 64, {"vote": releases}).id


def mark_of(url: str) -> Mark:
    witness = Witness(f"{url}.witness")
    try:
        return witness.marks()[0]
    finally:
        witness.close()


def answer(url: str, times: int = 2) -> None:
    ledger, plan = opened(url)
    KEPT.append(ledger)
    for _ in range(times):
        assert by_hand.charged(ledger, plan, "vote", 1)


@contextlib.contextmanager
def child(work: Callable[[], None]) -> Iterator[Callable[[], str]]:
    """A fork that does this: call what comes to wait for its end, and get what went wrong."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            os.write(writing, f"{type(error).__name__} {error}".encode()[:4000])
        finally:
            os._exit(0)
    os.close(writing)

    def ended() -> str:
        os.waitpid(pid, 0)
        return os.read(reading, 4000).decode()

    try:
        yield ended
    finally:
        os.close(reading)


# -- normal ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_ends_after_one_answer_costs_that_answer(end: signal.Signals, ledger_url: str) -> None:
    code = f"import test_ledger_ends as t, os; t.answer({ledger_url!r}, 1); os.kill(os.getpid(), {end.value})"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == -end
    ledger, plan = opened(ledger_url)  # without a warning, which would be an error here
    assert ledger.spent(plan) == {"vote": 1}


# -- forks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("charged", [False, True])
def test_workers_that_open_it_after_a_fork_work_on_when_the_parent_closes(charged: bool, ledger_url: str) -> None:
    """SQLite's lock table, inherited, would let the parent remove the log."""
    ledger, plan = opened(ledger_url)
    if charged:
        assert by_hand.charged(ledger, plan, "vote", 1)
    closed, close = os.pipe()
    first, told = os.pipe()

    def work() -> None:
        own, _ = opened(ledger_url)
        assert by_hand.charged(own, plan, "vote", 1)
        os.write(told, b".")
        os.close(close)
        os.read(closed, 1)
        for _ in range(3):
            assert by_hand.charged(own, plan, "vote", 1)
        own.close()

    with child(work) as one, child(work) as other:
        os.close(told)
        os.read(first, 1), os.read(first, 1)
        ledger.close()
        os.close(close)
        assert [one(), other()] == ["", ""]
    assert opened(ledger_url)[0].spent(plan) == {"vote": 8 + charged}


@pytest.mark.parametrize("closed", [False, True])
def test_what_was_opened_before_a_fork_is_refused_in_the_child(closed: bool, ledger_url: str) -> None:
    """Also what its parent had closed, and would open again."""
    ledger, plan = opened(ledger_url)
    (charge,) = by_hand.charged(ledger, plan, "vote", 1)
    if closed:
        ledger.close()

    def work() -> None:
        uses: list[Callable[[], object]] = [
            lambda: by_hand.charged(ledger, plan, "vote", 1),
            lambda: ledger.record(charge, "{}"),
            lambda: ledger.give_up(charge),
            lambda: ledger.spent(plan),
            lambda: ledger.is_marked("n") and ledger.spent(plan),
            ledger.write_through,
        ]
        for use in uses:
            with pytest.raises(LedgerError, match="opened before this process was forked: open it in the worker"):
                use()
        ledger.close()

    with child(work) as ended:
        assert ended() == ""
    assert by_hand.charged(ledger, plan, "vote", 1)
    assert ledger.spent(plan) == {"vote": 2}
    ledger.close()
    assert mark_of(ledger_url).reserved == 2


def test_a_fork_waits_for_the_transactions_of_other_threads(ledger_url: str) -> None:
    """Threads charge and read all the time; children that were forked meanwhile outlive the parent's connections."""
    ledger, plan = opened(ledger_url)
    stop = threading.Event()
    done: list[int] = []

    def use() -> None:
        while not stop.is_set():
            done.append(len(by_hand.charged(ledger, plan, "vote", 1)))
            ledger.spent(plan)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    closed, close = os.pipe()

    def work() -> None:
        own, _ = opened(ledger_url)
        assert by_hand.charged(own, plan, "vote", 1)
        os.close(close)
        os.read(closed, 1)
        assert by_hand.charged(own, plan, "vote", 1)
        own.close()

    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(child(work)) for _ in range(6)]
        stop.set()
        for thread in threads:
            thread.join()
        ledger.close()
        os.close(close)
        assert [ended() for ended in children] == [""] * 6
    again, _ = opened(ledger_url)
    assert again.spent(plan) == {"vote": sum(done) + 12}


def test_only_the_process_that_charged_gives_back(ledger_url: str) -> None:
    """A fork copies a charge that is under way: its tokens are given back once, whatever happens to the ledger."""
    ledger, plan = opened(ledger_url, 190)
    (charge,) = by_hand.charged(ledger, plan, units=50)
    path = Path(ledger_url.removeprefix("sqlite:///"))
    with child(lambda: Ledger(ledger_url).record(charge, "{}", unused=40)) as ended:
        assert ended() == ""
    assert ledger.spent(plan) == {"vote": 50}, "the child's record keeps all of them"
    assert mark_of(ledger_url).reserved == 50
    ledger.close()
    assert path.exists()
    assert opened(ledger_url, 190)[0].spent(plan) == {"vote": 50}


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_ledger_behind_a_link_notices_that_its_log_is_gone(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "b.db")
    url = f"sqlite:///{tmp_path / 'link.db'}"
    ledger, plan = opened(url)
    by_hand.charged(ledger, plan, "vote", 1)
    (tmp_path / "real" / "b.db-wal").unlink()
    with pytest.raises(LedgerError, match="deleted or replaced"):
        by_hand.charged(ledger, plan, "vote", 1)
    (tmp_path / "link.db").unlink()
    with pytest.raises(LedgerError, match="is gone"):  # its witness is beside the name that was given
        Ledger(url)


@pytest.mark.parametrize("url", ["sqlite:///b.db", "sqlite:///file:b.db?uri=true"])
def test_a_process_may_change_its_folder(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ledger, plan = opened(url)
    place = ledger.place
    by_hand.charged(ledger, plan, "vote", 1)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert by_hand.charged(ledger, plan, "vote", 1)
    assert ledger.place == place
    ledger.close()
    assert by_hand.charged(ledger, plan, "vote", 1), "opened again, it is the same file"
    ledger.close()
    assert not list((tmp_path / "sub").iterdir())
    monkeypatch.chdir(tmp_path)
    assert opened(url)[0].spent(plan) == {"vote": 3}


def test_who_deleted_a_ledger_learns_what_stands_against_it(ledger_url: str) -> None:
    ledger, plan = opened(ledger_url)
    by_hand.charged(ledger, plan, "vote", 1)
    ledger.close()
    Path(ledger_url.removeprefix("sqlite:///")).unlink()
    with pytest.raises(LedgerError, match=r"\.witness.*takes no answer back.*you vouch for it"):
        Ledger(ledger_url)


def test_the_warning_about_a_second_budget_names_the_users_line(ledger_url: str, store_of: Any, records: Any) -> None:
    store = store_of(records(4))
    shown: list[Path] = []
    for name in ("first", "second"):
        budget = PrivacyBudget(1000.0, 1e-5, 10, ledger_url, name)
        selector = PoissonExampleSelector(store, members=2, rate=1.0, max_exemplars=4)
        chain = PrivateEnsemble(selector, RunnableLambda(lambda _: "a")) | DPAggregate(NoisyVote(["a", "b"]), budget)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", PrivacyWarning)
            chain.invoke({"input": "q"})
        shown += [Path(each.filename) for each in found if "other budgets" in str(each.message)]
    assert shown == [Path(__file__)]
