"""What the model said, kept: a file that a stopped evaluation goes on with.

One line of JSON for each piece of work, appended and synced when it is done; the first line says for which settings. A
line that a stop left half written is dropped and its work done again. The file holds what members said in the open, so
only its owner may read it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.store.durable import append, lock, read_whole

Key = tuple[int | str, ...]
T = TypeVar("T")


class PassFile:
    """Entries by key, on disk from the moment they are added.

    Raises `InvalidParameter` where the file was made with other settings (it names the first that differs), is not such
    a file, is damaged (it names the line), or cannot be written, and where another evaluation has it. A file that is
    refused stays as it is.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, dict(settings)
        self._entries: dict[Key, Any] = {}
        fault = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        except OSError as error:
            fault = error.strerror or type(error).__name__
        if fault:
            raise self._refused(f"a folder that can be written ({fault})")
        try:
            if not lock(self._descriptor):
                raise self._refused("a folder on which no other evaluation is running")
            self._take_over(read_whole(self._descriptor))
        except BaseException:
            self.close()
            raise

    def _refused(self, bound: str) -> InvalidParameter:
        return InvalidParameter("output", str(self.path), bound)

    def _take_over(self, content: bytes) -> None:
        """Read what is there; then take away the line that was not finished, if any."""
        head = json.dumps(self.settings, sort_keys=True)
        *whole, torn = content.split(b"\n")
        if whole:
            self._check(whole[0])
        elif not head.encode().startswith(torn):
            raise self._refused("a folder of an evaluation: its first line is damaged")
        for number, line in enumerate(whole[1:], start=2):
            key, value = self._read(line, number)
            self._entries[key] = value
        if torn:
            os.ftruncate(self._descriptor, len(content) - len(torn))
        if not whole:
            self._write(head)

    def _check(self, line: bytes) -> None:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._refused("a folder of an evaluation: its first line is damaged")
        asked = json.loads(json.dumps(self.settings))
        for name in sorted({*found, *asked}):
            if found.get(name) != asked.get(name):
                bound = f"{found.get(name)!r}, with which {str(self.path)!r} was begun, or another output folder"
                raise InvalidParameter(name, asked.get(name), bound)

    def _read(self, line: bytes, number: int) -> tuple[Key, Any]:
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        match entry:
            case [[*key], value] if all(isinstance(part, (int, str)) for part in key):
                return tuple(key), value
        raise self._refused(f"a folder of an evaluation: line {number} is damaged; remove it to do its work again")

    def _write(self, line: str) -> None:
        fault = ""
        try:
            append(self._descriptor, (line + "\n").encode("ascii"))
        except OSError as error:
            fault = error.strerror or type(error).__name__
        if fault:
            raise self._refused(f"a folder that can be written ({fault})")

    def add(self, key: Key, value: Any) -> None:
        """Keep an entry."""
        self._write(json.dumps([list(key), value]))
        self._entries[key] = value

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __getitem__(self, key: Key) -> Any:
        return self._entries[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def no_answer(self) -> ModelUnavailable:
        """The error of a model that answers nothing any more."""
        return ModelUnavailable(
            "the model answers no prompt of a query: is it up, is its key right, and do label prompts get "
            f"log-probabilities? What was done before is kept in {str(self.path)!r}; the same command goes on with it"
        )

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)


def key_of(text: str) -> str:
    """A name for a text that shows nothing of it and stays the same."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def once_more(found: Sequence[T | None], ask: Callable[[list[int]], Sequence[T | None]]) -> list[T | None]:
    """Answers by prompt, None for a failure, where each prompt that failed among others has been asked once more.

    One that was answered is asked again beside them. Where that fails as well, the model is gone: then there is no
    answer at all, so that nothing of an outage is kept.
    """
    failed = [i for i, answer in enumerate(found) if answer is None]
    there = [i for i, answer in enumerate(found) if answer is not None]
    if not failed or not there:
        return list(found)
    known, *again = ask([there[0], *failed])
    if known is None:
        return [None] * len(found)
    renewed = dict(zip(failed, again, strict=True))
    return [renewed.get(i, answer) for i, answer in enumerate(found)]
