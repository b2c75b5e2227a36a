"""The steps of one release, in their order.

Check the request, do the public work that it asks for, CHARGE (durably), sample, call the members, aggregate, record
the receipt, answer. An invalid request costs nothing. From the charge on nothing is refunded, whatever happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_dpicl import boundary
from langchain_dpicl.aggregators.base import Aggregator, PublicCalls
from langchain_dpicl.budget import BudgetLine, PrivacyBudget, Receipt
from langchain_dpicl.budget.ledger import Charge
from langchain_dpicl.ensemble import PrivateEnsemble
from langchain_dpicl.errors import MembersAbstained, ReleaseFailed
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness


@dataclass(frozen=True)
class Ready:
    """A checked request with all that it needs of the public side. Nothing is charged yet."""

    request: Mapping[str, Any]
    line: BudgetLine
    aggregator: Aggregator[Any]


@dataclass(frozen=True)
class Private:
    """What the private side hands back: a release, or the kind of its failure. Holds nothing else."""

    release: Any = None
    failed: bool = False
    interrupt: type[BaseException] | None = None


class ReleaseSteps:
    """The steps; `SealedRelease` puts them together."""

    def __init__(
        self, ensemble: PrivateEnsemble, aggregator: Aggregator[Any], budget: PrivacyBudget, line_name: str | None
    ) -> None:
        self.ensemble = ensemble
        self.aggregator = aggregator
        self.budget = budget
        self.line_name = line_name
        self._randomness: Randomness = SecureRandomness()
        calls = aggregator.public_calls()
        self._public = None if calls is None else PublicCalls(boundary.seal(calls.chain), calls.count)

    def line(self) -> BudgetLine:
        """The budget's line of this release; solves and freezes the plan at first use."""
        selector = self.ensemble.selector
        return self.budget.line(
            self.aggregator.mechanism,
            selector.rate,
            name=self.line_name,
            rate_is_explicit=selector.rate_is_explicit,
            options=self.aggregator.options,
        )

    # -- public -------------------------------------------------------------------------------------------------------

    def _check(self, values: Any) -> Mapping[str, Any]:
        request = self.ensemble.check_request(values)
        boundary.check_surroundings()
        return request

    def _ready(self, values: Any, releases: int = 1) -> Ready:
        """Everything before the charge, for one of so many ``releases`` that will be charged together."""
        request = self._check(values)
        self.ensemble.check_health(request, tells_abstention=self.aggregator.tells_abstention)
        line = self.line()
        answers: Sequence[object] = ()
        if self._public is not None:
            _refuse_spent(line, releases)
            answers = boundary.run_private(
                self._public.chain,
                [self.ensemble.public_request(request)] * self._public.count,
                max_concurrency=self.ensemble.max_concurrency,
            )
        return Ready(request, line, self.aggregator.prepare(request, line.options, answers))

    async def _aready(self, values: Any, releases: int = 1) -> Ready:
        request = self._check(values)
        await self.ensemble.acheck_health(request, tells_abstention=self.aggregator.tells_abstention)
        line = await asyncio.to_thread(self.line)
        answers: Sequence[object] = ()
        if self._public is not None:
            await asyncio.to_thread(_refuse_spent, line, releases)
            answers = await boundary.arun_private(
                self._public.chain,
                [self.ensemble.public_request(request)] * self._public.count,
                max_concurrency=self.ensemble.max_concurrency,
            )
        return Ready(request, line, await asyncio.to_thread(self.aggregator.prepare, request, line.options, answers))

    # -- private: sample, call, aggregate -----------------------------------------------------------------------------
    # Every exception ends here, so that no traceback refers to what is private.

    def _private(self, ready: Ready) -> Private:
        try:
            outputs = self.ensemble.run(ready.request, ready.line.rate, ready.aggregator)
            return Private(self._aggregate(ready, outputs))
        except Exception:
            return Private(failed=True)
        except BaseException as interrupt:
            return Private(interrupt=type(interrupt))

    async def _aprivate(self, ready: Ready) -> Private:
        try:
            outputs = await self.ensemble.arun(ready.request, ready.line.rate, ready.aggregator)
            return Private(await asyncio.to_thread(self._aggregate, ready, outputs))
        except Exception:
            return Private(failed=True)
        except BaseException as interrupt:
            return Private(interrupt=type(interrupt))

    def _aggregate(self, ready: Ready, outputs: Sequence[object]) -> Any:
        return boundary.in_private(ready.aggregator.aggregate, outputs, ready.line.parameter, self._randomness)

    # -- public again -------------------------------------------------------------------------------------------------

    def _finish(self, ready: Ready, private: Private, charge: Charge) -> tuple[Any, Receipt]:
        """Record the release, and answer with its receipt."""
        if private.interrupt is not None:
            raise private.interrupt()
        if private.failed:
            raise ReleaseFailed
        outcome = self.aggregator.outcome(private.release)
        receipt = ready.line.record(charge, outcome=outcome)
        if outcome != "released":
            self.ensemble.mark_suspect()
        if private.release is None:
            raise MembersAbstained
        return private.release, receipt


def _refuse_spent(line: BudgetLine, releases: int) -> None:
    """Refuse before any public call where the line is spent: what is left never grows, so the charge must fail."""
    if line.spent() + releases > line.count:
        line.charge(releases)
