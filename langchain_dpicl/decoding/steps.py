"""The steps of one private answer, in their order.

Check the request; answer an equal query from the ledger; CHARGE (durably) as many tokens as it may have; flip the coins
of all of them; draw token by token, each from the public logits and the clipped terms of its own sample; record the
receipt, which gives back the tokens that were never sampled. An invalid request costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from langchain_dpicl.budget import Budget, BudgetLine, Charge, Receipt, Replayed
from langchain_dpicl.budget.line import IN_TRANSACTION
from langchain_dpicl.calls.flow import Flow, arun, run
from langchain_dpicl.decoding.answer import Failed, PrivateAnswer, Settings, Writer, guarded
from langchain_dpicl.decoding.draws import Draw, Keys, draw_steps, slots_for
from langchain_dpicl.decoding.model import Demonstration, LogitsModel
from langchain_dpicl.decoding.rows import attempt
from langchain_dpicl.decoding.template import DemonstrationTemplate
from langchain_dpicl.errors import InvalidParameter, LedgerError, ModelUnavailable, PrivacyBudgetExceeded, ReleaseFailed
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness
from langchain_dpicl.private import boundary
from langchain_dpicl.release.doubt import Doubt, Doubts
from langchain_dpicl.release.flow import acting_principal
from langchain_dpicl.selection.selector import PoissonExampleSelector

T = TypeVar("T")

CUT = "released, cut short: the tokens of the budget are spent"
"""The outcome on the receipt of an answer that ended because nothing was left."""

logger = logging.getLogger("langchain_dpicl.decoding")


@dataclass(frozen=True)
class Query:
    """A checked request, and how the ledger knows it again. Public."""

    shared: str
    line: BudgetLine
    principal: str | None
    id: str | None
    text: str


@dataclass
class Note:
    """Where an answer leaves its receipt."""

    receipt: Receipt | None = None


@dataclass(frozen=True)
class Begun:
    """Makes an answer one that can be gone on with after an interruption, on the same charge, which then stays open.

    ``tokens`` were handed out before. ``keep`` is called with every further one on the private side, and the token
    leaves it only when ``keep`` has returned: so whatever was not kept was not released.
    """

    tokens: Sequence[int]
    keep: Callable[[int], None]

    def next_token(self, answer: PrivateAnswer, released: Sequence[int]) -> int:
        """Draw a token and keep it."""
        token = answer.token(released)
        self.keep(token)
        return token


class SamplerSteps:
    """The steps; `DPSampler` puts them together."""

    def __init__(
        self,
        model: LogitsModel,
        selector: PoissonExampleSelector,
        budget: Budget,
        template: DemonstrationTemplate,
        settings: Settings,
        pad: bool,
        slots: int | None,
        line_name: str | None,
    ) -> None:
        self.model = model
        self.selector = selector
        self.budget = budget
        self.template = template
        self.settings = settings
        self.pad = pad
        self.slots = slots
        self.line_name = line_name
        budget.watch(selector.store)
        self._keys = Keys(selector.store, model)
        self._padding = Demonstration(self._keys.key("padding"), template.padding)
        self._randomness: Randomness = SecureRandomness()
        self._variant = f"decoding model={model.name!r} demonstration={template.demonstration!r} {settings!r}"
        self._doubts = Doubts()

    def line(self) -> BudgetLine:
        """The budget's line of these tokens; solves and freezes the plan at first use."""
        return self.budget.line(
            "tokens",
            self.selector.rate,
            name=self.line_name,
            rate_is_explicit=self.selector.rate_is_explicit,
            owners=self.selector.owners,
            fingerprint=self.selector.store.fingerprint,
        )

    def slots_of(self, line: BudgetLine) -> int | None:
        """The rows of every call of the model: as given, or by the frozen line; None without padding."""
        if self.slots is not None or not self.pad:
            return self.slots
        return slots_for(self.settings.shots, line.rate, line.plan_line.owners)

    # -- public: the request, and its charge --------------------------------------------------------------------------

    def _asked(self, input: object) -> tuple[Mapping[str, Any], str]:
        """A request's values and how it reads, checked: it has what the template names, and fits the context."""
        values = {self.selector.store.input_key: input} if isinstance(input, str) else input
        if not isinstance(values, Mapping):
            raise InvalidParameter("input", type(input).__name__, "a string, or a mapping of names to values")
        shared = self.template.ask(values)
        self._check_fits(shared)
        return values, shared

    def _query(self, input: object, job: str | None = None) -> Query:
        """``job``, a secret name, makes it a query that nobody else can ask."""
        boundary.check_surroundings()
        self.selector.store.refresh()
        values, shared = self._asked(input)
        line, principal = self.line(), acting_principal()
        request = {"prompt": shared} if job is None else {"prompt": shared, "job": job}
        known = None
        if self.budget.replay or self.budget.keep_queries:
            known = line.query_id(request, self._variant, principal)
        text = json.dumps(values, default=repr, ensure_ascii=False) if self.budget.keep_queries else ""
        query = Query(shared, line, principal, known, text)
        doubt = self._doubts.asked(line.caller(principal))  # until the model answered this caller, and after a failure
        doubtful = doubt.never_answered or doubt.suspected
        if doubtful and line.replayed([known], principal) == [None] and line.remaining(principal):
            self._check_health(shared, doubt)
        return query

    def _check_fits(self, shared: str) -> None:
        if not self.model.fits(self.template.padding, shared, self.settings.max_tokens):
            bound = f"a query that leaves room for {self.settings.max_tokens} tokens and a demonstration"
            raise InvalidParameter("input", f"{len(shared)} characters", bound)

    def _check_health(self, shared: str, doubt: Doubt) -> None:
        """Ask the model a public question before charging."""
        failure: type[BaseException] | None = None
        try:
            boundary.in_private(self._probe, shared)
        except Exception as error:
            failure = type(error)
        if failure is not None:
            raise ModelUnavailable(
                "the model gives no logits for the query without demonstrations "
                f"({failure.__module__}.{failure.__qualname__}); nothing was charged"
            )
        doubt.judge(answered=True)

    def _probe(self, shared: str) -> None:
        session = self.model.session(shared, [], steps=1)
        try:
            shape = session.logits([], []).shape
        finally:
            session.close()
        if shape != (1, self.model.vocabulary):
            raise ValueError(f"logits of shape {shape}, not {(1, self.model.vocabulary)}")

    def _charging(self, query: Query, units: int) -> Flow[list[Charge | Replayed]]:
        line = query.line
        return line.charging(IN_TRANSACTION, 1, query.principal, [query.id], texts=[query.text], units=units)

    def _charge(self, query: Query) -> Charge | Replayed | None:
        """As many tokens as the answer may have, or as are left; None where the answer is to be the public one."""
        units = self.settings.max_tokens
        while True:
            try:
                return run(
                    query.line.charging(IN_TRANSACTION, 1, query.principal, [query.id], texts=[query.text], units=units)
                )[0]
            except PrivacyBudgetExceeded:
                left = query.line.remaining(query.principal)
                if not left and self.budget.on_exhausted == "raise":
                    raise
            if not left:
                return None
            units = min(units, left)

    async def _acharge(self, query: Query) -> Charge | Replayed | None:
        units = self.settings.max_tokens
        while True:
            try:
                found = await arun(
                    query.line.charging(IN_TRANSACTION, 1, query.principal, [query.id], texts=[query.text], units=units)
                )
                return found[0]
            except PrivacyBudgetExceeded:
                left = await asyncio.to_thread(query.line.remaining, query.principal)
                if not left and self.budget.on_exhausted == "raise":
                    raise
            if not left:
                return None
            units = min(units, left)

    # -- the answer ---------------------------------------------------------------------------------------------------

    def _pieces(
        self, query: Query, entry: Charge | Replayed | None, note: Note, begun: Begun | None = None
    ) -> Generator[str, None, None]:
        """The answer's text as it is drawn. What was charged stands, whatever becomes of this iterator."""
        if isinstance(entry, Replayed):
            note.receipt = entry.receipt
            yield json.loads(entry.answer)
            return
        units = self.settings.max_tokens if entry is None else entry.units
        answer = self._private(query)
        open_charge = entry if begun is None else None
        try:
            writer = Writer(self.model, self.settings.stop)
            for token in () if begun is None else begun.tokens:
                if piece := writer.add(token):
                    yield piece
            if not writer.ended and len(writer.tokens) < units:
                sampling = self._sampling(query, entry, units, passed=len(writer.tokens))
                self._settled(query, guarded(answer.open, query.shared, sampling))
            step = answer.token if begun is None else partial(begun.next_token, answer)
            while not writer.ended and len(writer.tokens) < units:
                piece = writer.add(self._settled(query, guarded(step, writer.tokens)))
                if piece:
                    yield piece
            rest = writer.finish()
            open_charge = None
            note.receipt = self._record(query, entry, writer)
            if rest or not writer.text:  # a stream has one chunk at least
                yield rest
        finally:
            guarded(answer.close)
            guarded(self._keys.release, answer.demonstrations)
            if open_charge is not None:
                with contextlib.suppress(LedgerError):
                    query.line.give_up(open_charge)

    def _settled(self, query: Query, result: T | Failed) -> T:
        """The result of a guarded call. A failure is public to its caller, and so is the question that follows it."""
        if isinstance(result, Failed):
            self._doubts.of(query.line.caller(query.principal)).suspected = True
            raise ReleaseFailed if result.interrupt is None else result.interrupt()
        return result

    def _private(self, query: Query) -> PrivateAnswer:
        return PrivateAnswer(
            self.model,
            self.settings,
            bound=query.line.parameter,
            randomness=self._randomness,
            slots=self.slots_of(query.line),
            padding=self._padding,
        )

    def _sampling(self, query: Query, entry: Charge | None, units: int, passed: int = 0) -> Callable[[], Draw]:
        """What flips the coins of the steps that are not ``passed``; nobody takes part in a public answer."""
        if entry is None:
            return lambda: Draw((), [()] * units)

        def shown(exemplar: dict[str, Any]) -> str | None:
            text = self.template.show(exemplar)
            return text if self.model.fits(text, query.shared, self.settings.max_tokens) else None

        def flip() -> Draw:
            store, key = self.selector.store, self._keys.key
            render = partial(attempt, shown)  # this owner's own data: it must not fail the others' answer
            drawn = draw_steps(store, query.line.rate, units - passed, self._randomness, key=key, render=render)
            return replace(drawn, steps=[*[()] * passed, *drawn.steps])

        return flip

    def _record(self, query: Query, entry: Charge | None, writer: Writer) -> Receipt:
        if entry is None:
            return query.line.unreleased_receipt(query.principal)
        answer = json.dumps(writer.text)
        if entry.units < self.settings.max_tokens and not writer.ended:
            logger.warning("the budget's tokens are spent: an answer ends after %d tokens", entry.units)
            return query.line.record(entry, CUT, answer)
        return query.line.record(entry, answer=answer, unused=entry.units - len(writer.tokens))
