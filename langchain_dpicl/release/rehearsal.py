"""Rehearsals: the member on public stand-ins, at no cost, and all that can be seen of it.

Each call runs on a copy of the chain, as every call does. What it shows is public: the
examples and the question that the caller gave, and what the member made of them.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from langchain_core.runnables import Runnable

from langchain_dpicl.aggregators import Structured
from langchain_dpicl.aggregators.base import Aggregator
from langchain_dpicl.aggregators.reading import text_of
from langchain_dpicl.calls.flow import Either, Flow
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.private import boundary
from langchain_dpicl.release import watched
from langchain_dpicl.release.watched import Heard, PublicChain, WatchedExamples
from langchain_dpicl.selection.rules import text_searched

_LINE = 300
"""Characters of what a call raised, in one line."""

_PATIENCE = 10.0
"""Seconds that a call waits for a server that asks it to wait. In a release it waits longer."""

_SHOWN = 1500
"""Characters of a prompt or an output that the text of a report shows."""

_MARKED = "with braces, quotes and line breaks"


@dataclass(frozen=True)
class RehearsedCall:
    """One public call: of the member, of an aggregator's own chain, or of a ``search_query``.

    Attributes
    ----------
    name
        Its input: "with 2 examples", "without examples", or another public question: "the
        aggregator's public call", "the text to search for".
    prompts
        The prompts of the LangChain models in it, in order. Prompts that code sends to a
        model by other ways are not seen.
    output
        The output: a text, a number, or else its ``repr``. None if the call failed.
    parsed
        The aggregator's reading of it; None without an aggregator.
    error
        The reason why the member would abstain, in one line: the error of the call, or the
        fault of its output. "" if it would not abstain.
    traceback
        The traceback of the call's error.
    seconds
        The time that it took.
    read_examples
        True if it looked at its examples.
    counts
        True if a rehearsal fails if this call abstains. One without examples does not
        count, unless ``count_empty``: no more does one with braces if the member fails on
        any texts but those of its records' form.
    """

    name: str
    prompts: tuple[str, ...]
    output: object
    parsed: object
    error: str
    traceback: str
    seconds: float
    read_examples: bool
    counts: bool = True

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.seconds:.2f} s"]
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
    """The record of a member's calls with public stand-ins. ``print`` it; `facts` is the same for a program.

    Attributes
    ----------
    question
        The request.
    calls
        One `RehearsedCall` for each bucket that the public examples fill; one with the
        first of these with braces, quotes and line breaks in its texts; and the one without
        examples, which an empty bucket makes.
    findings
        The other faults: a name in a template that nobody fills, a question that the
        aggregator refuses, a text to search for that is none.
    """

    question: Mapping[str, Any]
    calls: tuple[RehearsedCall, ...]
    findings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if no call would abstain and nothing else was found."""
        return not self.findings and not self._failed

    @property
    def _failed(self) -> int:
        return sum(bool(call.error) and call.counts for call in self.calls)

    @property
    def facts(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        found = {
            "passed": self.passed,
            "question": dict(self.question),
            "calls": [{**asdict(call), "abstains": bool(call.error)} for call in self.calls],
            "findings": self.findings,
        }
        facts: dict[str, Any] = json.loads(json.dumps(found, default=repr))
        return facts

    def __str__(self) -> str:
        said = "passed" if self.passed else f"FAILED: {self._failed} of {len(self.calls)} calls abstain"
        lines = [f"rehearsal {said}; nothing was charged, no private record was read"]
        return "\n".join([*lines, *(f"! {finding}" for finding in self.findings), *map(str, self.calls)])

    def __repr__(self) -> str:
        return f"<Rehearsal {'passed' if self.passed else 'failed'}, {len(self.calls)} calls: print() shows them>"


def _indented(text: str) -> str:
    if len(text) > _SHOWN:
        text = f"{text[:_SHOWN]} ... ({len(text):,} characters)"
    return "\n".join(f"    {line}" for line in text.splitlines())


def _last_frames(text: str) -> str:
    """Of a traceback's last error the frames nearest to it, without the error itself."""
    lines = text.rstrip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        return "\n".join(lines)
    start = frames[-3] if len(frames) > 2 else 0
    end = next((i for i in range(frames[-1] + 1, len(lines)) if not lines[i].startswith(" ")), None)
    return "\n".join(lines[start:end])


# -- one call ----------------------------------------------------------------------------------------------------------


class _Raised:
    """The error of a call, in words."""

    def __init__(self, error: BaseException) -> None:
        self.line = self.traceback = type(error).__name__
        with contextlib.suppress(Exception):
            self.line = f"{self.line}: {' '.join(str(error).split())}"[:_LINE]
        with contextlib.suppress(Exception):
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without the boundary's frame
            self.traceback = "".join(traceback.format_exception(error))


def hear(
    chain: PublicChain,
    request: boundary.MemberRequest,
    name: str,
    aggregator: Aggregator[Any] | None = None,
    must_count: bool = True,
) -> Flow[tuple[RehearsedCall, object]]:
    """One public call, as private ones are made, and its output as the aggregator reads it.

    Unless it ``must_count``, the output is fine if it is of the kind that the aggregator
    reads, whatever it says.
    """
    heard = Heard(chain.copies)
    started = time.perf_counter()
    (output,) = yield boundary.private_calls(
        heard,
        [request],
        max_concurrency=1,
        timeout=chain.timeout,
        patience=_PATIENCE,
        failed=_Raised,
    )
    seconds = time.perf_counter() - started
    parsed = None
    error = trace = ""
    if output is boundary.ABSTAIN:
        error = f"TimeoutError: no answer within {chain.timeout:g} seconds" if chain.timeout else "TimeoutError"
        output = None
    elif isinstance(output, _Raised):
        error = output.line
        trace = output.traceback
        output = None
    elif aggregator is not None:
        parsed, error = yield from _reading(output, aggregator, must_count)
    values, bucket = request
    prompts = tuple(heard.hearing.prompts)
    shown = "\n".join([*prompts, str(_plain(output))])
    call = RehearsedCall(
        name,
        prompts,
        _plain(output),
        parsed,
        error,
        trace,
        seconds=round(seconds, 4),
        read_examples=isinstance(bucket, WatchedExamples) and bucket.are_seen(shown, str(values)),
    )
    return call, output


def _plain(output: object) -> object:
    """An output as a report shows it: a number or a text, else its ``repr``."""
    if output is None or isinstance(output, (str, int)) or (isinstance(output, float) and math.isfinite(output)):
        return output
    return text_of(output) or repr(output)


def _reading(output: object, aggregator: Aggregator[Any], must_count: bool) -> Flow[tuple[object, str]]:
    """An aggregator's reading of an output, and the reason why it cannot use it; "" if it can."""
    parsed = None
    error = ""
    try:
        encoded = yield Either(partial(aggregator.encode, output), partial(aggregator.aencode, output))
        parsed = aggregator.shown(encoded)
        aggregator.check_encoded(encoded)
    except Exception as reason:
        error = _useless(output, aggregator, reason) if must_count else ""
    with contextlib.suppress(InvalidParameter):
        try:
            yield partial(aggregator.check_kind, output)
        except Exception as reason:
            error = error or _useless(output, aggregator, reason)
    return parsed, error


def _useless(output: object, aggregator: Aggregator[Any], reason: Exception) -> str:
    """Say why an aggregator cannot use an output."""
    cannot = f"{type(aggregator).__name__} cannot use"
    kind = f"a {type(output).__name__}"
    if text_of(output) is not None:
        kind = "this text"
    elif isinstance(aggregator, Structured):
        return f"{cannot} {kind}: {reason}"
    elif isinstance(output, Mapping) and "messages" in output:
        return f"{cannot} a state with messages; end the member with `| (lambda state: state['messages'][-1])`"
    elif isinstance(output, Mapping):
        keys = ", ".join(map(repr, output)) or "none"
        return f"{cannot} a mapping (keys: {keys}); pick one of them: member.pick(...)"
    elif fields := getattr(type(output), "model_fields", None):
        return (
            f"{cannot} {kind} (fields: {', '.join(fields)}); end the member with one of them: "
            f"`| (lambda found: found.{next(iter(fields))})`"
        )
    because = str(reason) and f": {reason}"
    return f"{cannot} {kind}{because}"


# -- a whole rehearsal -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rehearsed:
    """The public question of a rehearsal that passed, and the aggregator that read its answer."""

    values: dict[str, Any] = field(repr=False)
    examples: WatchedExamples
    reader: Aggregator[Any]

    def again(self) -> WatchedExamples:
        """The examples, for another call."""
        return WatchedExamples(
            map(copy.copy, list.__iter__(self.examples)),
            self.examples.input_key,
            self.examples.output_key,
        )


@dataclass
class Rehearsing:
    """A rehearsal under way: its questions, and its findings so far.

    Attributes
    ----------
    public_chain
        Gives the chain of an aggregator's public calls, and for None the member.
    made_up
        Gives made-up examples, with answers that an aggregator reads.
    rewriting
        The chain of a ``search_query``.
    """

    public_chain: Callable[[Runnable[Any, Any] | None, int], PublicChain]
    made_up: Callable[[Aggregator[Any] | None], WatchedExamples]
    rewriting: PublicChain | None
    values: Mapping[str, Any]
    buckets: Sequence[WatchedExamples]
    count_empty: bool
    calls: list[RehearsedCall] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    @property
    def report(self) -> Rehearsal:
        return Rehearsal(self.values, tuple(self.calls), tuple(self.findings))

    def carry_out(self, aggregator: Aggregator[Any] | None) -> Flow[Aggregator[Any] | None]:
        """Make all calls. Returns the aggregator that reads the answers to this question."""
        if aggregator is not None:
            aggregator = yield from self._prepared(aggregator)
        if self.rewriting is not None:
            call, made = yield from hear(self.rewriting, self._without_examples(), "the text to search for")
            self.calls.append(call)
            try:
                text_searched(made)
            except ModelUnavailable as error:
                self.findings.append(str(error))
        yield from self._answers(aggregator)
        return aggregator

    def _without_examples(self) -> boundary.MemberRequest:
        return self.values, WatchedExamples((), self.buckets[0].input_key, self.buckets[0].output_key)

    def _prepared(self, aggregator: Aggregator[Any]) -> Flow[Aggregator[Any] | None]:
        """The aggregator for this question, after its public calls; None if it refuses the question."""
        answers: list[object] = []
        asked = aggregator.public_calls()
        if asked is not None:
            chain = self.public_chain(*asked)
            for _ in range(chain.times):
                call, answer = yield from hear(chain, self._without_examples(), "the aggregator's public call")
                self.calls = [call]
                answers.append(boundary.ABSTAIN if call.error else answer)
        try:
            prepared: Aggregator[Any] = yield partial(aggregator.prepare, self.values, aggregator.options, answers)
        except (InvalidParameter, ModelUnavailable) as error:
            self.findings.append(str(error))
            return None
        return prepared

    def _answers(self, aggregator: Aggregator[Any] | None) -> Flow[None]:
        """The member's calls. Raises `InvalidParameter` if it reads no example."""
        member = self.public_chain(None, 1)
        for bucket in self.buckets:
            name = f"with {bucket.number} example{'s' * (bucket.number > 1)}"
            call, _ = yield from hear(member, (self.values, bucket), name, aggregator)
            self.calls.append(call)
        if not any(call.read_examples or call.output is None for call in self.calls[-len(self.buckets) :]):
            refused = InvalidParameter(
                "member",
                type(member.copies.chain).__name__,
                f"a chain that reads its examples: {watched.READS_NOTHING}",
            )
            self.findings = [str(refused)]
            refused.add_note(str(self.report))
            raise refused
        if not self.calls[-1].error:
            alike = partial(hear, member, name=_MARKED, aggregator=aggregator, must_count=False)
            call, _ = yield from alike((self.values, watched.marked(self.buckets[0])))
            if call.error:  # the member may need texts of the records' form
                other, _ = yield from alike((self.values, self.made_up(aggregator)))
                call = replace(call, counts=not other.error)
            self.calls.append(call)
        call, _ = yield from hear(member, self._without_examples(), "without examples", aggregator, must_count=False)
        self.calls.append(replace(call, counts=self.count_empty))
        if any("KeyError" in call.error for call in self.calls):
            self.findings += watched.slips_in(member.copies.chain, {*self.values, "examples"})
