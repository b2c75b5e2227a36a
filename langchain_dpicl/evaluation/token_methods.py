"""Private decoding on a set of queries: the sampler itself, and prompts of demonstrations that it wrote once."""

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

from langchain_dpicl.decoding.answer import Settings, Writer
from langchain_dpicl.decoding.mixing import clipped_terms, mixing_weights
from langchain_dpicl.decoding.template import DemonstrationTemplate
from langchain_dpicl.evaluation.lockstep import Answer, Lockstep, Weighed
from langchain_dpicl.privacy import PrivacyPlan
from langchain_dpicl.privacy.lines import LineRequest
from langchain_dpicl.privacy.noise import SecureRandomness

NO_BOUND = 1e6  # nats: no weight is ever cut


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

    # -- decoding -----------------------------------------------------------------------------------------------------

    def settings(self, **other: Any) -> Settings:
        """The public numbers of the study."""
        options = self.options
        numbers: dict[str, Any] = {"max_tokens": options.max_tokens, "min_tokens": options.min_tokens}
        numbers |= {"top_k": options.top_k, "shots": options.kappa, "temperature": 1.0, "cap": options.cap}
        return Settings(**{**numbers, "stop": ("\n",), **other})

    def bound(self, epsilon: float, answers: int) -> float:
        """B of a plan for so many answers."""
        return self.parameter(epsilon, LineRequest("tokens", self.rate, answers * self.options.max_tokens))

    def parameter(self, epsilon: float, request: LineRequest) -> float:
        """The noise that a plan of this one line allows."""
        plan = PrivacyPlan.solve(epsilon=epsilon, delta=self.delta, lines={"only": request})
        return plan.lines["only"].parameter

    def _clipped(self, bound: float) -> Callable[..., Weighed]:
        return partial(clipped, bound=bound, cap=self.options.cap)

    def unclipped(self, name: str) -> Outcome:
        """The sampler's own terms, of any range: NOT private."""
        return self.decode(name, self._clipped(NO_BOUND))

    def online(self, name: str, epsilon: float) -> Outcome:
        """A plan for the queries themselves."""
        bound = self.bound(epsilon, len(self.queries))
        return self.decode(name, self._clipped(bound), facts={"epsilon": epsilon, "B": bound})

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
        return self.outcome(name, texts, tokens, started, facts or {}, weights if mix else [])

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
        return self.outcome(name, texts, 0, started, facts or {}, [])

    # -- scores -------------------------------------------------------------------------------------------------------

    def outcome(
        self, name: str, texts: list[str], tokens: int, started: float, facts: dict[str, Any], weights: list[float]
    ) -> Outcome:
        """How good these texts are."""
        from langchain_dpicl.evaluation.text import meaning_scores, rouge_l
        from langchain_dpicl.local import local_embeddings

        references = [row.get("references") or row["output"] for row in self.queries]
        rouge = [rouge_l(text, known) for text, known in zip(texts, references, strict=True)]
        seconds = time.monotonic() - started
        meaning = meaning_scores(texts, references, local_embeddings())
        return Outcome(name, texts, rouge, meaning, tokens, round(seconds, 1), facts, weights)


def clipped(one_shot: Any, zero_shot: Any, *, bound: float, cap: float) -> Weighed:
    """The sampler's own terms, with their weights."""
    added = clipped_terms(one_shot, zero_shot, bound=bound, temperature=1.0, cap=cap)
    return added, mixing_weights(one_shot - zero_shot, bound, cap)
