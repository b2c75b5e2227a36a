"""The interface of aggregators: N outputs in, one release out, and the mechanism that accounts for it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, Self, TypeVar

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable

from langchain_dpicl.privacy.noise import Randomness

T = TypeVar("T")

Outcome = Literal["released", "zero-shot fallback", "members abstained"]


class Aggregator(ABC, Generic[T]):
    """A mechanism on the members' outputs.

    Its promise is the privacy profile of ``mechanism`` (a family in `langchain_dpicl.privacy.MECHANISMS`) at the plan's
    parameter, valid when one member's output is replaced by any other, or by an abstention.

    One release takes three steps. `prepare` settles what depends on the query alone, before anything is charged.
    `encode` reads ONE member's output, within that member's own call, so that whatever it does, or raises, depends on
    this output and touches no other. `aggregate` is the mechanism; it gets what `encode` made, and looks at no output.
    """

    mechanism: str

    tells_abstention: bool = True
    """Whether a release shows that the members fail. If it does not, the ensemble asks a public question first."""

    def tells(self, members: int, parameter: float) -> bool:
        """Whether a release of so many members at this noise shows that they fail. A function of public numbers."""
        return self.tells_abstention

    @property
    def options(self) -> Mapping[str, float]:
        """Further public parameters of the mechanism, which the plan freezes."""
        return {}

    def public_calls(self) -> tuple[Runnable[Any, Any], int] | None:
        """The zero-shot calls whose answers `prepare` gets: a chain, and their number. None for none.

        They see the query and no private example.
        """
        return None

    def prepare(self, values: Mapping[str, Any], options: Mapping[str, float], answers: Sequence[object] = ()) -> Self:
        """The aggregator for one query: ``values`` as the caller gave them, the plan's ``options``, the zero-shot
        ``answers``. All of it is public, and an error costs nothing."""
        return self

    def check_public(self, output: object) -> None:
        """Raise if the member's answer without examples shows that none of its answers could be used."""

    def encode(self, output: object) -> object:
        """What `aggregate` needs of one member's output. Raising makes this member abstain.

        Return plain numbers, texts and arrays that are made here: an output is any object at all, whose methods may
        raise, and in `aggregate` they would fail the release for all.
        """
        return output

    async def aencode(self, output: object) -> object:
        """`encode`, asynchronously."""
        return self.encode(output)

    @abstractmethod
    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> T | None:
        """One release, or None if the release is that the members abstain.

        ``outputs`` holds what `encode` made of each member's output, `ABSTAIN` for a failed one; ``parameter`` is the
        plan's noise. Nothing that an output holds may make this raise.
        """

    def outcome(self, release: T | None) -> Outcome:
        """What kind of release this is, for the receipt."""
        return "members abstained" if release is None else "released"

    @property
    def variant(self) -> str:
        """All public settings that decide what a release looks like: answers are replayed between equal ones alone."""
        return repr(self)

    def dump(self, release: T) -> str:
        """A release as JSON text, from which `load` makes an equal one."""
        return json.dumps(release)

    def load(self, text: str, values: Mapping[str, Any]) -> T:
        """The release that `dump` wrote, as the answer to a query."""
        release: T = json.loads(text)
        return release

    @abstractmethod
    def zero_shot(self, output: object, values: Mapping[str, Any]) -> T | None:
        """A public answer in the form of a release, from the member's output without examples; None if there is none.

        It stands in when the budget is spent, if the deployer asked for that.
        """

    @property
    @abstractmethod
    def release_type(self) -> Any:
        """The Python type of a release, for the Runnable's schema."""


def text_of(output: object) -> str | None:
    """The text of a model's answer, as a plain string of its own; None if there is none, or none can be read."""
    try:
        text = output.text if isinstance(output, BaseMessage) else output
        return str.__str__(text) if isinstance(text, str) else None  # a subclass may have methods of any kind
    except Exception:
        return None
