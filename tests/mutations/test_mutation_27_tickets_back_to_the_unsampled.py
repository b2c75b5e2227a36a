"""Mistake 27: tickets given back to owners because they were not sampled. Asked again and again, they all are."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from branching import Coins, Tree
from profiles import repeated_delta
from table_model import TableModel
from ticket_worlds import Degrees

from langchain_dpicl import DemonstrationTemplate, DPSampler, ExemplarStore, PoissonExampleSelector, PrivacyBudget
from langchain_dpicl.budget.ledger import Ledger
from langchain_dpicl.decoding import answer
from langchain_dpicl.decoding.exemplars import Exemplars
from langchain_dpicl.privacy.mechanisms import MECHANISMS
from langchain_dpicl.privacy.profile import Subsampled

RATE, BOUND, QUESTIONS, TICKETS = 0.3, 1.5, 3, 1
EPSILONS = np.array([0.0, 0.3, 0.6, math.log1p(RATE * math.expm1(BOUND))])
RECORDS = [{"input": "ann 0", "owner": "ann"}, {"input": "bob 170", "owner": "bob"}]


def law(owners: int, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, float]:
    """The exact law of three answers of one token each, on a ledger whose owners have one ticket.

    Every branch has a store of its own, which knows no other branch's ledger.
    """
    model = TableModel(lambda shown, _: [40.0, 0.0] if shown else [0.0, 0.0], "xy")
    tree, found, number = Tree(), defaultdict[str, float](float), itertools.count()

    def drawn(scores: Any, _: Any) -> int:
        weights = np.exp((scores - scores.max()) * answer.STEP)
        return tree.choose((weights / weights.sum()).tolist())

    patch.setattr(answer, "draw", drawn)
    while True:
        store = ExemplarStore.from_records(RECORDS[2 - owners :], Degrees(), output_key=None, owner_key="owner")
        selector = PoissonExampleSelector(store, 2, rate=RATE, max_exemplars=1, threshold=0.5)
        url = f"sqlite:///{folder}/{owners}-{next(number)}.db"
        budget = PrivacyBudget(400.0, 0.05, TICKETS, url, tickets=True, replay=False)
        template = DemonstrationTemplate("{input}", "?")
        sampler = DPSampler(
            model, selector, budget, template=template, max_tokens=1, min_tokens=0, top_k=2, shots=1, pad=False
        )
        sampler.line().parameter = BOUND
        sampler._randomness = Coins(tree)  # type: ignore[assignment]
        found["".join(sampler.invoke({"input": "? 0"}) for _ in range(QUESTIONS))] += tree.weight
        budget.close()
        if not tree.next():
            assert math.isclose(sum(found.values()), 1.0, rel_tol=1e-9)
            return found


def excess(folder: Path, patch: pytest.MonkeyPatch) -> float:
    """By how much the true delta exceeds that of one token, at its worst, in both directions."""
    claimed = Subsampled(MECHANISMS["tokens"]().profile(BOUND), RATE)
    whole, less, worst = law(2, folder, patch), law(1, folder, patch), -math.inf
    for direction, p, q in (("remove", whole, less), ("add", less, whole)):
        bounds = repeated_delta(claimed, TICKETS, EPSILONS, direction)  # type: ignore[arg-type]
        for epsilon, bound in zip(EPSILONS, bounds, strict=True):
            true = sum(max(0.0, p.get(y, 0.0) - math.exp(epsilon) * q.get(y, 0.0)) for y in {*p, *q})
            worst = max(worst, true - bound)
    return worst


def gives_back_to_the_unsampled(patch: pytest.MonkeyPatch) -> None:
    """The mutant: whoever showed nothing pays nothing."""
    shown: list[int] = []
    real_draw, real_record = Exemplars.draw, Ledger.record

    def draw(self: Any, *given: Any, **how: Any) -> Any:
        drawn = real_draw(self, *given, **how)
        shown.append(len(drawn.demonstrations))
        return drawn

    def record(self: Ledger, charge: Any, *given: Any) -> None:
        real_record(self, charge, *given)
        if not shown[-1]:
            self.run(partial(given[-1].give_back, charge=charge, units=charge.units))

    patch.setattr(Exemplars, "draw", draw)
    patch.setattr(Ledger, "record", record)


@pytest.mark.filterwarnings("ignore::langchain_dpicl.errors.PrivacyWarning")
def test_27_tickets_back_to_the_unsampled_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every coin and token of three questions enumerated, on real ledgers. At epsilon log(1 + q (e^eps0 - 1)), where
    one token has delta 0, the mutant has .027 after three questions, .030 after four, and .044 after many."""
    assert excess(tmp_path, monkeypatch) <= 1e-12
    (tmp_path / "mutant").mkdir()
    with monkeypatch.context() as patch:
        gives_back_to_the_unsampled(patch)
        assert excess(tmp_path / "mutant", patch) > 0.02
