"""The private sum: what is released once is one, or several, of these. And the journal from which a killed one goes on.

**One sum.** An owner's records give a vector over a public finite domain: labels by features, topics by values. It is a
function of that owner's records, its own coins and public values. It is clipped to Euclidean norm 1 by OWNER, however
many records there are, and rounded towards 0 on a lattice. The owners' vectors are added as whole numbers, and every
coordinate of the domain gets discrete Gaussian noise. Adding or removing an owner, with all its records, moves the sum
by that owner's vector: by at most 1, to the last bit.

**The journal.** The ledger keeps each noisy sum under its charge and step before anybody uses it, and the first sum of
a step stands: a second one, of another process or of a repeated step, is dropped before anybody sees it. So however
often a release is interrupted, copied or run twice, a charge releases one sum a step. ``FILE.part`` holds the secret
name of the release alone, by which the ledger knows its charge again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.budget import BudgetLine, Charge, PrivacyBudget, Receipt, Replayed
from langchain_dpicl.budget.line import RELEASED
from langchain_dpicl.calls.flow import Flow, run
from langchain_dpicl.durable import LineFile, sync_folder
from langchain_dpicl.errors import InvalidParameter, PlanMismatch
from langchain_dpicl.once.steps import LATTICE, SAFE
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness
from langchain_dpicl.private.boundary import Failed
from langchain_dpicl.release.base import check_budget
from langchain_dpicl.release.transaction import Charged, Find, Release, Request, transact
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.view import StoreView


class Saved(Protocol):
    """The product of a release, which a file keeps."""

    def save(self, path: str | Path) -> None:
        """Write it to a file."""


S = TypeVar("S", bound=Saved)

Sums = list[NDArray[np.int64]]
"""The noisy sums of the steps so far, in units of 1 / `LATTICE`. Released."""

CheckedOpening = Callable[[Callable[[PrivacyBudget], None]], PrivacyBudget]
"""It gets what checks the rest of a call on any budget, such as one in memory, and opens the budget."""

_READ = 10_000  # records at a time

LARGEST = 1 << 20
"""The largest amount of one cell."""


def owner_sum(
    owners: NDArray[np.int64], cells: NDArray[np.int64], amounts: NDArray[np.int64], size: int
) -> NDArray[np.int64]:
    """The sum over owners of their vectors, each clipped to norm 1, in units of 1 / `LATTICE`. Private, and exact.

    Entry i says that the vector of ``owners[i]`` has ``amounts[i]``, a whole number of at most `LARGEST` either way, at
    the coordinate ``cells[i]`` of ``size``. Owners ascend, and a coordinate comes at most once for each. A vector v
    becomes trunc(s v), where s = min(1, 1 / |v|). The squares are added as whole numbers, so an owner's part is the
    same whichever others there are.
    """
    total = np.zeros(size, np.int64)
    if not len(owners):
        return total
    small = np.clip(amounts, -LARGEST, LARGEST)
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    squares = np.add.reduceat(small * small, starts)
    scales = SAFE * LATTICE / np.sqrt(np.maximum(squares, 1).astype(np.float64))
    lengths = np.diff(np.append(starts, len(owners)))
    parts = np.trunc(small * np.repeat(scales, lengths)).astype(np.int64)
    np.add.at(total, cells, parts)
    return total


def first_of_each(owners: NDArray[np.int64], order: NDArray[np.int64], at_most: int) -> NDArray[np.int64]:
    """The places of each owner's first ``at_most`` entries in this order, ascending. Private.

    ``owners`` ascend, and ``order`` moves an entry among its own owner's alone.
    """
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    rank = np.arange(len(owners)) - np.repeat(starts, np.diff(np.append(starts, len(owners))))
    return np.sort(order[rank < at_most])


def opened(
    budget: PrivacyBudget | CheckedOpening, check: Callable[[PrivacyBudget], None], store: ExemplarStore, made: str
) -> PrivacyBudget:
    """The budget of a release of what is ``made``, opened after the ``check`` if it is a function.

    Raises `InvalidParameter` unless all callers share it.
    """
    if not isinstance(budget, PrivacyBudget) and callable(budget):
        budget = budget(check)
    check_budget(budget)
    if budget.scope != "shared":
        bound = f"a shared budget: every caller meets the {made}"
        raise InvalidParameter("budget", f"scope={budget.scope!r}", bound)
    budget.watch(store)
    return budget


class SumRelease(Release):
    """The steps of a release of noisy sums, in its transaction: each sum is kept by the ledger before it is used.

    ``shape`` is that of a sum. ``owners``: as the caller declared them, or None. ``facts`` are public values that
    decide the release beside the records, ``options`` the mechanism's. Raises what the budget's line raises,
    `PlanMismatch` for another rate or number of owners than the plan's, and `InvalidParameter` if nobody has declared a
    number.
    """

    mechanism: ClassVar[str]
    names: ClassVar[tuple[str, str, str]]
    """For a `Job`: the format of ``FILE.part``, the work, and what it makes."""
    needs_owners: ClassVar[bool] = True
    """False: nothing is divided by the number of owners, which is then public only if somebody says it."""
    records_per_owner: int | None = None
    """Of an owner who has more records its own coins choose so many. A public number."""
    job: Job | None = None
    _records = 0
    _silent = 0
    _dtype: type = np.int64
    """Of the released array."""
    _arrays: Sequence[NDArray[Any]] = ()
    """Further facts."""

    def __init__(
        self,
        store: ExemplarStore,
        budget: PrivacyBudget,
        shape: tuple[int, int],
        facts: Mapping[str, Any],
        owners: int | None,
        line_name: str | None,
        options: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.store = store
        self.budget = budget
        self._shape = shape
        self._facts = facts
        self._randomness: Randomness = SecureRandomness()
        about: dict[str, Any] = {
            "rate_is_explicit": True,
            "options": {"step": 1.0 / LATTICE, **options},
        }
        if not budget.is_frozen:  # the store's number is for a line that has none
            usual = store.owner_count if self.needs_owners else 0
            budget.declare(line_name, self.mechanism, 1.0, owners=owners or usual or None, **about)
        self.line = budget.line(self.mechanism, 1.0, name=line_name, **about)
        declared = self.line.plan_line.owners
        if declared is not None and owners not in (None, declared):
            raise PlanMismatch(f"the line {self.line.name!r} was frozen with owners {declared} (asked: {owners})")
        if self.needs_owners and declared is None and owners is None:
            raise InvalidParameter("owners", None, "given if the budget's line keeps no number of owners")
        self.owners: int = declared or owners or 0
        self._resumes = bool(budget.replay) and not budget.tickets

    @property
    def reading(self) -> dict[str, int] | None:
        """The numbers of records that were read, and of those that say nothing. Private. None if none was read."""
        if not self._records:
            return None
        return {"records": self._records, "silent": self._silent}

    @property
    def _keeps(self) -> bool:
        """Return whether a release that is killed goes on."""
        return self.job is not None and self._resumes

    @property
    def digest(self) -> str:
        """The hash of everything that decides the release beside the records."""
        facts = {
            **self._facts,
            "owners": self.owners,
            "line": self.line.name,
            "terms": self.line.plan_line.describe(),
            "plan": self.line.plan.digest,
            "budget": self.budget.name,
            "embedder": self.store.embedder,
            "keys": [self.store.input_key, self.store.output_key],
        }
        found = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for array in self._arrays:
            found.update(array.tobytes())
        return found.hexdigest()

    def made(self, output: str | Path | None, make: Callable[[Any, Receipt], S]) -> S:
        """Release, and return what ``make`` gives for the array and its receipt, saved in ``output`` if it is given."""
        self.job = job = None if output is None else self.hold(output)
        try:
            self.store.remember_release(f"a {self.names[2]}, on the budget {self.budget.name!r}")
            made = make(*run(transact(self, None)))
            if job is not None:
                made.save(job.output)
                job.is_over = True
        except BaseException as error:
            if job is not None and not isinstance(error, Exception):  # a charge may have been made: as a kill leaves it
                job.is_charged = True
            raise
        finally:
            if job is not None:
                job.close()
        return made

    def hold(self, output: str | Path) -> Job:
        """The hold on ``output`` and its ``FILE.part``. Raises as `Job` does."""
        return Job(Path(output), self.digest, self.store.lineage, *self.names)

    def check(self, values: None) -> Request:
        """A request that no other release shares."""
        name = secrets.token_hex(16) if self.job is None else self.job.name
        content = {"job": name, **self._facts, "owners": self.owners}
        request = self.request(None, self.line, content, f"{self.mechanism} {self._shape}", content)
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

    @abstractmethod
    def work(self, charged: Charged) -> Flow[Any]: ...

    def _begun(self, charged: Charged) -> Sums:
        """The noisy sums that the ledger has of this charge already."""
        assert isinstance(charged.entry, Charge)
        if self.job is not None:
            self.job.is_charged = True
        kept = charged.request.line.steps(charged.entry) if self._keeps else []
        return [self._unpacked(content) for content in kept]

    def _pages(self, view: StoreView, paid: Numbers | None) -> Iterator[tuple[Numbers, Numbers]]:
        """The rows of all owners, or of those who paid, some at a time, with each row's owner. Private."""
        rows, owners = view.rows_of(view.numbers if paid is None else paid)
        if self.records_per_owner is not None:
            coins = self._randomness.uniforms(len(owners))
            kept = first_of_each(owners, np.lexsort((coins, owners)), self.records_per_owner)
            rows, owners = rows[kept], owners[kept]
        for first in range(0, len(rows), _READ):
            some = slice(first, first + _READ)
            yield rows[some], owners[some]

    def _noisy(self, line: BudgetLine, charge: Charge, number: int, total: NDArray[np.int64]) -> str:
        """A sum with noise on every coordinate, packed.

        It is private until the ledger has it, and what leaves is what the ledger has.
        """
        noise = self._randomness.discrete_gaussian(line.parameter * LATTICE, total.size)
        content = packed(total + noise.reshape(total.shape))
        return line.keep_step(charge, number, content) if self._keeps else content

    def _unpacked(self, content: str) -> NDArray[np.int64]:
        return np.frombuffer(base64.b64decode(content), np.int64).reshape(self._shape)

    def _result(self, release: Any) -> NDArray[Any]:
        """The array that is released, which the ledger keeps for a job that is killed before it has its file."""
        found: NDArray[Any] = release
        return found

    def kept(self, charged: Charged, release: Any) -> tuple[str, str | None, int]:
        """A sum is always released."""
        return RELEASED, json.dumps(self._packed(release)) if self._keeps else None, 0

    def _packed(self, release: Any) -> str:
        """The release as the ledger keeps it."""
        return packed(self._result(release))

    def _replayed(self, content: str) -> Any:
        """The same again."""
        return np.frombuffer(base64.b64decode(content), self._dtype).reshape(self._shape).copy()

    def failed(self, charged: Charged, failure: Failed) -> bool:
        """A job may go on with its charge."""
        return not self._keeps

    def answer(self, charged: Charged, release: Any, receipt: Receipt) -> Flow[Any]:
        """The array that is released."""
        yield from ()
        return self._result(release)

    def replay(self, request: Request, known: Replayed) -> Flow[Any]:
        """The array that this job released before it was killed."""
        yield from ()
        return self._replayed(json.loads(known.answer))


R = TypeVar("R", bound=SumRelease)


def on_budget(
    release: Callable[[PrivacyBudget], R],
    budget: PrivacyBudget | CheckedOpening,
    store: ExemplarStore,
    output: str | Path | None,
    made: str,
) -> R:
    """The release on its budget, which is `opened` when it has passed on another one, with its hold on ``output``."""

    def check(trial: PrivacyBudget) -> None:
        tried = release(trial)
        if output is not None:
            tried.hold(output).close()

    return release(opened(budget, check, store, made))


def part_of(output: Path) -> Path:
    """Return ``FILE.part`` of a FILE: while it is there, the release of FILE has begun and is not over."""
    return output.parent / f"{output.name}.part"  # of a path without a name, too


class Job(LineFile):
    """One release's hold on ``FILE.part``. Set ``is_over`` when FILE is written; `close` it in any case.

    ``digest`` is `SumRelease.digest`, ``store`` the store's lineage, ``kind`` the file's format, ``work`` and ``made``
    name the release and what it makes. Raises `InvalidParameter` as `LineFile` does, if FILE is there and no
    ``FILE.part``, and if that is of other settings, of another store, or of no such work: all files then stay as they
    are. (Sums of two stores would break no promise, but be of neither. A store that was in one process alone has no
    name to be known by.)
    """

    is_over = False
    is_charged = False

    def __init__(self, output: Path, digest: str, store: str | None, kind: str, work: str, made: str) -> None:
        output = output.absolute()
        super().__init__(part_of(output), output, "a file", work)
        self._work = work
        self._format = kind
        head = f'{{"format": "{self._format}"'.encode()
        self._is_new = not self.lines and head.startswith(self.torn[: len(head)])
        self.name = secrets.token_hex(16)
        try:
            if not self._is_new:
                self._read(digest, store)
            elif output.exists():
                raise self.refused(f"a new file: a {made} is there")
            else:
                self.mend()
                entry = {
                    "format": self._format,
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
        work = self._work
        try:
            entry = json.loads(self.lines[0] if self.lines else b"")
            known = {name: str(entry[name]) for name in ("format", "job", "settings", "output", "store")}
        except (ValueError, KeyError, TypeError, RecursionError):
            known = {}
        if known.get("format") != self._format:
            raise self.refused(f"a file beside which {self.path.name!r} is of a {work}, or is not there")
        if known["output"] != str(self.output):
            raise self.refused(f"the file with which the {work} was begun, {known['output']!r}: move it back")
        same = (
            ("settings", known["settings"] != digest),
            ("store", known["store"] not in ("", store)),
        )
        for what, differs in same:
            if differs:
                raise self.refused(
                    f"a file whose {work} was begun with the same {what}; to give up that {work}, whose charge stands, "
                    f"delete {self.path.name!r}"
                )
        self.name = known["job"]

    def close(self, remove: bool = False) -> None:
        """Release the file. It stays if a charge was made and the release is to go on."""
        super().close(remove or self.is_over or (self._is_new and not self.is_charged))


def packed(numbers: NDArray[Any]) -> str:
    """An array's bytes as text."""
    return base64.b64encode(np.ascontiguousarray(numbers).tobytes()).decode()
