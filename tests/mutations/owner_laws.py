"""The exact law of a whole release: every coin, member and order of the selector, then the vote on what members say.

The members are as bad as they can be: each answers from its bucket alone, by a rule that a test writes down.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from exact import Branching, Law, check_profile, law, mixture
from langchain_core.embeddings import DeterministicFakeEmbedding
from numpy.typing import NDArray

from langchain_dpicl import ExemplarStore, NoisyVote, PoissonExampleSelector, PrivateEnsemble
from langchain_dpicl.privacy import MECHANISMS, Randomness
from langchain_dpicl.privacy.profile import DIRECTIONS
from langchain_dpicl.private.boundary import ABSTAIN
from langchain_dpicl.selection import Examples
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.records import Vectors

MEMBERS, SIGMA = 2, 0.7
LABELS = ("yes", "no")

Rule = Callable[[frozenset[str]], str | None]
"""What a member says of the owners in its bucket; None abstains."""
SelectorKind = Callable[..., PoissonExampleSelector]
Owners = tuple[tuple[str, int], ...]
"""Each owner with how many exemplars it has."""


def store_of(owners: Owners) -> ExemplarStore:
    records = [{"input": f"{name} {i}", "owner": name} for name, count in owners for i in range(count)]
    return ExemplarStore.from_records(records, DeterministicFakeEmbedding(size=2), output_key=None, owner_key="owner")


def bucket_law(kind: SelectorKind, owners: Owners, rate: float, by_default: bool) -> dict[Hashable, float]:
    """The law of who sits where: the code's own, for each member the set of owners in its bucket.

    ``by_default``: with the selector's defaults, as a frozen plan of this rate samples; else with a cap that is given.
    """
    how: dict[str, Any] = {"shots": 1} if by_default else {"rate": rate, "max_exemplars": 20}
    selector = kind(store_of(owners), MEMBERS, **how)

    def run(randomness: Branching) -> tuple[frozenset[str], ...]:
        selector._randomness = randomness
        return tuple(frozenset(e["input"].split()[0] for e in bucket) for bucket in selector.sample(rate))

    return law(run)


@lru_cache(maxsize=64)
def vote_law(said: tuple[str, ...]) -> Law:
    """The law of the noisy vote's winner, where the members say this."""
    vote = NoisyVote(LABELS)
    outputs: Sequence[object] = [ABSTAIN if answer == "" else vote.encode(answer) for answer in said]
    return law(lambda randomness: str(vote.aggregate(outputs, SIGMA, randomness)))


@lru_cache(maxsize=256)
def release_law(kind: SelectorKind, owners: Owners, rule: Rule, rate: float, by_default: bool) -> Law:
    """The law of one release."""

    def parts() -> Iterator[tuple[float, Law]]:
        buckets: Any
        for buckets, weight in bucket_law(kind, owners, rate, by_default).items():
            yield weight, vote_law(tuple(sorted(rule(bucket) or "" for bucket in buckets)))

    return mixture(parts())


def check_selector(kind: SelectorKind, owners: Owners, rule: Rule, rate: float) -> None:
    """AssertionError where the releases with and without some owner are easier to tell apart than a Poisson sample's
    profile says, by default or with a cap that is given."""
    profile = MECHANISMS["vote"]().profile(SIGMA).subsample(rate)
    for left_out, by_default in itertools.product(owners, (True, False)):
        everyone = release_law(kind, owners, rule, rate, by_default)
        others = tuple(owner for owner in owners if owner != left_out)
        without = release_law(kind, others, rule, rate, by_default)
        for direction, pair in zip(DIRECTIONS, ((everyone, without), (without, everyone)), strict=True):
            check_profile([pair], profile, direction)


def counts_law(ensemble: PrivateEnsemble, rate: float) -> dict[Hashable, float]:
    """The law of the votes that come out of an ensemble's calls, abstentions last: the code's own."""
    vote, selector = NoisyVote(LABELS), ensemble.selector

    def run(randomness: Branching) -> tuple[int, ...]:
        selector._randomness = randomness
        return tuple(vote.counts(ensemble.run({"input": "q"}, rate, vote)).tolist())

    return law(run)


def check_calls(
    rule: Rule,
    owners: Owners,
    rate: float,
    how: Mapping[str, Any],
    selector_kind: SelectorKind = PoissonExampleSelector,
    ensemble_kind: type[PrivateEnsemble] = PrivateEnsemble,
) -> None:
    """AssertionError where some owner, who has a call of its own, shows in a vote by more than the selector's profile
    says: every coin and priority, every draw of both votes, with and without the owner, both directions."""

    def says(given: Mapping[str, Any]) -> str | None:
        return rule(frozenset(example["input"].split()[0] for example in given["examples"]))

    def counted(owners: Owners) -> tuple[PoissonExampleSelector, dict[Hashable, float]]:
        selector = selector_kind(store_of(owners), rate=rate, **how)
        return selector, counts_law(ensemble_kind(selector, says), rate)

    selector, everyone = counted(owners)
    others = [counted(tuple(owner for owner in owners if owner != left_out))[1] for left_out in owners]
    for mechanism, parameter in (("vote-em", 1.5), ("vote", SIGMA)):
        vote = NoisyVote(LABELS).under(mechanism, selector.crowd(rate, None))
        assert vote.crowd is not None
        family = MECHANISMS[mechanism].of({"own_calls": vote.crowd.own_calls})
        profile = family.profile(parameter).subsample(rate)

        @lru_cache
        def drawn(counts: Any, vote: NoisyVote = vote, parameter: float = parameter) -> Law:
            crowd = vote._crowd(())
            return law(lambda randomness: str(vote.draw(np.array(counts), crowd, parameter, randomness)))

        released = [mixture((weight, drawn(counts)) for counts, weight in each.items()) for each in (everyone, *others)]
        for without in released[1:]:
            for direction, pair in zip(DIRECTIONS, ((released[0], without), (without, released[0])), strict=True):
                check_profile([pair], profile, direction)


class Redrawing(PoissonExampleSelector):
    """A mutant's way in: the product's own `sample`, over a generator whose draws `redrawn` replaces."""

    def sample(
        self, rate: float | None = None, query: Vectors | None = None, among: Numbers | None = None
    ) -> list[Examples]:
        secure = self._randomness
        self._randomness = self.redrawn(secure)
        try:
            return super().sample(rate, query, among)
        finally:
            self._randomness = secure

    @staticmethod
    def redrawn(randomness: Randomness) -> Randomness:
        """The generator that the mutant draws from."""
        raise NotImplementedError


class Passing:
    """A generator that passes everything on."""

    def __init__(self, randomness: Randomness) -> None:
        self.inner = randomness

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        return self.inner.coin_positions(n, probability)

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        return self.inner.integers(high, size)

    def uniforms(self, size: int) -> NDArray[np.float64]:
        return self.inner.uniforms(size)

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        return self.inner.discrete_gaussian(sigma, size)
