"""Private decoding in an evaluation: the sampler itself (online), and demonstrations that it wrote once (offline).

The draws are the sampler's own (`langchain_dpicl.decoding.mixing.choose`), from the same samples, candidates and terms,
but the rows of all answers are read in batches: nothing made here is a release (see `batches`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from tqdm import tqdm

from langchain_dpicl.decoding.answer import Writer
from langchain_dpicl.decoding.mixing import FloatArray, IntArray, Settings, choose, clipped_terms, mixing_weights
from langchain_dpicl.decoding.template import DemonstrationTemplate
from langchain_dpicl.evaluation.batches import Batches
from langchain_dpicl.evaluation.data import Row
from langchain_dpicl.evaluation.passes import Key, PassFile, key_of
from langchain_dpicl.evaluation.scores import Score
from langchain_dpicl.evaluation.text_study import score_texts
from langchain_dpicl.privacy import PrivacyPlan
from langchain_dpicl.privacy.lines import LineRequest
from langchain_dpicl.privacy.noise import SecureRandomness

Weighed = tuple[IntArray, FloatArray]
"""What each row adds to the scores, and its mixing weight."""

Mix = Callable[[FloatArray, FloatArray], Weighed]
"""From (one-shot rows, zero-shot row), over the candidates, to the terms of the rows."""


@dataclass(frozen=True)
class DecodingNumbers:
    """The public numbers of private decoding; the defaults were chosen for `results/decoding`, on other queries.

    Parameters
    ----------
    shots
        Owners in the sample of a token, on average.
    kappa
        The weight of the public logits.
    demonstrations, prompt_shots
        How many demonstrations are written once, and how many of them a prompt shows.
    """

    max_tokens: int
    min_tokens: int = 8
    top_k: int = 100
    shots: float = 4.0
    kappa: float = 3.0
    cap: float = 1.5
    demonstrations: int = 16
    prompt_shots: int = 4


@dataclass
class Answer:
    """One unfinished answer.

    Parameters
    ----------
    asked
        The query as the model reads it.
    shown
        For each step the demonstrations of that step's sample.
    weights
        By place in the answer: the mixing weight of each row.
    """

    asked: str
    shown: Sequence[Sequence[str]]
    writer: Writer
    weights: dict[int, list[float]] = field(default_factory=dict)


class Decoder:
    """Decodes answers with an embedded model, or a GGUF file. Records have the texts ``input`` and ``output``."""

    def __init__(
        self,
        model: str,
        template: DemonstrationTemplate,
        private: Sequence[Mapping[str, Any]],
        numbers: DecodingNumbers,
        delta: float,
        *,
        threads: int | None = None,
        dtype: Any = "float32",
    ) -> None:
        self.model, self.template, self.private, self.numbers = model, template, private, numbers
        self.rate, self.delta = numbers.shots / len(private), delta
        self._threads, self._dtype = threads, dtype

    @cached_property
    def _batches(self) -> Batches:
        from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits

        return Batches(TransformersLogits(self.model, threads=self._threads, dtype=self._dtype))

    def parameter(self, epsilon: float, request: LineRequest) -> float:
        """Return the noise that a plan of this one line allows."""
        plan = PrivacyPlan.solve(epsilon=epsilon, delta=self.delta, lines={"only": request})
        return plan.lines["only"].parameter

    def bound(self, epsilon: float, answers: int) -> float:
        """Return B of a plan for so many answers."""
        return self.parameter(epsilon, LineRequest("tokens", self.rate, answers * self.numbers.max_tokens))

    def mix(self, bound: float = 1e6, cap: float | None = None) -> Mix:
        """Return the sampler's own terms, with their weights. The default bound clips nothing: NOT private."""
        cap = self.numbers.cap if cap is None else cap

        def terms(one_shot: FloatArray, zero_shot: FloatArray) -> Weighed:
            added = clipped_terms(one_shot, zero_shot, bound=bound, temperature=1.0, cap=cap)
            return added, mixing_weights(one_shot - zero_shot, bound, cap)

        return terms

    def write(self, name: str, inputs: Sequence[str], mix: Mix | None, shots: float | None = None) -> list[Answer]:
        """Write an answer to each input, with a fresh Poisson sample for each token; without ``mix`` samples are empty.

        ``shots`` is the weight of the public logits, if it is not ``kappa``.
        """
        numbers, randomness, batches = self.numbers, SecureRandomness(), self._batches
        settings = Settings(
            max_tokens=numbers.max_tokens,
            min_tokens=numbers.min_tokens,
            top_k=numbers.top_k,
            shots=numbers.kappa if shots is None else shots,
            temperature=1.0,
            cap=numbers.cap,
            stop=("\n",),
        )

        def sample() -> list[str]:
            rows = randomness.coin_positions(len(self.private), self.rate) if mix else ()
            return [self.template.show(self.private[int(row)]) for row in rows]

        def terms(answer: Answer, one_shot: FloatArray, zero_shot: FloatArray) -> IntArray:
            assert mix is not None
            added, weights = mix(one_shot, zero_shot)
            answer.weights[len(answer.writer.tokens)] = weights.tolist()
            return added

        answers = [
            Answer(
                self.template.ask({"input": text}),
                [sample() for _ in range(settings.max_tokens)],
                Writer(batches.model, settings.stop),
            )
            for text in inputs
        ]
        asked = {answer.asked: batches.network.tokens(answer.asked) for answer in answers}
        total = len(inputs) * settings.max_tokens
        with tqdm(total=total, desc=name, unit="token", disable=None, file=sys.stderr) as bar:
            for place in range(settings.max_tokens):
                unfinished = [answer for answer in answers if not answer.writer.ended]
                prompts = [
                    (shown, [*asked[answer.asked], *answer.writer.tokens])
                    for answer in unfinished
                    for shown in ("", *answer.shown[place])
                ]
                rows = iter(batches.rows(prompts))
                for answer in unfinished:
                    zero_shot, done = next(rows), answer.writer.tokens
                    one_shot = np.array([next(rows) for _ in answer.shown[place]], np.float32)
                    one_shot = one_shot.reshape(-1, len(zero_shot))
                    own = partial(terms, answer)
                    token = choose(batches.model, settings, done, zero_shot, one_shot, own, randomness)
                    answer.writer.add(token)
                bar.update(len(unfinished))
        for answer in answers:
            answer.writer.finish()
        return answers

    def texts(self, name: str, inputs: Sequence[str], mix: Mix | None) -> list[str]:
        """Return the texts of `write`."""
        return [answer.writer.text.strip() for answer in self.write(name, inputs, mix)]

    def demonstrations(self, name: str, inputs: Sequence[str], bound: float) -> list[dict[str, Any]]:
        """Return public demonstrations: a private answer to each of the public inputs, without those that are empty."""
        made = self.texts(f"{name}: demonstrations", inputs, self.mix(bound))
        return [{"input": asked, "output": text} for asked, text in zip(inputs, made, strict=True) if text]

    def prompted(self, name: str, inputs: Sequence[str], pairs: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the model's texts after prompts of ``prompt_shots`` of these pairs, drawn for each input."""
        from langchain_core.output_parsers import StrOutputParser
        from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate

        from langchain_dpicl.local import local_llm

        randomness = SecureRandomness()
        llm = local_llm(self.model, max_tokens=self.numbers.max_tokens).bind(stop=["\n"])
        layout = PromptTemplate.from_template(self.template.demonstration.strip("\n"))
        texts = []
        for text in tqdm(inputs, desc=name, unit="answer", disable=None, file=sys.stderr):
            order = np.argsort(randomness.uniforms(len(pairs)))[: self.numbers.prompt_shots]
            prompt = FewShotPromptTemplate(
                examples=[{key: pairs[int(i)][key] for key in ("input", "output")} for i in order],
                example_prompt=layout,
                suffix=self.template.query,
                input_variables=["input"],
                example_separator="\n\n",
            )
            texts.append((prompt | llm | StrOutputParser()).invoke({"input": text}).strip())
        return texts


def token_scores(
    make: Callable[[int], Decoder],
    inputs: Sequence[str],
    queries: Sequence[Row],
    public: Sequence[str],
    *,
    methods: Sequence[str],
    epsilons: Sequence[float],
    top_ks: Sequence[int],
    file: PassFile,
    embeddings: Embeddings,
) -> list[Score]:
    """Score the methods, from the file or decoded now. One run each: a token's draw is the noise.

    Parameters
    ----------
    make
        From a ``top_k`` to the decoder.
    inputs, queries
        The inputs of the queries as prompts show them, and the queries.
    public
        Inputs that offline demonstrations are written for.
    top_ks
        The ``top_k`` of the main table, then those of the ablation, which decodes online alone.
    """
    asked = key_of(repr([row.input for row in queries]))
    main, *varied = top_ks
    works: list[tuple[str, float | None]] = []
    if "online" in methods:
        works = [("zero-shot decoding", None), *(("online", epsilon) for epsilon in (None, *epsilons))]
    if "offline" in methods:
        works += [("offline", epsilon) for epsilon in (None, *epsilons)]
    found = []
    for top_k in dict.fromkeys(top_ks):
        decoder = make(top_k)
        shown = public[: decoder.numbers.demonstrations]
        for method, epsilon in works:
            if top_k != main and method != "online":
                continue
            plan: tuple[str, ...] = () if epsilon is None else (str(epsilon), str(decoder.delta))
            key: Key = (method, top_k, asked, *plan)
            if key not in file:
                file.add(key, _decoded(decoder, method, epsilon, inputs, shown))
            kept = file[key]
            facts = {k: v for k, v in kept["facts"].items() if isinstance(v, (int, float)) and k != "epsilon"}
            facts["top_k"] = top_k
            if epsilon is not None:  # a plan counts an answer to each query, or each demonstration
                releases = len(inputs) if method == "online" else len(shown)
                facts |= {"rate": decoder.rate, "shots": decoder.numbers.shots, "releases": releases}
            score = score_texts(method, [kept["texts"]], queries, embeddings, epsilon=epsilon, facts=facts)
            if top_k == main:
                found.append(score)
            if method == "online" and top_k in varied:
                found.append(replace(score, study="top_k"))
    return found


def _decoded(
    decoder: Decoder, method: str, epsilon: float | None, inputs: Sequence[str], public: Sequence[str]
) -> dict[str, Any]:
    """The texts of a method, and its facts."""
    name = f"{method}, {'not private' if epsilon is None else f'epsilon {epsilon:g}'}"
    if method == "zero-shot decoding":
        return {"texts": decoder.texts(method, inputs, None), "facts": {}}
    if epsilon is None and method == "online":
        return {"texts": decoder.texts(name, inputs, decoder.mix()), "facts": {}}
    if epsilon is None:
        return {"texts": decoder.prompted(name, inputs, decoder.private), "facts": {}}
    if method == "online":
        bound = decoder.bound(epsilon, len(inputs))
        return {"texts": decoder.texts(name, inputs, decoder.mix(bound)), "facts": {"B": bound}}
    bound = decoder.bound(epsilon, len(public))
    pairs = decoder.demonstrations(name, public, bound)
    return {"texts": decoder.prompted(name, inputs, pairs), "facts": {"B": bound, "demonstrations": pairs}}
