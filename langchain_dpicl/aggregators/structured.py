"""Typed answers: an instance of a pydantic model, whose fields are released together."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Self

from langchain_core.embeddings import Embeddings
from langchain_core.messages import AIMessage
from pydantic import BaseModel, RootModel
from typing_extensions import TypeVar

from langchain_dpicl.aggregators.base import Aggregator, name_of
from langchain_dpicl.aggregators.fields import Part, part_of
from langchain_dpicl.aggregators.numbers import NoisyMedian
from langchain_dpicl.aggregators.reading import answer_of, text_of
from langchain_dpicl.calls.flow import Either, Flow, arun, run
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.mechanism import Options
from langchain_dpicl.privacy.mechanisms import PARTS
from langchain_dpicl.privacy.noise import Randomness

M = TypeVar("M", bound=BaseModel)

_PARSED = {"raw", "parsed", "parsing_error"}
"""What `with_structured_output(..., include_raw=True)` gives."""


class Structured(Aggregator[M], Generic[M]):
    """An instance of a pydantic model, each field by its own mechanism on the same outputs: one release, one charge.

    ``Structured(Visit)`` for ``class Visit(BaseModel)`` with fields of these types:

    - bool, an Enum, a Literal: an exponential vote of the members among its values.
    - int, float, date with ``Field(ge=..., le=...)``: the median of the members' values on a grid between these public
      bounds (`NoisyMedian`), or for the names in ``means`` the clipped mean (`NoisyMean`). Values outside are clipped.
    - str: an exponential vote among public ``candidates``.
    - ``X | None``: None is one more value of a vote. Of a number or a date the presence is a vote of its own, and a
      member without a value abstains for the value alone.

    Any other field is refused by its name, and so are models with validators, an ``__init__`` or a ``model_post_init``,
    and configurations that change a value: a release is never drawn again until a model accepts it, since that would be
    several releases.

    Mechanism and profile. Each field has the range eps0 times its share (a mean the Gaussian noise that weighs as much,
    `privacy.mechanisms.mean_sigma`), the shares of all mechanisms adding up to 1. One output replaced (with a call for
    every owner: added or removed) changes the input of ALL fields. Their draws are independent given the outputs, so
    the pair of laws is a product of one pair for each field, and the product of pairs that dominate these dominates it.
    This composition is amplified ONCE by the owners' coin, and then the releases are composed: fields that were
    amplified each by itself would count the rate as often as there are fields, although they share a sample.

    Parameters
    ----------
    model
        The pydantic model.
    candidates
        For each str field its public texts.
    embeddings
        If given, a member's text votes for the nearest of its field's candidates, as in `CandidateVote`; else texts are
        read as labels, as in `NoisyVote`.
    means
        Fields of numbers and dates whose clipped mean is released instead of the median.
    weights
        How the plan's eps0 is divided over the fields: numbers > 0 for each, 1 where nothing is said.
    decimal
        The decimal mark of numbers that stand in texts, "." or ",": see `NoisyMedian`.

    An output is an instance of the model, a mapping, a message (its first tool call, or its text), or text with a JSON
    object, the first of which counts; ``llm.with_structured_output(Model)`` is a member, also with
    ``include_raw=True``. Each field is read by itself: one that is missing or cannot be read abstains, and the others
    count. A model's thinking is left out, and a message with a broken tool call abstains.
    """

    kind = "structured"
    max_tokens = 100
    mechanism = "structured"
    takes_own_calls = True
    tells_abstention = False

    def __init__(
        self,
        model: type[M],
        *,
        candidates: Mapping[str, Sequence[str]] | None = None,
        embeddings: Embeddings | None = None,
        means: Sequence[str] = (),
        weights: Mapping[str, float] | None = None,
        decimal: str = ".",
    ) -> None:
        if not isinstance(model, type) or not issubclass(model, BaseModel) or issubclass(model, RootModel):
            raise InvalidParameter("model", model, "a pydantic model with fields")
        decorators = model.__pydantic_decorators__
        for kind in ("field_validators", "validators", "model_validators", "root_validators"):
            if found := getattr(decorators, kind, None):
                bound = "a model without validators: no release is drawn again until one accepts"
                raise InvalidParameter("model", next(iter(found)), bound)
        after = model.model_post_init  # pydantic's own, "init_private_attributes", rejects nothing
        own = after is not BaseModel.model_post_init and after.__name__ != "init_private_attributes"
        if own or model.__init__ is not BaseModel.__init__:
            raise InvalidParameter("model", model.__name__, "a model without an __init__ or model_post_init of its own")
        NoisyMedian(0, 1, decimal=decimal)  # a wrong mark is refused by its own name, not by a field's
        self.model = model
        given: dict[str, Mapping[str, Any]] = {
            "candidates": candidates or {},
            "means": dict.fromkeys(means),
            "weights": weights or {},
        }
        for parameter, names in given.items():
            for name in names:
                if name not in model.model_fields:
                    raise InvalidParameter(parameter, name, f"fields of the model: {', '.join(model.model_fields)}")
        weighed = {name: checks.positive(f"weights[{name!r}]", value) for name, value in given["weights"].items()}
        total = sum(weighed.get(name, 1.0) for name in model.model_fields)
        self.parts: list[Part] = []
        for name, info in model.model_fields.items():
            part = part_of(name, info, given["candidates"].get(name), embeddings, name in given["means"], decimal)
            self.parts.append(replace(part, share=weighed.get(name, 1.0) / total / len(part.mechanisms)))
        if decimal != "." and all(getattr(part.reader, "decimal", ".") == "." for part in self.parts):
            raise InvalidParameter("decimal", decimal, "left out without a field of numbers")
        used = sum(len(part.mechanisms) for part in self.parts)
        if not 1 <= used <= PARTS:
            raise InvalidParameter("model", used, f"a model of 1 to {PARTS} mechanisms, two for an optional number")
        self._check_values()

    def _check_values(self) -> None:
        """Every value that a field may have makes a valid model, with the others' first values, and stays as it is."""
        first = {part.name: part.extremes()[0] for part in self.parts}
        for part in self.parts:
            for value in part.extremes():
                try:
                    kept = getattr(self._made({**first, part.name: value}), part.name)
                    if type(kept) is type(value) and kept == value:
                        continue
                    reason = f"it makes {kept!r} of it"
                except Exception as error:
                    reason = type(error).__name__
                bound = f"a value that the model accepts and keeps as it is ({reason})"
                raise InvalidParameter(f"model.{part.name}", value, bound)

    def _made(self, values: Mapping[str, Any]) -> M:
        return self.model.model_validate({part.keys[0]: values[part.name] for part in self.parts})

    @property
    def options(self) -> Options:
        draws = [(part.share, is_mean) for part in self.parts for is_mean in part.mechanisms]
        return {
            "shares": tuple(share for share, is_mean in draws if not is_mean),
            "mean_shares": tuple(share for share, is_mean in draws if is_mean),
        }

    def prepare(self, values: Mapping[str, Any], options: Options, answers: Sequence[object] = ()) -> Self:
        bound = copy.copy(self)
        bound.parts = [replace(part, reader=part.reader.prepare(values, {})) for part in self.parts]
        return bound

    @property
    def samples(self) -> Sequence[str]:
        return [json.dumps({part.keys[0]: part.sample for part in self.parts})]

    def encode(self, output: object) -> tuple[int | None, ...]:
        """Each field's code; None where it abstains. Raises for an output of which no field can be read."""
        return run(self._codes(output))

    async def aencode(self, output: object) -> tuple[int | None, ...]:
        return await arun(self._codes(output))

    def _codes(self, output: object) -> Flow[tuple[int | None, ...]]:
        given, by_name = _mapping(output, self.model)
        if given and not by_name and not self.reads_any(given):
            raise ValueError(f"it has no field of {self.model.__name__}: {', '.join(self.model.model_fields)}")
        codes: list[Any] = []
        for part in self.parts:
            code = None
            with contextlib.suppress(Exception):
                value = part.plain(given, by_name)
                if value is None:
                    code = part.absent
                else:
                    code = yield Either(partial(part.reader.encode, value), partial(part.reader.aencode, value))
            codes.append(code)
        if all(code is None for code in codes):
            raise ValueError("no field of the model can be read in it")
        return tuple(codes)

    def asked(self, usual: str) -> str:
        shown = [f'"{part.keys[0]}": {part.said}' for part in self.parts]
        return f"{usual} as JSON: {{{', '.join(shown)}}}"

    @property
    def outputs(self) -> Mapping[str, Any]:
        unread = "no JSON object with a field of the release"
        return {"label_of": lambda text: text if self.has_field(text) else None, "unread": unread}

    def hit(self, release: M, right: object) -> float:
        """The share of the right answer's fields that are right."""
        codes = zip(self.parts, self.prepare({}, {}).encode(right), strict=True)
        known: list[bool] = [
            part.shown(code) == getattr(release, part.name) for part, code in codes if code is not None
        ]
        return sum(known) / len(known)

    def reads_any(self, keys: Iterable[str]) -> bool:
        """Return True if one of these keys is of a field of the model."""
        return any(not set(part.keys).isdisjoint(keys) for part in self.parts)

    def has_field(self, output: object) -> bool:
        """Return True if an output holds a field of the model, whatever its value."""
        with contextlib.suppress(Exception):
            given, _ = _mapping(output, self.model)
            return self.reads_any(given)
        return False

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> M:
        crowd = self._crowd(outputs)
        rows = [row for row in outputs if type(row) is tuple and len(row) == len(self.parts)]
        drawn = {}
        for i, part in enumerate(self.parts):
            codes = [row[i] for row in rows if row[i] is not None]
            drawn[part.name] = part.draw(codes, crowd, parameter * part.share, randomness)
        return self._made(drawn)

    def overturned(self, parameter: float) -> float | None:
        """Of the field that noise overturns most often."""
        crowd = self.crowd
        return None if crowd is None else max(part.overturned(crowd, parameter * part.share) for part in self.parts)

    def shown(self, encoded: object) -> object:
        if not isinstance(encoded, tuple):
            return encoded
        codes = zip(self.parts, encoded, strict=True)
        return {part.name: part.shown(code) for part, code in codes if code is not None}

    def dump(self, release: M) -> str:
        return json.dumps({part.name: part.dump(getattr(release, part.name)) for part in self.parts})

    def load(self, text: str, values: Mapping[str, Any]) -> M:
        held = json.loads(text)
        return self._made({part.name: part.load(held[part.name]) for part in self.parts})

    def zero_shot(self, output: object, values: Mapping[str, Any]) -> M | None:
        with contextlib.suppress(Exception):
            ready = self.prepare(values, {})
            codes = zip(ready.parts, ready.encode(output), strict=True)
            return self._made({part.name: part.shown(code) for part, code in codes if code is not None})
        return None

    @property
    def release_type(self) -> Any:
        return self.model

    @property
    def variant(self) -> str:
        shown = [f"{part.keys}={part.values or part.reader!r}:{part.share!r}" for part in self.parts]
        return f"{self!r} {name_of(self.model)} {shown}"

    def __repr__(self) -> str:
        return f"Structured({self.model.__name__})"


def _mapping(output: object, model: type[BaseModel]) -> tuple[Mapping[str, Any], bool]:
    """An output's fields, and whether they stand under their names alone. Raises for one that has none."""
    if isinstance(output, model):
        return {name: getattr(output, name) for name in model.model_fields}, True
    if isinstance(output, Mapping) and set(output) == _PARSED and not model.model_fields.keys() >= _PARSED:
        return _mapping(output["parsed"], model)
    if isinstance(output, Mapping):
        return output, False
    if text_of(output) is None:
        raise ValueError(f"the member answers {type(output).__name__}, and {model.__name__} is expected")
    text = answer_of(output) or ""
    if isinstance(output, AIMessage) and output.tool_calls and not output.invalid_tool_calls:
        return output.tool_calls[0]["args"], False
    if "{" not in text:
        raise ValueError("it holds no JSON object")
    found, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    return found, False
