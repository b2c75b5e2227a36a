"""The fields of a structured answer: how each is read and released, and which are refused."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
from langchain_core.embeddings import Embeddings
from pydantic import AfterValidator, BeforeValidator, PlainValidator, WrapValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from langchain_dpicl.aggregators.candidates import CandidateVote
from langchain_dpicl.aggregators.numbers import Bounded, NoisyMean, NoisyMedian
from langchain_dpicl.aggregators.reading import normal
from langchain_dpicl.aggregators.votes import NoisyVote
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.mechanisms import mean_sigma
from langchain_dpicl.privacy.noise import Randomness, choose_exponential
from langchain_dpicl.privacy.votes import EXPONENTIAL, VoteNoise

ABSENT = -1
"""The code of a number or date that an output says is not there."""

_TRUTHS = {"yes": "true", "no": "false"}
_VALIDATORS = (AfterValidator, BeforeValidator, PlainValidator, WrapValidator)
_KINDS = "bool, an Enum, a Literal, a bounded int, float or date, a str with candidates, or one of these or None"


@dataclass(frozen=True)
class Part:
    """One field. Its codes are indices of ``values`` in a vote; else places of its reader, or `ABSENT`.

    ``values`` are the outcomes of a vote, None the last of them if it is ``optional``; of a number or a date there are
    none. ``share`` is what each of its mechanisms has of the release's eps0: an optional number has two.
    """

    name: str
    keys: tuple[str, ...]
    default: Any
    reader: NoisyVote[Any] | CandidateVote | Bounded[Any]
    values: tuple[Any, ...]
    optional: bool
    share: float = math.nan

    @property
    def mechanisms(self) -> tuple[bool, ...]:
        """For each of its mechanisms whether it is a mean."""
        presence = () if self.values or not self.optional else (False,)
        return (*presence, isinstance(self.reader, NoisyMean))

    @property
    def absent(self) -> int:
        """The code of None."""
        return len(self.values) - 1 if self.values else ABSENT

    def plain(self, given: Mapping[str, Any], by_name: bool) -> Any:
        """The field's raw value in an output, as its reader takes it; None for a None. Raises if there is none."""
        keys = [key for key in ((self.name,) if by_name else self.keys) if key in given]
        value = given[keys[0]] if keys else self.default
        if value is None and self.optional:
            return None
        if value is None or value is PydanticUndefined:
            raise ValueError(f"the field {self.name} is missing")
        return spelling(value) if self.values else value

    def shown(self, code: int) -> Any:
        """The value of a code."""
        if self.values:
            return self.values[code]
        return None if code == ABSENT else self.reader.shown(code)

    @property
    def said(self) -> str:
        """The values that it may have, in words."""
        if isinstance(self.reader, CandidateVote):
            shown = "a text"
        elif isinstance(self.reader, Bounded):
            shown = f"{self.reader.low} to {self.reader.high}"
        else:
            shown = " or ".join(spelling(value) for value in self.values if value is not None)
        return f"{shown} or null" if self.optional else shown

    @property
    def sample(self) -> Any:
        """A value as a member may write it, for JSON."""
        return self.reader.samples[0]

    def extremes(self) -> tuple[Any, ...]:
        """All values of a vote, or both ends of a number and None if it may be missing."""
        if self.values:
            return self.values
        assert isinstance(self.reader, Bounded)
        return (self.reader.low, self.reader.high, *([None] if self.optional else []))

    def draw(self, codes: Sequence[int], crowd: Crowd, eps0: float, randomness: Randomness) -> Any:
        """The field's mechanisms: from the codes of the outputs that do not abstain to its released value."""
        rate = VoteNoise(EXPONENTIAL, eps0, crowd.own_calls).rate
        if self.values:
            counts = np.bincount(np.array(codes, np.int64), minlength=len(self.values)).tolist()
            return self.values[_voted(counts, rate, randomness)]
        assert isinstance(self.reader, Bounded)
        places = [code for code in codes if code != ABSENT]
        if self.optional and _voted([len(codes) - len(places), len(places)], rate, randomness) == 0:
            return None  # its value is accounted for all the same
        return self.reader.draw(places, crowd, self._noise(crowd, eps0), randomness)

    def _noise(self, crowd: Crowd, eps0: float) -> float:
        """The noise parameter of its reader's mechanism."""
        return mean_sigma(eps0, crowd.own_calls) if isinstance(self.reader, NoisyMean) else eps0

    def overturned(self, crowd: Crowd, eps0: float) -> float:
        """The chance that noise overturns a value, or its presence, on which all agree."""
        votes = math.floor(crowd.expected)
        noise = VoteNoise(EXPONENTIAL, eps0, crowd.own_calls)
        if self.values:
            return noise.flip(votes, len(self.values))
        bound = self.reader.under(self.reader.mechanism, crowd)
        of_value = bound.overturned(self._noise(crowd, eps0)) or 0.0
        return max(of_value, noise.flip(votes, 2)) if self.optional else of_value

    def dump(self, value: Any) -> Any:
        """A released value for JSON."""
        if self.values:
            return next(i for i, each in enumerate(self.values) if type(each) is type(value) and each == value)
        assert isinstance(self.reader, Bounded)
        return None if value is None else self.reader.dump(value)

    def load(self, held: Any) -> Any:
        """The value that `dump` wrote."""
        if self.values:
            return self.values[held]
        assert isinstance(self.reader, Bounded)
        return None if held is None else self.reader.load(held, {})


def _voted(counts: Sequence[int], rate: float, randomness: Randomness) -> int:
    """An index with probability proportional to exp(rate count)."""
    return choose_exponential([1] * len(counts), [-count for count in counts], rate, randomness)


def part_of(
    name: str,
    info: FieldInfo,
    candidates: Sequence[str] | None,
    embeddings: Embeddings | None,
    is_mean: bool,
    decimal: str,
) -> Part:
    """A field of a model. Raises `InvalidParameter`, which names it, if it has no mechanism."""
    alias = info.validation_alias or info.alias
    try:
        if not (alias is None or isinstance(alias, str)):
            raise InvalidParameter("alias", type(alias).__name__, "at most one plain alias")
        kind, constraints, optional = _type_of(info)
        if any(isinstance(each, _VALIDATORS) for each in constraints):
            raise InvalidParameter("constraint", kind, "a field without validators, which may look at other fields")
        reader, values = _reader(kind, constraints, candidates, embeddings, is_mean, decimal)
        keys = (name,) if alias is None else (alias, name)
        more = (None,) if values and optional and None not in values else ()
        return Part(name, keys, info.default, reader, (*values, *more), optional or None in values)
    except InvalidParameter as error:
        fault = InvalidParameter(f"model.{name}", error.value, error.bound)
    raise fault


def _type_of(info: FieldInfo) -> tuple[Any, list[Any], bool]:
    """A field's type without None and constraints; the constraints; whether None was there."""
    kind = info.annotation
    constraints = list(info.metadata)
    optional = False
    while True:
        if get_origin(kind) is Annotated:
            kind, *more = get_args(kind)
            constraints += [each for one in more for each in (one.metadata if isinstance(one, FieldInfo) else [one])]
        elif get_origin(kind) in (Union, types.UnionType) and len(get_args(kind)) == 2 and type(None) in get_args(kind):
            (kind,) = (each for each in get_args(kind) if each is not type(None))
            optional = True
        else:
            return kind, constraints, optional


def _reader(
    kind: Any,
    constraints: list[Any],
    candidates: Sequence[str] | None,
    embeddings: Embeddings | None,
    is_mean: bool,
    decimal: str,
) -> tuple[NoisyVote[Any] | CandidateVote | Bounded[Any], tuple[Any, ...]]:
    """Make what reads and releases a field of this type, and the values of a vote."""
    if candidates is not None and kind is not str:
        raise InvalidParameter("candidates", kind, "a str, as it has candidates")
    if is_mean and kind not in (int, float, date):
        raise InvalidParameter("means", kind, "int, float or date, as it is in means")
    if kind in (int, float, date):
        mark = "." if kind is date else decimal
        return (NoisyMean if is_mean else NoisyMedian)(*_bounds(kind, constraints), decimal=mark), ()
    if kind is str:
        if candidates is None:
            raise InvalidParameter("candidates", "str", 'a Literal, or a str with public candidates={"...": [...]}')
        if embeddings is not None:
            near = CandidateVote(embeddings, candidates)
            return near, near.texts
        named = NoisyVote[Any](candidates)
        return named, named.labels
    values: tuple[Any, ...] = ()
    if kind is bool:
        values = (True, False)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        values = tuple(kind)
    elif get_origin(kind) is Literal:
        values = get_args(kind)
    known = [value for value in values if value is not None]
    if not known or not all(isinstance(getattr(value, "value", value), (str, int)) for value in known):
        raise InvalidParameter("type", kind, _KINDS)
    if None in values:
        values = (*known, None)
    return NoisyVote[Any]([spelling(value) for value in known]), values


def _bounds(kind: type, constraints: Sequence[object]) -> tuple[Any, Any]:
    """The public bounds of a number or a date."""
    found: dict[str, Any] = {}
    for each in constraints:
        name = next((name for name in ("ge", "le") if hasattr(each, name)), None)
        if name is None:
            raise InvalidParameter("constraint", each, "no constraint but Field(ge=..., le=...)")
        found[name] = getattr(each, name)
    if set(found) != {"ge", "le"}:
        raise InvalidParameter("bounds", kind.__name__, "public bounds, Field(ge=..., le=...)")
    if kind is float:
        return checks.real("ge", found["ge"]), checks.real("le", found["le"])
    return found["ge"], found["le"]


def spelling(value: object) -> str:
    """A value of a vote as text: the label that stands for it. Raises for what is no text, whole number or truth."""
    if isinstance(value, Enum):
        return spelling(value.value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if not isinstance(value, str):
        raise ValueError("it is no text, whole number or truth value")
    text = str.__str__(value)
    return _TRUTHS.get(normal(text), text) if len(text) < 6 else text
