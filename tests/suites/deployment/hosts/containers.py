"""Containers on one host of a network, as an engine's bridge has them: published ports at an address that nobody sees.

Each container is a network namespace behind the host's. What is published is rewritten on its way in, and what a
container sends leaves under the host's address, so a service cannot see at which address others reach it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, Self

from bench.fault_injection.hosts.network import Network
from common.process import die_with_parent

_BRIDGE: Final = "172.30"


class Containers:
    """The containers of a host by name. Use it as a context manager."""

    def __init__(self, network: Network, host: str) -> None:
        self._network, self._host, self._made = network, host, ExitStack()
        self._places: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._on_host("sysctl", "-qw", "net.ipv4.ip_forward=1")
        self._on_host("iptables", "-t", "nat", "-A", "POSTROUTING", "-s", f"{_BRIDGE}.0.0/16", "-j", "MASQUERADE")
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def add(self, name: str, ports: Sequence[Mapping[str, Any]]) -> None:
        """Make a container, and publish its ports as Compose lists them."""
        place = self._places[name] = len(self._places) + 1
        inside, outside = self._namespace(name), self._network.namespace(self._host)
        _run("ip", "netns", "add", inside)
        self._made.callback(_run, "ip", "netns", "del", inside)
        _run("ip", "-n", outside, "link", "add", f"c{place}", "type", "veth", "peer", "name", "eth0", "netns", inside)
        for namespace, device, last in ((outside, f"c{place}", 1), (inside, "eth0", 2)):
            _run("ip", "-n", namespace, "addr", "add", f"{_BRIDGE}.{place}.{last}/24", "dev", device)
            _run("ip", "-n", namespace, "link", "set", device, "up")
        _run("ip", "-n", inside, "link", "set", "lo", "up")
        _run("ip", "-n", inside, "route", "add", "default", "via", f"{_BRIDGE}.{place}.1")
        for port in ports:
            self._publish(place, port)

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one in a container, and ends with this process."""
        return ["ip", "netns", "exec", self._namespace(name), *die_with_parent.command(list(command))]

    def _publish(self, place: int, port: Mapping[str, Any]) -> None:
        match = ("-d", port["host_ip"], "-p", "tcp", "--dport", port["published"])
        target = f"{_BRIDGE}.{place}.2:{port['target']}"
        self._on_host("iptables", "-t", "nat", "-A", "PREROUTING", *match, "-j", "DNAT", "--to-destination", target)

    def _namespace(self, name: str) -> str:
        return f"{self._network.namespace(self._host)}-{name}"

    def _on_host(self, *command: str) -> None:
        _run("ip", "netns", "exec", self._network.namespace(self._host), *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"`{' '.join(command)}` fails: {done.stderr.strip() or done.returncode}"
