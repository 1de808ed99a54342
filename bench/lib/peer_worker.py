"""A worker process as `python -m gpuworker` is one, which prints what a block costs each time it tells the manager.

COSTS compute read peer        seconds a block
"""

from __future__ import annotations

import sys

from common.contracts.transfers import TransferCosts
from gpuworker import main
from gpuworker.scheduling.lease_agent import LeaseAgent

_note_costs = LeaseAgent.note_costs


def _say_costs(agent: LeaseAgent, costs: TransferCosts) -> None:
    sys.stdout.write(f"COSTS {costs.compute!r} {costs.read!r} {costs.peer!r}\n")
    sys.stdout.flush()
    _note_costs(agent, costs)


def run() -> int:
    setattr(LeaseAgent, "note_costs", _say_costs)  # noqa: B010
    return main.main()


if __name__ == "__main__":
    sys.exit(run())
