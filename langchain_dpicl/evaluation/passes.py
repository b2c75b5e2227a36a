"""One pass of a model: its answers to every prompt of a query, on disk, so that a stopped evaluation resumes.

A pass holds members' answers in the open: for data that are public in truth, or stay with their owner.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_core.runnables import Runnable

from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.private import boundary
from langchain_dpicl.store.durable import LineFile

Pairs = Sequence[tuple[str, str]]
"""Examples of one prompt: (input, output)."""

Key = tuple[int | str, ...]

_BAD_HEAD = "a folder of an evaluation: its first line is damaged"


class PassFile(dict[Key, Any], LineFile):
    """Entries by key, on disk from the moment they are added (with `add` or `answers`).

    The first line holds the settings; each further line is one entry as JSON. A line that a stop left half written is
    dropped, and its work is done again. Only the file's owner may read it.

    Raises `InvalidParameter` if the file was made with other settings (it names the first that differs), is no such
    file, is damaged (it names the line), cannot be written, or if another evaluation has it. A refused file stays as
    it is.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        LineFile.__init__(self, path, path, "a folder", "evaluation", private=True)
        try:
            self._take_over()
        except BaseException:
            self.close()
            raise

    def _take_over(self) -> None:
        """Read the file; then cut off the line that was not finished, if any."""
        head = json.dumps(self.settings, sort_keys=True)
        if self.lines:
            found, asked = _parsed(self.lines[0]), json.loads(head)
            if not isinstance(found, dict):
                raise self.refused(_BAD_HEAD)
            for name in sorted({*found, *asked}):
                if found.get(name) != asked.get(name):
                    bound = f"{found.get(name)!r}, with which {str(self.path)!r} was begun, or another output folder"
                    raise InvalidParameter(name, asked.get(name), bound)
        elif not head.encode().startswith(self.torn):
            raise self.refused(_BAD_HEAD)
        for number, line in enumerate(self.lines[1:], start=2):
            match _parsed(line):
                case [[*key], value] if all(isinstance(part, (int, str)) for part in key):
                    self[tuple(key)] = value
                case _:
                    bound = f"a folder of an evaluation: line {number} is damaged; remove it to do its work again"
                    raise self.refused(bound)
        self.mend()
        if not self.lines:
            self.write(head.encode() + b"\n")

    def add(self, key: Key, value: Any) -> None:
        """Keep an entry."""
        self.write(json.dumps([list(key), value]).encode() + b"\n")
        self[key] = value

    def answers(
        self, key: Key, prompts: Sequence[Any], ask: Callable[[Sequence[Any]], Sequence[Any]], failed: Any = None
    ) -> list[Any]:
        """Return the answers of this key. Ask for them if they are missing, and keep them.

        ``ask`` answers some of the prompts, with ``failed`` for each that has no answer. A prompt that fails among
        others is asked once more, beside one that has an answer: if that one fails too, the model is gone. Raises
        `ModelUnavailable` if no prompt has an answer, or the model is gone; nothing of an outage is kept.
        """
        if key not in self:
            found = list(ask(prompts))
            lacking = [i for i, answer in enumerate(found) if answer == failed]
            is_gone = len(lacking) == len(found)
            if lacking and not is_gone:
                answered = next(i for i in range(len(found)) if i not in lacking)
                known, *again = ask([prompts[i] for i in (answered, *lacking)])
                is_gone = known == failed
                for i, answer in zip(lacking, again, strict=True):
                    found[i] = answer
            if is_gone:
                raise ModelUnavailable(
                    "the model answers no prompt of a query: is it up, is its key right, and do label prompts get "
                    f"log-probabilities? Earlier answers are kept in {str(self.path)!r}; the same command resumes"
                )
            self.add(key, found)
        kept: list[Any] = self[key]
        return kept


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def key_of(text: str) -> str:
    """A stable name for a text that shows nothing of it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ask_members(member: Runnable[Any, Any], prompts: Sequence[Pairs], query: str) -> list[Any]:
    """Return a sealed member's output for each prompt's examples, called as a release calls it; None for a failure."""
    requests = [
        ({"input": query}, [{"input": asked, "output": answer} for asked, answer in pairs]) for pairs in prompts
    ]
    found = boundary.run_private(member, requests, max_concurrency=8)
    return [None if each is boundary.ABSTAIN else each for each in found]
