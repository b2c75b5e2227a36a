"""The private ensemble: N members on N buckets, the public questions to them, and their private calls."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress, repeat
from typing import Any, Generic, NoReturn, TypeVar

from langchain_core.runnables import Runnable, RunnableConfig, RunnableSequence
from langchain_core.runnables.base import coerce_to_runnable

from langchain_dpicl.aggregators.base import Aggregator
from langchain_dpicl.calls.flow import Either, Flow, arun, in_event_loop, pause, run
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable, PrivacyWarning, UnsafeConfigurationError
from langchain_dpicl.privacy import checks
from langchain_dpicl.private import Closed, Withheld, boundary
from langchain_dpicl.private.bucket import MadeUp, other_words
from langchain_dpicl.private.copy import Isolation, Pristine
from langchain_dpicl.private.models import Timeout, limit
from langchain_dpicl.release import watched
from langchain_dpicl.release.advice import poor_plan
from langchain_dpicl.release.base import Doubts
from langchain_dpicl.release.rehearsal import Rehearsal, Rehearsed, Rehearsing
from langchain_dpicl.release.watched import Heard, PublicChain, WatchedExamples
from langchain_dpicl.selection import Examples, PoissonExampleSelector, Sought
from langchain_dpicl.selection.rules import text_searched
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.filters import operator_in
from langchain_dpicl.store.records import Vectors

R = TypeVar("R")

_TRYING = 0.01
"""Seconds between two looks at whether another request's public question has its answer."""

_PATIENCE = 5.0
"""Seconds that a request waits for another one's public question, before it asks its own."""

_ASKED = 200
"""Characters of a question that made-up examples repeat."""

Tells = Callable[[], bool]
"""Gives True if a release shows that the members fail: called only if nothing can be read."""


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


class PrivateEnsemble(Withheld, Closed, Sealed):
    """Parallel calls of ``member``, each with the bucket that ``selector`` drew for it.

    Parameters
    ----------
    selector
        Draws the buckets; its ``members`` is N.
    member
        Any Runnable (or function, or mapping of Runnables). It gets the caller's input
        mapping plus ``examples``: a list of mappings, empty for an empty bucket, so that
        the zero-shot prompt is asked. N calls are made for every release, whatever was
        sampled. A member that raises, or whose answer is not usable, abstains; its answer
        to an empty bucket counts nothing. None: there is no model, and a `LabelVote` counts
        the owners' own outputs.
    count_empty
        Let the member's answer to an empty bucket count like every other answer: a public
        vote in the place of each. Not with a selector of ``calls=``, whose guarantee rests
        on nothing standing in an absent owner's place.
    max_concurrency
        The number of calls of one release that run at once. Default: all N, at most 64. All
        releases that are made at once should not be more than your model server answers at
        once: a request that waits there is on its call's clock. The embedded model needs no
        limit.
    timeout
        Seconds that one call may take, from its own start; the member then abstains, and
        nothing waits for the rest of the call (a coroutine has five seconds to end). The
        clients of OpenAI models get the same limit, and repeat nothing by themselves
        (``max_retries``). Default "auto": 120, but None if a model computes in this
        process, the embedded one included: it takes one call after another, so that a clock
        would count the others' calls, and a number raises `InvalidParameter`. None: no
        limit but the client's own. A server that refuses a call (HTTP status 429) is asked
        again after the time that it asks for, for ten minutes at most; the clock then
        begins anew. The clock cannot tell a call's work from its wait for code that blocks
        the event loop or holds the interpreter's lock. What hangs keeps its thread. A model
        with a ``rate_limiter``, or whose client has fewer connections than the release has
        calls, is refused: calls would wait there for each other.
    public
        The retrievers, vector stores, example selectors and document stores that the member
        may search, since nobody's private text is in them. Any other is refused: every
        member would find the same owners' documents there.
    share
        The things that all calls share, private and public ones: objects, such as a client
        or a rate limiter, and names of installed packages whose code they share. A chain
        that reads there what another call wrote voids the guarantee: name nothing that
        holds prompts, examples, answers or facts about them.
    isolate
        Names of installed packages of whose code every call has its own.

    ``ensemble | DPAggregate(...)`` fuses into one sealed Runnable. Anything else, or
    invoking it alone, raises `UnsafeConfigurationError`, since every step that LCEL can see
    is traced. The member is copied with its models' caches, verbosity and callbacks off. A
    member that reaches a callback handler, a cache, checkpoints, a memory, a chat history,
    a graph's store, an `ExemplarStore`, a budget or a release, by whatever way, is refused:
    text would leave there, or members would read each other's. In its copies a selector
    gives the member's own bucket alone, and while a call runs the store, ledgers and
    releases refuse everything (`ShutWithinCall`), however it came by them.

    Each call, private or public, runs on a copy of the member of its own, with its own
    objects, functions, classes and modules of your code: what it writes there ends with it.
    The copies are made from one pickle, made with the ensemble: what an app changes in its
    objects later does not reach them. What cannot be copied (locks, files, connections) is
    refused with its name. `shared` shows what calls share: models, clients, installed
    libraries. A cached function without arguments is called when the ensemble is made, and
    each call has a copy of what it gives.

    The caller's config does not reach the member, which would otherwise see its callbacks:
    ``configurable`` fields keep the values that the member was made with.

    Each call is made on its own, never through ``batch``: there, one private prompt that is
    refused can fail its neighbours in the same request, and one owner would then move more
    than one member's answer. Use a model server for which one request does not change the
    answer to another.
    """

    _refusal = (
        "a PrivateEnsemble shows private answers: it runs only inside `ensemble | DPAggregate(...)` "
        "(with steps before it, write `steps | (ensemble | DPAggregate(...))`)"
    )

    withheld = (
        "it calls members of its own. Make a release of it, ask that before, and pass on what it gives: "
        "RunnablePassthrough.assign(found=release) | (ensemble | DPAggregate(...))"
    )
    has_member = True
    searches = False
    """True if the member searches its bucket, so that the bucket carries vectors."""
    copies: Pristine
    """Makes the copies of the member that its calls run on."""
    instead: Sequence[tuple[object, object]] = ()
    """Pairs: a part of the member, and its replacement in the copies."""
    timeout: float | None = None
    rewriting: PublicChain | None = None
    """The chain that makes the text to search for, if the selector has a ``search_query``."""
    unread: bool | None = None
    """True if the member looks at no example; None until its answer to a public question shows it."""
    _tried: frozenset[bool] = frozenset()
    """The places in which the member has answered on made-up examples: False for threads, True for event loops."""
    _failed = False
    """True if a first question was asked in vain, so that nobody waits for another request's."""
    _answered: dict[str, Rehearsed | None]
    """By aggregator, if a public question with examples was answered: a rehearsal's, or None for made-up ones."""
    _named: frozenset[str] = frozenset()
    _needed: frozenset[str] = frozenset()

    def __init__(
        self,
        selector: PoissonExampleSelector,
        member: Any = None,
        *,
        count_empty: bool = False,
        max_concurrency: int | None = None,
        timeout: Timeout = "auto",
        public: Sequence[object] = (),
        share: Sequence[object] = (),
        isolate: Sequence[str] = (),
        allow_state: Sequence[object] = (),
    ) -> None:
        if not isinstance(selector, PoissonExampleSelector):
            raise InvalidParameter("selector", type(selector).__name__, "a PoissonExampleSelector")
        self.selector = selector
        self.members = selector.members
        at_once = min(selector.members, 64) if max_concurrency is None else max_concurrency
        self.max_concurrency = checks.whole("max_concurrency", at_once)
        self.public = boundary.check_public(public)
        if allow_state:
            raise InvalidParameter(
                "allow_state",
                type(allow_state).__name__,
                "nothing any more: each call has a copy of the chain; what calls may share is named in share=[...]",
            )
        for parameter, given in (("share", share), ("isolate", isolate)):
            if not isinstance(given, (list, tuple)):
                raise InvalidParameter(parameter, type(given).__name__, "a list")
        if any(not isinstance(name, str) for name in isolate):
            raise InvalidParameter("isolate", [type(name).__name__ for name in isolate], "names of packages")
        self.share = tuple(share)
        self.isolate = tuple(isolate)
        self.count_empty = bool(count_empty)
        if self.count_empty and (selector.calls is not None or member is None):
            raise InvalidParameter(
                "count_empty",
                True,
                "False without a member, and if every owner has its own call",
            )
        self.doubts = Doubts()
        if member is None:
            self.has_member = False
            if timeout not in ("auto", None):
                raise InvalidParameter("timeout", timeout, "not given without a member: nobody is called")
            if selector.store.output_key is None:
                raise InvalidParameter(
                    "member",
                    None,
                    "given if the store has no output_key, whose values could vote",
                )
        else:
            self._take(member, timeout)
        if selector.search_query is not None:
            self.rewriting = self.public_chain(selector.search_query, 1)

    def _take(self, member: Any, timeout: Timeout) -> None:
        """Seal the member, and pickle it for the copies that its calls run on."""
        sealed = boundary.seal(coerce_to_runnable(member), keep=self.share)
        self.copies = self.copies_of(sealed)
        self.searches = self.copies.searches
        self.timeout = limit(self.copies, timeout, self.members)
        self._trying = threading.Lock()
        self._answered = dict[str, Rehearsed | None]()
        first = sealed
        while isinstance(first, RunnableSequence):
            first = first.first
        self._named = frozenset(getattr(first, "input_variables", ()))
        self._needed = self._named - {"examples"}

    def copies_of(self, chain: Runnable[Any, Any]) -> Pristine:
        """The maker of copies of a chain, which share with each other as the member's copies do."""
        return Pristine(
            chain,
            share=self.share,
            public=self.public,
            instead=self.instead,
            isolate=self.isolate,
        )

    def shared(self) -> Isolation:
        """List the things that calls of the member own, and those that they share (the threat model's list).

        ``print`` the list.
        """
        if not self.has_member:
            raise InvalidParameter("member", None, "given: without a member nothing is called")
        return self.copies.shared()

    @property
    def needs(self) -> frozenset[str]:
        """The keys that a request must have, as far as they are known."""
        if self.selector.search_query is None and self.selector.nearest_to:
            return self._needed | {self.selector.nearest_to}
        return self._needed

    @property
    def variant(self) -> str:
        """Further public settings of the ensemble that decide its answers. Part of what replay compares."""
        return " count_empty" if self.count_empty else ""

    @property
    def untried(self) -> bool:
        """True if the next request asks the member on made-up examples."""
        return self.has_member and in_event_loop() not in self._tried

    def check_request(self, values: object) -> Mapping[str, Any]:
        """A copy of the caller's mapping, or `InvalidParameter`, which shows its keys alone.

        A plain text stands under the one key that a request needs, if that is known.
        A key that the member's prompt needs is asked for here: without it every member
        would abstain, and be charged. If it is nearly ``examples``, which the prompt does
        not name, the mistake is the prompt's. A request with an operator of filters is
        refused if the member searches: it would pass for a condition that the member wrote.
        """
        if isinstance(values, str):
            values = self.mapping_of(values)
        if not isinstance(values, Mapping) or not all(map(isinstance, values, repeat(str))):
            raise InvalidParameter("input", type(values).__name__, "a mapping of names to values")
        if "examples" in values:
            raise InvalidParameter("input", "examples", "a mapping without this key, which the ensemble fills")
        if missing := self._needed - values.keys():
            if slip := watched.slip(missing, {"examples"} - self._named):
                name, bound = slip
                raise InvalidParameter("member", f"{{{name}}}", bound)
            raise InvalidParameter("input", sorted(values), f"a mapping with the keys {sorted(missing)} too")
        if self.searches and (operator := operator_in(values)) is not None:
            raise InvalidParameter(
                "input",
                operator,
                "a request without operators of filters, which the chain itself writes; nothing was charged",
            )
        self.selector.check_query(values)
        with contextlib.suppress(Exception):
            return copy.deepcopy(dict(values))
        raise InvalidParameter("input", sorted(values), "a mapping whose values can be copied, for each member")

    def mapping_of(self, text: str) -> Mapping[str, Any]:
        """A plain text under the one key that a request needs. Raises `InvalidParameter` for no key, or several."""
        keys = sorted(self.needs)
        if len(keys) != 1:
            named = f" with the keys {keys}" if keys else " of names to values"
            raise InvalidParameter("input", "a text", f"a mapping{named}: a text stands for one key alone")
        return {keys[0]: str(text)}

    def check_member(
        self,
        values: Mapping[str, Any],
        aggregator: Aggregator[Any] | None,
        caller: str = "",
        tells: Tells = lambda: True,
    ) -> Flow[None]:
        """Before the first charge, once for threads and once for event loops: ask the member on made-up examples.

        Their texts hold braces, quotes and line breaks. Costs nothing. Raises
        `InvalidParameter` for a member that fails on such texts and no others, and
        `ModelUnavailable` if the member fails; where releases would not tell (``tells``),
        also if the aggregator can read nothing in what it answers.
        """
        in_loop = in_event_loop()
        is_first = False
        until = time.monotonic() + _PATIENCE
        while not (self._failed or is_first) and time.monotonic() < until:  # one request asks for those that wait
            is_first = self._trying.acquire(blocking=False)
            if not is_first:
                yield pause(_TRYING)
        try:
            if in_loop not in self._tried:
                yield from self._try(values, aggregator, caller, tells)
                self._tried |= {in_loop}
        except BaseException:
            self._failed = True
            raise
        finally:
            if is_first:
                self._trying.release()

    def made_up(
        self, number: int, values: Mapping[str, Any], aggregator: Aggregator[Any] | None, marks: str = ""
    ) -> WatchedExamples:
        """So many examples that no record of the store has a part in: the question's own words, and an answer.

        If examples have outputs, the answer stands there alone: in the text it would teach
        to copy from texts.
        """
        store = self.selector.store
        made: list[dict[str, Any]] = []
        samples = Aggregator.SAMPLES if aggregator is None else aggregator.samples
        asked = " ".join(value for value in values.values() if isinstance(value, str))[:_ASKED]
        for i in range(number):
            answer = samples[(number + i) % len(samples)]
            example = MadeUp({store.input_key: other_words(asked or "a made-up example") + marks}, marks)
            if store.output_key is None:
                example[store.input_key] += f"\n{answer}"
            else:
                example[store.output_key] = answer
            made.append(example)
        return WatchedExamples(made, store.input_key, store.output_key)

    def _try(
        self, values: Mapping[str, Any], aggregator: Aggregator[Any] | None, caller: str, tells: Tells
    ) -> Flow[None]:
        """A call on made-up examples with `watched.MARKS`. If nothing can be read there, another one without."""
        seen = yield from self._probe(values, self.made_up(2, values, aggregator, watched.MARKS), aggregator)
        if seen.failure is not None:
            again = yield from self._answers(values, aggregator)
            if again.failure is not None:
                yield from self._judge_unread(values, again, tells)
                return
            if not seen.anything and self._known(aggregator) is None:
                raise InvalidParameter(
                    "member",
                    type(self.copies.chain).__name__,
                    "a chain that takes braces, quotes and line breaks in examples: fill a template with them, and "
                    f"never make them a part of the template's own text ({_name(seen.failure)}); `rehearse` shows the "
                    "whole error",
                )
        if aggregator is not None:
            self._answered.setdefault(repr(aggregator))
            self.doubts.of(caller).judge(True)

    def _judge_unread(self, values: Mapping[str, Any], seen: _Seen, tells: Tells) -> Flow[None]:
        """Nothing could be read in answers to made-up examples. Raises `ModelUnavailable`, unless releases tell so."""
        if not tells():
            raise seen.error()
        if seen.anything:
            return
        if seen.failure is TimeoutError or (yield from self.ask(values)) is not None:
            raise seen.error()
        warnings.warn(
            f"the member fails on made-up examples ({_name(seen.failure)}), so nothing shows yet that it can answer on "
            "real ones: `rehearse` it with public examples of your records' form",
            PrivacyWarning,
            stacklevel=2,
        )

    def _known(self, aggregator: Aggregator[Any] | None) -> Rehearsed | None:
        return self._answered.get(repr(aggregator))

    def _answers(self, values: Mapping[str, Any], aggregator: Aggregator[Any] | None) -> Flow[_Seen]:
        """The question with made-up examples, or with a rehearsal's; else the rehearsal's own question."""
        known = self._known(aggregator)
        if known is None:
            return (yield from self._probe(values, self.made_up(2, values, aggregator), aggregator))
        seen = yield from self._probe(values, known.again(), aggregator)
        if seen.failure is not None:
            seen = yield from self._probe(known.values, known.again(), known.reader)
        return seen

    def _probe(
        self, values: Mapping[str, Any], made: WatchedExamples, aggregator: Aggregator[Any] | None
    ) -> Flow[_Seen]:
        seen = _Seen(aggregator)
        heard = Heard(self.copies)
        seen.failure = yield from boundary.probe(heard, (values, made), self.timeout, seen.read)
        if seen.anything and self.unread is not False:
            self.unread = not made.are_seen("\n".join(heard.hearing.prompts), str(values))
        return seen

    def note_rehearsal(
        self, values: Mapping[str, Any], bucket: WatchedExamples, aggregator: Aggregator[Any] | None
    ) -> None:
        """A rehearsal has passed: the member is known to answer this question, with these public examples."""
        self._tried |= {in_event_loop()}
        self.unread = False
        if aggregator is not None:
            self._answered[repr(aggregator)] = Rehearsed(dict(values), bucket, aggregator)
            self.doubts.asked("").judge(True)  # the public question of a caller in doubt, if all callers are one

    def rehearse(
        self, public_examples: Sequence[Any], question: Any, aggregator: Aggregator[Any] | None = None
    ) -> Rehearsal:
        """Run the member on public stand-ins, at no cost, and show all that it does: prompts, outputs, errors.

        Parameters
        ----------
        public_examples
            Examples that stand in for private ones: mappings with the store's keys,
            LangChain documents, or texts if the store has no ``output_key``; of a store of
            `split_with_parents`, public documents that are split so, too. They fill buckets
            as large as a member's may be, with a call for each. One more call has no
            example, as an empty bucket has none. Not private records: the report shows
            them.
        question
            A request of the release, or the text alone.
        aggregator
            Reads the outputs, and says why it cannot.

        Nothing is charged, no plan is frozen, and no record of the store is read: each call
        has the public examples for its bucket, and nothing else. Tracers and callbacks hear
        nothing. If the rehearsal has passed, the first release does not ask the member
        whether it answers on made-up examples.

        Raises `InvalidParameter` if the member reads no example, and for stand-ins or a
        question that are not of the store's or the member's form;
        `UnsafeConfigurationError` as a first release would.
        """
        return run(self._rehearsal(public_examples, question, aggregator))

    async def arehearse(
        self, public_examples: Sequence[Any], question: Any, aggregator: Aggregator[Any] | None = None
    ) -> Rehearsal:
        """`rehearse`, asynchronously."""
        boundary.check_loop()
        return await arun(self._rehearsal(public_examples, question, aggregator))

    def _rehearsal(self, given: Sequence[Any], question: Any, aggregator: Aggregator[Any] | None) -> Flow[Rehearsal]:
        if not self.has_member:
            raise InvalidParameter("member", None, "given: without a member there is nothing to rehearse")
        if aggregator is not None and not isinstance(aggregator, Aggregator):
            raise InvalidParameter("aggregator", type(aggregator).__name__, "an Aggregator such as NoisyVote, or None")
        if isinstance(question, str) and not self.needs:
            question = {self.selector.nearest_to or "input": question}
        values = self.check_request(question)
        buckets = watched.public_buckets(given, self.selector)
        boundary.check_surroundings()
        under_way = Rehearsing(
            self.public_chain,
            partial(self.made_up, 2, values),
            self.rewriting,
            values,
            buckets,
            self.count_empty,
        )
        reader = yield from under_way.carry_out(aggregator)
        if under_way.report.passed:
            self.note_rehearsal(values, buckets[0], reader)
        return under_way.report

    def check_reading(self) -> None:
        """Before the first charge: warn, once, if the member looks at no example, so that a release is wasted on it."""
        if self.unread:
            self.unread = False
            warnings.warn(
                f"the member reads no example ({watched.READS_NOTHING}): its answers are public, and are charged",
                PrivacyWarning,
                stacklevel=2,
            )

    def ask(
        self, values: Mapping[str, Any], read: Callable[[object], None] = lambda output: None
    ) -> Flow[type[BaseException] | None]:
        """Call the member on a query without examples, and ``read`` its answer. The class of the error of either."""
        return (yield from boundary.probe(self.copies, self.public_request(values), self.timeout, read))

    def check_health(self, values: Mapping[str, Any], aggregator: Aggregator[Any], caller: str = "") -> Flow[None]:
        """Ask the member a public question, before charging a caller who has doubt about it.

        It is the query without examples; a member that needs some is asked with made-up
        ones, or those of a rehearsal, if it has answered so before. Both the doubt and the
        calls (no private example) are public to the caller (`BudgetLine.caller`). Raises
        `ModelUnavailable` if there is no answer that could be used.
        """
        seen = _Seen(aggregator, aggregator.check_kind)
        failure = yield from self.ask(values, seen.read)
        if failure is not None and repr(aggregator) in self._answered:
            failure = (yield from self._answers(values, aggregator)).failure
        self.doubts.of(caller).judge(failure is None)
        if failure is not None:
            fails = f"the member, or the reading of its answer, fails on a public question{seen.reason}"
            raise _unavailable(fails, failure)

    def public_request(self, values: Mapping[str, Any]) -> boundary.MemberRequest:
        """The query with no example at all."""
        store = self.selector.store
        return values, Examples((), store.input_key, store.output_key)

    def public_chain(self, chain: Runnable[Any, Any] | None, count: int) -> PublicChain:
        """A chain whose calls before the charge are public, or the member; how many, and each one's seconds."""
        if chain is None:
            if not self.has_member:
                raise InvalidParameter("prior", "zero_shot", "a chain or probabilities: there is no member to ask")
            return PublicChain(self.copies, count, self.timeout)
        copies = self.copies_of(boundary.seal(chain, keep=self.share))
        if copies.searches:
            raise UnsafeConfigurationError(
                "candidates must come from public text alone, and their chain searches a member's own documents: it "
                "finds none in a public call; write them without"
            )
        return PublicChain(
            copies,
            count,
            limit(copies, self.timeout if self.has_member else "auto", self.members, is_public=True),
        )

    def search_text(self, values: Mapping[str, Any]) -> Flow[str]:
        """The text that exemplars are near to: the request's own, or the one that ``search_query`` makes of it."""
        if self.rewriting is None:
            text: str = values[str(self.selector.nearest_to)]
            return text
        chain, _, timeout = self.rewriting
        (made,) = yield self.calls(chain, [self.public_request(values)], timeout=timeout)
        return text_searched(made)

    def calls(self, chain: Pristine, requests: Sequence[boundary.MemberRequest], **how: Any) -> Either:
        """Calls of copies of a chain, ``max_concurrency`` at once: see `boundary.run_private`."""
        return boundary.private_calls(chain, requests, max_concurrency=self.max_concurrency, **how)

    def outputs(
        self,
        values: Mapping[str, Any],
        rate: float,
        reader: boundary.OutputReader | None = None,
        query: Vectors | Sought | None = None,
        among: Numbers | None = None,
    ) -> Flow[list[object | boundary.Abstention]]:
        """Sample, call, and read each output that counts. PRIVATE, and so is their number: they are for an aggregator.

        ``query`` is the embedding of the request's text, with its filter. ``among`` are the
        owners who paid, if owners pay.
        """
        buckets = yield partial(self.selector.sample, rate, query, among, self.searches)
        found: list[object | boundary.Abstention]
        if not self.has_member:
            found = yield partial(_own_outputs, buckets, reader)
            return found
        requests = list(zip(repeat(values), buckets, strict=False))
        filled = list(map(bool, buckets))  # before the calls: a member may write into its list
        for _ in range(self.members - len(buckets)):  # with own calls: padding
            requests.append(self.public_request(values))
            filled.append(False)
        found = yield boundary.private_calls(
            self.copies,
            requests,
            max_concurrency=self.max_concurrency,
            reader=reader,
            timeout=self.timeout,
        )
        if self.count_empty:
            return found
        if getattr(reader, "takes_own_calls", True):
            return list(compress(found, filled))
        return [output if counts else boundary.ABSTAIN for output, counts in zip(found, filled, strict=True)]

    def run(
        self, values: Mapping[str, Any], rate: float, reader: boundary.OutputReader | None = None
    ) -> list[object | boundary.Abstention]:
        """`outputs`, here and now. PRIVATE, and charged by nobody: for measurements on public data."""
        return run(self.outputs(values, rate, reader))

    def __or__(self, other: Aggregation[R]) -> R:  # type: ignore[override]
        """Fuse with a `DPAggregate`; refuse everything else."""
        if not isinstance(other, Aggregation):
            raise UnsafeConfigurationError(self._refusal)
        release = other._fused(self)
        if self.selector.gated and (said := poor_plan(release)):  # ``eligible`` is an estimate, and may be too small
            warnings.warn(said, PrivacyWarning, stacklevel=2)
        return release

    def pipe(self, *others: Any, name: str | None = None) -> Any:
        """``ensemble.pipe(DPAggregate(...), ...)``: as `|`."""
        if not others:
            raise UnsafeConfigurationError(self._refusal)
        sealed = self | others[0]
        return sealed.pipe(*others[1:], name=name) if len(others) > 1 else sealed

    def __repr__(self) -> str:
        return f"PrivateEnsemble(members={self.members}{self.selector.shown_rate})"


class _Seen:
    """The state of a public answer. ``read`` reads it as an aggregator would, and notes that there was one.

    Attributes
    ----------
    failure
        The class of the error of the call or the reading; None if the answer could be read.
    anything
        True if the member answered at all.
    reason
        The reason why it could not be read, in brackets; "" if there is none to tell.
    """

    reason = ""
    anything = False
    failure: type[BaseException] | None = None

    def __init__(self, aggregator: Aggregator[Any] | None, check: Callable[[object], None] | None = None) -> None:
        self._aggregator = aggregator
        self._check = check or self._encode

    def _encode(self, output: object) -> None:
        if self._aggregator is not None:
            self._aggregator.check_encoded(self._aggregator.encode(output))

    def read(self, output: object) -> None:
        self.anything = True
        try:
            self._check(output)
        except ValueError as error:
            self.reason = str(error) and f" ({error})"
            raise

    def error(self) -> ModelUnavailable:
        """The error of a release whose member was asked in vain."""
        assert self.failure is not None
        fails = "the member fails on a public question with examples"
        if self.anything:
            fails = f"the member answers, but {type(self._aggregator).__name__} can read nothing in it{self.reason}"
        return _unavailable(fails, self.failure)


def _unavailable(fails: str, failure: type[BaseException]) -> ModelUnavailable:
    return ModelUnavailable(
        f"{fails} ({_name(failure)}); nothing was charged. `rehearse` shows answers and errors. If the member needs "
        "examples of your records' form, let a rehearsal on public ones pass: they are asked from then on"
    )


def _name(failure: type[BaseException] | None) -> str:
    return "" if failure is None else f"{failure.__module__}.{failure.__qualname__}"


def _own_outputs(
    buckets: Sequence[Examples], reader: boundary.OutputReader | None
) -> list[object | boundary.Abstention]:
    """The output of the first exemplar of each bucket: a vote without a model. Private."""
    found: list[object | boundary.Abstention] = []
    for bucket in filter(None, buckets):
        found.append(boundary.ABSTAIN)
        with contextlib.suppress(Exception):
            output = bucket[0][str(bucket.output_key)]
            found[-1] = output if reader is None else reader.encode(output)
    return found
