"""The ranks of one worker on one host: rank 0 starts the others, checks that they agree, and watches them.

    rank 0                                   another rank
    start -- options, place, memory ------->
          <------ version, fingerprint ----- differences are an error
          ---------------- load ----------->
    load and test a part of the model        load and test a part of the model
          <-------------- its bytes --------
          ------- sizes of pool and steps ->
          ------- a plan for each step ---->

Each rank beats in memory that all share. A rank that ends or stands still ends the worker, whose routers move the
streams.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
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
from common.version import quire_version
from gpuworker.config import GpuWorkerSettings
from gpuworker.memory.byte_plan import max_scored_tokens
from gpuworker.memory.devices import default_threads
from gpuworker.models.choose import TENSOR_PARALLEL, Ranks
from gpuworker.models.llama.shards import Place
from gpuworker.native import library as native
from gpuworker.native.ranks import Beat, RankBoard, StepSizes
from gpuworker.plane.checkpoint_facts import CheckpointFacts
from gpuworker.plane.rank_watch import LOOK_S, BeatWatch, differences, ended_words, stood_still_words
from gpuworker.runner.rank_steps import RankLinks
from gpuworker.scheduling.drafting import MAX_STEP_DRAFTS

_log = logging.getLogger(__name__)
_CLOSE_S: Final = 5.0
_USUAL_SEQS: Final = 64
_LEAST_KEPT: Final = 64  # rows of the self-test


class Start(NamedTuple):
    """What a rank is told first."""

    settings: str  # JSON
    rank: int
    size: int
    sizes: tuple[int, int]


class Loaded(NamedTuple):
    """What a rank says behind its load: the bytes of its weights, or why it has none."""

    weight_bytes: int
    failure: str = ""


class Begin(NamedTuple):
    """The sizes with which steps begin, alike at all ranks."""

    num_blocks: int
    max_num_seqs: int
    table_width: int
    tokens: int  # of a step
    kept: int  # rows of logits that are reserved


class Member(Protocol):
    """The process of another rank."""

    def status(self) -> int | None:
        """Return how it ended; None while it runs."""
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


@dataclass(frozen=True, slots=True)
class MemberProcess:
    """Implements `Member` over a child of this process."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, rank: int, connection: socket.socket, board: int) -> MemberProcess:
        handles = connection.fileno(), board
        command = [sys.executable, "-P", "-m", "gpuworker.plane.rank_process", *map(str, (rank, *handles))]
        return cls(subprocess.Popen(command, pass_fds=handles, stdin=subprocess.DEVNULL))

    def status(self) -> int | None:
        return self.process.poll()

    def end(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        self.process.kill()


def rank_facts(settings: GpuWorkerSettings) -> dict[str, str]:
    """Return what all ranks of a worker must have alike, each option among it."""
    directory = checkpoint_directory(settings.model, revision=settings.revision)
    library = native.best()
    options = settings.model_dump(mode="json")
    return {
        "version": quire_version(),
        "torch": torch.__version__,
        "the checkpoint": model_fingerprint(directory, settings.seed if settings.load_format == "dummy" else None),
        "kernels for": "no CPU" if library is None else native.level_of(library),
        **{f"--{name.replace('_', '-')}": str(value) for name, value in options.items()},
    }


def rank_threads(settings: GpuWorkerSettings) -> int:
    """Return the threads of each rank."""
    return settings.threads or max(1, default_threads() // settings.tensor_parallel_size)


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
            self._links = RankLinks(self.connections, lambda rank, why: self.lose(f"rank {rank} {why}"))
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
            connection.send(begin)
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
        self.beat.close()
        for connection in self.connections.values():
            connection.close()
        for member in self.members.values():
            member.end(_CLOSE_S)
        self.board.close()

    def lose(self, reason: str) -> None:
        """End the worker, once. Does not return before the process has ended, unless it is closing anyway."""
        with self._lock:
            first, self.lost = not self.lost, self.lost or reason
        if first and not self._closing.is_set():
            for member in self.members.values():
                member.kill()  # one that stands still would outlive this process
            self.on_lost(reason)
        self._closing.wait()

    def watch(self) -> None:
        """Look at the other ranks until the group closes; the body of a thread."""
        watch: BeatWatch | None = None
        while not self._closing.wait(LOOK_S):
            for rank, member in self.members.items():
                status = member.status()
                if status is not None and not self._closing.is_set():
                    self.lose(ended_words(rank, status))
                    return
            beats = {rank: self.board.beats(rank) for rank in self.members}
            if not self.board.serving:
                continue
            now = time.monotonic()
            if watch is None:
                watch = BeatWatch(beats, now)
            elif (rank_still := watch.still(beats, now)) is not None:
                self.lose(stood_still_words(rank_still))
                return

    def _answer(self, rank: int, connection: Connection) -> Loaded:
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            self.lose(f"rank {rank} ended while the worker started")
            raise EngineFailure(self.lost) from None
        assert isinstance(answer, Loaded)
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
    """Start the other ranks of a worker, and check that they agree with this one; they load from then on.

    Raises InvalidConfig for ranks that differ, or that do not come within --rank-timeout, with each of them.
    """
    size, sizes, board = settings.tensor_parallel_size, step_sizes(settings), RankBoard.make()
    members, connections = dict[int, Member](), dict[int, Connection]()
    for rank in range(1, size):
        own, other = socket.socketpair()
        members[rank] = start(rank, other, board.descriptor)
        other.close()
        connections[rank] = Connection(own.detach())
        with suppress(OSError):  # one that has ended already is named below
            connections[rank].send(Start(settings.model_dump_json(), rank, size, (sizes.tokens, sizes.kept)))
    library = native.best()
    assert library is not None, "ranks run the native path"
    beat = Beat(library, board, 0, LOOK_S)
    group = RankGroup(Ranks(Place(0, size), board, sizes), board, members, connections, beat, on_lost)
    try:
        _greet(settings, group)
    except InvalidConfig:
        group.close()
        raise
    for connection in connections.values():
        connection.send(True)
    threading.Thread(target=group.watch, name="quire-ranks", daemon=True).start()
    return group


def _greet(settings: GpuWorkerSettings, group: RankGroup) -> None:
    own, found, missing = rank_facts(settings), dict[int, Mapping[str, str]](), list[str]()
    until = time.monotonic() + settings.rank_timeout
    for rank, connection in group.connections.items():
        said: Any = None
        try:
            if connection.poll(max(0.0, until - time.monotonic())):
                said = connection.recv()
        except (EOFError, OSError):
            pass
        if isinstance(said, dict):
            found[rank] = said
            continue
        status = group.members[rank].status()
        silent = f"rank {rank} did not come within {settings.rank_timeout:g} s"
        missing.append(silent if status is None else ended_words(rank, status))
    if missing:
        what = f"{'; '.join(missing)}; its log lines say why, or give it longer"
        raise InvalidConfig(FieldViolation("--rank-timeout", what))
    if differing := differences(own, found):
        raise InvalidConfig(*(FieldViolation(TENSOR_PARALLEL, f"{each}; start all alike") for each in differing))
