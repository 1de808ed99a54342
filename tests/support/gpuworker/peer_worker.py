"""A worker process as `python -m gpuworker` is one, which says how blocks come, and whose answers to peers can be held.

It prints `CARRIER name` for each block that came from a peer. PEER_TEST_HOLD is a folder: while it has a file with the
worker's id, the worker answers a peer's request with one block, prints `HOLDS`, and takes no further one out. So a
fetch is in its middle for as long as a test wants. With PEER_TEST_CARRIER=tcp or nixl it sees no shared memory, and
PEER_TEST_PATIENCE is the least patience of its own fetches, in seconds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from gpuworker import main
from gpuworker.engine import transfers
from gpuworker.engine.image_pace import ImagePace
from gpuworker.engine.image_requests import ImageRequests
from gpuworker.peers.client import PeerClient
from gpuworker.plane import data_port

# While it holds, the engine looks this often whether it still does.
_LOOK_SECONDS = 0.01
_land, _turn = PeerClient.land, ImageRequests.turn


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def land(client: PeerClient, *given: Any, **named: Any) -> None:
    carrier = named.get("carrier") or (given[4] if len(given) > 4 else "")
    if carrier:
        say(f"CARRIER {carrier}")
    _land(client, *given, **named)


def holding_turn(hold: Path) -> Any:
    answered = False

    def turn(requests: ImageRequests, agent: Any, steps_run: bool = False) -> bool:
        nonlocal answered
        if not hold.exists():
            answered = False
            return _turn(requests, agent, steps_run)
        if answered or not requests._asked:
            return False
        answered, requests._pace = True, ImagePace(1, 1)
        worked = _turn(requests, agent)
        say("HOLDS")
        return worked

    return turn


def run() -> int:
    worker_id = sys.argv[sys.argv.index("--worker-id") + 1]
    setattr(PeerClient, "land", land)  # noqa: B010
    if folder := os.environ.get("PEER_TEST_HOLD"):
        setattr(ImageRequests, "turn", holding_turn(Path(folder) / worker_id))  # noqa: B010
        setattr(ImageRequests, "patience", property(lambda _: _LOOK_SECONDS))  # noqa: B010
    if os.environ.get("PEER_TEST_CARRIER") in ("tcp", "nixl"):
        setattr(data_port, "host_key", bytes)  # noqa: B010
    if patience := os.environ.get("PEER_TEST_PATIENCE"):
        setattr(transfers, "_LEAST_PATIENCE", float(patience))  # noqa: B010
    return main.main()


if __name__ == "__main__":
    sys.exit(run())
