"""Mistake 16: a pseudo-random generator with a seed. Who knows or guesses it subtracts the noise."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from langchain_dpicl import ExemplarStore, MembersAbstained, NoisyVote, PoissonExampleSelector, SealedRelease
from langchain_dpicl.privacy import SecureRandomness, noise

Patch = pytest.MonkeyPatch
Seeded = Callable[[int], Any]
LABELS, SEED, RELEASES = ["Positive", "Negative"], 20260, 8


def answer(sealed: SealedRelease) -> Any:
    """One release: the noisy counts, or None for "the members abstain"."""
    try:
        return sealed.invoke({"input": "how is it?"})
    except MembersAbstained:
        return None


def transcript(sealed_of: Callable[..., Any], store: ExemplarStore) -> tuple[list[Any], list[Any]]:
    """What a process that starts now, its global generators seeded, releases and samples."""
    random.seed(SEED)
    np.random.seed(SEED)
    vote = NoisyVote(LABELS, scores=True)
    sealed = sealed_of(
        lambda _: "Positive", store=store, vote=vote, epsilon=1.0, releases=RELEASES, accept_noise=True, members=2
    )
    assert sealed.line().parameter > 4.0
    scores = [answer(sealed) for _ in range(RELEASES)]
    selector = PoissonExampleSelector(store, 4, rate=0.5, max_exemplars=8)
    buckets = [[sorted(e["input"] for e in bucket) for bucket in selector.sample()] for _ in range(8)]
    return scores, buckets


def check(sealed_of: Callable[..., Any], store: ExemplarStore) -> None:
    """Two processes with the same seeds. Two noisy counts of sigma > 4 agree with a probability below
    (1 / (2 sigma sqrt(pi)))^2 < 0.006 (two reports of abstention with less than 1e-12), so eight releases with less
    than 1e-17. No bucket of forty owners is empty, and counts nothing, but for less than 1e-10. Eight samples of the
    first eight owners (in one of four members, or out: alike with (1/2)^2 + 4 (1/8)^2) agree with less than 1e-32."""
    (scores, buckets), (scores_again, buckets_again) = (transcript(sealed_of, store) for _ in range(2))
    assert scores != scores_again, "the noise repeats"
    assert buckets != buckets_again, "the sample repeats"


def a_seed_in_the_release(patch: Patch, seeded: Seeded) -> None:
    """The mutant: the sealed step's generator has a seed."""
    patch.setattr("langchain_dpicl.release.sealed.SecureRandomness", lambda: seeded(7))


def a_seed_in_the_selector(patch: Patch, seeded: Seeded) -> None:
    """The mutant: the selector's generator has a seed."""
    patch.setattr("langchain_dpicl.selection.SecureRandomness", lambda: seeded(7))


def words_of_the_global_generator(patch: Patch, seeded: Seeded) -> None:
    """The mutant: random words from NumPy's global generator, which anyone in the process may seed."""
    patch.setattr(noise, "_words", lambda size: np.random.randint(0, 1 << 64, size, dtype=np.uint64))


def noise_of_the_global_generator(patch: Patch, seeded: Seeded) -> None:
    """The mutant: noise from NumPy's global generator."""

    def gaussian(self: SecureRandomness, sigma: float, size: int) -> NDArray[np.int64]:
        return np.round(np.random.normal(0.0, sigma, size)).astype(np.int64)

    patch.setattr(SecureRandomness, "discrete_gaussian", gaussian)


MUTANTS = [
    (a_seed_in_the_release, "the noise repeats"),
    (a_seed_in_the_selector, "the sample repeats"),
    (words_of_the_global_generator, "the sample repeats"),
    (noise_of_the_global_generator, "the noise repeats"),
]


@pytest.mark.filterwarnings("ignore:the budget .* is used with data:langchain_dpicl.errors.PrivacyWarning")
@pytest.mark.parametrize(("mutant", "says"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_16_a_generator_with_a_seed_is_caught(
    mutant: Callable[[Patch, Seeded], None],
    says: str,
    sealed_of: Callable[..., Any],
    store_of: Callable[..., ExemplarStore],
    records: Callable[..., list[dict[str, str]]],
    seeded: Seeded,
    monkeypatch: Patch,
) -> None:
    store = store_of(records(40))
    check(sealed_of, store)
    mutant(monkeypatch, seeded)
    with pytest.raises(AssertionError, match=says):
        check(sealed_of, store)
