"""The plan that an evaluation's private answers stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import PrivacyPlan, checks
from langchain_dpicl.privacy.accountant import MAX_COUNT
from langchain_dpicl.privacy.lines import LineRequest


@dataclass(frozen=True)
class Schedule:
    """How many owners, members and releases there are, and for which epsilons noise is solved.

    ``shots`` is the expected number of owners in a member's prompt, so the rate is members * shots / owners.
    ``few_shots`` is how many examples the prompts have that are not private, for comparison.
    """

    owners: int
    members: int
    shots: int
    releases: int
    delta: float
    epsilons: Sequence[float]
    few_shots: int = 4

    def __post_init__(self) -> None:
        for name in ("owners", "shots"):
            checks.whole(name, getattr(self, name))
        checks.whole("members", self.members, at_least=2)
        checks.whole("few_shots", self.few_shots, at_most=self.owners)
        checks.whole("releases", self.releases, at_most=MAX_COUNT)
        checks.open_unit("delta", self.delta)
        if not self.epsilons:
            raise InvalidParameter("epsilon", self.epsilons, "at least one number")
        for epsilon in self.epsilons:
            checks.real("epsilon", epsilon, above=0.0, at_most=1000.0)
        if self.members * self.shots > self.owners:
            raise InvalidParameter("shots", self.shots, f"members * shots at most the number of owners, {self.owners}")

    @property
    def rate(self) -> float:
        """An owner's chance to take part in one release."""
        return self.members * self.shots / self.owners

    @property
    def facts(self) -> dict[str, float]:
        """The public numbers of a private answer."""
        held: dict[str, float] = {"members": self.members, "shots": self.shots, "rate": self.rate}
        return {**held, "releases": self.releases, "delta": self.delta}

    def with_members(self, members: int) -> Schedule:
        """The same shots for another number of members, so another rate."""
        return replace(self, members=members)

    def with_releases(self, releases: int) -> Schedule:
        """The same for more or fewer releases."""
        return replace(self, releases=releases)

    def parameter(self, epsilon: float, mechanism: str, options: Mapping[str, float] | None = None) -> float:
        """The noise that this epsilon allows."""
        request = LineRequest(mechanism, self.rate, self.releases, options=options or {})
        plan = PrivacyPlan.solve(epsilon=epsilon, delta=self.delta, lines={"only": request})
        return plan.lines["only"].parameter
