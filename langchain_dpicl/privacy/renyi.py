"""Rényi divergences, and the filter that adds them up where parameters are chosen after seeing answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import adaptive
from langchain_dpicl.privacy.checks import open_unit, positive, real, whole
from langchain_dpicl.privacy.losses import FloatArray, Losses
from langchain_dpicl.privacy.profile import MAX_COUNT, BoundedRange, Line, Profile, Subsampled

_ROUNDING = 2e-14
"""Bound on the rounding error of a log moment, relative to 1 + order * the largest loss; it is added."""

_TAILS = 1e-9
"""Share of delta set aside for the ends of densities, which count as infinite losses (6e-39 of a Gaussian's mass)."""

_ORDERS: tuple[int, ...] = (*range(2, 65), *range(72, 129, 8), 160, 192, 256, 384, 512, 768, 1024)
"""The orders from which one is chosen."""


@lru_cache(maxsize=512)
def renyi(profile: Profile, rate: float, orders: tuple[int, ...]) -> tuple[FloatArray, float]:
    """Rényi divergences of one release at `orders`, in the worse direction, rounded up; and the delta they leave out.

    log E[(P/Q)^(order - 1)] / (order - 1) under P, over the finite atoms of a pair that dominates the amplified release
    (`Profile.losses`): never below the divergence of the release itself, by data processing. Of a bounded range it is
    the largest divergence of any pair, whereas those atoms cover all pairs at once.

    Infinite losses (PTR's delta0, the ends of a density) of mass d before amplification are left out and counted as
    delta, q d in both directions. If the owner is removed, q d is their mass. If it is added, P has mass d there and Q
    has (1 - q) d: of P, the part (1 - q) d has loss 0, and the part q d is left out.
    """
    q = Subsampled(profile, rate).covered_rate
    if isinstance(profile, BoundedRange):  # exact, up to one part in 1e4
        both = [[adaptive.log_moment(profile.eps0, q, order) for order in (float(a), 1.0 - a)] for a in orders]
        return np.asarray(np.max(both, axis=1) / (np.array(orders) - 1.0)), 0.0
    present, absent = profile.losses("remove"), profile.losses("add")
    finite = Losses(absent.losses, absent.masses).added(q)
    shared = np.append(finite.masses, (1.0 - q) * absent.infinity)
    divergences = np.zeros(len(orders))
    for pair in (present.removed(q), Losses(np.append(finite.losses, 0.0), shared)):
        largest = float(np.abs(pair.losses[pair.masses > 0.0]).max())
        for i, order in enumerate(orders):
            log = pair.log_moment(order - 1.0) + _ROUNDING * (1.0 + order * largest)
            divergences[i] = max(divergences[i], log / (order - 1.0))
    return divergences, q * max(present.infinity, absent.infinity)


def to_epsilon(order: FloatArray, divergence: FloatArray, delta: float) -> FloatArray:
    """epsilon of a Rényi divergence at delta: Balle, Barthe, Gaboardi, Hsu, Sato 2020, theorem 21."""
    return np.asarray(divergence + np.log1p(-1.0 / order) - (math.log(delta) + np.log(order)) / (order - 1.0))


@dataclass
class RenyiFilter:
    """Stops before the budget is passed, although each step's parameters may depend on earlier answers.

    Feldman and Zrnic 2021, theorem 4.3: at one order fixed in advance Rényi divergences add up all the same, and
    stopping before those spent exceed a budget keeps the whole interaction within that budget. With several orders each
    gets its share of delta: let A_i be the transcripts whose least order still within budget at the end is order i. On
    A_i the run is the one that order i's own filter allows, so P(S and A_i) <= e^epsilon Q(S and A_i) + delta_i; add up
    over i.

    ``epsilon`` and ``delta`` bound what the whole interaction gives away when one owner is added or removed. ``orders``
    are integers, fixed in advance; few are best. Default: the one that is best for small Gaussian steps; `order_for` is
    better for sampled ones. ``failures`` is the part of delta
    set aside for the approximation deltas (PTR's delta0 times the rate, at every step).
    """

    epsilon: float
    delta: float
    orders: tuple[int, ...] = ()
    failures: float = 0.0

    def __post_init__(self) -> None:
        self.epsilon = positive("epsilon", self.epsilon)
        self.delta = open_unit("delta", self.delta)
        self.failures = real("failures", self.failures, at_least=0.0, below=self.delta)
        self.orders = self.orders or (_best_order(self, np.asarray(_ORDERS, np.float64)),)
        if len(set(self.orders)) != len(self.orders):
            raise InvalidParameter("orders", self.orders, "different whole numbers")
        for order in self.orders:
            whole("orders", order, at_least=2, at_most=1024)
        self._allowed = self.failures + _TAILS * (self.delta - self.failures)
        self._spent, self._failed = np.zeros(len(self.orders)), 0.0
        self._budget = self.epsilon - self._to_epsilon(self._spent)

    def order_for(self, line: Line) -> int:
        """The one order, of those up to 1024, at which an empty filter of this target admits most releases of a kind.

        To be chosen before anything is released, by public parameters.
        """
        return _best_order(self, renyi(line.profile, line.rate, _ORDERS)[0])

    def _to_epsilon(self, divergences: FloatArray) -> FloatArray:
        """What these divergences convert to, each order at its share of delta."""
        share = (1.0 - _TAILS) * (self.delta - self.failures) / len(self.orders)
        return to_epsilon(np.asarray(self.orders, np.float64), divergences, share)

    def admits(self, line: Line) -> bool:
        """Whether these releases still fit at an order that is still within its budget."""
        return self._after(line) is not None

    def spend(self, line: Line) -> bool:
        """Charge these releases if they fit: True, or False and nothing is charged. Ask before releasing."""
        after = self._after(line)
        if after is not None:
            self._spent, self._failed = after
        return after is not None

    def _after(self, line: Line) -> tuple[FloatArray, float] | None:
        """What is spent with these releases, rounded up; None if they do not fit."""
        divergences, delta = renyi(line.profile, line.rate, self.orders)
        spent = np.nextafter(self._spent + np.nextafter(line.count * divergences, np.inf), np.inf)
        failed = self._failed
        if line.count * delta > 0.0:
            failed = math.nextafter(failed + math.nextafter(line.count * delta, math.inf), math.inf)
        if not (spent <= self._budget).any() or failed > self._allowed:
            return None
        return np.where(spent <= self._budget, spent, math.inf), failed  # an order once passed stays passed

    def left(self, line: Line) -> int:
        """How many further releases of this kind fit, at least (`line.count` is not used)."""
        divergences, delta = renyi(line.profile, line.rate, self.orders)
        fits = float((np.maximum(self._budget - self._spent, 0.0) / divergences).max())
        fits = min(fits, MAX_COUNT, (self._allowed - self._failed) / delta if delta > 0.0 else math.inf)
        count = int(fits)
        while count > 0 and not self.admits(Line(line.profile, line.rate, count)):
            count -= 1 + count // 1000
        return max(count, 0)

    @property
    def epsilon_spent(self) -> float:
        """What the divergence spent so far converts to, at the filter's delta: 0 before the first, at most epsilon.

        The guarantee is epsilon for the whole interaction; this says how much of it has been used.
        """
        return float(max(0.0, min(self.epsilon, self._to_epsilon(self._spent).min()))) if self._spent.any() else 0.0

    def state(self) -> dict[str, list[str] | str]:
        """What has been spent, exactly: hexadecimal floats, for each order and for the failures."""
        return {"spent": [float(value).hex() for value in self._spent], "failed": self._failed.hex()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, taken from a filter with the same parameters."""
        spent = np.array([float.fromhex(value) for value in state["spent"]])
        failed = float.fromhex(state["failed"])
        if spent.size != len(self.orders) or not (spent >= 0.0).all() or not failed >= 0.0:
            raise InvalidParameter("state", f"{spent.size} orders", f"a filter's state at {len(self.orders)} orders")
        self._spent, self._failed = spent, failed


def _best_order(target: RenyiFilter, divergences: FloatArray) -> int:
    """Of `_ORDERS` the one whose budget is the most of these divergences; the largest if no order has a budget."""
    orders = np.asarray(_ORDERS, np.float64)
    rest = (1.0 - _TAILS) * (target.delta - target.failures)
    budgets = target.epsilon - to_epsilon(orders, np.zeros(orders.size), rest)
    return _ORDERS[int(np.argmax(budgets / divergences))] if budgets.max() > 0.0 else _ORDERS[-1]
