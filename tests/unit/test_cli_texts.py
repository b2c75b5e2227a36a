"""``dpicl answer`` for texts (all kinds but votes), with fake models: what it prints and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ears import Spy
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import PrivacyBudget, PrivacyWarning, local
from langchain_dpicl.cli import main

SECRET = "CANARY-mrs-alder"
QUESTION = "a cough at night"


class Models(Spy):
    """Stands for every model: ``prompts`` and ``settings`` of what was asked; ``answer`` decides."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.settings: list[dict[str, Any]] = []
        self.answer: Callable[[str], str] = lambda prompt: " inhaler spray \n\nText: next example"

    def make(self, *_: Any, **settings: Any) -> RunnableLambda[str, str]:
        self.settings.append(settings)

        def write(prompt: Any) -> str:
            text = prompt if isinstance(prompt, str) else prompt.to_string()
            self.prompts.append(text)
            return self.answer(text)

        return RunnableLambda(write)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Models:
    made = Models()
    monkeypatch.setattr(local, "local_llm", made.make)
    monkeypatch.setattr(local, "local_embeddings", lambda: DeterministicFakeEmbedding(size=8))
    return made


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"text": f"{SECRET} {i}", "note": f"use the inhaler {SECRET}", "who": f"p{i // 2}"} for i in range(60)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def answer(data: Path, mode: str, *more: str, question: str | None = QUESTION) -> list[str]:
    """A large epsilon, so that the noise is nearly nothing and answers can be compared. Each record is an owner."""
    always = "--output-key note --owner-key= --epsilon 300 --releases 10 --members 10 --shots 2".split()
    asked = [] if question is None else ["--question", question]
    return ["answer", "--data", str(data), "--mode", mode, *always, *asked, *more]


def written(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), "utf-8")
    return str(path)


def choice(data: Path, mode: str) -> list[str]:
    """What may be released in this mode: all of it is in the models' answers."""
    lines = {"embedding": ("inhaler spray", "go home"), "joint-em": ("inhaler", "spray", "letter")}.get(mode)
    if lines is None:
        return []
    return ["--candidates" if mode == "embedding" else "--domain", written(data.parent / "public.txt", *lines)]


def test_embedding_answers_with_a_sentence_of_the_file(data: Path, models: Models, capsys: Any) -> None:
    public = written(data.parent / "public.txt", "inhaler spray", "", "  a letter  ", "go home")
    code, out, _ = run(capsys, *answer(data, "embedding", "--candidates", public, "--json"))
    assert code == 0
    result = json.loads(out)
    (given,) = result["answers"]
    assert given["private"] == "inhaler spray"
    assert given["receipt"]["outcome"] == "released"
    assert "discrete Gaussian noise" in given["receipt"]["mechanism"]
    assert set(given) == {"question", "private", "receipt"}, "what is not private is shown only when asked for"
    assert result["epsilon"] == 300
    assert result["parameter"] > 0
    assert SECRET not in out


def test_embedding_without_a_file_writes_candidates_without_examples(data: Path, models: Models, capsys: Any) -> None:
    models.answer = lambda prompt: "inhaler spray" if SECRET in prompt else f"sentence {len(models.prompts)}"
    code, out, _ = run(capsys, *answer(data, "embedding", "--n-candidates", "7", "--max-tokens", "33", "--json"))
    assert code == 0
    (given,) = json.loads(out)["answers"]
    assert given["private"].startswith("sentence ")
    assert sum(SECRET not in prompt for prompt in models.prompts) >= 7
    assert SECRET not in out
    assert {s["temperature"] for s in models.settings} == {0.0, 0.9}, "candidates are sampled, answers are not"
    assert {s["max_tokens"] for s in models.settings} == {33}


@pytest.mark.parametrize("domain", [None, ["inhaler", "pills", "spray"]])
def test_joint_keywords_come_from_the_question_or_the_file(
    domain: list[str] | None, data: Path, models: Models, capsys: Any
) -> None:
    more = [] if domain is None else ["--domain", written(data.parent / "words.txt", *domain)]
    models.answer = lambda prompt: f"WRITTEN {prompt}" if "suggestions" in prompt else "use the inhaler at night"
    code, out, _ = run(capsys, *answer(data, "joint-em", "--k", "1", *more, "--instruction", "Advise", "--json"))
    assert code == 0
    (given,) = json.loads(out)["answers"]
    word = "night" if domain is None else "inhaler"
    assert given["private"].startswith(
        f"WRITTEN Advise with the following word suggestions ranked by their frequency from high to low: {word}."
    )
    assert given["receipt"]["mechanism"].startswith("keywords in order")
    assert SECRET not in out


@pytest.mark.parametrize(("k", "words"), [("2", "inhaler, spray"), ("1-2", "inhaler, spray")])
def test_tested_keywords_come_from_the_answers(k: str, words: str, data: Path, models: Models, capsys: Any) -> None:
    code, out, _ = run(capsys, *answer(data, "ptr", "--k", k, "--json"))
    assert code == 0
    (given,) = json.loads(out)["answers"]
    assert given["receipt"]["outcome"] == "released"
    assert f"with the following word suggestions: {words}." in models.prompts[-1]
    assert given["private"] == "inhaler spray", "the first paragraph, without the next example"
    assert SECRET not in out


def test_a_failed_test_says_so_and_answers_zero_shot(data: Path, models: Models, capsys: Any) -> None:
    models.answer = lambda prompt: f"word{len(models.prompts)}" if SECRET in prompt else "zero-shot answer"
    code, out, _ = run(capsys, *answer(data, "ptr", "--k", "2"))
    assert code == 0
    assert "private answer       zero-shot answer" in out
    assert "zero-shot fallback" in out
    assert "suggestions" not in models.prompts[-1]
    assert SECRET not in out


@pytest.mark.parametrize("mode", ["embedding", "joint-em", "ptr"])
def test_people_read_answers_receipts_and_the_rest(mode: str, data: Path, models: Models, capsys: Any) -> None:
    more = choice(data, mode) + ([] if mode == "embedding" else ["--k", "2"])
    code, out, _ = run(capsys, *answer(data, mode, *more, "--compare"))
    assert code == 0
    assert "private answer       inhaler spray" in out
    assert "zero-shot            inhaler spray" in out
    assert "9 answers left" in out
    assert SECRET not in out


@pytest.mark.parametrize("mode", ["embedding", "joint-em", "ptr"])
def test_held_out_records_are_scored(mode: str, data: Path, models: Models, capsys: Any) -> None:
    test = data.parent / "test.csv"
    test.write_text("text,note\na cough,inhaler spray\na night,inhaler spray\na third,inhaler spray\n")
    more = choice(data, mode) + ([] if mode == "embedding" else ["--k", "2"])
    arguments = answer(data, mode, *more, "--test", str(test), "--limit", "2", "--json", question=None)
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    result = json.loads(out)
    assert (result["held_out"], result["answers"]) == (2, [])
    assert result["scores"]["private"]["rouge1"] == pytest.approx(1.0)
    assert result["scores"]["zero-shot"]["levenshtein"] == pytest.approx(1.0)


def test_texts_of_a_test_are_replayed_when_it_is_run_again(data: Path, models: Models, capsys: Any) -> None:
    """Only a vote is charged each time, since its majority stands beside it."""
    test = written(data.parent / "test.csv", "text,note", "a cough,inhaler spray")
    command = answer(data, "joint-em", "--k", "1", "--test", test, "--json", question=None)
    assert [run(capsys, *command)[0] for _ in range(2)] == [0, 0]
    assert PrivacyBudget.open("data").spent() == 1


def test_where_the_members_abstain_it_says_so(data: Path, models: Models, capsys: Any) -> None:
    """Two hundred abstentions: noise hides them with a probability below 1e-9."""
    models.answer = lambda prompt: "" if SECRET in prompt else "public"  # a public question may come
    rows = [{"text": f"{SECRET} {i}", "note": SECRET} for i in range(400)]
    data.write_text("\n".join(map(json.dumps, rows)))
    public = written(data.parent / "public.txt", "inhaler spray", "go home")
    code, out, _ = run(capsys, *answer(data, "embedding", "--members", "200", "--shots", "1", "--candidates", public))
    assert code == 0
    assert "(the members abstain)" in out


@pytest.mark.parametrize(
    ("mode", "more", "says"),
    [
        ("embedding", ["--candidates", "absent.txt"], "--candidates"),
        ("embedding", ["--n-candidates", "0"], "--n-candidates"),
        ("embedding", ["--candidates", "EMPTY"], "candidates"),
        ("embedding", ["--candidates", "BINARY"], "UnicodeDecodeError"),
        ("joint-em", ["--domain", "absent.txt"], "--domain"),
        ("joint-em", ["--domain", "EMPTY"], "domain"),
        ("joint-em", ["--k", "0"], "--k"),
        ("joint-em", ["--k", "two"], "--k"),
        ("joint-em", ["--k", "5-10"], "--k"),
        ("joint-em", ["--k", "1.5"], "--k"),
        ("joint-em", ["--question", "of the"], "stop word"),
        ("ptr", ["--k", "10-5"], "--k"),
        ("ptr", ["--k", "0-5"], "--k"),
        ("ptr", ["--k", "5-10-15"], "--k"),
        ("ptr", ["--k", "five"], "--k"),
        ("ptr", ["--epsilon", "0"], "epsilon"),
        ("ptr", ["--output-key", "absent"], "'absent'"),
        ("vote", [], "--labels"),
        ("ptr", ["--k=-3"], "--k"),
        ("ptr", ["--k=5-"], "--k"),
        ("joint-em", ["--k=2-3"], "--k"),
        ("embedding", ["--k=3"], "--k"),
        ("ptr", ["--domain", "words.txt"], "--domain"),
        ("joint-em", ["--candidates", "lines.txt"], "--candidates"),
    ],
)
def test_bad_arguments_are_one_line_and_show_nothing_private(
    mode: str, more: list[str], says: str, data: Path, models: Models, capsys: Any
) -> None:
    (data.parent / "EMPTY").write_text("\n \n")
    (data.parent / "BINARY").write_bytes(b"\xff\xfe\x00")
    question = None if "--question" in more else QUESTION
    code, out, err = run(capsys, *answer(data, mode, *more, question=question))
    assert code == 1
    assert err.count("\n") == 1
    assert says in err
    assert SECRET not in out + err


def test_an_unknown_mode_is_a_matter_for_argparse(data: Path, models: Models, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        run(capsys, *answer(data, "keywords"))
    assert caught.value.code == 2


@pytest.mark.filterwarnings("ignore:.*Their losses add up")
def test_a_model_that_is_down_costs_nothing(data: Path, models: Models, capsys: Any) -> None:
    def down(prompt: str) -> str:
        raise ConnectionError(prompt)

    models.answer = down
    for mode, more in (("embedding", []), ("joint-em", ["--k", "1"])):
        code, out, err = run(capsys, *answer(data, mode, *more, "--name", mode))
        assert code == 1
        assert "nothing was charged" in err
        assert SECRET not in out + err
    models.answer = lambda prompt: "night"
    code, out, _ = run(capsys, *answer(data, "joint-em", "--k", "1", "--name", "joint-em", "--json"))
    assert json.loads(out)["answers"][0]["receipt"]["number"] == 1


def test_one_budget_name_is_one_kind_of_answer(data: Path, models: Models, capsys: Any) -> None:
    assert run(capsys, *answer(data, "joint-em", "--k", "1", *choice(data, "joint-em")))[0] == 0
    code, _, err = run(capsys, *answer(data, "ptr", "--k", "1"))
    assert code == 1
    assert "mechanism" in err
    with pytest.warns(PrivacyWarning, match="'data' in this ledger. Their losses add up"):
        assert run(capsys, *answer(data, "ptr", "--k", "1", "--name", "other"))[0] == 0


@pytest.mark.filterwarnings("ignore:.*Their losses add up")
def test_braces_in_an_instruction_are_text(data: Path, models: Models, capsys: Any) -> None:
    for mode in ("joint-em", "ptr"):
        more = ["--k", "2", "--instruction", "Use {json}", "--name", mode, *choice(data, mode)]
        code, _, err = run(capsys, *answer(data, mode, *more))
        assert (code, err) == (0, "")
        assert models.prompts[-1].startswith("Use {json} with the following")


# -- what was charged is not lost --------------------------------------------------------------------------------------


def test_test_records_are_checked_before_anything_is_charged(data: Path, models: Models, capsys: Any) -> None:
    test = written(data.parent / "test.jsonl", json.dumps({"text": "no note here"}))
    code, _, err = run(capsys, *answer(data, "joint-em", "--test", test))
    assert code == 1
    assert "'note'" in err
    assert models.prompts == []


def test_an_error_in_the_middle_shows_what_was_answered_before(data: Path, models: Models, capsys: Any) -> None:
    more = ["--releases", "1", "--question", "another inhaler", "--json", *choice(data, "joint-em")]
    code, out, _ = run(capsys, *answer(data, "joint-em", "--k", "1", *more))
    result = json.loads(out)
    assert code == 1
    assert result["error"] == "PrivacyBudgetExceeded"
    (given,) = result["answers"]
    assert given["keywords"]


def test_keywords_survive_a_model_that_cannot_write_from_them(data: Path, models: Models, capsys: Any) -> None:
    def fails_to_write(prompt: str) -> str:
        if "suggestions" in prompt:
            raise ConnectionError
        return "an inhaler for the cough"

    models.answer = fails_to_write
    code, out, _ = run(capsys, *answer(data, "joint-em", "--k", "1", "--json"))
    (given,) = json.loads(out)["answers"]
    assert code == 0
    assert given["private"] is None
    assert given["keywords"]


def test_keys_need_not_be_names_of_variables(tmp_path: Path, models: Models, capsys: Any, monkeypatch: Any) -> None:
    rows = [{"a.b": f"{SECRET} {i}", "the note": "inhaler"} for i in range(60)]
    path = tmp_path / "dotted.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    models.answer = lambda prompt: "an inhaler for the cough"
    more = ["--input-key", "a.b", "--output-key", "the note", "--k", "1", "--json"]
    code, out, err = run(capsys, *answer(path, "joint-em", *more))
    assert code == 0, err
    assert json.loads(out)["answers"][0]["private"]
