"""The working half of a sealed release: the ensemble's public trials, its private calls, its transaction's steps."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from langchain_core.runnables import Runnable, RunnableSequence
from langchain_core.runnables.base import coerce_to_runnable

from langchain_dpicl.aggregators.base import Aggregator, PublicCalls
from langchain_dpicl.budget import Budget, Receipt, Replayed
from langchain_dpicl.calls.flow import Either, Flow, arun, run
from langchain_dpicl.errors import InvalidParameter, MembersAbstained, ModelUnavailable
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness
from langchain_dpicl.private import boundary
from langchain_dpicl.private.limits import TimeLimit, Timeout
from langchain_dpicl.private.sealing import seal_public
from langchain_dpicl.private.sharing import MadeUp, Snapshot, other_words, public_copy, refuse_changes, refuse_kept
from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.release.doubt import Doubts
from langchain_dpicl.release.transaction import Charged, Find, Release, Request
from langchain_dpicl.selection.selector import Examples, PoissonExampleSelector
from langchain_dpicl.store.base import Numbers, PrivateStore
from langchain_dpicl.store.vectors import Vectors

_PROOF_SECONDS = 60


class Members:
    """A selector and a sealed member chain: what `PrivateEnsemble` does, which documents the parameters."""

    def __init__(
        self,
        selector: PoissonExampleSelector,
        member: Any,
        *,
        max_concurrency: int | None = None,
        timeout: Timeout = "auto",
        public: Sequence[object] = (),
        allow_state: Sequence[object] = (),
    ) -> None:
        if not isinstance(selector, PoissonExampleSelector):
            raise InvalidParameter("selector", type(selector).__name__, "a PoissonExampleSelector")
        self.selector = selector
        self.members = selector.members
        at_once = min(selector.members, 64) if max_concurrency is None else max_concurrency
        self.max_concurrency = checks.whole("max_concurrency", at_once)
        self.public = boundary.check_public(public)
        if not isinstance(allow_state, (list, tuple)):
            raise InvalidParameter("allow_state", type(allow_state).__name__, "a list of objects or names")
        self.allow_state = tuple(allow_state)
        sealed = boundary.seal(coerce_to_runnable(member), public=self.public, allow_state=self.allow_state)
        limit = TimeLimit(sealed, timeout)
        self.check_sync, self.timeout = limit.check_sync, limit.seconds
        self._member = limit.prepared
        self.public_member: Runnable[Any, Any]  # another copy, for public calls: private calls write nothing into it
        self.public_member, _ = public_copy(self._member, self.allow_state)
        self._trying = threading.Lock()
        self.unproven = bool(Snapshot(self._member, self.allow_state).places)
        """Whether the member could share state between its calls, and has not shown yet that it does not."""
        first = self._member
        while isinstance(first, RunnableSequence):
            first = first.first
        self._needed = frozenset(getattr(first, "input_variables", ())) - {"examples"}
        self.doubts = Doubts()

    @property
    def variant(self) -> str:
        """Further public settings of the ensemble that decide its answers: none here. Part of what replay compares."""
        return ""

    def check_request(self, values: object) -> Mapping[str, Any]:
        """A copy of the caller's mapping, or `InvalidParameter`, which shows its keys alone.

        A key that the member's prompt needs is asked for here: without it every member would abstain, and be charged.
        """
        if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
            raise InvalidParameter("input", type(values).__name__, "a mapping of names to values")
        if "examples" in values:
            raise InvalidParameter("input", "examples", "a mapping without this key, which the ensemble fills")
        if missing := self._needed - values.keys():
            raise InvalidParameter("input", sorted(values), f"a mapping with the keys {sorted(missing)} too")
        self.selector.check_query(values)
        copied: Mapping[str, Any] | None = None
        with contextlib.suppress(Exception):
            copied = copy.deepcopy(dict(values))
        if copied is None:
            raise InvalidParameter("input", sorted(values), "a mapping whose values can be copied, for each member")
        return copied

    # -- what members share, shown by public calls --------------------------------------------------------------------

    def check_sharing(self, values: Mapping[str, Any], aggregator: Aggregator[Any]) -> Flow[None]:
        """Before the first charge: see whether two calls on public values and made-up examples leave anything behind.

        Costs nothing where the member's functions reach nothing that can be written. Raises `UnsafeConfigurationError`
        where a call wrote something that another one reads, and `ModelUnavailable` where the member fails.
        """

        def here() -> None:
            with self._trying:  # the first thread tries, the others wait for it
                run(self._trial(values, aggregator))

        if self.unproven:
            yield Either(here, lambda: arun(self._trial(values, aggregator)))

    def _trial(self, values: Mapping[str, Any], aggregator: Aggregator[Any]) -> Flow[None]:
        """Two calls on made-up examples. The first may set up what later ones use."""
        if not self.unproven:
            return
        chain, allowed = public_copy(self._member, self.allow_state)
        other = other_words(dict(values))

        def ask(values: Mapping[str, Any], examples: int) -> Flow[type[BaseException] | None]:
            return boundary.probe(chain, (values, self._made_up(examples, aggregator)), self.timeout)

        untouched = Snapshot(chain, allowed)
        failure = yield from ask(values, 1)
        before = Snapshot(chain, allowed)
        refuse_kept(untouched, before, dict(values))
        if failure is None and (yield from ask(other, 2)) is not None:
            failure = yield from ask(values, 2)  # the other words may be invalid
        refuse_changes(before, Snapshot(chain, allowed))
        boundary.seal(chain, public=self.public, allow_state=allowed)  # what the calls have set up, too
        if failure is not None:
            name = next((place.name for place in before.places.values()), "")
            raise ModelUnavailable(
                f"the member fails on made-up examples ({failure.__module__}.{failure.__qualname__}), by which it has "
                f"to show that its calls write nothing into {name}; nothing was charged. Invoke the member chain alone "
                f"to see the whole error, or allow what it shares: allow_state=[{name!r}]"
            )
        self.unproven = False

    def _made_up(self, number: int, aggregator: Aggregator[Any]) -> Examples:
        """As many examples, which no record of the store has a part in."""
        store = self.selector.store
        answers = list(getattr(aggregator, "labels", ())) or ["a made-up answer", "another made-up answer"]
        made = [MadeUp({store.input_key: other_words("a made-up example")}) for i in range(number)]
        for i, example in enumerate(made):
            if store.output_key is not None:
                example[store.output_key] = answers[(number + i) % len(answers)]
        return Examples(list(made), store.input_key, store.output_key)

    # -- the member's health, from public facts alone -----------------------------------------------------------------

    def doubtful(self, tells: bool = True, caller: str = "") -> bool:
        """Whether `check_health` would ask now. ``tells``: see `Aggregator.tells`. ``caller``: `BudgetLine.caller`."""
        return self.doubts.of(caller).is_due(math.inf if tells else _PROOF_SECONDS)

    def check_health(
        self, values: Mapping[str, Any], aggregator: Aggregator[Any], tells: bool = True, caller: str = ""
    ) -> Flow[None]:
        """If a caller has doubt about the member, call it on the query without examples before charging.

        Doubt comes from a release to this caller, or, where releases do not tell, from a minute without such a call
        for this caller (see `doubt`). Both the doubt and the call (no private example) are public to the caller. Raises
        `ModelUnavailable`, also where the aggregator could not use any answer of this kind.
        """
        if not self.doubtful(tells, caller):
            return
        failure = yield from boundary.probe(
            self.public_member, self.public_request(values), self.timeout, aggregator.check_public
        )
        self.doubts.of(caller).judge(failure is None)
        if failure is not None:
            raise ModelUnavailable(
                "the member, or the reading of its answer, fails on the query without examples "
                f"({failure.__module__}.{failure.__qualname__}); nothing was charged. "
                "Invoke the member chain alone with examples=[] to see the whole error"
            )

    def public_request(self, values: Mapping[str, Any]) -> boundary.MemberRequest:
        """The query with no example at all."""
        store = self.selector.store
        return values, Examples((), store.input_key, store.output_key)

    def public_answers(
        self, chain: Runnable[Any, Any], values: Mapping[str, Any], count: int = 1, timeout: float | None = None
    ) -> Either:
        """The answers of so many calls of a public chain to the query with no example."""
        return self._calls(chain, [self.public_request(values)] * count, timeout=timeout)

    # -- private calls -------------------------------------------------------------------------------------------------

    def outputs(
        self,
        values: Mapping[str, Any],
        rate: float,
        reader: boundary.OutputReader | None = None,
        query: Vectors | None = None,
        among: Numbers | None = None,
    ) -> Flow[list[object | boundary.Abstention]]:
        """Sample, call, and read each output. PRIVATE: the outputs are for an aggregator.

        ``query`` is what the selector's ``embed_query`` gave for the values, ``among`` are the owners who paid for it
        where owners pay.
        """
        paid = () if among is None else (among,)
        buckets = yield partial(self.selector.sample, rate, query, *paid)
        requests = [(values, bucket) for bucket in buckets]
        found: list[object | boundary.Abstention] = yield self._calls(
            self._member, requests, reader=reader, timeout=self.timeout
        )
        return found

    def run(
        self,
        values: Mapping[str, Any],
        rate: float,
        reader: boundary.OutputReader | None = None,
        query: Vectors | None = None,
        among: Numbers | None = None,
    ) -> list[object | boundary.Abstention]:
        """`outputs`, here and now. PRIVATE, and charged by nobody: for measurements on public data."""
        return run(self.outputs(values, rate, reader, query, among))

    def _calls(self, chain: Runnable[Any, Any], requests: Sequence[boundary.MemberRequest], **how: Any) -> Either:
        return boundary.private_calls(chain, requests, max_concurrency=self.max_concurrency, **how)


class MembersRelease(AnyRelease, Release):
    """The steps of an ensemble's release in its transaction. `SealedRelease` is the Runnable."""

    def __init__(
        self,
        ensemble: Members,
        aggregator: Aggregator[Any],
        budget: Budget,
        line_name: str | None,
        noise: float | None,
    ) -> None:
        self.ensemble = ensemble
        self.selector = ensemble.selector
        self.aggregator = aggregator
        self.budget = budget
        self.line_name = line_name
        self.noise = noise
        if self.budget.tickets and self.selector.threshold is None:
            bound = "given where the budget has tickets=True (-1 makes every owner eligible)"
            raise InvalidParameter("threshold", None, bound)
        self._randomness: Randomness = SecureRandomness()
        calls = self.aggregator.public_calls()
        self._public = None if calls is None else self._public_calls(calls)
        gate = "" if self.selector.threshold is None else f" threshold={self.selector.threshold!r}"
        self._variant = f"{self.aggregator.variant} members={ensemble.members}{ensemble.variant}{gate}"

    def _public_calls(self, calls: PublicCalls) -> PublicCalls:
        allowed = {"public": self.ensemble.public, "allow_state": self.ensemble.allow_state}
        limit = TimeLimit(seal_public(calls.chain, **allowed), "auto")
        self._public_timeout = None if limit.seconds is None else self.ensemble.timeout
        chain, _ = public_copy(limit.prepared, self.ensemble.allow_state)
        return PublicCalls(chain, calls.count)

    @property
    def mechanism(self) -> str:
        """The aggregator's."""
        return self.aggregator.mechanism

    @property
    def options(self) -> Mapping[str, float]:
        """The aggregator's."""
        return self.aggregator.options

    @property
    def query_key(self) -> str:
        """What the selector looks for, or "input"."""
        return self.selector.nearest_to or "input"

    @property
    def store(self) -> PrivateStore:
        """The selector's."""
        return self.selector.store

    def check(self, values: Any) -> Request:
        """The member's own checks, and the line of the plan."""
        asked = self.ensemble.check_request(values)
        request = self.request(asked, self.line(), asked, self._variant, asked)
        self.ensemble.doubts.asked(request.caller)
        return request

    def calls_public(self, request: Request) -> bool:
        """Whether a query asks for calls, of a model or of an embedding, before its charge."""
        near = self.selector.nearest_to is not None
        trying = self.ensemble.unproven or self.ensemble.doubtful(*self._health(request))
        return self._public is not None or near or trying

    def _health(self, request: Request) -> tuple[bool, str]:
        """Whether a release would tell that the members fail; and whose doubt about them counts."""
        return self.aggregator.tells(self.ensemble.members, request.line.parameter), request.caller

    def prepare(self, request: Request) -> Flow[tuple[Aggregator[Any], Any]]:
        """The aggregator for this query, and the query's embedding."""
        values, vector, answers = request.asked, None, ()
        if self.selector.nearest_to is not None:
            text = values[self.selector.nearest_to]
            vector = yield Either(partial(self.store.embed_query, text), partial(self.store.aembed_query, text))
        if self._public is not None:
            chain, count = self._public.chain, self._public.count
            answers = yield self.ensemble.public_answers(chain, values, count, self._public_timeout)
        aggregator = self.aggregator.prepare(values, request.line.options, answers)
        yield from self.ensemble.check_sharing(values, aggregator)
        yield from self.ensemble.check_health(values, aggregator, *self._health(request))
        return aggregator, vector

    def eligible(self, ready: Any) -> Find | None:
        """Finds the owners near enough to the query."""
        return None if ready is None or ready[1] is None else partial(self.selector.eligible, ready[1])

    def work(self, charged: Charged) -> Flow[Any]:
        """Sample, call the members, aggregate."""
        (aggregator, vector), line = charged.ready, charged.request.line
        outputs = yield from self.ensemble.outputs(
            charged.request.asked, line.rate, aggregator, vector, charged.participants
        )
        return (yield partial(aggregator.aggregate, outputs, line.parameter, self._randomness))

    def kept(self, charged: Charged, release: Any) -> tuple[str, str | None, int]:
        """The aggregator says what became of the release."""
        return self.aggregator.outcome(release), None if release is None else self.aggregator.dump(release), 0

    def answer(self, charged: Charged, release: Any, receipt: Receipt) -> Flow[Any]:
        """The release, or `MembersAbstained` where it says so."""
        yield from ()
        if self.aggregator.outcome(release) != "released":  # ask a public question before this caller's next charge
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
        return self._zero_shot(request) if self.budget.on_exhausted == "zero_shot" else None

    def _zero_shot(self, request: Request) -> Flow[tuple[Any, Receipt]]:
        ensemble = self.ensemble
        (output,) = yield ensemble.public_answers(ensemble.public_member, request.asked, timeout=ensemble.timeout)
        answer = None if output is boundary.ABSTAIN else self.aggregator.zero_shot(output, request.asked)
        if answer is None:
            raise ModelUnavailable("the budget is spent, and the member's zero-shot answer is not usable")
        return answer, request.line.unreleased_receipt(request.principal)
