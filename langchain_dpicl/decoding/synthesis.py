"""Synthetic demonstrations: private answers to public inputs, charged once and then used for ever."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_dpicl.calls.flow import run
from langchain_dpicl.decoding.demonstrations import RECEIPT, DemonstrationReceipt, Demonstrations, to_line
from langchain_dpicl.decoding.journal import Journal, mark_of
from langchain_dpicl.decoding.sampler import DPSampler, Input
from langchain_dpicl.errors import InvalidParameter, PrivacyBudgetExceeded, PrivacyWarning, ReleaseFailed
from langchain_dpicl.release.transaction import acting_principal, transact


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
    token is charged twice (`journal` has the proof). A budget with ``replay=False`` does not know earlier queries: such
    an answer begins again, on a new charge, as one does without ``output``; finished ones are replayed from the ledger.

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
    digest = str(sampler.line().query_id(request, sampler._variant, acting_principal()))
    lines, first, journal = dict[str, dict[str, Any]](), list[str](), None
    with contextlib.ExitStack() as held:
        if output is not None:
            journal = held.enter_context(closing(Journal(Path(output).expanduser().resolve(), digest)))
            lines, first = _resumed(sampler, asked, journal)
        writer, refused = copy.copy(sampler), None
        writer.for_job, writer.journal = True, journal
        for shared in [*first, *(each for each in asked if each not in lines and each not in first)]:
            kept, _ = asked[shared]
            try:
                text, receipt = run(transact(writer, kept))
            except PrivacyBudgetExceeded:
                break
            except ReleaseFailed:
                if journal is None or journal.fault is None:
                    raise
                refused = journal.refused(f"a file that can be written ({journal.fault})")
                break
            if shared in lines:
                continue
            lines[shared] = line = {**kept, key: text.strip(), RECEIPT: {**receipt, "settings": digest}}
            if journal is not None:
                journal.add(line)
            if progress is not None:
                made = Demonstrations.of([line])
                progress(Made(made[0], made.receipts[0], len(lines.keys() & asked.keys()), len(asked)))
        if refused is not None:
            raise refused
        if journal is not None:
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


def _resumed(sampler: DPSampler, asked: Iterable[str], journal: Journal) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The lines of the file by the shared text of their inputs, and the input of the unfinished answer.

    That one is answered first, even if it has a line: its tokens are charged, and perhaps not recorded in the ledger.
    """
    try:
        lines = {sampler.template.ask(line): line for line in journal.answers}
    except InvalidParameter:
        raise journal.refused("a file whose every line has the keys that the template's query names") from None
    first = [shared for shared in asked if mark_of(shared) == journal.under_way]
    if journal.under_way is not None and not first and journal.under_way not in map(mark_of, lines):
        raise journal.refused(
            "a file whose interrupted answer is to one of public_inputs; to give that answer up, which stays charged, "
            f"delete {journal.path.name!r}"
        )
    return lines, first
