"""Routes for a release: LangServe's safe endpoints alone, and a principal for every request."""

import inspect
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from langchain_core.runnables import Runnable

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.extras import require
from langchain_dpicl.once.head import PrivateHead
from langchain_dpicl.private.reach import is_one, reachable
from langchain_dpicl.release.base import releases_in
from langchain_dpicl.release.transaction import acting_for
from langchain_dpicl.serving.guards import Failure, Limits, Slots, failure_of, read_body, read_json

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI
    from starlette.requests import Request

PrincipalFrom = Callable[["Request"], "str | Awaitable[str | None] | None"]

PATH = r"(/[A-Za-z0-9_.~-]+)+"


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
    """Serve a chain that holds a release or a `PrivateHead`, for LangServe's ``RemoteRunnable`` and for plain HTTP.

    Adds ``POST {path}/invoke``, ``/batch`` and ``/stream``, and ``GET {path}/input_schema`` and ``/output_schema``; for
    releases ``/budget`` and ``/history``, and for heads ``/heads``: their labels and receipts. Nothing else of
    LangServe: no logs or events of a run, no playground, no config, no feedback.

    Parameters
    ----------
    app
        A FastAPI application, or a router (whose dependencies then run too).
    runnable
        A sealed release, a `DPSampler`, a `PrivateHead`, or a chain or an agent with one in it. If members need certain
        keys, give it an input type (``with_types(input_type=...)``): a request without them is then refused before any
        charge.
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

    A head answers without a charge or a ledger. Each request is embedded by itself, so no caller's question changes
    another's answer. Neither questions nor answers are logged or kept.

    Errors are JSON objects with ``error`` and ``message``: 401, 408, 413, 422, 429 (the budget or a quota is spent),
    500 and 503 (the model is down, or too many releases are under way), never a trace. A stream that fails before its
    first chunk has these statuses too.

    Raises `InvalidParameter` for a chain without a release or a head, and for limits that cannot work.
    """
    limits = Limits(max_body_bytes, max_batch, max_concurrency, body_seconds)
    add_limited(app, runnable, path, principal_from, limits, Slots(limits.max_concurrency))


def add_limited(
    app: "FastAPI | APIRouter",
    runnable: Runnable[Any, Any],
    path: str,
    principal_from: PrincipalFrom,
    limits: Limits,
    slots: Slots,
) -> None:
    """`add_dp_routes` for one of several paths that share the ``slots`` of their server."""
    require("fastapi", "serve")
    found = (releases_in(runnable), heads_in(runnable)) if isinstance(runnable, Runnable) else ([], [])
    if not any(found):
        raise InvalidParameter("runnable", type(runnable).__name__, "a release, a head, or a chain with one in it")
    if not isinstance(path, str) or not re.fullmatch(PATH, path):
        raise InvalidParameter("path", path, 'a path such as "/classify"')
    if not callable(principal_from):
        raise InvalidParameter("principal_from", type(principal_from).__name__, "a function of the request")
    from fastapi import FastAPI
    from fastapi.routing import APIRoute
    from starlette.requests import Request

    from langchain_dpicl.serving.service import add_endpoints

    class GuardedRoute(APIRoute):
        """A route behind `guarded`."""

        def get_route_handler(self) -> Callable[[Request], Any]:
            return guarded(super().get_route_handler(), principal_from, limits)

    router = app.router if isinstance(app, FastAPI) else app
    add_endpoints(router, GuardedRoute, runnable, *found, path, limits.max_batch, slots)


def guarded(
    serve: Callable[["Request"], Awaitable[Any]], principal_from: PrincipalFrom, limits: Limits
) -> Callable[["Request"], Awaitable[Any]]:
    """Return a handler that authenticates, reads the body within its limits, serves, and answers every error as JSON.

    The caller is in the request's ``state.dpicl_principal``, and acts while ``serve`` runs.
    """
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

    async def answer(request: Request) -> Response:
        try:
            principal = await authenticated(request)
            request.state.dpicl_principal = principal
            if request.method == "POST":
                body = await read_body(request, limits)
                if body and not _is_json(request):
                    raise Failure(422, "InvalidInput", "the Content-Type must be application/json")
                request._body, request._json = body, read_json(body) if body else None  # as `Request.json` does
                request.state.dpicl_asked = request._json
            with acting_for(principal):
                return cast("Response", await serve(request))
        except Exception as error:
            failure = failure_of(error, request.scope["path"])
        request.state.dpicl_error = failure.error
        return failure.response()

    return answer


def _is_json(request: "Request") -> bool:
    """Whether a body is said to be JSON. A web page elsewhere cannot say so unless the browser asks us first."""
    kind, _, form = request.headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (form == "json" or form.endswith("+json"))


def heads_in(chain: Runnable[Any, Any]) -> list[PrivateHead]:
    """Return every head that a chain can ask."""
    return [part for part in reachable(chain) if is_one(part, PrivateHead)]
