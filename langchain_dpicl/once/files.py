"""The files of what was released once: one JSON object each, which is public. No pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from langchain_dpicl.budget import Receipt
from langchain_dpicl.durable import replacing, sync_folder, writing
from langchain_dpicl.errors import InvalidParameter

T = TypeVar("T")

RECEIPT = TypeAdapter(Receipt)
"""The reader of a receipt in a file."""


def write_public(path: str | Path, form: str, content: Mapping[str, Any]) -> None:
    """Write a file of this format, which replaces an older one as a whole. Raises `InvalidParameter`."""
    text = json.dumps({"format": form, **content}, ensure_ascii=False)
    with writing("path", path):
        with replacing(Path(path), mode=0o644) as file:
            file.write(text.encode("utf-8", "surrogatepass"))
        sync_folder(Path(path))


def read_public(path: str | Path, form: str, words: str, read: Callable[[dict[str, Any]], T]) -> T:
    """Return what ``read`` makes of a file of this format. Raises `InvalidParameter` for any other, in these words."""
    reason = words
    try:
        content = json.loads(Path(path).read_bytes().decode("utf-8", "surrogatepass"), parse_constant=int)
        if content["format"] == form:
            return read(content)
    except OSError as error:
        reason = f"{words} that can be read ({error.strerror or type(error).__name__})"
    except Exception:  # whatever a damaged file makes its readers raise
        pass
    raise InvalidParameter("path", str(path), reason)
