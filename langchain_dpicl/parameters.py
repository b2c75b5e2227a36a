"""Parameters of this package's functions, and the words for them, read from source and docstrings without an import."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).parent


class Parameter(NamedTuple):
    """A parameter as its source has it. ``default`` is None if it must be given."""

    annotation: str
    default: str | None
    description: str


def words_of(*docstrings: str | None) -> dict[str, str]:
    """Return the words for each parameter, from the sections "Parameters". The first docstring that has one counts."""
    found: dict[str, str] = {}
    for text in docstrings:
        _, _, section = inspect.cleandoc(text or "").partition("Parameters\n----------\n")
        for names, words in re.findall(r"^(\w+(?:, \w+)*)\n((?: {4}.*\n|\n)+)", f"{section}\n", re.MULTILINE):
            for name in names.split(", "):
                found.setdefault(name, " ".join(words.split()))
    return found


def kinds() -> list[str]:
    """Return the names of the kinds of aggregators, in the order of their files."""
    texts = [file.read_text("utf-8") for file in sorted(_HERE.glob("aggregators/*.py"))]
    return re.findall(r'^    kind = "(.+)"$', "".join(texts), re.MULTILINE)


def sentence(name: str, description: str) -> str:
    """The first sentence about a parameter; of one that shares its description, the one that begins with its name."""
    own = re.search(rf"(?:^|(?<=\. ))``{name}`` is (.*)", description)
    words = own[1] if own else description
    return re.split(r"(?<=[^\s.])[.;](?: |$)", words)[0].replace("`", "").replace("%", "%%")


@cache
def _parsed(file: str) -> ast.Module:
    return ast.parse((_HERE / file).read_bytes())


def parameters_of(file: str, kind: str, method: str = "__init__") -> dict[str, Parameter]:
    """Return the parameters of a function, or of a class's method. ``file``: of this package.

    The method or its class describes them.
    """
    node: Any = _parsed(file)
    docstrings: list[str | None] = []
    for name in (kind, method):
        if not isinstance(node, ast.FunctionDef):
            node = next(each for each in node.body if getattr(each, "name", None) == name)
            docstrings.insert(0, ast.get_docstring(node))
    words = words_of(*docstrings)
    given = node.args
    defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults + given.kw_defaults
    return {
        each.arg: Parameter(ast.unparse(each.annotation), default and ast.unparse(default), words.get(each.arg, ""))
        for each, default in zip(given.args + given.kwonlyargs, defaults, strict=True)
        if each.annotation is not None  # as that of self is
    }
