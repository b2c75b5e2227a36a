"""The configuration file of ``dpicl serve``: YAML or TOML, checked as a whole before anything is opened.

Either ``head`` names the file of a head, or ``chain`` a function of the deployer's own that makes the chain, or the
sections ``store``, ``model``, ``release``, ``selector`` and ``budget`` describe one. ``keys`` are names and hashes;
``server`` has a default for everything. Paths are relative to the file.
"""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from langchain_dpicl.budget.terms import Replay
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.members.chains import ModelChoice, Wording, label_member, read_lines
from langchain_dpicl.once.head import PrivateHead
from langchain_dpicl.serving.guards import Limits
from langchain_dpicl.serving.routes import PATH

Count = Annotated[int, Field(strict=True, ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class StoreSection(_Section):
    """The private examples: a saved store, or a data file that is embedded at every start."""

    file: Path | None = None
    data: Path | None = None
    input_key: str = "text"
    output_key: str = "label"
    owner_key: str | None = None

    @model_validator(mode="after")
    def _check(self) -> StoreSection:
        if (self.file is None) == (self.data is None):
            raise ValueError("give one: file (a saved store) or data (JSON lines or CSV)")
        return self


class HeadSection(_Section):
    """A head that was released once, as `dpicl fit` writes it. The file's name alone may stand for the section.

    A server reads it when it starts, and needs no budget and no ledger for it.
    """

    file: Path
    embeddings: Path | None = None
    """The folder of the sentence-transformers model that embedded the head's records. Default: the embedded model."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, given: Any) -> Any:
        return {"file": given} if isinstance(given, str) else given

    def load(self, folder: Path, llm: BaseLanguageModel[Any] | None) -> PrivateHead:
        """Read it. ``llm``: the model of its label scores. Raises `InvalidParameter` for another file or model."""
        from langchain_dpicl.local import local_embeddings

        try:
            model = local_embeddings() if self.embeddings is None else local_embeddings(folder / self.embeddings)
            return PrivateHead.load(folder / self.file, model, llm=llm)
        except InvalidParameter as error:
            names = {"path": "head.file", "embeddings": "head.embeddings", "llm": "model"}
            wrong = InvalidParameter(names.get(error.parameter, error.parameter), error.value, error.bound)
        raise wrong


def _time_limit(value: Any) -> Any:
    if value in ("auto", None) or (type(value) in (int, float) and 0 < value < float("inf")):
        return value
    raise ValueError("auto, a number of seconds > 0, or nothing at all")


class ModelSection(_Section):
    """An embedded model (by name), or one on an OpenAI-compatible server, whose key is read from the environment.

    Beside a head: the model of its label scores, if it looks at any.
    """

    name: str | None = None
    url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    max_concurrency: Count | None = None
    """How many calls of one answer run at once: not more than the server answers at once."""
    timeout: Annotated[Any, AfterValidator(_time_limit)] = "auto"
    """Seconds that one call may take before its member abstains."""


class LabelVoteSection(_Section):
    """Labels, by a vote of the sampled owners' own. No model is asked."""

    kind: Literal["label_vote"]
    labels: list[str]
    prior: dict[str, float] | None = None
    """Public probabilities of the labels."""
    details: bool = False
    """Whether an answer is a label, its confidence and the noisy counts."""
    lead: float | None = None
    mechanism: Literal["vote", "vote-em", "scores"] | None = None
    """Default: the plan chooses."""

    @property
    def about(self) -> dict[str, Any]:
        """What the file says of the vote, beside its labels."""
        return self.model_dump(include={"prior", "details", "lead", "mechanism"}, exclude_none=True)


class VoteSection(LabelVoteSection):
    """Labels, by a vote of the members' answers."""

    kind: Literal["vote", "scores"]  # type: ignore[assignment]
    prior: Literal["zero_shot"] | dict[str, float] | None = None  # type: ignore[assignment]
    """Or the model's answer without examples."""
    instruction: str | None = None
    content_free: str | list[str] | None = None


class _TextSection(_Section):
    instruction: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 60


class EmbeddingSection(_TextSection):
    """The public sentence nearest to the noisy mean."""

    kind: Literal["embedding"]
    candidates: Path | None = None
    n_candidates: int = 20


class JointSection(_TextSection):
    """Ranked keywords of a public domain."""

    kind: Literal["keywords_joint"]
    domain: Path | None = None
    k: int = 10


class PTRSection(_TextSection):
    """A set of keywords without a fixed domain."""

    kind: Literal["keywords_ptr"]
    k: int | tuple[int, int] = (15, 30)


_Kinds = VoteSection | LabelVoteSection | EmbeddingSection | JointSection | PTRSection


class SelectorSection(_Section):
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
    eligible: Count | None = None
    """How many owners are that near to a typical question. A public estimate, never a count of the store's."""

    @model_validator(mode="after")
    def _check(self) -> SelectorSection:
        if (self.threshold is None) != (self.eligible is None):
            raise ValueError("threshold and eligible (a public estimate of the owners who reach it) go together")
        return self


class BudgetSection(_Section):
    """The guarantee, and the ledger that enforces it.

    With ``tickets`` each owner pays for itself: ``releases`` is the number of answers that one owner takes part in at
    most, and there is no last answer. The default of ``replay`` is "principal", although `PrivacyBudget` has True: the
    holders of a server's keys are not meant to learn each other's questions (`PrivacyBudget` says what each choice
    shows).
    """

    epsilon: float
    delta: float
    releases: int
    tickets: bool = False
    ledger: str = "sqlite:///dpicl-budget.db"
    witness: str | None = None
    """A path or a database URL; None: beside the ledger."""
    name: str = "default"
    scope: Literal["shared", "per_principal"] = "shared"
    replay: Replay = "principal"
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


class ServerSection(_Section):
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


class Configuration(_Section):
    """A whole configuration. Make one with `read`."""

    chain: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    head: HeadSection | None = None
    store: StoreSection | None = None
    model: ModelSection = ModelSection()
    release: Annotated[_Kinds, Field(discriminator="kind")] | None = None
    selector: SelectorSection = SelectorSection()
    budget: BudgetSection | None = None
    keys: dict[str, str] = Field(default_factory=dict)
    server: ServerSection = ServerSection()
    folder: Path = Field(default=Path(), exclude=True)

    @model_validator(mode="after")
    def _check(self) -> Configuration:
        whole = next((name for name in ("chain", "head") if getattr(self, name) is not None), None)
        if whole is not None:
            described = {"chain", "head", "store", "release", "budget", "selector"} - {whole}
            described |= {"model"} if self.chain is not None else set()
            if described := described & self.model_fields_set:
                raise ValueError(f"{whole} stands alone: leave out {', '.join(sorted(described))}")
        elif missing := [name for name in ("store", "release", "budget") if getattr(self, name) is None]:
            raise ValueError(f"missing: {', '.join(missing)} (or head, or chain)")
        if self.head is not None:
            if self.server.input_key is not None:
                raise ValueError("leave out server.input_key: the head's file has it")
            if limits := self.model.model_fields_set & {"max_concurrency", "timeout"}:
                raise ValueError(f"leave out model.{min(limits)}: no member is called beside a head")
        if getattr(self.release, "kind", None) == "label_vote" and "model" in self.model_fields_set:
            raise ValueError("leave out model: a label_vote asks none")
        if self.budget is not None and self.budget.tickets and self.selector.threshold is None:
            raise ValueError(
                "budget.tickets needs selector.threshold and selector.eligible (-1 makes every owner eligible)"
            )
        return self

    def build(self) -> Runnable[Any, Any]:
        """Return the chain, with its store and ledger opened. Charges and freezes nothing."""
        if self.chain is not None:
            return self._own_chain(self.chain)
        if self.head is not None:
            return self.head.load(self.folder, self._choice.load() if "model" in self.model_fields_set else None)
        from langchain_dpicl import DPAggregate, ExemplarStore, PoissonExampleSelector, PrivacyBudget, PrivateEnsemble
        from langchain_dpicl.local import local_embeddings
        from langchain_dpicl.store.records import read_records

        assert self.store is not None
        assert self.budget is not None
        if self.store.file is not None:
            store = ExemplarStore.load(self.folder / self.store.file, local_embeddings())
        else:
            records = read_records(self.folder / str(self.store.data))
            keys = self.store.model_dump(include={"input_key", "output_key", "owner_key"})
            store = ExemplarStore.from_records(records, local_embeddings(), progress=False, **keys)
        selected = self.selector.model_dump(exclude_none=True, exclude={"count_empty"})
        if self.selector.calls is None:
            selected.setdefault("members", 20)
        if self.selector.threshold is not None:
            selected["nearest_to"] = store.input_key
        selector = PoissonExampleSelector(store, **selected)
        promised = self.budget.model_dump()
        for name in ("ledger", "witness"):
            promised[name] = self._place(promised[name])
        budget = PrivacyBudget(**promised)
        member, aggregator = self._mechanism(store.input_key, store.output_key or "output")
        how = self.model.model_dump(include={"max_concurrency", "timeout"}) | {"count_empty": self.selector.count_empty}
        ensemble = PrivateEnsemble(selector, member, **how)
        release = ensemble | DPAggregate(aggregator, budget, return_receipt=True)
        fields: Any = {store.input_key: (Annotated[str, Field(min_length=1)], ...)}
        return release.with_types(input_type=create_model("Question", __config__=ConfigDict(extra="forbid"), **fields))

    @property
    def _choice(self) -> ModelChoice:
        return ModelChoice(self.model.name, self.model.url, self.model.api_key_env)

    def _own_chain(self, name: str) -> Runnable[Any, Any]:
        module, _, function = name.partition(":")
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
        try:
            make = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            bound = f"MODULE:FUNCTION beside the file or installed ({type(error).__name__}: {error})"
            raise InvalidParameter("chain", name, bound) from None
        made = make()
        if not isinstance(made, Runnable):
            raise InvalidParameter("chain", name, "a function without arguments that returns the chain")
        return made

    def _place(self, given: str | None) -> str | None:
        """Return a path or a database URL; paths, a SQLite URL's too, are relative to the configuration."""
        if given is None or "://" not in given:
            return given and str(self.folder / given)
        path = given.removeprefix("sqlite:///")
        return given if path == given or path.startswith((":", "file:")) else f"sqlite:///{self.folder / path}"

    def _mechanism(self, input_key: str, output_key: str) -> tuple[Runnable[Any, Any] | None, Any]:
        """Return the member, if there is one, and the aggregator."""
        from langchain_dpicl.aggregators import EmbeddingMean, Keywords, LabelVote, NoisyVote
        from langchain_dpicl.local import local_embeddings

        choice, release = self._choice, self.release
        if isinstance(release, VoteSection):
            given = release.model_dump(include={"instruction", "content_free"}, exclude_none=True)
            member = label_member(choice, release.labels, input_key, **given)
            return member, NoisyVote(release.labels, scores=release.kind == "scores", **release.about)
        if isinstance(release, LabelVoteSection):
            return None, LabelVote(release.labels, **release.about)
        assert release is not None

        wording = Wording(input_key, output_key, release.instruction)

        def writer(temperature: float) -> Runnable[Any, Any]:
            return wording.member(choice.load(max_tokens=release.max_tokens, temperature=temperature))

        def lines(field: str, default: Any) -> Any:
            """Read the release's file of this name, if there is one."""
            file = getattr(release, field)
            return default if file is None else read_lines(f"release.{field}", self.folder / file)

        if isinstance(release, PTRSection):
            return writer(0.0), Keywords.ptr(release.k)
        if isinstance(release, JointSection):
            return writer(0.0), Keywords.joint_em(lines("domain", "query"), release.k)
        public = lines("candidates", writer(0.9))
        return writer(0.0), EmbeddingMean(local_embeddings(), public, release.n_candidates)


def read(path: str | Path, **server: Any) -> Configuration:
    """Read a configuration file. ``server`` replaces settings of its section. `InvalidParameter` names the field."""
    import yaml  # type: ignore[import-untyped]

    path, reason = Path(path), ""
    values: Any = None
    try:
        text = path.read_text("utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            reason = "not a mapping of sections"
        elif "folder" in values:
            reason = "folder is not a section"
    except tomllib.TOMLDecodeError as error:
        reason = f"not TOML ({error})"
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = "not YAML" + ("" if mark is None else f" (line {mark.line + 1})")
    except (OSError, ValueError) as error:
        reason = f"cannot be read ({type(error).__name__})"
    if reason:
        raise InvalidParameter("config", str(path), reason)
    if server and isinstance(values.get("server", {}), dict):
        values["server"] = {**values.get("server", {}), **server}
    try:
        return Configuration.model_validate({**values, "folder": path.resolve().parent})
    except ValidationError as error:
        fault = error.errors(include_input=False, include_context=False, include_url=False)[0]
    name = ".".join(str(part) for part in fault["loc"]) or path.name
    raise InvalidParameter(name, "(as in the file)", re.sub(r"^Value error, ", "", fault["msg"]))
