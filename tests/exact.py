"""The exact law of a piece of the product, and what it gives away: the tools of the mutation suite.

`law` runs code once for every branch of every random choice that it makes, and adds up the probabilities of the
branches: what it returns is the distribution of the code itself, no estimate. `check_profile` compares two such laws,
of neighbouring data, with the privacy profile that is claimed: delta(eps) = sum over y of max(0, P(y) - e^eps Q(y)).

Which choices are walked: coins, whole numbers, orders, discrete Gaussian noise (cut where less than 1e-15 of its mass
lies beyond) and the exact choices of `privacy.noise`. That a production generator has the laws that are walked
here is what `unit/test_noise.py`, `unit/test_sampling.py` and `unit/test_secure_sources.py` show.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from branching import Coins, Tree
from numpy.typing import NDArray

from langchain_dpicl import ExemplarStore, PoissonExampleSelector, aggregators
from langchain_dpicl.aggregators import keywords, numbers
from langchain_dpicl.decoding import answer
from langchain_dpicl.privacy.profile import Direction, Profile

EPSILONS = (-1.0, -0.3, 0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0)
SLACK = 1e-9
"""What the truncated noise and floats may move a delta by."""

Law = Mapping[Hashable, float]


class Branching(Coins):
    """`Coins`, with the rest of the protocol `Randomness`."""

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        return np.array([self.tree.choose([1 / high] * high) for _ in range(size)], np.int64)

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        masses = gaussian_masses(sigma)
        middle = len(masses) // 2
        return np.array([self.tree.choose(masses) - middle for _ in range(size)], np.int64)


class Uncertain:
    """A uniform number of which nothing is known but on which side of one threshold it lies."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def __lt__(self, threshold: float) -> bool:
        return self._tree.choose([float(threshold), 1.0 - float(threshold)]) == 0


class BranchingThresholds(Branching):
    """`Branching` for code that compares each uniform number with one threshold."""

    def uniforms(self, size: int) -> NDArray[Any]:
        return np.array([Uncertain(self.tree) for _ in range(size)], object)


@lru_cache(maxsize=64)
def gaussian_masses(sigma: float) -> list[float]:
    """The discrete Gaussian on -r, ..., r, with less than 1e-15 of its mass beyond."""
    reach = math.ceil(8.6 * sigma)
    masses = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    return [float(mass) for mass in masses / masses.sum()]


def law(run: Callable[[Branching], Hashable], kind: type[Branching] = Branching) -> dict[Hashable, float]:
    """The exact distribution of what ``run`` returns, over all that it draws from the generator that it is given."""
    tree, found = Tree(), defaultdict[Hashable, float](float)
    randomness = kind(tree)

    def choose_exponential(numbers: Sequence[int], losses: Sequence[int], rate: float, _: object) -> int:
        weights = np.array(numbers, float) * np.exp(-rate * (np.array(losses, float) - min(losses)))
        return tree.choose((weights / weights.sum()).tolist())

    def choose_weighted(weights: Sequence[int], _: object) -> int:
        return tree.choose([weight / sum(weights) for weight in weights])

    def random_below(bound: int, _: object) -> int:
        return tree.choose([1 / bound] * bound)

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            is_ours = f"{name}.".startswith((f"{aggregators.__name__}.", f"{answer.__name__}."))
            if is_ours and hasattr(module, "choose_exponential"):
                patch.setattr(module, "choose_exponential", choose_exponential)
        patch.setattr(keywords, "choose_weighted", choose_weighted)
        for drawn in (keywords, numbers):
            patch.setattr(drawn, "random_below", random_below)
        while True:
            outcome = run(randomness)
            found[outcome] += tree.weight
            if not tree.next():
                break
    assert math.isclose(sum(found.values()), 1.0, rel_tol=1e-9), "a law's probabilities add up to 1"
    return dict(found)


def mixture(parts: Iterable[tuple[float, Law]]) -> dict[Hashable, float]:
    """The law of a release whose own law was drawn first."""
    mixed = defaultdict[Hashable, float](float)
    for weight, part in parts:
        for outcome, probability in part.items():
            mixed[outcome] += weight * probability
    return dict(mixed)


def together(*laws: Law) -> dict[Hashable, float]:
    """The law of several releases, independent of one another."""
    found: dict[Hashable, float] = {(): 1.0}
    for each in laws:
        found = {(*_tuple(a), b): p * q for a, p in found.items() for b, q in each.items()}
    return found


def _tuple(value: Hashable) -> tuple[Hashable, ...]:
    assert isinstance(value, tuple)
    return value


def hockey_stick(p: Law, q: Law, epsilon: float) -> float:
    """delta(eps) of the pair (P, Q), exactly."""
    return sum(max(0.0, mass - math.exp(epsilon) * q.get(outcome, 0.0)) for outcome, mass in p.items())


def check_profile(
    pairs: Iterable[tuple[Law, Law]],
    profile: Profile,
    direction: Direction = "remove",
    *,
    epsilons: Sequence[float] = EPSILONS,
) -> None:
    """AssertionError where some pair (P, Q) is easier to tell apart than the profile says, at any of the epsilons."""
    allowed = profile.direction_delta(np.array(epsilons), direction)
    for p, q in pairs:
        true = np.array([hockey_stick(p, q, epsilon) for epsilon in epsilons])
        worst = int(np.argmax(true - allowed))
        said = f"delta({epsilons[worst]}) is {true[worst]:.6g}, and {allowed[worst]:.6g} is claimed"
        assert true[worst] <= allowed[worst] + SLACK, said


# -- what calls see ----------------------------------------------------------------------------------------------------

WAYS_TO_SAMPLE: list[dict[str, Any]] = [
    {"members": 2, "max_exemplars": 9, "exemplars_per_owner": 3},
    {"members": 2, "max_exemplars": 1, "filter": {"ward": {"$lt": 3}}},
    {"calls": 2, "exemplars_per_owner": 3},
    {"calls": 2, "max_calls": 2, "exemplars_per_owner": 3, "filter": {"ward": 1}},
]


def check_seen(store_of: Callable[[list[dict[str, Any]]], ExemplarStore], how: Mapping[str, Any]) -> None:
    """AssertionError unless calls see the records within 60 degrees of the query (and of ward 1) and no others, and
    sample as if there were no others: every coin, member, priority and order. The store's model is `Degrees`."""
    records = [
        {"input": f"{name} {at}", "owner": name, "ward": ward}
        for name, at, ward in (("ann", 0, 1), ("ann", 80, 1), ("ann", 10, 3), ("bob", 100, 1), ("cec", 330, 1))
    ]
    wanted = {"ann 0", "cec 330"} if "filter" in how else {"ann 0", "ann 10", "cec 330"}

    def seen_law(records: list[dict[str, Any]]) -> Law:
        selector = PoissonExampleSelector(store_of(records), rate=0.5, threshold=0.5, eligible=2, **how)
        query = selector.embed_query({"input": "? 0"})

        def run(randomness: Branching) -> tuple[tuple[str, ...], ...]:
            selector._randomness = randomness
            return tuple(tuple(sorted(each["input"] for each in bucket)) for bucket in selector.sample(query=query))

        return law(run)

    found = seen_law(records)
    assert {text for calls in found for bucket in calls for text in bucket} == wanted  # type: ignore[attr-defined]
    assert found == pytest.approx(seen_law([each for each in records if each["input"] in wanted]))
    if "filter" not in how:  # nobody is displaced
        assert sum(mass for calls, mass in found.items() if "ann" in str(calls)) == pytest.approx(0.5)


# -- neighbouring outputs ----------------------------------------------------------------------------------------------

Outputs = tuple[Any, ...]


def replaced(domain: Sequence[Any], members: int) -> Iterator[tuple[Outputs, Outputs]]:
    """Every pair of so many outputs of this domain that differ in one member's."""
    for others in itertools.combinations_with_replacement(domain, members - 1):
        for one, other in itertools.permutations(domain, 2):
            yield (one, *others), (other, *others)


def added(domain: Sequence[Any], most: int) -> Iterator[tuple[Outputs, Outputs]]:
    """Every pair of outputs of which one has an output more, up to so many."""
    for number in range(most):
        for others in itertools.combinations_with_replacement(domain, number):
            yield from (((one, *others), others) for one in domain)


def log_range(p: Law, q: Law) -> float:
    """How far apart the log ratios of two laws lie."""
    assert set(p) == set(q), "what may be released does not depend on the outputs"
    ratios = [math.log(p[outcome] / q[outcome]) for outcome in p]
    return max(ratios) - min(ratios)
