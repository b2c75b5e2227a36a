"""Optional parts, each behind an extra of the package: the one place that imports them by name."""

from __future__ import annotations

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
        return import_module(module)
    except (ImportError, OSError) as error:  # a native library that does not load is an OSError
        cause = str(error)
    raise MissingExtra(module, extra, cause)
