"""`serving.routes`, in process: who may ask, what is charged, what an error looks like, what does not exist."""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException
from fastapi.testclient import TestClient
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableGenerator, RunnableLambda
from langserve.serialization import WellKnownLCSerializer
from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass as of_pydantic
from pydantic_core import PydanticSerializationError
from typing_extensions import TypedDict

from langchain_dpicl import InvalidParameter, LedgerError, StoreError, Structured, UnsafeConfigurationError
from langchain_dpicl.serving import add_dp_routes, service

QUESTION = {"input": "a witty, seductive movie"}
ALICE = {"x-user": "alice"}


class Question(TypedDict):
    input: str


def header(request: Any) -> str | None:
    user: str | None = request.headers.get("x-user")
    return user


def answering(_: Any) -> str:
    return "Positive"


def events(text: str) -> list[tuple[str, Any]]:
    """A stream's events, as LangServe's client reads them."""
    found = []
    for block in text.replace("\r\n", "\n").strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields["event"], json.loads(fields["data"]) if "data" in fields else None))
    return found


def is_error(response: Any, status: int, name: str) -> bool:
    body = response.json()
    return bool(
        response.status_code == status
        and body["error"] == name
        and set(body) == {"error", "message"}
        and "Traceback" not in response.text
    )


# -- answers -----------------------------------------------------------------------------------------------------------


def test_no_part_of_langserve_is_needed(sealed_of: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["langserve", *(name for name in sys.modules if name.startswith("langserve."))]:
        monkeypatch.setitem(sys.modules, name, None)
    client = serve(sealed_of(answering))
    assert client.post("/ask/invoke", json={"input": QUESTION}, headers=ALICE).json()["output"] == "Positive"


def test_invoke_batch_and_stream_answer_in_langserves_form(sealed_of: Any, serve: Any) -> None:
    chain = sealed_of(answering, return_receipt=True)
    client = serve(chain)
    one = client.post("/ask/invoke", json={"input": QUESTION}, headers=ALICE).json()
    assert one["output"]["answer"] == "Positive"
    assert one["output"]["receipt"]["number"] == 1
    assert one["metadata"]["feedback_tokens"] == []
    many = client.post("/ask/batch", json={"inputs": [QUESTION] * 3}, headers=ALICE).json()
    assert [answer["receipt"]["number"] for answer in many["output"]] == [2, 3, 4]
    assert [entry["run_id"] for entry in many["metadata"]["responses"]] == many["metadata"]["run_ids"]
    streamed = client.post("/ask/stream", json={"input": QUESTION}, headers=ALICE)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    metadata, data, end = events(streamed.text)
    assert (metadata[0], data[0], end) == ("metadata", "data", ("end", None))
    assert data[1]["answer"] == "Positive"
    assert chain.budget.spent() == 5


def test_a_chain_with_steps_after_the_release_is_served(sealed_of: Any, serve: Any) -> None:
    client = serve(sealed_of(answering) | RunnableLambda(str.upper))
    assert client.post("/ask/invoke", json={"input": QUESTION}, headers=ALICE).json()["output"] == "POSITIVE"
    assert events(client.post("/ask/stream", json={"input": QUESTION}, headers=ALICE).text)[1] == ("data", "POSITIVE")


def test_a_structured_answer_is_the_models_json(sealed_of: Any, serve: Any) -> None:
    class Seen(BaseModel):
        sick: bool
        since: date | None = Field(None, ge=date(2026, 1, 1), le=date(2026, 12, 31))

    said = '{"sick": true, "since": "2026-03-05"}'
    for has_receipt in (False, True):
        more: dict[str, Any] = {"members": 6, "owners": 200, "return_receipt": has_receipt}
        client = serve(sealed_of(lambda values: said, vote=Structured(Seen), **more))
        answered = client.post("/ask/invoke", json={"input": QUESTION}, headers=ALICE).json()["output"]
        assert (answered["answer"] if has_receipt else answered) == json.loads(said)
        schema = client.get("/ask/output_schema", headers=ALICE).json()
        assert "sick" in str(schema)
        streamed = client.post("/ask/stream", json={"input": QUESTION}, headers=ALICE)
        assert '"since":"2026-03-05"' in streamed.text.replace(": ", ":")


def test_an_empty_batch_charges_nothing(sealed_of: Any, serve: Any) -> None:
    chain = sealed_of(answering)
    assert serve(chain).post("/ask/batch", json={"inputs": []}, headers=ALICE).json()["output"] == []
    assert chain.budget.spent() == 0


def test_budget_and_history_are_read_without_a_charge(sealed_of: Any, serve: Any) -> None:
    chain = sealed_of(answering)
    client = serve(chain)
    client.post("/ask/batch", json={"inputs": [QUESTION] * 3}, headers=ALICE)
    state = client.get("/ask/budget", headers=ALICE).json()
    assert state["lines"]["vote"]["spent"] == 3
    history = client.get("/ask/history?last=2", headers=ALICE).json()
    assert [release["number"] for release in history["releases"]] == [2, 3]
    assert chain.budget.spent() == 3


# -- who asks ----------------------------------------------------------------------------------------------------------

POSTS = [("invoke", {"input": QUESTION}), ("batch", {"inputs": [QUESTION]}), ("stream", {"input": QUESTION})]
GETS = ["input_schema", "output_schema", "budget", "history"]


async def no_one(request: Any) -> None:
    return None


def fails(request: Any) -> str:
    raise KeyError("CANARY in an error of the deployer's")


async def redirects(request: Any) -> str:
    raise HTTPException(200, "come in")


@pytest.mark.parametrize("who", [no_one, fails, redirects, lambda request: "", lambda request: 7, lambda request: b"a"])
def test_without_a_principal_nothing_runs(who: Any, sealed_of: Any, serve: Any) -> None:
    called: list[Any] = []
    chain = sealed_of(lambda values: called.append(1) or "Positive")
    client = serve(chain, who=who)
    for name, body in POSTS:
        response = client.post(f"/ask/{name}", json=body, headers=ALICE)
        assert is_error(response, 401, "Unauthorized")
        assert "CANARY" not in response.text
    for name in GETS:
        assert is_error(client.get(f"/ask/{name}", headers=ALICE), 401, "Unauthorized")
    assert chain.budget.spent() == 0
    assert called == []


def test_the_status_of_an_http_exception_passes(sealed_of: Any, serve: Any) -> None:
    def forbids(request: Any) -> str:
        raise HTTPException(403, "not you", {"x-reason": "quota"})

    response = serve(sealed_of(answering), who=forbids).post("/ask/invoke", json={"input": QUESTION})
    assert is_error(response, 403, "Forbidden")
    assert response.json()["message"] == "not you"
    assert response.headers["x-reason"] == "quota"


async def looked_up(request: Any) -> str:
    return str(request.headers["x-user"])


@pytest.mark.parametrize("who", [header, looked_up])
def test_what_the_client_says_of_itself_changes_nothing(who: Any, sealed_of: Any, serve: Any) -> None:
    chain = sealed_of(answering, scope="per_principal")
    client = serve(chain, who=who)
    config = {"configurable": {"principal": "bob", "user": "bob"}, "metadata": {"principal": "bob"}, "tags": ["bob"]}
    said = {"config": config, "kwargs": {"principal": "bob"}, "principal": "bob"}
    sent = {**ALICE, "x-principal": "bob", "cookie": "principal=bob"}
    for name, body in POSTS:
        assert client.post(f"/ask/{name}?principal=bob", json={**body, **said}, headers=sent).status_code == 200
    listed = {"inputs": [QUESTION] * 2, "config": [config, {"callbacks": ["x"], "run_id": "no id at all"}]}
    assert client.post("/ask/batch", json=listed, headers=sent).status_code == 200
    assert client.post("/ask/invoke", json={"input": QUESTION, "config": "nonsense"}, headers=sent).status_code == 200
    assert chain.budget.principals() == {"alice": {"vote": 6}}


def test_a_batch_of_n_charges_n_to_its_caller_alone_all_or_none(sealed_of: Any, serve: Any) -> None:
    chain = sealed_of(answering, scope="per_principal", releases=10)
    client = serve(chain)
    assert client.post("/ask/batch", json={"inputs": [QUESTION] * 4}, headers=ALICE).status_code == 200
    assert client.post("/ask/batch", json={"inputs": [QUESTION] * 3}, headers={"x-user": "bob"}).status_code == 200
    refused = client.post("/ask/batch", json={"inputs": [QUESTION] * 7}, headers=ALICE)
    assert is_error(refused, 429, "PrivacyBudgetExceeded")
    assert chain.budget.principals() == {"alice": {"vote": 4}, "bob": {"vote": 3}}
    assert client.get("/ask/budget", headers=ALICE).json()["lines"]["vote"]["spent"] == 4
    assert client.get("/ask/history", headers={"x-user": "bob"}).json()["total"] == 3


def test_a_routers_dependencies_run_too(sealed_of: Any) -> None:
    def closed() -> None:
        raise HTTPException(418, "no")

    app, router = FastAPI(), APIRouter(dependencies=[Depends(closed)])
    add_dp_routes(router, sealed_of(answering), "/ask", principal_from=header)
    app.include_router(router, prefix="/v1")
    assert TestClient(app).post("/v1/ask/invoke", json={"input": QUESTION}, headers=ALICE).status_code == 418


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b'{"input": NaN}',
        b'{"input": {"input": "\\ud800"}}',
        b'{"input": {"input": "\xff"}}',
        b'{"inputs": 3, "input": 3}',
        b'{"input": {"input": 7}, "inputs": [{"input": 7}]}',
        b'{"input": ' + b"[" * 500 + b"]" * 500 + b"}",
        b"[" * 5000 + b"]" * 5000,
        b'{"input": {"input": ' + b"9" * 5000 + b'}, "inputs": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_bad_bodies_are_422_and_free(body: bytes, sealed_of: Any, serve: Any) -> None:
    chain = sealed_of(answering)
    client = serve(chain.with_types(input_type=Question))
    for name, _ in POSTS:
        response = client.post(f"/ask/{name}", content=body, headers={**ALICE, "content-type": "application/json"})
        assert is_error(response, 422, "InvalidInput"), response.text
        assert "seductive" not in response.text
    assert chain.budget.spent() == 0


def test_what_the_release_refuses_is_422_and_free(sealed_of: Any, serve: Any) -> None:
    chain = sealed_of(answering)
    client = serve(chain)
    for name, body in (
        ("invoke", {"input": {"examples": []}}),
        ("batch", {"inputs": [QUESTION, {"examples": []}]}),
        ("stream", {"input": {"examples": []}}),
    ):
        assert is_error(client.post(f"/ask/{name}", json=body, headers=ALICE), 422, "InvalidParameter")
    assert chain.budget.spent() == 0


def test_a_form_of_another_web_page_is_refused(sealed_of: Any, serve: Any) -> None:
    """A browser sends text/plain, or no type, to any origin without asking; JSON it asks for, and is not allowed."""
    chain = sealed_of(answering)
    client = serve(chain)
    for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        response = client.post("/ask/invoke", content=json.dumps({"input": QUESTION}), headers={**ALICE, **kind})
        assert is_error(response, 422, "InvalidInput")
        assert "application/json" in response.json()["message"]
    assert client.options("/ask/invoke", headers={"origin": "https://elsewhere.example"}).status_code == 405
    assert chain.budget.spent() == 0


def test_the_limits_are_named_and_cost_nothing(sealed_of: Any, serve: Any) -> None:
    chain = sealed_of(answering)
    client = serve(chain, max_body_bytes=300, max_batch=2)
    large = client.post("/ask/invoke", json={"input": {"input": "x" * 300}}, headers=ALICE)
    assert is_error(large, 413, "TooLarge")
    assert "300 bytes" in large.json()["message"]

    def in_pieces() -> Iterator[bytes]:
        yield b'{"input": {"input": "'
        for _ in range(10):
            yield b"x" * 50
        yield b'"}}'

    assert is_error(client.post("/ask/invoke", content=in_pieces(), headers=ALICE), 413, "TooLarge")
    many = client.post("/ask/batch", json={"inputs": [{"input": "x"}] * 3}, headers=ALICE)
    assert is_error(many, 422, "InvalidInput")
    assert "at most 2 items" in many.json()["message"]
    assert chain.budget.spent() == 0


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def failing(_: Any) -> str:
    raise RuntimeError("CANARY of a member")


@pytest.mark.parametrize(("name", "body"), POSTS)
def test_a_model_that_is_down_is_503_charged_once_then_free(name: str, body: Any, sealed_of: Any, serve: Any) -> None:
    chain = sealed_of(failing)
    client = serve(chain)
    first = client.post(f"/ask/{name}", json=body, headers=ALICE)
    assert is_error(first, 503, "MembersAbstained")
    assert "was charged" in first.json()["message"]
    second = client.post(f"/ask/{name}", json=body, headers=ALICE)
    assert is_error(second, 503, "ModelUnavailable")
    assert "RuntimeError" not in second.text
    assert chain.budget.spent() == 1


@pytest.mark.parametrize(("name", "body"), POSTS)
@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (LedgerError("the disk is full at /var/db"), 503, "LedgerUnavailable"),
        (StoreError("the database at db.internal does not answer"), 503, "StoreUnavailable"),
        (UnsafeConfigurationError("debug mode"), 500, "InternalError"),
        (InvalidParameter("rate", 7, "less"), 500, "InternalError"),
        (ZeroDivisionError("CANARY"), 500, "InternalError"),
        (HTTPException(404, "no such thing"), 404, "NotFound"),
    ],
)
def test_errors_of_the_chain_have_their_status_and_no_trace(
    error: Exception, status: int, shown: str, name: str, body: Any, sealed_of: Any, serve: Any, caplog: Any
) -> None:
    def broken(answer: Any) -> str:
        raise error

    response = serve(sealed_of(answering) | RunnableLambda(broken)).post(f"/ask/{name}", json=body, headers=ALICE)
    assert is_error(response, status, shown)
    assert "CANARY" not in response.text + caplog.text
    assert "/var/db" not in response.text
    if shown == "InternalError":
        assert f"{type(error).__name__} at " in caplog.text, "whoever runs it learns where"


def test_a_stream_that_fails_later_ends_with_an_error_event(sealed_of: Any, serve: Any) -> None:
    async def halves(answers: AsyncIterator[str]) -> AsyncIterator[str]:
        async for answer in answers:
            yield answer[:3]
            raise ZeroDivisionError("CANARY")

    client = serve(sealed_of(answering) | RunnableGenerator(halves))
    response = client.post("/ask/stream", json={"input": QUESTION}, headers=ALICE)
    assert [name for name, _ in events(response.text)] == ["metadata", "data", "error"]
    assert events(response.text)[2][1]["status_code"] == 500
    assert "CANARY" not in response.text


# -- what does not exist -----------------------------------------------------------------------------------------------

ABSENT = [
    ("POST", "stream_log"), ("POST", "stream_events"), ("POST", "astream_events"), ("GET", "playground"),
    ("GET", "playground/index.html"), ("GET", "config_schema"), ("POST", "feedback"), ("GET", "feedback"),
    ("POST", "token_feedback"), ("HEAD", "token_feedback"), ("POST", "public_trace_link"),
    ("GET", "public_trace_link"), ("POST", "c/N4XyA/invoke"), ("POST", "c/N4XyA/batch"), ("POST", "c/N4XyA/stream"),
    ("GET", "c/N4XyA/config_schema"), ("GET", "c/N4XyA/input_schema"), ("GET", "c/N4XyA/playground/"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "name"), ABSENT)
def test_langserves_other_endpoints_do_not_exist(method: str, name: str, sealed_of: Any, serve: Any) -> None:
    chain = sealed_of(answering)
    response = serve(chain).request(method, f"/ask/{name}", headers=ALICE)
    assert response.status_code == 404
    assert chain.budget.spent() == 0


def test_the_document_lists_these_endpoints_and_no_other(sealed_of: Any, serve: Any) -> None:
    client = serve(sealed_of(answering, return_receipt=True).with_types(input_type=Question))
    document = client.get("/openapi.json").json()
    listed = {(method, path) for path, item in document["paths"].items() for method in item}
    assert listed == {("post", f"/ask/{name}") for name, _ in POSTS} | {("get", f"/ask/{name}") for name in GETS}
    invoke = document["paths"]["/ask/invoke"]["post"]
    assert set(invoke["responses"]) == {"200", "401", "403", "408", "413", "422", "429", "500", "503"}
    schemas = document["components"]["schemas"]
    assert not any({"config", "kwargs"} & schema.get("properties", {}).keys() for schema in schemas.values())
    schema = client.get("/ask/input_schema", headers=ALICE).json()
    assert schema["$defs"]["Question"]["properties"] == {"input": {"title": "Input", "type": "string"}}


def test_two_chains_of_one_application_have_models_of_their_own(sealed_of: Any) -> None:
    app, chain = FastAPI(), sealed_of(answering)
    add_dp_routes(app, chain, "/plain", principal_from=header)
    add_dp_routes(app, chain.with_types(input_type=Question), "/typed/one", principal_from=header)
    schemas = app.openapi()["components"]["schemas"]
    assert {"PlainQuestion", "TypedOneQuestion", "PlainBatchRequest", "TypedOneBatchRequest"} <= schemas.keys()
    assert not [name for name in schemas if "__" in name], "no name had to be made unique"


# -- what is refused at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "parameter"),
    [
        ({"runnable": RunnableLambda(answering)}, "runnable"),
        ({"runnable": 3}, "runnable"),
        ({"path": "ask"}, "path"),
        ({"path": ""}, "path"),
        ({"path": "/ask/"}, "path"),
        ({"path": "/{name}"}, "path"),
        ({"principal_from": "alice"}, "principal_from"),
        ({"max_batch": 0}, "max_batch"),
        ({"max_batch": 33}, "max_batch"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"max_concurrency": 1.5}, "max_concurrency"),
        ({"body_seconds": 0}, "body_seconds"),
    ],
)
def test_bad_arguments_are_named(changed: dict[str, Any], parameter: str, sealed_of: Any) -> None:
    given = {"runnable": sealed_of(answering), "path": "/ask", "principal_from": header, **changed}
    with pytest.raises(InvalidParameter) as caught:
        add_dp_routes(FastAPI(), given.pop("runnable"), given.pop("path"), **given)
    assert caught.value.parameter == parameter


# -- concurrency -------------------------------------------------------------------------------------------------------


def test_more_than_may_run_at_once_wait_briefly_and_are_told_to_come_again(sealed_of: Any, serve: Any) -> None:
    go = threading.Event()
    chain = sealed_of(lambda _: go.wait(20) and "Positive", members=2, share=[go])
    go.set()
    chain.invoke({"input": "a question that shows that the members share nothing"})
    go.clear()
    client = serve(chain, max_concurrency=2, max_batch=2)
    answers: list[Any] = []

    def ask() -> None:
        answers.append(client.post("/ask/batch", json={"inputs": [QUESTION] * 2}, headers=ALICE))

    first = threading.Thread(target=ask)
    first.start()
    while chain.budget.spent() < 3:
        time.sleep(0.01)
    busy = client.post("/ask/invoke", json={"input": QUESTION}, headers=ALICE)
    assert is_error(busy, 503, "Busy")
    assert busy.headers["retry-after"] == "1"
    assert chain.budget.spent() == 3, "a request that is told to wait costs nothing"
    waiting = threading.Thread(target=ask)
    waiting.start()
    go.set()
    first.join()
    waiting.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert chain.budget.spent() == 5


@dataclass
class Desk:
    """A chain's own type, with a field that is no caller's business."""

    name: str
    _rule: str = "unseen"


@dataclass(slots=True)
class Desks:
    first: Desk
    others: list[Desk]


@of_pydantic
class Checked:
    name: str
    left_out: str = Field("unseen", exclude=True)
    _rule: str = "unseen"


def test_a_dataclass_shows_its_public_fields_on_each_route(sealed_of: Any, serve: Any) -> None:
    client = serve(sealed_of(answering) | RunnableLambda(lambda answer: {"desks": [Desk(answer)]}))
    shown = {"desks": [{"name": "Positive"}]}
    assert client.post("/ask/invoke", json={"input": QUESTION}, headers=ALICE).json()["output"] == shown
    assert client.post("/ask/batch", json={"inputs": [QUESTION]}, headers=ALICE).json()["output"] == [shown]
    assert events(client.post("/ask/stream", json={"input": QUESTION}, headers=ALICE).text)[1] == ("data", shown)


def test_no_schema_promises_a_private_field(sealed_of: Any, serve: Any) -> None:
    client = serve((sealed_of(answering) | RunnableLambda(Desk)).with_types(output_type=Desk))
    documents = [client.get("/ask/output_schema", headers=ALICE).json(), client.app.openapi()["components"]["schemas"]]
    for types in (documents[0]["$defs"], documents[1]):
        assert types["Desk"]["required"] == list(types["Desk"]["properties"]) == ["name"]


def test_a_pydantic_dataclass_keeps_what_it_leaves_out_to_itself() -> None:
    assert json.loads(service.as_json([Checked("a")])) == [{"name": "a"}]


def test_every_kind_of_value_has_langserves_json() -> None:
    """An alias of a field is not its name on the wire."""

    class Found(BaseModel):
        number: float = Field(float("nan"), alias="n")

    values = [
        {"a": 1.5, "b": None, "c": [True, "é"]},
        [AIMessage("hello"), Document("x", metadata={"k": (1, 2)})],
        Found(),
        uuid.UUID(int=3),
        date(2026, 1, 2),
        Desks(Desk("a"), [Desk("b")]),
        {"desks": (Desk("a"),)},
    ]
    for value in values:
        assert service.as_json(value) == WellKnownLCSerializer().dumps(value)
    with pytest.raises(PydanticSerializationError):
        service.as_json(object())
