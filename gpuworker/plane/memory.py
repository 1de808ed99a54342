"""The byte plan: the use of the device's memory, and how many blocks of K/V it holds; made before serving.

K/V = the requested blocks or bytes, else
  CUDA: utilization · total - (in use by others + weights + peak of a profile forward + graphs + token table)
  CPU:  the smaller of 1 GiB and a quarter of the free memory
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil
import torch
from transformers import PretrainedConfig

from common.errors import FieldViolation, InvalidConfig
from common.types import KvGeometry
from gpuworker.attention.torch_backend import MAX_MASK
from gpuworker.memory.byte_plan import GIB, BytePlan, bytes_per_block, in_words
from gpuworker.memory.devices import free_bytes, total_bytes
from gpuworker.models.choose import LlamaModel
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.gpu_model import LlamaGpuModel
from gpuworker.models.self_test import CallRecorder
from gpuworker.runner.cuda_graphs import graph_bytes

_CPU_KV_BYTES, _CPU_KV_FRACTION = GIB, 0.25
_CPU_NUM_SEQS, _CUDA_NUM_SEQS = 64, 256
_LOGITS_BYTES = 16  # for each token of the vocabulary: float32 logits and weights, float64 cumulative sums


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """The options of the operator; None is automatic. At most one of `kv_blocks` and `kv_memory` (bytes) is set."""

    block_size: int = 16
    kv_blocks: int | None = None
    kv_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    cuda_graphs: bool = False


def plan_memory(
    model: TransformersModel | LlamaModel, geometry: KvGeometry, model_limit: int, options: MemoryOptions
) -> BytePlan:
    """Return the byte plan of a loaded model; nothing is allocated yet.

    Raises InvalidConfig, with the numbers, when no block fits, or not one sequence of `max_model_len`.
    """
    device = model.device
    seqs = options.max_num_seqs or (_CUDA_NUM_SEQS if device.type == "cuda" else _CPU_NUM_SEQS)
    wanted_len = options.max_model_len or model_limit
    if wanted_len > model_limit:
        what = f"{wanted_len} tokens were asked for; the model's positions end at {model_limit}"
        raise InvalidConfig(FieldViolation("--max-model-len", what))
    sized = replace(options, max_num_seqs=seqs, max_model_len=wanted_len)
    activations = _activations(model, geometry, sized)
    graphs = 0
    if options.cuda_graphs and isinstance(model, LlamaGpuModel):
        graphs = graph_bytes(model, options.block_size, seqs, wanted_len)
    table = 4 * seqs * (wanted_len + 1)
    block = bytes_per_block(geometry, options.block_size)
    free = free_bytes(device) - (mapped_weight_bytes() if device.type == "cpu" else 0)
    room = _room(device, free, options) - activations - graphs - table
    num_blocks = _num_blocks(device, room, block, options)
    plan = BytePlan(
        device=str(device),
        total=total_bytes(device),
        free=free,
        weights=weight_bytes(model.module) if isinstance(model, TransformersModel) else model.weight_bytes,
        activations=activations,
        token_table=table,
        block_bytes=block,
        num_blocks=num_blocks,
        block_size=options.block_size,
        kv_dtype=geometry.dtype,
        model_limit=model_limit,
        max_model_len=min(wanted_len, num_blocks * options.block_size),
        max_num_seqs=seqs,
        graphs=graphs,
    )
    _refuse_too_small(plan, room, options)
    return plan


def mapped_weight_bytes() -> int:
    """Return the bytes of weights on pages of their files: they are in memory, but the system can drop them."""
    return sum(each.rss for each in psutil.Process().memory_maps() if each.path.endswith(".safetensors"))


def weight_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of all parameters and buffers, tied ones once, and of what linear layers hold prepacked."""
    tensors = {t.data_ptr(): t for t in (*module.parameters(), *module.buffers())}
    packed = sum(int(getattr(each, "packed_bytes", 0)) for each in module.modules())
    return packed + sum(t.numel() * t.itemsize for t in tensors.values())


def _room(device: torch.device, free: int, options: MemoryOptions) -> int:
    """Return how much of the device may be taken beside the weights."""
    if device.type != "cuda":
        return free
    return int(free - (1 - options.gpu_memory_utilization) * total_bytes(device))


def _num_blocks(device: torch.device, room: int, block: int, options: MemoryOptions) -> int:
    if options.kv_blocks is not None:
        return options.kv_blocks
    if options.kv_memory is not None:
        return options.kv_memory // block
    if device.type == "cuda":
        return max(0, room) // block
    return max(0, min(_CPU_KV_BYTES, int(_CPU_KV_FRACTION * room))) // block


def _refuse_too_small(plan: BytePlan, room: int, options: MemoryOptions) -> None:
    block, kv = in_words(plan.block_bytes), in_words(plan.kv)
    flag = "--kv-memory" if options.kv_memory is not None else "--kv-blocks"
    if plan.num_blocks < 1:
        has = in_words(room if options.kv_memory is None else options.kv_memory)
        what = f"no block fits: one takes {block} and {has} may be taken; give more, or use a smaller --block-size"
        raise InvalidConfig(FieldViolation(flag, what))
    if plan.kv > room:
        what = f"{plan.num_blocks} blocks take {kv}; {in_words(room)} may be taken on {plan.device}"
        raise InvalidConfig(FieldViolation(flag, what))
    if options.max_model_len is not None and plan.max_model_len < options.max_model_len:
        needed = -(-options.max_model_len // plan.block_size)
        what = (
            f"one sequence of {options.max_model_len} tokens takes {needed} blocks"
            f" ({in_words(needed * plan.block_bytes)}); the KV cache has {plan.num_blocks} ({kv}), enough for"
            f" {plan.num_blocks * plan.block_size} tokens"
        )
        raise InvalidConfig(FieldViolation("--max-model-len", what))


def _activations(model: TransformersModel | LlamaModel, geometry: KvGeometry, options: MemoryOptions) -> int:
    if isinstance(model, LlamaCpuModel):
        seqs = options.max_num_seqs or 0
        return model.scratch_bytes(options.max_num_batched_tokens, seqs) + _LOGITS_BYTES * seqs * model.vocab_size
    return _measure_activations(model, options) if model.device.type == "cuda" else _estimate(model, geometry, options)


def _estimate(model: TransformersModel | LlamaGpuModel, geometry: KvGeometry, options: MemoryOptions) -> int:
    """Return the bytes that a step needs on CPU, from shapes.

    Hidden states and MLP of all tokens; one layer's K/V gathered for the longest context, with its mask; logits.
    """
    config, tokens, context = model.config, options.max_num_batched_tokens, options.max_model_len or 0
    hidden = _size(config, "hidden_size")
    inner = _size(config, "intermediate_size") or 4 * hidden
    inner = max(inner, _size(config, "num_experts_per_tok") * _size(config, "moe_intermediate_size"))
    gathered = 4 * context * geometry.num_kv_heads * (geometry.head_dim_k + geometry.head_dim_v)
    mask = 5 * min(tokens * context, MAX_MASK)  # as booleans, and as the floats that torch converts them to
    logits = _LOGITS_BYTES * (options.max_num_seqs or 0) * model.vocab_size
    return tokens * (8 * hidden + 3 * inner) * model.dtype.itemsize + gathered + mask + logits


def _size(config: PretrainedConfig, name: str) -> int:
    return int(getattr(config, name, 0) or 0)


def _measure_activations(model: TransformersModel | LlamaGpuModel, options: MemoryOptions) -> int:
    """Return the peak of a forward over a full step, in bytes, beside weights; attention runs without a cache."""
    device = model.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    tokens = torch.arange(options.max_num_batched_tokens, device=device)
    positions = tokens % (options.max_model_len or 1)  # a model has rope angles, or position embeddings, of no more
    logits = model.forward(torch.zeros_like(tokens), positions, tokens[: options.max_num_seqs], CallRecorder())
    peak = torch.cuda.max_memory_allocated(device) - before
    sampling = 4 * logits.numel() * logits.itemsize
    del logits
    torch.cuda.empty_cache()
    return int(peak + sampling)
