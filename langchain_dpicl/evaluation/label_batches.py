"""What many label prompts say, read in batches by a model in this process: a pass over a task in minutes, not hours.

The scores are those of `langchain_dpicl.members.scoring`, from the whole next-token distribution instead of what a
server shows. In a batch a row's last digits depend on the other rows, which the guarantee does not allow: nothing made
here is a release, and the data must be public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.evaluation.lockstep import Lockstep, State
from langchain_dpicl.members.scoring import Position, label_scores

_BATCH = 20
_ALTERNATIVES = 100

Scores = NDArray[np.float64]


class LabelBatches:
    """Scores labels after prompts of the form instruction + prefix + suffix.

    The instruction, "" for none, is read once for all prompts; a prefix once for all its suffixes. Each piece is
    tokenised on its own, so pieces have to meet where a tokeniser parts the whole prompt too.
    """

    def __init__(self, model: TransformersLogits, labels: Sequence[str], instruction: str = "") -> None:
        self._lockstep = Lockstep(model)
        self._network = model._loaded
        self._labels = labels
        self._pieces: dict[int, bytes] = {}
        self._instruction: State | None = None
        self._has_instruction = bool(instruction)
        if first := [*self._network.first, *self._network.tokens(instruction)]:
            with self._network.working():
                (self._instruction,) = self._states([first], [None])

    def after(self, prefixes: Sequence[str], joint: str = "") -> Callable[[str], Scores]:
        """Read prefixes once; then, for any suffix, (prefixes, labels) probabilities that the label comes next.

        Between what comes before it and the suffix stands ``joint``; not where nothing comes before it.

        What was read is kept until the function that this gives is dropped.
        """
        tokens = [self._network.tokens(prefix) for prefix in prefixes]
        order = sorted(range(len(prefixes)), key=lambda i: len(tokens[i]))
        batches = [order[start : start + _BATCH] for start in range(0, len(order), _BATCH)]
        with self._network.working():
            states = [self._after([tokens[i] for i in batch]) for batch in batches]

        def ask(suffix: str) -> Scores:
            found = np.zeros((len(prefixes), len(self._labels)))
            first, next_ = self._network.tokens(suffix), self._network.tokens(joint + suffix)
            with self._network.working():
                for batch, known in zip(batches, states, strict=True):
                    endings = [next_ if self._has_instruction or prefixes[i] else first for i in batch]
                    vectors, _ = self._lockstep.read(endings, known)
                    for i, row in zip(batch, self._network.scores(list(vectors)), strict=True):
                        found[i] = self._label_scores(row)
            return found

        return ask

    def _after(self, prefixes: Sequence[list[int]]) -> list[State | None]:
        """What there is to remember of the instruction and each prefix."""
        states: list[State | None] = [self._instruction] * len(prefixes)
        there = [i for i, prefix in enumerate(prefixes) if prefix]
        read = self._states([prefixes[i] for i in there], [self._instruction] * len(there)) if there else []
        for i, state in zip(there, read, strict=True):
            states[i] = state
        return states

    def _states(self, tokens: Sequence[list[int]], before: Sequence[State | None]) -> list[State]:
        """The states after these tokens, where all rows have as much before them."""
        _, cache = self._lockstep.read(tokens, before)
        past = 0 if before[0] is None else before[0][0][0].shape[1]
        return [
            [(layer.keys[i, :, : past + len(row)], layer.values[i, :, : past + len(row)]) for layer in cache.layers]
            for i, row in enumerate(tokens)
        ]

    def _label_scores(self, row: Any) -> list[float]:
        best = np.argpartition(row, -_ALTERNATIVES)[-_ALTERNATIVES:]
        best = best[np.argsort(-row[best])]
        highest = float(row[best[0]])
        total = float(np.exp(row - highest).sum())
        top = [(self._piece(int(i)), math.exp(float(row[i]) - highest) / total) for i in best]
        return label_scores([Position(top[0][0], top)], self._labels)

    def _piece(self, token: int) -> bytes:
        """What a token adds to a text."""
        if token not in self._pieces:
            self._pieces[token] = self._network.tokenizer.decode([token]).encode()
        return self._pieces[token]
