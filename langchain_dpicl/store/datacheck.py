"""The checks of a data file that every command makes before it uses one, and that ``dpicl check-data`` shows.

Faults are of single records, which cannot be used: each is found in its own record and public settings alone, so to
leave such records out is a step that each owner's records take by themselves. Notes are of the file as a whole: they
change nothing. Both name lines, columns and counts. Nothing here is differentially private: it is for whoever may see
the file.
"""

from __future__ import annotations

import json
import re
import statistics
import unicodedata
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from langchain_dpicl.store.datafile import (
    DataFile,
    Fault,
    Reading,
    number_words,
    read_data,
    settle,
)
from langchain_dpicl.store.records import RecordKeys, as_json, attempt, pack

FEW_OWNERS = 100
"""Below, even a head, which needs the least, is little better than guessing at epsilon 1."""

_MANY = 20.0
"""An owner has very many records if they are so many times the median owner's, and this number at least."""


@dataclass(frozen=True, repr=False)
class Checked:
    """A checked file: the ``records`` that can be used, where they are, the faults of all others, and notes. Private.

    ``labels`` counts the records of each label, or if there is no list of labels, of each output.
    """

    data: DataFile
    keys: RecordKeys
    records: list[dict[str, Any]]
    lines: list[int]
    faults: list[Fault]
    labels: Counter[str] = field(default_factory=Counter)
    notes: dict[str, str] = field(default_factory=dict)
    """By its name in ``--json``: a sentence."""

    @property
    def owners(self) -> list[str] | None:
        """The owner of each record; None if each is its own."""
        key = self.keys.owner_key
        return None if key is None else [str(record[key]) for record in self.records]

    def usable(self, skip_bad: bool, say: Callable[[str], object]) -> list[dict[str, Any]]:
        """The records. Says what their owner should know: what `settle` says, and the notes, except on the number of
        owners, of which plans and heads speak with their own figures. Raises `InvalidRecords`."""
        settle(self.data, self.faults, len(self.records), skip_bad, say)
        for name, note in self.notes.items():
            if name != "few_owners":
                say(f"{self.data.name!r}: {note}")
        return self.records


_PLAIN = {str, int, float, bool, type(None)}
"""Types that a store keeps, whatever the value."""

NO_KEYS = RecordKeys("", None, None)
"""Of a file whose records may have any keys."""


def check_file(
    path: str | Path,
    keys: RecordKeys,
    reading: Reading,
    *,
    is_private: bool = True,
    label_of: Callable[[str], str | None] | None = None,
    unread: str = "no label of the list",
    too_long: Callable[[Sequence[str]], Sequence[bool]] | None = None,
) -> Checked:
    """Read and check a file: of private examples, which may deserve notes, or of public records.

    ``label_of`` says for which of the public labels an output stands, and None if for none, which is the fault
    ``unread``; ``too_long`` of which texts the embedding model reads the beginning alone. Raises `InvalidRecords` for a
    file that cannot be read or lacks a column.
    """
    data = read_data(path, reading, [key for key in keys if key])
    for name, key in keys._asdict().items():
        if key and data.columns:
            data.need("--" + name.replace("_", "-"), key)
    checked = Checked(data, keys, [], [], list(data.faults))
    for line, record in zip(data.lines, data.records, strict=True):
        used, problem, label = _looked_at(record, keys, label_of, unread)
        if is_private and not problem and not _PLAIN.issuperset(map(type, used.values())):
            _, problem = pack(used, keys)
        if problem:
            checked.faults.append((line, problem))
            continue
        checked.records.append(used)
        checked.lines.append(line)
        if keys.output_key:
            checked.labels[label] += 1
    checked.faults.sort()
    if is_private and checked.records:
        checked.notes.update(_notes(checked, too_long))
    return checked


def _looked_at(
    record: dict[str, Any],
    keys: RecordKeys,
    label_of: Callable[[str], str | None] | None,
    unread: str,
) -> tuple[dict[str, Any], str, str]:
    """The record as it is used (an output that is a whole number becomes its text, an object its JSON), its problem
    and its label."""
    label = ""
    text = record.get(keys.input_key)
    if keys.input_key and (not isinstance(text, str) or not text.strip()):
        return record, f"no text under {keys.input_key!r}", ""
    if keys.output_key:
        output = _whole(record.get(keys.output_key))
        if isinstance(output, int) and not isinstance(output, bool):
            output = str(output)
            record = {**record, keys.output_key: output}
        elif isinstance(output, dict):
            output, fault = attempt(partial(json.dumps, ensure_ascii=False, default=as_json), output)
            if fault:
                return record, f"an object that JSON cannot represent under {keys.output_key!r}", ""
            record = {**record, keys.output_key: output}
        if output is not None and not isinstance(output, str):
            return record, f"neither a text nor a whole number under {keys.output_key!r}", ""
        if output is None or not output.strip():
            return record, f"nothing under {keys.output_key!r}", ""
        label = output.strip()
        if label_of is not None:
            label = label_of(output) or ""
            if not label:
                return record, f"{unread} under {keys.output_key!r}", ""
    if keys.owner_key:
        owner = _whole(record.get(keys.owner_key))
        record = {**record, keys.owner_key: owner}
        is_owner = isinstance(owner, (str, int, uuid.UUID)) and not isinstance(owner, bool)
        if not is_owner or not str(owner).strip():
            return record, f"no owner (a text or a whole number) under {keys.owner_key!r}", ""
    return record, "", label


def _whole(value: Any) -> Any:
    """A whole float as its integer: a table's writer turns whole numbers with gaps into floats."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else value


def _notes(checked: Checked, too_long: Callable[[Sequence[str]], Sequence[bool]] | None) -> dict[str, str]:
    """Return the notes for the file's owner, by name."""
    found = {}
    unit = checked.data.unit
    owners = checked.owners
    is_table = checked.data.delimiter and len(checked.data.columns) > 1
    if is_table and (joined := _joined(checked.data, checked.lines, checked.records)):
        found["joined"] = (
            f"records over several lines that look like several records: {len(joined):,} "
            f"({number_words(unit, joined)}). A quote that is not closed takes the lines after it, which may be "
            "others', into its text: look at them"
        )
    if owners is None:
        count = len(checked.records)
        first: dict[str, int] = {}
        texts = (record[checked.keys.input_key] for record in checked.records)
        pairs = zip(checked.lines, texts, strict=True)
        if again := [line for line, text in pairs if first.setdefault(text, line) != line]:
            found["repeated"] = (
                f"texts that occur before: {len(again):,} ({number_words(unit, again)}). Without --owner-key each is "
                "an owner of its own, so the privacy of somebody with several is weaker"
            )
    else:
        count = len(set(owners))
        found |= _owner_notes(owners, checked.lines, unit)
    if 0 < count < FEW_OWNERS:
        found["few_owners"] = (
            f"few owners: {count:,}. Below {FEW_OWNERS}, the noise of a small epsilon hides most of what they say"
        )
    if too_long is not None:
        cut = too_long([record[checked.keys.input_key] for record in checked.records])
        if long := [line for line, is_long in zip(checked.lines, cut, strict=True) if is_long]:
            found["long"] = (
                f"texts longer than the embedding model reads: {len(long):,} ({number_words(unit, long)}). Only their "
                "beginning is searched"
            )
    return found


def _joined(data: DataFile, lines: Sequence[int], records: Sequence[dict[str, Any]]) -> list[int]:
    """The lines of records of CSV with a text of several lines, one of which has as many fields as a record."""
    found = []
    for number, record in zip(lines, records, strict=True):
        texts = [str(value).splitlines() for value in record.values()]
        parts = [part for text in texts if len(text) > 1 for part in text]
        if any(part.count(data.delimiter) + 1 == len(data.columns) for part in parts):
            found.append(number)
    return found


def _owner_notes(owners: Sequence[str], lines: Sequence[int], unit: str) -> dict[str, str]:
    found: dict[str, str] = {}
    first: dict[str, int] = {}
    for owner, line in zip(owners, lines, strict=True):
        first.setdefault(owner, line)
    spellings: dict[str, list[int]] = {}
    for owner, line in first.items():
        spellings.setdefault(_likely(owner), []).append(line)
    if alike := [each for each in spellings.values() if len(each) > 1]:
        places = "; ".join(number_words(unit, each) for each in alike[:3]) + "; ..." * (len(alike) > 3)
        found["spellings"] = (
            f"owners in several spellings: {len(alike):,} ({places}). They differ by case, spaces, invisible "
            "characters, quotes, leading zeros or a final .0 alone. Each spelling counts as an owner of its own, so "
            "the privacy of these people is weaker: spell them alike"
        )
    sizes = Counter(owners)
    median = statistics.median(sizes.values()) if sizes else 0
    if many := [size for size in sizes.values() if size >= _MANY * max(1.0, median)]:
        found["large_owners"] = (
            f"owners with very many records: {len(many):,} (up to {max(many):,}; the median has {median:g}). Is one a "
            "placeholder, such as unknown? An owner has one share of each answer, whatever its number of records"
        )
    return found


def _likely(owner: str) -> str:
    """A spelling that is the same for owners who are likely one, as spreadsheets change numbers: 123, 0123, ="123"."""
    shown = "".join(each for each in unicodedata.normalize("NFKC", owner) if unicodedata.category(each) != "Cf")
    plain = " ".join(shown.casefold().strip("=\"'“”„ \t").split())
    whole = re.fullmatch(r"0*(\d+)(?:\.0+)?", plain)
    return whole[1] if whole else plain
