"""Users' data files on their way in: the file's format, its records with their lines, and the lines that are no record.

**Each record is read by itself.** If one record decided how another is read, an owner who comes or goes would change
the exemplars of others, and no sensitivity would hold. So:

- The header alone shows the delimiter.
- UTF-8, unless the file's first bytes say otherwise. A file with lines that are not UTF-8 is read as cp1252 (which
  includes the letters of latin-1) only if all other lines are ASCII, which reads the same in both. If others are UTF-8
  beyond ASCII, the encoding must be given.
- A quote that is not closed on its line can hide records of others, so such a file is refused, not mended.
- In Parquet a column has the type that its writer gave it. Each value is turned into Python's by itself, without the
  empty members of structures, which may be others'.

Refusals and faults name lines, columns and counts, never a text.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import functools
import gzip
import importlib.util
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from langchain_dpicl.errors import InvalidParameter, InvalidRecords
from langchain_dpicl.extras import require
from langchain_dpicl.store.records import attempt

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Of data files; ``.gz`` may follow."""

DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}

_ACROSS_LINES = re.compile("hz|iso2022|utf-?7|unicode|raw-unicode|punycode|idna")
"""Encodings in which a line changes how the next one is read, or holds what is read as its end."""

_USUAL_ENCODINGS = "an encoding such as utf-8, cp1252, latin-1, utf-16, gb18030, big5, shift_jis or euc-kr"

_LIKE_A_NAME = re.compile(r"[^\W\d][\w.:/()\[\]#%-]{0,39}(?: [\w.:/()\[\]#%-]{1,39}){0,3}")
_SHOWN = 30
_LONGEST_HEADER = 1 << 20
_UNDECODED = re.compile("[\udc80-\udcff]")
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_GZIP = b"\x1f\x8b"
_OTHERS = {
    _GZIP: "gzip within gzip: unpack it once",
    rb"BZh[1-9]1AY&SY": "a bzip2 file: unpack it (bunzip2), or pack it with gzip",
    b"\xfd7zXZ\0": "an xz file: unpack it (unxz), or pack it with gzip",
    rb"\x28\xb5\x2f\xfd": "a zstd file: unpack it (unzstd), or pack it with gzip",
    b"PK\x03\x04": "a zip archive, or an Excel workbook: unpack it, or save its sheet as CSV",
    b"\xd0\xcf\x11\xe0": "an Excel workbook: save its sheet as CSV",
    rb"PAR1(?s:.*)PAR1\Z": "a Parquet file: give its name the ending .parquet",
}
"""Kinds of files by their first bytes, whatever their names, and the remedy for each."""
_INDEX = re.compile(r"__index_level_\d+__")  # the rows' numbers, as pandas writes them beside the columns

Fault = tuple[int, str]
"""A line's number, and what is wrong with it, as in "no label under 'label'"."""


class Reading(NamedTuple):
    """The way to read a data file. A setting that is None is found in the file."""

    delimiter: str | None = None
    """A character, or its name in `DELIMITERS`."""
    encoding: str | None = None
    skip_bad: bool = False
    """Leave out records that cannot be used, instead of refusing the file."""


@dataclass(frozen=True, repr=False)
class DataFile:
    """A data file as it was read. Private.

    ``lines`` are where each record ends in the file (in Parquet: the numbers of rows, from 1). ``faults`` are the lines
    that are no record.
    """

    name: str
    form: str
    """The format, and for CSV its delimiter and encoding."""
    columns: tuple[str, ...]
    records: list[dict[str, Any]]
    lines: list[int]
    faults: list[Fault]
    unit: str = "line"
    is_usual: bool = True
    """True if it was read as its name says, or as it was asked for."""
    wanted: tuple[str, ...] = ()
    joined: tuple[int, ...] = ()
    """First lines of records of several lines, each of which looks like a record of its own."""

    @property
    def columns_shown(self) -> str:
        """The columns' names for a message; their number alone if no wanted one is there, in any spelling, or some do
        not look like names.

        A file without a header has a record in its place.
        """
        if not self._is_shown:
            return f"{len(self.columns)} fields" + " (is its first line a header?)" * self.form.startswith("CSV")
        more = f" and {len(self.columns) - _SHOWN} more" if len(self.columns) > _SHOWN else ""
        return ", ".join(map(repr, self.columns[:_SHOWN])) + more

    @property
    def _is_shown(self) -> bool:
        is_known = {*map(_folded, self.wanted)} & {*map(_folded, self.columns)}
        return bool(is_known) and all(map(_LIKE_A_NAME.fullmatch, self.columns))

    def need(self, option: str, column: str) -> None:
        """Raises `InvalidRecords` if there is no such column. ``option`` names the setting that asks for it."""
        if column in self.columns:
            return
        data = replace(self, wanted=(column, *self.wanted))
        near = {each.casefold().strip(): each for each in reversed(self.columns) if _LIKE_A_NAME.fullmatch(each)}
        hint = "Name yours"
        if data._is_shown and (like := difflib.get_close_matches(column.casefold().strip(), near, 1, 0.75)):
            hint = f"Is it {near[like[0]]!r}? Say so"
        hint += f" with {option}" + ", or mend the header, the first line" * self.form.startswith("CSV")
        raise InvalidRecords(f"{self.name!r} has no column {column!r}, but {data.columns_shown}. {hint}")


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """All records of a data file as they stand. Raises `InvalidRecords` for a file with a line that is no record."""
    data = read_data(path)
    settle(data, data.faults, len(data.records))
    return data.records


def read_data(path: str | Path, reading: Reading = Reading(), wanted: Sequence[str] = ()) -> DataFile:  # noqa: B008
    """Read a ``.jsonl``, ``.json`` (lines), ``.csv``, ``.tsv`` or ``.parquet`` file, ``.gz`` too.

    ``wanted`` are columns that it should have: they help to find the delimiter. Raises `InvalidRecords` for a file that
    cannot be read as a whole, `InvalidParameter` for a setting that means nothing, `MissingExtra` for Parquet without
    pyarrow.
    """
    path = Path(path)
    delimiter = (DELIMITERS | {"\\t": "\t"}).get(reading.delimiter or "", reading.delimiter)
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0'):
        raise InvalidParameter("delimiter", reading.delimiter, f"one character, or {', '.join(DELIMITERS)}")
    if reading.encoding is not None:
        known = None
        with contextlib.suppress(LookupError, ValueError):
            known = codecs.lookup(reading.encoding)
        is_text = known is not None and getattr(known, "_is_text_encoding", True)
        if known is None or not is_text or _ACROSS_LINES.match(known.name.replace("_", "-")):
            raise InvalidParameter("encoding", reading.encoding, _USUAL_ENCODINGS)
    is_gzip = path.suffix.lower() == ".gz"
    suffix = Path(path.stem if is_gzip else path.name).suffix.lower()
    content = b""
    reason = ""
    try:
        content = path.read_bytes()
        if is_gzip or content.startswith(_GZIP):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "not a whole gzip file"
    is_parquet = suffix == ".parquet"
    other = next((words for mark, words in _OTHERS.items() if re.match(mark, content)), "")
    if other and not reason and not (is_parquet and content.startswith(b"PAR1")):
        reason = f"it is {other}"
    if not reason and is_parquet:
        return _parquet(path.name, content, wanted)
    if not reason:
        encoding, reason = _encoding(content, reading.encoding)
    if not reason:
        text, encoding, reason = _decoded(content, encoding)
    if reason:
        raise InvalidRecords(f"{path.name!r} cannot be read: {reason}")
    first = next((line for line in text.splitlines() if line.strip()), "")
    if "\0" in first:
        raise InvalidRecords(f"{path.name!r} begins with NUL bytes: name its encoding (such as utf-16-le)")
    if suffix in (".csv", ".tsv"):
        if not first:
            raise InvalidRecords(f"{path.name!r} holds no records")
        data = _csv(path.name, text, encoding, delimiter, wanted)
        usual = {".csv": "CSV with commas, UTF-8", ".tsv": "CSV with tabs, UTF-8"}[suffix]
        return replace(data, is_usual=data.form == usual or None not in reading[:2])
    if first.lstrip().startswith("[") and text.rstrip().endswith("]"):
        raise InvalidRecords(f"line 1 of {path.name!r} is not a JSON object but a list: write one object a line")
    return replace(
        _filled(_json(path.name, text, encoding)),
        is_usual=encoding == "UTF-8" or reading.encoding is not None,
        wanted=tuple(wanted),
    )


def _filled(data: DataFile) -> DataFile:
    if not data.records and not data.faults:
        raise InvalidRecords(f"{data.name!r} holds no records")
    return data


def _encoding(content: bytes, given: str | None) -> tuple[str, str]:
    """The encoding, given or found, or the reason why none can be found. See the module's docstring."""
    mark = next((encoding for mark, encoding in _MARKS if content.startswith(mark)), None)
    if given is not None:
        is_utf8 = codecs.lookup(given).name == "utf-8"
        return ("utf-8-sig" if is_utf8 else given), ""
    if mark is not None:
        return mark, ""
    with contextlib.suppress(UnicodeDecodeError):
        content.decode("utf-8")
        return "utf-8", ""
    other = []
    has_utf8 = False
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.isascii():
            try:
                line.decode("utf-8")
                has_utf8 = True
            except UnicodeDecodeError:
                other.append(number)
    places = number_words("line", other)
    if has_utf8:
        return "", (
            f"{places} not UTF-8, but others are: mend the file, name its encoding (--encoding), or leave these lines "
            "out (--encoding utf-8 --skip-bad)"
        )
    high = re.sub(rb"[\x00-\x7f]+", b"", content)
    runs = sum(map(len, re.findall(rb"[\x80-\xff]{3,}", content)))
    if 10 * runs > len(high) or re.search(rb"[\x81\x8d\x8f\x90\x9d]", high):
        return "", f"not UTF-8 ({places}), and not like cp1252 either: name its encoding (--encoding)"
    return "cp1252", ""


def _decoded(content: bytes, encoding: str) -> tuple[str, str, str]:
    """The text, with each byte that its encoding does not have as half of a surrogate pair; the encoding's name."""
    with contextlib.suppress(UnicodeError):
        handling = "strict" if encoding.startswith("utf-16") else "surrogateescape"
        text = content.decode(encoding, handling).removeprefix("\ufeff")
        name = "UTF-8" if encoding.startswith("utf-8") else encoding
        return text, name, ""
    return "", encoding, f"it is not {encoding}"


def _flaw(text: str, encoding: str) -> str:
    """Return the fault of a line's characters; "" if there is none."""
    if _UNDECODED.search(text):
        return f"bytes that are not {encoding}"
    return "NUL bytes" if "\0" in text else ""


def _json(name: str, text: str, encoding: str) -> DataFile:
    columns: dict[str, None] = {}
    data = DataFile(name, f"JSON lines, {encoding}", (), [], [], [])
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record: Any = None
        flaw = _flaw(line, encoding)
        try:
            if not flaw:
                record = json.loads(line, object_pairs_hook=_object, parse_float=_number)
        except _FlawError as error:
            flaw = str(error)
        except (ValueError, RecursionError):
            pass
        if isinstance(record, dict):
            columns.update(dict.fromkeys(record))
            data.records.append(record)
            data.lines.append(number)
        else:
            data.faults.append((number, flaw or "no JSON object"))
    return DataFile(name, data.form, tuple(columns), data.records, data.lines, data.faults)


class _FlawError(ValueError):
    """JSON that would be read as something else than it says. Its message quotes nothing."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _FlawError("a key twice in one object")
    return found


def _number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise _FlawError("a number that is too large")
    return number


def _csv(name: str, text: str, encoding: str, delimiter: str | None, wanted: Sequence[str]) -> DataFile:
    if delimiter is None:
        delimiter = _delimiter(name, text, wanted)
    rows = _rows(name, text, delimiter)
    if not (columns := _header(rows)):
        raise InvalidRecords(f"the header of {name!r} has quotes that do not match")
    _refuse_alike(name, columns, wanted)
    word = next((word for word, each in DELIMITERS.items() if each == delimiter), repr(delimiter))
    data = DataFile(
        name,
        f"CSV with {word}s, {encoding}",
        tuple(columns),
        [],
        [],
        [],
        wanted=tuple(wanted),
    )
    joined = []
    for line, fields, fault, parts in rows:
        if not fields and not fault:
            continue
        flaw = fault or _flaw("".join(fields), encoding)
        if not flaw and len(fields) != len(columns):
            flaw = f"more or fewer fields than the header, which has {len(columns)}"
        if not flaw and [each.strip(" \ufeff") for each in fields] == columns:
            flaw = "the header again"
        if flaw:
            data.faults.append((line, flaw))
            continue
        data.records.append(dict(zip(columns, fields, strict=True)))
        data.lines.append(line)
        whole = [part.count(delimiter) + 1 == len(columns) for part in parts]
        if any(whole[1:-1]) or (whole[0] and whole[-1] and len(whole) > 1):  # one end has them if the text is there
            joined.append(line - len(parts) + 1)
    return _filled(replace(data, joined=tuple(joined) if len(columns) > 1 else ()))


@functools.cache
def _own_csv() -> Any:
    """CPython's CSV reader, as a module of its own: `csv.field_size_limit` holds for all readers of one module."""
    spec: Any = importlib.util.find_spec("_csv")
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    own.field_size_limit(2**31 - 1)
    return own


class _Row(NamedTuple):
    line: int
    fields: list[str]
    fault: str
    """The fault of its quotes."""
    parts: list[str]
    """Its lines as they stand."""


def _rows(name: str, text: str, delimiter: str) -> Iterator[_Row]:
    """The rows. `InvalidRecords` if a quote hides other lines."""
    csv = _own_csv()
    parts: list[str] = []

    def lines() -> Iterator[str]:
        for line in io.StringIO(text, newline=""):
            parts.append(line)
            yield line

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    while True:
        parts.clear()
        begun = reader.line_num + 1
        fields = []
        is_bad = False
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error:  # its message may quote a character
            is_bad = True
        # The reader drops the rest of a bad line, and with it a quote that the rest opens.
        is_open = is_bad and (
            parts[-1].count('"') % 2 or len(list(csv.reader([parts[-1], ""], delimiter=delimiter))) < 2
        )
        if is_open or (is_bad and reader.line_num != begun):
            raise InvalidRecords(
                f"a quote in line {begun} of {name!r} is not closed as it should be, and the lines after it cannot be "
                "told apart: close it, or double the quotes within a text"
            )
        yield _Row(reader.line_num, fields, "quotes that do not match" * is_bad, list(parts))


def _header(rows: Iterator[_Row]) -> list[str]:
    """The columns' names, each on one line: the first row that has any. Empty if its quotes do not match."""
    named = (row.fields for row in rows if row.fault or any(map(str.strip, row.fields)))
    return [re.sub(r"\s*[\r\n]\s*", " ", column.strip()) for column in next(named, [])]


def _folded(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name.casefold())


def _refuse_alike(name: str, columns: Sequence[str], wanted: Sequence[str]) -> None:
    """`InvalidRecords` for columns of one name, or several without one: they would overwrite each other."""
    places: dict[str, list[int]] = {}
    for place, column in enumerate(columns, start=1):
        places.setdefault(column, []).append(place)
    for column, alike in places.items():
        if len(alike) > 1:
            words = number_words("column", alike)
            if not column:
                raise InvalidRecords(f"the header of {name!r} has no names for {words}: name them, or take them out")
            shown = repr(column) if column in wanted else "a name"
            raise InvalidRecords(
                f"the header of {name!r} has {shown} more than once ({words}): columns need different names"
            )


def _delimiter(name: str, text: str, wanted: Sequence[str]) -> str:
    """The delimiter that gives the wanted columns, or the only one that is in the header."""
    found: dict[str, list[str]] = {}
    for delimiter in DELIMITERS.values():
        with contextlib.suppress(InvalidRecords):
            columns = _header(_rows(name, text[:_LONGEST_HEADER], delimiter))
            if len(columns) > 1:
                found[delimiter] = columns
    fitting = [delimiter for delimiter, columns in found.items() if wanted and set(wanted) <= set(columns)]
    if len(fitting) == 1 or len(found) <= 1:
        return [*fitting, *found, ","][0]
    if wanted and not fitting:  # the refusal lists these columns
        return max(found, key=lambda each: len(found[each]))
    words = " and at ".join(word for word, each in DELIMITERS.items() if each in (fitting or found))
    raise InvalidRecords(f"the header of {name!r} can be split at {words}: name the delimiter (--delimiter)")


def _parquet(name: str, content: bytes, wanted: Sequence[str]) -> DataFile:
    """A Parquet file, read by pyarrow. Each value is converted alone: whole numbers stay whole beside nulls."""
    parquet = require("pyarrow.parquet", "parquet")
    table, fault = attempt(lambda: parquet.ParquetFile(io.BytesIO(content), coerce_int96_timestamp_unit="us").read())
    if fault:
        raise InvalidRecords(f"{name!r} cannot be read: pyarrow does not read it ({fault})")
    names = enumerate(table.column_names)
    columns = {i: column for i, column in names if column in wanted or not _INDEX.fullmatch(column)}
    _refuse_alike(name, list(columns.values()), wanted)
    data = DataFile(name, "Parquet", tuple(columns.values()), [], [], [], "row", wanted=tuple(wanted))
    values = [[attempt(_from_arrow, value) for value in table.column(i)] for i in columns]
    for number, row in enumerate(zip(*values, strict=True), start=1):
        bad = next(
            (column for column, (_, fault) in zip(data.columns, row, strict=True) if fault),
            None,
        )
        if bad is None:
            data.records.append({column: value for column, (value, _) in zip(data.columns, row, strict=True)})
            data.lines.append(number)
        else:
            data.faults.append((number, f"a value that Python cannot hold under {bad!r}"))
    return _filled(data)


def _from_arrow(value: Any) -> Any:
    """A value of Arrow's as Python's; NaN, which pandas writes for what is missing, as None. `ValueError` for one that
    Python would round."""
    found = value.as_py()
    if re.search(r"(timestamp|time64)\[ns", str(value.type)):
        arrow = require("pyarrow", "parquet")
        if not arrow.scalar(found, value.type).equals(value):
            raise ValueError
    return None if found != found else _without_gaps(found)


def _without_gaps(value: Any) -> Any:
    """A value without the members of structures that are null: those that only other records have are, too."""
    if isinstance(value, dict):
        return {key: _without_gaps(each) for key, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_without_gaps, value))
    return value


# -- words -------------------------------------------------------------------------------------------------------------


def number_words(unit: str, numbers: Sequence[int], most: int = 5) -> str:
    """Such as "line 3", "lines 3 and 5", "lines 1, 2, 3, 4, 5 and 17 more"."""
    shown = [f"{number:,}" for number in numbers[:most]]
    last = f"{len(numbers) - most:,} more" if len(numbers) > most else shown.pop()
    words = " and ".join(filter(None, [", ".join(shown), last]))
    return f"{unit}{'s' * (len(numbers) > 1)} {words}"


def problems_of(faults: Iterable[Fault]) -> dict[str, list[int]]:
    """The lines with each problem, the commonest problem first."""
    found: dict[str, list[int]] = {}
    for line, problem in sorted(faults):
        found.setdefault(problem, []).append(line)
    return dict(sorted(found.items(), key=lambda each: -len(each[1])))


def settle(
    data: DataFile,
    faults: Sequence[Fault],
    good: int,
    skip_bad: bool = False,
    say: Callable[[str], object] = str,
) -> None:
    """Say how a file was read if that is not usual, and how many records are left out of it beside the good ones.

    Raises `InvalidRecords`, which names the lines, if some are bad and not to be skipped, or all are.
    """
    if not data.is_usual:
        say(f"{data.name!r} is read as {data.form}, as it seems (--delimiter and --encoding say otherwise)")
    if not faults:
        return
    words = "; ".join(f"{problem} ({number_words(data.unit, lines)})" for problem, lines in problems_of(faults).items())
    said = f"{len(faults):,} of {good + len(faults):,} records of {data.name!r} cannot be used: {words}"
    if not skip_bad or not good:
        leave = "mend them, or leave them out with --skip-bad (skip_bad in a configuration)" if good else "none is left"
        raise InvalidRecords(f"{said}; {leave}")
    say(f"{said}; they are left out")
