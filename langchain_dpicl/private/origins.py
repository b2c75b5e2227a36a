"""The origin of code: what a copy of a chain shares by reference, and what it has of its own.

By reference go the standard library, this package, and the distributions that it and LangChain depend on. Of its own a
copy has ``__main__``, notebooks, files beside them, and the distributions in which the chain's own functions are
defined. Any other installed distribution has to be named: ``share=`` takes it by reference, ``isolate=`` by value.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
import sysconfig
from collections.abc import Iterable
from types import FunctionType

from packaging.requirements import Requirement

_ROOTS = ("langchain-dpicl", "langchain", "langgraph")
SHARED_NAMES = (
    "anthropic._base_client.BaseClient",
    "google.genai.client.Client",
    "httpx._client.BaseClient",
    "jinja2.environment.Template",
    "llama_cpp.llama.Llama",
    "logging.Logger",
    "openai._base_client.BaseClient",
    "requests.sessions.Session",
    "spacy.language.Language",
    "torch.nn.modules.module.Module",
    "xllamacpp.Server",
)
"""Libraries' models and compiled templates, and clients of model servers, by name. A name that becomes outdated fails
closed: such an object is copied, or refused if it cannot be."""

_EXTRAS = frozenset({"dev", "docs"})
"""Of this package: no chain's code comes from these."""


def top(module: object) -> str:
    """The outermost package of a module's name; "" if it has none."""
    return module.partition(".")[0] if isinstance(module, str) else ""


def home(function: FunctionType) -> str:
    """The name of the module whose globals a function has."""
    return str(function.__globals__.get("__name__") or "")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


_PYTHONS = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))


def _places(names: Iterable[str]) -> tuple[str, ...]:
    """The folders in which distributions are installed, an editable one's sources included."""
    found = [importlib.metadata.distribution(name) for name in names]
    editable = any('"editable": true' in (each.read_text("direct_url.json") or "") for each in found)
    return ("",) if editable else tuple(str(each.locate_file("")) for each in found)


def _stands_in(package: str, places: tuple[str, ...]) -> bool:
    """Return whether a package's module is the one that stands there, and no file of the user's with its name."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is None or file.startswith(places)


@functools.cache
def _distributions() -> dict[str, frozenset[str]]:
    """By an installed package's outermost name: the distributions that have it."""
    found = importlib.metadata.packages_distributions()
    return {package: frozenset(map(_normal, names)) for package, names in found.items()}


@functools.cache
def _closure() -> frozenset[str]:
    """The distributions that this package and LangChain's depend on, with the integrations that are installed."""
    installed = {name for names in _distributions().values() for name in names}
    waiting = [name for name in installed if name.startswith(("langchain", "langgraph", "langsmith", "langserve"))]
    waiting += _ROOTS
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needed = [Requirement(each) for each in importlib.metadata.requires(name) or ()]
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [_normal(each.name) for each in needed if _is_taken(each, name)]
    return frozenset(found)


def _is_taken(needed: Requirement, by: str) -> bool:
    if needed.marker is None:
        return True
    extras = [""]
    if by == "langchain-dpicl":
        extras += sorted(set(importlib.metadata.metadata(by).get_all("Provides-Extra") or ()) - _EXTRAS)
    return any(needed.marker.evaluate({"extra": extra}) for extra in extras)


class Origins:
    """The code that one chain's copies share by reference.

    ``share`` and ``isolate`` are names of packages, as the user gave them. ``own`` are the modules in which the chain's
    own functions are defined: their distributions are copied.
    """

    def __init__(
        self,
        share: Iterable[str] = (),
        isolate: Iterable[str] = (),
        own: Iterable[str] = (),
    ) -> None:
        self._share = set(map(top, share))
        self._isolate = set(map(top, isolate))
        self._own = {name for module in own for name in _distributions().get(top(module), ())}
        if self._own:  # reading what is installed takes a while
            self._own -= _closure()
        self._known: dict[str, bool | None] = {}

    def by_reference(self, module: object) -> bool | None:
        """Return whether code of this module is shared; None for an installed distribution that has to be named."""
        package = top(module)
        if package not in self._known:
            self._known[package] = self._find(package)
        return self._known[package]

    @property
    def shared(self) -> list[str]:
        """The packages that were asked for and are shared, without Python's own."""
        named = [package for package, is_shared in self._known.items() if is_shared]
        return sorted(set(named) - sys.stdlib_module_names)

    def _find(self, package: str) -> bool | None:
        if package in self._isolate or package in ("", "__main__", "__mp_main__"):
            return False
        if package in self._share or package == "langchain_dpicl":
            return True
        if package in sys.stdlib_module_names:
            return _stands_in(package, _PYTHONS)
        names = _distributions().get(package, frozenset())
        if not names or names & self._own or not _stands_in(package, _places(names)):
            return False
        return True if names & _closure() else None
