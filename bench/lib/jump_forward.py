"""What drafting the tokens that a grammar forces brings to one stream of JSON, and whether it changes a token.

Both kinds of decoding take turns in one process, with attention that gives equal bits in every batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import zip_longest

from bench.lib.harness import progress
from bench.lib.models import data_plane
from bench.lib.workers import BenchWorker, random_prompts
from cli.benchmark.requests import Request, Workload
from common.contracts.types import SamplingParams
from gpuworker.attention.backends import BackendOptions, make_backend
from gpuworker.memory.kv_cache import KvCache
from gpuworker.plane.assembly import ModelPlane, executor_for
from gpuworker.runner.model_runner import ModelRunner, RunnerLimits
from gpuworker.scheduling.drafting import NgramDrafter
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.structured.grammars import GrammarCompiler

NOTES = {
    "speedup_forced_json": "output tokens a second of one stream of JSON with drafts of what is forced, over without",
    "forced_tokens_a_step": "output tokens of a step in those runs",
    "forced_tokens_differing": "tokens that differ from those of plain decoding, of all runs; 0",
}
_BLOCK, _PROMPT = 16, 32


@contextmanager
def worker(plane: ModelPlane, grammars: GrammarCompiler, length: int, drafts: bool) -> Iterator[BenchWorker]:
    """Run an engine for one stream on the model of a data plane."""
    config = AgentConfig(-(-length // _BLOCK) + 4, _BLOCK, 1 << 12, max_num_seqs=1)
    cache = KvCache(plane.identity.kv_geometry, config.num_blocks, _BLOCK, plane.model.device)
    attention = make_backend("auto", cache, options=BackendOptions(deterministic=True))
    limits = RunnerLimits(1, length, plane.settings.threads or 0)
    runner = ModelRunner(plane.model, cache, attention, limits, executor_for(plane.model))
    runner.constrain(grammars, foresee=drafts)
    with BenchWorker(runner, replace(config, new_drafter=NgramDrafter if drafts else None), None) as made:
        yield made


def measure(
    shape: Mapping[str, object],
    grammars: GrammarCompiler,
    sampling: SamplingParams,
    steps: int,
    rounds: int,
    threads: int | None,
) -> dict[str, float]:
    """Return the figures of streams of `steps` tokens; the first round warms up."""
    options = {"dtype": "float32", "threads": threads, "kv_blocks": 64, "max_model_len": 512, "deterministic": True}
    plane = data_plane(None, {**shape, "vocab_size": grammars.vocab_size}, device="cpu", **options)
    ratios, differing = [], 0
    with ExitStack() as stack:
        both = [stack.enter_context(worker(plane, grammars, _PROMPT + steps, drafts)) for drafts in (False, True)]
        for number in range(-1, rounds):
            (prompt,) = random_prompts(1, _PROMPT, number)
            seconds, outputs = [], []
            for each in both if number % 2 else both[::-1]:
                each.sampling = replace(sampling, seed=number + 2)
                run = each.drive(Workload("forced", [Request("0", prompt, steps)]), str(number))
                seconds.append(run.seconds)
                outputs.append(list(run.outputs.values()))
            differing += sum(a != b for x, y in zip(*outputs, strict=True) for a, b in zip_longest(x, y))
            plain, drafting = seconds if number % 2 else seconds[::-1]
            ratios += [plain / drafting] if number >= 0 else []
            progress(f"forced tokens, round {number + 1} of {rounds}", end=number + 1 == rounds)
        load = both[1].engine.load()
    plane.runner.close()
    return {
        "speedup_forced_json": statistics.median(ratios),
        "forced_tokens_a_step": load.tokens_sampled / max(1, load.steps),
        "forced_tokens_differing": differing,
    }
