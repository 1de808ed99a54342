"""Simpler rules of leases, sessions and the index, and the searches that notice them."""

from __future__ import annotations

from gpuworker.core.block_states import BlockStates
from gpuworker.core.departures import Departures
from gpuworker.core.grant_applier import GrantApplier
from gpuworker.core.lease_agent import LeaseAgent
from gpuworker.core.lease_session import LeaseSession
from gpuworker.core.step_scheduler import StepScheduler
from kvmanager.core import chunked_grants, epochs, fork, rebuild
from kvmanager.core.config import LedgerConfig
from kvmanager.core.ledger_state import LedgerState
from kvmanager.core.manager import Manager
from kvmanager.core.preemption import Exposure
from kvmanager.core.prefix_cache import PrefixCache
from tests.suites.protocol.edge_rules import break_without_loss_of_session, keep_the_generation, no_jump, resume
from tests.suites.protocol.index import Index
from tests.suites.protocol.manager_rules import (
    EVICTING_AHEAD,
    AdmitsWhenNoneEverStalled,
    AssumesTheTargetIsKnown,
    CountsEveryStall,
    EvictsShallowestFirst,
    LeavesPending,
    LetsTenantsTakeTurns,
    ReleasesFirst,
    ReleasesOnTheOrder,
    complete_without_reset,
    copy_all_known,
    count_by_redis_alone,
    expect_the_last_block_too,
    forget_who_lacks_blocks,
    lease_nothing_to_it,
    obey,
    one_block_a_hash,
    publish_beside_a_cached_copy,
    see_nobody_lacking,
)
from tests.suites.protocol.mutant import CALM, HASTY, Exhaustive, Mutant, Walks, always, never, nothing, zero
from tests.suites.protocol.worker_rules import (
    accept_any_manager,
    adopt_orphans,
    always_keep_a_block,
    apply_what_was_buffered,
    attach_without_a_target,
    copy_what_will_be_there,
    keep_content,
    keep_the_claim_until_bound,
    leave_out_draining,
    obey_one_preemption,
    report_the_release_at_once,
    reset_only_when_it_waits,
    reuse_ids,
    wait_for_the_filler,
)
from tests.suites.protocol.world import World

LEASE_MUTANTS = (
    Mutant(
        "1",
        "a dropped admit drops the resets of its blocks too",
        ((GrantApplier, "_admit", reset_only_when_it_waits),),
        Walks("families", faults=CALM, pace=HASTY),
        ("I3",),
    ),
    Mutant(
        "2",
        "a sharer waits for the sequence named as filler",
        ((StepScheduler, "_take", wait_for_the_filler),),
        Exhaustive("cancel"),
        ("I10",),
    ),
    Mutant(
        "3",
        "a release is reported while a step of the sequence is in flight",
        ((Departures, "leave_if_idle", report_the_release_at_once),),
        Exhaustive("cancel"),
        ("I2", "I4"),
    ),
    Mutant(
        "4",
        "commands buffered before a break are applied after it",
        ((LeaseSession, "receive", apply_what_was_buffered),),
        Exhaustive("break"),
        ("I2", "I3", "I4"),
    ),
    Mutant(
        "5",
        "the worker obeys two managers",
        ((LeaseSession, "receive", apply_what_was_buffered), (LeaseSession, "accepts_epoch", accept_any_manager)),
        Exhaustive("hand_over"),
        ("I2", "I3", "I4"),
    ),
    Mutant(
        "6",
        "draining sequences are missing from the inventory",
        ((LeaseAgent, "inventory", leave_out_draining),),
        Exhaustive("break_cancel"),
        ("I2", "I3", "I4"),
    ),
    Mutant(
        "7",
        "cached blocks whose parent is missing are adopted",
        ((BlockStates, "parent_index", adopt_orphans), *EVICTING_AHEAD),
        Walks("mixed"),
        ("I5",),
    ),
    Mutant(
        "8",
        "a leased, unbound block keeps its content",
        ((BlockStates, "lease", keep_the_claim_until_bound),),
        Walks("mixed"),
        ("I4",),
    ),
    Mutant(
        "9",
        "a victim's blocks are granted again on the order, not on the report",
        (obey(preemption=ReleasesOnTheOrder()),),
        Exhaustive("pressure"),
        ("I2", "I3", "I4"),
    ),
    Mutant(
        "10",
        "a freed block stays pending",
        (obey(reports=LeavesPending()),),
        Exhaustive("cancel"),
        ("I1", "I8"),
    ),
    Mutant(
        "11",
        "a slot number that is used again names the sequence",
        ((World, "new_sequence_id", reuse_ids), (LeaseAgent, "_check_id", nothing)),
        Exhaustive("cancel"),
        ("I2", "I3", "I4"),
    ),
    Mutant(
        "12",
        "a copy counts slots that its source has not filled yet",
        ((BlockStates, "copy", copy_what_will_be_there),),
        Exhaustive("fork"),
        ("I3",),
    ),
    Mutant(
        "13",
        "a session is resumed after a break",
        ((World, "_lose", break_without_loss_of_session), (World, "connect", resume)),
        Exhaustive("break"),
        ("I2", "I8", "I10"),
    ),
    Mutant(
        "14a",
        "report content is kept across a new attach",
        ((LeaseAgent, "detach", keep_content),),
        Exhaustive("break"),
        ("I2", "I4"),
    ),
    Mutant(
        "14b",
        "reports of an old session that are still queued are applied",
        ((Manager, "current", always),),
        Exhaustive("break"),
        ("I2", "I4"),
    ),
    Mutant(
        "15",
        "releases are applied before the binds and seals of their report",
        (obey(reports=ReleasesFirst()),),
        Exhaustive("pressure"),
        ("I2",),
    ),
    Mutant(
        "16",
        "stalls are counted and the count sticks",
        (obey(reports=CountsEveryStall(), granter=AdmitsWhenNoneEverStalled()),),
        Exhaustive("pressure"),
        ("I10",),
    ),
    Mutant(
        "17",
        "the lease target is sent only when it changes, also after a rebuild",
        (obey(loader=AssumesTheTargetIsKnown()), (LeaseAgent, "attached", attach_without_a_target)),
        Exhaustive("break_stop"),
        ("I8",),
    ),
    Mutant(
        "18",
        "the worker never gives leases back",
        ((LeaseAgent, "_return_excess", nothing),),
        Exhaustive("cancel"),
        ("I8", "I10"),
    ),
    Mutant(
        "19",
        "a fork's copy covers the last known token",
        ((GrantApplier, "_uncover_last_known", nothing), (fork, "copy_length", copy_all_known)),
        Exhaustive("fork"),
        ("I10",),
    ),
    Mutant(
        "20",
        "the epoch comes from the counter in Redis alone",
        (
            (epochs, "next_epoch", count_by_redis_alone),
            (epochs, "must_rise", never),
            (World, "random_jump", no_jump),
        ),
        Walks("mixed"),
        ("I10",),
    ),
    Mutant(
        "21",
        "one block a hash",
        ((PrefixCache, "register", one_block_a_hash),),
        Walks("sharers", faults=CALM),
        ("I1", "I5"),
    ),
    Mutant(
        "22",
        "after a rebuild the order of eviction is not deepest first",
        (obey(loader=EvictsShallowestFirst()),),
        Walks("mixed"),
        ("I2", "I5"),
    ),
    Mutant(
        "23",
        "a rebuild keeps the generation",
        ((World, "republish", keep_the_generation),),
        Walks("mixed"),
        ("I5", "I6"),
    ),
    Mutant(
        "24",
        "index writes are not fenced",
        ((Index, "check", nothing),),
        Exhaustive("index"),
        ("I5", "I6"),
    ),
    Mutant(
        "26",
        "the block of the last known token may be shared before it is sealed",
        ((LedgerConfig, "hits_of", expect_the_last_block_too),),
        Exhaustive("nested_senior"),
        ("I10",),
    ),
    Mutant(
        "27",
        "after a wipe the next epoch is the highest known plus one",
        ((World, "random_jump", no_jump),),
        Walks("mixed"),
        ("I5", "I6"),
    ),
    Mutant(
        "28",
        "a tenant that is preempted for another one may be left with nothing",
        (obey(preemption=LetsTenantsTakeTurns()),),
        Exhaustive("tenants"),
        ("I10", "I13"),
    ),
    Mutant(
        "29",
        "the worker confirms a reset and keeps its claims",
        ((BlockStates, "forget_unheld", nothing),),
        Exhaustive("reset"),
        ("I11",),
    ),
    Mutant(
        "30",
        "a reset whose order was lost with its stream is not repeated",
        ((Manager, "complete", complete_without_reset),),
        Exhaustive("reset"),
        ("I11",),
    ),
    Mutant(
        "35",
        "a cached block keeps its place in the order of eviction beside a block in use with its content",
        ((LedgerState, "publish", publish_beside_a_cached_copy),),
        Exhaustive("cancel_nested"),
        ("I1",),
    ),
    Mutant(
        "36",
        "the worker obeys one preemption of a batch",
        ((LeaseAgent, "apply", obey_one_preemption),),
        Walks("crowd", faults=CALM),
        ("I9", "I10"),
    ),
    Mutant(
        "50",
        "who was preempted as often as may be loses the least, and is preempted again",
        ((Exposure, "is_bounded", never),),
        Walks("rivals", faults=CALM),
        ("I13",),
    ),
    Mutant(
        "50b",
        "a rebuild counts the preemptions of each sequence anew",
        ((rebuild, "_preemptions_of", zero),),
        Walks("rivals", faults=("stream_break", "manager_crash")),
        ("I13",),
    ),
    Mutant(
        "51",
        "who may not be preempted again is admitted with its tokens alone",
        ((LedgerConfig, "holds_whole", never),),
        Walks("rivals", faults=CALM),
        ("I9", "I10"),
    ),
    Mutant(
        "52",
        "a prompt begins with a part of its blocks while another one lacks some",
        ((LedgerState, "partly_granted", see_nobody_lacking),),
        Walks("parts", faults=CALM),
        ("I14",),
    ),
    Mutant(
        "53",
        "a prompt that lacks blocks always leaves one in the pool",
        ((StepScheduler, "_kept_for_decodes", always_keep_a_block),),
        Exhaustive("parts"),
        ("I10",),
    ),
    Mutant(
        "54",
        "a rebuild forgets which prompt lacks blocks",
        ((rebuild, "partial_of", forget_who_lacks_blocks),),
        Exhaustive("parts_break"),
        ("I14",),
    ),
    Mutant(
        "55",
        "what a prompt lacks is not leased",
        ((chunked_grants, "lease_want", lease_nothing_to_it),),
        Exhaustive("parts"),
        ("I10",),
    ),
)
