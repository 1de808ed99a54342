"""Simpler rules of what blocks hold (drafts, windows, copied parts), and the searches that notice them."""

from __future__ import annotations

from gpuworker.scheduling import lease_agent
from gpuworker.scheduling.block_states import BlockStates
from gpuworker.scheduling.lease_agent import BlockCloser, LeaseAgent
from gpuworker.scheduling.partial_copies import PartialCopies
from gpuworker.scheduling.sequence import Sequence
from kvmanager.cache.prefix_cache import PartialIndex, PrefixCache
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger import block_granter, grant_plan, report_applier
from kvmanager.ledger.ledger_state import LedgerState
from tests.suites.protocol.manager_rules import (
    admit_whole_prompts,
    choose_the_source_early,
    expect_the_source,
    hold_no_source,
    keep_the_source,
    reach_back_too_little,
    run_of_any_blocks,
    take_the_early_source,
)
from tests.suites.protocol.mutant import CALM, Exhaustive, Mutant, Walks, never, nothing
from tests.suites.protocol.worker_rules import (
    compute_a_refused_draft,
    copy_all_that_is_there,
    copy_with_the_claim,
    lose_the_blocks_of_drafts,
    report_by_sequence,
    report_copies_at_once,
    seal_drafts,
    take_any_table,
)

CONTENT_MUTANTS = (
    Mutant(
        "31",
        "a block is sealed when drafts fill it",
        ((BlockCloser, "close", seal_drafts),),
        Exhaustive("drafts"),
        ("I4",),
    ),
    Mutant(
        "32",
        "a refused draft counts as computed",
        ((Sequence, "advance", compute_a_refused_draft),),
        Exhaustive("drafts"),
        ("I3",),
    ),
    Mutant(
        "33",
        "a block that refused drafts have written leaves the block table",
        ((Sequence, "advance", lose_the_blocks_of_drafts),),
        Exhaustive("drafts"),
        ("I2",),
    ),
    Mutant(
        "34",
        "the next step is planned while a step with drafts is in flight",
        ((LeaseAgent, "_waits_for_tokens", never),),
        Exhaustive("drafts"),
        ("I2", "I3"),
    ),
    Mutant(
        "37",
        "a windowed prompt is admitted only with the blocks of all its tokens",
        ((LedgerConfig, "admission_blocks", admit_whole_prompts),),
        Exhaustive("window"),
        ("I10",),
    ),
    Mutant(
        "38",
        "a copy of a part counts all slots that its source has",
        ((BlockStates, "copy", copy_all_that_is_there),),
        Exhaustive("partial"),
        ("I3",),
    ),
    Mutant(
        "39",
        "a block into which another one was copied claims that one's hash",
        ((BlockStates, "copy", copy_with_the_claim),),
        Exhaustive("partial"),
        ("I4",),
    ),
    Mutant(
        "40",
        "a block into which another one is copied is expected to have that one's hash",
        ((block_granter, "grant_blocks", expect_the_source),),
        Walks("partial", faults=CALM),
        ("I2", "I3"),
    ),
    Mutant(
        "41",
        "the source of a copy was chosen before the sequence waited, and is evicted or used again",
        (
            (grant_plan, "plan_admission", choose_the_source_early),
            (grant_plan, "find_partial_source", take_the_early_source),
        ),
        Walks("partial", first_seed=9, faults=CALM),
        ("I1", "I3"),
    ),
    Mutant(
        "42",
        "the source of a copy is not held",
        ((LedgerState, "hold_copy_source", hold_no_source),),
        Exhaustive("partial"),
        ("I12",),
    ),
    Mutant(
        "43",
        "a sequence that leaves before its copy keeps the source",
        ((report_applier, "release_block_table", keep_the_source),),
        Exhaustive("partial"),
        ("I1", "I8"),
    ),
    Mutant(
        "44",
        "a copy is reported when it is granted",
        ((LeaseAgent, "apply_grant", report_copies_at_once),),
        Exhaustive("partial"),
        ("I12",),
    ),
    Mutant(
        "45",
        "whichever copy has run, the copies of all sequences count as run",
        ((PartialCopies, "ran", report_by_sequence),),
        Walks("partial", first_seed=31, faults=CALM),
        ("I12",),
    ),
    Mutant(
        "46",
        "contents that were evicted stay in the index of parts",
        ((PartialIndex, "forget", nothing),),
        Exhaustive("partial"),
        ("I1",),
    ),
    Mutant(
        "47",
        "a look-up takes the window to begin a token later, and the worker does not compare",
        ((LedgerConfig, "unread_blocks", reach_back_too_little), (lease_agent, "_check_window", take_any_table)),
        Exhaustive("window_reuse"),
        ("I3",),
    ),
    Mutant(
        "48",
        "a look-up takes the window to begin a token later",
        ((LedgerConfig, "unread_blocks", reach_back_too_little),),
        Exhaustive("window_reuse"),
        ("I2",),
    ),
    Mutant(
        "49",
        "blocks behind empty places need not be sealed",
        ((PrefixCache, "find_deepest_run", run_of_any_blocks), (lease_agent, "_check_window", take_any_table)),
        Walks("window_reuse", first_seed=5),
        ("I3", "I10"),
    ),
)
