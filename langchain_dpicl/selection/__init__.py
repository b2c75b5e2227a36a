"""Poisson selection by owner: the sampling that makes the guarantee true.

Each owner flips its own coin (probability ``rate``) and, if in, draws its own member uniformly from ``members`` and
its own priority within that member's bucket. Every draw is independent of every other owner, so adding or removing one
owner changes one member's bucket and nothing else: that is the whole reason why an aggregator only has to survive the
replacement of one member's output. Therefore nothing here ever chunks the sample, fixes its size or moves an owner
from one bucket to another. What is near to a query is looked for within a bucket, after all draws: this moves nothing
from one bucket to another, and costs no privacy. (The nearest of the whole store, then split, would: without one owner
another would move up into it.)

One owner per call. With ``calls=`` every sampled owner has a bucket, and so a call, of its own. An owner more or less
is then one output more or less, and no other output changes: aggregators need less noise for that. It takes that
nothing else stands in an absent owner's place, so calls that only pad their number reach no aggregator; that one owner
has one call, whatever it holds; that a call is told nothing of the others; and that their number has no cap. With a cap
(``max_calls``) the owners with the smallest priorities are called, each priority drawn by the owner's own coins. One
owner more may displace one other, so one output is REPLACED, and the plan accounts for that.

The relevance gate and filters keep this. Whether an exemplar counts depends on itself, the query, a public threshold
and a public filter; an owner flips its coin if one of its exemplars counts, and its call sees those alone. So for a
given query the owners that they let through are sampled exactly as above, and all others have no part in the release
whatever their data. How many they let through is private like all the rest.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import repeat
from typing import Any, NoReturn

import numpy as np
from langchain_core.example_selectors import BaseExampleSelector
from numpy.typing import NDArray

from langchain_dpicl.errors import (
    InvalidParameter,
    InvalidRecords,
    PrivacyWarning,
    ShutWithinCall,
)
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.choice import FULLEST, Crowd, calls_made
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness
from langchain_dpicl.private import Closed, OwnBucket
from langchain_dpicl.private.bucket import Examples as Examples
from langchain_dpicl.selection.rules import (
    OfPrincipal,
    OfRequests,
    Rules,
    search_query_of,
    text_searched,
)
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.filters import MetadataFilter
from langchain_dpicl.store.matrix import reaches
from langchain_dpicl.store.records import Vectors, attempt
from langchain_dpicl.store.view import StoreView

_BUCKET = round(2 * FULLEST)
"""Owners whom a bucket holds at most if the plan chooses the rate."""


@dataclass(frozen=True, repr=False)
class Sought:
    """A question to the store, from a selector with these ``rules``. Public.

    The query's vector, if nearness counts; the similarity that an exemplar has to reach; the filter that it has to
    pass.
    """

    rules: Rules
    vector: Vectors | None = None
    threshold: float | None = None
    wanted: MetadataFilter | None = None

    def eligible(self, view: StoreView) -> Numbers:
        """The owners with an exemplar that counts. Private."""
        if self.threshold is not None:
            return view.eligible(self.vector, self.threshold, self.wanted)
        return view.numbers if self.wanted is None else view.eligible(None, -1.0, self.wanted)

    def rows(self, view: StoreView, owners: Numbers) -> tuple[Numbers, Numbers, NDArray[np.float32]]:
        """Of these owners' exemplars those that count, each by itself: their rows, each one's position in ``owners``,
        and how far it is from the query, 0 for each if nearness does not count. Private.

        What every call sees comes from here. Of an eligible owner there is a row: `reaches` decides in both.
        """
        rows, position = view.rows_of(owners)
        near = np.zeros(len(rows), np.float32)
        if self.vector is not None:
            near = view.similarity(rows, self.vector)
        counts = np.ones(len(rows), np.bool_)
        if self.threshold is not None:
            counts = reaches(near, self.threshold)
        if self.wanted is not None:
            counts[counts] = view.passing(rows[counts], self.wanted)
        return rows[counts], position[counts], -near[counts]


class BucketSelector(OwnBucket, BaseExampleSelector):
    """The selector's stand-in within a call's copy of a chain: it gives the call's own bucket, and nothing else.

    Raises `ShutWithinCall` for everything else that a selector has.
    """

    def select_examples(self, input_variables: Mapping[str, Any]) -> list[dict[str, Any]]:
        """This call's bucket."""
        return list(self.bucket_here())

    def add_example(self, example: dict[str, str]) -> NoReturn:
        """Refused: members cannot write."""
        raise ShutWithinCall

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ShutWithinCall

    def __repr__(self) -> str:
        return "BucketSelector()"


class PoissonExampleSelector(OwnBucket, Closed, BaseExampleSelector):
    """Poisson sampling of owners, into the buckets of N members or with a call for each of them.

    Parameters
    ----------
    store
        The private exemplars.
    members
        N, the number of parallel calls whose buckets owners share; at least 2. Give this, or ``calls``.
    calls
        One owner per call, and so many calls on average: q = calls / number of owners now (with a ``threshold``: /
        ``eligible``), at most 1. The better choice wherever one owner's exemplars are enough for an answer: the same
        privacy takes less noise.
    pad_to
        With ``calls``: every release makes at least so many calls. Those beyond the sampled owners have no example, and
        their answers are thrown away; only a release that took more tells that by its time. Default: what a Poisson
        number of this mean exceeds once in a thousand releases.
    max_calls
        With ``calls``: at most so many calls, and padding up to exactly this, for a known cost. The plan then needs the
        noise of shared buckets.
    shots, rate
        ``rate`` is q, an owner's chance to take part in one release. ``shots`` is the expected number of owners per
        member, and then q = members * shots / number of owners now (with a ``threshold``: / ``eligible``, at most 1).
        Without either the plan chooses q, for the largest expected margin over noise. The budget's plan keeps its q,
        and this number of owners, from its first release on: however the store grows or shrinks, and wherever the chain
        is built again. More members with fewer shots give a better signal at the same q.
    max_exemplars
        A public cap on a bucket's size, so that prompts fit the model's context; the owners' own random priorities
        decide who stays. Default: twice the expected size, at least 4 more than it, computed from ``shots`` or from
        ``rate`` and ``eligible``; ``exemplars_per_owner`` with ``calls``, 8 times that if the plan chooses the rate.
        Required if ``rate`` is given without ``eligible``: the cap acts on every member, so it is never computed from
        the number of owners in the store, which one owner changes.
    exemplars_per_owner
        How many of a sampled owner's exemplars enter, drawn by the owner's own coins. Default 1.
    threshold
        The relevance gate, from -1 to 1: only exemplars count whose similarity (the cosine) to the query reaches this.
        An owner is eligible for a query, and flips its coin, if one of its exemplars counts, and its call sees those
        alone. Public: `suggest_threshold` finds one without looking at the store. Or a function that gives one for a
        query's vector, such as a `ShareThreshold`, of public facts alone; it is asked once for a request, and its
        ``repr`` tells the ledger which it is. With a budget of ``tickets=True`` an owner pays for the queries that it
        was eligible for, and for no others.
    eligible
        With a threshold or a filter: how many owners are eligible for a typical query. A PUBLIC estimate, by which
        ``shots`` or ``calls`` become a rate and the plan counts votes; never the number that a query of yours has
        found. With ``filter`` or ``visible_to`` it is always needed: the number of owners whom one caller's filter lets
        through, of callers with few. Too high: few votes, which noise decides, and nothing can warn, since the true
        number is private. Too low: more noise than needed. Below 1: the share of the owners when the plan is made, at
        most all; without a filter at least twice the calls (or members).
    nearest_to
        The request's key under which the query stands, a text; with a ``threshold`` "input" unless told otherwise.
        Then, within each bucket, the ``max_exemplars`` (required here, unless ``eligible`` is given) that are most
        similar to the query stay, the most similar first, and of an owner's exemplars the most similar ones enter;
        equal ones in the owners' random order.
    filter
        Which exemplars count, by their metadata: a mapping such as ``{"team": "a", "year": {"$gte": 2020}}`` (see
        `langchain_dpicl.store.filters`; anything else is refused, never dropped), or a function of the request that
        gives one, or None; of several in a tuple all. What a function gives compares for equality, unless it writes a
        `Condition`: a mapping that stands for a value is refused, since a request can hold one. An owner is eligible
        if ONE exemplar passes it, and the threshold if there is one; its call sees only exemplars that pass both.
        Public, and part of what the ledger takes for an equal question. A filter alone is a gate, for a budget of
        tickets too.
    visible_to
        What a caller may see: a function of the principal (`acting_for`) that gives such a filter, or "everything".
        It counts beside ``filter``. Without a principal, or if the function fails or gives None, as for a caller who
        has no rule, a request is refused at no cost.
    search_query
        Makes the text to be near to, if that is not what stands under ``nearest_to``: a Runnable or a function of the
        request, such as a model that makes one question of a chat's history. A public call before the charge; if it
        fails, or gives no text, that is `ModelUnavailable` at no cost. The ledger's replay knows that there is one, and
        not which: give two of them two lines, as two members.

    With ``nearest_to``, a sampled bucket of a few exemplars has nothing near to offer, so take a higher ``rate`` than
    without: it finds better exemplars and amplifies less. At rate=1 all owners are split at random into N private
    collections that are each searched whole, and nothing is amplified. The query's embedding is public, made before the
    charge by the store's model. A vector counts as its exemplar's own data: see `ExemplarStore.from_records` for models
    that embed a text a little differently beside other texts.

    Sampled buckets are private; they are meant for `PrivateEnsemble` alone. As a LangChain ``BaseExampleSelector``, for
    instance in a ``FewShotPromptTemplate`` within the member chain, `select_examples` gives that member's own bucket.
    """

    def __init__(
        self,
        store: ExemplarStore,
        members: int | None = None,
        *,
        calls: float | None = None,
        pad_to: int | None = None,
        max_calls: int | None = None,
        shots: int | None = None,
        rate: float | None = None,
        max_exemplars: int | None = None,
        exemplars_per_owner: int = 1,
        threshold: float | Callable[[Vectors], float] | None = None,
        eligible: float | None = None,
        nearest_to: str | None = None,
        filter: OfRequests = None,
        visible_to: OfPrincipal = None,
        search_query: Any = None,
    ) -> None:
        if not isinstance(store, ExemplarStore):
            raise InvalidParameter("store", type(store).__name__, "an ExemplarStore")
        self.store = store
        self.members = calls_made(members, calls, pad_to, max_calls)
        """N, or how many calls a release makes at least (exactly, with ``max_calls``)."""
        self.calls = None if calls is None else float(calls)
        """The mean number of calls of one owner each in a release; None for shared buckets."""
        self.max_calls = max_calls
        self.exemplars_per_owner = checks.whole("exemplars_per_owner", exemplars_per_owner)
        if shots is not None and (rate is not None or calls is not None):
            raise InvalidParameter("shots", shots, "None with rate or calls")
        if threshold is not None and not callable(threshold):
            threshold = _threshold(threshold)
        if threshold is not None and nearest_to is None:
            nearest_to = "input"
        self.threshold = threshold
        self.rules = Rules(filter, visible_to, store.owner_key)
        self._eligible = self._checked_eligible(eligible, rate)
        self.rate_is_explicit = rate is not None
        self.rate: float | None = None if rate is None else checks.probability("rate", rate)
        """q as proposed for a plan that is not frozen yet; None if the plan chooses it."""
        self._shots = 0 if shots is None else checks.whole("shots", shots)
        self.owners: int | None = None
        """The number of owners in the store when `rate` was computed from it. For freezing a plan alone."""
        self.expected_owners: float | None = None
        """The owners of one sample, if that was asked for: as public as ``shots``."""
        asked: float | None = self.calls
        if self._shots:
            asked = self.members * self._shots
        if asked is not None:
            self.expected_owners = min(asked, self.sampled_from(None) or asked)
        if asked is not None and rate is None:
            self.rate = min(1.0, asked / self._count())
        if nearest_to is not None and (not isinstance(nearest_to, str) or nearest_to in ("", "examples")):
            raise InvalidParameter(
                "nearest_to",
                nearest_to,
                "the name of the request's key that holds the query",
            )
        self.nearest_to = nearest_to
        self.search_query = search_query_of(search_query, nearest_to)
        if max_exemplars is None:
            max_exemplars = self._usual_cap()
        self.max_exemplars = checks.whole("max_exemplars", max_exemplars)
        self._randomness: Randomness = SecureRandomness()

    def _checked_eligible(self, eligible: float | None, rate: float | None) -> float | None:
        """Return the number of owners eligible for a typical query, or below 1 their share; None if not given."""
        if eligible is not None and not self.gated:
            raise InvalidParameter(
                "eligible",
                eligible,
                "None without a threshold or a filter: every owner is eligible",
            )
        if eligible is None and self.rules:
            raise InvalidParameter(
                "eligible",
                None,
                "given with a filter or visible_to: the number of owners whom one caller's filter (and the threshold, "
                "if there is one) lets through, a public estimate. Too high a number leaves few votes, which noise "
                "then decides with no warning; too low a one takes more noise. No count of the store gives it: who "
                "stands behind a filter is private",
            )
        if eligible is None and self.gated and rate is None:
            raise InvalidParameter(
                "eligible",
                None,
                "given with shots or calls if there is a threshold, or give rate",
            )
        if eligible is None or (isinstance(eligible, float) and 0.0 < eligible < 1.0):
            return eligible
        return checks.whole("eligible", eligible)

    def _usual_cap(self) -> int:
        """``max_exemplars`` unless it is given: max(2 e, e + 4) for e expected exemplars in a bucket, rounded up."""
        if self.calls is not None:
            return self.exemplars_per_owner
        if self.rate is None:
            return _BUCKET * self.exemplars_per_owner
        if self.nearest_to is not None and self.threshold is None:
            raise InvalidParameter("max_exemplars", None, "given if nearest_to is: how many a member gets")
        owners = Fraction(self.expected_owners or 0)
        if self.rate_is_explicit:
            owners = Fraction(repr(self.rate)) * (self.sampled_from(None) or 0)
        if not owners:
            raise InvalidParameter(
                "max_exemplars",
                None,
                "given if rate is, without eligible: how many a member gets at most, a number that is public",
            )
        expected = owners * self.exemplars_per_owner / self.members
        return max(math.ceil(2 * expected), math.ceil(expected) + 4)

    @property
    def gated(self) -> bool:
        """Return whether a query and public rules decide which owners are eligible for it."""
        return self.threshold is not None or bool(self.rules)

    @property
    def own_calls(self) -> bool:
        """Return whether an owner more or less is one output more or less."""
        return self.calls is not None and self.max_calls is None

    def _count(self) -> int:
        """Return how many may be sampled for a typical query now. Only for a plan that is not frozen yet."""
        if self.sampled_from(None) is None:
            self.owners = self.store.owner_count
        return self.sampled_from(self.owners) or 1

    def let_plan_choose(self, choose: Callable[[int], float]) -> float:
        """The rate that was asked for, or else the one that a plan's function finds for the owners who may be sampled.

        The selector does not keep it: on another budget, another plan chooses.
        """
        return choose(self._count()) if self.rate is None else self.rate

    def crowd(self, rate: float, owners: int | None) -> Crowd:
        """The public numbers of one release's outputs at a plan's rate, chosen for so many owners (None: unknown)."""
        return Crowd.of(
            self.members,
            rate,
            self.sampled_from(owners),
            self.calls,
            self.max_calls is not None,
        )

    def sampled_from(self, owners: int | None) -> int | None:
        """The public number of owners who may be sampled for a typical query, of so many in all (None: unknown)."""
        if self._eligible is not None and self._eligible >= 1:
            return int(self._eligible)
        if self._eligible is None or owners is None:
            return owners
        least = 1 if self.rules else math.ceil(2 * (self.calls or self.members))
        return min(owners, max(least, math.ceil(self._eligible * owners)))

    def check_owners(self) -> None:
        """Refuse a store with too few owners to sample as asked: `InvalidParameter`, or `InvalidRecords` for none.

        For the moment before a plan is frozen. Under a frozen plan nothing is refused: its rate stands, and a store
        from which owners have gone must not keep a chain from being built again.
        """
        if self.store.owner_count == 0:
            raise InvalidRecords("the store is empty: there is nobody to sample")
        if self._shots and self.owners is not None and self.members * self._shots > self.owners:
            raise InvalidParameter(
                "shots",
                self._shots,
                f"members * shots must not exceed the number of owners ({self.owners})",
            )

    def check_query(self, values: Mapping[str, Any]) -> None:
        """Refuse a request without a text to be near to. Raises `InvalidParameter`; never shows the input."""
        if self.nearest_to is None or self.search_query is not None:
            return
        text = values.get(self.nearest_to)
        if not isinstance(text, str):
            raise InvalidParameter("input", sorted(values), f"a mapping with a text under {self.nearest_to!r}")
        if not text.strip():
            raise InvalidParameter(
                "input",
                f"{len(text)} characters",
                f"a text that is not empty as {self.nearest_to!r}",
            )

    def embed_query(self, values: Mapping[str, Any], principal: str | None = None) -> Sought:
        """Return the question for `sample`, of a checked request. Raises what the store's does, and what `seek` does.

        The filters that ``filter`` and ``visible_to`` give for the request and its caller are part of it.
        """
        wanted = self.rules.wanted(values, principal)
        if self.nearest_to is None:
            return self.seek(None, wanted)
        text = values.get(self.nearest_to)
        if self.search_query is not None:
            text = text_searched(self.search_query.invoke(dict(values)))
        return self.seek(self.store.embed_query(text), wanted)  # type: ignore[arg-type]

    def seek(self, vector: Vectors | None, wanted: MetadataFilter | None) -> Sought:
        """The question to the store for a query's vector and filter, with the threshold for this vector.

        Raises `InvalidParameter` for a function that gives no threshold.
        """
        threshold = self.threshold
        if callable(threshold):
            given, fault = attempt(threshold, vector)
            if fault:
                raise InvalidParameter(
                    "threshold",
                    fault,
                    "a function that gives a number; nothing was charged",
                )
            threshold = _threshold(given)
        return Sought(self.rules, vector, threshold, wanted)

    def eligible(self, query: Vectors | Sought | None) -> Numbers:
        """The owners whom gate and filter let through for what `embed_query` gave. Private."""
        if not self.gated:
            raise InvalidParameter("threshold", None, "given: without one nobody is let through, or kept out")
        sought = self.sought(query)
        with self.store.reading() as view:
            return sought.eligible(view)

    def sought(self, query: Vectors | Sought | None) -> Sought:
        """Return the question of `embed_query`, or of a vector alone if there is no filter.

        Raises `InvalidParameter` for others.
        """
        if isinstance(query, Sought) and query.rules is self.rules:
            return query
        if isinstance(query, Sought) or self.rules or (query is None) != (self.nearest_to is None):
            raise InvalidParameter("query", type(query).__name__, "what embed_query gave for the request")
        return self.seek(query, None)

    def sample(
        self,
        rate: float | None = None,
        query: Vectors | Sought | None = None,
        among: Numbers | None = None,
        with_vectors: bool = False,
    ) -> list[Examples]:
        """N buckets, some perhaps empty, or with ``calls`` one for each sampled owner. Private.

        Cost grows with the number of owners sampled.

        ``rate`` is the plan's q if a budget has fixed it; default: the selector's own. ``query`` is what `embed_query`
        gave. ``among`` are the owners who may flip a coin, if a budget has asked `eligible` already. ``with_vectors``:
        buckets carry their exemplars' vectors, for members that search them.
        """
        sought = self.sought(query)
        draw = self._randomness
        if rate is None:
            rate = self.rate
        if rate is None:
            raise InvalidParameter("rate", None, "the plan's, which chooses it")
        with self.store.reading() as view:
            if among is None:
                among = sought.eligible(view)
            chosen = among[draw.coin_positions(len(among), rate)]
            priority = draw.uniforms(len(chosen))
            rows, position, far = sought.rows(view, chosen)
            if self.calls is None:
                buckets_made = self.members
                member_of = draw.integers(self.members, len(chosen))
            else:
                there = np.unique(position)  # a forgotten owner has a coin, but no row, and so no call
                called = there[np.argsort(priority[there])][: self.max_calls]
                buckets_made = len(called)
                member_of = np.full(len(chosen), -1)
                member_of[called] = np.arange(buckets_made)
                is_called = member_of[position] >= 0
                rows = rows[is_called]
                position = position[is_called]
                far = far[is_called]
            order_within = draw.uniforms(len(rows))
            # Of one owner's rows the nearest, else the first in its own random order.
            kept = np.lexsort((order_within, far, position))
            kept = kept[_first_of_each(position[kept], self.exemplars_per_owner)]
            # Of one bucket's rows the nearest, else the first by their owners' own priorities.
            bucket_of = member_of[position]
            by_bucket = np.lexsort((order_within[kept], priority[position[kept]], far[kept], bucket_of[kept]))
            kept = kept[by_bucket]
            kept = kept[_first_of_each(bucket_of[kept], self.max_exemplars)]
            exemplars = view.read(rows[kept])
            vectors: Iterable[Vectors | None] = view.vectors(rows[kept]) if with_vectors else repeat(None)
        buckets = [Examples((), self.store.input_key, self.store.output_key) for _ in range(buckets_made)]
        for member, exemplar, vector in zip(bucket_of[kept].tolist(), exemplars, vectors, strict=False):
            buckets[member].add(exemplar, vector)
        return buckets

    def in_call(self) -> BucketSelector:
        return BucketSelector()

    def add_example(self, example: dict[str, str]) -> Any:
        """Add one private exemplar, its own owner, to the store."""
        return self.store.add([example])[0]

    def select_examples(self, input_variables: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One fresh Poisson bucket, with a `PrivacyWarning`. Within a member there is its own bucket in its place."""
        warnings.warn(
            "select_examples outside of a sealed release returns private examples, and no budget counts it; "
            "use it within the member chain of a PrivateEnsemble",
            PrivacyWarning,
            stacklevel=2,
        )
        self.check_query(input_variables)
        return list(next(iter(self.sample(query=self.embed_query(input_variables))), []))

    @property
    def shown_rate(self) -> str:
        """The rate for a ``repr``; empty if it would show the number of owners that the store holds now."""
        return f", rate={self.rate:.6g}" if self.owners is None and self.rate is not None else ""

    def __repr__(self) -> str:
        shown = f"members={self.members}"
        if self.calls is not None:
            limit = "max_calls" if self.max_calls else "pad_to"
            shown = f"calls={self.calls:g}, {limit}={self.members}"
        shown += f"{self.shown_rate}, max_exemplars={self.max_exemplars}"
        for name in ("nearest_to", "threshold"):
            if getattr(self, name) is not None:
                shown += f", {name}={getattr(self, name)!r}"
        return f"PoissonExampleSelector({shown})"


def _threshold(value: object) -> float:
    return checks.real("threshold", value, at_least=-1.0, at_most=1.0)


def _first_of_each(group: NDArray[np.int64], limit: int) -> NDArray[np.bool_]:
    """Return a mask of the entries that are among the first ``limit`` of their ``group``; groups ascend."""
    return np.arange(len(group)) - np.searchsorted(group, group) < limit
