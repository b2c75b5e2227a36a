"""The owners who take part in an answer's tokens, each with one exemplar: a fresh Poisson sample for each token."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from langchain_dpicl.decoding.model import Demonstration, DemonstrationTemplate, LogitsModel, attempt, reads
from langchain_dpicl.errors import InvalidParameter
from langchain_dpicl.privacy.noise import Randomness
from langchain_dpicl.selection import PoissonExampleSelector, Sought
from langchain_dpicl.store.base import Numbers
from langchain_dpicl.store.records import Vectors
from langchain_dpicl.store.view import StoreView

IntArray = NDArray[np.int64]


@dataclass(frozen=True, repr=False)
class Draw:
    """One answer's demonstrations, and for every token the positions of those that take part in it. Private."""

    demonstrations: Sequence[Demonstration] = ()
    steps: Sequence[Sequence[int]] = ()


NOBODY = Draw()


class Exemplars:
    """One store's exemplars as a model's demonstrations, named for its cache, which drops what the store forgets.

    The keys hold this object itself, so no other store or sampler has equal ones.
    """

    def __init__(
        self,
        selector: PoissonExampleSelector,
        model: LogitsModel,
        template: DemonstrationTemplate,
        tokens: int,
    ) -> None:
        self._selector, self._model, self._tokens = selector, model, tokens
        self.store, self.template = selector.store, template
        self._forgotten = set[Hashable]()
        self.padding = Demonstration((self, "padding"), template.padding)
        self.longest = template.padding
        """The longest public demonstration beside which a query must fit."""
        self.store.on_forget(self._forget)

    def _forget(self, ids: Sequence[int]) -> None:
        gone = [(self, i) for i in ids]
        self._forgotten.update(gone)
        self._model.forget(gone)

    def release(self, demonstrations: Iterable[Demonstration]) -> None:
        """An answer has ended: drop what the store forgot while the answer held it."""
        if gone := [each.key for each in demonstrations if each.key in self._forgotten]:
            self._model.forget(gone)

    def asked(self, input: object) -> tuple[Mapping[str, Any], str]:
        """A request's values and its shared text, checked: it has what the template names, and fits the context."""
        near = self._selector.nearest_to
        names = self.template.query_keys
        values = input
        if isinstance(input, str):
            keys = [self.store.input_key]
            if near:
                keys.append(near)
            if len(names) == 1:
                keys.extend(names)
            values = dict.fromkeys(keys, input)
        if not isinstance(values, Mapping):
            raise InvalidParameter("input", type(input).__name__, "a string, or a mapping of names to values")
        shared = self.template.ask(values)
        if near is not None and len(names) == 1:  # one text asks, and is what documents are near to
            values = {near: values[names[0]], **values}
        self._selector.check_query(values)
        if not reads(self._model, self.longest, shared, self._tokens):
            raise InvalidParameter(
                "input",
                f"{len(shared)} characters",
                f"a query in Unicode that leaves room for {self._tokens} tokens and a demonstration",
            )
        return values, shared

    def draw(
        self,
        randomness: Randomness,
        rate: float | None,
        shared: str,
        steps: int,
        query: Vectors | Sought | None = None,
        among: Numbers | None = None,
    ) -> Draw:
        """Draw a fresh Poisson sample of owners for each of so many tokens, with one exemplar for each owner.

        ``query``: what exemplars have to be near to, and to pass; ``among``: the owners who paid, if owners pay.

        An exemplar that the template cannot render, or that does not fit the context, has no part in any token, which
        its owner's own data decide. Without a rate no owner takes part. Private.
        """

        def shown(exemplar: dict[str, Any]) -> str | None:
            text = self.template.show(exemplar)
            return text if reads(self._model, text, shared, self._tokens) else None

        if rate is None:
            return Draw((), [()] * steps)
        sought = self._selector.sought(query)
        with self.store.reading() as view:
            if among is None:
                among = sought.eligible(view)
            rows = [_one_row_each(view, among, sought, rate, randomness) for _ in range(steps)]
            distinct = np.unique(np.concatenate(rows))
            exemplars = view.read(distinct)
        # An error of one owner must not fail the others' answer.
        found = zip(distinct.tolist(), [attempt(shown, exemplar) for exemplar in exemplars], strict=True)
        usable = {row: Demonstration((self, row), text) for row, text in found if text is not None}
        place = {row: position for position, row in enumerate(usable)}
        return Draw(list(usable.values()), [[place[row] for row in step.tolist() if row in place] for step in rows])


def _one_row_each(
    view: StoreView,
    among: Numbers,
    sought: Sought,
    rate: float,
    randomness: Randomness,
) -> IntArray:
    """One exemplar's row for each owner of a fresh sample of these: the nearest that passes, else a random one."""
    owners = among[randomness.coin_positions(len(among), rate)]
    rows, owner, far = sought.rows(view, owners)
    order = np.lexsort((randomness.uniforms(len(rows)), far, owner))
    return rows[order][np.flatnonzero(np.diff(owner[order], prepend=-1))]


@lru_cache(maxsize=64)
def slots_for(shots: float, rate: float, owners: int | None = None) -> int:
    """The least number of slots that a token's sample exceeds with probability below 2^-40.

    The sample is binomial, of ``owners`` owners (from whose number the rate was chosen when the plan was frozen) or of
    ``shots / rate``. Both are public; what the store holds by now is not. Of a gate it is the number of owners whom it
    is expected to let through. If it lets more through for a query, calls may be more, and only their time shows it.

    A token with a larger sample takes a further call of the model. The answer's law is the same, but a release that
    also shows the number of calls is (eps, delta')-DP with delta' = delta + (1 + e^eps) * P(some token takes a further
    call), as only then it differs from a release that always shows one call a token. P is at most 2^-40 times the
    number of tokens.
    """
    if owners is None:
        owners = max(1, round(shots / rate))
    slots = min(owners, max(1, int(rate * owners)))
    while slots < owners and bdtrc(slots, owners, min(1.0, rate)) >= 2.0**-40:
        slots += 1
    return slots
