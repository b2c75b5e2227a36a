"""The application of ``dpicl serve``: routes, keys, page; and the plan that is fixed before any worker starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import Runnable

from langchain_dpicl.budget import PrivacyBudget
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.release.base import releases_in
from langchain_dpicl.serving.config import Configuration, read
from langchain_dpicl.serving.failures import failure_of
from langchain_dpicl.serving.keys import ApiKeys
from langchain_dpicl.serving.page import add_page
from langchain_dpicl.serving.routes import add_dp_routes
from langchain_dpicl.serving.state import by_budget, unit_of

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

ENVIRONMENT = "DPICL_SERVE"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def create_app(settings: Configuration, chain: Runnable[Any, Any] | None = None) -> FastAPI:
    """Make the application: ``chain`` (default: the configuration's own) under ``server.path``.

    Every error is JSON with ``error`` and ``message``. Raises `InvalidParameter` unless there are keys, or
    ``anonymous: true`` on a loopback address. ``state.chain`` of the application is the chain.
    """
    from fastapi import APIRouter, FastAPI, Security
    from fastapi.security import HTTPBearer
    from starlette.exceptions import HTTPException

    server, keys = settings.server, ApiKeys(settings.keys)
    if settings.keys and server.anonymous:
        raise InvalidParameter("server.anonymous", True, "left out if there are keys")
    if not settings.keys and not (server.anonymous and server.host in LOOPBACK):
        bound = "at least one key (dpicl serve --new-key NAME), or server.anonymous: true on a loopback host"
        raise InvalidParameter("keys", "none", bound)
    runnable = settings.build() if chain is None else chain
    app = FastAPI(title=server.title, docs_url=None, redoc_url=None, lifespan=lambda _: _life(runnable))
    bearer = HTTPBearer(auto_error=False, description="A key of dpicl serve --new-key.")  # `ApiKeys` looks at it
    router = APIRouter(dependencies=[Security(bearer)] if settings.keys else [])

    def local_caller(request: Request) -> str | None:
        """One principal for this machine. Another name in the Host header is a web page that reaches through a
        browser."""
        return "anonymous" if request.url.hostname in LOOPBACK else None

    principal_from = keys.principal if settings.keys else local_caller
    limits = server.model_dump(include={"max_body_bytes", "max_batch", "max_concurrency", "body_seconds"})
    add_dp_routes(router, runnable, server.path, principal_from=principal_from, **limits)
    app.include_router(router)
    if server.page:
        release = releases_in(runnable)[0]
        key = server.input_key or (release.query_key if settings.chain else release.selector.store.input_key)
        line, needs_key = release.line_name, bool(settings.keys)
        add_page(app, api=server.path, title=server.title, input_key=key, needs_key=needs_key, line=line)

    async def failed(request: Request, error: Exception) -> Response:
        return failure_of(error, request.scope["path"]).response()

    app.state.chain = runnable
    app.add_exception_handler(HTTPException, failed)
    app.add_exception_handler(Exception, failed)
    return app


def from_environment() -> FastAPI:
    """Make a worker's application from the configuration that its parent has put into the environment."""
    held = json.loads(os.environ[ENVIRONMENT])
    return create_app(read(held["config"], **held["server"]))


@contextlib.asynccontextmanager
async def _life(chain: Runnable[Any, Any]) -> AsyncIterator[None]:
    """Warm up, with more threads than asyncio's few: members that block must not keep the ledger waiting."""
    with ThreadPoolExecutor(64, thread_name_prefix="dpicl-serve") as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        await asyncio.to_thread(warm, chain)
        yield
    for release in releases_in(chain):  # SIGTERM is sent again after this, and ends the process at once
        release.budget.close()


def freeze(chain: Runnable[Any, Any]) -> None:
    """Solve and store the plans of a chain's budgets, for the workers to find."""
    for release in releases_in(chain):
        release.line()


def warm(chain: Runnable[Any, Any]) -> None:
    """Freeze the plans, and load and compute everything that would delay the first release."""
    freeze(chain)
    SecureRandomness().discrete_gaussian(1.0, 1)
    for release in releases_in(chain):
        if release.budget.plan is not None:
            release.budget.plan.spent({release.line().name: 1})


def plans(chain: Runnable[Any, Any]) -> list[dict[str, Any]]:
    """Return every budget of a chain as it stands, with its noise. Freezes nothing.

    A plan that is not frozen is solved on a temporary ledger.
    """
    found = []
    for releases in by_budget(releases_in(chain)):
        budget = releases[0].budget
        tickets, is_frozen = budget.tickets, budget.plan is not None
        facts = {"budget": budget.name, "epsilon": budget.epsilon, "delta": budget.delta, "scope": budget.scope}
        lines: dict[str, Any] = {}
        with tempfile.TemporaryDirectory(prefix="dpicl-plan-") as folder, contextlib.ExitStack() as opened:
            if is_frozen or not isinstance(budget, PrivacyBudget):
                bound = [release.line() for release in releases]
            else:
                ledger, target = f"sqlite:///{folder}/plan.db", (budget.epsilon, budget.delta, budget.releases)
                budget = PrivacyBudget(*target, ledger, budget.name, tickets=tickets)
                opened.callback(budget.close)
                asked = [(each.line_name, each.mechanism, each.selector, each.options) for each in releases]
                for name, of, chosen, options in asked:
                    budget.declare(name, of, chosen.rate, owners=chosen.owners, options=options)
                bound = [  # not by `release.line`: the store must not remember a temporary ledger
                    budget.line(of, chosen.rate, name=name, owners=chosen.owners, options=options)
                    for name, of, chosen, options in asked
                ]
            for line in bound:
                spent = line.spent() if budget.scope == "shared" else None  # each principal has a counter
                lines[line.name] = {
                    "line": line.name,
                    "unit": unit_of(line.mechanism),
                    "releases": line.count,
                    "spent": spent,
                    "left": None if spent is None or tickets else line.count - spent,
                    "mechanism": line.plan_line.describe(),
                    "rate": line.rate,
                    "parameter": line.parameter,
                }
        found.append({**facts, "tickets": tickets, "frozen": is_frozen, "lines": list(lines.values())})
    return found
