"""The page at ``/``: ask a question, see the answer with its receipt, and what is left of the budget.

One HTML file without a build step. Its style and script are inline and named by their hashes in the content security
policy, so nothing else runs on it, and nothing on it reaches another origin.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_dpicl.errors import InvalidParameter

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


def add_page(
    app: Starlette,
    *,
    api: str,
    path: str = "/",
    title: str = "Private answers",
    input_key: str = "input",
    needs_key: bool = True,
    line: str | None = None,
) -> None:
    """Add the page to a FastAPI or Starlette app, outside of its OpenAPI document.

    Parameters
    ----------
    api
        Where `add_dp_routes` put the chain: the page asks ``{api}/invoke`` and reads ``{api}/budget`` and
        ``{api}/history``.
    path
        Where the page is.
    title
        Its heading.
    input_key
        The name under which the chain expects the question.
    needs_key
        Whether callers have a key, which the page then asks for and sends as ``Authorization: Bearer``. It stays in the
        page's memory, or until the tab is closed if the user says so.
    line
        The budget's line that these answers are charged to, where it has several: when it is spent the page says so.

    The page itself holds nothing private and is given to everybody.
    """
    for name, value in (("api", api), ("path", path)):
        if not isinstance(value, str) or not re.fullmatch(r"/(?!/)[^\s?#\\{}]*", value):
            raise InvalidParameter(name, value, 'a path on this server such as "/classify"')
    for name, value in (("title", title), ("input_key", input_key)):
        if not isinstance(value, str) or not value.strip():
            raise InvalidParameter(name, value, "a non-empty string")
    if line is not None and not isinstance(line, str):
        raise InvalidParameter("line", line, "a line of the budget, or None")
    from starlette.responses import HTMLResponse

    settings = {"api": api.rstrip("/"), "inputKey": input_key, "needsKey": bool(needs_key), "line": line}

    async def page(request: Request) -> Response:
        below = str(request.scope.get("root_path", "")).rstrip("/")  # where a proxy or an outer app has put this one
        here = {**settings, "api": f"{below}{settings['api']}"}
        return HTMLResponse(_filled(title, here), headers=_headers())

    app.add_route(path, page, methods=["GET"], include_in_schema=False)


@cache
def _template() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _filled(title: str, settings: dict[str, object]) -> str:
    """The page with its title and settings, in one pass: neither can bring in a tag, nor the other's place."""
    data = json.dumps(settings).translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&"})
    values = {"title": html.escape(title), "settings": data}
    return re.sub(r"\{\{(title|settings)\}\}", lambda place: values[place[1]], _template())


@cache
def _headers() -> dict[str, str]:
    policy = [
        "default-src 'none'",
        f"script-src {_hash('script')}",
        f"style-src {_hash('style')}",
        "connect-src 'self'",
        "img-src data:",  # its icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def _hash(tag: str) -> str:
    """The source expression of the one inline element of this kind."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", _template(), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
