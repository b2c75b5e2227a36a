"""How far one vote travels: the calls of the package's own functions, and the modules that they are in.

A release of a chain that has made some is profiled, once without and once with tickets: the epsilon of its receipt is
known by then. The members' threads are not followed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
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

RELEASES = 39
"""A receipt's epsilon is computed at 8 steps for each doubling of the count: the same for releases 37 to 40."""


def walk(tickets: bool) -> dict[str, int]:
    """Calls and modules of the last of so many releases."""
    records = [{"input": f"text {i}", "output": "red", "owner": f"o{i}"} for i in range(200)]
    store = ExemplarStore.from_records(records, DeterministicFakeEmbedding(size=8), owner_key="owner", progress=False)
    gate: dict[str, Any] = {"threshold": -1.0, "eligible": 200} if tickets else {}
    selector = PoissonExampleSelector(store, 10, shots=4, **gate)
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            calls[frame.f_code.co_filename] += 1

    with tempfile.TemporaryDirectory() as folder:
        budget = PrivacyBudget(1000.0, 1e-7, 1000, f"sqlite:///{folder}/budget.db", tickets=tickets)
        release = PrivateEnsemble(selector, lambda _: "red") | DPAggregate(NoisyVote(["red", "blue"]), budget)
        for number in range(RELEASES):
            if number == RELEASES - 1:
                sys.setprofile(note)
            release.invoke({"input": f"question {number}"})
            sys.setprofile(None)
        budget.close()
    return {"calls": calls.total(), "modules": len(calls)}


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
            print(f"{name:20s} {figures['calls']} calls in {figures['modules']} modules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
