"""The checks of `quire serve` before it starts a process: every option of every process, the checkpoint, the ports.

The services read the environment and the option file too. An option for one service alone ([router], QUIRE_ROUTER_*)
holds. Where the suite must decide instead (ports, folders), `quire serve` refuses the option and names it.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cli.config import UpSettings
from cli.demo_model import CHECKPOINT, DEMO_NAME
from cli.suite.ports import with_picked_ports
from cli.suite.programs import Program, StackOptions, service_programs
from cli.suite.worker_cpus import auto_problems
from common.checkpoint.files import read_config
from common.checkpoint.gguf.names import served_folder, served_name
from common.checkpoint.hub import checkpoint_directory, is_hub_name
from common.checkpoint.tokenizer_file import tokenizer_json
from common.contracts.errors import FieldViolation, InvalidConfig
from common.process.cores import cpus_of_workers
from common.process.metrics import metrics_port
from common.process.redis_users import RedisUrls
from common.process.topology import here
from common.settings.config import Reading, flag_of, load, read, validate
from common.settings.decision_log import DecisionLogSettings
from common.settings.options import Settings
from common.untrusted.rare_lines import redacted
from gpuworker.config import EngineSettings, GpuWorkerSettings, bound_address
from gpuworker.models.kinds import known_kinds, why_not_served
from gpuworker.plane.preflight import Machine, follows_another_host
from gpuworker.plane.preflight import problems as worker_problems
from kvmanager.config import KvManagerSettings
from router.config import RouterSettings

_SERVICES: Final[Mapping[str, type[Settings]]] = {
    each.service: each for each in (RouterSettings, KvManagerSettings, GpuWorkerSettings)
}
Listened = tuple[str, int]  # address, port
_TO_ALL: Final = ("log_level", "trace_sample_ratio")
_TO_ROUTER: Final = (
    *("seed", "force_include_usage", "open_schemas", "batch_dir", "slo_ttft", "slo_itl", "root_path"),
    *("tokenizer_info", "public_metrics", "metrics_alias", "metrics_tenants", "remote_prefill"),
)
_TO_RECORD: Final = tuple(DecisionLogSettings.model_fields)
_TEXT: Final = (
    *("tokenizer", "chat_template", "chat_control_tokens", "refuse_media"),
    *("tool_call_parser", "reasoning_parser"),
)
_PUBLIC_TLS: Final = ("public_tls_cert", "public_tls_key")
_DATA_PORT: Final = "data_port"
_KV_EVENTS: Final = ("kv_events", "kv_events_replay")
_FOR_EACH: Final = (_DATA_PORT, *_KV_EVENTS)
"""Options that name a port of the first worker. The others have the ports after it."""
# In place of the Redis that the suite starts later.
_OWN_REDIS: Final = "redis://127.0.0.1:6379/0"
_PORT_FLAGS: Final = {
    "router": "--port, --grpc-port, --admin-port, --admin-http-port or --own-port",
    "kvmanager": "--manager-port or --standby-port",
    "gpuworker": "--worker-port, --data-port, --kv-events or --kv-events-replay",
}


def suite_options(argv: Sequence[str], environ: Mapping[str, str]) -> StackOptions:
    """Return the suite to start. Raises InvalidConfig with every bad option; exits on `--help`.

    When no option is bad, a model on the hub is downloaded once for all processes.
    """
    reading = read(UpSettings, argv, environ, prog="quire serve")
    services = {name: _read_service(each, reading, environ) for name, each in _SERVICES.items()}
    problems = _model_problems(reading.values.get("model"))
    for service in services.values():
        problems += _problems_alone(service)
    try:
        settings = validate(reading, UpSettings)
    except InvalidConfig as error:
        raise _all_of([*error.violations, *problems]) from None
    worker = services[GpuWorkerSettings.service]
    problems += _auto_problems(settings, worker)
    if problems:
        raise _all_of(problems)
    settings, name = _with_folder(settings)
    options = _stack_options(settings, reading, None if "model_name" in services["router"].values else name)
    options = replace(options, data_ports=_data_ports(options, reading, worker))
    options = replace(options, kv_events=_kv_events(options, reading, worker))
    if any("pool_key" in service.values for service in services.values()):
        options = replace(options, pool_key="")  # the services read it themselves
    _check_programs(options, services, reading, environ)
    if not is_hub_name(settings.model):
        return options
    weights = settings.load_format != "dummy"
    folder = checkpoint_directory(settings.model, weights=weights, revision=settings.revision)
    named = _stack_options(settings.model_copy(update={"model": str(folder)}), reading, model_name=settings.model)
    options = replace(named, pool_key=options.pool_key, data_ports=options.data_ports, kv_events=options.kv_events)
    _check_programs(options, services, reading, environ)
    return options


def _auto_problems(settings: UpSettings, worker: Reading) -> list[FieldViolation]:
    if settings.workers != "auto":
        return []
    cuda_devices, cpus_origin = Machine.here().cuda_devices, worker.origins.get("cpus")
    return list(auto_problems(here(), settings.threads, settings.device, cuda_devices, cpus_origin))


def _with_folder(settings: UpSettings) -> tuple[UpSettings, str | None]:
    """Return the settings with the folder that stands for a GGUF file, and the model's name then."""
    given = Path(settings.model)
    folder = served_folder(given)
    if folder == given:
        return settings, None
    return settings.model_copy(update={"model": str(folder)}), served_name(given)


def _all_of(problems: Iterable[FieldViolation]) -> InvalidConfig:
    """Return one error with each violation once: services share sources, so several may find the same violation."""
    return InvalidConfig(*dict.fromkeys(problems))


def _model_problems(model: object) -> list[FieldViolation]:
    """Return the mistakes in the model's name that this machine can find."""
    if not isinstance(model, str):
        return []  # a missing name is reported elsewhere
    folder = Path(model).expanduser()
    try:
        if served_folder(Path(model)) != Path(model):
            return []
    except InvalidConfig as error:
        return list(error.violations)
    if folder.is_dir():
        return [] if (folder / "config.json").is_file() else [_no_checkpoint(f"no config.json in {folder}")]
    return [] if is_hub_name(model) else [_no_checkpoint(f"{folder} is not a folder on this machine")]


def _no_checkpoint(what: str) -> FieldViolation:
    return FieldViolation("--model", f"{what}; expected a checkpoint in Hugging Face format, or a GGUF file")


# ------------------------------------------------------------ what each service reads by itself


def _read_service(settings: type[Settings], reading: Reading, environ: Mapping[str, str]) -> Reading:
    """Return the options that a service reads from environment and file."""
    return read(settings, () if reading.file is None else ("--config", str(reading.file)), environ)


def _alone(service: Reading) -> dict[str, Any]:
    """Return the values that `serve` does not check: those for this service alone, and keys that it does not have."""
    return {
        key: value for key, value in service.values.items() if key in service.own or key not in UpSettings.model_fields
    }


def _problems_alone(service: Reading) -> Sequence[FieldViolation]:
    values = {"model": "."} | _alone(service)  # in place of the model that `serve` will pass
    try:
        validate(replace(service, values=values, violations=list(service.violations)), service.settings)
    except InvalidConfig as error:
        return error.violations
    return ()


# ------------------------------------------------------------ the suite


def _stack_options(settings: UpSettings, reading: Reading, model_name: str | None = None) -> StackOptions:
    """Return the suite, with the engine options that only `serve` received. The services read the others themselves."""
    to_all = _flags(settings, [key for key in _TO_ALL if key in reading.own])
    to_workers = _flags(
        settings, [key for key in EngineSettings.model_fields if key in reading.own and key not in _FOR_EACH]
    )
    fingerprinted = _flags(settings, ["load_format", "seed", "tokenizer"])
    # The model is a folder by then, which has no revisions; the services would read the variable themselves.
    revision = () if settings.revision is None else ("--revision", "")
    redis = _flags(settings, ["redis_ca"])
    recorded = _flags(settings, [key for key in _TO_RECORD if key in reading.own])
    router_own = _flags(settings, [key for key in _TO_ROUTER if key in reading.own])
    pages = _flags(settings, ["cors_origins", "allowed_hosts"])
    model = Path(settings.model).expanduser()
    names = settings.model_name or _name_of(model, model_name)
    if clashes := [value for value in settings.lora if value.partition("=")[0] in names]:
        what = f"is {clashes[0]}, and the model is called so; rename the adapter, or the model with --model-name"
        raise InvalidConfig(FieldViolation("--lora", what))
    cpus = cpus_of_workers(settings.workers, here())
    named = [word for name in names for word in ("--model-name", name)]
    return StackOptions(
        model=model,
        workers=len(cpus),
        block_size=settings.block_size,
        embedded=settings.manager == "embedded",
        host=settings.host,
        port=settings.port,
        grpc_port=settings.grpc_port,
        admin_host=settings.admin_host,
        admin_port=settings.admin_port,
        admin_http_port=settings.admin_http_port,
        manager_port=settings.manager_port,
        standby_ports=_following(settings.standby_port, settings.shards * settings.managers - 1),
        shards=settings.shards,
        worker_ports=_following(settings.worker_port, len(cpus)),
        own_ports=_following(settings.own_port, settings.routers) if settings.routers > 1 else (),
        redis_url=settings.redis_url,
        state_dir=settings.state_dir,
        config=reading.file,
        certs=None if settings.insecure else settings.state_dir / "certs",
        tenants=settings.tenants,
        server_key_file=settings.server_key_file,
        threads=settings.threads,
        worker_cpus=cpus,
        prefill_workers=settings.prefill_workers or 0,
        worker_flags=(*to_all, *to_workers, *revision),
        router_flags=(
            *(*to_all, *redis, *_flags(settings, ["load_format", *_TEXT, *_PUBLIC_TLS])),
            *(*router_own, *recorded, *pages, *named),
        ),
        manager_flags=(*to_all, *redis, *fingerprinted, *recorded, "--model", str(model)),
        quiet=settings.log_level in ("warning", "error"),
        drain_timeout=settings.drain_timeout,
    )


def _data_ports(options: StackOptions, reading: Reading, worker: Reading) -> tuple[int, ...]:
    """Return the data port of each worker: several that have host memory fetch blocks from each other.

    A port that an operator gives is that of the first worker. Raises InvalidConfig where all would have one address.
    """
    count = options.workers
    given = {key: {**worker.values, **reading.values}.get(key) for key in (_DATA_PORT, "data_address", "host_memory")}
    if given["data_address"] is not None and count > 1:
        what = f"is the address of one worker, and there are {count}; leave it out"
        raise InvalidConfig(FieldViolation("--data-address", what))
    if given[_DATA_PORT] is not None:
        return _following(int(str(given[_DATA_PORT])), count)
    fetch = count > 1 and given["host_memory"] is not None and not options.embedded
    return (0,) * count if fetch else ()


def _kv_events(options: StackOptions, reading: Reading, worker: Reading) -> tuple[tuple[str, ...], ...]:
    """Return the flags of each worker's endpoints for subscribers of KV events; (): there are none."""
    given = {key: {**worker.values, **reading.values}.get(key) for key in _KV_EVENTS}
    ends = [(flag_of(key), *str(value).rpartition(":")) for key, value in given.items() if value is not None]
    ports = [_following(int(port), options.workers) for *_, port in ends if port.isdecimal()]
    if len(ports) != len(ends) or not ends:
        return ()  # whoever reads the option says what is wrong with it
    named = [(flag, host, found) for (flag, host, *_), found in zip(ends, ports, strict=True)]
    return tuple(
        tuple(word for flag, host, found in named for word in (flag, f"{host}:{found[index]}"))
        for index in range(options.workers)
    )


def _name_of(model: Path, hub_name: str | None) -> tuple[str, ...]:
    """Return what clients call a model that was given no name; () for the name of its folder."""
    if hub_name is not None:
        return (hub_name,)
    return (DEMO_NAME,) if model.resolve() == CHECKPOINT.resolve() else ()


def _following(port: int, count: int) -> tuple[int, ...]:
    """Return so many ports from one on; all 0, free ones, where that is 0."""
    return tuple(range(port, port + count)) if port else (0,) * count


def _flags(settings: UpSettings, keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(word for key in keys for word in _flag(key, getattr(settings, key)))


def _flag(key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (flag_of(key) if value else flag_of(f"no_{key}"),)
    values = value if isinstance(value, tuple) else () if value is None else (value,)
    return tuple(word for each in values for word in (flag_of(key), str(each)))


def _check_programs(
    options: StackOptions, services: Mapping[str, Reading], reading: Reading, environ: Mapping[str, str]
) -> None:
    """Raise InvalidConfig when the suite would overrule a service's own options, or a service cannot run here."""
    own = _OWN_REDIS if options.redis_url is None and options.standby_ports else ""  # a group needs one
    control, rest = service_programs(with_picked_ports(options), RedisUrls.same(options.redis_url or own))
    problems: list[FieldViolation] = []
    ports: list[tuple[Program, Listened]] = []
    for program in (*control, *rest):
        try:
            final = load(_SERVICES[program.service], program.flags, {**environ, **program.environment})
        except InvalidConfig as error:
            problems += [FieldViolation(f"{program.name} {each.field}", each.description) for each in error.violations]
            continue
        if isinstance(final, GpuWorkerSettings) and program == rest[0]:
            problems += _worker_problems(final, options, str(reading.values.get("revision") or ""))
        problems += _overruled(services[program.service], final, reading)
        shared = {port for other, port in ports if program.service == other.service == RouterSettings.service}
        ports += [(program, port) for port in _ports_of(final) if port not in shared]
    problems += _taken(ports)
    if problems:
        raise _all_of(problems)


def _worker_problems(worker: GpuWorkerSettings, options: StackOptions, revision: str) -> list[FieldViolation]:
    """Return what keeps the workers from running, as they would find it after seconds.

    Before a download that is the kind of the model alone, which small files tell.
    """
    folder = Path(worker.model)
    try:
        if not folder.is_dir():
            return _kind_problems(worker, revision)
        found = worker_problems(worker, folder, Machine.here(), options.workers)
        if follows_another_host(worker, os.environ):
            what = "is not 0, so rank 0 and its suite are on another host; start quire-gpuworker here, or RANK=0"
            found.append(FieldViolation("RANK", what))
        tokenizer_json(folder)  # a conversion takes seconds: once here, and the services find its result
    except InvalidConfig as error:
        return list(error.violations)
    return found


def _kind_problems(worker: GpuWorkerSettings, revision: str) -> list[FieldViolation]:
    if worker.simulate is not None or not is_hub_name(worker.model):
        return []
    small = checkpoint_directory(worker.model, weights=False, revision=revision)
    why = why_not_served(read_config(small), known_kinds())
    return [] if why is None else [FieldViolation("--model", why)]


def _overruled(service: Reading, final: Settings, reading: Reading) -> Iterator[FieldViolation]:
    """Name each value for this service alone that the suite replaces. A flag of `serve` may replace it.

    The ports for peers and for subscribers are those of the first worker.
    """
    wanted = validate(replace(service, values={"model": "."} | _alone(service), violations=[]), service.settings)
    for key in sorted(service.own):
        used = getattr(final, key)
        by_flag = reading.origins.get(key, "").startswith("--")
        if getattr(wanted, key) != used and not by_flag and key not in _FOR_EACH:
            values = redacted(f"is {service.values[key]!r}, and the suite takes {used!r}")
            what = f"{values}; set it for `quire serve` as a whole"
            yield FieldViolation(service.origins[key], what)


def _ports_of(final: Settings) -> list[Listened]:
    if isinstance(final, RouterSettings):
        alone = () if final.own_port is None else (final.own_port,)
        admin = (final.used_admin_port, final.used_admin_http_port, *alone)
        public = (final.port, final.grpc_port)
        return [*((final.host, port) for port in public), *((final.admin_host, port) for port in admin)]
    assert isinstance(final, KvManagerSettings | GpuWorkerSettings)
    ports = [(final.host, port) for port in (final.port, metrics_port(final.metrics_port, final.port))]
    if isinstance(final, GpuWorkerSettings):
        ports += [(final.host, final.data_port)] if final.data_port else []
        ports += [bound_address(each) for each in (final.kv_events, final.kv_events_replay) if each is not None]
    return ports


def _taken(ports: Iterable[tuple[Program, Listened]]) -> list[FieldViolation]:
    """Return the ports that cannot be bound. All ports stay bound until the last one is tried, to find equal ones."""
    problems, given = [], dict[int, Program]()
    with ExitStack() as held:
        for program, (host, port) in ports:
            try:
                _listen(held, host, port)
                given[port] = program
            except (OSError, OverflowError) as error:
                why = "is taken" if getattr(error, "errno", 0) == errno.EADDRINUSE else f"cannot be used ({error})"
                if why == "is taken" and port in given:
                    why = f"is given to {given[port].name} of this suite, too"
                what = f"{why}; {program.name} needs it: choose another with {_PORT_FLAGS[program.service]}"
                problems.append(FieldViolation(f"port {port} of {host}", what))
    return problems


def _listen(held: ExitStack, host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = held.enter_context(socket.socket(family, kind, protocol))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(1)
