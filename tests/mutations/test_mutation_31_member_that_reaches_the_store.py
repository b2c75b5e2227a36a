"""Mistake 31: a member that reaches the store, past its own bucket. One owner's record then moves every output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from moments import exemplars_of

from langchain_dpicl import PoissonExampleSelector, PrivateEnsemble, UnsafeConfigurationError
from langchain_dpicl.budget.records import Records
from langchain_dpicl.calls import shut
from langchain_dpicl.private.boundary import run_private
from langchain_dpicl.private.pickling import Pickler
from langchain_dpicl.store.database import StoreDatabase

MEMBERS, RECORD = 20, 7
HELD: dict[str, Any] = {}

Member = Callable[[dict[str, Any]], str]


def by_name(store: Any) -> Member:
    """The store stands in the function's closure."""
    return lambda values: str(exemplars_of(store)[RECORD]["input"])


def by_selector(store: Any) -> Member:
    """The selector does, which has the store."""
    selector = PoissonExampleSelector(store, MEMBERS, rate=1.0, max_exemplars=80)
    return lambda values: "; ".join(each["input"] for bucket in selector.sample(rate=1.0) for each in bucket)


def by_chance(store: Any) -> Member:
    """A way that no copy of the chain exchanges."""
    HELD["store"] = store

    def member(values: dict[str, Any]) -> str:
        held = getattr(sys.modules[__name__], "".join(["H", "ELD"]))["store"]
        return str(exemplars_of(held)[RECORD]["input"])

    return member


def said(make: Callable[[Any], Member], store: Any) -> list[str]:
    """What members say who have no example at all: nothing if the ensemble is refused."""
    selector = PoissonExampleSelector(store, MEMBERS, rate=1.0, max_exemplars=80)
    try:
        ensemble = PrivateEnsemble(selector, make(store))
    except UnsafeConfigurationError:
        return []
    found = run_private(ensemble.copies, [ensemble.public_request({})] * MEMBERS, max_concurrency=4)
    return [each for each in found if isinstance(each, str)]


def opened(patch: pytest.MonkeyPatch) -> None:
    """The mutant's store and its database are open within calls."""
    patch.setattr(shut, "check_records", lambda: None)
    patch.setattr(StoreDatabase, "_check", lambda self: None)


def sharing_selectors(honest: Any) -> Any:
    """The mutant's copies share the user's selector."""

    def persistent_id(self: Pickler, obj: Any) -> Any:
        return self._put(obj) if isinstance(obj, PoissonExampleSelector) else honest(self, obj)

    return persistent_id


@pytest.mark.parametrize("make", [by_name, by_selector, by_chance])
def test_31_a_member_that_reaches_the_store_is_caught(
    make: Any, store_of: Any, records: Any, monkeypatch: pytest.MonkeyPatch, canary: str
) -> None:
    store = store_of([*records(RECORD), {"input": canary, "output": "Negative", "owner": "alder"}, *records(30)[8:]])
    assert said(make, store) == []
    with monkeypatch.context() as patch:
        opened(patch)
        found = said(make, store)
        assert (make is by_chance) == (found == [canary] * MEMBERS), "only the copies stand before the others"
    with monkeypatch.context() as patch:
        patch.setattr(Pickler, "_meet", lambda *_: None)
        patch.setattr(Pickler, "persistent_id", sharing_selectors(Pickler.persistent_id))
        assert said(make, store) == [], "the store is shut all the same"
        opened(patch)
        found = said(make, store)
        assert len(found) == MEMBERS
        assert all(canary in each for each in found), "the mutant's members all say the owner's record"


def test_31_candidates_that_name_a_release_are_caught(
    store_of: Any, records: Any, sealed_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were published without noise, and each cost a charge."""
    release = sealed_of(lambda values: "Positive", return_receipt=True)
    chain = RunnableLambda(lambda values: str(release.invoke({"input": values["input"]})))
    with pytest.raises(UnsafeConfigurationError, match="SealedRelease: it makes releases"):
        release.ensemble.public_chain(chain, 1)
    monkeypatch.setattr(Pickler, "_meet", lambda *_: None)
    copies, *_ = release.ensemble.public_chain(chain, 1)
    question = [release.ensemble.public_request({"input": "a question"})]
    assert not isinstance(run_private(copies, question, max_concurrency=1)[0], str), "a release is shut there"
    opened(monkeypatch)
    monkeypatch.setattr(shut, "check_open", lambda: None)
    monkeypatch.setattr(Records, "_check", lambda self: None)
    (found,) = run_private(copies, question, max_concurrency=1)
    assert "Positive" in str(found), "the mutant's candidate is a release"
    assert release.budget.spent() == 1
