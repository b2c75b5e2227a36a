"""What many label prompts say, read in batches by a model in this process.

The scores are those of `langchain_dpicl.members.scoring`, from the whole next-token distribution instead of the part
that a server shows. Nothing made here is a release (see `batches`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.evaluation.batches import Batches, State
from langchain_dpicl.evaluation.label_pass import Ask, Scores
from langchain_dpicl.evaluation.plan import Pairs
from langchain_dpicl.evaluation.tasks import Shape
from langchain_dpicl.members.scoring import Position, label_scores

_ALTERNATIVES = 100


class LabelBatches:
    """Scores labels after prompts of a shape.

    The instruction is read once for all prompts, examples once for all queries. Each piece is tokenised on its own, so
    pieces have to meet where a tokeniser splits the whole prompt too.
    """

    def __init__(self, model: TransformersLogits, labels: Sequence[str], shape: Shape) -> None:
        self._model, self._labels, self._shape = model, labels, shape
        # Tokenisers split an empty line before a word into its two line breaks: the pieces meet between them.
        self._joint = "\n" if shape.separator.endswith("\n") else ""
        self._instruction = shape.prefix(()).removesuffix(self._joint)
        self._pieces: dict[int, bytes] = {}

    @cached_property
    def batches(self) -> Batches:
        """The model, loaded at first use."""
        return Batches(self._model)

    @cached_property
    def start(self) -> State | None:
        """The state after the instruction."""
        network = self.batches.network
        first = [*network.first, *network.tokens(self._instruction)]
        return self.batches.states([first], None)[0] if first else None

    def tokens_of(self, examples: Pairs) -> list[int]:
        """Return the tokens of a prompt's examples, which follow the instruction."""
        prefix = self._shape.prefix(examples).removesuffix(self._joint)
        return self.batches.network.tokens(prefix[len(self._instruction) :])

    def prompts(self, examples: Sequence[Pairs]) -> Ask:
        """See `LabelReader`. The examples are read once; the function keeps their states until it is dropped."""
        states = [self.start] * len(examples)
        shown = [i for i, pairs in enumerate(examples) if pairs]
        read = self.batches.states([self.tokens_of(examples[i]) for i in shown], self.start)
        for i, state in zip(shown, read, strict=True):
            states[i] = state
        return lambda query: self.after(states, [bool(pairs) for pairs in examples], query)

    def after(self, states: Sequence[State | None], has_examples: Sequence[bool], query: str) -> Scores:
        """Return (states, labels) probabilities that the label follows the query after each state."""
        asked = self._shape.ask(query)
        first, next_ = self.batches.network.tokens(asked), self.batches.network.tokens(self._joint + asked)
        endings = [next_ if self._instruction or has else first for has in has_examples]
        rows = [self._label_scores(row) for row in self.batches.scores(endings, states)]
        return np.array(rows, np.float64).reshape(-1, len(self._labels))

    def _label_scores(self, row: Any) -> list[float]:
        best = np.argpartition(row, -_ALTERNATIVES)[-_ALTERNATIVES:]
        best = best[np.argsort(-row[best])]
        highest = float(row[best[0]])
        total = float(np.exp(row - highest).sum())
        for token in map(int, best):
            if token not in self._pieces:
                self._pieces[token] = self.batches.network.tokenizer.decode([token]).encode()
        top = [(self._pieces[int(i)], math.exp(float(row[i]) - highest) / total) for i in best]
        return label_scores([Position(top[0][0], top)], self._labels)
