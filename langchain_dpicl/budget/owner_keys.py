"""The secret key of owners' marks, which never stands in the ledger that holds the marks.

A plan whose owners pay with tickets knows them by keyed hashes. Beside its key, such a table would prove to its reader
who is in the data. The key of a store in a file or a database stands there; that of a store in memory in the key file:
``<ledger>.key``, or the place that `PrivacyBudget` was given. The ledger holds the key's name alone, a hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

from langchain_dpicl.durable import replacing, sync_folder
from langchain_dpicl.errors import InvalidParameter, LedgerError
from langchain_dpicl.store.notes import KEY, path_of


def key_id(key: bytes) -> str:
    """The name of a key. It shows nothing of a random one."""
    return hashlib.blake2b(key, digest_size=16, person=b"dpicl key").hexdigest()


class OwnerKeyFile:
    """The file with the key of stores that have none of their own.

    ``ledger`` is the ledger's path, None if it has none; ``given`` is the place that the deployer named. A ledger that
    ``ends_with_process`` has its key in memory.
    """

    def __init__(
        self,
        ledger: str | None,
        given: str | os.PathLike[str] | None,
        *,
        ends_with_process: bool = False,
    ) -> None:
        self._ledger = ledger
        beside = None if ledger is None else Path(f"{ledger}.key")
        self.path = beside if given is None else path_of("key_file", given)
        self._in_memory = secrets.token_bytes(KEY) if ends_with_process and self.path is None else None

    def make(self, key: bytes | None = None) -> bytes:
        """The key. If there is none it is made: ``key``, or a random one.

        Its owner alone may read it (mode 600). That is the owner of a ledger in a file, if you may set it.

        Raises `InvalidParameter` if nobody has named a place for it, `LedgerError` if it cannot be read or written.
        """
        path = self.path
        problem = ""
        if path is None and self._in_memory is None:
            raise InvalidParameter(
                "key_file",
                None,
                "a path: a store in memory has no place for the key of its owners, and this ledger is no file",
            )
        if path is not None and not path.exists():
            try:
                like = None if self._ledger is None else os.stat(self._ledger)
                with contextlib.suppress(FileExistsError), replacing(path, is_new=True, like=like) as file:
                    file.write((key or secrets.token_bytes(KEY)).hex().encode() + b"\n")
                sync_folder(path)
            except OSError as error:
                problem = error.strerror or type(error).__name__
        if not problem and (found := self.read()) is not None:
            return found
        raise self._refused(problem or "it is gone")

    def read(self) -> bytes | None:
        """The key; None if there is none. Raises `LedgerError` if it cannot be read."""
        if self.path is None:
            return self._in_memory
        problem = "it does not hold a key"
        try:
            found = bytes.fromhex(self.path.read_text("ascii").strip())
            if len(found) == KEY:
                return found
        except FileNotFoundError:
            return None
        except OSError as error:
            problem = error.strerror or type(error).__name__
        except ValueError:
            pass
        raise self._refused(problem)

    def _refused(self, problem: str) -> LedgerError:
        return LedgerError(
            f"the key of owners' marks, {str(self.path)!r}, cannot be used ({problem}): nothing was charged"
        )
