"""A job's files: its answers in FILE, and beside it, until the job is over, ``FILE.part``.

``FILE.part`` holds the job's secret name, which is part of its queries' names in the ledger, and the tokens of the
unfinished answer, each on the disk before it is handed out. So a job that was killed at any moment finds its own open
charge again and continues with the next token.

Why that costs nothing more. A job releases the tokens in its journal. Each was drawn from a sample of its own and has a
unit of the charge for itself. Nobody saw a token that is not in the journal, so a repeated step on a fresh sample is
the first use of its unit. However often a job is interrupted, a charge never has more tokens than units. Three
conditions must hold. One process at a time has the journal: it is locked. Nobody restores an older copy of it, or
continues with a copy elsewhere: it knows its place. And an interruption does not depend on the owners in a sample; a
failure that does shows that much to whoever runs the process, each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_dpicl.decoding.demonstrations import RECEIPT, from_lines, to_line
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.store.durable import append, lock, read_whole

_FORMAT = "dpicl-job-1"
_HEAD = f'{{"format": "{_FORMAT}"'.encode()


def mark_of(shared: str) -> str:
    """What stands for an input in the journal: a hash of its shared text."""
    return hashlib.sha256(shared.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Journal:
    """One job's hold on its files. Set ``is_over`` after the last answer; `close` it in any case.

    Parameters
    ----------
    output
        FILE. The incomplete last line of an interrupted job is dropped: the ledger has that answer.
    digest
        Of everything that decides an answer beside its input; "settings" in both files.

    Raises `InvalidParameter` if another process has the file, if the files are not of a job with this digest (both then
    stay as they are), and if they cannot be written.
    """

    name: str
    """The job's secret name, which makes its questions ones that nobody else can ask."""
    fault: str | None = None
    """Why a file could not be written."""
    under_way: str | None = None
    """The mark of the unfinished answer."""
    is_reopened = False
    """Whether that answer has the charge on which its tokens were handed out."""
    is_over = False
    """Whether no answer is unfinished."""
    _has_header = True

    def __init__(self, output: Path, digest: str) -> None:
        self.output, self.part = output, output.with_name(output.name + ".part")
        self.name, self._digest = secrets.token_hex(16), digest
        self.lines: list[dict[str, Any]] = []
        self._tokens: list[int] = []
        self._descriptor = self._locked()
        try:
            part_rest, output_rest = self._read_journal(), self._read_output()
            with self.writing():
                _mend(self._descriptor, part_rest)
                if output.exists():
                    with output.open("r+b") as file:
                        _mend(file.fileno(), output_rest)
        except BaseException:
            self.close()
            raise

    def refused(self, bound: str) -> InvalidParameter:
        """The error of an output that is not within this bound."""
        return InvalidParameter("output", str(self.output), bound)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a fault of the file system into `InvalidParameter`, and keep its reason as ``fault``."""
        try:
            yield
        except OSError as error:
            self.fault = error.strerror or type(error).__name__
        else:
            return
        raise self.refused(f"a file that can be written ({self.fault})")

    def _locked(self) -> int:
        """The journal's descriptor, locked for this process."""
        while True:
            with self.writing():
                if self.output.exists() and not self.output.is_file():
                    raise self.refused("a plain file")
                descriptor = os.open(self.part, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
                if not lock(descriptor):
                    os.close(descriptor)
                    raise self.refused("a file on which no other job is running")
                if self.part.exists() and os.path.samestat(os.fstat(descriptor), self.part.stat()):
                    return descriptor
                os.close(descriptor)  # the job that had it was over just now

    def _read_journal(self) -> int:
        """Read the lines of an earlier process; return the bytes of an incomplete last line."""
        content = read_whole(self._descriptor)
        if b"\n" not in content and _HEAD.startswith(content[: len(_HEAD)]):  # before the header nothing is charged
            self._has_header = False
            return len(content)
        entries, rest = from_lines(content)
        header, *steps = entries or [{}]
        is_whole = all(isinstance(step.get("answer"), str) or isinstance(step.get("token"), int) for step in steps)
        if header.get("format") != _FORMAT or not is_whole:
            raise self.refused(f"a file beside which {self.part.name!r} is an undamaged journal, or is not there")
        if header.get("output") != str(self.output):
            raise self.refused(f"the file with which the job was begun, {header.get('output')!r}: move it back")
        if header.get("settings") != self._digest:
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
        """Read FILE; return the bytes of an incomplete last line."""
        with self.writing():
            content = self.output.read_bytes() if self.output.exists() else b""
        found, rest = from_lines(content)
        for number, line in enumerate([*found, {}] if rest and not self._has_header else found, start=1):
            receipt = line.get(RECEIPT)
            if not isinstance(receipt, dict) or receipt.get("settings") != self._digest:
                raise self.refused(
                    "a new file, or one whose every line is a demonstration made with the same budget, model, template "
                    f"and settings, which line {number} is not"
                )
            self.lines.append(line)
        return rest

    # -- answers ------------------------------------------------------------------------------------------------------

    def begin(self, mark: str) -> None:
        """Note an answer before it is charged or continued; ``mark`` stands for its input."""
        if not self._has_header:
            self._note(format=_FORMAT, job=self.name, settings=self._digest, output=str(self.output))
            _sync_folder(self.part)
            self._has_header = True
        if mark != self.under_way:
            self._start(mark)

    def _note(self, **entry: Any) -> None:
        with self.writing():
            append(self._descriptor, to_line(entry))

    def _start(self, mark: str) -> None:
        self._note(answer=mark)
        self.under_way, self._tokens = mark, []

    def tokens(self) -> list[int]:
        """The tokens that were handed out of this answer on a reopened charge. On another charge none were."""
        if self._tokens and not self.is_reopened and self.under_way is not None:
            self._start(self.under_way)
        return list(self._tokens)

    def keep(self, token: int) -> None:
        """Write a token, on the private side. It leaves only after this: what is not kept was not released."""
        self._note(token=token)
        self._tokens.append(token)

    def write(self, line: dict[str, Any]) -> None:
        """Append an answer to FILE, durably."""
        with self.writing():
            is_new = not self.output.exists()
            with self.output.open("ab") as file:
                append(file.fileno(), to_line(line))
            if is_new:
                _sync_folder(self.output)

    def close(self) -> None:
        """Release the files. The journal stays if the job is to be continued."""
        remove = self.is_over or not self._has_header
        if remove and sys.platform != "win32":  # a process that waits for the lock sees that the file is gone
            self.part.unlink(missing_ok=True)
        os.close(self._descriptor)
        if remove and sys.platform == "win32":
            with contextlib.suppress(OSError):  # another process has just opened it, and will find no answer in it
                self.part.unlink()


def _mend(descriptor: int, rest: int) -> None:
    """Take so many bytes away from the end of a file, which then ends with a whole line."""
    content = read_whole(descriptor)
    whole = content[: len(content) - rest]
    if rest:
        os.ftruncate(descriptor, len(whole))
    if whole and not whole.endswith(b"\n"):
        append(descriptor, b"\n")


def _sync_folder(path: Path) -> None:
    """Make a new file's name durable, on systems that can flush folders."""
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
