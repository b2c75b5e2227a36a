"""The configuration file of ``dpicl serve``: YAML or TOML, checked as a whole before anything is opened.

Either ``head`` names the file of a head, or ``chain`` a function of the deployer's own that makes the chain, or the
sections ``store``, ``model``, ``release``, ``selector`` and ``budget`` describe one. ``keys`` are names and hashes;
``server`` has a default for everything. Paths are relative to the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from langchain_dpicl.errors import InvalidConfiguration, InvalidParameter
from langchain_dpicl.serving.guards import ApiKeys, Limits
from langchain_dpicl.serving.routes import PATH
from langchain_dpicl.serving.secrets import KeyFile, filled, mapping_of
from langchain_dpicl.spec import Spec, checked
from langchain_dpicl.spec.signatures import FilePath, Section, Text


class ServerSection(Section):
    """The address to listen on, and the limits of one request."""

    host: Annotated[str, Field(pattern=r"^[\w.:%-]+$")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    path: Annotated[str, Field(pattern=f"^{PATH}$")] = "/answer"
    page: bool = True
    title: Text = "Private answers"
    input_key: Text | None = None
    """The key under which the page asks; default: the store's or the head's, and "input" for a chain of one's own."""
    anonymous: bool = False
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


class Configuration(Spec):
    """A whole configuration. Make one with `read`."""

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


def read(path: str | Path, **server: Any) -> Configuration:
    """Read a configuration file. ``server`` replaces settings of its section.

    Raises `InvalidConfiguration`, which names all mistakes, or `InvalidParameter` for a file that is none.
    """
    path = Path(path)
    values = mapping_of("config", path)
    if "folder" in values:
        raise InvalidParameter("config", str(path), "folder is not a section")
    values, missing = filled(values)
    if missing:
        raise InvalidConfiguration(path.name, missing)
    if server and isinstance(values.get("server", {}), dict):
        values["server"] = {**values.get("server", {}), **server}
    made, mistakes = checked(Configuration, values, path.resolve().parent)
    if made is None:
        raise InvalidConfiguration(path.name, mistakes)
    return made
