"""Two neighbouring data sets that make the product's own releases.

``synthetic_world``: the members' answers are written down; the owner's coin, the aggregator or the token's mixing, and
all randomness are the product's. ``owner_world``: a real store with real owners, of whom the canary is one or not, the
real selector, the real ensemble around a member chain (or without one), and the real aggregator (for tokens: the real
draw of owners for a token and the real private answer).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import Runnable, RunnableLambda

from langchain_dpicl.aggregators import LabelVote
from langchain_dpicl.decoding.answer import PrivateAnswer, Settings, choose, clipped_terms
from langchain_dpicl.decoding.exemplars import Exemplars, slots_for
from langchain_dpicl.decoding.model import Demonstration, DemonstrationTemplate, Logits
from langchain_dpicl.lab.audit.cases import Case, TokenCase
from langchain_dpicl.privacy import Randomness
from langchain_dpicl.private import boundary
from langchain_dpicl.release.ensemble import PrivateEnsemble
from langchain_dpicl.selection import PoissonExampleSelector
from langchain_dpicl.store import ExemplarStore

QUERY = "which of the two?"
OTHER_OWNERS = 8
_SHOTS = 5
"""Public, as everything but the canary: with the default cap that comes of it the canary is never left out."""
_TOKEN = Settings(max_tokens=1, min_tokens=0, top_k=2, shots=1.0, temperature=1.0, cap=1.5, stop=())
_CANARY = "canary"


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
        outputs = {True: [encode(case.canary), *others], False: [*map(encode, filter(None, [case.base])), *others]}

        def release(takes_part: bool) -> Any:
            return case.aggregator.aggregate(outputs[takes_part], case.parameter, randomness)

    return lambda: release(has_owner and len(randomness.coin_positions(1, rate)) > 0)


def owner_world(
    case: Case, has_owner: bool, rate: float, randomness: Randomness, member: Runnable[Any, Any] | None = None
) -> Callable[[], Any]:
    """A function that makes one release from a store of ordinary owners, with or without the canary.

    ``member`` is the member chain of a case with members. The default one gives the canary's answer if the canary is
    among its examples, else that of the others.
    """
    canary, others = _CANARY, ("ordinary",) * OTHER_OWNERS
    if not isinstance(case, TokenCase):
        canary, others = case.canary, case.others if case.base is None else (case.base,) * OTHER_OWNERS
    records = [{"input": f"{QUERY} {i}", "output": output, "owner": str(i)} for i, output in enumerate(others)]
    if has_owner:
        records.append({"input": QUERY, "output": canary, "owner": "canary"})
    store = ExemplarStore.from_records(records, DeterministicFakeEmbedding(size=2), owner_key="owner", progress=False)

    if isinstance(case, TokenCase):
        model, slots = TwoTokens(case.first), slots_for(_TOKEN.shots, rate, OTHER_OWNERS)
        drawn_from = PoissonExampleSelector(store, 2, rate=rate, max_exemplars=1)
        exemplars = Exemplars(drawn_from, model, DemonstrationTemplate("{output}", "{input}"), _TOKEN.max_tokens)

        def token() -> int:
            answer = PrivateAnswer(model, _TOKEN, case.bound, randomness, slots, exemplars.padding)
            answer.open(QUERY, partial(exemplars.draw, randomness, rate, QUERY, 1))
            drawn = answer.token([])
            answer.close()
            return drawn

        return token

    def answer(values: Mapping[str, Any]) -> str:
        said = [str(each["output"]) for each in values["examples"]]
        return canary if canary in said else (said or list(others))[0]

    chain = RunnableLambda(answer) if member is None else member
    if case.base is not None:
        selector = PoissonExampleSelector(store, case.members, shots=_SHOTS)
    else:
        selector = PoissonExampleSelector(store, calls=case.members, pad_to=case.members)
    votes_alone = isinstance(case.aggregator, LabelVote)
    at_once = 1 if member is None else None
    # What an empty bucket says counts: so every other member agrees, whatever owners it drew.
    ensemble = PrivateEnsemble(
        selector, None if votes_alone else chain, count_empty=case.base is not None, max_concurrency=at_once
    )

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
