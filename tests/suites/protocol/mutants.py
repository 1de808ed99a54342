"""Simpler rules that fail. Each mutant overrides one rule of the real cores, or of an edge, and a search must notice.

    python -m tests.suites.protocol.mutants

prints the table: which search killed which mutant, by which invariant, after how many states or steps.
"""

from __future__ import annotations

import sys
import time

from tests.suites.protocol.ahead_mutants import AHEAD_MUTANTS
from tests.suites.protocol.content_mutants import CONTENT_MUTANTS
from tests.suites.protocol.group_mutants import GROUP_MUTANTS
from tests.suites.protocol.group_tier_mutants import GROUP_TIER_MUTANTS
from tests.suites.protocol.lease_mutants import LEASE_MUTANTS
from tests.suites.protocol.moved_group_mutants import MOVED_GROUP_MUTANTS
from tests.suites.protocol.mutant import Mutant
from tests.suites.protocol.part_mutants import PART_MUTANTS
from tests.suites.protocol.peer_mutants import PEER_MUTANTS
from tests.suites.protocol.state_mutants import STATE_MUTANTS
from tests.suites.protocol.tier_mutants import TIER_MUTANTS
from tests.suites.protocol.transfer_mutants import TRANSFER_MUTANTS


def _number(mutant: Mutant) -> tuple[int, str]:
    return int(mutant.name.rstrip("ab")), mutant.name


_TRANSFERS = (*TRANSFER_MUTANTS, *PEER_MUTANTS, *AHEAD_MUTANTS, *MOVED_GROUP_MUTANTS)
_OF_CONTENT = (
    *CONTENT_MUTANTS,
    *GROUP_MUTANTS,
    *STATE_MUTANTS,
    *PART_MUTANTS,
    *TIER_MUTANTS,
    *GROUP_TIER_MUTANTS,
    *_TRANSFERS,
)
MUTANTS = tuple(sorted((*LEASE_MUTANTS, *_OF_CONTENT), key=_number))


def print_table(mutants: tuple[Mutant, ...]) -> None:
    """Print the table; the exit status counts survivors."""
    write = sys.stdout.write
    write(f"{'mutant':7}{'killed by':28}{'invariant':11}{'states':>8}{'steps':>9}{'seconds':>9}  rule\n")
    survivors = 0
    for mutant in mutants:
        started = time.perf_counter()
        found = mutant.run()
        seconds = time.perf_counter() - started
        survivors += found.killed_by not in mutant.dies_by
        how = f"{mutant.search}" + (f", seed {found.seed}" if found.seed is not None else "")
        died = found.killed_by or "SURVIVES"
        write(f"{mutant.name:7}{how:28}{died:11}{found.states:8}{found.steps:9}{seconds:9.2f}  {mutant.rule}\n")
        sys.stdout.flush()
    sys.exit(survivors)


if __name__ == "__main__":
    print_table(MUTANTS)
