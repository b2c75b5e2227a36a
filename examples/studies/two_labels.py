"""What a member with one owner's example says about a question with two answers: prompts, samples of owners, outputs.

The calls are those of a release: with one example every owner takes part at a rate of 20 / owners and has a call of its
own; with four, 20 shared buckets are filled at a rate of 80 / owners. `two_label_votes.py` counts their votes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.lab.evaluation.tasks import SEPARATOR, Shape
from langchain_dpicl.store.datafile import read_records

CALLS = 20
PUBLIC = 500
DEVELOPMENT = 200
NEUTRAL = {1: 4, 4: 2}
"""Public texts that a call is calibrated on, by its number of examples."""

PUBLIC_NEUTRAL = 16

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

Prompt = tuple[str, ...]
"""The pieces of a prompt: examples, and the question. A tokeniser splits the prompt between them, too."""


@dataclass(frozen=True)
class Words:
    """A task of two labels: the labels' words, the layout of prompts, public examples, and the right label of a row."""

    labels: tuple[str, str]
    shape: Shape
    examples: tuple[tuple[str, str], ...]
    right: dict[str, str] = field(default_factory=dict)
    other: str = ""
    words: int | None = None

    def row(self, record: dict[str, object]) -> tuple[str, int]:
        """A record's text and the place of its label."""
        text, title = str(record["text"]), record.get("title")
        text = f"{title}. {text}" if title else text
        label = self.right.get(str(record["label"]), self.other)
        return " ".join(text.split()[: self.words]), self.labels.index(label)

    def prompt(self, examples: Iterable[tuple[str, int]], question: str) -> Prompt:
        """The pieces."""
        first = (self.shape.instruction + SEPARATOR,) if self.shape.instruction else ()
        shown = (self.shape.example(text, self.labels[label]) for text, label in examples)
        return (*first, *shown, self.shape.ask(question))

    @property
    def shown(self) -> list[tuple[str, int]]:
        """The public examples."""
        return [(text, self.labels.index(label)) for text, label in self.examples]


TASKS = {
    "sst2": Words(
        ("Negative", "Positive"),
        Shape("", "Review: {input}\nSentiment:"),
        (
            ("A warm and funny film with a wonderful cast .", "Positive"),
            ("Two dull hours that never come to life .", "Negative"),
        ),
        {"negative": "Negative", "positive": "Positive"},
    ),
    "business": Words(
        ("No", "Yes"),
        Shape("", "Article: {input}\nIs it about business?"),
        (
            ("Retailer Raises Its Forecast. Shares rose after the chain said that its profit would double.", "Yes"),
            ("Champions Win Again. The home team scored twice in the last minutes of the final.", "No"),
        ),
        {"Business": "Yes"},
        "No",
        30,
    ),
}
"""SST-2, and of AG News the question if an article is about business (yes for a quarter of them)."""


@dataclass(frozen=True, eq=False)
class Store:
    """The private rows of a task, of all owners or of so many, with public texts and questions beside them."""

    words: Words
    owners: list[tuple[str, int]]
    public: list[str]
    tests: list[tuple[str, int]]

    @classmethod
    def of(cls, words: Words, train: str, test: str, *, owners: int | None = None) -> Store:
        """From files. The first 500 of a random order give up their labels; so many of the next are owners."""
        rows = [words.row(each) for each in read_records(train)]
        order = np.random.default_rng(0).permutation(len(rows)).tolist()
        public = [rows[i][0] for i in order[:PUBLIC]]
        last = None if owners is None else PUBLIC + owners
        held = [rows[i] for i in order[PUBLIC:last]]
        return cls(words, held, public, [words.row(each) for each in read_records(test)])


@dataclass(frozen=True, eq=False)
class Calls:
    """The calls of one release for each question.

    ``questions`` are test questions, or so many of the owners' own (``own``), each asked without its own example.
    """

    store: Store
    shots: int
    own: bool = False
    asked: int | None = None
    seed: int = 0

    @property
    def rate(self) -> float:
        """q."""
        return CALLS * self.shots / len(self.store.owners)

    @cached_property
    def questions(self) -> list[tuple[str, int]]:
        """Texts and right labels."""
        return [self.store.owners[i] for i in self._own] if self.own else self.store.tests[: self.asked]

    @cached_property
    def _own(self) -> list[int]:
        found: list[int] = np.random.default_rng(1).permutation(len(self.store.owners))[:DEVELOPMENT].tolist()
        return found

    @cached_property
    def members(self) -> list[list[tuple[int, ...]]]:
        """For each question the owners in each call; with shared buckets, of those that are not empty."""
        randomness, count = np.random.default_rng((self.seed, self.shots, self.own)), len(self.store.owners)
        found: list[list[tuple[int, ...]]] = []
        for place in range(len(self.questions)):
            taking = np.flatnonzero(randomness.random(count) < self.rate)
            if self.own:
                taking = taking[taking != self._own[place]]
            if self.shots == 1:
                found.append([(i,) for i in taking.tolist()])
            else:
                buckets = randomness.integers(CALLS, size=len(taking))
                split = (tuple(taking[buckets == bucket].tolist()) for bucket in range(CALLS))
                found.append([each for each in split if each])
        return found

    def _prompt(self, owners: tuple[int, ...], text: str) -> Prompt:
        return self.store.words.prompt([self.store.owners[i] for i in owners], text)

    def _said(self, place: int, owners: tuple[int, ...]) -> Prompt:
        return self._prompt(owners, self.questions[place][0])

    def _neutral(self, owners: tuple[int, ...]) -> list[Prompt]:
        return [self._prompt(owners, text) for text in self.store.public[: NEUTRAL[self.shots]]]

    def prompts(self) -> Iterator[Prompt]:
        """Every prompt that `votes` needs."""
        for place, members in enumerate(self.members):
            yield from (self._said(place, owners) for owners in members)
        for owners in dict.fromkeys(each for members in self.members for each in members):
            yield from self._neutral(owners)

    def votes(self, kept: Kept, *, calibrated: bool) -> Ints:
        """(questions, labels + 1) votes; none abstains. A tie of the scores is the first label's."""
        counts = np.zeros((len(self.questions), len(self.store.words.labels) + 1), np.int64)
        leaning: dict[tuple[int, ...], Floats] = {}
        for place, members in enumerate(self.members):
            for owners in members:
                scores = kept.of(self._said(place, owners))
                if calibrated:
                    if owners not in leaning:
                        leaning[owners] = np.mean([kept.of(each) for each in self._neutral(owners)], axis=0)
                    scores = scores - leaning[owners]
                counts[place, int(scores.argmax())] += 1
        return counts


@dataclass(frozen=True, eq=False)
class PublicPrompt:
    """The prompt with the public examples, calibrated on public texts: a release's answer without private records."""

    store: Store
    own: Calls | None = None

    def _prompt(self, text: str) -> Prompt:
        return self.store.words.prompt(self.store.words.shown, text)

    @property
    def _questions(self) -> list[tuple[str, int]]:
        return self.store.tests if self.own is None else self.own.questions

    def prompts(self) -> Iterator[Prompt]:
        """Every prompt that `right` needs."""
        yield from map(self._prompt, self.store.public[:PUBLIC_NEUTRAL])
        yield from (self._prompt(text) for text, _ in self._questions)

    def right(self, kept: Kept) -> NDArray[np.bool_]:
        """For each question if it is answered right."""
        leaning = np.mean([kept.of(self._prompt(text)) for text in self.store.public[:PUBLIC_NEUTRAL]], axis=0)
        found = [int((kept.of(self._prompt(text)) - leaning).argmax()) == label for text, label in self._questions]
        return np.array(found)


class Kept:
    """Log-probabilities of the labels by prompt, in a file: what single examples made the model say, so private."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        self._known: dict[str, list[float]] = dict(map(json.loads, lines))

    def __contains__(self, prompt: object) -> bool:
        return _key(prompt) in self._known

    def of(self, prompt: Prompt) -> Floats:
        """The labels' log-probabilities."""
        return np.array(self._known[_key(prompt)])

    def add(self, prompts: Sequence[Prompt], scores: Iterable[Sequence[float]]) -> None:
        """Keep these; each goes to the file at once, so a study may be stopped."""
        with self._path.open("a", encoding="utf-8") as file:
            for prompt, row in zip(prompts, scores, strict=True):
                self._known[_key(prompt)] = found = [round(float(each), 4) for each in row]
                print(json.dumps([_key(prompt), found]), file=file, flush=True)


def _key(prompt: object) -> str:
    return hashlib.sha256("".join(prompt).encode()).hexdigest()[:20]  # type: ignore[arg-type]
