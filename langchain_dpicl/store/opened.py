"""An open store: rows in a database, and one matrix of their vectors in memory, which follows them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from sqlalchemy.engine import URL, Connection

from langchain_dpicl.calls.shut import Shut
from langchain_dpicl.errors import (
    InvalidParameter,
    PrivacyWarning,
    StoreError,
    StoreFileChanged,
    UnsafeConfigurationError,
)
from langchain_dpicl.private import PrivateRecords
from langchain_dpicl.store import tables
from langchain_dpicl.store.base import (
    Arrival,
    Numbers,
    OwnerWatcher,
    Watcher,
    embedder_of,
    owner_mark,
)
from langchain_dpicl.store.database import StoreDatabase
from langchain_dpicl.store.matrix import Matrix
from langchain_dpicl.store.notes import Notes, OpenedBudget, merged
from langchain_dpicl.store.records import (
    Owners,
    RecordKeys,
    Vectors,
    aembed_query,
    attempt,
    check_records,
    decoded,
    embed,
    embed_query,
)
from langchain_dpicl.store.view import StoreView, moment_of

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings
    from langchain_core.indexing import RecordManager


_DEFAULT_KEYS = RecordKeys("text", None, None)
_KEYS = 500  # of a record manager, in one statement
NOT_YET = (
    "another process reads the store's file just now: what was deleted stays in its log (FILE-wal) until the next "
    "maintenance() finds nobody reading"
)


class _Here(threading.local):
    """A thread's own reading."""

    view: StoreView | None = None


class _Memory:
    """All that this process has read of a store: the owners' numbers, and all rows if something has asked for them."""

    def __init__(self) -> None:
        self.numbers: Numbers = np.empty(0, np.int64)
        self.matrix: Matrix | None = None


class OpenStore(PrivateRecords):
    """A store that is open: it is read, followed and changed. `ExemplarStore` is the one to use."""

    _database: Shut[StoreDatabase] = Shut()
    _memory: Shut[_Memory] = Shut()

    def __init__(
        self,
        url: str | URL,
        embeddings: Embeddings,
        *,
        name: str = "exemplars",
        input_key: str | None = None,
        output_key: str | None = None,
        owner_key: str | None = None,
        vectors_in_memory: bool = True,
        batch: bool = False,
        dimension: int | None = None,
        must_exist: bool = False,
    ) -> None:
        tables.check_name(name)
        given = RecordKeys(input_key or "", output_key, owner_key)
        self.embeddings = embeddings
        self.batch = batch
        self._watchers: list[Watcher] = []
        self._owner_watchers: list[OwnerWatcher] = []
        self._record_managers: list[RecordManager] = []
        self._noted_keys: tuple[bytes, ...] = ()
        self._database = StoreDatabase(url)
        if not vectors_in_memory and self._database.is_sqlite:
            raise InvalidParameter("vectors_in_memory", False, "True on SQLite, which computes no similarities")
        self._in_memory = vectors_in_memory
        if not must_exist:
            self._database.make_file()
        self._database.check_file()
        try:
            found = self._database.run(partial(tables.find, name=name), "read")
            if found is None and must_exist:
                raise StoreError(f"there is no collection {name!r} in this database: make it with from_records")
            if found is None:
                keys = given._replace(input_key=input_key or _DEFAULT_KEYS.input_key)
                check_records([], keys, None)
                size = dimension or embed(embeddings, ["word"]).shape[1]
                found = self._database.run(partial(tables.make, name=name, dimension=size, keys=keys))
        except BaseException:
            self._database.close()
            raise
        for key, made, asked in zip(RecordKeys._fields, found.keys, given, strict=True):
            if asked and asked != made:
                self._database.close()
                raise StoreError(
                    f"the collection {name!r} was made with {key}={made!r}: name another store, or the same keys"
                )
        self._collection = found
        self.input_key, self.output_key, self.owner_key = found.keys
        self.dimension = found.dimension
        """Of the vectors."""
        self._database.opened = True
        self._here = _Here()
        self._memory = _Memory()
        self._key: bytes | None = None
        self._seen = self._database.run(partial(moment_of, collection=found), "read").entry

    # -- public facts --------------------------------------------------------------------------------------------------

    @property
    def embedder(self) -> str:
        """The name of the model that embeds its records and queries."""
        return embedder_of(self.embeddings)

    @property
    def lineage(self) -> str | None:
        """A name by which other processes know this store again; None while it is in this process alone. Public."""
        return None if self._database.is_in_memory else self._collection.identity

    @property
    def owners(self) -> Owners:
        """The owners' keys, by number: all of them. ``owner_count`` is their number."""
        rows = self._ask(f"SELECT name FROM {self._collection.owners} ORDER BY number")
        return Owners(decoded(bytes(name)) for (name,) in rows)

    @property
    def owner_count(self) -> int:
        """The number of owners."""
        return int(self._ask(f"SELECT count(*) FROM {self._collection.owners}")[0][0])

    def __len__(self) -> int:
        """The number of exemplars."""
        return int(self._ask(f"SELECT count(*) FROM {self._collection.exemplars}")[0][0])

    def _ask(self, query: str) -> list[Any]:
        with self.reading() as view:
            return view.ask(query)

    # -- reading (the private side) ------------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[StoreView]:
        """This moment of the store, whatever others change while the ``with`` block lasts. Private.

        It holds a connection, so end it soon. Before it starts, watchers hear what was forgotten elsewhere. Readings
        within each other, in one thread, are one.
        """
        database = self._database
        if self._here.view is not None:
            yield self._here.view
            return
        with ExitStack() as ends:
            try:
                with database.following:
                    view = self._followed(ends.enter_context(database.moment()))
                    self._here.view = view
                    if view.moment.entry > self._seen:
                        self._tell_watchers(view)
                yield view
            finally:
                if (ended := self._here.view) is not None:
                    ended.connection = None
                self._here.view = None

    def _followed(self, connection: Connection) -> StoreView:
        """This transaction's moment, to which what is in memory has followed."""
        collection = self._collection
        moment = moment_of(connection, collection)
        if moment.identity != collection.identity or moment.entry < self._seen:
            raise StoreFileChanged(
                f"the collection {collection.name!r} is another one, or older, than this process has read: owners who "
                "were forgotten since may be in it; open the store in a new process"
            )
        memory = self._memory
        if len(memory.numbers) != moment.next_number:
            memory.numbers = np.arange(moment.next_number)
        matrix = memory.matrix
        view = StoreView(collection, connection, moment, memory.numbers, matrix, self._load)
        if matrix is not None and matrix.entry < moment.entry:
            went = view.went_since(matrix.entry)
            memory.matrix = view.known = matrix.followed(moment.entry, went, view.came_since(matrix.entry))
        return view

    def _tell_watchers(self, view: StoreView) -> None:
        """Let watchers hear what went before this moment. They may read; if one fails, all hear it again."""
        if self._watchers and len(ids := view.went_since(self._seen)):
            for watcher in self._watchers:
                watcher(ids.tolist())
        self._seen = view.moment.entry

    def _load(self, view: StoreView) -> Matrix | None:
        """All rows at a reading's moment, in memory; None if none are to be kept."""
        if not self._in_memory:
            return None
        with self._database.loading:
            memory = self._memory
            latest = memory.matrix
            if latest is not None and latest.entry == view.moment.entry:
                return latest
            nothing = np.empty(0, np.int64)
            made = Matrix.empty(self.dimension).followed(view.moment.entry, nothing, view.came_since(0))
            if latest is None:
                memory.matrix = made
            return made

    def refresh(self) -> bool:
        """Take over what other processes have changed; whether there was anything. Every reading does it."""
        moment = self._database.run(partial(moment_of, collection=self._collection), "read")
        if (moment.identity, moment.entry) == (self._collection.identity, self._seen):
            return False
        with self.reading():
            return True

    def load_vectors(self) -> None:
        """Have all vectors in memory that a threshold needs, so that the first question need not wait for them."""
        with self.reading() as view:
            view.matrix()

    def close(self) -> None:
        """Close the connections, and drop the vectors in memory. A store in memory is gone then."""
        self._memory.matrix = None
        self._database.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dimension} dimensions)"

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("a store is not pickled or copied: open it again by its address, or load() it")

    # -- queries -------------------------------------------------------------------------------------------------------

    def embed_query(self, text: str) -> Vectors:
        """A query's embedding, scaled to norm 1. Public. Raises `ModelUnavailable`, `StoreError` for a wrong size."""
        return embed_query(self.embeddings, text, self.dimension)

    async def aembed_query(self, text: str) -> Vectors:
        """`embed_query`, without blocking the event loop."""
        return await aembed_query(self.embeddings, text, self.dimension)

    # -- changes -------------------------------------------------------------------------------------------------------

    def add(
        self,
        records: Iterable[Mapping[str, Any]],
        *,
        owner_key: str | None = None,
        ids: Sequence[int] | None = None,
        vectors: Vectors | None = None,
        progress: bool = False,
    ) -> list[int]:
        """Add records and return their ids. All of them, or none if one is bad. An owner that exists grows.

        ``owner_key`` defaults to the store's own. Raises `InvalidRecords`; `StoreError` if the model or the database
        cannot be used. Other processes see them from their next reading on.
        """
        own = self._collection.keys
        keys = own if owner_key is None else own._replace(owner_key=owner_key)
        batch = check_records(records, keys, ids)
        if not batch.texts:
            return []
        matrix = batch.embed(self.embeddings, vectors, self.dimension, progress=progress, batch=self.batch)
        arrival = Arrival(batch, matrix, [""] * len(matrix))
        came, _ = self._database.run(partial(tables.change, collection=self._collection, arrival=arrival))
        return came

    def _change(self, arrival: Arrival | None, gone: Sequence[str]) -> None:
        """Remove these documents and those that are replaced, and add the arrivals, in one step.

        An owner who has a document before and after stays. An owner without a name goes with the exemplar that it is.
        For `maintenance` and whatever follows a source: it is not a forgetting, so ledgers keep the owners' marks.
        """
        work = partial(tables.change, collection=self._collection, arrival=arrival, gone=gone)
        _, went = self._database.run(work)
        if went:
            try:
                self.refresh()
            finally:
                self._tidy()

    def forget(self, owner: str | int) -> int:
        """Remove an owner for good and return how many exemplars went. Raises `UnknownOwner`, `StoreError`.

        One transaction: other processes no longer see the owner from their next reading on. Before its commit each
        ledger whose budgets are used with this store in this process begins to forget the owner, and after it they end;
        ``dpicl forget`` names further ledgers. What was released once of this store (`released_once`: heads,
        demonstrations) stays as it is: a `PrivacyWarning` names it.

        On SQLite the owner's words are overwritten in the file, and its log is emptied. While another process reads,
        the log stays as it is (`PrivacyWarning`), until the next `maintenance`. On PostgreSQL the tables are vacuumed,
        if this role may do so and no earlier reading is open, else later by autovacuum. It overwrites nothing: until a
        later row takes vacuumed space, the old bytes may still lie in the table's file; ``VACUUM FULL`` writes a new
        one. Write-ahead logs, replicas and backups hold what they held until they are recycled. If that matters,
        encrypt the disk, and let archives expire.

        In this process, the store's vectors of the owner are overwritten. Other copies (the caller's records, Python
        strings, prompts, buffers of libraries) are freed, and freed memory keeps its bytes until it is used again: end
        the process if that matters. Copies made elsewhere (backups, a model server's cache) are beyond its reach.

        A keyed hash of the owner stays, and the owner's number as a gap: the data file of a collection that follows one
        does not bring the owner back. If the store cannot be written, call it again: the owner gets no new tickets.
        """
        ends: list[Callable[[], object]] = [self.refresh]
        self.mark_keys()  # before the transaction, which another connection's would wait for
        ids = self._database.run(partial(self._leave, owner=str(owner), ends=ends))
        try:
            self._tell(ends)
        finally:
            if not self._tidy():
                warnings.warn(NOT_YET, PrivacyWarning, stacklevel=2)
        return len(ids)

    def _leave(self, connection: Connection, owner: str, ends: list[Callable[[], object]]) -> list[int]:
        """Delete an owner, after its ledgers have heard, and return its exemplars' ids. ``ends`` gets the calls that
        end it there.

        A ledger that fails keeps its mark: an owner who comes again has what it had left. Its error comes at the end.
        """
        gone = tables.delete(connection, self._collection, owner, self._delete_keys)
        if gone.identity is not None:
            mark_of = partial(owner_mark, content=gone.identity.content, named=gone.identity.is_named)
            for watcher in self._owner_watchers:
                try:
                    ends.append(watcher(self.mark_keys(), mark_of))
                except Exception as error:
                    ends.append(partial(_fail, error))
        return gone.ids

    def _tell(self, ends: Iterable[Callable[[], object]]) -> None:
        """Make all of these calls. The first error, or an interrupt, is raised when all are made."""
        failed: BaseException | None = None
        for end in ends:
            try:
                end()
            except BaseException as error:
                if failed is None or not isinstance(error, Exception):
                    failed = error
        if failed is not None:
            raise failed
        if released := self.released_once:
            warnings.warn(
                f"released once of this store, and not changed by forgetting: {'; '.join(released)}. If the owner is "
                "to leave them too, make each anew, which takes a new share of budget, and remove the old one",
                PrivacyWarning,
                stacklevel=3,
            )

    def _tidy(self) -> bool:
        return self._database.tidy(self._collection.owners, self._collection.exemplars)

    def on_forget(self, watcher: Watcher) -> None:
        """Call ``watcher(ids)`` with the ids of the exemplars that went: at the end of every `forget` and of every
        change by `maintenance` that removed some, and when a reading finds that another process has removed some. The
        store keeps the watcher."""
        self._watchers.append(watcher)

    def on_owner_forgotten(self, watcher: OwnerWatcher) -> None:
        """At every `forget` of this object, let a ledger whose owners pay with tickets know the owner's mark.

        ``watcher(keys, mark_of)`` gets the store's own keys and the owner's mark by a key, before the owner goes,
        unless an equal exemplar, its own owner too, still has that mark. What it answers is called when the owner is
        gone (see `budget.tickets`). Another process tells its own watchers: a ledger is shared, and needs to hear
        it once. The store keeps the watchers.
        """
        self._owner_watchers.append(watcher)

    def _delete_keys(self, documents: Sequence[str]) -> None:
        """Before an owner with these documents goes. `StoreError`; once it is gone nobody knows which they were."""
        for manager in self._record_managers:
            for start in range(0, len(documents), _KEYS):
                _, fault = attempt(manager.delete_keys, documents[start : start + _KEYS])
                if fault:
                    raise StoreError(f"the record manager fails ({fault}): nobody was forgotten; call it again")

    # -- beside the records --------------------------------------------------------------------------------------------

    def _take_notes(self, notes: Notes) -> None:
        """Remember what an earlier release wrote down beside the data. A store without exemplars takes its first key;
        in any case this process knows owners by all."""
        self._noted_keys = notes.keys
        if notes.keys and notes.keys[0] != self._own_key():
            self._database.run(partial(tables.take_owner_key, name=self._collection.name, key=notes.keys[0]))
            self._key = None
        self._open_budgets(notes.budgets)

    def mark_keys(self) -> tuple[bytes, ...]:
        """The secret keys by which ledgers may know this store's owners, its own first. Private.

        Its own stands in its database. A store in memory has none. Raises `StoreError`.
        """
        own = self._own_key()
        keys = [] if own is None else [own]
        return tuple(dict.fromkeys([*keys, *self._noted_keys]))

    def _own_key(self) -> bytes | None:
        if self._key is None and self.lineage is not None:
            self._key = self._database.run(partial(tables.owner_key, name=self._collection.name), "read")
        return self._key

    @property
    def remembers(self) -> bool:
        """True if it knows budgets again that another process, or an earlier one, opened on it."""
        return self.lineage is not None

    @property
    def budgets(self) -> tuple[OpenedBudget, ...]:
        """The budgets that were opened on this store, here or by another process, as far as it remembers."""
        return self._database.run(partial(tables.budgets, name=self._collection.name), "read")

    def remember_budget(self, budget: OpenedBudget) -> tuple[OpenedBudget, ...]:
        """Remember that a budget was opened on this store, through every change of its records; the others that were.

        A `PrivacyWarning` if it cannot be written down: then this process remembers alone.
        """
        known: tuple[OpenedBudget, ...] = ()
        try:
            known = self.budgets
            self._open_budgets([budget])
        except StoreError as error:
            warnings.warn(
                f"the store cannot write down that the budget {budget.name!r} is used with its data ({error}): a "
                "second budget that is opened elsewhere will not be noticed",
                PrivacyWarning,
                stacklevel=3,
            )
        return tuple(each for each in known if each.place != budget.place)

    def _open_budgets(self, budgets: Sequence[OpenedBudget]) -> None:
        known = self.budgets
        if not set(merged(known, budgets)) <= set(known):  # else it would wait for a change that is under way
            self._database.run(partial(tables.budgets, name=self._collection.name, new=budgets))

    @property
    def released_once(self) -> tuple[str, ...]:
        """The heads and demonstrations that were made of this store, in words, here or by another process, as far as it
        remembers. Public. They stay as they are, so `forget` warns of them (`PrivacyWarning`)."""
        return self._database.run(partial(tables.releases, name=self._collection.name), "read")

    def remember_release(self, release: str) -> None:
        """Remember what is about to be released once of this store. If it cannot be written, nothing is remembered."""
        with suppress(StoreError):
            self._database.run(partial(tables.releases, name=self._collection.name, new=release))

    def _forgotten(self) -> Callable[[bytes, bool], bool]:
        """Return the test of a forgotten owner: a function of its key and True, or of its exemplar's content and False.

        As of now: ask after the reading whose owners it is about. Private.
        """
        key, marks = self._database.run(partial(tables.forgotten, name=self._collection.name), "read")
        return lambda identity, is_named: bool(marks) and owner_mark(key, identity, named=is_named) in marks


def _fail(error: Exception) -> NoReturn:
    raise error
