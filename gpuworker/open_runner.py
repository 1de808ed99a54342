"""From options to a runner that is ready for steps: load, self-test, size, allocate."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.fingerprint import model_fingerprint, tokenizer_fingerprint
from common.types import PoolIdentity
from gpuworker.attention import make_backend
from gpuworker.devices import default_threads, pick_device
from gpuworker.kv_cache import KvCache
from gpuworker.memory import Ledger, MemoryOptions, plan_memory
from gpuworker.model_runner import ModelRunner, RunnerLimits
from gpuworker.models.loader import ModelSource, checkpoint_directory, context_limit, eos_token_ids, load_model
from gpuworker.models.self_test import self_test


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Everything that decides how steps run. `threads` 0 is all cores but one; it counts on CPU only."""

    source: ModelSource
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    device: str = "auto"
    attention: str = "auto"
    threads: int = 0


@dataclass(frozen=True, slots=True)
class OpenedRunner:
    """A runner with what the rest of the worker must know about it."""

    runner: ModelRunner
    ledger: Ledger
    identity: PoolIdentity
    directory: Path
    eos_token_ids: tuple[int, ...]
    vocab_size: int


def open_runner(options: RunnerOptions) -> OpenedRunner:
    """Load the model, test it, size the KV cache and allocate it.

    Raises InvalidConfig when an option is wrong or memory is short, Unsupported when the model cannot be hosted.
    """
    threads = options.threads or default_threads()
    torch.set_num_threads(threads)
    device = pick_device(options.device)
    directory = checkpoint_directory(options.source.model)
    model = load_model(options.source, device)
    geometry = self_test(model, lambda cache: make_backend(options.attention, cache))
    ledger = plan_memory(model, geometry, context_limit(model.config), options.memory)
    cache = KvCache(geometry, ledger.num_blocks, options.memory.block_size, device)
    limits = RunnerLimits(ledger.max_num_seqs, ledger.max_model_len, threads)
    eos = eos_token_ids(directory)
    runner = ModelRunner(model, cache, make_backend(options.attention, cache), limits, eos)
    dummy_seed = options.source.seed if options.source.load_format == "dummy" else None
    identity = PoolIdentity(
        model_fingerprint(directory, dummy_seed),
        tokenizer_fingerprint(directory),
        options.memory.block_size,
        geometry,
    )
    return OpenedRunner(runner, ledger, identity, directory, eos, model.vocab_size)
