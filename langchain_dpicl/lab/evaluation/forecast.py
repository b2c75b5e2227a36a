"""A forecast of the share of right private answers, from labelled public texts that stand in for the records.

Nothing private goes in. Each public record is its own owner, and is a question to all others. What a release adds is
added here: the noise of the plan, as large beside these records as it will be beside the owners.

Measured by hand with 400 training records of TREC, AG News and SST-2 each, beside the source archive's `results/head`
(24 rows), `results/label-votes` (6) and `results/votes-*` (4): heads .02 to .14 below (.06 on average),
label votes .05 to .15 below, gated ensembles of calls level (AG News) and .20 below (TREC, whose study has a gate of
another kind). Some hundred records teach a head less than some thousand, so a forecast is rather too low.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, softmax
from scipy.stats import poisson

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.advice import GATED, LABEL_VOTE, Verdict, Way, Workload
from langchain_dpicl.lab.evaluation.heads import descended
from langchain_dpicl.once.steps import LATTICE, FeatureMap, Floats, OwnedRecords
from langchain_dpicl.privacy.advice import HEAD
from langchain_dpicl.privacy.choice import OVERTURNED
from langchain_dpicl.privacy.mechanisms import MECHANISMS
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.privacy.solving import about
from langchain_dpicl.privacy.votes import BIT, EXPONENTIAL, VoteNoise
from langchain_dpicl.store.records import Vectors

SHARES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25)
"""The shares of owners near to a question that are tried."""

REPEATS = 0.9
"""How often a call is taken to answer with its example's label. SmolLM2-135M does so in .94 of calls on TREC, in .91 on
AG News. A larger model knows more than that."""

_DRAWS = 20
_PARTS = 5
_LEAST = 50


@dataclass(frozen=True)
class Nearness:
    """A gate: its threshold, and how many owners a question finds behind it."""

    threshold: float
    eligible: int


class PublicRecords:
    """Labelled public records in the place of the owners'.

    ``vectors`` are their embeddings, of norm 1, and ``labels`` positions in a list of ``among`` labels. Raises
    `InvalidParameter` for fewer than 50.
    """

    def __init__(self, vectors: Vectors, labels: Sequence[int], among: int) -> None:
        if len(vectors) < _LEAST:
            raise InvalidParameter("public", len(vectors), f"at least {_LEAST} labelled records, better some hundred")
        self.vectors = vectors.astype(np.float64)
        self.right = np.array(labels, np.int64)
        self.among = among
        self._alike = self.vectors @ self.vectors.T
        np.fill_diagonal(self._alike, -np.inf)
        self._named = np.eye(among)[self.right]

    def gates(self, task: Workload, epsilon: float) -> dict[str, Nearness]:
        """The gate of each vote of near owners that is right most often at this epsilon."""
        return {method: self._gate(method, task, epsilon) for method in (LABEL_VOTE, GATED)}

    def _gate(self, method: str, task: Workload, epsilon: float) -> Nearness:
        found = []
        pairs = self._alike[np.isfinite(self._alike)]
        for share in SHARES:
            bar = max(-1.0, float(np.floor(np.quantile(pairs, 1.0 - share) * 1e4) / 1e4))
            near = Nearness(bar, task.eligible(max(1.0, float((pairs >= bar).mean()) * task.owners)))
            way = Way.of(method, replace(task, gate=float(near.eligible), near=float(near.eligible)))
            parameter = about(epsilon, task.delta, way.line(EXPONENTIAL, task.owners))
            noise = VoteNoise(EXPONENTIAL, parameter or MECHANISMS[EXPONENTIAL].low, True)
            certain = way.crowd is not None and noise.flip(int(way.crowd.expected), task.labels) <= OVERTURNED
            found.append((certain, self._votes(method, task, way, noise, near).mean(), near))
        return max(found, key=lambda each: each[:2])[2]

    def right_answers(
        self,
        choice: Verdict,
        task: Workload,
        gates: dict[str, Nearness],
    ) -> tuple[float, float] | None:
        """The share of right answers, and its standard error over the public questions. None for a method that cannot
        be forecast without a model."""
        if choice.method == HEAD:
            found = self._head(choice, task)
        elif choice.method in gates and choice.noise is not None:
            found = self._votes(choice.method, task, choice.way, choice.noise, gates[choice.method])
        else:
            return None
        return float(found.mean()), float(found.std(ddof=1) / np.sqrt(len(found)))

    def _votes(self, method: str, task: Workload, way: Way, noise: VoteNoise, near: Nearness) -> Floats:
        """The chance of the right label on every question.

        Every owner takes part by its own coin, so each label's count is about a Poisson number.
        """
        crowd = way.crowd
        assert crowd is not None
        counts = (self._alike >= near.threshold) @ self._named * (task.owners / (len(self.right) - 1))
        if method == GATED:  # a call that does not repeat its label is taken to give any
            counts = REPEATS * counts + (1.0 - REPEATS) * counts.mean(axis=1, keepdims=True)
        draws: Any = counts[None] * way.rate
        if way.rate < 1.0:
            draws = poisson.ppf(_uniforms(_DRAWS, *counts.shape), draws)
        if noise.mechanism == EXPONENTIAL:
            silent = np.full((*draws.shape[:2], 1), -noise.rate * noise.abstention_count(crowd.members, self.among))
            chances = softmax(np.concatenate([noise.rate * draws, silent], axis=2), axis=2)[:, :, : self.among]
        elif noise.mechanism == BIT:
            lead = np.rint(draws[:, :, 0] - draws[:, :, 1]).astype(np.int64)
            behind = noise.tails[np.minimum(np.abs(lead), noise.tails.size - 1)]
            first = np.where(lead > 0, 1.0 - behind, behind)
            chances = np.stack([first, 1.0 - first], axis=2)
        else:
            noisy = draws + np.rint(ndtri(_uniforms(_DRAWS, *counts.shape)) * noise.parameter)
            best = noisy == noisy.max(axis=2, keepdims=True)
            chances = best / best.sum(axis=2, keepdims=True)
        found: Floats = chances.mean(axis=0)[np.arange(len(self.right)), self.right]
        return found

    def features(self, task: Workload) -> FeatureMap:
        """The directions of the public texts, or their embeddings themselves, as the task says."""
        size = self.vectors.shape[1]
        return FeatureMap(size) if task.features > size else FeatureMap.of(self.vectors, task.features - 1)

    def _head(self, choice: Verdict, task: Workload) -> Floats:
        """Return for each record whether a head that was fitted on the other four fifths answers it rightly.

        The noise is scaled to their number: sigma times theirs over the owners', as in the mean of the sums.
        """
        features = self.features(task)
        rows = features.features(self.vectors)
        part = np.arange(len(self.right)) % _PARTS
        found = np.zeros(len(self.right))
        steps = int(choice.line.options["steps"])
        for each in range(_PARTS):
            held = part != each
            kept = np.flatnonzero(held)[: task.owners]
            records = OwnedRecords(rows[kept].astype(np.float32), self.right[kept], np.arange(len(kept)))
            sigma = choice.line.parameter * len(kept) / task.owners
            weights = descended(
                records,
                (self.among, features.size),
                sigma,
                steps,
                partial(_noise, sigma),
            )
            found[~held] = (rows[~held] @ weights.T).argmax(axis=1) == self.right[~held]
        return found


def _noise(sigma: float, shape: tuple[int, int]) -> NDArray[np.int64]:
    """Gaussian, by its quantiles: nothing here is released."""
    found: NDArray[np.int64] = np.rint(ndtri(_uniforms(*shape)) * sigma * LATTICE).astype(np.int64)
    return found


def _uniforms(*shape: int) -> Floats:
    found = SecureRandomness().uniforms(int(np.prod(shape)))
    return np.clip(np.asarray(found, np.float64), 1e-12, 1.0 - 1e-12).reshape(shape)
