"""The logits of a model at every token of known outputs, after a demonstration: one pass for a pair of the two.

Outputs are read by teacher forcing, many in one batch. In a batch a row's last digits depend on the other rows, which
the guarantee does not allow: nothing that is read here may lead to a release, and the data must be public.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import log_softmax
from tqdm import tqdm

from langchain_dpicl.decoding.answer import Settings, possible
from langchain_dpicl.decoding.backends.transformers_model import TransformersLogits
from langchain_dpicl.decoding.exemplars import IntArray
from langchain_dpicl.decoding.model import Demonstration, Logits
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.losses import FloatArray

_BATCH = 17


@dataclass(frozen=True)
class Known:
    """A record whose membership is in question: its query, its output as tokens, and itself as a demonstration."""

    asked: str
    output: Sequence[int]
    shown: str


@dataclass(frozen=True)
class Readings:
    """Logits at the P places of all outputs, one output after the other; k possible tokens at each place.

    - ``record`` (P,): whose output the place belongs to.
    - ``target`` (P,): which of the k tokens the output has there; -1 if it is none of them.
    - ``zero_shot`` (P, k): without a demonstration; ``one_shot`` (D, P, k): after each of D demonstrations.
    - ``own`` (P, k): after the demonstration of the record itself.
    - ``zero_shot_log_prob`` (P,), ``one_shot_log_prob`` (D, P): of the output's token over the whole vocabulary.
    """

    record: IntArray
    target: IntArray
    zero_shot: FloatArray
    one_shot: FloatArray
    own: FloatArray
    zero_shot_log_prob: FloatArray
    one_shot_log_prob: FloatArray

    @property
    def records(self) -> int:
        """The number of records."""
        return int(self.record[-1]) + 1


class TeacherForcing:
    """Reads the outputs of known records after a demonstration.

    Raises `InvalidParameter` for a model whose rows cannot be read in batches as they are read alone.
    """

    def __init__(self, model: TransformersLogits, known: Sequence[Known]) -> None:
        self._network = model._loaded
        self._asked = [self._network.tokens(each.asked) for each in known]
        self._outputs = [list(each.output) for each in known]
        first = known[0]
        session = model.session(first.asked, [Demonstration("public", first.shown)], steps=len(first.output))
        alone = session.logits([0], first.output[:-1])
        session.close()
        for row, shown in enumerate(("", first.shown)):
            batch = next(self.logits(shown, range(min(2, len(known)))))[1]
            if not np.abs(batch[-1] - alone[row]).max() <= 1.0:  # a row that failed is NaN
                raise InvalidParameter("model", model.name, "one whose prompts can be read in a padded batch")
        model.forget(["public"])

    def logits(self, shown: str, which: Sequence[int]) -> Iterator[tuple[int, Logits]]:
        """(record, its (tokens, vocabulary) logits) for each of these records; "" is no demonstration."""
        import torch

        network = self._network
        before = [*network.first, *network.tokens(shown)]
        for start in range(0, len(which), _BATCH):
            batch = which[start : start + _BATCH]
            texts = [torch.tensor([*self._asked[i], *self._outputs[i][:-1]], dtype=torch.long) for i in batch]
            # Padding stands on the right, where no token of a causal model sees it.
            ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(network.model.device)
            first = min(len(self._asked[i]) for i in batch)
            with network.working():
                cache: Any = network.read(before, None)[1] if before else None
                if cache is not None:
                    cache.batch_repeat_interleave(len(batch))
                kept = ids.shape[1] - first + 1
                out = network.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=kept)
                found: Logits = out.logits.to("cpu", torch.float32).numpy()
            for i, row in zip(batch, found, strict=True):
                place = len(self._asked[i]) - first
                yield i, row[place : place + len(self._outputs[i])]


def read(model: TransformersLogits, known: Sequence[Known], shown: Sequence[str], settings: Settings) -> Readings:
    """Read every output after every demonstration, and after its own."""
    reader, everyone = TeacherForcing(model, known), range(len(known))
    zero_shot = [row for _, row in reader.logits("", everyone)]
    outputs = [np.array(each.output) for each in known]
    chosen = []
    for each, rows in zip(known, zero_shot, strict=True):
        offered = [possible(model, settings, each.output[:place], row) for place, row in enumerate(rows)]
        if any(len(ids) != settings.top_k for ids in offered):
            raise InvalidParameter("top_k", settings.top_k, "at most the number of tokens whose logit is finite")
        chosen.append(np.stack(offered))

    def picked(rows: Iterable[tuple[int, Logits]]) -> tuple[FloatArray, FloatArray]:
        """The logits of the possible tokens, and the log-probability of the output's."""
        some, sure = [], []
        for i, row in rows:
            exact = row.astype(np.float64)
            some.append(np.take_along_axis(exact, chosen[i], axis=1))
            sure.append(log_softmax(exact, axis=1)[np.arange(len(row)), outputs[i]])
        return np.concatenate(some), np.concatenate(sure)

    logits, log_prob = picked(enumerate(zero_shot))
    bar = tqdm(shown, desc="membership", unit="demonstration", disable=None, file=sys.stderr)
    one_shot, one_shot_log_prob = zip(*(picked(reader.logits(text, everyone)) for text in bar), strict=True)
    is_output = np.concatenate([ids == tokens[:, None] for ids, tokens in zip(chosen, outputs, strict=True)])
    return Readings(
        record=np.repeat(everyone, [len(tokens) for tokens in outputs]),
        target=np.where(is_output.any(axis=1), is_output.argmax(axis=1), -1),
        zero_shot=logits,
        one_shot=np.stack(one_shot),
        own=np.concatenate([picked(reader.logits(each.shown, [i]))[0] for i, each in enumerate(known)]),
        zero_shot_log_prob=log_prob,
        one_shot_log_prob=np.stack(one_shot_log_prob),
    )
