"""PrivacyBudget: epsilon and delta in, a counted number of releases out."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from typing_extensions import TypedDict

from langchain_dpicl.budget import renewal
from langchain_dpicl.budget.ledger import UNWATCHED, Ledger, Release, Where
from langchain_dpicl.budget.line import BudgetLine
from langchain_dpicl.budget.owner_index import OwnerIndex
from langchain_dpicl.budget.planned import PlannedLine, at_most
from langchain_dpicl.budget.policy import OnExhausted, Policy, Replay, Scope, SoftLimit
from langchain_dpicl.budget.receipt import Receipt, read_receipt
from langchain_dpicl.budget.renewal import Act, StoredPlan, Total
from langchain_dpicl.budget.schedule import Declaration, Releases, Schedule, against
from langchain_dpicl.budget.schema import UNLIMITED
from langchain_dpicl.budget.tickets import TicketReport, Tickets, ticket_report
from langchain_dpicl.errors import DPICLError, InvalidParameter, LedgerError, PlanMismatch, PrivacyWarning
from langchain_dpicl.privacy import PrivacyPlan, checks
from langchain_dpicl.private.markers import Closed
from langchain_dpicl.store.base import PrivateStore
from langchain_dpicl.store.file import OpenedBudget

if TYPE_CHECKING:
    from langchain_dpicl.budget.filtered import FilteredBudget

Fingerprint = Callable[[bytes], tuple[str, ...]]


class Preview(TypedDict):
    """What ``n`` further releases would mean."""

    releases: int
    fits: bool
    epsilon_after: float
    remaining_after: int | None


class LineState(TypedDict):
    """A line of the budget as it stands."""

    count: int
    """How many releases it has; where owners pay with tickets, how many tickets each of them has."""
    spent: int
    remaining: int | None
    """None where owners pay with tickets: it has no end."""
    mechanism: str | None


class PrivacyBudget(Closed):
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
        Default: beside the ledger (``budget.db.witness``), where it cannot see that both were put back together. See
        `budget.witness`, and the chapter on backup.
    name
        The plan's name in the ledger.
    tickets
        Whether owners pay, each for itself. Then ``releases`` counts the queries that ONE OWNER may be eligible for,
        the number of queries has no end, and an owner whose tickets are burnt is left out from then on, which nobody
        can see. Needs a selector with a ``threshold``. The guarantee is the same (`budget.tickets` has the theorem).
        Frozen with the plan.
    scope
        ``"shared"``: one counter for all callers, who may collude. ``"per_principal"``: one counter for each caller;
        the guarantee then holds for each caller's releases on their own, if callers do not collude. Frozen with the
        plan.
    replay, replay_patience
        Whether an equal query on the same line is answered from the ledger at no cost (post-processing of a released
        answer), and how many seconds it waits for a caller who is answering the same query just now. None of these
        choices costs an owner privacy; they differ in what callers who share a counter see of each other. ``True``:
        whoever asks what another asked gets that caller's answer, with its number and the second of its charge; waits
        if the other is being answered just now; and once the budget is spent still gets it, where an unknown question
        is refused. ``"principal"``: an answer is replayed to the caller who asked for it (see `acting_for`; needed
        then), and for everybody else the question is a new one, in what it costs, in how long it takes and in what is
        refused. ``False``: nobody is, and every question is charged. With each of these they see how far the shared
        counter is: how many releases there were, and on a line of tokens how many were drawn, so how long an answer
        was. With ``scope="per_principal"`` callers share no counter and no answers, so ``True`` and ``"principal"`` are
        the same.
    keep_queries
        Keep the queries' texts in the receipts, instead of keyed hashes.
    on_exhausted
        What a chain does when the releases are spent: ``"raise"`` `PrivacyBudgetExceeded`, or give the public
        ``"zero_shot"`` answer, marked as such.
    soft_limit, on_soft_limit
        A share of the releases (say 0.8): the charge that reaches it logs a warning and calls ``on_soft_limit``.

    The plan is completed and frozen at first use, when every line's sampling rate and mechanism are known; from then
    on the ledger refuses other parameters under this name (`PlanMismatch`). Every release is charged before the first
    member is called, and nothing is ever refunded. (A line of tokens charges an answer's greatest length, and does not
    count the tokens that were never sampled: see `BudgetLine.record`.)
    """

    tickets: bool = False
    """Whether owners pay, each for itself."""

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
        self.epsilon = checks.positive("epsilon", epsilon)
        self.delta = checks.open_unit("delta", delta)
        self._schedule = Schedule(releases)
        self.releases = self._schedule.counts
        if not isinstance(tickets, bool):
            raise InvalidParameter("tickets", tickets, "True or False")
        if tickets and soft_limit is not None:
            raise InvalidParameter("soft_limit", soft_limit, "None where owners pay with tickets: there is no end")
        self.tickets = tickets
        self._policy = Policy(scope, replay, replay_patience, keep_queries, on_exhausted, soft_limit, on_soft_limit)
        self._start(ledger, name, witness)

    def _start(self, ledger: str, name: str, witness: Where) -> None:
        if not isinstance(name, str) or not name or len(name) > 255:
            raise InvalidParameter("name", name, "a string of 1 to 255 characters")
        self.name = name
        self._ledger = Ledger(ledger, create=False) if witness is UNWATCHED else Ledger(ledger, witness=witness)
        self._lock = threading.Lock()
        self._watching = threading.Lock()
        self._lines: dict[str, BudgetLine] = {}
        self._plan: PrivacyPlan | None = None
        self._stored: StoredPlan | None = None
        self._seats: OwnerIndex | None = None
        self._watched: WeakSet[PrivateStore] = WeakSet()
        self._unmet: list[PrivateStore] = []
        self._find()

    @classmethod
    def open(
        cls, name: str = "default", ledger: str = "sqlite:///dpicl-budget.db", *, witness: Where = None, **policy: Any
    ) -> PrivacyBudget:
        """The budget that a ledger holds under this name, with nothing else known. Never makes a ledger.

        ``policy`` may set ``replay`` and what follows it in the constructor; the rest is as it was frozen. Raises
        `LedgerError` where there is no ledger, `InvalidParameter` where it has no such plan. With
        ``witness=UNWATCHED`` it is there to be read, whatever its witness says, and charges nothing.
        """
        reader = Ledger(ledger, create=False)
        try:
            plans = reader.plans()
        finally:
            reader.close()
        stored = next((plan for plan in plans if plan.name == name), None)
        if stored is None:
            known = ", ".join(repr(plan.name) for plan in plans) or "none"
            raise InvalidParameter("name", name, f"a plan of this ledger: {known}")
        if stored.is_filter:
            from langchain_dpicl.budget.filtered import FilteredBudget

            content = json.loads(stored.content)
            orders, failures = tuple(content["orders"]), content["failures"]
            return FilteredBudget(
                content["epsilon"],
                content["delta"],
                ledger,
                name,
                witness=witness,
                orders=orders,
                failures=failures,
                **policy,
            )
        plan = PrivacyPlan.from_json(stored.content)
        counts: dict[str, int] = {line: item.count for line, item in plan.lines.items()}
        single = next(iter(plan.lines.values())) if len(plan.lines) == 1 else None
        releases = single.count if single is not None and [single.mechanism] == list(plan.lines) else counts
        frozen: dict[str, Any] = {"tickets": bool(stored.tickets), "scope": stored.scope}
        return PrivacyBudget(plan.epsilon, plan.delta, releases, ledger, name, witness=witness, **frozen, **policy)

    @classmethod
    def filtered(
        cls,
        epsilon: float,
        delta: float,
        ledger: str = "sqlite:///dpicl-budget.db",
        name: str = "default",
        *,
        witness: Where = None,
        orders: tuple[int, ...] = (),
        failures: float = 0.0,
        **policy: Any,
    ) -> FilteredBudget:
        """A budget without a schedule: mechanisms and parameters are chosen as one goes. See `FilteredBudget`."""
        from langchain_dpicl.budget.filtered import FilteredBudget

        return FilteredBudget(epsilon, delta, ledger, name, witness=witness, orders=orders, failures=failures, **policy)

    @property
    def scope(self) -> Scope:
        """Whose releases one counter counts: ``"shared"`` or ``"per_principal"``."""
        return self._policy.scope

    @property
    def on_exhausted(self) -> OnExhausted:
        """What a chain does when the releases are spent."""
        return self._policy.on_exhausted

    @property
    def replay(self) -> Replay:
        """Whether equal queries are answered from the ledger: to everybody, or to the principal who asked."""
        return self._policy.replay

    @property
    def keep_queries(self) -> bool:
        """Whether receipts hold the queries' texts."""
        return self._policy.keep_queries

    def _find(self) -> StoredPlan | None:
        """The plan as it is stored, perhaps by another worker since; None before the first use."""
        if self._stored is None:
            stored = self._ledger.find_plan(self.name)
            if stored is not None:
                self._adopt(stored)
                self._stored = stored
        return self._stored

    def _adopt(self, stored: StoredPlan) -> None:
        """Make the lines of a stored plan, if it is the one that was asked for."""
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
        self._plan = plan
        self._seats = seats = OwnerIndex(self._ledger, stored.id)  # an owner has one seat, and tickets of each line
        self._lines = {}
        for name, line in plan.lines.items():
            tickets = Tickets(self._ledger, seats, line.count, self.watch) if self.tickets else None
            self._lines[name] = PlannedLine(self.name, self._ledger, stored.id, plan, name, self._policy, tickets)

    def _find_lines(self) -> Mapping[str, BudgetLine]:
        self._find()
        return self._lines

    @property
    def plan(self) -> PrivacyPlan | None:
        """The frozen plan; None before the first use."""
        self._find()
        return self._plan

    @property
    def is_frozen(self) -> bool:
        """Whether the ledger holds this budget. What it holds then stands, however a store grows or shrinks."""
        return self._find() is not None

    @property
    def public_owners(self) -> int | None:
        """From how many owners the frozen plan's rates were chosen, the most of all lines; None if it does not say."""
        plan = self.plan
        return None if plan is None else max(line.owners or 0 for line in plan.lines.values()) or None

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
        """Say what a line is, when the chain that uses it is built. Charges and freezes nothing.

        ``line`` may be None where the budget has one. ``owners``: from how many the rate was chosen. ``options`` are
        those that somebody chose: the rest is filled in when the plan is solved. `PlanMismatch` if the line was
        declared or frozen with another mechanism, with another value of an option, or with another explicit rate.
        """
        declaration = Declaration(mechanism, rate, rate_is_explicit, dict(options or {}), owners)
        with self._lock:
            lines = self._find_lines()
            if lines:
                self._refuse_other(against(self._pick(lines, line).plan_line, declaration))
            else:
                self._schedule.declare(line, declaration)

    def line(
        self,
        mechanism: str,
        rate: float,
        *,
        name: str | None = None,
        rate_is_explicit: bool = False,
        owners: int | None = None,
        options: Mapping[str, float] | None = None,
        fingerprint: Fingerprint | None = None,
    ) -> BudgetLine:
        """One line of the plan, for a mechanism at a sampling rate; completes and freezes the plan at first use.

        ``name`` is needed where the budget has several lines. Where the ledger already holds the plan, its rate stands,
        and so does the number of ``owners`` from which it was chosen (`PlanLine.owners`), however many there are by
        now; a rate that the caller fixed explicitly must agree with it, and so must every option given. ``fingerprint``
        (a store's method of that name) is called once, when the plan is frozen, so that the ledger recognises a later
        plan on the same data. Raises `PlanIncomplete` while another line is not declared, `PlanMismatch`,
        `InfeasiblePlan`, `LedgerError`; none of them costs anything.
        """
        declaration = Declaration(mechanism, rate, rate_is_explicit, dict(options or {}), owners)
        with self._lock:
            lines = self._find_lines()
            if not lines:
                self._schedule.declare(name, declaration)
                requests = self._schedule.requests(self.delta)
                plan = PrivacyPlan.solve(epsilon=self.epsilon, delta=self.delta, lines=requests)
                allowed = {line: UNLIMITED if self.tickets else request.count for line, request in requests.items()}
                marks = None if fingerprint is None else fingerprint(self._ledger.key("fingerprint_key"))
                self._ledger.store_plan(
                    self.name,
                    plan.to_json(),
                    plan.digest,
                    allowed,
                    scope=self.scope,
                    fingerprint=marks,
                    tickets=self.tickets,
                )
                lines = self._find_lines()
        if not lines:
            raise LedgerError("the plan could not be stored")
        if self._unmet:
            self._meet()
        found = self._pick(lines, name)
        self._refuse_other(against(found.plan_line, declaration))
        return found

    def _pick(self, lines: Mapping[str, BudgetLine], name: str | None) -> BudgetLine:
        if name is None and len(lines) == 1:
            return next(iter(lines.values()))
        if name is None or name not in lines:
            raise InvalidParameter("line", name, f"one of this budget's lines: {', '.join(lines)}")
        return lines[name]

    def _refuse_other(self, pairs: Mapping[str, tuple[object, object]]) -> None:
        different = [
            f"{key} {frozen!r} (asked: {asked!r})" for key, (frozen, asked) in pairs.items() if frozen != asked
        ]
        if different:
            raise PlanMismatch(
                f"the budget {self.name!r} was frozen at first use with {', '.join(different)}; "
                "use another name for another plan (both then count: their losses add up)"
            )

    def watch(self, store: PrivateStore) -> None:
        """Use this budget with a store: an owner whom the store forgets from now on leaves the ledger too, with its
        tickets and its hashes.

        A chain on this budget does so when it is built. The store keeps the budget. At the first release the store
        remembers the budget, and a `PrivacyWarning` names others that were opened on the same data.
        """
        with self._watching:
            if store in self._watched:
                return
            self._watched.add(store)
            self._unmet.append(store)
        key = self._ledger.key("fingerprint_key")
        if self.tickets:
            store.on_owner_forgotten(key, self._forget)
        store.on_fingerprint_forgotten(key, self._ledger.forget_prints)

    def _meet(self) -> None:
        """Have the stores remember this budget, whose plan is frozen. Warn of others on the same data."""
        with self._watching:
            stores, self._unmet = self._unmet, []
        place = self._ledger.place
        if place is None or not stores:
            return
        plans = self._ledger.plans()
        names = {f"{name!r} in this ledger" for name in renewal.neighbours(plans, self.name)}
        opened = OpenedBudget(self._ledger.identity, place, self.name)
        others = {other for store in stores for other in store.remember_budget(opened)}
        generation = next(plan.generation for plan in plans if plan.name == self.name)
        if not any(act.name == self.name and act.generation == generation for act in self._ledger.acts()):
            names |= {
                f"{each.name!r} in {'this ledger' if each.ledger == opened.ledger else each.url}" for each in others
            }
        if names:
            warnings.warn(
                f"the budget {self.name!r} is used with data on which other budgets were opened: "
                f"{', '.join(sorted(names))}. Their losses add up, and no receipt of one counts another's: give an "
                "owner one budget, or read PrivacyBudget.total() for those of one ledger",
                PrivacyWarning,
                stacklevel=renewal.users_line(),
            )

    def _forget(self, mark: bytes) -> None:
        if self._find() is not None and self._seats is not None:
            self._seats.forget(mark)

    # -- what is spent and left ----------------------------------------------------------------------------------------

    def _spent(self, principal: str | None = None) -> dict[str, int]:
        """Releases spent on every line, by all callers or by one principal."""
        who = self._policy.principal(principal)
        stored = self._find()
        return dict.fromkeys(self._schedule.names, 0) if stored is None else self._ledger.spent(stored.id, who)

    def _of(self, line: str | None, principal: str | None) -> tuple[str, int, int]:
        """A line's name, how many releases it has, and how many are spent."""
        lines = self._find_lines()
        if not lines:
            self._policy.principal(principal)
            name = self._schedule.name_of(line)
            return name, self._schedule.count(name), 0
        found = self._pick(lines, line)
        return found.name, found.count, self._spent(principal)[found.name]

    def lines(self, principal: str | None = None) -> dict[str, LineState]:
        """Every line: its count, what is spent and left of it, and its mechanism (None until somebody declares it).

        A budget of one number of releases has no line before a chain is bound to it.
        """
        frozen, states = self._find_lines(), {}
        for name, spent in self._spent(principal).items():
            count = frozen[name].count if frozen else self._schedule.count(name)
            mechanism = frozen[name].mechanism if frozen else self._schedule.mechanism(name)
            left = None if self.tickets else count - spent
            states[name] = LineState(count=count, spent=spent, remaining=left, mechanism=mechanism)
        return states

    def principals(self) -> dict[str, dict[str, int]]:
        """What each principal has spent on each line; empty where all callers share one counter."""
        stored = self._find()
        found = {} if stored is None else self._ledger.by_principal(stored.id)
        return {principal: spent for principal, spent in sorted(found.items()) if principal}

    def spent(self, line: str | None = None, principal: str | None = None) -> int:
        """Releases charged so far, by all workers. ``line`` is needed where the budget has several, ``principal``
        where it counts each caller's releases."""
        return self._of(line, principal)[2]

    def remaining(self, line: str | None = None, principal: str | None = None) -> int | None:
        """Releases left; None where owners pay with tickets: there is no end."""
        _, count, spent = self._of(line, principal)
        return None if self.tickets else count - spent

    def epsilon_spent(self, principal: str | None = None) -> float:
        """Upper bound on epsilon, at the plan's delta, for the releases charged so far on all lines; 0 before any.

        With ``scope="per_principal"``: of one principal's releases, if callers do not collude.
        """
        self._policy.principal(principal)
        plan = self.plan
        return 0.0 if plan is None else plan.spent(self._paid(plan, self._spent(principal)))

    def _paid(self, plan: PrivacyPlan, spent: Mapping[str, int]) -> Mapping[str, int]:
        """What was released of each line, or what an owner has paid of it at most."""
        return at_most(plan, spent) if self.tickets else spent

    def preview(self, n: int = 1, line: str | None = None, principal: str | None = None) -> Preview:
        """What ``n`` further releases would cost. Charges nothing. Before first use: the whole plan's epsilon."""
        checks.whole("n", n)
        name, count, spent = self._of(line, principal)
        fits = self.tickets or spent + n <= count
        after = spent + n if fits else spent
        plan = self.plan
        counts = {**self._spent(principal), name: after}
        return {
            "releases": n,
            "fits": fits,
            "epsilon_after": self.epsilon if plan is None else plan.spent(self._paid(plan, counts)),
            "remaining_after": None if self.tickets else count - after,
        }

    def receipt(self, release_id: str, principal: str | None = None) -> Receipt | None:
        """The receipt of an earlier release of this budget, from the ledger; None if there is none.

        With ``principal`` only if it is that principal's; a shared budget does not keep whose it is, so with
        ``replay="principal"`` it refuses to say (`InvalidParameter`).
        """
        if principal is not None and self.scope == "shared" and self.replay == "principal":
            raise InvalidParameter("principal", principal, "None: a shared budget does not keep whose a receipt is")
        name, line, number = ["", "", "", *str(release_id).rsplit(":", 2)][-3:]
        counter, _, of_counter = number.rpartition(".")
        stored = self._find()
        digits = [of_counter, counter] if "." in number else [of_counter]
        if (
            stored is None
            or name != self.name
            or not all(d.isascii() and d.isdecimal() and len(d) < 19 for d in digits)
        ):
            return None
        found = self._ledger.receipt(stored.id, line, int(of_counter), int(counter) if counter else None)
        if found is None or (principal is not None and self.scope == "per_principal" and found[1] != principal):
            return None
        return read_receipt(found[0])

    def latest(self, last: int = 200, principal: str | None = None) -> tuple[list[Release], int]:
        """The latest charges of all callers or of one principal, the oldest first, and how many there are in all."""
        who = self._policy.principal(principal)
        stored = self._find()
        return ([], 0) if stored is None else self._ledger.latest(stored.id, who, checks.whole("last", last))

    def private_ticket_report(self) -> TicketReport:
        """How many owners have burnt how many tickets. PRIVATE, for the deployer alone: no part of it may be shown to
        callers, published, or used to choose anything that is public."""
        lines = self._find_lines()
        if not self.tickets:
            raise InvalidParameter("tickets", False, "asked for on a budget whose owners pay with them")
        stored = self._find()
        assert stored is None or lines
        return {} if stored is None else ticket_report(self._ledger, stored.id, lines)

    # -- other plans on the same data ----------------------------------------------------------------------------------

    def total(self) -> Total:
        """What all plans of this ledger on the same data give away together, since the last fresh start."""
        plans = self._ledger.plans()
        stored = self._find()
        generation = max((plan.generation for plan in plans), default=1) if stored is None else stored.generation
        same = renewal.same_data(plans, generation)
        return renewal.total(same, {plan.id: self._ledger.most_spent(plan.id) for plan in same})

    def start_afresh(self, reason: str, fingerprint: Fingerprint | None = None) -> None:
        """Declare that the data were replaced as a whole, so that this budget's plan, not frozen yet, adds up with no
        older plan of the ledger. An act for the record: it is kept with its reason, the times, and both sketches.

        The ledger checks it when the plan is frozen (and here already, if ``fingerprint`` is given): `PlanMismatch`
        if the plan is frozen already, if no fingerprint is given by then, or if the new store is seen to share an
        owner with an older plan's. A sketch finds shared owners for certain in stores of up to 128 owners, and with
        probability 1 - (1 - s)^128 where a share s of all owners is in both.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise InvalidParameter("reason", reason, "why the data are new, in words, for the record")
        if self._find() is not None:
            raise PlanMismatch(f"the budget {self.name!r} is frozen already: a fresh start needs a new name")
        if fingerprint is not None:
            marks = fingerprint(self._ledger.key("fingerprint_key"))
            older = [json.loads(plan.fingerprint) for plan in self._ledger.plans() if plan.fingerprint]
            renewal.refuse_shared(self.name, [mark for sketch in older for mark in sketch], marks)
        self._ledger.announce(self.name, reason)

    def acts(self) -> list[Act]:
        """Every fresh start of this ledger, announced or carried out."""
        return self._ledger.acts()

    def close(self) -> None:
        """Close the ledger's connections, and give back what was reserved and not used, as its process's end does."""
        self._ledger.close()

    def __repr__(self) -> str:
        try:
            if self.scope == "per_principal":
                spent = f"by {len(self.principals())} principals"
            else:
                counts = self._spent()
                spent = str(counts) if len(counts) > 1 else str(sum(counts.values()))
        except DPICLError:  # showing an object must not fail
            spent = "?"
        return (
            f"PrivacyBudget(epsilon={self.epsilon:g}, delta={self.delta:g}, releases={self.releases}, "
            f"name={self.name!r}, spent={spent})"
        )
