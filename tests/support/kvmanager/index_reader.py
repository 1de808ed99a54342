"""Reads the whole prefix index, key by key; a router looks up single hashes only."""

from __future__ import annotations

from redis.asyncio import Redis

from common.contracts import index_format
from common.contracts.types import BlockHash


async def index_members(redis: Redis, namespace: str, slot: int, generation: int) -> set[BlockHash]:
    """Return every hash with an entry of a slot and generation."""
    root, found = index_format.prefix_key_root(namespace), set()
    async for key in redis.scan_iter(count=1000):
        value = await redis.get(key) if key.startswith(root) else None
        if isinstance(value, bytes) and (slot, generation) in index_format.unpack_entries(value):
            found.add(BlockHash(key[len(root) :]))
    return found
