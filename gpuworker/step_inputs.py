"""Turns the rows of a step into the arrays that kernels read: in numpy on the host, then one transfer to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpuworker.attention import AttentionMetadata, DeviceTables, Int32Array


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A step's rows one after the other: R rows, T tokens. All int32, on the host."""

    query_start: Int32Array  # [R + 1]
    context_len: Int32Array  # [R]
    block_table: Int32Array  # [R, max_blocks]
    row_of_token: Int32Array  # [T]
    positions: Int32Array  # [T]
    slot_mapping: Int32Array  # [T]


def pack_rows(start: Int32Array, length: Int32Array, block_table: Int32Array, block_size: int) -> PackedRows:
    """Lay out rows that compute positions start[r] .. start[r] + length[r] - 1 on the blocks of block_table[r]."""
    rows = len(start)
    query_start = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(length, out=query_start[1:])
    row_of_token = np.repeat(np.arange(rows, dtype=np.int32), length)
    positions = np.arange(query_start[-1], dtype=np.int32) + (start - query_start[:-1])[row_of_token]
    column, offset = np.divmod(positions, np.int32(block_size))
    slots = block_table[row_of_token, column] * np.int32(block_size) + offset
    return PackedRows(query_start, start + length, block_table, row_of_token, positions, slots)


def to_device(arrays: Sequence[Int32Array], device: torch.device) -> list[torch.Tensor]:
    """Return int32 tensors of the same shapes: without a copy on CPU, with a single transfer elsewhere."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).pin_memory()
    parts = torch.split(packed.to(device, non_blocking=True), [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def attention_metadata(rows: PackedRows, tables: Sequence[torch.Tensor]) -> AttentionMetadata:
    """Join the host's arrays with their copies on the device, which stand in the order of `attention_arrays`."""
    length = np.diff(rows.query_start)
    decodes = int(np.argmax(length != 1)) if (length != 1).any() else len(length)
    return AttentionMetadata(
        decodes, rows.query_start, rows.context_len, rows.block_table, rows.slot_mapping, DeviceTables(*tables)
    )


def attention_arrays(rows: PackedRows) -> list[Int32Array]:
    """Return the arrays that attention reads on the device."""
    return [rows.query_start, rows.context_len, rows.block_table, rows.slot_mapping]
