"""API keys: 256 random bits, of which the server keeps a hash.

SHA-256 is enough for them: a slow hash protects secrets that can be guessed, and 2^256 keys cannot. A key's name is the
principal that its requests are charged to.
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


def new_key() -> str:
    """Return a fresh key."""
    return "dpicl_" + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """Return the hash that a server keeps of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def check_name(name: str) -> str:
    """Return a key's name, or raise `InvalidParameter`."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,99}", name):
        raise InvalidParameter("name", name, "1 to 100 letters, digits and any of _.@-")
    return name


class ApiKeys:
    """Names and hashes of keys; finds the owner of the key in a request.

    Raises `InvalidParameter`, without showing the value in the place of a hash: it may be a key.
    """

    def __init__(self, hashes: Mapping[str, str]) -> None:
        for name, digest in hashes.items():
            check_name(name)
            if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
                raise InvalidParameter(f"keys.{name}", "(not shown)", "64 hex digits, as dpicl serve --new-key prints")
        if len(set(hashes.values())) < len(hashes):
            raise InvalidParameter("keys", "(not shown)", "a key of its own for every name")
        self._hashes = dict(hashes)

    def name_of(self, key: str) -> str | None:
        """Return the name of a key, or None if it is unknown. Takes equally long for all keys."""
        given, found = hash_of(key), None
        for name, digest in self._hashes.items():
            if hmac.compare_digest(given, digest):
                found = name
        return found

    def principal(self, request: Request) -> str:
        """Return the name of the bearer key in a request. Raises a 401 without a known key."""
        from starlette.exceptions import HTTPException

        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        name = self.name_of(key.strip()) if scheme.lower() == "bearer" else None
        if name is None:
            message = "a known API key is needed: Authorization: Bearer KEY"
            raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})
        return name
