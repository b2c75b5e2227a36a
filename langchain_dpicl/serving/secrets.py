"""The secrets that a configuration names and does not hold: environment variables, and a file of keys that may change.

A value that came from the environment is in no message, and in no ``repr`` of a configuration.
"""

from __future__ import annotations

import os
import re
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from langchain_dpicl.errors import InvalidParameter

PLACES = (("store", "url"), ("budget", "ledger"), ("budget", "witness"), ("model", "url"), ("metrics", "key"))
"""The fields that may name variables, beside all of ``keys``: elsewhere, ``${NAME}`` is text."""

_RACY_SECONDS = 1.0
"""A file that was changed so shortly before it was read may be changed again at what its clock calls the same time."""


class _Yaml(yaml.SafeLoader):  # type: ignore[misc]
    """YAML in which 1e-6 is a number, as in JSON and YAML 1.2. To PyYAML it is a text."""


_WITH_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$", re.ASCII)
_Yaml.add_implicit_resolver("tag:yaml.org,2002:float", _WITH_EXPONENT, "-+.0123456789")


def content_of(text: str, is_toml: bool) -> Any:
    """Return the content of a YAML or TOML text. Raises `ValueError`, ``yaml.YAMLError`` or `RecursionError`."""
    return tomllib.loads(text) if is_toml else yaml.load(text, _Yaml)


def mapping_of(parameter: str, path: Path) -> dict[str, Any]:
    """Return what a YAML or TOML file holds. Raises `InvalidParameter` unless it is a mapping with names as keys."""
    reason, values = "not a mapping of names", None
    try:
        values = content_of(path.read_text("utf-8"), path.suffix == ".toml")
        if isinstance(values, dict) and all(isinstance(name, str) for name in values):
            return values
    except tomllib.TOMLDecodeError as error:
        reason = f"not TOML ({error})"
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = "not YAML" + ("" if mark is None else f" (line {mark.line + 1})")
    except (OSError, ValueError, RecursionError) as error:
        reason = f"cannot be read ({type(error).__name__})"
    raise InvalidParameter(parameter, str(path), reason)


def filled(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return a configuration with variables' values in the place of their names; and mistakes: field, and words.

    ``${NAME}`` stands for a part of a text, ``{env: NAME}`` for the whole. An empty variable is a missing one.
    """
    mistakes: list[tuple[str, str]] = []

    def named(name: str, place: str) -> str:
        if found := os.environ.get(name, ""):
            return found
        mistakes.append((place, f"the environment has no {name}, or an empty one"))
        return ""

    def fill(given: Any, place: str) -> Any:
        if isinstance(given, list):
            return [fill(each, place) for each in given]
        if isinstance(given, dict) and set(given) == {"env"} and isinstance(given["env"], str):
            return named(given["env"], place)
        if not isinstance(given, str):
            return given
        if re.search(r"\$\{(?![A-Za-z_]\w*\})", given):
            mistakes.append((place, "${NAME} names a variable by letters, digits and _"))
        return re.sub(r"\$\{([A-Za-z_]\w*)\}", lambda found: named(found[1], place), given)

    def fill_sections(given: Mapping[str, Any], where: str) -> dict[str, Any]:
        found = dict(given)
        for section, field in PLACES:
            if isinstance(part := found.get(section), dict) and field in part:
                found[section] = {**part, field: fill(part[field], f"{where}{section}.{field}")}
        return found

    made = fill_sections(values, "")
    if isinstance(several := made.get("releases"), list):
        made["releases"] = [
            fill_sections(each, f"releases[{place}].") if isinstance(each, dict) else each
            for place, each in enumerate(several)
        ]
    if isinstance(keys := made.get("keys"), dict):
        made["keys"] = {name: fill(given, f"keys.{name}") for name, given in keys.items()}
    return made, mistakes


class KeyFile:
    """A file of names and their keys' hashes, as under ``keys`` of a configuration."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: object = self

    def news(self) -> dict[str, Any] | None:
        """Return its content if it has changed since the last look, else None. Costs a ``stat``.

        Raises `InvalidParameter`, once for each change, if it cannot be read.
        """
        try:
            found = self._path.stat()
            signature: object = found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
            settled = time.time() - max(found.st_mtime, found.st_ctime) > _RACY_SECONDS
        except OSError:
            signature, settled = None, True
        if signature == self._seen:
            return None
        self._seen = signature if settled else self
        values, mistakes = filled({"keys": mapping_of("keys", self._path)})
        if mistakes:
            raise InvalidParameter(mistakes[0][0], "(not shown)", mistakes[0][1])
        content: dict[str, Any] = values["keys"]
        return content
