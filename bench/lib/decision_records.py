"""Decision records of ordinary requests, made by the parts that make them: admission, choice, grant, end."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.manager_load.reporter import BLOCK_SIZE, Reporter
from common.contracts.clock import ManualClock
from common.contracts.lease import Inventory
from common.contracts.types import Decision, DecisionKind
from common.decisions.log_files import Bounds
from common.decisions.log_folder import LogFolder
from common.decisions.log_writer import DecisionLogWriter
from common.decisions.ring import DecisionRing
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger.ledger import Ledger
from router.observe.diagnosis.outcome import Outcome, figures_of, texts_of
from router.placement.placement_request import PlacementRequest
from router.placement.routing import Router
from router.placement.worker_model import Capacity, Load, WorkerModel

WORKERS = 8
_BOUNDS = Bounds(1 << 30, 1 << 62)
_PROMPT, _OUTPUT = 512, 128
_SEQUENCES = 64
_CAPACITY = Capacity(num_blocks=4096, block_size=BLOCK_SIZE, max_num_seqs=64, max_model_len=4096)


def records_of(requests: int) -> Iterator[Decision]:
    """Yield four records of each request, in the order of their times."""
    clock, ids = ManualClock(), map(str, itertools.count())
    chooser, workers, grants = (
        Router(clock, lambda: next(ids), 0),
        [_worker(each) for each in range(WORKERS)],
        _grants(),
    )
    for number in range(requests):
        name = f"quire-{number:016x}"
        figures = (("queued", 0.0), ("tokens_in_flight", float(number)), ("tokens", float(_PROMPT + _OUTPUT)))
        yield Decision(next(ids), DecisionKind.ADMISSION, number, "admitted", name, figures=figures)
        wanted = PlacementRequest(name, _PROMPT, _PROMPT + _OUTPUT, _OUTPUT, 1)
        yield chooser.route(wanted, workers, {"worker-1": number % 8}).decision
        yield next(grants)
        outcome = _outcome(number)
        words, numbers = texts_of(outcome), figures_of(outcome)
        yield Decision(next(ids), DecisionKind.OUTCOME, number, "length", name, reasons=words, figures=numbers)


def _worker(number: int) -> WorkerModel:
    """Return a worker that has shown how fast it is."""
    model = WorkerModel(f"worker-{number}", _CAPACITY, Load(unheld_blocks=_CAPACITY.num_blocks), heartbeat_at=0.0)
    shown = Load(
        running=number,
        unheld_blocks=_CAPACITY.num_blocks - number,
        decode_step_seconds=0.004 + 0.001 * number,
        prefill_seconds_per_token=0.0002,
    )
    model.heartbeat(shown, now=0.0)
    return model


def _grants() -> Iterator[Decision]:
    """Yield what a ledger decides under the reports of a worker."""
    worker, ids = Reporter(1, _SEQUENCES), map(str, itertools.count())
    ledger = Ledger(LedgerConfig(worker.num_blocks, BLOCK_SIZE), ManualClock(), lambda: f"m-{next(ids)}")
    ledger.rebuild(Inventory())
    while True:
        ledger.apply_report(worker.step())
        batch = ledger.schedule()
        if batch is not None:
            worker.apply(batch)
        yield from (each for each in ledger.drain_decisions() if each.kind is DecisionKind.GRANT)
        ledger.drain_index_events()


def _outcome(number: int) -> Outcome:
    small = number / 1e6
    return Outcome(
        ended="length",
        worker="worker-1",
        miss="never_seen",
        before=(
            ("queue", 0.001 + small),
            ("lookup", 0.002 + small),
            ("blocks", 0.003 + small),
            ("prefill", 0.1 + small),
        ),
        after=(("decode", 0.9 + small),),
        has_first_token=True,
        started=True,
        prompt_tokens=_PROMPT,
        cached_tokens=16 * (number % 8),
        output_tokens=_OUTPUT,
        block_size=BLOCK_SIZE,
        admissions=1,
        placements=1,
        gaps=_OUTPUT - 1,
        longest_gap=0.02 + small,
    )


def seconds_to_keep(records: Sequence[Decision], log: DecisionLogWriter | None = None) -> float:
    """Return the seconds that a ring with room for half of the records takes for one, evictions included.

    With a log the records are queued for it too; its thread does not run here.
    """
    ring = DecisionRing(max(1, len(records) // 2))
    if log is not None:
        ring.copy_to(log.add)
    began = time.perf_counter()
    for each in records:
        ring.record(each)
    return (time.perf_counter() - began) / len(records)


@dataclass(frozen=True, slots=True)
class LogCost:
    """Of a record: seconds to keep it without and with a log, of the log's thread, and bytes on disk."""

    keep: float
    keep_with_log: float
    write: float
    bytes: float


def cost_of_log(records: Sequence[Decision], turns: int, a_flush: int) -> LogCost:
    """Return the least times of so many turns; each flush has so many records."""
    turned = [(seconds_to_keep(records), *_logged(records, a_flush)) for _ in range(turns)]
    keep, with_log, write, size = (min(column) for column in zip(*turned, strict=True))
    return LogCost(keep, with_log, write, size)


def _logged(records: Sequence[Decision], a_flush: int) -> tuple[float, float, float]:
    """Return the seconds to keep and queue a record, those to write it, and its bytes on disk."""
    with TemporaryDirectory() as folder:
        log, write = DecisionLogWriter(LogFolder.claimed(Path(folder), "router", _BOUNDS, 0)), 0.0
        keep = seconds_to_keep(records, log)
        queued, log = log, DecisionLogWriter(log.files)
        for at in range(0, len(records), a_flush):
            for number, each in enumerate(records[at : at + a_flush]):
                log.add(number, each, 1)
            began = time.thread_time()
            log.flush()
            write += time.thread_time() - began
        assert queued.counts.dropped == log.counts.dropped == 0
        size = log.files.size
        log.files.close()
    return keep, write / len(records), size / len(records)


def bytes_of(requests: int) -> float:
    """Return the memory of one record in a ring, with its places there, by Python's own count."""
    tracemalloc.start()
    try:
        ring = DecisionRing(4 * requests, max_bytes=1 << 40)
        source = records_of(requests)
        next(source)  # workers and ledger are made with the first one
        before = tracemalloc.get_traced_memory()[0]
        for each in source:
            ring.record(each)
        return (tracemalloc.get_traced_memory()[0] - before) / len(ring)
    finally:
        tracemalloc.stop()
