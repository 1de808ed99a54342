"""What KV events cost an engine: steps with and without them, in turns, and the time of one block.

    python -m bench.kv_events --json

Two engines are over one small model of random weights, as in a worker, with the ledger inside. One publishes KV events,
and a process of its own subscribes to them and decodes them. A round runs both, in turns of who is first. Prompts are
new in each round, so every block is computed, sealed and told, and others are evicted. Decodes fill a block in 16
steps. A ratio is seconds without events over seconds with them: below 1, events cost. With `--control` neither engine
has events: two engines that do the same differ, too. `engine_us` and `thread_us` are processor time of one block that
is sealed and told: on the engine's thread, and on that of the publisher, which steps do not wait for.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from bench.lib.harness import median_interval, parser, progress, report
from bench.lib.models import cpu_runner
from bench.lib.workers import BenchWorker, random_prompts
from common.contracts.transfers import Medium
from common.contracts.types import BlockHash, BlockId
from common.process import die_with_parent
from gpuworker.scheduling.block_states import Content
from gpuworker.scheduling.kv_events import CacheWatch, EventForm, Origin, WatchedClaims, spec_of
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.server.kv_event_publisher import KvEventPublisher, pack_batch

BLOCK_SIZE: Final = 16
LOADS: Final = {"prefill": (24, 480, 1), "decode": (16, 32, 224)}
"""Sequences, tokens of each prompt, and tokens of each output."""
_LONGEST: Final = 512
_READS: Final = """
import sys, msgpack, zmq
sub = zmq.Context().socket(zmq.SUB)
sub.subscribe(b"")
sub.connect(sys.argv[1])
while True:
    msgpack.unpackb(sub.recv_multipart()[2])
"""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a load, and processor seconds of this process in that time."""

    seconds: float
    cpu: float


@contextmanager
def subscribed(publisher: KvEventPublisher) -> Iterator[None]:
    """Let a process of its own read all events."""
    command = die_with_parent.command([sys.executable, "-c", _READS, publisher.endpoint])
    reader = subprocess.Popen(command)
    try:
        time.sleep(1.0)  # until it is connected: what it misses costs the engine less
        yield
    finally:
        reader.kill()
        reader.wait()


def run(worker: BenchWorker, load: str, seed: int) -> Spent:
    """Run one load with prompts that nobody had before."""
    count, length, output = LOADS[load]
    prompts, before = random_prompts(count, length, seed), time.process_time()
    seconds = worker.load(prompts, output).seconds
    return Spent(seconds, time.process_time() - before)


def compare(rounds: int, control: bool) -> Iterator[tuple[str, float, str]]:
    """Yield name, value and meaning of each figure."""
    rows = max(count for count, _, _ in LOADS.values())
    blocks = rows * (_LONGEST // BLOCK_SIZE) + 64
    plain = AgentConfig(blocks, BLOCK_SIZE, 2048, max_num_seqs=rows)
    watched = plain if control else replace(plain, watch=CacheWatch())
    publisher = KvEventPublisher("tcp://127.0.0.1:0", None, "")
    (runner, geometry), (other, _) = cpu_runner(plain), cpu_runner(watched)
    with BenchWorker(runner, plain, None, geometry) as off:
        told = BenchWorker(other, watched, None, geometry)
        publisher.start(EventForm(BLOCK_SIZE, spec_of((), 0)), told.engine.wake)
        if not control:
            told.engine.tell_changes(publisher)
        with told as on, subscribed(publisher):
            yield from _figures_of(off, on, rounds)
    publisher.close()
    counts = publisher.counts()
    yield "changes", float(counts.changes), "blocks that were told as stored or removed"
    yield "overruns", float(counts.overruns), "times that the subscriber did not keep up"


def block_costs(blocks: int = 16_384, together: int = 128) -> Iterator[tuple[str, float, str]]:
    """Yield what a block costs in either thread, so many in a turn, where as many are evicted as sealed."""
    watch, form = CacheWatch(), EventForm(BLOCK_SIZE, spec_of((), 0))
    claims, tokens = WatchedClaims(watch, Medium.BLOCK), tuple(range(BLOCK_SIZE))
    hashes = [BlockHash(number.to_bytes(16, "big")) for number in range(blocks)]
    engine, thread = 0.0, 0.0
    for first in range(0, blocks, together):
        began = time.thread_time()
        for number in range(first, first + together):
            parent = hashes[number - 1] if number > first else None
            claims.pop(BlockId(number % (4 * together)), None)
            watch.describe(hashes[number], Origin(parent, tokens[:]))
            claims[BlockId(number % (4 * together))] = Content(hashes[number], parent, number - first, 0)
        changes = watch.take_changes(2 * together)
        told = time.thread_time()
        pack_batch(changes, form, 0.0)
        engine, thread = engine + told - began, thread + time.thread_time() - told
    yield "engine_us", 1e6 * engine / blocks, "of the engine's thread, a block sealed and another evicted"
    yield "thread_us", 1e6 * thread / blocks, "of the publisher's thread, to pack both"


def _figures_of(off: BenchWorker, on: BenchWorker, rounds: int) -> Iterator[tuple[str, float, str]]:
    for load in LOADS:
        run(off, load, 0), run(on, load, 0)
        pairs = list[tuple[Spent, Spent]]()
        for number in range(1, rounds + 1):
            progress(f"{load}, round {number} of {rounds}")
            turns = (off, on) if number % 2 else (on, off)
            first, second = (run(each, load, number) for each in turns)
            pairs.append((first, second) if number % 2 else (second, first))
        for name, ratios in (
            ("speed", [without.seconds / told.seconds for without, told in pairs]),
            ("cpu", [told.cpu / without.cpu for without, told in pairs]),
        ):
            median, low, high = median_interval(ratios)
            what = "seconds without over with" if name == "speed" else "processor seconds with over without"
            yield f"{load}_{name}", median, f"{what}, median of {rounds}; 95 % interval {low:.3f} to {high:.3f}"
            yield f"{load}_{name}_low", low, "lower end of the interval"
            yield f"{load}_{name}_high", high, "upper end of the interval"


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=15, help="pairs of runs of each load")
    flags.add_argument("--control", action="store_true", help="no events in either: what the two engines differ by")
    args = flags.parse_args()
    figures, notes = dict[str, float](), dict[str, str]()
    for name, value, meaning in (*block_costs(), *compare(args.rounds, args.control)):
        figures[name], notes[name] = value, meaning
    report("kv_events", figures, notes, args.json)


if __name__ == "__main__":
    main()
