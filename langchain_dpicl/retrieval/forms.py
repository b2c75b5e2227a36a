"""The form in which a chain is asked, as far as its first steps show it; and the state of agents and graphs.

A compiled graph whose state has ``messages``, such as `create_agent` makes, is asked with messages. It answers with its
structured response if it has one, else with its last message.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Literal

from langchain_core.messages import BaseMessage, HumanMessage, convert_to_messages
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
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
from langchain_dpicl.store.records import attempt

Form = Literal["text", "mapping", "messages"]

MESSAGES = "messages"
"""The key of a state's messages."""

_STRUCTURED = "structured_response"
"""The key of what `create_agent(..., response_format=...)` answers."""

_GRAPHS = ("langgraph.graph.state.CompiledStateGraph",)

_WRAPPERS = (
    (RunnableBindingBase, "bound"),
    (RunnableWithFallbacks, "runnable"),
    (DynamicRunnable, "default"),
)
_OF_MAPPINGS = ("langgraph.pregel.main.Pregel", "langchain_classic.chains.base.Chain")


def form_of(part: Any, question_key: str) -> Form | None:
    """Return the form that a chain takes, as far as its first steps show it.

    A graph with ``messages`` takes messages, unless its state has the question under a key of its own.
    """
    for kind, inner in _WRAPPERS:
        if isinstance(part, kind):
            return form_of(getattr(part, inner), question_key)
    if isinstance(part, RunnableSequence):
        first = next((step for step in part.steps if not isinstance(step, RunnablePassthrough)), None)
        return form_of(first, question_key)
    if isinstance(part, RunnableParallel):
        forms = (form_of(step, question_key) for step in part.steps__.values())
        return next((form for form in forms if form is not None), None)
    if isinstance(part, BaseRetriever):
        return "text"
    state = _state(part, "input_schema")
    if MESSAGES in state and question_key not in state:
        return "messages"
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


def _state(part: Any, schema: str) -> frozenset[str]:
    """Return the keys of a compiled graph's ``input_schema`` or ``output_schema``; none of another part."""
    builder = getattr(part, "builder", None) if is_named(part, _GRAPHS) else None
    known: Mapping[Any, Any] = getattr(builder, "schemas", {})
    return frozenset(known.get(getattr(builder, schema, None), ()))


def answered_state(part: Any) -> frozenset[str]:
    """Return the keys of the state that a chain answers with, if its last step is a graph; none otherwise."""
    for kind, inner in _WRAPPERS:
        if isinstance(part, kind):
            return answered_state(getattr(part, inner))
    if isinstance(part, RunnableSequence):
        return answered_state(part.last)
    return _state(part, "output_schema")


def answer_in(state: Mapping[str, Any]) -> Any:
    """Return the answer in a state with messages."""
    structured = state.get(_STRUCTURED)
    return state[MESSAGES][-1] if structured is None else structured


def messages_of(text: str) -> list[BaseMessage]:
    """Return a question as the messages of a state."""
    return [HumanMessage(text)]


def read_messages(given: object) -> tuple[list[BaseMessage], str]:
    """Return the messages of a request, and the text of the last one of a person. Raises `InvalidParameter`."""
    made, fault = attempt(convert_to_messages, given if isinstance(given, list) else [given])
    said = [] if fault else [message.text for message in made if message.type == "human"]
    if not said:
        raise InvalidParameter("input", MESSAGES, "messages that LangChain reads, with one of a person among them")
    return made, str(said[-1])
