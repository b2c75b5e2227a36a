"""A model that is shown public texts with a private head's labels, beside its zero-shot answers and the head's own.

    python examples/studies/head_few_shot.py --task trec=train.jsonl:test.jsonl --output results/head-few-shot

Tasks and public texts are as in `head_study.py`. A head at epsilon 1 labels the public texts, and `few_shot_chain`
shows the four nearest, by their embedding and by what the head says, to the model for each of the first 250 test
questions. The model's text is right if it begins with the label, in small or large letters. Heads and answers stay in
OUTPUT: a study that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from head_study import DELTA, Data, Known, features_of, fitted, loaded, task_options
from langchain_core.language_models import BaseLanguageModel
from tqdm import tqdm

from langchain_dpicl import Demonstrations, PrivateHead, few_shot_chain, label_public
from langchain_dpicl.lab.evaluation.scores import share_error
from langchain_dpicl.local import local_llm

EPSILON, SHOWN, QUESTIONS = 1.0, 4, 250
MODEL = "smollm2-135m-instruct"


KEYS = {"trec": ("question", "type"), "agnews": ("article", "topic")}
"""The words before a text and before its label."""


def said(text: str, labels: Sequence[str]) -> str | None:
    """The label that a model's text begins with."""
    words = text.strip().casefold()
    return next((label for label in labels if words.startswith(label.casefold())), None)


Ways = dict[str, Callable[[str], str]]


def asked(
    name: str, data: Data, known: Known, llm: BaseLanguageModel[Any], folder: Path
) -> tuple[PrivateHead, Demonstrations, Ways]:
    """A task's head, the public texts that it has labelled, and the two ways to ask the model."""
    input_key, output_key = KEYS.get(name, ("input", "output"))
    features = features_of(data.public, data.private.vectors.shape[1])
    if not (path := folder / f"{name}.npz").exists():
        fitted(data.private, data.labels, EPSILON, features, known, input_key=input_key).save(path)
    head = PrivateHead.load(path, known)
    public = list(dict.fromkeys(data.public.texts))
    keys: dict[str, Any] = {"input_key": input_key, "output_key": output_key}
    shown = label_public(head, public, output_key=output_key)
    instruction = f"Labels: {', '.join(data.labels)}."
    few = few_shot_chain(shown, llm, head, k=SHOWN, instruction=instruction, **keys)
    alone = f"{instruction}\n\n{input_key.capitalize()}: {{text}}\n{output_key.capitalize()}:"
    return (
        head,
        shown,
        {
            "few-shot, public texts with the head's labels": lambda text: few.invoke({input_key: text}),
            "zero-shot": lambda text: str(llm.invoke(alone.format(text=text))),
        },
    )


def study(name: str, data: Data, known: Known, llm: BaseLanguageModel[Any], questions: int, folder: Path) -> list[Any]:
    """A task's rows."""
    head, shown, ways = asked(name, data, known, llm, folder)
    texts, right = data.tests.texts[:questions], data.tests.labels[:questions]
    truth = dict(zip(data.public.texts, data.public.labels, strict=True))
    good = sum(label == truth[text] for text, label in (pair.values() for pair in shown)) / len(shown)
    kept = folder / "answers.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    known_answers = {(each["task"], each["method"], each["question"]): each["text"] for each in lines}
    answers: dict[str, list[str | None]] = {}
    for method, ask in ways.items():
        for place, text in enumerate(tqdm(texts, desc=f"{name}, {method}")):
            if (key := (name, method, place)) not in known_answers:
                known_answers[key] = ask(text)
                line = {"task": name, "method": method, "question": place, "text": known_answers[key]}
                with kept.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            answers[method] = [*answers.get(method, []), said(known_answers[key], data.labels)]
    answers["the head itself"] = [each["label"] for each in head.answers(data.tests.vectors[:questions])]
    rows = []
    for method, given in answers.items():
        share = sum(a == b for a, b in zip(given, right, strict=True)) / len(right)
        error = share_error([share], len(right))
        about = {"task": name, "method": method, "accuracy": share, "standard_error": error}
        rows.append(
            {
                **about,
                "no_label": given.count(None),
                "questions": len(right),
                "labelled_right": good,
                "shown_from": len(shown),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each task and method."""
    lines = ["| task | method | accuracy | answers without a label |", "|" + "---|" * 4]
    for row in rows:
        cell = f"{100 * row['accuracy']:.1f} ({100 * row['standard_error']:.1f})"
        lines.append(f"| {row['task']} | {row['method']} | {cell} | {row['no_label'] or ''} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, and write results.json and table.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    task_options(parser)
    parser.add_argument("--questions", type=int, default=QUESTIONS, help=f"the first so many (default {QUESTIONS})")
    parser.add_argument("--threads", type=int, help="of the model")
    options = parser.parse_args(argv)
    known = Known(options.vectors)
    data = loaded(options, known)
    options.output.mkdir(parents=True, exist_ok=True)
    llm = local_llm(MODEL, threads=options.threads, max_tokens=4, model_kwargs={"stop": ["\n"]})
    rows = [
        row for name, each in data.items() for row in study(name, each, known, llm, options.questions, options.output)
    ]
    last = {row["task"]: row for row in rows}.items()
    labelled = ", ".join(
        f"{name} {row['shown_from']} ({100 * row['labelled_right']:.1f} % right)" for name, row in last
    )
    measured = (
        f"{MODEL} with the {SHOWN} nearest of the public texts that one head at epsilon {EPSILON:g}, delta {DELTA:g} "
        f"has labelled, on the first {options.questions} test questions: accuracy in %, with its standard error over "
        f"questions in brackets. Public texts: {labelled}. Everything after the head is public, and unlimited."
    )
    line = shlex.join(["python", "examples/studies/head_few_shot.py", *(sys.argv[1:] if argv is None else argv)])
    settings = {"model": MODEL, "epsilon": EPSILON, "shown": SHOWN, "questions": options.questions, "command": line}
    found: dict[str, Any] = {
        "measured": measured,
        "table": table(rows),
        "pictures": [],
        "settings": settings,
        "rows": rows,
    }
    (options.output / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.output / "table.md").write_text(f"{measured}\n\n{found['table']}\n")
    print(found["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
