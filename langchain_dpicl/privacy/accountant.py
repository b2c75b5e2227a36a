"""The cost of releases: epsilon at a delta, or delta at an epsilon; and second opinions on it.

- `PLDAccountant` is for a schedule, a list of `Line`s that is fixed in advance. Callers may
  choose their questions after seeing answers; the parameters may not change.
- `verify` asks prv-accountant and dp-accounting too. All three start from the same
  definition of a release, its privacy profile, and compose it by code of their own. If a
  release is the subsampled Gaussian mechanism, dp-accounting also brings its own profile.
  Of bounded ranges only the `PLDAccountant` knows more: their optimal adaptive composition.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from langchain_dpicl.errors import AccountingError
from langchain_dpicl.extras import require
from langchain_dpicl.privacy import adaptive
from langchain_dpicl.privacy.checks import open_unit, positive, real
from langchain_dpicl.privacy.composition import MAX_PLACES, Composition
from langchain_dpicl.privacy.losses import FloatArray, Losses, SummedLosses
from langchain_dpicl.privacy.profile import (
    DIRECTIONS,
    MAX_COUNT,
    BoundedRange,
    Direction,
    Gaussian,
    GaussianWinner,
    Line,
    Profile,
    Subsampled,
)

OURS, PRV, GOOGLE = "langchain-dpicl", "prv-accountant", "dp-accounting"

_PROFILES = "an upper bound: it composes one release's profile, we compose bounded ranges and single bits adaptively"

_TRUNCATED = 1e-15
"""The mass that dp-accounting cuts off the tails of a composition, and counts as an infinite loss."""


@dataclass(frozen=True)
class PLDAccountant:
    """Privacy loss distributions: pessimistic grids and a tilted FFT. Tight, fast, for every profile; an upper bound.

    ``places``: see `Composition`; a bound at any number of them. ``shared``: the curves of
    all counts of a line share one grid (see `adaptive.blocks`).
    """

    places: int = MAX_PLACES
    shared: bool = False

    def epsilon(self, schedule: Sequence[Line], delta: float) -> float:
        """The least certified epsilon at `delta`, in the worse direction.

        Infinite if infinite losses (PTR's delta0) alone weigh more than delta.
        """
        delta = open_unit("delta", delta)
        bounds = []
        for both in self._ways(schedule):
            if max(each.distance for each in both) <= delta:
                return 0.0
            # The direction that is likely to be worse goes first. For the other it is enough to be no worse.
            worse, other = sorted(both, key=lambda each: -each.approximate_epsilon(delta))
            found = worse.epsilon(delta)
            bounds.append(max(found, other.epsilon(delta, enough=found)))
        return min(bounds)

    def delta(self, schedule: Sequence[Line], epsilon: float) -> float:
        """The least certified delta at `epsilon`, in the worse direction."""
        epsilon = real("epsilon", epsilon, at_least=0.0)
        return min(max(each.delta(epsilon) for each in both) for both in self._ways(schedule))

    def _ways(self, schedule: Sequence[Line]) -> Iterator[list[Composition]]:
        """Two bounds if both hold: the optimum of families, tighter but for coarse grids, and the sum of all losses."""
        counts: Counter[tuple[Profile, float]] = Counter()
        for line in schedule:
            counts[line.profile, line.rate] += line.count
        lines = [Line(*kind, count) for kind, count in counts.items() if count <= MAX_COUNT]
        if len(lines) == len(counts) and any(line.is_adaptive for line in lines):
            most = adaptive.OPERATIONS if self.shared or self.places == MAX_PLACES else adaptive.ROUGHLY
            parts = [[part for line in lines for part in line.parts(way, self.shared, most)] for way in DIRECTIONS]
            yield [Composition(each, self.places) for each in parts]
            is_whole = self.shared and all(count == 1 for each in parts for _, count in each)
            kinds = {type(line.profile) for line in lines}
            if GaussianWinner not in kinds and (is_whole or BoundedRange not in kinds):
                return  # the sum would say no less: of whole curves, or if one release's losses are a curve as well
        yield compositions(schedule, self.places)


def compositions(schedule: Sequence[Line], places: int = MAX_PLACES) -> list[Composition]:
    """The sum of the releases' losses if one owner is removed, and if one is added."""
    return [Composition([(line.losses(way), line.count) for line in schedule], places) for way in DIRECTIONS]


def approximate_epsilon(schedule: Sequence[Line], delta: float) -> float:
    """About the epsilon of a schedule, in milliseconds: a guess for searches, no bound."""
    typical = []
    for way in DIRECTIONS:
        typical.append(Composition([(line.profile.typical(line.rate, way), line.count) for line in schedule]))
    return max(each.approximate_epsilon(delta) for each in typical)


# -- second opinions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opinion:
    """An accountant's upper bound on epsilon; None if the accountant does not apply, and ``note`` says why."""

    accountant: str
    epsilon: float | None
    note: str = ""


@dataclass(frozen=True)
class Verification:
    """The opinions of three accountants on each line of a plan (``lines``), and on all lines together (``plan``).

    All numbers hold at ``delta``.
    """

    delta: float
    lines: Mapping[str, tuple[Opinion, ...]]
    plan: tuple[Opinion, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [f"epsilon at delta {self.delta:g}"]
        for name, opinions in {**self.lines, "all lines together": self.plan}.items():
            rows.append(f"{name}:")
            for each in opinions:
                epsilon = "does not apply" if each.epsilon is None else f"{each.epsilon:.5g}"
                note = each.note and f" ({each.note})"
                rows.append(f"  {each.accountant:<16} {epsilon}{note}")
        return "\n".join(rows)


def verify(lines: Mapping[str, Line], delta: float) -> Verification:
    """Ask all three accountants about every line, and about the lines together. Takes seconds to minutes.

    A failure of prv-accountant or dp-accounting is no error: its opinion says that it does
    not apply.
    """
    delta = open_unit("delta", delta)
    each = {name: _opinions([line], delta) for name, line in lines.items()}
    together = next(iter(each.values())) if len(each) == 1 else _opinions(list(lines.values()), delta)
    return Verification(delta, each, together)


def _opinions(schedule: Sequence[Line], delta: float) -> tuple[Opinion, ...]:
    opinions = [Opinion(OURS, PLDAccountant().epsilon(schedule, delta))]
    for accountant, ask in ((PRV, _ask_prv), (GOOGLE, _ask_google)):
        try:
            opinions.append(Opinion(accountant, *ask(schedule, delta)))
        except Exception as failure:
            opinions.append(Opinion(accountant, None, str(failure) or type(failure).__name__))
    return tuple(opinions)


def _ask_prv(schedule: Sequence[Line], delta: float) -> tuple[float, str]:
    low, high = PRVAccountant().interval(schedule, delta)
    if any(line.is_adaptive for line in schedule):
        return high, _PROFILES
    return high, f"at least {low:.5g}"


def _ask_google(schedule: Sequence[Line], delta: float) -> tuple[float, str]:
    """The epsilon and the note of dp-accounting: by its subsampled Gaussian, or its grid for our profile.

    Its convolutions compose all of them.
    """
    pld = require("dp_accounting.pld.privacy_loss_distribution", "verify")

    if delta <= 10.0 * _TRUNCATED:
        raise AccountingError(f"it cuts tails of {_TRUNCATED:g} off, which is too much for delta {delta:g}")
    schedule = [line for line in schedule if line.count]
    if not schedule:
        return 0.0, ""
    losses = [[line.losses(way) for way in DIRECTIONS] for line in schedule]
    ranges = [[each.losses[each.masses > 1e-30] for each in both] for both in losses]
    # Fine enough for the line whose losses lie closest together, as far as the widest line allows.
    spreads = [SummedLosses([(each, 1)]).moments(0.0).deviation for both in losses for each in both]
    widest = max(float(np.ptp(held)) for both in ranges for held in both)
    step = max(min(spreads) / 10.0, widest / 100_000)
    total: Any = None
    for line, both in zip(schedule, ranges, strict=True):
        if isinstance(line.profile, Gaussian):
            one = pld.from_gaussian_mechanism(
                line.profile.multiplier,
                value_discretization_interval=step,
                sampling_prob=line.rate,
            )
        else:
            release = Subsampled(line.profile, line.rate)
            pmfs = [_on_grid(release, *each, step) for each in zip(DIRECTIONS, both, strict=True)]
            one = pld.PrivacyLossDistribution(*pmfs)
        many = one.self_compose(line.count, _TRUNCATED)
        total = many if total is None else total.compose(many, _TRUNCATED)
    epsilon = float(total.get_epsilon_for_delta(delta))
    if any(line.is_adaptive for line in schedule):
        return epsilon, _PROFILES
    own = sum(isinstance(line.profile, Gaussian) for line in schedule)
    notes = {len(schedule): "its own subsampled Gaussian", 0: "it composes our profile"}
    return epsilon, notes.get(own, "its own Gaussian, and our other profiles")


def _on_grid(release: Profile, direction: Direction, held: FloatArray, step: float) -> Any:
    """The losses of a release in one direction as dp-accounting's own, on a grid that holds those in ``held``."""
    pmf = require("dp_accounting.pld.pld_pmf", "verify")
    low, high = math.floor(float(held.min()) / step) - 1, math.ceil(float(held.max()) / step) + 1
    deltas = release.direction_delta(np.arange(low, high + 1) * step, direction)
    return pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, low, high, np.clip(deltas, 0.0, 1.0))


class _Variable:
    """The privacy loss of a dominating pair on (low, high], as prv-accountant's discretiser asks for it.

    Its mean is exact. The library's own variables integrate it by quadrature, which fails
    on ordinary parameters. Mean and probabilities are conditional on a finite loss;
    `pm_inf` is the mass of the infinite one.
    """

    def __init__(self, losses: Losses, low: float, high: float) -> None:
        order = np.argsort(losses.losses)
        order = order[(losses.losses[order] > low) & (losses.losses[order] <= high)]
        self._losses = losses.losses[order]
        self._masses = losses.masses[order] / losses.masses[order].sum()
        self._cumulated = np.append(0.0, np.cumsum(self._masses))
        self.pm_inf = losses.infinity

    def probability(self, low: Any, high: Any) -> FloatArray:
        """The mass in (low, high]."""
        below, upto = (self._cumulated[np.searchsorted(self._losses, end, side="right")] for end in (low, high))
        return np.asarray(upto - below, np.float64)

    def mean(self) -> float:
        return float((self._masses * self._losses).sum())


class PRVAccountant:
    """prv-accountant (Gopi, Lee, Wutschitz 2021) for every profile, in both directions.

    The library knows the subsampled Gaussian. A privacy random variable is the privacy loss
    under P, though, and every profile here turns into losses of a dominating pair; so the
    library composes PTR and the exponential mechanism as well. It bounds the error of
    epsilon by `eps_error` on both sides: the upper end counts.

    Two of its parts are replaced, since they stop it on ordinary parameters: the mean of a
    truncated variable (see `_Variable`) and the size of the domain (from Rényi divergences
    at a fixed list of orders there, which overflow; from Chernoff's bound at the best order
    here).

    ``eps_error``: how far the answer may lie above the truth (and the library's lower end
    below it). None: half a per cent of the answer.
    """

    def __init__(self, eps_error: float | None = None) -> None:
        self._eps_error = None if eps_error is None else positive("eps_error", eps_error)

    def epsilon(self, schedule: Sequence[Line], delta: float) -> float:
        """The upper end of the library's interval, in the worse direction."""
        return self.interval(schedule, delta)[1]

    def interval(self, schedule: Sequence[Line], delta: float) -> tuple[float, float]:
        """The library's lower and upper end, in the worse direction. `AccountingError` if it gives none."""
        delta = open_unit("delta", delta)
        lows, highs = [0.0], [0.0]
        for direction in DIRECTIONS:
            parts = [(line.losses(direction), line.count) for line in schedule if line.count]
            guess = Composition(parts).epsilon(delta)
            if not math.isfinite(guess):
                return math.inf, math.inf
            if not parts:
                continue
            error = self._eps_error or max(5e-3 * guess, 1e-5)
            delta_error = delta / 1000.0
            try:
                low, _, high = self._compose(parts, error, delta_error).compute_epsilon(delta, delta_error, error)
            except (RuntimeError, ValueError, OverflowError) as failure:
                if guess != 0.0:
                    raise AccountingError(
                        f"prv-accountant cannot do this ({failure}); the PLD accountant can",
                    ) from None
                highs.append(error)
            else:
                lows.append(low)
                highs.append(high)
        return max(lows), max(highs)

    def _compose(self, parts: list[tuple[Losses, int]], eps_error: float, delta_error: float) -> Any:
        """The library's algorithm (its remark 5.6 and theorem 5.5) with exact means and our domain size."""
        from prv_accountant import composers, discretisers
        from prv_accountant.domain import Domain

        total = sum(count for _, count in parts)
        # the epsilons at which the finite parts' delta is small enough: of all releases, and of each
        finite = [(Losses(losses.losses, losses.masses), count) for losses, count in parts]
        each = [Composition([(losses, 1)]).epsilon(delta_error / 8.0 / total) for losses, _ in finite]
        reach = max(Composition(finite).epsilon(delta_error / 4.0), *each, eps_error) + 3.0
        mesh = eps_error / math.sqrt(total / 2.0 * math.log(12.0 / delta_error))
        places = 2.0 * reach / mesh
        if places > 1 << 22:
            raise AccountingError(
                f"prv-accountant needs a mesh of {places:.3g} places for these {total} releases; "
                "the PLD accountant needs fewer"
            )
        domain = Domain.create_aligned(-reach, reach, mesh)
        discrete = [
            discretisers.CellCentred().discretise(
                _Variable(losses, float(domain.t_min()), float(domain.t_max())),
                domain,
            )
            for losses, _ in parts
        ]
        return composers.Heterogeneous(discrete).compute_composition([count for _, count in parts])
