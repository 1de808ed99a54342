"""What cannot work, found before torch is imported: the kind of a model, its files, the device, lengths and sizes.

A worker checks itself before it loads a model, and `quire up` checks its workers before it starts anything. What only
a loaded model shows is checked later, by `plane/memory.py` and the self-test.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from common.checkpoint.files import read_config, weight_bytes, weight_problems
from common.checkpoint.gguf.memory import weight_memory
from common.checkpoint.pooling import asked_pooling
from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.types import KvGeometry
from common.cpu_list import cpus_of
from common.process.topology import allowed_cpus
from gpuworker.config import GpuWorkerSettings
from gpuworker.memory.byte_plan import GIB, NO_KV_MEMORY, bytes_per_block, in_words
from gpuworker.memory.disk_frames import NO_CHECKSUMS, checksums_there, look_at_disk
from gpuworker.memory.host_memory import address_space, available_bytes
from gpuworker.models.kinds import known_kinds, why_not_served
from gpuworker.native.levels import processor_flags, why_not
from gpuworker.plane.checkpoint_facts import CheckpointFacts
from gpuworker.plane.draft_checks import draft_problems
from gpuworker.plane.rank_hosts import Hosts

_DEVICE: Final = re.compile(r"auto|cpu|cuda(?::(\d+))?")
# Addresses that a worker of a tiny model takes: torch and its libraries, transformers, the stacks of threads.
_PROCESS_BYTES: Final = 6 * GIB


@dataclass(frozen=True, slots=True)
class Machine:
    """What is here. `cuda_devices` and `torch` are None where they cannot be known without an import of torch."""

    torch: str | None
    cuda_devices: int | None
    available_bytes: int
    address_space: int | None
    processor: frozenset[str] = frozenset()  # its flags
    triton: str | None = None
    cpus: int | None = None  # that this process may use
    launcher: Mapping[str, str] = field(default_factory=dict)  # variables, of torchrun or of a LeaderWorkerSet

    @classmethod
    def here(cls) -> Machine:
        torch = _version("torch")
        devices = 0 if torch is not None and torch.endswith("+cpu") else _cuda_devices()
        found = (available_bytes(), address_space(), processor_flags(), _version("triton"), len(allowed_cpus()))
        return cls(torch, devices, *found, os.environ)


def refuse_impossible(settings: GpuWorkerSettings, directory: Path) -> None:
    """Raise InvalidConfig, with every problem that shows before a model is loaded."""
    if found := problems(settings, directory, Machine.here()):
        raise InvalidConfig(*found)


def problems(settings: GpuWorkerSettings, directory: Path, machine: Machine, workers: int = 1) -> list[FieldViolation]:
    """Return why so many workers with these options cannot serve a checkpoint on a machine; none for simulated ones.

    Raises InvalidConfig when config.json cannot be read.
    """
    if settings.simulate is not None:
        return []
    found = [*_level_problems(settings.cpu_level, machine), *_thread_problems(settings, machine)]
    found += _launcher_problems(settings, machine, workers)
    of_draft = draft_problems(settings, directory, machine.available_bytes, workers)
    if why := why_not_served(read_config(directory), known_kinds()):
        found.append(FieldViolation("--model", why))
    if settings.load_format != "dummy" and not found:
        found += weight_problems(directory)
    found += _pooling_problems(settings, directory)
    found += _speculative_problems(settings, directory)
    found += _length_problems(settings, directory)
    found += _device_problems(settings.device, machine)
    found += _memory_problems(settings, machine, workers, directory)
    found += _disk_problems(settings, workers)
    return [*found, *of_draft]


def _level_problems(level: str, machine: Machine) -> list[FieldViolation]:
    if level == "auto" or (reason := why_not(level, machine.processor)) is None:
        return []
    return [FieldViolation("--cpu-level", f"is {level}: {reason}; or leave it at auto")]


def _thread_problems(settings: GpuWorkerSettings, machine: Machine) -> Iterator[FieldViolation]:
    """Refuse more threads than cpus; with `--cpus` the settings did."""
    threads, cpus, size = settings.threads or 0, machine.cpus, settings.tensor_parallel_size
    try:
        hosts = Hosts.of(machine.launcher, size)
    except InvalidConfig:
        return  # a problem of its own
    ranks = len(hosts.own_ranks(size)) * hosts.beside
    if settings.cpus is not None:
        cpus = len(cpus_of(settings.cpus))
    if cpus is not None and ranks > 1 and max(threads, 1) * ranks > cpus:
        each = f" with {threads} threads each" if threads > 1 else ""
        here = "" if ranks == size else f", {ranks} of them here"
        what = f"is {size}{each}{here}, and the worker may use {cpus} cpus here"
        why = "ranks that share a cpu wait for each other"
        yield FieldViolation("--tensor-parallel-size", f"{what}: {why}; use fewer ranks, or fewer --threads")
    elif settings.cpus is None and cpus is not None and threads > cpus:
        what = f"is {threads}, and a process may use {cpus} cpus here: threads that share a cpu stall each other"
        yield FieldViolation("--threads", f"{what}; give at most {cpus}, or leave it out")


def follows_another_host(settings: GpuWorkerSettings, environ: Mapping[str, str]) -> bool:
    """Return whether rank 0 is on another host, by the variables of a launcher; what they lack is refused elsewhere."""
    if settings.simulate is not None:
        return False
    try:
        return Hosts.of(environ, settings.tensor_parallel_size).own > 0
    except InvalidConfig:
        return False


def _launcher_problems(settings: GpuWorkerSettings, machine: Machine, workers: int) -> Iterator[FieldViolation]:
    """Refuse variables of a launcher that place no ranks, and several workers in one place."""
    try:
        hosts = Hosts.of(machine.launcher, settings.tensor_parallel_size)
    except InvalidConfig as error:
        yield from error.violations
        return
    if (problem := hosts.interface_problem(settings.rank_interface)) is not None:
        yield problem
    if hosts.count > 1 and workers > 1:
        what = f"is {hosts.count}, and {workers} workers would take one place among the hosts"
        yield FieldViolation("WORLD_SIZE", f"{what}; unset it, or run one worker")


def _pooling_problems(settings: GpuWorkerSettings, directory: Path) -> Sequence[FieldViolation]:
    try:
        asked_pooling(settings.pooling, directory)
    except InvalidConfig as error:
        return error.violations
    return ()


def _speculative_problems(settings: GpuWorkerSettings, directory: Path) -> Iterator[FieldViolation]:
    """Find what refuses drafts whichever way the model is run; `gpuworker/plane/draft_checks.py` finds the rest."""
    if settings.speculation == "none":
        return
    what = f"is {settings.speculation}, and"
    if _is_pooled(settings, directory):
        yield FieldViolation("--speculative", f"{what} the workers embed prompts, which samples nothing; leave it out")
    if settings.device.startswith("cuda"):
        why = f"{what} drafts have never been verified on CUDA; use --device cpu, or leave it out"
        yield FieldViolation("--speculative", why)


def _is_pooled(settings: GpuWorkerSettings, directory: Path) -> bool:
    try:
        return asked_pooling(settings.pooling, directory) is not None
    except InvalidConfig:
        return False  # a problem of its own


def _length_problems(settings: GpuWorkerSettings, directory: Path) -> Iterator[FieldViolation]:
    try:
        limit = CheckpointFacts(directory).context
    except InvalidConfig:
        return  # transformers has defaults for what a config.json does not name
    if settings.max_model_len is not None and settings.max_model_len > limit:
        what = f"is {settings.max_model_len}; the model's positions end at {limit}: lower it, or leave it out"
        yield FieldViolation("--max-model-len", what)


def _device_problems(device: str, machine: Machine) -> Iterator[FieldViolation]:
    match = _DEVICE.fullmatch(device)
    if match is None:
        yield FieldViolation("--device", f"is {device!r}; expected auto, cpu, cuda or cuda:N")
    elif device.startswith("cuda") and machine.cuda_devices is not None:
        number = int(match[1] or 0)
        if machine.cuda_devices <= number:
            yield FieldViolation("--device", f"is {device!r}, and {_no_cuda(machine)}; use --device cpu")
    if device != "cpu" and machine.cuda_devices and machine.triton is None:
        what = f"is {device!r}, and the kernels for the GPU here need triton: pip install 'quire-llm[gpu]'"
        yield FieldViolation("--device", f"{what}, or use --device cpu")


def _no_cuda(machine: Machine) -> str:
    if machine.torch is not None and machine.torch.endswith("+cpu"):
        return f"the installed torch {machine.torch} is built for CPUs alone"
    if not machine.cuda_devices:
        return "no CUDA device is usable here"
    return f"CUDA devices here end at cuda:{machine.cuda_devices - 1}"


def _memory_problems(
    settings: GpuWorkerSettings, machine: Machine, workers: int, directory: Path
) -> Iterator[FieldViolation]:
    if settings.kv_memory is not None and _keeps_no_kv(settings, directory):
        yield FieldViolation("--kv-memory", NO_KV_MEMORY)
        return
    if settings.device != "cpu" and machine.cuda_devices != 0:
        return  # the KV cache may lie on a GPU
    pool = _pool_bytes(settings, directory)
    if workers * pool > machine.available_bytes:
        each = f" for each of {workers} workers" if workers > 1 else ""
        free = in_words(machine.available_bytes)
        flag = "--kv-memory" if settings.kv_blocks is None else "--kv-blocks"
        yield FieldViolation(flag, f"asks for {in_words(pool)}{each}, and {free} of memory are free here; give less")
    needed = _PROCESS_BYTES + weight_bytes(directory) + weight_memory(directory) + (pool or GIB)
    if machine.address_space is not None and machine.address_space < needed:
        what = (
            f"caps the addresses of a process at {in_words(machine.address_space)}, and a worker of this model takes"
            f" about {in_words(needed)}; lift it with `ulimit -v unlimited`"
        )
        yield FieldViolation("ulimit -v", what)


def _disk_problems(settings: GpuWorkerSettings, workers: int) -> Iterator[FieldViolation]:
    if settings.disk_cache is None:
        return
    if not checksums_there():
        yield FieldViolation("--disk-cache", NO_CHECKSUMS)
    room = look_at_disk(settings.disk_cache)
    if not room.writable:
        yield FieldViolation("--disk-cache", f"is {settings.disk_cache}, which cannot be written; name another folder")
    elif workers * settings.disk_cache_bytes > room.free + room.taken:
        each = f" for each of {workers} workers" if workers > 1 else ""
        has = f"{in_words(room.free)} are free there, beside {in_words(room.taken)} of caches"
        what = f"asks for {in_words(settings.disk_cache_bytes)} in {settings.disk_cache}{each}, and {has}; ask for less"
        yield FieldViolation("--disk-cache-size", what)


def _keeps_no_kv(settings: GpuWorkerSettings, directory: Path) -> bool:
    geometry = _geometry(settings, directory)
    return geometry is not None and not geometry.num_layers


def _pool_bytes(settings: GpuWorkerSettings, directory: Path) -> int:
    """Return the bytes of the KV pool that the options ask for; 0 where they leave it open, or it cannot be known."""
    if settings.kv_blocks is None:
        return settings.kv_memory or 0
    geometry = _geometry(settings, directory)
    return 0 if geometry is None else settings.kv_blocks * bytes_per_block(geometry, settings.block_size)


def _geometry(settings: GpuWorkerSettings, directory: Path) -> KvGeometry | None:
    """Return the shape of a token's K/V; None where it cannot be known."""
    try:
        return CheckpointFacts(directory).kv_geometry(settings.dtype, settings.kv_cache_dtype, settings.block_size)
    except InvalidConfig:
        return None  # transformers has defaults for what a config.json does not name


# ------------------------------------------------------------ what is here


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cuda_devices() -> int | None:
    """Return how many CUDA devices the driver shows to this process; None where another maker's GPU may stand in."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None if Path("/dev/kfd").exists() else 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
