"""Block hashes: a SHA-256 chain over full blocks of tokens, rooted in everything that K/V content depends on.

    H_k = SHA-256(H_{k-1} || tokens of block k as little-endian int32)
    root = SHA-256(version || model || tokenizer || block size || cache domain || tagged extra keys)

A cache domain is opaque: 0 to 32 bytes that the router derives from the caller. A request's salt narrows it.
Every part of the root is length-prefixed and tagged, so that a cache domain "foo" never collides with an adapter "foo".
A block hash (`BlockHash`) is the first 16 bytes of H_k; the digest of the next block uses the full 32 bytes.

A large block has three partial hashes too, for its leading quarter, half and three quarters. They chain to the hash of
the block before it, so they are of one prefix and one cache domain as well.
"""

from __future__ import annotations

import array
import hashlib
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from common.contracts.types import BlockHash

HASH_VERSION = b"quire-block-hash-v1"
KEY_BYTES = 16
DIGEST_BYTES = 32
MAX_DOMAIN_BYTES = 32
PARTIAL_VERSION: Final = b"quire-partial-block-v1"
PARTIAL_PARTS: Final = 4
"""A partial hash is of one, two or three of so many equal parts of a block."""
PARTIAL_HASHES: Final = PARTIAL_PARTS - 1
MIN_PARTIAL_BLOCK: Final = 64
"""Blocks of fewer slots have no partial hashes."""


def key_of(block_hash: BlockHash, group: int) -> BlockHash:
    """Return what names a content, where the pool has groups of layers: a block's tokens have one in each of them."""
    return BlockHash(block_hash + bytes((group,))) if group else block_hash


def hash_in(key: BlockHash) -> BlockHash:
    """Return the block hash in a key."""
    return BlockHash(key[:KEY_BYTES])


def group_in(key: BlockHash) -> int:
    """Return the group in a key."""
    return key[KEY_BYTES] if len(key) > KEY_BYTES else 0


def root_digest(
    model_fingerprint: str,
    tokenizer_fingerprint: str,
    block_size: int,
    cache_domain: bytes = b"",
    extra_keys: Iterable[tuple[str, str]] = (),
) -> bytes:
    """Return the 32-byte root of a hash chain. `extra_keys` are (tag, value), e.g. ("adapter", "name@version")."""
    digest = hashlib.sha256(HASH_VERSION)
    named = [("model", model_fingerprint), ("tokenizer", tokenizer_fingerprint), ("block_size", str(block_size))]
    parts = [(tag, value.encode()) for tag, value in named]
    parts += [("domain", cache_domain), *(("extra:" + tag, value.encode()) for tag, value in extra_keys)]
    for tag, value in parts:
        for field in (tag.encode(), value):
            digest.update(len(field).to_bytes(4, "little") + field)
    return digest.digest()


def narrowed_domain(cache_domain: bytes, salt: str) -> bytes:
    """Return the part of a cache domain that requests with this salt share, 32 bytes; the domain itself without one."""
    if not salt:
        return cache_domain
    length = len(cache_domain).to_bytes(4, "little")
    return hashlib.sha256(b"quire-salt" + length + cache_domain + salt.encode()).digest()


def little_endian_int32(tokens: Sequence[int]) -> bytes:
    """Pack token ids as little-endian int32; 4 bytes a token."""
    packed = array.array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def next_digest(parent: bytes, block_tokens: Sequence[int]) -> bytes:
    """Return the 32-byte link after `parent` (32 bytes) for one full block of tokens."""
    return hashlib.sha256(parent + little_endian_int32(block_tokens)).digest()


def block_hash_of(digest: bytes) -> BlockHash:
    return BlockHash(digest[:KEY_BYTES])


def block_digests(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Return the 32-byte links of all full blocks of `tokens`, in order; the partial last block has none."""
    return packed_digests(root, little_endian_int32(tokens), block_size)


def packed_digests(root: bytes, packed: bytes, block_size: int) -> list[bytes]:
    """Return the same of tokens that are packed as little-endian int32."""
    digests: list[bytes] = []
    parent, width = root, 4 * block_size
    for end in range(width, len(packed) + 1, width):
        parent = hashlib.sha256(parent + packed[end - width : end]).digest()
        digests.append(parent)
    return digests


def partial_hashes(before: BlockHash, packed: bytes, block_size: int) -> tuple[BlockHash, ...]:
    """Return the hashes of the leading quarter, half and three quarters of a block, as far as its tokens are there.

    `packed` are the block's tokens as little-endian int32. `before` is the hash of the block before it; for a first
    block, that of the root.
    """
    digest, width, found = hashlib.sha256(PARTIAL_VERSION + before), 4 * block_size // PARTIAL_PARTS, []
    for end in range(width, min(len(packed), PARTIAL_HASHES * width) + 1, width):
        digest.update(packed[end - width : end])
        found.append(block_hash_of(digest.digest()))
    return tuple(found)


def all_partial_hashes(
    root: bytes, block_hashes: Sequence[BlockHash], packed: bytes, block_size: int
) -> tuple[BlockHash, ...]:
    """Return the partial hashes of all blocks of a sequence, three a full block; about 2 microseconds each block."""
    found: list[BlockHash] = []
    for index, before in enumerate((block_hash_of(root), *block_hashes)):
        start = 4 * block_size * index
        found += partial_hashes(before, packed[start : start + 4 * block_size], block_size)
    return tuple(found)
