"""The transaction of a release: its steps in the one order that keeps the guarantee.

1. Check the surroundings, the store and the request.
2. Look into the ledger: an equal query is answered from it, and a spent budget refused,
   before any public call.
3. Do the public work: embed the query, ask for candidates, check the model.
4. CHARGE, durably. If owners pay with tickets, who is eligible is found and charged on the
   private side.
5. Do the private work: sample, call, draw. Every exception ends in `guarded`.
6. Record the release and its receipt, or give the charge up. The charge stands either way.

An error before the charge costs nothing. From the charge on nothing is refunded. Sealed
releases, private answers and heads are `Release`s: each fills in its steps, and `transact`
alone puts them in order. No other code may charge.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

from langchain_core.runnables.config import RunnableConfig, ensure_config

from langchain_dpicl.budget import BudgetLine, Charge, PrivacyBudget, Receipt, Replayed
from langchain_dpicl.budget.line import IN_TRANSACTION
from langchain_dpicl.calls import shut
from langchain_dpicl.calls.flow import Flow, together
from langchain_dpicl.calls.observing import Observer, observer
from langchain_dpicl.errors import (
    DPICLError,
    InvalidParameter,
    LedgerError,
    PrivacyBudgetExceeded,
    QuotaExceeded,
    UnsafeConfigurationError,
)
from langchain_dpicl.private import boundary
from langchain_dpicl.private.boundary import Failed, guarded
from langchain_dpicl.selection.rules import Rules
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.filters import MetadataFilter

Find = Callable[[], Numbers]
"""Finds the owners who are eligible for a query. Private."""

Entries = list[Charge | Replayed]

_principal: contextvars.ContextVar[str | None] = contextvars.ContextVar("dpicl_principal", default=None)


@contextlib.contextmanager
def acting_for(principal: str) -> Iterator[None]:
    """Count the releases made within this block for an authenticated caller.

    For budgets with ``scope="per_principal"``; a shared one counts all callers together.
    The name must come from authentication, never from the request: a caller who may choose
    it has as many budgets as names. It reaches what runs within the block, threads and
    tasks that LangChain starts included, and nothing else.
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


def refuse_langserve(config: RunnableConfig | None = None) -> None:
    """Refuse a request by LangServe's own routes, which name no caller, and check neither size nor config."""
    if _principal.get() is None and "__langserve_version" in ensure_config(config).get("metadata", {}):
        raise UnsafeConfigurationError(
            "langserve.add_routes would charge everybody's requests to nobody; nothing was charged. Serve it with "
            "langchain_dpicl.serving.add_dp_routes(app, chain, path, principal_from=...), for the same clients"
        )


@dataclass(frozen=True)
class Request:
    """A checked request, and how the ledger knows it again. Public."""

    asked: Any
    line: BudgetLine
    principal: str | None
    id: str | None
    text: str
    wanted: MetadataFilter | None = None
    """The filter that exemplars have to pass, if the request or its caller restricts them."""

    @cached_property
    def caller(self) -> str:
        """The caller who sees its outcome: the principal, or "" if callers share the outcomes."""
        return self.line.caller(self.principal)


@dataclass(frozen=True)
class Charged:
    """A request from its charge on. ``ready`` is the result of the public work; None if the ledger has the answer."""

    request: Request
    ready: Any
    entry: Charge | Replayed

    @property
    def participants(self) -> Numbers | None:
        """The owners who paid, if owners pay. Private, and given once."""
        if not isinstance(self.entry, Charge) or self.entry.participants is None:
            return None
        paid: Numbers = self.entry.participants.take()
        return paid


class Release(ABC):
    """The steps of a kind of release in its transaction."""

    budget: PrivacyBudget
    store: ExemplarStore
    """The private exemplars."""
    units: int = 1
    """The most units of its line that one release may use: an answer's tokens. It takes fewer if fewer are left."""
    shown: tuple[type[DPICLError], ...] = ()
    """Errors of the private work that surface in place of `ReleaseFailed`. Their messages are constant."""

    @abstractmethod
    def check(self, values: Any) -> Request:
        """The request, checked: see `request`. Raises `InvalidParameter`, and what the budget's line raises."""

    def request(
        self,
        asked: Any,
        line: BudgetLine,
        content: Mapping[str, Any],
        variant: str,
        text: Any,
        rules: Rules | None = None,
    ) -> Request:
        """A request by the acting principal. ``content``, ``variant`` and the filter that the ``rules`` make of
        ``asked`` decide which requests are equal; ``text`` is what receipts keep if the deployer keeps queries."""
        refuse_langserve()
        principal = _principal.get()
        wanted = None
        if rules is not None:
            wanted = rules.wanted(asked, principal)
        if wanted is not None:
            variant += f" filter={wanted}"
        known = None
        if self.budget.replay or self.budget.keep_queries:
            known = line.query_id(content, variant, principal)
        kept = ""
        if self.budget.keep_queries:
            kept = json.dumps(text, default=repr, ensure_ascii=False)
        return Request(asked, line, principal, known, kept, wanted)

    @abstractmethod
    def calls_public(self, request: Request) -> bool:
        """Return True if the public work makes calls, so that the ledger is looked into before."""

    @abstractmethod
    def prepare(self, request: Request) -> Flow[Any]:
        """The public work. Nothing is charged yet."""

    def eligible(self, ready: Any) -> Find | None:
        """The function that finds the owners who pay for a request with tickets. Public: it has not looked so far."""
        return None

    def everybody(self) -> Numbers:
        """All owners of the store: a `Find` for releases in which each of them takes part. Private."""
        with self.store.reading() as view:
            return view.numbers

    def reopened(self, request: Request) -> Charge | None:
        """A charge that this very request has already, and that may be used; None for none."""
        return None

    @abstractmethod
    def work(self, charged: Charged) -> Flow[Any]:
        """The private work. It runs in `guarded`, and returns the release."""

    @abstractmethod
    def kept(self, charged: Charged, release: Any) -> tuple[str, str | None, int]:
        """For the receipt: the outcome, the answer as JSON text (None: not to be replayed), and the unused units."""

    def answer(self, charged: Charged, release: Any, receipt: Receipt) -> Flow[Any]:
        """The answer, once its receipt is recorded: the release, unless a kind of release makes more of it."""
        yield from ()
        return release

    @abstractmethod
    def replay(self, request: Request, known: Replayed) -> Flow[Any]:
        """An answer that was released before: post-processing."""

    def failed(self, charged: Charged, failure: Failed) -> bool:
        """The private work failed, which is public to its caller. Returns whether the charge is given up."""
        return True

    def unreleased(self, request: Request) -> Flow[tuple[Any, Receipt]] | None:
        """The public answer to a request for which nothing is left, if the deployer asked for it."""
        return None


def transact(release: Release, values: Any) -> Flow[tuple[Any, Receipt]]:
    """One release, from the request to its answer and receipt."""
    request = checked(release, values)
    try:
        (charged,) = yield from charge(release, [request])
    except PrivacyBudgetExceeded:
        unreleased = release.unreleased(request)
        if unreleased is None:
            raise
    else:
        return (yield from settle(release, charged))
    return (yield from unreleased)


def checked(release: Release, values: Any) -> Request:
    """Step 1, which blocks if it solves a plan or reads a store's file."""
    shut.check_open()
    boundary.check_surroundings()
    release.store.refresh()  # a file that cannot be followed is known before anything is charged
    began = time.perf_counter()  # after the store: how long that is read depends on what it holds
    request = release.check(values)
    if (watching := observer()) is not None:
        watching.took("check", time.perf_counter() - began)
    return request


def charge(release: Release, requests: Sequence[Request], at_once: int | None = None) -> Flow[list[Charged]]:
    """Steps 2 to 4 for requests of one line and principal: all are charged, or none."""
    line = requests[0].line
    known: list[Replayed | None] = [None] * len(requests)
    if release.calls_public(requests[0]):
        known = line.ahead([request.id for request in requests], requests[0].principal)
    fresh: list[Flow[Any]] = []
    for request, answer in zip(requests, known, strict=True):
        if answer is None:
            fresh.append(release.prepare(request))
    ready: list[Any] = []
    if len(fresh) == 1:
        ready.append((yield from fresh[0]))
    elif fresh:
        ready.extend((yield together(fresh, at_once)))
    for place, answer in enumerate(known):
        if answer is not None:
            ready.insert(place, None)
    entries: Entries = list(filter(None, known))
    if fresh:  # else there is nothing to charge
        entries = yield from _charged(release, requests, ready)
    if (watching := observer()) is not None:
        _tell(watching, release, line, entries)
    return list(map(Charged, requests, ready, entries))


def _tell(watching: Observer, release: Release, line: BudgetLine, entries: Entries) -> None:
    """Tell the server. Equal requests share a charge, which pays for the first of them."""
    charges = len({id(entry) for entry in entries if isinstance(entry, Charge)})
    watching.charged(release.budget.name, line.name, charges, len(entries) - charges)


def _charged(release: Release, requests: Sequence[Request], ready: Sequence[Any]) -> Flow[Entries]:
    """Step 4."""
    line = requests[0].line
    principal = requests[0].principal
    units = release.units
    if len(requests) == 1 and (open_charge := release.reopened(requests[0])) is not None:
        return [open_charge]
    queries = list(map(attrgetter("id"), requests))
    pay = partial(line.charging, IN_TRANSACTION, queries, principal)

    def by_owners(find: Sequence[Find | None]) -> Flow[Entries]:
        """Find each query's eligible owners, and charge them. Private."""
        owners = yield lambda: [each and line.ask(release.store, each()) for each in find]
        return (yield from pay(owners=owners, units=units))

    if line.tickets is not None:
        finds = [None if each is None else release.eligible(each) for each in ready]
        found = yield from guarded(by_owners(finds), (DPICLError,))
        if isinstance(found, Failed):
            raise found.error(lambda: LedgerError("the owners of a query could not be charged: nothing was released"))
        return found
    while True:
        try:
            return (yield from pay(units=units))
        except QuotaExceeded:  # it counts answers: fewer units would not help
            raise
        except PrivacyBudgetExceeded:
            if units <= 1 or not (left := line.remaining(principal)):
                raise
        units = min(units, left)


def settle(release: Release, charged: Charged) -> Flow[tuple[Any, Receipt]]:
    """Steps 5 and 6: the answer and its receipt. What the ledger had is replayed."""
    request = charged.request
    entry = charged.entry
    if isinstance(entry, Replayed):
        return (yield from release.replay(request, entry)), entry.receipt
    found = yield from guarded(release.work(charged), release.shown)
    if isinstance(found, Failed):
        if release.failed(charged, found):
            give_up(charged)
        raise found.error()
    outcome, answer, unused = release.kept(charged, found)
    # No cancellation comes between the work and its record.
    began = time.perf_counter()
    receipt = request.line.record(
        entry,
        outcome,
        answer,
        unused=unused,
        text=request.text,
        principal=request.principal,
    )
    watching = observer()
    if watching is not None and request.line.tickets is None:  # else every owner who paid may get tickets back
        watching.took("receipt", time.perf_counter() - began)
    return (yield from release.answer(charged, found, receipt)), receipt


def give_up(charged: Charged) -> None:
    """There will be no answer: whoever waits for the same query may go on. The charge stands."""
    if isinstance(charged.entry, Charge):
        with contextlib.suppress(LedgerError):
            charged.request.line.give_up(charged.entry)
