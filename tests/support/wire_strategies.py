"""Hypothesis strategies for every message of the lease protocol, over the whole range that the wire can carry."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import strategies as st

from common.contracts import lease, transfers
from common.contracts.errors import Mismatch
from common.contracts.types import (
    TRIMMED,
    BlockHash,
    BlockId,
    FinishReason,
    KvGeometry,
    KvGroup,
    KvGroupKind,
    MissReason,
    PoolIdentity,
    SequenceId,
    SequencePhase,
)

T = TypeVar("T")

groups = st.lists(
    st.builds(
        KvGroup,
        st.sampled_from([KvGroupKind.WINDOW, KvGroupKind.CHUNK]),
        st.integers(1, 2**32 - 1),
        st.integers(1, 4096),
        st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple),
    ),
    max_size=3,
).map(lambda runs: (KvGroup(KvGroupKind.FULL, 0, 7, (0, 5)), *runs) if runs else ())

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
text = st.text(max_size=12)
blocks = st.integers(0, 2**31 - 1).map(BlockId)
row_blocks = blocks | st.just(TRIMMED)
hashes = st.binary(min_size=16, max_size=16).map(BlockHash)
sequences = u64.map(SequenceId)


def tuples_of(strategy: st.SearchStrategy[T], max_size: int = 6) -> st.SearchStrategy[tuple[T, ...]]:
    return st.lists(strategy, max_size=max_size).map(tuple)


identities = st.builds(
    PoolIdentity,
    model_fingerprint=text,
    tokenizer_fingerprint=text,
    block_size=st.sampled_from([4, 16, 256]),
    kv_geometry=st.builds(KvGeometry, u32, u32, u32, u32, text, u32, st.booleans(), text, groups),
    hash_version=text,
    arithmetic=text,
)
attaches = st.builds(
    lease.Attach,
    worker_id=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=12),
    incarnation=st.binary(min_size=16, max_size=16),
    session=u64,
    epoch_seen=u64,
    identity=identities,
    num_blocks=st.integers(1, 2**32 - 1),
    address=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=12),
    prefix_caching=st.booleans(),
    max_num_seqs=st.integers(1, 2**32 - 1),
    reset=u64,
    host_frames=u32,
    disk_frames=u32,
    data_address=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=12),
    image_format=st.just(b"") | hashes,
)
retained_blocks = st.builds(
    lambda first, count, priority, seconds: lease.RetainedBlocks(
        first, first + count if count else lease.LAST_BLOCK, priority, seconds
    ),
    st.integers(0, 2**20),
    st.integers(0, 2**20),
    st.integers(0, 100),
    st.floats(0.001, 1e9),
)
reserves = st.builds(
    lease.Reserve,
    sequence=sequences,
    num_tokens=u32,
    max_len=u32,
    priority=st.integers(-(2**31), 2**31 - 1),
    block_hashes=tuples_of(hashes),
    fork_of=st.none() | sequences,
    request_id=text,
    traceparent=text,
    tracestate=text,
    retention=tuples_of(retained_blocks, 3),
    partial_hashes=tuples_of(hashes),
)
seconds = st.just(0.0) | st.floats(1e-9, 1e9)
reports = st.builds(
    lease.Report,
    step=u64,
    reserve=tuples_of(reserves, 3),
    bind=tuples_of(st.tuples(sequences, blocks)),
    seal=tuples_of(st.tuples(blocks, hashes)),
    trim=tuples_of(st.tuples(sequences, u32)),
    returned=tuples_of(blocks),
    preempted=tuples_of(st.tuples(sequences, u32)),
    finished=tuples_of(st.tuples(sequences, st.sampled_from(FinishReason))),
    stalled=st.none() | tuples_of(sequences),
    lease_want=u32,
    computed=tuples_of(st.tuples(sequences, u32)),
    reset=u64,
    partials=tuples_of(st.tuples(hashes, st.tuples(hashes, hashes, hashes))),
    copied=tuples_of(sequences),
    bind_groups=tuples_of(st.integers(0, 255)),
    bind_pages=tuples_of(blocks),
    trim_groups=tuples_of(st.integers(0, 255)),
    ended=tuples_of(st.tuples(u64, st.sampled_from(transfers.TransferEnd))),
    transfer_costs=st.none() | st.builds(transfers.TransferCosts, seconds, seconds, seconds, seconds),
    disk_closed=st.booleans(),
    draining=st.booleans(),
)


def _places(*media: transfers.Medium) -> st.SearchStrategy[transfers.Place]:
    return st.builds(transfers.Place, st.sampled_from(media), blocks)


_BLOCK, _HOST, _DISK = transfers.Medium.BLOCK, transfers.Medium.HOST, transfers.Medium.DISK


peers = st.builds(
    transfers.PeerSource, st.sampled_from(["w1", "w2"]), hashes, text, st.binary(min_size=16, max_size=16), u64
)


@st.composite
def orders(draw: st.DrawFn) -> transfers.Transfer:
    """Saves and fetches; only at depth 0 a block has no parent."""
    depth = draw(st.just(0) | u32)
    saved, fetched = st.tuples(_places(_BLOCK, _HOST), _places(_DISK)), st.tuples(_places(_DISK), _places(_HOST))
    ends = draw(saved | fetched | st.tuples(st.just(transfers.FROM_PEER), _places(_HOST)))
    peer = draw(peers) if ends[0] == transfers.FROM_PEER else None
    return transfers.Transfer(draw(u64), draw(hashes), draw(hashes) if depth else BlockHash(b""), depth, *ends, peer)


batches = st.builds(
    lease.GrantBatch,
    lease_target=u32,
    copy=tuples_of(st.builds(lease.Copy, blocks, blocks, u32)),
    admit=tuples_of(
        st.builds(
            lease.Admit,
            sequence=sequences,
            block_table=tuples_of(blocks),
            n_shared=u32,
            cached_tokens=u32,
            miss_reason=st.sampled_from(MissReason),
            diverged_at=u32,
            decision_id=text,
            runs=tuples_of(tuples_of(row_blocks), 3),
            pages=tuples_of(blocks),
            fetched=st.none() | st.builds(transfers.Fetched, u32, u32, seconds, st.sampled_from(["disk", "worker-1"])),
        )
    ),
    lease=tuples_of(blocks),
    reset=u64,
    preempt=tuples_of(st.builds(lease.Preempt, sequences, text)),
    cancel=tuples_of(sequences),
    tier=tuples_of(st.builds(lease.TierCopy, blocks, blocks, st.booleans())),
    transfers=tuples_of(orders()),
)
rejections = st.builds(
    lease.AttachRejected, text, tuples_of(st.builds(Mismatch, text, text, text, text)), st.booleans()
)


@st.composite
def cached_blocks(draw: st.DrawFn) -> tuple[lease.CachedBlock, ...]:
    """Cached blocks; parent indices are arbitrary, because the wire does not interpret them."""
    count, in_window = draw(st.integers(0, 40)), draw(st.booleans())
    return tuple(
        lease.CachedBlock(
            draw(blocks),
            draw(hashes),
            draw(st.integers(-1, index)),
            draw(u64),
            *((draw(hashes), draw(st.integers(0, 2**31 - 1))) if in_window else ()),
        )
        for index in range(count)
    )


placed = tuples_of(
    st.builds(lease.CachedBlock, blocks, hashes, st.just(-1), u64, hashes, st.integers(0, 2**31 - 1)), 60
).map(lease.CachedBlocks.of)
inventories = st.builds(
    lease.Inventory,
    sequences=tuples_of(
        st.builds(
            lease.InventorySequence,
            reserve=reserves,
            phase=st.sampled_from(SequencePhase),
            arrival=u64,
            block_table=tuples_of(row_blocks, 30),
            preemptions=u32,
            runs=tuples_of(tuples_of(row_blocks, 30), 3),
        ),
        10,
    ),
    pool=tuples_of(blocks, 60),
    cached_blocks=cached_blocks(),
    block_groups=tuples_of(st.integers(0, 255), 60),
    block_pages=tuples_of(blocks, 60),
    frames=placed,
    saved=placed,
    frame_groups=tuples_of(st.integers(0, 255), 60),
    frame_pages=tuples_of(blocks, 60),
)
