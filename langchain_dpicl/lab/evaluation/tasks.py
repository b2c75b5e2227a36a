"""The eight tasks of the papers, and MTS-Dialog.

A task has the layout of a member's prompt, its possible answers, and figures of the papers, all public. A prompt is
``shape.prefix(examples)`` followed by ``shape.ask(input)``; several queries may share a prefix.

SST-2, AG News and TREC are worded as by Zhao et al. 2021 ("Calibrate Before Use"), whom Panda et al. 2023 and Wu et al.
2024 followed; Amazon and SAMSum as in the code that Wu et al. published. Three more (document question answering of Wu
et al.; E2E and WikiLarge of Flemings et al. 2025) are worded in the same manner, not as published. So is MTS-Dialog,
which is in none of the papers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from langchain_dpicl.aggregators.reading import normal
from langchain_dpicl.aggregators.votes import check_labels
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.checks import FrozenMapping, whole

SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Shape:
    """The layout of a prompt: an instruction, examples (a query and its answer on one line), and the query.

    An empty line follows the instruction and every example. No text can pass for another example: each run of white
    space in it becomes one space, so it is one line. With `multiline` (for texts whose lines have a meaning, such as
    the turns of a dialogue) its lines stay but its empty lines go.

    `query` is a template with ``{input}`` once and no white space at its end. `instruction` may be "".
    """

    instruction: str
    query: str
    multiline: bool = False

    def __post_init__(self) -> None:
        if self.query.count("{input}") != 1:
            raise InvalidParameter("query", self.query, "a template with {input} once")
        if self.query != self.query.rstrip():
            raise InvalidParameter("query", self.query, "a template without white space at its end")

    def example(self, input: str, output: str) -> str:
        """A query with its answer, and the empty line after it."""
        return f"{self.ask(input)} {self.clean(output)}{SEPARATOR}"

    def ask(self, input: str) -> str:
        """The query, up to its answer."""
        return self.query.replace("{input}", self.clean(input))

    def prefix(self, examples: Sequence[tuple[str, str]]) -> str:
        """The text before the query: the instruction, and each example (input, output)."""
        first = self.instruction + SEPARATOR if self.instruction else ""
        return first + "".join(self.example(input, output) for input, output in examples)

    def prompt(self, values: Mapping[str, Any]) -> str:
        """The prompt of a member, from its values ``examples`` (mappings with ``input`` and ``output``), ``input``."""
        return self.prefix([(each["input"], each["output"]) for each in values["examples"]]) + self.ask(values["input"])

    def clean(self, text: str) -> str:
        """A text that cannot pass for another example: one line, or with `multiline` lines that are not empty."""
        lines = (" ".join(line.split()) for line in text.splitlines())
        return ("\n" if self.multiline else " ").join(line for line in lines if line)


@dataclass(frozen=True)
class HubSource:
    """A task's data on the Hugging Face hub.

    - ``name``, ``revision``, ``config``: as ``datasets.load_dataset`` takes them. The revision "refs/convert/parquet"
      is the hub's own conversion of data with a loading script, which the library runs no longer.
    - ``splits``: from train, dev, test to the hub's names of the splits that it has.
    - ``columns``: from a row's keys (`text`, `label`, `title`; `input`, `output`, `references`) to columns of other
      names there.
    - ``label_names``: the labels behind the whole numbers of the label column, in order; empty if the column holds
      words.
    """

    name: str
    splits: Mapping[str, str]
    columns: Mapping[str, str]
    label_names: tuple[str, ...] = ()
    revision: str | None = None
    config: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "splits", FrozenMapping(self.splits))
        object.__setattr__(self, "columns", FrozenMapping(self.columns))


class PaperFigure(NamedTuple):
    """One published number in per cent, of another model: its place and setting, and the names that the paper uses.

    `epsilon` is the paper's claim for all queries together; None for a method that is not private. Numbers that were
    not read in a source have no figure: ``docs/papers.md`` of the source archive says which.
    """

    source: str
    model: str
    method: str
    epsilon: float | None
    metric: str
    value: float


@dataclass(frozen=True)
class ClassificationTask:
    """A task whose answer is one of a few public words.

    - ``labels``: the words that the model may answer with.
    - ``aliases``: from other spellings in the data to a label. Case, spaces and punctuation around a word never matter.
    - ``inputs``: templates for the input; a row uses the first one all of whose keys it has.
    - ``content_free``: inputs without content, to measure a model's bias (Zhao et al. 2021).
    """

    name: str
    labels: tuple[str, ...]
    shape: Shape
    hub: HubSource | None = None
    aliases: Mapping[str, str] = field(default_factory=FrozenMapping)
    paper: tuple[PaperFigure, ...] = ()
    inputs: tuple[str, ...] = ("{text}",)
    content_free: tuple[str, ...] = ("N/A",)

    def __post_init__(self) -> None:
        check_labels("labels", self.labels)
        object.__setattr__(self, "aliases", FrozenMapping(self.aliases))
        for spelling, label in self.aliases.items():
            if label not in self.labels:
                raise InvalidParameter(f"aliases[{spelling!r}]", label, f"one of {', '.join(self.labels)}")

    def label_of(self, spelling: str) -> str | None:
        """The label that a word in the data stands for, or None."""
        known = {normal(word): label for word, label in self.aliases.items()}
        known |= {normal(label): label for label in self.labels}
        return known.get(normal(spelling))


@dataclass(frozen=True)
class GenerationTask:
    """A task whose answer is a text of at most `max_tokens`, which ends at a text of `stop`.

    - ``keywords``: the least and the most keywords that propose-test-release may choose.
    - ``k``: how many keywords the joint exponential mechanism releases.
    - ``inputs``: templates for the input; a row uses the first one all of whose keys it has.
    """

    name: str
    shape: Shape
    max_tokens: int
    hub: HubSource | None = None
    paper: tuple[PaperFigure, ...] = ()
    keywords: tuple[int, int] = (15, 30)
    k: int = 10
    stop: tuple[str, ...] = ("\n",)
    inputs: tuple[str, ...] = ("{input}",)

    def __post_init__(self) -> None:
        whole("max_tokens", self.max_tokens)
        whole("k", self.k)
        whole("keywords[1]", self.keywords[1], at_least=whole("keywords[0]", self.keywords[0]))


Task = ClassificationTask | GenerationTask

_TWO = {"train": "train", "test": "test"}
_THREE = {"train": "train", "dev": "validation", "test": "test"}
_CONVERTED = "refs/convert/parquet"
_TOPICS = "Classify the news articles into the categories of World, Sports, Business, and Technology."
_ANSWER_TYPES = (
    "Classify the questions based on whether their answer type is a Number, Location, Person, Description, Entity, or "
    "Abbreviation."
)
_TREC_LABELS = ("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM")
_E2E_COLUMNS = {"input": "meaning_representation", "output": "human_reference"}
_DIALOGUE = Shape("", "Dialogue:\n{input}\nSummarize the above dialogue:", multiline=True)

_PRINTED = "Wu et al. 2024, epsilon 1: as the paper prints it"
_NOTEBOOK = (
    "Wu et al. 2024, epsilon 3 and 8 and no noise: not the paper's figures but outputs in the notebook that its "
    "authors published: 100 queries, 100 members of 4 shots, rate 400/14732, delta 5e-5; noise for a sensitivity of 1"
)
_SAMSUM_FIGURES = tuple(
    PaperFigure(source, "GPT-3 davinci", method, epsilon, metric, value)
    for source, method, epsilon, *values in (
        (_NOTEBOOK, "zero-shot", None, 35.32, 12.69, 27.07),
        (_NOTEBOOK, "4-shot", None, 43.33, 19.07, 34.79),
        (_NOTEBOOK, "ESA without noise", None, 40.41, 16.51, 32.28),
        (_PRINTED, "ESA", 1.0, 38.21, 14.55, 29.85),
        (_NOTEBOOK, "ESA", 3.0, 39.12, 15.04, 30.73),
        (_NOTEBOOK, "ESA", 8.0, 39.73, 15.93, 31.35),
    )
    for metric, value in zip(("ROUGE-1", "ROUGE-2", "ROUGE-L"), values, strict=True)
)
_HANKE = "Hanke et al. 2024, table {}: the method of Wu et al. (DP-ICL) as they report it, delta 1 / records, {}"


def _reported(table: int, setting: str, metrics: Sequence[str], *rows: tuple[Any, ...]) -> tuple[PaperFigure, ...]:
    """Rows of a method, a model and a value of each metric, all at epsilon 8 in one table of Hanke et al. 2024."""
    return tuple(
        PaperFigure(_HANKE.format(table, setting), model, method, 8.0, metric, value)
        for method, model, *values in rows
        for metric, value in zip(metrics, values, strict=True)
    )


_LABELLED = "10 members of 4 shots, {} queries"
_SST2_FIGURES = _reported(
    3, _LABELLED.format(872), ("accuracy",), ("RNM", "GPT-3 babbage-002", 92.8), ("RNM", "GPT-4 Turbo", 95.9)
)
_TREC_FIGURES = _reported(
    3, _LABELLED.format(500), ("accuracy",), ("RNM", "GPT-3 babbage-002", 26.3), ("RNM", "GPT-4 Turbo", 16.2)
)
_SAMSUM_REPORTED = _reported(
    4,
    "100 members, 10,000 queries; which of ESA and KSA is not said",
    ("ROUGE-1", "ROUGE-2", "ROUGE-L"),
    ("DP-ICL", "GPT-3 davinci-002", 41.2, 16.3, 31.8),
    ("DP-ICL", "GPT-3.5 Turbo", 42.6, 18.9, 33.8),
    ("DP-ICL", "GPT-4 Turbo", 41.8, 17.3, 33.4),
)
_DOCQA_FIGURES = _reported(
    5,
    "100 members, 10,000 queries; which of ESA and KSA is not said",
    ("ROUGE-1", "BLEU", "Levenshtein"),
    ("DP-ICL", "OpenLLaMA 13B", 60.7, 23.9, 52.5),
)
_MOZO_FIGURE = PaperFigure(
    "Flemings et al. 2025, abstract",
    "Gemma 2 2B",
    "DPS-MOZO",
    2.0,
    "ROUGE-L minus non-private few-shot",
    -0.3,
)

_ALL: tuple[Task, ...] = (
    ClassificationTask(
        "sst2",
        ("Negative", "Positive"),
        Shape("", "Review: {input}\nSentiment:"),
        HubSource("SetFit/sst2", _THREE, {"label": "label_text"}),
        paper=_SST2_FIGURES,
    ),
    ClassificationTask(
        "amazon",
        ("Negative", "Positive"),
        Shape("", "{input}\nSentiment:", multiline=True),
        HubSource("fancyzhx/amazon_polarity", _TWO, {"text": "content"}, ("negative", "positive")),
        inputs=("Title: {title}\nReview: {text}", "Review: {text}"),
        content_free=("Title: N/A\nReview: N/A",),
    ),
    ClassificationTask(
        "agnews",
        ("World", "Sports", "Business", "Technology"),
        Shape(_TOPICS, "Article: {input}\nAnswer:"),
        HubSource("fancyzhx/ag_news", _TWO, {}, ("World", "Sports", "Business", "Sci/Tech")),
        aliases={"Sci/Tech": "Technology", "Science": "Technology"},
        inputs=("{title}. {text}", "{text}"),
    ),
    ClassificationTask(
        "trec",
        ("Number", "Location", "Person", "Description", "Entity", "Abbreviation"),
        Shape(_ANSWER_TYPES, "Question: {input}\nAnswer Type:"),
        HubSource("CogComp/trec", _TWO, {"label": "coarse_label"}, _TREC_LABELS, _CONVERTED),
        aliases={"Human": "Person", "HUM": "Person", "NUM": "Number", "LOC": "Location"}
        | {"DESC": "Description", "ENTY": "Entity", "ABBR": "Abbreviation"},
        paper=_TREC_FIGURES,
    ),
    GenerationTask(
        "samsum",
        _DIALOGUE,
        max_tokens=60,
        hub=HubSource("knkarthick/samsum", _THREE, {"input": "dialogue", "output": "summary"}),
        paper=(*_SAMSUM_FIGURES, *_SAMSUM_REPORTED, _MOZO_FIGURE),
    ),
    GenerationTask(
        "e2e",
        Shape("", "Data: {input}\nDescription:"),
        max_tokens=40,
        hub=HubSource("tuetschek/e2e_nlg", _THREE, _E2E_COLUMNS, revision=_CONVERTED),
        keywords=(5, 15),
    ),
    GenerationTask(
        "wikilarge",
        Shape("", "Complex: {input}\nSimple:"),
        max_tokens=60,
        hub=HubSource("bogdancazan/wikilarge-text-simplification", _THREE, {"input": "Normal", "output": "Simple"}),
        keywords=(5, 15),
    ),
    GenerationTask(
        "docqa",
        Shape("", "{input}\nAnswer:", multiline=True),
        max_tokens=20,
        paper=_DOCQA_FIGURES,
        keywords=(1, 10),
        k=5,
        inputs=("Document: {document}\nQuestion: {question}", "{input}"),
    ),
    GenerationTask("mts_dialog", _DIALOGUE, max_tokens=60, keywords=(5, 15), stop=("\n\n",)),
)

TASKS: Mapping[str, Task] = FrozenMapping({entry.name: entry for entry in _ALL})
"""Every task by its name."""


def own(labels: Sequence[str]) -> ClassificationTask:
    """Return a task of somebody's own labels: a text, and its label."""
    return ClassificationTask("own", tuple(label.strip() for label in labels), Shape("", "Text: {input}\nLabel:"))


def task(name: str) -> Task:
    """Return the task of that name. Raises `InvalidParameter`, which lists the names, for any other."""
    if name not in TASKS:
        raise InvalidParameter("task", name, f"one of {', '.join(TASKS)}")
    return TASKS[name]
