"""How right a typed answer of three fields is: calls of a small model, with noise and without, and other ways.

    python examples/studies/extract_study.py --data train.jsonl --test test_multiref.jsonl --output results/extract

The data are E2E's: a sentence about a restaurant (``output``) and what it says (``input``). A question is a sentence,
its answer a `Restaurant`. The data name no owners, so a fixed seed gives each owner its records; a call shows those of
one owner that are nearest to the question, as sentence and JSON, and the model writes JSON for the question. What the
selector drew and the model said is kept (--kept), so that a study that was stopped goes on, and other plans cost no
call. `Structured` itself draws the noise, many times for each plan. For data that are public in truth.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gated_study import command_of
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda
from pydantic import BaseModel, Field
from tqdm import tqdm

from langchain_dpicl import ExemplarStore, PoissonExampleSelector, Structured
from langchain_dpicl.errors import DPICLError, InvalidParameter
from langchain_dpicl.lab.evaluation.heads import kept_vectors
from langchain_dpicl.lab.evaluation.passes import PassFile, ask_members, key_of
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.lab.evaluation.scores import Score, Value
from langchain_dpicl.lab.plots import COLORS, GREY, Chart, Curve, Level, figure_of, save_figure
from langchain_dpicl.local import local_embeddings, local_llm
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.choice import Crowd, options_of
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.private import boundary
from langchain_dpicl.store.datafile import read_records

CALLS, OWN, ALL = "calls", "nearest records, no model", "all three"
NO_NOISE = 1e9  # an eps0 that always takes the best
RATINGS = {"low": 1, "1 out of 5": 1, "average": 3, "3 out of 5": 3, "high": 5, "5 out of 5": 5}
FORM = (
    "Write JSON with the food (English, French, Italian, Japanese, Indian, Chinese or Fast food), the area (riverside "
    "or city centre) and the rating (1 to 5) of the restaurant; null if the text does not say. The form is "
    '{"food":"...","area":"...","rating":...}.\n'
)
PUBLIC = (
    ("Luigi's is an Italian place by the river with a high customer rating.", ("Italian", "riverside", 5)),
    ("Golden Dragon in the city centre sells cheap Chinese food, rated 3 out of 5.", ("Chinese", "city centre", 3)),
    ("The Old Oak is a family friendly pub near the park. Guests give it a low rating.", (None, None, 1)),
)
"""Written by hand."""
_SIZES = {"owners": 500, "records": 8, "calls": 8, "shown": 2, "max_tokens": 40}
"""On them depends what is asked. Their defaults were chosen on the development questions."""


class Restaurant(BaseModel):
    """What a sentence says; None for what it does not say."""

    food: Literal["English", "French", "Italian", "Japanese", "Indian", "Chinese", "Fast food"] | None
    area: Literal["riverside", "city centre"] | None
    rating: int | None = Field(ge=1, le=5)


FIELDS = tuple(Restaurant.model_fields)


@dataclass(frozen=True)
class Record:
    """A sentence, and what it says: as E2E writes it, and as JSON."""

    text: str
    told: str
    answer: str

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Record:
        """From a row of E2E."""
        said = {name.strip(): value for name, value in re.findall(r"([\w ]+)\[([^\]]*)\]", row["input"])}
        rating = RATINGS.get(said.get("customer rating", ""))
        made = Restaurant.model_validate({"food": said.get("food"), "area": said.get("area"), "rating": rating})
        return cls(" ".join(row["output"].split()), row["input"], made.model_dump_json())


def load(options: argparse.Namespace) -> tuple[list[Record], list[Record]]:
    """The owners' records, one owner after the other, and questions that differ in what they say."""
    rows, needed = read_records(options.data), options.owners * options.records
    if needed > len(rows):
        raise InvalidParameter("owners", options.owners, f"owners * records at most {len(rows)}, those of the data")
    tests = list({record.told: record for record in map(Record.of, read_records(options.test))}.values())
    if options.questions > len(tests):
        raise InvalidParameter("questions", options.questions, f"at most {len(tests)}, which differ in what they say")
    chosen, asked = (np.random.default_rng(0).permutation(len(some)) for some in (rows, tests))
    return [Record.of(rows[i]) for i in chosen[:needed]], [tests[i] for i in asked[: options.questions]]


def prompt(values: Mapping[str, Any]) -> str:
    """The examples of one call, then the question; without examples the form is described."""
    shown = "".join(f"Text: {each['input']}\nJSON: {each['output']}\n\n" for each in values["examples"])
    return f"{shown}Text: {values['input']}\n{'' if shown else FORM}JSON:"


def asked_once(
    file: PassFile,
    selector: PoissonExampleSelector,
    records: Sequence[Record],
    text: str,
    member: Callable[[], Runnable[Any, Any]],
) -> dict[str, list[Any]]:
    """What the calls say, what the nearest record in each says, and what the two public prompts say."""
    key = key_of(text)
    if ("sample", key) not in file:
        buckets = selector.sample(query=selector.embed_query({"input": text}))
        file.add(("sample", key), [[int(each["row"]) for each in bucket] for bucket in buckets])
    drawn = file["sample", key]  # the nearest first; in a prompt it stands last, next to the question
    prompts = [[(records[i].text, records[i].answer) for i in reversed(bucket)] for bucket in drawn]
    shown = [(known, json.dumps(dict(zip(FIELDS, said, strict=True)), separators=(",", ":"))) for known, said in PUBLIC]
    said = file.answers(("calls", key), [*prompts, [], shown], lambda some: ask_members(member(), some, text))
    public = {"zero-shot prompt": [said[-2]], "three public examples": [said[-1]]}
    return {**public, CALLS: said[:-2], OWN: [records[bucket[0]].answer for bucket in drawn]}


def heard(
    options: argparse.Namespace, records: Sequence[Record], questions: Sequence[Record]
) -> tuple[list[dict[str, list[Any]]], Crowd]:
    """What `asked_once` finds for every question, and the public numbers of a release's outputs."""
    kept, embeddings = options.kept or options.output, local_embeddings()
    rows = [{"text": r.text, "json": r.answer, "owner": i // options.records, "row": i} for i, r in enumerate(records)]
    vectors = kept_vectors(kept / "vectors.npz", embeddings, {"rows": [Row(r.text, "", ()) for r in records]})["rows"]
    keys: dict[str, Any] = {"input_key": "text", "output_key": "json", "owner_key": "owner"}
    store = ExemplarStore.from_records(rows, embeddings, vectors=vectors, **keys)
    selector = PoissonExampleSelector(
        store, calls=options.calls, nearest_to="input", exemplars_per_owner=options.shown, max_exemplars=options.shown
    )

    @cache
    def member() -> Runnable[Any, Any]:
        model = local_llm(options.model, max_tokens=options.max_tokens, threads=options.threads)
        return boundary.seal(RunnableLambda(prompt) | model.bind(stop=["\n\n"]) | StrOutputParser())

    settings = {name: getattr(options, name) for name in ("model", *_SIZES)} | {"data": key_of(repr(records))}
    with closing(PassFile(kept / "calls.jsonl", settings)) as file:
        bar = tqdm(questions, desc="extract", unit="question", disable=None, file=sys.stderr)
        found = [asked_once(file, selector, records, question.text, member) for question in bar]
    return found, selector.crowd(options.calls / options.owners, options.owners)


def right(found: Mapping[str, Any], truth: Mapping[str, Any]) -> list[float]:
    """Of each field, and of all; nothing is right of an output that cannot be read."""
    fields = [float(name in found and found[name] == truth[name]) for name in FIELDS]
    return [*fields, min(fields)]


def scores(options: argparse.Namespace) -> list[Score]:
    """Ask what was not asked, and draw the noise of every plan."""
    records, questions = load(options)
    answered, crowd = heard(options, records, questions)
    truths = [json.loads(question.answer) for question in questions]
    answers = Structured(Restaurant, weights={"rating": options.rating_weight})
    bound, randomness, found = answers.under("structured", crowd), SecureRandomness(), list[Score]()

    def add(method: str, epsilon: float | None, table: Sequence[Sequence[Any]], facts: Mapping[str, float]) -> None:
        """``table``: for each run and question what `right` says."""
        values = {name: Value.of(np.array(table)[:, :, i]) for i, name in enumerate((*FIELDS, ALL))}
        found.append(Score(method, epsilon, values, len(table), len(questions), dict(facts)))

    def read(text: str | None) -> Any:
        try:
            return answers.encode(text)
        except ValueError:
            return boundary.ABSTAIN

    def alone(code: Any, truth: Mapping[str, Any]) -> list[float]:
        shown = answers.shown(code)
        return right(shown if isinstance(shown, dict) else {}, truth)

    codes = {method: [[read(text) for text in said[method]] for said in answered] for method in answered[0]}
    known = [json.loads(record.answer) for record in records]
    common = {name: Counter(each[name] for each in known).most_common(1)[0][0] for name in FIELDS}
    add("commonest values", None, [[right(common, truth) for truth in truths]], {})
    for method, outputs in codes.items():
        singles = [[alone(code, truth) for code in some] for some, truth in zip(outputs, truths, strict=True)]
        name = f"{method}, single" if method in (CALLS, OWN) else method
        add(name, None, [[np.mean(some or [[0.0] * 4], axis=0) for some in singles]], {})
    plans = [(releases, epsilon) for releases in options.releases for epsilon in options.epsilon]
    for method in (CALLS, OWN):
        for releases, epsilon in [(0, None), *plans]:
            eps0, facts = NO_NOISE, dict[str, float]()
            if epsilon is not None:
                rate, more = options.calls / options.owners, {**answers.options, **options_of(crowd)}
                asked = LineRequest("structured", rate, releases, options=more)
                line = PrivacyPlan.alone(asked, epsilon=epsilon, delta=options.delta)
                eps0, facts = line.parameter, {"releases": releases, "eps0": line.parameter}
            runs = [[bound.aggregate(some, eps0, randomness) for some in codes[method]] for _ in range(options.draws)]
            table = [[right(each.model_dump(), truth) for each, truth in zip(run, truths, strict=True)] for run in runs]
            add(method, epsilon, table, facts)
    return found


def table_of(rows: Sequence[Score]) -> str:
    """A line for each method and plan."""
    lines = [["answers", "releases", "epsilon", "eps0", *FIELDS, ALL], ["---"] * (len(FIELDS) + 5)]
    for row in rows:
        releases, eps0 = (f"{row.facts[name]:,.4g}" if name in row.facts else "" for name in ("releases", "eps0"))
        epsilon = "no noise" if row.epsilon is None else f"{row.epsilon:g}"
        cells = [f"{value.mean:.1f} ± {value.error:.1f}" for value in row.values.values()]
        lines.append([row.method, releases, epsilon, eps0, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(rows: Sequence[Score], path: Path) -> None:
    """Right answers in all fields by epsilon, with a standard error to either side, beside what has no noise."""
    plain = [row for row in rows if row.epsilon is None]
    styles = ((0, (1, 4)), ":", (0, (5, 5)), "-.", (0, (3, 1, 1, 1, 1, 1)), (0, (8, 2)), "-", "--")
    levels = [Level(row.mean(ALL), row.method, GREY, style) for row, style in zip(plain, styles, strict=False)]
    curves, plans = list[Curve](), dict[tuple[str, float], list[tuple[float, Value]]]()
    for row in rows:
        if row.epsilon is not None:
            plans.setdefault((row.method, row.facts["releases"]), []).append((row.epsilon, row.values[ALL]))
    for ((method, releases), some), color in zip(plans.items(), COLORS, strict=False):
        points, spreads = [(epsilon, value.mean) for epsilon, value in some], [value.error for _, value in some]
        curves.append(Curve(points, f"{method}, {releases:,.0f} releases", color, spreads=spreads))
    save_figure(figure_of([Chart("all three fields right", "epsilon", "%", curves, levels)], path), path)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, draw, and write results.json, table.md and a picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="the owners' records: rows of E2E")
    parser.add_argument("--test", required=True, help="questions: rows of E2E")
    parser.add_argument("--output", required=True, type=Path, help="a folder")
    parser.add_argument("--kept", type=Path, help="the folder of calls and vectors (default: the output)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="an embedded model or a GGUF file")
    parser.add_argument("--threads", type=int)
    for name, value in {**_SIZES, "questions": 100, "draws": 20}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--rating-weight", type=float, default=1.0, help="its share of eps0, each other field has 1")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--releases", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    options = parser.parse_args(argv)
    try:
        rows = scores(options)
    except DPICLError as error:
        print(f"extract_study: {error}", file=sys.stderr)
        return 1
    text = (
        f"Three fields of a sentence with {options.model}: {rows[0].queries:,} questions; {options.owners:,} owners of "
        f"{options.records} records, {options.calls} calls on average, delta {options.delta:g}. Right answers in %, "
        "± the standard error over questions."
    )
    settings = {
        name: getattr(options, name) for name in ("model", *_SIZES, "questions", "draws", "delta", "rating_weight")
    }
    settings["command"] = command_of("extract_study.py", sys.argv[1:] if argv is None else argv)
    found: dict[str, Any] = {"task": "extract", "measured": text, "table": table_of(rows), "pictures": ["all.png"]}
    found |= {"settings": settings, "scores": [asdict(row) for row in rows]}
    found = json.loads(json.dumps(found), parse_constant=lambda _: None)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.output / "table.md").write_text(f"{text}\n\n{found['table']}\n")
    draw(rows, options.output / "all.png")
    print(json.dumps(found, indent=2) if options.json else found["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
