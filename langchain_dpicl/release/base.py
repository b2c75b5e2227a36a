"""The base of every release: a Runnable on a budget, an agent's tool, and each caller's doubt about its model."""

from __future__ import annotations

import copy
import math
import re
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, cast

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import BaseModel, Field, create_model
from typing_extensions import TypedDict

from langchain_dpicl.aggregators.base import T
from langchain_dpicl.aggregators.reading import text_of
from langchain_dpicl.budget import BudgetLine, PrivacyBudget, Receipt
from langchain_dpicl.calls.flow import Either, Flow, arun, run
from langchain_dpicl.errors import (
    InvalidParameter,
    MembersAbstained,
    ModelUnavailable,
    PrivacyBudgetExceeded,
    PrivacyWarning,
    UnsafeConfigurationError,
)
from langchain_dpicl.privacy.choice import best_rate
from langchain_dpicl.privacy.lines import PlanLine
from langchain_dpicl.private import Closed, Released
from langchain_dpicl.private.reach import is_one, reachable
from langchain_dpicl.release.transaction import Release, Request
from langchain_dpicl.selection import PoissonExampleSelector, Sought
from langchain_dpicl.store import ExemplarStore

if TYPE_CHECKING:
    from langchain_core.runnables.graph import Graph
    from langchain_core.tools import BaseTool

Configs = RunnableConfig | list[RunnableConfig] | None

_ARGUMENT = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_TAKEN = {"self", "config", "run_manager", "callbacks", "args", "kwargs", "model_config"}

SPENT = (
    "The privacy budget of this tool is spent. It will not answer again, however it is asked: "
    "go on without it, and say so."
)
"""The text that an agent reads when nothing is left."""

ABSTAINED = "This tool found no answer to this; the attempt counts. Trying again later, or asking otherwise, may help."
"""The text that an agent reads when the release is that the members abstain."""

UNAVAILABLE = "The model behind this tool does not answer now. Trying again later may help."

SAID: dict[type[Exception], str] = {
    PrivacyBudgetExceeded: SPENT,
    MembersAbstained: ABSTAINED,
    ModelUnavailable: UNAVAILABLE,
}


def said(error: Exception) -> str:
    """The text that an agent reads of one of these errors."""
    return next(text for kind, text in SAID.items() if isinstance(error, kind))


class AnswerWithReceipt(TypedDict, Generic[T]):
    """The answer of a release with ``return_receipt=True``."""

    answer: T
    receipt: Receipt


class NeverHidden:
    """A Runnable whose fallbacks never hide a spent budget."""

    def with_fallbacks(
        self,
        fallbacks: Sequence[Runnable[Any, Any]],
        *,
        exceptions_to_handle: tuple[type[BaseException], ...] | None = None,
        exception_key: str | None = None,
    ) -> Any:
        """LangChain's fallbacks, which must not hide a spent budget: by default they handle a model that is down.

        Raises `UnsafeConfigurationError` for ``exceptions_to_handle`` that would swallow
        `PrivacyBudgetExceeded`.
        """
        handled = (ModelUnavailable,) if exceptions_to_handle is None else exceptions_to_handle
        if any(issubclass(PrivacyBudgetExceeded, kind) for kind in handled):
            raise UnsafeConfigurationError("a fallback must not hide PrivacyBudgetExceeded: handle narrower exceptions")
        runnable: Any = super()
        return runnable.with_fallbacks(fallbacks, exceptions_to_handle=handled, exception_key=exception_key)


class AnyRelease(NeverHidden, Released, Closed, Release, Runnable[Any, T], Generic[T]):
    """A Runnable that makes releases, with all that a tool, a retriever or a server asks of one.

    A base class, since a Runnable that merely wraps a release has its attributes too. A
    subclass checks a request before charging for it (`InvalidParameter` for "input"),
    charges for `acting_principal`, and shows callbacks, streams and errors nothing but the
    request and the release.
    """

    selector: PoissonExampleSelector
    mechanism: str
    """The mechanism that its line counts."""
    choices: tuple[str, ...] = ()
    """The mechanisms among which a plan may choose; none: its ``mechanism``."""
    options: Mapping[str, float]
    """The mechanism's options that somebody chose."""
    query_key: str
    """The key under which a question goes in, as far as that is known."""
    line_name: str | None
    """As the user gave it; None if the budget has one line."""
    return_receipt: bool
    comes_in_pieces: bool = False
    """True if a stream gives parts of an answer before the whole is made."""
    _bound: tuple[object, BudgetLine] | None = None
    _variant: str
    """The settings of the release that decide its answers beside the request."""

    @property
    def store(self) -> ExemplarStore:  # type: ignore[override]
        """The selector's."""
        return self.selector.store

    def _terms(self) -> dict[str, Any]:
        """The terms, besides mechanism and rate, that the budget's line must agree with."""
        return {
            "rate_is_explicit": self.selector.rate_is_explicit,
            "owners": self.selector.owners,
            "options": self.options,
        }

    def _asked(self) -> tuple[str, float]:
        """The mechanism and the rate of the budget's line: those that it has, or else the release's own."""
        # a line may be named after its mechanism
        mechanism = self.line_name if self.line_name in self.choices else self.mechanism
        known = self.budget.asked(self.line_name, mechanism)
        if known is None:
            epsilon, delta, count = self.budget.share(self.line_name, mechanism)
            return mechanism, self.selector.let_plan_choose(
                partial(best_rate, epsilon, delta, count, self.selector.members),
            )
        if known.mechanism in self.choices:
            mechanism = known.mechanism
        return mechanism, known.rate if self.selector.rate is None else self.selector.rate

    def planned(self) -> str:
        """The mechanism that the budget's line has, or would have if the plan were frozen now."""
        return self._asked()[0]

    def vet(self, line: PlanLine) -> None:
        """Refuse a line of a plan that is not frozen yet: `InfeasiblePlan`."""

    def line(self) -> BudgetLine:
        """The budget's line of this release; solves and freezes the plan at first use.

        It is looked up once, and again if the budget, the store or the selector's rate is
        another one.
        """
        if self._bound is None or self._bound[0] != self._key():
            self.budget.watch(self.store)
            line = self.tried_line()
            self._bound = self._key(), line
        return self._bound[1]

    def tried_on(self, budget: PrivacyBudget) -> Self:
        """The same release on another budget, to see the plan that it would have."""
        copied = copy.copy(self)
        copied.budget = budget
        copied._bound = None
        return copied

    def tried_line(self) -> BudgetLine:
        """The line. The store remembers no budget that does not watch it."""
        asked = self._asked()  # it may count the owners, for the terms
        return self.budget.line(*asked, name=self.line_name, vet=self.vet, **self._terms())

    def _key(self) -> tuple[object, ...]:
        selector = self.selector
        settings = selector.rate, selector.rate_is_explicit, selector.owners
        return self.budget, selector.store, self.line_name, settings, self.options

    def declare(self) -> None:
        """Describe the budget's line, charging and freezing nothing."""
        self.budget.declare(self.line_name, *self._asked(), vet=self.vet, **self._terms())

    def _use_budget(self, stacklevel: int) -> None:
        """At the end of every constructor: check the budget with the selector's owners, and declare its line.

        From now on, an owner whom the store forgets loses its tickets too. The owners are
        checked before the budget is frozen. From then on the only number of owners that
        counts is the plan's, whatever the store holds by now. ``stacklevel``: of the user's
        line, for a warning.
        """
        self.budget.watch(self.store)
        if self.budget.is_frozen:
            owners = self.budget.public_owners
        else:
            self.selector.check_owners()
            owners = self.store.owner_count
        if owners is not None:
            warn_of_delta(self.budget, owners, stacklevel + 1)
        if self.line_name is not None:
            self.declare()

    def ask_model(self, values: Any = None) -> Flow[type[BaseException] | None]:
        """Ask its model a public question: a request, or a text of ours.

        Returns the class of its error; None if it answered, or if there is no model.
        """
        yield from ()
        return None

    def looked_for(self, request: Request, text: str | None) -> Flow[Sought]:
        """The search of the selector: exemplars near to a text (None: near to nothing) that pass the filter."""
        vector = None
        if text is not None:
            vector = yield Either(
                partial(self.store.embed_query, text),
                partial(self.store.aembed_query, text),
            )
        return self.selector.seek(vector, request.wanted)

    def _told(self, answer: Any, receipt: Any) -> Any:
        """The answer to a caller, with its receipt if callers get one."""
        return {"answer": answer, "receipt": receipt} if self.return_receipt else answer

    def get_graph(self, config: RunnableConfig | None = None) -> Graph:
        """LangChain's, with what the release is charged to: pictures show it at the release's node."""
        graph = super().get_graph(config)
        told = {
            "budget": self.budget.name,
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "calls": self.selector.members,
        }
        for key, node in graph.nodes.items():
            if node.data is self:
                graph.nodes[key] = node._replace(metadata=told)
        return graph

    def with_receipt(self) -> AnyRelease[AnswerWithReceipt[T]]:
        """The same release, on the same budget, that answers ``{"answer": ..., "receipt": ...}``."""
        copied = copy.copy(self)
        copied.return_receipt = True
        return cast("AnyRelease[AnswerWithReceipt[T]]", copied)

    def as_tool(  # type: ignore[override]
        self, name: str, description: str, *, inputs: Mapping[str, str] | None = None
    ) -> BaseTool:
        """This release as an agent's tool: `langchain_dpicl.as_tool`."""
        return as_tool(self, name, description, inputs=inputs)


def warn_of_delta(budget: PrivacyBudget, owners: int, stacklevel: int) -> None:
    """Warn if delta is not below one over the number of owners. ``stacklevel``: of the user's line."""
    if budget.delta >= 1 / owners:
        warnings.warn(
            f"delta={budget.delta:g} is not below 1/owners={1 / owners:g}: "
            "such a delta would allow one owner's records to be published outright",
            PrivacyWarning,
            stacklevel=stacklevel,
        )


def releases_in(chain: Runnable[Any, Any]) -> list[AnyRelease]:
    """Every release that a chain can make."""
    return [part for part in reachable(chain) if is_one(part, AnyRelease)]


def check_budget(budget: PrivacyBudget, return_receipt: bool = True) -> None:
    """Raise `InvalidParameter` if a release cannot use this budget."""
    if not isinstance(budget, PrivacyBudget):
        raise InvalidParameter("budget", type(budget).__name__, "a PrivacyBudget")
    if budget.on_exhausted == "zero_shot" and not return_receipt:
        raise InvalidParameter(
            "return_receipt",
            return_receipt,
            'True with on_exhausted="zero_shot": the receipt marks such answers',
        )


def released_text(answer: Any) -> str:
    """A release as a text: a model as JSON, a list as "word, word", scores as "label: count, label: count"."""
    if isinstance(answer, BaseModel) and not isinstance(answer, BaseMessage):
        return answer.model_dump_json()
    if isinstance(answer, (list, tuple)):
        return ", ".join(map(str, answer))
    if is_dataclass(answer) and not isinstance(answer, type):
        public = [field.name for field in fields(answer) if not field.name.startswith("_")]
        answer = {name: getattr(answer, name) for name in public}
    if isinstance(answer, Mapping):
        return ", ".join(f"{label}: {value}" for label, value in answer.items())
    text = text_of(answer)
    return str(answer) if text is None else text


def with_its_receipt(answer: Any) -> tuple[Any, Receipt | None]:
    """An answer, and its receipt if it came with one, as of `AnswerWithReceipt`."""
    if isinstance(answer, Mapping) and set(answer) == {"answer", "receipt"}:
        return answer["answer"], answer["receipt"]
    return answer, None


def as_tool(
    release: Runnable[Any, Any], name: str, description: str, *, inputs: Mapping[str, str] | None = None
) -> BaseTool:
    """A LangChain tool that makes one release a call: for `create_agent`, or for a ``ToolNode``.

    Parameters
    ----------
    release
        A sealed release, a `DPSampler`, or a chain with one in it. It must answer a mapping.
    name, description
        The texts that the agent reads.
    inputs
        The tool's arguments, strings, with what each means: the keys of the release's
        input. Default: ``query`` alone, which is asked under the release's own key (what
        its selector is ``nearest_to``, else "input"; of a sampler its store's
        ``input_key``).

    The tool's message is the answer as text (a pydantic model as JSON); of a release by
    itself its artifact is the receipt. A spent budget (`PrivacyBudgetExceeded`) or a model
    that is down reaches the agent as a tool message with the status "error" and a text that
    it can act on, at no cost; so do members that abstain, which is a release and charged
    like one. What else goes wrong is raised.
    """
    if inputs is not None:
        return tool_asking(release, name, description, inputs, {key: key for key in inputs})
    return tool_asking(release, name, description, {"query": "the question"}, {})


def tool_asking(
    release: Runnable[Any, Any], name: str, description: str, arguments: Mapping[str, str], keys: Mapping[str, str]
) -> BaseTool:
    """`as_tool` with these arguments, each with what it means. ``keys``: of the release's input, by argument.

    What has none is asked under the release's own key.
    """
    from langchain_core.tools import StructuredTool, ToolException

    found = releases_in(release)
    if not found:
        raise InvalidParameter("release", type(release).__name__, "a release, or a chain with one in it")
    if not isinstance(name, str) or not name:
        raise InvalidParameter("name", name, "a non-empty string")
    if not isinstance(description, str) or not description:
        raise InvalidParameter("description", description, "a non-empty string, for the agent")
    for argument, meaning in arguments.items():
        named = isinstance(argument, str) and _ARGUMENT.fullmatch(argument) and argument not in _TAKEN
        if not named or not isinstance(meaning, str):
            raise InvalidParameter(
                "inputs",
                argument,
                "names of letters, digits and _ that LangChain leaves free, in words",
            )
    if not arguments:
        raise InvalidParameter("inputs", arguments, "at least one argument")
    fields: dict[str, Any] = {name: (str, Field(description=meaning)) for name, meaning in arguments.items()}
    own_key = found[0].query_key
    runnable = release.with_receipt() if isinstance(release, AnyRelease) else release

    def asked(alone: Sequence[str], values: Mapping[str, str]) -> Flow[tuple[str, Any]]:
        """LangChain gives the only argument of a tool without its name if the tool was asked so."""
        named = {**dict(zip(arguments, alone, strict=False)), **values}
        given = {keys.get(argument, own_key): value for argument, value in named.items()}
        failed = ""
        try:
            answer = yield Either(partial(runnable.invoke, given), partial(runnable.ainvoke, given))
        except tuple(SAID) as error:
            failed = said(error)
        if failed:
            raise ToolException(failed)
        answer, receipt = with_its_receipt(answer)
        return released_text(answer), receipt

    return StructuredTool.from_function(
        lambda *alone, **values: run(asked(alone, values)),
        lambda *alone, **values: arun(asked(alone, values)),
        name=name,
        description=description,
        args_schema=create_model(f"{name}_arguments", **fields),
        response_format="content_and_artifact",
        handle_tool_error=True,
    )


@dataclass(slots=True)
class Doubt:
    """The experience of one caller with the model."""

    suspected: bool = False
    answered_at: float = -math.inf

    @property
    def never_answered(self) -> bool:
        """True if no public question was answered so far."""
        return self.answered_at == -math.inf

    def is_due(self, seconds: float) -> bool:
        """True if a release or a public question failed, or none was answered for so many seconds."""
        return self.suspected or time.monotonic() - self.answered_at > seconds

    def judge(self, answered: bool) -> None:
        """A public question was answered, or not."""
        self.suspected = not answered
        if answered:
            self.answered_at = time.monotonic()


class Doubts:
    """Every caller's `Doubt`, of so many callers at most: those who asked last.

    A caller's next query asks the model a public question first because of that caller's
    own release, or of the time since that caller's own last public question. What a release
    said to one caller changes nothing that another one gets, pays or is refused. Who is
    forgotten follows from who asked and when, and never from what came of it: `asked` alone
    changes the order.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._held: OrderedDict[str, Doubt] = OrderedDict()
        self._lock = threading.Lock()

    def asked(self, caller: str) -> Doubt:
        """A caller's, at the start of each request; "" stands for all callers if they share what they see."""
        with self._lock:
            doubt = self._held.setdefault(caller, Doubt())
            self._held.move_to_end(caller)
            if len(self._held) > self._most:
                self._held.popitem(last=False)
            return doubt

    def of(self, caller: str) -> Doubt:
        """A caller's, later in the same request; a new one, which nobody else sees, if it is forgotten by then."""
        return self._held.get(caller) or Doubt()
