"""The ranks of one worker: rank 0 starts those of its host, awaits those of others, and watches that all agree and run.

    rank 0                                   another rank
    start -- options, place, memory ------->
          <------ version, fingerprint ----- differences are an error
          ---------------- load ----------->
    load and test a part of the model        load and test a part of the model
          <-------------- its bytes --------
          ------- sizes of pool and steps ->
          ------- a plan for each step ---->

Each rank beats in memory that all of a host share; beats of other hosts are brought there. A rank that ends or stands
still ends the worker, whose routers move the streams.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, Protocol

import torch

from common.checkpoint.fingerprint import model_fingerprint
from common.checkpoint.hub import checkpoint_directory
from common.contracts.errors import EngineFailure, FieldViolation, InvalidConfig
from common.settings.config import FAILED_STATUS
from common.settings.options import ServiceSettings
from common.version import quire_version
from gpuworker.config import GpuWorkerSettings
from gpuworker.memory.byte_plan import max_scored_tokens
from gpuworker.memory.devices import default_threads
from gpuworker.models.choose import TENSOR_PARALLEL, Ranks
from gpuworker.models.llama.shards import Place
from gpuworker.native import library as native
from gpuworker.native.ranks import Beat, RankBoard, StepSizes
from gpuworker.plane.checkpoint_facts import CheckpointFacts
from gpuworker.plane.rank_hosts import Hosts
from gpuworker.plane.rank_rendezvous import MemberProcess, RemoteMember, Rendezvous, start_bridge
from gpuworker.plane.rank_watch import LOOK_S, BeatWatch, differences, stood_still_words
from gpuworker.runner.rank_messages import (
    Agreed,
    Begin,
    Closed,
    Ended,
    Facts,
    Loaded,
    Start,
    first_received,
    received,
    send,
)
from gpuworker.runner.rank_steps import RankLinks
from gpuworker.scheduling.drafting import MAX_STEP_DRAFTS

_log = logging.getLogger(__name__)
_CLOSE_S: Final = 5.0
_END_SEEN_S: Final = 1.0
_USUAL_SEQS: Final = 64
_LEAST_KEPT: Final = 64  # rows of the self-test
_OF_A_HOST: Final = frozenset(
    (*ServiceSettings.model_fields, "port", "metrics_port", "advertise", "worker_id", "manager", "manager_patience")
) | {"cpus", "rank_interface"}
"""Options that say where a worker is and how it serves, which rank 0 alone does."""


class Member(Protocol):
    """The process of another rank."""

    def ended(self) -> str:
        """Return how it ended, in words; empty while it runs."""
        ...

    def end(self, seconds: float) -> None:
        """Wait until it has ended, and kill it after so many seconds."""
        ...

    def kill(self) -> None:
        """Kill it, whether it runs or stands still."""
        ...


class StartMember(Protocol):
    """Starts the process of a rank, with its end of a connection and the memory that ranks share."""

    def __call__(self, rank: int, connection: socket.socket, board: int) -> Member: ...


def rank_facts(settings: GpuWorkerSettings) -> Facts:
    """Return what all ranks of a worker must have alike, each option among it that their steps depend on."""
    directory = checkpoint_directory(settings.model, revision=settings.revision)
    library = native.best()
    options = settings.model_dump(mode="json", exclude=set(_OF_A_HOST))
    return Facts({
        "version": quire_version(),
        "torch": str(torch.__version__),
        "the checkpoint": model_fingerprint(directory, settings.seed if settings.load_format == "dummy" else None),
        "kernels for": "no CPU" if library is None else native.level_of(library),
        **{f"--{name.replace('_', '-')}": str(value) for name, value in options.items()},
    })  # fmt: skip


def rank_threads(settings: GpuWorkerSettings) -> int:
    """Return the threads of each rank: those of a machine share its cores."""
    size = settings.tensor_parallel_size
    hosts = Hosts.of(os.environ, size)
    here = len(hosts.own_ranks(size)) * hosts.beside
    return settings.threads or max(1, default_threads() // here)


def end_worker(reason: str) -> None:
    """End the process at once: steps wait for a rank that does not come, and cannot be stopped."""
    _log.critical("the worker ends: %s", reason)
    logging.shutdown()
    os._exit(FAILED_STATUS)


@dataclass(slots=True)
class RankGroup:
    """Rank 0's view of the ranks. `on_lost` is called once with the reason, on a thread of the group."""

    ranks: Ranks
    board: RankBoard
    members: Mapping[int, Member]
    connections: Mapping[int, Connection]
    beat: Beat
    on_lost: Callable[[str], None] = end_worker
    bridge: Member | None = None
    """The process that carries what ranks share to other hosts, where there are some."""
    own: range = range(0)
    """The ranks of this host."""
    store: object = None
    """Of the rendezvous: it ends with the worker."""
    weight_bytes: dict[int, int] = field(default_factory=dict)
    lost: str = ""
    """Why the worker ends."""
    _links: RankLinks | None = None
    _closing: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def size(self) -> int:
        return self.ranks.place.size

    @property
    def links(self) -> RankLinks:
        if self._links is None:
            self._links = RankLinks(
                self.connections, lambda rank, why: self.lose(f"rank {rank} {self._how(rank, why)}")
            )
        return self._links

    def await_loaded(self) -> None:
        """Wait until all ranks have loaded. Raises InvalidConfig with the reason of one that could not."""
        for rank, connection in self.connections.items():
            answer = self._answer(rank, connection)
            if answer.failure:
                raise InvalidConfig(FieldViolation(TENSOR_PARALLEL, f"rank {rank} cannot load: {answer.failure}"))
            self.weight_bytes[rank] = answer.weight_bytes

    def begin(self, begin: Begin) -> None:
        """Let all ranks allocate their parts of the pool, and wait until they have."""
        for connection in self.connections.values():
            _tell(connection, begin)
        for rank, connection in self.connections.items():
            answer = self._answer(rank, connection)
            if answer.failure:
                raise InvalidConfig(FieldViolation(TENSOR_PARALLEL, f"rank {rank} cannot begin: {answer.failure}"))

    def serve(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` from now on, also for a rank that stands still."""
        self.on_lost = on_lost
        self.board.serve()

    def close(self) -> None:
        """End the other ranks; all steps are over."""
        self._closing.set()
        for connection in self.connections.values():
            if self.board.serving and not self.lost:
                _tell(connection, Closed())
            connection.close()
        for member in self.members.values():
            member.end(_CLOSE_S)
        if self.bridge is not None:
            self.bridge.kill()
            self.bridge.end(_CLOSE_S)
        self.beat.close()  # until here the others would take this process for one that stands still
        self.board.close()

    def lose(self, reason: str) -> None:
        """End the worker, once. Does not return before the process has ended, unless it is closing anyway."""
        with self._lock:
            first, self.lost = not self.lost, self.lost or reason
        if first and not self._closing.is_set():
            for member in (*self.members.values(), *(() if self.bridge is None else (self.bridge,))):
                member.kill()  # one that stands still would outlive this process
            self.on_lost(reason)
        self._closing.wait()

    def watch(self) -> None:
        """Look at the other ranks until the group closes; the body of a thread."""
        watch: BeatWatch | None = None
        while not self._closing.wait(LOOK_S):
            if (ended := self._ended()) and not self._closing.is_set():
                self.lose(ended)
                return
            beats = {rank: self.board.beats(rank) for rank in self.members}
            if not self.board.serving:
                continue
            now = time.monotonic()
            if watch is None:
                watch = BeatWatch(beats, now)
            elif (rank_still := watch.still(beats, now)) is not None:
                self.lose(stood_still_words(rank_still, elsewhere=rank_still not in self.own))
                return

    def _ended(self) -> str:
        """Return which rank ended, and how; empty while all run."""
        for rank, member in self.members.items():
            if how := member.ended():
                return f"rank {rank} {how}"
        if self.bridge is not None and (how := self.bridge.ended()):
            return f"the process that carries parts to other hosts {how}"
        return ""

    def _how(self, rank: int, why: str) -> str:
        """Return how a rank ended whose connection has: a process closes its files before its end can be seen."""
        until = time.monotonic() + _END_SEEN_S
        while not (how := self.members[rank].ended()) and time.monotonic() < until:
            time.sleep(0.02)
        return how or why

    def _answer(self, rank: int, connection: Connection) -> Loaded:
        try:
            answer = received(connection)
        except (EOFError, OSError, pickle.UnpicklingError):
            answer = Ended(self._how(rank, "ended while the worker started"))
        if not isinstance(answer, Loaded):
            self.lose(f"rank {rank} {answer.how if isinstance(answer, Ended) else 'said what none says'}")
            raise EngineFailure(self.lost)
        return answer


def step_sizes(settings: GpuWorkerSettings) -> StepSizes:
    """Return the largest step that the options allow."""
    directory = checkpoint_directory(settings.model, revision=settings.revision)
    scored = max_scored_tokens(max(1, CheckpointFacts(directory).vocab_size))
    kept = settings.num_seqs(_USUAL_SEQS) + MAX_STEP_DRAFTS + scored
    return StepSizes(max(settings.max_num_batched_tokens, _LEAST_KEPT), max(kept, _LEAST_KEPT))


def start_group(
    settings: GpuWorkerSettings, start: StartMember = MemberProcess.start, on_lost: Callable[[str], None] = end_worker
) -> RankGroup:
    """Start the other ranks of this host, await those of other hosts, and check that all agree; they load from then on.

    Raises InvalidConfig for ranks that differ, or that do not come within --rank-timeout, with each of them.
    """
    size, sizes = settings.tensor_parallel_size, step_sizes(settings)
    hosts = Hosts.of(os.environ, size)
    meeting = Rendezvous(hosts, size, settings.rank_interface, settings.rank_timeout) if hosts.count > 1 else None
    library, board, own_ranks = native.best(), RankBoard.make(), hosts.own_ranks(size)
    assert library is not None, "ranks run the native path"
    members, connections = dict[int, Member](), dict[int, Connection]()
    for rank in own_ranks[1:]:
        own, other = socket.socketpair()
        members[rank] = start(rank, other, board.descriptor)
        other.close()
        connections[rank] = Connection(own.detach())
    beat = Beat(library, board, 0, LOOK_S)
    ranks = Ranks(Place(0, size), board, sizes)
    group = RankGroup(ranks, board, members, connections, beat, on_lost, own=own_ranks)
    guests = None
    try:
        if meeting is not None:
            guests = meeting.await_guests()
            for rank, link in sorted(guests.ranks.items()):
                members[rank] = RemoteMember(link.dup())
                connections[rank] = Connection(link.detach())
        for rank, connection in connections.items():
            _tell(connection, Start(settings.model_dump_json(), rank, size, (sizes.tokens, sizes.kept)))
        _greet(settings, group)
    except InvalidConfig:
        if guests is not None:
            guests.close()
        if meeting is not None:
            meeting.close()
        group.close()
        raise
    if meeting is not None and guests is not None:
        group.bridge = MemberProcess(start_bridge(meeting, guests, board.descriptor))
        group.store = meeting.store
        meeting.close()
    for connection in connections.values():
        _tell(connection, Agreed())
    threading.Thread(target=group.watch, name="quire-ranks", daemon=True).start()
    return group


def _tell(connection: Connection, message: NamedTuple) -> None:
    """Send; who reads its answer names a rank that has ended."""
    with suppress(OSError):
        send(connection, message)


def _greet(settings: GpuWorkerSettings, group: RankGroup) -> None:
    own, found, missing = rank_facts(settings), dict[int, Mapping[str, str]](), list[str]()
    until = time.monotonic() + settings.rank_timeout
    for rank, connection in group.connections.items():
        said: Any = None
        how = f"did not come within {settings.rank_timeout:g} s"
        try:
            said = first_received(connection, max(0.0, until - time.monotonic()))
        except TimeoutError:
            how = (group.members[rank].ended() if rank in group.own else "") or how
        except (EOFError, OSError):
            how = group.members[rank].ended() or "ended"
        except pickle.UnpicklingError as error:
            how = f"is not one of this version: {error}"
        if isinstance(said, Facts) and _are_words(said.by_name):
            found[rank] = said.by_name
            continue
        if said is not None:
            how = str(said.how) if isinstance(said, Ended) else "said what none says"
        missing.append(f"rank {rank} {how:.200}")
    if missing:
        what = f"{'; '.join(missing)}; its log lines say why, or give it longer"
        raise InvalidConfig(FieldViolation("--rank-timeout", what))
    if differing := differences(own.by_name, found):
        raise InvalidConfig(*(FieldViolation(TENSOR_PARALLEL, f"{each}; start all alike") for each in differing))


def _are_words(facts: object) -> bool:
    return isinstance(facts, dict) and all(isinstance(word, str) for item in facts.items() for word in item)
