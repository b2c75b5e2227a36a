"""PrivacyBudget: epsilon and delta in, a counted number of releases out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from langchain_dpicl.budget.base import BaseBudget, Fingerprint, LineState, Preview
from langchain_dpicl.budget.filtered import FilteredBudget
from langchain_dpicl.budget.ledger import Where
from langchain_dpicl.budget.line import BudgetLine
from langchain_dpicl.budget.owner_index import OwnerIndex
from langchain_dpicl.budget.policy import OnExhausted, Policy, Replay, Scope, SoftLimit
from langchain_dpicl.budget.renewal import StoredPlan
from langchain_dpicl.budget.schedule import Releases, Schedule, declared, differences
from langchain_dpicl.budget.schema import UNLIMITED
from langchain_dpicl.budget.stored import StoredLedger
from langchain_dpicl.budget.ticket_report import TicketReport, line_tickets
from langchain_dpicl.budget.tickets import TicketLine
from langchain_dpicl.errors import DPICLError, InvalidParameter, PlanMismatch
from langchain_dpicl.privacy import PrivacyPlan, checks


class PrivacyBudget(BaseBudget):
    """A target (epsilon, delta) for ALL releases together, and the durable ledger that enforces it.

    Parameters
    ----------
    epsilon, delta
        The guarantee: everything that is ever released on this budget is (epsilon, delta)-differentially private with
        respect to adding or removing one owner.
    releases
        How many answers (for the mechanism "tokens": how many tokens) the budget is for. The noise is calibrated so
        that exactly this many fit. One number, or for several kinds of answers a mapping of line names (without ":") to
        numbers or `LineRequest`s.
    ledger
        A database URL. SQLite by default; share one ledger between workers.
    witness
        Where a second record is kept that tells when the ledger was lost or rolled back: a path or a database URL.
        Default: beside the ledger (``budget.db.witness``); it then cannot see that both were restored together. See
        `budget.witness`, and the chapter on backup.
    name
        The plan's name in the ledger.
    tickets
        Whether owners pay, each for itself. Then ``releases`` counts the queries that ONE OWNER may be eligible for,
        the number of queries has no end, and an owner without tickets is left out from then on, which nobody can see.
        Needs a selector with a ``threshold``. The guarantee is the same (`budget.tickets` has the theorem). Frozen with
        the plan.
    scope
        ``"shared"``: one counter for all callers, who may collude. ``"per_principal"``: one counter for each caller;
        the guarantee then holds for each caller's releases on their own, if callers do not collude. Frozen with the
        plan.
    replay, replay_patience
        Whether an equal query on the same line is answered from the ledger at no cost (post-processing of a released
        answer), and how many seconds it waits for a caller who is answering the same query just now. None of these
        choices costs an owner privacy; callers who share a counter see more or less of each other. ``True``: a
        caller whose question equals another's gets that caller's answer, with its number and the second of its charge;
        waits if the other is being answered just now; and once the budget is spent still gets it, while an unknown
        question is refused. ``"principal"``: an answer is replayed to the caller who asked for it (see `acting_for`;
        needed then), and for everybody else the question is a new one, in its cost, its time and its refusal.
        ``False``: nobody gets a replay, and every question is charged. With each of these, callers see how far the
        shared counter is: how many releases there were, and on a line of tokens how many were drawn, so how long an
        answer was. With ``scope="per_principal"`` callers share no counter and no answers, so ``True`` and
        ``"principal"`` are the same.
    keep_queries
        Keep the queries' texts in the receipts, instead of keyed hashes.
    on_exhausted
        The action of a chain when the releases are spent: ``"raise"`` `PrivacyBudgetExceeded`, or give the public
        ``"zero_shot"`` answer, marked as such.
    soft_limit, on_soft_limit
        A share of the releases (say 0.8): the charge that reaches it logs a warning and calls ``on_soft_limit``.

    The plan is completed and frozen at first use, when every line's sampling rate and mechanism are known; from then
    on the ledger refuses other parameters under this name (`PlanMismatch`). Every release is charged before the first
    member is called, and nothing is ever refunded. (A line of tokens charges an answer's greatest length, and does not
    count the tokens that were never sampled: see `BudgetLine.record`.)
    """

    is_filtered = False
    filtered = FilteredBudget
    """``PrivacyBudget.filtered(epsilon, delta, ledger, name)``: a budget without a schedule, whose mechanisms and
    parameters are chosen one after the other."""

    def __init__(
        self,
        epsilon: float,
        delta: float,
        releases: Releases,
        ledger: str = "sqlite:///dpicl-budget.db",
        name: str = "default",
        *,
        witness: Where = None,
        tickets: bool = False,
        scope: Scope = "shared",
        replay: Replay = True,
        replay_patience: float = 300.0,
        keep_queries: bool = False,
        on_exhausted: OnExhausted = "raise",
        soft_limit: float | None = None,
        on_soft_limit: Callable[[SoftLimit], Any] | None = None,
    ) -> None:
        epsilon, delta = checks.positive("epsilon", epsilon), checks.open_unit("delta", delta)
        self._schedule = Schedule(releases)
        self.releases = self._schedule.counts
        if not isinstance(tickets, bool):
            raise InvalidParameter("tickets", tickets, "True or False")
        if tickets and soft_limit is not None:
            raise InvalidParameter("soft_limit", soft_limit, "None if owners pay with tickets: there is no end")
        self.tickets = tickets
        self._lines: dict[str, BudgetLine] = {}
        policy = Policy(scope, replay, replay_patience, keep_queries, on_exhausted, soft_limit, on_soft_limit)
        super().__init__(epsilon, delta, policy, ledger, name, witness)

    @staticmethod
    def open(
        name: str = "default", ledger: str = "sqlite:///dpicl-budget.db", *, witness: Where = None, **policy: Any
    ) -> Budget:
        """The budget that a ledger holds under this name, with nothing else known. Never makes a ledger.

        ``policy`` may set ``replay`` and the parameters after it in the constructor; the rest is as it was frozen.
        Raises `LedgerError` if there is no ledger, `InvalidParameter` if it has no such plan. With
        ``witness=UNWATCHED`` the budget can only be read, whatever its witness says, and charges nothing.
        """
        reader = StoredLedger(ledger)
        try:
            plans = reader.plans()
        finally:
            reader.close()
        stored = next((plan for plan in plans if plan.name == name), None)
        if stored is None:
            known = ", ".join(repr(plan.name) for plan in plans) or "none"
            raise InvalidParameter("name", name, f"a plan of this ledger: {known}")
        if stored.is_filter:
            content = json.loads(stored.content)
            how: dict[str, Any] = {"orders": tuple(content["orders"]), "failures": content["failures"]}
            return FilteredBudget(content["epsilon"], content["delta"], ledger, name, witness=witness, **how, **policy)
        plan = PrivacyPlan.from_json(stored.content)
        releases: Releases = {line: item.count for line, item in plan.lines.items()}
        if len(plan.lines) == 1 and all(item.mechanism == line for line, item in plan.lines.items()):
            releases = next(iter(plan.lines.values())).count  # made with one number, not with a mapping
        how = {"tickets": bool(stored.tickets), "scope": stored.scope}
        return PrivacyBudget(plan.epsilon, plan.delta, releases, ledger, name, witness=witness, **how, **policy)

    # -- freezing ------------------------------------------------------------------------------------------------------

    def _adopt(self, stored: StoredPlan) -> None:
        if stored.is_filter:
            raise PlanMismatch(f"the budget {self.name!r} is a filtered one: use PrivacyBudget.filtered")
        plan = PrivacyPlan.from_json(stored.content)
        different: dict[str, tuple[object, object]] = {
            "epsilon": (plan.epsilon, self.epsilon),
            "delta": (plan.delta, self.delta),
            "scope": (stored.scope, self.scope),
            "tickets": (bool(stored.tickets), self.tickets),
        }
        self._refuse_other({**different, **self._schedule.differences(plan)})
        index = OwnerIndex(self._ledger, stored.id)  # one for all lines: each of them has tickets of its own
        lines: dict[str, BudgetLine] = {}
        for name, line in plan.lines.items():
            about = (self.name, self._ledger, self._policy, stored, name, line, plan)
            lines[name] = TicketLine(*about, index=index, watch=self.watch) if self.tickets else BudgetLine(*about)
        self._plan, self._owner_index, self._lines = plan, index, lines

    def declare(
        self,
        line: str | None,
        mechanism: str,
        rate: float,
        *,
        rate_is_explicit: bool = False,
        owners: int | None = None,
        options: Mapping[str, float] | None = None,
    ) -> None:
        """Describe a line, when the chain that uses it is built. Charges and freezes nothing.

        ``line`` may be None if the budget has one. ``owners``: from how many the rate was chosen. ``options`` are
        those that somebody chose: the rest is filled in when the plan is solved. `PlanMismatch` if the line was
        declared or frozen with another mechanism, with another value of an option, or with another explicit rate.
        """
        with self._lock:
            is_new = self._find() is None
            asked, chosen = declared(mechanism, rate, rate_is_explicit, owners if is_new else None, options)
            if is_new:
                self._schedule.declare(line, asked, chosen)
            else:
                self._refuse_other(differences(self._pick(line).plan_line, asked, chosen, owners))

    def line(
        self,
        mechanism: str,
        rate: float,
        *,
        parameter: float | None = None,
        name: str | None = None,
        rate_is_explicit: bool = False,
        owners: int | None = None,
        options: Mapping[str, float] | None = None,
        fingerprint: Fingerprint | None = None,
    ) -> BudgetLine:
        """One line of the plan, for a mechanism at a sampling rate; completes and freezes the plan at first use.

        ``name`` is needed if the budget has several lines. If the ledger already holds the plan, its rate stands, and
        so does the number of ``owners`` from which it was chosen (`PlanLine.owners`), however many there are by now; a
        rate that the caller fixed explicitly must agree with it, and so must every option given. ``parameter`` must be
        None: the plan chooses the noise. ``fingerprint`` (a store's method of that name) is called once, when the plan
        is frozen, so that the ledger recognises a later plan on the same data. Raises `PlanIncomplete` while another
        line is not declared, `PlanMismatch`, `InfeasiblePlan`, `LedgerError`; none of them costs anything.
        """
        if self._lines and not self._to_remember and parameter is None:  # frozen: a look-up
            found = self._pick(name)
            frozen = found.plan_line
            wanted = {"mechanism": mechanism, "rate": rate, **(options or {})}
            known = {"mechanism": frozen.mechanism, "rate": frozen.rate, **frozen.options}
            if wanted.items() <= known.items() and (not rate_is_explicit or owners in (None, frozen.owners)):
                return found
        if parameter is not None:
            raise InvalidParameter("parameter", parameter, "None: the plan chooses the noise")
        with self._lock:
            is_new = self._find() is None
            asked, chosen = declared(mechanism, rate, rate_is_explicit, owners if is_new else None, options)
            if is_new:
                self._schedule.declare(name, asked, chosen)
                requests = self._schedule.requests(self.delta)
                plan = PrivacyPlan.solve(epsilon=self.epsilon, delta=self.delta, lines=requests)
                allowed = {line: UNLIMITED if self.tickets else request.count for line, request in requests.items()}
                self._freeze(plan.to_json(), plan.digest, allowed, fingerprint, tickets=self.tickets)
        if self._to_remember:
            self._remember()
        found = self._pick(name)
        self._refuse_other(differences(found.plan_line, asked, chosen, owners))
        return found

    def _pick(self, name: str | None) -> BudgetLine:
        """A line of the frozen plan."""
        if name is None and len(self._lines) == 1:
            return next(iter(self._lines.values()))
        if name is None or name not in self._lines:
            raise InvalidParameter("line", name, f"one of this budget's lines: {', '.join(self._lines)}")
        return self._lines[name]

    # -- spent and left ------------------------------------------------------------------------------------------------

    def _spent(self, principal: str | None) -> dict[str, int]:
        """Releases spent on every line, by all callers or by one principal."""
        counter = self._policy.principal(principal)
        stored = self._find()
        return dict.fromkeys(self._schedule.names, 0) if stored is None else self._ledger.spent(stored.id, counter)

    def _state(self, name: str, spent: int) -> LineState:
        frozen = self._lines.get(name)
        count, mechanism = self._schedule.line(name) if frozen is None else (frozen.count, frozen.mechanism)
        left = None if self.tickets else count - spent
        return LineState(count=count, spent=spent, remaining=left, mechanism=mechanism)

    def _named(self, line: str | None, principal: str | None) -> tuple[str, LineState]:
        """A line's name and state. None is the only line."""
        spent = self._spent(principal)
        name = self._pick(line).name if self._lines else self._schedule.name_of(line)
        return name, self._state(name, spent[name] if self._lines else 0)

    def lines(self, principal: str | None = None) -> dict[str, LineState]:
        """Every line: its count, its releases spent and left, and its mechanism (None until somebody declares it).

        A budget of one number of releases has no line before a chain is bound to it.
        """
        return {name: self._state(name, spent) for name, spent in self._spent(principal).items()}

    def spent(self, line: str | None = None, principal: str | None = None) -> int:
        """Releases charged so far, by all workers. ``line`` is needed if the budget has several, ``principal`` if it
        counts each caller's releases."""
        return self._named(line, principal)[1]["spent"]

    def remaining(self, line: str | None = None, principal: str | None = None) -> int | None:
        """Releases left; None if owners pay with tickets: there is no end."""
        return self._named(line, principal)[1]["remaining"]

    def epsilon_spent(self, principal: str | None = None) -> float:
        """Upper bound on epsilon, at the plan's delta, for the releases charged so far on all lines; 0 before any.

        With ``scope="per_principal"``: of one principal's releases, if callers do not collude.
        """
        counts = self._spent(principal)
        return 0.0 if self._plan is None else self.epsilon_of(counts)

    def epsilon_of(self, counts: Mapping[str, int]) -> float:
        """Upper bound on epsilon, at the plan's delta, after so many releases of each line; before the first use the
        whole plan's. If owners pay with tickets, an owner has paid for each of them at most, and never more than it
        has."""
        if self._plan is None:
            return self.epsilon
        return self._plan.spent(self._plan.at_most(counts) if self.tickets else counts)

    def preview(self, n: int = 1, line: str | None = None, principal: str | None = None) -> Preview:
        """The effect of ``n`` further releases. Charges nothing. Before first use: the whole plan's epsilon."""
        checks.whole("n", n)
        name, state = self._named(line, principal)
        left = state["remaining"]
        fits = left is None or n <= left
        further = n if fits else 0
        return {
            "releases": n,
            "fits": fits,
            "epsilon_after": self.epsilon_of({**self._spent(principal), name: state["spent"] + further}),
            "remaining_after": None if left is None else left - further,
        }

    def private_ticket_report(self) -> TicketReport:
        """How many owners have used how many tickets. PRIVATE, for the deployer alone: no part of it may be shown to
        callers, published, or used to choose anything that is public."""
        if not self.tickets:
            return super().private_ticket_report()
        stored = self._find()
        if stored is None:
            return {}
        return {
            name: {
                principal: line_tickets(line.tickets_used(counter), line.count)
                for principal, counter in self._ledger.counters(stored.id, name).items()
            }
            for name, line in self._lines.items()
            if isinstance(line, TicketLine)
        }

    def __repr__(self) -> str:
        try:
            if self.scope == "per_principal":
                spent = f"by {len(self.principals())} principals"
            else:
                counts = self._spent(None)
                spent = str(counts) if len(counts) > 1 else str(sum(counts.values()))
        except DPICLError:  # showing an object must not fail
            spent = "?"
        return (
            f"PrivacyBudget(epsilon={self.epsilon:g}, delta={self.delta:g}, releases={self.releases}, "
            f"name={self.name!r}, spent={spent})"
        )


Budget = PrivacyBudget | FilteredBudget
"""Either kind."""
