"""The release of a head: its private steps within one transaction, from which a killed fit goes on.

The ledger keeps each noisy sum under its charge and step before the next step uses it, and the first sum of a step
stands: a second one, of another process or of a repeated step, is dropped before anybody sees it. So however often a
fit is interrupted, copied or run twice, a charge releases one sum a step. ``FILE.part`` holds the fit's secret name
alone, by which the ledger knows its charge again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import secrets
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.aggregators.reading import normal
from langchain_dpicl.budget import BudgetLine, Charge, PrivacyBudget, Receipt, Replayed
from langchain_dpicl.budget.line import RELEASED
from langchain_dpicl.calls.flow import Flow
from langchain_dpicl.durable import LineFile, sync_folder
from langchain_dpicl.errors import InvalidParameter, ModelLost, PlanMismatch
from langchain_dpicl.once.scores import BROKEN, CalibratedScores
from langchain_dpicl.once.steps import (
    LATTICE,
    MOST_FEATURES,
    FeatureMap,
    Floats,
    OwnedRecords,
    clipped_sum,
)
from langchain_dpicl.privacy.advice import head_signal
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness
from langchain_dpicl.private.boundary import Failed
from langchain_dpicl.release.transaction import Charged, Find, Release, Request
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import Numbers

MECHANISM = "head"

_RATE = 5.0
_MOMENTUM = 0.9
_NOISE_PER_STEP = 1 / 20
_READ = 10_000  # records at a time
_FORMAT = "dpicl-fit-1"
_HEAD = f'{{"format": "{_FORMAT}"'.encode()

Sums = list[NDArray[np.int64]]
"""The noisy sums of the steps so far, in units of 1 / `LATTICE`. Released."""


def descend(sums: Sums, owners: int, sigma: float, steps: int, shape: tuple[int, int]) -> tuple[Floats, Floats]:
    """The weights after these sums, and their mean over the second half of all steps. A function of what is released.

    Gradient descent with momentum from zero: M = .9 M - rate S / owners, then W = W + M, for each sum S.

    ``owners`` is the public number by which sums are divided, ``sigma`` the noise's standard deviation. The rate is 5,
    or less if the noise of one sum would move a score by more than 1/20 (20 sums and their momentum: by more than 1.1).
    Noise would then make probabilities of 0 and 1, whose gradients tell little.
    """
    rate = min(_RATE, _NOISE_PER_STEP * owners / sigma)
    weights, momentum, mean = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for number, noisy in enumerate(sums, start=1):
        momentum = _MOMENTUM * momentum - rate * (noisy / LATTICE) / owners
        weights = weights + momentum
        if number > steps // 2:
            mean += weights / (steps - steps // 2)
    return weights, mean


def expected_accuracy(owners: int, sigma: float, steps: int, shape: tuple[int, int]) -> float:
    """About the share of questions that a head for few owners answers rightly. From public numbers alone.

    1/k + .55 (1 - 1/k) (1 - exp(-x / 7)) for k labels and d features, where x is the number of owners over
    sigma sqrt(d / steps), the length of a label's noise in the mean of the sums. It grows with the owners, from 1/k,
    which is guessing. Measured: 25, 50 and 99 owners of TREC, SST-2, AG News and MTS-Dialog (2 to 20 labels), epsilon
    .3 to 16 at delta 1e-5, the embeddings themselves and 64 directions of public texts, eight fits each with the
    default settings. The formula was fitted to these 168 means. It errs by .06 (root mean square), by .17 at most.
    """
    labels, features = shape
    signal = head_signal(owners, sigma, steps, features)
    return 1.0 / labels + 0.55 * (1.0 - 1.0 / labels) * -math.expm1(-signal / 7.0)


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
    """

    records: int
    unknown_labels: int
    failed: int = 0
    broken: int = 0


class Fit(Release):
    """The steps of a head's release. Its answer is the mean weights.

    ``owners``: as the caller declared them, or None. ``scores`` give features beside the embedding's. Raises what the
    budget's line raises, `PlanMismatch` for another rate or number of owners than the plan's, and `InvalidParameter` if
    nobody has declared a number.
    """

    job: Job | None = None
    report: FitReport | None = None
    """Private."""
    shown = (ModelLost,)

    def __init__(
        self,
        store: ExemplarStore,
        budget: PrivacyBudget,
        labels: tuple[str, ...],
        features: FeatureMap,
        owners: int | None,
        *,
        scores: CalibratedScores | None = None,
        line_name: str | None,
        progress: bool,
    ) -> None:
        self.store = store
        self.budget = budget
        self._labels = labels
        self._features = features
        self._scores = scores
        self._progress = progress
        self._randomness: Randomness = SecureRandomness()
        scored = 0 if scores is None else scores.size
        self._shape = (len(labels), features.size + scored)
        if self._shape[1] > MOST_FEATURES:
            raise InvalidParameter("scores", f"{self._shape[1]} features in all", f"at most {MOST_FEATURES}")
        about: dict[str, Any] = {
            "rate_is_explicit": True,
            "options": {"step": 1.0 / LATTICE},
        }
        if not budget.is_frozen:  # the store's number is for a line that has none
            budget.declare(
                line_name,
                MECHANISM,
                1.0,
                owners=owners or store.owner_count or None,
                **about,
            )
        self.line = budget.line(MECHANISM, 1.0, name=line_name, **about)
        declared = self.line.plan_line.owners
        if declared is not None and owners not in (None, declared):
            raise PlanMismatch(f"the line {self.line.name!r} was frozen with owners {declared} (asked: {owners})")
        if declared is None and owners is None:
            raise InvalidParameter("owners", None, "given if the budget's line keeps no number of owners")
        self.owners: int = declared or owners or 0
        self._resumes = bool(budget.replay) and not budget.tickets

    @property
    def expected_accuracy(self) -> float:
        """`expected_accuracy` of this fit. Public."""
        return expected_accuracy(self.owners, self.line.parameter, int(self.line.options["steps"]), self._shape)

    @property
    def _keeps(self) -> bool:
        """Return whether a fit that is killed goes on."""
        return self.job is not None and self._resumes

    @property
    def digest(self) -> str:
        """The hash of everything that decides the head beside the records."""
        facts = [
            list(self._labels),
            self._features.numbers,
            self.owners,
            self.line.name,
            self.line.plan_line.describe(),
            self.line.plan.digest,
            self.budget.name,
            self.store.embedder,
            self.store.output_key,
        ]
        if self._scores is not None:
            facts += [self._scores.facts, self.store.input_key]
        found = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for _, array in sorted(self._features.arrays.items()):
            found.update(array.tobytes())
        return found.hexdigest()

    def check(self, values: None) -> Request:
        """A request that no other fit shares."""
        name = secrets.token_hex(16) if self.job is None else self.job.name
        content = {"job": name, "labels": list(self._labels), "owners": self.owners}
        request = self.request(None, self.line, content, f"{MECHANISM} {self._shape}", content)
        return request if self._resumes else replace(request, id=None)

    def calls_public(self, request: Request) -> bool:
        """Public texts were embedded before."""
        return False

    def prepare(self, request: Request) -> Flow[bool]:
        """Nothing is left to do."""
        yield from ()
        return True

    def eligible(self, ready: Any) -> Find | None:
        """Every owner."""
        return self.everybody

    def reopened(self, request: Request) -> Charge | None:
        """The charge of this job that a killed process made."""
        return None if self.job is None else request.line.reopen(request.id, request.principal)

    def work(self, charged: Charged) -> Flow[tuple[Floats, FitReport]]:
        """The steps that the ledger does not have, on the records of one moment.

        A fit that goes on scores its records again.
        """
        line = charged.request.line
        charge = charged.entry
        assert isinstance(charge, Charge)
        steps = int(line.options["steps"])
        sigma = line.parameter * LATTICE
        if self.job is not None:
            self.job.is_charged = True
        sums: Sums = [self._unpacked(content) for content in line.steps(charge)] if self._keeps else []
        records, texts, unknown = yield partial(self._read, charged.participants)
        report = FitReport(len(records.labels), unknown)
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
            weights, _ = descend(sums, self.owners, line.parameter, steps, self._shape)
            content = yield partial(self._step, line, charge, number, records, weights, sigma)
            sums.append(self._unpacked(content))
        return descend(sums, self.owners, line.parameter, steps, self._shape)[1], report

    def _read(self, paid: Numbers | None) -> tuple[OwnedRecords, list[str], int]:
        """The embeddings' features and the labels of all owners, or of those who paid. Private.

        With each record's text if it is to be scored, and how many labels are unknown.
        """
        places = {normal(label): place for place, label in enumerate(self._labels)}
        key = str(self.store.output_key)
        features = [np.zeros((0, self._features.size), np.float32)]
        labels = [np.zeros(0, np.int64)]
        owners = [np.zeros(0, np.int64)]
        texts: list[str] = []
        unknown = 0
        with self.store.reading() as view:
            rows, position = view.rows_of(view.numbers if paid is None else paid)
            for first in range(0, len(rows), _READ):
                some = rows[first : first + _READ]
                read = view.read(some)
                found = np.array([places.get(normal(str(row.get(key, ""))), -1) for row in read])
                known = found >= 0
                features.append(self._features.features(view.vectors(some[known])).astype(np.float32))
                labels.append(found[known])
                owners.append(position[first : first + _READ][known])
                unknown += int((~known).sum())
                if self._scores is not None:
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
        sigma: float,
    ) -> str:
        """One noisy sum. It is private until the ledger has it, and what leaves is what the ledger has."""
        total = clipped_sum(records, weights)
        noisy = total + self._randomness.discrete_gaussian(sigma, total.size).reshape(total.shape)
        content = _packed(noisy)
        return line.keep_step(charge, number, content) if self._keeps else content

    def _unpacked(self, content: str) -> NDArray[np.int64]:
        return np.frombuffer(base64.b64decode(content), np.int64).reshape(self._shape)

    def kept(self, charged: Charged, release: tuple[Floats, FitReport]) -> tuple[str, str | None, int]:
        """A head is always released. The answer stays in the ledger for a job that is killed before it has its file."""
        answer = json.dumps(_packed(release[0])) if self._keeps else None
        return RELEASED, answer, 0

    def failed(self, charged: Charged, failure: Failed) -> bool:
        """A job may go on with its charge."""
        return not self._keeps

    def answer(self, charged: Charged, release: tuple[Floats, FitReport], receipt: Receipt) -> Flow[Floats]:
        """The weights."""
        yield from ()
        weights, self.report = release
        return weights

    def replay(self, request: Request, known: Replayed) -> Flow[Floats]:
        """The weights that this job has released before it was killed."""
        yield from ()
        found = np.frombuffer(base64.b64decode(json.loads(known.answer)), np.float64)
        return found.reshape(self._shape).copy()


class Job(LineFile):
    """One fit's hold on ``FILE.part``. Set ``is_over`` when FILE is written; `close` it in any case.

    ``digest`` is `Fit.digest`, ``store`` the store's lineage. Raises `InvalidParameter` as `LineFile` does, if FILE is
    there and no ``FILE.part``, and if that is of a fit with other settings, on another store, or of none: all files
    then stay as they are. (Sums of two stores would break no promise, but be a head of neither. A store that was in one
    process alone has no name to be known by.)
    """

    is_over = False
    is_charged = False

    def __init__(self, output: Path, digest: str, store: str | None = None) -> None:
        output = output.absolute()
        super().__init__(output.with_name(output.name + ".part"), output, "a file", "fit")
        self._is_new = not self.lines and _HEAD.startswith(self.torn[: len(_HEAD)])
        self.name = secrets.token_hex(16)
        try:
            if not self._is_new:
                self._read(digest, store)
            elif output.exists():
                raise self.refused("a new file: a head is there")
            else:
                self.mend()
                entry = {
                    "format": _FORMAT,
                    "job": self.name,
                    "settings": digest,
                    "output": str(output),
                    "store": store or "",
                }
                self.write(json.dumps(entry).encode() + b"\n")
                sync_folder(self.path)
        except BaseException:
            super().close(remove=self._is_new)
            raise

    def _read(self, digest: str, store: str | None) -> None:
        try:
            entry = json.loads(self.lines[0] if self.lines else b"")
            known = {name: str(entry[name]) for name in ("format", "job", "settings", "output", "store")}
        except (ValueError, KeyError, TypeError, RecursionError):
            known = {}
        if known.get("format") != _FORMAT:
            raise self.refused(f"a file beside which {self.path.name!r} is of a fit, or is not there")
        if known["output"] != str(self.output):
            raise self.refused(f"the file with which the fit was begun, {known['output']!r}: move it back")
        same = (
            ("settings", known["settings"] != digest),
            ("store", known["store"] not in ("", store)),
        )
        for what, differs in same:
            if differs:
                raise self.refused(
                    f"a file whose fit was begun with the same {what}; to give up that fit, whose charge stands, "
                    f"delete {self.path.name!r}"
                )
        self.name = known["job"]

    def close(self, remove: bool = False) -> None:
        """Release the file. It stays if a charge was made and the fit is to go on."""
        super().close(remove or self.is_over or (self._is_new and not self.is_charged))


def _packed(numbers: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers).tobytes()).decode()
