"""One line of a frozen plan, with its counters: charge, replay, record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, cast

from langchain_dpicl.budget.claims import Account, Charge, ChargeRequest, ChargeRule, Claim, Pending, utc_now
from langchain_dpicl.budget.ledger import Ledger
from langchain_dpicl.budget.owner_index import EligibleOwners
from langchain_dpicl.budget.policy import Policy, SoftLimit
from langchain_dpicl.budget.receipt import Receipt, Replayed, read_receipt, release_id
from langchain_dpicl.budget.renewal import StoredPlan, assumption
from langchain_dpicl.budget.replay import Waiting, query_id
from langchain_dpicl.calls.flow import Flow, pause
from langchain_dpicl.errors import InvalidParameter, PrivacyBudgetExceeded, UnsafeConfigurationError
from langchain_dpicl.privacy import PlanLine, PrivacyPlan, checks
from langchain_dpicl.privacy.accountant import MAX_COUNT
from langchain_dpicl.store.base import Numbers, PrivateStore

RELEASED = "released"
IN_TRANSACTION: Final = object()
"""What `BudgetLine.charging` asks for. `release.transaction` alone has a use for it."""

ZERO_SHOT = "zero-shot, not a release: too few releases are left"


class BudgetLine:
    """One line of a frozen plan, with its counter.

    For each release: `charging`, then exactly one of `record` (it was answered, or nothing usable came of it) and
    `give_up` (it failed). From the charge on nothing is refunded; a process that dies in between loses the charge.

    A line whose mechanism is "tokens" counts tokens: an answer charges the most it may have (``units``) before its
    first token, and `record` gives back those that were never sampled (``unused``). That is no refund: they gave
    nothing away.
    """

    has_tickets = False
    """Whether owners pay, each for its queries (`tickets.TicketLine`)."""

    def __init__(
        self,
        budget_name: str,
        ledger: Ledger,
        policy: Policy,
        stored: StoredPlan,
        name: str,
        plan_line: PlanLine,
        plan: PrivacyPlan | None = None,
    ) -> None:
        self.name = name
        self.plan = plan
        """None in a filtered budget."""
        self.plan_id = stored.id
        self.plan_line = plan_line
        self.mechanism = plan_line.mechanism
        self.rate = plan_line.rate
        self.parameter = plan_line.parameter
        self.count = plan_line.count
        self.options: Mapping[str, float] = plan_line.options
        self._budget_name = budget_name  # not the budget: it holds its lines, and would outlive its last user
        self._ledger = ledger
        self._digest = stored.digest
        self._policy = policy
        self._words = plan_line.describe()
        self._key: bytes | None = None

    # -- queries ------------------------------------------------------------------------------------------------------

    def query_id(self, request: Mapping[str, object], variant: str = "", principal: str | None = None) -> str | None:
        """The keyed hash by which an equal request on this line is known again, by every worker of the ledger.

        Equal means equal in value and type, everywhere in the request. ``variant`` names everything else that decides
        the answer (the form of the release). With ``replay="principal"`` the ``principal`` decides too
        (`InvalidParameter` if it is not given): another caller's equal request has another hash, and is another
        question in every respect. None for a request that cannot be serialised: it is charged and never replayed.
        """
        if self._key is None:
            self._key = self._ledger.key("query_key")
        whose = ("principal", self.caller(principal)) if self._policy.replay == "principal" else ()
        return query_id(self._key, (*self._where(), *whose), request, variant)

    def caller(self, principal: str | None = None) -> str:
        """The principal who sees the answers to a principal's requests; "" if callers share what they see."""
        return self._policy.caller(principal)

    def replayed(self, queries: Sequence[str | None], principal: str | None = None) -> list[Replayed | None]:
        """The answers of the ledger to these queries, now. Charges nothing and waits for nobody."""
        account = self._account(principal)
        named = [query for query in dict.fromkeys(queries) if query is not None]
        known = self._ledger.claims(account, named) if named and self._policy.replay else {}
        found = (None if query is None else known.get(query) for query in queries)
        return [None if claim is None or claim.answer is None else _replayed(claim) for claim in found]

    def ahead(self, queries: Sequence[str | None], principal: str | None = None) -> list[Replayed | None]:
        """`replayed`, before public calls are made for the others: `PrivacyBudgetExceeded` if fewer are left now."""
        known = self.replayed(queries, principal)
        fresh = [query for query, answer in zip(queries, known, strict=True) if answer is None]
        if fresh:
            self.check(len(set(fresh) - {None}) + fresh.count(None), principal)
        return known

    def _account(self, principal: str | None) -> Account:
        return Account(self.plan_id, self.name, self._policy.principal(principal))

    def _where(self) -> tuple[str, ...]:
        return self._digest, self.name

    # -- charges ------------------------------------------------------------------------------------------------------

    def ask(self, store: PrivateStore, owners: Numbers) -> EligibleOwners:
        """Look up a query's eligible owners for its charge, if owners pay with tickets. Private."""
        raise InvalidParameter("owners", len(owners), "asked for on a budget with tickets=True alone")

    def charging(
        self,
        transaction: object,
        count: int = 1,
        principal: str | None = None,
        queries: Sequence[str | None] | None = None,
        *,
        texts: Sequence[str] | None = None,
        units: int = 1,
        owners: Sequence[EligibleOwners | None] | None = None,
    ) -> Flow[list[Charge | Replayed]]:
        """Charge ``count`` releases durably, all or none. Raises `PrivacyBudgetExceeded`, which costs nothing.

        Each is one row of the ledger and one `Charge`. Cancelled while it waits for others, it charges nothing.

        Parameters
        ----------
        transaction
            `IN_TRANSACTION`, which only the order of a release has (`release.transaction`). Anything else raises
            `UnsafeConfigurationError`: a charge outside of that order pays for nothing, or too late.
        count
            How many; with ``queries`` it may be left out.
        principal
            The authenticated caller. Needed if the budget's scope is ``per_principal`` (`InvalidParameter` otherwise,
            which costs nothing); not used and not kept if all callers share one counter.
        queries
            `query_id` of each request, or None for one that is not replayed. An answered query comes back as
            `Replayed` and costs nothing; equal ones share one charge (the same object); all that are new are charged
            together. The flow waits for a query that another caller has charged and not answered yet, holding no
            transaction, no thread of an event loop and nothing charged, until it is answered or given up, at most the
            budget's ``replay_patience``; then it is charged anew.
        texts
            The queries' texts, kept in the receipts if the budget was made with ``keep_queries=True``.
        units
            How many tokens each release may have, on a line that counts tokens; its number is the last of its units.
            Elsewhere 1 (`InvalidParameter` otherwise, which costs nothing).
        owners
            `ask` for each query, if owners pay with tickets; None for one that is known to be answered already.
        """
        if transaction is not IN_TRANSACTION:
            raise UnsafeConfigurationError(
                "a release is charged within its transaction alone (langchain_dpicl.release.transaction): nothing was "
                "charged"
            )
        return self._charging(count, principal, queries, texts, units, owners)

    def _charging(
        self,
        count: int,
        principal: str | None,
        queries: Sequence[str | None] | None,
        texts: Sequence[str] | None,
        units: int,
        owners: Sequence[EligibleOwners | None] | None,
    ) -> Flow[list[Charge | Replayed]]:
        number = checks.whole("count", count)
        if checks.whole("units", units, at_most=MAX_COUNT) > 1 and not self._counts_tokens:
            raise InvalidParameter("units", units, "1: this line counts releases, not tokens")
        wanted: list[str | None] = [None] * number if queries is None else list(queries)
        if queries is not None and count not in (1, len(wanted)):
            raise InvalidParameter("queries", f"{len(wanted)} entries", f"one for each of {count} releases")
        if texts is not None and len(texts) != len(wanted):
            raise InvalidParameter("texts", f"{len(texts)} entries", f"one for each of {len(wanted)} releases")
        account, replay = self._account(principal), bool(self._policy.replay)
        rule = self._rule(owners, len(wanted))
        request = ChargeRequest(account, wanted, units, replay, self._counts_others, rule)
        waiting = Waiting(self._policy.replay_patience)
        while isinstance(found := (yield partial(self._charge, request, waiting.overdue, texts)), Pending):
            pending = waiting.still(found.claims)
            while pending:
                yield pause(waiting.pause())
                pending = waiting.still((yield partial(self._ledger.claims, account, list(pending))))
        entries: list[Charge | Replayed] = found
        return entries

    def _rule(self, owners: Sequence[EligibleOwners | None] | None, count: int) -> ChargeRule | None:
        """What a charge of so many queries costs beside its counter."""
        if owners is not None:
            raise self._unfit("has no tickets")
        return None

    def _unfit(self, words: str) -> UnsafeConfigurationError:
        return UnsafeConfigurationError(
            f"a charge on the budget {self._budget_name!r} {words}: a chain on a budget with tickets=True needs a "
            "PoissonExampleSelector with a threshold (threshold=-1 makes every owner eligible); nothing was charged"
        )

    def _charge(
        self, request: ChargeRequest, overdue: Mapping[str, int], texts: Sequence[str] | None
    ) -> list[Charge | Replayed] | Pending:
        """One attempt. `PrivacyBudgetExceeded` if fewer are left. Equal queries get the same object."""
        found = self._ledger.charge(request, overdue)
        if found is None:
            raise self._exceeded(request.account, request.units * self._needed(request))
        if isinstance(found, Pending):
            return found
        keeps = texts is not None and self._policy.keep_queries
        same: dict[int, Charge] = {}
        entries: list[Charge | Replayed] = []
        for place, entry in enumerate(found):
            if isinstance(entry, Claim):
                entries.append(_replayed(entry))
            else:
                text = texts[place] if keeps and texts is not None else None
                entries.append(same.setdefault(entry.number, entry if text is None else replace(entry, text=text)))
        self._warn(list(same.values()))
        return entries

    reopens = True
    """Whether `reopen` finds charges."""

    def reopen(self, query: str | None, principal: str | None = None, *, text: str | None = None) -> Charge | None:
        """The charge for this query that was neither answered nor given up; None if there is none. Charges nothing.

        For a caller who alone can have made that charge, knows that its process is gone, and has kept which of its
        units were used: it may use the others, and then `record` or `give_up` the charge. Its receipt counts what is
        spent now. None on a budget with ``replay=False``, which keeps no queries, on a filtered one, which does not
        say what a charge had spent, and if owners pay with tickets, since nobody remembers who did. ``text`` is the
        query's, as in `charging`.
        """
        if query is None or not self.reopens or not self._policy.replay:
            return None
        charge = self._ledger.open_charge(self._account(principal), query, self._counts_others)
        return replace(charge, text=text) if charge is not None and self._policy.keep_queries else charge

    @property
    def _counts_tokens(self) -> bool:
        """Whether a release counts for as many units as it has tokens."""
        return self.mechanism == "tokens"

    @property
    def _counts_others(self) -> bool:
        """Whether a receipt needs to know what other lines have spent."""
        return self.plan is not None and len(self.plan.lines) > 1

    def _needed(self, request: ChargeRequest) -> int:
        """How many of a request would be charged, for a message."""
        keys = dict.fromkeys(request.keys)
        known = self._ledger.claims(request.account, [key for key in keys if isinstance(key, str)])
        return len(keys) - sum(claim.answer is not None for claim in known.values())

    def _exceeded(self, account: Account, needed: int) -> PrivacyBudgetExceeded:
        left = self.count - self._ledger.spent(self.plan_id, account.principal)[self.name]
        where = f" on the line {self.name!r}" if self._counts_others else ""
        where += " for this principal" if account.principal else ""
        if left >= needed:
            where += ", which other processes hold, or have lost when they were killed"
        return PrivacyBudgetExceeded(
            f"the budget {self._budget_name!r} has {left} of {self.count} {self._unit} left{where}, and {needed} are "
            "needed: nothing was released and nothing charged"
        )

    def _warn(self, charges: Sequence[Charge]) -> None:
        if charges and self._policy.soft_limit is not None:
            spent = max(charge.spent for charge in charges)
            facts = SoftLimit(
                budget=self._budget_name,
                line=self.name,
                principal=charges[0].principal or None,
                spent=spent,
                count=self.count,
                remaining=self.count - spent,
            )
            self._policy.warn(facts, min(charge.spent - charge.units for charge in charges))

    # -- receipts -----------------------------------------------------------------------------------------------------

    def record(
        self, charge: Charge, outcome: str = "released", answer: str | None = None, *, unused: int = 0
    ) -> Receipt:
        """Write and return the receipt of a release; ``outcome`` says how it ended.

        Parameters
        ----------
        answer
            The public answer as JSON text, kept for replay byte for byte in the same transaction; without it an equal
            query is charged again.
        unused
            How many of the charge's tokens were never sampled, because the answer ended before. They are given back in
            the same transaction: both happen or neither, and a power failure before the next charge may undo both.
            Fewer than were charged (the token that ends an answer was sampled too), and only with the outcome
            "released" (`InvalidParameter`). A charge that was given up, or recorded before in other words, is given
            nothing back (`LedgerError`, nothing changes); the same record written twice counts once. A filtered budget
            gives nothing back, and neither does a charge that was reopened, or recorded by another process than made
            it (a child of a fork): all of it counts.
        """
        if not isinstance(outcome, str) or not outcome or len(outcome) > 255:
            raise InvalidParameter("outcome", outcome, "a string of 1 to 255 characters")
        unused = checks.whole("unused", unused, at_least=0)
        if unused and (outcome != RELEASED or unused > self._may_return(charge)):
            most = f"at most {self._may_return(charge)} here, and 0 unless the outcome is {RELEASED!r}"
            raise InvalidParameter("unused", unused, f"tokens that were never sampled: {most}")
        unused = 0 if charge.all_counts else unused
        receipt = self._receipt(charge, outcome, unused)
        self._ledger.record(charge, json.dumps(receipt), outcome, answer if self._policy.replay else None, unused)
        return receipt

    def _may_return(self, charge: Charge) -> int:
        """The most that may be given back of a charge that is answered."""
        return charge.units - 1 if self._counts_tokens else 0

    def _receipt(self, charge: Charge, outcome: str, unused: int = 0) -> Receipt:
        spent = charge.spent - unused
        return {
            "id": release_id(self._budget_name, self.name, charge.principal, charge.counter_id, charge.number),
            "budget": self._budget_name,
            "plan": self._digest[:16],
            "line": self.name,
            "number": charge.number,
            "principal": charge.principal or None,
            "assumption": assumption(self._policy.scope),
            "mechanism": self._words,
            "epsilon_spent": self._epsilon_of(charge, spent),
            "epsilon": self._target[0],
            "delta": self._target[1],
            "remaining": self._left_after(charge, spent),
            "tokens": charge.units - unused if self._counts_tokens else None,
            "outcome": outcome,
            "replayed": False,
            "query": charge.query if charge.text is None else charge.text,
            "time": charge.time,
        }

    def unreleased_receipt(self, principal: str | None = None) -> Receipt:
        """The receipt of a public zero-shot answer when the releases are spent: no release, no number, no cost.

        Not kept in the ledger.
        """
        spent = self._ledger.spent(self.plan_id, who := self._policy.principal(principal))
        charge = Charge(self.plan_id, self.name, spent[self.name], utc_now(), spent, principal=who)
        left = None if self.has_tickets else self.remaining(principal)
        none = {"id": "", "number": 0, "tokens": None, "query": None, "remaining": left}
        return cast("Receipt", {**self._receipt(charge, ZERO_SHOT), **none})

    def give_up(self, charge: Charge) -> None:
        """There will be no answer to this charge, which stands: callers who wait for the same query may go on."""
        self._ledger.give_up(charge)

    def _epsilon_of(self, charge: Charge, spent: int) -> float:
        assert self.plan is not None
        return self.plan.spent(self.plan.at_most({**charge.others, self.name: spent}))

    def _left_after(self, charge: Charge, spent: int) -> int | None:
        return self.count - spent

    @property
    def _unit(self) -> str:
        return "tokens" if self._counts_tokens else "releases"

    @property
    def _target(self) -> tuple[float, float]:
        assert self.plan is not None
        return self.plan.epsilon, self.plan.delta

    def spent(self, principal: str | None = None) -> int:
        """Releases (tokens, on a line that counts them) charged on this line."""
        return self._ledger.spent(self.plan_id, self._policy.principal(principal))[self.name]

    def check(self, needed: int, principal: str | None = None) -> None:
        """`PrivacyBudgetExceeded` if fewer are left now. Charges and reserves nothing."""
        if self.remaining(principal) < needed:
            raise self._exceeded(self._account(principal), needed)

    def remaining(self, principal: str | None = None) -> int:
        """Releases (tokens) left on this line."""
        return self.count - self.spent(principal)


def _replayed(claim: Claim) -> Replayed:
    assert claim.answer is not None
    return Replayed(claim.answer, read_receipt(claim.receipt or "{}", replayed=True))
