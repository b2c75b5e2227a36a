"""`serving.tools` in process: what each kind looks like as a tool, cancelled calls, and what a client can hear."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from channels import (
    LABELS,
    QUESTION,
    Clinic,
    Tally,
    a_member,
    found_in,
    hear,
    naive,
    sealed_release,
    secret_store,
)
from ears import Spy
from langchain_core.runnables import RunnableLambda
from mcp import types
from mcp.shared.memory import create_connected_server_and_client_session as connected
from pages import blocks
from serving_files import ACCESS, VOTE, ask, file_of, head_in, merged
from serving_files import models as models

from langchain_dpicl import InvalidParameter, PrivacyBudget
from langchain_dpicl.cli import main, parse
from langchain_dpicl.serving.app import create_app
from langchain_dpicl.serving.config import ServedRelease, read
from langchain_dpicl.serving.described import word_of
from langchain_dpicl.serving.guards import Slots
from langchain_dpicl.serving.tools import ReleaseTool, tool_server, tools_of

TOPICS = {"kind": "label-vote", "labels": ["a", "b"], "details": True}
GATE = {"calls": 10, "threshold": -1.0, "eligible": 60}
BUDGET = {"epsilon": 300, "delta": 1e-5, "releases": 30}
STORE = VOTE["store"]


def several(folder: Path) -> dict[str, Any]:
    """A server's file with a vote, the owners' own labels, words, and a head."""
    vote = {"path": "/team/reviews", "title": "Good or bad?", "store": STORE, "budget": BUDGET}
    vote |= {"release": VOTE["release"], "selector": VOTE["selector"], "description": "Says a or b."}
    topics = {"path": "/topics", "store": STORE, "release": TOPICS, "selector": GATE, "budget": BUDGET}
    words = {"path": "/words", "store": STORE, "release": {"kind": "joint-em", "k": 2, "domain": ["spray", "inhaler"]}}
    words |= {"selector": VOTE["selector"], "budget": BUDGET, "callers": "mobile"}
    return {"releases": [vote, topics, words, {"path": "/desk", "head": head_in(folder, "head.npz")}], **ACCESS}


@pytest.mark.filterwarnings("ignore::langchain_dpicl.errors.PrivacyWarning")
async def test_each_kind_is_a_tool_whose_answers_fit_its_schema(tmp_path: Path) -> None:
    """The SDK's client checks an answer against the schema that the tool declares."""
    settings = read(file_of(tmp_path, several(tmp_path)))
    server = tool_server(tools_of(settings, settings.chains()), Slots(4), "mobile")
    async with connected(server) as session:
        found = {tool.name: tool for tool in (await session.list_tools()).tools}
        assert set(found) == {"team_reviews", "topics", "words", "desk"}
        assert found["team_reviews"].title == "Good or bad?"
        assert str(found["team_reviews"].description).startswith("Says a or b.\n")
        assert "none costs anything" in str(found["desk"].description)
        for name, tool in found.items():
            text = tool.inputSchema["properties"]["text"]
            assert text["type"] == "string"
            assert tool.inputSchema["required"] == ["text"]
            assert isinstance(tool.outputSchema, dict)
            assert set(tool.outputSchema["required"]) == {"answer", "receipt"}
            answered = await session.call_tool(name, {"text": "a b"})
            assert not answered.isError
            assert json.loads(answered.content[0].text) == answered.structuredContent  # type: ignore[union-attr]
            assert (await session.call_tool(name, {"question": "a b"})).isError
        addresses = {str(each.uri) for each in (await session.list_resources()).resources}
        assert addresses == {
            *(
                f"dpicl://{kind}/{name}"
                for name in ("team_reviews", "topics", "words")
                for kind in ("budget", "receipts")
            ),
            "dpicl://heads/desk",
        }
        (head,) = json.loads((await session.read_resource(types.AnyUrl("dpicl://heads/desk"))).contents[0].text)  # type: ignore[union-attr]
        assert head["labels"] == ["a", "b"]
    stranger = tool_server(tools_of(settings, settings.chains()), Slots(4), "web")
    async with connected(stranger) as session:
        assert "words" not in {tool.name for tool in (await session.list_tools()).tools}
        assert (await session.call_tool("words", {"text": "a b"})).isError


def test_a_server_for_every_address_says_its_names(tmp_path: Path) -> None:
    served = merged(VOTE, {"server": {"mcp": "/mcp", "host": "0.0.0.0"}})
    with pytest.raises(InvalidParameter, match=r"server\.hosts"):
        create_app(read(file_of(tmp_path, served)))
    named = merged(served, {"server.hosts": ["tools.example.com"]})
    assert ask(create_app(read(file_of(tmp_path, named))), {"input": {"text": "a b"}}).status_code == 200


def the_only(chain: Any, caller: str = "alice", slots: Slots | None = None) -> Any:
    served = ServedRelease(path="/ask", chain="own:chain", input_key="input", folder=Path())
    return tool_server([ReleaseTool(served, chain, 10_000)], slots or Slots(4), caller)


def test_the_pages_configuration_and_command_can_be_read(tmp_path: Path) -> None:
    (text,) = blocks("tasks/mcp.md", "yaml", "")
    settings = read(file_of(tmp_path, json.dumps(yaml.safe_load(text.replace("0f1e...", "a" * 64)))))
    assert [word_of(each.path) for each in settings.served] == ["route"]
    (client,) = blocks("tasks/mcp.md", "json", "One person's assistant")
    command = json.loads(client)["mcpServers"]["tickets"]
    options = parse(command["args"])
    assert (command["command"], options.caller, options.http) == ("dpicl", "laptop", None)
    (line,) = re.findall(r"^dpicl (mcp [^#]*)", blocks("tasks/mcp.md", "sh", "Several callers, over HTTP")[0])
    assert parse(line.split()).http == ("127.0.0.1", 8000)


@pytest.mark.parametrize(("page", "title"), [("tasks/mcp.md", ""), ("tasks/server.md", "Without writing code")])
def test_the_pages_configurations_are_worth_their_epsilon_on_250_people(
    page: str, title: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = file_of(tmp_path, blocks(page, "yaml", title)[0].replace("0f1e...", "a" * 64))
    desks = read(path).served[0].release.labels  # type: ignore[union-attr]
    rows = [{"text": f"text {i}", "label": desks[i % len(desks)], "customer": f"p{i}"} for i in range(250)]
    (tmp_path / "tickets.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["serve", "--config", str(path), "--check", "--json"]) == 0
    ((line,),) = (budget["lines"] for budget in json.loads(capsys.readouterr().out)["budgets"])
    assert (line["rate"], line["warning"]) == (pytest.approx(20 / 250), None)


class Gate(Spy):
    """Keeps members waiting."""

    def __init__(self) -> None:
        self.opened = threading.Event()


async def test_a_cancelled_call_keeps_its_charge_and_its_release_ends(sealed_of: Any) -> None:
    gate = Gate()

    def member(values: Any) -> str:
        gate.opened.wait()
        return "Positive"

    release, slots = sealed_of(RunnableLambda(member), return_receipt=True, replay=True), Slots(1)
    async with connected(the_only(release, slots=slots)) as session:
        call = asyncio.create_task(session.call_tool("ask", QUESTION))
        while release.budget.spent() == 0:
            await asyncio.sleep(0.01)
        left = types.CancelledNotification(params=types.CancelledNotificationParams(requestId=session._request_id - 1))
        await session.send_notification(types.ClientNotification(left))
        with pytest.raises(Exception, match="cancelled"):
            await call
        gate.opened.set()
        await slots.finished()
        again = await session.call_tool("ask", QUESTION)
    assert again.structuredContent is not None
    assert again.structuredContent["receipt"]["replayed"]
    assert release.budget.spent() == 1


async def as_a_tool(runnable: Any, told: list[str]) -> None:
    """Everything that a client can ask for."""
    async with connected(the_only(runnable)) as session:
        told.append(repr(await session.list_tools()))
        told.append(repr(await session.call_tool("ask", QUESTION)))
        for each in (await session.list_resources()).resources:
            told.append(repr(await session.read_resource(each.uri)))


@pytest.mark.parametrize("fares", ["success", "one fails", "all fail"])
async def test_no_client_and_no_log_hears_what_is_private(fares: str, budget_of: Callable[..., PrivacyBudget]) -> None:
    assert found_in((await hear(as_a_tool, naive(a_member(Clinic(fares=fares))))).all())
    budget = budget_of(releases=5, epsilon=1000.0)
    heard = await hear(as_a_tool, sealed_release(secret_store(), a_member(Clinic(fares=fares)), Tally(LABELS), budget))
    assert heard.error is None
    assert found_in(heard.all()) == []
    assert budget.spent() == 1
