"""Every error of the command line names the option, whatever the parameter behind it is called."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.cli import COMMANDS, main, parser_of


@pytest.fixture
def data(unthinking: None) -> Path:
    path = Path("data.jsonl")
    path.write_text("\n".join(json.dumps({"text": f"text {i}", "label": "ab"[i % 2]}) for i in range(200)))
    return path


BASES = {
    "check-data": "check-data data.jsonl",
    "demo": "demo --held-out -1",
    "answer": "answer --data data.jsonl --labels a,b --epsilon 30 --releases 30 --question which",
    "fit": "fit --data data.jsonl --labels a,b --epsilon 30 --output h.npz",
    "table": "table --data data.jsonl --topics text,note --values a,b --epsilon 30 --output t.json",
    "topics": "topics --data data.jsonl --epsilon 30 --output t.json",
    "synthesize": "synthesize --data data.jsonl --inputs data.jsonl --epsilon 3 --output d.jsonl --shots 1",
    "advise": "advise --owners 800 --labels 3 --questions 10 --epsilon -1",
    "plan": "plan --epsilon 3 --delta 1e-5 --releases 10 --owners 1000 --calls 20",
    "report": "report --ledger sqlite:///none.db",
    "forget": "forget --store s.db --owner x",
    "rehearse": "rehearse --config server.yaml --question which",
    "serve": "serve --config server.yaml --check",
    "mcp": "mcp --config server.yaml",
    "upgrade": "upgrade nowhere",
    "evaluate": "evaluate --task sst2 --data data.jsonl --test data.jsonl --method head --output out",
    "audit": "audit --trials 10 --members 5",
}
ACTIONS = {
    "show": "",
    "history": "",
    "receipt": " x:y:1",
    "export": "",
    "tickets": " --name x",
    "remove": " --name x",
    "recover": "",
}
BASES |= {f"budget {action}": f"budget {action}{more}" for action, more in ACTIONS.items()}
BAD = ["-1", "nan", ""]


@pytest.mark.filterwarnings("ignore::langchain_dpicl.errors.PrivacyWarning")
@pytest.mark.parametrize("command", [*BASES])
def test_a_bad_value_is_refused_by_the_name_of_its_option(command: str, data: Path, capsys: Any) -> None:
    """Of every option. A value may be a good one; no error names a parameter of Python's."""
    base = BASES[command].split()
    parser: Any = parser_of(base)
    for word in command.split():
        parser = next(each.choices[word] for each in parser._actions if isinstance(each.choices, dict))
    told = []
    for action in parser._actions:
        if not action.option_strings or action.nargs == 0:
            continue
        for bad in BAD:
            try:
                main([*base, f"{action.option_strings[0]}={bad}"])
            except SystemExit:
                assert action.option_strings[0] in capsys.readouterr().err
            if bad:  # notes, which a later run would take for something else
                Path(bad).unlink(missing_ok=True)
            told += re.findall(r"(\S+?)=.* is not allowed", capsys.readouterr().err)
    assert {name for name in told if name[:2] != "--"} <= {"PATH_OR_URL", "ID"}


def test_every_command_is_walked() -> None:
    assert COMMANDS.keys() <= {command.split()[0] for command in BASES}
