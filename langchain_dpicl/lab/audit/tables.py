"""The attack on a table: an owner whose records say several pairs that nobody else's say.

The owner's vector, of norm 1, is the only one in its direction, and the attacker, who knows all others, projects the
released counts on it: a Gaussian of mean 1 with the owner and of mean 0 without. It is the best test there is. With
``canary="outputs"`` the product's own reading, sum and noise run on a real store; with ``canary="owner"`` whole
releases do, each with a ledger of its own.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl.budget import PrivacyBudget
from langchain_dpicl.errors import PrivacyWarning
from langchain_dpicl.lab.audit.cases import SURE, Setting
from langchain_dpicl.once.steps import LATTICE, Floats
from langchain_dpicl.once.tables_reading import ONLY, ByName, Domain
from langchain_dpicl.once.tables_release import TableRelease, release_table
from langchain_dpicl.privacy import LineRequest, Randomness
from langchain_dpicl.store import ExemplarStore

SUM = "sum"

SUM_TRIALS = {"outputs": 30_000, "owner": 1_000}
"""Trials if nobody names a number."""

_OTHERS = 8
_PAIRS = 4  # of the canary
_RECORDS = 16  # of the canary
_DECLARED = 1_000_000  # owners, for a warning that nobody needs
_TOPICS = ("Alder", "Birch")
_VALUES = tuple(f"value {i}" for i in range(_PAIRS))


@dataclass(frozen=True)
class TableCase:
    """The canary's store and the plan's numbers. ``is_whole``: whole releases are made."""

    epsilon: float
    delta: float
    releases: int
    parameter: float
    is_whole: bool
    members: int = 0

    @property
    def words(self) -> str:
        """The case in words."""
        return f"an owner of {_RECORDS} records, which say {_PAIRS} pairs that nobody else's say; all counts are seen"

    def statistic(self, counts: Floats) -> float:
        """The log-likelihood ratio, with the owner against without, from the counts of its topic.

        A count of exactly 0 has no noise, and decides alone: with noise there is none.
        """
        if not counts[1].all():
            return -SURE
        found = float(counts[1].sum()) / math.sqrt(_PAIRS)
        return (found - 0.5) / self.parameter**2

    def store(self, has_owner: bool) -> ExemplarStore:
        """Others who say pairs of the first topic, and the canary or not."""
        rows = [(str(i), f"{_TOPICS[0]}: {_VALUES[i % _PAIRS]}, {i}") for i in range(_OTHERS)]
        rows += [("canary", f"{_TOPICS[1]}: {_VALUES[i % _PAIRS]}, {i}") for i in range(_RECORDS * has_owner)]
        return ExemplarStore.from_records(
            [{"input": text, "owner": owner} for owner, text in rows],
            DeterministicFakeEmbedding(size=2),
            output_key=None,
            owner_key="owner",
            progress=False,
        )

    def budget(self) -> PrivacyBudget:
        """A budget of its own for one table, with the noise of all releases of the plan."""
        request = LineRequest(SUM, 1.0, self.releases, owners=_DECLARED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # the ledger ends with the process, as it should
            return PrivacyBudget(self.epsilon, self.delta, {SUM: request}, ledger="sqlite://")


def table_cases(setting: Setting) -> tuple[TableCase]:
    """The one case there is."""
    numbers = setting.epsilon, setting.delta, setting.releases, setting.parameter
    return (TableCase(*numbers, is_whole=setting.unanimous),)


def table_world(case: TableCase, has_owner: bool, rate: float, randomness: Randomness) -> Callable[[], Floats]:
    """A function that counts a table of the store of ordinary owners, with or without the canary.

    Unless releases are whole, the store is read once, and its sum gets noise again and again, without charge,
    transaction and receipt.
    """

    def whole() -> Floats:
        with contextlib.closing(case.budget()) as budget, warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # of a large delta
            return release_table(case.store(has_owner), _TOPICS, _VALUES, budget, read="named").counts

    if case.is_whole:
        return whole
    domain = Domain(_TOPICS, {ONLY: _VALUES})
    release = TableRelease(case.store(has_owner), case.budget(), domain, ByName(domain, None), 8, None, None)
    release._randomness = randomness
    no_charge: Any = None  # the ledger keeps no step of it
    total = release._total(*release._read(None)[:2])
    return lambda: release._unpacked(release._noisy(release.line, no_charge, 0, total)) / LATTICE
