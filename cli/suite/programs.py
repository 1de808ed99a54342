"""The programs of a suite: command, flags, address and environment of each process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from common.process.cores import threads_of_each
from common.process.local_redis import LocalRedis
from common.process.python import module_command

REDIS: Final = "redis"
# gRPC's C core would print lines of its own, such as every refused connection while a service starts.
_QUIET_GRPC: Final = {"GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "NONE")}


@dataclass(frozen=True, slots=True)
class Program:
    """One program: a name to show, the service whose options it takes ("" for none), and its address.

    The output of a `quiet` program is shown only when the program fails.
    """

    name: str
    service: str
    command: tuple[str, ...]
    flags: tuple[str, ...]
    address: str
    environment: dict[str, str] = field(default_factory=dict)
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class StackOptions:
    """The options of a suite. `worker_ports` has one port for each worker.

    `own_ports` has one port for each of several routers, which share `port` and `http_port`; one router needs none.
    The router gets `named_workers` addresses by flag (default: of all workers). It finds the others through Redis.
    `config` is the option file of the services.
    """

    model: Path
    workers: int = 1
    block_size: int = 16
    embedded: bool = False
    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int = 8000
    manager_port: int = 50052
    worker_ports: tuple[int, ...] = (50053,)
    own_ports: tuple[int, ...] = ()
    redis_url: str | None = None
    state_dir: Path = Path(".quire")
    config: Path | None = None
    threads: int | None = None
    named_workers: int | None = None
    worker_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    manager_flags: tuple[str, ...] = ()
    log_format: str = "bare"
    drain_timeout: float = 30.0
    ready_seconds: float = 300.0


def redis_program(server: LocalRedis) -> Program:
    """Return a Redis server for this suite. It keeps its port when it restarts."""
    command, *flags = server.argv()
    return Program(REDIS, "", (command,), tuple(flags), f"127.0.0.1:{server.port}", quiet=True)


def service_programs(options: StackOptions, redis_url: str) -> tuple[list[Program], list[Program]]:
    """Return the control plane, which starts first, and the other programs."""
    workers = [_worker(options, index, redis_url) for index in range(options.workers)]
    rest = [*workers, *_routers(options, redis_url)]
    return ([] if options.embedded else [_manager(options, redis_url)]), rest


def router_address(options: StackOptions) -> str:
    """Return HOST:PORT of the router's gRPC port."""
    return f"{options.host}:{options.port}"


def _common(options: StackOptions, port: int, redis_url: str) -> tuple[str, ...]:
    config = () if options.config is None else ("--config", str(options.config))
    return (
        *config,
        *("--host", options.host, "--port", str(port), "--redis-url", redis_url),
        *("--block-size", str(options.block_size), "--state-dir", str(options.state_dir)),
        *("--log-format", options.log_format, "--trace-endpoint", router_address(options)),
        *("--drain-timeout", str(options.drain_timeout)),
    )


def _manager(options: StackOptions, redis_url: str) -> Program:
    flags = (*_common(options, options.manager_port, redis_url), *options.manager_flags)
    address = f"{options.host}:{options.manager_port}"
    return Program("kvmanager", "kvmanager", tuple(module_command("kvmanager.main")), flags, address, _QUIET_GRPC)


def _worker(options: StackOptions, index: int, redis_url: str) -> Program:
    port = options.worker_ports[index]
    threads = options.threads or threads_of_each(options.workers)
    flags = (
        *_common(options, port, redis_url),
        *("--worker-id", f"worker-{index}", "--model", str(options.model), "--threads", str(threads)),
        *("--manager", f"{options.host}:{options.manager_port}"),
        *options.worker_flags,
    )
    command = tuple(module_command("cli.suite.embedded" if options.embedded else "gpuworker.main"))
    environment = _QUIET_GRPC | {"OMP_NUM_THREADS": str(threads)}
    return Program(f"worker-{index}", "gpuworker", command, flags, f"{options.host}:{port}", environment)


def _routers(options: StackOptions, redis_url: str) -> Iterator[Program]:
    """Yield one router, or several on the same ports. Each of several has the own ports of the others."""
    if not options.own_ports:
        yield _router(options, redis_url)
    for index, own_port in enumerate(options.own_ports):
        others = [f"{options.host}:{port}" for port in options.own_ports if port != own_port]
        sharing = ("--own-port", str(own_port), *(word for other in others for word in ("--sibling", other)))
        program = _router(options, redis_url)
        yield replace(
            program,
            name=f"router-{index}",
            flags=(*program.flags, *sharing),
            address=f"{options.host}:{own_port}",
        )


def _router(options: StackOptions, redis_url: str) -> Program:
    named = options.workers if options.named_workers is None else options.named_workers
    flags = (
        *_common(options, options.port, redis_url),
        *("--model", str(options.model), "--http-port", str(options.http_port)),
        *(word for port in options.worker_ports[:named] for word in ("--worker", f"{options.host}:{port}")),
        *options.router_flags,
    )
    return Program(
        "router", "router", tuple(module_command("router.main")), flags, router_address(options), _QUIET_GRPC
    )
