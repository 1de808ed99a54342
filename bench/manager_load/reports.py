"""What a report costs a manager beside gRPC: to decode it, apply it, schedule, and encode the answer."""

from __future__ import annotations

import gc
import itertools
import time
from typing import Final

from bench.manager_load.reporter import BLOCK_SIZE, Reporter
from common.contracts.clock import SystemClock
from common.contracts.lease import Inventory
from common.wire.lease_codec import batch_from_proto, batch_to_proto, report_from_proto, report_to_proto
from kvmanager.contracts.ledger_config import EvictionName, LedgerConfig
from kvmanager.ledger.ledger import Ledger
from quire.kvmanager.v1 import kvmanager_pb2

_PARTS: Final = ("decode", "apply", "schedule", "encode")


class _Worker:
    """A simulated worker and its ledger, without anything between them."""

    def __init__(self, number: int, sequences: int, policy: EvictionName) -> None:
        self._reporter, numbers = Reporter(number, sequences), itertools.count()
        config = LedgerConfig(self._reporter.num_blocks, BLOCK_SIZE, max_num_seqs=sequences, eviction=policy)
        self._ledger = Ledger(config, SystemClock(), lambda: str(next(numbers)))
        self._ledger.rebuild(Inventory())

    def step(self) -> tuple[float, ...]:
        """Report once, and return the CPU seconds of each part."""
        data = report_to_proto(self._reporter.step()).SerializeToString()
        times = [time.process_time()]
        report = report_from_proto(kvmanager_pb2.Report.FromString(data))
        times.append(time.process_time())
        self._ledger.apply_report(report)
        times.append(time.process_time())
        batch = self._ledger.schedule()
        self._ledger.drain_index_events(), self._ledger.drain_decisions()
        times.append(time.process_time())
        answer = batch_to_proto(batch).SerializeToString() if batch is not None else None
        times.append(time.process_time())
        if answer is not None:
            self._reporter.apply(batch_from_proto(kvmanager_pb2.GrantBatch.FromString(answer)))
        return tuple(after - before for before, after in itertools.pairwise(times))


def report_figures(policy: EvictionName, workers: int = 4, sequences: int = 64, steps: int = 700) -> dict[str, float]:
    """Return the CPU microseconds of a report, in all and by part, once the sequences are of any age."""
    gc.collect()
    serving = [_Worker(number, sequences, policy) for number in range(workers)]
    for _ in range(150 + sequences):
        for each in serving:
            each.step()
    spent = [each.step() for _ in range(steps) for each in serving]
    parts = {
        part: 1e6 * sum(column) / len(spent) for part, column in zip(_PARTS, zip(*spent, strict=True), strict=True)
    }
    named = {f"{part}_us_per_report_{policy}": value for part, value in parts.items()}
    return {f"core_us_per_report_{policy}": sum(parts.values())} | named
