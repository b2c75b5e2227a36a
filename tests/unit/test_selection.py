"""`selection`: an owner's own coin, an owner's own member, and nothing else."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ears import Ears
from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.load import dumps
from langchain_core.prompts import FewShotPromptTemplate, FewShotPromptWithTemplates, PromptTemplate
from langchain_core.runnables import RunnableLambda
from moments import exemplars_of
from scipy import stats

from langchain_dpicl import (
    DPAggregate,
    ExemplarStore,
    InvalidParameter,
    InvalidRecords,
    NoisyVote,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivacyWarning,
    PrivateEnsemble,
    SealedRelease,
    UnsafeConfigurationError,
)
from langchain_dpicl.privacy import SecureRandomness
from langchain_dpicl.selection import Examples
from langchain_dpicl.store.view import StoreView

FALSE_ALARM = 1e-7  # of every statistical test below; there are about a dozen


def owner_of(exemplar: dict[str, Any]) -> int:
    """Which owner a text of `make_records` belongs to."""
    return int(exemplar["input"].split()[1].split(".")[0])


def texts(buckets: list[Examples]) -> list[list[str]]:
    return [[exemplar["input"] for exemplar in bucket] for bucket in buckets]


def placements(selector: PoissonExampleSelector, rounds: int, owners: int) -> np.ndarray:
    """For every round and owner: the member it sat in, or -1."""
    table = np.full((rounds, owners), -1)
    for i in range(rounds):
        for member, bucket in enumerate(selector.sample()):
            for exemplar in bucket:
                table[i, owner_of(exemplar)] = member
    return table


# -- frequencies -------------------------------------------------------------------------------------------------------

ROUNDS, OWNERS, MEMBERS, RATE = 6000, 12, 3, 0.4


@pytest.fixture(scope="module")
def table(store_of: Any, records: Any, seeded: Any) -> np.ndarray:
    selector = PoissonExampleSelector(store_of(records(OWNERS)), MEMBERS, rate=RATE, max_exemplars=OWNERS)
    selector._randomness = seeded(20261)
    return placements(selector, ROUNDS, OWNERS)


def test_every_owner_takes_part_with_the_rate(table: np.ndarray) -> None:
    """Chi-square over owners, false-alarm probability 1e-7. Tried with a coin of 0.42 in place of 0.4: p < 1e-15."""
    heads = (table >= 0).sum(axis=0)
    statistic = ((heads - ROUNDS * RATE) ** 2 / (ROUNDS * RATE * (1 - RATE))).sum()
    assert stats.chi2.sf(statistic, OWNERS) > FALSE_ALARM


def test_every_owner_draws_every_member_alike(table: np.ndarray) -> None:
    """Chi-square per owner over members, false-alarm probability 1e-7 altogether (Bonferroni). Tried with
    ``arange(len(chosen)) % members`` (round robin, as chunking does): p < 1e-20."""
    for owner in range(OWNERS):
        counts = np.bincount(table[table[:, owner] >= 0, owner], minlength=MEMBERS)
        assert stats.chisquare(counts).pvalue > FALSE_ALARM / OWNERS


def test_the_number_of_owners_in_a_bucket_is_binomial(table: np.ndarray) -> None:
    """Chi-square against Binomial(owners, rate / members), false-alarm probability 1e-7. A fixed-size or a balanced
    sample has no such spread: p < 1e-20."""
    sizes = (table == 0).sum(axis=1)
    top = 6
    expected = stats.binom.pmf(np.arange(top), OWNERS, RATE / MEMBERS)
    expected = np.append(expected, 1 - expected.sum()) * ROUNDS
    seen = np.append(np.bincount(np.minimum(sizes, top), minlength=top + 1)[:top], (sizes >= top).sum())
    assert stats.chisquare(seen, expected).pvalue > FALSE_ALARM


def test_owners_are_independent_of_one_another(table: np.ndarray) -> None:
    """For every pair of owners the joint table of (out, member 0, 1, 2) x (the same) against the product, chi-square
    with 9 degrees of freedom, false-alarm probability 1e-7 altogether (Bonferroni over 66 pairs). Tried with a
    fixed-size sample of five owners: p < 1e-20."""
    pairs = list(itertools.combinations(range(OWNERS), 2))
    for one, other in pairs:
        joint = np.zeros((MEMBERS + 1, MEMBERS + 1))
        np.add.at(joint, (table[:, one] + 1, table[:, other] + 1), 1)
        assert stats.chi2_contingency(joint).pvalue > FALSE_ALARM / len(pairs)


def test_the_operating_systems_generator_gives_the_same_frequencies(store_of: Any, records: Any) -> None:
    """Smoke test of the generator of production: inclusion and members, false-alarm probability 1e-7 each."""
    selector = PoissonExampleSelector(store_of(records(OWNERS)), MEMBERS, rate=RATE, max_exemplars=OWNERS)
    assert isinstance(selector._randomness, SecureRandomness)
    table = placements(selector, 1500, OWNERS)
    assert stats.binomtest(int((table >= 0).sum()), table.size, RATE).pvalue > FALSE_ALARM
    assert stats.chisquare(np.bincount(table[table >= 0], minlength=MEMBERS)).pvalue > FALSE_ALARM


def test_a_cap_keeps_owners_by_their_own_priorities(store_of: Any, records: Any, seeded: Any) -> None:
    """At rate 1 with a cap of two, the two who stay in a bucket are every owner alike: chi-square, false-alarm
    probability 1e-7. Tried with a cap that keeps the first in the store's order: p < 1e-20."""
    selector = PoissonExampleSelector(store_of(records(10)), 2, rate=1.0, max_exemplars=2)
    selector._randomness = seeded(5)
    table = placements(selector, 3000, 10)
    kept = (table >= 0).sum(axis=0)
    assert kept.sum() > 3000 * 3.9
    # Two of ten leave a place to one another, so the counts vary less than independent ones: the test is conservative.
    assert stats.chisquare(kept).pvalue > FALSE_ALARM


def test_an_owners_exemplars_are_drawn_alike(store_of: Any, records: Any, seeded: Any) -> None:
    """One of an owner's four exemplars enters, each as likely: chi-square, false-alarm probability 1e-7."""
    selector = PoissonExampleSelector(store_of(records(3, 4)), 2, rate=1.0, max_exemplars=9)
    selector._randomness = seeded(6)
    seen = np.zeros((3, 4))
    for _ in range(2000):
        for exemplar in itertools.chain.from_iterable(selector.sample()):
            owner, number = exemplar["input"].split()[1].split(".")
            seen[int(owner), int(number)] += 1
    assert (seen.sum(axis=1) == 2000).all()
    assert stats.chisquare(seen.ravel()).pvalue > FALSE_ALARM


# -- the coupling test -------------------------------------------------------------------------------------------------


class Chunking(PoissonExampleSelector):
    """Mistake 6 of the design: a Poisson sample of owners, cut into equal chunks."""

    def sample(self, rate: float | None = None) -> list[Examples]:
        chosen = self._randomness.coin_positions(self.store.owner_count, self.rate)
        with self.store.reading() as view:
            rows, _ = view.rows_of(chosen)
            return [Examples(view.read(part)) for part in np.array_split(rows, self.members)]


class FixedSize(PoissonExampleSelector):
    """Mistake 5: always the same number of owners, those with the smallest coins."""

    def sample(self, rate: float | None = None) -> list[Examples]:
        draw: Any = self._randomness
        owners = np.arange(self.store.owner_count)
        coins = [draw._unit(key, "coin") for key in self.store.owners]
        chosen = np.sort(owners[np.argsort(coins)][: max(1, round(self.rate * 11))])
        draw._chosen = chosen
        draw._keys = list(self.store.owners)
        members = draw.integers(self.members, len(chosen))
        with self.store.reading() as view:
            rows, position = view.rows_of(chosen)
            exemplars = view.read(rows)
        return [
            Examples(e for e, p in zip(exemplars, position, strict=True) if members[p] == member)
            for member in range(self.members)
        ]


class PerExemplarCoins(PoissonExampleSelector):
    """Mistake 7: coins and members by exemplar, so that one owner sits in several members."""

    def sample(self, rate: float | None = None) -> list[Examples]:
        draw: Any = self._randomness
        buckets = [Examples() for _ in range(self.members)]
        for exemplar in exemplars_of(self.store):
            if draw._unit(exemplar["input"], "coin") < self.rate:
                buckets[int(draw._unit(exemplar["input"], "member") * self.members)].append(exemplar)
        return buckets


SHAPES = {
    "one exemplar each": {"per_owner": [1] * 12, "exemplars_per_owner": 1, "max_exemplars": 20},
    "several exemplars": {"per_owner": [4] * 12, "exemplars_per_owner": 1, "max_exemplars": 20},
    "several enter": {"per_owner": [1, 5, 3, 2, 4, 1, 6, 2, 3, 1, 4, 2], "exemplars_per_owner": 3, "max_exemplars": 20},
    "the cap bites": {"per_owner": [1, 5, 3, 2, 4, 1, 6, 2, 3, 1, 4, 2], "exemplars_per_owner": 3, "max_exemplars": 4},
    "a cap of one": {"per_owner": [2] * 12, "exemplars_per_owner": 2, "max_exemplars": 1},
}


def changed_buckets(
    kind: type[PoissonExampleSelector],
    shape: dict[str, Any],
    rate: float,
    salts: range,
    store_of: Any,
    owner_keyed: Callable[..., Any],
    *,
    forget: bool = False,
) -> list[int]:
    """For every salt and owner: how many buckets differ between the store with and the store without this owner, under
    the same coins of all the others."""
    rows = [
        {"input": f"text {i}.{j}", "output": "Positive", "owner": f"owner-{i}"}
        for i, count in enumerate(shape["per_owner"])
        for j in range(count)
    ]
    np.random.default_rng(0).shuffle(rows)  # an owner's records need not lie together
    options = {key: shape[key] for key in ("exemplars_per_owner", "max_exemplars")} | {"rate": rate}

    def buckets(store: ExemplarStore, salt: int) -> list[list[str]]:
        selector = kind(store, 3, **options)
        selector._randomness = owner_keyed(store, salt)
        return texts(selector.sample())

    everyone = store_of(rows)
    answers = []
    for left_out in sorted({row["owner"] for row in rows}):
        if forget:
            without = store_of(rows)
            without.forget(left_out)
        else:
            without = store_of([row for row in rows if row["owner"] != left_out])
        for salt in salts:
            pairs = zip(buckets(everyone, salt), buckets(without, salt), strict=True)
            answers.append(sum(one != other for one, other in pairs))
    return answers


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rate", [0.3, 0.8, 1.0])
def test_without_one_owner_at_most_one_bucket_differs(shape: str, rate: float, store_of: Any, owner_keyed: Any) -> None:
    """The coupling that the guarantee rests on, for every owner: no chance is involved, so no false alarm."""
    changed = changed_buckets(PoissonExampleSelector, SHAPES[shape], rate, range(6), store_of, owner_keyed)
    assert max(changed) == 1
    if shape != "the cap bites" and shape != "a cap of one" and rate < 1:
        assert min(changed) == 0, "an owner who was not sampled changes nothing"


def test_forgetting_an_owner_is_the_same_as_never_having_had_it(store_of: Any, owner_keyed: Any) -> None:
    shape = SHAPES["the cap bites"]
    changed = changed_buckets(PoissonExampleSelector, shape, 0.8, range(3), store_of, owner_keyed, forget=True)
    assert max(changed) == 1


@pytest.mark.parametrize("max_calls", [None, 4])
def test_a_forgotten_owner_has_no_call_and_takes_nobodys_place(max_calls: int | None, store_of: Any) -> None:
    """Its number keeps a coin. A call without an example would cost as much as any other."""
    store = store_of([{"input": f"text {i}", "output": "Positive", "owner": f"owner-{i}"} for i in range(9)])
    for i in range(5):
        store.forget(f"owner-{i}")
    selector = PoissonExampleSelector(store, calls=2, max_calls=max_calls, rate=1.0)
    for _ in range(5):
        assert sorted(texts(selector.sample())) == [[f"text {i}"] for i in range(5, 9)]


@pytest.mark.parametrize("kind", [Chunking, FixedSize, PerExemplarCoins])
def test_the_coupling_test_finds_the_mistakes_made_elsewhere(
    kind: type[PoissonExampleSelector], store_of: Any, owner_keyed: Any
) -> None:
    changed = changed_buckets(kind, SHAPES["several exemplars"], 0.5, range(4), store_of, owner_keyed)
    assert max(changed) > 1


def test_all_exemplars_of_an_owner_sit_in_one_bucket(store_of: Any, records: Any, seeded: Any) -> None:
    selector = PoissonExampleSelector(store_of(records(9, 4)), 3, rate=0.7, exemplars_per_owner=3, max_exemplars=30)
    selector._randomness = seeded(7)
    for _ in range(200):
        homes: dict[int, set[int]] = {}
        for member, bucket in enumerate(selector.sample()):
            per_owner: dict[int, list[str]] = {}
            for exemplar in bucket:
                homes.setdefault(owner_of(exemplar), set()).add(member)
                per_owner.setdefault(owner_of(exemplar), []).append(exemplar["input"])
            assert all(len(found) == len(set(found)) == 3 for found in per_owner.values())
        assert all(len(members) == 1 for members in homes.values())


# -- size and cost -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [1, 2, 5])
def test_no_bucket_exceeds_the_cap(cap: int, store_of: Any, records: Any, seeded: Any) -> None:
    selector = PoissonExampleSelector(store_of(records(20, 3)), 2, rate=1.0, exemplars_per_owner=3, max_exemplars=cap)
    selector._randomness = seeded(8)
    sizes = [len(bucket) for _ in range(50) for bucket in selector.sample()]
    assert max(sizes) == cap


@pytest.mark.parametrize("rate", [1e-9, 0.01, 1.0])
def test_there_are_always_as_many_buckets_as_members(rate: float, store_of: Any, records: Any) -> None:
    selector = PoissonExampleSelector(store_of(records(5)), 7, rate=rate, max_exemplars=8)
    assert {len(selector.sample()) for _ in range(20)} == {7}
    store = selector.store
    for owner in list(store.owners):
        store.forget(owner)
    assert texts(selector.sample()) == [[]] * 7, "an empty store asks nothing but zero-shot prompts"


def test_the_plans_rate_replaces_the_selectors_own(store_of: Any, records: Any) -> None:
    selector = PoissonExampleSelector(store_of(records(30)), 2, rate=1e-9, max_exemplars=40)
    assert sum(map(len, selector.sample(1.0))) == 30
    assert sum(map(len, selector.sample())) == 0


def test_cost_grows_with_the_sample_and_not_with_the_store(
    embeddings: Any, counting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers drawn and texts read, no clock: at the same expected sample of 50 a store of 200 times the size costs the
    same. P(sample > 150) < 1e-29."""
    drawn = {}
    reads: list[int] = []
    read = StoreView.read
    monkeypatch.setattr(StoreView, "read", lambda view, rows: (reads.append(len(rows)), read(view, rows))[1])
    for owners in (500, 100_000):
        store = ExemplarStore.from_texts(
            ["t"] * owners, embeddings, vectors=np.ones((owners, 1), np.float32), progress=False
        )
        selector = PoissonExampleSelector(store, 5, rate=50 / owners, max_exemplars=100)
        selector._randomness = counting(9)
        reads.clear()
        assert sum(map(len, selector.sample())) == reads[0] < 150
        drawn[owners] = selector._randomness.drawn
    assert max(drawn.values()) < 4 * 150


def test_the_secure_generator_reads_few_random_bytes_for_a_large_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip sampling: a million owners at an expected 40 heads must not take a million coins."""
    import os

    taken = 0
    real = os.urandom

    def urandom(size: int) -> bytes:
        nonlocal taken
        taken += size
        return real(size)

    monkeypatch.setattr(os, "urandom", urandom)
    heads = SecureRandomness().coin_positions(1_000_000, 40 / 1_000_000)
    assert (np.diff(heads) > 0).all()
    assert taken < 50_000


# -- parameters --------------------------------------------------------------------------------------------------------

BAD_PARAMETERS: list[tuple[str, dict[str, Any]]] = [
    ("members", {"members": 1, "rate": 0.5}),
    ("members", {"members": 0, "rate": 0.5}),
    ("members", {"members": 2.0, "rate": 0.5}),
    ("members", {"members": True, "rate": 0.5}),
    ("members", {"members": "3", "rate": 0.5}),
    ("rate", {"members": 2, "rate": 0}),
    ("rate", {"members": 2, "rate": -0.1}),
    ("rate", {"members": 2, "rate": 1.0001}),
    ("rate", {"members": 2, "rate": float("nan")}),
    ("rate", {"members": 2, "rate": float("inf")}),
    ("rate", {"members": 2, "rate": "0.5"}),
    ("rate", {"members": 2, "rate": True}),
    ("shots", {"members": 2, "shots": 0}),
    ("shots", {"members": 2, "shots": 1.5}),
    ("shots", {"members": 2, "shots": 1, "rate": 0.5}),
    ("members", {}),
    ("members", {"members": 2, "calls": 2}),
    ("calls", {"calls": 0.5}),
    ("calls", {"calls": float("inf")}),
    ("shots", {"calls": 2, "shots": 1}),
    ("pad_to", {"calls": 2, "pad_to": 0}),
    ("pad_to", {"members": 2, "rate": 0.5, "max_exemplars": 8, "pad_to": 4}),
    ("pad_to", {"calls": 2, "pad_to": 4, "max_calls": 4}),
    ("max_calls", {"calls": 4, "max_calls": 3}),
    ("max_calls", {"members": 2, "rate": 0.5, "max_exemplars": 8, "max_calls": 4}),
    ("max_exemplars", {"members": 2, "rate": 0.5}),
    ("max_exemplars", {"members": 2, "rate": 0.5, "max_exemplars": 0}),
    ("max_exemplars", {"members": 2, "rate": 0.5, "max_exemplars": 2.5}),
    ("exemplars_per_owner", {"members": 2, "rate": 0.5, "exemplars_per_owner": 0}),
    ("exemplars_per_owner", {"members": 2, "rate": 0.5, "exemplars_per_owner": None}),
]


@pytest.mark.parametrize(("name", "parameters"), BAD_PARAMETERS, ids=str)
def test_a_parameter_out_of_bounds_is_named(name: str, parameters: dict[str, Any], store_of: Any, records: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        PoissonExampleSelector(store_of(records(10)), **parameters)
    assert caught.value.parameter == name


def test_something_else_than_a_store_is_refused_without_being_shown(canary: str) -> None:
    with pytest.raises(InvalidParameter, match="store") as caught:
        PoissonExampleSelector([{"input": canary}], 2, rate=0.5, max_exemplars=8)  # type: ignore[arg-type]
    assert canary not in str(caught.value)


def test_before_a_plan_is_frozen_too_few_owners_are_refused(store_of: Any, records: Any, budget_of: Any) -> None:
    """By the chain, which knows its budget: `tests/unit/test_public_settings.py` shows that a frozen plan's goes on."""
    store = store_of(records(10))
    with pytest.raises(InvalidParameter, match=r"shots=6 .*must not exceed the number of owners \(10\)"):
        sealed(PoissonExampleSelector(store, 2, shots=6), budget_of())
    for owner in list(store.owners):
        store.forget(owner)
    for how in ({"shots": 1}, {"rate": 0.5, "max_exemplars": 8}):
        with pytest.raises(InvalidRecords, match="empty"):
            sealed(PoissonExampleSelector(store, 2, **how), budget_of())


def sealed(selector: PoissonExampleSelector, budget: PrivacyBudget) -> SealedRelease:
    return PrivateEnsemble(selector, lambda _: "no") | DPAggregate(NoisyVote(["yes", "no"]), budget)


def test_shots_become_a_rate(store_of: Any, records: Any) -> None:
    selector = PoissonExampleSelector(store_of(records(80)), 10, shots=4)
    assert selector.rate == 0.5
    assert not selector.rate_is_explicit
    assert PoissonExampleSelector(store_of(records(80)), 10, rate=0.5, max_exemplars=8).rate_is_explicit


# -- what sampled exemplars show ---------------------------------------------------------------------------------------


@pytest.fixture
def examples(canary: str) -> Examples:
    return Examples([{"input": canary, "output": "Positive"}, {"input": "b", "output": "Negative"}], "input", "output")


def test_examples_show_their_number_and_format_as_text(examples: Examples, canary: str) -> None:
    assert repr(examples) == str(examples) == "<2 private examples>"
    assert canary not in repr([examples]) + repr({"examples": examples}) + dumps({"examples": repr(examples)})
    assert f"{examples}" == f"Input: {canary}\nOutput: Positive\n\nInput: b\nOutput: Negative"
    assert f"{Examples()}" == ""
    prompt = PromptTemplate.from_template("{examples}\n\nInput: {query}")
    assert prompt.invoke({"examples": examples, "query": "q"}).to_string().startswith(f"Input: {canary}\nOutput:")


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_examples_are_neither_pickled_nor_copied(way: Callable[[Any], Any], examples: Examples) -> None:
    with pytest.raises(UnsafeConfigurationError):
        way(examples)


def test_a_selector_shows_nothing_private(store_of: Any, records: Any, canary: str) -> None:
    selector = PoissonExampleSelector(store_of(records(4, secret=canary)), 2, rate=0.5, max_exemplars=8)
    assert repr(selector).startswith("PoissonExampleSelector(members=2, rate=0.5")
    assert canary not in repr(selector) + str(selector) + dumps(selector) + repr(vars(selector))
    with pytest.raises(UnsafeConfigurationError):
        pickle.dumps(selector)


# -- LangChain's selector ----------------------------------------------------------------------------------------------


def few_shot(selector: PoissonExampleSelector) -> FewShotPromptTemplate:
    return FewShotPromptTemplate(
        example_selector=selector,
        example_prompt=PromptTemplate.from_template("{input} => {output}"),
        suffix="{input} =>",
        input_variables=["input"],
    )


def test_outside_of_a_release_a_selection_warns(store_of: Any, records: Any) -> None:
    selector = PoissonExampleSelector(store_of(records(6)), 2, rate=1.0, max_exemplars=8)
    assert isinstance(selector, BaseExampleSelector)
    with pytest.warns(PrivacyWarning, match="no budget counts it"):
        chosen = selector.select_examples({"input": "x"})
    assert type(chosen) is list
    with pytest.warns(PrivacyWarning):
        few_shot(selector).invoke({"input": "x"})


def test_within_a_member_the_selector_gives_this_members_own_bucket(
    sealed_of: Callable[..., Any], store_of: Any, records: Any
) -> None:
    store = store_of(records(12))
    inner = PoissonExampleSelector(store, 3, rate=1.0, max_exemplars=8)
    seen: list[tuple[str, list[str]]] = Ears()

    def look(values: dict[str, Any]) -> dict[str, Any]:
        text = few_shot(inner).invoke({"input": values["input"]}).to_string()
        seen.append((text, [exemplar["input"] for exemplar in values["examples"]]))
        return values

    member = RunnableLambda(look) | few_shot(inner) | FakeListLLM(responses=["Positive"])
    sealed = sealed_of(member, store=store, members=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sealed.invoke({"input": "question"})
    assert len(seen) == 3
    for text, bucket in seen:
        assert text.count(" => ") == len(bucket)
        assert all(exemplar in text for exemplar in bucket)
    shown = [exemplar for _, bucket in seen for exemplar in bucket]
    assert len(shown) == len(set(shown)) > 0, "no owner is in two buckets; a bucket may be too full for one"
    assert set(shown) <= {exemplar["input"] for exemplar in exemplars_of(store)}


@pytest.mark.parametrize("kind", [FewShotPromptTemplate, FewShotPromptWithTemplates])
def test_a_few_shot_template_takes_what_records_say_as_it_stands(
    kind: Any, sealed_of: Callable[..., Any], store_of: Any, records: Any
) -> None:
    store = store_of([{**record, "input": '{"a": {input}} {{b}}'} for record in records(40)])
    few = {
        "example_selector": PoissonExampleSelector(store, 4, rate=1.0, max_exemplars=40),
        "example_prompt": PromptTemplate.from_template("{input} => {output}"),
        "suffix": "{input}" if kind is FewShotPromptTemplate else PromptTemplate.from_template("{input}"),
        "input_variables": ["input"],
    }
    member = kind(**few) | (lambda prompt: "Positive" if '{"a": {input}} {{b}} => ' in prompt.text else "Negative")
    assert sealed_of(member, store=store).invoke({"input": "q"}) == "Positive"
    with pytest.raises(UnsafeConfigurationError, match="f-string"):
        sealed_of(kind(**few, template_format="jinja2") | (lambda prompt: "Positive"), store=store)


def test_a_bucket_from_the_selector_is_a_copy(sealed_of: Callable[..., Any], store_of: Any, records: Any) -> None:
    """A member that changes what it was given changes neither the store nor another member."""
    store = store_of(records(6))
    selector = PoissonExampleSelector(store, 2, rate=1.0, max_exemplars=8)

    def spoil(values: dict[str, Any]) -> str:
        for exemplar in selector.select_examples(values):
            exemplar["input"] = "spoiled"
        values["examples"].clear()
        return "Positive"

    sealed_of(spoil, store=store, members=2).invoke({"input": "q"})
    assert "spoiled" not in repr(exemplars_of(store))


def test_adding_an_example_adds_it_to_the_store(store_of: Any, records: Any) -> None:
    store = store_of(records(2), owner_key=None)
    selector = PoissonExampleSelector(store, 2, rate=0.5, max_exemplars=8)
    assert selector.add_example({"input": "new", "output": "Positive"}) == 2
    assert store.owner_count == 3
