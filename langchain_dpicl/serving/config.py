"""The configuration file of ``dpicl serve``: YAML or TOML, checked as a whole before anything is opened.

Either ``head`` names the file of a head, or ``chain`` a function of the deployer's own that makes the chain, or the
sections ``store``, ``model``, ``release``, ``selector`` and ``budget`` describe one. Or ``releases`` is a list of such
descriptions, each with its ``path``. ``keys`` are names and hashes; ``server`` has a default for everything. Paths are
relative to the file.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from langchain_core.runnables import Runnable, RunnableParallel
from pydantic import AfterValidator, BeforeValidator, Field

from langchain_dpicl.errors import InvalidConfiguration, InvalidParameter, InvalidRecords
from langchain_dpicl.release.base import releases_in
from langchain_dpicl.serving.guards import ApiKeys, Limits
from langchain_dpicl.serving.logs import STEPS
from langchain_dpicl.serving.routes import PATH, heads_in
from langchain_dpicl.serving.secrets import KeyFile, filled, mapping_of
from langchain_dpicl.spec import Spec, checked
from langchain_dpicl.spec.conflicts import line_of
from langchain_dpicl.spec.signatures import FilePath, Section, Text

logger = logging.getLogger(STEPS)

_ORIGIN = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:\d{1,5})?")


def _origin(given: str) -> str:
    if not _ORIGIN.fullmatch(given):
        raise ValueError(
            "an origin as browsers send it, such as https://app.example.com: no path, no / at its end, no *"
        )
    return given


def _path(given: str) -> str:
    if not re.fullmatch(PATH, given):
        raise ValueError('a path such as "/tickets": it begins with /, ends without, and has letters, digits and ._~-')
    return given


def _names(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


RoutePath = Annotated[str, AfterValidator(_path)]


class ServerSection(Section):
    """The address to listen on, and the limits of one request."""

    host: Annotated[str, Field(pattern=r"^[\w.:%-]+$")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    path: RoutePath = "/answer"
    cors: list[Annotated[str, AfterValidator(_origin)]] = Field(default_factory=list)
    """The origins of web pages elsewhere that may ask, each as a browser sends it: "https://app.example.com"."""
    page: bool = True
    title: Text = "Private answers"
    description: Text | None = None
    """A description of the path's answers, for the agents that it is a tool of."""
    input_key: Text | None = None
    """The key under which the page asks; default: the store's or the head's, and "input" for a chain of one's own."""
    anonymous: bool = False
    mcp: RoutePath | None = None
    """The path at which all releases are tools of the Model Context Protocol."""
    hosts: list[Annotated[str, Field(pattern=r"^[\w.:\[\]-]+$")]] = Field(default_factory=list)
    """The names by which callers of ``mcp`` reach this server, beside ``host`` and those of this machine."""
    caller: Text = "anonymous"
    """The principal of `dpicl mcp` over standard input and output."""
    max_body_bytes: int = Limits.max_body_bytes
    max_batch: int = Limits.max_batch
    max_concurrency: int = Limits.max_concurrency
    body_seconds: float = Limits.body_seconds
    header_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """How long a connection may take to send a request's head; then it is closed."""
    max_connections: Annotated[int, Field(ge=1)] = 1000
    grace_seconds: Annotated[int, Field(ge=1)] = 60
    ready_question: Any = None
    """A public request, as the release gets it, that ``/ready`` asks the model: "ready?" under the store's input key
    and every key that the member's prompt names, unless given."""
    log_format: Literal["text", "json"] = "text"
    log_questions: bool = False
    """Whether the line of a request holds its question."""
    log_private_notes: bool = False
    """Whether the log has counts of private records: what was left out of the data, for instance."""

    def check(self) -> None:
        Limits(self.max_body_bytes, self.max_batch, self.max_concurrency, self.body_seconds)


class MetricsSection(Section):
    """``/metrics`` for Prometheus. It shows all callers' use together, so it has a key of its own."""

    key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = Field(None, repr=False)
    """The hash of the key; may be left out on an anonymous server."""
    principals: bool = False
    """Whether to name callers who have budgets of their own."""


class ServedRelease(Spec):
    """One of the releases (or heads, or chains) of a server, each with its data, its budget and its callers."""

    path: RoutePath
    title: Text | None = None
    """The page's; default: the path."""
    description: Text | None = None
    """As that of `ServerSection`."""
    input_key: Text | None = None
    """As that of `ServerSection`."""
    ready_question: Any = None
    """As that of `ServerSection`."""
    callers: Annotated[list[Text], Field(min_length=1), BeforeValidator(_names)] | None = None
    """Who may ask: names of keys, or a name. Left out: every key opens this path."""

    def question_key(self, chain: Runnable[Any, Any]) -> str:
        """Return the key under which a text asks the path's chain."""
        if self.input_key:
            return self.input_key
        if not (releases := releases_in(chain)):
            return heads_in(chain)[0].input_key
        return releases[0].query_key if self.chain else releases[0].selector.store.input_key


class Configuration(Spec):
    """A whole configuration. Make one with `read`."""

    releases: Annotated[list[ServedRelease], Field(min_length=1)] | None = None
    """Several releases, instead of the sections of one. ``budget`` beside them is that of all which have none."""

    keys: dict[str, str | list[str]] | FilePath = Field(default_factory=dict, repr=False)
    """Names, each with the hash of its key, or with several: an old key and a new one. Or a file of them, which is
    followed."""
    server: ServerSection = ServerSection()
    metrics: MetricsSection | None = None

    def api_keys(self) -> ApiKeys | None:
        """Return the callers' keys; None if there are none."""
        if isinstance(self.keys, Path):
            return ApiKeys(news=KeyFile(self.folder / self.keys).news)
        return ApiKeys(self.keys) if self.keys else None

    def unknown_names(self) -> list[str]:
        """Return words for each caller and quota that no key has now: a file of keys may change."""
        keys = self.api_keys()
        if keys is None or not isinstance(self.keys, Path):
            return []  # names of keys in the file itself were checked with it
        named: list[str] = []
        for each in self.served:
            budget: Any = each.budget or self.budget
            quota = budget.quota if budget is not None and isinstance(budget.quota, dict) else {}
            named += [*(each.callers or ()), *quota]
        return [f"no key named {name} in {self.keys} now" for name in dict.fromkeys(named) if name not in keys.names]

    @property
    def served(self) -> list[ServedRelease]:
        """All releases, each with its path; the only one has the server's."""
        if self.releases is not None:
            return self.releases
        own = {name: getattr(self, name) for name in Spec.model_fields}
        about = {
            name: getattr(self.server, name) for name in ("path", "title", "description", "input_key", "ready_question")
        }
        return [ServedRelease.model_construct(self.model_fields_set, **own, **about)]

    def at(self, path: str | None) -> ServedRelease:
        """Return the release at a path. None: the only one. Raises `InvalidParameter`."""
        found = [each for each in self.served if path in (None, each.path)]
        if len(found) != 1:
            raise InvalidParameter("path", path, f"one of {', '.join(each.path for each in self.served)}")
        return found[0]

    def chains(self) -> dict[str, Runnable[Any, Any]]:
        """Return the chain of each path. Charges and freezes nothing.

        All data files are read before a text is embedded, and all stores opened before any ledger. `InvalidRecords`
        tells the faults of all files.
        """
        records, faults = [], []
        for number, each in enumerate(self.served, 1):
            logger.info("reading %s, %d of %d", each.path, number, len(self.served))
            try:
                records.append(each.records())
            except InvalidRecords as error:
                faults.append(str(error))
        if faults:
            raise InvalidRecords("; ".join(faults))
        selectors = []
        for number, (each, some) in enumerate(zip(self.served, records, strict=True), 1):
            logger.info("opening %s, %d of %d", each.path, number, len(records))
            selectors.append(each.selected(some))
        common = None
        if self.releases is not None and self.budget is not None:
            common = self.budget.open(self.folder)
        return {
            each.path: each.built(selector, common, line_of(each.path))
            for each, selector in zip(self.served, selectors, strict=True)
        }

    def build(self) -> Runnable[Any, Any]:
        """Return the only chain, or all in parallel."""
        return joined(self.chains())


def joined(chains: Mapping[str, Runnable[Any, Any]]) -> Runnable[Any, Any]:
    """Return the only one of some chains, or a chain that holds them all."""
    return next(iter(chains.values())) if len(chains) == 1 else RunnableParallel(chains)


def read(path: str | Path, **server: Any) -> Configuration:
    """Read a configuration file. ``server`` replaces settings of its section.

    Raises `InvalidConfiguration`, which names all mistakes, or `InvalidParameter` for a file that is none.
    """
    path = Path(path)
    values = mapping_of("config", path)
    values, missing = filled(values)
    if missing:
        raise InvalidConfiguration(path.name, missing)
    if server and isinstance(values.get("server", {}), dict):
        values["server"] = {**values.get("server", {}), **server}
    made, mistakes = checked(Configuration, values, path.resolve().parent)
    if made is None:
        raise InvalidConfiguration(path.name, mistakes)
    return made
