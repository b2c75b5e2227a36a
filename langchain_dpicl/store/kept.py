"""A store that keeps the embeddings of a data file, and follows it.

The data file is the source. Before each use the store is made equal to it: what is new or changed there is added, what
is gone there goes, in one change of the store (not a forgetting, so owners keep the tickets that they have left, and
the ledgers their marks). A text that the store holds is not embedded again, and one process at a time follows: the
others find the work done. What does not come back is an owner who was forgotten (`ExemplarStore.forget`, ``dpicl
forget``) and is still in the data file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from sqlalchemy.engine import URL

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.store.base import Arrival
from langchain_dpicl.store.maintenance import content_of, some
from langchain_dpicl.store.notes import Notes, OpenedBudget, notes_beside
from langchain_dpicl.store.records import (
    Batch,
    RecordKeys,
    Vectors,
    check_records,
    embed,
    encoded,
    unpack,
)
from langchain_dpicl.store.sources import is_number
from langchain_dpicl.store.store import ExemplarStore, address

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

_ALIKE = 0.999
"""The least cosine of two embeddings of one text by one model: a remote one may differ in its last digits."""


class Followed(NamedTuple):
    """The changes that a store took over from its data file. For the operator alone.

    How many records came and went, how many texts were embedded, and how many records were left out since their owner
    was forgotten.
    """

    added: int
    removed: int
    embedded: int
    left_out: int

    @property
    def words(self) -> str:
        """In one line."""
        said = "up to date, nothing was embedded"
        if self.added or self.removed:
            said = f"{self.added:,} records came, {self.removed:,} went, {self.embedded:,} texts were embedded"
        if self.left_out:
            said += f"; {self.left_out:,} records of forgotten owners are left out"
        return said


def store_of(
    data: Path,
    records: Sequence[Mapping[str, Any]],
    embeddings: Embeddings,
    keys: RecordKeys,
    url: str | os.PathLike[str] | URL | None,
    say: Callable[[str], object],
    *,
    parameter: str,
    **options: Any,
) -> ExemplarStore:
    """The store that keeps a data file's records: the one of this address, or ``DATA.store`` beside the file.

    Says what was embedded, came or went. ``parameter`` names the setting of the address. ``options`` are those of
    `kept_store`, which this is. Raises `InvalidParameter` if no address is given and the folder cannot be written.
    """
    data = data.absolute()
    if url is None:
        url = data.with_name(f"{data.name}.store")
        effective = os.access in os.supports_effective_ids
        if not os.access(data.parent, os.W_OK | os.X_OK, effective_ids=effective):
            bound = "given, in a folder that can be written: data's cannot, and its embeddings would be kept there"
            raise InvalidParameter(parameter, None, bound)
    store, followed = kept_store(url, records, embeddings, notes_beside(data), **keys._asdict(), **options)
    say(f"{_place_of(store)}: {followed.words}")
    return store


class TrialStore(ExemplarStore):
    """Some records of a store, in memory. Its budgets and its owners' keys are that store's."""

    whole: ExemplarStore

    def mark_keys(self) -> tuple[bytes, ...]:
        return self.whole.mark_keys()

    @property
    def remembers(self) -> bool:
        return self.whole.remembers

    @property
    def budgets(self) -> tuple[OpenedBudget, ...]:
        return self.whole.budgets

    def remember_budget(self, budget: OpenedBudget) -> tuple[OpenedBudget, ...]:
        return self.whole.remember_budget(budget)


def without(store: ExemplarStore, records: Sequence[Mapping[str, Any]]) -> TrialStore:
    """A store's exemplars but those of the owners of these records. Nothing is embedded."""
    keys = store._collection.keys
    batch = check_records(records, keys, None)
    held, vectors = content_of(store)
    kept: list[int] = []
    left: list[dict[str, Any]] = []
    out = set(batch.owners or batch.contents)
    for row, each in enumerate(held):
        record = unpack(each.content)
        identity: str | bytes = each.content
        if keys.owner_key is not None:
            record[keys.owner_key] = identity = each.owner
        if identity not in out:
            kept.append(row)
            left.append(record)
    made = TrialStore.from_records(left, store.embeddings, **keys._asdict(), vectors=vectors[kept])
    assert isinstance(made, TrialStore)
    made.whole = store
    return made


def kept_store(
    url: str | os.PathLike[str] | URL,
    records: Sequence[Mapping[str, Any]],
    embeddings: Embeddings,
    notes: Notes = Notes((), ()),  # noqa: B008
    *,
    name: str = "exemplars",
    input_key: str = "input",
    output_key: str | None = "output",
    owner_key: str | None = None,
    progress: bool = False,
    vectors_in_memory: bool = True,
) -> tuple[ExemplarStore, Followed]:
    """The store at an address, or in a file of SQLite's, made equal to these records. It is made if there is none.

    It takes over an earlier release's ``notes`` of the data file, so that ledgers know its owners again.

    The records are all of the store: those that it lacks come, others go. Raises `InvalidRecords`; `StoreError` if the
    database cannot be used; `InvalidParameter` (``store``) for a store of other keys or another embedding model, one
    that took documents over from a collection, and one of which more than half would go, which is another data file's.
    """
    keys = RecordKeys(input_key, output_key, owner_key)
    batch = check_records(records, keys, None, may_be_empty=False)
    about: dict[str, Any] = {"name": name, "vectors_in_memory": vectors_in_memory}
    store = ExemplarStore(address(url), embeddings, **about, **keys._asdict())
    try:
        with store._database.turn():
            return store, _made_equal(store, keys, batch, notes, progress)
    except BaseException:
        store.close()
        raise


def _place_of(store: ExemplarStore) -> str:
    """Its file's name, or that of its collection."""
    path = store._database.path
    return store._collection.name if path is None else Path(path).name


def _made_equal(store: ExemplarStore, keys: RecordKeys, batch: Batch, notes: Notes, progress: bool) -> Followed:
    """One change that makes a store equal to the records, of which a forgotten owner's stay out.

    Nobody else follows meanwhile. Raises `InvalidParameter` for a store that is not these records' own.
    """
    held, vectors = content_of(store)
    was_forgotten = store._forgotten()
    known = {str(unpack(each.content).get(store.input_key)): row for row, each in enumerate(held)}
    own = store._collection.keys
    bound = ""
    if own != keys:
        bound = f"a store of these keys: it has {', '.join(f'{name}={key!r}' for name, key in own._asdict().items())}"
    elif not all(is_number(each.document) for each in held):
        bound = "the store of a data file's records alone: this one follows a collection"
    elif 2 * len(known.keys() - set(batch.texts)) > len(known):
        bound = "this data's own store: the data lacks more than half of its texts"
    elif not _is_of_model(store, known, vectors):
        bound = "a store of this embedding model: another one made its vectors"
    if bound:
        raise InvalidParameter("store", _place_of(store), f"{bound}; else name another place")
    store._take_notes(notes)  # before there are records, so that a new store has their key
    is_named = store.owner_key is not None
    owners = batch.owners or [""] * len(batch.texts)
    stands: dict[tuple[bytes, str], list[str]] = {}
    for each in held:
        stands.setdefault((each.content, each.owner if is_named else ""), []).append(each.document)
    new = []
    left_out = 0
    for i, (content, owner) in enumerate(zip(batch.contents, owners, strict=True)):
        if same := stands.get((content, owner)):
            same.pop()
        elif was_forgotten(encoded(owner) if is_named else content, is_named):
            left_out += 1
        else:
            new.append(i)
    gone = [document for left in stands.values() for document in left]
    if not new and not gone:
        return Followed(0, 0, 0, left_out)
    texts = [batch.texts[i] for i in new]
    unknown = [text for text in texts if text not in known]
    made = iter(embed(store.embeddings, unknown, progress, batch=store.batch) if unknown else ())
    matrix = [vectors[known[text]] if text in known else next(made) for text in texts]
    arrival = None
    if new:
        arrival = Arrival(some(batch, new), np.array(matrix, np.float32), [""] * len(new))
    store._change(arrival, gone)
    return Followed(len(new), len(gone), len(unknown), left_out)


def _is_of_model(store: ExemplarStore, known: Mapping[str, int], vectors: Vectors) -> bool:
    """Embed one of the store's texts again: False if another model made its vector."""
    text = next(filter(str.strip, known), None)
    if text is None:
        return True
    again = embed(store.embeddings, [text])[0]
    own = vectors[known[text]]
    return again.shape == own.shape and float(again @ own) >= _ALIKE * float(own @ own)
