"""A rank of a worker beside rank 0: loads its part of the model, and runs the steps that rank 0 plans.

It has no server, no lease and no scheduler. It ends with rank 0: at its last word, at the end of the connection, or
when its parent has gone. Where rank 0 stands still, this process kills it: its routers then move the streams. On
another host its parent is the process that follows rank 0 there (gpuworker/plane/rank_follower.py).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

import psutil
import torch

from common.contracts.errors import QuireError
from common.process.logs import setup_logging
from common.settings.config import FAILED_STATUS
from gpuworker.attention.backends import BackendOptions, make_backend
from gpuworker.checkpoints.lora import read_adapter
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
from gpuworker.plane.rank_adapters import RankAdapters
from gpuworker.plane.rank_group import rank_facts, rank_threads
from gpuworker.plane.rank_watch import LOOK_S, watch_first
from gpuworker.runner.native_executor import RankExecutor
from gpuworker.runner.rank_messages import Begin, Loaded, Start, received, send
from gpuworker.runner.rank_steps import AdapterLoad, received_plan

_log = logging.getLogger(__name__)


def run_rank(connection: Connection, board: RankBoard, own: str = "") -> None:
    """Run one rank until rank 0 closes the connection; `own` are the options of its host, where that is another one."""
    start = received(connection)
    assert isinstance(start, Start)
    settings = GpuWorkerSettings.model_validate_json(own or start.settings)
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
    send(connection, rank_facts(settings))
    received(connection)  # it is closed where ranks differ
    options = BackendOptions(deterministic=settings.deterministic)
    backend = partial(make_backend, "auto", options=options)
    ranks = Ranks(Place(start.rank, start.size), board, StepSizes(*start.sizes))
    source, device = source_of(settings), pick_device(settings.device)
    try:
        checkpoints = asks_for_checkpoints(settings)
        opened = open_native(source, device, settings.model_impl, backend, settings.block_size, checkpoints, ranks)
    except QuireError as error:
        _log.critical("rank %d cannot load: %s", start.rank, error)
        send(connection, Loaded(0, str(error)))
        return
    assert opened is not None, "the native path alone runs at several ranks"
    model, geometry = opened
    assert isinstance(model, LlamaCpuModel)
    if settings.most_loras:
        model.allow_adapters(settings.max_lora_rank)
    send(connection, Loaded(model.weight_bytes))
    begin = received(connection)
    assert isinstance(begin, Begin)
    try:
        model.reserve(begin.tokens, begin.kept)
        cache = KvCache(geometry, begin.num_blocks, settings.block_size, device)
        if model.states is not None:
            model.states.reserve(begin.max_num_seqs)
    except (MemoryError, OSError, RuntimeError) as error:
        send(connection, Loaded(0, str(error)))
        return
    model.extend_rope(begin.table_width)
    attention = model.parts_of(backend(cache))
    executor = RankExecutor(model, attention, cache, rank_threads(settings))
    send(connection, Loaded(model.weight_bytes))
    adapters = RankAdapters(
        connection,
        lambda folder: read_adapter(folder, model.adapter_targets, settings.max_lora_rank),
        model.prepare_adapter,
    )
    try:
        while (plan := received_plan(connection)) is not None:
            if isinstance(plan, AdapterLoad):
                adapters.begin_load(plan)
            else:
                executor.run(plan, adapters.of_step(plan))
    finally:
        adapters.close()
        executor.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a rank: `argv` is its number, and the descriptors of its connection and of the memory that ranks share."""
    rank, connection, descriptor = map(int, sys.argv[1:] if argv is None else argv)
    board, parent, link = RankBoard(descriptor), os.getppid(), Connection(connection)
    setup_logging(f"rank {rank}", "warning", "text")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 drains, and ends the others then
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=watch_first, args=(board, parent), name="quire-watch", daemon=True).start()
    own = sys.stdin.read()  # of another host than rank 0's
    try:
        run_rank(link, board, own)
    except (EOFError, BrokenPipeError, ConnectionResetError, TimeoutError):
        return FAILED_STATUS  # rank 0 was lost, or takes no part
    finally:
        link.close()
        if own:
            end_stopped(parent)
    return 0


def end_stopped(parent: int) -> None:
    """Kill what follows rank 0 here if it stands still, for nothing else would: rank 0 has ended."""
    with suppress(psutil.NoSuchProcess):
        follower = psutil.Process(parent)
        if follower.status() == psutil.STATUS_STOPPED:
            follower.kill()


if __name__ == "__main__":
    sys.exit(main())
