"""Optional parts, each behind an extra of the package: the one place that imports them by name."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from langchain_dpicl.errors import MissingExtra


def require(module: str, extra: str) -> Any:
    """Import a module that an extra brings.

    Raises
    ------
    MissingExtra
        The module is absent, or something that it needs does not load. The message says which and how to install it.
    """
    try:
        with contextlib.nullcontext() if module in sys.modules else _short_spins():
            return import_module(module)
    except (ImportError, OSError) as error:  # a native library that does not load is an OSError
        cause = str(error)
    raise MissingExtra(module, extra, cause)


@contextlib.contextmanager
def _short_spins() -> Iterator[None]:
    """Let idle threads of OpenMP sleep soon, unless the user has set it: a library reads this when it is loaded.

    Threads that spin at barriers slow each other down if anything else needs the cores. Measured on two cores: two
    language models, 50 tokens a second each instead of 250; two processes that embed texts, 22 a second instead of 45.
    Alone they gain nothing.
    """
    if "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = "1000"
    try:
        yield
    finally:
        os.environ.pop("GOMP_SPINCOUNT", None)  # of two threads that load at a time, the other one may have been here
