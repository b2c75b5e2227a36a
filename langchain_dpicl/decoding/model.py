"""The language model of a sampler: next-token logits for many (demonstration, shared text) prompts at once.

The shared text is public, the demonstrations are private. A demonstration comes first in its prompt, so that a model's
state of it serves every later query.
"""

from __future__ import annotations

import contextlib
import string
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import InvalidParameter, UnsafeConfigurationError
from langchain_dpicl.store import ExemplarStore

T = TypeVar("T")
Logits = NDArray[np.float32]


@dataclass(frozen=True, repr=False)
class Demonstration:
    """One rendered exemplar. Private: ``repr`` and ``str`` show nothing of it.

    ``key`` identifies the exemplar in a store, for the states that a model keeps between answers; the model reads
    ``text``.
    """

    key: Hashable
    text: str


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
                raise InvalidParameter(
                    f"template.{name}", layout, "a format string with the plain names of keys in braces"
                ) from None

    @classmethod
    def of(
        cls,
        store: ExemplarStore,
        *,
        input_name: str | None = None,
        output_name: str | None = None,
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


class NotCopied:
    """Base of objects that hold private states or a key: they are not pickled or copied."""

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError(f"a {type(self).__name__.strip('_')} is not pickled or copied")


class LogitsSession(Protocol):
    """One answer: a public shared text, and the demonstrations that its steps will need."""

    def logits(self, rows: Sequence[int], released: Sequence[int]) -> Logits:
        """(1 + len(rows), vocabulary) natural-log scores of the next token, normalised or not.

        Row 0 is zero-shot (the shared text alone); row 1 + j belongs to ``demonstrations[rows[j]]`` followed by the
        shared text. Each prompt ends with the ``released`` tokens, which only grow from call to call, or stay. A row
        may be asked for twice, in one call or in several.

        A row must not depend, to the last bit, on which other rows are asked for or were, nor on whether they fail: the
        others are what an owner's absence changes, and the proof charges an owner for its own term alone.

        A row whose prompt the model cannot answer is all NaN, and counts nothing. Only row 0 may raise.
        """

    def close(self) -> None:
        """Drop this answer's own state."""


@runtime_checkable
class LogitsModel(Protocol):
    """A language model that shows its whole next-token distribution."""

    @property
    def name(self) -> str:
        """Public: part of the identity of an answer."""

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer."""

    def fits(self, demonstration: str, shared: str, tokens: int) -> bool:
        """Return whether demonstration, shared text and that many tokens fit the context. Depends on nothing else."""

    def text(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without the end tokens."""

    def session(
        self,
        shared: str,
        demonstrations: Sequence[Demonstration],
        *,
        steps: int,
    ) -> LogitsSession:
        """Open an answer of at most ``steps`` tokens."""

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Drop every private state kept for these demonstrations."""


def attempt(function: Callable[..., T], *arguments: object) -> T | None:
    """Return what a function returns for one row, or None if it raises.

    Every error ends here, with its traceback, which refers to the row's text: also one that is no ``Exception``, as a
    tokeniser's panic. An interrupt passes, without what came with it; signals bring it to the main thread alone.
    """
    try:
        return function(*arguments)
    except BaseException as error:
        kind = type(error)
    if issubclass(kind, (KeyboardInterrupt, SystemExit)) and threading.current_thread() is threading.main_thread():
        raise kind
    return None


def reads(model: LogitsModel, demonstration: str, shared: str, tokens: int) -> bool:
    """Return whether the model reads both, and an answer of so many tokens. None reads half of a surrogate pair."""
    with contextlib.suppress(UnicodeEncodeError):
        (demonstration + shared).encode()
        return model.fits(demonstration, shared, tokens)
    return False


def read_rows(
    model: LogitsModel,
    session: LogitsSession,
    rows: Sequence[int],
    released: Sequence[int],
) -> Logits:
    """A session's logits. Raises ValueError if they have another shape than the model must give."""
    found: Any = np.asarray(session.logits(list(rows), list(released)))
    if found.shape != (1 + len(rows), model.vocabulary):
        raise ValueError("the model's logits have another shape")
    logits: Logits = found if found.dtype.kind == "f" else found.astype(np.float64)
    return logits


class Rows:
    """A model's session whose rows do not fail one another, whatever the model does. Private: ``repr`` shows nothing.

    A row that the model cannot answer is all NaN, and `clipped_terms` makes it a term of zeros: its owner adds nothing
    to this token, as if its coin had said no. Nothing else moves. If a failed row failed the answer, or emptied the
    rows beside it, one owner would decide what all the others add.

    All rows are asked for in one call. If it raises, or its answer has another shape, each row is asked for by itself;
    if that fails too, or no session opens on all demonstrations, in a session of its own. The rows have the same bits
    every way. A session that keeps the contract of `LogitsSession.logits` never needs it: the further calls show in
    time.
    """

    def __init__(
        self,
        model: LogitsModel,
        shared: str,
        demonstrations: Sequence[Demonstration],
        steps: int,
    ) -> None:
        self._demonstrations = demonstrations
        self._open = partial(model.session, shared, steps=steps)
        self._read = partial(read_rows, model)
        self._whole = attempt(self._open, demonstrations)
        self._apart: dict[tuple[int, ...], LogitsSession] = {}  # a session for each row, and one for zero-shot

    def logits(self, rows: Sequence[int], released: Sequence[int]) -> Logits:
        """See `LogitsSession.logits`. Raises if the zero-shot row fails, and only then."""
        found = None if self._whole is None else attempt(self._read, self._whole, rows, released)
        if found is not None:
            return found
        zero_shot = self._alone((), released)
        nothing = np.full_like(zero_shot, np.nan, np.float32)
        some = [attempt(self._alone, (row,), released) for row in rows]
        stacked: Logits = np.stack([zero_shot, *(nothing if row is None else row for row in some)])
        return stacked

    def _alone(self, row: tuple[int, ...], released: Sequence[int]) -> Any:
        """One row, asked for by itself; () is the zero-shot one."""
        found = None if self._whole is None else attempt(self._read, self._whole, row, released)
        if found is None:
            if row not in self._apart:
                self._apart[row] = self._open([self._demonstrations[each] for each in row])
            found = self._read(self._apart[row], range(len(row)), released)
        return found[-1]

    def close(self) -> None:
        """Drop every session, each whatever becomes of the others."""
        for session in (self._whole, *self._apart.values()):
            if session is not None:
                attempt(session.close)
        self._whole, self._demonstrations = None, ()
        self._apart.clear()
