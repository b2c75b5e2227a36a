"""Rehearsals: the member on public stand-ins, at no cost, and all that can be seen of it.

A rehearsal has its own copy of the member, in which a selector has no store. So what it shows is public: the examples
and the question that its caller gave, and what the member made of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import traceback
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig

from langchain_dpicl.aggregators.base import Aggregator
from langchain_dpicl.aggregators.reading import text_of
from langchain_dpicl.calls.flow import Either, Flow, arun, run
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.private import boundary
from langchain_dpicl.private.copy import Pristine, Same
from langchain_dpicl.release import watched
from langchain_dpicl.release.base import Doubts, releases_in
from langchain_dpicl.release.watched import WatchedExamples
from langchain_dpicl.selection import PoissonExampleSelector
from langchain_dpicl.selection.rules import text_searched

_LINE = 300
"""Characters of what a call raised, in one line."""

_PATIENCE = 10.0
"""Seconds that a call waits for a server that asks it to wait. In a release it waits longer."""

_SHOWN = 1500
"""Characters of a prompt or an output that the text of a report shows."""


@dataclass(frozen=True)
class RehearsedCall:
    """One public call: of the member, of an aggregator's own chain, or of a ``search_query``.

    Attributes
    ----------
    name
        What it was given: "with 2 examples", "without examples", or what else is asked in public: "the aggregator's
        public call", "the text to search for".
    prompts
        What the LangChain models in it were asked, in order. What code sends to a model by other ways is not seen.
    output
        What came back: a text, a number, or else its ``repr``. None if the call failed.
    parsed
        What the aggregator read there; None without an aggregator.
    error
        Why the member would abstain, in one line: what the call raised, or why its output is of no use. "" if it
        would not.
    traceback
        Of what the call raised.
    seconds
        How long it took.
    tokens
        "input" and "output", as far as the models say.
    read_examples
        Whether it looked at its examples.
    counts
        Whether a rehearsal fails if this call abstains. One without examples does not count, unless ``count_empty``:
        no more does one with braces if the member fails on any texts but those of its records' form.
    """

    name: str
    prompts: tuple[str, ...]
    output: object
    parsed: object
    error: str
    traceback: str
    seconds: float
    tokens: dict[str, int]
    read_examples: bool
    counts: bool = True

    def __str__(self) -> str:
        used = ", ".join(f"{number} {name} tokens" for name, number in self.tokens.items())
        lines = [f"{self.name}: {self.seconds:.2f} s{f', {used}' if used else ''}"]
        for i, prompt in enumerate(self.prompts, 1):
            lines += [f"  prompt {i}:", _indented(prompt)]
        if not self.prompts:
            lines.append("  no LangChain model was asked")
        if not self.traceback:
            lines += ["  output:", _indented(str(self.output))]
        if self.parsed is not None:
            lines.append(f"  read as: {self.parsed}")
        if self.error:
            lines.append(f"  ABSTAINS{'' if self.counts else ' (which does not count)'}: {self.error}")
        if self.traceback:
            lines.append(_indented(_last_frames(self.traceback)))
        return "\n".join(lines)


@dataclass(frozen=True)
class Rehearsal:
    """What a member does with public stand-ins. ``print`` it; `facts` is the same for a program.

    Attributes
    ----------
    question
        The request.
    calls
        One `RehearsedCall` for each bucket that the public examples fill; one with the first of these with braces,
        quotes and line breaks in its texts; and the one without examples, which an empty bucket makes.
    findings
        What else is wrong: a name in a template that nobody fills, a member that fails on made-up examples.
    """

    question: Mapping[str, Any]
    calls: tuple[RehearsedCall, ...]
    findings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no call would abstain and nothing else was found."""
        return not self.findings and not self._failed

    @property
    def _failed(self) -> int:
        return sum(bool(call.error) and call.counts for call in self.calls)

    @property
    def facts(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        calls = [{**asdict(call), "abstains": bool(call.error)} for call in self.calls]
        return {
            "passed": self.passed,
            "question": json.loads(json.dumps(dict(self.question), default=repr)),
            "calls": json.loads(json.dumps(calls, default=repr)),
            "findings": list(self.findings),
        }

    def __str__(self) -> str:
        said = "passed" if self.passed else f"FAILED: {self._failed} of {len(self.calls)} calls abstain"
        lines = [f"rehearsal {said}; nothing was charged, no private record was read"]
        return "\n".join([*lines, *(f"! {finding}" for finding in self.findings), *map(str, self.calls)])

    def __repr__(self) -> str:
        return f"<Rehearsal {'passed' if self.passed else 'failed'}, {len(self.calls)} calls: print() shows them>"


def _indented(text: str) -> str:
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ... ({len(text):,} characters)"
    return "\n".join(f"    {line}" for line in shown.splitlines())


def _last_frames(text: str) -> str:
    """Of a traceback's last error the frames nearest to it, without the error itself."""
    lines = text.rstrip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    end = next((i for i in range(frames[-1] + 1, len(lines)) if not lines[i].startswith(" ")), None) if frames else None
    return "\n".join(lines[frames[-3] if len(frames) > 2 else 0 : end])


# -- one call ----------------------------------------------------------------------------------------------------------


class _Heard(Runnable[Any, Any]):
    """A public chain of which a copy is called once, and what can be heard of it."""

    def __init__(self, chain: Pristine) -> None:
        self._chain = chain
        self._begin()

    def _begin(self) -> RunnableConfig:
        """At each attempt: a model that asks to wait is asked again."""
        self.hearing, self.ended = watched.Hearing(), False
        self.error: type[BaseException] | None = None
        self.line = self.traceback = ""
        self.started = time.perf_counter()
        self.seconds = 0.0
        return {"callbacks": [self.hearing], "tags": [], "metadata": {}}

    def _end(self, output: object = None, error: BaseException | None = None) -> Any:
        self.seconds, self.ended = time.perf_counter() - self.started, True
        if error is not None:
            self.error = type(error)
            with contextlib.suppress(Exception):
                self.line = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LINE]
            self.line = self.line or type(error).__name__
            with contextlib.suppress(Exception):
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this module
                self.traceback = "".join(traceback.format_exception(error))
            self.traceback = self.traceback or self.line
        return output

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        given = self._begin()
        try:
            copy = self._chain.copy()
            return self._end(copy.returned(copy.chain.invoke(copy.given(input), given)))
        except BaseException as error:
            self._end(error=error)
            raise

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        given = self._begin()
        try:
            copy = self._chain.copy()
            return self._end(copy.returned(await copy.chain.ainvoke(copy.given(input), given)))
        except BaseException as error:
            self._end(error=error)
            raise


def hear(
    chain: Pristine,
    request: boundary.MemberRequest,
    timeout: float | None,
    name: str,
    aggregator: Aggregator[Any] | None = None,
    must_count: bool = True,
) -> Flow[tuple[RehearsedCall, object]]:
    """One public call, as private ones are made, and its output as the aggregator reads it.

    Unless it ``must_count``, the output is fine if it is of the kind that the aggregator reads, whatever it says.
    """
    heard, started = _Heard(chain), time.perf_counter()
    how: dict[str, Any] = {"max_concurrency": 1, "timeout": timeout, "patience": _PATIENCE}
    (found,) = yield boundary.private_calls(Same(heard), [request], **how)
    error, trace, parsed = heard.line, heard.traceback, None
    late = found is boundary.ABSTAIN and (heard.error is None or not heard.ended)
    if late:
        error, trace = f"TimeoutError: no answer within {timeout:g} seconds" if timeout else "TimeoutError", ""
    elif not error and aggregator is not None:
        try:
            encoded = yield Either(partial(aggregator.encode, found), partial(aggregator.aencode, found))
            parsed = aggregator.shown(encoded)
            aggregator.check_encoded(encoded)
        except Exception as reason:
            error = _useless(found, aggregator, reason) if must_count else ""
        with contextlib.suppress(InvalidParameter):
            try:
                yield partial(aggregator.check_kind, found)
            except Exception as reason:
                error = error or _useless(found, aggregator, reason)
    seconds = time.perf_counter() - started if late else heard.seconds
    output = None if heard.error or late else found
    is_plain = math.isfinite(output) if isinstance(output, float) else isinstance(output, (str, int, type(None)))
    plain = output if is_plain else text_of(output) or repr(output)
    (values, bucket), prompts = request, tuple(heard.hearing.prompts)
    shown = "\n".join([*prompts, str(plain)])
    read = isinstance(bucket, WatchedExamples) and (bucket.read or bucket.shown_in(shown, str(values)))
    return RehearsedCall(
        name, prompts, plain, parsed, error, trace, round(seconds, 4), heard.hearing.tokens, read
    ), output


def _useless(output: object, aggregator: Aggregator[Any], reason: Exception) -> str:
    """Why an aggregator cannot use an output."""
    who, kind = type(aggregator).__name__, type(output).__name__
    if text_of(output) is not None:
        return f"{who} cannot use this text: {reason}" if str(reason) else f"{who} cannot use this text"
    if isinstance(output, Mapping):
        keys = ", ".join(map(repr, output)) or "none"
        return f"{who} cannot use a mapping (keys: {keys}); pick one of them: member.pick(...)"
    if fields := getattr(type(output), "model_fields", None):
        one = f"end the member with one of them: `| (lambda found: found.{next(iter(fields))})`"
        return f"{who} cannot use a {kind} (fields: {', '.join(fields)}); {one}"
    return f"{who} cannot use a {kind}{f': {reason}' if str(reason) else ''}"


# -- an ensemble's rehearsal -------------------------------------------------------------------------------------------


class Rehearsing:
    """What an ensemble needs for a rehearsal, and the rehearsal."""

    selector: PoissonExampleSelector
    has_member = True
    count_empty: bool
    public_member: Runnable[Any, Any]
    """The copy of the member that public calls use."""
    timeout: float | None
    doubts: Doubts
    unread = False
    """Whether nothing has shown yet that the member reads its examples."""
    share: Sequence[object] = ()
    _needed: frozenset[str] = frozenset()

    @abstractmethod
    def check_request(self, values: object) -> Mapping[str, Any]: ...

    @abstractmethod
    def check_member(self, values: Mapping[str, Any], aggregator: Aggregator[Any] | None) -> Flow[None]: ...

    @abstractmethod
    def note_rehearsal(
        self, values: Mapping[str, Any], bucket: WatchedExamples, aggregator: Aggregator[Any] | None
    ) -> Flow[None]: ...

    @abstractmethod
    def _made_up(
        self, number: int, values: Mapping[str, Any], aggregator: Aggregator[Any] | None
    ) -> WatchedExamples: ...

    @abstractmethod
    def copies_of(self, chain: Runnable[Any, Any]) -> Pristine: ...

    @abstractmethod
    def public_chain(self, chain: Runnable[Any, Any] | None, count: int) -> tuple[Pristine, int, float | None]: ...

    def rehearse(
        self, public_examples: Sequence[Any], question: Any, aggregator: Aggregator[Any] | None = None
    ) -> Rehearsal:
        """Run the member on public stand-ins, at no cost, and show all that it does: prompts, outputs, errors, tokens.

        Parameters
        ----------
        public_examples
            Examples that stand in for private ones: mappings with the store's keys, LangChain documents, or texts if
            the store has no ``output_key``; of a store of `split_with_parents`, public documents that are split so,
            too. They fill buckets as large as a member's may be, with a call for each. One more call has no example, as
            an empty bucket has none. Not private records: the report shows them.
        question
            A request of the release, or the text alone.
        aggregator
            Reads the outputs, and says why it cannot.

        Nothing is charged, no plan is frozen, and no record of the store is read: a selector of the member has no store
        here. Tracers and callbacks hear nothing. What the first release would ask the member in public (whether it
        answers on made-up examples, and shares no state) is asked here, and not again if the rehearsal has passed.

        Raises `InvalidParameter` if the member reads no example or makes releases of its own, and for stand-ins or a
        question that are not of the store's or the member's form; `UnsafeConfigurationError` as a first release would.
        """
        return run(self.rehearsal(public_examples, question, aggregator))

    async def arehearse(
        self, public_examples: Sequence[Any], question: Any, aggregator: Aggregator[Any] | None = None
    ) -> Rehearsal:
        """`rehearse`, asynchronously."""
        boundary.check_loop()
        return await arun(self.rehearsal(public_examples, question, aggregator))

    def rehearsal(self, given: Sequence[Any], question: Any, aggregator: Aggregator[Any] | None) -> Flow[Rehearsal]:
        """`rehearse` as a flow."""
        if not self.has_member:
            raise InvalidParameter("member", None, "given: without a member there is nothing to rehearse")
        if aggregator is not None and not isinstance(aggregator, Aggregator):
            raise InvalidParameter("aggregator", type(aggregator).__name__, "an Aggregator such as NoisyVote, or None")
        if isinstance(question, str):
            alone = next(iter(self._needed)) if len(self._needed) == 1 else "input"
            question = {self.selector.nearest_to or alone: question}
        values, buckets = self.check_request(question), watched.public_buckets(given, self.selector)
        if releases_in(self.public_member):
            raise InvalidParameter(
                "member", "a release in it", "without one, which would be charged: rehearse it alone"
            )
        boundary.check_surroundings()
        chain, store = self.copies_of(watched.without_store(self.public_member, self.share)), self.selector.store
        nothing = WatchedExamples((), store.input_key, store.output_key)
        calls, found = list[RehearsedCall](), list[str]()
        if aggregator is not None:
            asked, answers = aggregator.public_calls(), list[object]()
            if asked is not None:
                candidates, count, seconds = self.public_chain(*asked)
                candidates = (
                    chain if asked[0] is None else self.copies_of(watched.without_store(candidates.chain, self.share))
                )
                for _ in range(count):
                    call, answer = yield from hear(
                        candidates, (values, nothing), seconds, "the aggregator's public call"
                    )
                    calls[:] = [call]
                    answers.append(boundary.ABSTAIN if call.error else answer)
            try:
                aggregator = yield partial(aggregator.prepare, values, aggregator.options, answers)
            except (InvalidParameter, ModelUnavailable) as error:
                found.append(str(error))
                aggregator = None
        if self.selector.search_query is not None:
            rewriting, _, seconds = self.public_chain(self.selector.search_query, 1)
            rewriting = self.copies_of(watched.without_store(rewriting.chain, self.share))
            call, made = yield from hear(rewriting, (values, nothing), seconds, "the text to search for")
            calls.append(call)
            try:
                text_searched(made)
            except ModelUnavailable as error:
                found.append(str(error))
        for bucket in buckets:
            name = f"with {bucket.number} example{'s' * (bucket.number > 1)}"
            call, _ = yield from hear(chain, (values, bucket), self.timeout, name, aggregator)
            calls.append(call)
        if not any(call.read_examples or call.output is None for call in calls[-len(buckets) :]):
            refused = InvalidParameter(
                "member",
                type(self.public_member).__name__,
                f"a chain that reads its examples: {watched.READS_NOTHING}",
            )
            refused.add_note(str(Rehearsal(values, tuple(calls), (str(refused),))))
            raise refused
        if not calls[-1].error:
            name, with_marks = "with braces, quotes and line breaks", watched.marked(buckets[0])
            call, _ = yield from hear(chain, (values, with_marks), self.timeout, name, aggregator, must_count=False)
            if call.error:  # only texts of the records' form may do
                plain = self._made_up(2, values, aggregator)
                other, _ = yield from hear(chain, (values, plain), self.timeout, name, aggregator, must_count=False)
                call = replace(call, counts=not other.error)
            calls.append(call)
        call, _ = yield from hear(
            chain, (values, nothing), self.timeout, "without examples", aggregator, must_count=False
        )
        calls.append(replace(call, counts=self.count_empty))
        if any("KeyError" in call.error for call in calls):
            found += watched.slips_in(chain, {*values, "examples"})
        if Rehearsal(values, tuple(calls), tuple(found)).passed:
            try:
                yield from self.note_rehearsal(values, buckets[0], aggregator)
                yield from self.check_member(values, aggregator)
            except ModelUnavailable as error:
                found.append(str(error))
        return Rehearsal(values, tuple(calls), tuple(found))
