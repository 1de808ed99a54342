"""Runs the ranks of a host that has not rank 0, and carries what they share, until rank 0 ends.

It has no server of its own. When a rank here ends, rank 0 is told how. When rank 0's link ends, so does everything
here. Whatever started this process starts it again then, as it starts rank 0 again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final

from common.contracts.errors import EngineFailure
from common.settings.config import FAILED_STATUS
from gpuworker.config import GpuWorkerSettings
from gpuworker.native import library as native
from gpuworker.native.ranks import HostRanks, RankBoard
from gpuworker.plane.rank_bridge import Bridge, run_bridge
from gpuworker.plane.rank_hosts import Hosts
from gpuworker.plane.rank_rendezvous import Joined, MemberProcess, join
from gpuworker.plane.rank_watch import LOOK_S
from gpuworker.runner.rank_messages import Ended, send

_log = logging.getLogger(__name__)
_LAST_STEP_S: Final = 1.0
_ENDED_WELL: Final = "ended with status 0"


class Follower:
    """The ranks of this host. `ends` is called with the exit status when rank 0 has ended."""

    def __init__(
        self, board: RankBoard, joined: Joined, members: Mapping[int, MemberProcess], ends: Callable[[int], object]
    ) -> None:
        self._board, self._members, self._ends = board, members, ends
        self._closing = threading.Event()
        self._links = {rank: Connection(link.detach()) for rank, link in joined.ranks.items()}

    def watch(self) -> None:
        """Tell rank 0 how a rank here ended; the body of a thread."""
        while not self._closing.wait(LOOK_S):
            for rank in list(self._links):
                if how := self._members[rank].ended():
                    link = self._links.pop(rank)
                    with suppress(OSError):  # rank 0 has ended before
                        send(link, Ended(how))
                    link.close()

    def end(self, host: int) -> None:
        """End the ranks here, and the process, behind rank 0."""
        self._closing.set()
        until = time.monotonic() + _LAST_STEP_S
        while time.monotonic() < until and not all(member.ended() for member in self._members.values()):
            time.sleep(0.02)
        well = self._board.serving and all(member.ended() == _ENDED_WELL for member in self._members.values())
        for member in self._members.values():
            member.kill()  # its step waits for ranks that do not come
        _log.info("rank 0 has ended") if well else _log.error("rank 0 has ended, and its log says why")
        self._ends(0 if well else FAILED_STATUS)


def follow_first(settings: GpuWorkerSettings, on_joined: Callable[[], object]) -> None:
    """Run the ranks of this host. Calls `on_joined` when rank 0 is there; ends the process with rank 0.

    Raises InvalidConfig where rank 0 does not come within --rank-timeout.
    """
    size, board, library = settings.tensor_parallel_size, RankBoard.make(), native.best()
    if library is None:
        raise EngineFailure("the native library is not there, and only its path runs on several ranks")
    hosts = Hosts.of(os.environ, size)
    joined = join(hosts, size, settings.rank_interface, settings.rank_timeout)
    on_joined()
    own = settings.model_dump_json()
    members = {rank: MemberProcess.start(rank, link, board.descriptor, own) for rank, link in joined.ranks.items()}
    follower = Follower(board, joined, members, os._exit)
    threading.Thread(target=follower.watch, name="quire-ranks", daemon=True).start()
    bridge = Bridge(HostRanks(library, board, hosts.own_ranks(size), size), hosts, {0: joined.host})
    bridge.start(follower.end)
    run_bridge(bridge, joined.store, joined.interface, settings.rank_timeout)
