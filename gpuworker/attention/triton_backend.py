"""The attention backend in Triton: plans a step once, then launches two to four kernels a layer.

For CUDA graphs, `begin_padded` in place of `begin` keeps the plan of a step of decodes in buffers that never move. The
plan is padded to what any step of as many rows may need. Capture one graph for each number of rows and `Launches` that
it returns, and replay it after `begin_padded` has returned these again. The tensors of the step's `DeviceTables` must
stay where they were captured. A padding row has context 0 and slot -1, and attends to nothing: its output is zero.
"""

from __future__ import annotations

import torch

from common.contracts.errors import Unsupported
from gpuworker.attention.interface import AttentionMetadata, LayerAttention
from gpuworker.attention.triton_attend import LOG2_E, attend_kernel, merge_kernel
from gpuworker.attention.triton_plan import DevicePlan, Launches, PlanBuffers, Room
from gpuworker.attention.triton_tuning import Chip, Heads, KernelShape, Tuning, chip_of, tuning
from gpuworker.attention.work_list import WorkList, work_list
from gpuworker.kernels.rope import Rope
from gpuworker.kernels.triton_cache import bytes_of, scales_of, write_kv
from gpuworker.kernels.triton_rope import QkNorm, rope_and_write
from gpuworker.memory.byte_plan import bytes_per_block
from gpuworker.memory.kv_cache import KvCache

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
        assert cache.values.is_contiguous()
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
        keys, values, key_scales, value_scales = self._pools[layer.layer]
        heads, table, softcap = plan.heads, self._step.device.block_table, layer.softcap
        attend_kernel[(len(items) * heads.num_kv_heads,)](
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
            layer.window or 0,
            1.0,
            GROUP=heads.group,
            KV_HEADS=heads.num_kv_heads,
            HEAD_DIM_K=heads.head_dim_k,
            HEAD_DIM_V=heads.head_dim_v,
            TILE_K=heads.tile_k,
            TILE_V=heads.tile_v,
            BLOCK_SIZE=self._cache.block_size,
            BLOCK_M=shape.block_m,
            TILE=shape.tile,
            ONE_QUERY=items is plan.single,
            WINDOWED=layer.window is not None,
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
