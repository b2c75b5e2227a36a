"""One evaluation: a task, a model and a plan in; scores and costs out."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml  # type: ignore[import-untyped]
from langchain_core.language_models import BaseLanguageModel
from pydantic import ValidationError
from tqdm import tqdm

from langchain_dpicl.aggregators import KINDS, Aggregator
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.evaluation import studies
from langchain_dpicl.lab.evaluation.passes import EvaluationPlan, PassFile, Sampler, key_of
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.lab.evaluation.scores import Score
from langchain_dpicl.lab.evaluation.studies import Author, LabelStudy, Reader, TextStudy, chain_reader, read_labels
from langchain_dpicl.lab.evaluation.tasks import SEPARATOR, ClassificationTask, GenerationTask, Task
from langchain_dpicl.privacy.checks import whole
from langchain_dpicl.privacy.mechanisms import MECHANISMS
from langchain_dpicl.privacy.plan import CallCosts
from langchain_dpicl.spec.mistakes import told
from langchain_dpicl.spec.releases import section_of

if TYPE_CHECKING:
    from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits

_LABELS = ("vote", "label-vote", "head")
_TEXTS = (*studies.BY_CANDIDATES, "joint-em", "ptr")
_DECODED = ("online", "offline")
_OTHERS = tuple(name for name, kind in KINDS.items() if kind.task == "choose" and name not in _LABELS)
"""Further kinds of release among the labels that members choose."""
_VARIED = {
    "vote": ("members", "releases", "shots"),
    "head": ("fits",),
    **dict.fromkeys(studies.BY_CANDIDATES, ("candidates", "members", "releases")),
    **dict.fromkeys(("joint-em", "ptr"), ("members", "releases")),
    "online": ("top_k", "shots", "releases"),
}


@dataclass(frozen=True)
class Model:
    """The model that answers, by the name in the results. ``load`` returns it for keyword settings (``max_tokens``).

    ``embedded`` names an embedded model or a GGUF file, which can be read in batches here, with ``threads`` and numbers
    of a ``dtype``; None for another.
    """

    name: str
    load: Callable[..., BaseLanguageModel[Any]]
    embedded: str | None = None
    threads: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class Evaluation:
    """The settings of a measurement, on rows that are public in truth or stay with their owner.

    - ``rows``, ``queries``, ``public``: the private examples, the test rows, and public examples (or none).
    - ``folder``: keeps the model's answers; a stopped evaluation resumes from them.
    - ``samples``: how many samples of owners get each query. Decoding samples for each token: then, how many runs.
    - ``draws``: how often noise is drawn for each sample.
    - ``heads``: how many heads are fitted at each epsilon, each with noise of its own.
    - ``methods``: "vote", "label-vote", "head", or another kind whose members choose a label, with its settings
      ("KIND:name=value,name=value"), for a classification task; else "embedding", "candidate-vote",
      "joint-em", "ptr", "online", "offline". () is all that need no decoding. "label-vote" and "head" ask no model.
    - ``vary``: ablations: a varied number by name, and its values.
    - ``neutral``: public texts to calibrate a classification task's members on; () for the task's own.
    - ``in_batches``: whether an embedded model reads the members' prompts in batches, in this process, instead of
      through LangChain. Many times faster; scores differ in their last digits, and so a text may.
    - ``shown``: for how many queries of a text task the results show the texts of each method. Public data alone.
    """

    task: Task
    rows: Sequence[Row]
    queries: Sequence[Row]
    public: Sequence[Row]
    model: Model
    plan: EvaluationPlan
    folder: Path
    samples: int = 1
    draws: int = 20
    heads: int = 5
    candidates: int = 20
    methods: Sequence[str] = ()
    vary: Mapping[str, Sequence[int]] = field(default_factory=dict)
    neutral: Sequence[str] = ()
    in_batches: bool = False
    price_in: float = 0.0
    price_out: float = 0.0
    top_k: int = 100
    shown: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "draws", "heads", "candidates", "top_k"):
            whole(name, getattr(self, name))
        whole("shown", self.shown, at_least=0, at_most=0 if isinstance(self.task, ClassificationTask) else None)
        if not self.queries:
            raise InvalidParameter("queries", "no rows", "at least one row")
        few = self.plan.few_shots
        if 0 < len(self.public) < few:
            raise InvalidParameter("public", f"{len(self.public)} rows", f"at least few_shots = {few} rows, or none")
        is_label_task = isinstance(self.task, ClassificationTask)
        known = (*_LABELS, *_OTHERS) if is_label_task else _TEXTS + _DECODED
        others = self._others if is_label_task else {}
        for method in self._chosen:
            if method not in known and method not in others:
                raise InvalidParameter("methods", method, f"of {', '.join(known)} for {self.task.name}")
            if method in _DECODED and self.model.embedded is None:
                raise InvalidParameter("methods", method, "a method without decoding, as the model is not embedded")
            if method == "offline" and not self.public:
                raise InvalidParameter("public", "no rows", "rows whose inputs offline demonstrations are written for")
        if self.neutral and not is_label_task:
            raise InvalidParameter("neutral", f"{len(self.neutral)} texts", f"none, as {self.task.name} has no labels")
        if self.in_batches and self.model.embedded is None:
            raise InvalidParameter("in_batches", True, "an embedded model")
        if self.plan.calls and not is_label_task:
            raise InvalidParameter("calls", self.plan.calls, "none, as the task has no labels")
        varied = [name for method in self._chosen for name in _VARIED.get(method, ())]
        if self.plan.calls:
            varied = [name for name in varied if name not in ("members", "shots")]
        least = {"members": 2}
        most = {
            "members": self.plan.members,
            "candidates": self.candidates,
            "shots": len(self.rows),
        }
        for name, values in self.vary.items():
            if name not in varied:
                raise InvalidParameter("vary", name, f"one of {', '.join(varied) or 'none'} for these methods")
            for value in values:
                whole(f"vary[{name!r}]", value, at_least=least.get(name, 1), at_most=most.get(name))
                if name == "releases" or (name == "shots" and is_label_task):
                    self.plan.varied(**{name: value})

    @property
    def _chosen(self) -> Sequence[str]:
        return self.methods or (_LABELS if isinstance(self.task, ClassificationTask) else _TEXTS)

    @property
    def asks_model(self) -> bool:
        """True if any method needs the model: a vote of labels and a head do not."""
        return not {"label-vote", "head"}.issuperset(self._chosen)

    @property
    def has_members(self) -> bool:
        """True if any method asks members with examples: decoding has a plan of its own."""
        return self.asks_model and not set(_DECODED).issuperset(self._chosen)

    def run(self) -> list[Score]:
        """Let the model answer everything that the folder lacks, and score it all."""
        if isinstance(self.task, ClassificationTask):
            embedded = self._embedded(self.task)  # first: it fails before any call
            if not self.asks_model:
                return embedded
            return [*self._votes(self.task), *embedded]
        found: list[Score] = []
        for kind, methods, measured in (("texts", _TEXTS, self._texts), ("tokens", _DECODED, self._tokens)):
            if any(method in methods for method in self._chosen):
                with closing(self._file(kind, self.plan)) as file:
                    found += measured(self.task, file)
        return found

    def costs(self) -> list[CostPoint]:
        """Tokens and price of 100 queries at rates around the plan's. Without members there are none."""
        if not self.has_members:
            return []
        by_votes = isinstance(self.task, ClassificationTask)
        return cost_curve(
            tokens_of(self.task, self.rows[:1000], self.queries),
            self.plan,
            self.price_in,
            self.price_out,
            mechanism="vote" if by_votes else "embedding",
            public_calls=0 if by_votes else self.candidates,
        )

    def _file(self, kind: str, plan: EvaluationPlan) -> PassFile:
        """Return the file of one pass: its content depends on these settings alone."""
        size = f"{plan.members}x{plan.shots}"
        counts = ["members", "shots", "few_shots"]
        if plan.calls:
            size = f"{plan.calls}-calls"
            counts.append("calls")
        settings = {
            "task": self.task.name,
            "instruction": self.task.shape.instruction,
            "query": self.task.shape.query,
            "model": self.model.name,
            **{name: getattr(plan, name) for name in counts},
            "data": _digest(self.rows),
            "public": _digest(self.public) if self.public else None,
            "in_batches": self.in_batches,
        }
        if self.model.dtype != "float32":
            settings["dtype"] = self.model.dtype
        return PassFile(self.folder / f"{kind}-{size}.jsonl", settings)

    def _bar(self, words: str, total: int, unit: str = "query") -> tqdm[Any]:
        return tqdm(
            total=total,
            desc=f"{self.task.name}, {words}",
            unit=unit,
            disable=None,
            file=sys.stderr,
        )

    def _embedded(self, task: ClassificationTask) -> list[Score]:
        """The rows' own labels and heads, with embeddings that the folder keeps.

        With public examples heads are on their directions, too, and they stand for texts at large where a query finds
        its eligible owners; else the queries do.
        """
        if not {"label-vote", "head"}.intersection(self._chosen):
            return []
        from langchain_dpicl.lab.evaluation.heads import HeadStudy, kept_vectors
        from langchain_dpicl.lab.evaluation.labels import label_votes
        from langchain_dpicl.local import local_embeddings

        embeddings = local_embeddings()
        parts = {"rows": self.rows, "queries": self.queries}
        if len(self.public) > 1:
            parts["public"] = self.public
        vectors = kept_vectors(self.folder / "vectors.npz", embeddings, parts)
        right = [row.output for row in self.queries]
        outputs = [row.output for row in self.rows]
        found: list[Score] = []
        if "label-vote" in self._chosen:
            found = label_votes(
                task.labels,
                private=(vectors["rows"], outputs),
                queries=(vectors["queries"], right),
                public=vectors.get("public", vectors["queries"]),
                plan=self.plan,
                draws=self.draws,
            )
        if "head" not in self._chosen:
            return found
        counts = self.vary.get("fits", ())
        maps = 2 if "public" in vectors else 1
        with self._bar("heads", maps * len(self.plan.epsilons) * self.heads * (1 + len(counts)), "fit") as bar:
            study = HeadStudy(
                task.labels,
                private=([row.input for row in self.rows], outputs, vectors["rows"]),
                asked=vectors["queries"],
                right=right,
                public=vectors.get("public"),
                embeddings=embeddings,
                plan=self.plan,
                heads=self.heads,
                progress=bar.update,
            )
            return [*found, *study.scores(), *study.fits(counts)]

    def _logits(self) -> TransformersLogits:
        """The embedded model, to be read in batches."""
        from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits

        return TransformersLogits(str(self.model.embedded), threads=self.model.threads, dtype=self.model.dtype)

    def _votes(self, task: ClassificationTask) -> list[Score]:
        if self.in_batches:
            from langchain_dpicl.lab.evaluation.batches import label_reader

            reader = label_reader(self._logits(), task.labels, task.shape)
        else:
            reader = chain_reader(self.model.load(), task)
        study = self._label_study(task, reader, self.plan)
        found = study.scores() if "vote" in self._chosen else study.alone()
        for method, aggregator in self._others.items():
            found += study.released(method, aggregator)
        for name in ("members", "releases"):
            found += study.votes([self.plan.varied(**{name: n}) for n in self.vary.get(name, ())], name)
        for shots in self.vary.get("shots", ()):
            plan = self.plan.varied(shots=shots)
            found += self._label_study(task, reader, plan).votes([plan], "shots")
        return found

    @cached_property
    def _others(self) -> dict[str, Aggregator[Any]]:
        """The aggregators of further kinds among labels, by their methods. Raises `InvalidParameter`."""
        return {each: self._other_kind(each) for each in self._chosen if each.partition(":")[0] in _OTHERS}

    def _other_kind(self, method: str) -> Aggregator[Any]:
        """Make the aggregator of a method such as "KIND:name=value,name=value", on the task's labels."""
        assert isinstance(self.task, ClassificationTask)
        kind, _, settings = method.partition(":")
        given = [each.partition("=") for each in settings.split(",") if settings]
        values = {name: yaml.safe_load(value) for name, _, value in given}
        values |= {"kind": kind, "labels": list(self.task.labels)}
        try:
            return section_of(KINDS[kind]).model_validate(values).aggregator()
        except ValidationError as error:
            mistakes = "; ".join(f"{place}: {words}" for place, words in told(error, values))
        raise InvalidParameter("methods", method, f"{kind} with settings of its own ({mistakes})")

    def _label_study(
        self,
        task: ClassificationTask,
        reader: Reader,
        plan: EvaluationPlan,
    ) -> LabelStudy:
        neutral = self.neutral or task.content_free
        texts = [*neutral, *(row.input for row in self.queries)]
        sampler = Sampler(self.rows, self.public, plan)
        with (
            closing(self._file("labels", plan)) as file,
            self._bar(f"{plan.members} members of {plan.shots}", len(texts) * self.samples) as bar,
        ):
            said = np.array(
                [
                    read_labels(
                        reader,
                        len(task.labels),
                        sampler.draw(s, file),
                        texts,
                        file,
                        s,
                        bar.update,
                    )
                    for s in range(self.samples)
                ]
            )
            filled = np.array([sampler.filled(s, file) for s in range(self.samples)])
        return LabelStudy(
            task.labels,
            right=[task.labels.index(row.output) for row in self.queries],
            said=said[:, len(neutral) :],
            neutral=said[:, : len(neutral)],
            plan=plan,
            draws=self.draws,
            filled=filled,
        )

    def _texts(self, task: GenerationTask, file: PassFile) -> list[Score]:
        from langchain_dpicl.local import local_embeddings

        temperatures = (0.0, studies.TEMPERATURE)
        greedy, sampling = (self.model.load(max_tokens=task.max_tokens, temperature=t) for t in temperatures)
        write = None
        if self.in_batches:
            from langchain_dpicl.lab.evaluation.batches import text_writer

            write = text_writer(self._logits(), task.max_tokens, task.stop)
        author = Author(greedy, sampling, task, file, write)
        sampler = Sampler(self.rows, self.public, self.plan)
        samples = [sampler.draw(s, file) for s in range(self.samples)]
        asked = [row.input for row in self.queries]
        with self._bar(f"{self.plan.members} members of {self.plan.shots}", len(asked) * self.samples) as bar:
            by_sample = [author.members(prompts, asked, s, bar.update) for s, prompts in enumerate(samples)]
        written = list(zip(*by_sample, strict=True))
        candidates: Sequence[Sequence[str]] = [()] * len(asked)
        if chosen := [method for method in self._chosen if method in studies.BY_CANDIDATES]:
            with self._bar("public candidates", len(asked)) as bar:
                candidates = author.candidates(asked, self.candidates, bar.update)
        study = TextStudy(
            task,
            self.queries,
            written,
            candidates,
            self.plan,
            local_embeddings(),
            author,
            self.draws,
            self.shown,
        )
        found = study.prompts()
        for method in [method for method in _TEXTS if method in self._chosen]:
            found += study.released(method)
            if method in chosen:
                for n in self.vary.get("candidates", ()):
                    found += study.embedding(count=n, study="candidates", method=method)
            for name in ("members", "releases"):
                for n in self.vary.get(name, ()):
                    found += study.released(method, self.plan.varied(**{name: n}), name)
        return found

    def _tokens(self, task: GenerationTask, file: PassFile) -> list[Score]:
        """Score answers from the file, or decode them now, as often as there are samples."""
        from langchain_dpicl.decoding.answer import Settings
        from langchain_dpicl.decoding.model import DemonstrationTemplate
        from langchain_dpicl.lab.evaluation.batches import Decoder
        from langchain_dpicl.lab.evaluation.tokens import TokenStudy
        from langchain_dpicl.local import local_embeddings

        shape = task.shape
        decoder = Decoder(
            str(self.model.embedded),
            DemonstrationTemplate(f"{shape.query} {{output}}{SEPARATOR}", shape.query),
            [{"input": shape.clean(row.input), "output": shape.clean(row.output)} for row in self.rows],
            Settings(task.max_tokens, 8, self.top_k, shots=0.0, temperature=1.0, cap=1.5, stop=("\n",)),
            self.plan.delta,
            threads=self.model.threads,
            dtype=self.model.dtype,
        )
        scores = TokenStudy(
            decoder,
            file,
            self.queries,
            inputs=[shape.clean(row.input) for row in self.queries],
            public=[shape.clean(row.input) for row in self.public][:16],
            embeddings=local_embeddings(),
            top_k=self.top_k,
            samples=self.samples,
            shown=self.shown,
        ).scores
        epsilons = (None, *self.plan.epsilons)
        found: list[Score] = []
        if "online" in self._chosen:  # an ablation decodes online alone
            vary = {study: self.vary[study] for study in _VARIED["online"] if study in self.vary}
            found = scores("zero-shot decoding", [None]) + scores("online", epsilons, vary)
        return found + (scores("offline", epsilons) if "offline" in self._chosen else [])


def some(rows: Sequence[Row], count: int) -> list[Row]:
    """Return so many distinct rows, in an order that depends on their inputs alone: more rows begin with the same."""
    distinct = {row.input: row for row in reversed(rows)}
    return sorted(distinct.values(), key=lambda row: key_of(row.input))[: whole("queries", count)]


def _digest(rows: Sequence[Row]) -> str:
    return key_of("".join(repr((row.input, row.output)) for row in rows))


# -- the cost ----------------------------------------------------------------------------------------------------------


_QUERIES = 100


def tokens_of(task: Task, examples: Sequence[Row], queries: Sequence[Row]) -> tuple[float, float, float]:
    """Return the mean tokens of a prompt without examples, of an example, and of an answer. Four characters are one.

    An answer counts as the mean of the queries' own, each at most the task's `max_tokens`.
    """
    shape = task.shape
    most = task.max_tokens if isinstance(task, GenerationTask) else math.inf
    return (
        fmean(len(shape.prefix([]) + shape.ask(row.input)) for row in queries) / 4,
        fmean(len(shape.example(row.input, row.output)) for row in examples) / 4,
        fmean(min(len(f" {row.output}") / 4, most) for row in queries),
    )


@dataclass(frozen=True)
class CostPoint:
    """The cost at one sampling rate.

    - ``rate``, ``owners``: the rate, and how many owners a release then samples on average.
    - ``grows``: whether the owners beyond the least take more `members` of as many shots, or more `shots` for as many
      members.
    - ``members``, ``shots``: N, and how many examples a member sees on average.
    - ``prompt_tokens``, ``answer_tokens``, ``price``: of 100 queries.
    - ``parameter``, ``noise``: the mechanism's noise parameter by name, and its value in the plan.
    """

    rate: float
    owners: float
    grows: Literal["members", "shots"]
    members: int
    shots: float
    prompt_tokens: float
    answer_tokens: float
    price: float
    parameter: str
    noise: float

    @property
    def tokens(self) -> float:
        """Read and written."""
        return self.prompt_tokens + self.answer_tokens


def cost_curve(
    tokens: tuple[float, float, float],
    plan: EvaluationPlan,
    price_in: float,
    price_out: float,
    *,
    mechanism: str = "vote",
    public_calls: int = 0,
) -> list[CostPoint]:
    """Return two points for each of five rates around the plan's, rising: more members of the plan's shots, more shots.

    A release at rate q samples q * owners owners on average, each with one example. N calls then read
    N bare prompts and q * owners examples on average, and write N answers. (A bucket's cap that drops examples reads
    less.) With growing members, N is q * owners / shots, rounded to a whole number, at least 1.

    - ``tokens``: see `tokens_of`.
    - ``plan``: its noise at the largest epsilon depends on the rate, not on how members and shots share the sample.
    - ``price_in``, ``price_out``: of a million tokens, in any currency.
    - ``mechanism``: one that calls each member once.
    - ``public_calls``: calls of the zero-shot prompt beside the members', for each query: an embedding mean's
      candidates.

    Raises `InvalidParameter` for a price below 0, and `InfeasiblePlan` if no noise of the mechanism reaches epsilon.
    """
    bare, example, answer = tokens
    public = CallCosts(bare, answer, price_in, price_out)
    points = []
    for rate in sorted({min(1.0, plan.rate * factor) for factor in (0.25, 0.5, 1, 2, 4)}):
        sampled = rate * plan.owners
        sizes: dict[Literal["members", "shots"], int] = {
            "members": max(1, round(sampled / plan.shots)),
            "shots": plan.members,
        }
        for grows, calls in sizes.items():
            member = CallCosts(bare + example * sampled / calls, answer, price_in, price_out)
            prompt_tokens = calls * member.prompt_tokens + public_calls * public.prompt_tokens
            points.append(
                CostPoint(
                    rate,
                    owners=sampled,
                    grows=grows,
                    members=calls,
                    shots=sampled / calls,
                    prompt_tokens=_QUERIES * prompt_tokens,
                    answer_tokens=_QUERIES * (calls + public_calls) * answer,
                    price=_QUERIES * (member.cost(calls) + public.cost(public_calls)),
                    parameter=MECHANISMS[mechanism].parameter,
                    noise=plan.parameter(max(plan.epsilons), mechanism, rate=rate),
                )
            )
    return points
