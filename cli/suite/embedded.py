"""A GPU worker with the KV manager's core in the same process, without RPC. It serves as a baseline in benchmarks.

`EmbeddedChannel` implements the lease protocol's port over a ledger in memory. `python -m cli.suite.embedded` takes the
flags of `quire-gpuworker` and ignores `--manager`. It publishes no blocks to Redis and traces no grants.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from common.contracts.clock import Clock, SystemClock
from common.contracts.lease import (
    Attach,
    Attached,
    AttachOk,
    Confirmed,
    Connected,
    Granted,
    Inventory,
    LeaseEvent,
    Report,
)
from kvmanager.contracts.ledger_config import LedgerConfig, LedgerOptions, Runway
from kvmanager.ledger.ledger import Ledger


class EmbeddedChannel:
    """Implements `LeaseChannel` of `common.contracts.lease`: applies and answers each report at once, on the engine's
    thread.
    """

    def __init__(self, clock: Clock, runway: Runway = "auto") -> None:
        self._clock, self._runway = clock, runway
        self._events: list[LeaseEvent] = [Connected()]
        self._ids = itertools.count(1)
        self.ledger: Ledger | None = None

    def poll(self) -> list[LeaseEvent]:
        events, self._events = self._events, []
        return events

    def attach(self, attach: Attach, inventory: Inventory) -> None:
        """Build the ledger of this worker from its inventory."""
        config = LedgerConfig.of_worker(attach, LedgerOptions(runway=self._runway))
        self.ledger = Ledger(config, self._clock, lambda: f"m-{next(self._ids)}")
        self.ledger.rebuild(inventory)
        self._events.append(
            Attached(attach.session, AttachOk(epoch=1, lease_target=self.ledger.lease_target(refill=False)))
        )
        self._answer(attach.session)

    def send_report(self, session: int, report: Report) -> None:
        """Apply a report and queue the grants that follow from it."""
        assert self.ledger is not None
        self.ledger.apply_report(report)
        self._answer(session)

    def confirm(self, session: int) -> None:
        self._events.append(Confirmed(session))

    def reconnect(self) -> None:
        self._events.append(Connected())

    def away_seconds(self, begin: float, end: float) -> float:
        return 0.0

    def _answer(self, session: int) -> None:
        assert self.ledger is not None
        batch = self.ledger.schedule()
        if batch is not None:
            self._events.append(Granted(session, batch))
        self.ledger.drain_index_events()
        self.ledger.drain_decisions()


def main(argv: Sequence[str] | None = None) -> int:
    from common.settings.config import load_or_exit
    from gpuworker.config import GpuWorkerSettings
    from gpuworker.main import run

    settings = load_or_exit(GpuWorkerSettings, argv, prog="python -m cli.suite.embedded")
    return run(settings, EmbeddedChannel(SystemClock()))


if __name__ == "__main__":
    sys.exit(main())
