"""DPAggregate, and the sealed Runnable that ``ensemble | DPAggregate(...)`` becomes.

One release, in this order: check the request, CHARGE (durably), sample, call the members, aggregate, record the
receipt, answer. An invalid request costs nothing. From the charge on nothing is refunded, whatever happens.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, get_config_list, get_executor_for_config
from typing_extensions import TypedDict

from langchain_dpicl import boundary
from langchain_dpicl.aggregators.base import Aggregator
from langchain_dpicl.budget import BudgetLine, PrivacyBudget, Receipt
from langchain_dpicl.budget.ledger import Charge
from langchain_dpicl.ensemble import PrivateEnsemble
from langchain_dpicl.errors import (
    InvalidParameter,
    MembersAbstained,
    ModelUnavailable,
    PrivacyBudgetExceeded,
    PrivacyWarning,
    ReleaseFailed,
    UnsafeConfigurationError,
)
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness

T = TypeVar("T")

_REFUSAL = "a DPAggregate runs only as part of `ensemble | DPAggregate(...)`, where the votes stay sealed"


class AnswerWithReceipt(TypedDict):
    """What a release gives with ``return_receipt=True``."""

    answer: Any
    receipt: Receipt


class DPAggregate(Runnable[Any, Any], Generic[T]):
    """An aggregator bound to a budget: the only way from private answers to a public one.

    Parameters
    ----------
    aggregator
        The mechanism, for instance ``NoisyVote(labels)``.
    budget
        Counts every release; its plan sets the noise.
    return_receipt
        Answer ``{"answer": ..., "receipt": {...}}`` instead of the bare answer.

    Use it as ``ensemble | DPAggregate(...)``: that gives a `SealedRelease`.
    """

    def __init__(self, aggregator: Aggregator[T], budget: PrivacyBudget, *, return_receipt: bool = False) -> None:
        if not isinstance(aggregator, Aggregator):
            raise InvalidParameter("aggregator", type(aggregator).__name__, "an Aggregator such as NoisyVote")
        if not isinstance(budget, PrivacyBudget):
            raise InvalidParameter("budget", type(budget).__name__, "a PrivacyBudget")
        self.aggregator = aggregator
        self.budget = budget
        self.return_receipt = bool(return_receipt)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> NoReturn:
        """Refused: alone, it would need the votes as a visible input."""
        raise UnsafeConfigurationError(_REFUSAL)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise UnsafeConfigurationError(_REFUSAL)

    def transform(self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """Refused."""
        raise UnsafeConfigurationError(_REFUSAL)

    async def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Refused."""
        raise UnsafeConfigurationError(_REFUSAL)
        yield

    def __repr__(self) -> str:
        return f"DPAggregate({self.aggregator!r}, {self.budget!r})"


@dataclass(frozen=True)
class _Private:
    """What the private side hands back: a release, or the kind of its failure. Holds nothing else."""

    release: Any = None
    failed: bool = False
    interrupt: type[BaseException] | None = None


class SealedRelease(Runnable[dict[str, Any], Any]):
    """One sealed step: the caller's mapping in, a differentially private answer out.

    Tracers, callbacks and streams see the input and the release; sampling, members and votes run inside the private
    boundary. Works with invoke, batch, stream (one chunk) and their async twins, and pipes on as plain LCEL.

    Raises `PrivacyBudgetExceeded` when the plan is spent (costs nothing), `InvalidParameter` for a bad request (costs
    nothing), `UnsafeConfigurationError` where globals would carry private text out (costs nothing), `ModelUnavailable`
    and `MembersAbstained` when the model is down, `ReleaseFailed` for a fault on the private side (charged).
    """

    def __init__(self, ensemble: PrivateEnsemble, aggregate: DPAggregate[Any]) -> None:
        self.ensemble = ensemble
        self.budget = aggregate.budget
        self.aggregator = aggregate.aggregator
        self.return_receipt = aggregate.return_receipt
        self.name = "SealedRelease"
        self._randomness: Randomness = SecureRandomness()
        selector = ensemble.selector
        owners = selector.store.owner_count
        if self.budget.delta >= 1 / max(owners, 1):
            warnings.warn(
                f"delta={self.budget.delta:g} is not below 1/owners={1 / max(owners, 1):g}: "
                "such a delta would allow one owner's records to be published outright",
                PrivacyWarning,
                stacklevel=3,
            )

    @property
    def InputType(self) -> Any:
        """A mapping of names to values: what the member chain needs, less ``examples``."""
        return dict[str, Any]

    @property
    def OutputType(self) -> Any:
        """The release's type, or the answer with its receipt."""
        return AnswerWithReceipt if self.return_receipt else self.aggregator.release_type

    def line(self) -> BudgetLine:
        """The budget's line of this release; solves and freezes the plan at first use."""
        selector = self.ensemble.selector
        return self.budget.line(
            self.aggregator.mechanism,
            selector.rate,
            rate_is_explicit=selector.rate_is_explicit,
            options=self.aggregator.options,
        )

    # -- one release --------------------------------------------------------------------------------------------------

    def _release(self, values: Any, charge: Charge | None = None) -> Any:
        request = self._check(values)
        if charge is None:
            self.ensemble.check_health(request)
            (charge,) = self.line().charge()
        line = self.line()
        return self._finish(self._private(request, line), line, charge)

    async def _arelease(self, values: Any, charge: Charge | None = None) -> Any:
        request = self._check(values)
        if charge is None:
            await self.ensemble.acheck_health(request)
        line = await asyncio.to_thread(self.line)
        if charge is None:
            (charge,) = await asyncio.to_thread(line.charge)
        outcome = await self._aprivate(request, line)
        if outcome.interrupt is not None:
            raise outcome.interrupt()
        return await asyncio.to_thread(self._finish, outcome, line, charge)

    def _check(self, values: Any) -> Mapping[str, Any]:
        request = self.ensemble.check_request(values)
        boundary.check_surroundings()
        return request

    def _private(self, request: Mapping[str, Any], line: BudgetLine) -> _Private:
        """Sample, call, aggregate. Every exception ends here, so that no traceback refers to what is private."""
        try:
            outputs = self.ensemble.run(request, line.rate)
            return _Private(self.aggregator.aggregate(outputs, line.parameter, self._randomness))
        except Exception:
            return _Private(failed=True)
        except BaseException as interrupt:
            return _Private(interrupt=type(interrupt))

    async def _aprivate(self, request: Mapping[str, Any], line: BudgetLine) -> _Private:
        try:
            outputs = await self.ensemble.arun(request, line.rate)
            return _Private(self.aggregator.aggregate(outputs, line.parameter, self._randomness))
        except Exception:
            return _Private(failed=True)
        except BaseException as interrupt:
            return _Private(interrupt=type(interrupt))

    def _finish(self, outcome: _Private, line: BudgetLine, charge: Charge) -> Any:
        """Record and answer. Here everything is public."""
        if outcome.interrupt is not None:
            raise outcome.interrupt()
        if outcome.failed:
            raise ReleaseFailed
        receipt = line.record(charge)
        if outcome.release is None:
            self.ensemble.mark_suspect()
            raise MembersAbstained
        return {"answer": outcome.release, "receipt": receipt} if self.return_receipt else outcome.release

    # -- Runnable -----------------------------------------------------------------------------------------------------

    def invoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """One release."""
        return self._call_with_config(self._release, input, config)

    async def ainvoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """One release. A cancelled call keeps its charge."""
        return await self._acall_with_config(self._arelease, input, config)

    def batch(
        self,
        inputs: list[dict[str, Any]],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """n releases, charged together before the first member is called: all n, or none and `PrivacyBudgetExceeded`.

        With ``return_exceptions=True`` each is checked and charged on its own instead.
        """
        if return_exceptions or not inputs:
            return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        for values in inputs:
            self.ensemble.check_health(self._check(values))
        charges = self.line().charge(len(inputs))
        configs = get_config_list(config, len(inputs))

        def one(values: dict[str, Any], charge: Charge, each: RunnableConfig) -> Any:
            return self._call_with_config(lambda value: self._release(value, charge), values, each)

        with get_executor_for_config(configs[0]) as executor:
            futures = [executor.submit(one, *each) for each in zip(inputs, charges, configs, strict=True)]
            wait(futures)  # what was charged is also released, whatever becomes of its neighbours
        return [future.result() for future in futures]

    async def abatch(
        self,
        inputs: list[dict[str, Any]],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """`batch`, asynchronously."""
        if return_exceptions or not inputs:
            return await super().abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        for values in inputs:
            await self.ensemble.acheck_health(self._check(values))
        line = await asyncio.to_thread(self.line)
        charges = await asyncio.to_thread(line.charge, len(inputs))
        configs = get_config_list(config, len(inputs))
        gate = asyncio.Semaphore(ensure_config(configs[0]).get("max_concurrency") or len(inputs))

        async def one(values: dict[str, Any], charge: Charge, each: RunnableConfig) -> Any:
            async def release(value: dict[str, Any]) -> Any:
                return await self._arelease(value, charge)

            async with gate:
                return await self._acall_with_config(release, values, each)

        answers = await asyncio.gather(*map(one, inputs, charges, configs), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return list(answers)

    def with_fallbacks(
        self,
        fallbacks: Sequence[Runnable[Any, Any]],
        *,
        exceptions_to_handle: tuple[type[BaseException], ...] | None = None,
        exception_key: str | None = None,
    ) -> Any:
        """LangChain's fallbacks, which must not hide a spent budget: by default they handle a model that is down.

        Raises `UnsafeConfigurationError` for ``exceptions_to_handle`` that would swallow `PrivacyBudgetExceeded`.
        """
        handled = (ModelUnavailable,) if exceptions_to_handle is None else exceptions_to_handle
        if any(issubclass(PrivacyBudgetExceeded, kind) for kind in handled):
            raise UnsafeConfigurationError("a fallback must not hide PrivacyBudgetExceeded: handle narrower exceptions")
        return super().with_fallbacks(fallbacks, exceptions_to_handle=handled, exception_key=exception_key)

    def __repr__(self) -> str:
        return f"SealedRelease({self.ensemble!r}, {self.aggregator!r})"
