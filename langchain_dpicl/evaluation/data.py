"""A task's rows: from a file, a folder with a file for each split, or the Hugging Face hub."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_dpicl.errors import InvalidParameter, InvalidRecords
from langchain_dpicl.evaluation.tasks import ClassificationTask, HubSource, Task
from langchain_dpicl.privacy.checks import whole
from langchain_dpicl.store.records import read_records

_SLOT = re.compile(r"\{(\w+)\}")
_ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")


@dataclass(frozen=True)
class Row:
    """One example: the input, its answer (a label, or a text), and every answer that counts as right."""

    input: str = field(repr=False)
    output: str = field(repr=False)
    references: tuple[str, ...] = field(repr=False)


def load_rows(
    task: Task, source: str | Path, *, split: str = "train", columns: Mapping[str, str] | None = None
) -> list[Row]:
    """All rows of a task's data, checked, in the data's order.

    Parameters
    ----------
    source
        A file (JSON lines or CSV, plain or gzip); a folder that has one for each split, such as ``train.jsonl``;
        ``hub`` for where the Hugging Face hub keeps the task's data; ``hf:NAME`` or ``hf:NAME:CONFIG`` for other data
        there.
    split
        Which part of a folder (its file's name) or of the hub's data: train, dev or test for ``hub``, the hub's own
        name for ``hf:``. A single file is read whole.
    columns
        For data that name their columns otherwise: from `text`, `label`, `title` (classification) or `input`,
        `output`, `references` (generation) to the columns' names.

    Raises
    ------
    InvalidRecords
        For a file that cannot be read or holds nothing, a missing column, an empty text, labels that the task does not
        know. Names the file, the record and the column, never a text. Records of the hub that lack a text are left out.
    InvalidParameter
        For a source, split or column that does not exist, and where the library ``datasets`` is needed and missing.
    """
    names = _checked_columns(task, columns)
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
        path = _file_of(path, split)
    return _rows(task, read_records(path), names, path.name)


def check_size(rows: Sequence[Row], members: int, shots: int) -> None:
    """Raise `InvalidParameter` unless the rows suffice for one sample: members times shots."""
    needed = whole("members", members) * whole("shots", shots)
    if len(rows) < needed:
        raise InvalidParameter("data", f"{len(rows)} records", f"at least members * shots = {needed} records")


def _checked_columns(task: Task, columns: Mapping[str, str] | None) -> dict[str, str]:
    allowed = dict.fromkeys([*(key for layout in task.inputs for key in _SLOT.findall(layout)), *_answers(task)])
    for key, column in (columns or {}).items():
        if key not in allowed:
            raise InvalidParameter("columns", key, f"names for {', '.join(allowed)}")
        if not isinstance(column, str) or not column:
            raise InvalidParameter(f"columns[{key!r}]", column, "the name of a column")
    return dict(columns or {})


def _answers(task: Task) -> tuple[str, ...]:
    return ("label",) if isinstance(task, ClassificationTask) else ("output", "references")


def _file_of(folder: Path, split: str) -> Path:
    """The split's file in a folder; `InvalidParameter` lists the splits that the folder has."""
    files = {path.name: path for path in sorted(folder.iterdir()) if path.name.endswith(_ENDINGS)}
    for ending in _ENDINGS:
        if split + ending in files:
            return files[split + ending]
    there = ", ".join(dict.fromkeys(name.split(".")[0] for name in files))
    raise InvalidParameter("split", split, f"a file in {folder.name!r} ({there or 'which has none'})")


# -- the hub -----------------------------------------------------------------------------------------------------------


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
    except ImportError:
        bound = "needs the package datasets: pip install 'langchain-dpicl[hub]'"
        raise InvalidParameter("source", source, bound) from None
    try:
        return library.load_dataset(hub.name, hub.config, split=split, revision=hub.revision)
    except ConnectionError:
        bound = "the Hugging Face hub is out of reach; give a file instead"
    except FileNotFoundError:
        bound = f"the hub, if it can be reached, has no data set {hub.name} that may be read"
    except ValueError:
        bound = f"{hub.name} has no such configuration, or no split {split}"
    except Exception as error:
        bound = f"the package datasets cannot read {hub.name} ({type(error).__name__})"
    raise InvalidParameter("source", source, bound)


# -- records to rows ---------------------------------------------------------------------------------------------------


def _rows(task: Task, records: Iterable[Mapping[str, Any]], columns: Mapping[str, str], name: str) -> list[Row]:
    rows: list[Row] = []
    unknown: list[int] = []
    for number, record in enumerate(records, start=1):
        fields = _Fields(record, columns, f"record {number} of {name!r}")
        text = _input(task, fields)
        if not isinstance(task, ClassificationTask):
            rows.append(_answered(text, fields))
        elif (label := task.label_of(fields.text("label"))) is not None:
            rows.append(Row(text, label, (label,)))
        else:
            unknown.append(number)
    if unknown:
        assert isinstance(task, ClassificationTask)
        raise InvalidRecords(
            f"unknown labels in the data: column {columns.get('label', 'label')!r} of {name!r} has them in "
            f"{len(unknown)} of {len(rows) + len(unknown)} records, first in record {unknown[0]}; {task.name} knows "
            f"{', '.join([*task.labels, *task.aliases])}"
        )
    return rows


@dataclass(frozen=True)
class _Fields:
    """One record, with the names of its columns, and where it is."""

    record: Mapping[str, Any] = field(repr=False)
    columns: Mapping[str, str]
    where: str

    def value(self, key: str) -> Any:
        return self.record.get(self.columns.get(key, key))

    def text(self, key: str) -> str:
        """The text of a column. `InvalidRecords` where there is none."""
        column, value = self.columns.get(key, key), self.value(key)
        if column not in self.record:
            raise InvalidRecords(f"{self.where} has no column {column!r}, for {key!r}; columns= takes another name")
        if _is_blank(value):
            raise InvalidRecords(f"column {column!r} of {self.where} is empty")
        if not isinstance(value, str):
            raise InvalidRecords(f"column {column!r} of {self.where} is not a text")
        return value


def _input(task: Task, fields: _Fields) -> str:
    """By the first layout all of whose keys the record has. Where a layout says more, each field is one line of it."""
    for layout in task.inputs:
        keys = _SLOT.findall(layout)
        if all(_is_text(fields.value(key)) for key in keys):
            break
    if layout == f"{{{keys[0]}}}":
        return fields.text(keys[0])
    found = {key: " ".join(fields.text(key).split()) for key in keys}
    return _SLOT.sub(lambda slot: found[slot[1]], layout)


def _answered(text: str, fields: _Fields) -> Row:
    """A generation task's row: an output, references, or both."""
    references = fields.value("references")
    if references is None:
        output = fields.text("output")
        return Row(text, output, (output,))
    if not isinstance(references, list) or not references or not all(map(_is_text, references)):
        column = fields.columns.get("references", "references")
        raise InvalidRecords(f"column {column!r} of {fields.where} is not a list of texts")
    output = references[0] if fields.value("output") is None else fields.text("output")
    return Row(text, output, tuple(dict.fromkeys((*references, output))))


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not _is_blank(value)
