"""The steps of one release, in their order.

Check the request; answer an equal query from the ledger; do the public work that the aggregator asks for; CHARGE
(durably), sample, call the members, aggregate, record the receipt, answer. An invalid request costs nothing. From the
charge on nothing is refunded, whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from langchain_core.runnables import Runnable

from langchain_dpicl.aggregators.base import Aggregator, PublicCalls
from langchain_dpicl.budget import Budget, BudgetLine, Charge, Receipt, Replayed
from langchain_dpicl.budget.line import IN_TRANSACTION
from langchain_dpicl.calls.flow import arun, run
from langchain_dpicl.errors import (
    InvalidParameter,
    LedgerError,
    MembersAbstained,
    ModelUnavailable,
    PrivacyBudgetExceeded,
    PrivacyWarning,
    ReleaseFailed,
    UnsafeConfigurationError,
)
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness
from langchain_dpicl.private import boundary
from langchain_dpicl.private.limits import TimeLimit
from langchain_dpicl.private.markers import Closed, Released
from langchain_dpicl.private.reach import is_one, reachable
from langchain_dpicl.private.sealing import seal_public
from langchain_dpicl.private.sharing import public_copy
from langchain_dpicl.release.ensemble import PrivateEnsemble
from langchain_dpicl.release.paying import Payment, apay, pay
from langchain_dpicl.selection.selector import PoissonExampleSelector
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.intake import Vectors

if TYPE_CHECKING:
    from langchain_core.tools import BaseTool

T = TypeVar("T")

_principal: contextvars.ContextVar[str | None] = contextvars.ContextVar("dpicl_principal", default=None)


@contextlib.contextmanager
def acting_for(principal: str) -> Iterator[None]:
    """Count the releases made within this block for an authenticated caller.

    For budgets with ``scope="per_principal"``; a shared one counts all callers together. The name must come from
    authentication, never from the request: a caller who may choose it has as many budgets as names. It reaches what
    runs within the block, threads and tasks that LangChain starts included, and nothing else.
    """
    if not isinstance(principal, str) or not principal:
        raise InvalidParameter("principal", principal, "the authenticated caller, a non-empty string")
    token = _principal.set(principal)
    try:
        yield
    finally:
        _principal.reset(token)


def acting_principal() -> str | None:
    """The caller whom `acting_for` names here; None outside of such a block."""
    return _principal.get()


@dataclass(frozen=True)
class Query:
    """A checked request, and how the ledger knows it again."""

    values: Mapping[str, Any]
    line: BudgetLine
    principal: str | None
    id: str | None
    text: str


@dataclass(frozen=True)
class Prepared:
    """What the public work before the charge gave: the aggregator for this query, and the embedding to be near to."""

    aggregator: Aggregator[Any]
    vector: Vectors | None


@dataclass(frozen=True)
class Begun:
    """A query from its charge on. ``prepared`` is None where the ledger has the answer."""

    query: Query
    prepared: Prepared | None
    entry: Charge | Replayed

    @property
    def ready(self) -> Prepared:
        """What was prepared for a query that was charged."""
        assert self.prepared is not None
        return self.prepared

    @property
    def who(self) -> Numbers | None:
        """The owners who paid for a query that was charged, where owners pay. Private, and given once."""
        paid = self.entry.participants if isinstance(self.entry, Charge) else None
        return None if paid is None else paid.take()


@dataclass(frozen=True)
class Private:
    """What the private side hands back: a release, or the kind of its failure. Holds nothing else."""

    release: Any = None
    failed: bool = False
    interrupt: type[BaseException] | None = None


class AnyRelease(Released, Closed, Runnable[Any, Any], ABC):
    """What a Runnable is that makes releases: all that a tool, a retriever or a server asks of one.

    A base class, since a Runnable that merely wraps a release has its attributes too. Whoever inherits checks a request
    before charging for it (`InvalidParameter` for "input"), charges for `acting_principal`, and shows callbacks,
    streams and errors nothing but the request and what is released.
    """

    budget: Budget
    selector: PoissonExampleSelector
    line_name: str | None
    """As the user gave it; None where the budget has one line."""
    return_receipt: bool
    comes_in_pieces: bool = False
    """Whether a stream gives parts of an answer before the whole is made."""

    @property
    @abstractmethod
    def mechanism(self) -> str:
        """The mechanism that its line counts."""

    @property
    @abstractmethod
    def options(self) -> Mapping[str, float]:
        """The mechanism's options that somebody chose."""

    @property
    @abstractmethod
    def query_key(self) -> str:
        """Under which key a question goes in, as far as that is known."""

    @abstractmethod
    def line(self) -> BudgetLine:
        """The budget's line of this release; solves and freezes the plan at first use."""

    def with_receipt(self) -> Self:
        """The same release, on the same budget, that answers ``{"answer": ..., "receipt": ...}``."""
        copied = copy.copy(self)
        copied.return_receipt = True
        return copied

    def as_tool(  # type: ignore[override]
        self, name: str, description: str, *, inputs: Mapping[str, str] | None = None
    ) -> BaseTool:
        """This release as an agent's tool: `langchain_dpicl.as_tool`."""
        from langchain_dpicl.release.tool import as_tool

        return as_tool(self, name, description, inputs=inputs)

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
        handled = handled_by_fallbacks(exceptions_to_handle)
        return super().with_fallbacks(fallbacks, exceptions_to_handle=handled, exception_key=exception_key)


class ReleaseSteps(AnyRelease):
    """The steps of an ensemble's release; `SealedRelease` puts them together."""

    def __init__(
        self,
        ensemble: PrivateEnsemble,
        aggregator: Aggregator[Any],
        budget: Budget,
        line_name: str | None,
        noise: float | None,
    ) -> None:
        self.ensemble = ensemble
        self.selector = ensemble.selector
        self.aggregator = aggregator
        self.budget = budget
        check_pays(self.selector, budget)
        self.line_name = line_name
        self._chosen = {} if noise is None else {"parameter": noise}
        self._randomness: Randomness = SecureRandomness()
        calls = aggregator.public_calls()
        self._public = None if calls is None else self._public_calls(calls)
        gate = "" if self.selector.threshold is None else f" threshold={self.selector.threshold!r}"
        self._variant = f"{aggregator.variant} members={ensemble.members}{ensemble.variant}{gate}"
        self._prepares = type(aggregator).prepare is not Aggregator.prepare
        self._has_asked = False

    def _public_calls(self, calls: PublicCalls) -> PublicCalls:
        allowed = {"public": self.ensemble.public, "allow_state": self.ensemble.allow_state}
        limit = TimeLimit(seal_public(calls.chain, **allowed), "auto")
        self._public_timeout = None if limit.seconds is None else self.ensemble.timeout
        chain, _ = public_copy(limit.prepared, self.ensemble.allow_state)
        return PublicCalls(chain, calls.count)

    @property
    def mechanism(self) -> str:
        """The aggregator's."""
        return self.aggregator.mechanism

    @property
    def options(self) -> Mapping[str, float]:
        """The aggregator's."""
        return self.aggregator.options

    @property
    def query_key(self) -> str:
        """What the selector looks for, or "input"."""
        return self.selector.nearest_to or "input"

    def line(self) -> BudgetLine:
        """The budget's line of this release; solves and freezes the plan at first use."""
        return self.budget.line(
            self.mechanism,
            self.selector.rate,
            name=self.line_name,
            rate_is_explicit=self.selector.rate_is_explicit,
            owners=self.selector.owners,
            options=self.options,
            fingerprint=self.selector.store.fingerprint,
            **self._chosen,
        )

    # -- public: the request ------------------------------------------------------------------------------------------

    def _query(self, values: Any) -> Query:
        request = self.ensemble.check_request(values)
        boundary.check_surroundings()
        self.selector.store.refresh()  # a file that cannot be followed is known before anything is charged
        line = self.line()
        self._has_asked = True
        known, principal = None, acting_principal()
        self.ensemble.doubts.asked(line.caller(principal))
        if self.budget.replay or self.budget.keep_queries:
            known = line.query_id(request, self._variant, principal)
        text = json.dumps(request, default=repr, ensure_ascii=False) if self.budget.keep_queries else ""
        return Query(request, line, principal, known, text)

    async def _aquery(self, values: Any) -> Query:
        """`_query`, which takes a fifth of a millisecond: in the event loop, but where it may solve a plan or read a
        store's file."""
        is_quick = self._has_asked and not self.selector.store.is_behind
        return self._query(values) if is_quick else await asyncio.to_thread(self._query, values)

    def _calls_public(self, query: Query) -> bool:
        """Whether a query asks for calls, of a model or of an embedding, before its charge."""
        near = self.ensemble.selector.nearest_to is not None
        trying = self.ensemble.unproven or self.ensemble.doubtful(*self._health(query))
        return self._public is not None or near or trying

    def _health(self, query: Query) -> tuple[bool, str]:
        """Whether a release would tell that the members fail; and whose doubt about them counts."""
        line = query.line
        return self.aggregator.tells(self.ensemble.members, line.parameter), line.caller(query.principal)

    def _ahead(self, queries: Sequence[Query]) -> list[Replayed | None]:
        """Before any public call: what the ledger can answer; `PrivacyBudgetExceeded` where the charge would fail."""
        if not self._calls_public(queries[0]):
            return [None] * len(queries)
        line, principal = queries[0].line, queries[0].principal
        known = line.replayed([query.id for query in queries], principal)
        fresh = [query.id for query, answer in zip(queries, known, strict=True) if answer is None]
        needed = len(set(fresh) - {None}) + fresh.count(None)
        line.check(needed, principal)
        return known

    def _begin(self, queries: Sequence[Query], each: Callable[..., Iterable[Any]] = map) -> list[Begun]:
        """Everything up to the charge: all queries' or none's. ``each`` maps the public work over the queries."""
        self.ensemble.check_sync()
        known = self._ahead(queries)
        prepared = list(each(lambda query, answer: None if answer else self._prepared(query), queries, known))
        ids, texts = [query.id for query in queries], [query.text for query in queries]
        line, principal = queries[0].line, queries[0].principal
        if line.has_tickets:
            entries = pay(Payment(line, self.selector.store, self._eligible(prepared), principal, ids, texts))
        else:
            entries = run(line.charging(IN_TRANSACTION, len(queries), principal, ids, texts=texts))
        return [Begun(*found) for found in zip(queries, prepared, entries, strict=True)]

    async def _abegin(self, queries: Sequence[Query], at_once: int = 1) -> list[Begun]:
        boundary.check_loop()
        asks = self._calls_public(queries[0])
        known = await asyncio.to_thread(self._ahead, queries) if asks else [None] * len(queries)
        gate = asyncio.Semaphore(at_once)

        async def prepare(query: Query, answer: Replayed | None) -> Prepared | None:
            async with gate:
                return None if answer else await self._aprepared(query)

        prepared = await every(map(prepare, queries, known))
        ids, texts = [query.id for query in queries], [query.text for query in queries]
        line, principal = queries[0].line, queries[0].principal
        if line.has_tickets:
            entries = await apay(Payment(line, self.selector.store, self._eligible(prepared), principal, ids, texts))
        else:
            entries = await arun(line.charging(IN_TRANSACTION, len(queries), principal, ids, texts=texts))
        return [Begun(*found) for found in zip(queries, prepared, entries, strict=True)]

    def _eligible(self, prepared: Sequence[Prepared | None]) -> list[Callable[[], Numbers] | None]:
        """What finds each query's eligible owners, where owners pay. Public: it has not looked so far."""
        find = self.selector.eligible
        return [None if each is None or each.vector is None else partial(find, each.vector) for each in prepared]

    def _prepared(self, query: Query) -> Prepared:
        """The public work that this query asks for. Nothing is charged yet."""
        vector = self.ensemble.selector.embed_query(query.values)
        answers: Sequence[object] = ()
        if self._public is not None:
            requests = [self.ensemble.public_request(query.values)] * self._public.count
            at_once = self.ensemble.max_concurrency
            answers = boundary.run_private(
                self._public.chain, requests, max_concurrency=at_once, timeout=self._public_timeout
            )
        aggregator = self.aggregator.prepare(query.values, query.line.options, answers)
        self.ensemble.check_sharing(query.values, aggregator)
        self.ensemble.check_health(query.values, aggregator, *self._health(query))
        return Prepared(aggregator, vector)

    async def _aprepared(self, query: Query) -> Prepared:
        vector = await self.ensemble.selector.aembed_query(query.values)
        answers: Sequence[object] = ()
        if self._public is not None:
            requests = [self.ensemble.public_request(query.values)] * self._public.count
            at_once = self.ensemble.max_concurrency
            answers = await boundary.arun_private(
                self._public.chain, requests, max_concurrency=at_once, timeout=self._public_timeout
            )
        aggregator = self.aggregator
        if self._prepares:
            aggregator = await asyncio.to_thread(aggregator.prepare, query.values, query.line.options, answers)
        await self.ensemble.acheck_sharing(query.values, aggregator)
        await self.ensemble.acheck_health(query.values, aggregator, *self._health(query))
        return Prepared(aggregator, vector)

    # -- private: sample, call, aggregate -----------------------------------------------------------------------------
    # Every exception ends here, so that no traceback refers to what is private.

    def _private(self, begun: Begun) -> Private:
        try:
            ready = begun.ready
            rate, who = begun.query.line.rate, begun.who
            outputs = self.ensemble.run(begun.query.values, rate, ready.aggregator, ready.vector, who)
            return Private(self._aggregate(begun, outputs))
        except Exception:
            return Private(failed=True)
        except BaseException as interrupt:
            return Private(interrupt=type(interrupt))

    async def _aoutputs(self, begun: Begun) -> list[Any]:
        """A box with the members' outputs, or with a `Private` where there are none."""
        try:
            ready = begun.ready
            rate = begun.query.line.rate
            who = begun.who
            return [await self.ensemble.arun(begun.query.values, rate, ready.aggregator, ready.vector, who)]
        except Exception:
            return [Private(failed=True)]
        except BaseException as interrupt:
            return [Private(interrupt=type(interrupt))]

    def _unboxed(self, begun: Begun, box: list[Any]) -> Private:
        """What comes of a box, which is empty afterwards: frames that an error passes later refer to the box."""
        outputs = box.pop()
        if isinstance(outputs, Private):
            return outputs
        try:
            return Private(self._aggregate(begun, outputs))
        except Exception:
            return Private(failed=True)
        except BaseException as interrupt:
            return Private(interrupt=type(interrupt))

    def _aggregate(self, begun: Begun, outputs: Sequence[object]) -> Any:
        return boundary.in_private(
            begun.ready.aggregator.aggregate, outputs, begun.query.line.parameter, self._randomness
        )

    # -- public again -------------------------------------------------------------------------------------------------

    def _settle(self, begun: Begun) -> tuple[Any, Receipt]:
        """The answer and its receipt: what was charged is released, what was known is replayed."""
        if isinstance(begun.entry, Replayed):
            return self._again(begun.query, begun.entry)
        return self._finish(begun.query, self._private(begun), begun.entry)

    async def _asettle(self, begun: Begun) -> tuple[Any, Receipt]:
        if isinstance(begun.entry, Replayed):
            return self._again(begun.query, begun.entry)
        box = await self._aoutputs(begun)
        return await asyncio.to_thread(self._close, begun, begun.entry, box)

    def _close(self, begun: Begun, charge: Charge, box: list[Any]) -> tuple[Any, Receipt]:
        return self._finish(begun.query, self._unboxed(begun, box), charge)

    def _finish(self, query: Query, private: Private, charge: Charge) -> tuple[Any, Receipt]:
        """Record the release, and answer with its receipt."""
        if private.failed or private.interrupt is not None:
            with contextlib.suppress(LedgerError):
                query.line.give_up(charge)
            raise ReleaseFailed if private.interrupt is None else private.interrupt()
        outcome = self.aggregator.outcome(private.release)
        answer = None if private.release is None else self.aggregator.dump(private.release)
        receipt = query.line.record(charge, outcome, answer)
        if outcome != "released":
            self.ensemble.mark_suspect(query.line.caller(query.principal))
        if private.release is None:
            raise MembersAbstained
        return private.release, receipt

    def _again(self, query: Query, replayed: Replayed) -> tuple[Any, Receipt]:
        """An answer that was released before: post-processing."""
        return self.aggregator.load(replayed.answer, query.values), replayed.receipt

    def _shared(self, query: Query, release: Any, receipt: Receipt) -> tuple[Any, Receipt]:
        """The same for an equal query of the same batch."""
        return self.aggregator.load(self.aggregator.dump(release), query.values), {**receipt, "replayed": True}

    # -- public: where the budget is spent, and the deployer asked for an answer all the same -------------------------

    def _zero_shot(self, query: Query) -> tuple[Any, Receipt]:
        (output,) = boundary.run_private(
            self.ensemble.public_member,
            [self.ensemble.public_request(query.values)],
            max_concurrency=1,
            timeout=self.ensemble.timeout,
        )
        return self._unreleased(query, output)

    async def _azero_shot(self, query: Query) -> tuple[Any, Receipt]:
        (output,) = await boundary.arun_private(
            self.ensemble.public_member,
            [self.ensemble.public_request(query.values)],
            max_concurrency=1,
            timeout=self.ensemble.timeout,
        )
        return await asyncio.to_thread(self._unreleased, query, output)

    def _unreleased(self, query: Query, output: object) -> tuple[Any, Receipt]:
        answer = None if output is boundary.ABSTAIN else self.aggregator.zero_shot(output, query.values)
        if answer is None:
            raise ModelUnavailable("the budget is spent, and the member's zero-shot answer is not usable")
        return answer, query.line.unreleased_receipt(query.principal)


def check_pays(selector: PoissonExampleSelector, budget: Budget) -> None:
    """`InvalidParameter` where owners pay for what they are eligible for, and nothing says who is.

    From now on, who is forgotten loses its tickets too.
    """
    if budget.tickets and selector.threshold is None:
        bound = "given where the budget has tickets=True (-1 makes every owner eligible)"
        raise InvalidParameter("threshold", None, bound)
    budget.watch(selector.store)


def check_owners(selector: PoissonExampleSelector, budget: Budget, stacklevel: int) -> None:
    """What the number of owners decides when a chain is built: a refusal, or a warning.

    Before the budget is frozen: whether the selector can sample as asked. From then on the only number of owners that
    counts is the plan's: what the store holds by now decides nothing.
    """
    if budget.is_frozen:
        owners = budget.public_owners
    else:
        selector.check_owners()
        owners = selector.store.owner_count
    if owners is not None and budget.delta >= 1 / owners:
        warnings.warn(
            f"delta={budget.delta:g} is not below 1/owners={1 / owners:g}: "
            "such a delta would allow one owner's records to be published outright",
            PrivacyWarning,
            stacklevel=stacklevel,
        )


def releases_in(chain: Runnable[Any, Any]) -> list[AnyRelease]:
    """Every release that a chain can make."""
    return [part for part in reachable(chain) if is_one(part, AnyRelease)]


def handled_by_fallbacks(given: tuple[type[BaseException], ...] | None) -> tuple[type[BaseException], ...]:
    """What a release's fallbacks handle: a model that is down, or what is given if it hides no spent budget."""
    handled = (ModelUnavailable,) if given is None else given
    if any(issubclass(PrivacyBudgetExceeded, kind) for kind in handled):
        raise UnsafeConfigurationError("a fallback must not hide PrivacyBudgetExceeded: handle narrower exceptions")
    return handled


async def every(work: Iterable[Awaitable[T]]) -> list[T]:
    """Every result, or, once all have ended, the first exception in order."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
