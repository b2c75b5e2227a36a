"""Records from a user's file: JSON lines or CSV, plain or gzip."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_dpicl.errors import InvalidRecords


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """All records of a ``.jsonl``, ``.json`` (lines) or ``.csv`` file (``.gz`` too), UTF-8.

    Raises `InvalidRecords` for a file that cannot be read, is empty, or has a bad line; the message names the line's
    number and shows nothing of it.
    """
    path = Path(path)
    is_gzip = path.suffix == ".gz"
    text, reason = "", ""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if is_gzip else content).decode("utf-8-sig")
    except UnicodeDecodeError:
        reason = "not UTF-8"
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "not a whole gzip file"
    if reason:
        raise InvalidRecords(f"{path.name!r} cannot be read: {reason}")
    is_csv = Path(path.stem if is_gzip else path.name).suffix == ".csv"
    records: list[dict[str, Any]] = []
    for line, record in _from_csv(text) if is_csv else _from_lines(text):
        if record is None:
            problem = "does not match the CSV header" if is_csv else "is not a JSON object"
            raise InvalidRecords(f"line {line} of {path.name!r} {problem}")
        records.append(record)
    if not records:
        raise InvalidRecords(f"{path.name!r} holds no records")
    return records


def _from_lines(text: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Each line's number with its record, None for a bad line."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            record: Any = None
            with contextlib.suppress(ValueError):
                record = json.loads(line)
            yield number, record if isinstance(record, dict) else None


def _from_csv(text: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for record in reader:
            yield reader.line_num, None if None in record or None in record.values() else record
    except csv.Error:
        yield reader.line_num, None
