"""A request's rules for metadata: a filter of its own, and one for what its caller may see.

Both are public: they come from the request, the caller's name and the deployer's functions, and are part of what makes
two questions equal. An owner takes part if one exemplar passes both and the gate, and its call sees such exemplars
alone. So which exemplars count is a matter between each of them, the question and public facts.

A function's values often come from a request, which may hold ``{"$ne": ""}`` where a text is meant. So what a function
gives says equality, or is a `Condition`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from langchain_core.runnables import Runnable
from langchain_core.runnables.base import coerce_to_runnable

from langchain_dpicl.aggregators.reading import answer_of
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.store.filters import Condition, MetadataFilter
from langchain_dpicl.store.records import attempt

Metadata = Mapping[str, Any] | Condition
"""A filter, in the language of `langchain_dpicl.store.filters`."""

OfRequest = Metadata | MetadataFilter | Callable[[Mapping[str, Any]], Metadata | None] | None
OfRequests = OfRequest | tuple[OfRequest, ...]
OfPrincipal = Callable[[str], Metadata | Literal["everything"]] | None

EVERYTHING = "everything"
"""What a ``visible_to`` gives for a caller who may see all. None is refused, as who has no rule sees nothing."""


def search_query_of(given: Any, nearest_to: str | None) -> Runnable[Any, Any] | None:
    """A ``search_query`` as a Runnable. Raises `InvalidParameter`."""
    if given is None:
        return None
    if nearest_to is None or not (callable(given) or isinstance(given, Runnable)):
        raise InvalidParameter(
            "search_query",
            type(given).__name__,
            "a Runnable or a function that gives a text, with nearest_to or a threshold",
        )
    made: Runnable[Any, Any] = coerce_to_runnable(given)
    return made


def text_searched(made: object) -> str:
    """The text that a ``search_query`` made. Raises `ModelUnavailable` for none."""
    text = answer_of(made)
    if text is None or not text.strip():
        raise ModelUnavailable(
            "search_query fails on the request, or gives no text; nothing was charged. Invoke it alone to see why"
        )
    return text


class Rules:
    """A selector's ``filter`` (or several) and ``visible_to``. False if there are none."""

    def __init__(self, filter: OfRequests, visible_to: OfPrincipal, owner_key: str | None) -> None:
        self._owner_key = owner_key
        self._filters = [
            each if callable(each) else self._read("filter", each, by_function=False)
            for each in (filter if isinstance(filter, tuple) else (filter,))
            if each is not None
        ]
        if visible_to is not None and not callable(visible_to):
            raise InvalidParameter(
                "visible_to",
                type(visible_to).__name__,
                f"a function of the caller's name that gives a filter, or {EVERYTHING!r}",
            )
        self._visible_to = visible_to

    def __bool__(self) -> bool:
        return bool(self._filters) or self._visible_to is not None

    def named(self, principal: str | None) -> list[str]:
        """Return the names of these rules for this caller: filters in words, functions by their names."""
        found = [
            str(getattr(each, "__qualname__", type(each))) if callable(each) else str(each) for each in self._filters
        ]
        if self._visible_to is not None:
            found.append(f"visible to {principal}")
        return found

    def wanted(self, values: Mapping[str, Any], principal: str | None) -> MetadataFilter | None:
        """Return the filter for this request of this caller; None if there is none. Raises `InvalidParameter`."""
        found = [self._of_request(each, dict(values)) if callable(each) else each for each in self._filters]
        if self._visible_to is not None:
            if principal is None:
                raise InvalidParameter(
                    "principal",
                    None,
                    "the authenticated caller, named with acting_for: visible_to says what each may see",
                )
            found.append(self._seen_by(principal))
        wanted: MetadataFilter | None = None
        for each in found:
            if each is not None:
                wanted = each & wanted
        return wanted

    def _of_request(
        self, rule: Callable[[Mapping[str, Any]], Metadata | None], values: dict[str, Any]
    ) -> MetadataFilter | None:
        given, fault = attempt(rule, values)
        if fault:
            raise InvalidParameter("filter", fault, "what the function raises for this request; nothing was charged")
        return None if given is None else self._read("filter", given, by_function=True)

    def _seen_by(self, principal: str) -> MetadataFilter | None:
        assert self._visible_to is not None
        given, fault = attempt(self._visible_to, principal)
        if fault:
            bound = "what the function raises for this caller, who sees nothing then; nothing was charged"
            raise InvalidParameter("visible_to", fault, bound)
        if given is None:
            bound = f"a filter, or {EVERYTHING!r} for who may see all; nothing was charged"
            raise InvalidParameter("visible_to", "None for this caller", bound)
        if isinstance(given, str) and given == EVERYTHING:
            return None
        return self._read("visible_to", given, by_function=True)

    def _read(self, name: str, given: object, *, by_function: bool) -> MetadataFilter:
        made = MetadataFilter.parse(given, name, by_function=by_function)
        if self._owner_key in made.keys:
            raise InvalidParameter(
                name,
                self._owner_key,
                "metadata: the owner's entry is kept apart, so put what may be asked under another key, too",
            )
        return made
