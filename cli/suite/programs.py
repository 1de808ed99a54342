"""The programs of a suite: command, flags, address and environment of each process."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from cli.certificates.folder import CertificateFolder, Leaf
from cli.suite.worker_cpus import threads_of_worker
from common.addresses.host_port import joined_address
from common.process.local_redis import LocalRedis
from common.process.metrics import metrics_port
from common.process.python import module_command
from common.process.redis_users import RedisUrls
from common.process.topology import here
from common.rpc.roles import Role

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
    """The options of a suite. `worker_ports` has one port for each worker. A port of 0 is a free one (`ports.py`).

    Clients reach the router at `host`. Everything else listens on `admin_host`: the router's admin plane, KV manager,
    workers. `standby_ports` has one port for each KV manager beside the first. Manager i and worker i belong to group i
    modulo `shards`; of each group one manager leads, the others stand by.
    `admin_port` and `admin_http_port` follow from `grpc_port` where they are None.
    `own_ports` has one port for each of several routers, which share the other ports; one router needs none.
    With `certs` the services verify each other by the certificates in that folder; without, they use plain text.
    The router gets `named_workers` addresses by flag (default: of all workers). It finds the others through Redis.
    `data_ports` has each worker's port at which others fetch its blocks, 0 for a free one; (): they fetch none.
    `kv_events` has the flags of each worker's endpoints for subscribers of KV events; (): there are none.
    The first `prefill_workers` compute prompts for the others; 0: each does all.
    `worker_cpus` has the cpus that each worker is bound to, or None; () binds no worker.
    `config` is the option file of the services. `pool_key` signs the addresses of workers in Redis ("": the services
    have one of their own). `tenants` need a server key: without a `server_key_file`, the suite makes one in its state
    directory. A suite that is `quiet` says nothing of what goes well.
    """

    model: Path
    workers: int = 1
    block_size: int = 16
    embedded: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 50051
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    admin_http_port: int | None = None
    manager_port: int = 50052
    standby_ports: tuple[int, ...] = ()
    shards: int = 1
    worker_ports: tuple[int, ...] = (50053,)
    own_ports: tuple[int, ...] = ()
    redis_url: str | None = None
    pool_key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    state_dir: Path = Path(".quire")
    config: Path | None = None
    certs: Path | None = None
    tenants: Path | None = None
    server_key_file: Path | None = None
    threads: int | None = None
    worker_cpus: tuple[str | None, ...] = ()
    named_workers: int | None = None
    data_ports: tuple[int, ...] = ()
    kv_events: tuple[tuple[str, ...], ...] = ()
    prefill_workers: int = 0
    worker_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    manager_flags: tuple[str, ...] = ()
    log_format: str = "bare"
    quiet: bool = False
    drain_timeout: float = 30.0
    ready_seconds: float = 300.0


def redis_program(server: LocalRedis) -> Program:
    """Return a Redis server for this suite. It keeps its port when it restarts."""
    command, *flags = server.argv()
    return Program(REDIS, "", (command,), tuple(flags), f"127.0.0.1:{server.port}", quiet=True)


def service_programs(options: StackOptions, redis: RedisUrls) -> tuple[list[Program], list[Program]]:
    """Return the control plane, and the other programs."""
    rest = [*worker_programs(options), *_routers(options, redis.router)]
    return ([] if options.embedded else list(_managers(options, redis.manager))), rest


def worker_programs(options: StackOptions) -> list[Program]:
    """Return the workers, which use no Redis."""
    return [_worker(options, index) for index in range(options.workers)]


def server_key_path(options: StackOptions) -> Path:
    """Return the file of the key that separates tenants' cached blocks."""
    return options.server_key_file or options.state_dir / "server.key"


def router_address(options: StackOptions) -> str:
    """Return HOST:PORT of the router's gRPC port."""
    return joined_address(options.host, options.grpc_port)


def admin_address(options: StackOptions) -> str:
    """Return HOST:PORT of the gRPC port of the router's admin plane."""
    port = options.grpc_port - 1 if options.admin_port is None else options.admin_port
    return joined_address(options.admin_host, port)


def metrics_addresses(options: StackOptions) -> list[str]:
    """Return HOST:PORT of each router's /metrics."""
    if options.own_ports:
        return [joined_address(options.admin_host, metrics_port(None, port)) for port in options.own_ports]
    return [joined_address(options.admin_host, metrics_port(options.admin_http_port, options.grpc_port))]


def leaf_of(options: StackOptions, role: Role, worker_id: str = "") -> Leaf | None:
    """Return the certificate of a role or of a worker; None without TLS."""
    if options.certs is None:
        return None
    folder = CertificateFolder(options.certs)
    return folder.worker(worker_id) if worker_id else folder.role(role)


def worker_ids(options: StackOptions) -> list[str]:
    return [f"worker-{index}" for index in range(options.workers)]


def _common(options: StackOptions, host: str, leaf: Leaf | None) -> tuple[str, ...]:
    config = () if options.config is None else ("--config", str(options.config))
    return (
        *config,
        *(("--insecure",) if leaf is None else leaf.flags()),
        *("--host", host),
        *("--block-size", str(options.block_size), "--state-dir", str(options.state_dir)),
        *("--log-format", options.log_format, "--trace-endpoint", admin_address(options)),
        *("--drain-timeout", str(options.drain_timeout)),
    )


def _redis(service: str, url: str, pool_key: str = "") -> dict[str, str]:
    """Return the variables about Redis for one service; they win over environment and file.

    They are not flags: every user of the machine can read the flags of a process.
    """
    found = {f"QUIRE_{service}_REDIS_URL".upper(): url}
    return found | ({f"QUIRE_{service}_POOL_KEY".upper(): pool_key} if pool_key else {})


def manager_ports(options: StackOptions) -> tuple[int, ...]:
    return (options.manager_port, *options.standby_ports)


def _managers(options: StackOptions, redis_url: str) -> Iterator[Program]:
    """Yield one manager, or one group or several ones of them."""
    for index, port in enumerate(manager_ports(options)):
        program = _manager(options, port, redis_url)
        state = ("--state-dir", str(options.state_dir / program.name / str(index))) if index else ()
        name = f"kvmanager-{index}" if index else program.name
        yield replace(program, name=name, flags=(*program.flags, *state, *_group_flags(options, index)))


def _group_flags(options: StackOptions, index: int) -> tuple[str, ...]:
    if not options.standby_ports:
        return ()
    name = f"{socket.gethostname()}-{options.manager_port}"
    return ("--group", name if options.shards == 1 else f"{name}-{index % options.shards}")


def _manager_addresses(options: StackOptions, worker: int | None = None) -> str:
    """Return the addresses of all managers, or of those of one worker's group."""
    ports = manager_ports(options)
    if worker is not None:
        ports = ports[worker % options.shards :: options.shards]
    return ",".join(joined_address(options.admin_host, port) for port in ports)


def _manager(options: StackOptions, port: int, redis_url: str) -> Program:
    leaf = leaf_of(options, Role.MANAGER)
    flags = (
        *_common(options, options.admin_host, leaf),
        *("--port", str(port)),
        *options.manager_flags,
    )
    address = joined_address(options.admin_host, port)
    environment = _QUIET_GRPC | _redis("kvmanager", redis_url, options.pool_key)
    return Program("kvmanager", "kvmanager", tuple(module_command("kvmanager")), flags, address, environment)


def _worker(options: StackOptions, index: int) -> Program:
    port, worker_id = options.worker_ports[index], worker_ids(options)[index]
    cpus = options.worker_cpus[index] if options.worker_cpus else None
    threads = options.threads or threads_of_worker(cpus, options.workers, here())
    flags = (
        *_common(options, options.admin_host, leaf_of(options, Role.WORKER, worker_id)),
        *("--port", str(port), "--worker-id", worker_id, "--model", str(options.model), "--threads", str(threads)),
        *("--manager", _manager_addresses(options, index)),
        *(() if cpus is None else ("--cpus", cpus)),
        *options.worker_flags,
        *(("--data-port", str(options.data_ports[index])) if options.data_ports else ()),
        *(options.kv_events[index] if options.kv_events else ()),
        *_disaggregation(options, index),
    )
    command = tuple(module_command("cli.suite.embedded" if options.embedded else "gpuworker"))
    environment = _QUIET_GRPC | _redis("gpuworker", "") | {"OMP_NUM_THREADS": str(threads)}
    return Program(worker_id, "gpuworker", command, flags, joined_address(options.admin_host, port), environment)


def _disaggregation(options: StackOptions, index: int) -> tuple[str, ...]:
    if not options.prefill_workers:
        return ()
    return ("--disaggregation", "prefill" if index < options.prefill_workers else "decode")


def _routers(options: StackOptions, redis_url: str) -> Iterator[Program]:
    """Yield one router, or several on the same ports. Each of several has the own ports of the others."""
    if not options.own_ports:
        yield _router(options, redis_url)
    for index, own_port in enumerate(options.own_ports):
        others = [joined_address(options.admin_host, port) for port in options.own_ports if port != own_port]
        sharing = ("--own-port", str(own_port), *(word for other in others for word in ("--sibling", other)))
        program = _router(options, redis_url)
        yield replace(
            program,
            name=f"router-{index}",
            flags=(*program.flags, *sharing),
            address=joined_address(options.admin_host, own_port),
        )


def _router(options: StackOptions, redis_url: str) -> Program:
    named = options.workers if options.named_workers is None else options.named_workers
    addresses = [joined_address(options.admin_host, port) for port in options.worker_ports[:named]]
    flags = (
        *_common(options, options.host, leaf_of(options, Role.ROUTER)),
        *("--model", str(options.model), "--port", str(options.port), "--grpc-port", str(options.grpc_port)),
        *("--admin-host", options.admin_host, *_admin_ports(options)),
        *("--manager", _manager_addresses(options)),
        *_tenant_flags(options),
        *(word for address in addresses for word in ("--worker", address)),
        *options.router_flags,
    )
    environment = _QUIET_GRPC | _redis("router", redis_url, options.pool_key)
    return Program("router", "router", tuple(module_command("router")), flags, admin_address(options), environment)


def _tenant_flags(options: StackOptions) -> tuple[str, ...]:
    if options.tenants is None:
        return ()
    return ("--tenants", str(options.tenants), "--server-key-file", str(server_key_path(options)))


def _admin_ports(options: StackOptions) -> Iterator[str]:
    """Yield the flags of the admin ports. Of several routers each has the HTTP port that its own port gives it."""
    if options.admin_port is not None:
        yield from ("--admin-port", str(options.admin_port))
    if options.admin_http_port is not None and not options.own_ports:
        yield from ("--admin-http-port", str(options.admin_http_port))
