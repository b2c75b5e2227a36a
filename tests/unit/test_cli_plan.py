"""`dpicl plan`: the command as a user meets it."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from plan_command import answer, run

from langchain_dpicl.cli.plan import epsilon_curve, noise_curve
from langchain_dpicl.errors import InfeasiblePlan, InvalidParameter
from langchain_dpicl.plots import draw_panels
from langchain_dpicl.privacy import LineRequest, PrivacyPlan

TARGET = "plan --epsilon 3 --delta 1e-5 --owners 6920 --members 10 --shots 4 --releases 10000"


def test_the_issue_s_own_line_prints_rate_noise_cost_and_flips(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{TARGET} --mechanism vote --margin 3") == 0
    text = capsys.readouterr().out
    for words in (
        "epsilon 3 and delta 1e-05",
        "sigma 1.4",
        "probability 0.00578",
        "One release alone costs epsilon",
        "A winner ahead by 3 of 10 votes is overturned with probability",
        "40 members with one exemplar each",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("mechanism", "extra", "parameter"),
    [
        ("vote", "", "sigma"),
        ("scores", "", "sigma"),
        ("joint-em", "", "eps0"),
        ("embedding", "--step 0.001", "sigma"),
        ("tokens", "", "range_bound"),
        ("ptr", "--delta0 1e-10 --select 1", "sigma"),
    ],
)
def test_every_mechanism_as_json(
    mechanism: str, extra: str, parameter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(f"{TARGET} --mechanism {mechanism} {extra}", capsys)
    line = found["lines"][mechanism]
    assert line[parameter] > 0
    assert line["rate"] == pytest.approx(40 / 6920)
    assert 0 < line["epsilon_of_one_release"] < found["certified_epsilon"] <= 3.0
    assert PrivacyPlan.from_json(json.dumps(found["plan"])).digest == found["digest"]
    assert [point["releases"] for point in line["curve"]] == [1, 10, 100, 1000, 10_000]


def test_a_plan_is_verified_by_other_accountants(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --epsilon 2 --delta 1e-5 --releases 50 --owners 1000 --verify"
    found = answer(line, capsys)
    ours, prv, google = found["verification"]["plan"]
    assert found["verification"]["lines"] == {"vote": [ours, prv, google]}
    assert ours["epsilon"] == found["certified_epsilon"]
    assert prv["epsilon"] == pytest.approx(ours["epsilon"], rel=0.02)
    assert google["epsilon"] == pytest.approx(ours["epsilon"], rel=0.01)
    assert run(line) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in ("langchain-dpicl", "prv-accountant", "dp-accounting"))
    assert "verification" not in answer(line.removesuffix(" --verify"), capsys)


def test_the_bill(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(f"{TARGET} --prompt-tokens 400 --answer-tokens 2 --price-in 0.5 --price-out 1", capsys)
    line = found["lines"]["vote"]
    assert line["cost_per_answer"] == pytest.approx(10 * (400 * 0.5 + 2) / 1e6)
    assert line["curve"][-1]["cost"] == pytest.approx(line["cost_of_all"]) == pytest.approx(20.2)


def test_a_rate_may_be_given_and_delta_is_compared_with_the_owners(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer("plan --epsilon 1 --delta 1e-3 --releases 10 --rate 0.25 --owners 500", capsys)
    assert found["lines"]["vote"]["rate"] == 0.25
    assert "warning" not in found
    assert "1/owners" in answer("plan --epsilon 1 --delta 1e-2 --releases 10 --owners 500", capsys)["warning"]
    assert run("plan --epsilon 1 --delta 1e-2 --releases 10 --owners 500") == 0
    assert "1/owners" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "parameter"),
    [
        ("plan --epsilon 0 --delta 1e-5 --releases 10 --rate 0.1", "epsilon"),
        ("plan --epsilon 1 --delta 2 --releases 10 --rate 0.1", "delta"),
        ("plan --epsilon 1 --delta 1e-5 --releases 0 --rate 0.1", "count"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0", "rate"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10", "owners"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 0", "owners"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 5 --members 0", "members"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 5 --shots 0", "shots"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --delta0 1e-9", "delta0"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --mechanism ptr", "options['delta0']"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --mechanism ptr --delta0 1e-4", "delta0"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --mechanism ptr --delta0 0", "delta0"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --margin 11", "margin"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --labels 1", "labels"),
        ("plan --epsilon nan --delta 1e-5 --releases 10 --rate 0.1", "epsilon"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --prompt-tokens -1", "prompt_tokens"),
    ],
)
def test_bad_input_is_named(line: str, parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        run(line)
    assert caught.value.parameter == parameter


def test_an_infeasible_target_says_why() -> None:
    with pytest.raises(InfeasiblePlan, match="'ptr'"):
        run("plan --epsilon 1 --delta 1e-5 --releases 100000 --rate 0.1 --mechanism ptr --delta0 1e-7")


def test_the_curves_behind_the_picture() -> None:
    plan = PrivacyPlan.solve(epsilon=2.0, delta=1e-5, lines={"v": LineRequest("vote", 0.01, 3000)})
    curve = epsilon_curve(plan)
    assert curve[0][0] == 1
    assert curve[-1] == (3000, pytest.approx(2.0, rel=5e-3))
    epsilons = [e for _, e in curve if e is not None]
    assert epsilons == sorted(epsilons)
    noise = noise_curve(plan, (1.0, 2.0, 4.0))
    assert noise[0][1] > noise[1][1] == plan.lines["v"].parameter > noise[2][1]


@pytest.mark.parametrize("mechanism", ["vote", pytest.param("tokens", marks=pytest.mark.slow)])
def test_a_picture_is_drawn(mechanism: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    found = answer(f"{TARGET} --mechanism {mechanism} --plot {path}", capsys)
    assert found["plot"] == str(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidParameter, match="can be written"):
        run(f"{TARGET} --mechanism {mechanism} --plot {tmp_path}/no/such/folder.png")


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidParameter, match="langchain-dpicl\\[eval\\]"):
        draw_panels([], "plan.png")
