"""The records of grants and waits: what was granted and why there are no more hits, and why a sequence waits."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Final

from common.contracts.hashing import key_of
from common.contracts.lease import AHEAD_REASON, FETCH_REASON, HOST_REASON, PARTIAL_REASON, RETENTION_REASON
from common.contracts.transfers import TransferEnd
from common.contracts.turns import BY_AGE
from common.contracts.types import (
    TENANT_CANDIDATE,
    BlockId,
    Candidate,
    DecisionKind,
    MissReason,
    SequencePhase,
    ShortfallReason,
)
from kvmanager.cache.prefix_cache import PrefixMatch
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger import chunked_grants
from kvmanager.ledger.block_store import BlockStore
from kvmanager.ledger.grant_plan import GrantPlan, count_fresh_blocks
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.partial_copy import PartialCopy
from kvmanager.ledger.sequence_table import SequenceTable

_FAILED: Final = {
    TransferEnd.STALE: "had left by then",
    TransferEnd.CORRUPT: "failed their checksum",
    TransferEnd.FAILED: "could not be read",
    TransferEnd.LATE: "did not come in time",
}
_PASSES: Final = "passes one that lacks blocks"
_REQUESTS: Final = 8
"""Requests that the record of a wait names at most."""
_TENANTS: Final = 4
"""Tenants that the record of a wait names at most."""


def _await(store: BlockStore, hits: list[BlockId]) -> int:
    """Leave hits on blocks that are not sealed to be counted once they are; return how many there are."""
    unsealed = [block for block in hits if store.blocks.hash[block] is None]
    for block in unsealed:
        store.blocks.awaited[block] = store.blocks.awaited.get(block, 0) + 1
    return len(unsealed)


_MISSES: Final = {
    MissReason.DIVERGED_AT: "never seen from block {} on",
    MissReason.UNFETCHED: "the first {} blocks are in the pool or in tiers, and the missing ones did not come",
    MissReason.UNRESUMABLE: "K and V of {} blocks are there, and no checkpoint of states, or no room for it",
}


def _reasons(
    sequence: Sequence, plan: GrantPlan, passes: bool, part: PartialCopy | None, lacking: int
) -> tuple[str, ...]:
    """Return in words why there are no more hits, and what else is special about a grant that lacks so many blocks."""
    match = plan.match
    reasons = [match.miss_reason.value]
    if (where := _MISSES.get(match.miss_reason)) is not None:
        reasons.append(where.format(match.diverged_at))
    if plan.unread:
        reasons.append(f"the first {plan.unread} of the shared blocks left the window and are not needed")
    if part is not None:
        reasons.append(f"{PARTIAL_REASON}{part.slots} slots are copied from block {part.source}")
    if match.retention:
        reasons.append(f"{RETENTION_REASON}{match.retention}")
    reasons += _special(sequence, plan, passes, lacking)
    return tuple(reasons)


def _why_not_loaded(state: LedgerState, match: PrefixMatch) -> tuple[str, ...]:
    """Return in words why what host memory has of a prompt is not loaded."""
    costs = state.worker.costs
    if match.miss_reason is not MissReason.UNFETCHED or state.store.loads or costs is None:
        return ()
    unit = "page" if state.config.groups else "block"
    copied, computed = (f"{1000 * each:.2f} ms" for each in (costs.copy, costs.compute))
    return (f"{HOST_REASON}loads do not pay: to copy a {unit} takes {copied}, to compute a block {computed}",)


def _special(sequence: Sequence, plan: GrantPlan, passes: bool, lacking: int) -> list[str]:
    """Return in words what is special about a grant beside its hits."""
    reasons = list[str]()
    if loaded := plan.loaded_places:
        reasons.append(f"{HOST_REASON}{loaded} of {plan.shared} cached blocks are loaded")
    if sequence.fetch is not None:
        fetch = sequence.fetch
        took = f"{fetch.landed} of {fetch.blocks} blocks came from {fetch.source} in {1000 * fetch.seconds:.0f} ms"
        failed = ", ".join([f"{count} {_FAILED[end]}" for end, count in sorted(fetch.failed.items())])
        reasons.append(f"{FETCH_REASON}{took}" + (f"; {failed}" if failed else ""))
    if passes:
        reasons.append(_PASSES)
    elif sequence.by_age:
        reasons.append(BY_AGE)
    if lacking:
        others = f"{lacking} pages more" if sequence.runs else f"{lacking} others"
        reasons.append(f"begins with a part of its prompt's blocks, and gets {others} as they come free")
    if sequence.computes_all:
        reasons.append("computes all its tokens")
    if sequence.recompute:
        reasons.append("computed again after a preemption")
    return reasons


def _ahead_reasons(state: LedgerState, sequence: Sequence, plan: GrantPlan) -> list[str]:
    """Return in words how many of the loaded blocks came ahead of need, by kind.

    Where the pool has groups, a place of the prompt counts if a content of any group came for it.
    """
    came, loaded, hashes = state.ahead.came, plan.loaded_places, sequence.block_hashes
    if not came or not loaded:
        return []
    keys = [(place, hashes[place]) for place in range(plan.present, plan.shared)]
    for group, run in enumerate(plan.runs, 1):
        keys += [(place, key_of(hashes[place], group)) for place, _ in run.frames]
    kinds = Counter({place: came[key] for place, key in keys if key in came}.values())
    of_them = f"of the {loaded} loaded blocks came before a request asked for them"
    return [f"{AHEAD_REASON}{count} {of_them} ({kind})" for kind, count in sorted(kinds.items())]


def record_grant(
    state: LedgerState, sequence: Sequence, plan: GrantPlan, evicted: int, passes: bool, part: PartialCopy | None
) -> str:
    """Count an admission, record it, and return the id of the record."""
    match, hits, loaded = plan.match, plan.shared, plan.loaded_places
    awaited = _await(state.store, plan.hits[: match.hit_blocks]) if not sequence.recompute else 0
    asked = sequence.takes_hits and state.config.prefix_caching
    queried = min(sequence.num_tokens // state.config.block_size, len(sequence.block_hashes)) if asked else 0
    state.totals.count_admission(queried, match.hit_blocks - awaited, match.miss_reason.value, sequence.recompute)
    lacking = chunked_grants.count_lacking(state.config, sequence) if sequence.id == state.sequences.partial else 0
    state.totals.chunked_grants += bool(lacking)
    if part is not None and not sequence.recompute:
        state.totals.partial_hits += 1
        state.totals.partial_hit_tokens += part.slots
    reasons = (*_reasons(sequence, plan, passes, part, lacking), *_ahead_reasons(state, sequence, plan))
    reasons += _why_not_loaded(state, match)
    state.gate.note_spared(loaded)
    passed_by, waited = state.sequences.queue.count_admission(sequence), state.clock.monotonic() - sequence.queued_at
    figures = {
        "num_tokens": float(sequence.num_tokens),
        "hit_blocks": float(hits),
        "fresh_blocks": float(plan.fresh),
        "evicted": float(evicted),
        "available": float(state.store.pool.available),
        "waiting": float(state.sequences.waiting),
        "waited_seconds": waited,
        **({"lacking_blocks": float(lacking)} if lacking else {}),
        **({"passes": 1.0} if passes else {}),
        **({"passed_by": float(passed_by)} if passed_by and waited else {}),
        **({"partial_tokens": float(part.slots)} if part is not None else {}),
        **({"host_blocks": float(loaded)} if loaded else {}),
        **({"fetched_blocks": float(sequence.fetch.landed)} if sequence.fetch is not None else {}),
        **({"fetch_seconds": sequence.fetch.seconds} if sequence.fetch is not None else {}),
        **({"fetch_predicted": sequence.fetch.forecast} if sequence.fetch is not None else {}),
        **({"checkpoints": float(len(plan.checkpoints))} if plan.checkpoints else {}),
        **({"tails": 1.0} if plan.tail else {}),
    }
    chosen = f"{hits} shared and {plan.fresh} fresh blocks"
    if plan.frames:
        chosen = f"{plan.present} shared, {len(plan.frames)} loaded and {plan.fresh - len(plan.frames)} fresh blocks"
    if state.config.groups:
        of_them = f", {loaded} of them loaded," if loaded else ""
        chosen = f"{hits} shared blocks{of_them} and {plan.fresh} fresh pages"
    kind = DecisionKind.GRANT
    return state.decisions.record(kind, chosen, sequence, reasons, figures, beneficiary=match.evicted_for)


def record_waits(state: LedgerState, head: Sequence) -> None:
    """Record why the sequences that have joined the queue wait, once for each wait; `head` is admitted next."""
    waiting = [state.sequences.live[each] for each in state.sequences.queue.unexplained]
    state.sequences.queue.unexplained.clear()
    holders, head_needed = _holders(state.sequences), count_fresh_blocks(state, head)
    for sequence in waiting:
        needed = head_needed if sequence is head else count_fresh_blocks(state, sequence)
        reason, first = _reason(state, sequence, head)
        record_wait(state, sequence, (reason.value, first), (needed, head_needed), holders)


def record_wait(
    state: LedgerState,
    sequence: Sequence,
    why: tuple[str, str],
    needed: tuple[int, int],
    holders: tuple[Candidate, ...] = (),
) -> None:
    """Record that a sequence waits: the reason and whom it waits for, the blocks that it and the next one need."""
    (reason, first), (own, of_next) = why, needed
    figures = {
        "needed": float(own),
        "head_needed": float(of_next),
        "available": float(state.store.pool.available),
        "num_blocks": float(state.config.num_blocks),
        "running": float(state.sequences.admitted),
        "waiting": float(state.sequences.waiting),
    }
    kind = DecisionKind.SHORTFALL
    state.decisions.record(kind, "waits", sequence, (reason,), figures, holders, beneficiary=first)


def _reason(state: LedgerState, sequence: Sequence, head: Sequence) -> tuple[ShortfallReason, str]:
    """Return why a sequence waits, and the name of the one that goes first, unless it is this one."""
    if sequence is not head:
        return ShortfallReason.BEHIND, head.name
    return (ShortfallReason.PLACES if state.admission.blocked_by == "places" else ShortfallReason.BLOCKS), ""


def _holders(sequences: SequenceTable) -> tuple[Candidate, ...]:
    """Return the tenants and the requests that hold the most blocks; a shared block counts for its first sequence."""
    blocks: dict[str, int] = {}
    counts: dict[str, int] = {}
    requests: dict[str, int] = {}
    for each in sequences.live.values():
        if each.phase is SequencePhase.WAITING:
            continue
        held = each.own_blocks
        blocks[each.tenant] = blocks.get(each.tenant, 0) + held
        counts[each.tenant] = counts.get(each.tenant, 0) + 1
        requests[each.name] = requests.get(each.name, 0) + held
    tenants = heapq.nlargest(_TENANTS, blocks, key=lambda tenant: (blocks[tenant], tenant))
    greatest = heapq.nlargest(_REQUESTS, requests, key=lambda name: (requests[name], name))
    return (
        *(_tenant(each, blocks[each], counts[each]) for each in tenants),
        *(Candidate(each, terms=(("blocks", float(requests[each])),)) for each in greatest),
    )


def _tenant(name: str, blocks: int, sequences: int) -> Candidate:
    return Candidate(f"{TENANT_CANDIDATE}{name}", terms=(("blocks", float(blocks)), ("sequences", float(sequences))))
