"""One line of a frozen budget, with its counters: charge, replay, record."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, Final, cast

from langchain_dpicl.budget import terms
from langchain_dpicl.budget.ledger import ChargeRequest, Ledger, Quota
from langchain_dpicl.budget.schema import UNLIMITED, Account, Charge, Claim, StoredPlan, utc_now
from langchain_dpicl.budget.terms import Policy, Receipt, Replayed, SoftLimit
from langchain_dpicl.budget.tickets import EligibleOwners, TicketLine, TicketPayment
from langchain_dpicl.calls.flow import Flow, pause
from langchain_dpicl.calls.observing import observer
from langchain_dpicl.errors import InvalidParameter, PrivacyBudgetExceeded, UnsafeConfigurationError
from langchain_dpicl.privacy import PlanLine, PrivacyPlan, checks
from langchain_dpicl.privacy.profile import MAX_COUNT
from langchain_dpicl.private import Accounting
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import Numbers

RELEASED = "released"
ZERO_SHOT = "zero-shot, not a release: too few releases are left"
IN_TRANSACTION: Final = object()
"""The permission that `BudgetLine.charging` needs. Only `release.transaction` may use it."""

_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.25

logger = logging.getLogger("langchain_dpicl.budget")


class BudgetLine(Accounting):
    """One line of a frozen plan, with its counter.

    For each release: `charging`, then exactly one of `record` (it was answered, or nothing usable came of it) and
    `give_up` (it failed). Nothing is refunded after the charge; a process that dies in between loses the charge.

    A line whose mechanism is "tokens" counts tokens: an answer charges the most it may have (``units``) before its
    first token, and `record` gives back those that were never sampled (``unused``), which gave nothing away.

    Parameters
    ----------
    tickets
        The tickets of this line if owners pay. ``count`` is then what every owner has, and the line has no end.
    """

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        stored: StoredPlan,
        name: str,
        plan_line: PlanLine,
        plan: PrivacyPlan,
        tickets: TicketLine | None = None,
    ) -> None:
        self.name = name
        self.plan = plan
        self.plan_id = stored.id
        self.plan_line = plan_line
        self.mechanism = plan_line.mechanism
        self.rate = plan_line.rate
        self.parameter = plan_line.parameter
        self.count = plan_line.count
        self.options = plan_line.options
        self.tickets = tickets
        self._ledger = ledger
        self._policy = policy
        self._stored = stored
        self._words = plan_line.describe()
        self._unit = plan_line.family.unit
        self._has_others = len(plan.lines) > 1
        self._assumption = terms.assumption(policy.scope)
        self._account_of_all: Account | None = None
        if policy.scope == "shared":
            self._account_of_all = Account(stored.id, name)
        self._key: bytes | None = None
        self._known_step = (1, 0, 0.0)  # from one count to another; the epsilon there

    # -- queries -------------------------------------------------------------------------------------------------------

    def query_id(
        self,
        request: Mapping[str, object],
        variant: str = "",
        principal: str | None = None,
    ) -> str | None:
        """The keyed hash by which every worker of the ledger knows an equal request on this line again.

        Equal means equal in value and type, everywhere in the request. ``variant`` names everything else that decides
        the answer (the form of the release). With ``replay="principal"`` the hash depends on the ``principal`` too
        (`InvalidParameter` if it is not given). None for a request that cannot be serialised: it is never replayed.
        """
        if self._key is None:
            self._key = self._ledger.key("query_key")
        whose = ("principal", self.caller(principal)) if self._policy.replay == "principal" else ()
        return query_id(self._key, (self._stored.digest, self.name, *whose), request, variant)

    def caller(self, principal: str | None = None) -> str:
        """The principal who sees the answers to a principal's requests; "" if callers share what they see."""
        if self._account_of_all is not None and self._policy.replay != "principal":
            return ""
        return self._policy.caller(principal)

    def replayed(
        self,
        queries: Sequence[str | None],
        principal: str | None = None,
    ) -> list[Replayed | None]:
        """The answers of the ledger to these queries, now. Charges nothing and waits for nobody."""
        return self._look(queries, principal)[0]

    def ahead(
        self,
        queries: Sequence[str | None],
        principal: str | None = None,
    ) -> list[Replayed | None]:
        """`replayed`, before public calls are made for the others: `PrivacyBudgetExceeded` if fewer are left now."""
        known, spent = self._look(queries, principal)
        fresh = [query for query, answer in zip(queries, known, strict=True) if answer is None]
        needed = len(set(fresh) - {None}) + fresh.count(None)
        if needed and self.tickets is None and self.count - spent < needed:
            self.check(needed, principal)
        return known

    def _look(
        self,
        queries: Sequence[str | None],
        principal: str | None,
    ) -> tuple[list[Replayed | None], int]:
        """The ledger's answers, and the units spent on the line, by one reading."""
        named = [query for query in dict.fromkeys(queries) if query is not None and self._policy.replay]
        claims, spent = self._ledger.claims(self._account(principal), named)
        answered = {query: claim for query, claim in claims.items() if claim.answer is not None}
        return [_replayed(answered[query]) if query in answered else None for query in queries], spent

    def _account(self, principal: str | None) -> Account:
        if self._account_of_all is not None:
            return self._account_of_all
        return Account(self.plan_id, self.name, self._policy.principal(principal))

    # -- charges -------------------------------------------------------------------------------------------------------

    def ask(self, store: ExemplarStore, owners: Numbers) -> EligibleOwners:
        """Look up a query's eligible owners for its charge, if owners pay with tickets. Private."""
        assert self.tickets is not None
        return self.tickets.marks.find(store, owners)

    def charging(
        self,
        transaction: object,
        queries: Sequence[str | None],
        principal: str | None = None,
        *,
        units: int = 1,
        owners: Sequence[EligibleOwners | None] | None = None,
    ) -> Flow[list[Charge | Replayed]]:
        """Charge a release for each query durably, all or none. Every error costs nothing.

        Each release is one row of the ledger and one `Charge`. Raises `PrivacyBudgetExceeded` if fewer are left, of
        all or (`QuotaExceeded`) for this caller. An
        answered query comes back as `Replayed` and costs nothing; equal queries share one charge (the same object).
        The flow waits for queries that another caller has charged and not answered yet, at most the budget's
        ``replay_patience`` by this process's monotonic clock; then it charges them anew. While it waits it holds no
        transaction and no thread of an event loop, and has charged nothing, also if it is cancelled.

        Parameters
        ----------
        transaction
            `IN_TRANSACTION`, which only the order of a release has (`release.transaction`). Anything else raises
            `UnsafeConfigurationError`: a charge outside of that order pays for nothing, or too late.
        queries
            `query_id` of each request, or None for one that is not replayed.
        principal
            The authenticated caller. `InvalidParameter` if it is None and the budget's scope is ``per_principal``;
            neither used nor kept if all callers share one counter.
        units
            The most tokens of each release, on a line that counts tokens; its number is the last of its units.
            Elsewhere 1 (`InvalidParameter` otherwise).
        owners
            `ask` for each query, if owners pay with tickets; None for one that is known to be answered already.
        """
        if transaction is not IN_TRANSACTION:
            raise UnsafeConfigurationError(
                "a release is charged within its transaction alone (langchain_dpicl.release.transaction): nothing was "
                "charged"
            )
        units = checks.whole("units", units, at_most=MAX_COUNT)
        if units > 1 and self._unit != "tokens":
            raise InvalidParameter("units", units, "1: this line counts releases, not tokens")
        if (owners is None) != (self.tickets is None) or (owners is not None and len(owners) != len(queries)):
            raise UnsafeConfigurationError(
                f"a charge on the budget {self._stored.name!r} names the eligible owners of each query if and only if "
                "owners pay with tickets: a chain on a budget with tickets=True needs a PoissonExampleSelector with a "
                "threshold (threshold=-1 makes every owner eligible); nothing was charged"
            )
        account = self._account(principal)
        quota = None
        if self._policy.quota is not None:
            quota = self._quota(principal)
        request = ChargeRequest(
            account,
            queries,
            units,
            replay=bool(self._policy.replay),
            others=self._has_others,
            tickets=None if self.tickets is None else TicketPayment(self.tickets, owners or ()),
            quota=quota,
        )
        found = yield partial(self._claim, request)
        if isinstance(found, dict):
            found = yield from self._wait(request, found)
        return cast("list[Charge | Replayed]", found)

    def _quota(self, principal: str | None) -> Quota | None:
        most = self._policy.most(principal)
        if most is None:
            return None
        return Quota(self._stored.name, str(principal), most)

    def _wait(self, request: ChargeRequest, claims: Mapping[str, Claim]) -> Flow[list[Charge | Replayed]]:
        """Wait for the claims of other callers, and charge what nobody has answered by then."""
        patience = self._policy.replay_patience
        seconds = _FIRST_PAUSE
        seen: dict[tuple[str, int], float] = {}  # each claim, with the time when it was first seen
        while True:
            now = time.monotonic()
            waited = {query: now - seen.setdefault((query, claim.number), now) for query, claim in claims.items()}
            wanted = [query for query, claim in claims.items() if claim.pending and waited[query] < patience]
            if wanted:
                yield pause(seconds)
                seconds = min(1.5 * seconds, _LONGEST_PAUSE)
                claims, _ = yield partial(self._ledger.claims, request.account, wanted)
                continue
            overdue = {query: number for (query, number), since in seen.items() if now - since >= patience}
            found = yield partial(self._claim, replace(request, overdue=overdue))
            if not isinstance(found, dict):
                return cast("list[Charge | Replayed]", found)
            claims = found

    def _claim(self, request: ChargeRequest) -> list[Charge | Replayed] | dict[str, Claim]:
        """Try once. `PrivacyBudgetExceeded` if fewer are left."""
        began = time.perf_counter()
        found = self._ledger.charge(request)
        if isinstance(found, dict):  # another caller's release is waited for, which is private work
            return found
        if (watching := observer()) is not None:
            watching.took("charge", time.perf_counter() - began)
        if found is None:
            known, _ = self._ledger.claims(request.account, request.names)
            needed = len(set(request.keys)) - sum(claim.answer is not None for claim in known.values())
            raise self._exceeded(request.account.principal, request.units * needed)
        if self._policy.soft_limit is not None:
            self._warn([entry for entry in found if isinstance(entry, Charge)])
        entries: list[Charge | Replayed] = []
        for entry in found:
            entries.append(_replayed(entry) if isinstance(entry, Claim) else entry)
        return entries

    def reopen(self, query: str | None, principal: str | None = None) -> Charge | None:
        """The charge for this query that was neither answered nor given up; None if there is none. Charges nothing.

        For a caller who alone can have made that charge, knows that its process is gone, and has kept which of its
        units were used: it may use the others, and then `record` or `give_up` the charge. Its receipt counts what is
        spent now. None on a budget with ``replay=False``, which keeps no queries, and if owners pay with tickets, since
        nothing keeps which owners paid.
        """
        if query is None or self.tickets is not None or not self._policy.replay:
            return None
        return self._ledger.reopened(self._account(principal), query, self._has_others)

    def steps(self, charge: Charge) -> list[str]:
        """The contents that `keep_step` has kept of this charge, in their order."""
        return self._ledger.steps(charge)

    def keep_step(self, charge: Charge, step: int, content: str) -> str:
        """Keep the content that a step of this charge releases, durably, and return the content that stands.

        Call it before anybody uses the content. Of several processes that make the same step, the first decides: the
        others' content is not released.
        """
        return self._ledger.keep_step(charge, step, content)

    def _exceeded(self, principal: str, needed: int) -> PrivacyBudgetExceeded:
        left = self.count - self._ledger.spent(self.plan_id, principal)[self.name]
        details = [
            (self._has_others, f" on the line {self.name!r}"),
            (principal, " for this principal"),
        ]
        room = "".join(words for holds, words in details if holds)
        return PrivacyBudgetExceeded(
            f"the budget {self._stored.name!r} has {left} of {self.count} {self._unit} left{room}, and {needed} are "
            "needed: nothing was released and nothing charged"
        )

    def _warn(self, charges: Sequence[Charge]) -> None:
        """Log a warning and call the callback at the charge that crosses the soft limit.

        One charge crosses it, whatever the number of workers, so this happens once per counter; on a line of tokens it
        happens again if returned tokens brought the counter back below. A callback that fails is logged: the charge
        stands and must be used.
        """
        limit = self._policy.soft_limit
        tell = self._policy.on_soft_limit
        if limit is None or not charges:
            return
        before = min(charge.spent - charge.units for charge in charges)
        spent = max(charge.spent for charge in charges)
        if not before < max(1, math.ceil(limit * self.count)) <= spent:
            return
        facts = SoftLimit(
            budget=self._stored.name,
            line=self.name,
            principal=charges[0].principal or None,
            spent=spent,
            count=self.count,
            remaining=self.count - spent,
        )
        words = "has spent %(spent)d of %(count)d releases of the line %(line)r: %(remaining)d are left"
        logger.warning(f"the budget %(budget)r {words}", facts)
        if tell is not None:
            try:
                tell(facts)
            except Exception:
                logger.exception("on_soft_limit failed; the charge stands")

    # -- receipts ------------------------------------------------------------------------------------------------------

    def record(
        self,
        charge: Charge,
        outcome: str = RELEASED,
        answer: str | None = None,
        *,
        unused: int = 0,
        text: str = "",
        principal: str | None = None,
    ) -> Receipt:
        """Write and return the receipt of a release; ``outcome`` says how it ended.

        Parameters
        ----------
        answer
            The public answer as JSON text, kept for replay byte for byte in the same transaction; without it an equal
            query is charged again.
        unused
            The charge's tokens that were never sampled, because the answer ended before. They are given back in the
            same transaction: both happen or neither, and a power failure before the next charge may undo both.
            Fewer than were charged (the token that ends an answer was sampled too), and only with the outcome
            "released" (`InvalidParameter`). A charge that was given up, or recorded before in other words, is given
            nothing back (`LedgerError`, nothing changes); the same record written twice counts once. A charge that was
            reopened, or recorded by another process than made it (a child of a fork), gives nothing back: all of it
            counts. Tickets come back to all owners who paid (`tickets`, "Tokens").
        text
            The query's text, kept in the receipt if the budget was made with ``keep_queries=True``.
        principal
            The caller, kept beside the receipt if the budget was made with ``record_principals=True``.
        """
        most = charge.units - 1 if self._unit == "tokens" else 0
        unused = checks.whole("unused", unused, at_least=0)
        if unused and (outcome != RELEASED or unused > most):
            raise InvalidParameter(
                "unused",
                unused,
                f"tokens that were never sampled: at most {most} here, and 0 unless the outcome is {RELEASED!r}",
            )
        if unused and charge.all_counts:
            unused = 0
        receipt = self._receipt(charge, outcome, unused)
        if text and self._policy.keep_queries:
            receipt["query"] = text
        kept: dict[str, Any] = {**receipt}
        if self._policy.record_principals and principal is not None:
            kept[terms.RECORDED] = principal
        self._ledger.record(
            charge,
            json.dumps(kept),
            outcome,
            answer if self._policy.replay else None,
            unused,
            self.tickets,
        )
        return receipt

    def _receipt(self, charge: Charge, outcome: str, unused: int = 0) -> Receipt:
        spent = charge.spent - unused
        return {
            "id": release_id(self._stored.name, self.name, charge.principal, charge.counter_id, charge.number),
            "budget": self._stored.name,
            "plan": self._stored.digest[:16],
            "line": self.name,
            "number": charge.number,
            "principal": charge.principal or None,
            "assumption": self._assumption,
            "mechanism": self._words,
            "epsilon_spent": self._epsilon_spent(charge, spent),
            "epsilon": self.plan.epsilon,
            "delta": self.plan.delta,
            "remaining": self.count - spent if self.tickets is None else None,
            "tokens": charge.units - unused if self._unit == "tokens" else None,
            "outcome": outcome,
            "replayed": False,
            "query": charge.query,
            "time": charge.time,
        }

    def _epsilon_spent(self, charge: Charge, spent: int) -> float:
        """The loss of the whole plan so far. Of a plan with one line, one step of its ladder serves many charges."""
        if self._has_others:
            return self.plan.spent(self.plan.at_most({**charge.others, self.name: spent}))
        spent = min(spent, self.count)
        low, high, epsilon = self._known_step
        if not low <= spent <= high:
            epsilon = self.plan.spent({self.name: spent})
            self._known_step = spent, self.plan.step(self.name, spent), epsilon
        return epsilon

    def unreleased_receipt(self, principal: str | None = None) -> Receipt:
        """The receipt of a public zero-shot answer when the releases are spent: no release, no number, no cost.

        Not kept in the ledger.
        """
        counter = self._policy.principal(principal)
        spent = self._ledger.spent(self.plan_id, counter)
        charge = Charge(self.plan_id, self.name, spent[self.name], utc_now(), spent, principal=counter)
        return {
            **self._receipt(charge, ZERO_SHOT),
            "id": "",
            "number": 0,
            "tokens": None,
            "query": None,
            "remaining": self.remaining(principal) if self.tickets is None else None,
        }

    def give_up(self, charge: Charge) -> None:
        """Say that this charge gets no answer. The charge stands; callers who wait for the same query go on."""
        self._ledger.give_up(charge)

    # -- spent and left ------------------------------------------------------------------------------------------------

    def spent(self, principal: str | None = None) -> int:
        """Releases (tokens, on a line that counts them) charged on this line."""
        return self._ledger.spent(self.plan_id, self._policy.principal(principal))[self.name]

    def check(self, needed: int, principal: str | None = None) -> None:
        """`PrivacyBudgetExceeded` if fewer are left now. Charges and reserves nothing."""
        if self.tickets is None and self.remaining(principal) < needed:
            raise self._exceeded(self._policy.principal(principal), needed)

    def remaining(self, principal: str | None = None) -> int:
        """Releases (tokens) left on this line; more than can ever be asked if owners pay with tickets."""
        return (self.count if self.tickets is None else UNLIMITED) - self.spent(principal)


def _replayed(claim: Claim) -> Replayed:
    assert claim.answer is not None
    return Replayed(claim.answer, terms.read_receipt(claim.receipt or "{}", replayed=True))


def release_id(budget: str, line: str, principal: str, counter_id: int, number: int) -> str:
    """The id of a release. It shows a principal's counter instead of its name."""
    return f"{budget}:{line}:{counter_id}.{number}" if principal else f"{budget}:{line}:{number}"


def parse_release_id(text: str) -> tuple[str, str, int | None, int] | None:
    """Budget, line, counter (None: the shared one) and number, from an id that `release_id` made; else None."""
    found = re.fullmatch(r"(.*):([^:]*):(?:([0-9]{1,18})\.)?([0-9]{1,18})", str(text), re.DOTALL)
    if found is None:
        return None
    budget, line, counter, number = found.groups()
    return budget, line, None if counter is None else int(counter), int(number)


def query_id(
    key: bytes,
    where: tuple[str, ...],
    request: Mapping[str, object],
    variant: str,
) -> str | None:
    """The keyed hash by which an equal query is known again, as 64 hex digits.

    Two requests have the same hash if and only if they are equal in value AND type (1, "1", True and 1.0 differ), on
    the same plan, line and variant. The key is random, made once with the ledger, so a reader of receipts alone cannot
    test guesses. None for a request that cannot be serialised, which is then never replayed.
    """
    try:
        content = _place(where, variant) + _encode(dict(request))
    except (TypeError, RecursionError):
        return None
    return hmac.new(key, content, hashlib.sha256).hexdigest()


@functools.lru_cache(maxsize=256)
def _place(where: tuple[str, ...], variant: str) -> bytes:
    """The part of a query's content that requests of one form have in common."""
    return _encode(where) + _encode(variant)


def _entries(value: dict[Any, Any]) -> bytes:
    found: list[bytes] = []
    for key, item in value.items():
        found.append(_encode(key) + _encode(item))
    return b"".join(sorted(found))


_PLAIN: dict[type, tuple[bytes, Callable[[Any], bytes]]] = {
    type(None): (b"n", lambda _: b""),
    bool: (b"b", lambda value: b"1" if value else b"0"),
    int: (b"i", lambda value: b"%x" % value),
    float: (b"f", lambda value: value.hex().encode()),
    str: (b"s", methodcaller("encode", "utf-8", "surrogatepass")),
    bytes: (b"y", bytes),
    list: (b"l", lambda value: b"".join(map(_encode, value))),
    tuple: (b"t", lambda value: b"".join(map(_encode, value))),
    set: (b"e", lambda value: b"".join(sorted(map(_encode, value)))),
    frozenset: (b"z", lambda value: b"".join(sorted(map(_encode, value)))),
    dict: (b"d", _entries),
}
"""By exact type, subclasses excluded: a tag, and the content."""


def _encode(value: object) -> bytes:
    """A serialisation that no two different values share: a tag, the length, the content. Raises `TypeError`."""
    tag, content = _PLAIN.get(type(value), (b"m", _model))
    found = content(value)
    return tag + len(found).to_bytes(8, "big") + found


def _model(value: object) -> bytes:
    """LangChain's messages, documents and prompt values are pydantic models: their class and their fields."""
    kind = type(value)
    fields = None
    if isinstance(getattr(kind, "model_fields", None), dict):
        with contextlib.suppress(Exception):
            fields = value.model_dump()  # type: ignore[attr-defined]
    if type(fields) is not dict:
        raise TypeError("the value's content is not known for certain")
    return _encode(f"{kind.__module__}.{kind.__qualname__}") + _encode(fields)
