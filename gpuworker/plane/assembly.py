"""Builds a worker's data plane from its options: model, self-test, byte plan, KV cache, step runner."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import torch

from common.checkpoint.hub import checkpoint_directory
from common.errors import Unsupported
from common.process.cores import usable_cores
from common.settings.options import ModelImpl
from common.types import ANY_ARITHMETIC, KvGeometry
from gpuworker.attention.backends import BackendFactory, BackendOptions, make_backend
from gpuworker.attention.interface import AttentionBackend
from gpuworker.config import GpuWorkerSettings
from gpuworker.engine.ports import MaskLateness
from gpuworker.memory.devices import default_threads, dtype_name, pick_device
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.bit_equality import refuse_unequal_bits
from gpuworker.models.choose import LlamaModel, open_native
from gpuworker.models.hf.loader import ModelSource, context_limit, load_model
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.gpu_model import LlamaGpuModel
from gpuworker.models.self_test import self_test
from gpuworker.plane.checkpoint_facts import eos_token_ids
from gpuworker.plane.data_plane import DataPlane, Facts, pool_identity
from gpuworker.plane.memory import MemoryOptions, plan_memory
from gpuworker.runner.cuda_graphs import graph_launcher
from gpuworker.runner.executor import ExecutorFactory
from gpuworker.runner.launcher import LauncherFactory
from gpuworker.runner.model_runner import ModelRunner, RunnerLimits
from gpuworker.runner.native_executor import native_executor
from gpuworker.runner.thread_executor import thread_executor
from gpuworker.structured.grammars import GrammarCompiler

_log = logging.getLogger(__name__)
_MAX_NUM_SEQS = {"cuda": 256}
_MAX_NUM_SEQS_ELSEWHERE = 64


@dataclass(frozen=True, slots=True)
class ModelPlane(DataPlane):
    """A data plane that runs a model."""

    model: TransformersModel | LlamaModel
    runner: ModelRunner

    @property
    def grammars(self) -> GrammarCompiler | None:
        return self.runner.grammars

    def mask_lateness(self) -> MaskLateness:
        return self.runner.mask_lateness


def assemble(settings: GpuWorkerSettings) -> ModelPlane:
    """Load the model, test it, size the KV cache and allocate it.

    Raises InvalidConfig when options do not fit the checkpoint or the memory, Unsupported for a model that cannot be
    served.
    """
    device = pick_device(settings.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    torch.set_num_threads(settings.threads or default_threads())
    directory = checkpoint_directory(settings.model)
    source = ModelSource(
        model=str(directory),
        dtype=settings.dtype,
        load_format=settings.load_format,
        seed=settings.seed,
        kv_cache_dtype=settings.kv_cache_dtype,
        quantization=settings.quantization,
    )
    options = BackendOptions(deterministic=settings.deterministic)
    backend = partial(make_backend, "auto", options=options)
    model, geometry = _open(source, device, settings.model_impl, backend)
    arithmetic = _fixed_arithmetic(model, geometry, backend) if settings.deterministic else ANY_ARITHMETIC
    max_num_seqs = settings.max_num_seqs or _MAX_NUM_SEQS.get(device.type, _MAX_NUM_SEQS_ELSEWHERE)
    memory = plan_memory(model, geometry, context_limit(model.config), _memory_options(settings, max_num_seqs))
    if isinstance(model, LlamaCpuModel):
        model.reserve(settings.max_num_batched_tokens, max_num_seqs)
    cache = KvCache(geometry, memory.num_blocks, settings.block_size, device)
    limits = RunnerLimits(max_num_seqs, memory.max_model_len, settings.threads or 0)
    eos = eos_token_ids(directory)
    identity = pool_identity(settings, directory, geometry, arithmetic)
    attention = backend(cache)
    executor = executor_for(model, _launcher(settings, model, cache, attention, limits))
    runner = ModelRunner(model, cache, attention, limits, executor, eos)
    runner.constrain(GrammarCompiler(directory / "tokenizer.json", model.vocab_size, eos))
    return ModelPlane(settings, identity, memory, runner, max_num_seqs, _facts(settings, model, eos), model)


def _facts(settings: GpuWorkerSettings, model: TransformersModel | LlamaModel, eos: tuple[int, ...]) -> Facts:
    device = model.device
    words = str(device)
    if device.type == "cpu":
        threads = settings.threads or default_threads()
        words = f"cpu with {threads} {'thread' if threads == 1 else 'threads'} of {usable_cores()} cores"
    software = f"torch {torch.__version__}"
    return Facts(model.vocab_size, eos, dtype_name(model.dtype), str(device), words, software)


def _open(
    source: ModelSource, device: torch.device, model_impl: ModelImpl, backend: BackendFactory
) -> tuple[TransformersModel | LlamaModel, KvGeometry]:
    """Return the model, tested, on the path that it can take, and the shape of its K/V."""
    native = open_native(source, device, model_impl, backend)
    if native is not None:
        return native
    model = load_model(source, device)
    return model, self_test(model, backend)


def executor_for(model: TransformersModel | LlamaModel, launcher: LauncherFactory | None = None) -> ExecutorFactory:
    """Return the factory of the executor with the least work between two steps of a model."""
    return native_executor if isinstance(model, LlamaCpuModel) else thread_executor(launcher)


def _launcher(
    settings: GpuWorkerSettings,
    model: TransformersModel | LlamaModel,
    cache: KvCache,
    attention: AttentionBackend,
    limits: RunnerLimits,
) -> LauncherFactory | None:
    """Return the factory of a launcher of CUDA graphs; None where steps are launched kernel by kernel."""
    if not settings.cuda_graphs or not isinstance(model, LlamaGpuModel) or model.device.type != "cuda":
        return None
    return graph_launcher(model, cache, attention, limits.max_num_seqs, limits.max_model_len)


def _fixed_arithmetic(model: TransformersModel | LlamaModel, geometry: KvGeometry, backend: BackendFactory) -> str:
    """Return what decides the bits of the model's logits. Raises Unsupported where other parts of a step do too."""
    if model.arithmetic is None:
        raise Unsupported(
            f"--deterministic cannot be kept: this {model.config.model_type} is not run by the native CPU path, and the"
            " bits of other products of matrices depend on how many rows they have"
        )
    refuse_unequal_bits(model, geometry, backend)
    _log.info("deterministic, like every worker of this arithmetic: %s", model.arithmetic)
    return model.arithmetic


def _memory_options(settings: GpuWorkerSettings, max_num_seqs: int) -> MemoryOptions:
    return MemoryOptions(
        block_size=settings.block_size,
        kv_blocks=settings.kv_blocks,
        kv_memory=settings.kv_memory,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        cuda_graphs=settings.cuda_graphs,
    )
