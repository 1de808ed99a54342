"""Carries what ranks share to the ranks of other hosts, one process on each host.

The ranks of a host meet in its memory, as if all ranks were there (gpuworker/native/quire_ranks.h). When those of this
host have come, their parts go to all hosts by one collective of torch.distributed, and theirs into their slots here.
Then the counters of the ranks elsewhere move on. So each rank adds up the same parts in the order of ranks, and
tokens depend neither on timing nor on where a rank runs.

Beside that, the process of rank 0's host has a link to each of the others: for the tokens of a step, one way, and for
beats. A rank on another host stands still when its beats no longer come.

It is a process of its own, without the engine's Python code: a meeting must not wait for the lock of that.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from common.process.logs import setup_logging
from common.settings.config import FAILED_STATUS
from gpuworker.models.llama.shards import Place
from gpuworker.native import library as native
from gpuworker.native.ranks import BEGUN, MET, HostRanks, RankBoard
from gpuworker.plane.rank_hosts import Hosts
from gpuworker.plane.rank_rendezvous import connected_store
from gpuworker.plane.rank_watch import LOOK_S, watch_first

_log = logging.getLogger(__name__)
_BEATS: Final = b"B"
_TOKENS: Final = b"T"
_FOREVER: Final = timedelta(days=365)
"""Of a collective: a load of a model, or a rank without work, may take any time. Beats find what stands still."""
_LAST_WORDS_S: Final = 2.0
_MOST_BYTES: Final = 64 << 20
"""Of a message: the tokens of a step."""


def open_group(store: Store, hosts: Hosts, interface: str, timeout: float) -> dist.ProcessGroup:
    """Return the group of all hosts, over gloo on one network interface. Raises RuntimeError where some do not come."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    dist.init_process_group("gloo", None, timedelta(seconds=timeout), hosts.count, hosts.own, store)
    group = dist.new_group(timeout=_FOREVER, backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every host is in it"
    return group


class Bridge:
    """Carries for the ranks of this host. `links` are by host: from that of rank 0 to all others, from those to it."""

    def __init__(self, ranks: HostRanks, hosts: Hosts, links: Mapping[int, Connection]) -> None:
        self._ranks, self.hosts, self._links = ranks, hosts, links
        self._group: dist.ProcessGroup | None = None
        self._failed = threading.Event()
        self._locks = {host: threading.Lock() for host in links}

    def start(self, on_end: Callable[[int], None]) -> None:
        """Begin with beats and tokens on threads; `on_end` is called with a host whose link has ended."""
        bodies: list[tuple[Callable[..., None], tuple[object, ...]]] = [(self._beat, ())]
        bodies += [(self._follow, (host, on_end)) for host in self._links]
        bodies += [] if self.hosts.own else [(self._give_tokens, ())]
        for body, arguments in bodies:
            threading.Thread(target=body, args=arguments, daemon=True).start()

    def meet(self, group: dist.ProcessGroup) -> None:
        """Carry the parts of each meeting, for ever. Raises RuntimeError where another host cannot be reached."""
        met, ranks, self._group = 0, self._ranks, group
        try:
            while True:
                if ranks.have_come(ranks.own, MET, met + 1):
                    self._carry(met)
                    for others in ranks.others:
                        ranks.move_on(others, MET)
                    met += 1
        finally:
            self._failed.set()  # beats end with it, for no step does

    # ------------------------------------------------------------ a meeting

    def _carry(self, meeting: int) -> None:
        floats, rows = self._ranks.written()
        if rows:
            self._carry_logits(rows)
            return
        own, parts = self._ranks.own, self._ranks.memory.parts[meeting & 1]
        sent = parts[own.start : own.stop, : max(floats, 1)].contiguous()  # [ranks of a host, floats]
        found = [torch.empty_like(sent) for _ in range(self.hosts.count)]
        dist.all_gather(found, sent, self._group)
        for host, theirs in enumerate(found):
            if host != self.hosts.own:
                ranks = self.hosts.ranks(host, self._ranks.size)
                parts[ranks.start : ranks.stop, : max(floats, 1)] = theirs

    def _carry_logits(self, rows: int) -> None:
        """Bring the columns of all hosts to rank 0, which alone reads them."""
        logits = self._ranks.memory.logits[:rows]
        if self.hosts.own:
            dist.send(logits[:, self._columns(self.hosts.own)].contiguous(), 0, self._group)
            return
        for host in range(1, self.hosts.count):
            columns = self._columns(host)
            theirs = torch.empty(rows, columns.stop - columns.start)
            dist.recv(theirs, host, self._group)
            logits[:, columns] = theirs

    def _columns(self, host: int) -> slice:
        """Return the columns of a host's ranks, which are side by side."""
        size, vocab = self._ranks.size, self._ranks.memory.logits.shape[1]
        ranks = self.hosts.ranks(host, size)
        return slice(Place(ranks.start, size).of(vocab)[0], Place(ranks.stop - 1, size).of(vocab)[1])

    # ------------------------------------------------------------ the links

    def _send(self, host: int, message: bytes) -> None:
        with self._locks[host]:
            self._links[host].send_bytes(message)

    def _beat(self) -> None:
        board = self._ranks.board
        while not self._failed.is_set():
            beats = [board.beats(rank) for rank in self._ranks.own]
            for host in self._links:
                try:
                    self._send(host, _BEATS + struct.pack(f"<{1 + len(beats)}I", board.serving, *beats))
                except OSError:
                    continue  # the reader of this link says so
            self._failed.wait(LOOK_S)

    def _give_tokens(self) -> None:
        """Send the tokens of each step as it begins; the others wait for them."""
        begun, ranks = 0, self._ranks
        while not self._failed.is_set():
            if not ranks.have_come(range(1), BEGUN, begun + 1):
                continue
            begun += 1
            token_ids = ranks.given().numpy().tobytes()
            for host in self._links:
                try:
                    self._send(host, _TOKENS + token_ids)
                except OSError:
                    continue

    def _follow(self, host: int, on_end: Callable[[int], None]) -> None:
        """Take over what another host says, until its link ends."""
        link, ranks, board = self._links[host], self.hosts.ranks(host, self._ranks.size), self._ranks.board
        try:
            while not self._failed.is_set():
                message = link.recv_bytes(_MOST_BYTES)
                kind, body = message[:1], message[1:]
                if kind == _BEATS and len(body) == 4 * (1 + len(ranks)):
                    serving, *beats = struct.unpack(f"<{1 + len(ranks)}I", body)
                    for rank, each in zip(ranks, beats, strict=True):
                        board.follow(rank, each, bool(serving))
                elif kind == _TOKENS and not host and len(body) in range(0, 8 * board.struct.tokens + 1, 8):
                    token_ids = np.frombuffer(body, dtype=np.int64)
                    self._ranks.memory.token_ids[: len(token_ids)] = torch.from_numpy(token_ids.copy())
                    self._ranks.move_on(range(1), BEGUN)
                else:
                    _log.error("host %d sent %d bytes that are neither beats nor tokens", host, len(message))
                    break
        except (EOFError, OSError):
            pass
        on_end(host)


def run_bridge(bridge: Bridge, store: Store, interface: str, timeout: float) -> None:
    """Carry until this process is ended; it ends itself where another host cannot be reached, or does not come."""
    try:
        bridge.meet(open_group(store, bridge.hosts, interface, timeout))
    except RuntimeError as error:
        _log.warning("what ranks share does not reach the other hosts: %s", error)
        time.sleep(_LAST_WORDS_S)  # who finds a dead rank before that says which
        os._exit(FAILED_STATUS)


def main(argv: Sequence[str] | None = None) -> int:
    """Carry for rank 0's host: `argv` has what `rank_rendezvous.start_bridge` gives."""
    size, board, port, interface, timeout, *links = sys.argv[1:] if argv is None else argv
    parent = os.getppid()
    hosts, library = Hosts.of(os.environ, int(size)), native.best()
    assert library is not None, "rank 0 has one"
    setup_logging("ranks", "warning", "text")
    ranks = HostRanks(library, RankBoard(int(board)), hosts.own_ranks(int(size)), int(size))
    threading.Thread(target=watch_first, args=(ranks.board, parent), name="quire-watch", daemon=True).start()
    bridge = Bridge(ranks, hosts, {1 + n: Connection(int(link)) for n, link in enumerate(links)})
    bridge.start(lambda host: None)  # rank 0 looks at beats, and at the links of ranks
    run_bridge(bridge, connected_store(hosts, int(port), float(timeout)), interface, float(timeout))
    return 0


if __name__ == "__main__":
    sys.exit(main())
