"""Decision records of ordinary requests, made by the parts that make them: admission, choice, grant, end."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Iterator, Sequence

from bench.manager_load.reporter import BLOCK_SIZE, Reporter
from common.clock import ManualClock
from common.decisions.ring import DecisionRing
from common.lease import Inventory
from common.types import Decision, DecisionKind
from kvmanager.core.config import LedgerConfig
from kvmanager.core.ledger import Ledger
from router.core.diagnosis.outcome import Outcome, figures_of, texts_of
from router.core.routing import PlacementRequest, Router
from router.core.worker_model import Capacity, Load, WorkerModel

WORKERS = 8
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
        ledger.apply(worker.step())
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


def seconds_to_keep(records: Sequence[Decision]) -> float:
    """Return the seconds that a ring with room for half of the records takes for one, evictions included."""
    ring = DecisionRing(max(1, len(records) // 2))
    began = time.perf_counter()
    for each in records:
        ring.record(each)
    return (time.perf_counter() - began) / len(records)


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
