"""The configuration file of ``dpicl serve``: YAML or TOML, checked as a whole before anything is opened.

Either ``head`` names the file of a head, or ``chain`` a function of the deployer's own that makes the chain, or the
sections ``store``, ``model``, ``release``, ``selector`` and ``budget`` describe one. ``keys`` are names and hashes;
``server`` has a default for everything. Paths are relative to the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from langchain_core.runnables import Runnable
from pydantic import AfterValidator, ConfigDict, Field, ValidationError, create_model, model_validator

from langchain_dpicl.budget.terms import Replay
from langchain_dpicl.errors import InvalidConfiguration, InvalidParameter
from langchain_dpicl.serving.conflicts import conflicts
from langchain_dpicl.serving.guards import ApiKeys, Limits
from langchain_dpicl.serving.kinds import (
    CandidatesSection,
    Count,
    DocumentsSection,
    JointSection,
    LabelVoteSection,
    ModelSection,
    PTRSection,
    VoteSection,
    imported,
)
from langchain_dpicl.serving.routes import PATH
from langchain_dpicl.serving.secrets import KeyFile, filled, mapping_of
from langchain_dpicl.serving.sources import HeadSection, Section, StoreSection
from langchain_dpicl.serving.typed import MeanSection, MedianSection, StructuredSection
from langchain_dpicl.store.filters import MetadataFilter

_Texts = CandidatesSection | JointSection | PTRSection | DocumentsSection
_Typed = MedianSection | MeanSection | StructuredSection
_Kinds = VoteSection | LabelVoteSection | _Texts | _Typed


def _read_filter(given: Any) -> Any:
    """See that it is a filter. What the file says is kept: the selector reads it again."""
    if given is not None:
        MetadataFilter.parse(given)
    return given


class SelectorSection(Section):
    """Members whose examples owners share, or calls of one owner each; the rate; and the relevance gate."""

    members: int | None = None
    """20 without calls."""
    calls: float | None = None
    """How many owners have a call of their own on average."""
    pad_to: int | None = None
    max_calls: int | None = None
    count_empty: bool = False
    """Whether the answers of members without examples count."""
    shots: int | None = None
    rate: float | None = None
    """The plan chooses it if neither rate, shots nor calls is given."""
    max_exemplars: int | None = None
    """How many examples a member gets at most. Required with rate and members, unless eligible is given."""
    threshold: Annotated[float, Field(strict=True, ge=-1, le=1)] | None = None
    """The least similarity of an owner's best example to a question, for the owner to take part. Public."""
    filter: Annotated[Any, AfterValidator(_read_filter)] = None
    """Which examples count, by their metadata (`store.filters`). Public."""
    eligible: Count | None = None
    """How many owners a typical question finds that near, and with an example that passes the filter. A public
    estimate, never a count of the store's."""

    @model_validator(mode="after")
    def _check(self) -> SelectorSection:
        if (self.threshold is None and self.filter is None) != (self.eligible is None):
            raise ValueError("eligible (a public estimate of the owners let through) goes with a threshold or a filter")
        return self


class BudgetSection(Section):
    """The guarantee, and the ledger that enforces it.

    With ``tickets`` each owner pays for itself: ``releases`` is the number of answers that one owner takes part in at
    most, and there is no last answer. The default of ``replay`` is "principal", although `PrivacyBudget` has True: the
    holders of a server's keys are not meant to learn each other's questions (`PrivacyBudget` says what each choice
    shows).
    """

    epsilon: Annotated[float, Field(gt=0)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    releases: Annotated[int, Field(ge=1)]
    tickets: bool = False
    ledger: str = Field("sqlite:///dpicl-budget.db", repr=False)
    witness: str | None = Field(None, repr=False)
    """A path or a database URL; None: beside the ledger."""
    key_file: str | None = None
    """Where the key of owners who pay with tickets is, if the store has none of its own; None: beside the ledger."""
    name: str = "default"
    scope: Literal["shared", "per_principal"] = "shared"
    replay: Replay = "principal"
    replay_patience: Annotated[float, Field(ge=0)] = 300.0
    keep_queries: bool = False
    on_exhausted: Literal["raise", "zero_shot"] = "raise"
    soft_limit: float | None = None
    accept_noise: bool = False
    """Whether a plan is kept whose noise overturns even answers on which all agree."""

    @model_validator(mode="after")
    def _check(self) -> BudgetSection:
        if self.tickets and self.soft_limit is not None:
            raise ValueError("leave out soft_limit if tickets is true: there is no last answer to be near to")
        return self


class ServerSection(Section):
    """Where to listen, and the limits of one request."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    path: Annotated[str, Field(pattern=f"^{PATH}$")] = "/answer"
    page: bool = True
    title: str = "Private answers"
    input_key: str | None = None
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


class MetricsSection(Section):
    """``/metrics`` for Prometheus. It shows all callers' use together, so it has a key of its own."""

    key: str | None = Field(None, repr=False)
    """The hash of the key; may be left out on an anonymous server."""
    principals: bool = False
    """Whether to name callers who have budgets of their own."""


class Configuration(Section):
    """A whole configuration. Make one with `read`."""

    chain: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    head: HeadSection | None = None
    store: StoreSection | None = None
    model: ModelSection = ModelSection()
    release: Annotated[_Kinds, Field(discriminator="kind")] | None = None
    selector: SelectorSection = SelectorSection()
    budget: BudgetSection | None = None
    keys: dict[str, str | list[str]] | Path = Field(default_factory=dict, repr=False)
    """Names, each with the hash of its key, or with several: an old key and a new one. Or a file of them, which is
    followed."""
    server: ServerSection = ServerSection()
    metrics: MetricsSection | None = None
    folder: Path = Field(default=Path(), exclude=True)

    def api_keys(self) -> ApiKeys | None:
        """Return the callers' keys; None if there are none."""
        if isinstance(self.keys, Path):
            return ApiKeys(news=KeyFile(self.folder / self.keys).news)
        return ApiKeys(self.keys) if self.keys else None

    def build(self) -> Runnable[Any, Any]:
        """Return the chain, with its store and ledger opened. Charges and freezes nothing."""
        if self.chain is not None:
            return self._own_chain(self.chain)
        if self.head is not None:
            return self.head.load(self.folder, self.model.choice.load() if "model" in self.model_fields_set else None)
        from langchain_dpicl import PoissonExampleSelector, PrivacyBudget

        assert self.store is not None
        assert self.release is not None
        assert self.budget is not None
        section = self.store.model_copy(update={"output_key": None}) if self.release.of_documents else self.store
        store = section.open(self.folder, self.release.outputs)
        selected = self.selector.model_dump(exclude_none=True, exclude={"count_empty"})
        if self.selector.calls is None:
            selected.setdefault("members", 20)
        if self.selector.threshold is not None or self.release.of_documents:
            selected["nearest_to"] = store.input_key
        selector = PoissonExampleSelector(store, **selected)
        promised = self.budget.model_dump()
        for name in ("ledger", "witness", "key_file"):
            promised[name] = self._place(promised[name])
        budget = PrivacyBudget(**promised)
        release: Runnable[Any, Any] = self.release.release(
            selector, budget, self.model, self.folder, self.selector.count_empty
        )
        fields: Any = {store.input_key: (Annotated[str, Field(min_length=1)], ...)}
        return release.with_types(input_type=create_model("Question", __config__=ConfigDict(extra="forbid"), **fields))

    def _own_chain(self, name: str) -> Runnable[Any, Any]:
        made = imported("chain", name, self.folder)()
        if not isinstance(made, Runnable):
            raise InvalidParameter("chain", name, "a function without arguments that returns the chain")
        return made

    def _place(self, given: str | None) -> str | None:
        """Return a path or a database URL; paths, a SQLite URL's too, are relative to the configuration."""
        if given is None or "://" not in given:
            return given and str(self.folder / given)
        path = given.removeprefix("sqlite:///")
        return given if path == given or path.startswith((":", "file:")) else f"sqlite:///{self.folder / path}"


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
    folder = path.resolve().parent
    mistakes = list(conflicts(values, folder))
    try:
        made = Configuration.model_validate({**values, "folder": folder}, context=folder)
    except ValidationError as error:
        mistakes = [*map(_told, error.errors(include_input=False, include_url=False)), *mistakes]
    if mistakes:
        raise InvalidConfiguration(path.name, mistakes)
    return made


def _told(fault: Any) -> tuple[str, str]:
    """A mistake as its field and words: of an `InvalidParameter` what is allowed, and no value."""
    field, cause = ".".join(map(str, fault["loc"])), fault.get("ctx", {}).get("error")
    if isinstance(cause, InvalidParameter):
        own = cause.parameter == fault["loc"][-1]
        return field if own else f"{field}.{cause.parameter}", cause.bound
    return field, re.sub(r"^Value error, ", "", fault["msg"])
