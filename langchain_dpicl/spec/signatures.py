"""Sections of a description, made of signatures: a parameter's annotation, default and words become a field's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from langchain_core.runnables import Runnable
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo

from langchain_dpicl.members.chains import read_lines
from langchain_dpicl.parameters import words_of
from langchain_dpicl.spec.mistakes import mistakes_of, together

Count = Annotated[int, Field(ge=1)]


def _filled(given: str) -> str:
    if not given.strip() or "\0" in given:
        raise ValueError("a text that is not empty")
    return given


Text = Annotated[str, AfterValidator(_filled)]


class Section(BaseModel):
    """A section of a description. It refuses what it does not know, and shows no value in its errors.

    Nothing is converted: a truth value is no number, a text is none, and a whole number stands for a float alone.
    """

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    def check(self) -> None:
        """Raise `ValueError` for fields that do not go together, an `InvalidParameter` for one that has no use."""

    @model_validator(mode="wrap")
    @classmethod
    def _tell_all(cls, given: Any, make: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Make and check the section, or tell all its mistakes: without the wrong fields, the others are tried again.

        A mistake that then names a wrong field may follow from its absence, and is not told.
        """
        try:
            made = make(given)
            made.check()
            return made
        except ValueError as error:
            found = mistakes_of(error, given)
        wrong = {re.split(r"\W", str(place[0]))[0] for place, _ in found if place}
        if isinstance(given, Mapping) and not wrong.isdisjoint(given):
            left = {name: each for name, each in given.items() if name not in wrong}
            try:
                cls.model_validate(left, context=info.context)
            except ValueError as error:
                more = mistakes_of(error, left)
                found += [each for each in more if wrong.isdisjoint(re.findall(r"\w+", str(each)))]
        raise together(found)


S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class ReadLines:
    """Reads public texts from a file that is named, one a line. Texts may be a list, too, or one of some ``words``."""

    words: frozenset[str] = frozenset()

    def __call__(self, given: Any, info: ValidationInfo) -> Any:
        """Return the lines of a file for its name, and everything else as it is."""
        if not isinstance(given, str) or given in self.words:
            return given
        return read_lines(str(info.field_name), (info.context or Path()) / given)


def _range(given: Any) -> Any:
    """Return both ends of a range: a list, or in words, such as "5-10"."""
    if isinstance(given, str) and (found := re.fullmatch(r"(\d+)-(\d+)", given, re.ASCII)):
        return tuple(map(int, found.groups()))
    return tuple(given) if isinstance(given, list) and len(given) == 2 else given


def _day(given: Any) -> Any:
    """Return the date of a text such as "2026-03-31", which is how JSON says one."""
    is_day = isinstance(given, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", given, re.ASCII)
    return date.fromisoformat(given) if is_day else given


def _path(given: Any) -> Any:
    """Return the path that a text names."""
    if not isinstance(given, str | Path) or "\0" in str(given):
        raise ValueError("the path of a file or folder")
    return Path(given)


Day = Annotated[date, BeforeValidator(_day)]
FilePath = Annotated[Path, BeforeValidator(_path)]
Lines = Annotated[list[str], BeforeValidator(ReadLines())]
"""Public texts: a list, or a file with one a line."""

_PLAIN: dict[Any, Any] = {kind: kind for kind in (bool, int, float, str, NoneType)} | {date: Day}


def described(constructor: Callable[..., Any]) -> dict[str, str]:
    """Return the words for each parameter, from the docstring (of a class: and its bases')."""
    bases = inspect.getmro(constructor) if isinstance(constructor, type) else (constructor,)
    return words_of(*(each.__doc__ for each in bases))


def fields_of(constructor: Callable[..., Any], bounds: Mapping[str, FieldInfo] | None = None) -> dict[str, Any]:
    """Return the fields for those parameters that a file can give, as `pydantic.create_model` takes them.

    ``bounds``: further constraints by name.
    """
    function: Any = constructor.__init__ if isinstance(constructor, type) else constructor  # type: ignore[misc]
    hints, words, found = get_type_hints(function), described(constructor), dict[str, Any]()
    for name, parameter in inspect.signature(constructor).parameters.items():
        kind = _field_type(hints[name]) if name in hints and parameter.kind is not parameter.VAR_KEYWORD else None
        if kind is None:
            continue
        if bounds and name in bounds:
            kind = Annotated[kind, bounds[name]]
        default = ... if parameter.default is parameter.empty else parameter.default
        if default is ... and any(issubclass(each, Runnable) for each in _classes(hints[name])):
            kind, default = kind | None, None  # a chain is made here, where a file gives nothing
        found[name] = kind, Field(default, description=words.get(name))
    return found


def section_from(
    *constructors: Callable[..., Any], bounds: Mapping[str, FieldInfo] | None = None, leave_out: Sequence[str] = ()
) -> Callable[[type[S]], type[S]]:
    """Give a section the constructors' parameters as fields. Fields that it writes out itself stay as they are."""

    def made(section: type[S]) -> type[S]:
        fields = {name: field for each in constructors for name, field in fields_of(each, bounds).items()}
        left = {*section.model_fields, *leave_out}
        own = {name: field for name, field in fields.items() if name not in left}
        about: dict[str, Any] = {"__base__": section, "__module__": section.__module__, "__doc__": section.__doc__}
        extended: type[S] = create_model(section.__name__, **about, **own)
        return extended

    return made


def is_model_class(annotation: Any) -> bool:
    """Return True if a parameter is a pydantic model's class."""
    if get_origin(annotation) is not type:
        return False
    (kind,) = get_args(annotation)
    kind = kind.__bound__ if isinstance(kind, TypeVar) else kind
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _field_type(annotation: Any) -> Any:
    """Return the type of a field: texts may be in a file, and a range in words."""
    kind = _given(annotation)
    alternatives = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if list[str] in alternatives and str not in alternatives:
        return from_lines(kind)
    if any(get_origin(each) is tuple for each in alternatives):
        return Annotated[kind, BeforeValidator(_range)]
    return kind


def _classes(annotation: Any) -> list[type]:
    """Return the classes among the alternatives of an annotation."""
    kinds = [get_origin(each) or each for each in get_args(annotation)]
    return [each for each in kinds if isinstance(each, type)]


def from_lines(kind: Any) -> Any:
    """Return a type whose texts may be in a file."""
    words = frozenset(word for each in get_args(kind) if get_origin(each) is Literal for word in get_args(each))
    return Annotated[kind, BeforeValidator(ReadLines(words))]


def _given(annotation: Any) -> Any:
    """Return what JSON can give for an annotation; None if it can give nothing."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, TypeVar):
        return _given(annotation.__bound__)
    if origin in (Union, UnionType):
        return _union([found for each in inner if (found := _given(each)) is not None])
    if annotation in _PLAIN or origin is Literal or (origin is tuple and Ellipsis not in inner):
        return _PLAIN.get(annotation, annotation)
    if origin in (list, Sequence):
        return list[str] if inner == (str,) else None
    if origin in (dict, Mapping):
        key, value = map(_given, inner)
        return None if value is None else dict[key, value]  # type: ignore[valid-type]
    return None


def _union(kinds: Sequence[Any]) -> Any:
    """Return a union, words first; None if there is nothing but None."""
    if all(kind is NoneType for kind in kinds):
        return None
    words = [kind for kind in kinds if Literal == get_origin(kind)]
    return Union[(*words, *kinds)]
