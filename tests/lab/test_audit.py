"""`audit/`: it finds what is broken, finds nothing where nothing is, and says what it did.

`CERTAIN` is the confidence of every bound that must stay below its claim: a correct mechanism's is above it with a
probability of at most 1e-8 each. The bounds of broken mechanisms lie far enough above their claims for each of those
tests to miss with a probability below 1e-6.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.runnables import RunnableLambda
from numpy.typing import NDArray

from langchain_dpicl import cli
from langchain_dpicl.aggregators import EmbeddingMean, NoisyVote, keywords
from langchain_dpicl.aggregators.keywords import sample_sequence
from langchain_dpicl.decoding.answer import clipped_terms
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.lab.audit import worlds
from langchain_dpicl.lab.audit.attack import ATTACKED, CASES, ONCE, audit
from langchain_dpicl.lab.audit.cases import Setting
from langchain_dpicl.lab.audit.draws import BlockRandomness
from langchain_dpicl.selection import PoissonExampleSelector

CERTAIN = 1.0 - 1e-8
CLAIM: dict[str, Any] = {"epsilon": 1.0, "delta": 0.05, "confidence": CERTAIN}
"""At a large delta a plan allows little noise for its epsilon, so that few trials tell much."""

PROOF: dict[str, Any] = {**CLAIM, "confidence": 0.95}
"""Against what is broken, where a bound above the claim is what is asked for."""


# -- what is right stays below its claim -------------------------------------------------------------------------------


WITH_MEMBERS = tuple(name for name in ATTACKED if name not in ONCE)
"""All but the head and the sum: `test_audit_head` and `test_audit_sum` have those."""


@pytest.mark.parametrize("mechanism", WITH_MEMBERS)
def test_a_right_mechanism_stays_below_its_claim(mechanism: str) -> None:
    result = audit(mechanism, trials=200, **CLAIM)
    assert result.lower_bound <= result.epsilon
    assert (result.mechanism, result.canary, result.trials) == (mechanism, "outputs", 200)


@pytest.mark.parametrize("mechanism", WITH_MEMBERS)
def test_so_it_does_with_an_owner_in_a_real_store(mechanism: str) -> None:
    result = audit(mechanism, canary="owner", trials=40, members=3 if mechanism == "plan" else None, **CLAIM)
    assert result.lower_bound <= result.epsilon


def test_the_vote_is_attacked_to_more_than_half_of_its_claim() -> None:
    """Expected: 76 % of the claim. Counts 3.6 standard deviations off on both sides still give 57 %, so it misses with
    a probability below 1e-6. (At the command's own delta of 1e-4, 30,000 trials give 65 %.)
    """
    result = audit("vote", trials=6000, delta=0.01)
    assert 0.5 * result.epsilon < result.lower_bound


@pytest.mark.parametrize("mechanism", ["tokens", "vote"])
def test_an_owner_shows_as_much_as_its_output(mechanism: str) -> None:
    """Both kinds of canary attack one and the same law: each proves something."""
    for canary in ("outputs", "owner"):
        assert audit(mechanism, canary=canary, trials=500, epsilon=3.0, delta=0.05).lower_bound > 0.3


def test_many_releases_get_the_noise_of_their_plan() -> None:
    many = audit("scores", trials=200, releases=8, **CLAIM)
    assert many.lower_bound <= many.epsilon
    assert many.event.startswith("the log-likelihood ratio of 8 releases together")
    assert many.parameters["sigma"] > 2 * audit("scores", trials=1, **CLAIM).parameters["sigma"]


# -- what is broken does not -------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


bind, OWN = Setting.bind, CASES["vote-em-own-calls"].options


def less_noise(kind: type[Any], divisor: float) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        real = kind.aggregate
        patch.setattr(kind, "aggregate", lambda self, outputs, noise, draw: real(self, outputs, noise / divisor, draw))

    return apply


def joint_em_of_sensitivity_one(patch: Patch) -> None:
    real = sample_sequence
    patch.setattr(keywords, "sample_sequence", lambda counts, k, eps0, draw: real(counts, k, 2.0 * eps0, draw))


def gap_test_without_delta0(patch: Patch) -> None:
    real = keywords._passes
    patch.setattr(keywords, "_passes", lambda gap, sigma, delta0, draw: real(gap, sigma, 0.5, draw))


def terms_of_twice_the_range(patch: Patch) -> None:
    real = clipped_terms
    patch.setattr(
        worlds, "clipped_terms", lambda *rows, bound, **more: real(*rows, bound=2.0 * bound, **more), raising=True
    )


def noise_of_own_calls(patch: Patch) -> None:
    """An output that is replaced gets the noise for one that is added."""
    patch.setattr(Setting, "bind", lambda self, *what: bind(replace(self, options=OWN), *what))


def noise_for_one_of_many_releases(patch: Patch) -> None:
    """n compositions accounted as one."""
    less_noise(NoisyVote, 8**0.5)(patch)


BROKEN: list[tuple[str, Callable[[Patch], None], dict[str, Any]]] = [
    ("vote", less_noise(NoisyVote, 3.0), {}),
    ("scores", less_noise(NoisyVote, 3.0), {}),
    ("scores", noise_for_one_of_many_releases, {"releases": 8, "trials": 800}),
    ("embedding", less_noise(EmbeddingMean, 2.0), {"trials": 4000}),  # noise for sensitivity 1
    ("joint-em", joint_em_of_sensitivity_one, {"epsilon": 2.0, "trials": 7000}),
    ("ptr", gap_test_without_delta0, {}),
    ("tokens", terms_of_twice_the_range, {}),
    ("vote-em", noise_of_own_calls, {}),
    ("joint-em", noise_of_own_calls, {"epsilon": 2.0, "trials": 7000}),
    ("vote-em-own-calls", less_noise(NoisyVote, 0.5), {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "break_it", "more"), BROKEN)
def test_a_broken_mechanism_is_proved_to_break_its_claim(
    mechanism: str, break_it: Callable[[Patch], None], more: dict[str, Any], monkeypatch: Patch
) -> None:
    break_it(monkeypatch)
    result = audit(mechanism, **{**PROOF, "trials": 2000, **more})
    assert result.lower_bound > result.epsilon


Sample = Callable[..., list[Any]]


def everybody(real: Sample) -> Sample:
    """No coin at all: the rate is accounted for, and never drawn."""
    return lambda self, rate=None, query=None, *among: real(self, 1.0, query, *among)


def fixed_size(real: Sample) -> Sample:
    """A sample of so many owners, each in a random bucket, where the plan says "each with its own coin"."""

    def sample(self: PoissonExampleSelector, rate: float | None = None, query: Any = None, *among: Any) -> list[Any]:
        chosen = np.random.default_rng().permutation(self.store.owner_count)[:5]
        kept = self._randomness
        self._randomness = Fixed(chosen)
        try:
            return real(self, rate, query, *among)
        finally:
            self._randomness = kept

    return sample


class Fixed(BlockRandomness):
    """The secure generator, but for the coins."""

    def __init__(self, heads: NDArray[np.int64]) -> None:
        super().__init__()
        self.heads = np.sort(heads)

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        return self.heads


def in_two_members(real: Sample) -> Sample:
    """Each owner in its own bucket, and in the next."""

    def sample(self: PoissonExampleSelector, rate: float | None = None, query: Any = None, *among: Any) -> list[Any]:
        buckets = real(self, rate, query, *among)
        shown = [list(bucket) for bucket in buckets]
        for i, bucket in enumerate(buckets):
            bucket.extend(shown[i - 1])
        return buckets

    return sample


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "epsilon", "rate", "trials"),
    [(everybody, 1.0, 0.1, 600), (fixed_size, 1.0, 0.1, 600), (in_two_members, 1.5, 1.0, 2000)],
)
def test_a_broken_selection_is_proved_to_break_its_claim(
    broken: Callable[[Sample], Sample], epsilon: float, rate: float, trials: int, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(PoissonExampleSelector, "sample", broken(PoissonExampleSelector.sample))
    result = audit("vote", canary="owner", rate=rate, trials=trials, **{**PROOF, "epsilon": epsilon})
    assert result.lower_bound > result.epsilon


@pytest.mark.slow
def test_a_cap_that_follows_the_store_is_proved_to_break_its_claim(monkeypatch: Patch) -> None:
    """The worlds are made with the selector's defaults. Members who see how full their prompt is tell them apart as
    soon as the cap comes from the number of owners. (The bound is then about 1.8, seven standard deviations above the
    claim.)"""
    full = RunnableLambda(lambda values: "Birch" if len(values["examples"]) > 1 else "Alder")
    how: dict[str, Any] = {"canary": "owner", "rate": 1.0, "members": 4, "member": full}
    real = PoissonExampleSelector.__init__

    def follows_the_store(self: PoissonExampleSelector, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        self.max_exemplars = self.store.owner_count - worlds.OTHER_OWNERS + 1

    honest = audit("vote", **CLAIM, trials=400, **how)
    assert honest.lower_bound <= honest.epsilon
    monkeypatch.setattr(PoissonExampleSelector, "__init__", follows_the_store)
    broken = audit("vote", **PROOF, trials=1000, **how)
    assert broken.lower_bound > broken.epsilon


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"mechanism": "votes"}, "mechanism"),
        ({"canary": "nobody"}, "canary"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"rate": 0.0}, "rate"),
        ({"rate": 1.5}, "rate"),
        ({"releases": 0}, "releases"),
        ({"members": 1}, "members"),
        ({"trials": 0}, "trials"),
        ({"trials": 2.5}, "trials"),
        ({"confidence": 0.0}, "confidence"),
        ({"confidence": 1.0}, "confidence"),
        ({"member": object()}, "member"),
    ],
)
def test_bad_input_is_refused_by_name(more: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{named}="):
        audit(**{"mechanism": "vote", **more})


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def dpicl() -> Callable[..., int]:
    return lambda *words: cli.main(["audit", *words])


QUICK: Sequence[str] = ("--trials", "200", "--epsilon", "1", "--delta", "0.05")


def test_the_command_prints_a_table(dpicl: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert dpicl(*QUICK, "--rate", "0.5", "--releases", "2") == 0
    shown = capsys.readouterr()
    assert "delta 0.05, rate 0.5, 2 releases" in shown.out
    assert shown.out.count("\nvote") == 2  # its line and its note
    assert shown.err == ""


def test_the_command_prints_json_and_draws(
    dpicl: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "audit.png"
    assert dpicl(*QUICK, "--mechanism", "all", "--trials", "20", "--json", "--plot", str(picture)) == 0
    audits = json.loads(capsys.readouterr().out)
    assert [each["mechanism"] for each in audits["audits"]] == list(ATTACKED)
    assert audits["above the claim"] == []
    vote = audits["audits"][0]
    assert {"lower_bound", "true_positives", "false_positives", "event", "parameters", "confidence"} <= vote.keys()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_says_what_lies_above_its_claim(
    dpicl: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    less_noise(NoisyVote, 20.0)(monkeypatch)
    assert dpicl(*QUICK, "--trials", "1000") == 1
    assert "ABOVE THE CLAIM: vote" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--mechanism", "nothing"), "mechanism="),
        (("--trials", "0"), "trials="),
        (("--epsilon", "0"), "epsilon="),
        (("--rate", "2"), "rate="),
        (("--confidence", "1"), "confidence="),
        (("--canary", "cat"), "canary="),
        (("--plot", "/nowhere/at/all.png"), "plot="),
        (("--model", "gemma"), "model="),
        (("--canary", "owner", "--model", "no such model"), "model="),
    ],
)
def test_the_command_refuses_bad_input_in_one_line(
    words: tuple[str, ...], named: str, dpicl: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert dpicl(*words) == 1
    shown = capsys.readouterr()
    assert named in shown.err
    assert shown.err.count("\n") == 1


def test_declaring_the_command_loads_nothing_of_the_audit() -> None:
    code = "import sys, langchain_dpicl.lab.measure; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"langchain_dpicl.lab.audit", "scipy", "numpy", "matplotlib", "langchain_core"}.isdisjoint(loaded)
