"""A threshold from the store, drawn of a public grid by the exponential mechanism.

**The mechanism.** Let n_j(t) be the number of owners whom query j of m public ones finds eligible at t, and let E be
the number that is wanted. The utility of t is u(t) = -|mean_j n_j(t) - E|, and t is drawn with probability
proportional to exp(eps0 u(t) / 2).

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

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from langchain_dpicl.budget import Budget, Receipt, Replayed
from langchain_dpicl.budget.line import RELEASED
from langchain_dpicl.calls.flow import Flow, run
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness, choose_exponential
from langchain_dpicl.release.base import check_budget
from langchain_dpicl.release.transaction import Charged, Find, Release, Request, transact
from langchain_dpicl.selection.suggest import public_texts
from langchain_dpicl.store.base import Numbers, PrivateStore
from langchain_dpicl.store.records import Vectors

MECHANISM = "threshold"
GRID = tuple(step / 50 for step in range(48))
"""0.00, 0.02, ..., 0.94: where the cosines of text embeddings lie."""


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
    budget: Budget,
    *,
    eligible: int,
    grid: Sequence[float] = GRID,
    line: str | None = None,
    noise: float | None = None,
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
    noise
        eps0, for a `PrivacyBudget.filtered` alone; a plan sets its own.

    Order: the request is checked, an equal one is answered from the ledger at no cost, the queries are embedded, one
    release is CHARGED, owners are counted, the threshold is drawn, its receipt is recorded. An empty store, or queries
    that find nobody, are no failure: the draw goes on with counts of 0. Raises `InvalidParameter`, `PlanMismatch`,
    `PrivacyBudgetExceeded`, `ModelUnavailable`, `StoreError`, which cost nothing, and `ReleaseFailed` after the charge.

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
    check_budget(budget, noise)
    if budget.scope != "shared":
        alone = "every caller meets the threshold: give it a small budget of its own"
        raise InvalidParameter("budget", f"scope={budget.scope!r}", f"a shared budget ({alone})")
    budget.watch(store)
    released, receipt = run(transact(_Draw(store, budget, line, noise), (asked, wanted, tuple(steps))))
    return ReleasedThreshold(released, wanted, receipt)


class _Draw(Release):
    """The steps of a threshold's release. A request is its queries, the wanted number and the grid."""

    def __init__(self, store: PrivateStore, budget: Budget, line_name: str | None, noise: float | None) -> None:
        self.store, self.budget, self._line_name = store, budget, line_name
        self._chosen: dict[str, Any] = {} if noise is None else {"parameter": noise}
        self._randomness: Randomness = SecureRandomness()

    def check(self, values: tuple[list[str], int, tuple[float, ...]]) -> Request:
        """`PlanMismatch` unless all owners take part in the budget's line."""
        queries, wanted, steps = values
        about: dict[str, Any] = {"options": {}, "fingerprint": self.store.fingerprint, **self._chosen}
        line = self.budget.line(MECHANISM, 1.0, name=self._line_name, rate_is_explicit=True, **about)
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

        def everybody() -> Numbers:
            with self.store.reading() as view:
                return view.numbers

        return None if ready is None else everybody

    def work(self, charged: Charged) -> Flow[float]:
        """Count the owners, and draw."""
        (_, wanted, steps), eps0 = charged.request.asked, charged.request.line.parameter
        who = charged.participants
        drawn = yield partial(_choose, self.store, charged.ready, steps, wanted, eps0, self._randomness, who)
        return float(steps[drawn])

    def kept(self, charged: Charged, release: float) -> tuple[str, str | None, int]:
        """A threshold is always released."""
        return RELEASED, json.dumps({"threshold": release}), 0

    def answer(self, charged: Charged, release: float, receipt: Receipt) -> Flow[float]:
        """The threshold."""
        yield from ()
        return release

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

    Where owners pay with tickets: how many of those who paid.
    """
    totals = np.zeros(len(steps), np.int64)
    with store.reading() as view:
        for query in vectors:
            owners = view.eligible(query, steps[0])
            owners = owners if paid is None else owners[np.isin(owners, paid)]
            rows, position = view.rows_of(owners)
            best = np.full(len(owners), -np.inf, np.float32)
            np.maximum.at(best, position, view.similarity(rows, query))
            totals += [int((best >= step).sum()) for step in steps]
    return [int(total) for total in totals]


def _rate(eps0: float, queries: int) -> float:
    """eps0 / (2 m), for losses that are m times the utility. Rounded down: towards less leakage."""
    rate = eps0 / (2 * queries)
    return rate if Fraction(rate) * 2 * queries <= Fraction(eps0) else math.nextafter(rate, 0.0)
