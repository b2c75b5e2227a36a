"""Private decoding in an evaluation: the sampler itself (online), and demonstrations that it wrote once (offline).

The draws are the sampler's own (`langchain_dpicl.decoding.mixing.choose`), from the same samples, candidates and terms,
but the rows of all answers are read in batches: nothing made here is a release (see `batches`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from tqdm import tqdm

from langchain_dpicl.decoding.answer import Writer
from langchain_dpicl.decoding.demonstrations import DemonstrationTemplate
from langchain_dpicl.decoding.mixing import IntArray, Settings, choose, clipped_terms
from langchain_dpicl.evaluation.batches import Batches
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.noise import SecureRandomness

Mix = Callable[[int, FloatArray, FloatArray], IntArray]
"""From a place in the answer and (one-shot rows, zero-shot row), over the candidates, to the terms of the rows."""

NO_BOUND = 1e6
"""A bound that clips nothing: NOT private."""


class Decoder:
    """Decodes answers with an embedded model, or a GGUF file. Records have the texts ``input`` and ``output``.

    The sample of a token has ``shots`` owners on average; a prompt shows ``prompt_shots`` demonstrations.
    """

    def __init__(
        self,
        model: str,
        template: DemonstrationTemplate,
        private: Sequence[Mapping[str, Any]],
        settings: Settings,
        delta: float,
        *,
        shots: float = 4.0,
        prompt_shots: int = 4,
        threads: int | None = None,
        dtype: Any = "float32",
    ) -> None:
        self.model, self.template, self.private, self.settings = model, template, private, settings
        self.rate, self.delta, self.shots, self._prompt_shots = shots / len(private), delta, shots, prompt_shots
        self._threads, self._dtype = threads, dtype

    @cached_property
    def _batches(self) -> Batches:
        from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits

        return Batches(TransformersLogits(self.model, threads=self._threads, dtype=self._dtype))

    def bound(self, epsilon: float, answers: int) -> float:
        """Return B of a plan for so many answers."""
        request = LineRequest("tokens", self.rate, answers * self.settings.max_tokens)
        plan = PrivacyPlan.solve(epsilon=epsilon, delta=self.delta, lines={"only": request})
        return plan.lines["only"].parameter

    def _mix(self, bound: float, _: int, one_shot: FloatArray, zero_shot: FloatArray) -> IntArray:
        return clipped_terms(one_shot, zero_shot, bound=bound, temperature=1.0, cap=self.settings.cap)

    def write(self, name: str, inputs: Sequence[str], mix: Mix | None, kappa: float | None = None) -> list[Writer]:
        """Write an answer to each input, with a fresh Poisson sample for each token; without ``mix`` samples are empty.

        ``kappa`` is the weight of the public logits, if it is not the settings' ``shots``.
        """
        settings = self.settings if kappa is None else replace(self.settings, shots=kappa)
        randomness, batches = SecureRandomness(), self._batches
        asked = [batches.network.tokens(self.template.ask({"input": text})) for text in inputs]
        writers = [Writer(batches.model, settings.stop) for _ in inputs]
        total = len(inputs) * settings.max_tokens
        with tqdm(total=total, desc=name, unit="token", disable=None, file=sys.stderr) as bar:
            for place in range(settings.max_tokens):
                terms = partial(mix or partial(self._mix, NO_BOUND), place)
                prompts: list[list[tuple[str, list[int]]]] = []  # by unfinished answer: without a demonstration first
                unfinished = [i for i, writer in enumerate(writers) if not writer.ended]
                for i in unfinished:
                    owners = randomness.coin_positions(len(self.private), self.rate if mix else 0.0)
                    shown = ["", *(self.template.show(self.private[int(owner)]) for owner in owners)]
                    prompts.append([(text, [*asked[i], *writers[i].tokens]) for text in shown])
                rows = iter(batches.rows([prompt for some in prompts for prompt in some]))
                for i, some in zip(unfinished, prompts, strict=True):
                    zero_shot, *others = (next(rows) for _ in some)
                    one_shot = np.array(others, np.float32).reshape(-1, len(zero_shot))
                    done = writers[i].tokens
                    writers[i].add(choose(batches.model, settings, done, zero_shot, one_shot, terms, randomness))
                bar.update(len(unfinished))
        for writer in writers:
            writer.finish()
        return writers

    def texts(self, name: str, inputs: Sequence[str], bound: float | None) -> list[str]:
        """Return the texts of the sampler's own terms at this bound; None for no owner in any sample."""
        mix = None if bound is None else partial(self._mix, bound)
        return [writer.text.strip() for writer in self.write(name, inputs, mix)]

    def demonstrations(self, name: str, inputs: Sequence[str], bound: float) -> list[dict[str, Any]]:
        """Return public demonstrations: a private answer to each of the public inputs, without those that are empty."""
        made = self.texts(f"{name}: demonstrations", inputs, bound)
        return [{"input": asked, "output": text} for asked, text in zip(inputs, made, strict=True) if text]

    def prompted(self, name: str, inputs: Sequence[str], pairs: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the model's texts after prompts of ``prompt_shots`` of these pairs, drawn for each input."""
        from langchain_dpicl.local import local_llm

        llm, randomness = local_llm(self.model, max_tokens=self.settings.max_tokens), SecureRandomness()
        texts = []
        for text in tqdm(inputs, desc=name, unit="answer", disable=None, file=sys.stderr):
            order = np.argsort(randomness.uniforms(len(pairs)))[: self._prompt_shots]
            shown = "".join(self.template.show(pairs[int(i)]) for i in order)
            texts.append(str(llm.invoke(shown + self.template.ask({"input": text}), stop=["\n"])).strip())
        return texts

    def answers(
        self, method: str, epsilon: float | None, inputs: Sequence[str], public: Sequence[str]
    ) -> dict[str, Any]:
        """Return the ``texts`` of a method of the evaluation, and its ``facts``.

        ``public`` are the inputs for which offline demonstrations are written. The method is "zero-shot decoding",
        "online" or "offline"; without an epsilon it is not private.
        """
        if method == "zero-shot decoding":
            return {"texts": self.texts(method, inputs, None), "facts": {}}
        name = f"{method}, {'not private' if epsilon is None else f'epsilon {epsilon:g}'}"
        bound, facts = NO_BOUND, dict[str, Any]()
        if epsilon is not None:
            bound = facts["B"] = self.bound(epsilon, len(inputs if method == "online" else public))
        if method == "online":
            return {"texts": self.texts(name, inputs, bound), "facts": facts}
        pairs = self.private
        if epsilon is not None:
            pairs = facts["demonstrations"] = self.demonstrations(name, public, bound)
        return {"texts": self.prompted(name, inputs, pairs), "facts": facts}
