"""A budget without a schedule: the Rényi filter, kept in the ledger."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy.engine import Connection

from langchain_dpicl.budget.base import BaseBudget, Fingerprint, LineState, Preview
from langchain_dpicl.budget.claims import Account, Charge, ChargeRule, DoesNotFit, Spent, read_filter, write_filter
from langchain_dpicl.budget.ledger import Where
from langchain_dpicl.budget.line import BudgetLine
from langchain_dpicl.budget.owner_index import EligibleOwners
from langchain_dpicl.budget.policy import Policy
from langchain_dpicl.budget.renewal import StoredPlan
from langchain_dpicl.budget.schema import ADVICE, UNLIMITED
from langchain_dpicl.errors import InvalidParameter, LedgerError, PlanMismatch, PrivacyBudgetExceeded
from langchain_dpicl.privacy import Line, PlanLine, RenyiFilter, checks
from langchain_dpicl.privacy.accountant import MAX_COUNT


class FilteredBudget(BaseBudget):
    """Mechanisms and parameters may be chosen after seeing earlier answers; everything together is (epsilon, delta)-DP.

    Feldman and Zrnic's Rényi filter (see `privacy.rdp.RenyiFilter`): looser than a plan that is fixed in advance. The
    divergence spent at each order is kept in the ledger and advanced in the transaction of the charge. A request that
    does not fit raises `PrivacyBudgetExceeded` and uses nothing up: a smaller or noisier one may still fit.

    Parameters
    ----------
    orders, failures
        The filter's orders (default: one, the best for this target), and the part of delta that is set aside for
        PTR's delta0. Frozen with the budget.

    All callers share it. ``releases`` does not exist here; ``remaining`` counts further releases of a given line.
    """

    is_filtered = True

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
        self.orders, self.failures = filter_.orders, filter_.failures
        self._names: set[str] = set()
        if policy.get("scope", "shared") != "shared":
            raise InvalidParameter("scope", policy["scope"], '"shared": all callers share one filter')
        if policy.get("soft_limit") is not None:
            raise InvalidParameter("soft_limit", policy["soft_limit"], "None: a filter has no number of releases")
        super().__init__(filter_.epsilon, filter_.delta, Policy(**policy), ledger, name, witness)

    def _adopt(self, stored: StoredPlan) -> None:
        if not stored.is_filter:
            raise PlanMismatch(f"the budget {self.name!r} has a plan that is fixed in advance: use PrivacyBudget")
        frozen, asked = json.loads(stored.content), json.loads(self._content())
        self._refuse_other({key: (frozen.get(key), asked[key]) for key in asked})

    def _content(self) -> str:
        content = {"format": "filter-1", "epsilon": self.epsilon, "delta": self.delta}
        return json.dumps({**content, "orders": list(self.orders), "failures": self.failures}, sort_keys=True)

    def _filter(self, state: str | None) -> RenyiFilter:
        filter_ = RenyiFilter(self.epsilon, self.delta, self.orders, self.failures)
        if state is not None:
            try:
                filter_.restore(json.loads(state))
            except (ValueError, KeyError, TypeError):
                raise LedgerError(f"the ledger's filter cannot be read; {ADVICE}") from None
        return filter_

    def _now(self) -> RenyiFilter:
        stored = self._find()
        return self._filter(None if stored is None else self._ledger.filter_state(stored.id))

    def declare(self, line: str | None, mechanism: str, rate: float, **_: object) -> None:
        """Nothing to declare: a filter's lines are not fixed in advance."""

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
        """A line with these parameters, of which every one may differ from call to call.

        ``parameter`` is the mechanism's noise parameter and must be given. ``owners`` must be None: a filter keeps no
        rate, so one that follows the number of owners would change with every owner who comes or goes. ``name``
        (default: the mechanism) is the name in receipts and counts.
        """
        if parameter is None:
            raise InvalidParameter(
                "parameter", None, "the noise parameter of this release: a filter does not choose it"
            )
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
                content = self._content()
                digest = hashlib.sha256(content.encode()).hexdigest()
                state = json.dumps(self._filter(None).state())
                stored = self._freeze(content, digest, {}, fingerprint, filter_state=state)
            if name not in self._names:
                self._ledger.add_line(stored.id, name, UNLIMITED)
                self._names.add(name)
        if self._to_remember:
            self._remember()
        return FilteredLine(self, stored, name, item)

    # -- spent and left ------------------------------------------------------------------------------------------------

    def lines(self, principal: str | None = None) -> dict[str, LineState]:
        """Every line that was used, with its number of releases. A filter has no count in advance."""
        stored = self._find()
        spent = {} if stored is None else self._ledger.by_principal(stored.id).get("", {})
        return {
            name: LineState(count=number, spent=number, remaining=0, mechanism=None) for name, number in spent.items()
        }

    def spent(self, line: str | None = None, principal: str | None = None) -> int:
        """Releases charged so far, on one line or on all."""
        counts = self.lines()
        if line is not None and line not in counts:
            raise InvalidParameter("line", line, f"one of this budget's lines: {', '.join(counts) or 'none so far'}")
        return sum(state["spent"] for name, state in counts.items() if line in (None, name))

    def remaining(self, line: str | None = None, principal: str | None = None) -> int:
        """Not known: it depends on the releases to come. See `FilteredLine.remaining`."""
        raise InvalidParameter("remaining", None, "asked of a line: a filter's releases differ in cost")

    def epsilon_spent(self, principal: str | None = None) -> float:
        """The epsilon, at delta, of the divergence spent so far; the guarantee for the whole is epsilon."""
        return self._now().epsilon_spent

    def preview(self, n: int = 1, line: str | None = None, principal: str | None = None) -> Preview:
        """Not known without a line's parameters: see `FilteredLine.preview`."""
        raise InvalidParameter("preview", n, "asked of a line: a filter's releases differ in cost")

    def __repr__(self) -> str:
        return f"PrivacyBudget.filtered(epsilon={self.epsilon:g}, delta={self.delta:g}, name={self.name!r})"


class FilterRule(ChargeRule):
    """A charge advances the filter by its units."""

    whole_plan = True

    def __init__(self, line: FilteredLine) -> None:
        self._line = line

    def spend(self, connection: Connection, charges: Sequence[Charge], places: Sequence[int]) -> Spent:
        """Advance the filter, and write its epsilon into each charge."""
        line, units = self._line, sum(charge.units for charge in charges)
        before = read_filter(connection, line.plan_id)
        filter_ = line._budget._filter(before)
        if not filter_.spend(line._line(units)):
            raise DoesNotFit
        after = json.dumps(filter_.state())
        write_filter(connection, line.plan_id, after)
        epsilon, left = filter_.epsilon_spent, filter_.left(line._line(1))
        return Spent([replace(charge, epsilon=epsilon, left=left) for charge in charges], before, after)


class FilteredLine(BudgetLine):
    """Releases of one kind, charged to a filter.

    Tokens may be charged as ``units``, which the filter advances by. It gives none back: ``unused`` must be 0.
    """

    reopens = False

    def __init__(self, budget: FilteredBudget, stored: StoredPlan, name: str, item: PlanLine) -> None:
        super().__init__(budget.name, budget._ledger, budget._policy, stored, name, item)
        self._budget = budget

    def _where(self) -> tuple[str, ...]:
        item = self.plan_line
        fixed = json.dumps(dict(item.options), sort_keys=True)
        return self._digest, self.name, item.mechanism, item.rate.hex(), item.parameter.hex(), fixed

    def _line(self, count: int) -> Line:
        return self.plan_line.line(self.parameter, checks.whole("count", count, at_most=MAX_COUNT))

    def _rule(self, owners: Sequence[EligibleOwners | None] | None, count: int) -> ChargeRule:
        super()._rule(owners, count)
        return FilterRule(self)

    def _exceeded(self, account: Account, needed: int) -> PrivacyBudgetExceeded:
        return PrivacyBudgetExceeded(
            f"the filter {self._budget_name!r} has room for {self.remaining()} {self._unit} of this kind "
            f"({self._words}), and {needed} are needed: nothing was released and nothing charged; a smaller or noisier "
            "request may fit"
        )

    @property
    def _target(self) -> tuple[float, float]:
        return self._budget.epsilon, self._budget.delta

    def _may_return(self, charge: Charge) -> int:
        return 0

    def _epsilon_of(self, charge: Charge, spent: int) -> float:
        return self._budget.epsilon if charge.epsilon is None else charge.epsilon

    def _left_after(self, charge: Charge, spent: int) -> int:
        return charge.left or 0

    def remaining(self, principal: str | None = None) -> int:
        """How many further releases of this kind fit, at least."""
        return self._budget._now().left(self._line(1))

    def preview(self, n: int = 1) -> Preview:
        """The effect of ``n`` further releases of this kind. Charges nothing."""
        filter_ = self._budget._now()
        fits = filter_.spend(self._line(n))
        left = filter_.left(self._line(1))
        return {"releases": n, "fits": fits, "epsilon_after": filter_.epsilon_spent, "remaining_after": left}
