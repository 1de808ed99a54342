"""Free ports of this machine for services that somebody else starts."""

from __future__ import annotations

import errno
import random
import socket
from contextlib import ExitStack, suppress
from typing import Final

# Below the ports that systems give to outgoing connections (32,768 on Linux). A service derives further ports from its
# own: of its workers, the next ones; of its metrics, the one 1,000 above. No candidate is one of those of another.
CANDIDATES: Final = range(20_000, 32_000, 11)


def free_ports(count: int) -> list[int]:
    """Return different ports that are free now. Another process may take one before its owner does."""
    with ExitStack() as held:
        ports: list[int] = []
        for port in random.SystemRandom().sample(CANDIDATES, len(CANDIDATES)):
            if len(ports) == count:
                return ports
            with suppress(OSError):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
                ports.append(port)
    raise OSError(errno.EADDRINUSE, f"fewer than {count} ports from {CANDIDATES[0]} to {CANDIDATES[-1]} are free")
