"""The steps of the transaction of an answer of tokens."""

from __future__ import annotations

import contextlib
import json
import logging
from asyncio import CancelledError
from collections.abc import Mapping
from functools import partial
from typing import Any

from langchain_dpicl.budget import Charge, Receipt, Replayed
from langchain_dpicl.budget.line import RELEASED, BudgetLine
from langchain_dpicl.calls.flow import Chunk, Flow, FlowClosed
from langchain_dpicl.decoding.answer import PrivateAnswer, Settings, Writer
from langchain_dpicl.decoding.exemplars import Exemplars, slots_for
from langchain_dpicl.decoding.model import DemonstrationTemplate, LogitsModel, attempt, read_rows
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.privacy.noise import Randomness
from langchain_dpicl.private import boundary
from langchain_dpicl.private.boundary import Failed, guarded
from langchain_dpicl.private.bucket import Examples
from langchain_dpicl.release.base import AnyRelease, Doubts
from langchain_dpicl.release.transaction import Charged, Find, Request
from langchain_dpicl.release.watched import PublicChain
from langchain_dpicl.selection import Sought
from langchain_dpicl.selection.rules import text_searched
from langchain_dpicl.store.base import Numbers

CUT = "released, cut short: the tokens of the budget are spent"
"""The outcome on the receipt of an answer that ended because nothing was left."""


class TokenRelease(AnyRelease):
    """The steps of `DPSampler`, which sets its attributes."""

    mechanism = "tokens"
    options: Mapping[str, float] = {}
    """None: what else decides a token's distribution costs no privacy."""
    comes_in_pieces = True
    for_job = False
    """Whether this makes one of many answers that are kept: no zero-shot answer stands in for it."""
    job: str = ""
    """The secret name of a job that keeps its answers itself: its questions are ones that nobody else can ask."""

    model: LogitsModel
    template: DemonstrationTemplate
    settings: Settings
    exemplars: Exemplars
    search: PublicChain | None = None
    """The chain that makes the text that exemplars are near to, if the selector has a ``search_query``."""
    pad: bool
    slots: int | None
    _doubts: Doubts
    _randomness: Randomness

    def slots_of(self, line: BudgetLine) -> int | None:
        """The rows of every call of the model: as given, or by the frozen line; None without padding."""
        if self.slots is not None or not self.pad:
            return self.slots
        return slots_for(self.settings.shots, line.rate, self.selector.sampled_from(line.plan_line.owners))

    def check(self, values: Any) -> Request:
        """The shared text, and the line of the plan."""
        values, shared = self.exemplars.asked(values)
        content: dict[str, Any] = {"prompt": shared}
        if self.job:
            content["job"] = self.job
        if self.selector.nearest_to is not None:
            content["asked"] = values
        line = self.line()
        if line.tickets is not None and self.units > line.count:
            raise InvalidParameter("max_tokens", self.units, f"at most {line.count}, the tickets that every owner has")
        request = self.request(values, line, content, self._variant, values, self.selector.rules)
        self._doubts.asked(request.caller)
        return request

    def calls_public(self, request: Request) -> bool:
        """Return whether exemplars are looked for near to the query, or the model is asked a public question."""
        return self.selector.nearest_to is not None or self._doubtful(request)

    def _doubtful(self, request: Request) -> bool:
        """Return whether the model has not answered this caller, or failed since."""
        doubt = self._doubts.of(request.caller)
        return doubt.never_answered or doubt.suspected

    def prepare(self, request: Request) -> Flow[Sought]:
        """Return the vector and the rules that choose exemplars. Ask the model a public question if there is doubt."""
        values = request.asked
        text = None
        if self.selector.nearest_to is not None:
            text = values[self.selector.nearest_to]
        if self.search is not None:
            chain, _, timeout = self.search
            (made,) = yield boundary.private_calls(
                chain,
                [(values, Examples(()))],
                max_concurrency=1,
                timeout=timeout,
            )
            text = text_searched(made)
        query = yield from self.looked_for(request, text)
        if not self._doubtful(request):
            return query
        failure = yield from self.ask_model(values)
        if failure is not None:
            raise ModelUnavailable(
                "the model gives no logits for the query without demonstrations "
                f"({failure.__module__}.{failure.__qualname__}); nothing was charged"
            )
        self._doubts.of(request.caller).judge(answered=True)
        return query

    def ask_model(self, values: Any = None) -> Flow[type[BaseException] | None]:
        yield from ()

        def probe() -> None:
            asked = self.exemplars.asked("ready?")[0] if values is None else values
            with contextlib.closing(self.model.session(self.template.ask(asked), [], steps=1)) as session:
                read_rows(self.model, session, [], [])

        try:
            boundary.in_private(probe)
        except Exception as error:
            return type(error)
        return None

    def eligible(self, ready: Any) -> Find | None:
        """Finds the owners near enough to the query, with an exemplar that passes its filter."""
        return None if ready is None else partial(self.selector.eligible, ready)

    def work(self, charged: Charged) -> Flow[Writer]:
        """Draw the answer, and hand its text out as it becomes certain."""
        assert isinstance(charged.entry, Charge)
        return self._written(
            charged.request,
            charged.entry.units,
            charged.request.line.rate,
            query=charged.ready,
            among=charged.participants,
        )

    def _written(
        self,
        request: Request,
        units: int,
        rate: float | None,
        query: Any = None,
        among: Numbers | None = None,
    ) -> Flow[Writer]:
        """An answer of up to so many tokens; without a rate the public one, in which no owner takes part."""
        private = PrivateAnswer(
            self.model,
            self.settings,
            request.line.parameter,
            self._randomness,
            self.slots_of(request.line),
            self.exemplars.padding,
        )
        try:
            draw = partial(self.exemplars.draw, self._randomness, rate, query=query, among=among)
            return (yield from private.written(self.template.ask(request.asked), units, draw))
        finally:
            attempt(boundary.in_private, self.exemplars.release, private.drawn.demonstrations)

    def kept(self, charged: Charged, release: Writer) -> tuple[str, str | None, int]:
        """The text, and the tokens that were never sampled."""
        assert isinstance(charged.entry, Charge)
        units = charged.entry.units
        text = json.dumps(release.text)
        if units < self.settings.max_tokens and not release.ended:
            logging.getLogger("langchain_dpicl.decoding").warning(
                "the budget's tokens are spent: an answer ends after %d tokens", units
            )
            return CUT, text, 0
        return RELEASED, text, units - len(release.tokens)

    def answer(self, charged: Charged | None, release: Writer, receipt: Receipt) -> Flow[str]:
        """The text, whose end is handed out after the receipt is recorded."""
        if release.rest or not release.text:  # a stream has one chunk at least
            yield Chunk(release.rest)
        return release.text

    def replay(self, request: Request, known: Replayed) -> Flow[str]:
        """The text that was released before, in one piece."""
        text: str = json.loads(known.answer)
        yield Chunk(text)
        return text

    def failed(self, charged: Charged, failure: Failed) -> bool:
        """Doubt the model, unless the reader left."""
        self._doubt(charged.request, failure)
        return True

    def _doubt(self, request: Request, failure: Failed) -> None:
        if failure.interrupt not in (FlowClosed, CancelledError):
            self._doubts.of(request.caller).suspected = True

    def unreleased(self, request: Request) -> Flow[tuple[Any, Receipt]] | None:
        """The public answer, if the deployer asked for it."""

        def zero_shot() -> Flow[tuple[Any, Receipt]]:
            found = yield from guarded(self._written(request, self.units, None))
            if isinstance(found, Failed):
                self._doubt(request, found)
                raise found.error()
            receipt = request.line.unreleased_receipt(request.principal)
            return (yield from self.answer(None, found, receipt)), receipt

        return zero_shot() if self.budget.on_exhausted == "zero_shot" and not self.for_job else None
