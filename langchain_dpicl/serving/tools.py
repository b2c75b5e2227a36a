"""A server's releases as tools of the Model Context Protocol, and their budgets and receipts as its resources.

A call takes the way of a request to `service`: a caller by its key, a checked input, a slot, one charge, and the same
words if it is refused. No state is kept between two requests, so that nothing of a client's reaches another one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from langchain_core.runnables import Runnable
from langchain_core.runnables.base import RunnableBinding
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import McpError
from pydantic import AnyUrl, TypeAdapter, ValidationError
from pydantic_core import to_json
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from langchain_dpicl import __version__
from langchain_dpicl.release.base import AnswerWithReceipt, AnyRelease, releases_in
from langchain_dpicl.release.transaction import acting_for
from langchain_dpicl.serving.config import Configuration, ServedRelease
from langchain_dpicl.serving.described import described, json_schema, word_of
from langchain_dpicl.serving.guards import Failure, Limits, Slots, failure_of, read_json
from langchain_dpicl.serving.routes import PrincipalFrom, guarded, heads_in
from langchain_dpicl.serving.service import as_json, plain
from langchain_dpicl.serving.state import budget_state, release_history
from langchain_dpicl.spec.conflicts import line_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

T = TypeVar("T")

_SPENDING = (
    "Noise may change an answer. A new question spends a part of a privacy budget; once it is spent, none follows."
)
_REPEATED = " An equal question gets its earlier answer again, at no cost."
_FREE = "Answers follow from what was released once, with privacy: none costs anything."
_MIME = "application/json"
_ABSENT = -32002
"""The protocol's code of a resource that does not exist."""


class Answered(TypedDict, Generic[T]):
    """The answer of a chain that gives no receipt."""

    answer: T


class ReleaseTool:
    """A path of a server as a tool."""

    def __init__(self, served: ServedRelease, chain: Runnable[Any, Any], longest: int) -> None:
        self._longest = longest
        self.name = word_of(served.path)
        self.releases = releases_in(chain)
        self.heads = heads_in(chain)
        self._served = served
        self._chain = chain
        self._question: TypeAdapter[Any] = TypeAdapter(described(chain.get_input_schema, served.path, "Question"))
        self._receipt = self.heads[0].receipt if self.heads and not self.releases else None
        self._input = self._input_schema()
        inner = chain
        while isinstance(inner, RunnableBinding):
            inner = inner.bound
        self._is_whole = isinstance(inner, AnyRelease) and inner.return_receipt

    def opens_to(self, caller: str) -> bool:
        """Return True if this caller may ask."""
        return self._served.callers is None or caller in self._served.callers

    def listed(self) -> types.Tool:
        """Return its description for clients."""
        replays = all(release.budget.replay for release in self.releases)
        title = self._served.title or line_of(self._served.path)
        costs = _FREE
        if self.releases:
            costs = _SPENDING + (_REPEATED if replays else "")
        hints = types.ToolAnnotations(
            readOnlyHint=not self.releases, destructiveHint=False, idempotentHint=replays, openWorldHint=False
        )
        return types.Tool(
            name=self.name,
            title=title,
            description=f"{self._served.description or title}\n{costs}",
            inputSchema=self._input,
            outputSchema=TypeAdapter(self._output_type()).json_schema(mode="serialization"),
            annotations=hints,
        )

    def _input_schema(self) -> dict[str, Any]:
        """Return the chain's schema if it names an object's keys; otherwise that of a question under the page's key."""
        found = json_schema(self._chain.get_input_schema, "validation")
        if found.get("type") != "object" or not found.get("properties"):
            key = self._served.question_key(self._chain)
            found = {"type": "object", "properties": {key: {}}, "required": [key]}
        if self._served.chain is None:  # what a file describes asks with texts
            properties = {name: about or {"type": "string"} for name, about in found.get("properties", {}).items()}
            found = {**found, "properties": properties}
        return found

    def _output_type(self) -> Any:
        answer: Any = described(self._chain.get_output_schema, self._served.path, "Answer")
        if self._is_whole:
            return AnswerWithReceipt[str] if self.releases[0].comes_in_pieces else answer
        return Answered[answer] if self._receipt is None else AnswerWithReceipt[answer]

    def question(self, arguments: dict[str, Any]) -> Any:
        """Return the chain's input. Raises `Failure` or ``RequestValidationError``: nothing was charged."""
        from fastapi.exceptions import RequestValidationError

        content = to_json(arguments, inf_nan_mode="constants")  # which `read_json` refuses
        if len(content) > self._longest:
            raise Failure(413, "TooLarge", f"the input is longer than {self._longest} bytes")
        for key in self._input.get("required", ()):
            if key not in arguments:
                raise Failure(422, "InvalidInput", f"{key}: Field required")
        try:
            return plain(self._question.validate_python(read_json(content)))
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None

    async def answer(self, question: Any) -> dict[str, Any]:
        """Return the answer with its receipt; a chain of the deployer's own has none."""
        found = await self._chain.ainvoke(question, {"run_name": self._served.path})
        if not self._is_whole:
            found = {"answer": found}
            if self._receipt is not None:
                found["receipt"] = self._receipt
        whole: dict[str, Any] = json.loads(as_json(found))
        return whole

    def resources(self) -> dict[str, Callable[[str], Any]]:
        """Return a reader, for a caller, of each of its resources by the address."""
        found: dict[str, Callable[[str], Any]] = {}
        if self.releases:
            found[f"dpicl://budget/{self.name}"] = partial(budget_state, self.releases)
            found[f"dpicl://receipts/{self.name}"] = partial(release_history, self.releases)
        if self.heads:
            found[f"dpicl://heads/{self.name}"] = lambda _: [
                {"labels": list(head.labels), "receipt": head.receipt} for head in self.heads
            ]
        return found


def tools_of(settings: Configuration, chains: dict[str, Runnable[Any, Any]]) -> list[ReleaseTool]:
    """Return a tool for each path of a server's file."""
    longest = settings.server.max_body_bytes
    return [ReleaseTool(each, chains[each.path], longest) for each in settings.served]


def tool_server(tools: Sequence[ReleaseTool], slots: Slots, caller: str | None = None) -> Server[Any, Any]:
    """Return a server of the protocol.

    ``caller``: the principal of a connection without HTTP. Over HTTP it is the one that `guarded` has found.
    """
    server: Server[Any, Any] = Server("dpicl", __version__)

    def acting() -> tuple[str, Any]:
        """Return the caller, and the state of its request, from which the log and the metrics learn."""
        request = server.request_context.request
        state = State() if request is None else request.state
        return caller or state.dpicl_principal, state

    def opened(who: str) -> dict[str, ReleaseTool]:
        return {tool.name: tool for tool in tools if tool.opens_to(who)}

    def told(error: Exception, state: Any) -> str:
        failure = failure_of(error, "mcp")
        state.dpicl_error = failure.error
        return f"{failure.error}: {failure.message}"

    async def list_tools(_: types.ListToolsRequest) -> types.ServerResult:
        found = [tool.listed() for tool in opened(acting()[0]).values()]
        return types.ServerResult(types.ListToolsResult(tools=found))

    async def call_tool(asked: types.CallToolRequest) -> types.ServerResult:
        who, state = acting()
        try:
            tool, arguments = opened(who).get(asked.params.name), asked.params.arguments or {}
            state.dpicl_asked = {"input": arguments}
            if tool is None:
                raise HTTPException(404, "this caller has no such tool")
            question = tool.question(arguments)
            with acting_for(who):
                answer = await slots.run(partial(tool.answer, question), 1)
        except Exception as error:
            text = types.TextContent(type="text", text=told(error, state))
            return types.ServerResult(types.CallToolResult(content=[text], isError=True))
        text = types.TextContent(type="text", text=json.dumps(answer, ensure_ascii=False))
        return types.ServerResult(types.CallToolResult(content=[text], structuredContent=answer))

    async def list_resources(_: types.ListResourcesRequest) -> types.ServerResult:
        found = [
            types.Resource(uri=AnyUrl(address), name=address.removeprefix("dpicl://"), mimeType=_MIME)
            for tool in opened(acting()[0]).values()
            for address in tool.resources()
        ]
        return types.ServerResult(types.ListResourcesResult(resources=found))

    async def read_resource(asked: types.ReadResourceRequest) -> types.ServerResult:
        who, state = acting()
        readers = {address: read for tool in opened(who).values() for address, read in tool.resources().items()}
        if (read := readers.get(str(asked.params.uri))) is None:
            raise McpError(types.ErrorData(code=_ABSENT, message="this caller has no such resource"))
        try:
            text = as_json(await asyncio.to_thread(read, who)).decode()
        except Exception as error:
            fault = types.ErrorData(code=types.INTERNAL_ERROR, message=told(error, state))
        else:
            content = types.TextResourceContents(uri=asked.params.uri, mimeType=_MIME, text=text)
            return types.ServerResult(types.ReadResourceResult(contents=[content]))
        raise McpError(fault)

    # Its decorators would show a client the text of every error.
    server.request_handlers[types.ListToolsRequest] = list_tools
    server.request_handlers[types.CallToolRequest] = call_tool
    server.request_handlers[types.ListResourcesRequest] = list_resources
    server.request_handlers[types.ReadResourceRequest] = read_resource
    return server


def over_http(
    server: Server[Any, Any],
    principal_from: PrincipalFrom,
    limits: Limits,
    hosts: Sequence[str],
    origins: Sequence[str],
) -> tuple[StreamableHTTPSessionManager, Callable[[Request], Awaitable[Any]]]:
    """Return what has to run while a server is asked by streamable HTTP, and the handler of its requests.

    ``hosts``: the names of this server in a request's Host header; another one is a web page that reaches through a
    browser. ``origins``: those of web pages elsewhere that may ask.
    """
    allowed = [f"{host}{port}" for host in hosts for port in ("", ":*")]
    manager = StreamableHTTPSessionManager(
        server,
        json_response=True,
        stateless=True,
        security_settings=TransportSecuritySettings(allowed_hosts=allowed, allowed_origins=[*origins]),
        max_request_body_size=limits.max_body_bytes,
    )

    async def serve(request: Request) -> ASGIApp:
        body = await request.body()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            parts: list[Message] = [{"type": "http.request", "body": body}]  # `guarded` has read it

            async def replay() -> Message:
                return parts.pop() if parts else await receive()

            await manager.handle_request(scope, replay, send)

        return answer

    return manager, guarded(serve, principal_from, limits)
