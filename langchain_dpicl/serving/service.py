"""One chain as a service: its endpoints in LangServe's wire format.

Its own code: LangServe is archived. ``RemoteRunnable``, its client, reads these answers.
"""

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING, Annotated, Any, cast

from langchain_core.load.serializable import Serializable
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import BaseModel, Field, RootModel, create_model
from pydantic_core import to_json, to_jsonable_python
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from langchain_dpicl.once.head import PrivateHead
from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.serving.described import Untitled, described, json_schema, module_of, name_of, operation_id
from langchain_dpicl.serving.guards import ErrorAnswer, Failure, Slots, failure_of
from langchain_dpicl.serving.state import MOST, BudgetState, History, ReleasedHead, budget_state, release_history

if TYPE_CHECKING:
    from fastapi import APIRouter
    from fastapi.routing import APIRoute

_STATUSES = {
    401: "The request has no authenticated caller.",
    403: "This caller may not ask here.",
    408: "The body did not arrive in time. Nothing was charged.",
    413: "The body is too long. Nothing was charged.",
    422: "The input is not valid. Nothing was charged.",
    429: "The budget is spent, or this caller's part of it. A request without an answer was not charged.",
    500: "The server failed; a charge that was made stands.",
    503: "The model, the store or the ledger is down, or too many releases are under way.",
}
_READING = (401, 403, 422, 500, 503)
_EVENT = {"event": {"enum": ["metadata", "data", "end", "error"]}, "data": {"type": "string"}}
_EVENTS = {"text/event-stream": {"schema": {"type": "object", "properties": _EVENT, "required": ["event"]}}}
_ERROR = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorAnswer.__name__}"}}}
_MAPPING = {"application/json": {"schema": {"type": "object"}}}


class RunMetadata(BaseModel):
    """A run that has made one answer. Nobody takes feedback on it."""

    run_id: uuid.UUID
    feedback_tokens: list[str] = Field(default_factory=list, max_length=0)


class BatchMetadata(BaseModel):
    """The runs of a batch, in the order of its inputs."""

    run_ids: list[uuid.UUID]
    responses: list[RunMetadata]


def add_endpoints(
    router: "APIRouter",
    route_class: "type[APIRoute]",
    runnable: Runnable[Any, Any],
    releases: list[AnyRelease],
    released: list[PrivateHead],
    path: str,
    max_batch: int,
    slots: Slots,
) -> None:
    """Add the endpoints of a chain and of the releases and heads in it, described for the OpenAPI document.

    Each is a route of the router's own, which an application around may wrap. Every run that has begun ends, with or
    without a client. Only a stream whose releases all come in pieces ends at its next piece after its client has left.
    """
    from fastapi import Query

    def made(part: str, **fields: Any) -> Any:
        return create_model(f"{name_of(path)}{part}", __base__=Untitled, __module__=module_of(path), **fields)

    may_end_early = all(release.comes_in_pieces for release in releases)
    Input: Any = described(runnable.get_input_schema, path, "Question")
    Output: Any = described(runnable.get_output_schema, path, "Answer")
    One: Any = made("Request", input=(Input, ...))
    Many: Any = made("BatchRequest", inputs=(list[Input], Field(max_length=max_batch)))
    Answer = made("Response", output=(Output, ...), metadata=(RunMetadata, ...))
    Answers = made("BatchResponse", output=(list[Output], ...), metadata=(BatchMetadata, ...))
    input_described = json_schema(runnable.get_input_schema, "validation")
    output_described = json_schema(runnable.get_output_schema, "serialization")

    def config(run_id: uuid.UUID) -> RunnableConfig:
        return {"run_id": run_id, "run_name": path}

    def answer(content: Any) -> Response:
        return Response(as_json(content), media_type="application/json")

    async def invoke(body: One) -> Response:
        run_id = uuid.uuid4()
        output = await slots.run(lambda: runnable.ainvoke(plain(body.input), config(run_id)), 1)
        return answer({"output": output, "metadata": RunMetadata(run_id=run_id)})

    async def batch(body: Many) -> Response:
        run_ids = [uuid.uuid4() for _ in body.inputs]
        inputs, configs = [*map(plain, body.inputs)], [*map(config, run_ids)]
        outputs = await slots.run(lambda: runnable.abatch(inputs, configs), len(inputs))
        responses = [RunMetadata(run_id=run_id) for run_id in run_ids]
        return answer({"output": outputs, "metadata": BatchMetadata(run_ids=run_ids, responses=responses)})

    async def stream(body: One, request: Request) -> Response:
        # The first chunk, or a failure before it, decides the status.
        events: asyncio.Queue[bytes | Failure | None] = asyncio.Queue()
        left = asyncio.Event()

        async def release() -> None:
            """Put the chain's chunks into ``events``, then None or a failure."""
            run_id = uuid.uuid4()
            head = _event("metadata", as_json({"run_id": run_id}))
            found = cast("AsyncGenerator[Any, None]", runnable.astream(plain(body.input), config(run_id)))
            try:
                async with contextlib.aclosing(found) as chunks:
                    async for chunk in chunks:
                        events.put_nowait(head + _event("data", as_json(chunk)))
                        head = b""
                        if may_end_early and left.is_set():
                            break
            except BaseException as error:
                events.put_nowait(failure_of(error, f"{path}/stream"))
                if not isinstance(error, Exception):
                    raise
            else:
                events.put_nowait(None)

        async def sent(event: bytes | Failure | None) -> AsyncIterator[bytes]:
            while isinstance(event, bytes):
                yield event
                event = await events.get()
            if event is None:
                yield _event("end")
            else:
                request.state.dpicl_error = event.error
                yield _event("error", as_json({"status_code": event.status, "message": event.message}))

        await slots.start(release, 1)
        first = await events.get()
        if isinstance(first, Failure):
            raise first
        return EventStream(sent(first), left.set)

    async def input_schema() -> Response:
        return JSONResponse(input_described)

    async def output_schema() -> Response:
        return JSONResponse(output_described)

    async def budget(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(budget_state, releases, request.state.dpicl_principal))

    async def history(request: Request, last: Annotated[int, Query(ge=1, le=MOST)] = 20) -> Response:
        who = request.state.dpicl_principal
        return JSONResponse(await asyncio.to_thread(release_history, releases, who, last))

    async def heads() -> Response:
        return JSONResponse([ReleasedHead(labels=list(head.labels), receipt=head.receipt) for head in released])

    def add(endpoint: Callable[..., Any], summary: str, answer: dict[str, Any], kind: Any = JSONResponse) -> None:
        # FastAPI would give a model the answer's own media type, and errors are never events.
        fault: dict[str, Any] = {"model": ErrorAnswer} if kind is JSONResponse else {"content": _ERROR}
        runs = endpoint in (invoke, batch, stream)
        responses: dict[int | str, Any] = {200: {"description": summary, **answer}}
        for status in _STATUSES if runs else _READING:
            if status == 429 and not releases:
                continue
            responses[status] = {**fault, "description": _STATUSES[status]}
        router.add_api_route(
            f"{path}/{endpoint.__name__}",
            endpoint,
            methods=["POST" if runs else "GET"],
            tags=[path],
            summary=summary,
            response_class=kind,
            status_code=200,
            responses=responses,
            route_class_override=route_class,
            generate_unique_id_function=operation_id,
        )

    add(invoke, "One answer", {"model": Answer})
    add(batch, "An answer to each input", {"model": Answers})
    add(stream, "One answer as server-sent events: metadata, data, end", {"content": _EVENTS}, EventStream)
    add(input_schema, "JSON schema of the input", {"content": _MAPPING})
    add(output_schema, "JSON schema of the output", {"content": _MAPPING})
    if releases:
        add(budget, "The budget: promised, spent and left", {"model": BudgetState})
        add(history, "The latest releases", {"model": History})
    if released:
        add(heads, "The heads, which were released once and answer at no cost", {"model": list[ReleasedHead]})


class EventStream(StreamingResponse):
    """Server-sent events. All are taken even if the client left, so that a server that shuts down waits for the last.

    ``left`` is called when the client hangs up; it may be called after the last event too.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], left: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self.left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left()

        watching = asyncio.create_task(watch())
        try:
            await self.stream_response(send)
        except OSError:  # some servers report a hang-up in this way
            self.left()
            async for _ in self.body_iterator:
                pass
        finally:
            watching.cancel()


def as_json(content: Any) -> bytes:
    """JSON of an answer and the models in it, by their fields' names. NaN and infinite numbers are null."""
    return to_json(_shown(content), inf_nan_mode="null", by_alias=False)


def _shown(value: Any) -> Any:
    """Return an answer whose dataclasses are mappings without their private fields (``_name``), as LangServe's are.

    A pydantic model decides itself what it shows.
    """
    if isinstance(value, dict):
        return {key: _shown(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(_shown, value)]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    private = {field.name for field in dataclasses.fields(value) if field.name.startswith("_")}
    if hasattr(value, "__pydantic_serializer__"):
        return to_jsonable_python(value, exclude=private, inf_nan_mode="null", by_alias=False)
    names = [field.name for field in dataclasses.fields(value) if field.name not in private]
    return {name: _shown(getattr(value, name)) for name in names}


def _event(name: str, data: bytes | None = None) -> bytes:
    """Return one event, as LangServe writes it."""
    fields = [b"event: " + name.encode()] + ([] if data is None else [b"data: " + data])
    return b"\r\n".join([*fields, b"", b""])


def plain(value: Any) -> Any:
    """Return the content of a validated model for the chain: mappings for models, messages as they are."""
    if isinstance(value, RootModel):
        return plain(value.root)
    if isinstance(value, BaseModel) and not isinstance(value, Serializable):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    return [*map(plain, value)] if isinstance(value, list) else value
