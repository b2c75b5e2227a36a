"""Middleware of `create_agent` that puts releases where the agent would read private records.

What they write into the agent's state, and so into checkpoints, traces and streams, was released. A run that goes on
after an interrupt, a failure or from an earlier checkpoint repeats the steps from there. A release among them is asked
again, and the budget's replay answers it without a charge.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NotRequired

from langchain.agents.middleware.types import (
    AgentMiddleware,
    AgentState,
    ModelRequest,
    ModelResponse,
    ToolCallRequest,
)
from langchain_core.documents import Document
from langchain_core.messages import SystemMessage, ToolMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.vectorstores import VectorStore
from langgraph.types import Command

from langchain_dpicl.errors import InvalidParameter, UnsafeConfigurationError
from langchain_dpicl.release.base import as_tool, releases_in
from langchain_dpicl.release.transaction import acting_for
from langchain_dpicl.retrieval.forms import MESSAGES, read_messages
from langchain_dpicl.retrieval.retrievers import DPRetriever
from langchain_dpicl.store.standin import MemberVectorStore

OfContext = Callable[[Any], str | None]
"""From the ``context`` of an agent's run to the authenticated caller."""

PREAMBLE = "What is known of this question, from a private collection, released with noise:"


class ReleasedState(AgentState[Any]):
    """An agent's state with the documents that were released for its latest question."""

    released: NotRequired[list[Document]]


class _ForCaller(AgentMiddleware[Any, Any, Any]):
    """Middleware whose releases are charged to the caller in the run's context."""

    def __init__(self, principal_from: OfContext | None) -> None:
        super().__init__()
        if principal_from is not None and not callable(principal_from):
            raise InvalidParameter("principal_from", type(principal_from).__name__, "a function of the run's context")
        self.principal_from = principal_from

    def _acting(self, runtime: Any) -> AbstractContextManager[None]:
        """Within it the run's caller pays. Raises `InvalidParameter` if the context names none."""
        if self.principal_from is None:
            return nullcontext()
        return acting_for(self.principal_from(runtime.context))  # type: ignore[arg-type]


class DPRetrievalMiddleware(_ForCaller):
    """Middleware that shows an agent's model what is released for the last question of a person.

    ``create_agent(model, tools, middleware=[DPRetrievalMiddleware(release)])``: before the agent's first step the
    question is one release, and each call of the model finds the released documents after its system prompt. They are
    in the state's ``released``, each with its receipt in ``metadata["receipt"]``.

    Parameters
    ----------
    source
        A release, or a chain with one in it, which a `DPRetriever` asks; a retriever, such as a `DPRetriever`, that of
        a released table or of a vector store of released answers; or such a vector store. Of those only what was
        released may be in it: nothing here makes it private.
    principal_from
        From the run's ``context`` to the authenticated caller, for budgets with ``scope="per_principal"``, quotas and
        ``visible_to``. The context must come from authentication, never from the model or the message.
    preamble
        The line above the documents.

    If the budget is spent, the model is down or the members abstain, the model reads a line that says so, and the agent
    goes on. Raises `InvalidParameter` for another source.
    """

    state_schema = ReleasedState

    def __init__(
        self,
        source: Runnable[Any, Any] | BaseRetriever | VectorStore,
        *,
        principal_from: OfContext | None = None,
        preamble: str = PREAMBLE,
    ) -> None:
        super().__init__(principal_from)
        if isinstance(source, VectorStore) and not isinstance(source, MemberVectorStore):
            source = source.as_retriever()
        if not isinstance(source, BaseRetriever):
            if not isinstance(source, Runnable) or not releases_in(source):
                bound = "a release, a chain with one in it, or a retriever or vector store of what was released"
                raise InvalidParameter("source", type(source).__name__, bound)
            source = DPRetriever(source, on_exhausted="message")
        if not isinstance(preamble, str):
            raise InvalidParameter("preamble", type(preamble).__name__, "a text")
        self.retriever: BaseRetriever = source
        self.preamble = preamble

    def before_agent(self, state: Any, runtime: Any) -> dict[str, Any]:
        """The release for the last question, into the state."""
        _, question = read_messages(state[MESSAGES])
        with self._acting(runtime):
            return {"released": self.retriever.invoke(question)}

    async def abefore_agent(self, state: Any, runtime: Any) -> dict[str, Any]:
        """The same, asynchronously."""
        _, question = read_messages(state[MESSAGES])
        with self._acting(runtime):
            return {"released": await self.retriever.ainvoke(question)}

    def _told(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        """The request with the released documents after its system prompt."""
        texts = [document.page_content for document in request.state.get("released", ())]  # type: ignore[attr-defined]
        if not texts:
            return request
        before = [] if request.system_prompt is None else [request.system_prompt]
        said = "\n\n".join([*before, self.preamble, *texts])
        return request.override(system_message=SystemMessage(said))

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Call the model with the released documents."""
        return handler(self._told(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """The same, asynchronously."""
        return await handler(self._told(request))


class DPToolMiddleware(_ForCaller):
    """Middleware that answers calls of private tools with releases. The tools themselves never run.

    ``create_agent(model, [search], middleware=[DPToolMiddleware({"search": release})])``: the model sees the tool as it
    is and calls it; the answer is the release's, with its receipt as the message's artifact. A spent budget is a tool
    message with the status "error", at no cost, and the agent goes on.

    Parameters
    ----------
    releases
        By the name of a tool of the agent: a release, or a chain with one in it, which is asked with the call's only
        argument; or a tool, such as ``as_tool(release, name, description, inputs={...})`` for calls with several
        arguments, which gets the arguments in place of the private one.
    principal_from
        As for `DPRetrievalMiddleware`.

    Raises `InvalidParameter` for other values, and `UnsafeConfigurationError`, before the model is called, if the agent
    has no tool of such a name: the private tool would then run under its own.
    """

    def __init__(
        self,
        releases: Mapping[str, Runnable[Any, Any] | BaseTool],
        *,
        principal_from: OfContext | None = None,
    ) -> None:
        super().__init__(principal_from)
        if not isinstance(releases, Mapping) or not releases:
            raise InvalidParameter("releases", type(releases).__name__, "a mapping from tools' names to releases")
        self.tools_instead: dict[str, BaseTool] = {
            name: each if isinstance(each, BaseTool) else as_tool(each, name, "A release.")
            for name, each in releases.items()
        }
        self._alone = {name for name, each in releases.items() if not isinstance(each, BaseTool)}

    def _checked(self, tools: Sequence[BaseTool | dict[str, Any]]) -> None:
        """Raise `UnsafeConfigurationError` for a name that no tool has."""
        names = {tool.name for tool in tools if isinstance(tool, BaseTool)}
        if missing := sorted(self.tools_instead.keys() - names):
            raise UnsafeConfigurationError(
                f"the agent has no tool {missing[0]!r}, whose calls are to be answered by a release: it has "
                f"{', '.join(sorted(names)) or 'none'}"
            )

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Call the model, if every private tool is known by its name."""
        self._checked(request.tools)
        return handler(request)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """The same, asynchronously."""
        self._checked(request.tools)
        return await handler(request)

    def _asked(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The call as the release's own tool takes it."""
        name = call["name"]
        given = call["args"]
        if name in self._alone:
            if len(given) != 1:
                bound = f"one argument: give {name!r} an as_tool(..., inputs=...) for several"
                raise InvalidParameter("releases", f"a call with {len(given)} arguments", bound)
            (text,) = given.values()
            given = {"query": text}
        return {**call, "args": given, "type": "tool_call"}

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """The release for a call of a private tool, and the tool itself for another."""
        instead = self.tools_instead.get(request.tool_call["name"])
        if instead is None:
            return handler(request)
        with self._acting(request.runtime):
            answer: ToolMessage = instead.invoke(self._asked(request.tool_call))
            return answer

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """The same, asynchronously."""
        instead = self.tools_instead.get(request.tool_call["name"])
        if instead is None:
            return await handler(request)
        with self._acting(request.runtime):
            answer: ToolMessage = await instead.ainvoke(self._asked(request.tool_call))
            return answer
