"""Free ports of this machine for services that somebody else starts."""

from __future__ import annotations

import errno
import itertools
import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Final

# Below the ports that systems give to outgoing connections (32,768 on Linux). A service derives further ports from its
# own: of its workers, the next ones; of the metrics of each, the one 1,000 above. No candidate is one of those of
# another, up to 8 workers.
CANDIDATES: Final = range(20_000, 32_000, 12)

_count = itertools.count(1)
_last_picked: dict[int, int] = {}


def free_ports(count: int, hosts: Sequence[str] = ("127.0.0.1",)) -> list[int]:
    """Return different ports that are free now at each host. Another process may take one before its owner does.

    A port that this process has picked is the last to be picked again: its owner may not listen yet.
    """
    shuffled = random.SystemRandom().sample(CANDIDATES, len(CANDIDATES))
    ports: list[int] = []
    with ExitStack() as held:
        for port in sorted(shuffled, key=lambda port: _last_picked.get(port, 0)):
            if len(ports) == count:
                break
            with suppress(OSError):
                for host in hosts:
                    held.enter_context(socket.socket()).bind((host, port))
                ports.append(port)
                _last_picked[port] = next(_count)
    if len(ports) < count:
        raise OSError(errno.EADDRINUSE, f"fewer than {count} ports from {CANDIDATES[0]} to {CANDIDATES[-1]} are free")
    return ports
