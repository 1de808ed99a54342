"""The processors of a machine: cores, hyper-threads, NUMA nodes and quotas, from files of /sys and /proc.

Reading and deciding are apart: `topology_of` is a pure function of the files' text. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from common.cpu_list import cpus_of

_CPUS: Final = "sys/devices/system/cpu"
_NODES: Final = "sys/devices/system/node"
_CGROUPS: Final = "sys/fs/cgroup"
_OWN_CGROUPS: Final = "proc/self/cgroup"


@dataclass(frozen=True, slots=True)
class Topology:
    """The processors that a process may use.

    `cores` has the usable cpus of each physical core: several where hyper-threads share one. `nodes` has the usable
    cpus of each NUMA node that has some, by its number. `quota` is the processor time that control groups allow, in
    cpus; None without one.
    """

    cores: tuple[frozenset[int], ...]
    nodes: Mapping[int, frozenset[int]]
    quota: float | None = None

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset[int]().union(*self.cores)

    def within(self, cpus: Iterable[int]) -> Topology:
        """Return the part with these cpus; a quota is divided by the number of cpus."""
        part = self.cpus & frozenset(cpus)
        cores = tuple([core & part for core in self.cores if core & part])
        nodes = {number: node & part for number, node in self.nodes.items() if node & part}
        quota = None if self.quota is None else self.quota * len(part) / max(1, len(self.cpus))
        return replace(self, cores=cores, nodes=nodes, quota=quota)


def here() -> Topology:
    """Return the processors that the calling thread may use; without /sys each cpu counts as a core of one node."""
    return topology_of(read_files(Path("/")), allowed_cpus())


def allowed_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def topology_of(files: Mapping[str, str], allowed: frozenset[int]) -> Topology:
    """Return the topology that files describe, by their paths without the first slash; `allowed` cpus alone count."""
    cores = {_siblings(files, cpu) & allowed | {cpu} for cpu in allowed}
    numbered = ((path, text) for path, text in files.items() if path.startswith(f"{_NODES}/node"))
    nodes = {_node_number(path): cpus_of(text) & allowed for path, text in numbered if path.endswith("/cpulist")}
    used = {number: cpus for number, cpus in sorted(nodes.items()) if cpus}
    return Topology(tuple(sorted(cores, key=min)), used or {0: allowed}, _quota(files))


def read_files(root: Path) -> dict[str, str]:
    """Return the files below a root that `topology_of` reads; those that cannot be read are left out."""
    found = {_OWN_CGROUPS: _text(root / _OWN_CGROUPS) or ""}
    patterns = (f"{_CPUS}/cpu[0-9]*/topology/thread_siblings_list", f"{_NODES}/node[0-9]*/cpulist")
    paths = [path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern)]
    paths += [path for pair in _quota_files(found[_OWN_CGROUPS]) for path in pair]
    texts = {path: _text(root / path) for path in paths}
    return found | {path: text for path, text in texts.items() if text is not None}


def _siblings(files: Mapping[str, str], cpu: int) -> frozenset[int]:
    return cpus_of(files.get(f"{_CPUS}/cpu{cpu}/topology/thread_siblings_list", ""))


def _node_number(path: str) -> int:
    return int(PurePosixPath(path).parent.name.removeprefix("node"))


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


# ------------------------------------------------------------ quotas of control groups


def _quota(files: Mapping[str, str]) -> float | None:
    """Return the least quota of the process's groups and of all groups above them."""
    pairs = _quota_files(files.get(_OWN_CGROUPS, ""))
    texts = (" ".join(files.get(path, "") for path in pair) for pair in pairs)
    return min((cpus for text in texts if (cpus := _cpus_of_quota(text)) is not None), default=None)


def _quota_files(own_groups: str) -> Iterator[tuple[str, ...]]:
    """Yield the files of each group's quota, in version 2 of control groups and in version 1.

    The group of /proc may not be there below /sys: a container sees its own group as the root.
    """
    for line in own_groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        above = [group.strip("/"), *(str(each) for each in PurePosixPath(group.strip("/")).parents)]
        folders = dict.fromkeys("" if each in ("", ".") else f"/{each}" for each in above)
        for folder in folders:
            if not controllers:
                yield (f"{_CGROUPS}{folder}/cpu.max",)
            elif "cpu" in controllers.split(","):
                for mount in dict.fromkeys((controllers, "cpu")):
                    base = f"{_CGROUPS}/{mount}{folder}/cpu.cfs_"
                    yield (f"{base}quota_us", f"{base}period_us")


def _cpus_of_quota(text: str) -> float | None:
    """Return the cpus of "QUOTA PERIOD", both in microseconds; None without a quota ("max", -1)."""
    try:
        quota, period = map(int, text.split())
        return quota / period if quota > 0 else None
    except (ValueError, ZeroDivisionError):
        return None
