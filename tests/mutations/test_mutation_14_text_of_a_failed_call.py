"""Mistake 14: a private text is returned when a call fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl import MembersAbstained, NoisyVote, ReleaseFailed
from langchain_dpicl.release import transaction
from langchain_dpicl.release.sealed import SealedRelease
from langchain_dpicl.release.transaction import Charged

Patch = pytest.MonkeyPatch
Make = Callable[..., Any]
LABELS = ["Positive", "Negative"]


def quoting(values: dict[str, Any]) -> str:
    """A member whose error quotes its examples."""
    raise RuntimeError(f"cannot read {[example['input'] for example in values['examples']]}")


def rambling(values: dict[str, Any]) -> str:
    """A member that answers with its examples, and no label."""
    return f"I was shown {[example['input'] for example in values['examples']]}"


class Breaking(NoisyVote):
    """An aggregator whose error quotes the members' outputs."""

    def aggregate(self, outputs: Any, parameter: float, randomness: Any) -> Any:
        raise ValueError(f"cannot count {outputs}")


def check(sealed_of: Make, budget_of: Make, canary: str, canary_free: Callable[..., None]) -> None:
    """A canary in every private text: members that raise, members that answer nonsense, an aggregator that raises. What
    comes out is no answer with the canary, and no error that shows it: in its message, its cause, its context, its
    notes, or the locals of the package's frames that it passed."""
    budget = budget_of()
    for member, vote in (
        (quoting, NoisyVote(LABELS)),
        (rambling, NoisyVote(LABELS)),
        (rambling, Breaking(LABELS)),
    ):
        sealed = sealed_of(member, vote=vote, budget=budget)
        error: Exception | None = None
        try:
            answer = sealed.invoke({"input": "how is it?"})
        except Exception as raised:
            error, answer = raised, None
        assert canary not in repr(answer), "a private text is the answer"
        assert isinstance(error, MembersAbstained | ReleaseFailed), (
            "what is raised is not one of the two constant errors"
        )
        canary_free(error, frames=True)


def the_error_passes(work: Any, shown: Any = ()) -> Any:
    """The mutant: whatever is raised on the private side goes to the caller."""
    return (yield from work)


def the_error_is_the_cause(work: Any, shown: Any = ()) -> Any:
    """The mutant: a constant error, raised from the private one."""
    try:
        return (yield from work)
    except Exception as error:
        raise ReleaseFailed from error


def within_the_except_block(work: Any, shown: Any = ()) -> Any:
    """The mutant: a constant error that hides its context, and has it all the same."""
    try:
        return (yield from work)
    except Exception:
        raise ReleaseFailed from None


def a_members_own_answer(self: SealedRelease, charged: Charged) -> Any:
    """The mutant: where no label can be released, what a member said."""
    (aggregator, vector), line = charged.ready, charged.request.line
    outputs = yield from self.ensemble.outputs(charged.request.asked, line.rate, query=vector)  # not encoded
    release = aggregator.aggregate(outputs, line.parameter, self._randomness)
    said = [output for output in outputs if isinstance(output, str)]
    return max(said, key=len) if release is None and said else release  # a bucket may be empty, not all


MUTANTS = [
    (the_error_passes, "not one of the two constant errors"),
    (the_error_is_the_cause, "a cause carries"),
    (within_the_except_block, "a context carries"),
    (a_members_own_answer, "a private text is the answer"),
]


@pytest.mark.parametrize(("mutant", "says"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_14_a_private_text_of_a_failed_call_is_caught(
    mutant: Callable[..., Any],
    says: str,
    sealed_of: Make,
    budget_of: Make,
    canary: str,
    canary_free: Callable[..., None],
    monkeypatch: Patch,
) -> None:
    check(sealed_of, budget_of, canary, canary_free)
    if mutant is a_members_own_answer:
        monkeypatch.setattr(SealedRelease, "work", mutant)
    else:
        monkeypatch.setattr(transaction, "guarded", mutant)
    with pytest.raises(AssertionError, match=says):
        check(sealed_of, budget_of, canary, canary_free)
