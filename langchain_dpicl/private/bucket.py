"""One member's bucket: its exemplars, with their vectors if it may search them; and made-up examples."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.errors import UnsafeConfigurationError


class Examples(list[dict[str, Any]]):
    """One member's exemplars, as mappings. Private: ``repr`` and ``str`` show their number alone.

    A prompt template's ``{examples}`` shows input and output as text, one ``Key: value`` line each, with a blank line
    between exemplars.
    """

    def __init__(
        self,
        items: Iterable[dict[str, Any]] = (),
        input_key: str = "input",
        output_key: str | None = None,
    ):
        super().__init__(items)
        self.input_key = input_key
        self.output_key = output_key
        self._vectors: dict[int, tuple[dict[str, Any], NDArray[np.float32]]] = {}

    def add(self, exemplar: dict[str, Any], vector: NDArray[np.float32] | None = None) -> None:
        """Append an exemplar, with its vector if it is known."""
        self.append(exemplar)
        if vector is not None:
            self._vectors[id(exemplar)] = exemplar, vector.copy()  # a view leads to all others

    def vector_of(self, exemplar: dict[str, Any]) -> NDArray[np.float32] | None:
        """The vector that an exemplar was added with, also if the member has sorted its bucket since."""
        return self._vectors.get(id(exemplar), (None, None))[1]

    def __format__(self, spec: str) -> str:
        return "\n\n".join(
            "\n".join(f"{key.capitalize()}: {exemplar[key]}" for key in (self.input_key, self.output_key) if key)
            for exemplar in self
        )

    def __repr__(self) -> str:
        return f"<{len(self)} private examples>"

    __str__ = __repr__

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("private examples are not pickled or copied")


class MadeUp(dict[str, Any]):
    """An example for a public question, in which no record has a part.

    It has a text under every key, with ``marks`` at its end.
    """

    def __init__(self, items: dict[str, Any], marks: str = "") -> None:
        super().__init__(items)
        self._marks = marks

    def __missing__(self, key: str) -> str:
        return f"a made-up {key}{self._marks}"

    def __copy__(self) -> MadeUp:
        return MadeUp(dict(self), self._marks)


def other_words(text: str) -> str:
    """A text with the same words that no earlier call was asked."""
    return f"{text} (in other words, {os.urandom(4).hex()})"
