"""How a wrapped chain is asked: with a text or with a mapping, and which keys it needs."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Literal

from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    Runnable,
    RunnableAssign,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import DynamicRunnable

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.private.reach import is_named
from langchain_dpicl.release.ensemble import PrivateEnsemble
from langchain_dpicl.selection import PoissonExampleSelector

Form = Literal["text", "mapping"]

_WRAPPERS = ((RunnableBindingBase, "bound"), (RunnableWithFallbacks, "runnable"), (DynamicRunnable, "default"))
_OF_MAPPINGS = ("langgraph.pregel.main.Pregel", "langchain_classic.chains.base.Chain")


class AskedEnsemble(PrivateEnsemble):
    """An ensemble that may be asked a bare text, and whose chain is asked in one form, however the release was."""

    def __init__(
        self,
        selector: PoissonExampleSelector,
        member: Runnable[Any, Any],
        asks: Form,
        question_key: str,
        documents_key: str | None,
        needed: frozenset[str],
        **settings: Any,
    ) -> None:
        super().__init__(selector, member, **settings)
        self.asks, self._question_key, self._documents_key = asks, question_key, documents_key
        self._needed = needed - {documents_key} if asks == "mapping" else frozenset()

    @property
    def variant(self) -> str:
        """The settings beside the chain that decide a member's prompt."""
        return (
            f" asks={self.asks} documents={self.selector.max_exemplars} question_key={self._question_key!r}"
            f" documents_key={self._documents_key!r}"
        )

    def check_request(self, values: object) -> Mapping[str, Any]:
        """A text, or a mapping with it under the question's key; with the chain's keys if it takes a mapping."""
        if isinstance(values, str):
            values = {self._question_key: str(values)}
        if isinstance(values, Mapping):
            if self._documents_key in values:
                raise InvalidParameter("input", [self._documents_key], "a mapping without this key, which is filled")
            if self.asks == "text" and set(values) != {self._question_key}:
                bound = f"a text, or a mapping with {self._question_key!r} alone: the chain takes a text"
                raise InvalidParameter("input", sorted(map(str, values)), bound)
        return super().check_request(values)


def form_of(part: Any) -> Form | None:
    """Whether a chain takes a text or a mapping, as far as its first steps show it."""
    for kind, inner in _WRAPPERS:
        if isinstance(part, kind):
            return form_of(getattr(part, inner))
    if isinstance(part, RunnableSequence):
        return form_of(next((step for step in part.steps if not isinstance(step, RunnablePassthrough)), None))
    if isinstance(part, RunnableParallel):
        return next((form for form in map(form_of, part.steps__.values()) if form is not None), None)
    if isinstance(part, BaseRetriever):
        return "text"
    takes_mapping = isinstance(part, (RunnableAssign, RunnablePick)) or is_named(part, _OF_MAPPINGS)
    # A prompt with one variable takes a bare text just as well.
    return "mapping" if takes_mapping or _reads_keys(part) or len(keys_of(part)[0]) > 1 else None


def keys_of(part: Any, given: frozenset[str] = frozenset()) -> tuple[frozenset[str], frozenset[str] | None]:
    """The keys that a chain needs beside the given ones, as far as known, and those given after it; None if unknown."""
    if isinstance(part, RunnableSequence):
        needed: frozenset[str] = frozenset()
        after: frozenset[str] | None = given
        for step in part.steps:
            if after is not None:
                more, after = keys_of(step, after)
                needed |= more
        return needed, after
    if isinstance(part, RunnableBindingBase):
        return keys_of(part.bound, given)
    if isinstance(part, RunnableAssign):
        return keys_of(part.mapper, given)[0], given | part.mapper.steps__.keys()
    if isinstance(part, RunnableParallel):
        return frozenset().union(*(keys_of(step, given)[0] for step in part.steps__.values())), None
    if isinstance(part, RunnablePassthrough):
        return frozenset(), given
    if _reads_keys(part):
        names = part.func.__reduce__()[1]
    else:  # a prompt's, or a chain's of langchain-classic
        names = getattr(part, "input_variables", None) or getattr(part, "input_keys", None) or ()
    return frozenset(name for name in names if isinstance(name, str)) - given, None


def _reads_keys(part: Any) -> bool:
    return isinstance(part, RunnableLambda) and isinstance(getattr(part, "func", None), operator.itemgetter)
