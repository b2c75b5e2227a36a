"""How right a head is, by epsilon, by public texts and by number of owners.

    python examples/studies/head_study.py --task trec=train.jsonl:test.jsonl --task sst2=train.jsonl:test.jsonl \\
        --other trec=sst2 --other sst2=trec --output results/head

Each task is a file of private records and one of test questions; each record is its own owner. The public texts of the
same source are a third file (`NAME=TRAIN:TEST:PUBLIC`, whose labels are not read), or else 500 of the records, drawn by
a fixed seed, which give up their labels and are not private then. `--other A=B` takes the public texts of task B for
task A, `--column A=NAME` another column than "label". Every setting is a default. By number of owners stand beside a
head those of the rule of earlier releases, for the same owners: the gain is the mean of the differences of the fits in
pairs. Accuracies of single fits are kept in OUTPUT/fits.jsonl, so that a study that was
stopped goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray
from tqdm import tqdm

from langchain_dpicl import PrivateHead
from langchain_dpicl.lab.evaluation.heads import fit_head, head_without_noise
from langchain_dpicl.lab.evaluation.scores import share_error
from langchain_dpicl.lab.plots import COLORS, GREY, SHADES, new_figure, plain, save_figure
from langchain_dpicl.local import local_embeddings
from langchain_dpicl.once.steps import FeatureMap
from langchain_dpicl.store.datafile import read_records

EPSILONS = (0.3, 1.0, 3.0, 8.0)
DELTA = 1e-5
PUBLIC, FITS = 500, 5
SIZES = (250, 500, 1000, 2000, 4000)
NONE, SAME, OTHER = "none", "same source", "another source"


class Known(Embeddings):
    """Vectors that were made before, by text, and kept in a folder if there is one."""

    model = "all-MiniLM-L6-v2"

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._vectors = folder, {}  # type: ignore[var-annotated]

    def embed(self, name: str, texts: Sequence[str]) -> NDArray[np.float32]:
        """The vectors of a file's texts."""
        path = None if self._folder is None else self._folder / f"{name}.npy"
        if path is not None and path.exists():
            found = np.load(path)
        else:
            parts = range(0, len(texts), 256)
            rows = [local_embeddings().embed_documents(list(texts[i : i + 256])) for i in tqdm(parts, desc=name)]
            found = np.concatenate([np.asarray(part, np.float32) for part in rows])
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                np.save(path, found)
        self._vectors.update(zip(texts, found, strict=True))
        return np.asarray(found, np.float32)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self._vectors[text].tolist() for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return [float(number) for number in self._vectors[text]]


@dataclass(frozen=True, eq=False)
class Rows:
    """Records: their texts, labels and embeddings."""

    texts: list[str]
    labels: list[str]
    vectors: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.texts)

    def at(self, places: NDArray[np.int64]) -> Rows:
        """The records at these places."""
        return Rows([self.texts[i] for i in places], [self.labels[i] for i in places], self.vectors[places])


@dataclass(frozen=True, eq=False)
class Data:
    """A task: private records, test questions, public texts of the same source, and the public list of labels."""

    private: Rows
    tests: Rows
    public: Rows
    labels: list[str]


def load(name: str, files: Sequence[str], labels: Sequence[str], known: Known, column: str = "label") -> Data:
    """Read a task, whose labels are in this column.

    If ``labels`` are given, private records and test questions with other labels are left out.
    """
    found = []
    for part, path in zip(("train", "test", "public"), files, strict=False):
        rows = read_records(path)
        texts = [str(row.get("text", row.get("input"))) for row in rows]
        if rows[0].get("title"):
            texts = [f"{row['title']}. {text}" for row, text in zip(rows, texts, strict=True)]
        told = [str(row.get(column, row["label"])) for row in rows]
        found.append(Rows(texts, told, known.embed(f"{name}-{part}", texts)))
    allowed = list(labels) or sorted(set(found[0].labels))
    private, tests = (each.at(np.flatnonzero(np.isin(each.labels, allowed))) for each in found[:2])
    if len(found) > 2:
        return Data(private, tests, found[2], allowed)
    drawn = np.random.default_rng(0).permutation(len(private))
    count = min(PUBLIC, len(private) // 10)
    return Data(private.at(np.sort(drawn[count:])), tests, private.at(drawn[:count]), allowed)


def fitted(
    private: Rows, labels: list[str], epsilon: float, features: FeatureMap, known: Known, **how: Any
) -> PrivateHead:
    """A head by the product's own release, on a ledger that is thrown away. ``how``: further options of `fit_head`."""
    held = private.texts, private.labels, private.vectors
    return fit_head(held, known, labels, epsilon, DELTA, features, **how)[0]


def features_of(public: Rows | None, dimension: int) -> FeatureMap:
    """As `PrivateHead.fit` makes them."""
    return FeatureMap(dimension) if public is None else FeatureMap.of(public.vectors.astype(np.float64))


def right_share(head: PrivateHead, tests: Rows) -> float:
    """The share of test questions that a head answers right."""
    answers = head.answers(tests.vectors)
    return sum(a["label"] == right for a, right in zip(answers, tests.labels, strict=True)) / len(tests)


class Study:
    """Fits, each made once: their accuracies are kept in a file."""

    def __init__(self, data: dict[str, Data], others: dict[str, str], known: Known, kept: Path) -> None:
        self._data, self._others, self._known, self._kept = data, others, known, kept
        lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
        self._found: dict[str, float] = {line["fit"]: line["accuracy"] for line in lines}

    def share(
        self, task: str, public: str, epsilon: float | None, owners: int, number: int, even: bool = True
    ) -> float:
        """The share of right answers of one fit, which has noise of its own; of all its number draws the same."""
        name = f"{task}, {public}, epsilon {epsilon}, {owners} owners, fit {number}{'' if even else ', earlier rule'}"
        if name not in self._found:
            data, features = self._data[task], self._features(task, public)
            drawn = np.random.default_rng(number).permutation(len(data.private))[:owners]
            some = data.private.at(np.sort(drawn))
            if epsilon is None:
                held = some.texts, some.labels, some.vectors
                head = head_without_noise(held, self._known, data.labels, features)
            else:
                head = fitted(some, data.labels, epsilon, features, self._known, even=even)
            self._found[name] = right_share(head, data.tests)
            with self._kept.open("a") as file:
                file.write(json.dumps({"fit": name, "accuracy": self._found[name]}) + "\n")
        return self._found[name]

    def row(self, task: str, public: str, epsilon: float | None, owners: int, fits: int) -> dict[str, Any]:
        """The mean of some fits, each with noise of its own and, if ``owners`` are fewer than all, owners of its own.

        Its standard error is that of the test questions and of the fits together. ``epsilon`` None: without noise. With
        noise and public texts of the same source: beside the earlier rule, fit by fit.
        """
        asked = task, public, epsilon, owners
        shares = [self.share(*asked, number) for number in range(fits)]
        mean, error = float(np.mean(shares)), share_error(shares, len(self._data[task].tests))
        row = {"task": task, "public": public, "epsilon": epsilon, "owners": owners, "fits": fits}
        row |= {"accuracy": mean, "standard_error": error, "least": min(shares), "most": max(shares)}
        if epsilon is not None and public == SAME:
            gains = np.array(shares) - [self.share(*asked, number, even=False) for number in range(fits)]
            row |= {"gain": float(gains.mean()), "gain_error": _error(gains)}
        return row

    @cache  # noqa: B019
    def _features(self, task: str, public: str) -> FeatureMap:
        texts = {NONE: None, SAME: self._data[task].public, OTHER: self._data[self._others.get(task, task)].public}
        return features_of(texts[public], self._data[task].private.vectors.shape[1])

    def asked(self) -> list[tuple[str, str, float | None, int, int]]:
        """The rows: all owners with all public texts, then fewer owners with those of the same source."""
        asked: list[tuple[str, str, float | None, int, int]] = []
        for task, data in self._data.items():
            count = len(data.private)
            for public in (SAME, OTHER, NONE) if task in self._others else (SAME, NONE):
                asked += [(task, public, epsilon, count, FITS) for epsilon in EPSILONS]
                asked.append((task, public, None, count, 1))
            for size in (size for size in SIZES if size <= 0.9 * count):
                asked += [(task, SAME, epsilon, size, FITS) for epsilon in (*EPSILONS, None)]
        return asked

    def rows(self) -> list[dict[str, Any]]:
        """Every row."""
        return [self.row(*each) for each in tqdm(self.asked(), desc="heads")]


def _error(values: NDArray[np.float64]) -> float:
    """The standard error of a mean; 0 of one number."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def beside(data: dict[str, Data], votes: dict[str, str]) -> dict[str, dict[str, Any]]:
    """What needs no head: the most common label; an evaluation's best public prompt, and its best vote at epsilon 1."""
    found: dict[str, dict[str, Any]] = {}
    for task, each in data.items():
        count = max(each.tests.labels.count(label) for label in each.labels)
        found[task] = {"most common label": 100 * count / len(each.tests)}
        if task in votes:
            scores = [s for s in json.loads(Path(votes[task]).read_text())["scores"] if not s.get("study")]
            kinds = {
                "public prompt": [s for s in scores if s["method"].startswith("zero-shot")],
                "private vote, epsilon 1": [s for s in scores if s["epsilon"] == 1.0],
            }
            for kind, some in kinds.items():
                value = max((s["values"]["accuracy"] for s in some), key=lambda value: value["mean"])
                found[task] |= {kind: value["mean"], f"{kind}: standard error": value["error"]}
    return found


def tables(rows: list[dict[str, Any]], other: dict[str, dict[str, Any]]) -> str:
    """Four tables as Markdown: by epsilon and public texts, by owners, the gain over the earlier rule, and the rest."""

    def cell(row: dict[str, Any] | None) -> str:
        return "" if row is None else f"{100 * row['accuracy']:.1f} ({100 * row['standard_error']:.1f})"

    def gain(row: dict[str, Any] | None) -> str:
        return "" if row is None else f"{100 * row['gain']:+.1f} ({100 * row['gain_error']:.1f})"

    found = {(row["task"], row["public"], row["epsilon"], row["owners"]): row for row in rows}
    most = {task: max(row["owners"] for row in rows if row["task"] == task) for task in other}
    epsilons = (*EPSILONS, None)
    heads = " | ".join("no noise" if e is None else f"epsilon {e:g}" for e in epsilons)
    lines = [f"| task | owners | public texts | {heads} |", "|" + "---|" * (3 + len(epsilons))]
    for task, public in itertools.product(other, (SAME, OTHER, NONE)):
        if (task, public, None, most[task]) in found:
            cells = " | ".join(cell(found.get((task, public, e, most[task]))) for e in epsilons)
            lines.append(f"| {task} | {most[task]:,} | {public} | {cells} |")
    sizes = sorted({row["owners"] for row in rows} & {*SIZES})
    heads = " | ".join(f"{size:,}" for size in sizes)
    lines += ["", "By number of owners, with public texts of the same source:", ""]
    lines += [f"| task | epsilon | {heads} | all |", "|" + "---|" * (3 + len(sizes))]
    for task, epsilon in itertools.product(other, EPSILONS):
        cells = " | ".join(cell(found.get((task, SAME, epsilon, size))) for size in (*sizes, most[task]))
        lines.append(f"| {task} | {epsilon:g} | {cells} |")
    lines += ["", "Beside the rule of earlier releases, for the same owners, in points:", ""]
    lines += [f"| task | epsilon | {heads} | all |", "|" + "---|" * (3 + len(sizes))]
    for task, epsilon in itertools.product(other, EPSILONS):
        cells = " | ".join(gain(found.get((task, SAME, epsilon, size))) for size in (*sizes, most[task]))
        lines.append(f"| {task} | {epsilon:g} | {cells} |")
    kinds = list(dict.fromkeys(k for each in other.values() for k in each if not k.endswith("standard error")))
    lines += ["", "Beside a head:", "", f"| task | {' | '.join(kinds)} |", "|" + "---|" * (1 + len(kinds))]
    for task, each in other.items():
        errors = [f" ({each[f'{k}: standard error']:.1f})" if f"{k}: standard error" in each else "" for k in kinds]
        cells = " | ".join(f"{each[k]:.1f}{e}" if k in each else "" for k, e in zip(kinds, errors, strict=True))
        lines.append(f"| {task} | {cells} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], other: dict[str, dict[str, Any]], path: Path) -> None:
    """Accuracy by the number of owners, one panel for each task: when a head pays."""
    columns = min(2, len(other))
    high = math.ceil(len(other) / columns)
    figure = new_figure(path, 1.0 + 4.6 * columns, 1.0 + 3.5 * high)
    levels = {"most common label": (GREY, ":"), "public prompt": (COLORS[1], "--")}
    levels["private vote, epsilon 1"] = (COLORS[6], "-.")
    shades: dict[float | None, str] = {**dict(zip(EPSILONS, SHADES, strict=False)), None: GREY}
    for axes, (task, each) in zip(figure.subplots(high, columns, squeeze=False).flat, other.items(), strict=False):
        mine = [row for row in rows if row["task"] == task and row["public"] == SAME]
        for epsilon, color in shades.items():
            some = sorted((row for row in mine if row["epsilon"] == epsilon), key=lambda row: row["owners"])
            x, y, bars = ([row[key] for row in some] for key in ("owners", "accuracy", "standard_error"))
            look = {"color": color, "marker": "o", "markersize": 4, "linewidth": 1.6, "capsize": 2, "elinewidth": 0.9}
            look |= {"linestyle": "--", "marker": "", "zorder": 1.5} if epsilon is None else {}
            name = "head without noise, not private" if epsilon is None else f"head, epsilon {epsilon:g}"
            axes.errorbar(x, [100 * v for v in y], yerr=[100 * v for v in bars], label=name, **look)
        for kind, (color, style) in levels.items():
            if kind in each:
                axes.axhline(each[kind], color=color, linestyle=style, linewidth=1.4, label=kind)
        ticks = sorted({row["owners"] for row in mine})
        axes.set_xscale("log")
        axes.minorticks_off()
        shown = [t for t in ticks if t == ticks[-1] or t <= 0.7 * ticks[-1]]
        axes.set_xticks(shown, [plain(tick) for tick in shown], fontsize=9)
        axes.set_xlim(ticks[0] / 1.1, ticks[-1] * 1.1)
        axes.set_title(task)
        axes.set(xlabel="owners", ylabel="accuracy in %")
    for axes in figure.axes[len(other) :]:
        axes.remove()
    legends = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles = {label: handle for pair in legends for handle, label in zip(*pair, strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    save_figure(figure, path)


def named(values: Sequence[str]) -> dict[str, str]:
    """The options of the form NAME=VALUE."""
    return dict(each.split("=", 1) for each in values)


def task_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what the tasks are."""
    parser.add_argument("--task", action="append", required=True, metavar="NAME=TRAIN:TEST[:PUBLIC]")
    parser.add_argument("--labels", action="append", default=[], metavar="NAME=A,B", help="leave other labels out")
    parser.add_argument("--column", action="append", default=[], metavar="NAME=COLUMN", help="of the labels")
    parser.add_argument("--vectors", type=Path, help="a folder to keep embeddings in, which are private")
    parser.add_argument("--output", type=Path, required=True, help="a folder")


def loaded(options: argparse.Namespace, known: Known) -> dict[str, Data]:
    """The tasks by name."""
    labels = {name: text.split(",") for name, text in named(options.labels).items()}
    tasks = {name: files.split(":") for name, files in named(options.task).items()}
    columns = named(options.column)
    return {
        name: load(name, files, labels.get(name, []), known, columns.get(name, "label"))
        for name, files in tasks.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Fit every head, and write results.json, table.md and owners.png."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    task_options(parser)
    parser.add_argument("--other", action="append", default=[], metavar="NAME=NAME", help="another task's public texts")
    parser.add_argument("--votes", action="append", default=[], metavar="NAME=FILE", help="results of an evaluation")
    options = parser.parse_args(argv)
    known = Known(options.vectors)
    data = loaded(options, known)
    options.output.mkdir(parents=True, exist_ok=True)
    rows = Study(data, named(options.other), known, options.output / "fits.jsonl").rows()
    other = beside(data, named(options.votes))
    words = ", ".join(f"{name} {len(each.tests):,} ({len(each.labels)} labels)" for name, each in data.items())
    publics = ", ".join(f"{name} {len(each.public)}" for name, each in data.items())
    measured = (
        f"Heads on MiniLM embeddings: the accuracy of {FITS} fits at delta {DELTA:g} in %, with its standard error in "
        f"brackets. Every setting is a default, each record is its own owner. Test questions: {words}. Public texts of "
        f"the same source: {publics}."
    )
    line = shlex.join(["python", "examples/studies/head_study.py", *(sys.argv[1:] if argv is None else argv)])
    found: dict[str, Any] = {"measured": measured, "table": tables(rows, other), "pictures": ["owners.png"]}
    found |= {"settings": {"delta": DELTA, "fits": FITS, "command": line}, "rows": rows, "beside": other}
    (options.output / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.output / "table.md").write_text(f"{measured}\n\n{found['table']}\n")
    draw(rows, other, options.output / "owners.png")
    print(found["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
