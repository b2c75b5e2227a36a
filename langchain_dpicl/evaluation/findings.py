"""What an evaluation found, in sentences that follow from its rows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from langchain_dpicl.evaluation.scores import MEASURES, Score


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
    level, apart = best.mean(measure), []
    for other in (known.get((best.method, None)), zero):
        if other:
            words = other.method if other is zero else "its aggregate without noise"
            points = level - other.mean(measure)
            side = f"{abs(points):.1f} points {'below' if points < 0 else 'above'}"
            apart.append(f"{side if abs(points) >= 0.05 else 'level with'} {words} ({other.mean(measure):.1f})")
    compared = f", {' and '.join(apart)}" if apart else ""
    first = f"At epsilon {least:g} the best private method, {best.method}, has {MEASURES[measure]} {level:.1f}"
    said = [f"{first}{compared}."]
    if zero is None:
        return said
    floor = zero.mean(measure)
    plain = [known[m, None] for m in dict.fromkeys(s.method for _, s in private) if (m, None) in known]
    failed = [s for s in plain if s.mean(measure) <= floor]
    gains = [s for s in plain if s not in failed]
    if failed:
        prompts = [s for s in main if re.fullmatch(r"\d+-shot", s.method) and s.mean(measure) > floor]
        place = "Here" if not gains else f"With {_list([s.method for s in failed])},"
        means = _list([f"{s.method} has {s.mean(measure):.1f}" for s in failed])
        more = "".join(f", though one {s.method} prompt has {s.mean(measure):.1f}" for s in prompts[:1])
        said.append(
            f"{place} {'the ensemble' if prompts else 'the model'} learns nothing from the examples: without noise "
            f"{means}, {zero.method} {floor:.1f}{more}."
        )
    unsure, lost = [], []
    for score in gains:
        gain, error = score.mean(measure) - floor, math.hypot(score.values[measure].error, zero.values[measure].error)
        unsure += [f"{score.method} {gain:.1f} ({error:.1f})"] if gain < 2 * error else []
        epsilons = [f"{e:g}" for e, s in private if s.method == score.method and s.mean(measure) <= floor]
        lost += [f"{score.method} at epsilon {_list(epsilons)}"] if epsilons else []
    if unsure:
        said.append(
            f"By how many points the examples help without noise may be chance: {_list(unsure)}; in brackets the "
            f"standard error over queries, were the two methods independent."
        )
    if lost:
        said.append(f"Noise takes all that the examples bring, and {zero.method} is as good: {'; '.join(lost)}.")
    return said


def _list(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
