"""Builds a worker's draft model: loaded and tested as the target is, with a runner and a KV cache of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.contracts.errors import FieldViolation, InvalidConfig, Unsupported
from common.contracts.types import KvGeometry
from gpuworker.attention.backends import BackendFactory
from gpuworker.config import GpuWorkerSettings
from gpuworker.memory.byte_plan import BytePlan, in_words
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.choose import LlamaModel
from gpuworker.models.hf.loader import ModelSource, context_limit
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.plane.checkpoint_facts import eos_token_ids
from gpuworker.plane.draft_checks import FLAG, draft_directory, of_draft
from gpuworker.plane.memory import MemoryOptions, plan_draft
from gpuworker.runner.draft_model import DraftLimits, RunnerDraftModel
from gpuworker.runner.executor import ExecutorFactory
from gpuworker.runner.model_runner import ModelRunner, RunnerLimits
from gpuworker.scheduling.draft_store import DraftStore
from gpuworker.scheduling.drafting import Speculation

_log = logging.getLogger(__name__)
_MEASURED = 64  # tokens of the text on which a draft model is timed at start
Open = Callable[[ModelSource], tuple[TransformersModel | LlamaModel, KvGeometry]]


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model whose weights are there, and nothing else yet."""

    model: TransformersModel | LlamaModel
    geometry: KvGeometry
    directory: Path


def load_draft(settings: GpuWorkerSettings, source: ModelSource, open_model: Open) -> LoadedDraft | None:
    """Load and test the draft model, as `open_model` does; None where the options name none.

    Raises InvalidConfig for one that cannot be served.
    """
    if settings.draft_model is None:
        return None
    directory = draft_directory(settings)
    try:
        model, geometry = open_model(replace(source, model=str(directory)))
    except InvalidConfig as error:
        raise InvalidConfig(*of_draft(error)) from error
    except Unsupported as error:
        raise InvalidConfig(FieldViolation(FLAG, f"{error}; take another one, or leave it out")) from error
    return LoadedDraft(model, geometry, directory)


def assemble_draft(
    settings: GpuWorkerSettings,
    draft: LoadedDraft,
    target: BytePlan,
    target_vocab: int,
    options: MemoryOptions,
    backend: BackendFactory,
    executor: ExecutorFactory,
) -> RunnerDraftModel:
    """Return the draft model, timed, with memory beside that of the target. Raises InvalidConfig without such room."""
    model = draft.model
    memory = plan_draft(target, model, draft.geometry, context_limit(model.config), options)
    if isinstance(model, LlamaCpuModel):
        model.reserve(settings.max_num_batched_tokens, memory.max_num_seqs)
    cache = _cache(draft.geometry, memory)
    limits = RunnerLimits(memory.max_num_seqs, memory.max_model_len, settings.threads or 0)
    runner = ModelRunner(model, cache, backend(cache), limits, executor, eos_token_ids(draft.directory))
    store = DraftStore(memory.num_blocks, memory.block_size, memory.max_num_seqs)
    tokens = min(settings.max_num_batched_tokens, memory.max_model_len)
    made = RunnerDraftModel(
        runner, store, DraftLimits(memory.max_model_len, tokens, model.vocab_size, target_vocab), draft_words(memory)
    )
    _time(made, min(_MEASURED, memory.max_model_len // 2))
    return made


def draft_words(memory: BytePlan) -> str:
    weights, kv = in_words(memory.weights), in_words(memory.kv)
    return f"draft model: {weights} of weights, {kv} of K/V for {memory.num_blocks * memory.block_size} tokens"


def _cache(geometry: KvGeometry, memory: BytePlan) -> KvCache:
    try:
        return KvCache(geometry, memory.num_blocks, memory.block_size, torch.device("cpu"))
    except (MemoryError, OSError, RuntimeError) as error:
        what = f"{in_words(memory.kv)} for its KV cache cannot be had; lower --kv-memory, or leave it out"
        raise InvalidConfig(FieldViolation(FLAG, what)) from error


def _time(draft: RunnerDraftModel, tokens: int) -> None:
    """Measure the draft model's steps, the second time: the first one touches memory for the first time."""
    for _ in range(2):
        draft.forget_prices()
        drafter = draft.new_drafter([0] * tokens, Speculation())
        draft.guess([(drafter, 4)])
        draft.release(drafter)
    if draft.failure is not None:
        raise InvalidConfig(FieldViolation(FLAG, f"its first step failed: {draft.failure}")) from draft.failure
    _log.info("%s", draft.in_words())
