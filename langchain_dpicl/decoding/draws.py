"""Who takes part in which token: the owners of a whole answer, drawn before its first token.

For every token each owner flips a fresh coin of the plan's rate and, if in, shows one exemplar, chosen by its own
randomness. The coins do not look at the text, so those of all tokens may be flipped at once, and the model can read
the demonstrations together. No coin, choice or text depends on another owner's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from langchain_dpicl.decoding.model import Demonstration, LogitsModel
from langchain_dpicl.privacy.noise import Randomness
from langchain_dpicl.store.base import PrivateStore, StoreView

OVERFLOW = 2.0**-40
"""How often a token may have more owners than slots."""


class Keys:
    """Names one store's exemplars for a model's cache, and drops there what the store forgets.

    The keys hold this object itself, so no other store or sampler has equal ones.
    """

    def __init__(self, store: PrivateStore, model: LogitsModel) -> None:
        self._model = model
        self._forgotten: set[int] = set()
        store.on_forget(self._forget)

    def key(self, exemplar: Hashable) -> Hashable:
        """The key of an exemplar's id."""
        return (self, exemplar)

    def _forget(self, ids: Sequence[int]) -> None:
        self._forgotten.update(ids)
        self._model.forget([self.key(i) for i in ids])

    def release(self, demonstrations: Iterable[Demonstration]) -> None:
        """An answer has ended: drop what was forgotten while it held these."""
        forgotten = {self.key(i) for i in self._forgotten}
        if gone := [each.key for each in demonstrations if each.key in forgotten]:
            self._model.forget(gone)


@dataclass(frozen=True)
class Draw:
    """One answer's demonstrations, and for every token the positions of those that take part in it. Private."""

    demonstrations: Sequence[Demonstration] = field(default=(), repr=False)
    steps: Sequence[Sequence[int]] = field(default=(), repr=False)


def draw_steps(
    store: PrivateStore,
    rate: float,
    steps: int,
    randomness: Randomness,
    *,
    key: Callable[[Hashable], Hashable],
    render: Callable[[dict[str, Any]], str | None],
) -> Draw:
    """A fresh Poisson sample of owners for each of so many tokens, one exemplar each.

    ``render`` makes an exemplar's text, or None for one that cannot be used: it then has no part in any token, which
    its owner's own data decide.
    """
    with store.reading() as view:
        rows = [_one_row_each(view, rate, randomness) for _ in range(steps)]
        distinct = np.unique(np.concatenate(rows))
        exemplars, ids = view.read(distinct), view.ids_of(distinct)
    texts = [render(exemplar) for exemplar in exemplars]
    usable = [i for i, text in enumerate(texts) if text is not None]
    place = {int(distinct[i]): position for position, i in enumerate(usable)}
    demonstrations = [Demonstration(key(ids[i]), texts[i] or "") for i in usable]
    return Draw(demonstrations, [[place[row] for row in step.tolist() if row in place] for step in rows])


def _one_row_each(view: StoreView, rate: float, randomness: Randomness) -> NDArray[np.int64]:
    """One exemplar's row for each owner of a fresh sample."""
    owners = view.numbers[randomness.coin_positions(len(view.numbers), rate)]
    rows, owner = view.rows_of(owners)
    order = np.lexsort((randomness.uniforms(len(rows)), owner))
    return rows[order][np.flatnonzero(np.diff(owner[order], prepend=-1))]


@lru_cache(maxsize=64)
def slots_for(shots: float, rate: float, owners: int | None = None) -> int:
    """The least number of slots that a token's sample exceeds with probability below 2^-40.

    The sample is binomial. Its number of owners is taken to be ``owners``, from which the rate was chosen when the plan
    was frozen, or ``shots / rate``: both are public, and what the store holds by now is not.

    What that is worth. A token whose sample is larger takes a further call of the model. The answer's law is the same,
    but whoever counts calls learns something: a release that shows their number as well is (eps, delta')-DP with
    delta' = delta + (1 + e^eps) * P(some token takes a further call), as it differs only there from one that always
    shows one call for each token. P is at most the number of tokens times 2^-40.
    """
    owners = max(1, round(shots / rate)) if owners is None else owners
    slots = min(owners, max(1, int(rate * owners)))
    while slots < owners and bdtrc(slots, owners, min(1.0, rate)) >= OVERFLOW:
        slots += 1
    return slots
