"""Answer a file of public questions in several processes: all of them by a head, the first ones by votes as well.

    python examples/offline.py FOLDER QUESTIONS [--votes 1000] [--processes 4]

QUESTIONS has one a line; blank lines are none. All processes charge one ledger. Run the same command again after a
kill, and it goes on where it was: what is in FOLDER is not asked again, and what is in the ledger is charged no more.
"""

import argparse
import fcntl
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    LabelVote,
    MembersAbstained,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
    PrivateHead,
)
from langchain_dpicl.demo.inbox import DEMO_LABELS, demo_inbox
from langchain_dpicl.local import local_embeddings

CHUNK = 100


def prepare(folder: Path, records: list[dict[str, Any]], labels: list[str], votes: int) -> None:
    """The store, the head and the plan, in files that all processes read. What is there is left as it is."""
    file = folder / "store.db"
    if file.exists():
        store = ExemplarStore.load(file, local_embeddings())
    else:
        store = ExemplarStore.from_records(
            records, local_embeddings(), input_key="text", output_key="label", owner_key="customer"
        )
        store.save(file)
    budget = budget_of(folder, votes)
    route(store, labels, budget)  # declares its line: a plan is made for all of its lines
    if not (folder / "head.npz").exists():
        PrivateHead.fit(store, labels, budget, line="head", output=folder / "head.npz")


def budget_of(folder: Path, votes: int) -> PrivacyBudget:
    """One head and so many votes. Nobody waits for a process that was killed.

    Such a process takes charges with it that it has not answered: up to 8 and 1 % of all, so some are to spare.
    """
    releases = {"head": 1, "vote": votes + votes // 20 + 100}
    return PrivacyBudget(3, 1e-5, releases, f"sqlite:///{folder}/budget.db", "offline", replay_patience=5)


def route(store: ExemplarStore, labels: list[str], budget: PrivacyBudget) -> Any:
    """The owners near to a question vote with their own labels."""
    selector = PoissonExampleSelector(store, calls=200, threshold=0.3, eligible=0.3)
    return PrivateEnsemble(selector) | DPAggregate(LabelVote(labels), budget, line="vote")


def work(folder: Path, questions: list[str], votes: int, part: int, processes: int) -> None:
    """One process has every so-many-th question."""
    store = ExemplarStore.load(folder / "store.db", local_embeddings())
    head = PrivateHead.load(folder / "head.npz", store.embeddings)
    chain = route(store, list(head.labels), budget_of(folder, votes))

    def vote(asked: list[str]) -> list[str | None]:
        found = chain.batch([{"input": text} for text in asked], {"max_concurrency": 8}, return_exceptions=True)
        for each in found:
            if isinstance(each, Exception) and not isinstance(each, MembersAbstained):
                raise each
        return [each if isinstance(each, str) else None for each in found]

    def ask(asked: list[str]) -> list[str]:
        return [each["label"] for each in head.batch(asked)]

    extend(folder / f"head-{part}-of-{processes}.jsonl", questions[part::processes], ask)
    extend(folder / f"votes-{part}-of-{processes}.jsonl", questions[part:votes:processes], vote)


def extend(file: Path, questions: list[str], answer: Callable[[list[str]], list[Any]]) -> None:
    """Append the answers that the file lacks."""
    with file.open("ab+") as lines:
        fcntl.flock(lines, fcntl.LOCK_EX)  # a process that its parent has left alone may still be at work
        lines.seek(0)
        done = size = 0
        for line, question in zip(lines, questions, strict=False):
            if not line.endswith(b"\n") or not line.startswith(json.dumps([question])[:-1].encode()):
                break  # half a line, or another question
            done, size = done + 1, size + len(line)
        lines.truncate(size)
        with tqdm(total=len(questions), initial=done, desc=file.stem, disable=None) as bar:
            for first in range(done, len(questions), CHUNK):
                asked = questions[first : first + CHUNK]
                pairs = zip(asked, answer(asked), strict=True)
                lines.write("".join(json.dumps(pair) + "\n" for pair in pairs).encode())
                lines.flush()
                os.fsync(lines.fileno())
                bar.update(len(asked))


def main(folder: Path, questions: list[str], votes: int, processes: int) -> None:
    """All of them, and what it cost."""
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))  # else each computes with all cores
    start = multiprocessing.get_context("spawn")
    each = [start.Process(target=work, args=(folder, questions, votes, i, processes)) for i in range(processes)]
    for process in each:
        process.start()
    for process in each:
        process.join()
    if any(process.exitcode for process in each):
        raise SystemExit("a process has ended before its questions: if it was killed, run the same command again")
    for kind, total in (("head", len(questions)), ("votes", votes)):
        files = [folder / f"{kind}-{i}-of-{processes}.jsonl" for i in range(processes)]
        parts = [file.read_text().splitlines(keepends=True) for file in files]
        assert sum(map(len, parts)) == total
        (folder / f"{kind}.jsonl").write_text("".join(parts[i % processes][i // processes] for i in range(total)))
    print(f"{len(questions)} answers of the head and {votes} votes in {folder}; {budget_of(folder, votes)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--votes", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4, choices=range(1, 65), metavar="N")
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True)
    asked = [line for line in given.questions.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    votes = min(given.votes, len(asked))
    records, _ = demo_inbox()  # your own: a list of mappings, e.g. {"text": ..., "label": ..., "customer": ...}
    prepare(given.folder, records, list(DEMO_LABELS), votes)
    main(given.folder, asked, votes, given.processes)
