"""Poisson selection by owner: the sampling that makes the guarantee true.

Each owner flips its own coin (probability ``rate``) and, if in, draws its own member uniformly from ``members`` and
its own priority within that member's bucket. Every draw is independent of every other owner, so adding or removing one
owner changes one member's bucket and nothing else: that is the whole reason why an aggregator only has to survive the
replacement of one member's output. Therefore nothing here ever chunks the sample, fixes its size or moves an owner
from one bucket to another. What is near to a query is looked for within a bucket, after all draws: this moves nothing
from one bucket to another, and costs no privacy. (The nearest of the whole store, then split, would: without one owner
another would move up into it.)

The relevance gate keeps this. Whether an owner may flip its coin at all depends on its own exemplars, the query and a
public threshold, so for a given query the owners that the gate lets through are sampled exactly as above, and all
others have no part in the release whatever their data. The number that it lets through is private like all the rest.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
from langchain_core.example_selectors import BaseExampleSelector
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidParameter, InvalidRecords, PrivacyWarning, UnsafeConfigurationError
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness
from langchain_dpicl.private import Closed, OwnBucket
from langchain_dpicl.private.boundary import current_bucket
from langchain_dpicl.store.base import Numbers, PrivateStore
from langchain_dpicl.store.records import Vectors


class Examples(list[dict[str, Any]]):
    """One member's exemplars, as mappings. Private: ``repr`` and ``str`` show their number alone.

    A prompt template's ``{examples}`` shows input and output as text, one ``Key: value`` line each, with a blank line
    between exemplars.
    """

    def __init__(self, items: Iterable[dict[str, Any]] = (), input_key: str = "input", output_key: str | None = None):
        super().__init__(items)
        self.input_key = input_key
        self.output_key = output_key

    def __format__(self, spec: str) -> str:
        return "\n\n".join(
            "\n".join(f"{key.capitalize()}: {exemplar[key]}" for key in (self.input_key, self.output_key) if key)
            for exemplar in self
        )

    def __repr__(self) -> str:
        return f"<{len(self)} private examples>"

    __str__ = __repr__

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("private examples are not pickled or copied")


class PoissonExampleSelector(OwnBucket, Closed, BaseExampleSelector):
    """Poisson sampling of owners into the buckets of N members.

    Parameters
    ----------
    store
        The private exemplars.
    members
        N, the number of parallel calls; at least 2.
    shots, rate
        Give one. ``rate`` is q, an owner's chance to take part in one release. ``shots`` is the expected number of
        owners per member, and then q = members * shots / number of owners now (with a ``threshold``: / ``eligible``, at
        most 1). The budget's plan keeps this q, and this number of owners, from its first release on: however the store
        grows or shrinks, and wherever the chain is built again. More members with fewer shots give a better signal at
        the same q.
    max_exemplars
        A public cap on a bucket's size, so that prompts fit the model's context; the owners' own random priorities
        decide who stays. Default: twice the expected size, at least 4 more than it, computed from ``shots`` or from
        ``rate`` and ``eligible``. Required if ``rate`` is given without ``eligible``: the cap acts on every member,
        so it is never computed from the number of owners in the store, which one owner changes.
    exemplars_per_owner
        How many of a sampled owner's exemplars enter, drawn by the owner's own coins. Default 1.
    threshold
        The relevance gate, from -1 to 1: an owner is eligible for a query, and flips its coin, only if the similarity
        (the cosine) of its best exemplar to the query reaches this. Public: `suggest_threshold` finds one without
        looking at the store, `release_threshold` for a part of a budget. Or a function that gives one for a query's
        vector, such as a `ShareThreshold`: of public facts alone, and the same at every call; its ``repr`` tells the
        ledger which it is. With a budget of ``tickets=True`` an owner pays for the queries that it was eligible for,
        and for no others.
    eligible
        With a threshold: how many owners are eligible for a typical query. A PUBLIC estimate, by which ``shots``
        becomes a rate; never the number that a query of yours has found.
    nearest_to
        The request's key under which the query stands, a text; with a ``threshold`` "input" unless told otherwise.
        Then, within each bucket, the ``max_exemplars`` (required here, unless ``eligible`` is given) that are most
        similar to the query stay, the most similar first, and of an owner's exemplars the most similar ones enter;
        equal ones in the owners' random order.

    With ``nearest_to``, a sampled bucket of a few exemplars has nothing near to offer, so take a higher ``rate`` than
    without: it finds better exemplars and amplifies less. At rate=1 all owners are split at random into N private
    collections that are each searched whole, and nothing is amplified. The query's embedding is public, made before the
    charge by the store's model. A vector counts as its exemplar's own data: a model that embeds a text a little
    differently beside other texts should have embedded each on its own.

    Sampled buckets are private; they are meant for `PrivateEnsemble` alone. As a LangChain ``BaseExampleSelector``, for
    instance in a ``FewShotPromptTemplate`` within the member chain, `select_examples` gives that member's own bucket.
    """

    def __init__(
        self,
        store: PrivateStore,
        members: int,
        *,
        shots: int | None = None,
        rate: float | None = None,
        max_exemplars: int | None = None,
        exemplars_per_owner: int = 1,
        threshold: float | Callable[[Vectors], float] | None = None,
        eligible: int | None = None,
        nearest_to: str | None = None,
    ) -> None:
        if not isinstance(store, PrivateStore):
            raise InvalidParameter("store", type(store).__name__, "an ExemplarStore")
        self.store = store
        self.members = checks.whole("members", members, at_least=2)
        self.exemplars_per_owner = checks.whole("exemplars_per_owner", exemplars_per_owner)
        if (shots is None) == (rate is None):
            raise InvalidParameter("shots" if shots is not None else "rate", shots, "exactly one of shots and rate")
        if threshold is not None:
            threshold = threshold if callable(threshold) else _threshold(threshold)
            nearest_to = "input" if nearest_to is None else nearest_to
        elif eligible is not None:
            raise InvalidParameter("eligible", eligible, "None without a threshold: every owner is eligible")
        self.threshold = threshold
        crowd = None if eligible is None else checks.whole("eligible", eligible)
        self.rate_is_explicit = rate is not None
        self.owners: int | None = None
        """How many owners the store held when `rate` was computed from their number. For freezing a plan alone."""
        self.expected_owners: int | None = None  # of one sample, if that was asked for: as public as ``shots``
        self._shots = 0
        expected: Fraction | None = None  # exemplars in a bucket
        if shots is not None:
            self._shots = checks.whole("shots", shots)
            if threshold is not None and crowd is None:
                raise InvalidParameter("eligible", None, "given with shots if there is a threshold, or give rate")
            asked = self.members * shots
            self.expected_owners = asked if crowd is None else min(crowd, asked)
            expected = Fraction(self.expected_owners, self.members)
            if crowd is None:
                self.choose_rate(shots)
            else:
                self.rate = self.expected_owners / crowd
        else:
            self.rate = checks.probability("rate", rate)
            if crowd is not None:
                expected = Fraction(repr(self.rate)) * crowd / self.members
        if nearest_to is not None and (not isinstance(nearest_to, str) or nearest_to in ("", "examples")):
            raise InvalidParameter("nearest_to", nearest_to, "the name of the request's key that holds the query")
        self.nearest_to = nearest_to
        if max_exemplars is None:  # max(2 e, e + 4) for e expected exemplars, rounded up
            if nearest_to is not None and threshold is None:
                raise InvalidParameter("max_exemplars", None, "given if nearest_to is: how many a member gets")
            if expected is None:
                bound = "given if rate is, without eligible: how many a member gets at most, a number that is public"
                raise InvalidParameter("max_exemplars", None, bound)
            expected *= self.exemplars_per_owner
            max_exemplars = max(math.ceil(2 * expected), math.ceil(expected) + 4)
        self.max_exemplars = checks.whole("max_exemplars", max_exemplars)
        self._randomness: Randomness = SecureRandomness()

    def choose_rate(self, shots: int) -> None:
        """Propose the rate at which a member sees so many of the owners that the store holds now, on average.

        A proposal for a plan that is not frozen yet, which keeps the rate and the number of owners. Nothing else may
        be computed from either.
        """
        self._shots = checks.whole("shots", shots)
        self.owners = self.store.owner_count
        self.rate_is_explicit = False
        self.rate = min(1.0, self.members * shots / max(1, self.owners))

    def check_owners(self) -> None:
        """Refuse a store with too few owners to sample as asked: `InvalidParameter`, or `InvalidRecords` for none.

        For the moment before a plan is frozen. Under a frozen plan nothing is refused: its rate stands, and a store
        from which owners have gone must not keep a chain from being built again.
        """
        if self.store.owner_count == 0:
            raise InvalidRecords("the store is empty: there is nobody to sample")
        if self.owners is not None and self.members * self._shots > self.owners:
            bound = f"members * shots must not exceed the number of owners ({self.owners})"
            raise InvalidParameter("shots", self._shots, bound)

    def check_query(self, values: Mapping[str, Any]) -> None:
        """Refuse a request without a text to be near to. Raises `InvalidParameter`; never shows the input."""
        if self.nearest_to is None:
            return
        text = values.get(self.nearest_to)
        if not isinstance(text, str):
            raise InvalidParameter("input", sorted(values), f"a mapping with a text under {self.nearest_to!r}")
        if not text.strip():
            bound = f"a text that is not empty as {self.nearest_to!r}"
            raise InvalidParameter("input", f"{len(text)} characters", bound)

    def embed_query(self, values: Mapping[str, Any]) -> Vectors | None:
        """What `sample` needs of a checked request; None without ``nearest_to``. Raises what the store's does."""
        return None if self.nearest_to is None else self.store.embed_query(values[self.nearest_to])

    def eligible(self, query: Vectors) -> Numbers:
        """The owners whom the gate lets through for a query. Private."""
        if self.threshold is None:
            raise InvalidParameter("threshold", None, "given: without one nobody is let through, or kept out")
        with self.store.reading() as view:
            return view.eligible(query, self._threshold_for(query))

    def _threshold_for(self, query: Vectors) -> float:
        return _threshold(self.threshold(query) if callable(self.threshold) else self.threshold)

    def sample(
        self, rate: float | None = None, query: Vectors | None = None, among: Numbers | None = None
    ) -> list[Examples]:
        """N buckets, some perhaps empty, for one release. Private. Cost grows with the number of owners sampled.

        ``rate`` is the plan's q if a budget has fixed it; default: the selector's own. ``query`` is what `embed_query`
        gave. ``among`` are the owners who may flip a coin, if a budget has asked `eligible` already.
        """
        if (query is None) != (self.nearest_to is None):
            raise InvalidParameter("query", type(query).__name__, "what embed_query gave for the request")
        draw = self._randomness
        rate = self.rate if rate is None else rate
        with self.store.reading() as view:
            if among is None and self.threshold is not None and query is not None:
                among = view.eligible(query, self._threshold_for(query))
            among = view.numbers if among is None else among
            chosen = among[draw.coin_positions(len(among), rate)]
            member_of = draw.integers(self.members, len(chosen))
            priority = draw.uniforms(len(chosen))
            rows, position = view.rows_of(chosen)
            order_within = draw.uniforms(len(rows))
            far = np.zeros(len(rows), np.float32) if query is None else -view.similarity(rows, query)
            if np.bincount(position).max(initial=0) > self.exemplars_per_owner:
                # Of one owner's rows the nearest, else the first in its own random order.
                order = np.lexsort((order_within, far, position))
                order = order[_first_of_each(position[order], self.exemplars_per_owner)]
                rows, position, order_within, far = rows[order], position[order], order_within[order], far[order]
            # Of one bucket's rows the nearest, else the first by their owners' own priorities.
            order = np.lexsort((order_within, priority[position], far, member_of[position]))
            order = order[_first_of_each(member_of[position[order]], self.max_exemplars)]
            exemplars = view.read(rows[order])
        buckets = [Examples((), self.store.input_key, self.store.output_key) for _ in range(self.members)]
        for exemplar, member in zip(exemplars, member_of[position[order]].tolist(), strict=True):
            buckets[member].append(exemplar)
        return buckets

    def add_example(self, example: dict[str, str]) -> Any:
        """Add one private exemplar, its own owner, to the store."""
        return self.store.add([example])[0]

    def select_examples(self, input_variables: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Within a member: this member's bucket. Elsewhere: one fresh Poisson bucket, with a `PrivacyWarning`."""
        bucket = current_bucket()
        if bucket is not None:
            return list(bucket)
        warnings.warn(
            "select_examples outside of a sealed release returns private examples, and no budget counts it; "
            "use it within the member chain of a PrivateEnsemble",
            PrivacyWarning,
            stacklevel=2,
        )
        self.check_query(input_variables)
        return list(self.sample(query=self.embed_query(input_variables))[0])

    @property
    def shown_rate(self) -> str:
        """The rate for a ``repr``; empty if it would show the number of owners that the store holds now."""
        return f", rate={self.rate:.6g}" if self.owners is None else ""

    def __repr__(self) -> str:
        near = "" if self.nearest_to is None else f", nearest_to={self.nearest_to!r}"
        near += "" if self.threshold is None else f", threshold={self.threshold!r}"
        own = f"{self.shown_rate}, max_exemplars={self.max_exemplars}{near}"
        return f"PoissonExampleSelector(members={self.members}{own})"


def _threshold(value: object) -> float:
    return checks.real("threshold", value, at_least=-1.0, at_most=1.0)


def _first_of_each(group: NDArray[np.int64], limit: int) -> NDArray[np.bool_]:
    """Which entries are among the first ``limit`` of their ``group``; groups ascend."""
    within: NDArray[np.bool_] = np.arange(len(group)) - np.searchsorted(group, group) < limit
    return within
