"""The byte plan: the use of the device's memory, and how many blocks of K/V it holds; made before serving.

K/V = the requested blocks or bytes, else
  CUDA: utilization · total - (in use by others + weights + peak of a profile forward + graphs + token table)
  CPU:  the smaller of 1 GiB and a quarter of the free memory

Where no layer attends, a block takes no bytes: there are as many as all sequences of the longest need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil
import torch

from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.limits import MAX_WORKER_BLOCKS
from common.contracts.types import KvGeometry
from gpuworker.attention.index_keys import MAX_INDEX_SCORES
from gpuworker.attention.torch_backend import MAX_MASK
from gpuworker.attention.whole_prompts import WHOLE_PROMPTS_BLOCK
from gpuworker.memory import host_memory
from gpuworker.memory.byte_plan import (
    GIB,
    NO_KV_MEMORY,
    BytePlan,
    blocks_without_kv,
    bytes_per_block,
    frame_bytes,
    in_words,
    longest_sequence,
    max_scored_tokens,
    refuse_tiers,
)
from gpuworker.memory.devices import free_bytes, total_bytes
from gpuworker.memory.layout import SCALED, numbers_a_layer, page_layout, pools_of
from gpuworker.models.choose import LlamaModel
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.gpu_model import LlamaGpuModel
from gpuworker.models.self_test import CallRecorder
from gpuworker.runner.cuda_graphs import graph_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CPU_KV_BYTES, _CPU_KV_FRACTION = GIB, 0.25
# States may take this much of the free memory where no option says how many sequences run.
_STATES_FRACTION = 0.25
_CPU_NUM_SEQS, _CUDA_NUM_SEQS = 64, 256
_MOST = 2**31 - 1  # slots of a pool, and places of the token table: steps carry them as int32
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
    drafts: int = 0  # of a step at most, each with a row of logits, and with states where layers keep some
    pooled_tokens: int = 0  # of a step, whose hidden states are pooled; 0: rows are sampled
    adapter_bytes: int = 0  # that are kept free for LoRA adapters
    usual_len: int | None = None  # of a sequence, where `max_model_len` is None and the model runs any
    host_memory: int = 0  # bytes that keep blocks which leave the pool
    disk_cache: bool = False  # whether a disk keeps more of them
    needs_peers: bool = False  # whether peers are to fetch them
    ranks: int = 1  # that share the model's steps and K/V; `geometry` is that of all of them then


def plan_memory(
    model: TransformersModel | LlamaModel, geometry: KvGeometry, model_limit: int, options: MemoryOptions
) -> BytePlan:
    """Return the byte plan of a loaded model; nothing is allocated yet.

    Raises InvalidConfig, with the numbers, when no block fits, or not one sequence of `max_model_len`.
    """
    device = model.device
    seqs = options.max_num_seqs or (_CUDA_NUM_SEQS if device.type == "cuda" else _CPU_NUM_SEQS)
    wanted_len = options.max_model_len or options.usual_len or model_limit
    if wanted_len > model_limit:
        what = f"{wanted_len} tokens were asked for; the model's positions end at {model_limit}"
        raise InvalidConfig(FieldViolation("--max-model-len", what))
    sized = replace(options, max_num_seqs=seqs, max_model_len=wanted_len)
    activations = _activations(model, geometry, sized) * options.ranks
    graphs = 0
    if options.cuda_graphs and isinstance(model, LlamaGpuModel):
        graphs = graph_bytes(model, options.block_size, seqs, wanted_len)
    table = 4 * seqs * (wanted_len + 1)
    block = bytes_per_block(geometry, options.block_size)
    free = free_bytes(device) - (mapped_weight_bytes() if device.type == "cpu" else 0)
    state = 0 if model.states is None else model.states.bytes_a_sequence * options.ranks
    frames, frame = _host_frames(model, geometry, options)
    room = _room(device, free, options) - activations - graphs - table - (seqs + options.drafts) * state
    room -= options.adapter_bytes
    if device.type == "cpu":
        room -= frames * frame
    num_blocks = _num_blocks(device, room, block, sized)
    if options.kv_blocks is None:
        num_blocks = min(num_blocks, _MOST // (options.block_size * _shares(geometry)))
    plan = BytePlan(
        device=str(device),
        total=total_bytes(device),
        free=free,
        weights=_weights(model) * options.ranks + options.adapter_bytes,
        activations=activations,
        token_table=table,
        block_bytes=block,
        num_blocks=num_blocks,
        block_size=options.block_size,
        kv_dtype=geometry.dtype,
        model_limit=model_limit,
        max_model_len=longest_sequence(wanted_len, num_blocks, options.block_size, geometry.window, geometry.groups),
        max_num_seqs=seqs,
        graphs=graphs,
        window=geometry.window,
        state_bytes=state,
        drafted_states=options.drafts if state else 0,
        groups=geometry.groups,
        host_frames=frames,
        frame_bytes=frame,
    )
    _refuse_too_many_states(plan, room)
    _refuse_too_small(plan, room, options)
    _refuse_too_large(num_blocks * options.block_size * _shares(geometry), seqs * (wanted_len + 1))
    return plan


def plan_draft(
    target: BytePlan,
    model: TransformersModel | LlamaModel,
    geometry: KvGeometry,
    model_limit: int,
    options: MemoryOptions,
) -> BytePlan:
    """Return the byte plan of a draft model beside its target's: as many tokens of K/V, or as many as there is room
    for. Its layers are one group. Raises InvalidConfig, with the numbers, when not one sequence of the target's longest
    fits.
    """
    length, seqs = min(model_limit, target.max_model_len), target.max_num_seqs
    sized = replace(options, max_num_seqs=seqs, max_model_len=length, drafts=0, pooled_tokens=0)
    activations, table = _activations(model, geometry, sized), 4 * seqs * (length + 1)
    block, least = bytes_per_block(geometry, target.block_size), -(-length // target.block_size)
    room = target.left - activations - table
    whole = -(-target.max_model_len // target.block_size)
    as_many = whole * target.sequences_of(target.max_model_len) if target.groups else target.num_blocks
    num_blocks = min(max(as_many, least), max(0, room) // block)
    if num_blocks < least:
        what = (
            f"its K/V of one sequence of {length} tokens takes {in_words(least * block)}, its steps"
            f" {in_words(activations + table)}, and {in_words(target.left)} are left on {target.device}; lower"
            " --max-model-len or --kv-memory, or leave it out"
        )
        raise InvalidConfig(FieldViolation("--draft-model", what))
    return replace(
        target,
        free=target.left,
        weights=_weights(model),
        activations=activations,
        token_table=table,
        block_bytes=block,
        num_blocks=num_blocks,
        kv_dtype=geometry.dtype,
        model_limit=model_limit,
        max_model_len=length,
        window=geometry.window,
        state_bytes=0,
        drafted_states=0,
        groups=(),
        host_frames=0,
    )


def _host_frames(
    model: TransformersModel | LlamaModel, geometry: KvGeometry, options: MemoryOptions
) -> tuple[int, int]:
    """Return the frames of host memory, and the bytes of each. Raises InvalidConfig where it keeps nothing."""
    if not options.host_memory:
        return 0, 0
    refuse_tiers(geometry, model.states is not None, options.disk_cache, options.needs_peers)
    frame, there = frame_bytes(geometry, options.block_size), host_memory.available_bytes()
    if options.host_memory > there:
        what = f"is {in_words(options.host_memory)}, and {in_words(there)} of the host's memory are free; ask for less"
        raise InvalidConfig(FieldViolation("--host-memory", what))
    frames = min(options.host_memory // frame, MAX_WORKER_BLOCKS)
    if not frames:
        unit = "page" if geometry.groups else "block"
        what = f"is {in_words(options.host_memory)}, and a {unit} takes {in_words(frame)}; ask for more"
        raise InvalidConfig(FieldViolation("--host-memory", what))
    return frames, frame


def _weights(model: TransformersModel | LlamaModel) -> int:
    return weight_bytes(model.module) if isinstance(model, TransformersModel) else model.weight_bytes


def mapped_weight_bytes() -> int:
    """Return the bytes of weights on pages of their files: they are in memory, but the system can drop them."""
    return sum(each.rss for each in psutil.Process().memory_maps() if each.path.endswith((".safetensors", ".gguf")))


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
    if not block:
        if options.kv_memory is not None:
            raise InvalidConfig(FieldViolation("--kv-memory", NO_KV_MEMORY))
        return blocks_without_kv(options.max_num_seqs or 1, options.max_model_len or 1, options.block_size)
    if options.kv_memory is not None:
        return options.kv_memory // block
    if device.type == "cuda":
        return max(0, room) // block
    return max(0, min(_CPU_KV_BYTES, int(_CPU_KV_FRACTION * room))) // block


def most_sequences(model: TransformersModel | LlamaModel, usual: int, drafts: int = 0) -> int:
    """Return how many sequences run at most where no option says it: the usual number, or fewer of large states.

    Each of the drafts of a step has states too.
    """
    if model.states is None:
        return usual
    fit = int(_STATES_FRACTION * free_bytes(model.device)) // max(1, model.states.bytes_a_sequence)
    return max(1, min(usual, fit - drafts))


def _refuse_too_many_states(plan: BytePlan, room: int) -> None:
    if plan.states and room < plan.block_bytes:
        drafts = f" and {plan.drafted_states} drafts" if plan.drafted_states else ""
        what = (
            f"{plan.max_num_seqs} sequences{drafts} keep states of {in_words(plan.state_bytes)} each,"
            f" {in_words(plan.states)} in all, and {in_words(max(0, room + plan.states))} may be taken on"
            f" {plan.device}; lower it{', or leave out --speculative' if drafts else ''}"
        )
        raise InvalidConfig(FieldViolation("--max-num-seqs", what))


def _refuse_too_large(slots: int, places: int) -> None:
    """Refuse pools whose slots, or tables whose places, a step could not name."""
    for flag, count in (("--kv-blocks", slots), ("--max-num-seqs", places)):
        if count > _MOST:
            what = f"asks for {count} tokens in all; kernels count them in 32 bits, up to {_MOST}"
            raise InvalidConfig(FieldViolation(flag, what))


def _shares(geometry: KvGeometry) -> int:
    """Return how many blocks of the smallest layers a page has in a lane: kernels number these."""
    return max(shares for _, shares in page_layout(geometry).shapes) if geometry.groups else 1


def _refuse_too_small(plan: BytePlan, room: int, options: MemoryOptions) -> None:
    block, kv = in_words(plan.needed(1) * plan.block_bytes), in_words(plan.kv)
    several = "pages" if plan.groups else "blocks"
    flag = "--kv-memory" if options.kv_memory is not None else "--kv-blocks"
    if plan.num_blocks < plan.needed(1):
        has = in_words(room if options.kv_memory is None else options.kv_memory)
        what = f"no block fits: one takes {block} and {has} may be taken; give more, or use a smaller --block-size"
        raise InvalidConfig(FieldViolation(flag, what))
    if plan.kv > room:
        what = f"{plan.num_blocks} {several} take {kv}; {in_words(room)} may be taken on {plan.device}"
        raise InvalidConfig(FieldViolation(flag, what))
    if options.max_model_len is not None and plan.max_model_len < options.max_model_len:
        needed = plan.needed(options.max_model_len)
        what = (
            f"one sequence of {options.max_model_len} tokens takes {needed} {several}"
            f" ({in_words(needed * plan.block_bytes)}); the KV cache has {plan.num_blocks} ({kv}), enough for"
            f" {plan.max_model_len} tokens"
        )
        raise InvalidConfig(FieldViolation("--max-model-len", what))


def _activations(model: TransformersModel | LlamaModel, geometry: KvGeometry, options: MemoryOptions) -> int:
    if isinstance(model, LlamaCpuModel):
        kept = options.pooled_tokens or _logits_rows(model, options)
        return model.scratch_bytes(options.max_num_batched_tokens, kept) + _result_bytes(model, options)
    return _measure_activations(model, options) if model.device.type == "cuda" else _estimate(model, geometry, options)


def _logits_rows(model: TransformersModel | LlamaModel, options: MemoryOptions) -> int:
    """Return how many rows of logits a step has at most: those that sample, and those that score prompts."""
    return (options.max_num_seqs or 0) + options.drafts + max_scored_tokens(model.vocab_size)


def _result_bytes(model: TransformersModel | LlamaModel, options: MemoryOptions) -> int:
    """Return the bytes of a step's logits, or of the hidden states of two steps in flight and of one that is pooled."""
    if options.pooled_tokens:
        return 3 * 4 * options.pooled_tokens * model.hidden_size
    return _LOGITS_BYTES * _logits_rows(model, options) * model.vocab_size


def _estimate(model: TransformersModel | LlamaGpuModel, geometry: KvGeometry, options: MemoryOptions) -> int:
    """Return the bytes that a step needs on CPU, from shapes.

    Hidden states and MLP of all tokens; one layer's K/V gathered for the longest context, with its mask; logits. Where
    layers attend by index, also what an indexer scores at once, and which positions it chooses.
    """
    config, tokens, context = model.config, options.max_num_batched_tokens, options.max_model_len or 0
    hidden = _size(config, "hidden_size")
    inner = _size(config, "intermediate_size") or 4 * hidden
    inner = max(inner, _size(config, "num_experts_per_tok") * _size(config, "moe_intermediate_size"))
    gathered = 4 * context * numbers_a_layer(geometry)
    for pool in pools_of(geometry):
        if pool.geometry.values_in_keys:
            # Queries and results of every head are as wide as latents, in the model's type and as floats.
            wide = _size(config, "num_attention_heads") * (pool.geometry.head_dim_k + pool.geometry.head_dim_v)
            gathered += tokens * wide * (4 + model.dtype.itemsize)
            if pool.index is None and geometry.dtype not in SCALED:
                gathered += _whole_prompts(config, tokens, options.max_num_seqs or 0) * model.dtype.itemsize
    if any(pool.index is not None for pool in pools_of(geometry)):
        # Scores before and after their relu, and the keys of all rows; indices twice, in 64 bits.
        gathered += 3 * 4 * MAX_INDEX_SCORES + 2 * 8 * tokens * min(context, _size(config, "index_topk"))
    # Masks as booleans, and as the floats that torch converts them to.
    mask = 5 * min(tokens * context, MAX_MASK) if geometry.num_layers else 0
    results = _result_bytes(model, options)
    return tokens * (8 * hidden + 3 * inner) * model.dtype.itemsize + gathered + mask + results


def _whole_prompts(config: PretrainedConfig, tokens: int, seqs: int) -> int:
    """Return the numbers of K and V of every head of the prompts in a step, as `WholePrompts` lays them out at most.

    Each prompt takes whole blocks, and blocks are twice as many at most as are needed.
    """
    parts = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    slots = 2 * (tokens + WHOLE_PROMPTS_BLOCK * min(seqs, tokens))
    return slots * _size(config, "num_attention_heads") * sum(_size(config, part) for part in parts)


def _size(config: PretrainedConfig, name: str) -> int:
    """Return a size of the configuration, the largest where each layer has its own; 0 without it."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        layers: Any = config
        return max(_size(each, name) for each in layers.per_layer_config)
    found = getattr(config, name, 0) or 0
    return max(map(int, found), default=0) if isinstance(found, list | tuple) else int(found)


def _measure_activations(model: TransformersModel | LlamaGpuModel, options: MemoryOptions) -> int:
    """Return the peak of a forward over a full step, in bytes, beside weights; attention runs without a cache."""
    device = model.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    tokens = torch.arange(options.max_num_batched_tokens, device=device)
    positions = tokens % (options.max_model_len or 1)  # a model has rope angles, or position embeddings, of no more
    logits = model.forward(torch.zeros_like(tokens), positions, tokens[: _logits_rows(model, options)], CallRecorder())
    peak = torch.cuda.max_memory_allocated(device) - before
    sampling = 4 * logits.numel() * logits.itemsize
    del logits
    torch.cuda.empty_cache()
    return int(peak + sampling)
