"""A network of hosts on one machine: network namespaces around a gateway, which can drop, lose and delay packets.

It needs root, `ip` (iproute2) and `iptables`. Each host is a namespace with one address. All packets pass the
namespace of the gateway, which has the rules. A partition is as silent as a real one: nothing is refused, and no
connection ends. The caller's own namespace is one of the hosts.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Self

from common.process import die_with_parent

PROXY: Final = Path(__file__).with_name("delay_proxy.py")
_PROXY_PORT: Final = 9_999
# Networks 10.N.0.0/16; a process may have several.
_NUMBERS: Final = range(213, 245)


def missing() -> str:
    """Return why no network of hosts can be made here; "" if one can."""
    if os.geteuid():
        return "not root"
    lacking = [name for name in ("ip", "iptables", "sysctl") if shutil.which(name) is None]
    return f"missing: {', '.join(lacking)} (Debian: iproute2, iptables, procps)" if lacking else ""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}` fails: {done.stderr.strip() or done.returncode}")


def _number_of_its_own() -> tuple[int, socket.socket]:
    """Return the number of a network that nobody else has, and what holds it until it is closed.

    A name of an abstract socket has one owner in a network namespace, as a route has, and ends with its process.
    """
    for number in _NUMBERS:
        held = socket.socket(socket.AF_UNIX)
        try:
            held.bind(f"\0quire-hosts-{number}")
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return number, held
    raise OSError(errno.EADDRINUSE, f"{len(_NUMBERS)} networks of hosts run on this machine; expected fewer")


class Network:
    """The hosts by name; the last one is the caller's own namespace. Use it as a context manager."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._number, self._held = _number_of_its_own()
        self._name, self._stop = f"quire-{os.getpid()}-{self._number}", ExitStack()
        self._addresses = {host: f"10.{self._number}.{place}.2" for place, host in enumerate(hosts, start=1)}

    def address(self, host: str) -> str:
        return self._addresses[host]

    def namespace(self, host: str) -> str:
        """Return the name of a host's network namespace; the last host has none."""
        return f"{self._name}-{host}"

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one on a host, and ends with this process."""
        return ["ip", "netns", "exec", self.namespace(host), *die_with_parent.command(list(command))]

    def __enter__(self) -> Self:
        with ExitStack() as made:
            made.callback(self._held.close)
            self._add(made, self._name)
            self._on_gateway("sysctl", "-qw", "net.ipv4.ip_forward=1")
            # The table of `delay`: the kernel would take connections that are older than the table for new ones.
            self._on_gateway("iptables", "-t", "nat", "-P", "PREROUTING", "ACCEPT")
            for place, host in enumerate(self._addresses, start=1):
                self._connect(made, place, host)
            self._stop = made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()

    @property
    def _all(self) -> str:
        return f"10.{self._number}.0.0/16"

    def _add(self, made: ExitStack, namespace: str) -> None:
        _run("ip", "netns", "add", namespace)
        made.callback(_run, "ip", "netns", "del", namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")

    def _connect(self, made: ExitStack, place: int, host: str) -> None:
        """Put a cable between a host and the gateway; the host sends all packets of the network there."""
        here, there = f"quire{self._number}", f"host{place}"
        own = host == next(reversed(self._addresses))
        if not own:
            self._add(made, self.namespace(host))
        within = () if own else ("-n", self.namespace(host))
        end = here if own else "eth0"
        room = () if own else ("netns", self.namespace(host))
        _run("ip", "link", "add", end, *room, "type", "veth", "peer", "name", there, "netns", self._name)
        for at, device, last in ((within, end, 2), (("-n", self._name), there, 1)):
            _run("ip", *at, "addr", "add", f"10.{self._number}.{place}.{last}/29", "dev", device)
            _run("ip", *at, "link", "set", device, "up")
        _run("ip", *within, "route", "add", self._all, "via", f"10.{self._number}.{place}.1")

    def _on_gateway(self, *command: str) -> None:
        _run("ip", "netns", "exec", self._name, *command)

    # ------------------------------------------------------------ what can be wrong

    def move(self, host: str) -> None:
        """Give a host another address for good: its connections fall silent, and nothing answers at the old one."""
        before, within = self._addresses[host], ("-n", self.namespace(host))
        network, _, last = before.rpartition(".")
        self._addresses[host] = f"{network}.{int(last) + 1}"
        _run("ip", *within, "addr", "del", f"{before}/29", "dev", "eth0")
        _run("ip", *within, "addr", "add", f"{self._addresses[host]}/29", "dev", "eth0")
        _run("ip", *within, "route", "add", self._all, "via", f"{network}.1")

    @contextmanager
    def _rules(self, *rules: Sequence[str]) -> Iterator[None]:
        with ExitStack() as undone:
            for rule in rules:
                self._on_gateway("iptables", "-A", *rule)
                undone.callback(self._on_gateway, "iptables", "-D", *rule)
            yield

    @contextmanager
    def partition(self, one: str, other: str) -> Iterator[None]:
        """Let no packet pass between two hosts meanwhile."""
        ends = (self.address(one), self.address(other))
        with self._rules(
            *(("FORWARD", "-s", source, "-d", target, "-j", "DROP") for source, target in (ends, ends[::-1]))
        ):
            yield

    @contextmanager
    def isolated(self, host: str) -> Iterator[None]:
        """Let no packet from or to a host pass meanwhile."""
        with self._rules(*(("FORWARD", way, self.address(host), "-j", "DROP") for way in ("-s", "-d"))):
            yield

    @contextmanager
    def loss(self, share: float) -> Iterator[None]:
        """Lose this share of all packets meanwhile."""
        with self._rules(("FORWARD", "-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP")):
            yield

    @contextmanager
    def delay(self, seconds: float) -> Iterator[None]:
        """Delay what new connections carry by this time in each direction: a proxy on the gateway passes it on."""
        command = ["ip", "netns", "exec", self._name, sys.executable, "-P", str(PROXY), str(_PROXY_PORT), str(seconds)]
        # With SYN alone: a packet amid a connection that the kernel does not know must not go to the proxy.
        rule = ("PREROUTING", "-t", "nat", "-p", "tcp", "--syn", "-j", "REDIRECT", "--to-ports", str(_PROXY_PORT))
        with subprocess.Popen(die_with_parent.command(command), stdout=subprocess.PIPE, text=True) as proxy:
            assert proxy.stdout is not None
            try:
                if not proxy.stdout.readline().startswith("READY"):
                    raise OSError("the proxy that delays does not start")
                with self._rules(rule):
                    yield
            finally:
                proxy.kill()
