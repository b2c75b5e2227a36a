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
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_dpicl.errors import InvalidParameter

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

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
        The path of `add_dp_routes`: the page asks ``{api}/invoke`` and reads ``{api}/budget`` and ``{api}/history``.
    path, title
        The page's path and heading.
    input_key
        The key under which the chain expects the question.
    needs_key
        Whether the page asks for a key and sends it as ``Authorization: Bearer``. The key stays in the page's memory,
        or until the tab is closed if the user says so.
    line
        The budget's line that these answers are charged to, if it has several: the page says when it is spent.

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

    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    settings = {"api": api.rstrip("/"), "inputKey": input_key, "needsKey": bool(needs_key), "line": line}
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
