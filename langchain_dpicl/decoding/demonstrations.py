"""Released demonstrations: pairs that any model may see, and the file that keeps them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from langchain_dpicl.budget import Receipt
from langchain_dpicl.errors import InvalidParameter, InvalidRecords

RECEIPT = "receipt"
"""The key of a line's receipt, beside those of its pair."""


class DemonstrationReceipt(Receipt):
    """The receipt of one demonstration's answer."""

    settings: str
    """A keyed hash of everything that decides the answers beside the input: budget, plan, model, template, numbers."""


class Demonstrations(list[dict[str, Any]]):
    """Public input/output pairs, as plain mappings: released outputs to public inputs.

    Their use costs nothing more: ``FewShotPromptTemplate(examples=...)``, any model, any number of times.

    Parameters
    ----------
    pairs, receipts
        The pairs, and for each of them the receipt of its answer.
    unanswered
        The inputs that have no output because the budget was spent.
    """

    def __init__(
        self,
        pairs: Iterable[dict[str, Any]] = (),
        receipts: Iterable[DemonstrationReceipt] = (),
        unanswered: Iterable[Any] = (),
    ) -> None:
        super().__init__(pairs)
        self.receipts = list(receipts)
        self.unanswered = list(unanswered)

    def save(self, path: str | Path) -> None:
        """Write one JSON object a line: a pair's keys, and its receipt under "receipt". Replaces the file as a whole.

        Raises `InvalidParameter` if the file cannot be written, or if pairs were removed without their receipts.
        """
        if len(self) != len(self.receipts):
            raise InvalidParameter("receipts", len(self.receipts), f"one for each of {len(self)} pairs")
        lines = [to_line({**pair, RECEIPT: receipt}) for pair, receipt in zip(self, self.receipts, strict=True)]
        path = Path(path)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with beside.open("wb") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError as error:
            reason = error.strerror
        else:
            return
        beside.unlink(missing_ok=True)
        raise InvalidParameter("path", str(path), f"a file that can be written ({reason})")

    @classmethod
    def load(cls, path: str | Path) -> Demonstrations:
        """Read a file of `save` or `synthesize_demonstrations`. Raises `InvalidRecords` for anything else."""
        path = Path(path)
        try:
            lines, rest = from_lines(path.read_bytes())
        except OSError as error:
            reason = error.strerror
        else:
            for number, line in enumerate([*lines, {}] if rest else lines, start=1):
                if not isinstance(line.get(RECEIPT), dict):
                    raise InvalidRecords(f"line {number} of {path.name!r} is not a demonstration with its receipt")
            return cls.of(lines)
        raise InvalidRecords(f"{path.name!r} cannot be read: {reason}")

    @classmethod
    def of(cls, lines: Iterable[dict[str, Any]], unanswered: Iterable[Any] = ()) -> Demonstrations:
        """From the lines of a file: each a pair with its receipt."""
        lines = [dict(line) for line in lines]
        receipts = [cast("DemonstrationReceipt", line.pop(RECEIPT)) for line in lines]
        return cls(lines, receipts, unanswered)


def to_line(content: dict[str, Any]) -> bytes:
    """One line of readable JSON. Raises ValueError for an infinite number and for half a surrogate pair."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def from_lines(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the object on each line that is not empty ({} for other content), and the size of a torn last line."""

    def parsed(line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    *whole, last = content.split(b"\n")
    lines = [parsed(line) for line in whole if line.strip()]
    rest = parsed(last)
    return ([*lines, rest], 0) if rest else (lines, len(last))
