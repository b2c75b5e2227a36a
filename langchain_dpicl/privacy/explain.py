"""The meaning of a plan: the chance that noise flips a vote, the bill, and `PrivacyPlan.numbers` in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from langchain_dpicl.privacy.abstaining import discrete_gaussian
from langchain_dpicl.privacy.checks import positive, real, whole

VOTES = ("vote", "scores")


@dataclass(frozen=True)
class Calls:
    """One member's call: tokens in and out, and prices per million tokens in any currency."""

    prompt_tokens: float
    answer_tokens: float
    price_in: float
    price_out: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, real(name, value, at_least=0.0))

    def cost(self, members: int) -> float:
        """The price of one answer: `members` calls."""
        return members * (self.prompt_tokens * self.price_in + self.answer_tokens * self.price_out) / 1e6


def flip_probability(sigma: float, margin: int, labels: int = 2) -> float:
    """Chance that discrete Gaussian noise of `sigma` takes the win from a label that leads every other by `margin`.

    Ties are broken at random. Exact for two labels: the sum over the winner's noise x of P(x) times
    P(noise > x + margin) plus half of P(noise = x + margin). With more labels this is an upper bound for the worst
    case, in which all others are runners-up (and a tie among several rivals counts for each of them).
    """
    sigma = positive("sigma", sigma)
    margin = whole("margin", margin, at_least=0)
    labels = whole("labels", labels, at_least=2)
    _, weights = discrete_gaussian(sigma)
    tails = np.append(np.minimum(np.cumsum(weights[::-1])[::-1], 1.0), 0.0)  # sums from the right
    level = np.arange(weights.size) + margin  # a rival's noise draws level here with the winner's
    lost = 0.5 * (tails[np.minimum(level, tails.size - 1)] + tails[np.minimum(level + 1, tails.size - 1)])
    with np.errstate(divide="ignore"):
        any_lost = -np.expm1((labels - 1) * np.log1p(-lost))
    return float(min(1.0, (weights * any_lost).sum()))


def words(numbers: dict[str, Any]) -> str:
    """`PrivacyPlan.numbers` for people."""
    delta = numbers["delta"]
    text = [
        f"All releases of this plan together are (epsilon, delta)-differentially private with epsilon "
        f"{numbers['epsilon']:g} and delta {delta:.3g} when all exemplars of one owner are added or removed "
        f"(certified: {numbers['certified_epsilon']:.4g})."
    ]
    for name, line in numbers["lines"].items():
        text += ["", f"{name}: {line['releases']:,} releases. Each gives out {line['what']}."]
        owners, chosen = line["owners"], ""
        if owners is not None:
            large = f"; delta is not below 1/owners = {1 / owners:.3g}" if delta >= 1 / owners else ""
            chosen = f", chosen for {owners:,} owners{large}"
        text.append(f"  An owner takes part in a release with probability {line['rate']:.4g}{chosen}.")
        text.append(
            f"  One release alone costs epsilon {line['epsilon_of_one_release']:.3g}; "
            f"all {line['releases']:,} together {line['epsilon_of_this_line']:.3g}."
        )
        spent = [f"{point['releases']:,}: {point['epsilon']:.3g}" for point in line.get("curve", ())[1:-1]]
        if spent:
            text.append(f"  Epsilon on the way, after so many releases: {', '.join(spent)}.")
        for row in line.get("flips", ()):
            of = f" of {row['members']}" if "members" in row else ""
            chance = f"is overturned with probability {row['flip_probability']:.3g}"
            text.append(f"  A winner ahead by {row['margin']}{of} votes {chance}.")
            if "single_shot_members" in row:
                text.append(
                    f"    The same share of {row['single_shot_members']} members with one exemplar each, at the same "
                    f"privacy: {row['single_shot_flip_probability']:.3g}."
                )
        if "abstention" in line:
            found = line["abstention"]
            told, members = found["told_probability"], found["members"]
            text.append(
                f"  If all {members} members fail, a release says so with probability {told:.3g}."
                if found["tells"]
                else f"  {members} members are too few to tell failing members from noise (a release says so with "
                f"probability {told:.2g}), so a public question goes before a charge, once a minute for each caller."
            )
        if "cost_per_answer" in line:
            text.append(f"  An answer costs {line['cost_per_answer']:.4g}, all of them {line['cost_of_all']:.4g}.")
    return "\n".join(text)
