"""DPSampler: a private answer, token by token (DPS-MOZO), as a Runnable that may stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.utils import AddableDict

from langchain_dpicl.budget import Budget
from langchain_dpicl.calls.flow import Chunk, Flow, arun, astream, run, stream
from langchain_dpicl.decoding.answer import Settings
from langchain_dpicl.decoding.batch import aone_by_one, one_by_one
from langchain_dpicl.decoding.model import LogitsModel
from langchain_dpicl.decoding.steps import SamplerRelease
from langchain_dpicl.decoding.template import DemonstrationTemplate
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.release.base import check_budget
from langchain_dpicl.release.transaction import checked, transact
from langchain_dpicl.selection.selector import PoissonExampleSelector

Input = str | Mapping[str, Any]


class DPSampler(SamplerRelease):
    """Writes an answer whose every token is drawn privately from the mixed opinions of a fresh sample of owners.

    For each token every owner takes part with the plan's rate, by its own coin, and shows the model one demonstration.
    What a demonstration changes in the next-token logits is clipped to the plan's range B, over the ``top_k`` tokens
    that the model finds likeliest WITHOUT any demonstration; the clipped changes are added to ``shots`` times the
    public logits, and one token is drawn from exactly that distribution (see `mixing` for the proof). Neighbouring data
    sets: one owner added or removed. Nothing touches the distribution afterwards.

    Parameters
    ----------
    model
        A `LogitsModel`. Of the model itself nothing is private.
    selector
        Its ``store`` holds the exemplars, its ``rate`` is the probability with which an owner takes part in a token.
        ``members`` counts for nothing but in that rate (members * shots / owners).
    budget
        Has a line of mechanism "tokens", which counts tokens. An answer charges ``max_tokens`` before its first token
        and gives back those that were never sampled when it ends. Where fewer are left, it charges these and may end
        there: its receipt's outcome then says so. `PrivacyBudgetExceeded` where none is left.
    template
        How demonstrations and queries read; default: the store's keys with their values (`DemonstrationTemplate.of`).
    max_tokens, min_tokens
        The longest answer, and how many tokens it has before it may end: before, no token that ends it (an end token,
        or one that makes a ``stop``) is a candidate. Small models without a demonstration often end at once, and what
        they find unlikely no demonstration can bring about within B.
    top_k
        How many candidates a token has.
    shots
        kappa, how much the public logits count; it should be near the number of owners that a sample has. A public
        constant, so it never comes from the number of owners in the store: default ``members * shots`` of a selector
        that was given ``shots``; one that was given ``rate`` does not know it.
    temperature
        Divides all logits BEFORE they are clipped, so the range of what an owner changes in the exponent is B still.
    cap
        The largest weight of a demonstration's change, where clipping leaves room.
    stop
        Texts that end the answer, which ends before them. They are looked for in released text. Default: what ends a
        demonstration in the template (an empty line). For answers of one line give ``"\n"``.
    pad
        Fill the calls for a token with public rows up to a constant number, so that a token is one call of so many rows
        whatever its sample (but with probability 2^-40 a token: see `draws.slots_for`). That is several times the work:
        21 rows for 4 shots. It does no more: before the first token the model reads the demonstrations of the whole
        answer, in as many forward passes as their number, their lengths and its cache ask for, which shows to whoever
        times an answer or counts passes. With False a token is one call still, of as many rows as it has owners.
    slots
        That number of rows; default: by the binomial tail of a sample, at the frozen plan's rate and number of owners.
    line, return_receipt
        As for `DPAggregate`.

    A demonstration that does not fit the context, or that the template cannot render, has no part in any token; one on
    which the model fails adds nothing to this token, and the answer goes on. Only the zero-shot prompt, which is
    public, may fail an answer. As everywhere, answers are replayed from the ledger for equal queries, callers are named
    with `acting_for`, and errors before the charge cost nothing.
    """

    comes_in_pieces = True

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
        if selector.threshold is not None or budget.tickets:
            raise InvalidParameter("threshold", selector.threshold, "None for a DPSampler: every owner may be asked")
        if template is not None and not isinstance(template, DemonstrationTemplate):
            raise InvalidParameter("template", type(template).__name__, "a DemonstrationTemplate")
        template = DemonstrationTemplate.of(selector.store) if template is None else template
        settings = Settings(
            max_tokens=checks.whole("max_tokens", max_tokens),
            min_tokens=checks.whole("min_tokens", min_tokens, at_least=0, at_most=max_tokens),
            top_k=checks.whole("top_k", top_k, at_most=model.vocabulary),
            shots=_kappa(shots, selector),
            temperature=checks.real("temperature", temperature, at_least=0.01, at_most=100.0),
            cap=checks.real("cap", cap, at_least=0.0, at_most=100.0),
            stop=_stops((template.ending or ()) if stop is None else stop),
        )
        if slots is not None:
            slots = checks.whole("slots", slots)
            if not pad:
                raise InvalidParameter("slots", slots, "None where pad is False")
        super().__init__(model, selector, budget, template, settings, bool(pad), slots, line)
        self.return_receipt = bool(return_receipt)
        self.name = "DPSampler"
        self._use_budget(stacklevel=3)

    @property
    def InputType(self) -> Any:
        """The query: a string, or a mapping with what the template's query names."""
        return Input

    @property
    def OutputType(self) -> Any:
        """The answer, or the answer with its receipt."""
        return dict[str, Any] if self.return_receipt else str

    @property
    def query_key(self) -> str:
        """The store's ``input_key``, under which a string goes in."""
        return self.selector.store.input_key

    # -- Runnable -----------------------------------------------------------------------------------------------------

    def invoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """One answer."""
        return self._call_with_config(lambda value: self._told(*run(transact(self, value))), input, config)

    async def ainvoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """One answer. A cancelled call keeps its charge."""

        async def one(value: Input) -> Any:
            return self._told(*await arun(transact(self, value)))

        return await self._acall_with_config(one, input, config)

    def batch(
        self,
        inputs: list[Input],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """An answer for each input, each charged on its own when it begins; all are checked before the first charge.

        How many are under way at once is the config's ``max_concurrency``; with 1 they are charged in their order. Each
        holds ``max_tokens`` while it is under way, so fewer at once go further where the budget is nearly spent.

        The first error is raised when the answers under way have ended, and no other begins. What was answered by then
        stays charged: asked again, it is replayed at no cost (unless ``replay=False``). With ``return_exceptions=True``
        every input has its answer or its error, `PrivacyBudgetExceeded` where nothing was left for it.
        """
        if not return_exceptions:
            self._check_all(inputs)
        return one_by_one(self.invoke, inputs, config, return_exceptions)

    async def abatch(
        self,
        inputs: list[Input],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """`batch`, asynchronously. A cancelled batch keeps the charges of the answers that have begun."""
        if not return_exceptions:
            await asyncio.to_thread(self._check_all, inputs)
        return await aone_by_one(self.ainvoke, inputs, config, return_exceptions)

    def _check_all(self, inputs: Sequence[Input]) -> None:
        """Raise what a request would raise before its charge. Each is checked again when its turn comes."""
        for value in inputs:
            request = checked(self, value)
            known = self.calls_public(request) and request.line.replayed([request.id], request.principal)
            if known == [None] and request.line.remaining(request.principal):
                run(self.prepare(request))

    def stream(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """The answer's text as its tokens are drawn; with ``return_receipt`` mappings, the receipt last.

        Whoever stops reading keeps what was charged spent.
        """
        yield from self.transform(iter([input]), config)

    async def astream(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        """`stream`, asynchronously."""

        async def one() -> AsyncIterator[Input]:
            yield input

        async for chunk in self.atransform(one(), config):
            yield chunk

    def transform(self, input: Iterator[Input], config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """`stream`, once the whole input is there."""
        yield from self._transform_stream_with_config(input, self._transform, config)

    async def atransform(
        self, input: AsyncIterator[Input], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """`transform`, asynchronously."""
        async for chunk in self._atransform_stream_with_config(input, self._atransform, config):
            yield chunk

    def _transform(self, input: Iterator[Input]) -> Iterator[Any]:
        yield from stream(self._pieces(_joined(list(input))))

    async def _atransform(self, input: AsyncIterator[Input]) -> AsyncIterator[Any]:
        whole = _joined([part async for part in input])
        async with contextlib.aclosing(astream(self._pieces(whole))) as pieces:
            async for piece in pieces:
                yield piece

    def _pieces(self, values: Any) -> Flow[None]:
        """An answer, whose last chunk is the receipt if that is wanted."""
        _, receipt = yield from transact(self, values)
        if self.return_receipt:
            yield Chunk(AddableDict(receipt=receipt))

    def __repr__(self) -> str:
        return f"DPSampler(model={self.model.name!r}{self.selector.shown_rate}, {self.settings!r})"


def _kappa(shots: float | None, selector: PoissonExampleSelector) -> float:
    """A public number: never the number of owners that the store holds now, which one owner changes."""
    expected = selector.expected_owners if shots is None else shots
    if expected is None:
        raise InvalidParameter("shots", None, "given where the selector was given rate: how many owners a sample has")
    return checks.real("shots", expected, above=0.0, at_most=1e6)


def _stops(stop: object) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else (None,)
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidParameter("stop", stop, "non-empty texts")
    return tuple(str(text) for text in texts)


def _joined(parts: list[Input]) -> Any:
    """The input, whole."""
    if parts and all(isinstance(part, Mapping) for part in parts):
        return {key: value for part in parts if isinstance(part, Mapping) for key, value in part.items()}
    if parts and all(isinstance(part, str) for part in parts):
        return "".join(str(part) for part in parts)
    return parts[0] if len(parts) == 1 else None
