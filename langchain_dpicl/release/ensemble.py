"""The private ensemble: N members on N buckets, their public trials, and their private calls."""

from __future__ import annotations

import contextlib
import copy
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from langchain_core.runnables import Runnable, RunnableConfig, RunnableSequence
from langchain_core.runnables.base import coerce_to_runnable

from langchain_dpicl.aggregators.base import Aggregator
from langchain_dpicl.calls.flow import Either, Flow, arun, run
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, UnsafeConfigurationError
from langchain_dpicl.privacy import checks
from langchain_dpicl.private import Closed, boundary
from langchain_dpicl.private.copies import TimeLimit, Timeout
from langchain_dpicl.private.sharing import MadeUp, Snapshot, other_words, public_copy, refuse_changes, refuse_kept
from langchain_dpicl.release.base import Doubts
from langchain_dpicl.selection import Examples, PoissonExampleSelector
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.records import Vectors

R = TypeVar("R")


class Sealed(Runnable[Any, Any]):
    """A Runnable that runs only as a part of a sealed release."""

    _refusal: str

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> NoReturn:
        """Refused, and with it every other way to run it: LangChain's own make use of this one."""
        raise UnsafeConfigurationError(self._refusal)


class Aggregation(Sealed, Generic[R]):
    """The right side of ``ensemble | ...``; `DPAggregate` is the only one."""

    @abstractmethod
    def _fused(self, ensemble: PrivateEnsemble) -> R:
        """The sealed release of both."""


class PrivateEnsemble(Closed, Sealed):
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
        for ten minutes at most). Default "auto": 120 if every model of the member can be ended so (the embedded one,
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

    _refusal = (
        "a PrivateEnsemble shows private answers: it runs only inside `ensemble | DPAggregate(...)` "
        "(with steps before it, write `steps | (ensemble | DPAggregate(...))`)"
    )

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
        self.selector, self.members = selector, selector.members
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
        # Another copy, for public calls: private calls write nothing into it.
        self.public_member: Runnable[Any, Any] = public_copy(self._member, self.allow_state)[0]
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
        with contextlib.suppress(Exception):
            return copy.deepcopy(dict(values))
        raise InvalidParameter("input", sorted(values), "a mapping whose values can be copied, for each member")

    def check_sharing(self, values: Mapping[str, Any], aggregator: Aggregator[Any]) -> Flow[None]:
        """Before the first charge: see whether two calls on public values and made-up examples leave anything behind.

        Costs nothing if the member's functions reach nothing that can be written. Raises `UnsafeConfigurationError` if
        one call wrote something that another one reads, and `ModelUnavailable` if the member fails.
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
        store, other = self.selector.store, other_words(dict(values))
        answers = list(getattr(aggregator, "labels", ())) or ["a made-up answer", "another made-up answer"]

        def ask(values: Mapping[str, Any], number: int) -> Flow[type[BaseException] | None]:
            """Show the member so many examples. No record of the store has a part in them."""
            made = Examples((), store.input_key, store.output_key)
            for i in range(number):
                made.append(MadeUp({store.input_key: other_words("a made-up example")}))
                if store.output_key is not None:
                    made[i][store.output_key] = answers[(number + i) % len(answers)]
            return boundary.probe(chain, (values, made), self.timeout)

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

    def check_health(self, values: Mapping[str, Any], aggregator: Aggregator[Any], caller: str = "") -> Flow[None]:
        """Call the member on the query without examples, before charging a caller who has doubt about it.

        Both the doubt and the call (no private example) are public to the caller (`BudgetLine.caller`). Raises
        `ModelUnavailable`, also if the aggregator could not use any answer of this kind.
        """
        question = self.public_request(values)
        failure = yield from boundary.probe(self.public_member, question, self.timeout, aggregator.check_public)
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

    def calls(self, chain: Runnable[Any, Any], requests: Sequence[boundary.MemberRequest], **how: Any) -> Either:
        """Calls of the member or of another chain, ``max_concurrency`` at once: see `boundary.run_private`."""
        return boundary.private_calls(chain, requests, max_concurrency=self.max_concurrency, **how)

    def outputs(
        self,
        values: Mapping[str, Any],
        rate: float,
        reader: boundary.OutputReader | None = None,
        query: Vectors | None = None,
        among: Numbers | None = None,
    ) -> Flow[list[object | boundary.Abstention]]:
        """Sample, call, and read each output. PRIVATE: the outputs are for an aggregator.

        ``query`` is the embedding of the request's text. ``among`` are the owners who paid, if owners pay.
        """
        buckets = yield partial(self.selector.sample, rate, query, among)
        requests = [(values, bucket) for bucket in buckets]
        found: list[object | boundary.Abstention]
        found = yield self.calls(self._member, requests, reader=reader, timeout=self.timeout)
        return found

    def run(
        self, values: Mapping[str, Any], rate: float, reader: boundary.OutputReader | None = None
    ) -> list[object | boundary.Abstention]:
        """`outputs`, here and now. PRIVATE, and charged by nobody: for measurements on public data."""
        return run(self.outputs(values, rate, reader))

    def __or__(self, other: Aggregation[R]) -> R:  # type: ignore[override]
        """Fuse with a `DPAggregate`; refuse everything else."""
        if not isinstance(other, Aggregation):
            raise UnsafeConfigurationError(self._refusal)
        return other._fused(self)

    def pipe(self, *others: Any, name: str | None = None) -> Any:
        """``ensemble.pipe(DPAggregate(...), ...)``: as `|`."""
        if not others:
            raise UnsafeConfigurationError(self._refusal)
        sealed = self | others[0]
        return sealed.pipe(*others[1:], name=name) if len(others) > 1 else sealed

    def __repr__(self) -> str:
        return f"PrivateEnsemble(members={self.members}{self.selector.shown_rate})"
