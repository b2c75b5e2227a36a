"""One answer in the making: its private side, which hands out tokens, and the public text that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from langchain_dpicl.decoding.draws import Draw
from langchain_dpicl.decoding.mixing import FloatArray, IntArray, base_scores, candidates, clipped_terms, draw
from langchain_dpicl.decoding.model import Demonstration, Logits, LogitsModel
from langchain_dpicl.decoding.rows import Rows
from langchain_dpicl.privacy.noise import Randomness

Terms = Callable[[FloatArray, FloatArray], IntArray]
"""(one-shot rows, zero-shot row), over the candidates -> what each row adds to their scores."""


@dataclass(frozen=True)
class Settings:
    """The public numbers of a sampler: each is part of what makes two answers the same answer."""

    max_tokens: int
    min_tokens: int
    top_k: int
    shots: float
    temperature: float
    cap: float
    stop: tuple[str, ...]


def choose(
    model: LogitsModel,
    settings: Settings,
    released: Sequence[int],
    zero_shot: Logits,
    one_shot: Logits,
    terms: Terms,
    randomness: Randomness,
) -> int:
    """Draw the next token from the public scores and the sum of the ``terms`` of one row for each owner."""
    chosen = possible(model, settings, released, zero_shot)
    public = zero_shot[chosen].astype(np.float64)
    scores = base_scores(public, settings.shots, settings.temperature)
    if len(one_shot):
        scores = scores + terms(one_shot[:, chosen].astype(np.float64), public).sum(axis=0)
    return int(chosen[draw(scores, randomness)])


def possible(model: LogitsModel, settings: Settings, released: Sequence[int], zero_shot: Logits) -> IntArray:
    """The candidates of the next token: before the shortest length none that ends the answer.

    Reads what is public alone: the zero-shot logits, the released tokens and the settings.
    """
    may_end = len(released) >= settings.min_tokens
    barred = set[int]() if may_end else set(model.end_tokens)
    while True:
        chosen = candidates(zero_shot, settings.top_k, barred)
        if may_end or not settings.stop:
            return chosen
        texts = {int(token): model.text([*released, int(token)]) for token in chosen}
        ending = [token for token, text in texts.items() if any(stop in text for stop in settings.stop)]
        if not ending:
            return chosen
        barred.update(ending)


class PrivateAnswer:
    """The model's rows, the demonstrations, and who takes part in which token. Private: ``repr`` shows nothing.

    Each token is one mechanism "tokens" of range ``bound`` (see `mixing`) on that token's own sample. With ``slots``
    every call for a token has that many rows, filled up with the public ``padding``, and a token one call: a further
    one for every ``slots`` owners that its sample has above that (see `draws.slots_for`). A row that the model cannot
    answer adds nothing and moves no other (see `rows`); the zero-shot row alone may fail the answer.
    """

    def __init__(
        self,
        model: LogitsModel,
        settings: Settings,
        *,
        bound: float,
        randomness: Randomness,
        slots: int | None,
        padding: Demonstration,
    ) -> None:
        self.demonstrations: Sequence[Demonstration] = ()
        self._model = model
        self._settings = settings
        self._bound = bound
        self._randomness = randomness
        self._slots = slots
        self._padding = padding
        self._steps: Sequence[Sequence[int]] = ()
        self._rows: Rows | None = None

    def open(self, shared: str, sample: Callable[[], Draw]) -> None:
        """Flip the coins of all tokens, and let the model read the demonstrations."""
        drawn = sample()
        self.demonstrations = drawn.demonstrations
        self._steps = drawn.steps
        shown = [*drawn.demonstrations, self._padding] if self._slots else list(drawn.demonstrations)
        self._rows = Rows(self._model, shared, shown, len(drawn.steps))

    def token(self, released: Sequence[int]) -> int:
        """Draw the next token."""
        settings, read = self._settings, self._rows
        assert read is not None
        rows = self._steps[len(released)]
        calls = [read.logits(batch, released) for batch in self._batches(rows)]
        one_shot = np.concatenate([logits[1:] for logits in calls])[: len(rows)]
        terms = partial(clipped_terms, bound=self._bound, temperature=settings.temperature, cap=settings.cap)
        return choose(self._model, settings, released, calls[0][0], one_shot, terms, self._randomness)

    def _batches(self, rows: Sequence[int]) -> list[list[int]]:
        """The rows of each call: all in one, or in calls of ``slots`` rows each."""
        if self._slots is None:
            return [list(rows)]
        count = max(1, -(-len(rows) // self._slots))
        filled = [*rows, *[len(self.demonstrations)] * (count * self._slots - len(rows))]
        return [filled[start : start + self._slots] for start in range(0, len(filled), self._slots)]

    def close(self) -> None:
        """Drop the rows."""
        read, self._rows = self._rows, None
        if read is not None:
            read.close()

    def __repr__(self) -> str:
        return "<private answer>"


class Writer:
    """Text out of released tokens: gives out what later tokens cannot change, and ends at a stop sequence.

    Post-processing of public tokens. A character of several tokens is given out when it is whole, and what may be the
    beginning of a stop sequence when it turned out to be none. The text ends before the first stop sequence.
    """

    def __init__(self, model: LogitsModel, stop: Sequence[str]) -> None:
        self.tokens: list[int] = []
        self.ended = False
        self.text = ""
        self._model = model
        self._stop = stop

    def add(self, token: int) -> str:
        """Take a token; the text that is certain now and was not before."""
        self.tokens.append(token)
        whole = self._whole()
        found = [whole.index(stop) for stop in self._stop if stop in whole]
        if found or token in self._model.end_tokens:
            self.ended = True
            return ""
        return self._give(whole.rstrip("\N{REPLACEMENT CHARACTER}"), hold=True)

    def finish(self) -> str:
        """The rest of the text."""
        whole = self._whole()
        found = [whole.index(stop) for stop in self._stop if stop in whole]
        return self._give(whole[: min(found, default=len(whole))], hold=False)

    def _whole(self) -> str:
        return self._model.text(self.tokens)

    def _give(self, certain: str, *, hold: bool) -> str:
        if hold:
            certain = certain[: len(certain) - self._held(certain)]
        piece = certain[len(self.text) :]
        self.text += piece
        return piece

    def _held(self, text: str) -> int:
        """How many characters at the end may begin a stop sequence."""
        lengths = (n for stop in self._stop for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n]))
        return max(lengths, default=0)
