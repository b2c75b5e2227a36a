"""Worlds in which an adversary asks one adaptive query after another, and owners pay with tickets.

A `World` is a tiny store with its selector; it says exactly with what probability a query is answered how, and what is
burnt. The law of the sample is the product's own, every coin and bucket of it enumerated, and so is the vote's.
`Ledgered` pays with the product's own tickets, on a real ledger that is closed, copied and opened anew for every query.
`World` itself counts tickets in a dictionary, which tests prove to be the same; mistakes are made in it.

`worst` is the exact hockey-stick divergence of two worlds' transcripts at the worst adaptive strategy: at every node of
the tree of transcripts the adversary takes the query that is best for it, and what is hidden from it (of a mistake that
burns by private coins) stays a distribution.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from branching import Coins, Tree
from langchain_core.embeddings import Embeddings
from ledger_files import copy_ledger
from moments import eligible, names_of
from numpy.typing import NDArray
from profiles import repeated_delta
from tickets_on_disk import burnt

from langchain_dpicl import ExemplarStore, NoisyVote, PoissonExampleSelector, PrivacyBudget
from langchain_dpicl.privacy import MECHANISMS
from langchain_dpicl.privacy.profile import DIRECTIONS, Subsampled
from langchain_dpicl.private.boundary import ABSTAIN

MEMBERS, RATE, SIGMA, THRESHOLD = 2, 0.4, 0.7, 0.5
EPSILONS = np.array([-0.5, 0.0, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0])
LABELS = ("yes", "no")

Query = tuple[int, bool]
"""The direction in which it looks, in degrees, and whether the process dies as soon as it is answered."""
State = tuple[Any, ...]
"""What the ledger holds: here the tickets that each owner has burnt, in the order of the names."""
Owners = dict[str, tuple[int, ...]]
"""Where an owner's exemplars lie, in degrees; a query finds what lies within 60 degrees of it."""
Rule = Callable[[frozenset[str], str], str | None]
"""What a member says of the owners in its bucket, knowing whom the adversary is after; None abstains."""


class Degrees(Embeddings):
    """A text's vector points in the direction that its last word says."""

    def embed_query(self, text: str) -> list[float]:
        angle = math.radians(float(text.split()[-1]))
        return [math.cos(angle), math.sin(angle)]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


class Draws(Coins):
    """Every draw of the selector and of the vote. Orders are one and the same: nothing here is cut off by them."""

    def uniforms(self, size: int) -> NDArray[np.float64]:
        return (np.arange(size) + 0.5) / max(1, size)

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        return np.array([self.tree.choose([1 / high] * high) for _ in range(size)], np.int64)

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        """Less than 1e-15 of its mass is cut off."""
        reach = math.ceil(8.6 * sigma)
        masses = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
        weights = (masses / masses.sum()).tolist()
        return np.array([self.tree.choose(weights) - reach for _ in range(size)], np.int64)


def law(run: Callable[[Draws], Any]) -> dict[Any, float]:
    """The exact law of what ``run`` returns."""
    tree, found = Tree(), defaultdict[Any, float](float)
    draws = Draws(tree)
    while True:
        outcome = run(draws)
        found[outcome] += tree.weight
        if not tree.next():
            assert math.isclose(sum(found.values()), 1.0, rel_tol=1e-9)
            return dict(found)


@lru_cache(maxsize=64)
def vote_law(said: tuple[str, ...]) -> dict[str, float]:
    """The law of the product's noisy vote."""
    vote = NoisyVote(LABELS)
    outputs = [ABSTAIN if answer == "" else vote.encode(answer) for answer in said]
    return law(lambda draws: str(vote.aggregate(outputs, SIGMA, draws)))


def records(owners: Owners) -> list[dict[str, str]]:
    return [{"input": f"{name} {at}", "owner": name} for name, places in owners.items() for at in places]


def build(owners: Owners) -> ExemplarStore:
    return ExemplarStore.from_records(records(owners), Degrees(), output_key=None, owner_key="owner", progress=False)


@lru_cache(maxsize=2048)
def sample_law(owners: tuple[tuple[str, tuple[int, ...]], ...], at: int, among: frozenset[str]) -> dict[Any, float]:
    """The law of the members' buckets, as sets of owners, where these owners flip coins: the selector's own."""
    if not owners:
        return {(frozenset(),) * MEMBERS: 1.0}
    store = build(dict(owners))
    selector = PoissonExampleSelector(store, MEMBERS, rate=RATE, max_exemplars=20, threshold=THRESHOLD)
    query = selector.embed_query({"input": f"? {at}"})
    names = list(store.owners)
    numbers = np.array(sorted(names.index(name) for name in among), np.int64)

    def run(draws: Draws) -> tuple[frozenset[str], ...]:
        selector._randomness = draws
        buckets = selector.sample(query=query, among=numbers)
        return tuple(frozenset(each["input"].split()[0] for each in bucket) for bucket in buckets)

    return law(run)


class World:
    """A store, and what a query does in it. Tickets are counted in a dictionary."""

    def __init__(self, owners: Owners, rule: Rule, target: str, tickets: int) -> None:
        self.owners, self.rule, self.target, self.tickets = owners, rule, target, tickets
        self.names = tuple(owners)
        self.key = tuple(owners.items())
        self.start: State = (0,) * len(self.names)
        self._steps: dict[tuple[State, Query], list[tuple[float, str, State]]] = {}

    def eligible(self, at: int) -> frozenset[str]:
        """Whom the product's gate lets through."""
        store = build(self.owners) if self.owners else None
        if store is None:
            return frozenset()
        found = eligible(store, store.embed_query(f"? {at}"), THRESHOLD)
        return frozenset(names_of(store, found))

    def pay(self, state: State, query: Query) -> tuple[frozenset[str], State]:
        """Who flips a coin, and what is burnt afterwards."""
        near = self.eligible(query[0])
        left = dict(zip(self.names, state, strict=True))
        paid = frozenset(name for name in near if left[name] < self.tickets)
        return paid, tuple(used + (name in paid) for name, used in left.items())

    def sampled(self, among: frozenset[str], query: Query) -> Iterator[tuple[float, frozenset[str], str]]:
        """Probabilities of who is in the sample and what is answered."""
        for buckets, weight in sample_law(self.key, query[0], among).items():
            said = tuple(sorted(self.rule(bucket, self.target) or "" for bucket in buckets))
            for answer, probability in vote_law(said).items():
                yield weight * probability, frozenset().union(*buckets), answer

    def outcomes(self, state: State, query: Query) -> Iterator[tuple[float, str, State]]:
        """Probabilities of answers, and of what the ledger holds afterwards."""
        paid, after = self.pay(state, query)
        for weight, _, answer in self.sampled(paid, query):
            yield weight, answer, after

    def step(self, state: State, query: Query) -> list[tuple[float, str, State]]:
        """`outcomes`, added up."""
        known = self._steps.get((state, query))
        if known is None:
            found = defaultdict[Any, float](float)
            for weight, answer, after in self.outcomes(state, query):
                found[answer, after] += weight
            known = self._steps[state, query] = [(weight, *outcome) for outcome, weight in found.items()]
        return known


class Ledgered(World):
    """The product's own tickets on a ledger of its own, which dies and is opened again at every query."""

    def __init__(self, owners: Owners, rule: Rule, target: str, tickets: int, folder: Path) -> None:
        super().__init__(owners, rule, target, tickets)
        self.folder = folder
        self._ledgers = {self.start: folder / "0.db"}
        frozen = folder.parent / f"frozen-{tickets}.db"
        if not frozen.exists():
            self._open(frozen).close()
        copy_ledger(frozen, folder / "0.db")

    def _open(self, path: Path) -> PrivacyBudget:
        budget = PrivacyBudget(400.0, 0.05, self.tickets, f"sqlite:///{path}", tickets=True, replay=False)
        budget.line("vote", RATE, rate_is_explicit=True)
        return budget

    def pay(self, state: State, query: Query) -> tuple[frozenset[str], State]:
        path = self.folder / f"{len(list(self.folder.iterdir()))}.db"
        copy_ledger(self._ledgers[state], path)
        store = build(self.owners)  # as a new process would load it
        budget = self._open(path)
        line = budget.line("vote", RATE)
        selector = PoissonExampleSelector(store, MEMBERS, rate=RATE, max_exemplars=20, threshold=THRESHOLD)
        vector = selector.embed_query({"input": f"? {query[0]}"})
        assert vector is not None
        (charge,) = line.charge(owners=[line.ask(store, selector.eligible(vector))])
        paid = frozenset(store.owners[int(number)] for number in charge.participants.take())  # type: ignore[union-attr]
        budget.close()
        after = tuple(burnt(f"sqlite:///{path}", store)[name] for name in self.names)
        self._ledgers.setdefault(after, path)
        return paid, after


Belief = dict[State, float]
"""What the ledger may hold, each with the probability of this and of the transcript so far."""


def worst(one: World, other: World, queries: Sequence[Query], length: int) -> NDArray[np.float64]:
    """For each of `EPSILONS` the sum over transcripts of max(0, P - e^eps Q), at the adversary's best strategy."""
    known: dict[Any, NDArray[np.float64]] = {}
    scale = np.exp(EPSILONS)

    def value(p: Belief, q: Belief, left: int) -> NDArray[np.float64]:
        now: NDArray[np.float64] = np.maximum(0.0, sum(p.values()) - scale * sum(q.values()))
        if left == 0:
            return now
        key = (left, *(tuple(sorted((s, round(m, 14)) for s, m in belief.items())) for belief in (p, q)))
        if key not in known:
            best = now
            for query in queries:
                ps, qs = after(one, p, query), after(other, q, query)
                total = sum((value(ps.get(a, {}), qs.get(a, {}), left - 1) for a in ps.keys() | qs.keys()), 0.0 * now)
                best = np.maximum(best, total)
            known[key] = best
        return known[key]

    found: NDArray[np.float64] = value({one.start: 1.0}, {other.start: 1.0}, length)
    return found


def after(world: World, belief: Belief, query: Query) -> dict[str, Belief]:
    """By answer, what the ledger may then hold."""
    found: dict[str, Belief] = {}
    for state, mass in belief.items():
        for weight, answer, then in world.step(state, query):
            of_answer = found.setdefault(answer, {})
            of_answer[then] = of_answer.get(then, 0.0) + mass * weight
    return found


def allowed(tickets: int) -> dict[str, NDArray[np.float64]]:
    """The plan's: the composition of so many amplified pairs, by direction."""
    release = Subsampled(MECHANISMS["vote"]().profile(SIGMA), RATE)
    return {direction: repeated_delta(release, tickets, EPSILONS, direction) for direction in DIRECTIONS}


def excess(
    make: Callable[[Owners, Rule, str, int], World],
    owners: Owners,
    rule: Rule,
    target: str,
    *,
    tickets: int,
    queries: Sequence[Query],
    length: int,
) -> float:
    """By how much the true divergence exceeds what is allowed, at its worst, when the target is added or removed."""
    whole = make(owners, rule, target, tickets)
    less = make({name: places for name, places in owners.items() if name != target}, rule, target, tickets)
    bound = allowed(tickets)
    return max(
        float(np.max(worst(whole, less, queries, length) - bound["remove"])),
        float(np.max(worst(less, whole, queries, length) - bound["add"])),
    )
