"""What a configuration releases: the sections ``release`` and ``model``.

Each kind of release is one section, which makes its aggregator and its member. A section is checked by making its
aggregator when the file is read, so that the aggregator's own bounds are among the mistakes that are told at once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from langchain_core.runnables import Runnable, RunnableLambda
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator
from pydantic.types import StrictStr

from langchain_dpicl import local
from langchain_dpicl.aggregators import (
    Aggregator,
    CandidateVote,
    EmbeddingMean,
    Keywords,
    LabelVote,
    NoisyVote,
)
from langchain_dpicl.aggregators.votes import reader_of
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.members.chains import ModelChoice, Wording, label_member, read_lines
from langchain_dpicl.serving.sources import Section

Count = Annotated[int, Field(strict=True, ge=1)]
AtTemperature = Callable[[float], Runnable[Any, Any]]
"""From a temperature to a chain that writes a text."""


def stand_in(temperature: float) -> Runnable[Any, Any]:
    """For a section that is checked without a model."""
    return RunnableLambda(str)


def _time_limit(value: Any) -> Any:
    if value in ("auto", None) or (type(value) in (int, float) and 0 < value < float("inf")):
        return value
    raise ValueError("auto, a number of seconds > 0, or nothing at all")


def _one_address(value: Any) -> Any:
    if isinstance(value, list):
        raise ValueError("one address: several servers of a model stand behind one proxy (see the operations page)")
    return value


def _lines(given: Any, info: ValidationInfo) -> Any:
    """The lines of a file that a text names."""
    return read_lines(str(info.field_name), (info.context or Path()) / given) if isinstance(given, str) else given


Lines = Annotated[list[StrictStr], BeforeValidator(_lines)]
"""Public texts: a list, or a file with one a line."""


def imported(parameter: str, name: str, folder: Path, what: str = "FUNCTION") -> Any:
    """Return what ``module:name`` names, beside the configuration or installed. Raises `InvalidParameter`."""
    module, _, attribute = name.partition(":")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        bound = f"MODULE:{what} beside the file or installed ({type(error).__name__}: {error})"
    raise InvalidParameter(parameter, name, bound)


class ModelSection(Section):
    """An embedded model (by name), or one on an OpenAI-compatible server. Its key is read from the environment.

    Beside a head: the model of its label scores, if it looks at any. For ``documents``: an embedded model, a GGUF file,
    a folder of `save_pretrained`, or a server that shows every token's log-probability.
    """

    name: str | None = None
    url: Annotated[str | None, BeforeValidator(_one_address)] = Field(default=None, repr=False)
    api_key_env: str = "OPENAI_API_KEY"
    max_concurrency: Count | None = None
    """How many calls of one answer run at once: not more than the server answers at once."""
    timeout: Annotated[Any, AfterValidator(_time_limit)] = "auto"
    """Seconds that one call may take before its member abstains."""

    @cached_property
    def choice(self) -> ModelChoice:
        """The model. Raises `InvalidParameter`, under the file's names."""
        return ModelChoice(self.name, self.url, self.api_key_env)


class ReleaseSection(Section):
    """One kind of release."""

    kind: str

    @property
    def of_documents(self) -> bool:
        """Whether the store's texts have no outputs, and are looked for near to the question also without a gate."""
        return False

    @property
    def outputs(self) -> dict[str, Any]:
        """What the examples' outputs have to be: ``label_of`` and ``unread`` of `check_file`."""
        return {"label_of": reader_of(getattr(self, "labels", None))}

    def aggregator(self, write: AtTemperature = stand_in) -> Any:
        """Make the aggregator. ``write`` writes public candidates. Raises `InvalidParameter`."""
        raise NotImplementedError

    def parts(self, model: ModelChoice, words: Wording) -> tuple[Runnable[Any, Any] | None, Any]:
        """Make the member (None if none is called) and the aggregator."""
        raise NotImplementedError

    def release(self, selector: Any, budget: Any, model: ModelSection, folder: Path, count_empty: bool) -> Any:
        """Make the release."""
        from langchain_dpicl import DPAggregate, PrivateEnsemble

        store = selector.store
        member, aggregator = self.parts(model.choice, Wording(store.input_key, store.output_key or "output"))
        how = model.model_dump(include={"max_concurrency", "timeout"}) | {"count_empty": count_empty}
        ensemble = PrivateEnsemble(selector, member, **how)
        return ensemble | DPAggregate(aggregator, budget, return_receipt=True)

    @model_validator(mode="after")
    def _check_by_making(self) -> Self:
        self.aggregator()
        return self


class LabelVoteSection(ReleaseSection):
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
    def _about(self) -> dict[str, Any]:
        return self.model_dump(include={"prior", "details", "lead", "mechanism"}, exclude_none=True)

    def aggregator(self, write: AtTemperature = stand_in) -> Aggregator[Any]:
        return LabelVote(self.labels, **self._about)

    def parts(self, model: ModelChoice, words: Wording) -> tuple[Runnable[Any, Any] | None, Any]:
        return None, self.aggregator()


class VoteSection(LabelVoteSection):
    """Labels, by a vote of the members' answers."""

    kind: Literal["vote", "scores"]  # type: ignore[assignment]
    prior: Literal["zero_shot"] | dict[str, float] | None = None  # type: ignore[assignment]
    """Or the model's answer without examples."""
    instruction: str | None = None
    content_free: str | list[str] | None = None

    def aggregator(self, write: AtTemperature = stand_in) -> Aggregator[Any]:
        return NoisyVote(self.labels, scores=self.kind == "scores", **self._about)

    def parts(self, model: ModelChoice, words: Wording) -> tuple[Runnable[Any, Any] | None, Any]:
        given = self.model_dump(include={"instruction", "content_free"}, exclude_none=True)
        return label_member(model, self.labels, words.input_key, **given), self.aggregator()


class TextSection(ReleaseSection):
    """A kind whose members write."""

    instruction: str | None = None
    max_tokens: Count = 60

    def asked(self, words: Wording) -> str | None:
        """What the members are asked for; None for the usual words."""
        return self.instruction

    def parts(self, model: ModelChoice, words: Wording) -> tuple[Runnable[Any, Any] | None, Any]:
        words = replace(words, instruction=self.asked(words))

        def write(temperature: float) -> Runnable[Any, Any]:
            return words.member(model.load(max_tokens=self.max_tokens, temperature=temperature))

        return write(0.0), self.aggregator(write)


class CandidatesSection(TextSection):
    """The public sentence nearest to the noisy mean, or the one to which most answers are nearest."""

    kind: Literal["embedding", "candidate_vote"]
    candidates: Lines | None = None
    """Default: the model writes ``n_candidates`` without examples."""
    n_candidates: Count = 20

    def aggregator(self, write: AtTemperature = stand_in) -> Aggregator[Any]:
        made = CandidateVote if self.kind == "candidate_vote" else EmbeddingMean
        public = write(0.9) if self.candidates is None else self.candidates
        return made(local.local_embeddings(), public, self.n_candidates)


class JointSection(TextSection):
    """Ranked keywords of a public domain."""

    kind: Literal["keywords_joint"]
    domain: Lines | None = None
    """Default: the question's words."""
    k: int = 10

    def aggregator(self, write: AtTemperature = stand_in) -> Aggregator[Any]:
        return Keywords.joint_em("query" if self.domain is None else self.domain, self.k)


class PTRSection(TextSection):
    """A set of keywords without a fixed domain."""

    kind: Literal["keywords_ptr"]
    k: int | tuple[int, int] = (15, 30)

    def aggregator(self, write: AtTemperature = stand_in) -> Aggregator[Any]:
        return Keywords.ptr(self.k)


class DocumentsSection(ReleaseSection):
    """A text that is written token by token from the documents near to the question: `DPSampler.over_documents`.

    The budget's ``releases`` are tokens. Settings that are not given are the sampler's defaults.
    """

    kind: Literal["documents"]
    instruction: str | None = None
    question_tokens: Count | None = None
    max_tokens: Count = 25
    min_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    top_k: Count | None = None
    shots: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """The weight of the public answer; required if the selector has a rate."""
    temperature: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop: str | list[str] | None = None
    pad: bool | None = None
    slots: Count | None = None
    end: list[str] | None = None
    """The end tokens of a model on a server, such as "</s>"."""

    @property
    def of_documents(self) -> bool:
        return True

    def aggregator(self, write: AtTemperature = stand_in) -> None:
        if (self.min_tokens or 0) > self.max_tokens:
            raise InvalidParameter("min_tokens", self.min_tokens, "at most max_tokens")
        if self.slots is not None and self.pad is False:
            raise InvalidParameter("slots", self.slots, "left out if pad is false")

    def release(self, selector: Any, budget: Any, model: ModelSection, folder: Path, count_empty: bool) -> Any:
        from langchain_dpicl import DPSampler
        from langchain_dpicl.decoding.documents import logits_of

        logits = logits_of(model.choice, folder, self.end or [])
        settings = self.model_dump(exclude={"kind", "end"}, exclude_none=True)
        return DPSampler.over_documents(logits, selector, budget, return_receipt=True, **settings)
