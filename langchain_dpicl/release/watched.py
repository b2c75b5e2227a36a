"""Public examples in the place of a member's own, and a call's use of them.

A chain that looks at no example makes every release a costly public answer.
`WatchedExamples` notice a public call that reads them, `Heard` has the prompts in which
they stand. `slips_in` finds the names in templates that nobody fills.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable
from langchain_core.runnables.base import RunnableBinding

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.private.copy import Copy, Pristine
from langchain_dpicl.private.reach import is_one, reachable
from langchain_dpicl.selection import Examples, PoissonExampleSelector

_NEAR = 0.8
"""The likeness of two names from which one may be a slip of the other."""

MARKS = """ {"a": [1, {b}]} {{c}}
{d! '%s' $e \\ "f" {{#g}} {% h %}
"""
"""Parts of a text that break a template, a format or a line: braces, quotes, percent signs, a line break."""

READS_NOTHING = (
    "it reads neither the key 'examples' of its input, nor the selector, a retriever or a vector store that gives a "
    "member its own"
)
"""The reason in a refusal and in a warning."""


class WatchedExamples(Examples):
    """Public examples that notice whether anybody reads them: ``read``. Code in C may read them unnoticed."""

    read = False

    def __repr__(self) -> str:
        return f"<{self.number} examples>"

    __str__ = __repr__

    @property
    def number(self) -> int:
        """The number of examples, counted without reading."""
        return list.__len__(self)

    def are_seen(self, shown: str, question: str) -> bool:
        """True if they were read, or a text of theirs stands in prompts or an output, and not in the question."""
        texts = (exemplar[self.input_key].removesuffix(MARKS) for exemplar in list.__iter__(self))
        return self.read or any(text in shown and text not in question for text in texts)

    def __radd__(self, other: Any) -> Any:
        return other + list(self)


def _watch(name: str) -> None:
    def noticed(self: WatchedExamples, *given: Any, **named: Any) -> Any:
        self.read = True
        return getattr(list, name)(self, *given, **named)

    setattr(WatchedExamples, name, noticed)


_READING = "__iter__ __len__ __getitem__ __reversed__ __contains__ __add__ __mul__ __eq__ __ne__ copy sort index"
for _name in _READING.split():
    _watch(_name)


def public_buckets(given: object, selector: PoissonExampleSelector) -> list[WatchedExamples]:
    """The caller's public examples, as buckets of the size that a member gets at most."""
    store = selector.store
    outputs = "" if store.output_key is None else f" and a value under {store.output_key!r}"
    bound = f"a list of at least one public example: a mapping with a text under {store.input_key!r}{outputs}"
    if not isinstance(given, (list, tuple)) or not given:
        raise InvalidParameter("public_examples", given and type(given).__name__, bound)
    made: list[dict[str, Any]] = []
    for i, each in enumerate(given):
        if isinstance(each, Document):
            each = {**each.metadata, store.input_key: each.page_content}
        found = dict(each) if isinstance(each, Mapping) else {store.input_key: each}
        lacks_output = store.output_key is not None and store.output_key not in found
        if not isinstance(found.get(store.input_key), str) or lacks_output:
            what = sorted(map(str, found)) if isinstance(each, Mapping) else type(each).__name__
            raise InvalidParameter(f"public_examples[{i}]", what, bound)
        made.append(found)
    size = selector.max_exemplars
    return [WatchedExamples(made[i : i + size], store.input_key, store.output_key) for i in range(0, len(made), size)]


def marked(bucket: WatchedExamples) -> WatchedExamples:
    """The same examples with `MARKS` in their texts; outputs stay, which may have to be labels or numbers."""
    made = [dict(each) for each in list.__iter__(bucket)]
    for each in made:
        texts = {key: value for key, value in each.items() if type(value) is str and key != bucket.output_key}
        each |= {key: text + MARKS for key, text in texts.items()}
    return WatchedExamples(made, bucket.input_key, bucket.output_key)


class PublicChain(NamedTuple):
    """A chain that is asked before the charge, on public values; the number of its calls, and each one's seconds."""

    copies: Pristine
    times: int
    timeout: float | None


class Hearing(BaseCallbackHandler):
    """A handler that hears the prompts of LangChain models."""

    run_inline = True

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def on_chat_model_start(self, serialized: Any, messages: list[list[BaseMessage]], **kwargs: Any) -> None:
        for some in messages:
            self.prompts.append("\n".join(map(_message, some)))

    def on_llm_start(self, serialized: Any, prompts: list[str], **kwargs: Any) -> None:
        self.prompts += prompts


def _message(message: BaseMessage) -> str:
    calls = [f"{call['name']}({json.dumps(call['args'])})" for call in getattr(message, "tool_calls", ())]
    return "\n".join([f"{message.type}: {message.text}", *calls])


class Heard(Pristine):
    """A public chain whose copies let one hear the prompts of their models."""

    def __init__(self, chain: Pristine) -> None:
        self._original = chain
        self.hearing = Hearing()

    def copy(self, bucket: Sequence[dict[str, Any]] = ()) -> Copy:
        """A copy for one attempt. A call that a model asks to wait is made again, and heard anew."""
        self.hearing = Hearing()
        made = self._original.copy(bucket)
        made.chain = RunnableBinding(bound=made.chain, config={"callbacks": [self.hearing]})
        return made


# -- names in templates ------------------------------------------------------------------------------------------------


def slip(missing: Iterable[str], filled: Iterable[str]) -> tuple[str, str] | None:
    """Of the names that nobody fills, the first that is nearly one that is filled; and a word on it."""
    known = sorted(filled)
    for name in sorted(missing):
        if near := get_close_matches(name, known, 1, _NEAR):
            return name, f"the prompt names {name!r}, which nobody fills; did you mean {near[0]!r}?"
    return None


def slips_in(chain: Any, filled: set[str]) -> list[str]:
    """`slip` for all templates of a chain."""
    found: list[str] = []
    for part in reachable(chain):
        names = getattr(part, "input_variables", None) if is_one(part, Runnable) else None
        named = {name for name in names or () if isinstance(name, str)}
        if slipped := slip(named - filled, filled - named):
            found.append(slipped[1])
    return list(dict.fromkeys(found))
