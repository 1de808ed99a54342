"""The invariants I1 to I14 of the lease protocol, checked on a world after every event.

Where the pool has groups, I3 and I4 hold in every page of a block, and I26 and I29 are checked too. I24 is that a peer
would get what it asks for, or nothing. I25 is that no transfer touches a place while a copy does. I28 is that a row
goes on from the states of its own tokens, I31 that no checkpoint stands behind a sequence's last token. I33 is that
messages tell of no groups where the pool has none. I27 is that what comes ahead of need keeps its bounds, and that
nobody waits because of it.

I15, the order in which blocks are granted, is checked by `liveness.py` alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import group_in, hash_in, key_of
from common.contracts.lease import GrantBatch, TierCopy
from common.contracts.types import TRIMMED, BlockHash, BlockId, FrameId, SequenceId
from gpuworker.scheduling.lease_agent import LeaseAgent
from kvmanager.ledger.ahead import MOST_WISHES
from kvmanager.ledger.audit import InvariantBroken
from kvmanager.ledger.ledger import Ledger
from kvmanager.ledger.preemption import running_sequences, seniority
from tests.suites.protocol import content
from tests.suites.protocol.agent_copies import copy_agent

if TYPE_CHECKING:
    from tests.suites.protocol.scenario import Layers
    from tests.suites.protocol.state import ModelManager
    from tests.suites.protocol.world import World


class Violation(Exception):
    """An invariant does not hold; `invariant` names it."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant

    @classmethod
    def of_protocol(cls, broken: ProtocolViolation) -> Violation:
        """Return the invariant that a refused message, or the manager's own audit, breaks."""
        text = str(broken)
        if not isinstance(broken, InvariantBroken):
            return cls("I2", text)
        named = (("without its parent", "I5"), ("pending", "I8"), ("lack blocks of their prompts", "I14"))
        for words, invariant in named:
            if words in text:
                return cls(invariant, text)
        return cls("I1", text)


def check(world: World) -> None:
    """Check everything that must hold at every moment, but what no event has touched since the last check.

    Raises Violation.
    """
    if world.worker_touched:
        _check_worker(world)
    for manager in world.managers:
        session = manager.session()
        if manager.alive and session is not None and session.ready:
            if world.managers_touched:
                _check_ledger(world, session.ledger)
            _reset_is_kept(world, manager, session.ledger)
            _preemptions_are_bounded(world, session.ledger)
    link = world.link
    if link is not None and link.served is not None and world.managers[link.manager].core.is_current(link.served):
        _registered_content_is_true(world, link.served.ledger)
        if world.scenario.frames:
            _frames_are_true(world, link.served.ledger)
        _sources_are_held(world, link.served.ledger)
    if world.scenario.with_index:
        _index_is_true(world)
    _stalls_are_short(world)
    world.worker_touched = world.managers_touched = False


def _check_worker(world: World) -> None:
    try:
        world.agent.check_invariants()
    except AssertionError as broken:
        raise Violation("I4" if "claimed" in str(broken) else "I2", str(broken)) from broken
    _pages_are_in_one_block(world)
    _fill_is_true(world)
    if world.scenario.peers:
        world.check_images()


def _pages_are_in_one_block(world: World) -> None:
    """I26: each page of the worker is in one block at most, or in the pool; tables have whole blocks of their group."""
    made = world.agent._blocks.made
    if made is None:
        return
    taken = [*world.agent._blocks.pool, *(page for pages in made.pages.values() for page in pages)]
    if len(set(taken)) != len(taken):
        raise Violation("I26", "a page is in two blocks, or in one and in the pool")
    for sequence in world.agent._sequences.values():
        if sequence.block_table != sequence.tables[0].blocks():
            raise Violation("I26", f"sequence {sequence.id} has two tables of the first group")
        for group, table in enumerate(sequence.tables):
            for place, block in enumerate(table.blocks()):
                if block == TRIMMED:
                    continue
                pages = tuple(table.pages[place * table.size : (place + 1) * table.size])
                if table.checkpoints and pages == (block,):
                    pages = made.pages[block]  # it names blocks by their first pages
                if (made.group[block], made.pages[block]) != (group, pages):
                    raise Violation("I26", f"place {place} of sequence {sequence.id} has no block of group {group}")


def _check_ledger(world: World, ledger: Ledger) -> None:
    audit(ledger)
    if world.scenario.wishes:
        _ahead_is_bounded(ledger)
    if not world.scenario.window:
        _map_is_prefix_closed(ledger, world.scenario.block_size)
    if world.scenario.groups and {key for key, _ in ledger.index_snapshot().entries} != _members(world, ledger):
        raise Violation("I29", "what the index is told is not what every group has")


def check_part(ledger: Ledger) -> None:
    """I27, where blocks were just ordered ahead of need: they are few, and nobody waits for a transfer."""
    state, part = ledger.state, ledger.state.ahead.part
    if part is None or not part.open:
        return
    frames = state.config.frames
    if len(part.open) > max(1, frames // 8):
        raise Violation("I27", f"{len(part.open)} blocks were ordered at once ahead of need")
    if state.sequences.fetching:
        raise Violation("I27", "blocks were ordered ahead of need while a sequence waits for others")
    if part.open != {number for number in state.transfers.open if number in part.open}:
        raise Violation("I27", "a part has transfers that are not open")


def _ahead_is_bounded(ledger: Ledger) -> None:
    """I27: wishes are few and so are their blocks; a sequence waits for blocks of its own prompt alone."""
    state, tier = ledger.state, ledger.state.store.tier
    if len(state.ahead.wishes) > MOST_WISHES or (tier is not None and state.ahead.frames > len(tier.frames) // 4):
        raise Violation("I27", f"{state.ahead.frames} blocks are to come ahead of need")
    if state.ahead.part is not None and not state.ahead.wishes:
        raise Violation("I27", "blocks come ahead of need, and nobody wants them")
    for each in state.sequences.fetching:
        sequence = state.sequences.live[each]
        awaited = sequence.fetch.open if sequence.fetch is not None else ()
        if not {state.transfers.open[number].hash for number in awaited} <= set(sequence.block_hashes):
            raise Violation("I27", f"sequence {sequence.id} waits for a block that it does not need")


def audit(ledger: Ledger) -> None:
    """I1, I5, I8, I14: the manager's own audit of its state. I14: at most one prompt runs with a part of its blocks."""
    try:
        ledger.check_invariants()
    except ProtocolViolation as broken:
        raise Violation.of_protocol(broken) from broken


def _fill_is_true(world: World) -> None:
    """I3: each slot below a block's fill holds the K/V of the tokens of every row that has it. I4: so do claims."""
    blocks = world.agent._blocks
    for sequence in world.agent._sequences.values():
        nodes = world.paths[sequence.id]
        for layers, table in zip(world.layers, world.tables_of(sequence), strict=True):
            for index, block in enumerate(table if layers.keeps_states else table[:: layers.pages]):
                if layers.keeps_states:
                    _checkpoint_is_true(world, sequence.id, nodes, index, block)
                elif block != TRIMMED and not _holds(world, layers, table, nodes, index):
                    text = f"block {block} is filled to {blocks.fill[block]}"
                    raise Violation("I3", f"{text}, but not with block {index} of sequence {sequence.id}")
    for block, claimed in blocks.content.items():
        if not _is_whole(world, claimed.group, world.pages_of(block), claimed.hash):
            raise Violation("I4", f"the worker claims content of block {block} that the block does not hold")


def _checkpoint_is_true(world: World, sequence: SequenceId, nodes: list[int], index: int, block: BlockId) -> None:
    """I28: a checkpoint that counts as saved holds the states behind its place of each table. I31: none is deeper.

    A source may be registered at the manager alone: a reset makes the worker forget claims that nobody holds.
    """
    fill, size = world.agent._blocks.fill, world.scenario.block_size
    if block == TRIMMED or not fill[block]:
        return
    if (index + 1) * size > len(world.agent._sequences[sequence].tokens):
        raise Violation("I31", f"block {block} is sealed behind the last token of sequence {sequence}")
    if not _is_whole(
        world, len(world.layers) - 1, world.pages_of(block), content.key(nodes[(index + 1) * size - 1], size)
    ):
        raise Violation("I28", f"block {block} does not hold the states behind place {index} of sequence {sequence}")


def _holds(world: World, layers: Layers, table: Items[BlockId], nodes: list[int], index: int) -> bool:
    """Return whether each page of a block holds its part of a sequence's tokens, as far as the block is filled."""
    size, filled = world.scenario.block_size, world.agent._blocks.fill[table[index * layers.pages]]
    expected = nodes[index * size : index * size + filled]
    if len(expected) != filled:
        return False
    slots = world.device.slots
    for part, page in layers.parts_at(table, index):
        if slots[page][:filled] != ([content.as_part(node, part) for node in expected] if part else expected):
            return False
    return True


def _is_whole(world: World, group: int, pages: Items[BlockId], key: BlockHash) -> bool:
    """Return whether the pages of a block of a group are all that hold the content of a hash, each its part."""
    layers, device, size = world.layers[group], world.device, world.scenario.block_size
    part = layers.first_part
    if len(pages) != layers.pages:
        return False
    if layers.keeps_states:
        nodes = {device.state_in(page, each) for each, page in enumerate(pages, part)}
        node = nodes.pop()
        return not nodes and node is not None and content.depth(node) % size == 0 and content.key(node, size) == key
    for page in pages:  # at each event, for each block: a generator would take half as long again
        if device.block_key(page, part) != key:
            return False
        part += 1
    return True


def _registered_content_is_true(world: World, ledger: Ledger) -> None:
    """I4: a registered block is full, of a completed step, and holds what its hash says."""
    fill, blocks = world.agent._blocks.fill, ledger.state.store.blocks
    coming = {each.block for each in _ordered_copies(world) if each.load}
    for number, key in enumerate(blocks.hash):
        if key is None or number in coming:
            continue
        block = BlockId(number)
        pages = (block, *blocks.others.get(block, ()))
        is_whole = _is_whole(world, blocks.group[block], pages, hash_in(key))
        if fill[block] != world.scenario.block_size or not is_whole:
            raise Violation("I4", f"block {block} is registered and does not hold what its hash says")


def _ordered_copies(world: World) -> list[TierCopy]:
    """Return the copies between blocks and frames that the worker has still to hear of."""
    batches = () if world.link is None else world.link.to_worker
    return [each for batch in batches if isinstance(batch, GrantBatch) for each in batch.tier]


def _frames_are_true(world: World, ledger: Ledger) -> None:
    """I17: a frame holds what the manager says, once the worker has heard of it, and what the worker claims.

    I18: the true parent of each hash that a frame has is in a block or in a frame.
    """
    tier = ledger.state.store.tier
    assert tier is not None
    made = world.agent._frames.made
    for frame, claim in world.agent._frames.held.items():
        frames = (frame,) if made is None else made.pages[frame]
        if claim is not None and not _frames_hold(world, key_of(claim.hash, claim.group), frames):
            raise Violation("I17", f"the worker claims what frame {frame} does not hold")
    coming = {each.frame for each in (*_ordered_copies(world), *ledger.state.tier_copies) if not each.load}
    _disk_is_true(world, ledger)
    for key, frame in tier.entries.items():
        frames = (frame, *tier.frames.others.get(frame, ()))
        if coming.isdisjoint(frames) and not _frames_hold(world, key, frames):
            raise Violation("I17", f"frame {frame} does not hold what its hash says")
        own = hash_in(key)
        parent = content.parent_key(own, world.scenario.block_size) if key == own else own
        if parent is not None and parent not in tier.entries and parent not in ledger.state.store.cache.entries:
            raise Violation("I18", f"frame {frame} holds a content without its parent")


def _frames_hold(world: World, key: BlockHash, frames: Items[FrameId]) -> bool:
    """Return whether frames hold all of a content, each its part."""
    places = [BlockId(world.device.frame(frame)) for frame in frames]
    return _is_whole(world, group_in(key), places, hash_in(key))


def _disk_is_true(world: World, ledger: Ledger) -> None:
    """I17 of frames on disk, if they have not rotted. I18: the true parent of each hash there is there too."""
    disk, saved = ledger.state.store.disk, world.agent._transfers.saved
    if disk is None:
        return
    for frame, claim in saved.held.items():
        frames = (frame,) if saved.made is None else saved.made.pages[frame]
        if claim is None or not _disk_holds(world, claim.key, frames, must=True):
            raise Violation("I17", f"the worker claims what frame {frame} on disk does not hold")
    for key, frame in disk.entries.items():
        if not _disk_holds(world, key, disk.pages_at(frame)):
            raise Violation("I17", f"frame {frame} on disk does not hold what its hash says")
        own = hash_in(key)
        parent = content.parent_key(key, world.scenario.block_size) if key == own else own
        if parent is not None and parent not in disk.entries:
            raise Violation("I18", "a content is on disk without its parent")


def _disk_holds(world: World, key: BlockHash, frames: Items[FrameId], must: bool = False) -> bool:
    """Return whether frames on disk hold all of a content, each its part, unless they are empty or have rotted.

    With `must` none of them is empty.
    """
    layers, size = world.layers[group_in(key)], world.scenario.block_size
    if len(frames) != layers.pages:
        return False
    for page, frame in enumerate(frames):
        entry = world.disk.get(frame)
        if entry is None and must:
            return False
        if entry is None:
            continue
        held = content.image_of(hash_in(key), size, layers.first_part + page, layers.keeps_states)
        if (entry.hash, entry.group, entry.page) != (hash_in(key), group_in(key), page):
            return False
        if entry.image is not None and entry.image != held:
            return False
    return True


def _sources_are_held(world: World, ledger: Ledger) -> None:
    """I12: the manager holds the source of a copy that it granted in this session until the copy has run.

    Or it notes that it gave up the source, for want of blocks. I3 and I4 say that the copy stays right then.
    """
    for sequence, copy in world.held_sources():
        known, held = ledger.state.sequences.live.get(sequence), ledger.state.sequences.copying.get(sequence)
        if known is None or held is None or (held and known.copy_source != copy.src):
            raise Violation("I12", f"the copy of sequence {sequence} has not run, and its source is not held")


def _map_is_prefix_closed(ledger: Ledger, block_size: int) -> None:
    """I5, by the true parent of each hash rather than by the one in the ledger."""
    entries = ledger.state.store.cache.entries
    for key in entries:
        block_hash = hash_in(key)
        parent = content.parent_key(key, block_size) if key == block_hash else block_hash
        if parent is not None and parent not in entries:
            raise Violation("I5", "a hash is in the manager's map without its parent")


def _members(world: World, ledger: Ledger) -> set[BlockHash]:
    """Return the hashes that an index should have: those that every group has.

    I29: the first group has their ancestors too, by I5, so a prompt can be continued behind any run of members that a
    token reads.
    """
    entries, runs = set[BlockHash](ledger.state.store.cache.entries), range(1, len(world.layers))
    if world.scenario.frames:
        entries |= ledger.state.store.cache.below.keys() | ledger.state.store.cache.saved.keys()
    return {key for key in entries if key == hash_in(key) and all(key_of(key, group) in entries for group in runs)}


def _index_is_true(world: World) -> None:
    """I5 and I6: what readers see is prefix-closed at every call, and equals the map once all is written.

    Where layers have windows, a block stays in both when those before it go.
    """
    live, slides = world.index.live(), world.scenario.window or world.scenario.groups
    for key in live:
        parent = content.parent_key(key, world.scenario.block_size)
        if parent is not None and parent not in live and not slides:
            raise Violation("I5", "a hash is in the index without its parent")
    for manager in world.managers:
        session = manager.session()
        if not manager.alive or session is None or not session.ready or world.index.fence != manager.core.epoch:
            continue
        if manager.publisher.settled and live != _members(world, session.ledger):
            raise Violation("I6", "all is written and the index differs from the manager's map")


def _reset_is_kept(world: World, manager: ModelManager, ledger: Ledger) -> None:
    """I11: what a reset dropped is cached again only after it was computed again.

    It holds at the manager that has the worker, if it was asked, and once the worker has confirmed. In a ledger whose
    stream has broken, a block may stand for which a load was under way: that ledger ends.
    """
    link = world.link
    has_the_worker = link is not None and link.served is not None and link.served.ledger is ledger
    if not has_the_worker or world.resets not in (manager.told_reset, world.agent.reset):
        return
    hashes, coming = ledger.state.store.blocks.hash, {each.block for each in _ordered_copies(world) if each.load}
    back = [block for block in world.dropped if hashes[block] is not None and block not in coming]
    if back:
        raise Violation("I11", f"blocks {back} are registered again, and nothing has computed them since the reset")
    store = ledger.state.store
    everywhere = store.cache.entries.keys() | store.cache.below.keys() | store.cache.saved.keys()
    if world.void and not world.void.isdisjoint(everywhere):
        raise Violation("I11", "what a reset dropped is in a block or a frame, and nothing has computed it since")


def _preemptions_are_bounded(world: World, ledger: Ledger) -> None:
    """I13: no sequence is preempted more often than the bound, by all its managers, where all have one priority."""
    most = world.scenario.max_preemptions
    slides = world.scenario.window or world.scenario.groups
    if not most or slides or len({each.priority for each in world.scenario.requests}) > 1:
        return
    counts = [(each.id, each.preemptions) for each in ledger.state.sequences.live.values()]
    counts += [(each.id, each.preemptions) for each in world.agent._sequences.values()]
    for sequence, count in counts:
        if count > most:
            raise Violation("I13", f"sequence {sequence} was preempted {count} times of {most}")


def _stalls_are_short(world: World) -> None:
    """I9: once both sides have every message, a stall means that no block is left and a preemption is outstanding.

    Or all others are spared: they hold what they may need, and their ends give blocks to the one that is stalled. Where
    the pool has groups, fewer pages may be left than one place of a table has.
    """
    link, agent = world.link, world.agent
    if link is None or link.served is None or not world.worker.open or link.to_manager or link.to_worker:
        return
    ledger = link.served.ledger
    if (
        not agent._report.stalled
        or len(agent._blocks.pool) >= min(_lacks(world, each) for each in agent._report.stalled)
        or not ledger.state.sequences.find_stalled()
        or _owes_report(agent)
    ):
        return
    state = ledger.state
    senior = min(running_sequences(state.sequences), key=seniority)
    most = 0 if world.scenario.window or world.scenario.groups else world.scenario.max_preemptions
    others = [
        each
        for each in running_sequences(state.sequences)
        if each is not senior and (not most or each.preemptions < most)
    ]
    if state.store.pool.available or (others and not state.sequences.preempting):
        raise Violation("I9", "sequences stall, nothing is under way for them")


def _lacks(world: World, sequence: SequenceId) -> int:
    """Return how many pages a sequence lacks at the first place where a table has no block."""
    tables = world.tables_of(world.agent._sequences[sequence])
    both = [
        (layers.pages, table) for layers, table in zip(world.layers, tables, strict=True) if not layers.keeps_states
    ]
    places = [(len(table) // pages, pages) for pages, table in both]
    covered = min(there for there, _ in places)
    return sum(pages for there, pages in places if there == covered)


def _owes_report(agent: LeaseAgent) -> bool:
    return copy_agent(agent).take_report() is not None


def check_quiescence(world: World) -> None:
    """I8 and I10, when nothing more will happen: every request has ended, every block is free or cached."""
    hanging = [number for number, reason in enumerate(world.ended) if reason is None]
    if hanging:
        raise Violation("I10", f"nothing moves any more and requests {hanging} have not ended")
    counts = world.agent.counts()
    if world.agent.has_work or counts.pool:
        raise Violation("I8", f"the worker keeps {counts.pool} leased blocks, or a sequence")
    link = world.link
    session = world.managers[link.manager].session() if link is not None else None
    if session is None or not session.ready:
        raise Violation("I10", "the worker has no session")
    ledger, pool = session.ledger, session.ledger.state.store.pool
    if (
        ledger.state.sequences.live
        or len(ledger.state.sequences.queue)
        or ledger.state.sequences.preempting
        or ledger.state.store.cache.pending
        or pool.leased
        or ledger.state.transfers.open
    ):
        raise Violation("I8", "the manager keeps sequences, a queue, pending blocks, leases or transfers")
    if ledger.state.ahead.wishes:
        raise Violation("I27", "a prefix is to come ahead of need, and nothing brings it")
    if ledger.reset_pending:
        raise Violation("I11", "the worker has not confirmed the reset")
    if pool.available != len(pool.blocks):
        raise Violation("I8", f"{pool.available} of {len(pool.blocks)} blocks are free or cached")
