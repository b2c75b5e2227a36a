"""A row of a private answer that fails: a term of zeros, and not a bit of anything else."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from table_model import TableModel, TableSession

from langchain_dpicl import DPSampler, PoissonExampleSelector, ReleaseFailed
from langchain_dpicl.decoding import answer
from langchain_dpicl.decoding.answer import PrivateAnswer, Settings, clipped_terms
from langchain_dpicl.decoding.exemplars import Draw
from langchain_dpicl.decoding.model import Demonstration, Rows, attempt
from langchain_dpicl.privacy.noise import SecureRandomness

ALPHABET = ["h", "e", "l", "o", "."]
SETTINGS = Settings(1, 0, 5, 4.0, 1.0, 1.5, ())
BAD = 3
SECRET = "Mrs Alder of 9 Elm Street"


class Panic(BaseException):
    """What some libraries raise that is no ``Exception``."""


class Odd:
    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise Panic(SECRET)


def table(demonstration: str, released: str) -> Any:
    if not demonstration:
        return [0.0, 0.3, -0.7, 1.1, 0.2]
    generator = np.random.default_rng(int(demonstration))
    return generator.normal(size=5) * 10.0 ** generator.integers(-6, 7)


class Breaking(TableModel):
    """A model that a demonstration breaks: what `fault` makes of its session, or of its row beside others."""

    fault: Callable[[Any, Sequence[int]], Any] | None = None
    opens_on_it: bool = True
    opens_on: int = 100
    reads_beside_it: bool = True

    def session(self, shared: str, demonstrations: Sequence[Demonstration], *, steps: int) -> TableSession:
        if not self.opens_on_it and any(each.text == str(BAD) for each in demonstrations):
            raise Panic(SECRET)
        if len(demonstrations) > self.opens_on:
            raise MemoryError(SECRET)
        session = super().session(shared, demonstrations, steps=steps)
        plain = session.logits

        def logits(rows: Sequence[int], released: Sequence[int]) -> Any:
            if not self.reads_beside_it and any(each.text == str(BAD) for each in session.demonstrations):
                raise Panic(SECRET)
            found, place = plain(rows, released), [session.demonstrations[row].text for row in rows]
            return found if self.fault is None or str(BAD) not in place else self.fault(found, place)

        session.logits = logits  # type: ignore[method-assign]
        return session


def breaking(fault: Any = None, **settings: Any) -> Breaking:
    model = Breaking(table, ALPHABET)
    for name, value in {"fault": fault, **settings}.items():
        setattr(model, name, value)
    return model


def raising(error: BaseException) -> Callable[..., Any]:
    def fault(found: Any, place: Any) -> Any:
        raise error

    return fault


def without_its_row(found: Any, place: list[str]) -> Any:
    return np.delete(found, 1 + place.index(str(BAD)), axis=0)


def with_a(value: float) -> Callable[..., Any]:
    def fault(found: Any, place: list[str]) -> Any:
        found[1 + place.index(str(BAD)), 2] = value
        return found

    return fault


def with_text(found: Any, place: list[str]) -> Any:
    rows = found.astype(object)
    rows[1 + place.index(str(BAD)), 1] = SECRET
    return rows


MODELS: dict[str, Callable[[], Breaking]] = {
    "raises": lambda: breaking(raising(ValueError(SECRET))),
    "raises no Exception": lambda: breaking(raising(Panic(SECRET))),
    "runs out of memory": lambda: breaking(raising(MemoryError())),
    "recurses": lambda: breaking(raising(RecursionError())),
    "gives nothing": lambda: breaking(lambda *_: None),
    "gives no array": lambda: breaking(lambda *_: Odd()),
    "gives rows of unequal length": lambda: breaking(lambda found, _: [*map(list, found[:-1]), [1.0]]),
    "gives one row less": lambda: breaking(without_its_row),
    "gives a text": lambda: breaking(with_text),
    "gives a NaN": lambda: breaking(with_a(np.nan)),
    "gives an infinity": lambda: breaking(with_a(np.inf)),
    "gives minus infinity": lambda: breaking(with_a(-np.inf)),
    "does not open": lambda: breaking(opens_on_it=False),
    "opens, and answers nothing": lambda: breaking(reads_beside_it=False),
    "opens on one at a time, and raises": lambda: breaking(raising(ValueError(SECRET)), opens_on=1),
}


def scores_of(model: TableModel, rows: list[int], monkeypatch: pytest.MonkeyPatch, slots: int | None) -> Any:
    """The integer scores of one token whose sample is these demonstrations."""
    seen: list[Any] = []
    monkeypatch.setattr(answer, "draw", lambda scores, _: seen.append(scores) or 0)  # type: ignore[func-returns-value]
    padding = Demonstration("padding", "9")
    private = PrivateAnswer(model, SETTINGS, bound=40.0, randomness=SecureRandomness(), slots=slots, padding=padding)
    private.open("?", lambda: Draw([Demonstration(i, str(i)) for i in range(9)], [rows]))
    private.token([])
    private.close()
    return seen[0]


@pytest.mark.parametrize("slots", [None, 2, 5])
@pytest.mark.parametrize("kind", MODELS)
def test_a_row_that_fails_adds_nothing_and_moves_no_other(
    kind: str, slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores, whole numbers, are those of the same sample without that owner."""
    for rows in ([BAD], [0, BAD], [BAD, 7], [8, 0, BAD, 6, 1], [7, 6, 5, 4, BAD, 2, 1, 0]):
        model = MODELS[kind]()
        expected = scores_of(TableModel(table, ALPHABET), [row for row in rows if row != BAD], monkeypatch, slots)
        assert np.array_equal(scores_of(model, rows, monkeypatch, slots), expected)
        assert model.closed == len(model.opened)


def test_a_row_of_no_numbers_is_a_term_of_zeros_exactly() -> None:
    public = np.array([0.0, 0.3, -0.7, 1.1, 0.2])
    rows = np.array([np.full(5, np.nan), np.sin(public), np.full(5, np.inf), public, np.full(5, -np.inf)])
    terms = clipped_terms(rows, public, bound=2.0, temperature=0.7, cap=1.5)
    assert terms.dtype == np.int64
    assert not terms[[0, 2, 4]].any()
    assert np.array_equal(terms[[1, 3]], clipped_terms(rows[[1, 3]], public, bound=2.0, temperature=0.7, cap=1.5))


@pytest.mark.parametrize("kind", MODELS)
def test_the_rows_beside_it_have_the_same_bits(kind: str) -> None:
    some = [Demonstration(i, str(i)) for i in range(6)]
    plain = Rows(TableModel(table, ALPHABET), "?", some, 3)
    model = MODELS[kind]()
    rows = Rows(model, "?", some, 3)
    for asked in ([0, BAD, 5], [BAD], [], [1, 2], [4, 4, BAD]):
        found, expected = rows.logits(asked, [1]), plain.logits(asked, [1])
        others = [0, *(1 + i for i, row in enumerate(asked) if row != BAD)]
        assert np.array_equal(found[others], expected[others])
        assert not np.isfinite(np.delete(found, others, axis=0)).all(axis=1).any()
    rows.close()
    assert SECRET not in repr(rows) + repr(vars(rows))


def test_only_the_zero_shot_row_fails_an_answer() -> None:
    def broken(demonstration: str, released: str) -> Any:
        return table(demonstration, released) if demonstration else 1 / 0

    some = [Demonstration(i, str(i)) for i in range(3)]
    for model in (TableModel(broken, ALPHABET), breaking(opens_on=0)):
        model.table = broken
        with pytest.raises(ZeroDivisionError):
            Rows(model, "?", some, 1).logits([0, 2], [])
    with pytest.raises(ValueError, match="another shape"):
        Rows(TableModel(lambda *_: [0.0], ALPHABET), "?", some, 1).logits([0], [])


def test_one_call_a_token_is_made_where_no_row_fails() -> None:
    model = TableModel(table, ALPHABET)
    rows = Rows(model, "?", [Demonstration(i, str(i)) for i in range(9)], 4)
    for step in range(4):
        rows.logits(range(9), [0] * step)
    assert model.calls == [9] * 4
    assert len(model.opened) == 1


def test_nothing_is_left_of_what_a_row_raised() -> None:
    class Kept(Exception):
        pass

    left: list[weakref.ref[Kept]] = []

    def fault(found: Any, place: Any) -> Any:
        error = Kept(SECRET)
        left.append(weakref.ref(error))
        raise error

    rows = Rows(breaking(fault), "?", [Demonstration(i, str(i)) for i in range(6)], 1)
    rows.logits([0, BAD, 5], [])
    gc.collect()
    assert len(left) == 3
    assert all(reference() is None for reference in left)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_in_the_main_thread_and_is_a_rows_own_in_another(kind: type[BaseException]) -> None:
    def raises() -> None:
        raise kind(SECRET)

    with pytest.raises(kind) as caught:
        attempt(raises)
    assert caught.value.args == ()
    assert caught.value.__context__ is None
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.append(attempt(raises)))
    worker.start()
    worker.join()
    assert found == [None], "signals come to the main thread alone"


# -- whole answers -----------------------------------------------------------------------------------------------------


def spelling(demonstration: str, released: str) -> list[float]:
    """So sure of "helo", and of the end after it, that no draw differs (below 1e-30 a token)."""
    return [100.0 if token == min(len(released), 4) else 0.0 for token in range(5)]


@pytest.fixture
def sampler_of(budget_of: Any, store_of: Any, records: Any, canary: str) -> Callable[..., DPSampler]:
    def make(model: TableModel, rate: float = 1.0, **options: Any) -> DPSampler:
        selector = PoissonExampleSelector(store_of(records(6, secret=canary)), 2, rate=rate, max_exemplars=8)
        return DPSampler(model, selector, budget_of(releases=400), shots=4, top_k=5, max_tokens=6, **options)

    return make


@pytest.mark.parametrize("pad", [True, False])
def test_one_owners_demonstration_fails_no_answer(pad: bool, sampler_of: Any, canary: str) -> None:
    """Every owner takes part in every token, and one makes the model raise, by an error of any kind."""

    def told(demonstration: str, released: str) -> list[float]:
        if "text 3" in demonstration:
            raise Panic(demonstration)
        return spelling(demonstration, released)

    sampler = sampler_of(TableModel(told, ALPHABET, frozenset({4})), pad=pad)
    assert [sampler.invoke("what?") for _ in range(5)] == ["helo"] * 5
    assert sampler.budget.spent() == 25, "nothing but the tokens that were sampled"


def test_a_demonstration_on_which_the_model_cannot_even_be_asked_has_no_part(sampler_of: Any) -> None:
    class Measuring(TableModel):
        def fits(self, demonstration: str, shared: str, tokens: int) -> bool:
            if "text 3" in demonstration:
                raise Panic(demonstration)
            return super().fits(demonstration, shared, tokens)

    sampler = sampler_of(Measuring(spelling, ALPHABET, frozenset({4})), pad=False)
    assert sampler.invoke("what?") == "helo"
    assert len(sampler.model.opened[-1]) == 5


def test_an_answer_whose_zero_shot_row_fails_shows_nothing_of_a_row_that_failed_before(
    sampler_of: Any, canary_free: Callable[..., None]
) -> None:
    def told(demonstration: str, released: str) -> list[float]:
        if "text 3" in demonstration or released:
            raise ValueError(demonstration)
        return spelling(demonstration, released)

    sampler = sampler_of(TableModel(told, ALPHABET, frozenset({4})))
    with pytest.raises(ReleaseFailed) as caught:
        sampler.invoke("what?")
    canary_free(caught.value, frames=True)
