"""How good private texts are: embedding means and keywords against epsilon, from one pass of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_core.embeddings import Embeddings

from langchain_dpicl.aggregators import EmbeddingMean, Keywords, ReleasedKeywords
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.evaluation.data import Row
from langchain_dpicl.evaluation.passes import PassFile, key_of
from langchain_dpicl.evaluation.plan import EvaluationPlan
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
    """Aggregates of the texts of a pass.

    Parameters
    ----------
    written
        For each query the model's texts with each sample of owners.
    candidates
        For each query the public sentences that an embedding mean chooses among.
    author, file
        Write texts from released keywords, and keep them.
    draws
        How often the noise of an embedding mean is drawn for each sample. Keywords are drawn once a sample: each draw
        needs a text of its own.
    """

    task: GenerationTask
    queries: Sequence[Row]
    written: Sequence[Sequence[Written]]
    candidates: Sequence[Sequence[str]]
    plan: EvaluationPlan
    embeddings: Embeddings
    author: Author
    file: PassFile
    draws: int = 5
    _encoded: dict[Any, Any] = field(default_factory=dict, repr=False)

    def prompts(self) -> list[Score]:
        """Single prompts: without examples, with private ones, with public ones; and each member alone."""
        few = self.plan.few_shots
        kinds = {"zero-shot": "zero_shot", f"{few}-shot": "few_shot"}
        if self.file.settings.get("public"):
            kinds[f"public {few}-shot"] = "public"
        runs = {
            method: [[getattr(row[s], kind) or "" for row in self.written] for s in self._samples]
            for method, kind in kinds.items()
        }
        runs["member"] = [
            [row[s].members[m] or "" for row in self.written] for s in self._samples for m in range(self.plan.members)
        ]
        return [self._score(method, texts) for method, texts in runs.items()]

    @property
    def _samples(self) -> range:
        return range(len(self.written[0]))

    def _score(self, method: str, runs: Runs, *, epsilon: float | None = None, **facts: float) -> Score:
        return score_texts(method, runs, self.queries, self.embeddings, epsilon=epsilon, facts=facts)

    # -- embedding means ----------------------------------------------------------------------------------------------

    def embedding(self) -> list[Score]:
        """The nearest candidate to the mean, without noise and at each epsilon."""
        return self._means(self.plan, max(map(len, self.candidates)))

    def by_candidates(self, counts: Sequence[int]) -> list[Score]:
        """The ablation of the number of candidates: the first so many."""
        return [replace(s, study="candidates") for n in counts for s in self._means(self.plan, n)]

    def by_members(self, counts: Sequence[int]) -> list[Score]:
        """The ablation of the ensemble's size at the same shots, by the first n members (as in `LabelStudy`)."""
        everything = max(map(len, self.candidates))
        plans = [self.plan.varied(members=n) for n in counts]
        return [replace(s, study="members") for plan in plans for s in self._means(plan, everything)]

    def _means(self, plan: EvaluationPlan, candidates: int) -> list[Score]:
        facts = {**plan.facts, "candidates": candidates}
        plain = self._choose(plan, candidates, _NO_NOISE, draws=1)
        found = [self._score("embedding", plain, **facts)]
        for epsilon in plan.epsilons:
            vector = EmbeddingMean(self.embeddings, release="vector")
            sigma = plan.parameter(epsilon, vector.mechanism, vector.options)
            runs = self._choose(plan, candidates, sigma, draws=self.draws)
            changed = [text != plain[r // self.draws][i] for r, row in enumerate(runs) for i, text in enumerate(row)]
            facts |= {"sigma": sigma, "flipped": 100 * sum(changed) / len(changed)}
            found.append(self._score("embedding", runs, epsilon=epsilon, **facts))
        return found

    def _choose(self, plan: EvaluationPlan, candidates: int, sigma: float, *, draws: int) -> Runs:
        """Releases by the product's own mechanism; "" if the members abstain, and if there is no candidate."""
        randomness = SecureRandomness()

        def release(query: int, sample: int) -> str:
            if not self.candidates[query][:candidates]:
                return ""
            vectors = self._vectors(query, sample)[: plan.members]
            return str(self._mean(query, candidates).aggregate(vectors, sigma, randomness) or "")

        samples = [s for s in self._samples for _ in range(draws)]
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
        """Ranked keywords among the query's own words; the zero-shot text for a query without words."""
        words = Keywords.joint_em("query", self.task.k)
        found = [self._keywords("joint-em", words, _NO_CHOICE)]
        for epsilon in self.plan.epsilons:
            found.append(self._keywords("joint-em", words, self.plan.parameter(epsilon, words.mechanism), epsilon))
        return found

    def ptr(self) -> list[Score]:
        """The set of the words that most members use."""
        plan = self.plan
        delta0 = default_delta0(plan.delta, plan.rate, plan.releases)
        words = Keywords.ptr(self.task.keywords, delta0=delta0)
        least, most = self.task.keywords

        def most_used(query: int, sample: int) -> ReleasedKeywords:
            """The release of propose-test-release without its test of the gap."""
            counts = Counter(key for keys in self._encode(words, query, sample) for key in keys)
            top = counts.most_common(most + 1)
            heights = [count for _, count in top] + [0] * (most + 2)
            k = max(range(least, most + 1), key=lambda k: heights[k - 1] - heights[k])
            return ReleasedKeywords(sorted(word for word, _ in top[:k]))

        found = [self._score("ptr", self._texts(most_used), **plan.facts)]
        for epsilon in plan.epsilons:
            sigma = plan.parameter(epsilon, words.mechanism, words.options)
            found.append(self._keywords("ptr", words, sigma, epsilon, delta0=delta0))
        return found

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
        facts = {**self.plan.facts, "fallback": 100 * sum(empty) / len(empty)}
        if epsilon is not None:
            facts["sigma" if method == "ptr" else "eps0"] = parameter
        return self._score(method, texts, epsilon=epsilon, **facts)

    def _encode(self, words: Keywords, query: int, sample: int) -> list[Any]:
        return [words.encode(text) for text in self.written[query][sample].members if text is not None]

    def _texts(self, release: Callable[[int, int], ReleasedKeywords]) -> Runs:
        """A text for each release: from its keywords, or the zero-shot one if there are none."""

        def text(query: int, sample: int) -> str:
            words = release(query, sample)
            if not words:
                return self.written[query][sample].zero_shot or ""
            key = ("words", key_of(self.queries[query].input), words.ranked, *words)
            if key not in self.file:
                keep(self.file, key, [self.author.from_words(words, self.queries[query].input)])
            return str(self.file[key][0])

        return [[text(i, s) for i in range(len(self.queries))] for s in self._samples]


def score_texts(
    method: str,
    runs: Runs,
    queries: Sequence[Row],
    embeddings: Embeddings,
    *,
    epsilon: float | None,
    facts: dict[str, float],
) -> Score:
    """Return the score of texts by run and query, against the queries' references."""
    references = [list(row.references) for row in queries]
    flat, wide = [text for run in runs for text in run], references * len(runs)
    measures = {**text_measures(flat, wide), "meaning": meaning_scores(flat, wide, embeddings)}
    n = len(queries)
    values = {name: Value.of([found[i : i + n] for i in range(0, len(found), n)]) for name, found in measures.items()}
    return Score(method, epsilon, values, len(runs), n, facts)
