"""What an evaluation finds: one score a method, with its public numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from langchain_dpicl.privacy.mechanisms import FrozenMapping


@dataclass(frozen=True)
class Value:
    """One measure.

    Attributes
    ----------
    mean
        In per cent.
    deviation
        The standard deviation over runs: samples of owners times draws of noise. NaN for a single run.
    error
        The standard error over queries, of their means over runs. NaN for a single query.
    """

    mean: float
    deviation: float = math.nan
    error: float = math.nan

    @classmethod
    def of(cls, table: Any) -> Value:
        """From a table of runs by queries, entries between 0 and 1."""
        found = 100 * np.asarray(table, float)
        runs, queries = found.shape
        return cls(
            float(found.mean()),
            float(found.mean(axis=1).std(ddof=1)) if runs > 1 else math.nan,
            float(found.mean(axis=0).std(ddof=1)) / math.sqrt(queries) if queries > 1 else math.nan,
        )


@dataclass(frozen=True)
class Score:
    """How good one method was.

    Attributes
    ----------
    method
        Its name; the same for all epsilons.
    epsilon
        Of all releases of the plan together; None for a method that is not private.
    values
        Measures by name: accuracy; rouge1, rouge2, rougeL, bleu, levenshtein, meaning.
    runs, queries
        How many of each.
    facts
        Public numbers: sigma, members, shots, rate, releases, candidates, ..., and ``flipped``, the per cent of
        releases that differ from the answer of the same members without noise.
    study
        The varied number, for a score of an ablation (members, releases, shots, candidates, ...); "" for the main
        table.
    """

    method: str
    epsilon: float | None
    values: Mapping[str, Value]
    runs: int
    queries: int
    facts: Mapping[str, float] = field(default_factory=FrozenMapping)
    study: str = ""

    @property
    def is_private(self) -> bool:
        """Whether the score belongs to a plan."""
        return self.epsilon is not None

    def mean(self, measure: str) -> float:
        """The measure's mean; NaN if the score lacks it."""
        return self.values[measure].mean if measure in self.values else math.nan

    def to_dict(self) -> dict[str, Any]:
        """As strict JSON: None for NaN."""
        measures = {
            name: {key: None if math.isnan(number) else round(number, 6) for key, number in asdict(value).items()}
            for name, value in self.values.items()
        }
        held = {"method": self.method, "epsilon": self.epsilon, "study": self.study, "values": measures}
        return {**held, "runs": self.runs, "queries": self.queries, "facts": dict(self.facts)}
