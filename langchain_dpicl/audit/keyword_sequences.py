"""The worst case of the joint exponential mechanism: losses that move by 2 in opposite directions.

Words: one anchor a, many x_1, ..., x_m, a few y_1, ..., y_r; sequences of k = 2. Without the canary its member names
the x; with it, a and the y. Let a and the x have the count h then, and the y h - 2. With the canary a has h + 1, the x
and the y h - 1 each. So the loss of a sequence that begins with an x rises from 0 to 2 (c_(1) rises, its own count
falls), and there are m^2 of them or so, which makes the normaliser fall by nearly e^(-eps0/2); the loss of (a, y)
falls from 2 to 0 (c_(2) falls, its own count rises). For many x the likelihood ratio of {(a, y)} tends to e^eps0, all
that the bounded range allows.

With all other members giving one answer the anchor can not rise, only stay: ratios up to e^(3 eps0 / 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.aggregators import Keywords
from langchain_dpicl.aggregators.joint_em import loss_levels, sequence_counts
from langchain_dpicl.audit.case import MemberCase, Setting

_MANY = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96)
_FEW = (1, 2, 4, 8)


@dataclass(frozen=True)
class Words:
    """The domain: one anchor, ``many`` x and ``few`` y."""

    many: int
    few: int

    @property
    def x(self) -> list[str]:
        """Those that the canary's member names without it."""
        return [f"x{i}" for i in range(self.many)]

    @property
    def y(self) -> list[str]:
        """Those that it names with the canary, beside the anchor."""
        return [f"y{i}" for i in range(self.few)]

    @property
    def domain(self) -> list[str]:
        """All words, in the order of the counts below."""
        return ["anchor", *self.x, *self.y]

    def answers(self, unanimous: bool, members: int | None) -> tuple[str, str, tuple[str, ...]]:
        """The member's answer without the canary and with it, and those of the others."""
        canary = " ".join(["anchor", *self.y])
        if unanimous:
            base = " ".join(["anchor", *self.x])
            return base, canary, (base,) * ((members or 2) - 1)
        if members == 2:  # too few to lift the anchor above the rest
            base = " ".join(["anchor", *self.x])
            return base, canary, (base,)
        everything = " ".join(self.domain)
        others = (" ".join(["anchor", *self.x]), "anchor", *(everything,) * ((members or 3) - 3))
        return " ".join(self.x), canary, others


def joint_em_case(setting: Setting) -> MemberCase:
    """The most telling numbers of words."""
    designs = [Words(many, few) for many in _MANY for few in _FEW if few <= many]
    pairs = [_probabilities(words, setting) for words in designs]
    present, without = np.array(pairs).T
    words = designs[int(np.argmax(setting.expected(present, without)))]
    base, canary, others = words.answers(setting.unanimous, setting.members)
    named = f"{1 + words.few} of {len(words.domain)} words"
    spoken = f"the canary's member names {named}, and {len(base.split())} without the canary"
    return MemberCase(
        spoken,
        Keywords.joint_em(words.domain, 2),
        setting.parameter,
        base,
        canary,
        others,
        _statistic(words, setting),
    )


def _counts(words: Words, answers: Sequence[str]) -> NDArray[np.int64]:
    said = [set(answer.split()) for answer in answers]
    return np.array([sum(word in each for each in said) for word in words.domain], np.int64)


def _both_counts(words: Words, setting: Setting) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """With the canary and without it."""
    base, canary, others = words.answers(setting.unanimous, setting.members)
    return _counts(words, [canary, *others]), _counts(words, [base, *others])


def _log_normaliser(counts: NDArray[np.int64], eps0: float) -> float:
    levels = loss_levels(counts, 2)
    sizes = sequence_counts(levels.reach)
    return math.log(
        sum(size * math.exp(-eps0 * int(loss) / 4.0) for size, loss in zip(sizes, levels.losses, strict=True))
    )


def _loss(counts: NDArray[np.int64], sequence: tuple[int, ...]) -> int:
    ranked = np.sort(counts)[::-1]
    return max(int(ranked[i] - counts[j]) for i, j in enumerate(sequence))


def _probabilities(words: Words, setting: Setting) -> tuple[float, float]:
    """P((a, y) for some y), with the canary and without it."""
    eps0, sequence = setting.parameter, (0, 1 + words.many)
    logs = [-eps0 * _loss(c, sequence) / 4.0 - _log_normaliser(c, eps0) for c in _both_counts(words, setting)]
    return words.few * math.exp(logs[0]), words.few * math.exp(logs[1])


def _statistic(words: Words, setting: Setting) -> Callable[[Any], float]:
    eps0, place = setting.parameter, {word: i for i, word in enumerate(words.domain)}
    present, without = _both_counts(words, setting)
    ranked = [np.sort(counts)[::-1].tolist() for counts in (present, without)]
    counted = [counts.tolist() for counts in (present, without)]
    scale = _log_normaliser(without, eps0) - _log_normaliser(present, eps0)

    def statistic(release: Sequence[str]) -> float:
        sequence = [place[word] for word in release]
        losses = [max(top[i] - c[j] for i, j in enumerate(sequence)) for top, c in zip(ranked, counted, strict=True)]
        return float(scale + eps0 * (losses[1] - losses[0]) / 4.0)

    return statistic
