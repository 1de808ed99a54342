"""The topology of recorded machines: cores, hyper-threads, NUMA nodes, quotas of control groups, cpusets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.cpu_list import cpus_of, in_words
from common.process.topology import Topology, here, read_files, topology_of
from tests.support.machines import CPU, machine, recorded

V2 = {"proc/self/cgroup": "0::/a/b"}


@pytest.mark.parametrize(
    ("name", "cores", "cpus", "nodes"),
    [
        ("one_core", 1, 1, 1),
        ("two_cores", 2, 2, 1),
        ("two_hyperthreads", 1, 2, 1),
        ("four_cores", 4, 4, 1),
        ("desktop", 8, 16, 1),
        ("xeon_two_sockets", 32, 64, 2),
        ("epyc_four_nodes", 64, 128, 4),
        ("sixty_four_cores", 64, 64, 1),
    ],
)
def test_a_recorded_machine(name: str, cores: int, cpus: int, nodes: int) -> None:
    found = machine(name)
    assert (len(found.cores), len(found.cpus), len(found.nodes), found.quota) == (cores, cpus, nodes, None)


def test_the_cpus_of_nodes() -> None:
    assert [in_words(cpus) for cpus in machine("xeon_two_sockets").nodes.values()] == ["0-15,32-47", "16-31,48-63"]
    assert in_words(machine("epyc_four_nodes").nodes[3]) == "48-63,112-127"


def test_a_cpuset_takes_cores_and_nodes_away() -> None:
    found = machine("xeon_two_sockets", allowed="16-19,48-51")
    assert (len(found.cores), list(found.nodes)) == (4, [1])


def test_a_hyperthread_whose_sibling_is_offline_is_a_core() -> None:
    found = machine("desktop", {f"{CPU}/cpu{n}/topology/thread_siblings_list": str(n) for n in range(4)}, "0-7,12-15")
    assert sorted(len(core) for core in found.cores) == [1, 1, 1, 1, 2, 2, 2, 2]


def test_without_files_each_cpu_is_a_core_of_one_node() -> None:
    found = topology_of({}, frozenset({2, 5}))
    assert found == Topology((frozenset({2}), frozenset({5})), {0: frozenset({2, 5})})


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "350000 100000"}, 3.5),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2.0),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "400000 100000", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2.0),
        # A container sees its own group as the root, and a path of the host in /proc.
        (V2 | {"sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/../sibling", "sys/fs/cgroup/cpu.max": "100000 100000"}, 1.0),
    ],
)
def test_a_quota_of_version_2(files: dict[str, str], quota: float | None) -> None:
    assert topology_of(files, frozenset(range(8))).quota == quota


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize("group", ["", "/docker/3f2a"])
@pytest.mark.parametrize(("text", "quota"), [("150000", 1.5), ("-1", None), ("", None)])
def test_a_quota_of_version_1(mount: str, group: str, text: str, quota: float | None) -> None:
    base = f"sys/fs/cgroup/{mount}{group}/cpu.cfs_"
    files = {
        "proc/self/cgroup": "9:memory:/docker/3f2a\n4:cpu,cpuacct:/docker/3f2a\n0::/",
        f"{base}quota_us": text,
        f"{base}period_us": "100000",
    }
    assert topology_of(files, frozenset(range(8))).quota == quota


def test_a_part_has_its_part_of_the_quota() -> None:
    whole = machine("xeon_two_sockets", {"sys/fs/cgroup/cpu.max": "1600000 100000"})
    part = whole.within(whole.nodes[1])
    assert (part.quota, len(part.cores), list(part.nodes)) == (8.0, 16, [1])


@pytest.mark.parametrize("name", ["two_cores", "xeon_two_sockets"])
def test_files_are_read_from_a_tree(tmp_path: Path, name: str) -> None:
    files, allowed = recorded(name)
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    assert topology_of(read_files(tmp_path), allowed) == machine(name)


def test_this_machine_has_the_cpus_that_this_process_may_use() -> None:
    found = here()
    assert found.cpus == os.sched_getaffinity(0)
    assert frozenset[int]().union(*found.nodes.values()) == found.cpus


@pytest.mark.parametrize(("text", "cpus"), [("0", {0}), ("0-2,8\n", {0, 1, 2, 8}), ("", set()), ("3, 1", {1, 3})])
def test_a_list_of_cpus(text: str, cpus: set[int]) -> None:
    assert cpus_of(text) == cpus


@pytest.mark.parametrize("text", ["x", "3-1", "-1", "1-", "0-99999999999", "1 2", "0x2"])
def test_what_is_no_list_of_cpus(text: str) -> None:
    with pytest.raises(ValueError, match="is not a range of CPUs"):
        cpus_of(text)


def test_cpus_in_words() -> None:
    assert in_words([9, 0, 1, 2, 8, 5]) == "0-2,5,8-9"
