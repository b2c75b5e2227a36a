"""The ensemble: a selector and a member chain, which only a `DPAggregate` may bring to an answer."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from langchain_core.runnables import Runnable, RunnableConfig, RunnableSequence
from langchain_core.runnables.base import coerce_to_runnable

from langchain_dpicl.aggregators.base import Aggregator
from langchain_dpicl.calls import threads
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, UnsafeConfigurationError
from langchain_dpicl.privacy import checks
from langchain_dpicl.private import boundary
from langchain_dpicl.private.limits import TimeLimit, Timeout
from langchain_dpicl.private.markers import Closed
from langchain_dpicl.private.sharing import MadeUp, other_words, public_copy, refuse_changes, refuse_kept, snapshot
from langchain_dpicl.release.doubt import Doubts
from langchain_dpicl.selection.selector import Examples, PoissonExampleSelector
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.intake import Vectors

if TYPE_CHECKING:
    from langchain_dpicl.release.aggregate import SealedRelease

_REFUSAL = (
    "a PrivateEnsemble shows private answers: it runs only inside `ensemble | DPAggregate(...)` "
    "(with steps before it, write `steps | (ensemble | DPAggregate(...))`)"
)

_PROOF_SECONDS = 60


class PrivateEnsemble(Closed, Runnable[dict[str, Any], Any]):
    """N parallel calls of ``member``, each with the bucket that ``selector`` drew for it.

    Parameters
    ----------
    selector
        Draws the buckets; its ``members`` is N.
    member
        Any Runnable (or function, or mapping of Runnables). It gets the caller's input mapping plus ``examples``: a
        list of mappings, empty for an empty bucket, so that the zero-shot prompt is asked. N calls are made for every
        release, whatever was sampled. A member that raises, or whose answer is not usable, abstains.
    max_concurrency
        How many calls run at once. Default: all N, at most 64. Not more than your model server answers at once: a
        request that waits in the server is on its call's clock. The embedded model needs no limit.
    timeout
        Seconds that one call may take; the member then abstains, and no other call begins in its place before its
        request has ended at the model. It counts the call's own work, from its own start: never its wait for a thread,
        for the embedded model's slot, or for a server that asks it to wait (HTTP status 429: the request is repeated,
        for ten minutes at most). Default "auto": 120 where every model of the member can be ended so (the embedded one,
        and those of ``langchain-openai``), else None. None: no limit. Raises `InvalidParameter` for a model that
        computes in this process; a model with an asynchronous call of its own keeps it in ``ainvoke`` and ``abatch``
        alone. A model with a ``rate_limiter`` takes no limit. The clock cannot tell a call's work from its wait for
        code that blocks the event loop or holds the interpreter's lock, for an HTTP client's pool of connections that
        is smaller than ``max_concurrency``, or for public calls of the embedded model: one member can make others late
        there. What hangs keeps its thread.
    public
        The retrievers, vector stores, example selectors and document stores that the member may search, since nobody's
        private text is in them. Any other is refused: every member would find the same owners' documents there.
    allow_state
        What members may share although they change it, such as a rate limiter: objects, or names as the refusal shows
        them. A chain that reads there what another call wrote voids the guarantee; name nothing that holds prompts,
        examples, answers or facts about them.

    ``ensemble | DPAggregate(...)`` fuses into one sealed Runnable. Anything else, or invoking it alone, raises
    `UnsafeConfigurationError`, since every step that LCEL can see is traced. The member is copied with its models'
    caches, verbosity and callbacks off. A member that reaches a callback handler, a cache, checkpoints, a memory, a
    chat history, a graph's store or an `ExemplarStore`, by whatever way, is refused: text would leave there, or members
    would read each other's. So is a cached function with arguments; one without is called when the ensemble is made,
    and what it gives is looked into.

    What the member's functions can write (containers, attributes, variables) is compared around two calls on made-up
    examples, once, before the first charge. What changed is refused, unless ``allow_state`` names it; see the README
    for state that no check sees. Zero-shot answers, candidates and questions about the model's health are asked of a
    copy, made with the ensemble, of everything but models, embeddings, public collections and classes: what an app
    changes in its objects later does not reach them. What cannot be copied is refused.

    The caller's config does not reach the member, which would otherwise see its callbacks: ``configurable`` fields keep
    the values that the member was made with.

    Each call is made on its own, never through ``batch``: there, one private prompt that is refused can fail its
    neighbours in the same request, and one owner would then move more than one member's answer. Use a model server for
    which one request does not change the answer to another.
    """

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
        if max_concurrency is None:
            max_concurrency = min(selector.members, 64)
        self.max_concurrency = checks.whole("max_concurrency", max_concurrency)
        self.public = boundary.check_public(public)
        if not isinstance(allow_state, (list, tuple)):
            raise InvalidParameter("allow_state", type(allow_state).__name__, "a list of objects or names")
        self.allow_state = tuple(allow_state)
        sealed = boundary.seal(coerce_to_runnable(member), public=self.public, allow_state=self.allow_state)
        self._limit = TimeLimit(sealed, timeout)
        self._member = self._limit.prepared
        self._public_member: Runnable[Any, Any]
        self._public_member, _ = public_copy(self._member, self.allow_state)
        self._trying = threading.Lock()
        self._unproven = bool(snapshot(self._member, self.allow_state).places)
        self._needed = _first_keys(self._member)
        self.doubts = Doubts()

    @property
    def variant(self) -> str:
        """Further public settings of the ensemble that decide its answers: none here. Part of what replay compares."""
        return ""

    @property
    def sealed_member(self) -> Runnable[Any, Any]:
        """The copy of the member that runs inside the boundary."""
        return self._member

    @property
    def timeout(self) -> float | None:
        """Seconds that one call may take; None where there is no limit."""
        return self._limit.seconds

    def check_sync(self) -> None:
        """Before a charge: `InvalidParameter` where ``timeout`` can be kept by ``ainvoke`` and ``abatch`` alone."""
        self._limit.check_sync()

    @property
    def public_member(self) -> Runnable[Any, Any]:
        """Another copy, for public calls alone: nothing that a private call writes is in it."""
        return self._public_member

    @property
    def members(self) -> int:
        """N: the number of calls of every release."""
        return self.selector.members

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

    @property
    def unproven(self) -> bool:
        """Whether the member could share state between its calls, and has not shown yet that it does not."""
        return self._unproven

    def check_sharing(self, values: Mapping[str, Any], aggregator: Aggregator[Any]) -> None:
        """Before the first charge: see whether two calls on public values and made-up examples leave anything behind.

        Costs nothing where the member's functions reach nothing that can be written. Raises `UnsafeConfigurationError`
        where a call wrote something that another one reads, and `ModelUnavailable` where the member fails.
        """
        if self._unproven:
            with self._trying:
                trial = self._trial(values, aggregator)
                with contextlib.suppress(StopIteration):
                    asked = next(trial)
                    while True:
                        asked = trial.send(boundary.probe(*asked, _any_answer, self.timeout))

    async def acheck_sharing(self, values: Mapping[str, Any], aggregator: Aggregator[Any]) -> None:
        """`check_sharing`, without blocking the event loop."""
        if self._unproven:
            trial = self._trial(values, aggregator)
            with contextlib.suppress(StopIteration):
                asked = next(trial)
                while True:
                    asked = trial.send(await boundary.aprobe(*asked, _any_answer, self.timeout))

    def _trial(
        self, values: Mapping[str, Any], aggregator: Aggregator[Any]
    ) -> Generator[tuple[Runnable[Any, Any], boundary.Request], type[BaseException] | None, None]:
        """Calls to make, each answered with the class of what it raised. The first may set up what later ones use."""
        if not self._unproven:
            return
        chain, allowed = public_copy(self._member, self.allow_state)
        other = other_words(dict(values))
        untouched = snapshot(chain, allowed)
        failure = yield chain, (values, self._made_up(1, aggregator))
        before = snapshot(chain, allowed)
        refuse_kept(untouched, before, dict(values))
        if failure is None and (yield chain, (other, self._made_up(2, aggregator))) is not None:
            failure = yield chain, (values, self._made_up(2, aggregator))  # the other words may be no valid request
        refuse_changes(before, snapshot(chain, allowed))
        boundary.seal(chain, public=self.public, allow_state=allowed)  # what the calls have set up, too
        if failure is not None:
            name = next((place.name for place in before.places.values()), "")
            raise ModelUnavailable(
                f"the member fails on made-up examples ({failure.__module__}.{failure.__qualname__}), by which it has "
                f"to show that its calls write nothing into {name}; nothing was charged. Invoke the member chain alone "
                f"to see the whole error, or allow what it shares: allow_state=[{name!r}]"
            )
        self._unproven = False

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

    def mark_suspect(self, caller: str = "") -> None:
        """A caller's release said that the members abstain: ask a public question before that caller's next charge."""
        self.doubts.of(caller).suspected = True

    def check_health(
        self, values: Mapping[str, Any], aggregator: Aggregator[Any], tells: bool = True, caller: str = ""
    ) -> None:
        """Where a caller has doubt about the member, call it on the query without examples before charging.

        Doubt comes from a release to this caller, or, where releases do not tell, from a minute without such a call
        for this caller (see `doubt`). Both the doubt and the call (no private example) are public to the caller. Raises
        `ModelUnavailable`, also where the aggregator could not use any answer of this kind.
        """
        if self.doubtful(tells, caller):
            request = self.public_request(values)
            failure = boundary.probe(self._public_member, request, aggregator.check_public, self.timeout)
            self._judge(caller, failure)

    async def acheck_health(
        self, values: Mapping[str, Any], aggregator: Aggregator[Any], tells: bool = True, caller: str = ""
    ) -> None:
        """`check_health`, without blocking the event loop."""
        if self.doubtful(tells, caller):
            request = self.public_request(values)
            failure = await boundary.aprobe(self._public_member, request, aggregator.check_public, self.timeout)
            self._judge(caller, failure)

    def doubtful(self, tells: bool = True, caller: str = "") -> bool:
        """Whether `check_health` would ask a public question now. ``tells``: whether a release would (see
        `Aggregator.tells`). ``caller``: as `BudgetLine.caller` names them."""
        return self.doubts.of(caller).is_due(math.inf if tells else _PROOF_SECONDS)

    def public_request(self, values: Mapping[str, Any]) -> boundary.Request:
        """The query with no example at all."""
        store = self.selector.store
        return values, Examples((), store.input_key, store.output_key)

    def _judge(self, caller: str, failure: type[BaseException] | None) -> None:
        self.doubts.of(caller).judge(failure is None)
        if failure is not None:
            raise ModelUnavailable(
                "the member, or the reading of its answer, fails on the query without examples "
                f"({failure.__module__}.{failure.__qualname__}); nothing was charged. "
                "Invoke the member chain alone with examples=[] to see the whole error"
            )

    # -- private runs, for DPAggregate ---------------------------------------------------------------------------------

    def run(
        self,
        values: Mapping[str, Any],
        rate: float,
        reader: boundary.Reader = boundary.WHOLE,
        query: Vectors | None = None,
        among: Numbers | None = None,
    ) -> list[object | boundary.Abstention]:
        """Sample, call, and read each output. PRIVATE: the outputs are for an aggregator.

        ``query`` is what the selector's ``embed_query`` gave for the values, ``among`` are the owners who paid for it
        where owners pay.
        """
        requests = [(values, bucket) for bucket in self._buckets(rate, query, among)]
        return boundary.run_private(
            self._member, requests, max_concurrency=self.max_concurrency, reader=reader, timeout=self.timeout
        )

    async def arun(
        self,
        values: Mapping[str, Any],
        rate: float,
        reader: boundary.Reader = boundary.WHOLE,
        query: Vectors | None = None,
        among: Numbers | None = None,
    ) -> list[object | boundary.Abstention]:
        """`run`, asynchronously."""
        requests = [(values, bucket) for bucket in await threads.in_thread(self._buckets, rate, query, among)]
        return await boundary.arun_private(
            self._member, requests, max_concurrency=self.max_concurrency, reader=reader, timeout=self.timeout
        )

    def _buckets(self, rate: float, query: Vectors | None, among: Numbers | None) -> list[Examples]:
        paid = () if among is None else (among,)
        return self.selector.sample(rate, query, *paid)

    # -- composition ---------------------------------------------------------------------------------------------------

    def __or__(self, other: Any) -> SealedRelease:  # type: ignore[override]
        """Fuse with a `DPAggregate`; refuse everything else."""
        from langchain_dpicl.release.aggregate import DPAggregate, SealedRelease

        if not isinstance(other, DPAggregate):
            raise UnsafeConfigurationError(_REFUSAL)
        return SealedRelease(self, other)

    def pipe(self, *others: Any, name: str | None = None) -> Any:
        """``ensemble.pipe(DPAggregate(...), ...)``: as `|`."""
        if not others:
            raise UnsafeConfigurationError(_REFUSAL)
        sealed = self | others[0]
        return sealed.pipe(*others[1:], name=name) if len(others) > 1 else sealed

    def invoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise UnsafeConfigurationError(_REFUSAL)

    async def ainvoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise UnsafeConfigurationError(_REFUSAL)

    def transform(
        self, input: Iterator[dict[str, Any]], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[Any]:
        """Refused."""
        raise UnsafeConfigurationError(_REFUSAL)

    async def atransform(
        self, input: AsyncIterator[dict[str, Any]], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Refused."""
        raise UnsafeConfigurationError(_REFUSAL)
        yield

    def __repr__(self) -> str:
        return f"PrivateEnsemble(members={self.members}{self.selector.shown_rate})"


def _any_answer(output: object) -> None:
    """Takes whatever a call answers."""


def _first_keys(member: Runnable[Any, Any]) -> frozenset[str]:
    """The keys of the caller's mapping that the member's first step is known to need: a prompt's, a scorer's."""
    while isinstance(member, RunnableSequence):
        member = member.first
    return frozenset(getattr(member, "input_variables", ())) - {"examples"}
