"""A head's label scores: each record's are its own, and the file keeps what it needs."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_server import chat_server
from evaluation_fakes import FakeLLM, unit
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListLLM
from langchain_core.tracers.context import collect_runs
from langchain_openai import ChatOpenAI
from numpy.typing import NDArray
from pydantic import SecretStr

from langchain_dpicl import ExemplarStore, LabelScores, PrivacyBudget, PrivateHead, few_shot_chain, label_public
from langchain_dpicl.calls import running
from langchain_dpicl.errors import InvalidParameter, ModelLost, ModelUnavailable, UnsafeConfigurationError
from langchain_dpicl.once import fitting, probing, sums
from langchain_dpicl.once.fitting import FitReport
from langchain_dpicl.once.scores import CalibratedScores
from langchain_dpicl.once.steps import FeatureMap, OwnedRecords

LABELS = ["no", "yes"]
WORDS = ["bad", "good"]
TEMPLATE = "Review: {input}\nIt is"
DIMENSION = 6
EMBEDDINGS = DeterministicFakeEmbedding(size=DIMENSION)
PUBLIC = [f"public {i} {'fine' if i % 2 else 'dull'}" for i in range(20)]


def weight(prompt: str, word: str) -> float:
    """Fine texts are good, dull ones bad; the model prefers "bad" whatever the text."""
    liked = "fine" in prompt
    return (0.5 + unit(prompt, word)) * (4.0 if liked == (word == "good") else 1.0) * (30.0 if word == "bad" else 1.0)


def model(**how: Any) -> FakeLLM:
    return FakeLLM(words=[*WORDS, "so"], **{"weight": weight, **how})


def store_of(owners: int = 200) -> ExemplarStore:
    """Texts of which the embeddings say nothing: their vectors are hashes."""
    rows = [
        {"input": f"text {i} {'fine' if i % 2 else 'dull'}", "output": LABELS[i % 2], "owner": f"o{i}"}
        for i in range(owners)
    ]
    return ExemplarStore.from_records(rows, EMBEDDINGS, owner_key="owner", progress=False)


@pytest.fixture
def budgets(tmp_path: Path) -> Iterator[Any]:
    opened: list[PrivacyBudget] = []

    def make(epsilon: float = 8.0) -> PrivacyBudget:
        url = f"sqlite:///{tmp_path}/{len(opened)}.db"
        opened.append(PrivacyBudget(epsilon, 1e-5, {"head": 1}, ledger=url))
        return opened[-1]

    yield make
    for budget in opened:
        budget.close()


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise for every fit."""

    class Noise:
        def __init__(self) -> None:
            self.generator = np.random.default_rng(0)

        def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
            return np.rint(self.generator.normal(0.0, sigma, size)).astype(np.int64)

    monkeypatch.setattr(sums, "SecureRandomness", Noise)


def fitted(budget: PrivacyBudget, llm: Any, store: ExemplarStore | None = None, **how: Any) -> PrivateHead:
    scores = LabelScores(llm, WORDS, TEMPLATE)
    settings = {"public": PUBLIC, "scores": scores, "progress": False, **how}
    return PrivateHead.fit(store or store_of(), LABELS, budget, **settings)


def calibrated(**how: Any) -> CalibratedScores:
    return LabelScores(model(), WORDS, TEMPLATE, **how).calibrated(PUBLIC, progress=False)


# -- features ----------------------------------------------------------------------------------------------------------


def test_scores_lose_the_models_bias_over_public_texts() -> None:
    """Uncalibrated, "bad" leads for every text; calibrated, dull texts are on one side and fine ones on the other."""
    scores = calibrated()
    rows = [scores.scores.row(text) for text in PUBLIC]
    assert all(row[0] > row[1] for row in rows)
    features = scores.features(rows) / FeatureMap.unit
    assert [row[1] > row[0] for row in features] == [i % 2 == 1 for i in range(len(PUBLIC))]
    assert abs(features.mean()) < 1e-4
    assert np.abs(np.linalg.norm(features, axis=1).mean() - 1 / 3) < 0.1  # three spreads are 1
    assert (scores.features([scores.mean, None]) == 0).all()


@pytest.mark.parametrize("share", [0.001, 0.3, 0.999])
@pytest.mark.parametrize("labels", [2, 40])
def test_features_of_an_embedding_and_scores_have_norm_at_most_1_and_are_their_rows_own(
    share: float, labels: int
) -> None:
    """In whole numbers, with no rounding, however far the scores are."""
    draw = np.random.default_rng(labels)
    words = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(labels)]
    scores = LabelScores(model(), words, TEMPLATE, share=share)
    found = CalibratedScores(scores, draw.normal(size=labels).tolist(), 2.0**-10)
    vectors = draw.normal(size=(300, DIMENSION))
    embedded = FeatureMap(DIMENSION, scale=16.0).features(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    rows: list[Any] = (draw.normal(size=(300, labels)) * np.geomspace(1e-6, 70, 300)[:, None]).tolist()
    rows[7] = None
    joined = found.joined(embedded, rows)
    squares = [sum(int(number) ** 2 for number in row) for row in joined]
    assert max(squares) <= FeatureMap.unit**2
    assert max(squares) > 0.99 * FeatureMap.unit**2
    for some in (slice(0, 1), slice(3, 10), slice(7, 8), slice(100, 300)):
        assert (found.joined(embedded[some], rows[some]) == joined[some]).all()


# -- fitting -----------------------------------------------------------------------------------------------------------


def test_a_head_learns_from_scores_what_embeddings_do_not_show(quiet: None, budgets: Any) -> None:
    head = fitted(budgets(), model())
    questions = [f"question {i} {'fine' if i % 2 else 'dull'}" for i in range(40)]
    right = [LABELS[i % 2] for i in range(40)]
    assert [answer["label"] for answer in head.batch(questions)] == right
    blind = PrivateHead.fit(store_of(), LABELS, budgets(), public=PUBLIC, progress=False)
    assert sum(a["label"] == b for a, b in zip(blind.batch(questions), right, strict=True)) < 35
    shown = label_public(head, questions)
    assert [pair["output"] for pair in shown] == right
    chain = few_shot_chain(shown, FakeListLLM(responses=["an answer"]), head, k=2)
    assert chain.invoke({"input": "a fine question"}) == "an answer"


def test_each_text_is_a_call_of_its_own_and_its_prompt_holds_nothing_else(quiet: None, budgets: Any) -> None:
    asked: list[list[str]] = []

    class Counting(FakeLLM):
        def _generate(self, prompts: list[str], *rest: Any, **named: Any) -> Any:
            asked.append(list(prompts))
            return super()._generate(prompts, *rest, **named)

    fitted(budgets(), Counting(words=WORDS, weight=weight), store_of(120))
    private = [f"text {i} {'fine' if i % 2 else 'dull'}" for i in range(120)]
    texts = [*PUBLIC, *PUBLIC[:8][::-1], *(asked for text in private for asked in (text, PUBLIC[0]))]
    assert asked == [[TEMPLATE.replace("{input}", text)] for text in texts]


def test_a_record_that_cannot_be_scored_keeps_its_embedding_and_changes_no_other(
    quiet: None, budgets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[OwnedRecords] = []
    real = fitting.clipped_sum
    monkeypatch.setattr(fitting, "clipped_sum", lambda records, w: seen.append(records) or real(records, w))
    fitted(budgets(), model())
    head = fitted(budgets(), model(fails=lambda prompt: "text 17 " in prompt or "text 90 " in prompt))
    whole, broken = seen[0].features, seen[-1].features
    kept = [i for i in range(200) if i not in (17, 90)]
    assert (broken[kept] == whole[kept]).all()
    assert (broken[[17, 90], :-2] == whole[[17, 90], :-2]).all()
    assert (broken[[17, 90], -2:] == 0).all()
    assert (whole[[17, 90], -2:] != 0).all()
    assert head.fit_report == FitReport(records=200, unknown_labels=0, failed=2)


@pytest.mark.parametrize("of", ["calls", "tokens"])
def test_a_quota_that_ends_stops_the_fit_which_goes_on_as_if_nothing_had_been(
    of: str, quiet: None, budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that refuses everything from the 40th record on, or everything but what is as short as the probe. The
    same call goes on when it answers again."""
    seen, fake, left = list[OwnedRecords](), model(), [math.inf]
    real = fitting.clipped_sum
    monkeypatch.setattr(fitting, "clipped_sum", lambda records, w: seen.append(records) or real(records, w))
    monkeypatch.setattr(running, "PATIENCE", 0.01)
    monkeypatch.setattr(probing, "PATIENCE", 0.05)

    def reply(prompt: str) -> tuple[int, dict[str, str], str]:
        left[0] -= 1
        is_short = of == "tokens" and prompt == TEMPLATE.replace("{input}", PUBLIC[0])
        return (200, {}, prompt) if left[0] >= 0 or is_short else (429, {"retry-after": "3600"}, "insufficient_quota")

    def more(prompt: str) -> dict[str, Any]:
        (top,) = fake._answer(prompt).generation_info["logprobs"]["top_logprobs"]
        entries = [{"token": word, "logprob": value, "bytes": None} for word, value in top.items()]
        return {"logprobs": {"content": [{**max(entries, key=lambda each: each["logprob"]), "top_logprobs": entries}]}}

    budget, output = budgets(), tmp_path / "head.npz"
    with chat_server(reply) as server:
        server.more = more
        llm = ChatOpenAI(model="m", base_url=server.url, api_key=SecretStr("none"), max_retries=0)
        fitted(budgets(), llm, store_of(100))
        left[0] = len(PUBLIC) + 8 + 80
        with pytest.raises(ModelLost) as caught:
            fitted(budget, llm, store_of(100), output=output)
        assert caught.value.__context__ is caught.value.__cause__ is None
        assert "text" not in f"{caught.value} {caught.value.args}"
        left[0] = math.inf
        head = fitted(budget, llm, store_of(100), output=output)
    assert budget.spent() == 1
    assert head.fit_report == FitReport(records=100, unknown_labels=0)
    assert (seen[0].features == seen[-1].features).all()


def test_what_a_fit_left_out_is_the_operators_alone(
    quiet: None, budgets: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No log line of any level, no bar, no file, copy, pickle or `repr` has a count of private records."""
    rows = [{"input": f"text {i} fine", "output": LABELS[i % 2] if i < 117 else "other"} for i in range(171)]
    bars: list[str] = []
    monkeypatch.setattr("tqdm.tqdm", lambda items, **how: bars.extend([how["desc"]][how["disable"] is True :]) or items)
    with caplog.at_level(logging.DEBUG):
        scores = LabelScores(model(fails=lambda prompt: "text 17 " in prompt), WORDS, TEMPLATE)
        store = ExemplarStore.from_records(rows, EMBEDDINGS)
        head = PrivateHead.fit(store, LABELS, budgets(), public=PUBLIC, scores=scores)
    assert head.fit_report == FitReport(records=117, unknown_labels=54, failed=1)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("langchain_dpicl")]
    assert [text for text in [*said, repr(store)] if any(count in text for count in ("117", "54", "171"))] == []
    assert bars == []
    assert "unknown" not in repr(head) + repr(head.fit_report)
    head.save(tmp_path / "head.npz")
    loaded = PrivateHead.load(tmp_path / "head.npz", EMBEDDINGS, llm=model())
    assert loaded.fit_report is copy.copy(head).fit_report is None
    assert "fit_report" not in head.__getstate__()


def test_no_tracer_sees_a_private_prompt(quiet: None, budgets: Any) -> None:
    with collect_runs() as runs:
        head = fitted(budgets(), model())
        head.invoke("a question that is fine")
    assert runs.traced_runs
    assert "text " not in json.dumps([run.inputs for run in runs.traced_runs], default=repr)


def test_a_model_whose_scores_depend_on_earlier_prompts_is_refused(budgets: Any) -> None:
    """As that of a server which keeps the last prompt's state: in the last bits alone."""
    before: list[str] = [""]

    def drifting(prompt: str, word: str) -> float:
        value = weight(prompt, word) * (1.0 + 1e-14 * unit(before[-1]))
        if word == "so":
            before.append(prompt)
        return value

    budget = budgets()
    with pytest.raises(UnsafeConfigurationError, match="other label scores after other texts"):
        fitted(budget, model(weight=drifting))
    assert budget.spent() == 0


def test_a_fit_goes_on_with_the_same_scores_alone(
    quiet: None, budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, output = budgets(), tmp_path / "head.npz"
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "clipped_sum", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fitted(budget, model(), output=output)
    for other in (None, LabelScores(model(), WORDS, f"A {TEMPLATE}"), LabelScores(model(), WORDS, TEMPLATE, share=0.4)):
        with pytest.raises(InvalidParameter, match="same settings"):
            fitted(budget, model(), output=output, scores=other)


# -- answers and the file ----------------------------------------------------------------------------------------------


def test_every_way_to_ask_gives_the_same_answer_and_vectors_alone_none(quiet: None, budgets: Any) -> None:
    head = fitted(budgets(), model())
    questions = ["it was fine", {"input": "it was dull"}]

    async def asked() -> list[Any]:
        return [await head.ainvoke(question) for question in questions] + await head.abatch(questions)

    answers = [*map(head.invoke, questions), *head.batch(questions), *asyncio.run(asked())]
    assert [answer["label"] for answer in answers] == ["yes", "no"] * 4
    for i, answer in enumerate(answers):
        assert answer["confidence"] == pytest.approx(answers[i % 2]["confidence"])
    with pytest.raises(InvalidParameter, match="vectors"):
        head.answers(np.eye(DIMENSION, dtype=np.float32))


def test_a_question_that_cannot_be_scored_fails_alone(quiet: None, budgets: Any) -> None:
    head = fitted(budgets(), model(fails=lambda prompt: "broken" in prompt))
    found = head.batch(["fine", "broken", "dull"], return_exceptions=True)
    assert isinstance(found[1], ModelUnavailable)
    assert [each["label"] for each in (found[0], found[2])] == ["yes", "no"]
    with pytest.raises(ModelUnavailable, match="label scores"):
        head.invoke("broken")
    with pytest.raises(ModelUnavailable, match="label scores"):
        asyncio.run(head.ainvoke("broken"))


def test_a_saved_head_needs_the_model_of_its_scores(quiet: None, budgets: Any, tmp_path: Path) -> None:
    class Other(FakeLLM):
        pass

    head, path = fitted(budgets(), model()), tmp_path / "head.npz"
    head.save(path)
    loaded = PrivateHead.load(path, EMBEDDINGS, llm=model())
    assert loaded.batch(PUBLIC) == head.batch(PUBLIC)
    for llm, found in ((None, "None"), (Other(words=WORDS), "Other")):
        with pytest.raises(InvalidParameter, match=f"(?s)llm.*{found}.*FakeLLM"):
            PrivateHead.load(path, EMBEDDINGS, llm=llm)
    plain = tmp_path / "plain.npz"
    PrivateHead.fit(store_of(), LABELS, budgets(), progress=False).save(plain)
    with pytest.raises(InvalidParameter, match="llm"):
        PrivateHead.load(plain, EMBEDDINGS, llm=model())


def test_a_file_with_other_facts_about_its_scores_is_refused(quiet: None, budgets: Any, tmp_path: Path) -> None:
    path = tmp_path / "head.npz"
    fitted(budgets(), model()).save(path)
    with np.load(path) as file:
        good = dict(file)
    about = json.loads(str(good["about"]))
    changes: list[Any] = [
        {"mean": [0.0]},
        {"mean": [0.0, math.nan]},
        {"spread": 0.0},
        {"labels": ["good"]},
        {"more": 1},
        {"template": 3},
        {"template": "no place"},
        {"share": 2.0},
    ]
    for change in changes:
        facts = {**about, "scores": {**about["scores"], **change}}
        np.savez(path, **{**good, "about": np.array(json.dumps(facts))})
        with pytest.raises(InvalidParameter):
            PrivateHead.load(path, EMBEDDINGS, llm=model())
    facts = {**about, "scores": {key: value for key, value in about["scores"].items() if key != "share"}}
    np.savez(path, **{**good, "about": np.array(json.dumps(facts))})
    with pytest.raises(InvalidParameter, match="path"):
        PrivateHead.load(path, EMBEDDINGS, llm=model())


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"template": "no place"},
        {"template": "{input} and {input}"},
        {"template": None},
        {"share": 0.0},
        {"share": 1.0},
        {"share": math.nan},
        {"labels": ["good"]},
        {"labels": "good"},
        {"labels": ["good", "Good "]},
        {"llm": "a model"},
        {"llm": None},
        {"top_logprobs": 1},
    ],
)
def test_bad_settings_of_scores_are_refused(change: dict[str, Any]) -> None:
    given: dict[str, Any] = {"llm": model(), "labels": WORDS, "template": TEMPLATE, **change}
    with pytest.raises(InvalidParameter, match=next(iter(change))):
        LabelScores(given.pop("llm"), given.pop("labels"), given.pop("template"), **given)


def test_scores_that_cannot_be_used_cost_nothing(budgets: Any) -> None:
    budget, kind = budgets(), InvalidParameter
    cases: list[tuple[FakeLLM, dict[str, Any], type[Exception], str]] = [
        (model(), {"public": None}, kind, "public"),
        (model(), {"public": FeatureMap(DIMENSION)}, kind, "public"),
        (model(), {"scores": "scores"}, kind, "scores"),
        (model(weight=lambda prompt, word: 1.0), {}, kind, "spread"),
        (model(fails=lambda prompt: "public 3 " in prompt), {}, ModelUnavailable, "public text 3 .*TimeoutError"),
        (model(writes=lambda prompt: "good"), {}, ModelUnavailable, "public text 0"),
    ]
    for llm, how, error, named in cases:
        with pytest.raises(error, match=named):
            fitted(budget, llm, **how)
        assert not [prompt for prompt in llm.calls if "text " in prompt]
    assert budget.spent() == 0
    assert not budget.is_frozen
