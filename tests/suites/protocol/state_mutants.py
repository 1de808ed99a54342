"""Simpler rules of pools with checkpoints of states, and the searches that notice them.

The specification of memory kinds numbers simpler rules from 56 to 82. Here numbers 56 to 63 are of prompts that are
begun. What stands for each of the specification's, by its number:

    56      88b, 91: K/V is hit without states, or states are not loaded
    57      88a: filled slots are skipped, and the states are those of an earlier boundary
    58      none: K/V is shared up to the boundary alone, so no row finds a slot filled that it computes
    59      89a: the states behind a chunk that ends at no boundary
    60      92: what a plan has passed is released; a checkpoint has no roles that could change meanwhile
    61, 63  none: a checkpoint is a copy, and no step writes states into a page but to save one
    62      89b, 90: a checkpoint is sealed without pages of its own, or without a save
    64      64
    65      65, and 92 of checkpoints
    66      66a, 66b
    67-69   67a, 68a, 69a of windows, 67b, 68b, 69b of checkpoints
    70      none: a row of one token is planned behind the result of the row before the last one; I31 looks
    71      no violation: the seal of a block that is free is ignored, and nothing ever hits; the exact tests of
            tests/kvmanager/ledger/test_checkpoints.py fail
    72      72 at the worker, 96 at the manager
    73      73
    74      74
    75      75
    76, 77  none: no message tells of drafts; tests/gpuworker/runner/test_drafted_states.py finds both
    78      78a of windows, 78b of checkpoints
    79      79a of windows, 79b of checkpoints
    80      80
    81      81a, 81b
    82      none in this model of one worker: tests/kvmanager/sessions/test_handler.py refuses a worker of other groups
"""

from __future__ import annotations

from gpuworker.scheduling.block_states import BlockStates
from gpuworker.scheduling.departures import Departures
from gpuworker.scheduling.group_grants import GroupGrantCheck
from gpuworker.scheduling.lease_agent import BlockCloser, LeaseAgent
from gpuworker.scheduling.sequence import Sequence as WorkerSequence
from gpuworker.scheduling.step_scheduler import StepScheduler
from kvmanager.cache.block_pool import BlockPool
from kvmanager.cache.group_match import GroupMatcher
from kvmanager.cache.prefix_cache import PrefixCache
from kvmanager.ledger import grant_plan, rebuild, report_applier
from kvmanager.ledger.block_store import BlockStore
from kvmanager.ledger.sequence_table import SequenceTable
from tests.suites.protocol.group_rules import (
    count_no_children_in_runs,
    free_first_pages_alone,
    take_any_run,
    tell_first_pages_alone,
    tell_of_the_first_group,
    untell_of_the_first_group,
    void_by_the_first_page,
)
from tests.suites.protocol.manager_rules import EVICTING_AHEAD
from tests.suites.protocol.mutant import CALM, HASTY, Exhaustive, Mutant, Walks
from tests.suites.protocol.state_rules import (
    follow_nothing,
    forget_what_is_to_be_saved,
    go_on_past_checkpoints,
    hit_with_earlier_states,
    hit_without_states,
    keep_what_it_was_to_load,
    leave_out_checkpoints,
    let_the_source_go,
    load_nothing,
    save_behind_the_chunk,
    save_nothing,
    seal_every_checkpoint,
    share_what_is_to_be_saved,
    share_with_forks,
    trim_ahead_of_saves,
    wait_for_what_is_hit,
    wake_nobody,
)
from tests.suites.protocol.worker_rules import report_the_release_at_once

STATE_MUTANTS = (
    Mutant(
        "67b",
        "an inventory names the first pages of checkpoints alone",
        ((LeaseAgent, "inventory", tell_first_pages_alone),),
        Exhaustive("state_break"),
        ("I2",),
    ),
    Mutant(
        "68b",
        "a release frees the first page of a checkpoint alone",
        ((BlockPool, "_free_others", free_first_pages_alone),),
        Exhaustive("state"),
        ("I1",),
    ),
    Mutant(
        "69b",
        "a checkpoint is void when its first page begins a new life, and not when another one does",
        ((BlockStates, "_void", void_by_the_first_page), *EVICTING_AHEAD),
        Walks("state_mixed", faults=CALM),
        ("I4",),
    ),
    Mutant(
        "72",
        "checkpoints of rows in flight and to come are missing from the inventory",
        ((LeaseAgent, "inventory", leave_out_checkpoints),),
        Exhaustive("state_break"),
        ("I2",),
    ),
    Mutant(
        "74",
        "a release is reported while a step with a checkpoint of the sequence is in flight",
        ((Departures, "leave_if_idle", report_the_release_at_once),),
        Exhaustive("state"),
        ("I2", "I4"),
    ),
    Mutant(
        "78b",
        "K/V is evicted under the states behind it",
        ((BlockStore, "publish_new_block", count_no_children_in_runs),),
        Exhaustive("state"),
        ("I1",),
    ),
    Mutant(
        "79b",
        "the index is told of K/V, whether or not there are states behind it",
        ((PrefixCache, "note_stored", tell_of_the_first_group), (PrefixCache, "_leaves", untell_of_the_first_group)),
        Walks("state"),
        ("I6",),
    ),
    Mutant(
        "64",
        "a checkpoint that is hit is held until the admission, and not until it is loaded",
        ((LeaseAgent, "apply_grant", let_the_source_go),),
        Walks("state_tenants", first_seed=105, faults=CALM, pace=HASTY),
        ("I28",),
    ),
    Mutant(
        "73",
        "a sequence waits for a checkpoint that does not fit beside its own blocks",
        ((grant_plan, "_plan_in_groups", wait_for_what_is_hit),),
        Exhaustive("state_tight"),
        ("I10",),
    ),
    Mutant(
        "88a",
        "states of an earlier boundary stand for those of a later one, and the worker does not compare",
        ((GroupMatcher, "match", hit_with_earlier_states), (GroupGrantCheck, "_check_run", take_any_run)),
        Walks("state", faults=CALM),
        ("I1", "I28"),
    ),
    Mutant(
        "88b",
        "K/V is hit without states",
        ((GroupMatcher, "match", hit_without_states),),
        Exhaustive("state_window"),
        ("I2",),
    ),
    Mutant(
        "89a",
        "a checkpoint is what stands behind the chunk that reaches it",
        (
            (StepScheduler, "_next_checkpoint", go_on_past_checkpoints),
            (StepScheduler, "_note_states", save_behind_the_chunk),
            (BlockCloser, "_seal_runs", seal_every_checkpoint),
        ),
        Exhaustive("state"),
        ("I4", "I28"),
    ),
    Mutant(
        "89b",
        "a checkpoint is sealed where no chunk ends and nothing is saved",
        (
            (StepScheduler, "_next_checkpoint", go_on_past_checkpoints),
            (BlockCloser, "_seal_runs", seal_every_checkpoint),
        ),
        Exhaustive("state"),
        ("I4", "I28"),
    ),
    Mutant(
        "90",
        "a checkpoint is sealed and was not saved",
        ((StepScheduler, "_note_states", save_nothing),),
        Exhaustive("state"),
        ("I4", "I28"),
    ),
    Mutant(
        "91",
        "a sequence goes on behind a checkpoint and has not loaded it",
        ((StepScheduler, "_note_states", load_nothing),),
        Exhaustive("state"),
        ("I28",),
    ),
    Mutant(
        "92",
        "a checkpoint is released ahead of the step that saves it",
        ((BlockCloser, "_trim_runs", trim_ahead_of_saves),),
        Walks("state_mixed", first_seed=268, faults=CALM),
        ("I2", "I4", "I26"),
    ),
    Mutant(
        "93a",
        "a checkpoint is shared before it is saved, and the worker does not compare",
        ((BlockStore, "append_run_block", share_what_is_to_be_saved), (GroupGrantCheck, "_check_run", take_any_run)),
        Exhaustive("state_together"),
        ("I28",),
    ),
    Mutant(
        "93b",
        "a checkpoint is shared before it is saved",
        ((BlockStore, "append_run_block", share_what_is_to_be_saved),),
        Exhaustive("state_together"),
        ("I2",),
    ),
    Mutant(
        "94",
        "a preempted sequence begins with the states that its former grant named",
        ((WorkerSequence, "requeue", keep_what_it_was_to_load),),
        Walks("state_tenants", first_seed=115, faults=CALM, pace=HASTY),
        ("I28",),
    ),
    Mutant(
        "95",
        "a fork shares what its parent has computed",
        ((grant_plan, "_plan_in_groups", share_with_forks),),
        Walks("state_forks", faults=CALM),
        ("I2",),
    ),
    Mutant(
        "96",
        "a rebuild forgets checkpoints that are to be saved",
        ((rebuild, "_restore_tables", forget_what_is_to_be_saved),),
        Exhaustive("state_break"),
        ("I2",),
    ),
    Mutant(
        "75",
        "a sequence waits on when the one has left whose checkpoint it waits for",
        ((SequenceTable, "end_planned", wake_nobody),),
        Walks("state_chats", first_seed=5, faults=CALM),
        ("I1",),
    ),
    Mutant(
        "97",
        "a tail is what was granted, wherever its sequence has left its states",
        ((report_applier, "_follow_tail", follow_nothing),),
        Walks("state_tails", faults=CALM),
        ("I2",),
    ),
)
