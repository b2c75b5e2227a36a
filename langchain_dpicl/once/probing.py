"""Numbers of private texts that a model gives: one call for each text, between good probes.

**An owner's features are its own.** That each owner moves a sum by at most 1 takes features that are a function of one
record and of public values, to the last bit. So each private text is a call of its own, one after the other, on a copy
that no public call uses, within the boundary, and no two texts share a request. The rest is up to the model's server:
if it reads texts in batches, or keeps a prompt's state for the next one, the last bits of a text's numbers depend on
other texts. No rounding mends that: some text lies at a step's edge. `LocalEmbeddings` encodes each text alone, and
`local_llm` answers one request at a time, from an empty cache. `TextRows.of_public` asks public texts again after
others, and refuses a model that gives one of them another bit.

**One text's failure is its own.** A text may end the model, or a quota, or leave the model with other answers. So a
public text, the probe, is asked after each private one, and must have the bits that it had at the start. Then every
private text is asked between two good probes, of a model in the state of the start:

- After a failure a second probe is asked too, the longest public text: what is left of a quota, or of the server's
  speed, may do for a short text alone. A text that fails twice, each time with both probes good after it, has no row.
- After a bad probe the embedded model is opened anew, and one on a server waited for, until both probes are good. The
  text before the bad probe is asked again. If its last call ends with a bad probe too, it has no row.
- If the probes are not good within `PATIENCE`, the fit ends with `ModelLost`, and can be resumed.

What is not seen: a model in another state that gives the probes the same bits, and one that is back in time for the
probe, though a private text found it otherwise. So the address must be one server's: behind a balancer, or a gateway
that keeps answers, a probe may meet another state than the texts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from langchain_core.runnables import RunnableConfig, RunnableLambda

from langchain_dpicl.calls.flow import Flow, pause, run
from langchain_dpicl.errors import LocalModelError, ModelLost, ModelUnavailable, UnsafeConfigurationError
from langchain_dpicl.local.models import reopen
from langchain_dpicl.private import boundary
from langchain_dpicl.private.copy import Pristine
from langchain_dpicl.private.models import limit
from langchain_dpicl.store.base import embedder_of

TextRow = list[Any]
"""The numbers of one text, or their bytes."""

PATIENCE = 600.0
"""Seconds that a fit waits for a model that no longer answers as at the start."""

_LONGEST_PAUSE = 60.0
_TRIES = 3  # of one text
_FAILURES = 2  # with good probes after them: then they are the text's own
_ASKED_AGAIN = 8
BROKEN = "the model no longer answered as at the start"


class Probes(NamedTuple):
    """Public texts and their rows: the one that is asked after each text, and the longest."""

    each: tuple[str, TextRow]
    longest: tuple[str, TextRow]


class TextRows:
    """The rows of texts, each by a call of its own.

    ``row``: a function from one text to its numbers. It may raise anything. ``what``: the numbers' name in errors.
    ``bar``: the name of the progress. ``model``: the one behind ``row``.
    """

    _always = 1
    """The probes that are asked after a text that did not fail."""

    def __init__(
        self, row: Callable[[str, RunnableConfig | None], TextRow], what: str, bar: str, model: object
    ) -> None:
        self._row = row
        self._what = what
        self._bar = bar
        self._model = model

    def rows(self, texts: Sequence[str], progress: bool, probes: Probes | None = None) -> Flow[list[Any]]:
        """The row of each text by a call of its own, made as a private call. In place of a row: how it failed.

        With ``probes`` each text is asked between two good ones: the first of them, and after a failure both. `BROKEN`
        is in place of a row if a probe was bad after its last call. Raises `ModelLost`.
        """
        from tqdm import tqdm

        ask = self.ask()
        found: list[Any] = []
        for text in tqdm(texts, desc=self._bar, unit="text", disable=None if progress else True):
            asking = ask(text) if probes is None else self._between(ask, text, probes)
            found.append((yield from asking))
        return found

    def _between(self, ask: Callable[..., Flow[Any]], text: str, probes: Probes) -> Flow[Any]:
        """A text's row, with good probes before and after the call that gave it."""
        row: Any = BROKEN
        failures = 0
        for _ in range(_TRIES):
            row = yield from ask(text)
            has_failed = not isinstance(row, list)
            if (yield from self._is_good(ask, probes if has_failed else probes[: self._always])):
                failures += has_failed
                if not has_failed or failures == _FAILURES:
                    return row
            else:
                row = BROKEN
                yield from self.waited_for(ask, probes)
        return row

    def _is_good(
        self,
        ask: Callable[..., Flow[Any]],
        probes: Sequence[tuple[str, TextRow]],
        *patience: float,
    ) -> Flow[bool]:
        for text, start in probes:
            row = yield from ask(text, *patience)
            if not self._agrees(row, start):
                return False
        return True

    @staticmethod
    def _agrees(row: Any, start: TextRow) -> bool:
        """Return whether a probe's answer is good: the row that it had at the start."""
        return bool(row == start)

    def ask(self) -> Callable[..., Flow[Any]]:
        """A private call with one text, on a copy of what makes rows, which gives its row or how it failed."""

        def row(values: dict[str, Any], config: RunnableConfig) -> TextRow:
            return own(values["text"], config)

        own = self._row
        member = Pristine(boundary.seal(RunnableLambda(row)))
        seconds = limit(member, "auto", 1)

        def ask(text: str, patience: float | None = None) -> Flow[Any]:
            (found,) = yield boundary.private_calls(
                member,
                [({"text": text}, ())],
                max_concurrency=1,
                timeout=seconds,
                patience=patience,
                failed=type,
            )
            return found

        return ask

    def waited_for(self, ask: Callable[..., Flow[Any]], probes: Sequence[tuple[str, TextRow]]) -> Flow[None]:
        """Open an embedded model anew, or wait for a server, until the probes' rows are those of the start."""
        until = time.monotonic() + PATIENCE
        seconds = 0.0
        while time.monotonic() <= until:
            yield pause(seconds)
            yield self._reopened
            if (yield from self._is_good(ask, probes, 0.0)):
                return
            seconds = min(max(1.0, 2 * seconds), _LONGEST_PAUSE)
        raise ModelLost

    def _reopened(self) -> None:
        with contextlib.suppress(LocalModelError):
            reopen(self._model)

    def answers(self, texts: Sequence[str], progress: bool = False) -> list[TextRow]:
        """The rows of public texts, before a charge. Raises `ModelUnavailable` if a text has none."""
        found = run(self.rows(texts, progress))
        for number, row in enumerate(found):
            if not isinstance(row, list):
                kind = f"{row.__module__}.{row.__qualname__}" if isinstance(row, type) else "it took too long"
                raise ModelUnavailable(f"no {self._what} for public text {number} ({kind}); nothing was charged")
        return found

    def of_public(self, texts: Sequence[str], progress: bool) -> list[TextRow]:
        """`answers`. Raises `UnsafeConfigurationError`, too, if a text's row depends on the texts before it."""
        found = self.answers(texts, progress)
        again = min(_ASKED_AGAIN, len(texts))
        if run(self.rows(texts[:again][::-1], False)) != found[:again][::-1]:
            raise UnsafeConfigurationError(
                f"{embedder_of(self._model)} gives a text other {self._what} after other texts: then one owner's "
                "records would move another's features. Use a model that reads each text alone, from an empty cache, "
                "as those of langchain_dpicl.local do; nothing was charged"
            )
        return found


class Alive(TextRows):
    """The rows of texts of a model that may draw coins of its own: the probes are asked after failures alone.

    A text that fails twice, each time with both probes answered after it, has no row: the failure is its own. While the
    probes fail, the model is waited for, and `ModelLost` ends the work, which can be resumed. So a text that ends the
    model takes no other text's row.
    """

    _always = 0

    @staticmethod
    def _agrees(row: Any, start: TextRow) -> bool:
        return isinstance(row, list)


def probes_of(texts: Sequence[str], rows: Sequence[TextRow], tells: Callable[[TextRow], bool]) -> Probes:
    """The probes among the public texts that were asked again: the shortest that tells something, and the longest."""
    again = range(min(_ASKED_AGAIN, len(texts)))
    shortest = min([i for i in again if tells(rows[i])] or again, key=lambda i: len(texts[i]))
    longest = max([i for i in again if i != shortest], key=lambda i: len(texts[i]), default=shortest)
    return Probes((texts[shortest], rows[shortest]), (texts[longest], rows[longest]))
