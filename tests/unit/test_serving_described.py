"""The OpenAPI document of a server: one name for each type and operation, for generators of clients."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from serving_files import ACCESS, VOTE, file_of, head_in, merged, models  # noqa: F401

from langchain_dpicl import add_dp_routes
from langchain_dpicl.serving.app import create_app
from langchain_dpicl.serving.config import read

FIELDS = {"desk": {"choices": ["a", "b"]}, "days": {"low": 0, "high": 30}}
KINDS: dict[str, Any] = {
    "/tickets": {"kind": "label-vote", "labels": ["a", "b"]},
    "/Tickets": {"kind": "label-vote", "labels": ["a", "b"], "details": True},
    "/team/days": {"kind": "median", "low": 0, "high": 30},
    "/a-b": {"kind": "structured", "fields": FIELDS},
    "/a.b": {"kind": "structured", "fields": FIELDS},
}


def served(folder: Path) -> Any:
    """A server of four kinds: votes of labels, a median, structured answers and two heads."""
    rows = {"tickets": "a", "days": 3, "fields": json.dumps({"desk": "a", "days": 3})}
    for name, output in rows.items():
        lines = [json.dumps({"text": f"text {i}", "label": output, "who": f"p{i}"}) for i in range(60)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    data = {"label-vote": "tickets", "median": "days", "structured": "fields"}
    releases: list[Any] = [
        {
            "path": path,
            "store": {"data": f"{data[about['kind']]}.jsonl", "owner_key": "who", "file": f"{number}.store"},
            "release": about,
            "selector": {"calls": 20},
            "budget": {**VOTE["budget"], "name": str(number)},
        }
        for number, (path, about) in enumerate(KINDS.items())
    ]
    releases += [{"path": path, "head": head_in(folder, "head.npz")} for path in ("/desk", "/help-desk")]
    return create_app(read(file_of(folder, {"releases": releases, **ACCESS})))


def check_names(document: Any) -> dict[str, Any]:
    """See that names, titles and ids are unique, also to who writes them in another case, and return the types."""
    types: dict[str, Any] = document["components"]["schemas"]
    assert not [name for name in types if "langchain" in name.lower()]
    assert not [name for name, about in types.items() if "$ref" in about or "anyOf" in about]
    ids = [each["operationId"] for item in document["paths"].values() for each in item.values()]
    for names in (list(types), [about.get("title", name) for name, about in types.items()], ids):
        words = [re.sub(r"\W|_", "", name).lower() for name in names]
        assert len(set(words)) == len(words)
    return types


def test_each_type_of_a_server_of_four_kinds_has_one_title_and_the_name_of_its_path(tmp_path: Path) -> None:
    document = served(tmp_path).openapi()
    types = check_names(document)
    parts = {f"{name}{part}" for name in ("Tickets", "TeamDays", "Desk", "HelpDesk") for part in ("Question", "Answer")}
    assert parts <= types.keys()
    assert types["TicketsResponse"]["properties"]["output"] == {"$ref": "#/components/schemas/TicketsAnswer"}
    assert types["TicketsAnswer"]["properties"]["receipt"] == {"$ref": "#/components/schemas/Receipt"}
    assert types["TeamDaysAnswer"]["properties"]["answer"]["type"] == "integer"
    for name in ("Tickets", "Desk"):
        assert types[f"{name}Question"]["additionalProperties"] is False, "the name changes nothing else"
    assert document["paths"]["/team/days/input_schema"]["get"]["operationId"] == "team_days_input_schema"


def test_one_path_below_two_prefixes_has_two_names(tmp_path: Path) -> None:
    app = FastAPI()
    for prefix, has_details in (("/v1", True), ("/v2", False)):
        release = {"kind": "label-vote", "labels": ["a", "b"], "details": has_details}
        router = APIRouter()
        chain = read(file_of(tmp_path, merged(VOTE, {"release": release}))).build()
        add_dp_routes(router, chain, "/ask", principal_from=lambda _: "alice")
        app.include_router(router, prefix=prefix)
    types = check_names(app.openapi())
    assert len([name for name in types if "AskAnswer" in name]) == 2
    assert "AskQuestion" in types, "it is the same for both"
