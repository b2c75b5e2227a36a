"""The application of ``dpicl serve``: routes, keys, page; and the plan that is fixed before any worker starts."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import Runnable

from langchain_dpicl.budget import Budget, PrivacyBudget
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.release.base import AnyRelease, releases_in
from langchain_dpicl.serving.config import LOOPBACK, Settings, read
from langchain_dpicl.serving.failures import failure_of, of_http
from langchain_dpicl.serving.keys import Keys
from langchain_dpicl.serving.page import add_page
from langchain_dpicl.serving.routes import add_dp_routes
from langchain_dpicl.serving.state import unit_of

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

ENVIRONMENT = "DPICL_SERVE"
_THREADS = 64


def create_app(settings: Settings, chain: Runnable[Any, Any] | None = None) -> FastAPI:
    """The application for a configuration: ``chain`` (default: the configuration's own) under ``server.path``.

    Every error is JSON with ``error`` and ``message``. Raises `InvalidParameter` where nobody would be asked for a key.
    """
    from fastapi import APIRouter, FastAPI, Security
    from fastapi.security import HTTPBearer
    from starlette.exceptions import HTTPException

    settings.check_access()
    server = settings.server
    runnable = settings.build() if chain is None else chain
    app = FastAPI(title=server.title, docs_url=None, redoc_url=None, lifespan=lambda _: _life(runnable))
    bearer = HTTPBearer(auto_error=False, description="A key of dpicl serve --new-key.")  # `Keys` looks at it
    router = APIRouter(dependencies=[Security(bearer)] if settings.keys else [])
    principal_from = Keys(settings.keys).principal if settings.keys else _anybody_here
    add_dp_routes(router, runnable, server.path, principal_from=principal_from, **settings.limits)
    app.include_router(router)
    if server.page:
        release = releases_in(runnable)[0]
        store = release.selector.store
        key = server.input_key or (store.input_key if settings.chain is None else release.query_key)
        add_page(
            app,
            api=server.path,
            title=server.title,
            input_key=key,
            needs_key=bool(settings.keys),
            line=release.line_name,
        )

    async def refused(request: Request, error: Exception) -> Response:
        return of_http(error).response()

    async def failed(request: Request, error: Exception) -> Response:
        return failure_of(error, request.scope["path"]).response()

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(Exception, failed)
    return app


def from_environment() -> FastAPI:
    """What a worker serves: the configuration that its parent has put into the environment."""
    held = json.loads(os.environ[ENVIRONMENT])
    return create_app(read(held["config"], **held["server"]))


@contextlib.asynccontextmanager
async def _life(chain: Runnable[Any, Any]) -> AsyncIterator[None]:
    """More threads than asyncio's few, so that members that block do not keep the ledger waiting; and all that the
    first release would wait for."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="dpicl-serve") as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        await asyncio.to_thread(warm, chain)
        yield
    for release in releases_in(chain):  # SIGTERM is sent again after this, and ends the process at once
        release.budget.close()


def warm(chain: Runnable[Any, Any]) -> None:
    """Freeze the plans, and load and compute what the first release would wait for."""
    freeze(chain)
    SecureRandomness().discrete_gaussian(1.0, 1)
    for release in releases_in(chain):
        line = release.line()
        if release.budget.plan is not None:
            release.budget.plan.spent({line.name: 1})


def _anybody_here(request: Request) -> str | None:
    """Whoever asks on this machine. Another name in the Host header is a web page that reaches through a browser."""
    return "anonymous" if request.url.hostname in LOOPBACK else None


# -- the plan -------------------------------------------------------------------------------------------------------


def freeze(chain: Runnable[Any, Any]) -> None:
    """Solve and store the plans of a chain's budgets, so that the workers find them."""
    for release in releases_in(chain):
        release.line()


def plans(chain: Runnable[Any, Any]) -> list[dict[str, Any]]:
    """Every budget of a chain as it stands, with its noise. Freezes nothing: a plan that is not frozen is solved on a
    ledger that is thrown away."""
    budgets: dict[int, list[AnyRelease]] = {}
    for release in releases_in(chain):
        budgets.setdefault(id(release.budget), []).append(release)
    return [_plan(releases) for releases in budgets.values()]


def _plan(releases: list[AnyRelease]) -> dict[str, Any]:
    budget = releases[0].budget
    facts = {"budget": budget.name, "epsilon": budget.epsilon, "delta": budget.delta, "scope": budget.scope}
    facts["tickets"] = budget.tickets
    if not isinstance(budget, PrivacyBudget) or budget.plan is not None:
        return {**facts, "frozen": budget.plan is not None, "lines": _lines(releases, budget)}
    with tempfile.TemporaryDirectory(prefix="dpicl-plan-") as folder:
        where, tickets = f"sqlite:///{folder}/plan.db", budget.tickets
        trial = PrivacyBudget(budget.epsilon, budget.delta, budget.releases, where, budget.name, tickets=tickets)
        tried = [copy.copy(release) for release in releases]
        try:
            for release in tried:
                release.budget = trial
                asked = release.selector
                trial.declare(
                    release.line_name, release.mechanism, asked.rate, owners=asked.owners, options=release.options
                )
            return {**facts, "frozen": False, "lines": _lines(tried, trial)}
        finally:
            trial.close()


def _lines(releases: Iterable[AnyRelease], budget: Budget) -> list[dict[str, Any]]:
    shared = budget.scope == "shared"
    found = []
    for line in {line.name: line for line in (release.line() for release in releases)}.values():
        spent = line.spent() if shared else None  # each principal has a counter
        left = None if spent is None or line.has_tickets else line.count - spent
        noise = {"mechanism": line.plan_line.describe(), "rate": line.rate, "parameter": line.parameter}
        counted = {"unit": unit_of(line.mechanism), "releases": line.count, "spent": spent, "left": left}
        found.append({"line": line.name, **counted, **noise})
    return found
