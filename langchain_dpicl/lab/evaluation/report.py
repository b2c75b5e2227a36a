"""An evaluation's results: numbers as JSON, tables and sentences in Markdown, pictures, and a page over several."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.evaluation.evaluate import CostPoint
from langchain_dpicl.lab.evaluation.findings import advice, choices, findings
from langchain_dpicl.lab.evaluation.pictures import pictures
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.lab.evaluation.scores import MEASURES, Score, Value, main_measure, ordered, words_of
from langchain_dpicl.lab.evaluation.tasks import PaperFigure, Task
from langchain_dpicl.lab.plots import figure_of, save_figure

_OUR_NAMES = {"RNM": "vote", "ESA": "embedding", "DPS-MOZO": "online"}
_NOISELESS = " without noise"
_AGAINST_FEW_SHOT = " minus non-private few-shot"
_PLAN = {
    "members": "{} members",
    "calls": "{} calls of one owner each",
    "shots": "{} shots each",
    "rate": "sampling rate {}",
    "releases": "{} releases",
    "delta": "delta {}",
}


def write_report(
    folder: Path,
    task: Task,
    scores: Sequence[Score],
    settings: Mapping[str, Any],
    costs: Sequence[CostPoint] = (),
    shown: Sequence[Row] = (),
) -> dict[str, Any]:
    """Write ``results.json``, ``table.md`` and the pictures into the folder; return the content of ``results.json``.

    The reference of a private method is the score of that name without an epsilon: the same aggregate without noise.
    A loss is the difference of two means, in points of the measure.

    - ``settings``: the settings of the run. The page names `model`, `members`, `shots`, `rate`, `releases`, `delta` and
      `command` (a line, or its words).
    - ``costs``: a cost curve, for ``cost.png``.
    - ``shown``: the first queries, whose texts the scores hold: they stand in ``table.md``.

    Raises `InvalidParameter` for a folder that cannot be written; and without matplotlib, after the numbers and the
    table are written.
    """
    drawn = pictures(task.name, scores, costs)
    measure = main_measure(scores)
    main = ordered([score for score in scores if not score.study])
    plan = {name: settings[name] for name in _PLAN if name in settings}
    parts = [
        _span([score.queries for score in main], "query", "queries"),
        _span([score.runs for score in main], "run", "runs"),
        *(_PLAN[name].format(number(value)) for name, value in plan.items()),
    ]
    subject = task.name
    if settings.get("model"):
        subject += f" with {settings['model']}"
    said = [f"- {each}" for each in advice(scores)]
    if said:
        said = ["**Vote or head?**", "", *said]
    results: dict[str, Any] = {
        "task": task.name,
        "measured": f"{subject}: {', '.join(parts)}.",
        "finding": " ".join(findings(main, measure)),
        "table": main_table(main, measure, plan),
        "advice": "\n".join(said),
        "choices": [
            {
                "epsilon": c.epsilon,
                "prefer": c.prefer,
                "difference": c.difference,
                "standard_error": c.error,
            }
            for c in choices(main)
        ],
        "papers": papers_table(task, main),
        "pictures": list(drawn),
        "settings": settings,
        "scores": [asdict(score) for score in scores],
        "costs": [asdict(point) for point in costs],
    }
    # Strict JSON: null for numbers that are not finite, lists for NumPy's arrays, text for objects that JSON lacks.
    text = json.dumps(results, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
    results = json.loads(text, parse_constant=lambda _: None)
    page = [
        f"# {task.name}",
        *(results[name] for name in ("measured", "finding", "table", "advice")),
        *(study_table(study, scores, measure) for study in dict.fromkeys(s.study for s in scores if s.study)),
        texts_shown(main, shown),
        results["papers"],
        _command(results["settings"]),
    ]
    _write(
        folder / "results.json",
        [
            json.dumps(
                results,
                indent=1,
                ensure_ascii=False,
                allow_nan=False,
            )
        ],
    )
    _write(folder / "table.md", page)
    for name, (charts, title) in drawn.items():
        save_figure(figure_of(charts, folder / name, title), folder / name)
    return results


def write_index(folder: Path) -> Path:
    """Write ``README.md`` over all sub-folders that hold a ``results.json``; link those that hold a ``README.md`` only.

    Return its path. Each section has the measurement, its finding, the tables, the pictures and the command. A file
    ``notes.md`` in a sub-folder is written by hand and follows the tables; its links start from `folder`. Raises
    `InvalidParameter` if there are no results, and for a file that is not an evaluation's.
    """
    found = sorted(path.parent for path in folder.glob("*/results.json"))
    if not found:
        raise InvalidParameter("folder", str(folder), "a folder with sub-folders that hold a results.json")
    pages = sorted(path.parent for path in folder.glob("*/README.md") if path.parent not in found)
    links = [f"- [{each.name}]({each.name}/README.md)" for each in pages]
    anchors = [re.sub(r"[^\w\- ]", "", each.name.lower()).replace(" ", "-") for each in found]
    links += [f"- [{each.name}](#{anchor})" for each, anchor in zip(found, anchors, strict=True)]
    parts = ["# Results", "Made from the `results.json` and the `notes.md` of each folder.", "\n".join(links)]
    for each in found:
        try:
            results = json.loads((each / "results.json").read_text("utf-8"))
            written = {name: each / name for name in ("table.md", "results.json", "notes.md") if (each / name).exists()}
            notes, table = (written[n].read_text("utf-8") if n in written else "" for n in ("notes.md", "table.md"))
        except (OSError, ValueError) as failure:
            raise InvalidParameter("folder", str(each), f"results that can be read ({failure})") from None
        if not isinstance(results, dict) or not isinstance(results.get("settings"), dict):
            raise InvalidParameter("folder", str(each), "a results.json with settings, as an evaluation writes it")
        settings = {k: number(v) for k, v in results["settings"].items() if v not in (None, "", [])}
        shown = results.get("pictures", sorted(path.name for path in each.glob("*.png")))
        links = [f"[{name}]({each.name}/{name})" for name in written if name != "notes.md"]
        parts += [
            f"## {each.name}",
            results.get("measured") or "; ".join(f"{name} {value}" for name, value in settings.items()),
            results.get("finding", ""),
            results.get("table") or table,
            results.get("advice", ""),
            results.get("papers", ""),
            notes,
            *(f"![{each.name}: {Path(n).stem}]({each.name}/{n})" for n in shown if (each / n).exists()),
            _command(results["settings"]),
            f"All tables and numbers: {', '.join(links)}.",
        ]
    return _write(folder / "README.md", parts)


def _command(settings: Mapping[str, Any]) -> str:
    command = settings.get("command")
    if isinstance(command, (list, tuple)):
        command = shlex.join(map(str, command))
    return f"```\n{command}\n```" if command else ""


def _span(counts: Sequence[int], one: str, many: str) -> str:
    """Return the least and the largest of some counts, with their unit."""
    span = " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))
    return f"{span} {one if max(counts) == 1 else many}"


def _write(path: Path, parts: Sequence[str]) -> Path:
    """Write the parts that are not empty, with an empty line between them."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(part.strip() for part in parts if part.strip()) + "\n", encoding="utf-8")
    except OSError as failure:
        raise InvalidParameter("folder", str(path.parent), f"a folder that can be written ({failure})") from None
    return path


# -- tables ------------------------------------------------------------------------------------------------------------


def main_table(main: Sequence[Score], measure: str, said: Mapping[str, Any]) -> str:
    """A row for each method and epsilon. The numbers in `said`, which stand elsewhere, are not repeated."""
    plain = {score.method: score.mean(measure) for score in main if score.epsilon is None}
    measures = [name for name in MEASURES if name in main[0].values]
    rows = []
    for score in main:
        points = flipped = ""
        if score.epsilon is not None and score.method in plain:
            points = f"{score.mean(measure) - plain[score.method]:+.1f}"
        if "flipped" in score.facts:
            flipped = f"{score.facts['flipped']:.1f} %"
        facts = {k: v for k, v in score.facts.items() if k not in ("flipped", "epsilon") and said.get(k) != v}
        rows.append(
            [
                score.method,
                words_of(score).removeprefix("epsilon "),
                *(_cell(score.values[name]) for name in measures),
                points,
                flipped,
                ", ".join(f"{name} {number(value)}" for name, value in facts.items()),
            ]
        )
    head = [
        "method",
        "epsilon",
        *(MEASURES[name] for name in measures),
        "against no noise",
        "changed by noise",
        "public numbers",
    ]
    note = "In per cent; ± is the standard deviation over runs (samples of owners, draws of noise)."
    if errors := [s.values[measure].error for s in main if math.isfinite(s.values[measure].error)]:
        note += f" The standard error of {MEASURES[measure]} over queries is at most {max(errors):.1f}."
    return f"{_table(head, rows)}\n\n{note}"


def study_table(study: str, scores: Sequence[Score], measure: str) -> str:
    """An ablation: a row for each varied value, a column for each method and epsilon."""
    held = ordered([score for score in scores if score.study == study])
    kinds = {(score.method, score.epsilon): f"{score.method}, {words_of(score)}" for score in held}
    cells = {(s.method, s.epsilon, s.facts[study]): _cell(s.values[measure]) for s in held}
    varied = sorted({score.facts[study] for score in held})
    rows = [[number(value), *(cells.get((*kind, value), "") for kind in kinds)] for value in varied]
    words = study.replace("_", " ")
    return f"## {MEASURES[measure]} against {words}\n\n{_table([words, *kinds.values()], rows)}"


def texts_shown(main: Sequence[Score], shown: Sequence[Row]) -> str:
    """Each shown query with its right answer, and below it the text of each method in its first run."""
    parts = []
    for place, row in enumerate(shown):
        rows = [["right", "", row.output]]
        rows += [[s.method, words_of(s).removeprefix("epsilon "), s.texts[place]] for s in main if s.texts]
        one_line = [[*cells, " ".join(text.split())] for *cells, text in rows]
        parts.append(f"*{' '.join(row.input.split())}*\n\n{_table(['method', 'epsilon', 'text'], one_line)}")
    return "\n\n".join(["## Some texts", *parts]) if parts else ""


def papers_table(task: Task, main: Sequence[Score]) -> str:
    """Every published figure of the task, and beside it ours of the same method at the same epsilon, if there is one.

    The points lost are the difference to the same method without noise, theirs from the same source only.
    """
    if not task.paper:
        return ""
    sources = list(dict.fromkeys(figure.source for figure in task.paper))
    rows = [
        [
            figure.method,
            figure.model,
            "no noise" if figure.epsilon is None else f"{figure.epsilon:g}",
            figure.metric.removesuffix(_AGAINST_FEW_SHOT),
            *_published(task, figure),
            *_beside(main, figure),
            str(sources.index(figure.source) + 1),
        ]
        for figure in task.paper
    ]
    head = ["method", "model", "epsilon", "measure", "published", "points lost", "here", "points lost here", "source"]
    return "\n\n".join(
        [
            "**Published figures are other models' numbers**, with other prompts and accounting: compare the points "
            "lost, not the level.",
            _table(head, rows),
            "\n".join(f"{place}. {source}." for place, source in enumerate(sources, 1)),
        ]
    )


def _published(task: Task, figure: PaperFigure) -> tuple[str, str]:
    """A figure's level, and the points lost."""
    if figure.metric.endswith(_AGAINST_FEW_SHOT):
        return "", f"{figure.value:+.1f} to few-shot"
    plain = {(f.source, f.model, f.metric, f.method): f.value for f in task.paper if f.epsilon is None}
    base = plain.get((figure.source, figure.model, figure.metric, figure.method + _NOISELESS))
    lost = "" if base is None else f"{figure.value - base:+.1f}"
    return f"{figure.value:.1f}", lost


def _beside(main: Sequence[Score], figure: PaperFigure) -> tuple[str, str]:
    """Our level for a figure's method and epsilon, and the points lost; empty if nothing here is like it."""
    word = figure.metric.removesuffix(_AGAINST_FEW_SHOT)
    measure = next(name for name in MEASURES if MEASURES[name] == word)
    known = {(score.method, score.epsilon): score for score in main if measure in score.values}
    name = figure.method.removesuffix(_NOISELESS)
    method = _OUR_NAMES.get(name, name)
    if (ours := known.get((method, figure.epsilon))) is None:
        return "", ""
    base, against = known.get((method, None)), ""
    if word != figure.metric:
        base = next((s for s in main if re.fullmatch(r"\d+-shot", s.method)), None)
        against = " to few-shot"
    level = f"{ours.mean(measure):.1f}"
    if figure.epsilon is None or base is None:
        return level, ""
    return level, f"{ours.mean(measure) - base.mean(measure):+.1f}{against}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Without the empty columns."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [[head[i] for i in kept], ["---"] * len(kept), *([row[i] for i in kept] for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _cell(value: Value) -> str:
    return f"{value.mean:.1f} ± {value.deviation:.1f}" if math.isfinite(value.deviation) else f"{value.mean:.1f}"


def number(value: Any) -> str:
    """A number to three digits or whole, a list of them, or a text."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.3g}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:g}"
    return ", ".join(map(number, value)) if isinstance(value, (list, tuple)) else str(value)
