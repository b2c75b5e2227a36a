"""The steps of one private answer in its transaction, token by token. `DPSampler` is the Runnable.

An answer is CHARGED as many tokens as it may have. Then the coins of all of them are flipped, and token by token is
drawn, each from the public logits and the clipped terms of its own sample. The receipt gives back the tokens that were
never sampled.
"""

from __future__ import annotations

import copy
import json
import logging
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

from langchain_core.runnables.utils import AddableDict

from langchain_dpicl.budget import Charge, Receipt, Replayed
from langchain_dpicl.budget.line import RELEASED, BudgetLine
from langchain_dpicl.calls.flow import Chunk, Flow, FlowClosed
from langchain_dpicl.decoding.answer import Draw, Keys, PrivateAnswer, Writer, draw_steps, slots_for
from langchain_dpicl.decoding.journal import Journal, mark_of
from langchain_dpicl.decoding.mixing import Settings
from langchain_dpicl.decoding.model import Demonstration, LogitsModel, attempt
from langchain_dpicl.decoding.template import DemonstrationTemplate
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.privacy.noise import Randomness
from langchain_dpicl.private import boundary
from langchain_dpicl.private.boundary import Failed, guarded
from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.release.doubt import Doubts
from langchain_dpicl.release.transaction import Charged, Release, Request

CUT = "released, cut short: the tokens of the budget are spent"
"""The outcome on the receipt of an answer that ended because nothing was left."""

logger = logging.getLogger("langchain_dpicl.decoding")


class SamplerRelease(AnyRelease, Release):
    """The steps of a private answer. `DPSampler` sets the attributes."""

    model: LogitsModel
    template: DemonstrationTemplate
    settings: Settings
    pad: bool
    slots: int | None
    _keys: Keys
    _padding: Demonstration
    _randomness: Randomness
    _variant: str
    _doubts: Doubts
    mechanism = "tokens"
    options: Mapping[str, float] = {}
    """None: what else decides a token's distribution costs no privacy."""
    resumes = False
    """Whether this makes one of many answers that are kept: no zero-shot answer stands in for it."""
    journal: Journal | None = None
    """Keeps an answer's tokens, so that it can be resumed after an interruption, on the same charge."""

    def for_job(self, journal: Journal | None) -> Self:
        """The same sampler for the answers of a job, which ``journal`` keeps."""
        copied = copy.copy(self)
        copied.resumes, copied.journal = True, journal
        return copied

    def slots_of(self, line: BudgetLine) -> int | None:
        """The rows of every call of the model: as given, or by the frozen line; None without padding."""
        if self.slots is not None or not self.pad:
            return self.slots
        return slots_for(self.settings.shots, line.rate, line.plan_line.owners)

    # -- before the charge --------------------------------------------------------------------------------------------

    def asked(self, input: object) -> tuple[Mapping[str, Any], str]:
        """A request's values and its shared text, checked: it has what the template names, and fits the context."""
        values = {self.store.input_key: input} if isinstance(input, str) else input
        if not isinstance(values, Mapping):
            raise InvalidParameter("input", type(input).__name__, "a string, or a mapping of names to values")
        shared = self.template.ask(values)
        if not self.model.fits(self.template.padding, shared, self.settings.max_tokens):
            bound = f"a query that leaves room for {self.settings.max_tokens} tokens and a demonstration"
            raise InvalidParameter("input", f"{len(shared)} characters", bound)
        return values, shared

    def check(self, values: Any) -> Request:
        """The shared text, and the line of the plan."""
        values, shared = self.asked(values)
        content = {"prompt": shared} if self.journal is None else {"prompt": shared, "job": self.journal.name}
        request = self.request(shared, self.line(), content, self._variant, values)
        self._doubts.asked(request.caller)
        return request

    def calls_public(self, request: Request) -> bool:
        """Whether the model has not answered this caller, or failed since: then it is asked a public question."""
        doubt = self._doubts.of(request.caller)
        if not (doubt.never_answered or doubt.suspected):
            return False
        return self.journal is None or request.line.remaining(request.principal) > 0

    def prepare(self, request: Request) -> Flow[None]:
        """Ask the model a public question if there is doubt."""

        def probe() -> None:
            session = self.model.session(request.asked, [], steps=1)
            try:
                shape = session.logits([], []).shape
            finally:
                session.close()
            if shape != (1, self.model.vocabulary):
                raise ValueError(f"logits of shape {shape}, not {(1, self.model.vocabulary)}")

        yield from ()
        if not self.calls_public(request):
            return
        failure: type[BaseException] | None = None
        try:
            boundary.in_private(probe)
        except Exception as error:
            failure = type(error)
        if failure is not None:
            raise ModelUnavailable(
                "the model gives no logits for the query without demonstrations "
                f"({failure.__module__}.{failure.__qualname__}); nothing was charged"
            )
        self._doubts.of(request.caller).judge(answered=True)

    def reopened(self, request: Request) -> Charge | None:
        """Note in the journal that this answer is under way; return the charge that it has if it was interrupted."""
        if self.journal is None:
            return None
        self.journal.begin(mark_of(request.asked))
        charge = request.line.reopen(request.id, request.principal)
        self.journal.is_reopened = charge is not None
        return charge

    # -- the answer ---------------------------------------------------------------------------------------------------

    def work(self, charged: Charged) -> Flow[Writer]:
        """Draw the answer, and hand its text out as it becomes certain."""
        return self._written(charged.request, charged.entry)

    def _written(self, request: Request, entry: Charge | Replayed | None) -> Flow[Writer]:
        """The answer to a charge; without one the public answer, in which no owner takes part."""
        units = entry.units if isinstance(entry, Charge) else self.settings.max_tokens
        private, writer = self._private(request.line), Writer(self.model, self.settings.stop)
        try:
            for token in () if self.journal is None else self.journal.tokens():
                if piece := writer.add(token):
                    yield self._chunk(piece)
            if not writer.ended and (left := units - len(writer.tokens)) > 0:
                flip = partial(Draw, (), [()] * left) if entry is None else partial(self._flip, request, left)
                yield partial(private.open, request.asked, flip, len(writer.tokens))
            while not writer.ended and len(writer.tokens) < units:
                if piece := writer.add((yield partial(self._token, private, writer.tokens))):
                    yield self._chunk(piece)
        finally:
            attempt(boundary.in_private, private.close)
            attempt(boundary.in_private, self._keys.release, private.drawn.demonstrations)
        writer.finish()
        return writer

    def _private(self, line: BudgetLine) -> PrivateAnswer:
        slots, padding = self.slots_of(line), self._padding
        return PrivateAnswer(self.model, self.settings, line.parameter, self._randomness, slots, padding)

    def _flip(self, request: Request, steps: int) -> Draw:
        """Flip the coins of so many tokens. Private."""

        def shown(exemplar: dict[str, Any]) -> str | None:
            text = self.template.show(exemplar)
            return text if self.model.fits(text, request.asked, self.settings.max_tokens) else None

        render = partial(attempt, shown)  # this owner's own data: it must not fail the others' answer
        return draw_steps(self.store, request.line.rate, steps, self._randomness, key=self._keys.key, render=render)

    def _token(self, private: PrivateAnswer, released: Sequence[int]) -> int:
        """Draw a token, and keep it before it leaves."""
        token = private.token(released)
        if self.journal is not None:
            self.journal.keep(token)
        return token

    def _chunk(self, piece: str) -> Chunk:
        return Chunk(AddableDict(answer=piece) if self.return_receipt else piece)

    def kept(self, charged: Charged, release: Writer) -> tuple[str, str | None, int]:
        """The text, and the tokens that were never sampled."""
        assert isinstance(charged.entry, Charge)
        units, text = charged.entry.units, json.dumps(release.text)
        if units < self.settings.max_tokens and not release.ended:
            logger.warning("the budget's tokens are spent: an answer ends after %d tokens", units)
            return CUT, text, 0
        return RELEASED, text, units - len(release.tokens)

    def answer(self, charged: Charged | None, release: Writer, receipt: Receipt) -> Flow[str]:
        """The text, whose end is handed out after the receipt is recorded."""
        if release.rest or not release.text:  # a stream has one chunk at least
            yield self._chunk(release.rest)
        return release.text

    def replay(self, request: Request, known: Replayed) -> Flow[str]:
        """The text that was released before, in one piece."""
        if self.journal is not None:
            self.journal.tokens()  # drops those of another charge
        text: str = json.loads(known.answer)
        yield self._chunk(text)
        return text

    def failed(self, charged: Charged, failure: Failed) -> bool:
        """Doubt the model, unless the reader left. A charge that can be resumed stays open."""
        self._doubt(charged.request, failure)
        return self.journal is None

    def _doubt(self, request: Request, failure: Failed) -> None:
        if failure.interrupt not in (FlowClosed, CancelledError):
            self._doubts.of(request.caller).suspected = True

    def unreleased(self, request: Request) -> Flow[tuple[Any, Receipt]] | None:
        """The public answer, if the deployer asked for it."""

        def zero_shot() -> Flow[tuple[Any, Receipt]]:
            found = yield from guarded(self._written(request, None))
            if isinstance(found, Failed):
                self._doubt(request, found)
                raise found.error()
            receipt = request.line.unreleased_receipt(request.principal)
            return (yield from self.answer(None, found, receipt)), receipt

        return zero_shot() if self.budget.on_exhausted == "zero_shot" and not self.resumes else None
