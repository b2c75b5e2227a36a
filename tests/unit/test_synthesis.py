"""Synthetic demonstrations: what they are, what they cost, what is refused, and what is in their files."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from letters import INPUTS, Letters, letters, no_more, spelling
from table_model import TableModel

from langchain_dpicl import (
    Demonstrations,
    DemonstrationTemplate,
    InvalidParameter,
    InvalidRecords,
    ModelUnavailable,
    PrivacyBudget,
    PrivacyBudgetExceeded,
    PrivacyWarning,
    ReleaseFailed,
    acting_for,
    synthesize_demonstrations,
)
from langchain_dpicl.decoding import Made
from langchain_dpicl.decoding.steps import CUT


@pytest.fixture
def sampler_of(budget_of: Callable[..., PrivacyBudget], store_of: Any, records: Any, canary: str) -> Letters:
    """sampler_of(table): answers "ab" in three tokens, the end among them, unless it is told otherwise."""

    def make(table: Any = None, *, store: Any = None, budget: Any = None, releases: int = 100, **options: Any) -> Any:
        store = store_of(records(8, secret=canary)) if store is None else store
        budget = budget_of(releases=releases, replay=True) if budget is None else budget
        return letters(store, budget, table or spelling("ab"), **options)

    return make


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "demonstrations.jsonl"


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_each_input_gets_an_output_of_its_own_and_a_receipt(sampler_of: Letters) -> None:
    sampler = sampler_of()
    made = synthesize_demonstrations(sampler, INPUTS)
    assert made == [{"input": text, "output": "ab"} for text in INPUTS]
    assert [receipt["tokens"] for receipt in made.receipts] == [3, 3, 3]
    assert [receipt["remaining"] for receipt in made.receipts] == [97, 94, 91]
    assert {receipt["outcome"] for receipt in made.receipts} == {"released"}
    assert made.unanswered == []
    assert sampler.budget.spent() == 9


def test_they_are_examples_for_any_prompt_at_no_further_cost(sampler_of: Letters) -> None:
    sampler = sampler_of()
    made = synthesize_demonstrations(sampler, ["one", "two"])
    prompt = FewShotPromptTemplate(
        examples=made,
        example_prompt=PromptTemplate.from_template("{input} -> {output}"),
        suffix="{question} ->",
        input_variables=["question"],
    )
    assert prompt.format(question="three") == "one -> ab\n\ntwo -> ab\n\nthree ->"
    assert sampler.budget.spent() == 6


def test_forgetting_warns_of_them(sampler_of: Letters) -> None:
    sampler = sampler_of()
    synthesize_demonstrations(sampler, INPUTS)
    with pytest.warns(PrivacyWarning, match="forgetting: demonstrations, on the budget"):
        sampler.store.forget(sampler.store.owners[0])


def test_mappings_keep_what_the_query_names_and_nothing_else(sampler_of: Letters, output: Path) -> None:
    sampler = sampler_of(template=DemonstrationTemplate("{input} {output}", "{topic}, {stars}:"))
    asked = [{"topic": "tea", "stars": 5, "output": "not wanted"}, {"topic": "tea", "stars": 4.5}]
    made = synthesize_demonstrations(sampler, asked, output=output)
    assert made == [{"topic": "tea", "stars": 5, "output": "ab"}, {"topic": "tea", "stars": 4.5, "output": "ab"}]
    assert synthesize_demonstrations(sampler, asked, output=output) == made


def test_a_store_without_outputs_calls_them_output(sampler_of: Letters, store_of: Any, records: Any) -> None:
    sampler = sampler_of(store=store_of(records(8), output_key=None))
    assert synthesize_demonstrations(sampler, ["one"]) == [{"input": "one", "output": "ab"}]


def test_the_stores_keys_name_the_pair_and_outputs_lose_the_space_around_them(
    sampler_of: Letters, store_of: Any
) -> None:
    store = store_of([{"text": "t", "label": "l"}] * 8, input_key="text", output_key="label", owner_key=None)
    sampler = sampler_of(store=store)
    sampler.model = TableModel(
        lambda _, so_far: [99.0, 0.0] if not so_far else [0.0, 99.0], [" x\n", "."], frozenset({1})
    )
    sampler.settings = type(sampler.settings)(**{**vars(sampler.settings), "top_k": 2})
    assert synthesize_demonstrations(sampler, ["one"]) == [{"text": "one", "label": "x"}]


def test_equal_inputs_are_answered_once(sampler_of: Letters) -> None:
    sampler = sampler_of()
    made = synthesize_demonstrations(sampler, ["one", {"input": "one", "id": 7}, "two", "one"])
    assert [pair["input"] for pair in made] == ["one", "two"]
    assert sampler.budget.spent() == 6


def test_without_a_file_finished_answers_are_replayed(sampler_of: Letters) -> None:
    sampler = sampler_of()
    first = synthesize_demonstrations(sampler, INPUTS)
    sampler.model.table = no_more
    again = synthesize_demonstrations(sampler, INPUTS)
    assert again == first
    assert all(receipt["replayed"] for receipt in again.receipts)
    assert sampler.invoke("one") == "ab", "and for everybody else, who asks the same"
    assert sampler.budget.spent() == 9


def test_progress_sees_each_pair_as_it_is_made(sampler_of: Letters, output: Path) -> None:
    sampler, seen = sampler_of(), []

    def look(made: Made) -> None:
        seen.append((made.pair["input"], made.receipt["tokens"], made.done, made.total))
        assert len(output.read_text().splitlines()) == made.done, "it is in the file already"

    synthesize_demonstrations(sampler, INPUTS, output=output, progress=look)
    assert seen == [("one", 3, 1, 3), ("two", 3, 2, 3), ("three", 3, 3, 3)]
    synthesize_demonstrations(sampler, [*INPUTS, "four"], output=output, progress=look)
    assert seen[3:] == [("four", 3, 4, 4)]


def test_each_principal_pays_for_its_own(budget_of: Any, sampler_of: Letters, output: Path) -> None:
    sampler = sampler_of(budget=budget_of(releases=20, scope="per_principal", replay=True))
    with pytest.raises(InvalidParameter, match="principal"):
        synthesize_demonstrations(sampler, INPUTS, output=output)
    with acting_for("alice"):
        synthesize_demonstrations(sampler, INPUTS, output=output)
    assert sampler.budget.spent(principal="alice") == 9
    with acting_for("bob"), pytest.raises(InvalidParameter, match="line 1 is not"):
        synthesize_demonstrations(sampler, INPUTS, output=output)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_line_of_the_file_is_a_pair_with_its_receipt(sampler_of: Letters, output: Path, canary: str) -> None:
    sampler = sampler_of(spelling("é"))
    made = synthesize_demonstrations(sampler, ["naïve", "two"], output=output)
    lines = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    assert lines == [{**pair, "receipt": receipt} for pair, receipt in zip(made, made.receipts, strict=True)]
    assert lines[0]["input"] == "naïve"
    assert '"output": "é"' in output.read_text("utf-8")
    assert [sampler.budget.receipt(line["receipt"]["id"])["number"] for line in lines] == [6, 12]  # type: ignore[index]
    assert canary not in output.read_text("utf-8")
    assert list(files(output)) == [output.name]


def test_saved_and_loaded_they_are_the_same(sampler_of: Letters, output: Path, tmp_path: Path) -> None:
    made = synthesize_demonstrations(sampler_of(), INPUTS, output=output)
    other = tmp_path / "other.jsonl"
    made.save(other)
    assert other.read_bytes() == output.read_bytes()
    for same in (Demonstrations.load(other), pickle.loads(pickle.dumps(made))):  # noqa: S301
        assert same == made
        assert same.receipts == made.receipts
        assert same.unanswered == []
    assert sorted(path.name for path in tmp_path.glob("*.jsonl*")) == ["demonstrations.jsonl", "other.jsonl"]


def test_what_was_saved_may_be_gone_on_with(sampler_of: Letters, output: Path) -> None:
    sampler = sampler_of()
    synthesize_demonstrations(sampler, INPUTS).save(output)
    made = synthesize_demonstrations(sampler, [*INPUTS, "four"], output=output)
    assert [pair["input"] for pair in made] == [*INPUTS, "four"]
    assert sampler.budget.spent() == 12


@pytest.mark.parametrize("content", ["", "{}\n", '{"receipt": 1}\n', "no\n", '{"a": 1, "receipt": {}}\n{"a": 1, "rec'])
def test_other_files_are_not_loaded(content: str, output: Path) -> None:
    output.write_text(content)
    if content:
        with pytest.raises(InvalidRecords, match=r"line [12] of 'demonstrations\.jsonl'"):
            Demonstrations.load(output)
    else:
        assert Demonstrations.load(output) == []
    with pytest.raises(InvalidRecords, match="'absent' cannot be read: No such file"):
        Demonstrations.load(output.with_name("absent"))


def test_saving_where_it_cannot_be_done_is_refused(tmp_path: Path) -> None:
    made = Demonstrations([{"input": "a"}], [])
    with pytest.raises(InvalidParameter, match="receipts"):
        made.save(tmp_path / "file")
    with pytest.raises(InvalidParameter, match="No such file"):
        Demonstrations().save(tmp_path / "none" / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_complete_file_costs_and_asks_nothing(sampler_of: Letters, output: Path) -> None:
    sampler = sampler_of()
    made = synthesize_demonstrations(sampler, INPUTS, output=output)
    sampler.model.table = no_more
    before = output.stat().st_mtime_ns
    assert synthesize_demonstrations(sampler, INPUTS, output=output) == made
    assert synthesize_demonstrations(sampler, ["three"], output=output) == made[2:], "those that are asked for"
    assert output.stat().st_mtime_ns == before
    assert sampler.budget.spent() == 9


def test_a_file_with_fewer_inputs_is_gone_on_with(sampler_of: Letters, output: Path) -> None:
    sampler = sampler_of()
    synthesize_demonstrations(sampler, ["two"], output=output)
    made = synthesize_demonstrations(sampler, INPUTS, output=output)
    assert [pair["input"] for pair in made] == INPUTS, "in the order of the inputs"
    assert [pair["input"] for pair in Demonstrations.load(output)] == ["two", "one", "three"], "as they were made"
    assert sampler.budget.spent() == 9


def test_an_editor_may_take_the_last_line_break_away_or_add_one(sampler_of: Letters, output: Path) -> None:
    sampler = sampler_of()
    synthesize_demonstrations(sampler, ["one"], output=output)
    output.write_text(output.read_text().rstrip("\n"))
    synthesize_demonstrations(sampler, ["two"], output=output)
    output.write_text(output.read_text() + "\n")
    assert synthesize_demonstrations(sampler, INPUTS, output=output) == Demonstrations.load(output)
    assert sampler.budget.spent() == 9


# -- what is refused ---------------------------------------------------------------------------------------------------


class Word(str, Enum):  # noqa: UP042 - its text in a prompt is not the one in a line of JSON
    ONE = "one"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (7, "mapping"),
        ({"other": "x"}, "'other'|'input'"),
        ("x" * 2000, "room for 6 tokens"),
        ({"input": None}, "texts and numbers"),
        ({"input": float("nan")}, "texts and numbers"),
        ({"input": Word.ONE}, "texts and numbers"),
        ("\ud800", "Unicode"),
    ],
)
def test_a_wrong_input_in_any_place_is_refused_before_anything_is_charged(
    wrong: Any, says: str, sampler_of: Letters, output: Path
) -> None:
    sampler = sampler_of()
    with pytest.raises(InvalidParameter, match=says) as caught:
        synthesize_demonstrations(sampler, [*INPUTS, wrong], output=output)
    assert caught.value.parameter == "public_inputs[3]"
    assert len(str(caught.value)) < 200
    assert sampler.budget.spent() == 0
    assert sampler.model.calls == []
    assert files(output) == {}


@pytest.mark.parametrize("wrong", [[], (), "a text", {"input": "a"}, None, 3])
def test_inputs_are_a_list_that_is_not_empty(wrong: Any, sampler_of: Letters) -> None:
    with pytest.raises(InvalidParameter, match="public_inputs"):
        synthesize_demonstrations(sampler_of(), wrong)
    with pytest.raises(InvalidParameter, match="sampler"):
        synthesize_demonstrations("sampler", ["one"])  # type: ignore[arg-type]


@pytest.mark.parametrize("query", ["{output}:", "{receipt}:"])
def test_keys_that_a_line_needs_for_itself_are_refused(query: str, sampler_of: Letters) -> None:
    sampler = sampler_of(template=DemonstrationTemplate("{input}", query))
    with pytest.raises(InvalidParameter, match="other keys"):
        synthesize_demonstrations(sampler, [{"output": "x", "receipt": "x"}])


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 7},
        {"temperature": 2.0},
        {"template": DemonstrationTemplate("{input} {output}", "Input: {input}\nOutput:")},
        {"template": DemonstrationTemplate("Input: {input}\nOutput: {output}\n\n", "{input}")},
        {"shots": 5},
    ],
)
def test_a_file_made_with_other_settings_is_refused_and_stays_as_it_is(
    change: dict[str, Any], sampler_of: Letters, output: Path
) -> None:
    sampler = sampler_of()
    synthesize_demonstrations(sampler, INPUTS, output=output)
    before, spent = files(output), sampler.budget.spent()
    other = sampler_of(store=sampler.selector.store, budget=sampler.budget, **change)
    with pytest.raises(InvalidParameter, match="same budget, model, template"):
        synthesize_demonstrations(other, [*INPUTS, "four"], output=output)
    assert files(output) == before
    assert sampler.budget.spent() == spent


def interrupt(sampler: Any, output: Path, number: int = 1) -> None:
    """Ctrl-C in the middle of the answer of this number."""
    table, begun = sampler.model.table, len(sampler.model.opened)

    def stop(demonstration: str, released: str) -> Any:
        if released == "a" and len(sampler.model.opened) - begun == number + 1:  # the first one is the public question
            raise KeyboardInterrupt
        return table(demonstration, released)

    sampler.model.table = stop
    with pytest.raises(KeyboardInterrupt):
        synthesize_demonstrations(sampler, INPUTS, output=output)
    sampler.model.table = table


def files(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.parent.glob(f"{output.name}*")}


@pytest.mark.filterwarnings("ignore:.*Their losses add up")
def test_a_file_on_another_budget_or_model_is_refused(sampler_of: Letters, budget_of: Any, output: Path) -> None:
    sampler = sampler_of()
    synthesize_demonstrations(sampler, INPUTS, output=output)
    for other in (
        sampler_of(store=sampler.selector.store),
        sampler_of(budget=budget_of(releases=100, ledger=str(sampler.budget._ledger.url), name="other", replay=True)),
    ):
        with pytest.raises(InvalidParameter, match="same budget"):
            synthesize_demonstrations(other, INPUTS, output=output)
        assert other.budget.spent() == 0
    sampler.model.name, sampler._variant = "other", sampler._variant.replace("table", "other")
    with pytest.raises(InvalidParameter, match="same budget, model"):
        synthesize_demonstrations(sampler, INPUTS, output=output)


@pytest.mark.parametrize(
    "content",
    [
        "a text\n",
        "half a line",
        '{"input": "one", "output": "x"}\n',
        '{"input": "one", "output": "x"}',
        '{"input": "one", "output": "x"}\n{"inp',
        "{}",
        '{"output": "x", "inp',
        '{"inputs": ["one',
    ],
)
def test_a_file_that_is_not_a_jobs_is_refused_and_stays_as_it_is(
    content: str, sampler_of: Letters, output: Path
) -> None:
    output.write_text(content)
    sampler = sampler_of()
    with pytest.raises(InvalidParameter, match="output"):
        synthesize_demonstrations(sampler, INPUTS, output=output)
    assert files(output) == {output.name: content.encode()}
    assert sampler.budget.spent() == 0


@pytest.mark.parametrize("torn", ["", "{", '{"inp', '{"input": "one", "output": "a', '{"input": "o'])
@pytest.mark.parametrize("finished", [[], ["two"]])
def test_the_torn_line_of_a_killed_job_is_dropped(
    finished: list[str], torn: str, sampler_of: Letters, output: Path
) -> None:
    sampler = sampler_of()
    if finished:
        synthesize_demonstrations(sampler, finished, output=output)
    whole = output.read_bytes() if finished else b""
    output.write_bytes(whole + torn.encode())
    made = synthesize_demonstrations(sampler, INPUTS, output=output)
    assert [pair["input"] for pair in made] == INPUTS
    assert output.read_bytes().startswith(whole + b'{"input": "one", "output": "ab"')
    assert len(Demonstrations.load(output)) == 3
    assert sampler.budget.spent() == 9


def test_a_place_that_cannot_be_written_is_refused(sampler_of: Letters, tmp_path: Path) -> None:
    sampler = sampler_of()
    with pytest.raises(InvalidParameter, match="No such file"):
        synthesize_demonstrations(sampler, INPUTS, output=tmp_path / "none" / "file")
    with pytest.raises(InvalidParameter, match="a plain file"):
        synthesize_demonstrations(sampler, INPUTS, output=tmp_path)
    assert sampler.budget.spent() == 0


# -- spent budgets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_exhausted", ["raise", "zero_shot"])
@pytest.mark.parametrize("to_file", [False, True])
def test_what_was_made_before_the_budget_was_spent_is_kept(
    to_file: bool, on_exhausted: str, budget_of: Any, sampler_of: Letters, output: Path
) -> None:
    budget = budget_of(releases=8, on_exhausted=on_exhausted, replay=True)
    sampler = sampler_of(budget=budget, return_receipt=True)
    where = output if to_file else None
    asked = [*INPUTS, {"input": "four"}, "five"]
    with pytest.warns(PrivacyWarning, match="2 of 5 inputs stay unanswered"):
        made = synthesize_demonstrations(sampler, asked, output=where)
    assert [pair["output"] for pair in made] == ["ab", "ab", "ab"], "its two tokens were all that was left"
    assert made.receipts[2]["outcome"] == CUT
    assert made.unanswered == [{"input": "four"}, "five"]
    assert budget.remaining() == 0
    if to_file:
        assert Demonstrations.load(output) == made
        assert list(files(output)) == [output.name]
        with pytest.warns(PrivacyWarning, match="2 of 5"):
            assert synthesize_demonstrations(sampler, asked, output=output) == made


@pytest.mark.parametrize("on_exhausted", ["raise", "zero_shot"])
def test_where_nothing_is_left_there_is_nothing(
    on_exhausted: str, budget_of: Any, sampler_of: Letters, output: Path
) -> None:
    budget = budget_of(releases=3, on_exhausted=on_exhausted, replay=True)
    sampler = sampler_of(budget=budget, return_receipt=True)
    sampler.invoke("something else")
    with pytest.raises(PrivacyBudgetExceeded):
        synthesize_demonstrations(sampler, INPUTS, output=output)
    assert files(output) == {}


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("number", [1, 3])
def test_ctrl_c_keeps_the_finished_texts_and_the_interrupted_one_is_charged_anew(
    number: int, replay: bool, budget_of: Any, sampler_of: Letters, output: Path
) -> None:
    sampler = sampler_of(budget=budget_of(releases=100, replay=replay))
    interrupt(sampler, output, number)
    finished = number - 1
    assert sampler.budget.spent() == 3 * finished + 6
    before = output.read_bytes() if finished else b""
    assert before.count(b"\n") == finished
    assert output.exists() == bool(finished), "a new file without an answer goes"
    sampler.model.opened.clear()
    made = synthesize_demonstrations(sampler, INPUTS, output=output)
    assert len(sampler.model.opened) == 1 + 3 - finished, "the public question, and the texts that were not finished"
    assert made == [{"input": text, "output": "ab"} for text in INPUTS]
    assert output.read_bytes().startswith(before)
    assert [receipt["tokens"] for receipt in made.receipts] == [3, 3, 3]
    assert sampler.budget.spent() == 6 + 9, "the charge that it had stands"
    assert sampler.budget.latest()[1] == 4


def test_a_failed_model_leaves_a_job_that_is_gone_on_with(
    sampler_of: Letters, output: Path, canary: str, canary_free: Any
) -> None:
    sampler = sampler_of()
    table = sampler.model.table

    def fail(demonstration: str, released: str) -> Any:
        if released == "a":  # the zero-shot row too, which alone may fail an answer
            raise RuntimeError(f"{canary} {demonstration}")
        return table(demonstration, released)

    sampler.model.table = fail
    with pytest.raises(ReleaseFailed) as caught:
        synthesize_demonstrations(sampler, INPUTS, output=output)
    canary_free(caught.value, frames=True)
    assert files(output) == {}
    sampler.model.table = no_more
    with pytest.raises(ModelUnavailable):
        synthesize_demonstrations(sampler, INPUTS, output=output)
    sampler.model.table = table
    made = synthesize_demonstrations(sampler, INPUTS, output=output)
    assert [pair["output"] for pair in made] == ["ab"] * 3
    assert sampler.budget.spent() == 6 + 9


def test_a_full_disk_is_said_and_the_text_that_is_not_kept_is_charged_anew(
    sampler_of: Letters, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from langchain_dpicl.decoding import synthesis

    sampler, write, left = sampler_of(), synthesis.os.write, [2]  # the first text, and half of the second

    def full(descriptor: int, content: bytes) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return write(descriptor, content if left[0] else content[: len(content) // 2])

    monkeypatch.setattr(synthesis.os, "write", full)
    with pytest.raises(InvalidParameter, match="No space left on device"):
        synthesize_demonstrations(sampler, INPUTS, output=output)
    assert sampler.budget.spent() == 6
    monkeypatch.undo()
    made = synthesize_demonstrations(sampler, INPUTS, output=output)
    assert [pair["input"] for pair in made] == [pair["input"] for pair in Demonstrations.load(output)] == INPUTS
    assert sampler.budget.spent() == 12


def test_the_text_that_is_begun_anew_has_fresh_coins_and_draws_for_every_token(
    sampler_of: Letters, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, drawn = sampler_of(), []
    draw = type(sampler.exemplars).draw

    def watched(self: Any, source: Any, rate: Any, shared: str, steps: int, **options: Any) -> Any:
        drawn.append((shared, steps, draw(self, source, rate, shared, steps, **options)))
        return drawn[-1][-1]

    monkeypatch.setattr(type(sampler.exemplars), "draw", watched)
    interrupt(sampler, output)
    sampler.model.calls.clear()
    (receipt,) = synthesize_demonstrations(sampler, ["one"], output=output).receipts
    first, second = drawn
    assert first[:2] == second[:2] == ("Input: one\nOutput:", 6)
    assert first[2] is not second[2]
    health, *steps = sampler.model.calls
    assert health == 0
    assert len(steps) == 3, "both letters and the end"
    assert receipt["number"] == 12, "the units after those of the first charge"
