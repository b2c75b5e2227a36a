"""A job's files: its answers in FILE, and beside it, until the job is over, ``FILE.part``.

``FILE.part`` holds the job's secret name, which is part of its queries' names in the ledger, and the tokens of the
answer under way, each on the disk before it is handed out. So a job that was killed at any moment finds its own open
charge again and goes on with the next token.

Why that costs nothing more. What a job releases is what was handed out: the tokens in its journal. Each of them was
drawn from a sample of its own and has a unit of its charge for itself. A step whose token is not in the journal was
seen by nobody, so running it again on a fresh sample is the first use of its unit. However often a job is interrupted,
the tokens handed out on a charge are never more than its units. Three things must hold. One process at a time has the
journal: it is locked. Nobody puts an older copy of it back, or goes on with a copy elsewhere: it knows its place. And
an interruption does not depend on who is in a sample; a failure that does shows that much to whoever runs the process,
each time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_dpicl.decoding.synthesis.demonstrations import RECEIPT, from_lines, to_line
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.store.durable import append, lock, read_whole

_FORMAT = "dpicl-job-1"
_HEAD = f'{{"format": "{_FORMAT}"'.encode()
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)


class Journal:
    """One job's hold on its output file. After the last answer `finish` it; in any case `close` it.

    Parameters
    ----------
    output
        FILE. Its incomplete last line, where a job was interrupted, is dropped: the ledger has that answer.
    settings
        A digest of all that decides an answer beside its input.

    Raises `InvalidParameter` where another process has the file, where the files are not of a job with these settings
    (both then stay as they are), and where they cannot be written.
    """

    def __init__(self, output: Path, settings: str) -> None:
        self.output = output
        self.fault: str | None = None
        self.under_way: str | None = None
        self.name = secrets.token_hex(16)
        self.lines: list[dict[str, Any]] = []
        self._settings = settings
        self.part = output.with_name(output.name + ".part")
        self._tokens: list[int] = []
        self._has_header, self._is_over = True, False
        self._descriptor = self._locked()
        try:
            part_rest = self._read_journal()
            output_rest = self._read_output()
            with self.writing():
                _mend(self._descriptor, part_rest)
                if self.output.exists():
                    with _opened(self.output) as descriptor:
                        _mend(descriptor, output_rest)
        except BaseException:
            self.close()
            raise

    def refused(self, bound: str) -> InvalidParameter:
        """The error that says what this output has to be."""
        return InvalidParameter("output", str(self.output), bound)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns a fault of the file system into `InvalidParameter`, and keeps its reason as ``fault``."""
        try:
            yield
        except OSError as error:
            self.fault = error.strerror or type(error).__name__
        else:
            return
        raise self.refused(f"a file that can be written ({self.fault})")

    # -- opening ------------------------------------------------------------------------------------------------------

    def _locked(self) -> int:
        """The journal's descriptor, alone in having it."""
        while True:
            with self.writing():
                if self.output.exists() and not self.output.is_file():
                    raise self.refused("a plain file")
                descriptor = os.open(self.part, _FLAGS, 0o666)
                if not lock(descriptor):
                    os.close(descriptor)
                    raise self.refused("a file on which no other job is running")
                if _is_at(descriptor, self.part):
                    return descriptor
                os.close(descriptor)  # the job that had it was over just now

    def _read_journal(self) -> int:
        """Take over what an earlier process wrote; how many bytes at its end are no whole line."""
        content = read_whole(self._descriptor)
        if b"\n" not in content and _HEAD.startswith(content[: len(_HEAD)]):  # before the header nothing is charged
            self._has_header = False
            return len(content)
        entries, rest = from_lines(content)
        header, *steps = [entry or {} for entry in entries] or [{}]
        if header.get("format") != _FORMAT or not all(_is_step(step) for step in steps):
            raise self.refused(f"a file beside which {self.part.name!r} is an undamaged journal, or is not there")
        if header.get("output") != str(self.output):
            raise self.refused(f"the file with which the job was begun, {header.get('output')!r}: move it back")
        if header.get("settings") != self._settings:
            raise self.refused(
                "a file whose job was begun with the same budget, model, template and settings; to give up the answer "
                f"under way, which stays charged, delete {self.part.name!r}"
            )
        self.name = str(header.get("job"))
        for step in steps:
            if "answer" in step:
                self.under_way, self._tokens = step["answer"], []
            else:
                self._tokens.append(step["token"])
        return rest

    def _read_output(self) -> int:
        """Read FILE; how many bytes at its end are no whole line."""
        with self.writing():
            content = self.output.read_bytes() if self.output.exists() else b""
        found, rest = from_lines(content)
        self.lines = [line for line in found if line is not None and self._is_ours(line)]
        if len(self.lines) < len(found) or (rest and not self._has_header):
            number = next((n for n, line in enumerate(found, 1) if line not in self.lines), len(found) + 1)
            raise self.refused(
                f"a new file, or one whose every line is a demonstration made with the same budget, model, template "
                f"and settings, which line {number} is not"
            )
        return rest

    def _is_ours(self, line: dict[str, Any]) -> bool:
        receipt = line.get(RECEIPT)
        return isinstance(receipt, dict) and receipt.get("settings") == self._settings

    # -- answers ------------------------------------------------------------------------------------------------------

    def begin(self, mark: str) -> None:
        """An answer is about to be charged, or gone on with; ``mark`` stands for its input."""
        with self.writing():
            if not self._has_header:
                header = {"format": _FORMAT, "job": self.name, "settings": self._settings, "output": str(self.output)}
                append(self._descriptor, to_line(header))
                _sync_folder(self.part)
                self._has_header = True
            if mark != self.under_way:
                self._start(mark)

    def tokens(self, mark: str, *, reopened: bool) -> list[int]:
        """What was handed out of the answer that was begun, on a charge that was reopened; on a new one nothing was."""
        if self._tokens and not reopened:
            with self.writing():
                self._start(mark)
        return list(self._tokens)

    def _start(self, mark: str) -> None:
        append(self._descriptor, to_line({"answer": mark}))
        self.under_way, self._tokens = mark, []

    def keep(self, token: int) -> None:
        """Write down a token that is about to be handed out."""
        with self.writing():
            append(self._descriptor, to_line({"token": token}))
        self._tokens.append(token)

    def write(self, line: dict[str, Any]) -> None:
        """Append an answer to FILE, durably."""
        with self.writing():
            is_new = not self.output.exists()
            with _opened(self.output) as descriptor:
                append(descriptor, to_line(line))
            if is_new:
                _sync_folder(self.output)

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The job is over: no answer is under way."""
        self._is_over = True

    def close(self) -> None:
        """Let go of the files. The journal stays if somebody is to go on with it."""
        remove = self._is_over or not self._has_header
        if remove and sys.platform != "win32":  # whoever waits for the lock sees that the file is gone
            self.part.unlink(missing_ok=True)
        os.close(self._descriptor)
        if remove and sys.platform == "win32":
            with contextlib.suppress(OSError):  # somebody has just opened it, and will find nothing under way
                self.part.unlink()


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())


def _is_step(entry: dict[str, Any]) -> bool:
    """Whether this is a line of a journal: an answer's mark, or a token."""
    return isinstance(entry.get("answer"), str) or isinstance(entry.get("token"), int)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, _FLAGS, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _mend(descriptor: int, rest: int) -> None:
    """Take so many bytes away from the end of a file, which then ends with a whole line."""
    content = read_whole(descriptor)
    whole = content[: len(content) - rest]
    if rest:
        os.ftruncate(descriptor, len(whole))
    if whole and not whole.endswith(b"\n"):
        append(descriptor, b"\n")


def _sync_folder(path: Path) -> None:
    """Make a new file's name durable, where folders can be flushed."""
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
