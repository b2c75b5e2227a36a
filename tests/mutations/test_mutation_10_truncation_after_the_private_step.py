"""Mistake 10: a truncation after the private step. What is cut away tells what the private numbers were."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from exact import Branching, Law, check_profile, law
from keyword_laws import EACH, neighbouring_laws
from numpy.typing import NDArray
from table_model import TableModel

from langchain_dpicl import Keywords
from langchain_dpicl.aggregators import ReleasedKeywords
from langchain_dpicl.aggregators.keywords import _JointEM
from langchain_dpicl.decoding import answer
from langchain_dpicl.decoding.answer import Settings
from langchain_dpicl.privacy import MECHANISMS, Randomness

Patch = pytest.MonkeyPatch
Draw = Callable[[NDArray[np.int64], Randomness], int]

BOUND = 1.0
MODEL = TableModel(lambda shown, released: [0.0] * 4, "abcd")
SETTINGS = Settings(max_tokens=1, min_tokens=0, top_k=4, shots=1.0, temperature=1.0, cap=1.5, stop=())
PUBLIC = np.array([0.6, 0.5, 0.4, 0.3], np.float32)
ROWS = [np.array(row, np.float32) for row in itertools.product((-3.0, 0.5, 3.0), repeat=4)][::5]
"""One-shot logits, that an owner's exemplar may lead to."""


def token_law(rows: Sequence[NDArray[np.float32]]) -> Law:
    """The law of the product's next token, where these owners take part in it."""
    one_shot = np.array(rows, np.float32).reshape(len(rows), 4)
    terms = partial(answer.clipped_terms, bound=BOUND, temperature=1.0, cap=SETTINGS.cap)

    def run(randomness: Branching) -> int:
        return answer.choose(MODEL, SETTINGS, [], PUBLIC, one_shot, terms, randomness)

    return law(run)


def check_token() -> None:
    """Exact enumeration: nobody, or one owner of each kind, and one owner more or less, both ways: the token's two laws
    against the profile of a range of BOUND."""

    def pairs() -> Iterator[tuple[Law, Law]]:
        for others in ([], *([row] for row in ROWS)):
            without = token_law(others)
            for row in ROWS:
                present = token_law([*others, row])
                yield present, without
                yield without, present

    check_profile(pairs(), MECHANISMS["tokens"]().profile(BOUND))


def _cut(keep: Callable[[NDArray[np.float64]], NDArray[np.bool_]], real: Draw) -> Draw:
    """Draw among the scores that ``keep`` keeps, given their probabilities."""

    def draw(scores: NDArray[np.int64], randomness: Randomness) -> int:
        weights = np.exp((scores - scores.max()) * answer.STEP)
        kept = np.flatnonzero(keep(weights / weights.sum()))
        return int(kept[real(scores[kept], randomness)])

    return draw


def _nucleus(probabilities: NDArray[np.float64]) -> NDArray[np.bool_]:
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = np.zeros(len(probabilities), bool)
    kept[order[before < 0.8]] = True
    return kept


def top_k_of_the_mixed_scores(patch: Patch) -> None:
    """The mutant: the two likeliest tokens of the mixture."""
    patch.setattr(answer, "draw", _cut(lambda p: p >= np.sort(p)[-2], answer.draw))


def top_p_of_the_mixed_scores(patch: Patch) -> None:
    """The mutant: the fewest tokens that hold 0.8 of the mixture."""
    patch.setattr(answer, "draw", _cut(_nucleus, answer.draw))


@pytest.mark.parametrize("mutant", [top_k_of_the_mixed_scores, top_p_of_the_mixed_scores])
def test_10_a_truncated_token_is_caught(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    check_token()
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="is claimed"):
        check_token()


class OnlySharedWords(_JointEM):
    """The mutant: of the drawn words, only those that somebody said."""

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> ReleasedKeywords:
        counts: Counter[str] = Counter(
            self._spelling[int(i)] for output in outputs if isinstance(output, np.ndarray) for i in output
        )
        drawn: Any = super().aggregate(outputs, parameter, randomness)
        return ReleasedKeywords([word for word in drawn if counts[word]], ranked=True)


def check_keywords(aggregator: Keywords) -> None:
    """Exact enumeration: two of three words; every set of words of each of two members, every neighbour."""
    check_profile(neighbouring_laws(aggregator, "abc", 2, 1.2), MECHANISMS["joint-em"]().profile(1.2))


def test_10_a_truncated_list_of_keywords_is_caught() -> None:
    check_keywords(Keywords.joint_em(["a", "b", "c"], 2, words=EACH))
    with pytest.raises(AssertionError, match="is claimed"):
        check_keywords(OnlySharedWords(["a", "b", "c"], 2, EACH))
