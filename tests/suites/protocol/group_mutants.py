"""Simpler rules of pools with groups of layers, and the searches that notice them."""

from __future__ import annotations

from gpuworker.scheduling import step_scheduler
from gpuworker.scheduling.block_states import BlockStates
from gpuworker.scheduling.group_grants import GroupGrantCheck
from gpuworker.scheduling.lease_agent import BlockCloser, LeaseAgent
from kvmanager.cache.block_pool import BlockPool
from kvmanager.cache.group_match import GroupMatcher
from kvmanager.cache.prefix_cache import PrefixCache
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger import rebuild, runway
from kvmanager.ledger.block_store import BlockStore
from tests.suites.protocol.group_rules import (
    bind_first_pages_alone,
    count_no_children_in_runs,
    evict_parents_first,
    fill_up_the_first_group,
    free_first_pages_alone,
    lease_one_page_for_a_stalled_sequence,
    mix_sealed_and_pending,
    read_the_last_block,
    sort_by_depth_alone,
    take_any_run,
    tell_first_pages_alone,
    tell_of_the_first_group,
    trim_ahead_of_rows,
    untell_of_the_first_group,
    void_by_the_first_page,
    want_blocks,
    with_one_page_a_stall,
)
from tests.suites.protocol.manager_rules import EVICTING_AHEAD
from tests.suites.protocol.mutant import CALM, Exhaustive, Mutant, Walks

GROUP_MUTANTS = (
    Mutant(
        "65",
        "a run is trimmed ahead of rows in flight",
        ((BlockCloser, "_trim_runs", trim_ahead_of_rows),),
        Walks("chunk_mixed", first_seed=2),
        ("I2", "I4"),
    ),
    Mutant(
        "66a",
        "a run is hit by the last block before the boundary, and the worker does not compare",
        ((GroupMatcher, "_unread", read_the_last_block), (GroupGrantCheck, "_check_run", take_any_run)),
        Walks("window_full_reuse", faults=CALM),
        ("I3",),
    ),
    Mutant(
        "66b",
        "a run is hit by the last block before the boundary",
        ((GroupMatcher, "_unread", read_the_last_block),),
        Exhaustive("window_full_reuse"),
        ("I2",),
    ),
    Mutant(
        "67a",
        "an inventory names the first pages of blocks alone",
        ((LeaseAgent, "inventory", tell_first_pages_alone),),
        Exhaustive("compound_break"),
        ("I2",),
    ),
    Mutant(
        "68a",
        "a release frees the first page of a block alone",
        ((BlockPool, "_free_others", free_first_pages_alone),),
        Exhaustive("compound"),
        ("I1",),
    ),
    Mutant(
        "69a",
        "what a block holds is void when its first page begins a new life, and not when another one does",
        ((BlockStates, "_void", void_by_the_first_page), *EVICTING_AHEAD),
        Walks("compound_mixed", faults=CALM),
        ("I4",),
    ),
    Mutant(
        "78a",
        "a full block is evicted under the block of a run",
        ((BlockStore, "publish_new_block", count_no_children_in_runs),),
        Exhaustive("window_full"),
        ("I1",),
    ),
    Mutant(
        "79a",
        "the index is told of the first group's blocks alone",
        ((PrefixCache, "note_stored", tell_of_the_first_group), (PrefixCache, "_leaves", untell_of_the_first_group)),
        Walks("window_full_reuse"),
        ("I6",),
    ),
    Mutant(
        "80",
        "the pages of a bound block are applied as one",
        ((BlockPool, "bind_pages", bind_first_pages_alone),),
        Exhaustive("compound_pressure"),
        ("I1", "I4"),
    ),
    Mutant(
        "81a",
        "the lease target counts blocks",
        (
            (step_scheduler, "_missing_pages", want_blocks),
            (runway, "runway_terms", lease_one_page_for_a_stalled_sequence),
        ),
        Walks("compound_crowd", faults=CALM),
        ("I9", "I10"),
    ),
    Mutant(
        "81b",
        "of a stalled sequence one page is leased",
        ((runway, "runway_terms", lease_one_page_for_a_stalled_sequence),),
        Walks("compound_crowd", first_seed=123, faults=CALM),
        ("I9", "I10"),
    ),
    Mutant(
        "83",
        "the blocks of a place are shared where some are sealed and some are not",
        ((GroupMatcher, "_leading", mix_sealed_and_pending),),
        Walks("window_full_brief", first_seed=22, faults=CALM),
        ("I2",),
    ),
    Mutant(
        "84",
        "a stalled sequence lacks one page",
        ((LedgerConfig, "__post_init__", with_one_page_a_stall),),
        Exhaustive("compound_pressure"),
        ("I9", "I10"),
    ),
    Mutant(
        "85",
        "the blocks of the first group are released before those of runs, and evicted before them",
        ((Sequence, "held_blocks", evict_parents_first),),
        Walks("window_full_reuse", faults=CALM),
        ("I2", "I5"),
    ),
    Mutant(
        "86",
        "after a rebuild, blocks of runs are evicted with those of the first group at their depth",
        ((rebuild, "_sort_by_depth", sort_by_depth_alone),),
        Walks("window_full_reuse", first_seed=3),
        ("I2", "I5"),
    ),
    Mutant(
        "87",
        "right drafts count as computed in the first group alone",
        ((BlockStates, "fill_up", fill_up_the_first_group),),
        Walks("three_drafts", first_seed=8, faults=CALM),
        ("I2", "I4"),
    ),
)
