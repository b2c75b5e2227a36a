"""An evaluation's results: numbers as JSON, tables in Markdown, pictures, and a page over several of them."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.evaluation.pictures import pictures
from langchain_dpicl.evaluation.plan import CostPoint
from langchain_dpicl.evaluation.scores import Score
from langchain_dpicl.evaluation.tables import (
    findings,
    main_measure,
    main_table,
    number,
    ordered,
    papers_table,
    study_table,
)
from langchain_dpicl.evaluation.tasks import Task
from langchain_dpicl.plots.charts import figure_of
from langchain_dpicl.plots.style import save_figure

_PLAN = {
    "members": "{} members",
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
) -> dict[str, Any]:
    """Write ``results.json``, ``table.md`` and the pictures into the folder; return the content of ``results.json``.

    The reference of a private method is the score of that name without an epsilon: the same aggregate without noise.
    A loss is the difference of two means, in points of the measure.

    - ``settings``: the settings of the run. The page names `model`, `members`, `shots`, `rate`, `releases`, `delta` and
      `command` (a line, or its words).
    - ``costs``: a cost curve, for ``cost.png``.

    Raises `InvalidParameter` for a folder that cannot be written; and without matplotlib, after the numbers and the
    table are written.
    """
    drawn, measure = pictures(task.name, scores, costs), main_measure(scores)
    main = ordered([score for score in scores if not score.study])
    parts = [_counted([score.queries for score in main], "query", "queries")]
    parts.append(_counted([score.runs for score in main], "run", "runs"))
    plan = {name: settings[name] for name in _PLAN if name in settings}
    parts += [_PLAN[name].format(number(value)) for name, value in plan.items()]
    model = f" with {settings['model']}" if settings.get("model") else ""
    results: dict[str, Any] = {
        "task": task.name,
        "measured": f"{task.name}{model}: {', '.join(parts)}.",
        "finding": " ".join(findings(main, measure)),
        "table": main_table(main, measure, plan),
        "papers": papers_table(task, main),
        "pictures": list(drawn),
        "settings": settings,
        "scores": [asdict(score) for score in scores],
        "costs": [asdict(point) for point in costs],
    }
    # Strict JSON: null for numbers that are not finite, lists for NumPy's arrays, text for objects that JSON lacks.
    text = json.dumps(results, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
    results = json.loads(text, parse_constant=lambda _: None)
    studies = [study_table(study, scores, measure) for study in dict.fromkeys(s.study for s in scores if s.study)]
    parts = [f"# {task.name}", results["measured"], results["finding"], results["table"], *studies, results["papers"]]
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
        (folder / "results.json").write_text(text + "\n", encoding="utf-8")
        _write(folder / "table.md", [*parts, _command(results["settings"])])
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
    about = "Made from the `results.json` and the `notes.md` of each folder."
    parts = ["# Results", about, "\n".join(links)]
    for each in found:
        parts += _section(each)
    path = folder / "README.md"
    with _writing(folder):
        _write(path, parts)
    return path


def _section(folder: Path) -> list[str]:
    try:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        files = {
            name: (folder / name).read_text("utf-8") for name in ("notes.md", "table.md") if (folder / name).exists()
        }
    except (OSError, ValueError) as failure:
        raise InvalidParameter("folder", str(folder), f"results that can be read ({failure})") from None
    if not isinstance(results, dict) or not isinstance(results.get("settings"), dict):
        raise InvalidParameter("folder", str(folder), "a results.json with settings, as an evaluation writes it")
    settings = results["settings"]
    numbers = "; ".join(f"{name} {number(value)}" for name, value in settings.items() if value not in (None, "", []))
    shown = results.get("pictures", sorted(path.name for path in folder.glob("*.png")))
    links = [f"[{name}]({folder.name}/{name})" for name in ("table.md", "results.json") if (folder / name).exists()]
    return [
        f"## {folder.name}",
        results.get("measured") or numbers,
        results.get("finding", ""),
        results.get("table") or files.get("table.md", ""),
        results.get("papers", ""),
        files.get("notes.md", ""),
        *(f"![{folder.name}: {Path(n).stem}]({folder.name}/{n})" for n in shown if (folder / n).exists()),
        _command(settings),
        f"All tables and numbers: {', '.join(links)}.",
    ]


def _counted(counts: Sequence[int], one: str, many: str) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,} {one if low == 1 else many}" if low == high else f"{low:,} to {high:,} {many}"


def _command(settings: Mapping[str, Any]) -> str:
    command = settings.get("command")
    line = shlex.join(map(str, command)) if isinstance(command, (list, tuple)) else command
    return f"```\n{line}\n```" if line else ""


def _write(path: Path, parts: Sequence[str]) -> None:
    path.write_text("\n\n".join(part.strip() for part in parts if part.strip()) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise InvalidParameter("folder", str(folder), f"a folder that can be written ({failure})") from None
