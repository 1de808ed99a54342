"""Paged attention on CPUs by the native library (gpuworker/native/attention.h), called through ctypes.

Decodes stream K and V once for all query heads that share them. Prefills are tiles of queries against tiles of keys.
Decodes whose rows begin with the same blocks read those once. The C++ code plans a step once for all layers.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from dataclasses import replace

import torch

from gpuworker.attention.interface import AttentionMetadata, Int32Array, LayerAttention
from gpuworker.memory.kv_cache import KvCache
from gpuworker.native import library as native
from gpuworker.native.library import NativeUnavailable

TYPES: Mapping[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_MAX_HEAD_DIM = 1024

_int32, _int64, _float, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class CacheStruct(ctypes.Structure):
    """quire_cache of quire_cpu.h."""

    _fields_ = (
        ("keys", _pointer),
        ("values", _pointer),
        ("key_scales", _pointer),
        ("value_scales", _pointer),
        ("type", _int32),
        ("num_layers", _int32),
        ("num_blocks", _int32),
        ("num_kv_heads", _int32),
        ("block_size", _int32),
        ("head_dim_k", _int32),
        ("head_dim_v", _int32),
        ("value_stride", _int32),
    )


class StepStruct(ctypes.Structure):
    """quire_step of quire_cpu.h."""

    _fields_ = (
        ("num_rows", _int32),
        ("num_tokens", _int32),
        ("num_decodes", _int32),
        ("max_blocks", _int32),
        ("query_start", _pointer),
        ("context_len", _pointer),
        ("block_table", _pointer),
        ("slot_mapping", _pointer),
    )


class LayerStruct(ctypes.Structure):
    """quire_layer of quire_cpu.h."""

    _fields_ = (
        *(("layer", _int32), ("window", _int32), ("chunk", _int32)),
        *(("scale", _float), ("softcap", _float), ("sinks", _pointer)),
    )


class RowsStruct(ctypes.Structure):
    """quire_rows of quire_attention.h."""

    _fields_ = (("data", _pointer), ("token_stride", _int64), ("head_stride", _int64), ("type", _int32))


_NOT_WRITTEN = RowsStruct(None, 0, 0, 0)


def cache_struct(cache: KvCache) -> CacheStruct:
    """Return the pools as C sees them; the pools must outlive the result.

    Raises NativeUnavailable for a cache that the library cannot read.
    """
    geometry = cache.geometry
    if cache.keys.device.type != "cpu" or cache.keys.dtype not in TYPES:
        raise NativeUnavailable(f"no native kernels for a cache of {cache.keys.dtype} on {cache.keys.device}")
    if max(geometry.head_dim_k, geometry.head_dim_v) > _MAX_HEAD_DIM:
        raise NativeUnavailable(f"no native kernels for heads wider than {_MAX_HEAD_DIM}")
    pools = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    return CacheStruct(
        *(None if pool is None else pool.data_ptr() for pool in pools),
        TYPES[cache.keys.dtype],
        geometry.num_layers,
        cache.num_blocks,
        geometry.num_kv_heads,
        cache.block_size,
        geometry.head_dim_k,
        geometry.head_dim_v,
        cache.values.stride(3),
    )


def runs(cache: KvCache) -> bool:
    fits = cache.keys.dtype in TYPES and max(cache.geometry.head_dim_k, cache.geometry.head_dim_v) <= _MAX_HEAD_DIM
    return fits and cache.keys.device.type == "cpu" and native.best() is not None


def step_struct(step: AttentionMetadata) -> StepStruct:
    """Return the step as C sees it; the step's arrays must outlive the result."""
    arrays = (step.query_start, step.context_len, step.block_table, step.slot_mapping)
    table = step.block_table
    return StepStruct(
        step.num_rows, step.num_tokens, step.num_decodes, table.shape[1], *(_address(array) for array in arrays)
    )


def layer_struct(layer: LayerAttention) -> LayerStruct:
    """Return the layer as C sees it; its sinks (float32, contiguous) must outlive the result."""
    sinks = None if layer.sinks is None else layer.sinks.data_ptr()
    reach = layer.window or 0, layer.chunk or 0
    return LayerStruct(layer.kept_at, *reach, layer.scale, layer.softcap or 0.0, sinks)


def rows_struct(tensor: torch.Tensor) -> RowsStruct:
    """Return a [T, heads, d] tensor, contiguous along d, as C sees it; the tensor must outlive the result."""
    return RowsStruct(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), TYPES[tensor.dtype])


class NativeAttention:
    """Implements `gpuworker.attention.interface.AttentionBackend`."""

    def __init__(
        self, cache: KvCache, deterministic: bool = False, threads: int = 0, library: ctypes.CDLL | None = None
    ) -> None:
        """Bind to a cache. `threads` 0 means torch's number when a step begins; `library` None means the best one.

        Raises NativeUnavailable where there is no library, or none for this cache.
        """
        loaded = library or native.best()
        if loaded is None:
            raise NativeUnavailable("no native library")
        self._library = bind(loaded)
        self.deterministic, self._threads = deterministic, threads
        self._pools = cache
        self.cache = cache_struct(cache)
        self.plan = _pointer(self._library.quire_attention_new())
        weakref.finalize(self, self._library.quire_attention_free, self.plan)

    def begin(self, step: AttentionMetadata) -> None:
        """Keep the step; the first layer gives the number of heads, and only then the work list is made."""
        self._held = step
        self.step = step_struct(step)
        self._planned_heads = 0

    def plan_step(self, num_heads: int) -> None:
        """Start the plan of the step: for code that attends inside a team of its own (attention.h)."""
        self._planned_heads = num_heads
        threads = self._threads or torch.get_num_threads()
        self._library.quire_attention_begin(self.plan, self.cache, self.step, num_heads, threads, self.deterministic)

    def write_and_attend(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if query.shape[1] != self._planned_heads:
            self.plan_step(query.shape[1])
        if layer.sinks is not None:
            layer = replace(layer, sinks=layer.sinks.float().contiguous())
        out = query.new_empty((*query.shape[:2], self.cache.head_dim_v))
        tensors = [each if each.stride(2) == 1 else each.contiguous() for each in (query, key, value, out)]
        rows = list(map(rows_struct, tensors))
        if layer.source is not None:
            rows[1] = _NOT_WRITTEN
        self._library.quire_attention_layer(self.plan, layer_struct(layer), *rows)
        return out


def _address(array: Int32Array) -> int:
    if not array.flags.c_contiguous:
        raise ValueError("the step's arrays must be contiguous")
    return array.ctypes.data


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the functions of quire_attention.h on the library, and return it."""
    cache, step, layer, rows = map(ctypes.POINTER, (CacheStruct, StepStruct, LayerStruct, RowsStruct))
    functions = {
        "quire_attention_new": ((), _pointer),
        "quire_attention_free": ((_pointer,), None),
        "quire_attention_begin": ((_pointer, cache, step, _int32, _int32, _int32), None),
        "quire_attention_layer": ((_pointer, layer, rows, rows, rows, rows), None),
        "quire_read": ((_pointer, _int64, _int32), _float),
    }
    for name, (arguments, result) in functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library
