"""The sealed release: `PrivateEnsemble`, `DPAggregate`, and what ``ensemble | DPAggregate(...)`` becomes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, get_config_list
from typing_extensions import TypedDict

from langchain_dpicl.aggregators.base import Aggregator
from langchain_dpicl.budget import Budget, Charge, Receipt
from langchain_dpicl.calls.flow import Either, Flow, arun, run, together
from langchain_dpicl.errors import (
    InvalidParameter,
    PrivacyBudgetExceeded,
    UnsafeConfigurationError,
)
from langchain_dpicl.private import boundary
from langchain_dpicl.private.markers import Closed
from langchain_dpicl.release.base import check_budget
from langchain_dpicl.release.members import Members, MembersRelease
from langchain_dpicl.release.transaction import (
    charge,
    checked,
    give_up,
    settle,
    transact,
)

T = TypeVar("T")


class _Sealed(Runnable[Any, Any]):
    """A Runnable that runs only as a part of a sealed release."""

    _refusal: str

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise UnsafeConfigurationError(self._refusal)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise UnsafeConfigurationError(self._refusal)

    def transform(self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """Refused."""
        raise UnsafeConfigurationError(self._refusal)

    async def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Refused."""
        raise UnsafeConfigurationError(self._refusal)
        yield


class PrivateEnsemble(Members, Closed, _Sealed):
    """N parallel calls of ``member``, each with the bucket that ``selector`` drew for it.

    Parameters
    ----------
    selector
        Draws the buckets; its ``members`` is N.
    member
        Any Runnable (or function, or mapping of Runnables). It gets the caller's input mapping plus ``examples``: a
        list of mappings, empty for an empty bucket, so that the zero-shot prompt is asked. N calls are made for every
        release, whatever was sampled. A member that raises, or whose answer is not usable, abstains.
    max_concurrency
        How many calls run at once. Default: all N, at most 64. Not more than your model server answers at once: a
        request that waits in the server is on its call's clock. The embedded model needs no limit.
    timeout
        Seconds that one call may take; the member then abstains, and no other call begins in its place before its
        request has ended at the model. It counts the call's own work, from its own start: never its wait for a thread,
        for the embedded model's slot, or for a server that asks it to wait (HTTP status 429: the request is repeated,
        for ten minutes at most). Default "auto": 120 where every model of the member can be ended so (the embedded one,
        and those of ``langchain-openai``), else None. None: no limit. Raises `InvalidParameter` for a model that
        computes in this process; a model with an asynchronous call of its own keeps it in ``ainvoke`` and ``abatch``
        alone. A model with a ``rate_limiter`` takes no limit. The clock cannot tell a call's work from its wait for
        code that blocks the event loop or holds the interpreter's lock, for an HTTP client's pool of connections that
        is smaller than ``max_concurrency``, or for public calls of the embedded model: one member can make others late
        there. What hangs keeps its thread.
    public
        The retrievers, vector stores, example selectors and document stores that the member may search, since nobody's
        private text is in them. Any other is refused: every member would find the same owners' documents there.
    allow_state
        What members may share although they change it, such as a rate limiter: objects, or names as the refusal shows
        them. A chain that reads there what another call wrote voids the guarantee; name nothing that holds prompts,
        examples, answers or facts about them.

    ``ensemble | DPAggregate(...)`` fuses into one sealed Runnable. Anything else, or invoking it alone, raises
    `UnsafeConfigurationError`, since every step that LCEL can see is traced. The member is copied with its models'
    caches, verbosity and callbacks off. A member that reaches a callback handler, a cache, checkpoints, a memory, a
    chat history, a graph's store or an `ExemplarStore`, by whatever way, is refused: text would leave there, or members
    would read each other's. So is a cached function with arguments; one without is called when the ensemble is made,
    and what it gives is looked into.

    What the member's functions can write (containers, attributes, variables) is compared around two calls on made-up
    examples, once, before the first charge. What changed is refused, unless ``allow_state`` names it; see the README
    for state that no check sees. Zero-shot answers, candidates and questions about the model's health are asked of a
    copy, made with the ensemble, of everything but models, embeddings, public collections and classes: what an app
    changes in its objects later does not reach them. What cannot be copied is refused.

    The caller's config does not reach the member, which would otherwise see its callbacks: ``configurable`` fields keep
    the values that the member was made with.

    Each call is made on its own, never through ``batch``: there, one private prompt that is refused can fail its
    neighbours in the same request, and one owner would then move more than one member's answer. Use a model server for
    which one request does not change the answer to another.
    """

    _refusal = (
        "a PrivateEnsemble shows private answers: it runs only inside `ensemble | DPAggregate(...)` "
        "(with steps before it, write `steps | (ensemble | DPAggregate(...))`)"
    )

    def __or__(self, other: Any) -> SealedRelease:  # type: ignore[override]
        """Fuse with a `DPAggregate`; refuse everything else."""
        if not isinstance(other, DPAggregate):
            raise UnsafeConfigurationError(self._refusal)
        return SealedRelease(self, other)

    def pipe(self, *others: Any, name: str | None = None) -> Any:
        """``ensemble.pipe(DPAggregate(...), ...)``: as `|`."""
        if not others:
            raise UnsafeConfigurationError(self._refusal)
        sealed = self | others[0]
        return sealed.pipe(*others[1:], name=name) if len(others) > 1 else sealed

    def __repr__(self) -> str:
        return f"PrivateEnsemble(members={self.members}{self.selector.shown_rate})"


class AnswerWithReceipt(TypedDict):
    """What a release gives with ``return_receipt=True``."""

    answer: Any
    receipt: Receipt


class DPAggregate(_Sealed, Generic[T]):
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

    _refusal = "a DPAggregate runs only as part of `ensemble | DPAggregate(...)`, where the votes stay sealed"

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
        check_budget(budget, noise, return_receipt)
        self.aggregator = aggregator
        self.budget = budget
        self.line = line
        self.noise = noise
        self.return_receipt = bool(return_receipt)

    def __repr__(self) -> str:
        return f"DPAggregate({self.aggregator!r}, {self.budget!r})"


class SealedRelease(MembersRelease):
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
        self._use_budget(stacklevel=4)

    @property
    def InputType(self) -> Any:
        """A mapping of names to values: what the member chain needs, less ``examples``."""
        return dict[str, Any]

    @property
    def OutputType(self) -> Any:
        """The release's type, or the answer with its receipt."""
        return AnswerWithReceipt if self.return_receipt else self.aggregator.release_type

    # -- Runnable -----------------------------------------------------------------------------------------------------

    def invoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """One release."""
        return self._call_with_config(self._release, input, config)

    async def ainvoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """One release. A cancelled call keeps its charge."""
        return await self._acall_with_config(self._arelease, input, config)

    def _release(self, values: Any) -> Any:
        self.ensemble.check_sync()
        return self._told(*run(transact(self, values)))

    async def _arelease(self, values: Any) -> Any:
        boundary.check_loop()
        return self._told(*await arun(transact(self, values)))

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
        self.ensemble.check_sync()
        return run(self._batch(inputs, config, kwargs))

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
        boundary.check_loop()
        return await arun(self._batch(inputs, config, kwargs))

    def _batch(
        self,
        inputs: list[dict[str, Any]],
        config: RunnableConfig | list[RunnableConfig] | None,
        options: Mapping[str, Any],
    ) -> Flow[list[Any]]:
        """All are checked, all are charged or none, and each is answered in a run of its own."""
        configs = get_config_list(config, len(inputs))
        at_once = ensure_config(configs[0]).get("max_concurrency")
        requests = [checked(self, values) for values in inputs]
        try:
            entries = yield from charge(self, requests, at_once)
        except PrivacyBudgetExceeded:
            if self.budget.on_exhausted == "raise":
                raise
            entries = []
        if not entries:
            given = inputs, config
            one_by_one = Either(partial(super().batch, *given, **options), partial(super().abatch, *given, **options))
            return list((yield one_by_one))
        seen: dict[int, int] = {}
        first = [
            seen.setdefault(id(each.entry), i) if isinstance(each.entry, Charge) else i
            for i, each in enumerate(entries)
        ]  # equal queries share a charge: they are released once
        settled: dict[int, tuple[Any, Receipt]] = {}

        def one(i: int) -> Flow[Any]:
            if first[i] == i:
                settled[i] = yield from settle(self, entries[i])
            else:
                release, receipt = settled[first[i]]
                again = self.aggregator.load(self.aggregator.dump(release), requests[i].asked)
                settled[i] = again, {**receipt, "replayed": True}
            return self._told(*settled[i])

        alone = [i for i in range(len(inputs)) if first[i] == i]
        try:
            found = yield together([self._traced(one(i), inputs[i], configs[i]) for i in alone], at_once)
        except Exception:
            raise
        except BaseException:  # a cancellation: what is recorded by now stays, the rest will have no answer
            for i in alone:
                give_up(entries[i])
            raise
        answers = dict(zip(alone, found, strict=True))
        for i in range(len(inputs)):
            if i not in answers:
                answers[i] = yield from self._traced(one(i), inputs[i], configs[i])
        return [answers[i] for i in range(len(inputs))]

    def _traced(self, flow: Flow[Any], value: Any, config: RunnableConfig) -> Flow[Any]:
        """The flow as a run of its own, for the callbacks of one input of a batch."""

        def here() -> Any:
            return self._call_with_config(lambda _: run(flow), value, config)

        async def awaited() -> Any:
            async def settled(_: Any) -> Any:
                return await arun(flow)

            return await self._acall_with_config(settled, value, config)

        return (yield Either(here, awaited))

    def __repr__(self) -> str:
        return f"SealedRelease({self.ensemble!r}, {self.aggregator!r})"
