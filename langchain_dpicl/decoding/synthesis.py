"""Synthetic demonstrations: private answers to public inputs, charged once and then used for ever.

A job keeps its answers in FILE. Each is appended when it is whole and the ledger has its receipt; before that nobody
sees any of it. So every text in FILE is one answer of `DPSampler` with a charge of its own. A job that was killed at
any moment goes on with the inputs that have no line. The text that was under way is begun anew, on a new charge, with
fresh coins and draws; the charge that it had stands.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.runnables import Runnable

from langchain_dpicl.budget import Receipt
from langchain_dpicl.budget.line import ZERO_SHOT
from langchain_dpicl.decoding.sampler import DPSampler, Input
from langchain_dpicl.decoding.steps import TokenRelease
from langchain_dpicl.durable import LineFile, refused, replacing, sync_folder, writing
from langchain_dpicl.errors import (
    InvalidParameter,
    InvalidRecords,
    MembersAbstained,
    PrivacyBudgetExceeded,
    PrivacyWarning,
)
from langchain_dpicl.release.base import AnswerWithReceipt, AnyRelease, with_its_receipt
from langchain_dpicl.release.transaction import acting_principal

RECEIPT = "receipt"
"""The key of a line's receipt, beside those of its pair."""


class DemonstrationReceipt(Receipt):
    """The receipt of one demonstration's answer."""

    settings: str
    """A keyed hash of everything that decides the answers beside the input: budget, plan, model, template, numbers."""


class Demonstrations(list[dict[str, Any]]):
    """Public input/output pairs, as plain mappings: released outputs to public inputs.

    Their use costs nothing more: ``FewShotPromptTemplate(examples=...)``, any model, any number of times.

    Parameters
    ----------
    pairs, receipts
        The pairs, and for each of them the receipt of its answer.
    unanswered
        The inputs that have no output because the budget was spent.
    """

    def __init__(
        self,
        pairs: Iterable[dict[str, Any]] = (),
        receipts: Iterable[DemonstrationReceipt] = (),
        unanswered: Iterable[Any] = (),
    ) -> None:
        super().__init__(pairs)
        self.receipts = list(receipts)
        self.unanswered = list(unanswered)

    def save(self, path: str | Path) -> None:
        """Write one JSON object a line: a pair's keys, and its receipt under "receipt". Replaces the file as a whole.

        Raises `InvalidParameter` if the file cannot be written, or if pairs were removed without their receipts.
        """
        if len(self) != len(self.receipts):
            raise InvalidParameter("receipts", len(self.receipts), f"one for each of {len(self)} pairs")
        lines = [to_line({**pair, RECEIPT: receipt}) for pair, receipt in zip(self, self.receipts, strict=True)]
        with writing("path", path), replacing(Path(path), mode=0o666) as file:
            file.writelines(lines)

    @classmethod
    def load(cls, path: str | Path) -> Demonstrations:
        """Read a file of `save` or `synthesize_demonstrations`. Raises `InvalidRecords` for anything else."""
        path = Path(path)
        with refused(lambda why: InvalidRecords(f"{path.name!r} cannot be read: {why}")):
            lines, rest = from_lines(path.read_bytes())
        if rest:
            lines.append({})
        for number, line in enumerate(lines, start=1):
            if not isinstance(line.get(RECEIPT), dict):
                raise InvalidRecords(f"line {number} of {path.name!r} is not a demonstration with its receipt")
        return cls.of(lines)

    @classmethod
    def of(cls, lines: Sequence[dict[str, Any]], unanswered: Iterable[Any] = ()) -> Demonstrations:
        """From the lines of a file: each a pair with its receipt."""
        return cls(
            pairs=[{name: value for name, value in line.items() if name != RECEIPT} for line in lines],
            receipts=[line[RECEIPT] for line in lines],
            unanswered=unanswered,
        )


def to_line(content: dict[str, Any]) -> bytes:
    """One line of readable JSON. Raises ValueError for an infinite number and for half a surrogate pair."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def from_lines(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the object on each line that is not empty ({} for other content), and the size of a torn last line."""

    def parsed(line: bytes) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
        return {}

    *whole, last = content.split(b"\n")
    lines = [parsed(line) for line in whole if line.strip()]
    rest = parsed(last)
    if rest:
        return [*lines, rest], 0
    return lines, len(last)


class JobFile(LineFile):
    """One job's hold on FILE. Its lines are ``answers``; `close` it in any case.

    The incomplete last line of a killed job is dropped. ``digest`` is of everything that decides an answer beside its
    input: "settings" in every line. ``key`` is the first one of a line.

    Raises `InvalidParameter` as `LineFile` does, and if the file is not of a job with this digest: it then stays as it
    is.
    """

    def __init__(self, path: Path, digest: str, key: str) -> None:
        self._is_new = not os.path.exists(path)
        if not self._is_new and not os.path.isfile(path):
            raise InvalidParameter("output", str(path), "a plain file")
        super().__init__(path, path, "a file", "job")
        try:
            self.answers, rest = from_lines(b"\n".join([*self.lines, self.torn]))
            head = to_line({key: 0})[:-3]
            is_ours = bool(self.answers) or head.startswith(self.torn[: len(head)])
            for number, line in enumerate(self.answers if is_ours else [{}], start=1):
                receipt = line.get(RECEIPT)
                if not isinstance(receipt, dict) or receipt.get("settings") != digest:
                    raise self.refused(
                        "a new file, or one whose every line is a demonstration made with the same budget, model, "
                        f"template and settings, which line {number} is not"
                    )
            if rest:
                self.mend()
            elif self.torn:
                self.write(b"\n")
            sync_folder(path)
        except BaseException:
            self.close()
            raise

    def close(self, remove: bool = False) -> None:
        """Release the file. One that is new goes if it has got no answer."""
        super().close(remove or (self._is_new and not os.fstat(self._descriptor).st_size))


@contextlib.contextmanager
def job_file(output: str | Path | None, digest: str, key: str) -> Iterator[JobFile | None]:
    """The file of a job, for the ``with`` block; None for a job without one."""
    if output is None:
        yield None
        return
    with contextlib.closing(JobFile(Path(output).expanduser().resolve(), digest, key)) as file:
        yield file


def settings_of(release: AnyRelease[Any], **facts: Any) -> str:
    """A keyed hash of all that decides a job's answers beside their inputs: a file is of one such job."""
    budget = release.budget
    whose = acting_principal()
    request: dict[str, Any] = {
        "budget": budget.name,
        "principal": whose if budget.scope == "per_principal" else None,
        **facts,
    }
    if release.selector.rules:
        request["rules"] = release.selector.rules.named(whose)
    return str(release.line().query_id(request, release._variant, whose))


def writer_of(release: AnyRelease[Any], file: JobFile | None) -> AnyRelease[AnswerWithReceipt[Any]]:
    """The release of a job, which answers with receipts. A sampler's questions are the job's own if a file keeps them:
    nobody waits for the answer of a job that was killed."""
    writer = release.with_receipt()
    if isinstance(writer, TokenRelease):
        writer.for_job = True
        writer.job = "" if file is None else secrets.token_hex(16)
    return writer


def answers(release: Runnable[Any, Any], asked: Mapping[str, Any]) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Answer one request after the other until nothing is left: the request's name, the answer, its receipt.

    The answer is None if the members abstained, which is charged and has no receipt. What is not released (the public
    answer when the budget is spent) is no answer here.
    """
    for name, given in asked.items():
        answer, receipt = None, None
        try:
            answer, receipt = with_its_receipt(release.invoke(given))
        except PrivacyBudgetExceeded:
            return
        except MembersAbstained:
            pass
        if receipt is not None and receipt["outcome"] == ZERO_SHOT:
            return
        yield name, answer, receipt or {}


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

    Each output is one private answer, charged as every answer of `DPSampler`; all of them together are (epsilon,
    delta)-DP by the budget's plan, for data sets that differ in one owner. The use of the pairs costs nothing more.

    Parameters
    ----------
    public_inputs
        Texts (the store's input key then names them in the pair), or mappings with the keys of the template's query,
        which alone are kept. Inputs that read the same make one pair. All are checked before anything is charged.
        Nothing in them may be private.
    output
        A file, on a local disk, that gets each pair with its receipt as soon as it is made (see `Demonstrations`). With
        it the job can be resumed after any end (see below).
    progress
        Called with each demonstration as it is made; not with those that were in the file.

    Returns
    -------
    Demonstrations
        One pair for each input, in the order of the inputs: its keys are the input's, and the store's output key
        ("output" if it has none) with the answer, without the white space around it. If the budget ran out of tokens,
        ``unanswered`` has the inputs without an answer, and a `PrivacyWarning` says so; an answer that was cut short is
        kept, and its receipt's outcome says so.

    Resuming a job. A second call with the same sampler, budget and file answers only the inputs without a line in the
    file. The answer that was interrupted, whose model failed, or that could not be written, begins again, on a new
    charge; the charge that it had stands. Without ``output`` finished answers are replayed from the ledger (unless
    ``replay=False``).

    Raises
    ------
    InvalidParameter
        An input that is not allowed (nothing was charged). An ``output`` that another process is writing, that holds
        something else, or that was begun with other settings: it then stays as it is. One that cannot be written.
    PrivacyBudgetExceeded
        Nothing is left, and there is no demonstration at all.
    ReleaseFailed, ModelUnavailable, LedgerError
        As for `DPSampler`. What was made is in the file.
    """
    if not isinstance(sampler, DPSampler):
        raise InvalidParameter("sampler", type(sampler).__name__, "a DPSampler")
    key = sampler.store.output_key or "output"
    asked = _checked(sampler, public_inputs, key)
    template = sampler.template
    digest = settings_of(sampler, template=[template.demonstration, template.query], output=key)
    first = [*template.query_keys, key][0]
    with job_file(output, digest, first) as file:
        lines = dict[str, dict[str, Any]]()
        if file is not None:
            try:
                lines = {template.ask(line): line for line in file.answers}
            except InvalidParameter:
                raise file.refused("a file whose every line has the keys that the template's query names") from None
        sampler.store.remember_release(f"demonstrations, on the budget {sampler.budget.name!r}")
        missing = {shared: values for shared, values in asked.items() if shared not in lines}
        writer = writer_of(sampler, file)
        for shared, answer, receipt in answers(writer, {shared: given for shared, (_, given) in missing.items()}):
            kept, _ = missing[shared]
            lines[shared] = line = {**kept, key: answer.strip(), RECEIPT: {**receipt, "settings": digest}}
            if file is not None:
                file.write(to_line(line))
            if progress is not None:
                made = Demonstrations.of([line])
                progress(Made(made[0], made.receipts[0], len(lines.keys() & asked.keys()), len(asked)))
    answered = [lines[shared] for shared in asked if shared in lines]
    if not answered:
        sampler.line().check(1, acting_principal())
    unanswered = [given for shared, (_, given) in asked.items() if shared not in lines]
    if unanswered:
        warnings.warn(
            f"the budget's tokens are spent: {len(unanswered)} of {len(asked)} inputs stay unanswered",
            PrivacyWarning,
            stacklevel=2,
        )
    return Demonstrations.of(answered, unanswered)


def _checked(sampler: DPSampler, public_inputs: object, output_key: str) -> dict[str, tuple[dict[str, Any], Input]]:
    """By shared text, each distinct input once: the part that the pair keeps, and the input as the caller gave it.

    `InvalidParameter` names the position of the first input that is not allowed.
    """
    if isinstance(public_inputs, (str, bytes, Mapping)) or not isinstance(public_inputs, Iterable):
        raise InvalidParameter("public_inputs", type(public_inputs).__name__, "a list of texts or mappings")
    inputs = list(public_inputs)
    names = sampler.template.query_keys
    if not inputs:
        raise InvalidParameter("public_inputs", inputs, "at least one input")
    if clash := {output_key, RECEIPT} & set(names) or {RECEIPT} & {output_key}:
        raise InvalidParameter(
            "template",
            clash.pop(),
            "other keys for inputs and output, which a line of the file holds beside the receipt",
        )
    asked: dict[str, tuple[dict[str, Any], Input]] = {}
    for position, each in enumerate(inputs):
        try:
            values, shared = sampler.exemplars.asked(each)
            kept = {name: values[name] for name in names}
            if not all(isinstance(value, (str, int, float)) for value in kept.values()):
                raise ValueError
            line = json.loads(to_line(kept))  # ValueError for an infinite number, and for half a surrogate pair
            if sampler.template.ask(line) != shared:  # the file would not know it again, such as an enumeration's text
                raise ValueError
        except InvalidParameter as error:
            raise InvalidParameter(f"public_inputs[{position}]", error.value, error.bound) from None
        except ValueError:
            raise InvalidParameter(
                f"public_inputs[{position}]", "(not shown)", "texts and numbers, which a line of JSON can hold"
            ) from None
        asked.setdefault(shared, (kept, each))
    return asked
