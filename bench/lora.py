"""What LoRA adapters cost: decode steps with rows of adapters beside the same steps of the base, and loads beside them.

    python -m bench.lora --json --dtype bfloat16

One runner of a worker decodes 32 rows on a random 128 M Llama shape. Rows are of the base, of one adapter, or of eight
in turn; each adapter has rank 16 and changes all seven linears of every layer. The three take turns step by step, and a
ratio is that of their medians in a round of twelve steps each. Then adapters are read from disk on a thread of their
own, as in a worker, while steps of the base go on: the stall is the longest step beside a load beyond the longest of
four without one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file

from bench.lib.flags import add_engine_flags, add_model_flags, worker_options
from bench.lib.harness import parser, progress, report
from bench.lib.models import data_plane
from common.contracts.types import BlockId, SamplingParams, SequenceId
from gpuworker.checkpoints.lora import CONFIG, WEIGHTS, Targets, read_adapter
from gpuworker.models.adapters import AdaptedModel
from gpuworker.plane.assembly import ModelPlane
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan

RANK, ADAPTERS, BATCH, CONTEXT, STEPS, STALL_STEPS = 16, 8, 32, 64, 12, 4
MOST_STEPS = 300
_NUMBERS = itertools.count(1)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def write_adapter(folder: Path, targets: Targets, seed: int) -> Path:
    """Write an adapter of random factors for all linears, as PEFT does."""
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in targets.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = 0.02 * torch.randn(RANK, inputs, generator=draw)
        tensors[f"base_model.model.{name}.lora_B.weight"] = 0.02 * torch.randn(outputs, RANK, generator=draw)
    save_file(tensors, folder / WEIGHTS)
    modules = sorted({name.rpartition(".")[2] for name in targets})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "target_modules": modules}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


class Rows:
    """`BATCH` rows that decode on block tables of their own, `group` of some groups; each row keeps its adapter."""

    def __init__(self, plane: ModelPlane, block_size: int, group: int, adapters: Sequence[object | None]) -> None:
        """Prefill rows with these adapters in turn."""
        self._runner, self._at = plane.runner, CONTEXT
        blocks = -(-(CONTEXT + MOST_STEPS + 2) // block_size)
        prompt = [5 + each % 100 for each in range(CONTEXT)]
        self._rows: list[tuple[SequenceId, tuple[BlockId, ...]]] = []
        for row in range(group * BATCH, (group + 1) * BATCH):
            sequence, table = SequenceId(row + 1), tuple(map(BlockId, range(row * blocks, (row + 1) * blocks)))
            self._rows.append((sequence, table))
            self._runner.add_sequence(sequence, prompt, GREEDY, CONTEXT, adapters[row % len(adapters)])
            self._run([ScheduledRow(sequence, 0, CONTEXT, table, samples=True)])

    @property
    def has_room(self) -> bool:
        """Whether the block tables have room for another step."""
        return self._at < CONTEXT + MOST_STEPS

    def step(self) -> float:
        """Decode one token of each row; return the seconds that this took."""
        rows = [ScheduledRow(sequence, self._at, 1, table, samples=True) for sequence, table in self._rows]
        self._at += 1
        return self._run(rows)

    def _run(self, rows: Sequence[ScheduledRow]) -> float:
        began = time.perf_counter()
        self._runner.submit_step(StepPlan(next(_NUMBERS), tuple(rows))).result()
        return time.perf_counter() - began


def stall_seconds(rows: Rows, model: AdaptedModel, folder: Path) -> tuple[float, float]:
    """Return the longest step during the load of an adapter beyond the longest without, and the load's seconds."""
    targets, done, took = model.adapter_targets, threading.Event(), 0.0

    def load() -> None:
        nonlocal took
        torch.set_num_threads(1)
        began = time.perf_counter()
        model.prepare_adapter(read_adapter(folder, targets, RANK))
        took = time.perf_counter() - began
        done.set()

    thread, beside = threading.Thread(target=load), list[float]()
    alone = [rows.step() for _ in range(STALL_STEPS)]
    thread.start()
    while not done.is_set() and rows.has_room:
        beside.append(rows.step())
    thread.join()
    return max(beside, default=0.0) - max(alone), took


def measure(args: argparse.Namespace) -> dict[str, float]:
    options = worker_options(args) | {"dtype": args.dtype, "prefix_caching": False, "max_num_seqs": 3 * BATCH}
    with tempfile.TemporaryDirectory() as root:
        options |= {"lora_dir": Path(root), "max_lora_rank": RANK, "max_loras": ADAPTERS}
        plane = data_plane(args.model, **options)
        model = cast("AdaptedModel", plane.model)
        folders = [write_adapter(Path(root) / str(n), model.adapter_targets, n) for n in range(ADAPTERS)]
        adapters = [model.prepare_adapter(read_adapter(each, model.adapter_targets, RANK)) for each in folders]
        given: dict[str, Sequence[object | None]] = {"base": [None], "one": adapters[:1], "mixed8": adapters}
        rows = {name: Rows(plane, args.block_size, group, each) for group, (name, each) in enumerate(given.items())}
        rounds: list[dict[str, float]] = []
        for number in range(args.repeat):
            times: dict[str, list[float]] = {name: [] for name in rows}
            for _ in range(STEPS):
                for name, each in rows.items():
                    times[name].append(each.step())
            rounds.append({name: statistics.median(each) for name, each in times.items()})
            progress(
                f"round {number + 1}: {', '.join(f'{n} {1e3 * t:.1f} ms' for n, t in rounds[-1].items())}", end=True
            )
        stalls = [stall_seconds(rows["base"], model, folders[n % ADAPTERS]) for n in range(args.repeat)]
        plane.runner.close()
    ratios = {name: [each["base"] / each[name] for each in rounds] for name in ("one", "mixed8")}
    found = {f"{name}_over_base": statistics.median(each) for name, each in ratios.items()}
    for name, of_rounds in ratios.items():
        found |= {f"{name}_least": min(of_rounds), f"{name}_most": max(of_rounds)}
    return found | {
        "base_step_ms": 1e3 * statistics.median(each["base"] for each in rounds),
        "cold_load_stall_ms": 1e3 * statistics.median(stall for stall, _ in stalls),
        "cold_load_ms": 1e3 * statistics.median(took for _, took in stalls),
        "adapter_mib": adapters[0].num_bytes / (1 << 20),
    }


NOTES = {
    "mixed8_over_base": f"tokens a second with {ADAPTERS} adapters in a batch of {BATCH}, over the base alone",
    "one_over_base": f"the same with one adapter in all {BATCH} rows",
    "base_step_ms": "a step of the base",
    "cold_load_stall_ms": "the longest step beside a load, beyond the longest of four without one",
    "cold_load_ms": "a load: reading, checking and preparing one adapter",
    "adapter_mib": f"memory of an adapter of rank {RANK} for all linears",
}


def main() -> None:
    flags = parser(__doc__)
    add_model_flags(flags)
    add_engine_flags(flags)
    flags.add_argument("--repeat", type=int, default=5, help="rounds, each with all three kinds of batches")
    args = flags.parse_args()
    report("lora", measure(args), NOTES, args.json)


if __name__ == "__main__":
    main()
