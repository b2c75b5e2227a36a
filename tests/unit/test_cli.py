"""The command line, with a fake model: what it prints, what it refuses, what it keeps private."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from evaluation_fakes import FakeLLM
from langchain_core.runnables import RunnableLambda

import langchain_dpicl
from langchain_dpicl import ExemplarStore, PrivacyBudget, local
from langchain_dpicl.cli import main
from langchain_dpicl.errors import PrivacyWarning

SECRET = "CANARY-mrs-alder"


@pytest.fixture
def data(tmp_path: Path, unthinking: None) -> Path:
    """A file of 60 records, and a member that answers by the query's first word."""
    rows = [{"text": f"{SECRET} {i}", "label": "ab"[i % 2], "who": f"p{i // 2}"} for i in range(60)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def answer(data: Path, *more: str) -> list[str]:
    """A large epsilon, so that the noise is nearly nothing and answers can be compared. Each record is an owner."""
    shape = [] if "--calls" in more else ["--members", "10", "--shots", "2"]
    always = "--labels a,b --epsilon 300 --releases 30 --owner-key=".split()
    return ["answer", "--data", str(data), *always, *shape, *more]


def test_an_answer_comes_with_its_receipt(data: Path, capsys: Any) -> None:
    code, out, _ = run(capsys, *answer(data, "--question", "a question", "--json"))
    assert code == 0
    result = json.loads(out)
    (given,) = result["answers"]
    assert given["private"] == "a"
    assert given["receipt"]["number"] == 1
    assert "ensemble_not_private" not in given, "what is not private is shown only when asked for"
    assert result["delta"] == pytest.approx(0.1 / 60)
    code, out, _ = run(capsys, *answer(data, "--question", "b other"))
    assert code == 0
    assert "private answer       b" in out
    assert "28 answers left" in out, "the ledger goes on counting"


@pytest.mark.parametrize("stores", [("", ""), ("--store s.db", "--store sqlite:///s.db")])
def test_two_ledgers_on_one_data_file_are_noticed(stores: tuple[str, str], data: Path, capsys: Any) -> None:
    """The store remembers, which is kept beside the data, where its owner alone may read it, or where one says."""
    commands = [answer(data, "--question", "a question", *store.split()) for store in stores]
    assert "other budgets" not in run(capsys, *commands[0], "--ledger", "sqlite:///one.db")[2]
    with pytest.warns(PrivacyWarning, match="'data' in sqlite:////.*one.db"):
        assert run(capsys, *commands[1], *"--ledger sqlite:///two.db --name b".split())[0] == 0
    (store,) = {*data.parent.glob("s.db"), *data.parent.glob("data.jsonl.store")}
    assert store.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ("--calls 20", {"calls": 20.0, "members": 35, "rate": 20 / 30}),
        ("--calls 20 --pad-to 22 --details", {"mechanism": "scores", "calls": 20.0, "members": 22, "rate": 20 / 30}),
        ("--calls 20 --max-calls 25", {"calls": 20.0, "members": 25, "rate": 20 / 30}),
        ("--members 10", {"calls": None, "members": 10}),
    ],
)
def test_every_shape_of_calls_is_asked_for_and_told(more: str, facts: dict[str, Any], data: Path, capsys: Any) -> None:
    """Without --shots the plan chooses the rate: not the 20 of 30 owners that --shots 2 would be."""
    always = "--labels a,b --epsilon 30 --releases 30 --owner-key who --question".split()
    command = ["answer", "--data", str(data), *always, "a question", *more.split()]
    code, out, _ = run(capsys, *command, "--json")
    assert code == 0
    result = json.loads(out)
    assert {name: result[name] for name in facts} == pytest.approx(facts)
    assert result["rate"] <= 1.0
    (entry,) = result["answers"]
    assert entry["private"] == "a"
    assert ("details" in entry) == ("--details" in more)
    if "details" in entry:
        assert entry["details"]["confidence"] > 0.9
        assert set(entry["details"]["counts"]) == {"a", "b"}
        shown = run(capsys, *command)[1]
        assert f"{entry['details']['confidence']:.0%}; noisy counts: a " in shown


def test_a_prior_decides_between_labels_that_owners_name_alike(
    data: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 60 records vote, half for each label. The zero-shot answer is b, and the scorer's prior for two public texts
    too. Under this noise a label that has a third of the other's prior wins a tie with a probability below 1e-8."""
    asked: list[str] = []

    class Scorer(RunnableLambda[Any, Any]):
        def prior(self, texts: list[str]) -> Any:
            asked.extend(texts)
            return RunnableLambda(lambda values: {"a": 1, "b": 3})

    def member(values: Any) -> str:
        return values["examples"][0]["label"] if values["examples"] else "b"  # type: ignore[no-any-return]

    monkeypatch.setattr("langchain_dpicl.members.chains.LabelScorer", lambda *_, **__: Scorer(member))
    public = data.with_name("public.txt")
    public.write_text("one\n\ntwo\n")
    for prior in ("zero_shot", str(public)):
        question = ["--calls", "60", "--releases", "4", "--prior", prior, "--question", "which?", "--json"]
        code, out, _ = run(capsys, *answer(data, *question))
        assert code == 0
        assert json.loads(out)["answers"][0]["private"] == "b"
        assert json.loads(out)["answers"][0]["receipt"]["replayed"] is False
    assert asked == ["one", "two"]


def test_owners_vote_with_their_own_labels_and_no_model(
    data: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every text of the label a is one and the same, and b's another: near to a question are the owners of one."""
    monkeypatch.setattr("langchain_dpicl.members.chains.ModelChoice.load", lambda *_, **__: pytest.fail("a model"))
    rows = [{"text": f"about {'ab'[i % 2]}", "label": "ab"[i % 2], "who": f"p{i}"} for i in range(60)]
    data.write_text("\n".join(map(json.dumps, rows)))
    test = data.with_name("test.jsonl")
    test.write_text("\n".join(json.dumps({"text": f"about {label}", "label": label}) for label in "ab"))
    command = ["answer", "--data", str(data), "--mode", "label-vote", "--labels", "a,b", "--epsilon", "10"]
    command += ["--releases", "10", "--owner-key", "who", "--test", str(test), "--threshold", "0.99"]
    command += ["--eligible", "30", "--tickets"]
    code, out, _ = run(capsys, *command, "--json")
    assert code == 0
    result = json.loads(out)
    assert result["accuracy"] == {"private": 1.0, "ensemble, NOT private": 1.0}, (
        "there is no member to ask without examples"
    )
    assert (result["rate"], result["calls"]) == (1.0, 30.0)
    code, out, _ = run(capsys, *command, "--question", "about b", "--compare")
    assert "the labels of owners near to the question, no calls" in out
    assert "NOT private          ensemble b\n" in out


def test_a_plan_that_is_all_noise_is_refused_unless_it_is_accepted(data: Path, capsys: Any) -> None:
    noisy = answer(data, "--epsilon", "0.01", "--calls", "3", "--releases", "1000", "--question", "a")
    code, _, err = run(capsys, *noisy)
    assert code == 1
    assert "fewer releases than 1,000" in err
    assert "--accept-noise" in err
    code, out, _ = run(capsys, *noisy, "--accept-noise", "--json")
    assert (code, json.loads(out)["answers"][0]["receipt"]["number"]) == (0, 1)


def test_a_test_file_prints_three_accuracies(data: Path, capsys: Any) -> None:
    test = data.parent / "test.csv"
    test.write_text("text,label\na one,a\nb two,B\na three,b\n")
    code, out, _ = run(capsys, *answer(data, "--test", str(test), "--json", "--owner-key", "who"))
    assert code == 0
    result = json.loads(out)
    assert result["held_out"] == 3
    assert result["accuracy"] == {
        "private": pytest.approx(2 / 3),
        "ensemble, NOT private": pytest.approx(2 / 3),
        "zero-shot": pytest.approx(2 / 3),
    }
    assert result["delta"] == pytest.approx(0.1 / 30), "owners, not records"


@pytest.mark.parametrize("more", [["--owner-key", "who"], []])
def test_held_out_owners_take_no_part_and_stay_in_the_kept_store(more: list[str], data: Path, capsys: Any) -> None:
    owners = 30 if more else 60
    command = answer(data, "--held-out", "5", "--limit", "4", "--json", *more)
    code, out, _ = run(capsys, *command)
    assert code == 0
    result = json.loads(out)
    assert result["held_out"] == 4
    assert result["rate"] == pytest.approx(20 / (owners - 5))
    kept = ExemplarStore.load(data.with_name("data.jsonl.store"), local.local_embeddings())
    assert (kept.owner_count, [each.name for each in kept.budgets]) == (owners, ["data"])
    kept.forget("p0" if more else "#0")
    with pytest.warns(PrivacyWarning, match="'data' in this ledger"):
        code, out, _ = run(capsys, *command, "--name", "new")
    assert json.loads(out)["rate"] == pytest.approx(20 / (owners - 6)), "who was forgotten is not in the data's part"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--question", "x", "--epsilon", "0"], "epsilon"),
        (["--question", "x", "--delta", "1"], "delta"),
        (["--question", "x", "--labels", "a"], "labels"),
        (["--question", "x", "--members", "1"], "members"),
        (["--question", "x", "--shots", "9999"], "shots"),
        (["--question", "x", "--calls", "5", "--shots", "2"], "shots"),
        (["--question", "x", "--pad-to", "5"], "--pad-to"),
        (["--question", "x", "--max-calls", "5"], "--max-calls"),
        (["--question", "x", "--eligible", "5"], "eligible"),
        (["--question", "x", "--threshold", "2"], "threshold"),
        (["--question", "x", "--tickets"], "threshold"),
        (["--question", "x", "--mode", "label-vote"], "--threshold"),
        (["--question", "x", "--prior", "absent.txt"], "--prior"),
        (["--question", "x", "--prior", "data.jsonl"], "another file than --data"),
        (["--question", "x", "--data", "absent.jsonl"], "absent.jsonl"),
        (["--question", "x", "--input-key", "body"], "'body'"),
        (["--question", "x", "--ledger", "sqlite:////proc/none/budget.db"], "ledger"),
        ([], "--question"),
    ],
)
def test_bad_arguments_are_one_line_and_show_nothing_private(
    more: list[str], says: str, data: Path, capsys: Any
) -> None:
    code, out, err = run(capsys, *answer(data, *more))
    assert code == 1
    assert err.count("\n") == 1
    assert says in err
    assert SECRET not in out + err


def test_an_error_is_an_object_with_json(data: Path, capsys: Any) -> None:
    code, out, _ = run(capsys, *answer(data, "--question", "x", "--epsilon", "-1", "--json"))
    assert code == 1
    assert json.loads(out)["error"] == "InvalidParameter"


def test_a_spent_budget_says_no(data: Path, capsys: Any) -> None:
    arguments = answer(data, "--releases", "1", "--question", "a x")
    assert run(capsys, *arguments)[0] == 0
    assert run(capsys, *arguments)[0] == 0, "the same question is answered from the ledger"
    code, _, err = run(capsys, *arguments[:-1], "b y")
    assert code == 1
    assert "0 of 1 releases left" in err


def test_a_head_is_fitted_once_and_answers_without_a_charge(data: Path, capsys: Any) -> None:
    fitted = [
        "fit",
        "--data",
        str(data),
        "--labels",
        "a,b",
        "--epsilon",
        "5",
        "--owner-key",
        "who",
        "--output",
        "h.npz",
    ]
    with pytest.warns(PrivacyWarning, match="30 owners"):
        code, out, _ = run(capsys, *fitted, "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["receipt"]["epsilon_spent"] == 5
    assert facts["receipt"]["budget"] == "data-head"
    assert facts["delta"] == pytest.approx(0.1 / 30)
    test = data.with_name("test.jsonl")
    test.write_text("\n".join(json.dumps({"text": f"other {i}", "label": "AB"[i % 2]}) for i in range(40)))
    asked = ["answer", "--mode", "head", "--head", "h.npz", "--test", str(test), "--question", "which?"]
    for _ in range(2):
        code, out, _ = run(capsys, *asked, "--json")
        found = json.loads(out)
        assert code == 0
        assert found["held_out"] == 40
        assert 0.0 <= found["accuracy"] <= 1.0
        assert found["answers"][0]["private"] in ("a", "b")
    assert PrivacyBudget.open("data-head").spent() == 1
    assert SECRET.encode() not in data.with_name("h.npz").read_bytes()
    code, out, _ = run(capsys, *asked)
    assert "40 test questions" in out
    assert "0 fits left: answers cost nothing" in out
    assert run(capsys, *fitted)[1].startswith("h.npz is done: nothing was fitted or charged")
    assert "a head of another fit" in run(capsys, *fitted, "--views", "whole,opening:2")[2]
    assert PrivacyBudget.open("data-head").spent() == 1


def test_public_and_test_files_may_have_columns_of_other_names(data: Path, capsys: Any) -> None:
    public, test = data.with_name("public.jsonl"), data.with_name("test.jsonl")
    public.write_text("\n".join(json.dumps({"question": f"public {i}"}) for i in range(20)))
    test.write_text("\n".join(json.dumps({"words": f"a {i}", "desk": "a"}) for i in range(4)))
    named = ["--test", str(test), "--test-columns", "text=words,label=desk", "--json"]
    fit = ["fit", "--data", str(data), *"--labels a,b --epsilon 5 --output h.npz --store fit.store".split()]
    fit += ["--ledger", "sqlite:///fit.db", "--public-columns", "text=question", "--views", "whole,opening:2"]
    with pytest.warns(PrivacyWarning, match="60 owners"):
        assert run(capsys, *fit, "--public", str(public))[0] == 0
    assert run(capsys, *fit, "--public", str(public))[1].startswith("h.npz is done")
    for command in (["answer", "--mode", "head", "--head", "h.npz"], answer(data)):
        code, out, err = run(capsys, *command, *named)
        assert code == 0, err
        assert json.loads(out)["held_out"] == 4
    code, _, err = run(capsys, *answer(data), "--test", str(test), "--test-columns", "body=words")
    assert (code, "--test-columns='body'" in err) == (1, True)


def test_a_new_ledger_that_nobody_named_is_told_once(data: Path, capsys: Any, caplog: Any) -> None:
    command = answer(data, "--question", "a question")
    for told in (1, 1):
        assert run(capsys, *command)[0] == 0
        place = str(Path("dpicl-budget.db").absolute())
        assert [record.getMessage().count(place) for record in caplog.records] == [told]
    lines = "from langchain_dpicl import PrivacyBudget\nfor name in 'ab':\n    PrivacyBudget(1, 1e-5, 1, name=name)"
    Path("elsewhere").mkdir()
    shown = subprocess.run([sys.executable, "-c", lines], cwd="elsewhere", capture_output=True, text=True, check=True)
    assert shown.stderr.count("dpicl-budget.db") == 1
    assert shown.stdout == ""


@pytest.mark.filterwarnings("ignore:a head for 60 owners")
def test_twelve_fits_are_one_promise_whatever_the_file_of_the_month_is_called(data: Path, capsys: Any) -> None:
    """As docs/tasks/classifier.md has it."""
    month = ["fit", *"--labels a,b --epsilon 3 --fits 12 --output".split()]
    code, _, err = run(capsys, *month, "01.npz", "--data", str(data))
    assert (code, "--name" in err) == (1, True)
    for number in (1, 2):
        next_file = data.with_name(f"data-{number}.jsonl")
        next_file.write_text(data.read_text())
        fit = [*month, f"{number}.npz", "--name", "tickets", "--data", str(next_file), "--json"]
        code, out, _ = run(capsys, *fit)
        assert json.loads(out)["receipt"]["remaining"] == 12 - number
        code, out, _ = run(capsys, *fit)
        assert (code, json.loads(out)["done"]) == (0, True)
    budget = PrivacyBudget.open("tickets")
    assert (budget.spent(), budget.total()["promised_epsilon"]) == (2, 3.0)
    os.utime(next_file, (2e9, 2e9))
    for more, said in ((), "older than the data"), (("--labels", "b,a"), "another fit"), (("--name", "x"), "promise"):
        code, _, err = run(capsys, *fit, *more)
        assert (code, said in err) == (1, True)
    assert budget.spent() == 2


@pytest.mark.parametrize(
    "more",
    [
        "--epsilon -1",
        "--fits 0",
        "--labels a,a",
        "--output nowhere/h.npz",
        "--output data.jsonl",
        "--public one.txt",
        "--owners 0",
        "--delta 2",
        "--input-key nothing",
        "--views whole,ending:2",
    ],
)
def test_a_fit_that_is_refused_makes_no_ledger_and_no_file(more: str, data: Path, capsys: Any) -> None:
    """But the store beside the data: no text is embedded again for the next fit."""
    Path("one.txt").write_text("one\n")
    before = set(Path().rglob("*"))
    fit = "fit --data data.jsonl --labels a,b --epsilon 3 --output h.npz".split()
    assert run(capsys, *fit, *more.split())[0] == 1
    made = set(Path().rglob("*")) - before
    assert all(path.name.startswith("data.jsonl.store") for path in made)


def test_a_head_with_label_scores_names_the_model_that_it_needs(
    data: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeLLM(words=["a", "b"])
    monkeypatch.setattr(local, "local_llm", lambda *_, **__: model)
    data.with_name("public.txt").write_text("\n".join(f"public {i}" for i in range(10)))
    embedded = ["--model", "smollm2-135m-instruct"]
    fitted = ["fit", "--data", str(data), *"--labels a,b --epsilon 5 --owner-key who --output h.npz".split()]
    fitted += ["--public", "public.txt"]
    scored = ["--score-prompt", "Text: {input}\\nLabel:"]
    for given, named in ((scored, "--model"), (embedded, "--score-prompt")):
        code, _, err = run(capsys, *fitted, *given)
        assert (code, named in err) == (1, True)
    assert not model.calls
    with pytest.warns(PrivacyWarning, match="30 owners"):
        code, _, _ = run(capsys, *fitted, *embedded, *scored)
    assert code == 0
    assert "Text: public 3\nLabel:" in model.calls
    asked = ["answer", "--mode", "head", "--head", "h.npz", "--question", "which?"]
    code, _, err = run(capsys, *asked)
    assert (code, "FakeLLM()" in err) == (1, True)
    code, out, _ = run(capsys, *asked, *embedded, "--json")
    assert code == 0
    assert json.loads(out)["answers"][0]["private"] in ("a", "b")
    assert model.calls[-1] == "Text: which?\nLabel:"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--mode head --question q", "--head"),
        ("--mode head --head h.npz --question q --data d", "--data"),
        ("--mode head --head h.npz", "--question"),
        ("--mode head --head h.npz --question q --delta 1e-9", "--delta"),
        ("--mode head --head h.npz --question q --held-out 5", "--held-out"),
        ("--mode head --head h.npz --question q --compare", "--compare"),
        ("--mode head --head h.npz --question q --ledger sqlite:///x.db", "--ledger"),
        ("--mode head --head h.npz --question q --members 3", "--members"),
        ("--mode head --head h.npz --test t.jsonl --limit -3", "--limit"),
        ("--data d --labels a,b --epsilon 1 --test t.jsonl --limit 0", "--limit"),
        ("--mode head --head missing.npz --question q", "missing.npz"),
        ("--labels a,b --epsilon 1 --question q", "--data"),
        ("--data d --labels a,b --question q", "--epsilon"),
        ("--data d --labels a,b --epsilon 1 --question q --head h.npz", "--head"),
        ("--data d --mode embedding --epsilon 1 --question q --prior zero_shot", "--prior"),
        ("--data d --mode embedding --epsilon 1 --question q --details", "--details"),
        ("--mode head --head h.npz --question q --calls 3", "--calls"),
    ],
)
def test_options_of_another_mode_are_refused(data: Path, capsys: Any, arguments: str, named: str) -> None:
    code, out, err = run(capsys, "answer", *arguments.split())
    assert (code, out) == (1, "")
    assert named in err


def test_private_examples_are_neither_public_texts_nor_a_test(data: Path, tmp_path: Path, capsys: Any) -> None:
    """Under another name of the same file, too; nothing is charged."""
    link = tmp_path / "link.jsonl"
    link.symlink_to(data)
    fit = f"fit --data {data} --labels a,b --epsilon 3 --output h.npz --public"
    evaluate = f"evaluate --task sst2 --data {data} --epsilon 1 --output out"
    for command in (f"{fit} {data}", f"{fit} {link}", f"{evaluate} --test {link}", f"{evaluate} --public {link}"):
        code, _, err = run(capsys, *command.split())
        assert code == 1
        assert "another file than --data" in err
    assert not Path("h.npz").exists()
    assert not Path("dpicl-budget.db").exists()


def test_the_version_is_told_and_the_package_runs_as_a_module() -> None:
    """Neither loads what only commands need."""
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "langchain_dpicl", "--version"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout == f"langchain-dpicl {langchain_dpicl.__version__}\n"
    assert not re.search(r"\| +(numpy|langchain_core|pydantic)$", told.stderr, re.MULTILINE)


# -- what a server would answer ----------------------------------------------------------------------------------------


@pytest.fixture
def served(data: Path) -> Path:
    """A server's file over the data."""
    path = data.with_name("server.yaml")
    path.write_text(
        json.dumps(
            {
                "store": {"data": data.name, "owner_key": "who"},
                "release": {"kind": "vote", "labels": ["a", "b"]},
                "selector": {"calls": 30},
                "budget": {
                    "epsilon": 300,
                    "delta": 1e-5,
                    "releases": 9,
                    "ledger": "sqlite:///budget.db",
                    "name": "served",
                },
                "keys": {"desk": "0" * 64},
            }
        )
    )
    return path


def test_a_servers_file_is_asked_on_its_own_budget(data: Path, served: Path, capsys: Any) -> None:
    test = data.with_name("test.csv")
    test.write_text("text,label\na one,a\nb two,B\n")
    asked = ["answer", "--config", str(served), "--json"]
    code, out, err = run(capsys, *asked, "--question", "b question", "--caller", "desk")
    assert code == 0, err
    found = json.loads(out)
    assert found["answers"][0]["private"] == "b"
    assert (found["answers"][0]["receipt"]["number"], found["epsilon"], found["delta"]) == (1, 300, 1e-5)
    code, out, _ = run(capsys, *asked, "--question", "b question", "--caller", "desk")
    assert json.loads(out)["answers"][0]["receipt"]["replayed"], "to the caller who asked"
    code, out, _ = run(capsys, *asked, "--question", "b question", "--test", str(test))
    assert json.loads(out)["answers"][0]["receipt"]["number"] == 2
    assert json.loads(out)["accuracy"]["private"] == 1.0
    assert PrivacyBudget.open("served", f"sqlite:///{data.with_name('budget.db')}").spent() == 4


def test_options_beside_a_servers_file_are_refused(served: Path, capsys: Any) -> None:
    for more, named in (
        (["--question", "q", "--calls", "3"], "--calls"),
        (["--question", "q", "--mode", "ptr"], "--mode"),
        ([], "--question"),
    ):
        code, out, err = run(capsys, "answer", "--config", str(served), *more)
        assert (code, out) == (1, "")
        assert named in err


def test_the_head_of_a_servers_file_answers(data: Path, capsys: Any) -> None:
    fitted = f"fit --data {data} --labels a,b --epsilon 5 --owner-key who --output h.npz"
    with pytest.warns(PrivacyWarning, match="30 owners"):
        assert run(capsys, *fitted.split())[0] == 0
    data.with_name("head.yaml").write_text(json.dumps({"head": str(Path("h.npz").absolute()), "keys": {"a": "0" * 64}}))
    code, out, _ = run(capsys, "answer", "--config", str(data.with_name("head.yaml")), "--question", "which?", "--json")
    assert code == 0
    assert json.loads(out)["answers"][0]["private"] in ("a", "b")


# -- every kind has its options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "more", "kind"),
    [
        ("vote", "--labels a,b --scores", dict),
        ("median", "--low 0 --high 30", int),
        ("mean", "--low 0.5 --high 30", float),
        ("median", "--low 2026-01-01 --high 2026-01-31", str),
        ("structured", "--fields {days:{low:0,high:30},desk:{choices:[a,b]}}", dict),
        ("candidate-vote", "--candidates one,two", str),
    ],
)
def test_each_kind_is_asked_for_by_its_own_options(
    mode: str, more: str, kind: type, data: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = '{"days": 3, "desk": "a"} 2026-01-07' if mode == "structured" else "2026-01-07" if "2026" in more else "7"
    monkeypatch.setattr(local, "local_llm", lambda *_, **__: RunnableLambda(lambda _: said))
    if mode == "structured":
        data.write_text("\n".join(json.dumps({"text": f"t {i}", "label": {"days": i % 9}}) for i in range(60)))
    asked = ["--question", "a 7 or so?", "--json", "--accept-noise", "--calls", "60"]
    more = more.replace(":", ": ") if mode == "structured" else more
    options = [*more.split(" ", 1)[:1], more.split(" ", 1)[1]] if mode == "structured" else more.split()
    command = ["answer", "--data", str(data), "--mode", mode, "--epsilon", "300", "--releases", "9", *options, *asked]
    code, out, err = run(capsys, *command)
    assert code == 0, err
    (given,) = json.loads(out)["answers"]
    assert type(given["private"]) is kind


def test_an_earlier_name_of_a_mode_is_refused_with_the_new_one(data: Path, capsys: Any) -> None:
    for old, new in (("label", "vote"), ("keywords-joint", "joint-em"), ("keywords-ptr", "ptr")):
        with pytest.raises(SystemExit) as caught:
            run(capsys, "answer", "--data", str(data), "--mode", old)
        assert caught.value.code == 2
        assert f'"{old}" is now "{new}"' in capsys.readouterr().err


def test_several_mistakes_of_options_are_told_at_once(data: Path, capsys: Any) -> None:
    code, _, err = run(
        capsys, *answer(data, "--question", "q", "--lead", "much", "--threshold", "3", "--eligible", "0")
    )
    assert code == 1
    for option in ("--lead", "--threshold", "--eligible"):
        assert option in err


@pytest.mark.parametrize("given", ["2020-13-45", "9" * 5000, "[" * 3000], ids=["date", "digits", "nested"])
def test_an_option_that_cannot_be_read_is_named_without_a_traceback(given: str, data: Path, capsys: Any) -> None:
    command = ["answer", "--data", str(data), "--mode", "mean", "--epsilon", "1", "--releases", "9", "--question", "q"]
    code, _, err = run(capsys, *command, "--low", given, "--high", "3")
    assert code == 1
    assert "--low" in err
    assert "Traceback" not in err
