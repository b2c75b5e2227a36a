"""`Words` of `aggregators/base.py`: what a word is, by public settings alone."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from ways import shown

from langchain_dpicl import InvalidParameter, Words

CASES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({}, "The patient has asthma, and ASTHMA again!", ["patient", "asthma"]),
    ({}, "a I x 7", []),
    ({}, "", []),
    ({}, " \n\t", []),
    ({}, "it's re-admitted at 12:30", ["admitted", "12", "30"]),
    ({"stop_words": None}, "the cat the dog", ["the", "cat", "dog"]),
    ({"stop_words": ["patient"]}, "the patient coughs", ["the", "coughs"]),
    ({"stop_words": ("patient", "coughs")}, "patient coughs", []),
    ({"stop_words": iter(["patient"])}, "patient coughs", ["coughs"]),
    ({"lowercase": False}, "Asthma asthma The", ["Asthma", "asthma", "The"]),
    ({"stop_words": None}, "Häuser Straße naïve", ["häuser", "straße", "naïve"]),
    ({"stop_words": None}, "кашель и КАШЕЛЬ", ["кашель"]),
    ({"stop_words": None}, "咳嗽 喘息 咳嗽", ["咳嗽", "喘息"]),
    ({"stop_words": None}, "emoji 😀😀 tail \ud83d end", ["emoji", "tail", "end"]),
    ({"stop_words": None}, "nul\x00byte\u200bjoined", ["nul", "bytejoined"]),
    ({"pattern": r"#(\w+)"}, "#Cough and #fever, plain", ["cough", "fever"]),
    ({"pattern": r"\b[a-z]\b"}, "x ray y", ["x", "y"]),
    ({"pattern": r"(?i)covid(?:-19)?"}, "Covid-19 or COVID", ["covid-19", "covid"]),
    ({"tokenizer": str.split}, "high-dose b12, daily", ["high-dose", "b12,", "daily"]),
    ({"tokenizer": list, "stop_words": None}, "aba", ["a", "b"]),
]


@pytest.mark.parametrize(("settings", "text", "words"), CASES, ids=shown)
def test_a_text_gives_its_different_words_in_order(settings: dict[str, Any], text: str, words: list[str]) -> None:
    split = Words(**settings)
    assert split(text) == words
    assert split.keys(text) == frozenset(words), "without a stemmer a word is its own key"


@pytest.mark.parametrize(
    ("language", "text", "stems"),
    [
        ("english", "coughs coughing coughed", {"cough"}),
        ("german", "Häuser Haus Hauses", {"haus"}),
        ("french", "continuellement continu", {"continuel", "continu"}),
        ("spanish", "niños niño", {"niñ"}),
        ("russian", "кашель кашля", {"кашел", "кашл"}),
    ],
)
def test_a_stem_is_what_the_spellings_of_a_word_share(language: str, text: str, stems: set[str]) -> None:
    words = Words(stem=language, stop_words=None)
    assert words.keys(text) == stems
    assert {words.key(word) for word in words(text)} == stems
    assert len(words(text)) == len(text.split()), "the spellings themselves are kept"


def test_stop_words_leave_before_stems_are_taken() -> None:
    words = Words(stem="english", stop_words=["coughing"])
    assert words.keys("coughing") == frozenset()
    assert words.keys("coughs coughing") == {"cough"}


@pytest.mark.parametrize(
    ("settings", "parameter", "says"),
    [
        ({"stop_words": "german"}, "words", "not a built-in stop list"),
        ({"pattern": "(a)(b)"}, "words", "capturing group"),
        ({"pattern": "("}, "words", "unterminated"),
        ({"pattern": None}, "words", "pattern"),
        ({"tokenizer": 5}, "words", "not callable"),
        ({"tokenizer": lambda text: None}, "words", "TypeError"),
        ({"tokenizer": lambda text: 1 / 0}, "words", "ZeroDivisionError"),
        ({"stem": "klingon"}, "stem", "english"),
        ({"stem": ""}, "stem", "english"),
        ({"stem": 5}, "stem", "english"),
    ],
    ids=shown,
)
def test_settings_that_cannot_be_are_refused_when_they_are_made(
    settings: dict[str, Any], parameter: str, says: str, canary_free: Any
) -> None:
    with pytest.raises(InvalidParameter, match=says) as caught:
        Words(**settings)
    assert caught.value.parameter == parameter
    canary_free(caught.value)


def test_settings_are_copied_and_shown() -> None:
    stop = ["one"]
    words = Words(stop_words=stop, stem="porter", lowercase=True)
    stop.append("two")
    assert words("one two") == ["two"]
    shown = repr(words)
    assert all(part in shown for part in ("lowercase=True", "stop_words=('one',)", "stem='porter'", "pattern="))


def test_a_very_long_answer_is_read_in_linear_time() -> None:
    """Some hundred kilobytes of words, and two megabytes of one: a generous limit, against anything quadratic."""
    words = Words(stem="english")
    begun = time.monotonic()
    assert len(words.keys("asthma cough fever " * 10_000)) == 3
    assert words.keys("a" * 2_000_000) == {"a" * 2_000_000}
    assert time.monotonic() - begun < 30


def test_many_threads_may_read_at_once() -> None:
    words = Words(stem="english", stop_words=None)
    texts = {f"running{i}s coughs{i} hopping": words.keys(f"running{i}s coughs{i} hopping") for i in range(50)}
    wrong: list[str] = []

    def read() -> None:
        for _ in range(5):
            wrong.extend(text for text, keys in texts.items() if words.keys(text) != keys)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("settings", [{"tokenizer": lambda text: text.split(" ")}, {"pattern": r"\w*"}])
def test_an_empty_string_is_no_word(settings: Any) -> None:
    words = Words(stop_words=None, **settings)
    assert words("  cough  ") == ["cough"]
    assert words.keys("  ") == frozenset()


def test_two_unnamed_tokenizers_are_told_apart() -> None:
    first, second = (Words(tokenizer=lambda text, n=n: text.split()[:n]) for n in (1, 2))
    assert repr(first) != repr(second)
