"""The steps of one private answer in its transaction, token by token.

An answer is CHARGED as many tokens as it may have. Then the coins of all of them are flipped, and token by token is
drawn, each from the public logits and the clipped terms of its own sample. The receipt gives back the tokens that were
never sampled.
"""

from __future__ import annotations

import copy
import json
import logging
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

from langchain_core.runnables.utils import AddableDict

from langchain_dpicl.budget import Budget, Charge, Receipt, Replayed
from langchain_dpicl.budget.line import RELEASED, BudgetLine
from langchain_dpicl.calls.flow import Chunk, Flow, FlowClosed
from langchain_dpicl.decoding.answer import PrivateAnswer, Settings, Writer
from langchain_dpicl.decoding.draws import Draw, Keys, draw_steps, slots_for
from langchain_dpicl.decoding.model import Demonstration, LogitsModel
from langchain_dpicl.decoding.rows import attempt
from langchain_dpicl.decoding.template import DemonstrationTemplate
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness
from langchain_dpicl.private import boundary
from langchain_dpicl.private.boundary import Failed, guarded
from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.release.doubt import Doubts
from langchain_dpicl.release.transaction import Charged, Release, Request
from langchain_dpicl.selection.selector import PoissonExampleSelector
from langchain_dpicl.store.base import PrivateStore

CUT = "released, cut short: the tokens of the budget are spent"
"""The outcome on the receipt of an answer that ended because nothing was left."""

logger = logging.getLogger("langchain_dpicl.decoding")


class Progress(Protocol):
    """Keeps an answer's tokens, so that it can be resumed after an interruption, on the same charge."""

    name: str
    """A secret, which makes its questions ones that nobody else can ask."""

    def reopened(self, request: Request) -> Charge | None:
        """The charge that the interrupted answer has; None for none."""

    def tokens(self) -> Sequence[int]:
        """The tokens that were handed out before."""

    def keep(self, token: int) -> None:
        """Keep a further token, on the private side. It leaves only when this has returned: what is not kept was not
        released."""


@dataclass(frozen=True)
class Written:
    """A finished answer. Public, once it is recorded."""

    writer: Writer
    rest: str
    """The end of the text, which is handed out after the receipt is recorded."""


class SamplerRelease(AnyRelease, Release):
    """The steps of a private answer in its transaction. `DPSampler` is the Runnable."""

    resumes: bool = False
    """Whether this makes one of many answers that are kept: no zero-shot answer stands in for it."""
    progress: Progress | None = None

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
        self.units = settings.max_tokens
        self.pad = pad
        self.slots = slots
        self.line_name = line_name
        self._keys = Keys(selector.store, model)
        self._padding = Demonstration(self._keys.key("padding"), template.padding)
        self._randomness: Randomness = SecureRandomness()
        self._variant = f"decoding model={model.name!r} demonstration={template.demonstration!r} {settings!r}"
        self._doubts = Doubts()

    def for_job(self, progress: Progress | None) -> Self:
        """The same sampler for one answer of a job, which ``progress`` keeps."""
        copied = copy.copy(self)
        copied.resumes, copied.progress = True, progress
        return copied

    @property
    def mechanism(self) -> str:
        """Each token is one."""
        return "tokens"

    @property
    def options(self) -> Mapping[str, float]:
        """None: what else decides a token's distribution costs no privacy."""
        return {}

    @property
    def store(self) -> PrivateStore:
        """The selector's."""
        return self.selector.store

    def slots_of(self, line: BudgetLine) -> int | None:
        """The rows of every call of the model: as given, or by the frozen line; None without padding."""
        if self.slots is not None or not self.pad:
            return self.slots
        return slots_for(self.settings.shots, line.rate, line.plan_line.owners)

    # -- public: the request ------------------------------------------------------------------------------------------

    def asked(self, input: object) -> tuple[Mapping[str, Any], str]:
        """A request's values and how it reads, checked: it has what the template names, and fits the context."""
        values = {self.store.input_key: input} if isinstance(input, str) else input
        if not isinstance(values, Mapping):
            raise InvalidParameter("input", type(input).__name__, "a string, or a mapping of names to values")
        shared = self.template.ask(values)
        if not self.model.fits(self.template.padding, shared, self.settings.max_tokens):
            bound = f"a query that leaves room for {self.settings.max_tokens} tokens and a demonstration"
            raise InvalidParameter("input", f"{len(shared)} characters", bound)
        return values, shared

    def check(self, values: Any) -> Request:
        """How the query reads, and the line of the plan."""
        values, shared = self.asked(values)
        content = {"prompt": shared} if self.progress is None else {"prompt": shared, "job": self.progress.name}
        request = self.request(shared, self.line(), content, self._variant, values)
        self._doubts.asked(request.caller)
        return request

    def calls_public(self, request: Request) -> bool:
        """Whether the model has not answered this caller, or failed since: then it is asked a public question."""
        doubt = self._doubts.of(request.caller)
        doubtful = doubt.never_answered or doubt.suspected
        return doubtful and (self.progress is None or request.line.remaining(request.principal) > 0)

    def prepare(self, request: Request) -> Flow[None]:
        """Ask the model a public question, if there is doubt."""
        yield from ()
        if not self.calls_public(request):
            return
        failure: type[BaseException] | None = None
        try:
            boundary.in_private(self._probe, request.asked)
        except Exception as error:
            failure = type(error)
        if failure is not None:
            raise ModelUnavailable(
                "the model gives no logits for the query without demonstrations "
                f"({failure.__module__}.{failure.__qualname__}); nothing was charged"
            )
        self._doubts.of(request.caller).judge(answered=True)

    def _probe(self, shared: str) -> None:
        session = self.model.session(shared, [], steps=1)
        try:
            shape = session.logits([], []).shape
        finally:
            session.close()
        if shape != (1, self.model.vocabulary):
            raise ValueError(f"logits of shape {shape}, not {(1, self.model.vocabulary)}")

    def reopened(self, request: Request) -> Charge | None:
        """The charge of an answer that was interrupted."""
        return None if self.progress is None else self.progress.reopened(request)

    # -- the answer ---------------------------------------------------------------------------------------------------

    def work(self, charged: Charged) -> Flow[Written]:
        """Draw the answer, and hand its text out as it becomes certain."""
        assert isinstance(charged.entry, Charge)
        return self._written(charged.request, charged.entry)

    def _written(self, request: Request, entry: Charge | None) -> Flow[Written]:
        """The answer to a charge; without one the public answer, in which nobody takes part."""
        units = self.settings.max_tokens if entry is None else entry.units
        progress = None if entry is None else self.progress
        private, writer = self._private(request.line), Writer(self.model, self.settings.stop)
        step = private.token if progress is None else partial(_kept, private, progress)
        try:
            for token in () if progress is None else progress.tokens():
                if piece := writer.add(token):
                    yield self._chunk(piece)
            if not writer.ended and len(writer.tokens) < units:
                yield partial(private.open, request.asked, self._sampling(request, entry, units, len(writer.tokens)))
            while not writer.ended and len(writer.tokens) < units:
                if piece := writer.add((yield partial(step, writer.tokens))):
                    yield self._chunk(piece)
        finally:
            attempt(boundary.in_private, private.close)
            attempt(boundary.in_private, self._keys.release, private.demonstrations)
        return Written(writer, writer.finish())

    def _chunk(self, piece: str) -> Chunk:
        return Chunk(AddableDict(answer=piece) if self.return_receipt else piece)

    def kept(self, charged: Charged, release: Written) -> tuple[str, str | None, int]:
        """The text, and the tokens that were never sampled."""
        writer, entry = release.writer, charged.entry
        assert isinstance(entry, Charge)
        if entry.units < self.settings.max_tokens and not writer.ended:
            logger.warning("the budget's tokens are spent: an answer ends after %d tokens", entry.units)
            return CUT, json.dumps(writer.text), 0
        return RELEASED, json.dumps(writer.text), entry.units - len(writer.tokens)

    def answer(self, charged: Charged, release: Written, receipt: Receipt) -> Flow[str]:
        """The text, whose end is handed out last."""
        return self._ended(release)

    def _ended(self, written: Written) -> Flow[str]:
        if written.rest or not written.writer.text:  # a stream has one chunk at least
            yield self._chunk(written.rest)
        return written.writer.text

    def replay(self, request: Request, known: Replayed) -> Flow[str]:
        """The text that was released before, in one piece."""
        if self.progress is not None:
            self.progress.tokens()  # drops those of another charge
        text: str = json.loads(known.answer)
        yield self._chunk(text)
        return text

    def failed(self, charged: Charged, failure: Failed) -> bool:
        """Doubt the model, unless the reader left. A charge that can be resumed stays open."""
        self._doubt(charged.request, failure)
        return self.progress is None

    def _doubt(self, request: Request, failure: Failed) -> None:
        if failure.interrupt not in (FlowClosed, CancelledError):
            self._doubts.of(request.caller).suspected = True

    def unreleased(self, request: Request) -> Flow[tuple[Any, Receipt]] | None:
        """The public answer, if the deployer asked for it."""
        allowed = self.budget.on_exhausted == "zero_shot" and not self.resumes
        return self._zero_shot(request) if allowed else None

    def _zero_shot(self, request: Request) -> Flow[tuple[Any, Receipt]]:
        found = yield from guarded(self._written(request, None))
        if isinstance(found, Failed):
            self._doubt(request, found)
            raise found.error()
        receipt = request.line.unreleased_receipt(request.principal)
        return (yield from self._ended(found)), receipt

    def _private(self, line: BudgetLine) -> PrivateAnswer:
        return PrivateAnswer(
            self.model,
            self.settings,
            bound=line.parameter,
            randomness=self._randomness,
            slots=self.slots_of(line),
            padding=self._padding,
        )

    def _sampling(self, request: Request, entry: Charge | None, units: int, passed: int = 0) -> Callable[[], Draw]:
        """What flips the coins of the steps that are not ``passed``; nobody takes part in a public answer."""
        if entry is None:
            return lambda: Draw((), [()] * units)

        def shown(exemplar: dict[str, Any]) -> str | None:
            text = self.template.show(exemplar)
            return text if self.model.fits(text, request.asked, self.settings.max_tokens) else None

        def flip() -> Draw:
            store, key = self.selector.store, self._keys.key
            render = partial(attempt, shown)  # this owner's own data: it must not fail the others' answer
            drawn = draw_steps(store, request.line.rate, units - passed, self._randomness, key=key, render=render)
            return replace(drawn, steps=[*[()] * passed, *drawn.steps])

        return flip


def _kept(answer: PrivateAnswer, progress: Progress, released: Sequence[int]) -> int:
    """Draw a token and keep it."""
    token = answer.token(released)
    progress.keep(token)
    return token
