"""Shared fixtures: records with a canary, generators that a test injects, and small sealed chains.

The canary is a string that stands for private text. Whatever a test captures (messages, files, traces, buffers) is
searched for it; `canary_free` does the searching.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import by_hand  # noqa: F401
import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import RunnableLambda
from moments import numbers_of
from numpy.typing import NDArray
from sum_noise import Noise

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivateEnsemble,
)
from langchain_dpicl.private.pickling import Pickler
from langchain_dpicl.store.view import StoreView

os.environ["PYTHONPATH"] = os.pathsep.join(  # scripts that tests start find the helpers, `by_hand` above all
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

CANARY = "CANARY-7f3a-mrs-alder-of-9-elm-street"
LABELS = ["Positive", "Negative"]
DIMENSION = 8
ALL_CORES: set[int] = os.sched_getaffinity(0) if "PYTEST_XDIST_WORKER" in os.environ else set()


class SeededRandomness:
    """The protocol of `langchain_dpicl.privacy.noise.Randomness` on a numpy generator: for tests alone."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        return np.flatnonzero(self.generator.random(n) < probability).astype(np.int64)

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        return self.generator.integers(high, size=size, dtype=np.int64)

    def uniforms(self, size: int) -> NDArray[np.float64]:
        return self.generator.random(size)

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        reach = int(np.ceil(12 * sigma)) + 1
        support = np.arange(-reach, reach + 1)
        weights = np.exp(-(support**2) / (2 * sigma**2))
        return self.generator.choice(support, size=size, p=weights / weights.sum()).astype(np.int64)


class OwnerKeyedRandomness:
    """Coins that belong to owners: what an owner draws depends on its key and its records alone.

    Two stores that share owners thus see the same coins for the owners that they share, which is the coupling in the
    proof of the guarantee. It follows the selector's order of draws (coins, member, priority, order of an owner's own
    exemplars), and a selector that draws anything else fails loudly.
    """

    def __init__(self, store: ExemplarStore, salt: int) -> None:
        self.store = store
        self.salt = salt
        self.rows_of: Callable[..., Any] = StoreView.rows_of  # a gate's test has its own: those that count
        self._chosen: NDArray[np.int64] = np.empty(0, np.int64)
        self._keys: list[str] = []
        self._uniform_calls = 0

    def _unit(self, *what: object) -> float:
        digest = hashlib.sha256(repr((self.salt, *what)).encode()).digest()
        return (int.from_bytes(digest[:7], "big") + 0.5) / 2**56

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        with self.store.reading() as view:
            named = dict(zip(numbers_of(self.store).tolist(), self.store.owners, strict=True))
            keys = [named.get(number, f"gone {number}") for number in view.numbers.tolist()]
        assert n == len(keys), "one coin per owner's number, no more and no fewer"
        self._keys = keys
        self._uniform_calls = 0
        self._chosen = np.array(
            [i for i, key in enumerate(keys) if self._unit(key, "coin") < probability], dtype=np.int64
        )
        return self._chosen

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        assert size == len(self._chosen), "one member per sampled owner"
        return np.array([int(self._unit(self._keys[i], "member") * high) for i in self._chosen], dtype=np.int64)

    def uniforms(self, size: int) -> NDArray[np.float64]:
        self._uniform_calls += 1
        if self._uniform_calls == 1:
            assert size == len(self._chosen), "one priority per sampled owner"
            return np.array([self._unit(self._keys[i], "priority") for i in self._chosen], dtype=np.float64)
        with self.store.reading() as view:
            rows, *_ = self.rows_of(view, self._chosen)
            texts = [exemplar["input"] for exemplar in view.read(rows)]
        assert size == len(texts), "one order number per exemplar of a sampled owner"
        return np.array([self._unit(text, "order") for text in texts], dtype=np.float64)

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        raise AssertionError("selection draws no noise")


class CountingRandomness(SeededRandomness):
    """Counts how many numbers were handed out."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drawn = 0

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        heads = super().coin_positions(n, probability)
        self.drawn += len(heads)
        return heads

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        self.drawn += size
        return super().integers(high, size)

    def uniforms(self, size: int) -> NDArray[np.float64]:
        self.drawn += size
        return super().uniforms(size)


def make_records(owners: int, per_owner: int = 1, *, secret: str = "") -> list[dict[str, str]]:
    """`owners * per_owner` records; `secret` is part of every text."""
    return [
        {"input": f"text {i}.{j} {secret}".strip(), "output": LABELS[i % 2], "owner": f"owner-{i}"}
        for i in range(owners)
        for j in range(per_owner)
    ]


def build_store(records: list[dict[str, str]], **options: Any) -> ExemplarStore:
    """A store with deterministic fake embeddings."""
    options.setdefault("owner_key", "owner")
    return ExemplarStore.from_records(records, DeterministicFakeEmbedding(size=DIMENSION), **options)


@pytest.fixture(scope="session")
def canary() -> str:
    return CANARY


@pytest.fixture(scope="session")
def labels() -> list[str]:
    return list(LABELS)


@pytest.fixture(scope="session")
def seeded() -> Callable[[int], SeededRandomness]:
    """seeded(seed): a generator to set on ``selector._randomness`` or ``sealed._randomness``."""
    return SeededRandomness


@pytest.fixture(scope="session")
def owner_keyed() -> Callable[[ExemplarStore, int], OwnerKeyedRandomness]:
    """owner_keyed(store, salt): coins that follow owners from store to store."""
    return OwnerKeyedRandomness


@pytest.fixture(scope="session")
def counting() -> Callable[[int], CountingRandomness]:
    return CountingRandomness


@pytest.fixture(scope="session")
def records() -> Callable[..., list[dict[str, str]]]:
    return make_records


@pytest.fixture(scope="session")
def store_of() -> Callable[..., ExemplarStore]:
    return build_store


@pytest.fixture(scope="session")
def embeddings() -> DeterministicFakeEmbedding:
    return DeterministicFakeEmbedding(size=DIMENSION)


@pytest.fixture
def ledger_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture(autouse=True)
def fakes_are_models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake models and embeddings stand for a library's, which all calls share; but not in tests that are marked
    ``own_models``, which see what becomes of a class of the user's own."""
    if "own_models" not in request.keywords:
        honest = Pickler._is_shared
        shared = (BaseLanguageModel, Embeddings)
        monkeypatch.setattr(
            Pickler, "_is_shared", lambda self, obj, kind: isinstance(obj, shared) or honest(self, obj, kind)
        )


@pytest.fixture(autouse=True)
def known_to_answer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every member counts as rehearsed, so that tests see the calls of releases alone; but not those that are marked
    ``asks_first``, which see the public question before a first charge, too."""
    if "asks_first" not in request.keywords:
        monkeypatch.setattr(PrivateEnsemble, "_tried", frozenset({False, True}))


@pytest.fixture
def budget_of(tmp_path: Path) -> Iterator[Callable[..., PrivacyBudget]]:
    """budget_of(epsilon=1000, releases=10): a budget on a ledger of its own.

    At epsilon 1000, ten releases and a rate of 1 the plan's sigma is 0.1: noise differs from zero with a probability
    below 1e-20, so that tests of plumbing see the plain winner.
    """
    made: list[PrivacyBudget] = []
    number = itertools.count()

    def make(epsilon: float = 1000.0, delta: float = 1e-5, releases: int = 10, **options: Any) -> PrivacyBudget:
        options.setdefault("replay", False)  # these tests ask the same question again and count its releases
        options.setdefault("ledger", f"sqlite:///{tmp_path / f'budget-{next(number)}.db'}")
        made.append(PrivacyBudget(epsilon, delta, releases, **options))
        return made[-1]

    yield make
    for budget in made:
        budget.close()


@pytest.fixture
def sealed_of(budget_of: Callable[..., PrivacyBudget]) -> Callable[..., Any]:
    """sealed_of(member): a whole sealed chain over a store whose every text holds the canary.

    So many owners leave any bucket empty, which counts nothing, with a probability below 1e-7 (four members: 1e-8).
    """

    def make(
        member: Any,
        *,
        budget: PrivacyBudget | None = None,
        store: ExemplarStore | None = None,
        members: int = 4,
        rate: float = 1.0,
        owners: int | None = None,
        return_receipt: bool = False,
        vote: NoisyVote | None = None,
        max_concurrency: int | None = None,
        timeout: Any = "auto",
        public: Any = (),
        share: Any = (),
        **budget_options: Any,
    ) -> Any:
        owners = 20 * members if owners is None else owners
        store = build_store(make_records(owners, secret=CANARY)) if store is None else store
        selector = PoissonExampleSelector(store, members, rate=rate, max_exemplars=owners)
        budget = budget_of(**budget_options) if budget is None else budget
        settings = {
            "max_concurrency": max_concurrency,
            "timeout": timeout,
            "public": public,
            "share": share,
        }
        ensemble = PrivateEnsemble(selector, member, **settings)
        vote = NoisyVote(LABELS, mechanism="vote") if vote is None else vote  # else the plan chooses by a hair here
        return ensemble | DPAggregate(vote, budget, return_receipt=return_receipt)

    return make


def frame_locals(error: BaseException) -> str:
    """The repr of every local variable in the package's own frames, as an error reporter would send them."""
    shown: list[str] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if "langchain_dpicl" in frame.f_code.co_filename:
            shown += [f"{name}={value!r}" for name, value in frame.f_locals.items()]
    return "\n".join(shown)


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Noise:
    """Noise of zero for private sums, so that counts show them."""
    source = Noise(scale=0.0)
    monkeypatch.setattr("langchain_dpicl.once.sums.SecureRandomness", lambda: source)
    return source


@pytest.fixture(scope="session")
def canary_free() -> Callable[..., None]:
    """canary_free(error): neither the message nor what hangs on the exception shows the canary.

    ``frames=True`` also looks at the locals of the package's frames (for errors after sampling: an error about bad
    records passes frames that were handed these very records).
    """

    def check(error: BaseException, *, frames: bool = False, secret: str = CANARY) -> None:
        shown = [str(error), repr(error), repr(error.args), repr(getattr(error, "__notes__", ""))]
        shown.append("".join(traceback.format_exception(error)))
        assert error.__cause__ is None, "a cause carries what the error hides"
        assert error.__context__ is None, "a context carries what the error hides"
        if frames:
            shown.append(frame_locals(error))
        assert not [text for text in shown if secret in text]

    return check


def keep_on(cores: set[int]) -> None:
    """Every thread of this process. A new one has the cores of the thread that starts it, and a model as many threads
    as its own has cores: two that wait for each other in turns on one core take ten times as long."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep a model on one core if several workers run: two models that each want all cores slow each other down."""
    if ALL_CORES and "model" in item.keywords:
        keep_on({sorted(ALL_CORES)[int(os.environ["PYTEST_XDIST_WORKER"][2:]) % len(ALL_CORES)]})


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    if ALL_CORES and "model" in item.keywords:
        keep_on(ALL_CORES)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test-slow` collects the files that say ``mark.slow``: a mark from elsewhere would leave its test out."""
    marked = {item.path for item in items if item.get_closest_marker("slow")}
    if hidden := [path.name for path in sorted(marked) if "mark.slow" not in path.read_text(encoding="utf-8")]:
        raise pytest.UsageError(f"slow tests in files that do not say mark.slow: {', '.join(hidden)}")


def skip_reasons(config: pytest.Config) -> Counter[str]:
    """Why tests were skipped, and how many for each reason."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With ``DPICL_NO_SKIPS``, which CI sets, a skipped test is a failure."""
    skipped = skip_reasons(session.config).total()
    if os.environ.get("DPICL_NO_SKIPS") and skipped:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"DPICL_NO_SKIPS is set, but {skipped} tests were skipped", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print as the last line what was skipped, and what it needs."""
    if reasons := skip_reasons(config):
        said = "; ".join(f"{count} for {reason}" for reason, count in reasons.most_common())
        print(f"{reasons.total()} tests were skipped: {said}")


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """serve(chain): a client of an application that serves it at /ask, for the user that a header names."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from langchain_dpicl.serving import add_dp_routes

    opened: list[TestClient] = []

    def make(chain: Any, *, who: Any = None, **options: Any) -> TestClient:
        app = FastAPI()
        who = who or (lambda request: request.headers.get("x-user"))
        add_dp_routes(app, chain, "/ask", principal_from=who, **options)
        opened.append(TestClient(app))
        opened[-1].__enter__()
        return opened[-1]

    yield make
    for client in opened:
        client.__exit__(None, None, None)


@pytest.fixture
def unthinking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line in a folder of its own, with a model that answers by the query's first word."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("langchain_dpicl.local.local_embeddings", lambda: DeterministicFakeEmbedding(size=DIMENSION))
    monkeypatch.setattr("langchain_dpicl.local.local_llm", lambda *_, **__: None)
    monkeypatch.setattr(
        "langchain_dpicl.members.chains.LabelScorer",
        lambda llm, labels, query_key, **_: RunnableLambda(lambda values: values[query_key].split()[0]),
    )
