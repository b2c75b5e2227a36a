"""`files.read_records`: users' files, good and bad."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from langchain_dpicl.errors import InvalidRecords
from langchain_dpicl.store.datafile import read_records


def test_json_lines_and_csv_and_gzip_give_the_same_records(tmp_path: Path) -> None:
    lines = '{"text": "a, b", "label": "x"}\n\n{"text": "ü\\n", "label": "y"}\n'
    (tmp_path / "r.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    (tmp_path / "r.csv").write_text('text,label\n"a, b",x\n"ü\n",y\n', encoding="utf-8-sig", newline="")
    expected = [{"text": "a, b", "label": "x"}, {"text": "ü\n", "label": "y"}]
    for name in ("r.jsonl", "r.jsonl.gz", "r.csv"):
        assert read_records(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("r.jsonl", b"", "no records"),
        ("r.jsonl", b'{"text": "ok"}\n{"text": "CANARY-mrs-alder', "line 2"),
        ("r.jsonl", b'{"text": "ok"}\n{"CANARY-mrs-alder": ' + b"[" * 100_000, "line 2"),
        ("r.jsonl", b"\xff\xfeCANARY", "not UTF-8"),
        ("r.jsonl.gz", b"not gzip CANARY-mrs-alder", "no JSON object"),
        ("r.jsonl.gz", gzip.compress(b'{"a": 1}', mtime=0)[:-9], "gzip"),
    ],
)
def test_a_bad_file_is_refused_by_its_line_without_showing_it(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRecords, match=says) as caught:
        read_records(tmp_path / name)
    assert "CANARY" not in str(caught.value)
    assert caught.value.__context__ is None


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InvalidRecords, match="cannot be read"):
            read_records(path)
