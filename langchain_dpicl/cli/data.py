"""Data files on the command line: read and checked, the store that keeps their embeddings, and ``check-data``."""

from __future__ import annotations

import argparse
import statistics
import sys
import textwrap
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli import add_model, add_reading, add_run, chosen, column, model_of, owner_column, show

if TYPE_CHECKING:
    from langchain_dpicl.store import ExemplarStore
    from langchain_dpicl.store.datacheck import Checked
    from langchain_dpicl.store.datafile import DataFile, Reading
    from langchain_dpicl.store.records import RecordKeys

_MOST_LABELS = 20
_LONGEST_LABEL = 40


def reading_of(options: argparse.Namespace) -> Reading:
    """These options."""
    from langchain_dpicl.store.datafile import Reading

    return Reading(**chosen(options, "delimiter", "encoding", "skip_bad"))


def keys_of(options: argparse.Namespace) -> RecordKeys:
    """The keys of a record."""
    from langchain_dpicl.store.records import RecordKeys

    return RecordKeys(options.input_key, options.output_key or None, options.owner_key or None)


def read_file(
    options: argparse.Namespace,
    path: str,
    keys: RecordKeys,
    labels: list[str] | None = None,
    *,
    is_private: bool = False,
    **outputs: Any,
) -> list[dict[str, Any]]:
    """The records that can be used. What their owner should know is told on stderr, of private ones if it is asked for.

    Without ``--private-notes`` nothing that is told follows the private records.
    """
    checked = checked_file(options, path, keys, labels, is_private=is_private, **outputs)
    if is_private and options.skip_bad:
        tell(options, f"{path!r}: records that cannot be used are left out; --private-notes or check-data counts them")
    records = checked.usable(options.skip_bad, partial(note if is_private else tell, options))
    if is_private and options.owner_key is None:
        _tell_bound(options, checked.data)
    return records


def _tell_bound(options: argparse.Namespace, data: DataFile) -> None:
    """Say that the bound is a record's, since no owner is named. The fields of JSON lines are not shown: they are the
    records' own, while a header is the same for all."""
    is_json = data.form.startswith("JSON lines")
    columns = "`dpicl check-data` shows the columns" if is_json else f"the file has {data.columns_shown}"
    tell(
        options,
        f"{data.name!r}: without --owner-key the bound holds for each record, not for each person: a person with ten "
        f"records is protected ten times less. Name the column of the owners ({columns}), or write --owner-key '' if "
        "no person has two records",
    )


def checked_file(
    options: argparse.Namespace,
    path: str,
    keys: RecordKeys,
    labels: list[str] | None,
    *,
    is_private: bool = True,
    **outputs: Any,
) -> Checked:
    """The file, read and checked as every command does it. ``outputs``: what they have to be, for `check_file`."""
    from langchain_dpicl import local
    from langchain_dpicl.aggregators.votes import reader_of
    from langchain_dpicl.store.datacheck import check_file
    from langchain_dpicl.store.records import too_long

    how: dict[str, Any] = {"is_private": is_private, "label_of": reader_of(labels), **outputs}
    how["too_long"] = partial(too_long, local.local_embeddings()) if is_private else None
    return check_file(path, keys, reading_of(options), **how)


def tell(options: argparse.Namespace, text: str) -> None:
    """Print a note for the operator: on stderr, since the output may be passed on."""
    print(f"dpicl {options.command}: {text}", file=sys.stderr, flush=True)


def note(options: argparse.Namespace, text: str) -> None:
    """Print what follows private records, if ``--private-notes`` asks for it."""
    if options.private_notes:
        tell(options, text)


def private_store(
    options: argparse.Namespace, records: list[dict[str, Any]], held_out: list[dict[str, Any]] | None = None
) -> ExemplarStore:
    """The store that keeps the data file's records; in memory, without the owners of those that are held out."""
    from langchain_dpicl import local
    from langchain_dpicl.store.kept import store_of, without

    about: dict[str, Any] = {"parameter": "--store", "progress": options.private_notes}
    model, say = local.local_embeddings(), partial(note, options)
    store = store_of(Path(options.data), records, model, keys_of(options), options.store, say, **about)
    return without(store, held_out) if held_out else store


def check_data_options(parser: Any) -> None:
    """Look at a data file as every command does before it uses it, and say what would be refused, and what would make
    the answers worse or the privacy weaker. Nothing is embedded, charged or written.

    examples:
      dpicl check-data reviews.csv
      dpicl check-data reviews.csv --input-key Text --output-key Label --owner-key customer --labels negative,positive
      dpicl check-data notes.jsonl --output-key note --json
      dpicl check-data passages.parquet --input-key passage --output-key '' --model gemma3-270m

    It shows the names of columns, the numbers of lines, exact counts, and the labels, if there is a list or at most 20
    different ones; no text and no owner. These are private facts of the file, not a release: show them to those alone
    who may see the file. A file without a header has its first record in the header's place.

    With --model, a GGUF file's or a folder's path, or --model-url, it names the documents that this model does not read
    beside a question and an answer: an answer written over documents (kind: documents) leaves them out.

    The exit status is 1 if commands would refuse the file without --skip-bad.
    """
    add_run(parser, check_data)
    parser.add_argument("data", metavar="FILE", help="JSON lines, CSV or TSV (plain or .gz), or Parquet")
    parser.add_argument("--input-key", type=column, default="text", help="the column of the texts (default text)")
    parser.add_argument("--output-key", default="label", help="of the labels or answers; '' for none (default label)")
    parser.add_argument("--owner-key", type=owner_column, help="of the owners (default: each record is its own owner)")
    parser.add_argument("--labels", help="the public list of labels, separated by commas")
    add_model(parser, "none: documents are not measured")
    parser.add_argument("--question-tokens", type=int, default=64, help="of a question over documents (default 64)")
    parser.add_argument("--max-tokens", type=int, default=25, help="of an answer to it (default 25)")
    add_reading(parser)


def check_data(options: argparse.Namespace) -> int:
    """Check the file. Returns 1 if it has records that cannot be used."""
    from langchain_dpicl.store.datafile import number_words, problems_of

    labels = [label.strip() for label in options.labels.split(",")] if options.labels else None
    checked = checked_file(options, options.data, keys_of(options), labels)
    if options.model or options.model_url:
        _note_documents(options, checked)
    data, good, bad, problems = checked.data, len(checked.records), len(checked.faults), problems_of(checked.faults)
    owners = Counter(checked.owners or ())
    counts = _labels_shown(checked.labels, labels)
    facts: dict[str, Any] = {
        "file": data.name,
        "format": data.form,
        "columns": list(data.columns),
        "records": good + bad,
        "usable": good,
        "owners": len(owners) if options.owner_key else good,
        "different_labels": len(checked.labels),
        "labels": counts,
        "faults": [{"problem": problem, "lines": lines} for problem, lines in problems.items()],
        "notes": checked.notes,
    }
    per_owner = "each its own owner (--owner-key names a column of owners)"
    if owners:
        facts["records_per_owner"] = {"median": statistics.median(owners.values()), "most": max(owners.values())}
        per_owner = f"of {len(owners):,} owners (the median owner has {facts['records_per_owner']['median']:g}, "
        per_owner += f"the largest {max(owners.values()):,})"
    lines = [
        f"{data.name}: {data.form}",
        f"  columns  {data.columns_shown}",
        f"  records  {good + bad:,}, {per_owner}",
    ]
    if counts is not None:
        width, most = max(map(len, counts)), max([*counts.values(), 1])
        for i, (label, count) in enumerate(counts.items()):
            bar = "#" * -(-24 * count // most)
            lines.append(
                f"  {'' if i else 'labels':7s}  {label:{width}s} {count:>9,} {count / max(good, 1):>6.1%}  {bar}"
            )
    elif checked.labels:
        lines.append(f"  outputs  {len(checked.labels):,} different ones")
    if problems:
        lines += ["", f"{bad:,} of {good + bad:,} records cannot be used:"]
        lines += [f"  {len(at):>6,}  {problem}: {number_words(data.unit, at)}" for problem, at in problems.items()]
    if checked.notes:
        wrapped = [textwrap.indent(textwrap.fill(note, 100), "    ").strip() for note in checked.notes.values()]
        lines += ["", "to consider:", *(f"  - {note}" for note in wrapped)]
    lines += [
        "",
        "This file can be used as it stands." if not problems else "Mend these lines; --skip-bad leaves them out.",
    ]
    show(options, facts, "\n".join(lines))
    return 1 if problems else 0


def _note_documents(options: argparse.Namespace, checked: Checked) -> None:
    """Note which documents `DPSampler.over_documents` leaves out."""
    from langchain_dpicl.decoding.documents import Documents, document_template, logits_of
    from langchain_dpicl.privacy.checks import whole
    from langchain_dpicl.store.datafile import number_words

    question = whole("--question-tokens", options.question_tokens)
    answer = whole("--max-tokens", options.max_tokens)
    key = options.input_key
    documents = Documents(logits_of(model_of(options)), document_template(key, "question"), key, question, answer)
    lines = [line for line, row in zip(checked.lines, checked.records, strict=True) if not documents.fits(row)]
    if lines:
        checked.notes["documents"] = (
            f"documents longer than about {documents.most_tokens:,} tokens, what the model reads beside a question of "
            f"{question} tokens and an answer of {answer}, or no Unicode: {len(lines):,} "
            f"({number_words(checked.data.unit, lines)}). Answers over documents leave them out: split them"
        )


def _labels_shown(counts: Counter[str], labels: list[str] | None) -> dict[str, int] | None:
    """The number of records by label; None if the outputs may be texts."""
    if labels is not None:
        return {label: counts[label] for label in labels}
    is_few = 0 < len(counts) <= min(_MOST_LABELS, counts.total() // 2)
    return dict(counts.most_common()) if is_few and all(len(label) <= _LONGEST_LABEL for label in counts) else None
