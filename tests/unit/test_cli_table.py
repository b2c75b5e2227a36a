"""``dpicl table``: released once, then done; what it shows, and what it refuses before a ledger is made."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import PrivacyBudget, PrivateTable
from langchain_dpicl.cli import main

SECRET = "CANARY-mrs-alder"
TOPICS = ["Vaults", "Old Mill", "Nowhere"]
COLUMNS = {"price": ["cheap", "dear"], "kind": ["pub", "zoo"]}


@pytest.fixture
def data(tmp_path: Path, unthinking: None) -> Path:
    """A file of 120 records of 60 owners; the Vaults are cheap, and Old Mill is dear."""
    rows = [
        {"text": f"{TOPICS[i % 2]} was {COLUMNS['price'][i % 2]}: a pub. {SECRET} {i}", "who": f"p{i // 2}"}
        for i in range(120)
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


COMMAND = [*"table --data data.jsonl --topics".split(), ",".join(TOPICS), *"--epsilon 5 --output t.json".split()]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("read", [(), ("--read", "named"), ("--read", "similar", "--threshold", "-1")])
def test_a_table_is_released_once_and_the_same_command_is_done(read: tuple[str, ...], data: Path, capsys: Any) -> None:
    command = [*COMMAND, "--values", "cheap,dear", "--owner-key", "who", "--report", "r.json", *read]
    code, out, _ = run(capsys, *command, "--json")
    assert code == 0
    facts = json.loads(out)
    table = PrivateTable.load("t.json")
    assert facts["receipt"] == table.receipt
    assert (facts["receipt"]["budget"], facts["epsilon"], facts["sigma"]) == ("data-table", 5.0, table.sigma)
    assert facts["known"] + facts["not_known"] == len(facts["answers"]) == 3
    assert json.loads(Path("r.json").read_text()) == {"records": 120, "silent": 0}
    if "similar" not in read:
        # 60 owners add .7 to each of two cells: 42, above a margin's bar of 3.3 by 40 sigma
        assert [each["value"] for each in facts["answers"][:2]] == ["cheap", "dear"]
        assert table.counts[2].max() < 10  # nobody names it; noise of sigma .8 passes with probability 1e-35
    assert not [path for path in Path().glob("t.json*") if SECRET.encode() in path.read_bytes()]
    code, out, _ = run(capsys, *command)
    assert (code, out.startswith("t.json is done: nothing was charged")) == (0, True)
    assert "0 tables left" in out
    code, out, _ = run(capsys, *command, "--json")
    assert json.loads(out)["answers"] == facts["answers"]
    assert PrivacyBudget.open("data-table").spent() == 1


def test_names_come_from_files_and_a_picture_is_drawn_now_or_later(data: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    Path("topics.txt").write_text("\n".join(TOPICS) + "\n\n")
    Path("values.json").write_text(json.dumps(COLUMNS))
    command = [*COMMAND, "--topics", "@topics.txt", "--values", "@values.json", "--owners", "60"]
    code, out, err = run(capsys, *command, "--picture", "t.png")
    assert code == 0, err
    assert "Vaults, price: cheap." in out
    assert "of 6 answers are known; for the others noise may have decided." in out
    first = Path("t.png").read_bytes()
    Path("t.png").unlink()
    assert run(capsys, *command, "--picture", "t.png")[1].startswith("t.json is done")
    assert Path("t.png").read_bytes() == first
    code, _, err = run(capsys, *command, "--picture", "nowhere/t.png")
    assert (code, "--picture='nowhere/t.png'" in err) == (1, True)
    table = PrivateTable.load("t.json")
    assert (list(table.topics), {name: list(each) for name, each in table.columns.items()}) == (TOPICS, COLUMNS)


def test_several_tables_are_one_promise_and_a_file_of_another_is_refused(data: Path, capsys: Any) -> None:
    command = [*COMMAND, "--values", "cheap,dear", "--tables", "4"]
    code, _, err = run(capsys, *command)
    assert (code, "--name" in err) == (1, True)
    command += ["--name", "venues"]
    for number in (1, 2):
        code, out, _ = run(capsys, *command, "--output", f"{number}.json", "--json")
        assert json.loads(out)["receipt"]["remaining"] == 4 - number
    others = [(("--values", "dear,cheap"), "another release"), (("--name", "x"), "promise")]
    os.utime("data.jsonl", (2e9, 2e9))
    for more, said in [*others, ((), "older than the data")]:
        code, _, err = run(capsys, *command, "--output", "2.json", *more)
        assert (code, said in err) == (1, True), err
    assert PrivacyBudget.open("venues").spent() == 2


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--epsilon -1", "--epsilon"),
        ("--topics a,A", "--topics[1]"),
        ("--topics @none.txt", "--topics"),
        ("--values @none.json", "--values"),
        ("--values @bad.json", "--values"),
        ("--values @three.json", "--values"),
        ("--values x,,y", "--values[1]"),
        ('--values {"price":["cheap"]}', "--values"),
        ("--values three.json", "--values"),
        ("--output nowhere/t.json", "--output"),
        ("--output data.jsonl", "--output"),
        ("--threshold .5", "--threshold"),
        ("--read similar", "--threshold"),
        ("--at-most 0", "--at-most"),
        ("--records-per-owner 0", "--records-per-owner"),
        ("--owners 0", "--owners"),
        ("--tables 0", ""),
        ("--delta 2", "--delta"),
    ],
)
def test_a_table_that_is_refused_makes_no_ledger_and_no_file(more: str, named: str, data: Path, capsys: Any) -> None:
    """But the store beside the data: no text is embedded again for the next one."""
    Path("bad.json").write_text("{")
    Path("three.json").write_text("3")
    before = set(Path().rglob("*"))
    code, _, err = run(capsys, *COMMAND, "--values", "cheap,dear", *more.split())
    assert (code, named in err, SECRET in err) == (1, True, False), err
    made = set(Path().rglob("*")) - before
    assert all(path.name.startswith("data.jsonl.store") for path in made)
