"""Public stand-ins for a member's examples, and whether it looks at them.

A chain that looks at no example makes every release a costly public answer. `names_examples` reads the chain;
`WatchedExamples` notice a public call that reads them; `slips_in` finds the names in templates that nobody fills.
"""

from __future__ import annotations

import copy
import gc
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import CodeType, FunctionType
from typing import Any, NoReturn

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import Runnable

from langchain_dpicl.errors import InvalidParameter, UnsafeConfigurationError
from langchain_dpicl.members.scoring import LabelScorer
from langchain_dpicl.private import OwnBucket
from langchain_dpicl.private.reach import CLOSED, FunctionScope, is_one, reachable
from langchain_dpicl.private.sharing import public_copy
from langchain_dpicl.selection import Examples, PoissonExampleSelector

_NEAR = 0.8
"""How alike two names are of which one may be a slip of the other."""

MARKS = """ {"a": [1, {b}]} {{c}}
{d! '%s' $e \\ "f" {{#g}} {% h %}
"""
"""What a text may hold that breaks a template, a format or a line: braces, quotes, percent signs, a line break."""

READS_NOTHING = (
    "it reads neither the key 'examples' of its input, nor the selector, a retriever or a vector store that gives a "
    "member its own"
)
"""What a refusal and a warning say."""


class WatchedExamples(Examples):
    """Public examples that notice whether anybody reads them: ``read``. Code in C may read them unnoticed."""

    read = False

    def __repr__(self) -> str:
        return f"<{self.number} examples>"

    __str__ = __repr__

    @property
    def number(self) -> int:
        """How many there are, without reading."""
        return list.__len__(self)

    def shown_in(self, shown: str, question: str) -> bool:
        """Whether the text of one of them stands in prompts or an output, and not in the question."""
        texts = (exemplar[self.input_key] for exemplar in list.__iter__(self))
        return any(text in shown and text not in question for text in texts)

    def __radd__(self, other: Any) -> Any:
        return other + list(self)


def _watch(name: str) -> None:
    def noticed(self: WatchedExamples, *given: Any, **named: Any) -> Any:
        self.read = True
        return getattr(list, name)(self, *given, **named)

    setattr(WatchedExamples, name, noticed)


for (
    _name
) in "__iter__ __len__ __getitem__ __reversed__ __contains__ __add__ __mul__ __eq__ __ne__ copy sort index".split():
    _watch(_name)


def public_buckets(given: object, selector: PoissonExampleSelector) -> list[WatchedExamples]:
    """The caller's public examples, as buckets of the size that a member gets at most."""
    store = selector.store
    bound = f"a list of at least one public example: a mapping with a text under {store.input_key!r}"
    bound += "" if store.output_key is None else f" and a value under {store.output_key!r}"
    if not isinstance(given, (list, tuple)) or not given:
        raise InvalidParameter("public_examples", given if not given else type(given).__name__, bound)
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


class _NoStore:
    """What a selector has in the place of its store during a rehearsal."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsafeConfigurationError(
            "a member asks the selector for private examples from outside of its own call: in a rehearsal there are "
            "none, and in a release it would read other members' examples"
        )


def without_store(chain: Runnable[Any, Any], share: Sequence[object]) -> Runnable[Any, Any]:
    """A copy of a public chain whose selectors have no store: whatever it does, no private record is read.

    Raises `UnsafeConfigurationError` if a selector cannot be exchanged.
    """
    instead: list[tuple[object, object]] = []
    for part in reachable(chain):
        if is_one(part, PoissonExampleSelector):
            empty = copy.copy(part)
            empty.store = _NoStore()
            instead.append((part, empty))
    made = public_copy(chain, share, instead)
    mine = {id(empty) for _, empty in instead}
    for part in reachable(made):
        if is_one(part, PoissonExampleSelector) and id(part) not in mine:
            raise UnsafeConfigurationError(
                "the member reaches its selector by a class, or by what cannot be copied, so a rehearsal could show "
                "private records: give the selector to a prompt, a closure or an object"
            )
    found: Runnable[Any, Any] = made
    return found


class Hearing(BaseCallbackHandler):
    """Hears what models are asked and how many tokens they count."""

    run_inline = True

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.tokens: dict[str, int] = {}

    def on_chat_model_start(self, serialized: Any, messages: list[list[BaseMessage]], **kwargs: Any) -> None:
        for some in messages:
            self.prompts.append("\n".join(map(_message, some)))

    def on_llm_start(self, serialized: Any, prompts: list[str], **kwargs: Any) -> None:
        self.prompts += prompts

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        said = [getattr(each, "message", None) for some in response.generations for each in some]
        counts = [count for message in said if (count := getattr(message, "usage_metadata", None))]
        pairs = [(count["input_tokens"], count["output_tokens"]) for count in counts]
        if not pairs and (count := (response.llm_output or {}).get("token_usage")):
            pairs = [(count.get("prompt_tokens", 0), count.get("completion_tokens", 0))]
        for asked, answered in pairs:
            self.tokens["input"] = self.tokens.get("input", 0) + asked
            self.tokens["output"] = self.tokens.get("output", 0) + answered


def _message(message: BaseMessage) -> str:
    calls = "".join(f"\n{call['name']}({json.dumps(call['args'])})" for call in getattr(message, "tool_calls", ()))
    return f"{message.type}: {message.text}{calls}"


# -- whether a member reads its examples -------------------------------------------------------------------------------


def names_examples(chain: Any) -> bool:
    """Whether anything in a chain names the key ``examples``, or gives a member its own bucket. Runs no code of it."""
    for part in reachable(chain):
        if is_one(part, (OwnBucket, LabelScorer)):
            return True
        if is_one(part, (*CLOSED, BaseLanguageModel, type)):
            continue
        if type(part) is FunctionType:
            texts: Iterable[Any] = [*_texts_of(part.__code__), *(value for _, value in FunctionScope(part).held)]
        else:
            texts = gc.get_referents(part)
        if any(isinstance(text, str) and _names(text) for text in texts):
            return True
    return False


def _names(text: str) -> bool:
    """Whether a text is the key, or a template that may name it."""
    return text == "examples" or re.search(r"\{[^{}]*\bexamples\b", text) is not None


def _texts_of(code: CodeType) -> Iterator[str]:
    """Constants and names, of variables the arguments alone."""
    yield from (*code.co_names, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _texts_of(constant)
        elif isinstance(constant, (tuple, frozenset)):
            yield from (each for each in constant if isinstance(each, str))
        elif isinstance(constant, str):
            yield constant


# -- names in templates ------------------------------------------------------------------------------------------------


def slip(missing: Iterable[str], filled: Iterable[str]) -> tuple[str, str] | None:
    """Of the names that nobody fills, the first that is nearly one that is filled: what it is, and that one."""
    known = sorted(filled)
    for name in sorted(missing):
        if near := get_close_matches(name, known, 1, _NEAR):
            return name, near[0]
    return None


def slip_words(name: str, near: str) -> str:
    return f"the prompt names {name!r}, which nobody fills; did you mean {near!r}?"


def slips_in(chain: Any, filled: set[str]) -> list[str]:
    """Such names in all templates of a chain, in words."""
    found = []
    for part in reachable(chain):
        names = getattr(part, "input_variables", None) if is_one(part, Runnable) else None
        named = {name for name in names or () if isinstance(name, str)}
        if slipped := slip(named - filled, filled - named):
            found.append(slip_words(*slipped))
    return list(dict.fromkeys(found))
