"""Reads many prompts in padded batches, with a model of transformers in this process: minutes instead of hours.

In a batch a row's last digits depend on the other rows, which the guarantee does not allow: nothing made here is a
release, and the data must be public.

`Decoder` evaluates private decoding: the sampler itself (online), and demonstrations that it wrote once (offline). Its
draws are the sampler's own (`langchain_dpicl.decoding.answer.choose`), from the same samples, candidates and terms.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from tqdm import tqdm

from langchain_dpicl.decoding.answer import Settings, Writer, choose, clipped_terms, mixing_weights
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.exemplars import IntArray
from langchain_dpicl.decoding.model import Demonstration, DemonstrationTemplate, Logits
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.evaluation.passes import Pairs
from langchain_dpicl.lab.evaluation.studies import Reader, Scores, Write
from langchain_dpicl.lab.evaluation.tasks import Shape
from langchain_dpicl.members.scoring import Position, label_scores
from langchain_dpicl.privacy import LineRequest, PrivacyPlan
from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness

_BATCH = 64
_LEFT = 0.85
_SHARED = 4  # rows after a state
_ATTENTION = "langchain_dpicl_shared"
_ALTERNATIVES = 100

# Keys and values of every layer, (heads, tokens, width) each.
State = list[tuple[Any, Any]]

# Pieces of text, each tokenised on its own, and the tokens after them.
Shown = tuple[tuple[str, ...], tuple[int, ...]]

# From the scores of the next token to one of the tokens.
Pick = Callable[[Logits], int]


class Batches:
    """A model, and a state for all pieces of text that it has read; drop those in ``known`` to free their memory."""

    def __init__(self, model: TransformersLogits) -> None:
        """Raises `InvalidParameter` for a model whose rows in a batch are not those that it reads alone."""
        self.model = model
        self.network = model._loaded
        self.known: dict[tuple[str, ...], State] = {}
        _share(self.network.model)
        self._piece = cache(lambda token: self.network.tokenizer.decode([token]).encode())
        shown, asked = "Colour: red\nThing: cherry\n\n", "Colour: yellow\nThing:"
        session = model.session(asked, [Demonstration("public", shown)], steps=1)
        alone = session.logits([0], [])
        session.close()
        tokens = tuple(self.network.tokens(asked))
        batch = np.array(self.rows([((), tokens), ((shown,), tokens), ((shown, shown), tokens)]))
        if not np.abs(batch[:2] - alone).max() <= 1.0:  # a row that failed is NaN
            raise InvalidParameter("model", model.name, "one whose prompts can be read in a padded batch")
        self.known.clear()

    def prompt(self, prefix: str, question: str) -> Shown:
        """The prompt of examples ("" for none) and a question, each tokenised on its own.

        They meet where a tokeniser splits the whole prompt too: it splits an empty line before a word into its two line
        breaks.
        """
        if shown := prefix.removesuffix("\n"):
            return (shown,), tuple(self.network.tokens(f"\n{question}"))
        return (), tuple(self.network.tokens(question))

    def rows(self, prompts: Sequence[Shown]) -> list[Logits]:
        """Return the next-token scores after each prompt."""
        return self.scores(*self._parts(prompts))

    def _parts(self, prompts: Sequence[Shown]) -> tuple[list[tuple[int, ...]], list[State | None]]:
        """Read the pieces that are not known. Return the tokens of each prompt and the state before them."""
        first = self.network.first
        for size in range(1, 1 + max((len(pieces) for pieces, _ in prompts), default=0)):
            missing = sorted({pieces[:size] for pieces, _ in prompts if len(pieces) >= size} - self.known.keys())
            tokens = [self.network.tokens(pieces[-1]) for pieces in missing]
            if size == 1:
                tokens = [[*first, *piece] for piece in tokens]
            states = self._states(tokens, [self.known.get(pieces[:-1]) for pieces in missing])
            self.known.update(zip(missing, states, strict=True))
        after = [tokens if pieces else (*first, *tokens) for pieces, tokens in prompts]
        return after, [self.known.get(pieces) for pieces, _ in prompts]

    def write(self, prompts: Sequence[Shown], most: int, stop: Sequence[str], pick: Pick) -> list[str]:
        """Return the texts after the prompts: at most so many tokens, picked by their scores, up to a stop text."""
        writers = [Writer(self.model, stop) for _ in prompts]
        tokens, before = self._parts(prompts)
        for some in _batches(tokens, before):
            with self.network.working():
                rows = [tokens[i] for i in some], [before[i] for i in some]
                self._write([writers[i] for i in some], *rows, most, pick)
        for writer in writers:
            writer.finish()
        return [writer.text for writer in writers]

    def _write(
        self,
        writers: Sequence[Writer],
        tokens: Sequence[Sequence[int]],
        before: Sequence[State | None],
        most: int,
        pick: Pick,
    ) -> None:
        """Write on after the tokens of each, all in one batch; equal prompts are read once.

        Ended rows leave it together: that copies all.
        """
        import torch

        def goes_on(writer: Writer) -> bool:
            return not writer.ended and len(writer.tokens) < most

        places, which = _distinct(tokens, before)
        vectors, cache, seen = self._read([tokens[i] for i in places], [before[i] for i in places])
        if len(places) < len(tokens):
            vectors, seen = [vectors[n] for n in which], seen[which]
            cache.batch_select_indices(torch.tensor(which))
        at = torch.tensor([[_length(state) + len(row)] for state, row in zip(before, tokens, strict=True)])
        while True:
            for writer, scores in zip(writers, self._scores(vectors), strict=True):
                if goes_on(writer):
                    writer.add(pick(scores))
            left = [i for i, writer in enumerate(writers) if goes_on(writer)]
            if not left:
                return
            if len(left) <= _LEFT * len(writers):
                writers, before = [writers[i] for i in left], [before[i] for i in left]
                at, seen = at[left], seen[left]
                cache.batch_select_indices(torch.tensor(left))
            seen = torch.nn.functional.pad(seen, (0, 1), value=True)
            ids = torch.tensor([writer.tokens[-1:] for writer in writers])
            vectors = list(self._forward(ids, seen[:, None], at, cache, before)[:, -1])
            at = at + 1

    def _scores(self, vectors: Sequence[Any]) -> Logits:
        """One row of next-token scores for each vector, by one product where the product's releases take many."""
        import torch

        if self.network._head is None:
            return self.network.scores(vectors)
        scores: Logits = self.network._head(torch.stack([*vectors])).to("cpu", torch.float32).numpy()
        return scores

    def _forward(self, ids: Any, seen: Any, places: Any, cache: Any, before: Sequence[State | None]) -> Any:
        """The vectors after the next tokens of each row, which the cache then holds.

        ``seen``: (rows, tokens, tokens in the cache) what a token sees of its row, beside all that stands before it.
        """
        import torch

        dtype = self.network.model.dtype
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        groups, start = [], 0
        for _, some in itertools.groupby(before, key=id):
            state, *others = some
            groups.append((start, start + 1 + len(others), state))
            start = groups[-1][1]
        out = self.network._body(
            input_ids=ids,
            attention_mask=mask[:, None],
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            before=groups,
        )
        return out.last_hidden_state

    def _read(self, tokens: Sequence[Sequence[int]], before: Sequence[State | None]) -> tuple[list[Any], Any, Any]:
        """The vector after each row's last token, the cache, and (rows, tokens in it) which are the row's own."""
        import torch
        from transformers.cache_utils import DynamicCache

        lengths = torch.tensor([len(row) for row in tokens])
        width = int(lengths.max())
        ids = torch.zeros((len(tokens), width), dtype=torch.long)
        for i, row in enumerate(tokens):
            ids[i, : len(row)] = torch.tensor(row)
        places = torch.tensor([[_length(state)] for state in before]) + torch.arange(width)
        causal = torch.ones((len(tokens), width, width), dtype=torch.bool).tril()
        cache = DynamicCache(config=self.network.model.config)
        vectors = self._forward(ids, causal, places, cache, before)
        return (
            [vectors[i, len(row) - 1] for i, row in enumerate(tokens)],
            cache,
            causal[:, -1] & (torch.arange(width) < lengths[:, None]),
        )

    def states(self, tokens: Sequence[Sequence[int]], before: State | None) -> list[State]:
        """Return the state after each row of tokens, all read after the same earlier state."""
        return self._states(tokens, [before] * len(tokens))

    def _states(self, tokens: Sequence[Sequence[int]], before: Sequence[State | None]) -> list[State]:
        return self._read_all(tokens, before, lambda some, _, state: map(state, some))

    def scores(self, tokens: Sequence[Sequence[int]], states: Sequence[State | None]) -> list[Logits]:
        """Return the next-token scores after each row of tokens, read after its own state."""
        return self._read_all(tokens, states, lambda _, vectors, state: self._scores(vectors))

    def grown(self, tokens: Sequence[Sequence[int]], states: Sequence[State | None]) -> list[tuple[Logits, State]]:
        """Return the next-token scores after each row of tokens, read after its own state, and the state then."""
        return self._read_all(
            tokens,
            states,
            lambda some, vectors, state: zip(self._scores(vectors), map(state, some), strict=True),
        )

    def _read_all(
        self,
        tokens: Sequence[Sequence[int]],
        states: Sequence[State | None],
        results: Callable[[list[int], list[Any], Callable[[int], State]], Iterable[Any]],
    ) -> list[Any]:
        """Read the rows in batches, equal ones once, and return their results in the rows' order.

        ``results`` makes them from the places of the rows that were read together, the vectors after their last tokens,
        and a function from a place to the state then.
        """
        import torch

        places, which = _distinct(tokens, states)
        tokens, states = [tokens[i] for i in places], [states[i] for i in places]
        found: list[Any] = [None] * len(tokens)
        with self.network.working():
            for some in _batches(tokens, states):
                vectors, cache, _ = self._read([tokens[i] for i in some], [states[i] for i in some])

                def state(i: int, some: list[int] = some, layers: Any = cache.layers) -> State:
                    place, length = some.index(i), len(tokens[i])
                    own = [(each.keys[place, :, :length], each.values[place, :, :length]) for each in layers]
                    if (before := states[i]) is None:
                        return [(keys.clone(), values.clone()) for keys, values in own]
                    return [
                        (torch.cat([keys, more], dim=1), torch.cat([values, others], dim=1))
                        for (keys, values), (more, others) in zip(before, own, strict=True)
                    ]

                for i, result in zip(some, results(some, vectors, state), strict=True):
                    found[i] = result
        return [found[n] for n in which]

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


def _batches(tokens: Sequence[Sequence[int]], before: Sequence[State | None]) -> list[list[int]]:
    """The positions of rows to read together, so many at a time: those after the same state, or else of one length."""
    known = {id(state): n for n, state in enumerate(before)}
    are_shared = len(known) * _SHARED <= len(tokens)
    order = sorted(range(len(tokens)), key=lambda i: (are_shared and known[id(before[i])], len(tokens[i])))
    return [order[start : start + _BATCH] for start in range(0, len(order), _BATCH)]


def _distinct(tokens: Sequence[Sequence[int]], before: Sequence[State | None]) -> tuple[list[int], list[int]]:
    """The positions of rows that no earlier one equals, and for each row which of these it is."""
    seen: dict[Any, int] = {}
    which = [seen.setdefault((tuple(row), id(state)), len(seen)) for row, state in zip(tokens, before, strict=True)]
    return np.unique(which, return_index=True)[1].tolist(), which


def _length(state: State | None) -> int:
    return int(state[0][0].shape[1]) if state else 0


def _share(model: Any) -> None:
    """Let a model's attention take what stands before groups of rows."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    model.set_attn_implementation(_ATTENTION)


def _attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float = 1.0,
    before: Sequence[tuple[int, int, State | None]] | None = None,
    **others: Any,
) -> tuple[Any, None]:
    """Attention to the state before each group of rows (start, stop, state), which no row copies, and to the rows' own.

    Without any state it is the usual attention of transformers.
    """
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if before is None or not any(state for *_, state in before):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    rows, heads, length, size = query.shape
    kinds = key.shape[1]  # several heads of a query have the same keys
    query = query.reshape(rows, kinds, -1, size) * scaling
    own = query @ key.transpose(2, 3) + attention_mask.repeat(1, 1, heads // kinds, 1)
    found = []
    for start, stop, state in before:
        scores, place = [own[start:stop]], 0
        if state is not None:
            keys, values = state[module.layer_idx]
            place = keys.shape[1]
            there = query[start:stop].transpose(0, 1).reshape(kinds, -1, size) @ keys.transpose(1, 2)
            scores.insert(0, there.reshape(kinds, stop - start, -1, place).transpose(0, 1))
        weights = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(query.dtype)
        result = weights[..., place:] @ value[start:stop]
        if state is not None:
            there = weights[..., :place].transpose(0, 1).reshape(kinds, -1, place) @ values
            result = result + there.reshape(kinds, stop - start, -1, size).transpose(0, 1)
        found.append(result)
    return torch.cat(found).reshape(rows, heads, length, size).transpose(1, 2).contiguous(), None


def label_reader(model: TransformersLogits, labels: Sequence[str], shape: Shape) -> Reader:
    """Score labels after prompts of a shape, with the whole next-token distribution. The model loads at first use.

    Examples are read once for all queries that follow each other with them.
    """
    load = cache(lambda: Batches(model))

    def reader(examples: Sequence[Pairs], query: str) -> Scores:
        batches = load()
        prompts = [batches.prompt(shape.prefix(pairs), shape.ask(query)) for pairs in examples]
        for gone in batches.known.keys() - {shown for shown, _ in prompts}:
            del batches.known[gone]
        return np.array([batches.label_scores(row, labels) for row in batches.rows(prompts)], np.float64)

    return reader


_LIKELIEST = 40


def text_writer(model: TransformersLogits, most: int, stop: Sequence[str]) -> Write:
    """Write texts of at most so many tokens after (prefix, question), at a temperature; 0 takes the likeliest token.

    At another temperature a token is drawn among the 40 likeliest. A prefix is read once for all questions, and kept:
    some 46 kB a token with SmolLM2-135M, half of it in bfloat16. The model loads at first use.
    """
    load = cache(lambda: Batches(model))
    randomness = SecureRandomness()

    def drawn(temperature: float, scores: Logits) -> int:
        if not temperature:
            return int(scores.argmax())
        likeliest = np.argpartition(scores, -_LIKELIEST)[-_LIKELIEST:]
        shares = np.exp((scores[likeliest] - scores.max()).astype(np.float64) / temperature)
        place = np.searchsorted(shares.cumsum(), randomness.uniforms(1)[0] * shares.sum(), side="right")
        return int(likeliest[min(int(place), _LIKELIEST - 1)])

    def write(prompts: Sequence[tuple[str, str]], temperature: float) -> list[str | None]:
        batches = load()
        shown = [batches.prompt(*each) for each in prompts]
        return [text.strip() for text in batches.write(shown, most, stop, partial(drawn, temperature))]

    return write


# -- private decoding --------------------------------------------------------------------------------------------------

# From a place in the answer and (one-shot rows, zero-shot row), over the candidates, to the terms of the rows.
Mix = Callable[[int, FloatArray, FloatArray], IntArray]

# By place in the answers: the least weight of an owner in each sample.
Least = dict[int, list[float]]

NO_BOUND = 1e6
"""A bound that clips nothing: NOT private."""

_KEPT = 8 << 30
"""Bytes of demonstrations' states that are kept for later tokens, some 3.7 MB each in float32."""


def clipping(bound: float, cap: float, least: Least) -> Mix:
    """Return the sampler's own terms at a bound. ``least`` gets the least weight of each sample that has an owner."""

    def mix(place: int, one_shot: FloatArray, zero_shot: FloatArray) -> IntArray:
        if len(one_shot):
            weights = mixing_weights(one_shot - zero_shot, bound, cap)
            least.setdefault(place, []).append(float(weights.min()))
        return clipped_terms(one_shot, zero_shot, bound=bound, temperature=1.0, cap=cap)

    return mix


def least_weights(least: Least) -> list[float]:
    """Return for each place of the answers the mean of the least weight of a sampled owner; NaN without any."""
    places = range(max(least, default=-1) + 1)
    return [round(float(np.mean(least.get(place, math.nan))), 4) for place in places]


@dataclass(frozen=True)
class Version:
    """Answers that a plan counts, candidates, and owners a token on average. Without an epsilon it is not private."""

    releases: int
    top_k: int
    shots: int
    epsilon: float | None = None


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

    def write(
        self,
        name: str,
        inputs: Sequence[str],
        mixes: Sequence[Mix | None],
        kappa: float | None = None,
        top_k: Sequence[int] = (),
    ) -> list[list[Writer]]:
        """Write an answer to each input with each mix, and a fresh Poisson sample for each token of an input.

        All mixes see the same samples, whose demonstrations and questions are read once for all. Without a mix (then
        all are None) samples are empty. ``kappa`` is the weight of the public logits, if not the settings' ``shots``;
        ``top_k`` has each mix's number of candidates, if not the settings' own.
        """
        settings = self.settings if kappa is None else replace(self.settings, shots=kappa)
        own = [replace(settings, top_k=n) for n in top_k] or [settings for _ in mixes]
        batches = self._batches
        rate = 0.0 if None in mixes else self.rate
        unclipped = clipping(NO_BOUND, settings.cap, {})
        asked = [self.template.ask({"input": text}) for text in inputs]
        writers = [[Writer(batches.model, settings.stop) for _ in inputs] for _ in mixes]
        with tqdm(
            total=len(mixes) * len(inputs) * settings.max_tokens,
            desc=name,
            unit="token",
            disable=None,
            file=sys.stderr,
        ) as bar:
            for place in range(settings.max_tokens):
                unfinished: list[tuple[Writer, Mix | None, Settings, Randomness]] = []
                prompts: list[list[Shown]] = []
                for i, question in enumerate(asked):
                    if all(row[i].ended for row in writers):
                        continue
                    randomness = self.draws(i, place)
                    owners = randomness.coin_positions(len(self.private), rate)
                    shown = [self.template.show(self.private[int(owner)]) for owner in owners]
                    for mix, chosen, row in zip(mixes, own, writers, strict=True):
                        if not row[i].ended:
                            unfinished.append((row[i], mix, chosen, randomness))
                            prompts.append([self._prompt(pieces, question, row[i].tokens) for pieces in ("", *shown)])
                rows = iter(self._rows([prompt for some in prompts for prompt in some]))
                for (writer, mix, chosen, randomness), some in zip(unfinished, prompts, strict=True):
                    zero_shot, *others = (next(rows) for _ in some)
                    one_shot = np.array(others, np.float32).reshape(-1, len(zero_shot))
                    terms = partial(mix or unclipped, place)
                    writer.add(choose(batches.model, chosen, writer.tokens, zero_shot, one_shot, terms, randomness))
                bar.update(len(unfinished))
                self._forget()
        for writer in itertools.chain(*writers):
            writer.finish()
        return writers

    def _prompt(self, demonstration: str, question: str, written: Sequence[int]) -> Shown:
        """Return the next prompt of an answer. The question belongs to what is read once, if a token comes after it."""
        pieces = (demonstration,) if demonstration else ()
        if written:
            return (*pieces, question), tuple(written)
        return pieces, tuple(self._batches.network.tokens(question))

    def _rows(self, prompts: Sequence[Shown]) -> list[Logits]:
        if not self.remembers:
            return self._batches.rows(prompts)
        missing = [prompt for prompt in prompts if prompt not in self._read]
        self._read.update(zip(missing, self._batches.rows(missing), strict=True))
        return [self._read[prompt] for prompt in prompts]

    def _forget(self) -> None:
        """Drop the states of questions after demonstrations, and of the demonstrations that were read first."""
        known = self._batches.known
        held = 0
        for pieces in reversed(list(known)):
            (keys, values), *others = known[pieces]  # layers are alike
            size = (1 + len(others)) * (keys.nbytes + values.nbytes)
            if len(pieces) > 1 or held + size > _KEPT:
                del known[pieces]
            else:
                held += size

    def texts(
        self,
        name: str,
        inputs: Sequence[str],
        bounds: Sequence[float | None],
        least: Sequence[Least] = (),
        top_k: Sequence[int] = (),
    ) -> list[list[str]]:
        """Return the texts of the sampler's own terms at each bound; None (then all) for no owner in any sample.

        ``least`` gets the least weights at each bound, ``top_k`` has its number of candidates.
        """
        kept = least or [{} for _ in bounds]
        mixes = [
            None if bound is None else clipping(bound, self.settings.cap, each)
            for bound, each in zip(bounds, kept, strict=True)
        ]
        return [[writer.text.strip() for writer in row] for row in self.write(name, inputs, mixes, top_k=top_k)]

    def demonstrations(
        self,
        name: str,
        inputs: Sequence[str],
        bounds: Sequence[float],
    ) -> list[list[dict[str, Any]]]:
        """Return public demonstrations at each bound: a private answer to each public input, without empty ones."""
        made = self.texts(f"{name}: demonstrations", inputs, bounds)
        pairs = [zip(inputs, texts, strict=True) for texts in made]
        return [[{"input": asked, "output": text} for asked, text in some if text] for some in pairs]

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
        versions: Sequence[Version],
        inputs: Sequence[str],
        public: Sequence[str],
    ) -> list[dict[str, Any]]:
        """Return the ``texts`` of a method of the evaluation in each version, and its ``facts``.

        ``public`` are the inputs for which offline demonstrations are written. The method is "zero-shot decoding",
        "online" or "offline". All versions, of equal shots, see the same samples. The fact ``least_weights`` of
        "online" (figure 3 of Flemings et al. 2025) is no release: for public data alone.
        """
        top_k = [version.top_k for version in versions]
        if method == "zero-shot decoding":
            decoded = self.texts(method, inputs, [None for _ in versions], top_k=top_k)
            return [{"texts": texts, "facts": {}} for texts in decoded]
        bounds = [NO_BOUND if each.epsilon is None else self.bound(each.epsilon, each.releases) for each in versions]
        facts: list[dict[str, Any]] = [
            {} if version.epsilon is None else {"B": bound} for version, bound in zip(versions, bounds, strict=True)
        ]
        if method == "online":
            least: list[Least] = [{} for _ in bounds]
            found = self.texts(method, inputs, bounds, least, top_k)
            for each, weights in zip(facts, least, strict=True):
                each["least_weights"] = least_weights(weights)
        else:
            clipped = [each for each in facts if each]
            made = self.demonstrations(method, public, [each["B"] for each in clipped]) if clipped else []
            for each, pairs in zip(clipped, made, strict=True):
                each["demonstrations"] = pairs
            found = []
            for version, each in zip(versions, facts, strict=True):
                name = f"offline, {'not private' if version.epsilon is None else f'epsilon {version.epsilon:g}'}"
                found.append(self.prompted(name, inputs, each.get("demonstrations", self.private)))
        return [{"texts": texts, "facts": each} for texts, each in zip(found, facts, strict=True)]
