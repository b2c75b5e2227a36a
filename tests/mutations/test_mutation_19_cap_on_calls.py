"""Mistake 19: a cap on calls, accounted as if an owner only added one. Whoever comes may displace somebody else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from owner_laws import Owners, check_calls

from langchain_dpicl import PoissonExampleSelector
from langchain_dpicl.privacy.choice import Crowd

OWNERS: Owners = (("ann", 1), ("bob", 2), ("cec", 1))
CAP = {"calls": 2, "max_calls": 2}


class AccountedAsAdded(PoissonExampleSelector):
    """The mutant: calls of one owner each are all that it looks at."""

    def crowd(self, rate: float, owners: int | None) -> Crowd:
        return replace(super().crowd(rate, owners), own_calls=self.calls is not None)


def ann_or_not(owners: frozenset[str]) -> str:
    return "yes" if "ann" in owners else "no"


def check(kind: type[PoissonExampleSelector]) -> None:
    """Exact enumeration of whole releases: every coin and priority of the selector, every draw of both votes; with and
    without each owner, both directions, against the profile that the selector's options ask for. All owners at once
    are more than the cap, at a rate of 1 in every release."""
    for rate in (0.9, 1.0):
        check_calls(ann_or_not, OWNERS, rate, CAP, kind)


def test_19_a_cap_accounted_as_add_or_remove_is_caught() -> None:
    check(PoissonExampleSelector)
    with pytest.raises(AssertionError, match="is claimed"):
        check(AccountedAsAdded)
