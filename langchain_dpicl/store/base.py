"""The interface of a store for selection, budgets and samplers, and the parts that all stores share.

Owners have numbers: whole numbers that a store gives out in ascending order and never gives again. Rows are exemplars'
places within one `StoreView`, and mean nothing outside of it.

A ledger recognises an owner by a keyed hash, in every process and after every restart, without a name. An owner with a
key is recognised by its key. If each exemplar is its own owner, it is recognised by its content, so exemplars of equal
content have one mark, and a ledger takes them for one owner.

Nothing here is differentially private: a store is the private side. Its ``repr`` shows counts, its errors name
positions and keys, and it refuses to be pickled or deep-copied, because a copy could not be made to forget.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import PrivacyWarning, StoreError, UnsafeConfigurationError
from langchain_dpicl.private import PrivateRecords
from langchain_dpicl.store.filters import MetadataFilter
from langchain_dpicl.store.notes import DataNotes, OpenedBudget, merged
from langchain_dpicl.store.records import (
    Batch,
    Owners,
    RecordKeys,
    Vectors,
    aembed_query,
    check_records,
    embed_query,
)

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings
    from langchain_core.indexing import RecordManager

    from langchain_dpicl.store.parents import MemberDocstore
    from langchain_dpicl.store.standin import MemberVectorStore

Numbers = NDArray[np.int64]

Watcher = Callable[[Sequence[int]], None]
MarkOf = Callable[[bytes], bytes]
"""An owner's mark by a key."""
OwnerWatcher = Callable[[Sequence[bytes], MarkOf], Callable[[], object]]
"""Gets a store's own keys (see `PrivateStore.mark_keys`), and an owner's mark by a key."""

MARK = 16
"""Bytes of a mark. Two of a million owners share one with probability 1.5e-27."""


def embedder_of(embeddings: object) -> str:
    """The name of an embedding model: its class, and the model that it names."""
    named = (getattr(embeddings, name, None) for name in ("model", "model_name", "deployment", "path"))
    model = next(
        (str(found) for found in named if isinstance(found, (str, os.PathLike)) and str(found)),
        "",
    )
    return f"{type(embeddings).__name__}({model})"


@dataclass(frozen=True, repr=False)
class Held:
    """A record as a store holds it. Private: its id as a document, its packed content, and its owner's key.

    The id is the one that it came with, or ``#`` and its number if it came without.
    """

    document: str
    content: bytes
    owner: str


@dataclass(frozen=True, repr=False)
class Arrival:
    """Checked records, each with its id as a document and its vector. Private."""

    batch: Batch
    matrix: Vectors
    documents: Sequence[str]


class Parting(NamedTuple):
    """The news of an owner for `_tell`: its exemplars' ids, and the calls that end it in the ledgers."""

    ids: Sequence[int] = ()
    ends: Sequence[Callable[[], object]] = ()
    failed: Exception | None = None

    def end(self) -> None:
        """Let the ledgers end it, and nobody else hear of it."""
        for end in self.ends:
            end()


class StoreView(ABC):
    """One moment of a store: all that is read through it belongs together. Private."""

    numbers: Numbers
    """The owners' numbers, ascending: one coin for each gives every owner one. Nobody may have some of them."""

    @abstractmethod
    def eligible(self, query: Vectors | None, threshold: float, wanted: MetadataFilter | None = None) -> Numbers:
        """The numbers, ascending, of all owners with an exemplar whose similarity to the query reaches the threshold
        and that passes the filter: one exemplar for both. Without a query, that passes the filter.

        Exact: whether an owner is among them is a function of its own exemplars, the query and the filter alone. (The
        nearest k, or an approximate index whose cells or links depend on the data, would not be: there one owner's
        presence decides on another.)
        """

    @abstractmethod
    def passing(self, rows: Numbers, wanted: MetadataFilter) -> NDArray[np.bool_]:
        """Return a mask of the rows whose exemplars pass a filter. One that cannot be read does not pass."""

    @abstractmethod
    def rows_of(self, owners: Numbers) -> tuple[Numbers, Numbers]:
        """Rows of these owners, and for each row the position of its owner in ``owners``. A forgotten owner has none.

        Cost: the rows alone.
        """

    @abstractmethod
    def similarity(self, rows: Numbers, query: Vectors) -> NDArray[np.float32]:
        """The inner product of each of these rows' vectors with a query's, by which `eligible` decides. Reads no text.

        Equal to the last bit whichever other rows there are, here and in `eligible`.
        """

    @abstractmethod
    def vectors(self, rows: Numbers) -> Vectors:
        """The vectors of these rows, a copy. Reads no text."""

    @abstractmethod
    def read(self, rows: Numbers) -> list[dict[str, Any]]:
        """The exemplars at these rows, as fresh dictionaries; an empty one for a record that cannot be read."""

    @abstractmethod
    def records(self, rows: Numbers) -> list[Held]:
        """These rows as the store holds them, owners included: for maintenance, never for a member."""

    @abstractmethod
    def rows_with(self, documents: Sequence[str]) -> Numbers:
        """The rows of these documents, as far as there are any."""

    @abstractmethod
    def ids_of(self, rows: Numbers) -> list[int]:
        """The stable ids of these rows."""

    @abstractmethod
    def marks(self, owners: Numbers, key: bytes) -> list[bytes]:
        """A keyed hash of each of these owners (see `owners`), made in this process: of its key, or of the exemplar
        that it is. b"" for a forgotten owner."""


class PrivateStore(PrivateRecords, ABC):
    """Private exemplars with their owners, in memory or in a database."""

    def __init__(self, embeddings: Embeddings, keys: RecordKeys, dimension: int) -> None:
        self.embeddings = embeddings
        self.input_key, self.output_key, self.owner_key = keys
        self.dimension = dimension
        self._watchers: list[Watcher] = []
        self._record_managers: list[RecordManager] = []
        self._owner_watchers: list[OwnerWatcher] = []
        self._notes: list[DataNotes] = []

    @property
    def embedder(self) -> str:
        """The name of the model that embeds its records and queries."""
        return embedder_of(self.embeddings)

    @property
    @abstractmethod
    def owners(self) -> Owners:
        """The owners' keys, a copy. ``owner_count`` is their number."""

    @property
    @abstractmethod
    def owner_count(self) -> int:
        """The number of owners, without a copy of their keys."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of exemplars."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[StoreView]:
        """A moment of the store, to read from while the ``with`` block lasts. Private."""

    def refresh(self) -> bool:
        """Take over what other processes have changed; whether there was anything. Every reading does it."""
        return False

    def load_vectors(self) -> None:
        """Have all vectors in memory that a threshold needs, so that the first question need not wait for them."""

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

        ``owner_key`` defaults to the store's own. Raises `InvalidRecords`; `StoreError` if the model or the store
        cannot be used. In memory the records are in this process alone until the next `save`; if another process has
        given their ids away by then, they get new ones, and `on_forget` names the old. In a database other workers see
        them from their next reading on.
        """
        keys = RecordKeys(
            self.input_key,
            self.output_key,
            self.owner_key if owner_key is None else owner_key,
        )
        batch = check_records(records, keys, ids)
        if not batch.texts:
            return []
        return self._insert(batch, batch.embed(self.embeddings, vectors, self.dimension, progress))

    @abstractmethod
    def _insert(self, batch: Batch, matrix: Vectors) -> list[int]:
        """Add checked records with their vectors; the ids."""

    @abstractmethod
    def forget(self, owner: str | int) -> int:
        """Remove an owner for good and return how many exemplars went. Raises `UnknownOwner`."""

    def on_forget(self, watcher: Watcher) -> None:
        """Call ``watcher(ids)`` with the ids of the exemplars that went: at the end of every `forget` and of every
        change by `maintenance` that removed some, and when a reading finds that another process has removed some. The
        store keeps the watcher."""
        self._watchers.append(watcher)

    def _hear(self, ids: Sequence[int]) -> None:
        if len(ids):
            for watcher in self._watchers:
                watcher(ids)

    def on_owner_forgotten(self, watcher: OwnerWatcher) -> None:
        """At every `forget` of this object, let a ledger whose owners pay with tickets know the owner's mark.

        ``watcher(keys, mark_of)`` gets the store's own keys and the owner's mark by a key, before the owner goes,
        unless an equal exemplar, its own owner too, still has that mark. What it answers is called when the owner is
        gone (see `budget.tickets`). Another process tells its own watchers: a ledger is shared, and needs to hear
        it once. The store keeps the watchers.
        """
        self._owner_watchers.append(watcher)

    def _leave(self, ids: list[int], identity: bytes | None, is_named: bool) -> Parting:
        """Tell the ledgers of an owner that is about to go.

        ``identity`` is hashed to its marks: its key (``is_named``), or the content of the exemplar that it was; None if
        an equal exemplar, its own owner too, has the same marks. A ledger that fails keeps its mark: an owner who comes
        again has what it had left.
        """
        ends: list[Callable[[], object]] = []
        failed: Exception | None = None
        if identity is None:
            return Parting(ids)
        mark_of = partial(owner_mark, content=identity, named=is_named)
        for watcher in self._owner_watchers:
            try:
                ends.append(watcher(self.mark_keys(), mark_of))
            except Exception as error:
                failed = failed or error
        return Parting(ids, ends, failed)

    def _tell(self, gone: Parting) -> None:
        """Call the watchers about an owner that went."""
        told: list[Callable[[], object]] = [
            *(partial(watcher, gone.ids) for watcher in self._watchers),
            *gone.ends,
        ]
        failed: BaseException | None = gone.failed
        for tell in told:  # if a ledger cannot be written, others still hear
            try:
                tell()
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

    def keep_notes(self, *notes: DataNotes | str | os.PathLike[str]) -> None:
        """Remember opened budgets in this file too, which stands beside the data file that the records came from.

        A store that is made anew from a data file then knows what was opened on the data before, and ledgers know its
        owners again. Commands and servers that read a data file do so by themselves, in ``FILE.dpicl``. Raises
        `InvalidParameter` for what is no path.
        """
        own = self._own_key(make=False)
        for each in notes:
            kept = each if isinstance(each, DataNotes) else DataNotes(each)
            if own is not None:
                kept.adopt(own)
            if kept.path not in (known.path for known in self._notes):
                self._notes.append(kept)

    def mark_keys(self, *, make: bool = False) -> tuple[bytes, ...]:
        """The secret keys by which ledgers may know this store's owners, its own first. Private.

        Its own stands in its database or file, a second one in its notes. A store in memory alone has none. ``make``:
        they are made where they are missing. Raises `StoreError`, `StoreFileError`.
        """
        own = self._own_key(make=make)
        keys = [] if own is None else [own]
        for notes in self._notes:
            if (noted := notes.key(make=make and not keys)) is not None:
                keys.append(noted)
        return tuple(dict.fromkeys(keys))

    @abstractmethod
    def _own_key(self, *, make: bool) -> bytes | None:
        """The key that stands in the store's database or file."""

    @property
    def remembers(self) -> bool:
        """Return whether it knows budgets again that another process, or an earlier one, opened on it."""
        return self.lineage is not None or bool(self._notes)

    @property
    def budgets(self) -> tuple[OpenedBudget, ...]:
        """The budgets that were opened on this store, here or by another process, as far as it remembers."""
        return merged(self._opened(), *(notes.budgets() for notes in self._notes))

    def remember_budget(self, budget: OpenedBudget) -> tuple[OpenedBudget, ...]:
        """Remember that a budget was opened on this store, through every change of its records; the others that were.

        Whatever one place knows, the store's own or its notes, is then known in all. A `PrivacyWarning` if it cannot be
        written down: then this process remembers alone.
        """
        known: tuple[OpenedBudget, ...] = ()
        for recall in (self._opened, *(notes.budgets for notes in self._notes)):
            with suppress(StoreError):
                known = merged(known, recall())
        known = merged(known, [budget])
        for remember in (self._open_budgets, *(notes.remember for notes in self._notes)):
            try:
                remember(known)
            except StoreError as error:
                warnings.warn(
                    f"the store cannot write down that the budget {budget.name!r} is used with its data ({error}): a "
                    "second budget that is opened elsewhere will not be noticed",
                    PrivacyWarning,
                    stacklevel=3,
                )
        return tuple(each for each in known if each.place != budget.place)

    @abstractmethod
    def _opened(self) -> tuple[OpenedBudget, ...]:
        """The budgets in the store's own database or file, or memory, as they are now."""

    @abstractmethod
    def _open_budgets(self, budgets: Sequence[OpenedBudget]) -> None:
        """Keep these budgets there. Raises `StoreError`."""

    @property
    @abstractmethod
    def released_once(self) -> tuple[str, ...]:
        """The heads and demonstrations that were made of this store, in words, here or by another process, as far as it
        remembers. Public. They stay as they are, so `forget` warns of them (`PrivacyWarning`)."""

    @abstractmethod
    def remember_release(self, release: str) -> None:
        """Remember what is about to be released once of this store."""

    @property
    def lineage(self) -> str | None:
        """A name by which other processes know this store again; None while it is in this process alone. Public."""
        return None

    def embed_query(self, text: str) -> Vectors:
        """A query's embedding, scaled to norm 1. Public. Raises `ModelUnavailable`, `StoreError` for a wrong size."""
        return embed_query(self.embeddings, text, self.dimension)

    async def aembed_query(self, text: str) -> Vectors:
        """`embed_query`, without blocking the event loop."""
        return await aembed_query(self.embeddings, text, self.dimension)

    def as_vectorstore(self) -> MemberVectorStore:
        """A LangChain vector store to build an app over: within a member of a `PrivateEnsemble` each search reads that
        member's own exemplars, and outside of one it raises `UnsafeConfigurationError`. See `MemberVectorStore`.
        """
        from langchain_dpicl.store.standin import MemberVectorStore

        return MemberVectorStore(self.embeddings, self.input_key, self.dimension)

    def as_docstore(self, id_key: str = "doc_id") -> MemberDocstore:
        """A LangChain document store that gives a member the whole documents of its own bucket's chunks, for a
        ``ParentDocumentRetriever`` over `as_vectorstore`. The store's records must come from `split_with_parents`.
        """
        from langchain_dpicl.store.parents import MemberDocstore

        return MemberDocstore(self.input_key, id_key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dimension} dimensions)"

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("a store is not pickled or copied: save() and load() it, or open() it again")


def owner_mark(key: bytes, content: bytes, *, named: bool) -> bytes:
    """BLAKE2b of an owner's key or of an exemplar's content, keyed, and for one purpose."""
    person = b"dpicl owner" if named else b"dpicl exemplar"
    return hashlib.blake2b(content, digest_size=MARK, key=key, person=person).digest()
