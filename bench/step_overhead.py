"""What a decode step costs beyond the model's forward: an engine over a model that sleeps, at several batch sizes.

The forward sleeps without the GIL for a fixed time and returns the same logits; everything around it is the real
thing. The bubble is the time from the end of one forward to the start of the next, sampling included.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
import torch

from bench.harness import parser, report
from bench.workers import BenchWorker, random_prompts
from common.types import KvGeometry
from gpuworker.attention import AttentionMetadata, LayerAttention
from gpuworker.core.outcomes import AgentConfig
from gpuworker.kv_cache import KvCache
from gpuworker.model_runner import ModelRunner, RunnerLimits
from gpuworker.models.hosted import LayerSink

BLOCK_SIZE, PROMPT_TOKENS = 16, 64
_PR_SET_TIMERSLACK = 29


class NoAttention:
    """Implements `AttentionBackend` for a model that never attends."""

    def begin(self, step: AttentionMetadata) -> None:
        """Nothing to plan."""

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Never called."""
        raise NotImplementedError


@dataclass
class SleepingModel:
    """A model whose forward takes `seconds`, without the GIL; it notes when each forward of `rows` rows was."""

    seconds: float
    rows: int
    vocab_size: int = 32000
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    enters: list[float] = field(default_factory=list)
    exits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._logits = torch.randn(self.rows, self.vocab_size, generator=torch.Generator().manual_seed(0))
        self._slack_set = False

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, sink: LayerSink
    ) -> torch.Tensor:
        """Sleep, then return logits [len(keep), vocab]."""
        if not self._slack_set:  # of this thread: a sleep then ends within some microseconds of its time
            self._slack_set = ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0) == 0
        full = len(token_ids) == len(keep) == self.rows
        if full:
            self.enters.append(time.perf_counter())
        time.sleep(self.seconds)
        if full:
            self.exits.append(time.perf_counter())
        return self._logits[: len(keep)]


@dataclass(frozen=True, slots=True)
class Overhead:
    """Of the steps of one load, in seconds: between two forwards, from one forward's start to the next, CPU time."""

    bubbles: list[float]
    periods: list[float]
    cpu: float


def measure(rows: int, steps: int, seconds: float) -> Overhead:
    """Run `steps` decode steps of `rows` rows."""
    length = PROMPT_TOKENS + steps
    config = AgentConfig(rows * (-(-length // BLOCK_SIZE) + 2), BLOCK_SIZE, 1 << 15, max_num_seqs=rows)
    model = SleepingModel(seconds, rows)
    cache = KvCache(KvGeometry(1, 1, 1, 1, "float32"), config.num_blocks, BLOCK_SIZE, model.device)
    runner = ModelRunner(model, cache, NoAttention(), RunnerLimits(rows, length, 1))
    with BenchWorker(runner, config, None) as worker:
        worker.load(random_prompts(rows, PROMPT_TOKENS, 0), 8)
        model.enters.clear()
        model.exits.clear()
        times = psutil.Process().cpu_times()
        worker.load(random_prompts(rows, PROMPT_TOKENS, 1), steps)
        spent = psutil.Process().cpu_times()
    enters, exits = model.enters[1:-1], model.exits[1:-1]  # the first may wait for the last prompts, the last for none
    return Overhead(
        [enter - left for enter, left in zip(enters[1:], exits[:-1], strict=True)],
        [after - before for before, after in itertools.pairwise(enters)],
        (spent.user + spent.system - times.user - times.system) / steps,
    )


def figures_of(rows: int, found: Overhead, seconds: float) -> Iterator[tuple[str, float, str]]:
    """Yield name, value and meaning of each figure of one batch size."""
    of = f"{rows} rows, microseconds"
    deciles = statistics.quantiles(found.bubbles, n=10)
    yield f"bubble_us_{rows}", 1e6 * statistics.median(found.bubbles), f"between two forwards, median; {of}"
    yield f"bubble_p90_us_{rows}", 1e6 * deciles[-1], f"between two forwards, 90th percentile; {of}"
    over = statistics.median(found.periods) - seconds
    yield f"over_sleep_us_{rows}", 1e6 * over, f"a step's period beyond what its forward was to sleep, median; {of}"
    yield f"cpu_us_{rows}", 1e6 * found.cpu, f"CPU time of a step in all threads; {of}"


def main() -> None:
    """Run the benchmark."""
    flags: argparse.ArgumentParser = parser(__doc__)
    flags.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256], help="batch sizes")
    flags.add_argument("--steps", type=int, default=400, help="decode steps of each")
    flags.add_argument("--forward-ms", type=float, default=5.0, help="time that a forward sleeps")
    args = flags.parse_args()
    figures: dict[str, float] = {}
    notes: dict[str, str] = {}
    for rows in args.rows:
        seconds = args.forward_ms * 1e-3
        for name, value, meaning in figures_of(rows, measure(rows, args.steps, seconds), seconds):
            figures[name], notes[name] = value, meaning
    report("step_overhead", figures, notes, args.json)


if __name__ == "__main__":
    main()
