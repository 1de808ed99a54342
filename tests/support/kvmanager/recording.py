"""A recorded life of one ledger as JSON: every report with the batch, decisions and events that followed.

After an intended change of policy, record again with `python -m tests.support.kvmanager.recording`; the difference is
then part of the review.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.contracts.clock import ManualClock
from common.contracts.lease import GrantBatch, Report, Reserve
from common.contracts.types import BlockHash, BlockId, FinishReason, SequenceId
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.fake_worker import FakeWorker
from tests.support.kvmanager.ledgers import counted_ids

FILE = Path(__file__).parent / "golden" / "contended_pool.json"
SEED = 8
CONFIG: dict[str, Any] = {"num_blocks": 14, "block_size": 4, "max_num_seqs": 4, "runway_slots": 4, "runway_reach": 16}
CONFIG["eviction"] = "lru"


def jsonable(value: Any) -> Any:
    """Return a value of dataclasses, tuples and hashes as JSON has it; empty fields are left out."""
    if hasattr(value, "__dataclass_fields__"):
        name = {"event": type(value).__name__} if type(value).__module__.endswith("index_events") else {}
        return {**name, **jsonable(asdict(value))}
    if isinstance(value, dict):
        return {key: jsonable(each) for key, each in value.items() if each not in (None, "", (), [], 0)}
    if isinstance(value, tuple | list):
        return [jsonable(each) for each in value]
    return value.hex() if isinstance(value, bytes) else value


def report_of(data: dict[str, Any]) -> Report:
    """Return the report that `jsonable` wrote."""
    columns: dict[str, Any] = dict(data)
    columns["reserve"] = tuple(_reserve_of(each) for each in data.get("reserve", ()))
    columns["seal"] = tuple((block, bytes.fromhex(key)) for block, key in data.get("seal", ()))
    columns["finished"] = tuple((number, FinishReason(reason)) for number, reason in data.get("finished", ()))
    for name in ("bind", "trim", "preempted"):
        columns[name] = tuple(map(tuple, data.get(name, ())))
    columns["returned"] = tuple(map(BlockId, data.get("returned", ())))
    columns["stalled"] = tuple(map(SequenceId, data.get("stalled", ())))
    return Report(**columns)


def _reserve_of(data: dict[str, Any]) -> Reserve:
    block_hashes = tuple(BlockHash(bytes.fromhex(key)) for key in data.get("block_hashes", ()))
    return Reserve(**{"sequence": SequenceId(0), **data, "block_hashes": block_hashes})


def answer(ledger: Ledger, report: Report) -> tuple[GrantBatch | None, dict[str, Any]]:
    """Apply a report; return the batch, and all outputs of the ledger in the form of `jsonable`."""
    ledger.apply_report(report)
    batch = ledger.schedule()
    ledger.check_invariants()
    said = {"batch": batch, "decisions": ledger.drain_decisions(), "events": ledger.drain_index_events()}
    return batch, {key: jsonable(value) for key, value in said.items() if value}


def replay(scenario: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a fresh ledger answers to the recorded reports."""
    clock = ManualClock()
    ledger = Ledger(LedgerConfig(**scenario["config"]), clock, counted_ids())
    answers = []
    for step in scenario["steps"]:
        clock.advance(0.005)
        answers.append(answer(ledger, report_of(step["report"]))[1])
    return answers


def record() -> dict[str, Any]:
    """Return a new recording: nine requests of two families of prompts over a pool that is too small for them."""
    pick, clock = random.Random(SEED), ManualClock()
    ledger, worker = Ledger(LedgerConfig(**CONFIG), clock, counted_ids()), FakeWorker(14, 4, runway=4)
    family = [[pick.randrange(2) for _ in range(12)] for _ in range(2)]
    steps: list[dict[str, Any]] = []
    arrivals = {0: 2, 3: 1, 6: 2, 9: 2, 14: 1, 22: 1}
    while worker.live or worker.ended or worker.pool or len(steps) < 23:
        for _ in range(arrivals.get(len(steps), 0)):
            tokens = pick.choice(family)[: pick.randrange(8, 13)] + [pick.randrange(2) for _ in range(3)]
            worker.submit(tokens, len(tokens) + pick.choice((9, 14, 20, 20, 60)), priority=pick.randrange(2))
        worker.step(budget=8)
        clock.advance(0.005)
        report = worker.report()
        batch, said = answer(ledger, report)
        steps.append({"report": jsonable(report), **said})
        worker.deliver(batch)
    return {"config": CONFIG, "steps": steps}


def write(scenario: dict[str, Any], path: Path) -> None:
    """Write one step a line, so that a difference shows which step changed."""
    lines = ",\n".join(json.dumps(step, sort_keys=True) for step in scenario["steps"])
    path.write_text(f'{{"config": {json.dumps(scenario["config"])}, "steps": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    write(record(), FILE)
