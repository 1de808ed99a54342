"""Copies and hashable keys of a worker's lease agent, for searches over many futures."""

from __future__ import annotations

from copy import copy
from typing import TypeVar

from common.contracts.types import BlockId, SequenceId
from gpuworker.scheduling.block_states import BlockStates
from gpuworker.scheduling.claims_by_hash import ClaimsByHash
from gpuworker.scheduling.departures import Departures
from gpuworker.scheduling.frame_claims import FrameClaims
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.partial_copies import PartialCopies
from gpuworker.scheduling.report_builder import ReportBuilder
from gpuworker.scheduling.sequence import Sequence
from gpuworker.scheduling.step_scheduler import StepScheduler
from gpuworker.scheduling.transfer_book import TransferBook
from tests.suites.protocol.scenario import Guesser

T = TypeVar("T")
C = TypeVar("C")
_COLUMNS = (
    "_reserve", "_bind", "_bind_groups", "_bind_pages", "_seal", "_partials", "_copied", "_trim", "_run_trim",
    "_returned", "_preempted", "_finished", "_ended",
)  # fmt: skip
_PARTS = ("_sequences", "_blocks", "_frames", "_transfers", "_scheduler", "_report", "_partial_copies")


def shallow(thing: T) -> T:
    """Return a copy that shares everything with its original."""
    twin = object.__new__(type(thing))
    twin.__dict__.update(thing.__dict__)
    return twin


def copy_agent(agent: LeaseAgent) -> LeaseAgent:
    twin = shallow(agent)
    twin._sequences = {key: _copy_sequence(each) for key, each in agent._sequences.items()}
    twin._blocks = _copy_blocks(agent._blocks)
    twin._scheduler = _copy_scheduler(agent._scheduler, twin._blocks, twin._sequences)
    twin._report = _copy_report(agent._report)
    twin._in_flight = agent._in_flight.copy()
    twin._copies, twin._loaded = agent._copies.copy(), agent._loaded.copy()
    twin._frames = _copy_frames(agent._frames)
    twin._transfers = _copy_transfers(agent._transfers)
    twin._partial_copies = PartialCopies()
    twin._partial_copies._by_sequence = agent._partial_copies._by_sequence.copy()
    twin._departures = _copy_departures(agent._departures, twin)
    twin._grants, twin._closer = _over_parts_of(twin, agent._grants), _over_parts_of(twin, agent._closer)
    return twin


def agent_key(agent: LeaseAgent) -> tuple[object, ...]:
    """Return everything that decides the future, hashable; counters that only name things are left out."""
    return (
        tuple([_sequence_key(each) for each in agent._sequences.values()]),
        _blocks_key(agent._blocks),
        _report_key(agent._report),
        tuple([plan.rows for plan in agent._in_flight]),
        tuple(agent._copies),
        tuple(agent._partial_copies._by_sequence.items()),
        tuple([plan.copies for plan in agent._in_flight]),
        (agent._lease_target, agent.reset),
        frozenset([(frame, each and (each.hash, each.group)) for frame, each in agent._frames.held.items()]),
        frozenset(agent._frames.made.pages.items()) if agent._frames.made is not None else None,
        (agent._transfer_waits, _transfers_key(agent._transfers)) if _moves(agent) else None,
    )


def _moves(agent: LeaseAgent) -> bool:
    """Return whether there may be transfers."""
    return bool(agent.config.disk_frames) or agent.config.serves_peers


# ---------------------------------------------------------------- copies


def _copy_claims(old: dict[BlockId, C]) -> dict[BlockId, C]:
    if not isinstance(old, ClaimsByHash):
        return old.copy()
    twin = ClaimsByHash()
    twin.update(old)
    twin._places = old._places.copy()
    return twin


def _copy_frames(old: FrameClaims) -> FrameClaims:
    twin = FrameClaims(old.num_frames)
    twin.made = old.made.copy() if old.made is not None else None
    twin.held = _copy_claims(old.held)
    return twin


def _copy_transfers(old: TransferBook) -> TransferBook:
    twin = TransferBook(old.disk_frames, old.has_peers)
    twin._block_pages, twin.saved, twin._left = old._block_pages, _copy_frames(old.saved), old._left.copy()
    twin.open, twin.closed = old.open.copy(), old.closed
    twin._to_read, twin._to_take = old._to_read.copy(), old._to_take.copy()
    return twin


def _copy_blocks(old: BlockStates) -> BlockStates:
    twin = shallow(old)
    twin.pool, twin.fill, twin.holders = old.pool.copy(), old.fill.copy(), old.holders.copy()
    twin.content = _copy_claims(old.content)
    twin.made = old.made.copy() if old.made is not None else None
    return twin


def _copy_report(old: ReportBuilder) -> ReportBuilder:
    twin = shallow(old)
    for name in _COLUMNS:
        setattr(twin, name, getattr(old, name).copy())
    return twin


def _copy_scheduler(old: StepScheduler, blocks: BlockStates, sequences: dict[SequenceId, Sequence]) -> StepScheduler:
    twin = shallow(old)
    twin.blocks = blocks
    twin.decoding = [sequences[each.id] for each in old.decoding]
    twin.prefilling = [sequences[each.id] for each in old.prefilling]
    return twin


def _over_parts_of(twin: LeaseAgent, old: T) -> T:
    """Return a copy that works on the state of a twin."""
    new = shallow(old)
    new.__dict__.update({name: getattr(twin, name) for name in _PARTS if name in new.__dict__})
    return new


def _copy_departures(old: Departures, twin: LeaseAgent) -> Departures:
    new = _over_parts_of(twin, old)
    new._finished, new._preempted = old._finished.copy(), old._preempted.copy()
    new._forgotten, new.recounted = old._forgotten.copy(), old.recounted.copy()
    return new


def _copy_sequence(old: Sequence) -> Sequence:
    twin = Sequence.__new__(Sequence)
    for name in Sequence.__slots__:
        setattr(twin, name, getattr(old, name))
    twin.tokens = old.tokens.copy()
    twin.block_hashes = old.block_hashes.copy()
    twin.partial_hashes = old.partial_hashes.copy()
    twin.block_table = old.block_table.copy()
    twin.tables = tuple([table.copy() for table in old.tables])
    twin.checkpoints = next((table for table in twin.tables if table.checkpoints), None)
    twin.tail = copy(old.tail)
    if isinstance(old.drafter, Guesser):
        twin.drafter = old.drafter.copy()
    return twin


# ---------------------------------------------------------------- keys


def _transfers_key(transfers: TransferBook) -> tuple[object, ...]:
    saved = frozenset([(frame, each and each.key) for frame, each in transfers.saved.held.items()])
    waiting = tuple(transfers._to_read), tuple(transfers._to_take)
    made = transfers.saved.made
    pages = frozenset(made.pages.items()) if made is not None else None
    return transfers.closed, saved, pages, tuple(transfers.open.values()), tuple(transfers._left.items()), waiting


def _blocks_key(blocks: BlockStates) -> tuple[object, ...]:
    """Leave out the step of last use, which only orders an inventory's cached blocks."""
    claims = frozenset([(block, each.hash) for block, each in blocks.content.items()])
    made = (
        (frozenset(blocks.made.pages.items()), frozenset(blocks.made.group.items()))
        if blocks.made is not None
        else None
    )
    return tuple(blocks.pool), tuple(blocks.fill), claims, made


def _report_key(report: ReportBuilder) -> tuple[object, ...]:
    """Leave out times and traces."""
    return (
        report.state,
        report.stalled,
        report._told_stalled,
        report._told_want,
        report._applied,
        tuple(report._reserve),
        tuple(report._bind),
        tuple(report._bind_groups),
        tuple(report._bind_pages),
        tuple(report._run_trim.items()),
        tuple(report._seal),
        tuple(report._partials),
        tuple(report._copied),
        tuple(report._trim.items()),
        tuple(report._returned),
        tuple(report._preempted),
        tuple(report._finished),
        report._reset,
        tuple(report._ended),
        report._disk_closed,
        report.draining,
        report._told_draining,
    )


def _sequence_key(sequence: Sequence) -> tuple[object, ...]:
    return (
        sequence.new.sequence,
        sequence.arrival,
        tuple(sequence.tokens),
        sequence.phase,
        tuple(sequence.block_table),
        sequence.page_tables(),
        sequence.num_computed_tokens,
        sequence.in_flight,
        sequence.sampling,
        sequence.trimmed,
        sequence.preemptions,
        sequence.leaves,
        sequence.loads,
        sequence.tail and (sequence.tail.pages, sequence.tail.place, sequence.tail.saved),
    )
