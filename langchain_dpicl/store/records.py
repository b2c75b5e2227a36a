"""Records from a user's file: JSON lines or CSV, plain or gzip."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any

from langchain_dpicl.errors import InvalidRecords


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """All records of a ``.jsonl``, ``.json`` (lines) or ``.csv`` file (``.gz`` too), UTF-8.

    Raises `InvalidRecords` for a file that cannot be read, is empty, or has a bad line; the message names the line's
    number and shows nothing of it.
    """
    path = Path(path)
    content: bytes | None = None
    reason = ""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode("utf-8-sig")
    except (OSError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "not a whole gzip file"
        content = None
    except UnicodeDecodeError:
        reason = "not UTF-8"
        content = None
    if content is None:
        raise InvalidRecords(f"{path.name!r} cannot be read: {reason}")
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    records = _from_csv(text, path.name) if kind == ".csv" else _from_lines(text, path.name)
    if not records:
        raise InvalidRecords(f"{path.name!r} holds no records")
    return records


def _from_lines(text: str, name: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record: Any = None
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise InvalidRecords(f"line {number} of {name!r} is not a JSON object")
        records.append(record)
    return records


def _from_csv(text: str, name: str) -> list[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    records: list[dict[str, Any]] = []
    bad_line: int | None = None
    try:
        for record in reader:
            if None in record or None in record.values():
                bad_line = reader.line_num
                break
            records.append(record)
    except csv.Error:
        bad_line = reader.line_num
    if bad_line is not None:
        raise InvalidRecords(f"line {bad_line} of {name!r} does not match the CSV header")
    return records
