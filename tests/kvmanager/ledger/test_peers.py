"""Which worker is asked for blocks, what lets another one ask it, and what a ledger orders of it beside its disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from common.contracts.clock import ManualClock
from common.contracts.lease import Attach, CachedBlock, GrantBatch, Inventory, public_incarnation
from common.contracts.transfer_tokens import TokenRefusal, TokenScope, serve_key_of, verify_token
from common.contracts.transfers import FROM_PEER, Fetched, Medium, PeerSource, Transfer, TransferCosts, TransferEnd
from common.contracts.types import BlockHash, BlockId, KvGeometry, PoolIdentity
from kvmanager.contracts.ledger_config import ManagerConfig
from kvmanager.contracts.ports import Reach
from kvmanager.ledger.ledger import Ledger
from kvmanager.ledger.peers import TOKEN_SECONDS, ServingPeer, count_asked, find_peer
from kvmanager.ledger.registry import WorkerRegistration, WorkerRegistry
from tests.support.kvmanager.ledgers import counted_ids, finish, hashes, make_ledger, play, prompt, reserve, run_through

KEY, FORMAT = b"k" * 32, b"f" * 16
IDENTITY = PoolIdentity("model" * 6, "tokenizer" * 3, 16, KvGeometry(2, 1, 8, 8, "float32"))
TALK = prompt(5 * 16 - 1)
"""Four full blocks, and a part of a fifth."""
KEYS = hashes(TALK)


def attach(name: str, address: str = "", image_format: bytes = FORMAT) -> Attach:
    found = Attach(name, name.encode().ljust(16), 1, 0, num_blocks=16, identity=IDENTITY, host_frames=16)
    return replace(found, data_address=address or f"{name}:7000", image_format=image_format)


class Having:
    """Stands for the ledger of a worker that has so many leading blocks of a prompt."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.asked_of_peers: dict[str, int] = {}

    def find_run(self, block_hashes: Sequence[BlockHash], first: int, end: int) -> int:
        return max(0, min(self.blocks, end) - first)

    def has_content(self, key: BlockHash, parent: BlockHash, depth: int) -> bool:
        return depth < self.blocks

    def has_any(self, keys: frozenset[BlockHash]) -> bool:
        return self.blocks > 0


def found(asking: Attach, *others: tuple[Attach, Having], first: int = 0, end: int = 4) -> tuple[str, int] | None:
    best = find_peer(asking, others, KEY, ManualClock(), lambda ledger: ledger.find_run(KEYS, first, end))
    return None if best is None else (best[0].worker_id, best[1])


def run_of(first: int, end: int) -> Reach:
    return lambda ledger: ledger.find_run(KEYS, first, end)


class Counted(bytes):
    """A hash that counts how often it is hashed."""

    times = 0

    def __hash__(self) -> int:
        Counted.times += 1
        return super().__hash__()


def test_whether_a_worker_has_anything_of_a_prompt_does_not_depend_on_how_much_it_has() -> None:
    ledger = make_ledger(4, host_frames=4)
    cache = ledger.state.store.cache
    cache.entries.update({BlockHash(Counted(bytes([1, each]) * 8)): BlockId(0) for each in range(100)})
    cache.below.update({BlockHash(Counted(bytes([2, each]) * 8)): BlockId(0) for each in range(100)})
    Counted.times = 0
    assert not ledger.has_any(frozenset(KEYS))
    assert Counted.times == 0
    assert ledger.has_any(frozenset([*KEYS, BlockHash(bytes([1, 7]) * 8)]))
    assert ledger.has_any(frozenset([*KEYS, BlockHash(bytes([2, 7]) * 8)]))


# ---------------------------------------------------------------- who is asked


def test_the_longest_run_wins_and_the_first_of_equals_that_are_asked_as_much() -> None:
    few, many = (attach("1"), Having(1)), (attach("3"), Having(3))
    me = attach("me")
    assert found(me, few, many) == ("3", 3)
    assert found(me, (attach("a"), Having(2)), (attach("b"), Having(2))) == ("a", 2)
    assert found(me, few, many, first=1) == ("3", 2)
    assert found(me, few, first=1) is None
    assert found(me, many, end=2) == ("3", 2)


def test_a_worker_of_another_format_or_without_a_port_is_not_asked_nor_is_the_one_that_asks() -> None:
    me = attach("me")
    assert found(me, (me, Having(4))) is None
    assert found(me, (attach("other", image_format=b"g" * 16), Having(4))) is None
    assert found(me, (replace(attach("deaf"), data_address=""), Having(4))) is None
    assert found(me, (me, Having(4)), (attach("far"), Having(1))) == ("far", 1)


def test_a_token_is_for_these_hashes_this_worker_and_this_incarnation_alone() -> None:
    clock, source, me = ManualClock(), attach("source"), attach("me")
    peer = ServingPeer(source, me, KEY, clock).serve(KEYS[:2])
    mine, its = public_incarnation(me.incarnation), public_incarnation(source.incarnation)
    assert (peer.worker_id, peer.public_incarnation, peer.address) == ("source", its, "source:7000")
    now = clock.time_ns() // 1_000_000_000
    assert peer.expires == now + TOKEN_SECONDS
    key, scope = serve_key_of(KEY, its), TokenScope("me", mine, its, peer.expires, KEYS[:2])
    assert verify_token([key], scope, peer.token, now) is None
    for other in (
        replace(scope, keys=KEYS[:3]),
        replace(scope, keys=KEYS[:1]),
        replace(scope, keys=(KEYS[1], KEYS[0])),
        replace(scope, destination="other"),
        replace(scope, incarnation=bytes(16)),
        replace(scope, expires=peer.expires + 1),
    ):
        assert verify_token([key], other, peer.token, now) is TokenRefusal.FOREIGN
    assert verify_token([serve_key_of(KEY, mine)], scope, peer.token, now) is TokenRefusal.FOREIGN


# ---------------------------------------------------------------- the registry


def registry(key: bytes = KEY) -> WorkerRegistry:
    made = WorkerRegistry(ManagerConfig(watermark=0.0), ManualClock(), counted_ids(), 1)
    made.transfer_key = key
    return made


def attached(manager: WorkerRegistry, of: Attach) -> WorkerRegistration:
    session = manager.attach(of)
    assert isinstance(session, WorkerRegistration)
    return session


def test_only_a_worker_with_a_data_port_is_given_a_key() -> None:
    manager, serving = registry(), attach("serving")
    ok = manager.complete(attached(manager, serving), Inventory())
    assert ok.serve_key == serve_key_of(KEY, public_incarnation(serving.incarnation))
    plain = replace(attach("plain"), data_address="", image_format=b"")
    assert manager.complete(attached(manager, plain), Inventory()).serve_key == b""
    assert manager.ledger("plain").state.peers is None
    without = registry(key=b"")
    assert without.complete(attached(without, serving), Inventory()).serve_key == b""
    assert without.ledger("serving").state.peers is None


def test_a_worker_is_asked_once_its_inventory_is_in_and_until_it_leaves() -> None:
    manager = registry()
    asking = attached(manager, attach("me"))
    manager.complete(asking, Inventory())
    source = attached(manager, attach("source"))
    claims = tuple(CachedBlock(BlockId(n), key, n - 1, 0) for n, key in enumerate(KEYS))
    assert asking.ledger.state.peers is not None
    steps = manager.rebuild_in_steps(source, Inventory(cached_blocks=claims))
    for _ in steps:
        assert asking.ledger.state.peers(run_of(0, 4)) is None
    assert asking.ledger.state.peers(run_of(0, 4)) is None
    manager.finish_rebuild(source)
    peer = asking.ledger.state.peers(run_of(0, 4))
    assert peer is not None
    assert (peer[0].worker_id, peer[1]) == ("source", 4)
    assert asking.ledger.state.peers(run_of(4, 4)) is None
    manager.detach(source)
    assert asking.ledger.state.peers(run_of(0, 4)) is None


def test_a_run_goes_on_from_blocks_of_the_pool_to_frames_of_host_memory() -> None:
    made = make_ledger(6, host_frames=8)
    run_through(made, 0, TALK)
    assert made.find_run(KEYS, 0, 4) == 4
    run_through(made, 1, prompt(4 * 16, start=500))
    tier = made.state.store.tier
    assert tier is not None
    assert 0 < len(tier) < 4
    assert [made.find_run(KEYS, 0, 4), made.find_run(KEYS, 1, 4), made.find_run(KEYS, 2, 3)] == [4, 3, 1]
    other = hashes(prompt(64, start=900))
    assert made.find_run((KEYS[0], *other[1:]), 0, 4) == 1


# ---------------------------------------------------------------- what a ledger orders


class Source:
    """A peer that has so many leading blocks of each prompt."""

    worker_id = "source"

    def __init__(self, blocks: int) -> None:
        self.blocks, self.served, self.asked, self.ahead = blocks, list[list[BlockHash]](), 0, 0

    def __call__(self, reach: Reach) -> tuple[Source, int] | None:
        self.asked += 1
        count = reach(self)
        return (self, count) if count else None

    def find_run(self, keys: Sequence[BlockHash], first: int, end: int) -> int:
        return max(0, min(self.blocks, end) - first)

    def has_content(self, key: BlockHash, parent: BlockHash, depth: int) -> bool:
        return depth < self.blocks

    def has_any(self, keys: frozenset[BlockHash]) -> bool:
        return self.blocks > 0

    def serve(self, keys: Sequence[BlockHash]) -> PeerSource:
        self.served.append(list(keys))
        return PeerSource("source", bytes(16), "source:7000", b"t" * 16, len(self.served))


def asking(blocks: int, disk: tuple[CachedBlock, ...] = (), frames: int = 8) -> tuple[Ledger, Source]:
    made, source = make_ledger(12, host_frames=frames, disk_frames=8), Source(blocks)
    made.rebuild(Inventory(saved=disk))
    made.state.peers = source
    return made, source


def on_disk(blocks: int) -> tuple[CachedBlock, ...]:
    return tuple(CachedBlock(BlockId(n), KEYS[n], -1, 0, KEYS[max(0, n - 1)], n) for n in range(blocks))


def transfers(batch: GrantBatch | None) -> list[Transfer]:
    return list(batch.transfers) if batch is not None else []


def from_where(batch: GrantBatch | None) -> list[str]:
    return [each.source.medium.name for each in transfers(batch)]


def end(made: Ledger, *numbers: int, by: TransferEnd = TransferEnd.DONE) -> GrantBatch | None:
    return play(made, ended=tuple((number, by) for number in numbers))


def test_a_prompt_waits_for_what_a_peer_has_and_is_granted_with_it() -> None:
    made, source = asking(3)
    ordered = transfers(play(made, reserve=(reserve(0, TALK),)))
    assert [(each.hash, each.depth, each.source) for each in ordered] == [(KEYS[n], n, FROM_PEER) for n in range(3)]
    assert [each.target.medium for each in ordered] == [Medium.HOST] * 3
    assert source.served == [list(KEYS[:3])]
    assert {each.peer for each in ordered} == {PeerSource("source", bytes(16), "source:7000", b"t" * 16, 1)}
    assert end(made, 1, 2) is None
    batch = end(made, 3)
    assert batch is not None
    (admit,) = batch.admit
    assert (admit.cached_tokens, admit.fetched) == (48, Fetched(3, 3, 0.0, "source"))
    assert made.pool_counts().totals.peer_loads == 3


@pytest.mark.parametrize("how", [TransferEnd.STALE, TransferEnd.CORRUPT, TransferEnd.FAILED, TransferEnd.LATE])
def test_what_a_peer_did_not_bring_is_computed_and_not_asked_for_again(how: TransferEnd) -> None:
    made, source = asking(3)
    play(made, reserve=(reserve(0, TALK),))
    assert end(made, 2, by=how) is None
    batch = end(made, 1, 3)
    assert batch is not None
    (admit,) = batch.admit
    assert (admit.cached_tokens, from_where(batch)) == (16, []), "the third one has no parent before it"
    assert source.served == [list(KEYS[:3])]


def test_the_longer_run_of_disk_and_peer_wins_and_the_disk_where_they_are_equal() -> None:
    for disk, peer, wanted in ((2, 3, ["PEER"] * 3), (3, 3, ["DISK"] * 3), (3, 2, ["DISK"] * 3), (0, 1, ["PEER"])):
        made, _ = asking(peer, on_disk(disk))
        assert from_where(play(made, reserve=(reserve(0, TALK),))) == wanted


def test_what_a_peer_takes_longer_for_than_computing_is_not_fetched_nor_looked_for() -> None:
    dear = TransferCosts(compute=0.010, read=0.001, peer=0.0091)
    made, source = asking(3)
    batch = play(made, transfer_costs=dear, reserve=(reserve(0, TALK),))
    assert (from_where(batch), source.asked) == ([], 0)
    made, _ = asking(3, on_disk(2))
    assert from_where(play(made, transfer_costs=dear, reserve=(reserve(0, TALK),))) == ["DISK"] * 2
    made, _ = asking(3, on_disk(3))
    cheap = TransferCosts(compute=0.010, read=0.0091, peer=0.001)
    assert from_where(play(made, transfer_costs=cheap, reserve=(reserve(0, TALK),))) == ["PEER"] * 3


@pytest.mark.parametrize(("ahead", "fetched"), [(0, 3), (23, 3), (24, 0)])
def test_a_source_that_has_to_serve_others_first_is_asked_while_that_pays(ahead: int, fetched: int) -> None:
    """Computing the three blocks takes 30 ms, of which 0.9 are 27 ms."""
    made, source = asking(3)
    source.ahead = ahead
    batch = play(made, transfer_costs=TransferCosts(0.010, 0.0, peer=0.001), reserve=(reserve(0, TALK),))
    assert from_where(batch) == ["PEER"] * fetched
    assert (batch is not None and bool(batch.admit)) is not bool(fetched), "what does not pay is computed at once"


def test_workers_ask_the_source_that_has_the_least_to_serve() -> None:
    """Three that ask at once take turns among two holders; a block that has come is not ahead of anybody."""
    manager = registry()
    claims = tuple(CachedBlock(BlockId(n), key, n - 1, 0) for n, key in enumerate(KEYS))
    for name in ("a", "b"):
        manager.complete(attached(manager, attach(name)), Inventory(cached_blocks=claims))
    asking = [attached(manager, attach(name)).ledger for name in ("1", "2", "3")]
    for each in ("1", "2", "3"):
        manager.complete(manager._registrations[each], Inventory())
    batches = [play(each, reserve=(reserve(0, TALK),)) for each in asking]
    transfers = [batch.transfers for batch in batches if batch is not None]
    sources = [{each.peer.worker_id for each in orders if each.peer} for orders in transfers]
    assert sources == [{"a"}, {"b"}, {"a"}]
    assert count_asked(asking) == {"a": 8, "b": 4}
    ends = [(each.id, TransferEnd.DONE) for each in transfers[2]]
    play(asking[2], ended=tuple(ends))
    assert count_asked(asking) == {"a": 4, "b": 4}
    asking[0].reset_cache(1)
    assert count_asked(asking) == {"b": 4}


def test_half_of_host_memory_may_be_filled_at_once() -> None:
    made, source = asking(4, frames=4)
    assert from_where(play(made, reserve=(reserve(0, TALK),))) == ["PEER"] * 2
    assert source.served == [list(KEYS[:2])]


def test_a_second_prompt_waits_for_the_same_transfers_and_says_whose_they_are() -> None:
    made, source = asking(3)
    play(made, reserve=(reserve(0, TALK),))
    assert from_where(play(made, reserve=(reserve(1, TALK),))) == []
    batch = end(made, 1, 2, 3)
    assert batch is not None
    assert [each.fetched for each in batch.admit] == [Fetched(3, 3, 0.0, "source")] * 2
    assert [each.cached_tokens for each in batch.admit] == [48, 64], "the second one shares the first one's blocks"
    assert len(source.served) == 1


def test_a_hash_that_is_still_coming_is_not_ordered_a_second_time() -> None:
    """The first block has failed, and the next prompt asks for it anew while the second one is on its way."""
    made, source = asking(3)
    play(made, reserve=(reserve(0, TALK),))
    batch = play(made, ended=((1, TransferEnd.FAILED),), reserve=(reserve(1, TALK),))
    assert [each.hash for each in transfers(batch)] == [KEYS[0]]
    assert source.served == [list(KEYS[:3]), [KEYS[0]]]


def test_who_is_cancelled_waits_no_more_and_what_comes_stays_for_others() -> None:
    made, _ = asking(3)
    play(made, reserve=(reserve(0, TALK),))
    finish(made, 0)
    assert end(made, 1, 2, 3) is None
    tier = made.state.store.tier
    assert tier is not None
    assert list(tier.entries) == list(KEYS[:3])
    made.reset_cache(1)
    play(made)
    assert not tier.entries


def test_a_reset_queues_who_waits_and_what_comes_then_is_not_there() -> None:
    made, _ = asking(3)
    play(made, reserve=(reserve(0, TALK),))
    made.reset_cache(1)
    batch = made.schedule()
    assert batch is not None
    assert [(each.cached_tokens, each.fetched) for each in batch.admit] == [(0, Fetched(0, 3, 0.0, "source"))]
    end(made, 1, 2, 3)
    assert made.pool_counts().totals.peer_loads == 0
