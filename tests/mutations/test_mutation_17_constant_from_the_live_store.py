"""Mistake 17: a public constant computed from the live store. One owner more moves every member, in every release."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from numpy.typing import NDArray
from scipy import stats

from langchain_dpicl import ExemplarStore, PoissonExampleSelector
from langchain_dpicl.privacy import LineRequest, PrivacyPlan

EPSILON, DELTA, RELEASES = 3.0, 1e-4, 1000
EMBEDDINGS = DeterministicFakeEmbedding(size=2)

Floats = NDArray[np.float64]


class LiveCap(PoissonExampleSelector):
    """The mutant: twice the size that a bucket is expected to have of the owners who are there NOW, or 4 more."""

    def __init__(self, store: ExemplarStore, members: int, *, rate: float | None = None, **how: Any) -> None:
        owners = store.owner_count
        expected = (how["shots"] * members / owners if rate is None else rate) * owners / members
        super().__init__(store, members, rate=rate, max_exemplars=math.ceil(max(2 * expected, expected + 4)), **how)


def selector_of(kind: type[PoissonExampleSelector], owners: int, members: int, **how: Any) -> PoissonExampleSelector:
    vectors = np.ones((owners, 1), np.float32)
    store = ExemplarStore.from_texts(["text"] * owners, EMBEDDINGS, vectors=vectors, progress=False)
    return kind(store, members, **how)


def lead_law(owners: int, members: int, rate: float, cap: int, full: int) -> Floats:
    """The law of (members that show more than ``full`` exemplars) - (members that show exactly so many), from
    -members to members. Exact: member after member, how many of the owners who are left it draws."""
    most, widest = math.ceil(owners * rate + 12 * math.sqrt(owners * rate)), 60
    taken = np.zeros((most + 1, 2 * members + 1))
    taken[0, members] = 1.0
    for member in range(members):
        chance = rate / members / (1 - member * rate / members)
        sizes = stats.binom.pmf(np.arange(widest)[None, :], owners - np.arange(most + 1)[:, None], chance)
        after = np.zeros_like(taken)
        for size in range(min(widest, most + 1)):
            shown = min(size, cap)
            vote = (shown > full) - (shown == full)
            after[size:] += np.roll(sizes[: most + 1 - size, size, None] * taken[: most + 1 - size], vote, axis=1)
        taken = after
    law: Floats = taken.sum(axis=0)
    assert law.sum() == pytest.approx(1.0, abs=1e-12)
    return law


def noisy(law: Floats, sigma: float) -> Floats:
    """With the discrete Gaussian noise of both scores."""
    reach = math.ceil(12 * sigma)
    noise = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    noise /= noise.sum()
    return np.convolve(law, np.convolve(noise, noise))


def log_tail(one: Floats, at: float, tilt: float) -> float:
    """log P(the leads of all releases add up to ``at`` or more), by the exact law of their tilted sum."""
    leads = np.arange(len(one)) - len(one) // 2
    tilted = one * np.exp(tilt * leads)
    scale, size = tilted.sum(), 1 << 14
    once = np.zeros(size)
    once[leads % size] = tilted / scale
    sums = np.arange(size) - size // 2
    law = np.roll(np.fft.irfft(np.fft.rfft(once) ** RELEASES, size), size // 2)
    beyond = sums >= at
    rest = float((law[beyond] * np.exp(-tilt * (sums[beyond] - at))).sum())
    return RELEASES * math.log(scale) - tilt * at + math.log(max(rest, 1e-300))


def epsilon_at_least(one: Floats, other: Floats) -> float:
    """A lower bound on epsilon at DELTA of a thousand releases, by events "the leads add up to t or more"."""
    found = 0.0
    for p, q in ((one, other), (other, one), (one[::-1], other[::-1]), (other[::-1], one[::-1])):
        leads = np.arange(len(p)) - len(p) // 2
        mean, other_mean = (float((law * leads).sum()) for law in (p, q))
        variance = float((q * leads**2).sum()) - other_mean**2
        for beyond in np.arange(0.0, 4.0, 0.5):
            at = math.ceil(RELEASES * mean + beyond * math.sqrt(RELEASES * variance))
            likely = math.exp(log_tail(p, at, 0.0)) - DELTA
            if likely > DELTA and at > RELEASES * other_mean:
                found = max(found, math.log(likely) - log_tail(q, at, (at / RELEASES - other_mean) / variance))
    return found


def check(kind: type[PoissonExampleSelector], members: int, owners: int, **how: Any) -> float:
    """AssertionError where one owner more shows in the noisy scores of a thousand releases, of a plan that was frozen
    with ``owners``, by more than the plan promises. The worst members: each votes by whether its prompt is full."""
    less, more = (selector_of(kind, count, members, **how) for count in (owners, owners + 1))
    line = LineRequest("scores", less.rate, RELEASES)
    sigma = PrivacyPlan.solve(epsilon=EPSILON, delta=DELTA, lines={"scores": line}).lines["scores"].parameter
    full = min(less.max_exemplars, more.max_exemplars)
    laws = [
        noisy(lead_law(count, members, line.rate, selector.max_exemplars, full), sigma)
        for count, selector in ((owners, less), (owners + 1, more))
    ]
    bound = epsilon_at_least(*laws)
    assert bound <= EPSILON, f"epsilon is {bound:.1f} at least, and {EPSILON:g} is claimed"
    return bound


@pytest.mark.parametrize(
    ("members", "owners", "how", "mended"),
    [
        (20, 1600, {"rate": 0.05}, {"rate": 0.05, "max_exemplars": 8}),
        (10, 1049, {"shots": 4}, {"shots": 4}),  # 4 * 10 / 1050 * 1050 / 10 is 4.000000000000001
    ],
)
def test_17_a_cap_that_follows_the_number_of_owners_is_caught(
    members: int, owners: int, how: dict[str, Any], mended: dict[str, Any]
) -> None:
    assert check(PoissonExampleSelector, members, owners, **mended) < 0.5
    with pytest.raises(AssertionError, match=r"epsilon is [24]1\.\d at least, and 3 is claimed"):
        check(LiveCap, members, owners, **how)
