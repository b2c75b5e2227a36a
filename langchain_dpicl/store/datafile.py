"""Users' data files on their way in: JSON lines, CSV and Parquet, plain or packed with gzip.

**Each record is read by itself.** If one record decided how another is read, an owner who comes or goes would change
the exemplars of others, and no sensitivity would hold. So:

- The encoding is UTF-8, with or without a byte order mark, unless a setting names another. Bytes that it does not have
  are a fault of their line alone.
- The header line alone shows the delimiter of a CSV file, unless a setting or the ending ``.tsv`` names it.
- A quote that is not closed as it should be can hide records of others, so such a file is refused, not mended.
- In Parquet a column has the type that its writer gave it. Each value is turned into Python's by itself, without the
  empty members of structures, which may be others'.

Refusals and faults name lines, columns and counts, never a text.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from langchain_dpicl.errors import InvalidParameter, InvalidRecords
from langchain_dpicl.extras import require
from langchain_dpicl.store.records import attempt

# Of data files; ".gz" may follow.
ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")

DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|", "\\t": "\t"}

# In these a line changes how the next one is read, or holds what is read as its end. "undefined" reads nothing.
_ACROSS_LINES = re.compile("hz|iso2022|utf-?7|unicode|raw-unicode|punycode|idna|undefined")

# Stands for bytes that the encoding does not have. No encoding has it.
_UNDECODED = "\udcff"
codecs.register_error("dpicl.undecoded", lambda error: (_UNDECODED, error.end))  # type: ignore[attr-defined]

_LIKE_A_NAME = re.compile(r"[^\W\d][\w.:/()\[\]#%-]{0,39}(?: [\w.:/()\[\]#%-]{1,39}){0,3}")

# A line's number, and what is wrong with it, as in "no label under 'label'".
Fault = tuple[int, str]


class Reading(NamedTuple):
    """The way to read a data file.

    ``delimiter`` is of CSV: a character, or its name in `DELIMITERS`; None for the header's own. ``skip_bad``: leave
    out records that cannot be used, instead of refusing the file.
    """

    delimiter: str | None = None
    encoding: str = "utf-8"
    skip_bad: bool = False


@dataclass(frozen=True, repr=False)
class DataFile:
    """A data file as it was read. Private.

    - ``form``: the format, and for CSV its delimiter and encoding.
    - ``lines``: where each record begins in the file (in Parquet: the numbers of rows, from 1).
    - ``faults``: the lines that are no record.
    - ``delimiter``: of CSV.
    """

    name: str
    form: str
    columns: tuple[str, ...]
    records: list[dict[str, Any]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    unit: str = "line"
    wanted: tuple[str, ...] = ()
    delimiter: str = ""

    def add(self, line: int, record: dict[str, Any], fault: str) -> None:
        """Take a record, or the fault in its place."""
        if fault:
            self.faults.append((line, fault))
        else:
            self.records.append(record)
            self.lines.append(line)

    @property
    def columns_shown(self) -> str:
        """The columns' names for a message; their number alone if there are more than 100, no wanted one is there, in
        any case, or some do not look like names.

        A file without a header has a record in its place.
        """
        if (
            len(self.columns) <= 100
            and {*map(str.casefold, self.wanted)} & {*map(str.casefold, self.columns)}
            and all(map(_LIKE_A_NAME.fullmatch, self.columns))
        ):
            return ", ".join(map(repr, self.columns))
        return f"{len(self.columns)} fields" + " (is its first line a header?)" * bool(self.delimiter)

    def need(self, option: str, column: str) -> None:
        """Raises `InvalidRecords` if there is no such column. ``option`` names the setting that asks for it."""
        if column not in self.columns:
            shown = replace(self, wanted=(column, *self.wanted)).columns_shown
            raise InvalidRecords(
                f"{self.name!r} has no column {column!r}, but {shown}. Name yours with {option}"
                + ", mend the header, or name the delimiter (--delimiter)" * bool(self.delimiter)
            )


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """All records of a data file as they stand. Raises `InvalidRecords` for a file with a line that is no record."""
    data = read_data(path)
    settle(data, data.faults, len(data.records))
    return data.records


def read_data(path: str | Path, reading: Reading = Reading(), wanted: Sequence[str] = ()) -> DataFile:  # noqa: B008
    """Read a ``.jsonl``, ``.json`` (lines), ``.csv``, ``.tsv`` or ``.parquet`` file, ``.gz`` too.

    ``wanted`` are columns that it should have. Raises `InvalidRecords` for a file that cannot be read as a whole,
    `InvalidParameter` for a setting that means nothing, `MissingExtra` for Parquet without pyarrow.
    """
    path = Path(path)
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    delimiter = DELIMITERS.get(reading.delimiter or "", reading.delimiter)
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0'):
        raise InvalidParameter("delimiter", reading.delimiter, f"one character, or {', '.join(DELIMITERS)}")
    codec, fault = attempt(codecs.lookup, reading.encoding)
    if fault or not codec._is_text_encoding or _ACROSS_LINES.match(codec.name.replace("_", "-")):
        raise InvalidParameter("encoding", reading.encoding, "one such as utf-8, utf-16, cp1252, gb18030 or shift_jis")
    reason = ""
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "not a whole gzip file"
    if reason:
        raise InvalidRecords(f"{path.name!r} cannot be read: {reason}")
    if suffix == ".parquet":
        data = _parquet(path.name, content, wanted)
    else:
        text = content.decode(codec.name, "dpicl.undecoded").removeprefix("\ufeff")
        if suffix in (".csv", ".tsv"):
            data = _csv(path.name, text, reading.encoding.upper(), delimiter or "\t" * (suffix == ".tsv"))
        else:
            data = _json(path.name, text, reading.encoding.upper())
    if len(set(data.columns)) < len(data.columns):
        alike = [place for place, each in enumerate(data.columns, start=1) if data.columns.count(each) > 1]
        raise InvalidRecords(
            f"the header of {path.name!r} names several columns alike, or not at all ({number_words('column', alike)})"
        )
    if not data.records and not data.faults:
        raise InvalidRecords(f"{path.name!r} holds no records")
    return replace(data, wanted=tuple(wanted))


def _flaw(fields: list[str] | None, encoding: str, columns: Sequence[str] = ()) -> str:
    """The fault of a record's quotes, characters or, beside the header's columns, fields; "" if there is none."""
    text = "".join(fields or ())
    found = {
        "quotes that do not match": fields is None,
        f"bytes that are not {encoding}, see --encoding": _UNDECODED in text,
        "NUL bytes, see --encoding": "\0" in text,
        f"more or fewer fields than the header, which has {len(columns)}": len(fields or ()) != len(columns) > 0,
        "the header again": [each.strip(" \ufeff") for each in fields or ()] == list(columns) != [],
    }
    return next((flaw for flaw, is_there in found.items() if is_there), "")


def _json(name: str, text: str, encoding: str) -> DataFile:
    data = DataFile(name, f"JSON lines, {encoding}", ())
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            record, _ = attempt(decoder.decode, line)
            flaw = "no JSON object, or a key twice in one" * (not isinstance(record, dict))
            data.add(number, record, _flaw([line], encoding) or flaw)
    return replace(data, columns=tuple(dict.fromkeys(key for record in data.records for key in record)))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def _csv(name: str, text: str, encoding: str, given: str) -> DataFile:
    """A CSV file. If no delimiter is given, it is the one of `DELIMITERS` that occurs most often in the header line
    outside of quotes, of equals the first one in their order. No record has a say."""
    lines = list(io.StringIO(text, newline=""))
    first = next((line for line in lines if line.strip(' ",;\t|\r\n')), "")
    delimiter = given or max(DELIMITERS.values(), key=re.sub(r'"[^"]*("|$)', "", first).count)
    rows = _rows(name, lines, delimiter)
    line, header = next((row for row in rows if row[1] is None or any(map(str.strip, row[1]))), (1, []))
    columns = [re.sub(r"\s*[\r\n]\s*", " ", column.strip()) for column in header or ()]
    if flaw := _flaw(header, encoding):
        raise InvalidRecords(f"the header of {name!r}, line {line}, has {flaw}")
    word = next((word for word, each in DELIMITERS.items() if each == delimiter), repr(delimiter))
    data = DataFile(name, f"CSV with {word}s, {encoding}", tuple(columns), delimiter=delimiter)
    for line, fields in rows:
        data.add(line, dict(zip(columns, fields or (), strict=False)), _flaw(fields, encoding, columns))
    return data


def _rows(name: str, lines: list[str], delimiter: str) -> Iterator[tuple[int, list[str] | None]]:
    """The rows that are not empty: the line where each begins, and its fields; None if its quotes do not match.
    `InvalidRecords` if a quote hides other lines."""
    csv.field_size_limit(2**31 - 1)  # of all readers of the process; a text may be as long as the file
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while reader.line_num < len(lines):
        begun = reader.line_num + 1
        fields, fault = attempt(next, reader)
        # The reader drops the rest of a bad line, and with it a quote that the rest opens.
        if fault and (
            reader.line_num > begun
            or lines[begun - 1].count('"') % 2
            or len(list(csv.reader([lines[begun - 1], ""], delimiter=delimiter))) < 2
        ):
            raise InvalidRecords(
                f"a quote in line {begun} of {name!r} is not closed as it should be, and the lines after it cannot be "
                "told apart: close it, or double the quotes within a text"
            )
        if fields != []:
            yield begun, fields


def _parquet(name: str, content: bytes, wanted: Sequence[str]) -> DataFile:
    """A Parquet file, read by pyarrow. Each value is converted alone: whole numbers stay whole beside nulls."""
    parquet = require("pyarrow.parquet", "parquet")
    table, fault = attempt(lambda: parquet.ParquetFile(io.BytesIO(content), coerce_int96_timestamp_unit="us").read())
    if fault:
        raise InvalidRecords(f"{name!r} cannot be read: pyarrow does not read it ({fault})")
    # Without the rows' numbers, as pandas writes them beside the columns.
    table = table.select(
        [
            place
            for place, column in enumerate(table.column_names)
            if column in wanted or not re.fullmatch(r"__index_level_\d+__", column)
        ]
    )
    data = DataFile(name, "Parquet", tuple(table.column_names), unit="row")
    values = [[attempt(_from_arrow, value) for value in column] for column in table.columns]
    for number, row in enumerate(zip(*values, strict=True), start=1):
        pairs = list(zip(data.columns, row, strict=True))
        bad = [f"a value that Python cannot hold under {column!r}" for column, (_, fault) in pairs if fault]
        data.add(number, {column: value for column, (value, _) in pairs}, "".join(bad[:1]))
    return data


def _from_arrow(value: Any) -> Any:
    """A value of Arrow's as Python's. `ValueError` for a time that Python would round."""
    if str(value.type) == "time64[ns]" and (value.value or 0) % 1000:
        raise ValueError
    return _without_gaps(value.as_py())


def _without_gaps(value: Any) -> Any:
    """A value with None for NaN, which pandas writes for what is missing, and without the members of structures that
    are null: those that only other records have are, too."""
    if isinstance(value, dict):
        return {key: _without_gaps(each) for key, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_without_gaps, value))
    return value if value == value else None


# -- words -------------------------------------------------------------------------------------------------------------


def number_words(unit: str, numbers: Sequence[int], most: int = 5) -> str:
    """Such as "line 3", "lines 3 and 5", "lines 1, 2, 3, 4, 5 and 17 more"."""
    *shown, last = [
        *(f"{number:,}" for number in numbers[:most]),
        *[f"{len(numbers) - most:,} more"] * (len(numbers) > most),
    ]
    return f"{unit}{'s' * (len(numbers) > 1)} {', '.join(shown)}{' and ' * bool(shown)}{last}"


def problems_of(faults: Sequence[Fault]) -> dict[str, list[int]]:
    """The lines with each problem, the commonest problem first."""
    counts = Counter(problem for _, problem in sorted(faults))
    return {problem: sorted(line for line, each in faults if each == problem) for problem, _ in counts.most_common()}


def settle(
    data: DataFile,
    faults: Sequence[Fault],
    good: int,
    skip_bad: bool = False,
    say: Callable[[str], object] = str,
) -> None:
    """Say how many records are left out of a file beside the good ones.

    Raises `InvalidRecords`, which names the lines, if some are bad and not to be skipped, or all are.
    """
    if not faults:
        return
    words = "; ".join(f"{problem} ({number_words(data.unit, lines)})" for problem, lines in problems_of(faults).items())
    said = f"{len(faults):,} of {good + len(faults):,} records of {data.name!r} cannot be used: {words}"
    if not skip_bad or not good:
        raise InvalidRecords(
            f"{said}; mend them"
            + ", or leave them out with --skip-bad (store.skip_bad in a configuration)" * (good > 0)
        )
    say(f"{said}; they are left out")
