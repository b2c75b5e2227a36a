"""How outputs are read: no thinking, no half-read number, and one spelling for what looks alike."""

from __future__ import annotations

import unicodedata
from typing import Literal

import pytest
from langchain_core.messages import AIMessage
from pydantic import BaseModel, Field

from langchain_dpicl import InvalidParameter, Keywords, LabelVote, NoisyMean, NoisyMedian, NoisyVote, Structured, Words
from langchain_dpicl.aggregators.reading import answer_of

LABELS = ["oak", "elm"]
WRITTEN = ["caf\u00e9", "tea"]


class Visit(BaseModel):
    tree: Literal["oak", "elm"]
    height: int = Field(ge=0, le=60)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("<think>elm or oak?</think>oak", "oak"), ("<THINKING depth=2>elm</Thinking>\noak", "\noak"),
        ("elm?\n</think>\n\noak", "\n\noak"), ("<think>a<think>elm</think>b</think>oak", "oak"),
        ("oak <reflection>or elm</reflection>!", "oak !"), ("<seed:think>elm</seed:think>oak", "oak"),
        ("[THINK]elm[/THINK]oak", "oak"), ("\u25c1think\u25b7elm\u25c1/think\u25b7oak", "oak"),
        ("<|begin_of_thought|>elm<|end_of_thought|>oak", "oak"), ("<|START_THINKING|>elm<|END_THINKING|>oak", "oak"),
        ("<|channel|>analysis<|message|>elm<|end|><|start|>assistant<|channel|>final<|message|>oak<|return|>", "oak"),
        ("<|channel|>final <|constrain|>json<|message|>oak", "oak"), ("<|channel>thought\nelm<channel|>oak", "oak"),
        ("analysisWe think of elm.assistantfinaloak", "oak"), ("oak < elm, ash > fir", "oak < elm, ash > fir"),
        ("<think>\nThe oak", None), ("<think>a</think>b<think>elm", None), ("[THINK]elm", None),
        ("<|channel|>analysis<|message|>elm", None), ("analysisWe think of elm", None), ({"tree": "oak"}, None),
        (AIMessage([{"type": "thinking", "thinking": "elm"}, {"type": "text", "text": "oak"}]), "oak"),
        (AIMessage("oak", invalid_tool_calls=[{"name": "V", "args": "{", "id": "1", "error": None}]), None),
    ],
)  # fmt: skip
def test_thinking_is_left_out_and_one_without_an_end_abstains(said: object, answer: str | None) -> None:
    assert answer_of(said) == answer


@pytest.mark.parametrize("text", ["<" * 50_000, "<think " * 9_000, "analysisA" + "assistant " * 9_000, "1," * 40_000])
def test_a_hostile_text_is_read_in_linear_time(text: str) -> None:
    for aggregator in (NoisyVote(LABELS), NoisyMedian(0, 9)):
        with pytest.raises(ValueError, match="it "):
            aggregator.encode(text)


def test_every_aggregator_of_texts_leaves_thinking_out() -> None:
    thought = "<think>elm, 12, no</think>"
    assert NoisyVote(LABELS).encode(f"{thought}oak") == LABELS.index("oak")
    assert NoisyMedian(0, 60).encode(f"{thought}7") == 7
    assert Structured(Visit).encode(f'{thought}{{"tree": "oak", "height": 7}}') == (0, 7)
    assert Keywords.joint_em(LABELS, k=1).encode(f"{thought}oak").tolist() == [0]  # type: ignore[attr-defined]
    assert Keywords.ptr(k=1).encode(f"{thought}oak") == {"oak"}
    for aggregator in (NoisyVote(LABELS), NoisyMedian(0, 60), Structured(Visit), Keywords.ptr(k=1)):
        with pytest.raises(ValueError, match="it "):
            aggregator.check_encoded(aggregator.encode("<think>oak 12"))
    assert LabelVote(["<think>", "oak"]).encode("<think>") == 0, "an owner's own label is no model's answer"


@pytest.mark.parametrize("decimal", [".", ","])
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7 300.5 kg", None), ("12.50 EUR", 12.5), ("1,234.50", 1234.5), ("1,234", 1234), ("$-4.5", -4.5),
        ("-$4", -4), ("\u22124", -4), ("\u2212 4", -4), ("\u20134", -4), ("- 4", 4), ("(12)", 12), ("**12**.", 12),
        ("12kg", 12), ("5m\u00b2", 5), ("1.5e-1", 0.15), ("\uff11\uff12", 12), ("B12: 4", 4), ("GPT-4 says 9", 9),
        ("4 or 4.0", 4), ("3.5.1", None), ("1,234,5", None), ("12,50", None), ("1,50.0", None), ("192.168.0.1", None),
        ("1_000", None), ("1 000", None), ("1\u202f001", None), ("1'000", None), ("0,500", None), ("5-5", None),
        ("5\u20135", None), ("2/2", None), ("7:07", None), ("2031-03-03", None), ("3x3", None), ("2\u00bd", None),
        ("10\u2076", None), (".5", None), ("\u20144", None), ("1e5000", None), ("4 to 5", None), ("GPT-4", None),
    ],
)  # fmt: skip
def test_a_number_is_read_as_it_is_written_or_not_at_all(text: str, value: float | None, decimal: str) -> None:
    """The same table for both marks: each text is written as the other country writes it."""
    if decimal == ",":
        text = text.translate(str.maketrans(".,", ",."))
    for aggregator in (NoisyMean(-4096.0, 4096.0, decimal=decimal), NoisyMedian(-4096.0, 4096.0, decimal=decimal)):
        if value is None:
            with pytest.raises(ValueError, match="it "):
                aggregator.encode(text)
        else:
            assert aggregator.encode(text) == aggregator.encode(value)


def test_the_decimal_mark_is_said_and_shown() -> None:
    assert repr(NoisyMedian(0, 9, decimal=",")) == "NoisyMedian(0, 9, points=10, decimal=',')"
    assert Structured(Visit, decimal=",").encode({"tree": "oak", "height": "12,4"}) == (0, 12)
    assert Structured(Visit).encode({"tree": "oak", "height": "12,4"}) == (0, None)
    with pytest.raises(InvalidParameter, match="decimal"):
        NoisyMedian(0, 9, decimal=";")


@pytest.mark.parametrize(
    "said",
    [unicodedata.normalize("NFD", "CAF\u00c9"), "ca\u200bf\u00e9", "\ufeffcaf\u00e9\u200f", "ca\u00adfe\u0301"],
)
def test_texts_that_look_alike_are_one_label_and_one_word(said: str) -> None:
    assert NoisyVote(WRITTEN).encode(said) == 0
    assert Keywords.joint_em(WRITTEN, k=1).encode(said).tolist() == [0]  # type: ignore[attr-defined]
    assert Words()(f"{said} ok") == ["caf\u00e9", "ok"]
    with pytest.raises(InvalidParameter, match="invisible characters"):
        NoisyVote([WRITTEN[0], said])
