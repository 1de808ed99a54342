"""How many cores this process may use, and how several workers on one host share them. Standard library only."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final, Literal

from common.cpu_list import in_words
from common.process.topology import Topology, here

Workers = int | Literal["auto"]
# On so few cores every one computes: a free core would be half of the machine.
_ALL_COMPUTE: Final = 2


def usable_cores(machine: Topology | None = None) -> int:
    """Return the cpus that this process may run on, at least 1; the quota of a container counts as whole cpus."""
    machine = machine or here()
    able = len(machine.cpus)
    return able if machine.quota is None else max(1, min(able, math.ceil(machine.quota)))


def compute_cores(machine: Topology) -> int:
    """Return the cores that engines can keep busy: hyper-threads of one core count once, a quota in full cpus alone.

    A thread beyond the quota stalls its whole team until the next period of the quota.
    """
    able = len(machine.cores)
    return able if machine.quota is None else max(1, min(able, math.floor(machine.quota)))


def threads_of_each(workers: int = 1, machine: Topology | None = None) -> int:
    """Return the engine threads of each of so many workers on this host, which share its cores.

    From three cores on, one stays free. With a thread for every core, one busy neighbour (a worker's I/O thread, the
    router, the manager) stalls each parallel region: its slowest thread is the one that shares a core.
    """
    cores = compute_cores(machine or here())
    return max(1, (cores if cores <= _ALL_COMPUTE else cores - 1) // workers)


def cpus_of_workers(workers: Workers, machine: Topology) -> tuple[str | None, ...]:
    """Return the cpus of each worker as a list in words; None for a worker that is not bound.

    With "auto" there is one worker for each NUMA node. The only worker of a machine with one node is not bound: the
    cores that it leaves free are then everywhere.
    """
    if workers != "auto":
        return (None,) * workers
    nodes = list(machine.nodes.values())
    return tuple(map(in_words, nodes)) if len(nodes) > 1 else (None,)


def bind(cpus: Collection[int]) -> None:
    """Let all threads of this process run on these cpus alone, and those that start later.

    Memory then comes from the node of these cpus: the kernel takes a page from the node of the thread that first
    writes to it.
    """
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cpus)
