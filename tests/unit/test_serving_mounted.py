"""`add_dp_routes` in an application that LangGraph's server takes as its ``http.app``, put together as it does.

The server (langgraph-api 0.16, `server.py`) wraps each route of the application in its own authentication if
``enable_custom_route_auth`` is set, joins them with its routes, its middleware, handlers of errors and lifespan, and
mounts all of it below ``mount_prefix``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from pages import blocks
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from langchain_dpicl.serving import add_dp_routes

QUESTION = {"input": {"input": "a witty film"}}


class ByHeader(AuthenticationBackend):
    """The server's authentication: of a test's own."""

    async def authenticate(self, conn: Any) -> Any:
        if name := conn.headers.get("x-user"):
            return AuthCredentials(), SimpleUser(name)
        return None


async def unforeseen(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 422)


def as_langgraph_serves(app: FastAPI, *, authenticated: bool, prefix: str = "") -> Starlette:
    """Put a custom application among a server's own routes."""
    for route in app.routes if authenticated else []:
        route.app = AuthenticationMiddleware(route.app, backend=ByHeader())  # type: ignore[attr-defined]
    own = Route("/threads", lambda _: JSONResponse([]))
    app.user_middleware = [*app.user_middleware, Middleware(CORSMiddleware, allow_origins=["*"])]
    app.router.routes = [*app.routes, Mount("", routes=[own])]
    app.openapi()
    app.exception_handlers.setdefault(ValueError, unforeseen)
    assert not getattr(app.router, "on_startup", None)
    lifespan = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def both(_: Any) -> AsyncIterator[None]:
        async with lifespan(app):
            yield

    app.router.lifespan_context = both
    return Starlette(routes=[Mount(prefix, app=app)], lifespan=both) if prefix else app


def test_routes_answer_beside_the_servers_own_for_its_authenticated_user(sealed_of: Any) -> None:
    release = sealed_of(lambda _: "Positive", return_receipt=True, scope="per_principal", releases=1, epsilon=1000.0)
    *_, block = blocks("tasks/graph.md", "python", "")
    names: dict[str, Any] = {"release": release}
    exec(block, names)
    with TestClient(as_langgraph_serves(names["app"], authenticated=True, prefix="/api")) as client:
        alice, bob = {"x-user": "alice"}, {"x-user": "bob"}
        answered = client.post("/api/desk/invoke", json=QUESTION, headers=alice).json()["output"]
        assert (answered["answer"], answered["receipt"]["principal"]) == ("Positive", "alice")
        other = {"input": {"input": "another film"}}
        assert client.post("/api/desk/invoke", json=other, headers=alice).json()["error"] == "PrivacyBudgetExceeded"
        assert client.post("/api/desk/stream", json=other, headers=bob).status_code == 200
        assert client.post("/api/desk/invoke", json=QUESTION).json()["error"] == "Unauthorized"
        assert client.post("/api/desk/invoke", json={"input": 7}, headers=bob).json()["error"] == "InvalidInput"
        assert client.get("/api/desk/budget", headers=bob).json()["exhausted"]
        assert client.get("/api/threads").json() == []
        assert client.get("/desk/budget", headers=bob).status_code == 404


def test_an_application_that_keeps_its_own_authentication_is_left_alone(sealed_of: Any) -> None:
    app = FastAPI()
    who = {"Bearer secret": "alice"}
    add_dp_routes(
        app, sealed_of(lambda _: "Positive"), "/ask", principal_from=lambda r: who.get(r.headers.get("authorization"))
    )
    with TestClient(as_langgraph_serves(app, authenticated=False)) as client:
        known = {"authorization": "Bearer secret"}
        assert client.post("/ask/invoke", json=QUESTION, headers=known).json()["output"] == "Positive"
        assert client.post("/ask/invoke", json=QUESTION, headers={"x-user": "alice"}).status_code == 401
        assert client.get("/threads").json() == []
