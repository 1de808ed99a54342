"""The record of an admission: which blocks a sequence shares, which are fresh, and why there are no more hits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.contracts.lease import PARTIAL_REASON, RETENTION_REASON
from common.contracts.turns import BY_AGE
from common.contracts.types import BlockId, DecisionKind, MissReason
from kvmanager.cache.prefix_cache import PrefixMatch
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.partial_copy import PartialCopy

_PASSES: Final = "passes one that lacks blocks"


@dataclass(frozen=True, slots=True)
class GrantPlan:
    """How a sequence would be admitted: the blocks that it shares, how many it gets, and why there are no more hits.

    `left` blocks are available then. Its block table begins with `unread` empty places, for hits that left its window.
    """

    hits: list[BlockId]
    fresh: int
    match: PrefixMatch
    left: int = 0
    unread: int = 0

    @property
    def shared(self) -> int:
        """Blocks that the sequence does not compute: hits, and those before them that it does not read."""
        return self.unread + len(self.hits)


def _await(state: LedgerState, hits: list[BlockId]) -> int:
    """Leave hits on blocks that are not sealed to be counted once they are; return how many there are."""
    unsealed = [block for block in hits if state.blocks.hash[block] is None]
    for block in unsealed:
        state.blocks.awaited[block] = state.blocks.awaited.get(block, 0) + 1
    return len(unsealed)


def _reasons(
    sequence: Sequence, plan: GrantPlan, passes: bool, part: PartialCopy | None, lacking: int
) -> tuple[str, ...]:
    """Return in words why there are no more hits, and what else is special about a grant that lacks so many blocks."""
    match = plan.match
    reasons = [match.miss_reason.value]
    if match.miss_reason is MissReason.DIVERGED_AT:
        reasons.append(f"never seen from block {match.diverged_at} on")
    if plan.unread:
        reasons.append(f"the first {plan.unread} of the shared blocks left the window and are not needed")
    if part is not None:
        reasons.append(f"{PARTIAL_REASON}{part.slots} slots are copied from block {part.source}")
    if match.retention:
        reasons.append(f"{RETENTION_REASON}{match.retention}")
    if passes:
        reasons.append(_PASSES)
    elif sequence.by_age:
        reasons.append(BY_AGE)
    if lacking:
        reasons.append(f"begins with a part of its prompt's blocks, and gets {lacking} others as they come free")
    if sequence.computes_all:
        reasons.append("computes all its tokens, for their log-probabilities")
    if sequence.recompute:
        reasons.append("computed again after a preemption")
    return tuple(reasons)


def record_grant(
    state: LedgerState, sequence: Sequence, plan: GrantPlan, evicted: int, passes: bool, part: PartialCopy | None
) -> str:
    """Count an admission, record it, and return the id of the record."""
    match, hits = plan.match, plan.shared
    awaited = _await(state, plan.hits[: match.hit_blocks]) if not sequence.recompute else 0
    asked = sequence.takes_hits and state.config.caches
    queried = min(sequence.num_tokens // state.config.block_size, len(sequence.block_hashes)) if asked else 0
    state.totals.count_admission(queried, match.hit_blocks - awaited, match.miss_reason.value, sequence.recompute)
    lacking = sequence.lacking(state.config.block_size) if sequence.id == state.partial else 0
    state.totals.chunked_grants += bool(lacking)
    if part is not None and not sequence.recompute:
        state.totals.partial_hits += 1
        state.totals.partial_hit_tokens += part.slots
    reasons = _reasons(sequence, plan, passes, part, lacking)
    passed_by, waited = state.queue.count_admission(sequence), state.clock.monotonic() - sequence.queued_at
    figures = {
        "num_tokens": float(sequence.num_tokens),
        "hit_blocks": float(hits),
        "fresh_blocks": float(plan.fresh),
        "evicted": float(evicted),
        "available": float(state.block_pool.available),
        "waiting": float(len(state.queue)),
        "waited_seconds": waited,
        **({"lacking_blocks": float(lacking)} if lacking else {}),
        **({"passes": 1.0} if passes else {}),
        **({"passed_by": float(passed_by)} if passed_by and waited else {}),
        **({"partial_tokens": float(part.slots)} if part is not None else {}),
    }
    chosen = f"{hits} shared and {plan.fresh} fresh blocks"
    kind = DecisionKind.GRANT
    return state.decisions.record(kind, chosen, sequence, reasons, figures, beneficiary=match.evicted_for)
