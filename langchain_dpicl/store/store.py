"""The default store: in memory, with files that several processes may share."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from langchain_dpicl.errors import (
    InvalidParameter,
    InvalidRecords,
    StoreFileChanged,
    StoreFileError,
    UnknownOwner,
)
from langchain_dpicl.store.base import Arrival, Parting
from langchain_dpicl.store.contents import Contents, FileState
from langchain_dpicl.store.file import SharedFile, are_among
from langchain_dpicl.store.memory import MemoryStore
from langchain_dpicl.store.notes import OpenedBudget, merged
from langchain_dpicl.store.records import (
    RecordKeys,
    Vectors,
    attempt,
    check_records,
    embed,
    read_each,
    records_of,
)
from langchain_dpicl.store.sources import contents_of

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import VectorStore

_ATTEMPTS = 1000  # in each of them another writer gets on


class ExemplarStore(MemoryStore):
    """Private exemplars with their owners, searchable by exact inner product.

    Build one with `from_records` or `from_texts`, take over a collection with `from_documents` or `from_vectorstore`,
    or `load` a saved one. Vectors are scaled to norm 1 on their way in (a zero vector stays zero), so an inner product
    is a cosine. Owners are the unit of privacy: all exemplars of one owner enter and leave together. Thread-safe;
    readers see whole additions and whole removals only.
    """

    def __init__(self, embeddings: Embeddings, contents: Contents, file: SharedFile | None = None) -> None:
        super().__init__(embeddings, contents)
        self._files = {} if file is None else {file.path: file}

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
        progress: bool = False,
    ) -> ExemplarStore:
        """Build a store from mappings.

        ``owner_key`` names the key that holds the owner; without it each record is its own owner. ``progress`` shows a
        bar on a terminal, for the operator alone: it counts private records. ``vectors`` (rows of
        float32) replaces the embedding of the inputs. The model gets many inputs at once. `local_embeddings` encodes
        each of them alone. A model that encodes them in batches may give an input other last bits beside others, and
        then an owner's vectors depend on other owners: embed each input by a call of its own, and give ``vectors``.
        A remote model then gets a request for each input. Raises `InvalidRecords`, which names a record's position,
        never its text: empty input, a missing or empty key, an embedding with NaN or infinity, a repeated id.
        """
        keys = RecordKeys(input_key, output_key, owner_key)
        batch = check_records(records, keys, ids, may_be_empty=False)
        matrix = batch.embed(embeddings, vectors, None, progress)
        store = cls(embeddings, Contents(keys, matrix.shape[1], matrix[:0]))
        store._insert(batch, matrix)
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
        progress: bool = False,
    ) -> ExemplarStore:
        """Build a store from texts, with their outputs and owners beside them (same length) if given."""
        columns = {"input": texts, "output": outputs, "owner": owners}
        given = {key: list(read_each(values, key)) for key, values in columns.items() if values is not None}
        for key, values in given.items():
            if len(values) != len(given["input"]):
                raise InvalidRecords(f"{key}s has {len(values)} entries for {len(given['input'])} texts")
        return cls.from_records(
            [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)],
            embeddings,
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
        progress: bool = False,
    ) -> ExemplarStore:
        """Build a store from LangChain documents.

        An exemplar is the document's text under ``input_key``, with its metadata beside it; ``output_key`` and
        ``owner_key`` name entries of the metadata. No member sees the owner's entry. Documents' ids are not kept.
        Raises `InvalidRecords`, which names the document's position and the key: no text, no owner, metadata that JSON
        cannot represent, metadata under ``input_key``.
        """
        return cls.from_records(
            records_of(documents, input_key),
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
        """Copy a collection as it stands: texts, metadata, ids and vectors. Nothing is embedded again.

        For LangChain's ``InMemoryVectorStore``, langchain-community's ``FAISS`` and ``SKLearnVectorStore``,
        langchain-chroma's ``Chroma``, langchain-qdrant's ``QdrantVectorStore`` and langchain-postgres's ``PGVector``;
        raises `StoreError` for any other, whose documents `from_documents` takes. So it does for a collection whose
        entries are not stored one by one as they came: a FAISS index other than ``IndexFlat`` and ``IndexHNSWFlat``
        (product quantisers and inverted lists are trained on all documents), a Qdrant collection of another type than
        float32, a ``SKLearnVectorStore`` in Parquet, which gives all metadata the same keys. An instance of a subclass
        of yours is read as one of its base: what it stores is taken as it is. ``embeddings``, which embeds queries,
        defaults to the collection's own model and must be the one that made its vectors. The rest as in
        `from_documents`. The store compares by cosine. A collection that was searched by cosine, or that holds vectors
        of norm 1, ranks as it did, by inner product and by Euclidean distance alike; another may rank differently.
        Later changes to the collection reach the store with `sync_from`; `forget` does not reach the collection.
        """
        documents, vectors = contents_of(vectorstore)
        if embeddings is None:
            embeddings, _ = attempt(lambda: vectorstore.embeddings)
        if embeddings is None:
            raise InvalidParameter(
                "embeddings",
                None,
                "given if the collection does not name its embedding model",
            )
        keys = RecordKeys(input_key, output_key, owner_key)
        batch = check_records(records_of(documents, input_key), keys, None, may_be_empty=False)
        matrix = batch.embed(embeddings, vectors, None, False)
        store = cls(embeddings, Contents(keys, matrix.shape[1], matrix[:0]))
        store._change(Arrival(batch, matrix, [str(document.id) for document in documents]), ())
        return store

    @classmethod
    def empty(
        cls,
        embeddings: Embeddings,
        *,
        input_key: str = "text",
        output_key: str | None = None,
        owner_key: str | None = None,
    ) -> ExemplarStore:
        """A store without exemplars, to be filled by `add` or `maintenance`. The model embeds one public word."""
        keys = RecordKeys(input_key, output_key, owner_key)
        check_records([], keys, None)
        none = embed(embeddings, ["word"], False)[:0]
        return cls(embeddings, Contents(keys, none.shape[1], none))

    def forget(self, owner: str | int) -> int:
        """Remove an owner for good and return how many exemplars went.

        After it returns the owner is neither in the store nor in the files that it was saved to or loaded from: they
        are rewritten atomically, and the old content is overwritten, if the file system writes in place. Other
        processes with such a file follow before their next release. Each ledger whose budgets are used with this store
        in this process drops what it derived from the owner; ``dpicl forget`` names further ledgers. What was released
        once of this store (`released_once`: heads, demonstrations) stays as it is: a `PrivacyWarning` names it.

        In this process, the store's own texts and vectors are overwritten. Other copies (the caller's records, Python
        strings, prompts, buffers of libraries) are freed, and freed memory keeps its bytes until it is used again: end
        the process if that matters. Copies made elsewhere (backups, a model server's cache) are beyond its reach.

        A keyed hash of the owner stays in the files: the data file of a `kept_store` does not bring it back. Raises
        `UnknownOwner`; `StoreFileError` if a file cannot be written: then call it again, the owner gets no new tickets.
        """
        with self.lock:
            gone = Parting()

            def others() -> Contents:
                nonlocal gone
                if (slot := self._owner_slots.get(str(owner))) is None:
                    raise UnknownOwner("the store holds no such owner")
                rows = np.flatnonzero(self._held.owner_of == slot)
                self._delete_keys([self._document(row) for row in rows.tolist()])
                contents = self._held.without(rows)
                mark = contents.state.mark(*self._identity(rows[0]))
                contents.state = contents.state.joined(FileState(forgotten=(mark,)))
                gone = self._leave(*self._parting(rows, contents))
                return contents

            try:
                self._become(self._written(others))
            except UnknownOwner:  # another process was faster
                gone.end()
                raise
            self._tell(gone)
        return len(gone.ids)

    def _written(self, remake: Callable[[], Contents]) -> Contents:
        """Write the contents that ``remake`` makes to the store's files, and return them.

        They are made again if a file cannot be written.
        """
        for attempts_left in reversed(range(_ATTEMPTS)):
            self.refresh()
            contents = remake()
            try:
                for file in filter(lambda each: each.path.exists(), self._files.values()):
                    file.write(contents, scrub=True)
                break
            except StoreFileChanged:  # by another process, just now
                if not attempts_left:
                    raise
        self._saved(contents)
        return contents

    def _change(self, arrival: Arrival | None, gone: Sequence[str]) -> None:
        ids: list[int] = []  # of what goes

        def changed() -> Contents:
            ids[:], contents = self._changed(arrival, gone)
            return contents

        with self.lock:
            if lost := [file.path.name for file in self._files.values() if not file.path.exists()]:
                raise StoreFileError(f"{lost[0]!r} is gone, so the change would be lost: save the store there again")
            self._become(self._written(changed))
            self._hear(ids)

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the store to one file (no pickle), atomically: a crash leaves the old file whole. Mode 0600.

        The store remembers the path: `forget` reaches it, and the store follows what other processes write there. It
        first follows its other files (`refresh`): an owner that was forgotten in one is not written to another.

        Raises `StoreFileChanged`, and writes nothing, if the file is not as this process knows it: call `refresh` and
        save again if it is newer; take another path or remove it if it is another store's. Of two processes that save
        at once, one is refused. Raises `StoreFileError` for a file that cannot be written.
        """
        target = Path(path).expanduser().resolve()
        with self.lock:
            self._follow([file for file in self._files.values() if file.path != target])
            file = self._files.get(target) or SharedFile(target)
            file.write(self._held)
            self._files[target] = file
            self._saved(self._held)

    def _saved(self, contents: Contents) -> None:
        generations = [file.state.generation for file in self._files.values() if file.state is not None]
        contents.state = replace(contents.state, generation=max([contents.state.generation, *generations]))
        self._has_unsaved = False

    @classmethod
    def load(cls, path: str | os.PathLike[str], embeddings: Embeddings) -> ExemplarStore:
        """Read a saved store, and follow its file from now on: see `refresh`. Raises `StoreFileError` for a missing,
        foreign, truncated or altered file."""
        file = SharedFile(Path(path).expanduser().resolve())
        contents = file.read()
        file.know(contents.state, contents)
        store = cls(embeddings, contents, file)
        store.keep_notes(*(path for path in contents.state.notes if os.path.exists(path)))
        return store

    @property
    def is_behind(self) -> bool:
        """Return whether a file of this store has changed since it was read or written here. One ``stat`` for each."""
        return any(file.is_behind() for file in self._files.values())

    def refresh(self) -> bool:
        """Take over what other processes have written to this store's files; whether there was anything.

        Every reading does it, so every release, at the cost of one ``stat`` a file. Owners who were forgotten in a file
        are forgotten here, with records that were added to them here and not saved; `on_forget` watchers are called.
        New records are added. Everything else that was added here stays, and is in the file after the next `save`. A
        file that is gone changes nothing. Raises `StoreFileChanged` for a file that has become older or another
        store's, `StoreFileError` for one that cannot be read: then nothing is released, since nobody can tell who was
        forgotten.
        """
        return self._follow(self._files.values())

    def _follow(self, files: Iterable[SharedFile]) -> bool:
        if not (behind := [file for file in list(files) if file.is_behind()]):
            return False
        changed = False
        with self.lock:
            for file in behind:
                if (news := file.newer()) is None:
                    continue
                state, found = news
                gone = [] if found is None else self._take_over(found, file)
                if gone is None:
                    del found, news
                    raise StoreFileChanged("two files of this store were changed separately; load one of them again")
                self._held.state = self._held.state.joined(state)
                file.know(state, found)
                changed = True
                self._hear(gone)
        return changed

    def _take_over(self, found: Contents, file: SharedFile) -> list[int] | None:
        """Remove and add here what a file has lost and gained. The ids of the exemplars that went; None if an owner
        came into two files of this store separately."""
        held = self._held
        lives = found.row_lives()
        row_lives = held.row_lives()
        went = np.isin(held.lives, file.row_lives) & ~np.isin(held.lives, found.lives)
        new = ~file.knows(found.ids, lives)
        new &= ~np.isin(lives, file.row_lives) | np.isin(lives, held.lives)  # not of owners that were forgotten here
        rows = np.flatnonzero(new)
        owners = found.owner_of[rows]
        names = [found.owner_keys[owner] for owner in owners]
        for name, life in zip(names, found.lives[owners].tolist(), strict=True):
            slot = self._owner_slots.get(name)
            if slot is None or went[slot] or held.lives[slot] == life:
                continue
            if any((other.row_lives == held.lives[slot]).any() for other in self._files.values()):
                return None
        lost = file.knows(held.ids, row_lives) & ~are_among(held.ids, row_lives, found.ids, lives)
        lost |= went[held.owner_of]
        gone: list[int] = held.ids[lost].tolist()
        twice = np.isin(held.ids, found.ids[rows]) & ~lost
        next_id = max(held.next_id, found.next_id)
        if gone or twice.any():
            moved = held.ids[twice]
            stay = np.isin(held.lives, lives)  # also those whose exemplars were all replaced
            rest = held.without(np.flatnonzero(lost), set(itertools.compress(held.owner_keys, stay)))
            for row in np.flatnonzero(np.isin(rest.ids, moved)):  # two processes gave one id away: the file's stands
                slot = rest.owner_of[row]
                if not self._is_named(rest.owner_keys[slot]):
                    rest.owner_keys[slot] = f"#{next_id}"
                rest.ids[row] = next_id
                next_id += 1
            gone += moved.tolist()
            self._become(rest)
        if len(rows):
            contents = [found.texts[row] for row in rows.tolist()]
            documents = [found.documents[row] for row in rows.tolist()]
            vectors = np.ascontiguousarray(found.vectors[rows])
            slots = self._enter(contents, names, vectors, found.ids[rows], documents)
            self._held.lives[slots] = found.lives[owners]
        self._held.next_id = max(self._held.next_id, next_id)
        found.texts.wipe()
        found.documents.wipe()
        found.vectors[:] = 0.0
        return gone

    def _own_key(self, *, make: bool) -> bytes | None:
        return bytes.fromhex(self._held.state.key) if self._files else None

    def _open_budgets(self, budgets: Sequence[OpenedBudget]) -> None:
        """Keep these budgets, in the store's files at once, and where its notes are."""
        with self.lock:
            with contextlib.suppress(StoreFileError):
                self.refresh()
            state = self._held.state
            news: dict[str, Any] = {"budgets": merged(state.budgets, budgets)}
            news["notes"] = tuple(dict.fromkeys([*state.notes, *(str(each.path) for each in self._notes)]))
            if any(set(found) - set(getattr(state, name)) for name, found in news.items()):
                self._remember(**news)

    def remember_release(self, release: str) -> None:
        """Remember what is about to be released once of this store, in its files at once."""
        # If a file is not writable, this process remembers alone.
        with self.lock, contextlib.suppress(StoreFileError):
            with contextlib.suppress(StoreFileError):
                self.refresh()
            known = self._held.state.releases
            if release not in known:
                self._remember(releases=(*known, release))

    def _remember(self, **news: Any) -> None:
        """Remember this, also in the files: with the records that they have, if others wait here to be saved."""
        self._held.state = replace(self._held.state, **news)
        for file in self._files.values():
            while file.path.exists():
                try:
                    contents = self._held
                    if self._has_unsaved:
                        contents = replace(file.read(), state=contents.state)
                    file.write(contents)
                    break
                except StoreFileChanged:  # another process was faster: write its news and these
                    if not self.refresh():
                        raise
        has_unsaved = self._has_unsaved
        self._saved(self._held)
        self._has_unsaved = has_unsaved

    @property
    def lineage(self) -> str | None:
        return self._held.state.lineage if self._files else None
