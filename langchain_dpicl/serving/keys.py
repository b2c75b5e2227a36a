"""API keys: 256 random bits, of which the server keeps a hash.

SHA-256 is enough for these: a slow hash protects secrets that can be guessed, and nobody tries 2^256 keys. A key's name
is the principal that its requests are charged to.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from langchain_dpicl.errors import InvalidParameter

if TYPE_CHECKING:
    from starlette.requests import Request

_FORM = "dpicl_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,99}")
_HASH = re.compile(r"[0-9a-f]{64}")


def new_key() -> str:
    """A fresh key."""
    return _FORM + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def check_name(name: str) -> str:
    """A key's name, or `InvalidParameter`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter("name", name, "1 to 100 letters, digits and any of _.@-")
    return name


class Keys:
    """Names and hashes; finds out whose key a request holds.

    Raises `InvalidParameter`, without showing what stands in place of a hash: it may be a key.
    """

    def __init__(self, hashes: Mapping[str, str]) -> None:
        for name, digest in hashes.items():
            check_name(name)
            if not isinstance(digest, str) or not _HASH.fullmatch(digest):
                raise InvalidParameter(f"keys.{name}", "(not shown)", "64 hex digits, as dpicl serve --new-key prints")
        if len(set(hashes.values())) < len(hashes):
            raise InvalidParameter("keys", "(not shown)", "a key of its own for every name")
        self._hashes = dict(hashes)

    def name_of(self, key: str) -> str | None:
        """The name of a key; None for an unknown one. Takes equally long for all of them."""
        given, found = hash_of(key), None
        for name, digest in self._hashes.items():
            if hmac.compare_digest(given, digest):
                found = name
        return found

    def principal(self, request: Request) -> str:
        """The name of the bearer key in a request; 401 without one that is known."""
        from starlette.exceptions import HTTPException

        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        name = self.name_of(key.strip()) if scheme.lower() == "bearer" else None
        if name is None:
            raise HTTPException(
                401, "a known API key is needed: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
            )
        return name
