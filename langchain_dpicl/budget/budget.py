"""PrivacyBudget: epsilon and delta in, a counted number of releases out."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import WeakSet

from langchain_dpicl.budget import terms
from langchain_dpicl.budget.ledger import Ledger
from langchain_dpicl.budget.line import BudgetLine, parse_release_id
from langchain_dpicl.budget.opening import Where
from langchain_dpicl.budget.schema import UNLIMITED, StoredPlan
from langchain_dpicl.budget.stored import ReleaseRow, StoredLedger
from langchain_dpicl.budget.terms import (
    LineState,
    OnExhausted,
    Policy,
    Preview,
    Receipt,
    Replay,
    Scope,
    SoftLimit,
    TicketReport,
    Total,
)
from langchain_dpicl.budget.tickets import KeyMissing, OwnerMarks, TicketLine
from langchain_dpicl.errors import (
    DPICLError,
    InvalidParameter,
    PlanIncomplete,
    PlanMismatch,
    PrivacyWarning,
)
from langchain_dpicl.privacy import LineRequest, PlanLine, PrivacyPlan, checks
from langchain_dpicl.privacy.lines import family_of
from langchain_dpicl.privacy.mechanism import Options
from langchain_dpicl.private import Accounting, Closed
from langchain_dpicl.sql import NAME, OwnLock, is_name
from langchain_dpicl.store import ExemplarStore
from langchain_dpicl.store.base import MarkOf
from langchain_dpicl.store.notes import OpenedBudget, merged

Releases = int | Mapping[str, int | LineRequest]

_LIBRARIES = ("langchain_dpicl", "langchain_core")


class PrivacyBudget(Accounting, Closed):
    """A target (epsilon, delta) for ALL releases together, and the durable ledger that enforces it.

    Parameters
    ----------
    epsilon, delta
        The guarantee: everything that is ever released on this budget is (epsilon, delta)-differentially private with
        respect to adding or removing one owner.
    releases
        The number of answers (for the mechanism "tokens": of tokens) of the budget. The noise is calibrated so that
        exactly this many fit. One number, or for several kinds of answers a mapping of line names (without ":") to
        numbers or `LineRequest`s.
    ledger
        A database URL. SQLite by default; share one ledger between workers.
    witness
        Where a second record is kept that tells when the ledger was lost or rolled back: a path or a database URL.
        Default: beside the ledger (``budget.db.witness``); it then cannot see that both were restored together. See
        `budget.witness`, and the chapter on backup.
    key_file
        With ``tickets``, where the secret key of the owners' marks is kept for a store in memory, which has no place
        for it. Default: ``budget.db.key`` beside a ledger in a file (mode 600). Needed for a ledger on a server.
        Without the key the plan refuses every question: see the chapter on backup.
    name
        The plan's name in the ledger.
    tickets
        True: owners pay, each for itself. Then ``releases`` counts the queries that ONE OWNER may be eligible for, the
        number of queries has no end, and an owner without tickets is left out from then on, which nobody can see.
        Needs a selector with a ``threshold``. The guarantee is the same (`budget.tickets` has the theorem). Frozen with
        the plan.
    scope
        ``"shared"``: one counter for all callers, who may collude. ``"per_principal"``: one counter for each caller;
        the guarantee then holds for each caller's releases on their own, if callers do not collude. Frozen with the
        plan.
    replay, replay_patience
        An equal query on the same line is answered from the ledger at no cost (post-processing of a released answer).
        It waits at most so many seconds while another caller's equal query is being answered. None of these choices
        costs an owner privacy. They decide what callers who share a counter see of each other. ``True``: an equal
        question gets the earlier answer, its number and the time of its charge, waits if that answer is not ready, and
        is answered even when the budget is spent and unknown questions are refused. ``"principal"``: so for the caller
        who asked first (see `acting_for`; needed then); for everybody else the question is new, in its cost, its time
        and its refusal. ``False``: every question is charged. In all cases callers see how many releases (or tokens, so
        how long an answer was) the shared counter has. With ``scope="per_principal"`` callers share no counter and no
        answers, so ``True`` and ``"principal"`` are the same.
    keep_queries
        Keep the queries' texts in the receipts, instead of keyed hashes.
    on_exhausted
        The action of a chain when the releases are spent: ``"raise"`` `PrivacyBudgetExceeded`, or give the public
        ``"zero_shot"`` answer, marked as such.
    soft_limit, on_soft_limit
        A share of the releases (say 0.8): the charge that reaches it logs a warning and calls ``on_soft_limit``.
    quota
        The most new answers that one principal (`acting_for`) gets of each line of a budget that callers share, or a
        mapping of names to such numbers: else `QuotaExceeded`, at no cost. No part of guarantee or plan: it may change.
    accept_noise
        Freeze the plan even if its noise overturns an answer on which all expected outputs agree in more than one of
        ten releases. Otherwise the first release raises `InfeasiblePlan`, which names what helps, and charges nothing.
        Without it, too, a `PrivacyWarning` names a plan that leaves little of what the records bring.
    record_principals
        Keep in the ledger who asked for each release, also if all callers share one counter: for ``dpicl report``. No
        receipt that a caller gets shows it. Callers are people too, so it is off unless asked for.

    The plan is completed and frozen at first use, when every line's sampling rate and mechanism are known; from then
    on the ledger refuses other parameters under this name (`PlanMismatch`). Every release is charged before the first
    member is called, and nothing is ever refunded. (A line of tokens charges an answer's greatest length, and does not
    count the tokens that were never sampled: see `BudgetLine.record`.)
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        releases: Releases,
        ledger: str = "sqlite:///dpicl-budget.db",
        name: str = "default",
        *,
        witness: Where = None,
        key_file: str | os.PathLike[str] | None = None,
        tickets: bool = False,
        scope: Scope = "shared",
        replay: Replay = True,
        replay_patience: float = 300.0,
        keep_queries: bool = False,
        on_exhausted: OnExhausted = "raise",
        soft_limit: float | None = None,
        on_soft_limit: Callable[[SoftLimit], Any] | None = None,
        quota: int | Mapping[str, int] | None = None,
        accept_noise: bool = False,
        record_principals: bool = False,
    ) -> None:
        self.epsilon = checks.positive("epsilon", epsilon)
        self.delta = checks.open_unit("delta", delta)
        self.releases: int | dict[str, int]
        # Every line that somebody described, and its values that somebody chose. The others may still change.
        self._declared: dict[str, tuple[LineRequest, dict[str, object]]] = {}
        if isinstance(releases, Mapping):
            self.releases = {}
            for line, value in releases.items():
                if not is_name(line) or ":" in line:
                    raise InvalidParameter("releases", line, f'{NAME}, and none ":"')
                if isinstance(value, LineRequest):
                    chosen = {key: found for key, found in terms.values_of(value, {}).items() if found is not None}
                    self._declared[line] = value, chosen
                    value = value.count
                self.releases[line] = checks.whole(f"releases[{line!r}]", value)
            if not releases:
                raise InvalidParameter("releases", {}, "at least one line")
        else:
            self.releases = checks.whole("releases", releases)
        self._given = dict(self._declared)
        if not isinstance(tickets, bool):
            raise InvalidParameter("tickets", tickets, "True or False")
        if tickets and soft_limit is not None:
            raise InvalidParameter("soft_limit", soft_limit, "None if owners pay with tickets: there is no end")
        self.tickets = tickets
        if not isinstance(accept_noise, bool):
            raise InvalidParameter("accept_noise", accept_noise, "True or False")
        self.accept_noise = accept_noise
        self._vets: dict[str, Callable[[PlanLine], None]] = {}
        own = on_exhausted, soft_limit, on_soft_limit, quota, record_principals
        self._policy = Policy(scope, replay, replay_patience, keep_queries, *own)
        if not is_name(name):
            raise InvalidParameter("name", name, NAME)
        self.name = name
        self.scope = self._policy.scope
        self.on_exhausted = self._policy.on_exhausted
        self.replay = self._policy.replay
        self.keep_queries = self._policy.keep_queries
        self._ledger = Ledger(ledger, witness=witness, key_file=key_file)
        self._lock = OwnLock()
        self._plan: PrivacyPlan | None = None
        self._lines: dict[str, BudgetLine] = {}
        self._stored: StoredPlan | None = None
        self._marks: OwnerMarks | None = None
        self._watched: WeakSet[ExemplarStore] = WeakSet()
        self._to_remember: list[ExemplarStore] = []
        self._find()

    @staticmethod
    def open(
        name: str = "default",
        ledger: str = "sqlite:///dpicl-budget.db",
        *,
        witness: Where = None,
        key_file: str | os.PathLike[str] | None = None,
        **policy: Any,
    ) -> PrivacyBudget:
        """Open the budget that a ledger holds under this name, with nothing else known. Never makes a ledger.

        ``policy`` may set ``replay`` and the parameters after it in the constructor; the rest is as it was frozen.
        Raises `LedgerError` if there is no ledger, `InvalidParameter` if it has no such plan. With
        ``witness=UNWATCHED`` the budget can only be read, whatever its witness says, and charges nothing.
        """
        with contextlib.closing(StoredLedger(ledger)) as reader:
            stored = reader.named(name)
        plan = terms.plan_of(stored)
        releases: Releases = {line: item.count for line, item in plan.lines.items()}
        if len(plan.lines) == 1 and all(item.mechanism == line for line, item in plan.lines.items()):
            releases = next(iter(plan.lines.values())).count  # made with one number, not with a mapping
        return PrivacyBudget(
            plan.epsilon,
            plan.delta,
            releases,
            ledger,
            name,
            witness=witness,
            key_file=key_file,
            tickets=bool(stored.tickets),
            scope=cast("Scope", stored.scope),
            **policy,
        )

    @property
    def plan(self) -> PrivacyPlan | None:
        """The frozen plan; None before the first use."""
        self._find()
        return self._plan

    @property
    def is_frozen(self) -> bool:
        """True if the ledger holds this budget. Its content is then fixed, however a store grows or shrinks."""
        return self._find() is not None

    @property
    def public_owners(self) -> int | None:
        """The number of owners from which the frozen plan's rates were chosen, the most of all lines.

        None if the plan does not say.
        """
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
        plan = terms.plan_of(stored)
        counts: object = {name: line.count for name, line in plan.lines.items()}
        if isinstance(self.releases, int) and len(plan.lines) == 1:
            counts = next(iter(plan.lines.values())).count
        self._refuse_other(
            {
                "epsilon": plan.epsilon,
                "delta": plan.delta,
                "scope": stored.scope,
                "releases": counts,
                "tickets": bool(stored.tickets),
            },
            vars(self),
        )
        for name, (_, chosen) in self._given.items():
            self._refuse_other(terms.values_of(plan.lines[name]), chosen)
        marks = OwnerMarks(self._ledger, stored.id)  # of all lines: each of them has tickets of its own
        for name, line in plan.lines.items():
            tickets = TicketLine(marks, line.count) if self.tickets else None
            self._lines[name] = BudgetLine(self._ledger, self._policy, stored, name, line, plan, tickets)
        self._plan = plan
        self._marks = marks
        self._stored = stored  # at last: `_find` looks at it without the lock

    def _refuse_other(self, frozen: Mapping[str, object], asked: Mapping[str, object]) -> None:
        """Raise `PlanMismatch` if frozen values are not as asked; it names them."""
        if words := terms.different(frozen, asked):
            raise PlanMismatch(
                f"the budget {self.name!r} was frozen at first use with {words}; use another name for another plan "
                "(both then count: their losses add up)"
            )

    def declare(
        self,
        line: str | None,
        mechanism: str,
        rate: float,
        *,
        rate_is_explicit: bool = False,
        owners: int | None = None,
        options: Options | None = None,
        vet: Callable[[PlanLine], None] | None = None,
    ) -> None:
        """Describe a line, when the chain that uses it is built. Charges and freezes nothing.

        ``line`` may be None if the budget has one. ``owners``: from how many the rate was chosen. ``options`` are
        those that somebody chose: the rest is filled in when the plan is solved, and ``vet`` may then refuse the line
        by an error, before the plan is frozen (unless it is to ``accept_noise``). `PlanMismatch` if the line was
        declared or frozen with another mechanism, with another value of an option, or with another explicit rate.
        """
        with self._lock:
            is_new = self._find() is None
            given = dict(options or {})
            stated = {**family_of(mechanism).undecided(), **given}
            asked = LineRequest(mechanism, rate, 1, options=stated, owners=owners if is_new else None)
            chosen = {key: terms.values_of(asked)[key] for key in ("mechanism", *map(terms.option_name, given))}
            if rate_is_explicit:
                chosen["rate"] = asked.rate
            name = self._name(line, mechanism)
            if not is_new:
                if rate_is_explicit and owners is not None:
                    chosen["owners"] = owners
                self._refuse_other(terms.values_of(self._lines[name].plan_line), chosen)
                return
            request, before = self._declared.get(name, (asked, chosen))
            if words := terms.different(before, chosen):
                raise PlanMismatch(f"the line {name!r} was declared with {words}")
            if rate_is_explicit:
                public = asked.owners if request.owners is None else request.owners  # a number that is public stays
                request = replace(request, rate=asked.rate, owners=public)
            latest = {key: asked.options[key] for key in given if key in asked.options}
            request = replace(request, options={**request.options, **latest})
            self._declared[name] = request, before | chosen
            if vet is not None:
                self._vets[name] = vet

    def line(
        self,
        mechanism: str,
        rate: float,
        *,
        name: str | None = None,
        rate_is_explicit: bool = False,
        owners: int | None = None,
        options: Options | None = None,
        vet: Callable[[PlanLine], None] | None = None,
    ) -> BudgetLine:
        """One line of the plan, for a mechanism at a sampling rate; completes and freezes the plan at first use.

        ``name`` is needed if the budget has several lines. If the ledger already holds the plan, its rate stands, and
        so does the number of ``owners`` from which it was chosen (`PlanLine.owners`), however many there are by now; a
        rate that the caller fixed explicitly must agree with it, and so must every option given. Raises
        `PlanIncomplete` while another line is not declared, `PlanMismatch`, `InfeasiblePlan`, `LedgerError`; none of
        them costs anything.
        """
        stated = {**family_of(mechanism).left_out(), **(options or {})}  # whoever uses the noise says what for
        about: dict[str, Any] = {"rate_is_explicit": rate_is_explicit, "owners": owners, "options": stated}
        with self._lock:
            self.declare(name, mechanism, rate, vet=vet, **about)
            if self._stored is None:
                requests = self._requests()
                plan = PrivacyPlan.solve(epsilon=self.epsilon, delta=self.delta, lines=requests)
                for each, refuse in self._vets.items():
                    if not self.accept_noise:
                        refuse(plan.lines[each])
                stored = self._ledger.store_plan(
                    self.name,
                    plan.to_json(),
                    plan.digest,
                    {line: UNLIMITED if self.tickets else request.count for line, request in requests.items()},
                    scope=self.scope,
                    tickets=self.tickets,
                )
                self._adopt(stored)
                self.declare(name, mechanism, rate, **about)  # the plan may be one that another worker stored first
        self._remember()
        return self._lines[self._name(name, mechanism)]

    def asked(self, line: str | None, mechanism: str) -> LineRequest | None:
        """A line as it is frozen, or as it was declared so far; None if nobody has described it."""
        with self._lock:
            name = self._name(line, mechanism)
            if self._find() is not None:
                return self._lines[name].plan_line
            return self._declared[name][0] if name in self._declared else None

    def share(self, line: str | None, mechanism: str) -> tuple[float, float, int]:
        """About what a line has if its plan were its own: epsilon, delta, and its releases.

        Lines of one plan share its loss by their weights. Losses add up like variances, so epsilon by the root.
        """
        name = self._name(line, mechanism)
        counts = {each or mechanism: count for each, count in self._counts().items()}
        weights = {each: self._declared[each][0].weight if each in self._declared else 1.0 for each in counts}
        return self.epsilon * math.sqrt(weights[name] / sum(weights.values())), self.delta, counts[name]

    def _requests(self) -> dict[str, LineRequest]:
        """Every line, complete. `PlanIncomplete` names the lines that nobody has declared."""
        counts = self._counts()
        missing = [name for name in counts if name not in self._declared]
        if missing:
            raise PlanIncomplete(
                f"the plan is solved for all its lines, and nothing has declared {', '.join(missing)}: build every "
                "chain before the first release (a DPAggregate declares its line), call budget.declare(line, "
                "mechanism, rate), or give releases={line: LineRequest(...)}; nothing was charged"
            )
        paying = sum(line.family.release_delta > 0.0 for line, _ in self._declared.values())
        found = {}
        for name, (line, stated) in self._declared.items():
            choices = line.family.chosen(self.delta, line.rate, counts[name], paying)
            open_ones = {key: value for key, value in choices.items() if terms.option_name(key) not in stated}
            found[name] = replace(line, count=counts[name], options={**line.options, **open_ones})
        return found

    def _counts(self) -> dict[str, int]:
        """Every line's releases. One number means one line, named after its mechanism ("" until it is declared)."""
        if isinstance(self.releases, dict):
            return self.releases
        return dict.fromkeys([*self._lines] or [*self._declared] or [""], self.releases)

    def _name(self, line: str | None, mechanism: str | None = None) -> str:
        """The name of a line. None means the only line; `InvalidParameter` if there are several."""
        names = [name or mechanism or "" for name in self._counts()]
        if len(names) == 1 and (line is None or (line == mechanism and isinstance(self.releases, int))):
            return names[0]
        if line is None or line not in names:
            known = ", ".join(names) or "none is declared yet"
            raise InvalidParameter("line", line, f"one of this budget's lines: {known}")
        return line

    # -- spent and left ------------------------------------------------------------------------------------------------

    def _states(self, principal: str | None) -> dict[str, LineState]:
        """`lines`, and "" for a line without a name."""
        counter = self._policy.principal(principal)
        stored = self._find()
        counts = self._counts()
        if stored is None:
            spent = dict.fromkeys(counts, 0)
            mechanisms = {name: asked.mechanism for name, (asked, _) in self._declared.items()}
        else:
            spent = self._ledger.spent(stored.id, counter)
            mechanisms = {name: line.mechanism for name, line in self._lines.items()}
        return {
            name: LineState(
                count=counts[name],
                spent=number,
                remaining=None if self.tickets else counts[name] - number,
                mechanism=mechanisms.get(name),
            )
            for name, number in spent.items()
        }

    def lines(self, principal: str | None = None) -> dict[str, LineState]:
        """Every line: its count, its releases spent and left, and its mechanism (None until somebody declares it).

        A budget of one number of releases has no line before a chain is bound to it.
        """
        return {name: state for name, state in self._states(principal).items() if name}

    def spent(self, line: str | None = None, principal: str | None = None) -> int:
        """Releases charged so far, by all workers.

        ``line`` is needed if the budget has several, ``principal`` if it counts each caller's releases.
        """
        return self._states(principal)[self._name(line)]["spent"]

    def remaining(self, line: str | None = None, principal: str | None = None) -> int | None:
        """Releases left; None if owners pay with tickets: there is no end."""
        return self._states(principal)[self._name(line)]["remaining"]

    def epsilon_spent(self, principal: str | None = None) -> float:
        """Upper bound on epsilon, at the plan's delta, for the releases charged so far on all lines; 0 before any.

        With ``scope="per_principal"``: of one principal's releases, if callers do not collude. If owners pay with
        tickets: of an owner who paid for every query, at most with all its tickets.
        """
        counts = {name: state["spent"] for name, state in self._states(principal).items()}
        return 0.0 if self._plan is None else self._plan.spent(self._plan.at_most(counts))

    def preview(self, n: int = 1, line: str | None = None, principal: str | None = None) -> Preview:
        """The effect of ``n`` further releases. Charges nothing. Before first use: the whole plan's epsilon."""
        checks.whole("n", n)
        states = self._states(principal)
        name = self._name(line)
        left = states[name]["remaining"]
        fits = left is None or n <= left
        further = n if fits else 0
        counts = {each: state["spent"] for each, state in states.items()}
        counts[name] += further
        return {
            "releases": n,
            "fits": fits,
            "epsilon_after": self.epsilon if self._plan is None else self._plan.spent(self._plan.at_most(counts)),
            "remaining_after": None if left is None else left - further,
        }

    def principals(self) -> dict[str, dict[str, int]]:
        """The releases of each principal on each line. If all callers share one counter, of those with a quota."""
        stored = self._find()
        found = {} if stored is None else self._ledger.by_principal(stored.id)
        return {principal: spent for principal, spent in sorted(found.items()) if principal}

    def quota_of(self, principal: str | None) -> tuple[int | None, dict[str, int]]:
        """The most answers that a caller gets of each line (None: no limit), and what it has taken of them."""
        most = self._policy.most(principal)
        taken = {} if most is None else self.principals()
        return most, taken.get(principal or "", {})

    def private_ticket_report(self) -> TicketReport:
        """The numbers of owners by their used tickets. PRIVATE, for the deployer alone.

        Show no part of it to callers, publish none, and choose nothing public by it.
        """
        if not self.tickets:
            raise InvalidParameter("tickets", False, "asked for on a budget whose owners pay with them")
        self._find()
        found: TicketReport = {}
        for name, line in self._lines.items():
            assert line.tickets is not None
            found[name] = {
                who: self._ledger.run(partial(line.tickets.report, counter_id=counter), "note")
                for who, counter in self._ledger.counters(line.plan_id, name).items()
                if bool(who) != (self.scope == "shared")  # else it is a quota's
            }
        return found

    # -- stores --------------------------------------------------------------------------------------------------------

    def watch(self, store: ExemplarStore) -> None:
        """Use this budget with a store.

        An owner whom the store forgets from now on leaves the ledger too, with its tickets. A chain on this budget does
        so when it is built. The store keeps the budget. At the first release the store remembers the budget, and a
        `PrivacyWarning` names others on the same data on which something was spent.
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
        if stored is None or self._marks is None:
            return lambda: None
        end = self._marks.leave(keys, mark_of)
        if end is None:
            raise KeyMissing(self.name)
        return end

    def _remember(self) -> None:
        """Have the stores remember this budget, whose plan is frozen. Warn of others on the same data.

        A budget whose owners pay meets each store's key: `LedgerError` if that is not the key of its plan.
        """
        stores = list(self._to_remember)
        if self.tickets and self._marks is not None:
            for store in stores:
                self._marks.key_for(store)
        if not stores:
            return
        place = self._ledger.place
        if place is None:  # it ends with this process, and so does what is known of it
            known = merged(*(store.budgets for store in stores))
        else:
            opened = OpenedBudget(self._ledger.identity, place, self.name, self.epsilon, self.delta)
            known = merged(*(store.remember_budget(opened) for store in stores))
        self._ledger.note_others(known)
        here = {self._ledger.identity: "this ledger"}
        names = {f"{other.name!r} in {here.get(other.ledger, other.url)}" for other in known if self._was_used(other)}
        if not all(store.remembers for store in stores):  # it may be the data of any budget of this ledger
            names |= {
                f"{plan.name!r} in this ledger"
                for plan in self._ledger.plans()
                if plan.name != self.name and self._ledger.has_spent(plan)
            }
        with self._lock:  # now they have
            self._to_remember = [store for store in self._to_remember if store not in stores]
        if names:
            frame = sys._getframe()
            level = 1  # of the first line that is neither this package's nor LangChain's
            while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
                frame = frame.f_back
                level += 1
            warnings.warn(
                f"the budget {self.name!r} is used with data on which other budgets were opened: "
                f"{', '.join(sorted(names))}. Their losses add up, and no receipt of one counts another's: give an "
                "owner one budget, or read PrivacyBudget.total()",
                PrivacyWarning,
                stacklevel=level,
            )

    # -- receipts ------------------------------------------------------------------------------------------------------

    def receipt(self, release_id: str, principal: str | None = None) -> Receipt | None:
        """The receipt of an earlier release of this budget, from the ledger; None if there is none.

        With ``principal`` only if it is that principal's; a shared budget does not keep whose it is, so with
        ``replay="principal"`` it refuses to say (`InvalidParameter`).
        """
        if principal is not None and self.scope == "shared" and self.replay == "principal":
            raise InvalidParameter("principal", principal, "None: a shared budget does not keep whose a receipt is")
        stored = self._find()
        known = parse_release_id(release_id)
        if stored is None or known is None or known[0] != self.name:
            return None
        _, line, counter, number = known
        found = self._ledger.receipt(stored.id, line, number, counter)
        if found is None or (principal is not None and self.scope == "per_principal" and found[1] != principal):
            return None
        return terms.read_receipt(found[0])

    def latest(self, last: int = 200, principal: str | None = None) -> tuple[list[ReleaseRow], int]:
        """The latest charges of all callers or of one principal, the oldest first, and the number of all."""
        counter = self._policy.principal(principal)
        stored = self._find()
        if stored is None:
            return [], 0
        return self._ledger.latest(stored.id, counter, checks.whole("last", last))

    # -- other plans on the same data ----------------------------------------------------------------------------------

    def total(self) -> Total:
        """The loss of all plans of this ledger and of every budget that its stores remember, in whatever ledger.

        Another ledger is opened to read what was spent there. A budget whose ledger cannot be read, has lost it, or is
        older than the witness beside it, counts with all that it promised. Raises `LedgerError` if nobody knows what
        that was.
        """
        parts = [terms.use_of(self._ledger, plan) for plan in self._ledger.plans()]
        names = {part.plan.name for part in parts}
        promised: list[OpenedBudget] = []
        for budget in merged(self._ledger.others(), *(store.budgets for store in list(self._watched))):
            if budget.ledger == self._ledger.identity:
                if budget.name not in names and not self._ledger.was_removed(budget.name):
                    promised.append(budget)  # a ledger that was restored from an older copy lacks it
                continue
            found = terms.elsewhere(budget)
            if isinstance(found, terms.PlanUse):
                parts.append(found)
            elif found is not None:
                promised.append(found)
        return terms.total(parts, promised)

    def _was_used(self, other: OpenedBudget) -> bool:
        """True if something was spent on another budget, as far as anybody can tell."""
        if other.ledger == self._ledger.identity:
            plan = self._ledger.find_plan(other.name)
            if plan is None:
                return not self._ledger.was_removed(other.name)
            return self._ledger.has_spent(plan)
        found = terms.elsewhere(other)
        return found.is_used if isinstance(found, terms.PlanUse) else found is not None

    def remove(self) -> None:
        """Remove this budget, on which nothing was ever charged, from its ledger.

        Its name is free again, and no total and no warning counts it. Let no process use it meanwhile. Raises
        `PlanMismatch` if something was charged, or may have been.
        """
        stored = self._find()
        if stored is None:
            return
        if self._ledger.is_marked(self.name) or not self._ledger.remove_plan(stored):
            raise PlanMismatch(f"something was charged to the budget {self.name!r}, or it is gone: nothing was removed")
        self._stored = self._plan = self._marks = None
        self._lines.clear()

    def close(self) -> None:
        """Close the ledger's connections."""
        self._ledger.close()

    def __repr__(self) -> str:
        try:
            if self.scope == "per_principal":
                spent = f"by {len(self.principals())} principals"
            else:
                counts = {name: state["spent"] for name, state in self._states(None).items()}
                spent = str(counts if len(counts) > 1 else sum(counts.values()))
        except DPICLError:  # showing an object must not fail
            spent = "?"
        return (
            f"PrivacyBudget(epsilon={self.epsilon:g}, delta={self.delta:g}, releases={self.releases}, "
            f"name={self.name!r}, spent={spent})"
        )
