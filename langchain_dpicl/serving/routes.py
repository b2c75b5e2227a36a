"""Routes for a release: LangServe's safe endpoints alone, and a principal for every request."""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, cast

from langchain_core.runnables import Runnable

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.release.base import AnyRelease, releases_in
from langchain_dpicl.release.transaction import acting_for
from langchain_dpicl.serving.guards import ErrorAnswer, Failure, Limits, failure_of, read_body, read_json

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI
    from starlette.requests import Request

PrincipalFrom = Callable[["Request"], "str | Awaitable[str | None] | None"]

PATH = r"(/[A-Za-z0-9_.~-]+)+"
_STATUSES = {
    401: "The request has no authenticated caller.",
    408: "The body did not arrive in time. Nothing was charged.",
    413: "The body is too long. Nothing was charged.",
    422: "The input is not valid. Nothing was charged.",
    429: "The budget is spent. A request without an answer was not charged.",
    500: "The server failed; a charge that was made stands.",
    503: "The model or the ledger is down, or too many releases are under way.",
}
_READING = (401, 422, 500, 503)
_EVENT = {"event": {"enum": ["metadata", "data", "end", "error"]}, "data": {"type": "string"}}
_EVENTS = {"text/event-stream": {"schema": {"type": "object", "properties": _EVENT, "required": ["event"]}}}
_ERROR = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorAnswer.__name__}"}}}
_MAPPING = {"application/json": {"schema": {"type": "object"}}}


def add_dp_routes(
    app: "FastAPI | APIRouter",
    runnable: Runnable[Any, Any],
    path: str,
    *,
    principal_from: PrincipalFrom,
    max_body_bytes: int = 64 * 1024,
    max_batch: int = 16,
    max_concurrency: int = 32,
    body_seconds: float = 10.0,
) -> None:
    """Serve a chain that holds a release, for LangServe's ``RemoteRunnable`` and for plain HTTP.

    Adds ``POST {path}/invoke``, ``/batch`` and ``/stream``, and ``GET {path}/input_schema``, ``/output_schema``,
    ``/budget`` and ``/history``. Nothing else of LangServe: no logs or events of a run, no playground, no config, no
    feedback.

    Parameters
    ----------
    app
        A FastAPI application, or a router (whose dependencies then run too).
    runnable
        A sealed release, a `DPSampler`, or a chain or an agent with one in it. If members need certain keys, give it
        an input type (``with_types(input_type=...)``): a request without them is then refused before any charge.
    path
        The path prefix, such as ``"/classify"``.
    principal_from
        From a request to the authenticated caller, a non-empty string; may be async. It must look at proof (a checked
        key, a session), never at a name that the client may choose. If it returns none, or raises, the answer is 401
        (or the status of the ``HTTPException`` that it raised) and nothing runs. Releases are charged to this caller
        alone.
    max_body_bytes, max_batch, max_concurrency, body_seconds
        See `Limits`.

    A client's config or keyword arguments are ignored. A charge is made when the whole request is here and valid; from
    then on the release runs to its end even if the client hangs up, and an equal question gets its answer. Only a
    sampler's stream ends at the next piece after its client left; its charge stands. A batch of n charges n, all or
    none; a sampler's batch charges each answer on its own, and answers made before the budget was spent are replayed.

    Errors are JSON objects with ``error`` and ``message``: 401, 408, 413, 422, 429 (the budget is spent), 500 and 503
    (the model is down, or too many releases are under way), never a trace. A stream that fails before its first chunk
    has these statuses too.

    Raises `InvalidParameter` for a chain without a release, and for limits that cannot work.
    """
    releases = releases_in(runnable) if isinstance(runnable, Runnable) else []
    if not releases:
        raise InvalidParameter("runnable", type(runnable).__name__, "a release, or a chain with one in it")
    if not isinstance(path, str) or not re.fullmatch(PATH, path):
        raise InvalidParameter("path", path, 'a path such as "/classify"')
    if not callable(principal_from):
        raise InvalidParameter("principal_from", type(principal_from).__name__, "a function of the request")
    limits = Limits(max_body_bytes, max_batch, max_concurrency, body_seconds)
    from fastapi import APIRouter
    from fastapi.routing import APIRoute
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response

    async def authenticated(request: Request) -> str:
        """Return the caller, or raise `Failure`: a fault in here lets no one in."""
        try:
            found = principal_from(request)
            principal = await found if inspect.isawaitable(found) else found
            if isinstance(principal, str) and principal:
                return principal
        except HTTPException as error:
            if error.status_code >= 400:
                raise
        except Exception as error:
            failure_of(error, "principal_from")  # into the log
        raise Failure(401, "Unauthorized", "this request has no authenticated caller")

    class GuardedRoute(APIRoute):
        """Authenticates, reads the body within its limits, and answers every error as JSON."""

        def get_route_handler(self) -> Callable[[Request], Any]:
            serve = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                try:
                    principal = await authenticated(request)
                    request.state.dpicl_principal = principal
                    if request.method == "POST":
                        body = await read_body(request, limits)
                        request._body, request._json = body, read_json(body) if body else None  # as `Request.json` does
                    with acting_for(principal):
                        return await serve(request)
                except Exception as error:
                    failure = failure_of(error, request.scope["path"])
                return failure.response()

            return guarded

    router = APIRouter(route_class=GuardedRoute)
    _declare(router, runnable, releases, path, limits)
    app.include_router(router)


def _declare(
    router: "APIRouter", runnable: Runnable[Any, Any], releases: list[AnyRelease], path: str, limits: Limits
) -> None:
    """Add the endpoints, with their description for the OpenAPI document."""
    from fastapi import Query
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response

    from langchain_dpicl.serving.service import (
        MOST,
        BudgetState,
        EventStream,
        History,
        Service,
        budget_state,
        release_history,
    )

    service = Service(runnable, releases, path, limits)
    One, Many = service.one, service.many
    input_described = service.input_model.model_json_schema()
    output_described = service.output_model.model_json_schema(mode="serialization")

    async def invoke(body: One) -> Response:  # type: ignore[valid-type]
        return await service.invoke(cast("Any", body).input)

    async def batch(body: Many) -> Response:  # type: ignore[valid-type]
        return await service.batch(cast("Any", body).inputs)

    async def stream(body: One) -> Response:  # type: ignore[valid-type]
        return await service.stream(cast("Any", body).input)

    async def input_schema() -> Response:
        return JSONResponse(input_described)

    async def output_schema() -> Response:
        return JSONResponse(output_described)

    async def budget(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(budget_state, releases, request.state.dpicl_principal))

    async def history(request: Request, last: Annotated[int, Query(ge=1, le=MOST)] = 20) -> Response:
        who = request.state.dpicl_principal
        return JSONResponse(await asyncio.to_thread(release_history, releases, who, last))

    def add(endpoint: Callable[..., Any], summary: str, answer: dict[str, Any], kind: Any = JSONResponse) -> None:
        # FastAPI would give a model the answer's own media type, and errors are never events.
        fault: dict[str, Any] = {"model": ErrorAnswer} if kind is JSONResponse else {"content": _ERROR}
        runs = endpoint in (invoke, batch, stream)
        responses: dict[int | str, Any] = {200: {"description": summary, **answer}}
        for status in _STATUSES if runs else _READING:
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
        )

    add(invoke, "One release", {"model": service.answer})
    add(batch, "A release for each input", {"model": service.answers})
    add(stream, "One release as server-sent events: metadata, data, end", {"content": _EVENTS}, EventStream)
    add(input_schema, "JSON schema of the input", {"content": _MAPPING})
    add(output_schema, "JSON schema of the output", {"content": _MAPPING})
    add(budget, "The budget: promised, spent and left", {"model": BudgetState})
    add(history, "The latest releases", {"model": History})
