"""Studies of private decoding: the same queries answered token by token, with one number varied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from langchain_core.embeddings import Embeddings

from langchain_dpicl.lab.evaluation.batches import Decoder, Version
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
        vary: Mapping[str, Sequence[int]] | None = None,
    ) -> list[Score]:
        """Score a method (see `Decoder.answers`) at each epsilon, and then with "top_k", "shots" or "releases" varied.

        A plan counts an answer to each query, or each demonstration, unless ``releases`` are varied.
        """
        decoder = self.decoder  # one for all numbers: it keeps what it has read
        usual = Version(len(self.public if method == "offline" else self.inputs), self.top_k, SHOTS)
        versions = [("", replace(usual, epsilon=epsilon)) for epsilon in epsilons]
        for study, numbers in (vary or {}).items():
            versions += [(study, replace(each, **{study: n})) for n in numbers for _, each in versions[: len(epsilons)]]

        def key(version: Version, run: int) -> Key:
            parts: Key = (method, version.top_k, self._digest)
            changed = {"shots": version.shots}
            if version.epsilon is not None:
                parts = (*parts, str(version.epsilon), str(decoder.delta))
                changed["releases"] = version.releases  # they move the bound alone
            parts += tuple(f"{name} {n}" for name, n in changed.items() if n != getattr(usual, name))
            return (*parts, f"run {run}") if run else parts

        for run in range(self.samples):
            missing = {key(each, run): each for _, each in versions if key(each, run) not in self.file}
            for shots in dict.fromkeys(each.shots for each in missing.values()):
                some = {name: each for name, each in missing.items() if each.shots == shots}
                decoder.shots = float(shots)
                decoder.settings = replace(decoder.settings, shots=_KAPPA * shots)
                made = decoder.answers(method, [*some.values()], self.inputs, self.public)
                for name, answers in zip(some, made, strict=True):
                    self.file.add(name, answers)
        return [
            self._score(method, version, [self.file[key(version, run)] for run in range(self.samples)], study)
            for study, version in versions
        ]

    def _score(self, method: str, version: Version, runs: Sequence[dict[str, Any]], study: str) -> Score:
        facts = {name: n for name, n in runs[0]["facts"].items() if isinstance(n, (int, float))}
        facts["top_k"] = version.top_k
        if version.epsilon is not None:
            rate = version.shots / len(self.decoder.private)
            facts |= {"rate": rate, "shots": float(version.shots), "releases": version.releases}
        if study:
            facts[study] = getattr(version, study)
        values = text_values([run["texts"] for run in runs], [row.references for row in self.queries], self.embeddings)
        weights = _means([run["facts"].get("least_weights", ()) for run in runs])
        texts = runs[0]["texts"][: self.shown]
        return Score(method, version.epsilon, values, len(runs), len(self.queries), facts, study, texts, weights)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each place over the rows that have a number there; NaN without any."""
    places = itertools.zip_longest(*rows, fillvalue=math.nan)
    known = [[number for number in place if not math.isnan(number)] for place in places]
    return [round(fmean(place), 4) if place else math.nan for place in known]
