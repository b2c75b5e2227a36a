"""``dpicl evaluate`` on the embedded model: both readers say the same, and a whole run leaves its results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.cli import main
from langchain_dpicl.decoding.answer import Writer
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.model import Demonstration
from langchain_dpicl.lab.evaluation.batches import Batches, label_reader, text_writer
from langchain_dpicl.lab.evaluation.studies import chain_reader
from langchain_dpicl.lab.evaluation.tasks import ClassificationTask, task
from langchain_dpicl.local import local_llm, model_path

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "smollm2-135m-instruct"
GOOD, BAD = ("witty", "warm", "gripping", "lovely", "bright"), ("dull", "cold", "clumsy", "tired", "loud")
KINDS = ("film", "novel", "play", "song")
REVIEWS = [
    {"text": f"a {word} {kind}", "label": label}
    for words, label in ((GOOD, "Positive"), (BAD, "Negative"))
    for word in words
    for kind in KINDS
]


def test_reading_in_batches_says_what_the_chain_says() -> None:
    """Three queries after no, one and several examples.

    A batch and a server compute with other precisions: a label's share may lie a twentieth apart, and a label whose
    lead is smaller may change. Examples move shares further than that, so a mixed-up prompt is found.
    """
    sst2 = task("sst2")
    assert isinstance(sst2, ClassificationTask)
    pairs = [(row["text"], row["label"]) for row in REVIEWS]
    examples = [[], pairs[:1], [pairs[3], pairs[30]], pairs[10:30:5]]
    batch = label_reader(TransformersLogits(MODEL, threads=1), sst2.labels, sst2.shape)
    chain = chain_reader(local_llm(MODEL, threads=1), sst2)
    for query in ("a witty, seductive movie", "a boring mess", "the music is loud"):
        wide, exact = batch(examples, query), chain(examples, query)
        assert wide.shape == exact.shape == (4, 2)
        assert exact.any(axis=1).all(), "no prompt failed"
        shares = [scores / scores.sum(axis=1, keepdims=True) for scores in (wide, exact)]
        assert np.abs(shares[0] - shares[1]).max() < 0.05
        assert np.ptp(shares[1][:, 0]) > 0.15, "what the prompt holds moves the shares"
        is_clear = np.abs(np.diff(shares[1], axis=1))[:, 0] > 0.1
        assert is_clear.any()
        assert wide.argmax(axis=1)[is_clear].tolist() == exact.argmax(axis=1)[is_clear].tolist()


def test_texts_written_in_batches_are_those_of_one_token_after_the_other() -> None:
    """Greedy texts of different lengths after no, one and several examples, two of them equal; and drawn ones."""
    e2e = task("e2e")
    pairs = [(f"name[The {name}], eatType[pub], area[riverside]", f"The {name} is a pub.") for name in GOOD]
    examples = [[], pairs[:1], pairs, pairs[:1], [(asked, f"{said} It is by the river.") for asked, said in pairs]]
    query = "name[The Mill], eatType[restaurant], area[city centre]"
    model = TransformersLogits(MODEL, threads=1)
    write = text_writer(model, 12, ("\n",))
    question = e2e.shape.ask(query)
    texts = write([(e2e.shape.prefix(pairs), question) for pairs in examples], 0.0)
    assert texts[1] == texts[3]
    assert len({*texts}) > 2
    for pairs, text in zip(examples, texts, strict=True):
        prefix = e2e.shape.prefix(pairs).removesuffix("\n")
        asked = e2e.shape.ask(query)
        shown = [Demonstration("public", prefix)] if prefix else []
        session = model.session(f"\n{asked}" if prefix else asked, shown, steps=12)
        writer = Writer(model, ("\n",))
        while not writer.ended and len(writer.tokens) < 12:
            writer.add(int(session.logits([0] if prefix else [], writer.tokens)[-1].argmax()))
        writer.finish()
        session.close()
        assert writer.text.strip() == text
    drawn = write([("", question)] * 6, 0.9)
    assert len({*drawn}) > 1, "six equal texts of twelve tokens each"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each batch has that is read."""
    actual, sizes = Batches._read, list[int]()

    def spy(self: Batches, tokens: Sequence[Any], *rest: Any) -> Any:
        sizes.append(len(tokens))
        return actual(self, tokens, *rest)

    monkeypatch.setattr(Batches, "_read", spy)
    return sizes


def test_equal_prompts_are_read_once_and_written_as_others_are(read: list[int]) -> None:
    write = text_writer(TransformersLogits(MODEL, threads=1), 12, ("\n",))
    prompts = [("", "The colour of the sky is"), ("", "Once upon a time")]
    alone = [write([prompt], 0.0)[0] for prompt in prompts]
    read.clear()
    assert write([prompts[i] for i in (0, 1, 1, 0, 0)], 0.0) == [alone[i] for i in (0, 1, 1, 0, 0)]
    assert read == [2]


def test_a_prompt_that_comes_again_is_read_once(read: list[int]) -> None:
    batches = Batches(TransformersLogits(MODEL, threads=1))
    prompts = [batches.prompt(shown, "The sky is") for shown in ("", "Grass is green.\n")]
    different = batches.rows(prompts)
    read.clear()
    found = batches.rows([prompts[i] for i in (1, 0, 0, 1, 1)])
    assert read == [2]
    assert np.array_equal(found, [different[i] for i in (1, 0, 0, 1, 1)])


def test_a_whole_run_leaves_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queries = [{"text": t, "label": la} for t, la in (("a witty story", "Positive"), ("a dull story", "Negative"))]
    queries.append({"text": "a lovely evening", "label": "Positive"})
    for name, records in (("train", REVIEWS), ("test", queries)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    folder = tmp_path / "out"
    given = ["evaluate", "--task", "sst2", "--data", str(tmp_path), "--queries", "3", "--output", str(folder), "--json"]
    model = model_path(MODEL)
    given += ["--in-batches", "--threads", "1", "--dtype", "bfloat16", "--model", str(model), "--heads", "1"]
    given += "--members 4 --shots 1 --releases 20 --delta 1e-3 --epsilon 1 8 --draws 2 --vary members=2,4".split()
    assert main(given) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["settings"]["model"] == model.name
    assert len(REVIEWS) == results["settings"]["owners"] == 40
    found = {(s["method"], s["epsilon"]): s for s in results["scores"] if not s["study"]}
    assert set(found) >= {("zero-shot", None), ("vote", None), ("vote", 1.0), ("vote", 8.0)}
    assert set(found) >= {("head", None), ("head", 1.0), ("head", 8.0)}, "on the embedded model's vectors"
    assert [choice["epsilon"] for choice in results["choices"]] == [1.0, 8.0]
    assert all(0 <= s["values"]["accuracy"]["mean"] <= 100 and s["queries"] == 3 for s in results["scores"])
    sharpness = [found["vote", epsilon]["facts"]["eps0"] for epsilon in (1.0, 8.0)]
    assert sharpness[0] < sharpness[1], "the exponential vote is less noisy with more epsilon"
    made = {"labels-4x1.jsonl", "vectors.npz", "table.md", "accuracy.png", "cost.png"}
    assert {path.name for path in folder.iterdir()} >= made
    kept = (folder / "labels-4x1.jsonl").read_bytes()
    assert kept.count(b"\n") == 1 + 1 + 1 + 3, "settings, sample, N/A, queries"
    assert main(given) == 0
    assert (folder / "labels-4x1.jsonl").read_bytes() == kept, "nothing was asked again"
