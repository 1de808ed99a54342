"""Memory of the rings without an attacker: records of a large pool, counted by what they take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Records as a router of 32 workers makes them; each has objects of its own.
SCRIPT = """
import psutil
from common.decisions.ring import DecisionRing
from common.contracts.types import Candidate, Decision, DecisionKind

TERMS, FIGURES = ("queue", "prefill", "decode"), ("hit_blocks", "waiting", "running", "unheld_blocks")

def candidate(worker, number):
    terms = tuple((name, 0.25 + number + worker) for name in TERMS)
    figures = tuple((name, 0.5 + number + worker) for name in FIGURES)
    return Candidate(f"worker-{worker}", 0.125 + number, terms, figures=figures)

def record(number):
    ages = tuple((f"worker-{worker}.{kind}", 0.75 + number) for worker in range(32) for kind in ("heartbeat", "rates"))
    candidates = tuple(candidate(worker, number) for worker in range(32))
    id_ = f"router-0123abcd-{number}"
    return Decision(f"d-{number}", DecisionKind.ROUTING, number, "worker-1", id_, candidates, ("lowest cost",), ages)

ring, process = DecisionRing(100_000), psutil.Process()
ring.record(record(0))
before = process.memory_info().rss
for number in range(1, 12_000):
    ring.record(record(number))
print((process.memory_info().rss - before) >> 20, len(ring))
"""


def test_records_of_a_large_pool_are_bounded_in_bytes() -> None:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environ, timeout=240.0, check=True
    )
    grown_mib, kept = map(int, done.stdout.split())
    assert grown_mib < 100
    assert kept > 1_000  # the bound is near what the records take, and not ten times as much
