"""The types of a path's requests and answers in an OpenAPI document, and the ids of its operations.

Generators of clients need one name for each type: a title stands once in the document, and no type wraps another one.
The types of a path have the path's name, and no title beside it: ``/tickets`` has ``TicketsQuestion`` and
``TicketsAnswer``. If two paths have one name (the same path below two prefixes of an application), pydantic tells
their types apart by the module, which stands for the path here.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from langchain_core.load.serializable import Serializable
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, RootModel
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from typing_extensions import TypedDict, is_typeddict

_PLAIN = re.compile(r"(/[a-z0-9]+(-[a-z0-9]+)*)+")
"""Paths that differ in more than case and signs. Another path's name ends with its checksum."""

_MAPPING: Any = TypedDict
"""Makes types whose names are computed."""


class Untitled(BaseModel):
    """A model whose name stands for its title."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Leave out the title."""
        found = super().__get_pydantic_json_schema__(schema, handler)
        handler.resolve_ref_schema(found).pop("title", None)
        return found


class _PublicFields(GenerateJsonSchema):
    """The schemas of answers, without the private fields of dataclasses, which are not sent."""

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        """Return a dataclass's."""
        found = super().dataclass_schema(schema)
        return _shown(found) if self.mode == "serialization" else found

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the same where another generator is at work, which meets this as an annotation."""
        found = handler(schema)
        if handler.mode == "serialization":
            _shown(handler.resolve_ref_schema(found))
        return found


def _shown(about: dict[str, Any]) -> dict[str, Any]:
    """Take the private fields out of an object's schema, and return it."""
    properties: dict[str, Any] = about.get("properties", {})
    about["properties"] = {name: each for name, each in properties.items() if not name.startswith("_")}
    about["required"] = [name for name in about.get("required", []) if not name.startswith("_")]
    return about


def name_of(path: str) -> str:
    """Return the name of a path among an application's types: "TeamReviews" for "/team/reviews"."""
    return "".join(word[:1].upper() + word[1:] for word in re.findall(r"[A-Za-z0-9]+", path)) + _mark(path)


def operation_id(route: Any) -> str:
    """Return the id of an operation: "tickets_invoke" for "/tickets/invoke"."""
    path, _, endpoint = str(route.path_format).rpartition("/")
    return f"{word_of(path)}_{endpoint}"


def word_of(path: str) -> str:
    """Return a path as a word of letters, digits and _: "team_reviews" for "/team/reviews"."""
    return re.sub(r"\W", "_", path[1:].replace("-", "__")) + _mark(path)


def described(schema: Callable[..., Any], path: str, part: str) -> Any:
    """Return the type that a chain's ``schema`` describes, named for a path: ``Any`` if it has no JSON schema."""
    try:
        model = schema()
        model.model_json_schema()
    except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError):
        return Any
    return _named(model, f"{name_of(path)}{part}", module_of(path))


def json_schema(schema: Callable[..., Any], mode: JsonSchemaMode) -> dict[str, Any]:
    """Return a chain's JSON schema; an empty one if it has none."""
    try:
        found: dict[str, Any] = schema().model_json_schema(mode=mode, schema_generator=_PublicFields)
        return found
    except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError):
        return {}


def module_of(path: str) -> str:
    """Return the module of a path's types."""
    return f"path_{_checksum(path)}"


def _named(kind: Any, name: str, module: str) -> Any:
    """Return a type under a name of its own, and what a model wraps instead of the model.

    Messages of LangChain and types without a name stay as they are.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return Annotated[(_named(inner[0], name, module), *inner[1:])]
    if origin in (Union, UnionType):
        return Union[(*(_named(each, name, module) for each in inner),)]
    if is_typeddict(origin or kind):
        return _named_mapping(kind, name, module)
    if dataclasses.is_dataclass(kind):
        return Annotated[kind, _PublicFields]
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)) or issubclass(kind, Serializable):
        return kind
    if issubclass(kind, RootModel) and not kind.model_config.get("json_schema_extra"):
        root = kind.model_fields["root"]
        content: Any = root.annotation
        return _named(Annotated[(content, *root.metadata)] if root.metadata else content, name, module)
    return type(name, (Untitled, kind), {"__module__": module, "__doc__": kind.__doc__})


def _named_mapping(kind: Any, name: str, module: str) -> Any:
    """Return a TypedDict, perhaps one of some type, under a name of its own. So are the models in its fields."""
    origin = get_origin(kind) or kind
    given = dict(zip(getattr(origin, "__parameters__", ()), get_args(kind), strict=False))
    hints = {}
    for field, hint in get_type_hints(origin, include_extras=True).items():
        content = given.get(hint, hint)
        is_model = isinstance(content, type) and issubclass(content, BaseModel)
        hints[field] = _named(content, f"{name}Fields", module) if is_model else content
    made = _MAPPING(name, hints, total=origin.__total__)
    made.__module__, made.__doc__ = module, origin.__doc__
    own: ConfigDict = getattr(origin, "__pydantic_config__", ConfigDict())
    made.__pydantic_config__ = {**own, "json_schema_extra": lambda schema: schema.pop("title", None)}
    return made


def _mark(path: str) -> str:
    return "" if _PLAIN.fullmatch(path) else _checksum(path)


def _checksum(path: str) -> str:
    return f"{zlib.crc32(path.encode()):08x}"
