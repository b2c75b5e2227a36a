"""The private exemplars: texts, owners and vectors, on FAISS.

Layout. Vectors lie in an exact inner-product FAISS index under stable ids; texts lie as UTF-8 in one byte arena, so
that forgetting can overwrite them (a Python string cannot be overwritten) and so that a million exemplars cost little
more than their vectors. Owners are small integers, in order of first appearance.

Processes that have one file. Every save raises the file's generation. A process looks at the file (one ``stat``)
whenever a reading begins, so before every release, and takes over what is new: owners who were forgotten go here too,
and records that came are added. What was added here and not saved stays, except the records of an owner who was
forgotten in the file: they go with it. See `shared` for who may write.

Nothing here is differentially private: a store is the private side. Its ``repr`` shows counts, its errors name
positions and keys, and it refuses to be pickled or deep-copied, because a copy could not be made to forget.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import (
    InvalidParameter,
    InvalidRecords,
    StoreFileChanged,
    StoreFileError,
    UnknownOwner,
    UnsafeConfigurationError,
)
from langchain_dpicl.store import file as store_file
from langchain_dpicl.store import intake, nearness, takeover
from langchain_dpicl.store.arena import Arena
from langchain_dpicl.store.base import Numbers, OwnerWatcher, PrintWatcher, PrivateStore, Reading
from langchain_dpicl.store.file import Contents, OpenedBudget, State
from langchain_dpicl.store.intake import Vectors, unpack
from langchain_dpicl.store.marks import SKETCH, owner_mark, sketch_hash
from langchain_dpicl.store.owners import OwnerKeys, Owners, OwnerSlots
from langchain_dpicl.store.shared import SharedFile

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import VectorStore

Ids = NDArray[np.int64]

_ATTEMPTS = 10


class ExemplarStore(PrivateStore, Reading):
    """Private exemplars with their owners, searchable by exact inner product.

    Build one with `from_records` or `from_texts`, take over a collection with `from_documents` or `from_vectorstore`,
    or `load` a saved one. Vectors are scaled to norm 1 on their way in (a zero vector stays zero), so an inner product
    is a cosine. Owners are the unit of privacy: all exemplars of one owner enter and leave together. Thread-safe;
    readers see whole additions and whole removals only.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        *,
        input_key: str,
        output_key: str | None,
        owner_key: str | None,
        dimension: int,
    ) -> None:
        self.embeddings = embeddings
        self.input_key = input_key
        self.output_key = output_key
        self.owner_key = owner_key
        self.dimension = dimension
        self.lock = threading.RLock()
        self._index = _new_index(dimension)
        self._texts = Arena()
        self._ids: Ids = np.empty(0, np.int64)
        self._owner_of: NDArray[np.int32] = np.empty(0, np.int32)
        self._owner_keys = OwnerKeys()
        self._owner_slots = OwnerSlots()
        self._lives: NDArray[np.int64] = np.empty(0, np.int64)
        self._numbers: Numbers = np.empty(0, np.int64)
        self._next_id = 0
        self._next_number = 0
        self._by_owner: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._state = State(store_file.new_name(), 0)
        self._files: list[SharedFile] = []
        self._has_unsaved = False
        self._readings = 0
        self._watchers: list[Callable[[Sequence[int]], None]] = []
        self._owner_watchers: list[tuple[bytes, OwnerWatcher]] = []
        self._print_watchers: list[tuple[bytes, PrintWatcher]] = []

    # -- building ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_records(
        cls,
        records: Iterable[Mapping[str, Any]],
        embeddings: Embeddings,
        *,
        input_key: str = "input",
        output_key: str | None = "output",
        owner_key: str | None = None,
        ids: Sequence[int] | None = None,
        vectors: Vectors | None = None,
        progress: bool = True,
    ) -> ExemplarStore:
        """Build a store from mappings.

        ``owner_key`` names the key that holds the owner; without it each record is its own owner. ``vectors`` (rows of
        float32) replaces the embedding of the inputs. Raises `InvalidRecords` for an empty input, a missing or empty
        key, an embedding with NaN or infinity, a repeated id; the message names the record's position, never its text.
        """
        rows = list(records)
        texts, owners = intake.check_records(rows, input_key, output_key, owner_key)
        if not rows:
            raise InvalidRecords("the store would be empty: at least one record is needed")
        matrix = (
            intake.embed(embeddings, texts, progress) if vectors is None else intake.as_matrix(vectors, len(rows), None)
        )
        store = cls(
            embeddings,
            input_key=input_key,
            output_key=output_key,
            owner_key=owner_key,
            dimension=matrix.shape[1],
        )
        store._append(intake.pack(rows, owner_key), owners, matrix, ids)
        return store

    @classmethod
    def from_texts(
        cls,
        texts: Sequence[str],
        embeddings: Embeddings,
        *,
        outputs: Sequence[str] | None = None,
        owners: Sequence[str] | None = None,
        ids: Sequence[int] | None = None,
        vectors: Vectors | None = None,
        progress: bool = True,
    ) -> ExemplarStore:
        """Build a store from texts, with their outputs and owners beside them (same length) where they exist."""
        for name, other in (("outputs", outputs), ("owners", owners)):
            if other is not None and len(other) != len(texts):
                raise InvalidRecords(f"{name} has {len(other)} entries for {len(texts)} texts")
        records = [
            {"input": text}
            | ({} if outputs is None else {"output": outputs[i]})
            | ({} if owners is None else {"owner": owners[i]})
            for i, text in enumerate(texts)
        ]
        return cls.from_records(
            records,
            embeddings,
            input_key="input",
            output_key=None if outputs is None else "output",
            owner_key=None if owners is None else "owner",
            ids=ids,
            vectors=vectors,
            progress=progress,
        )

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[Document],
        embeddings: Embeddings,
        *,
        input_key: str = "text",
        output_key: str | None = None,
        owner_key: str | None = None,
        vectors: Vectors | None = None,
        progress: bool = True,
    ) -> ExemplarStore:
        """Build a store from LangChain documents.

        An exemplar is the document's text under ``input_key``, with its metadata beside it; ``output_key`` and
        ``owner_key`` name entries of the metadata. The owner's entry decides and goes no further: no member sees it.
        Documents' ids are not kept. Raises `InvalidRecords`, which names the document's position and the key: no text,
        no owner, metadata that JSON cannot represent, metadata under ``input_key``.
        """
        records = takeover.records_of(documents, input_key, owner_key)
        return cls.from_records(
            records,
            embeddings,
            input_key=input_key,
            output_key=output_key,
            owner_key=owner_key,
            vectors=vectors,
            progress=progress,
        )

    @classmethod
    def from_vectorstore(
        cls,
        vectorstore: VectorStore,
        *,
        embeddings: Embeddings | None = None,
        input_key: str = "text",
        output_key: str | None = None,
        owner_key: str | None = None,
    ) -> ExemplarStore:
        """Take over a collection as it stands: texts, metadata and vectors. Nothing is embedded again.

        For LangChain's ``InMemoryVectorStore``, and langchain-community's ``FAISS`` and ``SKLearnVectorStore``. The
        rest as in `from_documents`; ``embeddings`` defaults to the collection's own model, which must be the one that
        made its vectors: it embeds queries.

        Vectors are scaled to norm 1 on their way in, so the store compares by cosine. A collection that was searched by
        cosine, or that holds vectors of norm 1, ranks as it did, by inner product and by Euclidean distance alike;
        another may rank differently. It is a copy: what is added to or deleted from the collection later does not
        reach the store, and `forget` does not reach the collection.

        Raises `StoreError` for any other collection, whose documents `from_documents` takes.
        """
        documents, vectors = takeover.contents_of(vectorstore)
        own = vectorstore.embeddings if embeddings is None else embeddings
        if own is None:
            raise InvalidParameter("embeddings", None, "given where the collection does not name its embedding model")
        return cls.from_documents(
            documents, own, input_key=input_key, output_key=output_key, owner_key=owner_key, vectors=vectors
        )

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

        ``owner_key`` defaults to the one that the store was made with. Until the next `save` the records are in this
        process alone. Where another process has given their ids away by then, they get new ones, and `on_forget` names
        the old.
        """
        owner_key = self.owner_key if owner_key is None else owner_key
        rows = list(records)
        if not rows:
            return []
        texts, owners = intake.check_records(rows, self.input_key, self.output_key, owner_key)
        matrix = (
            intake.embed(self.embeddings, texts, progress)
            if vectors is None
            else intake.as_matrix(vectors, len(rows), self.dimension)
        )
        if matrix.shape[1] != self.dimension:
            raise InvalidRecords(f"embeddings have {matrix.shape[1]} dimensions, the store has {self.dimension}")
        return self._append(intake.pack(rows, owner_key), owners, matrix, ids)

    def _append(
        self,
        payloads: Sequence[bytes],
        owners: Sequence[str] | None,
        matrix: Vectors,
        ids: Sequence[int] | None,
    ) -> list[int]:
        with self.lock:
            self.refresh()
            new_ids = self._fresh_ids(len(payloads), ids)
            names = [f"#{i}" for i in new_ids.tolist()] if owners is None else owners
            self._enter(payloads, self._slots_for(names), matrix, new_ids)
            self._has_unsaved = True
        return [int(i) for i in new_ids]

    def _slots_for(self, names: Sequence[str]) -> NDArray[np.int32]:
        """The slots of these owners. Those who are new get one, at the end."""
        slots = np.empty(len(names), np.int32)
        for i, key in enumerate(names):
            slot = self._owner_slots.get(key)
            if slot is None:
                slot = len(self._owner_keys)
                self._owner_slots[key] = slot
                self._owner_keys.append(key)
            slots[i] = slot
        self._number_the_new()
        return slots

    def _enter(self, payloads: Sequence[bytes], slots: NDArray[np.int32], matrix: Vectors, ids: Ids) -> None:
        """Append rows."""
        self._index.add_with_ids(matrix, ids)
        self._texts.extend(payloads)
        self._ids = np.concatenate([self._ids, ids])
        self._owner_of = np.concatenate([self._owner_of, slots])
        self._next_id = max(self._next_id, int(ids.max()) + 1)
        self._by_owner = None

    def _number_the_new(self) -> None:
        """Give owners at the end, who have no number so far, the next ones, and a life unless they have one."""
        new = len(self._owner_keys) - len(self._numbers)
        self._numbers = np.append(self._numbers, np.arange(self._next_number, self._next_number + new, dtype=np.int64))
        self._next_number += new
        self._lives = np.append(self._lives, store_file.new_lives(len(self._owner_keys) - len(self._lives)))

    def _fresh_ids(self, count: int, ids: Sequence[int] | None) -> Ids:
        if ids is None:
            return np.arange(self._next_id, self._next_id + count, dtype=np.int64)
        if len(ids) != count:
            raise InvalidRecords(f"ids has {len(ids)} entries for {count} records")
        if not all(isinstance(i, (int, np.integer)) and 0 <= int(i) < 2**62 for i in ids):
            raise InvalidRecords("ids must be integers from 0 to 2**62 - 1")
        fresh = np.asarray(ids, np.int64)
        if len(np.unique(fresh)) != count or np.isin(fresh, self._ids).any():
            raise InvalidRecords("ids must be unique: one occurs twice, or is in the store already")
        return fresh

    # -- reading (the private side) ---------------------------------------------------------------------------------

    @property
    def owners(self) -> Owners:
        """The owners' keys; ``len(store.owners)`` is their number."""
        with self.lock:
            return Owners(tuple(self._owner_keys))

    @property
    def owner_count(self) -> int:
        """The number of owners, without a copy of their keys."""
        return len(self._owner_keys)

    def __len__(self) -> int:
        """The number of exemplars."""
        return len(self._ids)

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """This moment of the store: nobody adds or forgets while the ``with`` block lasts. Private.

        It begins with `refresh`, so with what other processes have written by then.
        """
        with self.lock:
            if not self._readings:
                self.refresh()
            self._readings += 1
            try:
                yield self
            finally:
                self._readings -= 1

    @property
    def places(self) -> int:
        """One coin for each owner."""
        return self.owner_count

    def owners_at(self, places: Numbers) -> Numbers:
        """The owners' numbers, in order of first appearance."""
        return self._numbers[places]

    def eligible(self, query: Vectors, threshold: float) -> Numbers:
        """The numbers of all owners with an exemplar whose similarity to the query reaches the threshold.

        A FAISS range search finds all rows that come within rounding of it, and `similarity`, which computes each from
        its own row alone, decides. So whether an owner is eligible depends on its own vectors and the query.
        """
        with self.lock:
            flat = _flat(self._index)
            slack = nearness.rounding(self.dimension)
            _, _, rows = flat.range_search(query.reshape(1, -1), float(np.float32(threshold - slack)))
            near = rows[self.similarity(rows, query) >= threshold]
            found: Numbers = self._numbers[np.unique(self._owner_of[near])]
            return found

    def rows_of(self, owners: Numbers) -> tuple[Numbers, Numbers]:
        """Rows of these owners, and for each row the position of its owner in ``owners``. Cost: the rows alone."""
        with self.lock:
            if self._by_owner is None:
                order = np.argsort(self._owner_of, kind="stable")
                starts = np.zeros(len(self._owner_keys) + 1, np.int64)
                np.cumsum(np.bincount(self._owner_of, minlength=len(self._owner_keys)), out=starts[1:])
                self._by_owner = (order, starts)
            order, starts = self._by_owner
            slots, there = self._slots_of(owners)
            counts = np.where(there, starts[slots + 1] - starts[slots], 0)
            position = np.repeat(np.arange(len(slots)), counts)
            offset = np.arange(len(position)) - np.repeat(np.cumsum(counts) - counts, counts)
            return order[starts[slots][position] + offset], position

    def _slots_of(self, owners: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
        """Each owner's slot, and whether it is there at all."""
        if not len(self._numbers):
            return np.zeros(len(owners), np.int64), np.zeros(len(owners), np.bool_)
        slots = np.minimum(np.searchsorted(self._numbers, owners), len(self._numbers) - 1)
        return slots, self._numbers[slots] == owners

    def marks(self, owners: Numbers, key: bytes) -> list[bytes]:
        """A keyed hash of each of these owners, b"" for one who is gone: of its key, or of the exemplar that it is."""
        with self.lock:
            slots, there = self._slots_of(owners)
            rows, position = self.rows_of(owners)
            first = np.zeros(len(owners), np.int64)
            first[position[::-1]] = rows[::-1]
            found = zip(slots.tolist(), first.tolist(), there.tolist(), strict=True)
            return [self._mark(slot, row, key) if here else b"" for slot, row, here in found]

    def _mark(self, slot: int, row: int, key: bytes) -> bytes:
        name = self._owner_keys[slot]
        if self._is_named(name):
            return owner_mark(key, name.encode("utf-8", "surrogatepass"), named=True)
        return owner_mark(key, self._texts[row], named=False)

    def _is_named(self, name: str) -> bool:
        """Whether this is a key that somebody gave, and not what an exemplar without an owner is called here."""
        return self.owner_key is not None or not name.startswith("#")

    def read(self, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
        """The exemplars at these rows, as fresh dictionaries. Private."""
        with self.lock:
            return [unpack(self._texts[int(row)]) for row in rows]

    def similarity(self, rows: NDArray[np.int64], query: Vectors) -> NDArray[np.float32]:
        """The inner product of each of these rows' vectors with a query's. Private. Reads no text."""
        with self.lock:
            return nearness.inner_products(self._stored_vectors(), rows, query)

    def ids_of(self, rows: NDArray[np.int64]) -> list[int]:
        """The stable ids of these rows."""
        with self.lock:
            ids: list[int] = self._ids[rows].tolist()
            return ids

    def fingerprint(self, key: bytes) -> tuple[str, ...]:
        """A sketch of whose data this is, by which a ledger recognises them later without keeping a name.

        The 128 least keyed hashes (HMAC-SHA256, 128 bits) of the owners' keys; where each exemplar is its own owner,
        of the exemplars. Two sketches with the same key share a mark only if the stores share an owner; if a share s
        of all owners of both is in both, they share one with probability 1 - (1 - s)^128. Whoever has the key can test
        guesses of an owner's key against it, so it stays beside the ledger's key.
        """
        with self.lock:
            content = self._sketched(range(len(self._owner_keys)), range(len(self._ids)))
            return tuple(heapq.nsmallest(SKETCH, {sketch_hash(key, part) for part in content}))

    def _sketched(self, slots: Iterable[int], rows: Iterable[int]) -> Iterator[bytes]:
        """What a fingerprint hashes of these owners and of their rows."""
        for slot in slots:
            if self._is_named(name := self._owner_keys[slot]):
                yield name.encode("utf-8", "surrogatepass")
        if self.owner_key is None:
            for row in rows:
                yield self._texts[row]

    # -- forgetting -------------------------------------------------------------------------------------------------

    def on_forget(self, watcher: Callable[[Sequence[int]], None]) -> None:
        """Call ``watcher(ids)`` with the ids of the exemplars that went, at the end of every `forget`.

        For whoever keeps something of an exemplar. The store keeps the watcher.
        """
        with self.lock:
            self._watchers.append(watcher)

    def on_owner_forgotten(self, key: bytes, watcher: OwnerWatcher) -> None:
        """Call ``watcher(mark)`` at the end of every `forget`, with the mark (of this ``key``) of the owner that went.

        Not where an equal exemplar, its own owner too, still has that mark. The store keeps the watcher.
        """
        with self.lock:
            self._owner_watchers.append((key, watcher))

    def on_fingerprint_forgotten(self, key: bytes, watcher: PrintWatcher) -> None:
        """Call ``watcher(gone, left)`` at the end of every `forget` of this object: the hashes of this ``key`` that the
        owner had in a `fingerprint` and nobody has now, and the fingerprint of those who are left. The store keeps the
        watcher.
        """
        with self.lock:
            self._print_watchers.append((key, watcher))

    def forget(self, owner: str | int) -> int:
        """Remove an owner for good and return how many exemplars went.

        After it returns the owner is neither in the store nor in the files that it was saved to or loaded from: they
        are rewritten atomically, and the old content is overwritten, where the file system writes in place. Other
        processes with such a file follow before their next release. Each ledger whose budgets are used with this store
        in this process drops what it derived from the owner; ``dpicl forget`` names further ledgers.

        In this process, the store's own texts and vectors are overwritten before they are dropped. Copies that were
        made on the way are not: the caller's records, Python strings, prompts, buffers of libraries. They are freed,
        and freed memory keeps its bytes until it is used again: end the process where that matters. Copies made
        elsewhere (backups, a model server's cache) are beyond its reach.

        Raises `UnknownOwner`; `StoreFileError` if a file cannot be written: then call it again.
        """
        with self.lock:
            slot, rest = self._forgotten_in_files(str(owner))
            marks = [(watcher, mark) for key, watcher in self._owner_watchers if (mark := self._last_mark(slot, key))]
            parts = list(self._sketched([slot], np.flatnonzero(self._owner_of == slot)))
            gone = self.ids_of(np.flatnonzero(self._owner_of == slot))
            self._become(rest)
            self._saved()
            parts = [part for part in parts if self.owner_key is not None or not self._texts.equal_to(part)]
            for watcher in self._watchers:
                watcher(gone)
            for owner_watcher, mark in marks:
                owner_watcher(mark)
            for key, print_watcher in self._print_watchers:
                print_watcher([sketch_hash(key, part) for part in parts], partial(self.fingerprint, key))
        return len(gone)

    def _forgotten_in_files(self, owner: str) -> tuple[int, Contents]:
        """An owner's slot, and what is left without it: in the files first, so that forgetting can be repeated if one
        of them cannot be written."""
        for attempt in itertools.count(1):
            self.refresh()
            slot = self._owner_slots.get(owner)
            if slot is None:
                raise UnknownOwner("the store holds no such owner")
            rest = self._without(np.array([slot]))
            try:
                for file in self._files:
                    if file.path.exists():
                        file.write(rest, scrub=True)
            except StoreFileChanged:  # by another process, just now
                if attempt == _ATTEMPTS:
                    raise
            else:
                return slot, rest
        raise AssertionError

    def _without(self, slots: NDArray[np.int64]) -> Contents:
        """All but these owners, as a copy."""
        stays = np.ones(len(self._owner_keys), np.bool_)
        stays[slots] = False
        keep = np.flatnonzero(stays[self._owner_of])
        return replace(
            self._contents(),
            vectors=np.ascontiguousarray(self._stored_vectors()[keep]),
            ids=self._ids[keep],
            owner_of=(np.cumsum(stays) - 1)[self._owner_of[keep]].astype(np.int32),
            owner_keys=[key for key, here in zip(self._owner_keys, stays.tolist(), strict=True) if here],
            lives=self._lives[stays],
            texts=self._texts.keep(keep),
        )

    def _become(self, rest: Contents) -> None:
        """Be what is left of this store. What it held is overwritten."""
        self._stored_vectors()[:] = 0.0
        self._texts.wipe()
        self._numbers = self._numbers[np.isin(self._lives, rest.lives)]
        self._adopt(rest)
        rest.vectors[:] = 0.0  # the index has its own copy

    def _last_mark(self, slot: int, key: bytes) -> bytes:
        """The mark of an owner that is about to go; b"" if others will have it still."""
        (mark,) = self.marks(self._numbers[slot : slot + 1], key)
        if self._is_named(self._owner_keys[slot]):
            return mark
        content = self._texts[int(np.flatnonzero(self._owner_of == slot)[0])]
        others = {int(self._owner_of[row]) for row in self._texts.equal_to(content)} - {slot}
        return b"" if any(not self._is_named(self._owner_keys[other]) for other in others) else mark

    def _adopt(self, contents: Contents) -> None:
        """Become what these contents are."""
        self._index = _new_index(self.dimension)
        if len(contents.ids):
            self._index.add_with_ids(contents.vectors, contents.ids)
        self._texts = contents.texts
        self._ids = contents.ids
        self._owner_of = contents.owner_of
        self._owner_keys = OwnerKeys(contents.owner_keys)
        self._owner_slots = OwnerSlots((key, i) for i, key in enumerate(contents.owner_keys))
        self._lives = contents.lives
        self._next_id = contents.next_id
        self._number_the_new()
        self._by_owner = None

    def _stored_vectors(self) -> Vectors:
        """The index's own vectors, as a view: writing to it writes to the index."""
        import faiss

        flat = _flat(self._index)
        view: Vectors = faiss.rev_swig_ptr(flat.get_xb(), flat.ntotal * self.dimension)
        return view.reshape(flat.ntotal, self.dimension)

    # -- files ------------------------------------------------------------------------------------------------------

    def _contents(self) -> Contents:
        return Contents(
            input_key=self.input_key,
            output_key=self.output_key,
            owner_key=self.owner_key,
            dimension=self.dimension,
            next_id=self._next_id,
            vectors=self._stored_vectors(),
            ids=self._ids,
            owner_of=self._owner_of,
            owner_keys=self._owner_keys,
            lives=self._lives,
            texts=self._texts,
            state=self._state,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the store to one file (no pickle), atomically: a crash leaves the old file whole. Mode 0600.

        The store remembers the path, so that `forget` reaches it, and follows what other processes write there.

        Raises `StoreFileChanged`, and writes nothing, where the file is not as this process knows it: if it is newer,
        call `refresh` and save again; if it is another store's, take another path or remove it. Of two processes that
        save at once, one is refused. Raises `StoreFileError` for a file that cannot be written.
        What the store's other files have lost and gained is taken over first (`refresh`): whoever was forgotten in one
        of them is not written to another.
        """
        target = Path(path).expanduser().resolve()
        with self.lock:
            known = next((file for file in self._files if file.path == target), None)
            self._follow([file for file in self._files if file is not known])
            file = SharedFile(target) if known is None else known
            file.write(self._contents())
            if known is None:
                self._files.append(file)
            self._saved()

    def _saved(self) -> None:
        generations = [file.state.generation for file in self._files if file.state is not None]
        self._state = replace(self._state, generation=max([self._state.generation, *generations]))
        self._has_unsaved = False

    @classmethod
    def load(cls, path: str | os.PathLike[str], embeddings: Embeddings) -> ExemplarStore:
        """Read a saved store. Raises `StoreFileError` for a missing, foreign, truncated or altered file.

        From now on the store follows the file: see `refresh`.
        """
        file, contents = SharedFile.load(Path(path).expanduser().resolve())
        store = cls(
            embeddings,
            input_key=contents.input_key,
            output_key=contents.output_key,
            owner_key=contents.owner_key,
            dimension=contents.dimension,
        )
        store._adopt(contents)
        contents.vectors[:] = 0.0  # the index has its own copy
        store._state = contents.state
        store._files = [file]
        return store

    @property
    def is_behind(self) -> bool:
        """Whether a file of this store has changed since this process read or wrote it. One ``stat`` for each."""
        return any(file.is_behind() for file in self._files)

    def refresh(self) -> bool:
        """Take over what other processes have written to this store's files; whether there was anything.

        Every reading does it, so every release. Owners who were forgotten in a file are forgotten here, with records
        that were added to them here and not saved; `on_forget` is told. Everything else that was added here stays, and
        is in the file after the next `save`. A file that is gone changes nothing. Raises `StoreFileChanged` for a file
        that has become older or another store's, `StoreFileError` for one that cannot be read: until that is mended
        nothing is released, since nobody can tell who was forgotten.
        """
        return self._follow(self._files)

    def _follow(self, files: Sequence[SharedFile]) -> bool:
        if not any(file.is_behind() for file in files):
            return False
        changed = False
        with self.lock:
            for file in files:
                found = file.newer()
                if found is None:
                    continue
                state = found.state if isinstance(found, Contents) else found
                gone = self._take_over(found, file) if isinstance(found, Contents) else []
                if gone is None:
                    del found
                    raise StoreFileChanged("two files of this store were changed separately; load one of them again")
                budgets = tuple(dict.fromkeys([*self._state.budgets, *state.budgets]))
                generation = max(self._state.generation, state.generation)
                self._state = replace(self._state, generation=generation, budgets=budgets)
                file.know(found)
                changed = True
                for watcher in self._watchers if gone else []:
                    watcher(gone)
        return changed

    def _take_over(self, found: Contents, file: SharedFile) -> list[int] | None:
        """Forget and add here what a file has lost and gained. The ids of the exemplars that went; None where an owner
        came into two files of this store separately."""
        lives = found.row_lives()
        went = np.isin(self._lives, file.row_lives) & ~np.isin(self._lives, found.lives)
        new = ~file.knows(found.ids, lives)
        new &= ~np.isin(lives, file.row_lives) | np.isin(lives, self._lives)  # not of those who were forgotten here
        rows = np.flatnonzero(new)
        owners = found.owner_of[rows]
        names = [found.owner_keys[owner] for owner in owners]
        if self._is_branch(names, found.lives[owners], went):
            return None
        gone: list[int] = self._ids[went[self._owner_of]].tolist()
        twice = np.isin(self._ids, found.ids[rows]) & ~went[self._owner_of]
        next_id = max(self._next_id, found.next_id)
        if gone or twice.any():
            moved = self._ids[twice]
            rest = self._without(np.flatnonzero(went))
            for row in np.flatnonzero(np.isin(rest.ids, moved)):  # two processes gave one id away: the file's stands
                slot = rest.owner_of[row]
                if not self._is_named(rest.owner_keys[slot]):
                    rest.owner_keys[slot] = f"#{next_id}"
                rest.ids[row] = next_id
                next_id += 1
            gone += moved.tolist()
            self._become(rest)
        if len(rows):
            slots = self._slots_for(names)
            self._lives[slots] = found.lives[owners]
            payloads = [found.texts[int(row)] for row in rows]
            self._enter(payloads, slots, np.ascontiguousarray(found.vectors[rows]), found.ids[rows])
        self._next_id = max(self._next_id, next_id)
        found.texts.wipe()
        found.vectors[:] = 0.0
        return gone

    def _is_branch(self, names: Sequence[str], lives: NDArray[np.int64], went: NDArray[np.bool_]) -> bool:
        """Whether one of these owners is in another file under another life."""
        for name, life in zip(names, lives.tolist(), strict=True):
            slot = self._owner_slots.get(name)
            if slot is None or went[slot] or self._lives[slot] == life:
                continue
            if any((file.row_lives == self._lives[slot]).any() for file in self._files):
                return True
        return False

    # -- budgets ------------------------------------------------------------------------------------------------------

    @property
    def budgets(self) -> tuple[OpenedBudget, ...]:
        """The budgets that were opened on this store, here or by a process that wrote its file."""
        return self._state.budgets

    def remember_budget(self, budget: OpenedBudget) -> tuple[OpenedBudget, ...]:
        """Remember that a budget was opened on this store; the others that were, here or in another process.

        It is in the store's files after the next `save`; at once where nothing else waits to be saved, and the file can
        be written.
        """
        with self.lock:
            with contextlib.suppress(StoreFileError):
                self.refresh()
            known = self._state.budgets
            if all((each.ledger, each.name) != (budget.ledger, budget.name) for each in known):
                self._state = replace(self._state, budgets=(*known, budget))
                if not self._has_unsaved:
                    self._save_budgets()
        return tuple(each for each in known if (each.ledger, each.name) != (budget.ledger, budget.name))

    def _save_budgets(self) -> None:
        for file in self._files:
            with contextlib.suppress(StoreFileError):  # where it may not be written, this process remembers alone
                if file.path.exists():
                    file.write(self._contents())
        self._saved()

    # -- what it shows ----------------------------------------------------------------------------------------------

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held: the vectors, and everything else (an estimate of Python's own objects included)."""
        with self.lock:
            per_key = 8 + 24 * 1.75 + 28  # list slot, dictionary entry at its usual load, integer value
            keys = sum(49 + len(key) for key in self._owner_keys)
            rest = self._texts.nbytes + self._ids.nbytes * 2 + self._owner_of.nbytes
            rest += sum(file.row_lives.nbytes for file in self._files) + self._lives.nbytes + self._numbers.nbytes
            if self._by_owner is not None:
                rest += sum(part.nbytes for part in self._by_owner)
            return {
                "vectors": 4 * self.dimension * len(self._ids),
                "other": int(rest + keys + per_key * len(self._owner_keys)),
            }

    def __repr__(self) -> str:
        return f"ExemplarStore({len(self)} exemplars of {self.owner_count} owners, {self.dimension} dimensions)"

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("an ExemplarStore is not pickled or copied; use save() and load()")


def _new_index(dimension: int) -> Any:
    import faiss

    return faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))


def _flat(index: Any) -> Any:
    import faiss

    return faiss.downcast_index(index.index)
