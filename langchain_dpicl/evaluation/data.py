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

    - ``source``: a file (JSON lines or CSV, plain or gzip); a folder with one for each split, such as ``train.jsonl``;
      ``hub`` for the task's own data on the Hugging Face hub; ``hf:NAME`` or ``hf:NAME:CONFIG`` for other data there.
    - ``split``: the part of a folder (its file's name) or of the hub's data: train, dev or test for ``hub``, the hub's
      own name for ``hf:``. A single file is read whole.
    - ``columns``: other column names: from `text`, `label`, `title` (classification) or `input`, `output`, `references`
      (generation) to the data's columns.

    Raises `InvalidRecords` for a file that cannot be read or is empty, a missing column, an empty text, labels that the
    task does not know. Names the file, the record and the column, never a text. Records of the hub that lack a text are
    left out.
    Raises `InvalidParameter` for a source, split or column that does not exist, and if the library ``datasets`` is
    needed and missing.
    """
    answers = ("label",) if isinstance(task, ClassificationTask) else ("output", "references")
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


def _from_hub(task: Task, hub: HubSource, split: str, columns: Mapping[str, str], source: str) -> list[Row]:
    try:
        library: Any = importlib.import_module("datasets")
        table = library.load_dataset(hub.name, hub.config, split=split, revision=hub.revision)
    except ImportError:
        fault = "needs the package datasets: pip install 'langchain-dpicl[hub]'"
    except ConnectionError:
        fault = "the Hugging Face hub is out of reach; give a file instead"
    except FileNotFoundError:
        fault = f"the hub, if it can be reached, has no data set {hub.name} that may be read"
    except ValueError:
        fault = f"{hub.name} has no such configuration, or no split {split}"
    except Exception as error:
        fault = f"the package datasets cannot read {hub.name} ({type(error).__name__})"
    else:
        fault = ""
    if fault:  # outside of the handlers, so that no error of the library is the cause
        raise InvalidParameter("source", source, fault)
    label, answer = columns.get("label", "label"), "label" if isinstance(task, ClassificationTask) else "output"
    label_names = hub.label_names or tuple(getattr((table.features or {}).get(label), "names", None) or ())
    needed = [columns.get(key, key) for key in (*_SLOT.findall(task.inputs[-1]), answer)]
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


def _rows(task: Task, records: Iterable[Mapping[str, Any]], columns: Mapping[str, str], name: str) -> list[Row]:
    rows: list[Row] = []
    unknown: list[int] = []
    for number, record in enumerate(records, start=1):
        place = f"record {number} of {name!r}"
        for layout in task.inputs:  # the first one all of whose keys the record has
            keys = _SLOT.findall(layout)
            if all(_is_text(record.get(columns.get(key, key))) for key in keys):
                break
        fields = {key: _text(record, key, columns, place) for key in keys}
        if layout != f"{{{keys[0]}}}":  # in a layout of several fields, each is one line
            fields = {key: " ".join(text.split()) for key, text in fields.items()}
        parts = _SLOT.split(layout)  # every other one is a key
        parts[1::2] = [fields[key] for key in keys]
        text = "".join(parts)
        if isinstance(task, ClassificationTask):
            label = task.label_of(_text(record, "label", columns, place))
            if label is None:
                unknown.append(number)
            else:
                rows.append(Row(text, label, (label,)))
            continue
        column = columns.get("references", "references")
        references: Any = record.get(column)
        is_list = isinstance(references, list) and bool(references) and all(map(_is_text, references))
        if references is not None and not is_list:
            raise InvalidRecords(f"column {column!r} of {place} is not a list of texts")
        has_output = references is None or record.get(columns.get("output", "output")) is not None
        output = _text(record, "output", columns, place) if has_output else references[0]
        rows.append(Row(text, output, tuple(dict.fromkeys([*(references or ()), output]))))
    if unknown:
        assert isinstance(task, ClassificationTask)
        raise InvalidRecords(
            f"unknown labels in the data: column {columns.get('label', 'label')!r} of {name!r} has them in "
            f"{len(unknown)} of {len(rows) + len(unknown)} records, first in record {unknown[0]}; {task.name} knows "
            f"{', '.join([*task.labels, *task.aliases])}"
        )
    return rows


def _text(record: Mapping[str, Any], key: str, columns: Mapping[str, str], place: str) -> str:
    column = columns.get(key, key)
    if column not in record:
        raise InvalidRecords(f"{place} has no column {column!r}, for {key!r}; columns= takes another name")
    if _is_blank(record[column]):
        raise InvalidRecords(f"column {column!r} of {place} is empty")
    if not isinstance(record[column], str):
        raise InvalidRecords(f"column {column!r} of {place} is not a text")
    return str(record[column])


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not _is_blank(value)
