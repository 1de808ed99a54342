"""The attention backend in Triton: plans a step once, then launches two to four kernels a layer.

For CUDA graphs, `begin_padded` in place of `begin` keeps the plan of a step of decodes in buffers that never move. The
plan is padded to what any step of as many rows may need. Capture one graph for each number of rows and `Launches` that
it returns, and replay it after `begin_padded` has returned these again. The tensors of the step's `DeviceTables` must
stay where they were captured. A padding row has context 0 and slot -1, and attends to nothing: its output is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from common.contracts.errors import Unsupported
from gpuworker.attention.interface import AttentionMetadata, Int32Array, LayerAttention
from gpuworker.attention.triton_attend import LOG2_E, attend_kernel, merge_kernel
from gpuworker.attention.triton_tuning import Chip, Heads, KernelShape, Tuning, chip_of, tuning
from gpuworker.attention.work_list import ITEM_FIELDS, QUERY_FIELDS, WorkList, work_list
from gpuworker.kernels.rope import Rope
from gpuworker.kernels.triton_cache import bytes_of, scales_of, write_kv
from gpuworker.kernels.triton_rope import QkNorm, rope_and_write
from gpuworker.memory.byte_plan import bytes_per_block
from gpuworker.memory.kv_cache import KvCache


# Brings the work list of a step to the device, into memory that outlives the step.
@dataclass(frozen=True, slots=True)
class Launches:
    """The launches of a layer: items of one query, items of many, and queries whose parts may need merging."""

    single: int
    many: int
    merged: int


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A step's work list on the device, cut for one kind of layer."""

    heads: Heads
    tuning: Tuning
    launches: Launches
    single: torch.Tensor  # [launches.single, ITEM_FIELDS]
    many: torch.Tensor  # [launches.many, ITEM_FIELDS]
    queries: torch.Tensor  # [T, QUERY_FIELDS]
    partial_out: torch.Tensor  # [n, num_heads, head_dim_v] float32
    partial_lse: torch.Tensor  # [n, num_heads] float32


@dataclass(frozen=True, slots=True)
class Room:
    """The capacity for items and partial results: in a step of `queries` decodes, always enough."""

    queries: int
    single: int
    many: int
    partials: int

    @classmethod
    def of(cls, work: WorkList) -> Room:
        """Return the exact room of a work list."""
        return cls(len(work.queries), len(work.single), len(work.many), work.partials)

    @classmethod
    def for_decodes(cls, rows: int, tuning: Tuning) -> Room:
        """Return what any step of `rows` decodes takes; one with more shared prefixes than that is cut without them.

        Chunks are never shorter than the whole over the items wanted: each row adds one item to these at most.
        """
        stack = tuning.many_cut.queries
        single = rows + tuning.single_cut.items
        many = tuning.many_cut.items + 2 * -(-rows // stack) + 4
        return cls(rows, single, many, single + many * stack)

    def admits(self, work: WorkList) -> bool:
        return (
            len(work.queries) == self.queries
            and len(work.single) <= self.single
            and len(work.many) <= self.many
            and work.partials <= self.partials
        )

    @property
    def integers(self) -> int:
        """Size of the tables together."""
        return (self.single + self.many) * ITEM_FIELDS + self.queries * QUERY_FIELDS

    def launches(self, work: WorkList) -> Launches:
        """Return the launches of a work list that is padded to this room."""
        return Launches(self.single, self.many if len(work.many) else 0, self.queries if work.merged else 0)


class PlanBuffers:
    """Device memory for one plan at a time: its tables and its partial results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables = torch.empty(0, dtype=torch.int32, device=device)
        self._partials = torch.empty(0, dtype=torch.float32, device=device)

    @torch.inference_mode(False)  # a tensor made in that mode could be filled in no other
    def reserve(self, integers: int, floats: int) -> None:
        """Make room; the present contents are lost when the memory moves."""
        if not self.has(integers, 0):
            self._tables = torch.empty(2 * integers, dtype=torch.int32, device=self._device)
        if not self.has(0, floats):
            self._partials = torch.empty(floats, dtype=torch.float32, device=self._device)

    def has(self, integers: int, floats: int) -> bool:
        return integers <= len(self._tables) and floats <= len(self._partials)

    def load(self, work: WorkList, room: Room, launches: Launches, tuning: Tuning, heads: Heads) -> DevicePlan:
        """Move a work list to the device, padded to `room`, behind the kernels that read the one before.

        One transfer; waits for nothing. Raises ValueError where the work list or the room for it does not fit.
        """
        floats = heads.partial_floats(room.partials)
        if not room.admits(work) or not self.has(room.integers, floats):
            raise ValueError(f"a plan of {Room.of(work)} does not fit into {room}")
        host = torch.from_numpy(_packed(work, room))
        if self._device.type == "cuda":
            host = host.pin_memory()
        table = self._tables[: room.integers].copy_(host, non_blocking=True)
        sizes = (room.single * ITEM_FIELDS, room.many * ITEM_FIELDS, room.queries * QUERY_FIELDS)
        single, many, queries = table.split(sizes)
        out, lse = self._partials[:floats].split(
            (floats - room.partials * heads.num_heads, room.partials * heads.num_heads)
        )
        return DevicePlan(
            heads,
            tuning,
            launches,
            single.view(-1, ITEM_FIELDS),
            many.view(-1, ITEM_FIELDS),
            queries.view(-1, QUERY_FIELDS),
            out.view(room.partials, heads.num_heads, heads.head_dim_v),
            lse.view(room.partials, heads.num_heads),
        )


def _packed(work: WorkList, room: Room) -> Int32Array:
    """Return the three tables behind each other; items that pad have no row."""
    packed = np.full(room.integers, -1, dtype=np.int32)
    at = 0
    for table, rows in ((work.single, room.single), (work.many, room.many), (work.queries, room.queries)):
        packed[at : at + table.size] = table.ravel()
        at += rows * table.shape[1]
    return packed


# What attending a shared prefix apart must save a layer, in bytes of K and V. The kernels that it adds take about as
# long as reading this much.
CASCADE_BYTES = 16 << 20
# Parts that a program of the merge reads at once.
MERGED_AT_ONCE = 16


class TritonAttention:
    """Implements `gpuworker.attention.interface.AttentionBackend` on CUDA, and in Triton's interpreter on the CPU.

    `chip` and `cascade_bytes` (None: no cascade) replace what the device says and what pays off, for tests and benches;
    `tuned` replaces the choice of tiles.
    """

    def __init__(
        self,
        cache: KvCache,
        *,
        chip: Chip | None = None,
        tuned: Tuning | None = None,
        cascade_bytes: int | None = CASCADE_BYTES,
    ) -> None:
        assert cache.keys.is_contiguous()
        assert cache.geometry.values_in_keys or cache.values.is_contiguous()
        self._cache, self._device = cache, cache.keys.device
        self._chip, self._tuned = chip or chip_of(self._device), tuned
        self._tunings: dict[Heads, Tuning] = {}
        native_fp8 = self._chip.capability >= 89
        pools = [
            (keys, values) if native_fp8 else (bytes_of(keys), bytes_of(values)) for keys, values in _layers(cache)
        ]
        self._pools = [(*pool, *scales_of(cache, layer)) for layer, pool in enumerate(pools)]
        per_slot = bytes_per_block(cache.geometry, 1) // cache.geometry.num_layers
        self._worth = None if cascade_bytes is None else -(-cascade_bytes // per_slot)
        self._buffers, self._padded_buffers = PlanBuffers(self._device), PlanBuffers(self._device)
        self._step: AttentionMetadata | None = None
        self._plan: DevicePlan | None = None

    def begin(self, step: AttentionMetadata) -> None:
        """Plan the step for layers like the last one that attended; layers of another kind plan again."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._step, last, self._plan = step, self._plan, None
        if last is not None and step.num_tokens:
            self._plan = self._planned(step, last.heads)

    def reserve_padded(self, rows: int, num_heads: int, dtype: torch.dtype) -> None:
        """Make room for padded steps of up to `rows` rows, for queries of this type; before the first graph."""
        heads = self._heads(num_heads, dtype)
        room = Room.for_decodes(rows, self._tuning(heads))
        self._padded_buffers.reserve(room.integers, heads.partial_floats(room.partials))

    def begin_padded(self, step: AttentionMetadata, num_heads: int, dtype: torch.dtype) -> Launches:
        """Plan a step of decodes alone for a CUDA graph, outside of the graph; return the key of its graph.

        Raises ValueError where the step has prefills or exceeds the reserved rows.
        """
        if step.num_decodes != step.num_rows:
            raise ValueError("only steps of decodes are padded")
        heads = self._heads(num_heads, dtype)
        tuned = self._tuning(heads)
        room = Room.for_decodes(step.num_rows, tuned)
        work = self._work_list(step, tuned, self._worth)
        if not room.admits(work):
            work = self._work_list(step, tuned, None)
        self._step = step
        self._plan = self._padded_buffers.load(work, room, room.launches(work), tuned, heads)
        return self._plan.launches

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert self._step is not None
        if layer.source is None:
            write_kv(self._cache, layer.layer, self._step.device.slot_mapping, key, value)
        return self.attend(layer, query)

    def rope_write_and_attend(self, layer: LayerAttention, qkv: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Norm queries and keys, apply rope, write K and V, and attend, all from the fused qkv product.

        qkv [T, -1] has, for each token, its query heads, its key heads, its value heads.
        """
        assert self._step is not None
        slots = self._step.device.slot_mapping
        norm = None
        if rope.query_norm is not None and rope.key_norm is not None:
            norm = QkNorm(rope.query_norm, rope.key_norm, rope.eps)
        query = rope_and_write(self._cache, layer.layer, qkv, rope.table, rope.positions, slots, norm)
        return self.attend(layer, query)

    def attend(self, layer: LayerAttention, query: torch.Tensor) -> torch.Tensor:
        """Attend where K and V are written already (`gpuworker.kernels.triton_rope`). Shapes as `write_and_attend`.

        Raises Unsupported for a scale that is not positive.
        """
        assert self._step is not None
        if layer.scale <= 0:
            raise Unsupported(f"attention of layer {layer.layer} scales by {layer.scale}")
        if query.stride(-1) != 1:
            query = query.contiguous()
        tokens, num_heads, _ = query.shape
        out = query.new_empty((tokens, num_heads, self._cache.geometry.head_dim_v))
        if not tokens:
            return out
        plan, heads = self._plan, self._heads(num_heads, query.dtype)
        if plan is None or plan.heads != heads:
            plan = self._plan = self._planned(self._step, heads)
        if plan.launches.many:
            self._launch(plan, layer, plan.tuning.many, plan.many, query, out)
        if plan.launches.single:
            self._launch(plan, layer, plan.tuning.single, plan.single, query, out)
        if plan.launches.merged:
            _merge(plan, out)
        return out

    # ------------------------------------------------------------ planning

    def _heads(self, num_heads: int, dtype: torch.dtype) -> Heads:
        shape = self._cache.geometry
        sizes = (shape.head_dim_k, shape.head_dim_v, dtype.itemsize, self._cache.keys.itemsize)
        return Heads(num_heads, shape.num_kv_heads, *sizes)

    def _tuning(self, heads: Heads) -> Tuning:
        if heads not in self._tunings:
            self._tunings[heads] = self._tuned or tuning(self._chip, heads)
        return self._tunings[heads]

    def _work_list(self, step: AttentionMetadata, tuned: Tuning, worth: int | None) -> WorkList:
        return work_list(step, self._cache.block_size, tuned.single_cut, tuned.many_cut, worth)

    def _planned(self, step: AttentionMetadata, heads: Heads) -> DevicePlan:
        tuned = self._tuning(heads)
        work = self._work_list(step, tuned, self._worth)
        room = Room.of(work)
        self._buffers.reserve(room.integers, heads.partial_floats(room.partials))
        return self._buffers.load(work, room, Launches(room.single, room.many, work.merged), tuned, heads)

    # ------------------------------------------------------------ launching

    def _launch(
        self,
        plan: DevicePlan,
        layer: LayerAttention,
        shape: KernelShape,
        items: torch.Tensor,
        query: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        assert self._step is not None
        keys, values, key_scales, value_scales = self._pools[layer.kept_at]
        heads, table, softcap = plan.heads, self._step.device.block_table, layer.softcap
        attend_kernel[(len(items) * heads.stacks,)](
            query,
            keys,
            values,
            key_scales,
            value_scales,
            layer.sinks if layer.sinks is not None else query,
            out,
            plan.partial_out,
            plan.partial_lse,
            items,
            plan.queries,
            table,
            query.stride(0),
            query.stride(1),
            table.stride(0),
            layer.scale * LOG2_E if softcap is None else 2 * layer.scale / softcap,
            softcap or 0.0,
            layer.window or layer.chunk or 0,
            1.0,
            GROUP=heads.group,
            KV_HEADS=heads.num_kv_heads,
            SLICES=heads.slices,
            HEAD_DIM_K=heads.head_dim_k,
            HEAD_DIM_V=heads.head_dim_v,
            VALUE_STRIDE=values.stride(2),
            TILE_K=heads.tile_k,
            TILE_V=heads.tile_v,
            BLOCK_SIZE=self._cache.block_size,
            BLOCK_M=shape.block_m,
            TILE=shape.tile,
            ONE_QUERY=items is plan.single,
            WINDOWED=layer.window is not None or layer.chunk is not None,
            CHUNKED=layer.chunk is not None,
            SOFTCAPPED=softcap is not None,
            WITH_SINKS=layer.sinks is not None,
            QUANTISED=self._cache.key_scales is not None,
            HALVES=keys.itemsize == 1 and keys.dtype != torch.int8 and query.dtype != torch.float32,
            BY_WORDS=self._chip.capability >= 90,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )


def _layers(cache: KvCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(cache.keys, cache.values, strict=True))


def _merge(plan: DevicePlan, out: torch.Tensor) -> None:
    heads = plan.heads
    merge_kernel[(plan.launches.merged * heads.num_heads,)](
        plan.partial_out,
        plan.partial_lse,
        out,
        plan.queries,
        HEADS=heads.num_heads,
        HEAD_DIM_V=heads.head_dim_v,
        TILE_V=heads.tile_v,
        PARTS=MERGED_AT_ONCE,
        num_warps=4,
    )
