"""DPSampler: a private answer, token by token (DPS-MOZO), as a Runnable that may stream."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from asyncio import CancelledError
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list
from langchain_core.runnables.utils import AddableDict

from langchain_dpicl.budget import Budget, Charge, Receipt, Replayed
from langchain_dpicl.budget.line import RELEASED, BudgetLine
from langchain_dpicl.calls.flow import Chunk, Either, Flow, FlowClosed, arun, astream, run, stream, together
from langchain_dpicl.decoding.answer import Exemplars, PrivateAnswer, Settings, TokenJournal, Writer, slots_for
from langchain_dpicl.decoding.model import DemonstrationTemplate, LogitsModel, attempt, read_rows
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, PrivacyBudgetExceeded
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.private import boundary
from langchain_dpicl.private.boundary import Failed, guarded
from langchain_dpicl.release.base import AnyRelease, Configs, Doubts, check_budget
from langchain_dpicl.release.transaction import Charged, Request, checked, transact
from langchain_dpicl.selection import PoissonExampleSelector

Input = str | Mapping[str, Any]

CUT = "released, cut short: the tokens of the budget are spent"
"""The outcome on the receipt of an answer that ended because nothing was left."""

AT_ONCE = min(32, (os.cpu_count() or 1) + 4)
"""Answers of a batch that run at once by default: as many as a pool of threads has."""


class DPSampler(AnyRelease):
    """Writes an answer whose every token is drawn privately from the mixed logits of a fresh sample of owners.

    For each token every owner takes part with the plan's rate, by its own coin, and shows the model one demonstration.
    The change that it makes to the next-token logits is clipped to the plan's range B, over the ``top_k`` tokens that
    the model finds likeliest WITHOUT any demonstration. The clipped changes are added to ``shots`` times the public
    logits, and one token is drawn from exactly that distribution (`decoding.answer` has the proof). Neighbouring data
    sets: one owner added or removed.

    Parameters
    ----------
    model
        A `LogitsModel`. Of the model itself nothing is private.
    selector
        Gives the ``store`` of exemplars, and the ``rate``: the probability with which an owner takes part in a token.
        ``members`` counts only in that rate (members * shots / owners).
    budget
        Has a line of mechanism "tokens". An answer charges ``max_tokens`` before its first token and, when it ends,
        gives back those that were never sampled. If fewer are left, it charges these and may end there, as its
        receipt then says. Raises `PrivacyBudgetExceeded` if none is left.
    template
        How demonstrations and queries read; default: the store's keys with their values (`DemonstrationTemplate.of`).
    max_tokens, min_tokens
        The length of an answer: before ``min_tokens``, no token that ends it (an end token, or one that makes a
        ``stop``) is a candidate. Small models without a demonstration often end at once, and within B no demonstration
        can make likely what they find unlikely.
    top_k
        How many candidates a token has.
    shots
        kappa, the weight of the public logits; it should be near the number of owners that a sample has. A public
        constant, never the store's number of owners. Default: ``members * shots`` of a selector that was given
        ``shots``; required if the selector was given ``rate``.
    temperature
        Divides all logits BEFORE they are clipped, so an owner changes the exponent by a range of B at most.
    cap
        The largest weight of a demonstration's change, if clipping allows it.
    stop
        The answer ends before any of these texts. Default: what ends a demonstration in the template (an empty line).
        For answers of one line give ``"\n"``.
    pad
        Fill each token's call with public rows up to a constant number (except with probability 2^-40 a token: see
        `slots_for`). That is several times the work: 21 rows for 4 shots. It hides no more: an observer who times an
        answer or counts forward passes sees the number and lengths of its demonstrations, and the model's cache. With
        False a call has as many rows as the token has owners.
    slots
        That number of rows; default: by the binomial tail of a sample, at the frozen plan's rate and number of owners.
    line, return_receipt
        As for `DPAggregate`.

    A demonstration that does not fit the context, or that the template cannot render, has no part in any token. One on
    which the model fails adds nothing to this token. Only the zero-shot prompt, which is public, may fail an answer.
    Equal queries are answered from the ledger, callers are named with `acting_for`, and errors before the charge cost
    nothing.
    """

    mechanism = "tokens"
    options: Mapping[str, float] = {}
    """None: what else decides a token's distribution costs no privacy."""
    comes_in_pieces = True
    for_job = False
    """Whether this makes one of many answers that are kept: no zero-shot answer stands in for it."""
    journal: TokenJournal | None = None
    """Keeps the tokens of a job's answer, so that it resumes after an interruption, on the same charge."""

    def __init__(
        self,
        model: LogitsModel,
        selector: PoissonExampleSelector,
        budget: Budget,
        *,
        template: DemonstrationTemplate | None = None,
        max_tokens: int = 25,
        min_tokens: int = 1,
        top_k: int = 100,
        shots: float | None = None,
        temperature: float = 1.0,
        cap: float = 1.5,
        stop: str | Sequence[str] | None = None,
        pad: bool = True,
        slots: int | None = None,
        line: str | None = None,
        return_receipt: bool = False,
    ) -> None:
        if not isinstance(model, LogitsModel):
            raise InvalidParameter("model", type(model).__name__, "a LogitsModel")
        if not isinstance(selector, PoissonExampleSelector):
            raise InvalidParameter("selector", type(selector).__name__, "a PoissonExampleSelector")
        if not isinstance(budget, Budget) or budget.is_filtered:
            raise InvalidParameter("budget", type(budget).__name__, "a PrivacyBudget with a plan")
        check_budget(budget, return_receipt=bool(return_receipt))
        if selector.rules:
            raise InvalidParameter(
                "filter", "given", "None for a DPSampler, as is visible_to: every owner may be asked"
            )
        if selector.threshold is not None or budget.tickets:
            raise InvalidParameter("threshold", selector.threshold, "None for a DPSampler: every owner may be asked")
        if selector.calls is not None:
            raise InvalidParameter("calls", selector.calls, "None for a DPSampler: each owner has a row there")
        if selector.rate is None:
            raise InvalidParameter("rate", None, "given for a DPSampler, or shots: a plan chooses rates of votes alone")
        if template is not None and not isinstance(template, DemonstrationTemplate):
            raise InvalidParameter("template", type(template).__name__, "a DemonstrationTemplate")
        template = DemonstrationTemplate.of(selector.store) if template is None else template
        stop = (template.ending or ()) if stop is None else stop
        stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else (None,)
        if not all(isinstance(text, str) and text for text in stops):
            raise InvalidParameter("stop", stop, "non-empty texts")
        kappa = selector.expected_owners if shots is None else shots  # never the store's owners: one changes them
        if kappa is None:
            raise InvalidParameter("shots", None, "given if the selector has a rate: how many owners a sample has")
        slots = None if slots is None else checks.whole("slots", slots)
        if slots is not None and not pad:
            raise InvalidParameter("slots", slots, "None if pad is False")
        self.settings = Settings(
            max_tokens=checks.whole("max_tokens", max_tokens),
            min_tokens=checks.whole("min_tokens", min_tokens, at_least=0, at_most=max_tokens),
            top_k=checks.whole("top_k", top_k, at_most=model.vocabulary),
            shots=checks.real("shots", kappa, above=0.0, at_most=1e6),
            temperature=checks.real("temperature", temperature, at_least=0.01, at_most=100.0),
            cap=checks.real("cap", cap, at_least=0.0, at_most=100.0),
            stop=tuple(map(str, stops)),
        )
        self.model, self.selector, self.budget, self.template = model, selector, budget, template
        self.query_key = selector.store.input_key  # a string goes in under this key
        self.units, self.pad, self.slots = self.settings.max_tokens, bool(pad), slots
        self.line_name, self.return_receipt, self.name = line, bool(return_receipt), "DPSampler"
        self._randomness, self._doubts = SecureRandomness(), Doubts()
        self.exemplars = Exemplars(selector.store, model, template, self.units)
        self._variant = f"decoding model={model.name!r} demonstration={template.demonstration!r} {self.settings!r}"
        self._use_budget(stacklevel=3)

    @property
    def InputType(self) -> Any:
        """The query: a string, or a mapping with what the template's query names."""
        return Input

    @property
    def OutputType(self) -> Any:
        """The answer, or the answer with its receipt."""
        return dict[str, Any] if self.return_receipt else str

    def slots_of(self, line: BudgetLine) -> int | None:
        """The rows of every call of the model: as given, or by the frozen line; None without padding."""
        if self.slots is not None or not self.pad:
            return self.slots
        return slots_for(self.settings.shots, line.rate, line.plan_line.owners)

    def __repr__(self) -> str:
        return f"DPSampler(model={self.model.name!r}{self.selector.shown_rate}, {self.settings!r})"

    # -- Runnable -----------------------------------------------------------------------------------------------------

    def invoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """One answer."""
        return self._call_with_config(lambda values: run(self._answered(values)), input, config)

    async def ainvoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """One answer. A cancelled call keeps its charge."""
        return await self._acall_with_config(lambda values: arun(self._answered(values)), input, config)

    def stream(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """The answer's text as its tokens are drawn; with ``return_receipt`` mappings, the receipt last.

        A reader who stops early leaves spent what was charged.
        """

        def pieces(inputs: Iterator[Input]) -> Iterator[Any]:
            with contextlib.closing(stream(self._answered(next(inputs)))) as made:
                yield from map(self._piece, made)

        yield from self._transform_stream_with_config(iter([input]), pieces, config)

    async def astream(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        """`stream`, asynchronously."""

        async def one() -> AsyncIterator[Input]:
            yield input

        async def pieces(inputs: AsyncIterator[Input]) -> AsyncIterator[Any]:
            async with contextlib.aclosing(astream(self._answered(await anext(inputs)))) as made:
                async for piece in made:
                    yield self._piece(piece)

        async for chunk in self._atransform_stream_with_config(one(), pieces, config):
            yield chunk

    def _answered(self, values: Any) -> Flow[Any]:
        """One answer, in pieces of text; the receipt comes last if it is wanted."""
        answer, receipt = yield from transact(self, values)
        if self.return_receipt:
            yield Chunk(receipt)
        return self._told(answer, receipt)

    def _piece(self, made: str | Receipt) -> Any:
        if not self.return_receipt:
            return made
        return AddableDict(answer=made) if isinstance(made, str) else AddableDict(receipt=made)

    def batch(
        self, inputs: list[Input], config: Configs = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """An answer for each input, each charged on its own when it begins; all are checked before the first charge.

        The config's ``max_concurrency`` is the number of answers under way at once; with 1 they are charged in their
        order. Each holds ``max_tokens`` meanwhile, so fewer at once go further if the budget is nearly spent.

        The first error is raised when the answers under way have ended, and no other begins. What was answered by then
        stays charged: asked again, it is replayed at no cost (unless ``replay=False``). With ``return_exceptions=True``
        every input has its answer or its error, `PrivacyBudgetExceeded` if nothing was left for it.
        """
        return run(self._batch(inputs, config, return_exceptions))

    async def abatch(
        self, inputs: list[Input], config: Configs = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """`batch`, asynchronously. A cancelled batch keeps the charges of the answers that have begun."""
        return await arun(self._batch(inputs, config, return_exceptions))

    def _batch(self, inputs: list[Input], config: Configs, return_exceptions: bool) -> Flow[list[Any]]:
        def one(value: Input, config: RunnableConfig) -> Flow[list[Any]]:
            if failed and not return_exceptions:
                return [failed[0]]
            try:
                return [(yield Either(partial(self.invoke, value, config), partial(self.ainvoke, value, config)))]
            except Exception as error:
                failed.append(error)
                return [error]

        if not inputs:
            return []
        for value in () if return_exceptions else inputs:  # each is checked again when its turn comes
            request = checked(self, value)
            known = self.calls_public(request) and request.line.replayed([request.id], request.principal)
            if known == [None] and request.line.remaining(request.principal):
                yield from self.prepare(request)
        configs, failed = get_config_list(config, len(inputs)), list[Exception]()
        found = yield together(list(map(one, inputs, configs)), configs[0].get("max_concurrency") or AT_ONCE)
        answers = [answer for (answer,) in found]
        if return_exceptions or not failed:
            return answers
        if not isinstance(failed[0], PrivacyBudgetExceeded) or len(answers) == 1:
            raise failed[0]
        made = sum(not isinstance(answer, Exception) for answer in answers)
        raise PrivacyBudgetExceeded(f"{failed[0]} for this one of a batch of {len(answers)}; {made} were answered")

    # -- the steps of a release ---------------------------------------------------------------------------------------

    def check(self, values: Any) -> Request:
        """The shared text, and the line of the plan."""
        values, shared = self.exemplars.asked(values)
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
            with contextlib.closing(self.model.session(request.asked, [], steps=1)) as session:
                read_rows(self.model, session, [], [])

        yield from ()
        if not self.calls_public(request):
            return
        failure = None
        try:
            boundary.in_private(probe)
        except Exception as error:
            failure = f"{type(error).__module__}.{type(error).__qualname__}"
        if failure is not None:
            said = f"the model gives no logits for the query without demonstrations ({failure}); nothing was charged"
            raise ModelUnavailable(said)
        self._doubts.of(request.caller).judge(answered=True)

    def reopened(self, request: Request) -> Charge | None:
        """Note in the journal that this answer is under way; return the charge that it has if it was interrupted."""
        if self.journal is None:
            return None
        self.journal.begin(request.asked)
        charge = request.line.reopen(request.id, request.principal)
        self.journal.is_reopened = charge is not None
        return charge

    def work(self, charged: Charged) -> Flow[Writer]:
        """Draw the answer, and hand its text out as it becomes certain."""
        assert isinstance(charged.entry, Charge)
        return self._written(charged.request, charged.entry.units, charged.request.line.rate)

    def _written(self, request: Request, units: int, rate: float | None) -> Flow[Writer]:
        """An answer of up to so many tokens; without a rate the public one, in which no owner takes part."""
        line, shown, source = request.line, self.exemplars, self._randomness
        padding, slots = shown.padding, self.slots_of(line)
        private = PrivateAnswer(self.model, self.settings, line.parameter, source, slots, padding)
        try:
            return (yield from private.written(request.asked, units, partial(shown.draw, source, rate), self.journal))
        finally:
            attempt(boundary.in_private, shown.release, private.drawn.demonstrations)

    def kept(self, charged: Charged, release: Writer) -> tuple[str, str | None, int]:
        """The text, and the tokens that were never sampled."""
        assert isinstance(charged.entry, Charge)
        units, text = charged.entry.units, json.dumps(release.text)
        if units < self.settings.max_tokens and not release.ended:
            logger = logging.getLogger("langchain_dpicl.decoding")
            logger.warning("the budget's tokens are spent: an answer ends after %d tokens", units)
            return CUT, text, 0
        return RELEASED, text, units - len(release.tokens)

    def answer(self, charged: Charged | None, release: Writer, receipt: Receipt) -> Flow[str]:
        """The text, whose end is handed out after the receipt is recorded."""
        if release.rest or not release.text:  # a stream has one chunk at least
            yield Chunk(release.rest)
        return release.text

    def replay(self, request: Request, known: Replayed) -> Flow[str]:
        """The text that was released before, in one piece."""
        if self.journal is not None:
            self.journal.tokens()  # drops those of another charge
        text: str = json.loads(known.answer)
        yield Chunk(text)
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
            found = yield from guarded(self._written(request, self.units, None))
            if isinstance(found, Failed):
                self._doubt(request, found)
                raise found.error()
            receipt = request.line.unreleased_receipt(request.principal)
            return (yield from self.answer(None, found, receipt)), receipt

        return zero_shot() if self.budget.on_exhausted == "zero_shot" and not self.for_job else None
