"""Where the workers of a suite run: on recorded machines, and bound on this one."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from cli.demo_model import CHECKPOINT
from cli.suite import preflight, programs
from cli.suite.ports import with_picked_ports
from cli.suite.stack import Stack, StackOptions
from cli.suite.worker_cpus import auto_problems, threads_of_worker, unused_nodes
from common.contracts.errors import InvalidConfig
from common.process.cores import Workers, cpus_of_workers
from common.process.redis_users import RedisUrls
from common.settings.config import load
from gpuworker import config
from gpuworker.config import GpuWorkerSettings
from tests.support.machines import machine

XEON = ("0-15,32-47", "16-31,48-63")


@pytest.mark.parametrize(
    ("name", "workers", "cpus"),
    [
        ("two_cores", "auto", (None,)),
        ("xeon_two_sockets", "auto", XEON),
        ("epyc_four_nodes", "auto", ("0-15,64-79", "16-31,80-95", "32-47,96-111", "48-63,112-127")),
        ("sixty_four_cores", "auto", (None,)),
        ("xeon_two_sockets", 3, (None, None, None)),
    ],
)
def test_auto_is_one_worker_for_each_node(name: str, workers: Workers, cpus: tuple[str | None, ...]) -> None:
    assert cpus_of_workers(workers, machine(name)) == cpus


def test_a_cpuset_within_one_node_leaves_one_worker() -> None:
    assert cpus_of_workers("auto", machine("xeon_two_sockets", allowed="0-3,32-35")) == (None,)


def test_a_bound_worker_has_the_cores_of_its_node_less_one() -> None:
    assert [threads_of_worker(cpus, 2, machine("xeon_two_sockets")) for cpus in XEON] == [15, 15]
    assert threads_of_worker(None, 2, machine("xeon_two_sockets")) == 15


def test_bound_workers_divide_a_quota() -> None:
    small = machine("xeon_two_sockets", {"sys/fs/cgroup/cpu.max": "800000 100000"})
    assert [threads_of_worker(cpus, 2, small) for cpus in XEON] == [3, 3]


@pytest.mark.parametrize(
    ("device", "cuda_devices", "refused"),
    [("cuda:1", 2, True), ("auto", 1, True), ("auto", 0, False), ("auto", None, False), ("cpu", 1, False)],
)
def test_auto_counts_nodes_of_cpus_alone(device: str, cuda_devices: int | None, refused: bool) -> None:
    found = list(auto_problems(machine("xeon_two_sockets"), None, device, cuda_devices, None))
    assert [each.field for each in found] == ["--workers"] * refused


def test_more_threads_than_a_node_has_cpus_are_refused() -> None:
    assert not list(auto_problems(machine("xeon_two_sockets"), 32, "cpu", 0, None))
    (found,) = auto_problems(machine("xeon_two_sockets"), 33, "cpu", 0, None)
    assert found.field == "--threads"
    assert "give at most 32, or a number of workers" in found.description


def test_cpus_of_workers_beside_auto_are_refused_where_they_are_named() -> None:
    (found,) = auto_problems(machine("xeon_two_sockets"), None, "cpu", 0, "QUIRE_GPUWORKER_CPUS")
    assert (found.field, "leave out one of them" in found.description) == ("QUIRE_GPUWORKER_CPUS", True)


@pytest.mark.parametrize(
    ("name", "workers", "bound", "advised"),
    [("xeon_two_sockets", 1, False, True), ("xeon_two_sockets", 2, True, False), ("two_cores", 1, False, False)],
)
def test_one_worker_on_several_nodes_is_told_about_auto(name: str, workers: int, bound: bool, advised: bool) -> None:
    assert ("--workers auto" in unused_nodes(workers, bound, machine(name))) is advised


@pytest.fixture
def xeon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine have two NUMA nodes."""
    found = machine("xeon_two_sockets")
    for module in (preflight, programs):
        monkeypatch.setattr(module, "here", lambda: found)
    monkeypatch.setattr(config, "allowed_cpus", lambda: found.cpus)


FREE = ("--port=0", "--grpc-port=0", "--admin-port=0", "--admin-http-port=0", "--manager-port=0", "--worker-port=0")


def suite(tmp_path: Path, *argv: str, environ: dict[str, str] | None = None) -> StackOptions:
    return preflight.suite_options([*argv, *FREE, "--state-dir", str(tmp_path)], environ or {})


@pytest.mark.usefixtures("xeon")
def test_each_worker_gets_the_cpus_and_the_threads_of_its_node(tmp_path: Path) -> None:
    options = suite(tmp_path, "--workers", "auto")
    _, rest = programs.service_programs(with_picked_ports(options), RedisUrls.same("redis://127.0.0.1:1"))
    workers = [load(GpuWorkerSettings, each.flags, each.environment) for each in rest if each.service == "gpuworker"]
    assert [(each.cpus, each.threads) for each in workers] == [(XEON[0], 15), (XEON[1], 15)]


@pytest.mark.usefixtures("xeon")
@pytest.mark.parametrize(
    ("argv", "environ", "field"),
    [
        (("--workers", "auto", "--threads", "40"), {}, "--threads"),
        (("--workers", "auto", "--device", "cuda"), {}, "--workers"),
        (("--workers", "auto"), {"QUIRE_GPUWORKER_CPUS": "0-3"}, "QUIRE_GPUWORKER_CPUS"),
        (("--workers", "some"), {}, "--workers"),
        (("--workers", "0"), {}, "--workers"),
    ],
)
def test_what_contradicts_auto_is_refused(
    argv: tuple[str, ...], environ: dict[str, str], field: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        suite(tmp_path, *argv, environ=environ)
    assert field in {each.field for each in caught.value.violations}


@pytest.mark.parametrize(
    ("flags", "field", "words"),
    [
        (("--cpus", "4094-4095"), "--cpus", "this process may not use cpu 4094-4095; choose among "),
        (("--cpus", "two"), "--cpus", "expected numbers and ranges of cpus such as 0-7,16-23"),
        (("--cpus", ""), "--cpus", "expected numbers and ranges of cpus such as 0-7,16-23"),
        (("--cpus", "{first}", "--threads", "2"), "--threads", "give at most 1, or more cpus"),
    ],
)
def test_cpus_that_a_worker_cannot_have_are_refused(flags: tuple[str, ...], field: str, words: str) -> None:
    first = str(min(os.sched_getaffinity(0)))
    with pytest.raises(InvalidConfig) as caught:
        load(GpuWorkerSettings, ["--model", ".", *(flag.format(first=first) for flag in flags)], {})
    found = {each.field: each.description for each in caught.value.violations}
    assert words in found[field]


async def test_every_thread_of_a_worker_is_bound(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    cpus = (str(min(allowed)), str(max(allowed)))
    flags = ("--simulate", "base=1ms", "--kv-blocks", "64", "--block-size", "16")
    options = StackOptions(
        CHECKPOINT,
        workers=2,
        port=0,
        grpc_port=0,
        manager_port=0,
        worker_ports=(0, 0),
        worker_cpus=cpus,
        worker_flags=flags,
        state_dir=tmp_path,
        ready_seconds=120.0,
    )
    async with Stack(options, lambda _name, _line: None) as stack:
        for index, cpu in enumerate(cpus):
            process = psutil.Process(stack.children[f"worker-{index}"].pid)
            bound = {tuple(os.sched_getaffinity(thread.id)) for thread in process.threads()}
            assert bound == {(int(cpu),)}
        router = stack.children["router"].pid
        assert router is not None
        assert os.sched_getaffinity(router) == allowed
