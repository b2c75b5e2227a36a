"""The kinds of release in a description: the section ``release``, one for each of `aggregators.KINDS`, and documents.

A kind's section has the parameters of its constructor, and those of its members' task. It is checked by making its
aggregator when it is read, so that the aggregator's own bounds are among the mistakes that are told at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from langchain_core.runnables import Runnable, RunnableLambda
from pydantic import Field, PlainValidator, ValidationInfo, create_model

from langchain_dpicl import local
from langchain_dpicl.aggregators import KINDS, Aggregator
from langchain_dpicl.aggregators.base import MembersTask
from langchain_dpicl.budget import PrivacyBudget
from langchain_dpicl.decoding import documents
from langchain_dpicl.decoding.sampler import DPSampler
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.members.chains import ModelChoice, Wording, label_member
from langchain_dpicl.release.ensemble import PrivateEnsemble
from langchain_dpicl.release.sealed import DPAggregate, SealedRelease
from langchain_dpicl.spec.mistakes import Mistake, together
from langchain_dpicl.spec.signatures import Count, Section, Text, fields_of, from_lines, is_model_class, section_from
from langchain_dpicl.spec.sources import ModelSection
from langchain_dpicl.spec.typed import TypedSection

Chain = Runnable[Any, Any]
OpenLine = Callable[[], tuple[PrivacyBudget, str | None]]
"""Opens a budget's ledger. The name is that of the line, if the budget has several."""

DOCUMENTS = "documents"


class ReleaseSection(Section):
    """One kind of release."""

    kind: str
    task: ClassVar[MembersTask | None] = None

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The form that examples' outputs must have: ``label_of`` and ``unread`` of `check_file`."""
        return {}

    def over(self, selector: Any, open_line: OpenLine, model: ModelSection, folder: Path, count_empty: bool) -> Any:
        """Make the release. The budget's ledger is opened when all else is made."""
        raise NotImplementedError


class AggregatorSection(ReleaseSection):
    """A release by an aggregator, from an ensemble. Of a kind without members, whose owners' outputs are read."""

    made_by: ClassVar[type[Aggregator[Any]]]
    own: ClassVar[tuple[str, ...]] = ()
    """Parameters that a section writes out itself, in another form."""

    def given(self) -> dict[str, Any]:
        """Return the constructor's arguments, as they are given."""
        names = inspect.signature(self.made_by.constructor()).parameters.keys() & type(self).model_fields.keys()
        return {name: getattr(self, name) for name in names}

    def aggregator(self, chain: Callable[[str], Chain] = lambda name: RunnableLambda(str)) -> Aggregator[Any]:
        """Make the aggregator. ``chain`` makes the public chain that a parameter stands for. Raises
        `InvalidParameter`."""
        given = self.given()
        needs = inspect.signature(self.made_by.constructor()).parameters
        if "embeddings" in needs:
            given.setdefault("embeddings", local.local_embeddings())
        if "candidates" in given and given["candidates"] is None:
            given["candidates"] = chain("candidates")
            if given["n_candidates"] is None:
                given["n_candidates"] = 20  # each is a call of the model before every answer
        if isinstance(given.get("prior"), list):
            given["prior"] = chain("prior")
        made: Aggregator[Any] = self.made_by.constructor()(**given)
        return made

    def check(self) -> None:
        self.aggregator()

    @property
    def outputs(self) -> Mapping[str, Any]:
        return self.aggregator().outputs

    def member(self, model: ModelChoice, words: Wording) -> Any:
        """Make the member; None if none is called."""

    def chain(self, model: ModelChoice, words: Wording, name: str) -> Chain:
        """Make the public chain that a parameter stands for: the model's scores, set right by public texts."""
        labels: list[str] = self.labels  # type: ignore[attr-defined]
        scorer = self.member(model, words) or label_member(model, labels, words.input_key)
        return scorer.prior(self.prior)  # type: ignore[attr-defined]

    def parts(self, model: ModelChoice, words: Wording) -> tuple[Any, Aggregator[Any]]:
        """Make the member and the aggregator."""
        return self.member(model, words), self.aggregator(partial(self.chain, model, words))

    def over(self, selector: Any, open_line: OpenLine, model: ModelSection, folder: Path, count_empty: bool) -> Any:
        store = selector.store
        member, aggregator = self.parts(model.choice, Wording(store.input_key, store.output_key or "output"))
        how = model.model_dump(include={"max_concurrency", "timeout"}) | {"count_empty": count_empty}
        ensemble = PrivateEnsemble(selector, member, **how)
        budget, line = open_line()
        # Not by ``|``, which warns of a poor plan: commands and servers say that themselves.
        return SealedRelease(ensemble, DPAggregate(aggregator, budget, line=line, return_receipt=True))


class ChosenSection(AggregatorSection):
    """A kind whose members choose a label."""

    instruction: str | None = None
    """The members' task, without a full stop. Default: the usual words."""
    content_free: str | Annotated[list[str], Field(min_length=1)] | None = None
    """A text that says nothing, or several, by which the model's leaning to a label is set right."""

    def member(self, model: ModelChoice, words: Wording) -> Any:
        given = self.model_dump(include={"instruction", "content_free"}, exclude_none=True)
        return label_member(model, self.labels, words.input_key, **given)  # type: ignore[attr-defined]


class WrittenSection(AggregatorSection):
    """A kind whose members write."""

    instruction: str | None = None
    """The members' task, without a full stop. Default: the usual words."""
    max_tokens: Count = Aggregator.max_tokens
    """The limit of what a member writes."""

    def _writer(self, model: ModelChoice, words: Wording, temperature: float) -> Chain:
        asked = self.instruction or self.aggregator().asked(words.asked)
        written = model.load(max_tokens=self.max_tokens, temperature=temperature)
        return replace(words, instruction=asked).member(written)

    def member(self, model: ModelChoice, words: Wording) -> Any:
        return self._writer(model, words, 0.0)

    def chain(self, model: ModelChoice, words: Wording, name: str) -> Chain:
        return self._writer(model, words, 0.9)


class StructuredSection(TypedSection, WrittenSection):
    """A kind that releases instances of a pydantic model."""

    own = ("candidates", "means", "weights")

    def check(self) -> None:
        """Each declared field by itself, so that all mistakes are told; then all of them together."""
        alone = [] if self.model else [{"fields": {name: each}, "decimal": "."} for name, each in self.fields.items()]
        found: dict[Mistake, None] = {}
        for part in [*alone, {}]:
            try:
                self.model_copy(update=part).aggregator()
            except InvalidParameter as error:
                name = error.parameter if self.model else error.parameter.replace("model.", "fields.")
                found[(name,), error.bound] = None
        if found:
            raise together([*found])

    def given(self) -> dict[str, Any]:
        return {**super().given(), **self.typed()}


@section_from(
    DPSampler.over_documents,
    DPSampler,
    # A sampler is made after its budget's ledger is opened: what can be known before is told with all other mistakes.
    bounds={
        **dict.fromkeys(("question_tokens", "max_tokens", "top_k", "slots"), Field(ge=1)),
        "min_tokens": Field(ge=0),
        "shots": Field(gt=0, le=1e6),
        "temperature": Field(ge=0.01, le=100),
        "cap": Field(ge=0, le=100),
    },
    leave_out=("line", "return_receipt"),
)
class DocumentsSection(ReleaseSection):
    """A text that is written token by token from the documents near to the question: `DPSampler.over_documents`.

    The budget's ``releases`` are tokens.
    """

    kind: Literal["documents"]
    instruction: str = ""
    """Stands before the question."""
    question_tokens: Annotated[Count, Field()] = 64
    """For how long a question a document leaves room."""
    end: str | list[str] | None = None
    """The end tokens of a model on a server, such as "</s>"."""

    def check(self) -> None:
        given: Any = self
        if given.min_tokens > given.max_tokens:
            raise InvalidParameter("min_tokens", given.min_tokens, "at most max_tokens")
        if given.slots is not None and not given.pad:
            raise InvalidParameter("slots", given.slots, "left out if pad is false")
        if "" in (given.stop, *(given.stop or ())):
            raise InvalidParameter("stop", given.stop, "texts that are not empty")

    def over(self, selector: Any, open_line: OpenLine, model: ModelSection, folder: Path, count_empty: bool) -> Any:
        logits = documents.logits_of(model.choice, folder, [self.end] if isinstance(self.end, str) else self.end or [])
        settings = self.model_dump(exclude={"kind", "end"}, exclude_none=True)
        budget, line = open_line()
        return DPSampler.over_documents(logits, selector, budget, line=line, return_receipt=True, **settings)


_TASKS: dict[MembersTask, type[AggregatorSection]] = {
    "none": AggregatorSection,
    "choose": ChosenSection,
    "write": WrittenSection,
}
_LEFT_OUT = ("release",)  # an answer is a text here, not a vector
_WORDS = {  # of chains that a file cannot give, but ask for
    "candidates": "Public texts, a list or a file with one a line. Left out: the model writes ``n_candidates`` of them",
    "prior": "A public opinion where votes are few: zero_shot, a mapping of labels to probabilities, or public texts "
    "(a list, or a file with one a line) by which the model's zero-shot scores are calibrated",
}


def section_of(made_by: type[Aggregator[Any]]) -> type[AggregatorSection]:
    """Return the section of a kind."""
    constructor = made_by.constructor()
    hints = get_type_hints(constructor.__init__ if isinstance(constructor, type) else constructor)  # type: ignore[misc]
    base = StructuredSection if any(map(is_model_class, hints.values())) else _TASKS[made_by.task]
    fields: dict[str, Any] = {"kind": (Literal[made_by.kind], ...)}
    for name, (kind, field) in fields_of(constructor).items():
        if name in (*base.own, *_LEFT_OUT):
            continue
        if name == "prior":
            kind = from_lines(kind | Annotated[list[Text], Field(min_length=1)])
        fields[name] = kind, Field(field.default, description=_WORDS.get(name, field.description))
    if made_by.task == "write":
        usual = base.model_fields["max_tokens"].description
        fields["max_tokens"] = Count, Field(made_by.max_tokens, description=usual)
    about: dict[str, Any] = {"__base__": base, "__module__": __name__, "__doc__": constructor.__doc__}
    made: type[AggregatorSection] = create_model(f"{made_by.__name__.lstrip('_')}Section", **about, **fields)
    made.made_by, made.task = made_by, made_by.task
    return made


SECTIONS: dict[str, type[ReleaseSection]] = {kind: section_of(made_by) for kind, made_by in KINDS.items()}
SECTIONS[DOCUMENTS] = DocumentsSection
"""The section of each kind."""

RENAMED = {
    "label_vote": "label-vote",
    "candidate_vote": "candidate-vote",
    "keywords_joint": "joint-em",
    "keywords-joint": "joint-em",
    "keywords_ptr": "ptr",
    "keywords-ptr": "ptr",
    "scores": "vote",
    "label": "vote",
}
"""Earlier names of kinds, in files and on the command line."""


def of_today(kind: str) -> dict[str, Any]:
    """Return today's settings of a release whose kind has an earlier name."""
    found: dict[str, Any] = {"kind": RENAMED[kind]}
    if kind == "scores":
        found["scores"] = True
    return found


def kind_of(release: Any) -> str:
    """Return the kind of a release as it is given; "" if it is no text."""
    kind = release.get("kind") if isinstance(release, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _of_kind(given: Any, info: ValidationInfo) -> ReleaseSection:
    """Make the section of the kind that is given."""
    if (kind := kind_of(given)) not in SECTIONS:
        raise InvalidParameter("kind", "(not shown)", f"one of {', '.join(SECTIONS)}")
    return SECTIONS[kind].model_validate(given, context=info.context)


GivenRelease = Annotated[ReleaseSection, PlainValidator(_of_kind)]
