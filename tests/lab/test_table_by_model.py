"""The study of a table that a model reads: its documents, its readers, and its report. The model is made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import table_by_model
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from table_by_model import COLUMNS, WORDS, Document, by_values, by_words, chosen, facts_of, parsed, reader, total_of

from langchain_dpicl import ExemplarStore, PrivacyBudget, release_table
from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.tables_reading import Domain

NAMES = ("Alpha", "Beta")
SAID = {"yes": "family friendly", "no": "not kid friendly", "cheap": "cheap", "moderate": "moderately priced"}
FIELD = {"yes": "familyFriendly[yes]", "no": "familyFriendly[no]", "cheap": "priceRange[less than £20]"}
FIELD["moderate"] = "priceRange[moderate]"


def record(name: str, families: str, price: str, number: int = 0) -> dict[str, str]:
    fields = f"name[{name}], {FIELD[families]}, {FIELD[price]}"
    return {"input": fields, "output": f"{name}, {number}, is {SAID[families]} and {SAID[price]}."}


def line_of(prompt: Any) -> str:
    """The line of the grammar on the prompt's last review."""
    text = str(getattr(prompt, "text", prompt)).rpartition("Review: ")[2]
    found = []
    for column, values in WORDS.items():
        said = [(phrase, value) for value, phrases in values.items() for phrase in phrases if phrase in text]
        phrase, value = max(said, key=lambda each: len(each[0]), default=("", ""))
        found.append(f'"{phrase}", so {value}' if value and column in COLUMNS else "nothing")
    return f" {found[0]}. Price: {found[1]}."


def test_a_value_counts_if_its_words_are_in_the_text() -> None:
    text = "Alpha is Kid friendly, and rated low."
    assert parsed(text, ' "kid friendly", so yes. Price: nothing.') == {"families": "yes"}
    assert parsed(text, ' nothing. Price: "low prices", so cheap.') == {}
    assert parsed(text, ' "nothing", so no. Price: "rated low", so cheap.') == {"price": "cheap"}
    assert parsed(text, ' "kid friendly", so yes. Pri') == {}


def test_of_a_name_at_most_so_many_documents_have_another_value() -> None:
    """Of the first name most are to welcome families and be cheap, of the second not, and moderate."""
    records = [record(name, families, price) for name in NAMES for families in ("yes", "no") for price in
               ("cheap", "moderate") for _ in range(4)]  # fmt: skip
    documents = chosen(records, 2, 6, 2)
    assert [document.topic for document in documents] == ["Alpha"] * 6 + ["Beta"] * 6
    assert facts_of(documents) == {
        ("Alpha", "families"): "yes", ("Alpha", "price"): "cheap",
        ("Beta", "families"): "no", ("Beta", "price"): "moderate",
    }  # fmt: skip
    assert facts_of([Document("", "Alpha", {"price": "cheap"}), Document("", "Alpha", {"price": "high"})]) == {}


def test_the_readers_read_what_a_release_reads(tmp_path: Path) -> None:
    """At epsilon 1,000 sigma is .11, so noise is above .8 with probability 1e-10, and a cell has 0 or 2.8."""
    both = (("yes", "cheap"), ("no", "moderate"))
    documents = chosen([record(name, *said) for name in NAMES for said in both * 4], 2, 8, 9)
    texts = [document.text for document in documents]
    domain = Domain(NAMES, COLUMNS)
    read = by_values(domain, documents, [parsed(text, line_of(text)) for text in texts])
    words = by_words(NAMES, documents, 4)
    ways: list[tuple[Any, Any]] = [(read, reader(RunnableLambda(line_of), NAMES)), (words, "named")]
    for reading, how in ways:
        store = ExemplarStore.from_texts(
            texts, DeterministicFakeEmbedding(size=2), vectors=np.ones((len(texts), 2), np.float32), progress=False
        )
        ledger = f"sqlite:///{tmp_path}/{reading.phrases}.db"
        budget = PrivacyBudget(1000, 1e-5, {"sum": 1}, ledger=ledger)
        table = release_table(store, NAMES, reading.domain.columns, budget, read=how)
        budget.close()
        assert np.abs(table.counts - total_of(reading) / LATTICE).max() < 0.8
    assert table_by_model.agreement(read, documents)["price"] == {"recall": 100, "precision": 100}
    assert table_by_model.agreement(words, documents)["families"]["recall"] == 100
    assert np.array_equal(table_by_model.table_of(words, total_of(words), 1.0).counts.sum(axis=1) > 8, [True, True])


def test_the_study_reports_every_reader_and_reads_no_document_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Writing:
        def generate(self, prompts: list[str], **settings: Any) -> Any:
            asked.extend(prompts)
            return type("Found", (), {"generations": [[type("One", (), {"text": line_of(each)})] for each in prompts]})

    monkeypatch.setattr(table_by_model, "model", lambda path, threads: Writing())
    data, settings = tmp_path / "data.jsonl", tmp_path / "settings.json"
    many = [record(NAMES[i % 2], *(("yes", "cheap"), ("no", "moderate"))[i % 2], i) for i in range(40)]
    data.write_text("".join(json.dumps(each) + "\n" for each in many))
    about = {"topics": 2, "owners": 20, "others": 2, "first": 2, "delta": 1e-5, "epsilons": [50], "tables": 2}
    settings.write_text(json.dumps(about))
    given = ["--data", data, "--settings", settings, "--kept", tmp_path / "kept", "--output", tmp_path / "out"]
    for _ in range(2):
        assert table_by_model.main([*map(str, given), "--model", "made up"]) == 0
    assert len(asked) == 40
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["methods"]
    assert [row["reader"] for row in rows[::2]] == [
        "the data's fields", "model", "words, 1 phrase a value", "words, 4 phrases a value",
    ]  # fmt: skip
    assert {row["right"] for row in rows if "1 phrase" not in row["reader"]} == {100}
    assert "| model | 50 | 100.0 ± 0.0 |" in (tmp_path / "out" / "table.md").read_text()
