"""Thresholds of a relevance gate: suggested by public texts, or released from the store.

`suggest_threshold` and `ShareThreshold` see nothing private. `release_threshold` draws from a public grid by the
exponential mechanism. Let n_j(t) be the number of owners whom query j of m public ones finds eligible at t, E the
number that is wanted, u(t) = -|mean_j n_j(t) - E| the utility of t, and its weight exp(eps0 u(t) / 2).

**Its range.** Neighbouring stores differ by one OWNER, added or removed, with all its exemplars. Owners are counted,
not exemplars, and whether one is eligible depends on its own exemplars alone; so each n_j(t) moves by 0 or 1, all of
them in one direction, their mean by at most 1, and u(t) by at most 1 either way. The weights exp(eps0 u / 2) of two
neighbours then have ratios within [e^(-eps0/2), e^(eps0/2)], and the losses log(P(t) / Q(t)) lie in an interval of
length eps0, wherever the normaliser puts it: eps0-bounded range (Dong, Durfee, Rogers 2020).

**Its line.** No owner flips a coin here: all take part, so the rate is 1. Amplification at a rate of 1 is none:
`Subsampled.direction_delta` is then the base profile's own and `Losses.removed` and `added` hand back its atoms, in
both directions. So the line costs what `BoundedRange(eps0)` says for one owner added or removed, and adds up with lines
that sample. A selector may then use the threshold for ever: it is a released answer.

**What arithmetic gives away.** Counts and losses are whole numbers: m u(t) = -|sum_j n_j(t) - m E|. The rate
eps0 / (2 m) is rounded down. The draw has exactly the weights above (`privacy.noise`): there is no floating noise
whose last digits could show something, and thresholds of equal utility are drawn with equal chances, none before the
other. Similarities are floats, but each is computed from its own row, so no owner moves another across a threshold.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from langchain_dpicl.budget import PrivacyBudget, Receipt, Replayed
from langchain_dpicl.budget.line import RELEASED
from langchain_dpicl.calls.flow import Flow, run
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness, choose_exponential
from langchain_dpicl.release.base import check_budget
from langchain_dpicl.release.transaction import Charged, Find, Release, Request, transact
from langchain_dpicl.store.base import Numbers, PrivateStore
from langchain_dpicl.store.memory import inner_products, reaches
from langchain_dpicl.store.records import Vectors, embed, embed_query

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

MECHANISM = "threshold"
GRID = tuple(step / 50 for step in range(48))
"""0.00, 0.02, ..., 0.94: where the cosines of text embeddings lie."""
_DIGITS = 4


@dataclass(frozen=True, repr=False)
class SuggestedThreshold:
    """A threshold found with public texts alone, and what to expect of it.

    Attributes
    ----------
    threshold, eligible
        For the selector: the gate, and how many owners it lets through for a query, on average. ``eligible`` is also
        what ``dpicl plan --gated`` asks for.
    share, owners
        The share of owners that is eligible on average, and of how many ``eligible`` was taken.
    low, high
        A tenth of the queries found fewer than ``low`` owners (scaled to ``owners``), a tenth more than ``high``.
    queries, texts
        How many were looked at.
    """

    threshold: float
    eligible: int
    share: float
    owners: int
    low: int
    high: int
    queries: int
    texts: int

    def __repr__(self) -> str:
        return (
            f"SuggestedThreshold(threshold={self.threshold}, eligible={self.eligible}: {self.share:.3g} of "
            f"{self.owners} owners on average, {self.low} to {self.high} for 8 of 10 queries; from {self.queries} "
            f"public queries and {self.texts} public texts)"
        )


def suggest_threshold(
    embeddings: Embeddings,
    queries: Sequence[str],
    texts: Sequence[str],
    *,
    share: float | None = None,
    eligible: int | None = None,
    owners: int | None = None,
    owner_of: Sequence[str | int] | None = None,
) -> SuggestedThreshold:
    """The threshold at which on average a query finds the wanted share of owners eligible.

    Nothing private goes in and nothing is charged: queries and texts are public, or synthetic, and should resemble what
    will be asked and what the store holds. The answer is as good as this resemblance. Give the records of the store
    here and the threshold is private, and its use breaks the guarantee: that is what `release_threshold` is for.

    Parameters
    ----------
    embeddings
        The model that embeds the store's records and queries.
    queries, texts
        Public queries, and public texts in the place of the records.
    share, eligible
        Give one: the share of all owners that a query should find, or their number, which needs ``owners``.
    owners
        How many owners the store has, as a public number. Default: as many as the texts have.
    owner_of
        The owner of each text, if owners have several: an owner counts once, by its best text. Default: each text
        has its own.

    The threshold is rounded down to four digits, and ``share`` and ``eligible`` of the answer are counted at what is
    answered, so they are at least what was wanted, and more if many texts are equally near. Raises
    `InvalidParameter`, `ModelUnavailable` if the model fails on a query, and what a store raises on texts that
    cannot be embedded.
    """
    asked, shown = public_texts("queries", queries), public_texts("texts", texts)
    slots = np.arange(len(shown), dtype=np.int64)  # for each text the position of its owner
    if owner_of is not None:
        if isinstance(owner_of, str) or not isinstance(owner_of, Sequence) or len(owner_of) != len(shown):
            bound = f"a list with one owner for each of {len(shown)} texts"
            raise InvalidParameter("owner_of", type(owner_of).__name__, bound)
        places: dict[str, int] = {}
        for i, owner in enumerate(owner_of):
            if isinstance(owner, bool) or not isinstance(owner, (str, int)):
                raise InvalidParameter(f"owner_of[{i}]", type(owner).__name__, "a text or a whole number")
            slots[i] = places.setdefault(str(owner), len(places))
    held = int(slots.max()) + 1
    crowd = held if owners is None else checks.whole("owners", owners)
    if (share is None) == (eligible is None):
        raise InvalidParameter("share", share, "exactly one of share and eligible")
    if share is not None:
        wanted = checks.probability("share", share)
    elif owners is None:
        raise InvalidParameter("owners", None, "given with eligible: of how many owners that is")
    else:
        wanted = checks.whole("eligible", eligible, at_most=crowd) / crowd
    pairs = wanted * len(asked) * held
    if pairs < 1.0:
        bound = f"at least 1 in {len(asked) * held}, the pairs of a query and an owner seen: give more"
        raise InvalidParameter("share", wanted, bound)
    matrix = embed(embeddings, shown, progress=False)
    best = np.full((len(asked), held), -np.inf, np.float32)  # the similarity of each owner's best text to each query
    for row, text in zip(best, asked, strict=True):
        query = embed_query(embeddings, text, matrix.shape[1])
        np.maximum.at(row, slots, inner_products(matrix, np.arange(len(matrix)), query))
    last = min(best.size, math.ceil(pairs - 1e-9))
    nearest = float(np.partition(best.ravel(), best.size - last)[best.size - last])
    threshold = max(-1.0, math.floor(min(1.0, nearest) * 10**_DIGITS) / 10**_DIGITS)
    shares = reaches(best, threshold).mean(axis=1)
    found = float(shares.mean())
    low, high = (round(float(np.quantile(shares, level)) * crowd) for level in (0.1, 0.9))
    return SuggestedThreshold(threshold, max(1, round(found * crowd)), found, crowd, low, high, len(asked), len(shown))


def public_texts(name: str, texts: object) -> list[str]:
    """The texts, checked. Raises `InvalidParameter`, which shows a position and no text."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
        raise InvalidParameter(name, type(texts).__name__, "a list of at least one text")
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise InvalidParameter(f"{name}[{i}]", type(text).__name__, "a text that is not empty")
    return list(texts)


class ShareThreshold:
    """For each query, the similarity to it that a share of public texts reaches: a selector's ``threshold``.

    One number for all queries lets in crowds for an ordinary query and nobody for a rare one. This lets in about the
    same share of owners for every query, as far as the public texts resemble the private ones. It is a function of the
    query and of public texts alone, so whether an owner is eligible is still a matter between its own data and the
    query.

    Parameters
    ----------
    embeddings
        The model that embeds the store's records and queries.
    texts
        Public or synthetic texts in the place of the records; never the records themselves.
    share
        The share of them, and about of all owners, that a query should find: above 0, at most 1.
    """

    def __init__(self, embeddings: Embeddings, texts: Sequence[str], share: float) -> None:
        shown = public_texts("texts", texts)
        self.share = checks.probability("share", share)
        self._vectors = embed(embeddings, shown, progress=False)
        self._rank = max(1, math.ceil(self.share * len(shown) - 1e-9))
        self._name = hashlib.sha256("\0".join(shown).encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def __call__(self, query: Vectors) -> float:
        """The threshold for a query's vector of norm 1."""
        near = inner_products(self._vectors, np.arange(len(self._vectors)), query)
        return float(np.clip(np.partition(near, len(near) - self._rank)[len(near) - self._rank], -1.0, 1.0))

    def __repr__(self) -> str:
        return f"ShareThreshold(share={self.share:g} of {len(self._vectors)} public texts, {self._name})"


@dataclass(frozen=True)
class ReleasedThreshold:
    """A threshold that was drawn from a grid, with its receipt. Public.

    Attributes
    ----------
    threshold, eligible
        For the selector: the gate, and the number of owners that was asked for. How many there are is not known.
    receipt
        What it cost.
    """

    threshold: float
    eligible: int
    receipt: Receipt


def release_threshold(
    store: PrivateStore,
    queries: Sequence[str],
    budget: PrivacyBudget,
    *,
    eligible: int,
    grid: Sequence[float] = GRID,
    line: str | None = None,
) -> ReleasedThreshold:
    """Release the threshold at which a query finds about so many owners of the store eligible.

    What is released: one threshold of the grid, drawn with probability proportional to exp(eps0 u / 2), with
    u = -|mean number of owners that a query finds eligible - ``eligible``|. Neighbouring relation: one owner of the
    store added or removed, with all its exemplars. Sensitivity: u moves by at most 1 either way, so the draw is
    eps0-bounded range; the module's docstring has the proof. With probability 1 - b the drawn threshold's mean misses
    the wanted number by at most 2 / eps0 * log(len(grid) / b) more than the grid's best.

    Parameters
    ----------
    store
        The private exemplars. Its model embeds the queries, before the charge.
    queries
        Public or synthetic queries that resemble what will be asked. Never callers' own, if those are to stay private.
    budget
        Has a line for the mechanism "threshold" (for most uses a count of 1), whose rate is 1: for instance
        ``releases={"threshold": 1, "vote": LineRequest("vote", rate, 500)}``, or a small budget of its own, whose
        epsilon adds to the other's. It counts all callers together (scope ``"shared"``), since all meet the threshold.
        With ``tickets=True`` every owner pays one of its tickets of this line, and only who has one is counted.
    eligible
        How many owners a query should find, a public number.
    grid
        Distinct thresholds between -1 and 1, chosen without a look at the store.
    line
        The budget's line, if it has several.

    An equal request is answered from the ledger at no cost; else one release is CHARGED before owners are counted. An
    empty store, or queries that find nobody, are no failure: the draw goes on with counts of 0. Raises
    `InvalidParameter`, `PlanMismatch`, `PrivacyBudgetExceeded`, `ModelUnavailable`, `StoreError`, which cost nothing,
    and `ReleaseFailed` after the charge.

    Source: McSherry and Talwar 2007; Dong, Durfee and Rogers 2020, for its range.
    """
    if not isinstance(store, PrivateStore):
        raise InvalidParameter("store", type(store).__name__, "an ExemplarStore")
    asked, wanted = public_texts("queries", queries), checks.whole("eligible", eligible)
    if isinstance(grid, str) or not isinstance(grid, (Sequence, np.ndarray)) or len(grid) < 2:
        raise InvalidParameter("grid", type(grid).__name__, "a list of at least two thresholds")
    steps = sorted(checks.real(f"grid[{i}]", step, at_least=-1.0, at_most=1.0) for i, step in enumerate(grid))
    if len(set(steps)) != len(steps):
        raise InvalidParameter("grid", f"{len(steps)} thresholds", "thresholds that differ from one another")
    check_budget(budget)
    if budget.scope != "shared":
        alone = "every caller meets the threshold: give it a small budget of its own"
        raise InvalidParameter("budget", f"scope={budget.scope!r}", f"a shared budget ({alone})")
    budget.watch(store)
    released, receipt = run(transact(_Draw(store, budget, line), (asked, wanted, tuple(steps))))
    return ReleasedThreshold(released, wanted, receipt)


class _Draw(Release):
    """The steps of a threshold's release. A request is its queries, the wanted number and the grid."""

    def __init__(self, store: PrivateStore, budget: PrivacyBudget, line_name: str | None) -> None:
        self.store, self.budget, self._line_name = store, budget, line_name
        self._randomness: Randomness = SecureRandomness()

    def check(self, values: tuple[list[str], int, tuple[float, ...]]) -> Request:
        """`PlanMismatch` unless all owners take part in the budget's line."""
        queries, wanted, steps = values
        line = self.budget.line(MECHANISM, 1.0, name=self._line_name, rate_is_explicit=True)
        content = {"queries": queries, "eligible": wanted, "grid": list(steps)}
        return self.request(values, line, content, f"{MECHANISM} {self.store.dimension}", content)

    def calls_public(self, request: Request) -> bool:
        """The store's model embeds the queries."""
        return True

    def prepare(self, request: Request) -> Flow[list[Vectors]]:
        """The queries' embeddings."""
        yield from ()
        return [self.store.embed_query(text) for text in request.asked[0]]

    def eligible(self, ready: Any) -> Find | None:
        """Every owner."""
        return None if ready is None else self.everybody

    def work(self, charged: Charged) -> Flow[float]:
        """Count the owners, and draw."""
        (_, wanted, steps), eps0 = charged.request.asked, charged.request.line.parameter
        who = charged.participants
        drawn = yield partial(_choose, self.store, charged.ready, steps, wanted, eps0, self._randomness, who)
        return float(steps[drawn])

    def kept(self, charged: Charged, release: float) -> tuple[str, str | None, int]:
        """A threshold is always released."""
        return RELEASED, json.dumps({"threshold": release}), 0

    def replay(self, request: Request, known: Replayed) -> Flow[float]:
        """The threshold that was released before."""
        yield from ()
        return float(json.loads(known.answer)["threshold"])


def _choose(
    store: PrivateStore,
    vectors: Sequence[Vectors],
    steps: Sequence[float],
    wanted: int,
    eps0: float,
    randomness: Randomness,
    paid: Numbers | None = None,
) -> int:
    """A position in the grid, by the exponential mechanism. Private."""
    found = _found(store, vectors, steps, paid)
    losses = [abs(number - wanted * len(vectors)) for number in found]
    return choose_exponential([1] * len(steps), losses, _rate(eps0, len(vectors)), randomness)


def _found(
    store: PrivateStore, vectors: Sequence[Vectors], steps: Sequence[float], paid: Numbers | None = None
) -> list[int]:
    """For each threshold, ascending, how many owners all queries together find eligible. Private.

    If owners pay with tickets: how many of those who paid.
    """
    totals = np.zeros(len(steps), np.int64)
    with store.reading() as view:
        for query in vectors:
            owners = view.eligible(query, steps[0])
            owners = owners if paid is None else owners[np.isin(owners, paid)]
            rows, position = view.rows_of(owners)
            best = np.full(len(owners), -np.inf, np.float32)
            np.maximum.at(best, position, view.similarity(rows, query))
            totals += [int(reaches(best, step).sum()) for step in steps]
    return [int(total) for total in totals]


def _rate(eps0: float, queries: int) -> float:
    """eps0 / (2 m), for losses that are m times the utility. Rounded down: towards less leakage."""
    rate = eps0 / (2 * queries)
    return rate if Fraction(rate) * 2 * queries <= Fraction(eps0) else math.nextafter(rate, 0.0)
