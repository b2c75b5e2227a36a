"""`serving.logs`: a line for each request, with its id and without its question."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from langchain_core.runnables import RunnableLambda

from langchain_dpicl.serving import app as serving_app
from langchain_dpicl.serving.app import create_app
from langchain_dpicl.serving.config import Configuration
from langchain_dpicl.serving.guards import hash_of, new_key
from langchain_dpicl.serving.logs import ACCESS, LogLines, log_config

Make = Callable[..., Any]
KEY = new_key()
ALICE = {"authorization": f"Bearer {KEY}"}
QUESTION = "CANARY-question-of-a-caller"


@pytest.fixture(params=[True, False], ids=["json", "text"])
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Everything that any logger writes, at its most talkative."""
    monkeypatch.setattr(serving_app, "warm", serving_app.freeze)
    heard, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(heard)
    handler.setFormatter(LogLines(request.param))
    handler.addFilter(lambda record: not record.name.startswith("httpx"))  # the client's own
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield heard
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def client_of(sealed_of: Make) -> Iterator[Make]:
    opened: list[TestClient] = []

    def make(**server: Any) -> TestClient:
        chain = sealed_of(RunnableLambda(lambda values: "Positive"), epsilon=30.0, releases=4, rate=0.5)
        settings = Configuration(chain="its:own", keys={"alice": hash_of(KEY)}, server=server)  # type: ignore[arg-type]
        opened.append(TestClient(create_app(settings, chain), raise_server_exceptions=False))
        opened[-1].__enter__()
        return opened[-1]

    yield make
    for client in opened:
        client.__exit__(None, None, None)


def ask_in_all_ways(client: TestClient) -> None:
    """Answers, and every kind of refusal, with the question wherever a client may put it."""
    one = {"input": QUESTION}
    for _ in range(2):
        assert client.post("/answer/invoke", json={"input": one}, headers=ALICE).status_code == 200
    assert client.post("/answer/batch", json={"inputs": [one, one]}, headers=ALICE).status_code == 200
    assert "CANARY" not in client.post("/answer/stream", json={"input": one}, headers=ALICE).text
    for body in ({"input": QUESTION}, {"input": {"examples": [QUESTION]}}, {"inputs": QUESTION}, QUESTION):
        assert client.post("/answer/invoke", json=body, headers=ALICE).status_code == 422
    assert client.post("/answer/invoke", json={"input": one}, headers={"authorization": f"Bearer {QUESTION}"}).is_error
    assert client.post(f"/answer/invoke?input={QUESTION}", content=b"{", headers=ALICE).is_error
    assert client.get(f"/answer/history?last={QUESTION}", headers=ALICE).status_code == 422
    assert client.get(f"/{QUESTION}", headers=ALICE).status_code == 404
    client.get("/", headers={"user-agent": QUESTION, "x-request-id": f"{QUESTION} with spaces"})
    client.get(f"/ready?{QUESTION}")


def test_no_log_shows_a_question(client_of: Make, log: io.StringIO) -> None:
    ask_in_all_ways(client_of())
    assert log.getvalue().count("/answer/invoke 200") == 2
    assert "CANARY" not in log.getvalue()


def test_a_question_is_logged_if_the_deployer_asks_for_it(client_of: Make, log: io.StringIO) -> None:
    """So the search can find it."""
    ask_in_all_ways(client_of(log_questions=True))
    lines = [line for line in log.getvalue().splitlines() if "/answer/invoke 200" in line]
    assert all(QUESTION in line for line in lines)
    assert len(lines) == 2


def test_a_request_keeps_a_well_formed_id_and_gets_one_otherwise(client_of: Make, log: io.StringIO) -> None:
    client = client_of()

    def id_of(given: str | bytes | None, path: str = "/answer/invoke", **options: Any) -> str:
        headers: Any = ALICE if given is None else {**ALICE, "x-request-id": given}
        answer = client.post(path, headers=headers, **options)
        assert len(answer.headers.get_list("x-request-id")) == 1
        return answer.headers["x-request-id"]

    body = {"json": {"input": {"input": "one"}}}
    for good in ("a", "3f2c-77_x.y:z", "7" * 64):
        assert id_of(good, **body) == id_of(good, "/answer/stream", **body) == id_of(good, "/nothing") == good
        assert good in log.getvalue()
    for bad in (None, "", " ", "a b", "-a", "x" * 65, "a\tb", "ä".encode(), 'a"b', "a,b"):
        made = id_of(bad, **body)
        assert re.fullmatch("[0-9a-f]{32}", made)
        assert made in log.getvalue()


def test_a_line_has_the_request_and_no_more(client_of: Make, log: io.StringIO, request: Any) -> None:
    client = client_of()
    client.post("/answer/invoke", json={}, headers={**ALICE, "x-request-id": "abc"})
    (line,) = [line for line in log.getvalue().splitlines() if ACCESS in line]
    if line.startswith("{"):
        said = json.loads(line)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", said.pop("time"))
        assert said == {
            "level": "INFO",
            "logger": ACCESS,
            "message": "POST /answer/invoke 422",
            "request_id": "abc",
            "method": "POST",
            "route": "/answer/invoke",
            "status": 422,
            "principal": "alice",
            "error": "InvalidInput",
        }, "no duration: an answer takes as long as private work"
    else:
        end = f'INFO {ACCESS} POST /answer/invoke 422 request_id="abc" principal="alice" error="InvalidInput"'
        assert line.endswith(end)


def test_what_is_written_within_a_request_has_its_id(client_of: Make, log: io.StringIO) -> None:
    client = client_of()
    app: Any = client.app

    async def fails() -> None:
        raise RuntimeError(QUESTION)

    app.add_api_route("/fails", fails)
    assert client.get("/fails", headers={"x-request-id": "abc"}).status_code == 500
    fault = next(line for line in log.getvalue().splitlines() if "RuntimeError" in line)
    assert "abc" in fault
    assert "CANARY" not in log.getvalue()


@pytest.mark.parametrize("as_json", [True, False])
def test_a_traceback_is_the_place_of_its_error(as_json: bool) -> None:
    formatter = LogLines(as_json)
    try:
        raise RuntimeError(QUESTION)
    except RuntimeError as error:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "it failed", (), (type(error), error, None))
        found = logging.LogRecord(
            "x", logging.ERROR, __file__, 1, "it\nfailed", (), (type(error), error, error.__traceback__)
        )
    assert "RuntimeError at an unknown place" in formatter.format(record)
    line = formatter.format(found)
    assert re.search(rf"RuntimeError at {__file__}:\d+", line)
    assert "CANARY" not in line
    assert not as_json or "\n" not in line


@pytest.mark.parametrize("as_json", [True, False])
def test_the_servers_logging_is_one_stream_of_such_lines(as_json: bool) -> None:
    config = log_config(as_json)
    assert config["formatters"]["lines"] == {"()": "langchain_dpicl.serving.logs.LogLines", "as_json": as_json}
    assert json.loads(json.dumps(config)) == config, "uvicorn hands it to its workers"
