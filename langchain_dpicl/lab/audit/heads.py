"""The attack on a head: an owner of many records, whose gradient has norm 1 and one direction in every step.

**The canary.** All its records are one: an embedding of its own, and one label of two. The number of owners, by which
sums are divided and which is public, is declared so large that the weights stay near zero. So its probabilities stay
near one half, the sum of its gradients is longer than 1, and clipped it is the same matrix D of norm 1 in each step.
The others' gradients are orthogonal to D, but for the constant feature, where those of the two labels cancel.

**What the attacker sees.** With ``canary="outputs"`` all T noisy sums and the head: more than a caller sees, and what
the plan's guarantee is for. The projections of the sums on D are independent Gaussians of the mean 1, if the owner is
there, or 0, so the sum over the steps is the best test there is. With ``canary="owner"`` the head alone. Its weights
are a sum of the noisy sums with public factors c_t, those of `descend`, and the projection on D is a Gaussian of mean
sum c_t and variance sigma^2 sum c_t^2: it tells sum c_t / sqrt(T sum c_t^2) = .98 of their signal to noise.

The attacker who sees sums and head knows the number by which the sums were divided, too. If it is not the declared one,
it follows the store, and decides alone.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl.budget import PrivacyBudget
from langchain_dpicl.errors import PrivacyWarning
from langchain_dpicl.lab.audit.cases import LABELS, SURE, Setting
from langchain_dpicl.once.fitting import Fit, descend
from langchain_dpicl.once.head import PrivateHead
from langchain_dpicl.once.steps import LATTICE, FeatureMap, Floats
from langchain_dpicl.once.sums import Sums
from langchain_dpicl.privacy import LineRequest, Randomness
from langchain_dpicl.store import ExemplarStore

HEAD = "head"

HEAD_TRIALS = {"outputs": 10_000, "owner": 1_000}
"""Trials if nobody names a number: a fit takes some six milliseconds, and with its ledger a hundred."""

_OTHERS = 8
_RECORDS = 16  # of the canary
_DECLARED = 1_000_000  # owners
_ORDINARY, _CANARY = (1.0, 0.0), (0.0, 1.0)  # embeddings


@dataclass(frozen=True)
class SeenFit:
    """The attacker's view of one fit. ``sums`` is None if that is the head alone."""

    weights: Floats
    sums: Sums | None = None


@dataclass(frozen=True)
class HeadCase:
    """The canary's store and the plan's numbers. ``is_whole``: whole fits are made, and the head alone is seen."""

    epsilon: float
    delta: float
    releases: int
    parameter: float
    steps: int
    is_whole: bool
    members: int = 0

    @property
    def words(self) -> str:
        """The case in words."""
        seen = "the head alone is seen" if self.is_whole else "all noisy sums and the head are seen"
        return f"an owner of {_RECORDS} records, whose gradient has norm 1 in one direction in every step; {seen}"

    @cached_property
    def direction(self) -> Floats:
        """D, of norm 1."""
        features = FeatureMap(2).features(np.array([_CANARY]))[0]
        found: Floats = np.outer([1.0, -1.0], features / np.linalg.norm(features)) / math.sqrt(2.0)
        return found

    @cached_property
    def factors(self) -> Floats:
        """The weight of each step's noisy sum in the head."""
        shape = (len(LABELS), 1)
        single = LATTICE * np.eye(self.steps, dtype=np.int64)
        return np.array([self.descend([np.full(shape, number) for number in row], shape)[0, 0] for row in single])

    def descend(self, sums: Sums, shape: tuple[int, ...]) -> Floats:
        """The head's weights that the noisy sums have, by the declared number of owners."""
        return descend(sums, _DECLARED, self.parameter, self.steps, (shape[0], shape[1]))[1]

    def statistic(self, seen: SeenFit) -> float:
        """The log-likelihood ratio, with the owner against without."""
        factors, found = self.factors, float((seen.weights * self.direction).sum())
        if seen.sums is not None:
            made = self.descend(seen.sums, seen.weights.shape)
            share = float(np.linalg.norm(made) / np.linalg.norm(seen.weights))
            if abs(share - 1.0) > 1e-6:
                return SURE if share * _DECLARED > _OTHERS + 0.5 else -SURE
            factors = np.ones(self.steps)
            found = sum(float((each * self.direction).sum()) for each in seen.sums) / LATTICE
        mean, variance = float(factors.sum()), self.parameter**2 * float((factors**2).sum())
        return (found - mean / 2.0) * mean / variance

    def store(self, has_owner: bool) -> ExemplarStore:
        """Others of both labels, and the canary or not."""
        rows = [(str(i), LABELS[i % 2], _ORDINARY) for i in range(_OTHERS)]
        rows += [("canary", LABELS[1], _CANARY)] * (_RECORDS * has_owner)
        return ExemplarStore.from_records(
            [{"input": f"text {i}", "output": label, "owner": owner} for i, (owner, label, _) in enumerate(rows)],
            DeterministicFakeEmbedding(size=2),
            owner_key="owner",
            vectors=np.array([vector for _, _, vector in rows], np.float32),
            progress=False,
        )

    def budget(self) -> PrivacyBudget:
        """A budget of its own for one fit, with the noise of all fits of the plan."""
        request = LineRequest(HEAD, 1.0, self.releases, owners=_DECLARED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # the ledger ends with the process, as it should
            return PrivacyBudget(self.epsilon, self.delta, {HEAD: request}, ledger="sqlite://")


def head_cases(setting: Setting) -> tuple[HeadCase]:
    """The one case there is."""
    numbers = setting.epsilon, setting.delta, setting.releases, setting.parameter, int(setting.options["steps"])
    return (HeadCase(*numbers, is_whole=setting.unanimous),)


def head_world(case: HeadCase, has_owner: bool, rate: float, randomness: Randomness) -> Callable[[], SeenFit]:
    """A function that fits a head on the store of ordinary owners, with or without the canary.

    A whole fit is `PrivateHead.fit` with a store and a ledger of its own. Otherwise the parts of one `Fit` are used,
    again and again: its reading of the store once, then its steps, without charge, transaction and receipt.
    """

    def whole() -> SeenFit:
        with contextlib.closing(case.budget()) as budget, warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # of a large delta
            return SeenFit(PrivateHead.fit(case.store(has_owner), LABELS, budget, progress=False).weights)

    if case.is_whole:
        return whole
    fit = Fit(
        *(case.store(has_owner), case.budget(), LABELS, FeatureMap(2), None),
        line_name=None,
        progress=False,
    )
    fit._randomness = randomness
    no_charge: Any = None  # the ledger keeps no step of it
    records, *_ = fit._read(None)

    def steps() -> SeenFit:
        sums: Sums = []
        for number in range(case.steps):
            weights, _ = fit.weigh(sums)
            sums.append(fit._unpacked(fit._step(fit.line, no_charge, number, records, weights)))
        return SeenFit(fit.weigh(sums)[1], sums)

    return steps
