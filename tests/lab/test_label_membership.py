"""The membership attack on labels: its prompts, its sets, and what is refused before a model is loaded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.decoding import TransformersLogits
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.audit import label_membership
from langchain_dpicl.lab.audit.label_membership import label_template, pooled, run_label_membership
from langchain_dpicl.lab.audit.membership import LIKELIHOOD, MembershipResult
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.lab.evaluation.tasks import ClassificationTask, task

TREC = task("trec")
RESULT = MembershipResult("epsilon 1", LIKELIHOOD, 1.0, 2.0, 0.1, 0.6, 0.03, 0.5, 0.7, None, 51, 50, 10)
MODEL = TransformersLogits("nothing-of-that-name")


def test_sets_are_averaged_and_their_errors_are_those_of_independent_means() -> None:
    found = pooled([RESULT, replace(RESULT, auc=0.7, error=0.04)])
    assert found.auc == pytest.approx(0.65)
    assert found.error == pytest.approx(0.025), "half of the root of .03 squared and .04 squared"
    assert (found.low, found.high) == (pytest.approx(0.65 - 0.049), pytest.approx(0.65 + 0.049))
    assert found.trials == 102
    certain = pooled([replace(RESULT, auc=1.0, error=0.0)])
    assert (certain.low, certain.high) == (1.0, 1.0)


def test_the_error_of_the_mean_of_sets_is_that_of_their_draws() -> None:
    """Of 20,000 means of five normal numbers, the deviation is within a hundredth; fixed numbers, no false alarm."""
    numbers = np.random.default_rng(3).normal(0.5, 0.03, (20_000, 5))
    assert pooled([RESULT] * 5).error == pytest.approx(numbers.mean(axis=1).std(), rel=0.01)


def test_a_demonstration_and_a_query_have_the_tasks_instruction() -> None:
    assert isinstance(TREC, ClassificationTask)
    layout = label_template(TREC)
    query = layout.ask({"input": "Who sang?"})
    assert query == f"{TREC.shape.instruction}\n\nQuestion: Who sang?\nAnswer Type:"
    assert layout.show({"input": "Who sang?", "output": "Person"}) == f"{query} Person\n\n"


def test_every_record_takes_the_members_place_in_each_set_with_one_token_answers(monkeypatch: Any) -> None:
    heard: list[dict[str, Any]] = []

    def run(model: Any, rows: Any, template: Any, **settings: Any) -> list[MembershipResult]:
        heard.append({"rows": rows, **settings})
        return [replace(RESULT, trials=settings["trials"])]

    monkeypatch.setattr(label_membership, "run_membership", run)
    (found,) = run_label_membership(MODEL, TREC, [Row("Who\n sang?", "Person", ("Person",))], sets=3)
    assert [(each["trials"], each["max_tokens"]) for each in heard] == [(51, 1)] * 3
    assert heard[0]["rows"] == [{"input": "Who sang?", "output": "Person"}]
    assert found.trials == 153
    assert math.isclose(found.error, 0.03 / math.sqrt(3))


@pytest.mark.parametrize(("name", "change"), [("task", {"task": task("e2e")}), ("sets", {"sets": 0})])
def test_what_cannot_be_played_is_refused(name: str, change: dict[str, Any]) -> None:
    given: dict[str, Any] = {"task": TREC, **change}
    with pytest.raises(InvalidParameter, match=f"^{name}="):
        run_label_membership(MODEL, given.pop("task"), [], **given)
