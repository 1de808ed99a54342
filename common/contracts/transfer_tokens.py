"""Tokens with which one worker fetches blocks from another: the manager makes them, the source verifies them.

    serve key = HMAC(pool key, "quire-transfer-v1" || public incarnation of the source)                    32 bytes
    token     = HMAC(serve key, version || destination || source's incarnation || expiry || SHA-256(contents)) 16 bytes
    contents  = block hashes, 16 bytes each || where the pool has groups of layers, the group of each, a byte each

The source has its serve key from the manager (`AttachOk`), and keeps nothing else. So every manager of a pool makes
tokens that hold, and all of them end with the source's incarnation. A token allows a list of contents in its order, to
one destination. HMAC is HMAC-SHA-256.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from common.contracts.hashing import group_in, hash_in
from common.contracts.limits import PEER_TOKEN_DRIFT_SECONDS
from common.contracts.types import BlockHash

TOKEN_BYTES: Final = 16
SERVE_KEY_BYTES: Final = 32
_SERVE_KEY_VERSION: Final = b"quire-transfer-v1"
_TOKEN_VERSION: Final = b"quire-transfer-token-v1"
_KEPT_KEYS: Final = 2


class TokenRefusal(Enum):
    """Why a token does not hold, in words."""

    NO_KEY = "the source has no key of a manager yet"
    FOREIGN = "no key of this source makes the token for this worker, these incarnations, this end and these blocks"
    EXPIRED = "the token has expired"


@dataclass(frozen=True, slots=True)
class TokenScope:
    """What a token allows: the worker `destination` fetches what has these `keys`, in this order, until `expires`.

    The incarnations are the public ones, 16 bytes each; `expires` is in unix seconds.
    """

    destination: str
    incarnation: bytes
    source_incarnation: bytes
    expires: int
    keys: Sequence[BlockHash]


def serve_key_of(pool_key: bytes, source_incarnation: bytes) -> bytes:
    """Return the key of one source in its public incarnation. `pool_key` is QUIRE_POOL_KEY, or `drawn_pool_key`."""
    return hmac.digest(pool_key, _SERVE_KEY_VERSION + source_incarnation, "sha256")


def drawn_pool_key(draw_bytes: Callable[[int], bytes]) -> bytes:
    """Return what a manager without QUIRE_POOL_KEY uses in its place. Its tokens end with the manager's process.

    It is for suites on loopback. `draw_bytes` is `secrets.token_bytes`.
    """
    return draw_bytes(SERVE_KEY_BYTES)


def make_token(serve_key: bytes, scope: TokenScope) -> bytes:
    """Return the 16 bytes that allow what the scope says."""
    return hmac.digest(serve_key, _message(scope), "sha256")[:TOKEN_BYTES]


def verify_token(serve_keys: Iterable[bytes], scope: TokenScope, token: bytes, now: float) -> TokenRefusal | None:
    """Return why a token does not hold at `now` (unix seconds); None when it does. Every token takes the same time."""
    keys = tuple(serve_keys)
    if not keys:
        return TokenRefusal.NO_KEY
    message = _message(scope)
    made = [hmac.digest(key, message, "sha256")[:TOKEN_BYTES] for key in keys]
    if not sum(hmac.compare_digest(each, token) for each in made):  # all of them are compared
        return TokenRefusal.FOREIGN
    return TokenRefusal.EXPIRED if now > scope.expires + PEER_TOKEN_DRIFT_SECONDS else None


class ServeKeys:
    """The serve keys that a source accepts: the last two that managers gave it. Threads may share it.

    A manager that draws its key has another one after a restart, and tokens of before are still on their way.
    """

    def __init__(self) -> None:
        self._keys: tuple[bytes, ...] = ()

    def note_key(self, serve_key: bytes) -> None:
        """Take the key of a new session; b"" is none. Called by one thread."""
        if serve_key:
            self._keys = (serve_key, *(each for each in self._keys if each != serve_key))[:_KEPT_KEYS]

    def forget_keys(self) -> None:
        """Accept no token of before: the source begins a new incarnation."""
        self._keys = ()

    def accepted_keys(self) -> tuple[bytes, ...]:
        return self._keys


def _message(scope: TokenScope) -> bytes:
    destination = scope.destination.encode()
    hashes, groups = b"".join(map(hash_in, scope.keys)), bytes(map(group_in, scope.keys))
    contents = hashes + groups if any(groups) else hashes
    return b"".join(
        (
            _TOKEN_VERSION,
            struct.pack("<II", len(destination), len(scope.incarnation)),
            destination,
            scope.incarnation,
            struct.pack("<I", len(scope.source_incarnation)),
            scope.source_incarnation,
            struct.pack("<QI", scope.expires, len(hashes)),
            hashlib.sha256(contents).digest(),
        )
    )
