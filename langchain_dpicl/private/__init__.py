"""The private boundary: what keeps private input inside, and the one place where exceptions end.

Here stand the classes by which the package's own objects say what becomes of them if a chain is copied for a call.
Copying lies below the layers of these objects, and knows them by these bases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from langchain_dpicl.errors import UnsafeConfigurationError


class Closed:
    """Guards what it holds: checks do not look into it, and every copy of a chain shares it."""


class Withheld:
    """Is in no copy of a chain: a chain that reaches it is refused."""

    withheld: ClassVar[str] = ""
    """Why, and what helps: how a refusal goes on."""


class PrivateRecords(Withheld, Closed):
    """Holds private records."""

    withheld = (
        "every member would read the same owners' exemplars there; a member gets its own as `examples`, by the "
        "selector, or by store.as_vectorstore()"
    )


class Released(Withheld):
    """Gives what is released, and makes releases by ``release``, or by itself."""

    withheld = (
        "it makes releases, and each call would be charged for one. Ask it before, and pass on what it gives: "
        "RunnablePassthrough.assign(found=release) | (ensemble | DPAggregate(...))"
    )


class Accounting(Withheld):
    """Charges releases, or knows what was charged."""

    withheld = "only a release charges it. What is left of it, if a member is to know, is a part of the input"


class OwnBucket:
    """Gives a member the exemplars of its own bucket alone.

    A call's copy of a chain has one of its own, which holds the call's bucket: a public call's is empty, or public.
    """

    own_bucket: Sequence[dict[str, Any]] | None = None
    """The bucket of the call in whose copy of a chain this is; None outside of all copies."""

    def in_call(self) -> OwnBucket:
        """Return the object that a call's copy of a chain has in its place, but for the bucket."""
        return self

    def bucket_here(self) -> Sequence[dict[str, Any]]:
        """The call's bucket. Raises `UnsafeConfigurationError` outside of a call."""
        if self.own_bucket is None:
            raise UnsafeConfigurationError(
                "a member's documents exist within a release alone: give the app to PrivateEnsemble(selector, app), "
                "or the chain to wrap_rag, and invoke the release. To look into the store yourself, use its own methods"
            )
        return self.own_bucket
