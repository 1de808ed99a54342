"""The worlds that the tests search: tiny ones for the exhaustive search, larger ones for random walks."""

from __future__ import annotations

import random
from dataclasses import replace

from common.contracts.lease import RetainedBlocks, blocks_needed
from common.contracts.transfers import TransferEnd
from common.contracts.types import KvGroup, KvGroupKind
from tests.suites.protocol.scenario import Request, Scenario

ALL_FAULTS = {"cancel": 4, "stream_break": 4, "worker_crash": 1, "manager_crash": 2, "hand_over": 2, "wipe": 1}

RESETS = {"reset": 3}
"""Beside the faults, for the walks that try resets of the prefix cache too."""

AGES = {"age": 4}
"""How often time passes in worlds where it does."""

ROTS = {"rot": 2}
"""How often a frame on disk rots, where there is a disk."""

SHARED = (0, 1, 0, 0, 1, 1)
TWO_SHARERS = (Request((0, 1, 0), 2), Request((0, 1, 1, 0), 2))
"""Both begin with the block (0, 1); together they grow to more blocks than three."""

NESTED = (Request((0, 1, 0, 0), 1), Request((0, 1, 0, 0, 1), 2))
"""The first is a prefix of the second, so that its last token's block is one of the second's full blocks."""

NESTED_SENIOR = (NESTED[0], replace(NESTED[1], priority=1))
"""The second is planned first although admitted second, and could fill the slot of the first one's last token."""

FORK = (Request((0, 1, 0, 0), 1), Request((0, 1, 0, 0), 1, fork_of=0))

TWO_TENANTS = (Request((0, 1, 0), 2, tenant="red"), Request((1, 1), 2, tenant="blue"))
"""Each fits into three blocks alone, and both do not."""

DRAFTING = (Request((0, 1, 0), 5, drafts=True), Request((0, 1, 1), 4, drafts=True))
"""Both draft, and may accept none, one or two of their guesses."""

DIVERGING = (Request((0, 1, 0, 0), 2), Request((0, 1, 0, 1, 0), 1), Request((0, 1, 1), 1))
"""Three prompts that part within the first block of four; the third may copy two slots of either block."""

WINDOWED = (Request((0, 1, 0, 1, 1, 0, 0), 1), Request((0, 1, 0, 1, 1, 0, 1), 2))
"""With a window of 4, the second reads two of the three blocks that it has in common with the first."""

BEGINNING = (Request((1,), 3, no_cache=True), Request((0, 1, 0, 1, 1, 0, 0), 1))
"""The second begins with two or three of its four blocks, while the first may bind a second one."""

OUTRANKED = (*BEGINNING, Request((1, 1), 1, no_cache=True), Request((0, 0), 1, priority=1, no_cache=True))
"""Behind the one that begins, one of its priority waits, and one of a higher priority comes."""

_FULL, _WINDOW, _CHUNK, _STATE = KvGroupKind.FULL, KvGroupKind.WINDOW, KvGroupKind.CHUNK, KvGroupKind.STATE
WINDOW_FULL = (KvGroup(_FULL, 0, 1, ()), KvGroup(_WINDOW, 4, 1, ()))
CHUNK = (KvGroup(_FULL, 0, 1, ()), KvGroup(_CHUNK, 4, 1, ()))
COMPOUND = (KvGroup(_FULL, 0, 2, ()), KvGroup(_WINDOW, 5, 3, ()))
THREE = (KvGroup(_FULL, 0, 1, ()), KvGroup(_WINDOW, 3, 2, ()), KvGroup(_CHUNK, 6, 1, ()))
STATE = (KvGroup(_FULL, 0, 1, ()), KvGroup(_STATE, 0, 3, ()))
STATE_OF_A_PAGE = (KvGroup(_FULL, 0, 1, ()), KvGroup(_STATE, 0, 1, ()))
STATE_WINDOW = (KvGroup(_FULL, 0, 2, ()), KvGroup(_WINDOW, 4, 1, ()), KvGroup(_STATE, 0, 2, ()))

IN_GROUPS = (Request((0, 1, 0, 1, 1, 0, 0), 1), Request((0, 1, 0, 1, 1, 1), 2))
"""They have two blocks in common, and a token behind these reads both in a window, and none in a chunk of four."""

ONE_TURN = (Request((0, 1, 0, 1, 1), 1), Request((0, 1, 0, 1, 0), 2))
"""The second goes on from the checkpoint that the first leaves behind the two blocks that they have in common."""

LONGER_TURN = (ONE_TURN[0], Request((0, 1, 0, 1, 0, 1, 1, 0, 1), 1))
"""In a pool of seven pages, the second has no place beside the checkpoint of the first."""

WARM = (Request((0, 1, 0, 0, 1), 1), Request((0, 1, 0, 1, 1), 1))
"""The disk has two blocks of the first, and one of the second."""

TURNS = (Request((0, 1, 0, 1, 1), 1), Request((1, 0, 0, 1, 1, 1), 1), Request((0, 1, 0, 1, 0), 2))
"""In a pool of four blocks, the second evicts what the third has in common with the first."""

FETCHED = (Request((0, 1, 0, 1, 1), 1), Request((0, 1, 0, 1, 0), 2))
"""Both begin with the same two blocks, and a peer has these."""

ONE_BLOCK = (Request((0, 1, 0), 1),)
"""The disk, or a peer, has the block of it that may be a hit."""

HALF, STALE = (TransferEnd.DONE, TransferEnd.STALE), (TransferEnd.STALE,)
MOSTLY = (*(TransferEnd.DONE,) * 8, *TransferEnd)
"""A prompt goes on if all that it reads has come, of all groups."""

TINY: dict[str, Scenario] = {
    "peace": Scenario(TWO_SHARERS, 3),
    "pressure": Scenario((Request((0, 1), 4), Request((0, 1, 1), 3)), 4, budget=3),
    "rivals": Scenario((Request((0,), 5, no_cache=True), Request((1,), 5)), 4, budget=3, max_preemptions=1),
    "cancel": Scenario(TWO_SHARERS, 4, max_faults=1, faults={"cancel": 1}),
    "cancel_nested": Scenario(NESTED, 4, budget=2, max_faults=1, faults={"cancel": 1}),
    "break": Scenario((Request((0, 1, 0), 1), Request((0, 1, 1), 1)), 4, max_faults=1, faults={"stream_break": 1}),
    "break_cancel": Scenario(
        (Request((0, 1, 0), 2), Request((1, 1, 0), 1)), 3, max_faults=2, faults={"stream_break": 1, "cancel": 1}
    ),
    "pressure_cancel": Scenario(
        (Request((0, 1), 3), Request((1,), 2)), 3, budget=3, max_faults=1, faults={"cancel": 1}
    ),
    "worker_crash": Scenario((Request((0, 1, 0), 2),), 3, max_faults=1, faults={"worker_crash": 1}),
    "manager_crash": Scenario((Request((0, 1, 0), 2),), 3, max_faults=2, faults={"manager_crash": 1, "cancel": 1}),
    "hand_over": Scenario((Request((0, 1, 0), 2),), 3, max_faults=2, faults={"hand_over": 1, "wipe": 1}),
    "nested_senior": Scenario(NESTED_SENIOR, 5, budget=2),
    "break_stop": Scenario((Request((0, 1, 0), 3, stop_at=1),), 4, max_faults=1, faults={"stream_break": 1}),
    "fork": Scenario(FORK, 5, budget=2, max_faults=1, faults={"cancel": 1}),
    "tenants": Scenario(TWO_TENANTS, 3, max_faults=1, faults={"cancel": 1}),
    "reset": Scenario((Request((0, 1, 0), 1),), 3, max_faults=2, faults={"reset": 1, "stream_break": 1}),
    "reset_reuse": Scenario(TWO_SHARERS, 4, max_faults=1, faults={"reset": 1}),
    "drafts": Scenario(DRAFTING, 6, budget=6, max_faults=1, faults={"cancel": 1}),
    "drafts_pressure": Scenario(DRAFTING, 5, budget=4),
    "window": Scenario(
        (Request((0, 1, 0, 1, 1, 0, 0, 1, 0, 0), 2), Request((1,), 2)), 4, window=4, max_faults=1, faults={"cancel": 1}
    ),
    "window_reuse": Scenario(WINDOWED, 5, window=4, budget=6, max_num_seqs=1, max_faults=1, faults={"cancel": 1}),
    "partial": Scenario(DIVERGING, 4, block_size=4, partly=True, max_faults=1, faults={"cancel": 1}),
    "partial_break": Scenario(
        DIVERGING[:2], 3, block_size=4, budget=6, partly=True, max_faults=2, faults={"stream_break": 1, "cancel": 1}
    ),
    "parts": Scenario(BEGINNING, 4, first_part=4, max_faults=1, faults={"cancel": 1}),
    "parts_break": Scenario(BEGINNING, 4, first_part=4, max_faults=1, faults={"stream_break": 1}),
    "parts_aged": Scenario(
        OUTRANKED, 4, budget=6, first_part=4, max_wait=1.0, in_turn=1, max_faults=1, faults={"age": 1}
    ),
    "batches": Scenario(TWO_SHARERS, 4, admissions=1, max_faults=1, faults={"cancel": 1}),
    "batches_break": Scenario(
        (Request((0, 1, 0), 1), Request((0, 1, 1), 1)),
        4,
        admissions=1,
        max_faults=2,
        faults={"stream_break": 1, "reset": 1},
    ),
    "window_full": Scenario(TWO_SHARERS, 8, groups=WINDOW_FULL, max_faults=1, faults={"cancel": 1}),
    "window_full_reuse": Scenario(
        IN_GROUPS, 9, groups=WINDOW_FULL, budget=8, max_num_seqs=1, max_faults=1, faults={"cancel": 1}
    ),
    "window_full_break": Scenario(
        (Request((0, 1, 0, 1, 1), 2),), 7, groups=WINDOW_FULL, max_faults=2, faults={"stream_break": 1, "cancel": 1}
    ),
    "chunk": Scenario(IN_GROUPS, 9, groups=CHUNK, budget=8, max_num_seqs=1, max_faults=1, faults={"cancel": 1}),
    "compound": Scenario(IN_GROUPS, 22, groups=COMPOUND, budget=8, max_num_seqs=1, max_faults=1, faults={"cancel": 1}),
    "compound_break": Scenario(
        (Request((0, 1, 0), 2),), 12, groups=COMPOUND, max_faults=2, faults={"stream_break": 1, "reset": 1}
    ),
    "compound_pressure": Scenario((Request((0, 1), 3), Request((1,), 3)), 17, groups=COMPOUND, budget=3),
    "three": Scenario(TWO_SHARERS, 13, groups=THREE, max_faults=1, faults={"cancel": 1}),
    "state": Scenario(ONE_TURN, 9, groups=STATE, budget=6, max_num_seqs=1, max_faults=1, faults={"cancel": 1}),
    "state_together": Scenario(TWO_SHARERS, 13, groups=STATE, budget=6),
    "state_tight": Scenario(LONGER_TURN, 7, groups=STATE, budget=8, max_num_seqs=1, max_faults=1, faults={"cancel": 1}),
    "state_drafts": Scenario(DRAFTING[:1], 7, groups=STATE, budget=6, max_faults=1, faults={"cancel": 1}),
    "state_break": Scenario(
        (Request((0, 1, 0), 2),), 7, groups=STATE, max_faults=2, faults={"stream_break": 1, "reset": 1}
    ),
    "state_break_reuse": Scenario(
        ONE_TURN, 9, groups=STATE, budget=6, max_num_seqs=1, max_faults=1, faults={"stream_break": 1}
    ),
    "state_window": Scenario(
        IN_GROUPS, 18, groups=STATE_WINDOW, budget=8, max_num_seqs=1, max_faults=1, faults={"cancel": 1}
    ),
    "parts_window": Scenario(BEGINNING, 9, groups=WINDOW_FULL, first_part=4, max_faults=1, faults={"cancel": 1}),
    "parts_state_break": Scenario(
        BEGINNING, 5, groups=STATE_OF_A_PAGE, first_part=4, max_faults=1, faults={"stream_break": 1}
    ),
    "frames": Scenario(TURNS, 4, frames=2, budget=6, max_num_seqs=1, max_faults=1, faults={"cancel": 1}),
    "frames_break": Scenario(
        TURNS, 4, frames=3, budget=6, max_num_seqs=1, max_faults=2, faults={"stream_break": 1, "reset": 1}
    ),
    "frames_pressure": Scenario((Request((0, 1), 4), Request((0, 1, 1), 3)), 4, frames=2, budget=3),
    "frames_window": Scenario(
        TURNS, 8, groups=WINDOW_FULL, frames=4, budget=6, max_num_seqs=1, max_faults=1, faults={"cancel": 1}
    ),
    "frames_window_break": Scenario(
        TURNS, 8, groups=WINDOW_FULL, frames=6, budget=6, max_num_seqs=1, max_faults=1, faults={"stream_break": 1}
    ),
    "frames_compound": Scenario(
        TURNS, 17, groups=COMPOUND, frames=12, budget=6, max_num_seqs=1, max_faults=1, faults={"cancel": 1}
    ),
    "frames_state": Scenario(
        TURNS, 9, groups=STATE, frames=8, budget=6, max_num_seqs=1, max_faults=1, faults={"cancel": 1}
    ),
    "frames_state_break": Scenario(
        TURNS, 9, groups=STATE, frames=8, budget=6, max_num_seqs=1, max_faults=1, faults={"stream_break": 1}
    ),
    "disk": Scenario(TURNS, 4, frames=2, disk=2, budget=6, max_num_seqs=1, max_faults=1, faults={"worker_crash": 1}),
    "disk_rots": Scenario(
        TURNS, 4, frames=2, disk=3, budget=6, max_num_seqs=1, max_faults=2, faults={"worker_crash": 1, "rot": 1}
    ),
    "disk_reset": Scenario(
        TURNS, 4, frames=2, disk=2, budget=6, max_num_seqs=1, max_faults=2, faults={"worker_crash": 1, "reset": 1}
    ),
    "disk_warm": Scenario(WARM, 4, frames=4, disk=2, warm=(0, 1, 0, 0), budget=6, max_faults=1, faults={"cancel": 1}),
    "disk_warm_break": Scenario(
        WARM[:1], 4, frames=4, disk=2, warm=(0, 1, 0, 0), budget=6, max_faults=2, faults={"stream_break": 1, "rot": 1}
    ),
    "disk_warm_reset": Scenario(
        WARM[:1], 4, frames=4, disk=2, warm=(0, 1, 0, 0), budget=6, max_faults=2, faults={"reset": 1, "worker_crash": 1}
    ),
    "disk_warm_closes": Scenario(
        WARM, 4, frames=4, disk=2, warm=(0, 1, 0, 0), budget=6, max_faults=1, faults={"close_disk": 1}
    ),
    "disk_warm_state": Scenario(
        ONE_BLOCK, 8, groups=STATE, frames=12, disk=8, warm=(0, 1), budget=6, max_faults=1, faults={"rot": 1}
    ),
    "disk_warm_compound": Scenario(
        ONE_BLOCK, 12, groups=COMPOUND, frames=12, disk=10, warm=(0, 1), budget=6, max_faults=1, faults={"rot": 1}
    ),
    "peers": Scenario(
        FETCHED, 4, frames=4, budget=6, max_num_seqs=1, peers=1, peer_ends=HALF, max_faults=1, faults={"cancel": 1}
    ),
    "peers_reset": Scenario(
        FETCHED[:1],
        4,
        frames=4,
        budget=6,
        peers=1,
        peer_ends=HALF,
        max_faults=2,
        faults={"reset": 1, "stream_break": 1},
    ),
    "peers_crash": Scenario(
        *(FETCHED[:1], 4),
        frames=4,
        budget=6,
        peers=1,
        peer_ends=HALF,
        max_faults=2,
        faults={"worker_crash": 1, "hand_over": 1},
    ),
    "peers_stale": Scenario(TURNS, 4, frames=4, budget=6, max_num_seqs=1, peers=1, peer_ends=STALE),
    "peers_window_reset": Scenario(
        *(ONE_BLOCK, 6),
        groups=WINDOW_FULL,
        frames=8,
        budget=6,
        peers=1,
        peer_ends=HALF,
        max_faults=1,
        faults={"reset": 1},
    ),
    "ahead": Scenario(FETCHED[:1], 4, frames=8, budget=6, peers=1, peer_ends=HALF, wishes=2),
    "ahead_stale": Scenario(
        (replace(FETCHED[0], no_cache=True),), 4, frames=8, budget=6, peers=1, peer_ends=STALE, wishes=2
    ),
    "ahead_window_reset": Scenario(
        (replace(ONE_BLOCK[0], no_cache=True),),
        6,
        groups=WINDOW_FULL,
        frames=16,
        budget=6,
        peers=1,
        peer_ends=STALE,
        wishes=1,
        max_faults=1,
        faults={"reset": 1},
    ),
    "ahead_reset": Scenario(
        *(FETCHED[:1], 4),
        frames=8,
        budget=6,
        peers=1,
        peer_ends=STALE,
        wishes=1,
        max_faults=2,
        faults={"reset": 1, "stream_break": 1},
    ),
    "index_groups": Scenario(
        (Request((0, 1, 0, 0), 1),),
        6,
        groups=WINDOW_FULL,
        with_index=True,
        max_faults=2,
        faults={"wipe": 1, "hand_over": 1},
    ),
    "index": Scenario((Request((0, 1, 0), 1),), 3, with_index=True, max_faults=2, faults={"wipe": 1, "hand_over": 1}),
}

_MIXED = (
    Request((*SHARED, 0), 6),
    Request(SHARED, 5, stop_at=3),
    Request((*SHARED, 1, 1), 4),
    Request((1, 0), 8, stop_at=6),
    Request((*SHARED, 0), 6, fork_of=0),
    Request((0, 1, 0), 7, no_cache=True),
    Request((*SHARED, 0, 0, 1, 1), 3, priority=1),
)
_MANY_SHARERS = tuple(Request((*SHARED, *tail), 3) for tail in ((), (0,), (1,), (0, 0), (0, 1), (1, 0)))
_FORKS = (Request(SHARED, 5), *(Request(SHARED, 5, fork_of=0) for _ in range(3)), Request((0, 1), 6))
_PRIORITIES = tuple(Request((*SHARED[:size], size % 2), 6, priority=size % 3) for size in range(6))

_TENANTS = tuple(
    Request((*SHARED[: 1 + size], size % 2), 6, tenant="red" if size < 4 else "blue", priority=int(size == 7))
    for size in (0, 1, 2, 3, 4, 5, 2, 7)
)

_TWO_FAMILIES = tuple(
    Request((*((0, 1, 0, 0) if n % 6 < 3 else (1, 1, 0, 1)), *((0,), (1,), (0, 1))[n % 3]), 2) for n in range(12)
)

_CROWD = tuple(Request((n % 2, n // 2 % 2), 7 if n else 9) for n in range(7))
"""More sequences stall at once than the blocks of one can serve."""

_RIVALS = tuple(Request((n % 2,), 24 - 4 * (n % 5), no_cache=True) for n in range(10))
"""Long outputs that share nothing, so most of them are preempted."""

_GROWING = tuple(Request((*SHARED, n % 2), 9) for n in range(4))

_BRIEF = (Request((*SHARED, *SHARED, 0), 8), *(Request((0, 1, *((n,), (0, n))[n % 2]), 3) for n in (0, 1, 1, 0, 1, 0)))
"""Brief prompts begin like one that is longer than a window; it runs on while they come."""

_LONG_PROMPTS = tuple(Request((*SHARED, *SHARED, *SHARED[: 1 + n]), 5, priority=n % 2) for n in range(4))
"""Each has twice the blocks that it may hold at once."""

_CONTINUED = tuple(
    Request((*SHARED, *SHARED[: 2 + n % 4], n % 2), 3, priority=int(n == 5), fork_of=3 if n == 4 else None)
    for n in range(8)
)
"""Prompts that begin alike and come after each other, where few run at once."""

_CHATS = tuple(
    Request((*SHARED[: 2 + 2 * (n % 3)], n // 3 % 2), 3 + n % 4, priority=int(n % 4 == 3), no_cache=n % 5 == 4)
    for n in range(10)
)
"""Short prompts that go on from each other, and some that outrank them."""

_IN_TURNS = tuple(
    Request((*talk, *SHARED)[: 5 + 2 * (n // 4 % 3)], 1 + n % 2, priority=int(n % 7 == 6), no_cache=n % 11 == 10)
    for n, talk in enumerate(((0, 1, 0, 0, 1), (1, 0, 0, 1, 1), (1, 1, 0, 1, 0), (0, 1, 0, 0, 1)) * 4)
)
"""Three talks go on in turns. A pool of six blocks has room for one of them."""

_DRAFTING = tuple(replace(each, drafts=number % 3 != 1) for number, each in enumerate(_MIXED))

_DIVERGING = tuple(
    Request((*SHARED, *SHARED[: 1 + n % 5], n % 2, n // 2 % 2), 2 + 2 * (n % 3), priority=int(n == 6)) for n in range(9)
)
"""They part at many places within the second block and the third."""

_LONG = Request((*SHARED, *SHARED, 0), 2)
_BEGINNING = (
    *(Request((n % 2, n // 2 % 2), 4 + n) for n in range(3)),
    _LONG,
    replace(_LONG, fork_of=3),
    Request((0, 1, 0), 7, no_cache=True),
    replace(_LONG, prompt=(1, *_LONG.prompt)),
    Request((1, 1), 5, priority=1),
    replace(_LONG, prompt=(*_LONG.prompt, 1), no_cache=True),
    Request((0, 0), 4),
)
"""The long prompts are most of a pool of ten blocks, and those that run beside them grow."""

_IN_PARTS = tuple(
    Request((n % 2, *SHARED, *SHARED, *SHARED)[: 19 if n % 4 == 3 else 1 + n % 2], 2 + n % 3, priority=int(n == 10))
    for n in range(16)
)
"""Each fourth prompt takes most of a pool, and those between are short and end soon."""

_OUTRANKED = tuple(
    replace(each, priority=(0, 0, 1, 0, 2)[number % 5], fork_of=None) for number, each in enumerate(_BEGINNING)
)

_ANY = (_MIXED, _MANY_SHARERS, _FORKS, _PRIORITIES, _TENANTS, _BRIEF, _CONTINUED, _DRAFTING, _OUTRANKED)


def in_any_groups(seed: int) -> Scenario:
    """Return a world whose pool has groups of some shape, and hardly more pages than its longest request."""
    rng = random.Random(seed)
    size, some = rng.choice((1, 2, 2, 4)), rng.choice(_ANY)
    runs = [KvGroup(kind, rng.randint(1, 12), rng.randint(1, 3), ()) for kind in rng.choices((_WINDOW, _CHUNK), k=3)]
    states = (KvGroup(_STATE, 0, rng.randint(1, 9), ()),) * (rng.random() < 0.5)
    groups = (KvGroup(_FULL, 0, rng.randint(1, 3), ()), *runs[: rng.randint(0 if states else 1, 3)], *states)
    kept = RetainedBlocks(rng.randrange(3), rng.randint(3, 6), rng.choice((0, 80)), 60.0)
    requests = tuple(replace(each, retention=(kept,) if rng.random() < 0.2 else ()) for each in some)
    least = max(
        blocks_needed(len(each.prompt), len(each.prompt) + each.max_tokens, size, 0, groups) for each in requests
    )
    return Scenario(
        requests,
        least + rng.choice((0, 1, least // 4, least, *[4 * least] * bool(states))),
        size,
        budget=rng.choice((2, 5, 12)),
        long_prefill_cap=rng.choice((0, 0, 3)),
        runway_slots=rng.choice((2, 8)),
        runway_reach=8,
        least_saved=rng.choice((0, 2, 64)),
        tail_share=rng.choice((0.125, 1.0)),
        max_num_seqs=rng.choice((2, 3, 8)),
        groups=groups,
        admissions=rng.choice((None, None, 1)),
        with_index=rng.random() < 0.5,
        max_faults=12,
        faults=ALL_FAULTS | RESETS,
        first_part=rng.choice((0, size, 3 * size)),
        frames=(frames := rng.choice((0, 3, 12, 40, 120))),
        disk=rng.choice((0, 0, 12, 80)) if frames else 0,
        peers=rng.choice((0, 1, 2)) if frames else 0,
        peer_ends=MOSTLY,
    )


LARGE: dict[str, Scenario] = {
    "mixed": Scenario(_MIXED, 12, budget=6, with_index=True, runway_slots=4, runway_reach=8),
    "tight": Scenario(_MIXED, 8, budget=4),
    "sharers": Scenario(_MANY_SHARERS, 8, budget=3, with_index=True),
    "capped": Scenario(_MANY_SHARERS, 14, budget=8, long_prefill_cap=2, runway_slots=4, runway_reach=4),
    "families": Scenario(_TWO_FAMILIES, 6, budget=3),
    "forks": Scenario(_FORKS, 14, budget=4),
    "priorities": Scenario(_PRIORITIES, 7, budget=6, max_num_seqs=3),
    "tenants": Scenario(_TENANTS, 8, budget=6, max_num_seqs=3),
    "crowd": Scenario(_CROWD, 9, budget=7),
    "rivals": Scenario(_RIVALS, 14, budget=6, max_preemptions=1),
    "rivals_mixed": Scenario(_MIXED, 8, budget=4, max_preemptions=1),
    "rivals_tenants": Scenario(_TENANTS, 8, budget=6, max_num_seqs=3, max_preemptions=1),
    "wide_blocks": Scenario(_MIXED, 6, block_size=4, budget=5, runway_slots=4, runway_reach=4, with_index=True),
    "drafts": Scenario(_DRAFTING, 12, budget=12, with_index=True, runway_slots=4, runway_reach=8),
    "drafts_tight": Scenario(_DRAFTING, 9, block_size=4, budget=6),
    "drafts_window": Scenario(tuple(Request((*SHARED, n % 2), 9, drafts=n < 3) for n in range(4)), 9, window=4),
    "partial": Scenario(_DIVERGING, 9, block_size=4, budget=6, partly=True, with_index=True),
    "partial_mixed": Scenario(_MIXED, 6, block_size=4, budget=5, runway_slots=4, runway_reach=4, partly=True),
    "partial_drafts": Scenario(_DRAFTING, 9, block_size=4, budget=6, partly=True),
    "parts": Scenario(_BEGINNING, 10, budget=5, first_part=4, with_index=True),
    "parts_mixed": Scenario(_MIXED, 8, budget=4, first_part=2),
    "parts_priorities": Scenario(_PRIORITIES, 7, budget=6, max_num_seqs=3, first_part=2),
    "parts_tenants": Scenario(_TENANTS, 8, budget=6, max_num_seqs=3, first_part=2),
    "parts_aged": Scenario(_OUTRANKED, 10, budget=5, first_part=2, max_wait=1.0, in_turn=2),
    "parts_aged_tenants": Scenario(_TENANTS, 8, budget=6, max_num_seqs=3, first_part=2, max_wait=1.0),
    "parts_drafts": Scenario(_DRAFTING, 9, budget=6, first_part=2),
    "batches": Scenario(_MIXED, 12, budget=6, admissions=1, with_index=True, runway_slots=4, runway_reach=8),
    "batches_tenants": Scenario(_TENANTS, 8, budget=6, max_num_seqs=3, admissions=1),
    "window": Scenario(_GROWING, 9, window=4, budget=5),
    "window_tight": Scenario(_LONG_PROMPTS, 6, window=4, budget=9),
    "window_reuse": Scenario(_CONTINUED, 10, window=4, budget=5, max_num_seqs=2, with_index=True),
    "frames": Scenario(_IN_TURNS, 6, frames=12, budget=5, max_num_seqs=1, with_index=True),
    "frames_few": Scenario(_IN_TURNS, 7, frames=3, budget=4, max_num_seqs=2, with_index=True),
    "frames_pressed": Scenario(_IN_TURNS, 8, frames=8, budget=4, max_num_seqs=3, admissions=1),
    "frames_partial": Scenario(_IN_TURNS, 4, frames=6, block_size=4, budget=6, partly=True, max_num_seqs=1),
    "frames_parts": Scenario(_BEGINNING, 10, frames=6, budget=5, first_part=4, with_index=True),
    "frames_mixed": Scenario(_MIXED, 8, frames=6, budget=4),
    "frames_window": Scenario(_IN_TURNS, 12, groups=WINDOW_FULL, frames=24, budget=5, max_num_seqs=1, with_index=True),
    "frames_window_few": Scenario(_IN_TURNS, 14, groups=WINDOW_FULL, frames=7, budget=4, max_num_seqs=2),
    "frames_chunk": Scenario(_IN_TURNS, 15, groups=CHUNK, frames=12, budget=4, max_num_seqs=3, admissions=1),
    "frames_three": Scenario(_IN_TURNS, 28, groups=THREE, frames=30, budget=5, max_num_seqs=2, with_index=True),
    "frames_compound": Scenario(_MIXED, 44, groups=COMPOUND, frames=40, budget=6),
    "frames_parts_window": Scenario(_IN_PARTS, 17, groups=WINDOW_FULL, frames=20, budget=5, first_part=4),
    "frames_state": Scenario(_IN_TURNS, 14, groups=STATE, frames=24, budget=5, max_num_seqs=1, with_index=True),
    "frames_state_few": Scenario(_CHATS, 16, groups=STATE, frames=7, least_saved=2, budget=4, max_num_seqs=2),
    "frames_state_tails": Scenario(_CONTINUED, 26, groups=STATE, frames=20, tail_share=1.0, budget=5, max_num_seqs=3),
    "frames_state_window": Scenario(_IN_TURNS, 30, groups=STATE_WINDOW, frames=30, budget=5, max_num_seqs=2),
    "disk": Scenario(_IN_TURNS, 6, frames=6, disk=12, budget=5, max_num_seqs=1, with_index=True),
    "disk_few": Scenario(_IN_TURNS, 7, frames=4, disk=4, budget=4, max_num_seqs=2, with_index=True),
    "disk_pressed": Scenario(_IN_TURNS, 8, frames=5, disk=20, budget=4, max_num_seqs=3, admissions=1),
    "disk_tight": Scenario(_IN_TURNS, 7, frames=2, disk=12, budget=4, max_num_seqs=2),
    "disk_brisk": Scenario(_IN_TURNS, 7, frames=4, disk=12, budget=12, max_num_seqs=3, faults={"cancel": 8}),
    "disk_closes": Scenario(
        _IN_TURNS, 7, frames=4, disk=8, budget=4, max_num_seqs=2, with_index=True, faults={"close_disk": 1}
    ),
    "disk_partial": Scenario(_IN_TURNS, 4, frames=6, disk=9, block_size=4, budget=6, partly=True, max_num_seqs=1),
    "disk_parts": Scenario(_BEGINNING, 10, frames=6, disk=12, budget=5, first_part=4, with_index=True),
    "disk_mixed": Scenario(_MIXED, 8, frames=6, disk=8, budget=4, with_index=True),
    "disk_window": Scenario(
        _IN_TURNS, 12, groups=WINDOW_FULL, frames=16, disk=30, budget=5, max_num_seqs=1, with_index=True
    ),
    "disk_window_few": Scenario(_IN_TURNS, 14, groups=WINDOW_FULL, frames=7, disk=9, budget=4, max_num_seqs=2),
    "disk_chunk": Scenario(_IN_TURNS, 15, groups=CHUNK, frames=8, disk=20, budget=4, max_num_seqs=3, admissions=1),
    "disk_three": Scenario(_IN_TURNS, 28, groups=THREE, frames=30, disk=60, budget=5, max_num_seqs=2, with_index=True),
    "disk_compound": Scenario(_IN_TURNS, 30, groups=COMPOUND, frames=26, disk=60, budget=6, max_num_seqs=1),
    "disk_state": Scenario(_IN_TURNS, 14, groups=STATE, frames=24, disk=40, budget=5, max_num_seqs=1, with_index=True),
    "disk_state_few": Scenario(_CHATS, 16, groups=STATE, frames=9, disk=14, least_saved=2, budget=4, max_num_seqs=2),
    "disk_state_window": Scenario(_IN_TURNS, 30, groups=STATE_WINDOW, frames=30, disk=60, budget=5, max_num_seqs=2),
    "peers": Scenario(_IN_TURNS, 6, frames=8, budget=5, peers=1, max_num_seqs=1, with_index=True),
    "peers_few": Scenario(_IN_TURNS, 7, frames=4, budget=4, peers=2, max_num_seqs=2),
    "peers_pressed": Scenario(_IN_TURNS, 8, frames=5, budget=4, peers=1, max_num_seqs=3, admissions=1),
    "peers_disk": Scenario(_IN_TURNS, 6, frames=6, disk=9, budget=5, peers=2, max_num_seqs=2, with_index=True),
    "peers_partial": Scenario(_IN_TURNS, 4, frames=6, block_size=4, budget=6, peers=1, partly=True, max_num_seqs=2),
    "peers_mixed": Scenario(_MIXED, 8, frames=6, budget=4, peers=1, with_index=True),
    "peers_window": Scenario(
        _IN_TURNS,
        12,
        groups=WINDOW_FULL,
        frames=16,
        budget=5,
        peers=1,
        peer_ends=MOSTLY,
        max_num_seqs=1,
        with_index=True,
    ),
    "peers_window_few": Scenario(
        _IN_TURNS, 14, groups=WINDOW_FULL, frames=8, budget=4, peers=2, peer_ends=MOSTLY, max_num_seqs=2
    ),
    "peers_chunk": Scenario(
        _IN_TURNS, 15, groups=CHUNK, frames=9, disk=12, budget=4, peers=2, peer_ends=MOSTLY, max_num_seqs=3
    ),
    "peers_three": Scenario(
        _IN_TURNS,
        28,
        groups=THREE,
        frames=40,
        disk=40,
        budget=5,
        peers=1,
        peer_ends=MOSTLY,
        max_num_seqs=2,
        with_index=True,
    ),
    "peers_compound": Scenario(_MIXED, 44, groups=COMPOUND, frames=40, budget=6, peers=1, peer_ends=MOSTLY),
    "peers_compound_few": Scenario(
        _IN_TURNS, 40, groups=COMPOUND, frames=33, budget=5, peers=1, peer_ends=MOSTLY, max_num_seqs=3
    ),
    "peers_state": Scenario(
        _IN_TURNS,
        14,
        groups=STATE,
        frames=24,
        least_saved=2,
        budget=5,
        peers=1,
        peer_ends=MOSTLY,
        max_num_seqs=1,
        with_index=True,
    ),
    "peers_state_few": Scenario(
        _CHATS, 16, groups=STATE, frames=10, disk=14, budget=4, peers=2, peer_ends=MOSTLY, max_num_seqs=2
    ),
    "peers_state_window": Scenario(
        _IN_TURNS, 30, groups=STATE_WINDOW, frames=30, disk=30, budget=5, peers=2, peer_ends=MOSTLY, max_num_seqs=2
    ),
    "ahead": Scenario(_IN_TURNS, 6, frames=16, budget=5, peers=1, wishes=8, max_num_seqs=2, with_index=True),
    "ahead_few": Scenario(_IN_TURNS, 7, frames=8, budget=4, peers=2, wishes=12, max_num_seqs=2),
    "ahead_disk": Scenario(_IN_TURNS, 6, frames=12, disk=9, budget=5, peers=2, wishes=8, max_num_seqs=2),
    "ahead_mixed": Scenario(_MIXED, 8, frames=16, budget=4, peers=1, wishes=8, with_index=True),
    "ahead_window": Scenario(
        _IN_TURNS, 12, groups=WINDOW_FULL, frames=32, budget=5, peers=1, peer_ends=MOSTLY, wishes=8, max_num_seqs=2
    ),
    "ahead_three": Scenario(
        _IN_TURNS, 28, groups=THREE, frames=80, disk=40, budget=5, peers=1, peer_ends=MOSTLY, wishes=8, max_num_seqs=2
    ),
    "ahead_state": Scenario(
        _IN_TURNS, 14, groups=STATE, frames=48, disk=30, budget=5, peers=1, peer_ends=MOSTLY, wishes=12, max_num_seqs=2
    ),
    "window_full": Scenario(_GROWING, 16, groups=WINDOW_FULL, budget=5, with_index=True),
    "window_full_tight": Scenario(_LONG_PROMPTS, 14, groups=WINDOW_FULL, budget=9),
    "window_full_reuse": Scenario(_CONTINUED, 15, groups=WINDOW_FULL, budget=5, max_num_seqs=2, with_index=True),
    "window_full_brief": Scenario(_BRIEF, 16, groups=WINDOW_FULL, budget=3, with_index=True),
    "window_full_mixed": Scenario(_MIXED, 20, groups=WINDOW_FULL, budget=6, runway_slots=4, runway_reach=8),
    "chunk": Scenario(_CONTINUED, 16, groups=CHUNK, budget=5, max_num_seqs=2, with_index=True),
    "chunk_mixed": Scenario(_MIXED, 18, groups=CHUNK, budget=4),
    "compound": Scenario(_CONTINUED, 36, groups=COMPOUND, budget=5, max_num_seqs=2, with_index=True),
    "compound_mixed": Scenario(_MIXED, 44, groups=COMPOUND, budget=6),
    "compound_crowd": Scenario(_CROWD, 48, groups=COMPOUND, budget=7),
    "three": Scenario(_CONTINUED, 30, groups=THREE, budget=6, max_num_seqs=3, with_index=True),
    "three_tenants": Scenario(_TENANTS, 40, groups=THREE, budget=6, max_num_seqs=3),
    "three_priorities": Scenario(_PRIORITIES, 38, groups=THREE, budget=6, max_num_seqs=3),
    "three_forks": Scenario(_FORKS, 34, groups=THREE, budget=4),
    "three_drafts": Scenario(_DRAFTING, 40, groups=THREE, budget=12, with_index=True, runway_slots=4),
    "three_wide_blocks": Scenario(_MIXED, 24, block_size=4, groups=THREE, budget=5, with_index=True),
    "state": Scenario(_CONTINUED, 18, groups=STATE, least_saved=2, budget=5, max_num_seqs=2, with_index=True),
    "state_tails": Scenario(_CONTINUED, 60, groups=STATE, least_saved=2, tail_share=1.0, budget=5, max_num_seqs=3),
    "state_mixed": Scenario(_MIXED, 22, groups=STATE, least_saved=2, budget=6, runway_slots=4, runway_reach=8),
    "state_tight": Scenario(_CONTINUED, 10, groups=STATE, budget=4),
    "state_forks": Scenario(_FORKS, 22, groups=STATE, budget=4),
    "state_drafts": Scenario(_DRAFTING, 18, groups=STATE, budget=12, with_index=True, runway_slots=4),
    "state_priorities": Scenario(_PRIORITIES, 12, groups=STATE, budget=6, max_num_seqs=3),
    "state_tenants": Scenario(_TENANTS, 13, groups=STATE, least_saved=2, budget=6, max_num_seqs=3),
    "state_window": Scenario(_CONTINUED, 30, groups=STATE_WINDOW, budget=5, max_num_seqs=2, with_index=True),
    "state_window_tight": Scenario(_LONG_PROMPTS, 33, groups=STATE_WINDOW, budget=9),
    "state_window_mixed": Scenario(_MIXED, 32, groups=STATE_WINDOW, budget=4),
    "state_chats": Scenario(_CHATS, 11, groups=STATE, least_saved=2, budget=3, max_num_seqs=3),
    "state_wide_blocks": Scenario(_MIXED, 12, block_size=4, groups=STATE, budget=5, with_index=True),
    "parts_window": Scenario(_IN_PARTS, 17, groups=WINDOW_FULL, budget=5, first_part=4, with_index=True),
    "parts_three": Scenario(_IN_PARTS, 30, groups=THREE, budget=5, first_part=4),
    "parts_three_aged": Scenario(_OUTRANKED, 24, groups=THREE, budget=5, first_part=2, max_wait=1.0, in_turn=2),
    "parts_state": Scenario(_IN_PARTS, 15, groups=STATE, least_saved=2, budget=5, first_part=4, with_index=True),
    "parts_state_window": Scenario(_IN_PARTS, 30, groups=STATE_WINDOW, least_saved=2, budget=5, first_part=4),
    "window_wide_blocks": Scenario(_CONTINUED, 6, block_size=4, window=3, budget=6, max_num_seqs=2, with_index=True),
}
