"""A rank of a worker beside rank 0: loads its part of the model, and runs the steps that rank 0 plans.

It has no server, no lease and no scheduler. It ends with rank 0: at the end of the connection, or when its parent has
gone. Where rank 0 stands still, this process kills it: its routers then move the streams.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection

import torch

from common.contracts.errors import QuireError
from common.process.logs import setup_logging
from gpuworker.attention.backends import BackendOptions, make_backend
from gpuworker.config import GpuWorkerSettings
from gpuworker.memory.devices import pick_device
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.choose import Ranks, open_native
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.shards import Place
from gpuworker.native import library as native
from gpuworker.native.library import use_level
from gpuworker.native.ranks import Beat, RankBoard, StepSizes
from gpuworker.plane.assembly import asks_for_checkpoints, source_of
from gpuworker.plane.rank_group import Begin, Loaded, Start, rank_facts, rank_threads
from gpuworker.plane.rank_watch import LOOK_S, BeatWatch, stood_still_words
from gpuworker.runner.native_executor import RankExecutor
from gpuworker.runner.rank_steps import received_plan

_log = logging.getLogger(__name__)


def run_rank(connection: Connection, board: RankBoard) -> None:
    """Run one rank until rank 0 closes the connection."""
    start = connection.recv()
    assert isinstance(start, Start)
    settings = GpuWorkerSettings.model_validate_json(start.settings)
    torch.set_num_threads(rank_threads(settings))
    use_level(settings.cpu_level)
    library = native.best()
    assert library is not None, "rank 0 has one"
    beat = Beat(library, board, start.rank, LOOK_S)
    try:
        _run(connection, board, start, settings)
    finally:
        beat.close()


def _run(connection: Connection, board: RankBoard, start: Start, settings: GpuWorkerSettings) -> None:
    """Load, and run steps until the connection ends."""
    connection.send(rank_facts(settings))
    connection.recv()  # it is closed where ranks differ
    options = BackendOptions(deterministic=settings.deterministic)
    backend = partial(make_backend, "auto", options=options)
    ranks = Ranks(Place(start.rank, start.size), board, StepSizes(*start.sizes))
    source, device = source_of(settings), pick_device(settings.device)
    try:
        checkpoints = asks_for_checkpoints(settings)
        opened = open_native(source, device, settings.model_impl, backend, settings.block_size, checkpoints, ranks)
    except QuireError as error:
        _log.critical("rank %d cannot load: %s", start.rank, error)
        connection.send(Loaded(0, str(error)))
        return
    assert opened is not None, "the native path alone runs at several ranks"
    model, geometry = opened
    assert isinstance(model, LlamaCpuModel)
    connection.send(Loaded(model.weight_bytes))
    begin = connection.recv()
    assert isinstance(begin, Begin)
    try:
        model.reserve(begin.tokens, begin.kept)
        cache = KvCache(geometry, begin.num_blocks, settings.block_size, device)
        if model.states is not None:
            model.states.reserve(begin.max_num_seqs)
    except (MemoryError, OSError, RuntimeError) as error:
        connection.send(Loaded(0, str(error)))
        return
    model.extend_rope(begin.table_width)
    attention = model.parts_of(backend(cache))
    executor = RankExecutor(model, attention, cache, rank_threads(settings))
    connection.send(Loaded(model.weight_bytes))
    while (plan := received_plan(connection)) is not None:
        executor.run(plan)
    executor.close()


def watch_first(board: RankBoard, parent: int) -> None:
    """Follow rank 0: end with it, and kill it when it stands still while it serves; the body of a thread."""
    watch: BeatWatch | None = None
    while os.getppid() == parent:
        time.sleep(LOOK_S)
        beats, now = {0: board.beats(0)}, time.monotonic()
        if not board.serving:
            continue
        if watch is None:
            watch = BeatWatch(beats, now)
        elif watch.still(beats, now) is not None:
            _log.critical("the worker ends: %s", stood_still_words(0))
            os.kill(parent, signal.SIGKILL)
            break
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a rank: `argv` is its number, and the descriptors of its connection and of the memory that ranks share."""
    rank, connection, descriptor = map(int, sys.argv[1:] if argv is None else argv)
    board, parent, link = RankBoard(descriptor), os.getppid(), Connection(connection)
    setup_logging(f"rank {rank}", "warning", "text")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 drains, and ends the others then
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=watch_first, args=(board, parent), name="quire-watch", daemon=True).start()
    try:
        run_rank(link, board)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    finally:
        link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
