"""One answer: the draw of its owners, its tokens on the private side, and the public text that they make.

For every token each owner flips a fresh coin of the plan's rate and, if in, shows one exemplar, chosen by its own
randomness. The coins do not look at the text, so those of all tokens are flipped before the first token, and the model
can read the demonstrations together. No coin, choice or text depends on another owner's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
from scipy.special import bdtrc

from langchain_dpicl.decoding.mixing import IntArray, Settings, choose, clipped_terms
from langchain_dpicl.decoding.model import Demonstration, LogitsModel
from langchain_dpicl.decoding.rows import Rows
from langchain_dpicl.privacy.noise import Randomness
from langchain_dpicl.store.base import PrivateStore, StoreView

OVERFLOW = 2.0**-40
"""How often a token may have more owners than slots."""


class Keys:
    """Names one store's exemplars for a model's cache, and drops there what the store forgets.

    The keys hold this object itself, so no other store or sampler has equal ones.
    """

    def __init__(self, store: PrivateStore, model: LogitsModel) -> None:
        self._model = model
        self._forgotten = set[Hashable]()
        store.on_forget(self._forget)

    def key(self, exemplar: Hashable) -> Hashable:
        """The key of an exemplar's id."""
        return (self, exemplar)

    def _forget(self, ids: Sequence[int]) -> None:
        gone = [self.key(i) for i in ids]
        self._forgotten.update(gone)
        self._model.forget(gone)

    def release(self, demonstrations: Iterable[Demonstration]) -> None:
        """An answer has ended: drop what the store forgot while the answer held it."""
        if gone := [each.key for each in demonstrations if each.key in self._forgotten]:
            self._model.forget(gone)


@dataclass(frozen=True)
class Draw:
    """One answer's demonstrations, and for every token the positions of those that take part in it. Private."""

    demonstrations: Sequence[Demonstration] = field(default=(), repr=False)
    steps: Sequence[Sequence[int]] = field(default=(), repr=False)


def draw_steps(
    store: PrivateStore,
    rate: float,
    steps: int,
    randomness: Randomness,
    *,
    key: Callable[[Hashable], Hashable],
    render: Callable[[dict[str, Any]], str | None],
) -> Draw:
    """Draw a fresh Poisson sample of owners for each of so many tokens, with one exemplar for each owner.

    ``render`` makes an exemplar's text, or None if it cannot be used. It then has no part in any token, which its
    owner's own data decide.
    """
    with store.reading() as view:
        rows = [_one_row_each(view, rate, randomness) for _ in range(steps)]
        distinct = np.unique(np.concatenate(rows))
        exemplars, ids = view.read(distinct), view.ids_of(distinct)
    place: dict[int, int] = {}
    demonstrations = list[Demonstration]()
    for row, exemplar, i in zip(distinct.tolist(), exemplars, ids, strict=True):
        if (text := render(exemplar)) is not None:
            place[row] = len(demonstrations)
            demonstrations.append(Demonstration(key(i), text))
    return Draw(demonstrations, [[place[row] for row in step.tolist() if row in place] for step in rows])


def _one_row_each(view: StoreView, rate: float, randomness: Randomness) -> IntArray:
    """One exemplar's row for each owner of a fresh sample."""
    owners = view.numbers[randomness.coin_positions(len(view.numbers), rate)]
    rows, owner = view.rows_of(owners)
    order = np.lexsort((randomness.uniforms(len(rows)), owner))
    return rows[order][np.flatnonzero(np.diff(owner[order], prepend=-1))]


@lru_cache(maxsize=64)
def slots_for(shots: float, rate: float, owners: int | None = None) -> int:
    """The least number of slots that a token's sample exceeds with probability below 2^-40.

    The sample is binomial, of ``owners`` owners (the number from which the rate was chosen when the plan was frozen) or
    of ``shots / rate``. Both are public; what the store holds by now is not.

    A token whose sample is larger takes a further call of the model. The answer's law is the same, but an observer who
    counts calls learns something: a release that also shows their number is (eps, delta')-DP with
    delta' = delta + (1 + e^eps) * P(some token takes a further call), as it differs only there from a release that
    always shows one call for each token. P is at most the number of tokens times 2^-40.
    """
    owners = max(1, round(shots / rate)) if owners is None else owners
    slots = min(owners, max(1, int(rate * owners)))
    while slots < owners and bdtrc(slots, owners, min(1.0, rate)) >= OVERFLOW:
        slots += 1
    return slots


class PrivateAnswer:
    """The model's rows, the demonstrations, and who takes part in which token. Private: ``repr`` shows nothing.

    Each token is one mechanism "tokens" of range ``bound`` (see `mixing`) on that token's own sample. With ``slots``
    every call has that many rows, filled up with the public ``padding``. A token takes one call, and a further one for
    every ``slots`` owners that its sample has above that (see `slots_for`). A row that the model cannot answer adds
    nothing and moves no other (see `rows`). Only the zero-shot row may fail the answer.
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
        self.drawn = Draw()
        self._model, self._settings, self._bound, self._randomness = model, settings, bound, randomness
        self._slots, self._padding = slots, padding
        self._rows: Rows | None = None
        self._passed = 0

    def open(self, shared: str, sample: Callable[[], Draw], passed: int = 0) -> None:
        """Flip the coins of all tokens after the first ``passed``, and open the model's session."""
        drawn = self.drawn = sample()
        self._passed = passed
        shown = [*drawn.demonstrations, self._padding] if self._slots else list(drawn.demonstrations)
        self._rows = Rows(self._model, shared, shown, passed + len(drawn.steps))

    def token(self, released: Sequence[int]) -> int:
        """Draw the token after the released ones."""
        settings, read = self._settings, self._rows
        assert read is not None
        sample = self.drawn.steps[len(released) - self._passed]
        width = self._slots or len(sample)
        calls = max(1, -(-len(sample) // max(1, width)))
        filled = [*sample, *[len(self.drawn.demonstrations)] * (calls * width - len(sample))]
        found = [read.logits(filled[i * width : (i + 1) * width], released) for i in range(calls)]
        one_shot = np.concatenate([logits[1:] for logits in found])[: len(sample)]
        terms = partial(clipped_terms, bound=self._bound, temperature=settings.temperature, cap=settings.cap)
        return choose(self._model, settings, released, found[0][0], one_shot, terms, self._randomness)

    def close(self) -> None:
        """Drop the rows."""
        read, self._rows = self._rows, None
        if read is not None:
            read.close()

    def __repr__(self) -> str:
        return "<private answer>"


class Writer:
    """Makes text of released tokens: gives out what later tokens cannot change, and ends at a stop sequence.

    Post-processing of public tokens. A character of several tokens is given out when it is whole, and what may begin a
    stop sequence when it turned out not to. The text ends before the first stop sequence.
    """

    def __init__(self, model: LogitsModel, stop: Sequence[str]) -> None:
        self.tokens: list[int] = []
        self.ended = False
        self.text = ""
        self.rest = ""
        """The end of the text, from `finish`."""
        self._model, self._stop = model, stop

    def add(self, token: int) -> str:
        """Take a token; return the text that it made certain."""
        self.tokens.append(token)
        certain = self._model.text(self.tokens)
        self.ended = token in self._model.end_tokens or any(stop in certain for stop in self._stop)
        if self.ended:
            return ""
        certain = certain.rstrip("\N{REPLACEMENT CHARACTER}")
        begun = (n for stop in self._stop for n in range(1, len(stop)) if certain.endswith(stop[:n]))
        return self._give(certain[: len(certain) - max(begun, default=0)])

    def finish(self) -> str:
        """Return the rest of the text."""
        whole = self._model.text(self.tokens)
        found = [whole.index(stop) for stop in self._stop if stop in whole]
        self.rest = self._give(whole[: min(found, default=len(whole))])
        return self.rest

    def _give(self, certain: str) -> str:
        piece = certain[len(self.text) :]
        self.text += piece
        return piece
