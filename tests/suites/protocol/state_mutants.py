"""Simpler rules of pools with checkpoints of states, and the searches that notice them."""

from __future__ import annotations

from gpuworker.scheduling.group_grants import GroupGrantCheck
from gpuworker.scheduling.lease_agent import BlockCloser, LeaseAgent
from gpuworker.scheduling.sequence import Sequence as WorkerSequence
from gpuworker.scheduling.step_scheduler import StepScheduler
from kvmanager.cache.group_match import GroupMatcher
from kvmanager.ledger import block_granter, rebuild
from kvmanager.ledger.block_store import BlockStore
from tests.suites.protocol.group_rules import take_any_run
from tests.suites.protocol.mutant import CALM, HASTY, Exhaustive, Mutant, Walks
from tests.suites.protocol.state_rules import (
    end_with_the_prompt,
    forget_what_is_to_be_saved,
    go_on_past_checkpoints,
    hit_with_earlier_states,
    hit_without_states,
    keep_what_it_was_to_load,
    let_the_source_go,
    load_nothing,
    save_behind_the_chunk,
    save_nothing,
    seal_every_checkpoint,
    share_what_is_to_be_saved,
    share_with_forks,
    trim_ahead_of_saves,
    wait_for_what_is_hit,
)

STATE_MUTANTS = (
    Mutant(
        "64",
        "a checkpoint that is hit is held until the admission, and not until it is loaded",
        ((LeaseAgent, "apply_grant", let_the_source_go),),
        Walks("state_tenants", first_seed=100, faults=CALM, pace=HASTY),
        ("I28",),
    ),
    Mutant(
        "73",
        "a sequence waits for a checkpoint that does not fit beside its own blocks",
        ((block_granter, "_plan_in_groups", wait_for_what_is_hit),),
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
        Walks("state_mixed", faults=CALM),
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
        Walks("state_tenants", faults=CALM, pace=HASTY),
        ("I28",),
    ),
    Mutant(
        "95",
        "a fork shares what its parent has computed",
        ((block_granter, "_plan_in_groups", share_with_forks),),
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
        "97",
        "a checkpoint stands at the last full block of a prompt, even if that has its last token",
        ((block_granter, "_with_checkpoints", end_with_the_prompt),),
        Exhaustive("state_together"),
        ("I2",),
    ),
)
