"""How a budget treats its callers (the counter of each, replay, the soft limit), and the state it tells them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import TypedDict

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks

Scope = Literal["shared", "per_principal"]
Replay = bool | Literal["principal"]
OnExhausted = Literal["raise", "zero_shot"]

_CHOICES: dict[str, tuple[object, ...]] = {
    "scope": ("shared", "per_principal"),
    "on_exhausted": ("raise", "zero_shot"),
    "replay": (True, False, "principal"),
    "keep_queries": (True, False),
}


class SoftLimit(TypedDict):
    """The argument of ``on_soft_limit``."""

    budget: str
    line: str
    principal: str | None
    spent: int
    count: int
    remaining: int


class LineState(TypedDict):
    """A line of the budget as it stands."""

    count: int
    """Its releases in all; if owners pay with tickets, the tickets of each owner."""
    spent: int
    remaining: int | None
    """None if owners pay with tickets: the line has no end."""
    mechanism: str | None


class Preview(TypedDict):
    """The effect of ``n`` further releases."""

    releases: int
    fits: bool
    epsilon_after: float
    remaining_after: int | None


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
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                raise InvalidParameter(name, value, " or ".join(map(repr, choices)))
        object.__setattr__(self, "replay_patience", checks.real("replay_patience", self.replay_patience, at_least=0.0))
        if self.soft_limit is not None:
            limit = checks.real("soft_limit", self.soft_limit, above=0.0, at_most=1.0)
            object.__setattr__(self, "soft_limit", limit)
        if self.on_soft_limit is not None and not callable(self.on_soft_limit):
            raise InvalidParameter("on_soft_limit", type(self.on_soft_limit).__name__, "a function of one argument")

    def principal(self, principal: str | None) -> str:
        """The key of a request's counter: "" if all callers share one. `InvalidParameter` if no principal is set."""
        return "" if self.scope == "shared" else _checked(principal, "counts each one's releases")

    def caller(self, principal: str | None) -> str:
        """The caller who sees the answer to a request: "" if all callers do. `InvalidParameter` if none is set."""
        if self.scope == "shared" and self.replay == "principal":
            return _checked(principal, "replays an answer to the caller who asked for it")
        return self.principal(principal)


def _checked(principal: str | None, reason: str) -> str:
    if not isinstance(principal, str) or not principal or len(principal) > 255:
        bound = f"the authenticated caller, a string of 1 to 255 characters (see acting_for): this budget {reason}"
        raise InvalidParameter("principal", principal, bound)
    return principal
