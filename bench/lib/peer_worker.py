"""A worker process as `python -m gpuworker` is one, for which every fetch pays, and which prints what a block costs.

COSTS compute peer        seconds a block, each time that it tells its manager

It tells the manager that computing is dear, and gives up no fetch that is late. So the manager fetches what it can,
and both ways can be measured.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Final

from common.contracts.transfers import TransferCosts
from gpuworker import main
from gpuworker.engine import transfers
from gpuworker.scheduling.lease_agent import LeaseAgent

_DEAR: Final = 1e3
"""What computing is said to take, over what it takes."""
_PATIENCE: Final = 60.0
"""Seconds."""

_note_costs = LeaseAgent.note_costs


def _say_costs(agent: LeaseAgent, costs: TransferCosts) -> None:
    sys.stdout.write(f"COSTS {costs.compute!r} {costs.peer!r}\n")
    sys.stdout.flush()
    _note_costs(agent, dataclasses.replace(costs, compute=_DEAR * costs.compute))


def run() -> int:
    setattr(LeaseAgent, "note_costs", _say_costs)  # noqa: B010
    setattr(transfers, "_LEAST_PATIENCE", _PATIENCE)  # noqa: B010
    return main.main()


if __name__ == "__main__":
    sys.exit(run())
