"""The findings of an evaluation, in sentences that follow from its rows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from langchain_dpicl.lab.evaluation.scores import HEAD, HEAD_PUBLIC, MEASURES, Score, words_of


def findings(main: Sequence[Score], measure: str) -> list[str]:
    """The best private method at the least epsilon, then everything that speaks against it: sentences.

    That is: methods to which examples bring nothing, or nothing certain, or less than the noise takes.
    """
    known = {(s.method, s.epsilon): s for s in main}
    private = [(s.epsilon, s) for s in main if s.epsilon is not None]
    least = min(epsilon for epsilon, _ in private)
    best = max((s for epsilon, s in private if epsilon == least), key=lambda s: s.mean(measure))
    zeros = [known[name, None] for name in ("zero-shot", "zero-shot calibrated") if (name, None) in known]
    zero = max(zeros, key=lambda s: s.mean(measure), default=None)
    level = best.mean(measure)
    apart = []
    for other in (known.get((best.method, None)), zero):
        if other:
            words = other.method if other is zero else "itself without noise"
            apart.append(f"{_side(level - other.mean(measure))} {words} ({other.mean(measure):.1f})")
    first = f"At epsilon {least:g} the best private method, {best.method}, has {MEASURES[measure]} {level:.1f}"
    if apart:
        first += f", {' and '.join(apart)}"
    said = [f"{first}."]
    if zero is None:
        return said
    floor = zero.mean(measure)
    plain = [known[m, None] for m in dict.fromkeys(s.method for _, s in private) if (m, None) in known]
    failed = [s for s in plain if s.mean(measure) <= floor]
    gains = [s for s in plain if s not in failed]
    if failed:
        prompts = [s for s in main if re.fullmatch(r"\d+-shot", s.method) and s.mean(measure) > floor]
        place = f"With {_list([s.method for s in failed])}," if gains else "Here"
        learner = "the ensemble" if prompts else "the model"
        means = _list([f"{s.method} has {s.mean(measure):.1f}" for s in failed])
        more = "".join(f", though one {s.method} prompt has {s.mean(measure):.1f}" for s in prompts[:1])
        said.append(
            f"{place} {learner} learns nothing from the examples: without noise {means}, "
            f"{zero.method} {floor:.1f}{more}."
        )
    unsure, lost = [], []
    for score in gains:
        gain = score.mean(measure) - floor
        error = math.hypot(score.values[measure].error, zero.values[measure].error)
        if gain < 2 * error:
            unsure.append(f"{score.method} {gain:.1f} ({error:.1f})")
        epsilons = [f"{e:g}" for e, s in private if s.method == score.method and s.mean(measure) <= floor]
        if epsilons:
            lost.append(f"{score.method} at epsilon {_list(epsilons)}")
    if unsure:
        said.append(
            f"By how many points the examples help without noise may be chance: {_list(unsure)}; in brackets the "
            f"standard error over queries, were the two methods independent."
        )
    if lost:
        said.append(f"Noise takes all that the examples bring, and {zero.method} is as good: {'; '.join(lost)}.")
    return said


def _side(points: float) -> str:
    if not abs(points) >= 0.05:
        return "level with"
    return f"{abs(points):.1f} points {'below' if points < 0 else 'above'}"


@dataclass(frozen=True)
class Choice:
    """The best head and the vote at one epsilon, and the best method without any private record, if there is one."""

    epsilon: float
    head: Score
    vote: Score
    public: Score | None

    @property
    def difference(self) -> float:
        """By how many points the head is above the vote."""
        return self.head.mean("accuracy") - self.vote.mean("accuracy")

    @property
    def error(self) -> float:
        """The standard error of the difference, were the two independent."""
        return math.hypot(self.head.values["accuracy"].error, self.vote.values["accuracy"].error)

    @property
    def prefer(self) -> str:
        """The better one of "head" and "vote"; "either" within two standard errors; "neither" if none beats public."""
        best = max(self.head.mean("accuracy"), self.vote.mean("accuracy"))
        if self.public is not None and best <= self.public.mean("accuracy"):
            return "neither"
        if not abs(self.difference) > 2 * self.error:
            return "either"
        return "head" if self.difference > 0 else "vote"


def choices(main: Sequence[Score]) -> list[Choice]:
    """A choice for each epsilon at which there are heads and a vote."""
    found = []
    for vote in (s for s in main if s.method == "vote"):
        heads = [s for s in main if s.method in (HEAD, HEAD_PUBLIC) and s.epsilon == vote.epsilon]
        if heads and vote.epsilon is not None:
            public = [s for s in main if words_of(s) == "public"]
            found.append(
                Choice(
                    vote.epsilon,
                    head=max(heads, key=_accuracy),
                    vote=vote,
                    public=max(public, key=_accuracy, default=None),
                )
            )
    return sorted(found, key=lambda choice: choice.epsilon)


def advice(scores: Sequence[Score]) -> list[str]:
    """When to prefer the head to the vote, and when not: sentences that follow from the rows of both.

    Accuracy decides at each epsilon. Beside it stand the number of answers, what a change of the records costs, and
    whether there are owners enough. Nothing without a head and a vote.
    """
    main = [score for score in scores if not score.study]
    if not (found := choices(main)):
        return []
    least = found[0]
    facts = least.vote.facts
    unlimited = "is charged once and answers any number of questions without a call of the model"
    limited = f"{facts['releases']:,.0f} answers, of {facts['members']:.0f} calls of the model each"
    said = []
    for prefer in dict.fromkeys(choice.prefer for choice in found):
        held = [choice for choice in found if choice.prefer == prefer]
        shown = [
            f"{c.epsilon:g} ({c.head.method} {c.head.mean('accuracy'):.1f}, vote {c.vote.mean('accuracy'):.1f})"
            for c in held
        ]
        if prefer == "head":
            words = (
                f"take the head if only labels are wanted and the records change seldom. It {unlimited}. The vote ends "
                f"after {limited}."
            )
        elif prefer == "vote":
            words = (
                f"take the vote, for up to {limited}. Take the head only if more answers are wanted, or no model may "
                f"be asked: it {unlimited}."
            )
        elif prefer == "either":
            words = (
                "neither is surely better: they are within two standard errors. If only labels are wanted and the "
                f"records change seldom, the head costs less: it {unlimited}. The vote ends after {limited}."
            )
        else:
            assert least.public is not None
            words = f"take neither: {least.public.method} has {least.public.mean('accuracy'):.1f} without any record."
        said.append(f"At epsilon {_list(shown)} {words}")
    fits = [s for s in scores if s.study == "fits" and (s.method, s.epsilon) == (least.head.method, least.epsilon)]
    shares = [f"{s.mean('accuracy'):.1f} with {s.facts['fits']:,.0f}" for s in fits]
    measured = "`--vary fits=12,365` measures it."
    if shares:
        measured = f"At epsilon {least.epsilon:g} the head has {_list(shares)} fits in one plan."
    said.append(
        "If the records change often, or a record must go at once, take the vote: it sees the records of the moment. A "
        f"head is fitted anew, and each fit takes a share of epsilon. {measured}"
    )
    plain = next((s for s in main if s.method == least.head.method and s.epsilon is None), None)
    if plain is not None and "owners" in least.head.facts:
        loss = plain.mean("accuracy") - least.head.mean("accuracy")
        enough = "are few for a head" if loss > max(5.0, 2 * least.head.values["accuracy"].error) else "are enough"
        said.append(
            f"{least.head.facts['owners']:,.0f} owners {enough} at epsilon {least.epsilon:g}: noise takes "
            f"{max(0.0, loss):.1f} points of the head's {plain.mean('accuracy'):.1f}."
        )
    return said


def _accuracy(score: Score) -> float:
    return score.mean("accuracy")


def _list(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
