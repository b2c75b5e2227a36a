"""What both kinds of budget share (their ledger, stores and receipts), and the kind without a schedule."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

from langchain_dpicl.budget import terms
from langchain_dpicl.budget.ledger import Ledger, filter_of
from langchain_dpicl.budget.line import BudgetLine
from langchain_dpicl.budget.opening import Where, is_behind
from langchain_dpicl.budget.owner_index import KeyMissing, OwnerIndex, leaving
from langchain_dpicl.budget.schema import UNLIMITED, StoredPlan
from langchain_dpicl.budget.stored import ReleaseRow, StoredLedger
from langchain_dpicl.budget.terms import LineState, Policy, Preview, Receipt, TicketReport, Total
from langchain_dpicl.errors import InvalidParameter, LedgerError, PlanMismatch, PrivacyWarning
from langchain_dpicl.privacy import PlanLine, PrivacyPlan, RenyiFilter, checks
from langchain_dpicl.privacy.profile import MAX_COUNT
from langchain_dpicl.private import Accounting, Closed
from langchain_dpicl.store.base import MarkOf, PrivateStore
from langchain_dpicl.store.notes import OpenedBudget, merged

_LIBRARIES = ("langchain_dpicl", "langchain_core")


class BaseBudget(Accounting, Closed):
    """A target (epsilon, delta) and the durable ledger that enforces it.

    `PrivacyBudget` and `FilteredBudget` are the two kinds. ``policy`` holds the checked choices that are not part of a
    plan; ``ledger``, ``name`` and ``witness`` are as in `PrivacyBudget`.
    """

    is_filtered: ClassVar[bool]
    """Whether each release names its own noise: no plan has fixed it in advance."""
    tickets: bool = False
    """Whether owners pay with tickets."""

    def __init__(
        self,
        epsilon: float,
        delta: float,
        policy: Policy,
        ledger: str,
        name: str,
        witness: Where,
        key_file: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(name, str) or not name or len(name) > 255:
            raise InvalidParameter("name", name, "a string of 1 to 255 characters")
        self.epsilon = epsilon
        self.delta = delta
        self.name = name
        self.scope = policy.scope
        """One counter for all callers (``"shared"``), or one for each of them (``"per_principal"``)."""
        self.on_exhausted = policy.on_exhausted
        """The action of a chain when the releases are spent."""
        self.replay = policy.replay
        """Whether equal queries are answered from the ledger: for everybody, or for the principal who asked."""
        self.keep_queries = policy.keep_queries
        """Whether receipts hold the queries' texts."""
        self._policy = policy
        self._ledger = Ledger(ledger, witness=witness, key_file=key_file)
        self._lock = threading.RLock()
        self._plan: PrivacyPlan | None = None
        self._lines: dict[str, BudgetLine] = {}
        self._stored: StoredPlan | None = None
        self._owner_index: OwnerIndex | None = None
        self._watched: WeakSet[PrivateStore] = WeakSet()
        self._to_remember: list[PrivateStore] = []
        self._find()

    @property
    def plan(self) -> PrivacyPlan | None:
        """The frozen plan; None before the first use, and in a filtered budget."""
        self._find()
        return self._plan

    @property
    def is_frozen(self) -> bool:
        """Whether the ledger holds this budget. Its content is then fixed, however a store grows or shrinks."""
        return self._find() is not None

    @property
    def public_owners(self) -> int | None:
        """The number of owners from which the frozen plan's rates were chosen, the most of all lines; None if it does
        not say."""
        plan = self.plan
        return None if plan is None else max(line.owners or 0 for line in plan.lines.values()) or None

    # -- freezing ------------------------------------------------------------------------------------------------------

    def _find(self) -> StoredPlan | None:
        """The budget as the ledger holds it, perhaps since another worker froze it; None before the first use."""
        if self._stored is None:
            with self._lock:
                if self._stored is None and (stored := self._ledger.find_plan(self.name)) is not None:
                    self._adopt(stored)
        return self._stored

    def _adopt(self, stored: StoredPlan) -> None:
        """Take the content of the ledger. `PlanMismatch` if this budget asks for something else."""
        raise NotImplementedError

    def _freeze(self, content: str, digest: str, allowed: Mapping[str, int], **more: Any) -> StoredPlan:
        """Store the plan, or take the one that another worker stored first."""
        stored = self._ledger.store_plan(self.name, content, digest, allowed, scope=self.scope, **more)
        self._adopt(stored)
        return stored

    def _refuse_other(self, frozen: Mapping[str, object], asked: Mapping[str, object]) -> None:
        """`PlanMismatch` names the frozen values that are not as asked."""
        if words := different(frozen, asked):
            raise PlanMismatch(
                f"the budget {self.name!r} was frozen at first use with {words}; use another name for another plan "
                "(both then count: their losses add up)"
            )

    def principals(self) -> dict[str, dict[str, int]]:
        """The releases of each principal on each line; empty if all callers share one counter."""
        stored = self._find()
        found = {} if stored is None else self._ledger.by_principal(stored.id)
        return {principal: spent for principal, spent in sorted(found.items()) if principal}

    def private_ticket_report(self) -> TicketReport:
        """How many owners have used how many tickets. PRIVATE, for the deployer alone: show no part of it to callers,
        publish none, and choose nothing public by it."""
        if not self.tickets:
            raise InvalidParameter("tickets", False, "asked for on a budget whose owners pay with them")
        self._find()
        found: TicketReport = {}
        for name, line in self._lines.items():
            assert line.tickets is not None
            found[name] = {}
            for who, counter in self._ledger.counters(line.plan_id, name).items():
                found[name][who] = self._ledger.run(partial(line.tickets.report, counter_id=counter), "note")
        return found

    # -- stores --------------------------------------------------------------------------------------------------------

    def watch(self, store: PrivateStore) -> None:
        """Use this budget with a store: an owner whom the store forgets from now on leaves the ledger too, with its
        tickets.

        A chain on this budget does so when it is built. The store keeps the budget. At the first release the store
        remembers the budget, and a `PrivacyWarning` names others on the same data on which something was spent.
        """
        with self._lock:
            if store in self._watched:
                return
            self._watched.add(store)
            self._to_remember.append(store)
        if self.tickets:
            store.on_owner_forgotten(self._leave)

    def _leave(self, keys: Sequence[bytes], mark_of: MarkOf) -> Callable[[], object]:
        stored = self._find()
        if stored is None or self._owner_index is None:
            return lambda: None
        end = leaving(self._ledger, self._owner_index, stored.id, keys, mark_of)
        if end is None:
            raise KeyMissing(self.name)
        return end

    def _remember(self) -> None:
        """Have the stores remember this budget, whose plan is frozen. Warn of others on the same data.

        A budget whose owners pay meets each store's key: `LedgerError` if that is not the key of its plan.
        """
        stores = list(self._to_remember)
        if self.tickets and self._owner_index is not None:
            for store in stores:
                self._owner_index.key_for(store)
        if not stores:
            return
        known: tuple[OpenedBudget, ...] = ()
        if (place := self._ledger.place) is None:  # it ends with this process, and so does what is known of it
            known = merged(*(store.budgets for store in stores))
        else:
            opened = OpenedBudget(self._ledger.identity, place, self.name, self.epsilon, self.delta)
            known = merged(*(store.remember_budget(opened) for store in stores))
        self._ledger.note_others(known)
        names = {f"{other.name!r} in {self._where(other)}" for other in known if self._was_used(other)}
        if not all(store.remembers for store in stores):  # it may be the data of any budget of this ledger
            others = [plan for plan in self._ledger.plans() if plan.name != self.name]
            names |= {f"{plan.name!r} in this ledger" for plan in others if self._ledger.has_spent(plan)}
        with self._lock:  # now they have
            self._to_remember = [store for store in self._to_remember if store not in stores]
        if names:
            level, frame = 1, sys._getframe()  # of the first line that is neither this package's nor LangChain's
            while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
                level, frame = level + 1, frame.f_back
            warnings.warn(
                f"the budget {self.name!r} is used with data on which other budgets were opened: "
                f"{', '.join(sorted(names))}. Their losses add up, and no receipt of one counts another's: give an "
                "owner one budget, or read PrivacyBudget.total()",
                PrivacyWarning,
                stacklevel=level,
            )

    def _where(self, other: OpenedBudget) -> str:
        return "this ledger" if other.ledger == self._ledger.identity else other.url

    # -- receipts ------------------------------------------------------------------------------------------------------

    def receipt(self, release_id: str, principal: str | None = None) -> Receipt | None:
        """The receipt of an earlier release of this budget, from the ledger; None if there is none.

        With ``principal`` only if it is that principal's; a shared budget does not keep whose it is, so with
        ``replay="principal"`` it refuses to say (`InvalidParameter`).
        """
        if principal is not None and self.scope == "shared" and self.replay == "principal":
            raise InvalidParameter("principal", principal, "None: a shared budget does not keep whose a receipt is")
        stored, known = self._find(), terms.parse_release_id(release_id)
        if stored is None or known is None or known[0] != self.name:
            return None
        _, line, counter, number = known
        found = self._ledger.receipt(stored.id, line, number, counter)
        if found is None or (principal is not None and self.scope == "per_principal" and found[1] != principal):
            return None
        return terms.read_receipt(found[0])

    def latest(self, last: int = 200, principal: str | None = None) -> tuple[list[ReleaseRow], int]:
        """The latest charges of all callers or of one principal, the oldest first, and how many there are in all."""
        counter = self._policy.principal(principal)
        stored = self._find()
        return ([], 0) if stored is None else self._ledger.latest(stored.id, counter, checks.whole("last", last))

    # -- other plans on the same data ----------------------------------------------------------------------------------

    def total(self) -> Total:
        """The loss of all plans of this ledger together, and of every budget that its stores remember, in whatever
        ledger.

        Another ledger is opened to read what was spent there. A budget whose ledger cannot be read, has lost it, or is
        older than the witness beside it, counts with all that it promised. Raises `LedgerError` if nobody knows what
        that was.
        """
        parts = [terms.use_of(self._ledger, plan) for plan in self._ledger.plans()]
        names = {part.plan.name for part in parts}
        promised: list[OpenedBudget] = []
        live = (store.budgets for store in list(self._watched))
        for budget in merged(self._ledger.others(), *live):
            if budget.ledger == self._ledger.identity:
                if budget.name not in names and not self._ledger.was_removed(budget.name):
                    promised.append(budget)  # a ledger that was restored from an older copy lacks it
                continue
            found = _elsewhere(budget)
            if isinstance(found, terms.PlanUse):
                parts.append(found)
            elif found is not None:
                promised.append(found)
        return terms.total(parts, promised)

    def _was_used(self, other: OpenedBudget) -> bool:
        """Whether something was spent on another budget, as far as anybody can tell."""
        if other.ledger == self._ledger.identity:
            plan = self._ledger.find_plan(other.name)
            return not self._ledger.was_removed(other.name) if plan is None else self._ledger.has_spent(plan)
        found = _elsewhere(other)
        return found.is_used if isinstance(found, terms.PlanUse) else found is not None

    def remove(self) -> None:
        """Remove this budget, on which nothing was ever charged, from its ledger: its name is free again, and no total
        and no warning counts it. Let no process use it meanwhile.

        Raises `PlanMismatch` if something was charged, or may have been.
        """
        stored = self._find()
        if stored is None:
            return
        if self._ledger.is_marked(self.name) or not self._ledger.remove_plan(stored):
            raise PlanMismatch(f"something was charged to the budget {self.name!r}, or it is gone: nothing was removed")
        self._stored = self._plan = self._owner_index = None
        self._lines.clear()

    def close(self) -> None:
        """Close the ledger's connections, and give back unused permits, as the end of the process does."""
        self._ledger.close()
        for line in self._lines.values():
            if line.tickets is not None:
                line.tickets.close()


def _elsewhere(budget: OpenedBudget) -> terms.PlanUse | OpenedBudget | None:
    """A budget of another ledger: its plan with what was spent; itself if nobody can tell; None if it was removed."""
    found: terms.PlanUse | OpenedBudget | None = budget
    with contextlib.suppress(LedgerError, InvalidParameter), contextlib.closing(StoredLedger(budget.url)) as ledger:
        if ledger.identity == budget.ledger and not is_behind(ledger, budget.name):
            plan = ledger.find_plan(budget.name)
            if plan is not None:
                found = terms.use_of(ledger, plan, budget.url)
            elif ledger.was_removed(budget.name):
                found = None
    return found


def different(known: Mapping[str, object], asked: Mapping[str, object]) -> str:
    """The values that are not as asked, in words; "" if all are. Only values that both have are compared."""
    names = [name for name in known if name in asked and known[name] != asked[name]]
    return ", ".join(f"{name} {known[name]!r} (asked: {asked[name]!r})" for name in names)


class FilteredBudget(BaseBudget):
    """Mechanisms and parameters may be chosen after seeing earlier answers; everything together is (epsilon, delta)-DP.

    Feldman and Zrnic's Rényi filter (see `privacy.RenyiFilter`): looser than a plan that is fixed in advance. The
    divergence spent at each order is kept in the ledger and advanced in the transaction of the charge. A request that
    does not fit raises `PrivacyBudgetExceeded` and uses nothing up: a smaller or noisier one may still fit.

    Parameters
    ----------
    orders, failures
        The filter's orders (default: one, the best for the first line that is asked for), and the part of delta that is
        set aside for PTR's delta0. Frozen with the budget.

    All callers share it. ``releases`` does not exist here; ``remaining`` counts further releases of a given line.
    """

    is_filtered = True
    orders: tuple[int, ...]
    _content: str

    def __init__(
        self,
        epsilon: float,
        delta: float,
        ledger: str = "sqlite:///dpicl-budget.db",
        name: str = "default",
        *,
        witness: Where = None,
        orders: tuple[int, ...] = (),
        failures: float = 0.0,
        **policy: Any,
    ) -> None:
        filter_ = RenyiFilter(epsilon, delta, tuple(orders), failures)
        self.failures, self._asked = filter_.failures, tuple(orders)
        self._take(filter_)
        self._names: set[tuple[int, str]] = set()
        if policy.get("scope", "shared") != "shared":
            raise InvalidParameter("scope", policy["scope"], '"shared": all callers share one filter')
        if policy.get("soft_limit") is not None:
            raise InvalidParameter("soft_limit", policy["soft_limit"], "None: a filter has no number of releases")
        super().__init__(filter_.epsilon, filter_.delta, Policy(**policy), ledger, name, witness)

    def _adopt(self, stored: StoredPlan) -> None:
        if not stored.is_filter:
            raise PlanMismatch(f"the budget {self.name!r} has a plan that is fixed in advance: use PrivacyBudget")
        asked = json.loads(self._content)
        if not self._asked:
            del asked["orders"]
        self._refuse_other(json.loads(stored.content), asked)
        self._content, self.orders = stored.content, tuple(json.loads(stored.content)["orders"])
        self._stored = stored

    def _take(self, filter_: RenyiFilter) -> None:
        """Make this filter's parameters the content."""
        self.orders = filter_.orders
        content = {"format": "filter-1", "epsilon": filter_.epsilon, "delta": filter_.delta}
        content |= {"orders": list(filter_.orders), "failures": filter_.failures}
        self._content = json.dumps(content, sort_keys=True)

    def _now(self) -> RenyiFilter:
        stored = self._find()
        return filter_of(self._content, None if stored is None else self._ledger.filter_state(stored.id))

    def declare(self, line: str | None, mechanism: str, rate: float, **_: object) -> None:
        """Nothing to declare: a filter's lines are not fixed in advance."""

    def asked(self, line: str | None, mechanism: str) -> None:
        """Nothing is known of a line in advance."""

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
        vet: object = None,
    ) -> BudgetLine:
        """A line with these parameters. Each of them may differ from call to call.

        ``parameter`` is the mechanism's noise parameter and must be given. ``owners`` must be None: a filter keeps no
        rate, so a rate that follows the number of owners would change with every owner who comes or goes. ``name``
        (default: the mechanism) is the name in receipts and counts. ``vet`` has no meaning here: there is no plan.
        """
        if parameter is None:
            raise InvalidParameter("parameter", None, "the noise of this release: a filter does not choose it")
        if owners is not None:
            bound = "given for PrivacyBudget.filtered (shots would follow the store, and nothing keeps that rate)"
            raise InvalidParameter("rate", None, bound)
        item = PlanLine(mechanism, rate, MAX_COUNT, 1.0, dict(options or {}), parameter)
        name = mechanism if name is None else name
        if not isinstance(name, str) or not name or ":" in name or len(name) > 255:
            raise InvalidParameter("name", name, 'a string of 1 to 255 characters without ":"')
        with self._lock:
            stored = self._find()
            if stored is None:
                if not self._asked:  # before anything is released, and by public parameters
                    order = self._now().order_for(item.line(parameter))
                    self._take(RenyiFilter(self.epsilon, self.delta, (order,), self.failures))
                digest = hashlib.sha256(self._content.encode()).hexdigest()
                state = json.dumps(filter_of(self._content).state())
                stored = self._freeze(self._content, digest, {}, filter_state=state)
            if (stored.id, name) not in self._names:
                self._ledger.add_line(stored.id, name, UNLIMITED)
                self._names.add((stored.id, name))
        self._remember()
        return BudgetLine(self._ledger, self._policy, stored, name, item, None)

    # -- spent and left ------------------------------------------------------------------------------------------------

    def lines(self, principal: str | None = None) -> dict[str, LineState]:
        """Every line that was used, with its number of releases. A filter has no count in advance."""
        stored = self._find()
        spent = {} if stored is None else self._ledger.by_principal(stored.id).get("", {})
        return {name: LineState(count=n, spent=n, remaining=0, mechanism=None) for name, n in spent.items()}

    def spent(self, line: str | None = None, principal: str | None = None) -> int:
        """Releases charged so far, on one line or on all."""
        counts = self.lines()
        if line is not None and line not in counts:
            raise InvalidParameter("line", line, f"one of this budget's lines: {', '.join(counts) or 'none so far'}")
        return sum(state["spent"] for name, state in counts.items() if line in (None, name))

    def remaining(self, line: str | None = None, principal: str | None = None) -> int:
        """Not known: it depends on the releases to come. See `BudgetLine.remaining`."""
        raise InvalidParameter("remaining", None, "asked of a line: a filter's releases differ in cost")

    def epsilon_spent(self, principal: str | None = None) -> float:
        """The epsilon, at delta, of the divergence spent so far; the guarantee for the whole is epsilon."""
        return self._now().epsilon_spent

    def preview(self, n: int = 1, line: str | None = None, principal: str | None = None) -> Preview:
        """Not known without a line's parameters: see `BudgetLine.preview`."""
        raise InvalidParameter("preview", n, "asked of a line: a filter's releases differ in cost")

    def __repr__(self) -> str:
        return f"PrivacyBudget.filtered(epsilon={self.epsilon:g}, delta={self.delta:g}, name={self.name!r})"
