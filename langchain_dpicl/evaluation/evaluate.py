"""One evaluation: a task, a model and a schedule in; scores, costs and a folder of tables and pictures out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from tqdm import tqdm

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.evaluation.cost import CostPoint, PromptTokens, cost_curve
from langchain_dpicl.evaluation.data import Row
from langchain_dpicl.evaluation.label_pass import BatchReader, ChainReader, LabelReader, read_sample
from langchain_dpicl.evaluation.label_study import LabelStudy
from langchain_dpicl.evaluation.passes import PassFile, key_of
from langchain_dpicl.evaluation.samples import Sampler
from langchain_dpicl.evaluation.schedule import Schedule
from langchain_dpicl.evaluation.scores import Score
from langchain_dpicl.evaluation.tasks import ClassificationTask, GenerationTask, Task
from langchain_dpicl.evaluation.text_pass import Author, Written, write_candidates, write_members
from langchain_dpicl.evaluation.text_study import TextStudy
from langchain_dpicl.privacy.checks import whole

METHODS = {
    "classification": ("vote",),
    "generation": ("embedding", "joint-em", "ptr", "online", "offline"),
}
"""What may be measured, by the kind of task; the first ones by default."""

_DEFAULT_TEXTS = ("embedding", "joint-em", "ptr")
_DECODED = ("online", "offline")
_VARIED = {"vote": ("members", "releases", "shots"), "embedding": ("candidates", "members"), "online": ("top_k",)}


@dataclass(frozen=True)
class Model:
    """What answers.

    Parameters
    ----------
    name
        Public: what the results call it.
    load
        The LangChain model, for keyword settings (``max_tokens``, ``temperature``).
    embedded
        An embedded model's name, which can also be read in batches in this process; None for another.
    threads
        For reading in batches.
    """

    name: str
    load: Callable[..., BaseLanguageModel[Any]]
    embedded: str | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """What is to be measured, on rows that are public in truth or stay with whoever owns them.

    Parameters
    ----------
    rows, queries, public
        The private examples, the test rows, and public examples (or none).
    folder
        Keeps what the model said; a stopped evaluation goes on from there.
    samples
        How many samples of owners each query is asked with.
    draws
        How often noise is drawn for each sample.
    methods
        Of `METHODS`; () for the default.
    vary
        Ablations: what is varied, and over which numbers.
    neutral
        Public texts to calibrate a classification task's members on; () for the task's own.
    in_batches
        Whether an embedded model reads the prompts of a classification task in batches, in this process, instead of
        through LangChain. Many times faster; scores differ in their last digits.
    """

    task: Task
    rows: Sequence[Row]
    queries: Sequence[Row]
    public: Sequence[Row]
    model: Model
    schedule: Schedule
    folder: Path
    samples: int = 1
    draws: int = 20
    candidates: int = 20
    methods: Sequence[str] = ()
    vary: Mapping[str, Sequence[int]] = field(default_factory=dict)
    neutral: Sequence[str] = ()
    in_batches: bool = False
    price_in: float = 0.0
    price_out: float = 0.0
    top_k: int = 100

    def __post_init__(self) -> None:
        for name in ("samples", "draws", "candidates", "top_k"):
            whole(name, getattr(self, name))
        if not self.queries:
            raise InvalidParameter("queries", "no rows", "at least one row")
        few = self.schedule.few_shots
        if 0 < len(self.public) < few:
            raise InvalidParameter("public", f"{len(self.public)} rows", f"at least few_shots = {few} rows, or none")
        self._check_methods()
        self._check_vary()

    def _check_methods(self) -> None:
        is_label_task = isinstance(self.task, ClassificationTask)
        known = METHODS["classification" if is_label_task else "generation"]
        for method in self._chosen:
            if method not in known:
                raise InvalidParameter("methods", method, f"of {', '.join(known)} for {self.task.name}")
            if method in _DECODED and self.model.embedded is None:
                raise InvalidParameter("methods", method, "a method without decoding, as the model is not embedded")
            if method == "offline" and not self.public:
                raise InvalidParameter("public", "no rows", "rows whose inputs offline demonstrations are written for")
        if self.neutral and not is_label_task:
            raise InvalidParameter("neutral", f"{len(self.neutral)} texts", f"none, as {self.task.name} has no labels")
        if self.in_batches and self.model.embedded is None:
            raise InvalidParameter("in_batches", True, "an embedded model")

    def _check_vary(self) -> None:
        varied = [name for method in self._chosen for name in _VARIED.get(method, ())]
        most = {"members": self.schedule.members, "candidates": self.candidates}
        for name, values in self.vary.items():
            if name not in varied:
                raise InvalidParameter("vary", name, f"one of {', '.join(varied) or 'none'} for these methods")
            for value in values:
                whole(f"vary[{name!r}]", value, at_least=2 if name == "members" else 1, at_most=most.get(name))
                if name == "shots":
                    replace(self.schedule, shots=value)
                if name == "releases":
                    self.schedule.with_releases(value)

    @property
    def _chosen(self) -> Sequence[str]:
        if self.methods:
            return self.methods
        return METHODS["classification"] if isinstance(self.task, ClassificationTask) else _DEFAULT_TEXTS

    def run(self) -> list[Score]:
        """Ask the model what has not been asked yet, and score everything."""
        if isinstance(self.task, ClassificationTask):
            return self._labels(self.task)
        return self._texts(self.task)

    def costs(self) -> list[CostPoint]:
        """Tokens and price of 100 queries at rates around the schedule's; a token is taken for four characters."""
        schedule = self.schedule
        tokens = PromptTokens.measure(self.task, self.rows[:1000], self.queries, lambda text: len(text) / 4)  # type: ignore[arg-type, return-value]
        return cost_curve(
            tokens,
            sorted({min(1.0, schedule.rate * factor) for factor in (0.25, 0.5, 1, 2, 4)}),
            owners=schedule.owners,
            members=schedule.members,
            shots=schedule.shots,
            price_in=self.price_in,
            price_out=self.price_out,
            epsilon=max(schedule.epsilons),
            delta=schedule.delta,
            releases=schedule.releases,
            mechanism="vote" if isinstance(self.task, ClassificationTask) else "embedding",
            public_calls=0 if isinstance(self.task, ClassificationTask) else self.candidates,
        )

    # -- what the model says ------------------------------------------------------------------------------------------

    def _file(self, kind: str, schedule: Schedule) -> PassFile:
        """The file of one pass: what is in it depends on these settings alone."""
        settings = {
            "task": self.task.name,
            "instruction": self.task.shape.instruction,
            "query": self.task.shape.query,
            "model": self.model.name,
            "members": schedule.members,
            "shots": schedule.shots,
            "few_shots": schedule.few_shots,
            "data": _digest(self.rows),
            "public": _digest(self.public) if self.public else None,
            "in_batches": self.in_batches,
        }
        return PassFile(self.folder / f"{kind}-{schedule.members}x{schedule.shots}.jsonl", settings)

    def _sampler(self, schedule: Schedule) -> Sampler:
        return Sampler(
            self.rows,
            self.public,
            members=schedule.members,
            shots=schedule.shots,
            few_shots=schedule.few_shots,
        )

    def _bar(self, schedule: Schedule, texts: int) -> tqdm[Any]:
        words = f"{self.task.name}, {schedule.members} members of {schedule.shots}"
        return tqdm(total=texts * self.samples, desc=words, unit="query", disable=None, file=sys.stderr)

    # -- labels -------------------------------------------------------------------------------------------------------

    def _labels(self, task: ClassificationTask) -> list[Score]:
        reader: LabelReader
        if self.in_batches:
            reader = BatchReader(str(self.model.embedded), task, threads=self.model.threads)
        else:
            reader = ChainReader(self.model.load(), task)
        study = self._label_study(task, reader, self.schedule)
        found = study.scores()
        if "members" in self.vary:
            found += study.by_members(self.vary["members"])
        if "releases" in self.vary:
            found += study.by_releases(self.vary["releases"])
        for shots in self.vary.get("shots", ()):
            other = self._label_study(task, reader, replace(self.schedule, shots=shots))
            found += other.votes("shots")
        return found

    def _label_study(self, task: ClassificationTask, reader: LabelReader, schedule: Schedule) -> LabelStudy:
        queries = [row.input for row in self.queries]
        neutral = self.neutral or task.content_free
        said = []
        sampler = self._sampler(schedule)
        with closing(self._file("labels", schedule)) as file, self._bar(schedule, len(queries) + len(neutral)) as bar:
            for s in range(self.samples):
                prompts = sampler.draw(s, file)

                def key(text: str, sample: int = s) -> tuple[str, int]:
                    return key_of(text), sample

                said.append(read_sample(reader, prompts, schedule.members, queries, neutral, file, key, bar.update))
        right = [task.labels.index(row.output) for row in self.queries]
        return LabelStudy(task.labels, right, said, schedule, self.draws)

    # -- texts --------------------------------------------------------------------------------------------------------

    def _texts(self, task: GenerationTask) -> list[Score]:
        from langchain_dpicl.evaluation.token_scores import token_scores
        from langchain_dpicl.local import local_embeddings

        found: list[Score] = []
        if any(method in _DEFAULT_TEXTS for method in self._chosen):
            with closing(self._file("texts", self.schedule)) as file:
                found += self._text_scores(task, file)
        decoded = [method for method in self._chosen if method in _DECODED]
        if decoded:
            with closing(self._file("tokens", self.schedule)) as file:
                found += token_scores(self, task, decoded, file, local_embeddings())
        return found

    def _text_scores(self, task: GenerationTask, file: PassFile) -> list[Score]:
        from langchain_dpicl.local import local_embeddings

        author = Author(
            self.model.load(max_tokens=task.max_tokens, temperature=0.0),
            self.model.load(max_tokens=task.max_tokens, temperature=0.9),
            task,
        )
        sampler, members = self._sampler(self.schedule), self.schedule.members
        samples = [sampler.draw(s, file) for s in range(self.samples)]
        written: list[list[Written]] = []
        with self._bar(self.schedule, len(self.queries)) as bar:
            for row in self.queries:
                written.append([])
                for s, prompts in enumerate(samples):
                    key = (key_of(row.input), s)
                    written[-1].append(write_members(author, prompts, members, row, file, key))
                    bar.update()
        candidates: Sequence[Sequence[str]] = [()] * len(self.queries)
        if "embedding" in self._chosen:
            bar = tqdm(self.queries, desc="public candidates", unit="query", disable=None, file=sys.stderr)
            candidates = [write_candidates(author, row, self.candidates, file, key_of(row.input)) for row in bar]
        study = TextStudy(
            task, self.queries, written, candidates, self.schedule, local_embeddings(), author, file, self.draws
        )
        found = study.prompts()
        if "embedding" in self._chosen:
            found += study.embedding() + study.by_candidates(self.vary.get("candidates", ()))
            found += study.by_members(self.vary.get("members", ()))
        if "joint-em" in self._chosen:
            found += study.joint_em()
        if "ptr" in self._chosen:
            found += study.ptr()
        return found


def some(rows: Sequence[Row], count: int) -> list[Row]:
    """So many distinct rows in an order that depends on their inputs alone: more of them go on with the same ones."""
    distinct = {row.input: row for row in reversed(rows)}
    return sorted(distinct.values(), key=lambda row: key_of(row.input))[: whole("queries", count)]


def _digest(rows: Sequence[Row]) -> str:
    return key_of("".join(repr((row.input, row.output)) for row in rows))
