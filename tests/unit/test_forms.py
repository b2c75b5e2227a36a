"""No form of keeping something carries it from one call to another, to a public chain or to a later release.

Every copy of a chain is its own (`langchain_dpicl.private.copy`). A form is refused when copies are to be made, or its
copies share nothing, or the threat model lists it among what stays shared.
"""

from __future__ import annotations

from typing import Any

import forms
import pytest
from forms import FORMS
from langchain_core.runnables import Runnable, RunnableLambda

from langchain_dpicl.errors import UnsafeConfigurationError
from langchain_dpicl.private.copy import Pristine

pytestmark = pytest.mark.own_models
REFUSED = {
    "a generator",
    "a table in memory",
    "a queue",
    "a lock",
    "an event",
    "an open file",
    "an object that is pickled by its name",
    "a hook of a client",
}


def chain_of(step: Any) -> Runnable[Any, Any]:
    return step if isinstance(step, Runnable) else RunnableLambda(step)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPICL_KEPT", raising=False)


@pytest.mark.parametrize("name", FORMS)
def test_no_form_carries_anything_to_another_member_a_public_chain_or_the_next_release(name: str) -> None:
    step = FORMS[name]()
    if name in REFUSED:
        with pytest.raises(UnsafeConfigurationError, match=r"share=|of its own"):
            Pristine(chain_of(step))
        return
    member = Pristine(chain_of(step))
    if name == "a read only array that is opened":  # in a copy it stays closed
        with pytest.raises(ValueError, match="WRITEABLE"):
            member.copy().chain.invoke("a secret")
        return
    public = Pristine(chain_of(step) | RunnableLambda(lambda found: found))  # with the same helper
    nothing = member.copy().chain.invoke("a secret")
    readers = [member.copy().chain, public.copy().chain, Pristine(chain_of(step)).copy().chain]
    found = [reader.invoke("another") for reader in readers]
    if name.startswith("listed"):
        assert "a secret" in found, "it is no longer shared: take it off the list"
    else:
        assert found == [nothing] * 3, "a copy has what another one kept"


def test_the_forms_keep_something_where_nothing_is_copied() -> None:
    """Else none of them would show anything."""
    for name, make in FORMS.items():
        chain = chain_of(make())
        first, second = chain.invoke("one text"), chain.invoke("two")
        assert first != second or name == "a context variable", name  # a context variable lives in its context


def test_there_are_enough_forms() -> None:
    assert len([name for name in FORMS if not name.startswith("listed")]) >= 60
    assert forms.KEPT is not None
