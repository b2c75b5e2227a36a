"""The release of terms: what enough owners say, of no listed domain, by one noisy count of what somebody gave."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.aggregators import Words
from langchain_dpicl.budget import Charge, PrivacyBudget, Receipt
from langchain_dpicl.calls.flow import Flow
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.sums import CheckedOpening, SumRelease, on_budget, owner_sum
from langchain_dpicl.once.terms import PrivateTerms
from langchain_dpicl.once.terms_reading import (
    MOST_WORDS,
    TermReader,
    TokenKeys,
    WholeTexts,
    WordsAndPhrases,
    given_terms,
)
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.mechanisms import Terms
from langchain_dpicl.release.base import warn_of_delta
from langchain_dpicl.release.transaction import Charged
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.view import StoreView

Source = Literal["input", "output", "both"]


class CountedTerms(NamedTuple):
    """Terms with their counts in lattice steps."""

    terms: list[str]
    counts: NDArray[np.int64]


class TermsRelease(SumRelease):
    """The one noisy count of the terms that owners give.

    The ledger keeps the released terms alone, as the step and as the answer: neither a term nor a noisy count below
    the threshold, and not how many terms there were.
    """

    mechanism = "terms"
    names = ("dpicl-terms-part-1", "release of terms", "list of terms")
    needs_owners = False

    def __init__(
        self,
        store: ExemplarStore,
        budget: PrivacyBudget,
        source: Source,
        reader: TermReader,
        at_most: int,
        owners: int | None,
        line_name: str | None,
    ) -> None:
        facts = {"source": source, "read": reader.facts, "at_most": at_most}
        options = {"at_most": float(at_most)}
        super().__init__(store, budget, (1, at_most), facts, owners, line_name, options)
        keys = {"input": store.input_key, "output": store.output_key}
        self._keys = [key for name, key in keys.items() if key is not None and source in (name, "both")]
        self._reader = reader
        self._at_most = at_most
        family = self.line.plan_line.family
        assert isinstance(family, Terms)
        self.threshold = family.threshold(self.line.parameter)
        """In lattice steps. Public."""

    def work(self, charged: Charged) -> Flow[CountedTerms]:
        """The released terms, if the ledger does not have them, of the records of one moment."""
        begun: list[Any] = yield partial(self._begun, charged)
        found: CountedTerms = begun[0] if begun else (yield partial(self._released, charged))
        return found

    def _released(self, charged: Charged) -> CountedTerms:
        assert isinstance(charged.entry, Charge)
        found = self._packed(self._passing(self._given(charged.participants)))
        if self._keeps:
            found = charged.request.line.keep_step(charged.entry, 0, found)
        return self._replayed(found)

    def _given(self, paid: Numbers | None) -> CountedTerms:
        """The terms that somebody gives, with the sums of their owners' weights. Private."""
        self._records = 0
        self._silent = 0
        places: dict[str, int] = {}
        owners: list[int] = []
        cells: list[int] = []
        with self.store.reading() as view:
            for owner, texts in groupby(self._read(view, paid), itemgetter(0)):
                given = given_terms((terms for _, terms in texts), self._at_most, self._randomness)
                owners += [owner] * len(given)
                cells += [places.setdefault(term, len(places)) for term in given]
        ones = np.ones(len(cells), np.int64)
        total = owner_sum(np.array(owners, np.int64), np.array(cells, np.int64), ones, len(places))
        return CountedTerms(list(places), total)

    def _read(self, view: StoreView, paid: Numbers | None) -> Iterator[tuple[int, set[str]]]:
        """Each record's owner, ascending, and its text's terms. Private."""
        known: TokenKeys = {}
        for some, whose in self._pages(view, paid):
            for owner, record in zip(whose.tolist(), view.read(some), strict=True):
                terms = self._reader.terms(self._text(record), known)
                self._records += 1
                self._silent += not terms
                yield owner, terms

    def _text(self, record: Mapping[str, Any]) -> str:
        return "\n".join(str(record[key]) for key in self._keys if record.get(key) is not None)

    def _passing(self, given: CountedTerms) -> CountedTerms:
        """The terms whose noisy count reaches the threshold, by that count, of equal ones by their bytes. Public."""
        noise = self._randomness.discrete_gaussian(self.line.parameter * LATTICE, len(given.terms))
        noisy = given.counts + noise
        places = np.flatnonzero(noisy >= self.threshold).tolist()
        places.sort(key=lambda place: (-noisy[place], given.terms[place].encode("utf-8", "surrogatepass")))
        return CountedTerms([given.terms[place] for place in places], noisy[places])

    def _packed(self, release: CountedTerms) -> str:
        return json.dumps([release.terms, release.counts.tolist()])

    def _replayed(self, content: str) -> CountedTerms:
        terms, counts = json.loads(content)
        return CountedTerms(terms, np.array(counts, np.int64))

    def _unpacked(self, content: str) -> Any:
        return self._replayed(content)

    def _result(self, release: CountedTerms) -> Any:
        return release


def release_terms(
    store: ExemplarStore,
    budget: PrivacyBudget | CheckedOpening,
    *,
    at_most: int = 8,
    source: Source = "input",
    read: Literal["words", "whole"] = "words",
    words: Words | None = None,
    phrases: int = 1,
    owners: int | None = None,
    output: str | Path | None = None,
    line: str | None = None,
) -> PrivateTerms:
    """Release the terms that enough owners use: words, phrases or whole outputs for which nobody can list a domain.

    Parameters
    ----------
    store
        The records, by owner.
    budget
        Has a line for the mechanism "terms", whose rate is 1: for instance ``releases={"terms": 1, "head": 1}``, whose
        other lines are declared first (`PrivacyBudget.declare`), or a budget of its own. It counts all callers together
        (scope ``"shared"``). Unless its line says otherwise, half of delta is for delta0, the probability that a term
        of one owner alone is released. Or a function that opens it, as `PrivateHead.fit` takes one.
    at_most
        The most terms that an owner gives: those that most of its records have, ties by its own coins. An owner of m
        terms adds 1/sqrt(m) to each.
    source
        The text of a record: its "input", its "output", or "both".
    read
        "words": a text's terms are its words, and its phrases. "whole": the whole text is one term, for instance a
        label that nobody can list, if it has at most 200 characters.
    words
        What counts as a word (`Words`), of a text without case and accents. Its stop words must be a public list, and a
        tokenizer must keep nothing of what it reads. Default: ``Words()``.
    phrases
        The most words of a phrase, from 1 (words alone) to 3.
    owners
        The number of owners, as a public number, for a warning if delta is large beside it.
    output
        A file for the terms. Then an interrupted release goes on when it is called again with the same settings: it is
        charged once. This needs a budget that replays (``replay=True`` or ``"principal"``) and has no tickets.
    line
        The budget's line, if it has several.

    Raises `InvalidParameter`, `PlanMismatch` (as for another ``at_most`` than the frozen plan's), `InfeasiblePlan`,
    `PrivacyBudgetExceeded`, `StoreError`, which cost nothing, and after the charge `ReleaseFailed`.
    """
    if not isinstance(store, ExemplarStore):
        raise InvalidParameter("store", type(store).__name__, "an ExemplarStore")
    if source not in ("input", "output", "both"):
        raise InvalidParameter("source", source, '"input", "output" or "both"')
    if source == "output" and store.output_key is None:
        raise InvalidParameter("store", "no output_key", "a store whose records have outputs")
    at_most = checks.whole("at_most", at_most, at_most=1000)
    reader = _reader(read, words, phrases)
    owners = None if owners is None else checks.whole("owners", owners)

    def release_on(budget: PrivacyBudget) -> TermsRelease:
        return TermsRelease(store, budget, source, reader, at_most, owners, line)

    release = on_budget(release_on, budget, store, output, "terms")
    if release.owners:
        warn_of_delta(release.budget, release.owners, stacklevel=3)

    def terms_of(found: CountedTerms, receipt: Receipt) -> PrivateTerms:
        counts = found.counts / LATTICE
        return PrivateTerms(found.terms, counts, release.line.parameter, release.threshold / LATTICE, receipt)

    terms = release.made(output, terms_of)
    terms.reading = release.reading
    return terms


def reader_of_words(words: object, phrases: object) -> WordsAndPhrases:
    """The reader of words and phrases. Raises `InvalidParameter`."""
    if words is not None and not isinstance(words, Words):
        raise InvalidParameter("words", type(words).__name__, "Words")
    longest = checks.whole("phrases", phrases, at_most=MOST_WORDS)
    return WordsAndPhrases(Words() if words is None else words, longest)


def _reader(read: object, words: object, phrases: object) -> TermReader:
    if read not in ("words", "whole"):
        raise InvalidParameter("read", read, '"words" or "whole"')
    if read == "words":
        return reader_of_words(words, phrases)
    for name, value in (("words", words), ("phrases", None if phrases == 1 else phrases)):
        if value is not None:
            raise InvalidParameter(name, value, 'left out with read="whole"')
    return WholeTexts()
