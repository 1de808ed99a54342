"""Turns the rows of a step into the arrays that kernels read: numpy on the host, then one transfer to the device.

The engine's thread does this while the previous step runs, so the work does not delay the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from gpuworker.attention.interface import AttentionMetadata, DeviceTables, Int32Array
from gpuworker.memory.devices import sent
from gpuworker.memory.layout import Part


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A step's rows one after the other: R rows, T tokens. All int32, on the host.

    Where layers are groups, `others` has the table and the slots of each part but the first one.
    """

    query_start: Int32Array  # [R + 1]
    context_len: Int32Array  # [R]
    block_table: Int32Array  # [R, max_blocks]
    row_of_token: Int32Array  # [T]
    positions: Int32Array  # [T]
    slot_mapping: Int32Array  # [T]
    others: tuple[tuple[Int32Array, Int32Array], ...] = ()


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


def pack_pages(
    start: Int32Array, length: Int32Array, tables: Sequence[Int32Array], parts: Sequence[Part], block_size: int
) -> PackedRows:
    """Lay out rows as `pack_rows` does on groups of layers; `tables` has the pages of each, [R, blocks * pages]."""
    blocks = [_blocks(part, tables[part.group]) for part in parts]
    rows = pack_rows(start, length, blocks[0], block_size)
    column, offset = np.divmod(rows.positions, np.int32(block_size))
    others = [(table, table[rows.row_of_token, column] * np.int32(block_size) + offset) for table in blocks[1:]]
    return replace(rows, others=tuple(others))


def _blocks(part: Part, pages: Int32Array) -> Int32Array:
    """Return the block table [R, blocks] of a part."""
    found = pages[:, part.page :: part.pages]
    if part.shares > 1:
        found = found * np.int32(part.shares) + np.int32(part.share)
    return np.ascontiguousarray(found)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step for the runner's thread, on the device; all tensors int64."""

    metadata: AttentionMetadata
    positions: torch.Tensor  # [T]
    take: torch.Tensor  # [T], where each token stands in the token table
    keep: torch.Tensor  # [S + K], index of each token whose logits are wanted; [K], of those that are pooled
    put: torch.Tensor  # [S], the places of the samples in the token table


_NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step's arrays on the host, ready for the device. `samples` [R] marks the rows that sample.

    The logits of further tokens are wanted, too: those at `scored`.
    """

    rows: PackedRows
    batch_index: Int32Array  # [R]
    samples: npt.NDArray[np.bool_]  # [R]
    table_width: int
    scored: Int32Array = field(default_factory=lambda: _NO_TOKENS)  # [K]
    pooled: Int32Array | None = None  # [K], index of each token whose hidden state is pooled; no row samples then

    @property
    def keep(self) -> Int32Array:
        """Index of the last token of each row that samples [S], then of those that are scored [K].

        Where tokens are pooled, it is their index alone.
        """
        if self.pooled is not None:
            return self.pooled
        kept: Int32Array = self.rows.query_start[1:][self.samples] - np.int32(1)
        return np.concatenate((kept, self.scored)) if len(self.scored) else kept

    def on(self, device: torch.device) -> StepInputs:
        """Move the step to the device; on CPU nothing moves, elsewhere the transfer waits behind the running work."""
        rows = self.rows
        first = self.batch_index.astype(np.int64) * self.table_width  # of each row in the token table
        take = first[rows.row_of_token] + rows.positions
        put = (first + rows.context_len)[self.samples]
        if device.type == "cpu":
            tables = [torch.from_numpy(array) for array in attention_arrays(rows)]
            others = [
                torch.from_numpy(each)
                for each in (rows.positions.astype(np.int64), take, self.keep.astype(np.int64), put)
            ]
        else:
            small = [rows.positions, take.astype(np.int32), self.keep, put.astype(np.int32)]
            moved = to_device([*attention_arrays(rows), *small], device)
            tables, others = moved[: -len(small)], [each.long() for each in moved[-len(small) :]]
        return StepInputs(attention_metadata(rows, tables), *others)


def to_device(arrays: Sequence[Int32Array], device: torch.device) -> list[torch.Tensor]:
    """Return int32 tensors of the same shapes: without a copy on CPU, with a single transfer elsewhere."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    parts = torch.split(sent(packed, device), [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def attention_metadata(rows: PackedRows, tables: Sequence[torch.Tensor]) -> AttentionMetadata:
    """Join the host's arrays with their copies on the device, which stand in the order of `attention_arrays`."""
    length = np.diff(rows.query_start)
    decodes = int(np.argmax(length != 1)) if (length != 1).any() else len(length)
    query_start, context_len, block_table, slot_mapping, *others = tables
    step = AttentionMetadata(
        decodes,
        rows.query_start,
        rows.context_len,
        rows.block_table,
        rows.slot_mapping,
        DeviceTables(query_start, context_len, block_table, slot_mapping),
    )
    if not rows.others:
        return step
    parts = [
        replace(
            step,
            block_table=table,
            slot_mapping=slots,
            device=replace(step.device, block_table=on_device, slot_mapping=slots_there),
        )
        for (table, slots), on_device, slots_there in zip(rows.others, others[::2], others[1::2], strict=True)
    ]
    return replace(step, parts=(step, *parts))


def attention_arrays(rows: PackedRows) -> list[Int32Array]:
    """Return the arrays that attention reads on the device."""
    others = [array for part in rows.others for array in part]
    return [rows.query_start, rows.context_len, rows.block_table, rows.slot_mapping, *others]
