"""Rehearsals: the member on public stand-ins, at no cost, and all that can be seen of it.

Each call runs on a copy of the chain, as every call does. What it shows is public: the examples and the question that
the caller gave, and what the member made of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from langchain_core.runnables import Runnable

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
    """What a member does with public stand-ins. ``print`` it; `facts` is the same for a program.

    Attributes
    ----------
    question
        The request.
    calls
        One `RehearsedCall` for each bucket that the public examples fill; one with the first of these with braces,
        quotes and line breaks in its texts; and the one without examples, which an empty bucket makes.
    findings
        What else is wrong: a name in a template that nobody fills, a question that the aggregator refuses, a text to
        search for that is none.
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
        found = {"passed": self.passed, "question": dict(self.question), "calls": calls, "findings": self.findings}
        facts: dict[str, Any] = json.loads(json.dumps(found, default=repr))
        return facts

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


class _Raised:
    """What a call raised, in words."""

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

    Unless it ``must_count``, the output is fine if it is of the kind that the aggregator reads, whatever it says.
    """
    heard, timeout = Heard(chain.copies), chain.timeout
    started = time.perf_counter()
    how: dict[str, Any] = {"max_concurrency": 1, "timeout": timeout, "patience": _PATIENCE, "failed": _Raised}
    (output,) = yield boundary.private_calls(heard, [request], **how)
    seconds = time.perf_counter() - started
    parsed, error, trace = None, "", ""
    if output is boundary.ABSTAIN:
        error = f"TimeoutError: no answer within {timeout:g} seconds" if timeout else "TimeoutError"
        output = None
    elif isinstance(output, _Raised):
        error, trace = output.line, output.traceback
        output = None
    elif aggregator is not None:
        parsed, error = yield from _reading(output, aggregator, must_count)
    values, bucket = request
    shown = "\n".join([*heard.hearing.prompts, str(_plain(output))])
    read = isinstance(bucket, WatchedExamples) and bucket.are_seen(shown, str(values))
    prompts = tuple(heard.hearing.prompts)
    call = RehearsedCall(name, prompts, _plain(output), parsed, error, trace, round(seconds, 4), read)
    return call, output


def _plain(output: object) -> object:
    """An output as a report shows it: a number or a text, else its ``repr``."""
    is_plain = math.isfinite(output) if isinstance(output, float) else isinstance(output, (str, int, type(None)))
    return output if is_plain else text_of(output) or repr(output)


def _reading(output: object, aggregator: Aggregator[Any], must_count: bool) -> Flow[tuple[object, str]]:
    """What an aggregator reads in an output, and why it cannot use it; "" if it can."""
    parsed, error = None, ""
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


# -- a whole rehearsal -------------------------------------------------------------------------------------------------


@dataclass
class Rehearsing:
    """A rehearsal under way: what it asks, and what it has seen so far.

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
        """Make all calls. Returns what reads the answers to this question."""
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
            bound = f"a chain that reads its examples: {watched.READS_NOTHING}"
            refused = InvalidParameter("member", type(member.copies.chain).__name__, bound)
            self.findings = [str(refused)]
            refused.add_note(str(self.report))
            raise refused
        if not self.calls[-1].error:
            marked = self.values, watched.marked(self.buckets[0])
            call, _ = yield from hear(member, marked, _MARKED, aggregator, must_count=False)
            if call.error:  # only texts of the records' form may do
                made_up = self.values, self.made_up(aggregator)
                other, _ = yield from hear(member, made_up, _MARKED, aggregator, must_count=False)
                call = replace(call, counts=not other.error)
            self.calls.append(call)
        call, _ = yield from hear(member, self._without_examples(), "without examples", aggregator, must_count=False)
        self.calls.append(replace(call, counts=self.count_empty))
        if any("KeyError" in call.error for call in self.calls):
            self.findings += watched.slips_in(member.copies.chain, {*self.values, "examples"})
