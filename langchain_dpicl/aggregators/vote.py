"""The noisy vote: every label's count plus exact discrete Gaussian noise."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from langchain_dpicl.aggregators.base import Aggregator, text_of
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.noise import Randomness, abstention_threshold, tells_abstention

_LONG = 1 << 14  # characters: a millisecond or so
_EDGES = " \t\r\n.,;:!?\"'`*()[]{}<>"


def normal(text: str) -> str:
    """As labels are compared: no case, no punctuation or space around, single spaces within."""
    return " ".join(text.strip(_EDGES).casefold().split())


def check_labels(name: str, value: object) -> tuple[str, ...]:
    """At least two strings that differ in more than case, spaces and the punctuation around them."""
    bound = "a list of at least two strings, each with a letter or digit"
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) < 2:
        raise InvalidParameter(name, value, bound)
    if not all(isinstance(label, str) and normal(label) for label in value):
        raise InvalidParameter(name, value, bound)
    if len({normal(label) for label in value}) != len(value):
        raise InvalidParameter(name, value, "labels that differ in more than case, spaces and punctuation around them")
    return tuple(value)


class NoisyVote(Aggregator[str | dict[str, int]]):
    """Report the label with the largest noisy count, or all noisy counts.

    Mechanism. One count per label of the public list, and one for abstentions; independent discrete Gaussian noise of
    scale sigma is added to EVERY count, also to those that are zero. The release is a function of these noisy counts:
    their argmax (ties broken at random), or the labels' counts themselves with ``scores=True``; both cost the same.

    Neighbours and sensitivity. One member's output replaced by any other or by an abstention: one count falls by 1 and
    another rises by 1 (or nothing moves), so the L2 sensitivity is sqrt(2) and the loss is exactly that of the 2-fold
    composition of a sensitivity-1 discrete Gaussian. Counting abstentions as one more coordinate does not change this.

    The answer "the members abstain" is released (as None) if the noisy count of abstentions beats every label and
    reaches a threshold that depends on N and sigma alone: a function of the noisy counts, so at no further cost. If
    fewer than half of the members abstain, noise brings it about with a probability of at most 1e-6 a release
    (`abstention_threshold` has the proof). So few members under much noise do not tell (`tells`; `PrivacyPlan.explain`
    says so): then the ensemble finds a model that is down by public questions instead.

    An output is read as a label if it is one, up to case, surrounding spaces and punctuation; else as the longest label
    that it begins with, as a whole word; else as the only label that occurs in it as a whole word. Everything else
    abstains.

    Source: report noisy max with Gaussian noise, Wu et al. 2024, section 4.1; discrete Gaussian, Canonne, Kamath and
    Steinke 2020.
    """

    mechanism = "vote"

    def __init__(self, labels: Sequence[str], *, scores: bool = False) -> None:
        self.labels = check_labels("labels", labels)
        self.scores = bool(scores)
        self.mechanism = "scores" if self.scores else "vote"
        self._exact = {normal(label): i for i, label in enumerate(self.labels)}
        self._words = [re.compile(rf"(?<!\w){re.escape(normal(label))}(?!\w)") for label in self.labels]

    def parse(self, output: object) -> int | None:
        """The index of the label that one output names, or None. Raises for no output."""
        text = text_of(output)
        if text is None:
            return None
        text = normal(text)
        if text in self._exact:
            return self._exact[text]
        if starts := [i for i, word in enumerate(self._words) if word.match(text)]:
            return max(starts, key=lambda i: len(self.labels[i]))
        found = [i for i, word in enumerate(self._words) if word.search(text)]
        return found[0] if len(found) == 1 else None

    def encode(self, output: object) -> int:
        """The label's index. Raises `ValueError` for an output that names none."""
        if (index := self.parse(output)) is None:
            raise ValueError("no label")
        return index

    async def aencode(self, output: object) -> int:
        """`encode`; a long text is read aside, so that it delays no other member."""
        text = text_of(output)
        return await asyncio.to_thread(self.encode, text) if text and len(text) > _LONG else self.encode(text)

    def counts(self, outputs: Sequence[object]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """PRIVATE: of encoded outputs, votes per label, and abstentions last."""
        known = range(len(self.labels))
        indices = [vote if type(vote) is int and vote in known else len(known) for vote in outputs]
        return np.bincount(indices, minlength=len(known) + 1).astype(np.int64)

    def aggregate(
        self, outputs: Sequence[object], parameter: float, randomness: Randomness
    ) -> str | dict[str, int] | None:
        counts = self.counts(outputs)
        noisy = counts + randomness.discrete_gaussian(parameter, len(counts))
        # From here on everything is a function of the noisy counts.
        best = int(noisy[:-1].max())
        if noisy[-1] > best and noisy[-1] >= abstention_threshold(len(outputs), parameter):
            return None
        if self.scores:
            return {label: int(count) for label, count in zip(self.labels, noisy, strict=False)}
        winners = np.flatnonzero(noisy[:-1] == best)
        return self.labels[int(winners[int(randomness.integers(len(winners), 1)[0])])]

    def tells(self, members: int, parameter: float) -> bool:
        return tells_abstention(members, parameter, len(self.labels))

    def zero_shot(self, output: object, values: Mapping[str, Any]) -> str | dict[str, int] | None:
        index = self.parse(output)
        if index is None:
            return None
        return {label: int(label == self.labels[index]) for label in self.labels} if self.scores else self.labels[index]

    @property
    def release_type(self) -> Any:
        return dict[str, int] if self.scores else str

    def __repr__(self) -> str:
        return f"NoisyVote({list(self.labels)!r}, scores={self.scores})"
