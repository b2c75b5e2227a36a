"""The release of a head: its private steps within one transaction, from which a killed fit goes on (`once.sums`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from langchain_dpicl.aggregators.reading import normal
from langchain_dpicl.budget import BudgetLine, Charge, PrivacyBudget, Receipt
from langchain_dpicl.calls.flow import Flow
from langchain_dpicl.errors import InvalidParameter, ModelLost
from langchain_dpicl.once.probing import BROKEN
from langchain_dpicl.once.scores import CalibratedScores
from langchain_dpicl.once.steps import (
    LATTICE,
    MOST_FEATURES,
    FeatureMap,
    Floats,
    OwnedRecords,
    clipped_sum,
)
from langchain_dpicl.once.sums import SumRelease, Sums
from langchain_dpicl.once.views import JoinedViews
from langchain_dpicl.privacy.advice import head_signal, head_steps
from langchain_dpicl.release.transaction import Charged
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import Numbers

MECHANISM = "head"

_FIRST_RATE, _FIRST_MOMENTUM, _FIRST_NOISE = 5.0, 0.9, 1 / 20
"""Of the first rule, which earlier releases' plans keep."""

_LABELS_PER_NOISE, _MOST_NOISE = 12, 0.9
_STEP, _STEP_LABELS = 1.5, 10
_MOMENTA = (0.0, 0.7, 0.9)
_SURER = 1.1


@dataclass(frozen=True)
class Rate:
    """The sizes of a fit's steps, from public numbers alone.

    ``reach`` is the sum of the factors of all sums: the weights are about -reach S / owners for the mean S of the sums.
    Noise of standard deviation sigma on each sum then moves a score by reach sigma / (owners sqrt(steps)), for features
    of norm 1. The reach is the one at which this is labels / 12, at most .9, so far as the steps stay stable.

    While noise is much, all steps are small and the gradients are about those at zero, as in one step. The momentum
    is then 0 and the noises of all sums weigh the same. With less noise the reach is longer, and a momentum of .7 or .9
    keeps single steps short: a step of gradient descent with momentum m is stable up to 2 (1 + m) labels, at the start
    and for features of norm 1. Steps are at most 3/4 of that, and counted for 10 labels at most, since labels that are
    more common than others are less stable.

    ``scale`` multiplies the last weights. It changes no answer, and brings confidences nearer to the share of right
    answers.
    """

    step: float
    momentum: float
    scale: float

    @classmethod
    def of(cls, owners: int, sigma: float, steps: int, labels: int) -> Rate:
        """The rate of a fit of so many ``steps`` with noise of standard deviation ``sigma`` on each sum."""
        noise = min(labels / _LABELS_PER_NOISE, _MOST_NOISE)
        wanted = noise * owners * math.sqrt(steps) / sigma
        momenta = _MOMENTA if labels > 2 else _MOMENTA[:2]
        longest = {each: _STEP * (1.0 + each) * min(labels, _STEP_LABELS) * _total(each, steps) for each in momenta}
        most = max(longest.values())
        reach = min(wanted, most)
        momentum = next(each for each in momenta if reach <= longest[each])
        scale = max(1.0, min(2.0, _SURER / noise, math.sqrt(most / reach)))
        return cls(reach / _total(momentum, steps), momentum, scale)


def _total(momentum: float, steps: int) -> float:
    """The sum of the factors of all sums, for steps of length 1."""
    return sum((1.0 - momentum**number) / (1.0 - momentum) for number in range(1, steps + 1))


def descend(
    sums: Sums, owners: int, sigma: float, steps: int, shape: tuple[int, int], *, even: bool = True
) -> tuple[Floats, Floats]:
    """The weights after these sums, and the head's, if they are all. A function of what is released.

    Gradient descent from zero: M = m M - r S / owners, then W = W + M, for each sum S, where `Rate` gives r and the
    momentum m. The head's weights are the last ones, scaled.

    ``owners`` is the public number by which sums are divided, ``sigma`` the noise's standard deviation.

    Not ``even``: the rule of earlier releases. m is .9, and r is 5, or less if the noise of one sum would move a score
    by more than 1/20. The head's weights are the mean over the second half of all steps.
    """
    if even:
        rate = Rate.of(owners, sigma, steps, shape[0])
    else:
        rate = Rate(min(_FIRST_RATE, _FIRST_NOISE * owners / sigma), _FIRST_MOMENTUM, 1.0)
    weights, moved, mean = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for number, noisy in enumerate(sums, start=1):
        moved = rate.momentum * moved - rate.step * (noisy / LATTICE) / owners
        weights = weights + moved
        if number > steps // 2:
            mean += weights / (steps - steps // 2)
    return weights, rate.scale * weights if even else mean


def expected_accuracy(owners: int, sigma: float, steps: int, shape: tuple[int, int]) -> float:
    """About the share of questions that a head for few owners answers rightly. From public numbers alone.

    1/k + .55 (1 - 1/k) (1 - exp(-x / 5)) for k labels and d features, where x is the number of owners over
    sigma sqrt(d / steps), the length of a label's noise in the mean of the sums. It grows with the owners, from 1/k,
    which is guessing. Measured: 25, 50 and 99 owners of TREC, SST-2, AG News and MTS-Dialog (2 to 10 labels), epsilon
    .5 to 16 at delta 1e-5, the embeddings themselves and 64 directions of public texts, 24 fits each, by the rule of
    `Rate`, tested on held-out training records. The formula was fitted to these 168 means. It errs by .07 (root mean
    square), by .17 at most, to both sides: it knows nothing of the task but the number of its labels.
    """
    labels, features = shape
    signal = head_signal(owners, sigma, steps, features)
    return 1.0 / labels + 0.55 * (1.0 - 1.0 / labels) * -math.expm1(-signal / 5.0)


@dataclass(frozen=True, repr=False)
class FitReport:
    """The numbers of records that a fit used, and left out. PRIVATE: exact, for the operator who may see the records.

    Attributes
    ----------
    records
        Those with a label of the list, on which the head was fitted.
    unknown_labels
        Those with another label, which add nothing.
    failed
        Of ``records``: the model failed on their text, which has no label scores.
    broken
        Of ``records``: after their text the model no longer answered as at the start, twice. They have no label scores.
    lost_views
        Views of the records that failed, or after which the model no longer answered as at the start. They add nothing.
    """

    records: int
    unknown_labels: int
    failed: int = 0
    broken: int = 0
    lost_views: int = 0


class Fit(SumRelease):
    """The steps of a head's release. Its answer is the head's weights.

    ``owners``: as the caller declared them, or None. A record has the label that is equal to its output by
    ``matching``. ``views`` give the vectors of which ``features`` makes features,
    and ``scores`` features beside these. Raises what the budget's line raises, `PlanMismatch` for another rate or
    number of owners than the plan's, and `InvalidParameter` if nobody has declared a number.
    """

    mechanism = MECHANISM
    names = ("dpicl-fit-1", "fit", "head")
    report: FitReport | None = None
    """Private."""
    shown = (ModelLost,)
    _dtype = np.float64

    def __init__(
        self,
        store: ExemplarStore,
        budget: PrivacyBudget,
        labels: tuple[str, ...],
        features: FeatureMap,
        owners: int | None,
        *,
        matching: Callable[[str], str] = normal,
        views: JoinedViews | None = None,
        scores: CalibratedScores | None = None,
        line_name: str | None,
        progress: bool,
    ) -> None:
        self._labels = labels
        self._matching = matching
        self._features = features
        self._views = views or JoinedViews.of_whole(store.dimension)
        self._scores = scores
        self._progress = progress
        self._arrays = [array for _, array in sorted(features.arrays.items())]
        facts: dict[str, Any] = {"labels": list(labels), "features": features.numbers}
        size = features.size
        if matching is not normal:
            facts["matching"] = matching.__name__
        if not self._views.is_whole:
            facts["views"] = self._views.facts
        if scores is not None:
            facts["scores"] = scores.facts
            size += scores.size
        if size > MOST_FEATURES:
            raise InvalidParameter("scores", f"{size} features in all", f"at most {MOST_FEATURES}")
        options = {"even": 1.0}
        asked = budget.asked(line_name, MECHANISM)
        if budget.is_frozen:  # its rule stands, be it of an earlier release
            options["even"] = 0.0 if asked is None else asked.options.get("even", 0.0)
        elif asked is None:
            options["steps"] = float(head_steps(len(labels)))
        super().__init__(store, budget, (len(labels), size), facts, owners, line_name, options)

    @property
    def expected_accuracy(self) -> float:
        """`expected_accuracy` of this fit. Public."""
        return expected_accuracy(self.owners, self.line.parameter, int(self.line.options["steps"]), self._shape)

    def weigh(self, sums: Sums) -> tuple[Floats, Floats]:
        """`descend` by the rule of this fit's plan. Public."""
        options = self.line.options
        is_even = bool(options.get("even", 0.0))
        return descend(sums, self.owners, self.line.parameter, int(options["steps"]), self._shape, even=is_even)

    def work(self, charged: Charged) -> Flow[tuple[Floats, FitReport]]:
        """The steps that the ledger does not have, on the records of one moment.

        A fit that goes on views and scores its records again.
        """
        line = charged.request.line
        charge = charged.entry
        assert isinstance(charge, Charge)
        steps = int(line.options["steps"])
        sums = self._begun(charged)
        records, texts, unknown = yield partial(self._read, charged.participants)
        report = FitReport(len(records.labels), unknown)
        if not self._views.is_whole:
            records, lost = yield from self._views.seen(records, texts, self._features, self.store, self._progress)
            report = replace(report, lost_views=lost)
        if self._scores is not None:
            rows = yield from self._scores.rows(texts, self._progress)
            broken = rows.count(BROKEN)
            failed = sum(not isinstance(row, list) for row in rows) - broken
            report = replace(report, failed=failed, broken=broken)
            features = yield partial(self._scores.joined, records.features.astype(np.float64), rows)
            records = replace(records, features=features.astype(np.float32))
        from tqdm import tqdm

        bar = tqdm(
            range(len(sums), steps),
            desc="fitting",
            unit="step",
            disable=None if self._progress else True,
        )
        for number in bar:
            weights, _ = self.weigh(sums)
            content = yield partial(self._step, line, charge, number, records, weights)
            sums.append(self._unpacked(content))
        return self.weigh(sums)[1], report

    def _read(self, paid: Numbers | None) -> tuple[OwnedRecords, list[str], int]:
        """The embeddings' features and the labels of all owners, or of those who paid. Private.

        If there are views, the embeddings themselves. With each record's text if it is to be viewed or scored, and how
        many labels are unknown.
        """
        match = self._matching
        places = {match(label): place for place, label in enumerate(self._labels)}
        key = str(self.store.output_key)
        features = [np.zeros((0, self._features.size if self._views.is_whole else self.store.dimension), np.float32)]
        labels = [np.zeros(0, np.int64)]
        owners = [np.zeros(0, np.int64)]
        texts: list[str] = []
        unknown = 0
        with self.store.reading() as view:
            for some, whose in self._pages(view, paid):
                read = view.read(some)
                found = np.array([places.get(match(str(row.get(key, ""))), -1) for row in read])
                known = found >= 0
                vectors = view.vectors(some[known])
                if self._views.is_whole:
                    vectors = self._features.features(vectors).astype(np.float32)
                features.append(vectors)
                labels.append(found[known])
                owners.append(whose[known])
                unknown += int((~known).sum())
                if self._scores is not None or not self._views.is_whole:
                    texts += [str(read[i][self.store.input_key]) for i in np.flatnonzero(known)]
        records = OwnedRecords(np.concatenate(features), np.concatenate(labels), np.concatenate(owners))
        return records, texts, unknown

    def _step(
        self,
        line: BudgetLine,
        charge: Charge,
        number: int,
        records: OwnedRecords,
        weights: Floats,
    ) -> str:
        """One noisy sum."""
        return self._noisy(line, charge, number, clipped_sum(records, weights))

    def _result(self, release: tuple[Floats, FitReport]) -> Floats:
        return release[0]

    def answer(self, charged: Charged, release: tuple[Floats, FitReport], receipt: Receipt) -> Flow[Floats]:
        """The weights."""
        self.report = release[1]
        weights: Floats = yield from super().answer(charged, release, receipt)
        return weights
