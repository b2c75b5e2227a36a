"""Typed answers of a configuration: a number or a date, and several fields at once."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, create_model, model_validator
from pydantic.types import StrictBool, StrictFloat, StrictInt, StrictStr

from langchain_dpicl import local
from langchain_dpicl.aggregators import Aggregator, CandidateVote, NoisyMean, NoisyMedian, Structured
from langchain_dpicl.aggregators.fields import Part, spelling
from langchain_dpicl.aggregators.numbers import Bounded
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.members.chains import Wording
from langchain_dpicl.serving.kinds import AtTemperature, Count, Lines, TextSection, imported, stand_in
from langchain_dpicl.serving.sources import Section

Bound = StrictInt | StrictFloat | date


class MeanSection(TextSection):
    """The mean of the members' numbers or dates, clipped to public bounds."""

    kind: Literal["mean"]
    low: Bound
    high: Bound
    decimal: Literal[".", ","] = "."
    """The decimal mark of the members' texts."""
    max_tokens: Count = 20

    def aggregator(self, write: AtTemperature = stand_in) -> Aggregator[Any]:
        return NoisyMean[Any](self.low, self.high, decimal=self.decimal)


class MedianSection(MeanSection):
    """The median of the members' numbers or dates, on a public grid."""

    kind: Literal["median"]  # type: ignore[assignment]
    points: Count | None = None

    def aggregator(self, write: AtTemperature = stand_in) -> Aggregator[Any]:
        return NoisyMedian[Any](self.low, self.high, points=self.points, decimal=self.decimal)


class FieldSection(Section):
    """One field of a structured answer: its type (unless ``model`` has it), and how it is released."""

    choices: Annotated[list[StrictBool | StrictInt | StrictStr], Field(min_length=1)] | None = None
    """The values of a vote: texts, whole numbers, or true and false."""
    low: Bound | None = None
    high: Bound | None = None
    """The bounds of a number or a date."""
    candidates: Lines | None = None
    """Public texts: each output votes for the nearest."""
    optional: bool = False
    """Whether None is a value."""
    mean: bool = False
    """Whether the clipped mean is released instead of the median."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """The field's part of the release's epsilon; 1 unless given."""

    @model_validator(mode="after")
    def _check(self) -> FieldSection:
        bound = self.high if self.low is None else self.low
        if sum(each is not None for each in (self.choices, self.candidates, bound)) > 1:
            raise ValueError("choices, or candidates, or low and high: one of the three")
        return self

    @property
    def annotation(self) -> Any:
        """The type that it declares."""
        kind: Any = str
        if self.choices is not None:
            kind = Literal[tuple(self.choices)]
        elif (self.low, self.high) != (None, None):
            given = {type(self.low), type(self.high)}
            number: Any = next((each for each in (date, float) if each in given), int)
            kind = Annotated[number, Field(ge=self.low, le=self.high)]
        return kind | None if self.optional else kind


def _model_class(given: Any, info: ValidationInfo) -> Any:
    found = imported("model", given, info.context or Path(), "CLASS") if isinstance(given, str) else given
    if isinstance(found, type) and issubclass(found, BaseModel):
        return found
    raise InvalidParameter("model", str(given), "MODULE:CLASS of a pydantic model")


class StructuredSection(TextSection):
    """A typed answer: an instance of a pydantic model, the deployer's own or one of the fields that are declared."""

    kind: Literal["structured"]
    model: Annotated[Any, BeforeValidator(_model_class)] = None
    """MODULE:CLASS, beside the file or installed."""
    fields: dict[str, FieldSection] = Field(default_factory=dict)
    """Required without a model; beside one, how its fields are released."""
    decimal: Literal[".", ","] = "."
    """The decimal mark of numbers in texts."""
    max_tokens: Count = 100

    @property
    def outputs(self) -> dict[str, Any]:
        has_field, unread = self.aggregator().has_field, "no JSON object with a field of the release"
        return {"label_of": lambda text: text if has_field(text) else None, "unread": unread}

    def aggregator(self, write: AtTemperature = stand_in) -> Structured[Any]:
        public = {name: about.candidates for name, about in self.fields.items() if about.candidates is not None}
        model = self._declared() if self.model is None else self._described()
        how: dict[str, Any] = {
            "candidates": public,
            "embeddings": local.local_embeddings() if public else None,
            "means": [name for name, about in self.fields.items() if about.mean],
            "weights": {name: about.weight for name, about in self.fields.items() if about.weight is not None},
            "decimal": self.decimal,
        }
        try:
            return Structured(model, **how)
        except InvalidParameter as error:
            name = error.parameter if self.model is not None else error.parameter.replace("model.", "fields.")
            wrong = InvalidParameter(name, error.value, error.bound)
        raise wrong

    def asked(self, words: Wording) -> str:
        if self.instruction is not None:
            return self.instruction
        shown = [f'"{part.keys[0]}": {_values_of(part)}' for part in self.aggregator().parts]
        return f"{words.asked} as JSON: {{{', '.join(shown)}}}"

    def _declared(self) -> type[BaseModel]:
        if not self.fields:
            raise InvalidParameter("fields", {}, "at least one, or model: MODULE:CLASS")
        types: dict[str, Any] = {}
        for name, about in self.fields.items():
            if not name.isidentifier() or name.startswith("_") or hasattr(BaseModel, name):
                bound = "a name of letters, digits and _ that no pydantic model has already"
                raise InvalidParameter(f"fields.{name}", name, bound)
            types[name] = (about.annotation, ...)
        made: type[BaseModel] = create_model("Answer", **types)
        return made

    def _described(self) -> type[BaseModel]:
        own = {"choices", "low", "high", "optional"}
        for name, about in self.fields.items():
            if name not in self.model.model_fields:
                raise InvalidParameter(f"fields.{name}", name, f"a field of {self.model.__name__}")
            if given := own & about.model_fields_set:
                raise InvalidParameter(
                    f"fields.{name}", sorted(given), f"without {', '.join(sorted(given))}: the model has it"
                )
        made: type[BaseModel] = self.model
        return made


def _values_of(part: Part) -> str:
    """What a field of a structured answer may hold, in words."""
    if isinstance(part.reader, CandidateVote):
        shown = "a text"
    elif isinstance(part.reader, Bounded):
        shown = f"{part.reader.low} to {part.reader.high}"
    else:
        shown = " or ".join(spelling(value) for value in part.values if value is not None)
    return f"{shown} or null" if part.optional else shown
