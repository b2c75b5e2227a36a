"""The membership attack on the small real model: outputs read in batches, and a whole tiny run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from langchain_dpicl.cli import main
from langchain_dpicl.decoding import Demonstration, DemonstrationTemplate, TransformersLogits
from langchain_dpicl.errors import InvalidParameter, InvalidRecords
from langchain_dpicl.lab.audit.membership import LIKELIHOOD, RATIO, TOKENS, auc_bound, known_record, run_membership
from langchain_dpicl.lab.audit.reading import TeacherForcing

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

ROWS = [
    {"input": "cherry, 1921", "output": "Grandmother's orchard fed eleven cousins through one hard winter."},
    {"input": "harbour, 7 pm", "output": "Fog swallowed both lighthouses before the mackerel boats came home."},
    {"input": "violin, maple", "output": "Its back was carved from a bridge beam that the flood had spared."},
    {"input": "comet, green", "output": "Astronomers in Lima named it after the janitor who saw it first."},
    {"input": "bakery, closed", "output": "Somebody still leaves seven warm rolls on Mr Petrov's doorstep."},
    {"input": "chess, move 40", "output": "Quietly she gave away her queen and smiled at the chandelier."},
    {"input": "desert, rain", "output": "Toads dug themselves out of the clay and sang until Thursday."},
    {"input": "museum, room 3", "output": "Napoleon's left glove lies beside a receipt for forty onions."},
    {"input": "train, night", "output": "Between Gdansk and Poznan the conductor read Homer to a sleeping goat."},
]
TEMPLATE = DemonstrationTemplate("Data: {input}\nDescription: {output}\n\n", "Data: {input}\nDescription:")


@pytest.fixture(scope="module")
def model() -> TransformersLogits:
    return TransformersLogits("smollm2-135m-instruct", threads=1)


def test_outputs_read_in_one_pass_are_what_the_sampler_reads_token_by_token(model: TransformersLogits) -> None:
    rows = [*ROWS[:4], {"input": "a " * 30, "output": "short"}]
    known = [known_record(model, TEMPLATE, row, i, 12) for i, row in enumerate(rows)]
    reader, shown = TeacherForcing(model, known), TEMPLATE.show(ROWS[8])
    batch, without = dict(reader.logits(shown, range(5))), dict(reader.logits("", range(5)))
    for i, each in enumerate(known):
        assert batch[i].shape == (len(each.output), model.vocabulary)
        session = model.session(each.asked, [Demonstration("shown", shown)], steps=12)
        for place in sorted({0, len(each.output) // 2, len(each.output) - 1}):
            alone = session.logits([0], each.output[:place])
            assert np.abs(np.stack([without[i][place], batch[i][place]]) - alone).max() < 0.01
        session.close()


def test_a_prompt_gives_its_record_away_and_every_attack_is_reported(model: TransformersLogits) -> None:
    """A prompt that shows a record makes the model copy it: of the 72 pairs of these records the likelihood
    ratio is right in all, by 23 nats at least, so it is right whichever are drawn.

    What a plan leaves of the AUC is not judged here: in two trials a mere guess is right every time once in 36 runs.
    """
    results = run_membership(
        model, ROWS, TEMPLATE, epsilons=[2.0], trials=2, against=5, owners=50, shots=2.0, others=3, max_tokens=8
    )
    found = {(each.name, each.attack): each for each in results}
    assert len(found) == len(results) == 2 + 3 * 3
    assert json.loads(json.dumps([asdict(each) for each in results])) == [asdict(each) for each in results]
    assert found["one-shot prompt, not private", RATIO].auc == 1.0
    assert all((each.trials, each.against) == (2, 5) for each in results)
    assert all(0.0 <= each.low <= each.auc <= each.high <= 1.0 for each in results)
    private = found["epsilon 2", TOKENS]
    assert private.participation == 2.0 / 50
    assert private.range_bound == found["B of epsilon 2, member in every sample", LIKELIHOOD].range_bound
    assert private.bound is not None
    assert 0.5 < private.bound < auc_bound(2.0, 1e-5)
    assert [each.name for each in results if each.bound is not None] == ["epsilon 2"]


def test_a_real_models_limits_are_named(model: TransformersLogits) -> None:
    few = {"trials": 1, "against": 1, "others": 1}
    with pytest.raises(InvalidParameter, match=r"^top_k="):
        run_membership(model, ROWS, TEMPLATE, top_k=10**6, **few)
    with pytest.raises(InvalidParameter, match=r"^max_tokens="):
        run_membership(model, [{"input": "a", "output": "b " * 9000}] * 3, TEMPLATE, **few)
    with pytest.raises(InvalidRecords, match="has no output"):
        run_membership(model, [{"input": "a", "output": ""}] * 3, DemonstrationTemplate("{input}:", "{input}:"), **few)


def test_the_attack_on_labels_runs_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two sets of four records, each in the member's place. No AUC is judged: so few records say nothing."""
    data = tmp_path / "reviews.jsonl"
    records = [{"text": row["output"], "label": ["Positive", "Negative"][i % 2]} for i, row in enumerate(ROWS * 2)]
    data.write_text(
        "".join(json.dumps({**each, "text": f"{i} {each['text']}"}) + "\n" for i, each in enumerate(records))
    )
    given = f"audit --mechanism membership --task sst2 --data {data} --sets 2 --against 3 --owners 50 --epsilon 2"
    own = "--model smollm2-135m-instruct --threads 1 --dtype bfloat16 --json"
    assert main([*given.split(), *own.split()]) == 0
    results = json.loads(capsys.readouterr().out)["membership"]
    assert len(results) == 2 + 3 * 3
    assert {(each["trials"], each["against"]) for each in results} == {(8, 3)}
    assert all(0.0 <= each["low"] <= each["auc"] <= each["high"] <= 1.0 for each in results)
