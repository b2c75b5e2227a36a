"""The sealed release: `DPAggregate`, and the Runnable that ``ensemble | DPAggregate(...)`` becomes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, overload

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, get_config_list
from pydantic import BaseModel, ConfigDict, RootModel
from typing_extensions import TypeVar

from langchain_dpicl.aggregators import NoisyVote
from langchain_dpicl.aggregators.base import Aggregator, T
from langchain_dpicl.budget import BudgetLine, PrivacyBudget, Receipt, Replayed
from langchain_dpicl.calls.flow import Either, Flow, arun, run, together
from langchain_dpicl.errors import InvalidParameter, MembersAbstained, ModelUnavailable, PrivacyBudgetExceeded
from langchain_dpicl.privacy.choice import best_vote, refuse_noise
from langchain_dpicl.privacy.lines import PlanLine, family_of
from langchain_dpicl.privacy.mechanisms import OWN_CALLS
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness
from langchain_dpicl.private import boundary
from langchain_dpicl.release.base import AnswerWithReceipt, AnyRelease, Configs, check_budget
from langchain_dpicl.release.ensemble import Aggregation, PrivateEnsemble
from langchain_dpicl.release.rehearsal import Rehearsal
from langchain_dpicl.release.transaction import (
    Charged,
    Find,
    Request,
    charge,
    checked,
    give_up,
    refuse_langserve,
    settle,
    transact,
)
from langchain_dpicl.release.watched import PublicChain

_PROOF_SECONDS = 60


Plain = TypeVar("Plain")
"""The release of an aggregator, if the answer comes with a receipt."""


class DPAggregate(Aggregation["SealedRelease[T]"], Generic[T]):
    """An aggregator bound to a budget: the only way from private answers to a public one.

    Parameters
    ----------
    aggregator
        The mechanism: ``NoisyVote(labels)``, ``CandidateVote(...)``,
        ``EmbeddingMean(...)``, ``Structured(Model)``, ``NoisyMedian(low, high)``,
        ``NoisyMean(low, high)``, ``Keywords.joint_em(...)``, ``Keywords.ptr(...)``.
    budget
        Counts every release; its plan sets the noise.
    line
        The line of the budget that counts these releases, if it has several.
    return_receipt
        Answer ``{"answer": ..., "receipt": {...}}`` instead of the bare answer.

    Use it as ``ensemble | DPAggregate(...)``: that gives a `SealedRelease`.
    """

    _refusal = "a DPAggregate runs only as part of `ensemble | DPAggregate(...)`, where the votes stay sealed"

    @overload
    def __init__(
        self,
        aggregator: Aggregator[T],
        budget: PrivacyBudget,
        *,
        line: str | None = ...,
        return_receipt: Literal[False] = ...,
    ) -> None: ...

    @overload
    def __init__(
        self: DPAggregate[AnswerWithReceipt[Plain]],
        aggregator: Aggregator[Plain],
        budget: PrivacyBudget,
        *,
        line: str | None = ...,
        return_receipt: Literal[True],
    ) -> None: ...

    @overload
    def __init__(
        self: DPAggregate[Any],
        aggregator: Aggregator[Any],
        budget: PrivacyBudget,
        *,
        line: str | None = ...,
        return_receipt: bool,
    ) -> None: ...

    def __init__(
        self,
        aggregator: Aggregator[Any],
        budget: PrivacyBudget,
        *,
        line: str | None = None,
        return_receipt: bool = False,
    ) -> None:
        if not isinstance(aggregator, Aggregator):
            raise InvalidParameter("aggregator", type(aggregator).__name__, "an Aggregator such as NoisyVote")
        check_budget(budget, return_receipt)
        self.aggregator = aggregator
        self.budget = budget
        self.line = line
        self.return_receipt = bool(return_receipt)

    def _fused(self, ensemble: PrivateEnsemble) -> SealedRelease[T]:
        return SealedRelease(ensemble, self)

    def __repr__(self) -> str:
        return f"DPAggregate({self.aggregator!r}, {self.budget!r})"


class SealedRelease(AnyRelease[T]):
    """One sealed step: the caller's mapping in, a differentially private answer out.

    Tracers, callbacks and streams see the input and the release; sampling, members and
    votes run inside the private boundary. Works with invoke, batch, stream (one chunk) and
    their async twins, and pipes on as plain LCEL.

    Raises `PrivacyBudgetExceeded` when the plan is spent (costs nothing),
    `InvalidParameter` for a bad request (costs nothing), `UnsafeConfigurationError` if
    globals would carry private text out (costs nothing), `ModelUnavailable` and
    `MembersAbstained` when the model is down, `ReleaseFailed` for a fault on the private
    side (charged).
    """

    def __init__(self, ensemble: PrivateEnsemble, aggregate: DPAggregate[T]) -> None:
        self.ensemble = ensemble
        self.selector = ensemble.selector
        self.aggregator = aggregate.aggregator
        self.budget = aggregate.budget
        self.line_name = aggregate.line
        self.return_receipt = aggregate.return_receipt
        self._check_fit()
        self.mechanism = self.aggregator.mechanism
        self.choices = self.aggregator.choices
        self.options = dict(self.aggregator.options)
        if OWN_CALLS in family_of(self.mechanism).fixed():
            self.options[OWN_CALLS] = float(self.selector.own_calls)  # also 0: a line's noise is for one of the two
        self.query_key = self.selector.nearest_to or "input"
        self.name = "SealedRelease"
        if self.budget.tickets and not self.selector.gated:
            raise InvalidParameter(
                "threshold",
                None,
                "given if the budget has tickets=True (-1 makes every owner eligible), or a filter",
            )
        self._randomness: Randomness = SecureRandomness()
        self._rules = self.selector.rules or None
        self._bound_aggregator: tuple[BudgetLine, Aggregator[Any]] | None = None
        self._candidates: PublicChain | None = None  # chain, number, time limit
        if (calls := self.aggregator.public_calls()) is not None:
            self._candidates = ensemble.public_chain(*calls)
        self._variant = f"{self.aggregator.variant} members={ensemble.members}"
        if self.selector.calls is not None:
            self._variant += f" calls={self.selector.calls!r}"
        self._variant += ensemble.variant
        if self.selector.threshold is not None:
            self._variant += f" threshold={self.selector.threshold!r}"
        if self.selector.search_query is not None:
            self._variant += " search_query"
        self._use_budget(stacklevel=5)

    def _check_fit(self) -> None:
        """Refuse an aggregator that does not go with this ensemble."""
        kind = type(self.aggregator).__name__
        if (self.aggregator.task == "none") == self.ensemble.has_member:
            raise InvalidParameter(
                "aggregator",
                kind,
                "a LabelVote without a member, another aggregator with one",
            )
        if self.selector.own_calls and not self.aggregator.takes_own_calls:
            raise InvalidParameter(
                "calls",
                self.selector.calls,
                "members=, or calls= with max_calls=: its promise is proved for outputs that are replaced alone "
                f"({kind})",
            )
        if not self.ensemble.has_member and self.budget.on_exhausted == "zero_shot":
            raise InvalidParameter(
                "on_exhausted",
                "zero_shot",
                '"raise" without a member: nobody could answer',
            )

    def _bound_to(self, line: BudgetLine) -> Aggregator[Any]:
        """The aggregator under the plan's line: a copy for each release, which may change it."""
        if self._bound_aggregator is None or self._bound_aggregator[0] is not line:
            crowd = self.selector.crowd(line.rate, line.plan_line.owners)
            self._bound_aggregator = line, self.aggregator.under(line.mechanism, crowd)
        return copy.copy(self._bound_aggregator[1])

    def _asked(self) -> tuple[str, float]:
        """A plan that is not frozen yet chooses a vote's mechanism, at the rate that it will have."""
        mechanism, rate = super()._asked()
        vote = self.aggregator
        if len(self.choices) < 2 or self.line_name in self.choices:
            return mechanism, rate
        if isinstance(vote, NoisyVote) and self.budget.asked(self.line_name, mechanism) is None:
            crowd = self.selector.crowd(rate, self.selector.owners)
            share = self.budget.share(self.line_name, mechanism)
            mechanism = best_vote(*share, rate, crowd, len(vote.labels), vote.lead)
        return mechanism, rate

    def vet(self, line: PlanLine) -> None:
        """Refuse a plan that is all noise."""
        crowd = self.selector.crowd(line.rate, line.owners)
        refuse_noise(
            line,
            self.aggregator.under(line.mechanism, crowd).overturned(line.parameter) or 0.0,
            crowd,
            self.budget.tickets,
        )

    @property
    def InputType(self) -> Any:
        """A mapping of names to values: what the member chain needs, less ``examples``."""
        return dict[str, Any]

    def get_input_schema(self, config: RunnableConfig | None = None) -> type[BaseModel]:
        """Any mapping but one that fills in the examples itself; its schema names the keys that it must have."""
        needed = self.ensemble.needs
        shape: dict[str, Any] = {"type": "object", "propertyNames": {"not": {"const": "examples"}}}
        if needed:
            texts = {self.selector.nearest_to: {"type": "string"}}
            shape |= {
                "required": sorted(needed),
                "properties": {key: texts.get(key, {}) for key in sorted(needed)},
            }
        return self._schema({**shape, "title": f"{self.name}Input"})

    def _schema(self, shape: dict[str, Any]) -> type[BaseModel]:
        kind: Any = RootModel[self.InputType]  # type: ignore[name-defined]
        return type(
            str(shape["title"]),
            (kind,),
            {"model_config": ConfigDict(json_schema_extra=shape), "__module__": __name__},
        )

    @property
    def OutputType(self) -> Any:
        """The release's type, or the answer with its receipt."""
        answer: Any = self.aggregator.release_type
        return AnswerWithReceipt[answer] if self.return_receipt else answer

    def __repr__(self) -> str:
        return f"SealedRelease({self.ensemble!r}, {self.aggregator!r})"

    # -- the steps of its transaction ----------------------------------------------------------------------------------

    def check(self, values: Any) -> Request:
        """The member's own checks, and the line of the plan."""
        asked = self.ensemble.check_request(values)
        request = self.request(asked, self.line(), asked, self._variant, asked, self._rules)
        self.ensemble.doubts.asked(request.caller)
        return request

    def _doubtful(self, request: Request) -> bool:
        """True if the caller has doubt about the members: from a release or, if releases do not tell, from time."""
        if not self.ensemble.has_member:
            return False
        doubt = self.ensemble.doubts.of(request.caller)
        return doubt.is_due(_PROOF_SECONDS) and (doubt.suspected or not self._tells(request))

    def _tells(self, request: Request) -> bool:
        """True if a release shows that the members fail."""
        return self._bound_to(request.line).tells(self.ensemble.members, request.line.parameter)

    def calls_public(self, request: Request) -> bool:
        """True if a query asks for calls, of a model or of an embedding, before its charge."""
        asks = self._candidates is not None or self.selector.nearest_to is not None
        return asks or self.ensemble.untried or self._doubtful(request)

    def prepare(self, request: Request) -> Flow[tuple[Aggregator[Any], Any]]:
        """The aggregator for this query, and the search of the selector: its embedding and filter."""
        values = request.asked
        if self.selector.nearest_to is None:
            query = self.selector.seek(None, request.wanted)
        else:
            text = yield from self.ensemble.search_text(values)
            query = yield from self.looked_for(request, text)
        answers: Sequence[object] = ()
        if self._candidates is not None:
            chain, count, timeout = self._candidates
            answers = yield self.ensemble.calls(
                chain,
                [self.ensemble.public_request(values) for _ in range(count)],
                timeout=timeout,
            )
        aggregator = self._bound_to(request.line).prepare(values, request.line.options, answers)
        if self.ensemble.untried:
            yield from self.ensemble.check_member(
                values,
                aggregator,
                request.caller,
                partial(self._tells, request),
            )
        if self.ensemble.unread:
            self.ensemble.check_reading()
        if self._doubtful(request):
            yield from self.ensemble.check_health(values, aggregator, request.caller)
        return aggregator, query

    def ask_model(self, values: Any = None) -> Flow[type[BaseException] | None]:
        if not self.ensemble.has_member:
            return None
        if values is None:
            values = dict.fromkeys({*self.ensemble.needs, self.query_key, self.store.input_key}, "ready?")
        return (yield from self.ensemble.ask(values))

    def eligible(self, ready: Any) -> Find | None:
        """Finds the owners near enough to the query, with an exemplar that passes its filter."""
        return partial(self.selector.eligible, ready[1])

    def work(self, charged: Charged) -> Flow[Any]:
        """Sample, call the members, aggregate."""
        aggregator, query = charged.ready
        line = charged.request.line
        outputs = yield from self.ensemble.outputs(
            charged.request.asked,
            line.rate,
            aggregator,
            query,
            charged.participants,
        )
        return (yield partial(aggregator.aggregate, outputs, line.parameter, self._randomness))

    def kept(self, charged: Charged, release: Any) -> tuple[str, str | None, int]:
        """The outcome and the text of the release, by the aggregator."""
        outcome = self.aggregator.outcome(release)
        if release is None:
            return outcome, None, 0
        return outcome, self.aggregator.dump(release), 0

    def answer(self, charged: Charged, release: Any, receipt: Receipt) -> Flow[Any]:
        """The release, or `MembersAbstained` if it says so."""
        yield from ()
        if receipt["outcome"] != "released":  # ask a public question before this caller's next charge
            self.ensemble.doubts.of(charged.request.caller).suspected = True
        if release is None:
            raise MembersAbstained
        return release

    def replay(self, request: Request, known: Replayed) -> Flow[Any]:
        """The aggregator reads what it wrote."""
        yield from ()
        return self.aggregator.load(known.answer, request.asked)

    def unreleased(self, request: Request) -> Flow[tuple[Any, Receipt]] | None:
        """The public member's answer, if the deployer asked for it."""

        def zero_shot() -> Flow[tuple[Any, Receipt]]:
            ensemble = self.ensemble
            (output,) = yield ensemble.calls(
                ensemble.copies,
                [ensemble.public_request(request.asked)],
                timeout=ensemble.timeout,
            )
            answer = None if output is boundary.ABSTAIN else self.aggregator.zero_shot(output, request.asked)
            if answer is None:
                raise ModelUnavailable("the budget is spent, and the member's zero-shot answer is not usable")
            return answer, request.line.unreleased_receipt(request.principal)

        return zero_shot() if self.budget.on_exhausted == "zero_shot" else None

    def rehearse(self, public_examples: Sequence[Any], question: Any) -> Rehearsal:
        """Run the member on public stand-ins, and read its outputs, at no cost: see `PrivateEnsemble.rehearse`."""
        return self.ensemble.rehearse(public_examples, question, self.aggregator)

    async def arehearse(self, public_examples: Sequence[Any], question: Any) -> Rehearsal:
        """`rehearse`, asynchronously."""
        return await self.ensemble.arehearse(public_examples, question, self.aggregator)

    # -- Runnable -----------------------------------------------------------------------------------------------------

    def invoke(self, input: str | dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> T:
        """One release."""
        return self._call_with_config(self._release, input, config)

    async def ainvoke(self, input: str | dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> T:
        """One release. A cancelled call keeps its charge."""
        return await self._acall_with_config(self._arelease, input, config)

    def _release(self, values: Any) -> Any:
        return self._told(*run(transact(self, values)))

    async def _arelease(self, values: Any) -> Any:
        boundary.check_loop()
        return self._told(*await arun(transact(self, values)))

    def batch(
        self, inputs: list[dict[str, Any]], config: Configs = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[T]:
        """n releases, charged together before the first member is called: all n, or none and `PrivacyBudgetExceeded`.

        Equal inputs are released once, and those that the ledger can answer cost nothing
        (unless ``replay=False``). With ``return_exceptions=True`` each is checked and
        charged on its own instead.
        """
        if return_exceptions or not inputs:
            return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        return run(self._batch(inputs, config, kwargs))

    async def abatch(
        self, inputs: list[dict[str, Any]], config: Configs = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[T]:
        """`batch`, asynchronously."""
        if return_exceptions or not inputs:
            return await super().abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        boundary.check_loop()
        return await arun(self._batch(inputs, config, kwargs))

    def _batch(self, inputs: list[dict[str, Any]], config: Configs, options: Mapping[str, Any]) -> Flow[list[Any]]:
        """All are checked, all are charged or none, and each is answered in a run of its own."""
        configs = get_config_list(config, len(inputs))
        at_once = ensure_config(configs[0]).get("max_concurrency")
        refuse_langserve(configs[0])
        requests = [checked(self, values) for values in inputs]
        try:
            entries = yield from charge(self, requests, at_once)
        except PrivacyBudgetExceeded:
            if self.budget.on_exhausted == "raise":
                raise
            entries = []
        if not entries:
            answers = yield Either(
                partial(super().batch, inputs, config, **options),
                partial(super().abatch, inputs, config, **options),
            )
            return list(answers)
        seen: dict[int, int] = {}  # equal queries share a charge: the first of them is released
        first = [seen.setdefault(id(charged.entry), i) for i, charged in enumerate(entries)]
        settled: dict[int, tuple[Any, Receipt]] = {}

        def one(i: int) -> Flow[Any]:
            if first[i] == i:
                settled[i] = yield from settle(self, entries[i])
            else:
                release, receipt = settled[first[i]]
                settled[i] = (
                    self.aggregator.load(self.aggregator.dump(release), requests[i].asked),
                    {**receipt, "replayed": True},
                )
            return self._told(*settled[i])

        alone = [i for i in range(len(inputs)) if first[i] == i]
        try:
            found = yield together([self._traced(one(i), inputs[i], configs[i]) for i in alone], at_once)
        except Exception:
            raise
        except BaseException:  # a cancellation: what is recorded by now stays, the rest will have no answer
            for i in alone:
                give_up(entries[i])
            raise
        told = dict(zip(alone, found, strict=True))
        for i in range(len(inputs)):
            if i not in told:
                told[i] = yield from self._traced(one(i), inputs[i], configs[i])
        return [told[i] for i in range(len(inputs))]

    def _traced(self, flow: Flow[Any], value: Any, config: RunnableConfig) -> Flow[Any]:
        """The flow as a run of its own, for the callbacks of one input of a batch."""
        return (
            yield Either(
                lambda: self._call_with_config(lambda _: run(flow), value, config),
                lambda: self._acall_with_config(lambda _: arun(flow), value, config),
            )
        )
