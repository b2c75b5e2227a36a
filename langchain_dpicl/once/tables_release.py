"""The release of a table: one private sum over the pairs of topic and value that owners' texts say."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable
from langchain_core.runnables.base import coerce_to_runnable
from numpy.typing import NDArray
from pydantic import BaseModel

from langchain_dpicl.budget import Charge, PrivacyBudget, Receipt
from langchain_dpicl.calls.flow import Flow
from langchain_dpicl.errors import InvalidParameter, ModelLost, PrivacyWarning
from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.sums import CheckedOpening, SumRelease, on_budget, owner_sum
from langchain_dpicl.once.table import PrivateTable, simultaneous_bars
from langchain_dpicl.once.tables_reading import (
    ONLY,
    ByChain,
    ByName,
    BySimilarity,
    Domain,
    PairReader,
    Said,
    given_pairs,
)
from langchain_dpicl.privacy import checks
from langchain_dpicl.release.base import warn_of_delta
from langchain_dpicl.release.transaction import Charged
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import Numbers, embedder_of
from langchain_dpicl.store.records import embed
from langchain_dpicl.store.view import StoreView

TextReader = ByName | BySimilarity | ByChain

_MOST_CELLS = 1 << 22
"""The most cells: each takes some 50 microseconds for its noise."""


class TableRelease(SumRelease):
    """The one sum of a table."""

    mechanism = "sum"
    names = ("dpicl-table-part-1", "table", "table")
    shown = (ModelLost,)
    needs_owners = False

    def __init__(
        self,
        store: ExemplarStore,
        budget: PrivacyBudget,
        domain: Domain,
        reader: PairReader,
        at_most: int,
        owners: int | None,
        line_name: str | None,
        records_per_owner: int | None = None,
    ) -> None:
        facts = {
            "topics": domain.topics,
            "values": domain.values,
            "read": reader.facts,
            "at_most": at_most,
            "records_per_owner": records_per_owner,
        }
        super().__init__(store, budget, domain.shape, facts, owners, line_name)
        self._reader = reader
        self._at_most = at_most
        self.records_per_owner = records_per_owner

    def work(self, charged: Charged) -> Flow[NDArray[np.int64]]:
        """The sum, if the ledger does not have it, of the records of one moment."""
        sums = yield partial(self._begun, charged)
        if sums:
            found: NDArray[np.int64] = sums[0]
            return found
        owners, cells, texts = yield partial(self._read, charged.participants)
        if isinstance(self._reader, ByChain):
            said = yield from self._reader.asked(texts)
            owners, cells = yield partial(self._told, said, owners)
        found = yield partial(self._summed, charged, owners, cells)
        return found

    def _read(self, paid: Numbers | None) -> tuple[Numbers, Numbers, list[str]]:
        """The owners and cells of what all records say. For a chain, each record's owner and text. Private."""
        owners = [np.zeros(0, np.int64)]
        cells = [np.zeros(0, np.int64)]
        asked: list[str] = []
        self._records = 0
        self._silent = 0
        with self.store.reading() as view:
            for some, whose in self._pages(view, paid):
                self._records += len(some)
                records = view.read(some)
                if isinstance(self._reader, ByChain):
                    asked += map(self._text, records)
                    owners.append(whose)
                    continue
                found = self._told(self._said(view, some, records), whose)
                owners.append(found[0])
                cells.append(found[1])
        return np.concatenate(owners), np.concatenate(cells), asked

    def _said(self, view: StoreView, rows: Numbers, records: Sequence[Mapping[str, Any]]) -> list[Said]:
        """The pairs of each record. Private."""
        assert isinstance(self._reader, (ByName, BySimilarity))
        return self._reader.said(list(map(self._text, records)), lambda places: view.vectors(rows[places]))

    def _text(self, record: Mapping[str, Any]) -> str:
        """A record's input, and its output if it has one."""
        keys = [self.store.input_key, self.store.output_key]
        return "\n".join(str(record[key]) for key in keys if key is not None and record.get(key) is not None)

    def _told(self, said: Sequence[Said], owners: Numbers) -> tuple[Numbers, Numbers]:
        """The owners and cells of these texts' pairs."""
        many = [sorted(set(each)) for each in said]
        self._silent += sum(not each for each in many)
        pairs = np.array([pair for each in many for pair in each], np.int64).reshape(-1, 2)
        cells = pairs[:, 0] * self._shape[1] + pairs[:, 1]
        return np.repeat(owners, list(map(len, many))), cells

    def _total(self, owners: Numbers, cells: Numbers) -> NDArray[np.int64]:
        """The sum of the owners' vectors. Private."""
        size = math.prod(self._shape)
        whose, given = given_pairs(owners, cells, size, self._at_most, self._randomness)
        return owner_sum(whose, given, np.ones(len(given), np.int64), size).reshape(self._shape)

    def _summed(self, charged: Charged, owners: Numbers, cells: Numbers) -> NDArray[np.int64]:
        assert isinstance(charged.entry, Charge)
        total = self._total(owners, cells)
        return self._unpacked(self._noisy(charged.request.line, charged.entry, 0, total))


def release_table(
    store: ExemplarStore,
    topics: Sequence[str],
    values: Sequence[str] | Mapping[str, Sequence[str]] | type[BaseModel],
    budget: PrivacyBudget | CheckedOpening,
    *,
    read: Literal["nearest", "named"] | Embeddings | Runnable[Any, Any] = "nearest",
    threshold: float | None = None,
    read_name: str | None = None,
    at_most: int = 8,
    records_per_owner: int | None = None,
    owners: int | None = None,
    output: str | Path | None = None,
    line: str | None = None,
) -> PrivateTable:
    """Count once what all records say about public topics: a table that anyone may ask for ever.

    Parameters
    ----------
    store
        A record's text is its input, and its output if it has one.
    topics, values
        Public lists, that must not come from the records. ``values`` may be grouped in columns, a mapping of each
        column's name to its list, or a pydantic model, whose fields with a public domain (``Literal``, an enumeration,
        ``bool``) make the columns.
    budget
        Has a line for the mechanism "sum", whose rate is 1: for instance ``releases={"sum": 4, "vote": ...}`` if a
        table is made each quarter, or a budget of its own. It counts all callers together (scope ``"shared"``). Or a
        function that opens it, as `PrivateHead.fit` takes one.
    read
        - "nearest" (default): a text says the values that it names, by whole words without case and accents, under the
          topics that it names; if it names none, under the topic that is nearest to it by the store's vectors.
        - "named": the same, and a text that names no topic says nothing.
        - the store's own ``embeddings``: a text is under each topic, and says each value, whose similarity to its
          vector reaches ``threshold``.
        - a chain that takes a text, such as ``prompt | llm.with_structured_output(Model)``: a mapping or a model with
          "topic" and the columns, or a list of these. Each text is a private call of its own, one after the other. What
          is no topic or no value of the lists adds nothing, nor does a text on which the chain fails, while it answers
          public ones after it. If it does not, it is waited for.
    threshold
        From -1 to 1, with `Embeddings` alone.
    read_name
        With a chain alone, its public name, such as its model and its prompt's version. An interrupted release goes on
        under the same name alone. Without one the ledger knows no chain from another: go on with the same one.
    at_most
        The most pairs of topic and value that an owner gives: those that most of its texts say. An owner of m pairs
        adds 1/sqrt(m) to each.
    records_per_owner
        The most records that are read of an owner; of more its own coins choose. It bounds the calls of a chain. The
        default reads all.
    owners
        The number of owners, as a public number, without which nothing is checked. The number in the store is private:
        without this one, or one that the budget's line was declared with, neither noise that is too large for the cells
        nor a delta above 1/owners is warned of. The table's `PrivateTable.bars` still say what the noise hides.
    output
        A file for the table. Then an interrupted release goes on when it is called again with the same settings: it is
        charged once. This needs a budget that replays (``replay=True`` or ``"principal"``) and has no tickets.
    line
        The budget's line, if it has several.

    Raises `InvalidParameter` (as for topics or values that are equal without case and accents), `PlanMismatch`,
    `PrivacyBudgetExceeded`, `ModelUnavailable`, `StoreError`, which cost nothing, and after the charge `ReleaseFailed`,
    or `ModelLost` if a chain's model does not come back. Warns (`PrivacyWarning`) if the noise is too large for so many
    cells and owners: only with ``owners``.
    """
    if not isinstance(store, ExemplarStore):
        raise InvalidParameter("store", type(store).__name__, "an ExemplarStore")
    domain = Domain(_texts("topics", topics), columns_of(values))
    if math.prod(domain.shape) > _MOST_CELLS:
        raise InvalidParameter("values", f"{math.prod(domain.shape)} cells", f"at most {_MOST_CELLS} with the topics")
    at_most = checks.whole("at_most", at_most)
    if records_per_owner is not None:
        records_per_owner = checks.whole("records_per_owner", records_per_owner)
    owners = None if owners is None else checks.whole("owners", owners)
    if isinstance(values, type) and isinstance(read, Runnable) and "topic" not in values.model_fields:
        raise InvalidParameter("values", values.__name__, 'a model with a field "topic", which the chain fills')
    reader = _reader(store, domain, read, threshold, read_name)

    def release_on(budget: PrivacyBudget) -> TableRelease:
        return TableRelease(store, budget, domain, reader, at_most, owners, line, records_per_owner)

    release = on_budget(release_on, budget, store, output, "table")
    if release.owners:
        warn_of_delta(release.budget, release.owners, stacklevel=3)
        _warn_of_noise(domain, release.owners, release.line.parameter)

    def table_of(sums: NDArray[np.int64], receipt: Receipt) -> PrivateTable:
        counts = sums / LATTICE
        return PrivateTable(counts, domain.topics, domain.columns, release.line.parameter, receipt, store.embeddings)

    table = release.made(output, table_of)
    table.reading = release.reading
    return table


def _warn_of_noise(domain: Domain, owners: int, sigma: float) -> None:
    """Warn if not even a topic's share of the owners, all of one opinion, would clear the bar. From public numbers."""
    cells = math.prod(domain.shape)
    bar = simultaneous_bars(sigma, cells, 0.95).margin
    share = owners / len(domain.topics)
    if share < bar:
        warnings.warn(
            f"a table of {cells} cells for {owners} owners: the noise moves a cell by "
            f"{sigma * math.sqrt(2.0 / math.pi):.3g} on average, and a value is known from a margin of {bar:.3g} on, "
            f"but a topic has {share:.3g} owners on average. Take fewer topics, or more epsilon",
            PrivacyWarning,
            stacklevel=3,
        )


def _texts(name: str, texts: object) -> tuple[str, ...]:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise InvalidParameter(name, type(texts).__name__, "a list of texts")
    return tuple(texts)


def columns_of(values: object) -> dict[str, tuple[str, ...]]:
    """The values by column: of a list, a mapping or a model. Raises `InvalidParameter` for anything else."""
    if isinstance(values, type) and issubclass(values, BaseModel):
        found = {name: _choices(field.annotation) for name, field in values.model_fields.items() if name != "topic"}
        columns = {name: choices for name, choices in found.items() if choices}
        if not columns:
            raise InvalidParameter("values", values.__name__, "a model with a field of Literal, Enum or bool")
        return columns
    if isinstance(values, Mapping):
        return {name: _texts(f"values[{name!r}]", texts) for name, texts in values.items()}
    return {ONLY: _texts("values", values)}


def _choices(annotation: Any) -> tuple[str, ...]:
    """The public domain of a field, as JSON has its values; none if it has none."""
    if annotation is bool:
        return ("True", "False")
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return tuple(str(each.value) for each in annotation)
    if get_origin(annotation) is Literal:
        return tuple(str(each) for each in get_args(annotation) if each is not None)
    found = (choice for part in get_args(annotation) for choice in _choices(part))
    return tuple(dict.fromkeys(found))


def _reader(store: ExemplarStore, domain: Domain, read: Any, threshold: float | None, name: str | None) -> TextReader:
    """The reader, tried on what is public. Raises `InvalidParameter`, and `ModelUnavailable` if its model fails."""
    if threshold is not None and not isinstance(read, Embeddings):
        raise InvalidParameter("threshold", threshold, "left out, but with read=Embeddings")
    if name is not None and (isinstance(read, (str, Embeddings)) or not isinstance(name, str)):
        raise InvalidParameter("read_name", name, "a text, and left out but with a chain")
    if isinstance(read, str):
        if read not in ("nearest", "named"):
            raise InvalidParameter("read", read, '"nearest", "named", the store\'s embeddings or a chain')
        near = embed(store.embeddings, domain.topics) if read == "nearest" else None
        return ByName(domain, near)
    if isinstance(read, Embeddings):
        if embedder_of(read) != store.embedder:
            raise InvalidParameter("read", embedder_of(read), f"{store.embedder}, the model of the store's vectors")
        least = checks.real("threshold", threshold, at_least=-1.0, at_most=1.0)
        values = [value for _, value in domain.values]
        return BySimilarity(domain, embed(store.embeddings, domain.topics), embed(store.embeddings, values), least)
    if not isinstance(read, Runnable) and not callable(read):
        raise InvalidParameter("read", type(read).__name__, '"nearest", "named", the store\'s embeddings or a chain')
    reader = ByChain(domain, coerce_to_runnable(read), name)
    reader.check()
    return reader
