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
from paper_radius import Weighed, ball_terms, claimed_beta
from tqdm import tqdm

from langchain_dpicl.aggregators import EmbeddingMean
from langchain_dpicl.decoding.answer import Settings, clipped_terms, mixing_weights
from langchain_dpicl.decoding.exemplars import IntArray
from langchain_dpicl.decoding.model import DemonstrationTemplate
from langchain_dpicl.lab.evaluation.batches import Decoder
from langchain_dpicl.lab.evaluation.scores import meaning_scores, text_measures
from langchain_dpicl.local import local_embeddings, local_llm
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.release.ensemble import PrivateEnsemble
from langchain_dpicl.selection import PoissonExampleSelector
from langchain_dpicl.store import ExemplarStore

_MEMBERS, _MEMBER_SHOTS, _CANDIDATES = 10, 4, 10


class Paired:
    """The draws of a place of an answer, equal in all methods, so that their differences come from the methods alone.

    Another ``seed`` is another repetition. Not for a release: whoever knows the seed knows the noise.
    """

    def __init__(self, seed: int, answer: int, place: int) -> None:
        self._numbers = np.random.default_rng([answer, place, seed])

    def coin_positions(self, n: int, probability: float) -> IntArray:
        return np.flatnonzero(self._numbers.random(n) < probability).astype(np.int64)

    def integers(self, high: int, size: int) -> IntArray:
        return self._numbers.integers(0, high - 1, size, dtype=np.int64, endpoint=True)

    def uniforms(self, size: int) -> FloatArray:
        return self._numbers.random(size)

    def discrete_gaussian(self, sigma: float, size: int) -> IntArray:
        raise NotImplementedError("no token needs one")


Weigh = Callable[[FloatArray, FloatArray], Weighed]
"""From (one-shot rows, zero-shot row), over the candidates, to the terms of the rows and their weights."""


def _own(one_shot: FloatArray, zero_shot: FloatArray, *, bound: float = 1e6, cap: float) -> Weighed:
    """The sampler's own terms. The default bound clips nothing: NOT private."""
    terms = clipped_terms(one_shot, zero_shot, bound=bound, temperature=1.0, cap=cap)
    return terms, mixing_weights(one_shot - zero_shot, bound, cap)


@dataclass(frozen=True)
class Outcome:
    """The answers of one method, and how good they are; the lists are parallel to the queries."""

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
        self.inputs = [row["input"] for row in queries]
        lengths = {"max_tokens": options.max_tokens, "min_tokens": options.min_tokens, "top_k": options.top_k}
        self.decoder = Decoder(
            options.model,
            DemonstrationTemplate(*(text.replace("\\n", "\n") for text in options.template)),
            private,
            Settings(**lengths, shots=options.kappa, temperature=1.0, cap=options.cap, stop=("\n",)),
            options.delta if options.delta is not None else 0.1 / len(private),
            shots=options.shots,
            prompt_shots=options.prompt_shots,
            threads=options.threads,
            dtype=options.dtype,
            draws=partial(Paired, options.seed),
            remembers=True,
        )

    @property
    def methods(self) -> dict[str, Callable[[], Outcome]]:
        """Every method by its name."""
        plain, unclipped = partial(_own, cap=1.0), partial(_own, cap=self.options.cap)
        shots = self.options.shots
        found: dict[str, Callable[[], Outcome]] = {
            "zero-shot": partial(self.decode, "zero-shot", None),
            "ensemble, not private": partial(self.decode, "ensemble, not private", plain, shots=shots),
            "ours unclipped, not private": partial(self.decode, "ours unclipped, not private", unclipped),
        }
        for epsilon in self.options.epsilon:
            kinds = {
                "online": self.online,
                "paper's ball (unproved)": self.paper,
                "embedding mean": self.embedding_mean,
            }
            kinds |= {"offline": self.offline} if self.public else {}
            for kind, run in kinds.items():
                name = f"{kind}, epsilon {epsilon:g}"
                found[name] = partial(run, name, epsilon)
        found["4-shot prompt, not private"] = partial(self.prompted, "4-shot prompt, not private", self.private)
        found["zero-shot prompt"] = partial(self.prompted, "zero-shot prompt", [])
        return found

    def decode(
        self, name: str, weigh: Weigh | None, *, facts: dict[str, Any] | None = None, shots: float | None = None
    ) -> Outcome:
        """Decode an answer to every query; without ``weigh`` the samples are empty."""
        found: list[list[float]] = [[] for _ in range(self.options.max_tokens)]  # by place in the answer

        def mix(place: int, one_shot: FloatArray, zero_shot: FloatArray) -> IntArray:
            assert weigh is not None
            terms, weights = weigh(one_shot, zero_shot)
            found[place] += weights.tolist()
            return terms

        started, answers = time.monotonic(), self.decoder.write(name, self.inputs, [mix if weigh else None], shots)[0]
        weights = [float(np.mean(weights or [math.nan])) for weights in found]
        tokens = sum(len(answer.tokens) for answer in answers)
        texts = [answer.text.strip() for answer in answers]
        return self._outcome(name, texts, started, facts or {}, tokens, weights if weigh else [])

    def online(self, name: str, epsilon: float) -> Outcome:
        """A plan for the queries themselves."""
        bound = self.decoder.bound(epsilon, len(self.inputs))
        return self.decode(
            name, partial(_own, bound=bound, cap=self.options.cap), facts={"epsilon": epsilon, "B": bound}
        )

    def paper(self, name: str, epsilon: float) -> Outcome:
        """The paper's weights; its epsilon is a claim without a proof."""
        tokens = len(self.inputs) * self.options.max_tokens
        beta, order = claimed_beta(epsilon, self.decoder.delta, self.decoder.rate, tokens)
        weigh = partial(ball_terms, beta=beta, order=order, temperature=1.0, cap=1.5)
        return self.decode(name, weigh, facts={"claimed epsilon": epsilon, "beta": beta, "order": order})

    def offline(self, name: str, epsilon: float) -> Outcome:
        """Public demonstrations, made once from the public inputs; then an ordinary few-shot prompt."""
        inputs = [row["input"] for row in self.public[: self.options.demonstrations]]
        bound = self.decoder.bound(epsilon, len(inputs))
        (pairs,) = self.decoder.demonstrations(name, inputs, [bound])
        return self.prompted(name, pairs, facts={"epsilon": epsilon, "B": bound, "demonstrations": pairs})

    def prompted(
        self, name: str, pairs: Sequence[Mapping[str, Any]], *, facts: dict[str, Any] | None = None
    ) -> Outcome:
        """What the model writes after a prompt of some of these pairs, drawn for each query."""
        started = time.monotonic()
        return self._outcome(name, self.decoder.prompted(name, self.inputs, pairs), started, facts or {})

    def embedding_mean(self, name: str, epsilon: float) -> Outcome:
        """ESA: the zero-shot sentence nearest to the noisy mean of ten members' sentences."""
        started, randomness, mean = time.monotonic(), SecureRandomness(), self._members[0][0]
        rate = _MEMBERS * _MEMBER_SHOTS / len(self.private)
        request = LineRequest(mean.mechanism, rate, len(self.queries), options=mean.options)
        sigma = PrivacyPlan.alone(request, epsilon=epsilon, delta=self.decoder.delta).parameter
        texts = [str(mean.aggregate(outputs, sigma, randomness) or "") for mean, outputs in self._members]
        return self._outcome(name, texts, started, {"epsilon": epsilon, "sigma": sigma})

    @cached_property
    def _members(self) -> list[tuple[EmbeddingMean, list[Any]]]:
        """For each query the aggregator with its public candidates, and what the members of one sample wrote."""
        from langchain_core.output_parsers import StrOutputParser
        from langchain_core.runnables import Runnable, RunnableLambda

        store = ExemplarStore.from_records(
            [{key: row[key] for key in ("input", "output")} for row in self.private],
            local_embeddings(),
            input_key="input",
            output_key="output",
            vectors=np.zeros((len(self.private), 1), np.float32),  # nothing is looked for by similarity
        )
        prompt = _prompt_of(self.decoder.template)
        model, max_tokens = self.options.model, self.options.max_tokens
        selector = PoissonExampleSelector(store, _MEMBERS, shots=_MEMBER_SHOTS)

        def chain(temperature: float) -> Runnable[Any, str]:
            llm = local_llm(model, max_tokens=max_tokens, temperature=temperature)
            return RunnableLambda(prompt) | llm.bind(stop=["\n"]) | StrOutputParser()

        writer = chain(0.9)
        ensemble = PrivateEnsemble(selector, chain(0.0))
        aggregator = EmbeddingMean(local_embeddings(), writer, _CANDIDATES)
        found = []
        for text in tqdm(self.inputs, desc="embedding means", unit="query", disable=None, file=sys.stderr):
            values = {"input": text}
            written = [writer.invoke({**values, "examples": []}) for _ in range(_CANDIDATES)]
            mean = aggregator.prepare(values, aggregator.options, written)
            found.append((mean, ensemble.run(values, selector.rate or 1.0, mean)))
        return found

    def _outcome(
        self,
        name: str,
        texts: list[str],
        started: float,
        facts: dict[str, Any],
        tokens: int = 0,
        weights: Sequence[float] = (),
    ) -> Outcome:
        seconds = round(time.monotonic() - started, 1)
        references = [row.get("references") or row["output"] for row in self.queries]
        rouge = text_measures(texts, references)["rougeL"]
        meaning = meaning_scores(texts, references, local_embeddings())
        return Outcome(name, texts, rouge, meaning, tokens, seconds, facts, list(weights))


def _prompt_of(template: DemonstrationTemplate) -> Callable[[dict[str, Any]], str]:
    """A member's prompt. The function holds the template alone: a member must not reach the study's records."""

    def prompt(values: dict[str, Any]) -> str:
        return "".join(template.show(example) for example in values["examples"]) + template.ask(values)

    return prompt
