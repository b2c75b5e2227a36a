"""The share of a release that noise leaves, from public numbers, and the reasons why a plan is poor.

Nothing here sees a record. The share that is left is 1 if a method is as good as without
noise, 0 if it guesses among the labels. The rules for it were fitted to measured results;
`vote_left`, `head_left` and `tokens_left` say how well.
"""

from __future__ import annotations

import math

from langchain_dpicl.privacy.lines import LineRequest
from langchain_dpicl.privacy.mechanisms import Head
from langchain_dpicl.privacy.solving import about
from langchain_dpicl.privacy.votes import VoteNoise

HEAD = "head"

POOR = 0.75
"""A plan is poor if noise leaves less than this."""

HALF = 0.5
"""Below this a head or a sampler is not feasible. (Of a vote the plan itself is refused.)"""

EMBEDDED, DIRECTIONS = 385, 65
"""The features of a head: the embedded model's numbers, or 64 directions of public texts; and a constant."""

_LEADS = (0.19, 0.51, 0.75, 0.91, 0.99)

_HEAD_SCALE = 9.9
_HEAD_POWER = 0.58

_WHOLE_RANGE = 6.7


def vote_left(noise: VoteNoise, votes: float, labels: int) -> float:
    """Return the share of a vote with so many expected votes that noise leaves.

    The mean over five leads of a winner (19, 51, 75, 91 and 99 % of the votes: the middles
    of fifths of the law with density 1 / (2 sqrt(1 - lead))) of the chance that it wins, by
    `VoteNoise.flip`, scaled so that guessing is 0.

    Measured, in the source archive: the leads were chosen on 126 rows of votes (`results/votes-*`,
    `results/blind-*`; 2 to 10 labels, 16 to 20 calls or up to 330 label votes, epsilon 1 to
    8). Accuracy computed by it from that without noise errs there by .016 (root mean
    square), by .045 at most. On 93 rows that nobody looked at (`results/trec`, `trec-bare`,
    `agnews`, `sst2`) it errs by .019, by .09 at most, and rather promises too little. A
    vote whose leads are narrow (a gate that lets in far more owners than resemble the
    question) loses more: up to .2 on `results/label-votes`.
    """
    guess = 1.0 / labels
    lost = [min(noise.flip(round(lead * votes), labels), 1.0 - guess) for lead in _LEADS]
    return max(0.0, 1.0 - sum(lost) / len(_LEADS) / (1.0 - guess))


def head_signal(owners: float, sigma: float, steps: float, features: int) -> float:
    """The number of owners over the length of a label's noise in the mean of a head's sums."""
    return owners / (sigma * math.sqrt(features / steps))


def head_left(owners: float, sigma: float, steps: float, features: int) -> float:
    """Return the share of a head that noise and a small number of owners leave.

    It is 1 - exp(-(x / 9.9)^.58), x being `head_signal`.

    Measured: fitted to the 120 rows with noise of the source archive's `results/head` (2 to 10 labels, 250 to
    7,500 owners, epsilon .3 to 8, 65 and 385 features), against the same head of all owners
    without noise. It errs by .038 (root mean square), by .14 at most. For fewer owners a
    second rule, `once.fitting.expected_accuracy`, was measured on its own.
    """
    return -math.expm1(-((head_signal(owners, sigma, steps, features) / _HEAD_SCALE) ** _HEAD_POWER))


def tokens_left(range_bound: float) -> float:
    """Return the share of a sampler's demonstrations that clipping to a range leaves: range_bound / 6.7, at most 1.

    Measured, in the source archive: of ROUGE-L's gain .93 at 6.2 and all at 7.3 and 8.4 (`results/decoding`), .86
    at 5.8 and all at 6.8 (`results/tokens-e2e`), nothing at 1.7 (`results/tokens-mts`) and
    below (`results/rag`). In between it is a guess.
    """
    return min(1.0, range_bound / _WHOLE_RANGE)


def poor(noise: VoteNoise, votes: float, labels: int, epsilon: float, head: tuple[int, float] | None) -> str | None:
    """Say in words why a plan of votes is poor; None if it is not. From public numbers.

    ``head``: the number of owners, if a plan keeps one, and delta, to say what a head would
    do at the same epsilon.
    """
    left = vote_left(noise, votes, labels)
    if left >= POOR:
        return None
    text = (
        f"noise takes about {1.0 - left:.0%} of what the records bring: {votes:.3g} votes among {labels} labels are "
        "few for this plan's noise. Fewer answers, a larger epsilon or more owners help"
    )
    if head is not None:
        owners, delta = head
        sigma = about(epsilon, delta, LineRequest(HEAD, 1.0, 1)) or Head.high
        if (spared := head_left(owners, sigma, Head().steps, EMBEDDED)) > left + 0.1:
            text += f"; a PrivateHead, fitted once on {owners:,} owners, would lose about {1.0 - spared:.0%}"
    return f"{text}. `dpicl advise` compares"


def poor_range(range_bound: float) -> str | None:
    """Say in words why a plan of tokens is poor; None if it is not. From public numbers."""
    if tokens_left(range_bound) >= HALF:
        return None
    return (
        f"an owner changes the log-odds of a token by {range_bound:.2g} at most, and texts measured at 1.7 and less "
        "said no more than the model says without records. Fewer or shorter answers, a larger epsilon, or a wider gate "
        "of whose owners a token reads as many help"
    )


def head_steps(labels: int) -> int:
    """The number of steps of a head's line that nobody has described: 20, or 40 for more than 10 labels."""
    return 20 if labels <= 10 else 40
