"""How demonstrations and queries read, and released demonstrations: pairs that any model may see, and their file."""

from __future__ import annotations

import json
import os
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from langchain_dpicl.budget import Receipt
from langchain_dpicl.errors import InvalidParameter, InvalidRecords
from langchain_dpicl.store.base import PrivateStore

RECEIPT = "receipt"
"""The key of a line's receipt, beside those of its pair."""


@dataclass(frozen=True)
class DemonstrationTemplate:
    """A prompt is one demonstration, then the query: format strings with names in braces, both public.

    ``demonstration`` names an exemplar's keys and should end with a separator; ``query`` names the keys of the caller's
    input. The demonstration comes first, so that a model's state of it serves every query. Raises `InvalidParameter`
    for a string that is no format, or that names anything but plain keys.
    """

    demonstration: str
    query: str

    def __post_init__(self) -> None:
        for name in ("demonstration", "query"):
            layout = getattr(self, name)
            try:
                layout.format_map(dict.fromkeys(_names(layout), ""))
            except Exception:
                bound = "a format string with the plain names of keys in braces"
                raise InvalidParameter(f"template.{name}", layout, bound) from None

    @classmethod
    def of(
        cls, store: PrivateStore, *, input_name: str | None = None, output_name: str | None = None
    ) -> DemonstrationTemplate:
        """One ``Name: value`` line for a store's input and one for its output, which the model continues.

        The names default to the store's keys. Descriptive names ("Data", "Description") help a model more than "Input"
        and "Output": a demonstration cannot make a text likely that the model finds very unlikely without it.
        """

        def word(parameter: str, name: str | None, key: str) -> str:
            if name is None:
                return key.capitalize()
            if not isinstance(name, str) or not name.strip() or set(name) & set("{}\n"):
                raise InvalidParameter(parameter, name, "a word or more, on one line, without braces")
            return name.strip()

        asked = f"{word('input_name', input_name, store.input_key)}: {{{store.input_key}}}\n"
        if store.output_key is None:
            return cls(f"{asked}\n", asked)
        told = f"{word('output_name', output_name, store.output_key)}:"
        return cls(f"{asked}{told} {{{store.output_key}}}\n\n", asked + told)

    @property
    def query_keys(self) -> tuple[str, ...]:
        """The keys that a caller's input must have."""
        return tuple(_names(self.query))

    @property
    def padding(self) -> str:
        """A public demonstration: one with nothing in it."""
        return self.show(dict.fromkeys(_names(self.demonstration), ""))

    @property
    def ending(self) -> str:
        """The text after a demonstration's last field: a model that continues a query ends there."""
        pieces = list(string.Formatter().parse(self.demonstration))
        return pieces[-1][0] if pieces and pieces[-1][1] is None else ""

    def show(self, exemplar: Mapping[str, Any]) -> str:
        """An exemplar's text. Private, as its errors may be."""
        return self.demonstration.format_map(exemplar)

    def ask(self, values: Mapping[str, Any]) -> str:
        """The shared text for a caller's input. Raises `InvalidParameter`, which never shows it, for a missing key."""
        missing = [name for name in self.query_keys if name not in values]
        if missing:
            raise InvalidParameter("input", missing[0], f"a mapping with the keys {', '.join(self.query_keys)}")
        try:
            return self.query.format_map(values)
        except Exception:
            pass
        raise InvalidParameter("input", "(not shown)", "values that the template can format")


def _names(layout: str) -> list[str]:
    names = [name for _, name, _, _ in string.Formatter().parse(layout) if name is not None]
    if not all(name and not set(name) & set(".[]") and not name.isdigit() for name in names):
        raise ValueError("only plain names")
    return list(dict.fromkeys(names))


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
            return
        except OSError as error:
            reason = error.strerror
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
