"""PrivateTopics: the topics that many owners ask about, how many of them ask, and a report of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from langchain_core.language_models import LanguageModelLike
from langchain_core.output_parsers import StrOutputParser

from langchain_dpicl.budget import Receipt
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.once.files import RECEIPT, read_public, write_public
from langchain_dpicl.once.table import PrivateTable
from langchain_dpicl.once.tables_reading import folded
from langchain_dpicl.once.terms import PrivateTerms
from langchain_dpicl.privacy import checks

_FORMAT = "dpicl-topics-1"
_SHOWN = 8  # terms of a topic in a report
_NAMED_BY = 3  # terms that name a topic without a model
_LONGEST_TITLE = 10  # words; a longer answer is none
_WIDEST = 0.5  # of the range of a share that is told

_PROMPT = """Here are words that users of a service often write, all of one topic:

{terms}

Give the topic a title of at most six words. Answer with the title alone.
Title:"""


class ShareRange(NamedTuple):
    """A group's share of a topic's noisy counts, and the range in which the true share is."""

    value: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """True if the range is no wider than one half."""
        return self.high - self.low <= _WIDEST

    def __str__(self) -> str:
        return f"{self.value:.0%} ({self.low:.0%} to {self.high:.0%})" if self.is_known else "not known"


@dataclass(frozen=True)
class Topic:
    """A topic: a set of released terms, with the noisy numbers of owners whose texts are of it, by group. Public.

    ``error``: no count of any topic is farther than this from its owners' number, with the confidence that
    `PrivateTopics.topics` was asked for. ``counts`` may be below 0.
    """

    title: str
    terms: tuple[str, ...]
    counts: Mapping[str, float]
    error: float

    def is_known(self, group: str) -> bool:
        """Return whether the group's count is more than its error: somebody is in it."""
        return self.counts[group] > self.error

    def count_words(self, group: str) -> str:
        """The count with its error, or "not known"."""
        return f"{self.counts[group]:,.0f} ± {self.error:,.0f}" if self.is_known(group) else "not known"

    def share(self, group: str) -> ShareRange:
        """The group's share of all groups' counts."""
        inside = self.counts[group]
        outside = sum(count for name, count in self.counts.items() if name != group)
        error = self.error
        outer = error * (len(self.counts) - 1)
        value = _share(inside, outside)
        return ShareRange(value, _share(inside - error, outside + outer), _share(inside + error, outside - outer))


def _share(inside: float, outside: float) -> float:
    inside = max(inside, 0.0)
    outside = max(outside, 0.0)
    return inside / (inside + outside) if inside + outside > 0.0 else 0.5


class PrivateTopics:
    """The topics that many owners ask about: `release_topics` makes them once. Public, with all that is made of them.

    Mechanisms. The terms are released first (`PrivateTerms`), and divided into topics by their public embeddings. Then
    one private sum counts owners: an owner adds 1/sqrt(C) to each of at most C pairs of a topic and a group that most
    of its texts are of, rounded towards 0 on a lattice, and every pair gets discrete Gaussian noise. ``table`` has the
    sums times sqrt(C), which are numbers of owners.

    Neighbours and sensitivity. One owner added or removed, with all its records, at a rate of 1: the counts of terms
    move by at most 1 together, and so does the sum. Both are charged to one budget.

    Attributes
    ----------
    terms
        The released terms.
    clusters
        The terms of each topic, the most frequent first.
    table
        The noisy numbers of owners: topics, named by their first terms, by groups. None if no term was released.
    titles
        The topics' names, as ``table`` has them or as a model gives them.
    per_owner
        C, the most pairs that an owner counts in.
    receipts
        What terms and sum cost.
    reading
        PRIVATE, for the operator: how many records were read, and how many are of no topic. The object that
        `release_topics` returns has it alone; neither a file, nor a pickle, nor a copy has it.
    """

    reading: Mapping[str, int] | None = None

    def __init__(
        self,
        terms: PrivateTerms,
        clusters: Sequence[Sequence[str]] = (),
        table: PrivateTable | None = None,
        per_owner: int = 1,
        titles: Sequence[str] | None = None,
    ) -> None:
        rows = 0 if table is None else len(table.topics)
        if len(clusters) != rows or (table is not None and len(table.columns) != 1):
            raise InvalidParameter("clusters", f"{len(clusters)} topics", f"{rows}, as the table of one column has")
        self.terms = terms
        self.clusters = tuple(map(tuple, clusters))
        self.table = table
        self.per_owner = checks.whole("per_owner", per_owner)
        self.titles = tuple(titles or (table.topics if table is not None else ()))
        if len(self.titles) != rows:
            raise InvalidParameter("titles", f"{len(self.titles)} titles", f"{rows}")

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """The receipts of terms and sum."""
        return (self.terms.receipt,) if self.table is None else (self.terms.receipt, self.table.receipt)

    @property
    def receipt(self) -> Receipt:
        """The last receipt, which counts all that was spent."""
        return self.receipts[-1]

    @property
    def groups(self) -> tuple[str, ...]:
        """The public groups, or "owners" alone."""
        return () if self.table is None else next(iter(self.table.columns.values()))

    def topics(self, confidence: float = 0.95) -> list[Topic]:
        """The topics, the one with the most owners first by noisy counts.

        With this ``confidence`` no count of any topic and group is farther from the truth than its error.
        """
        if self.table is None:
            checks.open_unit("confidence", confidence)
            return []
        # both tails: noise is above the bar, or below minus it, with (1 - confidence) / 2 each
        error = self.table.bars(0.5 + checks.open_unit("confidence", confidence) / 2.0).cell
        found = []
        for row in np.argsort(-self.table.counts.sum(axis=1), kind="stable").tolist():
            counts = dict(zip(self.groups, self.table.counts[row].tolist(), strict=True))
            found.append(Topic(self.titles[row], self.clusters[row], counts, error))
        return found

    def named_by(self, llm: LanguageModelLike) -> PrivateTopics:
        """The same with titles of a model, which sees released terms alone.

        A topic keeps its name if the model fails on it, or answers with more than ten words.
        """
        chain: Any = llm | StrOutputParser()
        titles = []
        for title, terms in zip(self.titles, self.clusters, strict=True):
            try:
                answer = str(chain.invoke(_PROMPT.format(terms=", ".join(terms[: 3 * _SHOWN]))))
            except Exception:  # of a model: the topics are charged, and have names without it
                answer = ""
            first = next((line.strip(" #*\"'.") for line in answer.splitlines() if folded(line)), "")
            is_title = bool(first) and len(folded(first)) <= _LONGEST_TITLE
            titles.append(first if is_title else title)
        found = PrivateTopics(self.terms, self.clusters, self.table, self.per_owner, titles)
        found.reading = self.reading
        return found

    # -- the report ----------------------------------------------------------------------------------------------------

    def report(self, title: str = "What users ask", *, confidence: float = 0.95) -> str:
        """The topics as Markdown: numbers of owners with their errors, shares of the groups, and the promise."""
        lines = [f"# {title}", ""]
        topics = self.topics(confidence)
        if topics:
            groups = self.groups
            shared = groups[1:] if len(groups) == 2 else groups * (len(groups) > 2)
            head = ["topic", *groups, *(f"share of {group}" for group in shared), "words"]
            lines += [_row(head), _row(["---"] * len(head))]
            for topic in topics:
                counts = [topic.count_words(group) for group in groups]
                shares = [str(topic.share(group)) for group in shared]
                more = ", ..." if len(topic.terms) > _SHOWN else ""
                lines.append(_row([topic.title, *counts, *shares, ", ".join(topic.terms[:_SHOWN]) + more]))
            lines += ["", self._how(confidence)]
        else:
            lines += ["No word is used by enough owners to be shown."]
        last = self.receipt
        lines += [
            "",
            f"Private by design: whatever one owner wrote, this report would be much the same without it (epsilon "
            f"{last['epsilon']:g}, delta {last['delta']:.2g}). A word is shown only if its noisy count reaches "
            f"{self.terms.threshold:.3g}. Receipts: {', '.join(each['id'] for each in self.receipts)}.",
            "",
        ]
        return "\n".join(lines)

    def _how(self, confidence: float) -> str:
        """The numbers' meaning."""
        ending = "" if self.per_owner == 1 else "s"
        pairs = f"topic{ending}" if len(self.groups) == 1 else f"pair{ending} of topic and group"
        return (
            f"Numbers are of owners, with noise. An owner counts in at most {self.per_owner} {pairs}. "
            f"With probability {confidence:.0%} every number of those who count is right within its ±, and every share "
            "within its range, all at once. Owners who ask about more make the numbers too low. "
            '"Not known": a number below its error, or a share whose range is wider than a half.'
        )

    def __str__(self) -> str:
        return self.report()

    # -- files ---------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "reading"}

    def save(self, path: str | Path) -> None:
        """Write terms, topics and receipts to one JSON file, which replaces an older one as a whole. It is public."""
        terms = self.terms
        content: dict[str, Any] = {
            "terms": [tuple(terms), terms.counts.tolist(), terms.sigma, terms.threshold, terms.receipt],
            "clusters": self.clusters,
            "per_owner": self.per_owner,
            "titles": self.titles,
        }
        if (table := self.table) is not None:
            content["table"] = [table.counts.tolist(), table.topics, table.columns, table.sigma, table.receipt]
        write_public(path, _FORMAT, content)

    @classmethod
    def load(cls, path: str | Path) -> PrivateTopics:
        """Read a file of `save`. Raises `InvalidParameter` for another file."""
        return read_public(path, _FORMAT, "a file of topics", cls._of)

    @classmethod
    def _of(cls, content: dict[str, Any]) -> PrivateTopics:
        words, counts, sigma, threshold, receipt = content["terms"]
        terms = PrivateTerms(words, counts, sigma, threshold, RECEIPT.validate_python(receipt))
        table = None
        if "table" in content:
            sums, topics, columns, sigma, receipt = content["table"]
            table = PrivateTable(np.array(sums), topics, columns, sigma, RECEIPT.validate_python(receipt))
        return cls(terms, content["clusters"], table, content["per_owner"], content["titles"])

    def __repr__(self) -> str:
        ids = ", ".join(repr(each["id"]) for each in self.receipts)
        return f"PrivateTopics({len(self.clusters)} topics, {len(self.terms)} terms, {ids})"


def _row(cells: Sequence[str]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in cells)} |"


def names_of(clusters: Sequence[Sequence[str]]) -> list[str]:
    """A name for each topic: its first terms. No two have the same words."""
    names: list[str] = []
    known: set[tuple[str, ...]] = set()
    for terms in clusters:
        name = ", ".join(terms[:_NAMED_BY])
        number = 2
        while folded(name) in known:
            name = f"{', '.join(terms[:_NAMED_BY])} ({number})"
            number += 1
        known.add(folded(name))
        names.append(name)
    return names
