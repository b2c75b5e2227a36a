"""Synthetic demonstrations: private answers to public inputs, made once and then used for ever.

The whole price is paid while they are made. The result is public, so any model may see it, in any prompt, any number
of times. A job on a file may be killed at any moment; the same call resumes it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_dpicl.budget import Charge
from langchain_dpicl.calls.flow import run
from langchain_dpicl.decoding.sampler import DPSampler, Input
from langchain_dpicl.decoding.synthesis.demonstrations import (
    RECEIPT,
    DemonstrationReceipt,
    Demonstrations,
    to_line,
)
from langchain_dpicl.decoding.synthesis.journal import Journal
from langchain_dpicl.errors import InvalidParameter, PrivacyBudgetExceeded, PrivacyWarning, ReleaseFailed
from langchain_dpicl.release.base import acting_principal
from langchain_dpicl.release.transaction import Request, transact


@dataclass(frozen=True)
class Made:
    """One demonstration as it is made, and how far the job is. Public."""

    pair: dict[str, Any]
    receipt: DemonstrationReceipt
    done: int
    total: int


def synthesize_demonstrations(
    sampler: DPSampler,
    public_inputs: Iterable[Input],
    *,
    output: str | Path | None = None,
    progress: Callable[[Made], None] | None = None,
) -> Demonstrations:
    """Have the sampler write an output for each public input: demonstrations that are public themselves.

    Each output is one private answer, a release of as many tokens as it has, charged and credited as every answer of
    `DPSampler`; all of them together are (epsilon, delta)-DP by the budget's plan, where neighbouring data sets differ
    in one owner. The pairs are post-processing of it: showing them to any model costs nothing more.

    Parameters
    ----------
    public_inputs
        Texts (the store's input key then names them in the pair), or mappings with the keys of the template's query
        (these keys are kept, and no others). Inputs that read the same make one pair, by one answer. All are checked
        before anything is charged. Nothing in them may be private.
    output
        A file that gets each pair with its receipt, as a line of JSON, as soon as it is made (see `Demonstrations`).
        With it the job can be resumed after any end (see below); it should be on a local disk.
    progress
        Called with each demonstration as it is made; not with those that were in the file.

    Returns
    -------
    Demonstrations
        One pair for each input, in the order of the inputs: its keys are the input's, and the store's output key
        ("output" where it has none) with the answer, without the white space around it. If the tokens of the budget
        were spent on the way, ``unanswered`` has the inputs that have none, and a `PrivacyWarning` says so; the answer
        that was cut short is kept, and its receipt's outcome says so.

    Resuming a job. A second call with the same sampler, budget and file answers the inputs without a line in the file,
    old and new ones, and these alone. The interrupted answer continues with its next token, on its own charge: a job
    charges for the tokens of its answers once, whether it was killed or not (`journal` has the proof). A budget with
    ``replay=False`` does not know earlier queries: an interrupted answer begins again, on a new charge. An answer whose
    model failed stays open in the same way. Without ``output``, an interrupted answer keeps its whole charge, and
    finished ones are replayed from the ledger.

    Raises
    ------
    InvalidParameter
        An input that is not allowed (nothing was charged), or an ``output`` that another process is writing, that
        holds something else, or that was begun with another budget, model, template or other settings: it then stays
        as it is. Also if the unfinished answer in ``output`` is of an input that is not in ``public_inputs``.
    PrivacyBudgetExceeded
        Nothing is left, and there is no demonstration at all.
    ReleaseFailed, ModelUnavailable, LedgerError
        As for `DPSampler`. What was made is in the file.
    """
    if not isinstance(sampler, DPSampler):
        raise InvalidParameter("sampler", type(sampler).__name__, "a DPSampler")
    requests = _checked(sampler, public_inputs)
    settings = _settings(sampler)
    journal = None if output is None else Journal(Path(output).expanduser().resolve(), settings)
    with nullcontext() if journal is None else closing(journal):
        made = _Job(sampler, requests, settings, journal).run(progress)
    if made.unanswered:
        warnings.warn(
            f"the budget's tokens are spent: {len(made.unanswered)} of {len(requests)} inputs stay unanswered",
            PrivacyWarning,
            stacklevel=2,
        )
    return made


@dataclass(frozen=True)
class _Request:
    """One input: the part that the pair keeps, the shared text, and the input as the caller gave it. Public."""

    kept: dict[str, Any]
    shared: str
    given: Input

    @property
    def mark(self) -> str:
        return hashlib.sha256(self.shared.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _checked(sampler: DPSampler, public_inputs: object) -> list[_Request]:
    """One request for each distinct input. `InvalidParameter` names the position of the first that is not allowed."""
    if isinstance(public_inputs, (str, bytes, Mapping)) or not isinstance(public_inputs, Iterable):
        raise InvalidParameter("public_inputs", type(public_inputs).__name__, "a list of texts or mappings")
    inputs, reserved = list(public_inputs), {_output_key(sampler), RECEIPT}
    if not inputs:
        raise InvalidParameter("public_inputs", inputs, "at least one input")
    if clash := reserved & set(sampler.template.query_keys) or {RECEIPT} & {_output_key(sampler)}:
        bound = "other keys for inputs and output, which a line of the file holds beside the receipt"
        raise InvalidParameter("template", clash.pop(), bound)
    requests: dict[str, _Request] = {}
    for position, given in enumerate(inputs):
        try:
            values, shared = sampler.asked(given)
            kept = {name: values[name] for name in sampler.template.query_keys}
            if not all(isinstance(value, (str, int, float)) and _is_json(value) for value in kept.values()):
                raise InvalidParameter("input", "(not shown)", "texts and numbers, which a line of JSON can hold")
        except InvalidParameter as error:
            wrong = InvalidParameter(f"public_inputs[{position}]", error.value, error.bound)
        else:
            requests.setdefault(shared, _Request(kept, shared, given))
            continue
        raise wrong
    return list(requests.values())


def _is_json(value: object) -> bool:
    try:
        to_line({"": value})
    except ValueError:  # an infinite number, or half a surrogate pair
        return False
    return True


def _output_key(sampler: DPSampler) -> str:
    return sampler.selector.store.output_key or "output"


def _settings(sampler: DPSampler) -> str:
    """A keyed hash of all that decides an answer beside its input."""
    budget, template = sampler.budget, sampler.template
    request = {
        "budget": budget.name,
        "principal": acting_principal() if budget.scope == "per_principal" else None,
        "template": [template.demonstration, template.query],
        "output": _output_key(sampler),
    }
    return str(sampler.line().query_id(request, sampler._variant, acting_principal()))


class _Job:
    """Some requests, and the lines of those that have their answers."""

    def __init__(self, sampler: DPSampler, requests: list[_Request], settings: str, journal: Journal | None) -> None:
        self.sampler = sampler
        self.requests = requests
        self.settings = settings
        self.journal = journal
        self.lines: dict[str, dict[str, Any]] = {}
        for line in () if journal is None else journal.lines:
            try:
                shared = sampler.template.ask(line)
            except InvalidParameter:
                assert journal is not None
                wrong = journal.refused("a file whose every line has the keys that the template's query names")
            else:
                self.lines[shared] = line
                continue
            raise wrong

    def run(self, progress: Callable[[Made], None] | None) -> Demonstrations:
        for request in self._in_order():
            line, is_new = self._line(request), request.shared not in self.lines
            if line is None:
                break
            if is_new:
                self.lines[request.shared] = line
                if self.journal is not None:
                    self.journal.write(line)
                if progress is not None:
                    made = Demonstrations.of([line])
                    done = sum(each.shared in self.lines for each in self.requests)
                    progress(Made(made[0], made.receipts[0], done, len(self.requests)))
        if self.journal is not None:
            self.journal.finish()
        answered = [self.lines[request.shared] for request in self.requests if request.shared in self.lines]
        if not answered:
            self.sampler.line().check(1, acting_principal())
        return Demonstrations.of(answered, [each.given for each in self.requests if each.shared not in self.lines])

    def _in_order(self) -> list[_Request]:
        """The requests without an answer, after the one with the unfinished answer.

        Its tokens are paid for, and perhaps not noted in the ledger, even if it is in the file.
        """
        missing = [request for request in self.requests if request.shared not in self.lines]
        mark = None if self.journal is None else self.journal.under_way
        if self.journal is None or mark is None:
            return missing
        first = [request for request in self.requests if request.mark == mark]
        known = (_Request({}, shared, "").mark for shared in self.lines)
        if not first and mark not in known:
            raise self.journal.refused(
                "a file whose interrupted answer is to one of public_inputs; to give that answer up, which stays "
                f"charged, delete {self.journal.part.name!r}"
            )
        return [*first, *(request for request in missing if request not in first)]

    def _line(self, request: _Request) -> dict[str, Any] | None:
        """An answer as a line of the file; None if the budget is spent."""
        journal = self.journal
        progress = None if journal is None else _Progress(journal, request.mark)
        try:
            text, receipt = run(transact(self.sampler.for_job(progress), request.kept))
        except PrivacyBudgetExceeded:
            return None
        except ReleaseFailed:
            if journal is None or journal.fault is None:
                raise
            fault = journal.fault
        else:
            told = {**receipt, "settings": self.settings}
            return {**request.kept, _output_key(self.sampler): text.strip(), RECEIPT: told}
        raise journal.refused(f"a file that can be written ({fault})")


class _Progress:
    """One answer of a job, whose tokens are in the journal."""

    def __init__(self, journal: Journal, mark: str) -> None:
        self.name = journal.name
        self._journal, self._mark, self._is_reopened = journal, mark, False

    def reopened(self, request: Request) -> Charge | None:
        """Note that this answer is under way; its charge, if it has one."""
        self._journal.begin(self._mark)
        charge = request.line.reopen(request.id, request.principal, text=request.text)
        self._is_reopened = charge is not None
        return charge

    def tokens(self) -> list[int]:
        """What was handed out on a charge that was reopened."""
        return self._journal.tokens(self._mark, reopened=self._is_reopened)

    def keep(self, token: int) -> None:
        """Write a token down."""
        self._journal.keep(token)
