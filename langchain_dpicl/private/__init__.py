"""The private boundary: what keeps private input inside, and the one place where exceptions end.

Here stand the classes by which the package's own objects say what becomes of them if a chain is copied for a call.
Copying lies below the layers of these objects, and knows them by these bases.
"""

from __future__ import annotations

from typing import Any, ClassVar


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


class OwnBucket:
    """Gives a member the exemplars of its own bucket alone. It selects nothing in a public call."""

    def in_call(self) -> Any:
        """What a call's copy of a chain has in its place."""
        return self
