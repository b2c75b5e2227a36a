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
from langchain_dpicl.release.base import releases_in, tool_asking
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
    """Middleware that brings releases in the place of private tools, which the agent never has.

    ``create_agent(model, middleware=[DPToolMiddleware({"search": release}, like=[search])])``: the model sees a tool
    with the private one's name, description and arguments, all of which are texts and needed. Its answer is the
    release's, with its receipt as the message's artifact. A spent budget is a tool message with the status "error", at
    no cost, and the agent goes on.

    Parameters
    ----------
    releases
        By the private tool's name: a release, or a chain with one in it. It is asked with the call's only argument, or
        with all of them by their names.
    like
        The private tools, which are looked at and not kept. Give them to the agent no more.
    principal_from
        As for `DPRetrievalMiddleware`. The caller of all tools of the agent.

    Raises `InvalidParameter` for a name without a tool, a tool without a release, or one without arguments; and
    `UnsafeConfigurationError`, before the model or a tool is called, if the agent has another tool of such a name.
    """

    def __init__(
        self,
        releases: Mapping[str, Runnable[Any, Any]],
        like: Sequence[BaseTool],
        *,
        principal_from: OfContext | None = None,
    ) -> None:
        super().__init__(principal_from)
        if not isinstance(releases, Mapping) or not releases:
            raise InvalidParameter("releases", type(releases).__name__, "a mapping from tools' names to releases")
        if not isinstance(like, Sequence) or not all(isinstance(tool, BaseTool) for tool in like):
            raise InvalidParameter("like", type(like).__name__, "a list of LangChain tools")
        names = [tool.name for tool in like]
        if sorted(names) != sorted(releases):
            raise InvalidParameter("like", sorted(names), f"one tool of each name: {', '.join(sorted(releases))}")
        self._instead = {tool.name: _stand_in(tool, releases[tool.name]) for tool in like}
        self.tools = list(self._instead.values())

    def _check(self, tool: object) -> None:
        """Raise `UnsafeConfigurationError` for a tool of the agent's that has a stand-in's name."""
        name = getattr(tool, "name", None)
        if name in self._instead and tool is not self._instead[name]:
            raise UnsafeConfigurationError(
                f"the agent has a tool {name!r} of its own, whose calls are to be answered by a release: give it to "
                "DPToolMiddleware(..., like=[...]) alone"
            )

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Call the model, if no private tool is at hand."""
        for tool in request.tools:
            self._check(tool)
        return handler(request)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """The same, asynchronously."""
        for tool in request.tools:
            self._check(tool)
        return await handler(request)

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """A tool's call, for the run's caller."""
        self._check(request.tool)
        with self._acting(request.runtime):
            return handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """The same, asynchronously."""
        self._check(request.tool)
        with self._acting(request.runtime):
            return await handler(request)


def _stand_in(tool: BaseTool, release: Runnable[Any, Any]) -> BaseTool:
    """A tool that looks like a private one, and is a release."""
    arguments = {name: str(about.get("description") or name) for name, about in tool.args.items()}
    if not arguments:
        raise InvalidParameter("like", tool.name, "a tool with arguments, which the release is asked with")
    keys = {} if len(arguments) == 1 else {name: name for name in arguments}
    return tool_asking(release, tool.name, tool.description, arguments, keys)
