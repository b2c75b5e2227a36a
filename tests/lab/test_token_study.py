"""The study of private decoding: rows as the sampler reads them, every method, and going on where it was stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_methods import Paired
from token_study import main

from langchain_dpicl.decoding.answer import Settings
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.model import Demonstration, DemonstrationTemplate
from langchain_dpicl.lab.evaluation import batches

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

COLOURS = ("red", "blue", "green", "yellow", "black", "white")
FRUITS = ("apple", "plum", "pear", "lemon", "grape", "melon", "fig", "peach")
RECORDS = [{"input": f"{c}, {f}", "output": f"The {f} is {c}."} for c in COLOURS for f in FRUITS]


@pytest.fixture(scope="module")
def model() -> TransformersLogits:
    return TransformersLogits("smollm2-135m-instruct", threads=1)


def test_rows_read_in_batches_are_those_that_the_sampler_reads(model: TransformersLogits) -> None:
    read, network = batches.Batches(model), model._loaded
    asked = "Data: pink, cherry\nDescription:"
    shown = [f"Data: {row['input']}\nDescription: {row['output']}\n\n" for row in RECORDS[:30]]
    shown[7] *= 3
    released = network.tokens(" The cherry")
    session = model.session(asked, [Demonstration(i, text) for i, text in enumerate(shown)], steps=9)
    alone = session.logits(range(0, 30, 7), released)
    session.close()
    texts = [(), *((text,) for text in shown)]
    whole = read.rows([(pieces, (*network.tokens(asked), *released)) for pieces in texts])
    parts = read.rows([((*pieces, asked), tuple(released)) for pieces in texts])
    for batch in (whole, parts):
        assert np.abs(np.array([batch[0], *batch[1::7]]) - alone).max() < 0.05


def test_bounds_decoded_together_see_what_each_sees_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public and private scores are multiplied, so that the likeliest token is drawn and the draws do not matter."""
    decoder = batches.Decoder(
        "smollm2-135m-instruct",
        DemonstrationTemplate("Data: {input}\nDescription: {output}\n\n", "Data: {input}\nDescription:"),
        RECORDS,
        Settings(8, 4, 20, shots=300.0, temperature=1.0, cap=600.0, stop=("\n",)),
        1e-3,
        threads=1,
        draws=partial(Paired, 0),
    )
    asked = ["pink, cherry", "orange, grape", "grey, kiwi"]
    bounds, numbers = [batches.NO_BOUND, 0.01, batches.NO_BOUND], [20, 20, 1]
    all_three = decoder.texts("together", asked, bounds, top_k=numbers)
    shown = list(decoder._batches.known)
    assert {len(pieces) for pieces in shown} == {1}, "no question after a demonstration stays"
    assert len(shown) > len(asked), "demonstrations stay"
    monkeypatch.setattr(batches, "_KEPT", 0)
    for bound, top_k, texts in zip(bounds, numbers, all_three, strict=True):
        decoder.settings = replace(decoder.settings, top_k=top_k)
        assert texts == decoder.texts("alone", asked, [bound])[0]
    assert all_three[0] not in all_three[1:], "one candidate is the public one, whatever the bound"
    assert not decoder._batches.known


def test_a_study_answers_with_every_method_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(name: str, records: list[dict[str, Any]]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(tmp_path / name)

    folder = tmp_path / "study"
    options = ["--data", rows("data.jsonl", RECORDS[2:]), "--test", rows("test.jsonl", RECORDS[:2])]
    options += ["--inputs", rows("inputs.jsonl", [{"input": "pink, cherry"}]), "--output", str(folder), "--json"]
    options += ["--epsilon", "3", "--max-tokens", "4", "--min-tokens", "2", "--shots", "2", "--threads", "1"]
    assert main([*options, "--only", "online"]) == 0
    (first,) = json.loads(capsys.readouterr().out)["methods"]
    assert (first["method"], first["queries"]) == ("online, epsilon 3", 2)
    before = (folder / "methods" / "online--epsilon-3.json").read_bytes()
    assert main(options) == 0
    found = {row["method"]: row for row in json.loads(capsys.readouterr().out)["methods"]}
    assert len(found) == 9
    assert all(0 <= row["rouge_l"] <= 100 for row in found.values())
    assert (folder / "methods" / "online--epsilon-3.json").read_bytes() == before, "what was there is not made again"
    assert (folder / "rouge.png").stat().st_size > 10_000
    assert (folder / "weights.png").stat().st_size > 10_000
    assert "unproved" in (folder / "table.md").read_text()


def test_records_of_another_shape_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    path = str(tmp_path / "rows.jsonl")
    assert main(["--data", path, "--test", path, "--output", str(tmp_path / "study")]) == 1
    assert "records with the texts 'input' and 'output'" in capsys.readouterr().err
