"""The vectors of a collection on PostgreSQL, in this process's memory: what the gate goes over.

**It is the reading's moment.** Every change of a collection raises one of two counters (`Moment`), which a reading
finds in its own snapshot. Readings begin one by one, each follows to its moment at once, and a row is kept with the
times at which it came and went. So a reading sees exactly the rows of its snapshot, whatever other threads follow
later. To follow is to read, in the reading's snapshot, the rows whose ids are new and those that the log of changes
names: a change costs its own rows, and not the collection.

**It is exact.** FAISS finds all rows that come within rounding of the threshold, and `inner_products`, which computes
each from its own row alone, decides: as in `ExemplarStore`, bit by bit.

**It forgets.** A row that went is overwritten as soon as no reading is under way that began before this process
followed. Every reading follows, and so do `PostgresExemplarStore.forget` and ``/ready``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import StoreError
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.memory import inner_products, reaches, rounding
from langchain_dpicl.store.records import Vectors
from langchain_dpicl.store.tables import Collection, as_array

if TYPE_CHECKING:
    from langchain_dpicl.store.sql import AskServer

_BLOCK_BYTES, _READ_BYTES = 1 << 26, 1 << 24
_NEVER = 2**62


class Moment(NamedTuple):
    """A state of a collection: the table that holds it, the id that comes next, and how many changes are logged.

    A row comes under the next id or above, or its coming is logged; its going is logged. So of two states of one table
    the earlier has no larger number, and equal numbers are one state.
    """

    table: int
    next_id: int
    logged: int

    @property
    def time(self) -> int:
        """Every change raises it."""
        return self.next_id + self.logged

    def may_follow(self, other: Moment) -> bool:
        """Return whether this state can follow the other: not if the table was made anew or an older copy restored."""
        return self.table == other.table and self.next_id >= other.next_id and self.logged >= other.logged


class VectorMemory:
    """A collection's rows: ids, owners' numbers and vectors. Private. Thread-safe.

    Vectors lie in blocks, which never move. ``moment`` is how far they are followed, None before the first time. Hold
    ``following`` from the beginning of a snapshot until it is followed.
    """

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._blocks: list[tuple[int, Vectors]] = []
        # By place: a row's id, its owner's number, and the times at which it came and went.
        self._ids, self._owners, self._came, self._went = (np.empty(0, np.int64) for _ in range(4))
        self._free = np.empty(0, np.int64)
        self._gone: list[tuple[int, Numbers]] = []
        self._readings: Counter[int] = Counter()
        self._sorted: tuple[int, Numbers, Numbers] = (-1, self._ids, self._free)
        self._times: set[int] = set()  # those that were followed, and may be asked for
        self._state, self.following = threading.Lock(), threading.RLock()
        self.moment: Moment | None = None

    @contextmanager
    def reading(self) -> Iterator[Moment | None]:
        """Yield the moment to which it is followed. A snapshot that begins in the ``with`` block keeps what it has."""
        with self._state:
            known = self.moment
            begun = -1 if known is None else known.time
            self._readings[begun] += 1
        try:
            yield known
        finally:
            with self._state:
                self._readings[begun] -= 1
                self._readings += Counter()  # drops what is zero
                self._overwrite()

    def _overwrite(self) -> None:
        earliest = min(self._readings, default=_NEVER)
        for went, places in self._gone:
            if went <= earliest:
                self._came[places] = _NEVER
                for block, _, within in self._parts(places):
                    block[within] = 0.0
                self._free = np.append(self._free, places)
        self._gone = [each for each in self._gone if each[0] > earliest]
        self._times = {time for time in self._times if time >= min(earliest, max(self._times))}

    def end(self) -> None:
        """Overwrite everything once nobody reads it."""
        with self._state:
            self._gone = [(_NEVER, np.flatnonzero(self._came < _NEVER))]
            self._overwrite()

    # -- following ----------------------------------------------------------------------------------------------------

    def at(self, ask: AskServer, moment: Moment) -> VectorMemory:
        """The rows at a reading's moment: these, or if others had read these first, later, others for it alone."""
        self.follow(ask, moment)
        with self._state:
            if moment.time in self._times:
                return self
        own = VectorMemory(self._collection)
        own.follow(ask, moment)
        return own

    def follow(self, ask: AskServer, moment: Moment) -> None:
        """Take over what has changed up to a reading's snapshot: all of it, or nothing."""
        with self.following:
            known = self.moment or Moment(moment.table, 0, moment.logged)
            if self.moment is not None and moment.time <= known.time:
                return
            log = f"SELECT unnest(ids) FROM {self._collection.forgotten} WHERE entry > %s AND entry <= %s"
            logged = np.unique(np.array(ask(log, known.logged, moment.logged), np.int64))
            again = logged[logged < known.next_id]
            came: list[Numbers] = []
            try:
                self._read(ask, came, known.next_id, "TRUE")
                self._read(ask, came, 0, "id = ANY(%s::bigint[])", as_array(again))
                places, went = np.concatenate([self._free[:0], *came]), self._places(again, known.time)
            except BaseException:
                with self._state:
                    self._gone += [(-1, places) for places in came]
                raise
            with self._state:
                self._went[went] = moment.time
                self._came[places] = moment.time
                self._gone.append((moment.time, went))
                self._times.add(moment.time)
                self.moment = moment
                self._overwrite()

    def _read(
        self,
        ask: AskServer,
        came: list[Numbers],
        first: int,
        condition: str,
        *values: object,
    ) -> None:
        """Read rows from an id on, and add their places: nobody sees them yet."""
        query = (
            "SELECT string_agg(int8send(id) || int8send(owner), ''::bytea ORDER BY id), "
            f"string_agg({self._collection.extension}.vector_send(embedding), ''::bytea ORDER BY id) "
            f"FROM (SELECT id, owner, embedding FROM {self._collection.exemplars} "
            f"WHERE id >= %s AND {condition} ORDER BY id LIMIT %s) AS part"
        )
        limit = max(1, _READ_BYTES // (4 * self._collection.dimension))
        while True:
            numbers, vectors = ask(query, first, *values, limit)[0]
            if numbers is None:
                return
            rows = np.frombuffer(numbers, ">i8").reshape(-1, 2)
            came.append(places := self._taken(len(rows)))
            self._ids[places], self._owners[places] = rows.T
            matrix = np.frombuffer(vectors, ">f4").reshape(len(rows), -1)[:, 1:]  # behind pgvector's header
            for block, which, within in self._parts(places):
                block[within] = matrix[which]
            if len(rows) < limit:
                return
            first = int(rows[-1, 0]) + 1

    def _taken(self, count: int) -> Numbers:
        """Free places, of a new block if there are too few: as large as all so far, within bounds."""
        with self._state:
            if (lacking := count - len(self._free)) > 0:
                start = len(self._ids)
                size = max(lacking, min(start, _BLOCK_BYTES // (4 * self._collection.dimension)))
                more = [np.zeros(size, np.int64)] * 2 + [np.full(size, _NEVER)] * 2
                arrays = self._ids, self._owners, self._came, self._went
                self._ids, self._owners, self._came, self._went = (
                    np.concatenate(pair) for pair in zip(arrays, more, strict=True)
                )
                self._blocks.append((start, np.zeros((size, self._collection.dimension), np.float32)))
                self._free = np.append(self._free, np.arange(start, start + size))
            places = self._free[:count]
            self._free = self._free[count:]
            self._went[places] = _NEVER
            return places

    def _parts(self, places: Numbers) -> Iterator[tuple[Vectors, NDArray[np.bool_], Numbers]]:
        """Each block that has some of these places: it, which of them, and where they are in it."""
        for start, block in self._blocks:
            which = (places >= start) & (places < start + len(block))
            if which.any():
                yield block, which, places[which] - start

    # -- reading ------------------------------------------------------------------------------------------------------

    def near(self, query: Vectors, threshold: float, time: int) -> tuple[Numbers, Numbers]:
        """The ids of all rows whose inner product with the query reaches the threshold, and their owners' numbers."""
        import faiss

        least = np.float32(threshold - rounding(self._collection.dimension))
        found = [self._free[:0]]
        for start, block in list(self._blocks):
            products = np.empty(len(block), np.float32)
            pointers = map(faiss.swig_ptr, (products, np.ascontiguousarray(query, np.float32), block))
            faiss.fvec_inner_products_ny(*pointers, self._collection.dimension, len(block))  # type: ignore[attr-defined]
            within = np.flatnonzero(products >= least)
            places = within + start
            there = (self._came[places] <= time) & (time < self._went[places])
            there[there] = reaches(inner_products(block, within[there], query), threshold)
            found.append(places[there])
        places = np.concatenate(found)
        return self._ids[places], self._owners[places]

    def similarity(self, rows: Numbers, query: Vectors, time: int) -> NDArray[np.float32]:
        """The inner product of each row with the query: the one by which `near` decides. `StoreError` for a row that
        was not there."""
        places = self._places(rows, time)
        if len(places) != len(rows):
            raise StoreError("rows of one reading of the store were used in another")
        found = np.empty(len(rows), np.float32)
        for block, which, within in self._parts(places):
            found[which] = inner_products(block, within, query)
        return found

    def _places(self, ids: Numbers, time: int) -> Numbers:
        """Return the places of the rows of these ids, as far as they were there at this time."""
        made, known, places = self._sorted
        if made != time:
            places = np.flatnonzero((self._came <= time) & (time < self._went))
            places = places[np.argsort(self._ids[places], kind="stable")]
            known = self._ids[places]
            self._sorted = time, known, places
        at = np.searchsorted(known, ids)
        at[at == len(known)] = 0
        return places[at][known[at] == ids] if len(known) else places
