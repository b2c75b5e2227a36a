"""Synthetic demonstrations: private answers to public inputs, charged once and then used for ever."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_dpicl.calls.flow import run
from langchain_dpicl.decoding.demonstrations import RECEIPT, DemonstrationReceipt, Demonstrations, to_line
from langchain_dpicl.decoding.journal import Journal, mark_of
from langchain_dpicl.decoding.sampler import DPSampler, Input
from langchain_dpicl.errors import InvalidParameter, PrivacyBudgetExceeded, PrivacyWarning, ReleaseFailed
from langchain_dpicl.release.base import acting_principal
from langchain_dpicl.release.transaction import transact


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

    Each output is one private answer, charged and credited as every answer of `DPSampler`; all of them together are
    (epsilon, delta)-DP by the budget's plan, for data sets that differ in one owner. The pairs are post-processing: any
    model may see them, in any prompt, any number of times, at no further cost.

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
        ("output" if it has none) with the answer, without the white space around it. If the budget ran out of tokens,
        ``unanswered`` has the inputs without an answer, and a `PrivacyWarning` says so; an answer that was cut short is
        kept, and its receipt's outcome says so.

    Resuming a job. A second call with the same sampler, budget and file answers only the inputs without a line in the
    file. The interrupted answer, or one whose model failed, continues with its next token, on its own charge: a job
    charges for the tokens of its answers once, whether it was killed or not (`journal` has the proof). A budget with
    ``replay=False`` does not know earlier queries: such an answer begins again, on a new charge. Without ``output``,
    it keeps its whole charge, and finished answers are replayed from the ledger.

    Raises
    ------
    InvalidParameter
        An input that is not allowed (nothing was charged). An ``output`` that another process is writing, that holds
        something else, that was begun with another budget, model, template or other settings, or whose unfinished
        answer is to no input in ``public_inputs``: it then stays as it is.
    PrivacyBudgetExceeded
        Nothing is left, and there is no demonstration at all.
    ReleaseFailed, ModelUnavailable, LedgerError
        As for `DPSampler`. What was made is in the file.
    """
    if not isinstance(sampler, DPSampler):
        raise InvalidParameter("sampler", type(sampler).__name__, "a DPSampler")
    key = sampler.store.output_key or "output"
    asked, given = _checked(sampler, public_inputs, key)
    digest = _digest(sampler, key)
    journal = None if output is None else Journal(Path(output).expanduser().resolve(), digest)
    with nullcontext() if journal is None else closing(journal):
        lines = {} if journal is None else _known(sampler, journal)
        writer, refused = sampler.for_job(journal), None
        for shared in _in_order(asked, lines, journal):
            try:
                text, receipt = run(transact(writer, asked[shared]))
            except PrivacyBudgetExceeded:
                break
            except ReleaseFailed:
                if journal is None or journal.fault is None:
                    raise
                refused = journal.refused(f"a file that can be written ({journal.fault})")
                break
            if shared in lines:
                continue
            line = {**asked[shared], key: text.strip(), RECEIPT: {**receipt, "settings": digest}}
            lines[shared] = line
            if journal is not None:
                journal.write(line)
            if progress is not None:
                made = Demonstrations.of([line])
                progress(Made(made[0], made.receipts[0], len(lines.keys() & asked.keys()), len(asked)))
        if refused is not None:
            raise refused
        if journal is not None:
            journal.is_over = True
        answered = [lines[shared] for shared in asked if shared in lines]
        if not answered:
            sampler.line().check(1, acting_principal())
    unanswered = [given[shared] for shared in asked if shared not in lines]
    if unanswered:
        warnings.warn(
            f"the budget's tokens are spent: {len(unanswered)} of {len(asked)} inputs stay unanswered",
            PrivacyWarning,
            stacklevel=2,
        )
    return Demonstrations.of(answered, unanswered)


def _checked(
    sampler: DPSampler, public_inputs: object, output_key: str
) -> tuple[dict[str, dict[str, Any]], dict[str, Input]]:
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
    asked: dict[str, dict[str, Any]] = {}
    given: dict[str, Input] = {}
    for position, each in enumerate(inputs):
        try:
            values, shared = sampler.asked(each)
            kept = {name: values[name] for name in names}
            if not all(isinstance(value, (str, int, float)) for value in kept.values()):
                raise ValueError
            to_line(kept)  # raises ValueError for an infinite number, and for half a surrogate pair
        except InvalidParameter as error:
            raise InvalidParameter(f"public_inputs[{position}]", error.value, error.bound) from None
        except ValueError:
            bound = "texts and numbers, which a line of JSON can hold"
            raise InvalidParameter(f"public_inputs[{position}]", "(not shown)", bound) from None
        asked.setdefault(shared, kept)
        given.setdefault(shared, each)
    return asked, given


def _digest(sampler: DPSampler, output_key: str) -> str:
    """A keyed hash of all that decides an answer beside its input."""
    budget, template = sampler.budget, sampler.template
    request = {
        "budget": budget.name,
        "principal": acting_principal() if budget.scope == "per_principal" else None,
        "template": [template.demonstration, template.query],
        "output": output_key,
    }
    return str(sampler.line().query_id(request, sampler._variant, acting_principal()))


def _known(sampler: DPSampler, journal: Journal) -> dict[str, dict[str, Any]]:
    """The lines of the file, by the shared text of their inputs."""
    try:
        return {sampler.template.ask(line): line for line in journal.lines}
    except InvalidParameter:
        raise journal.refused("a file whose every line has the keys that the template's query names") from None


def _in_order(asked: Iterable[str], lines: Iterable[str], journal: Journal | None) -> list[str]:
    """The inputs without a line. The input of the unfinished answer comes first, even if it has a line: its tokens are
    charged, and perhaps not recorded in the ledger."""
    missing = [shared for shared in asked if shared not in lines]
    if journal is None or journal.under_way is None:
        return missing
    first = [shared for shared in asked if mark_of(shared) == journal.under_way]
    if not first and journal.under_way not in map(mark_of, lines):
        raise journal.refused(
            "a file whose interrupted answer is to one of public_inputs; to give that answer up, which stays charged, "
            f"delete {journal.part.name!r}"
        )
    return [*first, *(shared for shared in missing if shared not in first)]
