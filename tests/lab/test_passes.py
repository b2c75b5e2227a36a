"""`evaluation.passes`: what the model said stays, whatever stops the evaluation, and nothing else is touched."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.lab.evaluation.passes import PassFile

SETTINGS: dict[str, Any] = {"model": "smollm2", "members": 4, "public": None, "query": "Review: {input}\nSentiment:"}
ENTRIES: dict[tuple[int | str, ...], Any] = {
    ("sample", 0): [[[1, 2], []], [3], []],
    ("3498b8f4f1eca5df", 0): [[0.5, 0.25], [0.0, 0.0]],
    ("words", "3498b8f4f1eca5df", True, "Straße"): ["a „text“\nof two lines"],
}


def filled(path: Path) -> PassFile:
    file = PassFile(path, SETTINGS)
    for key, value in ENTRIES.items():
        file.add(key, value)
    return file


def entries(file: PassFile) -> dict[Any, Any]:
    return {key: file[key] for key in file}


def test_what_was_added_is_there_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "labels.jsonl"
    filled(path).close()
    again = PassFile(path, SETTINGS)
    assert entries(again) == ENTRIES
    assert ("sample", 0) in again
    assert ("sample", 1) not in again
    again.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it holds members' answers"


def test_a_stop_at_any_byte_costs_the_line_that_was_being_written(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    filled(path).close()
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        file = PassFile(path, SETTINGS)
        kept = max(0, sum(end <= cut for end in ends) - 1)  # the first line is the settings
        assert entries(file) == dict(list(ENTRIES.items())[:kept])
        for key, value in list(ENTRIES.items())[kept:]:
            file.add(key, value)
        file.close()
        assert path.read_bytes() == whole, "the work done again is all that is new"


@pytest.mark.parametrize(
    "line",
    [
        b'[["3498b8f4f1eca5df", 0], [[0.5, 0.2',  # a disk that lost a part of it
        b'["3498b8f4f1eca5df", [0.5]]',
        b'[[["unhashable"], 0], [0.5]]',
        b'{"key": "value"}',
        b"null",
        b"",
        b"\xff\xfe\x00",
    ],
)
def test_a_damaged_line_is_named_and_the_file_stays_as_it_is(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "labels.jsonl"
    filled(path).close()
    lines = path.read_bytes().split(b"\n")
    damaged = b"\n".join([*lines[:2], line, *lines[3:-1], b"torn"])
    path.write_bytes(damaged)
    with pytest.raises(InvalidParameter, match="line 3 is damaged; remove it") as caught:
        PassFile(path, SETTINGS)
    assert caught.value.parameter == "output"
    assert caught.value.value == str(path)
    assert path.read_bytes() == damaged
    path.write_bytes(b"\n".join([*lines[:2], *lines[3:]]))
    file = PassFile(path, SETTINGS)
    assert len(entries(file)) == len(ENTRIES) - 1, "what the message advises works"
    file.close()


@pytest.mark.parametrize(
    "content",
    [
        b"my notes",
        b"my notes\nin two lines",
        b"my notes\n",
        b'{"a": "data set"}\n{"a": "record"}\n',
        "früher\n".encode("latin-1"),
        b"[1, 2]\n",
        b"\n",
    ],
)
def test_a_file_that_is_something_else_is_refused_and_not_touched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidParameter):
        PassFile(path, SETTINGS)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model": "gemma3"}, "model"),
        ({"members": 5}, "members"),
        ({"public": "f75d7ce2b368c7df"}, "public"),
        ({"query": "Text: {input}\nMood:"}, "query"),
        ({"seed": 1}, "seed"),
    ],
)
def test_other_settings_are_refused_by_name_with_both_values(tmp_path: Path, change: dict[str, Any], name: str) -> None:
    path = tmp_path / "labels.jsonl"
    filled(path).close()
    before = path.read_bytes()
    with pytest.raises(InvalidParameter) as caught:
        PassFile(path, {**SETTINGS, **change})
    assert (caught.value.parameter, caught.value.value) == (name, change[name])
    assert repr(SETTINGS.get(name)) in str(caught.value)
    assert "another output folder" in str(caught.value)
    assert path.read_bytes() == before


def test_one_evaluation_at_a_time_has_the_file(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    first = filled(path)
    with pytest.raises(InvalidParameter, match="no other evaluation is running"):
        PassFile(path, SETTINGS)
    first.add(("one", "more"), 1)
    first.close()
    second = PassFile(path, SETTINGS)
    assert second[("one", "more")] == 1
    second.close()


def test_a_refusal_lets_go_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    filled(path).close()
    with pytest.raises(InvalidParameter):
        PassFile(path, {**SETTINGS, "members": 5})
    PassFile(path, SETTINGS).close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "labels.jsonl").mkdir(parents=True)
    for path in (tmp_path / "file" / "labels.jsonl", tmp_path / "folder" / "labels.jsonl"):
        with pytest.raises(InvalidParameter, match="can be written") as caught:
            PassFile(path, SETTINGS)
        assert caught.value.parameter == "output"


def test_a_full_disk_is_an_error_of_ours_and_what_was_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "labels.jsonl"
    file = filled(path)
    write = os.write

    def half(descriptor: int, content: bytes) -> int:
        if len(content) < 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content[: len(content) // 2])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half)
        with pytest.raises(InvalidParameter, match="No space left on device"):
            file.add(("long", 1), ["a text"] * 40)
    assert ("long", 1) not in file
    file.close()
    assert json.dumps(["a text"] * 3)[:-1].encode() in path.read_bytes(), "a part of the line is there"
    again = PassFile(path, SETTINGS)
    assert entries(again) == ENTRIES
    again.close()


# -- an outage ---------------------------------------------------------------------------------------------------------


def test_a_prompt_that_failed_among_others_is_asked_once_more(tmp_path: Path) -> None:
    asked: list[list[int]] = []

    def ask(some: Sequence[int]) -> list[str | None]:
        asked.append(list(some))
        if len(asked) == 1:
            return ["first 0", None, "first 2", None]
        return [None if i == 3 else f"second {i}" for i in some]

    with closing(PassFile(tmp_path / "texts.jsonl", {})) as file:
        for _ in range(2):
            assert file.answers(("key",), range(4), ask) == ["first 0", "second 1", "first 2", None]
    assert asked == [[0, 1, 2, 3], [0, 1, 3]], "one that answers beside those that did not; then the file has them"


def test_where_what_answered_fails_as_well_nothing_is_kept(tmp_path: Path) -> None:
    answers = iter([[None, "a", "b"], [None, None]])
    with closing(PassFile(tmp_path / "texts.jsonl", {})) as file:
        with pytest.raises(ModelUnavailable, match="the same command resumes"):
            file.answers(("key",), range(3), lambda some: next(answers))
        assert list(file) == []


@pytest.mark.parametrize("found", [["a", "b"], [None, None], []])
def test_nothing_is_asked_again_where_all_or_none_answered(tmp_path: Path, found: list[str | None]) -> None:
    answers = iter([found])
    with closing(PassFile(tmp_path / "texts.jsonl", {})) as file:
        if any(found):
            assert file.answers(("key",), range(2), lambda some: next(answers)) == found
        else:
            with pytest.raises(ModelUnavailable):
                file.answers(("key",), found, lambda some: next(answers))
        assert list(answers) == []
