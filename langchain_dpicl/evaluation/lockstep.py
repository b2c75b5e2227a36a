"""Many answers of a sampler at once, for measuring how good they are.

The draws are the sampler's own (`langchain_dpicl.decoding.answer.choose`), from the same samples, candidates and terms,
but the rows of all answers are read in batches. In a batch a row's last digits depend on the other rows, which the
guarantee does not allow: nothing that is made here is a release, and the data must be public.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from langchain_dpicl.decoding.answer import Settings, Writer, choose
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.mixing import FloatArray, IntArray
from langchain_dpicl.decoding.model import Demonstration, Logits
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.noise import Randomness

_BATCH = 24

State = list[tuple[Any, Any]]
"""Keys and values of every layer, (heads, tokens, width) each."""


Weighed = tuple[IntArray, FloatArray]
"""What each row adds to the scores, and its mixing weight."""


@dataclass
class Answer:
    """One answer in the making.

    Parameters
    ----------
    asked
        The query as the model reads it.
    shown
        For each step the demonstrations of that step's sample.
    mix
        (one-shot rows, zero-shot row), over the candidates -> what the rows add, with their weights.
    """

    asked: str
    shown: Sequence[Sequence[str]]
    mix: Callable[[FloatArray, FloatArray], Weighed]
    writer: Writer
    weights: dict[int, list[float]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether no further token comes."""
        return self.writer.ended or len(self.writer.tokens) == len(self.shown)

    def terms(self, one_shot: FloatArray, zero_shot: FloatArray) -> IntArray:
        """What the rows of the next token add; keeps their weights."""
        added, weights = self.mix(one_shot, zero_shot)
        self.weights[len(self.writer.tokens)] = weights.tolist()
        return added


class Lockstep:
    """Reads rows of many answers in batches; keeps what it has read of every demonstration."""

    def __init__(self, model: TransformersLogits) -> None:
        self.model = model
        self._network = model._loaded
        self._states: dict[str, State] = {}
        self._tokens: dict[str, list[int]] = {}
        self._check()

    def _check(self) -> None:
        """Raise `InvalidParameter` for a model whose rows cannot be read in batches as they are read alone."""
        shown, asked = "Colour: red\nThing: cherry\n\n", "Colour: yellow\nThing:"
        session = self.model.session(asked, [Demonstration("public", shown)], steps=1)
        alone = session.logits([0], [])
        session.close()
        batch = np.array(self.rows([("", self._ids(asked)), (shown, self._ids(asked)), (shown * 2, self._ids(asked))]))
        if not np.abs(batch[:2] - alone).max() <= 1.0:  # a row that failed is NaN
            raise InvalidParameter("model", self.model.name, "one whose prompts can be read in a padded batch")
        self._states.clear()

    def write(
        self, answers: Sequence[Answer], settings: Settings, randomness: Randomness, progress: Callable[[int], None]
    ) -> None:
        """Write all answers to their ends; ``progress`` hears how many tokens each step drew."""
        while unfinished := [answer for answer in answers if not answer.is_over]:
            steps = [answer.shown[len(answer.writer.tokens)] for answer in unfinished]
            prompts = [
                (shown, [*self._ids(answer.asked), *answer.writer.tokens])
                for answer, step in zip(unfinished, steps, strict=True)
                for shown in ("", *step)
            ]
            rows = iter(self.rows(prompts))
            for answer, step in zip(unfinished, steps, strict=True):
                zero_shot = next(rows)
                one_shot = np.array([next(rows) for _ in step], np.float32).reshape(len(step), len(zero_shot))
                done = answer.writer.tokens
                answer.writer.add(choose(self.model, settings, done, zero_shot, one_shot, answer.terms, randomness))
            progress(len(unfinished))
        for answer in answers:
            answer.writer.finish()

    def rows(self, prompts: Sequence[tuple[str, list[int]]]) -> list[Logits]:
        """Next-token scores after each (demonstration, tokens); "" is no demonstration."""
        found: list[Any] = [None] * len(prompts)
        with self._network.working():
            self._read_demonstrations([shown for shown, _ in prompts if shown])
            by_length = sorted(range(len(prompts)), key=lambda i: (len(self._ids(prompts[i][0])), len(prompts[i][1])))
            for start in range(0, len(by_length), _BATCH):
                batch = by_length[start : start + _BATCH]
                states = [self._states[prompts[i][0]] if prompts[i][0] else None for i in batch]
                tokens = [prompts[i][1] if prompts[i][0] else [*self._network.first, *prompts[i][1]] for i in batch]
                vectors, _ = self.read(tokens, states)
                for i, row in zip(batch, self._network.scores(list(vectors)), strict=True):
                    found[i] = row
        return found

    def _ids(self, text: str) -> list[int]:
        if text not in self._tokens:
            self._tokens[text] = self._network.tokens(text)
        return self._tokens[text]

    def _read_demonstrations(self, texts: Sequence[str]) -> None:
        missing = sorted({text for text in texts if text not in self._states}, key=lambda text: len(self._ids(text)))
        for start in range(0, len(missing), _BATCH):
            batch = missing[start : start + _BATCH]
            tokens = [[*self._network.first, *self._ids(text)] for text in batch]
            _, cache = self.read(tokens, [None] * len(batch))
            for i, text in enumerate(batch):
                length = len(tokens[i])
                self._states[text] = [
                    (layer.keys[i, :, :length].clone(), layer.values[i, :, :length].clone()) for layer in cache.layers
                ]

    def read(self, tokens: Sequence[list[int]], states: Sequence[State | None]) -> tuple[Any, Any]:
        """The vector after each row's last token, and the cache. Earlier states stand on the left, padded there."""
        import torch
        from transformers.cache_utils import DynamicCache

        model = self._network.model
        before = [0 if state is None else state[0][0].shape[1] for state in states]
        past, width = max(before), max(map(len, tokens))
        ids = torch.zeros((len(tokens), width), dtype=torch.long)
        mask = torch.full((len(tokens), 1, width, past + width), torch.finfo(model.dtype).min, dtype=model.dtype)
        seen = torch.ones((width, width), dtype=torch.bool).tril()
        for i, (row, known) in enumerate(zip(tokens, before, strict=True)):
            ids[i, : len(row)] = torch.tensor(row)
            mask[i, 0, :, past - known : past] = 0
            mask[i, 0, :, past:][seen] = 0
        places = torch.tensor(before)[:, None] + torch.arange(width)
        cache = DynamicCache(config=model.config)
        known_states = [state for state in states if state is not None]
        for layer in range(len(known_states[0]) if known_states else 0):
            cache.update(*(_padded([s and s[layer][part] for s in states], past) for part in (0, 1)), layer)
        out = self._network._body(
            input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True
        )
        vectors = [out.last_hidden_state[i, len(row) - 1] for i, row in enumerate(tokens)]
        return vectors, cache


def _padded(parts: Sequence[Any], length: int) -> Any:
    """One layer's keys (or values) of several rows, zeros on the left; None is a row of zeros."""
    like = next(part for part in parts if part is not None)
    whole = like.new_zeros((len(parts), like.shape[0], length, like.shape[2]))
    for row, part in zip(whole, parts, strict=True):
        if part is not None:
            row[:, length - part.shape[1] :] = part
    return whole
