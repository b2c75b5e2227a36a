"""The page of `serving/app.py` without a browser: what its response says (the rest: `integration/test_page.py`)."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from typing import Any

import pytest

from langchain_dpicl import InvalidParameter
from langchain_dpicl.serving.app import add_page

fastapi = pytest.importorskip("fastapi")


def fetched(path: str = "/", **options: Any) -> Any:
    from starlette.testclient import TestClient

    app, below = fastapi.FastAPI(), options.pop("root_path", "")
    add_page(app, **{"api": "/classify", "path": path, **options})
    assert app.openapi()["paths"] == {}, "the page is not part of the API's document"
    return TestClient(app, root_path=below).get(path)


def settings_of(response: Any) -> dict[str, Any]:
    (data,) = re.findall(r'<script id="settings" type="application/json">(.*?)</script>', response.text, re.DOTALL)
    return dict(json.loads(data))


def test_the_policy_allows_this_script_and_this_style_and_nothing_else() -> None:
    response = fetched()
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-frame-options"] == "DENY"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"


def test_the_page_is_small_and_names_no_other_origin() -> None:
    text = fetched().text
    assert len(text.encode()) < 33_000
    assert set(re.findall(r"https?://[\w./-]+", text)) == {"http://www.w3.org/2000/svg"}, "a namespace, never fetched"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\sstyle=|\son\w+=", text)


def test_the_page_has_plain_words_for_a_budget_without_an_end() -> None:
    text = fetched().text
    assert "There is no last answer: ${who} used for at most" in text
    assert "questions near to ${them}" in text
    assert '<span id="uses">New questions use up the budget.</span>' in text, "what the others say, and it replaces"
    assert 'receipt.remaining === null ? ""' in text, "a receipt without an end has no number left"


def test_a_title_and_a_key_cannot_bring_in_a_tag() -> None:
    attack = "</script><script>alert(1)</script>{{settings}}{{title}}\u2028&amp;"
    response = fetched(title=attack, input_key=attack, line=attack)
    expected = {
        "api": "/classify",
        "inputKey": attack,
        "needsKey": True,
        "line": attack,
        "head": False,
    }
    assert settings_of(response) == expected
    assert response.text.count("<script") == 2
    assert response.text.count(html.escape(attack)) == 2, "as text, in the heading and in the tab"


def test_the_page_of_a_head_knows_that_it_is_one() -> None:
    settings = settings_of(fetched(head=True))
    assert (settings["head"], settings["line"]) == (True, None)
    with pytest.raises(InvalidParameter, match="line") as caught:
        fetched(head=True, line="vote")
    assert caught.value.parameter == "line"


def test_the_page_asks_below_the_place_where_a_proxy_put_the_app() -> None:
    assert settings_of(fetched("/ask"))["api"] == "/classify"
    assert settings_of(fetched("/ask", root_path="/team/"))["api"] == "/team/classify"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api", "classify"),
        ("api", "//elsewhere.example/classify"),
        ("api", "https://elsewhere.example"),
        ("api", "/a b"),
        ("api", None),
        ("path", ""),
        ("path", "/{anything}"),
        ("title", " "),
        ("input_key", ""),
        ("line", 3),
    ],
)
def test_what_cannot_work_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        fetched(**{name: value})
    assert caught.value.parameter == name
