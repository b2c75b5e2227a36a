"""The server that `dpicl serve` runs: application, page, plans fixed before workers start, HTTP with a clock.

The page at ``/`` is one HTML file without a build step. Its style and script are inline and named by their hashes in
the content security policy, so nothing else runs on it, and nothing on it reaches another origin.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import html
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import Runnable
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from langchain_dpicl.budget import PrivacyBudget
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.extras import require
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.privacy.profile import ladder
from langchain_dpicl.private import notes
from langchain_dpicl.release.advice import poor_plan
from langchain_dpicl.release.base import releases_in
from langchain_dpicl.serving import logs
from langchain_dpicl.serving.config import Configuration, joined, read
from langchain_dpicl.serving.guards import ApiKeys, Limits, Slots, failure_of
from langchain_dpicl.serving.health import Readiness
from langchain_dpicl.serving.metrics import Metrics
from langchain_dpicl.serving.routes import PrincipalFrom, add_limited, heads_in
from langchain_dpicl.serving.state import by_budget, unit_of
from langchain_dpicl.spec.conflicts import line_of

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.applications import Starlette

steps = logging.getLogger(logs.STEPS)

ENVIRONMENT = "DPICL_SERVE"
_CORS_SENT = ["Authorization", "Content-Type", "MCP-Protocol-Version", "X-Request-ID"]
_CORS_READ = ["Retry-After", "X-Request-ID"]
_NOTHING: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
_EVERY_ADDRESS = ("0.0.0.0", "::")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
    "img-src data:; "  # its icon
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def create_app(settings: Configuration, chain: Runnable[Any, Any] | None = None) -> FastAPI:
    """Make the application: each chain of the configuration under its path; or ``chain`` instead of the only one.

    Every error is JSON with ``error`` and ``message``. Raises `InvalidParameter` unless there are keys, or
    ``anonymous: true`` on a loopback address. ``state.chain`` of the application is the chain, or all of them.
    """
    from fastapi import APIRouter, FastAPI, Security
    from fastapi.security import HTTPBearer

    server, keys = settings.server, settings.api_keys()
    if server.log_private_notes:
        notes.show()
    if keys and server.anonymous:
        raise InvalidParameter("server.anonymous", True, "left out if there are keys")
    if not keys and not (server.anonymous and server.host in LOOPBACK):
        bound = "at least one key (dpicl serve --new-key NAME), or server.anonymous: true on a loopback host"
        raise InvalidParameter("keys", "none", bound)
    if settings.metrics is not None and keys and settings.metrics.key is None:
        raise InvalidParameter("metrics.key", None, "the hash of a key for whoever reads the metrics (--new-key)")
    chains = settings.chains() if chain is None else {settings.at(None).path: chain}
    runnable = joined(chains)
    metrics: Metrics | None = None
    operator: Callable[[Request], str | None] = _local_caller
    if settings.metrics is not None:
        metrics = Metrics(releases_in(runnable), principals=settings.metrics.principals)
        if settings.metrics.key is not None:
            operator = ApiKeys({"metrics": settings.metrics.key}).known
    running = _NOTHING
    app = FastAPI(
        title=server.title, docs_url=None, redoc_url=None, lifespan=lambda _: life(runnable, metrics, running)
    )
    bearer = HTTPBearer(auto_error=False, description="A key of dpicl serve --new-key.")  # `ApiKeys` looks at it
    router = APIRouter(dependencies=[Security(bearer)] if keys else [])
    caller = keys.principal if keys else _local_caller
    limits = Limits(**server.model_dump(include={each.name for each in fields(Limits)}))
    slots = Slots(limits.max_concurrency)
    readiness = {}
    for each in settings.served:
        served = chains[each.path]
        add_limited(router, served, each.path, _among(each.callers, caller), limits, slots)
        parts = releases_in(served), heads_in(served)
        readiness[each.path] = Readiness(*parts, each.ready_question, "" if len(chains) == 1 else f"{each.path} ")
    app.include_router(router)
    if server.mcp is not None:
        running = _add_tools(app, settings, chains, caller, limits, slots)
    if server.page:
        _add_pages(app, settings, chains)

    async def failed(request: Request, error: Exception) -> Response:
        failure = failure_of(error, request.scope["path"])
        request.state.dpicl_error = failure.error
        return failure.response()

    async def health() -> Response:
        return JSONResponse({"alive": True})

    async def ready() -> Response:
        looks = await asyncio.gather(*(each.look() for each in readiness.values()))
        is_ready = all(all(parts.values()) for parts in looks)
        said = dict(zip(readiness, looks, strict=True)) if settings.releases else looks[0]
        return JSONResponse({"ready": is_ready, **said}, 200 if is_ready else 503)

    async def shown(request: Request) -> Response:
        assert metrics is not None
        if operator(request) is None:
            raise HTTPException(401, headers={"WWW-Authenticate": "Bearer"})
        content, media_type = await asyncio.to_thread(metrics.shown, request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": media_type})

    app.add_api_route("/health", health, include_in_schema=False)
    app.add_api_route("/ready", ready, include_in_schema=False)
    if metrics is not None:
        app.add_api_route("/metrics", shown, include_in_schema=False)
    app.state.chain = runnable
    app.add_exception_handler(HTTPException, failed)
    app.add_exception_handler(Exception, failed)
    within = app.build_middleware_stack()  # the handler of unforeseen errors, too
    if server.cors:
        within = CORSMiddleware(within, server.cors, ["GET", "POST"], _CORS_SENT, expose_headers=_CORS_READ)
    app.middleware_stack = logs.Around(within, metrics, server.log_questions)
    return app


def _add_tools(
    app: FastAPI,
    settings: Configuration,
    chains: dict[str, Runnable[Any, Any]],
    caller: PrincipalFrom,
    limits: Limits,
    slots: Slots,
) -> contextlib.AbstractAsyncContextManager[None]:
    """Add the path of the Model Context Protocol, and return what has to run while the application does."""
    require("mcp", "mcp")
    from langchain_dpicl.serving.tools import over_http, tool_server, tools_of

    server = settings.server
    if server.host in _EVERY_ADDRESS and not server.hosts:
        raise InvalidParameter("server.hosts", server.hosts, f"the names of this server, if {server.host} serves mcp")
    assert server.mcp is not None
    hosts = [*LOOPBACK, "[::1]", server.host, f"[{server.host}]", *server.hosts]
    tools = tool_server(tools_of(settings, chains), slots)
    manager, handler = over_http(tools, caller, limits, hosts, server.cors)
    app.add_route(server.mcp, handler, methods=["POST"], include_in_schema=False)
    return manager.run()


def _local_caller(request: Request) -> str | None:
    """One principal for this machine. Another name in the Host header is a web page that reaches through a browser."""
    return "anonymous" if request.url.hostname in LOOPBACK else None


def _among(callers: Sequence[str] | None, caller: Callable[[Request], str | None]) -> Callable[[Request], str | None]:
    """Return the caller of a request if it is one of some, or if everybody may ask."""

    def found(request: Request) -> str | None:
        name = caller(request)
        if callers is not None and name not in callers:
            request.state.dpicl_principal = name  # for the log
            raise HTTPException(403, "this key does not open this path")
        return name

    return found


def _add_pages(app: FastAPI, settings: Configuration, chains: Mapping[str, Runnable[Any, Any]]) -> None:
    """Add the page of each path: of the only one at ``/``, of several at their paths, and ``/`` lists them."""
    titles = {}
    for each in settings.served:
        chain = chains[each.path]
        titles[each.path] = each.title or line_of(each.path)
        about: dict[str, Any] = {"api": each.path, "title": titles[each.path], "needs_key": bool(settings.keys)}
        if releases := releases_in(chain):
            about["line"] = releases[0].line_name
            about["beside"] = bool(heads_in(chain))
        else:
            about["head"] = True
        path = each.path if settings.releases else "/"
        add_page(app, path=path, input_key=each.question_key(chain), **about)

    async def listed(request: Request) -> Response:
        below = html.escape(str(request.scope.get("root_path", "")).rstrip("/"))
        links = "".join(f'<li><a href="{below}{path}">{html.escape(titles[path])}</a> {path}' for path in titles)
        head = f'<meta name="color-scheme" content="light dark"><title>{html.escape(settings.server.title)}</title>'
        text = f'<!doctype html><html lang="en">{head}<h1>{html.escape(settings.server.title)}</h1><ul>{links}</ul>'
        return HTMLResponse(text, headers={"Content-Security-Policy": "default-src 'none'", **_HEADERS})

    if settings.releases:
        app.add_route("/", listed, methods=["GET"], include_in_schema=False)


def from_environment() -> FastAPI:
    """Make a worker's application from the configuration that its parent has put into the environment."""
    held = json.loads(os.environ[ENVIRONMENT])
    settings = read(held["config"], **held["server"])
    if settings.server.log_format == "json":
        logs.begin_json()
    return create_app(settings)


def ask_heads(chain: Runnable[Any, Any]) -> None:
    """Ask every head of a chain a public question, which loads its model. Raises the model's own error if it fails."""
    for head in heads_in(chain):
        head.embeddings.embed_documents(["ready?"])
        head.invoke("ready?")


def embed_questions(chain: Runnable[Any, Any]) -> None:
    """Load what releases with a gate need: their vectors, and by a public question their model.

    If it fails, `/ready` says so.
    """
    for release in releases_in(chain):
        if release.selector.threshold is not None:
            with contextlib.suppress(Exception):
                release.store.load_vectors()
        if release.selector.nearest_to is not None:
            with contextlib.suppress(Exception):
                release.store.embed_query("ready?")


@contextlib.asynccontextmanager
async def life(
    chain: Runnable[Any, Any],
    metrics: Metrics | None = None,
    running: contextlib.AbstractAsyncContextManager[None] = _NOTHING,
) -> AsyncIterator[None]:
    """Warm up, with more threads than asyncio's few: members that block must not keep the ledger waiting.

    ``running`` runs meanwhile, and the budgets are closed at the end. One load after the other: scipy cannot be
    imported while another thread imports torch.
    """
    with ThreadPoolExecutor(64, thread_name_prefix="dpicl-serve") as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        steps.info("loading the models")
        for load in (warm, ask_heads, embed_questions):
            await asyncio.to_thread(load, chain)
        if metrics is not None:
            await asyncio.to_thread(metrics.begin)
        async with running:
            steps.info("ready")
            yield
    for release in releases_in(chain):  # SIGTERM is sent again after this, and ends the process at once
        release.budget.close()


def freeze(chain: Runnable[Any, Any]) -> None:
    """Solve and store the plans of a chain's budgets, for the workers to find."""
    for release in releases_in(chain):
        release.line()


def warm(chain: Runnable[Any, Any], seconds: float = 2.0) -> None:
    """Freeze the plans, and load and compute everything that would delay the first releases.

    That includes the epsilons of later receipts (`PrivacyPlan.spent`) of plans with one line, as many as ``seconds``
    allow. Several lines have a step for each combination of their counts, which is computed at its first use.
    """
    freeze(chain)
    SecureRandomness().discrete_gaussian(1.0, 1)
    until = time.monotonic() + seconds
    for release in releases_in(chain):
        line, plan = release.line(), release.budget.plan
        if plan is None:
            continue
        for count in ladder(line.count):
            plan.spent({line.name: count})
            if len(plan.lines) > 1 or time.monotonic() > until:
                break


def plans(chain: Runnable[Any, Any]) -> list[dict[str, Any]]:
    """Return every budget of a chain as it stands, with its noise. Freezes nothing.

    A plan that is not frozen is solved on a temporary ledger.
    """
    found = []
    for releases in by_budget(releases_in(chain)) if releases_in(chain) else []:
        budget = releases[0].budget
        tickets, is_frozen, is_shared = budget.tickets, budget.plan is not None, budget.scope == "shared"
        facts = {"budget": budget.name, "epsilon": budget.epsilon, "delta": budget.delta, "scope": budget.scope}
        lines: dict[str, Any] = {}
        with contextlib.ExitStack() as opened:
            if is_frozen:
                bound = [release.line() for release in releases]
            else:
                folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="dpicl-plan-"))
                target = budget.epsilon, budget.delta, budget.releases, f"sqlite:///{folder}/plan.db", budget.name
                more: dict[str, Any] = {"tickets": tickets, "accept_noise": budget.accept_noise}
                budget = opened.enter_context(contextlib.closing(PrivacyBudget(*target, **more)))
                tried = [each.tried_on(budget) for each in releases]
                for each in tried:
                    each.declare()
                bound = [each.tried_line() for each in tried]
            for release, line in zip(releases, bound, strict=True):
                spent = line.spent() if is_shared else None  # else each principal has a counter
                lines[line.name] = {
                    "line": line.name,
                    "unit": unit_of(line.mechanism),
                    "releases": line.count,
                    "spent": spent,
                    "left": None if spent is None or tickets else line.count - spent,
                    "mechanism": line.plan_line.describe(),
                    "rate": line.rate,
                    "parameter": line.parameter,
                    "warning": poor_plan(release, line.plan_line),
                }
        found.append({**facts, "tickets": tickets, "frozen": is_frozen, "lines": list(lines.values())})
    return found


def add_page(
    app: Starlette,
    *,
    api: str,
    path: str = "/",
    title: str = "Private answers",
    input_key: str = "input",
    needs_key: bool = True,
    line: str | None = None,
    head: bool = False,
    beside: bool = False,
) -> None:
    """Add the page to a FastAPI or Starlette app, outside of its OpenAPI document.

    Parameters
    ----------
    api
        The path of `add_dp_routes`: the page asks ``{api}/invoke`` and reads ``{api}/budget`` and ``{api}/history``, or
        ``{api}/heads``.
    path, title
        The page's path and heading.
    input_key
        The key under which the chain expects the question.
    needs_key
        Whether the page asks for a key and sends it as ``Authorization: Bearer``. The key stays in the page's memory,
        or until the tab is closed if the user says so.
    line
        The budget's line that these answers are charged to, if it has several: the page says when it is spent.
    head
        Whether a `PrivateHead` answers, and no release: the page says what it cost, and that questions cost nothing.

    beside
        Whether a `PrivateHead` is in the chain beside its releases: the page adds its cost to what is promised.

    The page itself holds nothing private and is given to everybody.
    """
    for name, value in (("api", api), ("path", path)):
        if not isinstance(value, str) or not re.fullmatch(r"/(?!/)[^\s?#\\{}]*", value):
            raise InvalidParameter(name, value, 'a path on this server such as "/classify"')
    for name, value in (("title", title), ("input_key", input_key)):
        if not isinstance(value, str) or not value.strip():
            raise InvalidParameter(name, value, "a non-empty string")
    if line is not None and (head or not isinstance(line, str)):
        raise InvalidParameter("line", line, "a line of the budget, or None, as for a head")
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    settings = {"api": api.rstrip("/"), "inputKey": input_key, "needsKey": bool(needs_key), "line": line}
    settings |= {"head": bool(head)} | ({"beside": True} if beside else {})
    allowed = {}
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
        allowed[tag] = f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    headers = {"Content-Security-Policy": _POLICY.format(**allowed), **_HEADERS}

    async def page(request: Request) -> Response:
        """Fill in title and settings. Neither can add a tag, or replace the other."""
        below = str(request.scope.get("root_path", "")).rstrip("/")  # the prefix of a proxy or an outer app
        data = json.dumps({**settings, "api": f"{below}{settings['api']}"})
        data = data.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&"})
        values = {"title": html.escape(title), "settings": data}
        text = re.sub(r"\{\{(title|settings)\}\}", lambda place: values[place[1]], template)
        return HTMLResponse(text, headers=headers)

    app.add_route(path, page, methods=["GET"], include_in_schema=False)


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose next request has no whole head within ``header_seconds``.

    uvicorn ends a connection that is idle between two requests. The first byte of a request stops that clock, and
    nothing starts another: a client that sends half a request line holds its connection for ever, and enough of them
    take all that ``limit_concurrency`` allows.

    The clock starts when the connection is made, and again when an answer is sent; a whole head stops it, and no byte
    before does. The unread rest of a refused request's body counts as part of the next head. A body that is read has
    `Limits.body_seconds`.
    """

    def __init__(self, *args: Any, header_seconds: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_seconds = header_seconds
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Stop the clock if the head is whole: a cycle of request and answer has begun."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Start the clock for the next head, unless that has come already."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._clock is None:
            self._clock = self.loop.call_later(self._header_seconds, self._expire)

    def _expire(self) -> None:
        """Close once the answer is sent; if the client does not take that either, close at once."""
        self._clock = self.loop.call_later(self._header_seconds, self.transport.abort)
        self.transport.close()

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
