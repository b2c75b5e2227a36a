"""One answer: the draw of its owners, its tokens on the private side, and the public text that they make.

For every token each owner flips a fresh coin of the plan's rate and, if in, shows one exemplar: the nearest to the
query, if the selector looks for near ones, else one chosen by its own randomness. With a gate, a filter or tickets only
owners whom these let through flip coins; who they are follows from each owner's own data, the query and the tickets it
has left. The coins ignore the text, so those of all tokens are flipped before the first token, and the model can read
the demonstrations together. No coin, choice or text depends on another owner's.

One token from many rows of logits: clip every owner's term to a range, sum exactly, draw exactly. With l0 the zero-shot
logits over the candidates (both public) and l_i an owner's one-shot logits, the token y has probability exactly
proportional to exp(base(y) + sum_i term_i(y)), where base = kappa * l0 / temperature and term_i is
lambda_i * (l_i - l0) / temperature with the largest lambda_i <= cap for which max term_i - min term_i <= B.

Why it is private. Let P and P' be the laws of the token without and with one owner's term t. Then log(P'/P) = t minus
a constant, so over all tokens it lies in an interval of length B: the pair is B-bounded-range in both directions,
for any other terms. Averaging both laws over the others' coins, and P' over the owner's choice of an exemplar, keeps
every privacy profile (it is jointly convex). So one token is one mechanism "tokens"; neighbours differ by an owner
ADDED or REMOVED.

The sum of the terms must not depend on their order or on rounding, as floating-point sums do. So a term is a vector of
whole steps, shifted to begin at 0 (a constant changes nothing), and at most floor(B / step) of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from langchain_dpicl.calls.flow import Chunk, Flow
from langchain_dpicl.decoding.exemplars import NOBODY, Draw, IntArray
from langchain_dpicl.decoding.model import Demonstration, Logits, LogitsModel, Rows, attempt
from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.noise import Randomness, choose_exponential
from langchain_dpicl.private import boundary

STEP = 2.0**-20
"""The lattice of all scores, in nats. A power of two: dividing by it is exact."""

_LOWEST = 2.0**40
"""A public score this many steps below the best (a million nats) is as good as any further below."""

# -- one token ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The public numbers of a sampler. Their ``repr`` is part of an answer's identity in the ledger."""

    max_tokens: int
    min_tokens: int
    top_k: int
    shots: float
    temperature: float
    cap: float
    stop: tuple[str, ...]


def candidates(zero_shot: Logits, top_k: int, barred: Collection[int] = ()) -> IntArray:
    """The ``top_k`` tokens of largest zero-shot logit, in ascending order; of equal ones those of the lowest ids.

    ``barred`` tokens, and those whose logit is no finite number, are left out; the result may be empty. Public: it
    reads public values only.
    """
    scores = zero_shot.astype(np.float64)
    scores[list(barred)] = -np.inf
    scores[~np.isfinite(scores)] = -np.inf
    count = min(top_k, int(np.isfinite(scores).sum()))
    if not count:
        return np.empty(0, np.int64)
    least = np.partition(scores, -count)[-count]
    above = np.flatnonzero(scores > least)
    equal = np.flatnonzero(scores == least)[: count - len(above)]
    return np.asarray(np.union1d(above, equal), np.int64)


def possible(
    model: LogitsModel,
    settings: Settings,
    released: Sequence[int],
    zero_shot: Logits,
) -> IntArray:
    """The candidates of the next token: before ``min_tokens`` none that ends the answer.

    Public: it reads the zero-shot logits, the released tokens and the settings alone.
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


def base_scores(zero_shot: FloatArray, shots: float, temperature: float) -> IntArray:
    """``shots * zero_shot / temperature`` over the candidates, in whole steps below the largest. Public."""
    below = (zero_shot - zero_shot.max()) * (shots / temperature) / STEP
    return np.asarray(np.rint(np.maximum(below, -_LOWEST)), np.int64)


def mixing_weights(difference: FloatArray, bound: float, cap: float) -> FloatArray:
    """lambda for each row: the largest number <= ``cap`` at which the row's range is at most ``bound``.

    0 for a row whose range is not finite (an infinity or NaN in it, or all NaN, as a row that failed): nothing of it
    can be used.
    """
    with np.errstate(all="ignore"):
        reach = difference.max(axis=1) - difference.min(axis=1)
        return np.asarray(np.where(np.isfinite(reach), np.minimum(cap, bound / reach), 0.0), np.float64)


def clipped_terms(
    one_shot: FloatArray,
    zero_shot: FloatArray,
    *,
    bound: float,
    temperature: float,
    cap: float,
) -> IntArray:
    """One term a row, in whole steps: least entry 0, largest at most floor(bound / STEP), for any input at all.

    Each row depends on its own one-shot logits and on the public zero-shot ones, on nothing else.
    """
    with np.errstate(all="ignore"):
        difference = (one_shot - zero_shot) / temperature
        weight = mixing_weights(difference, bound, cap)[:, None]
        steps = np.floor(weight * (difference - difference.min(axis=1, keepdims=True)) / STEP)
    # Rounding could reach one step above the bound; an unusable row is NaN here, and 0 in all its entries.
    whole = np.nan_to_num(np.where(weight > 0.0, steps, 0.0), nan=0.0)
    return np.asarray(np.clip(whole, 0.0, math.floor(bound / STEP)), np.int64)


def choose(
    model: LogitsModel,
    settings: Settings,
    released: Sequence[int],
    zero_shot: Logits,
    one_shot: Logits,
    terms: Callable[[FloatArray, FloatArray], IntArray],
    randomness: Randomness,
) -> int:
    """Draw the next token from the public scores and the sum of the ``terms`` of one row for each owner.

    ``terms``: from (one-shot rows, zero-shot row), over the candidates, to what each row adds to their scores.
    """
    chosen = possible(model, settings, released, zero_shot)
    public = zero_shot[chosen].astype(np.float64)
    scores = base_scores(public, settings.shots, settings.temperature)
    if len(one_shot):
        scores = scores + terms(one_shot[:, chosen].astype(np.float64), public).sum(axis=0)
    return int(chosen[draw(scores, randomness)])


def draw(scores: IntArray, randomness: Randomness) -> int:
    """An index with probability exactly proportional to exp(STEP * scores)."""
    losses = (scores.max() - scores).tolist()
    return choose_exponential([1] * len(losses), losses, STEP, randomness)


# -- the whole answer --------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class PrivateAnswer:
    """The model's rows, the demonstrations, and who takes part in which token. Private.

    Each token is one mechanism "tokens" of range ``bound`` (see the top) on that token's own sample. With ``slots``
    every call has that many rows, filled up with the public ``padding``. A token takes one call, and a further one for
    every ``slots`` owners that its sample has above that (see `slots_for`).
    """

    model: LogitsModel
    settings: Settings
    bound: float
    randomness: Randomness
    slots: int | None
    padding: Demonstration
    drawn: Draw = NOBODY
    _rows: Rows | None = None

    def written(self, shared: str, units: int, draw: Callable[[str, int], Draw]) -> Flow[Writer]:
        """Draw up to ``units`` tokens; hand out the text as it becomes certain.

        ``draw`` flips the coins for a shared text and a number of tokens.
        """
        writer = Writer(self.model, self.settings.stop)
        try:
            yield partial(self.open, shared, partial(draw, shared, units))
            while not writer.ended and len(writer.tokens) < units:
                if piece := writer.add((yield partial(self.token, writer.tokens))):
                    yield Chunk(piece)
        finally:
            attempt(boundary.in_private, self.close)
        writer.finish()
        return writer

    def open(self, shared: str, sample: Callable[[], Draw]) -> None:
        """Flip the coins of all tokens, and open the model's session."""
        self.drawn = sample()
        shown = [*self.drawn.demonstrations, *([self.padding] if self.slots else [])]
        self._rows = Rows(self.model, shared, shown, len(self.drawn.steps))

    def token(self, released: Sequence[int]) -> int:
        """Draw the token after the released ones."""
        assert self._rows is not None
        sample = self.drawn.steps[len(released)]
        width = self.slots or len(sample)
        calls = max(1, -(-len(sample) // max(1, width)))
        filled = [*sample, *[len(self.drawn.demonstrations)] * (calls * width - len(sample))]
        found = [self._rows.logits(filled[i * width : (i + 1) * width], released) for i in range(calls)]
        one_shot = np.concatenate([logits[1:] for logits in found])[: len(sample)]
        settings = self.settings
        terms = partial(
            clipped_terms,
            bound=self.bound,
            temperature=settings.temperature,
            cap=settings.cap,
        )
        return choose(self.model, settings, released, found[0][0], one_shot, terms, self.randomness)

    def close(self) -> None:
        """Drop the rows."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None


class Writer:
    """Makes text of released tokens: gives out what later tokens cannot change, and ends at a stop sequence.

    Post-processing of public tokens. A character of several tokens is given out when it is whole, and what may begin a
    stop sequence when it turned out not to. The text ends before the first stop sequence.
    """

    def __init__(self, model: LogitsModel, stop: Sequence[str]) -> None:
        self.tokens: list[int] = []
        self.ended = False
        self.text = self.rest = ""
        """The text that was given out; its end, from `finish`."""
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
