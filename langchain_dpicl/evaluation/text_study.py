"""How good private texts are: embedding means and keywords against epsilon, from one pass of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_core.embeddings import Embeddings

from langchain_dpicl.aggregators import Aggregator, EmbeddingMean, Keywords, ReleasedKeywords
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.evaluation.data import Row
from langchain_dpicl.evaluation.passes import PassFile, key_of
from langchain_dpicl.evaluation.schedule import Schedule
from langchain_dpicl.evaluation.scores import Score, Value
from langchain_dpicl.evaluation.tasks import GenerationTask
from langchain_dpicl.evaluation.text import meaning_scores, text_measures
from langchain_dpicl.evaluation.text_pass import Author, Written, keep
from langchain_dpicl.privacy.mechanisms import default_delta0
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.private.boundary import ABSTAIN

Runs = list[list[str]]
"""Texts by run and query."""

_NO_NOISE = 1e-9  # of a standard deviation, on a lattice of steps of 2^-16
_NO_CHOICE = 1e9  # eps0 of a choice that always takes the best


@dataclass(frozen=True)
class TextStudy:
    """What the model wrote, and what the aggregators make of it.

    Parameters
    ----------
    written
        For each query what was written with each sample of owners.
    candidates
        For each query the public sentences that an embedding mean chooses among.
    author, file
        Write texts from released keywords, and keep them.
    draws
        How often the noise of an embedding mean is drawn for each sample. Keywords are drawn once a sample: each draw
        is a text of its own to write.
    """

    task: GenerationTask
    queries: Sequence[Row]
    written: Sequence[Sequence[Written]]
    candidates: Sequence[Sequence[str]]
    schedule: Schedule
    embeddings: Embeddings
    author: Author
    file: PassFile
    draws: int = 5
    _encoded: dict[Any, Any] = field(default_factory=dict, repr=False)

    def prompts(self) -> list[Score]:
        """What one prompt says: without examples, with private ones, with public ones."""
        few = self.schedule.few_shots
        found = [
            self._score("zero-shot", self._alone(lambda each: each.zero_shot)),
            self._score(f"{few}-shot", self._alone(lambda each: each.few_shot)),
        ]
        if self.file.settings.get("public"):
            found.append(self._score(f"public {few}-shot", self._alone(lambda each: each.public)))
        members = [
            [row[s].members[m] or "" for row in self.written]
            for s in range(len(self.written[0]))
            for m in range(self.schedule.members)
        ]
        return [*found, self._score("member", members)]

    # -- embedding means ----------------------------------------------------------------------------------------------

    def embedding(self) -> list[Score]:
        """The nearest candidate to the mean, without noise and at each epsilon."""
        return self._means(self.schedule, max(map(len, self.candidates)))

    def by_candidates(self, counts: Sequence[int]) -> list[Score]:
        """The ablation of the number of candidates: the first so many."""
        return [replace(s, study="candidates") for n in counts for s in self._means(self.schedule, n)]

    def by_members(self, counts: Sequence[int]) -> list[Score]:
        """The ablation of the ensemble's size at the same shots, by the first n members (as in `LabelStudy`)."""
        everything = max(map(len, self.candidates))
        schedules = map(self.schedule.with_members, counts)
        return [replace(s, study="members") for schedule in schedules for s in self._means(schedule, everything)]

    def _means(self, schedule: Schedule, candidates: int) -> list[Score]:
        facts = {**schedule.facts, "candidates": candidates}
        plain = self._choose(schedule, candidates, _NO_NOISE, draws=1)
        found = [self._score("embedding", plain, **facts)]
        for epsilon in schedule.epsilons:
            vector = EmbeddingMean(self.embeddings, release="vector")
            sigma = schedule.parameter(epsilon, vector.mechanism, vector.options)
            texts = self._choose(schedule, candidates, sigma, draws=self.draws)
            facts |= {"sigma": sigma, "flipped": _apart(texts, plain, self.draws)}
            found.append(self._score("embedding", texts, epsilon=epsilon, **facts))
        return found

    def _choose(self, schedule: Schedule, candidates: int, sigma: float, *, draws: int) -> Runs:
        """Releases by the product's own mechanism; "" where the members abstain, and where there is no candidate."""
        randomness = SecureRandomness()

        def release(query: int, sample: int) -> str:
            if not self.candidates[query][:candidates]:
                return ""
            vectors = self._vectors(query, sample)[: schedule.members]
            return str(self._mean(query, candidates).aggregate(vectors, sigma, randomness) or "")

        samples = [s for s in range(len(self.written[0])) for _ in range(draws)]
        return [[release(i, s) for i in range(len(self.queries))] for s in samples]

    def _mean(self, query: int, candidates: int) -> EmbeddingMean:
        key = ("mean", query, candidates)
        if key not in self._encoded:
            self._encoded[key] = EmbeddingMean(self.embeddings, self.candidates[query][:candidates]).prepare({}, {})
        mean: EmbeddingMean = self._encoded[key]
        return mean

    def _vectors(self, query: int, sample: int) -> list[Any]:
        key = ("vectors", query, sample)
        if key not in self._encoded:
            mean = self._mean(query, max(map(len, self.candidates)))
            members = self.written[query][sample].members
            self._encoded[key] = [mean.encode(text) if text else ABSTAIN for text in members]
        vectors: list[Any] = self._encoded[key]
        return vectors

    # -- keywords -----------------------------------------------------------------------------------------------------

    def joint_em(self) -> list[Score]:
        """Ranked keywords among the query's own words; the zero-shot text where it has none."""
        words = Keywords.joint_em("query", self.task.k)
        found = [self._keywords("joint-em", words, _NO_CHOICE)]
        for epsilon in self.schedule.epsilons:
            found.append(self._keywords("joint-em", words, self.schedule.parameter(epsilon, words.mechanism), epsilon))
        return found

    def ptr(self) -> list[Score]:
        """The set of the words that most members use."""
        schedule = self.schedule
        delta0 = default_delta0(schedule.delta, schedule.rate, schedule.releases)
        words = Keywords.ptr(self.task.keywords, delta0=delta0)
        found = [self._score("ptr", self._texts(lambda i, s: self._most_used(words, i, s)), **schedule.facts)]
        for epsilon in schedule.epsilons:
            sigma = schedule.parameter(epsilon, words.mechanism, words.options)
            found.append(self._keywords("ptr", words, sigma, epsilon, delta0=delta0))
        return found

    def _most_used(self, words: Keywords, query: int, sample: int) -> ReleasedKeywords:
        """What propose-test-release would release if it asked for no gap."""
        counts = Counter(key for keys in self._encode(words, query, sample) for key in keys)
        least, most = self.task.keywords
        top = counts.most_common(most + 1)
        heights = [count for _, count in top] + [0] * (most + 2)
        k = max(range(least, most + 1), key=lambda k: heights[k - 1] - heights[k])
        return ReleasedKeywords(sorted(word for word, _ in top[:k]))

    def _keywords(
        self, method: str, words: Keywords, parameter: float, epsilon: float | None = None, **options: float
    ) -> Score:
        randomness, empty = SecureRandomness(), []

        def release(query: int, sample: int) -> ReleasedKeywords:
            try:
                asked = words.prepare({"input": self.queries[query].input}, options)
            except InvalidParameter:  # a query without words
                found = ReleasedKeywords()
            else:
                found = asked.aggregate(self._encode(asked, query, sample), parameter, randomness)
            empty.append(not found)
            return found

        texts = self._texts(release)
        facts = {**self.schedule.facts, "fallback": 100 * sum(empty) / len(empty)}
        if epsilon is not None:
            facts["sigma" if method == "ptr" else "eps0"] = parameter
        return self._score(method, texts, epsilon=epsilon, **facts)

    def _encode(self, words: Aggregator[Any], query: int, sample: int) -> list[Any]:
        return [words.encode(text) for text in self.written[query][sample].members if text is not None]

    def _texts(self, release: Callable[[int, int], ReleasedKeywords]) -> Runs:
        """A text for each release: from its keywords, or the zero-shot one where there are none."""
        found = []
        for s in range(len(self.written[0])):
            found.append([self._text(i, s, release(i, s)) for i in range(len(self.queries))])
        return found

    def _text(self, query: int, sample: int, words: ReleasedKeywords) -> str:
        if not words:
            return self.written[query][sample].zero_shot or ""
        key = ("words", key_of(self.queries[query].input), words.ranked, *words)
        if key not in self.file:
            keep(self.file, key, [self.author.from_words(words, self.queries[query].input)])
        return str(self.file[key][0])

    # -- scores -------------------------------------------------------------------------------------------------------

    def _alone(self, kind: Callable[[Written], str | None]) -> Runs:
        samples = range(len(self.written[0]))
        return [[kind(row[s]) or "" for row in self.written] for s in samples]

    def _score(self, method: str, runs: Runs, *, epsilon: float | None = None, **facts: float) -> Score:
        return score_texts(method, runs, self.queries, self.embeddings, epsilon=epsilon, facts=facts)


def score_texts(
    method: str,
    runs: Runs,
    queries: Sequence[Row],
    embeddings: Embeddings,
    *,
    epsilon: float | None,
    facts: dict[str, float],
) -> Score:
    """The score of texts by run and query, against the queries' references."""
    references = [list(row.references) for row in queries]
    flat, wide = [text for run in runs for text in run], references * len(runs)
    measures = {**text_measures(flat, wide), "meaning": meaning_scores(flat, wide, embeddings)}
    n = len(queries)
    values = {name: Value.of([found[i : i + n] for i in range(0, len(found), n)]) for name, found in measures.items()}
    return Score(method, epsilon, values, len(runs), n, facts)


def _apart(texts: Runs, plain: Runs, draws: int) -> float:
    """The share of texts, in per cent, that are not what there is without noise."""
    pairs = [(text, plain[run // draws][i]) for run, row in enumerate(texts) for i, text in enumerate(row)]
    return 100 * sum(text != other for text, other in pairs) / len(pairs)
