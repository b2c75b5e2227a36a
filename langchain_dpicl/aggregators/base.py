"""What every aggregator offers: N outputs in, one release out, and the name of the mechanism that accounts for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from langchain_dpicl.privacy.noise import Randomness

T = TypeVar("T")


class Aggregator(ABC, Generic[T]):
    """A mechanism on the members' outputs.

    Its promise is the privacy profile of ``mechanism`` (a family in `langchain_dpicl.privacy.MECHANISMS`) at the plan's
    parameter, valid when one member's output is replaced by any other, or by an abstention.
    """

    mechanism: str

    @property
    def options(self) -> Mapping[str, float]:
        """Further public parameters of the mechanism, which the plan freezes."""
        return {}

    @abstractmethod
    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> T | None:
        """One release, or None where the release is that the members abstain.

        ``outputs`` holds one entry per member, `ABSTAIN` for a failed one; ``parameter`` is the plan's noise. Nothing
        that an output holds may make this raise.
        """

    @property
    @abstractmethod
    def release_type(self) -> Any:
        """The Python type of a release, for the Runnable's schema."""
