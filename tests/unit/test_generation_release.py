"""Whole sealed chains that release sentences, vectors and keywords: receipts, and no way out for private text."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import ways
from channels import RecordingClient
from ears import Ears, Spy, Turns
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.runnables.config import var_child_runnable_config
from langsmith import traceable
from langsmith.run_helpers import get_current_run_tree, tracing_context
from scipy import stats
from ways import shown

from langchain_dpicl import (
    CandidateVote,
    DPAggregate,
    EmbeddingMean,
    InvalidParameter,
    Keywords,
    MembersAbstained,
    ModelUnavailable,
    NoisyVote,
    PlanMismatch,
    PoissonExampleSelector,
    PrivacyBudgetExceeded,
    PrivateEnsemble,
    ReleasedKeywords,
    SealedRelease,
)
from langchain_dpicl.aggregators import Aggregator
from langchain_dpicl.aggregators.means import STEPS
from langchain_dpicl.privacy import LineRequest
from langchain_dpicl.privacy.profile import Gaussian
from langchain_dpicl.release import base

QUESTION = {"input": "a witty, seductive movie"}
WAYS = ways.WAYS
MEMBERS = 6


class Model(Spy):
    """ "rash" points one way, everything else the other; calls ``inside`` with every text, which may raise."""

    def __init__(self, inside: Callable[[str], Any] = lambda text: None) -> None:
        self.inside = inside
        self.calls: list[list[str]] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.calls.append(list(texts))
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        special = self.inside(text)
        return [-1.0, 0.0] if text == "rash" else [1.0, 0.0] if special is None else special  # type: ignore[no-any-return]


def written(values: Mapping[str, Any]) -> str:
    """A zero-shot candidate. It would show private examples if it were given any."""
    return ["fever", "rash"][next(TURNS) % 2] + "".join(map(str, values["examples"]))


TURNS = Turns()

KINDS: dict[str, tuple[Callable[[Model], Aggregator[Any]], Any]] = {
    "vote": (lambda model: NoisyVote(["fever", "rash"]), "fever"),
    "list": (lambda model: EmbeddingMean(model, ["rash", "fever"]), "fever"),
    "candidates": (lambda model: CandidateVote(model, ["rash", "fever"]), "fever"),
    "chain": (lambda model: EmbeddingMean(model, RunnableLambda(written), 4), "fever"),
    "vector": (lambda model: EmbeddingMean(model, release="vector"), None),
    "joint list": (lambda model: Keywords.joint_em(["rash", "fever"], 1), ["fever"]),
    "joint query": (lambda model: Keywords.joint_em("query", 1), ["movie"]),
    "ptr": (lambda model: Keywords.ptr((1, 2)), ["fever", "movie"]),
}
GENERATED = [kind for kind in KINDS if kind != "vote"]


def of_kind(kind: str, model: Model | None = None) -> Aggregator[Any]:
    return KINDS[kind][0](model or Model())


def say(values: Mapping[str, Any]) -> str:
    """What every member answers."""
    return "movie fever"


def check(kind: str, release: Any) -> None:
    expected = KINDS[kind][1]
    if kind == "vector":
        assert [type(number) for number in release] == [float, float]
        assert release[0] > 0.5
    else:
        assert release == expected
    if isinstance(expected, list):
        assert isinstance(release, ReleasedKeywords)
        assert (release.query, release.ranked, release.fallback) == (QUESTION, kind != "ptr", False)


async def ask(way: str, runnable: Any, question: Any = QUESTION) -> Any:
    return await ways.ask(way, runnable, question)


class Silent:
    """No noise at all, a test that always passes; records what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, int]] = []

    def discrete_gaussian(self, sigma: float, size: int) -> np.ndarray:
        self.asked.append((sigma, size))
        return np.zeros(size, np.int64)


@pytest.fixture
def release_of(sealed_of: Any) -> Callable[..., SealedRelease]:
    """release_of(kind or aggregator, member): a sealed chain of six members over a store full of canaries.

    200 owners leave none of six buckets empty but for less than 1e-14: an empty bucket's answer counts nothing."""

    def make(kind: str | Aggregator[Any], member: Any = say, **options: Any) -> SealedRelease:
        aggregator = of_kind(kind) if isinstance(kind, str) else kind
        return sealed_of(member, vote=aggregator, **{"members": MEMBERS, "owners": 200, **options})  # type: ignore[no-any-return]

    return make


# -- answers and receipts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_all_kinds_are_lines_of_one_budget_with_receipts(
    way: str, budget_of: Any, store_of: Any, records: Any, canary: str
) -> None:
    budget = budget_of(releases=dict.fromkeys(KINDS, 2), name="all")
    selector = PoissonExampleSelector(store_of(records(200, secret=canary)), MEMBERS, rate=1.0, max_exemplars=8)
    chains = {
        kind: PrivateEnsemble(selector, say) | DPAggregate(of_kind(kind), budget, line=kind, return_receipt=True)
        for kind in KINDS
    }
    for turn, kind in itertools.product((1, 2), KINDS):
        answered = await ask(way, chains[kind])
        check(kind, answered["answer"])
        receipt = answered["receipt"]
        assert receipt["id"] == f"all:{kind}:{turn}"
        assert (receipt["line"], receipt["number"], receipt["remaining"]) == (kind, turn, 2 - turn)
        assert receipt["outcome"] == "released"
        assert receipt["mechanism"] == budget.plan.lines[kind].describe()
        assert 0 < receipt["epsilon_spent"] <= receipt["epsilon"] == 1000.0
        assert budget.receipt(receipt["id"]) == receipt
        assert canary not in f"{receipt} {answered} {chains[kind]!r}"
    assert {name: state["spent"] for name, state in budget.lines().items()} == dict.fromkeys(KINDS, 2)
    for kind, chain in chains.items():
        with pytest.raises(PrivacyBudgetExceeded, match=kind):
            await ask(way, chain)


@pytest.mark.parametrize("kind", GENERATED)
def test_schemas_name_the_type_of_a_release(kind: str, release_of: Any) -> None:
    schema = release_of(kind).get_output_jsonschema()
    if kind in ("list", "chain", "candidates"):
        assert schema["type"] == "string"
    else:
        assert schema["type"] == "array"
        assert schema["items"]["type"] == ("number" if kind == "vector" else "string")


def test_the_plans_sigma_reaches_every_coordinate_of_the_sum(release_of: Any) -> None:
    """The plan's sigma is in units of a unit vector, the lattice's in steps: nothing halves it on the way."""
    sealed = release_of("vector")
    sealed._randomness = noise = Silent()
    sealed.invoke(QUESTION)
    assert noise.asked == [(sealed.line().parameter * STEPS, 3)]


def test_a_plan_frozen_with_another_lattice_is_refused_and_nothing_is_charged(budget_of: Any, release_of: Any) -> None:
    coarse = LineRequest("embedding", 1.0, 5, options={"step": 1 / 64})
    budget = budget_of(releases={"only": coarse})
    with pytest.raises(PlanMismatch, match="step"):
        release_of("vector", budget=budget).invoke(QUESTION)
    ptr = budget_of(releases={"only": LineRequest("ptr", 1.0, 5, options={"delta0": 1e-8})})
    for other in (Keywords.ptr((1, 2)), Keywords.ptr(2, delta0=1e-7)):
        with pytest.raises(PlanMismatch, match=r"select|delta0"):
            release_of(other, budget=ptr).invoke(QUESTION)
    assert budget.spent() == ptr.spent() == 0
    assert release_of(Keywords.ptr(2, delta0=1e-8), budget=ptr).invoke(QUESTION) == ["fever", "movie"]


# -- n releases cost n times: mistake 12 -------------------------------------------------------------------------------

TARGET, DELTA, COUNT = 3.0, 1e-5, 16


def repeated(p: float, q: float, count: int) -> float:
    """The exact delta at the target's epsilon when a release with two outcomes is repeated: both are binomial."""
    seen = np.arange(count + 1)
    one, other = stats.binom.pmf(seen, count, p), stats.binom.pmf(seen, count, q)
    return max(float(np.maximum(a - math.exp(TARGET) * b, 0.0).sum()) for a, b in ((one, other), (other, one)))


def embedding_delta(sigma: float, delta0: float, count: int) -> float:
    return float(Gaussian(sigma / 2 / math.sqrt(count)).delta(TARGET))


def joint_delta(eps0: float, delta0: float, count: int) -> float:
    """Two words, one of them released: counts (1, 0) against (0, 1)."""
    p = 1 / (1 + math.exp(-eps0 / 2))
    return repeated(p, 1 - p, count)


def ptr_delta(sigma: float, delta0: float, count: int) -> float:
    """The worst of gaps g and g + 2, by the docstring's test; and of two sets of which each passes with delta0."""

    def passes(gap: int) -> float:
        return float(stats.norm.sf(stats.norm.isf(delta0) - (max(2, gap) - 2) / (2 * sigma)))

    worst = max(repeated(passes(gap), passes(gap + 2), count) for gap in range(2, 120))
    return max(worst, 1 - (1 - delta0) ** count)


@pytest.mark.parametrize(
    ("aggregator", "exact"),
    [
        (EmbeddingMean(Model(), release="vector"), embedding_delta),
        (Keywords.joint_em(["rash", "fever"], 1), joint_delta),
        (Keywords.ptr(1), ptr_delta),
    ],
    ids=["embedding", "joint-em", "ptr"],
)
def test_a_plan_keeps_its_promise_for_all_its_releases_together(
    aggregator: Aggregator[Any], exact: Callable[[float, float, int], float], release_of: Any
) -> None:
    """Everybody sampled at every release, so nothing is amplified: the exact delta of 16 releases stays below the
    target with the plan for 16, and breaks it with the noise (or the delta0) of a plan for one."""
    many = release_of(aggregator, epsilon=TARGET, releases=COUNT).line()
    one = release_of(aggregator, epsilon=TARGET, releases=1).line()
    assert many.plan_line.count == COUNT
    assert exact(many.parameter, many.options.get("delta0", 0.0), COUNT) <= DELTA
    assert exact(one.parameter, one.options.get("delta0", 0.0), 1) <= DELTA
    assert exact(one.parameter, one.options.get("delta0", 0.0), COUNT) > 2 * DELTA


# -- everybody fails ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "chain", "vector"])
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch", "abatch"])
async def test_where_no_answer_can_be_embedded_the_members_abstain(
    kind: str, way: str, release_of: Any, canary: str, canary_free: Any, caplog: Any, capfd: Any
) -> None:
    def inside(text: str) -> None:
        if canary in text:
            raise ValueError(f"cannot embed {text}")

    number = Turns()
    sealed = release_of(of_kind(kind, Model(inside)), lambda v: f"{canary} {next(number)}")
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        with pytest.raises(MembersAbstained) as caught:
            await ask(way, sealed)
    canary_free(caught.value, frames=True)
    out, err = capfd.readouterr()
    assert canary not in f"{caplog.text} {out} {err} {[str(w.message) for w in warned]}"
    assert sealed.budget.spent() == 1
    assert sealed.budget.receipt("default:embedding:1")["outcome"] == "members abstained"


@pytest.mark.parametrize("way", WAYS)
async def test_where_every_member_fails_ptr_falls_back_and_then_asks_in_public(
    way: str, release_of: Any, canary: str, canary_free: Any
) -> None:
    failing = Ears([1])

    def member(values: dict[str, Any]) -> str:
        if failing:
            raise ValueError(f"{canary} {values['examples']}")
        return say(values)

    sealed = release_of("ptr", member, return_receipt=True)
    answered = await ask(way, sealed)
    assert (answered["answer"], answered["answer"].fallback, answered["answer"].query) == ([], True, QUESTION)
    assert answered["receipt"]["outcome"] == "zero-shot fallback"
    with pytest.raises(ModelUnavailable, match="nothing was charged") as caught:
        await ask(way, sealed)
    canary_free(caught.value, frames=True)
    assert sealed.budget.spent() == 1
    failing.clear()
    assert (await ask(way, sealed))["answer"] == ["fever", "movie"]


@pytest.mark.parametrize("way", WAYS)
async def test_joint_em_asks_in_public_first_where_the_last_proof_is_old(
    way: str, release_of: Any, monkeypatch: pytest.MonkeyPatch, canary: str, canary_free: Any
) -> None:
    """Its releases cannot show that the members fail: without the question each would cost a charge for nothing."""
    failing, seen = Ears([1]), Ears()
    now = 1000.0
    monkeypatch.setattr(base.time, "monotonic", lambda: now)

    def member(values: dict[str, Any]) -> str:
        seen.append(len(values["examples"]))
        if failing:
            raise ValueError(canary)
        return say(values)

    sealed = release_of("joint list", member)
    with pytest.raises(ModelUnavailable, match="ValueError") as caught:
        await ask(way, sealed)
    canary_free(caught.value, frames=True)
    assert (seen, sealed.budget.spent()) == ([0], 0), "one call, without an example, and no charge"

    failing.clear()
    for later, questions in ((1000.0, 1), (1059.0, 0), (1061.0, 1), (1062.0, 0)):
        now = later
        seen.clear()
        assert await ask(way, sealed) == ["fever"]
        assert len(seen) == MEMBERS + questions
        assert not questions or seen[0] == 0
    failing.append(1)
    now = 1200.0
    with pytest.raises(ModelUnavailable):
        await ask(way, sealed)
    assert sealed.budget.spent() == 4


async def test_joint_em_is_random_where_members_fail_between_two_proofs(release_of: Any) -> None:
    """A charge that tells nothing, and no error either: that the members fail is not what this release says."""
    calls = Turns()

    def member(values: dict[str, Any]) -> str:
        if next(calls) > 0:
            raise ConnectionError
        return "fever"

    sealed = release_of("joint list", member, return_receipt=True)
    answered = sealed.invoke(QUESTION)
    assert answered["answer"] in (["fever"], ["rash"])
    assert answered["receipt"]["outcome"] == "released"


# -- before the charge -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch", "abatch"])
@pytest.mark.parametrize(
    "question", [{"input": ""}, {"input": "of the"}, {"input": 7, "more": ["cough"]}, {}], ids=shown
)
async def test_a_query_without_words_costs_nothing(way: str, question: dict[str, Any], release_of: Any) -> None:
    sealed = release_of("joint query")
    with pytest.raises(InvalidParameter, match="stop word") as caught:
        await ask(way, sealed, question)
    assert sealed.budget.spent() == 0
    assert caught.value.value == sorted(question)
    with pytest.raises(InvalidParameter):
        sealed.batch([QUESTION, question, QUESTION])
    assert sealed.budget.spent() == 0


@pytest.mark.parametrize(
    ("candidates", "inside", "error"),
    [
        (["fever", "bad"], [math.nan, 0.0], InvalidParameter),
        (["fever", "bad"], [0.0, 0.0], InvalidParameter),
        (["fever", "bad"], None, None),
        (RunnableLambda(lambda v: ""), None, ModelUnavailable),
        (RunnableLambda(lambda v: None), None, ModelUnavailable),
        (RunnableLambda(lambda v: "bad"), [math.nan, 0.0], ModelUnavailable),
        (RunnableLambda(lambda v: 1 / 0), None, ModelUnavailable),
    ],
    ids=["nan in a list", "zero in a list", "fine", "empty", "no text", "nan", "raises"],
)
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch", "abatch"])
@pytest.mark.filterwarnings("ignore:all zero-shot")
async def test_candidates_that_cannot_be_used_cost_nothing(
    candidates: Any, inside: Any, error: Any, way: str, release_of: Any
) -> None:
    model = Model(lambda text: inside if text == "bad" else None)
    sealed = release_of(EmbeddingMean(model, candidates, None if isinstance(candidates, list) else 3))
    if error is None:
        await ask(way, sealed)
    else:
        with pytest.raises(error):
            await ask(way, sealed)
    assert sealed.budget.spent() == (error is None)


@pytest.mark.parametrize("way", WAYS)
async def test_what_the_budget_cannot_pay_writes_no_candidate(way: str, release_of: Any) -> None:
    asked: list[int] = Ears()
    chain = RunnableLambda(lambda values: asked.append(1) or ["rash", "fever"][len(asked) % 2])
    sealed = release_of(EmbeddingMean(Model(), chain, 5), releases=1)
    with pytest.raises(PrivacyBudgetExceeded):
        sealed.batch([QUESTION] * 2)
    with pytest.raises(PrivacyBudgetExceeded):
        await sealed.abatch([QUESTION] * 2)
    assert (asked, sealed.budget.spent()) == ([], 0)
    assert await ask(way, sealed) == "fever"
    assert len(asked) == 5
    for _ in range(2):
        with pytest.raises(PrivacyBudgetExceeded):
            await ask(way, sealed)
    assert len(asked) == 5


# -- candidates are public ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_a_candidates_chain_gets_no_private_example_even_from_the_selector(
    way: str, budget_of: Any, store_of: Any, records: Any, canary: str
) -> None:
    """The chain's prompt asks the selector itself for examples, as the member's own prompt does."""
    selector = PoissonExampleSelector(store_of(records(8, secret=canary)), MEMBERS, rate=1.0, max_exemplars=8)
    shots = FewShotPromptTemplate(
        example_selector=selector,
        example_prompt=PromptTemplate.from_template("{input} -> {output}"),
        suffix="{input}",
        input_variables=["input"],
    )
    prompts: list[str] = Ears()
    turn = Turns()

    def write(prompt: Any) -> str:
        prompts.append(prompt.to_string())
        return ["rash", "fever"][next(turn) % 2]

    chain = EmbeddingMean(Model(), shots | write, 4)
    shown: list[str] = Ears()
    member = shots | (lambda prompt: shown.append(prompt.to_string()) or "movie fever")
    sealed = PrivateEnsemble(selector, member) | DPAggregate(chain, budget_of())
    assert await ask(way, sealed) == "fever"
    assert canary in "".join(shown), "the member's prompt does hold examples, so the check can fail"
    assert [prompt.strip() for prompt in prompts] == [QUESTION["input"]] * 4


async def test_fewer_candidates_than_asked_are_enough(release_of: Any) -> None:
    turn = Turns()

    def write(values: Any) -> str:
        if (i := next(turn)) > 2:
            raise ConnectionError
        return ["rash", "fever", ""][i]

    sealed = release_of(EmbeddingMean(Model(), RunnableLambda(write), 9))
    assert await sealed.ainvoke(QUESTION) == "fever"


@pytest.mark.parametrize("kind", ["joint query", "joint list"])
def test_words_of_private_answers_alone_are_never_released(kind: str, release_of: Any) -> None:
    """Mistake 8 of the design. At the least eps0 anything in the domain may come, and nothing else ever does."""
    aggregator = Keywords.joint_em(
        "query" if kind == "joint query" else ["rash", "fever"], 5 if kind == "joint query" else 2
    )
    sealed = release_of(aggregator, lambda v: "gout gout secretword", releases=8)
    domain = {"witty", "seductive", "movie"} if kind == "joint query" else {"rash", "fever"}
    for release in sealed.batch([QUESTION] * 8):
        assert set(release) == domain


# -- no way out --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "chain", "vector", "candidates"])
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_an_embedding_model_sees_no_tracer_while_it_embeds_answers(
    kind: str, way: str, release_of: Any, canary: str
) -> None:
    """Neither LangSmith's nor LangChain's; with a model that traces itself, as ``@traceable`` does."""
    found: list[tuple[Any, Any]] = []

    @traceable
    def traced(text: str) -> None:
        if canary in text:
            found.append((get_current_run_tree(), var_child_runnable_config.get()))

    sealed = release_of(of_kind(kind, Model(traced)), lambda v: canary)
    client = RecordingClient()
    parent = RunnableLambda(lambda values: values) | sealed
    with tracing_context(enabled=True, client=client):
        await ask(way, parent)
        assert found
        assert {tree for tree, _ in found} == {None}
        assert not [config for _, config in found if config and config.get("callbacks")]
        assert client.sent
        assert canary not in "".join(client.sent)
        traced(canary)
    assert canary in "".join(client.sent), "in the open it is sent, so the check can fail"


# -- the event loop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "chain", "vector", "candidates"])
async def test_a_slow_embedding_model_does_not_block_the_event_loop(kind: str, release_of: Any) -> None:
    """The model waits until the loop has run another task; on the loop's own thread that would never happen."""
    waiting, ran, blocked = threading.Event(), threading.Event(), []

    def slow(text: str) -> None:
        if text != say({}):
            return  # public: the thread that prepares the request embeds it
        waiting.set()
        if not ran.wait(2):
            blocked.append(text)

    sealed = release_of(of_kind(kind, Model(slow)))

    async def other_work() -> None:
        while not waiting.is_set():
            await asyncio.sleep(0.001)
        ran.set()

    release, _ = await asyncio.gather(sealed.ainvoke(QUESTION), other_work())
    check(kind, release)
    assert blocked == []


async def test_requests_at_once_keep_their_candidates_and_queries_apart(release_of: Any) -> None:
    """Eight threads and eight tasks on one chain: shared state would mix them."""
    turn = Turns()

    def write(values: dict[str, Any]) -> str:
        return f"{values['input']} {next(turn) % 2}"

    texts = release_of(EmbeddingMean(Model(), RunnableLambda(write), 2), releases=16, members=2)
    words = release_of(Keywords.joint_em("query", 3), releases=16, members=2)
    questions = [{"input": f"word{i}"} for i in range(8)]
    for sealed in (texts, words):
        answers = [*sealed.batch(questions), *await sealed.abatch(questions)]
        for question, release in zip(questions * 2, answers, strict=True):
            if sealed is texts:
                assert release.split()[0] == question["input"]
            else:
                assert release == [question["input"]]
                assert release.query == question


async def test_a_member_whose_answers_are_no_texts_costs_nothing_where_releases_would_not_tell(release_of: Any) -> None:
    sealed = release_of("joint list", lambda v: {"text": "fever"})
    with pytest.raises(ModelUnavailable):
        sealed.invoke(QUESTION)
    with pytest.raises(ModelUnavailable):
        await sealed.ainvoke(QUESTION)
    assert sealed.budget.spent() == 0


def test_every_entry_of_a_public_list_is_kept_or_refused() -> None:
    """Stop words are for texts: a list means what it says."""
    assert "<3 words>" in repr(Keywords.joint_em(["yes", "no", "maybe"], 2))
    with pytest.raises(InvalidParameter, match=r"domain\[1\]"):
        Keywords.joint_em(["Go", "C"], 1)
