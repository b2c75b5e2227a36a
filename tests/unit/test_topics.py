"""Topics: of terms and of a text, what an owner moves, the two charges, their journal, and the report."""

from __future__ import annotations

import json
import math
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import FakeListLLM
from langchain_core.runnables import RunnableLambda
from scipy.special import ndtr
from sum_noise import Noise

from langchain_dpicl import ExemplarStore, PrivacyBudget, PrivateTable, PrivateTerms, PrivateTopics, release_topics
from langchain_dpicl.aggregators import Words
from langchain_dpicl.errors import InvalidParameter, PrivacyBudgetExceeded, StoreError
from langchain_dpicl.once import sums
from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.tables_reading import Domain
from langchain_dpicl.once.terms_reading import WordsAndPhrases
from langchain_dpicl.once.topics import ShareRange, names_of
from langchain_dpicl.once.topics_reading import ByTerms, clusters_of, weights_of
from langchain_dpicl.store.view import StoreView

CANARY = "zebedeequill"
SUBJECTS = {"money": ["refund", "invoice", "payment"], "entry": ["password", "login", "locked"]}
GROUPS = ["answered", "unanswered"]
SPLIT = {"status": GROUPS}


class BySubject(Embeddings):
    """A direction for each subject, and one for all other words. It fails on demand."""

    model = "subjects"
    fails = False

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        if self.fails:
            raise ValueError(texts[0])
        return [[*(1e-3 + sum(word in text for word in words) for words in SUBJECTS.values()), 1e-2] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


EMBEDDINGS = BySubject()


def row(owner: str, text: str, status: str = "answered") -> dict[str, str]:
    return {"input": text, "status": status, "owner": owner}


def questions(owners: int = 400) -> list[dict[str, str]]:
    """Three of four owners ask about money, and a third of these got no answer; the others about entry, answered."""
    rows = []
    for i in range(owners):
        words = SUBJECTS["entry" if i % 4 == 3 else "money"]
        text = f"Hello, my {words[i % 3]} and my {words[(i + 1) % 3]}: what now?"
        rows.append(row(f"o{i}", text, GROUPS[i % 4 == 0]))
    return rows


def store_of(rows: list[dict[str, str]], **how: Any) -> ExemplarStore:
    how = {"output_key": None, "owner_key": "owner", "progress": False, **how}
    return ExemplarStore.from_records(rows, how.pop("embeddings", EMBEDDINGS), **how)


@pytest.fixture
def budgets(tmp_path: Path) -> Iterator[Any]:
    opened: list[PrivacyBudget] = []

    def make(epsilon: float = 8.0, delta: float = 1e-5, releases: Any = None, **how: Any) -> PrivacyBudget:
        url = f"sqlite:///{tmp_path}/{len(opened)}.db"
        opened.append(PrivacyBudget(epsilon, delta, releases or {"terms": 1, "sum": 1}, ledger=url, **how))
        return opened[-1]

    yield make
    for budget in opened:
        budget.close()


def receipt_of(line: str) -> Any:
    return {
        "id": f"b:{line}:1", "budget": "b", "plan": "p", "line": line, "number": 1, "principal": None,
        "assumption": "", "mechanism": "", "epsilon_spent": 1.0, "epsilon": 1.0, "delta": 1e-5, "remaining": 0,
        "tokens": None, "outcome": "released", "replayed": False, "query": "", "time": "",
    }  # fmt: skip


def terms_of(counts: dict[str, float], threshold: float = 5.0) -> PrivateTerms:
    return PrivateTerms(list(counts), np.array([*counts.values()]), 1.0, threshold, receipt_of("terms"))


# -- topics of terms, and of a text ------------------------------------------------------------------------------------


def test_terms_are_divided_by_their_vectors_alone_in_the_order_of_the_terms() -> None:
    terms = ["login", "refund", "locked", "payment", "password"]
    vectors = np.array(EMBEDDINGS.embed_documents(terms))
    assert clusters_of(terms, vectors, 2) == [("login", "locked", "password"), ("refund", "payment")]
    assert clusters_of(terms, vectors, 1) == [tuple(terms)]
    assert sum(map(len, clusters_of(terms, vectors, 9))) == 5
    assert clusters_of(["one"], vectors[:1], 3) == [("one",)]
    assert clusters_of([], vectors[:0], 3) == []


def test_a_text_is_of_the_topic_whose_terms_weigh_most_and_what_all_say_decides_nothing() -> None:
    terms = terms_of({"hello": 800.0, "please": 700.0, "thanks": 650.0, "refund": 20.0, "login": 20.0})
    weights = weights_of(terms)
    assert weights["hello"] == 1000
    assert weights["refund"] == round(1000 * math.log2(41))
    clusters = [("hello", "please", "thanks"), ("refund",), ("login",)]
    domain = Domain(tuple(names_of(clusters)), {"status": ("answered", "Not answered", "True", "none")})
    reader = ByTerms(domain, WordsAndPhrases(Words(), 1), clusters, weights, "status")

    def said(text: str, status: Any = "answered") -> list[tuple[int, int]]:
        return sorted(reader.said(text, {"status": status}, {}))

    assert said("Hello please, a REFUND! Thanks") == [(1, 0)]
    assert said("Hello, thanks") == [(0, 0)]
    assert said("refund or login?", "not  ANSWERED") == [(1, 1), (2, 1)]
    assert said("refund", True) == [(1, 2)]
    for text, status in (
        ("nothing of it", "answered"),
        ("refund", "open"),
        ("refund", None),
        ("refund", ["answered"]),
    ):
        assert said(text, status) == []


def test_a_record_that_cannot_be_read_says_nothing_and_the_others_speak(
    silence: Noise, budgets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = StoreView.read

    def spoilt(view: StoreView, rows: Any) -> Any:
        return [{} if row == 0 else record for row, record in zip(rows.tolist(), read(view, rows), strict=True)]

    monkeypatch.setattr(StoreView, "read", spoilt)
    topics = release_topics(store_of(questions()), budgets(), topics=2)
    assert sum(count for topic in topics.topics() for count in topic.counts.values()) == pytest.approx(399)


def test_names_of_topics_differ_by_their_words() -> None:
    names = names_of([("new york",), ("new", "york"), ("york", "x", "y", "z")])
    assert names == ["new york", "new, york (2)", "york, x, y"]
    Domain(tuple(names), {"owners": ("owners",)})


# -- what an owner moves -----------------------------------------------------------------------------------------------


def test_counts_are_numbers_of_owners_however_many_questions_each_has(silence: Noise, budgets: Any) -> None:
    """Without noise, by counting here: also for an owner of fifty questions, and for one of no group."""
    rows = questions()
    rows += [row("many", "my refund and my invoice", "unanswered")] * 50 + [row("none", "my refund", "open")]
    topics = release_topics(store_of(rows), budgets(), topics=2, split=SPLIT, owners=400)
    money, entry = topics.topics()
    expected = Counter((each["status"], "entry" if any(w in each["input"] for w in SUBJECTS["entry"]) else "money")
                       for each in questions())  # fmt: skip
    assert {"refund", "invoice", "payment"} <= set(money.terms)
    assert set(entry.terms) == set(SUBJECTS["entry"])
    assert money.counts == pytest.approx(
        {"answered": expected["answered", "money"], "unanswered": expected["unanswered", "money"] + 1}
    )
    assert entry.counts == pytest.approx({"answered": expected["answered", "entry"], "unanswered": 0}, abs=1e-9)
    assert topics.reading == {"records": 451, "silent": 1}
    assert [each["line"] for each in topics.receipts] == ["terms", "sum"]


def test_an_owner_of_many_topics_moves_the_sum_by_1_at_most_and_no_other_owner(silence: Noise, budgets: Any) -> None:
    """In whole numbers: a hundred questions of every kind beside others' single ones."""
    kinds = [word for words in SUBJECTS.values() for word in words]
    terms = terms_of(dict.fromkeys(["hello", *kinds], 50.0))
    greedy = [row("greedy", kinds[i % 6], GROUPS[i % 2]) for i in range(100)] + [row("greedy", "\x00")]
    others = questions(30)
    for at_most in (1, 4, 100):  # squares, so that counts are whole numbers of lattice steps again
        how: dict[str, Any] = {"terms": terms, "topics": 5, "split": SPLIT, "owners": 100, "topics_per_owner": at_most}
        tables = []
        for rows in (others, others + greedy, greedy + others):
            table = release_topics(store_of(rows), budgets(releases={"sum": 1}), **how).table
            assert table is not None
            tables.append(np.rint(table.counts / math.sqrt(at_most) * LATTICE).astype(np.int64))
        without, present, first = tables
        moved = sum(int(x) ** 2 for x in (present - without).ravel())
        assert 0 < moved <= LATTICE**2
        if at_most < 10:
            assert moved > 0.999 * LATTICE**2  # it has ten pairs, and gives as many as it may
        else:
            assert (present == first).all()


def test_every_pair_has_noise_of_the_plan_also_where_nobody_asks(budgets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Noise()
    monkeypatch.setattr(sums, "SecureRandomness", lambda: source)
    budget = budgets(releases={"sum": 1})
    terms = terms_of(dict.fromkeys(["refund", "login", "unheard"], 50.0))
    topics = release_topics(store_of(questions(5)), budget, terms=terms, topics=3, split=SPLIT, topics_per_owner=9)
    sigma = budget.plan.lines["sum"].parameter
    assert source.asked == [(sigma * LATTICE, 6)]
    assert topics.table is not None
    assert topics.table.sigma == pytest.approx(3 * sigma)


def test_a_word_of_one_owner_does_not_come_out_however_often_it_is_written(budgets: Any, tmp_path: Path) -> None:
    """With production's noise. False alarm: delta0, half of delta, which is 5e-8."""
    rows = questions() + [row("canary", f"{CANARY} {CANARY} my refund", "unanswered")] * 50
    output = tmp_path / "topics.json"
    topics = release_topics(store_of(rows), budgets(delta=1e-7), split=SPLIT, output=output)
    assert topics.terms.sharing_bound(1) <= 5e-8
    assert len(topics.terms) >= 6  # of words that a hundred owners write, at a threshold of 10
    shown = [topics.report(), repr(topics), str(vars(topics)), *(f.read_bytes().decode("latin-1") for f in
             tmp_path.iterdir())]  # fmt: skip
    assert len(shown) > 4
    assert not [text for text in shown if CANARY in text.lower()]


# -- two charges and their journal -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 1])
def test_a_release_that_is_killed_before_terms_or_sum_goes_on_and_pays_for_each_once(
    stop: int, budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Noise(1, stop)
    monkeypatch.setattr(sums, "SecureRandomness", lambda: source)
    store, budget, output = store_of(questions()), budgets(), tmp_path / "topics.json"
    how: dict[str, Any] = {"split": SPLIT, "topics": 2, "output": output}
    with pytest.raises(KeyboardInterrupt):
        release_topics(store, budget, **how)
    assert (budget.spent("terms"), budget.spent("sum"), output.exists()) == (1, stop, False)
    assert len(list(tmp_path.glob("topics.json.*.terms"))) == stop
    source.stop = None
    topics = release_topics(store, budget, **how)
    assert (budget.spent("terms"), budget.spent("sum"), len(source.asked)) == (1, 1, 2)
    assert PrivateTopics.load(output).report() == topics.report()
    assert [path.name for path in tmp_path.glob("topics*")] == ["topics.json"]
    with pytest.raises(InvalidParameter, match="a report of topics is there"):
        release_topics(store, budget, **how)
    assert budget.spent("terms") == 1


def test_a_release_that_is_killed_between_its_charge_and_its_work_goes_on(
    budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, killed = sums.SumRelease._begun, iter((True, False, True, False))

    def at_first_killed(*given: Any) -> Any:
        if next(killed):
            raise KeyboardInterrupt
        return begun(*given)

    monkeypatch.setattr(sums.SumRelease, "_begun", at_first_killed)
    store, budget, output = store_of(questions()), budgets(), tmp_path / "topics.json"
    for spent in ((1, 0), (1, 1)):
        with pytest.raises(KeyboardInterrupt):
            release_topics(store, budget, output=output)
        assert (budget.spent("terms"), budget.spent("sum")) == spent
    release_topics(store, budget, output=output)
    assert (budget.spent("terms"), budget.spent("sum")) == (1, 1)
    assert [path.name for path in tmp_path.glob("topics*")] == ["topics.json"]


def test_other_settings_or_terms_of_another_budget_do_not_go_on(
    budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Noise(1, 1)
    monkeypatch.setattr(sums, "SecureRandomness", lambda: source)
    store, budget, output = store_of(questions()), budgets(), tmp_path / "topics.json"
    with pytest.raises(KeyboardInterrupt):
        release_topics(store, budget, topics=2, output=output)
    source.stop = None
    with pytest.raises(InvalidParameter, match="same settings"):
        release_topics(store, budget, topics=1, output=output)
    with pytest.raises(InvalidParameter, match="terms of the budget"):
        release_topics(store, budgets(4.0), topics=2, output=output)
    release_topics(store, budget, topics=2, output=output)


def test_terms_outlive_embeddings_that_fail(budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(questions(), url=f"sqlite:///{tmp_path}/one.db")
    elsewhere = store_of(questions(), url=f"sqlite:///{tmp_path}/other.db")
    budget, output = budgets(), tmp_path / "topics.json"
    monkeypatch.setattr(EMBEDDINGS, "fails", True, raising=False)
    with pytest.raises(StoreError):
        release_topics(store, budget, output=output)
    monkeypatch.undo()
    (tmp_path / f"topics.json.march.{'0' * 16}.terms").touch()  # of a report with a longer name
    other: dict[str, Any] = {"store": store, "budget": budget, "output": output}
    for changed in ({"at_most": 3}, {"phrases": 2}, {"words": Words(stop_words=["the"])}, {"store": elsewhere}):
        with pytest.raises(InvalidParameter, match="of the same settings and store"):
            release_topics(**{**other, **changed})
    assert (budget.spent("terms"), budget.spent("sum")) == (1, 0)
    release_topics(store, budget, output=output)
    assert (budget.spent("terms"), budget.spent("sum")) == (1, 1)


def test_no_term_is_charged_without_a_sum_and_no_sum_without_a_term(budgets: Any, tmp_path: Path) -> None:
    budget = budgets(delta=1e-7, releases={"terms": 2, "sum": 1})
    store = store_of([row("a", "a word")])
    output = tmp_path / "topics.json"
    empty = release_topics(store, budget, split=SPLIT, output=output)
    assert (len(empty.terms), empty.topics(), empty.groups) == (0, [], ())  # a term of one owner passes with 2.5e-8
    assert "No word is used by enough owners" in empty.report()
    assert PrivateTopics.load(output).report() == empty.report()
    assert (budget.spent("terms"), budget.spent("sum")) == (1, 0)
    assert empty.receipt["line"] == "terms"
    release_topics(store, budget, terms=terms_of({"word": 9.0}))
    with pytest.raises(PrivacyBudgetExceeded):
        release_topics(store, budget)
    assert (budget.spent("terms"), budget.spent("sum")) == (1, 1)


def test_bad_input_costs_nothing(budgets: Any, tmp_path: Path) -> None:
    budget = budgets()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"store": "a store"}, "store"),
        ({"budget": "a budget"}, "budget"),
        ({"budget": budgets(scope="per_principal")}, "scope"),
        ({"budget": budgets(releases={"terms": 1})}, "line"),
        ({"budget": budgets(releases={"sum": 1})}, "line"),
        ({"at_most": 0}, "at_most"),
        ({"topics": 0}, "topics"),
        ({"topics_per_owner": 0}, "topics_per_owner"),
        ({"records_per_owner": 0}, "records_per_owner"),
        ({"owners": 0}, "owners"),
        ({"phrases": 4}, "phrases"),
        ({"words": "words"}, "words"),
        ({"terms": ["refund"]}, "terms"),
        ({"llm": "a model's name"}, "llm"),
        ({"split": "status"}, "split"),
        ({"split": {}}, "split"),
        ({"split": {"status": GROUPS, "kind": GROUPS}}, "split"),
        ({"split": {"?": GROUPS}}, r"split\[0\]"),
        ({"split": {"input": GROUPS}}, "split"),
        ({"split": {"status": "answered"}}, r"split\['status'\]"),
        ({"split": {"status": []}}, r"split\['status'\]"),
        ({"split": {"status": ["yes", "YES"]}}, r"split\['status'\]\[1\]"),
        ({"output": tmp_path}, "output"),
        ({"output": tmp_path / "no" / "topics.json"}, "output"),
        ({"line": "votes"}, "line"),
        ({"terms_line": "votes"}, "line"),
    ]
    store = store_of(questions(4))
    for change, named in cases:
        given: dict[str, Any] = {"store": store, "budget": budget, **change}
        with pytest.raises(InvalidParameter, match=named):
            release_topics(**given)
    assert budget.spent("terms") == budget.spent("sum") == 0


# -- the report --------------------------------------------------------------------------------------------------------


def made(counts: Any, groups: Any = GROUPS, sigma: float = 10.0, **how: Any) -> PrivateTopics:
    clusters = [("refund", "invoice", "payment", "money"), ("login",), ("parcel", "late")][: len(counts)]
    table = PrivateTable(np.array(counts, np.float64), names_of(clusters), {"status": groups}, sigma, receipt_of("sum"))
    terms = terms_of({term: 50.0 for cluster in clusters for term in cluster}, 21.5)
    return PrivateTopics(terms, clusters, table, 3, **how)


COUNTS = [[100.0, 300.0], [500.0, 20.0], [12.0, -3.0]]


def test_all_counts_are_within_the_error_at_once_with_the_probability_that_is_asked_for() -> None:
    """Exact: two-sided, over all pairs of topic and group."""
    for confidence in (0.5, 0.95, 0.999):
        error = made(COUNTS).topics(confidence)[0].error
        covered = (2 * float(ndtr(error / 10)) - 1) ** 6
        assert confidence <= covered < confidence + 0.07
    assert made(COUNTS).topics()[0].error == pytest.approx(26.4, abs=0.1)


def test_topics_come_by_their_counts_with_what_is_known_and_a_share_with_its_range() -> None:
    entry, money, parcels = made(COUNTS).topics()
    assert [each.terms[0] for each in (entry, money, parcels)] == ["login", "refund", "parcel"]
    error = entry.error
    assert money.count_words("unanswered") == "300 ± 26"
    assert (entry.is_known("unanswered"), entry.count_words("unanswered")) == (False, "not known")
    share = money.share("unanswered")
    assert share == pytest.approx((0.75, (300 - error) / 400, (300 + error) / 400))
    assert str(share) == "75% (68% to 82%)"
    assert entry.share("unanswered").low == 0.0
    assert not parcels.share("answered").is_known
    assert str(parcels.share("answered")) == "not known"
    assert made([[0.0, -1.0]]).topics()[0].share("answered") == ShareRange(0.5, 0.0, 1.0)


def test_a_share_of_three_groups_has_the_errors_of_the_others_too() -> None:
    (topic,) = made([[300.0, 100.0, 200.0]], ["a", "b", "c"]).topics()
    share = topic.share("a")
    error = topic.error
    assert share == pytest.approx((0.5, (300 - error) / (600 + error), (300 + error) / (600 - error)))


def test_the_report_is_a_table_of_what_is_known_and_says_what_the_numbers_mean() -> None:
    report = made(COUNTS, titles=["Money | back", "Entry", "Parcels"]).report("Questions in March")
    lines = report.splitlines()
    assert lines[0] == "# Questions in March"
    assert lines[2:4] == [
        "| topic | answered | unanswered | share of unanswered | words |", "| --- | --- | --- | --- | --- |"
    ]  # fmt: skip
    assert lines[5].startswith("| Money / back | 100 ± 26 | 300 ± 26 | 75% (68% to 82%) | refund, invoice")
    assert lines[6] == "| Parcels | not known | not known | not known | parcel, late |"
    for words in ("epsilon 1, delta 1e-05", "reaches 21.5", "b:terms:1, b:sum:1", "at most 3 pairs"):
        assert words in report
    single = PrivateTopics(made(COUNTS).terms, made(COUNTS).clusters, made(COUNTS).table, 1)
    assert "counts in at most 1 pair of topic and group." in single.report()
    alone = made([[100.0], [20.0], [300.0]], ["owners"]).report()
    assert "| topic | owners | words |" in alone
    assert "at most 3 topics" in alone
    assert str(made(COUNTS)) == made(COUNTS).report()


def test_a_model_names_topics_from_released_terms_alone_and_may_fail() -> None:
    topics = made(COUNTS)
    asked: list[str] = []

    def answer(prompt: Any) -> str:
        asked.append(str(prompt))
        if "login" in str(prompt):
            raise ValueError
        return "\n\n ## **Money back.** \nand more" if "refund" in str(prompt) else "word " * 11

    named = topics.named_by(RunnableLambda(answer))  # type: ignore[arg-type]
    assert named.titles == ("Money back", "login", "parcel, late")
    assert topics.titles == ("refund, invoice, payment", "login", "parcel, late")
    assert "refund, invoice, payment, money" in asked[0]
    assert topics.named_by(FakeListLLM(responses=["", "Entry", "!"])).titles[1:] == ("Entry", "parcel, late")


def test_a_model_names_what_is_released_and_saved(silence: Noise, budgets: Any, tmp_path: Path) -> None:
    output = tmp_path / "topics.json"
    llm = FakeListLLM(responses=["A title"])
    topics = release_topics(store_of(questions()), budgets(), topics=1, llm=llm, output=output)
    assert PrivateTopics.load(output).titles == topics.titles == ("A title",)
    assert topics.reading == {"records": 400, "silent": 0}


def test_topics_are_saved_and_read_without_pickle(tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    topics = made(COUNTS, titles=["a", "b", "c"])
    topics.reading = {"records": 7}
    topics.save(path)
    again = PrivateTopics.load(path)
    assert again.report() == topics.report()
    assert (list(again.terms), again.receipts, again.clusters) == (list(topics.terms), topics.receipts, topics.clusters)
    assert (again.reading, pickle.loads(pickle.dumps(topics)).reading) == (None, None)  # noqa: S301
    whole = json.loads(path.read_text())
    damaged: list[Any] = [
        b"{", [], {**whole, "format": "dpicl-table-1"}, {**whole, "clusters": []}, {**whole, "titles": ["a"]},
        {**whole, "terms": []}, {**whole, "per_owner": 0}, {**whole, "table": whole["table"][:3]},
    ]  # fmt: skip
    for content in damaged:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        with pytest.raises(InvalidParameter, match="a file of topics"):
            PrivateTopics.load(path)
    with pytest.raises(InvalidParameter, match="can be read"):
        PrivateTopics.load(tmp_path / "nothing")
