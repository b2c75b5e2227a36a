"""One pass of a model: a task's rows, the samples that a plan draws from them, and the model's answers on disk.

A stopped evaluation resumes from these answers. They are members' answers in the open: for data that are public in
truth, or stay with their owner.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.embeddings import FakeEmbeddings
from langchain_core.runnables import Runnable

from langchain_dpicl.durable import LineFile
from langchain_dpicl.errors import InvalidParameter, InvalidRecords, ModelUnavailable
from langchain_dpicl.evaluation.tasks import ClassificationTask, HubSource, Task
from langchain_dpicl.privacy import PrivacyPlan, checks
from langchain_dpicl.privacy.choice import Crowd, options_of
from langchain_dpicl.privacy.mechanisms import LineRequest
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.privacy.profile import MAX_COUNT
from langchain_dpicl.private import boundary
from langchain_dpicl.selection import PoissonExampleSelector
from langchain_dpicl.store import ExemplarStore
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
        files = sorted(each.name for each in path.iterdir() if each.name.endswith(_ENDINGS))
        found = [split + ending for ending in _ENDINGS if split + ending in files]
        if not found:
            there = ", ".join(dict.fromkeys(name.split(".")[0] for name in files)) or "which has none"
            raise InvalidParameter("split", split, f"a file in {path.name!r} ({there})")
        path /= found[0]
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
        text = layout.format_map(fields)
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


# -- the model's answers -----------------------------------------------------------------------------------------------


Pairs = Sequence[tuple[str, str]]
"""Examples of one prompt: (input, output)."""

Key = tuple[int | str, ...]


class PassFile(dict[Key, Any], LineFile):
    """Entries by key, on disk from the moment they are added (with `add` or `answers`).

    The first line holds the settings; each further line is one entry as JSON. A line that a stop left half written is
    dropped, and its work is done again. Only the file's owner may read it.

    Raises `InvalidParameter` if the file was made with other settings (it names the first that differs), is no such
    file, is damaged (it names the line), cannot be written, or if another evaluation has it. A refused file stays as
    it is.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        LineFile.__init__(self, path, path, "a folder", "evaluation", private=True)
        head = json.dumps(self.settings, sort_keys=True)
        try:
            asked = json.loads(head)
            found = _parsed(self.lines[0]) if self.lines else asked
            if not isinstance(found, dict) or not (self.lines or head.encode().startswith(self.torn)):
                raise self.refused("a folder of an evaluation: its first line is damaged")
            for name in sorted({*found, *asked}):
                if found.get(name) != asked.get(name):
                    bound = f"{found.get(name)!r}, with which {str(self.path)!r} was begun, or another output folder"
                    raise InvalidParameter(name, asked.get(name), bound)
            for number, line in enumerate(self.lines[1:], start=2):
                match _parsed(line):
                    case [[*key], value] if all(isinstance(part, (int, str)) for part in key):
                        self[tuple(key)] = value
                    case _:
                        bound = f"a folder of an evaluation: line {number} is damaged; remove it to do its work again"
                        raise self.refused(bound)
            self.mend()  # cut off the line that was not finished, if any
            if not self.lines:
                self.write(head.encode() + b"\n")
        except BaseException:
            self.close()
            raise

    def add(self, key: Key, value: Any) -> None:
        """Keep an entry."""
        self.write(json.dumps([list(key), value]).encode() + b"\n")
        self[key] = value

    def answers(
        self, key: Key, prompts: Sequence[Any], ask: Callable[[Sequence[Any]], Sequence[Any]], failed: Any = None
    ) -> list[Any]:
        """Return the answers of this key. Ask for them if they are missing, and keep them.

        ``ask`` answers some of the prompts, with ``failed`` for each that has no answer. A prompt that fails among
        others is asked once more, beside one that has an answer: if that one fails too, the model is gone. Raises
        `ModelUnavailable` if no prompt has an answer, or the model is gone; nothing of an outage is kept.
        """
        if key not in self:
            found = list(ask(prompts))
            lacking = [i for i, answer in enumerate(found) if answer == failed]
            is_gone = len(lacking) == len(found)
            if lacking and not is_gone:
                answered = next(i for i in range(len(found)) if i not in lacking)
                known, *again = ask([prompts[i] for i in (answered, *lacking)])
                is_gone = known == failed
                for i, answer in zip(lacking, again, strict=True):
                    found[i] = answer
            if is_gone:
                raise ModelUnavailable(
                    "the model answers no prompt of a query: is it up, is its key right, and do label prompts get "
                    f"log-probabilities? Earlier answers are kept in {str(self.path)!r}; the same command resumes"
                )
            self.add(key, found)
        kept: list[Any] = self[key]
        return kept


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def key_of(text: str) -> str:
    """A stable name for a text that shows nothing of it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ask_members(member: Runnable[Any, Any], prompts: Sequence[Pairs], query: str) -> list[Any]:
    """Return a sealed member's output for each prompt's examples, called as a release calls it; None for a failure."""
    requests = [
        ({"input": query}, [{"input": asked, "output": answer} for asked, answer in pairs]) for pairs in prompts
    ]
    found = boundary.run_private(member, requests, max_concurrency=8)
    return [None if each is boundary.ABSTAIN else each for each in found]


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationPlan:
    """The numbers of owners, members and releases, and the epsilons for which the noise is solved.

    ``shots`` is the expected number of owners in a member's prompt, so the rate is members * shots / owners. With
    ``calls`` each sampled owner has a prompt of its own, so many on average, and ``members`` is their padded number.
    ``few_shots`` is the number of examples in the prompts that are not private, for comparison.
    """

    owners: int
    members: int
    shots: int
    releases: int
    delta: float
    epsilons: Sequence[float]
    few_shots: int = 4
    calls: int = 0

    def __post_init__(self) -> None:
        checks.whole("owners", self.owners)
        checks.whole("shots", self.shots)
        checks.whole("members", self.members, at_least=2)
        checks.whole("few_shots", self.few_shots, at_most=self.owners)
        checks.whole("releases", self.releases, at_most=MAX_COUNT)
        checks.open_unit("delta", self.delta)
        if not self.epsilons:
            raise InvalidParameter("epsilon", self.epsilons, "at least one number")
        for epsilon in self.epsilons:
            checks.real("epsilon", epsilon, above=0.0, at_most=1000.0)
        checks.whole("calls", self.calls, at_least=0, at_most=self.owners)
        if not self.calls and self.members * self.shots > self.owners:
            raise InvalidParameter("shots", self.shots, f"members * shots at most the number of owners, {self.owners}")

    @property
    def rate(self) -> float:
        """An owner's probability to take part in one release."""
        return (self.calls or self.members * self.shots) / self.owners

    @property
    def crowd(self) -> Crowd:
        """The public numbers of a vote's outputs."""
        return Crowd.of(self.members, self.rate, self.owners, self.calls or None)

    @property
    def facts(self) -> dict[str, float]:
        """The public numbers of a private answer."""
        size = ("members", "calls") if self.calls else ("members", "shots")
        return {name: getattr(self, name) for name in (*size, "rate", "releases", "delta")}

    def varied(self, **numbers: int) -> EvaluationPlan:
        """The same plan with other numbers. Other members keep their shots, so the rate changes.

        The first n members of N are a sample of the plan with n members, whose rate is n / N of this one's: every owner
        draws its member on its own.
        """
        return replace(self, **numbers)  # type: ignore[arg-type]

    def parameter(
        self, epsilon: float, mechanism: str, options: Mapping[str, float] | None = None, rate: float | None = None
    ) -> float:
        """The noise that this epsilon allows; at another rate, if one is given."""
        options = {**(options_of(self.crowd) if options is None else options)}
        request = LineRequest(mechanism, self.rate if rate is None else rate, self.releases, options=options)
        plan = PrivacyPlan.solve(epsilon=epsilon, delta=self.delta, lines={"only": request})
        return plan.lines["only"].parameter


class Sampler:
    """Draws the examples of prompts from rows, by the release's own sampling; every row is its own owner.

    A sample has these prompts: one for each member, with its bucket; one without examples; one with ``few_shots``
    private examples; and if there are public rows, one with as many of them. Every query gets the same samples: its
    answer then has the law that it has with a sample of its own, so a score has the same mean; between samples it
    varies more.
    """

    def __init__(self, rows: Sequence[Row], public: Sequence[Row], plan: EvaluationPlan) -> None:
        needed, words = (plan.calls, "calls") if plan.calls else (plan.members * plan.shots, "members * shots")
        if len(rows) < needed:
            raise InvalidParameter("data", f"{len(rows)} records", f"at least {words} = {needed} records")
        store = ExemplarStore.from_records(
            [{"input": row.input, "output": row.output, "row": i} for i, row in enumerate(rows)],
            FakeEmbeddings(size=1),  # never asked: nothing is looked for by similarity
            input_key="input",
            output_key="output",
            vectors=np.zeros((len(rows), 1), np.float32),
        )
        if plan.calls:
            self._selector = PoissonExampleSelector(store, calls=plan.calls, pad_to=plan.members)
        else:
            self._selector = PoissonExampleSelector(store, plan.members, shots=plan.shots)
        self._rows, self._public, self._few, self._members = rows, public, plan.few_shots, plan.members

    def draw(self, number: int, file: PassFile) -> list[Pairs]:
        """The prompts of this sample. It is drawn once; the file keeps it."""
        key = ("sample", number)
        if key not in file:
            buckets = [[int(each["row"]) for each in bucket] for bucket in self._selector.sample()][: self._members]
            buckets += [[]] * (self._members - len(buckets))  # a sample of more calls is rare, and loses its last here
            orders = [np.argsort(SecureRandomness().uniforms(len(rows))) for rows in (self._rows, self._public)]
            file.add(key, [buckets, *(order[: self._few].tolist() for order in orders)])
        buckets, few_shot, public = file[key]
        prompts = [(self._rows, bucket) for bucket in (*buckets, (), few_shot)]
        prompts += [(self._public, public)] if self._public else []
        return [[(rows[i].input, rows[i].output) for i in chosen] for rows, chosen in prompts]

    def filled(self, number: int, file: PassFile) -> list[bool]:
        """Which members of this sample have an example: what the others say counts nothing."""
        self.draw(number, file)
        return [bool(bucket) for bucket in file["sample", number][0]]
