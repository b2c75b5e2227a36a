"""The release of a head: its private steps within one transaction, and the journal from which a killed fit goes on.

``FILE.part`` holds the fit's secret name, by which the ledger knows its charge, and its noisy sums, each on the disk
before the next step uses it. So a fit that was killed finds its own open charge again, and goes on with the next step:
the sums that it has are released, the steps that follow are the first use of their share of the charge. A repeated step
would be a second look at the records, which nobody has paid for: one process at a time has the journal, and it knows
its place.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.aggregators.gaussian import normal
from langchain_dpicl.budget import Budget, Charge, Receipt, Replayed
from langchain_dpicl.budget.line import RELEASED
from langchain_dpicl.calls.flow import Flow
from langchain_dpicl.durable import LineFile, sync_folder
from langchain_dpicl.once.steps import LATTICE, FeatureMap, Floats, OwnedRecords, clipped_sum
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness
from langchain_dpicl.private.boundary import Failed
from langchain_dpicl.release.transaction import Charged, Find, Release, Request
from langchain_dpicl.store.base import Numbers, PrivateStore

MECHANISM = "head"

_RATE, _MOMENTUM = 5.0, 0.9
_READ = 10_000  # records at a time
_FORMAT = "dpicl-fit-1"
_log = logging.getLogger("langchain_dpicl")

Sums = list[NDArray[np.int64]]
"""The noisy sums of the steps so far, in units of 1 / `LATTICE`. Released."""


def descend(sums: Sums, owners: int, steps: int, shape: tuple[int, int]) -> tuple[Floats, Floats]:
    """The weights after these sums, and their mean over the second half of all steps. A function of what is released.

    Gradient descent with momentum from zero. ``owners`` is the public number by which sums are divided.
    """
    weights, momentum, mean = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for number, noisy in enumerate(sums, start=1):
        momentum = _MOMENTUM * momentum - _RATE * (noisy / LATTICE) / owners
        weights = weights + momentum
        if number > steps // 2:
            mean += weights / (steps - steps // 2)
    return weights, mean


class Fit(Release):
    """The steps of a head's release. Its answer is the mean weights."""

    def __init__(
        self,
        store: PrivateStore,
        budget: Budget,
        labels: tuple[str, ...],
        features: FeatureMap,
        owners: int,
        job: Job | None,
        *,
        line_name: str | None,
        noise: float | None,
        progress: bool,
    ) -> None:
        self.store, self.budget, self._labels, self._features = store, budget, labels, features
        self._owners, self._job, self._line_name, self._progress = owners, job, line_name, progress
        self._chosen: dict[str, Any] = {} if noise is None else {"parameter": noise}
        self._randomness: Randomness = SecureRandomness()
        self._shape = (len(labels), features.size)
        self.unknown = 0
        """How many records had no label of the list. Private: for the operator's log alone."""

    def check(self, values: None) -> Request:
        """`PlanMismatch` unless all owners take part in the budget's line, and it divides by this number of owners."""
        owners = None if self.budget.is_filtered else self._owners  # a filter keeps no number of owners
        step = {"step": 1.0 / LATTICE}
        about: dict[str, Any] = {"options": step, "owners": owners, "fingerprint": self.store.fingerprint}
        line = self.budget.line(MECHANISM, 1.0, name=self._line_name, rate_is_explicit=True, **about, **self._chosen)
        self._owners = line.plan_line.owners or self._owners
        name = secrets.token_hex(16) if self._job is None else self._job.name  # a fit is never another one's replay
        content = {"job": name, "labels": list(self._labels), "owners": self._owners}
        return self.request(None, line, content, f"{MECHANISM} {self._shape}", content)

    def calls_public(self, request: Request) -> bool:
        """Public texts were embedded before."""
        return False

    def prepare(self, request: Request) -> Flow[bool]:
        """Nothing is left to do."""
        yield from ()
        return True

    def eligible(self, ready: Any) -> Find | None:
        """Every owner."""

        def everybody() -> Numbers:
            with self.store.reading() as view:
                return view.numbers

        return everybody

    def reopened(self, request: Request) -> Charge | None:
        """The charge of this job that a killed process made. Without it no kept sum is of use."""
        if self._job is None:
            return None
        found = request.line.reopen(request.id, request.principal)
        if found is None and self._job.sums:
            self._job.start_again()
        return found

    def work(self, charged: Charged) -> Flow[Floats]:
        """The steps that are not in the journal, on the records of one moment."""
        line = charged.request.line
        steps, sigma = int(line.options["steps"]), line.parameter * LATTICE
        sums: Sums = [] if self._job is None else list(self._job.sums)
        records = yield partial(self._read, charged.participants)
        for _ in self._bar(range(len(sums), steps)):
            weights, _ = descend(sums, self._owners, steps, self._shape)
            noisy = yield partial(self._step, records, weights, sigma)
            sums.append(noisy)
        return descend(sums, self._owners, steps, self._shape)[1]

    def _bar(self, numbers: range) -> Any:
        from tqdm import tqdm

        return tqdm(numbers, desc="fitting", unit="step", disable=None if self._progress else True)

    def _read(self, paid: Numbers | None) -> OwnedRecords:
        """The features and labels of all owners, or of those who paid. Private."""
        places = {normal(label): place for place, label in enumerate(self._labels)}
        key = str(self.store.output_key)
        features, labels, owners = [], [], []
        with self.store.reading() as view:
            rows, position = view.rows_of(view.numbers if paid is None else paid)
            for first in range(0, len(rows), _READ):
                some = rows[first : first + _READ]
                found = [places.get(normal(str(record.get(key, ""))), -1) for record in view.read(some)]
                known = np.array(found) >= 0
                features.append(self._features.features(view.vectors(some[known])).astype(np.float32))
                labels.append(np.array(found)[known])
                owners.append(position[first : first + _READ][known])
        self.unknown = len(rows) - sum(map(len, labels))
        if not features:
            return OwnedRecords(np.zeros((0, self._shape[1]), np.float32), np.zeros(0, int), np.zeros(0, int))
        return OwnedRecords(np.concatenate(features), np.concatenate(labels), np.concatenate(owners))

    def _step(self, records: OwnedRecords, weights: Floats, sigma: float) -> NDArray[np.int64]:
        """One noisy sum, on the disk before it leaves. Private until then."""
        total = clipped_sum(records, weights)
        noisy = total + self._randomness.discrete_gaussian(sigma, total.size).reshape(total.shape)
        if self._job is not None:
            self._job.keep(noisy)
        return noisy

    def kept(self, charged: Charged, release: Floats) -> tuple[str, str | None, int]:
        """A head is always released. The answer stays in the ledger for a job that is killed before it has its file."""
        return RELEASED, None if self._job is None else json.dumps(_packed(release)), 0

    def failed(self, charged: Charged, failure: Failed) -> bool:
        """A job may go on with its charge."""
        return self._job is None

    def answer(self, charged: Charged, release: Floats, receipt: Receipt) -> Flow[Floats]:
        """The weights."""
        yield from ()
        return release

    def replay(self, request: Request, known: Replayed) -> Flow[Floats]:
        """The weights that this job has released before it was killed."""
        yield from ()
        return _unpacked(json.loads(known.answer), np.float64).reshape(self._shape)


class Job(LineFile):
    """One fit's hold on its journal, ``FILE.part``. Set ``is_over`` when FILE is written; `close` it in any case.

    ``digest`` is of everything that decides the head beside the records. Raises `InvalidParameter` as `LineFile` does,
    if FILE is there and no journal, and if the journal is of a fit with other settings: all files then stay as they
    are.
    """

    is_over = False

    def __init__(self, output: Path, digest: str) -> None:
        super().__init__(output.with_name(output.name + ".part"), output, "a file", "fit")
        self.name = secrets.token_hex(16)
        self.sums: Sums = []
        self._digest = digest
        try:
            entries = [json.loads(line) for line in self.lines]
            if entries:
                self._take(entries)
            elif output.exists():
                raise self.refused("a new file: a head is there")
            self.mend()
            if not entries:
                self._begin()
            return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            super().close(remove=not self.lines)
            if isinstance(error, type(self.refused(""))):
                raise
        raise self.refused(f"a file beside which {self.path.name!r} is an undamaged journal, or is not there")

    def _take(self, entries: list[dict[str, Any]]) -> None:
        head, *steps = entries
        if head["format"] != _FORMAT:
            raise ValueError
        if head["output"] != str(self.output):
            raise self.refused(f"the file with which the fit was begun, {head['output']!r}: move it back")
        if head["settings"] != self._digest:
            bound = (
                "a file whose fit was begun with the same settings; to give up that fit, which stays charged, delete"
            )
            raise self.refused(f"{bound} {self.path.name!r}")
        self.name = str(head["job"])
        self.sums = [_unpacked(step["sum"], np.int64) for step in steps]

    def _begin(self) -> None:
        entry = {"format": _FORMAT, "job": self.name, "settings": self._digest, "output": str(self.output)}
        self.write(json.dumps(entry).encode() + b"\n")
        sync_folder(self.path)

    def start_again(self) -> None:
        """Drop the sums: their charge is no longer this job's."""
        self.sums, self.lines, self.name = [], [], secrets.token_hex(16)
        self.mend()
        self._begin()

    def keep(self, noisy: NDArray[np.int64]) -> None:
        """Write a noisy sum."""
        self.write(json.dumps({"sum": _packed(noisy)}).encode() + b"\n")

    def close(self, remove: bool = False) -> None:
        """Release the journal. It stays if the fit is to go on."""
        super().close(remove or self.is_over)


def digest_of(labels: Sequence[str], features: FeatureMap, owners: int, *more: object) -> str:
    """What stands for a fit's settings in its journal."""
    content = [list(labels), features.numbers, owners, *map(str, more)]
    found = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for _, array in sorted(features.arrays.items()):
        found.update(array.tobytes())
    return found.hexdigest()


def _packed(numbers: NDArray[Any]) -> dict[str, Any]:
    return {"shape": numbers.shape, "bytes": base64.b64encode(np.ascontiguousarray(numbers).tobytes()).decode()}


def _unpacked(content: dict[str, Any], kind: type[np.generic]) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(content["bytes"]), kind).reshape(content["shape"]).copy()
