"""A budget without a schedule: the Rényi filter, kept in the ledger."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from langchain_dpicl.budget.base import BaseBudget, Fingerprint
from langchain_dpicl.budget.filters import filter_of
from langchain_dpicl.budget.ledger import Where
from langchain_dpicl.budget.line import BudgetLine
from langchain_dpicl.budget.policy import LineState, Policy, Preview
from langchain_dpicl.budget.renewal import StoredPlan
from langchain_dpicl.budget.schema import UNLIMITED
from langchain_dpicl.errors import InvalidParameter, PlanMismatch
from langchain_dpicl.privacy import PlanLine, RenyiFilter
from langchain_dpicl.privacy.accountant import MAX_COUNT


class FilteredBudget(BaseBudget):
    """Mechanisms and parameters may be chosen after seeing earlier answers; everything together is (epsilon, delta)-DP.

    Feldman and Zrnic's Rényi filter (see `privacy.RenyiFilter`): looser than a plan that is fixed in advance. The
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
        content = {"format": "filter-1", "epsilon": filter_.epsilon, "delta": filter_.delta}
        content |= {"orders": list(filter_.orders), "failures": filter_.failures}
        self._content = json.dumps(content, sort_keys=True)
        self._names: set[str] = set()
        if policy.get("scope", "shared") != "shared":
            raise InvalidParameter("scope", policy["scope"], '"shared": all callers share one filter')
        if policy.get("soft_limit") is not None:
            raise InvalidParameter("soft_limit", policy["soft_limit"], "None: a filter has no number of releases")
        super().__init__(filter_.epsilon, filter_.delta, Policy(**policy), ledger, name, witness)

    def _adopt(self, stored: StoredPlan) -> None:
        if not stored.is_filter:
            raise PlanMismatch(f"the budget {self.name!r} has a plan that is fixed in advance: use PrivacyBudget")
        self._refuse_other(json.loads(stored.content), json.loads(self._content))
        self._stored = stored

    def _now(self) -> RenyiFilter:
        stored = self._find()
        return filter_of(self._content, None if stored is None else self._ledger.filter_state(stored.id))

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
        """A line with these parameters. Each of them may differ from call to call.

        ``parameter`` is the mechanism's noise parameter and must be given. ``owners`` must be None: a filter keeps no
        rate, so a rate that follows the number of owners would change with every owner who comes or goes. ``name``
        (default: the mechanism) is the name in receipts and counts.
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
                digest = hashlib.sha256(self._content.encode()).hexdigest()
                state = json.dumps(filter_of(self._content).state())
                stored = self._freeze(self._content, digest, {}, fingerprint, filter_state=state)
            if name not in self._names:
                self._ledger.add_line(stored.id, name, UNLIMITED)
                self._names.add(name)
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
