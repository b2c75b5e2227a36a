"""DPSampler: a private answer, token by token (DPS-MOZO), as a Runnable that may stream."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list
from langchain_core.runnables.utils import AddableDict

from langchain_dpicl.budget import PrivacyBudget, Receipt
from langchain_dpicl.calls.flow import Chunk, Either, Flow, arun, astream, run, stream, together
from langchain_dpicl.decoding.answer import Settings
from langchain_dpicl.decoding.documents import DocumentReport, Documents, document_template, report_on
from langchain_dpicl.decoding.exemplars import Exemplars
from langchain_dpicl.decoding.model import DemonstrationTemplate, LogitsModel
from langchain_dpicl.decoding.steps import TokenRelease
from langchain_dpicl.errors import InvalidParameter, PrivacyBudgetExceeded, PrivacyWarning
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.private import boundary, notes
from langchain_dpicl.private.copy import Pristine
from langchain_dpicl.private.models import limit
from langchain_dpicl.release.advice import poor_plan
from langchain_dpicl.release.base import Configs, Doubts, check_budget
from langchain_dpicl.release.transaction import checked, transact
from langchain_dpicl.release.watched import PublicChain
from langchain_dpicl.selection import PoissonExampleSelector

Input = str | Mapping[str, Any]

AT_ONCE = min(32, (os.cpu_count() or 1) + 4)
"""Answers of a batch that run at once by default: as many as a pool of threads has."""


class DPSampler(TokenRelease):
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
        ``calls`` (how many do on average) and ``members`` count only in that rate. With a ``threshold`` or a filter
        only owners whom it lets through take part, each with its exemplar nearest to the query: `over_documents`.
    budget
        Has a line of mechanism "tokens". An answer charges ``max_tokens`` before its first token and, when it ends,
        gives back those that were never sampled. If fewer are left, it charges these and may end there, as its
        receipt then says. Raises `PrivacyBudgetExceeded` if none is left. With ``tickets=True`` every owner whom a
        gate lets through pays a ticket for each token, and an owner who has fewer than ``max_tokens`` left sits out.
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
        constant, never the store's number of owners. Default: the selector's ``calls``, or ``members * shots``;
        required if the selector was given ``rate``.
    temperature
        Divides all logits BEFORE they are clipped, so an owner changes the exponent by a range of B at most.
    cap
        The largest weight of a demonstration's change, if clipping allows it.
    stop
        The answer ends before any of these texts. Default: what ends a demonstration in the template (an empty line).
    pad, slots
        Fill each token's call with public rows up to ``slots`` (default: by the binomial tail of a sample, at the
        plan's rate: see `slots_for`), several times the work: 21 rows for 4 shots. An observer who times an answer or
        counts forward passes still sees the number and lengths of its demonstrations, and the model's cache. Without
        ``pad`` a call has as many rows as the token has owners.
    line, return_receipt
        As for `DPAggregate`.

    A demonstration that does not fit the context, or that the template cannot render, has no part in any token. One on
    which the model fails adds nothing to this token. Only the zero-shot prompt, which is public, may fail an answer.
    Equal queries are answered from the ledger, callers are named with `acting_for`, and errors before the charge cost
    nothing.

    Source: DPS-MOZO, Flemings et al. 2025, with range B in place of its Rényi ball, whose analysis does not hold.
    """

    _documents: Documents | None = None

    def __init__(
        self,
        model: LogitsModel,
        selector: PoissonExampleSelector,
        budget: PrivacyBudget,
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
        for name, value, kind in (("model", model, LogitsModel), ("selector", selector, PoissonExampleSelector)):
            if not isinstance(value, kind):
                raise InvalidParameter(name, type(value).__name__, f"a {kind.__name__}")
        check_budget(budget, return_receipt=bool(return_receipt))
        if selector.max_calls is not None:
            raise InvalidParameter("max_calls", selector.max_calls, "None for a DPSampler: nobody is displaced there")
        if budget.tickets and not selector.gated:
            raise InvalidParameter(
                "threshold", None, "given if owners pay with tickets (-1 makes every owner eligible), or a filter"
            )
        if selector.rate is None:
            raise InvalidParameter("rate", None, "given for a DPSampler, or shots: a plan chooses rates of votes alone")
        if template is None:
            template = DemonstrationTemplate.of(selector.store)
        elif not isinstance(template, DemonstrationTemplate):
            raise InvalidParameter("template", type(template).__name__, "a DemonstrationTemplate")
        if stop is None:
            stop = template.ending or ()
        stops = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stops, Sequence) or not all(isinstance(text, str) and text for text in stops):
            raise InvalidParameter("stop", stop, "non-empty texts")
        kappa = selector.expected_owners if shots is None else shots  # never the store's owners: one changes them
        if kappa is None:
            raise InvalidParameter("shots", None, "given if the selector has a rate: how many owners a sample has")
        if slots is not None:
            slots = checks.whole("slots", slots)
            if not pad:
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
        self.model = model
        self.selector = selector
        self.budget = budget
        self.template = template
        self.query_key = selector.nearest_to or selector.store.input_key  # a string goes in under this key
        self.units = self.settings.max_tokens
        self.pad = bool(pad)
        self.slots = slots
        self.line_name = line
        self.return_receipt = bool(return_receipt)
        self.name = "DPSampler"
        self._randomness = SecureRandomness()
        self._doubts = Doubts()
        self.exemplars = Exemplars(selector, model, template, self.units)
        self._variant = f"decoding model={model.name!r} demonstration={template.demonstration!r} {self.settings!r}"
        if selector.threshold is not None:
            self._variant += f" threshold={selector.threshold!r}"
        if selector.search_query is not None:
            copies = Pristine(boundary.seal(selector.search_query))
            self.search = PublicChain(copies, 1, limit(copies, "auto", 1, is_public=True))
            self._variant += " search_query"
        self._use_budget(stacklevel=3)
        if said := poor_plan(self):
            warnings.warn(said, PrivacyWarning, stacklevel=2)

    @property
    def InputType(self) -> Any:
        """The query: a string, or a mapping with what the template's query names."""
        return Input

    @property
    def OutputType(self) -> Any:
        """The answer, or the answer with its receipt."""
        return dict[str, Any] if self.return_receipt else str

    @classmethod
    def over_documents(
        cls,
        model: LogitsModel,
        selector: PoissonExampleSelector,
        budget: PrivacyBudget,
        *,
        instruction: str = "",
        question_tokens: int = 64,
        **settings: Any,
    ) -> DPSampler:
        """Answers to questions, written from the documents near to each: a row is one owner's best document and the
        question.

        ``selector`` has a ``threshold`` (or ``nearest_to``), under whose key a question goes in; ``instruction`` stands
        before the question. A document has to leave room for a question of ``question_tokens`` and an answer. One that
        does not has no part in answers: `document_report` counts these for the operator, and ``dpicl check-data
        --model`` names them in a data file. Split them. A longer question is refused, at no cost. ``settings`` are the
        constructor's.
        """
        question_tokens = checks.whole("question_tokens", question_tokens)
        if not isinstance(selector, PoissonExampleSelector):
            raise InvalidParameter("selector", type(selector).__name__, "a PoissonExampleSelector")
        if selector.nearest_to is None:
            raise InvalidParameter(
                "nearest_to", None, "given, or a threshold: which documents a question is answered from"
            )
        input_key = selector.store.input_key
        template = document_template(input_key, selector.nearest_to, instruction)
        made = cls(model, selector, budget, template=template, **settings)
        made._documents = Documents(model, template, input_key, question_tokens, made.units)
        made.exemplars.longest = made._documents.longest
        if notes.shown():
            found = made.document_report()
            notes.log.warning(
                "%d of %d documents are longer than about %d tokens, or no Unicode, and have no part in answers",
                found.left_out,
                found.documents,
                found.most_tokens,
            )
        return made

    def document_report(self) -> DocumentReport:
        """Count the documents of the store that are left out since the model does not read them. Reads all of them.

        PRIVATE: for the operator. Raises `InvalidParameter` for a sampler that `over_documents` has not made.
        """
        if self._documents is None:
            raise InvalidParameter("sampler", "DPSampler(...)", "one that DPSampler.over_documents has made")
        return report_on(self.selector.store, self._documents)

    def __repr__(self) -> str:
        return f"DPSampler(model={self.model.name!r}{self.selector.shown_rate}, {self.settings!r})"

    # -- Runnable -----------------------------------------------------------------------------------------------------

    def invoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """One answer."""
        return self._call_with_config(lambda values: run(self._answered(values)), input, config)

    async def ainvoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """One answer. A cancelled call keeps its charge."""
        return await self._acall_with_config(lambda values: arun(self._answered(values)), input, config)

    def stream(
        self,
        input: Input,
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """The answer's text as its tokens are drawn; with ``return_receipt`` mappings, the receipt last.

        A reader who stops early leaves spent what was charged.
        """

        def pieces(inputs: Iterator[Input]) -> Iterator[Any]:
            with contextlib.closing(stream(self._answered(next(inputs)))) as made:
                yield from map(self._piece, made)

        yield from self._transform_stream_with_config(iter([input]), pieces, config)

    async def astream(
        self,
        input: Input,
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
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
        self,
        inputs: list[Input],
        config: Configs = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
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
        self,
        inputs: list[Input],
        config: Configs = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
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
        if not return_exceptions:
            for value in inputs:  # each is checked again when its turn comes
                request = checked(self, value)
                known = self.calls_public(request) and request.line.replayed([request.id], request.principal)
                if known == [None] and request.line.remaining(request.principal):
                    yield from self.prepare(request)
        failed: list[Exception] = []
        configs = get_config_list(config, len(inputs))
        found = yield together(list(map(one, inputs, configs)), configs[0].get("max_concurrency") or AT_ONCE)
        answers = [answer for (answer,) in found]
        if return_exceptions or not failed:
            return answers
        if not isinstance(failed[0], PrivacyBudgetExceeded) or len(answers) == 1:
            raise failed[0]
        made = sum(not isinstance(answer, Exception) for answer in answers)
        raise PrivacyBudgetExceeded(f"{failed[0]} for this one of a batch of {len(answers)}; {made} were answered")
