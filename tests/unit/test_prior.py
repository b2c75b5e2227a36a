"""`NoisyVote(prior=...)`: a public opinion, weighed against noisy votes, at no cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ears import Ears
from exact import law
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda
from numpy.typing import NDArray
from scipy import stats

from langchain_dpicl import (
    DPAggregate,
    InvalidParameter,
    ModelUnavailable,
    NoisyVote,
    PoissonExampleSelector,
    PrivateEnsemble,
)
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.votes import VoteNoise

LABELS = ["Positive", "Negative"]
AGAINST = {"Positive": 0.05, "Negative": 0.95}


class NoNoise:
    """Noise that is 0, and the first of those that are tied."""

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        return np.zeros(size, np.int64)

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        return np.zeros(size, np.int64)


# -- what a vote weighs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("expected", "sigma", "lead"), [(20.0, 2.0, 0.3), (20.0, 8.0, 0.3), (60.0, 3.0, 0.15)])
def test_a_vote_weighs_what_its_likelihood_says(expected: float, sigma: float, lead: float) -> None:
    """The exact law of the difference of two noisy counts: Poisson numbers of votes, .5 ± lead / 2 of them right, and
    discrete Gaussian noise. Within two standard deviations its log likelihood ratio is the difference times nats."""
    reach = 400
    support = np.arange(-reach, reach + 1)
    noise = np.exp(-0.5 * (support / sigma) ** 2)
    noise /= noise.sum()
    votes = stats.skellam.pmf(support, (0.5 + lead / 2) * expected, (0.5 - lead / 2) * expected)
    seen = np.convolve(np.convolve(noise, noise), votes)
    middle = len(seen) // 2
    nats = VoteNoise("vote", sigma, own_calls=True).nats(expected, 2, lead)
    for difference in range(1, math.ceil(2 * math.sqrt(expected + 2 * sigma**2))):
        exact = math.log(seen[middle + difference] / seen[middle - difference])
        assert nats * difference == pytest.approx(exact, rel=0.05)


def test_an_exponential_vote_weighs_as_a_gaussian_one_of_its_variance() -> None:
    """Its noise is Gumbel noise of scale 1 / r on every count."""
    for own_calls, rate in ((True, 1.2), (False, 0.6)):
        sigma = math.pi / math.sqrt(6.0) / rate
        exponential, gaussian = VoteNoise("vote-em", 1.2, own_calls), VoteNoise("vote", sigma, own_calls)
        assert exponential.nats(20.0, 3) == pytest.approx(gaussian.nats(20.0, 3), rel=1e-12)


@pytest.mark.parametrize(("sigma", "members", "winner"), [(20.0, 10, "Negative"), (0.5, 20, "Positive")])
def test_weak_evidence_leaves_the_public_answer_and_strong_evidence_overrules_it(
    sigma: float, members: int, winner: str
) -> None:
    """Eight of ten votes under much noise, eighteen of twenty under little."""
    counts, crowd = np.array([members - 2, 2, 0]), Crowd(members, members, own_calls=True)
    randomness: Any = NoNoise()
    for scale, expected in ((sigma, winner), (0.5, "Positive")):
        vote = NoisyVote(LABELS, prior=AGAINST).under("vote", crowd)
        assert vote.draw(counts, crowd, scale, randomness) == expected
    vote = NoisyVote(LABELS, prior=AGAINST).under("vote-em", crowd)
    eps0 = math.pi / math.sqrt(6.0) / sigma
    found = law(lambda randomness: str(vote.draw(counts, crowd, eps0, randomness)))
    assert found[winner] > (0.99 if winner == "Positive" else 0.6)
    without = NoisyVote(LABELS).under("vote-em", crowd)
    assert law(lambda randomness: str(without.draw(counts, crowd, eps0, randomness)))["Positive"] > 0.5


def test_a_prior_moves_no_count_and_an_even_one_nothing() -> None:
    randomness: Any = NoNoise()
    counts, crowd = np.array([2, 3, 1]), Crowd(6, 6.0)
    for prior in (None, AGAINST, {"Positive": 1}):
        vote = NoisyVote(LABELS, prior=prior, details=True).under("scores", crowd)  # type: ignore[arg-type]
        assert vote.draw(counts, crowd, 3.0, randomness)["counts"] == {"Positive": 2, "Negative": 3}
    even = NoisyVote(LABELS, prior={"Positive": 3, "Negative": 3}).under("vote-em", crowd)
    plain = NoisyVote(LABELS).under("vote-em", crowd)
    laws = [law(lambda r, v=vote: str(v.draw(counts, crowd, 1.0, r))) for vote in (even, plain)]  # type: ignore[misc]
    assert laws[0] == pytest.approx(laws[1], rel=1e-12)


# -- details -----------------------------------------------------------------------------------------------------------


def test_the_confidence_is_how_often_the_label_is_right(seeded: Callable[[int], Any]) -> None:
    """20,000 questions whose right label follows the prior, with Poisson votes of the lead that is expected, under
    noise. In each fifth of the confidences the share of right labels is their mean, within .03 of the model (a sum of
    Poisson numbers is no Gaussian) and 5.5 standard errors: false alarms below 1e-6. Tried with nats doubled or halved:
    off by .09 and more."""
    labels, shares = ["a", "b", "c"], np.array([0.5, 0.3, 0.2])
    crowd, sigma, rounds = Crowd(40, 20.0, own_calls=True), 3.0, 20_000
    vote = NoisyVote(labels, prior=dict(zip(labels, shares.tolist(), strict=True)), details=True).under("scores", crowd)
    randomness, generator = seeded(1), np.random.default_rng(2)
    noise = randomness.discrete_gaussian(sigma, 4 * rounds).reshape(rounds, 4)
    truth = generator.choice(3, size=rounds, p=shares)
    means = np.where(np.arange(3) == truth[:, None], 0.3 + 0.7 / 3, 0.7 / 3) * crowd.expected
    votes = np.column_stack([generator.poisson(means), np.zeros(rounds, np.int64)])
    quiet: Any = NoNoise()
    released = [vote.draw(counts, crowd, sigma, quiet) for counts in votes + noise]
    confidence = np.array([each["confidence"] for each in released])
    right = np.array([labels.index(each["label"]) for each in released]) == truth
    for part in np.array_split(np.argsort(confidence), 5):
        error = math.sqrt(0.25 / len(part))
        assert abs(right[part].mean() - confidence[part].mean()) < 0.03 + 5.5 * error
    assert confidence.min() < 0.5 < 0.95 < confidence.max()


def test_details_are_the_label_its_confidence_and_the_noisy_counts(budget_of: Any, store_of: Any, records: Any) -> None:
    vote = NoisyVote(LABELS, prior=AGAINST, details=True)
    assert vote.choices == ("scores",)
    selector = PoissonExampleSelector(store_of(records(12)), calls=12, rate=1.0)
    budget = budget_of(200.0, releases=1)
    chain = PrivateEnsemble(selector, lambda given: "Positive") | DPAggregate(vote, budget)
    found = chain.invoke({"input": "q"})
    assert budget.plan.lines["scores"].mechanism == "scores"
    assert (found["label"], set(found)) == ("Positive", {"label", "confidence", "counts"})
    assert found["confidence"] > 0.9
    assert abs(found["counts"]["Positive"] - 12) < 4 > abs(found["counts"]["Negative"])
    with pytest.raises(InvalidParameter):
        NoisyVote(LABELS, details=True, scores=True)
    with pytest.raises(InvalidParameter):
        NoisyVote(LABELS, details=True, mechanism="vote-em")


# -- where it comes from -----------------------------------------------------------------------------------------------


def chain_of(budget: Any, store: Any, member: Any = None, **vote: Any) -> Any:
    """A threshold that no owner reaches, and noise of less than .3 votes, where a prior weighs 1.8 or more: the prior
    decides, but for less than 1e-7 of all runs."""
    selector = PoissonExampleSelector(store, calls=20, threshold=1.0, eligible=100)
    member = RunnableLambda(lambda given: "Positive") if member is None else member
    return PrivateEnsemble(selector, member) | DPAggregate(NoisyVote(LABELS, mechanism="vote", **vote), budget)


@pytest.mark.parametrize(
    ("answer", "released"),
    [
        ("negative.", "Negative"),
        ({"Negative": 3, "positive": 1}, "Negative"),
        ({"Positive": 0.9, "Negative": 0.1}, "Positive"),
    ],
)
async def test_a_chain_answers_each_query_in_public(
    answer: Any, released: str, budget_of: Any, store_of: Any, records: Any
) -> None:
    heard = Ears()

    def prior(given: dict[str, Any]) -> Any:
        heard.append(given)
        return answer

    for way in (prior, RunnableLambda(prior)):
        budget = budget_of(60.0, releases=2)
        chain = chain_of(budget, store_of(records(100)), prior=way)
        assert chain.invoke({"input": "how?"}) == released
        assert await chain.ainvoke({"input": "how?"}) == released
        assert budget.spent() == 2
    assert heard == [{"input": "how?", "examples": []}] * 4


def test_zero_shot_asks_the_members_public_copy_once(budget_of: Any, store_of: Any, records: Any) -> None:
    """A member that would say otherwise of examples, of which there are none here."""
    model = FakeListLLM(responses=["Negative"])
    heard = Ears()
    member = PromptTemplate.from_template("{examples} {input}") | model | RunnableLambda(lambda text: text)
    chain = chain_of(budget_of(60.0, releases=1), store_of(records(100)), member, prior="zero_shot")
    assert chain.invoke({"input": "q"}) == "Negative"

    def listens(given: dict[str, Any]) -> str:
        heard.append([example["input"] for example in given["examples"]])
        return "Negative" if not given["examples"] else "Positive"

    selector = PoissonExampleSelector(store_of(records(8)), calls=8, pad_to=8, rate=1.0)
    ensemble = PrivateEnsemble(selector, listens)
    sealed = ensemble | DPAggregate(NoisyVote(LABELS, prior="zero_shot", details=True), budget_of(200.0, releases=1))
    assert sealed._candidates is not None
    assert sealed._candidates[0] is ensemble.copies
    assert sealed.invoke({"input": "q"})["label"] == "Positive"
    assert heard[0] == []
    assert sorted(filter(None, map(len, heard))) == [1] * 8, "one call of each owner, and all others without examples"


def fails(given: Any) -> str:
    raise RuntimeError("down")


@pytest.mark.parametrize(
    ("prior", "error"),
    [
        (fails, ModelUnavailable),
        (lambda _: 5, ModelUnavailable),
        (lambda _: {"Neutral": 1.0}, InvalidParameter),
        (lambda _: {"Positive": -1.0}, InvalidParameter),
        (lambda _: {"Positive": 0.0}, InvalidParameter),
        (lambda _: {"Positive": math.nan}, InvalidParameter),
        (lambda _: {"Positive": "much"}, InvalidParameter),
        (lambda _: {}, InvalidParameter),
    ],
)
async def test_a_prior_that_cannot_be_used_costs_nothing(
    prior: Any, error: type[Exception], budget_of: Any, store_of: Any, records: Any, canary_free: Any
) -> None:
    budget = budget_of(60.0, releases=2)
    chain = chain_of(budget, store_of(records(100)), prior=prior)
    with pytest.raises(error) as caught:
        chain.invoke({"input": "q"})
    canary_free(caught.value)
    with pytest.raises(error):
        await chain.ainvoke({"input": "q"})
    assert budget.spent() == 0


def test_an_answer_without_a_label_is_no_opinion(budget_of: Any, store_of: Any, records: Any) -> None:
    chain = chain_of(budget_of(60.0, releases=1), store_of(records(100)), prior=lambda _: "who knows")
    assert chain.invoke({"input": "q"}) in LABELS


@pytest.mark.parametrize(
    "prior", ["zero-shot", 5, ["Positive"], {}, {"Positive": 0}, {"Neutral": 1}, {"Positive": math.inf}, {5: 1.0}]
)
def test_a_prior_that_is_none_is_refused_at_once(prior: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        NoisyVote(LABELS, prior=prior)
    assert caught.value.parameter.startswith("prior")


def says_positive(given: Any) -> str:
    return "Positive"


def says_negative(given: Any) -> str:
    return "Negative"


def test_another_prior_is_another_question_for_the_ledger(budget_of: Any, store_of: Any, records: Any) -> None:
    budget, store = budget_of(60.0, releases=20, replay=True, accept_noise=True), store_of(records(100))
    priors = [None, AGAINST, {"Positive": 0.1, "Negative": 0.9}, "zero_shot", says_positive, says_negative]
    for _ in range(2):
        answers = [chain_of(budget, store, prior=prior).invoke({"input": "q"}) for prior in priors]
        assert answers[-2:] == LABELS
    assert budget.spent() == len(priors), "and the same prior's is replayed"
