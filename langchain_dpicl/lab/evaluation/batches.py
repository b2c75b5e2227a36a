"""Reads many prompts in padded batches, with a model of transformers in this process: minutes instead of hours.

In a batch a row's last digits depend on the other rows, which the guarantee does not allow: nothing made here is a
release, and the data must be public.

`Decoder` evaluates private decoding: the sampler itself (online), and demonstrations that it wrote once (offline). Its
draws are the sampler's own (`langchain_dpicl.decoding.answer.choose`), from the same samples, candidates and terms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from tqdm import tqdm

from langchain_dpicl.decoding.answer import Settings, Writer, choose, clipped_terms
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.exemplars import IntArray
from langchain_dpicl.decoding.model import Demonstration, DemonstrationTemplate, Logits
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.evaluation.passes import Pairs
from langchain_dpicl.lab.evaluation.studies import Reader, Scores
from langchain_dpicl.lab.evaluation.tasks import Shape
from langchain_dpicl.members.scoring import Position, label_scores
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness

_BATCH = 24
_ALTERNATIVES = 100

# Keys and values of every layer, (heads, tokens, width) each.
State = list[tuple[Any, Any]]

# A demonstration, and the tokens after it.
Shown = tuple[str, tuple[int, ...]]


class Batches:
    """A model, and a state for each demonstration that it has read; drop those in ``known`` to free their memory."""

    def __init__(self, model: TransformersLogits) -> None:
        """Raises `InvalidParameter` for a model whose rows in a batch are not those that it reads alone."""
        self.model = model
        self.network = model._loaded
        self.known: dict[str, State] = {}
        self._piece = cache(lambda token: self.network.tokenizer.decode([token]).encode())
        shown, asked = "Colour: red\nThing: cherry\n\n", "Colour: yellow\nThing:"
        session = model.session(asked, [Demonstration("public", shown)], steps=1)
        alone = session.logits([0], [])
        session.close()
        tokens = self.network.tokens(asked)
        batch = np.array(self.rows([("", tokens), (shown, tokens), (shown * 2, tokens)]))
        if not np.abs(batch[:2] - alone).max() <= 1.0:  # a row that failed is NaN
            raise InvalidParameter("model", model.name, "one whose prompts can be read in a padded batch")
        self.known.clear()

    def rows(self, prompts: Sequence[tuple[str, Sequence[int]]]) -> list[Logits]:
        """Return the next-token scores after each (demonstration, tokens). "" is no demonstration."""
        first = self.network.first
        missing = sorted({shown for shown, _ in prompts if shown} - self.known.keys())
        states = self.states([[*first, *self.network.tokens(shown)] for shown in missing], None)
        self.known.update(zip(missing, states, strict=True))
        tokens = [after if shown else [*first, *after] for shown, after in prompts]
        return self.scores(tokens, [self.known.get(shown) for shown, _ in prompts])

    def states(self, tokens: Sequence[Sequence[int]], before: State | None) -> list[State]:
        """Return the state after each row of tokens, all read after the same earlier state."""
        return self._read_all(tokens, [before] * len(tokens), lambda some, _, state: map(state, some))

    def scores(self, tokens: Sequence[Sequence[int]], states: Sequence[State | None]) -> list[Logits]:
        """Return the next-token scores after each row of tokens, read after its own state."""
        return self._read_all(tokens, states, lambda _, vectors, state: self.network.scores(vectors))

    def grown(self, tokens: Sequence[Sequence[int]], states: Sequence[State]) -> list[tuple[Logits, State]]:
        """Return the next-token scores after each row of tokens, read after its own state, and the state then."""
        return self._read_all(
            tokens,
            states,
            lambda some, vectors, state: zip(self.network.scores(vectors), map(state, some), strict=True),
        )

    def _read_all(
        self,
        tokens: Sequence[Sequence[int]],
        states: Sequence[State | None],
        results: Callable[[list[int], list[Any], Callable[[int], State]], Iterable[Any]],
    ) -> list[Any]:
        """Read the rows, those of one length together, and return their results in the rows' order.

        ``results`` makes them from the places of the rows that were read together, the vectors after their last tokens,
        and a function from a place to the state then.
        """
        found: list[Any] = [None] * len(tokens)
        with self.network.working():
            for some in _batches([(len(row), _length(state)) for state, row in zip(states, tokens, strict=True)]):
                vectors, cache = self._read([tokens[i] for i in some], [states[i] for i in some])
                past = max(_length(states[i]) for i in some)

                def state(
                    i: int,
                    some: list[int] = some,
                    past: int = past,
                    layers: Any = cache.layers,
                ) -> State:
                    place = some.index(i)
                    own = slice(past - _length(states[i]), past + len(tokens[i]))
                    return [(each.keys[place, :, own].clone(), each.values[place, :, own].clone()) for each in layers]

                for i, result in zip(some, results(some, vectors, state), strict=True):
                    found[i] = result
        return found

    def label_scores(self, row: Logits, labels: Sequence[str]) -> list[float]:
        """Return the scores of labels from the next-token scores, as `langchain_dpicl.members.scoring` defines them.

        They come from the whole distribution instead of the part that a server shows.
        """
        best = np.argpartition(row, -_ALTERNATIVES)[-_ALTERNATIVES:]
        best = best[np.argsort(-row[best])]
        shares = np.exp(row.astype(np.float64) - float(row[best[0]]))
        shares /= shares.sum()
        top = [(self._piece(int(i)), float(shares[i])) for i in best]
        return label_scores([Position(top[0][0], top)], labels)

    def _read(self, tokens: Sequence[Sequence[int]], states: Sequence[State | None]) -> tuple[list[Any], Any]:
        """The vector after each row's last token, and the cache. Earlier states stand on the left, padded there."""
        import torch
        from transformers.cache_utils import DynamicCache

        model = self.network.model
        before = [_length(state) for state in states]
        past, width = max(before), max(map(len, tokens))
        ids = torch.zeros((len(tokens), width), dtype=torch.long)
        mask = torch.full((len(tokens), 1, width, past + width), torch.finfo(model.dtype).min, dtype=model.dtype)
        seen = torch.ones((width, width), dtype=torch.bool).tril()
        for i, (row, known) in enumerate(zip(tokens, before, strict=True)):
            ids[i, : len(row)] = torch.tensor(row)
            mask[i, 0, :, past - known : past] = 0
            mask[i, 0, :, past:][seen] = 0
        places = torch.tensor(before)[:, None] + torch.arange(width)
        cache = DynamicCache(config=model.config)
        for layer in range(max(len(state or ()) for state in states)):
            keys, values = (_padded([state and state[layer][part] for state in states], past) for part in (0, 1))
            cache.update(keys, values, layer)
        out = self.network._body(
            input_ids=ids,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
        )
        return [out.last_hidden_state[i, len(row) - 1] for i, row in enumerate(tokens)], cache


def _batches(sizes: Sequence[Any]) -> list[list[int]]:
    """The positions of rows of similar size, so many at a time."""
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    return [order[start : start + _BATCH] for start in range(0, len(order), _BATCH)]


def _length(state: State | None) -> int:
    return int(state[0][0].shape[1]) if state else 0


def _padded(parts: Sequence[Any], length: int) -> Any:
    """One layer's keys (or values) of several rows, zeros on the left; None is a row of zeros."""
    like = next(part for part in parts if part is not None)
    whole = like.new_zeros((len(parts), like.shape[0], length, like.shape[2]))
    for row, part in zip(whole, parts, strict=True):
        if part is not None:
            row[:, length - part.shape[1] :] = part
    return whole


def label_reader(model: TransformersLogits, labels: Sequence[str], shape: Shape) -> Reader:
    """Score labels after prompts of a shape, with the whole next-token distribution. The model loads at first use.

    Examples are read once for all queries that follow each other with them. They and the query are tokenised on their
    own, so they meet where a tokeniser splits the whole prompt too: it splits an empty line before a word into its two
    line breaks.
    """
    load = cache(lambda: Batches(model))

    def reader(examples: Sequence[Pairs], query: str) -> Scores:
        batches = load()
        prefixes = [shape.prefix(pairs).removesuffix("\n") for pairs in examples]
        for gone in batches.known.keys() - set(prefixes):
            del batches.known[gone]
        question = shape.ask(query)
        asked = [batches.network.tokens(f"\n{question}" if prefix else question) for prefix in prefixes]
        rows = batches.rows(list(zip(prefixes, asked, strict=True)))
        return np.array([batches.label_scores(row, labels) for row in rows], np.float64)

    return reader


# -- private decoding --------------------------------------------------------------------------------------------------

# From a place in the answer and (one-shot rows, zero-shot row), over the candidates, to the terms of the rows.
Mix = Callable[[int, FloatArray, FloatArray], IntArray]

NO_BOUND = 1e6
"""A bound that clips nothing: NOT private."""


@dataclass
class Decoder:
    """Decodes answers with an embedded model, or a GGUF file. Records have the texts ``input`` and ``output``.

    The sample of a token has ``shots`` owners on average; a prompt shows ``prompt_shots`` demonstrations. ``draws``
    gives the draws for a place of an answer: methods that share them are compared in pairs. With ``remembers`` a prompt
    that comes again is not read again, at 200 kB each.
    """

    model: str
    template: DemonstrationTemplate
    private: Sequence[Mapping[str, Any]] = field(repr=False)
    settings: Settings
    delta: float
    shots: float = 4.0
    prompt_shots: int = 4
    threads: int | None = None
    dtype: Any = "float32"
    draws: Callable[[int, int], Randomness] = lambda answer, place: SecureRandomness()
    remembers: bool = False
    _read: dict[Shown, Logits] = field(default_factory=dict, init=False, repr=False)

    @property
    def rate(self) -> float:
        """An owner's probability to take part in one token."""
        return self.shots / len(self.private)

    @cached_property
    def _batches(self) -> Batches:
        return Batches(TransformersLogits(self.model, threads=self.threads, dtype=self.dtype))

    def bound(self, epsilon: float, answers: int) -> float:
        """Return B of a plan for so many answers."""
        request = LineRequest("tokens", self.rate, answers * self.settings.max_tokens)
        return PrivacyPlan.alone(request, epsilon=epsilon, delta=self.delta).parameter

    def _mix(self, bound: float, _: int, one_shot: FloatArray, zero_shot: FloatArray) -> IntArray:
        return clipped_terms(one_shot, zero_shot, bound=bound, temperature=1.0, cap=self.settings.cap)

    def write(
        self,
        name: str,
        inputs: Sequence[str],
        mix: Mix | None,
        kappa: float | None = None,
    ) -> list[Writer]:
        """Write an answer to each input, with a fresh Poisson sample for each token; without ``mix`` samples are empty.

        ``kappa`` is the weight of the public logits, if it is not the settings' ``shots``.
        """
        settings = self.settings if kappa is None else replace(self.settings, shots=kappa)
        batches = self._batches
        rate = self.rate if mix else 0.0
        questions = [self.template.ask({"input": text}) for text in inputs]
        asked = [batches.network.tokens(text) for text in questions]
        writers = [Writer(batches.model, settings.stop) for _ in inputs]
        with tqdm(
            total=len(inputs) * settings.max_tokens,
            desc=name,
            unit="token",
            disable=None,
            file=sys.stderr,
        ) as bar:
            for place in range(settings.max_tokens):
                terms = partial(mix or partial(self._mix, NO_BOUND), place)
                prompts: list[list[Shown]] = []
                unfinished = [i for i, writer in enumerate(writers) if not writer.ended]
                draws = [self.draws(i, place) for i in unfinished]
                for i, randomness in zip(unfinished, draws, strict=True):
                    owners = randomness.coin_positions(len(self.private), rate)
                    prompts.append(self._prompts(questions[i], asked[i], writers[i].tokens, owners))
                rows = iter(self._rows([prompt for some in prompts for prompt in some]))
                for i, randomness, some in zip(unfinished, draws, prompts, strict=True):
                    zero_shot, *others = (next(rows) for _ in some)
                    one_shot = np.array(others, np.float32).reshape(-1, len(zero_shot))
                    chosen = choose(
                        batches.model,
                        settings,
                        writers[i].tokens,
                        zero_shot,
                        one_shot,
                        terms,
                        randomness,
                    )
                    writers[i].add(chosen)
                bar.update(len(unfinished))
        for writer in writers:
            writer.finish()
        return writers

    def _prompts(
        self,
        question: str,
        asked: Sequence[int],
        written: Sequence[int],
        owners: IntArray,
    ) -> list[Shown]:
        """Return one answer's next prompts: first the one without a demonstration, then one for each owner.

        ``asked`` are the question's tokens, ``written`` those of the answer so far.
        """
        after = (*asked, *written)
        public = ("", after)
        if written:
            public = (question, tuple(written))  # the question is read once
        return [public, *((self.template.show(self.private[int(owner)]), after) for owner in owners)]

    def _rows(self, prompts: Sequence[Shown]) -> list[Logits]:
        known = self._read if self.remembers else {}
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
        known.update(zip(missing, self._batches.rows(missing), strict=True))
        return [known[prompt] for prompt in prompts]

    def texts(self, name: str, inputs: Sequence[str], bound: float | None) -> list[str]:
        """Return the texts of the sampler's own terms at this bound; None for no owner in any sample."""
        mix = None if bound is None else partial(self._mix, bound)
        return [writer.text.strip() for writer in self.write(name, inputs, mix)]

    def demonstrations(self, name: str, inputs: Sequence[str], bound: float) -> list[dict[str, Any]]:
        """Return public demonstrations: a private answer to each of the public inputs, without those that are empty."""
        made = self.texts(f"{name}: demonstrations", inputs, bound)
        return [{"input": asked, "output": text} for asked, text in zip(inputs, made, strict=True) if text]

    def prompted(
        self,
        name: str,
        inputs: Sequence[str],
        pairs: Sequence[Mapping[str, Any]],
    ) -> list[str]:
        """Return the model's texts after prompts of ``prompt_shots`` of these pairs, drawn for each input."""
        from langchain_dpicl.local import local_llm

        llm, randomness = local_llm(self.model, max_tokens=self.settings.max_tokens), SecureRandomness()
        texts = []
        for text in tqdm(inputs, desc=name, unit="answer", disable=None, file=sys.stderr):
            order = np.argsort(randomness.uniforms(len(pairs)))[: self.prompt_shots]
            shown = "".join(self.template.show(pairs[int(i)]) for i in order)
            texts.append(str(llm.invoke(shown + self.template.ask({"input": text}), stop=["\n"])).strip())
        return texts

    def answers(
        self,
        method: str,
        epsilon: float | None,
        inputs: Sequence[str],
        public: Sequence[str],
    ) -> dict[str, Any]:
        """Return the ``texts`` of a method of the evaluation, and its ``facts``.

        ``public`` are the inputs for which offline demonstrations are written. The method is "zero-shot decoding",
        "online" or "offline"; without an epsilon it is not private.
        """
        if method == "zero-shot decoding":
            return {"texts": self.texts(method, inputs, None), "facts": {}}
        name = f"{method}, not private"
        bound = NO_BOUND
        facts: dict[str, Any] = {}
        if epsilon is not None:
            name = f"{method}, epsilon {epsilon:g}"
            bound = facts["B"] = self.bound(epsilon, len(inputs if method == "online" else public))
        if method == "online":
            return {"texts": self.texts(name, inputs, bound), "facts": facts}
        pairs = self.private
        if epsilon is not None:
            pairs = facts["demonstrations"] = self.demonstrations(name, public, bound)
        return {"texts": self.prompted(name, inputs, pairs), "facts": facts}
