"""Studies of private decoding: the same queries answered token by token, with one number varied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from langchain_core.embeddings import Embeddings

from langchain_dpicl.lab.evaluation.batches import Decoder
from langchain_dpicl.lab.evaluation.passes import Key, PassFile, key_of
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.lab.evaluation.scores import Score, text_values

SHOTS = 4
"""How many owners a token's sample has on average."""
_KAPPA = 0.75
"""The weight of the public logits, for each of them: 3 for 4, by other queries (source archive, results/decoding)."""


@dataclass(frozen=True)
class TokenStudy:
    """The answers by decoding, as often as there are ``samples``: from the file, or else decoded now, and kept there.

    - ``inputs``: the queries' texts, as prompts have them.
    - ``public``: inputs that offline demonstrations are written for.
    - ``shown``: of how many queries a score has the texts.
    """

    decoder: Decoder
    file: PassFile
    queries: Sequence[Row]
    inputs: Sequence[str]
    public: Sequence[str]
    embeddings: Embeddings = field(repr=False)
    top_k: int = 100
    samples: int = 1
    shown: int = 0

    @cached_property
    def _digest(self) -> str:
        return key_of(repr([row.input for row in self.queries]))

    def scores(
        self,
        method: str,
        epsilons: Sequence[float | None],
        study: str = "",
        varied: int = 0,
    ) -> list[Score]:
        """Score a method (see `Decoder.answers`) at each epsilon, perhaps with "top_k", "shots" or "releases" varied.

        A plan counts an answer to each query, or each demonstration, unless ``releases`` are varied.
        """
        usual = {
            "top_k": self.top_k,
            "shots": SHOTS,
            "releases": len(self.public if method == "offline" else self.inputs),
        }
        numbers = usual | ({study: varied} if study else {})
        decoder = self.decoder  # one for all numbers: it keeps what it has read
        decoder.shots = float(numbers["shots"])
        decoder.settings = replace(decoder.settings, top_k=numbers["top_k"], shots=_KAPPA * decoder.shots)

        def key(epsilon: float | None, run: int) -> Key:
            parts: Key = (method, numbers["top_k"], self._digest)
            changed = {name: n for name, n in numbers.items() if n != usual[name] and name != "top_k"}
            if epsilon is None:
                changed.pop("releases", None)  # they move the bound alone
            else:
                parts = (*parts, str(epsilon), str(decoder.delta))
            parts += tuple(f"{name} {n}" for name, n in changed.items())
            return (*parts, f"run {run}") if run else parts

        for run in range(self.samples):
            missing = [epsilon for epsilon in epsilons if key(epsilon, run) not in self.file]
            if missing:
                made = decoder.answers(method, missing, self.inputs, self.public, numbers["releases"])
                for epsilon, answers in zip(missing, made, strict=True):
                    self.file.add(key(epsilon, run), answers)

        found = []
        for epsilon in epsilons:
            facts: dict[str, float] = {"top_k": numbers["top_k"]}
            if epsilon is not None:
                facts |= {"rate": decoder.rate, "shots": decoder.shots, "releases": numbers["releases"]}
            if study:
                facts[study] = varied
            runs = [self.file[key(epsilon, run)] for run in range(self.samples)]
            found.append(self._score(method, epsilon, runs, facts, study))
        return found

    def _score(
        self,
        method: str,
        epsilon: float | None,
        runs: Sequence[dict[str, Any]],
        facts: dict[str, float],
        study: str,
    ) -> Score:
        facts = {name: n for name, n in runs[0]["facts"].items() if isinstance(n, (int, float))} | facts
        values = text_values([run["texts"] for run in runs], [row.references for row in self.queries], self.embeddings)
        weights = _means([run["facts"].get("least_weights", ()) for run in runs])
        texts = runs[0]["texts"][: self.shown]
        return Score(method, epsilon, values, len(runs), len(self.queries), facts, study, texts, weights)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each place over the rows that have a number there; NaN without any."""
    places = itertools.zip_longest(*rows, fillvalue=math.nan)
    known = [[number for number in place if not math.isnan(number)] for place in places]
    return [round(fmean(place), 4) if place else math.nan for place in known]
