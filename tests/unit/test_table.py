"""A table: what a text says, what an owner moves, its noise and bars, its journal, its file, and what it answers."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.language_models import FakeListLLM
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel, Field
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import norm
from sum_noise import Noise

from langchain_dpicl import ExemplarStore, PrivacyBudget, PrivateTable, release_table
from langchain_dpicl.errors import (
    InvalidParameter,
    ModelLost,
    ModelUnavailable,
    PlanMismatch,
    PrivacyBudgetExceeded,
    PrivacyWarning,
    ReleaseFailed,
)
from langchain_dpicl.once import sums, tables_release
from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.table import simultaneous_bars
from langchain_dpicl.once.tables_reading import Domain, folded

EMBEDDINGS = DeterministicFakeEmbedding(size=6)
TOPICS = ["The Vaults", "Café Sol", "Old Mill"]
COLUMNS = {"near": ["Harbour", "Castle", "Town Hall"], "kind": ["pub", "coffee shop"]}
CANARY = "Zebedee Quill, born 12 May"


def text_of(i: int) -> str:
    topic = i % 3
    return f"{TOPICS[topic].upper()} is a {COLUMNS['kind'][topic % 2]} close to the {COLUMNS['near'][topic]}'s gate."


def store_of(texts: list[tuple[str, str]], **how: Any) -> ExemplarStore:
    """Records of owners and texts."""
    rows = [{"input": text, "owner": owner} for owner, text in texts]
    how = {"output_key": None, "owner_key": "owner", "progress": False, **how}
    return ExemplarStore.from_records(rows, how.pop("embeddings", EMBEDDINGS), **how)


def ordinary(owners: int = 120) -> ExemplarStore:
    return store_of([(f"o{i}", text_of(i)) for i in range(owners)])


@pytest.fixture
def budgets(tmp_path: Path) -> Iterator[Any]:
    opened: list[PrivacyBudget] = []

    def make(epsilon: float = 8.0, count: int = 1, **how: Any) -> PrivacyBudget:
        url = f"sqlite:///{tmp_path}/{len(opened)}.db"
        opened.append(PrivacyBudget(epsilon, 1e-5, {"sum": count}, ledger=url, **how))
        return opened[-1]

    yield make
    for budget in opened:
        budget.close()


# -- what a text says --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "topics", "values"),
    [
        ("The VAULTS, near the harbour.", {"The Vaults"}, {"Harbour"}),
        ("cafe sol: a Coffee-Shop!", {"Café Sol"}, {"coffee shop"}),
        ("CAFE\u0301 SOL and old mill, in the pub", {"Café Sol", "Old Mill"}, {"pub"}),
        ("the vault, pubs, harbours", set(), set()),
        ("Castle Town Hall", set(), {"Castle", "Town Hall"}),
        ("", set(), set()),
        ("\ud800 pub \x00", set(), {"pub"}),
    ],
)
def test_a_text_says_what_it_names_by_whole_words(text: str, topics: set[str], values: set[str]) -> None:
    domain = Domain(tuple(TOPICS), {name: tuple(each) for name, each in COLUMNS.items()})
    under, told = domain.named(text)
    assert {TOPICS[i] for i in under} == topics
    assert {domain.values[i][1] for i in told} == values


def test_the_longest_name_wins_and_a_topic_is_no_value_of_itself() -> None:
    domain = Domain(("Burger King", "Rice", "Castle"), {"v": ("King", "Castle", "Rice Boat")})
    assert domain.named("Burger King by the Rice Boat") == ({0}, {2})
    under, told = domain.named("Castle, king")
    assert (under, told) == ({2}, {0, 1})
    assert domain.pairs(under, told) == [(2, 0)]


def test_folding_drops_case_accents_and_what_is_invisible_and_nothing_else() -> None:
    assert folded("Straße É\u200b x-RAY 7") == ("strasse", "e", "x", "ray", "7")
    assert folded("кофе") != folded("чай")
    assert folded("किताब") != folded("कताब")


@pytest.mark.parametrize(
    ("topics", "values", "named"),
    [
        (["A", "a"], ["x"], r"topics\[1\]"),
        (["Café", "cafe\u0301!"], ["x"], r"topics\[1\]"),
        (["A"], ["x", "X."], r"values\[1\]"),
        (["A"], {"c": ["x", "x"]}, r"values\['c'\]\[1\]"),
        (["A"], {"c": ["x"], "C": ["y"]}, r"values\[1\]"),
        (["A"], {}, "values"),
        ([], ["x"], "topics"),
        (["A"], [], "values"),
        (["?"], ["x"], r"topics\[0\]"),
        ([3], ["x"], r"topics\[0\]"),
        ("A", ["x"], "topics"),
        (["A"], "x", "values"),
        (["A"], 3, "values"),
    ],
)
def test_names_that_are_none_or_equal_are_refused(topics: Any, values: Any, named: str, budgets: Any) -> None:
    budget = budgets()
    with pytest.raises(InvalidParameter, match=named):
        release_table(ordinary(3), topics, values, budget)
    assert not budget.is_frozen


def test_bad_input_costs_nothing(budgets: Any, tmp_path: Path) -> None:
    budget = budgets()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"store": "a store"}, "store"),
        ({"budget": "a budget"}, "budget"),
        ({"budget": budgets(scope="per_principal")}, "scope"),
        ({"at_most": 0}, "at_most"),
        ({"owners": 0}, "owners"),
        ({"read": "by heart"}, "read"),
        ({"read": 3}, "read"),
        ({"threshold": 0.5}, "threshold"),
        ({"read_name": "prompt"}, "read_name"),
        ({"read": lambda _: {}, "read_name": 3}, "read_name"),
        ({"records_per_owner": 0}, "records_per_owner"),
        ({"read": EMBEDDINGS}, "threshold"),
        ({"read": EMBEDDINGS, "threshold": 2.0}, "threshold"),
        ({"output": tmp_path, "budget": budgets()}, "output"),
        ({"line": "votes"}, "line"),
        ({"topics": [f"t{i}" for i in range(2000)], "values": [f"v{i}" for i in range(3000)]}, "cells"),
    ]
    for change, named in cases:
        given: dict[str, Any] = {
            "store": ordinary(), "topics": TOPICS, "values": COLUMNS, "budget": budget, **change
        }  # fmt: skip
        with pytest.raises(InvalidParameter, match=named):
            release_table(**given)
    assert not budget.is_frozen
    empty = ordinary(1)
    empty.forget("o0")
    release_table(empty, TOPICS, COLUMNS, budgets())  # a refusal would tell that nobody is there


def test_a_table_of_too_many_cells_is_warned_of_from_public_numbers(budgets: Any) -> None:
    with pytest.warns(
        PrivacyWarning, match=r"15 cells for 30 owners: .* 2.98 on average.* margin of 14.\d.* 10 own"
    ) as w:
        release_table(ordinary(), TOPICS, COLUMNS, budgets(1.0), owners=30)
    assert w[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        release_table(ordinary(), TOPICS, COLUMNS, budgets(1.0), owners=90)


# -- what an owner moves -----------------------------------------------------------------------------------------------


def test_an_owner_of_many_records_moves_a_table_by_1_at_most_and_no_other_owner(silence: Noise, budgets: Any) -> None:
    """In whole numbers: five hundred records that say everything, some of them broken, beside others."""
    everything = [f"{topic}: {value}" for topic in TOPICS for each in COLUMNS.values() for value in each]
    greedy = [("greedy", f"{everything[i % len(everything)]} {i}") for i in range(500)] + [("greedy", "\x00")]
    others = [(f"o{i}", text_of(i)) for i in range(30)]
    for at_most in (2, 4, 100):  # others have two pairs, so none of their coins falls
        made = [
            release_table(store_of(rows), TOPICS, COLUMNS, budgets(), owners=1000, at_most=at_most)
            for rows in (others, others + greedy, greedy + others)
        ]
        without, present, first = (np.rint(table.counts * LATTICE).astype(np.int64) for table in made)
        assert 0.999 * LATTICE**2 < sum(int(x) ** 2 for x in (present - without).ravel()) <= LATTICE**2
        if at_most > 4:
            assert (present == first).all()


def test_a_text_that_names_no_topic_is_under_the_nearest_whoever_is_read_beside_it(
    silence: Noise, budgets: Any
) -> None:
    """By whole numbers, so that no other row changes it: twelve texts alone, and together, to the last bit."""
    rows = [(f"o{i}", f"a {COLUMNS['kind'][i % 2]}, visit {i}") for i in range(12)]
    together = release_table(store_of(rows), TOPICS, COLUMNS, budgets(), owners=1000).counts
    alone = sum(release_table(store_of([row]), TOPICS, COLUMNS, budgets(), owners=1000).counts for row in rows)
    assert (together == alone).all()
    assert together.sum() == pytest.approx(12)
    assert (together[:, 3:].sum(axis=1) > 0).all()  # each topic is some text's nearest
    named = release_table(store_of(rows), TOPICS, COLUMNS, budgets(), read="named", owners=1000)
    assert not named.counts.any()
    assert named.reading == {"records": 12, "silent": 12}


class TwoWords(Embeddings):
    """Counts of "red" and "round"; it fails on what says so, and keeps what it was asked."""

    def __init__(self, name: str = "two") -> None:
        self.model = name
        self.asked: list[list[str]] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.asked.append(texts)
        if "fail" in texts[0]:
            raise ValueError(texts[0])
        return [[1e-3 + text.count("red"), 1e-3 + text.count("round")] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def test_an_embedding_model_reads_by_a_threshold_each_text_alone(silence: Noise, budgets: Any) -> None:
    rows = [("a", "red red"), ("b", "round red"), ("c", "round")]
    model = TwoWords()
    store = store_of(rows, embeddings=model)
    model.asked.clear()
    table = release_table(store, ["red"], ["round", "red thing"], budgets(), read=model, threshold=0.7)
    assert np.round(table.counts, 3).tolist() == [[0.707, 1.707]]  # b says both, a the second, c is under no topic
    assert table.reading == {"records": 3, "silent": 1}
    assert [len(texts) for texts in model.asked] == [1, 2]  # topics and values alone: the store has the vectors
    with pytest.raises(InvalidParameter, match="the model of the store's vectors"):  # it would see private texts
        release_table(store, ["red"], ["round"], budgets(), read=TwoWords("another"), threshold=0.7)


class Breaking(FakeListLLM):
    """Names one visit, until it meets a poison: then it fails for ever, or on that text alone."""

    responses: list[str] = Field(default=['{"topic": "Old Mill", "kind": "pub"}'])
    breaks: bool = True
    broken: list[str] = Field(default_factory=list)

    def _call(self, prompt: str, *rest: Any, **more: Any) -> str:
        if prompt == "poison" or (self.broken and self.breaks):
            self.broken.append(prompt)
            raise ConnectionError(prompt)
        return self.responses[0]


class Near(Enum):
    HARBOUR = "Harbour"
    CASTLE = "Castle"


class Visit(BaseModel):
    """A chain's answer."""

    topic: str
    near: Near | None = None
    kind: Literal["pub", "coffee shop"] | None = None
    open: bool = True
    note: str = ""


class Topicless(BaseModel):
    """An answer that names no topic."""

    kind: Literal["pub", "coffee shop"]


def test_a_chain_reads_each_text_by_a_call_of_its_own_and_what_is_no_value_adds_nothing(
    silence: Noise, budgets: Any
) -> None:
    def answer(text: str) -> Any:
        return {
            "one": Visit(topic="CAFE SOL", near=Near.CASTLE, kind="pub"),
            "two": [{"topic": "Old Mill", "kind": ["pub", "zoo"]}, {"topic": "Old Mill", "near": "the moon"}],
            "three": {"topic": "nowhere", "kind": "pub"},
            "four": "no mapping",
            **dict.fromkeys(TOPICS),
        }[text]

    rows = [("a", "one"), ("b", "two"), ("c", "three"), ("d", "four"), ("e", "five fails"), ("f", "one"), ("f", "two")]
    table = release_table(store_of(rows), TOPICS, Visit, budgets(), read=RunnableLambda(answer), owners=1000)
    assert dict(table.columns) == {
        "near": ("Harbour", "Castle"), "kind": ("pub", "coffee shop"), "open": ("True", "False")
    }  # fmt: skip
    each, of_four = 3**-0.5, 0.5
    expected = np.zeros((3, 6))
    expected[1, [1, 2, 4]] = each + of_four
    expected[2, 2] = 1 + of_four
    assert table.counts == pytest.approx(expected)
    assert table.reading == {"records": 7, "silent": 3}
    with pytest.raises(ModelUnavailable, match="public text"):
        release_table(store_of(rows), TOPICS, Visit, budgets(), read=lambda text: 1 / 0, owners=1000)
    with pytest.raises(InvalidParameter, match="values"):
        release_table(store_of(rows), TOPICS, BaseModel, budgets(), read=answer)
    with pytest.raises(InvalidParameter, match='a field "topic"'):
        release_table(store_of(rows), TOPICS, Topicless, budgets(), read=RunnableLambda(answer))


def test_of_an_owner_so_many_records_are_read_and_its_own_coins_choose_them(silence: Noise, budgets: Any) -> None:
    """Twenty records of one owner, each with a pair of its own, before and after others' single ones."""
    values = [f"v{i}" for i in range(20)]
    calls: list[str] = []

    def answer(text: str) -> Any:
        calls.append(text)
        return {"topic": "Old Mill", "value": text}

    rows = [("a", "v0"), *(("many", value) for value in values), ("z", "v1")]
    for read in ("named", RunnableLambda(answer)):
        texts = [(owner, f"Old Mill {text}" if read == "named" else text) for owner, text in rows]
        how: dict[str, Any] = {"read": read, "owners": 1000, "at_most": 100}
        chosen = []
        for _ in range(4):
            table = release_table(store_of(texts), TOPICS, values, budgets(), records_per_owner=5, **how)
            assert table.reading == {"records": 7, "silent": 0}
            own = table.counts[2].copy()
            own[[0, 1]] -= 1
            assert sorted(np.round(own[own > 0.01], 3)) == [0.447] * 5
            chosen.append(tuple(np.flatnonzero(own > 0.01)))
        assert len(set(chosen)) > 1  # all four are equal with probability 15504^-3 = 3e-13
    assert release_table(store_of(texts), TOPICS, values, budgets(), **how).reading["records"] == 22


def test_a_chain_may_have_a_public_name_under_which_alone_its_release_goes_on(
    budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, budget, output = ordinary(3), budgets(), tmp_path / "table.json"
    how: dict[str, Any] = {"read": lambda _: {}, "output": output}
    interrupted(0, monkeypatch, store, TOPICS, COLUMNS, budget, read_name="prompt 1", **how)
    for other in ("prompt 2", None):
        with pytest.raises(InvalidParameter, match="same settings"):
            release_table(store, TOPICS, COLUMNS, budget, read_name=other, **how)
    release_table(store, TOPICS, COLUMNS, budget, read_name="prompt 1", **how)
    assert budget.spent() == 1


def test_a_function_opens_the_budget_when_the_rest_is_checked(budgets: Any, tmp_path: Path) -> None:
    """As of a head: what another budget would refuse is refused before this one is opened."""
    asked: list[PrivacyBudget] = []

    def opening(check: Any) -> PrivacyBudget:
        check(budgets())
        asked.append(budgets())
        return asked[-1]

    (tmp_path / "there.json").touch()
    for wrong in ({"output": tmp_path / "there.json"}, {"line": "votes"}, {"at_most": 0}, {"records_per_owner": 0}):
        with pytest.raises(InvalidParameter):
            release_table(ordinary(3), TOPICS, COLUMNS, opening, **wrong)
    assert not asked
    release_table(ordinary(3), TOPICS, COLUMNS, opening)
    assert asked[0].spent() == 1


def test_a_text_that_ends_the_model_takes_no_other_text_with_it(
    silence: Noise, budgets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release waits for the model, and then ends without a table, instead of one without the other owners."""
    monkeypatch.setattr("langchain_dpicl.once.probing.PATIENCE", 0.0)
    model = Breaking()
    rows = [("a", "one"), ("b", "poison"), ("c", "two")]
    with pytest.raises(ModelLost):
        release_table(store_of(rows), TOPICS, Visit, budgets(), read=model | JsonOutputParser(), owners=1000)
    model.breaks = False
    table = release_table(store_of(rows), TOPICS, Visit, budgets(), read=model | JsonOutputParser(), owners=1000)
    assert table.counts.sum() == pytest.approx(2.0), "the text's own failure is its own"


def test_without_a_number_of_owners_none_is_made_public(silence: Noise, budgets: Any) -> None:
    plans = set()
    for owners in (31, 32):
        store = store_of([(f"o{i}", "pub Old Mill") for i in range(owners)])
        table = release_table(store, TOPICS, COLUMNS, budgets(), read="named")
        plans.add(table.receipt["plan"])
    assert len(plans) == 1


def test_a_text_of_thousands_of_pairs_says_nothing(silence: Noise, budgets: Any) -> None:
    names = [f"name{i}" for i in range(70)]
    values = [f"value{i}" for i in range(70)]
    rows = [("a", " ".join(names + values)), ("b", "name3 value5")]
    table = release_table(store_of(rows), names, values, budgets(), read="named")
    assert table.reading == {"records": 2, "silent": 1}
    assert table.counts[3, 5] == pytest.approx(1.0)


# -- its noise ---------------------------------------------------------------------------------------------------------


def test_every_cell_has_noise_also_where_nobody_says_anything(budgets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One draw of the plan's sigma for all cells, and of the real generator no zero among 300 empty cells."""
    source = Noise()
    monkeypatch.setattr(sums, "SecureRandomness", lambda: source)
    budget = budgets()
    release_table(ordinary(), TOPICS, COLUMNS, budget)
    assert source.asked == [(budget.plan.lines["sum"].parameter * LATTICE, 15)]
    monkeypatch.undo()
    values = [f"v{i}" for i in range(100)]
    table = release_table(ordinary(), TOPICS, values, budgets(), owners=10_000)
    # a cell's noise is 0 with probability 1e-11; below, the mean square of 300 cells: outside with 1e-9 (chi squared)
    assert (table.counts != 0).all()
    assert 0.6 < float((table.counts**2).mean()) / table.sigma**2 < 1.6


def test_the_bar_of_a_cell_is_passed_by_noise_in_five_of_a_hundred_tables_exactly() -> None:
    for cells, sigma in ((748, 1.0), (1, 2.0), (10_000, 0.5)):
        bar = simultaneous_bars(sigma, cells, 0.95).cell
        assert float(ndtr(bar / sigma)) ** cells == pytest.approx(0.95, abs=1e-9)
    assert simultaneous_bars(1.0, 748, 0.95).cell == pytest.approx(3.81, abs=0.005)
    assert simultaneous_bars(1.0, 748, 0.95).margin == pytest.approx(3.81 * math.sqrt(2), abs=0.01)


def test_no_ties_make_a_false_first_value_likelier_than_the_bar_of_margins_says() -> None:
    """Exact integrals: k values that tie at the top, of which any that is called first is a false alarm.

    Two are the worst, and then the false alarms of 374 rankings, all at once, add up to 5 % exactly. A bar of one
    ranking alone would call one of 34 empty topics known in most tables.
    """
    bar = simultaneous_bars(1.0, 748, 0.95).margin

    def called(ties: int, bar: float) -> float:
        density = lambda x: norm.pdf(x) * ndtr(x - bar) ** (ties - 1)  # noqa: E731
        return ties * float(quad(density, -10, 14, points=[bar / 2], epsabs=1e-13, limit=400)[0])

    chances = [called(ties, bar) for ties in range(2, 23)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == pytest.approx(2 * float(ndtr(-bar / math.sqrt(2))), rel=1e-6)
    assert 1 - (1 - chances[0]) ** 374 == pytest.approx(0.05, rel=1e-4)
    alone = simultaneous_bars(1.0, 2, 0.95).margin
    assert 1 - (1 - called(2, alone)) ** 34 > 0.8


def test_a_value_slightly_behind_is_called_first_less_often_than_one_that_ties() -> None:
    """Exact: the true second, by a gap, ahead by more than the bar. The bound of the proof holds for every gap."""
    bar = simultaneous_bars(1.0, 4, 0.95).margin
    wrong = [float(ndtr(-(bar + gap) / math.sqrt(2))) for gap in (0.0, 0.1, 1.0)]
    assert wrong == sorted(wrong, reverse=True)
    assert wrong[0] < 2 * float(ndtr(-bar / math.sqrt(2)))


# -- what it answers ---------------------------------------------------------------------------------------------------


def table_of(counts: Any, columns: Any = None, sigma: float = 1.0, **how: Any) -> PrivateTable:
    receipt: Any = {
        "id": "b:sum:1", "budget": "b", "plan": "p", "line": "sum", "number": 1, "principal": None,
        "assumption": "", "mechanism": "", "epsilon_spent": 1.0, "epsilon": 1.0, "delta": 1e-5, "remaining": 0,
        "tokens": None, "outcome": "released", "replayed": False, "query": "", "time": "",
    }  # fmt: skip
    return PrivateTable(np.array(counts, np.float64), TOPICS, columns or COLUMNS, sigma, receipt, **how)


COUNTS = [[50, 3, -1, 2, 1], [20, 18, 1, 0, 40], [0, 0, 0, -3, -9]]


def test_the_first_value_is_known_if_its_margin_clears_the_bar() -> None:
    table = table_of(COUNTS)
    first = table.top("the vaults", "NEAR")
    assert (first.value, first.is_known, first.margin, str(first)) == ("Harbour", True, 47.0, "Harbour")
    assert first.bars == table.bars() == simultaneous_bars(1.0, 15, 0.95)
    close = table.top("cafe sol", "near")
    assert (close.value, close.is_known, close.margin, str(close)) == ("Harbour", False, 2.0, "not known")
    empty = table.top("Old Mill", "kind")
    assert empty.margin > empty.bars.margin
    assert not empty.is_known  # ahead by far, but nobody need have said it
    assert table.top("Café Sol", "kind").is_known
    assert table.answers() == [table.top(topic, column) for topic in TOPICS for column in COLUMNS]
    assert not table_of(np.array(COUNTS) / 8).top("Café Sol", "kind", confidence=1 - 1e-9).is_known
    for topic, column, named in (
        ("Mill", "near", "topic"),
        ("Old Mill", "far", "column"),
        ("Old Mill", None, "column"),
    ):
        with pytest.raises(InvalidParameter, match=named):
            table.top(topic, column)
    single = table_of([[9.0], [1.0], [0.0]], {"value": ["yes"]})
    assert [single.top(topic).is_known for topic in TOPICS] == [True, False, False]


def test_passages_say_what_is_known_and_what_was_too_noisy_to_tell() -> None:
    table = table_of(COUNTS)
    vaults, sol, _ = table.documents()
    assert vaults.page_content.startswith("The Vaults, near: Harbour. The Vaults, kind: not known; first by")
    assert "kind: coffee shop." in sol.page_content
    assert "is Harbour." in sol.page_content
    assert (vaults.metadata["topic"], vaults.metadata["known"]) == ("The Vaults", ["near"])
    assert vaults.metadata["receipt"] == table.receipt
    sure = [each.page_content for each in table.documents(guesses=False)]
    assert sure[1] == "Café Sol, near: not known. Café Sol, kind: coffee shop."
    alone = table_of([[9.0, 0], [1, 0], [0, 0]], {"value": ["yes", "no"]})
    assert alone.documents(guesses=False)[0].page_content == "The Vaults: yes."


def test_a_retriever_finds_the_topics_that_are_named_and_else_the_nearest() -> None:
    table = table_of(COUNTS, embeddings=EMBEDDINGS)
    retriever = table.as_retriever()
    found = retriever.invoke("Is old mill or the CAFE SOL better?")
    assert [each.metadata["topic"] for each in found] == ["Café Sol", "Old Mill"]
    assert len(retriever.invoke("what?")) == 1
    assert len(table.as_retriever(k=2).invoke("what?")) == 2
    assert asyncio.run(retriever.ainvoke("the vaults"))[0].metadata["topic"] == "The Vaults"
    assert table_of(COUNTS).as_retriever().invoke("what?") == []


def test_a_tool_answers_with_a_passage_or_names_the_topics() -> None:
    tool = table_of(COUNTS).as_tool("look_up", "Facts about venues.")
    answer = tool.invoke({"type": "tool_call", "id": "1", "name": "look_up", "args": {"topic": "the vaults"}})
    assert answer.content.startswith("The Vaults, near: Harbour.")
    assert answer.artifact["id"] == "b:sum:1"
    assert tool.invoke({"topic": "Nowhere"}) == "No such topic. The topics are: The Vaults, Café Sol, Old Mill."


def test_a_data_frame_has_topics_by_columns_and_values() -> None:
    pandas = pytest.importorskip("pandas")
    frame = table_of(COUNTS).to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.loc["Café Sol", ("kind", "coffee shop")] == 40.0
    assert frame["near"].shape == (3, 3)


def test_a_heat_map_is_drawn(tmp_path: Path) -> None:
    plots = pytest.importorskip("langchain_dpicl.lab.plots")
    pytest.importorskip("matplotlib")
    plots.draw_table(table_of(COUNTS), tmp_path / "table.png")
    assert (tmp_path / "table.png").stat().st_size > 5000


def test_a_table_is_saved_and_read_without_pickle_to_the_last_bit(budgets: Any, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table = release_table(ordinary(), TOPICS, COLUMNS, budgets())
    table.save(path)
    again = PrivateTable.load(path, EMBEDDINGS)
    assert (again.counts == table.counts).all()
    assert (again.topics, again.columns, again.sigma) == (table.topics, table.columns, table.sigma)
    assert again.receipt == table.receipt
    assert (again.reading, pickle.loads(pickle.dumps(table)).reading) == (None, None)  # noqa: S301
    assert table.reading == {"records": 120, "silent": 0}
    assert b"records" not in path.read_bytes()
    assert "o1" not in repr(table)
    whole = json.loads(path.read_text())
    damaged: list[Any] = [
        b"{", b"\xff", [], {**whole, "format": "dpicl-head-1"}, {**whole, "counts": [[1]]},
        {**whole, "counts": [["x"] * 5] * 3}, {**whole, "sigma": 0}, {**whole, "topics": ["a", "A", "b"]},
        {**whole, "receipt": {}}, json.dumps(whole).replace(str(whole["counts"][0][0]), "NaN").encode(),
    ]  # fmt: skip
    for content in damaged:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        if b"NaN" in path.read_bytes():
            continue  # read as no number below
        with pytest.raises(InvalidParameter, match="a table's file"):
            PrivateTable.load(path)
    with pytest.raises(InvalidParameter, match="can be read"):
        PrivateTable.load(tmp_path / "nothing")
    with pytest.raises(InvalidParameter, match="can be written"):
        table.save(tmp_path / "no" / "folder")


# -- its journal -------------------------------------------------------------------------------------------------------


def interrupted(stop: int, patch: pytest.MonkeyPatch, *given: Any, **how: Any) -> Noise:
    """A release that is killed before its draw ``stop``; later ones draw on."""
    source = Noise(1, stop)
    patch.setattr(sums, "SecureRandomness", lambda: source)
    with pytest.raises(KeyboardInterrupt):
        release_table(*given, **how)
    source.stop = None
    return source


def test_a_release_that_is_killed_before_its_sum_goes_on_and_is_charged_once(
    budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, budget, output = ordinary(), budgets(), tmp_path / "table.json"
    source = interrupted(0, monkeypatch, store, TOPICS, COLUMNS, budget, output=output)
    assert (budget.spent(), output.exists()) == (1, False)
    with pytest.raises(InvalidParameter, match="same settings"):
        release_table(store, TOPICS[:2], COLUMNS, budget, output=output)
    table = release_table(store, TOPICS, COLUMNS, budget, output=output)
    assert budget.spent() == 1
    assert len(source.asked) == 1
    assert (PrivateTable.load(output).counts == table.counts).all()
    with pytest.raises(InvalidParameter, match="a table is there"):
        release_table(store, TOPICS, COLUMNS, budget, output=output)
    with pytest.raises(PrivacyBudgetExceeded):
        release_table(store, TOPICS, COLUMNS, budget)


def test_one_that_is_killed_after_its_sum_reads_nothing_again_and_one_after_its_answer_replays_it(
    budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum that the ledger has stands, however the store has changed since."""
    source = Noise(2)
    monkeypatch.setattr(sums, "SecureRandomness", lambda: source)
    for name, home in (("kept", tables_release.TableRelease), ("save", PrivateTable)):
        store, budget, output = ordinary(), budgets(), tmp_path / f"{name}.json"
        with monkeypatch.context() as patch:
            patch.setattr(home, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                release_table(store, TOPICS, COLUMNS, budget, output=output)
        drawn = len(source.asked)
        with monkeypatch.context() as patch:
            patch.setattr(tables_release.TableRelease, "_read", None)
            table = release_table(store, TOPICS, COLUMNS, budget, output=output)
        assert len(source.asked) == drawn
        assert budget.spent() == 1
        assert table.receipt["replayed"] is (name == "save")
        assert float(np.abs(table.counts).sum()) > 0


def test_a_failure_on_the_private_side_is_constant_and_charged(budgets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError(CANARY)

    monkeypatch.setattr(tables_release, "owner_sum", broken)
    budget = budgets()
    with pytest.raises(ReleaseFailed) as caught:
        release_table(ordinary(), TOPICS, COLUMNS, budget)
    assert (caught.value.__context__, caught.value.__cause__) == (None, None)
    assert CANARY not in str(caught.value)
    assert budget.spent() == 1


def test_no_text_of_a_record_leaves_in_a_table_its_file_its_passages_or_the_ledger(
    budgets: Any, tmp_path: Path
) -> None:
    rows = [(f"o{i}", f"{text_of(i)} {CANARY}") for i in range(60)]
    table = release_table(store_of(rows), TOPICS, COLUMNS, budgets(), output=tmp_path / "table.json")
    shown = [repr(table), str(vars(table)), *(each.page_content for each in table.documents())]
    for file in tmp_path.iterdir():
        shown.append(file.read_bytes().decode("latin-1"))
    assert len(shown) > 5
    assert not [text for text in shown if "Zebedee" in text]


def test_a_number_of_owners_that_was_declared_stands(budgets: Any) -> None:
    budget = budgets(count=2)
    release_table(ordinary(), TOPICS, COLUMNS, budget, owners=500)
    assert budget.public_owners == 500
    with pytest.raises(PlanMismatch, match="owners"):
        release_table(ordinary(), TOPICS, COLUMNS, budget, owners=120)
    release_table(ordinary(90), TOPICS, COLUMNS, budget)
