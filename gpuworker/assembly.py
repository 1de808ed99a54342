"""Puts a worker's data plane together from its options: model, self-test, byte ledger, KV cache, step runner."""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import torch

from common.cores import usable_cores
from common.errors import Unsupported
from common.fingerprint import model_fingerprint, tokenizer_fingerprint
from common.hub import checkpoint_directory
from common.identity_wire import identity_to_proto
from common.lease import Attach
from common.options import Execution
from common.types import ANY_ARITHMETIC, KvGeometry, PoolIdentity
from gpuworker.attention import AttentionBackend, BackendFactory, BackendOptions, make_backend
from gpuworker.config import GpuWorkerSettings
from gpuworker.core.outcomes import AgentConfig
from gpuworker.cuda_graphs import graph_launcher
from gpuworker.devices import default_threads, pick_device
from gpuworker.kv_cache import KvCache
from gpuworker.memory import Ledger, MemoryOptions, plan_memory
from gpuworker.model_runner import ModelRunner, RunnerLimits
from gpuworker.models.bit_equality import refuse_unequal_bits
from gpuworker.models.hosted import HostedModel
from gpuworker.models.lean import LeanModel, open_lean
from gpuworker.models.lean_gpu import LeanGpuModel
from gpuworker.models.loader import ModelSource, context_limit, eos_token_ids, load_model
from gpuworker.models.native_model import NativeModel
from gpuworker.models.self_test import self_test
from gpuworker.step_queue import QueuedRunner
from quire.gpuworker.v1 import gpuworker_pb2 as pb

_log = logging.getLogger(__name__)
_MAX_NUM_SEQS = {"cuda": 256}
_MAX_NUM_SEQS_ELSEWHERE = 64


@dataclass(frozen=True, slots=True)
class DataPlane:
    """What runs steps, and what there is to say about it."""

    settings: GpuWorkerSettings
    model: HostedModel | LeanModel
    identity: PoolIdentity
    memory: Ledger
    runner: ModelRunner
    max_num_seqs: int
    eos: tuple[int, ...]

    def agent_config(self) -> AgentConfig:
        """Return the sizes and policies of the lease agent."""
        settings = self.settings
        return AgentConfig(
            num_blocks=self.memory.num_blocks,
            block_size=settings.block_size,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            long_prefill_cap=settings.long_prefill_cap or 0,
            window=self.identity.kv_geometry.window,
            prefix_caching=settings.prefix_caching,
            max_num_seqs=self.max_num_seqs,
        )

    def attach(self, worker_id: str, address: str) -> Attach:
        """Return the identity part of an attach, with a new incarnation: start time in ns, then random."""
        return Attach(
            worker_id=worker_id,
            incarnation=time.time_ns().to_bytes(8, "big") + os.urandom(8),
            session=0,
            epoch_seen=0,
            identity=self.identity,
            num_blocks=self.memory.num_blocks,
            address=address,
            prefix_caching=self.settings.prefix_caching,
            max_num_seqs=self.max_num_seqs,
        )

    def device_words(self) -> str:
        """Return the device in words; of a CPU, how many of its cores compute."""
        device = self.model.device
        if device.type != "cpu":
            return str(device)
        threads = self.settings.threads or default_threads()
        return f"cpu with {threads} {'thread' if threads == 1 else 'threads'} of {usable_cores()} cores"

    def info(self, attach: Attach) -> pb.WorkerInfo:
        """Return what the worker says of itself."""
        return pb.WorkerInfo(
            worker_id=attach.worker_id,
            incarnation=attach.incarnation,
            address=attach.address,
            model=self.settings.model,
            identity=identity_to_proto(self.identity),
            num_blocks=self.memory.num_blocks,
            max_model_len=self.memory.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            vocab_size=self.model.vocab_size,
            eos_token_ids=self.eos,
            device=str(self.model.device),
            dtype=str(self.model.dtype).removeprefix("torch."),
            version=f"quire {version('quire')}, torch {torch.__version__}",
            prefix_caching=self.settings.prefix_caching,
        )

    def memory_message(self) -> pb.MemoryLedger:
        """Return the byte ledger."""
        memory = self.memory
        return pb.MemoryLedger(
            total=memory.total,
            weights=memory.weights,
            kv_cache=memory.kv,
            activations=memory.activations,
            reserved=memory.token_table + memory.graphs,
            longest_context=memory.max_model_len,
            sequences_at_1k=memory.sequences_of(1024),
            sequences_at_4k=memory.sequences_of(4096),
            sequences_at_16k=memory.sequences_of(16384),
        )


def assemble(settings: GpuWorkerSettings) -> DataPlane:
    """Load the model, test it, size the KV cache and allocate it.

    Raises InvalidConfig when options do not fit the checkpoint or the memory, Unsupported for a model that cannot be
    hosted.
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
    model, geometry = _open(source, device, settings.execution, backend)
    arithmetic = _fixed_arithmetic(model, geometry, backend) if settings.deterministic else ANY_ARITHMETIC
    max_num_seqs = settings.max_num_seqs or _MAX_NUM_SEQS.get(device.type, _MAX_NUM_SEQS_ELSEWHERE)
    memory = plan_memory(model, geometry, context_limit(model.config), _memory_options(settings, max_num_seqs))
    if isinstance(model, NativeModel):
        model.reserve(settings.max_num_batched_tokens, max_num_seqs)
    cache = KvCache(geometry, memory.num_blocks, settings.block_size, device)
    limits = RunnerLimits(max_num_seqs, memory.max_model_len, settings.threads or 0)
    eos = eos_token_ids(directory)
    seed = settings.seed if settings.load_format == "dummy" else None
    identity = PoolIdentity(
        model_fingerprint(directory, seed),
        tokenizer_fingerprint(directory),
        settings.block_size,
        geometry,
        arithmetic=arithmetic,
    )
    runner = _runner(model, cache, backend(cache), limits, eos, settings.cuda_graphs)
    return DataPlane(settings, model, identity, memory, runner, max_num_seqs, eos)


def _open(
    source: ModelSource, device: torch.device, execution: Execution, backend: BackendFactory
) -> tuple[HostedModel | LeanModel, KvGeometry]:
    """Return the model, tested, on the path that it can take, and the shape of its K/V."""
    lean = open_lean(source, device, execution, backend)
    if lean is not None:
        return lean
    hosted = load_model(source, device)
    return hosted, self_test(hosted, backend)


def _runner(
    model: HostedModel | LeanModel,
    cache: KvCache,
    attention: AttentionBackend,
    limits: RunnerLimits,
    eos: tuple[int, ...],
    cuda_graphs: bool,
) -> ModelRunner:
    """Return the runner that stands least between the steps of a model."""
    if isinstance(model, NativeModel):
        return QueuedRunner(model, cache, attention, limits, eos)
    launcher = None
    if cuda_graphs and isinstance(model, LeanGpuModel) and model.device.type == "cuda":
        launcher = graph_launcher(model, cache, attention, limits.max_num_seqs, limits.max_model_len)
    return ModelRunner(model, cache, attention, limits, eos, launcher)


def _fixed_arithmetic(model: HostedModel | LeanModel, geometry: KvGeometry, backend: BackendFactory) -> str:
    """Return what decides the bits of the model's logits. Raises Unsupported where other things in a step do."""
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


def default_worker_id(port: int) -> str:
    """Return the name of a worker that was given none."""
    return f"{socket.gethostname()}-{port}"
