"""Studies of one pass: label tasks (votes over members' label scores), and text tasks (means and keywords of texts).

A label study reads scores before any vote and any noise; the model reads a member's examples once for all queries. A
text study turns every member's text of one pass into scores of embedding means and keywords.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import methodcaller
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from numpy.typing import NDArray

from langchain_dpicl.aggregators import Aggregator, CandidateVote, EmbeddingMean, Keywords, NoisyVote, ReleasedKeywords
from langchain_dpicl.aggregators.embedded import STEPS, Embedded
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.evaluation.passes import EvaluationPlan, Key, Pairs, PassFile, ask_members, key_of
from langchain_dpicl.lab.evaluation.rows import Row
from langchain_dpicl.lab.evaluation.scores import Score, Value, text_values
from langchain_dpicl.lab.evaluation.tasks import ClassificationTask, GenerationTask
from langchain_dpicl.members.chains import keywords_to_answer
from langchain_dpicl.members.scoring import LabelScorer
from langchain_dpicl.privacy.choice import best_vote, options_of
from langchain_dpicl.privacy.mechanisms import MECHANISMS, default_delta0
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.private import boundary

Scores = NDArray[np.float64]
# Positions in the task's list of labels; -1 abstains.
Labels = NDArray[np.int64]

EMPTY = -2
"""In the place of the vote of a member without examples."""

# From the examples of prompts and a query to (prompts, labels) scores. A row of zeros if the model failed.
Reader = Callable[[Sequence[Pairs], str], Scores]


def chain_reader(llm: BaseLanguageModel[Any], task: ClassificationTask) -> Reader:
    """Ask through LangChain: any model that `LabelScorer` takes, called as a release calls it."""
    # The embedded model returns any number of alternatives.
    alternatives = 100 if getattr(llm, "accepts_shared_prefix", False) else 20
    scorer = LabelScorer(
        llm,
        task.labels,
        prompt=task.shape.prompt,
        calibrate=False,
        input_key="input",
        output_key="output",
        top_logprobs=alternatives,
    )
    member = boundary.seal(RunnableLambda(scorer.scores))
    failed = dict.fromkeys(task.labels, 0.0)

    def reader(examples: Sequence[Pairs], query: str) -> Scores:
        found = ask_members(member, examples, query)
        return np.array([[(each or failed)[label] for label in task.labels] for each in found])

    return reader


def read_labels(
    reader: Reader,
    labels: int,
    examples: Sequence[Pairs],
    texts: Sequence[str],
    file: PassFile,
    sample: int,
    progress: Callable[[], Any],
) -> Scores:
    """Return (texts, prompts, labels) scores from the file; ask the model for those that are missing, and keep them.

    ``examples`` are those of the sample's prompts. Raises as `PassFile.answers`.
    """
    found = []
    for text in texts:

        def ask(some: Sequence[Pairs], text: str = text) -> list[list[float]]:
            return [[float(f"{score:.5g}") for score in row] for row in reader(some, text)]

        found.append(file.answers((key_of(text), sample), examples, ask, [0.0] * labels))
        progress()
    return np.array(found, np.float64).reshape(-1, len(examples), labels)


@dataclass(frozen=True)
class LabelStudy:
    """The accuracy of a private vote, against epsilon and in the papers' ablations, all from one pass.

    - ``labels``: the task's labels.
    - ``right``: each query's right label, as a position.
    - ``said``, ``neutral``: (samples, queries, prompts, labels) scores; the same after the texts to calibrate on. The
      first prompts are the members'. The next has no examples, the one after it ``few_shots`` private ones, and a last
      one, if there is any, public ones.
    - ``draws``: how often the noise is drawn for each sample.
    - ``filled``: (samples, members) whether the member has an example; the others' answers count nothing. None: all.
    - ``mechanism``: of the private vote; None for the one that the plan would choose at each epsilon.
    """

    labels: Sequence[str]
    right: Sequence[int]
    said: Scores
    neutral: Scores
    plan: EvaluationPlan
    draws: int = 20
    filled: NDArray[np.bool_] | None = None
    mechanism: str | None = None

    def answers(self, *, calibrate: bool = True) -> Labels:
        """Return (samples, queries, prompts) labels with the highest score.

        Calibrated scores are divided by the geometric mean of those after the neutral texts, as by `LabelScorer`; a
        prompt that failed after one of these always abstains.
        """
        values, neutral = self.said, self.neutral
        answered = values.any(axis=3)
        if calibrate and neutral.shape[1]:
            answered = answered & np.all(np.any(neutral, axis=3), axis=1, keepdims=True)
            values = values / np.exp(np.log(np.where(neutral > 0, neutral, 1.0)).mean(axis=1, keepdims=True))
        return np.where(answered, values.argmax(axis=3), -1)

    def scores(self) -> list[Score]:
        """The main table: prompts alone, single members, the plain majority, and the private vote at each epsilon."""
        return [*self.alone(), *self.votes([self.plan], prior=True)]

    def alone(self) -> list[Score]:
        """Score the prompts alone, and single members."""
        n, few = self.plan.members, self.plan.few_shots
        said = self.answers()
        alone = {
            "zero-shot": self.answers(calibrate=False)[:, :, n],
            "zero-shot calibrated": said[:, :, n],
            f"{few}-shot": said[:, :, n + 1],
        }
        if said.shape[2] > n + 2:
            alone[f"public {few}-shot"] = said[:, :, n + 2]
        found = [_score(method, None, answers == self.right) for method, answers in alone.items()]
        members = said[:, :, :n].transpose(0, 2, 1).reshape(-1, said.shape[1])  # each member is a run of its own
        if self.filled is not None:
            members = members[self.filled.reshape(-1)]
        if len(members):
            size = {name: value for name, value in self.plan.facts.items() if name in ("members", "shots", "calls")}
            found.append(_score("member", None, members == self.right, size))
        return found

    def votes(
        self,
        plans: Sequence[EvaluationPlan],
        study: str = "",
        *,
        prior: bool = False,
    ) -> list[Score]:
        """The plain majority of each plan's members and their private vote at each epsilon, perhaps as an ablation.

        Private votes are releases by the product's own mechanism, with fresh noise. With ``prior`` a second one has the
        answer without examples, calibrated, as its prior.
        """
        randomness = SecureRandomness()
        place: dict[str | None, int] = {label: i for i, label in enumerate(self.labels)} | {None: -1}
        zero_shot = NoisyVote(self.labels, prior="zero_shot")
        votes_with = [zero_shot.prepare({}, {}, [label]) for label in self.labels] + [NoisyVote(self.labels)]
        public = self.answers()[:, :, self.plan.members]
        priors_of = {"vote": np.full_like(public, -1)}
        if prior:
            priors_of["vote, prior"] = public
        found = []
        for plan in plans:
            votes, counts, majority = self.tally(plan.members)
            # A tie of t labels with the right one among them counts 1/t: a release draws among them.
            wins = (counts == counts.max(axis=2, keepdims=True)) & (majority >= 0)[:, :, None]
            right = wins[:, np.arange(len(self.right)), self.right] / np.maximum(wins.sum(axis=2), 1)
            found.append(_score("vote", None, right, plan.facts, study))
            outputs = _outputs(votes)
            plain = np.repeat(majority, self.draws, axis=0)
            for method, priors in priors_of.items():
                for epsilon in plan.epsilons:
                    mechanism = self.mechanism or best_vote(
                        epsilon,
                        plan.delta,
                        plan.releases,
                        plan.rate,
                        plan.crowd,
                        len(self.labels),
                    )
                    parameter = plan.parameter(epsilon, mechanism)
                    bound = [each.under(mechanism, plan.crowd) for each in votes_with]
                    runs = [[*zip(each, row, strict=True)] for each, row in zip(outputs, priors.tolist(), strict=True)]
                    chosen = [
                        [place[bound[known].aggregate(members, parameter, randomness)] for members, known in run]
                        for run in runs
                        for _ in range(self.draws)
                    ]
                    facts = {**plan.facts, MECHANISMS[mechanism].parameter: parameter}
                    facts["flipped"] = 100 * float((np.array(chosen) != plain).mean())
                    found.append(_score(method, epsilon, np.array(chosen) == self.right, facts, study))
        return found

    def released(self, method: str, aggregator: Aggregator[Any]) -> list[Score]:
        """Releases of another kind on the labels that the members chose, at each epsilon; `Aggregator.hit` scores."""
        randomness = SecureRandomness()
        votes, _, _ = self.tally(self.plan.members)
        options = {**options_of(self.plan.crowd), **aggregator.options}
        found = []
        for epsilon in self.plan.epsilons:
            parameter = self.plan.parameter(epsilon, aggregator.mechanism, options)
            bound = aggregator.under(aggregator.mechanism, self.plan.crowd).prepare({}, options)

            def hit(outputs: list[object], right: int, noise: float = parameter, bound: Any = bound) -> float:
                release = bound.aggregate(outputs, noise, randomness)
                return 0.0 if release is None else float(bound.hit(release, self.labels[right]))

            hits = [
                [hit(outputs, right) for outputs, right in zip(queries, self.right, strict=True)]
                for queries in _outputs(votes)
                for _ in range(self.draws)
            ]
            facts = {**self.plan.facts, MECHANISMS[aggregator.mechanism].parameter: parameter}
            found.append(_score(method, epsilon, np.array(hits), facts))
        return found

    def tally(self, members: int) -> tuple[Labels, Labels, Labels]:
        """Return the first so many members' votes, their counts by label, and the vote without noise.

        They are (samples, queries, members), `EMPTY` for a member without examples, (samples, queries, labels) and
        (samples, queries). Without noise the earlier label wins a tie, and -1 if most members abstain, as `NoisyVote`
        says.
        """
        votes = self.answers()[:, :, :members]
        if self.filled is not None:
            votes = np.where(self.filled[:, None, :members], votes, EMPTY)
        counts = np.stack([(votes == label).sum(axis=2) for label in range(len(self.labels))], axis=2)
        abstained = (votes == -1).sum(axis=2)
        is_down = (abstained > counts.max(axis=2)) & (2 * abstained >= (votes != EMPTY).sum(axis=2))
        return votes, counts, np.where(is_down, -1, counts.argmax(axis=2))


def _outputs(votes: Labels) -> list[list[list[Any]]]:
    """The outputs of the members that answer each query in each sample, as an aggregator of labels encodes them."""
    return [
        [[boundary.ABSTAIN if i == -1 else i for i in members if i != EMPTY] for members in queries]
        for queries in votes.tolist()
    ]


def _score(
    method: str,
    epsilon: float | None,
    right: NDArray[Any],
    facts: dict[str, float] | None = None,
    study: str = "",
) -> Score:
    """``right``: (runs, queries), between 0 and 1."""
    runs, queries = right.shape
    return Score(method, epsilon, {"accuracy": Value.of(right)}, runs, queries, facts or {}, study)


# -- texts -------------------------------------------------------------------------------------------------------------


# Texts by run and query.
Runs = list[list[str]]

_WITH_WORDS = PromptTemplate.from_template("Complete the text{suggestions}.\n\n{asked}")
_NO_NOISE = 1e-9  # of a standard deviation, on a lattice of steps of 2^-16
_NO_CHOICE = 1e9  # eps0 of a choice that always takes the best


_AT_ONCE = 2048  # prompts

TEMPERATURE = 0.9
"""Of public candidates; members are greedy."""

# From prompts, (what stands before the question, the question), and a temperature to their texts.
Write = Callable[[Sequence[tuple[str, str]], float], Sequence[str | None]]


# Told how many more queries are done.
Progress = Callable[[int], object]


class Author:
    """Writes a task's answers with any LangChain model, and keeps them in a file. Methods raise as `PassFile.answers`.

    - ``model``: answers the members; it should be greedy.
    - ``sampling``: the same model at a temperature above 0: writes public candidates.
    - ``write``: writes both instead, and from keywords, in batches.
    """

    def __init__(
        self,
        model: BaseLanguageModel[Any],
        sampling: BaseLanguageModel[Any],
        task: GenerationTask,
        file: PassFile,
        write: Write | None = None,
    ) -> None:
        self._file, self._write = file, write
        self._shape = task.shape
        prompt = RunnableLambda(task.shape.prompt)
        self._chains = {
            temperature: boundary.seal(prompt | each.bind(stop=list(task.stop)) | StrOutputParser() | str.strip)
            for temperature, each in ((0.0, model), (TEMPERATURE, sampling))
        }
        from_words = keywords_to_answer(model.bind(stop=list(task.stop)), _WITH_WORDS)
        self._from_words = boundary.seal(from_words | str.strip)
        as_text: Any = RunnableLambda(methodcaller("to_string"))
        self._prompt = keywords_to_answer(as_text, _WITH_WORDS)

    def members(
        self,
        prompts: Sequence[Pairs],
        queries: Sequence[str],
        sample: int,
        progress: Progress = int,
    ) -> list[list[str | None]]:
        """Return for each query an answer after each of a sample's prompts; None if the model failed twice."""
        return self._written({(key_of(query), sample): (prompts, query) for query in queries}, 0.0, progress)

    def candidates(self, queries: Sequence[str], count: int, progress: Progress = int) -> list[list[str]]:
        """Return for each query at most so many sampled answers without examples."""
        asked: dict[Key, Any] = {("candidates", key_of(query), count): ([()] * count, query) for query in queries}
        return [[text for text in texts if text] for texts in self._written(asked, TEMPERATURE, progress)]

    def _written(
        self,
        asked: Mapping[Key, tuple[Sequence[Pairs], str]],
        temperature: float,
        progress: Progress,
    ) -> list[list[str | None]]:
        if self._write is not None:
            shape = self._shape
            prompts = {k: [(shape.prefix(pairs), shape.ask(q)) for pairs in some] for k, (some, q) in asked.items()}
            self._in_batches(prompts, temperature, progress)
        else:
            for key, (some, query) in asked.items():
                self._file.answers(key, some, partial(ask_members, self._chains[temperature], query=query))
                progress(1)
        return [self._file[key] for key in asked]

    def from_words(self, released: Sequence[tuple[ReleasedKeywords, str]]) -> list[str]:
        """Return the texts that the model makes of released keywords and their queries, without any example."""
        asked: dict[Key, ReleasedKeywords] = {}
        keys: list[Key] = []
        for words, query in released:
            keys.append(("words", key_of(query), words.ranked, *words))
            asked[keys[-1]] = ReleasedKeywords(words, ranked=words.ranked, query={"asked": self._shape.ask(query)})
        if self._write is not None:
            self._in_batches({key: [("", self._prompt.invoke(words))] for key, words in asked.items()}, 0.0)
        else:
            for key, words in asked.items():
                self._file.answers(key, [()], partial(self._complete, words))
        return [str(self._file[key][0]) for key in keys]

    def _complete(self, words: ReleasedKeywords, prompts: Sequence[Pairs]) -> list[str | None]:
        member: Runnable[Any, Any] = RunnableLambda(lambda _: words) | self._from_words
        return ask_members(member, prompts, "")

    def _in_batches(
        self,
        asked: Mapping[Key, list[tuple[str, str]]],
        temperature: float,
        progress: Progress = int,
    ) -> None:
        """Write what the file lacks, the prompts of several entries at once."""
        assert self._write is not None
        missing = [key for key in asked if key not in self._file]
        progress(len(asked) - len(missing))
        while missing:
            ends = itertools.accumulate(len(asked[key]) for key in missing)
            some = missing[: max(1, sum(end <= _AT_ONCE for end in ends))]
            del missing[: len(some)]
            texts = iter(self._write([prompt for key in some for prompt in asked[key]], temperature))
            for key in some:
                self._file.add(key, list(itertools.islice(texts, len(asked[key]))))
            progress(len(some))


BY_CANDIDATES: dict[str, type[EmbeddingMean[Any]] | type[CandidateVote]] = {
    "embedding": EmbeddingMean,
    "candidate-vote": CandidateVote,
}
"""The methods that release one of some public texts."""


@dataclass(frozen=True)
class TextStudy:
    """The quality of private texts: aggregates of the texts of a pass against epsilon.

    - ``written``: for each query and each sample of owners the model's texts: the members', the one without examples,
      the one after private examples, and perhaps one after public examples. None if the model failed.
    - ``candidates``: for each query the public sentences that an embedding mean chooses among.
    - ``author``: writes texts from released keywords.
    - ``draws``: how often the noise of an embedding mean is drawn for each sample. Keywords are drawn once a sample:
      each draw needs a text of its own.
    - ``shown``: for how many queries a score holds its texts; those of keywords with the words before them.
    """

    task: GenerationTask
    queries: Sequence[Row]
    written: Sequence[Sequence[Sequence[str | None]]]
    candidates: Sequence[Sequence[str]]
    plan: EvaluationPlan
    embeddings: Embeddings
    author: Author
    draws: int = 5
    shown: int = 0
    _known: dict[tuple[str, int, int], Embedded[Any]] = field(default_factory=dict, repr=False)

    def _score(
        self,
        method: str,
        epsilon: float | None,
        runs: Runs,
        facts: dict[str, float] | None = None,
        study: str = "",
    ) -> Score:
        values = text_values(runs, [row.references for row in self.queries], self.embeddings)
        return Score(method, epsilon, values, len(runs), len(self.queries), facts or {}, study, runs[0][: self.shown])

    @property
    def _samples(self) -> range:
        return range(len(self.written[0]))

    def prompts(self) -> list[Score]:
        """Single prompts: without examples, with private ones, with public ones; and each member alone."""
        n, few = self.plan.members, self.plan.few_shots
        places = {
            "zero-shot": [n],
            f"{few}-shot": [n + 1],
            f"public {few}-shot": [n + 2],
            "member": list(range(n)),
        }
        return [
            self._score(method, None, [[row[s][i] or "" for row in self.written] for s in self._samples for i in some])
            for method, some in places.items()
            if some[-1] < len(self.written[0][0])
        ]

    @cached_property
    def _vectors(self) -> list[list[list[Any]]]:
        """By query, sample and member: the embedding of its text, the only row; None without a text."""
        return [
            [
                [self.embeddings.embed_documents([text]) if text else None for text in texts[: self.plan.members]]
                for texts in samples
            ]
            for samples in self.written
        ]

    def embedding(
        self,
        plan: EvaluationPlan | None = None,
        count: int = 0,
        study: str = "",
        method: str = "embedding",
    ) -> list[Score]:
        """The nearest of the first ``count`` candidates to the mean, or by vote, without noise and at each epsilon.

        0 means all candidates; ``method`` is one of `BY_CANDIDATES`.
        """
        plan = plan or self.plan
        count = count or max(map(len, self.candidates))
        kind = BY_CANDIDATES[method]
        options = {}
        without_noise = _NO_CHOICE
        if kind is EmbeddingMean:
            options = {"step": 1 / STEPS}
            without_noise = _NO_NOISE
        facts = {**plan.facts, "candidates": count}
        plain = self.choose(plan, count, without_noise, draws=1, method=method)
        found = [self._score(method, None, plain, facts, study)]
        for epsilon in plan.epsilons:
            noise = plan.parameter(epsilon, kind.mechanism, options)
            runs = self.choose(plan, count, noise, draws=self.draws, method=method)
            changed = [text != plain[r // self.draws][i] for r, row in enumerate(runs) for i, text in enumerate(row)]
            noisy = {**facts, MECHANISMS[kind.mechanism].parameter: noise}
            noisy["flipped"] = 100 * sum(changed) / len(changed)
            found.append(self._score(method, epsilon, runs, noisy, study))
        return found

    def choose(
        self,
        plan: EvaluationPlan,
        count: int,
        noise: float,
        *,
        draws: int,
        method: str = "embedding",
    ) -> Runs:
        """Releases by the product's own mechanism; "" if the members abstain, and if there is no candidate."""
        randomness = SecureRandomness()

        def release(query: int, sample: int) -> str:
            texts = list(dict.fromkeys(self.candidates[query][:count]))
            if len(texts) < 2:
                return "".join(texts)
            key = (method, query, count)
            if key not in self._known:
                self._known[key] = BY_CANDIDATES[method](self.embeddings, texts).prepare({}, {})
            aggregator = self._known[key]
            rows = self._vectors[query][sample][: plan.members]
            said = [boundary.ABSTAIN if row is None else aggregator.read(row) for row in rows]
            return str(aggregator.aggregate(said, noise, randomness) or "")

        samples = [s for s in self._samples for _ in range(draws)]
        return [[release(i, s) for i in range(len(self.queries))] for s in samples]

    def keywords(self, method: str, plan: EvaluationPlan | None = None, study: str = "") -> list[Score]:
        """Texts from released words, without noise and at each epsilon; the zero-shot text if no word is released.

        The words of "joint-em" are ranked and the query's own. Those of "ptr" are the set of words that most members
        use; without noise its test of the gap is left out too.
        """
        plan = plan or self.plan
        randomness = SecureRandomness()
        words = Keywords.joint_em("query", self.task.k)
        if method == "ptr":
            delta0 = default_delta0(plan.delta, plan.rate, plan.releases)
            words = Keywords.ptr(self.task.keywords, delta0=delta0)

        def release(query: str, texts: Sequence[str | None], parameter: float) -> ReleasedKeywords | None:
            try:
                asked = words.prepare({"input": query}, words.options)
            except InvalidParameter:  # a query without words
                return None
            encoded = [asked.encode(text) for text in texts[: plan.members] if text is not None]
            if method == "ptr" and parameter == _NO_CHOICE:
                least, most = self.task.keywords
                top = Counter(word for keys in encoded for word in keys).most_common(most + 1)  # type: ignore[attr-defined]
                heights = [count for _, count in top] + [0] * (most + 2)
                k = max(range(least, most + 1), key=lambda k: heights[k - 1] - heights[k])
                return ReleasedKeywords(sorted(word for word, _ in top[:k]))
            return asked.aggregate(encoded, parameter, randomness)

        found = []
        for epsilon in (None, *plan.epsilons):
            parameter = _NO_CHOICE
            facts = dict(plan.facts)
            if epsilon is not None:
                parameter = plan.parameter(epsilon, words.mechanism, words.options)
                facts[MECHANISMS[words.mechanism].parameter] = parameter
            runs: Runs = []
            told = []
            empty = 0
            for s in self._samples:
                words_of = [
                    release(row.input, samples[s], parameter)
                    for row, samples in zip(self.queries, self.written, strict=True)
                ]
                asked = [(some, row.input) for some, row in zip(words_of, self.queries, strict=True) if some]
                texts = iter(self.author.from_words(asked))
                fallback = [samples[s][self.plan.members] or "" for samples in self.written]
                run = [next(texts) if some else text for some, text in zip(words_of, fallback, strict=True)]
                empty += len(run) - len(asked)
                told += [f"[{', '.join(some or ())}] {text}" for some, text in zip(words_of, run, strict=True)]
                runs.append(run)
            facts["fallback"] = 100 * empty / len(runs) / len(self.queries)
            score = self._score(method, epsilon, runs, facts, study)
            found.append(replace(score, texts=told[: self.shown]))
        return found

    def released(self, method: str, plan: EvaluationPlan | None = None, study: str = "") -> list[Score]:
        """Score a method by its name, perhaps with another plan: `embedding` or `keywords`."""
        if method in BY_CANDIDATES:
            return self.embedding(plan, study=study, method=method)
        return self.keywords(method, plan, study)
