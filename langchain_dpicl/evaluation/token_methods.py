"""The methods that a study of private decoding compares, each on the same queries."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from tqdm import tqdm

from langchain_dpicl.aggregators import EmbeddingMean
from langchain_dpicl.decoding.answer import Settings, Writer
from langchain_dpicl.decoding.mixing import clipped_terms, mixing_weights
from langchain_dpicl.decoding.template import DemonstrationTemplate
from langchain_dpicl.evaluation.lockstep import Answer, Lockstep, Weighed
from langchain_dpicl.evaluation.paper_radius import ball_terms, claimed_beta
from langchain_dpicl.privacy import PrivacyPlan
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.privacy.plan import LineRequest
from langchain_dpicl.release.ensemble import PrivateEnsemble
from langchain_dpicl.selection.selector import PoissonExampleSelector
from langchain_dpicl.store import ExemplarStore

_NO_BOUND = 1e6  # nats: no weight is ever cut
_MEMBERS, _MEMBER_SHOTS, _CANDIDATES = 10, 4, 10


@dataclass(frozen=True)
class Outcome:
    """What one method answered, and how good it was; the lists are parallel to the queries."""

    method: str
    texts: list[str]
    rouge_l: list[float]
    meaning: list[float]
    tokens: int
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)  # the mean weight at each place of an answer


class Study:
    """One set of queries, and the methods that answer it.

    Records have an input and an output, queries perhaps references; of ``public`` only the inputs are used.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        private: Sequence[Mapping[str, Any]],
        queries: Sequence[Mapping[str, Any]],
        public: Sequence[Mapping[str, Any]],
    ) -> None:
        self.options, self.private, self.queries, self.public = options, private, queries, public
        self.template = DemonstrationTemplate(*(text.replace("\\n", "\n") for text in options.template))
        self.rate = options.shots / len(self.private)
        self.delta = options.delta if options.delta is not None else 0.1 / len(self.private)

    @property
    def methods(self) -> dict[str, Callable[[], Outcome]]:
        """Every method by its name."""
        options = self.options
        found: dict[str, Callable[[], Outcome]] = {
            "zero-shot": partial(self.decode, "zero-shot", None),
            "ensemble, not private": partial(self.decode, "ensemble, not private", _plain, shots=options.shots),
            "ours unclipped, not private": partial(self.unclipped, "ours unclipped, not private"),
        }
        for epsilon in options.epsilon:
            online, paper = f"online, epsilon {epsilon:g}", f"paper's ball (unproved), epsilon {epsilon:g}"
            found[online] = partial(self.online, online, epsilon)
            found[paper] = partial(self.paper, paper, epsilon)
            offline = f"offline, epsilon {epsilon:g}"
            mean = f"embedding mean, epsilon {epsilon:g}"
            found[mean] = partial(self.embedding_mean, mean, epsilon)
            if self.public:
                found[offline] = partial(self.offline, offline, epsilon)
        found["4-shot prompt, not private"] = partial(self.prompted, "4-shot prompt, not private", self.private)
        found["zero-shot prompt"] = partial(self.prompted, "zero-shot prompt", [])
        return found

    # -- decoding -----------------------------------------------------------------------------------------------------

    def settings(self, **other: Any) -> Settings:
        """The public numbers of the study."""
        options = self.options
        numbers: dict[str, Any] = {"max_tokens": options.max_tokens, "min_tokens": options.min_tokens}
        numbers |= {"top_k": options.top_k, "shots": options.kappa, "temperature": 1.0, "cap": options.cap}
        return Settings(**{**numbers, "stop": ("\n",), **other})

    def bound(self, epsilon: float, answers: int) -> float:
        """B of a plan for so many answers."""
        return self._parameter(epsilon, LineRequest("tokens", self.rate, answers * self.options.max_tokens))

    def _parameter(self, epsilon: float, request: LineRequest) -> float:
        plan = PrivacyPlan.solve(epsilon=epsilon, delta=self.delta, lines={"only": request})
        return plan.lines["only"].parameter

    def _clipped(self, bound: float) -> Callable[..., Weighed]:
        return partial(_clipped, bound=bound, cap=self.options.cap)

    def unclipped(self, name: str) -> Outcome:
        """The sampler's own terms, of any range: NOT private."""
        return self.decode(name, self._clipped(_NO_BOUND))

    def online(self, name: str, epsilon: float) -> Outcome:
        """A plan for the queries themselves."""
        bound = self.bound(epsilon, len(self.queries))
        return self.decode(name, self._clipped(bound), facts={"epsilon": epsilon, "B": bound})

    def paper(self, name: str, epsilon: float) -> Outcome:
        """The paper's weights; its epsilon is a claim without a proof."""
        tokens = len(self.queries) * self.options.max_tokens
        beta, order = claimed_beta(epsilon, self.delta, self.rate, tokens)
        mix = partial(ball_terms, beta=beta, order=order, temperature=1.0, cap=1.5)
        return self.decode(name, mix, facts={"claimed epsilon": epsilon, "beta": beta, "order": order})

    def decode(self, name: str, mix: Any, *, facts: dict[str, Any] | None = None, **settings: Any) -> Outcome:
        """Decode an answer to every query; without ``mix`` nobody takes part."""
        inputs = [row["input"] for row in self.queries]
        started, answers = time.monotonic(), self.write(name, inputs, mix, self.settings(**settings))
        texts = [answer.writer.text.strip() for answer in answers]
        weights = [
            float(np.mean([w for a in answers for w in a.weights.get(place, [])] or [math.nan]))
            for place in range(self.options.max_tokens)
        ]
        tokens = sum(len(answer.writer.tokens) for answer in answers)
        return self._outcome(name, texts, tokens, started, facts or {}, weights if mix else [])

    def write(self, name: str, inputs: Sequence[str], mix: Any, settings: Settings) -> list[Answer]:
        """Answers as the sampler writes them: a fresh Poisson sample for each token of each."""
        randomness, lockstep = SecureRandomness(), self._lockstep

        def sample() -> list[str]:
            if not mix:
                return []
            rows = randomness.coin_positions(len(self.private), self.rate)
            return [self.template.show(self.private[int(row)]) for row in rows]

        answers = [
            Answer(
                self.template.ask({"input": text}),
                [sample() for _ in range(settings.max_tokens)],
                mix,
                Writer(lockstep.model, settings.stop),
            )
            for text in inputs
        ]
        total = len(inputs) * settings.max_tokens
        with tqdm(total=total, desc=name, unit="token", disable=None, file=sys.stderr) as bar:
            lockstep.write(answers, settings, randomness, bar.update)
        return answers

    @cached_property
    def _lockstep(self) -> Lockstep:
        from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits

        options = self.options
        return Lockstep(TransformersLogits(options.model, threads=options.threads, dtype=options.dtype))

    # -- prompts ------------------------------------------------------------------------------------------------------

    def offline(self, name: str, epsilon: float) -> Outcome:
        """Public demonstrations, made once from the public inputs; then an ordinary few-shot prompt."""
        inputs = [row["input"] for row in self.public[: self.options.demonstrations]]
        bound = self.bound(epsilon, len(inputs))
        answers = self.write(f"{name}: demonstrations", inputs, self._clipped(bound), self.settings())
        made = [answer.writer.text.strip() for answer in answers]
        pairs = [{"input": asked, "output": text} for asked, text in zip(inputs, made, strict=True) if text]
        facts = {"epsilon": epsilon, "B": bound, "demonstrations": pairs}
        return self.prompted(name, pairs, facts=facts)

    def prompted(
        self, name: str, pairs: Sequence[Mapping[str, Any]], *, facts: dict[str, Any] | None = None
    ) -> Outcome:
        """What the model writes after a prompt of four of these pairs, drawn for each query."""
        from langchain_core.output_parsers import StrOutputParser
        from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate

        from langchain_dpicl.local import local_llm

        options, randomness = self.options, SecureRandomness()
        llm = local_llm(options.model, max_tokens=options.max_tokens).bind(stop=["\n"])
        layout = PromptTemplate.from_template(self.template.demonstration.strip("\n"))
        texts, started = [], time.monotonic()
        for row in tqdm(self.queries, desc=name, unit="answer", disable=None, file=sys.stderr):
            order = np.argsort(randomness.uniforms(len(pairs)))[: options.prompt_shots]
            prompt = FewShotPromptTemplate(
                examples=[{key: pairs[int(i)][key] for key in ("input", "output")} for i in order],
                example_prompt=layout,
                suffix=self.template.query,
                input_variables=["input"],
                example_separator="\n\n",
            )
            texts.append((prompt | llm | StrOutputParser()).invoke({"input": row["input"]}).strip())
        return self._outcome(name, texts, 0, started, facts or {}, [])

    # -- embedding means ----------------------------------------------------------------------------------------------

    def embedding_mean(self, name: str, epsilon: float) -> Outcome:
        """ESA: the zero-shot sentence nearest to the noisy mean of ten members' sentences."""
        started, randomness, mean = time.monotonic(), SecureRandomness(), self._members[0][0]
        rate = _MEMBERS * _MEMBER_SHOTS / len(self.private)
        request = LineRequest(mean.mechanism, rate, len(self.queries), options=mean.options)
        sigma = self._parameter(epsilon, request)
        texts = [str(mean.aggregate(outputs, sigma, randomness) or "") for mean, outputs in self._members]
        return self._outcome(name, texts, 0, started, {"epsilon": epsilon, "sigma": sigma}, [])

    @cached_property
    def _members(self) -> list[tuple[EmbeddingMean, list[Any]]]:
        """For each query the aggregator with its public candidates, and what the members of one sample wrote."""
        from langchain_core.output_parsers import StrOutputParser
        from langchain_core.runnables import Runnable, RunnableLambda

        from langchain_dpicl.local import local_embeddings, local_llm

        store = ExemplarStore.from_records(
            [{key: row[key] for key in ("input", "output")} for row in self.private],
            local_embeddings(),
            input_key="input",
            output_key="output",
            vectors=np.zeros((len(self.private), 1), np.float32),  # nothing is looked for by similarity
        )
        selector = PoissonExampleSelector(store, _MEMBERS, shots=_MEMBER_SHOTS)

        def chain(temperature: float) -> Runnable[Any, str]:
            llm = local_llm(self.options.model, max_tokens=self.options.max_tokens, temperature=temperature)
            return RunnableLambda(self._prompt) | llm.bind(stop=["\n"]) | StrOutputParser()

        writer = chain(0.9)
        ensemble = PrivateEnsemble(selector, chain(0.0))
        aggregator = EmbeddingMean(local_embeddings(), writer, _CANDIDATES)
        found = []
        for row in tqdm(self.queries, desc="embedding means", unit="query", disable=None, file=sys.stderr):
            values = {"input": row["input"]}
            written = [writer.invoke({**values, "examples": []}) for _ in range(_CANDIDATES)]
            mean = aggregator.prepare(values, aggregator.options, written)
            found.append((mean, ensemble.run(values, selector.rate, mean)))
        return found

    def _prompt(self, values: dict[str, Any]) -> str:
        shown = "".join(self.template.show(example) for example in values["examples"])
        return shown + self.template.ask(values)

    # -- scores -------------------------------------------------------------------------------------------------------

    def _outcome(
        self, name: str, texts: list[str], tokens: int, started: float, facts: dict[str, Any], weights: list[float]
    ) -> Outcome:
        from langchain_dpicl.evaluation.text import meaning_scores, rouge_l
        from langchain_dpicl.local import local_embeddings

        references = [row.get("references") or row["output"] for row in self.queries]
        rouge = [rouge_l(text, known) for text, known in zip(texts, references, strict=True)]
        seconds = time.monotonic() - started
        meaning = meaning_scores(texts, references, local_embeddings())
        return Outcome(name, texts, rouge, meaning, tokens, round(seconds, 1), facts, weights)


def _plain(one_shot: Any, zero_shot: Any) -> Weighed:
    """Every row with weight 1, whatever it says: NOT private."""
    return _clipped(one_shot, zero_shot, bound=_NO_BOUND, cap=1.0)


def _clipped(one_shot: Any, zero_shot: Any, *, bound: float, cap: float) -> Weighed:
    """The sampler's own terms, with their weights."""
    added = clipped_terms(one_shot, zero_shot, bound=bound, temperature=1.0, cap=cap)
    return added, mixing_weights(one_shot - zero_shot, bound, cap)
