"""What selection, budgets and samplers ask of a store, wherever it keeps its exemplars.

Owners have numbers: whole numbers that a store gives out in ascending order and never gives again. Rows are exemplars'
places within one `Reading`, and mean nothing outside of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.store import nearness
from langchain_dpicl.store.file import OpenedBudget
from langchain_dpicl.store.intake import Vectors

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

Numbers = NDArray[np.int64]

OwnerWatcher = Callable[[bytes], None]
"""Gets the mark of an owner that was forgotten."""

PrintWatcher = Callable[[Sequence[str], Callable[[], Sequence[str]]], None]
"""Gets the hashes of a fingerprint that nobody has any more, and what computes the fingerprint of those who are left.
"""


class Reading(ABC):
    """One moment of a store: all that is read through it belongs together. Private."""

    @property
    @abstractmethod
    def places(self) -> int:
        """How many coins are to be flipped for all owners to have one each. A place may be empty."""

    @abstractmethod
    def owners_at(self, places: Numbers) -> Numbers:
        """The owners' numbers at these places, ascending as they are. An empty place gives a number that nobody has."""

    @abstractmethod
    def eligible(self, query: Vectors, threshold: float) -> Numbers:
        """The numbers, ascending, of all owners with an exemplar whose similarity to the query reaches the threshold.

        Exact: whether an owner is among them is a function of its own vectors and the query alone. (The nearest k, or
        an approximate index whose cells or links depend on the data, would not be: there one owner's presence decides
        on another.)
        """

    @abstractmethod
    def rows_of(self, owners: Numbers) -> tuple[Numbers, Numbers]:
        """Rows of these owners, and for each row the position of its owner in ``owners``. Who is gone has none."""

    @abstractmethod
    def similarity(self, rows: Numbers, query: Vectors) -> NDArray[np.float32]:
        """The inner product of each of these rows' vectors with a query's. Reads no text."""

    @abstractmethod
    def read(self, rows: Numbers) -> list[dict[str, Any]]:
        """The exemplars at these rows, as fresh dictionaries; an empty one for a record that cannot be read."""

    @abstractmethod
    def ids_of(self, rows: Numbers) -> list[int]:
        """The stable ids of these rows."""

    @abstractmethod
    def marks(self, owners: Numbers, key: bytes) -> list[bytes]:
        """A keyed hash of each of these owners, b"" for one who is gone: see `marks.owner_mark`."""


class PrivateStore(ABC):
    """Private exemplars with their owners. Every store is one, on FAISS or in a database."""

    embeddings: Embeddings
    input_key: str
    output_key: str | None
    owner_key: str | None
    dimension: int

    @property
    @abstractmethod
    def owner_count(self) -> int:
        """The number of owners."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of exemplars."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[Reading]:
        """A moment of the store, to read from while the ``with`` block lasts. Private."""

    @abstractmethod
    def add(
        self,
        records: Iterable[Mapping[str, Any]],
        *,
        owner_key: str | None = None,
        ids: Sequence[int] | None = None,
        vectors: Vectors | None = None,
        progress: bool = False,
    ) -> list[int]:
        """Add records and return their ids. All of them, or none if one is bad. An owner that exists grows."""

    @abstractmethod
    def forget(self, owner: str | int) -> int:
        """Remove an owner for good and return how many exemplars went. Raises `UnknownOwner`."""

    @abstractmethod
    def on_forget(self, watcher: Callable[[Sequence[int]], None]) -> None:
        """Call ``watcher(ids)`` with the ids of the exemplars that went, at the end of every `forget`."""

    @abstractmethod
    def on_owner_forgotten(self, key: bytes, watcher: OwnerWatcher) -> None:
        """Call ``watcher(mark)``, a mark of this key, at the end of every `forget` that leaves nobody with it."""

    @abstractmethod
    def on_fingerprint_forgotten(self, key: bytes, watcher: PrintWatcher) -> None:
        """Call ``watcher(gone, left)`` at the end of every `forget` of this object: the hashes of a `fingerprint` that
        nobody has any more, and the fingerprint of those who are left."""

    @property
    def is_behind(self) -> bool:
        """Whether `refresh` may have something to do. Costs microseconds."""
        return False

    def refresh(self) -> bool:
        """Take over what other processes have changed; whether there was anything. Every reading does it."""
        return False

    @property
    @abstractmethod
    def budgets(self) -> tuple[OpenedBudget, ...]:
        """The budgets that were opened on this store, as far as it remembers."""

    @abstractmethod
    def remember_budget(self, budget: OpenedBudget) -> tuple[OpenedBudget, ...]:
        """Remember that a budget was opened on this store; the others that were."""

    @abstractmethod
    def fingerprint(self, key: bytes) -> tuple[str, ...]:
        """A sketch of whose data this is: the least keyed hashes of its owners."""

    def embed_query(self, text: str) -> Vectors:
        """A query's embedding, scaled to norm 1. Public. Raises `ModelUnavailable`, `StoreError` for a wrong size."""
        return nearness.embed_query(self.embeddings, text, self.dimension)

    async def aembed_query(self, text: str) -> Vectors:
        """`embed_query`, without blocking the event loop."""
        return await nearness.aembed_query(self.embeddings, text, self.dimension)
