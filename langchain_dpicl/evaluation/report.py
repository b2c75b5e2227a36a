"""An evaluation's results: numbers as JSON, tables in Markdown, pictures, and a page over several of them."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.evaluation import tables
from langchain_dpicl.evaluation.plan import CostPoint
from langchain_dpicl.evaluation.scores import Score
from langchain_dpicl.evaluation.tasks import Task
from langchain_dpicl.plots.charts import Chart, Curve, Level, figure_of
from langchain_dpicl.plots.style import COLORS, save_figure

_METHODS = ("vote", "embedding", "joint-em", "ptr", "online", "offline")
_MARKERS = "os^DvP<>"
_DOTS = ((0, (1, 1)), (0, (1, 3)), (0, (3, 2, 1, 2)), (0, (6, 2, 1, 2, 1, 2)), (0, (2, 4)))
_GREYS = ("#222222", "#555555", "#777777", "#555555", "#222222")
_EPSILON = "epsilon of all releases together"

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
    drawn, measure = pictures(task.name, scores, costs), tables.main_measure(scores)
    main = tables.ordered([score for score in scores if not score.study])
    parts = [_counted([score.queries for score in main], "query", "queries")]
    parts.append(_counted([score.runs for score in main], "run", "runs"))
    plan = {name: settings[name] for name in _PLAN if name in settings}
    parts += [_PLAN[name].format(tables.number(value)) for name, value in plan.items()]
    model = f" with {settings['model']}" if settings.get("model") else ""
    results: dict[str, Any] = {
        "task": task.name,
        "measured": f"{task.name}{model}: {', '.join(parts)}.",
        "finding": " ".join(tables.findings(main, measure)),
        "table": tables.main_table(main, measure, plan),
        "papers": tables.papers_table(task, main),
        "pictures": list(drawn),
        "settings": settings,
        "scores": [asdict(score) for score in scores],
        "costs": [asdict(point) for point in costs],
    }
    # Strict JSON: null for numbers that are not finite, lists for NumPy's arrays, text for objects that JSON lacks.
    text = json.dumps(results, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
    results = json.loads(text, parse_constant=lambda _: None)
    studies = [
        tables.study_table(study, scores, measure) for study in dict.fromkeys(s.study for s in scores if s.study)
    ]
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
        try:
            results = json.loads((each / "results.json").read_text("utf-8"))
            written = {name: each / name for name in ("table.md", "results.json", "notes.md") if (each / name).exists()}
            notes, table = (written[n].read_text("utf-8") if n in written else "" for n in ("notes.md", "table.md"))
        except (OSError, ValueError) as failure:
            raise InvalidParameter("folder", str(each), f"results that can be read ({failure})") from None
        if not isinstance(results, dict) or not isinstance(results.get("settings"), dict):
            raise InvalidParameter("folder", str(each), "a results.json with settings, as an evaluation writes it")
        settings = {k: tables.number(v) for k, v in results["settings"].items() if v not in (None, "", [])}
        shown = results.get("pictures", sorted(path.name for path in each.glob("*.png")))
        links = [f"[{name}]({each.name}/{name})" for name in written if name != "notes.md"]
        parts += [
            f"## {each.name}",
            results.get("measured") or "; ".join(f"{name} {value}" for name, value in settings.items()),
            results.get("finding", ""),
            results.get("table") or table,
            results.get("papers", ""),
            notes,
            *(f"![{each.name}: {Path(n).stem}]({each.name}/{n})" for n in shown if (each / n).exists()),
            _command(results["settings"]),
            f"All tables and numbers: {', '.join(links)}.",
        ]
    path = folder / "README.md"
    with _writing(folder):
        _write(path, parts)
    return path


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


# -- pictures ----------------------------------------------------------------------------------------------------------


def pictures(name: str, scores: Sequence[Score], costs: Sequence[CostPoint]) -> dict[str, tuple[list[Chart], str]]:
    """Return the pictures of the task called `name`: file names, each with its charts and the title above them."""
    measure = tables.main_measure(scores)
    word = tables.MEASURES[measure]
    has_bars = any(math.isfinite(score.values[measure].deviation) for score in scores)
    y = f"{word}, %{' (bars: deviation over runs)' if has_bars else ''}"
    main = [score for score in scores if not score.study]
    private = list(dict.fromkeys(score.method for score in main if score.epsilon is not None))
    found: dict[str, tuple[list[Chart], str]] = {}
    if private:
        levels = []
        for score in main:
            if score.epsilon is None and score.method in private:
                words, index = f"{score.method}, not private: {score.mean(measure):.1f}", private.index(score.method)
                levels.append(Level(score.mean(measure), words, _look(score.method, private)[0], (3 * index, (5, 4))))
        others = sorted((s for s in main if s.method not in private), key=lambda score: -score.mean(measure))
        for index, score in enumerate(others):
            words = f"{score.method}, {tables.words_of(score, private)}: {score.mean(measure):.1f}".replace(
                ", public:", ":"
            )
            levels.append(Level(score.mean(measure), words, _GREYS[index % 5], _DOTS[index % 5]))
        chart = Chart(
            f"{name}: what privacy costs in {word}", _EPSILON, y, _by_epsilon(main, measure, private), levels, True
        )
        found[f"{measure}.png"] = [chart], ""
    for study in dict.fromkeys(score.study for score in scores if score.study):
        varied, words = [s for s in scores if s.study == study], study.replace("_", " ")
        curves = _curves([(score.facts[study], score) for score in varied], measure)
        found[f"{study}.png"] = [Chart(f"{name}: {word} against {words}", words, y, curves)], ""
    flipped = [s for s in scores if not s.study and s.epsilon is not None and "flipped" in s.facts]
    if flipped:
        curves = _by_epsilon(flipped, "flipped", list(dict.fromkeys(score.method for score in flipped)))
        words = "releases that noise changes, %"
        chart = Chart(f"{name}: how often noise changes the answer", _EPSILON, words, curves, is_log=True, amount=True)
        found["flips.png"] = [chart], ""
    if costs:
        charts = _costs(costs, [score for score in scores if score.study == "members"], measure, y)
        found["cost.png"] = charts, f"{name}: what 100 queries cost"
    return found


def _costs(costs: Sequence[CostPoint], scores: Sequence[Score], measure: str, y: str) -> list[Chart]:
    """Tokens, and the price if there is one, against the rate; the measure against the last of them."""

    def tokens(point: CostPoint) -> float:
        return point.prompt_tokens + point.answer_tokens

    kinds: dict[str, Callable[[CostPoint], float]] = {"tokens": tokens}
    if any(point.price > 0 for point in costs):
        kinds["price"] = lambda point: point.price
    charts = []
    for kind, amount in kinds.items():
        curves = []
        for place, grows in enumerate(("members", "shots")):
            held = [point for point in costs if point.grows == grows]
            if held:
                middle = held[len(held) // 2]
                fixed = f"{middle.shots:.0f} shots each" if grows == "members" else f"{middle.members} members"
                points = sorted((point.rate, amount(point)) for point in held)
                curves.append(Curve(points, f"more {grows}, {fixed}", COLORS[place], marker=_MARKERS[place]))
        title = "tokens, read and written" if kind == "tokens" else kind
        charts.append(Chart(title, "sampling rate of an owner", f"{kind} per 100 queries", curves, amount=True))
    if scores:
        # A cost is linear in the members and the owners of a sample: the points determine it.
        table = np.array([[point.members, point.owners, 1.0] for point in costs])
        weights = np.linalg.lstsq(table, np.array([amount(point) for point in costs]), rcond=None)[0]
        owners = costs[0].owners / costs[0].rate
        priced = [(float(weights @ [s.facts["members"], s.facts["rate"] * owners, 1.0]), s) for s in scores]
        below = {cost: f"\n({score.facts['members']:.0f})" for cost, score in priced}
        title, x = f"{tables.MEASURES[measure]} against cost, as members grow", f"{kind} per 100 queries (members)"
        charts.append(Chart(title, x, y, _curves(priced, measure), below=below))
    return charts


def _by_epsilon(scores: Sequence[Score], measure: str, methods: Sequence[str]) -> list[Curve]:
    """One curve for each of these methods."""
    noisy = [(score.epsilon, score) for score in scores if score.epsilon is not None]
    return [_curve([pair for pair in noisy if pair[1].method == method], measure, methods) for method in methods]


def _curves(pairs: Sequence[tuple[float, Score]], measure: str) -> list[Curve]:
    """One curve for each (method, epsilon): a colour for a method, paler for larger epsilons, dashed without one."""
    methods = list(dict.fromkeys(score.method for _, score in pairs))
    found = []
    for method in methods:
        kinds = {score.epsilon for _, score in pairs if score.method == method}
        shades = sorted(epsilon for epsilon in kinds if epsilon is not None)
        for epsilon in [*([None] if None in kinds else []), *shades]:
            share = 0.7 * shades.index(epsilon) / max(2, len(shades) - 1) if epsilon is not None else 0.0
            held = [(x, score) for x, score in pairs if (score.method, score.epsilon) == (method, epsilon)]
            found.append(_curve(held, measure, methods, f"{method}, {tables.words_of(held[0][1], ())}", share))
    return found


def _curve(
    pairs: Sequence[tuple[float, Score]], measure: str, methods: Sequence[str], label: str = "", paler: float = 0.0
) -> Curve:
    """A measure, or a public number, of the scores of one of the methods."""
    held = sorted(pairs, key=lambda pair: pair[0])
    first = held[0][1]
    color, marker = _look(first.method, methods)
    shade = tuple((1 - paler) * int(color[i : i + 2], 16) / 255 + paler for i in (1, 3, 5)) if paler else color
    spreads = [score.values[measure].deviation for _, score in held if measure in score.values]
    points = [(x, score.mean(measure) if measure in score.values else score.facts[measure]) for x, score in held]
    return Curve(points, label or first.method, shade, "--" if first.epsilon is None else "-", marker, spreads)


def _look(method: str, methods: Sequence[str]) -> tuple[str, str]:
    """Colour and marker: the same for a known method in every picture."""
    place = [*_METHODS, *(each for each in methods if each not in _METHODS)].index(method) % len(COLORS)
    return COLORS[place], _MARKERS[place]
