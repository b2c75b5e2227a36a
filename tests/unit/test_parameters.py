"""Options that are a constructor's parameters: read from its source, complete, and as cheap as ``--help`` should be."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from plan_command import answer, run

from langchain_dpicl import PoissonExampleSelector, PrivacyBudget, PrivateHead, release_table, release_topics
from langchain_dpicl.aggregators import KINDS
from langchain_dpicl.cli import head, main, parse
from langchain_dpicl.cli import plan as plan_module
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.parameters import Parameter, kinds, parameters_of, sentence, words_of
from langchain_dpicl.privacy import MECHANISMS, LineRequest, PrivacyPlan, lines
from langchain_dpicl.privacy.mechanism import count, flag, number, numbers
from langchain_dpicl.privacy.mechanisms import Vote

FIT = "fit --data d.csv --labels a,b --epsilon 1 --output h.npz"
TARGET = "plan --epsilon 3 --delta 1e-5 --owners 6920 --members 10 --shots 4 --releases 100 --accept-noise"


@pytest.mark.parametrize(
    ("place", "method", "documented"),
    [
        (("once/head.py", "PrivateHead", "fit"), PrivateHead.fit, PrivateHead.fit),
        (("once/tables_release.py", "release_table"), release_table, release_table),
        (("once/topics_release.py", "release_topics"), release_topics, release_topics),
        (("selection/__init__.py", "PoissonExampleSelector"), PoissonExampleSelector, PoissonExampleSelector),
        (("budget/budget.py", "PrivacyBudget"), PrivacyBudget, PrivacyBudget),
    ],
)
def test_the_source_says_what_the_method_says(place: tuple[str, ...], method: Any, documented: Any) -> None:
    """Names in their order, annotations, defaults and words."""
    found = parameters_of(*place)
    known = inspect.signature(method).parameters
    assert list(found) == list(known)
    words = words_of(documented.__doc__)
    for name, parameter in known.items():
        default = None if parameter.default is parameter.empty else repr(parameter.default)
        annotation = parameter.annotation.replace('"', "'")
        assert found[name] == Parameter(annotation, default, words.get(name, "")), name


def test_kinds_are_named_by_their_files() -> None:
    assert sorted(kinds()) == sorted(KINDS)


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ("The public list. One that no record has stays.", "The public list"),
        ("N, the calls; at least 2. Give this.", "N, the calls"),
        ("At most 1. The better choice.", "At most 1"),
        (
            "``rate`` is q, a chance. ``shots`` is the expected number (of 100%). Without",
            "the expected number (of 100%%)",
        ),
        ('Release {"label": ..., "counts": ...}: ``both``.', 'Release {"label": ..., "counts": ...}: both'),
        ("", ""),
    ],
)
def test_the_first_sentence_is_the_help(description: str, words: str) -> None:
    assert sentence("shots", description) == words


# -- fit ---------------------------------------------------------------------------------------------------------------


def test_every_parameter_of_a_fit_has_an_option() -> None:
    elsewhere = {
        "store": "data",
        "budget": "epsilon",
        "scores": "score_prompt",
        "progress": "private_notes",
        "line": "fits",  # the budget has one line
    }
    options = vars(parse(FIT.split()))
    for name in inspect.signature(PrivateHead.fit).parameters:
        assert elsewhere.get(name, name) in options, name


def test_a_new_parameter_of_a_fit_has_its_option_and_reaches_the_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def fit(**given: Any) -> None:
        asked.update(given)
        raise InvalidParameter("volume", given["volume"], "seen")

    new = {
        "volume": Parameter("float | None", "0.5", "How loud, from 1 to 9. Not more."),
        "gate": Parameter("Gate", None, ""),
    }
    monkeypatch.setattr(head, "_FIT", {**head._FIT, **new})
    monkeypatch.setattr(PrivateHead, "fit", fit)
    monkeypatch.chdir(tmp_path)
    Path("d.csv").write_text("text,label\n" + "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(4)))
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--volume VOLUME How loud, from 1 to 9 (default 0.5)" in shown
    assert "--gate" not in shown, "no text can give it"
    assert main([*FIT.split(), "--volume", "7.5"]) == 1
    assert (asked["volume"], asked["labels"], asked["output"], asked["progress"]) == (7.5, ["a", "b"], "h.npz", False)
    assert asked["input_key"] == "text"
    assert "owners" not in asked, "the default counts"


# -- table -------------------------------------------------------------------------------------------------------------


def test_every_parameter_of_a_table_that_a_text_can_give_has_an_option() -> None:
    elsewhere = {
        "store": "data",
        "budget": "epsilon",
        "line": "tables",  # the budget has one line
    }
    options = vars(parse("table --data d.csv --topics a,b --values c --epsilon 1 --output t.json".split()))
    for name in inspect.signature(release_table).parameters:
        assert (elsewhere.get(name, name) in options) == (name != "read_name"), name  # no text gives a chain


# -- topics ------------------------------------------------------------------------------------------------------------


def test_every_parameter_of_topics_that_a_text_can_give_has_an_option() -> None:
    elsewhere = {
        "store": "data",
        "budget": "epsilon",
        "terms_line": "reports",  # the budget has two lines
        "line": "reports",
        "llm": "model",
    }
    options = vars(parse("topics --data d.csv --epsilon 1 --output t.json".split()))
    for name in inspect.signature(release_topics).parameters:
        assert (elsewhere.get(name, name) in options) == (name not in ("terms", "words")), name


# -- plan --------------------------------------------------------------------------------------------------------------


def test_every_parameter_of_a_selector_has_an_option_or_no_part_in_a_plan() -> None:
    no_part = {
        *("store", "max_exemplars", "exemplars_per_owner", "nearest_to", "search_query"),
        *("threshold", "filter", "visible_to"),  # of a gate a plan asks for ``eligible`` alone
    }
    options = vars(parse(TARGET.split()))
    for name in inspect.signature(PoissonExampleSelector).parameters:
        assert (name in options) != (name in no_part), name


def test_every_fixed_number_of_a_mechanism_has_an_option() -> None:
    options = vars(parse(TARGET.split()))
    for family in MECHANISMS.values():
        for name in family.fixed():
            assert name in options or name == "own_calls", f"{family.name}: {name}"


@dataclass(frozen=True)
class Louder(Vote):
    """A vote with a fixed number of each kind."""

    name = "louder"

    volume: float = number("how loud", 1.0, 9.0, 5.0)
    rounds: int = count("how often", 10, 1)
    aloud: bool = flag("1 if it is heard")
    parts: tuple[float, ...] = numbers("the parts", 4)


def test_a_new_mechanism_has_its_options_and_they_reach_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (plan_module, lines):
        monkeypatch.setattr(module, "MECHANISMS", {**MECHANISMS, "louder": Louder})
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "--volume VOLUME louder: how loud" in " ".join(capsys.readouterr().out.split())
    line = f"{TARGET} --mechanism louder --volume 7.5 --rounds 3 --aloud --parts .5,.25"
    found = answer(line, capsys)["plan"]["lines"]["louder"]["options"]
    assert found == {"volume": 7.5, "rounds": 3.0, "aloud": 1.0, "parts": [0.5, 0.25]}
    with pytest.raises(InvalidParameter, match=r"volume=10 .*<= 9"):
        run(f"{TARGET} --mechanism louder --volume 10")


def test_shares_may_be_given_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{TARGET} --mechanism structured"
    equal = answer(f"{line} --fields 4 --means 1", capsys)["plan"]
    assert answer(f"{line} --shares .25,.25,.25 --mean-shares .25", capsys)["plan"] == equal
    found = answer(f"{line} --shares .5,.25", capsys)["plan"]
    request = LineRequest("structured", 40 / 6920, 100, options={"shares": (0.5, 0.25)}, owners=6920)
    plan = PrivacyPlan.solve(epsilon=3.0, delta=1e-5, lines={"structured": request})
    assert found == json.loads(plan.to_json())
    for wrong, named in (("--shares .5 --fields 2", "fields"), ("--shares .5,2", r"shares\[1\]")):
        with pytest.raises(InvalidParameter, match=f"^{named}="):
            run(f"{line} {wrong}")


# -- help --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "not_needed"),
    [
        ("fit", {"langchain_core", "numpy", "pydantic"}),
        ("table", {"langchain_core", "numpy", "pydantic"}),
        ("topics", {"langchain_core", "numpy", "pydantic"}),
        ("answer", {"langchain_core", "numpy", "pydantic"}),
        ("plan", {"langchain_core", "sqlalchemy", "pydantic"}),
    ],
)
def test_help_loads_nothing_that_takes_time(command: str, not_needed: set[str]) -> None:
    code = "import sys, langchain_dpicl.cli as cli\ntry:\n    cli.main(sys.argv[1:])\nfinally:\n    print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, command, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "usage: " in done.stdout
    assert not_needed.isdisjoint(done.stdout.splitlines()[-1].split())


def test_help_on_answers_names_the_kinds_and_the_command_that_shows_their_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for given, has_options in ((["--help"], False), (["--mode", "ptr", "-h"], True)):
        with pytest.raises(SystemExit):
            main(["answer", *given])
        shown = " ".join(capsys.readouterr().out.split())
        assert all(kind in shown for kind in (*KINDS, "documents", "head"))
        assert ("--delta0" in shown, "`dpicl answer --mode KIND --help`" in shown) == (has_options, not has_options)
    with pytest.raises(SystemExit):
        main(["answer", "--mode", "loud"])
    assert "invalid choice: 'loud'" in capsys.readouterr().err
