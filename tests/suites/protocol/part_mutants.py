"""Simpler rules of begun prompts and of passing where the pool has groups, and the searches that notice them.

No violation, so no mutant: that checkpoints count again in what a begun prompt lacks, which then gets in parts what it
could have at once; and that a begun prompt leaves nothing to others, or others are admitted as soon as what it lacks is
leased, which slow those or this one. tests/kvmanager/ledger/test_parts_in_groups.py has the exact numbers of these.
"""

from __future__ import annotations

from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger import backfill, block_granter, chunked_grants, grant_plan, report_applier
from kvmanager.ledger.backfill import Reservation
from tests.suites.protocol.liveness import Liveness
from tests.suites.protocol.mutant import CALM, Exhaustive, Mutant, Walks, zero
from tests.suites.protocol.part_rules import (
    end_what_stands_beside_blocks,
    fit_by_the_first_group,
    grow_in_the_first_group,
    have_room_for_checkpoints,
    lack_each_run_whole,
    lack_the_first_group,
    pass_by_the_first_group,
    pass_whenever_it_fits,
    release_the_first_group,
)
from tests.suites.protocol.promises import Promises

PART_MUTANTS = (
    Mutant(
        "98a",
        "the need of windows is counted with the first part, and not with the next one",
        ((chunked_grants, "count_lacking", lack_the_first_group), (chunked_grants, "_chunk", zero)),
        Walks("parts_window", faults=CALM),
        ("I10",),
    ),
    Mutant(
        "98b",
        "a begun prompt lacks as many blocks of each run as of the first group",
        ((chunked_grants, "count_lacking", lack_each_run_whole),),
        Liveness(in_groups=True),
        ("I10", "I15"),
    ),
    Mutant(
        "99",
        "a begun prompt leaves checkpoints for which its own blocks leave no room",
        ((grant_plan, "_pages_beside", have_room_for_checkpoints),),
        Liveness(in_groups=True),
        ("I10",),
    ),
    Mutant(
        "100",
        "a preemption between two parts loses the blocks of windows",
        ((Sequence, "held_blocks", release_the_first_group),),
        Exhaustive("parts_window"),
        ("I1",),
    ),
    Mutant(
        "101",
        "who waits for a checkpoint behind the part of a begun prompt is not told that it will not come",
        ((report_applier, "release_block_table", end_what_stands_beside_blocks),),
        Walks("parts_state", first_seed=70, faults=CALM),
        ("I10",),
    ),
    Mutant(
        "102",
        "a sequence passes by its blocks of the first group, and takes the pages of the next part in another one",
        ((Reservation, "admits", pass_by_the_first_group), (block_granter, "_may_pass", fit_by_the_first_group)),
        Promises(first_seed=340),
        ("I34",),
    ),
    Mutant(
        "103",
        "a sequence passes whatever was promised",
        ((Reservation, "admits", pass_whenever_it_fits),),
        Promises(first_seed=40),
        ("I34",),
    ),
    Mutant(
        "104",
        "those that run are taken to bind blocks of the first group alone",
        ((backfill, "holder_of", grow_in_the_first_group),),
        Promises(first_seed=50),
        ("I34",),
    ),
)
