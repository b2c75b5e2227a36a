"""The text of demonstrations and queries: two public layouts, the demonstration first."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.store.base import PrivateStore


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
