"""Files that a crash or a fault leaves whole: replaced at once, or locked and appended to line by line."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from langchain_dpicl.errors import InvalidParameter


def lock(descriptor: int) -> bool:
    """Lock a file for as long as the descriptor, or this process, lives. False if another has it."""
    if sys.platform == "win32":
        import msvcrt

        try:
            os.lseek(descriptor, 1 << 40, os.SEEK_SET)  # a locked byte cannot be read: one behind any content
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def refused(error_of: Callable[[str], Exception]) -> Iterator[None]:
    """Raise ``error_of(reason)`` in the place of an `OSError` of the ``with`` block, to which it does not refer."""
    try:
        yield
        return
    except OSError as error:
        refusal = error_of(error.strerror or type(error).__name__)
    try:
        raise refusal
    finally:
        refusal.__context__ = None  # the error, which the block still handles


def writing(parameter: str, path: object, after: str = "") -> AbstractContextManager[None]:
    """Raise `InvalidParameter` for this path if the file system refuses what the ``with`` block writes."""
    return refused(lambda why: InvalidParameter(parameter, str(path), f"a file that can be written ({why}){after}"))


def append(descriptor: int, content: bytes) -> None:
    """Write at the end of a file, and onto the disk."""
    os.lseek(descriptor, 0, os.SEEK_END)
    while content:
        content = content[os.write(descriptor, content) :]
    os.fsync(descriptor)


@contextlib.contextmanager
def replacing(
    path: Path, *, mode: int = 0o600, is_new: bool = False, like: os.stat_result | None = None
) -> Iterator[IO[bytes]]:
    """A file to write in the ``with`` block. After it the content is on the disk, and takes the place of ``path``.

    It is written beside its place, as ``.NAME.SIXTEEN_HEX_DIGITS.tmp``. If anything fails, the old file stays as it was
    and the new one goes; a process that is killed leaves it. Call `sync_folder` to make the new name durable too.

    Parameters
    ----------
    is_new
        `FileExistsError` if there is such a path by the end, which then stays as it is. On a file system without links
        an empty file takes the name first, and the whole one takes its place: a crash or a fault between the two leaves
        the empty file, and never a part of the content.
    like
        The file gets the owner and the group of this one, as far as the system permits, and exactly this ``mode``. If
        it does not get the group, members of its own group may do what everybody may.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    first = mode if like is None else 0o600
    file = open(beside, "xb", opener=lambda name, flags: os.open(name, flags, first))  # noqa: SIM115
    try:
        with file:
            if like is not None:
                _give(file.fileno(), like, mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _place_new(beside, path)
        else:
            os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
    beside.unlink(missing_ok=True)  # a second name would keep what is forgotten under the first


def _place_new(beside: Path, path: Path) -> None:
    """Give a file this name too, or this name alone. `FileExistsError` if it is taken."""
    try:
        os.link(beside, path)
        return
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        pass
    if sys.platform == "win32":
        os.rename(beside, path)  # there it replaces nothing
        return
    taken = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # A writer who found the empty file before it was locked has replaced it, or is about to.
        if not lock(taken) or not os.path.samestat(os.fstat(taken), os.stat(path)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        os.replace(beside, path)
    finally:
        os.close(taken)


def _give(descriptor: int, like: os.stat_result, mode: int) -> None:
    """Give a file the owner and the group of another one, and a mode, as far as the system permits."""
    if sys.platform == "win32":
        return
    try:
        os.fchown(descriptor, like.st_uid, like.st_gid)
    except OSError:
        with contextlib.suppress(OSError):
            os.fchown(descriptor, -1, like.st_gid)
    if os.fstat(descriptor).st_gid != like.st_gid:
        mode &= ~stat.S_IRWXG | ((mode & stat.S_IRWXO) << 3)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, mode)


def sync_folder(path: Path, *, must: bool = False) -> None:
    """Make a file's new name durable, on systems that can flush folders. ``must``: `OSError` if that fails."""
    with contextlib.suppress(*() if must else (OSError,)):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class LineFile:
    """A file of lines that this process alone has. `write` returns when its line is on the disk.

    ``lines`` are the whole lines that it held, and ``torn`` is what follows them: of a `write` that did not return.
    Only the file's owner may read a ``private`` one, whose folder is made. Errors are `InvalidParameter`, and name
    ``output`` as a ``kind``. They come if the file cannot be opened or written, and if another process does such
    ``work`` on it.
    """

    fault: str | None = None
    """Why the file system refused to write."""

    def __init__(self, path: Path, output: Path, kind: str, work: str, *, private: bool = False) -> None:
        self.path = path
        self.output = output
        self._kind = kind
        mode = 0o600 if private else 0o666
        with self.writing():
            if private:
                path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), mode)
                if not lock(self._descriptor):
                    os.close(self._descriptor)
                    raise self.refused(f"{kind} on which no other {work} is running")
                if self._is_here():
                    break
                os.close(self._descriptor)  # the process that had it has just removed it
            with open(self._descriptor, "rb", closefd=False) as file:
                *self.lines, self.torn = file.read().split(b"\n")

    def _is_here(self) -> bool:
        """True if the path still names the open file."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def refused(self, bound: str) -> InvalidParameter:
        """The error of an output that is not within this bound."""
        return InvalidParameter("output", str(self.output), bound)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a fault of the file system into `InvalidParameter`, and keep its reason as ``fault``."""
        with refused(self._unwritable):
            yield

    def _unwritable(self, reason: str) -> InvalidParameter:
        self.fault = reason
        return self.refused(f"{self._kind} that can be written ({reason})")

    def mend(self) -> None:
        """Take the torn line away."""
        with self.writing():
            os.ftruncate(self._descriptor, sum(len(line) + 1 for line in self.lines))

    def write(self, line: bytes) -> None:
        """Append a line, which ends with a line break."""
        with self.writing():
            append(self._descriptor, line)

    def close(self, remove: bool = False) -> None:
        """Release the file, and perhaps remove it."""
        if remove and sys.platform != "win32" and self._is_here():
            self.path.unlink(missing_ok=True)  # a process that waits for the lock sees that the file is gone
        os.close(self._descriptor)
        if remove and sys.platform == "win32":
            with contextlib.suppress(OSError):  # another process has just opened it, and takes it as it is
                self.path.unlink()
