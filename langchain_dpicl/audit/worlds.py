"""The two neighbouring data sets of an audit, each with the product's own release on it.

``SyntheticWorld``: the members' answers are written down; the owner's coin, the aggregator or the token's mixing, and
all randomness are the product's. ``OwnerWorld``: a real store with real owners, of whom the canary is one or not, the
real selector, the real ensemble around a member chain, and the real aggregator (for tokens: the real draw of owners for
a token and the real private answer).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import Runnable, RunnableLambda
from numpy.typing import NDArray

from langchain_dpicl.audit.cases import Case, MemberCase, TokenCase
from langchain_dpicl.decoding.answer import PrivateAnswer, draw_steps, slots_for
from langchain_dpicl.decoding.mixing import Settings, choose, clipped_terms
from langchain_dpicl.decoding.model import Demonstration, Logits
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness
from langchain_dpicl.private import boundary
from langchain_dpicl.release.sealed import PrivateEnsemble
from langchain_dpicl.selection.selector import PoissonExampleSelector
from langchain_dpicl.store import ExemplarStore

QUERY = "which of the two?"
OTHER_OWNERS = 8
_SHOTS = 5
"""Public, as everything but the canary: with the default cap that comes of it the canary is never left out."""
_BLOCK = 4096
_TOKEN = Settings(max_tokens=1, min_tokens=0, top_k=2, shots=1.0, temperature=1.0, cap=1.5, stop=())


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


class SyntheticWorld:
    """The members' answers, or the token's terms, as the case has them; the owner flips the product's coin."""

    def __init__(self, case: Case, *, has_owner: bool, rate: float, randomness: Randomness) -> None:
        self._has_owner = has_owner
        self._rate = rate
        self._randomness = randomness
        self._case = case
        if isinstance(case, MemberCase):
            encode = case.aggregator.encode
            others = [encode(answer) for answer in case.others]
            self._outputs = {True: [encode(case.canary), *others], False: [encode(case.base), *others]}
            return
        self._model = TwoTokens(case.first)
        self._rows = {True: self._model.row(_CANARY)[None, :], False: np.empty((0, 2), np.float32)}

    def release(self) -> Any:
        """One release: the owner, if there is one, takes part with the plan's rate."""
        takes_part = self._has_owner and len(self._randomness.coin_positions(1, self._rate)) > 0
        case, draw = self._case, self._randomness
        if isinstance(case, MemberCase):
            return case.aggregator.aggregate(self._outputs[takes_part], case.parameter, draw)
        terms = partial(clipped_terms, bound=case.bound, temperature=_TOKEN.temperature, cap=_TOKEN.cap)
        return choose(self._model, _TOKEN, [], self._model.row(""), self._rows[takes_part], terms, draw)


class OwnerWorld:
    """A store of ordinary owners, with or without the canary, and the product's path from it to a release.

    ``member`` stands for the member chain of a case with members; by default it gives the canary's answer if the
    canary is among its examples, else the case's base answer.
    """

    def __init__(
        self,
        case: Case,
        *,
        has_owner: bool,
        rate: float,
        randomness: Randomness,
        member: Runnable[Any, Any] | None = None,
    ) -> None:
        answers = ("ordinary", _CANARY) if isinstance(case, TokenCase) else (case.base, case.canary)
        records = [{"input": f"{QUERY} {i}", "output": answers[0], "owner": str(i)} for i in range(OTHER_OWNERS)]
        if has_owner:
            records.append({"input": QUERY, "output": answers[1], "owner": "canary"})
        store = ExemplarStore.from_records(
            records, DeterministicFakeEmbedding(size=2), owner_key="owner", progress=False
        )
        if isinstance(case, TokenCase):
            self.release = partial(_answer_token, case, store, rate, randomness)
            return

        def answer(values: Mapping[str, Any]) -> str:
            return case.canary if any(each["output"] == case.canary for each in values["examples"]) else case.base

        chain = RunnableLambda(answer) if member is None else member
        selector = PoissonExampleSelector(store, case.members, shots=_SHOTS)
        ensemble = PrivateEnsemble(selector, chain, max_concurrency=1 if member is None else None)
        self.release = partial(_ask_members, case, ensemble, rate, randomness)


def _ask_members(case: MemberCase, ensemble: PrivateEnsemble, rate: float, randomness: Randomness) -> Any:
    outputs = ensemble.run({"input": QUERY}, rate, case.aggregator)
    return boundary.in_private(case.aggregator.aggregate, outputs, case.parameter, randomness)


def _answer_token(case: TokenCase, store: ExemplarStore, rate: float, randomness: Randomness) -> int:
    answer = PrivateAnswer(
        TwoTokens(case.first),
        _TOKEN,
        bound=case.bound,
        randomness=randomness,
        slots=slots_for(_TOKEN.shots, rate, OTHER_OWNERS),
        padding=Demonstration("padding", ""),
    )
    draw = partial(
        draw_steps, store, rate, 1, randomness, key=lambda exemplar: exemplar, render=lambda each: str(each["output"])
    )
    answer.open(QUERY, draw)
    token = answer.token([])
    answer.close()
    return token


# -- the language model of the tokens' case ----------------------------------------------------------------------------

_CANARY = "canary"


class TwoTokens:
    """A language model of two tokens: the canary's demonstration is sure of the first, any other changes nothing."""

    name = "two tokens"
    vocabulary = 2
    end_tokens: frozenset[int] = frozenset()

    def __init__(self, first: float) -> None:
        self._zero_shot = np.log(np.array([first, 1.0 - first])).astype(np.float32)

    def row(self, demonstration: str) -> Logits:
        """The logits after this demonstration; "" for none."""
        sure = np.array([1000.0 * (demonstration == _CANARY), 0.0], np.float32)
        return np.asarray(self._zero_shot + sure, np.float32)

    def fits(self, demonstration: str, shared: str, tokens: int) -> bool:
        """Always."""
        return True

    def text(self, tokens: Sequence[int]) -> str:
        """One letter a token."""
        return "".join("ab"[token] for token in tokens)

    def session(self, shared: str, demonstrations: Sequence[Demonstration], *, steps: int) -> TwoTokensSession:
        """One answer."""
        return TwoTokensSession(self, [each.text for each in demonstrations])

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Nothing is kept."""


class TwoTokensSession:
    """The demonstrations of one answer."""

    def __init__(self, model: TwoTokens, texts: list[str]) -> None:
        self._model = model
        self._texts = texts

    def logits(self, rows: Sequence[int], released: Sequence[int]) -> Logits:
        """The zero-shot row, and one for each demonstration."""
        return np.stack([self._model.row(""), *(self._model.row(self._texts[row]) for row in rows)])

    def close(self) -> None:
        """Nothing is kept."""
