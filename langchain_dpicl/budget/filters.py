"""What a release costs in a budget without a schedule: the Rényi filter that the ledger keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy.engine import Connection

from langchain_dpicl.budget.claims import Charge, ChargeRule, DoesNotFit, read_filter, write_filter
from langchain_dpicl.budget.schema import ADVICE
from langchain_dpicl.errors import LedgerError
from langchain_dpicl.privacy import PlanLine, RenyiFilter


def filter_of(content: str, state: str | None = None) -> RenyiFilter:
    """The filter of a stored budget's content, in a state that the ledger holds (None: nothing is spent)."""
    about = json.loads(content)
    filter_ = RenyiFilter(about["epsilon"], about["delta"], tuple(about["orders"]), about["failures"])
    if state is not None:
        try:
            filter_.restore(json.loads(state))
        except (ValueError, KeyError, TypeError):
            raise LedgerError(f"the ledger's filter cannot be read; {ADVICE}") from None
    return filter_


class FilterRule(ChargeRule):
    """A charge advances the filter by its units, in the charge's transaction."""

    def __init__(self, content: str, line: PlanLine) -> None:
        self._content, self._line = content, line

    def spend(
        self, connection: Connection, charges: Sequence[Charge], places: Sequence[int]
    ) -> tuple[list[Charge], str, str]:
        """Advance the filter, and write its epsilon into each charge."""
        line, plan_id = self._line, charges[0].plan_id
        before = read_filter(connection, plan_id)
        filter_ = filter_of(self._content, before)
        if not filter_.spend(line.line(line.parameter, sum(charge.units for charge in charges))):
            raise DoesNotFit
        after = json.dumps(filter_.state())
        write_filter(connection, plan_id, after)
        epsilon, left = filter_.epsilon_spent, filter_.left(line.line(line.parameter))
        return [replace(charge, epsilon=epsilon, left=left) for charge in charges], before, after
