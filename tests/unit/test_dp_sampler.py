"""DPSampler: requests, charges, streams, failures, and what never leaves."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.globals import set_debug
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda, RunnableParallel
from scipy.stats import binom
from table_model import Table, TableModel
from ways import WAYS, ask

from langchain_dpicl import (
    DemonstrationTemplate,
    DPSampler,
    InvalidParameter,
    LogitsModel,
    ModelUnavailable,
    PoissonExampleSelector,
    PrivacyBudget,
    PrivacyBudgetExceeded,
    ReleaseFailed,
    UnsafeConfigurationError,
    acting_for,
)
from langchain_dpicl.decoding import answer
from langchain_dpicl.decoding.answer import PrivateAnswer, Settings, Writer, clipped_terms
from langchain_dpicl.decoding.exemplars import Draw, Exemplars, slots_for
from langchain_dpicl.decoding.model import Demonstration
from langchain_dpicl.decoding.steps import CUT
from langchain_dpicl.privacy.noise import SecureRandomness

Make = Callable[..., DPSampler]

SPELL = "hello"
ALPHABET = ["h", "e", "l", "o", "."]
END = 4


def spelling(word: str = SPELL, alphabet: list[str] = ALPHABET) -> Table:
    """A model so sure of the word, and of the end after it, that no draw differs (below 1e-30 a token)."""

    def table(demonstration: str, released: str) -> list[float]:
        position = len(released)
        wanted = alphabet.index(word[position]) if position < len(word) else END
        return [100.0 if token == wanted else 0.0 for token in range(len(alphabet))]

    return table


@pytest.fixture
def sampler_of(budget_of: Callable[..., PrivacyBudget], store_of: Any, records: Any, canary: str) -> Make:
    """sampler_of(table): a sampler over a store whose every text holds the canary."""

    def make(
        table: Table | None = None,
        *,
        model: TableModel | None = None,
        budget: PrivacyBudget | None = None,
        store: Any = None,
        owners: int = 8,
        rate: float = 0.5,
        budget_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> DPSampler:
        store = store_of(records(owners, secret=canary)) if store is None else store
        model = TableModel(table or spelling(), ALPHABET, frozenset({END})) if model is None else model
        budget = budget_of(**{"releases": 200, **(budget_options or {})}) if budget is None else budget
        selector = PoissonExampleSelector(store, 2, rate=rate, max_exemplars=8)
        options = {"shots": 4, "top_k": model.vocabulary, "max_tokens": 10, **options}
        return DPSampler(model, selector, budget, **options)

    return make


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_of_asking_gives_the_answer_and_gives_back_what_was_not_sampled(
    way: str, sampler_of: Make
) -> None:
    sampler = sampler_of()
    assert await ask(way, sampler, "what?") == SPELL
    assert sampler.budget.spent() == len(SPELL) + 1, "the end token was sampled too"
    answered = await ask(way, sampler.with_receipt(), {"input": "what?"})
    assert answered["answer"] == SPELL
    assert answered["receipt"]["tokens"] == 6
    assert answered["receipt"]["outcome"] == "released"
    assert sampler.model.closed == len(sampler.model.opened) == 3  # a public question came first


def test_an_answer_streams_as_it_is_drawn(sampler_of: Make) -> None:
    sampler = sampler_of()
    chunks = sampler.stream("what?")
    assert next(chunks) == "h"
    assert len([rows for rows in sampler.model.calls if rows]) == 1, "the second token is not drawn yet"
    assert list(chunks) == ["e", "l", "l", "o"]
    assert sampler.budget.spent() == 6
    *pieces, last = sampler.with_receipt().stream("what?")
    assert [piece["answer"] for piece in pieces] == list(SPELL)
    assert last["receipt"]["tokens"] == 6


def test_it_is_a_step_of_a_chain_and_streams_within_it(sampler_of: Make) -> None:
    sampler = sampler_of()
    chain = RunnableLambda(lambda text: {"input": text}) | sampler
    assert chain.invoke("what?") == SPELL
    assert list(chain.stream("what?")) == list(SPELL)


async def test_a_question_that_arrives_in_pieces_is_asked_whole(sampler_of: Make) -> None:
    prompts: set[str] = set()
    sampler = sampler_of(template=DemonstrationTemplate("{input}", "{topic}/{tone}"))
    session = sampler.model.session
    sampler.model.session = lambda shared, *a, **o: prompts.add(shared) or session(shared, *a, **o)  # type: ignore[func-returns-value]

    topic = FakeListChatModel(responses=["tea"]) | StrOutputParser()  # streams letter by letter
    chain = RunnableParallel(topic=topic, tone=RunnableLambda(lambda _: "dry")) | sampler
    assert list(chain.stream("which?")) == list(SPELL)
    assert [piece async for piece in chain.astream("which?")] == list(SPELL)
    assert prompts == {"tea/dry"}


def test_a_mapping_may_hold_what_the_template_names(sampler_of: Make) -> None:
    prompts: list[str] = []
    sampler = sampler_of(template=DemonstrationTemplate("<{input}|{output}>", "{topic}/{tone}"))
    session = sampler.model.session
    sampler.model.session = lambda shared, *a, **o: prompts.append(shared) or session(shared, *a, **o)  # type: ignore[func-returns-value]
    sampler.invoke({"topic": "tea", "tone": "dry", "more": 1})
    assert set(prompts) == {"tea/dry"}
    assert all(text.startswith(("<text", "<|")) for text in sampler.model.opened[-1])
    for bad in ({"topic": "tea"}, {}, 3, None, ["tea"]):
        with pytest.raises(InvalidParameter, match="input"):
            sampler.invoke(bad)  # type: ignore[arg-type]
    assert sampler.budget.spent() == 6


def test_the_default_template_ends_where_the_model_goes_on(store_of: Any, records: Any) -> None:
    template = DemonstrationTemplate.of(store_of(records(2)))
    assert template.show({"input": "i", "output": "o"}) == "Input: i\nOutput: o\n\n"
    assert template.ask({"input": "?"}) == "Input: ?\nOutput:"
    assert template.padding == "Input: \nOutput: \n\n"
    named = DemonstrationTemplate.of(store_of(records(2)), input_name="Data", output_name=" Description ")
    assert named.show({"input": "i", "output": "o"}) == "Data: i\nDescription: o\n\n"
    assert (named.ask({"input": "?"}), named.query_keys) == ("Data: ?\nDescription:", ("input",))
    for name in ("", "two\nlines", "{braces}", 3):
        with pytest.raises(InvalidParameter, match="output_name"):
            DemonstrationTemplate.of(store_of(records(2)), output_name=name)  # type: ignore[arg-type]


# -- text --------------------------------------------------------------------------------------------------------------


def test_stop_sequences_end_the_answer_before_them_and_are_never_shown(sampler_of: Make) -> None:
    sampler = sampler_of(stop=["lo", "zz"])
    assert list(sampler.stream("what?")) == ["h", "e", "l"]
    assert sampler.budget.spent() == 5
    assert sampler_of(stop="hel").invoke("what?") == ""
    assert list(sampler_of(stop="hel").stream("what?")) == [""]
    assert sampler_of(stop=["lll"]).invoke("what?") == SPELL, "what only began like one is shown"


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    class Bytes(TableModel):
        def text(self, tokens: Any) -> str:
            return bytes(token for token in tokens if token).decode("utf-8", "replace")

    model = Bytes(lambda *_: [0.0], ["?"] * 256, frozenset({0}))
    for word, stop in itertools.product(("héé", "日本x", "a\N{GRINNING FACE}b"), ((), ("本",), ("zzz",))):
        writer = Writer(model, stop)
        pieces = [writer.add(token) for token in word.encode() if not writer.ended]
        pieces.append(writer.finish())
        assert "".join(pieces) == word.split("本")[0] if "本" in stop else word
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    writer = Writer(model, ())
    assert [writer.add(token) for token in "é".encode()[:1]] == [""]
    assert writer.finish() == "\N{REPLACEMENT CHARACTER}", "an answer that ends within a character says so"


def test_no_answer_ends_before_its_least_length(sampler_of: Make) -> None:
    """The end token is by far the likeliest; it is no candidate for the first three tokens."""
    sampler = sampler_of(lambda shown, released: [5.0, 0, 0, 0, 100.0], min_tokens=3, max_tokens=9)
    assert len(sampler.invoke("what?")) == 3
    assert sampler.budget.spent() == 4


def test_no_stop_sequence_ends_an_answer_before_its_least_length(sampler_of: Make) -> None:
    """The model wants an "h" first of all, and an "o" after an "l": either would complete a stop."""

    def table(demonstration: str, released: str) -> list[float]:
        return [1000.0, 0, 500, 900, 0] if released else [1000.0, 0, 900, 500, 0]

    sampler = sampler_of(table, min_tokens=3, max_tokens=9, stop=["h", "lo"])
    assert sampler.invoke("what?") == "lll", "the fourth token is the h"
    assert sampler.budget.spent() == 4


def test_what_ends_a_demonstration_ends_an_answer(sampler_of: Make) -> None:
    alphabet = ["a", "\n", "b", "c", "."]
    assert sampler_of(model=TableModel(spelling("a\nb\n\nc", alphabet), alphabet)).invoke("what?") == "a\nb"
    plain = DemonstrationTemplate("{input} {output}", "{input}")
    assert sampler_of(template=plain).settings.stop == ()
    assert DemonstrationTemplate("{input} {output}\n##\n", "{input}").ending == "\n##\n"


# -- charges -----------------------------------------------------------------------------------------------------------


def test_an_answer_ends_where_the_budget_ends_and_says_so(sampler_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    sampler = sampler_of(lambda *_: [9.0, 0, 0, 0, -90.0], budget_options={"releases": 25}).with_receipt()
    assert sampler.invoke("a")["receipt"]["tokens"] == 10
    assert len(sampler.invoke("b")["answer"]) == 10
    cut = sampler.invoke("c")
    assert len(cut["answer"]) == 5
    assert cut["receipt"]["outcome"] == CUT
    assert (cut["receipt"]["tokens"], cut["receipt"]["remaining"]) == (5, 0)
    assert "ends after 5 tokens" in caplog.text
    with pytest.raises(PrivacyBudgetExceeded, match="0 of 25 tokens left"):
        sampler.invoke("d")
    assert sampler.budget.spent() == 25
    fresh = sampler_of(budget=sampler.budget, store=sampler.selector.store)
    with pytest.raises(PrivacyBudgetExceeded):
        fresh.invoke("d")
    assert fresh.model.calls == [], "a spent budget has no question to ask"


async def test_a_task_whose_answer_is_cut_says_so_too(sampler_of: Make) -> None:
    sampler = sampler_of(lambda *_: [9.0, 0, 0, 0, -90.0], budget_options={"releases": 3}, return_receipt=True)
    assert (await sampler.ainvoke("c"))["receipt"]["outcome"] == CUT
    with pytest.raises(PrivacyBudgetExceeded):
        await sampler.ainvoke("d")


def test_an_answer_that_ends_within_what_is_left_is_whole(sampler_of: Make) -> None:
    sampler = sampler_of(budget_options={"releases": 7}, return_receipt=True)
    receipt = sampler.invoke("a")["receipt"]
    assert (receipt["outcome"], receipt["tokens"], receipt["remaining"]) == ("released", 6, 1)


def test_an_equal_query_is_answered_from_the_ledger(sampler_of: Make) -> None:
    sampler = sampler_of(budget_options={"replay": True}, return_receipt=True)
    first, again = sampler.invoke("a"), sampler.invoke({"input": "a"})
    assert first["answer"] == again["answer"]
    assert again["receipt"]["replayed"]
    assert next(iter(sampler.stream("a")))["answer"] == SPELL
    assert sampler.budget.spent() == 6
    for other in ({"max_tokens": 9}, {"temperature": 2.0}, {"top_k": 4}, {"stop": "z"}, {"shots": 3}, {"cap": 1.0}):
        different = sampler_of(budget=sampler.budget, store=sampler.selector.store, return_receipt=True, **other)
        assert not different.invoke("a")["receipt"]["replayed"], other


def test_the_public_answer_stands_in_where_the_deployer_asked_for_it(sampler_of: Make) -> None:
    options = {"releases": 6, "on_exhausted": "zero_shot"}
    sampler = sampler_of(budget_options=options, return_receipt=True)
    sampler.invoke("a")
    sampler.model.opened.clear()
    public = sampler.invoke("b")
    assert public["answer"] == SPELL
    assert public["receipt"]["outcome"].startswith("zero-shot")
    assert sampler.model.opened == [[sampler.template.padding]]
    with pytest.raises(InvalidParameter, match="return_receipt"):
        sampler_of(budget_options=options)


def test_principals_have_counters_of_their_own(sampler_of: Make) -> None:
    sampler = sampler_of(budget_options={"scope": "per_principal"})
    with acting_for("alice"):
        sampler.invoke("a")
        assert list(sampler.stream("a")) == list(SPELL)
    with acting_for("bob"):
        sampler.invoke("a")
    assert (sampler.budget.spent(principal="alice"), sampler.budget.spent(principal="bob")) == (12, 6)
    with pytest.raises(InvalidParameter, match="principal"):
        sampler.invoke("a")


def test_whoever_stops_reading_keeps_the_charge(sampler_of: Make) -> None:
    sampler = sampler_of()
    chunks = sampler.stream("a")
    next(chunks)
    chunks.close()
    assert sampler.budget.spent() == 10
    assert sampler.model.closed == len(sampler.model.opened)


def test_an_answer_that_nobody_reads_holds_up_no_equal_query(sampler_of: Make) -> None:
    sampler = sampler_of(budget_options={"replay": True, "replay_patience": 60})
    chunks = sampler.stream("a")
    next(chunks)
    chunks.close()
    began = time.monotonic()
    assert sampler.invoke("a") == SPELL
    assert time.monotonic() - began < 30, "or it waits for the answer that was given up"
    assert sampler.budget.spent() == 16


async def test_a_cancelled_answer_keeps_the_charge_and_closes_its_session(sampler_of: Make) -> None:
    sampler = sampler_of()
    async for _ in sampler.astream("a"):
        break
    task = asyncio.create_task(sampler.ainvoke("b"))
    while len(sampler.model.calls) < 4:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(200):
        if sampler.model.closed == len(sampler.model.opened):
            break
        await asyncio.sleep(0.01)
    assert sampler.model.closed == len(sampler.model.opened)
    assert sampler.budget.spent() >= 10


def test_a_line_of_several(budget_of: Callable[..., PrivacyBudget], sampler_of: Make) -> None:
    budget = budget_of(20.0, releases={"words": 30})
    assert sampler_of(budget=budget, line="words").invoke("a") == SPELL
    assert budget.lines()["words"]["mechanism"] == "tokens"


# -- bad parameters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "values"),
    [
        ("max_tokens", [0, -1, True, 2.5, None]),
        ("min_tokens", [-1, 11, "3"]),
        ("top_k", [0, 6, 1.5]),
        ("shots", [0, -1.0, float("nan"), "4"]),
        ("temperature", [0, -1, float("inf"), None]),
        ("cap", [-0.1, float("nan")]),
        ("stop", ["", ["a", ""], 3, [None]]),
        ("slots", [0, -3, 2.5]),
        ("template", ["{input}"]),
        ("model", [None, object()]),
    ],
)
def test_bad_parameters_are_named(parameter: str, values: list[Any], sampler_of: Make) -> None:
    for value in values:
        if parameter == "model":
            with pytest.raises(InvalidParameter, match=parameter):
                DPSampler(value, None, None)  # type: ignore[arg-type]
            continue
        with pytest.raises(InvalidParameter, match=parameter):
            sampler_of(**{parameter: value})


def test_what_else_is_refused_when_it_is_built(sampler_of: Make, store_of: Any, records: Any, ledger_url: str) -> None:
    with pytest.raises(InvalidParameter, match="slots"):
        sampler_of(slots=4, pad=False)
    with pytest.raises(InvalidParameter, match="shots"):
        sampler_of(shots=None)
    sampler = sampler_of()
    for name, how in (("max_calls", {"calls": 4, "max_calls": 6}), ("rate", {"members": 4})):
        selector = PoissonExampleSelector(sampler.store, **how)
        with pytest.raises(InvalidParameter) as caught:
            DPSampler(sampler.model, selector, sampler.budget, shots=4)
        assert caught.value.parameter == name
    for layout in ("{", "{0}", "{}", "{a.b}", "{a[0]}", "{a!x}", 3):
        with pytest.raises(InvalidParameter, match="template"):
            DemonstrationTemplate("x", layout)  # type: ignore[arg-type]
    assert isinstance(TableModel(spelling(), ALPHABET), LogitsModel)


def test_shots_come_from_a_public_number_and_never_from_the_store(budget_of: Any, store_of: Any, records: Any) -> None:
    """An owner more or less must not change kappa, which would change every token's distribution."""
    store = store_of(records(9))
    selector = PoissonExampleSelector(store, 2, shots=2)
    store.forget("owner-3")
    sampler = DPSampler(TableModel(spelling(), ALPHABET), selector, budget_of(), top_k=5)
    assert sampler.settings.shots == 4


def test_a_query_that_does_not_fit_costs_nothing(sampler_of: Make) -> None:
    sampler = sampler_of()
    sampler.model.context = 40
    with pytest.raises(InvalidParameter, match="2015 characters") as caught:
        sampler.invoke("q" * 2000)
    assert "qqq" not in str(caught.value)
    assert sampler.budget.spent() == 0


def test_the_surroundings_are_checked_first(sampler_of: Make) -> None:
    sampler = sampler_of()
    set_debug(True)
    try:
        with pytest.raises(UnsafeConfigurationError):
            sampler.invoke("a")
    finally:
        set_debug(False)
    assert sampler.budget.spent() == 0


def test_fallbacks_must_not_hide_a_spent_budget(sampler_of: Make) -> None:
    with pytest.raises(UnsafeConfigurationError):
        sampler_of().with_fallbacks([RunnableLambda(str)], exceptions_to_handle=(Exception,))


# -- who takes part ----------------------------------------------------------------------------------------------------


def draw_of(store: Any, rate: float, steps: int, randomness: Any) -> Draw:
    selector = PoissonExampleSelector(store, 2, rate=rate, max_exemplars=1)
    exemplars = Exemplars(selector, TableModel(wild, ALPHABET), DemonstrationTemplate("{input}", "{input}"), 1)
    return exemplars.draw(randomness, rate, "", steps)


def test_every_token_has_a_fresh_sample_of_one_exemplar_an_owner(store_of: Any, records: Any, owner_keyed: Any) -> None:
    """30 owners of 3 exemplars at rate 1/2: each step has a 50 % sample of its own, from all of an owner's exemplars.

    Two steps have equal samples with probability 2^-30, and an exemplar is never shown with probability
    (5/6)^120 = 3e-10; false alarms below 1e-6.
    """
    store = store_of(records(30, 3))
    drawn = draw_of(store, 0.5, 120, SecureRandomness())
    shown = [[drawn.demonstrations[row].text for row in step] for step in drawn.steps]
    for texts in shown:
        assert max(Counter(text.split(".")[0] for text in texts).values(), default=1) == 1
    assert len({tuple(sorted(text.split(".")[0] for text in texts)) for texts in shown}) == 120
    assert len({text for texts in shown for text in texts}) == 90
    assert len({each.key for each in drawn.demonstrations}) == len(drawn.demonstrations)


def test_a_demonstration_that_cannot_be_used_takes_nothing_from_others(sampler_of: Make, store_of: Any) -> None:
    """Too long, or without the key that the template names: its owner has no part, the rest as before."""
    rows = [{"input": f"t{i}", "output": "o"} for i in range(4)]
    rows += [{"input": "long" * 50, "output": "o"}, {"input": "t5", "output": "o", "mood": "x"}]
    store = store_of(rows, owner_key=None)
    sampler = sampler_of(store=store, rate=1.0, pad=False)
    sampler.model.context = 60
    sampler.invoke("?")
    assert sorted(sampler.model.opened[-1]) == [f"Input: t{i}\nOutput: o\n\n" for i in (0, 1, 2, 3, 5)]
    store = store_of(rows, owner_key=None)
    picky = sampler_of(store=store, rate=1.0, pad=False, template=DemonstrationTemplate("{input}{mood}", "{input}"))
    picky.invoke("?")
    assert picky.model.opened[-1] == ["t5x"]
    assert set(picky.model.calls[1:]) == {1}


def test_a_store_without_owners_gives_the_public_answer(sampler_of: Make, store_of: Any, records: Any) -> None:
    store = store_of(records(2))
    sampler = sampler_of(store=store, rate=1.0)
    store.forget("owner-0")
    store.forget("owner-1")
    assert sampler.invoke("a") == SPELL


def test_what_the_store_forgets_the_model_forgets(sampler_of: Make) -> None:
    sampler = sampler_of(rate=1.0, pad=False)
    store = sampler.selector.store
    sampler.invoke("a")
    store.forget("owner-3")
    assert sampler.model.forgotten == [(sampler.exemplars, 3)]
    chunks = sampler.stream("b")
    next(chunks)
    store.forget("owner-5")  # while an answer holds it
    sampler.model.forgotten.clear()
    list(chunks)
    assert sampler.model.forgotten == [(sampler.exemplars, 5)]
    list(sampler.stream("c"))
    assert len(sampler.model.opened[-1]) == 6
    other = sampler_of(store=store)
    assert (other.exemplars, 1) != (sampler.exemplars, 1)


# -- sums and rows -----------------------------------------------------------------------------------------------------


def scores_of(
    rows: list[int], table: Table, monkeypatch: pytest.MonkeyPatch, count: int = 9, slots: int | None = None
) -> Any:
    """The integer scores of one token whose sample is these demonstrations."""
    seen: list[Any] = []
    monkeypatch.setattr(answer, "draw", lambda scores, _: seen.append(scores) or 0)  # type: ignore[func-returns-value]
    numbers = Settings(1, 0, 5, 4.0, 1.0, 1.5, ())
    model = TableModel(table, ALPHABET)
    padding = Demonstration("padding", "9")
    private = PrivateAnswer(model, numbers, bound=40.0, randomness=SecureRandomness(), slots=slots, padding=padding)
    demonstrations = [Demonstration(i, str(i)) for i in range(count)]
    private.open("?", lambda: Draw(demonstrations, [rows]))
    private.token([])
    return seen[0], model.calls


def wild(demonstration: str, released: str) -> Any:
    """Ranges from tiny to huge, so that a sum of floats would depend on its order."""
    if not demonstration:
        return [0.0, 0.3, -0.7, 1.1, 0.2]
    generator = np.random.default_rng(int(demonstration))
    return generator.normal(size=5) * 10.0 ** generator.integers(-6, 7)


def test_an_owner_adds_its_own_term_exactly_whoever_else_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference that an owner makes is one vector of whole steps, in every company and order."""
    alone, none = scores_of([3], wild, monkeypatch)[0], scores_of([], wild, monkeypatch)[0]
    term = alone - none
    rows = np.asarray(wild("3", ""), np.float32).astype(np.float64)
    public = np.asarray(wild("", ""), np.float32).astype(np.float64)
    assert np.array_equal(term, clipped_terms(rows[None], public, bound=40.0, temperature=1.0, cap=1.5)[0])
    for others in ([0], [1, 2], [8, 0, 4, 6], [7, 6, 5, 4, 2, 1, 0]):
        without = scores_of(others, wild, monkeypatch)[0]
        for place in range(len(others) + 1):
            rows_with = [*others[:place], 3, *others[place:]]
            assert np.array_equal(scores_of(rows_with, wild, monkeypatch)[0] - without, term)


@pytest.mark.parametrize("slots", [1, 3, 4, 9])
def test_padding_and_further_calls_change_no_score(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def watched(demonstration: str, released: str) -> Any:
        shown.append(demonstration)
        return wild(demonstration, released)

    for rows in ([], [0], [5, 2, 7], [0, 1, 2, 3, 4, 5, 6]):
        expected, _ = scores_of(rows, wild, monkeypatch)
        shown.clear()
        found, calls = scores_of(rows, watched, monkeypatch, slots=slots)
        assert np.array_equal(found, expected)
        assert calls == [slots] * max(1, -(-len(rows) // slots))
        assert shown.count("9") == sum(calls) - len(rows), "what fills up is public"


def test_the_number_of_rows_is_a_public_constant(sampler_of: Make) -> None:
    """Any sample of 8 owners at rate 1/2 shows as the same calls: one for each token, of `slots_of` rows."""
    sampler = sampler_of()
    for _ in range(5):
        sampler.model.calls.clear()
        sampler.invoke("a")
        assert [rows for rows in sampler.model.calls if rows] == [sampler.slots_of(sampler.line())] * 6
    bare = sampler_of(pad=False)
    bare.invoke("a")
    assert len(bare.model.calls) == 1 + 6, "one call for each token all the same, and the public question"


def test_slots_are_the_least_that_a_sample_hardly_ever_exceeds() -> None:
    for shots, rate in ((4.0, 0.02), (4.0, 0.5), (1.0, 1e-4), (40.0, 0.01), (3.0, 1.0)):
        owners, slots = round(shots / rate), slots_for(shots, rate)
        assert slots <= owners
        assert slots == owners or binom.sf(slots, owners, rate) < 2.0**-40
        assert slots == 1 or binom.sf(slots - 1, owners, rate) >= 2.0**-40 or slots == int(rate * owners)


# -- failures, and what never leaves -----------------------------------------------------------------------------------


def test_a_model_that_is_down_costs_nothing(sampler_of: Make) -> None:
    def broken(demonstration: str, released: str) -> Any:
        raise ConnectionError("no")

    sampler = sampler_of(broken)
    with pytest.raises(ModelUnavailable, match="ConnectionError"):
        sampler.invoke("a")
    assert sampler.budget.spent() == 0
    sampler.model.table = lambda *_: [0.0, 1.0]
    with pytest.raises(ModelUnavailable, match="ValueError"):
        sampler.invoke("a")
    sampler.model.table = spelling()
    assert sampler.invoke("a") == SPELL


@pytest.mark.parametrize("way", WAYS)
async def test_a_failure_on_the_private_side_is_constant(
    way: str, sampler_of: Make, canary: str, canary_free: Callable[..., None]
) -> None:
    def table(demonstration: str, released: str) -> Any:
        if released:  # the zero-shot row too, which alone may fail an answer
            raise ValueError(f"{canary} {demonstration}")
        return spelling()(demonstration, released)

    sampler = sampler_of(table, rate=1.0)
    with pytest.raises(ReleaseFailed) as caught:
        await ask(way, sampler, "a")
    canary_free(caught.value, frames=True)
    assert sampler.budget.spent() == 10, "the charge stands"
    assert sampler.model.closed == len(sampler.model.opened)
    sampler.model.table = lambda *_: 1 / 0
    with pytest.raises(ModelUnavailable):
        await ask(way, sampler, "b")
    assert sampler.budget.spent() == 10, "after a failure a public question comes first"


def test_an_interrupt_on_the_private_side_stays_one(sampler_of: Make, canary_free: Callable[..., None]) -> None:
    def table(demonstration: str, released: str) -> Any:
        if released:
            raise KeyboardInterrupt(demonstration)
        return spelling()(demonstration, released)

    with pytest.raises(KeyboardInterrupt) as caught:
        sampler_of(table, rate=1.0).invoke("a")
    canary_free(caught.value, frames=True)


async def test_tracers_see_the_question_and_released_text_alone(sampler_of: Make, canary: str) -> None:
    seen: list[str] = []

    class Recorder(BaseCallbackHandler):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name.startswith("on_"):
                return lambda *a, **o: seen.append(repr((name, a, o)))
            return found

    sampler = sampler_of(rate=1.0)
    config: Any = {"callbacks": [Recorder()]}
    sampler.invoke("what?", config)
    list(sampler.stream("what?", config))
    events = [event async for event in sampler.astream_events("what?", config, version="v2")]
    assert seen
    assert canary not in "".join(seen) + json.dumps(events, default=repr)
    assert canary not in repr(sampler) + repr(draw_of(sampler.selector.store, 1.0, 2, SecureRandomness()))


def test_the_model_runs_outside_of_the_callers_context(sampler_of: Make) -> None:
    from langchain_core.runnables.config import var_child_runnable_config

    found: list[Any] = []

    def table(demonstration: str, released: str) -> Any:
        found.append(var_child_runnable_config.get())
        return spelling()(demonstration, released)

    sampler_of(table).invoke("a", {"tags": ["mine"]})
    assert found
    assert not any(found)
