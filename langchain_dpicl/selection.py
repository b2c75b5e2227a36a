"""Poisson selection by owner: the sampling that makes the guarantee true.

Each owner flips its own coin (probability ``rate``) and, if in, draws its own member uniformly from ``members`` and
its own priority within that member's bucket. Every draw is independent of every other owner, so adding or removing one
owner changes one member's bucket and nothing else: that is the whole reason why an aggregator only has to survive the
replacement of one member's output. Therefore nothing here ever chunks the sample, fixes its size or moves an owner
from one bucket to another.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
from langchain_core.example_selectors import BaseExampleSelector

from langchain_dpicl.boundary import current_bucket
from langchain_dpicl.errors import InvalidParameter, InvalidRecords, PrivacyWarning, UnsafeConfigurationError
from langchain_dpicl.privacy import checks
from langchain_dpicl.privacy.noise import Randomness, SecureRandomness
from langchain_dpicl.store import ExemplarStore


class Examples(list[dict[str, Any]]):
    """One member's exemplars, as mappings. Private: ``repr`` and ``str`` show their number alone.

    A prompt template's ``{examples}`` shows input and output as text, one ``Key: value`` line each, with a blank line
    between exemplars.
    """

    def __init__(self, items: Iterable[dict[str, Any]] = (), input_key: str = "input", output_key: str | None = None):
        super().__init__(items)
        self.input_key = input_key
        self.output_key = output_key

    def __format__(self, spec: str) -> str:
        return "\n\n".join(
            "\n".join(f"{key.capitalize()}: {exemplar[key]}" for key in (self.input_key, self.output_key) if key)
            for exemplar in self
        )

    def __repr__(self) -> str:
        return f"<{len(self)} private examples>"

    __str__ = __repr__

    def __reduce__(self) -> NoReturn:
        raise UnsafeConfigurationError("private examples are not pickled or copied")


class PoissonExampleSelector(BaseExampleSelector):
    """Poisson sampling of owners into the buckets of N members.

    Parameters
    ----------
    store
        The private exemplars.
    members
        N, the number of parallel calls; at least 2.
    shots, rate
        Give one. ``rate`` is q, an owner's chance to take part in one release. ``shots`` is the expected number of
        owners per member, and then q = members * shots / number of owners now; a budget that has been opened with
        another q keeps its own, however the store has grown since. More members with fewer shots give a better signal
        at the same q.
    max_exemplars
        A public cap on a bucket's size, so that prompts fit the model's context; the owners' own random priorities
        decide who stays. Default: twice the expected size, at least 4 more than it.
    exemplars_per_owner
        How many of a sampled owner's exemplars enter, drawn by the owner's own coins. Default 1.

    Sampled buckets are private; they are meant for `PrivateEnsemble` alone. As a LangChain ``BaseExampleSelector``, for
    instance in a ``FewShotPromptTemplate`` within the member chain, `select_examples` gives that member's own bucket.
    Called outside of a sealed release it draws one fresh bucket and warns, since such a selection is private and not
    accounted.
    """

    def __init__(
        self,
        store: ExemplarStore,
        members: int,
        *,
        shots: int | None = None,
        rate: float | None = None,
        max_exemplars: int | None = None,
        exemplars_per_owner: int = 1,
    ) -> None:
        if not isinstance(store, ExemplarStore):
            raise InvalidParameter("store", type(store).__name__, "an ExemplarStore")
        self.store = store
        self.members = checks.whole("members", members, at_least=2)
        self.exemplars_per_owner = checks.whole("exemplars_per_owner", exemplars_per_owner)
        if (shots is None) == (rate is None):
            raise InvalidParameter("shots" if shots is not None else "rate", shots, "exactly one of shots and rate")
        owners = store.owner_count
        if owners == 0:
            raise InvalidRecords("the store is empty: there is nobody to sample")
        self.rate_is_explicit = rate is not None
        self.expected_owners: int | None = None  # of one sample, where that was asked for: as public as ``shots``
        if shots is not None:
            shots = checks.whole("shots", shots)
            if members * shots > owners:
                raise InvalidParameter(
                    "shots", shots, f"members * shots must not exceed the number of owners ({owners})"
                )
            self.expected_owners = members * shots
            self.rate = self.expected_owners / owners
        else:
            self.rate = checks.probability("rate", rate)
        expected = self.rate * owners * self.exemplars_per_owner / members
        if max_exemplars is None:
            max_exemplars = math.ceil(max(2 * expected, expected + 4))
        self.max_exemplars = checks.whole("max_exemplars", max_exemplars)
        self._randomness: Randomness = SecureRandomness()

    def sample(self, rate: float | None = None) -> list[Examples]:
        """N buckets, some perhaps empty, for one release. Private. Cost grows with the number of owners sampled.

        ``rate`` is the plan's q where a budget has fixed it; default: the selector's own.
        """
        draw = self._randomness
        with self.store.lock:
            chosen = draw.coin_positions(self.store.owner_count, self.rate if rate is None else rate)
            member_of = draw.integers(self.members, len(chosen))
            priority = draw.uniforms(len(chosen))
            rows, position = self.store.rows_of(chosen)
            order_within = draw.uniforms(len(rows))
            # One owner's rows together, in its own random order; owners of one bucket by their own priorities.
            order = np.lexsort((order_within, position, priority[position], member_of[position]))
            rows, position = rows[order], position[order]
            rows, bucket = _first_of_each(rows, position, self.exemplars_per_owner, member_of[position])
            rows, bucket = _first_of_each(rows, bucket, self.max_exemplars, bucket)
            exemplars = self.store.read(rows)
        buckets = [Examples((), self.store.input_key, self.store.output_key) for _ in range(self.members)]
        for exemplar, member in zip(exemplars, bucket.tolist(), strict=True):
            buckets[member].append(exemplar)
        return buckets

    # -- LangChain's selector -----------------------------------------------------------------------------------------

    def add_example(self, example: dict[str, str]) -> Any:
        """Add one private exemplar, its own owner, to the store."""
        return self.store.add([example])[0]

    def select_examples(self, input_variables: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Within a member: this member's bucket. Elsewhere: one fresh Poisson bucket, with a `PrivacyWarning`."""
        bucket = current_bucket()
        if bucket is not None:
            return list(bucket)
        warnings.warn(
            "select_examples outside of a sealed release returns private examples, and no budget counts it; "
            "use it within the member chain of a PrivateEnsemble",
            PrivacyWarning,
            stacklevel=2,
        )
        return list(self.sample()[0])

    def __repr__(self) -> str:
        return (
            f"PoissonExampleSelector(members={self.members}, rate={self.rate:.6g}, max_exemplars={self.max_exemplars})"
        )


def _first_of_each(
    rows: np.ndarray[Any, np.dtype[np.int64]],
    group: np.ndarray[Any, np.dtype[np.int64]],
    limit: int,
    keep: np.ndarray[Any, np.dtype[np.int64]],
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
    """The first ``limit`` rows of each run of equal ``group``, and ``keep`` at those rows."""
    if not len(rows):
        return rows, keep
    starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    rank = np.arange(len(rows)) - np.repeat(starts, np.diff(np.concatenate([starts, [len(rows)]])))
    inside = rank < limit
    return rows[inside], keep[inside]
