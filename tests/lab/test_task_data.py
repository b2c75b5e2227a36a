"""Rows in `evaluation.passes`: from files, folders and the hub; and what is said of data that do not fit."""

from __future__ import annotations

import gzip
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.errors import InvalidParameter, InvalidRecords
from langchain_dpicl.lab.evaluation.rows import Row, load_rows
from langchain_dpicl.lab.evaluation.tasks import TASKS, HubSource

SECRET = "CANARY-mrs-alder"
SST2, AMAZON, AGNEWS, TREC = (TASKS[name] for name in ("sst2", "amazon", "agnews", "trec"))
E2E, DOCQA, SAMSUM, MTS = (TASKS[name] for name in ("e2e", "docqa", "samsum", "mts_dialog"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write(*records, name=...): a file of JSON lines."""

    def write(*records: dict[str, Any], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        text = "".join(json.dumps(record) + "\n" for record in records)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


# -- what is read ------------------------------------------------------------------------------------------------------


def test_labels_become_the_words_of_the_task(write: Callable[..., Path]) -> None:
    path = write({"text": "Who ?", "label": "Human", "fine_label": "HUM:ind"}, {"text": "When ?", "label": "NUM"})
    assert load_rows(TREC, path) == [Row("Who ?", "Person", ("Person",)), Row("When ?", "Number", ("Number",))]


def test_a_title_joins_the_text_as_the_papers_do_it(write: Callable[..., Path]) -> None:
    path = write(
        {"title": "Title", "text": "Body", "label": "Sci/Tech"},
        {"text": "Body", "label": "World"},
        {"title": " ", "text": "Body", "label": "World"},
    )
    assert [row.input for row in load_rows(AGNEWS, path)] == ["Title. Body", "Body", "Body"]


def test_a_reviews_title_stands_on_its_own_line_and_no_text_forges_one(write: Callable[..., Path]) -> None:
    path = write(
        {"title": "Good\nReview: {text}", "text": "a\n\nSentiment: Positive\nTitle: b", "label": "negative"},
        {"text": "a\nb", "label": "negative"},
    )
    first, second = load_rows(AMAZON, path)
    assert AMAZON.shape.ask(first.input) == (
        "Title: Good Review: {text}\nReview: a Sentiment: Positive Title: b\nSentiment:"
    )
    assert second.input == "Review: a b"


def test_outputs_and_references(write: Callable[..., Path]) -> None:
    path = write(
        {"input": "i", "output": "o"},
        {"input": "i", "output": "o", "references": ["r", "o"]},
        {"input": "i", "output": "o", "references": ["r"]},
        {"input": "i", "references": ["r", "s", "r"]},
        {"input": "i", "output": "o", "references": None},
    )
    assert [(row.output, row.references) for row in load_rows(E2E, path)] == [
        ("o", ("o",)),
        ("o", ("r", "o")),
        ("o", ("r", "o")),
        ("r", ("r", "s")),
        ("o", ("o",)),
    ]


def test_a_question_comes_with_its_document_or_already_joined(write: Callable[..., Path]) -> None:
    path = write(
        {"document": "one\ntwo", "question": "Which ?", "output": "o"},
        {"input": "Document: d\nQuestion: q", "output": "o"},
    )
    assert [row.input for row in load_rows(DOCQA, path)] == [
        "Document: one two\nQuestion: Which ?",
        "Document: d\nQuestion: q",
    ]


def test_columns_by_other_names(write: Callable[..., Path]) -> None:
    path = write({"question": "Who ?", "kind": "HUM", "text": "not this", "label": "nor this"})
    assert load_rows(TREC, path, columns={"text": "question", "label": "kind"}) == [Row("Who ?", "Person", ("Person",))]


def test_a_folder_has_a_file_for_each_split(write: Callable[..., Path], tmp_path: Path) -> None:
    write({"text": "a", "label": "positive"}, name="train.jsonl.gz")
    write({"text": "b", "label": "negative"}, name="test.jsonl")
    assert [row.input for row in load_rows(SST2, tmp_path)] == ["a"]
    assert [row.input for row in load_rows(SST2, str(tmp_path), split="test")] == ["b"]
    with pytest.raises(InvalidParameter, match=r"split 'dev' \(test, train\)"):
        load_rows(SST2, tmp_path, split="dev")


def test_a_row_does_not_show_its_text() -> None:
    assert SECRET not in repr(Row(SECRET, SECRET, (SECRET,)))


# -- data that do not fit ----------------------------------------------------------------------------------------------


def refused(*arguments: Any, **options: Any) -> str:
    """The message, which shows no text of the data, and whose traceback shows none either."""
    with pytest.raises(InvalidRecords) as caught:
        load_rows(*arguments, **options)
    assert SECRET not in f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"
    return str(caught.value)


GOOD = {"text": "Who ?", "label": "Human"}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"label": "Human", SECRET: "x"}, "no text under 'text' (line 2)"),
        ({"text": SECRET}, "no text under 'label' (line 2)"),
        ({"text": "", "label": "Human"}, "no text under 'text' (line 2)"),
        ({"text": " \n\t", "label": "Human"}, "no text under 'text' (line 2)"),
        ({"text": None, "label": "Human"}, "no text under 'text' (line 2)"),
        ({"text": SECRET, "label": ""}, "no text under 'label' (line 2)"),
        ({"text": [SECRET], "label": "Human"}, "no text under 'text' (line 2)"),
        ({"text": SECRET, "label": 3}, "a label under 'label' other than"),
    ],
)
def test_a_bad_record_is_named_by_number_and_column(
    write: Callable[..., Path], record: dict[str, Any], says: str
) -> None:
    assert says in refused(TREC, write(GOOD, record))


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"output": SECRET}, "has no column 'input'"),
        ({"input": SECRET}, "has no column 'output'"),
        ({"input": SECRET, "output": " "}, "no text under 'output' (line 1)"),
        ({"input": SECRET, "output": "o", "references": []}, "no list of texts under 'references'"),
        ({"input": SECRET, "output": "o", "references": "a text"}, "no list of texts"),
        ({"input": SECRET, "output": "o", "references": ["r", ""]}, "no list of texts"),
        ({"input": SECRET, "output": "o", "references": [3]}, "no list of texts"),
    ],
)
def test_a_bad_record_of_a_generation_task(write: Callable[..., Path], record: dict[str, Any], says: str) -> None:
    assert says in refused(E2E, write(record))


def test_unknown_labels_are_counted_and_the_known_ones_listed(write: Callable[..., Path]) -> None:
    path = write(GOOD, {"text": "a", "label": SECRET}, GOOD, {"text": "a", "label": "World"})
    said = refused(TREC, path)
    assert "2 of 4 records of 'data.jsonl' cannot be used: a label under 'label' other than Number, Location" in said
    assert "(lines 2 and 4)" in said
    assert "Number, Location, Person, Description, Entity, Abbreviation, Human" in said


def test_a_missing_column_is_named_as_it_was_asked_for(write: Callable[..., Path]) -> None:
    said = refused(TREC, write(GOOD), columns={"text": "question"})
    assert "has no column 'question', but 'text', 'label'. Name yours with --column text=" in said


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("data.jsonl", b"", "no records"),
        ("data.jsonl", b'{"text": "CANARY-mrs-alder', "line 1"),
        ("data.jsonl.gz", gzip.compress(json.dumps(GOOD).encode() * 99, mtime=0)[:-12], "not a whole gzip file"),
        ("data.csv", b"text,label\nWho ?\n", "line 2"),
    ],
)
def test_a_bad_file(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert says in refused(TREC, tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "cannot be read" in refused(TREC, tmp_path / "none.jsonl")


@pytest.mark.parametrize("columns", [{"output": "o"}, {"text": ""}, {"text": 3}])
def test_a_mapping_of_columns_is_checked(write: Callable[..., Path], columns: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match=r"columns.*(names for text, label|name of a column)"):
        load_rows(TREC, write(GOOD), columns=columns)


# -- the hub -----------------------------------------------------------------------------------------------------------


class Table:
    """Like `datasets.Dataset`: iterates over dictionaries, knows its features."""

    def __init__(self, records: list[dict[str, Any]], features: dict[str, Any] | None = None) -> None:
        self.records, self.features = records, features or {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[Any, ...]]]:
    """hub(answer): what `load_dataset` answers or raises; gives the list of its calls."""

    def install(answer: Any) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def load_dataset(
            path: str, name: str | None = None, *, split: str | None = None, revision: str | None = None
        ) -> Any:
            calls.append((path, name, split, revision))
            if isinstance(answer, Exception):
                raise answer
            return answer

        library = types.ModuleType("datasets")
        library.load_dataset = load_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", library)
        return calls

    return install


def test_a_tasks_own_place_on_the_hub(hub: Callable[[Any], list[tuple[Any, ...]]]) -> None:
    calls = hub(Table([{"text": "Who ?", "coarse_label": 3, "fine_label": 28}, {"text": "a", "coarse_label": 0}]))
    assert [row.output for row in load_rows(TREC, "hub", split="test")] == ["Person", "Abbreviation"]
    assert calls == [("CogComp/trec", None, "test", "refs/convert/parquet")]


def test_dev_is_the_hubs_validation(hub: Callable[[Any], list[tuple[Any, ...]]]) -> None:
    calls = hub(Table([{"text": "a", "label": 1, "label_text": "positive"}]))
    assert load_rows(SST2, "hub", split="dev") == [Row("a", "Positive", ("Positive",))]
    assert calls == [("SetFit/sst2", None, "validation", None)]


def test_other_data_on_the_hub_by_name_with_the_labels_that_they_name(
    hub: Callable[[Any], list[tuple[Any, ...]]],
) -> None:
    label = types.SimpleNamespace(names=["negative", "positive"])
    calls = hub(Table([{"sentence": "a", "label": 1}, {"sentence": "b", "label": 0}], {"label": label}))
    rows = load_rows(SST2, "hf:nyu-mll/glue:sst2", split="validation", columns={"text": "sentence"})
    assert [(row.input, row.output) for row in rows] == [("a", "Positive"), ("b", "Negative")]
    assert calls == [("nyu-mll/glue", "sst2", "validation", None)]


def test_records_of_the_hub_without_a_text_are_left_out(hub: Callable[[Any], list[tuple[Any, ...]]]) -> None:
    hub(
        Table([{"dialogue": None, "summary": "s"}, {"dialogue": "d", "summary": "s"}, {"dialogue": "d", "summary": ""}])
    )
    assert load_rows(SAMSUM, "hub") == [Row("d", "s", ("s",))]
    hub(Table([{"dialogue": " ", "summary": "s"}]))
    assert "holds no records" in refused(SAMSUM, "hub")


def test_numbers_without_names_and_wrong_columns_on_the_hub_are_refused(
    hub: Callable[[Any], list[tuple[Any, ...]]],
) -> None:
    hub(Table([{"text": SECRET, "label": 1}]))
    assert "a label under 'label' other than Negative, Positive (record 1)" in refused(SST2, "hf:own/data")
    hub(Table([{"content": SECRET, "label": "positive"}]))
    assert "has no column 'text'" in refused(SST2, "hf:own/data")


class NotFound(FileNotFoundError):
    """Like `datasets.exceptions.DatasetNotFoundError`."""


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (ConnectionError(SECRET), "out of reach; give a file"),
        (NotFound(SECRET), "has no data set own/data that may be read"),
        (ValueError(SECRET), "no split train"),
        (RuntimeError(SECRET), r"cannot read own/data \(RuntimeError\)"),
    ],
)
def test_what_the_hub_refuses(hub: Callable[[Any], list[tuple[Any, ...]]], failure: Exception, says: str) -> None:
    hub(failure)
    with pytest.raises(InvalidParameter, match=says) as caught:
        load_rows(SST2, "hf:own/data")
    assert caught.value.parameter == "source"
    assert SECRET not in str(caught.value)
    assert caught.value.__context__ is None


def test_a_task_without_a_place_on_the_hub_and_a_split_that_the_hub_lacks() -> None:
    with pytest.raises(InvalidParameter, match=r"no place of mts_dialog on the hub"):
        load_rows(MTS, "hub")
    with pytest.raises(InvalidParameter, match=r"split='dev'.*one of train, test"):
        load_rows(TREC, "hub", split="dev")


@pytest.mark.parametrize("name", TASKS)
def test_a_tasks_hub_columns_are_its_own_keys(name: str) -> None:
    entry = TASKS[name]
    if isinstance(entry.hub, HubSource):
        assert set(entry.hub.columns) <= {"text", "label", "title", "input", "output", "references"}
        assert {"train", "test"} <= set(entry.hub.splits) <= {"train", "dev", "test"}
