"""Keywords: the words that most answers share, by the joint exponential mechanism or by propose-test-release."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from langchain_dpicl.aggregators.base import Aggregator, Outcome, Words
from langchain_dpicl.aggregators.reading import answer_of
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.mechanism import Options
from langchain_dpicl.privacy.mechanisms import PTR
from langchain_dpicl.privacy.noise import Randomness, choose_exponential, choose_weighted, random_below


class ReleasedKeywords(list[str]):
    """Keywords that were released, as a list of words. Public.

    Attributes
    ----------
    ranked
        Whether the order means anything: the most frequent first. Otherwise it is alphabetical.
    fallback
        Whether the test failed, so that there are no keywords and the zero-shot answer has to do.
    query
        The caller's input.
    """

    def __init__(
        self,
        words: Iterable[str] = (),
        *,
        ranked: bool = False,
        fallback: bool = False,
        query: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(words)
        self.ranked = ranked
        self.fallback = fallback
        self.query: Mapping[str, Any] = dict(query or {})


class Keywords(Aggregator[ReleasedKeywords]):
    """Release words that many members' answers share; make one with `Keywords.joint_em` or `Keywords.ptr`.

    A member adds each of its words once. `Words` says what a word is. An answer without words, or without a word of the
    domain, counts like an abstention: it adds nothing, and neither does a model's thinking. Turn the release back into
    a text with `keywords_to_answer`.

    Source: keyword space aggregation (KSA), Wu et al. 2024, section 3.2.2; `joint_em` and `ptr` say what is corrected.
    """

    gives_text = True

    def __init__(self, words: Words | None) -> None:
        if words is not None and not isinstance(words, Words):
            raise InvalidParameter("words", type(words).__name__, "Words")
        self.words = Words() if words is None else words
        self._values: Mapping[str, Any] = {}

    @staticmethod
    def joint_em(
        domain: Sequence[str] | Literal["query"] = "query", k: int = 10, *, words: Words | None = None
    ) -> Keywords:
        """k words of a public domain, ranked, by ONE joint exponential mechanism.

        Mechanism. Count for each word of the domain the members that use it: c_(1) >= c_(2) >= ... Release a sequence s
        of k different words with probability proportional to exp(-eps0 l(s) / 4), where the loss
        l(s) = max_i (c_(i) - c_{s_i}) compares the count of the i-th word with the i-th largest count. The sampler is
        exact (`sample_sequence`).

        Neighbours and range. One member's output replaced by any other: every count moves by at most 1. c_(i) and
        c_{s_i} may move in opposite directions, so l(s) moves by at most 2 EITHER WAY, log-probabilities before
        normalisation by at most eps0 / 2 either way, and their differences between sequences by at most eps0:
        eps0-bounded range. A single word (k = 1) has weights exp(-eps0 l(s) / 2): l(s) - l(s') = c_{s'} - c_s has no
        c_(1), and moves by at most 2 in all, so log-probabilities differ by at most eps0 between words as well. With a
        call for every owner one output is added or removed: all counts move the same way, by at most 1, and l(s) by at
        most 1 either way. So both weights may have twice the exponent.

        Parameters
        ----------
        domain
            The words that may be released: a public list, or "query" for the words of the texts in the caller's input.
            It is never taken from the answers. A list entry of several words counts as these words.
        k
            How many words; at most as many as the list holds. A query with fewer words gets all of them, ranked; one
            without words is refused before anything is charged.
        words
            How texts become words. Default: `Words()`; for a list, without stop words, so that none of its entries is
            one. An entry that holds no word is refused.

        Equal counts everywhere, also if all members fail, release a uniformly random sequence: the release cannot
        show that the members fail, so the ensemble asks the member a public question from time to time first.

        Source: Gillenwater, Joseph, Munoz Medina and Ribero 2022, "A joint exponential mechanism for differentially
        private top-k"; its use for keywords, Wu et al. 2024, section 3.2.2, with the sensitivity corrected.
        """
        return _JointEM(domain, k, words)

    @staticmethod
    def ptr(
        k: int | tuple[int, int] = (15, 30),
        *,
        delta0: float | None = None,
        select: float | None = None,
        words: Words | None = None,
    ) -> Keywords:
        """The k most frequent words of all answers, from no fixed domain, by propose-test-release.

        Mechanism. With d_k = c_(k) - c_(k+1): choose k in the public range as the argmax of d_k + Gumbel(4 / eps0);
        then release the SET of the k most frequent words (in alphabetical order) if
        max(2, d_k) + N(0, 4 sigma^2) - Phi^-1(1 - delta0; 0, 2 sigma) > 2 for this same k, and nothing otherwise.

        Neighbours and profile. One member's output replaced by any other: d_k moves by at most 2, so the choice of k is
        eps0-bounded range. If d_k > 2, the neighbour's set is the same, and the test is a Gaussian of multiplier
        sigma; if it may differ, both gaps are at most 2, and each releases with probability delta0. delta0 is paid
        at EVERY release. Choice and test share a sample: they are composed before they are amplified.

        Parameters
        ----------
        k
            A public number of words, or a range (least, most) to choose from.
        delta0
            Default: so that all releases of the plan together use half of its delta for it.
        select
            eps0 = select / sigma for the choice of k, 1 unless given. With one public k it is 0: there is no choice,
            and ``select`` is refused.
        words
            How texts become words.

        A failed test releases an empty list with ``fallback=True``, and the receipt says "zero-shot fallback". To pass
        it often, the gap has to reach some ten sigma: this release wants many members.

        The test's outcome is drawn by its probability, computed within one part in 1e12 on either side: at most 2e-12
        of epsilon.

        Source: Zhu and Wang 2022; Wu et al. 2024, section 3.2.2, algorithm 6 and theorem 11. (The code that its authors
        published tests the gap at k + 1 instead, and pays delta0 once.)
        """
        return _ProposeTestRelease(k, delta0, select, words)

    def check_encoded(self, encoded: object) -> None:
        if isinstance(encoded, (np.ndarray, frozenset)) and not len(encoded):
            raise ValueError("it has no word that could be released")

    async def aencode(self, output: object) -> object:
        return await asyncio.to_thread(self.encode, output)  # a long text takes a while

    @property
    def variant(self) -> str:
        return f"{self!r} {self.words!r}"

    def dump(self, release: ReleasedKeywords) -> str:
        return json.dumps({"words": list(release), "ranked": release.ranked, "fallback": release.fallback})

    def load(self, text: str, values: Mapping[str, Any]) -> ReleasedKeywords:
        held = json.loads(text)
        return ReleasedKeywords(held["words"], ranked=held["ranked"], fallback=held["fallback"], query=values)

    def zero_shot(self, output: object, values: Mapping[str, Any]) -> ReleasedKeywords:
        return ReleasedKeywords(fallback=True, query=values)

    @property
    def release_type(self) -> Any:
        return list[str]

    @abstractmethod
    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> ReleasedKeywords: ...


class _JointEM(Keywords):
    kind = "joint-em"
    mechanism = "joint-em"
    tells_abstention = False
    takes_own_calls = True

    @classmethod
    def constructor(cls) -> Callable[..., Any]:
        return Keywords.joint_em

    def __init__(self, domain: Sequence[str] | Literal["query"], k: int, words: Words | None) -> None:
        by_query = isinstance(domain, str) and domain == "query"
        super().__init__(Words(stop_words=None) if words is None and not by_query else words)
        self.k = checks.whole("k", k)
        self._spelling: tuple[str, ...] = ()
        self._index: dict[str, int] = {}
        self.domain = "query" if by_query else "list"
        if by_query:
            return
        if isinstance(domain, str) or not isinstance(domain, Sequence):
            raise InvalidParameter("domain", type(domain).__name__, 'a list of words, or "query"')
        for i, entry in enumerate(domain):
            if not isinstance(entry, str):
                raise InvalidParameter("domain", domain, "a list of strings")
            if not self.words(entry):
                raise InvalidParameter(f"domain[{i}]", entry, f"a text with a word, by {self.words!r}")
        self._set_domain(domain)
        if self.k > len(self._spelling):
            raise InvalidParameter("k", k, f"at most the number of words in the domain, {len(self._spelling)}")

    def _set_domain(self, texts: Iterable[str]) -> None:
        spelling: dict[str, str] = {}
        for text in texts:
            for word in self.words(text):
                spelling.setdefault(self.words.key(word), word)
        self._spelling = tuple(spelling.values())
        self._index = {key: i for i, key in enumerate(spelling)}

    def prepare(self, values: Mapping[str, Any], options: Options, answers: Sequence[object] = ()) -> Self:
        bound = copy.copy(self)
        bound._values = values
        if self.domain == "query":
            bound._set_domain(text for text in values.values() if isinstance(text, str))
            bound.k = min(self.k, len(bound._spelling))
            if not bound.k:
                needed = "at least one value with a word that is not a stop word"
                raise InvalidParameter("input", sorted(values), needed)
        return bound

    @property
    def samples(self) -> Sequence[str]:
        return [" ".join(self._spelling[: self.k])] if self._spelling else super().samples

    def encode(self, output: object) -> object:
        known = (self._index.get(key) for key in self.words.keys(answer_of(output) or ""))
        return np.array([i for i in known if i is not None], np.int64)

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> ReleasedKeywords:
        said = [output for output in outputs if isinstance(output, np.ndarray)]
        counts = np.bincount(np.concatenate([np.empty(0, np.int64), *said]), minlength=len(self._spelling))
        eps0 = 2.0 * parameter if self._crowd(outputs).own_calls else parameter
        chosen = sample_sequence(counts, self.k, eps0, randomness)
        return ReleasedKeywords((self._spelling[i] for i in chosen), ranked=True, query=self._values)

    @property
    def variant(self) -> str:
        return f"{super().variant} {self._spelling!r}"

    def __repr__(self) -> str:
        domain = repr("query") if self.domain == "query" else f"<{len(self._spelling)} words>"
        return f"Keywords.joint_em({domain}, k={self.k})"


class Levels(NamedTuple):
    """PRIVATE: what the counts say about losses.

    ``order`` holds the tokens by falling count, ``losses`` every attainable loss, rising from 0, and ``reach[a, i]``
    the number of tokens that position i (from 0) may hold if the loss is to stay within ``losses[a]``.
    """

    order: NDArray[np.int64]
    losses: NDArray[np.int64]
    reach: NDArray[np.int64]


def sample_sequence(counts: NDArray[np.int64], k: int, eps0: float, randomness: Randomness) -> NDArray[np.int64]:
    """Release k distinct indices of ``counts``, ranked: eps0-bounded range when one member's output is replaced.

    ``counts[j]`` says how many members named token j, over a PUBLIC list of tokens, those that nobody named included.
    The law is that of `Keywords.joint_em`. The sampler is our own: counts are small integers, so the d tokens are
    grouped by count, in time about d + k * (attainable losses), and no float decides anything.

    Why its law is that one. Let n_i(l) = #{j : c_j >= c_(i) - l}: position i may hold any of the n_i(l) top tokens if
    the loss is to stay within l. It does not fall with i or l, and n_i(l) >= i.

    1. Filling positions in order, A(l) = prod_i (n_i(l) - (i-1)) sequences have a loss <= l: the i-1 tokens used so far
       are among the n_i(l). So B(l) = A(l) - A(l-1) have a loss of exactly l, and the loss is drawn with weight B(l)
       exp(-eps0 l / 4), or exp(-eps0 l / 2) for k = 1.
    2. Given l, let i be the first position whose own loss is exactly l. Positions r < i have n_r(l-1) - (r-1) choices
       each. Position i has e_i(l) = n_i(l) - n_i(l-1), the tokens of count c_(i) - l; none is used yet, since the
       positions before it hold counts > c_(r) - l >= c_(i) - l. Positions r > i have n_r(l) - (r-1), since all used
       tokens are among the n_i(l) <= n_r(l). The product of these is the weight of i; the weights add up to B(l).
    3. Given l and i, each position draws uniformly among its choices, so every sequence is drawn once with equal
       chances. Tokens sit in slots by falling count, and each drawn token trades places with the slot of its rank. Used
       tokens then fill the first slots, and trades stay inside prefixes that later positions contain: position r draws
       among the slots r, ..., n_r, and position i among n_i(l-1) + 1, ..., n_i(l), which no trade has touched.
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or not counts.size or counts.min() < 0:
        raise InvalidParameter("counts", "(not shown)", "a vector of whole numbers >= 0, at least one")
    k = checks.whole("k", k, at_most=counts.size)
    rate = checks.positive("eps0", eps0) / (2.0 if k == 1 else 4.0)

    levels = loss_levels(counts, k)
    level = choose_exponential(sequence_counts(levels.reach), levels.losses.tolist(), rate, randomness)
    before, within = neighbouring_reach(levels.reach, level)
    first = choose_weighted(first_position_weights(before, within), randomness)

    lows = [*range(first), before[first], *range(first + 1, k)]
    highs = before[:first] + within[first:]
    moved: dict[int, int] = {}  # the slots that do not hold their own token any more
    drawn = []
    for rank, (low, high) in enumerate(zip(lows, highs, strict=True)):
        slot = low + random_below(high - low, randomness)
        drawn.append(moved.get(slot, slot))
        moved[slot] = moved.get(rank, rank)
    return levels.order[drawn]


def loss_levels(counts: NDArray[np.int64], k: int) -> Levels:
    """PRIVATE: the attainable losses of k positions, and what each position may hold within them."""
    deficits = (counts.max() - counts).astype(np.int64)
    span = int(deficits.max())
    # NumPy sorts up to 16 bits by radix.
    narrow = deficits.astype(np.uint8 if span < 1 << 8 else np.uint16 if span < 1 << 16 else np.int64)
    order = np.argsort(narrow, kind="stable")
    ranked = deficits[order]
    sizes = np.append(np.flatnonzero(np.diff(ranked)) + 1, ranked.size)
    values = ranked[sizes - 1]
    tops = ranked[:k]
    differences = np.subtract.outer(values, np.unique(tops)).ravel()
    losses = np.unique(differences[differences >= 0])
    groups = np.searchsorted(values, np.add.outer(losses, tops), side="right") - 1
    return Levels(order, losses, sizes[groups])


def sequence_counts(reach: NDArray[np.int64]) -> list[int]:
    """B(l) for every attainable loss: the exact number of sequences with exactly this loss."""
    choices = reach - np.arange(reach.shape[1])
    at_once = 62 // int(choices.max()).bit_length()  # factors whose product fits into 62 bits
    blocks = np.multiply.reduceat(choices, np.arange(0, reach.shape[1], at_once), axis=1)
    within = [math.prod(row) for row in blocks.tolist()]
    return [here - before for before, here in zip([0, *within], within, strict=False)]


def neighbouring_reach(reach: NDArray[np.int64], level: int) -> tuple[list[int], list[int]]:
    """n_i(l-1) and n_i(l) of every position, for the loss of this level. Below a loss of 0 there is nothing."""
    before = reach[level - 1].tolist() if level else [0] * reach.shape[1]
    return before, reach[level].tolist()


def first_position_weights(before: Sequence[int], within: Sequence[int]) -> list[int]:
    """For every position i, the number of sequences of loss exactly l in which i is the first with a loss of l.

    At l = 0 that is position 1 always, and the factor n_1(-1) = 0 says so.
    """
    k = len(within)
    left = list(accumulate((before[r] - r for r in range(k - 1)), mul, initial=1))
    right = list(accumulate((within[r] - r for r in range(k - 1, 0, -1)), mul, initial=1))[::-1]
    return [left[i] * (within[i] - before[i]) * right[i] for i in range(k)]


class _ProposeTestRelease(Keywords):
    kind = "ptr"
    mechanism = "ptr"

    @classmethod
    def constructor(cls) -> Callable[..., Any]:
        return Keywords.ptr

    def __init__(
        self, k: int | tuple[int, int], delta0: float | None, select: float | None, words: Words | None
    ) -> None:
        super().__init__(words)
        pair = (k, k) if not isinstance(k, (tuple, list)) else tuple(k)
        if len(pair) != 2:
            raise InvalidParameter("k", k, "a whole number, or a range (least, most)")
        self.least = checks.whole("k", pair[0])
        self.most = checks.whole("k", pair[1], at_least=self.least)
        chooses_k = self.most > self.least
        if not chooses_k and select is not None:
            raise InvalidParameter("select", select, "left out with one public k: there is no choice")
        if select is None:
            select = 1.0 if chooses_k else 0.0
        given = {"select": select}
        if delta0 is not None:
            given["delta0"] = delta0
        checked = PTR.of({"delta0": 0.25, **given}).options
        if chooses_k:
            checks.positive("select", select)
        self._options = {name: checked[name] for name in given}
        self._delta0: float | None = self._options.get("delta0")

    @property
    def options(self) -> Options:
        return self._options

    def prepare(self, values: Mapping[str, Any], options: Options, answers: Sequence[object] = ()) -> Self:
        bound = copy.copy(self)
        bound._values = values
        bound._delta0 = options.get("delta0")
        return bound

    def encode(self, output: object) -> object:
        return self.words.keys(answer_of(output) or "")

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> ReleasedKeywords:
        if self._delta0 is None:
            raise InvalidParameter("delta0", None, "the plan's, which `prepare` brings")
        counts = Counter(key for output in outputs if isinstance(output, frozenset) for key in output)
        top = counts.most_common(self.most + 1)
        heights = [count for _, count in top] + [0] * (self.most + 2)
        gaps = {k: heights[k - 1] - heights[k] for k in range(self.least, self.most + 1)}
        k = self._choose(gaps, parameter, randomness)
        if not _passes(gaps[k], parameter, self._delta0, randomness):
            return ReleasedKeywords(fallback=True, query=self._values)
        return ReleasedKeywords(sorted(word for word, _ in top[:k]), query=self._values)

    def _choose(self, gaps: Mapping[int, int], sigma: float, randomness: Randomness) -> int:
        """argmax of d_k + Gumbel(4 / eps0): each k with probability proportional to exp(eps0 d_k / 4)."""
        if self.least == self.most:
            return self.least
        best = max(gaps.values())
        rate = self._options["select"] / sigma / 4
        return self.least + choose_exponential([1] * len(gaps), [best - gap for gap in gaps.values()], rate, randomness)

    def outcome(self, release: ReleasedKeywords | None) -> Outcome:
        return "zero-shot fallback" if release is None or release.fallback else "released"

    def __repr__(self) -> str:
        k = self.least if self.least == self.most else (self.least, self.most)
        return f"Keywords.ptr(k={k}{''.join(f', {name}={value:g}' for name, value in self._options.items())})"


def _passes(gap: int, sigma: float, delta0: float, randomness: Randomness) -> bool:
    """Draw True if max(2, gap) + N(0, 4 sigma^2) - Phi^-1(1 - delta0; 0, 2 sigma) > 2, by its probability."""
    reach = float(ndtri(delta0 * (1 - 1e-12))) + (max(2, gap) - 2) / (2 * sigma)
    (uniform,) = randomness.uniforms(1)
    # Draw the rarer of the two outcomes, whose probability has its full relative precision.
    return bool(uniform < ndtr(reach)) if reach <= 0 else not uniform < ndtr(-reach)
