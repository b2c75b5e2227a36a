"""The release of topics: terms, and then one private sum of owners by topic and public group."""

from __future__ import annotations

import glob
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.language_models import LanguageModelLike
from langchain_core.runnables import Runnable
from numpy.typing import NDArray

from langchain_dpicl.aggregators import Words
from langchain_dpicl.budget import PrivacyBudget, Receipt
from langchain_dpicl.errors import InvalidParameter, PrivacyBudgetExceeded
from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.sums import CheckedOpening, opened, owner_sum, part_of
from langchain_dpicl.once.table import PrivateTable
from langchain_dpicl.once.tables_reading import Domain, Said, check_distinct, given_pairs
from langchain_dpicl.once.tables_release import TableRelease
from langchain_dpicl.once.terms import PrivateTerms
from langchain_dpicl.once.terms_reading import TokenKeys
from langchain_dpicl.once.terms_release import reader_of_words, release_terms
from langchain_dpicl.once.topics import PrivateTopics, names_of
from langchain_dpicl.once.topics_reading import ONE_GROUP, ByTerms, clusters_of, weights_of
from langchain_dpicl.privacy import checks
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.records import embed
from langchain_dpicl.store.view import StoreView

_MOST_TERMS = 3000
"""The terms that are divided into topics, the most frequent: the distances between them take 36 MB."""

_MOST_TOPICS = 1000


class TopicsRelease(TableRelease):
    """The one sum of topics.

    An owner adds 1/sqrt(C) to each of its pairs, however many it has, where C is the most that it may have. So a sum
    times sqrt(C) is a number of owners. The owner's vector has norm 1 at most, as that of a table has.
    """

    names = ("dpicl-topics-part-1", "release of topics", "report of topics")

    def __init__(self, store: ExemplarStore, budget: PrivacyBudget, domain: Domain, reader: ByTerms, *how: Any) -> None:
        super().__init__(store, budget, domain, reader, *how)
        self._topics_of = reader

    def _said(self, view: StoreView, rows: Numbers, records: Sequence[Mapping[str, Any]]) -> list[Said]:
        """Each question's pairs of topic and group."""
        known: TokenKeys = {}
        key = self.store.input_key
        return [self._topics_of.said(str(record[key]), record, known) if key in record else [] for record in records]

    def _total(self, owners: Numbers, cells: Numbers) -> NDArray[np.int64]:
        """The sum, in which cells beside the domain's have the rest of the norm of an owner with fewer than C pairs."""
        size = math.prod(self._shape)
        whose, given = given_pairs(owners, cells, size, self._at_most, self._randomness)
        known, pairs = np.unique(whose, return_counts=True)
        empty = self._at_most - pairs
        rest = np.arange(empty.sum()) - np.repeat(np.cumsum(empty) - empty, empty)
        whose = np.concatenate([whose, np.repeat(known, empty)])
        given = np.concatenate([given, size + rest])
        order = np.argsort(whose, kind="stable")
        ones = np.ones(len(whose), np.int64)
        return owner_sum(whose[order], given[order], ones, size + self._at_most)[:size].reshape(self._shape)


def release_topics(
    store: ExemplarStore,
    budget: PrivacyBudget | CheckedOpening,
    *,
    at_most: int = 8,
    topics: int = 12,
    topics_per_owner: int = 3,
    split: Mapping[str, Sequence[str]] | None = None,
    terms: PrivateTerms | None = None,
    words: Words | None = None,
    phrases: int = 1,
    llm: LanguageModelLike | None = None,
    records_per_owner: int | None = None,
    owners: int | None = None,
    output: str | Path | None = None,
    terms_line: str = "terms",
    line: str = "sum",
) -> PrivateTopics:
    """Report what users ask, by topic: how many owners ask it, and in which public group their questions are.

    Parameters
    ----------
    store
        Its inputs are the questions.
    budget
        Has a line for the mechanism "terms" and one for "sum", as ``releases={"terms": 1, "sum": 1}``, or more for a
        report each month. Terms are charged first. It counts all callers together (scope ``"shared"``). Or a function
        that opens it, as `PrivateHead.fit` takes one.
    at_most
        The most terms that an owner gives.
    topics
        The most topics.
    topics_per_owner
        C, the most topics that an owner counts in (with ``split``: pairs of topic and group): those that most of its
        questions are of, ties by its own coins. Counts have the noise of the plan times sqrt(C).
    split
        A key of the records and its public values, such as ``{"status": ["answered", "unanswered"]}``: the groups. A
        record without one of these counts nowhere.
    terms
        Terms that were released before: the sum alone is charged. Give the same ``words`` and ``phrases``.
    words
        What counts as a word (`Words`; its stop words must be a public list), of a text without case and accents.
        Default: ``Words()``.
    phrases
        The most words of a phrase, from 1 (words alone) to 3.
    llm
        A model that names the topics. It sees released terms alone, so any will do.
    records_per_owner
        The most questions of an owner that are counted; of more its own coins choose. The default counts all.
    owners
        The number of owners, as a public number, for the warnings.
    output
        A file for the topics, with both receipts. Then an interrupted release goes on when it is called again with the
        same settings: neither terms nor sum are charged twice. Until the end ``FILE.*.terms`` has the terms; those of
        another store, or of other ``at_most``, ``words`` and ``phrases``, are refused. This needs a budget that replays
        (``replay=True`` or ``"principal"``) and has no tickets.
    terms_line, line
        The budget's lines for terms and for the sum.

    A question is of the topic whose terms in it weigh most; rare terms weigh more than frequent ones. The store's
    embeddings embed the released terms, which are divided into topics by that alone; of more than 3,000 terms the most
    frequent ones. Raises `InvalidParameter`, `PlanMismatch`, `InfeasiblePlan`, `PrivacyBudgetExceeded`, `StoreError`,
    which cost nothing, and after a charge `ReleaseFailed`; also `StoreError` if the embeddings fail on the terms, which
    ``output`` keeps. A model that fails costs nothing: its topic is named by its first terms. If no term is released,
    no sum is charged.
    """
    if not isinstance(store, ExemplarStore):
        raise InvalidParameter("store", type(store).__name__, "an ExemplarStore")
    if terms is not None and not isinstance(terms, PrivateTerms):
        raise InvalidParameter("terms", type(terms).__name__, "PrivateTerms or None")
    if llm is not None and not isinstance(llm, Runnable):
        raise InvalidParameter("llm", type(llm).__name__, "a LangChain model or None")
    topics = checks.whole("topics", topics, at_most=_MOST_TOPICS)
    topics_per_owner = checks.whole("topics_per_owner", topics_per_owner, at_most=_MOST_TOPICS)
    key, groups = _split(store, split)
    reader = reader_of_words(words, phrases)
    if records_per_owner is not None:
        records_per_owner = checks.whole("records_per_owner", records_per_owner)
    owners = None if owners is None else checks.whole("owners", owners)
    kept = None if output is None else _kept(output, [store.lineage, at_most, reader.facts])
    if terms is not None:
        kept = None  # another release's terms stay where they are
    opening = _Opening(store, budget, owners, line)
    if kept is not None and kept.exists() and not part_of(kept).exists():
        terms = _of_budget(PrivateTerms.load(kept), opening.budget, kept)
    if terms is None:
        how: dict[str, Any] = {"at_most": at_most, "words": words, "phrases": phrases, "owners": owners}
        terms = release_terms(store, opening, output=kept, line=terms_line, **how)
    found = PrivateTopics(terms)
    frequent = terms[:_MOST_TERMS]
    if frequent:
        clusters = clusters_of(frequent, embed(store.embeddings, frequent), topics)
        domain = Domain(tuple(names_of(clusters)), {key or ONE_GROUP: groups})
        by_terms = ByTerms(domain, reader, clusters, weights_of(terms), key)
        about = (topics_per_owner, owners, line, records_per_owner)
        release = TopicsRelease(store, opening.budget, domain, by_terms, *about)
        scale = math.sqrt(topics_per_owner)

        def topics_of(sums: NDArray[np.int64], receipt: Receipt) -> PrivateTopics:
            sigma = release.line.parameter * scale
            table = PrivateTable(sums / LATTICE * scale, domain.topics, domain.columns, sigma, receipt)
            return PrivateTopics(terms, clusters, table, topics_per_owner)

        found = release.made(output, topics_of)
        found.reading = release.reading
    elif output is not None:
        found.save(output)
    if llm is not None:
        found = found.named_by(llm)
        if output is not None:
            found.save(output)
    if kept is not None:
        kept.unlink(missing_ok=True)
    return found


def _split(store: ExemplarStore, split: object) -> tuple[str | None, tuple[str, ...]]:
    """The key of the groups, and the groups."""
    if split is None:
        return None, (ONE_GROUP,)
    if not isinstance(split, Mapping) or len(split) != 1:
        raise InvalidParameter("split", split, "a mapping of one key of the records to its public values")
    ((key, groups),) = split.items()
    check_distinct("split", (key,))
    if key == store.input_key:
        raise InvalidParameter("split", key, "another key than the question's")
    if isinstance(groups, str) or not isinstance(groups, Sequence):
        raise InvalidParameter(f"split[{key!r}]", type(groups).__name__, "a list of texts")
    check_distinct(f"split[{key!r}]", groups)
    return key, tuple(groups)


def _kept(output: str | Path, decided_by: Sequence[Any]) -> Path:
    """The file of the terms until the end, which has a name of its own for what has decided them.

    Raises `InvalidParameter` if the topics are there already, or the terms of other settings or of another store.
    """
    path = Path(output)
    if path.exists() and not part_of(path).exists():
        raise InvalidParameter("output", str(output), "a new file: a report of topics is there")
    name = hashlib.sha256(json.dumps(decided_by).encode()).hexdigest()[:16]
    kept = path.with_name(f"{path.name}.{name}.terms")
    for other in path.parent.glob(f"{glob.escape(path.name)}.{'?' * len(name)}.terms*"):
        if other.name not in (kept.name, part_of(kept).name):
            bound = f"a file whose terms are of the same settings and store; to give up those, delete {other.name!r}"
            raise InvalidParameter("output", str(output), bound)
    return kept


def _of_budget(terms: PrivateTerms, budget: PrivacyBudget, path: Path) -> PrivateTerms:
    """The terms of an interrupted release. Raises `InvalidParameter` if they are of another budget."""
    receipt = terms.receipt
    is_own = budget.plan is not None and budget.plan.digest.startswith(receipt["plan"])
    if not is_own or receipt["budget"] != budget.name:
        raise InvalidParameter("output", str(path), f"deleted, or terms of the budget {budget.name!r}")
    return terms


class _Opening:
    """The budget of terms and sum, opened once, and with both lines before the first is used."""

    def __init__(
        self, store: ExemplarStore, budget: PrivacyBudget | CheckedOpening, owners: int | None, line: str
    ) -> None:
        self._store = store
        self._given = budget
        self._owners = owners
        self._line = line
        self._opened: PrivacyBudget | None = None

    def __call__(self, check: Callable[[PrivacyBudget], None]) -> PrivacyBudget:
        """Open it for the terms. Raises what ``check`` raises, before a function is asked to open it."""

        def check_both(trial: PrivacyBudget) -> None:
            self._declare(trial)
            check(trial)

        budget = self._opened = opened(self._given, check_both, self._store, "topics")
        self._declare(budget)
        if budget.remaining(self._line) == 0:
            bound = f"the budget {budget.name!r} has no sum left for the topics of new terms: nothing was charged"
            raise PrivacyBudgetExceeded(bound)
        return budget

    @property
    def budget(self) -> PrivacyBudget:
        """The budget, for the sum."""
        if self._opened is None:
            self._opened = opened(self._given, lambda _: None, self._store, "topics")
        return self._opened

    def _declare(self, budget: PrivacyBudget) -> None:
        options = {"step": 1.0 / LATTICE}
        owners = None if budget.is_frozen else self._owners
        budget.declare(self._line, "sum", 1.0, owners=owners, rate_is_explicit=True, options=options)
