"""The audit: attack a mechanism with its worst case, and prove a lower bound on epsilon.

Its two neighbouring data sets make the product's own releases. ``synthetic_world``: the members' answers are written
down; the owner's coin, the aggregator or the token's mixing, and all randomness are the product's. ``owner_world``: a
real store with real owners, of whom the canary is one or not, the real selector, the real ensemble around a member
chain, and the real aggregator (for tokens: the real draw of owners for a token and the real private answer).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import Runnable, RunnableLambda
from numpy.typing import NDArray
from tqdm import tqdm

from langchain_dpicl.audit.cases import CASES, Case, Setting, TokenCase, choose_region
from langchain_dpicl.audit.heads import HEAD, HEAD_TRIALS, head_cases, head_world
from langchain_dpicl.decoding.answer import Exemplars, PrivateAnswer, Settings, choose, clipped_terms, slots_for
from langchain_dpicl.decoding.model import Demonstration, DemonstrationTemplate, Logits
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.plots import draw_bounds
from langchain_dpicl.privacy import LineRequest, PrivacyPlan, Randomness, SecureRandomness, default_delta0
from langchain_dpicl.privacy.checks import open_unit, probability, real, whole
from langchain_dpicl.privacy.losses import FloatArray
from langchain_dpicl.privacy.profile import Direction
from langchain_dpicl.private import boundary
from langchain_dpicl.release.ensemble import PrivateEnsemble
from langchain_dpicl.selection import PoissonExampleSelector
from langchain_dpicl.store import ExemplarStore

Canary = Literal["outputs", "owner"]

PLAN = "plan"
"""All mechanisms but the head in one plan, a line each."""

ATTACKED = (*CASES, PLAN, HEAD)

QUERY = "which of the two?"
OTHER_OWNERS = 8
_TRIALS = 30_000
_SHOTS = 5
"""Public, as everything but the canary: with the default cap that comes of it the canary is never left out."""
_BLOCK = 4096
_TOKEN = Settings(max_tokens=1, min_tokens=0, top_k=2, shots=1.0, temperature=1.0, cap=1.5, stop=())
_CANARY = "canary"


@dataclass(frozen=True)
class AuditResult:
    """The claim that an audit attacked, and the bound it proved. Public: no private data went in.

    ``epsilon`` and ``delta`` are the plan's promise, ``parameters`` its noise by the parameter's name, ``releases`` the
    number on each line, ``members`` N of each line with members. Epsilon is at least ``lower_bound``, with this
    ``confidence`` (`cases` has the proof); above ``epsilon``, the claim is false. The bound tells the neighbours of
    ``direction`` apart (the owner removed, or added) by the ``event``. Of so many ``trials`` of each data set
    ``true_positives`` showed the event on the one that makes it likely, and ``false_positives`` on the other.
    """

    mechanism: str
    canary: Canary
    case: str
    epsilon: float
    delta: float
    rate: float
    releases: int
    parameters: Mapping[str, float]
    members: Mapping[str, int]
    lower_bound: float
    confidence: float
    direction: Direction
    event: str
    trials: int
    true_positives: int
    false_positives: int


def audit(
    mechanism: str,
    *,
    canary: Canary = "outputs",
    epsilon: float = 3.0,
    delta: float = 1e-4,
    rate: float = 1.0,
    releases: int = 1,
    members: int | None = None,
    trials: int | None = None,
    confidence: float = 0.95,
    member: Runnable[Any, Any] | None = None,
) -> AuditResult:
    """Run a mechanism on neighbouring data sets with a worst-case canary, and bound epsilon from below.

    The noise is that of a `PrivacyPlan` solved for the promise. Each trial makes all releases of the plan on a data set
    with the owner and on one without it; the adversary sees them all and adds up their log-likelihood ratios. A third
    as many trials as ``trials``, made first, choose the case and the event; the bound counts the others alone.

    - ``mechanism``: "vote", "scores", "embedding", "joint-em", "ptr", "tokens", "plan" (a line of each of these in one
      plan), or "head".
    - ``canary``: "outputs": the members' answers are the worst there are. "owner": a real store, selector, member chain
      and ensemble, and an inserted owner whose member answers the canary. Of a head "outputs" shows all noisy sums, of
      the product's own steps on a real store; "owner" shows the head alone, of whole fits with their ledgers.
    - ``epsilon``, ``delta``: the promise of the whole plan.
    - ``rate``, ``releases``: the probability with which an owner takes part, and the releases of each line. At rate 1
      nothing is amplified, and the bound comes nearest to the claim. A head has no other rate.
    - ``members``: N; by default as many as make the attack strongest.
    - ``trials``, ``confidence``: how many trials of each data set the bound counts (default: 30,000; of a head 10,000,
      or 1,000 with canary="owner"), and the bound's confidence.
    - ``member``: with canary="owner" and a vote, another member chain than the deterministic one. It gets ``input`` and
      ``examples`` and should answer "Birch" if an example says so of the same input, else "Alder".

    Raises `InvalidParameter` and what `PrivacyPlan.solve` raises.
    """
    if mechanism not in ATTACKED:
        raise InvalidParameter("mechanism", mechanism, f"one of {', '.join(ATTACKED)}")
    if canary not in ("outputs", "owner"):
        raise InvalidParameter("canary", canary, '"outputs" or "owner"')
    if member is not None and (canary != "owner" or mechanism != "vote"):
        raise InvalidParameter("member", type(member).__name__, 'None unless canary="owner" and mechanism="vote"')
    epsilon, delta = real("epsilon", epsilon, above=0.0, at_most=1000.0), open_unit("delta", delta)
    rate, releases = probability("rate", rate), whole("releases", releases)
    members = None if members is None else whole("members", members, at_least=2)
    if mechanism == HEAD and rate != 1.0:
        raise InvalidParameter("rate", rate, "1 for a head: every owner takes part")
    if trials is None:
        trials = HEAD_TRIALS[canary] if mechanism == HEAD else _TRIALS
    trials, confidence = whole("trials", trials), open_unit("confidence", confidence)

    names = tuple(CASES) if mechanism == PLAN else (mechanism,)
    delta0 = {"delta0": default_delta0(delta, rate, releases)}
    requests = {name: LineRequest(name, rate, releases, options=delta0 if name == "ptr" else {}) for name in names}
    lines = PrivacyPlan.solve(epsilon=epsilon, delta=delta, lines=requests).lines
    count = releases * len(lines)
    effort: dict[str, Any] = {"rate": rate, "epsilon": epsilon, "delta": delta}
    effort |= {"trials": trials, "confidence": confidence}
    attacked = {**effort, "releases": count, "unanimous": canary == "owner", "members": members}
    made = {**CASES, HEAD: head_cases}
    cases = [made[name](Setting(line.parameter, options=line.options, **attacked)) for name, line in lines.items()]
    # Of a plan each line shows its first case; of one mechanism, all are tried.
    choices = [[many[0] for many in cases]] if mechanism == PLAN else [[case] for case in cases[0]]

    draw = BlockRandomness()
    world: Any = synthetic_world if canary == "outputs" else partial(owner_world, member=member)
    if mechanism == HEAD:
        world = head_world
    attempts = [
        [(case, [world(case, has_owner, rate, draw) for has_owner in (True, False)]) for case in choice]
        for choice in choices
    ]
    first = -(-trials // 3)
    with tqdm(
        total=2 * (trials + first * len(attempts)), desc=mechanism, unit="trial", disable=None, file=sys.stderr
    ) as bar:

        def statistics(
            attempt: Sequence[tuple[Any, Sequence[Callable[[], Any]]]], size: int
        ) -> tuple[FloatArray, FloatArray]:
            """For each trial the sum of all releases' log-likelihood ratios, with the owner and without.

            The attempt has for each line its case, and one release of it with the owner and without. A ratio is that of
            one release, the owner having taken part with the plan's rate.
            """
            sums = np.zeros((2, size))
            for i in range(size):
                for case, worlds in attempt:
                    for side in (0, 1) * releases:
                        ratio = case.statistic(worlds[side]())
                        sums[side, i] += ratio if rate == 1.0 else np.log1p(rate * np.expm1(ratio))
                bar.update(2)
            return sums[0], sums[1]

        tried = [choose_region(*statistics(attempt, first), delta, confidence) for attempt in attempts]
        best = max(range(len(tried)), key=lambda i: tried[i][1])
        region = tried[best][0]
        bound, hits, misfires = region.lower_bound(*statistics(attempts[best], trials), delta, confidence)
    together = f" of {count} releases together" if count > 1 else ""
    side = "at least" if region.direction == "remove" else "below"
    noise = {
        line.family.parameter if len(lines) == 1 else f"{name} {line.family.parameter}": line.parameter
        for name, line in lines.items()
    }
    return AuditResult(
        mechanism=mechanism,
        canary=canary,
        case="; ".join(case.words for case in choices[best]),
        releases=releases,
        parameters=noise,
        members={name: case.members for name, case in zip(lines, choices[best], strict=True) if case.members},
        lower_bound=bound,
        direction=region.direction,
        event=f"the log-likelihood ratio{together} is {side} {region.threshold:.4g}",
        true_positives=hits,
        false_positives=misfires,
        **effort,
    )


# -- results -----------------------------------------------------------------------------------------------------------

_HEAD = ("mechanism", "noise", "claimed", "at least", "share", "neighbours", "true/false positives", "trials")


def table(results: Sequence[AuditResult]) -> str:
    """One line a mechanism, and below it the case and the event."""
    rows = [_HEAD]
    for result in results:
        noise = [f"{name} {value:.4g}" for name, value in result.parameters.items()]
        shown = noise[0] if len(noise) == 1 else f"{len(noise)} lines"
        bound, share = f"{result.lower_bound:.3f}", f"{result.lower_bound / result.epsilon:.0%}"
        owner = "owner removed" if result.direction == "remove" else "owner added"
        counts = f"{result.true_positives}/{result.false_positives}", str(result.trials)
        rows.append((result.mechanism, shown, f"{result.epsilon:.4g}", bound, share, owner, *counts))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += ["", *(f"{result.mechanism}: {result.case}. Event: {result.event}." for result in results)]
    return "\n".join(lines)


def headline(results: Sequence[AuditResult]) -> str:
    """The settings that the results share, in one line."""
    first = results[0]
    what = "worst-case member outputs" if first.canary == "outputs" else "an inserted owner among real members"
    many = "one release" if first.releases == 1 else f"{first.releases} releases"
    return (
        f"lower bounds on epsilon ({first.confidence:.4g} confidence each) beside the claim, at delta {first.delta:g}, "
        f"rate {first.rate:g}, {many}; canary: {what}"
    )


def draw(results: Sequence[AuditResult], path: str | Path) -> None:
    """Draw two bars for each mechanism: the claim, and what the attack proves. Raises as `save_figure`."""
    several = len({result.epsilon for result in results}) > 1
    bars = [
        (f"{r.mechanism}\nepsilon {r.epsilon:g}" if several else r.mechanism, r.epsilon, r.lower_bound) for r in results
    ]
    first = results[0]
    many = "1 release" if first.releases == 1 else f"{first.releases} releases"
    title = f"Audit at delta {first.delta:g}, rate {first.rate:g}, {many}, canary: {first.canary}"
    draw_bounds(bars, title, f"proved by the attack ({first.confidence:.4g} confidence)", path)


# -- two neighbouring data sets ----------------------------------------------------------------------------------------


class BlockRandomness:
    """The secure generator, read in blocks: each of its independent draws is handed out once, in order.

    A block of a thousand costs a tenth of a thousand calls, and the law of the draws is the same.
    """

    def __init__(self, source: Randomness | None = None) -> None:
        self._source: Randomness = SecureRandomness() if source is None else source
        self._left: dict[Hashable, NDArray[Any]] = {}

    def coin_positions(self, n: int, probability: float) -> NDArray[np.int64]:
        """Straight from the source."""
        return self._source.coin_positions(n, probability)

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        """As the source's."""
        return self._take(("integers", high), size, partial(self._source.integers, high))

    def uniforms(self, size: int) -> NDArray[np.float64]:
        """As the source's."""
        return self._take("uniforms", size, self._source.uniforms)

    def discrete_gaussian(self, sigma: float, size: int) -> NDArray[np.int64]:
        """As the source's."""
        return self._take(("gaussian", sigma), size, partial(self._source.discrete_gaussian, sigma))

    def _take(self, kind: Hashable, size: int, draw: Callable[[int], NDArray[Any]]) -> NDArray[Any]:
        left = self._left.get(kind)
        if left is None or len(left) < size:
            left = draw(max(_BLOCK, size))
        self._left[kind] = left[size:]
        return left[:size]


def synthetic_world(case: Case, has_owner: bool, rate: float, randomness: Randomness) -> Callable[[], Any]:
    """A function that makes one release from the answers, or the token's terms, of the case.

    The owner, if there is one, takes part by the product's coin.
    """
    if isinstance(case, TokenCase):
        model = TwoTokens(case.first)
        rows = {True: model.row(_CANARY)[None, :], False: np.empty((0, 2), np.float32)}
        terms = partial(clipped_terms, bound=case.bound, temperature=_TOKEN.temperature, cap=_TOKEN.cap)

        def release(takes_part: bool) -> Any:
            return choose(model, _TOKEN, [], model.row(""), rows[takes_part], terms, randomness)
    else:
        encode = case.aggregator.encode
        others = [encode(answer) for answer in case.others]
        outputs = {True: [encode(case.canary), *others], False: [encode(case.base), *others]}

        def release(takes_part: bool) -> Any:
            return case.aggregator.aggregate(outputs[takes_part], case.parameter, randomness)

    return lambda: release(has_owner and len(randomness.coin_positions(1, rate)) > 0)


def owner_world(
    case: Case, has_owner: bool, rate: float, randomness: Randomness, member: Runnable[Any, Any] | None = None
) -> Callable[[], Any]:
    """A function that makes one release from a store of ordinary owners, with or without the canary.

    ``member`` is the member chain of a case with members. The default one gives the canary's answer if the canary is
    among its examples, else the case's base answer.
    """
    base, canary = ("ordinary", _CANARY) if isinstance(case, TokenCase) else (case.base, case.canary)
    records = [{"input": f"{QUERY} {i}", "output": base, "owner": str(i)} for i in range(OTHER_OWNERS)]
    if has_owner:
        records.append({"input": QUERY, "output": canary, "owner": "canary"})
    store = ExemplarStore.from_records(records, DeterministicFakeEmbedding(size=2), owner_key="owner", progress=False)

    if isinstance(case, TokenCase):
        model, slots = TwoTokens(case.first), slots_for(_TOKEN.shots, rate, OTHER_OWNERS)
        exemplars = Exemplars(store, model, DemonstrationTemplate("{output}", "{input}"), _TOKEN.max_tokens)

        def token() -> int:
            answer = PrivateAnswer(model, _TOKEN, case.bound, randomness, slots, exemplars.padding)
            answer.open(QUERY, partial(exemplars.draw, randomness, rate, QUERY, 1))
            drawn = answer.token([])
            answer.close()
            return drawn

        return token

    def answer(values: Mapping[str, Any]) -> str:
        return canary if any(each["output"] == canary for each in values["examples"]) else base

    chain = RunnableLambda(answer) if member is None else member
    selector = PoissonExampleSelector(store, case.members, shots=_SHOTS)
    ensemble = PrivateEnsemble(selector, chain, max_concurrency=1 if member is None else None)

    def release() -> Any:
        outputs = ensemble.run({"input": QUERY}, rate, case.aggregator)
        return boundary.in_private(case.aggregator.aggregate, outputs, case.parameter, randomness)

    return release


class TwoTokens:
    """A language model of two tokens: the canary's demonstration is sure of the first, any other changes nothing.

    It keeps no state: an answer's session is the same model with the texts of its demonstrations.
    """

    name = "two tokens"
    vocabulary = 2
    end_tokens: frozenset[int] = frozenset()

    def __init__(self, first: float, texts: Sequence[str] = ()) -> None:
        self._first, self._texts = first, texts

    def row(self, demonstration: str) -> Logits:
        """The logits after this demonstration; "" for none."""
        sure = np.array([1000.0 * (demonstration == _CANARY), 0.0], np.float32)
        return np.asarray(np.log(np.array([self._first, 1.0 - self._first])).astype(np.float32) + sure, np.float32)

    def fits(self, demonstration: str, shared: str, tokens: int) -> bool:
        """Always."""
        return True

    def text(self, tokens: Sequence[int]) -> str:
        """One letter a token."""
        return "".join("ab"[token] for token in tokens)

    def session(self, shared: str, demonstrations: Sequence[Demonstration], *, steps: int) -> TwoTokens:
        """One answer."""
        return TwoTokens(self._first, [each.text for each in demonstrations])

    def logits(self, rows: Sequence[int], released: Sequence[int]) -> Logits:
        """The zero-shot row, and one for each demonstration."""
        return np.stack([self.row(""), *(self.row(self._texts[row]) for row in rows)])

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""
