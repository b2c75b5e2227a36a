"""`Mechanism`: a family of mechanisms with one noise parameter, which describes itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.checks import FrozenMapping, real, whole
from langchain_dpicl.privacy.profile import Profile

Options: TypeAlias = Mapping[str, Any]
"""The fixed numbers of a mechanism as a plan stores them: numbers, or tuples of numbers."""


@dataclass(frozen=True)
class Mechanism(ABC):
    """A family of mechanisms with one noise ``parameter`` between ``low`` and ``high``.

    A subclass is a family. Its fields are the other numbers of a mechanism, public and
    fixed; made by `number`, `numbers`, `count` and `flag`, they are checked when an
    instance is made. `profile` holds for ``neighbours``, before amplification.

    ``noisier`` is +1 if a larger parameter means more noise (a sigma), -1 if it means less
    (an eps0, a range bound). ``words`` says what one release gives out: a format of the
    parameter ``p`` and the fields.

    Further facts, for plans and for people:

    - ``unit``: the things that a line counts.
    - ``all_take_part``: it is released once, and has a rate of 1.
    - ``outcomes``: the number of outcomes between which it chooses, unless told otherwise.
    - ``weight``: the divisor of eps0 in the logarithm of the odds of two outcomes, for each
      output between them.
    """

    name: ClassVar[str]
    parameter: ClassVar[str]
    low: ClassVar[float]
    high: ClassVar[float]
    noisier: ClassVar[int]
    neighbours: ClassVar[str]
    words: ClassVar[str]
    unit: ClassVar[str] = "releases"
    all_take_part: ClassVar[bool] = False
    outcomes: ClassVar[int] = 2
    weight: ClassVar[int] = 1

    @abstractmethod
    def build(self, parameter: float) -> Profile:
        """Make the profile of one release at a noise parameter that is inside the bounds."""

    def flip(self, parameter: float, votes: int, outcomes: int) -> float:
        """The chance that noise overturns an outcome, of so many, on which so many outputs agree.

        0 if that has no meaning.
        """
        return 0.0

    @property
    def own_calls(self) -> bool:
        """True if an owner adds or removes one output and moves no other. Otherwise it replaces one."""
        return False

    @property
    def release_delta(self) -> float:
        """The part of delta that each release costs by itself."""
        return 0.0

    @classmethod
    def chosen(cls, delta: float, rate: float, count: int, lines: int) -> Options:
        """Return the numbers that a plan chooses if nobody did: for a line of so many releases, of ``lines`` such."""
        return {}

    # -- fixed numbers -------------------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(
                self,
                each.name,
                each.metadata["check"](each.name, getattr(self, each.name)),
            )

    @classmethod
    def of(cls, options: Options) -> Self:
        """The mechanism with these fixed numbers, and its defaults. Raises `InvalidParameter`, which names them."""
        known = cls.fixed()
        for name in sorted(set(options) - set(known), key=str):
            raise InvalidParameter(
                f"options[{name!r}]",
                options[name],
                f"{cls.name} has options: {', '.join(known) or 'none'}",
            )
        for name, about in known.items():
            if name not in options and about.default is MISSING:
                raise InvalidParameter(
                    f"options[{name!r}]",
                    None,
                    f"{cls.name} needs {about.metadata['words']}",
                )
        return cls(**options)

    @classmethod
    def fixed(cls) -> dict[str, Field[Any]]:
        """The fields by their names, in alphabetical order. ``metadata["words"]`` says what each is."""
        return {each.name: each for each in sorted(fields(cls), key=lambda each: each.name)}

    @classmethod
    def undecided(cls) -> Options:
        """A stand-in for each number that has no default, until a plan chooses it."""
        return {name: each.metadata["high"] for name, each in cls.fixed().items() if each.default is MISSING}

    @classmethod
    def left_out(cls) -> Options:
        """The defaults of the numbers that a plan leaves out if they have them: older plans keep their digest."""
        return {name: _plain(each.default) for name, each in cls.fixed().items() if each.metadata["quiet"]}

    @property
    def options(self) -> FrozenMapping[Any]:
        """The fixed numbers as a plan stores them."""
        left_out = self.left_out()
        values = {name: _plain(getattr(self, name)) for name in self.fixed()}
        return FrozenMapping({name: value for name, value in values.items() if left_out.get(name) != value})

    # -- the noise parameter -------------------------------------------------------------------------------------------

    def profile(self, parameter: float) -> Profile:
        """The privacy profile of one release (before amplification) at this noise parameter."""
        return self.build(real(self.parameter, parameter, at_least=self.low, at_most=self.high))

    def describe(self, parameter: float) -> str:
        """Say in words what one release gives out and with how much noise."""
        return self.words.format(
            p=parameter,
            weight=parameter if self.own_calls else parameter / 2.0,
            **vars(self),
        )

    @classmethod
    def coordinate(cls, parameter: float) -> float:
        """A scale on which a larger value means less noise: the logarithm, with its sign."""
        return -cls.noisier * math.log(parameter)

    @classmethod
    def at_coordinate(cls, coordinate: float) -> float:
        """The parameter at a coordinate, inside the bounds, six digits, rounded towards MORE noise."""
        logarithm = min(max(-cls.noisier * coordinate, math.log(cls.low)), math.log(cls.high))
        rounded = round_digits(math.exp(logarithm), 6, cls.noisier)
        return min(cls.high, max(cls.low, rounded))

    @classmethod
    def coordinates(cls) -> tuple[float, float]:
        """The coordinates of most noise and of least noise."""
        least, most = sorted((cls.coordinate(cls.low), cls.coordinate(cls.high)))
        return least, most


def round_digits(value: float, digits: int, direction: int) -> float:
    """`value` at so many significant digits, up for direction 1 and down for -1."""
    places = digits - 1 - math.floor(math.log10(value))
    nearest = direction * math.ceil(direction * value * 10.0**places)
    for whole_digits in (nearest, nearest + direction):
        rounded = float(f"{whole_digits}e{-places}")
        if (rounded - value) * direction >= 0.0:
            return rounded
    return value


# -- fixed numbers of a mechanism --------------------------------------------------------------------------------------


def number(words: str, low: float, high: float, default: Any = MISSING) -> Any:
    """Declare a number between two bounds. Without a default it must be given."""

    def check(name: str, value: object) -> float:
        return real(name, value, at_least=low, at_most=high) + 0.0  # of two zeros the one that is written "0.0"

    return _declared(words, check, default, high=high)


def count(words: str, most: int, default: int) -> Any:
    """Declare a whole number from 1."""

    def check(name: str, value: object) -> int:
        is_whole = isinstance(value, float) and value.is_integer()  # as JSON has it
        return whole(name, int(value) if is_whole else value, at_most=most)  # type: ignore[call-overload]

    return _declared(words, check, default)


def flag(words: str) -> Any:
    """Declare a truth value, false unless given: 1 or 0 in a plan, which leaves it out at 0."""

    def check(name: str, value: object) -> bool:
        if not isinstance(value, (Real, np.bool_)) or value not in (0, 1):
            raise InvalidParameter(name, value, "1 or 0")
        return bool(value)

    return _declared(words, check, False, quiet=True)


def numbers(words: str, most: int) -> Any:
    """Declare a tuple of up to ``most`` numbers above 0 and up to 1, empty unless given, which a plan leaves out."""

    def check(name: str, value: object) -> tuple[float, ...]:
        if not isinstance(value, (tuple, list)) or len(value) > most:
            raise InvalidParameter(name, value, f"at most {most} numbers")
        return tuple(real(f"{name}[{i}]", each, above=0.0, at_most=1.0) for i, each in enumerate(value))

    return _declared(words, check, (), quiet=True)


def _declared(
    words: str, check: Callable[[str, object], Any], default: Any, *, high: float = math.nan, quiet: bool = False
) -> Any:
    return field(
        default=default,
        metadata={"words": words, "check": check, "high": high, "quiet": quiet},
        kw_only=True,
    )


def _plain(value: Any) -> Any:
    """A field's value as plans have it: every number is a float."""
    return value if isinstance(value, tuple) else float(value)
