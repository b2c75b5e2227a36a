"""`dpicl plan --gated`: tickets, eligible owners, and the blind plan beside them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from plan_command import answer, run

from langchain_dpicl.errors import InfeasiblePlan, InvalidParameter
from langchain_dpicl.lab import plots
from langchain_dpicl.privacy import LineRequest, PLDAccountant, PrivacyPlan
from langchain_dpicl.privacy.checks import FrozenMapping
from langchain_dpicl.privacy.choice import filled
from langchain_dpicl.privacy.gate import Gate
from langchain_dpicl.privacy.mechanisms import OWN_CALLS

TARGET = "plan --gated --epsilon 3 --delta 1e-5 --releases 200 --owners 5452 --eligible 200 --members 20 --shots 1"
VOTE = f"{TARGET} --noise gaussian --accept-noise"
VOTES = filled(20, 0.1, 200)


def gate(**more: Any) -> Gate:
    numbers = {"epsilon": 3.0, "delta": 1e-5, "mechanism": "vote", "eligible": 200, "owners": 5452, "members": 20}
    return Gate(**{**numbers, "options": FrozenMapping(), "rate": 0.1, "tickets": 200, **more})


@pytest.fixture
def one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve no plan for other rates and counts than the line's own: the test looks at none of them."""
    monkeypatch.setattr(Gate, "noise", lambda *_: 2.0)


def test_the_issue_s_own_line_says_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(VOTE) == 0
    shown = capsys.readouterr()
    for words in (
        "epsilon 3 and delta 1e-05",
        "eligible for 200 of them at most",
        "A query finds 200 of 5,452 owners eligible",
        "uses one of its 200 tickets, sampled or not",
        "takes part with probability 0.1: 20 exemplars for 20 members, on average; 12.66 outputs count",
        "outputs / sigma =",
        "eligible for 10% of the queries: 2,000 queries",
        "(the average owner): 5,452 queries",
        "50 tickets         200 tickets         800 tickets       3,200 tickets",
        "A winner ahead by 6 of 12.7 expected votes is overturned with probability",
        "at a rate of 0.003668",
        "200 queries in all: sigma",
        "5,452 queries in all, as long as an average owner's tickets last: sigma",
    ):
        assert words in shown.out
    assert "Warning" not in shown.err  # a slow machine says that it is still computing


def test_the_plan_is_for_so_many_participations_at_the_gate_s_rate(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(VOTE, capsys)
    alone = PrivacyPlan.solve(epsilon=3.0, delta=1e-5, lines={"vote-winner": LineRequest("vote-winner", 0.1, 200)})
    assert found["plan"] == json.loads(alone.to_json())
    gated = found["gated"]
    assert (gated["rate"], gated["tickets"], gated["exemplars"]) == (0.1, 200, pytest.approx(20.0))
    assert gated["noise"] == alone.lines["vote-winner"].parameter
    assert gated["signal"] == pytest.approx(VOTES / gated["noise"])
    assert found["lines"]["vote-winner"]["tickets"] == 200
    assert "releases" not in found["lines"]["vote-winner"]
    assert {row["share"]: row["queries"] for row in found["lasts"]} == {
        1.0: 200, 0.5: 400, 0.1: 2000, 200 / 5452: 5452, 0.01: 20_000
    }  # fmt: skip


def test_every_point_of_the_trade_off_keeps_the_promise(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has the noise that its own rate and tickets need: certified by the accountant, and hardly more than that.
    Noise for another rate, or another count, would not do."""
    found = answer(VOTE, capsys)
    accountant = PLDAccountant()
    points = found["trade_off"]
    assert {(point["members"], point["rate"]) for point in points} == {(10, 0.05), (20, 0.1), (40, 0.2), (80, 0.4)}
    assert {point["tickets"] for point in points} == {50, 200, 800, 3200}
    for point in points + found["blind"]:
        count = point["tickets"] if "tickets" in point else point["queries"]
        line = LineRequest("vote", point["rate"], count).line(point["noise"])
        assert 2.97 < accountant.epsilon([line], 1e-5) <= 3.0
        votes = filled(point["members"], point["members"] / 200, 200)
        assert point["signal"] == pytest.approx(votes / point["noise"])
    noise = {(point["members"], point["tickets"]): point["noise"] for point in points}
    for members in (10, 20, 40, 80):
        assert noise[members, 50] < noise[members, 200] < noise[members, 800] < noise[members, 3200]
    for tickets in (50, 200, 800, 3200):
        assert noise[10, tickets] < noise[20, tickets] < noise[40, tickets] < noise[80, tickets]


def test_the_blind_plan_samples_as_many_owners_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(VOTE, capsys)
    assert [point["queries"] for point in found["blind"]] == [200, 5452]
    for point in found["blind"]:
        assert point["rate"] == pytest.approx(20 / 5452)
        assert point["noise"] < found["gated"]["noise"], "relevance costs amplification"


def test_a_rate_may_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    gated = answer(f"{VOTE} --rate 0.25", capsys)["gated"]
    assert (gated["rate"], gated["exemplars"]) == (0.25, 50.0)


def test_everybody_takes_part_where_few_are_eligible(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(f"{VOTE} --eligible 15", capsys)
    assert found["gated"]["rate"] == 1.0
    assert found["gated"]["exemplars"] == 15
    assert "nothing is amplified" in found["warnings"][0]
    assert {point["members"] for point in found["trade_off"]} == {10, 20}, "more members than rates have no more rate"
    assert run(f"{VOTE} --eligible 15 --delta 1e-3") == 0
    shown = capsys.readouterr().err
    assert "nothing is amplified" in shown
    assert "1/owners" in shown


def test_where_all_are_eligible_the_gate_is_no_gate(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(f"{VOTE} --eligible 5452", capsys)
    (blind,) = found["blind"]
    assert blind["rate"] == found["gated"]["rate"]
    assert blind["noise"] == found["gated"]["noise"]
    assert blind["queries"] == 200


@pytest.mark.parametrize(
    ("mechanism", "extra", "parameter", "signal"),
    [
        ("scores", "", "sigma", "outputs / sigma"),
        ("embedding", "--step 0.001", "sigma", "outputs / sigma"),
        ("vote-em", "", "eps0", "outputs * eps0 / 2"),
        ("joint-em", "", "eps0", "outputs * eps0 / 4"),
        ("median", "", "eps0", "outputs * eps0 / 4"),
        ("mean", "", "sigma", "outputs / sigma"),
        ("tokens", "", "range_bound", "exemplars * range_bound"),
        ("ptr", "--delta0 1e-10", "sigma", "outputs / sigma"),
    ],
)
def test_every_mechanism(
    mechanism: str, extra: str, parameter: str, signal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"{TARGET} --accept-noise --mechanism {mechanism} {extra}"
    found = answer(line, capsys)
    gated = found["gated"]
    assert gated["parameter"] == parameter
    assert gated["signal_is"] == signal
    noise = gated["noise"]
    formula = signal.replace("outputs", str(VOTES)).replace("exemplars", "20").replace(parameter, str(noise))
    assert gated["signal"] == pytest.approx(eval(formula))
    assert PrivacyPlan.from_json(json.dumps(found["plan"])).digest == found["digest"]
    assert run(line) == 0
    assert f"{parameter} at this epsilon, and ({signal})" in capsys.readouterr().out


@pytest.mark.usefixtures("one_plan")
def test_one_owner_per_call_behind_a_gate(capsys: pytest.CaptureFixture[str]) -> None:
    """All outputs count. A cap takes noise for two counts that move, and not for one bit; and half of an eps0."""
    line = VOTE.replace("--members 20 --shots 1", "--calls 20")
    own, capped = answer(line, capsys), answer(f"{line} --max-calls 25", capsys)
    assert own["gated"]["outputs"] == capped["gated"]["outputs"] == pytest.approx(20.0)
    assert own["gated"]["signal"] == pytest.approx(20 / own["gated"]["noise"])
    assert 0.75 < capped["gated"]["signal"] / own["gated"]["signal"] * math.sqrt(2) < 0.95
    assert (own["lines"]["vote-winner"]["members"], capped["lines"]["vote-winner"]["members"]) == (35, 25)
    for options, name, signal in (({OWN_CALLS: 1.0}, "outputs * eps0", 10.0), ({}, "outputs * eps0 / 2", 5.0)):
        each = gate(mechanism="vote-em", calls=True, options=FrozenMapping(options))
        assert (each.signal_name, each.signal(20, 0.5)) == (name, pytest.approx(signal))
    assert run(f"{line} --calls 300") == 0
    shown = capsys.readouterr()
    assert "200 calls of one owner each, on average; 200 outputs count" in shown.out
    assert "    calls     rate          50 tickets" in shown.out
    assert "nothing is amplified" in shown.err


@pytest.mark.usefixtures("one_plan")
def test_a_gated_plan_of_shared_buckets_names_the_calls_of_one_owner_each(capsys: pytest.CaptureFixture[str]) -> None:
    """With the numbers of the plan of as many calls, for the same lead; and so does its refusal."""
    found = answer(VOTE, capsys)["lines"]["vote-winner"]["choice"]["one_owner_per_call"]
    calls = f"{TARGET} --accept-noise".replace("--members 20 --shots 1", "--calls 20 --margin 6")
    own = answer(calls, capsys)["lines"]["vote-bit"]
    assert (found["calls"], found["members"], found["mechanism"]) == (20, own["members"], "vote-bit")
    assert found["flip_probability"] == pytest.approx(own["flips"][0]["flip_probability"], rel=0.5)
    with pytest.raises(InfeasiblePlan, match="one owner per call"):
        run(f"{TARGET} --releases 5000")


def test_the_bill_is_of_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    line = answer(f"{VOTE} --prompt-tokens 100 --price-in 2", capsys)["lines"]["vote-winner"]
    assert line["cost_per_answer"] == pytest.approx(20 * 100 * 2 / 1e6)
    assert "cost_of_all" not in line, "the number of queries has no limit"


def test_what_cannot_be_planned_is_a_gap_and_not_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    """PTR's delta0 is paid at every release: beyond delta / delta0 of them, at the rate, no noise is enough."""
    line = f"{TARGET} --mechanism ptr --delta0 1e-8 --releases 2000"
    for point in (found := answer(line, capsys)["trade_off"]):
        possible = point["rate"] * point["tickets"] * 1e-8 < 1e-5
        assert (point["noise"] is not None) == (point["signal"] is not None) == possible
    assert 0 < sum(point["noise"] is None for point in found) < len(found)
    assert run(line) == 0
    assert "no plan" in capsys.readouterr().out
    with pytest.raises(InfeasiblePlan):
        run(f"{line} --releases 200000")


def test_counts_beyond_the_accountant_are_a_gap() -> None:
    assert gate(tickets=1_000_000, owners=100_000).lasting == 500_000_000
    assert gate().noise(0.1, 500_000_000) is None


def test_an_average_owner_never_lasts_longer_than_its_tickets_allow() -> None:
    """Rounded down: at the share of an average owner, so many queries burn no more than its tickets."""
    for eligible in (1, 3, 7, 199, 5452):
        lasting = gate(eligible=eligible).lasting
        assert math.floor(lasting * eligible / 5452) <= 200 < (lasting + 1) * eligible / 5452 + 1e-9


@pytest.mark.parametrize(
    ("line", "parameter"),
    [
        ("plan --gated --epsilon 3 --delta 1e-5 --releases 200 --owners 5452", "eligible"),
        ("plan --gated --epsilon 3 --delta 1e-5 --releases 200 --eligible 20", "owners"),
        (f"{VOTE} --eligible 0", "eligible"),
        (f"{VOTE} --eligible -1", "eligible"),
        (f"{VOTE} --eligible 5453", "eligible"),
        (f"{VOTE} --owners 0", "owners"),
        (f"{VOTE} --members 0", "members"),
        (f"{VOTE} --shots 0", "shots"),
        (f"{VOTE} --rate 0", "rate"),
        (f"{VOTE} --rate 1.1", "rate"),
        (f"{VOTE} --releases 0", "releases"),
        (f"{VOTE} --epsilon 0", "epsilon"),
        (f"{VOTE} --delta 0", "delta"),
        (f"{VOTE} --delta0 1e-9", "delta0"),
        (f"{TARGET} --mechanism ptr", "options['delta0']"),
        (f"{TARGET} --mechanism head", "mechanism"),
        (f"{VOTE} --margin 21", "margin"),
        ("plan --epsilon 3 --delta 1e-5 --releases 200 --owners 5452 --eligible 200", "eligible"),
    ],
)
def test_bad_input_is_named(line: str, parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        run(line)
    assert caught.value.parameter == parameter


def test_a_head_is_planned_without_a_sample(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --epsilon 0.5 --delta 1e-6 --releases 1 --mechanism head"
    assert answer(line, capsys)["lines"]["head"]["rate"] == 1.0
    assert answer(f"{line} --owners 5452 --rate 1", capsys)["lines"]["head"]["rate"] == 1.0
    with pytest.raises(InvalidParameter, match="all owners take part"):
        run(f"{line} --rate 0.1")


TOKENS = "--mechanism tokens --eligible 30 --releases 10"


@pytest.mark.parametrize("extra", ["", pytest.param(TOKENS, marks=pytest.mark.slow)])
def test_two_pictures_are_drawn(
    extra: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every curve rises with the tickets as it should; a point of one is compared with a plan of its own."""
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    write = plots.save_figure

    def save(figure: Any, path: str) -> None:
        drawn.append(figure)
        write(figure, path)

    monkeypatch.setattr(plots, "save_figure", save)
    path = tmp_path / "gated.png"
    line = VOTE if not extra else VOTE.replace(" --noise gaussian", "")
    assert answer(f"{line} {extra} --plot {path}", capsys)["plot"] == str(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    noise, signal = drawn[0].axes
    assert (
        [line.get_label() for line in noise.lines][-1] == [line.get_label() for line in signal.lines][-1] == "the plan"
    )
    for line in noise.lines[:-1]:
        values = line.get_ydata()
        assert len(values) >= 2
        assert list(values) == sorted(values, reverse=bool(extra)), "more tickets need more noise"
    if not extra:
        middle = noise.lines[1]
        assert middle.get_label() == "gated, q = 0.1"
        at = middle.get_xdata()[3]
        assert middle.get_ydata()[3] == gate().noise(0.1, int(at))
        assert [line.get_label() for line in signal.lines[:-1]] == [
            "gated, 50 tickets",
            "gated, 200 tickets",
            "gated, 800 tickets",
            "blind, 200 queries in all",
            "blind, 5,452 queries in all",
        ]


@pytest.mark.usefixtures("one_plan")
def test_a_picture_that_cannot_be_written_is_a_refusal(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InvalidParameter, match="can be written"):
        run(f"{VOTE} --plot {tmp_path}/no/such/folder.png")


def test_other_accountants_know_releases_and_no_tickets(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --gated --epsilon 2 --delta 1e-5 --releases 50 --owners 1000 --eligible 500 --noise gaussian --verify"
    found = answer(line, capsys)["verification"]
    assert "tickets apply to neither of them" in found["note"]
    assert found["plan"][1]["epsilon"] == pytest.approx(found["plan"][0]["epsilon"], rel=0.02)
    assert run(line) == 0
    assert found["note"] in capsys.readouterr().out
