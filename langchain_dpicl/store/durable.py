"""Files that one process at a time appends lines to, and that lose no written line in a crash."""

from __future__ import annotations

import os
import sys


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


def read_whole(descriptor: int) -> bytes:
    """All bytes of an open file."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def append(descriptor: int, content: bytes) -> None:
    """Write at the end of a file, and onto the disk."""
    os.lseek(descriptor, 0, os.SEEK_END)
    while content:
        content = content[os.write(descriptor, content) :]
    os.fsync(descriptor)
