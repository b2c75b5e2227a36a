"""Several releases in one file: each has its path, its data and its budget; the rest is the server's, once."""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from serving_files import VOTE, file_of, merged
from serving_files import models as models

from langchain_dpicl import PrivacyBudget
from langchain_dpicl.cli import main
from langchain_dpicl.errors import InvalidConfiguration, InvalidParameter, InvalidRecords
from langchain_dpicl.serving.app import create_app, freeze
from langchain_dpicl.serving.config import read
from langchain_dpicl.serving.guards import Slots, hash_of, new_key
from langchain_dpicl.serving.logs import ACCESS, LogLines

KEYS = {name: new_key() for name in ("desk", "shop", "operator")}
VOTED = {name: VOTE[name] for name in ("store", "release", "selector")}
VOTED["release"] = {**VOTE["release"], "mechanism": "vote-em"}
BUDGET = {"epsilon": 300, "delta": 1e-5, "releases": 30, "ledger": "sqlite:///budget.db"}
PATHS = ("/tickets", "/team/reviews")
SERVER: dict[str, Any] = {
    "keys": {name: hash_of(KEYS[name]) for name in ("desk", "shop")},
    "metrics": {"key": hash_of(KEYS["operator"])},
}
OWN: dict[str, Any] = {
    "releases": [
        {"path": "/tickets", **VOTED, "budget": BUDGET, "title": "The <desk>"},
        {"path": "/team/reviews", **VOTED, "budget": {**BUDGET, "releases": 20}, "callers": ["shop"]},
    ],
    **SERVER,
}
OWN["releases"][1]["store"] = {"data": "reviews.jsonl", "input_key": "body"}
COMMON: dict[str, Any] = {
    "budget": {**BUDGET, "name": "all", "releases": {"tickets": 30, "team/reviews": 20}},
    "releases": [{name: part for name, part in each.items() if name != "budget"} for each in OWN["releases"]],
    **SERVER,
}


@pytest.fixture(autouse=True)
def reviews(tmp_path: Path) -> None:
    rows = [{"body": f"review {i}", "label": "ab"[i % 2]} for i in range(60)]
    (tmp_path / "reviews.jsonl").write_text("\n".join(map(json.dumps, rows)))


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def ask(client: TestClient, path: str, question: dict[str, str], name: str = "shop") -> Any:
    return client.post(f"{path}/invoke", json={"input": question}, headers=bearer(name))


@pytest.mark.parametrize("content", [OWN, COMMON])
def test_each_path_has_its_data_its_line_and_its_page(content: dict[str, Any], tmp_path: Path) -> None:
    settings = read(file_of(tmp_path, content))
    app = create_app(settings)
    freeze(app.state.chain)
    with TestClient(app) as client:
        assert ask(client, "/tickets", {"text": "a question"}).json()["output"]["answer"] == "a"
        for i in range(2):
            assert ask(client, "/team/reviews", {"body": f"b {i}"}).json()["output"]["answer"] == "b"
        assert ask(client, "/team/reviews", {"text": "b"}).status_code == 422, "its data has another key"
        states = {path: client.get(f"{path}/budget", headers=bearer("shop")).json() for path in PATHS}
        left = {
            path: {state["name"]: {name: line["remaining"] for name, line in state["lines"].items()}}
            for path, state in states.items()
        }
        of_all = {"all": {"tickets": 29, "team/reviews": 18}}
        assert left == (
            {"/tickets": {"tickets": {"vote-em": 29}}, "/team/reviews": {"team/reviews": {"vote-em": 18}}}
            if content is OWN
            else {"/tickets": of_all, "/team/reviews": of_all}
        )
        assert client.get("/team/reviews/history", headers=bearer("shop")).json()["total"] == 2 + (content is COMMON)
        said = {"ready": True, **{path: {"store": True, "ledger": True, "model": True} for path in PATHS}}
        assert (client.get("/health").json(), client.get("/ready").json()) == ({"alive": True}, said)
        text = client.get("/metrics", headers=bearer("operator")).text
        for budget, lines in {**left["/tickets"], **left["/team/reviews"]}.items():
            for line, number in lines.items():
                assert f'dpicl_line_left{{budget="{budget}",line="{line}",unit="releases"}} {number}.0' in text
        assert "<h1>The &lt;desk&gt;</h1>" in client.get("/tickets").text
        assert '"inputKey": "body"' in client.get("/team/reviews").text
        listed = client.get("/").text
        assert '<a href="/tickets">The &lt;desk&gt;</a>' in listed
        assert '<a href="/team/reviews">team/reviews</a>' in listed
        assert "/team/reviews/stream" in client.get("/openapi.json").json()["paths"]


def test_a_path_is_open_to_its_callers_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, ACCESS)
    with TestClient(create_app(read(file_of(tmp_path, OWN)))) as client:
        for path in ("invoke", "stream", "batch"):
            body = {"input": {"body": "b"}, "inputs": [{"body": "b"}]}
            refused = client.post(f"/team/reviews/{path}", json=body, headers=bearer("desk"))
            assert (refused.status_code, refused.json()["error"]) == (403, "Forbidden")
        for path in ("budget", "history"):
            assert client.get(f"/team/reviews/{path}", headers=bearer("desk")).status_code == 403
        assert 'principal="desk" error="Forbidden"' in LogLines().format(caplog.records[-1]), "the log says who it was"
        assert client.get("/team/reviews/budget").status_code == 401, "who is nobody is told so"
        assert ask(client, "/tickets", {"text": "a"}, "desk").status_code == 200
        assert client.get("/team/reviews/budget", headers=bearer("shop")).json()["lines"]["vote-em"]["spent"] == 0


def test_slots_are_those_of_the_server(tmp_path: Path) -> None:
    def there() -> int:
        return sum(type(each) is Slots for each in gc.get_objects())

    before = there()
    app = create_app(read(file_of(tmp_path, OWN)))
    assert (there() - before, app.title) == (1, "Private answers")


def test_bad_records_of_all_releases_are_told_before_anything_is_embedded(tmp_path: Path) -> None:
    settings = read(file_of(tmp_path, OWN))
    before = sorted(tmp_path.iterdir())
    (tmp_path / "reviews.jsonl").write_text('{"body": "CANARY", "label": "c"}')
    with pytest.raises(InvalidRecords, match=r"1 of 1 records of 'reviews\.jsonl'"):
        settings.chains()
    (tmp_path / "tickets.jsonl").write_text('{"text": "CANARY", "label": "c", "who": "p"}')
    with pytest.raises(InvalidRecords, match=r"1 of 1 .* 'tickets\.jsonl' .*; 1 of 1 .* 'reviews\.jsonl'") as told:
        settings.chains()
    assert "CANARY" not in str(told.value)
    assert sorted(tmp_path.iterdir()) == before


def test_the_check_shows_all_paths_and_that_two_budgets_are_two_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--config", str(file_of(tmp_path, OWN)), "--check"]) == 0
    out = capsys.readouterr().out
    assert "2 budgets are 2 promises. They add up for whoever is in the data of all: epsilon 600 at delta 2e-05." in out
    assert "http://127.0.0.1:8000/tickets (workers: 1; keys: desk, shop)" in out
    assert "http://127.0.0.1:8000/team/reviews (workers: 1; keys: shop)" in out
    (tmp_path / "budget.db").unlink()
    (tmp_path / "budget.db.witness").unlink()
    assert main(["serve", "--config", str(file_of(tmp_path, COMMON)), "--check"]) == 0
    out = capsys.readouterr().out
    assert "all: epsilon 300 at delta 1e-05, not frozen yet" in out
    assert "promises" not in out


def test_the_command_line_asks_one_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(file_of(tmp_path, COMMON))
    asking = ["answer", "--config", path, "--question", "b question", "--caller", "shop"]
    assert main(asking) == 1
    assert "one of /tickets, /team/reviews" in capsys.readouterr().err
    assert main([*asking, "--path", "/team/reviews", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["private"] == "b"
    assert PrivacyBudget.open("all", f"sqlite:///{tmp_path / 'budget.db'}").spent("team/reviews") == 1
    example = ["--example", '{"text": "x", "label": "a"}', "--question", "a b c"]
    assert main(["rehearse", "--config", path, *example]) == 1
    assert "one of /tickets, /team/reviews" in capsys.readouterr().err


def test_names_without_a_key_in_a_file_of_keys_are_told_by_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys.yaml").write_text(json.dumps(SERVER["keys"]))
    content = changed(OWN, {"budget.quota": {"clinic": 3, "shop": 3}}, {"callers": "clinc"}, keys="keys.yaml")
    assert main(["serve", "--config", str(file_of(tmp_path, content)), "--check"]) == 0
    said = capsys.readouterr()
    for name in ("clinic", "clinc"):
        assert f"warning: no key named {name} in keys.yaml now" in said.out
    assert "no key named shop" not in said.out
    for number, path in enumerate(PATHS, 1):
        assert f"opening {path}, {number} of 2" in said.err
    content["server"] = {"log_format": "json"}
    assert main(["serve", "--config", str(file_of(tmp_path, content)), "--check"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    steps = [
        f"{step} {path}" for step in ("reading", "opening") for path in ("/tickets, 1 of 2", "/team/reviews, 2 of 2")
    ]
    assert [line["message"] for line in lines] == steps
    assert all({"time", "level"} <= line.keys() for line in lines)


def test_one_caller_may_stand_without_a_list(tmp_path: Path) -> None:
    assert read(file_of(tmp_path, changed(OWN, {}, {"callers": "desk"}))).served[1].callers == ["desk"]
    assert told(changed(OWN, {}, {"callers": "dsk"}), tmp_path).keys() == {"releases[1].callers"}


def test_a_field_in_the_wrong_section_is_shown_its_own(tmp_path: Path) -> None:
    found = told(changed(OWN, {"skip_bad": True, "budget.calls": 20}, {"store.details": True}), tmp_path)
    assert {place: words.partition("; ")[2] for place, words in found.items()} == {
        "releases[0].skip_bad": "there is store.skip_bad",
        "releases[0].budget.calls": "there is selector.calls",
        "releases[1].store.details": "there is release.details",
    }


# -- mistakes ----------------------------------------------------------------------------------------------------------


def told(content: Any, folder: Path) -> dict[str, str]:
    path = file_of(folder, content)
    before = sorted(folder.iterdir())
    with pytest.raises(InvalidConfiguration) as caught:
        read(path)
    assert sorted(folder.iterdir()) == before
    return dict(caught.value.mistakes)


def changed(base: dict[str, Any], first: dict[str, Any], second: dict[str, Any], **more: Any) -> dict[str, Any]:
    one, other = base["releases"]
    return {**base, "releases": [merged(one, first), merged(other, second)], **more}


def test_all_mistakes_of_all_releases_are_told_at_once(tmp_path: Path) -> None:
    first = {"budget.epsilon": -1, "release.labels": ["a"], "store.data": "no.jsonl", "path": "tickets"}
    second = {"selector": {"members": 1}, "release.kind": "label_vote", "callers": ["shop", "nobody"], "folder": "/"}
    server = {"path": "/answer", "cors": ["https://app.example.com/"]}
    found = told(changed(OWN, first, second, server=server, keys={"shop": 3}), tmp_path)
    assert found.keys() == {
        "releases[0].budget.epsilon", "releases[0].release.labels", "releases[0].store.data", "releases[0].path",
        "releases[1].selector.members", "releases[1].release.kind", "releases[1].callers[1]", "releases[1].folder",
        "server.path", "server.cors[0]", "keys.shop",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "place", "words"),
    [
        (changed(OWN, {}, {"path": "/tickets"}), "releases[0].path", "a path of its own"),
        (changed(OWN, {}, {"path": "/tickets/budget"}), "releases[1].path", "none below another"),
        (changed(OWN, {}, {"store.data": "tickets.jsonl"}), "releases[1].store.file", "a file of its own"),
        (changed(OWN, {"path": "/ready"}, {}), "releases[0].path", "health"),
        (changed(OWN, {"budget.name": "x"}, {"budget.name": "x"}), "releases[1].budget.name", "one budget beside"),
        (changed(OWN, {"budget.name": "team/reviews"}, {}), "releases[1].budget.name", "one budget beside"),
        (changed(OWN, {"budget": None}, {}), "releases[0]", "missing: budget"),
        (changed(OWN, {"budget.releases": {"tickets": 3}}, {}), "releases[0].budget.releases", "a number"),
        ({**VOTE, "budget": {**BUDGET, "releases": {"vote": 3}}}, "budget.releases", "a number"),
        ({**OWN, "budget": COMMON["budget"]}, "server.yaml", "leave out budget"),
        ({**COMMON, "budget": {**BUDGET, "releases": 30}}, "budget.releases", "tickets, team/reviews"),
        (changed(COMMON, {"path": "/other"}, {}), "budget.releases", "other, team/reviews"),
        ({**COMMON, "budget": {**COMMON["budget"], "tickets": True}}, "budget.tickets", "left out"),
        ({**OWN, "store": VOTE["store"]}, "server.yaml", "leave out store"),
        ({**OWN, "releases": []}, "releases", "1"),
        ({**OWN, "releases": {"/tickets": {}}}, "releases", "list"),
        ({**OWN, "releases": ["/tickets"]}, "releases[0]", ""),
    ],
)
def test_what_cannot_work_together_is_told_at_its_place(
    content: dict[str, Any], place: str, words: str, tmp_path: Path
) -> None:
    assert words in told(content, tmp_path)[place]


def test_a_secret_is_filled_in_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEDGER", "sqlite:///secret.db")
    content = changed(OWN, {"budget.ledger": "${LEDGER}"}, {"budget.ledger": {"env": "LEDGER"}})
    assert [each.budget.ledger for each in read(file_of(tmp_path, content)).served] == ["sqlite:///secret.db"] * 2  # type: ignore[union-attr]
    monkeypatch.delenv("LEDGER")
    assert told(content, tmp_path).keys() == {"releases[0].budget.ledger", "releases[1].budget.ledger"}


# -- web pages elsewhere -----------------------------------------------------------------------------------------------

APP = "https://app.example.com"


def test_a_page_of_a_listed_origin_may_ask_and_read_every_error(tmp_path: Path) -> None:
    budget = {"budget.releases": 1, "budget.replay": False}
    content = merged({**VOTE, **SERVER}, {**budget, "server.cors": [APP], "server.max_body_bytes": 200})
    with TestClient(create_app(read(file_of(tmp_path, content))), raise_server_exceptions=False) as client:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,mcp-protocol-version",
        }
        allowed = client.options("/answer/invoke", headers={"origin": APP, **asked})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == APP
        assert "Authorization" in allowed.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in allowed.headers
        seen = []
        for body, headers in (
            ({"input": {"text": "a"}}, bearer("shop")),
            ({"input": {"text": "b"}}, bearer("shop")),
            ({"input": {"text": "b"}}, {}),
            ({"input": {"text": "b" * 300}}, bearer("shop")),
            ({"input": {}}, bearer("shop")),
        ):
            response = client.post("/answer/invoke", json=body, headers={"origin": APP, **headers})
            assert response.headers["access-control-allow-origin"] == APP
            assert "Retry-After" in response.headers["access-control-expose-headers"]
            seen.append(response.status_code)
        assert seen == [200, 429, 401, 413, 422]
        for origin in (
            "https://app.example.com.evil.org",
            "http://app.example.com",
            "null",
            "https://app.example.com:444",
        ):
            assert client.options("/answer/invoke", headers={"origin": origin, **asked}).status_code == 400
            refused = client.post("/answer/invoke", json={"input": {"text": "a"}}, headers={"origin": origin})
            assert "access-control-allow-origin" not in refused.headers


def test_an_error_that_nobody_foresaw_can_be_read_too(tmp_path: Path) -> None:
    app = create_app(read(file_of(tmp_path, merged(VOTE, {"server.cors": [APP]}))))

    async def broken() -> None:
        raise RuntimeError

    app.add_api_route("/broken", broken)
    with TestClient(app, raise_server_exceptions=False) as client:
        response = client.get("/broken", headers={"origin": APP})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (500, APP)


@pytest.mark.parametrize(
    "origin", ["*", "https://*.example.com", "app.example.com", f"{APP}/", f"{APP}/x", "null", APP.upper()]
)
def test_no_origin_is_a_pattern(origin: str, tmp_path: Path) -> None:
    assert "https://app.example.com" in told(merged(VOTE, {"server.cors": [origin]}), tmp_path)["server.cors[0]"]


def test_the_only_release_has_no_other_path(tmp_path: Path) -> None:
    settings = read(file_of(tmp_path, VOTE))
    assert settings.at(None).path == settings.at("/answer").path == "/answer"
    with pytest.raises(InvalidParameter, match="one of /answer"):
        settings.at("/other")
