"""The checks of `quire up` before it starts a process: every option of every process, the checkpoint, the ports.

The services read the environment and the option file too. An option for one service alone ([router], QUIRE_ROUTER_*)
holds. Where the suite must decide instead (ports, folders), `quire up` refuses the option and names it.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cli.config import UpSettings
from cli.suite.programs import Program, StackOptions, service_programs
from common.checkpoint.hub import checkpoint_directory, is_hub_name
from common.errors import FieldViolation, InvalidConfig
from common.process.metrics import metrics_port
from common.settings.config import Reading, flag_of, load, read, validate
from common.settings.options import Settings
from gpuworker.config import EngineSettings, GpuWorkerSettings
from kvmanager.config import KvManagerSettings
from router.config import RouterSettings

_SERVICES: Final[Mapping[str, type[Settings]]] = {
    each.service: each for each in (RouterSettings, KvManagerSettings, GpuWorkerSettings)
}
_TO_ALL: Final = ("log_level", "trace_sample_ratio")
_PORT_FLAGS: Final = {
    "router": "--port, --http-port or --own-port",
    "kvmanager": "--manager-port",
    "gpuworker": "--worker-port",
}


def suite_options(argv: Sequence[str], environ: Mapping[str, str]) -> StackOptions:
    """Return the suite to start. Raises InvalidConfig with every bad option; exits on `--help`.

    When no option is bad, a model on the hub is downloaded once for all processes.
    """
    reading = read(UpSettings, argv, environ, prog="quire up")
    services = {name: _read_service(each, reading, environ) for name, each in _SERVICES.items()}
    problems = _model_problems(reading.values.get("model"))
    for service in services.values():
        problems += _problems_alone(service)
    try:
        settings = validate(reading, UpSettings)
    except InvalidConfig as error:
        raise _all_of([*error.violations, *problems]) from None
    if problems:
        raise _all_of(problems)
    options = _stack_options(settings, reading)
    _check_programs(options, services, reading, environ)
    if not is_hub_name(settings.model):
        return options
    folder = checkpoint_directory(settings.model, weights=settings.load_format != "dummy")
    return _stack_options(settings.model_copy(update={"model": str(folder)}), reading, model_name=settings.model)


def _all_of(problems: Iterable[FieldViolation]) -> InvalidConfig:
    """Return one error with each violation once: services share sources, so several may find the same violation."""
    return InvalidConfig(*dict.fromkeys(problems))


def _model_problems(model: object) -> list[FieldViolation]:
    """Return the mistakes in the model's name that this machine can find."""
    if not isinstance(model, str):
        return []  # a missing name is reported elsewhere
    folder = Path(model).expanduser()
    if folder.is_dir():
        return [] if (folder / "config.json").is_file() else [_no_checkpoint(f"no config.json in {folder}")]
    return [] if is_hub_name(model) else [_no_checkpoint(f"{folder} is no folder of this machine")]


def _no_checkpoint(what: str) -> FieldViolation:
    return FieldViolation("--model", f"{what}; expected a checkpoint in Hugging Face format")


# ------------------------------------------------------------ what each service reads by itself


def _read_service(settings: type[Settings], reading: Reading, environ: Mapping[str, str]) -> Reading:
    """Return the options that a service reads from environment and file."""
    return read(settings, () if reading.file is None else ("--config", str(reading.file)), environ)


def _alone(service: Reading) -> dict[str, Any]:
    """Return the values that `up` does not check: those for this service alone, and keys that `up` does not have."""
    return {
        key: value for key, value in service.values.items() if key in service.own or key not in UpSettings.model_fields
    }


def _problems_alone(service: Reading) -> Sequence[FieldViolation]:
    values = {"model": "."} | _alone(service)  # in place of the model that `up` will pass
    try:
        validate(replace(service, values=values, violations=list(service.violations)), service.settings)
    except InvalidConfig as error:
        return error.violations
    return ()


# ------------------------------------------------------------ the suite


def _stack_options(settings: UpSettings, reading: Reading, model_name: str | None = None) -> StackOptions:
    """Return the suite, with the engine options that only `up` received. The services read the others themselves."""
    to_all = _flags(settings, [key for key in _TO_ALL if key in reading.own])
    to_workers = _flags(settings, [key for key in EngineSettings.model_fields if key in reading.own])
    fingerprinted = _flags(settings, ["load_format", "seed"])
    named = () if model_name is None else ("--model-name", model_name)
    return StackOptions(
        model=Path(settings.model).expanduser(),
        workers=settings.workers,
        block_size=settings.block_size,
        embedded=settings.manager == "embedded",
        host=settings.host,
        port=settings.port,
        http_port=settings.http_port,
        manager_port=settings.manager_port,
        worker_ports=tuple(range(settings.worker_port, settings.worker_port + settings.workers)),
        own_ports=tuple(range(settings.own_port, settings.own_port + settings.routers)) if settings.routers > 1 else (),
        redis_url=settings.redis_url,
        state_dir=settings.state_dir,
        config=reading.file,
        threads=settings.threads,
        worker_flags=(*to_all, *to_workers),
        router_flags=(*to_all, *_flags(settings, ["load_format"]), *named),
        manager_flags=(*to_all, *fingerprinted, "--model", str(Path(settings.model).expanduser())),
        drain_timeout=settings.drain_timeout,
    )


def _flags(settings: UpSettings, keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(word for key in keys for word in _flag(key, getattr(settings, key)))


def _flag(key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (flag_of(key) if value else flag_of(f"no_{key}"),)
    return () if value is None else (flag_of(key), str(value))


def _check_programs(
    options: StackOptions, services: Mapping[str, Reading], reading: Reading, environ: Mapping[str, str]
) -> None:
    """Raise InvalidConfig when the suite would overrule a service's own options, or ports are taken."""
    control, rest = service_programs(options, options.redis_url or "")
    problems: list[FieldViolation] = []
    ports: list[tuple[Program, int]] = []
    for program in (*control, *rest):
        try:
            final = load(_SERVICES[program.service], program.flags, environ)
        except InvalidConfig as error:
            problems += [FieldViolation(f"{program.name} {each.field}", each.description) for each in error.violations]
            continue
        problems += _overruled(services[program.service], final, reading)
        shared = {port for other, port in ports if program.service == other.service == RouterSettings.service}
        ports += [(program, port) for port in _ports_of(final) if port not in shared]
    problems += _taken(options.host, ports)
    if problems:
        raise _all_of(problems)


def _overruled(service: Reading, final: Settings, reading: Reading) -> Iterator[FieldViolation]:
    """Name each value for this service alone that the suite replaces. A flag of `up` may replace it."""
    wanted = validate(replace(service, values={"model": "."} | _alone(service), violations=[]), service.settings)
    for key in sorted(service.own):
        used = getattr(final, key)
        by_flag = reading.origins.get(key, "").startswith("--")
        if getattr(wanted, key) != used and not by_flag:
            what = f"is {service.values[key]!r}, and the suite takes {used!r}; set it for `quire up` as a whole"
            yield FieldViolation(service.origins[key], what)


def _ports_of(final: Settings) -> tuple[int, ...]:
    if isinstance(final, RouterSettings):
        alone = () if final.own_port is None else (final.own_port, metrics_port(None, final.own_port))
        return final.port, final.http_port, *alone
    assert isinstance(final, KvManagerSettings | GpuWorkerSettings)
    return final.port, metrics_port(final.metrics_port, final.port)


def _taken(host: str, ports: Iterable[tuple[Program, int]]) -> list[FieldViolation]:
    """Return the ports that cannot be bound. All ports stay bound until the last one is tried, to find equal ones."""
    problems = []
    with ExitStack() as held:
        for program, port in ports:
            try:
                _listen(held, host, port)
            except (OSError, OverflowError) as error:
                why = "is taken" if getattr(error, "errno", 0) == errno.EADDRINUSE else f"cannot be used ({error})"
                what = f"{why}; {program.name} needs it: choose another with {_PORT_FLAGS[program.service]}"
                problems.append(FieldViolation(f"port {port} of {host}", what))
    return problems


def _listen(held: ExitStack, host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = held.enter_context(socket.socket(family, kind, protocol))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(1)
