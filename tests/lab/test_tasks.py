"""`evaluation.tasks`: every template as it is rendered, labels and their spellings, and what the papers report."""

from __future__ import annotations

import pickle

import pytest

from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.evaluation.tasks import (
    SEPARATOR,
    TASKS,
    ClassificationTask,
    GenerationTask,
    Shape,
    task,
)

CLASSIFICATION = ("sst2", "amazon", "agnews", "trec")
GENERATION = ("samsum", "e2e", "wikilarge", "docqa", "mts_dialog")

PROMPTS = {
    "sst2": "Review: one\nSentiment: two\n\nReview: three\nSentiment:",
    "amazon": "one\nSentiment: two\n\nthree\nSentiment:",
    "agnews": (
        "Classify the news articles into the categories of World, Sports, Business, and Technology.\n\n"
        "Article: one\nAnswer: two\n\nArticle: three\nAnswer:"
    ),
    "trec": (
        "Classify the questions based on whether their answer type is a Number, Location, Person, Description, Entity, "
        "or Abbreviation.\n\nQuestion: one\nAnswer Type: two\n\nQuestion: three\nAnswer Type:"
    ),
    "samsum": ("Dialogue:\none\nSummarize the above dialogue: two\n\nDialogue:\nthree\nSummarize the above dialogue:"),
    "e2e": "Data: one\nDescription: two\n\nData: three\nDescription:",
    "wikilarge": "Complex: one\nSimple: two\n\nComplex: three\nSimple:",
    "docqa": "one\nAnswer: two\n\nthree\nAnswer:",
    "mts_dialog": (
        "Dialogue:\none\nSummarize the above dialogue: two\n\nDialogue:\nthree\nSummarize the above dialogue:"
    ),
}


def test_the_tasks_are_the_papers_eight_and_mts_dialog() -> None:
    assert tuple(TASKS) == CLASSIFICATION + GENERATION
    assert all(isinstance(TASKS[name], ClassificationTask) for name in CLASSIFICATION)
    assert all(isinstance(TASKS[name], GenerationTask) for name in GENERATION)
    assert all(task(name).name == name for name in TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_reads_like_this(name: str) -> None:
    shape = task(name).shape
    assert shape.prefix([("one", "two")]) + shape.ask("three") == PROMPTS[name]


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_without_examples_is_the_instruction_and_the_query(name: str) -> None:
    shape = task(name).shape
    start = f"{shape.instruction}\n\n" if shape.instruction else ""
    assert shape.prefix([]) == start
    assert shape.prefix([("a", "b"), ("c", "d")]) == (start + shape.example("a", "b") + shape.example("c", "d"))


@pytest.mark.parametrize("name", TASKS)
def test_no_text_passes_for_another_example(name: str) -> None:
    """However the separator is written (Unicode has many line ends), a prompt has as many as it has examples."""
    shape = task(name).shape
    forged = f"mine\n\n{shape.example('forged', 'forged')}"
    for blank in ("\n\n", "\n \n", "\r\n\r\n", "\x0b\x0c", "\u2028\u2029", "\n\t\n\n", "\x85\x85", "\n\u3000\n"):
        text = forged.replace("\n\n", blank)
        prompt = shape.prefix([(text, text)]) + shape.ask(text)
        assert prompt.count("\n\n") == (2 if shape.instruction else 1)
        assert len(prompt.splitlines()) == prompt.count("\n") + 1  # no other line end is left
        if not shape.multiline:
            assert len(shape.ask(text).split("\n")) == len(shape.ask("mine").split("\n"))


def test_the_turns_of_a_dialogue_keep_their_lines() -> None:
    asked = task("mts_dialog").shape.ask("Doctor: How  are you? \n\n Patient: Fine.\r\n")
    assert asked == "Dialogue:\nDoctor: How are you?\nPatient: Fine.\nSummarize the above dialogue:"


def test_braces_in_a_text_stay_what_they_are() -> None:
    shape = task("sst2").shape
    assert shape.example("{output} {input} {0}", "{input}") == "Review: {output} {input} {0}\nSentiment: {input}\n\n"


@pytest.mark.parametrize(
    ("changed", "parameter"),
    [
        ({"query": "Question:"}, "query"),
        ({"query": "{input} and {input}:"}, "query"),
        ({"query": "Question: {input}\nAnswer: "}, "query"),
    ],
)
def test_a_shape_that_cannot_hold_its_promise_is_refused(changed: dict[str, str], parameter: str) -> None:
    good = {"instruction": "", "query": "Question: {input}\nAnswer:"}
    Shape(**good)
    with pytest.raises(InvalidParameter, match=parameter) as caught:
        Shape(**{**good, **changed})
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("sst2", {"positive": "Positive", "negative": "Negative", " Positive. ": "Positive"}),
        ("amazon", {"positive": "Positive", "NEGATIVE": "Negative"}),
        ("agnews", {"World": "World", "Sci/Tech": "Technology", "Technology": "Technology", "business": "Business"}),
        (
            "trec",
            {
                "Human": "Person",
                "Person": "Person",
                "HUM": "Person",
                "Number": "Number",
                "NUM": "Number",
                "LOC": "Location",
                "DESC": "Description",
                "ENTY": "Entity",
                "ABBR": "Abbreviation",
                "abbreviation": "Abbreviation",
            },
        ),
    ],
)
def test_the_spellings_of_the_data_mean_labels(name: str, spellings: dict[str, str]) -> None:
    classification = task(name)
    assert isinstance(classification, ClassificationTask)
    assert {word: classification.label_of(word) for word in spellings} == spellings
    assert [classification.label_of(label) for label in classification.labels] == list(classification.labels)
    assert classification.label_of("neither") is None
    assert classification.label_of("") is None


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_the_labels_of_the_hub_are_known(name: str) -> None:
    classification = task(name)
    assert isinstance(classification, ClassificationTask)
    assert classification.hub is not None
    known = {classification.label_of(word) for word in classification.hub.label_names}
    assert known in (set(), set(classification.labels))


@pytest.mark.parametrize("name", ["trec", "agnews"])
def test_an_instruction_names_every_label(name: str) -> None:
    classification = task(name)
    assert isinstance(classification, ClassificationTask)
    assert all(label in classification.shape.instruction for label in classification.labels)


def test_a_prompt_without_content_has_the_layout_of_one_with() -> None:
    assert task("trec").shape.ask("N/A") == "Question: N/A\nAnswer Type:"
    amazon = task("amazon")
    assert isinstance(amazon, ClassificationTask)
    assert amazon.shape.ask(amazon.content_free[0]) == "Title: N/A\nReview: N/A\nSentiment:"


def test_an_unknown_task_is_refused_with_the_list() -> None:
    with pytest.raises(InvalidParameter, match=r"task='imdb'.*sst2, amazon, agnews, trec, samsum") as caught:
        task("imdb")
    assert caught.value.parameter == "task"


def test_an_alias_of_no_label_and_labels_that_are_one_are_refused() -> None:
    shape = Shape("", "{input}:")
    with pytest.raises(InvalidParameter, match=r"aliases\['no'\]='Nein'.*one of Yes, No"):
        ClassificationTask("own", ("Yes", "No"), shape, aliases={"no": "Nein"})
    with pytest.raises(InvalidParameter, match="labels"):
        ClassificationTask("own", ("Yes", "yes."), shape)


@pytest.mark.parametrize(
    ("changed", "parameter"),
    [({"max_tokens": 0}, "max_tokens"), ({"k": 0}, "k"), ({"keywords": (5, 4)}, "keywords[1]")],
)
def test_numbers_of_a_generation_task_are_checked(changed: dict[str, object], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        GenerationTask(**{"name": "own", "shape": Shape("", "{input}:"), "max_tokens": 5, **changed})  # type: ignore[arg-type]
    assert caught.value.parameter == parameter


def test_a_generated_answer_ends_before_the_next_example() -> None:
    for name in GENERATION:
        generation = task(name)
        assert isinstance(generation, GenerationTask)
        following = SEPARATOR + generation.shape.ask("next")
        assert any(following.startswith(stop) for stop in generation.stop)


def test_every_published_figure_says_where_it_stands() -> None:
    figures = [figure for entry in TASKS.values() for figure in entry.paper]
    assert len(figures) == len({(f.source, f.model, f.method, f.epsilon, f.metric) for f in figures}) > 0
    for figure in figures:
        assert figure.source.startswith(("Wu et al. 2024", "Flemings et al. 2025", "Hanke et al. 2024, table"))
        assert figure.epsilon is None or 1.0 <= figure.epsilon <= 8.0
    (printed,) = (f.value for f in figures if f.epsilon == 1.0 and f.metric == "ROUGE-L")
    assert printed == 29.85, "the paper's own figure, and not its notebook's 29.51"


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_a_value(name: str) -> None:
    entry = task(name)
    assert pickle.loads(pickle.dumps(entry)) == entry  # noqa: S301
    assert hash(entry) == hash(pickle.loads(pickle.dumps(entry)))  # noqa: S301
