"""What `privacy.noise` promises: independent exact coins, exact integers, floats without a grid, exact Gaussians.

Statistical tests state their false-alarm probability; all are below 1e-6.
"""

from __future__ import annotations

import inspect
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom, chi2, kstest

from langchain_dpicl.errors import InvalidParameter, UnsafeConfigurationError
from langchain_dpicl.privacy import SecureRandomness, noise
from langchain_dpicl.privacy.profile import RATE_ERROR

random = SecureRandomness()
FALSE_ALARM = 1e-7


def chi_square_p(observed: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """p-value of a chi-square test; cells with fewer than ten expected are put together."""
    small = expected < 10.0
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 5.0:
        observed, expected = observed[:-1], expected[:-1]
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), observed.size - 1))


# Coins ----------------------------------------------------------------------------------------------------------------


def test_coins_at_the_edges() -> None:
    assert random.coin_positions(0, 0.5).size == 0
    assert random.coin_positions(10, 0.0).size == 0
    assert random.coin_positions(5, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert random.coin_positions(1_000_000, 1e-300).size == 0
    assert random.coin_positions(1, math.nextafter(1.0, 0.0)).tolist() == [0]


@given(n=st.integers(0, 50_000), probability=st.floats(0.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_positions_are_sorted_distinct_and_inside(n: int, probability: float) -> None:
    positions = random.coin_positions(n, probability)
    assert positions.dtype == np.int64
    assert np.all(np.diff(positions) > 0)
    assert positions.size == 0 or (positions[0] >= 0 and positions[-1] < n)


@pytest.mark.parametrize(("n", "probability"), [(12, 0.2), (40_000, 1e-4), (30, 0.9), (20_000, 2e-5)])
def test_number_of_heads_is_binomial(n: int, probability: float) -> None:
    """40 000 coins and rates below 1/16384 cross the blocks of the skip sampler. False alarms: 1e-7."""
    runs = 4000
    counts = np.bincount([random.coin_positions(n, probability).size for _ in range(runs)], minlength=n + 1)[: n + 1]
    assert chi_square_p(counts, runs * binom.pmf(np.arange(n + 1), n, probability)) > FALSE_ALARM


def test_every_owner_has_the_same_chance_and_pairs_are_independent() -> None:
    """Chi-square on the 2^4 outcomes of four coins, and on positions over three blocks. False alarms: 2e-7."""
    runs = 20_000
    outcomes = np.array([sum(1 << int(k) for k in random.coin_positions(4, 0.3)) for _ in range(runs)])
    heads = np.array([bin(k).count("1") for k in range(16)])
    assert chi_square_p(np.bincount(outcomes, minlength=16), runs * 0.3**heads * 0.7 ** (4 - heads)) > FALSE_ALARM
    n = 3 * noise._BLOCK
    found = np.concatenate([random.coin_positions(n, 0.01) for _ in range(100)])
    assert chi_square_p(np.bincount(found * 48 // n, minlength=48), np.full(48, found.size / 48)) > FALSE_ALARM


def test_first_head_after_an_empty_block_is_as_likely_as_before() -> None:
    """A block without heads must not move the next head. False alarms: 1e-7 (position of the head, given one head)."""
    n, probability = 4 * noise._BLOCK, 2.0 / (4 * noise._BLOCK)
    single = [p[0] for p in (random.coin_positions(n, probability) for _ in range(12_000)) if p.size == 1]
    cells = np.bincount(np.asarray(single) * 16 // n, minlength=16)
    assert chi_square_p(cells, np.full(16, len(single) / 16)) > FALSE_ALARM


def test_no_owner_is_skipped_between_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap that reaches a block's end moves on by exactly the block: the next owner can be the next head."""
    gaps = iter([np.array([9e9, 0.0, 0.0, 3.0, 9e9, 9e9, 9e9])])
    monkeypatch.setattr(SecureRandomness, "_exponentials", lambda self, size: next(gaps) * -math.log1p(-1e-5))
    block = noise._BLOCK
    assert random.coin_positions(3 * block, 1e-5).tolist() == [block, block + 1, block + 5]


def test_a_gap_is_geometric_to_the_precision_that_is_accounted_for() -> None:
    """gap >= k exactly when E / hazard >= k. Both sides of every boundary: a relative error below 2^-51 per coin.

    The last coin of a gap of k has the chance P(k hazard <= E < (k+1) hazard) of its own: an error of e in each end
    costs k e of it. With blocks of 2^14 that is below 1e-11, and plans account for 1e-9.
    """
    hazard = -math.log1p(-4e-5)
    for k in (1, 100, noise._BLOCK - 1):
        low, high = k * hazard * (1 - 2**-51), k * hazard * (1 + 2**-51)
        assert math.floor(low / hazard) == k - 1
        assert math.floor(high / hazard) == k
    assert noise._BLOCK * 2.0**-50 < RATE_ERROR / 50


def test_exponentials_have_no_grid_and_the_right_law() -> None:
    """Kolmogorov-Smirnov (false alarms 1e-7), and tiny values that a 2^-53 grid cannot show."""
    draws = random._exponentials(200_000)
    assert kstest(draws, "expon").pvalue > FALSE_ALARM
    tiny = draws[draws < 1e-3]
    assert tiny.size > 50
    assert np.any(tiny * 2.0**53 != np.floor(tiny * 2.0**53))


# Integers and floats --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("high", [2, 3, 7, 10, 17])
def test_integers_are_uniform(high: int) -> None:
    """False alarms: 1e-7."""
    draws = random.integers(high, 30_000)
    assert chi_square_p(np.bincount(draws, minlength=high), np.full(high, 30_000 / high)) > FALSE_ALARM


def test_integers_reject_and_never_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A modulo would turn the words 4..7 (two bits too high for 5 = 0b101) into more zeros, ones and twos."""
    words = np.array([7, 6, 5, 4, 3, 2, 1, 0] * 4, np.uint64) << np.uint64(61)
    monkeypatch.setattr(noise, "_words", lambda size: words[:size])
    assert random.integers(5, 5).tolist() == [4, 3, 2, 1, 0]
    assert SecureRandomness().integers(1, 3).tolist() == [0, 0, 0]


def test_large_integers() -> None:
    draws = random.integers(1 << 63, 1000)
    assert draws.min() >= 0
    assert draws.max() > 1 << 60


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    """False alarms: 1e-7."""
    draws = random.uniforms(200_000)
    assert draws.min() > 0.0
    assert draws.max() < 1.0
    assert kstest(draws, "uniform").pvalue > FALSE_ALARM


def test_uniforms_keep_their_precision_near_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exponent from random bits: with 70 zero bits the number is near 2^-71 and still has 52 free bits."""
    calls = [np.array([0xFFFFFFFFFFFFFFFF], np.uint64), np.array([0], np.uint64), np.array([1 << 6], np.uint64)]
    monkeypatch.setattr(noise, "_words", lambda size: calls.pop(0))
    (value,) = random.uniforms(1)
    assert value == (2.0**53 - 1) * 2.0 ** (-53 - 70)


def test_the_law_of_the_exponent(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.array([1, 2, 3, 8, 1 << 63], np.uint64)
    monkeypatch.setattr(noise, "_words", lambda size: words)
    assert noise._geometric_halves(5).tolist() == [0, 1, 0, 3, 63]


# Gaussians ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.4, 1.0, 1.37213, 3.58, 1 / 3])
def test_discrete_gaussian_has_its_exact_law(sigma: float) -> None:
    """Chi-square against exp(-x^2 / (2 sigma^2)), with a float sigma as it is. False alarms: 1e-7."""
    runs = 40_000
    draws = random.discrete_gaussian(sigma, runs)
    reach = int(12 * sigma) + 3
    places = np.arange(-reach, reach + 1)
    law = np.exp(-0.5 * (places / sigma) ** 2)
    assert abs(draws).max() <= reach
    assert chi_square_p(np.bincount(draws + reach, minlength=places.size), runs * law / law.sum()) > FALSE_ALARM


def test_discrete_gaussian_of_a_large_sigma() -> None:
    """The mean of squares of 2000 draws lies within 20 % of sigma^2: 6.3 standard deviations, false alarms 4e-10."""
    draws = random.discrete_gaussian(2.0**20, 2000)
    assert abs((draws / 2.0**20) ** 2).mean() == pytest.approx(1.0, rel=0.2)


def test_biased_versions_of_opendp_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    noise._gaussian_measurement.cache_clear()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.14.1")
    with pytest.raises(UnsafeConfigurationError, match=r"0\.14\.1"):
        random.discrete_gaussian(1.0, 1)


# What it is not -------------------------------------------------------------------------------------------------------


def test_there_is_no_seed_and_no_pseudo_random_generator() -> None:
    """A seed would let anyone who knows it subtract the noise."""
    source = inspect.getsource(noise)
    for word in ("default_rng", "RandomState", "np.random", "import random", "seed="):
        assert word not in source
    for name, method in inspect.getmembers(SecureRandomness, inspect.isfunction):
        assert not {"seed", "random_state", "rng"} & set(inspect.signature(method).parameters), name
    with pytest.raises(TypeError):
        SecureRandomness(0)  # type: ignore[call-arg]


def test_instances_share_nothing_and_threads_may_share_one() -> None:
    """Two runs of 64 words agree with probability 2^-4096."""
    copy = pickle.loads(pickle.dumps(random))  # noqa: S301 (our own bytes)
    assert random.integers(1 << 62, 64).tolist() != copy.integers(1 << 62, 64).tolist()
    with ThreadPoolExecutor(8) as pool:
        draws = list(pool.map(lambda _: tuple(random.discrete_gaussian(50.0, 40)), range(64)))
    assert len(set(draws)) == 64


@pytest.mark.parametrize(
    ("call", "parameter"),
    [
        (lambda: random.coin_positions(-1, 0.5), "n"),
        (lambda: random.coin_positions(1.5, 0.5), "n"),  # type: ignore[arg-type]
        (lambda: random.coin_positions(3, 1.1), "probability"),
        (lambda: random.coin_positions(3, float("nan")), "probability"),
        (lambda: random.coin_positions(True, 0.5), "n"),
        (lambda: random.integers(0, 1), "high"),
        (lambda: random.integers((1 << 63) + 1, 1), "high"),
        (lambda: random.integers(2, -1), "size"),
        (lambda: random.uniforms(-1), "size"),
        (lambda: random.discrete_gaussian(0.0, 1), "sigma"),
        (lambda: random.discrete_gaussian(float("inf"), 1), "sigma"),
        (lambda: random.discrete_gaussian(1.0, -1), "size"),
    ],
)
def test_bad_input_is_named(call: object, parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        call()  # type: ignore[operator]
    assert caught.value.parameter == parameter


def test_nothing_for_no_draws() -> None:
    assert random.discrete_gaussian(1.0, 0).size == random.uniforms(0).size == random.integers(5, 0).size == 0
