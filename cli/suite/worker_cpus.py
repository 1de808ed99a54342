"""Where the workers of a suite run: their threads, and what speaks against a worker for each node. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from common.contracts.errors import FieldViolation
from common.cpu_list import cpus_of
from common.process.cores import threads_of_each
from common.process.topology import Topology

AUTO = "--workers auto"


def threads_of_worker(cpus: str | None, workers: int, machine: Topology) -> int:
    """Return the default threads of one of so many workers, which runs on these cpus."""
    return threads_of_each(workers, machine) if cpus is None else threads_of_each(1, machine.within(cpus_of(cpus)))


def auto_problems(
    machine: Topology, threads: int | None, device: str, cuda_devices: int | None, cpus_origin: str | None
) -> Iterator[FieldViolation]:
    """Yield what speaks against a worker for each node.

    `cpus_origin` says where the cpus of workers are named besides, if anywhere; `cuda_devices` are those of the
    machine, where they can be known.
    """
    if device.startswith("cuda") or (device == "auto" and cuda_devices):
        what = f"is auto, a worker for each NUMA node of the CPUs, and --device {device} runs them on a GPU"
        yield FieldViolation("--workers", f"{what}; give --device cpu, or a number of workers")
    least = min(map(len, machine.nodes.values()))
    if threads is not None and threads > least:
        what = f"is {threads}, and with {AUTO} a worker has the {least} cpus of a NUMA node"
        yield FieldViolation("--threads", f"{what}; give at most {least}, or a number of workers")
    if cpus_origin is not None:
        yield FieldViolation(cpus_origin, f"names the cpus of workers, and {AUTO} does so too; leave out one of them")


def unused_nodes(workers: int, bound: bool, machine: Topology) -> str:
    """Return the advice for one worker on a machine with several nodes; "" where there is none."""
    nodes = len(machine.nodes)
    if workers > 1 or bound or nodes < 2:
        return ""
    return f"this machine has {nodes} NUMA nodes, and one worker reads across them; {AUTO} starts a worker on each"
