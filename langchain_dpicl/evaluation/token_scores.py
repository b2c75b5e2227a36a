"""Private decoding in an evaluation: the sampler itself (online), and demonstrations that it wrote once (offline)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.embeddings import Embeddings

from langchain_dpicl.evaluation.passes import Key, PassFile, key_of
from langchain_dpicl.evaluation.scores import Score
from langchain_dpicl.evaluation.tasks import GenerationTask
from langchain_dpicl.evaluation.text_study import score_texts
from langchain_dpicl.evaluation.token_methods import Outcome, Study

if TYPE_CHECKING:
    from langchain_dpicl.evaluation.evaluate import Evaluation

_NUMBERS = {"min_tokens": 8, "shots": 4.0, "kappa": 3.0, "cap": 1.5, "demonstrations": 16, "prompt_shots": 4}
"""Of the study in `results/decoding`, where they were chosen on other queries."""


def token_scores(
    evaluation: Evaluation, task: GenerationTask, methods: Sequence[str], file: PassFile, embeddings: Embeddings
) -> list[Score]:
    """Scores of the methods, from the file or decoded now. One run each: a token's draw is the noise."""
    varied = evaluation.vary.get("top_k", ())
    asked = key_of(repr([row.input for row in evaluation.queries]))
    found = []
    for top_k in dict.fromkeys((evaluation.top_k, *varied)):
        works = _works(_study(evaluation, task, top_k), methods, evaluation.schedule.epsilons)
        for (method, epsilon), work in works.items():
            if top_k != evaluation.top_k and method != "online":
                continue
            plan: tuple[str, ...] = () if epsilon is None else (str(epsilon), str(evaluation.schedule.delta))
            key: Key = (method, top_k, asked, *plan)
            if key not in file:
                file.add(key, asdict(work()))
            outcome = Outcome(**file[key])
            facts = _facts(outcome, top_k) | ({} if epsilon is None else _plan(evaluation, method))
            score = score_texts(method, [outcome.texts], evaluation.queries, embeddings, epsilon=epsilon, facts=facts)
            if top_k == evaluation.top_k:
                found.append(score)
            if method == "online" and top_k in varied:
                found.append(replace(score, study="top_k"))
    return found


def _works(
    study: Study, methods: Sequence[str], epsilons: Sequence[float]
) -> Mapping[tuple[str, float | None], Callable[[], Outcome]]:
    found: dict[tuple[str, float | None], Callable[[], Outcome]] = {}
    if "online" in methods:
        found["zero-shot decoding", None] = partial(study.decode, "zero-shot", None)
        found["online", None] = partial(study.unclipped, "online, nothing clipped")
        for epsilon in epsilons:
            found["online", epsilon] = partial(study.online, f"online, epsilon {epsilon:g}", epsilon)
    if "offline" in methods:
        found["offline", None] = partial(study.prompted, "prompt with private examples", study.private)
        for epsilon in epsilons:
            found["offline", epsilon] = partial(study.offline, f"offline, epsilon {epsilon:g}", epsilon)
    return found


def _plan(evaluation: Evaluation, method: str) -> dict[str, float]:
    """What a plan counts: an answer to each query, or each demonstration."""
    demonstrations = min(int(_NUMBERS["demonstrations"]), len(evaluation.public))
    releases = len(evaluation.queries) if method == "online" else demonstrations
    return {"rate": _NUMBERS["shots"] / len(evaluation.rows), "shots": _NUMBERS["shots"], "releases": releases}


def _facts(outcome: Outcome, top_k: int) -> dict[str, float]:
    numbers = {name: value for name, value in outcome.facts.items() if isinstance(value, (int, float))}
    return {**{name: value for name, value in numbers.items() if name != "epsilon"}, "top_k": top_k}


def _study(evaluation: Evaluation, task: GenerationTask, top_k: int) -> Study:
    shape = task.shape
    demonstration = shape.query + shape.answer + shape.separator
    options = argparse.Namespace(
        **_NUMBERS,
        model=evaluation.model.embedded,
        threads=evaluation.model.threads,
        dtype="float32",
        template=(demonstration, shape.query),
        epsilon=list(evaluation.schedule.epsilons),
        delta=evaluation.schedule.delta,
        queries=len(evaluation.queries),
        max_tokens=task.max_tokens,
        top_k=top_k,
    )

    def records(rows: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {"input": shape.clean(r.input), "output": shape.clean(r.output), "references": list(r.references)}
            for r in rows
        ]

    return Study(options, records(evaluation.rows), records(evaluation.queries), records(evaluation.public))
