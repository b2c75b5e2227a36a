"""One chain as a service: its schemas, and its runs in LangServe's wire format.

The handlers are our own, on LangServe's response models and serializer. Its ``APIHandler`` takes the client's config,
drops the server's from a batch, answers every fault of a stream with the status 200 and an event, and builds the
input's schema anew for each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, cast

from langchain_core.load.serializable import Serializable
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import BaseModel, ConfigDict, Field, RootModel, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from langchain_dpicl.release.base import AnyRelease
from langchain_dpicl.serving.failures import Failure, failure_of
from langchain_dpicl.serving.limits import Limits, Slots

Events = asyncio.Queue[bytes | Failure | None]


class Service:
    """A chain, the releases in it, and its runs for HTTP.

    Every run that has begun ends, with or without a client. Only a stream whose releases all come in pieces ends at its
    next piece after its client has left.
    """

    def __init__(self, runnable: Runnable[Any, Any], releases: list[AnyRelease], path: str, limits: Limits) -> None:
        from langserve.serialization import WellKnownLCSerializer
        from langserve.validation import create_batch_response_model, create_invoke_response_model

        self.runnable = runnable
        self.path = path
        self._may_end_early = all(release.comes_in_pieces for release in releases)
        self._slots = Slots(limits.max_concurrency)
        self._dumps = cast("Callable[[Any], bytes]", WellKnownLCSerializer().dumps)
        space = "_".join(re.findall(r"\w+", path))
        self.input_model = _described(runnable.get_input_schema, f"{space}_Input")
        root = self.input_model.model_fields.get("root")
        if root is not None and root.annotation == dict[str, Any]:
            # A sealed release without an input type takes every mapping but one that fills in the examples itself.
            shape: Any = {"propertyNames": {"not": {"const": "examples"}}}
            body = {"model_config": ConfigDict(json_schema_extra=shape), "__module__": __name__}
            self.input_model = cast("Any", type(f"{space}_Input", (RootModel[dict[str, Any]],), body))
        self.output_model = _described(runnable.get_output_schema, f"{space}_Output")
        inputs: Any = (list[self.input_model], Field(max_length=limits.max_batch))  # type: ignore[name-defined]
        self.one = create_model(f"{space}_Request", input=(self.input_model, ...))
        self.many = create_model(f"{space}_BatchRequest", inputs=inputs)
        self.answer: Any = create_invoke_response_model(space, self.output_model, False)
        self.answers: Any = create_batch_response_model(space, self.output_model, False)

    async def invoke(self, value: BaseModel) -> Response:
        """Make one release."""
        run_id = uuid.uuid4()
        output = await self._slots.run(lambda: self.runnable.ainvoke(_plain(value), self._config(run_id)), 1)
        return self._json({"output": output, "metadata": {"run_id": run_id, "feedback_tokens": []}})

    async def batch(self, values: list[BaseModel]) -> Response:
        """Make a release for each value."""
        run_ids = [uuid.uuid4() for _ in values]
        inputs, configs = [*map(_plain, values)], [*map(self._config, run_ids)]
        outputs = await self._slots.run(lambda: self.runnable.abatch(inputs, configs), len(values))
        responses = [{"run_id": run_id, "feedback_tokens": []} for run_id in run_ids]
        return self._json({"output": outputs, "metadata": {"run_ids": run_ids, "responses": responses}})

    async def stream(self, value: BaseModel) -> Response:
        """Make one release as events. Its first chunk, or a failure before it, decides the status."""
        events: Events = asyncio.Queue()
        left = asyncio.Event()
        await self._slots.start(lambda: self._run(_plain(value), events, left), 1)
        first = await events.get()
        if isinstance(first, Failure):
            raise first
        return EventStream(self._sent(first, events), left.set)

    async def _run(self, value: Any, events: Events, left: asyncio.Event) -> None:
        """Put the chain's chunks into ``events``, then None or a failure."""
        run_id = uuid.uuid4()
        head = _event("metadata", self._dumps({"run_id": run_id}))
        stream = cast("AsyncGenerator[Any, None]", self.runnable.astream(value, self._config(run_id)))
        try:
            async with contextlib.aclosing(stream) as chunks:
                async for chunk in chunks:
                    events.put_nowait(head + _event("data", self._dumps(chunk)))
                    head = b""
                    if self._may_end_early and left.is_set():
                        break
        except BaseException as error:
            events.put_nowait(failure_of(error, f"{self.path}/stream"))
            if not isinstance(error, Exception):
                raise
        else:
            events.put_nowait(None)

    async def _sent(self, sent: bytes | Failure | None, events: Events) -> AsyncIterator[bytes]:
        while isinstance(sent, bytes):
            yield sent
            sent = await events.get()
        if sent is None:
            yield _event("end")
        else:
            yield _event("error", self._dumps({"status_code": sent.status, "message": sent.message}))

    def _config(self, run_id: uuid.UUID) -> RunnableConfig:
        return {"run_id": run_id, "run_name": self.path}

    def _json(self, content: Any) -> Response:
        return Response(self._dumps(content), media_type="application/json")


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


def _event(name: str, data: bytes | None = None) -> bytes:
    """Return one event, as LangServe writes it."""
    fields = [b"event: " + name.encode()] + ([] if data is None else [b"data: " + data])
    return b"\r\n".join([*fields, b"", b""])


def _plain(value: Any) -> Any:
    """Return the content of a validated model for the chain: mappings for models, messages as they are."""
    if isinstance(value, RootModel):
        return _plain(value.root)
    if isinstance(value, BaseModel) and not isinstance(value, Serializable):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    return value


def _described(schema: Callable[[], Any], name: str) -> type[BaseModel]:
    """Return a model that the OpenAPI document can describe; one of anything if the type has no JSON schema."""
    try:
        model: type[BaseModel] = schema()
        model.model_json_schema()
    except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError):
        return create_model(name, __base__=RootModel[Any])
    return model
