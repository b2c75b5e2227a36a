"""Pydantic models in a description: a class beside the file, or fields that are declared."""

from __future__ import annotations

import importlib
import sys
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, create_model

from langchain_dpicl import local
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.spec.signatures import Day, Lines, Section

Bound = int | float | Day


class FieldSection(Section):
    """One field of a structured answer: its type (unless ``model`` has it), and how it is released."""

    choices: Annotated[list[bool | int | str], Field(min_length=1)] | None = None
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

    def check(self) -> None:
        bound = self.high if self.low is None else self.low
        if sum(each is not None for each in (self.choices, self.candidates, bound)) > 1:
            raise ValueError("choices, or candidates, or low and high: one of the three")

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


def imported(parameter: str, name: str, folder: Path, what: str = "FUNCTION") -> Any:
    """Return what ``module:name`` names, beside the description or installed. Raises `InvalidParameter`."""
    module, _, attribute = name.partition(":")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        bound = f"MODULE:{what} beside the file or installed ({type(error).__name__}: {error})"
    raise InvalidParameter(parameter, name, bound)


def _model_class(given: Any, info: ValidationInfo) -> Any:
    found = imported("model", given, info.context or Path(), "CLASS") if isinstance(given, str) else given
    if isinstance(found, type) and issubclass(found, BaseModel):
        return found
    raise InvalidParameter("model", str(given), "MODULE:CLASS of a pydantic model")


class TypedSection(Section):
    """A file's statements about a pydantic model: its class, the deployer's own, or the fields that are declared."""

    model: Annotated[Any, BeforeValidator(_model_class)] = None
    """MODULE:CLASS of a pydantic model, beside the file or installed."""
    fields: dict[str, FieldSection] = Field(default_factory=dict)
    """Declared fields, each with choices, low and high, or candidates. Beside a model: how its fields are released."""

    def typed(self) -> dict[str, Any]:
        """Return the arguments of an aggregator of models. Raises `InvalidParameter`."""
        public = {name: about.candidates for name, about in self.fields.items() if about.candidates is not None}
        return {
            "model": self._declared() if self.model is None else self._described(),
            "candidates": public,
            "embeddings": local.local_embeddings() if public else None,
            "means": [name for name, about in self.fields.items() if about.mean],
            "weights": {name: about.weight for name, about in self.fields.items() if about.weight is not None},
        }

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
