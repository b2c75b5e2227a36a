"""`EmbeddingMean`: what one member may move, how much noise covers it, and what every bad embedding does."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.embeddings import Embeddings
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from scipy import stats
from ways import shown

from langchain_dpicl import EmbeddingMean, InvalidParameter, ModelUnavailable, UnsafeConfigurationError
from langchain_dpicl.aggregators.means import STEPS
from langchain_dpicl.privacy import MECHANISMS, LineRequest, PrivacyPlan, SecureRandomness
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.profile import Gaussian
from langchain_dpicl.privacy.votes import abstention_threshold
from langchain_dpicl.private.boundary import ABSTAIN

FALSE_ALARM = 1e-7  # of the one statistical test below

AXES = {"east": [1.0, 0.0], "north": [0.0, 1.0], "west": [-1.0, 0.0], "south": [0.0, -1.0]}


class Table(Embeddings):
    """Embeds by a table; a value that is an exception is raised, and with it the text. Logs every call."""

    def __init__(self, table: dict[str, Any] | None = None, default: Any = (1.0, 0.0)) -> None:
        self.table = {**AXES, **(table or {})}
        self.default = default
        self.calls: list[list[str]] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.calls.append(list(texts))
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        row = self.table.get(text, self.default)
        if isinstance(row, type) and issubclass(row, BaseException):
            raise row(f"cannot embed {text}")
        return row  # type: ignore[no-any-return]


class Noise:
    """Chosen noise, in steps of the lattice (one number for all coordinates, or one each); records what was asked."""

    def __init__(self, *noise: float) -> None:
        self.noise = noise
        self.asked: list[tuple[float, int]] = []

    def discrete_gaussian(self, sigma: float, size: int) -> np.ndarray:
        self.asked.append((sigma, size))
        return np.broadcast_to(np.array(self.noise or (0,), np.int64), (size,)).copy()


def prepared(mean: EmbeddingMean, answers: Sequence[object] = ()) -> EmbeddingMean:
    return mean.prepare({"input": "a question"}, {}, answers)


def vector_mean(embeddings: Embeddings) -> EmbeddingMean:
    return prepared(EmbeddingMean(embeddings, release="vector"))


def encoded(rows: Sequence[float], default: Any = None) -> np.ndarray:
    """What one member adds to the sum for an answer with this embedding."""
    model = Table({"answer": rows}, default=[0.5] * len(rows))
    return np.asarray(vector_mean(model).encode("answer"))


# -- one member's vector: clipped and rounded, never up ----------------------------------------------------------------

TINY, HUGE = float(np.nextafter(0, 1)), 1.7e308
HOSTILE: dict[str, list[float]] = {
    "just above one": [np.nextafter(1.0, 2.0), 0.0],
    "just above one on a diagonal": [math.sqrt(0.5) * (1 + 2e-16)] * 2,
    "a triple": [0.6000000000000001, 0.8000000000000001],
    "a triple on the lattice": [39321.6 / 65536, 52428.8 / 65536],
    "one of 384 dimensions": [1.0 / math.sqrt(384)] * 384,
    "1e308 everywhere": [1e308] * 384,
    "the largest floats": [HUGE, -HUGE, HUGE],
    "large beside small": [1e308, 1e-308, TINY, -1.0],
    "denormals": [TINY, -TINY, 3 * TINY],
    "minus nothing": [-0.0, 0.0],
    "float32 of a unit vector": np.float32([0.26726124, 0.5345225, 0.8017837]).tolist(),
    "float32 thirds": (np.float32(1.0) / np.sqrt(np.float32(3.0)) * np.ones(3, np.float32)).tolist(),
    "half precision": np.float16([0.5774, 0.5774, 0.5774]).astype(float).tolist(),
    "one step and a bit": [1.999 / STEPS, -1.999 / STEPS, 0.999 / STEPS],
    "not normalised at all": [3.0, -4.0, 12.0],
    "a single one": [1.0],
    "minus one": [-1.0],
    "long": [1e-3] * 4096,
}


def check_clipped(rows: Sequence[float]) -> None:
    steps = encoded(rows)
    assert steps.dtype == np.int64
    whole = [int(step) for step in steps]
    assert sum(step * step for step in whole) <= STEPS * STEPS, "in whole numbers, not within a rounding error"
    for step, value in zip(whole, rows, strict=True):
        assert abs(step) <= abs(value) * STEPS, "towards 0"
        assert step * value >= 0, "never across it"


@pytest.mark.parametrize("name", HOSTILE)
def test_no_vector_is_longer_than_one_or_rounded_up(name: str) -> None:
    check_clipped(HOSTILE[name])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=12))
def test_no_vector_of_finite_floats_is_longer_than_one_or_rounded_up(rows: list[float]) -> None:
    check_clipped(rows)


def test_rounding_on_the_unit_sphere_stays_inside_it(seeded: Callable[[int], Any]) -> None:
    directions = seeded(1).generator.normal(size=(2000, 3))
    for scale in (1.0, 1.0 + 1e-15, 7.0):
        for row in directions / np.linalg.norm(directions, axis=1, keepdims=True) * scale:
            check_clipped(row.tolist())


def test_a_short_vector_keeps_its_length_and_a_long_one_its_direction() -> None:
    assert encoded([0.25, -0.5]).tolist() == [STEPS // 4, -STEPS // 2]
    assert encoded([0.0, 0.0]).tolist() == [0, 0], "an answer that adds nothing is not an abstention"
    long = encoded([30.0, -40.0])
    assert long.tolist() == [int(0.6 * STEPS), -int(0.8 * STEPS)]
    assert np.linalg.norm(encoded([1e308, 1e308])) > 0.9999 * STEPS


@pytest.mark.parametrize(
    "row",
    [
        [math.nan, 0.0],
        [math.inf, 0.0],
        [-math.inf, math.nan],
        [1.0],
        [1.0, 0.0, 0.0],
        [],
        [[1.0, 0.0]],
        None,
        "text",
        ["a", "b"],
        [None, 1.0],
        5.0,
        {"a": 1},
        ValueError,
        KeyboardInterrupt,
    ],
    ids=shown,
)
async def test_what_is_no_finite_vector_of_the_dimension_abstains(row: Any) -> None:
    mean = vector_mean(Table({"answer": row}))
    with pytest.raises(BaseException):  # noqa: B017, PT011 - the boundary turns whatever it is into an abstention
        mean.encode("answer")
    with pytest.raises(BaseException):  # noqa: B017, PT011
        await mean.aencode("answer")


@pytest.mark.parametrize("rows", [[], None, [[]], 7], ids=shown)
def test_a_model_that_gives_no_row_makes_a_member_abstain(rows: Any) -> None:
    model = Table()
    mean = vector_mean(model)
    model.embed_documents = lambda texts: rows  # type: ignore[method-assign]
    with pytest.raises(Exception):  # noqa: B017, PT011
        mean.encode("answer")


@pytest.mark.parametrize(
    "output",
    ["", " \n", None, 5, b"east", ["east"], {"answer": "east"}, ABSTAIN, AIMessage(""), AIMessage([])],
    ids=shown,
)
async def test_an_answer_without_text_abstains_and_is_never_embedded(output: object) -> None:
    model = Table()
    mean = vector_mean(model)
    model.calls.clear()
    with pytest.raises(ValueError, match="no answer"):
        mean.encode(output)
    with pytest.raises(ValueError, match="no answer"):
        await mean.aencode(output)
    assert model.calls == []


async def test_every_answer_is_embedded_in_a_call_of_its_own_also_asynchronously() -> None:
    model = Table()
    mean = vector_mean(model)
    model.calls.clear()
    for output in ("north", AIMessage(" west "), AIMessage([{"type": "text", "text": "south"}])):
        one = np.asarray(mean.encode(output))
        assert (np.asarray(await mean.aencode(output)) == one).all()
    assert model.calls == [["north"], ["north"], ["west"], ["west"], ["south"], ["south"]]


async def test_asynchronously_the_models_own_coroutine_is_used() -> None:
    class Native(Table):
        async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
            await asyncio.sleep(0)
            return [AXES["north"]]

    mean = vector_mean(Native())
    assert np.asarray(await mean.aencode("east")).tolist() == [0, STEPS]
    assert np.asarray(mean.encode("east")).tolist() == [STEPS, 0]


# -- sensitivity 2: mistake 1 of the design ----------------------------------------------------------------------------

EPSILONS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)


def lattice_delta(distance: int, sigma: float, epsilons: Sequence[float]) -> list[float]:
    """The exact delta(eps) of discrete Gaussian noise, one point moved by so many steps; tails below 1e-40 left out."""
    reach = math.ceil(14 * sigma)
    places = np.arange(-reach, reach + distance + 1)
    normaliser = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2).sum()
    p = np.exp(-0.5 * (places / sigma) ** 2) / normaliser
    q = np.exp(-0.5 * ((places - distance) / sigma) ** 2) / normaliser
    return [float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum()) for epsilon in epsilons]


def worst_pair(parameter: float, members: int = 3) -> tuple[int, float]:
    """How far the real sum moves when v becomes -v, and the standard deviation asked for; both in steps."""
    mean, noise = vector_mean(Table()), Noise()
    east, west = mean.encode("east"), mean.encode("west")
    rest = [mean.encode("north")] * (members - 1)
    one = np.array(mean.aggregate([east, *rest], parameter, noise))  # type: ignore[arg-type]
    other = np.array(mean.aggregate([west, *rest], parameter, noise))  # type: ignore[arg-type]
    ((sigma, size),) = set(noise.asked)
    assert size == 3, "every coordinate, and the one that counts abstentions"
    return round(float(np.linalg.norm(one - other)) * members * STEPS), sigma


@pytest.mark.parametrize("parameter", [0.7, 1.6, 5.0])
def test_the_worst_pair_has_the_profile_claimed_and_no_better_one(parameter: float) -> None:
    distance, sigma = worst_pair(parameter)
    assert distance == 2 * STEPS, "opposite unit vectors: 2, not 1"
    profile = MECHANISMS["embedding"]().profile(parameter)
    for epsilon, exact in zip(EPSILONS, lattice_delta(distance, sigma, EPSILONS), strict=True):
        claimed = float(profile.delta(epsilon))
        assert exact <= claimed * (1 + 1e-9) + 1e-15
        assert exact >= 0.999 * claimed, "not wasteful either"
    assert lattice_delta(distance, sigma, [1.0])[0] == pytest.approx(
        float(Gaussian(parameter / 2).delta(1.0)), rel=1e-3
    )


def test_a_plan_keeps_its_target_where_one_for_sensitivity_one_would_break_it() -> None:
    request = LineRequest("embedding", 1.0, 1)
    plan = PrivacyPlan.solve(epsilon=1.0, delta=1e-5, lines={"embedding": request})
    parameter = plan.lines["embedding"].parameter
    ((kept,), (broken,)) = (lattice_delta(*worst_pair(p), [1.0]) for p in (parameter, parameter / 2))
    assert kept <= 1e-5
    assert broken > 100 * 1e-5


def test_no_replacement_moves_the_sum_by_more_than_two() -> None:
    mean = vector_mean(Table({"zero": [0.0, 0.0], "long": [-9.0, 9.0]}))
    said: list[object] = [mean.encode(text) for text in (*AXES, "zero", "long")]
    sums = []
    for output in [*said, ABSTAIN]:
        answered = isinstance(output, np.ndarray)
        sums.append(np.append(output if answered else np.zeros(2), 0 if answered else STEPS))
    moves = [float(np.linalg.norm(one - other)) for one, other in itertools.product(sums, repeat=2)]
    assert max(moves) == 2 * STEPS


def test_the_noise_drawn_has_the_plans_deviation_on_every_coordinate() -> None:
    """Chi-square of each coordinate's variance, the one of abstentions too, false-alarm probability 1e-7 in all. At
    half of sigma, or without noise on a coordinate, the p-value is 0."""
    drawn: list[np.ndarray] = []

    class Recorded(SecureRandomness):
        def discrete_gaussian(self, sigma: float, size: int) -> np.ndarray:
            drawn.append(super().discrete_gaussian(sigma, size))
            return drawn[-1]

    mean, parameter, rounds = vector_mean(Table()), 1.25, 300
    outputs = [mean.encode("east"), mean.encode("north"), mean.encode("north")]
    for _ in range(rounds):
        released = mean.aggregate(outputs, parameter, Recorded())
        assert (released is None) == (drawn[-1][-1] >= abstention_threshold(3, parameter, STEPS))
        if released is not None:
            noise = np.array(released) * 3 * STEPS - np.array([STEPS, 2 * STEPS])
            assert np.round(noise).tolist() == drawn[-1][:-1].tolist(), "what is released holds exactly the noise drawn"
    sizes = np.array(drawn)
    assert sizes.shape == (rounds, 3)
    for coordinate in sizes.T / (parameter * STEPS):
        statistic = float((coordinate**2).sum())
        tail = min(stats.chi2.cdf(statistic, rounds), stats.chi2.sf(statistic, rounds))
        assert tail > FALSE_ALARM / 6


@pytest.mark.parametrize("parameter", [0.5, 3.0])
@pytest.mark.parametrize("abstentions", [0, 3, 4, 8])
def test_abstention_is_decided_by_its_noisy_count_alone(abstentions: int, parameter: float) -> None:
    mean = vector_mean(Table())
    outputs = [ABSTAIN] * abstentions + [mean.encode("east")] * (8 - abstentions)
    threshold = abstention_threshold(8, parameter, STEPS)
    for noise, silent in ((threshold - abstentions * STEPS, True), (threshold - abstentions * STEPS - 1, False)):
        released = mean.aggregate(outputs, parameter, Noise(0, 0, noise))  # type: ignore[arg-type]
        assert (released is None) is silent
        assert mean.outcome(released) == ("members abstained" if silent else "released")


def test_the_sum_is_divided_by_the_number_of_members_whoever_abstains() -> None:
    mean = vector_mean(Table())
    outputs = [mean.encode("east"), ABSTAIN, mean.encode("east"), ABSTAIN, mean.encode("east")]
    assert mean.aggregate(outputs, 0.2, Noise()) == [0.6, 0.0]  # type: ignore[arg-type]


# -- nothing after the noise looks back: mistake 10 --------------------------------------------------------------------


def test_every_candidate_can_win_whatever_the_members_said() -> None:
    """No shortlist from the exact sum: enough noise in a candidate's direction makes it the release."""
    mean = prepared(EmbeddingMean(Table(), list(AXES)))
    for outputs in ([mean.encode("east")] * 4, [mean.encode("south")] * 4, [mean.encode("north"), *[ABSTAIN] * 3]):
        for text, direction in AXES.items():
            noise = Noise(*(int(9 * STEPS * x) for x in direction), -9 * STEPS)
            assert mean.aggregate(outputs, 1.0, noise) == text  # type: ignore[arg-type]


def test_the_noisy_mean_is_released_as_it_is() -> None:
    """Not clipped, not rounded, not normalised by what was private."""
    mean = vector_mean(Table())
    released = mean.aggregate([mean.encode("east")] * 2, 1.0, Noise(10 * STEPS, -3, -STEPS))  # type: ignore[arg-type]
    assert released == [6.0, -3 / (2 * STEPS)]
    assert [type(number) for number in released or ()] == [float, float]


def test_the_release_is_the_nearest_by_cosine_not_by_length() -> None:
    model = Table({"far": [100.0, 1.0], "near": [1e-200, 1e-200], "answer": [0.7, 0.6]})
    mean = prepared(EmbeddingMean(model, ["far", "near"]))
    assert mean.aggregate([mean.encode("answer")] * 3, 0.2, Noise()) == "near"  # type: ignore[arg-type]


def test_what_is_left_of_the_private_side_is_nothing(canary: str) -> None:
    mean = prepared(EmbeddingMean(Table(), list(AXES)))
    before = {name: value for name, value in vars(mean).items() if name != "embeddings"}
    mean.aggregate([mean.encode(canary), mean.encode("east")], 1.0, Noise())  # type: ignore[arg-type]
    assert {name: value for name, value in vars(mean).items() if name != "embeddings"} == before


# -- candidates: public, before the charge -----------------------------------------------------------------------------


def chain_mean(model: Embeddings | None = None, count: int = 4) -> EmbeddingMean:
    return EmbeddingMean(model or Table(), RunnableLambda(lambda v: "east"), count)


def test_a_fixed_list_is_embedded_once_however_many_requests_come_at_once() -> None:
    model = Table()
    mean = EmbeddingMean(model, list(AXES))
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        assert prepared(mean.under("embedding", Crowd(4, 4))).texts == tuple(AXES)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.calls == [list(AXES)]


def test_requests_do_not_share_their_candidates() -> None:
    mean = chain_mean()
    one, other = prepared(mean, ["east", "west"]), prepared(mean, ["north", "south", "north"])
    assert (one.texts, other.texts, mean.texts) == (("east", "west"), ("north", "south"), ())
    assert one.aggregate([one.encode("north")] * 2, 0.2, Noise(1, 0, 0)) == "east"  # type: ignore[arg-type]
    assert other.aggregate([other.encode("north")] * 2, 0.2, Noise()) == "north"  # type: ignore[arg-type]


def test_zero_shot_answers_are_cleaned_and_equal_ones_count_once() -> None:
    model = Table({"nan": [math.nan, 1.0], "zero": [0.0, 0.0], "short": [1.0], "inf": [math.inf, 0.0]})
    answers = [" east ", AIMessage("north"), "east", "", "  ", ABSTAIN, None, 5, "nan", "zero", "short", "inf"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean = prepared(chain_mean(model), answers)
    assert mean.texts == ("east", "north")
    assert mean._units is not None
    assert mean._units.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_candidates_that_are_all_equal_warn_without_showing_them(canary: str) -> None:
    with pytest.warns(UserWarning, match="all zero-shot candidates are equal") as caught:
        mean = prepared(chain_mean(), [canary] * 4)
    assert mean.texts == (canary,)
    assert canary not in str(caught[0].message)


@pytest.mark.parametrize("answers", [[], ["", " "], [ABSTAIN] * 4, ["nan"], ["zero", "zero"], [5, None]], ids=shown)
@pytest.mark.filterwarnings("ignore")
def test_without_a_usable_candidate_the_model_is_unavailable(answers: list[object]) -> None:
    with pytest.raises(ModelUnavailable, match="nothing was charged"):
        prepared(chain_mean(Table({"nan": [math.nan, 1.0], "zero": [0.0, 0.0]})), answers)


@pytest.mark.parametrize("row", [[0.0, 0.0], [math.nan, 1.0], [1.0], [math.inf, 1.0]], ids=shown)
def test_a_list_with_a_text_that_has_no_direction_is_refused_by_position(row: list[float]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        prepared(EmbeddingMean(Table({"bad": row}), ["east", "north", "bad"]))
    assert (caught.value.parameter, caught.value.value) == ("candidates[2]", "bad")
    assert "finite, non-zero" in caught.value.bound


@pytest.mark.parametrize("make", [lambda m: EmbeddingMean(m, list(AXES)), lambda m: EmbeddingMean(m, release="vector")])
@pytest.mark.parametrize("rows", [[], [[]], [[1.0, 0.0]] * 9, None, RuntimeError], ids=shown)
def test_a_model_that_fails_on_public_text_is_unavailable(make: Any, rows: Any, canary_free: Any) -> None:
    class Broken(Table):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            if rows is RuntimeError:
                raise RuntimeError("the server said no")
            return rows  # type: ignore[no-any-return]

    with pytest.raises(ModelUnavailable, match="nothing was charged") as caught:
        prepared(make(Broken()))
    canary_free(caught.value)
    assert "the server said no" not in str(caught.value)


def test_a_model_that_was_down_is_asked_again() -> None:
    model = Table({"east": RuntimeError})
    mean = EmbeddingMean(model, list(AXES))
    with pytest.raises(ModelUnavailable):
        prepared(mean)
    model.table["east"] = AXES["east"]
    assert prepared(mean).texts == tuple(AXES)


# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        ({"embeddings": None}, "embeddings"),
        ({"embeddings": Table}, "embeddings"),
        ({"embeddings": lambda texts: texts}, "embeddings"),
        ({"candidates": None}, "candidates"),
        ({"candidates": []}, "candidates"),
        ({"candidates": "a text"}, "candidates"),
        ({"candidates": 5}, "candidates"),
        ({"candidates": {"a", "b"}}, "candidates"),
        ({"candidates": {"a": 1}}, "candidates"),
        ({"candidates": (text for text in "ab")}, "candidates"),
        ({"candidates": ["a", ""]}, "candidates[1]"),
        ({"candidates": ["a", " "]}, "candidates[1]"),
        ({"candidates": ["a", None]}, "candidates[1]"),
        ({"n_candidates": 0}, "n_candidates"),
        ({"n_candidates": 1.5}, "n_candidates"),
        ({"n_candidates": True}, "n_candidates"),
        ({"n_candidates": "3"}, "n_candidates"),
        ({"release": "mean"}, "release"),
        ({"release": None}, "release"),
        ({"release": "vector"}, "candidates"),
    ],
    ids=shown,
)
def test_bad_parameters_are_named(arguments: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        EmbeddingMean(**{"embeddings": Table(), "candidates": ["a", "b"], **arguments})
    assert caught.value.parameter == parameter
    assert caught.value.bound


def test_a_model_with_a_cache_is_refused() -> None:
    class Cached(Table):
        document_embedding_store = None
        """As LangChain's CacheBackedEmbeddings has one."""

    with pytest.raises(UnsafeConfigurationError, match="cache"):
        EmbeddingMean(Cached(), ["a", "b"])


def test_the_callers_list_is_copied_and_its_duplicates_dropped() -> None:
    given = ["east", " east ", "north"]
    mean = EmbeddingMean(Table(), given)
    given.clear()
    assert prepared(mean).texts == ("east", "north")


def test_what_an_embedding_mean_shows_of_itself(canary: str) -> None:
    listed, written = EmbeddingMean(Table(), [canary, "b"]), chain_mean(count=7)
    vector = EmbeddingMean(Table(), release="vector")
    assert repr(listed) == "EmbeddingMean(Table, 2 candidates)"
    assert repr(written) == "EmbeddingMean(Table, n_candidates=7)"
    assert repr(vector) == "EmbeddingMean(Table, release='vector')"
    assert (listed.release_type, vector.release_type) == (str, list[float])
    assert listed.mechanism in MECHANISMS
    assert dict(listed.options) == {"step": 2.0**-16} == {"step": 1 / STEPS}
    assert (listed.public_calls(), vector.public_calls()) == (None, None)
    calls = written.public_calls()
    assert calls is not None
    assert calls[1] == 7
