"""Sampling and the relevance gate on PostgreSQL: the same law as on FAISS, exact whatever indexes the server has."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import tickets_on_disk as disk
from ears import Ears
from exact import WAYS_TO_SAMPLE, check_seen
from langchain_core.embeddings import Embeddings
from langchain_dpicl.store.memory import rounding
from langchain_dpicl.store.postgres import PostgresView
from numpy.typing import NDArray
from pgvector_server import ask, database
from scipy import stats
from table_model import TableModel
from ticket_worlds import Degrees

from langchain_dpicl import DPSampler, ExemplarStore, PoissonExampleSelector, PostgresExemplarStore
from langchain_dpicl.selection.rules import Rules, Sought
from langchain_dpicl.store.filters import MetadataFilter

FALSE_ALARM = 1e-7  # of every statistical test below; there are four
DIMENSION = 8
NO_RULES = Rules(None, None, None)
OWNERS, MEMBERS, RATE, ROUNDS = 12, 3, 0.4, 1500
GONE = (0, 5, 13, 14)
"""Forgotten before anybody is sampled: their places are empty, the last ones are no places any more."""


@pytest.fixture(scope="module")
def module_url(pgvector: str) -> Iterator[str]:
    with database(pgvector) as url:
        yield url


@pytest.fixture(scope="module")
def collection(module_url: str, embeddings: Embeddings) -> Iterator[Callable[..., PostgresExemplarStore]]:
    """collection(records): a new one."""
    made: list[PostgresExemplarStore] = []

    def build(records: list[dict[str, Any]], **options: Any) -> PostgresExemplarStore:
        options = {"owner_key": "owner", "name": f"c{len(made)}"} | options
        made.append(PostgresExemplarStore.from_records(records, embeddings, module_url, **options))
        return made[-1]

    yield build
    for store in made:
        store.close()


@pytest.fixture(params=[True, False], ids=["in memory", "on the server"])
def gated(request: Any, collection: Any) -> Callable[..., PostgresExemplarStore]:
    """The same, with the vectors in this process's memory or not."""
    return partial(collection, vectors_in_memory=request.param)


# -- the law of sampling -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(collection: Any, records: Any, seeded: Any) -> NDArray[np.int64]:
    """For every round and remaining owner: the member it sat in, or -1."""
    store = collection(records(OWNERS + len(GONE) - 1))
    for owner in GONE:
        store.forget(f"owner-{owner}")
    selector = PoissonExampleSelector(store, MEMBERS, rate=RATE, max_exemplars=OWNERS)
    selector._randomness = seeded(20261)
    left = [i for i in range(OWNERS + len(GONE) - 1) if i not in GONE]
    seen = np.full((ROUNDS, len(left)), -1)
    for turn in range(ROUNDS):
        for member, bucket in enumerate(selector.sample()):
            for exemplar in bucket:
                seen[turn, left.index(int(exemplar["input"].split()[1].split(".")[0]))] = member
    return seen


def test_every_owner_takes_part_with_the_rate(table: NDArray[np.int64]) -> None:
    """Chi-square over owners, false-alarm probability 1e-7."""
    heads = (table >= 0).sum(axis=0)
    statistic = ((heads - ROUNDS * RATE) ** 2 / (ROUNDS * RATE * (1 - RATE))).sum()
    assert stats.chi2.sf(statistic, table.shape[1]) > FALSE_ALARM


def test_every_owner_draws_every_member_alike(table: NDArray[np.int64]) -> None:
    """Chi-square per owner over members, false-alarm probability 1e-7 altogether (Bonferroni)."""
    for owner in range(table.shape[1]):
        counts = np.bincount(table[table[:, owner] >= 0, owner], minlength=MEMBERS)
        assert stats.chisquare(counts).pvalue > FALSE_ALARM / table.shape[1]


def test_owners_are_independent_of_one_another(table: NDArray[np.int64]) -> None:
    """For every pair the joint table of (out, member 0, 1, 2) x (the same) against the product, chi-square with 9
    degrees of freedom, false-alarm probability 1e-7 altogether (Bonferroni)."""
    pairs = list(itertools.combinations(range(table.shape[1]), 2))
    for one, other in pairs:
        joint = np.zeros((MEMBERS + 1, MEMBERS + 1))
        np.add.at(joint, (table[:, one] + 1, table[:, other] + 1), 1)
        assert stats.chi2_contingency(joint).pvalue > FALSE_ALARM / len(pairs)


def test_the_operating_systems_generator_gives_the_same_frequencies(collection: Any, records: Any) -> None:
    """With the gate, which lets seven of twelve through: inclusion, false-alarm probability 1e-7; nobody else is in."""
    vectors = np.eye(DIMENSION)[[0] * 7 + [1] * 5]
    store = collection(records(12), vectors=vectors)
    selector = PoissonExampleSelector(store, 2, rate=RATE, threshold=0.5, eligible=7, max_exemplars=12)
    query = np.eye(DIMENSION, dtype=np.float32)[0]
    inputs = [row["input"] for _ in range(300) for bucket in selector.sample(query=query) for row in bucket]
    assert {text.split()[1] for text in inputs} == {f"{i}.0" for i in range(7)}
    assert stats.binomtest(len(inputs), 300 * 7, RATE).pvalue > FALSE_ALARM


# -- the coupling ------------------------------------------------------------------------------------------------------


class OwnersCoins:
    """Coins that belong to owners' names: two collections that share owners see the same coins for those. In the
    selector's order of draws (coins, member, priority, order of an owner's own exemplars)."""

    def __init__(self, store: PostgresExemplarStore, salt: int, among: Any, sought: Sought) -> None:
        self.store, self.salt, self.among, self.sought = store, salt, among, sought
        with store.reading() as view:
            rows, position = view.rows_of(view.numbers)
            self.places = len(view.numbers)
            self.texts = {int(row): found["input"] for row, found in zip(rows, view.read(rows), strict=True)}
        self.names = {int(p): self.texts[int(row)].split(".")[0] for row, p in zip(rows, position, strict=True)}
        self.chosen: NDArray[np.int64] = np.empty(0, np.int64)
        self.first = True

    def unit(self, *what: object) -> float:
        digest = hashlib.sha256(repr((self.salt, *what)).encode()).digest()
        return (int.from_bytes(digest[:7], "big") + 0.5) / 2**56

    def name(self, number: int) -> str:
        return self.names.get(number, f"nobody {number}")

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        numbers = np.arange(self.places) if self.among is None else self.among
        assert n == len(numbers), "one coin for every place, or for every eligible owner"
        heads = [i for i, number in enumerate(numbers) if self.unit(self.name(int(number)), "coin") < probability]
        self.chosen, self.first = numbers[heads], True
        return np.array(heads, np.int64)

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        assert size == len(self.chosen)
        return np.array([int(self.unit(self.name(int(i)), "member") * high) for i in self.chosen], np.int64)

    def uniforms(self, size: int) -> NDArray[np.float64]:
        if self.first:
            self.first = False
            return np.array([self.unit(self.name(int(i)), "priority") for i in self.chosen])
        with self.store.reading() as view:
            rows, *_ = self.sought.rows(view, self.chosen)
        assert size == len(rows)
        return np.array([self.unit(self.texts[int(row)], "order") for row in rows])

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        raise AssertionError("selection draws no noise")


class MovingCoins(OwnersCoins):
    """A mistake: the coins of those who come later move up when an owner goes."""

    def name(self, number: int) -> str:
        return f"place {sorted(self.names).index(number)}"


def changed_buckets(
    collection: Any, embeddings: Any, threshold: float | None, *, forget: bool, coins: type[OwnersCoins] = OwnersCoins
) -> list[int]:
    """For every owner and salt: how many buckets differ with and without this owner, under the others' same coins."""
    per_owner = [1, 5, 3, 2, 4, 1, 2, 3]
    rows = [
        {"input": f"text {i}.{j}", "output": "b", "owner": f"owner-{i}"}
        for i, count in enumerate(per_owner)
        for j in range(count)
    ]
    np.random.default_rng(0).shuffle(rows)
    options: dict[str, Any] = {"exemplars_per_owner": 2, "max_exemplars": 3, "rate": 0.7}
    options |= {} if threshold is None else {"threshold": threshold, "eligible": 5}

    def buckets(store: PostgresExemplarStore, salt: int) -> list[list[str]]:
        selector = PoissonExampleSelector(store, 3, **options)
        query = selector.embed_query({"input": f"query {salt}"})
        selector._randomness = coins(store, salt, None if threshold is None else selector.eligible(query), query)
        return [[row["input"] for row in bucket] for bucket in selector.sample(query=query)]

    all_of_them = collection(rows)
    answers = []
    for left_out in range(len(per_owner)):
        name = f"owner-{left_out}"
        if forget:
            without = collection(rows)
            without.forget(name)
        else:
            without = collection([row for row in rows if row["owner"] != name])
        for salt in range(5):
            pairs = zip(buckets(all_of_them, salt), buckets(without, salt), strict=True)
            answers.append(sum(one != other for one, other in pairs))
        without.close()
    return answers


@pytest.mark.parametrize("threshold", [None, 0.1])
@pytest.mark.parametrize("forget", [False, True])
def test_without_one_owner_at_most_one_bucket_differs(
    threshold: float | None, forget: bool, gated: Any, embeddings: Any
) -> None:
    """The coupling that the guarantee rests on, for every owner. No chance is involved, so no false alarm."""
    changed = changed_buckets(gated, embeddings, threshold, forget=forget)
    assert max(changed) == 1
    assert min(changed) == 0


def test_the_coupling_test_finds_coins_that_move(collection: Any, embeddings: Any) -> None:
    assert max(changed_buckets(collection, embeddings, None, forget=False, coins=MovingCoins)) > 1


# -- the gate ----------------------------------------------------------------------------------------------------------


def of_spread_vectors(records: Any, seed: int, owners: int = 400) -> tuple[list[dict[str, str]], NDArray[np.float32]]:
    """Records of so many owners, three each, and vectors of norm 1 anywhere."""
    vectors = np.random.default_rng(seed).normal(size=(3 * owners, DIMENSION))
    return records(owners, 3), (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(params=["no index", "hnsw", "ivfflat"])
def indexed(request: Any, gated: Any, records: Any, module_url: str) -> Iterator[tuple[Any, NDArray[np.float32]]]:
    """A collection whose embeddings have an approximate index, on a server that is told to prefer indexes."""
    rows, vectors = of_spread_vectors(records, 7)
    store = gated(rows, vectors=vectors)
    table = store._collection.exemplars
    options = {"hnsw": "(m = 2, ef_construction = 4)", "ivfflat": "(lists = 100)"}
    prefer = "DO $$ BEGIN EXECUTE format('ALTER DATABASE %%I {} enable_seqscan {}', current_database()); END $$"
    if request.param in options:
        ask(
            module_url,
            f"CREATE INDEX {table}_near ON {table} USING {request.param} (embedding vector_ip_ops) "
            f"WITH {options[request.param]}",
            prefer.format("SET", "= off"),
        )
        nearest = f"EXPLAIN SELECT id FROM {table} ORDER BY embedding <#> '{vectors[0].tolist()}' LIMIT 5"
        assert f"{table}_near" in repr(ask(module_url, nearest)), "the index would be used where one can be"
        store.close()  # its connections were told otherwise
    yield store, vectors
    ask(module_url, prefer.format("RESET", ""))


def test_eligible_are_exactly_those_whose_best_exemplar_reaches_the_threshold(indexed: Any) -> None:
    """Against every inner product in double precision, at thresholds between any two neighbouring owners."""
    store, vectors = indexed
    slack = rounding(DIMENSION)
    tried = 0
    for query in np.random.default_rng(8).normal(size=(4, DIMENSION)):
        query = (query / np.linalg.norm(query)).astype(np.float32)
        best = (vectors.astype(float) @ query.astype(float)).reshape(-1, 3).max(axis=1)
        levels = np.sort(best)
        with store.reading() as view:
            for low, high in list(zip(levels[:-1], levels[1:], strict=True))[::7]:
                if high - low > 2 * slack:
                    threshold = (low + high) / 2
                    assert view.eligible(query, threshold).tolist() == np.flatnonzero(best > threshold).tolist()
                    tried += 1
            assert view.eligible(query, -1.0).tolist() == list(range(400))
            assert view.eligible(query, 1.0).tolist() == []
    assert tried > 150


def test_no_plan_of_the_gate_touches_an_approximate_index(indexed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = indexed
    asked: list[tuple[str, Any]] = []
    packed = PostgresView._packed

    def listen(self: PostgresView, kind: str, query: str, *values: object) -> Any:
        asked.append((query, values))
        return packed(self, kind, query, *values)

    monkeypatch.setattr(PostgresView, "_packed", listen)
    with store.reading() as view:
        view.eligible(np.eye(DIMENSION, dtype=np.float32)[0], 0.3)
        if store._in_memory:
            assert asked == [], "the server's indexes are not asked"
            return
        ((query, values),) = asked
        plan = "\n".join(row[0] for row in view._ask(f"EXPLAIN {query}", *values))  # type: ignore[attr-defined]
    assert "Filter: ((inner_product(embedding" in plan, "row by row"
    assert "_near" not in plan
    assert "Order By" not in plan


def test_filters_let_through_whom_they_let_through_in_memory(gated: Any, records: Any, store_of: Any) -> None:
    """Texts that PostgreSQL's JSON refuses included."""
    values = ["a", "b", "\x00", "\ud800", 1, 1.0, 2.5, True, None, float("nan"), 10**30, ["a"]]
    rows = [{**row, "x": values[i % 12], **({} if i % 5 else {"y": i})} for i, row in enumerate(records(40, 3))]
    server, memory = gated(rows), store_of(rows)
    query = memory.embed_query("q")
    filters: list[Any] = [{"x": value} for value in ("a", "\x00", "\ud800", 1, 2.5, True)]
    filters += [{"x": {name: value}} for name in ("$ne", "$gt", "$lte") for value in ("a", 1)]
    filters += [{"$or": [{"x": {"$in": ["a", 1]}}, {"y": {"$gte": 50}}]}, {"x": {"$ne": "b"}, "y": {"$lt": 90}}]
    for given in filters:
        wanted = MetadataFilter.parse(given)
        with server.reading() as one, memory.reading() as other:
            assert one.passing(np.arange(120), wanted).tolist() == other.passing(np.arange(120), wanted).tolist()
            for about in ((None, -1.0), (query, 0.1)):
                found = one.eligible(*about, wanted).tolist()
                assert found == other.eligible(*about, wanted).tolist()
                assert about[0] is not None or 0 < len(found) < 40, given
        selector = PoissonExampleSelector(server, calls=2, rate=1.0, exemplars_per_owner=9, filter=given)
        buckets = selector.sample(query=selector.embed_query({}))
        assert all(wanted.passes(each) for bucket in buckets for each in bucket)


def test_the_gate_and_the_similarity_agree_to_the_last_bit(gated: Any, records: Any) -> None:
    """At a threshold that is a row's own similarity the row is in, and one step above it is out: as on FAISS."""
    rows, vectors = of_spread_vectors(records, 9, owners=60)
    for store in (gated(rows, vectors=vectors), ExemplarStore.from_records(rows, None, vectors=vectors)):  # type: ignore
        query = vectors[10]
        with store.reading() as view:
            numbers = view.numbers
            found, position = view.rows_of(numbers)
            values = view.similarity(found, query)
            for owner in range(0, len(numbers), 7):
                best = values[position == owner].max()
                for threshold, is_in in ((best, True), (np.nextafter(best, np.float32(2)), False)):
                    assert (numbers[owner] in view.eligible(query, float(threshold))) is is_in
                    shown, *_ = Sought(NO_RULES, query, float(threshold)).rows(view, numbers[[owner]])
                    assert bool(len(shown)) is is_in, "who is eligible has something to show"


@pytest.mark.parametrize("how", WAYS_TO_SAMPLE[:1])  # a server has few connections
def test_a_record_that_does_not_count_changes_no_call(how: Any, gated: Any) -> None:
    made: list[PostgresExemplarStore] = []

    def store_of(records: list[dict[str, Any]]) -> PostgresExemplarStore:
        for earlier in made[:-1]:  # a server has few connections, and two stores are compared
            earlier.close()
        vectors = np.array(Degrees().embed_documents([each["input"] for each in records]))
        store: PostgresExemplarStore = gated(records, vectors=vectors, output_key=None)
        store.embeddings = Degrees()
        made.append(store)
        return store

    check_seen(store_of, how)


def test_an_owners_similarity_does_not_change_with_the_others(gated: Any, records: Any) -> None:
    """Bit by bit, whoever else comes or goes, and wherever its rows lie."""
    rows, vectors = of_spread_vectors(records, 11, owners=50)
    store = gated(rows, vectors=vectors)
    query = vectors[100]

    def own() -> list[int]:
        with store.reading() as view:
            found, _ = view.rows_of(np.array([20]))
            return view.similarity(found, query).view(np.int32).tolist()

    before = own()
    for i in (3, 19, 21, 49):
        store.forget(f"owner-{i}")
        assert own() == before
    store.add(rows[:30], vectors=vectors[:30][::-1])
    assert own() == before
    alone = gated([row for row in rows if row["owner"] == "owner-20"], vectors=vectors[60:63])
    with alone.reading() as view:
        assert view.similarity(np.arange(3), query).view(np.int32).tolist() == before


# -- callers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"rate": 1.0}, {"rate": 1.0, "threshold": 0.2, "eligible": 6}])
def test_a_sealed_chain_answers_from_it(
    options: dict[str, Any], collection: Any, records: Any, budget_of: Any, canary: str
) -> None:
    from langchain_dpicl import DPAggregate, NoisyVote, PrivateEnsemble

    vectors = np.eye(DIMENSION)[[i % 2 for i in range(12)]]
    store = collection(records(12, secret=canary), vectors=vectors)
    store.embeddings = Fixed()
    seen: list[list[str]] = Ears()

    def member(values: dict[str, Any]) -> str:
        seen.append(sorted(row["input"].split()[1] for row in values["examples"]))
        return "Negative"

    selector = PoissonExampleSelector(store, 3, max_exemplars=12, **options)
    vote = NoisyVote(
        ["Positive", "Negative"], mechanism="vote"
    )  # hears two of three members who fail: nobody asks first
    sealed = PrivateEnsemble(selector, member) | DPAggregate(vote, budget_of())
    assert sealed.invoke({"input": "question"}) == "Negative"
    expected = {f"{i}.0" for i in range(12) if i % 2 == 0 or "threshold" not in options}
    assert len(seen) == 3
    assert sorted(text for bucket in seen for text in bucket) == sorted(expected)
    assert canary not in repr(sealed) + repr(selector)


class Fixed(Embeddings):
    """Every query is the first unit vector."""

    def embed_query(self, text: str) -> list[float]:
        return [1.0] + [0.0] * (DIMENSION - 1)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


@pytest.mark.parametrize("owner_key", ["owner", None])
def test_workers_share_the_tickets_of_their_owners_until_they_are_forgotten(
    owner_key: str | None, collection: Any, budget_of: Any, module_url: str, ledger_url: str
) -> None:
    """Two workers on one ledger, with a store and a budget each. At a rate of 1 whoever pays is shown. Without names,
    a and its twin have equal exemplars: one owner with one row, until the last of them goes."""
    from langchain_dpicl import DPAggregate, NoisyVote, PrivateEnsemble

    given = {"a": "A", "twin": "A", "b": "B", "far": "C"}
    rows = [{"input": text, "output": "x", "owner": name} for name, text in given.items()]
    rows = rows if owner_key else [{key: row[key] for key in ("input", "output")} for row in rows]
    vectors = np.eye(DIMENSION, dtype=np.float32)[[0, 0, 0, 1]]
    name = f"shared_{owner_key}".lower()
    collection(rows, name=name, owner_key=owner_key, vectors=vectors)
    called = dict(zip(given, given if owner_key else ("#0", "#1", "#2", "#3"), strict=True))
    shown: list[str] = Ears()

    def member(values: dict[str, Any]) -> str:
        shown.extend(row["input"] for row in values["examples"])
        return "x"

    def seal(store: PostgresExemplarStore) -> Any:
        selector = PoissonExampleSelector(store, 3, rate=1.0, max_exemplars=9, threshold=0.5)
        budget = budget_of(releases=2, ledger=ledger_url, tickets=True)
        return PrivateEnsemble(selector, member, count_empty=True) | DPAggregate(NoisyVote(["x", "y"]), budget)

    def ask(chain: Any) -> list[str]:
        shown.clear()
        assert chain.invoke({"input": "question"}) == "x"
        return sorted(shown)

    stores = [PostgresExemplarStore.open(module_url, Fixed(), name=name) for _ in range(2)]
    one, other = (seal(store) for store in stores)
    everybody = ["A", "A", "B"] if owner_key else ["A", "B"]
    assert [ask(one), ask(other)] == [everybody] * 2
    assert [ask(one), ask(other)] == [[]] * 2, "two tickets each, whichever worker took them"
    key = disk.key_in(ledger_url, stores[0])
    with stores[0].reading() as view:
        a, twin, b, far = view.marks(np.arange(4), key)
    assert disk.used_in(ledger_url) == dict.fromkeys((a, twin, b), 2), "far was never eligible"
    assert len({a, twin, b, far}) == len(everybody) + 1

    stores[1].forget(called["a"])
    assert set(disk.marks_in(ledger_url)) == {twin, b}
    assert [ask(one), ask(other)] == [[]] * 2, "the twin has burnt its own, or theirs"
    stores[0].forget(called["twin"])
    assert set(disk.marks_in(ledger_url)) == {b}
    stores[0].add(rows[:1], owner_key=owner_key, vectors=vectors[:1])
    assert [ask(other), ask(one), ask(other)] == [["A"], ["A"], []], "who comes again is new"
    for store in stores:
        store.close()


def test_a_sampler_writes_from_it_and_its_model_forgets_what_another_worker_forgot(
    collection: Any, records: Any, budget_of: Any, module_url: str, embeddings: Any
) -> None:
    store = collection(records(16, 2), name="written")
    model = TableModel(lambda shown, released: [5.0 if "Positive" in shown else 0.0, 0.0], "ab")
    selector = PoissonExampleSelector(store, 8, rate=0.5, max_exemplars=16)
    sampler = DPSampler(model, selector, budget_of(releases=20), shots=4, top_k=2, max_tokens=3)
    assert set(sampler.invoke("q")) <= {"a", "b"}
    assert [text for opened in model.opened for text in opened if "text" in text]
    elsewhere = PostgresExemplarStore.open(module_url, embeddings, name="written")
    elsewhere.forget("owner-3")
    elsewhere.close()
    model.opened.clear()
    sampler.invoke("q")
    assert sorted(key[1] for key in model.forgotten) == [6, 7]  # type: ignore[index]
    assert not [text for opened in model.opened for text in opened if "text 3." in text]
