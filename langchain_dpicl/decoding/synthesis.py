"""Synthetic demonstrations: private answers to public inputs, charged once and then used for ever.

A job has its answers in FILE, and beside it, until the job is over, ``FILE.part``: the job's secret name, which is part
of its queries' names in the ledger, and the tokens of the unfinished answer, each on the disk before it is handed out.
So a job that was killed at any moment finds its own open charge again and continues with the next token.

Why that costs nothing more. A job releases the tokens in its journal. Each was drawn from a sample of its own and has a
unit of the charge for itself. Nobody saw a token that is not in the journal, so a repeated step on a fresh sample is
the first use of its unit. However often a job is interrupted, a charge never has more tokens than units. Three
conditions must hold. One process at a time has the journal: it is locked. Nobody restores an older copy of it, or
continues with a copy elsewhere: it knows its place. And an interruption does not depend on the owners in a sample; a
failure that does shows that much to whoever runs the process, each time.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_dpicl.budget import Receipt
from langchain_dpicl.calls.flow import run
from langchain_dpicl.decoding.answer import TokenJournal
from langchain_dpicl.decoding.sampler import DPSampler, Input
from langchain_dpicl.durable import LineFile, append, replacing, sync_folder
from langchain_dpicl.errors import (
    InvalidParameter,
    InvalidRecords,
    PrivacyBudgetExceeded,
    PrivacyWarning,
    ReleaseFailed,
)
from langchain_dpicl.release.transaction import acting_principal, transact

RECEIPT = "receipt"
"""The key of a line's receipt, beside those of its pair."""

_FORMAT = "dpicl-job-1"
_HEAD = f'{{"format": "{_FORMAT}"'.encode()


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
        try:
            with replacing(Path(path), mode=0o666) as file:
                file.writelines(lines)
        except OSError as error:
            raise InvalidParameter("path", str(path), f"a file that can be written ({error.strerror})") from None

    @classmethod
    def load(cls, path: str | Path) -> Demonstrations:
        """Read a file of `save` or `synthesize_demonstrations`. Raises `InvalidRecords` for anything else."""
        path = Path(path)
        try:
            lines, rest = from_lines(path.read_bytes())
        except OSError as error:
            raise InvalidRecords(f"{path.name!r} cannot be read: {error.strerror}") from None
        for number, line in enumerate([*lines, {}] if rest else lines, start=1):
            if not isinstance(line.get(RECEIPT), dict):
                raise InvalidRecords(f"line {number} of {path.name!r} is not a demonstration with its receipt")
        return cls.of(lines)

    @classmethod
    def of(cls, lines: Sequence[dict[str, Any]], unanswered: Iterable[Any] = ()) -> Demonstrations:
        """From the lines of a file: each a pair with its receipt."""
        pairs = [{name: value for name, value in line.items() if name != RECEIPT} for line in lines]
        return cls(pairs, [line[RECEIPT] for line in lines], unanswered)


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
    return ([*lines, rest], 0) if rest else (lines, len(last))


def mark_of(shared: str) -> str:
    """What stands for an input in the journal: a hash of its shared text."""
    return hashlib.sha256(shared.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Journal(LineFile, TokenJournal):
    """One job's hold on its files. Set ``under_way`` to None after the last answer; `close` it in any case.

    ``output`` is FILE; the incomplete last line of an interrupted job is dropped: the ledger has that answer.
    ``digest`` is of everything that decides an answer beside its input: "settings" in both files.

    Raises `InvalidParameter` as `LineFile` does, and if the files are not of a job with this digest: both then stay as
    they are.
    """

    under_way: str | None = None
    """The mark of the unfinished answer; None if there is none."""
    is_reopened = False

    def __init__(self, output: Path, digest: str) -> None:
        super().__init__(output.with_name(output.name + ".part"), output, "a file", "job")
        self._tokens: list[int] = []
        self.name = secrets.token_hex(16)
        is_new = not self.lines and _HEAD.startswith(self.torn[: len(_HEAD)])
        try:
            if not is_new:
                self._read_journal(digest)
            self.answers = self._read_output(digest)
            if self.under_way is None:  # nothing is charged
                self.lines = []
            self.mend()
            if self.under_way is None:
                self.write(to_line({"format": _FORMAT, "job": self.name, "settings": digest, "output": str(output)}))
                sync_folder(self.path)
        except BaseException:
            super().close(remove=is_new)
            raise

    def _read_journal(self, digest: str) -> None:
        """Read the lines of an earlier process."""
        header, *steps = from_lines(b"".join(line + b"\n" for line in self.lines))[0] or [{}]
        is_whole = all(isinstance(step.get("answer"), str) or isinstance(step.get("token"), int) for step in steps)
        if header.get("format") != _FORMAT or not is_whole:
            raise self.refused(f"a file beside which {self.path.name!r} is an undamaged journal, or is not there")
        if not steps:
            return
        if header.get("output") != str(self.output):
            raise self.refused(f"the file with which the job was begun, {header.get('output')!r}: move it back")
        if header.get("settings") != digest:
            raise self.refused(
                "a file whose job was begun with the same budget, model, template and settings; to give up the answer "
                f"under way, which stays charged, delete {self.path.name!r}"
            )
        self.name = str(header.get("job"))
        for step in steps:
            if "answer" in step:
                self.under_way, self._tokens = step["answer"], []
            else:
                self._tokens.append(step["token"])

    def _read_output(self, digest: str) -> list[dict[str, Any]]:
        """The lines of FILE, whose incomplete last line is taken away."""
        with self.writing():
            if self.output.exists() and not self.output.is_file():
                raise self.refused("a plain file")
            content = self.output.read_bytes() if self.output.exists() else b""
        found, rest = from_lines(content)
        for number, line in enumerate([*found, {}] if rest and self.under_way is None else found, start=1):
            receipt = line.get(RECEIPT)
            if not isinstance(receipt, dict) or receipt.get("settings") != digest:
                raise self.refused(
                    "a new file, or one whose every line is a demonstration made with the same budget, model, template "
                    f"and settings, which line {number} is not"
                )
        if content:
            whole = content[: len(content) - rest]
            with self.writing(), self.output.open("r+b") as file:
                if rest:
                    os.ftruncate(file.fileno(), len(whole))
                if whole and not whole.endswith(b"\n"):
                    append(file.fileno(), b"\n")
        return found

    def begin(self, shared: str) -> None:
        if (mark := mark_of(shared)) != self.under_way:
            self._start(mark)

    def _start(self, mark: str) -> None:
        self.write(to_line({"answer": mark}))
        self.under_way, self._tokens = mark, []

    def tokens(self) -> list[int]:
        if self._tokens and not self.is_reopened and self.under_way is not None:
            self._start(self.under_way)
        return list(self._tokens)

    def keep(self, token: int) -> None:
        self.write(to_line({"token": token}))
        self._tokens.append(token)

    def add(self, answer: dict[str, Any]) -> None:
        """Append an answer to FILE, durably."""
        with self.writing():
            with self.output.open("ab") as file:
                append(file.fileno(), to_line(answer))
            sync_folder(self.output)

    def close(self, remove: bool = False) -> None:
        """Release the files. The journal stays if the job is to be continued."""
        super().close(remove or self.under_way is None)


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
    file. The interrupted answer, or one whose model failed, continues with its next token, on its own charge, so no
    token is charged twice (see the top). A budget with ``replay=False`` does not know earlier queries, and one with
    tickets not who paid: such an answer begins again, on a new charge, as one does without ``output``; finished ones
    are replayed from the ledger (unless ``replay=False``). After a kill, tickets first wait the budget's
    ``replay_patience``.

    Raises
    ------
    InvalidParameter
        An input that is not allowed (nothing was charged). An ``output`` that another process is writing, that holds
        something else, that was begun with other settings, or whose unfinished answer is to no input in
        ``public_inputs``: it then stays as it is.
    PrivacyBudgetExceeded
        Nothing is left, and there is no demonstration at all.
    ReleaseFailed, ModelUnavailable, LedgerError
        As for `DPSampler`. What was made is in the file.
    """
    if not isinstance(sampler, DPSampler):
        raise InvalidParameter("sampler", type(sampler).__name__, "a DPSampler")
    key = sampler.store.output_key or "output"
    asked, budget, template = _checked(sampler, public_inputs, key), sampler.budget, sampler.template
    request = {
        "budget": budget.name,
        "principal": acting_principal() if budget.scope == "per_principal" else None,
        "template": [template.demonstration, template.query],
        "output": key,
    }
    request |= {"rules": rules.named(acting_principal())} if (rules := sampler.selector.rules) else {}
    digest = str(sampler.line().query_id(request, sampler._variant, acting_principal()))
    path = None if output is None else Path(output).expanduser().resolve()
    with contextlib.nullcontext() if path is None else contextlib.closing(Journal(path, digest)) as journal:
        lines, first = dict[str, dict[str, Any]](), list[str]()
        if journal is not None:
            try:
                lines = {template.ask(line): line for line in journal.answers}
            except InvalidParameter:
                raise journal.refused("a file whose every line has the keys that the template's query names") from None
            if journal.under_way not in {None, *map(mark_of, [*lines, *asked])}:
                raise journal.refused(
                    "a file whose interrupted answer is to one of public_inputs; to give that answer up, which stays "
                    f"charged, delete {journal.path.name!r}"
                )
            # The unfinished answer, even if it has a line: its tokens are charged, and perhaps not in the ledger.
            first = [shared for shared in asked if mark_of(shared) == journal.under_way]
        writer = copy.copy(sampler)
        writer.for_job, writer.journal = True, journal
        sampler.store.remember_release(f"demonstrations, on the budget {budget.name!r}")
        for shared in [*first, *(each for each in asked if each not in lines and each not in first)]:
            kept, given = asked[shared]
            try:
                text, receipt = run(transact(writer, given))
            except PrivacyBudgetExceeded:
                break
            except ReleaseFailed:
                if journal is None or journal.fault is None:
                    raise
                break
            if shared in lines:
                continue
            lines[shared] = line = {**kept, key: text.strip(), RECEIPT: {**receipt, "settings": digest}}
            if journal is not None:
                journal.add(line)
            if progress is not None:
                made = Demonstrations.of([line])
                progress(Made(made[0], made.receipts[0], len(lines.keys() & asked.keys()), len(asked)))
        if journal is not None:
            if journal.fault is not None:
                raise journal.refused(f"a file that can be written ({journal.fault})")
            journal.under_way = None
    answered = [lines[shared] for shared in asked if shared in lines]
    if not answered:
        sampler.line().check(1, acting_principal())
    unanswered = [given for shared, (_, given) in asked.items() if shared not in lines]
    if unanswered:
        said = f"the budget's tokens are spent: {len(unanswered)} of {len(asked)} inputs stay unanswered"
        warnings.warn(said, PrivacyWarning, stacklevel=2)
    return Demonstrations.of(answered, unanswered)


def _checked(sampler: DPSampler, public_inputs: object, output_key: str) -> dict[str, tuple[dict[str, Any], Input]]:
    """By shared text, each distinct input once: the part that the pair keeps, and the input as the caller gave it.

    `InvalidParameter` names the position of the first input that is not allowed.
    """
    if isinstance(public_inputs, (str, bytes, Mapping)) or not isinstance(public_inputs, Iterable):
        raise InvalidParameter("public_inputs", type(public_inputs).__name__, "a list of texts or mappings")
    inputs, names = list(public_inputs), sampler.template.query_keys
    if not inputs:
        raise InvalidParameter("public_inputs", inputs, "at least one input")
    if clash := {output_key, RECEIPT} & set(names) or {RECEIPT} & {output_key}:
        bound = "other keys for inputs and output, which a line of the file holds beside the receipt"
        raise InvalidParameter("template", clash.pop(), bound)
    asked: dict[str, tuple[dict[str, Any], Input]] = {}
    for position, each in enumerate(inputs):
        try:
            values, shared = sampler.exemplars.asked(each)
            kept = {name: values[name] for name in names}
            if not all(isinstance(value, (str, int, float)) for value in kept.values()):
                raise ValueError
            to_line(kept)  # raises ValueError for an infinite number, and for half a surrogate pair
        except InvalidParameter as error:
            raise InvalidParameter(f"public_inputs[{position}]", error.value, error.bound) from None
        except ValueError:
            bound = "texts and numbers, which a line of JSON can hold"
            raise InvalidParameter(f"public_inputs[{position}]", "(not shown)", bound) from None
        asked.setdefault(shared, (kept, each))
    return asked
