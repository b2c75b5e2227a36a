"""Privacy random variables: prv-accountant for every profile of this package.

The library (Gopi, Lee, Wutschitz 2021) knows the subsampled Gaussian. A privacy random variable is the privacy loss
under P, though, and every profile here turns into losses of a dominating pair; so `ProfileVariable` gives the library
PTR and the exponential mechanism as well. The library bounds the error of epsilon by `eps_error` on both sides: the
upper end counts.

Two of the library's parts are replaced, since they stop it on ordinary parameters: the mean of a truncated variable (by
quadrature there, exact here) and the size of the domain (from Rényi divergences at a fixed list of orders there, which
overflow; from Chernoff's bound at the best order here).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from langchain_dpicl.errors import AccountingError
from langchain_dpicl.privacy.accountant import Line, Schedule
from langchain_dpicl.privacy.checks import open_unit, positive, real
from langchain_dpicl.privacy.composition import Composition
from langchain_dpicl.privacy.losses import FloatArray, Losses
from langchain_dpicl.privacy.profile import DIRECTIONS, Direction

_MAX_PLACES = 1 << 22


def profile_variable(losses: Losses) -> Any:
    """A `prv_accountant.privacy_random_variables.PrivacyRandomVariable` with these losses."""
    from prv_accountant.privacy_random_variables import PrivacyRandomVariable

    class ProfileVariable(PrivacyRandomVariable):  # type: ignore[misc]
        """The privacy loss of a dominating pair, conditioned on being finite."""

        def __init__(self, losses: Losses) -> None:
            order = np.argsort(losses.losses)
            self._losses = losses.losses[order]
            masses = losses.masses[order]
            self._masses = masses / masses.sum()
            self._cumulated = np.append(0.0, np.cumsum(self._masses))
            self._infinity = losses.infinity

        def cdf(self, t: Any) -> FloatArray:
            return self._cumulated[np.searchsorted(self._losses, np.asarray(t, np.float64), side="right")]

        def rdp(self, alpha: float) -> float:
            exponents = np.log(np.maximum(self._masses, 1e-300)) + (alpha - 1.0) * self._losses
            top = float(exponents.max())
            return (top + math.log(float(np.exp(exponents - top).sum()))) / (alpha - 1.0)

        def mean(self) -> float:
            return float((self._masses * self._losses).sum())

        def truncated(self, low: float, high: float) -> ProfileVariable:
            """Conditioned on (low, high], with an exact mean."""
            held = (self._losses > low) & (self._losses <= high)
            return ProfileVariable(Losses(self._losses[held], self._masses[held], self._infinity))

        @property
        def pm_inf(self) -> float:
            return self._infinity

    return ProfileVariable(losses)


class PRVAccountant:
    """prv-accountant, for every profile, in both directions.

    Parameters
    ----------
    eps_error
        How far the answer may lie above the truth (and the library's lower end below it). None: half a per cent of
        the answer.
    """

    def __init__(self, eps_error: float | None = None) -> None:
        self._eps_error = None if eps_error is None else positive("eps_error", eps_error)

    def epsilon(self, schedule: Schedule, delta: float) -> float:
        """The upper end of the library's interval, in the worse direction."""
        return self.interval(schedule, delta)[1]

    def interval(self, schedule: Schedule, delta: float) -> tuple[float, float]:
        """The library's lower and upper end, in the worse direction."""
        delta = open_unit("delta", delta)
        lines = [line for line in schedule if line.count]
        if not lines:
            return 0.0, 0.0
        ends = [self._one_direction(lines, delta, direction) for direction in DIRECTIONS]
        return max(low for low, _ in ends), max(high for _, high in ends)

    def delta(self, schedule: Schedule, epsilon: float) -> float:
        """The upper end of the library's delta at epsilon, in the worse direction."""
        epsilon = real("epsilon", epsilon, at_least=0.0)
        lines = [line for line in schedule if line.count]
        worst = 0.0
        if not lines:
            return worst
        for direction in DIRECTIONS:
            guess = Composition([(line.losses(direction), line.count) for line in lines]).delta(epsilon)
            delta_error = max(guess, 1e-12) * 1e-3
            error = self._eps_error or max(5e-3 * epsilon, 1e-4)
            composed = self._compose(lines, direction, error, delta_error)
            worst = max(worst, float(composed.compute_delta_estimate(epsilon - error)) + delta_error)
        return min(1.0, worst)

    def _one_direction(self, lines: list[Line], delta: float, direction: Direction) -> tuple[float, float]:
        guess = Composition([(line.losses(direction), line.count) for line in lines]).epsilon(delta)
        if not math.isfinite(guess):
            return math.inf, math.inf
        error = self._eps_error or max(5e-3 * guess, 1e-5)
        try:
            low, _, high = self._compose(lines, direction, error, delta / 1000.0).compute_epsilon(
                delta, delta / 1000.0, error
            )
        except (RuntimeError, ValueError, OverflowError) as failure:
            if guess == 0.0:
                return 0.0, error
            raise AccountingError(f"prv-accountant cannot do this ({failure}); the PLD accountant can") from None
        return max(0.0, low), max(0.0, high)

    def _compose(self, lines: list[Line], direction: Direction, eps_error: float, delta_error: float) -> Any:
        """The library's algorithm (its remark 5.6 and theorem 5.5) with exact means and our domain size."""
        from prv_accountant import composers, discretisers
        from prv_accountant.domain import Domain

        every = [line.losses(direction) for line in lines]
        total = sum(line.count for line in lines)
        reach = max(
            _reach([(losses, line.count) for losses, line in zip(every, lines, strict=True)], delta_error / 4.0),
            *(_reach([(losses, 1)], delta_error / 8.0 / total) for losses in every),
        )
        mesh = eps_error / math.sqrt(total / 2.0 * math.log(12.0 / delta_error))
        reach = max(reach, eps_error) + 3.0
        if 2.0 * reach / mesh > _MAX_PLACES:
            raise AccountingError(
                f"prv-accountant needs a mesh of {2.0 * reach / mesh:.3g} places for these {total} releases; "
                "the PLD accountant needs fewer"
            )
        domain = Domain.create_aligned(-reach, reach, mesh)
        discrete = [
            discretisers.CellCentred().discretise(
                profile_variable(losses).truncated(float(domain.t_min()), float(domain.t_max())), domain
            )
            for losses in every
        ]
        return composers.Heterogeneous(discrete).compute_composition([line.count for line in lines])


def _reach(parts: list[tuple[Losses, int]], weight: float) -> float:
    """An epsilon at which the finite part's delta is at most `weight`."""
    finite = [(Losses(losses.losses, losses.masses, 0.0), count) for losses, count in parts]
    return Composition(finite).epsilon(weight)
