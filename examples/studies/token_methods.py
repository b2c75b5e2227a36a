"""The methods that a study of private decoding compares, each on the same queries."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np
from paper_radius import ball_terms, claimed_beta
from tqdm import tqdm

from langchain_dpicl.aggregators import EmbeddingMean
from langchain_dpicl.evaluation.lockstep import Weighed
from langchain_dpicl.evaluation.token_methods import NO_BOUND, Outcome, Study, clipped
from langchain_dpicl.privacy.noise import SecureRandomness
from langchain_dpicl.privacy.plan import LineRequest
from langchain_dpicl.release.ensemble import PrivateEnsemble
from langchain_dpicl.selection.selector import PoissonExampleSelector
from langchain_dpicl.store import ExemplarStore

_MEMBERS, _MEMBER_SHOTS, _CANDIDATES = 10, 4, 10


class Comparison(Study):
    """All methods of the study."""

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

    def paper(self, name: str, epsilon: float) -> Outcome:
        """The paper's weights; its epsilon is a claim without a proof."""
        tokens = len(self.queries) * self.options.max_tokens
        beta, order = claimed_beta(epsilon, self.delta, self.rate, tokens)
        mix = partial(ball_terms, beta=beta, order=order, temperature=1.0, cap=1.5)
        return self.decode(name, mix, facts={"claimed epsilon": epsilon, "beta": beta, "order": order})

    def embedding_mean(self, name: str, epsilon: float) -> Outcome:
        """ESA: the zero-shot sentence nearest to the noisy mean of ten members' sentences."""
        started, randomness, mean = time.monotonic(), SecureRandomness(), self._members[0][0]
        rate = _MEMBERS * _MEMBER_SHOTS / len(self.private)
        request = LineRequest(mean.mechanism, rate, len(self.queries), options=mean.options)
        sigma = self.parameter(epsilon, request)
        texts = [str(mean.aggregate(outputs, sigma, randomness) or "") for mean, outputs in self._members]
        return self.outcome(name, texts, 0, started, {"epsilon": epsilon, "sigma": sigma}, [])

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


def _plain(one_shot: Any, zero_shot: Any) -> Weighed:
    """Every row with weight 1, whatever it says: NOT private."""
    return clipped(one_shot, zero_shot, bound=NO_BOUND, cap=1.0)
