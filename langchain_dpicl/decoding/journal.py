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

import hashlib
import os
import secrets
from pathlib import Path
from typing import Any

from langchain_dpicl.decoding.demonstrations import RECEIPT, from_lines, to_line
from langchain_dpicl.durable import LineFile, append, sync_folder

_FORMAT = "dpicl-job-1"
_HEAD = f'{{"format": "{_FORMAT}"'.encode()


def mark_of(shared: str) -> str:
    """What stands for an input in the journal: a hash of its shared text."""
    return hashlib.sha256(shared.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Journal(LineFile):
    """One job's hold on its files. Set ``under_way`` to None after the last answer; `close` it in any case.

    Parameters
    ----------
    output
        FILE. The incomplete last line of an interrupted job is dropped: the ledger has that answer.
    digest
        Of everything that decides an answer beside its input; "settings" in both files.

    Raises `InvalidParameter` as `LineFile` does, and if the files are not of a job with this digest: both then stay as
    they are.
    """

    under_way: str | None = None
    """The mark of the unfinished answer; None if there is none."""
    is_reopened = False
    """Whether that answer has the charge on which its tokens were handed out."""

    def __init__(self, output: Path, digest: str) -> None:
        super().__init__(output.with_name(output.name + ".part"), output, "a file", "job")
        self._tokens: list[int] = []
        self.name = secrets.token_hex(16)
        """The job's secret name, which makes its questions ones that nobody else can ask."""
        is_new = not self.lines and _HEAD.startswith(self.torn[: len(_HEAD)])
        try:
            if not is_new:
                self._read_journal(digest)
            self.answers = self._read_output(digest)
            if self.under_way is None:  # nothing is charged
                self.lines = []
            self.mend()
            if self.under_way is None:
                self._note(format=_FORMAT, job=self.name, settings=digest, output=str(output))
                sync_folder(self.path)
        except BaseException:
            super().close(remove=is_new)
            raise

    def _read_journal(self, digest: str) -> None:
        """Read the lines of an earlier process."""
        header, *steps = from_lines(b"".join(line + b"\n" for line in self.lines))[0] or [{}]
        is_whole = all(isinstance(step.get("answer"), str) or isinstance(step.get("token"), int) for step in steps)
        if header.get("format") != _FORMAT or not is_whole:
            raise self.refused(f"a file beside which {self.path.name!r} is an undamaged journal, or is not there")
        if not steps:
            return
        if header.get("output") != str(self.output):
            raise self.refused(f"the file with which the job was begun, {header.get('output')!r}: move it back")
        if header.get("settings") != digest:
            raise self.refused(
                "a file whose job was begun with the same budget, model, template and settings; to give up the answer "
                f"under way, which stays charged, delete {self.path.name!r}"
            )
        self.name = str(header.get("job"))
        for step in steps:
            if "answer" in step:
                self.under_way, self._tokens = step["answer"], []
            else:
                self._tokens.append(step["token"])

    def _read_output(self, digest: str) -> list[dict[str, Any]]:
        """The lines of FILE, whose incomplete last line is taken away."""
        with self.writing():
            if self.output.exists() and not self.output.is_file():
                raise self.refused("a plain file")
            content = self.output.read_bytes() if self.output.exists() else b""
        found, rest = from_lines(content)
        for number, line in enumerate([*found, {}] if rest and self.under_way is None else found, start=1):
            receipt = line.get(RECEIPT)
            if not isinstance(receipt, dict) or receipt.get("settings") != digest:
                raise self.refused(
                    "a new file, or one whose every line is a demonstration made with the same budget, model, template "
                    f"and settings, which line {number} is not"
                )
        whole = content[: len(content) - rest]
        if content:
            with self.writing(), self.output.open("r+b") as file:
                if rest:
                    os.ftruncate(file.fileno(), len(whole))
                if whole and not whole.endswith(b"\n"):
                    append(file.fileno(), b"\n")
        return found

    # -- answers ------------------------------------------------------------------------------------------------------

    def begin(self, mark: str) -> None:
        """Note an answer before it is charged or continued; ``mark`` stands for its input."""
        if mark != self.under_way:
            self._start(mark)

    def _start(self, mark: str) -> None:
        self._note(answer=mark)
        self.under_way, self._tokens = mark, []

    def _note(self, **entry: Any) -> None:
        self.write(to_line(entry))

    def tokens(self) -> list[int]:
        """The tokens that were handed out of this answer on a reopened charge. On another charge none were."""
        if self._tokens and not self.is_reopened and self.under_way is not None:
            self._start(self.under_way)
        return list(self._tokens)

    def keep(self, token: int) -> None:
        """Write a token, on the private side. It leaves only after this: what is not kept was not released."""
        self._note(token=token)
        self._tokens.append(token)

    def add(self, answer: dict[str, Any]) -> None:
        """Append an answer to FILE, durably."""
        with self.writing():
            is_new = not self.output.exists()
            with self.output.open("ab") as file:
                append(file.fileno(), to_line(answer))
            if is_new:
                sync_folder(self.output)

    def close(self, remove: bool = False) -> None:
        """Release the files. The journal stays if the job is to be continued."""
        super().close(remove or self.under_way is None)
