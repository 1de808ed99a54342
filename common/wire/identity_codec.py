"""A pool's identity, and the differences between two identities, to and from their protos."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.contracts.errors import Mismatch, ProtocolViolation
from common.contracts.limits import MAX_BLOCK_PAGES, MAX_GROUP_LAYERS, MAX_IDENTITY_CHARS, MAX_KV_GROUPS
from common.contracts.types import NO_POOLING, KvGeometry, KvGroup, KvGroupKind, PoolIdentity
from common.wire.enum_codec import group_kind_from_proto, group_kind_to_proto
from quire.kvmanager.v1 import kvmanager_pb2
from quire.types.v1 import types_pb2


def identity_to_proto(identity: PoolIdentity) -> types_pb2.PoolIdentity:
    shape = identity.kv_geometry
    return types_pb2.PoolIdentity(
        model_fingerprint=identity.model_fingerprint,
        tokenizer_fingerprint=identity.tokenizer_fingerprint,
        block_size=identity.block_size,
        hash_version=identity.hash_version,
        arithmetic=identity.arithmetic,
        pooling=identity.pooling,
        kv_geometry=types_pb2.KvGeometry(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim_k=shape.head_dim_k,
            head_dim_v=shape.head_dim_v,
            dtype=shape.dtype,
            window=shape.window,
            values_in_keys=shape.values_in_keys,
            shapes=shape.shapes,
            groups=map(_group_to_proto, shape.groups),
        ),
    )


def identity_from_proto(message: types_pb2.PoolIdentity) -> PoolIdentity:
    """Raises ProtocolViolation when a text is longer than any identity has: it becomes part of keys and messages."""
    shape = message.kv_geometry
    texts = (message.model_fingerprint, message.tokenizer_fingerprint, message.hash_version, message.arithmetic)
    if max(map(len, (*texts, message.pooling, shape.dtype, shape.shapes))) > MAX_IDENTITY_CHARS:
        raise ProtocolViolation(f"a pool's identity has a text of more than {MAX_IDENTITY_CHARS} characters")
    return PoolIdentity(
        model_fingerprint=message.model_fingerprint,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        block_size=message.block_size,
        hash_version=message.hash_version,
        arithmetic=message.arithmetic,
        pooling=message.pooling or NO_POOLING,
        kv_geometry=KvGeometry(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim_k=shape.head_dim_k,
            head_dim_v=shape.head_dim_v,
            dtype=shape.dtype,
            window=shape.window,
            values_in_keys=shape.values_in_keys,
            shapes=shape.shapes,
            groups=_groups_from_proto(shape.groups),
        ),
    )


def _group_to_proto(group: KvGroup) -> types_pb2.KvGroup:
    return types_pb2.KvGroup(
        kind=group_kind_to_proto(group.kind), span=group.span, pages=group.pages, layers=group.layers
    )


def _groups_from_proto(messages: Sequence[types_pb2.KvGroup]) -> tuple[KvGroup, ...]:
    """Raises ProtocolViolation for groups that no pool has: the first one is full, windows and chunks have a span."""
    if len(messages) > MAX_KV_GROUPS:
        raise ProtocolViolation(f"a pool has {len(messages)} groups of layers; expected at most {MAX_KV_GROUPS}")
    found = []
    for place, message in enumerate(messages):
        kind = group_kind_from_proto(message.kind)
        is_full = kind is KvGroupKind.FULL
        if is_full != (not place) or (is_full or kind is KvGroupKind.STATE) != (not message.span):
            what = f"{kind.value} with a span of {message.span}; expected a full group first, and windows with spans"
            raise ProtocolViolation(f"group {place} of a pool is {what}")
        if not 0 < message.pages <= MAX_BLOCK_PAGES or len(message.layers) > MAX_GROUP_LAYERS:
            what = f"{message.pages} pages a block and {len(message.layers)} layers"
            most = f"1 to {MAX_BLOCK_PAGES} pages and at most {MAX_GROUP_LAYERS} layers"
            raise ProtocolViolation(f"group {place} of a pool has {what}; expected {most}")
        found.append(KvGroup(kind, message.span, message.pages, tuple(message.layers)))
    return tuple(found)


def mismatches_to_proto(mismatches: Iterable[Mismatch]) -> list[kvmanager_pb2.IdentityDifference]:
    """Return the differences as the manager sees them: `ours` is the manager's value."""
    return [
        kvmanager_pb2.IdentityDifference(field=each.field, manager=each.ours, worker=each.theirs, flag=each.flag)
        for each in mismatches
    ]


def mismatches_from_proto(messages: Iterable[kvmanager_pb2.IdentityDifference]) -> tuple[Mismatch, ...]:
    """Return the differences as the worker sees them: `ours` is the worker's value."""
    return tuple([Mismatch(each.field, each.worker, each.manager, each.flag) for each in messages])
