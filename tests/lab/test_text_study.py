"""Text studies in `evaluation.studies`: what members wrote is kept, and private texts are the product's releases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from evaluation_fakes import FakeLLM, WordEmbeddings
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings

from langchain_dpicl.aggregators import EmbeddingMean, ReleasedKeywords
from langchain_dpicl.errors import ModelUnavailable
from langchain_dpicl.lab.evaluation import passes as passes_module
from langchain_dpicl.lab.evaluation.passes import EvaluationPlan, PassFile, key_of
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.lab.evaluation.scores import Score, text_values
from langchain_dpicl.lab.evaluation.studies import Author, TextStudy
from langchain_dpicl.lab.evaluation.tasks import GenerationTask, Shape
from langchain_dpicl.privacy.lines import LineRequest
from langchain_dpicl.privacy.mechanisms import default_delta0

TASK = GenerationTask("notes", Shape("", "Note: {input}\nTitle:"), max_tokens=8, keywords=(2, 3), k=2)
PLAN = EvaluationPlan(owners=40, members=4, shots=1, releases=20, delta=1e-3, epsilons=(1.0,), few_shots=2)
WORDS = "cat dog fox owl rain sun"
Texts = Sequence[str | None]


def row(text: str, *references: str) -> Row:
    return Row(text, references[0], references)


def written(*members: str | None, zero_shot: str | None = "nothing known") -> Texts:
    """The texts of at most four members, and of the two prompts after them."""
    return [*members, *[None] * (4 - len(members)), zero_shot, "few shots"]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[PassFile]:
    made = PassFile(tmp_path / "texts.jsonl", {})
    yield made
    made.close()


class Solved(dict[str, Any]):
    """Stands for the plans that were asked for; ``parameter`` is their noise."""

    parameter = 1.0


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> Solved:
    """The requests instead of plans, by mechanism and rate."""
    asked = Solved()

    def solve(*, epsilon: float, delta: float, lines: dict[str, LineRequest]) -> Any:
        ((name, line),) = lines.items()
        asked[line.mechanism, line.rate] = (epsilon, delta, line)
        return SimpleNamespace(lines={name: SimpleNamespace(parameter=asked.parameter)})

    monkeypatch.setattr(passes_module.PrivacyPlan, "solve", solve)
    return asked


def author(llm: FakeLLM, file: PassFile) -> Author:
    return Author(llm, llm, TASK, file)


def study_of(
    rows: Sequence[tuple[Row, Sequence[Texts]]],
    file: PassFile,
    *,
    candidates: Sequence[Sequence[str]] | None = None,
    embeddings: Embeddings | None = None,
    llm: FakeLLM | None = None,
    **settings: Any,
) -> TextStudy:
    queries, texts = [each for each, _ in rows], [samples for _, samples in rows]
    llm = FakeLLM(writes=lambda prompt: " cat dog") if llm is None else llm
    return TextStudy(
        settings.pop("task", TASK),
        queries,
        texts,
        [["cat", "dog", "rain"]] * len(rows) if candidates is None else candidates,
        settings.pop("plan", PLAN),
        WordEmbeddings(WORDS) if embeddings is None else embeddings,
        author(llm, file),
        **{"draws": 3, **settings},
    )


def find(scores: Sequence[Score], epsilon: float | None, **facts: float) -> Score:
    (score,) = [s for s in scores if s.epsilon == epsilon and facts.items() <= dict(s.facts).items()]
    return score


# -- the pass ----------------------------------------------------------------------------------------------------------


def test_an_author_asks_with_the_tasks_prompts_and_strips_the_answers(file: PassFile) -> None:
    llm = FakeLLM(writes=lambda prompt: "  a title \n")
    (found,) = author(llm, file).members([[("a", "A"), ("b", "B")], []], ["my\nnote"], 0)
    assert found == ["a title", "a title"]
    assert sorted(llm.calls) == [
        "Note: a\nTitle: A\n\nNote: b\nTitle: B\n\nNote: my note\nTitle:",
        "Note: my note\nTitle:",
    ]
    llm.calls.clear()
    assert author(llm, file).candidates(["my note"], 3) == [["a title"] * 3]
    assert llm.calls == ["Note: my note\nTitle:"] * 3


def test_an_author_with_a_writer_of_batches_never_asks_the_model(file: PassFile) -> None:
    heard: list[Any] = []

    def write(prompts: Sequence[tuple[str, str]], temperature: float) -> list[str | None]:
        heard.append(([before + question for before, question in prompts], temperature))
        return ["cat"] * len(prompts)

    llm = FakeLLM(writes=lambda prompt: " dog")
    found, alone = Author(llm, llm, TASK, file, write), Author(llm, llm, TASK, file)
    released = [ReleasedKeywords(words, ranked=ranked) for words in (["owl"], ["fox"]) for ranked in (True, False)]
    asks: dict[str, Callable[[Author, str], list[str | None]]] = {
        "members": lambda author, query: author.members([[("a", "b")], []], [query], 0)[0],
        "candidates": lambda author, query: list(author.candidates([query], 3)[0]),
        "words": lambda author, query: list(author.from_words([(words, query) for words in (*released, released[0])])),
    }
    for name, ask in asks.items():
        assert {*ask(found, "q")} == {"cat"}, name
        assert llm.calls == []
        ((prompts, temperature),) = heard
        assert temperature == (0.9 if name == "candidates" else 0.0)
        ask(alone, "other")
        assert sorted(llm.calls) == sorted(prompt.replace("Note: q", "Note: other") for prompt in prompts)
        llm.calls.clear()
        heard.clear()
    assert {*asks["words"](found, "q")} == {"cat"}
    assert heard == [], "kept"


def test_released_words_are_all_that_the_model_gets_beside_the_query(file: PassFile) -> None:
    llm = FakeLLM(writes=lambda prompt: " a title ")
    ranked = ReleasedKeywords(["fox", "owl"], ranked=True)
    assert author(llm, file).from_words([(ranked, "my note")]) == ["a title"]
    assert llm.calls == [
        "Complete the text with the following word suggestions ranked by their frequency from high to low: fox, owl."
        "\n\nNote: my note\nTitle:"
    ]
    author(llm, file).from_words([(ReleasedKeywords(["fox", "owl"]), "my note")])
    assert "ranked" not in llm.calls[-1]
    with pytest.raises(ModelUnavailable):
        author(FakeLLM(fails=lambda prompt: True), file).from_words([(ReleasedKeywords(["fox"]), "my note")])


def test_what_members_wrote_is_kept_and_not_asked_again(file: PassFile) -> None:
    llm = FakeLLM(writes=lambda prompt: str(len(prompt)))
    prompts = [[("a", "A")], [("bb", "B")], [], [("ccc", "C")], [("dddd", "D")]]
    for _ in range(2):
        (found,) = author(llm, file).members(prompts, ["note"], 0)
    assert len(llm.calls) == 5
    assert found == ["35", "36", "17", "37", "38"]


def test_a_member_that_failed_twice_is_none_and_one_that_failed_once_is_not(file: PassFile) -> None:
    seen: list[str] = []

    def fails(prompt: str) -> bool:
        seen.append(prompt)
        return "bad" in prompt or ("busy" in prompt and seen.count(prompt) == 1)

    llm = FakeLLM(writes=lambda prompt: "a title", fails=fails)
    prompts = [[("bad", "A")], [("busy", "B")], [], []]
    (found,) = author(llm, file).members(prompts, ["note"], 0)
    assert found[:2] == [None, "a title"]


def test_a_model_that_is_gone_leaves_nothing_of_that_query(file: PassFile) -> None:
    llm = FakeLLM(writes=lambda prompt: "a title", fails=lambda prompt: len(llm.calls) > 6)
    prompts = [[("a", "A")], [("b", "B")], [], []]
    author(llm, file).members(prompts, ["note"], 0)
    with pytest.raises(ModelUnavailable, match="the same command resumes"):
        author(llm, file).members(prompts, ["other"], 0)
    with pytest.raises(ModelUnavailable):
        author(llm, file).candidates(["note"], 3)
    assert list(file) == [(key_of("note"), 0)]


def test_candidates_are_asked_for_once_for_each_number_of_them(file: PassFile) -> None:
    llm = FakeLLM(writes=lambda prompt: " a title" if len(llm.calls) % 3 else " ")
    for _ in range(2):
        assert set(author(llm, file).candidates(["note"], 6)[0]) == {"a title"}
    assert len(llm.calls) == 6
    author(llm, file).candidates(["note"], 9)
    assert len(llm.calls) == 15, "twenty sentences are not passed off as forty"


# -- embedding means ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("solved")
def test_an_embedding_mean_without_noise_is_the_candidate_nearest_to_the_exact_mean(file: PassFile) -> None:
    model = DeterministicFakeEmbedding(size=8)  # of norm about 3, so all are clipped to 1

    def direction(text: str) -> Any:
        vector = np.array(model.embed_query(text))
        assert np.linalg.norm(vector) > 1.0
        return vector / np.linalg.norm(vector)

    rows, candidates = [], []
    for i in range(12):
        texts = [[f"text {i} {s} {m}" for m in range(4)] for s in range(2)]
        rows.append((row(f"query {i}", "x"), [written(*each) for each in texts]))
        candidates.append([f"candidate {i} {j}" for j in range(5)])
    study = study_of(rows, file, candidates=candidates, embeddings=model)
    runs = study.choose(PLAN, 5, 1e-9, draws=2)
    assert len(runs) == 4, "samples times draws"
    seen = set()
    for i, (_, samples) in enumerate(rows):
        for s, each in enumerate(samples):
            mean = sum(direction(str(text)) for text in each[:4])
            nearest = max(candidates[i], key=lambda text: float(direction(text) @ mean))
            assert runs[2 * s][i] == runs[2 * s + 1][i] == nearest
            seen.add(candidates[i].index(nearest))
    assert len(seen) > 2


def test_the_noise_of_an_embedding_mean_is_the_plans(
    file: PassFile, solved: Solved, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved.parameter = 2.5
    used: list[tuple[int, float]] = []
    aggregate = EmbeddingMean.aggregate

    def spy(self: EmbeddingMean, outputs: Sequence[object], parameter: float, randomness: Any) -> Any:
        used.append((len(outputs), parameter))
        return aggregate(self, outputs, parameter, randomness)

    monkeypatch.setattr(EmbeddingMean, "aggregate", spy)
    study = study_of([(row("query", "cat"), [written("cat", "cat", "dog", "cat")])], file)
    found = study.embedding()
    assert used == [(4, 1e-9), *[(4, 2.5)] * 3]
    line = LineRequest("embedding", rate=0.1, count=20, options={"step": 2.0**-16})
    assert solved["embedding", 0.1] == (1.0, 1e-3, line)
    assert find(found, 1.0).facts["sigma"] == 2.5
    assert (find(found, 1.0).runs, find(found, None).runs) == (3, 1)
    assert find(found, None).values["rouge1"].mean == 100.0
    used.clear()
    members = study.embedding(PLAN.varied(members=2), study="members")
    assert {outputs for outputs, _ in used} == {2}
    assert solved["embedding", 0.05][2].rate == 0.05
    assert {(s.study, s.facts["members"], s.facts["rate"]) for s in members} == {("members", 2, 0.05)}


@pytest.mark.usefixtures("solved")
def test_a_candidate_vote_takes_the_candidate_nearest_to_most_texts(file: PassFile, solved: Solved) -> None:
    """Three texts for cat and one for dog, of four members, at the plan's eps0; the sum of directions is no matter."""
    solved.parameter = 60.0
    study = study_of([(row("query", "cat"), [written("cat", "cat", "dog", "cat")])], file)
    found = study.embedding(method="candidate-vote")
    assert {score.method for score in found} == {"candidate-vote"}
    assert solved["vote-em", 0.1][2] == LineRequest("vote-em", rate=0.1, count=20)
    assert [find(found, epsilon).values["rouge1"].mean for epsilon in (None, 1.0)] == [100.0, 100.0]
    assert (find(found, 1.0).facts["eps0"], find(found, 1.0).facts["flipped"]) == (60.0, 0.0)


def test_flips_are_the_per_cent_of_texts_that_noise_changed(
    file: PassFile, solved: Solved, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(row(f"query {i}", "cat"), [written("cat", "cat", "dog", "cat")]) for i in range(4)]
    releases = iter(["cat"] * 4 + ["cat", "dog", "cat", "cat"] * 2 + ["rain", "cat", "cat", "cat"])
    monkeypatch.setattr(EmbeddingMean, "aggregate", lambda *_: next(releases))
    assert find(study_of(rows, file).embedding(), 1.0).facts["flipped"] == 25.0


@pytest.mark.usefixtures("solved")
def test_the_ablation_of_candidates_takes_the_first_so_many(file: PassFile) -> None:
    study = study_of([(row("query", "rain"), [written("rain", "rain", "rain", "dog")])], file)
    found = [score for n in (1, 2, 3) for score in study.embedding(count=n, study="candidates")]
    assert {s.study for s in found} == {"candidates"}
    plain = {s.facts["candidates"]: s.values["rouge1"].mean for s in found if s.epsilon is None}
    assert plain == {1: 0.0, 2: 0.0, 3: 100.0}, "cat, then dog, then rain"


@pytest.mark.usefixtures("solved")
def test_members_without_a_text_abstain_and_a_query_without_candidates_has_no_answer(file: PassFile) -> None:
    rows = [
        (row("one", "cat"), [written("cat", "cat", "", None)]),
        (row("two", "cat"), [written("", None, "", "cat")]),
        (row("three", "cat"), [written("cat", "cat", "cat", "cat")]),
    ]
    study = study_of(rows, file, candidates=[["dog", "cat"], ["dog", "cat"], []])
    assert study.choose(PLAN, 2, 1e-9, draws=1) == [["", "", ""]], "half of the members are too few"
    rows[0] = (row("one", "cat"), [written("cat", "cat", "cat", "")])
    study = study_of(rows, file, candidates=[["dog", "cat"], ["dog", "cat"], []])
    assert study.choose(PLAN, 2, 1e-9, draws=1) == [["cat", "", ""]]
    assert len(study.embedding()) == 2


# -- keywords ----------------------------------------------------------------------------------------------------------


def words_of(llm: FakeLLM) -> list[str]:
    """The suggestions of each call."""
    return [prompt.split(": ", 1)[1].split(".\n")[0] for prompt in llm.calls]


@pytest.mark.usefixtures("solved")
def test_joint_em_without_noise_has_the_querys_most_used_words_in_order(file: PassFile) -> None:
    llm = FakeLLM(writes=lambda prompt: " a title")
    query = row("dog fox owl cat rain", "a title")
    said = [written("owl cat owl", "owl fox sun", "owl cat", "sun sun")] * 3
    found = study_of([(query, said)], file, llm=llm, shown=1).keywords("joint-em")
    # sun is no word of the query; owl 3, cat 2, fox 1
    plain = find(found, None)
    assert words_of(llm)[0] == "owl, cat"
    assert plain.texts == ["[owl, cat] a title"]
    assert ("words", key_of(query.input), True, "owl", "cat") in file
    assert (plain.runs, plain.values["rouge1"].mean, plain.facts["fallback"]) == (3, 100.0, 0.0)
    assert find(found, 1.0).facts["eps0"] == 1.0


@pytest.mark.usefixtures("solved")
def test_each_text_from_keywords_is_written_once_whatever_the_order_of_queries(file: PassFile) -> None:
    llm = FakeLLM(writes=lambda prompt: " about " + prompt.split("Note: ")[1].split()[0])
    rows = [
        (row("owl cat", "about owl"), [written("owl cat", "owl", "owl cat", "owl")] * 2),
        (row("fox dog", "about fox"), [written("fox dog", "fox", "fox", "fox")] * 2),
    ]
    study = study_of(rows, file, llm=llm, plan=EvaluationPlan(**{**vars(PLAN), "epsilons": (1e-9,)}))
    plain = find(study.keywords("joint-em"), None)
    assert plain.values["rouge1"].mean == 100.0
    assert len(llm.calls) == len(set(llm.calls)) <= 4, "two orders of two words for each of two queries"
    llm.calls.clear()
    again = find(study_of(rows[::-1], file, llm=llm).keywords("joint-em"), None)
    assert "owl, cat" not in words_of(llm)
    assert "fox, dog" not in words_of(llm)
    assert again.values["rouge1"].mean == 100.0


@pytest.mark.usefixtures("solved")
def test_a_query_without_words_gets_the_zero_shot_text(file: PassFile) -> None:
    llm = FakeLLM(writes=lambda prompt: " a title")
    rows = [(row("the and of", "nothing known"), [written("owl")]), (row("owl fox", "a title"), [written("owl")])]
    plain = find(study_of(rows, file, llm=llm).keywords("joint-em"), None)
    assert plain.facts["fallback"] == 50.0
    assert plain.values["rouge1"].mean == 100.0


def test_a_failed_test_falls_back_to_the_zero_shot_text_and_is_counted(file: PassFile, solved: Solved) -> None:
    said = [written(*["owl fox"] * 4)] * 2
    queries = [(row(f"query {i}", "nothing known"), said) for i in range(3)]
    llm = FakeLLM(writes=lambda prompt: " a title")
    solved.parameter = 1e5  # a gap of 4 against noise of 2e5: passes with probability delta0
    failed = find(study_of(queries, file, llm=llm).keywords("ptr"), 1.0)
    assert (failed.facts["fallback"], failed.values["rouge1"].mean, failed.facts["sigma"]) == (100.0, 100.0, 1e5)
    solved.parameter = 0.05  # ten standard deviations and more
    passed = find(study_of(queries, file, llm=llm).keywords("ptr"), 1.0)
    assert (passed.facts["fallback"], passed.values["rouge1"].mean) == (0.0, 0.0)
    assert words_of(llm) == ["fox, owl"] * 3, "a set, in alphabetical order, written once for each query"


def test_ptr_asks_for_the_plan_that_a_budget_would_have(file: PassFile, solved: Solved) -> None:
    study_of([(row("query", "x"), [written("owl fox", "owl fox", "owl fox", "owl")])], file).keywords("ptr")
    delta0 = default_delta0(1e-3, 0.1, 20)
    line = LineRequest("ptr", rate=0.1, count=20, options={"delta0": delta0, "select": 1.0})
    assert solved["ptr", 0.1] == (1.0, 1e-3, line)


def test_ptrs_reference_without_privacy_is_the_best_gap(file: PassFile, solved: Solved) -> None:
    llm = FakeLLM(writes=lambda prompt: " a title")
    # owl 4, fox 4, cat 3, dog 1: a gap of 1 after two words, of 2 after three
    said = [written("owl fox cat", "owl fox cat", "owl fox cat", "owl fox dog")]
    study_of([(row("query", "x"), said)], file, llm=llm).keywords("ptr")
    assert words_of(llm)[0] == "cat, fox, owl"


def test_a_writer_that_fails_on_keywords_keeps_what_is_there(file: PassFile, solved: Solved) -> None:
    llm = FakeLLM(writes=lambda prompt: " a title", fails=lambda prompt: "fox" in prompt)
    rows = [(row("owl", "x"), [written("owl")]), (row("fox", "x"), [written("fox")])]
    with pytest.raises(ModelUnavailable):
        study_of(rows, file, llm=llm).keywords("joint-em")
    assert [key[1] for key in file] == [key_of("owl")]


# -- scores ------------------------------------------------------------------------------------------------------------


def test_prompts_are_scored_by_run_and_query(tmp_path: Path) -> None:
    for public in (False, True):
        file = PassFile(tmp_path / f"{public}.jsonl", {})
        first = ["cat", "dog", "cat", None, "cat", "dog", *(["cat"] if public else [])]
        second = ["cat", "cat", "cat", "cat", "dog", "cat", *(["dog"] if public else [])]
        scores = {s.method: s for s in study_of([(row("query", "cat"), [first, second])], file).prompts()}
        assert list(scores) == ["zero-shot", "2-shot", *(["public 2-shot"] if public else []), "member"]
        assert scores["zero-shot"].values["rouge1"].mean == 50.0
        assert scores["zero-shot"].values["rouge1"].deviation == pytest.approx(np.std([100, 0], ddof=1))
        assert (scores["member"].runs, scores["member"].queries, scores["member"].epsilon) == (8, 1, None)
        assert scores["member"].values["rouge1"].mean == pytest.approx(100 * 6 / 8)
        file.close()


def test_the_best_reference_counts_and_every_measure_is_there() -> None:
    references, runs = [["cat dog", "sun"], ["rain"]], [["sun", "rain"], ["owl", "rain"]]
    values = text_values(runs, references, WordEmbeddings(WORDS))
    assert list(values) == ["rouge1", "rouge2", "rougeL", "bleu", "levenshtein", "meaning"]
    for name in ("rouge1", "rougeL", "meaning"):
        assert values[name].mean == pytest.approx(75.0), name
        assert values[name].deviation == pytest.approx(np.std([100, 50], ddof=1)), "two runs"
        assert values[name].error == pytest.approx(np.std([50, 100], ddof=1) / np.sqrt(2)), "two queries"
