"""The options of a release: each field of a kind's section, and of the selector's, is one."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml  # type: ignore[import-untyped]
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from langchain_dpicl.cli import TYPES, check_apart, flag, given, model_of
from langchain_dpicl.errors import InvalidConfiguration, InvalidParameter
from langchain_dpicl.parameters import sentence
from langchain_dpicl.serving.secrets import content_of
from langchain_dpicl.spec import SECTIONS, Spec, checked
from langchain_dpicl.spec.conflicts import renamed
from langchain_dpicl.spec.description import SelectorSection
from langchain_dpicl.spec.releases import RENAMED

HEAD = "head"


def add_kinds(parser: Any) -> None:
    """Declare ``--mode`` and the options of every kind."""
    kinds = f"the kind of answer (default vote): {', '.join(SECTIONS)}; {HEAD}: of a file that `dpicl fit` has written"
    parser.add_argument("--mode", type=_mode, choices=(*SECTIONS, HEAD), default="vote", metavar="KIND", help=kinds)
    by_kind = {kind: _fields(kind) for kind in SECTIONS}
    takes = parser.add_argument_group("who takes part")
    what = parser.add_argument_group("the kind of answer")
    for option in dict.fromkeys(option for fields in by_kind.values() for option in fields):
        fields = {kind: mine[option][1] for kind, mine in by_kind.items() if option in mine}
        first, *others = fields.values()
        how = TYPES["bool" if first.annotation is bool else "str"]
        is_same = all(each.default == first.default for each in others)
        usual = f" (default {first.default})" * (is_same and first.default not in (None, "", PydanticUndefined))
        alike: dict[str, list[str]] = {}  # the kinds by their words for the option
        for kind, field in fields.items():
            alike.setdefault(sentence(option, field.description or ""), []).append(kind)
        is_shared = first is SelectorSection.model_fields.get(option)
        words = "; ".join(words + usual + f" [{', '.join(of)}]" * (not is_shared) for words, of in alike.items())
        (takes if is_shared else what).add_argument(flag(option), help=words, **how)


def spec_of(options: argparse.Namespace) -> Spec:
    """Return the description that the options give. Raises `InvalidParameter`, or names all mistakes if several."""
    mine = _fields(options.mode)
    for kind in SECTIONS:
        for option in _fields(kind).keys() - mine.keys():
            if (value := getattr(options, option)) is not None:
                raise InvalidParameter(flag(option), value, f"left out, or --mode {kind}")
    is_free = SECTIONS[options.mode].task == "none"  # a vote costs no call
    if is_free and None in (options.threshold, options.eligible):
        raise InvalidParameter("--threshold", options.threshold, "given with --eligible: who is near has a vote")
    sections: dict[str, dict[str, Any]] = {
        "store": {"data": options.data},
        "model": {"name": options.model, "url": model_of(options).url},
        "release": {"kind": options.mode},
        "selector": {},
        # Without --delta it follows the number of owners, which nobody has counted yet.
        "budget": {"delta": 0.5, **given(options, "epsilon", "delta", "releases", "tickets")},
    }
    for option, (place, field) in mine.items():
        sections[place.partition(".")[0]][place.rpartition(".")[2]] = _value(options, option, field)
    if is_free and sections["selector"]["members"] is sections["selector"]["calls"] is None:
        sections["selector"]["calls"] = sections["selector"]["eligible"]
    filled = {name: {key: each for key, each in part.items() if each is not None} for name, part in sections.items()}
    made, mistakes = checked(Spec, {name: part for name, part in filled.items() if part}, Path())
    if made is not None:
        return made
    told = [(_option(options, mine, *each), each[1].replace("Field required", "given")) for each in mistakes]
    if len(told) > 1:
        raise InvalidConfiguration("the command line", [(flag(option), words) for option, words in told])
    ((option, words),) = told
    raise InvalidParameter(flag(option), getattr(options, option), words)


def _fields(kind: str) -> dict[str, tuple[str, FieldInfo]]:
    """Return the options of a kind: of each its place in a description, and its field there.

    A kind's parameter of another option's name has the kind before it, such as ``--documents-shots``.
    """
    found = {name: (f"selector.{name}", field) for name, field in SelectorSection.model_fields.items()}
    taken = {"kind", "model", *found}
    for name, field in SECTIONS[kind].model_fields.items():
        if name != "kind":
            found[f"{kind}_{name}" if name in taken else name] = f"release.{name}", field
    return found


def _option(options: argparse.Namespace, mine: dict[str, tuple[str, FieldInfo]], place: str, words: str) -> str:
    """Return the option that a mistake is about: that of its place, or the first one that the words name."""
    for option, (known, _) in mine.items():
        if f"{place}.".startswith((f"{known}.", f"{known}[")):
            return option
    named = [place.replace(".", "_"), place.rpartition(".")[2], *re.findall(r"\w+", words)]
    return next((word for word in named if hasattr(options, word)), "mode")


def _mode(given: str) -> str:
    if given in RENAMED:
        raise argparse.ArgumentTypeError(renamed(given).partition(";")[0])
    return given


def _value(options: argparse.Namespace, option: str, field: FieldInfo) -> Any:
    """Return an option as a file would give it: texts by commas or in a file; numbers, dates and mappings as YAML."""
    text = getattr(options, option)
    if not isinstance(text, str):
        return text
    if os.path.exists(text):
        check_apart(options, option)
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    if str in kinds:
        return text
    if any(get_origin(kind) is list for kind in map(_bare, kinds)) and text[:1] not in ("[", "{"):
        return [part.strip() for part in text.split(",")] if "," in text else text
    try:
        return content_of(text, is_toml=False)
    except (yaml.YAMLError, ValueError, RecursionError):  # such as a date that is none
        return text


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind
