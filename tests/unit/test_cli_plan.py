"""`dpicl plan`: the command as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from plan_command import answer, run

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)
from langchain_dpicl.cli import plan as plan_module
from langchain_dpicl.errors import InfeasiblePlan, InvalidParameter
from langchain_dpicl.lab.plan_pictures import epsilon_curve, noise_curve
from langchain_dpicl.privacy import LineRequest, PrivacyPlan

TARGET = "plan --epsilon 3 --delta 1e-5 --owners 6920 --members 10 --shots 4 --releases 10000"


def test_the_issue_s_own_line_prints_rate_noise_cost_and_flips(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{TARGET} --mechanism vote --margin 3") == 0
    text = capsys.readouterr().out
    for words in (
        "epsilon 3 and delta 1e-05",
        "exp(1.02788 * count)",
        "probability 0.00578",
        "One release alone costs epsilon",
        "A winner ahead by 3 of 9.82 expected votes is overturned with probability",
        "40 members with one exemplar each",
        "The exponential mechanism is chosen: a winner ahead by 2 of 9.82 expected votes",
        "With one owner per call and no cap (calls=10, padded to 21), by Gaussian noise on the difference",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("mechanism", "extra", "parameter"),
    [
        ("vote-winner", "", "sigma"),
        ("vote-em", "", "eps0"),
        ("scores", "", "sigma"),
        ("joint-em", "", "eps0"),
        ("embedding", "--step 0.001", "sigma"),
        ("median", "--accept-noise", "eps0"),
        ("mean", "", "sigma"),
        ("structured", "--fields 3 --means 1 --accept-noise", "eps0"),
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
    line = "plan --epsilon 2 --delta 1e-5 --releases 50 --owners 1000 --shots 4 --noise gaussian --verify"
    found = answer(line, capsys)
    ours, prv, google = found["verification"]["plan"]
    assert found["verification"]["lines"] == {"vote-winner": [ours, prv, google]}
    assert ours["epsilon"] == found["certified_epsilon"]
    assert prv["epsilon"] == pytest.approx(ours["epsilon"], rel=0.02)
    assert google["epsilon"] == pytest.approx(ours["epsilon"], rel=0.01)
    assert run(line) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in ("langchain-dpicl", "prv-accountant", "dp-accounting"))
    assert "verification" not in answer(line.removesuffix(" --verify"), capsys)


def test_the_bill(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(f"{TARGET} --prompt-tokens 400 --answer-tokens 2 --price-in 0.5 --price-out 1", capsys)
    line = found["lines"]["vote-em"]
    assert line["cost_per_answer"] == pytest.approx(10 * (400 * 0.5 + 2) / 1e6)
    assert line["curve"][-1]["cost"] == pytest.approx(line["cost_of_all"]) == pytest.approx(20.2)


def test_a_rate_may_be_given_and_delta_is_compared_with_the_owners(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer("plan --epsilon 1 --delta 1e-3 --releases 10 --rate 0.25 --owners 500 --accept-noise", capsys)
    (line,) = found["lines"].values()
    assert line["rate"] == 0.25
    assert "warning" not in found
    assert "1/owners" in answer("plan --epsilon 1 --delta 1e-2 --releases 10 --owners 500", capsys)["warning"]
    assert run("plan --epsilon 1 --delta 1e-2 --releases 10 --owners 500") == 0
    assert "1/owners" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "parameter"),
    [
        ("plan --epsilon 0 --delta 1e-5 --releases 10 --rate 0.1", "epsilon"),
        ("plan --epsilon 1 --delta 2 --releases 10 --rate 0.1", "delta"),
        ("plan --epsilon 1 --delta 1e-5 --releases 0 --rate 0.1", "releases"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0", "rate"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10", "owners"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --fields 3", "fields"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --mechanism structured", "fields"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --mechanism structured --fields 33", "fields"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --mechanism structured --fields 3 --means 4", "means"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 0", "owners"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 5 --members 0", "members"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 5 --shots 0", "shots"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --delta0 1e-9", "delta0"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --mechanism ptr", "options['delta0']"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --mechanism ptr --delta0 1e-4", "delta0"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --mechanism ptr --delta0 0", "delta0"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --margin 11", "margin"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --labels 1", "labels"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 500 --calls 0", "calls"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 500 --calls 5 --members 5", "members"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 500 --calls 5 --shots 2", "shots"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 500 --calls 5 --max-calls 4", "max_calls"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 500 --calls 5 --max-calls 9 --pad-to 9", "pad_to"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 500 --max-calls 9", "max_calls"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 500 --calls 5 --mechanism tokens", "calls"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 500 --mechanism scores --noise gaussian", "noise"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --owners 500 --mechanism head --rate 0.5", "rate"),
        ("plan --epsilon nan --delta 1e-5 --releases 10 --rate 0.1", "epsilon"),
        ("plan --epsilon 1 --delta 1e-5 --releases 10 --rate 0.1 --prompt-tokens -1", "prompt_tokens"),
    ],
)
def test_bad_input_is_named(line: str, parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        run(line)
    assert caught.value.parameter == parameter


def flip(found: dict[str, Any]) -> float:
    (line,) = found["lines"].values()
    chosen: float = line["choice"]["mechanisms"][line["mechanism"]]["flip_probability"]
    return chosen


def test_the_plan_is_the_one_that_a_budget_would_freeze(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Mechanism, rate and noise, with shared buckets and with one owner per call, capped or not."""
    member = RunnableLambda(lambda values: "a")
    for i, (words, shape) in enumerate(
        [
            ("--members 10", {"members": 10}),
            ("--members 10 --shots 2", {"members": 10, "shots": 2}),
            ("--calls 20", {"calls": 20}),
            ("--calls 20 --max-calls 25", {"calls": 20, "max_calls": 25}),
        ]
    ):
        found = answer(f"plan --epsilon 3 --delta 1e-5 --releases 100 --owners 300 {words}", capsys)
        rows = [{"input": f"{words} {owner}", "output": "a"} for owner in range(300)]
        store = ExemplarStore.from_records(rows, DeterministicFakeEmbedding(size=4))
        budget = PrivacyBudget(3.0, 1e-5, 100, f"sqlite:///{tmp_path}/{i}.db")
        release = PrivateEnsemble(PoissonExampleSelector(store, **shape), member) | DPAggregate(  # type: ignore[arg-type]
            NoisyVote(["a", "b"]), budget
        )
        frozen = json.loads(release.line().plan.to_json())
        assert found["plan"] == frozen
        (line,) = found["lines"].values()
        assert line["members"] == release.selector.members
        crowd = release.selector.crowd(line["rate"], 300)
        assert (line["expected"], line["own_calls"]) == (crowd.expected, crowd.own_calls)


def test_one_owner_per_call_says_more_at_the_same_epsilon_and_a_cap_less(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --epsilon 1 --delta 1e-5 --releases 1000 --owners 5452"
    own, capped, shared = (
        answer(f"{line} {shape}", capsys) for shape in ("--calls 20", "--calls 20 --max-calls 20", "--members 20")
    )
    assert flip(own) < flip(capped) < flip(shared)
    (offered,) = shared["lines"].values()
    (line_,) = own["lines"].values()
    assert offered["choice"]["one_owner_per_call"] == {
        "calls": 20, "members": line_["members"], "mechanism": "vote-bit",
        "parameter": pytest.approx(line_["sigma"], rel=0.05),
        "flip_probability": pytest.approx(flip(own), abs=1e-9),
    }  # fmt: skip


def test_the_plan_says_which_noise_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever it is told to take, the other stands beside it; left alone, it takes the better one."""
    line = f"{TARGET} --calls 20".replace("--members 10 --shots 4", "")
    both = {noise: answer(f"{line} --noise {noise}", capsys) for noise in ("gaussian", "exponential")}
    flips = {noise: flip(found) for noise, found in both.items()}
    sigma = both["gaussian"]["lines"]["vote-winner"]["sigma"]
    for noise, name in (("gaussian", "vote-winner"), ("exponential", "vote-em")):
        choice = both[noise]["lines"][name]["choice"]
        assert choice["mechanisms"]["vote-winner"]["parameter"] == pytest.approx(sigma, rel=0.1)
        assert choice["mechanisms"]["vote-em"]["flip_probability"] == pytest.approx(flips["exponential"], rel=0.5)
    assert flip(answer(line, capsys)) <= min(flips.values())
    assert run(f"{line} --noise gaussian") == 0
    assert "Gaussian noise was asked for: a winner ahead by 6 of 20 expected votes" in capsys.readouterr().out


def test_a_plan_that_is_all_noise_is_refused_with_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --epsilon 0.5 --delta 1e-5 --releases 1000 --owners 200 --calls 10"
    for mechanism in ("vote", "scores", "embedding"):
        with pytest.raises(InfeasiblePlan, match=r"fewer releases than 1,000, tickets=True.*--accept-noise"):
            run(f"{line} --mechanism {mechanism}")
    found = answer(f"{line} --accept-noise", capsys)
    assert next(iter(found["lines"].values()))["flips"][-1]["flip_probability"] > 0.1
    with pytest.raises(InfeasiblePlan, match="fewer tickets than 1,000, more owners"):
        run(f"{line} --gated --eligible 50")


def test_long_work_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_PATIENCE", 0.0)
    assert run(f"{TARGET} --json") == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("dpicl plan: still computing")
    assert json.loads(printed.out)["epsilon"] == 3.0


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


@pytest.mark.parametrize("mechanism", ["vote", "scores", pytest.param("tokens", marks=pytest.mark.slow)])
def test_a_picture_is_drawn(mechanism: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    found = answer(f"{TARGET} --mechanism {mechanism} --plot {path}", capsys)
    assert found["plot"] == str(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidParameter, match="can be written"):
        run(f"{TARGET} --mechanism {mechanism} --plot {tmp_path}/no/such/folder.png")
