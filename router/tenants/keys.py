"""API keys and their hashes.

A key is 256 random bits, so one SHA-256 of it is enough. No guess can find it, and a slow hash would only slow down
requests. Passwords, which people choose, would need one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Final

PREFIX: Final = "quire_"
HASH_SCHEME: Final = "sha256:"
_KEY_BYTES: Final = 32
_HASH: Final = re.compile(r"sha256:[0-9a-f]{64}")
# Hashes are found by so many of their first bytes; the rest is compared in constant time.
_BUCKET_BYTES: Final = 4


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_of(key: str) -> str:
    """Return the hash of a key as the tenants' file has it."""
    return HASH_SCHEME + hashlib.sha256(key.encode()).hexdigest()


def check_hash(text: str) -> str:
    """Return a hash as it is. Raises ValueError for any other text, such as a key itself."""
    if not _HASH.fullmatch(text):
        raise ValueError("expected sha256: and 64 hexadecimal digits, as `quire keys` prints them")
    return text


class KeyTable:
    """Finds the tenant of a key without comparing the key itself.

    A caller who measures times learns at most first bytes of the SHA-256 of a guess, which tell nothing about a key.
    """

    def __init__(self, tenants: Mapping[str, str]) -> None:
        """`tenants` are names by hash."""
        self._buckets: dict[bytes, list[tuple[bytes, str]]] = {}
        for text, name in tenants.items():
            digest = bytes.fromhex(text.removeprefix(HASH_SCHEME))
            self._buckets.setdefault(digest[:_BUCKET_BYTES], []).append((digest, name))

    def find(self, key: str) -> tuple[str, str] | None:
        """Return the tenant's name and the credential of a key, None for an unknown key."""
        digest = hashlib.sha256(key.encode()).digest()
        found = _match(digest, self._buckets.get(digest[:_BUCKET_BYTES], ()))
        return None if found is None else (found, "key " + digest.hex())

    def knows(self, credential: str, tenant: str) -> bool:
        """Return whether a credential that `find` returned is still one of the tenant's."""
        digest = bytes.fromhex(credential.removeprefix("key "))
        return _match(digest, self._buckets.get(digest[:_BUCKET_BYTES], ())) == tenant


def _match(digest: bytes, candidates: Iterable[tuple[bytes, str]]) -> str | None:
    """Return the name beside an equal digest; every candidate is compared."""
    found = None
    for known, name in candidates:
        if hmac.compare_digest(known, digest):
            found = name
    return found
