"""`durable.replacing`: a new name is never taken from another file, with links and without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import durable
from langchain_dpicl.durable import replacing


@pytest.fixture(params=["links", "no links"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file system, as FAT is one without links."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if request.param == "no links":
        monkeypatch.setattr(os, "link", refuse)
    return str(request.param)


def test_a_new_file_is_whole_has_its_mode_and_leaves_nothing_beside_it(kind: str, tmp_path: Path) -> None:
    with replacing(tmp_path / "new", mode=0o640, is_new=True) as file:
        file.write(b"content")
        written = os.fstat(file.fileno())
    found = (tmp_path / "new").stat()
    assert (tmp_path / "new").read_bytes() == b"content"
    assert (found.st_ino, found.st_mode & 0o777) == (written.st_ino, 0o640)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_file_that_came_meanwhile_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "new"
    with pytest.raises(FileExistsError), replacing(path, is_new=True):
        path.write_bytes(b"another's")
    assert path.read_bytes() == b"another's"
    assert [each.name for each in tmp_path.iterdir()] == ["new"]


def test_an_end_between_the_name_and_the_content_leaves_an_empty_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    path = tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="Input/output"), replacing(path, is_new=True) as file:
            file.write(b"content")
    assert path.read_bytes() == b""
    assert [each.name for each in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("is_done", [False, True])
def test_a_writer_who_took_the_empty_file_is_not_overwritten(
    is_done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It locks what it finds, as a store does, and may have put its own file there already."""
    path = tmp_path / "new"
    real: Any = durable.lock
    held: list[int] = []

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def late(descriptor: int) -> bool:
        other = os.open(path, os.O_RDWR)
        assert real(other)
        held.append(other)
        if is_done:
            with replacing(path) as file:
                file.write(b"another's")
            os.close(held.pop())
        return bool(real(descriptor))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(durable, "lock", late)
    with pytest.raises(FileExistsError), replacing(path, is_new=True) as file:
        file.write(b"content")
    assert path.read_bytes() == (b"another's" if is_done else b"")
    for each in held:
        os.close(each)
