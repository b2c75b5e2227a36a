"""A task's rows: read from files or from the Hugging Face hub, and checked."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_dpicl.errors import InvalidParameter, InvalidRecords
from langchain_dpicl.extras import require
from langchain_dpicl.lab.evaluation.tasks import ClassificationTask, GenerationTask, HubSource, Task
from langchain_dpicl.store.datafile import ENDINGS, DataFile, Reading, read_data, settle
from langchain_dpicl.store.records import attempt

_SLOT = re.compile(r"\{(\w+)\}")
_ENDINGS = tuple(ending + packed for ending in ENDINGS for packed in ("", ".gz"))


@dataclass(frozen=True)
class Row:
    """One example: the input, its answer (a label or a text), and every answer that counts as right."""

    input: str = field(repr=False)
    output: str = field(repr=False)
    references: tuple[str, ...] = field(repr=False)


def load_rows(
    task: Task,
    source: str | Path,
    *,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    reading: Reading = Reading(),  # noqa: B008
    say: Callable[[str], object] = warnings.warn,
) -> list[Row]:
    """Return all rows of a task's data, checked, in the data's order.

    - ``source``: a file (JSON lines, CSV, TSV or Parquet); a folder with one for each split, such as ``train.jsonl``;
      ``hub`` for the task's own data on the Hugging Face hub; ``hf:NAME`` or ``hf:NAME:CONFIG`` for other data there,
      which is public: its library may choose a column's type by all rows.
    - ``split``: the part of a folder (its file's name) or of the hub's data: train, dev or test for ``hub``, the hub's
      own name for ``hf:``. A single file is read whole.
    - ``columns``: other column names: from `text`, `label`, `title` (classification) or `input`, `output`, `references`
      (generation) to the data's columns.
    - ``reading``: how to read files, and whether to leave out records that cannot be used; ``say`` gets their number.

    Raises `InvalidRecords` for a file that cannot be read or is empty, a missing column, an empty text, labels that the
    task does not know. Names the file, the lines and the column, never a text. Records of the hub that lack a text are
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
        return _from_hub(
            task,
            task.hub,
            task.hub.splits[split],
            {**task.hub.columns, **names},
            str(source),
        )
    if str(source).startswith("hf:"):
        name, _, config = str(source).removeprefix("hf:").partition(":")
        return _from_hub(
            task,
            HubSource(name, {}, {}, config=config or None),
            split,
            names,
            str(source),
        )
    path = Path(source)
    if path.is_dir():
        files = sorted(each.name for each in path.iterdir() if each.name.endswith(_ENDINGS))
        found = [split + ending for ending in _ENDINGS if split + ending in files]
        if not found:
            there = ", ".join(dict.fromkeys(name.split(".")[0] for name in files)) or "which has none"
            raise InvalidParameter("source", str(source), f"a folder with a file of the split {split!r} ({there})")
        path /= found[0]
    return _rows(
        task,
        read_data(path, reading, _answer_columns(task, names)),
        names,
        reading.skip_bad,
        say,
    )


def _from_hub(
    task: Task,
    hub: HubSource,
    split: str,
    columns: Mapping[str, str],
    source: str,
) -> list[Row]:
    library = require("datasets", "hub")
    try:
        table = library.load_dataset(hub.name, hub.config, split=split, revision=hub.revision)
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
    label = columns.get("label", "label")
    label_names = hub.label_names or tuple(getattr((table.features or {}).get(label), "names", None) or ())
    needed = [*_columns(task.inputs[-1], columns), *_answer_columns(task, columns)]
    found, broken = attempt(list, table)
    if broken:
        raise InvalidRecords(f"{hub.name!r}, {split}, cannot be read ({broken})")
    records = []
    for record in found:
        value = record.get(label)
        if label_names and isinstance(value, int) and 0 <= value < len(label_names):
            record = {**record, label: label_names[value]}
        if not any(column in record and _is_blank(record[column]) for column in needed):
            records.append(record)
    if not records:
        raise InvalidRecords(f"{hub.name!r}, {split}, holds no records")
    there = tuple(dict.fromkeys(column for record in records for column in record))
    return _rows(
        task,
        DataFile(
            f"{hub.name}, {split}",
            "",
            there,
            records,
            list(range(1, len(records) + 1)),
            [],
            "record",
            wanted=there,
        ),
        columns,
        False,
        str,
    )


def _answer_columns(task: Task, columns: Mapping[str, str]) -> list[str]:
    """The column of the answers."""
    key = "label" if isinstance(task, ClassificationTask) else "output"
    return [columns.get(key, key)]


def _rows(
    task: Task,
    data: DataFile,
    columns: Mapping[str, str],
    skip_bad: bool,
    say: Callable[[str], object],
) -> list[Row]:
    answers = [*_answer_columns(task, columns), columns.get("references", "references")]
    has_answer = isinstance(task, GenerationTask) and not set(answers).isdisjoint(data.columns)
    needed = [] if has_answer else answers[:1]
    if not any(set(data.columns).issuperset(_columns(layout, columns)) for layout in task.inputs):
        needed += _columns(task.inputs[-1], columns)
    if data.records:
        for column in needed:
            key = next((key for key, other in columns.items() if other == column), column)
            data.need(f"--column {key}=", column)
    rows = []
    faults = list(data.faults)
    for line, record in zip(data.lines, data.records, strict=True):
        row = _row(task, record, columns)
        if isinstance(row, Row):
            rows.append(row)
        else:
            faults.append((line, row))
    settle(data, faults, len(rows), skip_bad, say)
    return rows


def _columns(layout: str, columns: Mapping[str, str]) -> list[str]:
    return [columns.get(key, key) for key in _SLOT.findall(layout)]


def _row(task: Task, record: Mapping[str, Any], columns: Mapping[str, str]) -> Row | str:
    """The row of a record, or its problem."""
    for layout in task.inputs:  # the first one all of whose keys the record has
        missing = next((column for column in _columns(layout, columns) if not _is_text(record.get(column))), None)
        if missing is None:
            break
    if missing is not None:
        return f"no text under {missing!r}"
    keys = _SLOT.findall(layout)
    fields: dict[str, str] = {key: record[columns.get(key, key)] for key in keys}
    if layout != f"{{{keys[0]}}}":  # in a layout of several fields, each is one line
        fields = {key: " ".join(text.split()) for key, text in fields.items()}
    text = layout.format_map(fields)
    (column,) = _answer_columns(task, columns)
    answer: Any = record.get(column)
    if isinstance(task, ClassificationTask):
        if type(answer) is int:
            answer = str(answer)
        if not _is_text(answer):
            return f"no text under {column!r}"
        if (label := task.label_of(answer)) is None:
            return f"a label under {column!r} other than {', '.join([*task.labels, *task.aliases])}"
        return Row(text, label, (label,))
    listed = columns.get("references", "references")
    references: Any = record.get(listed)
    is_list = isinstance(references, list) and bool(references) and all(map(_is_text, references))
    if references is not None and not is_list:
        return f"no list of texts under {listed!r}"
    if answer is None and is_list:
        answer = references[0]
    if not _is_text(answer):
        return f"no text under {column!r}"
    return Row(text, answer, tuple(dict.fromkeys([*(references or ()), answer])))


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not _is_blank(value)
