"""DPAggregate, and the sealed Runnable that ``ensemble | DPAggregate(...)`` becomes (its steps are in `release`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, get_config_list, get_executor_for_config
from typing_extensions import TypedDict

from langchain_dpicl.aggregators.base import Aggregator
from langchain_dpicl.budget import Budget, Charge, Receipt
from langchain_dpicl.errors import (
    InvalidParameter,
    PrivacyBudgetExceeded,
    UnsafeConfigurationError,
)
from langchain_dpicl.release.ensemble import PrivateEnsemble
from langchain_dpicl.release.flow import Begun, ReleaseSteps, check_owners, every

if TYPE_CHECKING:
    pass

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
        The mechanism: ``NoisyVote(labels)``, ``EmbeddingMean(...)``, ``Keywords.joint_em(...)``, ``Keywords.ptr(...)``.
    budget
        Counts every release; its plan sets the noise.
    line
        Which line of the budget counts these releases, where it has several.
    noise
        The mechanism's noise parameter, for a `PrivacyBudget.filtered` alone; a plan sets its own.
    return_receipt
        Answer ``{"answer": ..., "receipt": {...}}`` instead of the bare answer.

    Use it as ``ensemble | DPAggregate(...)``: that gives a `SealedRelease`.
    """

    def __init__(
        self,
        aggregator: Aggregator[T],
        budget: Budget,
        *,
        line: str | None = None,
        noise: float | None = None,
        return_receipt: bool = False,
    ) -> None:
        if not isinstance(aggregator, Aggregator):
            raise InvalidParameter("aggregator", type(aggregator).__name__, "an Aggregator such as NoisyVote")
        if not isinstance(budget, Budget):
            raise InvalidParameter("budget", type(budget).__name__, "a PrivacyBudget")
        self.aggregator = aggregator
        self.budget = budget
        if (noise is not None) != budget.is_filtered:
            raise InvalidParameter("noise", noise, "given for PrivacyBudget.filtered, and only there")
        if budget.on_exhausted == "zero_shot" and not return_receipt:
            raise InvalidParameter(
                "return_receipt", return_receipt, 'True where on_exhausted="zero_shot": the receipt marks such answers'
            )
        self.line = line
        self.noise = noise
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


class SealedRelease(ReleaseSteps):
    """One sealed step: the caller's mapping in, a differentially private answer out.

    Tracers, callbacks and streams see the input and the release; sampling, members and votes run inside the private
    boundary. Works with invoke, batch, stream (one chunk) and their async twins, and pipes on as plain LCEL.

    Raises `PrivacyBudgetExceeded` when the plan is spent (costs nothing), `InvalidParameter` for a bad request (costs
    nothing), `UnsafeConfigurationError` where globals would carry private text out (costs nothing), `ModelUnavailable`
    and `MembersAbstained` when the model is down, `ReleaseFailed` for a fault on the private side (charged).
    """

    def __init__(self, ensemble: PrivateEnsemble, aggregate: DPAggregate[Any]) -> None:
        super().__init__(ensemble, aggregate.aggregator, aggregate.budget, aggregate.line, aggregate.noise)
        self.return_receipt = aggregate.return_receipt
        self.name = "SealedRelease"
        selector = ensemble.selector
        check_owners(selector, self.budget, stacklevel=4)
        if aggregate.line is not None:
            self.budget.declare(
                aggregate.line,
                self.aggregator.mechanism,
                selector.rate,
                rate_is_explicit=selector.rate_is_explicit,
                owners=selector.owners,
                options=self.aggregator.options,
            )

    @property
    def InputType(self) -> Any:
        """A mapping of names to values: what the member chain needs, less ``examples``."""
        return dict[str, Any]

    @property
    def OutputType(self) -> Any:
        """The release's type, or the answer with its receipt."""
        return AnswerWithReceipt if self.return_receipt else self.aggregator.release_type

    # -- one release --------------------------------------------------------------------------------------------------

    def _release(self, values: Any) -> Any:
        query = self._query(values)
        try:
            (begun,) = self._begin([query])
        except PrivacyBudgetExceeded:
            if self.budget.on_exhausted == "raise":
                raise
            begun = None
        return self._answer(*(self._zero_shot(query) if begun is None else self._settle(begun)))

    async def _arelease(self, values: Any) -> Any:
        query = await self._aquery(values)
        try:
            (begun,) = await self._abegin([query])
        except PrivacyBudgetExceeded:
            if self.budget.on_exhausted == "raise":
                raise
            begun = None
        return self._answer(*await (self._azero_shot(query) if begun is None else self._asettle(begun)))

    def _answer(self, release: Any, receipt: Receipt) -> Any:
        return {"answer": release, "receipt": receipt} if self.return_receipt else release

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

        Equal inputs are released once, and those that the ledger can answer cost nothing (unless ``replay=False``).
        With ``return_exceptions=True`` each is checked and charged on its own instead.
        """
        if return_exceptions or not inputs:
            return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        configs = get_config_list(config, len(inputs))
        queries = [self._query(values) for values in inputs]
        with get_executor_for_config(configs[0]) as executor:
            try:
                begun = self._begin(queries, executor.map)
            except PrivacyBudgetExceeded:
                if self.budget.on_exhausted == "raise":
                    raise
                return super().batch(inputs, config, **kwargs)
            first = _first_of_each(begun)
            settled: dict[int, tuple[Any, Receipt]] = {}

            def one(i: int) -> Any:
                def settle(_: dict[str, Any]) -> Any:
                    settled[i] = (
                        self._settle(begun[i]) if first[i] == i else self._shared(queries[i], *settled[first[i]])
                    )
                    return self._answer(*settled[i])

                return self._call_with_config(settle, inputs[i], configs[i])

            futures = {i: executor.submit(one, i) for i in range(len(inputs)) if first[i] == i}
            wait(futures.values())  # what was charged is also released, whatever becomes of its neighbours
        for future in futures.values():
            future.result()
        return [futures[i].result() if i in futures else one(i) for i in range(len(inputs))]

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
        configs = get_config_list(config, len(inputs))
        at_once = ensure_config(configs[0]).get("max_concurrency") or len(inputs)
        queries = [await self._aquery(values) for values in inputs]
        try:
            begun = await self._abegin(queries, at_once)
        except PrivacyBudgetExceeded:
            if self.budget.on_exhausted == "raise":
                raise
            return await super().abatch(inputs, config, **kwargs)
        first = _first_of_each(begun)
        settled: dict[int, tuple[Any, Receipt]] = {}
        gate = asyncio.Semaphore(at_once)

        async def one(i: int) -> Any:
            async def settle(_: dict[str, Any]) -> Any:
                settled[i] = (
                    await self._asettle(begun[i]) if first[i] == i else self._shared(queries[i], *settled[first[i]])
                )
                return self._answer(*settled[i])

            async with gate:
                return await self._acall_with_config(settle, inputs[i], configs[i])

        alone = [i for i in range(len(inputs)) if first[i] == i]
        answers = dict(zip(alone, await every(map(one, alone)), strict=True))
        return [answers[i] if i in answers else await one(i) for i in range(len(inputs))]

    def __repr__(self) -> str:
        return f"SealedRelease({self.ensemble!r}, {self.aggregator!r})"


def _first_of_each(begun: Sequence[Begun]) -> list[int]:
    """For each entry of a batch, the first that shares its charge: equal queries are released once."""
    seen: dict[int, int] = {}
    return [seen.setdefault(id(each.entry), i) if isinstance(each.entry, Charge) else i for i, each in enumerate(begun)]
