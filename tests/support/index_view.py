"""The prefix index of a running suite as a router reads it, and as the KV manager's own map has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from redis.asyncio import Redis

from common.contracts import index_format
from common.contracts.hashing import block_digests, block_hash_of, root_digest
from common.contracts.types import PoolIdentity
from common.wire.identity_codec import identity_from_proto
from common.wire.packing import pack_hashes
from quire.inference.v1 import inference_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2
from tests.support.suite import PATIENCE, Suite


async def identity_of(suite: Suite) -> PoolIdentity:
    """Return the identity of the suite's pool."""
    return identity_from_proto((await suite.inference.GetModel(pb.GetModelRequest(), timeout=PATIENCE)).identity)


def _until_missing(entry: tuple[int, int], held: Sequence[set[tuple[int, int]]]) -> int:
    return next((position for position, entries in enumerate(held) if entry not in entries), len(held))


class Index:
    """The index as a router reads it, key by key, and the manager's own map of the same block hashes."""

    def __init__(self, suite: Suite, redis: Redis, identity: PoolIdentity) -> None:
        self._suite, self._redis, self._identity = suite, redis, identity
        self._root = root_digest(identity.model_fingerprint, identity.tokenizer_fingerprint, identity.block_size)

    async def owners(self) -> dict[str, tuple[int, int]]:
        """Return slot and generation of each worker."""
        found = {}
        for slot in range(8):
            fields = await self._redis.hgetall(index_format.slot_key(self._identity.namespace, slot))
            owner = index_format.owner_from_fields(cast("dict[bytes, bytes]", fields))
            if owner is not None:
                found[owner.worker_id] = (slot, owner.generation)
        return found

    async def hits(self, tokens: Sequence[int]) -> dict[str, int]:
        """Return for each worker how many leading blocks the index has."""
        keys = list(map(block_hash_of, block_digests(self._root, tokens, self._identity.block_size)))
        values = await self._redis.mget([index_format.prefix_key_root(self._identity.namespace) + key for key in keys])
        held = [set(index_format.unpack_entries(cast("bytes", value or b""))) for value in values]
        owners = await self.owners()
        return {name: _until_missing(entry, held) for name, entry in owners.items()}

    async def manager_hits(self, tokens: Sequence[int]) -> dict[str, int]:
        """Return the same from the manager's own map."""
        keys = list(map(block_hash_of, block_digests(self._root, tokens, self._identity.block_size)))
        request = kvmanager_pb2.LookupRequest(block_hashes=pack_hashes(keys), num_tokens=len(tokens) + 1)
        matches = (await self._suite.manager.Lookup(request, timeout=PATIENCE)).matches
        return {match.worker_id: match.hit_blocks for match in matches}

    async def number(self, key: str) -> int:
        """Return the value of a counter, 0 when it is absent."""
        return int(await self._redis.get(key) or 0)
