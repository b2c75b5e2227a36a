"""A whole description: store, model, release, selector and budget, or a head, or a chain of the deployer's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import Runnable
from pydantic import AfterValidator, ConfigDict, Field, ValidationError, create_model

from langchain_dpicl import sql
from langchain_dpicl.budget import PrivacyBudget
from langchain_dpicl.budget.terms import Replay
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.selection import PoissonExampleSelector
from langchain_dpicl.spec.conflicts import conflicts, line_of
from langchain_dpicl.spec.mistakes import told
from langchain_dpicl.spec.releases import RENAMED, SECTIONS, DocumentsSection, GivenRelease, OpenLine, kind_of
from langchain_dpicl.spec.signatures import Count, Section, Text, section_from
from langchain_dpicl.spec.sources import HeadSection, ModelSection, StoreSection
from langchain_dpicl.spec.typed import imported
from langchain_dpicl.store.filters import MetadataFilter
from langchain_dpicl.store.store import ExemplarStore

_UNKNOWN = "Extra inputs are not permitted"
"""Pydantic's words for a field that a section does not have."""
MEMBERS = 20
"""Parallel calls, unless a description says how many."""


def _read_filter(given: Any) -> Any:
    """See that it is a filter. What the file says is kept: the selector reads it again."""
    if given is not None:
        MetadataFilter.parse(given)
    return given


@section_from(PoissonExampleSelector, leave_out=("nearest_to",))
class SelectorSection(Section):
    """Members whose examples owners share, or calls of one owner each; the rate; and the relevance gate."""

    threshold: Annotated[float, Field(ge=-1, le=1)] | None = None
    """The least similarity of an owner's best example to a question, for the owner to take part. Public."""
    filter: Annotated[Any, AfterValidator(_read_filter)] = None
    """Which examples count, by their metadata (`store.filters`). Public."""
    eligible: Count | None = None
    """How many owners a typical question finds that near, and with an example that passes the filter. A public
    estimate, never a count of the store's."""
    count_empty: bool = False
    """Whether the answers of members without examples count."""

    def check(self) -> None:
        """Make the selector, too, over a store of nobody."""
        if (self.threshold is None and self.filter is None) != (self.eligible is None):
            raise ValueError("eligible (a public estimate of the owners let through) goes with a threshold or a filter")
        self.over(ExemplarStore.empty(DeterministicFakeEmbedding(size=1)), is_near=False)
        if self.count_empty and "calls" in self.model_dump(exclude_none=True):
            raise InvalidParameter(
                "count_empty", True, "left out with calls: nothing stands in an absent owner's place"
            )

    def over(self, store: Any, is_near: bool) -> PoissonExampleSelector:
        """Make the selector. ``is_near``: near exemplars are looked for also without a threshold."""
        given = self.model_dump(exclude_none=True, exclude={"count_empty"})
        if "calls" not in given:
            given.setdefault("members", MEMBERS)
        if is_near or self.threshold is not None:
            given["nearest_to"] = store.input_key
        return PoissonExampleSelector(store, **given)


@section_from(
    PrivacyBudget,
    bounds={"name": Field(min_length=1, max_length=255), "soft_limit": Field(gt=0, le=1)},
)
class BudgetSection(Section):
    """The guarantee, and the ledger that enforces it.

    With ``tickets`` each owner pays for itself: ``releases`` is the number of answers that one owner takes part in at
    most, and there is no last answer. The default of ``replay`` is "principal", although `PrivacyBudget` has True: the
    holders of a server's keys are not meant to learn each other's questions (`PrivacyBudget` says what each choice
    shows).
    """

    # Bounds stand here too: a budget is made when its ledger is opened, long after all mistakes are told.
    epsilon: Annotated[float, Field(gt=0)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    releases: Count | Annotated[dict[str, Count], Field(min_length=1)]
    """A number, or for the budget of several releases a number for each: its path without the first "/"."""
    ledger: Text = Field("sqlite:///dpicl-budget.db", repr=False)
    witness: Text | None = Field(None, repr=False)
    """A path or a database URL; None: beside the ledger."""
    quota: Count | Annotated[dict[Text, Count], Field(min_length=1)] | None = None
    """The most answers that one caller gets of a shared budget, on each line: a number for all, or one for a name."""
    replay: Replay = "principal"
    replay_patience: Annotated[float, Field(ge=0)] = 300.0

    def check(self) -> None:
        given: Any = self
        if given.tickets and given.soft_limit is not None:
            bound = "left out if tickets is true: there is no last answer to be near to"
            raise InvalidParameter("soft_limit", given.soft_limit, bound)
        sql.parse(self.ledger, "ledger", "sqlite:///budget.db")
        if given.quota is not None and given.scope == "per_principal":
            raise InvalidParameter("quota", "(not shown)", "left out if each caller has a counter: it is the limit")
        if self.replay is False and "replay_patience" in self.model_fields_set:
            raise InvalidParameter("replay_patience", self.replay_patience, "left out if replay is false")

    def open(self, folder: Path) -> PrivacyBudget:
        """Open the ledger. Paths, a SQLite URL's too, are relative to the folder."""
        promised = self.model_dump()
        for name in ("ledger", "witness", "key_file"):
            promised[name] = place_in(folder, promised[name])
        return PrivacyBudget(**promised)


def place_in(folder: Path, given: str | None) -> str | None:
    """A path or an address of a file's, relative to its folder."""
    if given is None or "://" not in given:
        return given and str(folder / given)
    path = given.removeprefix("sqlite:///")
    return given if path == given or path.startswith((":", "file:")) else f"sqlite:///{folder / path}"


class Spec(Section):
    """A whole description. Make one with `checked`. Paths are relative to its ``folder``."""

    chain: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    """MODULE:FUNCTION that returns a chain of the deployer's own."""
    head: HeadSection | None = None
    store: StoreSection | None = None
    model: ModelSection = ModelSection()
    release: GivenRelease | None = None
    selector: SelectorSection = Field(default_factory=SelectorSection)
    budget: BudgetSection | None = None
    purpose: Text | None = None
    """The purpose of the answers, for ``dpicl report``. It changes nothing."""
    folder: Path = Field(default=Path(), exclude=True)

    def build(self) -> Runnable[Any, Any]:
        """Return the chain, with its store and ledger opened. Charges and freezes nothing."""
        made: Runnable[Any, Any] = self.built(self.selected(self.records()), None)
        return made

    @property
    def _kept(self) -> StoreSection:
        assert self.store is not None
        return self.store.model_copy(update={"output_key": None}) if self.is_of_documents else self.store

    def records(self) -> list[dict[str, Any]]:
        """Read and check the data file, if there is one. Embeds nothing."""
        return [] if self.release is None else self._kept.records(self.folder, self.release.outputs)

    def selected(self, records: Sequence[Mapping[str, Any]]) -> PoissonExampleSelector | None:
        """Open the store, and return the selector over it; None for a head or a chain. Opens no ledger."""
        if self.release is None:
            return None
        return self.selector.over(self._kept.open(self.folder, records), self.is_of_documents)

    def built(self, selector: PoissonExampleSelector | None, common: PrivacyBudget | None, line: str = "") -> Any:
        """Return the chain. ``common``: the budget of several releases, of which this one has a ``line``."""
        if self.chain is not None:
            made = imported("chain", self.chain, self.folder)()
            if not isinstance(made, Runnable):
                raise InvalidParameter("chain", self.chain, "a function without arguments that returns the chain")
            return made
        if self.head is not None:
            return self.head.load(self.folder, self.model.choice.load() if "model" in self.model_fields_set else None)
        assert selector is not None
        fields: Any = {selector.store.input_key: (Annotated[str, Field(min_length=1)], ...)}
        question = create_model("Question", __config__=ConfigDict(extra="forbid"), **fields)
        if (budget := self.budget) is not None:
            release = self._over(selector, lambda: (budget.open(self.folder), None))
        else:
            assert common is not None
            release = self._over(selector, lambda: (common, line))
        return release.with_types(input_type=question)

    def over(self, store: Any, open_budget: Callable[[], PrivacyBudget]) -> Any:
        """Return the release over a store. A selector that cannot be made is refused before any ledger."""
        return self._over(self.selector.over(store, self.is_of_documents), lambda: (open_budget(), None))

    def _over(self, selector: PoissonExampleSelector, open_line: OpenLine) -> Any:
        assert self.release is not None
        return self.release.over(selector, open_line, self.model, self.folder, self.selector.count_empty)

    @property
    def is_of_documents(self) -> bool:
        """True if the store's texts have no outputs, and are looked for near to the question also without a gate."""
        return isinstance(self.release, DocumentsSection)


M = TypeVar("M", bound=Spec)


def checked(made_by: type[M], values: Mapping[str, Any], folder: Path) -> tuple[M | None, list[tuple[str, str]]]:
    """Return the description, or None with all mistakes: of each its place in the file, and words without its value."""
    mistakes = list(conflicts(values, folder))
    values = _of_today({name: part for name, part in values.items() if name != "folder"}, folder)
    try:
        made = made_by.model_validate(values, context=folder)
    except ValidationError as error:
        return None, [*((place, _placed(made_by, place, words)) for place, words in told(error, values)), *mistakes]
    return (None if mistakes else made), mistakes


def _placed(made_by: type[Spec], place: str, words: str) -> str:
    """Say of a field that stands in no section like this one which sections have it."""
    if words != _UNKNOWN:
        return words
    name = place.rpartition(".")[2]
    known = {
        section: get_args(about.annotation) or (about.annotation,) for section, about in made_by.model_fields.items()
    }
    known["release"] = tuple(SECTIONS.values())
    found = [f"{section}.{name}" for section, kinds in known.items() if any(_has(kind, name) for kind in kinds)]
    return f"{words}; there is {' and '.join(found)}" if found else words


def _has(kind: Any, name: str) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section) and name in kind.model_fields


def _of_today(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a description with its folder, today's names of kinds (so that its other mistakes are told, too), and each
    of several releases' budgets by a name of its own."""
    made = {**values, "folder": folder}
    kind = kind_of(values.get("release"))
    if kind in RENAMED:
        made["release"] = {**values["release"], "kind": RENAMED[kind]}
    budget, path = values.get("budget"), values.get("path")
    if isinstance(budget, Mapping) and isinstance(path, str) and line_of(path):
        made["budget"] = {"name": line_of(path), **budget}
    if isinstance(several := values.get("releases"), list):
        made["releases"] = [_of_today(each, folder) if isinstance(each, Mapping) else each for each in several]
    return made
