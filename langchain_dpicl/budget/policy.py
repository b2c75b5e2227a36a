"""How a budget treats its callers: whose releases it counts, what it replays, when it warns."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import TypedDict

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks

Scope = Literal["shared", "per_principal"]
Replay = bool | Literal["principal"]
OnExhausted = Literal["raise", "zero_shot"]

logger = logging.getLogger("langchain_dpicl.budget")


class SoftLimit(TypedDict):
    """What ``on_soft_limit`` is called with."""

    budget: str
    line: str
    principal: str | None
    spent: int
    count: int
    remaining: int


@dataclass(frozen=True)
class Policy:
    """The parameters of `PrivacyBudget` that are not part of its plan, checked. ``scope`` alone is frozen with it."""

    scope: Scope = "shared"
    replay: Replay = True
    replay_patience: float = 300.0
    keep_queries: bool = False
    on_exhausted: OnExhausted = "raise"
    soft_limit: float | None = None
    on_soft_limit: Callable[[SoftLimit], Any] | None = None

    def __post_init__(self) -> None:
        if self.scope not in ("shared", "per_principal"):
            raise InvalidParameter("scope", self.scope, '"shared" or "per_principal"')
        if self.on_exhausted not in ("raise", "zero_shot"):
            raise InvalidParameter("on_exhausted", self.on_exhausted, '"raise" or "zero_shot"')
        if self.replay != "principal" and not isinstance(self.replay, bool):
            raise InvalidParameter("replay", self.replay, 'True, False or "principal"')
        if not isinstance(self.keep_queries, bool):
            raise InvalidParameter("keep_queries", self.keep_queries, "True or False")
        object.__setattr__(self, "replay_patience", checks.real("replay_patience", self.replay_patience, at_least=0.0))
        if self.soft_limit is not None:
            limit = checks.real("soft_limit", self.soft_limit, above=0.0, at_most=1.0)
            object.__setattr__(self, "soft_limit", limit)
        if self.on_soft_limit is not None and not callable(self.on_soft_limit):
            raise InvalidParameter("on_soft_limit", type(self.on_soft_limit).__name__, "a function of one argument")

    def principal(self, principal: str | None) -> str:
        """Whose counter a request uses: "" where all callers share one. `InvalidParameter` where it is not said."""
        return "" if self.scope == "shared" else _checked(principal, "counts each one's releases")

    def caller(self, principal: str | None) -> str:
        """Who sees what comes of a request: "" where all callers do. `InvalidParameter` where it is not said."""
        if self.scope == "shared" and self.replay == "principal":
            return _checked(principal, "replays an answer to whoever asked for it")
        return self.principal(principal)

    def warn(self, facts: SoftLimit, before: int) -> None:
        """At the charge that crosses the soft limit: a warning in the log, and the callback.

        One charge crosses it, whatever the number of workers, so this happens once per counter; where tokens are
        counted it happens again if those that were never sampled brought the counter back below. A callback that fails
        is logged: the charge stands and must be used.
        """
        if self.soft_limit is None:
            return
        threshold = max(1, math.ceil(self.soft_limit * facts["count"]))
        if not before < threshold <= facts["spent"]:
            return
        logger.warning(
            "the budget %r has spent %d of %d releases of the line %r: %d are left",
            facts["budget"],
            facts["spent"],
            facts["count"],
            facts["line"],
            facts["remaining"],
        )
        if self.on_soft_limit is not None:
            try:
                self.on_soft_limit(facts)
            except Exception:
                logger.exception("on_soft_limit failed; the charge stands")


def _checked(principal: str | None, reason: str) -> str:
    if not isinstance(principal, str) or not principal or len(principal) > 255:
        bound = f"the authenticated caller, a string of 1 to 255 characters (see acting_for): this budget {reason}"
        raise InvalidParameter("principal", principal, bound)
    return principal
