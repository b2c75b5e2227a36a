"""The labels with most votes, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from langchain_dpicl.aggregators.base import Aggregator, MembersTask, WorstCase
from langchain_dpicl.aggregators.votes import NoisyVote, reader_of
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.mechanism import Options
from langchain_dpicl.privacy.mechanisms import PARTS
from langchain_dpicl.privacy.noise import Randomness, choose_exponential
from langchain_dpicl.privacy.votes import EXPONENTIAL, TOLD, VoteNoise


class NoisyTopK(Aggregator[list[str]]):
    """Report the k labels with most votes, in order, drawn one after the other among the labels that are left.

    Mechanism. Each draw is an exponential vote ("structured", with k equal shares of eps0): it takes a label that is
    left with probability proportional to exp(r c) for its count c, exactly. No label comes twice, and the last of all
    labels takes no draw: if k is the number of labels, k - 1 draws have the shares. The k largest of r c + Gumbel
    noise, in order, have the same law (Durfee and Rogers 2019).

    Neighbours, and the range of a draw. One member's output replaced by any other, by an abstention or by nothing: one
    count falls by 1 and another rises by 1, or one moves, or none. Whatever was drawn before, the next draw is an
    exponential mechanism on the labels that are left. The log-ratios of its probabilities on both sides differ by at
    most 2 r between outcomes, so with k draws r = eps0 / (2 k) gives each a range of eps0 / k. With a call for every
    owner (``own_calls``) one output is added or removed and no other changes: ONE count moves by 1, and r = eps0 / k.

    Profile. A draw depends on those before it, so the draws are not independent given the outputs: they are composed
    adaptively, which can cost more (Dong, Durfee and Rogers 2020). `BoundedRanges` is the optimum of adaptive
    composition. Let V_j(log a) be its delta for j draws, and let l be the ratio of the first label's two probabilities,
    P over Q. Then delta(log a) of k draws is the mean under Q of l delta'(log (a / l)), where delta' is that of the
    other draws given the first label. By induction delta' is at most V_(k-1), whatever that label is. The mean of
    l V_(k-1)(log (a / l)) is at most V_k, its maximum over all first draws of this range (`privacy.adaptive.together`;
    its steps go from the last draw to the first, which changes nothing as the ranges are equal). The draws are composed
    on one sample, and then amplified ONCE by the owners' coin.

    "The members abstain" (None) is one more outcome of the first draw, with a public penalty on the count of
    abstentions as in `NoisyVote` ("vote-em"); no draw follows it, which is a draw of range 0. If fewer than half
    abstain, it comes with a probability of at most 1e-6 a release. At a k-th of the range few members do not tell
    (`tells`): then the ensemble finds a model that is down by public questions instead.

    Parameters
    ----------
    labels
        The public list.
    k
        How many to release. At most all labels, and at most 32 draws: they share eps0, so the more there are
        the noisier is each.

    Outputs are read as by `NoisyVote`: each names one label, or abstains. A public answer names one label alone; as a
    release it is this label, and then the others in the order of the public list.

    Source: Durfee and Rogers 2019 (peeling, bounded range, Gumbel noise); Dong, Durfee and Rogers 2020, section 6
    (adaptive composition of bounded ranges).
    """

    kind = "top-k"
    task: ClassVar[MembersTask] = "choose"
    mechanism = "structured"
    takes_own_calls = True

    def __init__(self, labels: Sequence[str], k: int) -> None:
        self._vote = NoisyVote[str](labels)
        self.labels = self._vote.labels
        number = len(self.labels)
        self.k = checks.whole("k", k, at_most=number if number <= PARTS + 1 else PARTS)
        self.draws = min(self.k, number - 1)

    @classmethod
    def worst_cases(cls) -> Sequence[WorstCase]:
        """Two of three labels: the others agree, or the canary's label and another are close."""
        labels = ("Alder", "Birch", "Cedar")
        votes = ((3, 4, 3), (1, 4, 3), (2, 0, 0), (1, 0, 0))
        return [
            WorstCase(
                f"of the others {', '.join(map(str, counts))} vote for the base, the canary's label and a third one",
                cls(labels, 2),
                labels[0],
                labels[1],
                tuple(label for label, count in zip(labels, counts, strict=True) for _ in range(count)),
            )
            for counts in votes
        ]

    @property
    def options(self) -> Options:
        return {"shares": (1.0 / self.draws,) * self.draws}

    def _noise(self, parameter: float, own_calls: bool) -> VoteNoise:
        """The noise of one draw, which has its share of eps0."""
        return VoteNoise(EXPONENTIAL, parameter * (1.0 / self.draws), own_calls)

    @property
    def samples(self) -> Sequence[str]:
        return self.labels

    def encode(self, output: object) -> int:
        """The label's index. Raises `ValueError` for an output that names none."""
        return self._vote.encode(output)

    async def aencode(self, output: object) -> int:
        return await self._vote.aencode(output)

    def shown(self, encoded: object) -> object:
        return self._vote.shown(encoded)

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> list[str] | None:
        crowd = self._crowd(outputs)
        *counts, abstained = self._vote.counts(outputs).tolist()
        noise = self._noise(parameter, crowd.own_calls)
        told = noise.abstention_count(crowd.members, len(counts)) - abstained
        left = list(range(len(counts)))
        chosen: list[int] = []
        while len(chosen) < self.draws:
            losses = [-counts[i] for i in left]
            if not chosen:
                losses.append(told)
            place = choose_exponential([1] * len(losses), losses, noise.rate, randomness)
            if place == len(left):
                return None
            chosen.append(left.pop(place))
        # A label that is left over belongs to the release if all of them do.
        return [self.labels[i] for i in (*chosen, *left)[: self.k]]

    def tells(self, members: int, parameter: float) -> bool:
        noise = self._noise(parameter, self._own_calls)
        return noise.told(members, len(self.labels), self._counted) >= TOLD

    @property
    def outcomes(self) -> int:
        return len(self.labels)

    def majority(self, outputs: Sequence[object]) -> list[str] | None:
        """PRIVATE: the k labels of most outputs, the earlier of equals first; None if no output names one."""
        counts = self._vote.counts(outputs)[:-1].tolist()
        ranked = sorted(range(len(counts)), key=lambda i: -counts[i])
        return [self.labels[i] for i in ranked[: self.k]] if any(counts) else None

    def zero_shot(self, output: object, values: Mapping[str, Any]) -> list[str] | None:
        index = self._vote.parse(output)
        if index is None:
            return None
        first = self.labels[index]
        return [first, *(label for label in self.labels if label != first)][: self.k]

    @property
    def outputs(self) -> Mapping[str, Any]:
        return {"label_of": reader_of(self.labels)}

    def hit(self, release: list[str], right: object) -> float:
        """1 if the right label is among the k."""
        index = self._vote.parse(right)
        return float(index is not None and release is not None and self.labels[index] in release)

    @property
    def release_type(self) -> Any:
        return list[str]

    def __repr__(self) -> str:
        return f"NoisyTopK({list(self.labels)!r}, k={self.k})"
