"""`dpicl plan` as its tests call it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from langchain_dpicl.cli import parse


def run(line: str) -> int:
    options = parse(line.split())
    return int(options.run(options))


def answer(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(f"{line} --json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
