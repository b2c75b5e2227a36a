"""PrivateTable: what documents say about public topics, counted once with privacy, that answers for ever."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from numpy.typing import NDArray
from scipy.special import ndtri

from langchain_dpicl.budget import Receipt
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.extras import require
from langchain_dpicl.once.files import RECEIPT, read_public, write_public
from langchain_dpicl.once.tables_reading import ONLY, Domain, folded
from langchain_dpicl.privacy import checks
from langchain_dpicl.store.records import embed, embed_query

if TYPE_CHECKING:
    from langchain_core.tools import BaseTool

_FORMAT = "dpicl-table-1"


class Bars(NamedTuple):
    """The bars that noise alone passes nowhere in a table: of a ``cell`` over 0, of a ``margin`` over the second."""

    cell: float
    margin: float


@cache
def simultaneous_bars(sigma: float, cells: int, confidence: float) -> Bars:
    """The bars that noise of standard deviation sigma passes anywhere in a table with probability 1 - confidence.

    The noise of all cells is independent (and Gaussian, but for a lattice of 2^-36).

    **A cell.** No noise of n cells is above b with probability Phi(b / sigma)^n.

    **A margin.** A value is called first if it is ahead of all others of its ranking by more than b. In a ranking that
    happens to a value which is not truly first with probability 2 Phi(-b / (sqrt 2 sigma)) at most, whatever the true
    values and however many they are. Proof: let T be truly first, V another, D = X_V - X_T, S = X_V + X_T, which is
    independent of D, and M the largest of the rest. V has the largest noisy sum if D > t = max(0, 2 M - S), and is
    called first if D > max(b, 2 M - S + 2 b), which is t + b at least. D is normal with a mean of at most 0 and a
    variance of 2 sigma^2, and P(D > t + b) / P(D > t) falls with t and grows with the mean. So given that V is largest,
    it is called first with probability P(N > b) / P(N > 0) at most, for N of mean 0; and one V is largest. (Gutmann and
    Maymin 1987; Hung and Fithian 2019.) Rankings are independent, and there are n / 2 at most of two values and more.
    A value without a second is ahead of 0 by its noise alone, which is rarer.
    """
    cell = -float(ndtri(-math.expm1(math.log(confidence) / cells)))
    margin = -float(ndtri(-math.expm1(2.0 * math.log(confidence) / cells) / 2.0))
    return Bars(cell * sigma, margin * math.sqrt(2.0) * sigma)


@dataclass(frozen=True)
class TableAnswer:
    """The first value of a topic in a column: the one with the largest noisy sum. Public.

    ``is_known``: its ``margin`` over the second value is above the bar of a margin, and ``support``, its noisy sum,
    above that of a cell. Noise alone passes either of these ``bars`` nowhere in the whole table, with the confidence
    that `PrivateTable.top` was asked for. As a text it is the value, or "not known".
    """

    topic: str
    column: str
    value: str
    is_known: bool
    margin: float
    support: float
    bars: Bars

    def __str__(self) -> str:
        return self.value if self.is_known else "not known"

    def sentence(self, guesses: bool = True) -> str:
        """The answer in words. ``guesses``: name the first value also if it is not known."""
        about = self.topic if self.column == ONLY else f"{self.topic}, {self.column}"
        if self.is_known:
            return f"{about}: {self.value}."
        guess = f"; first by noisy counts, which chance may have decided, is {self.value}" if guesses else ""
        return f"{about}: not known{guess}."


class PrivateTable:
    """Noisy counts of public values under public topics, by owner: `release_table` makes it once, ask it for ever.

    Mechanism. An owner's vector has 1/sqrt(m) at each of the m pairs of topic and value that its texts say, rounded
    towards 0 on a lattice. The owners' vectors are added exactly, and every cell gets discrete Gaussian noise of
    standard deviation sigma, also an empty one.

    Neighbours and sensitivity. One owner added or removed, with all its records, at a rate of 1: the sum moves by at
    most 1. Ranks, passages, pictures and tools are post-processing: unlimited, for any caller and any model.

    Attributes
    ----------
    counts
        The noisy sums: topics by values, all columns' values side by side. An owner of one pair adds 1 to it, one of m
        pairs 1/sqrt(m) to each.
    topics, columns
        The public names. A table of a list of values has one column, "value".
    sigma
        The noise's standard deviation of every count.
    receipt
        What it cost.
    reading
        PRIVATE, for the operator: how many records were read, and how many said nothing of the table. The object that
        `release_table` returns has it alone; neither a file, nor a pickle, nor a copy has it.
    """

    reading: Mapping[str, int] | None = None

    def __init__(
        self,
        counts: NDArray[np.float64],
        topics: Sequence[str],
        columns: Mapping[str, Sequence[str]],
        sigma: float,
        receipt: Receipt,
        embeddings: Embeddings | None = None,
    ) -> None:
        self._domain = Domain(tuple(topics), {name: tuple(values) for name, values in columns.items()})
        if counts.shape != self._domain.shape or not np.isfinite(counts).all():
            raise InvalidParameter("counts", f"shape {counts.shape}", f"finite numbers, {self._domain.shape}")
        self.counts = counts
        self.sigma = checks.positive("sigma", sigma)
        self.receipt = receipt
        self.embeddings = embeddings

    @property
    def topics(self) -> tuple[str, ...]:
        """The public topics."""
        return self._domain.topics

    @property
    def columns(self) -> Mapping[str, tuple[str, ...]]:
        """The public values by column."""
        return self._domain.columns

    # -- answers -------------------------------------------------------------------------------------------------------

    def bars(self, confidence: float = 0.95) -> Bars:
        """The bars that noise alone passes nowhere in the table, with this confidence (`simultaneous_bars`)."""
        return simultaneous_bars(self.sigma, self.counts.size, checks.open_unit("confidence", confidence))

    def top(self, topic: str, column: str | None = None, *, confidence: float = 0.95) -> TableAnswer:
        """The first value of a topic: of the only column, or of the one that is named.

        Topics and columns are compared without case and accents. Raises `InvalidParameter` for a topic or a column that
        the table does not have, and for no column if it has several.
        """
        if column is None and len(self.columns) > 1:
            raise InvalidParameter("column", None, f"one of {', '.join(self.columns)}")
        row = _place("topic", topic, self.topics)
        name = tuple(self.columns)[0 if column is None else _place("column", column, tuple(self.columns))]
        return self._top(row, name, self.bars(confidence))

    def _top(self, row: int, column: str, bars: Bars) -> TableAnswer:
        places = [place for place, (name, _) in enumerate(self._domain.values) if name == column]
        sums = self.counts[row, places]
        order = np.argsort(-sums, kind="stable")
        support = float(sums[order[0]])
        margin = support - float(sums[order[1]]) if len(sums) > 1 else support
        value = self.columns[column][order[0]]
        is_known = margin > bars.margin and support > bars.cell
        return TableAnswer(self.topics[row], column, value, is_known, margin, support, bars)

    def answers(self, confidence: float = 0.95) -> list[TableAnswer]:
        """The first values of all topics in all columns, as `top` gives each."""
        bars = self.bars(confidence)
        return [self._top(row, column, bars) for row in range(len(self.topics)) for column in self.columns]

    def documents(self, *, guesses: bool = True, confidence: float = 0.95) -> list[Document]:
        """A passage for each topic: the first value of each column, or that it is too noisy to tell.

        ``guesses``: name the first value also if it is not known, and say so. ``metadata`` has the "topic", the columns
        that are "known" and the "receipt".
        """
        found = []
        for topic, rest in groupby(self.answers(confidence), attrgetter("topic")):
            answers = list(rest)
            known = [answer.column for answer in answers if answer.is_known]
            text = " ".join(answer.sentence(guesses) for answer in answers)
            found.append(Document(text, metadata={"topic": topic, "known": known, "receipt": dict(self.receipt)}))
        return found

    def as_retriever(self, k: int = 1, *, guesses: bool = True) -> TableRetriever:
        """A retriever of `documents`: of the topics that a question names, or else of the ``k`` nearest to it.

        Nearness takes ``embeddings``, which embed the topics now. Without them a question without a topic finds
        nothing.
        """
        vectors = None if self.embeddings is None else embed(self.embeddings, self.topics)
        return TableRetriever(
            documents=self.documents(guesses=guesses),
            domain=self._domain,
            vectors=vectors,
            embeddings=self.embeddings,
            k=checks.whole("k", k),
        )

    def as_tool(self, name: str, description: str, *, guesses: bool = True) -> BaseTool:
        """A LangChain tool that answers with a topic's passage, or names the topics. Its artifact is the receipt."""
        from langchain_core.tools import StructuredTool

        passages = dict(zip(map(folded, self.topics), self.documents(guesses=guesses), strict=True))

        def look_up(topic: str) -> tuple[str, Any]:
            """Look up a topic."""
            found = passages.get(folded(topic))
            text = f"No such topic. The topics are: {', '.join(self.topics)}." if found is None else found.page_content
            return text, dict(self.receipt)

        return StructuredTool.from_function(
            look_up, name=name, description=description, response_format="content_and_artifact"
        )

    def to_pandas(self) -> Any:
        """The counts as a data frame: topics by columns and values. Raises `MissingExtra` without pandas."""
        pandas = require("pandas", "hub")
        names = pandas.MultiIndex.from_tuples(self._domain.values, names=["column", "value"])
        return pandas.DataFrame(self.counts, index=pandas.Index(self.topics, name="topic"), columns=names)

    # -- files ---------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "reading"}

    def save(self, path: str | Path) -> None:
        """Write the table to one JSON file, which replaces an older one as a whole. It is public."""
        content = {
            "topics": self.topics,
            "columns": self.columns,
            "sigma": self.sigma,
            "receipt": self.receipt,
            "counts": self.counts.tolist(),
        }
        write_public(path, _FORMAT, content)

    @classmethod
    def load(cls, path: str | Path, embeddings: Embeddings | None = None) -> PrivateTable:
        """Read a file of `save`. ``embeddings``: for the retriever. Raises `InvalidParameter` for another file."""

        def read(content: dict[str, Any]) -> PrivateTable:
            receipt = RECEIPT.validate_python(content["receipt"])
            counts = np.array(content["counts"], np.float64)
            return cls(counts, content["topics"], content["columns"], content["sigma"], receipt, embeddings)

        return read_public(path, _FORMAT, "a table's file", read)

    def __repr__(self) -> str:
        topics, values = self.counts.shape
        return f"PrivateTable({topics} topics, {values} values, sigma={self.sigma:.4g}, {self.receipt['id']!r})"


def _place(name: str, text: object, among: Sequence[str]) -> int:
    """The place of a name."""
    known = {folded(each): place for place, each in enumerate(among)}
    if not isinstance(text, str) or (found := known.get(folded(text))) is None:
        shown = ", ".join(among[:20]) + (", ..." if len(among) > 20 else "")
        raise InvalidParameter(name, text, f"one of {shown}")
    return found


class TableRetriever(BaseRetriever):
    """The passages of a table, which `PrivateTable.as_retriever` makes. Public."""

    documents: list[Document]
    domain: Any
    vectors: Any
    embeddings: Any
    k: int

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        places = sorted(self.domain.named(query)[0])
        if not places and self.embeddings is not None:
            near = self.vectors @ embed_query(self.embeddings, query, self.vectors.shape[1])
            places = np.argsort(-near, kind="stable")[: self.k].tolist()
        return [self.documents[place] for place in places]
