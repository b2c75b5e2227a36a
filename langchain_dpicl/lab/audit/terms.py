"""The attack on terms: an owner whose term many others give too, or whose terms nobody else gives.

**A shared term.** So many others give it that it is always released, and the attacker, who knows all of them, sees a
Gaussian of mean 1 more with the owner: the best test there is of the counts.

**Terms of its own.** With the owner they are released with probability delta0 at most, and never without. A right
release shows next to nothing of them at the claimed delta; a broken threshold shows all.

With ``canary="outputs"`` the product's own counting and noise run on a real store; with ``canary="owner"`` whole
releases do, each with a ledger of its own.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl.aggregators import Words
from langchain_dpicl.budget import PrivacyBudget
from langchain_dpicl.errors import PrivacyWarning
from langchain_dpicl.lab.audit.cases import SURE, Setting
from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.terms_reading import WordsAndPhrases
from langchain_dpicl.once.terms_release import TermsRelease, release_terms
from langchain_dpicl.privacy import LineRequest, Randomness
from langchain_dpicl.privacy.mechanisms import Terms
from langchain_dpicl.store import ExemplarStore

TERMS = "terms"

TERMS_TRIALS = {"outputs": 30_000, "owner": 1_000}
"""Trials if nobody names a number."""

_RECORDS = 16  # of the canary
_SHARED = "alder"
_OWN = tuple(f"birch{letter}" for letter in "abcdefgh")
_MARGIN = 10.0  # standard deviations of the others' count above the threshold

SeenTerms = Mapping[str, float]
"""The released terms with their noisy counts."""


@dataclass(frozen=True)
class TermsCase:
    """The canary's store and the plan's numbers.

    ``own``: the canary's terms are its own. ``is_whole``: whole releases are made.
    """

    epsilon: float
    delta: float
    releases: int
    parameter: float
    is_whole: bool
    own: bool
    options: Mapping[str, float] = field(default_factory=dict)
    members: int = 0

    @property
    def words(self) -> str:
        """The case in words."""
        what = f"{len(_OWN)} terms that nobody else gives" if self.own else f"a term that {self.others} others give"
        return f"an owner of {_RECORDS} records, which have {what}; all released terms and counts are seen"

    @property
    def others(self) -> int:
        """The number of other owners."""
        threshold = Terms.of(self.options).threshold(self.parameter) / LATTICE
        return math.ceil(threshold + _MARGIN * self.parameter)

    def statistic(self, counts: SeenTerms) -> float:
        """The log-likelihood ratio, with the owner against without; of no term of its own it is about 0."""
        if any(term in counts for term in _OWN):
            return SURE
        if self.own:
            return 0.0
        return (counts.get(_SHARED, -SURE * self.parameter**2) - self.others - 0.5) / self.parameter**2

    def store(self, has_owner: bool) -> ExemplarStore:
        """Others who have the shared term, and the canary or not."""
        text = " ".join(_OWN) if self.own else _SHARED
        rows = [(str(i), _SHARED) for i in range(self.others)]
        rows += [("canary", text)] * (_RECORDS * has_owner)
        return ExemplarStore.from_records(
            [{"input": f"{text} {number}", "owner": owner} for number, (owner, text) in enumerate(rows)],
            DeterministicFakeEmbedding(size=2),
            output_key=None,
            owner_key="owner",
            progress=False,
        )

    def budget(self) -> PrivacyBudget:
        """A budget of its own for one release, with the noise of all releases of the plan."""
        request = LineRequest(TERMS, 1.0, self.releases, options=self.options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # the ledger ends with the process, as it should
            return PrivacyBudget(self.epsilon, self.delta, {TERMS: request}, ledger="sqlite://")


def terms_cases(setting: Setting) -> tuple[TermsCase, ...]:
    """A shared term, and terms of its own."""
    numbers = setting.epsilon, setting.delta, setting.releases, setting.parameter
    options = dict(setting.options)
    return tuple(TermsCase(*numbers, is_whole=setting.unanimous, own=own, options=options) for own in (False, True))


def terms_world(case: TermsCase, has_owner: bool, rate: float, randomness: Randomness) -> Callable[[], SeenTerms]:
    """A function that releases the terms of the store of ordinary owners, with or without the canary.

    Unless releases are whole, the store is read once, and its counts get noise again and again, without charge,
    transaction and receipt.
    """
    words = Words(pattern="[a-z]+")
    store = case.store(has_owner)

    def whole() -> SeenTerms:
        with contextlib.closing(case.budget()) as budget, warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # of other budgets on the same store
            terms = release_terms(store, budget, at_most=len(_OWN), words=words)
        return dict(zip(terms, terms.counts.tolist(), strict=True))

    if case.is_whole:
        return whole
    release = TermsRelease(store, case.budget(), "input", WordsAndPhrases(words, 1), len(_OWN), None, None)
    release._randomness = randomness
    given = release._given(None)

    def counted() -> SeenTerms:
        found = release._passing(given)
        return dict(zip(found.terms, (found.counts / LATTICE).tolist(), strict=True))

    return counted
