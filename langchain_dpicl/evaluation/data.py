"""A task's rows: from a file, a folder with a file for each split, or the Hugging Face hub."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_dpicl.errors import InvalidParameter, InvalidRecords
from langchain_dpicl.evaluation.tasks import ClassificationTask, HubSource, Task
from langchain_dpicl.store.records import read_records

_SLOT = re.compile(r"\{(\w+)\}")
_ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")


@dataclass(frozen=True)
class Row:
    """One example: the input, its answer (a label or a text), and every answer that counts as right."""

    input: str = field(repr=False)
    output: str = field(repr=False)
    references: tuple[str, ...] = field(repr=False)


def load_rows(
    task: Task, source: str | Path, *, split: str = "train", columns: Mapping[str, str] | None = None
) -> list[Row]:
    """Return all rows of a task's data, checked, in the data's order.

    Parameters
    ----------
    source
        A file (JSON lines or CSV, plain or gzip); a folder with one for each split, such as ``train.jsonl``; ``hub``
        for the task's own data on the Hugging Face hub; ``hf:NAME`` or ``hf:NAME:CONFIG`` for other data there.
    split
        The part of a folder (its file's name) or of the hub's data: train, dev or test for ``hub``, the hub's own
        name for ``hf:``. A single file is read whole.
    columns
        Other column names: from `text`, `label`, `title` (classification) or `input`, `output`, `references`
        (generation) to the data's columns.

    Raises
    ------
    InvalidRecords
        For a file that cannot be read or is empty, a missing column, an empty text, labels that the task does not
        know. Names the file, the record and the column, never a text. Records of the hub that lack a text are left out.
    InvalidParameter
        For a source, split or column that does not exist, and if the library ``datasets`` is needed and missing.
    """
    answers = _answers(task)
    allowed = dict.fromkeys([*(key for layout in task.inputs for key in _SLOT.findall(layout)), *answers])
    names = dict(columns or {})
    for key, column in names.items():
        if key not in allowed:
            raise InvalidParameter("columns", key, f"names for {', '.join(allowed)}")
        if not isinstance(column, str) or not column:
            raise InvalidParameter(f"columns[{key!r}]", column, "the name of a column")
    if str(source) == "hub":
        if task.hub is None:
            raise InvalidParameter("source", "hub", f"a file or hf:NAME: no place of {task.name} on the hub is known")
        if split not in task.hub.splits:
            raise InvalidParameter("split", split, f"one of {', '.join(task.hub.splits)}")
        return _from_hub(task, task.hub, task.hub.splits[split], {**task.hub.columns, **names}, str(source))
    if str(source).startswith("hf:"):
        name, _, config = str(source).removeprefix("hf:").partition(":")
        return _from_hub(task, HubSource(name, {}, {}, config=config or None), split, names, str(source))
    path = Path(source)
    if path.is_dir():
        files = {each.name: each for each in sorted(path.iterdir()) if each.name.endswith(_ENDINGS)}
        found = [files[split + ending] for ending in _ENDINGS if split + ending in files]
        if not found:
            there = ", ".join(dict.fromkeys(name.split(".")[0] for name in files)) or "which has none"
            raise InvalidParameter("split", split, f"a file in {path.name!r} ({there})")
        path = found[0]
    return _rows(task, read_records(path), names, path.name)


def _answers(task: Task) -> tuple[str, ...]:
    return ("label",) if isinstance(task, ClassificationTask) else ("output", "references")


def _from_hub(task: Task, hub: HubSource, split: str, columns: Mapping[str, str], source: str) -> list[Row]:
    table = _load(hub, split, source)
    label = columns.get("label", "label")
    label_names = hub.label_names or tuple(getattr((table.features or {}).get(label), "names", None) or ())
    needed = [columns.get(key, key) for key in (*_SLOT.findall(task.inputs[-1]), _answers(task)[0])]
    records = []
    for record in table:
        value = record.get(label)
        if label_names and isinstance(value, int) and 0 <= value < len(label_names):
            record = {**record, label: label_names[value]}
        if not any(column in record and _is_blank(record[column]) for column in needed):
            records.append(record)
    if not records:
        raise InvalidRecords(f"{hub.name!r}, {split}, holds no records")
    return _rows(task, records, columns, f"{hub.name}, {split}")


def _load(hub: HubSource, split: str, source: str) -> Any:
    try:
        library: Any = importlib.import_module("datasets")
        return library.load_dataset(hub.name, hub.config, split=split, revision=hub.revision)
    except ImportError:
        bound = "needs the package datasets: pip install 'langchain-dpicl[hub]'"
    except ConnectionError:
        bound = "the Hugging Face hub is out of reach; give a file instead"
    except FileNotFoundError:
        bound = f"the hub, if it can be reached, has no data set {hub.name} that may be read"
    except ValueError:
        bound = f"{hub.name} has no such configuration, or no split {split}"
    except Exception as error:
        bound = f"the package datasets cannot read {hub.name} ({type(error).__name__})"
    raise InvalidParameter("source", source, bound)


def _rows(task: Task, records: Iterable[Mapping[str, Any]], columns: Mapping[str, str], name: str) -> list[Row]:
    rows: list[Row] = []
    unknown: list[int] = []
    for number, record in enumerate(records, start=1):
        row = _Record(record, columns, f"record {number} of {name!r}").row(task)
        if row is None:
            unknown.append(number)
        else:
            rows.append(row)
    if unknown:
        assert isinstance(task, ClassificationTask)
        raise InvalidRecords(
            f"unknown labels in the data: column {columns.get('label', 'label')!r} of {name!r} has them in "
            f"{len(unknown)} of {len(rows) + len(unknown)} records, first in record {unknown[0]}; {task.name} knows "
            f"{', '.join([*task.labels, *task.aliases])}"
        )
    return rows


@dataclass(frozen=True)
class _Record:
    """One record, with the names of its columns, and its place for messages."""

    record: Mapping[str, Any] = field(repr=False)
    columns: Mapping[str, str]
    place: str

    def row(self, task: Task) -> Row | None:
        """The row of this record; None if the task does not know its label."""
        text = self._input(task)
        if isinstance(task, ClassificationTask):
            label = task.label_of(self._text("label"))
            return None if label is None else Row(text, label, (label,))
        references = self._value("references")
        if references is None:
            output = self._text("output")
            return Row(text, output, (output,))
        if not isinstance(references, list) or not references or not all(map(_is_text, references)):
            column = self.columns.get("references", "references")
            raise InvalidRecords(f"column {column!r} of {self.place} is not a list of texts")
        output = references[0] if self._value("output") is None else self._text("output")
        return Row(text, output, tuple(dict.fromkeys((*references, output))))

    def _input(self, task: Task) -> str:
        """By the first layout all of whose keys the record has. In a layout of several fields, each is one line."""
        for layout in task.inputs:
            keys = _SLOT.findall(layout)
            if all(_is_text(self._value(key)) for key in keys):
                break
        if layout == f"{{{keys[0]}}}":
            return self._text(keys[0])
        found = {key: " ".join(self._text(key).split()) for key in keys}
        return _SLOT.sub(lambda slot: found[slot[1]], layout)

    def _value(self, key: str) -> Any:
        return self.record.get(self.columns.get(key, key))

    def _text(self, key: str) -> str:
        column, value = self.columns.get(key, key), self._value(key)
        if column not in self.record:
            raise InvalidRecords(f"{self.place} has no column {column!r}, for {key!r}; columns= takes another name")
        if _is_blank(value):
            raise InvalidRecords(f"column {column!r} of {self.place} is empty")
        if not isinstance(value, str):
            raise InvalidRecords(f"column {column!r} of {self.place} is not a text")
        return value


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not _is_blank(value)
