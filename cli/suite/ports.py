"""The ports that a suite picks itself: those for which its options have 0."""

from __future__ import annotations

from dataclasses import replace

from cli.suite.programs import StackOptions
from common.process.ports import free_ports


def picks_ports(options: StackOptions) -> bool:
    """Return whether a suite is to pick some of its ports."""
    return 0 in _all_ports(options)


def with_picked_ports(options: StackOptions) -> StackOptions:
    """Return the options with a free port for each 0; the admin plane's ports follow only a port that was chosen."""
    if not picks_ports(options):
        return options
    if options.grpc_port == 0:
        options = replace(options, admin_port=options.admin_port or 0, admin_http_port=options.admin_http_port or 0)
    hosts = dict.fromkeys(("127.0.0.1", *(each for each in (options.host, options.admin_host) if ":" in each)))
    spare = iter(free_ports(len(_all_ports(options)), tuple(hosts)))

    def picked(port: int) -> int:
        return port or next(spare)

    return replace(
        options,
        grpc_port=picked(options.grpc_port),
        port=picked(options.port),
        admin_port=None if options.admin_port is None else picked(options.admin_port),
        admin_http_port=None if options.admin_http_port is None else picked(options.admin_http_port),
        manager_port=picked(options.manager_port),
        standby_ports=tuple(map(picked, options.standby_ports)),
        worker_ports=tuple(map(picked, options.worker_ports)),
        own_ports=tuple(map(picked, options.own_ports)),
    )


def _all_ports(options: StackOptions) -> tuple[int | None, ...]:
    single = (options.grpc_port, options.port, options.admin_port, options.admin_http_port, options.manager_port)
    return (*single, *options.standby_ports, *options.worker_ports, *options.own_ports)
