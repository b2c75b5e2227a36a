"""One answer: the draw of its owners, its tokens on the private side, and the public text that they make.

For every token each owner flips a fresh coin of the plan's rate and, if in, shows one exemplar, chosen by its own
randomness. The coins ignore the text, so those of all tokens are flipped before the first token, and the model can read
the demonstrations together. No coin, choice or text depends on another owner's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from scipy.special import bdtrc

from langchain_dpicl.calls.flow import Chunk, Flow
from langchain_dpicl.decoding.demonstrations import DemonstrationTemplate
from langchain_dpicl.decoding.journal import Journal
from langchain_dpicl.decoding.mixing import IntArray, Settings, choose, clipped_terms
from langchain_dpicl.decoding.model import Demonstration, Logits, LogitsModel, LogitsSession, attempt
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.noise import Randomness
from langchain_dpicl.private import boundary
from langchain_dpicl.store.base import PrivateStore, StoreView


@dataclass(frozen=True, repr=False)
class Draw:
    """One answer's demonstrations, and for every token the positions of those that take part in it. Private."""

    demonstrations: Sequence[Demonstration] = ()
    steps: Sequence[Sequence[int]] = ()


class Exemplars:
    """One store's exemplars as a model's demonstrations, named for its cache, which drops what the store forgets.

    The keys hold this object itself, so no other store or sampler has equal ones.
    """

    def __init__(self, store: PrivateStore, model: LogitsModel, template: DemonstrationTemplate, tokens: int) -> None:
        self._store, self._model, self._template, self._tokens = store, model, template, tokens
        self._forgotten = set[Hashable]()
        self.padding = Demonstration((self, "padding"), template.padding)
        store.on_forget(self._forget)

    def _forget(self, ids: Sequence[int]) -> None:
        gone = [(self, i) for i in ids]
        self._forgotten.update(gone)
        self._model.forget(gone)

    def release(self, demonstrations: Iterable[Demonstration]) -> None:
        """An answer has ended: drop what the store forgot while the answer held it."""
        if gone := [each.key for each in demonstrations if each.key in self._forgotten]:
            self._model.forget(gone)

    def asked(self, input: object) -> tuple[Mapping[str, Any], str]:
        """A request's values and its shared text, checked: it has what the template names, and fits the context."""
        values = {self._store.input_key: input} if isinstance(input, str) else input
        if not isinstance(values, Mapping):
            raise InvalidParameter("input", type(input).__name__, "a string, or a mapping of names to values")
        shared = self._template.ask(values)
        if not self._model.fits(self._template.padding, shared, self._tokens):
            bound = f"a query that leaves room for {self._tokens} tokens and a demonstration"
            raise InvalidParameter("input", f"{len(shared)} characters", bound)
        return values, shared

    def draw(self, randomness: Randomness, rate: float | None, shared: str, steps: int) -> Draw:
        """Draw a fresh Poisson sample of owners for each of so many tokens, with one exemplar for each owner.

        An exemplar that the template cannot render, or that does not fit the context, has no part in any token, which
        its owner's own data decide. Without a rate no owner takes part. Private.
        """

        def shown(exemplar: dict[str, Any]) -> str | None:
            text = self._template.show(exemplar)
            return text if self._model.fits(text, shared, self._tokens) else None

        if rate is None:
            return Draw((), [()] * steps)
        with self._store.reading() as view:
            rows = [_one_row_each(view, rate, randomness) for _ in range(steps)]
            distinct = np.unique(np.concatenate(rows))
            exemplars, ids = view.read(distinct), view.ids_of(distinct)
        place: dict[int, int] = {}
        demonstrations = list[Demonstration]()
        for row, exemplar, i in zip(distinct.tolist(), exemplars, ids, strict=True):
            if (text := attempt(shown, exemplar)) is not None:  # an error of one owner must not fail the others' answer
                place[row] = len(demonstrations)
                demonstrations.append(Demonstration((self, i), text))
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

    The sample is binomial, of ``owners`` owners (from whose number the rate was chosen when the plan was frozen) or of
    ``shots / rate``. Both are public; what the store holds by now is not.

    A token with a larger sample takes a further call of the model. The answer's law is the same, but a release that
    also shows the number of calls is (eps, delta')-DP with delta' = delta + (1 + e^eps) * P(some token takes a further
    call), as only then it differs from a release that always shows one call a token. P is at most 2^-40 times the
    number of tokens.
    """
    owners = max(1, round(shots / rate)) if owners is None else owners
    slots = min(owners, max(1, int(rate * owners)))
    while slots < owners and bdtrc(slots, owners, min(1.0, rate)) >= 2.0**-40:
        slots += 1
    return slots


def read_rows(model: LogitsModel, session: LogitsSession, rows: Sequence[int], released: Sequence[int]) -> Logits:
    """A session's logits. Raises ValueError if they have another shape than the model must give."""
    found: Any = np.asarray(session.logits(list(rows), list(released)))
    if found.shape != (1 + len(rows), model.vocabulary):
        raise ValueError("the model's logits have another shape")
    logits: Logits = found if found.dtype.kind == "f" else found.astype(np.float64)
    return logits


class Rows:
    """A model's session whose rows do not fail one another, whatever the model does. Private: ``repr`` shows nothing.

    A row that the model cannot answer is all NaN, and `clipped_terms` makes it a term of zeros: its owner adds nothing
    to this token, as if its coin had said no. Nothing else moves. If a failed row failed the answer, or emptied the
    rows beside it, one owner would decide what all the others add.

    All rows are asked for in one call. If it raises, or its answer has another shape, each row is asked for by itself;
    if that fails too, or no session opens on all demonstrations, in a session of its own. The rows have the same bits
    every way. A session that keeps the contract of `LogitsSession.logits` never needs it: the further calls show in
    time.
    """

    def __init__(self, model: LogitsModel, shared: str, demonstrations: Sequence[Demonstration], steps: int) -> None:
        self._demonstrations = demonstrations
        self._open, self._read = partial(model.session, shared, steps=steps), partial(read_rows, model)
        self._whole = attempt(self._open, demonstrations)
        self._apart: dict[int | None, LogitsSession] = {}  # a session for each row, and None's for the zero-shot one

    def logits(self, rows: Sequence[int], released: Sequence[int]) -> Logits:
        """See `LogitsSession.logits`. Raises if the zero-shot row fails, and only then."""
        found = None if self._whole is None else attempt(self._read, self._whole, rows, released)
        if found is not None:
            return found
        zero_shot = self._alone(None, released)
        nothing = np.full_like(zero_shot, np.nan, np.float32)
        some = [attempt(self._alone, row, released) for row in rows]
        stacked: Logits = np.stack([zero_shot, *(nothing if row is None else row for row in some)])
        return stacked

    def _alone(self, row: int | None, released: Sequence[int]) -> Any:
        """One row, asked for by itself; None is the zero-shot one."""
        found = None
        if self._whole is not None:
            found = attempt(self._read, self._whole, [] if row is None else [row], released)
        if found is None:
            if row not in self._apart:
                self._apart[row] = self._open([] if row is None else [self._demonstrations[row]])
            found = self._read(self._apart[row], [] if row is None else [0], released)
        return found[-1]

    def close(self) -> None:
        """Drop every session, each whatever becomes of the others."""
        for session in (self._whole, *self._apart.values()):
            if session is not None:
                attempt(session.close)
        self._whole, self._demonstrations = None, ()
        self._apart.clear()


@dataclass(eq=False, repr=False)
class PrivateAnswer:
    """The model's rows, the demonstrations, and who takes part in which token. Private.

    Each token is one mechanism "tokens" of range ``bound`` (see `mixing`) on that token's own sample. With ``slots``
    every call has that many rows, filled up with the public ``padding``. A token takes one call, and a further one for
    every ``slots`` owners that its sample has above that (see `slots_for`).
    """

    model: LogitsModel
    settings: Settings
    bound: float
    randomness: Randomness
    slots: int | None
    padding: Demonstration
    drawn: Draw = Draw()
    _rows: Rows | None = None

    def written(
        self, shared: str, units: int, draw: Callable[[str, int], Draw], journal: Journal | None = None
    ) -> Flow[Writer]:
        """Draw up to ``units`` tokens, those in the journal included; hand out the text as it becomes certain.

        ``draw`` flips the coins for a shared text and a number of tokens.
        """
        writer = Writer(self.model, self.settings.stop)
        try:
            for token in () if journal is None else journal.tokens():
                if piece := writer.add(token):
                    yield Chunk(piece)
            if not writer.ended and (left := units - len(writer.tokens)) > 0:
                yield partial(self.open, shared, partial(draw, shared, left), len(writer.tokens))
            while not writer.ended and len(writer.tokens) < units:
                if piece := writer.add((yield partial(self.token, writer.tokens, journal))):
                    yield Chunk(piece)
        finally:
            attempt(boundary.in_private, self.close)
        writer.finish()
        return writer

    def open(self, shared: str, sample: Callable[[], Draw], passed: int = 0) -> None:
        """Flip the coins of all tokens after the first ``passed``, and open the model's session."""
        drawn = sample()
        self.drawn = Draw(drawn.demonstrations, [*[()] * passed, *drawn.steps])
        shown = [*self.drawn.demonstrations, *([self.padding] if self.slots else [])]
        self._rows = Rows(self.model, shared, shown, len(self.drawn.steps))

    def token(self, released: Sequence[int], journal: Journal | None = None) -> int:
        """Draw the token after the released ones; the journal has it before it leaves."""
        assert self._rows is not None
        sample = self.drawn.steps[len(released)]
        width = self.slots or len(sample)
        calls = max(1, -(-len(sample) // max(1, width)))
        filled = [*sample, *[len(self.drawn.demonstrations)] * (calls * width - len(sample))]
        found = [self._rows.logits(filled[i * width : (i + 1) * width], released) for i in range(calls)]
        one_shot = np.concatenate([logits[1:] for logits in found])[: len(sample)]
        settings = self.settings
        terms = partial(clipped_terms, bound=self.bound, temperature=settings.temperature, cap=settings.cap)
        token = choose(self.model, settings, released, found[0][0], one_shot, terms, self.randomness)
        if journal is not None:
            journal.keep(token)
        return token

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
