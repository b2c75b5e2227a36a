"""Terms: what a text and an owner give, what is released and what is not, the journal, the file, and their uses."""

from __future__ import annotations

import copy
import json
import logging
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from scipy.stats import binom
from sum_noise import Noise

from langchain_dpicl import (
    ExemplarStore,
    Keywords,
    LineRequest,
    PrivacyBudget,
    PrivateHead,
    PrivateTerms,
    Words,
    release_table,
    release_terms,
)
from langchain_dpicl.errors import (
    InvalidParameter,
    PlanMismatch,
    PrivacyBudgetExceeded,
    PrivacyWarning,
    ReleaseFailed,
)
from langchain_dpicl.lab.audit.draws import BlockRandomness
from langchain_dpicl.once import sums, terms_release
from langchain_dpicl.once.steps import LATTICE
from langchain_dpicl.once.terms_reading import LONGEST, WholeTexts, WordsAndPhrases, given_terms, term_of
from langchain_dpicl.once.terms_release import TermsRelease
from langchain_dpicl.privacy.noise import SecureRandomness

EMBEDDINGS = DeterministicFakeEmbedding(size=6)
CANARY = "zebedee"
PLACES = ["The Vaults", "Café Röd", "Old-Mill"]


def store_of(rows: list[tuple[str, str]], outputs: list[str] | None = None) -> ExemplarStore:
    """Records of owners and texts."""
    found = [{"input": text, "owner": owner} for owner, text in rows]
    for row, output in zip(found, outputs or [], strict=False):
        row["output"] = output
    how: dict[str, Any] = {"owner_key": "owner", "progress": False}
    return ExemplarStore.from_records(found, EMBEDDINGS, output_key="output" if outputs else None, **how)


def ordinary(owners: int = 90) -> ExemplarStore:
    """Each owner has one record, a third of them each place, whose name is written in many ways."""
    names = [str.upper, str.lower, str.title]
    rows = [(f"o{i}", f"On visit{i} they liked the harbour.") for i in range(owners)]
    return store_of(rows, [names[i // 3 % 3](PLACES[i % 3]) + "!" * (i % 2) for i in range(owners)])


@pytest.fixture
def budgets(tmp_path: Path) -> Iterator[Any]:
    opened: list[PrivacyBudget] = []

    def make(epsilon: float = 8.0, count: int = 1, delta: float = 1e-5, **how: Any) -> PrivacyBudget:
        url = f"sqlite:///{tmp_path}/{len(opened)}.db"
        opened.append(PrivacyBudget(epsilon, delta, how.pop("releases", {"terms": count}), ledger=url, **how))
        return opened[-1]

    yield make
    for budget in opened:
        budget.close()


# -- what a text and an owner give -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "phrases", "terms"),
    [
        ("The Café's door, the CAFE\u0301!", 1, {"cafe", "door"}),
        ("Bank of England notes", 1, {"bank", "england", "notes"}),
        ("Bank of England notes", 2, {"bank", "england", "notes", "england notes"}),
        ("Bank of England", 3, {"bank", "england", "bank of england"}),
        ("of the", 3, set()),
        ("\ud800 pub \x00", 2, {"pub"}),
        ("x" * (LONGEST + 1) + " yy", 2, {"yy"}),
        ("", 3, set()),
    ],
)
def test_a_text_has_its_words_and_phrases_without_case_and_accents(text: str, phrases: int, terms: set[str]) -> None:
    assert WordsAndPhrases(Words(), phrases).terms(text, {}) == terms


def test_words_may_be_stems_a_public_list_or_a_tokenizers_which_may_fail() -> None:
    assert WordsAndPhrases(Words(stem="english"), 2).terms("coughs, coughing badly", {}) == {
        "cough", "bad", "cough bad", "cough cough",
    }  # fmt: skip
    assert WordsAndPhrases(Words(stop_words=["pub"]), 1).terms("the pub", {}) == {"the"}

    def halves(text: str) -> list[str]:
        if text == "poison":
            raise ValueError(text)
        return [text[: len(text) // 2], text[len(text) // 2 :]]

    reader = WordsAndPhrases(Words(tokenizer=halves, stop_words=None), 2)
    assert reader.terms("oldmill poison", {}) == {"old", "mill", "old mill"}


def test_a_whole_text_is_one_term_and_a_long_one_or_one_without_a_word_is_none() -> None:
    whole = WholeTexts()
    assert whole.terms("  Café-RÖD!\n", {}) == {"cafe rod"}
    assert whole.terms("?!", {}) == whole.terms("a " * LONGEST, {}) == set()


def test_folding_again_changes_no_character() -> None:
    """So a term is found again wherever it is compared: each character of Unicode's first two planes, in a word."""
    for code in range(1 << 17):
        term = term_of(f"a{chr(code)}b")
        assert term_of(term) == term


def test_an_owner_gives_its_own_most_frequent_terms_by_its_own_coins() -> None:
    """Ties: each of 15 pairs of six comes out in 300 draws (one misses with probability 2e-8)."""
    texts = [{"a", "b"}, {"a", "c"}, {"a"}]
    draw = SecureRandomness()
    assert sorted(given_terms(texts, 3, draw)) == ["a", "b", "c"]
    assert {tuple(sorted(given_terms(texts, 2, draw))) for _ in range(100)} == {("a", "b"), ("a", "c")}
    assert given_terms([], 3, draw) == given_terms([set()], 3, draw) == []
    assert len({tuple(sorted(given_terms([set("abcdef")], 2, draw))) for _ in range(300)}) == 15


def test_an_owner_moves_the_counts_by_1_at_most_and_changes_what_no_other_gives(budgets: Any) -> None:
    """In whole numbers, before the noise: a greedy owner of 200 records, some of them broken, beside forty others."""
    others = [(f"o{i}", f"word{i % 5} word{i % 7}") for i in range(40)]  # of three terms at most: no coins
    greedy = [("greedy", f"word{i % 9} own{i} \x00") for i in range(200)]
    reader = WordsAndPhrases(Words(), 2)
    counts = []
    for rows in (others, others + greedy, greedy + others):
        release = TermsRelease(store_of(rows), budgets(), "input", reader, 5, None, None)
        given = release._given(None)
        counts.append(dict(zip(given.terms, given.counts.tolist(), strict=True)))
    without = counts[0]
    for present in counts[1:]:
        move = {term: present.get(term, 0) - without.get(term, 0) for term in present | without}
        assert 0.999 * LATTICE**2 < sum(each**2 for each in move.values()) <= LATTICE**2
        assert {"word0", "word1"} < {term for term, each in move.items() if each}  # its most frequent
        assert sum(map(bool, move.values())) == 5


# -- what is released --------------------------------------------------------------------------------------------------


def test_what_many_give_is_released_in_the_order_of_noisy_counts_and_nothing_else(budgets: Any) -> None:
    rows = [(f"o{i}", f"harbour {'castle' if i % 2 else 'visit' + str(i)}") for i in range(200)]
    terms = release_terms(store_of(rows), budgets(), at_most=2)
    assert list(terms) == ["harbour", "castle"]
    assert terms.counts == pytest.approx([200 / math.sqrt(2), 100 / math.sqrt(2)], abs=8 * terms.sigma)
    assert (terms.counts >= terms.threshold).all()
    assert terms.reading == {"records": 200, "silent": 0}
    assert (len(terms), terms[0], terms[-1], terms[:1]) == (2, "harbour", "castle", ("harbour",))
    assert "castle" in terms
    assert terms.index("castle") == 1
    assert terms.to_pandas()["term"].tolist() == ["harbour", "castle"]
    assert repr(terms).startswith("PrivateTerms(2 terms, sigma=")
    assert "harbour" not in repr(terms)
    with pytest.raises(ValueError, match="read-only"):
        terms.counts[0] = 1.0


def test_equal_counts_are_in_the_order_of_bytes_whoever_was_read_first(silence: Noise, budgets: Any) -> None:
    names = ["été", "zoo", "apple", "𝒳x", "日本"]
    for order in (names, names[::-1]):
        rows = [(f"o{i}", order[i % 5]) for i in range(200)]
        terms = release_terms(store_of(rows), budgets(), at_most=1, words=Words(stop_words=None))
        assert list(terms) == sorted(map(term_of, names), key=str.encode)
        assert len(set(terms.counts)) == 1


def test_noise_is_drawn_on_exactly_the_terms_that_somebody_gave(silence: Noise, budgets: Any) -> None:
    """A term that only occurs in a text has no coordinate: with a cap of one, five owners of six words give five."""
    rows = [(f"o{i}", f"own{i} " * 2 + " ".join(f"word{i}{j}" for j in range(5))) for i in range(5)]
    budget = budgets()
    terms = release_terms(
        store_of([*rows, ("o0", "own0"), *((f"o{i}", f"own{i}") for i in range(5))]), budget, at_most=1
    )
    (asked,) = silence.asked
    assert asked == (terms.sigma * LATTICE, 5)
    assert len(terms) == 0


def test_a_term_at_the_threshold_is_released_and_one_a_step_below_is_not() -> None:
    release = TermsRelease.__new__(TermsRelease)
    release.threshold = 1000
    release.line = type("Line", (), {"parameter": 1.0})()
    release._randomness = Noise(scale=0.0)
    found = release._passing(terms_release.CountedTerms(["a", "b", "c"], np.array([999, 1000, 1001])))
    assert (found.terms, found.counts.tolist()) == (["c", "b"], [1001, 1000])


@pytest.mark.parametrize(("delta", "most"), [(1e-10, 0), (1e-5, 4)])
def test_ten_records_of_one_owner_do_not_bring_its_word_out_in_ten_thousand_runs(
    budgets: Any, delta: float, most: int
) -> None:
    """The product's own counting and noise. A run shows the word with probability delta / 2 at most: with delta 1e-10
    one is seen in 10,000 runs with probability 5e-7, with delta 1e-5 more than four with probability 3e-9."""
    rows = [("canary", f"{CANARY} harbour")] * 10 + [(f"o{i}", "harbour") for i in range(60)]
    release = TermsRelease(
        store_of([(owner, f"{text} {i}") for i, (owner, text) in enumerate(rows)]),
        budgets(3.0, delta=delta), "input", WordsAndPhrases(Words(pattern="[a-z]+"), 1), 1, None, None,
    )  # fmt: skip
    assert binom.sf(most, 10_000, delta / 2) < 1e-6
    release._randomness = BlockRandomness()
    given = release._given(None)
    while CANARY not in given.terms:  # its owner's other word is as frequent
        given = release._given(None)
    assert dict(zip(given.terms, (given.counts / LATTICE).round().tolist(), strict=True)) == {"harbour": 60, CANARY: 1}
    runs = [release._passing(given).terms for _ in range(10_000)]
    assert all("harbour" in terms for terms in runs)
    assert sum(CANARY in terms for terms in runs) <= most


def test_the_bound_for_owners_who_share_a_word_is_its_frequency(budgets: Any) -> None:
    """4,000 runs of a word of 5 to 30 owners, within 5.2 standard deviations (false alarm 8e-7 for all four)."""
    release = TermsRelease(store_of([("o", "x")]), budgets(1.0), "input", WholeTexts(), 1, None, None)
    release._randomness = BlockRandomness()
    receipt: Any = {"id": "t"}
    terms = PrivateTerms([], np.zeros(0), release.line.parameter, release.threshold / LATTICE, receipt)
    assert terms.sharing_bound(1) <= 5e-6
    assert terms.sharing_bound(0) < terms.sharing_bound(1) < terms.sharing_bound(2)
    assert terms.sharing_bound(9, 9) == pytest.approx(terms.sharing_bound(3), rel=1e-6)
    for owners in (12, 16, 20, 24):
        given = terms_release.CountedTerms(["word"] * 1, np.array([owners * LATTICE]))
        seen = sum(bool(release._passing(given).terms) for _ in range(4000))
        bound = terms.sharing_bound(owners)
        assert abs(seen - 4000 * bound) <= 5.2 * math.sqrt(4000 * bound * (1 - bound)) + 1


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_bad_input_costs_nothing(budgets: Any, tmp_path: Path) -> None:
    budget, plain = budgets(), store_of([("o", "text")])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"store": "a store"}, "store"),
        ({"store": plain, "source": "output"}, "output_key"),
        ({"budget": "a budget"}, "budget"),
        ({"budget": budgets(scope="per_principal")}, "scope"),
        ({"at_most": 0}, "at_most"),
        ({"at_most": 1001}, "at_most"),
        ({"at_most": 2.5}, "at_most"),
        ({"source": "metadata"}, "source"),
        ({"read": "letters"}, "read"),
        ({"words": "english"}, "words"),
        ({"phrases": 4}, "phrases"),
        ({"phrases": 0}, "phrases"),
        ({"read": "whole", "phrases": 2}, "phrases"),
        ({"read": "whole", "words": Words()}, "words"),
        ({"owners": 0}, "owners"),
        ({"output": tmp_path, "budget": budgets()}, "output"),
        ({"line": "votes"}, "line"),
    ]
    for change, named in cases:
        given: dict[str, Any] = {"store": ordinary(3), "budget": budget, **change}
        with pytest.raises(InvalidParameter, match=named):
            release_terms(given.pop("store"), given.pop("budget"), **given)
    assert not budget.is_frozen
    large = LineRequest("terms", 1.0, 1, options={"delta0": 1e-4})
    with pytest.raises(InvalidParameter, match="delta0"):
        release_terms(plain, budgets(releases={"terms": large}))


def test_an_empty_store_is_released_like_any_other(budgets: Any) -> None:
    """A refusal would tell that nobody is there."""
    empty = store_of([("o0", "text")])
    empty.forget("o0")
    assert list(release_terms(empty, budgets())) == []


def test_a_large_delta_is_warned_of_from_a_public_number_alone(budgets: Any) -> None:
    with pytest.warns(PrivacyWarning, match="delta") as caught:
        release_terms(ordinary(3), budgets(delta=1e-3), owners=1000)
    assert caught[0].filename == __file__


def test_a_plan_that_is_frozen_keeps_its_cap_and_one_with_ptr_has_room_for_both(budgets: Any) -> None:
    budget = budgets(count=2)
    release_terms(ordinary(3), budget, at_most=4)
    with pytest.raises(PlanMismatch, match="at_most"):
        release_terms(ordinary(3), budget, at_most=5)


def test_lines_with_a_delta0_share_half_of_delta(budgets: Any) -> None:
    """Of two kinds: each alone would take half of delta, and nothing would be left."""
    budget = budgets(releases={"terms": 1, "keywords": 100})
    budget.declare("keywords", "ptr", 1.0)
    release_terms(ordinary(3), budget, line="terms")
    lines = budget.plan.lines
    assert lines["terms"].options["delta0"] == 2.5e-6
    assert lines["keywords"].options["delta0"] == 2.5e-8


# -- the journal, files and what leaves --------------------------------------------------------------------------------


def test_a_release_that_is_killed_before_its_noise_goes_on_and_is_charged_once(
    budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, budget, output = ordinary(), budgets(), tmp_path / "terms.json"
    source = Noise(1, 0)
    monkeypatch.setattr(sums, "SecureRandomness", lambda: source)
    with pytest.raises(KeyboardInterrupt):
        release_terms(store, budget, at_most=2, output=output)
    assert (budget.spent(), output.exists()) == (1, False)
    source.stop = None
    with pytest.raises(InvalidParameter, match="same settings"):
        release_terms(store, budget, at_most=2, output=output, source="both")
    terms = release_terms(store, budget, at_most=2, output=output)
    assert budget.spent() == 1
    assert set(PrivateTerms.load(output)) == set(terms) == {"harbour", "liked"}
    with pytest.raises(InvalidParameter, match="a list of terms is there"):
        release_terms(store, budget, at_most=2, output=output)
    with pytest.raises(PrivacyBudgetExceeded):
        release_terms(store, budget, at_most=2)


def test_one_that_is_killed_after_its_noise_reads_nothing_again(
    budgets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that the ledger has stands, and then the answer; neither has a word that is not released."""
    source = Noise(2)
    monkeypatch.setattr(sums, "SecureRandomness", lambda: source)
    for number, (name, home) in enumerate((("kept", TermsRelease), ("save", PrivateTerms))):
        store, budget, output = ordinary(), budgets(), tmp_path / f"{name}.json"
        with monkeypatch.context() as patch:
            patch.setattr(home, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                release_terms(store, budget, at_most=2, output=output)
        for file in tmp_path.glob(f"{number}.db*"):
            assert b"visit" not in file.read_bytes()
        drawn = len(source.asked)
        with monkeypatch.context() as patch:
            patch.setattr(TermsRelease, "_given", None)
            terms = release_terms(store, budget, at_most=2, output=output)
        assert (len(source.asked), budget.spent()) == (drawn, 1)
        assert terms.receipt["replayed"] is (name == "save")
        assert set(terms) == {"harbour", "liked"}
        assert any(b"harbour" in file.read_bytes() for file in tmp_path.glob(f"{number}.db*"))


def test_no_word_that_is_not_released_and_no_number_of_words_leaves(
    budgets: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    rows = [(f"o{i}", f"harbour {CANARY}{i}") for i in range(61)]
    terms = release_terms(store_of(rows), budgets(), at_most=2, output=tmp_path / "terms.json")
    for kept in (terms, copy.copy(terms), copy.deepcopy(terms), pickle.loads(pickle.dumps(terms))):  # noqa: S301
        assert list(kept) == ["harbour"]
        assert (kept.reading is None) == (kept is not terms)
        assert not kept.counts.flags.writeable
    shown = [repr(terms), str(vars(terms)), pickle.dumps(terms).decode("latin-1"), caplog.text, *capsys.readouterr()]
    for file in tmp_path.iterdir():
        shown.append(file.read_bytes().decode("latin-1"))
    assert not [text for text in shown if CANARY in text]
    assert not [text for text in shown[1:] if "[1, 62]" in text]


def test_a_failure_on_the_private_side_is_constant_and_charged(budgets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError(CANARY)

    monkeypatch.setattr(terms_release, "owner_sum", broken)
    budget = budgets()
    with pytest.raises(ReleaseFailed) as caught:
        release_terms(ordinary(), budget)
    assert (caught.value.__context__, caught.value.__cause__) == (None, None)
    assert CANARY not in str(caught.value)
    assert budget.spent() == 1


def test_a_file_of_terms_is_read_again_and_another_is_refused(budgets: Any, tmp_path: Path) -> None:
    path = tmp_path / "terms.json"
    terms = release_terms(ordinary(), budgets(), source="output", read="whole", at_most=1)
    terms.save(path)
    again = PrivateTerms.load(path)
    assert (list(again), again.counts.tolist()) == (list(terms), terms.counts.tolist())
    assert (again.sigma, again.threshold, again.receipt) == (terms.sigma, terms.threshold, terms.receipt)
    assert again.reading is None
    whole = json.loads(path.read_text())
    damaged: list[Any] = [
        b"{", b"\xff", [], {**whole, "format": "dpicl-table-1"}, {**whole, "counts": [1.0]}, {**whole, "sigma": 0},
        {**whole, "terms": ["a"] * len(terms)}, {**whole, "terms": [1, 2, 3]}, {**whole, "receipt": {}},
    ]  # fmt: skip
    for content in damaged:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        with pytest.raises(InvalidParameter, match="a file of terms"):
            PrivateTerms.load(path)
    with pytest.raises(InvalidParameter, match="can be read"):
        PrivateTerms.load(tmp_path / "nothing")
    with pytest.raises(InvalidParameter, match="can be written"):
        terms.save(tmp_path / "no" / "folder")


# -- what they are for -------------------------------------------------------------------------------------------------


def test_terms_over_outputs_are_the_labels_of_a_head_however_they_are_written(budgets: Any, tmp_path: Path) -> None:
    """Outputs that are no term add nothing, and the operator alone reads how many they are."""
    store = ordinary(300)
    store.add([{"input": f"stray {i}", "output": f"Stray {i}", "owner": f"s{i}"} for i in range(7)])
    budget = budgets(releases={"terms": 1, "head": 1})
    budget.declare("head", "head", 1.0, owners=300)
    terms = release_terms(store, budget, source="output", read="whole", at_most=1, line="terms")
    assert set(terms) == {"the vaults", "cafe rod", "old mill"}
    head = PrivateHead.fit(store, terms, budget, output=tmp_path / "head.npz", line="head")
    assert head.labels == tuple(terms)
    assert head.fit_report is not None
    assert (head.fit_report.records, head.fit_report.unknown_labels) == (300, 7)
    assert head.invoke("the harbour")["label"] in terms
    assert PrivateHead.load(tmp_path / "head.npz", EMBEDDINGS).labels == tuple(terms)


def test_terms_are_topics_and_values_of_a_table_and_a_domain_of_keywords(budgets: Any) -> None:
    rows = [(f"o{i}", f"{PLACES[i % 3]}: {('pub', 'shop')[i % 2]}") for i in range(300)]
    store = store_of(rows, [PLACES[i % 3] for i in range(300)])
    budget = budgets(releases={"terms": 2, "sum": 1})
    budget.declare("sum", "sum", 1.0)
    topics = release_terms(store, budget, source="output", read="whole", line="terms")
    values = release_terms(store, budget, line="terms")
    assert {"pub", "shop"} <= set(values)
    table = release_table(store, topics, values, budget, read="named", line="sum")
    assert table.topics == tuple(topics)
    assert table.columns["value"] == tuple(values)
    assert set(Keywords.joint_em(domain=values, k=2)._spelling) == set(values)
