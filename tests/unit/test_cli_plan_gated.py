"""`dpicl plan --gated`: tickets, eligible owners, and the blind plan beside them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from plan_command import answer, run

from langchain_dpicl import plots
from langchain_dpicl.errors import InfeasiblePlan, InvalidParameter
from langchain_dpicl.privacy import LineRequest, PLDAccountant, PrivacyPlan
from langchain_dpicl.privacy.checks import FrozenMapping
from langchain_dpicl.privacy.plan import Gate

TARGET = "plan --gated --epsilon 3 --delta 1e-5 --releases 200 --owners 5452 --eligible 200 --members 20 --shots 1"


def gate(**more: Any) -> Gate:
    numbers = {"epsilon": 3.0, "delta": 1e-5, "mechanism": "vote", "eligible": 200, "owners": 5452, "members": 20}
    return Gate(**{**numbers, "options": FrozenMapping(), "rate": 0.1, "tickets": 200, **more})


def test_the_issue_s_own_line_says_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TARGET) == 0
    shown = capsys.readouterr()
    for words in (
        "epsilon 3 and delta 1e-05",
        "eligible for 200 of them at most",
        "A query finds 200 of 5,452 owners eligible",
        "uses one of its 200 tickets, sampled or not",
        "takes part with probability 0.1: 20 exemplars for 20 members",
        "members / sigma =",
        "eligible for 10% of the queries: 2,000 queries",
        "(the average owner): 5,452 queries",
        "50 tickets         200 tickets         800 tickets       3,200 tickets",
        "A winner ahead by 6 of 20 votes is overturned with probability",
        "at a rate of 0.003668",
        "200 queries in all: sigma",
        "5,452 queries in all, as long as an average owner's tickets last: sigma",
    ):
        assert words in shown.out
    assert shown.err == ""


def test_the_plan_is_for_so_many_participations_at_the_gate_s_rate(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(TARGET, capsys)
    alone = PrivacyPlan.solve(epsilon=3.0, delta=1e-5, lines={"vote": LineRequest("vote", 0.1, 200)})
    assert found["plan"] == json.loads(alone.to_json())
    gated = found["gated"]
    assert (gated["rate"], gated["tickets"], gated["exemplars"]) == (0.1, 200, pytest.approx(20.0))
    assert gated["noise"] == alone.lines["vote"].parameter
    assert gated["signal"] == pytest.approx(20 / gated["noise"])
    assert found["lines"]["vote"]["tickets"] == 200
    assert "releases" not in found["lines"]["vote"]
    assert {row["share"]: row["queries"] for row in found["lasts"]} == {
        1.0: 200, 0.5: 400, 0.1: 2000, 200 / 5452: 5452, 0.01: 20_000
    }  # fmt: skip


def test_every_point_of_the_trade_off_keeps_the_promise(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has the noise that its own rate and tickets need: certified by the accountant, and hardly more than that.
    Noise for another rate, or another count, would not do."""
    found = answer(TARGET, capsys)
    accountant = PLDAccountant()
    points = found["trade_off"]
    assert {(point["members"], point["rate"]) for point in points} == {(10, 0.05), (20, 0.1), (40, 0.2), (80, 0.4)}
    assert {point["tickets"] for point in points} == {50, 200, 800, 3200}
    for point in points + found["blind"]:
        count = point["tickets"] if "tickets" in point else point["queries"]
        line = LineRequest("vote", point["rate"], count).line(point["noise"])
        assert 2.97 < accountant.epsilon([line], 1e-5) <= 3.0
        assert point["signal"] == pytest.approx(point["members"] / point["noise"])
    noise = {(point["members"], point["tickets"]): point["noise"] for point in points}
    for members in (10, 20, 40, 80):
        assert noise[members, 50] < noise[members, 200] < noise[members, 800] < noise[members, 3200]
    for tickets in (50, 200, 800, 3200):
        assert noise[10, tickets] < noise[20, tickets] < noise[40, tickets] < noise[80, tickets]


def test_the_blind_plan_samples_as_many_owners_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(TARGET, capsys)
    assert [point["queries"] for point in found["blind"]] == [200, 5452]
    for point in found["blind"]:
        assert point["rate"] == pytest.approx(20 / 5452)
        assert point["noise"] < found["gated"]["noise"], "relevance costs amplification"


def test_a_rate_may_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    gated = answer(f"{TARGET} --rate 0.25", capsys)["gated"]
    assert (gated["rate"], gated["exemplars"]) == (0.25, 50.0)


def test_everybody_takes_part_where_few_are_eligible(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(f"{TARGET} --eligible 15", capsys)
    assert found["gated"]["rate"] == 1.0
    assert found["gated"]["exemplars"] == 15
    assert "nothing is amplified" in found["warnings"][0]
    assert {point["members"] for point in found["trade_off"]} == {10, 20}, "more members than rates have no more rate"
    assert run(f"{TARGET} --eligible 15 --delta 1e-3") == 0
    shown = capsys.readouterr().err
    assert "nothing is amplified" in shown
    assert "1/owners" in shown


def test_where_all_are_eligible_the_gate_is_no_gate(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(f"{TARGET} --eligible 5452", capsys)
    (blind,) = found["blind"]
    assert blind["rate"] == found["gated"]["rate"]
    assert blind["noise"] == found["gated"]["noise"]
    assert blind["queries"] == 200


@pytest.mark.parametrize(
    ("mechanism", "extra", "parameter", "signal"),
    [
        ("scores", "", "sigma", "members / sigma"),
        ("embedding", "--step 0.001", "sigma", "members / sigma"),
        ("joint-em", "", "eps0", "members * eps0 / 4"),
        ("tokens", "", "range_bound", "exemplars * range_bound"),
        ("ptr", "--delta0 1e-10", "sigma", "members / sigma"),
    ],
)
def test_every_mechanism(
    mechanism: str, extra: str, parameter: str, signal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(f"{TARGET} --mechanism {mechanism} {extra}", capsys)
    gated = found["gated"]
    assert gated["parameter"] == parameter
    assert gated["signal_is"] == signal
    factor = {"members / sigma": 20 / gated["noise"], "members * eps0 / 4": 20 * gated["noise"] / 4}
    assert gated["signal"] == pytest.approx(factor.get(signal, 20 * gated["noise"]))
    assert PrivacyPlan.from_json(json.dumps(found["plan"])).digest == found["digest"]
    assert run(f"{TARGET} --mechanism {mechanism} {extra}") == 0
    assert f"{parameter} at this epsilon, and ({signal})" in capsys.readouterr().out


def test_the_bill_is_of_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    line = answer(f"{TARGET} --prompt-tokens 100 --price-in 2", capsys)["lines"]["vote"]
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
        (f"{TARGET} --eligible 0", "eligible"),
        (f"{TARGET} --eligible -1", "eligible"),
        (f"{TARGET} --eligible 5453", "eligible"),
        (f"{TARGET} --owners 0", "owners"),
        (f"{TARGET} --members 0", "members"),
        (f"{TARGET} --shots 0", "shots"),
        (f"{TARGET} --rate 0", "rate"),
        (f"{TARGET} --rate 1.1", "rate"),
        (f"{TARGET} --releases 0", "releases"),
        (f"{TARGET} --epsilon 0", "epsilon"),
        (f"{TARGET} --delta 0", "delta"),
        (f"{TARGET} --delta0 1e-9", "delta0"),
        (f"{TARGET} --mechanism ptr", "options['delta0']"),
        (f"{TARGET} --mechanism threshold", "mechanism"),
        (f"{TARGET} --margin 21", "margin"),
        ("plan --epsilon 3 --delta 1e-5 --releases 200 --owners 5452 --eligible 200", "eligible"),
    ],
)
def test_bad_input_is_named(line: str, parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        run(line)
    assert caught.value.parameter == parameter


def test_a_threshold_is_planned_without_a_sample(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --epsilon 0.5 --delta 1e-6 --releases 1 --mechanism threshold"
    assert answer(line, capsys)["lines"]["threshold"]["rate"] == 1.0
    assert answer(f"{line} --owners 5452 --rate 1", capsys)["lines"]["threshold"]["rate"] == 1.0
    with pytest.raises(InvalidParameter, match="all owners take part"):
        run(f"{line} --rate 0.1")


@pytest.mark.parametrize("extra", ["", pytest.param("--mechanism tokens --eligible 30", marks=pytest.mark.slow)])
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
    assert answer(f"{TARGET} {extra} --plot {path}", capsys)["plot"] == str(path)
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


def test_a_picture_that_cannot_be_written_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(Gate, "noise", lambda *_: 2.0)  # what is drawn plays no part here
    with pytest.raises(InvalidParameter, match="can be written"):
        run(f"{TARGET} --plot {tmp_path}/no/such/folder.png")


def test_other_accountants_know_releases_and_no_tickets(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --gated --epsilon 2 --delta 1e-5 --releases 50 --owners 1000 --eligible 500 --verify"
    found = answer(line, capsys)["verification"]
    assert "tickets apply to neither of them" in found["note"]
    assert found["plan"][1]["epsilon"] == pytest.approx(found["plan"][0]["epsilon"], rel=0.02)
    assert run(line) == 0
    assert found["note"] in capsys.readouterr().out
