"""How far one vote travels: the calls of the package's own functions, and the modules that they are in.

A release of a chain that has made some is profiled, with and without tickets, in all threads: the epsilon of its
receipt is known by then. Two numbers of members tell the part that every release has from the part of each call.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from langchain_core.embeddings import DeterministicFakeEmbedding

import langchain_dpicl
from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)

ROOT = str(Path(langchain_dpicl.__file__).parent)

RELEASES = 20
"""A receipt's epsilon is computed once for several counts: the same for releases 17 to 20, the last of which count."""

FEW, MANY = 5, 25
"""Numbers of members. One call runs after another: how threads wait for each other is chance."""


class Notes:
    """A profiler for all threads: a thread of members keeps the one that it has started with."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.counts = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.counts and event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self.calls.append(frame.f_code.co_filename)


NOTES = Notes()


def traced(members: int, tickets: bool, looked_at: int = 3) -> tuple[int, set[str]]:
    """The fewest calls of the last releases, which chance may lengthen, and their modules."""
    records = [{"input": f"text {i}", "output": "red", "owner": f"o{i}"} for i in range(200)]
    store = ExemplarStore.from_records(records, DeterministicFakeEmbedding(size=8), owner_key="owner", progress=False)
    gate: dict[str, Any] = {"threshold": -1.0, "eligible": 200} if tickets else {}
    selector = PoissonExampleSelector(store, members, rate=1.0, max_exemplars=1, **gate)
    found: list[tuple[int, set[str]]] = []
    threading.setprofile(NOTES)
    gc.disable()  # the collector calls the package, too
    try:
        with tempfile.TemporaryDirectory() as folder:
            budget = PrivacyBudget(1000.0, 1e-7, 1000, f"sqlite:///{folder}/budget.db", tickets=tickets)
            ensemble = PrivateEnsemble(selector, lambda _: "red", max_concurrency=1)
            release = ensemble | DPAggregate(NoisyVote(["red", "blue"]), budget)
            for number in range(RELEASES):
                NOTES.calls.clear()
                NOTES.counts = number >= RELEASES - looked_at
                sys.setprofile(NOTES if NOTES.counts else None)
                release.invoke({"input": f"question {number}"})
                sys.setprofile(None)
                if NOTES.counts:
                    found.append((len(NOTES.calls), set(NOTES.calls)))
            budget.close()
    finally:
        NOTES.counts = False
        gc.enable()
        threading.setprofile(None)
    return min(found, key=lambda each: each[0])


def walk(tickets: bool) -> dict[str, float]:
    """Calls that every release makes, calls for each member, and modules of both."""
    (few, modules), (many, others) = traced(FEW, tickets), traced(MANY, tickets)
    by_call = (many - few) / (MANY - FEW)
    return {"fixed": round(few - FEW * by_call), "by_call": round(by_call, 1), "modules": len(modules | others)}


def main(argv: list[str] | None = None) -> int:
    """Print both walks; ``--json`` prints one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    found = {"a vote": walk(False), "a vote with tickets": walk(True)}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, figures in found.items():
            print(
                f"{name:20s} {figures['fixed']:.0f} calls, and {figures['by_call']} for each member, "
                f"in {figures['modules']} modules"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
