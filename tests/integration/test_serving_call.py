"""The pages "Several teams" and "Call it" as they stand: a real server, and each client's code against it."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from browser import chromium
from http_server import Served, configured, free_port
from pages import DOCS, blocks

from langchain_dpicl.serving.guards import hash_of, new_key

pytest.importorskip("sentence_transformers")
pytestmark = [pytest.mark.slow, pytest.mark.model]

PAGE = "tasks/call.md"
ASKED = "My card was charged twice"
LABELS = ("billing", "technical")
DATA = {
    "tickets.jsonl": ("label", ("billing", "My card was charged again"), ("technical", "The app is slow")),
    "reviews.jsonl": ("label", ("good", "A fine film"), ("bad", "A dull film")),
}


class Blank(http.server.BaseHTTPRequestHandler):
    """A page of another origin, with nothing on it."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html>")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Blank) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, origin: str) -> Iterator[Served]:
    """The page's file, with real keys, our other origin, and a quota of two."""
    folder = tmp_path_factory.mktemp("teams")
    for name, (key, *kinds) in DATA.items():
        rows = [{"text": f"{text} {i}", key: label, "customer": f"c{i}"} for i in range(30) for label, text in kinds]
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    (text,) = blocks("tasks/server.md", "yaml", "Several teams")
    keys = {name: new_key() for name in re.findall(r"^  (\w+): +\w+\.\.\.", text, re.MULTILINE)}
    for name, key in keys.items():
        text = re.sub(rf"^(  {name}: +)\w+\.\.\.", rf"\g<1>{hash_of(key)}", text, flags=re.MULTILINE)
    text = text.replace("https://app.example.com", origin).replace("{web: 600}", "{web: 2}")
    (folder / "server.yaml").write_text(text)
    with configured(folder, free_port(), "", keys) as found:
        yield found


def run(served: Served, name: str, command: list[str], code: str) -> str:
    code = code.replace("http://127.0.0.1:8000", served.url)
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 240, "cwd": served.folder}
    done = subprocess.run([*command, code], env={**os.environ, "DPICL_KEY": served.keys[name]}, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl(served: Served) -> None:
    (block,) = blocks(PAGE, "sh", "curl")
    answers = run(served, "helpdesk", ["bash", "-ec"], block)
    first, end = json.JSONDecoder().raw_decode(answers)
    state, length = json.JSONDecoder().raw_decode(answers[end:])
    assert first["output"]["answer"] in LABELS
    assert state["name"] == "tickets"
    events = dict(re.findall(r"event: (\w+)\n(?:data: (.*)\n)?", answers[end + length :]))
    assert [*events] == ["metadata", "data", "end"]
    streamed = json.loads(events["data"])
    assert (streamed["answer"], streamed["receipt"]["replayed"]) == (first["output"]["answer"], True)


def test_python(served: Served) -> None:
    by_httpx, by_langserve = blocks(PAGE, "python", "Python")
    assert run(served, "helpdesk", [sys.executable, "-c"], by_httpx).strip() in LABELS
    said = run(served, "helpdesk", [sys.executable, "-c"], by_langserve).splitlines()
    assert said[0] in LABELS
    assert len(json.loads(said[1].replace("'", '"'))) == 2


CALLS = """
const [key, other, text, done] = arguments;
(async () => {
  const told = async (work) => work().catch((error) => [error.status, error.name]);
  const found = { answer: (await ask(key, text)).answer, pieces: [] };
  for await (const piece of stream(key, text)) found.pieces.push(piece);
  found.problems = [
    await told(() => ask(key, "My invoice is wrong")), await told(() => ask(key, "The app is slow")),
    await told(() => ask("nonsense", text)), await told(() => ask(other, text)), await told(() => ask(key, "")),
  ];
  return found;
})().then(done, (error) => done(String(error)));
"""


def test_javascript_on_a_page_of_a_listed_origin(served: Served, origin: str) -> None:
    (block,) = blocks(PAGE, "js", "JavaScript")
    script = block.replace("http://127.0.0.1:8000", served.url) + CALLS
    asked = served.keys["web"], served.keys["shop"], ASKED
    with chromium() as driver:
        driver.set_script_timeout(240)
        driver.get(origin)
        found = driver.execute_async_script(script, *asked)
        driver.get(origin.replace("127.0.0.1", "localhost"))
        assert "Failed to fetch" in driver.execute_async_script(script, *asked), "another origin is another"
    assert found["answer"] in LABELS
    ((piece, *nothing),) = [found["pieces"]]
    assert (piece["answer"], piece["receipt"]["replayed"], nothing) == (found["answer"], True, [])
    second, *problems = found["problems"]
    assert second["answer"] in LABELS
    assert problems == [[429, "QuotaExceeded"], [401, "Unauthorized"], [403, "Forbidden"], [422, "InvalidInput"]]


def test_the_document_and_the_pages_have_every_path(served: Served) -> None:
    document = httpx.get(f"{served.url}/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for path in ("/tickets", "/reviews"):
        named = set(re.findall(r"(?:POST|GET) /tickets/(\w+)|, `/tickets/(\w+)", (DOCS / PAGE).read_text()))
        ways = {one or other for one, other in named} - {"heads", "input_schema"}
        assert {f"{path}/{way}" for way in ways} <= document["paths"].keys()
        assert path in httpx.get(f"{served.url}/").text
        assert "Your question" in httpx.get(f"{served.url}{path}").text
    assert httpx.get(f"{served.url}/ready").json()["/reviews"] == {"store": True, "ledger": True, "model": True}
    log = (served.folder / "log").read_text()
    assert "2 promises. They add up for whoever is in the data of all: epsilon 6 at delta 2e-05." in log


def test_every_error_of_the_server_is_on_the_page() -> None:
    (section,) = re.findall(r"^## Errors\n(.*)", (DOCS / PAGE).read_text(), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", section, re.MULTILINE)
    told = {(status[:3], name) for status, names in rows for name in re.findall(r"`(\w+)`", names)}
    source = "".join(path.read_text() for path in (DOCS.parent / "langchain_dpicl" / "serving").glob("*.py"))
    ours = set(re.findall(r'Failure\(\s*(\d{3}), "(\w+)"', source))
    assert ours - told == set()
    assert told - ours == {("403", "Forbidden"), ("404", "NotFound"), ("404", "MethodNotAllowed")}
