"""Votes: the noisy vote of members, the vote of owners' own labels, and what a public answer adds to them."""

from __future__ import annotations

import asyncio
import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from operator import neg
from typing import Any, ClassVar, Literal, Self, overload

import numpy as np
from langchain_core.runnables import Runnable, RunnableLambda
from numpy.typing import NDArray
from typing_extensions import TypedDict

from langchain_dpicl.aggregators.base import Aggregator, MembersTask, T, name_of
from langchain_dpicl.aggregators.reading import answer_of, normal, text_of
from langchain_dpicl.errors import InvalidParameter, ModelUnavailable
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.choice import Crowd
from langchain_dpicl.privacy.mechanism import Options
from langchain_dpicl.privacy.noise import Randomness, choose_exponential, random_below
from langchain_dpicl.privacy.votes import BIT, EXPONENTIAL, GAUSSIAN, LEAD, TOLD, WINNER, VoteNoise, vote_mechanisms

_LONG = 1 << 14  # characters: a millisecond or so

_LEAST = 0.01
"""What part of a prior is spread evenly: no label is impossible."""

_NAMED = 0.5
"""What part of a prior stands on a label that a public answer names without a probability; the rest is even."""

_UNITS = 1 << 62
"""The largest public factor of an exponential vote."""


class VoteDetails(TypedDict):
    """A vote with ``details=True``."""

    label: str
    confidence: float | None
    """The label's probability after prior and noisy counts; None for a public answer, which has no counts."""
    counts: dict[str, int]


Prior = Runnable[Any, Any] | Callable[..., Any] | Mapping[str, float] | Literal["zero_shot"]


def reader_of(labels: Sequence[str] | None) -> Callable[[str], str | None] | None:
    """A function from a text to the label that it stands for, or None; None without labels."""
    if labels is None:
        return None
    known = {normal(label): label for label in check_labels("labels", labels)}
    return lambda text: known.get(normal(text))


def check_labels(name: str, value: object) -> tuple[str, ...]:
    """At least two strings that differ in more than case, spaces, invisible characters and punctuation around them."""
    bound = "a list of at least two strings, each with a letter or digit"
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) < 2:
        raise InvalidParameter(name, value, bound)
    if not all(isinstance(label, str) and normal(label) for label in value):
        raise InvalidParameter(name, value, bound)
    if len({normal(label) for label in value}) != len(value):
        differ = "labels that differ in more than case, spaces, invisible characters and punctuation around them"
        raise InvalidParameter(name, value, differ)
    return tuple(value)


class NoisyVote(Aggregator[T]):
    """Report the label with the largest noisy count, or with a probability that grows with its count; or all counts.

    Mechanisms. There is one count per label of the public list, and one for abstentions. The plan picks one, by
    how often noise overturns a winner who is ahead by ``lead`` of the expected votes (`privacy.choice`):

    - Gaussian ("vote-winner"): independent discrete Gaussian noise of scale sigma is added to EVERY count, also to
      those that are zero. The release is their argmax (ties broken at random) and nothing else: with own calls one bit,
      which costs less than all noisy counts (`privacy.bits`).
    - All noisy counts ("scores"), with ``scores`` or ``details``: the release is any function of them. A "vote" is
      their argmax at this price, in plans of before; abstentions are compared without the prior there.
    - Exponential ("vote-em"): a label with probability proportional to exp(r c) for its count c, drawn exactly.
    - One bit ("vote-bit"), of two labels: which of them leads, with noise on their difference that is never whole. An
      owner moves the difference by 2, or by 1 with own calls. See `privacy.bits`.

    Neighbours, and what moves. One member's output replaced by any other, by an abstention or by nothing: one count
    falls by 1 and another rises by 1, or one moves, or none. So the L2 sensitivity is sqrt(2), and the loss at most
    that of the 2-fold composition of a sensitivity-1 discrete Gaussian; with r = eps0 / 2 log-probabilities differ by
    at most 2 r between outcomes, which is eps0-bounded range. With a call for every owner (``own_calls``) one output is
    added or removed and no other changes: ONE count moves by 1, the Gaussian has sensitivity 1, and r = eps0. The count
    of abstentions is one more count, and public factors on the outcomes change no ratio of probabilities.

    "The members abstain" is a release, too (None), but not of the bit of two labels: if the noisy count of abstentions
    beats every label's with its prior (less the largest prior), and reaches a threshold of public numbers, or as one
    more outcome of the exponential vote with a public penalty. If fewer than half abstain it comes about with a
    probability of at most 1e-6 a release (`VoteNoise.abstention_count` has the proofs). So one bit, and few members
    under much noise, do not tell (`tells`; `PrivacyPlan.explain` says so): then the ensemble finds a model that is down
    by public questions instead.

    Parameters
    ----------
    labels
        The public list.
    prior
        A public opinion about the answer, which costs nothing: ``"zero_shot"`` (what the member says without examples),
        a chain or function that answers the query with a label or with a mapping of labels to probabilities, or a fixed
        such mapping. A Gaussian vote adds the log-probabilities to the likelihood of the noisy counts
        (`VoteNoise.nats`): post-processing. An exponential vote gives the labels public factors, by the same rule. Weak
        evidence leaves the public answer, strong evidence overrules it. A named label alone counts as half of all
        probability. The chain is asked before the charge, and an error of it costs nothing.
    scores
        Release the noisy counts of all labels instead of the winner. Gaussian.
    details
        Release ``{"label": ..., "confidence": ..., "counts": ...}``: the winner, its probability after prior and noisy
        counts, and these counts. Gaussian.
    lead
        By what share of the votes the winner is expected to lead, 0.3 unless given: a public estimate. It serves the
        choice of the mechanism, and says how much a vote weighs against the prior. It costs no privacy if it is wrong.
        Refused if there is neither a choice nor a prior.
    mechanism
        "vote-winner", "vote-em", "vote", or of two labels "vote-bit", to leave the plan no choice.

    An output is read as a label if it is one, up to case, accents' Unicode form, invisible characters, surrounding
    spaces and punctuation; else as the longest label that it begins with, as a whole word; else as the only label that
    occurs in it as a whole word. Everything else abstains. A model's thinking (``<think>`` and the like) is left out;
    an output whose thinking has no end abstains.

    Source: report noisy max (RNM) with Gaussian noise, Panda et al. 2023 and Wu et al. 2024, section 3.1; discrete
    Gaussian, Canonne, Kamath and Steinke 2020; bounded range, Durfee and Rogers 2019.
    """

    kind = "vote"
    task: ClassVar[MembersTask] = "choose"
    mechanism = GAUSSIAN
    takes_own_calls = True

    @overload
    def __init__(
        self: NoisyVote[str],
        labels: Sequence[str],
        *,
        prior: Prior | None = ...,
        scores: Literal[False] = ...,
        details: Literal[False] = ...,
        lead: float | None = ...,
        mechanism: str | None = ...,
    ) -> None: ...

    @overload
    def __init__(
        self: NoisyVote[dict[str, int]],
        labels: Sequence[str],
        *,
        scores: Literal[True],
        mechanism: str | None = ...,
    ) -> None: ...

    @overload
    def __init__(
        self: NoisyVote[VoteDetails],
        labels: Sequence[str],
        *,
        prior: Prior | None = ...,
        details: Literal[True],
        lead: float | None = ...,
        mechanism: str | None = ...,
    ) -> None: ...

    @overload
    def __init__(
        self: NoisyVote[Any],
        labels: Sequence[str],
        *,
        prior: Prior | None = ...,
        scores: bool = ...,
        details: bool = ...,
        lead: float | None = ...,
        mechanism: str | None = ...,
    ) -> None: ...

    def __init__(
        self,
        labels: Sequence[str],
        *,
        prior: Prior | None = None,
        scores: bool = False,
        details: bool = False,
        lead: float | None = None,
        mechanism: str | None = None,
    ) -> None:
        self.labels = check_labels("labels", labels)
        self.scores = bool(scores)
        self.details = bool(details)
        if self.scores and self.details:
            raise InvalidParameter("details", details, "False with scores=True: details hold the counts")
        if self.scores and prior is not None:
            raise InvalidParameter(
                "prior", prior, "None with scores=True, which are the counts alone: use details=True"
            )
        known = ("scores",) if self.scores or self.details else (GAUSSIAN, *vote_mechanisms(len(self.labels)))
        if mechanism is not None and mechanism not in known:
            bound = " or ".join(map(repr, known)) + (" without scores and details" if len(known) > 1 else "")
            raise InvalidParameter("mechanism", mechanism, bound)
        self._choices = known if mechanism is None else (mechanism,)
        self.mechanism = self._choices[0]
        if lead is not None and len(self._choices) == 1 and prior is None and not self.details:
            raise InvalidParameter("lead", lead, "left out if there is no mechanism to choose and no prior to weigh")
        self.lead = LEAD if lead is None else checks.real("lead", lead, above=0.0, below=1.0)
        self._exact = {normal(label): i for i, label in enumerate(self.labels)}
        self._words = [re.compile(rf"(?<!\w){re.escape(normal(label))}(?!\w)") for label in self.labels]
        self._chain: Runnable[Any, Any] | None = None
        self._logs = np.zeros(len(self.labels))  # the prior's, less their mean
        self.prior: object = prior
        if isinstance(prior, Mapping):
            self._logs = self._weigh("prior", prior)
            self.prior = dict(prior)
        elif isinstance(prior, Runnable):
            self._chain = prior
        elif callable(prior):
            self._chain = RunnableLambda(prior)
        elif prior is not None and not (isinstance(prior, str) and prior == "zero_shot" and self.task != "none"):
            member = "" if self.task == "none" else ', "zero_shot"'
            raise InvalidParameter("prior", prior, f"None{member}, a chain, or a mapping of labels to probabilities")

    @property
    def choices(self) -> tuple[str, ...]:
        return self._choices

    def _weigh(self, name: str, prior: Mapping[Any, Any]) -> NDArray[np.float64]:
        """The logarithms of a public mapping's probabilities."""
        weights = np.zeros(len(self.labels))
        for label, weight in prior.items():
            index = self._exact.get(normal(label)) if isinstance(label, str) else None
            if index is None:
                raise InvalidParameter(name, label, f"labels of this vote: {', '.join(self.labels)}")
            weights[index] += checks.real(f"{name}[{label!r}]", weight, at_least=0.0)
        if not (total := weights.sum()) > 0.0 or not math.isfinite(total):
            raise InvalidParameter(name, dict(prior), "at least one probability above 0")
        found: NDArray[np.float64] = np.log((1.0 - _LEAST) * weights / total + _LEAST / len(weights))
        return found

    def public_calls(self) -> tuple[Runnable[Any, Any] | None, int] | None:
        return (self._chain, 1) if self._chain is not None or self.prior == "zero_shot" else None

    def prepare(self, values: Mapping[str, Any], options: Options, answers: Sequence[object] = ()) -> Self:
        """With the prior's answer to the query. Raises `ModelUnavailable` if it fails."""
        if self._chain is None and self.prior != "zero_shot":
            return self
        (answer,) = answers
        bound = copy.copy(self)
        if isinstance(answer, Mapping):
            bound._logs = self._weigh("prior", answer)
        elif text_of(answer) is None:
            raise ModelUnavailable(
                "the prior's public call fails or gives neither text nor mapping; nothing was charged"
            )
        elif (index := self.parse(answer)) is not None:
            even = dict.fromkeys(self.labels, (1.0 - _NAMED) / len(self.labels))
            bound._logs = self._weigh("prior", {**even, self.labels[index]: even[self.labels[index]] + _NAMED})
        return bound

    def parse(self, output: object) -> int | None:
        """The index of the label that one output names, or None. Raises for no output."""
        text = self._text(output)
        if text is None:
            return None
        text = normal(text)
        if text in self._exact:
            return self._exact[text]
        if starts := [i for i, word in enumerate(self._words) if word.match(text)]:
            return max(starts, key=lambda i: len(self.labels[i]))
        found = [i for i, word in enumerate(self._words) if word.search(text)]
        return found[0] if len(found) == 1 else None

    _text = staticmethod(answer_of)
    """How an output becomes a text."""

    @property
    def samples(self) -> Sequence[str]:
        return self.labels

    def encode(self, output: object) -> int:
        """The label's index. Raises `ValueError` for an output that names none."""
        if (index := self.parse(output)) is None:
            raise ValueError(f"it names none of the labels ({', '.join(self.labels)}), or several")
        return index

    def shown(self, encoded: object) -> object:
        return self.labels[encoded] if isinstance(encoded, int) else encoded

    async def aencode(self, output: object) -> int:
        """`encode`; a long text is read aside, so that it delays no other member."""
        text = text_of(output)
        return await asyncio.to_thread(self.encode, output) if text and len(text) > _LONG else self.encode(output)

    def counts(self, outputs: Sequence[object]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """PRIVATE: of encoded outputs, votes per label, and abstentions last."""
        abstains = len(self.labels)
        found = np.zeros(abstains + 1, np.int64)
        for vote in outputs:
            found[vote if type(vote) is int and 0 <= vote < abstains else abstains] += 1
        return found

    def majority(self, outputs: Sequence[object]) -> Any:
        """PRIVATE: the label of most outputs; None if none of them names one."""
        votes = self.counts(outputs)[:-1]
        return self.labels[int(votes.argmax())] if votes.max() > 0 else None

    def aggregate(self, outputs: Sequence[object], parameter: float, randomness: Randomness) -> Any:
        crowd = self.crowd or Crowd(len(outputs), len(outputs))
        return self.draw(self.counts(outputs), crowd, parameter, randomness)

    def draw(self, counts: NDArray[np.int64], crowd: Crowd, parameter: float, randomness: Randomness) -> Any:
        """The mechanism: from the votes per label, abstentions last, to a release."""
        noise = VoteNoise(self.mechanism, parameter, crowd.own_calls)
        nats = noise.nats(crowd.expected, len(self.labels), self.lead)
        if self.mechanism == BIT:
            lead = int(counts[0] - counts[1]) + round(float(self._logs[0] - self._logs[1]) / nats)
            numerator, denominator = noise.overturned(abs(lead)).as_integer_ratio()
            is_overturned = random_below(denominator, randomness) < numerator
            return self.labels[int((lead < 0) != is_overturned)]
        reached = noise.abstention_count(crowd.members, len(self.labels))
        if self.mechanism == EXPONENTIAL:
            factors = self._factors(noise.rate / nats)
            *votes, abstained = counts.tolist()
            losses = [*map(neg, votes), reached - abstained]
            index = choose_exponential(factors, losses, noise.rate, randomness)
            return None if index == len(self.labels) else self.labels[index]
        noisy = counts + randomness.discrete_gaussian(parameter, len(counts))
        # From here on everything is a function of the noisy counts.
        rivals = noisy[:-1]
        if self.mechanism == WINNER:  # abstentions compete with what decides: one threshold for each count
            rivals = rivals + (self._logs - self._logs.max()) / nats
        if noisy[-1] >= reached and noisy[-1] > rivals.max():
            return None
        released = {label: int(count) for label, count in zip(self.labels, noisy, strict=False)}
        if self.scores and self.mechanism != WINNER:  # whose price is that of the winner alone
            return released
        evidence = rivals if self.mechanism == WINNER else noisy[:-1] + self._logs / nats
        winners = np.flatnonzero(evidence == evidence.max())
        winner = int(winners[int(randomness.integers(len(winners), 1)[0])])
        if not self.details or self.mechanism == WINNER:
            return self.labels[winner]
        shares = np.exp((evidence - evidence.max()) * nats)
        return {"label": self.labels[winner], "confidence": float(shares[winner] / shares.sum()), "counts": released}

    def _factors(self, weight: float) -> list[int]:
        """Public factors of an exponential vote: the prior to this power, and its mean for abstaining."""
        logs = weight * (self._logs - self._logs.max())
        factors: list[int] = []
        for log in logs.tolist():
            factors.append(max(1, round(_UNITS * math.exp(max(log, -700.0)))))
        return [*factors, max(1, sum(factors) // len(factors))]

    def tells(self, members: int, parameter: float) -> bool:
        noise = VoteNoise(self.mechanism, parameter, self._own_calls)
        return noise.told(members, len(self.labels), self._counted) >= TOLD  # empty buckets and padding count nothing

    @property
    def outcomes(self) -> int:
        return len(self.labels)

    def zero_shot(self, output: object, values: Mapping[str, Any]) -> Any:
        index = self.parse(output)
        if index is None:
            return None
        counts = {label: int(label == self.labels[index]) for label in self.labels}
        if self.details:
            return {"label": self.labels[index], "confidence": None, "counts": counts}
        return counts if self.scores else self.labels[index]

    @property
    def outputs(self) -> Mapping[str, Any]:
        return {"label_of": reader_of(self.labels)}

    def hit(self, release: Any, right: object) -> float:
        """Of a release with counts, its winner counts."""
        if isinstance(release, Mapping):
            release = release["label"] if self.details else max(release, key=release.__getitem__)
        index = self.parse(right)
        return float(index is not None and release == self.labels[index])

    @property
    def release_type(self) -> Any:
        return VoteDetails if self.details else dict[str, int] if self.scores else str

    @property
    def variant(self) -> str:
        if self._chain is None:
            return repr(self)
        return f"{self!r} {self._chain!r}{'' if self._chain is self.prior else ' ' + name_of(self.prior)}"

    def __repr__(self) -> str:
        prior = self.prior if self._chain is None else type(self._chain).__name__
        chosen = {"prior": prior, "details": self.details or None, "lead": None if self.lead == LEAD else self.lead}
        more = "".join(f", {name}={value!r}" for name, value in chosen.items() if value is not None)
        return f"{type(self).__name__}({list(self.labels)!r}, scores={self.scores}{more})"


class LabelVote(NoisyVote[T]):
    """Every sampled owner votes with its own record's label: a noisy vote without a model.

    For stores that change from day to day (a `PrivateHead` that is released once answers better where they do not).
    ``PrivateEnsemble(selector) | DPAggregate(LabelVote(labels), budget)``: the ensemble has no member. With
    ``PoissonExampleSelector(store, calls=..., threshold=...)`` each sampled owner near to the query casts one vote, of
    its nearest record; calls cost nothing here, so ``calls`` may be as many as are ``eligible``, a rate of 1.

    Mechanisms, neighbours and parameters are those of `NoisyVote`: an owner's vote is a function of its own record, the
    query and its own coins. A bucket that owners share casts one vote, of the exemplar that stands first in it. A
    record without one of the labels abstains. A ``prior`` may be a chain (a head, say).
    """

    kind = "label-vote"
    task = "none"
    _text = staticmethod(text_of)
