"""`dpicl plan` as its tests call it."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from langchain_dpicl.cli.plan import add_parser


def run(line: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(line.split())
    return int(args.run(args))


def answer(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(f"{line} --json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
