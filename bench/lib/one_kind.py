"""What a pool with one group costs the control plane, against an older tree: CPU of a report, a grant and a token.

Two processes do the same work in turns of a fraction of a second, one with the packages of this tree, one with those of
the other. This file runs in both, so it imports only what both have. A turn is steps of four workers whose reports are
made up (`bench/manager_load/`), each decoded, applied, scheduled and answered by a ledger; and steps of a worker's
agent beside a ledger, without a model.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from bench.lib.harness import median_interval, progress
from bench.manager_load.reporter import BLOCK_SIZE, Reporter
from common.contracts.clock import SystemClock
from common.contracts.hashing import block_digests, block_hash_of
from common.contracts.lease import Inventory
from common.contracts.types import SequenceId
from common.process.garbage import collect_rarely
from common.wire.lease_codec import batch_from_proto, batch_to_proto, report_from_proto, report_to_proto
from gpuworker.scheduling.batch_plan import StepResult
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.stopping import StopRule
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger.ledger import Ledger
from quire.kvmanager.v1 import kvmanager_pb2

_WORKERS: Final = 4
_SEQUENCES: Final = 64
_STEPS: Final = 60
_PAIRS: Final = 21  # of turns, in one round
_WALKS: Final = 5  # as the manager has it
_WARM_UP: Final = 4  # turns, in which the sequences get to be of any age
_PROMPT, _SHARED, _LEAST, _MOST = 520, 256, 192, 384
_WHAT: Final = {
    "report": "CPU of a manager that decodes and applies a report",
    "grant": "CPU of a manager that schedules, and encodes what it grants, a batch",
    "token": "CPU of ledger and agent together, a token of a worker's 64 sequences",
}

Counted = dict[str, float]


class _Made:
    """A ledger whose worker's reports are made up."""

    def __init__(self, number: int) -> None:
        self._reporter, numbers = Reporter(number, _SEQUENCES), itertools.count()
        config = LedgerConfig(self._reporter.num_blocks, BLOCK_SIZE, max_num_seqs=_SEQUENCES)
        self._ledger = Ledger(config, SystemClock(), lambda: str(next(numbers)))
        self._ledger.rebuild(Inventory())

    def step(self, found: Counted) -> None:
        data = report_to_proto(self._reporter.step()).SerializeToString()
        began = time.process_time()
        self._ledger.apply_report(report_from_proto(kvmanager_pb2.Report.FromString(data)))
        applied = time.process_time()
        batch = self._ledger.schedule()
        self._ledger.drain_index_events(), self._ledger.drain_decisions()
        answer = batch_to_proto(batch).SerializeToString() if batch is not None else b""
        found["grant_s"] += time.process_time() - applied
        found["report_s"] += applied - began
        found["reports"] += 1
        if batch is not None:
            found["grants"] += 1
            self._reporter.apply(batch_from_proto(kvmanager_pb2.GrantBatch.FromString(answer)))


class _Served:
    """A worker's agent and its ledger: as many sequences as run at once, of prompts that share a beginning."""

    def __init__(self) -> None:
        ids, blocks = itertools.count(), 2 * _SEQUENCES * (_PROMPT + _MOST) // BLOCK_SIZE
        config = LedgerConfig(blocks, BLOCK_SIZE, max_num_seqs=_SEQUENCES)
        self._ledger = Ledger(config, SystemClock(), lambda: str(next(ids)))
        self._ledger.rebuild(Inventory())
        self._agent = LeaseAgent(AgentConfig(blocks, BLOCK_SIZE, max_num_seqs=_SEQUENCES))
        self._agent.inventory()
        self._agent.attached(0)
        self._rng, self._next, self._running = random.Random(7), 0, 0

    def step(self, found: Counted) -> None:
        while self._running < _SEQUENCES:
            self._submit()
        agent, ledger = self._agent, self._ledger
        began = time.process_time()
        if (said := agent.take_report()) is not None:
            ledger.apply_report(said)
            if (batch := ledger.schedule()) is not None:
                agent.apply_grant(batch)
            ledger.drain_index_events(), ledger.drain_decisions()
        if (plan := agent.plan()) is not None:
            sampled = {row.sequence: (1,) for row in plan.rows if row.samples}
            done = agent.complete(StepResult(plan.step, sampled))
            found["tokens"] += len(sampled)
            self._running -= len(done.finished)
        found["token_s"] += time.process_time() - began

    def _submit(self) -> None:
        tokens = [*range(2, 2 + _SHARED), *(self._rng.randrange(1000) for _ in range(_PROMPT - _SHARED))]
        digests = block_digests(bytes(32), tokens, BLOCK_SIZE)
        hashes, output = tuple(map(block_hash_of, digests)), self._rng.randrange(_LEAST, _MOST)
        number, length = SequenceId(self._next), _PROMPT + output
        new = NewSequence(number, "", tuple(tokens), hashes, digests[-1], length, StopRule(output))
        self._agent.submit_sequence(new)
        self._next, self._running = self._next + 1, self._running + 1


def _serve() -> None:
    """Do a turn for each line of standard input, and print what it took."""
    made, served = [_Made(number) for number in range(_WORKERS)], _Served()
    collect_rarely(_WALKS)
    for line in sys.stdin:
        found: Counted = dict.fromkeys(("report_s", "grant_s", "token_s", "reports", "grants", "tokens"), 0.0)
        for _ in range(_STEPS * int(line)):
            for each in made:
                each.step(found)
            served.step(found)
        print(json.dumps(found), flush=True)


class _Side:
    """The process of one tree, on the same core as the other's."""

    def __init__(self, tree: Path) -> None:
        paths = os.pathsep.join((str(tree), str(tree / "protos")))
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": "0"},
        )
        if sys.platform == "linux":
            os.sched_setaffinity(self._process.pid, {max(os.sched_getaffinity(0))})

    def turn(self, times: int = 1) -> Mapping[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(times, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self._process.args!r} ended with {self._process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.communicate()


def _pairs(old: Path) -> Iterator[tuple[Mapping[str, float], Mapping[str, float]]]:
    """Yield turns of this tree and of `old`, by processes of their own; each is first in every other pair.

    Raises RuntimeError where the trees did not do the same work.
    """
    sides = [_Side(Path(__file__).parents[2]), _Side(old)]
    try:
        for side in sides:
            side.turn(_WARM_UP)
        for pair in range(_PAIRS):
            turns = {at: sides[at].turn() for at in ((0, 1), (1, 0))[pair % 2]}
            counts = [[turns[at][name] for name in ("reports", "grants", "tokens")] for at in (0, 1)]
            if counts[0] != counts[1]:
                raise RuntimeError(f"reports, grants and tokens are {counts[0]} here, and {counts[1]} in {old}")
            yield turns[0], turns[1]
    finally:
        for side in sides:
            side.close()


def one_kind_figures(old: Path, rounds: int) -> Iterator[tuple[str, float, str]]:
    """Yield the costs of this tree over those of `old`: medians of all pairs of so many rounds."""
    found = []
    for number in range(rounds):
        found += list(_pairs(old))
        progress(f"round {number + 1} of {rounds}")
    for name, words in _WHAT.items():
        ratio, low, high = median_interval([new[f"{name}_s"] / before[f"{name}_s"] for new, before in found])
        spread = f"{words}, over the older tree; median of {len(found)}, 95 % {low:.3f} to {high:.3f}"
        yield f"one_kind_cost_{name}", ratio, spread
        us = 1e6 * statistics.median(new[f"{name}_s"] / new[f"{name}s"] for new, _ in found)
        yield f"us_a_{name}", us, f"{words}, microseconds"


if __name__ == "__main__":
    _serve()
