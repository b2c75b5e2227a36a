"""The private boundary: what keeps private input inside, and the one place where exceptions end.

Here stand the classes by which the package's own objects tell the checks of a chain what they are. A chain may reach
them from anywhere. The checks lie below the layers of these objects, and know them by these bases.
"""

from __future__ import annotations


class Closed:
    """Guards what it holds: checks do not look into it, and every copy of a chain shares it."""


class PrivateRecords(Closed):
    """Holds private records. No chain may reach it."""


class OwnBucket:
    """Gives a member the exemplars of its own bucket alone. It selects nothing in a public call."""


class Released:
    """Gives what is released, and makes releases by ``release``, or by itself."""
