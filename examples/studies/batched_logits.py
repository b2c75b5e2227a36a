"""A model whose rows are read together and kept: for studies alone.

A row's last digits depend here on the rows beside it, which a release must not allow (`LogitsSession.logits`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.model import Demonstration, Logits
from langchain_dpicl.lab.evaluation.batches import Batches, State

_KEPT = 2000  # demonstrations; each takes about 1.5 MB with SmolLM2-135M


class BatchedLogits:
    """A `LogitsModel` for `DPSampler` that keeps its states of demonstrations, also of each with the shared text."""

    def __init__(self, model: TransformersLogits) -> None:
        self.name, self.vocabulary, self.end_tokens = model.name, model.vocabulary, model.end_tokens
        self.fits, self.text = model.fits, model.text
        self._batches, self._shared = Batches(model), ""
        self._shown: dict[str, State] = {}
        self._asked: dict[str, State] = {}

    def session(self, shared: str, demonstrations: Sequence[Demonstration], *, steps: int) -> Answer:
        """Open an answer."""
        return Answer(self, shared, [each.text for each in demonstrations])

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Do nothing: a study's records stay."""

    def greedy(self, prompts: Sequence[tuple[str, str]], tokens: int, stop: str) -> list[str]:
        """The likeliest answers to (demonstration, shared text), each up to a token with a character of ``stop``."""
        network, live = self._batches.network, list(range(len(prompts)))
        pieces = [[*network.first, *network.tokens(shown), *network.tokens(shared)] for shown, shared in prompts]
        states, found = self._batches.states([piece[:-1] for piece in pieces], None), [piece[-1:] for piece in pieces]
        for _ in range(tokens):
            grown = self._batches.grown([found[i][-1:] for i in live], [states[i] for i in live])
            for i, (scores, states[i]) in zip(live, grown, strict=True):
                found[i].append(int(scores.argmax()))
            ended = {i for i in live if found[i][-1] in self.end_tokens or set(self.text(found[i][-1:])) & set(stop)}
            for i in ended:
                found[i].pop()
            live = [i for i in live if i not in ended]
            if not live:
                break
        return [self.text(each[1:]).strip() for each in found]

    def asked(self, texts: Sequence[str], shared: Sequence[int]) -> dict[str, State]:
        """The state after each of these texts, "" for none, and all of the shared tokens but the last."""
        network, before = self._batches.network, list(shared[:-1])
        if (mark := repr(before)) != self._shared:
            self._shared, self._asked = mark, {}
        if len(self._shown) > _KEPT:
            self._shown.clear()
        fresh = [text for text in dict.fromkeys(texts) if text not in self._asked]
        if "" in fresh:
            (self._asked[""],) = self._batches.states([[*network.first, *before]], None)
        fresh = [text for text in fresh if text]
        unread = [text for text in fresh if text not in self._shown]
        states = self._batches.states([[*network.first, *network.tokens(text)] for text in unread], None)
        self._shown.update(zip(unread, states, strict=True))
        grown = self._batches.grown([before] * len(fresh), [self._shown[text] for text in fresh])
        self._asked.update(zip(fresh, (state for _, state in grown), strict=True))
        return self._asked


class Answer:
    """One answer, or one for each text: what was read of a row is not read again."""

    def __init__(self, model: BatchedLogits, shared: str, texts: Sequence[str]) -> None:
        self._model, self._texts = model, texts
        self._shared = model._batches.network.tokens(shared)
        self._known: dict[str, tuple[int, State]] = {}

    def logits(self, rows: Sequence[int], released: Sequence[int]) -> Logits:
        """See `LogitsSession.logits`."""
        texts = ["", *(self._texts[row] for row in rows)]
        return self.after(texts, [released] * len(texts))

    def after(self, texts: Sequence[str], released: Sequence[Sequence[int]]) -> Logits:
        """The scores of the next token after each text, the shared one, and an answer of its own."""
        base, rest, states = self._model.asked(texts, self._shared), [], []
        for text, answer in zip(texts, released, strict=True):
            read, state = self._known.get(text, (0, base[text]))
            whole = [self._shared[-1], *map(int, answer)]
            if read >= len(whole):  # asked again
                read, state = 0, base[text]
            rest.append(whole[read:])
            states.append(state)
        found = self._model._batches.grown(rest, states)
        for text, answer, (_, state) in zip(texts, released, found, strict=True):
            self._known[text] = len(answer) + 1, state
        return np.array([row for row, _ in found])

    def close(self) -> None:
        """Drop the states."""
        self._known.clear()
